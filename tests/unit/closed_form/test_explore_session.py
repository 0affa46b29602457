"""A search that Ctrl-C meets at its last moment."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from search.closed_form.answers import Answer, Point, SearchCallbacks
from search.closed_form.questions import Search
from search.commands.explore import AnswerSpec, Question, execute

POINT = Point(
    execution={"num_procs": 1},
    degrees="t1 p1 d1",
    switches="b1",
    time_s=1.0,
    rate_per_s=1.0,
    memory_bytes=1.0,
    statistics={"total_time": 1.0},
)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_file_that_lacks_points_has_no_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], interrupted: bool
) -> None:
    """The search itself is over, and half of its points are written, when Ctrl-C comes."""
    path = tmp_path / "all.csv"
    stopped: list[Callable[[], bool]] = []

    class Small:
        """A search of two points."""

        label = "1 processor"
        values = ()

        def run(self, watched: SearchCallbacks) -> Answer:
            assert watched.each is not None
            assert watched.stop is not None
            stopped.append(watched.stop)
            watched.each(np.empty(0), np.empty(0))
            return Answer(
                processors=1,
                best=(POINT,),
                considered=2,
                feasible=2,
                rejected={},
                capacity_bytes=2.0,
            )

        def columns(self, *, statistics: bool) -> Callable[..., Iterator[dict[str, list[str]]]]:
            def pieces(*arrays: Any) -> Iterator[dict[str, list[str]]]:
                yield {"num_procs": ["1"]}
                if interrupted:
                    _thread.interrupt_main()
                    until_s = time.monotonic() + 30
                    while not stopped[0]():
                        assert time.monotonic() < until_s
                        time.sleep(0.01)
                yield {"num_procs": ["2"]}

            return pieces

    question = Question(
        name="small",
        system="machine",
        unit="processor",
        legend="",
        axes=(),
        searches=(cast(Search, Small()),),
        notes={},
    )
    code = execute(question, AnswerSpec(all=str(path)))

    out, err = capsys.readouterr()
    assert "t1 p1 d1" in out
    if interrupted:
        assert code == 130
        assert not path.exists()
        assert Path(f"{path}.part").read_text() == "num_procs\n1\n"
        assert "all.csv.part, rows: 1\n" in err
    else:
        assert code == 0
        assert path.read_text() == "num_procs\n1\n2\n"
        assert err == f"autopar-explore: wrote {path}, rows: 2\n"
