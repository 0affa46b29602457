"""The record that both searches fill: its parts add up, whichever plan it is of."""

from __future__ import annotations

import io

import pytest

from autopar.answer import Answer, Gain, Price, RequestedPlan, StagePrice
from autopar.command.console import make_console
from autopar.units import GIB
from search.planning.choose import chosen
from search.planning.layered.summary import summary_of as of_plan
from search.planning.session import open_session
from search.planning.uniform.summary import summary_of as of_launches
from search.request.request import build_request
from search.show.summary import SCREEN_WIDTH, figure_lines, memory_figures
from search.show.terminal import show_answer, show_explained

_ASKED = {
    "model": "llama3-8b",
    "hardware": "h100:1x8",
    "num-layers": "4",
    "global-batch-size": "64",
    "pp": "2",
}


@pytest.fixture(scope="module", params=["megatron", "galvatron"])
def answer(request: pytest.FixtureRequest) -> Answer:
    """Return the answer of a trainer's launches and that of per-layer plans."""
    found = chosen(build_request({**_ASKED, "engine": request.param}))
    if not found.layers_differ:
        assert found.launches is not None
        return of_launches(found.launches)
    asked = found.request
    session = open_session(asked.inputs, asked.options, asked.given)
    result = session.solve()
    assert result.plan is not None
    assert result.prediction is not None
    throughput = session.throughput(result.plan, result.prediction)
    return of_plan(result, title=session.title, throughput=throughput)


def test_terms_add_up_to_the_step_and_to_the_peak(answer: Answer) -> None:
    price = answer.best.price
    assert price.throughput is not None
    assert sum(price.terms_s.values()) == pytest.approx(price.throughput.step_s)
    rate = price.global_batch / price.throughput.step_s
    assert price.samples_per_s == pytest.approx(rate)
    assert len(price.stage_s) == 2
    for stage in price.stages:
        assert sum(stage.terms_bytes.values()) == pytest.approx(stage.peak_bytes)
        low, high = stage.reserved_bytes
        assert low <= high
        assert stage.steady_bytes <= stage.peak_bytes < stage.budget_bytes
    assert price.fits
    assert price.fullest.peak_bytes == max(stage.peak_bytes for stage in price.stages)


def test_a_plan_is_as_long_as_itself(answer: Answer) -> None:
    assert set(answer.best.price.term_differences(answer.best.price).values()) == {0.0}


def test_no_other_plan_is_faster_by_more_than_the_choice_may_cost(answer: Answer) -> None:
    rates = [one.samples_per_s for one in answer.others]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) > 0
    most = 1.0 if answer.best.fastest else 1.01
    assert rates[0] <= most * answer.best.price.samples_per_s


def test_one_report_has_all_of_it(answer: Answer) -> None:
    stream = io.StringIO()
    show_answer(make_console(stream, SCREEN_WIDTH), answer)
    shown = stream.getvalue()
    for part in (
        *("Fastest plan", "Other degrees", "Step time by term", "Memory per GPU"),
        *("Search space", "Basis", "Optimality", "- default: "),
    ):
        assert f"\n{part}" in shown.replace("\n  ", "\n"), part
    # strategies by stage are of per-layer plans
    assert ("\nLayers by stage\n" in shown) == (answer.best.layered is not None)


def test_an_explained_plan_is_compared_first(answer: Answer) -> None:
    none = RequestedPlan("pp=3", None, "4 layers have no 3 stages")
    itself = RequestedPlan("", answer.best, "")
    stream = io.StringIO()
    gains = [Gain("+1 GiB", 1.0, 0.02, same_plan=True)]
    show_explained(make_console(stream, SCREEN_WIDTH), answer, [none], itself, gains)
    shown = stream.getvalue()
    places = [
        shown.index(part)
        for part in (
            *("Why not pp=3: no plan\n  4 layers have no 3 stages", "Verdict    fits"),
            *("Fastest plan: it is this plan", "+1 GiB: +2.000 % throughput"),
        )
    ]
    assert places == sorted(places)


def test_the_memory_row_names_what_is_allocated_and_what_is_reserved() -> None:
    """An estimate below its interval is told apart from it: with torch layers it always is."""
    stage = StagePrice(0, 4e10, 50.95 * GIB, (54.51 * GIB, 62.67 * GIB), 79.65 * GIB, 0.01, ())
    price = Price(
        throughput=None, samples_per_s=1.0, terms_s={}, stage_s=(), global_batch=1,
        micro_batches=1, stages=(stage,), oom_probability=0.01, verdict="fits", basis=(),
        reserve_bytes=GIB, reserve_of="CUDA and NCCL",
    )  # fmt: skip
    memory, risk = memory_figures(price)
    assert "allocated" in memory.label
    assert memory.estimate == "50.95 GiB"
    assert memory.interval == "54.51 to 62.67"
    assert "reserved" in memory.more
    lines = figure_lines([memory, risk], SCREEN_WIDTH)
    assert len(lines) == 3
    assert max(map(len, lines)) <= SCREEN_WIDTH
