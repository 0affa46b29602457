"""Run: one training run, planned or measured, in the words that all engines share."""

from __future__ import annotations

from typing import NamedTuple

from autopar.records import Record
from autopar.run.architecture import Model
from autopar.run.runtime import Runtime
from autopar.run.strategy import Strategy


class Word(NamedTuple):
    """An argument or key that no field of a run holds, written back as it was read."""

    key: str
    values: tuple[str, ...]


class Run(Record):
    """A model, how it is split, and what its engine is told."""

    name: str = ""
    model: Model
    strategy: Strategy
    runtime: Runtime
    seq_length: int
    """Tokens of a sequence."""
    gpu: str
    """Name of the device, which decides default kernels."""
    steps: int | None = None
    """Steps of the run; None: thousands. The worst routing of them decides memory."""
    unread: tuple[Word, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context rank of the first layer."""
        return self.strategy.micro_batch * self.seq_length // self.strategy.first.cp
