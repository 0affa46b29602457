"""Run a plan in real processes: steps compared with one process, then timed steps."""

from __future__ import annotations

import inspect
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from autopar.command.run import say
from autopar.errors import AutoparError, InputError
from autopar.records import replace
from autopar.units import format_bytes
from profiler.environment import launched_ranks, use_rank_threads
from profiler.measure import out_of_memory, torch_dtype
from profiler.model.counting import count_step
from profiler.model.layers.vocab import build_stack
from profiler.plan.arithmetic import Cube, Layout, check_job, layouts, vocab_layout
from profiler.plan.exchange import (
    Batch,
    fill,
    global_tokens,
    local_batch,
    pieces_of,
    shapes,
)
from profiler.plan.job import PlanJob, RunResult
from profiler.plan.stage import Stage, build_stages, open_groups, padded_spec
from profiler.plan.units import Replica, gradient_of, sums_by_itself
from profiler.processes import barrier, choose_backend, meet, watched
from profiler.progress import Trouble

# --------------------------------------------------------------------------------------------------
# Training steps of one rank's stage: micro-batches in schedule order, norms and times.


class Stopwatch:
    """Total device time by name, for named blocks of code that alternate."""

    def __init__(self, device: torch.device) -> None:
        """Create a stopwatch that uses CUDA events on a GPU, and the host clock elsewhere."""
        self._is_cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((start, self._now()))

    def take(self) -> dict[str, float]:
        """Return the total seconds by name and reset them; the device must be synchronized."""
        found = {
            name: sum(self._seconds(*pair) for pair in pairs) for name, pairs in self._spans.items()
        }
        self._spans = {}
        return found

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        # elapsed_time of events is in milliseconds
        return float(start.elapsed_time(end)) / 1e3 if self._is_cuda else float(end - start)


class LossScaler:
    """Dynamic loss scale for fp16, with the growth and backoff rule of torch.amp.GradScaler.

    GradScaler unscales only fp32 gradients, so fp32 gradients of all weights would have to exist in
    addition to those in fp16. Here each unit unscales its gradients in its optimizer step.
    """

    def __init__(
        self, scale: float, *, is_alone: bool = False, growth_interval: int = 2000
    ) -> None:
        """Set the first scale; it doubles after `growth_interval` steps without an overflow.

        is_alone : True if the complete model is on this rank, so that no all-reduce is needed.
        """
        self.scale, self._is_alone = scale, is_alone
        self._interval, self._good = growth_interval, 0

    def accepts(self, gradients: Iterable[torch.Tensor], *, device: torch.device) -> bool:
        """Return True if no gradient of any rank has overflowed, and update the scale.

        The result is equal on all ranks, so that either all ranks step or none.
        """
        # the largest absolute element of each gradient, NaN or infinite if any element is
        largest = [torch.linalg.vector_norm(g, math.inf).float() for g in gradients if g.numel()]
        found = torch.zeros((), device=device)
        if largest:
            found = (~torch.stack(largest).isfinite()).any().float()
        if not self._is_alone:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        is_fine = not bool(found)
        self._good = self._good + 1 if is_fine else 0
        if not is_fine:
            self.scale = max(1.0, self.scale / 2)
        elif self._good == self._interval:
            self.scale, self._good = self.scale * 2, 0
        return is_fine


class Trainer:
    """Training loop of one rank: forward, backward and optimizer of its pipeline stage."""

    def __init__(self, stages: Sequence[Stage], job: PlanJob, device: torch.device) -> None:
        """Prepare the schedule of the plan; `stages` are this rank's model chunks."""
        self.stages = nn.ModuleList(stages)
        self.job, self.device = job, device
        self.watch = Stopwatch(device)
        self._schedule = _schedule(self) if job.plan.num_stages > 1 else None
        self.scaler = LossScaler(job.loss_scale) if job.precision == "fp16" else None

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Run all micro-batches of a step; return the sum of this rank's losses, unscaled.

        The sum is 0 on all stages except the last.
        """
        first, last, m = self.stages[0], self.stages[-1], self.job.plan.num_microbatches
        scale = 1.0 if self.scaler is None else self.scaler.scale
        for stage in self.stages:
            stage.loss_scale = scale
            stage.begin_step(batch.labels)
        losses: list[torch.Tensor] = []
        if self._schedule is not None:
            inputs = batch.inputs if first.is_first else ()
            # the stage computes its loss; torch's schedule requires one target per micro-batch
            target = torch.zeros(m, device=self.device) if last.is_last else None
            self._schedule.step(*inputs, target=target, losses=losses if last.is_last else None)
        else:
            for tokens in zip(*(each.chunk(m) for each in batch.inputs), strict=True):
                with self.watch.span("forward_s"):
                    loss = first(*tokens)
                # a single stage has one micro-batch in flight, in GPipe as in 1F1B: without
                # another stage, only gradients are accumulated and no activations are kept
                losses.append(self._backward(loss))
                del loss  # otherwise this graph would stay alive during the next forward
        with self.watch.span("backward_s"):
            for stage in self.stages:
                stage.finish_backward()
        # only the last stage has losses; other ranks add 0 to the sum over ranks
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / scale

    def checked_step(self, batch: Batch) -> tuple[float, float]:
        """Run a step; return (loss, gradient norm) of the global batch, equal on all ranks.

        The norm is infinite if gradients overflowed fp16 and the step was skipped.
        """
        loss = self.stages[-1].loss_share(self.forward_backward(batch))
        norms = [stage.squared_gradient_norm() for stage in self.stages]
        share = torch.stack(norms).sum().to(self.device)
        # loss and squared norm are both sums over ranks, so one all-reduce is enough
        both = torch.stack([loss.double(), share])
        dist.all_reduce(both)
        is_taken = self._update()
        total, squared = both.tolist()
        return total, squared**0.5 if is_taken else math.inf

    def timed_step(self, batch: Batch) -> float:
        """Run a step after a barrier; return its duration on this rank, in seconds."""
        # unfinished work of the step before must not count
        self._synchronize()
        barrier(self.device)
        start = time.perf_counter()
        self.step(batch)
        self._synchronize()
        return time.perf_counter() - start

    def step(self, batch: Batch) -> None:
        """Run a training step: all micro-batches and the optimizer."""
        self.forward_backward(batch)
        with self.watch.span("optimizer_s"):
            self._update()

    def _update(self) -> bool:
        """Step all optimizers and return True; if gradients overflowed, skip and return False."""
        parts = [part for stage in self.stages for part in stage.parts]
        gradients = (grad for part in parts for _, _, grad in part.gradients())
        is_taken = self.scaler is None or self.scaler.accepts(gradients, device=self.device)
        for stage in self.stages:
            stage.step() if is_taken else stage.skip_step()
        return is_taken

    @property
    def _is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.stages[0].before_backward()
        with self.watch.span("backward_s"):
            loss.sum().backward()
        return loss.detach().sum()


class _TimedStage(PipelineStage):
    """Pipeline stage that times its forwards and backwards, excluding waits for other stages."""

    trainer: Trainer

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.trainer.watch.span("forward_s"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.submod.before_backward()
        with self.trainer.watch.span("backward_s"):
            return super().backward_one_chunk(*args, **kwargs)


_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
}


def _schedule(trainer: Trainer) -> Any:
    plan = trainer.job.plan
    kind = _SCHEDULES[plan.pipeline_type]
    stages = [_timed_stage(trainer, stage) for stage in trainer.stages]
    options: dict[str, Any] = {}
    if "scale_grads" in inspect.signature(kind).parameters:  # torch 2.6 never scales them
        # losses are already divided by the number of micro-batches
        options["scale_grads"] = False
    return kind(
        stages if plan.num_chunks > 1 else stages[0],
        n_microbatches=plan.num_microbatches,
        loss_fn=lambda loss, _: loss.sum(),
        **options,
    )


def _timed_stage(trainer: Trainer, stage: Any) -> _TimedStage:
    job, groups = trainer.job, stage.groups
    dtype = torch_dtype(job.precision)

    def like(shape: tuple[int, ...]) -> torch.Tensor:
        # the schedule needs only shapes and dtypes
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    if stage.is_first:
        shapes_in = stage.token_shapes()
        entry = tuple(torch.empty(s, dtype=torch.int64, device="meta") for s in shapes_in)
    else:
        entry = tuple(map(like, stage.entry_shapes()))
    if stage.is_last:
        out = (torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True),)
    else:
        out = tuple(map(like, stage.exit_shapes()))
    timed = _TimedStage(
        stage,
        stage.chunk,
        groups.num_stages * job.plan.num_chunks,
        trainer.device,
        input_args=entry,
        output_args=out,
        group=groups.pipeline,
    )
    timed.trainer = trainer
    return timed


# --------------------------------------------------------------------------------------------------
# The training steps in one process without parallelism, as a reference for the plan.


def reference_steps(
    job: PlanJob, num_steps: int, *, device: torch.device
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train the complete model on one device; return (losses, gradient norms), one per step.

    Micro-batches run one after another. The device needs memory for the model states and for one
    micro-batch of the complete model. A norm is infinite if the step was skipped in fp16.
    """
    dtype = torch_dtype(job.precision)
    spec = padded_spec(job)
    module = build_stack(spec, dtype=dtype, device=device, routing=job.routing).module
    _fill(module, job)
    unit = Replica(
        list(module.parameters()),
        None,
        precision=job.precision,
        fp32_gradients=job.fp32_gradients,
        learning_rate=job.learning_rate,
    )
    losses, norms = [], []
    scaler = LossScaler(job.loss_scale, is_alone=True) if job.precision == "fp16" else None
    for step in range(num_steps):
        scale = scaler.scale if scaler is not None else 1.0
        total = 0.0
        m = job.plan.num_microbatches
        for part in zip(*(values.chunk(m) for values in global_tokens(job, step)), strict=True):
            sequences = (values.t().contiguous().to(device) for values in part)
            # the mean over micro-batches, as in the loss scaling of a stage
            loss = module(*sequences) / m
            (loss * scale).backward()
            total += float(loss.detach())
        losses.append(total)
        gradients = [grad for grad in map(gradient_of, module.parameters()) if grad is not None]
        if scaler is not None and not scaler.accepts(gradients, device=device):
            norms.append(math.inf)
            unit.skip()
            continue
        squared = sum(grad.double().square().sum() for grad in gradients)
        norms.append(float(squared) ** 0.5 / scale)
        unit.step(scale)
    return tuple(losses), tuple(norms)


def _fill(module: torch.nn.Module, job: PlanJob) -> None:
    """Initialise the parameters in place with the values that they have in every plan."""
    whole = Layout(cube=Cube(factors=(1,)), kind="tp", tensor_axes=(), zero="ddp")
    tied = job.spec.tied_embeddings
    layers = [layer for of_type in module.layers for layer in of_type]
    # values depend on names, so parts are named as in a plan
    parts = [("embedding", module.first), ("head", module.last)]
    parts += [(f"layer{k}", layer) for k, layer in enumerate(layers)]
    if module.encoder_norm is not None:
        parts.append(("encoder_norm", module.encoder_norm))
    for name, part in parts:
        pieces = pieces_of(part, shapes(part), whole, 0)
        fill(part, pieces, seed=job.seed, where=name, tied=tied)


# --------------------------------------------------------------------------------------------------
# Process group of a run and its watch: a run that fails or hangs ends with an error message.


_MARGIN_S = 5.0
"""Timeout of the process groups minus that of the watch, seconds."""


class OutOfMemoryError(AutoparError):
    """Error for a rank that runs out of memory (exit code 1)."""


@contextmanager
def joined_ranks(
    backend: str,
    device: torch.device,
    cube: Cube,
    *,
    timeout_s: float,
    predicted_bytes: Sequence[int | None] = (),
) -> Iterator[Callable[[str], None]]:
    """Initialise torch.distributed for all ranks of torchrun while the context is active.

    Yields a function to call with a description before each step, which must then end within
    `timeout_s`. If a rank fails, all processes are ended, and the first remaining rank prints the
    reason. Without torchrun there is one rank, whose errors are raised.

    predicted_bytes : predicted memory by stage, for the out-of-memory message.
    """
    if launched_ranks() is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            with _explained(0, cube, device, predicted_bytes):
                yield lambda during: None
        finally:
            dist.destroy_process_group()
        return
    own = meet("plan", device, timeout_s)

    def finish(trouble: Trouble) -> None:
        _say(trouble, own.rank)

    with watched(own, timeout_s=timeout_s, finish=finish) as watch:
        watch.step("the meeting of the ranks")
        own.open_groups(backend, timeout_s + _MARGIN_S)
        with _explained(own.rank, cube, device, predicted_bytes):
            yield watch.step
    # the watch leaves the system's default handler, which ends a process without a message
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _explained(
    rank: int, cube: Cube, device: torch.device, predicted_bytes: Sequence[int | None]
) -> Iterator[None]:
    """Convert out-of-memory exceptions of torch to an OutOfMemoryError with stage and memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        stage = rank // cube.num_ranks
        raise OutOfMemoryError(_shortage(rank, stage, device, error, predicted_bytes)) from None


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
    """Print the reason why a run ends; called on the first remaining rank by its watch thread."""
    # an input error is the same on every rank: only rank 0 prints it
    if trouble.is_input_error and rank:
        return
    during = f", during {trouble.during}" if trouble.during else ""
    say(f"profile-plan: {trouble.sentence}{during}")


# --------------------------------------------------------------------------------------------------
# The run: steps compared with the reference, then timed steps.


_NO_REFERENCE = (
    "the plan ran, but one process with the whole model ran out of memory. Use "
    "fewer layers (--layers), or --no-reference"
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
    """Run a plan on the ranks of torchrun; return the result on rank 0, None on other ranks.

    First, `num_steps` steps with the reference's initial weights give losses and gradient norms.
    Then `num_timed_steps` steps are timed, and the peak memory of one more step is measured.

    timeout_s : limit of each step, seconds.
    predicted_bytes : as in `joined_ranks`.

    Raises InputError: the plan cannot run, or not with this backend or number of ranks. After the
    process group is initialised, a failure of any rank ends all processes (see `joined_ranks`).
    """
    cube = check_job(job)
    if with_reference:
        _check_reference(job)
    name, device = choose_device(backend)
    world = launched_ranks() or 1
    if world != job.plan.world_size:
        raise InputError(
            f"the plan is for {job.plan.world_size} ranks, but {world} were started",
            remedy=f"Start torchrun with {job.plan.world_size} ranks",
        )
    _check_zero(job, cube, device)
    if device.type == "cpu":
        use_rank_threads()
    with joined_ranks(
        name, device, cube, timeout_s=timeout_s, predicted_bytes=predicted_bytes
    ) as begin:
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
    # the other ranks have ended: none waits, and all memory is free for the reference
    try:
        loss, grad_norm = reference_steps(job, num_steps, device=device)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return replace(result, notes=(_NO_REFERENCE,))  # keep the result of the run
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
    """Run a plan like `run_plan`, in an existing process group, which stays usable.

    begin : function called with a description before each step.
    """
    rank = dist.get_rank()
    begin("building the stages")
    cube = check_job(job)
    groups = open_groups(job, cube, rank=rank, device_type=device.type, timeout_s=timeout_s)
    trainer = Trainer(build_stages(job, groups, device=device), job, device)
    vocab, place, at = vocab_layout(job, cube), groups.place, groups.stage

    def batch(step: int) -> Batch:
        return local_batch(job, vocab, place, step=step, device=device)

    checked = []
    for step in range(num_steps):
        begin(f"step {step + 1} of {num_steps}")
        checked.append(trainer.checked_step(batch(step)))
    # spans of the checked steps must not count for the timed ones
    trainer.watch.take()
    times, spans = [], []
    for step in range(num_timed_steps):
        begin(f"timed step {step + 1} of {num_timed_steps}")
        times.append(trainer.timed_step(batch(num_steps + step)))
        spans.append(trainer.watch.take())
    begin("the step whose memory is counted")
    peak = _peak(trainer, batch(num_steps + num_timed_steps))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (times, _by_name(statistics.median, spans), peak, at))
    # free the memory of the plan before the reference allocates its own
    del trainer
    reference: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    if rank == 0 and with_reference:
        reference = reference_steps(job, num_steps, device=device)
    barrier(device)
    if rank:
        return None
    return RunResult(
        loss=tuple(loss for loss, _ in checked),
        grad_norm=tuple(norm for _, norm in checked),
        reference_loss=reference[0],
        reference_grad_norm=reference[1],
        step_time_s=tuple(max(column) for column in zip(*(f[0] for f in found), strict=True)),
        stage_time_s=tuple(
            _by_name(max, [spans for _, spans, _, other in found if other == number])
            for number in range(job.plan.num_stages)
        ),
        peak_bytes=tuple(peak for _, _, peak, _ in found),
        peak_source="allocated" if device.type == "cuda" else "counted",
    )


def choose_device(backend: str) -> tuple[str, torch.device]:
    """Return (backend, device) of this rank; raise InputError if there are too few GPUs."""
    backend = choose_backend(backend)
    if backend == "gloo":
        return backend, torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError(
            f"local rank {local} has no GPU: torch finds {torch.cuda.device_count()}",
            remedy="Start one rank per GPU",
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return backend, device


def _check_reference(job: PlanJob) -> None:
    """Raise InputError if even routing would differ between one process and the plan's ranks."""
    if job.routing == "top_k":
        return
    for index, (kind, strategy) in enumerate(
        zip(job.spec.layer_types, job.plan.layers, strict=True)
    ):
        layer = job.spec.layers[kind]
        is_split = strategy.ulysses or job.sequence_parallel
        length = layer.seq_length // (strategy.tp if is_split else 1)
        if strategy.cp > 1:
            # even routing starts again in each of the two pieces of a context rank
            length //= 2 * strategy.cp
        visits = length * (layer.experts_per_token or 1)
        if layer.num_experts is not None and visits % layer.num_experts:
            raise InputError(
                f"layer {index}: the {visits} visits of the {length} tokens of a "
                "sample on a rank cannot be divided evenly over "
                f"{layer.num_experts} experts, and one process would distribute "
                "them differently",
                remedy="Use another --seq, --routing top-k, or --no-reference",
            )


def _check_zero(job: PlanJob, cube: Cube, device: torch.device) -> None:
    """Raise InputError for ZeRO-2 and ZeRO-3 on CPUs before torch 2.8.

    Older FSDP2 only averages gradients, which gloo does not support.
    """
    sharded = any(layout.is_sharded for layout in layouts(job, cube))
    if device.type == "cuda" or sums_by_itself() or not sharded:
        return
    raise InputError(
        f"ZeRO-2 and ZeRO-3 on CPUs need torch 2.8 or later, this is {torch.__version__}",
        remedy="Update torch, or use a plan with ddp",
    )


def _peak(trainer: Trainer, batch: Batch) -> int:
    """Return the peak memory of one step on this rank, in bytes."""
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
        trainer.step(batch)
        torch.cuda.synchronize(trainer.device)
        return int(torch.cuda.max_memory_allocated(trainer.device))
    stages = trainer.stages
    optimizers = [unit.optimizer for stage in stages for unit in stage.units]
    most, _ = count_step(lambda: trainer.step(batch), model=stages, optimizers=optimizers)
    return most


def _by_name(
    choose: Callable[[list[float]], float], spans: Sequence[dict[str, float]]
) -> dict[str, float]:
    """Return `choose` of the seconds of each name over all spans; a missing name counts as 0."""
    names = sorted({name for span in spans for name in span})
    return {name: choose([span.get(name, 0.0) for span in spans]) for name in names}
