"""Gains of more memory or bandwidth for the fastest per-layer plan, found by new searches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.answer import Gain
from autopar.rates.measured import OPERATIONS, Curve, HardwareProfile
from autopar.records import replace
from autopar.units import GB, GIB

if TYPE_CHECKING:
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import Session


def add_bandwidth(
    hardware: HardwareProfile, *, collective: float = 0.0, p2p: float = 0.0
) -> HardwareProfile:
    """Return the hardware with added bandwidth, bytes/s, on every collective or p2p link.

    In measured curves the bus bandwidth of every message size rises by the same amount.

    collective, p2p : added bus bandwidth of collectives, and of transfers between stages, bytes/s
    """

    def collectives(curves: Mapping[tuple[str, int], Curve]) -> Mapping[tuple[str, int], Curve]:
        return {
            (operation, size): _quicker(
                curve, collective, OPERATIONS[operation].bus_factor(size) * curve.sizes_bytes
            )
            for (operation, size), curve in curves.items()
        }

    return replace(
        hardware,
        # Documented values are already bus bandwidths.
        allreduce_bytes_per_s={
            key: value + collective for key, value in hardware.allreduce_bytes_per_s.items()
        },
        p2p_bytes_per_s={key: value + p2p for key, value in hardware.p2p_bytes_per_s.items()},
        curves=collectives(hardware.curves),
        strided_curves=collectives(hardware.strided_curves),
        p2p_curves={
            stages: _quicker(curve, p2p, curve.sizes_bytes)
            for stages, curve in hardware.p2p_curves.items()
        },
        sequence_curves={
            size: _quicker(
                curve, collective, OPERATIONS["allreduce"].bus_factor(size) * curve.sizes_bytes
            )
            for size, curve in hardware.sequence_curves.items()
        },
    )


def _quicker(curve: Curve, bytes_per_s: float, wire: NDArray[np.float64]) -> Curve:
    """Return a curve with more bus bandwidth at every size.

    wire : bus traffic of each message size, bytes.
    """
    # Without a change the curve must stay identical to the last bit.
    if not bytes_per_s:
        return curve

    def less(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        # 1/t' = 1/t + added/wire, rearranged so that an empty message keeps its time.
        return times_s * wire / (wire + bytes_per_s * times_s)

    times = less(curve.times_s)
    return Curve(
        sizes_bytes=curve.sizes_bytes,
        times_s=times,
        low_s=None if curve.low_s is None else less(curve.low_s),
        high_s=None if curve.high_s is None else less(curve.high_s),
        # An empty message takes no longer than the smallest one.
        latency_s=None if curve.latency_s is None else min(curve.latency_s, float(times[0])),
    )


def gains_of(session: Session, baseline: SearchResult) -> tuple[Gain, ...]:
    """Return the gains of 1 GiB more memory per GPU and of 1 GB/s more bandwidth, by new searches.

    Empty if the baseline has no plan.
    """
    if baseline.prediction is None:
        return ()
    best = baseline.prediction.samples_per_s
    budget = session.options.memory_constraint_bytes + GIB
    found: list[tuple[str, SearchResult]] = [
        ("+1 GiB of memory per GPU", session.planner.solve(memory_constraint_bytes=budget))
    ]
    for name, hardware in (
        ("+1 GB/s on every collective", add_bandwidth(session.hardware, collective=GB)),
        ("+1 GB/s between stages", add_bandwidth(session.hardware, p2p=GB)),
    ):
        # Other hardware needs new cost tables; another memory budget does not.
        found.append((name, session.rebuilt(hardware=hardware).solve()))
    return tuple(
        Gain(
            name=name,
            samples_per_s=result.prediction.samples_per_s,
            gain=result.prediction.samples_per_s / best - 1,
            same_plan=result.plan == baseline.plan,
        )
        for name, result in found
        if result.prediction is not None
    )
