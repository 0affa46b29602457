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
    quantile_interval,
    read_accuracy,
)
from autopar.records import replace
from autopar.sources import CARD_ROLE, Source
from tests.step_cases import STACKS


def of_runs(
    stack: str, experts: bool, known: bool, low: float, high: float, sources: int = 3
) -> RunClass:
    """Return a class of runs with an interval; three sources are enough for one's own."""
    return RunClass(
        stack=stack,
        experts=experts,
        site_known=known,
        rows=9,
        sources=sources,
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
        ("b", False, True, ONLY_UNKNOWN),  # a known site is no worse than an unknown one
        ("c", False, False, ONLY_UNKNOWN),  # known sites say nothing of unknown ones: the widest
        ("new", False, True, ONLY_UNKNOWN),
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
    """The reverse holds: adapters without runs of their own get the widest of all."""
    adapters = replace(of_runs("a", False, True, 0.5, 2.0), adapters=True)
    accuracy = Accuracy(classes=(adapters, KNOWN, UNKNOWN), path=Path("x.json"))
    assert accuracy.of("new", experts=False, site_known=True) is UNKNOWN
    assert accuracy.of("new", experts=False, site_known=True, adapters=True) is adapters


def test_without_mixtures_the_widest_of_all() -> None:
    """Nothing is known of experts: the worst that was measured."""
    accuracy = Accuracy(classes=(KNOWN, ONLY_UNKNOWN), path=Path("x.json"))
    assert accuracy.of("a", experts=True, site_known=True) is ONLY_UNKNOWN


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.95, 1.05, (0.8, 1.3)),
        (0.75, 1.05, (0.75, 1.3)),  # each end is the further of the two
        (0.7, 1.5, (0.7, 1.5)),
    ],
)
def test_few_sources_have_the_widest_of_their_kind(
    low: float, high: float, expected: tuple[float, float]
) -> None:
    """Of classes with two sources at least, as many experts and the same knowledge of the site."""
    few = of_runs("a", False, True, low, high, sources=2)
    others = (
        of_runs("b", False, True, 0.9, 1.1),
        of_runs("c", False, True, 0.8, 1.3, sources=2),
        of_runs("d", False, True, 0.5, 2.0, sources=1),  # one cluster's own trouble
        of_runs("b", True, True, 0.4, 2.1),
        of_runs("b", False, False, 0.4, 2.1),
    )
    found = Accuracy(classes=(few, *others), path=Path("x.json")).of(
        "a", experts=False, site_known=True
    )
    assert (found.low, found.high) == expected
    assert found == replace(few, low=found.low, high=found.high)


def test_few_sources_without_others_keep_their_interval() -> None:
    """There is nothing to widen them to."""
    alone = of_runs("a", False, True, 0.9, 1.1, sources=1)
    accuracy = Accuracy(classes=(alone, MIXTURE, UNKNOWN), path=Path("x.json"))
    assert accuracy.of("a", experts=False, site_known=True) == alone


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


@pytest.mark.parametrize("number", [2, 3, 6, 12, 18, 19, 60])
def test_intervals_hold_the_next_value(number: int) -> None:
    """Nine times of ten, however few values there are."""
    draw = random.Random(number)
    inside, tried = 0, 4000
    for _ in range(tried):
        low, high = quantile_interval([math.exp(draw.gauss(0.05, 0.1)) for _ in range(number)])
        inside += low <= math.exp(draw.gauss(0.05, 0.1)) <= high
    # three standard deviations of the count are 1.4 %
    assert 0.885 < inside / tried < 0.94


def test_intervals_of_errors_that_are_not_normal() -> None:
    """Even ones, and of 60 values ones with a long tail."""
    draw = random.Random(5)
    for number, sample in (
        (6, lambda: draw.uniform(0.8, 1.3)),
        (60, lambda: draw.uniform(0.8, 1.3)),
        (60, lambda: 0.9 + draw.expovariate(4)),
    ):
        inside = 0
        for _ in range(2000):
            low, high = quantile_interval([sample() for _ in range(number)])
            inside += low <= sample() <= high
        assert inside / 2000 > 0.88


def test_few_values_give_wider_intervals() -> None:
    """The fewer, the further beyond the extremes; one says nothing."""
    beyond = []
    for number in (2, 3, 6, 12, 18):
        values = [math.exp(0.1 * (2 * k / (number - 1) - 1)) for k in range(number)]
        low, high = quantile_interval(values)
        beyond.append(math.log(high) - 0.1)
        assert math.log(high) == pytest.approx(-math.log(low))
    assert beyond == sorted(beyond, reverse=True)
    assert beyond[-1] > 0
    assert quantile_interval([1.0]) == (0.01, 100.0)
    ends = quantile_interval([math.exp(k) for k in range(19)])
    assert [math.log(end) for end in ends] == pytest.approx([0, 18])


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


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "autopar-stack", "expected 'autopar-accuracy'"),
        (("format",), MISSING, "this key is missing"),
        (("version",), 2, "the value is 2, expected 1"),
        (("source",), MISSING, "this key is missing"),
        (("classes",), [], "the value is [], expected a list of at least 1"),
        (("classes",), {}, "the value is {}, expected"),
        (("classes", 0), 1, "the value is 1, expected an object"),
        (("classes", 0, "stack"), MISSING, "this key is missing"),
        (("classes", 0, "experts"), 1, "the value is 1, expected"),
        (("classes", 0, "rows"), -3, "the value is -3, expected a whole number from 1"),
        (("classes", 0, "rows"), True, "the value is true, expected a whole number from 1"),
        (("classes", 0, "sources"), 0, "the value is 0, expected a whole number from 1"),
        (("classes", 0, "low"), 0, "the value is 0, expected a number from 0.01 to 100"),
        (("classes", 0, "low"), 50, "the value is 50, expected at most"),
        (("classes", 0, "high"), 1e9, "expected a number from 0.01 to 100"),
        (("classes", 0, "plan_spread"), "x", "the value is 'x', expected a number from 0"),
        (("classes", 0, "hihg"), 1.0, "'high'"),
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
    if value is MISSING:
        del place[path[-1]]
    else:
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


def test_a_source_of_many_rows_does_not_narrow_the_interval_of_others() -> None:
    """Weights move the ends; alike ones, however large, leave them where they are."""
    many, few = [1.0 + 0.001 * k for k in range(100)], [2.0 + 0.001 * k for k in range(4)]
    alike = quantile_interval(many + few)
    by_source = quantile_interval(
        many + few, [1 / math.sqrt(len(many))] * len(many) + [1 / math.sqrt(len(few))] * len(few)
    )

    assert quantile_interval(many + few, [7.0] * 104) == pytest.approx(alike)
    assert alike[1] < 1.2
    assert by_source[1] > 2.0


def test_weights_repeat_values() -> None:
    """A value of weight 2 is two of weight 1, between which nothing lies."""
    draw = random.Random(3)
    for _ in range(50):
        values = [math.exp(draw.gauss(0, 0.2)) for _ in range(40)]
        weights = [draw.choice([1, 2]) for _ in values]
        repeated = [v for v, w in zip(values, weights, strict=True) for _ in range(w)]
        ends = zip(quantile_interval(values, weights), quantile_interval(repeated), strict=True)
        ordered = sorted(values)
        for one, other in ends:
            # at most one value apart: the mean weight is between both
            apart = [v for v in ordered if min(one, other) < v < max(one, other)]
            assert len(apart) <= 1
