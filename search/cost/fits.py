"""Fits: from measured points to the numbers that the formulas use, once per model.

Source: cost-model.md section 1 (compute) and "Memory of a rank" (sequence mode). All results are
in seconds and bytes; b is the number of samples that a tensor group processes together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from autopar.model import LayerMemory, LayerProfile, ModelProfile, OtherMemory
from autopar.model_measurements import Form
from autopar.time_fits import BAD_FIT, REACH, FittedTimes, fit_times, terms_of
from search.options import SearchOptions

__all__ = [
    "ComputeFit",
    "fit_layer_time",
    "fit_measured_other_time",
    "fit_measured_time",
    "fit_other_time",
    "layer_memory",
    "other_memory",
]

F64 = NDArray[np.float64]
_Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ComputeFit:
    """Seconds of b samples at one sequence length: launch_s + b*sample_s."""

    launch_s: float
    """Part that neither the batch nor sharding changes."""
    sample_s: float
    attention_s: float | None
    """Part of `sample_s` that grows with the square of the sequence; None when not fitted."""
    largest_batch: int
    """Largest batch that was measured."""

    def forward_s(self, batch: F64) -> F64:
        """Return the unsharded forward of `batch` samples, in seconds."""
        result: F64 = self.launch_s + batch * self.sample_s
        return result

    def sharded_forward_s(self, batch: F64, shards: F64) -> F64:
        """Return the forward of `batch` samples over `shards` ranks: c0 + (F - c0)/(t*c)."""
        result: F64 = self.launch_s + batch * self.sample_s / shards
        return result


def fit_layer_time(
    kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions, note: _Note
) -> ComputeFit:
    """Return the fitted forward of one layer at `seq_length`.

    static: proportional to b; batch: c0 + c1*b; sequence: c0 + b*(c1*S + c2*S^2), c0 only with
    several batch sizes. Raises InputError when the measurements cannot answer.
    """
    points = [(p.batch, (p.seq_length,), p.forward_s) for p in profile.times]
    return _fit(f"layer type {kind}", points, (seq_length,), options, note, quadratic=True)


def fit_measured_time(
    name: str,
    points: Sequence[tuple[int, tuple[int, ...], float]],
    seq_length: int,
    options: SearchOptions,
    note: _Note,
) -> ComputeFit:
    """Return the fit of other times of a layer, (batch, lengths, seconds), in the same forms."""
    return _fit(name, points, (seq_length,), options, note, quadratic=True)


def fit_other_time(
    profile: ModelProfile, seq_lengths: tuple[int, ...], options: SearchOptions, note: _Note
) -> ComputeFit:
    """Return the fitted forward of embedding, head and loss; linear in S in sequence mode."""
    points = [(p.batch, p.seq_lengths, p.forward_s) for p in profile.other_times]
    return fit_measured_other_time("embedding and head", points, seq_lengths, options, note)


def fit_measured_other_time(
    name: str,
    points: Sequence[tuple[int, tuple[int, ...], float]],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
) -> ComputeFit:
    """Return the fit of other times of embedding, head and loss, in the forms of their forward."""
    return _fit(name, points, seq_lengths, options, note, quadratic=False)


def _fit(
    name: str,
    points: Sequence[tuple[int, tuple[int, ...], float]],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
    *,
    quadratic: bool,
) -> ComputeFit:
    mode = options.time_profile_mode
    if not points:
        raise InputError(
            f"{name}: the computation file has no times; give another --time-profiling-path"
        )
    if mode == "sequence":
        return _fit_sequence(name, points, seq_lengths, options, note, quadratic=quadratic)
    here = [point for point in points if point[1] == seq_lengths]
    if not here:
        measured = sorted({lengths for _, lengths, _ in points})
        raise InputError(
            f"{name}: no computation time was measured at sequence length "
            f"{_lengths(seq_lengths)} (measured: {', '.join(map(_lengths, measured))}); "
            f"profile it, plan a measured length with {_nearest(measured, seq_lengths)}, "
            f"or use --time-profile-mode sequence"
        )
    batches = {batch for batch, _, _ in here}
    if mode == "batch" and len(batches) < 2:
        raise InputError(
            f"{name}: only batch size {here[0][0]} was measured at sequence length "
            f"{_lengths(seq_lengths)}, --time-profile-mode batch needs at least two; "
            f"profile more batch sizes or use --time-profile-mode static"
        )
    fitted = _checked_fit(name, here, mode, note, quadratic=quadratic)
    return ComputeFit(
        launch_s=fitted.launch_s,
        sample_s=fitted.sample_s(sum(seq_lengths)),
        attention_s=None,
        largest_batch=max(batches),
    )


def _fit_sequence(
    name: str,
    points: Sequence[tuple[int, tuple[int, ...], float]],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
    *,
    quadratic: bool,
) -> ComputeFit:
    length = sum(seq_lengths)
    measured = {sum(lengths) for _, lengths, _ in points}
    if len(measured) == 1 and length not in measured:
        raise InputError(
            f"{name}: only sequence length {max(measured)} was measured, "
            f"--time-profile-mode sequence needs at least two to price {length}; profile more"
        )
    if length > REACH * max(measured):
        if not options.extrapolate:
            raise InputError(
                f"{name}: sequence length {length} is more than twice the largest measured "
                f"one ({max(measured)}); profile longer sequences or pass --extrapolate"
            )
        note(f"extrapolated: {name} to sequence length {length}, beyond twice the measured")
    fitted = _checked_fit(name, points, "sequence", note, quadratic=quadratic)
    squared = fitted.coefficient("s_per_token_squared")
    return ComputeFit(
        launch_s=fitted.launch_s,
        sample_s=fitted.sample_s(length),
        attention_s=squared * length**2 if "s_per_token_squared" in fitted.terms else None,
        largest_batch=max(batch for batch, _, _ in points),
    )


def _checked_fit(
    name: str,
    points: Sequence[tuple[int, tuple[int, ...], float]],
    form: Form,
    note: _Note,
    *,
    quadratic: bool,
) -> FittedTimes:
    """Return the fit of (batch, lengths, seconds), and note one that is far off."""
    batches = [batch for batch, _, _ in points]
    tokens = [sum(lengths) for _, lengths, _ in points]
    terms = terms_of(form, batches, tokens, quadratic=quadratic)
    fitted = fit_times(batches, tokens, [time_s for _, _, time_s in points], terms)
    error = float(fitted.errors[fitted.worst])
    if abs(error) > BAD_FIT:
        batch, lengths, _ = points[fitted.worst]
        remedy = "; --time-profile-mode batch knows a launch cost" if form == "static" else ""
        note(
            f"bad fit: {name} in mode {form} is off by {error * 100:+.3g} % at batch {batch}, "
            f"sequence length {_lengths(lengths)}, the worst of {len(points)} times{remedy}"
        )
    return fitted


def layer_memory(
    kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions, note: _Note
) -> LayerMemory:
    """Return the memory of one layer at `seq_length`.

    static: as measured there; sequence: activations linear from the largest measured length,
    parameters from the smallest. Raises InputError when the measurements cannot answer.
    """
    table = profile.memory
    _require(f"layer type {kind}", [(s,) for s in table], (seq_length,), options)
    if options.memory_profile_mode == "static":
        return table[seq_length]
    largest = max(table)
    if seq_length != largest:
        note(f"scaled: memory of layer type {kind} linearly from sequence length {largest}")
    factor = seq_length / largest
    entry, kept = table[largest], table[largest].checkpoint_bytes_per_sample
    return LayerMemory(
        parameter_count=table[min(table)].parameter_count,
        activation_bytes_per_sample=_scaled(entry.activation_bytes_per_sample, factor),
        checkpoint_bytes_per_sample=None if kept is None else kept * factor,
        ulysses_activation_bytes_per_sample=_scaled(
            entry.ulysses_activation_bytes_per_sample, factor
        ),
        backward_bytes_per_sample=_scaled(entry.backward_bytes_per_sample, factor),
        ulysses_backward_bytes_per_sample=_scaled(entry.ulysses_backward_bytes_per_sample, factor),
    )


def other_memory(
    position: str,
    table: Mapping[tuple[int, ...], OtherMemory],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
) -> OtherMemory:
    """Return the memory of embedding and head at one position, by the rules of `layer_memory`."""
    name = f"embedding and head ({position} stage)"
    _require(name, list(table), seq_lengths, options)
    if options.memory_profile_mode == "static":
        return table[seq_lengths]
    largest = max(table, key=lambda lengths: (sum(lengths), lengths))
    smallest = min(table, key=lambda lengths: (sum(lengths), lengths))
    if seq_lengths != largest:
        note(f"scaled: memory of {name} linearly from sequence length {_lengths(largest)}")
    return OtherMemory(
        model_state_bytes=table[smallest].model_state_bytes,
        activation_bytes_per_sample=_scaled(
            table[largest].activation_bytes_per_sample, sum(seq_lengths) / sum(largest)
        ),
    )


def _require(
    name: str,
    measured: list[tuple[int, ...]],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
) -> None:
    if not measured:
        raise InputError(
            f"{name}: the memory file has no entry; give another --memory-profiling-path"
        )
    if options.memory_profile_mode == "static" and seq_lengths not in measured:
        raise InputError(
            f"{name}: no memory was measured at sequence length {_lengths(seq_lengths)} "
            f"(measured: {', '.join(map(_lengths, sorted(measured)))}); "
            f"profile it, plan a measured length with {_nearest(measured, seq_lengths)}, "
            f"or use --memory-profile-mode sequence"
        )


def _scaled(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {degree: value * factor for degree, value in values.items()}


def _nearest(measured: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> str:
    """Return the option that selects the measured length nearest to the wanted one."""
    near = min(measured, key=lambda lengths: (abs(sum(lengths) - sum(wanted)), lengths))
    return f"--seq-length {_lengths(near)}"


def _lengths(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))
