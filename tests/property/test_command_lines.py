"""For any command line, skipping typer's conversion of texts changes no value."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import typer
from hypothesis import given, strategies as st
from typer.core import TyperCommand

from autopar.command.aliases import alias_tables
from autopar.command.dialect import normalise
from autopar.command.fields import Row
from autopar.command.options import Command
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


def of_typer(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values of normalised arguments after typer's own parsing and conversion."""
    typed, rows = command(name).typed, command(name).rows
    context = typer.Context(typed, info_name=name)
    TyperCommand.parse_args(typed, context, list(arguments))
    values = {row.name: context.params[row.key] for row in rows}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value not in (None, [], ())
    }


@pytest.fixture(scope="module", autouse=True)
def known() -> None:
    """Import every command before any draw, because their modules may draw numbers themselves."""
    for name in EVERY:
        command(name)


def words(row: Row) -> st.SearchStrategy[list[str]]:
    """Return the spellings of an option."""
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
    """Return a command and the words of one of its command lines."""
    name = draw(st.sampled_from(EVERY))
    some = st.sampled_from(command(name).rows).flatmap(words)
    parts = draw(st.lists(st.one_of(some, VALUES.map(lambda value: [value])), max_size=8))
    return name, [word for part in parts for word in part]


@given(lines())
def test_command_lines_are_read_as_typer_converts_them(line: tuple[str, list[str]]) -> None:
    """Texts, lists and flags are the same, in the order of the options."""
    name, arguments = line
    rows = command(name).rows
    try:
        ours = command(name).read(arguments, lambda _: None)
    except OptionError:
        return
    normal, _ = normalise(arguments, rows, alias_tables().families[command(name).family])
    assert ours is not None
    assert ours == of_typer(name, normal)
    assert list(ours) == [row.name for row in rows if row.name in ours]
