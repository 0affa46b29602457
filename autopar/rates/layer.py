"""Kernel and communication times of one layer, of embedding and head, and of MTP projections.

A layer is a list of *parts*: the kernels of one operation with their forward, input-gradient and
weight-gradient seconds. Each part names its module, so that recomputation can repeat any of them.
The communication of a layer is listed separately. Overlap, and the step made of layers, are in
`autopar.price.step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError
from autopar.rates.collectives import (
    p2p_time_s,
)
from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.kernels import (
    WIDE,
    Phase,
    attention_s,
    efficient_attention_s,
    ring_attention_s,
    unfused_attention_s,
)
from autopar.rates.memory_bound import cross_entropy_s, elements_s, embedding_s
from autopar.rates.parts.experts import expert_parts, expert_sends
from autopar.rates.parts.linear import Beside, linear_parts, mlp_parts
from autopar.rates.parts.mixers import loops_of, mixer_parts
from autopar.rates.parts.operations import (
    CommunicationTime,
    KernelTime,
    Machine,
    RankShape,
    Real,
    accumulation_bytes,
    as_number,
    element_part,
    split_of,
    transfer_s,
)
from autopar.rates.parts.optimizer import weights_cast_s
from autopar.rates.parts.sparse import gathered_keys, indexer_sends, sparse_parts
from autopar.records import replace
from autopar.run.architecture import (
    Attention,
    Experts,
    Mamba,
    Mlp,
    Recurrent,
)
from autopar.run.job import (
    Block,
    Job,
    Recomputation,
    attention_matrices,
    projection_targets,
)


class LayerTimes(NamedTuple):
    """Times of one layer and micro-batch on one rank."""

    parts: tuple[KernelTime, ...]
    tensor: CommunicationTime
    """Tensor-parallel and sequence-parallel communication, before overlap."""
    context: CommunicationTime
    """Context-parallel communication that attention does not hide."""
    experts: CommunicationTime
    """Dispatch and combine, before overlap."""
    weight_cast_s: float
    """Quantisation of the weights, seconds per step."""
    held: Real | None
    """Number of local experts, for the host overhead of routing and launches; None if dense."""
    loops: tuple[float, float] = (0.0, 0.0)
    """Kernels that a loop over blocks of tokens launches over those of a usual eager layer, forward
    and backward."""


def layer_times(machine: Machine, job: Job, block: Block) -> LayerTimes:
    """Return the times of one layer of a block for one micro-batch on one rank.

    A rank has n = micro-batch seq / cp tokens and 1 / tp of the widths. Norms and residuals have
    n / tp tokens with sequence parallelism. Raises InputError if the card lacks a kernel.
    """
    tensor, experts, context = CommunicationTime(), CommunicationTime(), CommunicationTime()
    if block.attention is not None:
        context = context_parallel_comm(machine, job, block.attention)
        tensor = _sum(tensor, tensor_parallel_comm(machine, job, block.hidden))
        tensor = _sum(tensor, _wide_norm_sends(machine, job, block.attention))
        indexer, latent = block.attention.indexer, block.attention.latent
        if indexer is not None and latent is not None:
            tensor = _sum(tensor, indexer_sends(machine, job, block.hidden, indexer, latent))
    if block.recurrent is not None:
        tensor = _sum(tensor, tensor_parallel_comm(machine, job, block.hidden))
        context = _sum(context, recurrent_sends(machine, job, block.recurrent))
    if isinstance(block.mlp, Mlp):
        tensor = _sum(tensor, tensor_parallel_comm(machine, job, block.hidden))
    elif block.mlp is not None:
        experts = expert_sends(machine, job, block.hidden, block.mlp)
        if block.mlp.shared_width:
            tensor = _sum(tensor, tensor_parallel_comm(machine, job, block.hidden))
    return LayerTimes(
        parts=tuple(layer_kernels(machine, job, block, split_of(job))),
        tensor=tensor,
        context=context,
        experts=experts,
        weight_cast_s=weights_cast_s(machine, job, block),
        held=block.mlp.number / job.ep if isinstance(block.mlp, Experts) else None,
        loops=(0.0, 0.0) if block.recurrent is None else loops_of(job, block.recurrent),
    )


def _sum(one: CommunicationTime, other: CommunicationTime) -> CommunicationTime:
    return CommunicationTime(
        one.forward_s + other.forward_s,
        one.backward_s + other.backward_s,
        one.calls + other.calls,
    )


# --------------------------------------------------------------------------------------------------
# Parts


def layer_kernels(
    machine: Machine, job: Job, block: Block, split: RankShape
) -> Iterator[KernelTime]:
    """Yield the kernels of one layer of a block; times are arrays where `split` has arrays.

    Tokens, widths and tensor degrees come from `split`; precision, kernels, sequence length,
    context and expert degrees from `job`. Raises InputError if the card lacks a kernel.
    """
    if block.attention is not None:
        yield from _attention_parts(machine, job, block.hidden, block.attention, split)
    if block.cross_tokens is not None and block.attention is not None:
        keys = block.cross_tokens
        yield from _cross_parts(machine, job, block.hidden, block.attention, split, keys)
    if block.recurrent is not None:
        yield from mixer_parts(machine, job, block.hidden, block.recurrent, split)
    if isinstance(block.mlp, Mlp):
        mlp = block.mlp
        yield from mlp_parts(machine, job, block.hidden, mlp.width, mlp.gated, "mlp", split)
    elif block.mlp is not None:
        mixture, biases = block.mlp, block.biases
        yield from expert_parts(machine, job, block.hidden, mixture, split, biases=biases)
    elements = split.outside * block.hidden
    # Grouped experts with biases refuse the fused kernel (Megatron-Core d7288711, moe/experts.py).
    grouped = block.biases and isinstance(block.mlp, Experts)
    summed = "plain_residual" if grouped else "residual"
    for index in range(max(block.norms, block.sums)):
        if index < block.norms:
            yield element_part(machine, job, f"norm {index}", "layernorm", "norm", elements)
        if index < block.sums:
            yield element_part(machine, job, f"residual {index}", "residual", summed, elements)
    if block.elementwise:
        moved = elements * block.elementwise
        yield element_part(machine, job, "condition", "layernorm", "residual", moved)
    if block.extra:
        # The vector of a sample, or a short text, passes these weights: they are read in each pass,
        # and their gradients are written.
        forward, backward = (elements_s(machine.kernels, block.extra, size) for size in (2.0, 4.0))
        yield KernelTime("conditioning weights", "layernorm", "memory", forward, backward)


def _attention_parts(
    machine: Machine, job: Job, hidden: int, attention: Attention, split: RankShape
) -> Iterator[KernelTime]:
    n, t = split.tokens, split.tensor
    latent = attention.latent
    # Every rank has at least one key-value head.
    key_value = attention.key_value * np.maximum(attention.kv_heads, t) / attention.kv_heads
    targets = projection_targets(attention)
    for index, (outputs, inputs) in enumerate(attention_matrices(hidden, attention)):
        # Latents are replicated on all tensor ranks; only their up-projections are split.
        whole = latent is not None and index == 0
        module = "mla_up_proj" if latent is not None and index else "attention"
        share = 1 if whole else t
        copies = np.maximum(attention.kv_heads, t) / attention.kv_heads
        keys = attention.key_projections if latent is None else ()
        width = (outputs + sum(keys) * (copies - 1)) / share
        beside = [(target, size / share) for target, size in targets[index]]
        apart: tuple[Real, ...] = ()
        if job.torch_layers and latent is None:
            query = (1 + attention.gated) * attention.query
            apart = (query / t, *(one * copies / t for one in keys))
        yield from linear_parts(
            machine, job, f"qkv {index}", module, n, width, inputs, beside, apart=apart
        )
    values = attention.value / t
    last: Beside = [("projection", hidden)]
    # torchtitan's per-op recomputation saves every second product, queries first.
    yield from linear_parts(
        machine, job, "projection", "attention", n, hidden, values, last, per_op=1.0
    )
    if latent is not None:
        widths = (latent.query_rank or 0) + latent.kv_rank
        yield element_part(machine, job, "latent norms", "attention", "norm", n * widths)
    if attention.gated:
        gate = n * values
        yield element_part(machine, job, "output gate", "attention", "residual", gate)
    if attention.indexer is not None and latent is not None:
        yield from sparse_parts(machine, job, hidden, attention, attention.indexer, latent, split)
        return
    heads = (attention.query + key_value) / t
    if attention.head_norms != "none" and latent is None:
        # In latent attention these norms act on the latents, whatever the engine calls them.
        elements = n * (heads - (0 if attention.value_norms else key_value / t / 2))
        if attention.head_norms == "all" and not job.torch_layers:
            forward, backward = (
                elements_s(machine.kernels, elements, moved) for moved in _WIDE_NORM_BYTES
            )
            yield KernelTime("head norms", "attention", "memory", forward, backward)
        else:
            yield element_part(machine, job, "head norms", "attention", "norm", elements)
    if latent is not None and job.fused_rotary and machine.stack.has("latent_rope"):
        # Queries are turned in place; keys and values are read together and written apart
        # (Megatron-Core fusions/fused_mla_yarn_rope_apply.py).
        moved = 2 * latent.rotary_width + latent.key_width + attention.width
        each = n * (moved + 2 * attention.value_width) * attention.heads / t
        yield element_part(machine, job, "layout and rotary", "attention", "latent_rope", each)
    else:
        yield element_part(machine, job, "layout", "attention", "layout", n * 2 * heads)
        if attention.rotary:
            turned = (attention.query + key_value / 2) / t
            if latent is not None:
                turned = turned * (latent.rotary_width / attention.width)
            # The fused kernel does not scale the scores (Megatron-Core rope_utils.py).
            fused = job.fused_rotary and (latent is not None or not attention.yarn)
            operation = "rope" if fused else "plain_rope"
            yield element_part(machine, job, "rotary", "attention", operation, n * turned)
    forward, backward = (
        _core_s(machine, job, attention, split, backward=side) for side in (False, True)
    )
    yield KernelTime("core attention", "core_attn", "attention", forward, backward)


_WIDE_NORM_BYTES = (36.0, 68.0)
"""Bytes per element that the operators of a norm over all heads read and write, forward and
backward: square, sum, products and casts of `_FullDimRMSNorm` (Megatron-Bridge 067f987,
models/minimax_m2). Megatron-LM's fused norms are per head."""
_LOW_PRECISION = ("cudnn-mxfp8", "cudnn-fp8")


def _kernel(machine: Machine, job: Job) -> str:
    known, card = machine.kernels.section.attention, machine.card.name
    if job.attention_kernel is not None:
        return job.attention_kernel
    if job.precision == "fp32":
        return "unfused"  # flash kernels support 16 bits and fewer
    if job.low_precision_attention:
        for name in _LOW_PRECISION:
            if name in known:
                return name
        raise InputError(
            f"card {card!r} has no times of 8-bit attention ({' or '.join(_LOW_PRECISION)})",
            remedy=("Use 16-bit attention, or a card with measured times in kernels.attention"),
        )
    for name in machine.stack.attention:
        if name == "unfused" or name in known:
            return name
    raise InputError(
        f"stack {machine.stack.name!r} runs attention with "
        f"{', '.join(machine.stack.attention)}, but card {card!r} has times of "
        f"{', '.join(known)}",
        remedy="Add one of these to the stack's attention",
    )


def _core_s(
    machine: Machine,
    job: Job,
    attention: Attention,
    split: RankShape,
    *,
    backward: bool,
    keys: int | None = None,
) -> F64:
    """Return the seconds of core attention, softmax(q k^T) v, on a rank.

    backward : True for the backward
    keys : tokens of the sequence that cross-attention reads; None for self-attention
    """
    phase: Phase = "backward" if backward else "forward"
    exchanged = _exchanging(job)
    # Ranks have whole sequences of fewer heads (Ulysses), or parts of sequences (ring).
    shares, ranks = split.heads * exchanged, job.cp // exchanged
    kernel, heads = _kernel(machine, job), attention.heads / shares
    sequences, seq = split.sequences, float(job.seq)
    if job.attended is not None and keys is None and kernel != "unfused":
        # As many pairs of queries and keys as in sequences of this length and equally many tokens;
        # unfused attention computes the scores of all pairs, masked or not.
        sequences, seq = sequences * (seq / job.attended), job.attended
    if kernel == "unfused":
        if ranks > 1:
            raise InputError(f"attention with materialised scores has no ring: cp is {job.cp}")
        dtype = job.precision if job.precision in ("fp16", "fp32") else "bf16"
        return unfused_attention_s(
            machine.kernels,
            sequences,
            heads,
            seq if keys is None else math.sqrt(seq * keys),
            head_dim=attention.width,
            phase=phase,
            dtype=dtype,
            clock=machine.kernels.product_clock(dtype, machine.clock),
            sustained=True,
        )
    part, window = seq / ranks, attention.window
    if kernel == WIDE:
        # a window is a mask, which skips no scores
        causal = attention.causal and keys is None and window is None
        return efficient_attention_s(
            machine.kernels, sequences * heads, seq, head_dim=attention.width, phase=phase,
            causal=causal, clock=machine.clock,
        )  # fmt: skip
    if backward and kernel in _LOW_PRECISION:
        # In cuDNN's tables the 8-bit backward takes as long with a window of 128 tokens as without
        # one, for 2 to 32 Ki tokens.
        window = None
    # A rank has an early and a late half, which together see (s / 2c) s pairs of queries and keys.
    halves = job.keys_gathered and ranks > 1
    # A narrow window gives every query equally many pairs, on any rank.
    narrow = window is not None and window < seq / 2
    if halves and attention.causal and not narrow:
        return attention_s(
            machine.kernels,
            sequences,
            heads,
            part / 2,
            seq,
            kernel=kernel,
            phase=phase,
            kv_heads=np.maximum(1.0, attention.kv_heads / shares),
            head_dim=attention.width,
            head_dim_v=attention.value_width,
            causal=False,
            clock=machine.clock,
        )
    if ranks > 1 and attention.causal and not narrow:
        return ring_attention_s(
            machine.kernels,
            sequences,
            heads,
            seq,
            ranks,
            kernel=kernel,
            phase=phase,
            kv_heads=np.maximum(1.0, attention.kv_heads / shares),
            head_dim=attention.width,
            head_dim_v=attention.value_width,
            clock=machine.clock,
        )
    return attention_s(
        machine.kernels,
        sequences,
        heads,
        part,
        keys or (min(seq, part + window) if window is not None and ranks > 1 else seq),
        kernel=kernel,
        phase=phase,
        kv_heads=np.maximum(1.0, attention.kv_heads / shares),
        head_dim=attention.width,
        head_dim_v=attention.value_width,
        causal=attention.causal and keys is None,
        window=window,
        clock=machine.clock,
    )


def _cross_parts(
    machine: Machine, job: Job, hidden: int, attention: Attention, split: RankShape, keys: int
) -> Iterator[KernelTime]:
    """Yield the parts of cross-attention to `keys` tokens, including its projections."""
    n, t = split.tokens, split.tensor
    # A rank has an equal fraction of both sequences.
    others = n * (keys / job.seq)
    query, key_value = attention.query / t, attention.key_value / t
    yield from linear_parts(machine, job, "cross q", "attention", n, query, hidden)
    yield from linear_parts(machine, job, "cross kv", "attention", others, key_value, hidden)
    yield from linear_parts(
        machine, job, "cross projection", "attention", n, hidden, attention.value / t
    )
    moved = 2 * (n * query + others * key_value)
    yield element_part(machine, job, "cross layout", "attention", "layout", moved)
    forward, backward = (
        _core_s(machine, job, attention, split, backward=side, keys=keys) for side in (False, True)
    )
    yield KernelTime("cross attention", "core_attn", "attention", forward, backward)


# --------------------------------------------------------------------------------------------------
# Transfers


def tensor_parallel_comm(machine: Machine, job: Job, hidden: int) -> CommunicationTime:
    """Return the time of the tensor-parallel collectives of attention or MLP of a layer.

    Without sequence parallelism: an all-reduce of n h elements forward, and one backward. With it:
    an all-gather before and a reduce-scatter after, and the reverse in the backward. There a second
    all-gather serves the weight gradient (Korthikanti et al. 2022, section 4.2). The stack's
    `regather` is the time of both all-gathers over one.
    """
    if job.tp == 1:
        return CommunicationTime()
    size = job.tokens * hidden * job.element_bytes
    if not job.sequence_parallel:
        once = transfer_s(machine, "allreduce", size, job.tp, 1)
        return CommunicationTime(once, once, 2)
    gather = transfer_s(machine, "allgather", size, job.tp, 1)
    scatter = transfer_s(machine, "reducescatter", size, job.tp, 1)
    again = machine.stack.figures.overlap["regather"]
    if job.torch_layers and job.precision == "fp8" and not job.row_scales:
        gather *= 0.5  # inputs are quantised with one scale before they are gathered (torchao)
    return CommunicationTime(gather + scatter, scatter + again * gather, 5)


def _wide_norm_sends(machine: Machine, job: Job, attention: Attention) -> CommunicationTime:
    """Return the time to sum the squares of queries and of keys over tensor ranks.

    Norms over all heads send 4 bytes per token each, and nothing in the backward (`_FullDimRMSNorm`
    of Megatron-Bridge 067f987). torch layers have no tensor ranks with such norms.
    """
    if job.tp == 1 or attention.head_norms != "all":
        return CommunicationTime()
    return CommunicationTime(
        2 * transfer_s(machine, "allreduce", 4.0 * job.tokens, job.tp, 1), 0.0, 2
    )


_CONTEXT_FRACTION = 0.1
"""Exposed fraction of the shorter of attention and its ring communication."""


def context_parallel_comm(
    machine: Machine, job: Job, attention: Attention, core_s: tuple[float, float] | None = None
) -> CommunicationTime:
    """Return the exposed time of the context-parallel communication of one layer.

    - Ring attention: messages overlap with attention; the backward sends twice the bytes.
    - torch layers: an all-gather of the keys and values of all heads before attention and again
      before its backward, and a reduction of their gradients. None of them overlaps.
    - Ulysses: four all-to-alls each way, of queries, keys, values and the output, not overlapped.
      With `job.rings` above 1, a ring over the groups is added.
    - `keys_gathered`: an all-gather of keys and values before attention and again before its
      backward. A reduce-scatter of their gradients follows. None of them overlaps (Transformer
      Engine's AttnFuncWithCPAndKVAllGather; arXiv 2407.21783, section 3.3.2).

    core_s : seconds of attention forward and backward; None: computed here.
    """
    if job.cp == 1:
        return CommunicationTime()
    if attention.indexer is not None and attention.latent is not None:
        return gathered_keys(machine, job, attention.indexer, attention.latent)
    if job.heads_exchanged and job.rings == 1:
        return _exchange_sends(machine, job, attention)
    key_value = attention.key_value * max(attention.kv_heads, job.tp) / attention.kv_heads
    size = job.tokens * key_value / job.tp * job.element_bytes
    gathered = job.torch_layers and not job.heads_exchanged
    if gathered:
        size = job.tokens * 2 * attention.value / job.tp * job.element_bytes
    if job.keys_gathered or gathered:
        gather, scatter = (
            2 * transfer_s(machine, kind, job.cp * size / 2, job.cp, job.tp)
            for kind in ("allgather", "reducescatter")
        )
        return CommunicationTime(gather, gather + scatter, 6)
    ranks = job.cp // _exchanging(job)
    crosses = job.tp * job.cp > machine.domain_gpus
    step = p2p_time_s(machine.card.network, size, crosses=crosses, site=machine.factors)
    seconds = []
    for backward in (False, True):
        # The backward also sends the gradients of keys and values.
        ring = (ranks - 1) * step * (2 if backward else 1)
        if core_s is None:
            core = float(_core_s(machine, job, attention, split_of(job), backward=backward))
        else:
            core = core_s[backward]
        seconds.append(max(0.0, ring - core) + _CONTEXT_FRACTION * min(ring, core))
    sends = CommunicationTime(seconds[0], seconds[1], 3 * (ranks - 1))
    if not job.heads_exchanged:
        return sends
    return CommunicationTime(
        *map(sum, zip(sends, _exchange_sends(machine, job, attention), strict=True))
    )


def recurrent_sends(machine: Machine, job: Job, mixer: Recurrent) -> CommunicationTime:
    """Return the time of the all-to-alls that exchange heads of a mixer for tokens.

    The projected input is sent before the convolution and the output after the recurrence; the
    backward sends their gradients. Mamba-2 sends gate, values, B, C and steps one by one, and each
    rank has at least one group (Megatron-Core d98e8a64, core/ssm/mamba_context_parallel.py).
    """
    if job.cp == 1:
        return CommunicationTime()
    inner = mixer.inner / job.tp
    widths: tuple[float, ...] = (mixer.projected / job.tp, inner)
    if isinstance(mixer, Mamba):
        states = max(mixer.groups / job.tp, job.cp) * mixer.state
        widths = (inner, inner, states, states, mixer.heads / job.tp, inner)
    once = sum(
        transfer_s(machine, "all2all", job.tokens * width * job.element_bytes, job.cp, job.tp)
        for width in widths
    )
    return CommunicationTime(once, once, 2 * len(widths))


def _exchanging(job: Job) -> int:
    """Return the number of context ranks that exchange heads for tokens (Ulysses degree)."""
    return job.cp // job.rings if job.heads_exchanged else 1


def _exchange_sends(machine: Machine, job: Job, attention: Attention) -> CommunicationTime:
    """Return the time of the all-to-alls of Ulysses, forward and backward.

    They move n q/t, n k/t, n v/t and n o/t elements, and their gradients. Every rank has at least
    one key-value head (arXiv 2309.14509, section 3.2).
    """
    groups, ranks = max(attention.kv_heads, job.tp), _exchanging(job)
    keys, values = groups * attention.width, groups * attention.value_width
    widths = (attention.query, keys, values, attention.value)
    once = sum(
        transfer_s(
            machine, "all2all", job.tokens * width / job.tp * job.element_bytes, ranks, job.tp
        )
        for width in widths
    )
    return CommunicationTime(once, once, 8)


# --------------------------------------------------------------------------------------------------
# Embedding, head and optimizer


def embedding_times(
    machine: Machine, job: Job, tokens: Real | None = None
) -> tuple[KernelTime, ...]:
    """Return kernel times of the embedding: look-up of a micro-batch and gradient accumulation.

    tokens : tokens per rank; None for those of the job.
    """
    hidden = job.blocks[0].hidden
    n = job.tokens if tokens is None else tokens
    if not job.vocab:
        return ()
    rows = 0 if job.frozen else job.vocab / job.tp * hidden
    forward = embedding_s(machine.kernels, n, hidden)
    backward = embedding_s(
        machine.kernels,
        n,
        hidden,
        backward=True,
        local_parameters=rows,
        accumulation_bytes=accumulation_bytes(machine, job),
    )
    return (KernelTime("embedding", "embedding", "memory", forward, backward),)


_TILED_LOSS_BYTES = (2.0, 4.0)
"""Bytes per 16-bit logit that the kernels of TRL's loss read in the forward pass, and read and
write in the backward pass (`trl/kernels/chunked_logprob.py` of 1.16)."""


def head_times(machine: Machine, job: Job, tokens: Real | None = None) -> tuple[KernelTime, ...]:
    """Return kernel times of final norm, head and loss; `tokens` as in `embedding_times`.

    The head stays in 16 bits unless the job says otherwise; its columns are padded to 128 per rank.
    """
    hidden = job.blocks[-1].hidden
    n = job.tokens if tokens is None else tokens
    if not job.vocab:
        # The output projection to a patch and its loss are less than a thousandth of the layers.
        return (element_part(machine, job, "final norm", "layernorm", "norm", n * hidden),)
    columns = -(-job.vocab // (128 * job.tp)) * 128
    if job.vocab % 8 and job.tp == 1:
        columns = job.vocab  # engines do not pad on one rank; misaligned GEMMs are slow
    plain = job
    if ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"] and not job.low_precision_head:
        plain = replace(job, precision="bf16", row_scales=False)
    parts = list(linear_parts(machine, plain, "head", "head", n, columns, hidden))
    moved = [machine.stack.element_bytes("cross_entropy", backward=side) for side in (False, True)]
    if job.tiled_loss:
        parts = [part._replace(input_s=part.input_s + part.forward_s) for part in parts]
        moved = list(_TILED_LOSS_BYTES)
    forward, backward = (
        cross_entropy_s(machine.kernels, n, columns, bytes_per_logit=each) for each in moved
    )
    parts.append(KernelTime("loss", "loss", "memory", forward, backward))
    elements = n * hidden / (job.tp if job.sequence_parallel else 1)
    parts.append(element_part(machine, plain, "final norm", "layernorm", "norm", elements))
    return tuple(parts)


def mtp_times(machine: Machine, job: Job, tokens: Real | None = None) -> tuple[KernelTime, ...]:
    """Return kernel times before an MTP layer; `tokens` as in `embedding_times`.

    The token's embedding and the hidden state are normalised, concatenated and projected to the
    hidden size. The final norm of the MTP layer is part of `head_times`. DeepSeek-V3, arXiv
    2412.19437, section 2.2.
    """
    hidden = job.blocks[-1].hidden
    n = job.tokens if tokens is None else tokens
    elements = 2 * n * hidden / (job.tp if job.sequence_parallel else 1)
    parts = linear_parts(machine, job, "mtp projection", "mtp", n, hidden / job.tp, 2 * hidden)
    return (*parts, element_part(machine, job, "mtp norms", "mtp", "norm", elements))


def head_sends_s(machine: Machine, job: Job) -> float:
    """Return the seconds of the collectives of a vocabulary-parallel head."""
    if job.tp == 1:
        return 0.0
    size = job.tokens * job.blocks[-1].hidden * job.element_bytes
    # Input gradient; then largest logit, sum of exponentials and the label's logit.
    once = transfer_s(machine, "allreduce", size, job.tp, 1)
    return once + 3 * transfer_s(machine, "allreduce", job.tokens * 4.0, job.tp, 1)


# --------------------------------------------------------------------------------------------------
# Recomputation


def sent_again(
    machine: Machine, job: Job, times: LayerTimes, recompute: Recomputation
) -> tuple[float, float]:
    """Return the seconds of communication that recomputation repeats.

    The result is (tensor-parallel communication, dispatch and combine). The second is before
    overlap.
    """
    sent = (1 - overlapped_tensor_share(machine, job)) * times.tensor.forward_s
    if recompute == "full":
        # torch ends with the last GEMM: of two all-gathers and two reduce-scatters, the last is not
        # repeated
        return (0.75 if job.torch_layers else 1.0) * sent, times.experts.forward_s
    # per-op recomputation repeats the all-gathers
    tensor = 0.5 * sent if "per_op" in recompute else 0.0
    return tensor, times.experts.forward_s if "moe" in recompute else 0.0


def overlapped_tensor_share(machine: Machine, job: Job) -> float:
    """Return the overlapped share of tensor-parallel communication."""
    if not job.overlap_tensor:
        return 0.0
    # with a scale per row, torch fuses only the reduce-scatter (pytorch issue 149990)
    fused = 0.5 if job.torch_layers and job.row_scales else 1.0
    return fused * machine.stack.figures.overlap["tensor"]


def recomputed_s(recompute: Recomputation, times: LayerTimes) -> float:
    """Return the seconds of recomputed kernels and of recomputed context-parallel communication."""
    if recompute == "full":
        whole: float = sum(part.full * as_number(part.forward_s) for part in times.parts)
        return whole + times.context.forward_s
    wanted = set(recompute)
    if "per_op" in wanted:
        shares = {"gemm": 0.5, "memory": 1.0, "cast": 0.5, "attention": 0.0}
        by_op: float = sum(
            (shares[part.kind] if part.per_op is None else part.per_op) * as_number(part.forward_s)
            for part in times.parts
        )
        return by_op
    if "moe" in wanted:
        wanted |= {"moe_act", "shared_experts"}
    again: float = sum(as_number(part.forward_s) for part in times.parts if part.module in wanted)
    # recomputed ring attention repeats its exchange of keys and values
    return again + (times.context.forward_s if "core_attn" in wanted else 0.0)
