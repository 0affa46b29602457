"""Backward, sharded layers and recomputation that a sidecar measured, against plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from autopar.run.model import LayerMemory, LayerProfile, ModelProfile, ShardedTime
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.planning.space import Table
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

BATCHES = (1, 2, 4, 8)
Line = tuple[float, float]


def cells(
    degree: int = 1,
    kind: str = "sp",
    *,
    forward: Line = (1.0, 2.0),
    backward: Line | None = None,
    recompute: Line | None = None,
    batches: tuple[int, ...] = BATCHES,
) -> tuple[ShardedTime, ...]:
    """Return cells on lines c0 + c1*b, in milliseconds."""

    def at(line: Line | None, batch: int) -> float | None:
        return None if line is None else (line[0] + line[1] * batch) * 1e-3

    return tuple(
        ShardedTime(
            layer_type=0,
            batch=b,
            seq_length=1024,
            degree=degree,
            kind=kind,
            forward_s=(forward[0] + forward[1] * b) * 1e-3,
            backward_s=at(backward, b),
            recompute_s=at(recompute, b),
        )
        for b in batches
    )


def profile(*sharded: ShardedTime, **other: Any) -> ModelProfile:
    """Return the toy profile with such cells."""
    model = toy_model(**other)
    return replace(model, layers=(replace(model.layers[0], sharded_times=sharded),))


def model_of(*sharded: ShardedTime, **options: Any) -> CostModel:
    """Return the cost model of a toy profile with such cells, on 8 GPUs of one node."""
    settings = SearchOptions(**{"time_profile_mode": "batch", **options})
    return CostModel(
        toy_spec(),
        profile(*sharded, sequence_parallel=settings.sequence_parallel),
        toy_hardware(),
        settings,
    )


def times(cost: CostModel, strategy: LayerStrategy, samples: int = 16) -> tuple[float, ...]:
    """Return forward, backward and recomputation of a row, in milliseconds."""
    rows = cost.layer_rows(0, [strategy], [(1, samples, "ddp")])
    assert rows.valid[0, 0]
    parts = (rows.forward["forward"], rows.backward["backward"], rows.backward["recompute"])
    return tuple(float(values[0, 0]) * 1e3 for values in parts)


def test_measured_backward_and_recomputation() -> None:
    """b = 2: F = 1 + 2*2 as documented, B = 3 + 5*2, R = 0.5 + 2.5*2."""
    cost = model_of(*cells(backward=(3.0, 5.0), recompute=(0.5, 2.5)))

    assert times(cost, LayerStrategy(checkpoint=True)) == pytest.approx((5.0, 13.0, 5.5))
    assert times(cost, LayerStrategy()) == pytest.approx((5.0, 13.0, 0.0))
    assert cost.defaults_used[:3] == [
        "backward of embedding and head is 2 x forward (not measured)",
        "backward of layer type 0 is measured",
        "recomputation of layer type 0 is measured",
    ]


def test_backward_of_a_whole_layer_is_sharded_by_the_rule() -> None:
    """t = 4, b = 8: F = 1 + 16/4 and B = 3 + 40/4, for tp as for Ulysses."""
    cost = model_of(*cells(backward=(3.0, 5.0)))

    for strategy in (LayerStrategy(tp=4), LayerStrategy(tp=4, ulysses=True)):
        assert times(cost, strategy) == pytest.approx((5.0, 13.0, 0.0))


def test_measured_shards_replace_the_rule() -> None:
    """t = 4, b = 8: F = 2 + 1*8, B = 3 + 3*8, R = 1 + 1*8; nothing else changes."""
    cost = model_of(*cells(4, forward=(2.0, 1.0), backward=(3.0, 3.0), recompute=(1.0, 1.0)))

    assert times(cost, LayerStrategy(tp=4, checkpoint=True)) == pytest.approx((10.0, 27.0, 9.0))
    assert times(cost, LayerStrategy(tp=2)) == pytest.approx((5.0, 10.0, 0.0))
    assert times(cost, LayerStrategy(tp=4, ulysses=True)) == pytest.approx((5.0, 10.0, 0.0))
    assert "layer type 0: forward at tp=4 is measured" in cost.defaults_used
    assert (
        "layer type 0: forward at tp=2 is forward of a whole layer over 2, without launch cost"
        in (cost.defaults_used)
    )


def test_a_degree_without_measurement_follows_from_the_largest_that_divides_it() -> None:
    """t = 8, b = 16 from t = 4: F = 2 + 16/2; a context degree divides in the same way."""
    cost = model_of(
        *cells(2, forward=(9.0, 9.0)), *cells(4, forward=(2.0, 1.0), backward=(3.0, 3.0))
    )

    assert times(cost, LayerStrategy(tp=8)) == pytest.approx((10.0, 27.0, 0.0))
    assert times(cost, LayerStrategy(tp=4, cp=2)) == pytest.approx((10.0, 27.0, 0.0))
    assert "layer type 0: forward at tp=8 is forward at tp=4 over 2, without launch cost" in (
        cost.defaults_used
    )


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "stands"),
    [
        ("sp", True, True),
        ("tp", True, False),
        ("dtensor_sp", True, True),
        ("dtensor", True, False),
        ("tp", False, True),
        ("sp", False, False),
        ("dtensor", False, True),
        ("dtensor_sp", False, False),
        ("ulysses", True, False),
    ],
)
def test_which_kind_stands_for_which(kind: str, sequence_parallel: bool, stands: bool) -> None:
    """Only layers with the same local shapes stand for tp; otherwise the rule stays, as noted."""
    cost = model_of(*cells(4, kind, forward=(2.0, 1.0)), sequence_parallel=sequence_parallel)

    assert times(cost, LayerStrategy(tp=4))[0] == pytest.approx(10.0 if stands else 5.0)
    noted = any(note.startswith("not used: layer type 0's sharded layers") for note in cost.notes)
    assert noted == (not stands and kind != "ulysses")
    assert any("used for tp=4" in note for note in cost.notes) == (
        stands and kind.startswith("dtensor")
    )


def test_own_kind_wins_over_what_may_stand_for_it() -> None:
    """Where both were measured at a degree, DTensor's layers are not looked at."""
    both = (*cells(4, "dtensor_sp", forward=(7.0, 7.0)), *cells(4, "sp", forward=(2.0, 1.0)))
    cost = model_of(*both)

    assert times(cost, LayerStrategy(tp=4))[0] == pytest.approx(10.0)
    assert cost.notes == []


def test_measured_ulysses() -> None:
    """Ulysses at t = 4, b = 8: F = 2 + 1*8; tp keeps the rule."""
    cost = model_of(*cells(4, "ulysses", forward=(2.0, 1.0)))

    assert times(cost, LayerStrategy(tp=4, ulysses=True)) == pytest.approx((10.0, 20.0, 0.0))
    assert times(cost, LayerStrategy(tp=4)) == pytest.approx((5.0, 10.0, 0.0))


def test_cells_that_cannot_answer_are_noted_and_not_used() -> None:
    """One batch size gives no launch cost: the rule stays in mode batch; in mode static it does."""
    one = cells(4, forward=(2.0, 1.0), batches=(1,))
    cost = model_of(*one)

    assert times(cost, LayerStrategy(tp=4))[0] == pytest.approx(5.0)
    (note,) = cost.notes
    assert note.startswith("not used: layer type 0, forward at tp=4: only batch size 1")
    assert times(model_of(*one, time_profile_mode="static"), LayerStrategy(tp=4))[
        0
    ] == pytest.approx(8 * 3.0)


def test_sequence_mode_fits_sharded_times_and_refuses_to_extrapolate() -> None:
    """F = b*(S + S^2/1000) us at tp=2, priced at S = 1024; beyond twice the measured S unused."""

    def shards(*lengths: int) -> tuple[ShardedTime, ...]:
        return tuple(
            ShardedTime(
                layer_type=0,
                batch=1,
                seq_length=s,
                degree=2,
                kind="sp",
                forward_s=(s + s * s / 1000) * 1e-6,
            )
            for s in lengths
        )

    near = model_of(*shards(512, 2048), time_profile_mode="sequence")
    far = model_of(*shards(128, 256), time_profile_mode="sequence")
    forced = model_of(*shards(128, 256), time_profile_mode="sequence", extrapolate=True)
    expected = 4 * (1024 + 1024**2 / 1000) * 1e-3

    assert times(near, LayerStrategy(tp=2))[0] == pytest.approx(expected)
    assert times(forced, LayerStrategy(tp=2))[0] == pytest.approx(expected)
    assert times(far, LayerStrategy(tp=2))[0] == pytest.approx(1.0 + 2.0 * 4 / 2)
    assert any("more than twice the largest measured" in note for note in far.notes)


def test_bad_fits_and_large_batches_are_noted() -> None:
    """A time 30 % off its line names the cell; a batch beyond twice the largest is flagged."""
    odd = list(cells(4, forward=(2.0, 1.0)))
    odd[1] = replace(odd[1], forward_s=odd[1].forward_s * 1.5)
    cost = model_of(*odd)
    (note,) = cost.notes

    assert note.startswith("bad fit: layer type 0, forward at tp=4 in mode batch is off by -")
    assert "at batch 2, sequence length 1024, the worst of 4 times" in note
    cost = model_of(*cells(4, forward=(2.0, 1.0), batches=(1, 2)))
    times(cost, LayerStrategy(tp=4), samples=8)
    assert cost.notes == []
    times(cost, LayerStrategy(tp=4), samples=10)
    (note,) = cost.notes
    assert note.startswith("extrapolated: layer type 0, forward at tp=4 to more than twice")
    assert "largest measured batch (2), linearly" in note


def test_cells_that_repeat_the_defaults_change_no_figure() -> None:
    """Cells on F, 2F and the sharding rule give the figures of documents alone, and vice versa."""
    strategies = [
        LayerStrategy(tp=t, ulysses=u, zero3=z, checkpoint=k)
        for t in (1, 2, 4)
        for u in ({False, t > 1})
        for z in (False, True)
        for k in (False, True)
    ]
    tables: list[Table] = [(1, 32, "ddp"), (2, 16, "zero2")]
    same = [
        cell
        for degree in (1, 2, 4)
        for cell in cells(
            degree,
            "sp",
            forward=(1.0, 2.0 / degree),
            backward=(2.0, 4.0 / degree),
            recompute=(1.0, 2.0 / degree),
        )
    ]
    alone, measured = (
        model_of(*c).tables(strategies, [VocabStrategy()], tables, [], "1f1b") for c in ((), same)
    )
    for name in ("forward_s", "backward_s", "tail_s"):
        np.testing.assert_allclose(getattr(measured, name), getattr(alone, name), rtol=1e-9)
    assert model_of().defaults_used[0] == "backward is 2 x forward (not measured)"


def plan_on_two_gpus(*sharded: ShardedTime) -> SearchResult:
    """Search for a layer of 300 million parameters, two samples a step, no pipeline."""
    model = profile(*sharded)
    memory = LayerMemory(
        parameter_count=3e8,
        activation_bytes_per_sample={1: 8e6, 2: 4e6},
        checkpoint_bytes_per_sample=1e6,
    )
    layer = LayerProfile(times=model.layers[0].times, memory={1024: memory}, sharded_times=sharded)
    options = SearchOptions(
        time_profile_mode="batch",
        settle_bsz=2,
        max_pp_deg=1,
        disable_ckpt=True,
        memory_constraint_bytes=200e9,
    )
    return Planner.from_documents(
        toy_spec(), replace(model, layers=(layer,)), toy_hardware(gpus_per_node=2), options
    ).solve()


def test_measured_shards_change_the_plan() -> None:
    """By the rule halves save 6 ms of reduction per layer; halves measured 5 times as long lose."""
    by_rule = plan_on_two_gpus()
    measured = plan_on_two_gpus(*cells(2, forward=(5.0, 5.0)))

    assert by_rule.plan is not None
    assert measured.plan is not None
    assert {s.tp for s in by_rule.plan.layers} == {2}
    assert {s.tp for s in measured.plan.layers} == {1}
