"""Every feasible point of a search as CSV, written in parts while the search goes on."""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np
from numpy.typing import NDArray

from autopar.errors import OptionError
from search.closed_form.calculon import Application, Execution, System
from search.closed_form.calculon.documents import CHOICES
from search.closed_form.calculon.engine import open_model, statistic_names
from search.closed_form.tensor2d import Model, Strategy, System as Tensor2dSystem
from search.closed_form.tensor2d.engine import (
    CANDIDATE,
    STATISTICS,
    Quirks as Tensor2dQuirks,
    native_engine,
)

__all__ = ["PointFile", "calculon_columns", "tensor2d_columns"]

Columns = dict[str, list[str]]
"""Name -> the texts of all rows."""
_CHUNK = 50_000
"""Rows that are formatted at a time."""
_FIGURES = {
    "total_time": "total_time_s",
    "sample_rate": "sample_rate_per_s",
    "proc_mem_tier1_cap_req": "tier1_bytes",
    "proc_mem_tier2_cap_req": "tier2_bytes",
}


class PointFile:
    """A CSV file that has its name only once it is whole; until then `.part` follows it.

    Compressed where the name ends in .gz. Leaving it without an error ends it; after Ctrl-C (or
    `keep`) the part stays, after another error it goes.
    """

    def __init__(self, path: str, option: str) -> None:
        self._path = Path(path)
        self.part = Path(f"{path}.part")
        self._option = option
        self._names: list[str] | None = None
        self.rows = 0
        try:
            # found only when the search is over, this would lose all of its points
            if self._path.is_dir():
                raise IsADirectoryError(21, "it is a directory")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._raw = self.part.open("wb")
        except OSError as error:
            raise self._unwritable(error) from None
        self._binary: Any = self._raw
        if self._path.suffix.lower() == ".gz":
            # without name and time: the same points give the same bytes
            self._binary = gzip.GzipFile("", "wb", 6, self._raw, mtime=0)
        self._text: TextIO = io.TextIOWrapper(self._binary, encoding="utf-8", newline="")
        self.keep = False
        self._lock = threading.Lock()

    def write(self, columns: Columns) -> None:
        """Add rows; the first ones decide the columns."""
        names = list(columns)
        # words and numbers of ours need no quotes
        rows = list(map(",".join, zip(*columns.values(), strict=True)))
        with self._lock:
            if self._text.closed:  # the search was given up, and its thread writes on
                return
            if self._names is None:
                self._names, rows = names, [",".join(names), *rows]
                # the line of names is no point
                self.rows -= 1
            assert names == self._names, (names, self._names)
            try:
                self._text.write("".join(f"{row}\n" for row in rows))
            except OSError as error:
                raise self._unwritable(error) from None
            self.rows += len(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with self._lock:
                self._text.close()
                self._raw.close()
            if kind is None and not self.keep:
                self.part.replace(self._path)
            elif kind is not None and not issubclass(kind, KeyboardInterrupt):
                self.part.unlink(missing_ok=True)
        except OSError as problem:
            # an error on the way out must not hide the one that led there
            if kind is None:
                raise self._unwritable(problem) from None

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(
            f"{self._option}: {self._path} cannot be written ({error.strerror or error}); "
            "choose another file"
        )


def calculon_columns(
    application: Application, system: System, *, compat: bool, statistics: bool, threads: int
) -> Callable[[NDArray[Any], NDArray[Any]], Iterator[Columns]]:
    """Return what turns points of `calculon.explore` into columns, piece by piece.

    Columns are the fields of an execution, with `compat` the published ones, and four statistics,
    or all of them.
    """
    names = [name for name in Execution.model_fields if not (compat and name == "structure_type")]
    model = open_model(application, system, compat)
    known = statistic_names(application, compat)

    def columns(executions: NDArray[Any], outcomes: NDArray[Any]) -> Iterator[Columns]:
        for x, o in _pieces(executions, outcomes):
            found: Columns = {name: _field(name, x[name]) for name in names}
            if statistics:
                _, table = model.evaluate_many(np.ascontiguousarray(x), threads, True)
                yield found | {name: _numbers(table[:, n]) for n, name in enumerate(known)}
            else:
                yield found | {name: _numbers(o[field]) for name, field in _FIGURES.items()}

    return columns


def tensor2d_columns(
    strategy: Strategy,
    model: Model,
    system: Tensor2dSystem,
    *,
    num_gpus: int,
    batch: int,
    compat: bool,
    statistics: bool,
    threads: int,
) -> Callable[[NDArray[Any], NDArray[Any]], Iterator[Columns]]:
    """Return the same for points of `tensor2d.survey`; `1d` has its degree under `tp1`."""
    quirks = Tensor2dQuirks.of(compat)
    engine = native_engine(strategy, model, num_gpus, batch, system, quirks)

    def columns(candidates: NDArray[Any], outcomes: NDArray[Any]) -> Iterator[Columns]:
        for x, o in _pieces(candidates, outcomes):
            found: Columns = {
                "strategy": [strategy] * len(x),
                "n_gpus": [str(num_gpus)] * len(x),
                "global_batch_size": [str(batch)] * len(x),
                **{name: list(map(str, x[name].tolist())) for name in CANDIDATE.names or ()},
                "throughput": _numbers(batch / o["time_s"]),
            }
            if statistics:
                _, table = engine.evaluate_many(np.ascontiguousarray(x), threads, True)
                yield found | {name: _numbers(table[:, n]) for n, name in enumerate(STATISTICS)}
            else:
                yield found | {"t": _numbers(o["time_s"]), "mem": _numbers(o["memory_gb"])}

    return columns


def _pieces(
    executions: NDArray[Any], outcomes: NDArray[Any]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    for start in range(0, len(executions), _CHUNK):
        yield executions[start : start + _CHUNK], outcomes[start : start + _CHUNK]


def _field(name: str, values: NDArray[Any]) -> list[str]:
    if name in CHOICES:
        return _looked_up(CHOICES[name], values)
    if Execution.model_fields[name].annotation is int:
        return list(map(str, values.tolist()))
    return _looked_up(("False", "True"), values)


def _looked_up(words: Sequence[str], codes: NDArray[Any]) -> list[str]:
    found: list[str] = np.array(words, dtype=object)[codes.astype(np.intp)].tolist()
    return found


def _numbers(values: NDArray[Any]) -> list[str]:
    # the shortest text that reads back as the same number
    return [repr(value) for value in values.tolist()]
