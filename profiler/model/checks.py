"""Says what is wrong with the cells of a profile, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from autopar.model import TimePoint
from autopar.model_measurements import ModelMeasurement
from autopar.stats import warnings_of
from autopar.units import format_count
from profiler.model.options import GALVATRON_BATCHES, Mode

__all__ = [
    "ON_DEVICE",
    "Size",
    "device_differences",
    "few_batches",
    "forward_s",
    "layer_differences",
    "missing_cells",
    "unsteady_times",
]

ON_DEVICE = "% on the device: "
"""In the note of a memory cell whose exact and device figures differ."""
Size = tuple[int, int, int]
"""Layer type, batch, sequence length."""
_APART = 0.10
"""A layer measured alone and one by difference may differ by so much without a warning."""


def forward_s(measurement: ModelMeasurement) -> float:
    """Return the median forward of a cell, in seconds for the whole batch."""
    return median(measurement.samples_s["forward"])


def device_differences(cells: Iterable[ModelMeasurement]) -> list[str]:
    """Return a sentence on the cells that their device takes other memory for, if there are."""
    apart = {m.key: note for m in cells for note in m.notes if ON_DEVICE in note}
    if not apart:
        return []
    key, note = next(iter(apart.items()))
    differ = format_count(len(apart), "cell differs from its", "cells differ from their")
    return [f"{differ} device by over 1 %; {key}: {note}"]


def missing_cells(found: Mapping[str, ModelMeasurement]) -> list[str]:
    """Return sentences on cells that gave nothing, one per reason."""
    by_reason: dict[str, list[str]] = {}
    for m in found.values():
        if m.status != "ok":
            by_reason.setdefault(f"{m.status}: {m.reason}", []).append(m.key)
    return [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''} {reason}"
        for reason, keys in by_reason.items()
    ]


def few_batches(layers: list[tuple[TimePoint, ...]], mode: Mode | None) -> list[str]:
    """Return warnings where batch mode has fewer batch sizes than Galvatron takes."""
    if mode != "batch" or not layers or not layers[0]:
        return []
    counts = {p.seq_length: 0 for p in layers[0]}
    for point in layers[0]:
        counts[point.seq_length] += 1
    return [
        f"{format_count(count, 'batch size was', 'batch sizes were')} measured at sequence length "
        f"{seq}, and Galvatron refuses batch mode with fewer than {GALVATRON_BATCHES}: measure "
        f"with --resume --bsz 1:{GALVATRON_BATCHES}"
        for seq, count in counts.items()
        if count < GALVATRON_BATCHES
    ]


def layer_differences(stacks: list[ModelMeasurement], alone: Mapping[Size, float]) -> list[str]:
    """Return warnings where a layer alone takes much more or less than one among others."""
    apart: list[tuple[float, str]] = []
    checked = 0
    by_size: dict[tuple[int, tuple[int, ...]], list[ModelMeasurement]] = {}
    for m in stacks:
        by_size.setdefault((m.batch, tuple(m.seq_lengths)), []).append(m)
    for (batch, lengths), runs in by_size.items():
        low = min(runs, key=lambda m: m.num_layers or [])
        for kind, seq in enumerate(lengths):
            direct = alone.get((kind, batch, seq))
            more = max(runs, key=lambda m: (m.num_layers or [])[kind])
            count = (more.num_layers or [])[kind] - (low.num_layers or [])[kind]
            if direct is None or count < 1:
                continue
            checked += 1
            ratio = (forward_s(more) - forward_s(low)) / count / direct
            if abs(ratio - 1.0) > _APART:
                name = f"layertype_{kind}_bsz{batch}_seq{seq}"
                apart.append((abs(ratio - 1.0), f"{name} (x{ratio:.2f})"))
    if not apart:
        return []
    text = (
        f"{len(apart)} of {format_count(checked, 'layer time')} "
        f"{'differs' if len(apart) == 1 else 'differ'} by more than {100 * _APART:.0f} % from the "
        f"difference of whole forwards, most {max(apart)[1]}: is the machine busy with something "
        "else?"
    )
    return [text]


def unsteady_times(cells: list[ModelMeasurement]) -> list[str]:
    """Return a sentence on the whole layers whose samples look suspicious, if there are."""
    suspicious = {
        m.key: said[0]
        for m in cells
        if (said := warnings_of(m.samples_s["forward"])) and m.part == "layer" and m.degree == 1
    }
    if not suspicious:
        return []
    key, first = next(iter(suspicious.items()))
    are = format_count(len(suspicious), "layer time is", "layer times are")
    return [f"{are} unsteady; {key}: {first}"]
