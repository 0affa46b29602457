"""Runs a function in several processes that form a torch process group.

    results = run_ranks(function, 2, argument)

`function(argument)` runs in every rank, with torch.distributed set up; `results[rank]` is its
result. Function and arguments are pickled, so use a function at the top of a module and plain
values.

Ranks are copies of the only process of a session that has torch imported (tests/warm.py). Each
serves one call. Effects of a call, such as a default type, a seed, a hook or a hanging thread, end
with its ranks, and torch is imported once for any number of calls and ranks.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import warm


class RanksFailedError(AssertionError):
    """Some ranks raised, died or did not finish; the message lists them with their causes."""


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout_s: float = 120.0,
    backend: str = "gloo",
) -> list[Any]:
    """Return the results of `function(*arguments)` in rank order.

    Raises RanksFailedError when a rank raises, dies, or is not done after `timeout_s`. No process
    outlives the call.
    """
    context = warm.context()
    environment = {
        # a host whose own name does not resolve has a loopback all the same
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
    }
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_rank,
                args=(
                    pipe[1],
                    function,
                    arguments,
                    rank,
                    num_ranks,
                    str(store),
                    timeout_s,
                    backend,
                    environment,
                ),
                daemon=True,
            )
            for rank, pipe in enumerate(pipes)
        ]
        results: list[Any] = [None] * num_ranks
        failures: list[str] = []
        try:
            for process in processes:
                process.start()
            for _, sending in pipes:
                sending.close()  # so that a rank's death ends its pipe
            ends_s = time.monotonic() + timeout_s
            for rank, (receiving, _) in enumerate(pipes):
                if not receiving.poll(max(0.0, ends_s - time.monotonic())):
                    failures.append(f"rank {rank} is not done after {timeout_s:g} s")
                    continue
                try:
                    fine, results[rank] = receiving.recv()
                except EOFError:
                    processes[rank].join(10)
                    code = processes[rank].exitcode
                    failures.append(f"rank {rank} died with exit code {code}")
                    continue
                if not fine:
                    failures.append(f"rank {rank} raised\n{results[rank]}")
            for process in processes:
                process.join(0 if failures else 10)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join()
            for receiving, _ in pipes:
                receiving.close()
    if failures:
        raise RanksFailedError("\n".join(failures))
    return results


def _rank(
    pipe: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    store: str,
    timeout_s: float,
    backend: str,
    environment: dict[str, str],
) -> None:
    """Run one rank: join the group, call the function, send its result."""
    warm.renew_environment(environment)
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # ranks share the cores of the machine
        options: dict[str, Any] = {}
        if backend == "nccl":
            device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
            options["device_id"] = device
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )
        try:
            result = function(*arguments)
            dist.barrier()  # no rank hangs up on another that is still listening
        finally:
            dist.destroy_process_group()
        pipe.send((True, result))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
