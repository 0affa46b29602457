"""What is trained: the layers of a model in execution order, and what surrounds them.

Sizes are elements of one replica, before any degree divides them. Nothing here depends on the
engine that trains the model; kernels, dispatchers and precision are in `autopar.run.runtime`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal

from autopar.records import Record

HeadNorms = Literal["none", "head", "all"]
"""Norms of queries and keys: none, one width for every head, or one weight for all heads."""
Positions = Literal["learned", "rotary", "none"]
Norm = Literal["layer", "rms"]


class LatentAttention(Record):
    """Ranks and widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1)."""

    query_rank: int | None
    """Width of the compressed queries; None: queries are projected at once."""
    kv_rank: int
    """Width of the compressed keys and values."""
    key_width: int
    """Width of a query and a key of one head without positions."""
    rotary_width: int
    """Width with positions; keys have one for all heads."""


class Attention(Record):
    """Attention of one layer."""

    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values."""
    width: int
    """Width of a query and a key of one head, positions included."""
    value_width: int
    """Width of a value of one head."""
    window: int | None = None
    """Tokens that a query attends to, its own included; None: all before it."""
    causal: bool = True
    rotary_share: float = 1.0
    """Share of a head's width with rotary positions; 0: none."""
    head_norms: HeadNorms = "none"
    """With latent attention the norms of the compressed queries, keys and values."""
    sinks: bool = False
    """True if the softmax of every head has one more, trained, score."""
    qkv_biases: bool = False
    dropout: float = 0.0
    latent: LatentAttention | None = None


class Mamba(Record):
    """A selective state-space mixer (Mamba-2, arXiv 2405.21060)."""

    heads: int
    width: int
    """Width of one head."""
    state: int
    groups: int


class Mlp(Record):
    """A dense MLP of two matrices, or of three if it is gated."""

    width: int
    gated: bool = False


class Experts(Record):
    """A mixture of experts: MLPs, of which every token visits a few."""

    number: int
    per_token: int
    """Experts that a token visits."""
    width: int
    """Width of one expert."""
    gated: bool = False
    shared_width: int = 0
    """Width of the MLP that every token visits; 0: none."""
    shared_gate: bool = False
    """True if the output of the shared MLP is weighted by a vector of the hidden size."""
    router_biases: bool = False
    latent: int | None = None
    """Width to which tokens are projected for the experts; None: the hidden size."""


Mixer = Attention | Mamba


class Layer(Record):
    """One layer: mixers of tokens, then an MLP; either may be missing."""

    hidden: int
    mixers: tuple[Mixer, ...]
    """Two run in parallel; none in a layer that is an MLP alone."""
    mlp: Mlp | Experts | None
    cross: bool = False
    """True if the layer also attends to the sequence of the layers before its group (decoder)."""
    norm: Norm = "rms"
    norms: int = 2
    """Norms of the hidden size: 4 with one behind attention and MLP each, 1 in parallel layers."""
    biases: bool = False
    """True if linear layers have biases, the router excluded."""
    seq_length: int | None = None
    """Tokens of a sequence, where an encoder's differ from the run's; None: those of the run."""

    @property
    def attention(self) -> Attention | None:
        """Attention of the layer, None where it has none."""
        return next((one for one in self.mixers if isinstance(one, Attention)), None)

    @property
    def experts(self) -> Experts | None:
        """Experts of the layer, None where its MLP is dense or missing."""
        return self.mlp if isinstance(self.mlp, Experts) else None


class LayerGroup(Record):
    """Consecutive equal layers."""

    count: int
    layer: Layer


class Model(Record, dict=True):
    """A transformer: groups of layers in execution order, embedding and head."""

    name: str = ""
    layers: tuple[LayerGroup, ...]
    repeat: int = 1
    """Times that the sequence of groups is repeated: alternating kinds of layers."""
    vocab: int
    """Rows of the embedding without padding."""
    vocab_divisor: int = 128
    """The padded vocabulary is a multiple of this times the tensor degree."""
    tied: bool = False
    """True if embedding and head are one matrix."""
    positions: Positions = "rotary"
    max_positions: int = 0
    """Rows of learned positions."""
    rotary_base: float | None = None
    rotary_scaling: float | None = None
    """Factor of Llama 3.1 for low frequencies; None: not scaled."""
    extra_embedding: int = 0
    """Parameters in front of the first layer next to the tables."""
    extra_head: int = 0
    """Parameters behind the last layer next to final norm and head."""
    mtp: int = 0
    """Multi-token prediction layers behind the last layer."""
    mtp_shared: bool = False
    """True if all MTP layers are one."""
    dropout: float = 0.0
    """Dropout of the residual stream."""

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
        """Number of layers without MTP layers."""
        return self.repeat * sum(group.count for group in self.layers)

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Different layers, in the order in which they first occur."""
        return tuple(dict.fromkeys(group.layer for group in self.layers))


def grouped(layers: tuple[Layer, ...]) -> tuple[tuple[LayerGroup, ...], int]:
    """Return layers as groups and the number of times that these are repeated.

    The shortest sequence that gives all layers is taken: 24 pairs of two kinds are two groups of
    one layer, 24 times.
    """
    total = len(layers)
    period = next(
        size
        for size in range(1, total + 1)
        if total % size == 0 and layers == layers[:size] * (total // size)
    )
    # one kind alone is one group, not one layer many times
    if period == 1:
        return (LayerGroup(count=total, layer=layers[0]),), 1
    groups: list[LayerGroup] = []
    for layer in layers[:period]:
        if groups and groups[-1].layer == layer:
            groups[-1] = LayerGroup(count=groups[-1].count + 1, layer=layer)
        else:
            groups.append(LayerGroup(count=1, layer=layer))
    return tuple(groups), total // period
