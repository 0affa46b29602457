"""`autopar-explore calculon --space`: what it shows, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents.checks import load_document
from benchmarks.tuners_vs_exhaustive import APPLICATION, SPACE, SYSTEM
from search.closed_form.calculon import Application, System
from search.closed_form.tuners import load_space, tune
from search.closed_form.tuners.tune import Pricer
from search.commands.explore import run


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return the arguments of a command that searches the space."""
    (tmp_path / "model.json").write_text(json.dumps(APPLICATION))
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    return [
        "calculon",
        "--application",
        str(tmp_path / "model.json"),
        "--system",
        "a100-80gb",
        "--space",
        str(tmp_path / "space.json"),
    ]


def test_the_best_of_all_is_shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The figures and the execution of the exhaustive search, on stdout."""
    assert run(arguments) == 0
    shown = capsys.readouterr()
    best = tune(APPLICATION, SYSTEM, SPACE).best

    assert best is not None
    assert "Best execution\n" in shown.out
    assert f"{best.rate_per_s:.5g} samples/s" in shown.out
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["tensor_par", str(best.execution["tensor_par"])] in lines
    assert ["optimizer_sharding", "true"] in lines
    assert "9,216 evaluations of 9,216 points; 39.0 % are possible" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("objective", ["rate", "time", "memory"])
def test_a_tuner_and_its_seed(
    arguments: list[str], objective: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json - is the result of the Python interface, and nothing else."""
    more = ["--tuner", "random", "--evaluations", "400", "--seed", "7", "--objective", objective]
    assert run([*arguments, *more, "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    expected: dict[str, Any] = {"tuner": "random", "evaluations": 400, "seed": 7}
    result = tune(APPLICATION, SYSTEM, SPACE, objective=objective, **expected)  # type: ignore[arg-type]

    assert result.best is not None
    assert answer["best"]["execution"] == result.best.execution
    assert answer["trace"][-1]["value"] == result.trace[-1].value
    assert (answer["evaluations"], answer["space_size"]) == (400, 9216)
    assert run([*arguments, *more]) == 0
    assert "a better one may exist" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--tuner", "random", "--threads", "2"]])
def test_the_best_of_a_space(
    arguments: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--top ranks as many as are asked for, the first of them the best: as all points, sorted."""
    assert run([*arguments, *more, "--top", "5", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    space = load_space(SPACE)
    every = Pricer(
        application=Application(**APPLICATION),
        system=load_document(System, SYSTEM),
        space=space,
        objective="rate",
    ).price(space.digits(np.arange(space.size)))
    rates = np.sort(every.outcomes["sample_rate_per_s"][every.outcomes["ok"] != 0])[::-1]

    assert [point["sample_rate_per_s"] for point in found["top"]] == rates[:5].tolist()
    assert found["top"][0] == found["best"]
    assert len({str(point["execution"]) for point in found["top"]}) == 5
    assert run([*arguments, *more, "--top", "5"]) == 0
    shown = capsys.readouterr().out
    assert "Best 5 executions" in shown
    (last,) = (line for line in shown.splitlines() if line.startswith("5 "))
    assert last.split()[1] == f"{rates[4]:.5g}"


def test_a_point_that_is_asked_for_again_is_ranked_once() -> None:
    """Tuners that learn come back to points; a record of parts is that of the whole."""
    space = load_space(SPACE)
    pricer = Pricer(
        application=Application(**APPLICATION),
        system=load_document(System, SYSTEM),
        space=space,
        objective="rate",
        top=4,
    )
    digits = space.digits(np.random.default_rng(0).permutation(space.size))
    whole, parts, again = pricer.record(), pricer.record(), pricer.record()
    whole.add(pricer.price(digits))
    for rows in np.array_split(digits, 7):
        part = pricer.record()
        part.add(pricer.price(rows))
        parts.join(part)
    for row in [*digits[:64], *digits[:64]]:
        again.add(pricer.price(row[None]))
    few = pricer.record()
    few.add(pricer.price(digits[:64]))

    assert parts.ranked == whole.ranked
    assert again.ranked == few.ranked
    assert len(few.ranked) == 4


def test_random_points_that_are_all_of_them(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """None is drawn twice, so that nothing better is left, and the page says so."""
    assert run([*arguments, "--tuner", "random", "--evaluations", "20000"]) == 0
    shown = capsys.readouterr().out
    assert "9,216 evaluations of 9,216 points" in shown
    assert "Best execution\n" in shown
    assert "a better one may exist" not in shown
    assert run([*arguments, "--tuner", "random", "--evaluations", "9000"]) == 0
    assert "a better one may exist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "structure"),
    [({}, "llama"), ({"structure_type": "gpt"}, "gpt")],
    ids=["not said", "said"],
)
def test_blocks_are_those_of_the_model(
    more: dict[str, str],
    structure: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As in the other searches, a shipped model says how it is built where the space does not."""
    (tmp_path / "space.json").write_text(json.dumps(SPACE | more))
    assert run([*arguments[:2], "llama2-13b", *arguments[3:], "--json", "-"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["execution"]["structure_type"] == structure
