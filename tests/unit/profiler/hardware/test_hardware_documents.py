"""From measured cells to documented values, curves and warnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.documents.sidecar import Measurement, Run
from autopar.records import replace
from profiler.hardware.documents import (
    REPLACES,
    Documents,
    derive,
    family,
    kinds_of,
    newest_measurements,
)
from profiler.hardware.options import Cell, Cluster, plan_cells
from tests.unit.measured import (
    COPY_BYTES_PER_S,
    MIB,
    SLOWDOWN,
    make_cluster,
    make_options,
    measure,
    measure_all,
    unmeasured,
)

REFERENCE = 32 * MIB
OPTIONS = make_options(Path("unused"))
CLUSTER = make_cluster(1, 4)


def by_hand(
    operation: str,
    group_size: int,
    size_bytes: int,
    samples_s: dict[str, list[float]],
    *,
    consecutive: bool = True,
    **changes: object,
) -> Measurement:
    """Return a measured cell with these very samples."""
    cell = Cell(
        operation=operation,
        group_size=group_size,
        consecutive=consecutive,
        size_bytes=size_bytes,
        rounds=((tuple(range(group_size)),),),
        scope="intra-node",
    )
    return replace(measure(cell), samples_s=samples_s, **changes)


def keyed(*measurements: Measurement) -> dict[str, Measurement]:
    """Return measurements by their key."""
    return {m.key: m for m in measurements}


def derived(*measurements: Measurement, cluster: Cluster = CLUSTER) -> Documents:
    """Return the documents of these cells at the reference size of the command."""
    return derive(keyed(*measurements), cluster, REFERENCE)


def test_allreduce_is_bus_bandwidth_of_the_median() -> None:
    """4 ranks, 32 MiB in 10 ms: 2 * 3/4 * 33554432 bytes / 0.01 s = 5.0331648 GB/s."""
    found = derived(
        by_hand("allreduce", 4, REFERENCE, {"time": [0.01, 0.5, 0.009]}),
        by_hand("allreduce", 2, REFERENCE, {"time": [0.02]}, consecutive=False),
    )
    assert found.data["allreduce"] == {
        "allreduce_size_4_consec_1": pytest.approx(5.0331648),
        "allreduce_size_2_consec_0": pytest.approx(1.6777216),
    }


def test_p2p_is_message_bandwidth() -> None:
    """32 MiB to the next stage in 10 ms: 3.3554432 GB/s, whatever the other direction does."""
    found = derived(
        by_hand("p2p", 2, REFERENCE, {"time": [0.01]}),
        by_hand("p2p_bidirectional", 2, REFERENCE, {"time": [0.04]}),
    )
    assert found.data["p2p"] == {"pp_size_2": pytest.approx(3.3554432)}
    assert [c.operation for c in found.curves["p2p"]] == ["p2p"]


def test_sp_time_is_in_milliseconds_of_whole_mib() -> None:
    """64 KiB is in the curve and not in the document; strided groups are in neither."""
    found = derived(
        by_hand("allreduce", 4, 64 << 10, {"time": [1e-4]}),
        by_hand("allreduce", 4, MIB, {"time": [0.002]}),
        by_hand("all2all", 2, 1024 * MIB, {"time": [1.5]}),
        by_hand("allreduce", 2, MIB, {"time": [0.003]}, consecutive=False),
        by_hand("allgather", 4, MIB, {"time": [0.003]}),
    )
    assert found.data["sp_time"] == {
        "allreduce_size_4_1MB_time": pytest.approx(2.0),
        "all2all_size_2_1024MB_time": pytest.approx(1500.0),
    }
    curves = {(c.operation, c.group_size): c for c in found.curves["sp_time"]}
    assert set(curves) == {("allreduce", 4), ("all2all", 2), ("allgather", 4)}
    assert curves["allreduce", 4].sizes_bytes == [65536.0, 1048576.0]


@pytest.mark.parametrize(
    ("compute", "communication", "expected"),
    [(0.011, 0.013, 1.3), (0.014, 0.010, 1.4), (0.008, 0.009, 1.0), (0.5, 0.01, 10.0)],
)
def test_overlap_is_the_largest_slowdown(
    compute: float, communication: float, expected: float
) -> None:
    """The larger of both slow-downs counts, at least 1, and at most what readers take."""
    samples = {
        "compute_alone": [0.01],
        "communication_alone": [0.01],
        "compute_overlapped": [compute],
        "communication_overlapped": [communication],
        "both": [0.02],
    }
    found = derived(
        by_hand("overlap_allreduce", 4, 64 * MIB, samples),
        by_hand("overlap_allgather", 4, 64 * MIB, {**samples, "compute_overlapped": [0.001]}),
    )
    assert found.data["overlap"] == {"overlap_coe": pytest.approx(expected)}
    assert bool([w for w in found.warnings if "slowed down 50 times" in w]) == (compute == 0.5)


def test_the_copy_gives_memory_bandwidth() -> None:
    """64 MiB copied in 1 ms reads and writes 134217728 bytes: 134.2 GB/s."""
    found = derived(by_hand("memcopy", 1, 64 * MIB, {"time": [0.001]}))
    assert found.memory_bytes_per_s == pytest.approx(2 * 64 * MIB / 0.001)
    assert found.data["overlap"] is None


def test_a_whole_sweep_is_ordered_as_published() -> None:
    """Large groups first, neighbours before strided; all values of the made-up cluster."""
    found = derive(keyed(*measure_all(OPTIONS, CLUSTER)), CLUSTER, REFERENCE)
    assert found.warnings == []
    assert list(found.data["allreduce"] or {}) == [
        "allreduce_size_4_consec_1",
        "allreduce_size_2_consec_1",
        "allreduce_size_2_consec_0",
    ]
    assert list(found.data["p2p"] or {}) == ["pp_size_2", "pp_size_4"]
    keys = list(found.data["sp_time"] or {})
    assert len(keys) == 2 * 2 * 11
    assert keys[0] == "allreduce_size_4_1MB_time"
    assert keys[-1] == "all2all_size_2_1024MB_time"
    assert found.data["overlap"] == {"overlap_coe": pytest.approx(SLOWDOWN)}
    assert found.memory_bytes_per_s == pytest.approx(COPY_BYTES_PER_S, rel=0.1)
    for curve in found.curves["allreduce"]:
        assert curve.latency_s == pytest.approx(5e-6, rel=1e-6)
        bus = 2 * (curve.group_size - 1) / curve.group_size
        share = 1 if curve.consecutive else 2
        assert curve.seconds_per_byte == pytest.approx(bus * share / 200e9, rel=1e-6)
        assert curve.low_s is not None
        assert curve.high_s is not None
        for low, middle, high in zip(curve.low_s, curve.times_s, curve.high_s, strict=True):
            assert low < middle < high


def test_both_sidecars_tell_the_same_of_allreduce() -> None:
    """Readers take the curve of either file, so the two must be equal."""
    found = derive(keyed(*measure_all(OPTIONS, CLUSTER)), CLUSTER, REFERENCE)
    own = [c for c in found.curves["allreduce"] if c.consecutive]
    assert own == [c for c in found.curves["sp_time"] if c.operation == "allreduce"]


def test_the_order_of_measuring_changes_nothing() -> None:
    """The same cells in another order give the same documents, key by key."""
    cells = measure_all(OPTIONS, make_cluster(2, 4))
    forth = derive(keyed(*cells), make_cluster(2, 4), REFERENCE)
    back = derive(keyed(*reversed(cells)), make_cluster(2, 4), REFERENCE)
    assert str(forth) == str(back)


def test_one_size_has_no_fit() -> None:
    """One point cannot tell latency from bandwidth."""
    curve = derived(by_hand("p2p", 2, REFERENCE, {"time": [0.01]})).curves["p2p"][0]
    assert curve.latency_s is None
    assert curve.seconds_per_byte is None


def test_a_missing_reference_is_replaced_and_said() -> None:
    """The largest smaller size stands in; without one the key is left out; both are named."""
    cells = [c for c in plan_cells(OPTIONS, CLUSTER) if c.operation == "p2p"]
    found = derived(
        *(
            unmeasured(cell, "skipped", "it does not fit into memory")
            if cell.size_bytes >= REFERENCE or cell.group_size == 4
            else measure(cell)
            for cell in cells
        )
    )
    assert list(found.data["p2p"] or {}) == ["pp_size_2"]
    sixteen = measure(next(c for c in cells if c.group_size == 2 and c.size_bytes == 16 * MIB))
    median = sorted(sixteen.samples_s["time"])[3]
    assert found.data["p2p"] == {"pp_size_2": pytest.approx(16 * MIB / median / 1e9)}
    two, four = found.warnings
    assert "pp_size_2: 32 MiB is missing (it does not fit into memory)" in two
    assert "the value of 16 MiB" in two
    assert "pp_size_4" in four
    assert "no such key" in four


def test_left_out_sizes_are_named_and_too_few_are_warned_about() -> None:
    """Galvatron refuses an sp_time file with fewer than 8 sizes per group."""
    options = make_options(Path("unused"), operations=("all2all",), groups=(4,))
    cells = plan_cells(options, CLUSTER)
    found = derived(
        *(
            unmeasured(c, "skipped", "it does not fit into memory")
            if c.size_bytes > 64 * MIB
            else measure(c)
            for c in cells
        )
    )
    left_out, few = found.warnings
    assert (
        "has no value for 128 MiB, 256 MiB, 512 MiB, 1 GiB: it does not fit into memory" in left_out
    )
    assert "has 7 sizes" in few
    assert "--sizes 1M:1G:x2" in few


def test_a_missing_world_group_is_warned_about() -> None:
    """A plan for all devices needs the group of all devices."""
    found = derived(by_hand("allreduce", 2, REFERENCE, {"time": [0.01]}))
    assert any("allreduce_size_4_consec_1 is missing" in warning for warning in found.warnings)


def test_a_value_that_readers_refuse_is_warned_about() -> None:
    """32 MiB in 1000 s is below the bandwidths that a reader takes for GB/s."""
    found = derived(by_hand("p2p", 4, REFERENCE, {"time": [1000.0]}))
    assert [w for w in found.warnings if "pp_size_4" in w and "refuses" in w]


def test_nothing_measured_supports_nothing() -> None:
    """Without ok cells there is no document, no curve and no memory bandwidth."""
    cells = plan_cells(OPTIONS, CLUSTER)
    found = derived(*(unmeasured(cell, "failed", "rank 1 has gone") for cell in cells))
    assert set(found.data.values()) == {None}
    assert not any(found.curves.values())
    assert found.memory_bytes_per_s is None


def test_a_lone_device_has_documents_without_keys() -> None:
    """One device: overlap is measured with a copy, the rest has nothing to say."""
    cluster = make_cluster(1, 1)
    found = derived(*measure_all(OPTIONS, cluster), cluster=cluster)
    assert found.data["allreduce"] == found.data["p2p"] == {}
    assert found.data["sp_time"] is None
    assert found.data["overlap"] == {"overlap_coe": pytest.approx(SLOWDOWN)}
    assert not any(found.curves.values())
    assert any("instead of communication" in warning for warning in found.warnings)


def test_the_newest_ok_measurement_counts() -> None:
    """A later failure does not take an earlier result away; a later result does."""
    cell = plan_cells(OPTIONS, CLUSTER)[0]
    old, new, failed = measure(cell), measure(cell, factor=2.0), unmeasured(cell, "failed", "gone")

    def newest(*measurements: Measurement) -> Measurement:
        runs = [Run(id=str(n), measurements=[m]) for n, m in enumerate(measurements)]
        return newest_measurements(runs)[cell.key]

    assert newest(old, new) is new
    assert newest(old, failed) is old
    assert newest(failed, old) is old
    skipped = unmeasured(cell, "skipped", "too large")
    assert newest(failed, skipped) is skipped


def test_a_run_may_replace_what_was_before() -> None:
    """Only the operations that the later run names are replaced, with all their variants."""
    cells = measure_all(OPTIONS, CLUSTER)
    runs = [Run(id="1", measurements=cells), Run(id="2", metadata={REPLACES: "overlap,p2p"})]
    left = {family(m.operation) for m in newest_measurements(runs).values()}
    assert left == {"allreduce", "allgather", "reducescatter", "all2all"}


def test_every_cell_stands_in_a_sidecar() -> None:
    """What no sidecar held could not be resumed."""
    for m in measure_all(OPTIONS, CLUSTER) + measure_all(OPTIONS, make_cluster(1, 1)):
        assert kinds_of(m)
