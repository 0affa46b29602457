"""docs/concepts/estimates.md says of stacks, steps and intervals what the code does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autopar.price import step
from autopar.rates import collectives, kernels, layer, measured as hardware, stack
from autopar.rates.parts import experts, mixers
from autopar.rates.stack import BYTE_CLASSES, StackDocument, load_stack
from tests.step_cases import STACKS


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """Return the three sections of the page."""
    text = (root / "docs" / "concepts" / "estimates.md").read_text(encoding="utf-8")
    start, end = text.index("\n## Stacks\n"), text.index("\n## Memory of shipped models\n")
    return text[start:end]


def test_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as they are printed; the interval is around the step."""
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(example, names)
    assert 5 < float(capsys.readouterr().out.split()[0]) < 20
    assert names["low_s"] < names["step"].total_s < names["high_s"]
    assert 0.5 < names["chance"] < 1


def test_every_term_has_its_row(page: str) -> None:
    """In the order in which a step has them, which is not that of the page."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]*[a-z]", page[page.index("| term |") :], re.MULTILINE)
    assert sorted(rows) == sorted(step.TERMS)


def test_stacks_are_those_that_are_shipped(page: str) -> None:
    """Every stack and every operation is named, and every key of the format explained."""
    assert [name for name in STACKS if f"`{name}`" not in page] == []
    table = page[page.index("| operation |") :]
    assert [name for name in BYTE_CLASSES if f"`{name}`" not in table] == []


def test_every_key_of_a_stack_is_explained(root: Path) -> None:
    """docs/reference/files.md has a row for each, with its constants."""
    text = (root / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    section = text[text.index("## Stacks of software") : text.index("## Errors of estimated")]
    table = set(re.findall(r"`(\w+)`", section[section.index("| key |") :]))
    keys = set(StackDocument.__struct_fields__) - {"format", "version", "description"}
    assert keys - table == set()
    figures = load_stack("megatron-core").figures
    for name in ("gradient", "cast", "optimizer", "host", "overlap"):
        assert set(getattr(figures, name).values) - table == set(), name


@pytest.mark.parametrize(
    ("sentence", "value"),
    [
        (r"`stragglers` \| ([\d.]+) x", stack.STRAGGLERS),
        (r"or ([\d.]+) v x that with v chunks", step._INTERLEAVED_TRANSFER),
        (r"a micro-batch's time, and ([\d.]+) of it", stack.HIDDEN_REDUCTION),
        (r"plus ([\d.]+) of the shorter", layer._CONTEXT_FRACTION),
        (r"2 x \((\d+) us \+", collectives.TRANSFER_SYNCHRONISE_S * 1e6),
        (r"sorting takes ([\d.]+) times", experts._UNFUSED_PERMUTE),
        (r"a router \((\d+) bytes", experts._ROUTER_BYTES),
        (r"in the time of ([\d.,]+) FLOP", mixers.SCAN_FLOP[0]),
        (r"host\^3\)\^\(1/(\d)\)", hardware._HOST_POWER),
    ],
)
def test_constants_are_those_of_the_code(page: str, sentence: str, value: float) -> None:
    """A constant that moves takes its sentence with it."""
    (found,) = re.findall(sentence, page)
    assert float(found.replace(",", "")) == pytest.approx(value)


def test_half_of_the_experts_exchange_is_seen(page: str) -> None:
    """With `overlap_experts`, in words."""
    assert "with `overlap_experts`, half of it" in page
    assert step._EXPOSED_EXPERTS == 0.5


def test_rates_of_weight_gradients(root: Path) -> None:
    """Of plain and grouped products, and what is left of the slowdown in a run."""
    text = (root / "docs" / "concepts" / "estimates.md").read_text(encoding="utf-8")
    plain, grouped = kernels._WEIGHT_GRADIENT_RATE, kernels._GROUPED_WEIGHT_GRADIENT_RATE
    assert f"weight gradient runs at {plain} of the forward's rate ({grouped} in groups)" in text
    assert f"z is {kernels._SUSTAINED_SLOWDOWN} of the entry" in text
