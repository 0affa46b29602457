"""What both models of `autopar-explore` share: options, searches with progress, and answers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from autopar.command import run as commands
from autopar.command.options import option
from autopar.command.run import say
from autopar.errors import InfeasibleError, OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from search.closed_form.points import PointFile
    from search.closed_form.questions import Answer, Axis, Each

__all__ = ["AnswerSpec", "AskedSpec", "Job", "Question", "execute", "numbers"]

_COMMAND = "autopar-explore"
_ASK, _OUT = "Question", "Output"
_QUIET_S, _EVERY_S = 2.0, 5.0
"""When the first line of progress appears, and how often, where stderr is no terminal."""
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class AskedSpec:
    """What is asked of a space."""

    top: int | None = option(
        None, help="executions to report", panel=_ASK, shown="10", low=1, high=100_000
    )
    """None: 10, or 1 for each setting of a sweep."""
    objective: Literal["rate", "time", "memory"] = option(
        "rate", help="samples per second, seconds of a step, or memory", panel=_ASK
    )
    frontier: bool = option(False, help="also what has less memory for more time", panel=_ASK)
    sweep: tuple[str, ...] = option(
        (),
        help="search again for other numbers of a document: PATH=RANGE with the range a:b:xF "
        "(times F), a:b:STEP or a,b,c, such as system.networks.0.bandwidth=300:900:x1.5; repeats",
        panel=_ASK,
        metavar="PATH=RANGE",
    )
    compat: bool = option(
        False, help="the published space and figures, known defects included", panel=_ASK
    )
    threads: int = option(1, help="threads of the search", panel=_ASK, low=1, high=1024)


@dataclass(frozen=True, kw_only=True)
class AnswerSpec:
    """Where answers go beside the tables."""

    all: str | None = option(
        None, help="CSV file for every execution that can run, .gz compresses it", panel=_OUT
    )
    all_statistics: bool = option(False, help="all statistics of each in that file", panel=_OUT)
    json: str | None = option(
        None, help="file for the best (.gz compresses), - for stdout, no tables", panel=_OUT
    )
    plot: str | None = option(None, help="folder for pictures (extra: plot)", panel=_OUT)
    plot_format: Literal["png", "svg", "both"] | None = option(
        None, help="of these pictures", panel=_OUT, shown="png"
    )

    def __post_init__(self) -> None:
        for given, name, other, path in (
            (self.all_statistics, "all-statistics", "all", self.all),
            (self.plot_format, "plot-format", "plot", self.plot),
        ):
            if given and path is None:
                raise OptionError(f"--{name} says how --{other} is written; give --{other} too")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One search: what it is called while it runs, and how it and its points are made."""

    label: str
    run: Callable[[Each | None, Callable[[int, int], None], Callable[[], bool]], Answer]
    columns: Callable[
        [bool],
        Callable[[NDArray[np.void], NDArray[np.void]], Iterator[dict[str, list[str]]]],
    ]
    """Takes whether all statistics are asked for; the result makes columns of points."""
    values: tuple[float, ...] = ()
    """Of the axes of a sweep."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that one command asks, in the order of its answers."""

    name: str
    """Of the model."""
    system: str
    unit: str
    """What is counted: 'processor' or 'GPU'."""
    legend: str
    axes: tuple[Axis, ...]
    jobs: tuple[Job, ...]
    notes: Mapping[str, Sequence[str]]
    """Heading -> sentences on what was assumed."""


@dataclass
class _Watch:
    """What a search says of itself to whoever waits for it."""

    num_jobs: int
    label: str = ""
    done: float = 0.0
    """Jobs, with the share of the one that runs."""
    stopped: bool = False
    cut: bool = False
    """Points that were found are not in their file."""
    answers: list[Answer] = field(default_factory=list)
    error: BaseException | None = None

    def progress(self, done: int, parts: int) -> None:
        # a search of no parts is done at once
        self.done = len(self.answers) + done / max(parts, 1)


def numbers(values: Sequence[int]) -> tuple[int, ...]:
    """Return the different numbers of a list option, in ascending order."""
    return tuple(sorted(set(values)))


def execute(question: Question, files: AnswerSpec, *, frontier: bool = False) -> int:
    """Search, show and write everything that is asked for, and return the exit code."""
    from search.report.closed_form import none_sentence

    if files.plot is not None:
        from autopar.command.show import require_matplotlib

        require_matplotlib("--plot")
    watch = _Watch(num_jobs=len(question.jobs))
    with _point_file(files) as points:
        _search(question, watch, points, statistics=files.all_statistics)
        found = any(answer.best for answer in watch.answers)
        if not found and not watch.stopped:
            raise InfeasibleError(
                none_sentence(watch.answers, question.name, question.system, question.unit)
            )
        if points is not None:
            # a search that was stopped leaves the part that was written
            points.keep = watch.stopped
    if watch.stopped:
        _say_stopped(watch, points)
    elif points is not None:
        say(f"{_COMMAND}: wrote {files.all}, rows: {points.rows:,}")
    if not found:
        return commands.INTERRUPTED
    try:
        # before the tables, whose reader may leave in the middle
        _write(question, watch.answers, files, frontier=frontier)
    finally:
        if files.json != "-":
            _show(question, watch.answers)
    return commands.INTERRUPTED if watch.stopped else 0


def _write(
    question: Question, answers: Sequence[Answer], files: AnswerSpec, *, frontier: bool
) -> None:
    paths = [axis.path for axis in question.axes]
    if files.json is not None:
        from search.commands.app import write_answer
        from search.report.closed_form import json_document

        alone = len(question.jobs) == 1 and not (paths or frontier)
        write_answer(files.json, json_document(answers, paths, alone=alone, frontier=frontier))
    if files.plot is not None:
        from search.closed_form.pictures import save_pictures

        kind = files.plot_format or "png"
        for path in save_pictures(
            files.plot,
            answers,
            title=f"{question.name} on {question.system}",
            unit=question.unit,
            paths=paths,
            formats=("png", "svg") if kind == "both" else (kind,),
        ):
            say(f"{_COMMAND}: wrote {path}")


@contextlib.contextmanager
def _point_file(files: AnswerSpec) -> Iterator[PointFile | None]:
    if files.all is None:
        yield None
        return
    from search.closed_form.points import PointFile

    with PointFile(files.all, "--all") as points:
        yield points


def _say_stopped(watch: _Watch, points: PointFile | None) -> None:
    share = watch.done / watch.num_jobs * 100
    say(f"{_COMMAND}: stopped after {share:.0f} % of the search; the best until then follows")
    if points is not None:
        say(f"{_COMMAND}: what was written until then is in {points.part}, rows: {points.rows:,}")


def _search(
    question: Question, watch: _Watch, points: PointFile | None, *, statistics: bool
) -> None:
    """Run all jobs in a thread of their own, so that Ctrl-C is answered while the core works."""

    def work() -> None:
        try:
            for job in question.jobs:
                if watch.stopped:
                    return
                watch.label = job.label
                each = None if points is None else _writer(job, question, points, watch, statistics)
                watch.answers.append(job.run(each, watch.progress, lambda: watch.stopped))
                if watch.answers[-1].complete:
                    watch.done = len(watch.answers)
        except BaseException as error:
            watch.error = error
        finally:
            over.set()

    # not Thread.join: one that Ctrl-C interrupts takes a running thread for ended (Python 3.11)
    over = threading.Event()
    try:
        threading.Thread(target=work, daemon=True).start()
        _wait(over, watch)
    except KeyboardInterrupt:
        watch.stopped = True
        say(f"{_COMMAND}: stopping (Ctrl-C again gives up at once)")
        while not over.wait(_POLL_S):
            pass
    except SystemExit:
        # told to end: the core may not outlive the interpreter
        watch.stopped = True
        over.wait()
        raise
    if watch.error is not None:
        raise watch.error
    # it may have ended by itself at the same moment
    watch.stopped = watch.stopped and (watch.cut or watch.done < watch.num_jobs)


def _writer(
    job: Job, question: Question, points: PointFile, watch: _Watch, statistics: bool
) -> Each:
    columns = job.columns(statistics)
    swept = {axis.path: f"{v:.12g}" for axis, v in zip(question.axes, job.values, strict=True)}

    def each(executions: NDArray[np.void], outcomes: NDArray[np.void]) -> None:
        for found in columns(executions, outcomes):
            if watch.stopped:  # a part may have a million points
                watch.cut = True
                return
            length = len(next(iter(found.values())))
            points.write(found | {path: [text] * length for path, text in swept.items()})

    return each


def _wait(over: threading.Event, watch: _Watch) -> None:
    """Wait for the end, and say how far the search is."""
    start_s = time.monotonic()
    if over.wait(0.3):  # most searches are over before anything is worth showing
        return
    if sys.stderr.isatty():
        _wait_with_bar(over, watch)
        return
    next_s = start_s + _QUIET_S
    while not over.wait(_POLL_S):
        if time.monotonic() >= next_s:
            next_s += _EVERY_S
            say(f"{_COMMAND}: {watch.label}: {watch.done / watch.num_jobs * 100:.0f} % searched")


def _wait_with_bar(over: threading.Event, watch: _Watch) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("Ctrl-C shows the best until then", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(watch.label, total=watch.num_jobs)
        while not over.wait(_POLL_S):
            bar.update(task, completed=watch.done, description=watch.label)


def _show(question: Question, answers: Sequence[Answer]) -> None:
    from autopar.command.show import make_console, print_plain
    from search.report import closed_form as report

    console = make_console(sys.stdout)
    console.width = min(console.width, report.WIDTH)
    print_plain(console, f"{question.name} on {question.system}", style="bold")
    if question.axes:
        paths = [axis.path for axis in question.axes]
        groups: dict[tuple[int, str | None], list[Answer]] = {}
        for answer in answers:
            groups.setdefault((answer.processors, answer.strategy), []).append(answer)
        for group in groups.values():
            report.show_sweep(console, group, paths, unit=question.unit)
    else:
        for place, answer in enumerate(answers):
            report.show_answer(
                console,
                answer,
                unit=question.unit,
                legend="" if place else question.legend,  # once is enough
                alone=len(answers) == 1,
            )
            report.show_frontier(console, answer)
        report.show_scaling(console, answers, unit=question.unit)
    report.show_assumed(console, question.notes)
