"""GEMM and attention times written plainly: one shape at a time, read from the card's own JSON.

Independent of `autopar.rates`: no arrays, no shared constants, no reader.
docs/concepts/estimates.md explains the constants.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8_block": 1, "mxfp8": 1, "nvfp4": 0.5}
RATES = {"fp8": 2, "fp8_block": 2, "mxfp8": 2, "nvfp4": 4}
CARDS = Path(__file__).resolve().parents[2] / "hardware_configs" / "cards"
TILES = """256x256 256x128 128x256 128x128 256x64 64x256 128x64 64x128 64x64 64x32 32x64"""


def _card(name: str) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((CARDS / f"{name}.json").read_text(encoding="utf-8"))
    return card


def _peak(card: dict[str, Any], dtype: str) -> float:
    device = card["device"]
    if dtype in RATES:
        return float(device["bf16_flop_per_s"]["value"] * RATES[dtype])
    return float(device[f"{dtype}_flop_per_s"]["value"])


def roofline_s(name: str, m: int, n: int, k: int, dtype: str) -> float:
    """Return a lower bound of GEMM seconds from the card's datasheet."""
    card = _card(name)
    result = max(WIDTHS[dtype], 2)
    moved = (m * k + n * k) * WIDTHS[dtype] + m * n * result
    flop_s = 2 * m * n * k / _peak(card, dtype)
    return max(flop_s, moved / float(card["device"]["memory_bytes_per_s"]["value"]))


def gemm_time_s(
    name: str,
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    batch: int = 1,
    clock: float = 1.0,
    sustained: bool = False,
) -> float:
    """Return the seconds of one batched GEMM, the cast of its input included."""
    card = _card(name)
    surfaces = card["kernels"]["gemm"]
    same = {"fp16": "bf16", "mxfp8": "fp8_block"}
    value = surfaces[dtype if dtype in surfaces else same[dtype]]["value"]
    sms = card["device"]["num_sms"]["value"]
    memory = card["device"]["memory_bytes_per_s"]["value"]
    per_sm = _peak(card, dtype) * value["peak_share"] * clock / sms
    times = []
    for tile in TILES.split():
        tm, tn = (int(side) for side in tile.split("x"))
        share = min(1.0, tm * tn / (tm + tn) * 3 / 256) ** value["tile_exponent"]
        for splits in [1, 2, 4, 8] if batch == 1 else [1]:
            blocks = batch * -(-m // tm) * -(-n // tn) * splits
            waves, whole = blocks / sms, -(-blocks // sms)
            rounding = value["wave_rounding"]
            waves = max(1.0, rounding * whole + (1 - rounding) * waves)
            time = waves * 2 * tm * tn * (k / splits + value["prologue_elements"])
            time /= per_sm * share
            if splits > 1:
                time += value.get("split_s", 2e-6) + 4 * m * n * (splits + 1) / (0.8 * memory)
            times.append(time)
    time = min(times)
    # the clock of a run is reduced already, and falls by less
    fall = value.get("slowdown", 0.0) * (0.4 if sustained else 1.0)
    time *= 1 + fall * math.log(1 + time * 1000)
    width = WIDTHS[dtype]
    moved = batch * ((m * k + n * k) * width + m * n * max(width, 2))
    time = max(time, moved / (value["memory_share"] * memory)) + value["launch_s"]
    if (n % 8 or k % 8) and dtype != "fp32":
        time *= 2.95
    if width < 2:
        time += batch * m * k * (2 + width) / (value.get("cast_share", 0.5) * memory)
    return time


def attention_time_s(
    name: str,
    kernel: str,
    batch: int,
    heads: int,
    seq: int,
    *,
    backward: bool = False,
    width: int = 128,
    causal: bool = True,
) -> float:
    """Return the seconds of flash attention of equal lengths, counting keys of every query."""
    card = _card(name)
    entry = card["kernels"]["attention"][kernel]
    value = entry["backward" if backward and "backward" in entry else "forward"]["value"]
    # a query at position i sees i keys and half of itself: (1/2 + 3/2 + ...) = seq / 2 on average
    keys = sum(i + 0.5 for i in range(seq)) / seq if causal else float(seq)
    # two GEMMs forward; five backward, including recomputed scores
    flop_per_pair = (10 if backward else 4) * width
    half = value["prologue_keys"] / 2
    sms = card["device"]["num_sms"]["value"]
    total = batch * heads * seq * (keys + half) * flop_per_pair
    longest = min(128, seq) * (seq + half) * flop_per_pair * sms
    exponent = value.get("narrow_exponent", 0.06) if width < 128 else value.get("wide_exponent", 0)
    rate = value["flop_per_s"] * (width / 128) ** exponent
    time = max(total + value.get("tail", 0.0) * longest, longest) / rate
    time *= 1 + value.get("slowdown", 0.0) * math.log(1 + time * 1000)
    moved = 2 * 2 * batch * heads * seq * 2 * width * (2 if backward else 1)
    memory = card["device"]["memory_bytes_per_s"]["value"]
    return max(time, moved / (0.6 * memory)) + float(value["launch_s"])
