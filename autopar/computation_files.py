"""Reads and writes the documented computation file: forward times of layers and of the rest.

Times are ms per layer per *sample* in the file and seconds per batch inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.documents import ComputationDocument
from autopar.errors import DocumentError
from autopar.locate import Content
from autopar.model import ModelProfile, ModelSpec, OtherTime, TimePoint
from autopar.units import MS, format_count

__all__ = [
    "MAKE_COMPUTATION",
    "Times",
    "computation_content",
    "computation_keys",
    "read_times",
    "seqs_of",
]

MAKE_COMPUTATION = "`profile-model --profile-type computation` makes this file"

_LAYER, _OTHER, _RAW = ComputationDocument.rules

Times = tuple[tuple[tuple[TimePoint, ...], ...], tuple[OtherTime, ...], tuple[str, ...]]
"""Times of every layer type, times of the rest, and notes."""

_Key = tuple[int, tuple[int, ...]]
"""(batch, sequence length of every layer type)."""


def seqs_of(text: str) -> tuple[int, ...]:
    """Return the integers of `2048`, `[512,512]`, `512,512` or `512_512`."""
    return tuple(int(part) for part in text.strip("[]").replace("_", ",").split(","))


def computation_content(document: ComputationDocument) -> Content:
    """Return whether a file has processed keys, raw ones that suffice, or neither."""
    keys = list(document.root)
    if any(_LAYER.regex.fullmatch(key) for key in keys) and any(
        _OTHER.regex.fullmatch(key) for key in keys
    ):
        return "processed"
    runs = {m["layers"] for key in keys if (m := _RAW.regex.fullmatch(key))}
    return "raw" if len(runs) > 1 else "none"


def read_times(path: Path, document: ComputationDocument, spec: ModelSpec) -> Times:
    """Return the times of a computation file.

    Raises
    ------
    DocumentError: a layer type is missing or unknown to the model, or one point has two values.
    """
    reader = _Reader(path, spec)
    for key, value in document.root.items():
        reader.add(key, value)
    return reader.result()


class _Reader:
    """Collects the points of one file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.path = path
        self.seqs = tuple(layer.seq_length for layer in spec.layers)
        self.name = spec.name
        self.layers: list[dict[tuple[int, int], float]] = [{} for _ in spec.layers]
        self.others: dict[_Key, float] = {}
        self.raw: dict[_Key, dict[tuple[int, ...], tuple[float, str]]] = {}
        self.notes: dict[str, None] = {}  # an ordered set

    def add(self, key: str, value: float) -> None:
        """Take one entry in, ms as in the file."""
        if match := _LAYER.regex.fullmatch(key):
            kind = int(match["type"])
            if kind >= len(self.layers):
                raise DocumentError(
                    self.path,
                    f"the file has layer type {kind}, but model {self.name!r} has "
                    f"{len(self.layers)} layer type(s), numbered from 0",
                    key=key,
                    remedy="give the model's other layer type, or another file",
                )
            batch = self._batch(match["batch"])
            seq = self._seqs(key, match["seq"], 1, (self.seqs[kind],))[0]
            self._put(self.layers[kind], (batch, seq), value, key)
        elif match := _OTHER.regex.fullmatch(key):
            seqs = self._seqs(key, match["seq"], len(self.layers), self.seqs)
            self._put(self.others, (self._batch(match["batch"]), seqs), value, key)
        elif match := _RAW.regex.fullmatch(key):
            counts = seqs_of(match["layers"])
            if len(counts) == len(self.layers):
                batch = int(match["batch"] or 1)
                seqs = self._seqs(key, match["seq"], len(self.layers), self.seqs, note=False)
                runs = self.raw.setdefault((batch, seqs), {})
                runs.setdefault(counts, (value, key))

    def result(self) -> Times:
        """Return everything in seconds per batch, sorted; derive what only raw entries have."""
        missing = [kind for kind, points in enumerate(self.layers) if not points]
        if missing or not self.others:
            self._derive(missing)
        for kind, points in enumerate(self.layers):
            if not points:
                self._missing(f"layertype_{kind}_bsz1_seq{self.seqs[kind]}")
        if not self.others:
            self._missing(f"layertype_other_bsz1_seq{_seq_text(self.seqs)}")
        layers = tuple(
            tuple(
                TimePoint(batch=b, seq_length=s, forward_s=ms * b * MS)
                for (b, s), ms in sorted(points.items())
            )
            for points in self.layers
        )
        others = tuple(
            OtherTime(batch=b, seq_lengths=s, forward_s=ms * b * MS)
            for (b, s), ms in sorted(self.others.items())
        )
        return layers, others, tuple(self.notes)

    def _batch(self, text: str | None) -> int:
        if text is None:
            self.notes["keys without bsz were read as batch 1"] = None
        return int(text or 1)

    def _seqs(
        self,
        key: str,
        text: str | None,
        count: int,
        default: tuple[int, ...],
        *,
        note: bool = True,
    ) -> tuple[int, ...]:
        if text is None:
            if note:
                named = ", ".join(str(s) for s in default)
                self.notes[f"keys without seq were read as the model's {named}"] = None
            return default
        seqs = seqs_of(text)
        if len(seqs) == 1:
            return seqs * count
        if len(seqs) != count:
            raise DocumentError(
                self.path,
                f"the key names {format_count(len(seqs), 'sequence length')}, but model "
                f"{self.name!r} has {count} layer type(s)",
                key=key,
            )
        return seqs

    def _put(self, points: dict[Any, float], point: Any, value: float, key: str) -> None:
        if points.get(point, value) != value:
            raise DocumentError(
                self.path,
                f"the value is {value:g}, but another spelling of this key says {points[point]:g}",
                key=key,
                remedy="remove one of them",
            )
        points[point] = value

    def _missing(self, key: str) -> None:
        raise DocumentError(
            self.path, "this key is missing and is required", key=key, remedy=MAKE_COMPUTATION
        )

    def _derive(self, missing: list[int]) -> None:
        """Fill in what is missing from raw passes with different numbers of layers.

        Per layer and sample (T(Lmax) - T(Lmin)) / batch / (Lmax - Lmin); the rest is
        T(Lmin) minus its layers. Several layer types: one is varied at a time.
        """
        derived = False
        need_others = not self.others
        for (batch, seqs), runs in sorted(self.raw.items()):
            slopes = self._slopes(runs)
            if slopes is None:
                continue
            derived = True
            for kind in missing:
                per_sample = slopes[kind] / batch
                self.layers[kind].setdefault((batch, seqs[kind]), per_sample)
            if need_others:
                base = min(runs)
                rest = runs[base][0] - sum(n * t for n, t in zip(base, slopes, strict=True))
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
            slope = (runs[most][0] - runs[base][0]) / (most[kind] - base[kind])
            if slope <= 0:
                raise DocumentError(
                    self.path,
                    f"the value is {runs[most][0]:g}, not more than {runs[base][0]:g} of "
                    f"{runs[base][1]!r} with fewer layers",
                    key=runs[most][1],
                    remedy="measure again with more layers",
                )
            slopes.append(slope)
        return slopes


def _only_differs(base: tuple[int, ...], other: tuple[int, ...], kind: int) -> bool:
    return other[kind] > base[kind] and all(
        a == b for k, (a, b) in enumerate(zip(base, other, strict=True)) if k != kind
    )


def _seq_text(seqs: tuple[int, ...]) -> str:
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"


def computation_keys(profile: ModelProfile) -> dict[str, float]:
    """Return the documented keys of a profile's times, ms per layer per sample."""

    def entries() -> Iterator[tuple[str, float]]:
        for kind, layer in enumerate(profile.layers):
            for p in layer.times:
                yield f"layertype_{kind}_bsz{p.batch}_seq{p.seq_length}", p.forward_s / p.batch / MS
        for other in profile.other_times:
            key = f"layertype_other_bsz{other.batch}_seq{_seq_text(other.seq_lengths)}"
            yield key, other.forward_s / other.batch / MS

    return dict(entries())
