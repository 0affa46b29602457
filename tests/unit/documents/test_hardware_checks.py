"""What is said of hardware files: values at odds with the curves beside them, times that fall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents.hardware import hardware_file_name, read_hardware_dir
from autopar.documents.sidecar import DocumentKind, sidecar_path
from autopar.rates.measured import Curve, HardwareProfile, falling_times
from search.planning.cost.model import CostModel
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

MIB = 2.0**20
SIZES = [MIB, 32 * MIB, 1024 * MIB]
TIMES = [1e-3, 16e-3, 500e-3]
"""All-reduce of 4: 1.57, 3.15 and 3.22 GB/s of bus bandwidth; transfers 1.05, 2.10, 2.15."""
AT_32 = 1.5 * 32 * MIB / 16e-3 / 1e9


def measured(operation: str, size: int, **more: Any) -> dict[str, Any]:
    """Return a curve as a sidecar holds it."""
    return {
        "operation": operation,
        "group_size": size,
        "sizes_bytes": SIZES,
        "times_s": TIMES,
        **more,
    }


def read(folder: Path, changes: dict[str, float], reference: float | None) -> HardwareProfile:
    """Return 1 node x 4 GPUs as measured at 32 MiB, with documented values changed by hand."""
    documents: dict[DocumentKind, tuple[dict[str, float], str, list[dict[str, Any]]]] = {
        "allreduce": (
            {
                "allreduce_size_4_consec_1": AT_32,
                "allreduce_size_2_consec_1": AT_32 / 1.5,
                "allreduce_size_2_consec_0": AT_32 / 1.5,
            },
            "GB/s",
            [
                measured("allreduce", 4),
                measured("allreduce", 2),
                measured("allreduce", 2, consecutive=False),
            ],
        ),
        "p2p": ({"pp_size_2": AT_32 / 1.5, "pp_size_4": 7.0}, "GB/s", [measured("p2p", 2)]),
        "overlap": ({"overlap_coe": 1.2}, "1", []),
        "sp_time": (
            {"allreduce_size_4_1MB_time": 1.0, "all2all_size_4_32MB_time": 9.0},
            "ms",
            [measured("allreduce", 4)],
        ),
    }
    for kind, (values, unit, curves) in documents.items():
        path = folder / hardware_file_name(kind, 1, 4)
        edited = {key: changes.get(key, value) for key, value in values.items()}
        path.write_text(json.dumps(edited), encoding="utf-8")
        metadata = {} if reference is None else {"reference_bytes": int(reference)}
        sidecar = {
            "version": 2,
            "document": kind,
            "unit": unit,
            "source": "a test",
            "curves": curves,
            "runs": [{"metadata": {"reference_bytes": 1}}, {"metadata": metadata}],
        }
        if reference is None:
            del sidecar["runs"]
        sidecar_path(path).write_text(json.dumps(sidecar), encoding="utf-8")
    return read_hardware_dir(folder, num_nodes=1, gpus_per_node=4)


@pytest.mark.parametrize("reference", [32 * MIB, 100 * MIB, None])
def test_measured_files_agree(tmp_path: Path, reference: float | None) -> None:
    """Also rounded, and where the reference size was not measured but a smaller one was."""
    rounded = {"allreduce_size_4_consec_1": round(AT_32, 2)}
    assert read(tmp_path, rounded, reference).notes == ()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"allreduce_size_4_consec_1": 2.0},
            "allreduce_size_4_consec_1 is 2 GB/s",
        ),
        (
            {"allreduce_size_2_consec_0": 2.2, "allreduce_size_2_consec_1": 1.0},
            "allreduce_size_2_consec_1 is 1 GB/s",
        ),
        (
            {"pp_size_2": 2.0, "pp_size_4": 8.0},
            "pp_size_2 is 2 GB/s",
        ),
        (
            {"allreduce_size_4_1MB_time": 0.5, "all2all_size_4_32MB_time": 1.0},
            "allreduce_size_4_1MB_time is 0.5 ms",
        ),
    ],
)
def test_a_value_edited_by_hand_is_said(
    tmp_path: Path, changes: dict[str, float], said: str
) -> None:
    """One sentence for a document, with the value that is farthest from its curve."""
    (note,) = read(tmp_path, changes, 32 * MIB).notes

    assert note.startswith("contradiction: in ")
    assert said in note
    assert "price these messages, without latency: " in note


def test_without_the_reference_size_any_measured_bandwidth_agrees(tmp_path: Path) -> None:
    """A value between the slowest and the fastest may be that of a size in between."""
    values = {"pp_size_2": 1.5, "pp_size_4": 1.5}
    assert read(tmp_path, values, None).notes == ()
    (note,) = read(tmp_path, {**values, "pp_size_2": 9.0}, None).notes[:1]
    assert "pp_size_2 is 9 GB/s" in note


def test_a_sidecar_of_the_same_run_wins_until_the_document_is_edited(tmp_path: Path) -> None:
    """Its curve has latency; an edited value is one that a person wants to be believed."""

    def all_reduce_s(hardware: HardwareProfile) -> float:
        cost = CostModel(toy_spec(), toy_model(), hardware, SearchOptions())
        assert set(hardware.notes) <= set(cost.notes)
        group = np.array([cost.groups.index(4, 1)])
        return float(cost.groups.seconds("allreduce", np.array([32 * MIB]), group)[0])

    assert all_reduce_s(read(tmp_path, {}, 32 * MIB)) == pytest.approx(16e-3)
    edited = read(tmp_path, {"allreduce_size_4_consec_1": 2.0}, 32 * MIB)
    assert all_reduce_s(edited) == pytest.approx(1.5 * 32 * MIB / 2e9)
    assert len(edited.notes) == 1


def documents(folder: Path, bandwidth: float) -> HardwareProfile:
    """Return 1 node x 4 GPUs of documents alone: times of 3.15 GB/s, bandwidths as given."""
    values: dict[DocumentKind, dict[str, float]] = {
        "allreduce": {
            "allreduce_size_4_consec_1": bandwidth,
            "allreduce_size_2_consec_1": bandwidth,
            "allreduce_size_2_consec_0": bandwidth,
        },
        "p2p": {"pp_size_2": 5.0, "pp_size_4": 5.0},
        "overlap": {"overlap_coe": 1.0},
        "sp_time": {
            f"{operation}_size_{size}_{mib}MB_time": 2.0 * (size - 1) / size * mib * MIB / 3.15e6
            for operation in ("allreduce", "all2all")
            for size in (2, 4)
            for mib in (1, 64, 512)
        },
    }
    for kind, keys in values.items():
        path = folder / hardware_file_name(kind, 1, 4)
        path.write_text(json.dumps(keys), encoding="utf-8")
    return read_hardware_dir(folder, num_nodes=1, gpus_per_node=4)


@pytest.mark.parametrize("bandwidth", [0.315, 3.15, 3.4, 31.5])
def test_bandwidths_price_all_reduces_and_sp_time_sequence_parallelism(
    tmp_path: Path, bandwidth: float
) -> None:
    """As documented; files without sidecars may be of two runs, and a conflict is said once."""
    hardware = documents(tmp_path, bandwidth)
    cost = CostModel(toy_spec(), toy_model(), hardware, SearchOptions())
    group, size = np.array([cost.groups.index(4, 1)]), np.array([64 * MIB])
    ring_s = 1.5 * 64 * MIB / (bandwidth * 1e9)
    timed_s = 1.5 * 64 * MIB / 3.15e9

    assert cost.groups.seconds("allreduce", size, group)[0] == pytest.approx(ring_s)
    assert cost.groups.seconds("allgather", size, group)[0] == pytest.approx(ring_s / 2)
    for operation in ("allgather", "reducescatter"):
        found = cost.groups.seconds(operation, size, group, sequence=True)
        assert found[0] == pytest.approx(timed_s / 2)
    assert cost.groups.seconds("all2all", size, group)[0] == pytest.approx(timed_s)
    odd = [note for note in hardware.notes if note.startswith("contradiction: ")]
    if abs(bandwidth / 3.15 - 1.0) < 0.1:
        assert odd == []
    else:
        (note,) = odd
        assert f"_consec_1 is {bandwidth:g} GB/s, but sp_time_1nodes_4gpus_per_node.json" in note
        assert "3.15 GB/s for messages of 16 MiB and more (and 1 more)" in note


def test_odd_values_of_a_file_reach_the_notes(tmp_path: Path) -> None:
    """A coefficient below 1, and a curve that nobody knows, are said with the file's name."""
    read(tmp_path, {"overlap_coe": 0.9}, 32 * MIB)
    path = sidecar_path(tmp_path / hardware_file_name("p2p", 1, 4))
    sidecar = json.loads(path.read_text(encoding="utf-8"))
    sidecar["curves"].append(measured("broadcast", 2))
    path.write_text(json.dumps(sidecar), encoding="utf-8")

    assert read_hardware_dir(tmp_path, num_nodes=1, gpus_per_node=4).notes == (
        (
            "p2p_bandwidth_1nodes_4gpus_per_node.json: curves of the unknown operation 'broadcast' "
            "are ignored"
        ),
        "overlap_coefficient.json: overlap_coe 0.9 is below 1 and was read as 1",
    )


def test_times_that_fall_are_said_once() -> None:
    """With the worst of them; scatter of a few percent is not worth a line."""

    def curve(*times: float) -> Curve:
        return Curve(
            sizes_bytes=np.array([2.0**14, 2.0**19, 2.0**22])[: len(times)],
            times_s=np.array(times),
        )

    rising, scattered = curve(1.0, 1.0, 2.0), curve(1.0, 0.97, 2.0)
    assert falling_times(toy_hardware(curves={("allreduce", 8): rising})) is None
    assert falling_times(toy_hardware(p2p_curves={2: scattered, 4: curve(1.0)})) is None
    found = falling_times(
        toy_hardware(
            curves={("allreduce", 8): rising, ("allgather", 4): curve(1.0, 0.5, 2.0)},
            strided_curves={("allreduce", 4): curve(1.0, 2.0, 0.5)},
            p2p_curves={2: curve(1.0, 0.9, 1.0)},
        )
    )

    assert found is not None
    assert found.startswith("smoothed: times of 3 of 4 measured curves fall ")
    assert "allreduce_size_4_consec_0 by 75 % at 4 MiB" in found
