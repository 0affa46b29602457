"""docs/concepts/closed-form.md says of the closed-form models what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from search.closed_form import calculon, tensor2d
from search.closed_form.files import calculon_system
from search.closed_form.validation import errors_of, validate


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """Return the part of the page on the models; the spaces and tuners follow it."""
    text = (root / "docs" / "concepts" / "closed-form.md").read_text(encoding="utf-8")
    return text[: text.index("\n## Searching the space of a closed form\n")]


@pytest.mark.parametrize(
    ("quirks", "letter", "last"), [(calculon.Quirks, "B", 19), (tensor2d.Quirks, "Q", 14)]
)
def test_every_switch_has_its_row(page: str, quirks: type[Any], letter: str, last: int) -> None:
    """Under its number and name; numbers without a switch say so."""
    rows = dict(re.findall(rf"^\| ({letter}\d+) \| (\S+) \|", page, re.MULTILINE))
    switches = {text.split(":")[0]: f"`{name}`" for name, text in quirks.meanings.items()}

    assert list(rows) == [f"{letter}{number}" for number in range(1, last + 1)]
    assert {number: name for number, name in rows.items() if name != "none"} == switches


@pytest.mark.parametrize(
    "document",
    [calculon.Application, calculon.Execution, calculon.System, tensor2d.Model],
    ids=["application", "execution", "system", "model"],
)
def test_every_field_is_explained(page: str, document: type[Any]) -> None:
    """In the column of keys of a table."""
    explained = set(re.findall(r"`\.?(\w+)`", page))

    assert set(document.__struct_fields__) - explained == set()


def test_accuracy_is_that_of_today(page: str) -> None:
    """The rows of the shipped system are what `--validate` prints."""
    system = calculon_system("a100-80gb")
    for name, compat in (("default", False), ("`--compat`", True)):
        found = errors_of(validate(system, compat=compat))
        (row,) = re.findall(rf"^\| {name}, shipped A100 \| (.*) \|$", page, re.MULTILINE)
        time, states, activations = row.split(" | ")
        worst = found["step time"].worst * 100
        assert time == f"{found['step time'].mean * 100:.1f} % (worst {worst:+.1f} %)"
        assert float(states.split()[0]) == pytest.approx(found["states"].mean * 100, abs=0.05)
        assert activations == f"{found['activations'].mean * 100:.1f} %"


def test_python_example_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As it is printed; a step in seconds and bytes that a GPU can have."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(code, {})
    time_s, size_bytes = map(float, capsys.readouterr().out.split())

    assert 0.1 < time_s < 100
    assert 1e9 < size_bytes < 80 * 2**30
