"""Pictures of `autopar-explore`: what is drawn is inside of the axes."""

from __future__ import annotations

from pathlib import Path

import pytest

from search.closed_form.pictures import save_pictures
from search.closed_form.questions import Answer, Part, Point

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
