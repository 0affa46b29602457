"""Training steps of one rank's stage: micro-batches in the schedule's order, norms and times."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from profiler.plan.batches import Batch
from profiler.plan.job import PlanJob
from profiler.plan.stage import Stage

__all__ = ["Stopwatch", "Trainer"]


class Stopwatch:
    """Adds up the time of a device that works on several things in turn, by name."""

    def __init__(self, device: torch.device) -> None:
        """Make a stopwatch that reads the device's own clock where it has one."""
        self._is_cuda = device.type == "cuda"
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of the block."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((start, self._now()))

    def take(self) -> dict[str, float]:
        """Return seconds by name, and begin again; the device must have finished."""
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
        return float(start.elapsed_time(end)) / 1e3 if self._is_cuda else float(end - start)


class Trainer:
    """Runs steps of a stage together with the other ranks."""

    def __init__(self, stage: Stage, job: PlanJob, device: torch.device) -> None:
        """Prepare the schedule of the plan."""
        self.stage, self.job, self.device = stage, job, device
        self.watch = Stopwatch(device)
        self._schedule = _schedule(self) if job.plan.num_stages > 1 else None

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Run all micro-batches of a step; return the sum of this rank's scaled losses."""
        stage, m = self.stage, self.job.plan.num_microbatches
        stage.begin_step(batch.labels)
        losses: list[torch.Tensor] = []
        if self._schedule is not None:
            inputs = (batch.tokens,) if stage.is_first else ()
            # the stage makes its own loss; the schedule wants one target per micro-batch
            target = torch.zeros(m, device=self.device) if stage.is_last else None
            self._schedule.step(*inputs, target=target, losses=losses if stage.is_last else None)
        else:
            waiting: list[torch.Tensor] = []
            for tokens in batch.tokens.chunk(m):
                with self.watch.span("forward_s"):
                    waiting.append(stage(tokens))
                if self.job.plan.pipeline_type == "1f1b":
                    losses.append(self._backward(waiting.pop()))
            losses += [self._backward(loss) for loss in waiting]
        with self.watch.span("backward_s"):
            stage.finish_backward()
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack([loss.detach() for loss in losses]).sum()

    def checked_step(self, batch: Batch) -> tuple[float, float]:
        """Run a step; return the loss of the global batch and the norm of its gradient."""
        loss = self.stage.loss_share(self.forward_backward(batch))
        share = self.stage.squared_gradient_norm().to(self.device)
        both = torch.stack([loss.double(), share])
        dist.all_reduce(both)
        self.stage.step()
        total, squared = both.tolist()
        return total, squared**0.5

    def timed_step(self, batch: Batch) -> float:
        """Run a step that begins on all ranks at once; return this rank's seconds."""
        self._synchronize()
        dist.barrier(**({"device_ids": [self.device.index]} if self._is_cuda else {}))
        start = time.perf_counter()
        self.step(batch)
        self._synchronize()
        return time.perf_counter() - start

    def step(self, batch: Batch) -> None:
        """Run a step."""
        self.forward_backward(batch)
        with self.watch.span("optimizer_s"):
            self.stage.step()

    @property
    def _is_cuda(self) -> bool:
        return bool(self.device.type == "cuda")

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def _backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.stage.before_backward()
        with self.watch.span("backward_s"):
            loss.sum().backward()
        return loss.sum()


class _TimedStage(PipelineStage):
    """A stage that prepares and times its forwards and backwards, waits excluded."""

    trainer: Trainer

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.trainer.watch.span("forward_s"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.trainer.stage.before_backward()
        with self.trainer.watch.span("backward_s"):
            return super().backward_one_chunk(*args, **kwargs)


def _schedule(trainer: Trainer) -> Any:
    stage, job = trainer.stage, trainer.job
    plan, groups = job.plan, stage.groups
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32

    def like(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    if stage.is_first:
        layer = job.spec.layers[0]
        samples = plan.global_batch // plan.num_microbatches // stage.vocab.data_degree
        split = stage.vocab.degree if stage.vocab.kind == "ulysses" else 1
        entry = torch.empty((samples, layer.seq_length // split), dtype=torch.int64, device="meta")
    else:
        entry = like(stage.entry_shape())
    if stage.is_last:
        out = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
    else:
        out = like(stage.activation_shape(stage.exit))
    timed = _TimedStage(
        stage,
        groups.stage,
        groups.num_stages,
        trainer.device,
        input_args=(entry,),
        output_args=(out,),
        group=groups.pipeline,
    )
    timed.trainer = trainer
    kind = ScheduleGPipe if plan.pipeline_type == "gpipe" else Schedule1F1B
    options: dict[str, Any] = {}
    if "scale_grads" in inspect.signature(kind).parameters:  # torch 2.6 never scales them
        options["scale_grads"] = False
    return kind(
        timed,
        n_microbatches=plan.num_microbatches,
        loss_fn=lambda loss, _: loss.sum(),
        **options,
    )
