"""Model architecture (ModelSpec) and measurements of a model (ModelProfile).

Legality checks (heads, widths) and estimates need a ModelSpec. A ModelProfile holds the content of
Galvatron's computation and memory files in base units. `autopar.documents.spec` reads and writes
ModelSpec, `autopar.documents.model` ModelProfile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated, Literal

from msgspec import Meta, field

from autopar.errors import InputError
from autopar.records import Record, Seconds, number, whole_number
from autopar.run.architecture import (
    DeltaNet,
    Indexer,
    KimiDelta,
    LightningAttention,
    Mamba,
)
from autopar.sources import Source

MOST_LAYERS = 10**4
MOST_SIZE = 10**9
"""Largest plausible number of layers, and largest plausible value of any other whole number."""
MOST_TYPES = 64
MOST_EXPERTS = 4096
"""Largest number of layer types, and of experts of a layer; prices count them one by one."""
MOST_PARAMETERS = 10**15
"""Largest number of parameters; the planner counts bytes in integers of 56 bits."""

_Size = Annotated[int, whole_number(1, MOST_SIZE)]
_SizeOrZero = Annotated[int, whole_number(0, MOST_SIZE)]
_Layers = Annotated[int, whole_number(1, MOST_LAYERS)]
_MtpLayers = Annotated[int, whole_number(0, 64)]
_Parameters = Annotated[int, whole_number(0, 10**13)]
_Ratio = Annotated[float, number(1.0, 1e12)]
_Share = Annotated[float, number(0.01, 1.0)]
_Text = Annotated[str, Meta(min_length=1, extra={"expected": "a text"})]


class LatentSpec(Record, checked=True):
    """Widths of multi-head latent attention, whose queries and keys are compressed to low ranks.

    Names follow DeepSeek-V2 (arXiv 2405.04434, section 2.1). Each of the `num_heads` heads has its
    own keys and values.
    """

    query_rank: _Size | None = None
    """Rank of the compressed queries; None if queries are projected directly."""
    key_value_rank: _Size
    key_width: _Size
    """Width of a query and a key of one head, without the rotary part."""
    rotary_width: _Size
    """Width of the rotary part of a query or key; all heads share one rotary key."""
    value_width: _Size


class ConvolutionSpec(Record, checked=True, tag_field="kind", tag="convolution"):
    """A `ShortConvolution` of the hidden size."""

    kernel: _Size
    """Tokens that the convolution reads."""
    biases: bool = False

    def parameter_count(self, hidden: int) -> int:
        """Return the parameters: input projection to three parts, convolution, output."""
        return 4 * hidden * hidden + self.kernel * hidden + (5 * hidden if self.biases else 0)


MixerSpec = Mamba | DeltaNet | ConvolutionSpec | LightningAttention | KimiDelta
_MIXER = '[{"kind": "mamba", "heads": ..., "width": ..., "state": ..., "groups": ...}]'
_Mixers = Annotated[tuple[MixerSpec, ...], Meta(extra={"expected": f"a list of mixers, {_MIXER}"})]
_INDEXER = '{"heads": ..., "width": ..., "topk": ...}'
_Indexer = Annotated[Indexer, Meta(extra={"expected": f"an indexer, {_INDEXER}"})]
Parts = Literal["both", "mixer", "mlp"]
_WIDTHS = '{"key_value_rank": ..., "key_width": ..., "rotary_width": ..., "value_width": ...}'
_Latent = Annotated[
    LatentSpec, Meta(extra={"expected": f"the widths of latent attention, {_WIDTHS}"})
]


class LayerSpec(Record, checked=True):
    """Consecutive transformer layers of one layer type."""

    num_layers: _Layers
    seq_length: _Size
    hidden_size: _Size
    num_heads: _Size | None = None
    """Number of query heads. None if unknown, only in files of Galvatron; divisibility checks are
    then skipped."""
    num_kv_heads: _Size | None = None
    head_dim: _Size | None = None
    ffn_hidden_size: _Size | None = None
    gated_mlp: bool = False
    """True for SwiGLU-like MLPs with three matrices, False for two."""
    causal: bool = True
    cross_attention: bool = False
    """True for a decoder layer of an encoder-decoder model."""
    biases: bool = False
    """True if all linear layers have biases; `qkv_biases` if only the QKV projection has them."""
    qkv_biases: bool = False
    norm_parameters_per_hidden: _SizeOrZero = 2
    """Norm parameters of a layer divided by hidden_size (2 RMSNorms: 2; 2 LayerNorms: 4)."""
    qk_norms: bool = False
    """True if queries and keys of every head pass an RMSNorm whose weight all heads share."""
    num_experts: _Size | None = None
    """Number of experts of a MoE layer, each of width `ffn_hidden_size`; None for a dense MLP."""
    experts_per_token: _Size | None = None
    """Experts per token (top-k)."""
    shared_expert_width: _SizeOrZero = 0
    """Width of the shared expert, which processes every token; 0 for none."""
    shared_expert_gate: bool = False
    """True if a trained vector of the hidden size gates the output of the shared expert."""
    router_biases: bool = False
    """True if the router adds a trained bias per expert."""
    expert_latent: _Size | None = None
    """Width to which tokens are projected before the experts; None for the hidden size."""
    latent: _Latent | None = None
    """Widths of multi-head latent attention; None for heads of `head_dim`. With it, `qk_norms` are
    the norms of the compressed queries and of the compressed keys and values."""
    window: _Size | None = None
    """Sliding window: maximum number of tokens that a query attends to, itself included; None for
    full attention."""
    whole_every: _SizeOrZero = 0
    """Period of full-attention layers among sliding-window layers of this type; 0 if all have the
    window."""
    clamped_activation: bool = False
    """True if the inputs of the activation of experts are clamped (`swiglu_limit`)."""
    expert_groups: _Size = 1
    """Number of groups of experts; a token goes to experts of `groups_per_token` of them."""
    groups_per_token: _Size = 1
    attention_sinks: bool = False
    """True if the softmax of every head includes one trained score (attention sink)."""
    wide_qk_norms: bool = False
    """True if the weights of `qk_norms` span all heads instead of one head dimension."""
    num_norms: _Size | None = None
    """Number of norms per layer; None for one before each part (two, or three with
    cross-attention)."""
    parts: Parts = "both"
    """Parts of the layer: a mixer and an MLP, or in some hybrid models only one of them."""
    mixers: _Mixers = ()
    """Mixers other than attention. Layers with `num_heads` have attention in parallel."""
    output_gate: bool = False
    """True if a projection of the input gates the output of attention."""
    keys_as_values: bool = False
    """True if one projection makes keys and values."""
    value_norms: bool = False
    """True if the values of every head pass an RMSNorm without weights."""
    keys_reused: bool = False
    """True if keys and values are those of an earlier layer, so that they have no projections."""
    token_inputs: _SizeOrZero = 0
    """Width of an embedding of each layer that its output is multiplied with; 0 for none. Two
    matrices project to this width and back; the table is part of `extra_embedding_parameters`."""
    indexer: _Indexer | None = None
    """Indexer that chooses the keys of latent attention; None for all keys."""
    cross_tokens: _SizeOrZero = 0
    """Tokens of a condition, such as text, that cross-attention reads; 0 without a condition."""
    fp32_norms: bool = False
    """True if norms compute and save fp32."""
    elementwise: Annotated[int, whole_number(0, 64)] = 0
    """Further elementwise operations of a layer that each save a tensor of the hidden size, such as
    products with a condition (AdaLN-Zero) or with trained weights (LayerScale)."""
    extra_parameters: _Parameters = 0
    """Parameters of a layer without a GEMM over tokens, such as the modulation by a condition, and
    weights of a second stream, which only tokens of text pass."""


_LAYER = '{"num_layers": ..., "seq_length": ..., "hidden_size": ...}'
_Layer = Annotated[LayerSpec, Meta(extra={"expected": f"a layer type, {_LAYER}"})]
_LayerList = Annotated[
    tuple[_Layer, ...],
    Meta(min_length=1, extra={"expected": f"a list of layer types, [{_LAYER}]"}),
]


class ModelSpec(Record, checked=True):
    """Model architecture: layer types in execution order, embedding and head."""

    name: _Text
    layers: _LayerList
    vocab_size: _SizeOrZero | None = None
    """Vocabulary size; 0 for a model of images or videos, which has none; None if unknown."""
    tied_embeddings: bool = False
    learned_positions: _SizeOrZero = 0
    """Rows of the learned position embedding; 0 for rotary or relative positions."""
    rotary_base: _Ratio | None = None
    """Base of rotary positions; None without rotary positions, if unknown, or if frequencies are
    scaled in a way that `rotary_scaling_factor` does not describe."""
    rotary_scaling_factor: _Ratio | None = None
    """Scaling factor of low rotary frequencies in Llama 3.1 and later; None for no scaling.
    Wavelengths above 8192 tokens are scaled fully, those from 2048 tokens partly."""
    rotary_share: _Share = 1.0
    """Fraction of the head dimension with rotary positions, where a model has them; latent
    attention has a `rotary_width` instead."""
    no_positions: bool = False
    """True if attention has neither rotary nor learned positions."""
    yarn_positions: bool = False
    """True if YaRN stretches the rotary positions."""
    make_vocab_size_divisible_by: _Size = 128
    extra_embedding_parameters: _Parameters = 0
    """Parameters before the first layer in addition to token and position embeddings, such as token
    types and position biases."""
    extra_head_parameters: _Parameters = 0
    """Parameters after the last layer in addition to final norm and output matrix (MLM
    transform)."""
    capped_logits: bool = False
    """True if a hyperbolic tangent limits the logits."""
    mtp_layers: _MtpLayers = 0
    """Number of MTP layers after the last layer, each with one layer like the last."""
    interleaved: bool = False
    """True if layer types alternate one by one; all types then have the same number of layers."""
    order: tuple[_SizeOrZero, ...] = ()
    """Layer type of every layer in execution order, counted from 0; empty for the order of
    `layers`."""
    mtp_order: tuple[_SizeOrZero, ...] = ()
    """Layer types of one MTP layer; empty for the type of the last layer."""
    layer_classes: tuple[_Text, ...] = ()
    """Classes of the layers in transformers or diffusers, which FSDP wraps; empty for those that
    the model names itself."""

    @property
    def num_layers(self) -> int:
        """Number of layers of all types."""
        return sum(layer.num_layers for layer in self.layers)

    @property
    def position_rows(self) -> int:
        """Rows of the learned position embedding in training: at least the longest sequence."""
        if not self.learned_positions:
            return 0
        return max(self.learned_positions, *(layer.seq_length for layer in self.layers))

    @property
    def layer_types(self) -> tuple[int, ...]:
        """Layer type index of every layer, in execution order."""
        if self.order:
            return self.order
        runs = ([k] * layer.num_layers for k, layer in enumerate(self.layers))
        if self.interleaved:
            return tuple(chain.from_iterable(zip(*runs, strict=True)))
        return tuple(chain.from_iterable(runs))


class TimePoint(Record):
    """Forward time of one unsharded layer on one GPU, seconds for all `batch` samples."""

    batch: int
    seq_length: int
    forward_s: float
    low_s: float | None = None
    high_s: float | None = None
    """5th and 95th percentile of the samples, seconds; None if no sidecar file contains them."""


class ShardedTime(Record):
    """Median times of one layer at one size on one rank, in seconds for the whole batch."""

    layer_type: int
    batch: _Size
    seq_length: _Size
    degree: _Size = 1
    """Degree of the tensor group; 1 for an unsharded layer."""
    kind: str = "sp"
    """A `TensorKind` of `autopar.documents.sidecar`; readers skip unknown kinds."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    recompute_s: Seconds | None = None
    """Seconds of the recomputed forward inside the backward of a checkpointed layer."""
    optimizer_s: Seconds | None = None
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples, seconds."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None
    recompute_low_s: Seconds | None = None
    recompute_high_s: Seconds | None = None


class OtherTime(Record):
    """Median times of embedding, head and loss, in seconds for the whole batch."""

    batch: _Size
    seq_lengths: tuple[_Size, ...]
    """Sequence lengths of all layer types."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    """Seconds of the backward; None if only forwards were measured. The planner then assumes twice
    the forward."""
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples, seconds; None if no sidecar file contains them."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None


class LayerMemory(Record):
    """Memory of one layer at one sequence length."""

    parameter_count: float
    """Parameters of one unsharded layer."""
    activation_bytes_per_sample: Mapping[int, float]
    """Saved activations in bytes per sample of the tensor group's local batch, by tensor degree."""
    checkpoint_bytes_per_sample: float | None
    """Bytes per sample that a checkpointed layer saves, unsharded; None if not measured."""
    ulysses_activation_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """Saved activations in bytes per sample and rank, by Ulysses degree; from a sidecar file.
    All-to-alls save more than the unsharded activations divided by the degree."""
    backward_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """Transient bytes per sample and rank of the layer's backward in addition to its saved
    activations, by tensor degree; from a sidecar file."""
    ulysses_backward_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """Transient bytes per sample and rank of the backward, by Ulysses degree above 1."""
    shared_bytes: Mapping[int, float] = field(default_factory=dict)
    """Bytes per rank of buffers that all layers of this type share, by tensor degree; independent
    of batch and number of layers. Empty: one gathered input, if the stage has a buffer for it."""


class OtherMemory(Record):
    """Memory of embedding, head and loss at one sequence length, by vocabulary degree."""

    model_state_bytes: Mapping[int, float]
    """Bytes of parameters, gradients and optimizer (16 per parameter), before data-parallel
    sharding."""
    activation_bytes_per_sample: Mapping[int, float]
    held_bytes: Mapping[int, float] = field(default_factory=dict)
    """Additional bytes per rank that do not depend on the batch; empty for none."""


class LayerProfile(Record):
    """Measurements of one layer type."""

    times: tuple[TimePoint, ...]
    memory: Mapping[int, LayerMemory]
    """Memory by sequence length."""
    sharded_times: tuple[ShardedTime, ...] = ()
    """Additional times from a sidecar file: separate backward, sharded layers, recomputation."""


class ModelProfile(Record, checked=True):
    """Content of one computation file and one memory file, in base units."""

    layers: tuple[LayerProfile, ...]
    other_times: tuple[OtherTime, ...]
    other_memory: Mapping[str, Mapping[tuple[int, ...], OtherMemory]]
    """Memory of embedding, head and loss by position of their stage ('only', 'first' or 'last'),
    then by sequence lengths of the layer types."""
    sequence_parallel: bool
    """True if the memory tables were measured with Megatron sequence parallelism."""
    precision: str = "bf16"
    estimated: bool = False
    synthetic: bool = False
    """True if the numbers are made up for tests and describe no real machine."""
    logits_peak_bytes_per_sample: float = 0.0
    """Extra bytes per sample while the loss runs, not divided by the vocabulary degree. 0 for
    measured tables, which include this peak."""
    rank_bytes: float = 0.0
    """Bytes on every rank for workspaces and tables of the engine, independent of its layers."""
    threads: int | None = None
    """Threads of one operation on a CPU during the measurement; None on a GPU, or if unknown."""
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about values that the reader derived or skipped."""


# --------------------------------------------------------------------------------------------------
# Parameter counts and widths derived from an architecture.


def head_dim(layer: LayerSpec) -> int:
    """Return the width of one query head, rotary part included.

    Raises InputError when the number of heads is unknown.
    """
    if layer.num_heads is None:
        raise InputError(
            "the number of attention heads is unknown", remedy="Add --model with a model spec"
        )
    if layer.latent is not None:
        return layer.latent.key_width + layer.latent.rotary_width
    return layer.head_dim or layer.hidden_size // layer.num_heads


def layer_norms(layer: LayerSpec) -> int:
    """Return the number of norms of the hidden size in one layer."""
    usual = 1 if layer.parts != "both" else 3 if crosses(layer) else 2
    return layer.num_norms or usual


def final_norm_parameters(layer: LayerSpec) -> int:
    """Return the parameter count of a final norm, which has the size of one norm of `layer`."""
    return layer.norm_parameters_per_hidden // layer_norms(layer) * layer.hidden_size


def has_attention(layer: LayerSpec) -> bool:
    """Return True if a layer has attention, alone or in parallel with its other mixers."""
    return layer.parts != "mlp" and not (layer.mixers and layer.num_heads is None)


def crosses(layer: LayerSpec) -> bool:
    """Return True if a layer has cross-attention, to an encoder or to a condition."""
    return layer.cross_attention or layer.cross_tokens > 0


def sizes_known(layer: LayerSpec) -> bool:
    """Return True if heads and MLP width are known for the parts of a layer."""
    heads = layer.num_heads is not None or not has_attention(layer)
    return heads and (layer.ffn_hidden_size is not None or layer.parts == "mixer")


def is_hybrid(spec: ModelSpec) -> bool:
    """Return True if some layer is not attention without gate or indexer, followed by an MLP.

    Layers with shared projections or an embedding each count as such layers.
    """
    return any(
        one.parts != "both" or one.mixers or one.output_gate or one.indexer
        or one.keys_as_values or one.keys_reused or one.token_inputs
        for one in spec.layers
    )  # fmt: skip


def has_patches(spec: ModelSpec) -> bool:
    """Return True if tokens are patches of images or videos, so that there is no vocabulary."""
    return spec.vocab_size == 0


def is_uniform(spec: ModelSpec) -> bool:
    """Return True if a model has uniform plans alone, and no profiles of its layers."""
    return is_hybrid(spec) or has_patches(spec)


def refuse_hybrid(spec: ModelSpec, what: str, *, remedy: str = "Use another model") -> ModelSpec:
    """Return the spec; raises InputError for a model with uniform plans alone.

    what : tool that does not support such models.
    """
    if has_patches(spec):
        raise InputError(
            f"{what} has no models of images or videos such as {spec.name}", remedy=remedy
        )
    if is_hybrid(spec):
        raise InputError(
            f"{what} has no layers of one part, no mixers other than attention, no gated or "
            f"sparse attention, and no shared keys and values, and {spec.name} has some",
            remedy=remedy,
        )
    return spec


def parameter_count(layer: LayerSpec) -> int:
    """Return the exact parameter count of one layer.

    With hidden size h, MLP width f, and a query and k key-value heads of width d, attention has
    h(a + 2k)d + adh (twice with cross-attention), and the MLP 2hf, or 3hf if gated. Biases and
    norms are added. Keys that are values, or reused ones, leave out projections. E experts have E
    MLPs, a router of hE (plus E biases) and the shared expert.
    Latent attention is counted by `_latent_parameters`. Raises InputError if a or f is unknown.
    """
    h = layer.hidden_size
    mixers = sum(one.parameter_count(h) for one in layer.mixers)
    if has_attention(layer):
        mixers += (2 if crosses(layer) else 1) * attention_weights(layer)
    mlp = 0
    if layer.parts != "mixer":
        if layer.ffn_hidden_size is None:
            raise InputError(
                "the width of the MLP is unknown", remedy="Add --model with a model spec"
            )
        mlp = _expert_parameters(layer, layer.ffn_hidden_size)
    mlp += 2 * h * layer.token_inputs
    return mixers + mlp + layer.norm_parameters_per_hidden * h + layer.extra_parameters


def _expert_parameters(layer: LayerSpec, width: int) -> int:
    """Return the parameters of a dense MLP, or of all experts of a layer with their router."""
    h, inner = layer.hidden_size, layer.expert_latent or layer.hidden_size
    if layer.num_experts is None:
        return _mlp_parameters(layer, width, h)
    each = _mlp_parameters(layer, width, inner)
    mlp = layer.num_experts * (each + h + layer.router_biases)
    if layer.expert_latent is not None:
        mlp += 2 * h * inner
    if layer.shared_expert_width:
        mlp += _mlp_parameters(layer, layer.shared_expert_width, h) + h * layer.shared_expert_gate
    return mlp


def _mlp_parameters(layer: LayerSpec, width: int, hidden: int) -> int:
    up = 2 if layer.gated_mlp else 1
    return (up + 1) * hidden * width + ((up * width + hidden) if layer.biases else 0)


def attention_weights(layer: LayerSpec) -> int:
    """Return the parameters of one attention block of a layer, biases and inner norms included."""
    width, h = head_dim(layer), layer.hidden_size
    heads = layer.num_heads or 0
    sinks = heads if layer.attention_sinks else 0
    if layer.latent is not None:
        return _latent_parameters(layer, layer.latent, heads, width) + sinks
    kv_heads = layer.num_kv_heads or heads
    keys = 0 if layer.keys_reused else 1 if layer.keys_as_values else 2
    qkv = (heads + keys * kv_heads) * width
    count = h * qkv + heads * width * h + sinks
    if layer.biases or layer.qkv_biases:
        count += qkv
    if layer.biases:
        count += h
    if layer.output_gate:
        count += h * heads * width
    if layer.qk_norms:
        normed = (heads, kv_heads) if layer.wide_qk_norms else (1, 1)
        count += sum(normed[: 1 if layer.keys_reused else 2]) * width
    return count


def _latent_parameters(layer: LayerSpec, latent: LatentSpec, heads: int, width: int) -> int:
    """Return the parameters of latent attention with n heads and query width d = d_n + d_r.

    Queries: q(h + nd), or hnd if projected directly. Keys and values: r(h + n(d_n + d_v)) + h*d_r.
    Output projection: n*d_v*h. Norms: q + r. Source: arXiv 2405.04434, section 2.1 and appendix B.
    """
    h, rank = layer.hidden_size, latent.key_value_rank
    query = heads * width
    count = h * query if latent.query_rank is None else latent.query_rank * (h + query)
    count += rank * (h + heads * (latent.key_width + latent.value_width))
    count += h * latent.rotary_width + heads * latent.value_width * h
    if layer.qk_norms:
        count += (latent.query_rank or 0) + rank
    if layer.indexer is not None:
        count += layer.indexer.parameter_count(h, latent.query_rank)
    return count


def padded_vocab_size(spec: ModelSpec, vocab_degree: int = 1) -> int:
    """Return the vocabulary size padded to a multiple of its divisor times `vocab_degree`.

    Raises InputError if the vocabulary size is unknown.
    """
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown",
            remedy="Add vocab_size to model.json",
        )
    unit = spec.make_vocab_size_divisible_by * vocab_degree
    return math.ceil(spec.vocab_size / unit) * unit


def embedding_parameter_counts(spec: ModelSpec, vocab: int) -> tuple[int, int]:
    """Return (parameters before the first layer, parameters after the last layer), unsharded.

    vocab : the (padded) vocabulary size

    Before: vocab*h, learned positions, extras. After: vocab*h unless tied, the final norm of every
    stack (encoder, decoder), extras.
    """
    first, last = spec.layers[0], spec.layers[-1]
    embedding = vocab * first.hidden_size + spec.position_rows * first.hidden_size
    head = 0 if spec.tied_embeddings else vocab * last.hidden_size
    stacks = {layer.cross_attention: layer for layer in spec.layers}
    # One final norm per stack. Encoder and decoder layers differ in cross-attention.
    head += sum(map(final_norm_parameters, stacks.values()))
    return embedding + spec.extra_embedding_parameters, head + spec.extra_head_parameters


def mtp_parameter_count(spec: ModelSpec) -> int:
    """Return the parameter count of all MTP layers, without the shared embedding and head.

    Each has a projection of 2*h*h, three norms and one layer like the last (arXiv 2412.19437,
    section 2.2).
    """
    if not spec.mtp_layers:
        return 0
    last = spec.layers[spec.layer_types[-1]]
    kinds = [spec.layers[kind] for kind in spec.mtp_order] or [last]
    projection = 2 * last.hidden_size**2 + 3 * final_norm_parameters(last)
    return spec.mtp_layers * (projection + sum(map(parameter_count, kinds)))


def model_parameter_count(spec: ModelSpec, *, mtp: bool = True) -> int:
    """Return the parameter count of a model with its unpadded vocabulary.

    mtp : True to include the MTP layers

    Raises InputError when sizes are unknown.
    """
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown",
            remedy="Add vocab_size to model.json",
        )
    layers = sum(layer.num_layers * parameter_count(layer) for layer in spec.layers)
    ends = sum(embedding_parameter_counts(spec, spec.vocab_size))
    return layers + ends + (mtp_parameter_count(spec) if mtp else 0)
