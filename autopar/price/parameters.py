"""Weights of a rank, tensor by tensor, as Megatron-Core creates them; shapes, not bytes.

Bytes per parameter are in `autopar.price.states`. Tensors have their shape on this rank and the
order in which modules register them, which also sets their order in gradient buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from autopar.records import Record, replace
from autopar.run.architecture import (
    Attention,
    DeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba,
    ShortConvolution,
    input_matrices,
    rank_matrices,
)
from autopar.run.run import RankLayer, Run
from autopar.run.strategy import Chunk
from autopar.training.adapters import Adapters, Target, adapted_widths, base_bytes


class Weight(Record):
    """One weight tensor of a rank, or several equal ones."""

    name: str
    shape: tuple[int, ...]
    """Shape on this rank; (outputs, inputs) of a linear layer."""
    number: int = 1
    """Number of such tensors, one per expert of the rank."""
    expert: bool = False
    """True for weights of experts, which are replicated over other ranks than dense weights."""
    linear: bool = False
    """True if its weight-gradient GEMM can accumulate into the gradient buffer."""
    quantized: bool = False
    """True if it has 8-bit copies when GEMMs run in 8 bits."""
    wide: bool = False
    """True if the weight is fp32 in a run with 16-bit weights; it has no other fp32 copy."""
    shared: bool = False
    """True for one of the two copies of tied embeddings, which has a separate bucket."""
    trained: bool = True
    """True if it has a gradient and optimizer states; frozen weights have neither."""

    @property
    def size(self) -> int:
        """Elements of one tensor."""
        return math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Elements of all `number` tensors."""
        return self.number * self.size


def _vectors(name: str, size: int, number: int = 1, *, expert: bool = False) -> Iterator[Weight]:
    if number and size:
        yield Weight(name=name, shape=(size,), number=number, expert=expert)


def _linear(
    name: str, outputs: int, inputs: int, *, bias: int = 0, expert: bool = False, number: int = 1
) -> Iterator[Weight]:
    """Yield the matrix of a linear layer, and its bias vector unless `bias` is 0 elements."""
    yield Weight(
        name=name,
        shape=(outputs, inputs),
        number=number,
        expert=expert,
        linear=True,
        quantized=True,
    )
    yield from _vectors(f"{name} bias", bias, number, expert=expert)


def mixer_weights(at: RankLayer) -> Iterator[Weight]:
    """Yield the weights of one layer's mixers, their norms included."""
    for mixer in at.layer.mixers:
        if isinstance(mixer, Mamba):
            yield from _mamba_weights(at, mixer)
        elif isinstance(mixer, DeltaNet):
            yield from _delta_weights(at, mixer)
        elif isinstance(mixer, ShortConvolution):
            yield from _convolution_weights(at, mixer)
        elif isinstance(mixer, LightningAttention):
            yield from _lightning_weights(at, mixer)
        elif isinstance(mixer, KimiDelta):
            yield from _kimi_weights(at, mixer)
        else:
            yield from _attention_weights(at, mixer)
            if at.layer.cross_tokens:
                yield from _attention_weights(at, mixer)
    yield from _unshaped(at.layer.extra, at.layer.hidden)


def _unshaped(number: int, hidden: int) -> Iterator[Weight]:
    """Yield weights whose shapes are unknown, as one matrix; number : of their elements."""
    if number:
        rows = number // hidden
        yield Weight(name="conditioning", shape=(rows, hidden))
        yield from _vectors("conditioning", number - rows * hidden)


def _mamba_weights(at: RankLayer, mamba: Mamba) -> Iterator[Weight]:
    """Yield the weights of a Mamba-2 mixer (Megatron-Core d98e8a64, core/ssm/mamba_mixer.py)."""
    hidden, tp = at.layer.hidden, at.split.tp
    yield from _vectors("mixer steps", mamba.heads // tp)
    channels = mamba.convolved // tp
    yield Weight(name="mixer convolution", shape=(channels, 1, mamba.kernel))
    yield from _vectors("mixer convolution bias", channels)
    # decay and skip of every head are fp32
    for name in ("mixer A", "mixer D"):
        yield Weight(name=name, shape=(mamba.heads // tp,), wide=True)
    yield from _vectors("mixer norm", hidden, at.layer.norm_vectors)
    yield from _linear("mixer in", mamba.projected // tp, hidden)
    yield from _vectors("mixer gated norm", mamba.inner // tp if mamba.gated_norm else 0)
    yield from _linear("mixer out", hidden, mamba.inner // tp)


def _delta_weights(at: RankLayer, delta: DeltaNet) -> Iterator[Weight]:
    """Yield the weights of a gated delta net (Megatron-Core d98e8a64, core/ssm/gated_delta_net)."""
    hidden, tp = at.layer.hidden, at.split.tp
    for name in ("mixer steps", "mixer A"):
        yield from _vectors(name, delta.value_heads // tp)
    yield from _vectors("mixer norm", hidden, at.layer.norm_vectors)
    yield from _linear("mixer in", delta.projected // tp, hidden)
    yield Weight(name="mixer convolution", shape=(delta.convolved // tp, 1, delta.kernel))
    yield from _vectors("mixer gated norm", delta.value_width, at.layer.norm_vectors)
    yield from _linear("mixer out", hidden, delta.inner // tp)


def _convolution_weights(at: RankLayer, mixer: ShortConvolution) -> Iterator[Weight]:
    """Yield the weights of a short convolution (transformers 5.24, models/lfm2)."""
    hidden, bias = at.layer.hidden, int(mixer.biases)
    yield from _vectors("mixer norm", hidden, at.layer.norm_vectors)
    yield from _linear("mixer in", mixer.projected, hidden, bias=bias * mixer.projected)
    yield Weight(name="mixer convolution", shape=(mixer.width, 1, mixer.kernel))
    yield from _vectors("mixer convolution bias", bias * mixer.width)
    yield from _linear("mixer out", hidden, mixer.inner, bias=bias * hidden)


def _lightning_weights(at: RankLayer, mixer: LightningAttention) -> Iterator[Weight]:
    """Yield the weights of lightning attention (transformers 5.24, models/minimax)."""
    hidden = at.layer.hidden
    yield from _vectors("mixer norm", hidden, at.layer.norm_vectors)
    for name, width in zip(("mixer in", "mixer gate"), input_matrices(mixer), strict=True):
        yield from _linear(name, width, hidden)
    yield from _vectors("mixer gated norm", mixer.inner)
    yield from _linear("mixer out", hidden, mixer.inner)


def _kimi_weights(at: RankLayer, mixer: KimiDelta) -> Iterator[Weight]:
    """Yield the weights of Kimi delta attention (transformers 5.24, models/kimi_linear)."""
    hidden = at.layer.hidden
    yield from _vectors("mixer norm", hidden, at.layer.norm_vectors)
    for width in input_matrices(mixer):
        yield from _linear("mixer in", width, hidden)
    for rows, columns in rank_matrices(mixer):
        yield from _linear("mixer rank", rows, columns)
    yield Weight(name="mixer convolution", shape=(3 * mixer.inner, 1, mixer.kernel))
    yield from _vectors("mixer decay", mixer.inner)
    yield from _vectors("mixer A", mixer.heads)
    yield from _vectors("mixer gated norm", mixer.width)
    yield from _linear("mixer out", hidden, mixer.inner)


def _attention_weights(at: RankLayer, attention: Attention) -> Iterator[Weight]:
    layer, tp, hidden = at.layer, at.split.tp, at.layer.hidden
    # norms of heads have weights even where those of the layer have none
    norms, of_heads = layer.norm_vectors, layer.norm_vectors or 1
    heads, groups, width = attention.heads, attention.kv_heads, attention.width
    latent = attention.latent
    # the output projection's bias is added after the sum over ranks, so each rank has all of it
    yield from _linear(
        "proj",
        hidden,
        heads * attention.value_width // tp,
        bias=hidden if layer.biases else 0,
    )
    if latent is None:
        keys = sum(attention.key_projections)
        rows = ((1 + attention.gated) * heads * width + keys) // tp
        yield from _vectors("attention norm", hidden, norms)
        yield from _linear("qkv", rows, hidden, bias=rows if attention.qkv_biases else 0)
        if attention.head_norms == "head":
            yield from _vectors("head norms", width, (1 if attention.keys_reused else 2) * of_heads)
        elif attention.head_norms == "all":
            yield from _vectors("query norm", heads * width // tp, of_heads)
            yield from _vectors("key norm", max(1, groups // tp) * width, of_heads)
        return
    # down projections are replicated on tensor ranks: arXiv 2405.04434, section 2.1
    query = heads * width // tp
    yield from _vectors("attention norm", hidden, norms)
    if latent.query_rank is None:
        yield from _linear("q", query, hidden)
    else:
        yield from _linear("q down", latent.query_rank, hidden)
        yield from _linear("q up", query, latent.query_rank)
    yield from _linear("kv down", latent.kv_rank + latent.rotary_width, hidden)
    rows = heads * (latent.key_width + attention.value_width) // tp
    yield from _linear("kv up", rows, latent.kv_rank)
    if attention.head_norms != "none":
        yield from _vectors("latent norms", latent.query_rank or 0, norms)
        yield from _vectors("latent norms", latent.kv_rank, norms)
    if attention.indexer is not None:
        # every tensor rank has the whole indexer (Megatron-Core d98e8a64, DSAIndexer)
        matrices = attention.indexer.matrices(hidden, latent.query_rank)
        for rows, columns in matrices:
            yield from _linear("indexer", rows, columns)
        yield from _vectors("indexer norm", attention.indexer.width, 2 if matrices else 0)


def mlp_weights(at: RankLayer) -> Iterator[Weight]:
    """Yield the weights of one layer's MLP or experts, its norms included."""
    layer, split, hidden = at.layer, at.split, at.layer.hidden
    norms, mixture = layer.norm_vectors, layer.experts
    # none if one norm precedes both attention and MLP
    own = layer.mlp is not None and layer.norms > len(layer.mixers)
    yield from _vectors("mlp norm", hidden, norms if own else 0)
    yield from _vectors("post-norms", hidden, max(0, layer.norms - layer.parts) * norms)
    if layer.token_inputs:
        yield from _linear("layer input", layer.token_inputs, hidden)
        yield from _linear("layer input up", hidden, layer.token_inputs)
    if mixture is None:
        if layer.mlp is not None:
            yield from _mlp("mlp", at, layer.mlp.width)
        return
    yield Weight(name="router", shape=(mixture.number, hidden))
    local, width = mixture.number // split.ep, mixture.width // split.etp
    rows, biased, inner = layer.gates * width, layer.biases, layer.routed_width
    if mixture.latent is not None:
        # every tensor rank has both projections (Megatron-Core d98e8a64, transformer/moe)
        yield from _linear("latent down", inner, hidden, bias=inner if biased else 0)
        yield from _linear("latent up", hidden, inner, bias=hidden if biased else 0)
    yield from _linear(
        "expert fc1", rows, inner, bias=rows if biased else 0, expert=True, number=local
    )
    yield from _linear(
        "expert fc2", inner, width, bias=inner if biased else 0, expert=True, number=local
    )
    if mixture.shared_width:
        yield from _mlp("shared expert", at, mixture.shared_width)


def _mlp(name: str, at: RankLayer, width: int) -> Iterator[Weight]:
    layer, tp, hidden = at.layer, at.split.tp, at.layer.hidden
    rows = layer.gates * width // tp
    yield from _linear(f"{name} fc1", rows, hidden, bias=rows if layer.biases else 0)
    yield from _linear(f"{name} fc2", hidden, width // tp, bias=hidden if layer.biases else 0)


def layer_weights(at: RankLayer) -> tuple[Weight, ...]:
    """Return the weights of one layer on a rank, adapters included."""
    base = (*mixer_weights(at), *mlp_weights(at))
    if at.run.runtime.adapters is None:
        return base
    beside = (one for weight in base for one in _adapters_of(at, weight))
    return (*_frozen(base), *beside)


def _frozen(weights: Iterable[Weight]) -> Iterator[Weight]:
    return (replace(weight, trained=False) for weight in weights)


def frozen_bytes(run: Run, weight: Weight) -> float:
    """Return the bytes per element of a frozen weight.

    Adapters may quantise the matrices of layers (QLoRA); other weights have the run's precision.
    """
    element, adapters = float(run.element_bytes), run.runtime.adapters
    if adapters is None:
        return element
    if adapters.base != "16 bits" and weight.quantized:
        return min(element, base_bytes(adapters))
    return 4.0 if adapters.wide else element


def adapter_widths(at: RankLayer, weight: Weight) -> tuple[float, ...]:
    """Return the output features of each adapter of a weight, from the weight's shape on this rank.

    Weights that combine several projections (qkv) have one adapter per adapted projection, or a
    single one if adapters are fused. Empty for weights without adapters.
    """
    adapters = at.run.runtime.adapters
    parts = projections_of(at, weight)
    if weight.name in ("kv down", "kv up"):
        # keys and values share these matrices
        parts = ((_first(adapters, "key", "value"), weight.shape[0]),)
    return adapted_widths(adapters, parts)


def projections_of(at: RankLayer, weight: Weight) -> tuple[tuple[Target, float], ...]:
    """Return (target, output features) of each projection that a weight combines.

    Empty for weights that are no projection of a mixer or MLP, and for those of latent keys and
    values.
    """
    rows, attention = weight.shape[0], at.layer.attention
    if weight.name == "qkv" and attention is not None:
        widths = ((1 + attention.gated) * attention.query, *attention.key_projections)
        names: tuple[Target, ...] = ("query", "key", "value")
        whole = sum(widths)
        return tuple(
            (name, rows * width / whole) for name, width in zip(names, widths, strict=False)
        )
    if weight.name not in _NAMED:
        return ()
    # the gate and the gated matrix are separate
    number = at.layer.gates if weight.name.endswith("fc1") else 1
    return ((_NAMED[weight.name], rows / number),) * number


_NAMED: dict[str, Target] = {
    "proj": "projection",
    "q": "query",
    "q down": "query",
    "q up": "query",
    "mlp fc1": "fc1",
    "mlp fc2": "fc2",
    "shared expert fc1": "fc1",
    "shared expert fc2": "fc2",
    "expert fc1": "expert_fc1",
    "expert fc2": "expert_fc2",
    "mixer in": "mixer_in",
    "mixer gate": "mixer_in",
    "mixer out": "mixer_out",
}


def _first(adapters: Adapters | None, *targets: Target) -> Target:
    """Return the first target that has adapters, else the first one."""
    chosen = adapters.targets if adapters is not None else frozenset()
    return next((target for target in targets if target in chosen), targets[0])


def _adapters_of(at: RankLayer, weight: Weight) -> Iterator[Weight]:
    """Yield the LoRA matrices A and B of each adapter of a weight, sharded over tensor ranks.

    A column-parallel weight shards A along the LoRA rank; a row-parallel weight shards B along its
    outputs (Megatron-Bridge peft/utils.py, ParallelLinearAdapter). torchtitan keeps both whole
    (`_lora_adapter_sharding` of components/lora.py, release 0.3.0).
    """
    adapters, split = at.run.runtime.adapters, at.split
    if adapters is None:
        return
    ranks = split.etp if weight.expert else split.tp
    by_inputs = weight.name in ("proj", "mixer out") or weight.name.endswith("fc2")
    replicated = at.run.kernels.module == "torchtitan"
    whole = replicated or weight.name.endswith("down")
    number = 1 if weight.expert and adapters.shared_by_experts else weight.number
    for width in adapter_widths(at, weight):
        rows = math.ceil(width / (ranks if by_inputs and not replicated else 1))
        rank = math.ceil(adapters.rank / (1 if by_inputs or whole else ranks))
        for name, shape in (("A", (rank, weight.shape[1])), ("B", (rows, adapters.rank))):
            yield Weight(
                name=f"{weight.name} adapter {name}",
                shape=shape,
                number=number,
                expert=weight.expert,
            )


def head_weight(run: Run, *, name: str = "head", shared: bool = False) -> Weight:
    """Return the vocabulary matrix on a rank: the head, or the word embedding.

    name : "head" or "embedding".
    shared : True for a copy of tied embeddings.
    """
    rows = run.padded_vocab // run.strategy.ends.tp
    shape = (rows, run.model.hidden)
    # the embedding matrix takes part in a GEMM only as the head
    return Weight(name=name, shape=shape, linear=name == "head", shared=shared)


def embedding_and_head_weights(run: Run, chunk: Chunk) -> tuple[Weight, ...]:
    """Return the weights of a chunk without transformer and MTP layers.

    These are embedding, final norm and head, as far as the chunk contains them.
    """
    return chunk_weights(run, Chunk(chunk.embeds, (), 0, chunk.head))


def chunk_weights(run: Run, chunk: Chunk) -> tuple[Weight, ...]:
    """Return the weights of one chunk of a pipeline stage."""
    model, pipelined = run.model, run.strategy.pp > 1
    found: list[Weight] = []
    tied = model.tied and pipelined
    # MTP layers embed their tokens on their own stage
    if chunk.embeds or chunk.mtp:
        shared = tied or (chunk.mtp > 0 and not chunk.embeds)
        found.append(head_weight(run, name="embedding", shared=shared))
        if model.positions == "learned" and chunk.embeds:
            found.append(Weight(name="positions", shape=(model.max_positions, model.hidden)))
        if model.has_patches and chunk.embeds:
            found = [*_unshaped(model.extra_embedding, model.hidden)]
    known: dict[int, tuple[Weight, ...]] = {}
    for layer in chunk.layers:
        at = run.rank_layers[layer]
        if id(at) not in known:
            own = layer_weights(at)
            if at.precision is not run.runtime.precision:
                # 16-bit layers at the ends of a model have no low-precision copies
                own = tuple(replace(weight, quantized=False) for weight in own)
            known[id(at)] = own
        found += known[id(at)]
    if chunk.head:
        found += _vectors("final norm", model.hidden, model.last.norm_vectors)
    for _ in range(min(chunk.mtp, 1) if model.mtp_shared else chunk.mtp):
        found += _mtp_weights(run)
    # tied weights are one tensor if the first stage is also the last
    if chunk.head and model.has_patches:
        found += _unshaped(model.extra_head, model.hidden)
    elif chunk.head and not (model.tied and chunk.embeds):
        found.append(head_weight(run, shared=tied))
    elif chunk.head:
        found = [_as_head(weight) if weight.name == "embedding" else weight for weight in found]
    if run.runtime.adapters is not None:
        # embedding, head and norms have no adapters, so they are frozen
        found = [one if " adapter " in one.name else replace(one, trained=False) for one in found]
    return tuple(found)


def _as_head(weight: Weight) -> Weight:
    """Return a tied embedding with `linear` true, because the head also uses it in a GEMM."""
    return Weight(name=weight.name, shape=weight.shape, linear=True, shared=weight.shared)


def _mtp_weights(run: Run) -> Iterator[Weight]:
    """Yield the weights of one MTP layer (arXiv 2412.19437, section 2.2)."""
    hidden, norms = run.model.hidden, run.model.last.norm_vectors
    yield from _vectors("mtp norms", hidden, 2 * norms)
    # two concatenated hidden states are projected to one
    yield from _linear("mtp projection", hidden // run.split.tp, 2 * hidden)
    for at in run.mtp_layers:
        yield from layer_weights(at)
    yield from _vectors("mtp norms", hidden, norms)


def stage_weights(run: Run, stage: int) -> tuple[tuple[Weight, ...], ...]:
    """Return the weights of a pipeline stage, one tuple per model chunk."""
    return tuple(chunk_weights(run, chunk) for chunk in run.strategy.stages[stage])
