"""Memory of one rank of a plan, counted on one machine with fake tensors.

The modules of one rank are built with fake process groups and run two steps. The first creates the
optimizer states, the second is counted. Only one pipeline stage runs: its received activations and
gradients are created when they would arrive, with as many micro-batches in flight as in the
schedule. Only the number of communicators is counted, since their buffers are not tensors.
Not included: transfers between stages, workspaces, fragmentation, the device context.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import InputError
from autopar.pipeline.orders import actions
from autopar.records import replace
from profiler.measure import torch_dtype
from profiler.model.counting import End, count_step, held_bytes, local_tensor
from profiler.plan.arithmetic import check_job, layouts, micro_batches_in_flight
from profiler.plan.exchange import Batch
from profiler.plan.job import DryRunRank, PlanJob
from profiler.plan.stage import Stage, build_stages, open_groups
from profiler.plan.units import gradient_of

# --------------------------------------------------------------------------------------------------
# A job of any size with one process, whose process groups send nothing.


@contextlib.contextmanager
def fake_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Make this process one rank of a fake torch.distributed job while the context is active.

    Every collective returns immediately. Its result has the size of a real job's, but undefined
    values. Raises InputError if torch.distributed is already initialised.
    """
    # meant for torch's tests, but no other backend works without a second rank
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError(
            "a dry run creates its own process groups, but this process has some",
            remedy="Run it in one process, without torchrun",
        )
    # torch's advice on slow collectives is irrelevant, since nothing is sent
    adviser = logging.getLogger("torch.distributed.tensor")
    level = adviser.level
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        adviser.setLevel(logging.ERROR)
        yield
    finally:
        adviser.setLevel(level)
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------
# The count: the modules of each requested rank are built and run with fake tensors.


def dry_run(job: PlanJob, *, ranks: Sequence[int]) -> tuple[DryRunRank, ...]:
    """Return the memory of the given global ranks, each counted in one step of its stage.

    Raises InputError for a plan that cannot run, and if torch.distributed is initialised.
    """
    check_job(job)
    return tuple(_dry_run_rank(job, rank) for rank in ranks)


def first_ranks(job: PlanJob) -> dict[str, int]:
    """Return the first rank of three stages, by name: `first`, `last` and `largest`.

    The largest stage has the most layers. Among equals, the last stage is preferred because of the
    head, then the first because of the embedding, then the earliest.
    """
    plan = job.plan
    each = plan.world_size // plan.num_stages
    last = plan.num_stages - 1
    sizes = plan.stage_sizes
    largest = max(range(plan.num_stages), key=lambda j: (sizes[j], j == last, j == 0, -j))
    return {"first": 0, "last": last * each, "largest": largest * each}


def _dry_run_rank(job: PlanJob, rank: int) -> DryRunRank:
    cube = check_job(job)
    plan = job.plan
    stage_index = rank // cube.num_ranks
    order = _order(job, stage_index)
    num_run = sum(is_forward and not chunk for is_forward, chunk in order)
    shortened = replace(
        plan,
        num_microbatches=num_run,
        # in proportion, so that a micro-batch keeps its samples
        global_batch=plan.global_batch // plan.num_microbatches * num_run,
    )
    job = replace(job, plan=shortened)
    with fake_world(rank=rank, world_size=plan.world_size):
        groups = open_groups(job, cube, rank=rank, device_type="cpu", own_only=True)
        for layout in layouts(job, cube):
            if layout.zero in ("ddp", "zero1"):
                continue
            for axes in (layout.sync_axes, layout.expert_sync_axes):
                if cube.size(axes) > 1 and (axes == layout.sync_axes or layout.expert_axes):
                    groups.flat_mesh(axes)  # a mesh cannot be created from fake tensors
        with FakeTensorMode():
            stages = build_stages(job, groups, device="cpu", has_values=False)
            batch = _batch(stages)
            gradient_bytes = 0

            def run() -> None:
                nonlocal gradient_bytes
                gradient_bytes = _step(stages, order, batch)

            run()
            optimizers = [unit.optimizer for stage in stages for unit in stage.units]
            model = nn.ModuleList(stages)
            peak_bytes, parts = count_step(run, model=model, optimizers=optimizers)
            parameters = list(model.parameters())
            extra = sum(map(_narrow_shard_bytes, stages)) if job.narrow_shards else 0
            parts = {**parts, "parameters": parts["parameters"] + extra}
            return DryRunRank(
                stage=stage_index,
                rank=rank,
                num_parameters=sum(local_tensor(p).numel() for p in parameters),
                parameter_bytes=held_bytes(parameters),
                gradient_bytes=gradient_bytes,
                optimizer_bytes=_optimizer_bytes(parameters, optimizers),
                peak_bytes=peak_bytes + extra,
                peak_parts=parts,
                num_microbatches_run=num_run,
                engine_bytes=extra,
                num_communicators=groups.num_communicators,
            )


def _narrow_shard_bytes(stage: Stage) -> int:
    """Return the bytes of ZeRO-3's additional bf16 or fp16 shards of a stage; 0 in fp32.

    They exist at all times, so they are added to the peak.
    """
    dtype = torch_dtype(stage.job.precision)
    if dtype == torch.float32:
        return 0
    return sum(
        local_tensor(parameter).numel() * dtype.itemsize
        for part in stage.parts
        if part.layout.zero == "zero3"
        for name, parameter in part.holder.named_parameters()
        if part.num_shards(part.pieces[name]) > 1
    )


def _order(job: PlanJob, stage: int) -> tuple[tuple[bool, int], ...]:
    """Return the schedule of a stage as (is forward, chunk), shortened but with an equal peak.

    1F1B has p - j micro-batches in flight on stage j; more micro-batches do not change the peak.
    Two more are run, so that one backward neither starts nor ends the gradient accumulation. GPipe
    has all micro-batches in flight, except without a pipeline, where it has one.
    """
    plan = job.plan
    m, p, v = plan.num_microbatches, plan.num_stages, plan.num_chunks
    if v > 1:
        if plan.pipeline_type == "interleaved":
            # the warm-up is shorter than 2 p micro-batches, and more do not change the peak
            m = min(m, 2 * p)
        work = actions(plan.pipeline_type, stage, stages=p, chunks=v, micro_batches=m)
        return tuple((action.kind == "F", action.chunk) for action in work)
    in_flight = micro_batches_in_flight(plan, stage)
    steady = min(m - in_flight, 2)
    order = (True,) * in_flight + (False, True) * steady + (False,) * in_flight
    return tuple((is_forward, 0) for is_forward in order)


def _batch(stages: Sequence[Stage]) -> Batch:
    """Return the batch of a step: tokens on the first stage, labels on the last, else empty."""
    first, last = stages[0], stages[-1]
    m = first.job.plan.num_microbatches
    shapes = first.token_shapes()
    tokens, *encoder = (
        torch.zeros(m * samples if first.is_first else 0, length, dtype=torch.int64)
        for samples, length in shapes
    )
    samples, length = shapes[0]
    labels = [torch.zeros(length, samples, dtype=torch.int64) for _ in range(m * last.is_last)]
    return Batch(
        tokens=tokens, labels=tuple(labels), encoder_tokens=encoder[0] if encoder else None
    )


def _step(stages: Sequence[Stage], order: Sequence[tuple[bool, int]], batch: Batch) -> int:
    """Run a step of one rank without other ranks; return its gradient bytes before the optimizer.

    order : schedule as (is forward, chunk).
    """
    job = stages[0].job
    dtype = torch_dtype(job.precision)
    m = job.plan.num_microbatches
    tokens = zip(*(each.chunk(m) for each in batch.inputs), strict=True)
    for stage in stages:
        stage.begin_step(batch.labels)
    waiting: list[list[list[torch.Tensor]]] = [[] for _ in stages]
    losses: list[torch.Tensor] = []
    for is_forward, chunk in order:
        stage = stages[chunk]
        if is_forward:
            if stage.is_first:
                xs: tuple[torch.Tensor, ...] = next(tokens)
            else:
                shapes = stage.entry_shapes()
                xs = tuple(torch.empty(s, dtype=dtype, requires_grad=True) for s in shapes)
            out = stage(*xs)
            outs = list(out) if isinstance(out, tuple) else [out]
            # the output for the next stage is not kept on this one
            waiting[chunk].append(outs if stage.is_last else [End.apply(each) for each in outs])
            del xs, out, outs  # as if sent to the next stage
        else:
            stage.before_backward()
            ends = waiting[chunk].pop(0)
            torch.autograd.backward(
                ends, None if stage.is_last else [torch.empty_like(end) for end in ends]
            )
            # a graph would keep the received activations, and their gradient, which is sent back
            losses += [end.detach() for end in ends]
            del ends
    for stage in stages:
        stage.finish_backward()
    held = [gradient_of(parameter) for stage in stages for parameter in stage.parameters()]
    gradient_bytes = held_bytes(held)
    del held
    for stage in stages:
        stage.step()
    return gradient_bytes


def _optimizer_bytes(
    own: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> int:
    """Return the bytes of optimizer moments and fp32 weight copies, without step counters.

    own : parameters of the model, which are not included.
    """
    stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    moments: list[Any] = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
    # fp32 weights are stepped directly, and belong to the model
    return held_bytes([*moments, *stepped, *own]) - held_bytes(own)
