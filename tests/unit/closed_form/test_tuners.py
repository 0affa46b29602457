"""Tuners on spaces that a user writes down: the space, the plain tuners, and what tuners learn."""

from __future__ import annotations

import itertools
import json
import pickle
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents.checks import load_document
from autopar.errors import DocumentError, InputError, InstallError
from benchmarks.tuners_vs_exhaustive import APPLICATION, SPACE, SYSTEM, evaluations_to
from search.closed_form.calculon import InfeasibleExecution
from search.closed_form.calculon.documents import Application, Execution, System
from search.closed_form.calculon.engine import REASONS
from search.closed_form.native import OBJECTIVES, Objective
from search.closed_form.tuners import TunerName, load_space, tune
from search.closed_form.tuners.packages import _EXTRAS, RAY_SEARCHES
from search.closed_form.tuners.tune import Pricer, Record, draw_sample, price_range
from tests.oracles.calculon import evaluate
from tests.warm import ROOT

SMALL = SPACE | {
    "tensor_par": [2, 8],
    "pipeline_par": [1, 2, 4],
    "microbatch_size": [1, 4],
    "activation_recompute": ["none", "full"],
    "tensor_par_overlap": "none",
    "data_par_net": 1,
}
"""384 points, few enough for the oracle."""


def all_points(space: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the executions of a space whose data degree follows, in no particular order."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in space.items()}
    points = [
        dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
    ]
    for point in points:
        point["data_par"] = point["num_procs"] // (point["tensor_par"] * point["pipeline_par"])
    return points


@cache
def priced_by_hand() -> list[dict[str, Any]]:
    """Return the statistics of the small space's points that run, by the oracle."""
    found = []
    for point in all_points(SMALL):
        try:
            statistics = evaluate(APPLICATION, point, SYSTEM)
        except InfeasibleExecution:
            continue
        found.append(statistics | {"execution": point})
    return found


def pricer(space: dict[str, Any], objective: Objective = "rate") -> Pricer:
    """Return the pricer of a space on the machine of these tests."""
    return Pricer(
        application=load_document(Application, APPLICATION),
        system=load_document(System, SYSTEM),
        space=load_space(space),
        objective=objective,
    )


def all_digits(one: Pricer) -> Any:
    """Return the digits of all points."""
    return one.space.digits(np.arange(one.space.size))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_exhaustive_is_the_best_of_the_oracle(objective: Objective) -> None:
    """Every point by hand, and the best of them by each objective."""
    by_hand = priced_by_hand()
    result = tune(APPLICATION, SYSTEM, SMALL, objective=objective)

    figures = {
        "rate": max(s["sample_rate"] for s in by_hand),
        "time": min(s["total_time"] for s in by_hand),
        "memory": min(s["proc_mem_tier1_cap_req"] for s in by_hand),
    }
    assert result.trace[-1].value == pytest.approx(figures[objective], rel=1e-9)
    assert result.best is not None
    again = evaluate(APPLICATION, result.best.execution, SYSTEM)
    assert again["total_time"] == pytest.approx(result.best.time_s, rel=1e-9)
    assert (result.feasible, result.evaluations) == (len(by_hand), 384)
    assert sum(result.refused.values()) == 384 - len(by_hand)


def test_equal_figures_are_decided_by_memory_or_time() -> None:
    """Least memory is often reached with several speeds, of which the fastest is kept."""
    by_hand = priced_by_hand()
    least = min(s["proc_mem_tier1_cap_req"] for s in by_hand)
    times = {s["total_time"] for s in by_hand if s["proc_mem_tier1_cap_req"] == least}
    best = tune(APPLICATION, SYSTEM, SMALL, objective="memory").best

    assert len(times) > 1, "otherwise this test shows nothing"
    assert best is not None
    assert best.time_s == pytest.approx(min(times), rel=1e-9)


def test_random_reaches_the_optimum_and_its_seed_decides() -> None:
    """Drawn without repeats, all points are reached; equal seeds give equal traces."""
    exact = tune(APPLICATION, SYSTEM, SPACE)
    whole = tune(APPLICATION, SYSTEM, SPACE, tuner="random", evaluations=20_000, seed=3)

    assert whole.evaluations == whole.space_size == 9216
    assert whole.best == exact.best
    assert whole.refused == exact.refused
    part = [
        tune(APPLICATION, SYSTEM, SPACE, tuner="random", evaluations=500, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert part[0] == part[1]
    assert part[0].trace != part[2].trace


def test_random_draws_no_point_twice_and_all_alike() -> None:
    """Both ways of drawing: from a list of all points, and by throwing repeats away."""
    one = pricer(SPACE)
    for count in (2000, 9000):
        digits = draw_sample(one.space, count, np.random.default_rng(0))
        assert len(np.unique(digits, axis=0)) == len(digits) == count
        # a fair draw of 2,000 has at least 800 of each of two values, but for one seed in 10^18
        column = [d.name for d in one.space.domains].index("optimizer_sharding")
        assert min(np.bincount(digits[:, column])) > 0.4 * count


def test_random_takes_on_spaces_that_have_no_numbers() -> None:
    """More points than 64 bits can count, and the exhaustive search refuses them."""
    wide = {"from": 1, "to": 100_000}
    space = SMALL | dict.fromkeys(
        ("batch_size", "microbatch_size", "pipeline_interleaving", "tensor_par"), wide
    )
    assert load_space(space).size > 2**62
    result = tune(APPLICATION, SYSTEM, space, tuner="random", evaluations=1000)

    assert result.evaluations == 1000
    with pytest.raises(InputError, match=r"200,000,000.*--tuner random"):
        tune(APPLICATION, SYSTEM, space)


def test_evaluations_are_the_limit_of_the_exhaustive_search() -> None:
    """One point less than the space has is refused, as many are not."""
    with pytest.raises(InputError, match=r"384.*383"):
        tune(APPLICATION, SYSTEM, SMALL, evaluations=383)
    assert tune(APPLICATION, SYSTEM, SMALL, evaluations=384).exhaustive


def test_trace_says_when_the_best_was_found() -> None:
    """Values get better, and the last evaluations of a trace are where the best point is."""
    one = pricer(SPACE)
    priced = one.price(all_digits(one))
    rates = np.where(priced.outcomes["ok"], priced.outcomes["sample_rate_per_s"], -np.inf)
    result = tune(APPLICATION, SYSTEM, SPACE)
    values = [step.value for step in result.trace]

    assert values == sorted(set(values))
    for step in result.trace:
        assert step.value == pytest.approx(rates[: step.evaluations].max(), rel=1e-12)
        assert step.value > rates[: step.evaluations - 1].max()
    assert evaluations_to(result, values[-1]) == result.trace[-1].evaluations
    assert evaluations_to(result, 2 * values[-1]) is None


def test_records_of_parts_add_up() -> None:
    """However points are cut into parts, the answer is that of one pass."""
    one = pricer(SPACE, "memory")
    whole = price_range(one, 0, one.space.size)
    joined = Record()
    for begin, end in itertools.pairwise((0, 1, 700, 701, 5000, 9216)):
        # as it comes back from another process
        part = pickle.loads(pickle.dumps(price_range(pickle.loads(pickle.dumps(one)), begin, end)))
        joined.join(part)

    assert joined.steps == whole.steps
    assert joined.ranked == whole.ranked
    assert joined.counts.tolist() == whole.counts.tolist()


def test_threads_change_nothing() -> None:
    """The compiled engine's threads, through a tuner."""
    assert tune(APPLICATION, SYSTEM, SPACE, threads=3) == tune(APPLICATION, SYSTEM, SPACE)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_costs_lead_to_points_that_run(objective: Objective) -> None:
    """A better point costs less, a refused one more than any that runs, within one narrow range."""
    one = pricer(SPACE, objective)
    priced = one.price(all_digits(one))
    costs, outcomes = one.costs(priced), priced.outcomes
    runs = outcomes["ok"] != 0
    first = np.argsort(priced.scores[runs, 0], kind="stable")

    assert 0 < runs.sum() < len(runs)
    assert (np.diff(costs[runs][first]) >= 0).all()
    assert costs[runs].argmin() == priced.scores[runs, 0].argmin()
    assert 0 < costs[runs].min() < costs[runs].max() < 1 < costs[~runs].min()
    assert costs.max() == 1.2
    # differences between good points are not lost beside the penalty
    assert np.ptp(costs[runs]) > 0.1


def test_costs_lead_to_less_memory_where_it_lacks() -> None:
    """Of two points that do not fit, the smaller one costs less; other refusals are alike."""
    one = pricer(SPACE)
    priced = one.price(all_digits(one))
    costs, outcomes = one.costs(priced), priced.outcomes
    lacks = outcomes["reason"] == REASONS.index("Mem tier1 needs more than it has")
    other = ~lacks & (outcomes["ok"] == 0)
    order = np.argsort(outcomes["tier1_bytes"][lacks])

    assert (np.diff(costs[lacks][order]) >= 0).all()
    assert costs[lacks].min() < costs[lacks].max() <= 1.1
    assert set(costs[other].tolist()) == {1.2}


def test_nothing_that_runs() -> None:
    """There is no best, and what stood in the way is counted."""
    result = tune(APPLICATION | {"hidden": 512_000, "attn_size": 12_800}, SYSTEM, SMALL)

    assert result.best is None
    assert result.trace == ()
    assert result.feasible_share == 0
    assert "Mem tier1 needs more than it has" in result.refused


def test_a_space_from_a_file_in_every_spelling(tmp_path: Path) -> None:
    """Values, lists and ranges; the degree that is left out follows."""
    file = tmp_path / "space.json"
    given = SPACE | {
        "microbatch_size": {"from": 1, "to": 4},
        "batch_size": {"from": 8, "to": 24, "step": 8},
    }
    file.write_text(json.dumps(given))
    space = load_space(file)
    values = {domain.name: domain.values for domain in space.domains}

    assert values["tensor_par"] == (1, 2, 4, 8)
    assert values["microbatch_size"] == (1, 2, 3, 4)
    assert values["batch_size"] == (8, 16, 24)
    assert values["optimizer_sharding"] == (False, True)
    assert values["datatype"] == ("float16",)
    assert (space.num_procs, space.training, space.derived) == (64, True, "data_par")
    assert {d.name for d in space.domains if d.ordered} >= {"tensor_par", "data_par_net"}
    assert not any(d.ordered for d in space.domains if d.name in ("datatype", "weight_offload"))


def test_an_execution_is_a_space_of_one_point() -> None:
    """Its degrees tell the processors, where nothing else does."""
    point = all_points(SMALL)[0]
    del point["num_procs"]
    space = load_space(point)

    assert (space.size, space.num_procs, space.derived) == (1, 64, None)
    packed = space.executions(np.zeros((1, len(space.domains)), np.int64))
    assert packed["num_procs"].tolist() == [64]
    assert load_space(point, num_procs=128).num_procs == 128


def test_digits_count_every_point_once() -> None:
    """Numbers and points are one to one, and a degree that does not divide is refused as such."""
    space = load_space(SMALL | {"tensor_par": [2, 3, 128]})
    points = space.executions(space.digits(np.arange(space.size)))
    assert len(np.unique(points)) == space.size
    result = tune(APPLICATION, SYSTEM, space)
    assert (
        result.refused["tensor * pipeline * data parallelism != num_procs"] == space.size * 2 // 3
    )


def test_two_numbers_of_processors_have_to_agree() -> None:
    """One from the file and one from the command line."""
    assert load_space(SPACE, num_procs=64).num_procs == 64
    with pytest.raises(DocumentError, match="the value is 64, but 128 are asked for"):
        load_space(SPACE, num_procs=128)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tuner": "bayes"}, "expected one of exhaustive, random, ray, smac"),
        ({"objective": "cost"}, "expected one of rate, time, memory"),
        ({"ray_search": "ax"}, "expected one of optuna, hyperopt, random"),
        ({"evaluations": 0}, "evaluations: the value is 0"),
        ({"threads": 0}, "threads: the value is 0"),
        ({"seed": -1}, "seed: the value is -1"),
        ({"tuner": "smac", "ray": "local"}, "--ray needs .* got --tuner smac"),
    ],
)
def test_unusable_arguments_are_one_sentence(options: dict[str, Any], said: str) -> None:
    """Nothing is priced before they are checked."""
    with pytest.raises(InputError, match=said):
        tune(APPLICATION, SYSTEM, SPACE, **options)


@pytest.mark.parametrize(
    ("tuner", "options", "package", "extra"),
    [
        ("ray", {}, "ray", "autopar[ray]"),
        ("exhaustive", {"ray": "local"}, "ray", "autopar[ray]"),
        ("smac", {}, "smac", "autopar[smac]"),
    ],
)
def test_a_missing_extra_is_one_sentence(
    tuner: TunerName,
    options: dict[str, Any],
    package: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It names the command that installs it, on machines that have it as well."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InstallError) as caught:
        tune(APPLICATION, SYSTEM, SMALL, tuner=tuner, **options)
    assert f"`pip install '{extra}'`" in str(caught.value)
    assert caught.value.exit_code == 1


def test_every_field_of_an_execution_has_a_domain() -> None:
    """A field that is added to executions has to be added to the order of a space."""
    space = load_space(SPACE | {"data_par": [1, 2]})
    assert {d.name for d in space.domains} == set(Execution.__struct_fields__) - {
        "num_procs",
        "training",
    }


def test_extras_hold_what_is_said_to_install() -> None:
    """Every extra that pages and sentences name exists, and has the packages of its tuner."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: {re.split(r"[\[<>=]", requirement)[0] for requirement in requirements}
        for name, requirements in project["optional-dependencies"].items()
    }
    texts = [
        ROOT / "docs" / "concepts" / "closed-form.md",
        ROOT / "search" / "closed_form" / "tuners" / "packages.py",
    ]
    named = {
        word
        for path in texts
        for word in re.findall(r"autopar\[([a-z]+)\]", path.read_text(encoding="utf-8"))
    }
    assert named >= {"ray", "smac", "hyperopt"}
    assert named <= set(extras)
    assert extras["ray"] >= {"ray", "optuna"}
    assert extras["hyperopt"] >= {"ray", "hyperopt"}
    assert extras["smac"] >= {"smac"}
    packages = set(RAY_SEARCHES) - {"random"}
    assert {name: name in extras[_EXTRAS[name]] for name in packages} == dict.fromkeys(
        packages, True
    )
