"""Times of a model profile from a card and a stack, in the cells of a measurement.

The cells are whole and sharded layers, forward and backward separately, and embedding and head, for
many batches and degrees at once. Saved activations are counted in `autopar.rates.model`. The
planner's cost model combines cells to the time of a plan, and asks for them without host overheads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np

from autopar.arrays import F64
from autopar.rates.layer import embedding_times, head_times, layer_kernels
from autopar.rates.measured import CollectiveCounts, host_calls, host_device_time_s
from autopar.rates.parts.operations import KernelTime, Machine, RankShape
from autopar.rates.parts.optimizer import optimizer_time_s
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.job import Block, Job, parameters
from autopar.run.model import OtherTime, ShardedTime, TimePoint

_Kind = Literal["sp", "tp", "ulysses"]


def cells_job(
    name: str, blocks: tuple[Block, ...], vocab: int, seq_length: int, precision: str
) -> Job:
    """Return the job that cells are computed from, at batch 1; precision is bf16, fp16 or fp32."""
    return Job(
        name=name,
        blocks=blocks,
        vocab=vocab,
        seq=seq_length,
        micro_batch=1,
        global_batch=1,
        precision=precision,  # type: ignore[arg-type]  # one of three of its own
    )


def layer_cells(
    machine: Machine,
    job: Job,
    block: Block,
    *,
    layer_type: int,
    batches: Sequence[int],
    degrees: Sequence[int],
    sequence_parallel: bool,
) -> tuple[list[TimePoint], list[ShardedTime]]:
    """Return (forward times of unsharded layers, all times by degree and batch) of a layer type.

    batches : samples per tensor group
    degrees : sizes of tensor groups and Ulysses groups, including 1

    The recomputation time of a checkpointed layer is its forward time.
    """
    kind: _Kind = "sp" if sequence_parallel else "tp"
    whole: list[TimePoint] = []
    cells: list[ShardedTime] = []
    # Rows: degrees; columns: batches.
    t = np.array(degrees, dtype=np.float64)[:, None]
    b = np.array(batches, dtype=np.float64)[None, :]
    n = b * job.seq * np.ones_like(t)
    tensor = RankShape(
        sequences=b,
        tokens=n,
        outside=n / t if sequence_parallel else n,
        # The planner splits experts like any MLP: every rank has 1/t of each, and all tokens.
        routed=n,
        tensor=t,
        expert_tensor=t,
        heads=t,
    )
    ulysses = RankShape(
        sequences=b,
        tokens=n / t,
        outside=n / t,
        routed=n / t,
        tensor=1.0,
        expert_tensor=1.0,
        heads=t,
    )
    held = sum(parameters(block))
    sides: tuple[tuple[_Kind, RankShape], ...] = ((kind, tensor), ("ulysses", ulysses))
    for name, split in sides:
        forward, backward = _seconds(layer_kernels(machine, job, block, split), n)
        for row, degree in enumerate(degrees):
            if degree == 1 and name == "ulysses":
                continue  # whole layers are equal under both
            calls = host_calls(name) if degree > 1 else CollectiveCounts(0, 0)
            forward_s = _with_host(machine, forward[row], calls.forward, block, "forward_s")
            backward_s = _with_host(machine, backward[row], calls.backward, block, "backward_s")
            own = held / (1 if name == "ulysses" else degree)
            step_s = optimizer_time_s(machine, job, own, own)
            for column, batch in enumerate(batches):
                cells.append(
                    ShardedTime(
                        layer_type=layer_type,
                        batch=batch,
                        seq_length=job.seq,
                        degree=degree,
                        kind="sp" if degree == 1 else name,
                        forward_s=float(forward_s[column]),
                        backward_s=float(backward_s[column]),
                        recompute_s=float(forward_s[column]),
                        optimizer_s=step_s,
                    )
                )
                if degree == 1:
                    seconds = float(forward_s[column])
                    whole.append(TimePoint(batch=batch, seq_length=job.seq, forward_s=seconds))
    return whole, cells


_Cell = TypeVar("_Cell", TimePoint, ShardedTime)


def mean_cells(kinds: Sequence[Sequence[_Cell]], numbers: Sequence[int]) -> list[_Cell]:
    """Return the cells of a layer type: means over its kinds of layers, weighted by `numbers`."""
    total = sum(numbers)
    found = []
    for same in zip(*kinds, strict=True):
        first = same[0]
        seconds = {
            name: sum(n * getattr(cell, name) for cell, n in zip(same, numbers, strict=True))
            / total
            for name in ("forward_s", "backward_s", "recompute_s", "optimizer_s")
            if getattr(first, name, None) is not None
        }
        found.append(first if len(same) == 1 else replace(first, **seconds))
    return found


def other_cells(
    machine: Machine, job: Job, seq_lengths: tuple[int, ...], batches: Sequence[int]
) -> list[OtherTime]:
    """Return the times of embedding, final norm, head and loss, unsharded, forward and backward."""
    b = np.array(batches, dtype=np.float64)
    # Every layer type looks up its tokens; the head follows the last type.
    first = embedding_times(machine, job, b * sum(seq_lengths))
    last = head_times(machine, job, b * seq_lengths[-1])
    forward, backward = _seconds((*first, *last), b)
    return [
        OtherTime(batch=batch, seq_lengths=seq_lengths, forward_s=float(f), backward_s=float(g))
        for batch, f, g in zip(batches, forward, backward, strict=True)
    ]


def _seconds(parts: Iterable[KernelTime], like: F64) -> tuple[F64, F64]:
    """Return the summed forward and backward seconds of all parts, in the shape of `like`."""
    forward, backward = np.zeros_like(like), np.zeros_like(like)
    for part in parts:
        forward += part.forward_s
        backward += part.input_s + part.weight_s
    return forward, backward


def _with_host(machine: Machine, device_s: F64, calls: int, block: Block, side: str) -> F64:
    """Return the time of a layer with host overhead: slightly above the longer of the two."""
    host = machine.stack.figures.host
    seconds = host[side] + calls * host["collective_s"]
    if isinstance(block.mlp, Experts):
        # Half of it in each direction.
        seconds += host["experts_s"] / 2.0
    return np.asarray(host_device_time_s(device_s, seconds))
