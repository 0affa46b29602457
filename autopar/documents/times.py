"""Reader and writer of computation files: forward times of layers, and of embedding, head and loss.

Times are in ms per layer and *sample* in the file, and in seconds per batch in records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from autopar.documents.catalog import Content
from autopar.documents.json import written
from autopar.documents.schemas import ComputationDocument
from autopar.documents.sidecar import Sidecar, TensorKind, sidecar_path
from autopar.documents.spec import bare_spec
from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.model import (
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherTime,
    ShardedTime,
    TimePoint,
)
from autopar.sanity_checks import (
    CurvePoint,
    GrowthLaw,
    InputWarning,
    SuspiciousValue,
    contradictions,
    notes_of,
    strongest_by_key,
)
from autopar.units import MS, format_count

# --------------------------------------------------------------------------------------------------
# Sidecar of a computation file: reading and writing `layer_times` and `other_times`.
#
# Documented keys contain only whole forwards. A sidecar adds backward separate from forward, layers
# sharded over a tensor group, recomputation and the spread of the samples, all in seconds for the
# whole batch.


_Measured = tuple[
    tuple[tuple[TimePoint, ...], ...], tuple[tuple[ShardedTime, ...], ...], tuple[str, ...]
]

_AGREE = 0.01
"""Relative tolerance; forwards that differ more from their sidecar were edited or are of another
run."""

_LAYERS, _OTHERS = "layer_times", "other_times"
"""Keys of the sidecar."""

_NOISE = 1.5
"""Accepted deviation of measured times from the laws below, as a factor: up to 1.06 was observed,
1.3 for whole forwards on busy hosts."""
_BY_BATCH = GrowthLaw(least=0.0, most=1.0, slack=_NOISE)
"""More samples take no less time, and at most proportionally more."""
_BY_LENGTH = GrowthLaw(least=0.0, most=2.0, slack=_NOISE)
"""More tokens take no less time; attention grows with their square."""
_BY_DEGREE = GrowthLaw(least=0.0, most=1.0, slack=2.0)
"""Law of time times degree. Small shards may be faster than their share: they fit in caches."""


def read_layer_times(
    path: Path,
    sidecar: Sidecar | None,
    spec: ModelSpec,
    times: tuple[tuple[TimePoint, ...], ...],
) -> _Measured:
    """Return the documented times with their spread, the sharded times by layer type, and notes.

    The forward time of the file has priority over that of the sidecar; percentiles are scaled with
    their ratio. Entries of unknown kinds or layer types are ignored with a note.

    path : the computation file.
    times : forward times of every layer type, from the file.

    Raises DocumentError: a cell has two entries.
    """
    if sidecar is None or not sidecar.layer_times:
        return times, ((),) * len(times), ()
    notes: dict[str, None] = {}
    found: list[dict[tuple[int, int, int, str], ShardedTime]] = [{} for _ in spec.layers]
    for number, entry in enumerate(sidecar.layer_times):
        if entry.kind not in get_args(TensorKind):
            notes[f"layer_times of the unknown kind {entry.kind!r} are ignored"] = None
            continue
        if not 0 <= entry.layer_type < len(found):
            notes[
                (
                    f"layer_times of layer type {entry.layer_type} are ignored: "
                    f"{spec.name} has {len(found)} layer type(s), numbered from 0"
                )
            ] = None
            continue
        cell = (entry.seq_length, entry.batch, entry.degree, entry.kind)
        if cell in found[entry.layer_type]:
            raise _damaged(path, number, "repeats this layer type, size and sharding")
        found[entry.layer_type][cell] = entry
    sharded = tuple(tuple(cells[key] for key in sorted(cells)) for cells in found)
    points = []
    for kind, (documented, measured) in enumerate(zip(times, sharded, strict=True)):
        whole: dict[tuple[int, int], ShardedTime] = {}
        for cell_time in measured:
            if cell_time.degree == 1:
                # At degree 1 all kinds are equal whole layers: the first in order is used.
                whole.setdefault((cell_time.batch, cell_time.seq_length), cell_time)
        points.append(
            tuple(_with_spread(p, whole.get((p.batch, p.seq_length))) for p in documented)
        )
        note = _contradiction(path, kind, documented, whole)
        if note is not None:
            notes[note] = None
    doubts = [doubt for kind, cells in enumerate(sharded) for doubt in _doubts(kind, cells)]
    return tuple(points), sharded, (*notes, *notes_of(sidecar_path(path), doubts))


def read_other_times(
    path: Path, sidecar: Sidecar | None, spec: ModelSpec, times: tuple[OtherTime, ...]
) -> tuple[tuple[OtherTime, ...], tuple[str, ...]]:
    """Return the documented other times with their backward and spread, and notes.

    The forward time of the file has priority, as in `read_layer_times`. Entries of sizes that the
    file does not contain are ignored with a note.

    path : the computation file.
    times : forward times of embedding, head and loss, from the file.

    Raises DocumentError: a size has two entries, or not one length per layer type.
    """
    if sidecar is None or not sidecar.other_times:
        return times, ()
    found: dict[tuple[int, tuple[int, ...]], OtherTime] = {}
    for number, entry in enumerate(sidecar.other_times):
        lengths = entry.seq_lengths
        if len(lengths) != len(spec.layers):
            raise _damaged(
                path,
                number,
                f"has sequence lengths {list(lengths)}, expected one length for each of "
                f"{len(spec.layers)} layer type(s)",
                _OTHERS,
            )
        if (entry.batch, lengths) in found:
            raise _damaged(path, number, "repeats this size", _OTHERS)
        found[entry.batch, lengths] = entry
    ratios = []
    points = []
    for point in times:
        # Removed, so that the remaining entries have no documented forward.
        measured = found.pop((point.batch, point.seq_lengths), None)
        points.append(point if measured is None else _with_other(point, measured))
        if measured is not None:
            cell = f"embedding and head, batch {point.batch}, sequence length {_named(point)}"
            ratios.append((point.forward_s / measured.forward_s, f"forward of {cell}"))
    notes = [
        (
            f"other_times at batch {batch}, sequence length "
            f"{','.join(map(str, lengths))} are ignored: {path.name} has no such "
            "forward"
        )
        for batch, lengths in found
    ]
    note = _farthest(path, ratios)
    return tuple(points), (*notes, *([] if note is None else [note]))


def layer_times_of(layers: Sequence[LayerProfile]) -> list[ShardedTime]:
    """Return the `layer_times` of a sidecar, including spread of forwards without sharded time."""
    result = []
    for kind, layer in enumerate(layers):
        entries = {(t.seq_length, t.batch, t.degree, t.kind): t for t in layer.sharded_times}
        whole = {(t.batch, t.seq_length) for t in layer.sharded_times if t.degree == 1}
        for p in layer.times:
            # An entry of the whole layer contains the spread already.
            if (p.low_s, p.high_s) != (None, None) and (p.batch, p.seq_length) not in whole:
                entries[p.seq_length, p.batch, 1, "sp"] = ShardedTime(
                    layer_type=kind,
                    batch=p.batch,
                    seq_length=p.seq_length,
                    forward_s=p.forward_s,
                    forward_low_s=p.low_s,
                    forward_high_s=p.high_s,
                )
        result += [entries[key] for key in sorted(entries)]
    return result


def other_times_of(times: Sequence[OtherTime]) -> list[OtherTime]:
    """Return the sidecar entries of times with more data than the documented forward.

    A forward documented as 0 has no entry: a sidecar contains measured times only.
    """
    return [
        t
        for t in times
        if t.forward_s > 0.0 and written(t).keys() - {"batch", "seq_lengths", "forward_s"}
    ]


def sidecar_doubts(sidecar: Sidecar) -> list[SuspiciousValue]:
    """Return the times of layers in a sidecar that contradict one another."""
    by_type: dict[int, list[ShardedTime]] = {}
    for entry in sidecar.layer_times:
        by_type.setdefault(entry.layer_type, []).append(entry)
    return [doubt for kind, times in by_type.items() for doubt in _doubts(kind, times)]


def _doubts(kind: int, times: Sequence[ShardedTime]) -> Iterator[SuspiciousValue]:
    """Yield the measured times of a layer type that contradict those of other sizes and degrees."""
    for name in ("forward_s", "backward_s", "recompute_s"):
        curves: dict[tuple[object, ...], list[CurvePoint]] = {}
        laws: dict[tuple[object, ...], GrowthLaw] = {}
        for t in times:
            value = getattr(t, name)
            if value is None:
                continue
            size = f"batch {t.batch}, sequence length {t.seq_length}"
            sharding = f", {t.kind} {t.degree}" if t.degree > 1 else ""
            key = f"{_LAYERS}.{name} of layer type {kind}, {size}{sharding}"
            for curve, x, y, law in (
                (("b", t.seq_length, t.degree, t.kind), t.batch, value, _BY_BATCH),
                (("s", t.batch, t.degree, t.kind), t.seq_length, value, _BY_LENGTH),
                # t ranks take between 1/t of the time and all of it.
                (("d", t.batch, t.seq_length, t.kind), t.degree, value * t.degree, _BY_DEGREE),
            ):
                cell = CurvePoint(key=key, x=float(x), y=y, written=value, unit="s")
                curves.setdefault(curve, []).append(cell)
                laws[curve] = law
        yield from strongest_by_key(
            doubt for curve, cells in curves.items() for doubt in contradictions(cells, laws[curve])
        )


def _damaged(path: Path, number: int, what: str, key: str = _LAYERS) -> DocumentError:
    return DocumentError(
        sidecar_path(path),
        f"entry {number} {what}",
        key=key,
        remedy="Measure again with `profile-model --profile-type computation`",
    )


def _with_spread(point: TimePoint, measured: ShardedTime | None) -> TimePoint:
    if measured is None:
        return point
    low, high = _percentiles(point.forward_s, measured)
    return replace(point, low_s=low, high_s=high)


def _percentiles(
    forward_s: float, measured: ShardedTime | OtherTime
) -> tuple[float | None, float | None]:
    """Return (5th, 95th) percentile of a forward time, scaled from those in the sidecar.

    forward_s : forward time of the computation file.
    """
    # The percentiles of an edited forward are scaled with it.
    ratio = forward_s / measured.forward_s
    low, high = measured.forward_low_s, measured.forward_high_s
    return (
        # Rounding must not move a percentile to the other side of the median.
        None if low is None else min(low * ratio, forward_s),
        None if high is None else max(high * ratio, forward_s),
    )


def _with_other(point: OtherTime, measured: OtherTime) -> OtherTime:
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
    """Return a warning about the forward time that differs most from the sidecar, or None."""
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
    """Return a warning about the ratio that differs most from 1, None if all agree.

    ratios : (forward time of the file over that of the sidecar, description of the cell).
    """
    # Without a common cell there is no contradiction.
    worst, cell = max(ratios, key=lambda item: abs(item[0] - 1.0), default=(1.0, ""))
    if abs(worst - 1.0) <= _AGREE:
        return None
    return InputWarning(
        f"contradiction: {path.name} differs by up to {(worst - 1.0) * 100:+.3g} "
        f"% from its sidecar ({cell}). The forward times of the file are used, "
        "with the other times of the sidecar"
    )


# --------------------------------------------------------------------------------------------------
# Documented computation file: times of layers, and of embedding, head and loss.


MAKE_COMPUTATION = "Create it with `profile-model --profile-type computation`"

_LAYER, _OTHER, _RAW = ComputationDocument.rules

Times = tuple[tuple[tuple[TimePoint, ...], ...], tuple[OtherTime, ...], tuple[str, ...]]
"""Times of every layer type, times of the other parts, and notes."""

_Key = tuple[int, tuple[int, ...]]
"""(batch, sequence length of every layer type)."""


def seqs_of(text: str) -> tuple[int, ...]:
    """Return the integers of `2048`, `[512,512]`, `512,512` or `512_512`."""
    return tuple(int(part) for part in text.strip("[]").replace("_", ",").split(","))


def seqs_text(seqs: tuple[int, ...]) -> str:
    """Return the documented spelling of sequence lengths: `2048` or `[512,512]`."""
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"


def seqs_of_model(path: Path, key: str, text: str, spec: ModelSpec) -> tuple[int, ...]:
    """Return the sequence lengths in a key, one per layer type; raises DocumentError."""
    seqs = seqs_of(text)
    # One number applies to all layer types.
    if len(seqs) == 1:
        return seqs * len(spec.layers)
    if len(seqs) != len(spec.layers):
        raise DocumentError(
            path,
            f"the key names {format_count(len(seqs), 'sequence length')}, but model "
            f"{spec.name!r} has {len(spec.layers)} layer type(s)",
            key=key,
        )
    return seqs


def type_of_model(path: Path, key: str, text: str, spec: ModelSpec) -> int:
    """Return the index of a layer type in a key; raises DocumentError for an unknown type."""
    if int(text) >= len(spec.layers):
        raise DocumentError(
            path,
            f"the file has layer type {text}, but model {spec.name!r} has "
            f"{len(spec.layers)} layer type(s), numbered from 0",
            key=key,
            remedy="Use a model with these layer types, or another file",
        )
    return int(text)


def required(path: Path, key: str, remedy: str) -> DocumentError:
    """Return the error of a required key that is missing."""
    return DocumentError(path, "this key is missing and is required", key=key, remedy=remedy)


def computation_content(document: ComputationDocument) -> Content:
    """Return the content of a file: processed keys, raw ones that suffice, or neither."""
    keys = list(document.root)
    if any(_LAYER.regex.fullmatch(key) for key in keys) and any(
        _OTHER.regex.fullmatch(key) for key in keys
    ):
        return "processed"
    runs = {m["layers"] for key in keys if (m := _RAW.regex.fullmatch(key))}
    # One layer is the difference of two runs, so that a single run does not suffice.
    return "raw" if len(runs) > 1 else "none"


def read_times(path: Path, document: ComputationDocument, spec: ModelSpec) -> Times:
    """Return the times of a computation file.

    Raises DocumentError: a layer type is missing or unknown to the model, or one point has two
    values.
    """
    reader = _Reader(path, spec)
    for key, value in document.root.items():
        reader.add(key, value)
    layers, others, notes = reader.result()
    return layers, others, (*notes, *notes_of(path, reader.doubts()))


def computation_doubts(path: Path, document: ComputationDocument) -> list[SuspiciousValue]:
    """Return the times of a file that contradict each other, without a model spec.

    Raises DocumentError like `read_times`.
    """
    kinds = [int(m["type"]) for key in document.root if (m := _LAYER.regex.fullmatch(key))]
    raw = [len(seqs_of(m["layers"])) for key in document.root if (m := _RAW.regex.fullmatch(key))]
    types = max([kind + 1 for kind in kinds] + raw, default=1)
    # Lengths that no key names are all equal, whatever their value.
    spec = bare_spec(num_layers=[1] * types, seq_length=[1], hidden_size=[1])
    reader = _Reader(path, spec)
    for key, value in document.root.items():
        reader.add(key, value)
    reader.result()
    return reader.doubts()


class _Reader:
    """Collector of the points of one file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.spec = spec
        self.seqs = tuple(layer.seq_length for layer in spec.layers)
        self.layers: list[dict[tuple[int, int], float]] = [{} for _ in spec.layers]
        self.others: dict[_Key, float] = {}
        self.raw: dict[_Key, dict[tuple[int, ...], tuple[float, str]]] = {}
        self.keys: dict[tuple[int | None, Any], str] = {}
        """Original keys by (layer type or None for the other parts, size)."""
        self.notes: dict[str, None] = {}  # an ordered set

    def add(self, key: str, value: float) -> None:
        """Add one entry, in ms as in the file."""
        if match := _LAYER.regex.fullmatch(key):
            kind = type_of_model(self.path, key, match["type"], self.spec)
            batch = self._batch(match["batch"])
            text = match["seq"]
            seq = int(text) if text else self._unnamed(self.seqs[kind])[0]
            self._put(self.layers[kind], (batch, seq), value, key)
            self.keys[kind, (batch, seq)] = key
        elif match := _OTHER.regex.fullmatch(key):
            text = match["seq"]
            seqs = self._seqs(key, text) if text else self._unnamed(*self.seqs)
            point = self._batch(match["batch"]), seqs
            self._put(self.others, point, value, key)
            self.keys[None, point] = key
        elif match := _RAW.regex.fullmatch(key):
            counts = seqs_of(match["layers"])
            # A run with another number of layer types is of another model.
            if len(counts) == len(self.layers):
                batch = int(match["batch"] or 1)
                seqs = self._seqs(key, match["seq"]) if match["seq"] else self.seqs
                runs = self.raw.setdefault((batch, seqs), {})
                runs.setdefault(counts, (value, key))

    def result(self) -> Times:
        """Return all times in seconds per batch, sorted.

        Times that the file contains only as raw entries are derived.
        """
        missing = [kind for kind, points in enumerate(self.layers) if not points]
        if missing or not self.others:
            self._derive(missing)
        for kind, points in enumerate(self.layers):
            if not points:
                key = f"layertype_{kind}_bsz1_seq{self.seqs[kind]}"
                raise required(self.path, key, MAKE_COMPUTATION)
        if not self.others:
            key = f"layertype_other_bsz1_seq{seqs_text(self.seqs)}"
            raise required(self.path, key, MAKE_COMPUTATION)
        layers = tuple(
            tuple(
                # ms per sample of the file to seconds of the whole batch.
                TimePoint(batch=b, seq_length=s, forward_s=ms * b * MS)
                for (b, s), ms in sorted(points.items())
            )
            for points in self.layers
        )
        others = tuple(
            # ms per sample of the file to seconds of the whole batch.
            OtherTime(batch=b, seq_lengths=s, forward_s=ms * b * MS)
            for (b, s), ms in sorted(self.others.items())
        )
        return layers, others, tuple(self.notes)

    def doubts(self) -> list[SuspiciousValue]:
        """Return the times that contradict those of other batches and lengths."""
        found: list[SuspiciousValue] = []
        tables: list[tuple[int | None, dict[_Key, float]]] = [
            (kind, {(b, (s,)): ms for (b, s), ms in points.items()})
            for kind, points in enumerate(self.layers)
        ]
        for kind, points in (*tables, (None, self.others)):
            curves: dict[tuple[str, Any], list[CurvePoint]] = {}
            for (batch, seqs), ms in points.items():
                name = "other" if kind is None else kind
                canonical = f"layertype_{name}_bsz{batch}_seq{seqs_text(seqs)}"
                size = (batch, seqs) if kind is None else (batch, seqs[0])
                key = self.keys.get((kind, size), canonical)
                # ms per sample of the file to ms of the whole batch, to which the laws apply.
                cell = CurvePoint(
                    key=key, x=float(batch), y=ms * batch, written=ms, unit="ms per sample"
                )
                curves.setdefault(("batch", seqs), []).append(cell)
                by_length = replace(cell, x=float(sum(seqs)))
                curves.setdefault(("length", batch), []).append(by_length)
            for (which, _), cells in curves.items():
                law = _BY_BATCH if which == "batch" else _BY_LENGTH
                found += contradictions(cells, law)
        return strongest_by_key(found)

    def _batch(self, text: str | None) -> int:
        if text is None:
            self.notes["keys without bsz were read as batch 1"] = None
        return int(text or 1)

    def _seqs(self, key: str, text: str) -> tuple[int, ...]:
        return seqs_of_model(self.path, key, text, self.spec)

    def _unnamed(self, *seqs: int) -> tuple[int, ...]:
        named = ", ".join(map(str, seqs))
        self.notes[f"keys without seq were read as the model's {named}"] = None
        return seqs

    def _put(self, points: dict[Any, float], point: Any, value: float, key: str) -> None:
        if points.get(point, value) != value:
            raise DocumentError(
                self.path,
                f"the value is {value:g}, but {points[point]:g} under another spelling of this key",
                key=key,
                remedy="Remove one of them",
            )
        points[point] = value

    def _derive(self, missing: list[int]) -> None:
        """Derive missing times from raw passes with different numbers of layers.

        Per layer and sample: (T(Lmax) - T(Lmin)) / batch / (Lmax - Lmin). The remainder is T(Lmin)
        minus its layers. With several layer types, one is varied at a time.
        """
        derived = False
        # Evaluated before the loop, which fills them.
        need_others = not self.others
        for (batch, seqs), runs in sorted(self.raw.items()):
            slopes = self._slopes(runs)
            if slopes is None:
                continue
            derived = True
            for kind in missing:
                # A slope is for the whole batch, the file counts per sample.
                per_sample = slopes[kind] / batch
                # Values in the file have priority over derived ones.
                self.layers[kind].setdefault((batch, seqs[kind]), per_sample)
            if need_others:
                base = min(runs)
                rest = runs[base][0] - sum(n * t for n, t in zip(base, slopes, strict=True))
                # Noise can make the remainder negative.
                self.others[batch, seqs] = max(0.0, rest / batch)
        if derived:
            self.notes["processed times were derived from the raw layernum entries"] = None

    def _slopes(self, runs: dict[tuple[int, ...], tuple[float, str]]) -> list[float] | None:
        """Return ms per layer of every type, for the whole batch; None if runs do not suffice."""
        base = min(runs)
        slopes = []
        for kind in range(len(base)):
            longer = [c for c in runs if _only_differs(base, c, kind)]
            if not longer:
                return None
            most = max(longer)
            # The difference cancels embedding, head and loss, which both passes contain.
            slope = (runs[most][0] - runs[base][0]) / (most[kind] - base[kind])
            if slope <= 0:
                raise DocumentError(
                    self.path,
                    f"the value is {runs[most][0]:g}, expected more than "
                    f"{runs[base][0]:g} of {runs[base][1]!r} with fewer layers",
                    key=runs[most][1],
                    remedy="Measure again with more layers",
                )
            slopes.append(slope)
        return slopes


def _only_differs(base: tuple[int, ...], other: tuple[int, ...], kind: int) -> bool:
    return other[kind] > base[kind] and all(
        a == b for k, (a, b) in enumerate(zip(base, other, strict=True)) if k != kind
    )


def computation_keys(profile: ModelProfile) -> dict[str, float]:
    """Return the documented keys of a profile's times, ms per layer per sample."""

    def entries() -> Iterator[tuple[str, float]]:
        for kind, layer in enumerate(profile.layers):
            for p in layer.times:
                # Seconds of a batch to ms per sample.
                yield f"layertype_{kind}_bsz{p.batch}_seq{p.seq_length}", p.forward_s / p.batch / MS
        for other in profile.other_times:
            key = f"layertype_other_bsz{other.batch}_seq{seqs_text(other.seq_lengths)}"
            yield key, other.forward_s / other.batch / MS

    return dict(entries())
