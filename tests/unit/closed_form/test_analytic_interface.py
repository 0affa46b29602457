"""The Python interface of both models: names, order of parameters, and plain documents in.

Documents are given as JSON has them, copies of what users of the published models write.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleExecution
from search.closed_form import calculon, tensor2d
from tests.data.read import (
    calculon_documents,
    calculon_points,
    tensor2d_documents,
    tensor2d_rows,
)
from tests.parity.test_calculon_engine import APPLICATION, SYSTEM
from tests.unit.explore_documents import EXECUTION as PLAIN, MODEL, TENSOR2D_SYSTEM

EXECUTION = PLAIN | {
    "num_procs": 8,
    **dict.fromkeys(("tensor_par", "pipeline_par", "data_par"), 2),
    **dict.fromkeys(("pipeline_par_net", "data_par_net"), 0),
    "optimizer_sharding": True,
    "training": True,
}
CONFIG = {
    "1d": ({"dp": 2, "tp": 4, "pp": 1, "mbs": 1}, {"nv_tp": 4, "nv_dp": 1, "nv_pp": 1}),
    "2d": (
        {"dp": 2, "tp": 4, "tp1": 2, "tp2": 2, "pp": 1, "mbs": 1, "nb": 2},
        {"nv_tp1": 2, "nv_tp2": 2, "nv_dp": 1, "nv_pp": 1},
    ),
    "2d-seqp": (
        {"dp": 2, "tp": 4, "tp1": 2, "tp2": 2, "pp": 1, "mbs": 1},
        {"nv_tp1": 2, "nv_tp2": 2, "nv_dp": 1, "nv_pp": 1},
    ),
}
LARGE: dict[str, Any] = TENSOR2D_SYSTEM | {"hbm_capacity": 1000}


@pytest.mark.parametrize(
    ("function", "positional", "named"),
    [
        (calculon.evaluate, "application execution system", {"compat": False}),
        (
            calculon.evaluate_many,
            "application executions system",
            {"compat": False, "threads": 1},
        ),
        (
            tensor2d.evaluate,
            "strategy model config placement n_gpus global_batch_size system",
            {"compat": False},
        ),
        (
            tensor2d.evaluate_many,
            "strategy model candidates n_gpus global_batch_size system",
            {"compat": False, "threads": 1},
        ),
        (
            tensor2d.explore,
            "strategy model n_gpus global_batch_size system",
            {"top": 10, "compat": False, "threads": 1},
        ),
    ],
)
def test_signatures(function: Callable[..., Any], positional: str, named: dict[str, Any]) -> None:
    """Documents by place and without defaults, the rest by name."""
    parameters = inspect.signature(function).parameters.values()
    by_place = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    by_name = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert [p.name for p in by_place] == positional.split()
    assert all(p.default is p.empty for p in by_place)
    assert named.items() <= by_name.items()
    assert len(by_place) + len(by_name) == len(parameters)


@pytest.mark.parametrize("compat", [False, True])
def test_calculon_takes_plain_documents(compat: bool) -> None:
    """And leaves them alone; what else an application says is not asked."""
    application = APPLICATION | {"name": "small", "source": {"any": 1}}
    given = (application, EXECUTION, SYSTEM)
    before = copy.deepcopy(given)
    statistics = calculon.evaluate(*given, compat=compat)
    assert given == before
    assert type(statistics) is dict
    assert len(statistics) >= 96
    assert all(type(value) in (int, float, type(None)) for value in statistics.values())
    assert statistics == calculon.evaluate(APPLICATION, EXECUTION, SYSTEM, compat=compat)


def test_calculon_says_why_not() -> None:
    """One sentence, as an attribute and as the message."""
    with pytest.raises(InfeasibleExecution) as caught:
        calculon.evaluate(APPLICATION, EXECUTION | {"num_procs": 9}, SYSTEM)
    assert "9" in caught.value.reason
    assert caught.value.reason in str(caught.value)


@pytest.mark.parametrize("threads", [1, 2])
def test_calculon_by_the_thousand(threads: int) -> None:
    """A structured array, in the order of the executions, equal to one at a time."""
    executions = [EXECUTION, EXECUTION | {"num_procs": 9}, EXECUTION | {"microbatch_size": 2}]
    found = calculon.evaluate_many(APPLICATION, executions * 400, SYSTEM, threads=threads)
    assert found.shape == (1200,)
    assert {"ok", "reason", "total_time_s", "tier1_bytes", "sample_rate_per_s"} <= set(
        found.dtype.names or ()
    )
    assert found["ok"][:3].tolist() == [True, False, True]
    assert found["reason"][0] == ""
    assert found["reason"][1]
    for place in (0, 2):
        one = calculon.evaluate(APPLICATION, executions[place], SYSTEM)
        row = found[place]
        assert row["total_time_s"] == pytest.approx(one["total_time"], rel=1e-12)
        assert row["tier1_bytes"] == pytest.approx(one["proc_mem_tier1_cap_req"], rel=1e-12)
        assert row["sample_rate_per_s"] == pytest.approx(one["sample_rate"], rel=1e-12)
    assert (found[:3] == found[-3:]).all()


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize("strategy", tensor2d.STRATEGIES)
def test_tensor2d_takes_plain_documents(strategy: tensor2d.Strategy, compat: bool) -> None:
    """And leaves them alone; the model may leave its inner width out, as published ones do."""
    model = {key: MODEL[key] for key in ("l", "e", "h", "depth")}
    given = (model, *CONFIG[strategy], LARGE)
    before = copy.deepcopy(given)
    statistics = tensor2d.evaluate(strategy, model, *CONFIG[strategy], 8, 16, LARGE, compat=compat)
    assert given == before
    assert type(statistics) is dict
    assert len(statistics) == (22 if strategy == "1d" else 23)
    assert all(type(value) in (int, float) for value in statistics.values())
    config, placement = CONFIG[strategy]
    numbers: Any = {name: np.int64(size) for name, size in config.items()}
    again = tensor2d.evaluate(strategy, model, numbers, placement, 8, 16, LARGE, compat=compat)
    assert again == statistics


@pytest.mark.parametrize("strategy", tensor2d.STRATEGIES)
def test_tensor2d_by_the_thousand(strategy: tensor2d.Strategy) -> None:
    """Candidates are configuration and placement in one; the best found is one of them."""
    config, placement = CONFIG[strategy]
    good = config | placement
    rows = [good, good | {"pp": 3}]
    found = tensor2d.evaluate_many(strategy, MODEL, rows * 500, 8, 16, LARGE, threads=2)
    assert found["ok"].tolist() == [True, False] * 500
    one = tensor2d.evaluate(strategy, MODEL, config, placement, 8, 16, LARGE)
    assert found["total_time_s"][0] == pytest.approx(one["t"], rel=1e-12)
    assert found["memory_bytes"][0] == pytest.approx(one["mem"] * 1e9, rel=1e-12)
    assert found["sample_rate_per_s"][0] == pytest.approx(16 / one["t"], rel=1e-12)
    best = tensor2d.explore(strategy, MODEL, 8, 16, LARGE, top=3)
    assert len(best) == 3
    assert best[0].rate_per_s >= 16 / one["t"] * (1 - 1e-12)
    alone = tensor2d.evaluate(
        strategy, MODEL, best[0].execution["config"], best[0].execution["placement"], 8, 16, LARGE
    )
    assert alone["t"] == pytest.approx(16 / best[0].rate_per_s, rel=1e-12)


def test_tensor2d_says_why_not() -> None:
    """As calculon does."""
    config, placement = CONFIG["1d"]
    with pytest.raises(InfeasibleExecution, match="16") as caught:
        tensor2d.evaluate("1d", MODEL, config, placement, 16, 16, LARGE)
    assert caught.value.reason in str(caught.value)


def test_reference_points_of_calculon_many_at_a_time(data_dir: Path) -> None:
    """Every document as it is: verdicts and figures, and other models' keys beside the six."""
    inputs = calculon_documents(data_dir)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for point in calculon_points(data_dir):
        if point["id"] is None:  # drawn by chance
            groups.setdefault((point["model"], point["system"]), []).append(point)
    assert sum(map(len, groups.values())) == 1320
    for (model, system), points in groups.items():
        found = calculon.evaluate_many(
            inputs["models"][model] | {"comment": "?"},
            [point["execution"] for point in points],
            inputs["systems"][system],
            compat=True,
        )
        assert found["ok"].tolist() == [point["ok"] for point in points]
        assert [bool(text) for text in found["reason"]] == [not point["ok"] for point in points]
        rates = [p["stats"]["sample_rate"] if p["ok"] else 0.0 for p in points]
        assert found["sample_rate_per_s"] == pytest.approx(rates, rel=1e-9)


def test_reference_candidates_of_tensor2d_many_at_a_time(data_dir: Path) -> None:
    """The same of the two-dimensional model."""
    inputs = tensor2d_documents(data_dir)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    keys = ("strat", "model", "n_gpus", "global_batch_size", "system")
    for row in tensor2d_rows(data_dir, "random"):
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for (strategy, model, gpus, batch, system), rows in groups.items():
        found = tensor2d.evaluate_many(
            strategy,
            inputs["models"][model],
            [row["config"] | row["nv"] for row in rows],
            gpus,
            batch,
            inputs["systems"][system],
            compat=True,
        )
        assert found["ok"].tolist() == [row["feasible"] for row in rows]
        assert found["total_time_s"] == pytest.approx([row["stats"]["t"] for row in rows], rel=1e-9)
