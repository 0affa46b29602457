"""The section `kernels` of a card: every shipped one, what is refused, and the benchmark."""

from __future__ import annotations

import copy
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents import catalog
from autopar.errors import DocumentError, InputError
from autopar.rates.card import load_card
from autopar.rates.constants import DTYPES, FormulaConstants, kernels_of
from autopar.rates.kernels import (
    attention_s,
    gemm_s,
    grouped_gemm_s,
    grouped_linear_s,
    linear_s,
)
from autopar.rates.memory_bound import (
    ELEMENT_BYTES,
    cast_s,
    cross_entropy_s,
    embedding_s,
    memory_bound_s,
    optimizer_s,
    permute_s,
)
from benchmarks import kernels_vs_measured

MEASURED = ("a100-80gb", "h100-80gb", "h200", "b200", "b300", "gb200", "gb300", "l40s")
NOMINAL = ("h100-pcie", "h100-nvl", "h800", "h20", "a10g", "rtx-4090", "mi300x", "mi355x")


def figures(name: str) -> dict[str, FormulaConstants]:
    """Return every figure of a card's kernels by its key."""
    section = kernels_of(load_card(name)).section
    found = {
        "clock": section.clock,
        "grouped_gemm": section.grouped_gemm,
        "fused_grouped_gemm": section.fused_grouped_gemm,
        "memory_launch": section.memory_launch,
    }
    found |= {f"gemm.{dtype}": figure for dtype, figure in section.gemm.items()}
    found |= {f"memory.{kind}": figure for kind, figure in section.memory.items()}
    for kernel, both in section.attention.items():
        found[f"attention.{kernel}.forward"] = both.forward
        if both.backward is not None:
            found[f"attention.{kernel}.backward"] = both.backward
    return found


@pytest.mark.parametrize("name", catalog.card_names())
def test_every_figure_says_where_it_is_from(name: str) -> None:
    """Quality, source and spread everywhere; what is assumed has the wider interval."""
    found = figures(name)
    assert {"memory.elementwise"} < set(found)
    for key, figure in found.items():
        assert figure.quality in ("measured", "derived", "nominal"), key
        assert len(figure.source) > 15, key
        assert 0.04 <= figure.spread <= 2, key
        if figure.quality == "nominal" and key.startswith("gemm"):
            assert figure.spread >= 0.2, key
    qualities = {figure.quality for key, figure in found.items() if key == "gemm.bf16"}
    if name in MEASURED:
        assert qualities == {"measured"}
    if name in NOMINAL:
        assert qualities == {"nominal"}


@pytest.mark.parametrize("name", catalog.card_names())
def test_rates_stay_below_the_peak(name: str) -> None:
    """No attention kernel is faster than the tensor cores, whatever the width of its heads."""
    card = kernels_of(load_card(name))
    for kernel, both in card.section.attention.items():
        low = "fp8" in kernel
        peak = max(card.flop_per_s[dtype] for dtype in (("fp8",) if low else ("bf16", "fp16")))
        for figure in filter(None, (both.forward, both.backward)):
            assert figure["flop_per_s"] * 2 ** max(figure["wide_exponent"], 0.0) <= peak


def test_times_of_known_shapes() -> None:
    """Published points: the best shapes of MAMF, and a head of an unpadded vocabulary."""
    h100, gb200 = (kernels_of(load_card(name)) for name in ("h100", "gb200"))
    best = 2 * 2048 * 2048 * 13312
    assert best / float(gemm_s(h100, 2048, 2048, 13312)) == pytest.approx(794.5e12, rel=0.2)
    best = 2 * 4096 * 9728 * 2048
    assert best / float(gemm_s(gb200, 4096, 9728, 2048)) == pytest.approx(1822e12, rel=0.12)
    padded, not_padded = (float(gemm_s(h100, 2048, rows, 4096)) for rows in (50304, 50257))
    assert not_padded / padded == pytest.approx(2.95, rel=0.02)
    odd_tokens = linear_s(h100, 2049, 4096, 4096)
    even_tokens = linear_s(h100, 2056, 4096, 4096)
    assert float(odd_tokens.weight_gradient_s) <= float(even_tokens.weight_gradient_s)


def test_precisions_and_casts() -> None:
    """Every precision is priced or refused by name; narrow ones pay for the cast."""
    h100, b200 = (kernels_of(load_card(name)) for name in ("h100", "b200"))
    sizes = (8192, 8192, 8192)
    times = {dtype: float(gemm_s(b200, *sizes, dtype=dtype, cast=False)) for dtype in DTYPES}
    assert times["nvfp4"] < times["fp8_block"] < times["bf16"] < times["fp32"]
    assert times["mxfp8"] == times["fp8_block"]
    assert times["fp16"] == times["bf16"]
    with_cast = float(gemm_s(b200, *sizes, dtype="nvfp4"))
    alone = float(cast_s(b200, 8192 * 8192, dtype="nvfp4", count=0))
    assert with_cast - times["nvfp4"] == pytest.approx(alone)
    assert float(cast_s(b200, 1e6, dtype="bf16")) == 0
    explicit = float(cast_s(b200, 1e6, dtype="fp8", bytes_per_element=4))
    assert explicit == pytest.approx(float(memory_bound_s(b200, 4e6)))
    with pytest.raises(InputError, match="'h100-80gb' has no GEMM times of 'nvfp4', only of bf16"):
        gemm_s(h100, *sizes, dtype="nvfp4")
    with pytest.raises(InputError, match="no attention kernel 'flash9', only flash3"):
        attention_s(h100, 1, 8, 1024, 1024, kernel="flash9")
    assert set(ELEMENT_BYTES) == set(DTYPES)


def test_groups_and_clock() -> None:
    """Groups cost their share and a time each, padding rounds rows up, a slower clock slows."""
    card = kernels_of(load_card("h100"))
    figure = card.section.grouped_gemm
    share, groups_s = figure["share"], 8 * figure["group_s"]
    batched = float(gemm_s(card, 256, 4096, 4096, batch=8))
    grouped = float(grouped_gemm_s(card, 256, 8, 4096, 4096))
    assert grouped == pytest.approx(batched / share + groups_s)
    narrow = float(gemm_s(card, 256, 4096, 4096, batch=8, dtype="fp8", cast=False))
    assert float(
        grouped_gemm_s(card, 256, 8, 4096, 4096, dtype="fp8", cast=False)
    ) == pytest.approx(narrow / figure["narrow_share"] + groups_s)
    assert float(grouped_gemm_s(card, 129, 8, 4096, 4096, pad=128)) == pytest.approx(
        float(grouped_gemm_s(card, 256, 8, 4096, 4096))
    )
    three = grouped_linear_s(card, 256, 8, 4096, 4096)
    assert float(three.forward_s) == pytest.approx(float(three.input_gradient_s))
    assert float(three.weight_gradient_s) > float(three.forward_s)
    fused = card.section.fused_grouped_gemm["share"]
    assert float(grouped_gemm_s(card, 256, 8, 4096, 4096, fused=True)) == pytest.approx(
        batched / fused + groups_s
    )
    slow, fast = (float(gemm_s(card, 8192, 8192, 8192, clock=clock)) for clock in (0.9, 1.0))
    assert fast < slow < fast / 0.88


def test_long_products_of_a_run_slow_down_less() -> None:
    """Its clock has fallen already, also where it settles at a benchmark's own: no step there."""
    card = kernels_of(load_card("h100"))
    short = float(gemm_s(card, 16384, 8192, 8192))

    def long_s(clock: float) -> float:
        return float(gemm_s(card, 16384, 8192, 8192, clock=clock, sustained=True))

    assert 0.9 * short < long_s(1.0) < 0.99 * short
    assert long_s(1.0) < long_s(0.9999) < long_s(1.0) * 1.001
    for make in (linear_s, grouped_linear_s):
        sizes = (16384, 8192, 8192) if make is linear_s else (2048, 8, 8192, 8192)
        for one, other in zip(make(card, *sizes, sustained=True), make(card, *sizes), strict=True):
            assert 0.9 * float(other) < float(one) < 0.99 * float(other)


def test_memory_bound_operations() -> None:
    """Bytes are what was counted, and each kernel adds a launch."""
    card = kernels_of(load_card("h100"))
    launch = card.section.memory_launch["launch_s"]
    rate = card.memory_bytes_per_s * card.memory_share("optimizer")
    found = float(optimizer_s(card, 1e9, 2e9, bytes_per_own=40, gradient_bytes=2))
    assert found == pytest.approx((40e9 + 8e9) / rate + 4 * launch)
    lookup = float(embedding_s(card, 4096, 4096))
    back = float(embedding_s(card, 4096, 4096, backward=True, local_parameters=1e8))
    assert back - lookup == pytest.approx(2e8 / rate)
    loss = float(cross_entropy_s(card, 4096, 32000, bytes_per_logit=26))
    assert loss == pytest.approx(26 * 4096 * 32000 / rate + 3 * launch)
    there, again = (float(permute_s(card, 1e4, 4096, backward=way)) for way in (False, True))
    assert (again - 2 * launch) / (there - 2 * launch) == pytest.approx(1.5)
    # without the fused kernel every row of a sum is read and written: 4 bytes more in 16 bits
    for way in (False, True):
        apart = [float(permute_s(card, 1e4, 4096, backward=way, fused=f)) for f in (False, True)]
        assert (apart[0] - apart[1]) / there == pytest.approx(4 / (8 + 2 * launch / there), rel=0.2)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("gemm", "bf16", "value", "peak_share"), 1.2, "0.02 to 1"),
        (("gemm", "bf16", "value", "peak_shar"), 0.5, "'peak_share'"),
        (("gemm", "bf16", "quality"), "good", "expected 'measured', 'derived' or 'nominal'"),
        (("gemm", "bf16", "source"), "", "expected source of the value"),
        (("gemm", "bf16", "spread"), -1, "0 to 2"),
        (("gemm", "bf17"), {}, "bf17"),
        (("clock",), 0.9, "expected an object with the keys value, quality, source, spread"),
        (("clock", "value", "share"), True, "expected a number"),
        (("clock", "note"), "x", "unknown"),
        (("memory", "elementwise", "value"), 0.5, "expected an object with the key share"),
        (("attention", "flash2"), {}, "forward"),
        (("attention", "flash2"), 1, "expected an object with the key forward"),
    ],
)
def test_mistakes_are_named(
    path: tuple[str, ...], value: Any, message: str, tmp_path: Path
) -> None:
    """One sentence names the file, the key, the value and what was expected."""
    card = json.loads(catalog.find_card("a100").read_text(encoding="utf-8"))
    place = card["kernels"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "card.json"
    file.write_text(json.dumps(card), encoding="utf-8")
    with pytest.raises(DocumentError) as caught:
        load_card(str(file))
    text = str(caught.value)
    assert message in text
    assert "card.json" in text
    assert "kernels" in text


def test_missing_keys_are_named(tmp_path: Path) -> None:
    """A constant or a whole section that is missing is asked for; a comment is no key."""
    card = json.loads(catalog.find_card("a100").read_text(encoding="utf-8"))
    file = tmp_path / "card.json"

    def message(changed: dict[str, Any]) -> str:
        file.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(DocumentError) as caught:
            kernels_of(load_card(str(file)))
        return str(caught.value)

    less = copy.deepcopy(card)
    del less["kernels"]["gemm"]["bf16"]["value"]["peak_share"]
    assert "peak_share" in message(less)
    assert "missing" in message(less)
    less = copy.deepcopy(card)
    del less["kernels"]["clock"]["source"]
    assert "this key is missing, expected source of the value" in message(less)
    less = copy.deepcopy(card)
    del less["kernels"]
    assert "kernel times need it" in message(less)
    card["kernels"]["clock"]["_note"] = "measured again"
    file.write_text(json.dumps(card), encoding="utf-8")
    assert kernels_of(load_card(str(file))).clock == card["kernels"]["clock"]["value"]["share"]


def table(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a table as the measured ones are."""
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_benchmark_scores_tables(tmp_path: Path) -> None:
    """Rows that are 10 % slower than priced are scored as -9.1 %, by halves and kinds."""
    card = kernels_of(load_card("h100"))
    gemms: list[dict[str, object]] = []
    for m in range(512, 512 + 256 * 40, 256):
        time_us = float(gemm_s(card, m, 4096, 4096)) * 1.1e6
        row = {"gpu": "H100-SXM5-80GB", "dtype": "bf16", "m": m, "n": 4096, "k": 4096}
        for framework, factor in (("a", 0.5), ("b", 1.0), ("c", 2.0)):
            source = f"ai-dynamo/aiconfigurator:{framework}"
            more = {"time_us": time_us * factor, "layout": "", "batch": 1, "source": source}
            gemms.append({**row, **more})
    gemms.append({**gemms[0], "gpu": "Gaudi3"})
    gemms.append({**gemms[0], "source": "vidur", "layout": "TN fwd"})
    table(tmp_path / "gemm.csv.gz", gemms)
    attention = {
        "gpu": "H100-SXM5-80GB",
        "dtype": "bf16",
        "phase": "context",
        "batch": 1,
        "seq_q": 8192,
        "seq_kv": 8192,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "time_us": 1000.0,
        "kernel": "fa3",
        "deterministic": "",
        "head_dim_v": 128,
        "causal": 1,
        "window": "",
    }
    training = {"phase": "bwd", "kernel": "cudnn 9", "deterministic": "0", "window": "1024"}
    table(tmp_path / "attention.csv.gz", [attention, {**attention, **training}])
    moe = {
        "source": "x:trtllm/1",
        "gpu": "H100-SXM5-80GB",
        "dtype": "bf16",
        "op": "fused_moe",
        "tokens": 4096,
        "hidden": 4096,
        "inter": 2048,
        "topk": "2",
        "experts": 8,
        "tp": 1,
        "ep": 1,
        "distribution": "balanced",
        "groups": "",
        "m_per_group": "",
        "n": "",
        "k": "",
        "time_us": 900.0,
    }
    grouped = {"op": "grouped_gemm_fwd", "groups": 8, "m_per_group": 512, "n": 4096, "k": 4096}
    table(tmp_path / "moe.csv.gz", [moe, {**moe, **grouped}])
    add = {"gpu": "A100-PCIe-80GB", "dtype": "fp32", "op": "add", "phase": "fwd"}
    table(
        tmp_path / "elementwise.csv.gz", [{**add, "rows": 16384, "width": 4096, "time_us": 500.0}]
    )

    found = list(kernels_vs_measured.scores(tmp_path))
    kinds = {score.kind for score in found}
    assert {"gemm", "gemm in a loop, TN fwd", "attention flash3, prefill"} < kinds
    assert {"attention cudnn, backward", "fused MoE, balanced"} < kinds
    assert {"grouped gemm in a loop", "memory-bound, elementwise"} < kinds
    halves = [score for score in found if score.kind == "gemm"]
    assert {score.half for score in halves} == {"fitted", "unseen"}
    assert sum(score.rows for score in halves) == 40
    for score in halves:
        # the median over the frameworks of a shape is the middle one
        assert score.bias == pytest.approx(100 * (1 / 1.1 - 1))
        assert score.median == pytest.approx(-score.bias)


def test_benchmark_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The speed is measured all the same, and the reason for the rest is said."""
    assert kernels_vs_measured.main(["--kernels", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "skipped: no measured kernels in" in out
    assert "million prices per CPU second" in out


def test_speed_and_shapes() -> None:
    """Empty and broadcast arrays are priced; a price takes no microsecond by a wide margin."""
    card = kernels_of(load_card("h100"))
    assert gemm_s(card, np.array([]), 8, 8).shape == (0,)
    assert gemm_s(card, np.ones((3, 1)), np.ones(4), 8).shape == (3, 4)
    rates = kernels_vs_measured.prices_per_second(20_000, 2)
    # CPU seconds of a busy machine: the benchmark asks for a million
    assert min(rates.values()) > 2e5
