"""What torch's layers save, against numbers made by hand for a layer of Llama 3 8B.

Widths in bytes of 16 bits a token: 8192 of the model and of queries, 2048 of keys and of values,
28672 of the MLP; 128 of the softmax (4 a head).
"""

from __future__ import annotations

from typing import Any

import pytest

from autopar.price import sharded_peak
from autopar.price.account import account_of
from autopar.price.torch_layers import (
    backward_gradients_bytes,
    chunk_saved_bytes,
    gemm_outputs,
    input_bytes,
    loss_bytes,
    parts_without_recompute,
    recompute_bytes,
)
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.run import Run, run_with_split
from autopar.training.adapters import Adapters
from search.engines.huggingface.models import flavour
from tests.runs import decoder, torch_run

H, KV, F, ROWS = 8192, 2048, 28672, 128
TOKENS, LAYERS = 8192, 32


def _run(tp: int = 1, **more: Any) -> Run:
    model = flavour("llama3", "8B")
    assert model is not None
    return torch_run(model, gpus=8, tp=tp, sequence_parallel=tp > 1, seq_length=TOKENS, **more)


def _saved(run: Run) -> int:
    """Return the bytes of a token and a layer."""
    total = chunk_saved_bytes(run, run.strategy.stages[0][0])
    assert total % (TOKENS * LAYERS) == 0
    return total // (TOKENS * LAYERS)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        # two norms (input, output, a row's 4), q k v, output, softmax, and four of the MLP's width
        ({}, 2 * (2 * H + 4) + H + 2 * KV + H + ROWS + 4 * F),
        # keys and values of all heads
        ({"repeated_heads": True}, 2 * (2 * H + 4) + 3 * H + H + ROWS + 4 * F),
        # the partitioner makes the activation again
        ({"compiled": True}, 2 * (2 * H + 4) + H + 2 * KV + H + ROWS + 3 * F),
        # norms that are written out keep fp32 of their input and of what they normed
        ({"fused_norms": False}, 2 * (2 * H + 2 * H + H + 4) + H + 2 * KV + H + ROWS + 4 * F),
        # transformers' keep the second in 16 bits
        ({"module": "transformers"}, 2 * (2 * H + H + H + 4) + H + 2 * KV + H + ROWS + 4 * F),
        # input, attention, query, value, gate; and what no backward needs where nobody looks
        ({"recompute": "op"}, H + H + ROWS + H + KV + F + H),
        ({"recompute": "op", "compiled": True}, H + H + ROWS + H + KV + F),
        ({"recompute": "full"}, H),
    ],
)
def test_a_layer_saves(more: dict[str, Any], expected: int) -> None:
    """As autograd's hooks and AOTAutograd's partitioner have shown (torch 2.13)."""
    assert _saved(_run(**more)) == expected


def test_every_other_layer_is_the_mean_of_both() -> None:
    half = _saved(_run(every=2))
    assert 2 * half == _saved(_run()) + _saved(_run(recompute="full"))
    assert _saved(_run(every=1)) == H


def test_what_is_made_again_is_what_was_not_kept() -> None:
    """Of whole layers all but their input."""
    for way in ("op", "full"):
        run = _run(recompute=way, compiled=True)
        layer = run.rank_layers[0]
        whole = sum(size for _, size in parts_without_recompute(layer))
        assert recompute_bytes(layer) == whole - _saved(run) * TOKENS
    assert recompute_bytes(_run().rank_layers[0]) == 0


@pytest.mark.parametrize(("recompute", "residuals"), [(frozenset(), 1), ("full", 2)])
def test_gradients_of_a_backward(recompute: Any, residuals: int) -> None:
    """Of both products of the gate, of the residuals, and of the last matrix's weight."""
    found = backward_gradients_bytes(_run(recompute=recompute).rank_layers[0])
    assert found == TOKENS * (2 * F + residuals * H) + F * H // 2


def test_tensor_ranks_divide_what_is_between_gathers() -> None:
    """Inputs of products are whole on each of them, and sums are scattered."""
    run = _run(tp=2, recompute="op", compiled=True)
    layer = run.rank_layers[0]
    kept = (H // 2) + (H + ROWS + H + KV + F) // 2 + H // 2
    assert _saved(run) == kept
    assert input_bytes(layer) == TOKENS * H // 2
    names = [name for name, _ in gemm_outputs(layer)]
    assert names == ["query", "key", "value", "projection", "gate", "up", "down"]


@pytest.mark.parametrize(
    ("more", "tp", "each"),
    [
        ({}, 1, 12),
        ({"loss": "compiled"}, 1, 4),
        ({}, 2, 16 / 2),
        ({"loss_parallel": False}, 2, 12),
        ({"loss": "compiled"}, 2, 4 / 2),
    ],
)
def test_the_loss_is_bytes_of_a_logit(more: dict[str, Any], tp: int, each: float) -> None:
    assert loss_bytes(_run(tp, **more)) == TOKENS * 128256 * each


def test_a_loss_in_chunks_has_one_of_them() -> None:
    chunked = _run(loss="chunked", loss_chunks=8)
    assert loss_bytes(chunked) == TOKENS // 8 * 128256 * 12 + TOKENS * H


def test_experts_divide_by_their_own_ranks() -> None:
    """Weights of experts over EP and the ranks that are left of it, of the others over all."""
    model = flavour("deepseek_v3", "16B")
    assert model is not None
    assert model.experts is not None
    base = torch_run(model, gpus=64, ep=8, seq_length=4096, micro_batch=4, recompute="full")
    kept = {term.name: term.num_bytes for term in account_of(base).states}
    # fp32 shards of 15.7 billion parameters over 64 ranks, whatever the degree of experts
    assert kept["weights"] == pytest.approx(4 * 15.706e9 / 64, rel=0.02)
    # copies of everything on half of them
    twice = run_with_split(base, replicas=2)
    more = {term.name: term.num_bytes for term in account_of(twice).states}
    assert more["weights"] == pytest.approx(2 * kept["weights"], rel=0.01)


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("pattern", ["dm", "ddm", "mmdm"])
def test_a_periodic_model_peaks_at_its_ends(
    monkeypatch: pytest.MonkeyPatch, pattern: str, zero: int
) -> None:
    """Between its first and its last period the backward of no layer is the peak."""
    experts = Experts(number=8, width=3000, per_token=2)
    model = decoder(
        layers=60, mixtures=[one == "m" for one in pattern * (60 // len(pattern))], experts=experts
    )
    run = torch_run(model, gpus=4, zero=zero, module="torchtitan")
    short = [*sharded_peak.live_points(run, 0)]
    monkeypatch.setattr(sharded_peak, "_LONGEST_PERIOD", 0)
    every = [*sharded_peak.live_points(run, 0)]
    assert len(every) > 120
    assert len(short) < 60
    assert max(one.num_bytes for one in short) == max(one.num_bytes for one in every)


def test_gemms_of_adapters_are_counted_by_selective_recomputation() -> None:
    """torchtitan's `op` counts every matrix product in order: base, A and B, one for wqkv."""
    targets = frozenset({"query", "key", "value", "fc2"})

    def adapted(**more: Any) -> Run:
        run = _run(recompute="op", **more)
        adapters = Adapters(rank=8, targets=targets, fused="qkv")  # type: ignore[arg-type]
        return replace(run, runtime=replace(run.runtime, adapters=adapters))

    names = [name for name, _ in gemm_outputs(adapted().rank_layers[0])]
    assert names == [
        *("query", "query adapter A", "query adapter B", "projection", "gate", "up"),
        *("down", "down adapter A", "down adapter B"),
    ]
    # of these, every second output: query, B, gate, down, B; and input, attention and its softmax
    wide = H + 2 * KV
    assert _saved(adapted()) == H + H + ROWS + wide + wide + F + H + H
    # sums need no terms
    assert _saved(adapted(compiled=True)) == H + H + ROWS + wide + F
