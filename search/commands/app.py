"""What the commands share: typer application from the option table, and one-sentence errors."""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

from autopar.command import run as commands
from search.cli_help import help_text
from search.cli_options import OptionRow
from search.cli_parse import normalise

if TYPE_CHECKING:
    import typer

__all__ = ["guarded", "leave", "make_app", "talk", "working"]

_Result = TypeVar("_Result")

_TYPES: dict[str, Any] = {
    # Numbers are converted by `cli_parse.convert`, whose errors are one sentence.
    "flag": bool,
    "switch": Optional[bool],  # noqa: UP045  (typer reads the runtime type)
    "texts": Optional[list[str]],  # noqa: UP045
}


def talk(text: str) -> None:
    """Write one line to stderr, where everything that is not a result goes."""
    sys.stderr.write(text.rstrip("\n") + "\n")


def working(text: str, call: Callable[[], _Result]) -> _Result:
    """Return what `call` returns; shows a spinner with the elapsed time on a terminal's stderr.

    The call runs in a thread of its own, so that Ctrl-C is answered while the core works.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(0.2)  # most searches are over before anything is worth showing
    if thread.is_alive():
        _wait(thread, text)
    if errors:
        raise errors[0]
    return results[0]


def _wait(thread: threading.Thread, text: str) -> None:
    if not sys.stderr.isatty():
        while thread.is_alive():
            thread.join(0.5)  # in pieces, so that Ctrl-C is seen
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=5
    ) as bar:
        bar.add_task(f"{text} (Ctrl-C stops; --time-limit returns the best found)", total=None)
        while thread.is_alive():
            thread.join(0.5)


def leave(code: int) -> None:
    """End the process with an exit code, without waiting for a search that was interrupted."""
    if code != commands.INTERRUPTED:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_app(
    command: str,
    rows: Sequence[OptionRow],
    run: Callable[[dict[str, Any]], int],
    arguments: Iterable[tuple[str, str]] = (),
) -> typer.Typer:
    """Return the typer application of one command; `guarded` prints its help.

    Parameters
    ----------
    run : called with option name -> raw value (arguments under their own name); returns the
        exit code.
    arguments : (name, help) of required positional arguments.
    """
    import typer

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    names = {row.key: row.name for row in rows}

    def callback(**values: Any) -> int:
        return run({names.get(key, key): value for key, value in values.items()})

    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Argument(..., help=text, metavar=name.upper(), show_default=False),
            annotation=str,
        )
        for name, text in arguments
    ]
    parameters += [_parameter(row) for row in rows]
    # typer reads the signature; building it from the table keeps one row per option.
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command(name=command)(callback)
    return app


def _parameter(row: OptionRow) -> inspect.Parameter:
    import typer

    spelling = f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}"
    default: Any = False if row.kind == "flag" else None
    return inspect.Parameter(
        row.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(default, spelling, help=row.help, show_default=False),
        annotation=_TYPES.get(row.kind, Optional[str]),  # noqa: UP045
    )


def guarded(
    command: str,
    app: Callable[[], typer.Typer],
    arguments: Sequence[str],
    rows: Sequence[OptionRow],
    intro: str,
    usage: str = "[OPTIONS]",
) -> int:
    """Run a command and return its exit code; whatever goes wrong is one sentence on stderr.

    Parameters
    ----------
    intro, usage : what `--help` says before the options.
    """

    def say(text: str) -> None:
        talk(f"{command}: {text}")

    def call() -> object:
        if {"--help", "-h"} & set(arguments):
            sys.stdout.write(help_text(f"{command} {usage}", intro, rows))
            return 0
        normal, notices = normalise(arguments, rows)
        for notice in notices:
            say(notice)
        return app()(args=normal, prog_name=command, standalone_mode=False)

    return commands.guarded(call, say)
