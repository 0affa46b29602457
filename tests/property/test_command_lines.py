"""Whatever is on a command line, it is read as typer reads it: own reading is faster, not other."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import MISSING
from functools import cache
from typing import Any

import pytest
import typer
import typer.main
from hypothesis import given, strategies as st

from autopar.command.aliases import FAMILIES
from autopar.command.fields import Row, given_options
from autopar.command.options import Command, _taken, normalise
from autopar.errors import OptionError
from tests.unit.command.test_options import COMMANDS, Small, command_of

EVERY = (*COMMANDS, "small")
VALUES = st.sampled_from(("1", "0", "-1", "-", "--", "a", "b c", "", "x=1", "--name", "none", "é"))


@cache
def command(name: str) -> Command:
    """Return one of the commands, or one with an option of every kind."""
    if name == "small":
        return Command(name="small", intro="", fills=(Small,))
    return command_of(name)


@cache
def reader(name: str) -> Any:
    """Return what typer makes of the options of a command."""
    types_: dict[str, Any] = {"flag": bool, "switch": bool | None, "texts": list[str] | None}
    parameters = []
    for row in command(name).rows:
        info: Any
        if row.positional:
            info = typer.Argument(... if row.default is MISSING else None)
        else:
            info = typer.Option(
                False if row.kind == "flag" else None,
                f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}",
            )
        hint = types_.get(row.kind, str | None)
        parameters.append(
            inspect.Parameter(
                row.key, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=hint
            )
        )

    def callback(**values: Any) -> dict[str, Any]:
        return values

    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=name)(callback)
    return typer.main.get_command(app)


def of_typer(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what typer reads of normalised arguments."""
    rows = command(name).rows
    found = reader(name).main(args=list(arguments), prog_name=name, standalone_mode=False)
    return given_options(rows, {row.name: found[row.key] for row in rows})


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """Import every command before anything is drawn: their modules may draw numbers themselves."""
    for name in EVERY:
        command(name)


def words(row: Row) -> st.SearchStrategy[list[str]]:
    """Return how an option may be written."""
    if row.positional:
        return VALUES.map(lambda value: [value])
    if row.flaglike:
        forms = [[f"--{row.name}"], [f"--{row.name}", "0"], [f"--{row.name}=1"]]
        return st.sampled_from([*forms, *([[f"--no-{row.name}"]] if row.kind == "switch" else [])])
    name = row.name.replace("-", "_")
    return st.one_of(
        VALUES.map(lambda value: [f"--{row.name}", value]),
        VALUES.map(lambda value: [f"--{name}={value}"]),
    )


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Return a command and the words of a command line of it."""
    name = draw(st.sampled_from(EVERY))
    some = st.sampled_from(command(name).rows).flatmap(words)
    parts = draw(st.lists(st.one_of(some, VALUES.map(lambda value: [value])), max_size=8))
    return name, [word for part in parts for word in part]


@given(lines())
def test_command_lines_are_read_as_typer_reads_them(line: tuple[str, list[str]]) -> None:
    """Where words have their places both say the same; where not, ours says why."""
    name, arguments = line
    rows = command(name).rows
    try:
        normal, _ = normalise(arguments, rows, FAMILIES[command(name).family])
        found = _taken(rows, normal)
    except OptionError:
        return
    ours = given_options(rows, {row.name: found.get(row.name) for row in rows})
    assert ours == of_typer(name, normal)
    assert list(ours) == [row.name for row in rows if row.name in ours]
