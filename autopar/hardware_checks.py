"""What a planner's user should know of measured communication: times that fall, files at odds.

Neither is refused: medians of a busy machine scatter, and a person may edit a documented value to
see what it changes. Both are said in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from autopar.hardware import Curve, HardwareProfile
from autopar.operations import OPERATIONS
from autopar.sidecar import DocumentKind, Sidecar
from autopar.units import GB, MIB, MS

__all__ = ["at_odds", "falling_times", "partial_spread", "reference_bytes"]

_FALL = 0.05
"""Larger messages may be this much faster before it is said."""
_ROUNDING = 0.01
"""People round documented values; what differs by more has another origin."""


def falling_times(hardware: HardwareProfile) -> str | None:
    """Return a sentence on curves whose times fall as messages grow, None if none does."""
    curves = dict(_named_curves(hardware))
    worst: dict[str, tuple[float, float]] = {}
    for name, curve in curves.items():
        falls = curve.times_s[:-1] / curve.times_s[1:] - 1.0
        if falls.size and falls.max() > _FALL:
            at = int(falls.argmax())
            worst[name] = float(falls[at]), float(curve.sizes_bytes[at + 1])
    if not worst:
        return None
    name = max(worst, key=lambda name: worst[name][0])
    fall, size_bytes = worst[name]
    return (
        f"smoothed: times of {len(worst)} of {len(curves)} measured curves fall as messages grow, "
        f"{name} by {100.0 * fall / (1.0 + fall):.0f} % at {_size(size_bytes)}; they are "
        "priced by the nearest times that rise: measure again when the machine is quiet"
    )


def _named_curves(hardware: HardwareProfile) -> Iterator[tuple[str, Curve]]:
    for consecutive, kind in ((1, hardware.curves), (0, hardware.strided_curves)):
        for (operation, size), curve in kind.items():
            yield f"{operation}_size_{size}_consec_{consecutive}", curve
    for stages, curve in hardware.p2p_curves.items():
        yield f"pp_size_{stages}", curve


def partial_spread(hardware: HardwareProfile) -> str | None:
    """Return a sentence where some curves have percentiles and others do not, else None."""
    known = [curve.has_spread for _, curve in _named_curves(hardware)]
    if all(known) or not any(known):
        return None
    return (
        f"spread: {sum(known)} of {len(known)} measured curves have percentiles; what the others "
        "price does not move in the interval of the step time"
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / MIB:g} MiB" if num_bytes >= MIB else f"{num_bytes / 1024:g} KiB"


def reference_bytes(sidecar: Sidecar | None) -> float | None:
    """Return the message size that the bandwidths of a document stand for, None if unknown."""
    for run in reversed(sidecar.runs if sidecar is not None else []):
        size = run.metadata.get("reference_bytes")
        if isinstance(size, int | float) and size > 0:
            return float(size)
    return None


def at_odds(
    hardware: HardwareProfile,
    paths: Mapping[DocumentKind, Path],
    references: Mapping[DocumentKind, float | None],
    documented_times: Mapping[tuple[str, int], Curve],
) -> tuple[str, ...]:
    """Return a sentence for every document whose values differ from the curves beside it.

    Parameters
    ----------
    hardware : as read, its curves those of the sidecars where these have some.
    references : message size of the bandwidths of a document; without it every bandwidth between
        the smallest and the largest of the curve agrees.
    documented_times : curves of the keys of the sp_time document.
    """
    allreduce, transfers = OPERATIONS["allreduce"], OPERATIONS["p2p"]
    checks = {
        "allreduce": (
            _bandwidth(
                f"allreduce_size_{size}_consec_{int(consecutive)}",
                entry,
                hardware.allreduce_curve(size, consecutive),
                allreduce.bus_factor(size),
                references.get("allreduce"),
            )
            for (size, consecutive), entry in hardware.allreduce_bytes_per_s.items()
            if consecutive or size < hardware.world_size  # one world group, stored under both
        ),
        "p2p": (
            _bandwidth(
                f"pp_size_{stages}",
                entry,
                hardware.p2p_curves.get(stages),
                transfers.bus_factor(stages),
                references.get("p2p"),
            )
            for stages, entry in hardware.p2p_bytes_per_s.items()
        ),
        "sp_time": (
            found
            for (operation, size), curve in documented_times.items()
            for found in _times(f"{operation}_size_{size}", curve, hardware.curves[operation, size])
        ),
    }
    documents: tuple[DocumentKind, ...] = ("allreduce", "p2p", "sp_time")
    sentences = (
        _sentence(paths[kind], [found for found in checks[kind] if found is not None])
        for kind in documents
        if kind in paths
    )
    return tuple(sentence for sentence in sentences if sentence)


_Difference = tuple[float, str]
"""How far a value is from the curve, as |log ratio|, and both in words."""


def _bandwidth(
    key: str, entry: float, curve: Curve | None, factor: float, reference: float | None
) -> _Difference | None:
    if curve is None:
        return None
    rates = factor * curve.sizes_bytes / curve.times_s
    below = np.flatnonzero(curve.sizes_bytes <= (reference or 0.0))
    if below.size:
        # of a size that was not measured the document holds the next smaller one
        expected = float(rates[below[-1]])
    else:
        expected = float(np.clip(entry, rates.min(), rates.max()))
    return _difference(key, entry / GB, expected / GB, "GB/s")


def _times(name: str, documented: Curve, curve: Curve) -> Iterator[_Difference | None]:
    own = dict(zip(curve.sizes_bytes.tolist(), curve.times_s.tolist(), strict=True))
    for size_bytes, time_s in zip(documented.sizes_bytes, documented.times_s, strict=True):
        expected = own.get(float(size_bytes))
        if expected is not None:
            key = f"{name}_{int(size_bytes) // MIB}MB_time"
            yield _difference(key, float(time_s) / MS, expected / MS, "ms")


def _difference(key: str, value: float, expected: float, unit: str) -> _Difference | None:
    if abs(value / expected - 1.0) <= _ROUNDING:
        return None
    words = f"{key} is {value:.4g} {unit}, but the times in the sidecars say {expected:.4g} {unit}"
    return abs(float(np.log(value / expected))), words


def _sentence(path: Path, differences: Iterable[_Difference]) -> str:
    found = sorted(differences, key=lambda item: -item[0])
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"at odds: in {path.name} {found[0][1]}{more}; messages are priced by the sidecars: "
        "measure again, or remove their curves to plan with the documented values"
    )
