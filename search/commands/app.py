"""Functions shared by commands: work in a thread with a spinner, output files, process exit."""

from __future__ import annotations

import math
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

from autopar.command import run as commands
from autopar.command.answers import answers_stdout, emit_answer, headed, without_head
from autopar.command.fields import option
from autopar.command.options import Command
from autopar.errors import DocumentError, InputError, OptionError, did_you_mean
from autopar.training.lengths import Batching, Lengths, read_lengths

if TYPE_CHECKING:
    from search.show.pictures.files import Pictures

_Result = TypeVar("_Result")


_STOPS = "Ctrl-C stops; --time-limit returns the best found"


def working(text: str, call: Callable[[], _Result], *, stops: str = _STOPS) -> _Result:
    """Return the result of `call`; shows a spinner with the elapsed time on a terminal's stderr.

    The call runs in a separate thread, so that Ctrl-C is handled while C++ code runs. Its exception
    is raised here.

    text : description of the work, shown at the spinner
    stops : how to end the work, shown next to it
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=copy_context().run, args=(target,), daemon=True)
    thread.start()
    thread.join(0.2)  # most searches end before a spinner is useful
    if thread.is_alive():
        _wait(thread, f"{text} ({stops})")
    if errors:
        raise errors[0]
    return results[0]


def _wait(thread: threading.Thread, text: str) -> None:
    if not sys.stderr.isatty():
        while thread.is_alive():
            thread.join(0.5)  # short waits, so that Ctrl-C is handled
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=5
    ) as bar:
        bar.add_task(text, total=None)
        while thread.is_alive():
            thread.join(0.5)


SCRIPT = "Launch script"
"""Panel of the options of launch scripts."""


@dataclass(frozen=True, kw_only=True)
class ScriptSpec:
    """Arguments and environment of a launch script."""

    args: str | None = option(
        None, help="arguments of the script, as one text", panel=SCRIPT, metavar="TEXT"
    )
    env: tuple[str, ...] = option(
        (), help="environment variable of the script (repeatable)", panel=SCRIPT,
        metavar="NAME=VALUE",
    )  # fmt: skip


TUNING = "Fine-tuning"
"""Panel of the options of samples."""


@dataclass(frozen=True, kw_only=True)
class LengthsSpec:
    """Lengths of the samples, and how micro-batches are made of them."""

    lengths: str | None = option(
        None,
        help="file of sample lengths (LENGTH or LENGTH,COUNT a line), or p50=310,p99=1800,max=4096",
        brief="lengths of samples: file, or p50=310,max=4096",
        panel=TUNING,
        metavar="FILE|PERCENTILES",
    )
    batching: Batching | None = option(
        None,
        help="rows of a micro-batch made of samples of --lengths",
        panel=TUNING,
        shown="that of the launch script, where it is known",
    )
    steps: int | None = option(
        None,
        help="steps of the run, for its OOM probability with --lengths",
        panel=TUNING,
        low=1,
        high=1 << 32,
        shown="one epoch of the samples",
    )


def lengths_of(asked: LengthsSpec) -> Lengths | None:
    """Return the lengths of options, None if they are not given; raises like `read_lengths`."""
    if asked.lengths is not None:
        return read_lengths(asked.lengths)
    for name, value in (("batching", asked.batching), ("steps", asked.steps)):
        if value is not None:
            raise OptionError(f"--{name} needs --lengths", remedy="Add --lengths FILE")
    return None


def with_script(execute: Callable[[dict[str, Any]], int]) -> Callable[[dict[str, Any]], int]:
    """Return a command that reads launch scripts with the values of `ScriptSpec`.

    execute : function of the command, which gets the other options.
    """

    def run(raw: dict[str, Any]) -> int:
        from search.engines.text.shell import scripts_started_with

        arguments, environment = raw.pop("args", None), raw.pop("env", ())
        if arguments is None and not environment:
            return execute(raw)
        given = dict[str, str]()
        for one in (environment,) if isinstance(environment, str) else environment:
            name, equals, value = str(one).partition("=")
            if not equals or not name.isidentifier() or not name.isascii():
                raise OptionError(f"--env {one!r:.60}: expected NAME=VALUE")
            given[name] = value
        words: tuple[str, ...] | None = None
        if arguments is not None:
            try:
                words = tuple(shlex.split(str(arguments)))
            except ValueError as error:
                raise OptionError(f"--args {arguments!r:.60}: {error}") from None
        with scripts_started_with(words, given):
            return execute(raw)

    return run


def emit(path: str, document: Mapping[str, object], exit_code: int = 0, *, command: str) -> None:
    """Write the result of the planner's `--json` to a file, or to stdout for `-`."""
    if path == "-":
        emit_answer(document, exit_code)
        return
    write_results({}, path, document, lambda error: error, exit_code=exit_code, command=command)


def write_results(
    files: Mapping[Path, str],
    json_path: str | None,
    document: Mapping[str, object],
    refusal: Callable[[OSError], Exception],
    *,
    exit_code: int = 0,
    command: str,
    force: bool = False,
) -> None:
    """Write files and the object of `--json`, all or none; nothing is written for `-` and None.

    Other content of existing files is kept as `NAME.bak-N`, which the command reports. Answers that
    differ only in the time of the search count as equal.

    refusal : returns the error for a file of `files` that cannot be written; for `--json` it is an
        OptionError
    exit_code : exit code of the command, part of the object
    force : True to replace files without keeping earlier content
    """
    from autopar.output import write_files

    everything = dict(files)
    again = set()
    if json_path not in (None, "-"):
        from autopar.documents.plan import document_text

        target = Path(str(json_path))
        everything[target] = document_text(headed(document, exit_code))
        if _is_same_answer(target, document):
            again.add(target)
    try:
        write_files(everything, aside=None if force else commands.say_kept(command), replace=again)
    except OSError as error:
        why = error.strerror or str(error)
        if json_path is not None and error.filename == str(Path(json_path)):
            raise OptionError(
                f"--json {json_path}: the file cannot be written ({why})",
                remedy="Use another path, or - for stdout",
            ) from None
        raise refusal(error) from None


def _is_same_answer(path: Path, document: Mapping[str, object]) -> bool:
    """Return True if a file contains the same answer, apart from the search effort."""
    if "search" not in document or not path.is_file():
        return False
    from autopar.documents.json import load_object
    from autopar.documents.plan import document_text

    try:
        found = load_object(path).data
    except InputError:
        return False
    effort = {"search": None}
    return document_text(without_head(found) | effort) == document_text({**document, **effort})


def write_pictures(
    pictures: Pictures,
    draw: Callable[[], Mapping[Path, str]],
    refusal: Callable[[OSError], Exception] = lambda error: error,
    *,
    command: str,
) -> None:
    """Draw and write HTML pages and traces, and report the files.

    Commands call it before they print, because the reader of stdout may close the pipe.

    draw : function that returns file contents by path
    refusal : returns the error for a file that cannot be written
    """
    files = working("drawing", draw) if pictures.any else {}
    write_results(files, None, {}, pictures.refusal(refusal), command=command)
    for path in files:
        commands.say(f"{command}: wrote {path}")


def unwritable(error: OSError) -> DocumentError:
    """Return the error for a file of `--output-config-path` that cannot be written."""
    return DocumentError(
        error.filename,
        f"cannot be written ({error.strerror or error})",
        remedy="Use another --output-config-path",
    )


def files_read(paths: Iterable[Path | str | None]) -> list[Path]:
    """Return the existing files among inputs; outputs must not replace them."""
    return [Path(path) for path in paths if path and Path(path).is_file()]


def write_answer(
    path: str, document: Mapping[str, Any], exit_code: int = 0, *, command: str
) -> None:
    """Write the object of `--json` of a closed-form model to a file, or to stdout for `-`."""
    if path == "-":
        emit_answer(document, exit_code)
    else:
        remedy = "Use another path, or - for stdout"
        write_object(path, headed(document, exit_code), remedy, command=command)


def write_object(
    path: str, document: dict[str, Any], remedy: str, *, command: str, number_rows: bool = False
) -> None:
    """Write an object to a file atomically; `number_rows` as in `autopar.documents.json`.

    Other content of an existing file is kept as `NAME.bak-N`, which the command reports.

    remedy : remedy of the DocumentError if the file cannot be written
    """
    from autopar.documents.json import write_json

    try:
        aside = commands.say_kept(command)
        write_json(Path(path), document, number_rows=number_rows, aside=aside)
    except OSError as error:
        problem = f"the file cannot be written ({error.strerror or error})"
        raise DocumentError(path, problem, remedy=remedy) from None


def refuse_nonsense(system: str, statistics: Mapping[str, Any], total: str) -> None:
    """Raise InputError if the rates of a system are so extreme that a result is not finite.

    system : name of the system
    statistics, total : results of a closed-form model, and the key of the step time in them
    """
    bad = [k for k, v in statistics.items() if isinstance(v, float) and math.isnan(v)]
    if bad or not math.isfinite(statistics[total]):
        raise InputError(
            f"{system}: {(bad or [total])[0]} is not a finite number with the rates of this system",
            remedy="Correct the smallest and the largest rate",
        )


class PlotOptions:
    """Options `--plot` and `--plot-format` of a command that draws its results."""

    plot: str | None
    plot_format: Literal["png", "svg", "both"] | None

    def __post_init__(self) -> None:
        if self.plot_format is not None and self.plot is None:
            raise OptionError("--plot-format needs --plot", remedy="Add --plot")

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of plot files."""
        kind = self.plot_format or "png"
        return ("png", "svg") if kind == "both" else (kind,)

    def refuse_pictures(
        self, names: Iterable[str], files: Mapping[str, str | None], inputs: Iterable[Path]
    ) -> None:
        """Raise OptionError if a plot would replace an input or another output."""
        from autopar.output import refuse_clashes

        for name in names if self.plot is not None else ():
            for kind in self.formats:
                refuse_clashes({**files, "--plot": f"{self.plot}/{name}.{kind}"}, list(inputs))


class Model(NamedTuple):
    """Subcommand of a closed-form model: its options, and the function that runs it."""

    command: Command
    execute: Callable[[dict[str, Any]], int]


def run_model(
    arguments: Sequence[str],
    command: Command,
    models: Mapping[str, Model],
    otherwise: Callable[[dict[str, Any]], int] | None = None,
) -> int:
    """Run the closed-form model named by the first word; return the exit code.

    otherwise : function for a command line of options without a model; None: that is an error
    """
    first, *rest = list(arguments) or ["--help"]
    if first in models:
        return models[first].command.run(rest, models[first].execute)
    # `--name value`, `--name=value` and `name=value` are all options.
    if otherwise is not None and (first.startswith("-") or "=" in first):
        return command.run([first, *rest], otherwise)
    # An option without a model is not unknown: the model is missing.
    asked = [word for word in (first, *rest) if word in ("--help", "-h")]
    if answers_stdout([first, *rest]) and any(row.name == "json" for row in command.rows):
        asked += ["--json", "-"]  # the error is then an object
    else_ = "options or " if otherwise is not None else ""
    return command.run(asked, lambda _: _no_model(first, tuple(models), else_))


def _no_model(word: str, models: tuple[str, ...], else_: str) -> NoReturn:
    """Raise OptionError for a command line that does not begin with a model."""
    known = " or ".join(models)
    if word.startswith("-"):
        raise OptionError("no model is given", remedy=f"Begin with {known}")
    hint = did_you_mean(word, models, form="{}")
    problem = f"expected {else_}the closed-form model {known}, got {word!r:.60}"
    raise OptionError(problem, remedy=hint or None)
