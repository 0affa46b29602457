"""Options as rows: how each is written and explained; a function says its type and default."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import typer

__all__ = ["DRY_RUN", "FILES", "HOW", "REPETITIONS", "OptionRow", "make_app"]

HOW, FILES = "How to measure", "Files"
"""Headings of the help that both profilers have."""


@dataclass(frozen=True)
class OptionRow:
    """One option of a command: a parameter of the function that reads all of them."""

    parameter: str
    metavar: str | None
    """What stands for the value in the help; None: the option is a flag."""
    help: str
    panel: str | None = None
    """Heading in the help; None: a positional argument."""
    name: str | None = None
    """Spelling; None: two hyphens and the parameter, with a `--no-` form if on by default."""


REPETITIONS = (
    OptionRow("iters", "N", "Most timed repetitions.", HOW),
    OptionRow("warmup", "N", "Most untimed repetitions.", HOW),
    OptionRow(
        "max_seconds",
        "S",
        "After so long no further repetition of the same measurement begins.",
        HOW,
    ),
)
DRY_RUN = OptionRow(
    "dry_run", None, "Print what would be measured and how long it takes; write nothing.", FILES
)


def make_app(rows: Iterable[OptionRow], build: Callable[..., Any], help_text: str) -> typer.Typer:
    """Return the application that hands the value of every row to `build` and returns its result.

    Types and defaults are those of the parameters of `build`; a parameter without a default is
    None unless given, for `build` to say what is missing.
    """
    parameters = inspect.signature(build).parameters
    hints = {name: _listed(hint) for name, hint in get_type_hints(build).items()}

    def command(**values: Any) -> Any:
        return build(**values)

    # typer reads the signature; made of the rows, it is said once.
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [_parameter(row, parameters[row.parameter].default, hints[row.parameter]) for row in rows]
    )
    command.__annotations__ = {row.parameter: hints[row.parameter] for row in rows}
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
    )
    app.command(help=help_text)(command)
    return app


def _parameter(row: OptionRow, default: Any, annotation: Any) -> inspect.Parameter:
    value = None if default is inspect.Parameter.empty else default
    if row.panel is None:
        info = typer.Argument(value, metavar=row.metavar, help=row.help, show_default=False)
    else:
        info = typer.Option(
            value,
            _spelling(row, default=value),
            rich_help_panel=row.panel,
            metavar=row.metavar,
            help=row.help,
        )
    return inspect.Parameter(
        row.parameter, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation
    )


def _listed(hint: Any) -> Any:
    """Return a type as typer takes it, which of all sequences knows lists."""
    return list[get_args(hint)] if get_origin(hint) is Sequence else hint  # type: ignore[misc]


def _spelling(row: OptionRow, *, default: Any) -> str:
    if row.name is not None:
        return row.name
    plain = row.parameter.replace("_", "-")
    return f"--{plain}/--no-{plain}" if default is True else f"--{plain}"
