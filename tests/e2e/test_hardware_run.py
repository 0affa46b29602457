"""A whole measuring run under torchrun: the four documented files, and what a planner does."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.documents.hardware import hardware_file_name, read_hardware_dir
from autopar.documents.json import load_object
from autopar.documents.sidecar import DocumentKind, read_sidecar, sidecar_path
from tests.e2e.launching import TWO_RANKS, Copies, Finished, Launch, Start, finished, measured
from tests.warm import ROOT, command

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")

KINDS: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
SELDOM = pytest.mark.parametrize(
    "start", [Copies, pytest.param(Launch, marks=[pytest.mark.ranks, pytest.mark.slow])]
)
"""Where torchrun does nothing that the tests of a whole run do not show."""
MODEL = str(ROOT / "models" / "llama2-7b" / "configs")


def expected_keys(num_ranks: int) -> dict[DocumentKind, set[str]]:
    """Return the documented keys of a node with so many ranks, a power of two."""
    sizes = [size for size in (2, 4, 8) if size <= num_ranks]
    return {
        "allreduce": {f"allreduce_size_{n}_consec_1" for n in sizes}
        | {f"allreduce_size_{n}_consec_0" for n in sizes if n < num_ranks},
        "p2p": {f"pp_size_{n}" for n in sizes},
        "sp_time": {
            f"{operation}_size_{n}_{mib}MB_time"
            for operation in ("allreduce", "all2all")
            for n in sizes
            for mib in (1, 4)
        },
        "overlap": {"overlap_coe"},
    }


def check_files(out: Path, num_ranks: int) -> None:
    """Check that a folder has the four files with their keys, and a sidecar of each."""
    paths = {kind: out / hardware_file_name(kind, 1, num_ranks) for kind in KINDS}
    names = {p.name for path in paths.values() for p in (path, sidecar_path(path))}
    assert {p.name for p in out.iterdir() if not p.name.startswith(".")} == names
    for kind, path in paths.items():
        content = load_object(path).data
        assert set(content) == expected_keys(num_ranks)[kind]
        assert all(type(value) is float and value > 0.0 for value in content.values())
        sidecar = read_sidecar(path, kind)
        assert sidecar is not None
        assert not sidecar.synthetic
        assert not sidecar.estimated
        metadata = sidecar.runs[-1].metadata
        assert metadata["backend"] == "gloo"
        for measurement in (m for run in sidecar.runs for m in run.measurements):
            assert measurement.status == "ok" or measurement.operation.startswith("overlap_")
            assert all(samples for samples in measurement.samples_s.values())
            if measurement.status == "ok" and kind != "overlap":
                assert measurement.checked
    found = read_hardware_dir(out, num_nodes=1, gpus_per_node=num_ranks)
    for operation in ("allreduce", "allgather", "reducescatter", "all2all"):
        assert (operation, num_ranks) in found.curves


def check_search(out: Path, num_ranks: int) -> None:
    """Check that the planner takes a folder, the all-to-all times included."""
    options = [
        *("--model", "llama2-7b", "--hardware", str(out), "--sp-space", "tp+sp"),
        *("--memory-profiling-path", MODEL, "--time-profiling-path", MODEL),
        *("--memory-constraint", "200", "--output-config-path", "none", "--verbose"),
    ]
    done = command("autopar-search", *options).completed()
    assert done.returncode == 0, done.stderr
    for kind in KINDS:
        path = out / hardware_file_name(kind, 1, num_ranks)
        assert f"\n  - input: {kind}: {path}\n" in done.stdout


def test_two_ranks_write_all_four_files(two: tuple[Path, Finished]) -> None:
    """All documented keys and no other, above zero, each with a valid sidecar."""
    check_files(two[0], 2)


def test_the_planner_accepts_them(two: tuple[Path, Finished]) -> None:
    """autopar-search plans with the measured folder alone, Ulysses included."""
    check_search(two[0], 2)


def test_only_rank_0_talks(two: tuple[Path, Finished]) -> None:
    """One plain line per cell on stderr, and nothing but the paths of the files on stdout."""
    out, done = two
    assert [Path(line) for line in done.stdout.splitlines()] == [
        path
        for kind in KINDS
        for document in [out / hardware_file_name(kind, 1, 2)]
        for path in (document, sidecar_path(document))
    ]
    counts = [line.split("]")[0].strip("[ ") for line in done.progress]
    total = len(counts)
    assert counts == [f"{number}/{total}" for number in range(1, total + 1)]
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count(f"`profile-show {out}` shows them") == 1


def test_a_finished_folder_is_not_measured_again(two: tuple[Path, Finished], start: Start) -> None:
    """Without --resume it is refused in one sentence, said once, and nothing changes."""
    out, _ = two
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    done = finished(2, "--out", str(out), *TWO_RANKS, start=start)
    assert done.code == 1
    assert len(done.said) == 1
    assert "--resume" in done.said[0]
    assert done.stdout == ""
    assert done.rank_code == 2
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@SELDOM
def test_a_dry_run_writes_nothing(tmp_path: Path, start: Start) -> None:
    """It prints how many cells there are and how long they take, and leaves no folder."""
    done = finished(
        2, "allreduce", "--out", str(tmp_path / "new"), *TWO_RANKS, "--dry-run", start=start
    )
    assert done.code == 0, done.stderr
    head, row, last = done.stdout.strip().splitlines()
    assert head.split()[0] == "operation"
    assert row.split()[:4] == ["allreduce", "2", "consecutive", "4"]
    assert float(row.split()[4]) > 0.0
    assert last.startswith("4 cells in about ")
    assert "nothing was written" in last
    assert list(tmp_path.iterdir()) == []


@SELDOM
def test_one_rank_alone(tmp_path: Path, start: Start) -> None:
    """A single device has no link to measure: both bandwidth files are empty, as documented."""
    done = finished(1, "allreduce", "--out", str(tmp_path), *TWO_RANKS, start=start)
    assert done.code == 0, done.stderr
    assert load_object(tmp_path / hardware_file_name("allreduce", 1, 1)).data == {}
    assert load_object(tmp_path / hardware_file_name("p2p", 1, 1)).data == {}
    assert done.stdout.count("\n") >= 2


@pytest.mark.ranks
def test_four_ranks(tmp_path: Path) -> None:
    """Groups of four and of two, consecutive and strided, and pipelines of both lengths."""
    out = tmp_path / "hardware"
    measured(4, out, *TWO_RANKS, start=Copies)
    check_files(out, 4)
    check_search(out, 4)
