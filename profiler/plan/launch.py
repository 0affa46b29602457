"""Meets the other ranks of a run and watches them: a run that cannot go on ends in one sentence."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.units import format_bytes
from profiler.environment import collect
from profiler.hardware.meeting import connect, introduce
from profiler.hardware.session import claim_errors
from profiler.hardware.watch import Trouble, Watch
from profiler.plan.launched import launched_ranks
from profiler.plan.layout import Cube

__all__ = ["OutOfMemoryError", "is_shortage", "met"]

_MARGIN_S = 5.0
"""The watch speaks so much earlier than the communication library."""


class OutOfMemoryError(AutoparError):
    """A rank needs more memory than there is (exit code 1)."""


@contextmanager
def met(
    backend: str,
    device: torch.device,
    cube: Cube,
    *,
    timeout_s: float,
    predicted_bytes: Sequence[int | None] = (),
) -> Iterator[Callable[[str], None]]:
    """Join the process group of all ranks that torchrun started, and leave it.

    Yields a function that says what comes next, which has to end within the timeout. Trouble of
    any rank ends the processes of all ranks, and rank 0 says why. Without torchrun there is one
    rank, whose errors are raised.

    predicted_bytes : by stage, to be said beside what was there when memory runs out.
    """
    if launched_ranks() is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            with _explained(0, cube, device, predicted_bytes):
                yield lambda during: None
        finally:
            dist.destroy_process_group()
        return
    claim_errors(os.environ)
    timeout = timedelta(seconds=timeout_s)
    base, other, rank, world = connect(timeout)
    own = collect(rank, int(os.environ["LOCAL_RANK"]), device)
    infos, start = introduce(dist.PrefixStore("plan", base), own, world, timeout)
    watch = Watch(
        dist.PrefixStore(f"plan/{start}/watch", other),
        rank=rank,
        hosts=[info.host for info in infos],
        pids=[info.pid for info in infos],
        timeout_s=timeout_s,
        finish=lambda trouble: _say(trouble, rank),
    )
    watch.start()
    try:
        watch.step("the meeting of the ranks")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"plan/{start}/groups", base),
            rank=rank,
            world_size=world,
            timeout=timeout + timedelta(seconds=_MARGIN_S),
        )
        with _explained(rank, cube, device, predicted_bytes):
            yield watch.step
        watch.step("the end of the process groups")
        dist.destroy_process_group()  # under watch: NCCL lets nobody leave before all do
    except BaseException as error:
        watch.fail(error)
        raise
    watch.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _explained(
    rank: int, cube: Cube, device: torch.device, predicted_bytes: Sequence[int | None]
) -> Iterator[None]:
    """Turn a lack of memory into a sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        stage = rank // cube.num_ranks
        raise OutOfMemoryError(_shortage(rank, stage, device, error, predicted_bytes)) from None


def is_shortage(error: Exception) -> bool:
    """Return whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "DefaultCPUAllocator: can't allocate memory" in str(error)


def _shortage(
    rank: int,
    stage: int,
    device: torch.device,
    error: Exception,
    predicted_bytes: Sequence[int | None],
) -> str:
    facts = []
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        allocated = torch.cuda.memory_allocated(device)
        facts.append(f"{format_bytes(allocated)} of {format_bytes(total)} allocated")
    predicted = predicted_bytes[stage] if predicted_bytes else None
    if predicted is not None:
        facts.append(f"{format_bytes(predicted)} predicted for the stage")
    if not facts:
        facts.append(str(error).strip().partition("\n")[0].rpartition("] ")[2] or "MemoryError")
    return (
        f"rank {rank} in stage {stage} ran out of memory ({', '.join(facts)}); run fewer layers "
        "(--layers), a shorter sequence (--seq) or smaller micro-batches (--microbatches), or "
        "check the memory without running (--mode dryrun)"
    )


def _say(trouble: Trouble, rank: int) -> None:
    """Write why a run ends; called on the first rank that is left, while its main thread hangs."""
    if trouble.is_input_error and rank:
        return
    during = "" if trouble.is_input_error else f", during {trouble.during}"
    sys.stderr.write(f"profile-plan: {trouble.sentence}{during}\n")
    sys.stderr.flush()
