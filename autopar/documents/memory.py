"""Reader of memory files in Galvatron's format: tables of layers, and of embedding, head and loss.

Values in files are in MiB. Tables that are missing in a file are derived from its raw runs. Memory
of Ulysses layers and of backwards is read from the cells of its sidecar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import field

from autopar.documents.catalog import Content
from autopar.documents.checks import INT
from autopar.documents.schemas import (
    LIST,
    Degrees,
    LayerActivations,
    LayerBySeq,
    LayerEntry,
    MemoryDocument,
    OtherBySeq,
    OtherEntry,
)
from autopar.documents.sidecar import ModelMeasurement, Sidecar, newest_cells, sidecar_path
from autopar.documents.spec import bare_spec
from autopar.documents.times import required, seqs_of, seqs_of_model, type_of_model
from autopar.errors import DocumentError, VariantError
from autopar.records import Record, replace
from autopar.run.model import (
    LayerMemory,
    LayerSpec,
    ModelSpec,
    OtherMemory,
    parameter_count,
)
from autopar.sanity_checks import (
    CurvePoint,
    GrowthLaw,
    InputWarning,
    SuspiciousValue,
    doubtful_parameters,
    doubtful_table,
    notes_of,
)
from autopar.units import MIB

# --------------------------------------------------------------------------------------------------
# Memory of Ulysses layers and of backwards, from the sidecar of a memory file.
#
# Documented tables contain saved activations by tensor degree. They contain neither Ulysses degrees
# nor the transient memory of a layer's backward. Ulysses layers save q, k and v before and after
# their all-to-alls, and copies of k and v where there are fewer heads than ranks. A rank therefore
# saves more than the unsharded layer over the degree. The raw cells of a sidecar contain both
# quantities. Checkpointed layers need no cells: they save their input, which is the documented
# value over the degree where the sequence is split. Their backward needs the recomputed activations
# and the transient memory of the layer's backward.


_AGREE = 0.01
"""Relative tolerance; tables that differ more from their sidecar were edited or are of another run.
"""
_KEY = "model_measurements"
_TENSOR = {True: ("dtensor_sp", "sp"), False: ("dtensor", "tp")}
"""Kinds of the tables with and without sequence parallelism; a later one has priority."""

_Layers = tuple[dict[int, LayerMemory], ...]


class _Counted(Record):
    """Bytes per sample of one layer type at one sequence length, by degree, from sidecar cells."""

    kept: dict[int, float] = field(default_factory=dict)
    """Saved activations of the unsharded layer (key 1), and by Ulysses degree."""
    backward: dict[int, float] = field(default_factory=dict)
    """Transient memory of the backward, by tensor degree."""
    ulysses_backward: dict[int, float] = field(default_factory=dict)
    """Transient memory of the backward, by Ulysses degree."""


def read_cells(
    path: Path,
    sidecar: Sidecar | None,
    layers: Sequence[Mapping[int, LayerMemory]],
    *,
    sequence_parallel: bool,
) -> tuple[_Layers, tuple[str, ...]]:
    """Return the memory of layer types by sequence length with sidecar cells added, and notes.

    The file's activations of the unsharded layer have priority over those of the sidecar. If they
    differ, all sidecar values are scaled with their ratio, but the memory of backwards is never
    lowered. A difference of more than 1 % gives a note. Cells of layer types and lengths that the
    file does not contain are ignored.

    path : the memory file.
    layers : memory of every layer type by sequence length, from the file.

    Raises DocumentError: a cell has no bytes, no positive batch and degree, or no sequence length.
    """
    tables: _Layers = tuple(dict(table) for table in layers)
    if sidecar is None:
        return tables, ()
    found: dict[tuple[int, int], _Counted] = {}
    for at, cell in _cells(path, sidecar, tables, sequence_parallel):
        counted = found.setdefault(at, _Counted())
        # An unsharded layer is equal for every kind.
        if cell.degree == 1 or cell.kind == "ulysses":
            # Cells count the whole batch, tables one sample.
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
        # Degree 1 is in the documented table itself.
        whole = counted.kept.pop(1, None)
        ratio = 1.0 if documented is None or whole is None else documented / whole
        if abs(ratio - 1.0) > abs(worst - 1.0):
            worst, where = ratio, f"layer type {kind}, sequence length {seq}"
        tables[kind][seq] = replace(
            memory,
            ulysses_activation_bytes_per_sample=_times(counted.kept, ratio),
            # An edit downwards must not hide the memory of a backward.
            backward_bytes_per_sample=_times(counted.backward, max(1.0, ratio)),
            ulysses_backward_bytes_per_sample=_times(counted.ulysses_backward, max(1.0, ratio)),
        )
    if abs(worst - 1.0) <= _AGREE:
        return tables, ()
    note = InputWarning(
        f"contradiction: {path.name} differs by up to {(worst - 1.0) * 100:+.3g} "
        f"% from its sidecar (activations of {where}). The values of the file "
        "are used; Ulysses and backward values of the sidecar are scaled, the "
        "latter never down"
    )
    return tables, (note,)


def _times(values: Mapping[int, float], ratio: float) -> dict[int, float]:
    return {degree: values[degree] * ratio for degree in sorted(values)}


def _cells(
    path: Path, sidecar: Sidecar, tables: _Layers, sequence_parallel: bool
) -> Iterator[tuple[tuple[int, int], ModelMeasurement]]:
    """Yield ((layer type, length), cell) of layers without checkpointing, preferred kinds last."""
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
        # Layer types count from 0, everything else from 1.
        sizes = (cell.batch, cell.degree, cell.layer_type + 1, *cell.seq_lengths)
        if min(*sizes, len(cell.seq_lengths)) < 1:
            raise _damaged(path, cell, "has no positive batch, degree and sequence length")
        if not cell.bytes.get("activation"):
            raise _damaged(path, cell, "has no activation bytes")
        at = (cell.layer_type, cell.seq_lengths[0])
        if at[0] < len(tables) and at[1] in tables[at[0]]:
            yield at, cell


def _damaged(path: Path, cell: ModelMeasurement, what: str) -> DocumentError:
    return DocumentError(
        sidecar_path(path),
        f"cell {cell.key!r} {what}",
        key=_KEY,
        remedy="Count again with `profile-model --profile-type memory`",
    )


# --------------------------------------------------------------------------------------------------
# Documented tables: reading and checks of plausibility.


MAKE_MEMORY = "Create it with `profile-model --profile-type memory`"

POSITIONS = {"off": "only", "on_first": "first", "on_last": "last"}
"""Key of `ModelProfile.other_memory` by the end of the documented key."""

_MODEL_STATE_BYTES = {4: 16.0, 2: 18.0}
"""Bytes of model states per parameter in the 'other' tables, by bytes of `parameter_size`.

PaddleNLP keeps fp32 gradients; its states are 9 times a 2-byte parameter.
"""

_SLACK = 1.5
"""Tolerated factor between measured tables and the laws of layers and states; up to 1.125 was
observed (a padded vocabulary)."""
_SHARED = GrowthLaw(least=0.0, most=1.0, slack=_SLACK)
"""Law of a value times the degree: a rank has between 1/degree and all of the memory."""
_KEPT = GrowthLaw(least=1.0, most=2.0, slack=_SLACK)
"""Activations grow with the tokens, or with pairs of tokens where attention saves its scores."""
_SAVED = GrowthLaw(least=1.0, most=1.0, slack=_SLACK)
_SAME = GrowthLaw(least=0.0, most=0.0, slack=_SLACK)
_STATES = GrowthLaw(least=0.0, most=0.5, slack=_SLACK)
"""Parts that grow with the sequence length: learned positions only."""
_OTHER_SHARED = GrowthLaw(least=0.0, most=1.0, slack=2.0)
_OTHER_KEPT = GrowthLaw(least=0.0, most=2.0, slack=2.5)
"""Laws of the peak of embedding, head and loss by degree and by length. The peak is a maximum of
several points minus the memory of layers; measured peaks deviate by up to 1.54 and 1.86."""

_OtherTables = dict[str, Mapping[tuple[int, ...], OtherMemory]]
MemoryTables = tuple[tuple[dict[int, LayerMemory], ...], _OtherTables, tuple[str, ...]]
"""Memory of every layer type by sequence length, of the other parts by position, and notes."""

_LAYER, _OTHER, _RAW = MemoryDocument.rules


def memory_content(document: MemoryDocument) -> Content:
    """Return the content of a file: processed keys, raw ones that may suffice, or neither."""
    keys = list(document.root)
    if any(_LAYER.regex.fullmatch(key) for key in keys):
        return "processed"
    runs = (m for key in keys if (m := _RAW.regex.fullmatch(key)))
    single = [m for m in runs if m["pp"] == "1" and m["tp"] == "1"]
    counts = {k.split("_bsz")[0] for m in single for k in document.root[m.string].root}
    return "raw" if len(counts) > 1 else "none"


def is_of_paddle(document: MemoryDocument) -> bool:
    """Return True for raw keys of PaddleNLP, whose tables have 2 bytes per parameter."""
    return any(key.endswith(("_True", "_False")) for key in document.root)


def read_memory(
    path: Path,
    document: MemoryDocument,
    spec: ModelSpec,
    *,
    sequence_parallel: bool,
    parameter_bytes: Literal[2, 4] | None,
) -> MemoryTables:
    """Return the tables of a memory file, in bytes.

    sequence_parallel : True to read the tables with Megatron sequence parallelism: `_sp`, or all
        tables of PaddleNLP.
    parameter_bytes : bytes per parameter in `parameter_size`; None: 4, or 2 for PaddleNLP's raw
        keys.

    Raises VariantError: the file contains only the variant with (without) `_sp`. Raises
    DocumentError: a layer type, a position or a degree is missing, or the file contains layer types
    that the model does not have.
    """
    processed = {k: v for k, v in document.root.items() if not _RAW.regex.fullmatch(k)}
    notes: list[str] = []
    if sequence_parallel and is_of_paddle(document):
        # Its trainer always uses sequence parallelism, and names of its keys do not contain it.
        sequence_parallel = False
        notes.append("raw keys of PaddleNLP: tables read as those of sequence parallelism")
    if not processed:
        processed, more = _derive_memory(path, document, spec, sequence_parallel)
        notes += more
    if parameter_bytes is None and is_of_paddle(document):
        parameter_bytes = 2
        notes.append("raw keys of PaddleNLP: parameter_size read with 2 bytes per parameter")
    reader = _Reader(path, spec, sequence_parallel, parameter_bytes or 4)
    layers = tuple(reader.layer(processed, kind) for kind in range(len(spec.layers)))
    reader.refuse_other_types(processed)
    others: _OtherTables = {name: reader.other(processed, part) for part, name in POSITIONS.items()}
    suspicious = notes_of(path, reader.doubts(processed))
    return layers, others, (*notes, *reader.notes, *suspicious)


def memory_doubts(path: Path, document: MemoryDocument) -> list[SuspiciousValue]:
    """Return the values of a memory file that contradict each other, without a model spec."""
    tables = {key: v for key, v in document.root.items() if not _RAW.regex.fullmatch(key)}
    readers = (_Reader(path, None, with_sp, 4) for with_sp in (False, True))
    return [doubt for reader in readers for doubt in reader.doubts(tables)]


class _Reader:
    """Reader of the processed tables with, or without, sequence parallelism."""

    def __init__(
        self, path: Path, spec: ModelSpec | None, sequence_parallel: bool, parameter_bytes: int
    ) -> None:
        self.path = path
        self.known = spec
        self.spec = spec or bare_spec(num_layers=[1], seq_length=[1], hidden_size=[1])
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
        """Return the memory of embedding, head and loss by sequence lengths.

        part : position in the pipeline, a key of `POSITIONS`.
        """
        name = f"other_memory_pp_{part}"
        result: dict[tuple[int, ...], OtherMemory] = {}
        default = tuple(layer.seq_length for layer in self.spec.layers)
        for text, entry in self._table(tables, name).items():
            key = f"{name}{self.suffix}.{text}".rstrip(".")
            if text:
                seqs = seqs_of_model(self.path, key, text, self.spec)
            else:
                seqs = self._unnamed_seqs(*default)
            if seqs in result:
                raise DocumentError(
                    self.path,
                    "another spelling of this key is also in the file",
                    key=key,
                    remedy="Remove one of them",
                )
            result[seqs] = self._other_memory(entry, key)
        return result

    def refuse_other_types(self, tables: Mapping[str, Any]) -> None:
        """Raise DocumentError if the file has layer types that the model does not have."""
        for key in tables:
            match = _LAYER.regex.fullmatch(key)
            if match:
                type_of_model(self.path, key, match["type"], self.spec)

    def doubts(self, tables: Mapping[str, Any]) -> list[SuspiciousValue]:
        """Return the values of this variant that contradict each other or the architecture."""
        found: list[SuspiciousValue] = []
        for key, table in tables.items():
            if key.endswith("_sp") != bool(self.suffix):
                continue
            if match := _LAYER.regex.fullmatch(key):
                kind = int(match["type"])
                known = self.known is not None and kind < len(self.known.layers)
                layer = self.spec.layers[kind] if known else None
                found += self._layer_doubts(key, table.root, layer)
            else:
                entries = table.root
                for name, by_length in (("model_states", _STATES), ("activation", _OTHER_KEPT)):
                    values = {text: getattr(entry, name).root for text, entry in entries.items()}
                    by_degree = _SHARED if name == "model_states" else _OTHER_SHARED
                    found += doubtful_table(
                        _cells_of(key, f".{name}", values), by_degree, by_length
                    )
        return found

    def _layer_doubts(
        self, key: str, table: Mapping[str, LayerEntry], layer: LayerSpec | None
    ) -> Iterator[SuspiciousValue]:
        sizes = {text: {"": entry.parameter_size} for text, entry in table.items()}
        kept = {text: dict(entry.tp_activation_per_bsz_dict.root) for text, entry in table.items()}
        saved = {
            text: {"checkpoint": v.pop("checkpoint")}
            for text, v in kept.items()
            if len(v) > 1 and "checkpoint" in v
        }
        name = ".tp_activation_per_bsz_dict"
        yield from doubtful_table(_cells_of(key, name, kept), _SHARED, _KEPT)
        yield from doubtful_table(_cells_of(key, name, saved), _SHARED, _SAVED)
        yield from doubtful_table(_cells_of(key, ".parameter_size", sizes), _SHARED, _SAME)
        for text, values in saved.items():
            own, whole = values["checkpoint"], kept[text].get("1")
            at = f"{_join(key, text)}{name}.checkpoint"
            if whole is not None and own > whole * _SLACK:
                problem = f"{own:.5g} MiB, more than the whole layer's {whole:.5g} MiB ('1')"
                yield SuspiciousValue(key=at, problem=problem, factor=own / whole)
            elif layer is not None:
                # The input has 2 or 4 bytes per element; a decoder also saves the encoder's output.
                seq = int(text) if text else layer.seq_length
                least = seq * layer.hidden_size * 2 / MIB
                most = least * 2 * (2 if layer.cross_attention else 1)
                factor = max(least / own, own / most)
                if factor > _SLACK:
                    problem = f"{own:.5g} MiB, less than the input of a layer, {least:.5g} MiB"
                    yield SuspiciousValue(key=at, problem=problem, factor=factor)
        if layer is not None and layer.num_heads and layer.ffn_hidden_size:
            counted = parameter_count(layer) * self.parameter_bytes / MIB
            for text, value in sizes.items():
                at = f"{_join(key, text)}.parameter_size"
                doubt = doubtful_parameters(at, value[""], counted)
                if doubt is not None:
                    yield doubt

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
            # A file with some tables of the wanted variant is damaged, not of the other variant.
            alone = not any(key.endswith("_sp") == bool(self.suffix) for key in tables)
            raise (VariantError if alone else DocumentError)(
                self.path,
                f"this key is missing: the file was measured {there} sequence "
                f"parallelism ({other_key!r}), but the search is {wanted} it",
                key=key,
                remedy=f"Search with {switch}, or measure again",
            )
        raise required(self.path, key, MAKE_MEMORY)

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
                "no tensor degree is given, expected at least '1'",
                key=f"{key}.tp_activation_per_bsz_dict",
                remedy=MAKE_MEMORY,
            )
        return LayerMemory(
            # MiB of weights to their number.
            parameter_count=entry.parameter_size * MIB / self.parameter_bytes,
            activation_bytes_per_sample=_bytes(table),
            checkpoint_bytes_per_sample=None if checkpoint is None else checkpoint * MIB,
        )

    def _other_memory(self, entry: OtherEntry, key: str) -> OtherMemory:
        for kind in ("model_states", "activation"):
            if not getattr(entry, kind).root:
                raise DocumentError(
                    self.path,
                    "no vocabulary degree is given, expected at least '1'",
                    key=f"{key}.{kind}",
                    remedy=MAKE_MEMORY,
                )
        states = _bytes(entry.model_states.root)
        # Internal states have 16 bytes per parameter; a file with fp32 gradients counts 18.
        scale = _MODEL_STATE_BYTES[4] / _MODEL_STATE_BYTES[self.parameter_bytes]
        return OtherMemory(
            model_state_bytes={degree: value * scale for degree, value in states.items()},
            activation_bytes_per_sample=_bytes(entry.activation.root),
        )


def _cells_of(
    key: str, name: str, table: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[str, float, str, CurvePoint]]:
    """Yield (text of lengths, tokens, degree or name, point) for every value of a table.

    The x coordinate of a point is the degree.
    """
    for text, values in table.items():
        tokens = float(sum(seqs_of(text)) if text else 1)
        for degree, value in values.items():
            at = f"{_join(key, text)}{name}" + (f".{degree}" if degree else "")
            share = float(degree) if degree.isdecimal() else 1.0
            figure = CurvePoint(key=at, x=share, y=value, written=value, unit="MiB")
            yield text, tokens, degree, figure


def _join(key: str, text: str) -> str:
    return f"{key}.{text}" if text else key


def _bytes(table: Mapping[str, float]) -> dict[int, float]:
    # Sorted by number: as text, 16 would come before 2.
    return {int(degree): value * MIB for degree, value in sorted(table.items(), key=_degree)}


def _degree(item: tuple[str, float]) -> int:
    return int(item[0])


# --------------------------------------------------------------------------------------------------
# Derivation of the processed memory tables from raw runs, for files without processed tables.
#
# A raw run `{pp}_{tp}_{dp}[_c][_vtp][_sp]` contains the memory that the first and the last rank
# allocated, for some numbers of layers, a batch and a sequence length: `_ms` after the step (model
# states), `_act` after the forward, `_act_peak` at the peak. The difference of two numbers of
# layers gives one layer; the remainder of a run belongs to the other parts. Formulas are
# Galvatron's, so that the tables equal those of its own processing.


_ENTRY = re.compile(
    rf"layernum(?P<layers>{LIST})_bsz(?P<batch>{INT})(?:_seq(?P<seq>{LIST}))?"
    r"_rank(?P<rank>0|[1-9][0-9]*)_(?P<what>ms|act|act_peak)"
)
_MAKE_PROCESSED = "Create the processed keys with `profile-model --profile-type memory`"

_Counts = tuple[int, ...]


class _Run(Record):
    """Raw memory of one rank of a training run, MiB."""

    pp: int
    tp: int
    dp: int
    checkpoint: bool
    vocab_tp: bool
    counts: _Counts
    """Number of layers of every type."""
    batch: int
    """Global batch size."""
    last: bool
    """True for the last rank, False for rank 0."""
    states: float
    activation: float
    peak: float

    @property
    def vtp(self) -> int:
        """Vocabulary degree."""
        return self.tp if self.vocab_tp else 1

    @property
    def local_batch(self) -> float:
        """Samples per tensor group."""
        return self.batch / self.dp


def _derive_memory(
    path: Path, document: MemoryDocument, spec: ModelSpec, sequence_parallel: bool
) -> tuple[dict[str, LayerBySeq | OtherBySeq], list[str]]:
    """Return processed tables by documented key, derived from raw runs, and notes.

    Raises VariantError: all raw runs are of the other variant, with (without) sequence parallelism.
    Raises DocumentError: the runs do not suffice; the remedy is the command for the processed keys.
    """
    by_seq: dict[tuple[int, ...], list[_Run]] = {}
    for seqs, run in _runs(document, spec, sequence_parallel):
        by_seq.setdefault(seqs, []).append(run)
    suffix = "_sp" if sequence_parallel else ""
    layers: list[dict[str, LayerEntry]] = [{} for _ in spec.layers]
    others: dict[str, dict[str, OtherEntry]] = {"off": {}, "on_first": {}, "on_last": {}}
    notes = []
    for seqs, runs in sorted(by_seq.items()):
        table = _SeqTable(runs, len(spec.layers), sequence_parallel)
        rest = {part: table.other(part) for part in others} if table.complete else {}
        if not rest or any(entry is None for entry in rest.values()):
            named = ",".join(map(str, seqs))
            notes.append(f"raw runs at sequence length {named} do not suffice and were skipped")
            continue
        for kind, seq in enumerate(seqs):
            layers[kind].setdefault(str(seq), table.layer(kind))
        for part, entry in rest.items():
            if entry is not None:
                others[part][",".join(map(str, seqs))] = entry
    if not others["off"]:
        raw = (match for key in document.root if (match := _RAW.regex.fullmatch(key)))
        variants = {"_sp" in match["flags"] for match in raw}
        other_there = (not sequence_parallel) in variants
        hint = "the runs of this file are " + ("without" if sequence_parallel else "with")
        raise (VariantError if variants == {not sequence_parallel} else DocumentError)(
            path,
            "the file has no processed key and its raw runs do not suffice to derive it"
            + (f" ({hint} sequence parallelism)" if other_there else ""),
            key=f"layertype_0{suffix}",
            remedy=_MAKE_PROCESSED,
        )
    result: dict[str, LayerBySeq | OtherBySeq] = {
        f"layertype_{kind}{suffix}": LayerBySeq(table) for kind, table in enumerate(layers)
    }
    for part, entries in others.items():
        result[f"other_memory_pp_{part}{suffix}"] = OtherBySeq(entries)
    notes.append("processed memory tables were derived from the raw runs")
    return result, notes


def _runs(
    document: MemoryDocument, spec: ModelSpec, sequence_parallel: bool
) -> Iterator[tuple[tuple[int, ...], _Run]]:
    """Yield (sequence lengths, run) for rank 0 and the last rank of every run of the variant."""
    for key, raw in document.root.items():
        match = _RAW.regex.fullmatch(key)
        if match is None:
            continue
        flags = set(match["flags"].split("_")) - {""}
        if not flags <= {"c", "vtp", "sp"} or ("sp" in flags) != sequence_parallel:
            continue
        pp, tp, dp = (int(match[name]) for name in ("pp", "tp", "dp"))
        found: dict[tuple[_Counts, int, tuple[int, ...], int], dict[str, float]] = {}
        for name, value in raw.root.items():
            entry = _ENTRY.fullmatch(name)
            if entry is None:
                continue
            counts = seqs_of(entry["layers"])
            default = ",".join(str(layer.seq_length) for layer in spec.layers)
            seqs = seqs_of(entry["seq"] or default)
            seqs = seqs * len(spec.layers) if len(seqs) == 1 else seqs
            if len(counts) == len(seqs) == len(spec.layers):
                point = counts, int(entry["batch"]), seqs, int(entry["rank"])
                found.setdefault(point, {})[entry["what"]] = value
        last_rank = pp * tp * dp - 1
        for (counts, batch, seqs, rank), values in found.items():
            if rank in (0, last_rank) and values.keys() >= {"ms", "act", "act_peak"}:
                yield (
                    seqs,
                    _Run(
                        pp=pp,
                        tp=tp,
                        dp=dp,
                        checkpoint="c" in flags,
                        vocab_tp="vtp" in flags,
                        counts=counts,
                        batch=batch,
                        # With a single rank, the run counts as that of rank 0 only.
                        last=rank == last_rank and rank != 0,
                        states=values["ms"],
                        activation=values["act"],
                        peak=values["act_peak"],
                    ),
                )


class _SeqTable:
    """Memory of layers and other parts at one sequence length, derived from raw runs."""

    def __init__(self, runs: list[_Run], num_types: int, sequence_parallel: bool) -> None:
        self.runs = runs
        self.num_types = num_types
        plain = [r for r in runs if r.pp == 1 and not r.last and not r.checkpoint]
        self.degrees = sorted({r.tp for r in plain if not r.vocab_tp})
        # Per type and degree: model states on the rank, and activations per local sample.
        self.states: list[dict[int, float]] = [{} for _ in range(num_types)]
        self.activations: list[dict[int, float]] = [{} for _ in range(num_types)]
        self.checkpoints: list[float | None] = [None] * num_types
        for kind in range(num_types):
            for tp in self.degrees:
                pair = _pair([r for r in plain if r.tp == tp and not r.vocab_tp], kind)
                if pair is not None:
                    low, high = pair
                    # The difference of two runs contains only layers, whatever else the rank holds.
                    layers = high.counts[kind] - low.counts[kind]
                    self.states[kind][tp] = (high.states - low.states) / layers
                    more = (high.activation - low.activation) / layers
                    # The rank's activations are for all samples of its tensor group.
                    self.activations[kind][tp] = more / low.local_batch
            saved = [
                (high.activation - low.activation)
                / (high.counts[kind] - low.counts[kind])
                / low.local_batch
                for tp in sorted({r.tp for r in runs if r.checkpoint})
                if (
                    pair := _pair(
                        [r for r in runs if r.pp == 1 and r.tp == tp and r.checkpoint], kind
                    )
                )
                for low, high in [pair]
            ]
            # With sequence parallelism higher degrees save a part: the largest is the whole input.
            self.checkpoints[kind] = max(saved) if saved else None
        self.world = runs[0].pp * runs[0].tp * runs[0].dp
        self.complete = all(
            1 in self.states[kind]
            and min(self.states[kind].values()) > 0
            and min(self.activations[kind].values()) > 0
            for kind in range(num_types)
        )
        self.zero3 = not self.complete or self._is_zero3()
        if self.complete and sequence_parallel:
            for table in self.activations:
                # Each missing degree has half of the one below, since all activations are split.
                for degree in (2, 4, 8):
                    if degree not in table:
                        table[degree] = table[degree // 2] / 2

    def _is_zero3(self) -> bool:
        """Return True if the runs sharded model states over all ranks (ZeRO-3).

        With ZeRO-3 the states of a layer on one rank do not depend on the tensor degree; without it
        they decrease with the degree. If only degree 1 was measured, ZeRO-3 is assumed, which is
        the profiler's default.
        """
        most = max(self.states[0])
        # Without ZeRO-3 the rank has 1/t of the whole, with it as much as at degree 1.
        return most == 1 or self.states[0][most] > 2 * self.states[0][1] / most

    def _full(self, kind: int, tp: int) -> float:
        """Return the model states of one layer on a tensor rank before ZeRO sharding, MiB."""
        known = self.states[kind]
        if tp in known:
            # With ZeRO-3 a rank holds 1/world of a layer, and 1/tp before data sharding.
            return known[tp] * (self.world / tp if self.zero3 else 1)
        return known[1] * (self.world if self.zero3 else 1) / tp

    def layer(self, kind: int) -> LayerEntry:
        """Return the documented entry of one layer type."""
        table = {str(tp): value for tp, value in sorted(self.activations[kind].items())}
        saved = self.checkpoints[kind]
        if saved is not None and saved > 0:
            table["checkpoint"] = saved
        # States are 16 bytes per parameter, parameter_size 4.
        size = max(self._full(kind, tp) * tp for tp in self.states[kind]) / 4
        return LayerEntry(
            parameter_size=size,
            tp_activation_per_bsz_dict=LayerActivations(table),
        )

    def other(self, part: str) -> OtherEntry | None:
        """Return the entry of embedding, head and loss at one position, None without such runs."""
        states: dict[int, float] = {}
        activations: dict[int, float] = {}
        for run in self._runs_of(part):
            on_rank = self._layers_on_rank(run, last=part == "on_last")
            if any(n and run.tp not in self.activations[k] for k, n in enumerate(on_rank)):
                continue
            layer_states = sum(n * self._full(k, run.tp) for k, n in enumerate(on_rank))
            # ZeRO-3 leaves 1/dp of the layers here; the remainder is split over the vocabulary's
            # ranks.
            if self.zero3:
                ranks = self.world / run.pp / run.vtp
                rest = (run.states - layer_states / run.dp) * ranks
            else:
                rest = run.states - layer_states
            layer_acts = run.local_batch * sum(
                n * self.activations[k][run.tp] for k, n in enumerate(on_rank) if n
            )
            # Samples of a vocabulary group: the batch over world / pp / vtp data ranks.
            samples = run.batch / self.world * run.pp * run.vtp
            act = (max(run.peak, run.activation) - layer_acts) / samples
            for table, value in ((states, rest), (activations, act)):
                clamped = max(0.0, value)
                table[run.vtp] = min(table.get(run.vtp, clamped), clamped)
        if 1 not in states:
            return None
        largest = max(max(table) for table in self.activations)
        for table in (states, activations):  # degrees without a run: halved, as for layers
            for degree in (2, 4, 8):
                if degree <= largest and degree not in table:
                    table[degree] = table[degree // 2] / 2
        return OtherEntry(
            model_states=Degrees({str(t): states[t] for t in sorted(states)}),
            activation=Degrees({str(t): activations[t] for t in sorted(activations)}),
        )

    def _runs_of(self, part: str) -> Iterator[_Run]:
        base = min(r.counts for r in self.runs if r.pp == 1)
        for run in self.runs:
            if run.checkpoint:
                continue
            if part == "off":
                if run.pp == 1 and not run.last and run.counts == base:
                    yield run
            # One layer per stage: the remainder of an end stage is embedding or head.
            elif run.pp > 1 and sum(run.counts) == run.pp and run.last == (part == "on_last"):
                yield run

    def _layers_on_rank(self, run: _Run, *, last: bool) -> _Counts:
        """Return the number of layers of every type on the first or last stage of a run.

        Pipeline runs have one layer per stage.
        """
        if run.pp == 1:
            return run.counts
        present = [kind for kind, n in enumerate(run.counts) if n]
        end = present[-1] if last else present[0]
        return tuple(int(kind == end) for kind in range(self.num_types))


def _pair(runs: list[_Run], kind: int) -> tuple[_Run, _Run] | None:
    """Return two runs that differ only in the number of layers of type `kind`, or None.

    They are the run with the fewest layers, and the longest one that differs only in `kind`.
    """
    if not runs:
        return None
    low = min(runs, key=lambda r: r.counts)
    longer = [
        r
        for r in runs
        if r.batch == low.batch
        and r.dp == low.dp
        and r.counts[kind] > low.counts[kind]
        and all(
            a == b for k, (a, b) in enumerate(zip(low.counts, r.counts, strict=True)) if k != kind
        )
    ]
    return (low, max(longer, key=lambda r: r.counts)) if longer else None
