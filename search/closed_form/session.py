"""Runner for the searches of one command, in a separate thread, and writer of feasible points.

Points are written as CSV while the search runs. The main thread reports the progress.
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
from autopar.output import Aside, PendingFile
from search.closed_form.answers import Answer, Each, SearchCallbacks
from search.closed_form.native import Halt
from search.closed_form.questions import Columns, Search


class PointFile:
    """A CSV file that appears under its name only when it is complete.

    It is compressed if the name ends in .gz. Leaving the context without an error completes the
    file. After Ctrl-C, or if `keep` is set, the rows written so far are moved to `part`. After any
    other error they are deleted.

    Raises OptionError if the file cannot be written.
    """

    def __init__(self, path: str, option: str, aside: Aside | None = None) -> None:
        self._path = Path(path)
        self.part = Path(f"{path}.part")
        """Path of an incomplete file, after the search was stopped."""
        self._option = option
        self._aside = aside
        self._names: list[str] | None = None
        self.rows = 0
        try:
            # Fail before the search, since an invalid path found afterwards would lose all points.
            self._file = PendingFile(self._path)
        except OSError as error:
            raise self._unwritable(error) from None
        self._binary: Any = self._file.stream
        if self._path.suffix.lower() == ".gz":
            # Without name and time, so that equal points give equal bytes.
            self._binary = gzip.GzipFile("", "wb", 6, self._file.stream, mtime=0)
        self._text: TextIO = io.TextIOWrapper(self._binary, encoding="utf-8", newline="")
        self.keep = False
        self._lock = threading.Lock()

    def write(self, columns: Columns) -> None:
        """Append rows; the first call also writes the header. Safe to call from any thread."""
        names = list(columns)
        # Words and numbers of this file need no quotes.
        rows = list(map(",".join, zip(*columns.values(), strict=True)))
        with self._lock:
            if self._text.closed:  # the search was aborted, but its thread still writes
                return
            if self._names is None:
                self._names, rows = names, [",".join(names), *rows]
                # The header line is not a point.
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
                # Flush the encoder and compressor into the file, which stays open.
                self._text.flush()
                if self._binary is not self._file.stream:
                    self._binary.close()
                self._file.close()
            if kind is None and not self.keep:
                self._file.end(aside=self._aside)
            elif kind is None or issubclass(kind, KeyboardInterrupt):
                self.part = self._file.end(self.part, aside=self._aside)
        except OSError as problem:
            # An error during cleanup must not hide the original one.
            if kind is None:
                raise self._unwritable(problem) from None
        finally:
            self._file.drop()

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(
            f"{self._option} {self._path}: the file cannot be written ({error.strerror or error})",
            remedy="Use another file",
        )


@dataclass(kw_only=True)
class Session:
    """Searches that run one after another, with their results and progress."""

    searches: Sequence[Search]
    paths: Sequence[str] = ()
    """Swept numbers, as paths in the documents."""
    points: PointFile | None = None
    """File of all feasible points; None if not requested."""
    statistics: bool = False
    """True to write all statistics of each point."""
    label: str = ""
    """Label of the running search."""
    done: float = 0.0
    """Number of finished searches, including the fraction of the running one."""
    stopped: bool = False
    """True after `stop`: remaining searches are skipped."""
    halt: Any = field(default_factory=Halt)
    cut: bool = False
    """True if the file of points is incomplete."""
    answers: list[Answer] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    """Event that is set at the end of the thread, also after an error."""
    error: BaseException | None = None
    """Error of the thread; None if there was none."""

    @property
    def share(self) -> float:
        """Finished fraction of all searches, 0 to 1."""
        return self.done / len(self.searches)

    def start(self) -> None:
        """Run all searches in a thread, so that the main thread can handle Ctrl-C.

        Callers wait for `over`, not with Thread.join, which after Ctrl-C treats a running thread as
        ended (Python 3.11).
        """
        threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        """Skip the remaining searches and abort the current one; may be called from any thread."""
        self.stopped = True
        self.halt.ask()

    def finish(self) -> None:
        """Raise the error of the thread, if any, and correct `stopped`; call after `over` is set.

        `stopped` becomes False if all searches had finished when they were stopped.
        """
        if self.error is not None:
            raise self.error
        # The search may have ended by itself when it was stopped.
        self.stopped = self.stopped and (self.cut or self.done < len(self.searches))

    def _work(self) -> None:
        try:
            for search in self.searches:
                if self.stopped:
                    return
                self.label = search.label
                each = None if self.points is None else self._writer(search, self.points)
                watched = SearchCallbacks(
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
        # A search without parts is finished immediately.
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
