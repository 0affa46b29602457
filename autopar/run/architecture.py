"""What is trained: the layers of a model in execution order, and what surrounds them.

Sizes are elements of one replica, before any degree divides them. Nothing here depends on the
engine that trains the model; kernels, dispatchers and precision are in `autopar.run.runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from autopar.errors import InputError
from autopar.records import Record, replace

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


class Attention(Record, tag_field="kind", tag="attention"):
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

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.width

    @property
    def key_value(self) -> int:
        """Width of keys and values of all their heads together."""
        return self.kv_heads * (self.width + self.value_width)

    @property
    def value(self) -> int:
        """Width of the result of all heads."""
        return self.heads * self.value_width

    @property
    def rotary(self) -> bool:
        """True if heads have rotary positions."""
        return self.rotary_share > 0

    @property
    def rotary_width(self) -> int:
        """Width of a query or key of one head that has rotary positions."""
        if self.latent is not None:
            return self.latent.rotary_width
        return int(self.width * self.rotary_share)


class Mamba(Record, tag_field="kind", tag="mamba"):
    """A selective state-space mixer (Mamba-2, arXiv 2405.21060)."""

    heads: int
    width: int
    """Width of one head."""
    state: int
    groups: int

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.width


class Mlp(Record, tag_field="kind", tag="mlp"):
    """A dense MLP of two matrices, or of three if it is gated."""

    width: int
    gated: bool = False


class Experts(Record, tag_field="kind", tag="experts"):
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

    @property
    def gates(self) -> int:
        """Matrices in front of the activation of the MLP."""
        return 2 if self.mlp is not None and self.mlp.gated else 1

    @property
    def norm_vectors(self) -> int:
        """Weight vectors of a norm: its scale, and of LayerNorm its shift."""
        return 2 if self.norm == "layer" else 1


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

    @property
    def last(self) -> Layer:
        """The last layer, which MTP layers are like."""
        return self.layers[-1].layer

    @property
    def hidden(self) -> int:
        """Hidden size in front of the head."""
        return self.last.hidden

    @cached_property
    def attention(self) -> Attention:
        """Attention of the first layer that has any; InputError where none has."""
        found = next((one.attention for one in self.kinds if one.attention is not None), None)
        if found is None:
            raise InputError(f"{self.name or 'the model'} has no layer with attention")
        return found

    @cached_property
    def experts(self) -> Experts | None:
        """Experts of the first mixture, None in a dense model."""
        return next((one.experts for one in self.kinds if one.experts is not None), None)

    @cached_property
    def dense_width(self) -> int:
        """Width of the first dense MLP; of a model without one, that of an expert."""
        dense = (one.mlp for one in self.kinds if isinstance(one.mlp, Mlp))
        first = next(dense, self.experts)
        return 0 if first is None else first.width

    @cached_property
    def mixtures(self) -> tuple[bool, ...]:
        """For every layer whether its MLP is a mixture of experts."""
        return tuple(one.experts is not None for one in self.each_layer)


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


# --------------------------------------------------------------------------------------------------
# Models of one kind of layer, some of which are mixtures and some of which have a window.


def decoder_layers(
    layer: Layer, mixtures: Sequence[bool], experts: Experts | None, whole_every: int = 0
) -> tuple[tuple[LayerGroup, ...], int]:
    """Return the groups of a decoder and how often they are repeated.

    Parameters
    ----------
    layer : a dense layer, with the window where there is one.
    mixtures : for every layer whether its MLP is `experts`.
    whole_every : every so many layers one has no window; 0: all have it.
    """
    kinds = {}
    for mixed in {*mixtures}:
        assert not mixed or experts is not None, "a mixture has experts"
        own = replace(layer, mlp=experts) if mixed else layer
        kinds[mixed, True], kinds[mixed, False] = own, without_window(own)
    return grouped(
        tuple(
            # Megatron-Core's `is_layer_window_attention`: of layers counted from 1
            kinds[mixed, not (whole_every and number % whole_every == 0)]
            for number, mixed in enumerate(mixtures, 1)
        )
    )


def without_window(layer: Layer) -> Layer:
    """Return a layer whose attention has no window."""
    attention = layer.attention
    if attention is None or attention.window is None:
        return layer
    return replace(layer, mixers=(replace(attention, window=None),))


def windows_of(model: Model) -> tuple[int | None, int]:
    """Return the window of a model, and every how many layers one has none; 0: all have it.

    Raises InputError where layers without a window do not come in turn.
    """
    windows = [None if one.attention is None else one.attention.window for one in model.each_layer]
    sizes = {*windows} - {None}
    if not sizes:
        return None, 0
    whole = [number for number, window in enumerate(windows, 1) if window is None]
    every = whole[0] if whole else 0
    if len(sizes) > 1 or (every and whole != [*range(every, len(windows) + 1, every)]):
        raise InputError(
            f"model {model.name!r}: windows of its layers do not come in turn, which one launch "
            "cannot say"
        )
    return sizes.pop(), every


def refuse_unlike(model: Model) -> None:
    """Raise InputError where layers differ in more than experts and window, or are no decoder's.

    Engines with one set of sizes, Megatron-LM and those with layers of torch, cannot be told such
    models.
    """
    for layer in model.kinds:
        attention = layer.attention
        if layer.cross or (attention is not None and not attention.causal):
            raise InputError(
                f"model {model.name!r}: Megatron-LM's memory is counted of decoder-only models; "
                "leave --engine megatron out"
            )
        if attention is None or len(layer.mixers) > 1 or layer.mlp is None:
            raise InputError(
                f"model {model.name!r}: its layers have several mixers, or no MLP, which one "
                "launch cannot say"
            )
    for what, of in _ALIKE.items():
        if len({of(layer) for layer in model.kinds}) > 1:
            raise InputError(
                f"model {model.name!r}: its layers have two kinds of {what}, which one launch "
                "cannot say"
            )
    mixtures = {layer.experts for layer in model.kinds} - {None}
    dense = {layer.mlp for layer in model.kinds if isinstance(layer.mlp, Mlp)}
    for what, kinds in (("experts", mixtures), ("dense MLPs", dense)):
        if len(kinds) > 1:
            raise InputError(
                f"model {model.name!r}: its layers have {what} of two kinds, which one launch "
                "cannot say"
            )
    windows_of(model)


def _heads(layer: Layer) -> tuple[object, ...]:
    one = layer.attention
    assert one is not None, "asked of layers with attention alone"
    sizes = (one.heads, one.kv_heads, one.width, one.value_width, one.rotary_share)
    return (*sizes, one.latent, one.head_norms, one.dropout)


def _biases(layer: Layer) -> tuple[object, ...]:
    attention, mlp = layer.attention, layer.mlp
    assert attention is not None, "asked of layers with both alone"
    assert mlp is not None, "asked of layers with both alone"
    return (layer.biases, attention.qkv_biases, mlp.gated)


_ALIKE: Mapping[str, Callable[[Layer], object]] = {
    "widths": lambda layer: layer.hidden,
    "sequence lengths": lambda layer: layer.seq_length,
    "heads": _heads,
    "norms": lambda layer: (layer.norm, layer.norms),
    "biases": _biases,
}
"""What all layers of a launch share, in the order in which it is refused."""
