"""Forward and backward of a base and an edge block, with transfers and offload around them.

Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from search.closed_form.calculon.documents import Execution
from tests.oracles.calculon.block import Block, Machine, Pair
from tests.oracles.calculon.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfers of one micro-batch: activations to the next stage, gradient to the previous one."""

    forward_bytes: float
    backward_bytes: float
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Bytes of one block that move between the memories while it runs."""

    stored_bytes: float
    """Bytes of activations or checkpoints from forward to backward, offloaded or not."""
    forward_bytes: float
    backward_bytes: float


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Times of one block."""

    transfers: Transfers
    offload: Offload
    memory_s: float
    """Seconds of gradient traffic, which competes with offload."""
    forward_s: Pair
    backward_s: Pair
    """Seconds with communication, without offload."""
    offload_forward_s: Pair
    offload_backward_s: Pair
    """Exposed seconds of offload."""

    @property
    def whole_forward_s(self) -> Pair:
        """Return the seconds of the forward with exposed offload."""
        return self.forward_s + self.offload_forward_s

    @property
    def whole_backward_s(self) -> Pair:
        """Return the seconds of the backward with exposed offload."""
        return self.backward_s + self.offload_backward_s


def passes_of(x: Execution, shape: Shape, block: Block, machine: Machine) -> Passes:
    """Return forward and backward of one block on the first stage."""
    transfers = _transfers(x, shape, machine)
    offload = offload_of(x, shape, block)
    memory_s = block.agrad.memory_s + block.wgrad.memory_s
    forward = block.fw.time_s + block.fw.exposed_s + Pair(edge=transfers.forward_s)
    backward = (
        block.again.time_s
        + block.again_link.exposed_s
        + block.agrad.time_s
        + block.wgrad.time_s
        + block.agrad.exposed_s
        + Pair(edge=transfers.backward_s)
    )
    second = machine.second_memory

    def exposed(moved: float, memory: float, hidden: Pair) -> Pair:
        least = second.seconds(moved) + memory
        return (Pair(base=least, edge=least) - hidden).positive()

    return Passes(
        transfers=transfers,
        offload=offload,
        memory_s=memory_s,
        forward_s=forward,
        backward_s=backward,
        offload_forward_s=exposed(offload.forward_bytes, block.fw.memory_s, forward),
        offload_backward_s=exposed(offload.backward_bytes, memory_s, backward),
    )


def checkpoint_bytes(shape: Shape) -> float:
    """Return the saved bytes of a recomputed block: its input."""
    if not (shape.training and shape.recompute_all):
        return 0.0
    whole = float(shape.elements * shape.element_bytes)
    sharded = shape.rs and not shape.quirks.checkpoint_unsharded
    return whole / shape.tensor if sharded else whole


def offload_of(x: Execution, shape: Shape, block: Block) -> Offload:
    """Return the bytes that one block moves, in the busier direction of the link."""
    s = block.spaces
    stored = checkpoint_bytes(shape) if shape.recompute_all else s.stored
    weights = s.weight if x.weight_offload else 0.0
    activations = stored if x.activations_offload else 0.0
    states = s.optimizer if x.optimizer_offload else 0.0
    gradients = s.weight_gradient if x.optimizer_offload else 0.0
    backward = 0.0
    if shape.training and shape.quirks.offload_sums:
        backward = weights + activations + states
    elif shape.training:
        # in: reads of backward and optimizer; out: their results
        backward = max(weights + activations + states, weights + gradients + states)
    return Offload(
        stored_bytes=stored, forward_bytes=max(weights, activations), backward_bytes=backward
    )


def _transfers(x: Execution, shape: Shape, machine: Machine) -> Transfers:
    forward_bytes = 0.0
    if x.pipeline_par > 1:
        forward_bytes = float(shape.elements * shape.element_bytes)
        if shape.rs or shape.rs_at_edges:
            forward_bytes /= shape.tensor
    backward_bytes = forward_bytes if shape.training else 0.0
    alone = x.pipeline_par == 1
    latency = shape.quirks.latency_without_neighbour
    return Transfers(
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        forward_s=_transfer_s(machine, forward_bytes, none=alone and not latency),
        backward_s=_transfer_s(
            machine, backward_bytes, none=(alone or not shape.training) and not latency
        ),
    )


def _transfer_s(machine: Machine, size: float, *, none: bool) -> float:
    return 0.0 if none else machine.pipeline.seconds("p2p", size, 2)
