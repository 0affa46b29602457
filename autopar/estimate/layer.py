"""Device and transfer times of one layer, of embedding and head, and of the optimizer.

A layer is a list of *parts*: the kernels of one operation with their forward, input-gradient and
weight-gradient seconds, named by the module they belong to, so that recomputation can take any of
them again. Beside them stands what it sends. Which part waits for which, and how layers make a
step, is `autopar.estimate.step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

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
from autopar.estimate.stack import Stack
from autopar.records import dataclass

__all__ = [
    "Kind",
    "LayerTimes",
    "Machine",
    "Part",
    "Sends",
    "embedding_times",
    "group",
    "head_times",
    "layer_times",
    "machine_of",
    "optimizer_time_s",
    "routed_tokens",
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


def machine_of(
    card: Card,
    stack: Stack,
    *,
    clock: float | None = None,
    memory_share: float | None = None,
    factors: SiteFactors | None = None,
    adapter_bytes_per_s: float | None = None,
) -> Machine:
    """Return a machine of a card's devices; what a site measured replaces the card's figures.

    `memory_share` is that of memory-bound kernels, of the datasheet's HBM rate. Raises
    DocumentError where the card has no times of kernels.
    """
    kernels = kernels_of(card)
    if memory_share is not None:
        # shares of all classes move together: they are of one memory
        scale = memory_share / kernels.memory_share("elementwise")
        kernels = replace(kernels, memory_bytes_per_s=kernels.memory_bytes_per_s * scale)
    if adapter_bytes_per_s is not None:
        network = replace(card.network, adapter_bytes_per_s=adapter_bytes_per_s)
        card = replace(card, network=network)
    return Machine(
        card=card,
        kernels=kernels,
        clock=kernels.clock if clock is None else clock,
        factors=factors or SiteFactors(),
        stack=stack,
        # a domain of its own size only where a switch joins nodes
        domain_gpus=card.domain_gpus or card.max_gpus_per_node,
    )


def group(machine: Machine, ranks: int, stride: int) -> GroupShape:
    """Return the shape of groups of `ranks` GPUs `stride` apart, tensor ranks innermost."""
    return GroupShape.even(ranks=ranks, per_node=max(1, machine.domain_gpus // stride))


class Part(NamedTuple):
    """Seconds of one operation of a layer, for one micro-batch on one rank."""

    name: str
    module: str
    kind: Kind
    forward_s: float
    input_s: float
    """Of the input's gradient."""
    weight_s: float = 0.0


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
    parts: list[Part] = []
    tensor, experts = Sends(), Sends()
    context = Sends()
    cast = 0.0
    if block.attention is not None:
        parts += _attention_parts(machine, job, block.hidden, block.attention)
        context = _context_sends(machine, job, block.attention)
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
        cast += _weights_cast(machine, job, block)
    if block.mamba is not None:
        parts += _mamba_parts(machine, job, block.hidden, block.mamba)
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    if isinstance(block.mlp, Mlp):
        parts += _mlp_parts(machine, job, block.hidden, block.mlp.width, block.mlp.gated, "mlp")
        tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    elif block.mlp is not None:
        parts += _expert_parts(machine, job, block.hidden, block.mlp)
        experts = _expert_sends(machine, job, block.hidden, block.mlp)
        if block.mlp.shared_width:
            tensor = _sum(tensor, _tensor_sends(machine, job, block.hidden))
    parts += _around(machine, job, block)
    mixture = isinstance(block.mlp, Experts)
    return LayerTimes(tuple(parts), tensor, context, experts, cast, mixture)


def _sum(one: Sends, other: Sends) -> Sends:
    return Sends(
        one.forward_s + other.forward_s,
        one.backward_s + other.backward_s,
        one.calls + other.calls,
    )


# --------------------------------------------------------------------------------------------------
# Parts


def _element(
    machine: Machine,
    name: str,
    module: str,
    operation: str,
    elements: float,
    *,
    gated: bool = False,
) -> Part:
    """Return an operation whose bytes per element the stack counts."""
    forward = machine.stack.element_bytes(operation, backward=False, gated=gated)
    backward = machine.stack.element_bytes(operation, backward=True, gated=gated)
    return Part(
        name,
        module,
        "memory",
        float(elements_s(machine.kernels, elements, forward)) if forward else 0.0,
        float(elements_s(machine.kernels, elements, backward)) if backward else 0.0,
    )


def _linear(
    machine: Machine, job: Job, name: str, module: str, tokens: float, outputs: float, inputs: float
) -> Iterator[Part]:
    """Yield a linear layer's products, its gradient's accumulation and its casts."""
    dtype = "bf16" if job.experts_only and job.precision not in ("fp16", "fp32") else job.precision
    clock = machine.kernels.product_clock(dtype, machine.clock)
    times = linear_s(machine.kernels, tokens, outputs, inputs, dtype=dtype, clock=clock, cast=False)
    yield _product(machine, job, name, module, times, outputs * inputs, dtype)
    yield from _casts(machine, job, name, module, dtype, tokens * inputs, tokens * outputs)


def _product(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    times: LinearTimes,
    weights: float,
    dtype: str,
) -> Part:
    forward, inner, outer = (float(time) for time in times)
    if job.row_scales and ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"]:
        rate = machine.stack.figures.cast["row_scales_rate"]
        forward, inner, outer = forward / rate, inner / rate, outer / rate
    moved = _accumulation_bytes(machine, job)
    if job.frozen:
        outer = 0.0
    elif moved:
        outer += float(elements_s(machine.kernels, weights, moved, kind="optimizer"))
    return Part(name, module, "gemm", forward, inner, outer)


def _accumulation_bytes(machine: Machine, job: Job) -> float:
    if job.accumulation_bytes is not None:
        return job.accumulation_bytes
    return machine.stack.figures.gradient["accumulation_bytes"]


def _casts(
    machine: Machine, job: Job, name: str, module: str, dtype: str, inputs: float, outputs: float
) -> Iterator[Part]:
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[dtype] >= ELEMENT_BYTES["bf16"] or not moved:
        return
    forward, backward = (
        float(cast_s(machine.kernels, elements, dtype=dtype, bytes_per_element=moved))
        for elements in (inputs, outputs)
    )
    yield Part(f"{name} cast", module, "cast", forward, backward)


def _weights_cast(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of quantising a layer's weights, which keep their value for a step."""
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[job.precision] >= ELEMENT_BYTES["bf16"] or not moved:
        return 0.0
    experts, dense = parameters(block)
    held = experts / job.ep + (0.0 if job.experts_only else dense / job.tp)
    return float(cast_s(machine.kernels, held, dtype=job.precision, bytes_per_element=moved))


def _attention_parts(
    machine: Machine, job: Job, hidden: int, attention: Attention
) -> Iterator[Part]:
    n, t = job.tokens, job.tp
    latent = attention.latent
    for index, (outputs, inputs) in enumerate(attention_matrices(hidden, attention)):
        # latents are the same on all tensor ranks, the heads behind them are split
        whole = latent is not None and index == 0
        module = "mla_up_proj" if latent is not None and index else "attention"
        share = 1 if whole else t
        yield from _linear(machine, job, f"qkv {index}", module, n, outputs / share, inputs)
    yield from _linear(machine, job, "projection", "attention", n, hidden, attention.value / t)
    if latent is not None:
        widths = latent.query_rank + latent.key_value_rank
        yield _element(machine, "latent norms", "attention", "norm", n * widths)
    # at least one key-value head on every rank
    key_value = attention.key_value * max(attention.kv_heads, t) / attention.kv_heads
    heads = (attention.query + key_value) / t
    if attention.head_norms:
        keys = heads - key_value / t / 2
        yield _element(machine, "head norms", "attention", "norm", n * keys)
    yield _element(machine, "layout", "attention", "layout", n * 2 * heads)
    if attention.rotary:
        turned = (attention.query + key_value / 2) / t
        if latent is not None:
            turned *= latent.rotary_width / attention.width
        yield _element(machine, "rotary", "attention", "rope", n * turned)
    forward, backward = (_core_s(machine, job, attention, backward=side) for side in (False, True))
    yield Part("core attention", "core_attn", "attention", forward, backward)


def _kernel(machine: Machine, job: Job, attention: Attention) -> str:
    known = machine.kernels.section.attention
    if job.attention_kernel is not None:
        return job.attention_kernel
    if job.low_precision_attention:
        for name in ("cudnn-mxfp8", "cudnn-fp8"):
            if name in known:
                return name
    for name in machine.stack.attention:
        if name == "unfused" or name in known:
            return name
    return next(iter(known))


def _core_s(machine: Machine, job: Job, attention: Attention, *, backward: bool) -> float:
    """Return the seconds of softmax(q k) v on a rank."""
    phase: Literal["forward", "backward"] = "backward" if backward else "forward"
    kernel, heads = _kernel(machine, job, attention), attention.heads / job.tp
    if kernel == "unfused":
        return float(
            unfused_attention_s(
                machine.kernels,
                job.micro_batch,
                heads,
                job.seq,
                head_dim=attention.width,
                phase=phase,
                clock=machine.clock,
            )
        )
    widths = {
        "kernel": kernel,
        "phase": phase,
        "kv_heads": max(1.0, attention.kv_heads / job.tp),
        "head_dim": attention.width,
        "head_dim_v": attention.value_width,
        "clock": machine.clock,
    }
    if job.cp > 1 and attention.causal:
        return float(
            ring_attention_s(
                machine.kernels,
                job.micro_batch,
                heads,
                job.seq,
                job.cp,
                balanced=job.ring_balanced,
                **widths,  # type: ignore[arg-type]
            )
        )
    return float(
        attention_s(
            machine.kernels,
            job.micro_batch,
            heads,
            job.seq / job.cp,
            job.seq,
            causal=attention.causal,
            window=attention.window,
            **widths,  # type: ignore[arg-type]
        )
    )


def _mlp_parts(
    machine: Machine, job: Job, hidden: int, width: int, gated: bool, module: str
) -> Iterator[Part]:
    n, first = job.tokens, (2 if gated else 1) * width / job.tp
    yield from _linear(machine, job, f"{module} up", module, n, first, hidden)
    yield from _linear(machine, job, f"{module} down", module, n, hidden, width / job.tp)
    yield _element(
        machine,
        f"{module} activation",
        module,
        "activation",
        n * first,
        gated=gated,
    )


_ROUTER_BYTES = 40.0
"""Per token and expert, forward and backward each: scores, their softmax, the chosen ones and the
maps of who goes where, in fp32 and int32 (counted from Megatron-Core's router)."""


def routed_tokens(job: Job) -> float:
    """Return the tokens of a rank that are routed: its share of the tensor group's."""
    return job.tokens / job.tp


def _expert_parts(machine: Machine, job: Job, hidden: int, mlp: Experts) -> Iterator[Part]:
    n = routed_tokens(job)
    copies = n * mlp.per_token * job.skew
    held = mlp.number / job.ep
    rows = copies * job.ep / mlp.number
    inner = mlp.latent or hidden
    first = (2 if mlp.gated else 1) * mlp.width
    # 128: blocks of scales; 16-bit kernels take any number of rows
    pad = 128 if ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"] else 1
    for name, outputs, inputs in (("up", first, inner), ("down", inner, mlp.width)):
        times = grouped_linear_s(
            machine.kernels,
            rows,
            held,
            outputs,
            inputs,
            dtype=job.precision,
            fused=job.fused_experts,
            clock=machine.kernels.product_clock(job.precision, machine.clock),
            pad=pad,
            cast=False,
        )
        weights = held * outputs * inputs
        yield _product(machine, job, f"experts {name}", "moe", times, weights, job.precision)
        yield from _casts(
            machine, job, f"experts {name}", "moe", job.precision, copies * inputs, copies * outputs
        )
    yield _element(
        machine, "experts activation", "moe_act", "activation", copies * first, gated=mlp.gated
    )
    slow = 1.0 if job.dispatcher == "fused" else _UNFUSED_PERMUTE
    forward, backward = (
        slow * float(permute_s(machine.kernels, copies, inner, backward=side))
        for side in (False, True)
    )
    yield Part("permute", "moe", "memory", forward, backward)
    yield from _linear(
        machine, replace(job, precision="bf16"), "router", "moe", n, mlp.number, hidden
    )
    scores = float(elements_s(machine.kernels, n * mlp.number, _ROUTER_BYTES, count=12))
    yield Part("routing", "moe", "memory", scores, scores)
    if mlp.latent:
        yield from _linear(machine, job, "latent down", "moe", n, mlp.latent, hidden)
        yield from _linear(machine, job, "latent up", "moe", n, hidden, mlp.latent)
    if mlp.shared_width:
        yield from _mlp_parts(machine, job, hidden, mlp.shared_width, mlp.gated, "shared_experts")


_UNFUSED_PERMUTE = 2.7
"""Permutation without a fused dispatcher over one with, from published steps of mixtures."""
_MAMBA_CONVOLUTION = 24.0, 48.0
"""Bytes per element of a mixer's inner width of convolution, gate and scan: forward, backward."""
_MAMBA_SLOW = 6.5
"""Of a mixer's kernels over their bytes and FLOP at the rates of others; published steps."""
_CHUNK = 256
"""Tokens that a scan takes at a time."""


def _mamba_parts(machine: Machine, job: Job, hidden: int, mamba: Mamba) -> Iterator[Part]:
    n, t = job.tokens, job.tp
    yield from _linear(machine, job, "mixer in", "mamba", n, mamba_inputs(mamba) / t, hidden)
    yield from _linear(machine, job, "mixer out", "mamba", n, hidden, mamba.inner / t)
    inner = mamba.inner / t
    # 2 n d (2 N + c): states in and out and within a chunk of c tokens, at a quarter of the peak
    flop = 2 * n * inner * (2 * mamba.state + _CHUNK)
    scan = flop / (machine.kernels.flop_per_s["bf16"] / 4)
    forward, backward = (
        _MAMBA_SLOW * float(elements_s(machine.kernels, n * inner, moved, count=6))
        for moved in _MAMBA_CONVOLUTION
    )
    yield Part("mixer", "mamba", "memory", forward + scan, backward + 2 * scan)


def _around(machine: Machine, job: Job, block: Block) -> Iterator[Part]:
    """Yield norms and residual sums."""
    elements = job.tokens * block.hidden / (job.tp if job.sequence_parallel else 1)
    for index in range(block.norms):
        yield _element(machine, f"norm {index}", "layernorm", "norm", elements)
        yield _element(machine, f"residual {index}", "residual", "residual", elements)


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
    size = job.tokens * hidden * 2.0
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
    size = job.tokens * key_value / job.tp * 2.0
    crosses = job.tp * job.cp > machine.domain_gpus
    step = p2p_time_s(machine.card.network, size, crosses=crosses, site=machine.factors)
    seconds = []
    for backward in (False, True):
        # the backward also sends the gradients of keys and values
        ring = (job.cp - 1) * step * (2 if backward else 1)
        core = _core_s(machine, job, attention, backward=backward)
        seconds.append(max(0.0, ring - core) + _CONTEXT_FRACTION * min(ring, core))
    return Sends(seconds[0], seconds[1], 3 * (job.cp - 1))


def _expert_sends(machine: Machine, job: Job, hidden: int, mlp: Experts) -> Sends:
    """Return dispatch and combine, and their gradients', which go the other way."""
    if job.ep == 1:
        return Sends()
    # expert groups are neighbours: they fold over tensor, context and data ranks
    shape = group(machine, job.ep, 1)
    # a card's own figures are of few tokens, as in inference, and too slow for many
    network = replace(machine.card.network, exchange=None)
    dispatch, combine = (
        float(
            moe_exchange_time_s(
                network,
                direction,
                routed_tokens(job) * job.skew,
                shape,
                hidden=mlp.latent or hidden,
                top_k=mlp.per_token,
                fused=job.dispatcher == "fused",
                site=machine.factors,
            )
        )
        for direction in ("dispatch", "combine")
    )
    return Sends(dispatch + combine, dispatch + combine, 8)


# --------------------------------------------------------------------------------------------------
# Embedding, head and optimizer


def embedding_times(machine: Machine, job: Job) -> tuple[Part, ...]:
    """Return looking up the tokens of a micro-batch, and adding the gradient."""
    hidden = job.blocks[0].hidden
    rows = 0 if job.frozen else job.vocab / job.tp * hidden
    forward = embedding_s(machine.kernels, job.tokens, hidden)
    backward = embedding_s(
        machine.kernels,
        job.tokens,
        hidden,
        backward=True,
        local_parameters=rows,
        accumulation_bytes=_accumulation_bytes(machine, job),
    )
    return (Part("embedding", "embedding", "memory", float(forward), float(backward)),)


def head_times(machine: Machine, job: Job) -> tuple[tuple[Part, ...], float]:
    """Return final norm, head and loss of a micro-batch, and the seconds of their collectives.

    The head stays in 16 bits; its columns are padded to 128 per rank.
    """
    hidden, n = job.blocks[-1].hidden, job.tokens
    columns = -(-job.vocab // (128 * job.tp)) * 128
    if job.vocab % 8 and job.tp == 1:
        columns = job.vocab  # not padded by whoever has one rank: slow, and priced so
    plain = replace(job, precision="fp16" if job.precision == "fp16" else "bf16", row_scales=False)
    parts = list(_linear(machine, plain, "head", "head", n, columns, hidden))
    figure = machine.stack.element_bytes
    losses = [
        float(
            cross_entropy_s(
                machine.kernels,
                n,
                columns,
                bytes_per_logit=figure("cross_entropy", backward=side),
            )
        )
        for side in (False, True)
    ]
    parts.append(Part("loss", "loss", "memory", *losses))
    elements = n * hidden / (job.tp if job.sequence_parallel else 1)
    parts.append(_element(machine, "final norm", "layernorm", "norm", elements))
    sends = 0.0
    if job.tp > 1:
        sends = transfer_s(machine, "allreduce", n * hidden * 2, job.tp, 1)
        # the largest logit, the sum of exponentials, and the label's logit
        sends += 3 * transfer_s(machine, "allreduce", n * 4, job.tp, 1)
    return tuple(parts), sends


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
