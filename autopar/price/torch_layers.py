"""Saved activations and loss memory of torchtitan and transformers, bytes per micro-batch and rank.

Megatron-LM's layers are in `autopar.price.activations`, which also defines the symbols. The counts
are those of tensors that autograd saves: of eager layers as seen by `saved_tensors_hooks`, of
compiled layers as chosen by AOTAutograd's partitioner (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autopar.price.activations import (
    adapter_saved_bytes,
    attention_of,
    input_bytes,
    routed_tokens,
)
from autopar.run.architecture import (
    WIDEST_FLASH,
    KimiDelta,
    LightningAttention,
    ShortConvolution,
    input_matrices,
)
from autopar.run.run import RankLayer, Run
from autopar.run.strategy import Chunk
from autopar.training.adapters import Adapters, Target, needs_input

Parts = Iterator[tuple[str, int]]


def _norm(run: Run, tokens: int, width: int, *, given: bool = False, weighted: bool = True) -> int:
    """Return the saved bytes of an RMSNorm over `tokens` rows of `width` elements.

    A fused kernel saves its input and 4 bytes per row. Eager operators save the input in fp32, 4
    bytes per row, and the normed input, in fp32 in torchtitan and in 16 bits in transformers. A
    compiled layer saves equally many bytes as a fused kernel: for the second norm it saves the
    projection's output and recomputes the residual sum. Gemma multiplies weights in fp32, and takes
    a power of the mean squares, which are saved as well.

    given : True if the norm's input is counted elsewhere. weighted : False without weights.
    """
    kernels, element, wide = run.kernels, run.element_bytes, run.model.last.fp32_norms
    torchtitan = kernels.module == "torchtitan"
    own = 0 if given else tokens * width * element
    # diffusers has `torch.nn.RMSNorm`, which runs as one kernel on a GPU
    fused = run.model.has_patches or (torchtitan and kernels.fused_norms)
    fused = fused or not kernels.quirks.saved_norms
    if kernels.compiled or kernels.liger or fused:
        return own + 4 * tokens
    # the normed input is saved for the weight gradient, which a frozen weight does not have
    frozen = run.runtime.adapters is not None or not weighted
    if element == 4:
        # the input is already fp32
        return own + 4 * tokens + (0 if frozen else 4 * tokens * width)
    normed = 0 if frozen else 4 if torchtitan or wide else element
    # the fp32 tensor is a copy, so the 16-bit input is freed
    return 4 * tokens * width + (8 if wide else 4) * tokens + normed * tokens * width


def stream_element_bytes(run: Run) -> int:
    """Return the bytes per element of hidden states between layers.

    They are in fp32 where autocast runs on fp32 weights: it leaves the embedding and the residual
    sums in their type. Seen by `saved_tensors_hooks` (transformers 5.24, torch 2.13). FSDP and
    DeepSpeed cast weights before they are used.
    """
    adapters, element = run.runtime.adapters, run.element_bytes
    replicated = run.split.zero == 0 and run.runtime.states.keeper == "accelerate"
    if run.kernels.module != "transformers" or not replicated:
        return element
    stored = run.runtime.optimizer.master_bytes > 0 if adapters is None else adapters.wide
    return 4 if stored else element


def _norm_of_layer(at: RankLayer) -> int:
    if at.layer.norm != "rms" and at.run.model.has_patches:
        return _layer_norm(at, scaled=at.layer.norm == "plain")
    return _norm_of_stream(at.run, at.sequence_parallel_tokens)


def _layer_norm(at: RankLayer, *, scaled: bool) -> int:
    """Return the saved bytes of a LayerNorm: its input, and mean and deviation of each row.

    Autocast of accelerate computes it in fp32, and so do some models.

    scaled : True if its output is saved for a product with the condition, which `Layer.elementwise`
        counts in 16 bits.
    """
    element, tokens = at.element_bytes, at.sequence_parallel_tokens
    autocast = at.run.runtime.states.keeper != "deepspeed"
    each = 4 if autocast or at.layer.fp32_norms else element
    each += each - element if scaled else 0
    return tokens * (at.layer.hidden * each + 8)


def _norm_of_stream(run: Run, tokens: int) -> int:
    """Return the saved bytes of a norm of hidden states, which wide ones need no copy for."""
    hidden, kernels = run.model.hidden, run.kernels
    if stream_element_bytes(run) == run.element_bytes:
        return _norm(run, tokens, hidden)
    # the normed input in fp32 is saved for the weight gradient
    fused = kernels.compiled or kernels.liger or not kernels.quirks.saved_norms
    normed = not fused and run.runtime.adapters is None
    return 4 * tokens * (hidden * (2 if normed else 1) + 1)


def _norm_outputs(at: RankLayer, *targets: Target) -> int:
    """Return the saved bytes of a norm's output for the weight gradients of the next GEMMs.

    targets : matrices of these GEMMs, one a GEMM. They share one tensor, but autocast casts wide
        hidden states for each of them.
    """
    run, width = at.run, at.tokens * at.layer.hidden * at.element_bytes
    needed = [one for one in targets if needs_input(run.runtime.adapters, one)]
    shared = stream_element_bytes(run) == at.element_bytes or run.kernels.compiled
    return width * (min(len(needed), 1) if shared else len(needed))


def parts_without_recompute(at: RankLayer) -> Parts:
    """Yield (part, bytes) of a layer's saved activations without recomputation."""
    adapters, mlp, mixer = at.run.runtime.adapters, at.layer.mlp, at.layer.recurrent
    yield "attention norm", _norm_of_layer(at)
    # the gathered input of GEMMs is saved on every tensor rank for the weight gradients
    if isinstance(mixer, ShortConvolution):
        yield "norm output", _norm_outputs(at, "mixer_in")
        yield from _convolution(at, mixer)
    elif isinstance(mixer, LightningAttention):
        yield "norm output", _norm_outputs(at, "mixer_in", "mixer_in")
        yield from _lightning(at, mixer)
    elif isinstance(mixer, KimiDelta):
        targets: list[Target] = ["mixer_in"] * len(input_matrices(mixer))
        yield "norm output", _norm_outputs(at, *targets)
        yield from _kimi_delta(at, mixer)
    else:
        yield "norm output", _norm_outputs(at, "query", "key", "value")
        yield from _attention(at)
    if at.layer.cross_tokens:
        yield from _cross_attention(at)
    if at.layer.norms > 1 or not at.run.model.has_patches:
        # one norm of a model of images precedes attention and MLP in parallel
        yield "mlp norm", _norm_of_layer(at)
        yield "norm output", _norm_outputs(at, *_first_matrices(at))
    if at.layer.elementwise:
        size = at.sequence_parallel_tokens * at.layer.hidden * at.element_bytes
        yield "condition", at.layer.elementwise * size
    behind = max(0, at.layer.norms - 2 - (at.layer.cross_tokens > 0))
    if behind:
        # inputs of the norms after attention and MLP; the residual sums save nothing
        yield "post-norms", behind * _norm_of_layer(at)
    if adapters is not None:
        yield "adapters", adapter_saved_bytes(at)
    if at.layer.experts is not None:
        yield from _mixture(at)
    elif mlp is not None:
        yield from _mlp("mlp", at, at.tokens, mlp.width // at.split.tp)


def _first_matrices(at: RankLayer) -> tuple[Target, ...]:
    """Return the target of each GEMM that reads the output of the norm before an MLP."""
    # the dispatch copies tokens for all experts at once
    matrices: tuple[Target, ...] = ("fc1",)
    return matrices * at.layer.gates if at.layer.experts is None else (*matrices, "expert_fc1")


def _attention(at: RankLayer) -> Parts:
    attention, tp, repeated = attention_of(at), at.split.tp, at.run.kernels.repeated_heads
    tokens, element = at.tokens, at.element_bytes
    heads, own_keys = attention.heads // tp, -(-attention.kv_heads // tp)
    latent = attention.latent
    if latent is not None:
        narrow = (latent.query_rank or 0) + latent.kv_rank
        # without rotary positions, no operator saves the down projection itself
        kept = narrow + latent.rotary_width if attention.rotary else 0
        yield "latents", tokens * kept * element
        yield "latent norms", _norm(at.run, tokens, narrow, given=True) + tokens * narrow * element
        yield "query and key", 2 * tokens * heads * attention.width * element
    else:
        if attention.head_norms == "head":
            normed = tokens * (heads + own_keys)
            yield "head norms", _norm(at.run, normed, attention.width)
            if attention.value_norms:
                values = tokens * own_keys
                yield "value norms", _norm(at.run, values, attention.value_width, weighted=False)
        elif attention.head_norms == "all":
            for number in (heads, own_keys):
                yield "head norms", _norm(at.run, tokens, number * attention.width)
        kept = heads if repeated else own_keys
        yield "query", tokens * heads * attention.width * element
        yield "key", tokens * kept * attention.width * element
    values = heads if latent is not None or repeated else own_keys
    yield "value", tokens * values * _value_width(at) * element
    yield from _core(at)


def _value_width(at: RankLayer, *, result: bool = False) -> int:
    """Return the width of the values of one head that attention saves; result : of its result.

    For latent attention, transformers pads values to the width of keys where FlashAttention runs.
    Elsewhere values are a view of one tensor with the keys (5.24, integrations/flash_attention.py).
    """
    attention, kernels = attention_of(at), at.run.kernels
    if attention.latent is None or kernels.module != "transformers":
        return attention.value_width
    if not kernels.repeated_heads:
        return attention.width
    return attention.value_width + (0 if result else attention.latent.key_width)


def _cross_attention(at: RankLayer) -> Parts:
    """Yield (part, bytes) that cross-attention to the tokens of a condition saves, its norm too."""
    attention, sequences = attention_of(at), at.run.strategy.micro_batch
    others = sequences * at.layer.cross_tokens
    yield "cross norm", _layer_norm(at, scaled=False)
    yield "norm output", _norm_outputs(at, "query")
    if attention.head_norms == "all":
        for tokens, number in ((at.tokens, attention.heads), (others, attention.kv_heads)):
            yield "head norms", _norm(at.run, tokens, number * attention.width)
    yield "query", at.tokens * attention.query * at.element_bytes
    yield "key and value", others * attention.key_value * at.element_bytes
    yield from _core(at)


def _convolution(at: RankLayer, mixer: ShortConvolution) -> Parts:
    """Yield (part, bytes) that a short convolution saves.

    Its gates and channels are views of one tensor. The output is copied for the last matrix. Seen
    by `saved_tensors_hooks` (transformers 5.24, models/lfm2).
    """
    inner = at.tokens * mixer.inner * at.element_bytes
    yield "mixer projection", at.tokens * mixer.projected * at.element_bytes
    yield "gated input", inner
    yield "convolution output", inner
    if needs_input(at.run.runtime.adapters, "mixer_out"):
        yield "mixer output", inner


def _lightning(at: RankLayer, mixer: LightningAttention) -> Parts:
    """Yield (part, bytes) that lightning attention saves.

    A loop over blocks of tokens saves queries, keys and values as one tensor for one sequence, and
    copies of the operands of each product for several. Seen by `saved_tensors_hooks` (transformers
    5.24, models/minimax).
    """
    element, heads = at.element_bytes, mixer.heads
    inner = at.tokens * mixer.inner * element
    blocks = at.run.strategy.micro_batch * -(-at.run.seq_length // mixer.chunk)
    yield "mixer projection", 3 * inner
    # values are copied for both products with them
    yield "queries, keys and values", (3 if at.run.strategy.micro_batch == 1 else 4) * inner
    yield "decayed queries and keys", 2 * inner
    yield "scores", at.tokens * heads * min(mixer.chunk, at.run.seq_length) * element
    yield "states", blocks * heads * mixer.width**2 * element
    yield "mixer norm", _norm(at.run, at.tokens, mixer.inner)
    # gate, normed output and their product, the input of the last matrix
    product = needs_input(at.run.runtime.adapters, "mixer_out")
    yield "mixer output", (3 if product else 2) * inner


def _kimi_delta(at: RankLayer, mixer: KimiDelta) -> Parts:
    """Yield (part, bytes) that Kimi delta attention saves.

    Operators of transformers make decay, norm and gate in fp32 (5.24, models/kimi_linear). The
    kernels save the convolution's input; normed queries and keys, values, the decay, its sum over
    each chunk, and two matrices per chunk (fla-org/flash-linear-attention, ops/kda/chunk.py).
    """
    element, rows = at.element_bytes, at.tokens * mixer.heads
    inner = at.tokens * mixer.inner
    yield "mixer projection", 3 * inner * element
    yield "ranks", 2 * at.tokens * mixer.width * element
    # softplus: an exponential, its sum with 1, a condition and the result; then the decay twice
    yield "decay", 21 * inner
    yield "queries, keys and values", 3 * inner * element + 8 * rows
    yield "chunk matrices", 2 * rows * mixer.chunk * element
    yield "steps", rows * element
    # the norm's input, its normed and weighted results, and the gate
    yield "mixer norm", 16 * inner + 4 * rows
    yield "mixer output", inner * element


def _core(at: RankLayer) -> Parts:
    """Yield (part, bytes) that a fused attention kernel saves: its output, and 4 bytes per row.

    PyTorch's memory-efficient kernel, the only one for wide heads, also saves the mask of a window
    (ATen/native/transformers/attention.cpp, `convert_boolean_attn_mask`).
    """
    attention, run = attention_of(at), at.run
    heads = attention.heads // at.split.tp
    window = attention.window or run.seq_length
    if run.model.widest_head > WIDEST_FLASH and window < run.seq_length:
        yield "mask", run.strategy.micro_batch * run.seq_length**2 * at.element_bytes
    yield "attention output", at.tokens * heads * _value_width(at, result=True) * at.element_bytes
    yield "softmax statistics", 4 * at.tokens * heads


def _mlp(name: str, at: RankLayer, tokens: int, width: int) -> Parts:
    """Yield (name, bytes) that an MLP saves: outputs of the first GEMMs, activation, gated product.

    Compiled layers and Liger's kernel (ops/swiglu.py) recompute the activation of a gated MLP.
    """
    gates, adapters, kernels = at.layer.gates, at.run.runtime.adapters, at.run.kernels
    number = 2 * gates - (1 if (kernels.compiled or kernels.liger) and gates == 2 else 0)
    # the input of the last matrix is saved only for its weight gradient
    number -= 0 if needs_input(adapters, "expert_fc2" if name == "expert" else "fc2") else 1
    yield name, number * tokens * width * at.element_bytes


def _mixture(at: RankLayer) -> Parts:
    experts, element, hidden = at.layer.experts, at.element_bytes, at.layer.hidden
    assert experts is not None, "asked of mixtures alone"
    routed = routed_tokens(at)
    # scores in fp32, and their softmax or sigmoid
    yield "router", 8 * at.tokens * experts.number
    # in the order of experts, and in torchtitan after the dispatch
    copies = 1 if needs_input(at.run.runtime.adapters, "expert_fc1") else 0
    copies += 1 if at.run.kernels.module == "torchtitan" else 0
    yield "expert input", copies * routed * hidden * element
    yield from _mlp("expert", at, routed, experts.width // at.split.etp)
    yield "expert output", routed * hidden * element
    if experts.shared_width:
        yield from _mlp("shared expert", at, at.tokens, experts.shared_width // at.split.tp)


def gemm_outputs(at: RankLayer) -> tuple[tuple[str, int], ...]:
    """Return (name, output elements) of a layer's GEMMs in the order of its forward.

    Router and grouped expert GEMMs are excluded because torchtitan recomputes them. A GEMM with an
    adapter is followed by those of A and B.
    """
    layer, tp, tokens = at.layer, at.split.tp, at.tokens
    attention = attention_of(at)
    latent, heads = attention.latent, attention.heads // tp
    if latent is None:
        groups = -(-attention.kv_heads // tp)
        rows = [
            ("query", heads * attention.width),
            ("key", groups * attention.width),
            ("value", groups * attention.width),
        ]
    else:
        up = ("query", heads * attention.width)
        rows = [up] if latent.query_rank is None else [("query down", latent.query_rank), up]
        rows += [
            ("key-value down", latent.kv_rank + latent.rotary_width),
            ("key-value up", heads * (latent.key_width + attention.value_width)),
        ]
    rows.append(("projection", layer.hidden))
    width = _everyones_width(at)
    if width:
        inner = width // tp
        rows += [("gate", inner), ("up", inner)] if layer.gates > 1 else [("up", inner)]
        rows.append(("down", layer.hidden))
    adapters = at.run.runtime.adapters
    if adapters is not None:
        rows = [*_with_adapters(adapters, rows)]
    return tuple((name, tokens * size) for name, size in rows)


_TARGETS: Mapping[str, Target] = {
    "query": "query", "key": "key", "value": "value", "query down": "query",
    "key-value down": "key", "key-value up": "key", "projection": "projection",
    "gate": "fc1", "up": "fc1", "down": "fc2",
}  # fmt: skip
"""GEMM of `gemm_outputs` -> target of its adapter."""
_B = " adapter B"


def _with_adapters(
    adapters: Adapters, rows: Sequence[tuple[str, int]]
) -> Iterator[tuple[str, int]]:
    """Yield GEMMs (name, outputs) with those of their adapters; queries, keys, values if fused."""
    if adapters.fused and rows[1][0] == "key":
        rows = [("query", sum(size for _, size in rows[:3])), *rows[3:]]
    for name, size in rows:
        yield name, size
        if _TARGETS[name] in adapters.targets:
            yield f"{name} adapter A", adapters.rank
            yield f"{name}{_B}", size


def _everyones_width(at: RankLayer) -> int:
    """Return the width of the dense MLP or of the shared expert; 0 without either."""
    mlp, experts = at.layer.mlp, at.layer.experts
    if experts is not None:
        return experts.shared_width
    return 0 if mlp is None else mlp.width


def _by_op(at: RankLayer) -> Parts:
    """Yield (part, bytes) that a layer saves with torchtitan's selective `op` recomputation.

    Saved are the outputs of attention, of every second GEMM, and of communication. Eager layers
    also save outputs that no backward needs, such as that of the last GEMM.
    """
    element, compiled = at.element_bytes, at.run.kernels.compiled
    yield "layer input", input_bytes(at)
    rows = gemm_outputs(at)
    summed = rows[-1][0].removesuffix(_B)
    for place, (name, elements) in enumerate(rows):
        # no backward needs the terms of a sum: of the residual, or with the output of B
        unneeded = name == summed or name.endswith(_B)
        if place % 2 == 0 and not (compiled and unneeded):
            yield f"{name} output", elements * element
    yield from _core(at)
    if at.split.splits_sequence:
        # sums over tensor ranks after attention and MLP; no backward needs the second
        yield "scattered sums", (1 if compiled else 2) * input_bytes(at)
    if at.layer.experts is not None and at.split.ep > 1:
        # tokens of dispatch and of combine
        yield "exchanged tokens", 2 * routed_tokens(at) * at.layer.hidden * element


def _input_bytes(at: RankLayer) -> int:
    return input_bytes(at) * stream_element_bytes(at.run) // at.element_bytes


def layer_saved_bytes(at: RankLayer) -> int:
    """Return the bytes that a layer saves with its recomputation setting."""
    if at.split.recompute == "op":
        return sum(size for _, size in _by_op(at))
    if at.split.recompute == "full":
        return _input_bytes(at)
    return sum(size for _, size in parts_without_recompute(at))


def chunk_saved_bytes(run: Run, chunk: Chunk) -> int:
    """Return the bytes that a micro-batch saves in a chunk's layers, without last norm and loss."""
    known: dict[int, int] = {}
    total = 0
    for layer in chunk.layers:
        at = run.rank_layers[layer]
        if id(at) not in known:
            known[id(at)] = layer_saved_bytes(at)
        total += known[id(at)]
    return total


def recompute_bytes(at: RankLayer) -> int:
    """Return the bytes that recomputation allocates in the backward of a layer."""
    if not at.split.recompute:
        return 0
    whole = sum(size for _, size in parts_without_recompute(at))
    if at.split.recompute == "op":
        # saved outputs are not recomputed
        kept = sum(size for _, size in _by_op(at))
        return max(whole - kept, 0)
    return max(whole - _input_bytes(at), 0)


def backward_gradients_bytes(at: RankLayer) -> int:
    """Return the peak bytes of a layer's backward in addition to its saved activations.

    The peak is in its MLP, or in a recurrence. In an MLP, live are the gradients of the gated
    product, of the activation and of the other GEMM's output, and the weight gradient of the last
    matrix, whose input is already freed. The output of a recomputed layer is also live.
    """
    layer, split, mixture = at.layer, at.split, at.layer.experts
    if mixture is not None:
        routed = routed_tokens(at) * mixture.width // split.etp
        inner = max(routed, at.tokens * mixture.shared_width // split.tp)
        matrix = mixture.number // split.ep * mixture.width // split.etp
    else:
        width = _everyones_width(at)
        inner, matrix = at.tokens * width // split.tp, width // split.tp
    residual = 2 if at.split.recompute else 1
    if at.run.runtime.adapters is not None:
        matrix = 0  # frozen: it has no gradient
    # of three activation gradients (two without a gate), one replaces the saved product
    sums = residual * at.tokens * layer.hidden * stream_element_bytes(at.run)
    of_mlp = layer.gates * inner + matrix * layer.hidden
    return max(of_mlp, _mixer_gradients(at)) * at.element_bytes + sums


def _mixer_gradients(at: RankLayer) -> int:
    """Return the elements that the backward of a recurrence holds at once; 0 for other layers.

    Of Kimi delta attention: the states of all chunks and three tensors like the values, made again,
    and twice as many gradients.
    """
    mixer = at.layer.recurrent
    if not isinstance(mixer, KimiDelta):
        return 0
    states = -(-at.tokens // mixer.chunk) * mixer.inner * mixer.width
    return 3 * (states + 3 * at.tokens * mixer.inner)


def final_bytes(run: Run) -> int:
    """Return the bytes saved by the final norm, and of its gathered output, the head's input."""
    norm = _norm_of_stream(run, run.sequence_parallel_tokens)
    # TRL's loss computes the head again, so that it also saves the input of a frozen one
    if run.runtime.adapters is not None and run.kernels.loss != "trl":
        return norm
    return norm + run.tokens * run.model.hidden * run.element_bytes


def logits(run: Run) -> int:
    """Return the number of logits that a rank holds at once."""
    kernels = run.kernels
    rows = run.padded_vocab // (run.strategy.ends.tp if kernels.loss_parallel else 1)
    chunks = kernels.loss_chunks if kernels.loss == "chunked" else 1
    return -(-run.tokens // chunks) * rows


HELD_LOGIT_BYTES = 16
LOGIT_BYTES = (12, 18)
"""Lowest and highest bytes per logit where script and release are unknown.

The highest are those of a loop: logits of 16 bits, two copies in fp32, one of them shifted by a
token, and three tensors of the loss (transformers 4.44, models/llama/modeling_llama.py)."""


def loss_bytes(run: Run) -> int:
    """Return the peak bytes of head and loss.

    An eager loss needs 12 bytes per logit: the log-softmax, its gradient and the gradient of the
    logits, all in fp32; the 16-bit logits are freed. It needs 16 bytes if tensor ranks shard the
    vocabulary, because of one more sum (torch distributed/tensor/parallel/loss.py), and in a loop
    that holds the logits, in fp32 (`convert_outputs_to_fp32` of accelerate). A compiled loss
    holds the logits and their gradient in the precision of the model. Logits that a hyperbolic
    tangent limits are held once more, in 16 bits. A chunked loss holds one chunk and the gradient
    of all hidden states.
    """
    kernels, number = run.kernels, logits(run)
    if kernels.loss in ("liger", "trl"):
        return _fused_head_bytes(run)
    each = kernels.quirks.logit_bytes or HELD_LOGIT_BYTES
    # the hyperbolic tangent saves its result
    each += run.element_bytes if run.model.capped_logits else 0
    each = max(each, 16 if kernels.loss_parallel and run.split.tp > 1 else 0)
    if kernels.loss == "compiled":
        return number * 2 * run.element_bytes
    if kernels.loss == "chunked":
        return number * each + run.tokens * run.model.hidden * run.element_bytes
    return number * each


_TRL_TILE = (4096, 32768)
"""Tokens and columns of a tile of logits: TRL 1.16, kernels/chunked_logprob.py and
trainer/utils.py."""


def _fused_head_bytes(run: Run) -> int:
    """Return the peak bytes of a head that computes its loss and gradients tile by tile.

    Liger (0.8.5, ops/fused_linear_cross_entropy.py): the logits of a chunk become their gradient;
    a chunk has as many logits as there are hidden states, up to the next power of 2 in tokens.
    Gradients of hidden states and head have the types of both. TRL: a tile of logits, both
    gradients in fp32, and that of the hidden states again in 16 bits.
    """
    hidden, element, tokens = run.model.hidden, run.element_bytes, run.tokens
    rows = run.padded_vocab // (run.strategy.ends.tp if run.kernels.loss_parallel else 1)
    trained = 0 if run.runtime.adapters is not None else rows * hidden
    if run.kernels.loss == "trl":
        tile = min(tokens, _TRL_TILE[0]) * min(rows, _TRL_TILE[1])
        return tile * element + tokens * hidden * (4 + element) + 4 * trained
    shares = -(-rows // hidden)
    chunk = min(1 << (-(-tokens // shares) - 1).bit_length(), tokens)
    # FSDP gathers the head in the type of the computation
    stored = element if run.split.zero or run.runtime.optimizer.master_bytes == 0 else 4
    return (chunk * rows + tokens * hidden) * element + trained * stored
