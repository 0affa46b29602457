"""ModelSpec (what the architecture is) and ModelProfile (what was measured of it).

A ModelSpec is needed for legality (heads, widths) and for estimates; a ModelProfile holds the
content of the two documented model files in base units. `autopar.documents.model` reads and writes
the latter, `autopar.documents.spec` the former.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Annotated

from msgspec import Meta, field

from autopar.errors import InputError
from autopar.records import Record, Seconds, number, whole_number
from autopar.sources import Source

MOST_LAYERS = 10**4
MOST_SIZE = 10**9
"""Largest plausible number of layers, and of any other whole number."""

_Size = Annotated[int, whole_number(1, MOST_SIZE)]
_SizeOrZero = Annotated[int, whole_number(0, MOST_SIZE)]
_Layers = Annotated[int, whole_number(1, MOST_LAYERS)]
_MtpLayers = Annotated[int, whole_number(0, 64)]
_Parameters = Annotated[int, whole_number(0, 10**13)]
_Ratio = Annotated[float, number(1.0, 1e12)]
_Text = Annotated[str, Meta(min_length=1, extra={"expected": "a text"})]


class LatentSpec(Record):
    """Widths of multi-head latent attention: queries and keys pass through narrow projections.

    The words of DeepSeek-V2 (arXiv 2405.04434, section 2.1); `num_heads` heads, each with keys and
    values of its own.
    """

    query_rank: _Size | None = None
    """Of the narrow queries; None where they are projected at once."""
    key_value_rank: _Size
    key_width: _Size
    """Of a query and a key of one head, the part without positions."""
    rotary_width: _Size
    """The part with positions; of keys it is one for all heads."""
    value_width: _Size


_WIDTHS = '{"key_value_rank": ..., "key_width": ..., "rotary_width": ..., "value_width": ...}'
_Latent = Annotated[
    LatentSpec, Meta(extra={"expected": f"the widths of latent attention, {_WIDTHS}"})
]


class LayerSpec(Record):
    """A run of equal transformer layers (one layer type)."""

    num_layers: _Layers
    seq_length: _Size
    hidden_size: _Size
    num_heads: _Size | None = None
    """None when unknown (documented files alone): divisibility is then not checked."""
    num_kv_heads: _Size | None = None
    head_dim: _Size | None = None
    ffn_hidden_size: _Size | None = None
    gated_mlp: bool = False
    """True for SwiGLU-like MLPs with three matrices, False for two."""
    causal: bool = True
    cross_attention: bool = False
    """True for an encoder-decoder model's decoder layer."""
    biases: bool = False
    """True when all linear layers carry biases; `qkv_biases` when only the QKV projection does."""
    qkv_biases: bool = False
    norm_parameters_per_hidden: _SizeOrZero = 2
    """Norm parameters of a layer divided by hidden_size (2 RMSNorms: 2; 2 LayerNorms: 4)."""
    qk_norms: bool = False
    """True where every head's queries and keys pass an RMSNorm, one for all heads of each."""
    num_experts: _Size | None = None
    """MLPs of a mixture-of-experts layer, each of width `ffn_hidden_size`; None for one MLP."""
    experts_per_token: _Size | None = None
    """Experts that each token visits."""
    shared_expert_width: _SizeOrZero = 0
    """Width of the MLP that every token visits beside its experts; 0 for none."""
    shared_expert_gate: bool = False
    """True where what the shared MLP puts out is weighted, by a vector of the hidden size."""
    router_biases: bool = False
    """True where the router adds a trained number per expert."""
    latent: _Latent | None = None
    """Multi-head latent attention; None: heads of `head_dim`. With it `qk_norms` are those of the
    narrow queries and of the narrow keys and values."""
    window: _Size | None = None
    """Tokens that a query sees at most, its own among them; None: all before it."""
    whole_every: _SizeOrZero = 0
    """With a window, of the layers of this type every so-manieth has none; 0: all have it."""
    attention_sinks: bool = False
    """True where the softmax of every head has one more, trained, score."""
    wide_qk_norms: bool = False
    """True where `qk_norms` weigh all heads of queries and of keys, not one width for all heads."""
    num_norms: _Size | None = None
    """Norms of a layer, where they are not one before each of its parts (two, with cross-attention
    three)."""


_LAYER = '{"num_layers": ..., "seq_length": ..., "hidden_size": ...}'
_Layer = Annotated[LayerSpec, Meta(extra={"expected": f"a layer type, {_LAYER}"})]
_LayerList = Annotated[
    tuple[_Layer, ...],
    Meta(min_length=1, extra={"expected": f"a list of layer types, [{_LAYER}]"}),
]


class ModelSpec(Record):
    """What the architecture is: layer runs in execution order, and what surrounds them."""

    name: _Text
    layers: _LayerList
    vocab_size: _Size | None = None
    tied_embeddings: bool = False
    learned_positions: _SizeOrZero = 0
    """Rows of a learned position embedding; 0 for rotary or relative positions."""
    rotary_base: _Ratio | None = None
    """Base of rotary positions; None where there are none, and where it is unknown or frequencies
    are scaled in another way than the next field says."""
    rotary_scaling_factor: _Ratio | None = None
    """Factor by which Llama 3.1 and later slow the low frequencies of rotary positions (those of
    more than 8192 tokens a turn, with a transition from 2048); None: as the base gives them."""
    make_vocab_size_divisible_by: _Size = 128
    extra_embedding_parameters: _Parameters = 0
    """Parameters in front of the first layer besides the tables (token types, position biases)."""
    extra_head_parameters: _Parameters = 0
    """Parameters behind the last layer besides final norm and output matrix (MLM transform)."""
    mtp_layers: _MtpLayers = 0
    """Modules behind the last layer that predict further tokens, each with a layer like it."""
    interleaved: bool = False
    """True where layers of the types take turns, one of each; all types have as many."""

    @property
    def num_layers(self) -> int:
        """Layers of all types together."""
        return sum(layer.num_layers for layer in self.layers)

    @property
    def position_rows(self) -> int:
        """Rows of the learned position embedding in training: at least the longest sequence."""
        if not self.learned_positions:
            return 0
        return max(self.learned_positions, *(layer.seq_length for layer in self.layers))

    @property
    def layer_types(self) -> tuple[int, ...]:
        """The type index of every layer, in execution order."""
        runs = ([k] * layer.num_layers for k, layer in enumerate(self.layers))
        if self.interleaved:
            return tuple(chain.from_iterable(zip(*runs, strict=True)))
        return tuple(chain.from_iterable(runs))


class TimePoint(Record):
    """Measured forward of one whole layer on one GPU, for `batch` samples together."""

    batch: int
    seq_length: int
    forward_s: float
    low_s: float | None = None
    high_s: float | None = None
    """5th and 95th percentile of the samples, where a sidecar has them."""


class ShardedTime(Record):
    """Median times of one layer at one size on a rank, in seconds for the whole batch."""

    layer_type: int
    batch: _Size
    seq_length: _Size
    degree: _Size = 1
    """Of the tensor group; 1 for a whole layer."""
    kind: str = "sp"
    """A `TensorKind` of `autopar.documents.sidecar`; readers leave out those that they do not
    know."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    recompute_s: Seconds | None = None
    """Forward again inside the backward, where the layer is checkpointed."""
    optimizer_s: Seconds | None = None
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None
    recompute_low_s: Seconds | None = None
    recompute_high_s: Seconds | None = None


class OtherTime(Record):
    """Median times of everything that is not a layer, in seconds for the whole batch."""

    batch: _Size
    seq_lengths: tuple[_Size, ...]
    """Of all layer types."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    """None where only forwards are known; the planner then takes twice the forward."""
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples, where a sidecar has them."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None


class LayerMemory(Record):
    """Memory of one layer at one sequence length."""

    parameter_count: float
    """Parameters of one unsharded layer."""
    activation_bytes_per_sample: Mapping[int, float]
    """By tensor degree, per sample of the tensor group's local batch."""
    checkpoint_bytes_per_sample: float | None
    """What a checkpointed layer keeps, unsharded; None when not measured."""
    ulysses_activation_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """By Ulysses degree, on a rank, where a sidecar has it; its all-to-alls keep more than the
    unsharded activation over the degree."""
    backward_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """By tensor degree, on a rank, where a sidecar has it: what the layer's backward needs for a
    moment above what the layer keeps."""
    ulysses_backward_bytes_per_sample: Mapping[int, float] = field(default_factory=dict)
    """The same by Ulysses degree, above 1."""
    shared_bytes: Mapping[int, float] = field(default_factory=dict)
    """By tensor degree, on a rank, what all its layers of this type share whatever their number and
    batch; empty: one gathered input, where a stage has a buffer for it."""


class OtherMemory(Record):
    """Memory of embedding, head and loss at one sequence length, by vocabulary degree."""

    model_state_bytes: Mapping[int, float]
    """Parameters, gradients and optimizer (16 bytes per parameter), not sharded by data."""
    activation_bytes_per_sample: Mapping[int, float]
    held_bytes: Mapping[int, float] = field(default_factory=dict)
    """What a rank holds beside both, whatever its batch; none where it is empty."""


class LayerProfile(Record):
    """What was measured of one layer type."""

    times: tuple[TimePoint, ...]
    memory: Mapping[int, LayerMemory]
    """By sequence length."""
    sharded_times: tuple[ShardedTime, ...] = ()
    """What a sidecar adds: backward apart from forward, sharded layers, recomputation."""


class ModelProfile(Record):
    """Content of one computation file and one memory file, in base units."""

    layers: tuple[LayerProfile, ...]
    other_times: tuple[OtherTime, ...]
    other_memory: Mapping[str, Mapping[tuple[int, ...], OtherMemory]]
    """By position ('only', 'first', 'last' stage), then sequence lengths of the layer types."""
    sequence_parallel: bool
    """True when the memory tables are those measured with Megatron sequence parallelism."""
    precision: str = "bf16"
    estimated: bool = False
    synthetic: bool = False
    """True when the numbers exercise the code and describe no machine."""
    logits_peak_bytes_per_sample: float = 0.0
    """Extra bytes per sample while the loss runs, undivided by the vocabulary degree; measured
    tables contain the peak already, estimated ones add it here."""
    rank_bytes: float = 0.0
    """Of every rank, whatever it runs: workspaces and tables of the trainer's software."""
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader had to derive or skip, in plain words."""


# --------------------------------------------------------------------------------------------------
# What follows from an architecture by counting.


def head_dim(layer: LayerSpec) -> int:
    """Return the width of a query of one head; raises InputError when the heads are unknown."""
    if layer.num_heads is None:
        raise InputError("the number of attention heads is unknown; give a model spec (--model)")
    if layer.latent is not None:
        return layer.latent.key_width + layer.latent.rotary_width
    return layer.head_dim or layer.hidden_size // layer.num_heads


def layer_norms(layer: LayerSpec) -> int:
    """Return how many norms of the hidden size a layer has."""
    return layer.num_norms or (3 if layer.cross_attention else 2)


def final_norm_parameters(layer: LayerSpec) -> int:
    """Return the parameters of the norm behind a stack of such layers: those of one of theirs."""
    return layer.norm_parameters_per_hidden // layer_norms(layer) * layer.hidden_size


def parameter_count(layer: LayerSpec) -> int:
    """Return the exact number of parameters of one layer.

    h(a + 2k)d + adh for attention (twice with cross-attention), 2hf or 3hf for the MLP, biases
    and norms, 2d for those of queries and keys; a heads and k key-value heads of width d. With E
    experts, E MLPs, a router of hE (and E biases) and the MLP that all tokens visit. With latent
    attention as `_latent_parameters`. Raises InputError when a, f are unknown.
    """
    attention = attention_weights(layer)
    if layer.ffn_hidden_size is None:
        raise InputError("the width of the MLP is unknown; give a model spec (--model)")
    h = layer.hidden_size
    mlp = _mlp_parameters(layer, layer.ffn_hidden_size)
    if layer.num_experts is not None:
        mlp = layer.num_experts * (mlp + h + layer.router_biases)
        if layer.shared_expert_width:
            mlp += _mlp_parameters(layer, layer.shared_expert_width) + h * layer.shared_expert_gate
    blocks = 2 if layer.cross_attention else 1
    return blocks * attention + mlp + layer.norm_parameters_per_hidden * h


def _mlp_parameters(layer: LayerSpec, width: int) -> int:
    up = 2 if layer.gated_mlp else 1
    h = layer.hidden_size
    return (up + 1) * h * width + ((up * width + h) if layer.biases else 0)


def attention_weights(layer: LayerSpec) -> int:
    """Return the parameters of one attention of a layer, its biases and inner norms included."""
    width, h = head_dim(layer), layer.hidden_size
    heads = layer.num_heads or 0
    sinks = heads if layer.attention_sinks else 0
    if layer.latent is not None:
        return _latent_parameters(layer, layer.latent, heads, width) + sinks
    kv_heads = layer.num_kv_heads or heads
    qkv = (heads + 2 * kv_heads) * width
    count = h * qkv + heads * width * h + sinks
    if layer.biases or layer.qkv_biases:
        count += qkv
    if layer.biases:
        count += h
    if layer.qk_norms:
        count += (heads + kv_heads if layer.wide_qk_norms else 2) * width
    return count


def _latent_parameters(layer: LayerSpec, latent: LatentSpec, heads: int, width: int) -> int:
    """Return the parameters of latent attention of n heads, with query width d = d_n + d_r.

    q(h + nd), or hnd at once; r(h + n(d_n + d_v)) + h*d_r for keys and values; n*d_v*h behind; q +
    r of the norms. arXiv 2405.04434, section 2.1 and appendix B.
    """
    h, rank = layer.hidden_size, latent.key_value_rank
    query = heads * width
    count = h * query if latent.query_rank is None else latent.query_rank * (h + query)
    count += rank * (h + heads * (latent.key_width + latent.value_width))
    count += h * latent.rotary_width + heads * latent.value_width * h
    if layer.qk_norms:
        count += (latent.query_rank or 0) + rank
    return count


def padded_vocab_size(spec: ModelSpec, vocab_degree: int = 1) -> int:
    """Return the vocabulary padded to a multiple of the divisor times the vocabulary degree."""
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown; give vocab_size in model.json"
        )
    unit = spec.make_vocab_size_divisible_by * vocab_degree
    return math.ceil(spec.vocab_size / unit) * unit


def embedding_parameter_counts(spec: ModelSpec, vocab: int) -> tuple[int, int]:
    """Return the parameters in front of the first layer and behind the last one, unsharded.

    `vocab` is the (padded) vocabulary. The first: vocab*h, learned positions, extras. The second:
    vocab*h unless tied, the final norm of every stack (encoder, decoder), extras.
    """
    first, last = spec.layers[0], spec.layers[-1]
    embedding = vocab * first.hidden_size + spec.position_rows * first.hidden_size
    head = 0 if spec.tied_embeddings else vocab * last.hidden_size
    stacks = {layer.cross_attention: layer for layer in spec.layers}
    # one final norm per stack; encoder and decoder differ in cross-attention
    head += sum(map(final_norm_parameters, stacks.values()))
    return embedding + spec.extra_embedding_parameters, head + spec.extra_head_parameters


def mtp_parameter_count(spec: ModelSpec) -> int:
    """Return the parameters of all modules that predict further tokens; tables are the model's.

    Of each 2*h*h, three norms and a layer like the last one (arXiv 2412.19437, section 2.2).
    """
    last = spec.layers[-1]
    projection = 2 * last.hidden_size**2 + 3 * final_norm_parameters(last)
    return spec.mtp_layers * (projection + parameter_count(last)) if spec.mtp_layers else 0


def model_parameter_count(spec: ModelSpec, *, mtp: bool = True) -> int:
    """Return the parameters of a whole model, its vocabulary without padding.

    mtp : with the modules that predict further tokens. Raises InputError where sizes are unknown.
    """
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown; give vocab_size in model.json"
        )
    layers = sum(layer.num_layers * parameter_count(layer) for layer in spec.layers)
    ends = sum(embedding_parameter_counts(spec, spec.vocab_size))
    return layers + ends + (mtp_parameter_count(spec) if mtp else 0)
