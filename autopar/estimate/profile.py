"""Times of a model profile, cell by cell, from a card and a stack: what a measurement would hold.

Layers whole and sharded, forward and backward apart, and what is around them, for many batches and
degrees at once. What layers keep in memory is counted in `autopar.estimate.model`; how cells make a
plan's time is the planner's cost model, which asks for them without the host's code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.estimate.job import Block, Experts, Job, parameters
from autopar.estimate.layer import (
    Machine,
    Part,
    Split,
    embedding_times,
    head_times,
    layer_parts,
    optimizer_time_s,
    together_s,
)
from autopar.hardware import Hiding
from autopar.model import ModelProfile, ModelSpec, OtherTime, ShardedTime, TimePoint

__all__ = ["Calls", "cells_job", "host_calls", "layer_cells", "other_cells", "without_host"]

_Kind = Literal["sp", "tp", "ulysses"]


class Calls(NamedTuple):
    """Collectives that the host launches for a layer."""

    forward: int
    backward: int


_CALLS: dict[str, Calls] = {"sp": Calls(4, 6), "tp": Calls(2, 2), "ulysses": Calls(4, 4)}
"""Of sharded layers: gathering and scattering around both halves, once more in the backward; an
all-reduce behind each; all-to-alls of queries, keys, values and the result."""


def host_calls(kind: str) -> Calls:
    """Return the collectives of a layer that is sharded this way; none of kinds without times."""
    return _CALLS.get(kind, Calls(0, 0))


def cells_job(
    name: str, blocks: tuple[Block, ...], vocab: int, seq_length: int, precision: str
) -> Job:
    """Return what the times of cells depend on besides sizes; precision is bf16, fp16 or fp32."""
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
    batches: Sequence[int],
    degrees: Sequence[int],
    sequence_parallel: bool,
) -> tuple[list[TimePoint], list[ShardedTime]]:
    """Return the forwards of whole layers, and every cell with its backward and optimizer step.

    batches : samples of a tensor group; degrees : of tensor groups and Ulysses groups, 1 among
    them. A checkpointed layer runs its forward again.
    """
    kind: _Kind = "sp" if sequence_parallel else "tp"
    whole: list[TimePoint] = []
    cells: list[ShardedTime] = []
    # rows: degrees, columns: batches
    t = np.array(degrees, dtype=np.float64)[:, None]
    b = np.array(batches, dtype=np.float64)[None, :]
    n = b * job.seq * np.ones_like(t)
    tensor = Split(
        sequences=b,
        tokens=n,
        outside=n / t if sequence_parallel else n,
        # the planner splits experts as any MLP: every rank has 1/t of each, and all tokens
        routed=n,
        tensor=t,
        expert_tensor=t,
        heads=t,
    )
    ulysses = Split(
        sequences=b,
        tokens=n / t,
        outside=n / t,
        routed=n / t,
        tensor=1.0,
        expert_tensor=1.0,
        heads=t,
    )
    held = sum(parameters(block))
    sides: tuple[tuple[_Kind, Split], ...] = ((kind, tensor), ("ulysses", ulysses))
    for name, split in sides:
        forward, backward = _seconds(layer_parts(machine, job, block, split), n)
        for row, degree in enumerate(degrees):
            if degree == 1 and name == "ulysses":
                continue  # whole layers are the same under both
            calls = host_calls(name) if degree > 1 else Calls(0, 0)
            forward_s = _with_host(machine, forward[row], calls.forward, block, "forward_s")
            backward_s = _with_host(machine, backward[row], calls.backward, block, "backward_s")
            own = held / (1 if name == "ulysses" else degree)
            step_s = optimizer_time_s(machine, job, own, own)
            for column, batch in enumerate(batches):
                cells.append(
                    ShardedTime(
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


def other_cells(
    machine: Machine, job: Job, seq_lengths: tuple[int, ...], batches: Sequence[int]
) -> list[OtherTime]:
    """Return embedding, final norm, head and loss, undivided, forward and backward."""
    b = np.array(batches, dtype=np.float64)
    # every layer type has tokens to look up; the head follows the last
    first = embedding_times(machine, job, b * sum(seq_lengths))
    last = head_times(machine, job, b * seq_lengths[-1])
    forward, backward = _seconds((*first, *last), b)
    return [
        OtherTime(batch=batch, seq_lengths=seq_lengths, forward_s=float(f), backward_s=float(g))
        for batch, f, g in zip(batches, forward, backward, strict=True)
    ]


def without_host(model: ModelProfile, spec: ModelSpec, hiding: Hiding) -> ModelProfile:
    """Return an estimated profile with the times of devices alone: host code is taken out of them.

    The inverse of what `layer_cells` puts together, for whoever prices layers with what they send,
    under which hosts work too.
    """
    layers = []
    for kind, layer in zip(spec.layers, model.layers, strict=True):
        experts = hiding.host_experts_s / 2.0 if kind.num_experts is not None else 0.0
        ahead, back = (experts + s for s in (hiding.host_forward_s, hiding.host_backward_s))
        cells = []
        for cell in layer.sharded_times:
            calls = host_calls(cell.kind) if cell.degree > 1 else Calls(0, 0)
            forward_s = ahead + calls.forward * hiding.host_collective_s
            backward_s = back + calls.backward * hiding.host_collective_s
            cells.append(
                replace(
                    cell,
                    forward_s=_alone_s(cell.forward_s, forward_s),
                    backward_s=cell.backward_s and _alone_s(cell.backward_s, backward_s),
                    recompute_s=cell.recompute_s and _alone_s(cell.recompute_s, forward_s),
                )
            )
        whole = (replace(x, forward_s=_alone_s(x.forward_s, ahead)) for x in layer.times)
        layers.append(replace(layer, times=tuple(whole), sharded_times=tuple(cells)))
    return replace(model, layers=tuple(layers))


def _alone_s(both_s: float, host_s: float) -> float:
    """Return the device's share of a time that `together_s` made, in seconds."""
    # (device^p + host^p)^(1/p) of 1 and 1 is 2^(1/p)
    power = math.log(2.0) / math.log(float(together_s(1.0, 1.0)))
    # files whose times somebody changed may be shorter than the host's code; none is 0
    left = max(1.0 - (host_s / both_s) ** power, 1e-30)
    return both_s * float(left ** (1.0 / power))


def _seconds(parts: Iterable[Part], like: F64) -> tuple[F64, F64]:
    """Return forward and backward of all parts together, as large as `like`."""
    forward, backward = np.zeros_like(like), np.zeros_like(like)
    for part in parts:
        forward += part.forward_s
        backward += part.input_s + part.weight_s
    return forward, backward


def _with_host(machine: Machine, device_s: F64, calls: int, block: Block, side: str) -> F64:
    """Return the time of a layer whose kernels a host launches: nearly the longer of the two."""
    host = machine.stack.figures.host
    seconds = host[side] + calls * host["collective_s"]
    if isinstance(block.mlp, Experts):
        # half of it in each direction
        seconds += host["experts_s"] / 2.0
    return np.asarray(together_s(device_s, seconds))
