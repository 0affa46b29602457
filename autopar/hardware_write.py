"""Writes a HardwareProfile as the four documented files, each with its sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.hardware import Curve, HardwareProfile
from autopar.hardware_names import hardware_file_name
from autopar.hardware_sidecars import hardware_sidecar
from autopar.jsonio import write_json
from autopar.sidecar import DocumentKind, write_sidecar
from autopar.units import GB, MIB, MS

__all__ = ["write_hardware"]


def write_hardware(profile: HardwareProfile, out_dir: Path | str) -> list[Path]:
    """Write the documented files of a profile and their sidecars; return their paths.

    Bandwidths in GB/s, times in ms. What documented keys cannot express (other collectives,
    sizes that are not whole MiB) goes to the sidecar, in base units.
    """
    out = Path(out_dir)
    shape = (profile.num_nodes, profile.gpus_per_node)
    expressible = {
        group: curve
        for group, curve in profile.curves.items()
        if group[0] in ("allreduce", "all2all")
    }
    documents: list[tuple[DocumentKind, dict[str, float]]] = [
        ("allreduce", _allreduce_keys(profile)),
        (
            "p2p",
            {f"pp_size_{p}": v / GB for p, v in sorted(profile.p2p_bytes_per_s.items())},
        ),
        ("overlap", {"overlap_coe": profile.overlap_coefficient}),
    ]
    if profile.curves:
        documents.append(("sp_time", _sp_time_keys(expressible)))
    paths = []
    for kind, data in documents:
        path = out / hardware_file_name(kind, *shape)
        write_json(path, data)
        paths += [path, write_sidecar(path, hardware_sidecar(kind, profile))]
    return paths


def _allreduce_keys(profile: HardwareProfile) -> dict[str, float]:
    table = profile.allreduce_bytes_per_s
    world = profile.world_size
    result = {}
    for size, consecutive in sorted(table, reverse=True):
        value = table[size, consecutive]
        if size == world and not consecutive and table.get((world, True)) == value:
            continue  # documented files leave the alias out
        result[f"allreduce_size_{size}_consec_{int(consecutive)}"] = value / GB
    return result


def _sp_time_keys(curves: Mapping[tuple[str, int], Curve]) -> dict[str, float]:
    result = {}
    for operation, size in sorted(curves, key=lambda g: (g[0] != "allreduce", -g[1])):
        curve = curves[operation, size]
        for size_bytes, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
            if size_bytes % MIB == 0:
                key = f"{operation}_size_{size}_{int(size_bytes) // MIB}MB_time"
                result[key] = float(time_s) / MS
    return result
