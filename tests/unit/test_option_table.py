"""One row per option: what the table says, what the function says, and what typer makes of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from profiler.hardware import command as hardware_cli
from profiler.hardware.parse import build_options as build_hardware
from profiler.model.command import app as model_app
from profiler.model.parse import build_options as build_model
from profiler.option_table import OptionRow, make_app

ROWS = (
    OptionRow("words", "WORD", "Some words."),
    OptionRow("name", "NAME", "A name.", "One"),
    OptionRow("max_size", "N", "A size.", "One"),
    OptionRow("quick", None, "Off by default.", "Two"),
    OptionRow("careful", None, "On by default.", "Two"),
    OptionRow("low", "N", "Renamed.", "Two", name="--profile-min-low"),
)


def build(
    *,
    name: str | None,
    words: Sequence[str] = (),
    max_size: int = 7,
    quick: bool = False,
    careful: bool = True,
    low: float | None = None,
) -> dict[str, Any]:
    """Return what a command line of `ROWS` means, as it arrives."""
    return dict(locals())


def read(*arguments: str) -> dict[str, Any]:
    """Return what the application of `ROWS` hands to `build`."""
    app = make_app(ROWS, build, "Do something.")
    found: dict[str, Any] = app(args=list(arguments), prog_name="some", standalone_mode=False)
    return found


def test_types_and_defaults_are_those_of_the_function() -> None:
    """What is not given is the function's default; what is given has the function's type."""
    assert read() == {
        "name": None,
        "words": [],
        "max_size": 7,
        "quick": False,
        "careful": True,
        "low": None,
    }
    given = ("a", "b", "--name", "c", "--max-size", "9", "--quick", "--no-careful")
    assert read(*given, "--profile-min-low", "2.5") == {
        "name": "c",
        "words": ["a", "b"],
        "max_size": 9,
        "quick": True,
        "careful": False,
        "low": 2.5,
    }


@pytest.mark.parametrize("unknown", ["--low", "--no-quick", "--max_size", "--words"])
def test_other_spellings_are_unknown(unknown: str) -> None:
    """A row has one spelling; only a flag that is on has a `--no-` form."""
    with pytest.raises(Exception, match=f"No such option: {unknown}"):
        read(unknown)


def test_help_has_every_row_under_its_heading() -> None:
    """Headings come in the order of the rows, defaults behind the words."""
    texts = ("Do something.", "WORD", "─ One ─", "--name", "--max-size", "─ Two ─", "--quick")
    shown = CliRunner().invoke(
        make_app(ROWS, build, "Do something."), ["-h"], env={"COLUMNS": "100"}
    )

    assert shown.exit_code == 0
    below = shown.output[shown.output.index("Do something.") :]
    places = [below.index(text) for text in texts]
    assert places == sorted(places)
    assert "[default: 7]" in shown.output
    assert "--profile-min-low" in shown.output
    assert "default: None" not in shown.output


@pytest.mark.parametrize(
    ("app", "function"),
    [(hardware_cli.app, build_hardware), (model_app, build_model)],
    ids=["hardware", "model"],
)
def test_every_parameter_of_a_profiler_has_one_row(
    app: typer.Typer, function: Callable[..., Any]
) -> None:
    """No option can be added to the function and be out of reach of the command, or twice there."""
    callback = app.registered_commands[0].callback
    assert callback is not None

    assert sorted(inspect.signature(callback).parameters) == sorted(
        inspect.signature(function).parameters
    )
