"""Saved activations of a layer by part, in bytes of one micro-batch on one rank.

Korthikanti et al. (arXiv 2205.05198, section 4) count these tensors for dense layers with unfused
attention. This module adds other kernels, MLA and experts. Model states are in
`autopar.price.states`; the number of live micro-batches depends on the pipeline schedule
(`autopar.price.peak`).

Symbols of this package: b micro-batch size, s sequence length, h hidden size, n heads, e bytes per
element, t TP degree, c CP degree. T is the number of tokens on a rank. T' is T, divided by t with
sequence parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autopar.price.parameters import Weight, adapter_widths, mixer_weights, mlp_weights
from autopar.run.architecture import (
    Attention,
    DeltaNet,
    Experts,
    Indexer,
    LatentAttention,
    Mamba,
    Mlp,
    Recurrent,
)
from autopar.run.run import RankLayer, Run
from autopar.run.strategy import Chunk, OffloadModule
from autopar.training.adapters import Target, needs_input
from autopar.training.mixtures import processed_share, worst_skew


def attention_of(at: RankLayer) -> Attention:
    """Return the attention of a layer; raises AssertionError for a layer without attention."""
    attention = at.layer.attention
    assert attention is not None, "asked of layers with attention alone"
    return attention


def score_count(at: RankLayer) -> int:
    """Return the number of attention scores of one layer on a rank: b*n/t*(s/c)*s."""
    run, split, attention = at.run, at.split, at.layer.attention
    heads = 0 if attention is None else attention.heads // split.tp
    return run.strategy.micro_batch * heads * (run.seq_length // split.cp) * run.seq_length


def input_bytes(at: RankLayer) -> int:
    """Return the bytes of a layer's input on a rank, T'*h*e; full recomputation saves no more."""
    return at.sequence_parallel_tokens * at.layer.hidden * at.element_bytes


def stream_bytes(run: Run) -> int:
    """Return the bytes of a micro-batch's hidden states on a rank, T'*h*e, as stages send them."""
    return run.sequence_parallel_tokens * run.model.hidden * run.element_bytes


def saved_parts(at: RankLayer) -> Iterator[tuple[str, int]]:
    """Yield (part, device bytes) of a layer's saved activations, for layers without full recompute.

    Parts of 0 bytes are omitted.
    """
    for name, left in device_parts(at):
        if left:
            yield name, left


def device_parts(at: RankLayer) -> Iterator[tuple[str, int]]:
    """Yield (part, device bytes) of all saved parts of a layer in module order.

    Offloaded parts are included, with the bytes that remain on the device, which may be 0.
    """
    gone = dict(_offloaded_parts(at))
    for index, (name, size) in enumerate(_layer_parts(at)):
        yield name, size - gone.get(index, 0)


_OFFLOADED_PARTS: dict[OffloadModule, tuple[str, ...]] = {
    # tensors that autograd saves inside a module, its input included
    "attn_norm": ("norm input",),
    "qkv_linear": ("norm output", "query latent", "key-value latent", "latent norms"),
    "core_attn": (
        "query",
        "key",
        "value",
        "qkv",
        "softmax statistics",
        "scores",
        "scores after dropout",
        "scores' mask",
    ),
    # the output of attention is the input of the next GEMM, so it is offloaded only if both are
    "attn_proj": ("attention output", "attention output's copy"),
    "mlp_norm": ("norm input",),
    "expert_fc1": ("expert input",),
    "moe_act": ("expert fc1 output",),
}


def _offloaded_parts(at: RankLayer) -> Iterator[tuple[int, int]]:
    """Yield (index among a layer's parts, bytes) of offloaded activations."""
    for index, _, size in offloaded_parts(at):
        yield index, size


def offloaded_parts(at: RankLayer) -> Iterator[tuple[int, OffloadModule, int]]:
    """Yield (index among a layer's parts, module, bytes) of offloaded activations.

    A norm that is fused with the following GEMM is not a module that can be offloaded. This holds
    before a dense MLP and before attention without latents (Megatron-Core's layer specs of
    Transformer Engine).
    """
    offload = at.run.runtime.offload
    if not at.split.offload:
        return
    chosen = set(at.split.offload)
    if at.layer.attention is not None and at.layer.attention.indexer is not None:
        # sparse attention has no hooks for offload (Megatron-Core d98e8a64, absorbed_mla.py)
        chosen -= {"qkv_linear", "core_attn", "attn_proj"}
    if not has_own_norm(at, at.layer.attention):
        chosen.discard("attn_norm")
    if not has_own_norm(at, at.layer.mlp):
        chosen.discard("mlp_norm")
    mixers = len(at.layer.mixers)
    ordered = sorted(chosen)
    least = offload.least_elements * at.element_bytes
    halves = 0
    for index, (name, size) in enumerate(_layer_parts(at)):
        halves += name == "norm input"
        module = next(
            (
                module
                for module in ordered
                if name in _OFFLOADED_PARTS[module]
                and not (module in ("attn_norm", "qkv_linear") and halves > mixers)
                and not (module == "mlp_norm" and halves <= mixers)
            ),
            None,
        )
        if module is not None and size >= least:
            yield index, module, math.floor(size * offload.fraction)


def offloaded_bytes(at: RankLayer) -> int:
    """Return the offloaded activation bytes of one layer and micro-batch, per rank."""
    if at.offloaded:
        return sum(size for _, size in _layer_parts(at))
    return sum(size for _, size in _offloaded_parts(at))


def _layer_parts(at: RankLayer) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) of all saved activations of a layer, on the device or offloaded."""
    recomputed, adapters, layer = at.split.modules, at.run.runtime.adapters, at.layer
    dropout = at.run.model.dropout > 0
    whole = input_bytes(at)
    for mixer in layer.mixers:
        yield "norm input", whole
        again = "layernorm" in recomputed and has_own_norm(at, mixer)
        first: tuple[Target, ...] = ("query", "key", "value")
        if not isinstance(mixer, Attention):
            first = ("mixer_in",)
        if not again and needs_input(adapters, *first):
            yield "norm output", _linear_input(at, whole)
        if isinstance(mixer, Mamba):
            yield from _mamba_parts(at, mixer)
        elif isinstance(mixer, DeltaNet):
            yield from _delta_parts(at, mixer)
        else:
            yield from _attention_parts(at)
        if dropout:
            # one byte per element; one mask after each mixer, one after the MLP
            yield "dropout mask", at.sequence_parallel_tokens * layer.hidden
    if layer.mlp is not None:
        yield "norm input", whole
        again = "layernorm" in recomputed and has_own_norm(at, layer.mlp)
        if not again and needs_input(adapters, "fc1", "expert_fc1"):
            # the router is not in 8 bits and needs the 16-bit tensor
            yield "norm output", whole if layer.experts is not None else _linear_input(at, whole)
    if adapters is not None:
        yield "adapters", adapter_saved_bytes(at)
    if layer.experts is not None:
        yield from _expert_parts(at)
    elif "mlp" not in recomputed and layer.mlp is not None:
        yield from _mlp_parts(at, layer.mlp.width)
    if dropout and layer.mlp is not None:
        yield "dropout mask", at.sequence_parallel_tokens * layer.hidden
    behind = max(0, layer.norms - layer.parts)
    if behind:
        # inputs of the norms after attention and MLP; the residual sums save nothing
        yield "inputs of post-norms", behind * whole
    # mean and reciprocal standard deviation of each norm in fp32
    yield "norm statistics", 8 * (layer.parts + behind) * at.tokens


def has_own_norm(at: RankLayer, part: Attention | Recurrent | Mlp | Experts | None) -> bool:
    """Return True if the norm before a part is a module, False if it is fused with the next GEMM.

    A norm that is fused can be neither recomputed nor offloaded. Transformer Engine fuses it before
    all parts except latent attention and experts (Megatron-Core d98e8a64, core/models/gpt/
    gpt_layer_specs.py and core/models/hybrid/hybrid_layer_specs.py).
    """
    if at.run.kernels.own_layers or at.run.kernels.torch_layers:
        return True
    return isinstance(part, Experts) or (isinstance(part, Attention) and part.latent is not None)


def _mamba_parts(at: RankLayer, mamba: Mamba) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) that a Mamba-2 mixer saves.

    Its kernel saves the projected input and the output of the scan, from which the backward
    computes convolution, steps and states again (mamba_split_conv1d_scan_combined of mamba_ssm
    e9594ce, ops/triton/ssd_combined.py). Its gated norm is outside of the kernel.
    """
    tokens, element = at.tokens, at.element_bytes
    inner = tokens * (mamba.inner // at.split.tp) * element
    yield "mixer projection", tokens * mixer_width(at, mamba) * element
    yield "scan output", inner
    yield "gated output", inner
    if needs_input(at.run.runtime.adapters, "mixer_out"):
        yield "mixer output", _linear_input(at, inner)
    yield "group norms' statistics", 4 * tokens * rank_groups(at, mamba)


def _delta_parts(at: RankLayer, delta: DeltaNet) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) that a gated delta net saves.

    Input of the convolution, gate, decay and step are views of the projected input. Queries and
    keys are saved normed and, if there are more value heads, repeated. The kernel saves its inputs
    and one triangular matrix per chunk and head (Megatron-Core d98e8a64, core/ssm/gated_delta_net;
    flash-linear-attention bc3b101, ops/gated_delta_rule).
    """
    tokens, element, tp = at.tokens, at.element_bytes, at.split.tp
    heads, inner = delta.value_heads // tp, tokens * (delta.inner // tp) * element
    yield "mixer projection", tokens * (delta.projected // tp) * element
    yield "normed keys", tokens * 2 * delta.keys // tp * element
    if delta.value_heads > delta.key_heads:
        yield "repeated keys", tokens * 2 * heads * delta.key_width * element
    yield "values", inner
    yield "chunk matrices", tokens * heads * delta.chunk * element
    yield "delta output", inner
    # decay in fp32 before and after its sum over a chunk, and step
    yield "decays", tokens * heads * (8 + element)
    if "gdn_norm_out" not in at.split.modules:
        yield "output gate", inner
        yield "normed output", inner
    if needs_input(at.run.runtime.adapters, "mixer_out"):
        yield "mixer output", _linear_input(at, inner)


def rank_groups(at: RankLayer, mamba: Mamba) -> int:
    """Return the groups of a mixer per tensor rank; context ranks copy groups to have one each."""
    return max(mamba.groups // at.split.tp, at.split.cp if at.split.cp > 1 else 0)


def mixer_width(at: RankLayer, mamba: Mamba) -> int:
    """Return the width of a mixer's projected input on a tensor rank, with copied groups."""
    heads = mamba.heads // at.split.tp
    return 2 * heads * mamba.width + heads + 2 * rank_groups(at, mamba) * mamba.state


def scan_bytes(at: RankLayer, mamba: Mamba) -> tuple[int, int]:
    """Return the transient bytes of a mixer's (forward, backward).

    The forward holds the states of all chunks in fp32 and in 16 bits, the products of C and B
    within chunks, the convolution's output, and the steps of all heads twice. The backward computes
    them again and adds the gradients of the states, of the projected input, and of the convolution
    (mamba_ssm e9594ce, ops/triton/ssd_combined.py).
    """
    tokens, element = at.tokens, at.element_bytes
    heads, groups = mamba.heads // at.split.tp, rank_groups(at, mamba)
    states = 4 * math.ceil(tokens / mamba.chunk) * heads * mamba.width * mamba.state
    convolved = tokens * (heads * mamba.width + 2 * groups * mamba.state) * element
    products = 4 * tokens * mamba.chunk * groups
    forward = states * (4 + element) // 4 + products + convolved + 8 * tokens * heads
    gradients = 2 * states + tokens * mixer_width(at, mamba) * element + 2 * convolved
    return forward, forward + gradients


def mixer_bytes(at: RankLayer) -> tuple[int, int]:
    """Return the transient bytes of a layer's recurrence or sparse attention (forward, backward).

    (0, 0) for layers with other attention. A delta rule holds the states of all chunks and three
    tensors of the size of its values; the backward holds them again with their gradients
    (flash-linear-attention bc3b101, ops/gated_delta_rule/chunk.py).
    """
    mixer, attention = at.layer.recurrent, at.layer.attention
    if mixer is None:
        if attention is None or attention.indexer is None:
            return 0, 0
        return sparse_bytes(at, attention)
    if isinstance(mixer, Mamba):
        return scan_bytes(at, mixer)
    assert isinstance(mixer, DeltaNet), "Megatron-LM has no other mixers"
    tokens, element = at.tokens, at.element_bytes
    heads, values = mixer.value_heads // at.split.tp, mixer.value_width
    states = math.ceil(tokens / mixer.chunk) * heads * mixer.key_width * values * element
    forward = states + 3 * tokens * heads * values * element
    return forward, 3 * forward


def _linear_input(at: RankLayer, size_bytes: int) -> int:
    """Return the saved bytes of a GEMM's input, which is quantised if GEMMs run in low precision.

    Transformer Engine then saves only the low-precision copy, for the weight gradient.

    size_bytes : size of the unquantised input.
    """
    precision = at.precision
    if not precision.low_precision:
        return size_bytes
    return math.ceil(size_bytes // precision.element_bytes * precision.low_bytes)


def _expert_input(at: RankLayer, size_bytes: int) -> int:
    """Return the saved bytes of an expert GEMM's input.

    Grouped GEMMs in low precision save two copies, one quantised by rows and one by columns.

    size_bytes : size of the unquantised input.
    """
    grouped = at.run.runtime.experts.grouped
    return _linear_input(at, size_bytes) * (2 if at.precision.low_precision and grouped else 1)


def _attention_parts(at: RankLayer) -> Iterator[tuple[str, int]]:
    run, attention, tp = at.run, attention_of(at), at.split.tp
    recomputed = at.split.modules
    tokens, element = at.tokens, at.element_bytes
    heads, groups, width = attention.heads, attention.kv_heads, attention.width
    latent = attention.latent
    if attention.indexer is not None and latent is not None:
        yield from _sparse_parts(at, attention, attention.indexer, latent)
        return
    if latent is None:
        if copied_qkv_bytes(at):
            yield "query", tokens * width * (heads // tp) * element
            yield "key", tokens * width * groups // tp * element
            yield "value", tokens * width * groups // tp * element
        else:
            normed = tokens * width * (heads + groups) // tp
            if attention.head_norms == "all":
                # Operators save queries and keys in fp32, and normed before the weight
                # (Megatron-Bridge 067f987, models/minimax_m2); values are copied below.
                yield "queries and keys in fp32", 4 * normed
                yield "normed queries and keys", normed * element
                yield "gate", attention.gated * tokens * width * heads // tp * element
            else:
                queries = (1 + attention.gated) * heads
                yield "qkv", tokens * width * (queries + 2 * groups) // tp * element
        if attention.head_norms != "none":
            yield "query norm", tokens * width * (heads // tp) * element
            yield "key norm", tokens * width * groups // tp * element
            # values, until then a view of qkv, are copied
            yield "values", tokens * width * groups // tp * element
            vectors = at.layer.norm_vectors * 4
            yield "head norms' statistics", tokens * (heads + groups) // tp * vectors
    else:
        query_rank = latent.query_rank or 0
        narrow = query_rank + latent.kv_rank
        yield "query latent", tokens * query_rank * element
        yield "key-value latent", tokens * (latent.kv_rank + latent.rotary_width) * element
        if attention.head_norms != "none":
            yield "latent norms", _linear_input(at, tokens * narrow * element)
        if "mla_up_proj" not in recomputed:
            for name, each in (
                ("query", width),
                ("key", width),
                ("value", attention.value_width),
            ):
                yield name, tokens * (heads // tp) * each * element
    if run.model.positions == "rotary" and not run.kernels.fused_rotary:
        yield "rotary factors", _rotary_factors(at, attention)
    output = tokens * (heads // tp) * attention.value_width * element
    if "core_attn" in recomputed:
        yield "attention output", output
        return
    kernel = run.kernels.attention
    if kernel in ("unfused", "local"):
        yield "attention output", _linear_input(at, output)
        number = score_count(at)
        yield "scores", number * element
        if attention.dropout > 0:
            # the scores after dropout, and one mask byte each
            yield "scores after dropout", number * element
            yield "scores' mask", number
        return
    # FlashAttention's output is copied into the layout of the following GEMM
    yield "attention output", output
    # The kernel saves its own output, and the following GEMM the copy that it reads. With
    # all-to-all CP the copy is the tensor received from the other ranks. With gathered keys the
    # kernel's own output consists of two halves.
    copied = kernel == "flash" or at.precision.low_precision or at.split.cp_kind != "ring"
    if attention.gated:
        # the gate, copied out of the projected input, and the output before and after it
        if kernel == "flash" or at.split.cp_kind != "ring":
            yield "attention output's copy", output
        yield "output gate", output
        yield "gated output", _linear_input(at, output)
    elif copied and needs_input(run.runtime.adapters, "projection"):
        yield "attention output's copy", _linear_input(at, output)
    # the logarithm of each row's sum, in fp32
    yield "softmax statistics", tokens * (heads // tp) * 4


def _sparse_parts(
    at: RankLayer, attention: Attention, indexer: Indexer, latent: LatentAttention
) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) that sparse attention saves with cuDNN's kernels.

    Queries are multiplied by the weights that expand keys, so that all heads attend to the
    compressed keys; the output is expanded to values after attention. The loss of the indexer is
    differentiated in the forward, which saves the gradients of its inputs (Megatron-Core d98e8a64,
    core/transformer/experimental_attention_variant: absorbed_mla.py, dsa.py,
    dsa_cudnn_kernels.py).
    """
    tokens, own, element, tp = at.tokens, at.sequence_parallel_tokens, at.element_bytes, at.split.tp
    recomputed, heads = at.split.modules, attention.heads // tp
    query_rank, narrow = latent.query_rank or 0, latent.kv_rank + latent.rotary_width
    yield "query latent", own * query_rank * element
    yield "key-value latent", own * narrow * element
    yield "latent norms", _linear_input(at, own * query_rank * element)
    if "mla_up_proj" in recomputed:
        yield "normed keys", tokens * narrow * element
    else:
        yield "query", tokens * heads * attention.width * element
        yield "absorbed query", tokens * heads * narrow * element
        yield "key", tokens * narrow * element
        yield "rotary factors", _rotary_factors(at, attention)
    output = tokens * heads * attention.value_width * element
    yield "attention output", _linear_input(at, output)
    if "core_attn" in recomputed:
        return
    cp = at.split.cp
    if cp > 1:
        # in the order of the sequence
        yield "gathered keys", cp * tokens * narrow * element
    # the part of the weights that expands values, copied
    yield "value weights", heads * attention.value_width * latent.kv_rank * element
    # views of the output of whole tiles
    yield "latent output", tokens * _tile_heads(heads) * latent.kv_rank * element
    yield "softmax statistics", tokens * _tile_heads(heads) * 4
    yield "chosen keys", tokens * min(indexer.topk, at.run.seq_length) * 4
    if indexer.reused or not indexer.trained:
        return
    if own < tokens:
        yield "indexer input", tokens * (at.layer.hidden + query_rank) * element
    yield "rotary factors", _rotary_factors(at, attention)
    yield "indexer keys", tokens * (cp * indexer.width * element + 8)
    inner = indexer.heads * (indexer.width + 1) + cp * indexer.width
    yield "indexer gradients", tokens * inner * element


def _rotary_factors(at: RankLayer, attention: Attention) -> int:
    """Return the bytes of cosines and sines that a layer makes for queries and for keys."""
    return 4 * at.run.seq_length // at.split.cp * attention.rotary_width * at.element_bytes


def _tile_heads(heads: int) -> int:
    """Return the heads that sparse attention computes for a rank: whole tiles of 64."""
    return -(-heads // 64) * 64


_MOST_SCORES = 2**30
_MOST_SCRATCH = 2**31
"""Largest bytes of the scores of one call of the indexer, and of the work area of its choice."""


def sparse_bytes(at: RankLayer, attention: Attention) -> tuple[int, int]:
    """Return the transient bytes of sparse attention (forward, backward).

    The forward holds the scores of the indexer in fp32, two integers for each in its choice, and
    its queries three times. The backward holds the gradients of output and absorbed queries, and
    two further copies each of queries, output, its gradient and chosen keys: one row is added to
    all, and rows without keys are left out (Megatron-Core d98e8a64, dsa_cudnn_kernels.py).
    """
    indexer, latent, tokens = attention.indexer, attention.latent, at.tokens
    assert indexer is not None, "asked of sparse attention alone"
    assert latent is not None, "only latent attention is sparse"
    forward, element = 0, at.element_bytes
    if not indexer.reused:
        scores = 4 * tokens * at.run.seq_length
        forward = min(scores, _MOST_SCORES) + min(2 * scores, _MOST_SCRATCH)
        forward += 3 * tokens * indexer.heads * indexer.width * element
    heads, cp = attention.heads // at.split.tp, at.split.cp
    narrow = latent.kv_rank + latent.rotary_width
    if cp > 1:
        # keys as gathered and in order, and in the backward their gradients
        forward += cp * tokens * narrow * element
    gathered = 2 * cp * tokens * narrow * element if cp > 1 else 0
    copied = 2 * (narrow + 2 * latent.kv_rank) + narrow
    widths = heads * latent.kv_rank + _tile_heads(heads) * copied
    chosen = 8 * min(indexer.topk, at.run.seq_length)
    return forward, tokens * (widths * element + chosen) + gathered


def copied_qkv_bytes(at: RankLayer) -> int:
    """Return the bytes of a layer's queries, keys and values if saved as copies, else 0.

    FlashAttention reads three separate tensors, so Transformer Engine copies them out of the output
    of the single QKV GEMM, which is freed after attention. Normed queries and keys keep that
    output, and ring attention uses separate buffers.
    """
    attention = at.layer.attention
    if attention is None or at.run.kernels.attention != "flash" or at.split.cp > 1:
        return 0
    if attention.latent is not None or attention.gated or attention.head_norms != "none":
        return 0
    width = attention.width * (attention.heads + 2 * attention.kv_heads)
    return at.tokens * width // at.split.tp * at.element_bytes


def routing_skew(at: RankLayer) -> float:
    """Return the routed tokens of the busiest expert-parallel rank over the mean of the ranks.

    The value is that of the worst step of a run, unless the run sets `experts.skew`. It is 1 for
    dense layers and if the rank holds all experts.
    """
    experts, ep = at.layer.experts, at.split.ep
    if experts is None or ep == 1:
        return 1.0
    if at.run.runtime.experts.skew is not None:
        return at.run.runtime.experts.skew
    return worst_skew(alone=experts.number == ep, steps=at.run.steps)


def routed_tokens(at: RankLayer) -> int:
    """Return the tokens that the busiest rank's experts process per micro-batch.

    A token counts once per expert that it is routed to. Raises AssertionError for a dense layer.
    """
    experts, kernels = at.layer.experts, at.run.runtime.experts
    assert experts is not None, "asked of mixtures alone"
    mean = at.sequence_parallel_tokens * at.split.etp * experts.per_token
    share = processed_share(routing_skew(at), capacity=kernels.capacity, padded=kernels.padded)
    return math.ceil(mean * share)


def _mlp_parts(at: RankLayer, width: int, name: str = "mlp") -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) that a dense MLP or shared expert saves."""
    element = at.element_bytes
    elements = at.tokens * (width // at.split.tp)
    yield f"{name} fc1 output", at.layer.gates * elements * element
    if needs_input(at.run.runtime.adapters, "fc2"):
        yield f"{name} activation", _linear_input(at, elements * element)
    if at.layer.gates > 1 and not at.run.kernels.fused_gate:
        # silu of the gate is a separate tensor
        yield f"{name} gate", elements * element


def _expert_parts(at: RankLayer) -> Iterator[tuple[str, int]]:
    run, split, element = at.run, at.split, at.element_bytes
    experts, kernels, quirks = at.layer.experts, run.runtime.experts, run.kernels.quirks
    adapters, recomputed = run.runtime.adapters, split.modules
    assert experts is not None, "asked of mixtures alone"
    hidden = at.layer.routed_width
    if "moe" in recomputed:
        return
    if experts.latent is not None:
        # input of the projection back to the hidden size; that of the first one is saved above
        yield "expert latents", at.sequence_parallel_tokens * hidden * element
    routed = routed_tokens(at)
    inner = routed * (experts.width // split.etp) * element
    if needs_input(adapters, "expert_fc1"):
        yield "expert input", _expert_input(at, routed * hidden * element)
    if kernels.dispatcher == "allgather" and split.etp > 1 and quirks.regathered_experts:
        yield "expert input, gathered", routed * hidden * element
    yield "expert fc1 output", at.layer.gates * inner
    if "moe_act" not in recomputed:
        if needs_input(adapters, "expert_fc2"):
            yield "expert activation", _expert_input(at, inner)
        one_kernel = kernels.fused_weighting or (kernels.grouped and quirks.compiled_experts)
        if kernels.grouped and quirks.saved_expert_output:
            # the output is weighted in the combine, whose backward needs it
            yield "expert output", routed * hidden * element
        elif not one_kernel:
            yield "expert product", inner
    yield "router", at.sequence_parallel_tokens * experts.number * 9
    if experts.shared_width and "shared_experts" not in recomputed:
        yield from _mlp_parts(at, experts.shared_width, "shared expert")


def adapter_saved_bytes(at: RankLayer) -> int:
    """Return the saved bytes of a layer's LoRA adapters: outputs of A, and inputs if with dropout.

    The dropout mask differs between adapters, so each saves a copy of its input and one mask byte
    per element.
    """
    adapters = at.run.runtime.adapters
    if adapters is None:
        return 0
    element, total = at.element_bytes, 0
    weights: tuple[Weight, ...] = (*mixer_weights(at), *mlp_weights(at))
    for weight in weights:
        number = len(adapter_widths(at, weight))
        if not number:
            continue
        tokens = routed_tokens(at) if weight.expert else at.tokens
        each = adapters.rank * element
        if adapters.dropout:
            each += weight.shape[1] * (element + 1)
        total += number * tokens * each
    return total


def layer_saved_bytes(at: RankLayer) -> int:
    """Return the saved activation bytes of one layer that is not fully recomputed."""
    return sum(size for _, size in saved_parts(at))


def chunk_layers(run: Run, chunk: Chunk) -> list[RankLayer]:
    """Return the layers of a chunk; those of MTP follow the last layer, in whichever chunk."""
    layers = [run.rank_layers[layer] for layer in chunk.layers]
    return layers + [*run.mtp_layers] * chunk.mtp


def kept_parts(run: Run, layers: Sequence[RankLayer]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yield the (part, device bytes) pairs that each layer of a chunk keeps until its backward."""
    known: dict[int, tuple[tuple[str, int], ...]] = {}
    for place, at in enumerate(layers):
        if at.offloaded:
            yield ()
        elif at.split.recompute == "full":
            # a recompute unit of layers saves only the input of its first layer
            starts = place % at.split.recompute_unit == 0
            yield (("layer input", stream_bytes(run)),) if starts else ()
        else:
            if id(at) not in known:
                known[id(at)] = tuple(saved_parts(at))
            yield known[id(at)]


def chunk_parts(run: Run, chunk: Chunk) -> Iterator[tuple[str, int]]:
    """Yield (part, device bytes) of one micro-batch's saved activations in a model chunk.

    The head's logits are excluded; `autopar.price.peak` counts them.
    """
    if chunk.embeds and run.model.dropout > 0:
        yield "dropout mask", run.sequence_parallel_tokens * run.model.hidden
    for parts in kept_parts(run, chunk_layers(run, chunk)):
        yield from parts
    if chunk.head:
        yield from head_parts(run)


def head_parts(run: Run) -> Iterator[tuple[str, int]]:
    """Yield (part, device bytes) of what one micro-batch saves for final norm and head."""
    yield "norm input", stream_bytes(run)
    if run.runtime.adapters is None:
        # the head's input is saved for the weight gradient of the head
        yield "norm output", stream_bytes(run)


def chunk_saved_bytes(run: Run, chunk: Chunk) -> int:
    """Return the device bytes that one micro-batch saves in a model chunk, without logits."""
    return sum(size for _, size in chunk_parts(run, chunk))
