"""The files of a run: derived, kept, replaced and continued by the next run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import write_json
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    Measurement,
    Sidecar,
    Straggler,
    sidecar_path,
    write_sidecar,
)
from autopar.errors import DocumentError, InputError
from autopar.records import replace
from profiler.environment import host_labels
from profiler.hardware.options import Cluster, plan_cells
from profiler.hardware.record import HardwareRecord
from tests.unit.measured import (
    COPY_BYTES_PER_S,
    METADATA,
    MIB,
    SLOWDOWN,
    make_cluster,
    make_options,
    measure,
    unmeasured,
)
from tests.unit.record_support import (
    ALLREDUCE,
    OVERLAP,
    P2P,
    SHORT,
    SP_TIME,
    contents,
    load,
    measured_dir,
    opened,
    planned,
    sidecar_of,
)


@pytest.mark.whole
def test_a_whole_run_is_read_as_a_profile(tmp_path: Path) -> None:
    """All four files, their sidecars and what readers make of them."""
    cells = planned("all", sizes=tuple(MIB << n for n in range(11)))
    with opened(tmp_path, sizes=tuple(MIB << n for n in range(11))) as record:
        assert record.notes == []
        assert record.missing(cells) == cells
        for cell in cells:
            record.put(measure(cell))
        assert record.missing(cells) == []
        assert record.counts() == (len(cells), 0, 0)
        assert record.warnings() == []
        names = {path.name for path in record.paths()}
    assert names == {n + s for n in (ALLREDUCE, P2P, SP_TIME, OVERLAP) for s in ("", ".meta.json")}
    assert names == set(contents(tmp_path))

    profile = read_hardware_dir(tmp_path, num_nodes=1, gpus_per_node=4)
    assert profile.allreduce_bytes_per_s[4, True] == pytest.approx(200e9, rel=0.03)
    assert profile.allreduce_bytes_per_s[2, False] == pytest.approx(100e9, rel=0.03)
    assert profile.p2p_bytes_per_s[2] == pytest.approx(200e9, rel=0.04)
    assert profile.overlap_coefficient == pytest.approx(SLOWDOWN)
    assert profile.memory_bytes == 80e9
    assert profile.memory_bytes_per_s == pytest.approx(COPY_BYTES_PER_S, rel=0.05)
    assert len(profile.curves["allgather", 2].sizes_bytes) == 11
    assert not profile.estimated
    assert (tmp_path / ALLREDUCE).read_text(encoding="utf-8").startswith('{\n    "allreduce_size_4')


def test_a_sidecar_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    """Unit, command, hosts, metadata, raw samples and their curves; rows stay readable."""
    cells = measured_dir(tmp_path)
    sidecar = sidecar_of(tmp_path / SP_TIME)
    assert sidecar.unit == "ms"
    assert sidecar.source == "measured by `torchrun ... -m profiler.hardware` on a,b"
    assert sidecar.name == "made-up_1x4"
    assert not sidecar.synthetic
    (run,) = sidecar.runs
    assert run.metadata == METADATA
    by_key = {m.key: m for m in run.measurements}
    expected = {
        c.key
        for c in cells
        if c.operation in ("allreduce", "allgather", "reducescatter", "all2all") and c.consecutive
    }
    assert set(by_key) == expected
    cell = next(c for c in cells if c.key in expected)
    assert by_key[cell.key] == measure(cell)
    text = sidecar_path(tmp_path / SP_TIME).read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= 110
    assert text.count("\n") < 40 * len(expected)


def test_synthetic_times_are_marked(tmp_path: Path) -> None:
    """Ranks that share a GPU describe no machine, and no real run continues theirs."""
    with opened(tmp_path, synthetic=True) as record:
        record.put(measure(planned("p2p")[0]))
    sidecar = sidecar_of(tmp_path / P2P)
    assert sidecar.synthetic
    assert sidecar.source.startswith("synthetic: several ranks share one GPU")
    with pytest.raises(InputError, match=r"synthetic and real.*--force"):
        opened(tmp_path, resume=True)


def test_only_the_files_of_a_measurement_are_written(tmp_path: Path) -> None:
    """A transfer does not touch the all-reduce files, nor strided groups the sp_time file."""
    with opened(tmp_path) as record:
        record.put(measure(planned("p2p")[0]))
        assert set(contents(tmp_path)) == {P2P, P2P + ".meta.json"}
        strided = next(c for c in planned("allreduce") if not c.consecutive)
        record.put(measure(strided))
        assert not (tmp_path / SP_TIME).exists()
        record.put(measure(planned("allgather")[0]))
        assert not (tmp_path / SP_TIME).exists()  # all-gather has no documented key
        assert sidecar_path(tmp_path / SP_TIME).exists()


def test_failed_and_skipped_cells_are_kept_and_tried_again(tmp_path: Path) -> None:
    """They are counted and recorded with their reason, and missing for the next run."""
    cells = planned("p2p")
    with opened(tmp_path) as record:
        record.put(measure(cells[0]))
        record.put(unmeasured(cells[1], "failed", "rank 1 on host a does not answer"))
        record.put(unmeasured(cells[2], "skipped", "it does not fit into memory"))
        assert record.counts() == (1, 1, 1)
    with opened(tmp_path, resume=True) as record:
        assert record.missing(cells) == cells[1:]
        for cell in record.missing(cells):
            record.put(measure(cell))
        assert record.counts() == (len(cells), 0, 0)
    runs = sidecar_of(tmp_path / P2P).runs
    label = host_labels(["a"], tmp_path)["a"]
    assert [m.reason for m in runs[0].measurements][1] == f"rank 1 on host {label} does not answer"
    assert [len(run.measurements) for run in runs] == [3, len(cells) - 1]


@pytest.mark.parametrize("named", [False, True])
def test_no_file_names_a_host_unless_somebody_asks(tmp_path: Path, named: bool) -> None:
    """Sources, stragglers and reasons say labels, which tell the hosts apart."""
    hosts = ("login7.example", "login8.example")
    options = make_options(tmp_path, sizes=SHORT, host_names=named)
    with HardwareRecord(
        tmp_path,
        cluster=Cluster(hosts=hosts),
        options=options,
        metadata={},
        memory_bytes=None,
        synthetic=False,
        name="made-up_2x1",
    ) as record:
        first, second = planned("p2p")[:2]
        slow = Straggler(rank=1, host=hosts[1], ratio=3.0)
        record.put(replace(measure(first), stragglers=[slow]))
        record.put(unmeasured(second, "failed", f"rank 0 on host {hosts[0]}: connection reset"))
    text = "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.json"))
    assert all((host in text) == named for host in hosts)
    if not named:
        assert all(label in text for label in host_labels(hosts, tmp_path).values())


@pytest.mark.parametrize(
    ("operation", "number", "code"),
    [("overlap", 1, 0), ("overlap", 99, 1), ("p2p", 1, 1), ("allreduce", 1, 1)],
)
def test_a_failed_cell_counts_if_a_file_lacks_a_value(
    tmp_path: Path, operation: str, number: int, code: int
) -> None:
    """A busy machine fails single overlap cells, and the others give the coefficient."""
    cells = planned("all")
    doomed = [cell for cell in cells if cell.operation.startswith(operation)][:number]
    with opened(tmp_path) as record:
        for cell in cells:
            done = unmeasured(cell, "failed", "busy") if cell in doomed else measure(cell)
            record.put(done)
        warnings = record.warnings()
        assert record.conclude(warnings) == code
        assert record.counts().failed == len(doomed)
    if operation == "overlap":
        (said,) = (line for line in warnings if line.startswith("overlap_coe ignores "))
        assert all(cell.key in said for cell in doomed)
        assert (tmp_path / OVERLAP).exists() == (code == 0)


def test_one_device_gets_all_that_a_planner_asks_for(tmp_path: Path) -> None:
    """A world of one writes documents without keys, which are read as a profile."""
    with opened(tmp_path, num_gpus=1) as record:
        options = make_options(tmp_path, sizes=SHORT)
        for cell in plan_cells(options, make_cluster(1, 1)):
            record.put(measure(cell))
    profile = read_hardware_dir(tmp_path, num_nodes=1, gpus_per_node=1)
    assert profile.overlap_coefficient == pytest.approx(SLOWDOWN)
    assert load(tmp_path / "p2p_bandwidth_1nodes_1gpus_per_node.json") == {}


def test_earlier_files_are_not_touched_without_an_option(tmp_path: Path) -> None:
    """The sentence names the file and both options; other operations may be added freely."""
    measured_dir(tmp_path, "p2p")
    before = contents(tmp_path)
    with pytest.raises(InputError, match=rf"{P2P}: .*--resume.*--force"):
        opened(tmp_path)
    assert contents(tmp_path) == before
    with opened(tmp_path, operations=("overlap",)) as record:
        record.put(measure(planned("memcopy")[0]))
    assert contents(tmp_path).items() > before.items()


def test_resume_keeps_what_is_there(tmp_path: Path) -> None:
    """A complete directory has nothing missing, and is not written again."""
    cells = measured_dir(tmp_path)
    before = contents(tmp_path)
    with opened(tmp_path, resume=True) as record:
        assert record.missing(cells) == []
        assert record.counts().ok == len(cells)
        assert record.notes == []
    assert contents(tmp_path) == before


def test_resume_refuses_what_is_not_comparable(tmp_path: Path) -> None:
    """Samples of two machines do not meet in one document."""
    measured_dir(tmp_path, "p2p")
    before = contents(tmp_path)
    other = {**METADATA, "device": "Another GPU"}
    with pytest.raises(InputError, match=r"Some GPU and Another GPU.*--force"):
        opened(tmp_path, metadata=other, resume=True)
    assert contents(tmp_path) == before
    with opened(tmp_path, metadata=other, operations=("overlap",)) as record:
        assert [note for note in record.notes if P2P in note and "Another GPU" in note]


def test_force_keeps_history(tmp_path: Path) -> None:
    """Earlier samples stay in the sidecar and are used no more, by resuming runs either."""
    cells = planned("p2p")
    measured_dir(tmp_path, "p2p")
    first = load(tmp_path / P2P)
    with opened(tmp_path, force=True, operations=("p2p",)) as record:
        assert record.missing(cells) == cells
        assert load(tmp_path / P2P) == first
        record.put(measure(cells[0], factor=2.0))
    second = load(tmp_path / P2P)
    assert list(second) == ["pp_size_2"]
    assert second["pp_size_2"] == pytest.approx(float(str(first["pp_size_2"])) / 2)
    old, new = sidecar_of(tmp_path / P2P).runs
    assert len(old.measurements) == len(cells)
    assert len(new.measurements) == 1
    with opened(tmp_path, resume=True, operations=("p2p",)) as record:
        assert record.missing(cells) == cells[1:]
        record.put(measure(cells[1], factor=2.0))
    assert [len(run.measurements) for run in sidecar_of(tmp_path / P2P).runs] == [len(cells), 1, 1]


def test_force_of_one_operation_keeps_the_others(tmp_path: Path) -> None:
    """All-to-all stays in use while all-reduce is measured again on the same machine."""
    measured_dir(tmp_path)
    with opened(tmp_path, force=True, operations=("allreduce",)) as record:
        assert record.missing(planned("all2all")) == []
        assert record.missing(planned("allreduce")) == planned("allreduce")
        record.put(measure(next(c for c in planned("allreduce"))))
    kept = [key for key in load(tmp_path / SP_TIME) if key.startswith("all2all")]
    assert len(kept) == len(planned("all2all"))


def test_force_on_another_machine_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    """Nothing that was measured elsewhere stands beside the new values of a file."""
    measured_dir(tmp_path)
    other = {**METADATA, "device": "Another GPU"}
    with opened(tmp_path, metadata=other, force=True, operations=("all2all",)) as record:
        record.put(measure(planned("all2all")[0]))
    assert list(load(tmp_path / SP_TIME)) == ["all2all_size_4_32MB_time"]
    with opened(tmp_path, metadata=other, resume=True, operations=("all2all",)) as record:
        assert record.missing(planned("all2all")) == planned("all2all")[1:]


def test_warnings_name_values_of_before(tmp_path: Path) -> None:
    """A forced run in which everything failed leaves the old document, and says so."""
    cells = measured_dir(tmp_path, "p2p")
    with opened(tmp_path, force=True, operations=("p2p",)) as record:
        record.put(unmeasured(cells[0], "failed", "rank 1 has gone"))
        assert any("values of before" in warning for warning in record.warnings())
    assert load(tmp_path / P2P)


@pytest.mark.parametrize("damage", [b"", b'{"version": 2, "runs": [', b"\xff\xfe", b"[]", b"{}"])
def test_a_damaged_sidecar_is_moved_aside(tmp_path: Path, damage: bytes) -> None:
    """Its cells are measured again; the damaged bytes are kept, a second time too."""
    cells = measured_dir(tmp_path)
    path = sidecar_path(tmp_path / P2P)
    for name in (path.name + ".damaged", path.name + ".damaged-1"):
        path.write_bytes(damage)
        with opened(tmp_path, resume=True) as record:
            assert (tmp_path / name).read_bytes() == damage
            assert any(name in note for note in record.notes)
            again = [c for c in cells if c.operation.startswith("p2p")]
            assert record.missing(cells) == again
            for cell in again:
                record.put(measure(cell))
    assert list(load(tmp_path / P2P)) == ["pp_size_2", "pp_size_4"]


def test_a_damaged_sidecar_needs_an_option_too(tmp_path: Path) -> None:
    """Nothing is moved before the user has said what to do with earlier files."""
    measured_dir(tmp_path, "p2p")
    sidecar_path(tmp_path / P2P).write_bytes(b"{")
    before = contents(tmp_path)
    with pytest.raises(InputError, match="--resume"):
        opened(tmp_path)
    assert contents(tmp_path) == before


def test_a_sidecar_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    """It is no damage: the sentence asks for an update."""
    measured_dir(tmp_path, "p2p")
    path = sidecar_path(tmp_path / P2P)
    write_json(path, {**load(path), "version": SIDECAR_VERSION + 1})
    before = contents(tmp_path)
    with pytest.raises(DocumentError, match="Update autopar"):
        opened(tmp_path, resume=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "state"),
    [(b'{"pp_size_2": 1', "was damaged"), (None, "was missing"), (b'{"pp_size_2": 7.0}', "values")],
)
def test_a_document_is_derived_again(tmp_path: Path, content: bytes | None, state: str) -> None:
    """Half-written, lost or changed: the samples have what it should say."""
    measured_dir(tmp_path, "p2p")
    document = tmp_path / P2P
    whole = document.read_bytes()
    document.unlink()
    if content is not None:
        document.write_bytes(content)
    with opened(tmp_path, resume=True) as record:
        assert [note for note in record.notes if state in note and P2P in note]
    assert document.read_bytes() == whole


def test_a_cell_that_reached_one_of_two_sidecars_is_not_lost(tmp_path: Path) -> None:
    """Killed between two files: the cells of the first one come into the second one."""
    cells = measured_dir(tmp_path)
    kept = sidecar_path(tmp_path / SP_TIME).read_bytes()
    sidecar_path(tmp_path / SP_TIME).unlink()
    (tmp_path / SP_TIME).unlink()
    with opened(tmp_path, resume=True) as record:
        missing = record.missing(cells)
        assert {c.operation for c in missing} == {"all2all", "allgather", "reducescatter"}
        for cell in missing:
            record.put(measure(cell))
    restored = {m.key for run in sidecar_of(tmp_path / SP_TIME).runs for m in run.measurements}
    assert restored == {m["key"] for m in json.loads(kept)["runs"][0]["measurements"]}


@pytest.mark.parametrize("estimated", [False, True])
def test_files_of_others_are_never_lost(tmp_path: Path, estimated: bool) -> None:
    """Without --force they are refused; with it they get another name, twice if need be."""
    document = tmp_path / P2P
    write_json(document, {"pp_size_4": 12.5})
    if estimated:
        sidecar = Sidecar(
            version=SIDECAR_VERSION, document="p2p", unit="GB/s", source="datasheet", estimated=True
        )
        write_sidecar(document, sidecar)
    before = contents(tmp_path)
    for changes in ({}, {"resume": True}):
        with pytest.raises(InputError, match="--force"):
            opened(tmp_path, **changes)
    assert contents(tmp_path) == before
    (tmp_path / (P2P + ".bak-1")).write_text("taken", encoding="utf-8")
    with opened(tmp_path, force=True) as record:
        assert document.read_bytes() == before[P2P]
        record.put(measure(planned("p2p")[0]))
        assert any(".bak-2" in note for note in record.notes)
    assert (tmp_path / (P2P + ".bak-2")).read_bytes() == before[P2P]
    assert (tmp_path / (P2P + ".bak-1")).read_text(encoding="utf-8") == "taken"
    assert (tmp_path / (P2P + ".meta.json.bak-1")).exists() == estimated
    assert list(load(document)) == ["pp_size_2"]
    assert not sidecar_of(document).estimated


def test_a_measurement_of_another_operation_is_our_mistake(tmp_path: Path) -> None:
    """What was not asked for would change files that nobody agreed to touch."""
    measurement: Measurement = measure(planned("p2p")[0])
    with opened(tmp_path, operations=("overlap",)) as record, pytest.raises(AssertionError):
        record.put(measurement)
