"""The watching thread in its own processes: who is named, who speaks, and how all end."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import asdict

from autopar.errors import InputError
from profiler.hardware.run import RunState, _finish
from profiler.progress import Trouble, Watch
from tests import warm
from tests.unit.measured import measure
from tests.unit.record_support import opened, planned

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")

PACE = 0.4
"""Of the intervals, so that the tests are short; a rank is silent after 1.2 s."""
TIMEOUT_S = 1.0
FOREVER_S = 60.0
STUCK = "no rank finished b within 1 s, but all of them answer"

Action = Callable[[Watch, int], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank ended."""

    code: int
    said: dict[str, Any] | None
    """The trouble that it reported, if it was the one to speak."""


def _rank(action: Action, rank: int, num_ranks: int, port: int, folder: str) -> None:
    """Be one rank: watch, do what the scenario asks of the main thread, and leave."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    store.set(f"pid/{rank}", str(os.getpid()))
    pids = [int(store.get(f"pid/{other}")) for other in range(num_ranks)]

    def finish(trouble: Trouble) -> None:
        if action is slow_to_write:
            time.sleep(2.5)
        Path(folder, f"said-{rank}").write_text(json.dumps(asdict(trouble)), encoding="utf-8")

    watch = Watch(
        store,
        rank=rank,
        hosts=[f"host-{other // 2}" for other in range(num_ranks)],
        pids=pids,
        timeout_s=TIMEOUT_S,
        finish=finish,
        pace=PACE,
    )
    watch.start()
    Path(folder, f"ready-{rank}").touch()
    try:
        action(watch, rank)
    except BaseException as error:
        watch.fail(error)
    watch.close()


def outcomes(
    folder: Path,
    action: Action,
    disturb: Callable[[Sequence[BaseProcess]], None] | None = None,
    *,
    num_ranks: int = 2,
    host_store: bool = True,
) -> list[Outcome]:
    """Return how ranks end that do this; `disturb` gets their processes once all of them watch."""
    import torch.distributed as dist

    context = warm.context()
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(action, rank, num_ranks, store.port, str(folder)))
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        until_s = time.monotonic() + 60
        while not all((folder / f"ready-{rank}").exists() for rank in range(num_ranks)):
            assert time.monotonic() < until_s, "a rank does not start"
            time.sleep(0.02)
        if disturb is not None:
            disturb(processes)
        if not host_store:
            del store
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert None not in codes, f"still running: {codes}"
    found = []
    for rank, code in enumerate(codes):
        path = folder / f"said-{rank}"
        said = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        found.append(Outcome(code=code or 0, said=said))
    return found


def only_voice(found: Sequence[Outcome], rank: int = 0) -> dict[str, Any]:
    """Return what the only rank that spoke said."""
    assert [r for r, outcome in enumerate(found) if outcome.said is not None] == [rank]
    said = found[rank].said
    assert said is not None
    return said


def work(watch: Watch, rank: int) -> None:
    """Reach step after step for ever."""
    for number in range(10**6):
        watch.step(f"cell {number}")
        time.sleep(0.01)


def wait_in_b(watch: Watch, rank: int) -> None:
    """Reach the same operation on all ranks, and hang there."""
    watch.step("a")
    watch.step("b")
    time.sleep(FOREVER_S)


def rank_1_stays_behind(watch: Watch, rank: int) -> None:
    """Hang before the operation in which rank 0 waits."""
    watch.step("a")
    if rank == 0:
        watch.step("b")
    time.sleep(FOREVER_S)


def rank_0_is_refused(watch: Watch, rank: int) -> None:
    """Find something on rank 0 that the user must mend."""
    watch.step("b")
    if rank == 0:
        raise InputError("--out x: the disk is full")
    time.sleep(FOREVER_S)


def rank_1_is_refused(watch: Watch, rank: int) -> None:
    """Find something on rank 1 that the user must mend."""
    if rank == 1:
        raise InputError("no memory here")
    work(watch, rank)


def rank_1_raises(watch: Watch, rank: int) -> None:
    """Raise an error of two lines on rank 1."""
    if rank == 1:
        raise RuntimeError("link down\nin a deep place")
    work(watch, rank)


def slow_to_write(watch: Watch, rank: int) -> None:
    """Raise on rank 0, whose report takes longer than a silent rank is waited for, then on 1."""
    time.sleep(0.3 * rank)
    raise RuntimeError("first" if rank == 0 else "second")


def late_but_well(watch: Watch, rank: int) -> None:
    """Let rank 1 wait for longer than the timeout, while rank 0 takes step after step."""
    watch.step("a")
    for _ in range(14):
        time.sleep(0.1)
        if rank == 0:
            watch.step("a")
    watch.step("b")
    time.sleep(0.2)


def end_before_rank_1(watch: Watch, rank: int) -> None:
    """Close rank 0's watch at once, and rank 1's never."""
    watch.step("a")
    if rank == 0:
        watch.close()
    time.sleep(FOREVER_S)


def to_rank(number: signal.Signals, *ranks: int) -> Callable[[Sequence[BaseProcess]], None]:
    """Return what sends a signal to ranks."""

    def disturb(processes: Sequence[BaseProcess]) -> None:
        for rank in ranks:
            pid = processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    return disturb


def test_a_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    """The others wait in an operation that it did not reach; all exit with the same code."""
    found = outcomes(tmp_path, rank_1_stays_behind)
    said = only_voice(found)
    assert said["sentence"] == (
        "rank 1 on host host-0 did not reach this operation, for which the others wait"
    )
    assert said["during"] == "b"
    assert [outcome.code for outcome in found] == [1, 1]


def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    """A stopped process answers nobody, and would keep its launcher waiting."""
    found = outcomes(tmp_path, wait_in_b, to_rank(signal.SIGSTOP, 1), num_ranks=3)
    assert only_voice(found)["sentence"] == "rank 1 on host host-0 stopped answering"
    assert [outcome.code for outcome in found] == [1, -signal.SIGKILL, 1]


def test_a_process_of_another_host_is_left_alone(tmp_path: Path) -> None:
    """Its number means another process here; its own host's ranks end it."""
    stopped = to_rank(signal.SIGSTOP, 2)
    resumed = to_rank(signal.SIGCONT, 2)

    def disturb(processes: Sequence[BaseProcess]) -> None:
        stopped(processes)
        processes[0].join(30)
        assert processes[2].is_alive()
        resumed(processes)

    found = outcomes(tmp_path, wait_in_b, disturb, num_ranks=3)
    assert only_voice(found)["sentence"] == "rank 2 on host host-1 stopped answering"
    assert [outcome.code for outcome in found] == [1, 1, 1]


def test_all_alive_and_nothing_moves(tmp_path: Path) -> None:
    """Then nobody is to blame but what lies between them."""
    said = only_voice(outcomes(tmp_path, wait_in_b))
    assert said["sentence"].startswith(STUCK)
    assert said["sentence"].endswith("the network or the communication library hangs")


def test_an_unusable_input_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 says its sentence alone, and every rank exits with its code."""
    found = outcomes(tmp_path, rank_0_is_refused)
    said = only_voice(found)
    assert said["sentence"] == "--out x: the disk is full"
    assert said["is_input_error"] is True
    assert [outcome.code for outcome in found] == [2, 2]


def test_an_error_of_another_rank_is_reported_by_rank_0(tmp_path: Path) -> None:
    """At once, with rank, host and the first line of the error; its exit code is everyone's."""
    found = outcomes(tmp_path, rank_1_raises)
    said = only_voice(found)
    assert said["sentence"] == "rank 1 on host host-0: RuntimeError: link down"
    assert said["during"].startswith("cell ")
    assert [outcome.code for outcome in found] == [1, 1]


def test_an_unusable_input_of_another_rank(tmp_path: Path) -> None:
    """It is said with the rank, and ends all with its exit code."""
    found = outcomes(tmp_path, rank_1_is_refused)
    said = only_voice(found)
    assert said["sentence"] == "rank 1 on host host-0: no memory here"
    assert said["during"] == ""
    assert [outcome.code for outcome in found] == [2, 2]


def test_of_those_without_rank_0_one_speaks(tmp_path: Path) -> None:
    """Two ranks notice that rank 0 is dead; the user reads it once."""
    found = outcomes(tmp_path, wait_in_b, to_rank(signal.SIGKILL, 0), num_ranks=3)
    speakers = [rank for rank, outcome in enumerate(found) if outcome.said is not None]
    assert len(speakers) == 1
    assert only_voice(found, speakers[0])["sentence"] == "rank 0 on host host-0 stopped answering"
    assert [outcome.code for outcome in found] == [-signal.SIGKILL, 1, 1]


def test_rank_0_may_take_its_time_to_report(tmp_path: Path) -> None:
    """While it writes, nobody calls it silent, speaks in its place or kills it."""
    found = outcomes(tmp_path, slow_to_write)
    assert only_voice(found)["sentence"] == "rank 0 on host host-0: RuntimeError: first"
    assert [outcome.code for outcome in found] == [1, 1]


def test_a_wait_that_ends_is_no_trouble(tmp_path: Path) -> None:
    """A rank that waited too long for a busy rank 0 goes on when its turn comes."""
    found = outcomes(tmp_path, late_but_well)
    assert [outcome.said for outcome in found] == [None, None]
    assert [outcome.code for outcome in found] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all(tmp_path: Path, number: signal.Signals) -> None:
    """The run ends as if the program had been interrupted, with the usual exit code."""
    found = outcomes(tmp_path, work, to_rank(number, 0, 1))
    assert only_voice(found)["sentence"] == f"interrupted ({number.name})"
    assert [outcome.code for outcome in found] == [128 + number] * 2


def test_a_signal_to_all_that_another_rank_sees_first(tmp_path: Path) -> None:
    """Ctrl-C is named as such, although the report of rank 1 is there before rank 0 gets it."""

    def press(processes: Sequence[BaseProcess]) -> None:
        to_rank(signal.SIGINT, 1)(processes)
        time.sleep(0.25)  # rank 0 looks for reports every 0.2 s
        to_rank(signal.SIGINT, 0)(processes)

    found = outcomes(tmp_path, work, press)
    assert only_voice(found)["sentence"] == "interrupted (SIGINT)"
    assert found[0].code == 130


def test_a_signal_to_another_rank(tmp_path: Path) -> None:
    """Rank 0 says who was told to end."""
    found = outcomes(tmp_path, work, to_rank(signal.SIGTERM, 1))
    assert only_voice(found)["sentence"] == ("interrupted: rank 1 on host host-0 received SIGTERM")


def test_the_end_of_a_launcher_does_not_hide_who_died(tmp_path: Path) -> None:
    """A launcher that loses a rank ends the others: the sentence is about the lost one."""

    def disturb(processes: Sequence[BaseProcess]) -> None:
        to_rank(signal.SIGKILL, 1)(processes)
        processes[1].join()
        to_rank(signal.SIGTERM, 0, 2)(processes)

    found = outcomes(tmp_path, work, disturb, num_ranks=3)
    assert only_voice(found)["sentence"] == "rank 1 on host host-0 stopped answering"
    assert [outcome.code for outcome in found] == [1, -signal.SIGKILL, 1]


def test_a_lost_launcher_is_named(tmp_path: Path) -> None:
    """Without the store that it keeps nobody can tell the others anything."""
    found = outcomes(tmp_path, work, host_store=False)
    for outcome in found:
        assert outcome.code == 1
        assert outcome.said is not None
        assert outcome.said["sentence"].startswith(
            "the launcher (torchrun) of the first host stopped answering ("
        )


def test_a_signal_after_the_end_ends_the_process(tmp_path: Path) -> None:
    """What follows a closed watch may hang too, and must not ignore its launcher."""

    def disturb(processes: Sequence[BaseProcess]) -> None:
        time.sleep(0.5)
        to_rank(signal.SIGTERM, 0)(processes)
        processes[0].join(10)
        to_rank(signal.SIGKILL, 1)(processes)

    found = outcomes(tmp_path, end_before_rank_1, disturb)
    assert [outcome.code for outcome in found] == [-signal.SIGTERM, -signal.SIGKILL]


def test_the_end_of_a_run_keeps_a_cell_that_is_being_written(tmp_path: Path) -> None:
    """A signal that comes while the main thread writes does not mark the cell as failed."""
    cell, other = planned("p2p")[:2]
    trouble = Trouble(sentence="interrupted (SIGINT)", exit_code=130, during=cell.key)
    session = SimpleNamespace(rank=0)
    with opened(tmp_path) as record:
        state = RunState(record=record, cell=cell)
        ending = threading.Thread(target=_finish, args=(state, session, tmp_path, trouble))
        with state.busy:
            ending.start()
            time.sleep(0.1)
            record.put(measure(cell))
            state.cell = other
        ending.join()
        assert record.measurements[cell.key].status == "ok"
        assert record.measurements[other.key].status == "failed"
        assert record.measurements[other.key].reason == "interrupted (SIGINT)"
