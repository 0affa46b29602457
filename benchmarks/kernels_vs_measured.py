"""Print the errors of priced kernels against measured ones, and prices per second of one core.

Run from the repository root: `python -m benchmarks.kernels_vs_measured [--kernels DIR]`. It reads
the public tables of kernel times to half of which the constants of the cards were fitted, and
prints errors per half. Without the tables it prints only its speed. Sums of kernels are not scored
here.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from autopar.arrays import F64, Bool
from autopar.rates.card import load_card
from autopar.rates.constants import Kernels, MemoryClass, kernels_of
from autopar.rates.kernels import Phase, attention_s, gemm_s, grouped_gemm_s
from autopar.rates.memory_bound import elements_s, memory_bound_s, permute_s
from benchmarks.metadata import ROOT, metadata

__all__ = ["Score", "main", "prices_per_second", "scores"]

KERNELS = ROOT.parent / "shared" / "cases" / "kernels"
CARDS = {
    "A100-SXM4-80GB": "a100-80gb",
    "A100-SXM4-40GB": "a100-40gb",
    "A100-PCIe-80GB": "a100-pcie-80gb",
    "A100-PCIe-40GB": "a100-40gb",
    "H100-SXM5-80GB": "h100-80gb",
    "H200-SXM-141GB": "h200",
    "B200-SXM-180GB": "b200",
    "B300-SXM": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000-BW": "rtx-pro-6000",
    "V100-PCIe-32GB": "v100",
}
"""Card of each device of the tables; devices without one are not priced."""
FRAMEWORKS = "ai-dynamo/"
"""Source with several frameworks per shape, measured in short bursts, to which surfaces are fitted.
Other sources run the same shapes in longer loops and are scored separately.
"""
LEAST = (256, 512, 512)
"""Smallest m, n, k in training; times of smaller ones are dominated by kernel launches."""
UNCACHED_BYTES = 1e8
"""Smaller tensors stay in the second-level cache between two runs of a benchmark."""
UNGATED_TOPK = "22"
"""Experts per token of the one model whose experts have no gate, and so another formula."""
FAMILIES = {
    "flash_attention": {"A100-SXM4-80GB": "flash2", "L40S": "flash2", "": "flash3"},
    "vllm_flash_attn": {"": "flash2"},
    "vllm_flash_attn_fa2": {"": "flash2"},
    "fa3": {"": "flash3"},
    "vllm_flash_attn_fa3": {"": "flash3"},
    "trtllm_mha": {"": "trtllm"},
    "vllm_flashinfer_trtllmprefill": {"": "trtllm"},
}
"""Kernel of a card for each prefill kernel of the tables, by device where they differ."""
OPERATIONS: Mapping[str, tuple[float, MemoryClass]] = {
    "residual_add": (6.0, "elementwise"),
    "ln": (8.0, "norm"),
    "softmax": (8.0, "softmax"),
    # in fp32: binary operations move 12 bytes, unary ones 8
    **dict.fromkeys(("add", "mul", "div", "pow"), (12.0, "elementwise")),
    **dict.fromkeys(("addu", "mulu", "divu", "relu", "gelu", "tanh"), (8.0, "elementwise")),
}
"""Counted bytes per element and class of the memory-bound operations that are scored."""

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Score:
    """Errors of one device, precision and kind; a half is of shapes the fit did or did not see."""

    kind: str
    gpu: str
    dtype: str
    half: str
    rows: int
    median: float
    """Median of |priced / measured - 1|, percent."""
    p90: float
    bias: float


def seen(*shape: float) -> bool:
    """Return True if the constants were fitted to a shape: half of all, by a checksum."""
    return zlib.crc32(",".join(f"{size:.0f}" for size in shape).encode()) % 2 == 0


def scores(folder: Path) -> Iterator[Score]:
    """Yield the errors of every table in the folder."""
    cards = {gpu: kernels_of(load_card(card)) for gpu, card in CARDS.items()}
    yield from _gemm(folder / "gemm.csv.gz", cards)
    yield from _attention(folder / "attention.csv.gz", cards)
    yield from _moe(folder / "moe.csv.gz", cards)
    yield from _elementwise(folder / "elementwise.csv.gz", cards)


def _read(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _score(
    kind: str, gpu: str, dtype: str, priced_s: F64, measured_s: F64, fitted: Bool | None = None
) -> Iterator[Score]:
    error = priced_s / measured_s - 1
    halves = {"all": np.ones(len(error), dtype=np.bool_)}
    if fitted is not None:
        halves = {"fitted": fitted, "unseen": ~fitted}
    for half, chosen in halves.items():
        part = 100 * error[chosen]
        if len(part):
            yield Score(
                kind=kind,
                gpu=gpu,
                dtype=dtype,
                half=half,
                rows=len(part),
                median=float(np.median(abs(part))),
                p90=float(np.quantile(abs(part), 0.9)),
                bias=float(np.median(part)),
            )


def _table(groups: Iterable[Sequence[float]]) -> F64:
    return np.array(list(groups), dtype=np.float64).T


# --------------------------------------------------------------------------------------------------
# GEMM


def _gemm(path: Path, cards: Mapping[str, Kernels]) -> Iterator[Score]:
    bursts: dict[tuple[str, str], dict[tuple[float, ...], list[float]]]
    bursts = defaultdict(lambda: defaultdict(list))
    loops: dict[tuple[str, str, str], list[tuple[float, ...]]] = defaultdict(list)
    for row in _read(path):
        gpu, dtype = row["gpu"], row["dtype"]
        if gpu not in cards or float(row["batch"]) > 1:
            continue
        shape = tuple(float(row[key]) for key in ("m", "n", "k"))
        if any(size < least for size, least in zip(shape, LEAST, strict=True)):
            continue
        measured = float(row["time_us"]) * 1e-6
        if row["source"].startswith(FRAMEWORKS) or dtype == "fp32":
            bursts[gpu, dtype][shape].append(measured)
        elif row["layout"]:
            loops[gpu, dtype, row["layout"]].append((*shape, measured))
    for (gpu, dtype), shapes in sorted(bursts.items()):
        m, n, k = _table(shapes)
        measured_s = np.array([float(np.median(times)) for times in shapes.values()])
        fitted = np.array([seen(*shape) for shape in shapes])
        priced = gemm_s(cards[gpu], m, n, k, dtype=dtype)
        yield from _score("gemm", gpu, dtype, priced, measured_s, fitted)
    for (gpu, dtype, layout), rows in sorted(loops.items()):
        m, n, k, measured_s = _table(rows)
        # a longer loop heats the chip as a run does
        priced = gemm_s(cards[gpu], m, n, k, dtype=dtype, clock=cards[gpu].clock)
        yield from _score(f"gemm in a loop, {layout}", gpu, dtype, priced, measured_s)


# --------------------------------------------------------------------------------------------------
# Attention

_ATTENTION = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
_TRAINING = ("head_dim_v", "causal", "window")


def _attention(path: Path, cards: Mapping[str, Kernels]) -> Iterator[Score]:
    prefill: dict[tuple[str, str], dict[tuple[float, ...], list[float]]]
    prefill = defaultdict(lambda: defaultdict(list))
    training: dict[tuple[str, str, str, str], list[tuple[float, ...]]] = defaultdict(list)
    for row in _read(path):
        gpu, dtype, phase = row["gpu"], row["dtype"], row["phase"]
        if gpu not in cards or float(row["seq_q"]) < 1024:
            continue
        shape = tuple(float(row[key]) for key in _ATTENTION)
        batch, queries, _, heads, _, width = shape
        measured = float(row["time_us"]) * 1e-6
        if phase == "context":
            families = FAMILIES.get(row["kernel"], {})
            kernel = families.get(gpu, families.get(""))
            # fewer queries than that leave multiprocessors idle, as training never does
            large = batch * heads * queries >= 16384 and width <= 256
            if kernel in cards[gpu].section.attention and dtype == "bf16" and large:
                prefill[gpu, str(kernel)][shape].append(measured)
            continue
        kernel = _training_kernel(row["kernel"], dtype)
        # deterministic backwards are other kernels, 13 % slower at widths up to 128
        other = row["deterministic"] not in ("", "0") and width <= 128 and phase == "bwd"
        if kernel in cards[gpu].section.attention and not other:
            last = tuple(float(row[key] or "inf") for key in _TRAINING)
            training[gpu, dtype, phase, str(kernel)].append((*shape, *last, measured))
    for (gpu, kernel), shapes in sorted(prefill.items()):
        batch, queries, keys, heads, kv_heads, width = _table(shapes)
        measured_s = np.array([float(np.median(times)) for times in shapes.values()])
        priced = attention_s(
            cards[gpu],
            batch,
            heads,
            queries,
            keys,
            kernel=kernel,
            kv_heads=kv_heads,
            head_dim=width,
        )
        # these measurements also copy keys and values into the cache, read and written
        cache = 2 * 2 * batch * keys * kv_heads * 2 * width
        priced = priced + memory_bound_s(cards[gpu], cache, count=0)
        fitted = np.array([seen(*shape) for shape in shapes])
        yield from _score(f"attention {kernel}, prefill", gpu, "bf16", priced, measured_s, fitted)
    for (gpu, dtype, phase, kernel), rows in sorted(training.items()):
        yield from _training(cards[gpu], (gpu, dtype, phase, kernel), rows)


def _training(
    card: Kernels, what: tuple[str, str, str, str], rows: Sequence[tuple[float, ...]]
) -> Iterator[Score]:
    gpu, dtype, phase, kernel = what
    direction: Phase = "forward" if phase == "fwd" else "backward"
    priced = [
        float(
            attention_s(
                card,
                batch,
                heads,
                queries,
                keys,
                kernel=kernel,
                phase=direction,
                kv_heads=kv_heads,
                head_dim=width,
                head_dim_v=width_v,
                causal=causal == 1,
                window=window if window > 0 else np.inf,
            )
        )
        for batch, queries, keys, heads, kv_heads, width, width_v, causal, window, _ in rows
    ]
    fitted = np.array([seen(*row[:6]) for row in rows])
    measured_s = np.array([row[-1] for row in rows])
    kind = f"attention {kernel}, {direction}"
    yield from _score(kind, gpu, dtype, np.array(priced), measured_s, fitted)


def _training_kernel(name: str, dtype: str) -> str | None:
    if name in ("flash_attention", "pyt_flash_attention"):
        return "flash2"
    if name.startswith("cudnn") or name in ("bf16", "fp8", "mxfp8"):
        return "cudnn" if dtype == "bf16" else f"cudnn-{dtype}"
    return None


# --------------------------------------------------------------------------------------------------
# Experts and memory-bound operations


def _moe(path: Path, cards: Mapping[str, Kernels]) -> Iterator[Score]:
    fused: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    grouped: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
    for row in _read(path):
        if row["gpu"] not in cards:
            continue
        key, measured = (row["gpu"], row["dtype"]), float(row["time_us"]) * 1e-6
        # the tuned kernels; Triton's of other frameworks reach a third of them at many rows
        tuned = row["op"] == "fused_moe" and ":trtllm" in row["source"]
        if tuned and row["distribution"] == "balanced" and row["topk"] != UNGATED_TOPK:
            names = ("tokens", "hidden", "inter", "topk", "experts", "tp", "ep")
            values = [float(row[name]) for name in names]
            if values[2] / values[5] >= LEAST[1]:
                fused[key].append((*values, measured))
        elif row["op"].startswith("grouped_gemm") and row["groups"]:
            names = ("m_per_group", "groups", "n", "k")
            grouped[key].append((*(float(row[name]) for name in names), measured))
    for (gpu, dtype), rows in sorted(grouped.items()):
        per_group, groups, n, k, measured_s = _table(rows)
        card = cards[gpu]
        priced = grouped_gemm_s(
            card, per_group, groups, n, k, dtype=dtype, clock=card.clock, sustained=True
        )
        yield from _score("grouped gemm in a loop", gpu, dtype, priced, measured_s)
    for (gpu, dtype), rows in sorted(fused.items()):
        tokens, hidden, inter, topk, experts, tp, ep, measured_s = _table(rows)
        card = cards[gpu]
        per_expert, local, width = tokens * topk / experts, experts / ep, inter / tp
        routed = per_expert * local
        priced = (
            grouped_gemm_s(card, per_expert, local, 2 * width, hidden, dtype=dtype, fused=True)
            + elements_s(card, routed * width, 6)
            + grouped_gemm_s(card, per_expert, local, hidden, width, dtype=dtype, fused=True)
            + permute_s(card, routed, hidden)
        )
        yield from _score("fused MoE, balanced", gpu, dtype, priced, measured_s)


def _elementwise(path: Path, cards: Mapping[str, Kernels]) -> Iterator[Score]:
    groups: dict[tuple[str, str, MemoryClass], list[tuple[float, ...]]] = defaultdict(list)
    for row in _read(path):
        known = row["op"] in OPERATIONS and row["gpu"] in cards and row["phase"] == "fwd"
        if not known or not row["rows"] or not row["width"]:
            continue
        elements = float(row["rows"]) * float(row["width"])
        bytes_per_element = OPERATIONS[row["op"]][0]
        if elements * bytes_per_element >= UNCACHED_BYTES:
            measured = float(row["time_us"]) * 1e-6
            key = (row["gpu"], row["dtype"], OPERATIONS[row["op"]][1])
            groups[key].append((elements, bytes_per_element, measured))
    for (gpu, dtype, kind), rows in sorted(groups.items()):
        elements_, bytes_, measured_s = _table(rows)
        priced = elements_s(cards[gpu], elements_, bytes_, kind=kind)
        yield from _score(f"memory-bound, {kind}", gpu, dtype, priced, measured_s)


# --------------------------------------------------------------------------------------------------
# Speed and output


def prices_per_second(count: int = 200_000, runs: int = 3) -> dict[str, float]:
    """Return how many GEMMs and attention kernels one core prices per CPU second."""
    card = kernels_of(load_card("h100-80gb"))
    draws = np.random.default_rng(0)
    m, n, k = (8.0 * draws.integers(32, 2048, count) for _ in range(3))
    length = 128.0 * draws.integers(1, 256, count)
    jobs = {
        "gemm": lambda: gemm_s(card, m, n, k),
        "attention": lambda: attention_s(card, 1, 32, length, length, kernel="cudnn"),
    }
    found = {}
    for name, job in jobs.items():
        took = []
        for _ in range(runs):
            start = time.process_time()
            priced = job()
            took.append(time.process_time() - start)
            assert np.isfinite(priced).all()
        found[name] = count / min(took)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of errors and the speed; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    parser.add_argument("--json", type=Path, help="write the table here too")
    asked = parser.parse_args(arguments)
    print(json.dumps(metadata()))
    speed = prices_per_second()
    for name, rate in speed.items():
        print(f"{name}: {rate / 1e6:.2f} million prices per CPU second, one core")
    if not (asked.kernels / "gemm.csv.gz").is_file():
        print(f"skipped: no measured kernels in {asked.kernels}; give --kernels DIR")
        return 0
    print(f"{'kind':34s} {'GPU':16s} {'dtype':10s} {'half':7s} {'rows':>6s}   med   p90   bias, %")
    found = []
    for score in scores(asked.kernels):
        found.append(score)
        print(
            f"{score.kind:34s} {score.gpu:16s} {score.dtype:10s} {score.half:7s} {score.rows:6d} "
            f"{score.median:5.1f} {score.p90:5.1f} {score.bias:+6.1f}"
        )
    if asked.json:
        table = {"prices_per_second": speed, "scores": [asdict(score) for score in found]}
        asked.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
