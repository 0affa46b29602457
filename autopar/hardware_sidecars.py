"""The sidecars of the hardware files: what they add to a profile, and what of a profile they hold.

Documented keys hold one bandwidth per group, and times of whole MiB in groups of neighbours. Other
collectives and sizes, strided groups, transfers, latency and spread are curves of the sidecars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.errors import DocumentError
from autopar.hardware import COLLECTIVES, Curve, HardwareProfile
from autopar.measurements import CurveData
from autopar.operations import OPERATIONS
from autopar.sidecar import SIDECAR_VERSION, DocumentKind, Sidecar, sidecar_path
from autopar.units import MIB

__all__ = ["SidecarCurves", "hardware_sidecar", "sidecar_curves"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SidecarCurves:
    """Curves of one sidecar by where they belong in `HardwareProfile`."""

    curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    strided_curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    p2p_curves: Mapping[int, Curve] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was left out, in words."""


def sidecar_curves(document: Path, sidecar: Sidecar, world_size: int) -> SidecarCurves:
    """Return the curves that the planner reads from the sidecar of a hardware file.

    Measured operations that no formula uses are left out, unknown ones with a note. Raises
    DocumentError for a group that is larger than the cluster or has two curves.
    """
    curves: dict[tuple[str, int], Curve] = {}
    strided: dict[tuple[str, int], Curve] = {}
    transfers: dict[int, Curve] = {}
    unknown: dict[str, None] = {}
    groups: set[tuple[str, int, bool]] = set()
    for data in sidecar.curves:
        group = data.operation, data.group_size, data.consecutive
        if group in groups:
            kind = "consecutive" if data.consecutive else "strided"
            raise DocumentError(
                sidecar_path(document),
                f"{data.operation} in {kind} groups of {data.group_size} has two curves",
                key="curves",
                remedy="remove one of them",
            )
        groups.add(group)
        if data.group_size > world_size:
            raise DocumentError(
                sidecar_path(document),
                f"a group of {data.group_size} does not exist on {world_size} GPUs",
                key="curves",
                remedy="check the number of nodes and of GPUs per node",
            )
        if data.operation == "p2p":
            transfers[data.group_size] = _curve(data)
        elif data.operation in COLLECTIVES:
            target = curves if data.consecutive else strided
            target[data.operation, data.group_size] = _curve(data)
        elif data.operation not in OPERATIONS:
            unknown[data.operation] = None
    return SidecarCurves(
        curves=curves,
        strided_curves=strided,
        p2p_curves=transfers,
        notes=tuple(f"curves of the unknown operation {name!r} were left out" for name in unknown),
    )


def hardware_sidecar(kind: DocumentKind, profile: HardwareProfile) -> Sidecar:
    """Return the sidecar of one hardware file of a profile.

    Strided curves go beside the all-reduce bandwidths, transfers beside theirs, the rest beside
    the collective times unless the documented keys say all of it.
    """
    unit = {"allreduce": "GB/s", "p2p": "GB/s", "overlap": "1", "sp_time": "ms"}[kind]
    curves: list[CurveData] = []
    if kind == "allreduce":
        curves = [
            _data(operation, size, curve, consecutive=False)
            for (operation, size), curve in sorted(profile.strided_curves.items())
        ]
    elif kind == "p2p":
        curves = [_data("p2p", size, curve) for size, curve in sorted(profile.p2p_curves.items())]
    elif kind == "sp_time":
        curves = [
            _data(operation, size, curve)
            for (operation, size), curve in sorted(profile.curves.items())
            if not _expressible(operation, curve)
        ]
    return Sidecar(
        version=SIDECAR_VERSION,
        document=kind,
        unit=unit,
        source="estimated from datasheets" if profile.estimated else profile.name,
        estimated=profile.estimated,
        synthetic=profile.synthetic,
        name=profile.name,
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        curves=curves,
    )


def _expressible(operation: str, curve: Curve) -> bool:
    """Return whether documented keys of the collective times hold all of a curve."""
    return (
        operation in ("allreduce", "all2all")
        and not np.any(curve.sizes_bytes % MIB)
        and not curve.has_spread
        and curve.latency_s is None
    )


def _curve(data: CurveData) -> Curve:
    def array(values: list[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    # a fit over all sizes can miss the smallest one; an empty message takes no longer than it
    latency = None if data.latency_s is None else min(data.latency_s, data.times_s[0])
    return Curve(
        sizes_bytes=array(data.sizes_bytes),
        times_s=array(data.times_s),
        low_s=None if data.low_s is None else array(data.low_s),
        high_s=None if data.high_s is None else array(data.high_s),
        latency_s=latency,
    )


def _data(operation: str, size: int, curve: Curve, *, consecutive: bool = True) -> CurveData:
    def numbers(values: NDArray[np.float64]) -> list[float]:
        return [float(value) for value in values]

    return CurveData(
        operation=operation,
        group_size=size,
        consecutive=consecutive,
        sizes_bytes=numbers(curve.sizes_bytes),
        times_s=numbers(curve.times_s),
        low_s=None if curve.low_s is None else numbers(curve.low_s),
        high_s=None if curve.high_s is None else numbers(curve.high_s),
        # a line that meets size 0 below time 0 is no latency
        latency_s=curve.latency_s if (curve.latency_s or 0.0) >= 0.0 else None,
    )
