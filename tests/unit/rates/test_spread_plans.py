"""Random plans on noisy, partly measured hardware stay between its fast and its slow twin."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from autopar.rates.measured import Curve, HardwareProfile, Speed
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.layered.prediction import predict
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.often import often

SIZES = np.array([2.0**k for k in range(16, 27)])
NUMBERS = st.integers(min_value=0, max_value=2**32 - 1)


def noisy_hardware(seed: int, num_nodes: int) -> HardwareProfile:
    """Return hardware of which some curves exist, scatter, and have one or two percentiles."""
    rng = np.random.default_rng(seed)

    def maybe(rate: float) -> Curve:
        first = int(rng.integers(0, len(SIZES) - 1))  # messages are below, inside and above
        sizes = SIZES[first : first + int(rng.integers(1, len(SIZES) + 1))]
        size = len(sizes)
        noise = np.exp(rng.normal(0.0, 0.6, size))
        times = (rng.uniform(1e-6, 1e-3) + sizes / rate) * noise
        return Curve(
            sizes_bytes=sizes,
            times_s=times,
            low_s=times * rng.uniform(0.3, 1.0, size) if rng.random() < 0.6 else None,
            high_s=times * rng.uniform(1.0, 4.0, size) if rng.random() < 0.6 else None,
            latency_s=float(rng.uniform(0.0, 2.0) * times[0]) if rng.random() < 0.5 else None,
        )

    world = 8 * num_nodes
    groups = [g for g in (2, 4, 8, 16) if g <= world]
    operations = ("allreduce", "allgather", "reducescatter", "all2all")
    keys = [(name, g) for name in operations for g in groups]
    return toy_hardware(
        num_nodes=num_nodes,
        curves={key: maybe(2e10) for key in keys if rng.random() < 0.6},
        strided_curves={key: maybe(5e9) for key in keys if rng.random() < 0.4},
        p2p_curves={2: maybe(1e10), **{p: maybe(1e10) for p in groups if rng.random() < 0.5}},
    )


def random_plan(seed: int, world: int) -> Plan:
    """Return a plan of any degrees that divide its stages."""
    rng = np.random.default_rng(seed)

    def pick(values: list[int]) -> int:
        return values[int(rng.integers(len(values)))]

    stages = pick([1, 2, 4])
    ranks = world // stages
    degrees = [t for t in (1, 2, 4) if t <= ranks]
    layers = []
    for _ in range(4):
        tp = pick(degrees)
        ulysses = tp > 1 and bool(rng.integers(2))
        cp = pick([c for c in (1, 2) if c * tp <= ranks])
        zero3, checkpoint = bool(rng.integers(2)), bool(rng.integers(2))
        layers.append(
            LayerStrategy(
                tp=tp,
                ulysses=ulysses,
                cp=cp,
                zero3=zero3 and ranks > (1 if ulysses else tp),
                checkpoint=checkpoint,
                strided=tp > 1 and not ulysses and cp == 1 and rng.random() < 0.2,
            )
        )
    return Plan(
        world_size=world,
        num_stages=stages,
        stage_sizes=(4 // stages,) * stages,
        layers=tuple(layers),
        vocab=VocabStrategy(tp=pick(degrees)),
        global_batch=64,
        num_microbatches=pick([1, 4] if stages == 1 else [4]),
        pipeline_type="gpipe" if rng.integers(2) else "1f1b",
        default_dp_type="zero2" if rng.integers(2) else "ddp",
    )


@often(25, 100, seed=NUMBERS, num_nodes=st.sampled_from([1, 2]))
def test_no_plan_is_slower_when_fast_or_faster_when_slow(seed: int, num_nodes: int) -> None:
    """Random plans on noisy, partly measured hardware, priced without any clipping."""
    hardware = noisy_hardware(seed, num_nodes)
    plan = random_plan(seed, hardware.world_size)

    speeds: tuple[Speed, ...] = ("fast", "slow")
    middle, fast, slow = (
        predict(CostModel(toy_spec(), toy_model(), twin, SearchOptions()), plan, 80e9).step_time_s
        for twin in (hardware, *(hardware.at_spread(speed) for speed in speeds))
    )

    assert np.isfinite(middle)
    assert fast <= middle * (1 + 1e-12)
    assert slow >= middle * (1 - 1e-12)


def test_partly_measured_spread_is_said() -> None:
    """One of two curves has percentiles: a note; with both or none there is none."""
    known = Curve(sizes_bytes=SIZES, times_s=SIZES / 1e9, low_s=SIZES / 2e9, high_s=SIZES / 5e8)
    plain = Curve(sizes_bytes=SIZES, times_s=SIZES / 1e9)

    def notes(first: Curve, second: Curve) -> list[str]:
        hardware = toy_hardware(curves={("allreduce", 8): first}, p2p_curves={2: second})
        cost = CostModel(toy_spec(), toy_model(), hardware, SearchOptions())
        return [note for note in cost.notes if note.startswith("spread: ")]

    assert notes(known, plain) == [
        (
            "spread: 1 of 2 measured curves have percentiles; the interval of "
            "the step time ignores the spread of the others"
        )
    ]
    assert notes(known, known) == notes(plain, plain) == []
