"""Data-parallel communication of gradients and weights, and its overlap.

Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from search.closed_form.calculon.documents import Execution
from tests.oracles.calculon.block import Block, Machine
from tests.oracles.calculon.passes import Passes
from tests.oracles.calculon.shape import Shape


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Reduction of one block, and the exposed communication of a whole step."""

    block_bytes: float = 0.0
    block_s: float = 0.0
    exposed_s: float = 0.0
    required_chunk_bytes_per_s: float = 0.0
    required_tail_bytes_per_s: float = 0.0
    """Bandwidth that would hide all chunks but the last, and the last."""


def data_parallel_of(
    x: Execution, shape: Shape, block: Block, passes: Passes, machine: Machine
) -> DataParallel:
    """Return the communication of the data-parallel group.

    With overlap, the block that is reduced last is exposed. The blocks of the last chunk are hidden
    by the blocks after them, those of other chunks by a chunk of every stage.
    """
    if x.data_par == 1 or not shape.training:
        return DataParallel()
    tier, size = machine.data, block.spaces.weight
    operations = ("reduce_scatter", "all_gather") if x.optimizer_sharding else ("all_reduce",)
    one_s = sum(tier.seconds(name, size, x.data_par) for name in operations)
    if not x.data_par_overlap:
        return DataParallel(block_bytes=size, block_s=one_s, exposed_s=shape.blocks * one_s)
    q = shape.quirks
    p, c, v = x.pipeline_par, shape.chunk_blocks, shape.chunks
    shares_pipeline = x.data_par_net == x.pipeline_par_net
    back_s = passes.transfers.backward_s if shares_pipeline else 0.0
    sharded = x.optimizer_sharding
    optimizer_s = 0.0 if sharded else block.optim.time_s.base - block.optim.memory_s
    whole = passes.whole_backward_s
    window = whole - passes.memory_s - block.again.memory_s + optimizer_s
    if x.data_par_net == x.tensor_par_net:
        window = window - (block.again_link.link_s + block.agrad.link_s)
    computing_s = block.agrad.flops_s + block.wgrad.flops_s + block.again.flops_s
    computing_s += 0.0 if sharded else block.optim.flops_s
    slowed_s = computing_s * tier.processor_usage

    # all chunks but the last: each is hidden by a chunk of every stage
    windows_s, chunk_s = window.chunk(c), c * one_s
    slots = shape.microbatches % p or p
    hits = min(chunk_s // whole.chunk(c), slots) if shares_pipeline else 0
    over_s = chunk_s - (p * windows_s - hits * passes.transfers.backward_s) + p * c * slowed_s
    exposed_s = one_s + (v - 1) * (over_s if over_s > 0 else chunk_s * tier.processor_usage)
    room_chunks_s = (v - 1) * (p * windows_s + p * c * slowed_s - back_s)

    # the last chunk: hidden by the blocks that follow
    hidden_s = (c - 1) * one_s
    if q.tail_windows:
        both = (whole.base + whole.edge) / 2
        tail_s = windows_s - passes.transfers.backward_s - both + optimizer_s
        tail_slowed_s = slowed_s
    else:
        tail_s = (c - 2) * window.base + window.edge - back_s
        tail_slowed_s = (c - 1) * slowed_s
    tail_s = tail_s if c > 1 else 0.0
    over_s = hidden_s + tail_slowed_s - tail_s
    exposed_s += over_s if over_s > 0 else hidden_s * tier.processor_usage
    room_tail_s = tail_s + hidden_s * tier.processor_usage

    traffic = size * sum(
        tier.collectives[name].scalar
        if q.overlap_requirements
        else tier.collectives[name].traffic_bytes(1.0, x.data_par)
        for name in operations
    )
    chunks, blocks = (1, c) if q.overlap_requirements else (v - 1, c - 1)
    return DataParallel(
        block_bytes=size,
        block_s=one_s,
        exposed_s=exposed_s,
        required_chunk_bytes_per_s=(
            chunks * c * traffic / room_chunks_s if room_chunks_s > 0 else 0.0
        ),
        required_tail_bytes_per_s=blocks * traffic / room_tail_s if room_tail_s > 0 else 0.0,
    )
