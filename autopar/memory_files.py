"""Reads and writes the documented memory file: tables of layers and of the rest, in MiB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.computation_files import seqs_of
from autopar.documents import LayerEntry, MemoryDocument, OtherEntry
from autopar.errors import DocumentError
from autopar.locate import Content
from autopar.memory_raw import derive_memory
from autopar.model import LayerMemory, ModelProfile, ModelSpec, OtherMemory
from autopar.units import MIB, format_count

__all__ = [
    "MAKE_MEMORY",
    "MemoryTables",
    "memory_content",
    "memory_keys",
    "read_memory",
]

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
            parameter_count=entry.parameter_size * MIB / self.parameter_bytes,
            activation_bytes_per_sample=_bytes(table),
            checkpoint_bytes_per_sample=None if checkpoint is None else checkpoint * MIB,
        )

    def _other_memory(self, entry: OtherEntry, key: str) -> OtherMemory:
        for field in ("model_states", "activation"):
            if not getattr(entry, field).root:
                raise DocumentError(
                    self.path,
                    "there is no vocabulary degree, expected at least '1'",
                    key=f"{key}.{field}",
                    remedy=MAKE_MEMORY,
                )
        states = _bytes(entry.model_states.root)
        scale = _MODEL_STATE_BYTES[4] / _MODEL_STATE_BYTES[self.parameter_bytes]
        return OtherMemory(
            model_state_bytes={degree: value * scale for degree, value in states.items()},
            activation_bytes_per_sample=_bytes(entry.activation.root),
        )


def _bytes(table: Mapping[str, float]) -> dict[int, float]:
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
        "parameter_size": memory.parameter_count * 4 / MIB,
        "tp_activation_per_bsz_dict": activations,
    }


def _mib(table: Mapping[int, float]) -> dict[str, float]:
    return {str(degree): value / MIB for degree, value in sorted(table.items())}


def _seqs_text(seqs: tuple[int, ...]) -> str:
    return str(seqs[0]) if len(seqs) == 1 else f"[{','.join(map(str, seqs))}]"
