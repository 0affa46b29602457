"""Predicts how long a run takes, for `--dry-run`: a few cells are measured, the rest is scaled."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.model import LayerSpec, ModelSpec
from autopar.specs import head_dim, parameter_count
from profiler.measure import Policy, expected_seconds, forecast_line
from profiler.model.cells import ModelCell
from profiler.model.measuring import Measurer

__all__ = ["Forecast", "describe_forecast", "forecast", "work"]

_PROBE_ITERS = 4
_PROBE_SECONDS = 0.2
_LONG_PROBE_S = 0.3
"""Longest repetition that is probed for what large cells take."""
_SHORT_TOKENS = 64
"""Sequence length that any device is through with in a moment."""
_VARIATION = 0.05
"""Scatter that is assumed of every cell."""
_OPTIMIZER_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run would do, and how long each cell will take."""

    cells: tuple[tuple[ModelCell, float], ...]
    """Cells with seconds."""
    probe_s: float
    """What probing took."""

    @property
    def seconds(self) -> float:
        """Expected duration of the whole run."""
        return sum(seconds for _, seconds in self.cells)


def describe_forecast(found: Forecast) -> str:
    """Return the forecast as lines of text."""
    width = max((len(cell.key) for cell, _ in found.cells), default=0)
    lines = [f"{'cell':<{width}s}  {'seconds':>8s}"]
    lines += [f"{cell.key:<{width}s}  {seconds:>8.1f}" for cell, seconds in found.cells]
    lines.append(forecast_line(len(found.cells), found.seconds, found.probe_s))
    return "\n".join(lines) + "\n"


def work(spec: ModelSpec, cell: ModelCell) -> float:
    """Return what a forward of a cell takes, in FLOP; in tokens where the sizes are unknown.

    2 FLOP per parameter and token, and 4*S^2*width of the scores, halved where causal.
    """
    counts = cell.num_layers or tuple(
        int(cell.part == "layer" and kind == cell.layer_type) for kind in range(len(spec.layers))
    )
    seqs = cell.seq_lengths if cell.part != "layer" else cell.seq_lengths * len(counts)
    total = sum(
        count * _layer_work(layer, seq)
        for count, layer, seq in zip(counts, spec.layers, seqs, strict=True)
    )
    if cell.part != "layer":
        last = spec.layers[-1]
        total += 2.0 * seqs[-1] * last.hidden_size * (spec.vocab_size or 1)
    return cell.batch * total / cell.degree


def _layer_work(layer: LayerSpec, seq: int) -> float:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        return float(seq * layer.hidden_size)
    parameters = parameter_count(layer)
    if layer.num_experts is not None and layer.experts_per_token is not None:
        matrices = (3 if layer.gated_mlp else 2) * layer.hidden_size * layer.ffn_hidden_size
        parameters -= (layer.num_experts - layer.experts_per_token) * matrices
    scores = 4.0 * seq * layer.num_heads * head_dim(layer) * (0.5 if layer.causal else 1.0)
    return seq * (2.0 * parameters + scores)


def forecast(cells: Sequence[ModelCell], spec: ModelSpec, measurer: Measurer) -> Forecast:
    """Return how long `cells` will take; measures a few of them, and shortly."""
    begun_s = time.perf_counter()
    policy = measurer.policy
    measurer.policy = replace(
        policy, iters=_PROBE_ITERS, warmup=1, max_seconds=min(policy.max_seconds, _PROBE_SECONDS)
    )
    try:
        probes = _probes(cells, spec, measurer)
        memory_s = _memory_seconds(cells, measurer)
    finally:
        measurer.policy = policy
    seconds = [
        memory_s if cell.quantity == "memory" else _cell_seconds(cell, spec, probes, policy)
        for cell in cells
    ]
    return Forecast(
        cells=tuple(zip(cells, seconds, strict=True)), probe_s=time.perf_counter() - begun_s
    )


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """The seconds of one cell: of its forward, of all its passes, and around them."""

    work: float
    forward_s: float
    repetition_s: float
    setup_s: float
    optimizer_s: float


def _memory_seconds(cells: Sequence[ModelCell], measurer: Measurer) -> float:
    """Return what one exact count takes; the first one loads what all need."""
    chosen = [cell for cell in cells if cell.quantity == "memory"]
    if not chosen:
        return 0.0
    measurer.measure(chosen[0])
    return measurer.measure(chosen[-1]).elapsed_s


def _probes(cells: Sequence[ModelCell], spec: ModelSpec, measurer: Measurer) -> list[_Probe]:
    """Return probes of the smallest layer and of the largest that is still quick.

    Where the smallest is not quick itself, of a short sequence and of a part that is quick.
    """
    timed = [c for c in cells if c.quantity == "time" and c.part == "layer"]
    ordered = sorted(timed, key=lambda cell: work(spec, cell))
    if not ordered:
        return []
    short = _shorter(ordered[0], 1, _SHORT_TOKENS)
    found = _probe(short, spec, measurer)  # loads what all need
    if found and found[0].repetition_s < _LONG_PROBE_S:
        found = _probe(short, spec, measurer)
    limit = found[0].work * _LONG_PROBE_S / found[0].repetition_s if found else math.inf
    if work(spec, ordered[0]) > limit:
        # no real cell is quick, as on a CPU: parts of the smallest stand in for it
        parts = _parts(ordered[0])
        ordered = sorted({*parts, short}, key=lambda cell: work(spec, cell))
    elif ordered[0] != short:
        found = _probe(ordered[0], spec, measurer)
        limit = found[0].work * _LONG_PROBE_S / found[0].repetition_s if found else 0.0
    if found:
        larger = [cell for cell in ordered if found[0].work < work(spec, cell) <= limit]
        found += _probe(larger[-1], spec, measurer) if larger else []
    return found


def _shorter(cell: ModelCell, batch: int, tokens: int) -> ModelCell:
    """Return a cell with a smaller batch and shorter sequences, where it has larger ones."""
    return replace(
        cell,
        batch=min(cell.batch, batch),
        seq_lengths=tuple(min(length, tokens) for length in cell.seq_lengths),
        encoder_seq_length=cell.encoder_seq_length and min(cell.encoder_seq_length, tokens),
    )


def _parts(cell: ModelCell) -> list[ModelCell]:
    """Return smaller and smaller parts of a cell: half the batch, then half the sequence."""
    found = []
    batch, tokens = cell.batch // 2, max(cell.seq_lengths)
    while batch or tokens > _SHORT_TOKENS:
        found.append(_shorter(cell, max(batch, 1), tokens))
        if batch > 1:
            batch //= 2
        else:
            batch, tokens = 0, max(tokens // 2, _SHORT_TOKENS)
    return found


def _probe(cell: ModelCell, spec: ModelSpec, measurer: Measurer) -> list[_Probe]:
    measured = measurer.measure(cell)
    if measured.status != "ok":
        return []
    # what disturbs a short probe makes it longer
    times = {name: min(samples) for name, samples in measured.samples_s.items()}
    optimizer_s = times.pop("optimizer", 0.0)
    sampled_s = sum(sum(samples) for samples in measured.samples_s.values())
    return [
        _Probe(
            work=work(spec, cell),
            forward_s=times["forward"],
            repetition_s=sum(times.values()),
            setup_s=max(0.0, measured.elapsed_s - sampled_s),
            optimizer_s=optimizer_s,
        )
    ]


def _cell_seconds(
    cell: ModelCell, spec: ModelSpec, probes: Sequence[_Probe], policy: Policy
) -> float:
    """Return the expected seconds of a cell: probes are joined by a line, or start at 0."""
    if not probes:
        return 0.0
    small, large = probes[0], probes[-1]
    size = work(spec, cell)
    forward_only = cell.num_layers is not None
    low, high = (p.forward_s if forward_only else p.repetition_s for p in (small, large))
    if large.work > small.work:
        slope = max(0.0, (high - low) / (large.work - small.work))
        repetition_s = max(low + slope * (size - small.work), low * min(1.0, size / small.work))
    else:
        repetition_s = low * size / small.work
    seconds = large.setup_s + expected_seconds(repetition_s, 0.0, _VARIATION, policy)
    if large.optimizer_s > 0.0 and cell.part == "layer":
        shorter = replace(policy, max_seconds=policy.max_seconds * _OPTIMIZER_SHARE)
        seconds += expected_seconds(large.optimizer_s, 0.0, _VARIATION, shorter)
    return seconds
