"""PlanTables: sums of the categories, legality as explained elsewhere, notes, size and speed."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.planning.cost.model import CostModel
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.often import often

STRATEGIES = sorted(
    LayerStrategy(tp=t, ulysses=u, cp=c, zero3=z, checkpoint=k)
    for t, u, c, z, k in itertools.product(
        (1, 2, 3, 4, 8), (False, True), (1, 2, 3), (False, True), (False, True)
    )
    if t > 1 or not u
)
VOCAB = [VocabStrategy(tp=t, ulysses=u) for t in (1, 2, 4) for u in (False, True)]
TABLES: list[Any] = [(1, 8, "ddp"), (2, 12, "zero2"), (4, 8, "zero2"), (1, 3, "ddp")]


def cost_model(**options: Any) -> CostModel:
    """Return the toy cost model on one node of 8."""
    settings_ = SearchOptions(**options)
    return CostModel(
        toy_spec(),
        toy_model(sequence_parallel=settings_.sequence_parallel),
        toy_hardware(),
        settings_,
    )


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": False, "async_grad_reduce": False}])
def test_tables_are_the_sums_of_their_categories(options: dict[str, Any]) -> None:
    """What is explained is what is optimised, to the bit."""
    cost = cost_model(**options)
    tables = cost.tables(STRATEGIES, VOCAB, TABLES, [(0, 1)], "1f1b")
    rows, vocab = cost.layer_rows(0, STRATEGIES, TABLES), cost.vocab_rows(VOCAB, TABLES)

    assert tables.valid.any()
    assert not tables.valid.all()
    np.testing.assert_array_equal(tables.forward_s[:, 0], sum(rows.forward.values()))
    np.testing.assert_array_equal(tables.backward_s[:, 0], sum(rows.backward.values()))
    np.testing.assert_array_equal(tables.tail_s[:, 0], sum(rows.step.values()))
    np.testing.assert_array_equal(tables.static_bytes[:, :, 0], rows.states)
    np.testing.assert_array_equal(tables.transient_bytes[:, :, 0], rows.transient)
    np.testing.assert_array_equal(tables.vocab_forward_s, sum(vocab.forward.values()))
    np.testing.assert_array_equal(tables.vocab_backward_s, sum(vocab.backward.values()))
    np.testing.assert_array_equal(tables.vocab_tail_s, sum(vocab.step.values()))
    n, _, s = np.argwhere(tables.valid)[0]
    assert sum(rows.time_s(n, s).values()) == pytest.approx(
        tables.forward_s[n, 0, s] + tables.backward_s[n, 0, s] + tables.tail_s[n, 0, s]
    )


def test_priced_rows_are_finite_and_others_infinite() -> None:
    """A row that is not valid can never look cheap."""
    tables = cost_model().tables(STRATEGIES, VOCAB, TABLES, [], "1f1b")

    for values in (tables.forward_s, tables.backward_s, tables.tail_s):
        assert np.isfinite(values[tables.valid]).all()
        assert np.isinf(values[~tables.valid]).all()
        assert (values >= 0.0).all()
    for values in (tables.static_bytes, tables.transient_bytes, tables.activation_bytes):
        assert (values >= 0).all()


@often(
    75,
    300,
    strategy=st.sampled_from(STRATEGIES),
    p=st.sampled_from((1, 2, 4)),
    g=st.integers(1, 24),
    heads=st.sampled_from((6, 8, 12)),
    kv_heads=st.sampled_from((2, 3, 4)),
    ffn=st.sampled_from((2048, 1536, 1026)),
    length=st.sampled_from((1024, 1026, 24, 12)),
    sequence_parallel=st.booleans(),
)
def test_valid_rows_are_exactly_the_legal_ones(
    strategy: LayerStrategy,
    p: int,
    g: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    length: int,
    sequence_parallel: bool,
) -> None:
    """`valid` agrees with the module that explains legality to people (24 ranks)."""
    spec = toy_spec(num_heads=heads, num_kv_heads=kv_heads, ffn_hidden_size=ffn, seq_length=length)
    model = toy_model(sequence_parallel=sequence_parallel)
    layer = model.layers[0]
    memory = replace(
        layer.memory[1024], activation_bytes_per_sample=dict.fromkeys((1, 2, 3, 4, 8), 1000000.0)
    )
    times = tuple(replace(t, seq_length=length) for t in layer.times)
    model = replace(
        model,
        layers=(replace(layer, times=times, memory={length: memory}),),
        other_times=tuple(replace(t, seq_lengths=(length,)) for t in model.other_times),
        other_memory={k: {(length,): v[(1024,)]} for k, v in model.other_memory.items()},
    )
    options = SearchOptions(sequence_parallel=sequence_parallel)
    cost = CostModel(spec, model, toy_hardware(gpus_per_node=24), options)
    found = bool(cost.layer_rows(0, [strategy], [(p, g, "ddp")]).valid[0, 0])

    plan = Plan(
        world_size=24,
        num_stages=p,
        stage_sizes=(4 // p,) * p,
        layers=(strategy,) * 4,
        vocab=VocabStrategy(),
        global_batch=g * 4,
        num_microbatches=4,
    )
    problems = [
        text
        for text in violations(plan, spec, sequence_parallel=sequence_parallel)
        if not text.startswith("embedding and head")
    ]
    d = plan.data_degree(0)
    alone = strategy.zero3 and d * strategy.cp * (strategy.tp if strategy.ulysses else 1) == 1
    assert found == (not problems and not alone)


def test_illegal_rows_can_be_priced_for_evaluation() -> None:
    """A plan that somebody else made gets figures and stays marked as illegal."""
    cost = cost_model()
    tables = cost.tables(
        [LayerStrategy(), LayerStrategy(tp=16)],
        [VocabStrategy()],
        [(1, 12, "ddp")],
        [(0, 1)],
        "1f1b",
        price_illegal=True,
    )

    assert not tables.valid.any()
    assert not tables.vocab_valid.any()
    assert np.isfinite(tables.forward_s[0, 0]).tolist() == [True, False]  # 16 ranks of 8
    legal = cost.tables([LayerStrategy()], [], [(1, 8, "ddp"), (1, 16, "ddp")], [], "1f1b")
    between = legal.forward_s[:, 0, 0]
    assert between[0] < tables.forward_s[0, 0, 0] < between[1]
    assert tables.vocab_forward_s[0, 0, 0] > 0.0


def test_two_layer_types() -> None:
    """Each type has its own shape; the widest sets the buffers, the last one carries the head."""
    spec = toy_spec()
    two = replace(spec, layers=(spec.layers[0], replace(spec.layers[0], hidden_size=1024)))
    cost = CostModel(two, toy_model(kinds=2), toy_hardware(), SearchOptions())
    tables = cost.tables([LayerStrategy(tp=2)], [VocabStrategy(tp=2)], TABLES[:3], [], "gpipe")

    assert tables.layer_type.tolist() == [0] * 4 + [1] * 4
    assert tables.forward_s.shape == (3, 2, 1)
    tp = [cost.layer_rows(k, [LayerStrategy(tp=2)], TABLES[:1]).forward["tp"] for k in (0, 1)]
    np.testing.assert_allclose(tp[1], 2 * tp[0])
    np.testing.assert_allclose(tables.send_s[:, 1], 2 * tables.send_s[:, 0])
    assert tables.stage_fixed_bytes[1, 1] == 12 * 2 // 8 * 1024 * 1024 * 2


def test_assumptions_are_recorded() -> None:
    """Every default that stands in for a measurement is listed once."""
    spec = toy_spec(num_heads=None, num_kv_heads=None, ffn_hidden_size=None)
    hardware = replace(toy_hardware(), memory_bytes_per_s=None, estimated=True)
    cost = CostModel(spec, replace(toy_model(), estimated=True), hardware, SearchOptions())
    cost.tables(STRATEGIES, VOCAB, [(1, 64, "ddp")], [], "1f1b")
    cost.tables(STRATEGIES, VOCAB, [(1, 64, "ddp")], [], "1f1b")
    text = "\n".join(cost.defaults_used)

    for words in (
        "2 x forward",
        "1.156 + 1 GiB (--oom-risk 0.01)",
        "column-parallel",
        "half of an all-reduce",
        "memory bandwidth is unknown",
        "number of heads is unknown",
        "MLP width is unknown",
        "attention time is unknown",
        "activations at tp=8",
    ):
        assert text.count(words) == 1, words
    assert any("estimated: hardware" in note for note in cost.notes)
    assert any("estimated: profile" in note for note in cost.notes)


def test_large_batches_are_noted_once() -> None:
    """Up to twice the largest measured batch (8) nothing is said, beyond it once."""
    spec, model = toy_spec(), toy_model()
    cost = CostModel(spec, model, toy_hardware(), SearchOptions(time_profile_mode="batch"))
    cost.layer_rows(0, [LayerStrategy()], [(1, 8 * 16, "ddp")])
    assert cost.notes == []
    for _ in range(2):
        cost.layer_rows(0, [LayerStrategy()], [(1, 8 * 17, "ddp")])
    assert len(cost.notes) == 1
    assert "twice the largest measured batch (8)" in cost.notes[0]


def test_profiles_that_do_not_fit_the_model_are_refused() -> None:
    """A wrong number of layer types, or tables measured with the other parallelism."""
    with pytest.raises(InputError, match=r"1 layer types.*measured 2"):
        CostModel(toy_spec(), toy_model(kinds=2), toy_hardware(), SearchOptions())
    with pytest.raises(InputError, match="measured without sequence parallelism"):
        CostModel(toy_spec(), toy_model(sequence_parallel=False), toy_hardware(), SearchOptions())


def test_many_tables_are_priced_in_one_pass() -> None:
    """1,700 tables of 40 strategies at 1,024 GPUs: generous limits on CPU time and memory."""
    cost = CostModel(toy_spec(), toy_model(), toy_hardware(128), SearchOptions())
    tables: list[Any] = [
        (2**i, 1024 * k, kind) for i in range(8) for k in range(1, 108) for kind in ("ddp", "zero2")
    ]
    strategies = [s for s in STRATEGIES if s.tp != 3 and s.cp != 3][:40]
    cost.tables(strategies, VOCAB, tables[:4], [], "1f1b")
    start = time.process_time()
    found = cost.tables(strategies, VOCAB, tables[:1700], [], "1f1b")

    assert time.process_time() - start < 1.0
    assert found.valid.sum() > 30_000
    assert found.num_bytes() < 60e6


@pytest.mark.parametrize(("samples", "noted"), [(64, False), (72, True)])
def test_an_extrapolated_vocabulary_batch_is_noted(samples: int, noted: bool) -> None:
    """The largest measured batch of embedding and head is 4, so more than 8 is extrapolated."""
    cost = cost_model(time_profile_mode="batch")
    cost.vocab_rows([VocabStrategy()], [(1, samples, "ddp")])

    assert any("extrapolated: embedding and head" in note for note in cost.notes) == noted


def test_vocabulary_degrees_without_an_entry_are_named_once() -> None:
    """8 is measured here and 16 does not fit in 8 ranks; 2 and 4 are left out, and said so."""
    full = toy_model()
    other = {
        position: {
            lengths: replace(
                entry,
                model_state_bytes={t: entry.model_state_bytes[t] for t in (1, 8)},
            )
            for lengths, entry in table.items()
        }
        for position, table in full.other_memory.items()
    }
    cost = CostModel(toy_spec(), replace(full, other_memory=other), toy_hardware(), SearchOptions())
    vocab = [VocabStrategy(tp=t, zero3=z) for t in (1, 2, 4, 8, 16) for z in (False, True)]
    for _ in range(2):
        assert cost.vocab_rows(vocab, TABLES).valid.any()

    (note,) = (note for note in cost.notes if "embedding and head at degrees" in note)
    assert note.startswith("not searched")
    assert note.endswith(": 2, 4")


def test_layer_types_alike_have_one_price_and_notes_of_their_own() -> None:
    """Types of one shape and profile, and one that is wider: two prices, three names."""
    shape = toy_spec().layers[0]
    layers = (shape, replace(shape, hidden_size=1024), replace(shape, num_layers=2))
    spec = replace(toy_spec(), layers=layers)
    cost = CostModel(
        spec, toy_model(kinds=3), toy_hardware(), SearchOptions(time_profile_mode="batch")
    )

    found = cost.priced(STRATEGIES, VOCAB, [(1, 8 * 17, "ddp")], [(0, 1)], "1f1b")

    assert found.layers[0] is found.layers[2]
    for k in range(3):
        alone = cost.layer_rows(k, STRATEGIES, [(1, 8 * 17, "ddp")])
        np.testing.assert_array_equal(found.tables.forward_s[:, k], alone.forward_s)
        np.testing.assert_array_equal(found.tables.transient_bytes[:, :, k], alone.transient)
        assert any(note.startswith(f"extrapolated: layer type {k} ") for note in cost.notes)
    # the wider one sends more
    assert found.layers[1].forward["tp"].max() > found.layers[0].forward["tp"].max()
