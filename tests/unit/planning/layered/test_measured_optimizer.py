"""The optimizer step as a sidecar measured it: at every degree, on ZeRO shards, beside layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from autopar.run.model import ModelProfile, ShardedTime
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.cost.time import fit_optimizer
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

# the numbers below are of the recipe 2 + 2 + 12
OPTIONS = SearchOptions(time_profile_mode="batch", fp32_gradients=False)
N = 3_000_000
ONLY = 0


def cost_of(model: ModelProfile) -> CostModel:
    """Return the cost model of a profile on 8 GPUs."""
    return CostModel(toy_spec(), model, toy_hardware(), OPTIONS)


def steps(*times: tuple[int, str, float]) -> ModelProfile:
    """Return the toy profile with measured optimizer steps of (degree, kind, ms)."""
    model = toy_model()
    cells = tuple(
        ShardedTime(
            layer_type=0,
            batch=b,
            seq_length=1024,
            degree=degree,
            kind=kind,
            forward_s=(1.0 + 2.0 * b / degree) * 1e-3,
            optimizer_s=ms * 1e-3,
        )
        for degree, kind, ms in times
        for b in (1, 8)
    )
    return replace(model, layers=(replace(model.layers[0], sharded_times=cells),))


@pytest.mark.parametrize(
    ("strategy", "default", "expected_ms"),
    [
        (LayerStrategy(), "ddp", 3.2),
        (LayerStrategy(tp=2), "ddp", 1.7),
        (LayerStrategy(tp=4), "ddp", 0.95),
        (LayerStrategy(tp=4, ulysses=True), "ddp", 3.2),
        (LayerStrategy(tp=2), "zero2", 0.2 + 3.0 / 8),
        (LayerStrategy(zero3=True), "ddp", 0.2 + 3.0 / 8),
        (LayerStrategy(tp=4, ulysses=True, zero3=True), "ddp", 0.2 + 3.0 / 8),
    ],
)
def test_optimizer_steps_follow_the_parameters_of_the_shard(
    strategy: LayerStrategy, default: Any, expected_ms: float
) -> None:
    """Measured at t = 1, 2, 4 on 0.2 ms + 1 ns per parameter: at any shard 0.2 ms stay."""
    cost = cost_of(steps((1, "sp", 3.2), (2, "sp", 1.7), (4, "sp", 0.95)))
    rows = cost.layer_rows(0, [strategy], [(1, 16, default)])

    assert rows.step["optimizer"][0, 0] == pytest.approx(expected_ms * 1e-3)


def test_steps_that_are_no_line_are_kept_where_they_were_measured() -> None:
    """By hand: 1.5 M take 1 ms, 3 M 4 ms; 2.25 M lie halfway, 6 M take twice 4, launch is 0."""
    curve = fit_optimizer([(steps((1, "sp", 4.0), (2, "tp", 1.0)).layers[0], float(N))])
    assert curve is not None
    found = curve.step_s(np.array([0.0, 0.75e6, 1.5e6, 2.25e6, 3e6, 6e6])) * 1e3

    assert found == pytest.approx([0.0, 0.5, 1.0, 2.5, 4.0, 8.0])


def test_a_step_never_takes_longer_on_fewer_parameters() -> None:
    """Noise that turns the order round is smoothed to its geometric mean, launch included."""
    curve = fit_optimizer([(steps((1, "sp", 1.0), (2, "sp", 4.0)).layers[0], float(N))])
    assert curve is not None

    assert curve.step_s(np.array([1.5e6, 3e6])) * 1e3 == pytest.approx([2.0, 2.0])
    times = curve.step_s(np.linspace(1.0, 5e6, 50))
    assert (np.diff(times) >= 0.0).all()


def test_ulysses_cells_hold_all_parameters() -> None:
    """A Ulysses rank at t = 2 updates all 3 M: its time is that of t = 1, here their median."""
    curve = fit_optimizer([(steps((1, "sp", 3.0), (2, "ulysses", 5.0)).layers[0], float(N))])
    assert curve is not None

    assert curve.parameters.tolist() == [0.0, N]
    assert curve.step_s(np.array([N / 4, float(N)])) * 1e3 == pytest.approx([1.0, 4.0])


def test_optimizer_of_embedding_and_head_follows_the_same_curve() -> None:
    """1 M parameters, 16e6 bytes of states, take 0.2 + 1 ms, over 8 ranks by ZeRO-3 0.2 + 1/8."""
    cost = cost_of(steps((1, "sp", 3.2), (2, "sp", 1.7)))
    both = [VocabStrategy(), VocabStrategy(zero3=True)]
    rows = cost.vocab_rows(both, [(1, 16, "ddp")])

    assert rows.step["optimizer"][0, ONLY] == pytest.approx([1.2e-3, 0.325e-3])


def test_without_measured_steps_the_bytes_count_and_what_is_assumed_is_said() -> None:
    """26 bytes per parameter over 1 TB/s; lines on the bandwidth say only what rests on it."""
    plain, measured = cost_of(toy_model()), cost_of(steps((1, "sp", 3.2)))
    rows = plain.layer_rows(0, [LayerStrategy()], [(1, 16, "ddp")])
    assert rows.step["optimizer"][0, 0] == 26.0 * N / 1e12
    assert not any("optimizer" in text for text in plain.defaults_used)
    assert any(text.startswith("optimizer step is measured") for text in measured.defaults_used)

    unknown = [
        CostModel(toy_spec(), model, toy_hardware(memory_bytes_per_s=None), OPTIONS).defaults_used
        for model in (toy_model(), steps((1, "sp", 3.2)))
    ]
    assert "memory bandwidth is unknown: optimizer step and look-up cost 0" in unknown[0]
    assert "memory bandwidth is unknown: look-up costs 0" in unknown[1]
