"""JSON whose lists of numbers take rows, as sidecars are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.documents.json import write_json


@pytest.mark.parametrize(
    "make",
    [dict, lambda: {"a": [], "b": {}, "c": [{"x": [True, 1]}, None, "é"], "d": [["x"], 1]}],
)
def test_rows_change_only_lists_of_numbers(
    tmp_path: Path, make: Callable[[], dict[str, object]]
) -> None:
    """Everything else is written as it always was."""
    write_json(tmp_path / "a", make())
    write_json(tmp_path / "b", make(), number_rows=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_are_short_and_say_the_same(tmp_path: Path) -> None:
    """Numbers come in rows of at most 100 columns, and none is lost."""
    content = {"deep": {"short": [1, 2.5], "long": [n / 7 for n in range(100)], "empty": []}}
    write_json(tmp_path / "a", content, number_rows=True)
    text = (tmp_path / "a").read_text(encoding="utf-8")
    assert json.loads(text) == content
    assert '"short": [1, 2.5]' in text
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 40


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    """JSON has none, in rows as elsewhere, and the old file stays."""
    path = tmp_path / "a"
    write_json(path, {"a": [1.0]}, number_rows=True)
    for content in ({"a": [1.0, float("nan")]}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="JSON compliant"):
            write_json(path, content, number_rows=True)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [1.0]}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
