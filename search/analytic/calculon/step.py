"""One training step on the first stage: the 96 statistics of an execution.

Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

import math
from typing import Any

from search.analytic.calculon.block import Block, Machine, Pair
from search.analytic.calculon.documents import Execution
from search.analytic.calculon.outer import Outer
from search.analytic.calculon.shape import Shape

__all__ = ["step_statistics"]


def step_statistics(
    x: Execution, shape: Shape, block: Block, machine: Machine, outer: Outer
) -> dict[str, Any]:
    """Return the statistics by name, in seconds, bytes and FLOP.

    With a vocabulary, `embedding_time`, `head_time` and `outer_space` (the larger of the first and
    the last stage) follow the 96.
    """
    q = shape.quirks
    s = block.spaces
    p, t = x.pipeline_par, x.tensor_par
    k, c, v, m = shape.blocks, shape.chunk_blocks, shape.chunks, shape.microbatches
    training, full = shape.training, shape.recompute_all
    whole = shape.elements * shape.element_bytes
    fw, agrad, wgrad, optim, again, relink = (
        block.fw,
        block.agrad,
        block.wgrad,
        block.optim,
        block.again,
        block.again_link,
    )

    def per_chunk(pair: Pair) -> float:
        return (c - 1) * pair.base + pair.edge

    checkpoint = float(whole) if training and full else 0.0
    if shape.rs and not q.checkpoint_unsharded:
        checkpoint /= t
    plain_ar = not shape.rs and not shape.rs_at_edges
    pp_fw = 0.0 if p == 1 else (whole if plain_ar else whole / t)
    pp_bw = pp_fw if training else 0.0
    pf = machine.pipeline.seconds("p2p", pp_fw, 2)
    pb = machine.pipeline.seconds("p2p", pp_bw, 2)
    if not q.latency_without_neighbour:
        pf = pf if p > 1 else 0.0
        pb = pb if p > 1 and training else 0.0

    stored = checkpoint if full else s.stored
    off_fw = max(s.weight if x.weight_offload else 0.0, stored if x.activations_offload else 0.0)
    off_bw = 0.0
    if training:
        inward = (s.weight if x.weight_offload else 0.0) + (
            stored if x.activations_offload else 0.0
        )
        if q.offload_sums:
            off_bw = inward + (s.optimizer if x.optimizer_offload else 0.0)
        else:
            moved = s.weight_gradient + s.optimizer if x.optimizer_offload else 0.0
            off_bw = max(inward + moved, moved)

    fw0, bw0, fw_s, bw_s, exposed_fw, exposed_bw = {}, {}, {}, {}, {}, {}
    bm_s = agrad.memory_s + wgrad.memory_s
    for j in ("base", "edge"):
        edge = j == "edge"
        fw0[j] = getattr(fw.time_s, j) + getattr(fw.exposed_s, j) + pf * edge
        bw0[j] = (
            getattr(again.time_s, j)
            + getattr(relink.exposed_s, j)
            + getattr(agrad.time_s, j)
            + getattr(wgrad.time_s, j)
            + getattr(agrad.exposed_s, j)
            + pb * edge
        )
        exposed_fw[j] = max(0.0, machine.second_memory.seconds(off_fw) + fw.memory_s - fw0[j])
        exposed_bw[j] = max(0.0, machine.second_memory.seconds(off_bw) + bm_s - bw0[j])
        fw_s[j] = fw0[j] + exposed_fw[j]
        bw_s[j] = bw0[j] + exposed_bw[j]
    chunk_bw = (c - 1) * bw_s["base"] + bw_s["edge"]
    chunk = (c - 1) * fw_s["base"] + fw_s["edge"] + chunk_bw
    cut = shape.missing_blocks * (
        (fw_s["base"] + fw_s["edge"] + bw_s["base"] + bw_s["edge"]) / 2
        if c > 1
        else fw_s["edge"] + bw_s["edge"]
    )
    extra = (v - 1) * (p - m % p) if m % p else 0
    bubble = (p - 1 + extra) * chunk - cut

    # data parallelism
    d = x.data_par
    dp = s.weight if d > 1 and training else 0.0
    operations = ("reduce_scatter", "all_gather") if x.optimizer_sharding else ("all_reduce",)
    bd = sum(machine.data.seconds(o, dp, d) for o in operations) if dp else 0.0
    scalar = sum(
        machine.data.collectives[o].scalar
        if q.overlap_requirements
        else machine.data.collectives[o].traffic_bytes(1.0, d)
        for o in operations
    )
    same_np, same_nt = x.data_par_net == x.pipeline_par_net, x.data_par_net == x.tensor_par_net
    usage = machine.data.processor_usage
    overlap = x.data_par_overlap and dp > 0
    optimizer_s = 0.0 if x.optimizer_sharding else optim.time_s.base - optim.memory_s
    window = {
        j: bw_s[j]
        - bm_s
        - again.memory_s
        + optimizer_s
        - (getattr(relink.link_s, j) + getattr(agrad.link_s, j) if same_nt else 0.0)
        for j in ("base", "edge")
    }
    computing = agrad.flops_s + wgrad.flops_s + again.flops_s
    computing += 0.0 if x.optimizer_sharding else optim.flops_s
    windows = (c - 1) * window["base"] + window["edge"]
    hits = min(c * bd // chunk_bw, m % p or p) if same_np and overlap else 0
    inflated = c * bd - (p * windows - hits * pb) + p * c * computing * usage
    exposed_chunks = (v - 1) * (inflated if inflated > 0 else c * bd * usage)
    if q.tail_windows:
        tail = windows - pb - (bw_s["base"] + bw_s["edge"]) / 2 + optimizer_s if c > 1 else 0.0
        slowed = computing * usage
    else:
        tail = (c - 2) * window["base"] + window["edge"] - (pb if same_np else 0.0)
        tail = tail if c > 1 else 0.0
        slowed = (c - 1) * computing * usage
    inflated_tail = (c - 1) * bd + slowed - tail
    exposed_tail = inflated_tail if inflated_tail > 0 else (c - 1) * bd * usage
    room_chunks = (v - 1) * (p * windows + p * c * computing * usage - (pb if same_np else 0.0))
    room_tail = tail + (c - 1) * bd * usage
    required_chunk = required_tail = 0.0
    if overlap and room_chunks > 0:
        required_chunk = c * dp * scalar / room_chunks
        required_chunk *= 1 if q.overlap_requirements else v - 1
    if overlap and room_tail > 0:
        required_tail = (c if q.overlap_requirements else c - 1) * dp * scalar / room_tail
    dp_exposed = bd + exposed_chunks + exposed_tail if overlap else k * bd

    # memory
    live = min(m, p) * (1 + (p - 1) / (v * p) if v > 1 else 1)
    act = s.working + s.stored * (k * live - 1) if training and not full else s.working
    checkpoints = k * checkpoint * live
    gradients = s.whole_weight_gradient + s.weight_gradient * (k - 1) if training else 0.0
    act_min = s.working if full else s.working + s.stored
    tier1 = (
        (2 * s.weight if x.weight_offload else k * s.weight)
        + (act_min + 2 * checkpoint if x.activations_offload else act + checkpoints)
        + (
            s.whole_weight_gradient + s.weight_gradient + 2 * s.optimizer
            if x.optimizer_offload
            else gradients + k * s.optimizer
        )
        + s.activation_gradient
    )
    tier2 = (
        (k * s.weight if x.weight_offload else 0.0)
        + ((checkpoints if full else act) if x.activations_offload else 0.0)
        + (k * s.weight_gradient + k * s.optimizer if x.optimizer_offload else 0.0)
    )
    ends = ("edge",) if c == 1 and not q.latency_without_neighbour else ("base", "edge")
    fw_window = min(fw0[j] for j in ends) - fw.memory_s
    bw_window = min(bw0[j] for j in ends) - bm_s

    useful_block = fw.flops + agrad.flops + wgrad.flops
    useful = useful_block + optim.flops
    if q.optimizer_per_microbatch:
        ideal = k * m * useful / machine.matrix.peak_per_s
    else:
        ideal = k * (m * useful_block + optim.flops) / machine.matrix.peak_per_s
    steps = m * v

    def total(*pairs: Pair) -> float:
        return steps * sum(per_chunk(pair) for pair in pairs)

    fw_time = total(fw.time_s)
    bw_time = total(agrad.time_s, wgrad.time_s)
    optim_time = k * optim.time_s.base
    busy = fw_time + bw_time + optim_time
    pp_time = 0.0 if p == 1 else steps * (pf + (pb if training else 0.0))
    stats: dict[str, Any] = {}

    def work(name: str, w: Any) -> None:
        stats[f"block_{name}_flops"] = w.flops
        stats[f"block_{name}_flops_time"] = w.flops_s
        stats[f"block_{name}_mem_accessed"] = w.bytes
        stats[f"block_{name}_mem_time"] = w.memory_s
        stats[f"block_{name}_time"] = w.time_s.base if c > 1 else w.time_s.edge

    def pairs(name: str, *figures: tuple[str, Pair]) -> None:
        for suffix, pair in figures:
            for j in ("base", "edge"):
                stats[f"{j}block_{name}_{suffix}"] = getattr(pair, j)

    work("fw", fw)
    pairs("fw_tp", ("time", fw.link_s), ("time_exposed", fw.exposed_s))
    work("re", again)
    pairs("recomm", ("time", relink.link_s), ("time_exposed", relink.exposed_s))
    work("agrad", agrad)
    pairs("agrad_tp", ("time", agrad.link_s), ("time_exposed", agrad.exposed_s))
    work("wgrad", wgrad)
    work("optim", optim)
    pairs("fw_tp", ("size", fw.link_bytes))
    pairs("bw_tp", ("size", agrad.link_bytes))
    pairs("recomm", ("size", relink.link_bytes))
    exposed_fw_s = steps * per_chunk(Pair(**exposed_fw))
    exposed_bw_s = steps * per_chunk(Pair(**exposed_bw)) if training else 0.0
    recomm_exposed = total(relink.exposed_s)
    tp_exposed = total(fw.exposed_s, agrad.exposed_s)
    recompute = total(again.time_s)
    total_s = (
        fw_time + bw_time + optim_time + exposed_fw_s + exposed_bw_s + recompute
        + recomm_exposed + bubble + tp_exposed + pp_time + dp_exposed
    )  # fmt: skip
    # the outermost stages are the slowest, so every microbatch waits for their extra work
    one_stage = p == 1
    tables = 1 if one_stage and shape.tied else (2 if one_stage else 1)
    embedding_time = m * outer.embedding_s
    head_time = m * outer.head_s
    if not one_stage:  # both stages wait for the slower of the two
        embedding_time, head_time = (
            (embedding_time, 0.0) if embedding_time > head_time else (0.0, head_time)
        )
    optim_time += tables * outer.optimizer_s
    total_s += embedding_time + head_time + tables * outer.optimizer_s
    outer_space = tables * outer.table_bytes + outer.logits_bytes
    tier1 += outer_space
    empty = None if q.no_checkpoint_figure else 0.0
    stats |= {
        "block_fw_pp_size": pp_fw,
        "block_bw_pp_size": pp_bw,
        "block_dp_size": dp,
        "tp_bw_overlap_req": block.required_bytes_per_s,
        "dp_bw_overlap_req_chunk": required_chunk,
        "dp_bw_overlap_req_tail": required_tail,
        "block_weight_space": s.weight,
        "block_act_working_space": s.working,
        "block_act_storage_space": s.stored,
        "block_act_checkpoint_size": checkpoint,
        "block_weight_grad_space": s.weight_gradient,
        "block_weight_grad_space_no_sharding": s.whole_weight_gradient,
        "block_act_grad_space": s.activation_gradient,
        "block_optimizer_space": s.optimizer,
        "weight_space_with_offload": 2 * s.weight,
        "act_space_with_offload": act_min,
        "act_checkpoint_size_with_offload": 2 * checkpoint if training else empty,
        "act_grad_space_with_offload": s.activation_gradient,
        "weight_grad_space_with_offload": s.whole_weight_gradient + s.weight_gradient,
        "optimizer_space_with_offload": 2 * s.optimizer,
        "weight_space": k * s.weight,
        "act_space": act,
        "act_checkpoint_size": checkpoints,
        "act_grad_space": s.activation_gradient,
        "weight_grad_space": gradients,
        "optimizer_space": k * s.optimizer,
        "fw_time": fw_time,
        "bw_time": bw_time,
        "optim_step_time": optim_time,
        "recompute_time": recompute,
        "recomm_link_time": total(relink.link_s),
        "recomm_exposed_time": recomm_exposed,
        "bubble_time": bubble,
        "tp_comm_link_time": total(fw.link_s, agrad.link_s),
        "pp_comm_link_time": pp_time,
        "dp_comm_link_time": k * bd,
        "tp_comm_exposed_time": tp_exposed,
        "pp_comm_exposed_time": pp_time,
        "dp_comm_exposed_time": dp_exposed,
        "fw_offload_exposed_time": exposed_fw_s,
        "bw_offload_exposed_time": exposed_bw_s,
        "total_time": total_s,
        "act_offload_bw_req": _ratio(stored, fw_window),
        "weight_offload_bw_req": _ratio(s.weight, fw_window),
        "optim_offload_bw_req": (
            _ratio(s.weight_gradient + s.optimizer, bw_window) if training else 0.0
        ),
        "offload_mem_bw_req": (
            max(_ratio(off_fw, fw_window), _ratio(off_bw, bw_window))
            if training
            else _ratio(off_fw, fw_window)
        ),
        "proc_mem_tier1_cap_req": tier1,
        "proc_mem_tier2_cap_req": tier2,
        "useful_flops": useful,
        "compute_efficiency": ideal / busy,
        "system_efficiency": busy / total_s,
        "total_efficiency": ideal / total_s,
        "sample_rate": x.batch_size / total_s,
    }
    if shape.vocab:
        stats |= {
            "embedding_time": embedding_time,
            "head_time": head_time,
            "outer_space": outer_space,
        }
    return stats


def _ratio(amount: float, window: float) -> float:
    """Return what a window must hide per second; one that nothing is left of hides nothing."""
    if window == 0.0:
        return math.inf if amount > 0.0 else 0.0
    return amount / window
