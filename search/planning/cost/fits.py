"""Fits of measured times and memory for the cost formulas, and random draws of these fits.

Source: cost-model.md section 1 (compute) and "Memory of a rank" (sequence mode). Results are in
seconds and bytes; b is the number of samples of a micro-batch on a tensor group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64, I64
from autopar.documents.sidecar import Form
from autopar.errors import InputError
from autopar.records import Record
from autopar.run.model import (
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    OtherMemory,
    OtherTime,
    ShardedTime,
    head_dim,
)
from autopar.statistics import BAD_FIT, REACH, FittedTimes, fit_times, terms_of
from search.planning.cost.tables import Rows
from search.request.options import SearchOptions

_Note = Callable[[str], None]


class ComputeFit(Record):
    """Linear fit of the time of b samples at one sequence length: launch_s + b*sample_s."""

    launch_s: float
    """Seconds that depend neither on the batch nor on sharding."""
    sample_s: float
    attention_s: float | None
    """Part of `sample_s` that grows with the square of the sequence length; None if not fitted."""
    largest_batch: int
    """Largest measured batch."""

    def forward_s(self, batch: F64) -> F64:
        """Return the unsharded forward time of `batch` samples, seconds."""
        return self.launch_s + batch * self.sample_s

    def sharded_forward_s(self, batch: F64, shards: F64) -> F64:
        """Return the forward time of `batch` samples over `shards` ranks, seconds.

        Only the time above `launch_s` is divided by the shards.
        """
        return self.launch_s + batch * self.sample_s / shards


class MeasuredTime(Record):
    """One measured time, in seconds for the whole batch."""

    batch: int
    seq_lengths: tuple[int, ...]
    """One sequence length for a layer; those of all layer types for embedding and head."""
    time_s: float
    low_s: float | None = None
    high_s: float | None = None
    """5th and 95th percentile of the samples in seconds; None if unknown."""


def fit_layer_time(
    kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions, note: _Note
) -> ComputeFit:
    """Return the fit of a layer's forward times at `seq_length`; raises as `fit_measured`."""
    name, times = f"layer type {kind}", _forwards(profile)
    return fit_measured(name, times, (seq_length,), options, note, of_layer=True)


def fit_other_time(
    profile: ModelProfile, seq_lengths: tuple[int, ...], options: SearchOptions, note: _Note
) -> ComputeFit:
    """Return the fit of the forward times of embedding, head and loss; raises as `fit_measured`."""
    times = other_cells(profile.other_times)["forward"]
    return fit_measured(OTHER, times, seq_lengths, options, note, of_layer=False)


def fit_measured(
    name: str,
    times: Sequence[MeasuredTime],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
    *,
    of_layer: bool,
) -> ComputeFit:
    """Return the fit of measured times at `seq_lengths`, in the mode of `--time-profile-mode`.

    - static: proportional to b.
    - batch: c0 + c1*b.
    - sequence: c0 + b*(c1*S + c2*S^2), with c0 only for several batch sizes.
    - hybrid: as sequence, from times at `seq_lengths` only.

    Raises InputError if the mode needs more measurements.

    name : subject of errors and notes.
    of_layer : True for a layer, whose fit has a term in S^2.
    """
    mode = options.time_profile_mode
    if not times:
        raise InputError(
            f"{name}: the computation file has no times",
            remedy="Use another --time-profiling-path",
        )
    if mode == "sequence":
        return _fit_sequence(name, times, seq_lengths, options, note, quadratic=of_layer)
    # only mode sequence interpolates between lengths
    here = [time for time in times if time.seq_lengths == seq_lengths]
    if not here:
        measured = sorted({time.seq_lengths for time in times})
        raise InputError(
            f"{name}: no computation time was measured at sequence length "
            f"{_lengths(seq_lengths)} (measured: {', '.join(map(_lengths, measured))})",
            remedy=(
                "Profile it, use a measured length "
                f"({_nearest(measured, seq_lengths)}), or --time-profile-mode "
                "sequence"
            ),
        )
    batches = {time.batch for time in here}
    if mode == "batch" and len(batches) < 2:
        raise InputError(
            f"{name}: only batch size {here[0].batch} was measured at sequence "
            f"length {_lengths(seq_lengths)}, but --time-profile-mode batch "
            "needs at least two",
            remedy="Profile more batch sizes, or use --time-profile-mode static",
        )
    # hybrid mode at one length: a launch overhead if there are several batches, and tokens
    form: Form = "sequence" if mode == "hybrid" else mode
    fitted = _checked_fit(name, here, form, note, quadratic=of_layer)
    return ComputeFit(
        launch_s=fitted.launch_s,
        sample_s=fitted.sample_s(sum(seq_lengths)),
        attention_s=None,
        largest_batch=max(batches),
    )


def _fit_sequence(
    name: str,
    times: Sequence[MeasuredTime],
    seq_lengths: tuple[int, ...],
    options: SearchOptions,
    note: _Note,
    *,
    quadratic: bool,
) -> ComputeFit:
    length = sum(seq_lengths)
    measured = {sum(time.seq_lengths) for time in times}
    # times at one length do not determine the growth with length
    if len(measured) == 1 and length not in measured:
        raise InputError(
            f"{name}: only sequence length {max(measured)} was measured, but "
            f"--time-profile-mode sequence needs at least two to price {length}",
            remedy="Profile more sequence lengths",
        )
    if length > REACH * max(measured):
        if not options.extrapolate:
            raise InputError(
                f"{name}: sequence length {length} is more than twice the largest measured "
                f"one ({max(measured)})",
                remedy="Profile longer sequences, or add --extrapolate",
            )
        note(f"extrapolated: {name} to sequence length {length}, beyond twice the measured")
    fitted = _checked_fit(name, times, "sequence", note, quadratic=quadratic)
    squared = fitted.coefficient("s_per_token_squared")
    return ComputeFit(
        launch_s=fitted.launch_s,
        sample_s=fitted.sample_s(length),
        # the term in S^2 is attention, all others are linear in tokens
        attention_s=squared * length**2 if "s_per_token_squared" in fitted.terms else None,
        largest_batch=max(time.batch for time in times),
    )


def _checked_fit(
    name: str,
    times: Sequence[MeasuredTime],
    form: Form,
    note: _Note,
    *,
    quadratic: bool,
) -> FittedTimes:
    """Return the fit of measured times, with a note if its largest error exceeds `BAD_FIT`."""
    batches = [time.batch for time in times]
    tokens = [sum(time.seq_lengths) for time in times]
    terms = terms_of(form, batches, tokens, quadratic=quadratic)
    fitted = _fitted(tuple(batches), tuple(tokens), tuple(time.time_s for time in times), terms)
    error = float(fitted.errors[fitted.worst])
    if abs(error) > BAD_FIT:
        worst = times[fitted.worst]
        remedy = (
            ". Use --time-profile-mode batch, which includes a launch cost"
            if form == "static"
            else ""
        )
        note(
            f"bad fit: {name} in mode {form} is off by {error * 100:+.3g} % at batch "
            f"{worst.batch}, sequence length {_lengths(worst.seq_lengths)}, the worst of "
            f"{len(times)} times{remedy}"
        )
    return fitted


# A search of several parts, or with other options, fits the same times again and again.
_fitted = lru_cache(maxsize=4096)(fit_times)


def layer_memory(
    kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions, note: _Note
) -> LayerMemory:
    """Return the memory of one layer at `seq_length`, in the mode of `--memory-profile-mode`.

    static: the entry of that length. sequence: activations scaled linearly from the largest
    measured length, parameters of the smallest. Raises InputError without a matching entry.
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
    """Return the memory of embedding and head at one position, with the modes of `layer_memory`."""
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
            f"{name}: the memory file has no entry", remedy="Use another --memory-profiling-path"
        )
    if options.memory_profile_mode == "static" and seq_lengths not in measured:
        raise InputError(
            f"{name}: no memory was measured at sequence length {_lengths(seq_lengths)} "
            f"(measured: {', '.join(map(_lengths, sorted(measured)))})",
            remedy=(
                "Profile it, use a measured length "
                f"({_nearest(measured, seq_lengths)}), or --memory-profile-mode "
                "sequence"
            ),
        )


def _scaled(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {degree: value * factor for degree, value in values.items()}


def _nearest(measured: Sequence[tuple[int, ...]], wanted: tuple[int, ...]) -> str:
    """Return the option that selects the measured length nearest to the wanted one."""
    near = min(measured, key=lambda lengths: (abs(sum(lengths) - sum(wanted)), lengths))
    return f"--seq-length {_lengths(near)}"


def _lengths(lengths: tuple[int, ...]) -> str:
    return ",".join(map(str, lengths))


# --------------------------------------------------------------------------------------------------
# Computation of a layer: forward times of Galvatron's file format, and times of a sidecar file.
#
# Source: cost-model.md section 1 (compute). All results are in seconds on a rank; t is the tensor
# or Ulysses degree of a row, c its context degree.


Pass = Literal["forward", "backward", "recompute"]
PASSES: tuple[Pass, ...] = ("forward", "backward", "recompute")

OTHER = "embedding and head"
"""Name of embedding, head and loss in messages."""

_STANDS_FOR = {
    True: ("sp", "dtensor_sp"),
    False: ("tp", "dtensor"),
}
"""Sequence parallel -> (kind of Megatron layers, kind that may replace it in measurements). Kinds
with and without sequence parallelism do not replace each other, since norms and residuals process
S/t and S tokens. DTensor layers have local matrices of equal size."""


class ComputeFits(Record, eq=False):
    """Fitted times of one layer type at one sequence length."""

    whole: ComputeFit
    """Fit of the unsharded layer's forward."""
    measured: Mapping[tuple[Pass, bool, int], ComputeFit]
    """Fits by (pass, Ulysses, degree); forwards from degree 2, the others from degree 1."""

    def base(self, what: Pass, ulysses: bool, degree: int) -> tuple[int, ComputeFit] | None:
        """Return (largest measured degree that divides `degree`, its fit); None without any."""
        # a divisor, so that a rank's matrices are an integer fraction of the measured ones
        degrees = [d for w, u, d in self.measured if (w, u) == (what, ulysses) and degree % d == 0]
        if degrees:
            return max(degrees), self.measured[what, ulysses, max(degrees)]
        return (1, self.whole) if what == "forward" else None

    def seconds(self, what: Pass, rows: Rows, otherwise: F64 | None = None) -> F64:
        """Return the time of a pass for every row, (n,) seconds: c0 + (F - c0)*t0/(t*c).

        F is the time and c0 the launch overhead of the fit of `base`, measured at degree t0.

        otherwise : (n,) seconds of rows without a base; not needed for forwards.
        """
        if what == "forward":
            result = self.whole.sharded_forward_s(rows.batch, rows.shards)
        else:
            assert otherwise is not None, "only forwards are always measured"
            result = otherwise.copy()
        for at, degree, fit in self.used(what, rows):
            # measured at this degree: only the other of t*c shards divide the time after launch
            result[at] = fit.sharded_forward_s(rows.batch[at], rows.shards[at] / degree)
        return result

    def extrapolated(self, rows: Rows) -> Iterator[tuple[str, int]]:
        """Yield (name, largest batch) of fits used for more than twice their largest batch."""
        for what in PASSES:
            for at, degree, fit in self.used(what, rows):
                if rows.batch[at].max() > 2 * fit.largest_batch:
                    yield shard_name(what, bool(rows.ulysses[at[0]]), degree), fit.largest_batch

    def used(self, what: Pass, rows: Rows) -> Iterator[tuple[NDArray[np.int64], int, ComputeFit]]:
        """Yield (indices of rows, measured degree, fit) for each sharded fit used by rows."""
        for ulysses in (False, True):
            if not any((w, u) == (what, ulysses) for w, u, _ in self.measured):
                continue
            mine = rows.ulysses == ulysses
            for degree in sorted({*rows.tensor[mine].tolist()}):
                found = self.base(what, ulysses, int(degree))
                # the unsharded forward is the default of `seconds`
                if found is not None and found[1] is not self.whole:
                    yield np.flatnonzero(mine & (rows.tensor == degree)), *found


class OtherFits(Record, eq=False):
    """Fitted times of embedding, head and loss, unsharded."""

    forward: ComputeFit
    backward: ComputeFit | None = None
    """Fit of the backward; None if it was not measured."""

    def seconds(self, what: Pass, batch: F64, table: I64) -> F64 | None:
        """Return the seconds of every row, (n,); None if not measured.

        table : (n,) number of the row's table, which these fits ignore.
        """
        fit = self.forward if what == "forward" else self.backward
        return None if fit is None else fit.forward_s(batch)


def shard_name(what: Pass, ulysses: bool, degree: int) -> str:
    """Return a name such as `backward at tp=4` or `recompute`."""
    name = "ulysses" if ulysses else "tp"
    return what if degree == 1 else f"{what} at {name}={degree}"


def fit_computation(
    kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions, note: _Note
) -> ComputeFits:
    """Return the fits of one layer type at `seq_length` for all measured passes and degrees.

    Sharded times, backward and recomputation are skipped with a note if they cannot be fitted in
    the mode of the options. Raises InputError if the unsharded forward cannot be fitted.
    """
    whole = fit_layer_time(kind, profile, seq_length, options, note)
    measured: dict[tuple[Pass, bool, int], ComputeFit] = {}
    for (what, ulysses, degree), cells in measured_cells(kind, profile, options, note).items():
        if what == "forward" and degree == 1:
            continue  # fitted above
        name = f"layer type {kind}, {shard_name(what, ulysses, degree)}"
        try:
            fit = fit_measured(name, cells, (seq_length,), options, note, of_layer=True)
        except InputError as error:
            note(f"not used: {error}")
            continue
        # an unsharded layer is the same under both kinds
        for each in (False, True) if degree == 1 else (ulysses,):
            measured[what, each, degree] = fit
    return ComputeFits(whole=whole, measured=measured)


def fit_other(
    profile: ModelProfile, seq_lengths: tuple[int, ...], options: SearchOptions, note: _Note
) -> OtherFits:
    """Return the fits of embedding, head and loss, forward and (if measured) backward.

    A backward that cannot be fitted in the mode of the options is skipped with a note. Raises
    InputError if the forward cannot be fitted.
    """
    known = other_cells(profile.other_times)
    forward = fit_measured(OTHER, known["forward"], seq_lengths, options, note, of_layer=False)
    cells = known.get("backward", [])
    backward = None
    if cells:
        name = f"{OTHER}, backward"
        try:
            backward = fit_measured(name, cells, seq_lengths, options, note, of_layer=False)
        except InputError as error:
            note(f"not used: {error}")
    return OtherFits(forward=forward, backward=backward)


def other_cells(times: Sequence[OtherTime]) -> dict[Pass, list[MeasuredTime]]:
    """Return the measured times of embedding, head and loss by pass; the backward if measured."""
    passes: tuple[Pass, Pass] = ("forward", "backward")
    found = {what: [c for p in times for c in _cells(p, what, p.seq_lengths)] for what in passes}
    return {what: cells for what, cells in found.items() if cells or what == "forward"}


def _cells(
    point: ShardedTime | OtherTime, what: Pass, lengths: tuple[int, ...]
) -> Iterator[MeasuredTime]:
    """Yield the time of one pass of a measured point if it was measured."""
    time_s = getattr(point, f"{what}_s")
    if time_s is not None:
        low_s, high_s = getattr(point, f"{what}_low_s"), getattr(point, f"{what}_high_s")
        yield MeasuredTime(
            batch=point.batch, seq_lengths=lengths, time_s=time_s, low_s=low_s, high_s=high_s
        )


def _forwards(profile: LayerProfile) -> list[MeasuredTime]:
    """Return the measured unsharded forward times of a layer type."""
    return [
        MeasuredTime(
            batch=p.batch,
            seq_lengths=(p.seq_length,),
            time_s=p.forward_s,
            low_s=p.low_s,
            high_s=p.high_s,
        )
        for p in profile.times
    ]


def measured_cells(
    kind: int, profile: LayerProfile, options: SearchOptions, note: _Note
) -> dict[tuple[Pass, bool, int], list[MeasuredTime]]:
    """Return the measured times of every fit by (pass, Ulysses, degree), in a fixed order.

    Unsharded layers have keys with Ulysses False only; their forward times are those of
    `LayerProfile.times`.
    """
    result: dict[tuple[Pass, bool, int], list[MeasuredTime]] = {
        ("forward", False, 1): _forwards(profile)
    }
    for (ulysses, degree), points in sorted(_by_shard(kind, profile, options, note).items()):
        for what in PASSES:
            cells = [c for p in points for c in _cells(p, what, (p.seq_length,))]
            if cells:
                # an unsharded forward of a sidecar does not replace that of `LayerProfile.times`
                result.setdefault((what, ulysses, degree), cells)
    return result


def attention_share(spec: LayerSpec) -> float | None:
    """Return the share of attention in the forward FLOP of a layer, 0 to 1; None if unknown.

    Scores and their product with V: 4*S^2*heads*head_dim, half of it when causal; matrices:
    2*S*(parameters of QKV, output projection and the MLPs that a token visits).
    """
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        return None
    query = spec.num_heads * head_dim(spec)
    key_value = (spec.num_kv_heads or spec.num_heads) * head_dim(spec)
    # two GEMMs of S x S scores, two FLOP per multiply-add; a causal mask halves it
    attention = 4.0 * spec.seq_length**2 * query * (0.5 if spec.causal else 1.0)
    # number of MLPs that a token visits
    ffn = spec.ffn_hidden_size * (spec.experts_per_token or 1)
    matrices = spec.hidden_size * (
        # query and output, key and value, then up, down and gate
        2.0 * query + 2.0 * key_value + (3 if spec.gated_mlp else 2) * ffn
    )
    if spec.cross_attention:
        # a second attention with separate projections
        attention *= 2.0
        matrices += spec.hidden_size * (2.0 * query + 2.0 * key_value)
    # two FLOP per parameter and token
    return attention / (attention + 2.0 * spec.seq_length * matrices)


def _by_shard(
    kind: int, profile: LayerProfile, options: SearchOptions, note: _Note
) -> dict[tuple[bool, int], list[ShardedTime]]:
    """Return the usable measured times by (Ulysses, degree); one per batch and length."""
    own, second = _STANDS_FOR[options.sequence_parallel]
    cells: dict[tuple[bool, int], dict[tuple[int, int], ShardedTime]] = {}
    sharded = [p for p in profile.sharded_times if p.degree > 1 and p.kind != "ulysses"]
    exact = {p.degree for p in sharded if p.kind == own}
    for point in profile.sharded_times:
        ulysses = point.degree > 1 and point.kind == "ulysses"
        if point.degree > 1 and not ulysses:
            # another kind is used only at degrees without a measurement of the exact kind
            if point.kind != own and (point.kind != second or point.degree in exact):
                continue
            if point.kind == second:
                note(f"layer type {kind}: {second} layers are used for tp={point.degree}")
        group = cells.setdefault((ulysses, point.degree), {})
        group.setdefault((point.batch, point.seq_length), point)
    if sharded and not any(not ulysses and degree > 1 for ulysses, degree in cells):
        note(
            f"not used: layer type {kind}'s sharded layers of kind "
            f"{', '.join(sorted({p.kind for p in sharded}))}; a search "
            f"{'with' if options.sequence_parallel else 'without'} sequence "
            f"parallelism needs {own}"
        )
    return {key: list(group.values()) for key, group in cells.items()}


# --------------------------------------------------------------------------------------------------
# Replicas of the fits: compute times drawn at random within their measured spread.
#
# Source: cost-model.md "Spread of computation". The draws of a time depend only on its place in the
# profile, so two plans use the same replicas.


_Key = tuple[Pass, bool, int]

NUM_REPLICAS = 200
_SEED = 20240229
_OTHER_PLACE = 1_000_000
"""Seed of embedding, head and loss, larger than any layer type."""


class DrawnFits(ComputeFits, eq=False):
    """Fits of a layer type in which each copy of `repeated` rows uses another replica."""

    draws: LayerDraws
    rows_per_replica: int
    """Number of rows before `repeated`."""

    def seconds(self, what: Pass, rows: Rows, otherwise: F64 | None = None) -> F64:
        """Return the seconds of every row of every replica; as `ComputeFits.seconds`."""
        # rows are repeated replica by replica
        replica = np.arange(len(rows.batch)) // self.rows_per_replica
        if what == "forward":
            launch, sample = self.draws.coefficients(("forward", False, 1))
            result = launch[replica] + rows.batch * sample[replica] / rows.shards
        else:
            assert otherwise is not None, "only forwards are always measured"
            result = otherwise.copy()
        for at, degree, _ in self.used(what, rows):
            # unsharded layers have one fit for both kinds, stored as not Ulysses
            ulysses = bool(rows.ulysses[at[0]]) and degree > 1
            launch, sample = self.draws.coefficients((what, ulysses, degree))
            r = replica[at]
            # times are measured at this degree, so only the shards beyond it divide them
            result[at] = launch[r] + rows.batch[at] * sample[r] / (rows.shards[at] / degree)
        return result


class DrawnOtherFits(OtherFits, eq=False):
    """Fits of embedding, head and loss in which table number i uses replica i."""

    draws: OtherDraws

    def seconds(self, what: Pass, batch: F64, table: I64) -> F64 | None:
        """Return the seconds of every row of every replica; as `OtherFits.seconds`."""
        if super().seconds(what, batch, table) is None:
            return None
        launch, sample = self.draws.coefficients((what, False, 1))
        return launch[table] + batch * sample[table]


class Draws(ABC):
    """Random draws (replicas) of measured times and their fits, computed on demand."""

    def __init__(self, place: int, cells: Mapping[_Key, Sequence[MeasuredTime]]) -> None:
        """Store the measured times; place : number in the profile, part of the random seed."""
        self._place = place
        self._cells = cells
        self._fitted: dict[_Key, tuple[F64, F64]] = {}

    @abstractmethod
    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        """Return the fit of one replica."""

    @abstractmethod
    def _name(self, key: _Key) -> str:
        """Return a description of a fit's measured times."""

    @cached_property
    def _times(self) -> Mapping[_Key, F64]:
        """Replicas (times, NUM_REPLICAS) of every fit's measured times, seconds."""
        # seeded by place, so draws of one layer type do not depend on the others
        generator = np.random.default_rng((_SEED, self._place))
        return {
            key: np.stack([_draw(cell, generator) for cell in group])
            for key, group in self._cells.items()
        }

    @cached_property
    def has_spread(self) -> bool:
        """True if any measured time differs between replicas."""
        return any(bool(np.ptp(times, axis=1).any()) for times in self._times.values())

    def coefficients(self, key: _Key) -> tuple[F64, F64]:
        """Return (launch_s, sample_s) of the fit of every replica, (NUM_REPLICAS,) each.

        key : (pass, Ulysses, degree).
        """
        if key not in self._fitted:
            cells, times = self._cells[key], self._times[key]
            fits = []
            # without spread all replicas equal the first
            for drawn in times.T if np.ptp(times, axis=1).any() else times.T[:1]:
                again = [
                    MeasuredTime(batch=c.batch, seq_lengths=c.seq_lengths, time_s=float(t))
                    for c, t in zip(cells, drawn, strict=True)
                ]
                fits.append(self._fit(again))
            self._fitted[key] = _columns(fits)
        return self._fitted[key]

    def cells(self) -> Mapping[str, F64]:
        """Return name -> replicas (NUM_REPLICAS,), seconds, of every measured time with spread."""
        return {
            f"{self._name(key)}, batch {cell.batch}, "
            f"sequence length {','.join(map(str, cell.seq_lengths))}": times
            for key, cells in self._cells.items()
            for cell, times in zip(cells, self._times[key], strict=True)
            if np.ptp(times) > 0.0
        }


class LayerDraws(Draws):
    """Random draws of the measured times of one layer type."""

    def __init__(
        self, kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions
    ) -> None:
        super().__init__(kind, measured_cells(kind, profile, options, _ignore))
        self._kind = kind
        self._seq_length = seq_length
        self._options = options

    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        name = f"layer type {self._kind}"
        lengths = (self._seq_length,)
        return fit_measured(name, times, lengths, self._options, _ignore, of_layer=True)

    def _name(self, key: _Key) -> str:
        return f"{shard_name(*key)} of layer type {self._kind}"


class OtherDraws(Draws):
    """Random draws of the measured times of embedding, head and loss."""

    def __init__(
        self, times: Sequence[OtherTime], seq_lengths: tuple[int, ...], options: SearchOptions
    ) -> None:
        cells = {(what, False, 1): found for what, found in other_cells(times).items()}
        super().__init__(_OTHER_PLACE, cells)
        self._seq_lengths = seq_lengths
        self._options = options

    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        lengths = self._seq_lengths
        return fit_measured(OTHER, times, lengths, self._options, _ignore, of_layer=False)

    def _name(self, key: _Key) -> str:
        return f"{key[0]} of {OTHER}"


def has_percentiles(model: ModelProfile) -> bool:
    """Return True if any time has a percentile; without percentiles there is no spread to draw."""
    ends = [(p.low_s, p.high_s) for layer in model.layers for p in layer.times]
    ends += [
        pair
        for layer in model.layers
        for p in layer.sharded_times
        for pair in (
            (p.forward_low_s, p.forward_high_s),
            (p.backward_low_s, p.backward_high_s),
            (p.recompute_low_s, p.recompute_high_s),
        )
    ]
    ends += [
        pair
        for o in model.other_times
        for pair in ((o.forward_low_s, o.forward_high_s), (o.backward_low_s, o.backward_high_s))
    ]
    return any(low is not None or high is not None for low, high in ends)


def repeated(rows: Rows) -> Rows:
    """Return the rows once per replica, one replica after the other."""
    return rows.take(np.tile(np.arange(len(rows.batch)), NUM_REPLICAS))


def _draw(cell: MeasuredTime, generator: np.random.Generator) -> F64:
    """Return NUM_REPLICAS random draws of a time, interpolated between 5, 50 and 95 % quantiles."""
    # values outside the percentiles are unknown
    quantile = generator.uniform(0.05, 0.95, NUM_REPLICAS)
    # a percentile that was not measured equals the median
    low = cell.time_s if cell.low_s is None else cell.low_s
    high = cell.time_s if cell.high_s is None else cell.high_s
    return np.interp(quantile, (0.05, 0.5, 0.95), (low, cell.time_s, high))


def _columns(fits: list[ComputeFit]) -> tuple[F64, F64]:
    launch = np.array([fit.launch_s for fit in fits])
    sample = np.array([fit.sample_s for fit in fits])
    # one fit represents all replicas if times have no spread
    return (
        np.broadcast_to(launch, NUM_REPLICAS).copy(),
        np.broadcast_to(sample, NUM_REPLICAS).copy(),
    )


def _ignore(_: str) -> None:
    """Discard notes, because the fit of the medians has recorded them."""
