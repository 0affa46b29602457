"""What a report says of its inputs: which are no measurements, what is odd, how far they spread."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from autopar.command.console import make_console
from autopar.documents.hardware import write_hardware
from autopar.rates.card import estimate_hardware
from autopar.records import replace
from autopar.sources import Source
from search.commands import search as cli
from search.planning.layered.summary import summary_of
from search.show.terminal import show_answer, show_given
from tests.unit.cli_results import PLAN, PREDICTION, RESULT, make_session

MODEL = Source(role="computation", path="c.json")
HARDWARE = Source(role="sp_time sidecar", path="s.json.meta.json")
CARD = Source(role="hardware card", path="a100", estimated=True)
SPEC = Source(role="model spec", path="toy", estimated=True)


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ((CARD, SPEC), "ESTIMATES from datasheets"),
        ((CARD, MODEL), "ESTIMATES of the hardware from datasheets"),
        (
            (HARDWARE, replace(MODEL, estimated=True)),
            "ESTIMATES of the model from datasheets",
        ),
        (
            (replace(HARDWARE, synthetic=True), SPEC),
            "SYNTHETIC timings of the hardware, which describe no machine",
        ),
        ((replace(HARDWARE, synthetic=True), SPEC), "ESTIMATES of the model from"),
    ],
)
def test_the_report_says_which_inputs_are_estimated(sources: tuple[Source, ...], said: str) -> None:
    """Of both none is named, else the one that is, in a search and in an evaluation."""
    marks = {
        "estimated": any(source.estimated for source in sources),
        "synthetic": any(source.synthetic for source in sources),
    }
    for evaluation in (False, True):
        stream = io.StringIO()
        console = make_console(stream)
        if evaluation:
            session = make_session()
            own = replace(session.hardware, sources=sources, **marks)
            session = replace(session, hardware=own)
            show_given(console, session.summary(PLAN, PREDICTION, (), None))
        else:
            found = replace(RESULT, sources=sources, **marks)
            show_answer(console, summary_of(found, title="toy"))
        assert said in stream.getvalue()


def test_an_evaluation_shows_what_is_odd_about_the_files(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A coefficient below 1 is read as 1, and somebody who prices a plan reads that too."""
    folder = tmp_path / "hardware"
    write_hardware(estimate_hardware("a100-80gb", num_nodes=1, gpus_per_node=4), folder)
    (folder / "overlap_coefficient.json").write_text('{"overlap_coe": 0.9}')
    profile = str(root / "models" / "llama2-7b" / "configs")
    inputs = [
        *("--model", "llama2-7b", "--hardware", str(folder)),
        *("--memory-profiling-path", profile, "--time-profiling-path", profile),
    ]
    plan = tmp_path / "plan.json"

    assert cli.run([*inputs, "--output-config-path", str(plan)]) == 0
    assert "about the inputs (--verbose)" in capsys.readouterr().out
    assert cli.run([*inputs, "--output-config-path", str(plan), "--verbose"]) == 0
    said = "overlap_coefficient.json: overlap_coe 0.9 is below 1 and was read as 1"
    assert said in capsys.readouterr().out
    assert cli.run([*inputs, "--evaluate", str(plan)]) == 0
    assert said in capsys.readouterr().out


def test_a_spread_that_no_digit_shows_is_no_interval() -> None:
    """A plan whose communication is hidden, or that has none, stays where it is."""
    still = replace(PREDICTION, step_time_s=0.16, step_time_interval_s=(0.16, 0.160001))
    stream = io.StringIO()
    session = make_session()
    found = replace(RESULT, prediction=still)
    throughput = session.throughput(PLAN, still)
    show_answer(make_console(stream), summary_of(found, title="toy", throughput=throughput))
    shown = stream.getvalue()
    (step,) = (line.split() for line in shown.splitlines() if line.startswith("  Step time"))
    assert step == ["Step", "time", "160", "ms", "160", "100", "samples/s"]
    assert "interval from the measured spread of communication\n" in shown
