"""Derives the processed memory tables from raw runs, where a file has only those.

A raw run `{pp}_{tp}_{dp}[_c][_vtp][_sp]` holds, for some numbers of layers, a batch and a
sequence length, what the first and the last rank allocated: `_ms` after the step (model states),
`_act` after the forward, `_act_peak` at the peak. Two numbers of layers give one layer by
difference; the rest of a run is what its layers do not explain. Formulas are Galvatron's, so the
tables are those that its own processing would have written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
from autopar.documents.times import seqs_of
from autopar.errors import DocumentError
from autopar.model import ModelSpec

__all__ = ["derive_memory"]

_RUN = MemoryDocument.rules[2].regex
_ENTRY = re.compile(
    rf"layernum(?P<layers>{LIST})_bsz(?P<batch>{INT})(?:_seq(?P<seq>{LIST}))?"
    r"_rank(?P<rank>0|[1-9][0-9]*)_(?P<what>ms|act|act_peak)"
)
_REMEDY = "`profile-model --profile-type memory` makes the processed keys"

_Counts = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One rank of one training run, MiB."""

    pp: int
    tp: int
    dp: int
    checkpoint: bool
    vocab_tp: bool
    counts: _Counts
    """Layers of every type."""
    batch: int
    """Global batch."""
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
        """Samples of one tensor group."""
        return self.batch / self.dp


def derive_memory(
    path: Path, document: MemoryDocument, spec: ModelSpec, sequence_parallel: bool
) -> tuple[dict[str, LayerBySeq | OtherBySeq], list[str]]:
    """Return processed tables by documented key, and notes on how they were derived.

    Raises
    ------
    DocumentError: the runs do not suffice; says which command makes the processed keys.
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
        other_there = any(
            (match := _RUN.fullmatch(key)) and ("_sp" in match["flags"]) != sequence_parallel
            for key in document.root
        )
        hint = "the runs of this file are " + ("without" if sequence_parallel else "with")
        raise DocumentError(
            path,
            "the file has no processed key and its raw runs do not suffice to derive it"
            + (f" ({hint} sequence parallelism)" if other_there else ""),
            key=f"layertype_0{suffix}",
            remedy=_REMEDY,
        )
    result: dict[str, LayerBySeq | OtherBySeq] = {
        f"layertype_{kind}{suffix}": LayerBySeq.model_construct(root=table)
        for kind, table in enumerate(layers)
    }
    for part, entries in others.items():
        result[f"other_memory_pp_{part}{suffix}"] = OtherBySeq.model_construct(root=entries)
    notes.append("processed memory tables were derived from the raw runs")
    return result, notes


def _runs(
    document: MemoryDocument, spec: ModelSpec, sequence_parallel: bool
) -> Iterator[tuple[tuple[int, ...], _Run]]:
    """Yield (sequence lengths, run) for rank 0 and the last rank of every run of the variant."""
    for key, raw in document.root.items():
        match = _RUN.fullmatch(key)
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
                        # a run of one rank has a first and no last
                        last=rank == last_rank and rank != 0,
                        states=values["ms"],
                        activation=values["act"],
                        peak=values["act_peak"],
                    ),
                )


class _SeqTable:
    """The tables of one sequence length."""

    def __init__(self, runs: list[_Run], num_types: int, sequence_parallel: bool) -> None:
        self.runs = runs
        self.num_types = num_types
        plain = [r for r in runs if r.pp == 1 and not r.last and not r.checkpoint]
        self.degrees = sorted({r.tp for r in plain if not r.vocab_tp})
        # per type: model states on the rank, and activations per local sample, by degree
        self.states: list[dict[int, float]] = [{} for _ in range(num_types)]
        self.activations: list[dict[int, float]] = [{} for _ in range(num_types)]
        self.checkpoints: list[float | None] = [None] * num_types
        for kind in range(num_types):
            for tp in self.degrees:
                pair = _pair([r for r in plain if r.tp == tp and not r.vocab_tp], kind)
                if pair is not None:
                    low, high = pair
                    # the difference of two runs is layers alone, whatever else the rank holds
                    layers = high.counts[kind] - low.counts[kind]
                    self.states[kind][tp] = (high.states - low.states) / layers
                    more = (high.activation - low.activation) / layers
                    # what the rank holds is of all samples of its tensor group
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
            # with sequence parallelism higher degrees save a part: the largest is the whole input
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
                # a degree that was not run keeps half of the one below: all is split
                for degree in (2, 4, 8):
                    if degree not in table:
                        table[degree] = table[degree // 2] / 2

    def _is_zero3(self) -> bool:
        """Return whether states are sharded over all ranks: then a layer's states on one rank do
        not depend on the tensor degree; without ZeRO-3 they fall with it. One degree: assume so,
        the profiler's default.
        """
        most = max(self.states[0])
        # without ZeRO-3 the rank has 1/t of the whole, with it as much as at degree 1
        return most == 1 or self.states[0][most] > 2 * self.states[0][1] / most

    def _full(self, kind: int, tp: int) -> float:
        """Return model states of one layer on a tensor rank before data sharding, MiB."""
        known = self.states[kind]
        if tp in known:
            # with ZeRO-3 a rank holds 1/world of a layer, and 1/tp before data sharding
            return known[tp] * (self.world / tp if self.zero3 else 1)
        return known[1] * (self.world if self.zero3 else 1) / tp

    def layer(self, kind: int) -> LayerEntry:
        """Return the documented entry of one layer type."""
        table = {str(tp): value for tp, value in sorted(self.activations[kind].items())}
        saved = self.checkpoints[kind]
        if saved is not None and saved > 0:
            table["checkpoint"] = saved
        # states are 16 bytes per parameter, parameter_size 4
        size = max(self._full(kind, tp) * tp for tp in self.states[kind]) / 4
        return LayerEntry(
            parameter_size=size,
            tp_activation_per_bsz_dict=LayerActivations.model_validate(table),
        )

    def other(self, part: str) -> OtherEntry | None:
        """Return the documented entry of the rest at one position, None without runs."""
        states: dict[int, float] = {}
        activations: dict[int, float] = {}
        for run in self._runs_of(part):
            on_rank = self._layers_on_rank(run, last=part == "on_last")
            if any(n and run.tp not in self.activations[k] for k, n in enumerate(on_rank)):
                continue
            layer_states = sum(n * self._full(k, run.tp) for k, n in enumerate(on_rank))
            # ZeRO-3 leaves 1/dp of the layers here; the rest is shared by the vocabulary's ranks
            if self.zero3:
                ranks = self.world / run.pp / run.vtp
                rest = (run.states - layer_states / run.dp) * ranks
            else:
                rest = run.states - layer_states
            layer_acts = run.local_batch * sum(
                n * self.activations[k][run.tp] for k, n in enumerate(on_rank) if n
            )
            # samples of a vocabulary group: the batch over world / pp / vtp data ranks
            samples = run.batch / self.world * run.pp * run.vtp
            act = (max(run.peak, run.activation) - layer_acts) / samples
            for table, value in ((states, rest), (activations, act)):
                clamped = max(0.0, value)
                table[run.vtp] = min(table.get(run.vtp, clamped), clamped)
        if 1 not in states:
            return None
        largest = max(max(table) for table in self.activations)
        for table in (states, activations):  # degrees that were not run: halved, as for layers
            for degree in (2, 4, 8):
                if degree <= largest and degree not in table:
                    table[degree] = table[degree // 2] / 2
        return OtherEntry(
            model_states=Degrees.model_construct(root={str(t): states[t] for t in sorted(states)}),
            activation=Degrees.model_construct(
                root={str(t): activations[t] for t in sorted(activations)}
            ),
        )

    def _runs_of(self, part: str) -> Iterator[_Run]:
        base = min(r.counts for r in self.runs if r.pp == 1)
        for run in self.runs:
            if run.checkpoint:
                continue
            if part == "off":
                if run.pp == 1 and not run.last and run.counts == base:
                    yield run
            # one layer per stage: what an end stage has beside it is the rest
            elif run.pp > 1 and sum(run.counts) == run.pp and run.last == (part == "on_last"):
                yield run

    def _layers_on_rank(self, run: _Run, *, last: bool) -> _Counts:
        """Return the layers of every type on the stage: all of them, or one at an end."""
        if run.pp == 1:
            return run.counts
        present = [kind for kind, n in enumerate(run.counts) if n]
        end = present[-1] if last else present[0]
        return tuple(int(kind == end) for kind in range(self.num_types))


def _pair(runs: list[_Run], kind: int) -> tuple[_Run, _Run] | None:
    """Return the runs with the fewest layers and with the most of one type, else equal."""
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
