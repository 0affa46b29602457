"""Properties of the planner and of T: replay, budgets, pins and re-solving, on many problems."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, strategies as st

from autopar.errors import OptionError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from autopar.units import divisors
from benchmarks.bench_galvatron_cases import inputs_of
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.planning.session import Session, open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from tests.often import often

NUM_PLANS = int(os.environ.get("AUTOPAR_REPLAY_PLANS", "500"))
GIB = 2.0**30
ESTIMATED = (
    ("llama2-7b", "a100-80gb:1x8"),
    ("llama3-8b", "h100:2x8"),
    ("llama2-13b", "h100:1x6"),
    ("t5-3b", "h100:1x8"),
    ("gpt2-xl", "h100:3x8"),
)
CASES = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "cases" / "galvatron"
PUBLISHED = "published llama2-7b"


@cache
def opened(name: str, hardware: str, pipeline: str = "1f1b") -> Session:
    """Return a session; the planner of it is never solved twice with other options."""
    inputs = InputSpec(model=name, hardware=hardware or None)
    mode = "static"
    if name == PUBLISHED:
        inputs, mode = inputs_of(CASES), "batch"
    options: dict[str, Any] = {"sp_space": "tp+sp", "default_dp_type": "zero2", "top": 0}
    options |= {"settle_bsz": 48, "time_profile_mode": mode, "pipeline_type": pipeline}
    return open_session(inputs, SearchOptions(**options))


def random_plan(session: Session, rng: random.Random) -> Plan | None:
    """Return a random legal plan of all possible combinations, None for an illegal draw."""
    world, layers = session.hardware.world_size, session.spec.num_layers
    p = rng.choice([d for d in divisors(world) if d <= layers])
    ranks = world // p
    kinds = [
        LayerStrategy(tp=t, ulysses=u and t > 1, zero3=z, checkpoint=k)
        for t in divisors(ranks)
        if t <= 8
        for u, z, k in itertools.product((False, True), repeat=3)
        if not (z and ranks == t and not (u and t > 1))  # nothing to shard over
    ]
    few = rng.sample(kinds, min(len(kinds), rng.choice((1, 2, 3, 6))))
    chosen: list[LayerStrategy] = []
    while len(chosen) < layers:
        run = rng.choice((1, 2, 8, layers))
        chosen += [rng.choice(few)] * min(run, layers - len(chosen))
    cuts = sorted(rng.sample(range(1, layers), p - 1))
    if rng.random() < 0.5:  # as even as possible: what plans look like
        cuts = [layers * j // p for j in range(1, p)]
    sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, layers]))
    m = rng.choice((p, p + 1, 2 * p, 3 * p + 1, 8 * p))
    lengths = tuple(layer.seq_length for layer in session.spec.layers)
    known = session.profile.other_memory["only"][lengths]
    degree = rng.choice([t for t in divisors(ranks) if t in known.model_state_bytes])
    ulysses = degree > 1 and rng.random() < 0.3
    vocab = VocabStrategy(
        tp=degree,
        ulysses=ulysses,
        zero3=(ulysses or degree < ranks) and rng.random() < 0.3,
    )
    least = max(ranks // t for t in {degree, *(s.tp for s in chosen)})
    plan = Plan(
        world_size=world,
        num_stages=p,
        stage_sizes=sizes,
        layers=tuple(chosen),
        vocab=vocab,
        global_batch=m * least * rng.choice((1, 1, 2, 4)),
        num_microbatches=m,
        pipeline_type=session.options.pipeline_type,
        default_dp_type=rng.choice(("ddp", "zero2")),
    )
    return None if violations(plan, session.spec, sequence_parallel=True) else plan


def draws(pipeline: str, number: int, published: bool) -> Iterator[tuple[Session, Plan]]:
    """Yield `number` legal plans over all inputs, always the same ones."""
    rng = random.Random(20)
    inputs = [*ESTIMATED, *([(PUBLISHED, "")] if published else [])]
    made = 0
    while made < number:
        session = opened(*inputs[made % len(inputs)], pipeline)
        plan = random_plan(session, rng)
        if plan is not None:
            made += 1
            yield session, plan


@pytest.mark.whole
@pytest.mark.parametrize("number", [80, pytest.param(NUM_PLANS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
def test_step_time_is_never_below_the_replay(pipeline: str, number: int) -> None:
    """For random legal plans, good and bad, T is an upper bound of the replay.

    GPipe's formula is exact up to the tail, which it takes from the slowest stage.
    """
    excess: list[float] = []
    stages: set[int] = set()
    for session, plan in draws(pipeline, number, CASES.is_dir()):
        found = session.planner.evaluate(plan)
        assert found.legal
        assert found.replay_s > 0.0
        excess.append(found.step_time_s / found.replay_s - 1.0)
        stages.add(plan.num_stages)
        assert excess[-1] > -1e-9, plan
        if pipeline == "gpipe":
            tail_s = max(stage.tail_s for stage in found.stages)
            assert found.step_time_s - found.replay_s <= tail_s + 1e-9 * found.replay_s
    print(
        f"\n{pipeline}: {len(excess)} random plans, T over replay: median "
        f"{statistics.median(excess):.2%}, largest {max(excess):.2%}"
    )

    assert len(excess) == number
    assert len(stages) >= 4


@pytest.mark.whole
@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
@pytest.mark.parametrize("slower", [10.0, 1000.0])
def test_slow_links_do_not_put_the_replay_above(pipeline: str, slower: float) -> None:
    """Also where transfers and not stages are the bottleneck."""
    session = opened("llama3-8b", "h100:2x8", pipeline)
    p2p = {p: rate / slower for p, rate in session.hardware.p2p_bytes_per_s.items()}
    planner = session.rebuilt(hardware=replace(session.hardware, p2p_bytes_per_s=p2p))
    rng = random.Random(1)
    checked = 0
    while checked < 60:
        plan = random_plan(session, rng)
        if plan is None or plan.num_stages == 1:
            continue
        found = planner.evaluate(plan)
        assert found.step_time_s >= found.replay_s * (1 - 1e-9), plan
        checked += 1


def speed(result: SearchResult) -> float:
    """Return the throughput of an answer, after checking the properties of every answer."""
    if result.prediction is None:
        assert result.status == "infeasible"
        return 0.0
    assert result.status == "optimal"
    assert result.gap == 0.0
    assert result.prediction.legal
    assert result.prediction.fits
    assert result.prediction.step_time_s >= result.prediction.replay_s * (1 - 1e-9)
    return result.prediction.samples_per_s


def drawn(draw: st.DrawFn) -> tuple[Session, dict[str, Any]]:
    """Return a session and options of a search that differs from it."""
    session = opened(*draw(st.sampled_from(ESTIMATED)))
    options: dict[str, Any] = {
        "settle_bsz": draw(st.sampled_from((16, 24, 48, 64))),
        "default_dp_type": draw(st.sampled_from(("ddp", "zero2", "any"))),
        "pipeline_type": draw(st.sampled_from(("1f1b", "1f1b", "gpipe"))),
        "sp_space": draw(st.sampled_from(("tp", "tp+sp"))),
        "async_grad_reduce": draw(st.booleans()),
        "memory_constraint_bytes": draw(st.floats(4.0, 80.0)) * GIB,
    }
    return session, {**vars(session.options), **options}


searches = st.composite(drawn)()


def planner_of(session: Session, options: dict[str, Any]) -> Planner:
    """Return a fresh planner."""
    return session.rebuilt(options=SearchOptions(**options))


@pytest.mark.whole
@often(15, 60, searches, st.lists(st.floats(2.0, 80.0), min_size=1, max_size=4))
def test_resolving_is_as_a_fresh_search(
    search: tuple[Session, dict[str, Any]], budgets_gib: list[float]
) -> None:
    """After earlier searches, the answer, its bound and its reason are those of a new planner."""
    session, options = search
    planner = planner_of(session, options)
    speed(planner.solve())
    for gib in budgets_gib:
        again = planner.solve(gib * GIB)
        fresh = planner_of(session, {**options, "memory_constraint_bytes": gib * GIB}).solve()
        assert speed(again) == speed(fresh)
        assert again.plan == fresh.plan
        assert again.prediction == fresh.prediction
        assert again.infeasibility == fresh.infeasibility
        assert again.options == fresh.options


@pytest.mark.whole
@often(10, 30, searches, st.sampled_from((16, 24, 32, 64)))
def test_batches_may_change_between_solves(
    search: tuple[Session, dict[str, Any]], batch: int
) -> None:
    """Other batch sizes on the same planner: as a fresh one; several together: the best of them."""
    session, options = search
    planner = planner_of(session, options)
    first = options["settle_bsz"]
    alone = {first: speed(planner.solve())}
    alone[batch] = speed(planner.solve(global_batch_sizes=(batch,)))
    fresh = planner_of(session, {**options, "settle_bsz": batch}).solve()
    both = speed(planner.solve(global_batch_sizes=tuple(sorted({first, batch}))))

    assert alone[batch] == speed(fresh)
    assert both == pytest.approx(max(alone.values()), rel=1e-12)


@often(12, 40, searches, st.floats(0.0, 20.0))
def test_more_memory_is_never_slower(
    search: tuple[Session, dict[str, Any]], more_gib: float
) -> None:
    """And an infeasible answer's smallest budget is one that works."""
    session, options = search
    planner = planner_of(session, options)
    memory = options["memory_constraint_bytes"]
    less, more = planner.solve(memory), planner.solve(memory + more_gib * GIB)

    assert speed(more) >= speed(less) * (1 - 1e-12)
    if less.infeasibility is not None and less.infeasibility.smallest_budget_bytes:
        assert less.infeasibility.smallest_budget_bytes > memory
        assert speed(planner.solve(less.infeasibility.smallest_budget_bytes)) > 0.0


RULES = (
    ("tp=2", lambda plan: all(s.tp == 2 for s in plan.layers)),
    ("zero3=1", lambda plan: all(s.zero3 for s in plan.layers)),
    ("layers 0-5:ckpt=1", lambda plan: all(s.checkpoint for s in plan.layers[:6])),
    ("layers 7-7:tp=1,zero3=0", lambda plan: (plan.layers[7].tp, plan.layers[7].zero3) == (1, 0)),
    ("pp=2", lambda plan: plan.num_stages == 2),
    ("pp=1,m=2", lambda plan: (plan.num_stages, plan.num_microbatches) == (1, 2)),
    ("stage 0:ckpt=0", lambda plan: not any(s.checkpoint for s in first_stage(plan))),
    ("stage 0:tp=2", lambda plan: all(s.tp == 2 for s in first_stage(plan))),
    ("vtp=2", lambda plan: plan.vocab.tp == 2),
    ("m=8", lambda plan: plan.num_microbatches == 8),
)


def first_stage(plan: Plan) -> tuple[LayerStrategy, ...]:
    """Return the strategies of the first stage."""
    return plan.layers[: plan.stage_sizes[0]]


def solved(session: Session, options: dict[str, Any]) -> SearchResult | None:
    """Return the answer, None if rules and options leave an empty search space."""
    try:
        return planner_of(session, options).solve()
    except OptionError:
        return None


@pytest.mark.whole
@often(25, 80, searches, st.sampled_from(RULES))
def test_pins_are_obeyed_and_cost_something(
    search: tuple[Session, dict[str, Any]], rule: tuple[str, Any]
) -> None:
    """Never faster than without; where the optimum obeys anyway, as fast."""
    session, options = search
    text, holds = rule
    best = planner_of(session, options).solve()
    pinned = solved(session, {**options, "pin": (text,)})
    if pinned is None:
        assert best.plan is None or not holds(best.plan)
        return

    assert speed(pinned) <= speed(best) * (1 + 1e-12)
    if pinned.plan is not None:
        assert holds(pinned.plan)
    if best.plan is not None and holds(best.plan):
        assert speed(pinned) == pytest.approx(speed(best), rel=1e-12)


FORBIDDEN = (
    ("ckpt=1", lambda plan: not any(s.checkpoint for s in plan.layers)),
    ("zero3=1,ckpt=1", lambda plan: not any(s.zero3 and s.checkpoint for s in plan.layers)),
    ("layers 0-3:tp=1", lambda plan: all(s.tp > 1 for s in plan.layers[:4])),
    ("pp=1", lambda plan: plan.num_stages > 1),
    ("stage 0:tp=1", lambda plan: all(s.tp > 1 for s in first_stage(plan))),
    ("vtp=1", lambda plan: plan.vocab.tp > 1),
    ("m=1", lambda plan: plan.num_microbatches > 1),
)


@pytest.mark.whole
@often(15, 60, searches, st.sampled_from(FORBIDDEN))
def test_forbidden_rules_are_obeyed(
    search: tuple[Session, dict[str, Any]], rule: tuple[str, Any]
) -> None:
    """Never faster than without; where the optimum obeys anyway, as fast."""
    session, options = search
    text, holds = rule
    best = planner_of(session, options).solve()
    left = solved(session, {**options, "forbid": (text,)})
    assume(left is not None)
    assert left is not None

    assert speed(left) <= speed(best) * (1 + 1e-12)
    if left.plan is not None:
        assert holds(left.plan)
    if best.plan is not None and holds(best.plan):
        assert speed(left) == pytest.approx(speed(best), rel=1e-12)


@often(12, 40, searches, st.integers(0, 10**6))
def test_no_random_plan_is_faster(search: tuple[Session, dict[str, Any]], seed: int) -> None:
    """Random legal plans of the same batch that fit are slower or tie."""
    session, options = search
    planner = planner_of(session, {**options, "default_dp_type": "any", "sp_space": "tp+sp"})
    rng = random.Random(seed)
    for _ in range(8):
        plan = random_plan(session, rng)
        if plan is None:
            continue
        plan = replace(plan, pipeline_type=options["pipeline_type"])
        priced = planner.evaluate(plan)
        if not (priced.legal and priced.fits):
            continue
        best = planner.solve(global_batch_sizes=(plan.global_batch,))
        assert speed(best) >= priced.samples_per_s * (1 - 1e-12)


def neighbour(plan: Plan, session: Session, rng: random.Random) -> Plan:
    """Return a plan that differs a little: some layers, a boundary, the embedding or m."""
    ranks = plan.world_size // plan.num_stages
    degrees = [t for t in divisors(ranks) if t <= 8]
    what = rng.choice(("layers", "swap", "boundary", "vocab", "m"))
    layers = list(plan.layers)
    if what == "layers":
        t = rng.choice(degrees)
        other = LayerStrategy(
            tp=t,
            ulysses=t > 1 and rng.random() < 0.5,
            zero3=rng.random() < 0.5,
            checkpoint=rng.random() < 0.5,
        )
        first = rng.randrange(len(layers))
        last = min(len(layers), first + rng.choice((1, 1, 2, 4, len(layers))))
        layers[first:last] = [other] * (last - first)
    elif what == "swap":
        a, b = rng.randrange(len(layers)), rng.randrange(len(layers))
        layers[a], layers[b] = layers[b], layers[a]
    sizes = list(plan.stage_sizes)
    if what == "boundary" and len(sizes) > 1:
        give, take = rng.sample(range(len(sizes)), 2)
        sizes[give] -= 1
        sizes[take] += 1
    vocab = plan.vocab
    if what == "vocab":
        t = rng.choice(degrees)
        vocab = VocabStrategy(tp=t, ulysses=t > 1 and rng.random() < 0.5, zero3=rng.random() < 0.5)
    m = plan.num_microbatches
    if what == "m":
        m = rng.choice(divisors(plan.global_batch))
    return replace(
        plan,
        layers=tuple(layers),
        stage_sizes=tuple(sizes),
        vocab=vocab,
        num_microbatches=m,
    )


NEIGHBOURS = [(*inputs, gib, 48) for inputs in ESTIMATED for gib in (10.0, 20.0, 40.0)]


@pytest.mark.parametrize("number", [40, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "hardware", "gib", "batch"), NEIGHBOURS)
def test_no_neighbour_of_the_optimum_is_faster(
    name: str, hardware: str, gib: float, batch: int, number: int
) -> None:
    """Small changes of the best plan that fit are slower or tie; many of them are tried."""
    session = opened(name, hardware)
    best = session.planner.solve(gib * GIB, global_batch_sizes=(batch,))
    if best.plan is None:
        assert best.infeasibility is not None
        best = session.planner.solve(
            best.infeasibility.smallest_budget_bytes * 1.05, global_batch_sizes=(batch,)
        )
        gib = float(str(best.options["memory_constraint_bytes"])) / GIB
    assert best.plan is not None
    rng = random.Random(3)
    tried = 0
    for _ in range(number):
        other = neighbour(best.plan, session, rng)
        if min(other.stage_sizes) < 1:
            continue
        priced = session.planner.evaluate(other, gib * GIB)
        if priced.legal and priced.fits:
            tried += 1
            assert priced.samples_per_s <= speed(best) * (1 + 1e-12), other
    assert tried > 5
