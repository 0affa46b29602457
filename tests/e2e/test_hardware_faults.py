"""Runs that are killed, hang, are interrupted or find a full disk: nothing measured is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from autopar.documents.hardware import hardware_file_name
from autopar.documents.json import load_object
from autopar.documents.sidecar import sidecar_path
from profiler.environment import host_labels
from profiler.hardware.options import Cluster, build_options, plan_cells
from tests.e2e.launching import Copies, Finished, Launch, Start, torchrun

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")

HOST = socket.gethostname()
TIMEOUT_S = 6
LATE_S = TIMEOUT_S + 16
"""The timeout and a few seconds, on a busy machine."""
OPERATIONS = ("allreduce", "allgather")
SIZES = "32M,48M,64M"  # large enough that a signal hits a cell and not its end
WORK = (*OPERATIONS, "--backend", "gloo", "--sizes", SIZES, "--max-seconds", "0.4")
ARGUMENTS = (*WORK, "--timeout", str(TIMEOUT_S))
ALLREDUCE, SP_TIME = hardware_file_name("allreduce", 1, 2), hardware_file_name("sp_time", 1, 2)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to a run, and what is to be said about it."""

    number: signal.Signals
    rank: int | None
    """None is the launcher, which passes it on, as when Ctrl-C is typed."""
    says: str
    marks: bool = True
    """Whether the cell in flight is marked as failed: only rank 0 can."""


KILLED = Fault(number=signal.SIGKILL, rank=1, says=f"rank 1 on host {HOST} stopped answering")
HUNG = Fault(number=signal.SIGSTOP, rank=1, says=f"rank 1 on host {HOST} stopped answering")
CTRL_C = Fault(number=signal.SIGINT, rank=None, says="interrupted (SIGINT)")
FIRST_KILLED = Fault(
    number=signal.SIGKILL, rank=0, says=f"rank 0 on host {HOST} stopped answering", marks=False
)
FIRST_HUNG = Fault(
    number=signal.SIGSTOP, rank=0, says=f"rank 0 on host {HOST} stopped answering", marks=False
)
ENDED = Fault(number=signal.SIGTERM, rank=0, says="interrupted (SIGTERM)")
OTHER_ENDED = Fault(
    number=signal.SIGINT, rank=1, says=f"interrupted: rank 1 on host {HOST} received SIGINT"
)


class Reader:
    """Parses every JSON file of a folder, again and again, while a run writes there."""

    def __init__(self, folder: Path, planted: Collection[bytes] = ()) -> None:
        self.wrong: list[str] = []
        self.num_read = 0
        self._folder = folder
        self._planted = planted
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(0.002):
            for path in self._folder.glob("*.json"):
                try:
                    raw = path.read_bytes()
                except FileNotFoundError:  # moved aside since
                    continue
                try:
                    json.loads(raw)
                except ValueError as error:
                    if raw not in self._planted:
                        self.wrong.append(f"{path.name}: {error}")
                self.num_read += 1


def planned() -> list[str]:
    """Return the cells of the run, in the order they are measured."""
    options = build_options(operations=OPERATIONS, sizes=SIZES)
    return [cell.key for cell in plan_cells(options, Cluster(hosts=(HOST, HOST)))]


def runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a sidecar as they stand in the file."""
    found: list[dict[str, Any]] = load_object(sidecar_path(path)).data["runs"]
    return found


def measured(*paths: Path) -> dict[str, str]:
    """Return the text of every measured cell of these documents' sidecars."""
    cells = [m for p in paths if p.exists() for run in runs(p) for m in run["measurements"]]
    return {cell["key"]: json.dumps(cell) for cell in cells if cell["status"] == "ok"}


def strike(out: Path, fault: Fault, *options: str, start: Start = Launch) -> None:
    """Begin or resume a run, let it measure a cell, and disturb it during the next one."""
    documents = (out / ALLREDUCE, out / SP_TIME)
    before = measured(*documents)
    with Reader(out) as reader, start(2, *ARGUMENTS, "--out", str(out), *options) as launch:
        launch.wait_for(r"^\[ ?1/")
        time.sleep(0.1)
        if fault.rank is None:
            launch.interrupt()
        else:
            os.kill(launch.pid(fault.rank), fault.number)
        begun_s = time.monotonic()
        done = launch.wait(60)
        took_s = time.monotonic() - begun_s
        assert not launch.processes(), "a rank is left behind"
    assert reader.wrong == []
    assert reader.num_read > 0
    assert done.code != 0
    assert took_s < LATE_S
    check_said(done, fault, out)

    after = measured(*documents)
    assert {key: after[key] for key in before} == before
    plan = planned()
    assert set(after) == set(plan[: len(after)])
    assert len(after) >= len(before) + len(done.progress) > len(before)
    newest = [m for path in documents for m in runs(path)[-1]["measurements"]]
    failed = {m["key"]: m["reason"] for m in newest if m["status"] != "ok"}
    # what is said names the host, what is stored its label
    stored = fault.says.replace(f"host {HOST}", f"host {host_labels([HOST], out)[HOST]}")
    assert failed == ({plan[len(after)]: stored} if fault.marks else {})


def check_said(done: Finished, fault: Fault, out: Path) -> None:
    """Check that one sentence says what happened, what is kept and what to do."""
    assert len(done.said) == 1, done.stderr
    said = done.said[0]
    assert said.startswith(f"autopar: {fault.says}, during ")
    assert said.endswith(
        f"can be found in {out}, and the same command with --resume measures the rest"
    )


def complete(out: Path, planted: Collection[bytes] = (), start: Start = Launch) -> Finished:
    """Resume a run and check that it measures what is missing, and only that."""
    documents = (out / ALLREDUCE, out / SP_TIME)
    with (
        Reader(out, planted) as reader,
        # Nothing hangs here, and ranks start late on a busy machine.
        start(2, *WORK, "--timeout", "60", "--out", str(out), "--resume") as launch,
    ):
        done = launch.wait(120)
        assert not launch.processes()
    assert done.code == 0, done.stderr
    assert reader.wrong == []
    assert done.said == []
    assert set(measured(*documents)) == set(planned())
    assert not list(out.glob(".*.part"))
    return done


def test_what_was_measured_outlives_faults(tmp_path: Path) -> None:
    """One rank is gone, then all are interrupted: the sentences, the cells before, and the rest."""
    strike(tmp_path, KILLED, start=Copies)
    strike(tmp_path, CTRL_C, "--resume", start=Copies)
    complete(tmp_path, start=Copies)


SELDOM = pytest.mark.parametrize(
    "start", [Copies, pytest.param(Launch, marks=pytest.mark.slow)], ids=["copies", "torchrun"]
)
"""torchrun's part in a fault is the same in the tests of killed, hung and interrupted ranks."""


@pytest.mark.ranks
def test_killed_hung_interrupted_and_damaged(tmp_path: Path) -> None:
    """One folder outlives a killed rank, a hung one, Ctrl-C and half-written files."""
    allreduce, sp_time = tmp_path / ALLREDUCE, tmp_path / SP_TIME
    strike(tmp_path, KILLED)
    strike(tmp_path, HUNG, "--resume")
    strike(tmp_path, CTRL_C, "--resume")

    planted = []
    for path in (allreduce, sidecar_path(sp_time)):
        raw = path.read_bytes()
        planted.append(raw[: len(raw) // 2])
        path.write_bytes(planted[-1])
    kept = measured(allreduce)
    done = complete(tmp_path, planted)

    damaged = sidecar_path(sp_time).with_name(sidecar_path(sp_time).name + ".damaged")
    assert damaged.read_bytes() == planted[1]
    assert f"it is kept as {damaged.name} and its cells are measured again" in done.stderr
    assert f"{allreduce} was damaged and was derived again" in done.stderr
    assert {key: text for key, text in measured(allreduce).items() if key in kept} == kept
    new = {m["key"] for path in (allreduce, sp_time) for m in runs(path)[-1]["measurements"]}
    assert new == set(planned()) - set(kept)
    assert len(done.progress) == len(new)


@pytest.mark.ranks
@SELDOM
def test_rank_0_is_gone(start: Start, tmp_path: Path) -> None:
    """The next rank speaks in its place; the files stay as they were after the last cell."""
    strike(tmp_path, FIRST_KILLED, start=start)
    strike(tmp_path, FIRST_HUNG, "--resume", start=start)
    kept = measured(tmp_path / ALLREDUCE, tmp_path / SP_TIME)
    done = complete(tmp_path, start=start)
    assert len(done.progress) == len(planned()) - len(kept)
    after = measured(tmp_path / ALLREDUCE, tmp_path / SP_TIME)
    assert {key: after[key] for key in kept} == kept


@pytest.mark.ranks
@SELDOM
def test_a_signal_to_one_rank(start: Start, tmp_path: Path) -> None:
    """It ends all of them, in order, and the sentence says whom it was sent to."""
    strike(tmp_path, ENDED, start=start)
    strike(tmp_path, OTHER_ENDED, "--resume", start=start)


FULL_DISK = """
head -c $((1008 * 1024)) /dev/zero > "$0/ballast"
"$@"; echo "code $?"
cp -r "$0" "$KEPT/first"
rm "$0/ballast"
"$@" --resume; echo "code $?"
cp -r "$0" "$KEPT/second"
"""


def mounted(script: str, options: str, disk: Path, kept: Path, *arguments: str) -> list[str]:
    """Return a command that runs a script with torchrun as "$@" on a file system of its own."""
    prefix = ["unshare", "-Urm", "env", f"KEPT={kept}", "sh", "-c"]
    probe = f'mount -t tmpfs -o {options} none "$0" || exit 1\n'
    try:
        done = subprocess.run(
            [*prefix, probe, str(disk)], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        pytest.skip("needs the command unshare")
    if done.returncode:
        pytest.skip(f"no file system of our own: {done.stderr.strip()}")
    command: Sequence[str] = torchrun(2, *arguments, "--backend", "gloo", "--out", str(disk))
    return [*prefix, probe + script, str(disk), *command]


@pytest.mark.ranks
def test_a_full_disk(tmp_path: Path) -> None:
    """One sentence names the file and the remedy; with space again, --resume completes."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    for folder in (disk, kept):
        folder.mkdir()
    measure = ("p2p", "--sizes", "4K:1M:x2", "--reference-size", "64K", "--iters", "6")
    document = hardware_file_name("p2p", 1, 2)
    with Launch.of(mounted(FULL_DISK, "size=1m", disk, kept, *measure)) as launch:
        done = launch.wait(120)
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == [
        "code 1",
        "code 0",
    ]
    assert "exitcode  : 2" in done.stderr
    (said,) = done.said
    assert said.startswith(f"autopar: {disk}/")
    assert "(No space left on device)" in said
    assert said.endswith("measure the rest with --resume")
    first, second = kept / "first", kept / "second"
    assert not list(first.glob(".*.part"))
    before, after = measured(first / document), measured(second / document)
    assert before
    assert load_object(first / document).data
    assert {key: after[key] for key in before} == before
    assert len(after) == 10
    assert len(done.progress) in (10, 9)  # a sidecar may be a cell ahead of the report


@pytest.mark.ranks
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """It is refused in one sentence before anything is measured."""
    with Launch.of(mounted('exec "$@"', "ro", tmp_path, tmp_path, "p2p")) as launch:
        done = launch.wait(120)
    assert (done.code, done.rank_code) == (1, 2)
    (said,) = done.said
    assert said == (
        f"autopar: --out {tmp_path}: files cannot be written there (Read-only file system). "
        "Use another --out, or make it writable"
    )
    assert done.progress == []
    assert done.stdout == ""


@pytest.mark.ranks
def test_a_launcher_that_starts_the_ranks_again_completes(tmp_path: Path) -> None:
    """Its store still has what the first ranks wrote, their end included."""
    out = tmp_path / "hardware"
    command = torchrun(2, *ARGUMENTS, "--out", str(out), "--resume")
    command.insert(command.index("--standalone"), "--max-restarts=1")
    with Launch.of(command) as launch:
        launch.wait_for(r"^\[ *1/")
        os.kill(launch.pid(1), signal.SIGKILL)
        done = launch.wait(120)

    assert done.code == 0
    assert [line.partition(",")[0] for line in done.said] == [f"autopar: {KILLED.says}"]
    measured = [line for line in done.progress if "failed" not in line]
    assert len(measured) == len(planned())
    assert load_object(out / ALLREDUCE).data
