"""Shipped documents of the analytic models: they load, and agree with the cards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autopar.documents import catalog
from autopar.documents.checks import load_document
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError
from autopar.rates.card import load_card
from search.closed_form.calculon import evaluate
from search.closed_form.calculon.documents import DATATYPE_BYTES, Execution
from search.closed_form.files import (
    application_of,
    calculon_system,
    execution_keys,
    load_application,
    load_model,
    model_of,
    structure_of,
    tensor2d_system,
)

SYSTEMS = catalog.card_names()
LARGE = tuple(
    name
    for name in SYSTEMS
    if load_card(name).memory_bytes >= 40e9 and load_card(name).max_gpus_per_node >= 8
)
"""Systems that the shipped executions fit into, which have eight devices per node."""
EXECUTIONS = ("1x8-dp8", "1x8-tp8", "8x8-tp8-pp4-dp2")
OTHER_BLOCKS = {
    **dict.fromkeys(
        ("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "glm-4.5-air", "glm-5", "gpt-oss-120b",
         "gemma-4-26b-a4b", "gpt-oss-20b", "granite-4-small", "kimi-k2", "kimi-linear-48b",
         "llama4-maverick", "llama4-scout",
         "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b",
         "qwen3-30b-a3b", "qwen3-next-80b", "nemotron-3-nano", "nemotron-3-super"),
        "mixture of experts",
    ),
    **dict.fromkeys(("flux.1-dev", "vit-l", "wan2.1-14b"), "no vocabulary"),
    **dict.fromkeys(
        ("gemma-2-2b", "gemma-2-9b", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b",
         "gemma-4-31b", "gemma-4-e2b", "gemma-4-e4b"),
        "sliding-window attention",
    ),
    "t5-3b": "encoder-decoder",
    "t5-large": "encoder-decoder",
}  # fmt: skip


def shipped(root: Path, folder: str) -> dict[str, Any]:
    """Return the documents of a folder by name."""
    found = sorted((root / "hardware_configs" / folder).glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in found}


def test_names_and_aliases(root: Path) -> None:
    """A document is found by its name and by what its card is called; others are named."""
    assert {"a100-40gb", "a100-80gb", "b200", "h100-80gb", "h200"} < set(SYSTEMS)
    assert set(shipped(root, "executions")) == set(EXECUTIONS)
    assert calculon_system("a100") == calculon_system("A100-80GB")
    for find in (calculon_system, tensor2d_system, execution_keys):
        with pytest.raises(InputError, match=r"(Did you mean|Use )"):
            find("h10")


@pytest.mark.parametrize("name", SYSTEMS)
def test_peaks_are_those_of_the_card(name: str) -> None:
    """A number that a card has is the card's, in the units of the documents."""
    card = load_card(name)
    one, two = calculon_system(name), tensor2d_system(name)

    for datatype, precision in (("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32")):
        assert one.matrix[datatype].tflops * 1e12 == pytest.approx(card.flop_per_s[precision])
    assert set(one.matrix) == set(one.vector)
    assert one.mem1.GiB * 2**30 == pytest.approx(card.memory_bytes, rel=1e-3)
    assert one.mem1.GBps * 1e9 == card.memory_bytes_per_s
    for tier, link in zip(one.networks, (card.intra_node, card.inter_node), strict=True):
        assert (tier.bandwidth * 1e9, tier.efficiency) == (
            link.bytes_per_s,
            link.collective_efficiency,
        )
    assert (two.nvlink_bandwidth * 1e9, two.nvlink_eff, two.nvlink_latency) == (
        card.intra_node.bytes_per_s,
        card.intra_node.collective_efficiency,
        card.intra_node.hop_s,
    )
    assert (two.ib_bandwidth * 1e9, two.ib_eff) == (
        card.inter_node.bytes_per_s,
        card.inter_node.collective_efficiency,
    )
    assert two.matrix_flops_fp16 * 1e12 == card.flop_per_s["fp16"]
    assert two.hbm_capacity * 1e9 == pytest.approx(card.memory_bytes, rel=1e-3)


@pytest.mark.parametrize("name", SYSTEMS)
def test_large_operations_reach_what_the_card_says(name: str) -> None:
    """The first step of a curve is the card's efficiency less a launch; steps only fall."""
    card, system = load_card(name), calculon_system(name)
    for engine in system.matrix.values():
        shares = [share for _, share in engine.gflops_efficiency]
        assert shares == sorted(shares, reverse=True)
        # the first step is as efficient as the geometric mean of its decade
        work_s = engine.gflops_efficiency[0][0] * math.sqrt(10) / (engine.tflops * 1e3)
        assert 1 / shares[0] - card.kernel_launch_s / work_s == pytest.approx(
            1 / card.gemm_efficiency, rel=0.01
        )


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("system", LARGE)
def test_shipped_executions_run_on_shipped_systems(system: str, execution: str) -> None:
    """In every datatype that the system has, a shipped model is priced."""
    keys = execution_keys(execution)[1]
    machine = calculon_system(system)
    application = load_application("llama2-7b").application
    for datatype in machine.matrix:
        assert datatype in DATATYPE_BYTES
        found = evaluate(application, {**keys, "datatype": datatype}, machine)
        assert found["total_time"] > 0
        assert 0 < found["total_efficiency"] < 1
    assert load_document(Execution, keys).num_procs == keys["num_procs"]


@pytest.mark.parametrize("name", catalog.model_names())
def test_every_shipped_model_is_an_application_or_says_why_not(name: str) -> None:
    """Sizes are those of the spec; models of other blocks are refused by name."""
    spec = load_spec(name)
    if name in OTHER_BLOCKS:
        for function in (application_of, model_of, structure_of):
            with pytest.raises(InputError, match=f"{name}.*{OTHER_BLOCKS[name]}"):
                function(spec)
        return
    layer, a = spec.layers[0], application_of(spec)

    assert (a.hidden, a.feedforward, a.num_blocks) == (
        layer.hidden_size,
        layer.ffn_hidden_size,
        layer.num_layers,
    )
    assert a.attn_heads * a.attn_size == (layer.num_heads or 0) * (layer.head_dim or 0)
    assert a.vocab_size >= (spec.vocab_size or 0)
    assert structure_of(spec) == ("llama" if layer.gated_mlp else "gpt")
    two = model_of(spec)
    assert (two.l, two.e, two.h, two.depth, two.f) == (
        a.seq_size,
        a.hidden,
        a.attn_heads,
        a.num_blocks,
        a.feedforward,
    )


def test_parameters_of_a_shipped_model() -> None:
    """Counted from the spec: 6,738,415,616 parameters are published for Llama 2 7B."""
    assert load_application("llama2-7b").parameters == 6_738_415_616


def test_parameters_of_an_application_file(tmp_path: Path) -> None:
    """By the published formula, with 51,200 tokens and learned positions."""
    path = tmp_path / "small.json"
    sizes = {"hidden": 4, "feedforward": 16, "seq_size": 8, "attn_heads": 2, "attn_size": 2}
    path.write_text(json.dumps({**sizes, "num_blocks": 3}))
    known = load_application(str(path))
    block = 2 * 4 * 16 + 4 * 4 * 4 + 4 + 16 + 3 * 4 + 4 + 4 * 4

    assert known.parameters == 3 * block + (51200 + 8) * 4


def test_files_of_every_kind_serve_as_model(tmp_path: Path, root: Path) -> None:
    """Our model.json, five sizes, and six sizes; a file of neither names its key."""
    spec = root / "models" / "gpt-6.7b" / "model.json"
    assert load_application(str(spec)).application == load_application("gpt-6.7b").application
    assert load_model(str(spec))[1] == load_model("gpt-6.7b")[1]
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps({"l": 2048, "e": 4096, "h": 32, "depth": 32}))
    assert load_model(str(path))[1].f == 4 * 4096
    with pytest.raises(DocumentError, match=r"sizes\.json: this is a tensor2d model"):
        load_application(str(path))
