"""Documents of trainers: the shipped ones, one of one's own, and every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents import catalog
from autopar.errors import DocumentError, InputError
from autopar.rates.stack import BYTE_CLASSES, FORMAT, load_stack
from tests.step_cases import STACKS

MISSING = object()


def shipped(name: str = "megatron-core") -> dict[str, Any]:
    """Return a shipped document."""
    path = catalog.find_document("stacks", "stack", name)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def changed(document: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """Return a document with one value replaced, or taken out."""
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize("name", STACKS)
def test_shipped_stacks_are_read(name: str) -> None:
    """Every figure has its source, and bytes of gated kernels are fewer or the same."""
    stack = load_stack(name)
    assert stack.name == name
    assert stack.source.estimated
    assert stack.description
    document = shipped(name)
    usual = {"plain_rope": "rope", "plain_residual": "residual"}
    for operation in BYTE_CLASSES:
        entry = document["bytes_per_element"].get(operation)
        if entry is None:
            same = usual.get(operation)
            for backward in (False, True):
                cost = 0.0 if same is None else stack.element_bytes(same, backward=backward)
                assert stack.element_bytes(operation, backward=backward) == cost
            continue
        assert entry["source"]
        for backward, side in ((False, "forward"), (True, "backward")):
            plain = stack.element_bytes(operation, backward=backward)
            assert plain == entry["value"][side]
            gated = stack.element_bytes(operation, backward=backward, gated=True)
            factor = entry["value"].get("gated", 1.0) if not backward else 1.0
            assert gated == pytest.approx(plain * factor)


def test_all_shipped_stacks_are_tested() -> None:
    """The list of the random jobs is that of the folder."""
    folder = catalog.find_document("stacks", "stack", STACKS[0]).parent
    assert sorted(path.stem for path in folder.glob("*.json")) == sorted(STACKS)


def test_a_stack_of_ones_own(tmp_path: Path) -> None:
    """By its path, under its name, with defaults for what it leaves out."""
    document = shipped()
    document["name"], document["_note"] = "ours", "counted again"
    del document["overlap"]["value"]["tensor"]
    document["overlap"]["value"] = {"tensor": 0.5, "fully_sharded": 0.2}
    document["host"]["value"] = {"forward_s": 0, "backward_s": 1e-4, "collective_s": 0}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    stack = load_stack(str(file))
    assert stack.name == "ours"
    figures = stack.figures
    assert [figures.overlap[key] for key in ("sharded_network", "gradients", "regather")] == [
        1.0,
        0.45,
        1.3,
    ]
    assert (figures.host["experts_s"], figures.host["partial_graphs"]) == (0.0, 0.7)
    del document["name"]
    file.write_text(json.dumps(document), encoding="utf-8")
    assert load_stack(str(file)).name == "mine"


def test_unknown_names_are_refused() -> None:
    """With the nearest known one."""
    with pytest.raises(InputError, match="megatron-core"):
        load_stack("megatron-cor")


NORM = ("bytes_per_element", "norm")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), MISSING, f'Begin a stack with "format": "{FORMAT}"'),
        (("format",), "autopar-card", "the value is 'autopar-card', expected 'autopar-stack'"),
        (("version",), MISSING, 'Begin a stack with "version": 1'),
        (("version",), 2, "the value is 2, expected 1"),
        (("name",), "", "the value is '', expected a text that is not empty"),
        (("attention",), [], "the value is [], expected a list of at least 1"),
        (("attention", 0), " ", "the value is ' ', expected a text that is not empty"),
        (
            NORM,
            4,
            "the value is 4, expected an object with the keys value, quality, source, spread",
        ),
        ((*NORM, "value"), 4, "the value is 4, expected an object with the keys forward, backward"),
        ((*NORM, "value"), {"forward": 4}, "expected a number from 0 to 200"),
        ((*NORM, "value", "forward"), -1, "the value is -1, expected a number from 0 to 200"),
        ((*NORM, "value", "forward"), 1e9, "expected a number from 0 to 200"),
        ((*NORM, "quality"), "good", "expected 'measured', 'derived' or 'nominal'"),
        ((*NORM, "source"), "", "expected source of the value"),
        ((*NORM, "spread"), -1, "the value is -1, expected a number from 0 to 2"),
        ((*NORM, "spread"), MISSING, "this key is missing, expected a number from 0 to 2"),
        (("gradient", "value", "reduce_bytes"), 0, "expected a number from 1 to 8"),
        (("cast", "value", "row_scales_rate"), 2, "expected a number from 0.1 to 1"),
        (("host", "value", "forward_s"), 0.25, "expected a number from 0 to 0.1"),
        (("host", "value", "partial_graphs"), 1.5, "expected a number from 0 to 1"),
        (("overlap",), MISSING, "this key is missing"),
        (("overlap", "value", "tensor"), 1.1, "expected a number from 0 to 1"),
        (("overlap", "value", "sharded_network"), 0, "expected a number from 0.02 to 1"),
        (("overlap", "value", "regather"), 0.5, "expected a number from 1 to 2"),
    ],
)
def test_mistakes_are_named(
    path: tuple[str | int, ...], value: object, message: str, tmp_path: Path
) -> None:
    """One sentence names the file, the key, the value and what was expected."""
    file = tmp_path / "stack.json"
    file.write_text(json.dumps(changed(shipped(), path, value)), encoding="utf-8")
    with pytest.raises(DocumentError) as caught:
        load_stack(str(file))
    text = str(caught.value)
    assert message in text
    assert "stack.json" in text
    assert "\n" not in text
    assert all(str(key) in text for key in path)
