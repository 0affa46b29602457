"""Reads and writes what the sidecar of a computation file adds: `layer_times`, `other_times`.

Documented keys hold whole forwards only. A sidecar adds backward apart from forward, layers
sharded over a tensor group, recomputation and the spread of the samples; all in seconds for the
whole batch, as inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from autopar.errors import DocumentError
from autopar.model import LayerProfile, ModelSpec, OtherTime, ShardedTime, TimePoint
from autopar.model_measurements import LayerTimes, OtherTimes, TensorKind
from autopar.sidecar import Sidecar, sidecar_path

__all__ = ["layer_times_of", "other_times_of", "read_layer_times", "read_other_times"]

_Measured = tuple[
    tuple[tuple[TimePoint, ...], ...], tuple[tuple[ShardedTime, ...], ...], tuple[str, ...]
]

_AGREE = 0.01
"""Forwards that differ by more than this from their sidecar were edited, or are of another run."""

_LAYERS, _OTHERS = "layer_times", "other_times"
"""Keys of the sidecar."""

_SPREADS = ("forward", "backward", "recompute")


def read_layer_times(
    path: Path,
    sidecar: Sidecar | None,
    spec: ModelSpec,
    times: tuple[tuple[TimePoint, ...], ...],
) -> _Measured:
    """Return the documented times with their spread, the sharded times by layer type, and notes.

    path : the documented file. A documented forward wins over that of its sidecar; its spread
    keeps the ratio to the median. Entries of unknown kinds or layer types become notes.

    Raises
    ------
    DocumentError: a cell has two entries, no positive size, or percentiles on the wrong side.
    """
    if sidecar is None or not sidecar.layer_times:
        return times, ((),) * len(times), ()
    notes: dict[str, None] = {}
    found: list[dict[tuple[int, int, int, str], ShardedTime]] = [{} for _ in spec.layers]
    for number, entry in enumerate(sidecar.layer_times):
        _check(path, number, entry)
        if entry.kind not in get_args(TensorKind):
            notes[f"layer_times of kind {entry.kind!r} were left out: unknown here"] = None
            continue
        if not 0 <= entry.layer_type < len(found):
            notes[
                f"layer_times of layer type {entry.layer_type} were left out: {spec.name} has "
                f"{len(found)} layer type(s), numbered from 0"
            ] = None
            continue
        cell = (entry.seq_length, entry.batch, entry.degree, entry.kind)
        if cell in found[entry.layer_type]:
            raise _damaged(path, number, "is a second one of this layer type, size and sharding")
        found[entry.layer_type][cell] = ShardedTime(
            **entry.model_dump(exclude={"layer_type"}, exclude_none=True)
        )
    sharded = tuple(tuple(cells[key] for key in sorted(cells)) for cells in found)
    points = []
    for kind, (documented, measured) in enumerate(zip(times, sharded, strict=True)):
        whole: dict[tuple[int, int], ShardedTime] = {}
        for cell_time in measured:
            if cell_time.degree == 1:
                whole.setdefault((cell_time.batch, cell_time.seq_length), cell_time)
        points.append(
            tuple(_with_spread(p, whole.get((p.batch, p.seq_length))) for p in documented)
        )
        note = _contradiction(path, kind, documented, whole)
        if note is not None:
            notes[note] = None
    return tuple(points), sharded, tuple(notes)


def read_other_times(
    path: Path, sidecar: Sidecar | None, spec: ModelSpec, times: tuple[OtherTime, ...]
) -> tuple[tuple[OtherTime, ...], tuple[str, ...]]:
    """Return the documented times of what is no layer with their backward and spread, and notes.

    path : the documented file. A documented forward wins over that of its sidecar, by the rules
    of `read_layer_times`; entries of sizes that the file does not have become notes.

    Raises
    ------
    DocumentError: a size has two entries, is not positive or not of this model's layer types, or
        percentiles are on the wrong side.
    """
    if sidecar is None or not sidecar.other_times:
        return times, ()
    found: dict[tuple[int, tuple[int, ...]], OtherTimes] = {}
    for number, entry in enumerate(sidecar.other_times):
        lengths = tuple(entry.seq_lengths)
        if min((entry.batch, *lengths)) < 1 or len(lengths) != len(spec.layers):
            raise _damaged(
                path,
                number,
                f"has batch {entry.batch} and sequence lengths {list(lengths)}, expected at least "
                f"1 and one length for each of {len(spec.layers)} layer type(s)",
                _OTHERS,
            )
        _check_spread(path, number, entry, _OTHERS)
        if (entry.batch, lengths) in found:
            raise _damaged(path, number, "is a second one of this size", _OTHERS)
        found[entry.batch, lengths] = entry
    ratios = []
    points = []
    for point in times:
        measured = found.pop((point.batch, point.seq_lengths), None)
        points.append(point if measured is None else _with_other(point, measured))
        if measured is not None:
            cell = f"embedding and head, batch {point.batch}, sequence length {_named(point)}"
            ratios.append((point.forward_s / measured.forward_s, f"forward of {cell}"))
    notes = [
        f"other_times at batch {batch}, sequence length {','.join(map(str, lengths))} were left "
        f"out: {path.name} has no such forward"
        for batch, lengths in found
    ]
    note = _farthest(path, ratios)
    return tuple(points), (*notes, *([] if note is None else [note]))


def layer_times_of(layers: Sequence[LayerProfile]) -> list[LayerTimes]:
    """Return the sidecar entries of a profile; spread that no sharded time holds is one as well."""
    result = []
    for kind, layer in enumerate(layers):
        entries = {
            (t.seq_length, t.batch, t.degree, t.kind): LayerTimes(
                layer_type=kind, **{name: v for name, v in vars(t).items() if v is not None}
            )
            for t in layer.sharded_times
        }
        whole = {(t.batch, t.seq_length) for t in layer.sharded_times if t.degree == 1}
        for p in layer.times:
            if (p.low_s, p.high_s) != (None, None) and (p.batch, p.seq_length) not in whole:
                entries[p.seq_length, p.batch, 1, "sp"] = LayerTimes(
                    layer_type=kind,
                    batch=p.batch,
                    seq_length=p.seq_length,
                    forward_s=p.forward_s,
                    forward_low_s=p.low_s,
                    forward_high_s=p.high_s,
                )
        result += [entries[key] for key in sorted(entries)]
    return result


def other_times_of(times: Sequence[OtherTime]) -> list[OtherTimes]:
    """Return the sidecar entries of times that say more than the documented forward.

    A forward that was documented as 0 has no entry: a sidecar holds measured times only.
    """
    return [
        OtherTimes(**{**known, "seq_lengths": list(t.seq_lengths)})
        for t in times
        if t.forward_s > 0.0
        and (known := {name: v for name, v in vars(t).items() if v is not None}).keys()
        - {"batch", "seq_lengths", "forward_s"}
    ]


def _check(path: Path, number: int, entry: LayerTimes) -> None:
    for name in ("batch", "seq_length", "degree"):
        if getattr(entry, name) < 1:
            raise _damaged(path, number, f"has {name} {getattr(entry, name)}, expected at least 1")
    _check_spread(path, number, entry, _LAYERS)


def _check_spread(path: Path, number: int, entry: LayerTimes | OtherTimes, key: str) -> None:
    for name in _SPREADS:
        middle = getattr(entry, f"{name}_s", None)
        low, high = (getattr(entry, f"{name}_{end}_s", None) for end in ("low", "high"))
        if middle is None and (low, high) != (None, None):
            raise _damaged(path, number, f"has percentiles of {name}, but no median", key)
        if (low is not None and low > middle) or (high is not None and high < middle):
            raise _damaged(path, number, f"has a {name} median outside its percentiles", key)


def _damaged(path: Path, number: int, what: str, key: str = _LAYERS) -> DocumentError:
    return DocumentError(
        sidecar_path(path),
        f"entry {number} {what}",
        key=key,
        remedy="measure again with `profile-model --profile-type computation`",
    )


def _with_spread(point: TimePoint, measured: ShardedTime | None) -> TimePoint:
    if measured is None:
        return point
    low, high = _percentiles(point.forward_s, measured)
    return replace(point, low_s=low, high_s=high)


def _percentiles(
    forward_s: float, measured: ShardedTime | OtherTimes
) -> tuple[float | None, float | None]:
    """Return the percentiles of a documented forward, in their ratio to the measured median."""
    ratio = forward_s / measured.forward_s
    low, high = measured.forward_low_s, measured.forward_high_s
    return (
        None if low is None else min(low * ratio, forward_s),
        None if high is None else max(high * ratio, forward_s),
    )


def _with_other(point: OtherTime, measured: OtherTimes) -> OtherTime:
    low, high = _percentiles(point.forward_s, measured)
    return replace(
        point,
        backward_s=measured.backward_s,
        forward_low_s=low,
        forward_high_s=high,
        backward_low_s=measured.backward_low_s,
        backward_high_s=measured.backward_high_s,
    )


def _named(point: OtherTime) -> str:
    return ",".join(map(str, point.seq_lengths))


def _contradiction(
    path: Path,
    kind: int,
    documented: tuple[TimePoint, ...],
    whole: dict[tuple[int, int], ShardedTime],
) -> str | None:
    """Return a sentence on the documented forward that is farthest from its sidecar."""
    ratios = [
        (
            p.forward_s / whole[p.batch, p.seq_length].forward_s,
            f"forward of layer type {kind}, batch {p.batch}, sequence length {p.seq_length}",
        )
        for p in documented
        if (p.batch, p.seq_length) in whole
    ]
    return _farthest(path, ratios)


def _farthest(path: Path, ratios: Sequence[tuple[float, str]]) -> str | None:
    """Return a sentence on the largest of (documented / sidecar, cell), None where all agree."""
    worst, cell = max(ratios, key=lambda item: abs(item[0] - 1.0), default=(1.0, ""))
    if abs(worst - 1.0) <= _AGREE:
        return None
    return (
        f"at odds: {path.name} differs by up to {(worst - 1.0) * 100:+.3g} % from its sidecar "
        f"({cell}); the file's forwards were used, with the sidecar's other times"
    )
