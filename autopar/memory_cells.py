"""Reads what the sidecar of a memory file has beside documented tables: Ulysses activations.

Documented tables know one tensor degree per figure and no Ulysses. Its layers keep q, k and v
before and after their all-to-alls, and copies of k and v where there are fewer heads than ranks,
so that a rank keeps more than the unsharded layer over the degree. The raw cells of a sidecar
hold what was counted. Checkpointed layers need no such entry: what they keep is their input,
exactly the documented figure over the degree where the sequence is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autopar.errors import DocumentError
from autopar.model import LayerMemory
from autopar.model_measurements import ModelMeasurement
from autopar.sidecar import Sidecar, newest_cells, sidecar_path

__all__ = ["read_ulysses"]

_AGREE = 0.01
"""Tables that differ by more than this from their sidecar were edited, or are of another run."""
_KEY = "model_measurements"

_Layers = tuple[dict[int, LayerMemory], ...]


def read_ulysses(
    path: Path, sidecar: Sidecar | None, layers: Sequence[Mapping[int, LayerMemory]]
) -> tuple[_Layers, tuple[str, ...]]:
    """Return the tables of layer types by sequence length with Ulysses activations, and notes.

    path : the documented file. Its activation of the unsharded layer wins over the sidecar's: the
    Ulysses figures keep their ratio to it, and a difference of more than 1 % is noted. Cells of
    layer types and lengths that the file does not have are not looked at.

    Raises
    ------
    DocumentError: a cell counts no bytes, or has no positive batch and degree or no length.
    """
    tables: _Layers = tuple(dict(table) for table in layers)
    if sidecar is None:
        return tables, ()
    kept: dict[tuple[int, int], dict[int, float]] = {}
    whole: dict[tuple[int, int], float] = {}
    for cell in newest_cells(sidecar.runs).values():
        at = _place(path, cell)
        if at is None or at[0] >= len(tables) or at[1] not in tables[at[0]]:
            continue
        value = cell.bytes["activation"] / cell.batch
        if cell.degree == 1:
            whole[at] = value
        elif cell.kind == "ulysses":
            kept.setdefault(at, {})[cell.degree] = value
    worst, where = 1.0, ""
    for (kind, seq), by_degree in sorted(kept.items()):
        memory = tables[kind][seq]
        documented = memory.activation_bytes_per_sample.get(1)
        ratio = 1.0
        if documented is not None and (kind, seq) in whole:
            ratio = documented / whole[kind, seq]
        if abs(ratio - 1.0) > abs(worst - 1.0):
            worst, where = ratio, f"layer type {kind}, sequence length {seq}"
        tables[kind][seq] = replace(
            memory,
            ulysses_activation_bytes_per_sample={
                degree: by_degree[degree] * ratio for degree in sorted(by_degree)
            },
        )
    if abs(worst - 1.0) <= _AGREE:
        return tables, ()
    note = (
        f"at odds: {path.name} differs by up to {(worst - 1.0) * 100:+.3g} % from its sidecar "
        f"(activations of {where}); the file's were used, and the sidecar's Ulysses figures in "
        "proportion"
    )
    return tables, (note,)


def _place(path: Path, cell: ModelMeasurement) -> tuple[int, int] | None:
    """Return (layer type, length) of a cell that says what a layer keeps, None for all others.

    Of the unsharded layer, and of Ulysses layers, neither checkpointed.
    """
    if (cell.quantity, cell.part, cell.status, cell.checkpoint) != (
        "memory",
        "layer",
        "ok",
        "none",
    ):
        return None
    if cell.layer_type is None or (cell.degree != 1 and cell.kind != "ulysses"):
        return None
    if (
        min(cell.batch, cell.degree, cell.layer_type + 1, *cell.seq_lengths, len(cell.seq_lengths))
        < 1
    ):
        raise _damaged(path, cell, "has no positive batch, degree and sequence length")
    if not cell.bytes.get("activation"):
        raise _damaged(path, cell, "has no bytes of activations")
    return cell.layer_type, cell.seq_lengths[0]


def _damaged(path: Path, cell: ModelMeasurement, what: str) -> DocumentError:
    return DocumentError(
        sidecar_path(path),
        f"cell {cell.key!r} {what}",
        key=_KEY,
        remedy="count again with `profile-model --profile-type memory`",
    )
