"""Reads what the sidecar of a memory file has beside documented tables: Ulysses, and backwards.

Documented tables know one tensor degree per figure, no Ulysses and no moments. Ulysses layers keep
q, k and v before and after their all-to-alls, and copies of k and v where there are fewer heads
than ranks, so that a rank keeps more than the unsharded layer over the degree. And while a layer's
backward runs it needs memory above what the layers keep. The raw cells of a sidecar hold both as
counted. Checkpointed layers need no entries: what they keep is their input, exactly the documented
figure over the degree where the sequence is split, and their backward needs what is recomputed and
then what the layer's backward needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.errors import DocumentError
from autopar.model import LayerMemory
from autopar.model_measurements import ModelMeasurement
from autopar.sidecar import Sidecar, newest_cells, sidecar_path

__all__ = ["read_cells"]

_AGREE = 0.01
"""Tables that differ by more than this from their sidecar were edited, or are of another run."""
_KEY = "model_measurements"
_TENSOR = {True: ("dtensor_sp", "sp"), False: ("dtensor", "tp")}
"""Kinds of the tables with and without sequence parallelism; a later one wins."""

_Layers = tuple[dict[int, LayerMemory], ...]


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """Bytes per sample of one layer type at one length, by degree."""

    kept: dict[int, float] = field(default_factory=dict)
    """Of the whole layer, and by Ulysses degree."""
    backward: dict[int, float] = field(default_factory=dict)
    ulysses_backward: dict[int, float] = field(default_factory=dict)


def read_cells(
    path: Path,
    sidecar: Sidecar | None,
    layers: Sequence[Mapping[int, LayerMemory]],
    *,
    sequence_parallel: bool,
) -> tuple[_Layers, tuple[str, ...]]:
    """Return the tables of layer types by sequence length with what cells add, and notes.

    path : the documented file. Its activation of the unsharded layer wins over the sidecar's: the
    sidecar's figures keep their ratio to it, what backwards need is never lowered by it, and a
    difference of more than 1 % is noted. Cells of layer types and lengths that the file does not
    have are not looked at.

    Raises
    ------
    DocumentError: a cell counts no bytes, or has no positive batch and degree or no length.
    """
    tables: _Layers = tuple(dict(table) for table in layers)
    if sidecar is None:
        return tables, ()
    found: dict[tuple[int, int], _Counted] = {}
    for at, cell in _cells(path, sidecar, tables, sequence_parallel):
        counted = found.setdefault(at, _Counted())
        if cell.degree == 1 or cell.kind == "ulysses":
            counted.kept[cell.degree] = cell.bytes["activation"] / cell.batch
        peak = cell.bytes.get("peak")
        if peak:
            ulysses = cell.degree > 1 and cell.kind == "ulysses"
            into = counted.ulysses_backward if ulysses else counted.backward
            into[cell.degree] = peak / cell.batch
    worst, where = 1.0, ""
    for (kind, seq), counted in sorted(found.items()):
        memory = tables[kind][seq]
        documented = memory.activation_bytes_per_sample.get(1)
        whole = counted.kept.pop(1, None)
        ratio = 1.0 if documented is None or whole is None else documented / whole
        if abs(ratio - 1.0) > abs(worst - 1.0):
            worst, where = ratio, f"layer type {kind}, sequence length {seq}"
        tables[kind][seq] = replace(
            memory,
            ulysses_activation_bytes_per_sample=_times(counted.kept, ratio),
            backward_bytes_per_sample=_times(counted.backward, max(1.0, ratio)),
            ulysses_backward_bytes_per_sample=_times(counted.ulysses_backward, max(1.0, ratio)),
        )
    if abs(worst - 1.0) <= _AGREE:
        return tables, ()
    note = (
        f"at odds: {path.name} differs by up to {(worst - 1.0) * 100:+.3g} % from its sidecar "
        f"(activations of {where}); the file's were used, and the sidecar's Ulysses and backward "
        "figures in proportion, the latter never lowered"
    )
    return tables, (note,)


def _times(values: Mapping[int, float], ratio: float) -> dict[int, float]:
    return {degree: values[degree] * ratio for degree in sorted(values)}


def _cells(
    path: Path, sidecar: Sidecar, tables: _Layers, sequence_parallel: bool
) -> Iterator[tuple[tuple[int, int], ModelMeasurement]]:
    """Yield ((layer type, length), cell) of layers that are not checkpointed, stand-ins first."""
    kinds = _TENSOR[sequence_parallel]
    cells = newest_cells(sidecar.runs).values()
    for cell in sorted(cells, key=lambda c: kinds.index(c.kind) if c.kind in kinds else 0):
        if (cell.quantity, cell.part, cell.status, cell.checkpoint) != (
            "memory",
            "layer",
            "ok",
            "none",
        ):
            continue
        if cell.layer_type is None or (cell.degree != 1 and cell.kind not in (*kinds, "ulysses")):
            continue
        sizes = (cell.batch, cell.degree, cell.layer_type + 1, *cell.seq_lengths)
        if min(*sizes, len(cell.seq_lengths)) < 1:
            raise _damaged(path, cell, "has no positive batch, degree and sequence length")
        if not cell.bytes.get("activation"):
            raise _damaged(path, cell, "has no bytes of activations")
        at = (cell.layer_type, cell.seq_lengths[0])
        if at[0] < len(tables) and at[1] in tables[at[0]]:
            yield at, cell


def _damaged(path: Path, cell: ModelMeasurement, what: str) -> DocumentError:
    return DocumentError(
        sidecar_path(path),
        f"cell {cell.key!r} {what}",
        key=_KEY,
        remedy="count again with `profile-model --profile-type memory`",
    )
