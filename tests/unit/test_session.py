"""What the ranks of a run share: process groups, texts and times."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.environment import collect
from profiler.hardware.cells import Round, rounds
from profiler.hardware.session import Session
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


# --- the tests ---


def test_groups_of_ranks_that_were_in_different_numbers_of_groups() -> None:
    """A chain of transfers has ends that are in one group and inner ranks that are in two."""
    chain = rounds("p2p", 3, True, 3, isolated=False)
    assert chain == (((0, 1),), ((1, 2),))

    found: list[Any] = run_ranks(sums, 3, chain, timeout_s=60)

    assert found == [[1.0], [1.0, 3.0], [3.0]]
