"""Runs the searches of one question in a thread of their own, and writes every feasible point.

Points are CSV, written in parts while the search goes on. How far it is is said by whoever waits.
"""

from __future__ import annotations

import gzip
import io
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from numpy.typing import NDArray

from autopar.errors import OptionError
from autopar.output import Aside, Begun
from search.closed_form.answers import Answer, Each, Watched
from search.closed_form.native import Halt
from search.closed_form.questions import Columns, Search


class PointFile:
    """A CSV file that has its name only once it is whole.

    Compressed where the name ends in .gz. Leaving it without an error ends it; after Ctrl-C (or
    `keep`) what is there stays as `part`, after another error it goes.
    """

    def __init__(self, path: str, option: str, aside: Aside | None = None) -> None:
        self._path = Path(path)
        self.part = Path(f"{path}.part")
        """Where the rows are that were written until a search was stopped."""
        self._option = option
        self._aside = aside
        self._names: list[str] | None = None
        self.rows = 0
        try:
            # found only when the search is over, a bad path would lose all of its points
            self._file = Begun(self._path)
        except OSError as error:
            raise self._unwritable(error) from None
        self._binary: Any = self._file.stream
        if self._path.suffix.lower() == ".gz":
            # without name and time: the same points give the same bytes
            self._binary = gzip.GzipFile("", "wb", 6, self._file.stream, mtime=0)
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
                # what compresses or encodes gives the file all of it, and leaves it open
                self._text.flush()
                if self._binary is not self._file.stream:
                    self._binary.close()
                self._file.close()
            if kind is None and not self.keep:
                self._file.end(aside=self._aside)
            elif kind is None or issubclass(kind, KeyboardInterrupt):
                self.part = self._file.end(self.part, aside=self._aside)
        except OSError as problem:
            # an error on the way out must not hide the one that led there
            if kind is None:
                raise self._unwritable(problem) from None
        finally:
            self._file.drop()

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(
            f"{self._option}: {self._path} cannot be written ({error.strerror or error}); "
            "choose another file"
        )


@dataclass(kw_only=True)
class Session:
    """Searches in their order, what they found, and how far they are."""

    searches: Sequence[Search]
    paths: Sequence[str] = ()
    """Of the axes of a sweep."""
    points: PointFile | None = None
    """Where every feasible point goes."""
    statistics: bool = False
    """All statistics of each point."""
    label: str = ""
    """Of the search that runs."""
    done: float = 0.0
    """Searches, with the share of the one that runs."""
    stopped: bool = False
    """Set by `stop`: what is not searched yet is left out."""
    halt: Any = field(default_factory=Halt)
    cut: bool = False
    """Points that were found are not in their file."""
    answers: list[Answer] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    """Set at the end, which an error is too."""
    error: BaseException | None = None

    @property
    def share(self) -> float:
        """Return the share of all searches that is done."""
        return self.done / len(self.searches)

    def start(self) -> None:
        """Run all searches in a thread, so that Ctrl-C is answered while the core works.

        Not Thread.join but `over` says the end: one that Ctrl-C interrupts takes a running thread
        for ended (Python 3.11).
        """
        threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        """Leave out what is not searched yet, in the middle of a part too; from any thread."""
        self.stopped = True
        self.halt.ask()

    def finish(self) -> None:
        """Raise the error of the thread, and say whether anything was left out; once it is over."""
        if self.error is not None:
            raise self.error
        # it may have ended by itself at the moment when it was stopped
        self.stopped = self.stopped and (self.cut or self.done < len(self.searches))

    def _work(self) -> None:
        try:
            for search in self.searches:
                if self.stopped:
                    return
                self.label = search.label
                each = None if self.points is None else self._writer(search, self.points)
                watched = Watched(
                    each=each,
                    progress=self._progress,
                    stop=lambda: self.stopped,
                    halt=self.halt,
                )
                self.answers.append(search.run(watched))
                if self.answers[-1].complete:
                    self.done = len(self.answers)
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()

    def _progress(self, done: int, parts: int) -> None:
        # a search of no parts is done at once
        self.done = len(self.answers) + done / max(parts, 1)

    def _writer(self, search: Search, points: PointFile) -> Each:
        columns = search.columns(statistics=self.statistics)
        swept = {path: f"{v:.12g}" for path, v in zip(self.paths, search.values, strict=True)}

        def each(executions: NDArray[Any], outcomes: NDArray[Any]) -> None:
            for found in columns(executions, outcomes):
                if self.stopped:  # a part may have a million points
                    self.cut = True
                    return
                length = len(next(iter(found.values())))
                points.write(found | {path: [text] * length for path, text in swept.items()})

        return each
