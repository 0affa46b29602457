"""What the commands share: typer application from the option table, and one-sentence errors."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional

import typer

from autopar.errors import AutoparError
from search.cli_options import OptionRow
from search.cli_parse import normalise

__all__ = ["DEBUG_VARIABLE", "guarded", "make_app", "progress", "talk"]

DEBUG_VARIABLE = "AUTOPAR_DEBUG"

_TYPES: dict[str, Any] = {
    # Numbers are converted by `cli_parse.convert`, whose errors are one sentence.
    "flag": bool,
    "switch": Optional[bool],  # noqa: UP045  (typer reads the runtime type)
    "texts": Optional[list[str]],  # noqa: UP045
}
_METAVARS = {"int": "INT", "float": "NUMBER", "ints": "N[,N]", "text": "TEXT", "texts": "RULE"}


def talk(text: str) -> None:
    """Write one line to stderr, where everything that is not a result goes."""
    sys.stderr.write(text.rstrip("\n") + "\n")


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a spinner on stderr while something takes long, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def make_app(
    command: str,
    rows: Sequence[OptionRow],
    run: Callable[[dict[str, Any]], int],
    help_text: str,
    arguments: Iterable[tuple[str, str]] = (),
) -> typer.Typer:
    """Return the typer application of one command.

    Parameters
    ----------
    run : called with option name -> raw value (arguments under their own name); returns the
        exit code.
    arguments : (name, help) of required positional arguments.
    """
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    )
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
    callback.__doc__ = help_text
    app.command(name=command)(callback)
    return app


def _parameter(row: OptionRow) -> inspect.Parameter:
    spelling = f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}"
    metavar = "|".join(row.choices) if row.kind == "choice" else _METAVARS.get(row.kind)
    default: Any = False if row.kind == "flag" else None
    return inspect.Parameter(
        row.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            default,
            spelling,
            help=row.help.replace("[", "\\["),
            rich_help_panel=row.panel,
            metavar=metavar,
            show_default=False,
        ),
        annotation=_TYPES.get(row.kind, Optional[str]),  # noqa: UP045
    )


def guarded(
    command: str,
    app: Callable[[], typer.Typer],
    arguments: Sequence[str],
    rows: Sequence[OptionRow],
) -> int:
    """Run a command and return its exit code; whatever goes wrong is one sentence on stderr."""
    try:
        normal, notices = normalise(arguments, rows)
        for notice in notices:
            talk(f"{command}: {notice}")
        code = app()(args=normal, prog_name=command, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except AutoparError as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        talk(f"{command}: {_sentence(str(error))}")
        return error.exit_code
    except BrokenPipeError:
        # The reader left (`| head`); the interpreter must not complain while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        talk(f"{command}: interrupted")
        return 130
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if callable(usage):  # typer's own usage errors, whose classes it does not export
            talk(f"{command}: {_sentence(usage())}")
            return 2
        if os.environ.get(DEBUG_VARIABLE):
            raise
        text = _sentence(f"{type(error).__name__}: {error}")
        talk(
            f"{command}: internal error, please report it: {text} "
            f"(set {DEBUG_VARIABLE}=1 for the traceback)"
        )
        return 1


def _sentence(text: str) -> str:
    return " ".join(text.split())
