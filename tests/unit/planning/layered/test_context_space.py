"""Context degrees of layers, embedding and head: what is searched, and that it pays off."""

from __future__ import annotations

from typing import Any

import pytest

import search
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.choose import chosen
from search.planning.layered.parts import as_engine, within_strategy_file
from search.planning.session import open_session
from search.planning.space import Rules, SearchSpace, build_space, context_degrees, parse_rules
from search.request.options import SearchOptions
from search.request.request import InputSpec, build_request

LONG = 131_072


def space(tokens: int, *, rules: Rules | None = None, **options: Any) -> SearchSpace:
    """Return the space of 64 ranks and 32 layers."""
    return build_space(
        SearchOptions(settle_bsz=64, **options),
        world_size=64,
        num_layers=32,
        num_tokens=tokens,
        batches=(64,),
        rules=rules or Rules(),
    )


@pytest.mark.parametrize(
    ("tokens", "options", "degrees"),
    [
        (LONG, {}, [1, 2, 4, 8, 16, 32, 64]),
        # a rank has 1,024 tokens at least
        (8192, {}, [1, 2, 4, 8]),
        (2047, {}, [1]),
        (512, {}, [1]),
        # unless a degree is asked for
        (512, {"max_cp_deg": 4}, [1, 2, 4]),
        (LONG, {"max_cp_deg": 4}, [1, 2, 4]),
        (LONG, {"max_cp_deg": 1}, [1]),
        (LONG, {"disable_cp": True}, [1]),
        (LONG, {"disable_cp": True, "max_cp_deg": 8}, [1]),
        # the other spaces are of the dimensions that they name
        (LONG, {"search_space": "dp+tp"}, [1]),
        (LONG, {"search_space": "3d"}, [1]),
        (LONG, {"search_space": "dp+tp", "max_cp_deg": 2}, [1, 2]),
    ],
)
def test_degrees(tokens: int, options: dict[str, Any], degrees: list[int]) -> None:
    """Of layers as of embedding and head."""
    found = space(tokens, **options)

    assert sorted({s.cp for s in found.strategies}) == degrees
    assert sorted({v.cp for v in found.vocab}) == degrees
    settings = SearchOptions(**options)
    assert context_degrees(settings, [1, 2, 4, 8, 16, 32, 64], tokens) == degrees


def test_rules_name_the_context_degree_of_embedding_and_head() -> None:
    """`vcp` is a key of its own beside `cp`."""
    found = space(LONG, rules=parse_rules(["vcp=8,vtp=2"], []))

    assert {(v.tp, v.cp) for v in found.vocab} == {(2, 8)}
    assert {s.cp for s in found.strategies} > {1, 8}


@pytest.fixture(scope="module")
def long_context() -> search.Planner:
    """Return the planner of llama3-8b with 131,072 tokens on 64 H100."""
    inputs = InputSpec(model="llama3-8b", hardware="h100:8x8", seq_length=(LONG,))
    session = open_session(
        inputs, SearchOptions(settle_bsz=64, top=0), {"global-batch-size", "top"}
    )
    return session.planner


def uniform(planner: search.Planner, vocab: VocabStrategy) -> Plan:
    """Return tp 2 and cp 8 for all layers with ZeRO-3, in two stages."""
    layer = LayerStrategy(tp=2, cp=8, zero3=True)
    return Plan(
        world_size=64,
        num_stages=1,
        stage_sizes=(32,),
        layers=(layer,) * 32,
        vocab=vocab,
        global_batch=64,
        num_microbatches=16,
    )


def test_long_contexts_are_as_fast_as_the_plan_of_the_field(long_context: search.Planner) -> None:
    """One degree of 2 and 8 for everything is legal, fits, and is no faster than the answer."""
    best = long_context.solve()
    known = long_context.evaluate(uniform(long_context, VocabStrategy(tp=2, cp=8, zero3=True)))

    assert known.legal
    assert known.fits
    assert best.plan is not None
    assert best.prediction is not None
    assert best.gap == 0.0
    assert any(s.cp > 1 for s in best.plan.layers)
    assert best.prediction.samples_per_s >= known.samples_per_s
    without = search.Planner.from_documents(
        long_context.spec,
        long_context.profile,
        long_context.hardware,
        replace(long_context.options, disable_cp=True),
    ).solve()
    assert without.prediction is not None
    assert best.prediction.samples_per_s > 1.1 * without.prediction.samples_per_s


def test_gathered_keys_are_never_hidden(long_context: search.Planner) -> None:
    """A ring's exchanges lie beside attention, which is longer here; an all-gather before it."""
    plan = uniform(long_context, VocabStrategy(tp=2, cp=8, zero3=True))
    gathering = search.Planner.from_documents(
        long_context.spec,
        long_context.profile,
        long_context.hardware,
        replace(long_context.options, cp_kind="all-gather"),
    )
    ring, gathered = (p.evaluate(plan).stages[0].time_s for p in (long_context, gathering))

    assert 0.0 < ring["cp"] < gathered["cp"]
    assert {name: gathered[name] for name in ring if name not in ("cp", "host", "stragglers")} == {
        name: ring[name] for name in ring if name not in ("cp", "host", "stragglers")
    }


def test_embedding_and_head_of_the_layers_degree_move_nothing(
    long_context: search.Planner,
) -> None:
    """Their tokens lie where those of the layers do; whole samples are exchanged twice."""
    same = long_context.evaluate(uniform(long_context, VocabStrategy(tp=2, cp=8, zero3=True)))
    other = long_context.evaluate(uniform(long_context, VocabStrategy(tp=2, zero3=True)))

    assert same.legal
    assert "redistribution" not in same.stages[0].time_s
    # a micro-batch of 4 samples is no whole number for each of 32 ranks
    assert not other.legal
    assert other.stages[0].time_s["redistribution"] > 0.0


@pytest.mark.parametrize(
    ("words", "disabled"),
    [
        ({}, True),
        ({"enable-cp": True}, False),
        ({"max-cp-deg": "4"}, False),
        ({"pin": ["cp=2"]}, False),
        ({"pin": ["vcp=2"]}, False),
        ({"pin": ["tp=2"]}, True),
        # another space has no context degrees
        ({"search-space": "dp+tp"}, False),
    ],
)
def test_plans_for_strategy_files_have_context_where_asked(
    words: dict[str, Any], disabled: bool
) -> None:
    """Galvatron's v2.4 ignores context degrees; a default that is not given is listed."""
    asked = build_request({"model": "llama2-7b", "hardware": "a100:1x8", **words})
    found = within_strategy_file(asked)
    assert found.options.disable_cp == disabled
    assert bool(found.found) == disabled
    own = as_engine(asked, "galvatron")
    assert own.options.disable_cp == disabled
    for engine in ("torchtitan", "paddlenlp", "megatron"):
        assert not as_engine(asked, engine).options.disable_cp


def test_search_for_galvatron_has_no_context_unless_asked() -> None:
    """Long sequences would have it; --engine none and --enable-cp search it."""
    words: dict[str, Any] = {
        "model": "llama2-7b",
        "hardware": "a100:1x8",
        "seq-length": "32768",
        "global-batch-size": "8",
        "search-space": "full",
        "engine": "galvatron",
    }
    degrees = []
    for more in ({}, {"enable-cp": True}, {"engine": "none"}):
        found = chosen(build_request({**words, **more})).request
        session = open_session(found.inputs, found.options, found.given)
        plan = session.planner.solve(top=0).plan
        assert plan is not None
        degrees.append({layer.cp for layer in plan.layers} | {plan.vocab.cp})
    assert degrees[0] == {1}
    assert all(max(own) > 1 for own in degrees[1:])
