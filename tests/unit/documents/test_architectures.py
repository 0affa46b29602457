"""Specs of today's architectures: latent attention, windows, shared experts, modules of MTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import asdict

from autopar.documents.spec import load_spec, write_spec
from autopar.errors import DocumentError, InputError
from autopar.price.activations import layer_saved_bytes
from autopar.price.parameters import layer_weights, stage_weights
from autopar.records import replace
from autopar.run.architecture import Experts, LatentAttention, windows_of
from autopar.run.job import blocks_of, layer_blocks
from autopar.run.model import (
    LatentSpec,
    LayerSpec,
    ModelSpec,
    model_parameter_count,
    mtp_parameter_count,
    parameter_count,
)
from autopar.run.of_plan import uniform_model
from tests.runs import run_of

LATENT = LatentSpec(
    query_rank=1536, key_value_rank=512, key_width=128, rotary_width=64, value_width=128
)
DENSE = LayerSpec(
    num_layers=3,
    seq_length=4096,
    hidden_size=7168,
    num_heads=128,
    ffn_hidden_size=18432,
    gated_mlp=True,
    qk_norms=True,
    latent=LATENT,
)
MIXTURE = replace(
    DENSE,
    num_layers=58,
    ffn_hidden_size=2048,
    num_experts=256,
    experts_per_token=8,
    shared_expert_width=2048,
)
DEEPSEEK = ModelSpec(name="deepseek", layers=(DENSE, MIXTURE), vocab_size=129280, mtp_layers=1)
WINDOWED = LayerSpec(
    num_layers=6,
    seq_length=4096,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=96,
    gated_mlp=True,
    window=128,
    whole_every=2,
)


def test_deepseek_v3_has_as_many_parameters_as_are_published() -> None:
    """671.0 B without MTP and 11.5 B in its module (arXiv 2412.19437; 187.1 M in attention)."""
    attention = parameter_count(DENSE) - 3 * 7168 * 18432 - 2 * 7168
    # the matrices alone, and the two norms of latents
    assert attention == 187_105_280 + 1536 + 512
    # the hub's count of 671,026,419,200 has a bias of balancing per routed expert, which no
    # gradient moves
    assert model_parameter_count(DEEPSEEK, mtp=False) == 671_026_419_200 - 58 * 256
    assert mtp_parameter_count(DEEPSEEK) == 2 * 7168**2 + 3 * 7168 + parameter_count(MIXTURE)


def test_a_spec_with_all_fields_is_read_as_it_was_written(tmp_path: Path) -> None:
    """model.json holds the latent widths as an object of their own."""
    path = tmp_path / "model.json"
    for spec in (
        DEEPSEEK,
        replace(DEEPSEEK, layers=(replace(DENSE, latent=replace(LATENT, query_rank=None)),)),
        ModelSpec(
            name="turns",
            layers=(WINDOWED, replace(WINDOWED, window=None, whole_every=0, attention_sinks=True)),
            vocab_size=100,
            interleaved=True,
        ),
    ):
        write_spec(spec, path)
        assert load_spec(str(path)) == spec


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"shared_expert_width": 8}, ["layers[0].shared_expert_width", "num_experts"]),
        ({"whole_every": 2}, ["layers[0].whole_every", "window"]),
        ({"latent": {"key_value_rank": 8}}, ["layers[0].latent.key_width", "missing"]),
        ({"latent": 3}, ["layers[0].latent", "key_value_rank"]),
        ({"latent": asdict(LATENT), "head_dim": 8}, ["layers[0].head_dim", "latent"]),
        ({"latent": asdict(LATENT), "num_kv_heads": 1}, ["layers[0].num_kv_heads", "latent"]),
    ],
)
def test_fields_that_contradict_each_other_are_named(
    tmp_path: Path, layer: dict[str, object], words: list[str]
) -> None:
    """One sentence names the key of the file."""
    sizes = {"num_layers": 2, "seq_length": 8, "hidden_size": 64, "num_heads": 4}
    path = tmp_path / "model.json"
    path.write_text(
        json.dumps({"format": "autopar-model", "name": "x", "layers": [{**sizes, **layer}]})
    )
    with pytest.raises(DocumentError) as caught:
        load_spec(str(path))
    for word in words:
        assert word in str(caught.value)


def test_types_that_take_turns_have_as_many_layers(tmp_path: Path) -> None:
    """`interleaved` with other numbers is refused when a file says it."""
    path = tmp_path / "model.json"
    write_spec(replace(DEEPSEEK, interleaved=True), path)
    with pytest.raises(DocumentError, match=r"interleaved.*3, 58 layers"):
        load_spec(str(path))


def test_blocks_have_windows_shared_experts_and_latents() -> None:
    """Every second layer without a window is a block of its own."""
    dense, mixture = blocks_of(DEEPSEEK)
    assert (dense.number, mixture.number) == (3, 58)
    assert isinstance(mixture.mlp, Experts)
    assert mixture.mlp.shared_width == 2048
    assert dense.attention is not None
    assert (dense.attention.query, dense.attention.value) == (128 * 192, 128 * 128)
    windowed = ModelSpec(name="windowed", layers=(WINDOWED,), vocab_size=100)
    seen = [block.attention.window for block in layer_blocks(windowed) if block.attention]
    assert seen == [128, None] * 3
    assert [block.number for block in blocks_of(windowed)] == [1] * 6


def test_a_uniform_model_has_every_layer() -> None:
    """Dense layers first, then mixtures; latent widths, shared experts and MTP."""
    model = uniform_model(DEEPSEEK)
    assert model.mixtures == (False,) * 3 + (True,) * 58
    assert model.dense_width == 18432
    assert model.experts is not None
    assert (model.experts.width, model.experts.shared_width) == (2048, 2048)
    attention = model.attention
    assert attention.latent == LatentAttention(
        query_rank=1536, kv_rank=512, key_width=128, rotary_width=64
    )
    assert (attention.width, attention.value_width) == (192, 128)
    assert (model.mtp, model.last.norm, model.positions) == (1, "rms", "rotary")


def test_a_uniform_model_says_which_layers_have_a_window() -> None:
    """Of one type, and of two that take turns, of which every fourth layer has none."""
    model = uniform_model(ModelSpec(name="windowed", layers=(WINDOWED,), vocab_size=100))
    assert windows_of(model) == (128, 2)
    windows = [layer.attention.window for layer in model.each_layer[:4] if layer.attention]
    assert windows == [128, None] * 2
    dense = replace(WINDOWED, whole_every=0)
    experts = replace(WINDOWED, num_experts=4, experts_per_token=1)
    turns = ModelSpec(name="turns", layers=(dense, experts), vocab_size=100, interleaved=True)
    model = uniform_model(turns)
    assert model.mixtures == (False, True) * 6
    assert windows_of(model) == (128, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_heads": 2}, "differ in heads"),
        ({"hidden_size": 128}, "differ in widths"),
        ({"ffn_hidden_size": 128}, "dense MLPs of two kinds"),
        ({"window": 64}, "windows"),
        ({"window": None, "whole_every": 0}, "windows"),
        ({"causal": False}, "decoder-only"),
        ({"norm_parameters_per_hidden": 3}, "LayerNorm"),
    ],
)
def test_what_no_uniform_model_can_say_is_refused(change: dict[str, int], words: str) -> None:
    """One sentence says why."""
    spec = ModelSpec(name="two", layers=(WINDOWED, replace(WINDOWED, **change)), vocab_size=100)
    with pytest.raises(InputError, match=words):
        uniform_model(spec)


def test_norms_behind_each_part_are_counted() -> None:
    """Gemma's four norms a layer: their weights, and what attention and MLP put out."""
    layer = replace(WINDOWED, num_norms=4, norm_parameters_per_hidden=4)
    four = ModelSpec(name="four", layers=(layer,), vocab_size=128)
    two = replace(four, layers=(WINDOWED,))
    seq, hidden = layer.seq_length, layer.hidden_size
    assert parameter_count(layer) == parameter_count(WINDOWED) + 2 * hidden

    runs = [run_of(uniform_model(spec), seq_length=seq) for spec in (two, four)]
    layers = [run.rank_layers[0] for run in runs]
    weights = [sum(weight.elements for weight in layer_weights(one)) for one in layers]
    assert weights == [parameter_count(WINDOWED), parameter_count(layer)]
    saved = [layer_saved_bytes(one) for one in layers]
    # two tensors of 16 bits, and two fp32 numbers of each token for each norm
    assert saved[1] - saved[0] == 2 * seq * hidden * 2 + 2 * 8 * seq


@pytest.mark.parametrize(
    "spec", [DEEPSEEK, ModelSpec(name="w", layers=(WINDOWED,), vocab_size=128)]
)
def test_a_run_has_the_parameters_of_its_spec(spec: ModelSpec) -> None:
    """Tensor by tensor as Megatron-LM makes them, and by the formula of the spec."""
    run = run_of(replace(uniform_model(spec), vocab_divisor=1), seq_length=4096)
    counted = sum(weight.elements for chunk in stage_weights(run, 0) for weight in chunk)
    # the module's words are a copy where it stands on another stage, and here they are the same
    assert counted == model_parameter_count(spec)
