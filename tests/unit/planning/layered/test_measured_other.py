"""Embedding, head and loss as a sidecar measured them: backward, spread, plans of whole files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from autopar.documents.model import read_model_profile, write_model_profile
from autopar.records import replace
from autopar.run.model import ModelProfile, OtherTime, ShardedTime
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import drawn_step_times, predict
from search.request.options import SearchOptions
from tests.cost_cases import TOY_PLAN as PLAN, toy_hardware, toy_model, toy_spec
from tests.often import often

# the numbers below are of the recipe 2 + 2 + 12
OPTIONS = SearchOptions(time_profile_mode="batch", fp32_gradients=False, reserve_fraction=0.05)
ONLY, FIRST, LAST = range(3)


def with_others(change: Callable[[OtherTime], OtherTime]) -> ModelProfile:
    """Return the toy profile, forward 0.5 + 1*b ms, with changed times of what is no layer."""
    model = toy_model()
    return replace(model, other_times=tuple(change(t) for t in model.other_times))


def line(launch: float, sample: float) -> ModelProfile:
    """Return the toy profile whose embedding and head have such a backward, ms."""
    return with_others(lambda t: replace(t, backward_s=(launch + sample * t.batch) * 1e-3))


def cost_of(model: ModelProfile, **options: Any) -> CostModel:
    """Return the cost model of a profile on 8 GPUs."""
    return CostModel(toy_spec(), model, toy_hardware(), replace(OPTIONS, **options))


def outer(cost: CostModel, stages: int, strategy: VocabStrategy, samples: int) -> Any:
    """Return the seconds of backward by position."""
    return cost.vocab_rows([strategy], [(stages, samples, "ddp")]).backward["backward"][0, :, 0]


# --- backward ---


def test_measured_backward_of_embedding_and_head() -> None:
    """One stage, vtp = 2, b = 4: (0.7 + 3*4)/2 ms instead of 2*(0.5 + 4)/2."""
    measured, assumed = cost_of(line(0.7, 3.0)), cost_of(toy_model())

    assert outer(measured, 1, VocabStrategy(tp=2), 16)[ONLY] == pytest.approx(6.35e-3)
    assert outer(assumed, 1, VocabStrategy(tp=2), 16)[ONLY] == pytest.approx(4.5e-3)
    assert measured.defaults_used[:2] == [
        "backward of layer type 0 is 2 x forward (not measured)",
        "backward of embedding and head is measured",
    ]
    assert assumed.defaults_used[0] == "backward is 2 x forward (not measured)"


def test_the_look_up_keeps_its_part_of_the_backward() -> None:
    """Two stages, vtp = 2, b = 8: 24.7/2 ms less 2 halves of the look-up, which the first has."""
    look_up = 8 * 3 * 1024 * 512 * 2 / 1e12
    found = outer(cost_of(line(0.7, 3.0)), 2, VocabStrategy(tp=2), 16)

    assert found[FIRST] == pytest.approx(2 * look_up)
    assert found[LAST] == pytest.approx((0.7 + 3.0 * 8) * 1e-3 / 2 - look_up)
    tiny = outer(cost_of(line(0.0, 1e-6)), 2, VocabStrategy(tp=2), 16)
    assert tiny[LAST] == 0.0


def test_a_backward_that_cannot_answer_is_noted_and_not_used() -> None:
    """One batch gives no launch cost in mode batch: 2 x forward stays, and is said."""
    lone = with_others(lambda t: replace(t, backward_s=9e-3) if t.batch == 2 else t)
    cost = cost_of(lone)

    assert outer(cost, 1, VocabStrategy(), 16)[ONLY] == pytest.approx(2 * 2.5e-3)
    (note,) = cost.notes
    assert note.startswith("not used: embedding and head, backward: only batch size 2")
    assert cost.defaults_used[0] == "backward is 2 x forward (not measured)"


def test_backward_beyond_twice_its_largest_batch_is_noted() -> None:
    """Forward up to batch 4 and backward up to 2: at batch 5 only the backward is extrapolated."""
    cost = cost_of(
        with_others(lambda t: replace(t, backward_s=1e-3 * t.batch) if t.batch < 4 else t)
    )
    outer(cost, 1, VocabStrategy(), 40)

    (note,) = cost.notes
    assert note.startswith("extrapolated: embedding and head, backward to more than twice")


@often(
    15,
    60,
    launch=st.floats(min_value=0.0, max_value=5.0),
    sample=st.floats(min_value=1e-3, max_value=50.0),
    noise=st.lists(st.floats(min_value=0.8, max_value=1.25), min_size=3, max_size=3),
    stages=st.sampled_from([1, 2, 4]),
    degree=st.sampled_from([1, 2]),
    mode=st.sampled_from(["static", "batch", "sequence"]),
)
def test_a_measured_backward_of_twice_the_forward_changes_nothing(
    launch: float, sample: float, noise: list[float], stages: int, degree: int, mode: Any
) -> None:
    """Whatever the forwards are, fits of doubled times are the doubled fits."""
    model = toy_model()
    forwards = tuple(
        replace(t, forward_s=(launch + sample * t.batch) * 1e-3 * x)
        for t, x in zip(model.other_times, noise, strict=True)
    )
    doubled = tuple(replace(t, backward_s=2.0 * t.forward_s) for t in forwards)
    plain, measured = (
        cost_of(replace(model, other_times=times), time_profile_mode=mode).tables(
            [LayerStrategy()], [VocabStrategy(tp=degree)], [(stages, 32, "ddp")], [], "1f1b"
        )
        for times in (forwards, doubled)
    )

    for name in ("vocab_forward_s", "vocab_backward_s", "vocab_tail_s"):
        np.testing.assert_allclose(getattr(measured, name), getattr(plain, name), rtol=1e-9)


# --- spread ---


def spread(forward: float, backward: float) -> ModelProfile:
    """Return a profile whose embedding and head have percentiles so far around the medians."""
    return with_others(
        lambda t: replace(
            t,
            backward_s=3.0 * t.forward_s,
            forward_low_s=t.forward_s * (1 - forward),
            forward_high_s=t.forward_s * (1 + 2 * forward),
            backward_low_s=3.0 * t.forward_s * (1 - backward),
            backward_high_s=3.0 * t.forward_s * (1 + 2 * backward),
        )
    )


def test_every_replica_is_the_price_of_its_own_times() -> None:
    """T of a replica equals T of a model whose cells are that replica's, to rounding."""
    cost = cost_of(spread(0.2, 0.3))
    strategies = tuple(sorted(set(PLAN.layers)))
    index = tuple(strategies.index(s) for s in PLAN.layers)
    tables = cost.tables(strategies, [PLAN.vocab], [(2, 8, "ddp")], [(0, 4)], "1f1b")
    drawn = drawn_step_times(
        cost, tables, num_microbatches=4, stage_sizes=(2, 2), strategy_index=index
    )
    cells = list(cost.other_draws.cells().values())
    assert len(cells) == 6
    for replica in (0, 7, 199):
        values = [float(times[replica]) for times in cells]
        times = tuple(
            replace(t, forward_s=f, backward_s=b)
            for t, f, b in zip(cost.model.other_times, values[:3], values[3:], strict=True)
        )
        alone = predict(cost_of(replace(cost.model, other_times=times)), PLAN, 80e9)
        assert drawn[replica] == pytest.approx(alone.step_time_s, rel=1e-12)


def test_spread_of_embedding_and_head_widens_the_interval() -> None:
    """Without percentiles there is no interval; with them it is wider, and a cell is named."""
    none, some, more = (predict(cost_of(spread(x, x)), PLAN, 80e9) for x in (0.0, 0.1, 0.4))
    assert none.step_time_interval_s is None
    assert some.step_time_interval_s is not None
    assert more.step_time_interval_s is not None
    (a, b), (c, d) = some.step_time_interval_s, more.step_time_interval_s

    assert c < a < some.step_time_s < b < d
    assert none.step_time_s == some.step_time_s == more.step_time_s
    assert more.widest_cell is not None
    assert more.widest_cell.name.startswith("backward of embedding and head, batch ")
    assert more.widest_cell.name.endswith("sequence length 1024")


def recomputed(low: float) -> ModelProfile:
    """Return the toy profile with measured recomputation, its 5th percentile so far below."""
    model = toy_model()
    cells = tuple(
        ShardedTime(
            layer_type=0,
            batch=p.batch,
            seq_length=1024,
            degree=1,
            kind="sp",
            forward_s=p.forward_s,
            recompute_s=p.forward_s,
            recompute_low_s=p.forward_s * (1 - low),
            recompute_high_s=p.forward_s * (1 + 2 * low),
        )
        for p in model.layers[0].times
    )
    return replace(model, layers=(replace(model.layers[0], sharded_times=cells),))


def test_spread_of_recomputation_widens_the_interval_of_checkpointed_plans() -> None:
    """A cell of recomputation is the widest; a plan that recomputes nothing has no width."""
    cost = cost_of(recomputed(0.3))
    plain = replace(PLAN, layers=(LayerStrategy(tp=2),) * 4)
    found, without = predict(cost, PLAN, 80e9), predict(cost, plain, 80e9)

    assert found.step_time_interval_s is not None
    low, high = found.step_time_interval_s
    assert low < found.step_time_s < high
    assert found.widest_cell is not None
    assert found.widest_cell.name.startswith("recompute of layer type 0")
    assert without.step_time_interval_s == (without.step_time_s, without.step_time_s)
    assert without.widest_cell is None


# --- experts ---


def test_mixtures_of_experts_say_their_degree_from_python_too() -> None:
    """Planner without a session: the result lists that experts are not spread over ranks."""
    text = "expert degree 1: experts are divided only by tp, pp and ZeRO"
    results = [
        Planner.from_documents(
            toy_spec(**experts), toy_model(), toy_hardware(), replace(OPTIONS, settle_bsz=16)
        ).solve()
        for experts in ({"num_experts": 4, "experts_per_token": 2}, {})
    ]

    assert results[0].defaults_used.count(text) == 1
    assert text not in results[1].defaults_used


# --- end to end ---


def measured_before(folder: Path) -> ModelProfile:
    """Return a profile from files whose sidecar has what sidecars of version 2 had."""
    model = toy_model()
    cells = tuple(
        ShardedTime(
            layer_type=0,
            batch=p.batch,
            seq_length=1024,
            degree=degree,
            kind="sp",
            forward_s=p.forward_s / degree * 1.1 ** (degree - 1),
            backward_s=2.2 * p.forward_s / degree,
            recompute_s=p.forward_s / degree,
            backward_low_s=2.0 * p.forward_s / degree,
            backward_high_s=2.5 * p.forward_s / degree,
        )
        for degree in (1, 2)
        for p in model.layers[0].times
    )
    layer = replace(model.layers[0], sharded_times=cells)
    paths = write_model_profile(replace(model, layers=(layer,)), toy_spec(), folder)
    sidecar = next(p for p in paths if p.name.startswith("computation") and "meta" in p.name)
    text = sidecar.read_text()
    assert '"other_times": []' in text
    text = text.replace('"other_times": [],', "").replace('"version": 3', '"version": 2')
    assert '"optimizer_s"' not in text
    sidecar.write_text(text)
    return read_model_profile(
        computation=folder,
        memory=folder,
        spec=toy_spec(),
        sequence_parallel=True,
        precision="bf16",
    )


def test_files_without_the_new_entries_are_planned_as_before(tmp_path: Path) -> None:
    """Plan and times are those of the last version whose sidecars could not say more."""
    result = Planner.from_documents(
        toy_spec(),
        measured_before(tmp_path),
        toy_hardware(),
        replace(OPTIONS, settle_bsz=32, memory_constraint_bytes=1.195e9),
    ).solve()
    found = result.prediction
    assert result.plan is not None
    assert found is not None
    assert found.widest_cell is not None

    assert result.plan == Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(4,),
        layers=(LayerStrategy(tp=2), *(LayerStrategy(tp=2, zero3=True),) * 3),
        vocab=VocabStrategy(tp=4),
        global_batch=32,
        num_microbatches=4,
    )
    assert found.step_time_s == pytest.approx(0.14756308148800004, rel=1e-12)
    assert found.step_time_interval_s == pytest.approx(
        (0.14355038364389297, 0.15335613830253084), rel=1e-12
    )
    assert found.widest_cell.name == (
        "backward at tp=2 of layer type 0, batch 1, sequence length 1024"
    )
    assert [stage.allocated_bytes for stage in found.stages] == [109235760]
