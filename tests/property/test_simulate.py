"""The event replay and the step time T of the cost model, on random pipelines.

`tests/unit/planning/layered/test_simulate.py` pins pipelines for which T is below the replay. The
draws here define those for which it is not.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from autopar.records import replace
from autopar.run.plan import PipelineType
from search.planning.cost import pipeline
from search.planning.cost.pipeline import replay
from tests.oracles import replay as oracle
from tests.oracles.reference import pipeline_time

EPS = 1e-9
DURATION = st.floats(0.0, 10.0).map(lambda x: round(x, 6))


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """Arguments of `replay`."""

    forward: list[float]
    backward: list[float]
    send: list[float]
    tail: list[float]
    m: int

    def formula(self, kind: PipelineType) -> float:
        """Return T in seconds."""
        return pipeline_time(self.forward, self.backward, self.send, self.tail, self.m, kind)

    def replay(self, kind: PipelineType) -> float:
        """Return the replayed step time in seconds."""
        done = replay(self.forward, self.backward, self.send, self.tail, self.m, kind)
        return done.step_time_s


@st.composite
def any_pipe(draw: st.DrawFn) -> Pipe:
    """Any pipeline that has at least as many micro-batches as stages."""
    p = draw(st.integers(1, 6))
    times = st.lists(DURATION, min_size=p, max_size=p)
    return Pipe(
        forward=draw(times),
        backward=draw(times),
        send=draw(st.lists(DURATION, min_size=p - 1, max_size=p - 1)),
        tail=draw(times),
        m=draw(st.integers(p, p + 8)),
    )


def comparable(seed: int, *, spread: float, send: float, full: int) -> Pipe:
    """Stages that differ by up to a factor 1 + spread, backward 1 to 3 times the forward."""
    r = random.Random(seed)
    p = r.randint(1, 8)
    forward = [r.uniform(1.0, 1.0 + spread) for _ in range(p)]
    ratio = (1.0, 3.0) if spread >= 0.5 else (1.95, 2.05)
    return Pipe(
        forward=forward,
        backward=[f * r.uniform(*ratio) for f in forward],
        send=[r.uniform(0.0, send * r.choice([0.1, 1.0])) for _ in range(p - 1)],
        tail=[r.uniform(0.0, 0.5) for _ in range(p)],
        m=r.randint(full * p, (full + r.choice([1, 7])) * p),
    )


@given(pipe=any_pipe(), kind=st.sampled_from(["1f1b", "gpipe"]))
def test_no_stage_is_early_and_none_overlaps(pipe: Pipe, kind: PipelineType) -> None:
    """The step holds all work of every stage, in an order that the dependencies allow."""
    result = replay(pipe.forward, pipe.backward, pipe.send, pipe.tail, pipe.m, kind, timeline=True)
    p = len(pipe.forward)
    assert result.timeline is not None
    assert len(result.timeline) == p * (2 * pipe.m + 1)
    end = {(e.stage, e.kind, e.microbatch): e.end_s for e in result.timeline}
    for j in range(p):
        own = sorted((e for e in result.timeline if e.stage == j), key=lambda e: e.start_s)
        for before, after in itertools.pairwise(own):
            assert before.end_s <= after.start_s + EPS
        busy = sum(e.end_s - e.start_s for e in own)
        assert result.idle_s[j] == pytest.approx(result.step_time_s - busy, abs=1e-6)
    for e in result.timeline:
        i, j = e.microbatch, e.stage
        if e.kind == "forward" and j:
            assert e.start_s >= end[j - 1, "forward", i] + pipe.send[j - 1] - EPS
        if e.kind == "backward":
            assert e.start_s >= end[j, "forward", i] - EPS
            if j < p - 1:
                assert e.start_s >= end[j + 1, "backward", i] + pipe.send[j] - EPS
    path = sum(pipe.forward) + sum(pipe.backward) + 2 * sum(pipe.send)
    assert result.step_time_s >= path - EPS
    assert result.step_time_s == max(end.values())


@given(
    pipe=any_pipe(),
    kind=st.sampled_from(["1f1b", "gpipe"]),
    what=st.sampled_from(["forward", "backward", "send", "tail"]),
    extra=DURATION,
)
def test_slower_parts_never_make_a_faster_step(
    pipe: Pipe, kind: PipelineType, what: str, extra: float
) -> None:
    """The order of work is fixed, so the step is monotone in every duration."""
    slower = {name: list(getattr(pipe, name)) for name in ("forward", "backward", "send", "tail")}
    if slower[what]:
        slower[what][0] += extra

    assert Pipe(m=pipe.m, **slower).replay(kind) >= pipe.replay(kind) - EPS


@given(pipe=any_pipe())
def test_every_1f1b_step_is_below_the_formula_with_both_bottlenecks(pipe: Pipe) -> None:
    """With max f + max g for max (f + g), T holds for any durations whatever."""
    p = len(pipe.forward)
    transfer = 2 * max(pipe.send, default=0.0) * (p - 1) / p
    bound = sum(pipe.forward) + sum(pipe.backward) + p * transfer + max(pipe.tail)
    bound += (pipe.m - 1) * (max(pipe.forward) + max(pipe.backward) + transfer)

    assert pipe.replay("1f1b") <= bound + EPS


@given(pipe=any_pipe())
def test_gpipe_is_exact_once_slow_links_count_as_bottlenecks(pipe: Pipe) -> None:
    """T with links among the maxima equals the replay, apart from tails that hide."""
    slowest = [max([*work, *pipe.send]) for work in (pipe.forward, pipe.backward)]
    exact = sum(pipe.forward) + sum(pipe.backward) + 2 * sum(pipe.send)
    exact += (pipe.m - 1) * sum(slowest)
    stage = Pipe(**{**vars(pipe), "tail": [0.0] * len(pipe.tail)})

    assert stage.replay("gpipe") == pytest.approx(exact, abs=1e-7)
    assert exact <= pipe.replay("gpipe") + EPS
    assert pipe.replay("gpipe") <= exact + max(pipe.tail) + EPS


@given(pipe=any_pipe())
def test_gpipe_formula_is_exact(pipe: Pipe) -> None:
    """T equals the replay when stage 0, which ends last, has the longest tail."""
    plain = Pipe(**{**vars(pipe), "tail": sorted(pipe.tail, reverse=True)})

    assert plain.formula("gpipe") == pytest.approx(plain.replay("gpipe"), abs=1e-7)


@pytest.mark.parametrize("send", [0.05, 0.5, 5.0])
def test_1f1b_formula_is_never_below_the_replay_for_comparable_stages(send: float) -> None:
    """Stages within a factor of two, backward 1 to 3 times the forward, any transfer."""
    for seed in range(2000):
        pipe = comparable(seed, spread=1.0, send=send, full=1)
        assert pipe.formula("1f1b") >= pipe.replay("1f1b") * (1 - 1e-12), pipe


@given(pipe=any_pipe())
def test_gpipe_formula_is_never_below_the_replay(pipe: Pipe) -> None:
    """Any durations and any links."""
    assert pipe.formula("gpipe") >= pipe.replay("gpipe") - EPS


BALANCED: dict[str, Callable[[int], Pipe]] = {
    "fast links": lambda seed: comparable(seed, spread=0.05, send=0.02, full=4),
    "slow links": lambda seed: comparable(seed, spread=0.05, send=0.1, full=4),
}


@pytest.mark.parametrize(
    ("draw", "kind", "median", "most"),
    [
        ("fast links", "1f1b", 0.01, 0.03),
        ("slow links", "1f1b", 0.03, 0.06),
        ("fast links", "gpipe", 0.002, 0.02),
        ("slow links", "gpipe", 0.002, 0.02),
    ],
)
def test_formula_is_within_a_few_per_cent_for_balanced_stages(
    draw: str, kind: PipelineType, median: float, most: float
) -> None:
    """Stages within 5 % of each other, at least four micro-batches per stage."""
    excess = []
    for seed in range(1000):
        pipe = BALANCED[draw](seed)
        excess.append(pipe.formula(kind) / pipe.replay(kind) - 1)

    assert min(excess) >= -1e-12
    assert statistics.median(excess) <= median
    assert max(excess) <= most


@settings(max_examples=300)
@given(
    times=st.lists(st.tuples(*[st.floats(0.0, 1e9) for _ in range(4)]), min_size=1, max_size=9),
    m=st.integers(1, 24),
    kind=st.sampled_from(["1f1b", "gpipe"]),
)
def test_the_compiled_replay_is_the_plain_one(
    times: list[tuple[float, ...]], m: int, kind: PipelineType
) -> None:
    """To the last bit, event by event: fewer micro-batches than stages and free work included."""
    forward, backward, send, tail = (list(column) for column in zip(*times, strict=True))
    plain = oracle.replay(forward, backward, send, tail, m, kind)

    assert replay(forward, backward, send, tail, m, kind, timeline=True) == plain
    assert replay(forward, backward, send, tail, m, kind) == replace(plain, timeline=None)


@settings(max_examples=60)
@given(
    times=st.lists(
        st.tuples(*[st.floats(min_value=0.0, max_value=2.0) for _ in range(4)]),
        min_size=1,
        max_size=6,
    ),
    pipeline_type=st.sampled_from(("1f1b", "gpipe")),
    extra=st.integers(min_value=1, max_value=400),
)
def test_a_long_step_follows_from_a_part_of_it(
    times: list[tuple[float, ...]], pipeline_type: PipelineType, extra: int
) -> None:
    """Equal to a replay of every micro-batch, for which a step of millions has no memory."""
    columns = [list(column) for column in zip(*times, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_MOST_MICROBATCHES", 0)
        num = 4 * len(times) + 840 + extra
        short = replay(*columns, num, pipeline_type)
    whole = replay(*columns, num, pipeline_type)
    assert short.step_time_s == pytest.approx(whole.step_time_s, rel=2e-3)
    assert short.idle_s == pytest.approx(whole.idle_s, abs=2e-3 * whole.step_time_s)
