"""Activations on the host: what leaves by module, what comes back, and what its copies add."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.activations import (
    chunk_saved_bytes,
    layer_saved_bytes,
    offloaded_bytes,
    saved_parts,
)
from autopar.price.job import job_of_run
from autopar.price.oom_risk import kind_of
from autopar.price.step import step_time
from autopar.rates.parts.operations import machine_of
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention
from autopar.run.run import Run, legal, run_with_split
from autopar.run.runtime import ActivationOffload, ExpertKernels
from autopar.run.strategy import OFFLOADED
from search.engines.megatron.read import read_run
from tests.runs import llama, run_of, told, torch_run
from tests.step_cases import card_named, stack_named

SIZES: dict[str, Any] = {"layers": 4, "hidden": 4096, "width": 8192, "heads": 32, "vocab": 32000}
SIZES |= {"kv_heads": 8, "experts": Experts(number=8, per_token=2, width=2048)}
SIZES |= {"mixtures": (False, True, True, True)}
LATENT: dict[str, Any] = {
    "latent": LatentAttention(query_rank=512, kv_rank=256, key_width=128, rotary_width=64),
    "value_width": 128,
}
WORD = 4096 * 4096 * 2
"""Bytes of 4096 tokens of the model's width."""


def run(*modules: Any, latent: bool = False, **more: Any) -> Run:
    """Return one sequence of 4096 tokens on one GPU with modules on the host."""
    usual: dict[str, Any] = {"seq_length": 4096, "global_batch": 8, "offload": frozenset(modules)}
    usual["experts"] = ExpertKernels(dispatcher="alltoall", skew=1.0)
    return run_of(llama(**SIZES, **(LATENT if latent else {})), **{**usual, **more})


@pytest.mark.parametrize(
    ("modules", "sizes"),
    [
        # queries of 32 heads, keys and values of 8 each: 48 of 32 heads' width
        (("core_attn",), WORD * 48 // 32),
        # and what attention made, which is the next product's input
        (("core_attn", "attn_proj"), WORD * 48 // 32 + WORD),
        (("qkv_linear",), WORD),
        (("mlp_norm",), WORD),
        (("expert_fc1",), 2 * WORD),
        # two experts of half the width, gate and up
        (("moe_act",), 2 * WORD),
        # the norm in front of attention is a part of its product's kernel
        (("attn_norm",), 0),
    ],
)
def test_what_leaves_of_a_mixture(modules: tuple[str, ...], sizes: int) -> None:
    """By hand; softmax statistics are too small to go."""
    found, whole = run(*modules).rank_layers[-1], run().rank_layers[-1]
    assert offloaded_bytes(found) == sizes
    assert layer_saved_bytes(whole) - layer_saved_bytes(found) == sizes


def test_odds_are_those_of_offloads_where_something_leaves() -> None:
    """A norm in front of attention does not."""
    assert kind_of(run("qkv_linear")) == "offloaded"
    assert kind_of(run("attn_norm")) == "experts"


def test_a_dense_layer_has_fewer_modules() -> None:
    """Its norm is a part of its first product, and it has no experts."""
    for module in ("mlp_norm", "expert_fc1", "moe_act", "attn_norm"):
        assert offloaded_bytes(run(module).rank_layers[0]) == 0
    # with latents norms stand apart
    assert offloaded_bytes(run("attn_norm", latent=True).rank_layers[0]) == WORD


def test_a_fraction_and_a_threshold() -> None:
    """Half of it leaves; what has fewer elements than the threshold stays."""
    half = ActivationOffload(fraction=0.5)
    large = replace(half, least_elements=2 * 4096 * 4096 + 1)
    for offload, left in ((half, WORD), (large, 0)):
        assert offloaded_bytes(told(run("expert_fc1"), offload=offload).rank_layers[-1]) == left


def test_recomputed_modules_have_nothing_to_offload() -> None:
    """Scores that are made again are not kept, so they do not leave; nor do whole layers."""
    again = run("core_attn", recompute=frozenset({"core_attn"}))
    whole = run("core_attn", "moe_act", recompute="full")
    assert all(size for _, size in saved_parts(again.rank_layers[-1]))
    chunk = whole.strategy.stages[0][0]
    plain = run_with_split(whole, offload=frozenset())
    assert chunk_saved_bytes(whole, chunk) == chunk_saved_bytes(plain, chunk)
    assert all(block.offloaded_bytes == 0 for block in job_of_run(whole).blocks)


def test_the_peak_falls_by_what_leaves_and_does_not_come_back() -> None:
    """Of four layers three are gone where the last one's backward has its own again."""
    few, many = run("core_attn"), run()
    fallen = account_of(many).peak_bytes - account_of(few).peak_bytes
    assert 0 < fallen <= 4 * WORD * 48 // 32


def test_whole_layers_leave() -> None:
    """All of the first two, and nothing of the others."""
    found = run(offload=ActivationOffload(layers=2))
    chunk = found.strategy.stages[0][0]
    gone = chunk_saved_bytes(run(), chunk) - chunk_saved_bytes(found, chunk)
    dense, mixture = (layer_saved_bytes(layer) for layer in run().rank_layers[:2])
    assert gone == dense + mixture
    blocks = job_of_run(found).blocks
    assert [(block.number, block.offloaded_bytes) for block in blocks] == [
        (1, float(dense)),
        (1, float(mixture)),
        (2, 0.0),
    ]


def test_copies_hide_under_compute_as_far_as_the_link_allows() -> None:
    """A layer of much compute hides them; on a link of a hundredth they are all but seen."""
    card = card_named("h100-80gb")
    machine = machine_of(card, stack_named("megatron-core"))
    found = run("core_attn", "attn_proj")
    hidden = step_time(machine, job_of_run(found)).terms_s["offload"]
    slow = replace(card, more={**card.more, "host.bytes_per_s": 0.64e9})
    seen = step_time(replace(machine, card=slow), job_of_run(found))
    copied = sum(
        2 * block.number * block.offloaded_bytes / (0.64e9 * card.more["host.efficiency"])
        for block in job_of_run(found).blocks
    )
    plain = step_time(machine, job_of_run(run()))
    assert hidden == pytest.approx(0.0, abs=1e-3 * plain.total_s)
    # eight micro-batches, less what compute hides of them
    assert 8 * copied * 0.9 < seen.terms_s["offload"] < 8 * copied
    assert sum(seen.terms_s.values()) == pytest.approx(seen.total_s)


_ARGUMENTS: dict[str, Any] = {
    "--num-layers": 4,
    "--hidden-size": 4096,
    "--num-attention-heads": 32,
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--bf16": True,
    "--vocab-size": 32000,
}


def test_arguments_of_megatron_are_read() -> None:
    """Modules with a fraction, or layers; optimizer states as a share."""
    fine = read_run(
        _ARGUMENTS
        | {
            "--fine-grained-activation-offloading": True,
            "--offload-modules": ["core_attn", "attn_proj"],
            "--activation-offload-fraction": 0.8,
        },
        world_size=1,
    ).run
    assert fine.split.offload == {"core_attn", "attn_proj"}
    assert fine.runtime.offload == ActivationOffload(fraction=0.8)
    layers = read_run(_ARGUMENTS | {"--cpu-offloading-num-layers": 2}, world_size=1).run
    assert not layers.split.offload
    assert layers.runtime.offload == ActivationOffload(layers=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: run(offload=ActivationOffload(layers=1), pp=2), "needs pp 1"),
        (
            lambda: run(offload=ActivationOffload(layers=1), recompute="full"),
            "recomputation",
        ),
        (lambda: run(offload=ActivationOffload(layers=4)), "must be fewer than layers"),
        (lambda: legal(told(run("core_attn"), offload=ActivationOffload(layers=1))), "not both"),
        (
            lambda: torch_run(llama(**SIZES), offload=frozenset({"core_attn"})),
            "needs Megatron-Core",
        ),
        (
            lambda: read_run(
                _ARGUMENTS
                | {"--fine-grained-activation-offloading": True, "--offload-modules": ["mlp"]},
                world_size=1,
            ),
            "got mlp",
        ),
    ],
)
def test_what_megatron_refuses_is_refused(wrong: Any, said: str) -> None:
    """As its configuration does (transformer_config.py)."""
    with pytest.raises(InputError, match=said):
        wrong()


def test_all_modules_are_known() -> None:
    """Each of them takes something of a layer with experts and latents."""
    for module in OFFLOADED:
        modules = {module, "core_attn"} if module == "attn_proj" else {module}
        assert offloaded_bytes(run(*modules, latent=True).rank_layers[-1]) > 0
