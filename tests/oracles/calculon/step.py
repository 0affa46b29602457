"""One training step on the first stage: the 96 statistics of an execution.

Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

import math
from typing import Any

from search.closed_form.calculon.documents import Execution
from tests.oracles.calculon.block import Block, Machine, Pair, Work
from tests.oracles.calculon.data_parallel import data_parallel_of
from tests.oracles.calculon.memory import Memory, memory_of
from tests.oracles.calculon.passes import Passes, passes_of
from tests.oracles.calculon.shape import Shape
from tests.oracles.calculon.vocab import Vocab


def step_statistics(
    x: Execution, shape: Shape, block: Block, machine: Machine, vocab: Vocab
) -> dict[str, Any]:
    """Return the statistics by name, in seconds, bytes and FLOP.

    With a vocabulary, `embedding_time`, `head_time` and `outer_space` (the larger of the first and
    the last stage) follow the 96.
    """
    passes = passes_of(x, shape, block, machine)
    memory = memory_of(x, shape, block, vocab)
    data = data_parallel_of(x, shape, block, passes, machine)
    times = _times(x, shape, block, passes, vocab, memory.tables) | {
        "dp_comm_link_time": shape.blocks * data.block_s,
        "dp_comm_exposed_time": data.exposed_s,
    }
    around = {name: times.pop(name) for name in ("embedding_time", "head_time")}
    total_s = sum(times[name] for name in _PARTS) + sum(around.values())
    statistics = {
        **_block_statistics(shape, block),
        "block_fw_pp_size": passes.transfers.forward_bytes,
        "block_bw_pp_size": passes.transfers.backward_bytes,
        "block_dp_size": data.block_bytes,
        "tp_bw_overlap_req": block.required_bytes_per_s,
        "dp_bw_overlap_req_chunk": data.required_chunk_bytes_per_s,
        "dp_bw_overlap_req_tail": data.required_tail_bytes_per_s,
        **_spaces(shape, block, memory),
        **{name: times[name] for name in _TIMES},
        "total_time": total_s,
        **_requirements(shape, block, passes),
        "proc_mem_tier1_cap_req": memory.first,
        "proc_mem_tier2_cap_req": memory.second,
        **_efficiencies(shape, block, machine, total_s),
        "sample_rate": x.batch_size / total_s,
    }
    return statistics | (around | {"outer_space": memory.vocab} if shape.vocab else {})


_TIMES = (
    "fw_time",
    "bw_time",
    "optim_step_time",
    "recompute_time",
    "recomm_link_time",
    "recomm_exposed_time",
    "bubble_time",
    "tp_comm_link_time",
    "pp_comm_link_time",
    "dp_comm_link_time",
    "tp_comm_exposed_time",
    "pp_comm_exposed_time",
    "dp_comm_exposed_time",
    "fw_offload_exposed_time",
    "bw_offload_exposed_time",
)
_PARTS = tuple(name for name in _TIMES if not name.endswith("_link_time"))
"""Terms whose sum is the step time."""


def _times(
    x: Execution, shape: Shape, block: Block, passes: Passes, vocab: Vocab, tables: int
) -> dict[str, float]:
    c, steps = shape.chunk_blocks, shape.microbatches * shape.chunks

    def total(*pairs: Pair) -> float:
        return steps * sum(pair.chunk(c) for pair in pairs)

    transfer_s = passes.transfers.forward_s
    transfer_s += passes.transfers.backward_s if shape.training else 0.0
    pipeline_s = 0.0 if x.pipeline_par == 1 else steps * transfer_s
    # the outermost stages are the slowest, so every microbatch waits for their extra work
    embedding_s = shape.microbatches * vocab.embedding_s
    head_s = shape.microbatches * vocab.head_s
    if x.pipeline_par > 1:  # both stages wait for the slower of the two
        embedding_s, head_s = (embedding_s, 0.0) if embedding_s > head_s else (0.0, head_s)
    optimizer_s = shape.blocks * block.optim.time_s.base + tables * vocab.optimizer_s
    return {
        "fw_time": total(block.fw.time_s),
        "bw_time": total(block.agrad.time_s, block.wgrad.time_s),
        "optim_step_time": optimizer_s,
        "recompute_time": total(block.again.time_s),
        "recomm_link_time": total(block.again_link.link_s),
        "recomm_exposed_time": total(block.again_link.exposed_s),
        "bubble_time": _bubble_s(x, shape, passes),
        "tp_comm_link_time": total(block.fw.link_s, block.agrad.link_s),
        "pp_comm_link_time": pipeline_s,
        "tp_comm_exposed_time": total(block.fw.exposed_s, block.agrad.exposed_s),
        "pp_comm_exposed_time": pipeline_s,
        "fw_offload_exposed_time": total(passes.offload_forward_s),
        "bw_offload_exposed_time": total(passes.offload_backward_s) if shape.training else 0.0,
        "embedding_time": embedding_s,
        "head_time": head_s,
    }


def _bubble_s(x: Execution, shape: Shape, passes: Passes) -> float:
    """Return the seconds that the first stage waits for the others, which may have fewer blocks."""
    p, m, v, c = x.pipeline_par, shape.microbatches, shape.chunks, shape.chunk_blocks
    both = passes.whole_forward_s + passes.whole_backward_s
    extra = (v - 1) * (p - m % p) if m % p else 0
    block_s = (both.base + both.edge) / 2 if c > 1 else both.edge
    return (p - 1 + extra) * both.chunk(c) - shape.missing_blocks * block_s


def _block_statistics(shape: Shape, block: Block) -> dict[str, float]:
    side = "base" if shape.chunk_blocks > 1 else "edge"

    def work(name: str, one: Work) -> dict[str, float]:
        return {
            f"block_{name}_flops": one.flops,
            f"block_{name}_flops_time": one.flops_s,
            f"block_{name}_mem_accessed": one.bytes,
            f"block_{name}_mem_time": one.memory_s,
            f"block_{name}_time": getattr(one.time_s, side),
        }

    def pair(name: str, one: Pair) -> dict[str, float]:
        return {f"baseblock_{name}": one.base, f"edgeblock_{name}": one.edge}

    def links(name: str, one: Work) -> dict[str, float]:
        return pair(f"{name}_time", one.link_s) | pair(f"{name}_time_exposed", one.exposed_s)

    return {
        **work("fw", block.fw),
        **links("fw_tp", block.fw),
        **work("re", block.again),
        **links("recomm", block.again_link),
        **work("agrad", block.agrad),
        **links("agrad_tp", block.agrad),
        **work("wgrad", block.wgrad),
        **work("optim", block.optim),
        **pair("fw_tp_size", block.fw.link_bytes),
        **pair("bw_tp_size", block.agrad.link_bytes),
        **pair("recomm_size", block.again_link.link_bytes),
    }


def _spaces(shape: Shape, block: Block, memory: Memory) -> dict[str, float | None]:
    s = block.spaces
    nothing = None if shape.quirks.no_checkpoint_figure else 0.0
    return {
        "block_weight_space": s.weight,
        "block_act_working_space": s.working,
        "block_act_storage_space": s.stored,
        "block_act_checkpoint_size": memory.checkpoint,
        "block_weight_grad_space": s.weight_gradient,
        "block_weight_grad_space_no_sharding": s.whole_weight_gradient,
        "block_act_grad_space": s.activation_gradient,
        "block_optimizer_space": s.optimizer,
        "weight_space_with_offload": 2 * s.weight,
        "act_space_with_offload": memory.smallest_activations,
        "act_checkpoint_size_with_offload": 2 * memory.checkpoint if shape.training else nothing,
        "act_grad_space_with_offload": s.activation_gradient,
        "weight_grad_space_with_offload": s.whole_weight_gradient + s.weight_gradient,
        "optimizer_space_with_offload": 2 * s.optimizer,
        "weight_space": memory.weights,
        "act_space": memory.activations,
        "act_checkpoint_size": memory.checkpoints,
        "act_grad_space": s.activation_gradient,
        "weight_grad_space": memory.weight_gradients,
        "optimizer_space": memory.optimizer,
    }


def _requirements(shape: Shape, block: Block, passes: Passes) -> dict[str, float]:
    """Return the bandwidths of the second memory that would hide the offload."""
    s, o = block.spaces, passes.offload
    only_edge = shape.chunk_blocks == 1 and not shape.quirks.latency_without_neighbour

    def window(one: Pair, memory_s: float) -> float:
        return (one.edge if only_edge else min(one.base, one.edge)) - memory_s

    forward_s = window(passes.forward_s, block.fw.memory_s)
    backward_s = window(passes.backward_s, passes.memory_s)
    moving = _ratio(o.forward_bytes, forward_s)
    if shape.training:
        moving = max(moving, _ratio(o.backward_bytes, backward_s))
    return {
        "act_offload_bw_req": _ratio(o.stored_bytes, forward_s),
        "weight_offload_bw_req": _ratio(s.weight, forward_s),
        "optim_offload_bw_req": (
            _ratio(s.weight_gradient + s.optimizer, backward_s) if shape.training else 0.0
        ),
        "offload_mem_bw_req": moving,
    }


def _efficiencies(shape: Shape, block: Block, machine: Machine, total_s: float) -> dict[str, float]:
    k, m, c = shape.blocks, shape.microbatches, shape.chunk_blocks
    steps = m * shape.chunks
    passes = block.fw.flops + block.agrad.flops + block.wgrad.flops
    useful = passes + block.optim.flops
    whole = (
        k * m * useful
        if shape.quirks.optimizer_per_microbatch
        else (k * (m * passes + block.optim.flops))
    )
    ideal_s = whole / machine.matrix.peak_per_s
    works = (block.fw.time_s, block.agrad.time_s, block.wgrad.time_s)
    busy_s = steps * sum(work.chunk(c) for work in works) + k * block.optim.time_s.base
    return {
        "useful_flops": useful,
        "compute_efficiency": ideal_s / busy_s,
        "system_efficiency": busy_s / total_s,
        "total_efficiency": ideal_s / total_s,
    }


def _ratio(amount: float, window: float) -> float:
    """Return the amount per second that a window must hide; an empty window hides nothing."""
    if window == 0.0:
        return math.inf if amount > 0.0 else 0.0
    return amount / window
