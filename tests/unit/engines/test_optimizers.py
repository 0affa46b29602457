"""Optimizers of `--optimizer`: their words, their states, and what runs on shards of FSDP2."""

from __future__ import annotations

from typing import get_args

import pytest

from autopar.run.runtime import Optimizer
from search.engines.candidate import unsharded
from search.engines.huggingface.named_optimizers import (
    OPTIMIZERS,
    UNTIMED,
    WORDS,
    OptimizerName,
    name_of,
    of_narrow_weights,
    of_wide_weights,
    word_of,
)


def test_every_name_has_an_optimizer_or_no_known_time() -> None:
    assert {*get_args(OptimizerName)} == {*OPTIMIZERS, *UNTIMED}


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"adam-bf16"}))
def test_the_first_word_is_written_and_every_word_is_read(name: OptimizerName) -> None:
    one = OPTIMIZERS[name]
    assert word_of(one.optimizer) == one.words[0]
    assert all(WORDS[word] == one.optimizer for word in one.words)
    assert name_of(one.optimizer) == name


def test_unfused_adam_and_torchaos_have_their_own_words() -> None:
    assert word_of(Optimizer(fused=False)) == "adamw_torch"
    assert word_of(Optimizer(kind="adam8bit", torchao=True)) == "adamw_torch_8bit"


def test_shards_of_fsdp2_are_updated_by_few() -> None:
    """bitsandbytes#1633; Adafactor of transformers 5.24 with torch 2.13 raises RuntimeError."""
    alone = {name for name in OPTIMIZERS if unsharded(name)}
    assert alone == {*OPTIMIZERS} - {"adam", "adam-bf16", "adam8bit", "sgd"}


@pytest.mark.parametrize(
    ("name", "wide", "narrow"),
    [
        # weight, moments; bytes per parameter without scales
        ("adam", 4 + 8, 2 + 4),
        ("paged-adam", 4 + 8, 2 + 8),
        ("lion", 4 + 4, 2 + 4),
        ("sgd", 4, 2),
    ],
)
def test_weights_of_16_bits_narrow_the_moments_of_torch(
    name: OptimizerName, wide: int, narrow: int
) -> None:
    one = OPTIMIZERS[name].optimizer
    other = of_narrow_weights(one)
    assert one.master_bytes + one.moments_bytes == wide
    assert other.master_bytes == 0
    assert 2 + other.moments_bytes == narrow
    assert of_wide_weights(other) == one
