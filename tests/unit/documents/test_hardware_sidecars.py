"""Additions of sidecars to hardware profiles: strided groups, transfers, latency, spread, notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents.hardware import hardware_file_name, read_hardware_dir, write_hardware
from autopar.documents.sidecar import DocumentKind, read_sidecar, sidecar_path
from autopar.errors import DocumentError
from autopar.rates.measured import Curve, HardwareProfile
from autopar.records import replace
from tests.cost_cases import toy_hardware
from tests.unit.documents_support import DOCUMENTS

KINDS: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
UNITS = {"allreduce": "GB/s", "p2p": "GB/s", "overlap": "1", "sp_time": "ms"}


BANDWIDTHS: dict[str, dict[str, float]] = {
    "allreduce": {
        "allreduce_size_4_consec_1": 15.0,
        "allreduce_size_2_consec_1": 10.0,
        "allreduce_size_2_consec_0": 10.0,
    },
    "p2p": {"pp_size_2": 10.0, "pp_size_4": 10.0},
}
"""What the times of `entry` come to, in GB/s of bus traffic."""


def write_dir(folder: Path, **sidecars: dict[str, Any]) -> Path:
    """Write the documents of 2 nodes x 2 GPUs, and the sidecars given by kind."""
    for kind in KINDS:
        path = folder / hardware_file_name(kind, 2, 2)
        path.write_text(json.dumps(BANDWIDTHS.get(kind, DOCUMENTS[kind])), encoding="utf-8")
        if kind in sidecars:
            head = {"version": 2, "document": kind, "unit": UNITS[kind], "source": "a test"}
            sidecar_path(path).write_text(json.dumps({**head, **sidecars[kind]}))
    return folder


def read(folder: Path) -> HardwareProfile:
    """Return the profile of the folder."""
    return read_hardware_dir(folder, num_nodes=2, gpus_per_node=2)


def entry(operation: str, size: int, **more: Any) -> dict[str, Any]:
    """Return a curve as a sidecar holds it."""
    return {
        "operation": operation,
        "group_size": size,
        "sizes_bytes": [1e4, 1e6],
        "times_s": [1e-5, 1e-4],
        **more,
    }


def test_curves_go_where_they_belong(tmp_path: Path) -> None:
    """Neighbours, strided groups and transfers, from whichever sidecar holds them."""
    folder = write_dir(
        tmp_path,
        allreduce={
            "curves": [
                entry("allreduce", 4, low_s=[9e-6, 9e-5], high_s=[2e-5, 2e-4], latency_s=8e-6),
                entry("allreduce", 2, consecutive=False),
            ]
        },
        p2p={"curves": [entry("p2p", 2), entry("p2p_bidirectional", 2)]},
        sp_time={"curves": [entry("reducescatter", 4), entry("all2all", 2, consecutive=False)]},
    )

    profile = read(folder)

    documented = {("allreduce", 4), ("all2all", 2)}
    assert set(profile.curves) == documented | {("reducescatter", 4)}
    assert set(profile.strided_curves) == {("allreduce", 2), ("all2all", 2)}
    assert set(profile.p2p_curves) == {2}
    curve = profile.curves["allreduce", 4]
    assert curve.sizes_bytes.tolist() == [1e4, 1e6]
    assert curve.low_s is not None
    assert curve.high_s is not None
    assert (curve.low_s.tolist(), curve.high_s.tolist()) == ([9e-6, 9e-5], [2e-5, 2e-4])
    assert curve.latency_s == 8e-6
    assert profile.has_spread
    assert not profile.curves["all2all", 2].has_spread


def test_a_latency_is_at_most_the_smallest_time(tmp_path: Path) -> None:
    """A fit over all sizes can miss the smallest one."""
    folder = write_dir(tmp_path, p2p={"curves": [entry("p2p", 2, latency_s=5e-5)]})

    assert read(folder).p2p_curves[2].latency_s == 1e-5


def test_unknown_operations_are_left_out_with_a_note(tmp_path: Path) -> None:
    """A newer profiler may measure more; what is known but never priced needs no note."""
    curves = [entry("broadcast", 4), entry("memcopy", 1), entry("allgather", 4)]
    profile = read(write_dir(tmp_path, allreduce={"curves": curves}))

    assert ("allgather", 4) in profile.curves
    assert not any(name in ("broadcast", "memcopy") for name, _ in profile.curves)
    sidecar = next(s for s in profile.sources if s.role == "allreduce sidecar")
    assert sidecar.notes == (
        "a test",
        "curves of the unknown operation 'broadcast' are ignored",
    )


@pytest.mark.parametrize("operation", ["p2p", "allreduce", "broadcast"])
def test_curves_of_a_larger_cluster_are_refused(tmp_path: Path, operation: str) -> None:
    """Whatever the operation, the file is not this cluster's."""
    folder = write_dir(tmp_path, p2p={"curves": [entry(operation, 8)]})
    with pytest.raises(DocumentError, match="a group of 8 GPUs"):
        read(folder)


def test_two_curves_of_one_group_are_refused(tmp_path: Path) -> None:
    """Nobody could say which of them counts; strided groups are other groups."""
    curves = [entry("allreduce", 2), entry("allreduce", 2, consecutive=False)]
    assert read(write_dir(tmp_path, allreduce={"curves": curves})).strided_curves
    twice = write_dir(tmp_path, allreduce={"curves": [*curves, entry("allreduce", 2)]})
    with pytest.raises(DocumentError, match="allreduce in consecutive groups of 2 has two curves"):
        read(twice)


def test_memory_bandwidth_may_come_from_the_overlap_sidecar(tmp_path: Path) -> None:
    """The run that measures overlap copies memory too; the other sidecars need not know it."""
    folder = write_dir(
        tmp_path, overlap={"memory_bytes_per_s": 2e12}, p2p={"memory_bytes": 8e10}, allreduce={}
    )

    profile = read(folder)

    assert (profile.memory_bytes_per_s, profile.memory_bytes) == (2e12, 8e10)


def test_one_synthetic_file_makes_the_profile_synthetic(tmp_path: Path) -> None:
    """And its sources say which one it is."""
    profile = read(write_dir(tmp_path, p2p={"synthetic": True}, allreduce={}))

    assert profile.synthetic
    assert not profile.estimated
    assert [s.role for s in profile.sources if s.synthetic] == ["p2p", "p2p sidecar"]
    assert not read(write_dir(tmp_path, p2p={})).synthetic


def curve(seed: float, *, spread: bool, latency: bool, whole_mib: bool = True) -> Curve:
    """Return a curve of three sizes."""
    times = np.array([1.0, 3.0, 900.0]) * seed * 1e-5
    return Curve(
        sizes_bytes=np.array([1.0, 4.0, 1024.0]) * 2**20 + (0.0 if whole_mib else 512.0),
        times_s=times,
        low_s=times * 0.9 if spread else None,
        high_s=times * 1.3 if spread else None,
        latency_s=seed * 1e-6 if latency else None,
    )


def same(left: Curve, right: Curve) -> None:
    """Compare two curves to 1e-12."""
    for name in ("sizes_bytes", "times_s", "low_s", "high_s", "latency_s"):
        a, b = getattr(left, name), getattr(right, name)
        assert (a is None) == (b is None), name
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name)


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    """read(write(profile)) has every curve, spread, latency and warning of the profile."""
    profile = HardwareProfile(
        num_nodes=2,
        gpus_per_node=2,
        domain_gpus=4,
        # as of the curves: a value that differs from its curve was edited, and replaces it
        allreduce_bytes_per_s={
            (4, True): 1.7e11,
            (4, False): 1.7e11,
            (2, True): 6e10,
            (2, False): 2e10,
        },
        p2p_bytes_per_s={2: 1.5e10, 4: 2e9},
        curves={
            ("allreduce", 4): curve(1.0, spread=True, latency=True),
            ("allreduce", 2): curve(2.0, spread=False, latency=False),
            ("all2all", 4): curve(3.0, spread=False, latency=True),
            ("all2all", 2): curve(4.0, spread=False, latency=False, whole_mib=False),
            ("allgather", 4): curve(5.0, spread=True, latency=False),
        },
        strided_curves={
            ("allreduce", 2): curve(6.0, spread=True, latency=True),
            ("reducescatter", 2): curve(7.0, spread=False, latency=False),
        },
        p2p_curves={2: curve(8.0, spread=True, latency=True, whole_mib=False)},
        memory_bytes=8e10,
        memory_bytes_per_s=2e12,
        name="cluster",
        synthetic=True,
    )
    write_hardware(profile, tmp_path)

    back = read(tmp_path)

    for kind in ("curves", "strided_curves", "p2p_curves"):
        expected, found = getattr(profile, kind), getattr(back, kind)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            same(found[key], value)
    assert back.allreduce_bytes_per_s == pytest.approx(dict(profile.allreduce_bytes_per_s))
    assert back.p2p_bytes_per_s == pytest.approx(dict(profile.p2p_bytes_per_s))
    assert (back.synthetic, back.estimated, back.name) == (True, False, "cluster")
    assert (back.memory_bytes, back.memory_bytes_per_s) == (8e10, 2e12)
    assert (back.domain_gpus, back.joined_gpus) == (4, 4)
    assert replace(back, domain_gpus=None).joined_gpus == 2


def test_a_rack_has_whole_nodes(tmp_path: Path) -> None:
    profile = replace(toy_hardware(num_nodes=2, gpus_per_node=4), domain_gpus=6)
    write_hardware(profile, tmp_path)

    with pytest.raises(DocumentError, match=r"'domain_gpus'.* 6, expected a multiple of the 4"):
        read_hardware_dir(tmp_path, num_nodes=2, gpus_per_node=4)


def test_what_keys_can_say_stays_out_of_the_sidecar(tmp_path: Path) -> None:
    """Whole-MiB times without spread are keys; with a spread they are both."""
    profile = HardwareProfile(
        num_nodes=2,
        gpus_per_node=2,
        allreduce_bytes_per_s={(4, True): 1e10},
        p2p_bytes_per_s={2: 1e9},
        curves={
            ("allreduce", 4): curve(1.0, spread=False, latency=False),
            ("all2all", 4): curve(1.0, spread=True, latency=False),
        },
    )
    write_hardware(profile, tmp_path)
    path = tmp_path / hardware_file_name("sp_time", 2, 2)

    sidecar = read_sidecar(path)

    assert sidecar is not None
    assert [data.operation for data in sidecar.curves] == ["all2all"]
    assert set(json.loads(path.read_text())) == {
        f"{name}_size_4_{size}MB_time" for name in ("allreduce", "all2all") for size in (1, 4, 1024)
    }
