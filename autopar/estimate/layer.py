"""Device and transfer times of one layer, of embedding and head, and of the optimizer.

A layer is a list of *parts*: the kernels of one operation with their forward, input-gradient and
weight-gradient seconds, named by the module they belong to, so that recomputation can take any of
them again. Beside them stands what it sends. Which part waits for which, and how layers make a
step, is `autopar.estimate.step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError
from autopar.estimate.card import Card
from autopar.estimate.collectives import (
    GroupShape,
    SiteFactors,
    collective_time_s,
    moe_exchange_time_s,
    p2p_time_s,
)
from autopar.estimate.job import (
    Attention,
    Block,
    Experts,
    Job,
    Mamba,
    Mlp,
    attention_matrices,
    mamba_inputs,
    parameters,
)
from autopar.estimate.kernel_constants import ELEMENT_BYTES, Kernels, kernels_of
from autopar.estimate.kernels import (
    LinearTimes,
    Phase,
    attention_s,
    grouped_linear_s,
    linear_s,
    ring_attention_s,
    unfused_attention_s,
)
from autopar.estimate.memory_bound import (
    cast_s,
    cross_entropy_s,
    elements_s,
    embedding_s,
    optimizer_s,
    permute_s,
)
from autopar.estimate.site import Site
from autopar.estimate.stack import Stack
from autopar.records import dataclass

__all__ = [
    "Kind",
    "LayerTimes",
    "Machine",
    "Part",
    "Sends",
    "Split",
    "embedding_times",
    "group",
    "head_sends_s",
    "head_times",
    "layer_parts",
    "layer_times",
    "machine_of",
    "optimizer_time_s",
    "split_of",
    "transfer_s",
]

Kind = Literal["gemm", "attention", "memory", "cast"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device, its network, and the software of a trainer on it."""

    card: Card
    kernels: Kernels
    """At the site's HBM rate."""
    clock: float
    """Rate that a run sustains over that of a short benchmark."""
    factors: SiteFactors
    stack: Stack
    domain_gpus: int


def machine_of(card: Card, stack: Stack, site: Site | None = None) -> Machine:
    """Return a machine of a card's devices; what a site knows replaces the card's figures.

    Raises DocumentError where the card has no times of kernels, or the site is of another card.
    """
    kernels = kernels_of(card)
    clock, factors = kernels.clock, SiteFactors()
    if site is not None:
        site.require_card(card)
        factors = site.factors
        clock = kernels.clock if site.clock is None else site.clock
        card = replace(card, network=site.network(card.network))
        if site.elementwise_share is not None:
            # shares of all classes move together: they are of one memory
            scale = site.elementwise_share / kernels.memory_share("elementwise")
            kernels = replace(kernels, memory_bytes_per_s=kernels.memory_bytes_per_s * scale)
    return Machine(
        card=card,
        kernels=kernels,
        clock=clock,
        factors=factors,
        stack=stack,
        # a domain of its own size only where a switch joins nodes
        domain_gpus=card.domain_gpus or card.max_gpus_per_node,
    )


def group(machine: Machine, ranks: int, stride: int) -> GroupShape:
    """Return the shape of groups of `ranks` GPUs `stride` apart, tensor ranks innermost."""
    return GroupShape.even(ranks=ranks, per_node=max(1, machine.domain_gpus // stride))


Real = float | F64
"""A size or a time, or those of many ranks and batches at once."""


class Split(NamedTuple):
    """How a micro-batch and a layer's widths lie on one rank; numbers, or arrays that broadcast."""

    sequences: Real
    """Of the micro-batch."""
    tokens: Real
    """Of linear layers."""
    outside: Real
    """Of norms and residual sums."""
    routed: Real
    """Of the routing to experts."""
    tensor: Real
    """Ranks that share the widths of linear layers."""
    expert_tensor: Real
    """Ranks that share the widths of experts."""
    heads: Real
    """Ranks that share the heads of attention."""


def split_of(job: Job) -> Split:
    """Return how a job's micro-batch lies on a rank."""
    inner = job.tp if job.sequence_parallel else 1
    return Split(
        sequences=job.micro_batch,
        tokens=job.tokens,
        outside=job.tokens / inner,
        # tensor ranks route their own tokens to whole experts
        routed=job.tokens / job.tp,
        tensor=job.tp,
        expert_tensor=job.etp,
        heads=job.tp,
    )


class Part(NamedTuple):
    """Seconds of one operation of a layer, for one micro-batch on one rank."""

    name: str
    module: str
    kind: Kind
    forward_s: Real
    input_s: Real
    """Of the input's gradient."""
    weight_s: Real = 0.0


class Sends(NamedTuple):
    """Seconds of transfers of one layer and micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    calls: float = 0.0
    """Collectives of forward and backward together, for the host."""


class LayerTimes(NamedTuple):
    """What one layer takes of a rank for one micro-batch."""

    parts: tuple[Part, ...]
    tensor: Sends
    """Tensor and sequence parallelism, nothing hidden yet."""
    context: Sends
    """Context parallelism, what its attention does not hide."""
    experts: Sends
    """Dispatch and combine, nothing hidden yet."""
    weight_cast_s: float
    """Quantisation of the weights, once a step."""
    mixture: bool
    """Whether the layer has experts, whose routing takes host time of its own."""


def layer_times(machine: Machine, job: Job, block: Block) -> LayerTimes:
    """Return the times of one layer of a block for one micro-batch; raises InputError.

    Sizes per rank: tokens n = micro-batch seq / cp, widths over tp; norms and residuals n / tp with
    sequence parallelism.
    """
    tensor, experts, context = Sends(), Sends(), Sends()
    if block.attention is not None:
        context = _context_sends(machine, job, block.attention)
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    if block.mamba is not None:
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    if isinstance(block.mlp, Mlp):
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    elif block.mlp is not None:
        experts = _expert_sends(machine, job, block.hidden, block.mlp)
        if block.mlp.shared_width:
            tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    return LayerTimes(
        parts=tuple(layer_parts(machine, job, block, split_of(job))),
        tensor=tensor,
        context=context,
        experts=experts,
        weight_cast_s=_weights_cast(machine, job, block),
        mixture=isinstance(block.mlp, Experts),
    )


def _sum(one: Sends, other: Sends) -> Sends:
    return Sends(
        one.forward_s + other.forward_s,
        one.backward_s + other.backward_s,
        one.calls + other.calls,
    )


# --------------------------------------------------------------------------------------------------
# Parts


def layer_parts(machine: Machine, job: Job, block: Block, split: Split) -> Iterator[Part]:
    """Yield the kernels of one layer of a block, of arrays where `split` has arrays.

    Of the job only what is no size is read: precision, recomputation, kernels. Raises InputError.
    """
    if block.attention is not None:
        yield from _attention_parts(machine, job, block.hidden, block.attention, split)
    if block.cross_tokens is not None and block.attention is not None:
        keys = block.cross_tokens
        yield from _cross_parts(machine, job, block.hidden, block.attention, split, keys)
    if block.mamba is not None:
        yield from _mamba_parts(machine, job, block.hidden, block.mamba, split)
    if isinstance(block.mlp, Mlp):
        mlp = block.mlp
        yield from _mlp_parts(machine, job, block.hidden, mlp.width, mlp.gated, "mlp", split)
    elif block.mlp is not None:
        yield from _expert_parts(machine, job, block.hidden, block.mlp, split)
    for index in range(block.norms):
        elements = split.outside * block.hidden
        yield _element(machine, job, f"norm {index}", "layernorm", "norm", elements)
        yield _element(machine, job, f"residual {index}", "residual", "residual", elements)


def _element(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    operation: str,
    elements: Real,
    *,
    gated: bool = False,
) -> Part:
    """Return an operation whose bytes per element the stack counts."""
    # counted in 16 bits; twice as many in 32
    width = max(1.0, ELEMENT_BYTES[job.precision] / ELEMENT_BYTES["bf16"])
    forward, backward = (
        width * machine.stack.element_bytes(operation, backward=side, gated=gated)
        for side in (False, True)
    )
    return Part(
        name,
        module,
        "memory",
        elements_s(machine.kernels, elements, forward) if forward else 0.0,
        elements_s(machine.kernels, elements, backward) if backward else 0.0,
    )


def _linear(
    machine: Machine, job: Job, name: str, module: str, tokens: Real, outputs: Real, inputs: Real
) -> Iterator[Part]:
    """Yield a linear layer's products, its gradient's accumulation and its casts."""
    dtype = "bf16" if job.experts_only and job.precision not in ("fp16", "fp32") else job.precision
    clock = machine.kernels.product_clock(dtype, machine.clock)
    times = linear_s(
        machine.kernels,
        tokens,
        outputs,
        inputs,
        dtype=dtype,
        clock=clock,
        sustained=True,
        cast=False,
    )
    yield _product(machine, job, name, module, times, outputs * inputs, dtype)
    yield from _casts(machine, job, name, module, dtype, tokens * inputs, tokens * outputs)


def _product(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    times: LinearTimes,
    weights: Real,
    dtype: str,
) -> Part:
    forward, inner, outer = times
    if job.row_scales and ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"]:
        rate = machine.stack.figures.cast["row_scales_rate"]
        forward, inner, outer = forward / rate, inner / rate, outer / rate
    moved = _accumulation_bytes(machine, job)
    if job.frozen:
        outer = np.zeros_like(outer)
    elif moved:
        outer = outer + elements_s(machine.kernels, weights, moved, kind="optimizer")
    return Part(name, module, "gemm", forward, inner, outer)


def _accumulation_bytes(machine: Machine, job: Job) -> float:
    if job.accumulation_bytes is not None:
        return job.accumulation_bytes
    return machine.stack.figures.gradient["accumulation_bytes"]


def _casts(
    machine: Machine, job: Job, name: str, module: str, dtype: str, inputs: Real, outputs: Real
) -> Iterator[Part]:
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[dtype] >= ELEMENT_BYTES["bf16"] or not moved:
        return
    forward, backward = (
        cast_s(machine.kernels, elements, dtype=dtype, bytes_per_element=moved)
        for elements in (inputs, outputs)
    )
    yield Part(f"{name} cast", module, "cast", forward, backward)


def _weights_cast(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of quantising a layer's weights, which keep their value for a step."""
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[job.precision] >= ELEMENT_BYTES["bf16"] or not moved:
        return 0.0
    experts, dense = parameters(block)
    held = experts / (job.ep * job.etp) + (0.0 if job.experts_only else dense / job.tp)
    return float(cast_s(machine.kernels, held, dtype=job.precision, bytes_per_element=moved))


def _attention_parts(
    machine: Machine, job: Job, hidden: int, attention: Attention, split: Split
) -> Iterator[Part]:
    n, t = split.tokens, split.tensor
    latent = attention.latent
    # at least one key-value head on every rank
    key_value = attention.key_value * np.maximum(attention.kv_heads, t) / attention.kv_heads
    for index, (outputs, inputs) in enumerate(attention_matrices(hidden, attention)):
        # latents are the same on all tensor ranks, the heads behind them are split
        whole = latent is not None and index == 0
        module = "mla_up_proj" if latent is not None and index else "attention"
        share = 1 if whole else t
        more = key_value - attention.key_value if latent is None else 0.0
        width = (outputs + more) / share
        yield from _linear(machine, job, f"qkv {index}", module, n, width, inputs)
    yield from _linear(machine, job, "projection", "attention", n, hidden, attention.value / t)
    if latent is not None:
        widths = (latent.query_rank or 0) + latent.key_value_rank
        yield _element(machine, job, "latent norms", "attention", "norm", n * widths)
    heads = (attention.query + key_value) / t
    if attention.head_norms:
        keys = heads - key_value / t / 2
        yield _element(machine, job, "head norms", "attention", "norm", n * keys)
    yield _element(machine, job, "layout", "attention", "layout", n * 2 * heads)
    if attention.rotary:
        turned = (attention.query + key_value / 2) / t
        if latent is not None:
            turned = turned * (latent.rotary_width / attention.width)
        yield _element(machine, job, "rotary", "attention", "rope", n * turned)
    forward, backward = (
        _core_s(machine, job, attention, split, backward=side) for side in (False, True)
    )
    yield Part("core attention", "core_attn", "attention", forward, backward)


_LOW_PRECISION = ("cudnn-mxfp8", "cudnn-fp8")


def _kernel(machine: Machine, job: Job) -> str:
    known, card = machine.kernels.section.attention, machine.card.name
    if job.attention_kernel is not None:
        return job.attention_kernel
    if job.precision == "fp32":
        return "unfused"  # flash kernels take 16 bits and less
    if job.low_precision_attention:
        for name in _LOW_PRECISION:
            if name in known:
                return name
        raise InputError(
            f"card {card!r} has no times of attention in 8 bits ({' or '.join(_LOW_PRECISION)}); "
            "its kernels.attention has them where somebody measured"
        )
    for name in machine.stack.attention:
        if name == "unfused" or name in known:
            return name
    raise InputError(
        f"stack {machine.stack.name!r} runs attention with {', '.join(machine.stack.attention)}, "
        f"and card {card!r} has times of {', '.join(known)}; add one of these to the stack's "
        "attention"
    )


def _core_s(
    machine: Machine,
    job: Job,
    attention: Attention,
    split: Split,
    *,
    backward: bool,
    keys: int | None = None,
) -> F64:
    """Return the seconds of softmax(q k) v on a rank; `keys` are those of another sequence."""
    phase: Phase = "backward" if backward else "forward"
    kernel, heads = _kernel(machine, job), attention.heads / split.heads
    if kernel == "unfused":
        if job.cp > 1:
            raise InputError(f"attention that writes its scores has no rings: cp is {job.cp}")
        return unfused_attention_s(
            machine.kernels,
            split.sequences,
            heads,
            job.seq if keys is None else math.sqrt(job.seq * keys),
            head_dim=attention.width,
            phase=phase,
            dtype=job.precision if job.precision in ("fp16", "fp32") else "bf16",
            clock=machine.clock,
            sustained=True,
        )
    part, window = job.seq / job.cp, attention.window
    # a narrow window is as many pairs for every query, whichever rank has it
    narrow = window is not None and window < job.seq / 2
    if job.cp > 1 and attention.causal and not narrow:
        return ring_attention_s(
            machine.kernels,
            split.sequences,
            heads,
            job.seq,
            job.cp,
            kernel=kernel,
            phase=phase,
            kv_heads=np.maximum(1.0, attention.kv_heads / split.heads),
            head_dim=attention.width,
            head_dim_v=attention.value_width,
            balanced=job.ring_balanced,
            clock=machine.clock,
        )
    return attention_s(
        machine.kernels,
        split.sequences,
        heads,
        part,
        keys or (min(job.seq, part + window) if window is not None and job.cp > 1 else job.seq),
        kernel=kernel,
        phase=phase,
        kv_heads=np.maximum(1.0, attention.kv_heads / split.heads),
        head_dim=attention.width,
        head_dim_v=attention.value_width,
        causal=attention.causal and keys is None,
        window=window,
        clock=machine.clock,
    )


def _cross_parts(
    machine: Machine, job: Job, hidden: int, attention: Attention, split: Split, keys: int
) -> Iterator[Part]:
    """Yield attention to another sequence of `keys` tokens, with projections of its own."""
    n, t = split.tokens, split.tensor
    # of the other sequence a rank has as large a share as of its own
    others = n * (keys / job.seq)
    query, key_value = attention.query / t, attention.key_value / t
    yield from _linear(machine, job, "cross q", "attention", n, query, hidden)
    yield from _linear(machine, job, "cross kv", "attention", others, key_value, hidden)
    yield from _linear(
        machine, job, "cross projection", "attention", n, hidden, attention.value / t
    )
    moved = 2 * (n * query + others * key_value)
    yield _element(machine, job, "cross layout", "attention", "layout", moved)
    forward, backward = (
        _core_s(machine, job, attention, split, backward=side, keys=keys) for side in (False, True)
    )
    yield Part("cross attention", "core_attn", "attention", forward, backward)


def _mlp_parts(
    machine: Machine,
    job: Job,
    hidden: int,
    width: int,
    gated: bool,
    module: str,
    split: Split,
) -> Iterator[Part]:
    n, first = split.tokens, (2 if gated else 1) * width / split.tensor
    yield from _linear(machine, job, f"{module} up", module, n, first, hidden)
    yield from _linear(machine, job, f"{module} down", module, n, hidden, width / split.tensor)
    name = f"{module} activation"
    yield _element(machine, job, name, module, "activation", n * first, gated=gated)


_ROUTER_BYTES = 40.0
"""Per token and expert, forward and backward each: scores, their softmax, the chosen ones and the
maps of who goes where, in fp32 and int32 (counted from Megatron-Core's router)."""
_UNFUSED_PERMUTE = 2.7
"""Permutation without a fused dispatcher over one with, from published steps of mixtures."""


def _expert_parts(
    machine: Machine, job: Job, hidden: int, mlp: Experts, split: Split
) -> Iterator[Part]:
    n = split.routed
    own = n * mlp.per_token * job.skew
    # ranks that share an expert have all tokens of each other
    copies = own * job.etp
    held = mlp.number / job.ep
    rows = copies * job.ep / mlp.number
    inner, width = mlp.latent or hidden, mlp.width / split.expert_tensor
    first = (2 if mlp.gated else 1) * width
    # 128: blocks of scales; 16-bit kernels take any number of rows
    pad = 128 if ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"] else 1
    for name, outputs, inputs in (("up", first, inner), ("down", inner, width)):
        times = grouped_linear_s(
            machine.kernels,
            rows,
            held,
            outputs,
            inputs,
            dtype=job.precision,
            fused=job.fused_experts,
            clock=machine.kernels.product_clock(job.precision, machine.clock),
            sustained=True,
            pad=pad,
            cast=False,
        )
        weights = held * outputs * inputs
        yield _product(machine, job, f"experts {name}", "moe", times, weights, job.precision)
        yield from _casts(
            machine, job, f"experts {name}", "moe", job.precision, copies * inputs, copies * outputs
        )
    yield _element(
        machine,
        job,
        "experts activation",
        "moe_act",
        "activation",
        copies * first,
        gated=mlp.gated,
    )
    slow = 1.0 if job.dispatcher == "fused" else _UNFUSED_PERMUTE
    # sorted by rank, and where they were gathered again by expert: two passes of half a factor
    sorted_copies = own * (1 + job.etp) / 2
    forward, backward = (
        slow * permute_s(machine.kernels, sorted_copies, inner, backward=side)
        for side in (False, True)
    )
    yield Part("permute", "moe", "memory", forward, backward)
    plain = job if job.precision in ("fp16", "fp32") else replace(job, precision="bf16")
    yield from _linear(machine, plain, "router", "moe", n, mlp.number, hidden)
    scores = elements_s(machine.kernels, n * mlp.number, _ROUTER_BYTES, count=12)
    yield Part("routing", "moe", "memory", scores, scores)
    if mlp.latent:
        yield from _linear(machine, job, "latent down", "moe", n, mlp.latent, hidden)
        yield from _linear(machine, job, "latent up", "moe", n, hidden, mlp.latent)
    if mlp.shared_width:
        name = "shared_experts"
        yield from _mlp_parts(machine, job, hidden, mlp.shared_width, mlp.gated, name, split)


_MAMBA_CONVOLUTION = 24.0, 48.0
"""Bytes per element of a mixer's inner width of convolution, gate and scan: forward, backward."""
_MAMBA_SLOW = 6.5
"""Of a mixer's kernels over their bytes at the share of others; published steps."""
_MAMBA_RATE = 0.25
"""Of the peak, at which a scan's products run."""
_CHUNK = 256
"""Tokens that a scan takes at a time."""


def _mamba_parts(
    machine: Machine, job: Job, hidden: int, mamba: Mamba, split: Split
) -> Iterator[Part]:
    n, t = split.tokens, split.tensor
    yield from _linear(machine, job, "mixer in", "mamba", n, mamba_inputs(mamba) / t, hidden)
    yield from _linear(machine, job, "mixer out", "mamba", n, hidden, mamba.inner / t)
    inner = mamba.inner / t
    # 2 n d (2 N + c): states in and out and within a chunk of c tokens
    flop = 2 * n * inner * (2 * mamba.state + _CHUNK)
    scan = flop / (machine.kernels.flop_per_s["bf16"] * _MAMBA_RATE)
    forward, backward = (
        _MAMBA_SLOW * elements_s(machine.kernels, n * inner, moved, count=6)
        for moved in _MAMBA_CONVOLUTION
    )
    yield Part("mixer", "mamba", "memory", forward + scan, backward + 2 * scan)


# --------------------------------------------------------------------------------------------------
# Transfers


def transfer_s(
    machine: Machine, operation: str, size_bytes: float, ranks: int, stride: int
) -> float:
    """Return the seconds of a collective of groups of `ranks`, `stride` apart."""
    if ranks == 1:
        return 0.0
    shape = group(machine, ranks, stride)
    return collective_time_s(
        machine.card.network, operation, float(size_bytes), shape, machine.factors
    )


def _tensor_sends(machine: Machine, job: Job, hidden: int) -> Sends:
    """Return the collectives of one half of a layer.

    All-reduces of n h; with sequence parallelism an all-gather before and a reduce-scatter after,
    and in the backward the reverse with a second gathering for the weight gradient, of which the
    stack says how much is new (Korthikanti et al. 2022, section 4.2).
    """
    if job.tp == 1:
        return Sends()
    size = job.tokens * hidden * job.element_bytes
    if not job.sequence_parallel:
        once = transfer_s(machine, "allreduce", size, job.tp, 1)
        return Sends(once, once, 2)
    gather = transfer_s(machine, "allgather", size, job.tp, 1)
    scatter = transfer_s(machine, "reducescatter", size, job.tp, 1)
    again = machine.stack.figures.overlap["regather"]
    return Sends(gather + scatter, scatter + again * gather, 5)


_CONTEXT_FRACTION = 0.1
"""Of the shorter of attention and its ring's transfers, what the longer does not hide."""


def _context_sends(machine: Machine, job: Job, attention: Attention) -> Sends:
    """Return what a ring of keys and values adds to its attention; backward twice the bytes."""
    if job.cp == 1:
        return Sends()
    key_value = attention.key_value * max(attention.kv_heads, job.tp) / attention.kv_heads
    size = job.tokens * key_value / job.tp * job.element_bytes
    crosses = job.tp * job.cp > machine.domain_gpus
    step = p2p_time_s(machine.card.network, size, crosses=crosses, site=machine.factors)
    seconds = []
    for backward in (False, True):
        # the backward also sends the gradients of keys and values
        ring = (job.cp - 1) * step * (2 if backward else 1)
        core = float(_core_s(machine, job, attention, split_of(job), backward=backward))
        seconds.append(max(0.0, ring - core) + _CONTEXT_FRACTION * min(ring, core))
    return Sends(seconds[0], seconds[1], 3 * (job.cp - 1))


def _expert_sends(machine: Machine, job: Job, hidden: int, mlp: Experts) -> Sends:
    """Return dispatch and combine, and their gradients', which go the other way."""
    shared = _shared_expert_s(machine, job, mlp.latent or hidden, mlp)
    if job.ep == 1:
        return Sends(shared, shared, 4 if job.etp > 1 else 0)
    # expert groups are neighbours: they fold over tensor, context and data ranks, behind the ranks
    # that share an expert
    shape = group(machine, job.ep, job.etp)
    # a card's own figures are of few tokens, as in inference, and too slow for many
    network = replace(machine.card.network, exchange=None)
    dispatch, combine = (
        float(
            moe_exchange_time_s(
                network,
                direction,
                split_of(job).routed * job.skew,
                shape,
                hidden=mlp.latent or hidden,
                top_k=mlp.per_token,
                bytes_per_element=job.element_bytes,
                fused=job.dispatcher == "fused",
                site=machine.factors,
            )
        )
        for direction in ("dispatch", "combine")
    )
    once = dispatch + combine + shared
    return Sends(once, once, 12 if job.etp > 1 else 8)


def _shared_expert_s(machine: Machine, job: Job, width: int, mlp: Experts) -> float:
    """Return what ranks that share an expert gather in front of it and scatter behind it."""
    if job.etp == 1:
        return 0.0
    size = split_of(job).routed * mlp.per_token * job.skew * job.etp * width * job.element_bytes
    return sum(
        transfer_s(machine, operation, float(size), job.etp, 1)
        for operation in ("allgather", "reducescatter")
    )


# --------------------------------------------------------------------------------------------------
# Embedding, head and optimizer


def embedding_times(machine: Machine, job: Job, tokens: Real | None = None) -> tuple[Part, ...]:
    """Return looking up the tokens of a micro-batch, and adding the gradient.

    tokens : those of a rank; None for the job's.
    """
    hidden = job.blocks[0].hidden
    n = job.tokens if tokens is None else tokens
    rows = 0 if job.frozen else job.vocab / job.tp * hidden
    forward = embedding_s(machine.kernels, n, hidden)
    backward = embedding_s(
        machine.kernels,
        n,
        hidden,
        backward=True,
        local_parameters=rows,
        accumulation_bytes=_accumulation_bytes(machine, job),
    )
    return (Part("embedding", "embedding", "memory", forward, backward),)


def head_times(machine: Machine, job: Job, tokens: Real | None = None) -> tuple[Part, ...]:
    """Return final norm, head and loss of a micro-batch; `tokens` as `embedding_times`.

    The head stays in 16 bits; its columns are padded to 128 per rank.
    """
    hidden = job.blocks[-1].hidden
    n = job.tokens if tokens is None else tokens
    columns = -(-job.vocab // (128 * job.tp)) * 128
    if job.vocab % 8 and job.tp == 1:
        columns = job.vocab  # not padded by whoever has one rank: slow, and priced so
    plain = job
    if ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"]:
        plain = replace(job, precision="bf16", row_scales=False)
    parts = list(_linear(machine, plain, "head", "head", n, columns, hidden))
    forward, backward = (
        cross_entropy_s(
            machine.kernels,
            n,
            columns,
            bytes_per_logit=machine.stack.element_bytes("cross_entropy", backward=side),
        )
        for side in (False, True)
    )
    parts.append(Part("loss", "loss", "memory", forward, backward))
    elements = n * hidden / (job.tp if job.sequence_parallel else 1)
    parts.append(_element(machine, plain, "final norm", "layernorm", "norm", elements))
    return tuple(parts)


def head_sends_s(machine: Machine, job: Job) -> float:
    """Return the seconds of the collectives of a head whose columns are split."""
    if job.tp == 1:
        return 0.0
    size = job.tokens * job.blocks[-1].hidden * job.element_bytes
    # the input's gradient; the largest logit, the sum of exponentials and the label's logit
    once = transfer_s(machine, "allreduce", size, job.tp, 1)
    return once + 3 * transfer_s(machine, "allreduce", job.tokens * 4.0, job.tp, 1)


def optimizer_time_s(machine: Machine, job: Job, own: float, resident: float) -> float:
    """Return the seconds of an update of `own` parameters with `resident` gradients."""
    figures = machine.stack.figures
    gradient = job.gradient_bytes or figures.gradient["reduce_bytes"]
    return float(
        optimizer_s(
            machine.kernels,
            own,
            resident,
            bytes_per_own=job.optimizer_bytes or figures.optimizer["bytes"],
            gradient_bytes=gradient,
        )
    )
