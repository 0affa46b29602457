"""Cards: facts of the architecture of a device, and peaks that no step exceeds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from autopar.command.custom_card import CardSpec, like_card
from autopar.documents.catalog import find_card
from autopar.documents.json import JsonDocument
from autopar.errors import DocumentError
from autopar.price.step import step_time
from autopar.rates.card import domain_of, hosts_of, load_card, read_card
from autopar.rates.devices import (
    architecture_of,
    default_attention,
    lacks_flash_attention,
    lacks_precision,
)
from autopar.rates.kernels import attention_pairs
from autopar.rates.parts.operations import machine_of
from autopar.records import replace
from autopar.run.architecture import Mlp
from autopar.training.throughput import hardware_flop, least_step_s
from search.commands import check
from search.engines.space import device_precisions
from search.engines.table import read_checked
from tests.runs import attention_of
from tests.step_cases import CARDS, DENSE, card_named, stack_named

LOW = ("fp8", "fp8_block", "mxfp8", "nvfp4")
GENERATIONS = {
    "sm_70": ("v100",),
    "sm_80": ("a100-40gb", "a100-80gb", "a100-pcie-80gb"),
    "sm_86": ("a10g",),
    "sm_89": ("l40s", "rtx-4090"),
    "sm_90": ("gh200", "h100-80gb", "h100-nvl", "h100-pcie", "h20", "h200", "h800"),
    "sm_100": ("b200", "gb200"),
    "sm_103": ("b300", "gb300"),
    "sm_107": ("vr200",),
    "sm_120": ("rtx-pro-6000",),
    "gfx942": ("mi300x", "mi325x"),
    "gfx950": (
        "mi350x",
        "mi355x",
    ),
}
SCRIPT = """#!/bin/bash
ARGS="
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 8
    --vocab-size 50304 --use-distributed-optimizer {more}
"
torchrun --nproc_per_node 1 pretrain_gpt.py $ARGS
"""


def document(name: str) -> dict[str, Any]:
    """Return the document of a shipped card."""
    data: dict[str, Any] = json.loads(find_card(name).read_text(encoding="utf-8"))
    return data


def card_of(data: dict[str, Any], path: Path) -> Any:
    """Return the card of a document."""
    return read_card(JsonDocument(path=path, data=data, sha256=""))


def test_every_card_has_an_architecture() -> None:
    """By hand, and each of them is one that rules know."""
    assert {name: one for one, names in GENERATIONS.items() for name in names} == {
        name: card_named(name).architecture for name in CARDS
    }


@pytest.mark.parametrize("name", CARDS)
def test_peaks_are_those_of_the_tensor_cores(name: str) -> None:
    """A peak in 8 or 4 bits is given where the architecture has it, and nowhere else."""
    card = card_named(name)
    assert lacks_precision(name, "fp8") == ("device.fp8_flop_per_s" not in card.more)
    assert lacks_precision(name, "nvfp4") == ("device.nvfp4_flop_per_s" not in card.more)
    assert lacks_precision(name, "bf16") == (card.peak("bf16") < card.peak("fp16"))
    known = () if card.kernels is None else card.kernels.gemm
    # Times of blocks of fp8 are those of inference kernels, which Ada has, too.
    others = [one for one in known if one not in ("fp32", "fp8_block")]
    assert not [one for one in others if lacks_precision(name, one)]


def test_what_generations_can_do() -> None:
    """By hand, by name, alias and in capitals; an unknown device lacks nothing."""
    has = {
        name: [one for one in ("fp16", "bf16", *LOW) if not lacks_precision(name, one)]
        for name in ("V100", "a100", "l40s", "H100", "GB200", "mi300x_2x8", "MI355X")
    }
    assert has == {
        "V100": ["fp16"],
        "a100": ["fp16", "bf16"],
        "l40s": ["fp16", "bf16", "fp8"],
        "H100": ["fp16", "bf16", "fp8", "fp8_block"],
        "GB200": ["fp16", "bf16", *LOW],
        "mi300x_2x8": ["fp16", "bf16", "fp8"],
        "MI355X": ["fp16", "bf16", "fp8", "mxfp8"],
    }
    assert [name for name in CARDS if lacks_flash_attention(name)] == ["v100"]
    assert architecture_of("RTX 4090") == "sm_89"
    assert architecture_of("unheard-of") is None
    assert not lacks_precision("unheard-of", "fp8")
    kernels = {name: default_attention(name) for name in ("v100_1x8", "A100", "h200", "mi300x")}
    assert kernels == {"v100_1x8": "unfused", "A100": "flash", "h200": "fused", "mi300x": "flash"}
    assert device_precisions("l40s") == ("bf16", "fp8")
    assert device_precisions("h100-80gb") == ("bf16", "fp8", "fp8-blockwise")
    assert device_precisions("gb300") == ("bf16", "fp8", "mxfp8", "nvfp4")
    assert device_precisions("v100") == device_precisions("unheard-of") == ("bf16",)


def test_peaks_by_hand() -> None:
    """Blackwell Ultra has six times its bf16 peak in 4 bits; missing peaks are multiples."""
    assert card_named("b300").peak("nvfp4") == 1.35e16
    assert card_named("b200").peak("mxfp8") == card_named("b200").peak("fp8_block") == 4.5e15
    data = document("b200")
    del data["device"]["nvfp4_flop_per_s"]
    assert card_of(data, Path("b.json")).peak("nvfp4") == 9e15


def timed() -> list[tuple[str, str]]:
    """Return every card with the precisions that it has GEMM times of."""
    same = {"fp16": "bf16", "mxfp8": "fp8_block"}
    return [
        (name, one)
        for name in CARDS
        for kernels in (card_named(name).kernels,)
        for one in ("fp16", "bf16", "fp32", *LOW)
        if kernels is not None and {one, same.get(one)} & {*kernels.gemm}
    ]


@pytest.mark.parametrize(("name", "precision"), timed())
def test_no_step_is_above_the_peak(name: str, precision: Any) -> None:
    """Large GEMMs on one GPU, without memory traffic worth the name: at most 100 %."""
    card = card_named(name)
    machine = machine_of(card, stack_named("megatron-core"))
    block = replace(
        DENSE.blocks[0],
        hidden=32768,
        attention=attention_of(heads=256, kv_heads=256, width=128),
        mlp=Mlp(width=131072, gated=True),
    )
    job = replace(DENSE, blocks=(block,), precision=precision, micro_batch=4, global_batch=16)
    step_s = step_time(machine, job).total_s
    least_s = least_step_s(hardware_flop(job), 1, card.peak(precision))
    assert 0.15 < least_s / step_s < 1.0


def test_windows_on_both_sides_are_counted_in_times_and_flop() -> None:
    """Without a causal mask a window has twice as many keys, as in the FLOP of a step."""
    assert attention_pairs(4096, 4096, causal=False, window=512) == 1024
    assert attention_pairs(4096, 4096, causal=False, window=4096) == 4096
    assert attention_pairs(4096, 4096, window=512) == 512


def test_a_custom_card_is_a_gpu_of_its_architecture(tmp_path: Path) -> None:
    """Rules and kernels are those of the shipped card that is closest to it."""
    path = tmp_path / "mine.json"
    for like, bf16, gpu in (
        ("v100", None, "v100"),
        ("gb200", 2400e12, "gb200"),
        ("gb200", 2200e12, "b200"),
        ("mi300x", 500e12, "mi300x"),
    ):
        data = like_card(CardSpec(like=like, bf16=bf16, memory=2.0**36, out=path))
        card = card_of(data, path)
        assert (card.name, card.gpu) == ("mine", gpu)
    del data["device"]["architecture"]
    assert card_of(data, path).gpu == "mine"
    assert card_named("h200").gpu == "h200"


def test_a_custom_node_is_no_part_of_the_rack_of_its_base(tmp_path: Path) -> None:
    """Links between nodes join nodes of 8, and a node of 144 is one domain."""
    for gpus in (8, 144):
        data = like_card(CardSpec(like="gb200", gpus_per_node=gpus, out=tmp_path / "mine.json"))
        card = card_of(data, tmp_path / "mine.json")
        assert (card.domain_gpus, domain_of(card, 4 * gpus)) == (None, gpus)
        assert "intra_node.tray_gpus" not in card.more
    assert card_named("gb200").domain_gpus == 72


def test_attention_scales_with_the_peak_of_a_custom_card(tmp_path: Path) -> None:
    """A tenth of the peak has a tenth of the attention, which would be above it otherwise."""
    base = document("b200")
    data = like_card(CardSpec(like="b200", bf16=225e12, out=tmp_path / "mine.json"))
    for kernel, figures in base["kernels"]["attention"].items():
        scaled = data["kernels"]["attention"][kernel]["forward"]["value"]["flop_per_s"]
        assert scaled == pytest.approx(figures["forward"]["value"]["flop_per_s"] / 10)
    assert data["device"]["nvfp4_flop_per_s"]["value"] == pytest.approx(9e14)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("device", "architecture", "value", "hopper"), "device.architecture"),
        (("device", "architecture", "value", 90), "device.architecture.value"),
        (
            ("kernels", "attention", "flash2", "backward", "value", "flop_per_s", 1e15),
            "kernels.attention.flash2.backward.value.flop_per_s",
        ),
    ],
)
def test_what_is_no_card_is_refused(change: tuple[Any, ...], key: str) -> None:
    """With its key: an unknown form of architecture, and attention above the peak."""
    data = copy.deepcopy(document("h100-80gb"))
    place = data
    for name in change[:-2]:
        place = place[name]
    place[change[-2]] = change[-1]
    with pytest.raises(DocumentError) as found:
        card_of(data, Path("mine.json"))
    assert found.value.key == key


def test_a_script_on_a_card_without_flash_attention(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scores are saved and the share is that of fp16; bf16 has no time; flash is illegal."""

    def seen(more: str, card: str) -> dict[str, Any]:
        Path("run.sh").write_text(SCRIPT.format(more=more))
        words = ["run.sh", "--hardware", f"{card}:1x1", "--no-neighbours", "--json", "-"]
        assert check.run(words) == 0
        (found,) = json.loads(capsys.readouterr().out)["launches"]
        assert isinstance(found, dict)
        return found

    old, new = seen("--fp16", "v100"), seen("--fp16", "a100")
    assert old["understood"]["attention"] == "unfused"
    # Scores, probabilities and dropout of 16 heads, 2 x 2,048 x 2,048 of each layer.
    more = old["stages"][0]["peak_bytes"] - new["stages"][0]["peak_bytes"]
    assert 24 * 16 * 2 * 2048**2 * 2 < more < 24 * 16 * 2 * 2048**2 * 6
    rates = old["throughput"]
    assert rates["mfu"] == pytest.approx(rates["flop_per_s_per_gpu"] / 125e12)
    assert rates["mfu"] < rates["mfu_interval"][1] < 1.0
    written = seen("--fp16 --attention-backend unfused", "v100")
    assert written["stages"] == old["stages"]
    plain = seen("--bf16", "v100")
    assert plain["throughput"] is None or "mfu" not in plain["throughput"]
    assert "bf16" in plain["not_priced"]


def test_rules_of_devices_are_facts_of_their_cards(folder: Path) -> None:
    """A kernel or a precision that the architecture lacks is illegal, and no other."""
    for more, card, broken in (
        ("--use-flash-attn", "v100", True),
        ("--attention-backend flash", "v100", True),
        ("--attention-backend fused", "v100", True),
        ("--attention-backend unfused", "v100", False),
        ("--attention-backend flash", "a100", False),
        ("--fp8-format hybrid", "a100", True),
        ("--fp8-format hybrid", "mi300x", False),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "l40s", True),
        ("--fp8-format e4m3 --fp8-recipe blockwise", "h200", False),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mi300x", True),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "h100-80gb", True),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "b300", False),
    ):
        Path("run.sh").write_text(SCRIPT.format(more=f"--bf16 {more}"))
        file = read_checked("run.sh", world_size=1, gpu=card)
        found = [one.text for one in file.findings if one.kind == "illegal"]
        assert len(found) == broken, (more, card, found)


@pytest.mark.parametrize(
    ("card", "gpus", "domain"),
    [
        ("h100", 64, 8),
        ("gb200", 64, 64),
        ("gb200", 72, 72),
        ("gb200", 128, 64),  # 64 in each of two racks, not 72 and 56
        ("gb200", 576, 72),
        ("gb200", 512, 64),
        ("gb200", 73, 72),  # one rack is nearly empty
    ],
)
def test_racks_are_filled_equally(card: str, gpus: int, domain: int) -> None:
    found = load_card(card)
    assert domain_of(found, gpus) == domain
    assert machine_of(found, stack_named("megatron-core"), gpus=gpus).domain_gpus == domain


def test_a_rack_of_fewer_gpus_is_a_smaller_domain() -> None:
    """Nine racks of 64 are no eight racks of 72."""
    assert domain_of(replace(load_card("gb200"), max_gpus_per_node=64), 576) == 64


@pytest.mark.parametrize(
    ("card", "shape", "hosts"),
    [
        ("gb200", (4, 64), (64, 4)),
        ("gb300", (1, 64), (16, 4)),
        ("gb200", (1, 72), (18, 4)),
        ("gb200", (2, 4), (2, 4)),
        ("gb200", (1, 2), (1, 2)),  # a part of a tray
        ("h100", (4, 8), (4, 8)),
    ],
)
def test_hosts_of_racks_are_trays(
    card: str, shape: tuple[int, int], hosts: tuple[int, int]
) -> None:
    """A launcher starts one process per GPU of a host, and 18 hosts are a rack."""
    assert hosts_of(load_card(card), *shape) == hosts


def test_a_script_may_use_a_part_of_each_rack(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a search of 4x72 finds on 4x64 is checked as that, however its hosts are told."""
    line = SCRIPT.format(more="--bf16").replace("--global-batch-size 8", "--global-batch-size 256")
    seen = {}
    for nodes, each, hardware in ((32, 4, "4x72"), (4, 32, "4x72"), (4, 32, "4x32")):
        text = line.replace("--nproc_per_node 1", f"--nnodes {nodes} --nproc_per_node {each}")
        Path("run.sh").write_text(text)
        words = ["run.sh", "--hardware", f"gb200:{hardware}", "--no-neighbours", "--json", "-"]
        assert check.run(words) == 0
        (found,) = json.loads(capsys.readouterr().out)["launches"]
        seen[nodes, each, hardware] = (found["stages"], found["step_time_s"])
    assert len({str(one) for one in seen.values()}) == 1
    # other clusters have no racks
    assert check.run(["run.sh", "--hardware", "h100:36x8"]) == 2
