"""Model architecture: layers in execution order, embedding and head.

Sizes are elements of the unsharded model. Nothing here depends on the engine; kernels, dispatchers
and precision are in `autopar.run.runtime`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Literal

from autopar.errors import InputError
from autopar.records import Count, Few, Positive, Record, number, replace, whole_number

HeadNorms = Literal["none", "head", "all"]
"""Norms of queries and keys: none, per head with shared weights (`head`), or over all heads
together (`all`)."""
Positions = Literal["learned", "rotary", "none"]
Norm = Literal["layer", "rms", "plain"]
"""LayerNorm, RMSNorm, or a LayerNorm without weights (`plain`)."""
WIDEST_FLASH = 256
"""Widest head of FlashAttention (Dao-AILab/flash-attention#2427) and of cuDNN; wider ones run in
PyTorch's memory-efficient kernel (huggingface/transformers#46960)."""
_Share = Annotated[float, number(0.0, 1.0)]
_Factor = Annotated[float, number(0.0, 1e12)]


class LatentAttention(Record):
    """Ranks and widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1)."""

    query_rank: Positive | None
    """Width of the compressed queries; None if queries are projected directly."""
    kv_rank: Positive
    """Width of the compressed keys and values."""
    key_width: Positive
    """Width of a query and a key of one head, without the rotary part."""
    rotary_width: Count
    """Width of the rotary part; all heads share one rotary key."""


class Indexer(Record, checked=True):
    """Indexer of sparse attention (DeepSeek-V3.2, arXiv 2512.02556): scores that choose keys."""

    heads: Positive
    width: Positive
    """Width of one head; all heads share one key."""
    topk: Positive
    """Keys that a query attends to."""
    every: Positive = 1
    """Layers per choice: 1 if each layer chooses its keys."""
    reused: bool = False
    """True for a layer without an indexer, which attends to the keys of the last choice."""
    trained: bool = True
    """True if a loss over the chosen keys trains the indexer; the model's loss does not."""

    def chosen(self, seq: float) -> float:
        """Return the mean number of keys of a query: itself and all before it, up to `topk`."""
        most = min(self.topk, seq)
        return most - most * (most - 1) / (2 * seq)

    def matrices(self, hidden: int, query_rank: int | None) -> tuple[tuple[int, int], ...]:
        """Return the (output, input) widths of its queries, key and weights of heads."""
        if self.reused:
            return ()
        queries = (self.heads * self.width, query_rank or hidden)
        return (queries, (self.width, hidden), (self.heads, hidden))

    def parameter_count(self, hidden: int, query_rank: int | None) -> int:
        """Return the parameters: its matrices, and a LayerNorm of the key."""
        weights = sum(rows * columns for rows, columns in self.matrices(hidden, query_rank))
        return weights + (0 if self.reused else 2 * self.width)


class Attention(Record, tag_field="kind", tag="attention"):
    """Attention block of one layer."""

    heads: Positive
    """Number of query heads."""
    kv_heads: Positive
    """Number of key-value heads."""
    width: Positive
    """Width of a query and a key of one head, rotary part included."""
    value_width: Positive
    """Width of a value of one head."""
    window: Positive | None = None
    """Sliding window: tokens that a query attends to, itself included; None for full attention."""
    causal: bool = True
    rotary_share: _Share = 1.0
    """Fraction of the head dimension with rotary positions; 0 for no rotary positions."""
    head_norms: HeadNorms = "none"
    """Norms of queries and keys; with latent attention, norms of the compressed queries and of the
    compressed keys and values."""
    yarn: bool = False
    """True if YaRN stretches the rotary positions and scales the scores (arXiv 2309.00071)."""
    sinks: bool = False
    """True if the softmax of every head includes one trained score (attention sink)."""
    qkv_biases: bool = False
    dropout: _Share = 0.0
    latent: LatentAttention | None = None
    gated: bool = False
    """True if a projection of the input gates the output of attention."""
    indexer: Indexer | None = None
    """Indexer that chooses the keys of latent attention; None for all keys."""
    keys_as_values: bool = False
    """True if one projection makes keys and values (`attention_k_eq_v` of Gemma 4)."""
    value_norms: bool = False
    """True if the values of every head pass an RMSNorm without weights."""
    keys_reused: bool = False
    """True if keys and values are those of an earlier layer (`num_kv_shared_layers`)."""

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.width

    @property
    def key_value(self) -> int:
        """Total width of the keys and values of all key-value heads."""
        return self.kv_heads * (self.width + self.value_width)

    @property
    def key_projections(self) -> tuple[int, ...]:
        """Output widths of the projections of keys and values; without latent attention."""
        each = self.kv_heads * self.width, self.kv_heads * self.value_width
        return () if self.keys_reused else each[: 1 if self.keys_as_values else 2]

    @property
    def value(self) -> int:
        """Width of the attention output of all heads."""
        return self.heads * self.value_width

    @property
    def rotary(self) -> bool:
        """True if heads have rotary positions."""
        return self.rotary_share > 0

    @property
    def rotary_width(self) -> int:
        """Width of the rotary part of one query or key head."""
        if self.latent is not None:
            return self.latent.rotary_width
        return int(self.width * self.rotary_share)


class Mamba(Record, tag_field="kind", tag="mamba"):
    """A selective state-space mixer (Mamba-2, arXiv 2405.21060)."""

    heads: Positive
    width: Positive
    """Width of one head."""
    state: Positive
    groups: Positive
    """Groups of heads that share the matrices B and C of the recurrence."""
    kernel: Positive = 4
    """Tokens that the causal convolution reads."""
    chunk: Positive = 128
    """Tokens per chunk of the scan."""
    gated_norm: bool = True
    """True if the gated output passes an RMSNorm."""

    @property
    def inner(self) -> int:
        """Inner width: total width of all heads."""
        return self.heads * self.width

    @property
    def convolved(self) -> int:
        """Width of the convolution: values, and B and C of all groups."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Output width of the input projection: gate, convolved channels, one step per head."""
        return self.inner + self.convolved + self.heads

    def parameter_count(self, hidden: int) -> int:
        """Return the parameters of the mixer: projections, convolution with biases, heads, norm.

        Every head has a decay, a skip and a bias of its step (arXiv 2405.21060, section 7).
        """
        channels = (self.kernel + 1) * self.convolved
        norm = self.inner if self.gated_norm else 0
        return hidden * (self.projected + self.inner) + channels + 3 * self.heads + norm


class DeltaNet(Record, checked=True, tag_field="kind", tag="delta"):
    """A gated delta net (arXiv 2412.06464): linear attention with a decay and a gate.

    Queries and keys have `key_heads`; values, decays and gates have `value_heads`.
    """

    key_heads: Positive
    value_heads: Positive
    key_width: Positive
    value_width: Positive
    kernel: Positive = 4
    """Tokens that the causal convolution of queries, keys and values reads."""

    @property
    def heads(self) -> int:
        """Number of heads of the recurrence."""
        return self.value_heads

    @property
    def chunk(self) -> int:
        """Tokens per chunk of the kernel (flash-linear-attention)."""
        return 64

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the queries."""
        return self.key_heads * self.key_width

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.value_heads * self.value_width

    @property
    def convolved(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.keys + self.inner

    @property
    def projected(self) -> int:
        """Output width of the input projection: convolved channels, gate, decay and step."""
        return self.convolved + self.inner + 2 * self.value_heads

    def parameter_count(self, hidden: int) -> int:
        """Return the parameters: projections, convolution, decay and step of heads, norm."""
        channels = self.kernel * self.convolved
        heads = 2 * self.value_heads + self.value_width
        return hidden * (self.projected + self.inner) + channels + heads


class ShortConvolution(Record, tag_field="kind", tag="convolution"):
    """A gated short convolution (LFM2): input gate, causal convolution, output gate."""

    width: Positive
    """Number of channels, each with its own convolution: the hidden size."""
    kernel: Positive
    """Tokens that the convolution reads."""
    biases: bool = False

    @property
    def heads(self) -> int:
        """Number of independent channels."""
        return self.width

    @property
    def inner(self) -> int:
        """Width of the convolution."""
        return self.width

    @property
    def projected(self) -> int:
        """Output width of the input projection: both gates and the convolved channels."""
        return 3 * self.width


class LightningAttention(Record, checked=True, tag_field="kind", tag="lightning"):
    """Lightning attention (arXiv 2501.08313): linear attention in blocks, with an output gate."""

    heads: Positive
    width: Positive
    """Width of one head."""
    chunk: Positive = 256
    """Tokens per block."""

    @property
    def inner(self) -> int:
        """Width of the values of all heads."""
        return self.heads * self.width

    @property
    def projected(self) -> int:
        """Output width of the input projections: queries, keys, values and gate."""
        return 4 * self.inner

    def parameter_count(self, hidden: int) -> int:
        """Return the parameters: queries, keys, values, gate and output, and a norm."""
        return hidden * (self.projected + self.inner) + self.inner


class KimiDelta(Record, checked=True, tag_field="kind", tag="kimi_delta"):
    """Kimi delta attention (arXiv 2510.26692): a gated delta rule with a decay per channel."""

    heads: Positive
    width: Positive
    """Width of the keys and of the values of one head; rank of the decay and of the gate."""
    kernel: Positive = 4
    """Tokens that the causal convolution of queries, keys and values reads."""

    @property
    def chunk(self) -> int:
        """Tokens per chunk of the kernel (flash-linear-attention)."""
        return 64

    @property
    def inner(self) -> int:
        """Width of the values of all heads, of the queries, and of the keys."""
        return self.heads * self.width

    @property
    def projected(self) -> int:
        """Output width of the input projections: queries, keys, values, two ranks, one step a head.

        The ranks are those of decay and gate.
        """
        return 3 * self.inner + 2 * self.width + self.heads

    def parameter_count(self, hidden: int) -> int:
        """Return the parameters: projections, convolution, decay and step of heads, norm."""
        matrices = hidden * (self.projected + self.inner) + 2 * self.width * self.inner
        return matrices + 3 * self.kernel * self.inner + self.inner + self.heads + self.width


class Mlp(Record, tag_field="kind", tag="mlp"):
    """A dense MLP of two matrices, or of three if it is gated."""

    width: Positive
    gated: bool = False


class Experts(Record, tag_field="kind", tag="experts"):
    """A mixture of experts (MoE): MLPs that each process some of the tokens."""

    number: Annotated[int, whole_number(1, 1 << 20)]
    per_token: Positive
    """Experts per token (top-k)."""
    width: Positive
    """Width of one expert."""
    gated: bool = False
    shared_width: Count = 0
    """Width of the shared expert, which processes every token; 0 for none."""
    shared_gate: bool = False
    """True if a vector of the hidden size gates the output of the shared expert."""
    router_biases: bool = False
    latent: Positive | None = None
    """Width to which tokens are projected before the experts; None for the hidden size."""
    clamped: bool = False
    """True if the inputs of the activation are clamped (`swiglu_limit` of GPT-OSS)."""
    groups: Positive = 1
    """Groups of neighbouring experts; a token goes to experts of `groups_per_token` of them
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    groups_per_token: Positive = 1


Recurrent = Mamba | DeltaNet | ShortConvolution | LightningAttention | KimiDelta
"""Mixers with a recurrence or a convolution over tokens instead of scores of pairs."""
Mixer = Attention | Recurrent


def input_matrices(mixer: Recurrent) -> tuple[int, ...]:
    """Return the output widths of the matrices before the recurrence of a mixer."""
    if isinstance(mixer, LightningAttention):
        # transformers 5.24, models/minimax: queries, keys and values together, and the gate
        return mixer.projected - mixer.inner, mixer.inner
    if isinstance(mixer, KimiDelta):
        # queries, keys, values, steps of heads, and the ranks of decay and gate
        return (*(mixer.inner,) * 3, mixer.heads, *(mixer.width,) * 2)
    return (mixer.projected,)


def rank_matrices(mixer: Recurrent) -> tuple[tuple[int, int], ...]:
    """Return the (output, input) widths of the matrices after a low rank."""
    return ((mixer.inner, mixer.width),) * 2 if isinstance(mixer, KimiDelta) else ()


TORCH_MIXERS: Mapping[type[Recurrent], str] = {
    ShortConvolution: "short convolutions",
    LightningAttention: "lightning attention",
    KimiDelta: "Kimi delta attention",
}
"""Mixers of Hugging Face transformers that Megatron-LM does not have -> name in messages."""


class Layer(Record):
    """One layer: token mixers, then an MLP; either may be missing."""

    hidden: Positive
    mixers: tuple[Mixer, ...]
    """Token mixers; two run in parallel, and a layer that is only an MLP has none."""
    mlp: Mlp | Experts | None
    cross: bool = False
    """True for a decoder layer with cross-attention to the output of the preceding layer group."""
    cross_tokens: Count = 0
    """Tokens of a condition, such as text, that cross-attention reads; 0 without a condition."""
    fp32_norms: bool = False
    """True if norms compute and save fp32."""
    token_inputs: Count = 0
    """Width of an embedding of each layer that its output is multiplied with; 0 for none."""
    elementwise: Few = 0
    """Further elementwise operations that each save a tensor of the hidden size, such as products
    with a condition (AdaLN-Zero, arXiv 2212.09748) or with trained weights (LayerScale)."""
    extra: Count = 0
    """Parameters without a GEMM over tokens, such as the modulation by a condition, and weights of
    a second stream, which only tokens of text pass (arXiv 2403.03206)."""
    norm: Norm = "rms"
    norms: Few = 2
    """Number of norms over the hidden size: usually 2; 4 with norms also after attention and MLP; 1
    if attention and MLP are parallel."""
    biases: bool = False
    """True if linear layers, except the router, have biases."""
    seq_length: Positive | None = None
    """Sequence length of the layer in tokens, such as that of an encoder; None for the sequence
    length of the run."""

    @property
    def attention(self) -> Attention | None:
        """Attention block of the layer, or None."""
        return next((one for one in self.mixers if isinstance(one, Attention)), None)

    @property
    def recurrent(self) -> Recurrent | None:
        """Mixer of the layer that is not attention, or None."""
        return next((one for one in self.mixers if not isinstance(one, Attention)), None)

    @property
    def parts(self) -> int:
        """Number of mixers, MLP and cross-attention, each with a residual addition."""
        crosses = self.cross or self.cross_tokens > 0
        return len(self.mixers) + (self.mlp is not None) + crosses

    @property
    def experts(self) -> Experts | None:
        """Experts of the layer; None if its MLP is dense or missing."""
        return self.mlp if isinstance(self.mlp, Experts) else None

    @property
    def routed_width(self) -> int:
        """Width of the tokens that experts process: the hidden size, or that of latent experts."""
        latent = None if self.experts is None else self.experts.latent
        return latent or self.hidden

    @property
    def gates(self) -> int:
        """Number of input matrices of the MLP: 2 (gate and up) if it is gated, else 1."""
        return 2 if self.mlp is not None and self.mlp.gated else 1

    @property
    def norm_vectors(self) -> int:
        """Weight vectors per norm: 2 (scale and shift) for LayerNorm, 1 for RMSNorm, or none."""
        return {"layer": 2, "rms": 1, "plain": 0}[self.norm]


class LayerGroup(Record):
    """Consecutive equal layers."""

    count: Positive
    layer: Layer


class Model(Record, dict=True):
    """A transformer: groups of layers in execution order, embedding and head."""

    name: str = ""
    layers: tuple[LayerGroup, ...]
    repeat: Positive = 1
    """Number of repetitions of the sequence of groups, for alternating layer types."""
    vocab: Count
    """Vocabulary size without padding; 0 for a model of images or videos, which has none."""
    vocab_divisor: Positive = 128
    """The vocabulary is padded to a multiple of this number times the tensor degree."""
    tied: bool = False
    """True if embedding and head are one matrix."""
    positions: Positions = "rotary"
    max_positions: Count = 0
    """Rows of the learned position embedding; 0 for none."""
    rotary_base: _Factor | None = None
    rotary_scaling: _Factor | None = None
    """Scaling factor of Llama 3.1 for low frequencies; None for no scaling."""
    extra_embedding: Count = 0
    """Parameters before the first layer in addition to token and position embeddings."""
    extra_head: Count = 0
    """Parameters after the last layer in addition to final norm and head."""
    mtp: Few = 0
    """Number of multi-token prediction (MTP) layers after the last layer."""
    mtp_shared: bool = False
    """True if all MTP layers share their weights."""
    mtp_block: tuple[Layer, ...] = ()
    """Layers of each MTP layer; empty for one like the last layer."""
    dropout: _Share = 0.0
    """Dropout of the residual stream."""
    capped_logits: bool = False
    """True if a hyperbolic tangent limits the logits (arXiv 2408.00118, section 2)."""

    @cached_property
    def each_layer(self) -> tuple[Layer, ...]:
        """All layers in execution order."""
        return tuple(self._each())

    def _each(self) -> Iterator[Layer]:
        for _ in range(self.repeat):
            for group in self.layers:
                yield from (group.layer,) * group.count

    @property
    def num_layers(self) -> int:
        """Number of layers, without MTP layers."""
        return self.repeat * sum(group.count for group in self.layers)

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Distinct layers in order of their first occurrence."""
        return tuple(dict.fromkeys(group.layer for group in self.layers))

    @property
    def last(self) -> Layer:
        """The last layer; MTP layers have the same architecture."""
        return self.layers[-1].layer

    @property
    def hidden(self) -> int:
        """Hidden size at the head."""
        return self.last.hidden

    @property
    def each_mtp(self) -> tuple[Layer, ...]:
        """Layers of one MTP layer."""
        return self.mtp_block or (self.last,)

    @cached_property
    def first_attention(self) -> Attention | None:
        """Attention of the first layer with attention; None for a model without attention."""
        return next((one.attention for one in self.kinds if one.attention is not None), None)

    @cached_property
    def first_mamba(self) -> Mamba | None:
        """Mixer of the first Mamba-2 layer; None for a model without such layers."""
        found = (one.recurrent for one in self.kinds)
        return next((one for one in found if isinstance(one, Mamba)), None)

    @cached_property
    def first_delta(self) -> DeltaNet | None:
        """Mixer of the first gated delta net; None for a model without such layers."""
        found = (one.recurrent for one in self.kinds)
        return next((one for one in found if isinstance(one, DeltaNet)), None)

    @cached_property
    def first_sparse(self) -> Attention | None:
        """Attention of the first layer with an indexer; None for a model without such layers."""
        found = (one.attention for one in self.kinds)
        return next((one for one in found if one is not None and one.indexer is not None), None)

    @cached_property
    def reused(self) -> tuple[bool, ...]:
        """One boolean per layer: True if it attends to the keys that an earlier one has chosen."""
        each = (one.attention for one in self.each_layer)
        return tuple(
            one is not None and one.indexer is not None and one.indexer.reused for one in each
        )

    @property
    def is_hybrid(self) -> bool:
        """True if some layer is not attention or a gated delta net, followed by an MLP."""
        return any(
            one.mlp is None or len(one.mixers) != 1 or isinstance(one.mixers[0], Mamba)
            for one in self.kinds
        )

    @property
    def torch_mixers(self) -> str:
        """Names of the mixers that Megatron-LM does not have; empty without such mixers."""
        kinds = dict.fromkeys(type(one.recurrent) for one in self.kinds if one.recurrent)
        names = [TORCH_MIXERS[kind] for kind in kinds if kind in TORCH_MIXERS]
        return " and ".join([*names, *(["heads of two widths"] if self.has_unlike_heads else [])])

    @property
    def has_unlike_heads(self) -> bool:
        """True if heads of layers differ in number or width, or share projections."""
        found = [one.attention for one in self.kinds if one.attention is not None]
        return not self.has_patches and (
            len({(one.heads, one.kv_heads, one.width, one.value_width) for one in found}) > 1
            or any(one.keys_as_values or one.keys_reused for one in found)
        )

    @property
    def has_token_inputs(self) -> bool:
        """True if layers have an embedding each, or keys and values of an earlier layer."""
        return any(
            one.token_inputs > 0 or (one.attention is not None and one.attention.keys_reused)
            for one in self.kinds
        )

    @property
    def widest_head(self) -> int:
        """Largest width of a query; 0 without attention."""
        return max((one.attention.width for one in self.kinds if one.attention), default=0)

    @property
    def has_patches(self) -> bool:
        """True if tokens are patches of images or videos, so that there is no vocabulary."""
        return not self.vocab

    @property
    def has_wide_norms(self) -> bool:
        """True if some attention has norms of queries and keys over all heads."""
        attentions = (one.attention for one in self.kinds)
        return any(one is not None and one.head_norms == "all" for one in attentions)

    @property
    def has_other_norms(self) -> bool:
        """True if some layer has more or fewer norms than one before each of its parts."""
        return any(one.norms != one.parts for one in self.kinds)

    @property
    def is_conventional(self) -> bool:
        """True if all layers are attention without gate or indexer, followed by an MLP."""
        return not (self.needs_megatron or self.torch_mixers)

    @property
    def needs_megatron(self) -> bool:
        """True if some layer has one part, Mamba-2, a delta net, or gated or sparse attention."""
        return self.is_hybrid or any(
            (mixer.gated or mixer.indexer is not None)
            if isinstance(mixer, Attention)
            else type(mixer) not in TORCH_MIXERS
            for one in self.kinds
            for mixer in one.mixers
        )

    @cached_property
    def attention(self) -> Attention:
        """Attention of the first layer with attention; raises InputError if there is none."""
        found = self.first_attention
        if found is None:
            raise InputError(f"{self.name or 'the model'} has no attention layer")
        return found

    @cached_property
    def experts(self) -> Experts | None:
        """Experts of the first MoE layer; None for a dense model."""
        layers = (*self.kinds, *self.mtp_block)
        return next((one.experts for one in layers if one.experts is not None), None)

    @cached_property
    def dense_width(self) -> int:
        """Width of the first dense MLP, or of an expert if all MLPs are MoE; 0 without any MLP."""
        dense = (one.mlp for one in self.kinds if isinstance(one.mlp, Mlp))
        first = next(dense, self.experts)
        return 0 if first is None else first.width

    @cached_property
    def mixtures(self) -> tuple[bool, ...]:
        """One boolean per layer: True if its MLP is a mixture of experts."""
        return tuple(one.experts is not None for one in self.each_layer)


def grouped(layers: tuple[Layer, ...]) -> tuple[tuple[LayerGroup, ...], int]:
    """Return (groups of equal layers, number of repetitions of these groups).

    The shortest repeated sequence is used: 24 pairs of two layer types become two groups of one
    layer, repeated 24 times.
    """
    total = len(layers)
    period = next(
        size
        for size in range(1, total + 1)
        if total % size == 0 and layers == layers[:size] * (total // size)
    )
    # Layers of a single type are one group, not one layer repeated many times.
    if period == 1:
        return (LayerGroup(count=total, layer=layers[0]),), 1
    groups: list[LayerGroup] = []
    for layer in layers[:period]:
        if groups and groups[-1].layer == layer:
            groups[-1] = LayerGroup(count=groups[-1].count + 1, layer=layer)
        else:
            groups.append(LayerGroup(count=1, layer=layer))
    return tuple(groups), total // period


# --------------------------------------------------------------------------------------------------
# Models of one layer type; some layers may be MoE, and some may have a window.


def decoder_layers(
    layer: Layer, mixtures: Sequence[bool], experts: Experts | None, whole_every: int = 0
) -> tuple[tuple[LayerGroup, ...], int]:
    """Return the groups of a decoder and the number of their repetitions.

    Parameters
    ----------
    layer : a layer with a dense MLP, and a sliding window if any layer has one
    mixtures : one boolean per layer, True for MoE
    experts : MLP of MoE layers
    whole_every : period of full-attention layers; 0 if all layers have the window
    """
    kinds = {}
    for mixed in {*mixtures}:
        assert not mixed or experts is not None, "a mixture has experts"
        own = replace(layer, mlp=experts) if mixed else layer
        kinds[mixed, True], kinds[mixed, False] = own, without_window(own)
    return grouped(
        tuple(
            # Megatron-Core's `is_layer_window_attention` counts layers from 1.
            kinds[mixed, not (whole_every and number % whole_every == 0)]
            for number, mixed in enumerate(mixtures, 1)
        )
    )


def without_window(layer: Layer) -> Layer:
    """Return the layer with full attention instead of a sliding window."""
    attention = layer.attention
    if attention is None or attention.window is None:
        return layer
    return with_attention(layer, replace(attention, window=None))


def with_attention(layer: Layer, attention: Attention) -> Layer:
    """Return the layer with its attention replaced."""
    mixers = (attention if isinstance(one, Attention) else one for one in layer.mixers)
    return replace(layer, mixers=tuple(mixers))


def windows_of(model: Model) -> tuple[int | None, int]:
    """Return (window, period of full-attention layers), with period 0 for none.

    Raises InputError if full-attention layers are not periodic.
    """
    windows = {
        number: attention.window
        for number, layer in enumerate(model.each_layer, 1)
        if (attention := layer.attention) is not None
    }
    sizes = {*windows.values()} - {None}
    if not sizes:
        return None, 0
    whole = [number for number, window in windows.items() if window is None]
    # of a hybrid the period counts all layers, also those without attention
    periods = (
        every
        for every in range(1, whole[0] + 1 if whole else 1)
        if whole == [number for number in windows if number % every == 0]
    )
    every = next(periods, 0)
    if len(sizes) > 1 or (whole and not every):
        raise InputError(
            f"model {model.name!r}: the sliding windows of its layers have no "
            "fixed period, which a uniform plan needs"
        )
    return sizes.pop(), every
