"""Pictures of a predicted step: timelines that end when they should, and what pages are made of."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from autopar.errors import InputError
from autopar.pipeline.orders import actions
from autopar.price.assessment import Assessment, Target, assess
from autopar.price.peak import micro_batch_group
from autopar.rates.accuracy import load_accuracy
from autopar.records import replace
from autopar.run.run import Run
from search.planning.session import Session, open_session
from search.planning.uniform.answer import EngineResult, UniformResult, answer, open_launches
from search.request.request import build_request
from search.show.pictures.answers import answer_page, checked_page, plan_page
from search.show.pictures.charts import ticks
from search.show.pictures.memory import launch_memory, plan_memory
from search.show.pictures.page import Page, page_text
from search.show.pictures.timeline import Span, Timeline, launch_timeline, plan_timeline
from tests.run_cases import megatron_runs, some, titan_runs
from tests.step_cases import machine_named
from tests.unit.cli_results import PLAN, PREDICTION

_QUESTIONS = {
    "interleaved": {
        "model": "llama3-8b",
        "hardware": "h100:2x8",
        "engine": "megatron",
        "tp": "2",
        "pp": "4",
        "vpp": "4",
    },
    "one stage, fully sharded": {
        "model": "llama3-8b",
        "hardware": "h100:1x8",
        "engine": "torchtitan",
        "pp": "1",
        "zero": "3",
    },
    "experts with exchanges": {
        "model": "mixtral-8x7b",
        "hardware": "h200:1x8",
        "engine": "megatron",
        "num-layers": "8",
        "tp": "2",
        "ep": "4",
    },
    "sums behind each micro-batch": {
        "model": "llama3-8b",
        "hardware": "h100:1x8",
        "engine": "deepspeed",
        "zero": "2",
        "pp": "1",
    },
}


def _solved(question: dict[str, str]) -> tuple[UniformResult, EngineResult, Assessment]:
    asked = {"seq-length": "4096", "global-batch-size": "64", "top": "1", **question}
    found = answer(open_launches(build_request(asked)))
    best = found.best
    assert best is not None
    assert best.best is not None
    # of every stage, which a search does not count
    return found, best, assess(best.best.run, best.target)


@pytest.fixture(scope="module", params=_QUESTIONS.values(), ids=_QUESTIONS)
def solved(request: pytest.FixtureRequest) -> tuple[UniformResult, EngineResult, Assessment]:
    return _solved(request.param)


@pytest.fixture(scope="module")
def interleaved() -> tuple[UniformResult, EngineResult, Assessment]:
    return _solved(_QUESTIONS["interleaved"])


def _overlap(spans: Iterable[Span], allowed: float) -> list[Span]:
    """Return spans that begin before the one before them on their stream has ended."""
    found, ends = [], Counter[str]()
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        if span.start_s < ends[span.stream] - allowed or span.end_s < span.start_s - allowed:
            found.append(span)
        ends[span.stream] = max(ends[span.stream], span.end_s)
    return found


def _check_timeline(timeline: Timeline) -> None:
    step = timeline.step_s
    last = 0.0
    for track in timeline.tracks:
        for detailed in (None, timeline.detailed):
            spans = list(track.spans(detailed))
            assert _overlap(spans, 1e-9 * step) == []
            assert min(span.start_s for span in spans) >= 0.0
            last = max(last, *(span.end_s for span in spans))
        # pieces of a work fill it
        # the forward of a stage with an embedding alone takes no time in the model
        for kind in {work.kind for work in track.work if work.end_s > work.start_s}:
            assert sum(piece.share for piece in track.pieces[kind]) == pytest.approx(1.0)
        for pieces in filter(None, track.detail.values()):
            assert sum(piece.share for piece in pieces) == pytest.approx(1.0)
    assert last == pytest.approx(step, rel=1e-9)


def _seconds(timeline: Timeline, stage: int) -> Counter[str]:
    found = Counter[str]()
    for span in timeline.tracks[stage].spans():
        found[span.term] += span.end_s - span.start_s
    return found


def test_a_timeline_ends_with_the_predicted_step_and_no_stream_does_two_things_at_once(
    solved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = solved
    timeline = launch_timeline(assessment, best.target)
    assert assessment.step is not None
    assert timeline.step_s == assessment.step.total_s
    _check_timeline(timeline)


def test_the_stage_with_most_communication_divides_it(
    interleaved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    """Of 3 + 1 and 2 + 4 seconds the second has most; two thirds of the term are its gather."""
    _, best, assessment = interleaved
    step = assessment.step
    assert step is not None
    seconds = ((3.0, 1.0), (2.0, 4.0), (0.5, 0.5), (0.5, 0.5))
    stages = tuple(
        stage._replace(reduction_s=reduction, gather_s=gather)
        for stage, (reduction, gather) in zip(step.stages, seconds, strict=True)
    )
    terms = {**step.terms_s, "gradients": 3.0 + step.tied_s}
    changed = replace(step, stages=stages, terms_s=terms)
    timeline = launch_timeline(replace(assessment, step=changed), best.target)
    assert assessment.run.runtime.overlap.gradients
    begins_s = min(work.start_s for work in timeline.tracks[0].work)
    assert begins_s == pytest.approx(step.weight_cast_s + 2.0)


def test_spans_of_the_longest_stage_add_up_to_the_terms_of_the_step(
    solved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = solved
    step, run = assessment.step, assessment.run
    assert step is not None
    timeline = launch_timeline(assessment, best.target)
    assert not any("shortened" in note for note in timeline.notes)
    longest = max(range(len(step.stage_s)), key=step.stage_s.__getitem__)
    seconds = _seconds(timeline, longest)
    once = {"gradients", "optimizer", "stragglers", "bubble"}
    for term, value in step.terms_s.items():
        if term not in once:
            assert seconds[term] == pytest.approx(value, rel=1e-6, abs=1e-8 * step.total_s), term
    assert seconds["stragglers"] == pytest.approx(step.terms_s["stragglers"])
    # the stage whose update takes longest has the term
    updates = [_seconds(timeline, at)["optimizer"] for at in range(run.strategy.pp)]
    assert max(updates) == pytest.approx(step.terms_s["optimizer"])
    # what is no span of the longest stage is its bubble, and what gradients have to wait for
    busy = timeline.tracks[longest].busy_s
    early = run.strategy.micro_batches * step.early_reduction_s
    assert step.pipeline_s + early - busy == pytest.approx(
        step.terms_s["bubble"], abs=1e-6 * step.total_s
    )


def test_a_stage_does_its_work_in_the_order_of_its_schedule(
    interleaved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = interleaved
    run = assessment.run
    strategy = run.strategy
    for track in launch_timeline(assessment, best.target).tracks:
        order = actions(
            strategy.schedule,
            track.stage,
            stages=strategy.pp,
            chunks=strategy.vpp,
            micro_batches=strategy.micro_batches,
            group=micro_batch_group(run),
            ahead=int(run.runtime.overlap.experts),
        )
        assert [(work.kind, work.chunk, work.micro_batch) for work in track.work] == order
        assert track.layers == tuple(chunk.layers for chunk in strategy.stages[track.stage])


def test_ranks_of_all_stages_are_all_ranks(
    interleaved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = interleaved
    tracks = launch_timeline(assessment, best.target).tracks
    ranks = [rank for track in tracks for rank in range(track.first_rank, track.last_rank + 1)]
    assert ranks == list(range(16))
    assert tracks[1].ranks == "ranks 4-7"


def test_a_micro_batch_layer_by_layer_has_every_layer_of_the_model(
    interleaved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = interleaved
    timeline = launch_timeline(assessment, best.target)
    for kind in "FB":
        layers = {
            span.layer
            for track in timeline.tracks
            for span in track.spans(timeline.detailed)
            if span.work is not None
            and (span.work.kind, span.work.micro_batch) == (kind, timeline.detailed)
        }
        assert layers - {None} == set(range(32))


def _target(card: str, stack: str) -> Target:
    machine = machine_named(card, stack)
    return Target(machine=machine, accuracy=load_accuracy(), site_known=False, oom_risk=0.01)


_MEGATRON, _TITAN = _target("h100-80gb", "megatron-core"), _target("h100-80gb", "torchtitan-eager")


@pytest.mark.whole
@given(run=st.one_of(megatron_runs(), titan_runs()))
@settings(max_examples=40, deadline=None)
def test_any_run_with_a_step_time_has_a_timeline_and_its_memory(run: Run) -> None:
    """Of random runs: the step's end, no overlap, and the peak that its account has."""
    strategy = run.strategy
    assume(strategy.micro_batches * strategy.pp * strategy.vpp <= 2_000)
    target = _TITAN if run.kernels.torch_layers else _MEGATRON
    try:
        assessment = assess(run, target)
    except InputError:
        assume(False)
    assume(assessment.step is not None)
    timeline = launch_timeline(assessment, target)
    _check_timeline(timeline)
    odds = [0.0] * strategy.pp
    for account, memory in zip(
        assessment.accounts,
        launch_memory(run, assessment.accounts, timeline, odds),
        strict=True,
    ):
        between = sum(memory.rows[0])
        assert between == pytest.approx(account.states_bytes)
        if account.peak_bytes > account.states_bytes:
            assert max(memory.peak_bytes, between) <= account.peak_bytes * (1 + 1e-9)


def test_memory_over_the_step_reaches_the_peak_of_every_stage(
    solved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    _, best, assessment = solved
    timeline = launch_timeline(assessment, best.target)
    odds = [0.0] * len(timeline.tracks)
    found = launch_memory(assessment.run, assessment.accounts, timeline, odds)
    for account, memory, track in zip(assessment.accounts, found, timeline.tracks, strict=True):
        assert memory.peak_bytes == account.peak_bytes
        assert len(memory.at) == len(track.work)
        assert sum(memory.fullest.values()) == account.peak_bytes


# --------------------------------------------------------------------------------------------------
# Plans whose layers may differ


@pytest.fixture(scope="module")
def planned() -> tuple[Session, Page]:
    request = build_request(
        {
            "model": "llama3-8b",
            "hardware": "a100-80gb:1x8",
            "seq-length": "4096",
            "global-batch-size": "32",
            "pin": ["pp=2"],
        }
    )
    session = open_session(request.inputs, request.options, request.given)
    result = session.planner.solve()
    assert result.plan is not None
    assert result.prediction is not None
    timeline = plan_timeline(result.plan, result.prediction)
    _check_timeline(timeline)
    memory = plan_memory(result.prediction, timeline)
    for stage, found in zip(result.prediction.stages, memory, strict=True):
        assert found.peak_bytes == pytest.approx(stage.allocated_bytes)
    # messages between stages run beside what comes next
    sends = [span for span in timeline.tracks[0].spans() if span.term == "transfer"]
    assert len(sends) == result.plan.num_microbatches
    page = plan_page(session, result.plan, result.prediction, state="the fastest", result=result)
    return session, page


def test_a_plan_has_the_same_page(planned: tuple[Session, Page]) -> None:
    _, page = planned
    text = page_text(page)
    seen = _Seen(text)
    assert "Alternatives" in seen.headings
    assert seen.tags["canvas"] == 2
    assert sum(value for _, _, value in page.waterfall) == pytest.approx(page.timeline.step_s)


def test_a_page_of_a_plan_has_the_rates_and_no_place_of_a_machine(
    planned: tuple[Session, Page],
) -> None:
    """Rates of a GPU with their ends, as launches have; inputs by their place among the shipped."""
    _, page = planned
    facts = {fact.label: fact for fact in page.facts}
    assert re.fullmatch(r"[\d,]+ to [\d,]+; [\d,]+ on \d+ GPUs", facts["Tokens/s/GPU"].note)
    assert re.fullmatch(r"[\d.]+ to [\d.]+, of the bf16 peak", facts["MFU"].note)
    assert page.inputs
    assert all(not value.startswith("/") for _, value in page.inputs)


def test_a_plan_that_cannot_run_has_no_picture() -> None:
    impossible = replace(PREDICTION, stages=(), problems=("tp 3 does not divide 16 heads",))
    with pytest.raises(InputError, match="tp 3 does not divide"):
        plan_timeline(PLAN, impossible)


# --------------------------------------------------------------------------------------------------
# Pages


class _Seen(HTMLParser):
    """What a page is made of; raises AssertionError where a tag is not closed in its place."""

    _EMPTY = frozenset({"meta", "br", "line", "polyline", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags = Counter[str]()
        self.headings: list[str] = []
        self.ids = Counter[str]()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids[value or ""] += 1
        if tag not in self._EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        inner = self._open.pop()
        # these may be left open
        while inner != tag and inner in ("td", "th", "tr", "li", "p"):
            inner = self._open.pop()
        assert inner == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "h2":
            self.headings.append(data)
        if self._open and self._open[-1] not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def page(interleaved: tuple[UniformResult, EngineResult, Assessment]) -> Page:
    return answer_page(interleaved[0], curves=False)


def test_a_page_has_all_of_an_answer(
    page: Page, interleaved: tuple[UniformResult, EngineResult, Assessment]
) -> None:
    seen = _Seen(page_text(page))
    for heading in (
        *("Step time by term", "Peak memory per GPU", "Limits", "Layers by stage"),
        *("Alternatives", "Basis and 90 % intervals", "Defaults", "Inputs"),
        "Not modelled or not searched",
    ):
        assert heading in seen.headings
    words = " ".join(seen.texts)
    step = interleaved[2].step
    assert step is not None
    assert f"Megatron-LM: {page.line.partition(': ')[2]}" in words
    assert [fact.label for fact in page.facts] == [
        *("Step time", "Tokens/s/GPU", "MFU", "Peak allocated", "OOM probability")
    ]
    for fact in page.facts:
        assert fact.value in words
    # rates have the ends of the step's interval, the slowest first
    interval, mfu = interleaved[2].interval_s, interleaved[2].mfu
    assert interval is not None
    assert mfu is not None
    least, most = (100.0 * mfu * step.total_s / end for end in reversed(interval))
    assert f"{least:.1f} to {most:.1f}, of the bf16 peak" in words
    slowest = max(range(4), key=step.stage_s.__getitem__)
    above = re.search(rf"stage {slowest} is the slowest, (\d+\.\d) % above the mean", words)
    assert above is not None
    mean_s = sum(step.stage_s) / 4
    assert float(above[1]) == pytest.approx(100 * (max(step.stage_s) / mean_s - 1), abs=0.06)
    # every stage in every table, every id once
    for stage in range(4):
        assert f"stage {stage}" in words
    assert set(seen.ids.values()) == {1}
    assert sum(value for _, _, value in page.waterfall) == pytest.approx(step.total_s)


def test_a_page_loads_nothing(page: Page) -> None:
    text = page_text(page)
    for tag, name, value in _Seen(text).attributes:
        assert name not in ("src", "href", "action", "srcset"), (tag, value)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_the_packed_events_are_those_of_the_timeline(page: Page) -> None:
    text = page_text(page)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    found = json.loads(data)
    assert found["step"] == page.timeline.step_s
    for packed, track, memory, stage in zip(
        found["tracks"],
        page.timeline.tracks,
        found["memory"]["stages"],
        page.memory,
        strict=True,
    ):
        starts = np.frombuffer(base64.b64decode(packed["start"]), dtype="<f4")
        codes = np.frombuffer(base64.b64decode(packed["code"]), dtype="<u4")
        assert starts == pytest.approx([work.start_s for work in track.work], rel=1e-6)
        assert [("FBIW"[code & 3], code >> 2 & 255, code >> 10) for code in codes.tolist()] == [
            (work.kind, work.chunk, work.micro_batch) for work in track.work
        ]
        at = np.frombuffer(base64.b64decode(memory["at"]), dtype="<u2")
        totals = np.array([sum(row) for row in memory["rows"]])
        assert totals[at].max() == pytest.approx(stage.peak_bytes)


def test_names_of_somebody_else_end_no_script_and_make_no_tag() -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    target = _MEGATRON
    run = next(
        case
        for case in some(megatron_runs(), 20)
        if assess(case, target).step is not None and case.strategy.micro_batches < 64
    )
    page = checked_page(assess(run, target), target, title=hostile, line=hostile)
    text = page_text(page)
    seen = _Seen(text)
    assert seen.tags["img"] == 0
    assert seen.tags["script"] == 2
    assert hostile in " ".join(seen.texts)


@pytest.mark.whole
def test_other_batches_and_clusters_have_their_own_fastest_launch(
    interleaved: tuple[UniformResult, EngineResult, Assessment],
) -> None:
    found = interleaved[0]
    page = answer_page(found, curves=True)
    (section,) = [one for one in page.sections if one.heading.startswith("Other batches")]
    assert section.content.count("<svg") == 2
    # 16 GPUs in two machines, half as many and twice as many
    for row in ('<th scope="row" class="n">8</th>', '<th scope="row" class="n">32</th>'):
        assert row in section.content


@given(
    low=st.floats(-1e6, 1e9, allow_nan=False),
    span=st.floats(1e-3, 1e9),
    number=st.integers(2, 9),
)
def test_ticks_are_round_and_hold_what_is_shown(low: float, span: float, number: int) -> None:
    assume(span > 1e-6 * abs(low))
    high = low + span
    found = ticks(low, high, number)
    step = found[1] - found[0]
    assert found[0] <= low + 1e-6 * step
    assert found[-1] >= high - 1e-6 * step
    assert 2 <= len(found) <= 2 * number + 2
    unit = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(unit - round_one) for round_one in (1, 2, 2.5, 5, 10)) < 1e-3
