"""Systems of cards: the figures that were typed before, what a card may lack, and one place."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from msgspec import to_builtins

from autopar.documents import catalog
from autopar.documents.checks import load_document
from autopar.errors import DocumentError
from autopar.rates.card import Card, load_card
from autopar.records import replace
from search.closed_form.calculon.documents import System as CalculonSystem
from search.closed_form.files import (
    calculon_from_card,
    calculon_system,
    tensor2d_from_card,
    tensor2d_system,
)
from search.closed_form.tensor2d.documents import System as Tensor2dSystem

ROOT = Path(__file__).resolve().parents[3]
FORMER: dict[str, tuple[Any, ...]] = {
    "a100-80gb": (
        {
            "float16": (312.0, (0.787, 0.76, 0.568, 0.161, 0.0198), 78.0),
            "bfloat16": (312.0, (0.787, 0.76, 0.568, 0.161, 0.0198), 39.0),
            "float32": (19.5, (0.79, 0.788, 0.771, 0.635, 0.23), 19.5),
        },
        (80.0, 2039.0, (0.827, 0.667, 0.227, 0.0299)),
        (238.4, 32.0),
        ((300.0, 0.736), (25.0, 0.865)),
        85.9,
    ),
    "h100-80gb": (
        {
            "float16": (989.4, (0.732, 0.663, 0.343, 0.0588, 0.00634), 133.8),
            "bfloat16": (989.4, (0.732, 0.663, 0.343, 0.0588, 0.00634), 133.8),
            "float32": (67.0, (0.739, 0.734, 0.686, 0.415, 0.0837), 67.0),
            "float8": (1978.9, (0.723, 0.601, 0.223, 0.0306, 0.00318), 133.8),
        },
        (79.65, 3350.0, (0.813, 0.586, 0.154, 0.0185)),
        (238.4, 64.0),
        ((450.0, 0.758), (50.0, 0.892)),
        85.52,
    ),
    "h200": (
        {
            "float16": (989.4, (0.732, 0.663, 0.343, 0.0588, 0.00634), 133.8),
            "bfloat16": (989.4, (0.732, 0.663, 0.343, 0.0588, 0.00634), 133.8),
            "float32": (67.0, (0.739, 0.734, 0.686, 0.415, 0.0837), 67.0),
            "float8": (1978.9, (0.723, 0.601, 0.223, 0.0306, 0.00318), 133.8),
        },
        (140.4, 4800.0, (0.798, 0.517, 0.114, 0.013)),
        (238.4, 64.0),
        ((450.0, 0.758), (50.0, 0.892)),
        150.75,
    ),
    "b200": (
        {
            "float16": (2250.0, (0.693, 0.567, 0.201, 0.027, 0.0028), 150.0),
            "bfloat16": (2250.0, (0.693, 0.567, 0.201, 0.027, 0.0028), 150.0),
            "float32": (75.0, (0.709, 0.704, 0.655, 0.385, 0.0754), 75.0),
            "float8": (4500.0, (0.676, 0.472, 0.117, 0.0138, 0.0014), 150.0),
        },
        (179.06, 8000.0, (0.767, 0.41, 0.0723, 0.00783)),
        (238.4, 64.0),
        ((900.0, 0.738), (50.0, 0.892)),
        192.27,
    ),
}
"""By card: TFLOP/s of matrix products, their efficiencies, TFLOP/s outside them; GiB, GB/s and
efficiencies of the device's memory; GiB and GB/s of the host's; GB/s and efficiency inside and
between nodes; GB of the device's memory in the other model.
"""
NEEDED: dict[Callable[[Card], object], set[str]] = {
    calculon_from_card: {
        "device.vector_fp16_flop_per_s",
        "device.vector_bf16_flop_per_s",
        "efficiency.vector",
        "intra_node.collective_sm_share",
        "inter_node.max_gpus",
        "inter_node.collective_sm_share",
        "host.memory_bytes",
        "host.bytes_per_s",
        "host.efficiency",
    },
    tensor2d_from_card: {"device.vector_fp16_flop_per_s"},
}


def former_calculon(name: str) -> CalculonSystem:
    """Return the system as its own file described it."""
    peaks, (size, rate, reached), (host_size, host_rate), tiers, _ = FORMER[name]
    ring = {"reduce_scatter": [1.0, -1.0], "all_gather": [1.0, -1.0], "all_reduce": [2.0, -1.0]}
    return load_document(
        CalculonSystem,
        {
            "matrix": {
                datatype: {
                    "tflops": matrix,
                    "gflops_efficiency": [
                        [*step] for step in zip((100, 10, 1, 0.1, 0), curve, strict=True)
                    ],
                }
                for datatype, (matrix, curve, _) in peaks.items()
            },
            "vector": {
                datatype: {"tflops": vector, "gflops_efficiency": [[0, 0.9]]}
                for datatype, (_, _, vector) in peaks.items()
            },
            "mem1": {
                "GiB": size,
                "GBps": rate,
                "MB_efficiency": [[*step] for step in zip((100, 10, 1, 0), reached, strict=True)],
            },
            "mem2": {"GiB": host_size, "GBps": host_rate, "MB_efficiency": [[0, 0.8]]},
            "processing_mode": "roofline",
            "networks": [
                {
                    "bandwidth": bandwidth,
                    "efficiency": efficiency,
                    "size": reach,
                    "latency": latency,
                    "ops": {"p2p": [1.0, None], **ring},
                    "must_be_filled": False,
                    "processor_usage": usage,
                }
                for (bandwidth, efficiency), reach, latency, usage in zip(
                    tiers, (8, 65536), (6.22e-05, 5.24e-05), (0.12, 0.06), strict=True
                )
            ],
        },
    )


def former_tensor2d(name: str) -> Tensor2dSystem:
    """Return the system as its own file described it."""
    peaks, (_, rate, _), _, (inside, between), capacity = FORMER[name]
    return Tensor2dSystem(
        matrix_flops_fp16=peaks["float16"][0],
        vector_flops_fp16=peaks["float16"][2],
        vector_flops_fp32=peaks["float32"][2],
        hbm_bandwidth=rate,
        hbm_capacity=capacity,
        nvlink_bandwidth=inside[0],
        nvlink_eff=inside[1],
        nvlink_latency=3.4e-06,
        nvlink_size=8,
        ib_bandwidth=between[0],
        ib_eff=between[1],
        ib_latency=1.4e-05,
        nic_factor=1,
    )


@pytest.mark.parametrize("name", FORMER)
def test_systems_of_cards_have_the_former_figures(name: str) -> None:
    """To the last bit, keys and datatypes in the order of the former files."""
    one, two = calculon_system(name), tensor2d_system(name)
    assert one == former_calculon(name)
    assert two == former_tensor2d(name)


def test_a_step_of_a_curve_by_hand() -> None:
    """The middle of 10 to 100 GFLOP takes 5 us, and the rest at 0.79 of 312 TFLOP/s."""
    middle = 10e9 * 10**0.5
    share = middle / 312e12 / (5e-6 + middle / (312e12 * 0.79))
    steps = dict(map(tuple, calculon_system("a100").matrix["float16"].gflops_efficiency))
    assert steps[10] == pytest.approx(share, abs=5e-4)


@pytest.mark.parametrize("name", catalog.card_names())
def test_every_shipped_card_makes_both_systems(name: str) -> None:
    """Nothing that the closed forms need is missing in what is shipped."""
    assert calculon_system(name).mem1.GiB > 0
    assert tensor2d_system(name).hbm_capacity > 0


@pytest.mark.whole
@pytest.mark.parametrize("make", NEEDED)
@example(kept=set(NEEDED[calculon_from_card]))
@given(kept=st.sets(st.sampled_from(sorted(load_card("h100").more))))
def test_a_card_that_lacks_numbers(make: Callable[[Card], object], kept: set[str]) -> None:
    """One sentence names the card and a key that is missing; other keys are not missed."""
    whole = load_card("h100")
    card = replace(whole, more={key: whole.more[key] for key in kept})
    missing = NEEDED[make] - kept
    if not missing:
        system = make(card)
        if "device.fp8_flop_per_s" in kept or make is tensor2d_from_card:
            assert system == make(whole)
        else:
            assert isinstance(system, CalculonSystem)
            assert {*system.matrix} == {*system.vector} == {"float16", "bfloat16", "float32"}
        return
    with pytest.raises(DocumentError, match=r"this key is missing, and a system of \w+") as caught:
        make(card)
    assert caught.value.key in missing
    assert caught.value.path == str(whole.path)
    assert str(caught.value).count("\n") == 0
    assert '. Add {"value": a number' in str(caught.value).replace("a whole number", "a number")


def test_cards_of_ones_own(tmp_path: Path) -> None:
    """The file of a card serves as system; without the new numbers it still is a card."""
    keys = json.loads(catalog.find_card("h200").read_text(encoding="utf-8"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(keys))
    assert calculon_system(str(path)) == calculon_system("h200")
    assert tensor2d_system(str(path)) == tensor2d_system("h200")
    for key in load_card("h200").more:
        section, name = key.split(".")
        keys.get(section, {}).pop(name, None)
    path.write_text(json.dumps({key: value for key, value in keys.items() if key != "host"}))
    assert load_card(str(path)).more == {}
    assert load_card(str(path)).flop_per_s == load_card("h200").flop_per_s
    for find in (calculon_system, tensor2d_system):
        with pytest.raises(
            DocumentError, match=r"mine\.json: key 'device\.vector_fp16_flop_per_s'"
        ):
            find(str(path))


def test_systems_in_the_form_of_their_models_are_read(tmp_path: Path) -> None:
    """A file that describes a machine as its model does needs no card."""
    path = tmp_path / "system.json"
    for find, known in ((calculon_system, "h100"), (tensor2d_system, "b200")):
        path.write_text(json.dumps({"_name": "a comment", **to_builtins(find(known))}))
        assert find(str(path)) == find(known)


RATE = re.compile(r"(flop|bytes)_per_s")
COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d[\d'_]*(?:\.\d*)?(?:[eE][+-]?\d+)?(?![\w.])")


def datasheet_numbers() -> dict[float, str]:
    """Return peaks, bandwidths and capacities of the cards, in every unit they are written in.

    Rates of three digits and more are also sought in 1e9 and 1e12 per second; shorter figures,
    powers of two and sizes of memory in GiB are numbers of many other things.
    """
    found = {}
    for name in catalog.card_names():
        data = json.loads(catalog.find_card(name).read_text(encoding="utf-8"))
        for section in ("device", "intra_node", "inter_node", "host"):
            for key, entry in data[section].items():
                where, value = f"{name}: {section}.{key}", entry["value"]
                if key == "memory_bytes" or RATE.search(key):
                    found[float(value)] = where
                if RATE.search(key):
                    for scaled in (value / 1e9, value / 1e12):
                        digits = len(f"{scaled:.5e}".partition("e")[0].replace(".", "").strip("0"))
                        if digits >= 3 and not math.log2(scaled).is_integer():
                            found[scaled] = where
    return found


def numbers(name: str, text: str) -> Iterator[float]:
    """Yield the numbers of a document or of code, without comments and texts."""
    if name.endswith(".py"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = [token.string for token in tokens if token.type == tokenize.NUMBER]
    else:
        found = NUMBER.findall(COMMENT.sub(" ", text))
    for word in found:
        plain = word.replace("_", "").replace("'", "").lower()
        if not plain.startswith(("0x", "0b", "0o")) and not plain.endswith("j"):
            yield float(plain)


def repeated(name: str, text: str, known: dict[float, str]) -> list[str]:
    """Return which numbers of the cards a file repeats."""
    return [
        f"{name}: {number:.6g} of {known[number]}" for number in {*numbers(name, text)} & {*known}
    ]


@pytest.mark.whole
def test_a_datasheet_number_stands_once() -> None:
    """In the cards: neither code nor another document of `hardware_configs` repeats one."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("needs git and a clone to know which files belong to the repository")
    known, found, seen = datasheet_numbers(), [], 0
    for name in listing.stdout.split("\0"):
        folder, path = name.split("/")[0], ROOT / name
        code = folder in ("autopar", "search", "profiler", "csrc", "benchmarks")
        # sidecars of estimated files are written by a command, which takes them from the card; an
        # error of published runs can equal a number of a card by chance
        document = name.startswith("hardware_configs/") and not (
            name.endswith(".meta.json") or name.startswith("hardware_configs/accuracy/")
        )
        if (
            path.is_file()
            and (code or document)
            and path.suffix in (".py", ".cpp", ".hpp", ".json")
            and not name.startswith(("hardware_configs/cards/", "csrc/third_party/"))
        ):
            text = path.read_text(encoding="utf-8")
            again = repeated(name, text, known)
            if name.startswith("hardware_configs/sites/"):
                # a cluster may have adapters of another card's rate
                card = f" of {json.loads(text)['card']}"
                again = [one for one in again if card in one]
            found += again
            seen += 1
    assert seen > 100
    assert found == []


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("a.py", "PEAK = 989.4e12", 1),
        ("a.py", "peak_tflops = 989.4  # of an H100", 1),
        ("a.py", "x = 3_350.0", 1),
        ("a.py", '"""989.4 TFLOP/s"""  # 989.4', 0),
        ("a.cpp", "double peak = 1978.9;  // 989.4", 1),
        ("a.json", '{"hbm_capacity": 85899345920, "GBps": 2039.0}', 2),
        ("a.py", "x = [8, 16, 25.0, 64, 128, 256, 4096, 81920]", 0),
    ],
)
def test_the_search_for_repeated_numbers_sees_what_it_must(
    name: str, text: str, count: int
) -> None:
    """Numbers count in every unit, texts and comments do not, nor do common sizes."""
    assert len(repeated(name, text, datasheet_numbers())) == count
