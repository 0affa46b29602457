"""Pictures of `autopar-explore`: what is drawn is inside of the axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.records import replace
from search.closed_form.answers import Answer, Part, Point
from search.closed_form.calculon.exploration import Space, explore
from search.closed_form.files import calculon_system, load_application
from search.closed_form.pictures import save_pictures

pytest.importorskip("matplotlib", reason="needs the extra plot")


def answer(processors: int, seconds: float, parts: dict[str, float]) -> Answer:
    """Return one whose best execution takes its time for these shares."""
    point = Point(
        execution={},
        degrees="t1",
        switches="",
        time_s=seconds,
        rate_per_s=1 / seconds,
        memory_bytes=2.0**30,
        statistics={},
        time=tuple(Part(name=name, amount=share * seconds) for name, share in parts.items()),
        memory=(Part(name="weights", amount=2.0**30),),
    )
    return Answer(
        processors=processors,
        best=(point,),
        considered=1,
        feasible=1,
        rejected={},
        capacity_bytes=2.0**31,
    )


def test_lengths_of_bars_that_lack_the_last_part(tmp_path: Path) -> None:
    """Behind every bar is how long it takes, though parts of it are too thin to be drawn."""
    one = answer(8, 3.125, {"forward": 0.993, "optimizer": 0.004, "waiting": 0.003})
    two = answer(16, 1.625, {"forward": 0.9, "optimizer": 0.004, "waiting": 0.003, "bubble": 0.093})
    save_pictures(
        str(tmp_path), [one, two], title="any", unit="processor", paths=(), formats=("svg",)
    )
    picture = (tmp_path / "breakdown.svg").read_text(encoding="utf-8")
    assert "3.125 s" in picture
    assert "1.625 s" in picture


@pytest.mark.whole
def test_a_map_of_degrees(tmp_path: Path) -> None:
    """Every rate is in its cell; what cannot run and what does not exist look different."""
    degrees = {(1, 1): 10.0, (1, 2): 12.5, (2, 1): None}
    found = replace(answer(4, 0.08, {"forward": 1.0}), degrees=degrees)
    save_pictures(str(tmp_path), [found], title="any", unit="processor", paths=(), formats=("svg",))
    picture = (tmp_path / "degrees.svg").read_text(encoding="utf-8")
    for words in (
        *("10", "12.5", "pipeline degree, stages", "tensor degree, processors", "samples/s"),
        *("none can run", "no such pair in the space", "the best of all"),
    ):
        assert f">{words}<" in picture
    full = replace(found, degrees={(1, 1): 10.0, (1, 2): 12.5})
    save_pictures(str(tmp_path), [full], title="any", unit="GPU", paths=(), formats=("svg",))
    assert "none can run" not in (tmp_path / "degrees.svg").read_text(encoding="utf-8")


def test_rates_of_degrees_are_the_best_of_all_executions() -> None:
    """Of each pair what the best of its points has, whatever bounds a search uses."""
    space = Space(num_procs=8, max_batch=16, offload=False)
    points: list[tuple[int, int, float]] = []

    def collect(executions: Any, outcomes: Any) -> None:
        columns = executions["tensor_par"], executions["pipeline_par"]
        points.extend(zip(*columns, outcomes["sample_rate_per_s"], strict=True))

    documents = load_application("gpt-6.7b").application, calculon_system("a100")
    explore(*documents, space, each=collect)
    best: dict[tuple[int, int], float] = {}
    for t, p, rate in points:
        best[int(t), int(p)] = max(best.get((int(t), int(p)), 0.0), float(rate))
    found = explore(*documents, space, top=1, degrees=True, threads=2)

    kept = {pair: row for pair, row in found.degrees.items() if row is not None}
    assert kept == best
    assert len(best) > 4
    assert found.best == explore(*documents, space, top=1).best


def test_executions_have_different_words() -> None:
    """Two executions of a list differ in their words, also without tensor ranks."""
    documents = load_application("llama2-7b").application, calculon_system("h100")
    found = explore(*documents, Space(num_procs=4, max_batch=16), top=300, threads=2).best
    words = [f"{one.degrees}, {one.switches}" for one in found]
    assert len(words) == 300
    assert len({*words}) == len(words)
