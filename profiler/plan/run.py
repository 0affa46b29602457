"""Runs a plan in real processes: checked steps against one process, then timed ones."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InputError
from profiler.plan.batches import Batch, local_batch
from profiler.plan.job import PlanJob, RunResult
from profiler.plan.launch import is_shortage, met
from profiler.plan.launched import launched_ranks
from profiler.plan.layout import Cube, check_job, layer_layout, vocab_layout
from profiler.plan.reference import reference_steps
from profiler.plan.shards import sums_by_itself
from profiler.plan.stage import build_stage, open_groups
from profiler.plan.tracker import count_step
from profiler.plan.train import Trainer

__all__ = ["choose_backend", "run_in_world", "run_plan"]


_NO_REFERENCE = (
    "the plan ran, but one process with the whole model to compare it with ran out of memory; run "
    "fewer layers (--layers), or compare with nothing (--no-reference)"
)


def run_plan(
    job: PlanJob,
    *,
    backend: str = "auto",
    num_steps: int = 2,
    num_timed_steps: int = 0,
    with_reference: bool = True,
    timeout_s: float = 300.0,
    predicted_bytes: Sequence[int | None] = (),
) -> RunResult | None:
    """Run a plan on the ranks that torchrun has started; return what was found on rank 0.

    Other ranks get None. Losses and norms are those of `num_steps` steps from the same weights
    as the reference's; then `num_timed_steps` steps are timed and one is watched for its memory.

    timeout_s : for every step; predicted_bytes : by stage, as `met` takes it.

    Raises
    ------
    InputError
        When the plan cannot run, or not on this backend or number of ranks. Once the ranks have
        met, trouble of any of them is said by rank 0 and ends the processes of all.
    """
    cube = check_job(job)
    if with_reference:
        _check_reference(job)
    name, device = choose_backend(backend)
    world = launched_ranks() or 1
    if world != job.plan.world_size:
        raise InputError(
            f"the plan is for {job.plan.world_size} ranks and {world} were started; start "
            f"torchrun with that many"
        )
    _check_zero(job, cube, device)
    with met(name, device, cube, timeout_s=timeout_s, predicted_bytes=predicted_bytes) as begin:
        result = run_in_world(
            job,
            device=device,
            num_steps=num_steps,
            num_timed_steps=num_timed_steps,
            with_reference=False,
            timeout_s=timeout_s,
            begin=begin,
        )
    if result is None or not with_reference:
        return result
    # the other ranks have gone: nobody waits for it, and all memory is free for it
    try:
        loss, grad_norm = reference_steps(job, num_steps, device=device)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        return replace(result, notes=(_NO_REFERENCE,))  # what ran is not thrown away
    return replace(result, reference_loss=loss, reference_grad_norm=grad_norm)


def run_in_world(
    job: PlanJob,
    *,
    device: torch.device,
    num_steps: int = 2,
    num_timed_steps: int = 0,
    with_reference: bool = True,
    timeout_s: float = 300.0,
    begin: Callable[[str], None] = lambda during: None,
) -> RunResult | None:
    """Do the same among ranks that have met already, so that several plans can follow.

    begin : is told what comes next.
    """
    rank = dist.get_rank()
    begin("building the stages")
    cube = check_job(job)
    groups = open_groups(job, cube, rank=rank, device_type=device.type, timeout_s=timeout_s)
    stage = build_stage(job, groups, device=device)
    trainer = Trainer(stage, job, device)
    vocab, place, at = stage.vocab, groups.place, groups.stage
    del stage

    def batch(step: int) -> Batch:
        return local_batch(job, vocab, place, step=step, device=device)

    checked = []
    for step in range(num_steps):
        begin(f"step {step + 1} of {num_steps}")
        checked.append(trainer.checked_step(batch(step)))
    trainer.watch.take()
    times, spans = [], []
    for step in range(num_timed_steps):
        begin(f"timed step {step + 1} of {num_timed_steps}")
        times.append(trainer.timed_step(batch(num_steps + step)))
        spans.append(trainer.watch.take())
    begin("the step whose memory is counted")
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


def _check_reference(job: PlanJob) -> None:
    """Raise InputError where one process would send tokens to other experts than the ranks do."""
    for index, (kind, strategy) in enumerate(
        zip(job.spec.layer_types, job.plan.layers, strict=True)
    ):
        layer = job.spec.layers[kind]
        is_split = strategy.ulysses or job.sequence_parallel
        length = layer.seq_length // (strategy.tp if is_split else 1)
        visits = length * (layer.experts_per_token or 1)
        if layer.num_experts is not None and visits % layer.num_experts:
            raise InputError(
                f"layer {index}: the {visits} visits of the {length} tokens of a sample on a rank "
                f"do not spread evenly over {layer.num_experts} experts, and one process would "
                "send them to others; give another --seq, or compare with nothing (--no-reference)"
            )


def _check_zero(job: PlanJob, cube: Cube, device: torch.device) -> None:
    """Raise InputError where ZeRO's sums do not exist: older FSDP2 averages, which gloo cannot."""
    layouts = [layer_layout(job, cube, layer) for layer in range(len(job.plan.layers))]
    layouts.append(vocab_layout(job, cube))
    if device.type == "cuda" or sums_by_itself() or not any(each.is_sharded for each in layouts):
        return
    raise InputError(
        f"ZeRO-2 and ZeRO-3 on CPUs need torch 2.8 or newer, and this is {torch.__version__}; "
        "update torch, or run a plan with ddp"
    )


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
