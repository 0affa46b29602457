"""Reads a published memory file: its raw figures, and the derivation of its tables from them.

A raw figure belongs to a run (pipeline, tensor and vocabulary degree) with 8 samples on 8 GPUs, one
layer a stage. `ms` is allocated after a backward, `act` is added by a forward, `act_peak` is the
peak of a step less `ms`. The table of a layer is the second layer's share of a figure. The tables
of the rest are a figure less its layers, times the ranks that share it: the least of all runs with
that vocabulary degree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autopar.documents.json import load_object
from autopar.units import MIB

__all__ = ["BLOCK", "DEVICES", "WORKSPACES", "Published", "Row", "Run"]

DEVICES = 8
BLOCK = 512
"""Granularity of torch's allocator on a GPU, in bytes."""
WORKSPACES = 2 * 8.125 * MIB
"""cuBLAS, before Hopper: two of 4 MiB and eight of 16 KiB, for each of two threads."""
Figure = Literal["ms", "act", "act_peak"]
_ROUNDING = 1e-6
_CLOSED = 0.003
"""Share of the published figure: a difference is explained if its terms leave less."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run behind the tables: 8 samples on 8 GPUs, one micro-batch."""

    pp: int
    tp: int
    vtp: int

    @property
    def key(self) -> str:
        """Name in the file."""
        split = "_vtp" if self.vtp > 1 else ""
        return f"{self.pp}_{self.tp}_{self.dp}{split}_sp"

    @property
    def dp(self) -> int:
        """Data-parallel ranks of a layer."""
        return DEVICES // (self.pp * self.tp)

    @property
    def layer_samples(self) -> int:
        """Samples of a tensor group."""
        return self.pp * self.tp

    @property
    def vocab_samples(self) -> int:
        """Samples of a vocabulary group."""
        return self.pp * self.vtp


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published memory file at one of its lengths; figures in bytes."""

    data: Mapping[str, Any]
    length: int

    @staticmethod
    def read(path: Path, length: int) -> Published:
        """Return a file's figures at a length that its keys name; raises InputError."""
        return Published(data=load_object(path).data, length=length)

    @property
    def layer(self) -> Mapping[str, Any]:
        """The table of a layer, in MiB."""
        table: Mapping[str, Any] = self.data["layertype_0_sp"][str(self.length)]
        return table

    def other(self, where: str) -> Mapping[str, Mapping[str, float]]:
        """Return the tables around the layers (off, on_first, on_last), in MiB."""
        table: Mapping[str, Any] = self.data[f"other_memory_pp_{where}_sp"][str(self.length)]
        return table

    def figure(self, run: Run, what: Figure, layers: int, *, rank: int = 0) -> float:
        """Return one raw figure."""
        key = f"layernum[{layers}]_bsz{DEVICES}_seq{self.length}_rank{rank}_{what}"
        return float(self.data[run.key][key]) * MIB

    def per_layer(self, run: Run, what: Figure) -> float:
        """Return the increase of a figure by the second layer, in a run without pipeline."""
        return self.figure(run, what, 2) - self.figure(run, what, 1)

    def slack(self, run: Run, what: Figure) -> float:
        """Return the excess of a layer's share over the least of both vocabulary degrees."""
        other = Run(pp=run.pp, tp=run.tp, vtp=run.tp if run.vtp == 1 else 1)
        return max(0.0, self.per_layer(run, what) - self.per_layer(other, what))

    def taken(self, where: str, kind: str, degree: int) -> Run | None:
        """Return the run that gave a table's figure at a vocabulary degree; None: no such run."""
        found = [(value, run) for value, run in self._candidates(where, kind) if run.vtp == degree]
        return min(found, key=lambda pair: pair[0])[1] if found else None

    def check(self) -> None:
        """Recompute the tables around the layers; raises AssertionError if they differ."""
        for where in ("off", "on_first", "on_last"):
            for kind in ("model_states", "activation"):
                table = self.other(where)[kind]
                for degree in (1, 2, 4, 8):
                    values = [v for v, run in self._candidates(where, kind) if run.vtp == degree]
                    expected = min(values) / MIB if values else table[str(degree // 2)] / 2
                    assert abs(table[str(degree)] - expected) < _ROUNDING, (where, kind, degree)

    def _candidates(self, where: str, kind: str) -> Iterator[tuple[float, Run]]:
        """Yield the value of a table's figure in every run, per sample or as if on one rank."""
        for pp in (1,) if where == "off" else (2, 4):
            for tp in (t for t in (1, 2, 4, 8) if pp * t <= DEVICES):
                for vtp in sorted({1, tp}):
                    run = Run(pp=pp, tp=tp, vtp=vtp)
                    if run.key in self.data:
                        yield self._candidate(run, where, kind), run

    def _candidate(self, run: Run, where: str, kind: str) -> float:
        rank = DEVICES - 1 if where == "on_last" else 0
        plain = Run(pp=1, tp=run.tp, vtp=1)
        if kind == "model_states":
            found = self.figure(run, "ms", run.pp, rank=rank)
            share = found - self.per_layer(plain, "ms") * run.pp
            return share * DEVICES / run.pp / run.vtp
        peak = max(
            self.figure(run, "act_peak", run.pp, rank=rank),
            self.figure(run, "act", run.pp, rank=rank),
        )
        return (peak - self.per_layer(plain, "act") * run.pp) / run.vocab_samples


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity, published and counted, in bytes; the terms explain the difference."""

    quantity: str
    published_bytes: float
    ours_bytes: float
    terms: Mapping[str, float] = field(default_factory=dict)
    conjecture: bool = False
    """True if a term is plausible but has no other evidence."""

    @property
    def rest_bytes(self) -> float:
        """Difference that the terms do not explain, bytes."""
        return self.published_bytes - self.ours_bytes - sum(self.terms.values())

    @property
    def verdict(self) -> str:
        """State of the difference: confirmed, a conjecture, or open."""
        left = abs(self.rest_bytes) / self.published_bytes
        if self.conjecture:
            return f"conjecture, leaves {left:.1%}"
        if abs(self.rest_bytes) < 1:
            return "to the byte"
        return f"to {max(left, 1e-5):.3%}" if left < _CLOSED else f"open, leaves {left:.1%}"
