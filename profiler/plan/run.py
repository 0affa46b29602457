"""Runs a plan in real processes: checked steps against one process, then timed ones."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InputError
from profiler.plan.batches import Batch, local_batch
from profiler.plan.job import PlanJob, RunResult
from profiler.plan.layout import check_job
from profiler.plan.reference import reference_steps
from profiler.plan.stage import build_stage, open_groups
from profiler.plan.tracker import count_step
from profiler.plan.train import Trainer

__all__ = ["choose_backend", "run_in_world", "run_plan"]


def run_plan(
    job: PlanJob,
    *,
    backend: str = "auto",
    num_steps: int = 2,
    num_timed_steps: int = 0,
    with_reference: bool = True,
    timeout_s: float = 600.0,
) -> RunResult | None:
    """Run a plan on the ranks that torchrun has started; return what was found on rank 0.

    Other ranks get None. Losses and norms are those of `num_steps` steps from the same weights
    as the reference's; then `num_timed_steps` steps are timed and one is watched for its memory.

    Raises
    ------
    InputError
        When the plan cannot run, or not on this backend or number of ranks.
    """
    check_job(job)
    name, device = choose_backend(backend)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != job.plan.world_size:
        raise InputError(
            f"the plan is for {job.plan.world_size} ranks and {world} were started; start "
            f"torchrun with that many"
        )
    _start(name, timeout_s)
    try:
        return run_in_world(
            job,
            device=device,
            num_steps=num_steps,
            num_timed_steps=num_timed_steps,
            with_reference=with_reference,
            timeout_s=timeout_s,
        )
    finally:
        dist.destroy_process_group()


def run_in_world(
    job: PlanJob,
    *,
    device: torch.device,
    num_steps: int = 2,
    num_timed_steps: int = 0,
    with_reference: bool = True,
    timeout_s: float = 600.0,
) -> RunResult | None:
    """Do the same among ranks that have met already, so that several plans can follow."""
    rank = dist.get_rank()
    cube = check_job(job)
    groups = open_groups(job, cube, rank=rank, device_type=device.type, timeout_s=timeout_s)
    stage = build_stage(job, groups, device=device)
    trainer = Trainer(stage, job, device)
    vocab, place, at = stage.vocab, groups.place, groups.stage
    del stage

    def batch(step: int) -> Batch:
        return local_batch(job, vocab, place, step=step, device=device)

    checked = [trainer.checked_step(batch(step)) for step in range(num_steps)]
    trainer.watch.take()
    times, spans = [], []
    for step in range(num_timed_steps):
        times.append(trainer.timed_step(batch(num_steps + step)))
        spans.append(trainer.watch.take())
    peak = _peak(trainer, batch(num_steps + num_timed_steps))
    found = _gather((times, _medians(spans), peak, at), dist.get_world_size())
    # the memory of the plan goes before that of the reference comes
    del trainer
    reference: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    if rank == 0 and with_reference:
        reference = reference_steps(job, num_steps, device=device)
    _wait(device)
    if rank:
        return None
    return RunResult(
        loss=tuple(loss for loss, _ in checked),
        grad_norm=tuple(norm for _, norm in checked),
        reference_loss=reference[0],
        reference_grad_norm=reference[1],
        step_time_s=tuple(max(column) for column in zip(*(f[0] for f in found), strict=True)),
        stage_time_s=tuple(
            _slowest([spans for _, spans, _, other in found if other == number])
            for number in range(job.plan.num_stages)
        ),
        peak_bytes=tuple(peak for _, _, peak, _ in found),
        peak_source="allocated" if device.type == "cuda" else "counted",
    )


def _wait(device: torch.device) -> None:
    dist.barrier(**({"device_ids": [device.index]} if device.type == "cuda" else {}))


def choose_backend(backend: str) -> tuple[str, torch.device]:
    """Return the backend and this rank's device."""
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if backend == "auto":
        backend = "nccl" if cuda else "gloo"
    if backend == "gloo":
        return backend, torch.device("cpu")
    if not cuda:
        raise InputError(
            "--backend nccl: torch finds no CUDA device here; use --backend gloo, or install a "
            "torch with CUDA"
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local} has no GPU of its own among {torch.cuda.device_count()}; start "
            "as many ranks as there are GPUs"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return backend, device


def _start(backend: str, timeout_s: float) -> None:
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        return
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _peak(trainer: Trainer, batch: Batch) -> int:
    """Return the most memory of one step on this rank, in bytes."""
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step(batch)
        torch.cuda.synchronize(trainer.device)
        return int(torch.cuda.max_memory_allocated(trainer.device))
    optimizers = [part.unit.optimizer for part in trainer.stage.parts]
    most, _ = count_step(lambda: trainer.step(batch), model=trainer.stage, optimizers=optimizers)
    return most


def _gather(own: Any, world: int) -> list[Any]:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, own)
    return found


def _medians(spans: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for span in spans for name in span})
    return {name: statistics.median(span.get(name, 0.0) for span in spans) for name in names}


def _slowest(spans: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for span in spans for name in span})
    return {name: max(span.get(name, 0.0) for span in spans) for name in names}
