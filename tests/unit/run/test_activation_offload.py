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
from autopar.price.step import step_time
from autopar.rates.parts.operations import machine_of
from autopar.records import replace
from autopar.run.launch import (
    Attention,
    Degrees,
    Experts,
    Latent,
    Launch,
    Model,
    Recompute,
    Software,
    TorchTrainer,
    even_chunks,
)
from autopar.training.offload import OFFLOADED, Offload
from search.check.job import job_of_launch
from search.engines.megatron.read import read_launch
from tests.step_cases import card_named, stack_named

MIXTURE = Model(
    hidden=4096,
    ffn=8192,
    attention=Attention(heads=32, groups=8, width=128, dropout=0.0),
    vocab=32000,
    expert_layers=(False, True, True, True),
    experts=Experts(number=8, per_token=2, ffn=2048, dispatcher="alltoall", skew=1.0),
    gated=True,
    biases=False,
    qkv_biases=False,
    tied=False,
    norm="rms",
    positions="rotary",
    hidden_dropout=0.0,
)
LATENT = Latent(query_rank=512, key_value_rank=256, key_width=128, rotary_width=64, value_width=128)
WORD = 4096 * 4096 * 2
"""Bytes of 4096 tokens of the model's width."""


def launch(*modules: Any, model: Model = MIXTURE, **options: Any) -> Launch:
    """Return one sequence of 4096 tokens on one GPU with modules on the host."""
    own = {name: options.pop(name) for name in [*options] if name in Degrees.__annotations__}
    chosen: dict[str, Any] = {"offload": Offload(modules=frozenset(modules))}
    return Launch(
        model=model,
        degrees=Degrees(
            **({"world": 1, "chunks": even_chunks(model.num_layers, own.get("pp", 1))} | own)
        ),
        seq=4096,
        micro_batch=1,
        global_batch=8,
        software=Software(gpu="H100", attention="fused"),
        **(chosen | options),
    )


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
    found = launch(*modules)
    assert offloaded_bytes(found, experts=True) == sizes
    kept = layer_saved_bytes(launch(), experts=True) - layer_saved_bytes(found, experts=True)
    assert kept == sizes


def test_a_dense_layer_has_fewer_modules() -> None:
    """Its norm is a part of its first product, and it has no experts."""
    for module in ("mlp_norm", "expert_fc1", "moe_act", "attn_norm"):
        assert offloaded_bytes(launch(module), experts=False) == 0
    # with latents norms stand apart
    model = replace(MIXTURE, attention=replace(MIXTURE.attention, latent=LATENT))
    assert offloaded_bytes(launch("attn_norm", model=model), experts=False) == WORD


def test_a_fraction_and_a_threshold() -> None:
    """Half of it leaves; what has fewer elements than the threshold stays."""
    half = Offload(modules=frozenset({"expert_fc1"}), fraction=0.5)
    assert offloaded_bytes(launch(offload=half), experts=True) == WORD
    large = replace(half, least_elements=2 * 4096 * 4096 + 1)
    assert offloaded_bytes(launch(offload=large), experts=True) == 0


def test_recomputed_modules_have_nothing_to_offload() -> None:
    """Scores that are made again are not kept, so they do not leave; nor do whole layers."""
    again = launch("core_attn", recompute=Recompute(modules=frozenset({"core_attn"})))
    whole = launch("core_attn", "moe_act", recompute=Recompute(layers="uniform", number=1))
    assert all(size for _, size in saved_parts(again, experts=True))
    chunk = whole.degrees.chunks[0][0]
    plain = replace(whole, offload=Offload())
    assert chunk_saved_bytes(whole, chunk) == chunk_saved_bytes(plain, chunk)
    assert all(block.offloaded_bytes == 0 for block in job_of_launch(whole).blocks)


def test_the_peak_falls_by_what_leaves_and_does_not_come_back() -> None:
    """Of four layers three are gone where the last one's backward has its own again."""
    few, many = launch("core_attn"), launch()
    fallen = account_of(many).peak_bytes - account_of(few).peak_bytes
    assert 0 < fallen <= 4 * WORD * 48 // 32


def test_whole_layers_leave() -> None:
    """All of the first two, and nothing of the others."""
    found = launch(offload=Offload(layers=2))
    chunk = found.degrees.chunks[0][0]
    gone = chunk_saved_bytes(launch(), chunk) - chunk_saved_bytes(found, chunk)
    dense, mixture = (layer_saved_bytes(launch(), experts=kind) for kind in (False, True))
    assert gone == dense + mixture
    blocks = job_of_launch(found).blocks
    assert [(block.number, block.offloaded_bytes) for block in blocks] == [
        (1, float(dense)),
        (1, float(mixture)),
        (2, 0.0),
    ]


def test_copies_hide_under_compute_as_far_as_the_link_allows() -> None:
    """A layer of much compute hides them; on a link of a hundredth they are all but seen."""
    card = card_named("h100-80gb")
    machine = machine_of(card, stack_named("megatron-core"))
    found = launch("core_attn", "attn_proj")
    hidden = step_time(machine, job_of_launch(found)).terms_s["offload"]
    slow = replace(card, more={**card.more, "host.bytes_per_s": 0.64e9})
    seen = step_time(replace(machine, card=slow), job_of_launch(found))
    copied = sum(
        2 * block.number * block.offloaded_bytes / (0.64e9 * card.more["host.efficiency"])
        for block in job_of_launch(found).blocks
    )
    plain = step_time(machine, job_of_launch(launch()))
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
    fine = read_launch(
        _ARGUMENTS
        | {
            "--fine-grained-activation-offloading": True,
            "--offload-modules": ["core_attn", "attn_proj"],
            "--activation-offload-fraction": 0.8,
        },
        world_size=1,
    ).launch
    assert fine.offload == Offload(modules=frozenset({"core_attn", "attn_proj"}), fraction=0.8)
    layers = read_launch(_ARGUMENTS | {"--cpu-offloading-num-layers": 2}, world_size=1).launch
    assert layers.offload == Offload(layers=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: launch(offload=Offload(layers=1), world=2, pp=2), "without a pipeline"),
        (
            lambda: launch(
                offload=Offload(layers=1), recompute=Recompute(layers="uniform", number=1)
            ),
            "without recomputation",
        ),
        (lambda: launch(offload=Offload(layers=4)), "one at least stays"),
        (lambda: Offload(layers=1, modules=frozenset({"core_attn"})), "not both"),
        (
            lambda: launch("core_attn", trainer=TorchTrainer(keeper="torchtitan")),
            "only Megatron-Core",
        ),
    ],
)
def test_what_megatron_refuses_is_refused(wrong: Any, said: str) -> None:
    """As its configuration does (transformer_config.py)."""
    with pytest.raises(InputError, match=said):
        wrong()


def test_all_modules_are_known() -> None:
    """Each of them takes something of a layer with experts and latents."""
    model = replace(MIXTURE, attention=replace(MIXTURE.attention, latent=LATENT))
    for module in OFFLOADED:
        modules = {module, "core_attn"} if module == "attn_proj" else {module}
        assert offloaded_bytes(launch(*modules, model=model), experts=True) > 0
