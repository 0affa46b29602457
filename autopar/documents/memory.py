"""Reads and writes the documented memory file: tables of layers and of the rest, in MiB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from autopar.documents.catalog import Content
from autopar.documents.memory_raw import derive_memory
from autopar.documents.schemas import LayerEntry, MemoryDocument, OtherEntry
from autopar.documents.sidecar import ModelMeasurement, Sidecar, newest_cells, sidecar_path
from autopar.documents.times import seqs_of
from autopar.errors import DocumentError
from autopar.model import LayerMemory, ModelProfile, ModelSpec, OtherMemory
from autopar.units import MIB, format_count

__all__ = [
    "MAKE_MEMORY",
    "MemoryTables",
    "memory_content",
    "memory_keys",
    "read_cells",
    "read_memory",
]


# --------------------------------------------------------------------------------------------------
# Reads what the sidecar of a memory file has beside documented tables: Ulysses, and backwards.
#
# Documented tables know one tensor degree per figure, no Ulysses and no moments. Ulysses layers
# keep q, k and v before and after their all-to-alls, and copies of k and v where there are fewer
# heads than ranks, so that a rank keeps more than the unsharded layer over the degree. And while a
# layer's backward runs it needs memory above what the layers keep. The raw cells of a sidecar hold
# both as counted. Checkpointed layers need no entries: what they keep is their input, exactly the
# documented figure over the degree where the sequence is split, and their backward needs what is
# recomputed and then what the layer's backward needs.


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
        # an unsharded layer is the same for every kind
        if cell.degree == 1 or cell.kind == "ulysses":
            # cells count the whole batch, tables one sample
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
        # degree 1 is what the documented table itself says
        whole = counted.kept.pop(1, None)
        ratio = 1.0 if documented is None or whole is None else documented / whole
        if abs(ratio - 1.0) > abs(worst - 1.0):
            worst, where = ratio, f"layer type {kind}, sequence length {seq}"
        tables[kind][seq] = replace(
            memory,
            ulysses_activation_bytes_per_sample=_times(counted.kept, ratio),
            # an edit downwards must not hide what a backward needs
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
        # layer types count from 0, everything else from 1
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


# --------------------------------------------------------------------------------------------------
# The documented tables: read with what is missing derived, written as they are documented.


MAKE_MEMORY = "`profile-model --profile-type memory` makes this file"

_POSITIONS = {"off": "only", "on_first": "first", "on_last": "last"}
"""Position of the vocabulary layers by the end of the documented key."""

_MODEL_STATE_BYTES = {4: 16.0, 2: 18.0}
"""Bytes of model states per parameter in the 'other' tables by bytes of `parameter_size`:
PaddleNLP keeps fp32 gradients, its states are 9 times a 2-byte parameter."""

_OtherTables = dict[str, Mapping[tuple[int, ...], OtherMemory]]
MemoryTables = tuple[tuple[dict[int, LayerMemory], ...], _OtherTables, tuple[str, ...]]
"""Memory of every layer type by sequence length, of the rest by position, and notes."""

_LAYER, _OTHER, _RAW = MemoryDocument.rules


def memory_content(document: MemoryDocument) -> Content:
    """Return whether a file has processed keys, raw ones that may suffice, or neither."""
    keys = list(document.root)
    if any(_LAYER.regex.fullmatch(key) for key in keys):
        return "processed"
    runs = (m for key in keys if (m := _RAW.regex.fullmatch(key)))
    single = [m for m in runs if m["pp"] == "1" and m["tp"] == "1"]
    counts = {k.split("_bsz")[0] for m in single for k in document.root[m.string].root}
    return "raw" if len(counts) > 1 else "none"


def read_memory(
    path: Path,
    document: MemoryDocument,
    spec: ModelSpec,
    *,
    sequence_parallel: bool,
    parameter_bytes: Literal[4, 2],
    detect: bool = True,
) -> MemoryTables:
    """Return the tables of a memory file, in bytes.

    With `detect`, PaddleNLP's raw keys mean 2 bytes per parameter.

    Raises
    ------
    DocumentError: the variant (with or without `_sp`), a layer type, a position or a degree is
        missing, or the file is of another number of layer types.
    """
    processed = {k: v for k, v in document.root.items() if not _RAW.regex.fullmatch(k)}
    notes: list[str] = []
    if not processed:
        processed, notes = derive_memory(path, document, spec, sequence_parallel)
    paddle = any(key.endswith(("_True", "_False")) for key in document.root)
    if detect and paddle and parameter_bytes == 4:
        parameter_bytes = 2
        notes.append("PaddleNLP's raw keys: parameter_size was read at 2 bytes per parameter")
    reader = _Reader(path, spec, sequence_parallel, parameter_bytes)
    layers = tuple(reader.layer(processed, kind) for kind in range(len(spec.layers)))
    reader.refuse_other_types(processed)
    others: _OtherTables = {
        name: reader.other(processed, part) for part, name in _POSITIONS.items()
    }
    return layers, others, (*notes, *reader.notes)


class _Reader:
    """Reads the processed tables of one variant."""

    def __init__(
        self, path: Path, spec: ModelSpec, sequence_parallel: bool, parameter_bytes: int
    ) -> None:
        self.path = path
        self.spec = spec
        self.suffix = "_sp" if sequence_parallel else ""
        self.parameter_bytes = parameter_bytes
        self.notes: dict[str, None] = {}  # an ordered set

    def layer(self, tables: Mapping[str, Any], kind: int) -> dict[int, LayerMemory]:
        """Return the memory of one layer type by sequence length."""
        result: dict[int, LayerMemory] = {}
        for text, entry in self._table(tables, f"layertype_{kind}").items():
            seq = int(text) if text else self._unnamed_seqs(self.spec.layers[kind].seq_length)[0]
            result[seq] = self._layer_memory(entry, f"layertype_{kind}{self.suffix}.{text}")
        return result

    def other(self, tables: Mapping[str, Any], part: str) -> dict[tuple[int, ...], OtherMemory]:
        """Return the memory of the rest at one position by sequence lengths."""
        name = f"other_memory_pp_{part}"
        result: dict[tuple[int, ...], OtherMemory] = {}
        count = len(self.spec.layers)
        for text, entry in self._table(tables, name).items():
            default = tuple(layer.seq_length for layer in self.spec.layers)
            seqs = seqs_of(text) if text else self._unnamed_seqs(*default)
            if len(seqs) == 1:
                # one number stands for all layer types
                seqs = seqs * count
            key = f"{name}{self.suffix}.{text}".rstrip(".")
            if len(seqs) != count:
                raise DocumentError(
                    self.path,
                    f"the key names {format_count(len(seqs), 'sequence length')}, but model "
                    f"{self.spec.name!r} has {count} layer type(s)",
                    key=key,
                )
            if seqs in result:
                raise DocumentError(
                    self.path,
                    "another spelling of this key is there as well",
                    key=key,
                    remedy="remove one of them",
                )
            result[seqs] = self._other_memory(entry, key)
        return result

    def refuse_other_types(self, tables: Mapping[str, Any]) -> None:
        """Raise if the file has layer types that the model does not have."""
        for key in tables:
            match = _LAYER.regex.fullmatch(key)
            if match and int(match["type"]) >= len(self.spec.layers):
                raise DocumentError(
                    self.path,
                    f"the file has layer type {match['type']}, but model {self.spec.name!r} has "
                    f"{len(self.spec.layers)} layer type(s), numbered from 0",
                    key=key,
                    remedy="give the model's other layer type, or another file",
                )

    def _table(self, tables: Mapping[str, Any], name: str) -> dict[str, Any]:
        key = name + self.suffix
        other_key = name if self.suffix else name + "_sp"
        if key in tables:
            table: dict[str, Any] = tables[key].root
            if not table:
                raise DocumentError(
                    self.path, "the object is empty, expected a sequence length", key=key
                )
            return table
        if other_key in tables:
            wanted, there = ("with", "without") if self.suffix else ("without", "with")
            switch = "--no-sequence-parallel" if self.suffix else "--sequence-parallel"
            raise DocumentError(
                self.path,
                f"this key is missing: the file was measured {there} sequence parallelism "
                f"({other_key!r}) and the search is {wanted} it",
                key=key,
                remedy=f"search with {switch} or measure again",
            )
        raise DocumentError(
            self.path, "this key is missing and is required", key=key, remedy=MAKE_MEMORY
        )

    def _unnamed_seqs(self, *seqs: int) -> tuple[int, ...]:
        named = ", ".join(str(s) for s in seqs)
        self.notes[f"tables without a sequence length were read as the model's {named}"] = None
        return seqs

    def _layer_memory(self, entry: LayerEntry, key: str) -> LayerMemory:
        table = dict(entry.tp_activation_per_bsz_dict.root)
        checkpoint = table.pop("checkpoint", None)
        if not table:
            raise DocumentError(
                self.path,
                "there is no tensor degree, expected at least '1'",
                key=f"{key}.tp_activation_per_bsz_dict",
                remedy=MAKE_MEMORY,
            )
        return LayerMemory(
            # MiB of weights -> how many they are
            parameter_count=entry.parameter_size * MIB / self.parameter_bytes,
            activation_bytes_per_sample=_bytes(table),
            checkpoint_bytes_per_sample=None if checkpoint is None else checkpoint * MIB,
        )

    def _other_memory(self, entry: OtherEntry, key: str) -> OtherMemory:
        for kind in ("model_states", "activation"):
            if not getattr(entry, kind).root:
                raise DocumentError(
                    self.path,
                    "there is no vocabulary degree, expected at least '1'",
                    key=f"{key}.{kind}",
                    remedy=MAKE_MEMORY,
                )
        states = _bytes(entry.model_states.root)
        # 16 bytes per parameter inside; with fp32 gradients the file counts 18
        scale = _MODEL_STATE_BYTES[4] / _MODEL_STATE_BYTES[self.parameter_bytes]
        return OtherMemory(
            model_state_bytes={degree: value * scale for degree, value in states.items()},
            activation_bytes_per_sample=_bytes(entry.activation.root),
        )


def _bytes(table: Mapping[str, float]) -> dict[int, float]:
    # by number: as texts 16 would come before 2
    return {int(degree): value * MIB for degree, value in sorted(table.items(), key=_degree)}


def _degree(item: tuple[str, float]) -> int:
    return int(item[0])


def memory_keys(profile: ModelProfile) -> dict[str, Any]:
    """Return the documented keys of a profile's memory: MiB, 4 bytes per parameter."""
    suffix = "_sp" if profile.sequence_parallel else ""
    result: dict[str, Any] = {}
    for kind, layer in enumerate(profile.layers):
        result[f"layertype_{kind}{suffix}"] = {
            str(seq): _layer_entry(memory) for seq, memory in sorted(layer.memory.items())
        }
    for part, name in _POSITIONS.items():
        if name in profile.other_memory:
            result[f"other_memory_pp_{part}{suffix}"] = {
                _seqs_text(seqs): {
                    "model_states": _mib(memory.model_state_bytes),
                    "activation": _mib(memory.activation_bytes_per_sample),
                }
                for seqs, memory in sorted(profile.other_memory[name].items())
            }
    return result


def _layer_entry(memory: LayerMemory) -> dict[str, Any]:
    activations = _mib(memory.activation_bytes_per_sample)
    if memory.checkpoint_bytes_per_sample is not None:
        activations["checkpoint"] = memory.checkpoint_bytes_per_sample / MIB
    return {
        # the documented size is that of fp32 weights, whatever the precision
        "parameter_size": memory.parameter_count * 4 / MIB,
        "tp_activation_per_bsz_dict": activations,
    }


def _mib(table: Mapping[int, float]) -> dict[str, float]:
    return {str(degree): value / MIB for degree, value in sorted(table.items())}


def _seqs_text(seqs: tuple[int, ...]) -> str:
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"
