"""What the ranks of a run share: process groups, texts and times."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.records import replace
from profiler.environment import RankInfo, collect
from profiler.hardware.options import Round, rounds
from profiler.processes import Session, claim_errors, connect, introduce
from tests.gloo import run_ranks

torch = pytest.importorskip("torch", reason="the profilers need torch")


def opened(timeout_s: float = 10.0) -> Session:
    """Return the session of this rank of `run_ranks`."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    device = torch.device("cpu")
    return Session(
        rank=dist.get_rank(),
        infos=[collect(rank, rank, device) for rank in range(dist.get_world_size())],
        device=device,
        backend="gloo",
        dtype="fp32",
        store=dist.PrefixStore("session", store),
        watch_store=None,
        timeout_s=timeout_s,
        synthetic=False,
    )


# --- what ranks do: top-level, since they are started anew ---


def sums(arranged: tuple[Round, ...]) -> list[float]:
    """Return the sum of the ranks in each of this rank's groups, round by round."""
    import torch.distributed as dist

    session = opened()
    found = []
    for groups in arranged:
        session.join(groups)
        for group in groups:
            if session.rank in group:
                value = torch.tensor([float(session.rank)])
                dist.all_reduce(value, group=session.group(group))
                found.append(float(value))
    return found


def told(repetitions: int) -> list[str]:
    """Return what the ranks are told by a last rank that takes its time."""
    session = opened()
    last = session.world_size - 1
    found = []
    for number in range(repetitions):
        if session.rank == last:
            time.sleep(0.3)
        found.append(session.share("text", str(number) if session.rank == last else None))
    return found


def gathered() -> list[list[float]]:
    """Return what the ranks gather, each of which gives its number and half of it."""
    session = opened()
    return [list(row) for row in session.gather([session.rank, session.rank / 2])]


# --- the tests ---


def test_groups_of_ranks_that_were_in_different_numbers_of_groups() -> None:
    """A chain of transfers has ends that are in one group and inner ranks that are in two."""
    chain = rounds("p2p", 3, True, 3, isolated=False)
    assert chain == (((0, 1),), ((1, 2),))

    found: list[Any] = run_ranks(sums, 3, chain, timeout_s=60)

    assert found == [[1.0], [1.0, 3.0], [3.0]]


@pytest.mark.whole
def test_a_text_is_that_of_the_call() -> None:
    """Nobody is told what was said under the same key before."""
    assert run_ranks(told, 2, 3, timeout_s=60) == [["0", "1", "2"]] * 2


def test_gathered_values_are_by_rank() -> None:
    """Every rank gets one row of every rank, in their order."""
    assert run_ranks(gathered, 2, timeout_s=60) == [[[0.0, 0.0], [1.0, 0.5]]] * 2


def test_torchrun_does_not_decide_what_an_error_of_nccl_means() -> None:
    """Its default in the environment of every rank would abort the process before the watch."""
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

    claim_errors(environment)

    assert environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def one_of(rank: int, pid: int) -> RankInfo:
    """Return what a rank says of itself."""
    return replace(collect(rank, rank, torch.device("cpu")), pid=pid)


def started(store: Any, pids: list[int], last: int) -> list[tuple[list[int], str]]:
    """Return the process ids and the name of the start that ranks learn; one comes last."""
    found: dict[int, tuple[list[int], str]] = {}

    def meet(rank: int) -> None:
        infos, start = introduce(store, one_of(rank, pids[rank]), len(pids), timedelta(seconds=20))
        found[rank] = ([info.pid for info in infos], start)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(pids))]
    for rank in sorted(range(len(pids)), key=lambda rank: rank == last):
        if rank == last:
            time.sleep(0.3)
        threads[rank].start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(pids))]


@pytest.mark.whole
@pytest.mark.parametrize("last", [0, 1])
def test_ranks_that_are_started_again_meet_anew(last: int) -> None:
    """The store keeps what ranks wrote that have ended, and nobody takes it for an answer."""
    import torch.distributed as dist

    store = dist.HashStore()
    first = started(store, [10, 11], last)
    second = started(store, [20, 21], last)
    smaller = started(store, [30], 0)

    assert [pids for pids, _ in first] == [[10, 11]] * 2
    assert [pids for pids, _ in second] == [[20, 21]] * 2
    assert [pids for pids, _ in smaller] == [[30]]
    names = [name for _, name in first + second + smaller]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len(set(names)) == 3


def test_missing_ranks_are_named() -> None:
    """Rank 0 says who is missing, once the time is over."""
    import torch.distributed as dist

    with pytest.raises(InputError, match=r"ranks 1, 2 of 3 did not start within 0.2 s. Start "):
        introduce(dist.HashStore(), one_of(0, 1), 3, timedelta(seconds=0.2))


@pytest.mark.whole
def test_a_store_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is in it, and no traceback follows."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")  # nothing of ours listens there

    with pytest.raises(InputError, match=r"127.0.0.1:1"):
        connect(timedelta(seconds=1))
