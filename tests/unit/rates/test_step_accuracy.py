"""Intervals of estimated steps: which class of runs counts, how wide they are, what is refused."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autopar.documents import catalog
from autopar.errors import DocumentError
from autopar.rates.accuracy import (
    COVERAGE,
    Accuracy,
    RunClass,
    class_of_sources,
    load_accuracy,
    probability_faster,
    read_accuracy,
)
from autopar.records import replace
from autopar.sources import CARD_ROLE, Source
from tests.step_cases import STACKS


def of_runs(stack: str, experts: bool, known: bool, low: float, high: float) -> RunClass:
    """Return a class of runs with an interval."""
    return RunClass(
        stack=stack,
        experts=experts,
        site_known=known,
        rows=9,
        sources=3,
        low=low,
        high=high,
        plan_spread=0.05,
    )


KNOWN = of_runs("a", False, True, 0.95, 1.05)
UNKNOWN = of_runs("a", False, False, 0.9, 1.2)
ONLY_UNKNOWN = of_runs("b", False, False, 0.7, 1.5)
ONLY_KNOWN = of_runs("c", False, True, 0.99, 1.01)
MIXTURE = of_runs("a", True, False, 0.6, 1.9)
SMALL_MIXTURE = of_runs("b", True, True, 0.9, 1.1)


@pytest.mark.parametrize(
    ("stack", "experts", "known", "expected"),
    [
        ("a", False, True, KNOWN),
        ("a", False, False, UNKNOWN),
        ("b", False, True, KNOWN),  # the widest of known sites, whatever the stack
        ("c", False, False, ONLY_UNKNOWN),  # known sites say nothing of unknown ones: the widest
        ("new", False, True, KNOWN),
        ("new", False, False, ONLY_UNKNOWN),
        ("a", True, True, SMALL_MIXTURE),
        ("new", True, False, MIXTURE),
        ("b", True, False, MIXTURE),
        ("b", True, True, SMALL_MIXTURE),
    ],
)
def test_the_class_of_a_job(stack: str, experts: bool, known: bool, expected: RunClass) -> None:
    """The same stack and kind of model where there are runs of it, else the widest."""
    every = (KNOWN, UNKNOWN, ONLY_UNKNOWN, ONLY_KNOWN, MIXTURE, SMALL_MIXTURE)
    accuracy = Accuracy(classes=every, path=Path("x.json"))
    assert accuracy.of(stack, experts=experts, site_known=known) is expected
    assert expected.interval_s(10.0) == (10 * expected.low, 10 * expected.high)


def test_runs_of_adapters_say_nothing_of_full_training() -> None:
    """The reverse holds, and adapters elsewhere count for those of any site."""
    adapters = replace(of_runs("a", False, False, 0.5, 2.0), adapters=True)
    accuracy = Accuracy(classes=(adapters, KNOWN, UNKNOWN), path=Path("x.json"))
    assert accuracy.of("new", experts=False, site_known=True) is KNOWN
    assert accuracy.of("new", experts=False, site_known=True, adapters=True) is adapters
    narrow = replace(adapters, low=0.99, high=1.01)
    accuracy = Accuracy(classes=(narrow, KNOWN, UNKNOWN), path=Path("x.json"))
    assert accuracy.of("new", experts=False, site_known=True, adapters=True) is KNOWN


def test_without_mixtures_the_widest_of_all() -> None:
    """Nothing is known of experts: the worst that was measured."""
    accuracy = Accuracy(classes=(KNOWN, ONLY_UNKNOWN), path=Path("x.json"))
    assert accuracy.of("a", experts=True, site_known=True) is ONLY_UNKNOWN


def test_shipped_errors_have_a_class_for_every_stack() -> None:
    """Whatever the stack, the kind of model and the site."""
    accuracy = load_accuracy()
    assert {entry.stack for entry in accuracy.classes} <= set(STACKS)
    for stack in (*STACKS, "of one's own"):
        for experts in (False, True):
            for known in (False, True):
                found = accuracy.of(stack, experts=experts, site_known=known)
                assert found.experts == experts
                assert 0 < found.low < found.high


def test_probability_of_the_faster_plan() -> None:
    """Even for equal plans, near 1 for far ones, and of both orders 1 together."""
    assert probability_faster(1.0, 1.0, 0.05) == pytest.approx(0.5)
    assert probability_faster(1.0, 1.5, 0.05) > 0.999
    near = probability_faster(1.0, 1.05, 0.05)
    # ln 1.05 / (0.05 sqrt 2) = 0.69 standard deviations of a difference
    assert near == pytest.approx(0.7549, abs=1e-3)
    assert near + probability_faster(1.05, 1.0, 0.05) == pytest.approx(1.0)
    assert probability_faster(1.0, 1.05, 0.1) < near
    assert [probability_faster(1.0, other, 0.0) for other in (0.9, 1.0, 1.1)] == [0.0, 0.5, 1.0]
    draw = random.Random(1)
    faster = [
        math.exp(draw.gauss(0, 0.05)) < 1.05 * math.exp(draw.gauss(0, 0.05)) for _ in range(20000)
    ]
    assert sum(faster) / len(faster) == pytest.approx(near, abs=0.01)


def test_a_device_without_published_runs_has_the_widest_interval() -> None:
    """It spans all classes, and says that no run is on that architecture."""
    accuracy = load_accuracy()
    assert set(accuracy.architectures) == {"sm_80", "sm_90", "sm_100", "sm_103"}
    of = partial(accuracy.of, "megatron-core", experts=False, site_known=False)
    known = of(architecture="sm_90")
    assert known == of()
    assert known.basis == f"{known.rows} published megatron-core runs"
    for architecture in ("gfx942", "sm_89"):
        found = of(architecture=architecture)
        assert found.low == min(one.low for one in accuracy.classes)
        assert found.high == max(one.high for one in accuracy.classes)
        assert found.basis == f"all published runs (few or none on {architecture})"
    # The card of an estimate tells it to the planner of layers, too.
    for card, unlike in (("mi300x", "few or none on gfx942"), ("h100-80gb", "")):
        source = Source(role=CARD_ROLE, path=f"hardware_configs/cards/{card}.json")
        assert class_of_sources([source], experts=True).unlike == unlike


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "autopar-stack", "expected 'autopar-accuracy'"),
        (("version",), 2, "the value is 2, expected 1"),
        (("classes",), [], "the value is [], expected a list of at least 1"),
        (("classes", 0, "rows"), -3, "the value is -3, expected a whole number from 1"),
        (("classes", 0, "sources"), 0, "the value is 0, expected a whole number from 1"),
        (("classes", 0, "low"), 0, "the value is 0, expected a number from 0.01 to 100"),
        (("classes", 0, "low"), 50, "the value is 50, expected at most"),
        (("classes", 0, "high"), 1e9, "expected a number from 0.01 to 100"),
    ],
)
def test_damaged_errors_are_refused(
    path: tuple[str | int, ...], value: object, message: str, tmp_path: Path
) -> None:
    """One sentence names the file, the key, the value and what was expected."""
    shipped = catalog.find_document("accuracy", "accuracy file", "published")
    document: Any = json.loads(shipped.read_text(encoding="utf-8"))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "errors.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(DocumentError) as caught:
        read_accuracy(file)
    text = str(caught.value)
    assert message in text
    assert "errors.json" in text
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    assert key.removeprefix(".") in text


def test_the_share_is_nine_of_ten() -> None:
    """What the documents and pages say."""
    assert COVERAGE == 0.90
