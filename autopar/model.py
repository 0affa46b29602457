"""ModelSpec (what the architecture is) and ModelProfile (what was measured of it).

A ModelSpec is needed for legality (heads, widths) and for estimates; a ModelProfile holds the
content of the two documented model files in base units. `autopar.documents.model` reads and writes
the latter, `autopar.documents.spec` the former.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field

from autopar.errors import InputError
from autopar.records import dataclass
from autopar.sources import Source

__all__ = [
    "LayerMemory",
    "LayerProfile",
    "LayerSpec",
    "ModelProfile",
    "ModelSpec",
    "OtherMemory",
    "OtherTime",
    "ShardedTime",
    "TimePoint",
    "embedding_parameter_counts",
    "head_dim",
    "padded_vocab_size",
    "parameter_count",
]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A run of equal transformer layers (one layer type)."""

    num_layers: int
    seq_length: int
    hidden_size: int
    num_heads: int | None = None
    """None when unknown (documented files alone): divisibility is then not checked."""
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    gated_mlp: bool = False
    """True for SwiGLU-like MLPs with three matrices, False for two."""
    causal: bool = True
    cross_attention: bool = False
    """True for an encoder-decoder model's decoder layer."""
    biases: bool = False
    """True when all linear layers carry biases; `qkv_biases` when only the QKV projection does."""
    qkv_biases: bool = False
    norm_parameters_per_hidden: int = 2
    """Norm parameters of a layer divided by hidden_size (2 RMSNorms: 2; 2 LayerNorms: 4)."""
    qk_norms: bool = False
    """True where every head's queries and keys pass an RMSNorm, one for all heads of each."""
    num_experts: int | None = None
    """MLPs of a mixture-of-experts layer, each of width `ffn_hidden_size`; None for one MLP."""
    experts_per_token: int | None = None
    """Experts that each token visits."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the architecture is: layer runs in execution order, and what surrounds them."""

    name: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int | None = None
    tied_embeddings: bool = False
    learned_positions: int = 0
    """Rows of a learned position embedding; 0 for rotary or relative positions."""
    rotary_base: float | None = None
    """Base of rotary positions; None where there are none, and where it is unknown or frequencies
    are scaled in another way than the next field says."""
    rotary_scaling_factor: float | None = None
    """Factor by which Llama 3.1 and later slow the low frequencies of rotary positions (those of
    more than 8192 tokens a turn, with a transition from 2048); None: as the base gives them."""
    make_vocab_size_divisible_by: int = 128
    extra_embedding_parameters: int = 0
    """Parameters in front of the first layer besides the tables (token types, position biases)."""
    extra_head_parameters: int = 0
    """Parameters behind the last layer besides final norm and output matrix (MLM transform)."""

    @property
    def num_layers(self) -> int:
        """Layers of all types together."""
        return sum(layer.num_layers for layer in self.layers)

    @property
    def layer_types(self) -> tuple[int, ...]:
        """The type index of every layer, in execution order."""
        return tuple(k for k, layer in enumerate(self.layers) for _ in range(layer.num_layers))


@dataclass(frozen=True, kw_only=True)
class TimePoint:
    """Measured forward of one whole layer on one GPU, for `batch` samples together."""

    batch: int
    seq_length: int
    forward_s: float
    low_s: float | None = None
    high_s: float | None = None
    """5th and 95th percentile of the samples, where a sidecar has them."""


@dataclass(frozen=True, kw_only=True)
class ShardedTime:
    """Measured times of one layer on one rank of a tensor group, for `batch` samples together."""

    batch: int
    seq_length: int
    degree: int
    """Degree of the group; 1 for a whole layer."""
    kind: str
    """As `TensorKind` of `autopar.documents.sidecar`."""
    forward_s: float
    backward_s: float | None = None
    recompute_s: float | None = None
    optimizer_s: float | None = None
    forward_low_s: float | None = None
    forward_high_s: float | None = None
    """5th and 95th percentile of the samples."""
    backward_low_s: float | None = None
    backward_high_s: float | None = None
    recompute_low_s: float | None = None
    recompute_high_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class OtherTime:
    """Measured forward of everything that is not a layer, for `batch` samples together."""

    batch: int
    seq_lengths: tuple[int, ...]
    forward_s: float
    backward_s: float | None = None
    """None where only forwards are known; the planner then takes twice the forward."""
    forward_low_s: float | None = None
    forward_high_s: float | None = None
    """5th and 95th percentile of the samples, where a sidecar has them."""
    backward_low_s: float | None = None
    backward_high_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
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


@dataclass(frozen=True, kw_only=True)
class OtherMemory:
    """Memory of embedding, head and loss at one sequence length, by vocabulary degree."""

    model_state_bytes: Mapping[int, float]
    """Parameters, gradients and optimizer (16 bytes per parameter), not sharded by data."""
    activation_bytes_per_sample: Mapping[int, float]
    held_bytes: Mapping[int, float] = field(default_factory=dict)
    """What a rank holds beside both, whatever its batch; none where it is empty."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """What was measured of one layer type."""

    times: tuple[TimePoint, ...]
    memory: Mapping[int, LayerMemory]
    """By sequence length."""
    sharded_times: tuple[ShardedTime, ...] = ()
    """What a sidecar adds: backward apart from forward, sharded layers, recomputation."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
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
    """Return the width of one attention head; raises InputError when the heads are unknown."""
    if layer.num_heads is None:
        raise InputError("the number of attention heads is unknown; give a model spec (--model)")
    return layer.head_dim or layer.hidden_size // layer.num_heads


def parameter_count(layer: LayerSpec) -> int:
    """Return the exact number of parameters of one layer.

    h(a + 2k)d + adh for attention (twice with cross-attention), 2hf or 3hf for the MLP, biases
    and norms, 2d for those of queries and keys; a heads and k key-value heads of width d. With E
    experts, E MLPs and a router of hE without biases. Raises InputError when a, f are unknown.
    """
    width = head_dim(layer)
    heads = layer.num_heads or 0
    kv_heads = layer.num_kv_heads or heads
    if layer.ffn_hidden_size is None:
        raise InputError("the width of the MLP is unknown; give a model spec (--model)")
    h, ffn = layer.hidden_size, layer.ffn_hidden_size
    qkv = (heads + 2 * kv_heads) * width
    attention = h * qkv + heads * width * h
    if layer.biases or layer.qkv_biases:
        attention += qkv
    if layer.biases:
        attention += h
    if layer.qk_norms:
        attention += 2 * width
    up = 2 if layer.gated_mlp else 1
    mlp = (up + 1) * h * ffn + ((up * ffn + h) if layer.biases else 0)
    if layer.num_experts is not None:
        mlp = layer.num_experts * (mlp + h)
    blocks = 2 if layer.cross_attention else 1
    return blocks * attention + mlp + layer.norm_parameters_per_hidden * h


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
    embedding = vocab * first.hidden_size + spec.learned_positions * first.hidden_size
    head = 0 if spec.tied_embeddings else vocab * last.hidden_size
    stacks = {layer.cross_attention: layer for layer in spec.layers}
    # one final norm per stack; encoder and decoder differ in cross-attention
    for layer in stacks.values():
        norms = 3 if layer.cross_attention else 2
        # those of one norm: of a layer over the norms that it has
        head += layer.norm_parameters_per_hidden // norms * layer.hidden_size
    return embedding + spec.extra_embedding_parameters, head + spec.extra_head_parameters
