"""What a layer saves for its backward, by part, in bytes of one micro-batch on one rank.

Korthikanti et al. (arXiv 2205.05198, section 4) count these tensors for dense layers with attention
that is not fused; here are the other kernels, MLA and experts as well. States, and how many
micro-batches are live at once, are other files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.price.parameters import Weight, adapter_widths, attention_weights, mlp_weights
from autopar.run.launch import Chunk, Launch
from autopar.training.adapters import needs_input
from autopar.training.mixtures import taken_share, worst_skew
from autopar.training.offload import OffloadModule


def scores(launch: Launch) -> int:
    """Return the elements of one layer's attention scores on a rank: b*n/t*(s/c)*s."""
    degrees = launch.degrees
    heads = launch.model.attention.heads // degrees.tp
    return launch.micro_batch * heads * (launch.seq // degrees.cp) * launch.seq


def input_bytes(launch: Launch) -> int:
    """Return the input of a layer on a rank, T'*h*e: all that full recomputation keeps of it."""
    return launch.scattered_tokens * launch.model.hidden * launch.precision.element_bytes


def saved_parts(launch: Launch, *, experts: bool) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) of everything that a layer keeps on the device, not recomputed whole."""
    for name, left in left_parts(launch, experts=experts):
        if left:
            yield name, left


def left_parts(launch: Launch, *, experts: bool) -> Iterator[tuple[str, int]]:
    """Yield the same, with those of which nothing is left: in the order of the layer's modules."""
    gone = dict(_offloaded_parts(launch, experts=experts))
    for index, (name, size) in enumerate(_layer_parts(launch, experts=experts)):
        yield name, size - gone.get(index, 0)


_OFFLOADED_PARTS: dict[OffloadModule, tuple[str, ...]] = {
    # what autograd saves inside a module, its input among it
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
    # what attention made is the next product's input, so it goes with both alone
    "attn_proj": ("attention output", "attention output's copy"),
    "mlp_norm": ("norm input",),
    "expert_fc1": ("expert input",),
    "moe_act": ("expert fc1 output",),
}


def _offloaded_parts(launch: Launch, *, experts: bool) -> Iterator[tuple[int, int]]:
    """Yield (place among a layer's parts, bytes) of what waits on the host."""
    for index, _, size in offloaded_parts(launch, experts=experts):
        yield index, size


def offloaded_parts(launch: Launch, *, experts: bool) -> Iterator[tuple[int, OffloadModule, int]]:
    """Yield (place among a layer's parts, module, bytes) of what waits on the host.

    Norms that are one kernel with the product behind them are no modules of their own: in front of
    a dense MLP, and of attention without latents (Megatron-Core's layer specs of Transformer
    Engine).
    """
    offload, model = launch.offload, launch.model
    if not offload.modules:
        return
    chosen = set(offload.modules)
    if model.attention.latent is None and not launch.software.local_layers:
        chosen.discard("attn_norm")
    if not experts and not launch.software.local_layers:
        chosen.discard("mlp_norm")
    ordered = sorted(chosen)
    least = offload.least_elements * launch.precision.element_bytes
    halves = 0
    for index, (name, size) in enumerate(_layer_parts(launch, experts=experts)):
        halves += name == "norm input"
        module = next(
            (
                module
                for module in ordered
                if name in _OFFLOADED_PARTS[module]
                and not (module in ("attn_norm", "qkv_linear") and halves > 1)
                and not (module == "mlp_norm" and halves < 2)
            ),
            None,
        )
        if module is not None and size >= least:
            yield index, module, math.floor(size * offload.fraction)


def offloaded_bytes(launch: Launch, *, experts: bool, layer: int = 0) -> int:
    """Return what of a layer and micro-batch waits on the host, in bytes of a rank."""
    if layer < launch.offload.layers:
        return sum(size for _, size in _layer_parts(launch, experts=experts))
    return sum(size for _, size in _offloaded_parts(launch, experts=experts))


def _layer_parts(launch: Launch, *, experts: bool) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) of everything that a layer saves, wherever it waits."""
    recomputed, adapters = launch.recompute.modules, launch.adapters
    whole = input_bytes(launch)
    yield "norm input", whole
    if "layernorm" not in recomputed and needs_input(adapters, "query", "key", "value"):
        yield "norm output", _linear_input(launch, whole)
    yield from _attention_parts(launch)
    if launch.model.hidden_dropout > 0:
        # a byte for each element; one mask behind attention, one behind the MLP
        yield "dropout mask", launch.scattered_tokens * launch.model.hidden
    yield "norm input", whole
    if "layernorm" not in recomputed and needs_input(adapters, "fc1", "expert_fc1"):
        # a router, which is not of 8 bits, needs it as it is
        yield "norm output", whole if experts else _linear_input(launch, whole)
    if adapters is not None:
        yield "adapters", adapter_saved_bytes(launch, experts=experts)
    if experts:
        yield from _expert_parts(launch)
    elif "mlp" not in recomputed:
        yield from _mlp_parts(launch, launch.model.ffn)
    if launch.model.hidden_dropout > 0:
        yield "dropout mask", launch.scattered_tokens * launch.model.hidden
    behind = max(0, launch.model.norms - 2)
    if behind:
        # what attention and MLP put out; the sums that take their outputs keep nothing
        yield "inputs of norms behind", behind * whole
    # mean and reciprocal deviation of each norm in fp32
    yield "norm statistics", 8 * (2 + behind) * launch.tokens


def _linear_input(launch: Launch, size_bytes: int) -> int:
    """Return the bytes of a tensor that nothing but a product needs: with 8-bit products its copy.

    Transformer Engine saves the copy that the weight's gradient takes, and lets the tensor go.
    """
    precision = launch.precision
    if not precision.low:
        return size_bytes
    return math.ceil(size_bytes // precision.element_bytes * precision.low_bytes)


def _expert_input(launch: Launch, size_bytes: int) -> int:
    """Return the same of products of experts: grouped ones keep a copy by rows and by columns."""
    experts = launch.model.experts
    grouped = experts is not None and experts.grouped
    return _linear_input(launch, size_bytes) * (2 if launch.precision.low and grouped else 1)


def _attention_parts(launch: Launch) -> Iterator[tuple[str, int]]:
    attention, tp = launch.model.attention, launch.degrees.tp
    recomputed = launch.recompute.modules
    tokens, element = launch.tokens, launch.precision.element_bytes
    heads, groups, width = attention.heads, attention.groups, attention.width
    latent = attention.latent
    if latent is None:
        if copied_qkv_bytes(launch):
            yield "query", tokens * width * (heads // tp) * element
            yield "key", tokens * width * groups // tp * element
            yield "value", tokens * width * groups // tp * element
        else:
            yield "qkv", tokens * width * (heads + 2 * groups) // tp * element
        if attention.head_norms:
            yield "query norm", tokens * width * (heads // tp) * element
            yield "key norm", tokens * width * groups // tp * element
            # values, a part of qkv till then, are copied to stand beside them
            yield "values", tokens * width * groups // tp * element
            vectors = launch.model.norm_tensors * 4
            yield "head norms' statistics", tokens * (heads + groups) // tp * vectors
    else:
        query_rank = latent.query_rank or 0
        narrow = query_rank + latent.key_value_rank
        yield "query latent", tokens * query_rank * element
        yield "key-value latent", tokens * (latent.key_value_rank + latent.rotary_width) * element
        if attention.head_norms:
            yield "latent norms", _linear_input(launch, tokens * narrow * element)
        if "mla_up_proj" not in recomputed:
            for name, each in (
                ("query", attention.query_width),
                ("key", attention.query_width),
                ("value", latent.value_width),
            ):
                yield name, tokens * (heads // tp) * each * element
    if launch.model.positions == "rotary" and not launch.model.fused_rotary:
        # cosines and sines that queries, and keys, are multiplied with, made again by each layer
        yield (
            "rotary factors",
            4 * (launch.seq // launch.degrees.cp) * launch.model.rotary_width * element,
        )
    output = tokens * (heads // tp) * attention.value_width * element
    if "core_attn" in recomputed:
        yield "attention output", output
        return
    kernel = launch.software.attention
    if kernel in ("unfused", "local"):
        yield "attention output", _linear_input(launch, output)
        number = scores(launch)
        yield "scores", number * element
        if attention.dropout > 0:
            # the weights after dropout, and a byte of mask each
            yield "scores after dropout", number * element
            yield "scores' mask", number
        return
    # FlashAttention's output is copied into the layout of the product behind it
    yield "attention output", output
    # the kernel keeps its own output, and the product behind it the copy that it takes; where heads
    # are exchanged, that is what comes back from the other ranks, and beside gathered keys the
    # kernel's own output is of two halves
    degrees = launch.degrees
    copied = (
        kernel == "flash"
        or launch.precision.low
        or degrees.heads_exchanged
        or degrees.keys_gathered
    )
    if copied and needs_input(launch.adapters, "projection"):
        yield "attention output's copy", _linear_input(launch, output)
    # the logarithm of each row's sum, in fp32
    yield "softmax statistics", tokens * (heads // tp) * 4


def copied_qkv_bytes(launch: Launch) -> int:
    """Return the queries, keys and values of a layer where they are saved as copies, else 0.

    FlashAttention takes sequences apart, so Transformer Engine copies the three out of what their
    one product made, which is freed behind attention. Normed queries and keys keep it, and rings of
    context ranks have buffers of their own.
    """
    attention = launch.model.attention
    if launch.software.attention != "flash" or launch.degrees.cp > 1:
        return 0
    if attention.latent is not None or attention.head_norms:
        return 0
    width = attention.width * (attention.heads + 2 * attention.groups)
    return launch.tokens * width // launch.degrees.tp * launch.precision.element_bytes


def routing_skew(launch: Launch) -> float:
    """Return the tokens of a rank's experts over the mean of all ranks, at the worst step.

    A rank that has all experts has all tokens.
    """
    experts, degrees = launch.model.experts, launch.degrees
    if experts is None or degrees.ep == 1:
        return 1.0
    if experts.skew is not None:
        return experts.skew
    return worst_skew(alone=experts.number == degrees.ep, steps=launch.steps)


def routed_tokens(launch: Launch) -> int:
    """Return L, the tokens of the busiest rank's experts, of each as often as it is routed."""
    experts = launch.model.experts
    assert experts is not None
    mean = launch.scattered_tokens * launch.degrees.etp * experts.per_token
    share = taken_share(
        routing_skew(launch), capacity=experts.capacity, padded=experts.padded_capacity
    )
    return math.ceil(mean * share)


def _mlp_parts(launch: Launch, ffn: int, name: str = "mlp") -> Iterator[tuple[str, int]]:
    """Yield what an MLP on all tokens saves."""
    model, element = launch.model, launch.precision.element_bytes
    elements = launch.tokens * (ffn // launch.degrees.tp)
    yield f"{name} fc1 output", model.gates * elements * element
    if needs_input(launch.adapters, "fc2"):
        yield f"{name} activation", _linear_input(launch, elements * element)
    if model.gated and not model.fused_gate:
        # silu of the gate is a tensor of its own
        yield f"{name} gate", elements * element


def _expert_parts(launch: Launch) -> Iterator[tuple[str, int]]:
    model, degrees, software = launch.model, launch.degrees, launch.software
    experts, element = model.experts, launch.precision.element_bytes
    recomputed = launch.recompute.modules
    assert experts is not None
    hidden = model.hidden
    if "moe" in recomputed:
        return
    routed = routed_tokens(launch)
    inner = routed * (experts.ffn // degrees.etp) * element
    if needs_input(launch.adapters, "expert_fc1"):
        yield "expert input", _expert_input(launch, routed * hidden * element)
    if experts.dispatcher == "allgather" and degrees.etp > 1 and software.regathered_experts:
        yield "expert input, gathered", routed * hidden * element
    yield "expert fc1 output", model.gates * inner
    if "moe_act" not in recomputed:
        if needs_input(launch.adapters, "expert_fc2"):
            yield "expert activation", _expert_input(launch, inner)
        one_kernel = experts.fused_weighting or (experts.grouped and software.compiled_experts)
        if experts.grouped and software.saved_expert_output:
            # the output is weighted where it is put back, which needs it again
            yield "expert output", routed * hidden * element
        elif not one_kernel:
            yield "expert product", inner
    yield "router", launch.scattered_tokens * experts.number * 9
    if experts.shared_ffn and "shared_experts" not in recomputed:
        yield from _mlp_parts(launch, experts.shared_ffn, "shared expert")


def adapter_saved_bytes(launch: Launch, *, experts: bool) -> int:
    """Return what a layer's adapters save: A's output for B, and with dropout their own inputs.

    A copy and a byte of mask an element each, since every adapter drops others.
    """
    adapters = launch.adapters
    if adapters is None:
        return 0
    element, total = launch.precision.element_bytes, 0
    weights: tuple[Weight, ...] = (
        *attention_weights(launch),
        *mlp_weights(launch, experts=experts),
    )
    for weight in weights:
        number = len(adapter_widths(launch, weight))
        if not number:
            continue
        tokens = routed_tokens(launch) if weight.expert else launch.tokens
        each = adapters.rank * element
        if adapters.dropout:
            each += weight.shape[1] * (element + 1)
        total += number * tokens * each
    return total


def layer_saved_bytes(launch: Launch, *, experts: bool) -> int:
    """Return what one layer saves that is not recomputed as a whole."""
    return sum(size for _, size in saved_parts(launch, experts=experts))


def chunk_parts(launch: Launch, chunk: Chunk) -> Iterator[tuple[str, int]]:
    """Yield (part, bytes) of what a micro-batch saves in a chunk of the pipeline.

    The head's logits are left out: they live within one event.
    """
    model, recompute = launch.model, launch.recompute
    embeds, layers, mtp, has_head = chunk
    whole = input_bytes(launch)
    if embeds and model.hidden_dropout > 0:
        yield "dropout mask", launch.scattered_tokens * model.hidden
    kinds = [(model.expert_layers[layer], launch.of_layer(layer)) for layer in layers]
    # modules of further tokens are behind the last layer, whatever it is in
    kinds += [(model.expert_layers[-1], launch)] * mtp
    parts = {(kind, own.precision): tuple(saved_parts(own, experts=kind)) for kind, own in kinds}
    for place, (experts, own) in enumerate(kinds):
        again = place < len(layers) and _is_recomputed(launch, place)
        if place < len(layers) and layers[place] < launch.offload.layers:
            continue
        if not again:
            yield from parts[experts, own.precision]
        elif recompute.layers == "block" or place % recompute.number == 0:
            # of a unit of layers only the first one's input is kept
            yield "layer input", whole
    if has_head:
        yield "norm input", whole
        if launch.adapters is None:
            # the head's input, for the gradient of its weight
            yield "norm output", whole


def chunk_saved_bytes(launch: Launch, chunk: Chunk) -> int:
    """Return what one micro-batch saves in a chunk of the pipeline, its head's logits left out."""
    return sum(size for _, size in chunk_parts(launch, chunk))


def _is_recomputed(launch: Launch, place: int) -> bool:
    """Return whether the layer at a place of its chunk is recomputed as a whole."""
    recompute = launch.recompute
    if recompute.layers == "uniform":
        return True
    return recompute.layers == "block" and place < recompute.number
