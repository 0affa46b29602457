"""What is live at each moment of a pipeline stage's step.

The order in which a stage runs its chunks is the schedule's (`autopar.pipeline.orders`), with
groups of micro-batches as Megatron-Core counts them. Bytes come from the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from autopar.pipeline import orders
from autopar.pipeline.schedules import default_group
from autopar.records import Record
from autopar.run.run import Run


class Event(Record):
    """One chunk's forward or backward of one micro-batch, or a half of a backward."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    chunk: int
    micro_batch: int


class Moment(Record):
    """What is live while an event runs."""

    event: Event
    live: tuple[int, ...]
    """Micro-batches that each chunk has saved and not freed; with this one, before its backward
    frees it, or after its forward saved it."""
    waiting_logits: bool
    """The head has run for a micro-batch whose backward is still to come, or just begins."""


def micro_batch_group(run: Run) -> int:
    """Return the micro-batches that pass a chunk in a row."""
    strategy = run.strategy
    pp, total = strategy.pp, strategy.micro_batches
    if strategy.group:
        return strategy.group
    if not run.kernels.torch_layers:
        # Megatron-Core's microbatch_group_size_per_vp_stage; its last group may be smaller
        return pp
    # torch makes its rounds longer where micro-batches do not divide by the stages
    whole = default_group(pp, total)
    return pp if total % whole else whole


def _replayed(run: Run) -> int:
    """Return how many micro-batches show everything that a stage of the pipeline ever holds.

    After the warm-up of the first stage, each further group repeats the one before it; the last one
    may be smaller than the others. Where all forwards run first, all of them count.
    """
    strategy = run.strategy
    total = strategy.micro_batches
    if strategy.schedule in ("gpipe", "looped_bfs"):
        return total
    if strategy.schedule == "dual_pipe_v":
        # fewer have no such order
        total = max(total, 2 * strategy.pp)
    group = micro_batch_group(run)
    first = 2 * strategy.pp + strategy.vpp * group + 1
    groups = first // group + 3
    return min(total, groups * group + total % group)


def warmup_chunks(run: Run, stage: int) -> int:
    """Return how many forwards a stage of pairs runs before its first backward."""
    strategy = run.strategy
    return orders.warmup_chunks(
        strategy.schedule,
        stage,
        stages=strategy.pp,
        chunks=strategy.vpp,
        micro_batches=_replayed(run),
        group=micro_batch_group(run),
        ahead=int(run.runtime.overlap.experts),
    )


def order(run: Run, stage: int) -> tuple[Event, ...]:
    """Return the events of a stage's step in the order of its schedule.

    Of many micro-batches so many that nothing new comes.
    """
    strategy = run.strategy
    work = orders.actions(
        strategy.schedule,
        stage,
        stages=strategy.pp,
        chunks=strategy.vpp,
        micro_batches=_replayed(run),
        group=micro_batch_group(run),
        # beside the backward of a micro-batch the next one's forward runs
        ahead=int(run.runtime.overlap.experts),
    )
    return tuple(
        Event(kind=_KINDS[kind], chunk=chunk, micro_batch=micro_batch)
        for kind, chunk, micro_batch in work
    )


_KINDS: dict[str, Literal["forward", "backward", "inputs", "weights"]] = {
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
}


def moments(run: Run, stage: int) -> Iterator[Moment]:
    """Yield every event of a stage's step with what is live."""
    chunks = run.strategy.stages[stage]
    live = [0] * len(chunks)
    waiting: set[int] = set()
    for event in order(run, stage):
        if event.kind == "forward":
            live[event.chunk] += 1
        yield Moment(event=event, live=tuple(live), waiting_logits=bool(waiting))
        # what the gradients of weights need is there until they are made
        if event.kind in ("backward", "weights"):
            live[event.chunk] -= 1
        if chunks[event.chunk].head:
            if event.kind == "forward":
                waiting.add(event.micro_batch)
            elif event.kind in ("backward", "weights"):
                waiting.discard(event.micro_batch)
