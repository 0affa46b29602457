"""Engine and oracle of Calculon against figures of the published tool, with its defects on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from autopar.errors import InfeasibleExecution
from search.closed_form import calculon
from tests.data.read import calculon_best, calculon_documents, calculon_points
from tests.oracles import calculon as oracle
from tests.parity.test_calculon_engine import both

TOLERANCE = 1e-9


def close(ours: Any, theirs: Any) -> bool:
    """Return whether two figures agree; infinity is text in the reference."""
    if theirs is None or ours is None or isinstance(theirs, str):
        return bool(ours == theirs or (theirs == "Infinity" and ours == float("inf")))
    return bool(ours == theirs or abs(ours - theirs) <= TOLERANCE * abs(theirs))


@pytest.fixture(params=[calculon.evaluate, oracle.evaluate], ids=["engine", "oracle"])
def evaluate(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Return one of the two models."""
    model: Callable[..., dict[str, Any]] = request.param
    return model


@pytest.fixture(scope="module")
def inputs(data_dir: Path) -> dict[str, dict[str, Any]]:
    """Return applications and systems."""
    return calculon_documents(data_dir)


@pytest.fixture(scope="module")
def points(data_dir: Path, inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the named and the random points, each with its documents."""
    found = calculon_points(data_dir)
    systems = {name: convert(keys, calculon.System) for name, keys in inputs["systems"].items()}
    for point in found:
        point["application"] = inputs["models"][point["model"]]
        point["system"] = systems[point["system"]]
    return found


@pytest.mark.whole
def test_every_verdict_is_the_published_one(
    points: list[dict[str, Any]], evaluate: Callable[..., dict[str, Any]]
) -> None:
    """Feasible or not, and the same sentence where one is published."""
    kinds = {"Llm.Error": "infeasible", "AssertionError": "input"}
    assert len(points) == 170 + 1320
    refused = [point for point in points if not point["ok"]]
    assert len(refused) == 718 + 7
    for point in refused:
        with pytest.raises(InfeasibleExecution) as caught:
            evaluate(point["application"], point["execution"], point["system"], compat=True)
        assert kinds[point["error_kind"]] == caught.value.kind
        assert point["error"] in ("", caught.value.reason)


@pytest.mark.whole
def test_every_statistic_of_every_point(
    points: list[dict[str, Any]], evaluate: Callable[..., dict[str, Any]]
) -> None:
    """All 96 statistics, in their order."""
    for point in (p for p in points if p["ok"]):
        ours = evaluate(point["application"], point["execution"], point["system"], compat=True)
        theirs = {k: v for k, v in point["stats"].items() if k != "layers"}
        assert list(ours) == list(theirs)
        assert len(ours) == 96
        wrong = {k: (ours[k], v) for k, v in theirs.items() if not close(ours[k], v)}
        assert not wrong


def test_every_row_of_the_layer_tables(
    points: list[dict[str, Any]], evaluate: Callable[..., dict[str, Any]]
) -> None:
    """All 48 figures of every operation."""
    tables = [p for p in points if p["ok"] and "layers" in p["stats"]]
    assert len(tables) == 24
    for point in tables:
        ours = evaluate(
            point["application"], point["execution"], point["system"], compat=True, layers=True
        )["layers"]
        for mine, theirs in zip(ours, point["stats"]["layers"], strict=True):
            assert list(mine) == list(theirs)
            assert not [k for k, v in theirs.items() if not close(mine[k], v)], mine["name"]


def test_the_ten_best_of_the_published_search(
    data_dir: Path, inputs: dict[str, Any], evaluate: Callable[..., dict[str, Any]]
) -> None:
    """The rates of the documented search."""
    found = calculon_best(data_dir)
    assert len(found) == 10
    for row in found:
        ours = evaluate(
            inputs["models"]["turing-530B"],
            row["execution"],
            inputs["systems"]["a100_80g"],
            compat=True,
        )
        assert close(ours["sample_rate"], row["stats"]["sample_rate"])


@pytest.mark.whole
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_engine_and_oracle_agree_where_nothing_is_published(
    points: list[dict[str, Any]], every: int
) -> None:
    """The same points with the defects corrected."""
    ran = sum(
        both(point["application"], point["execution"], point["system"], False)
        for point in points[::every]
    )
    assert ran > 700 // every
