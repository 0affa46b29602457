"""How one part of a model is laid out over a tensor group, as seen by one of its ranks.

What it becomes in torch is in `parallel`; here nothing imports torch.
"""

from __future__ import annotations

from typing import Literal

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.records import Record
from autopar.run.model import LayerSpec
from autopar.run.plan import Module

Checkpoint = Literal["none", "full", "selective"]
ContextExchange = Literal["ring", "all_gather"]
"""How ranks of a context group get each other's keys and values: one rank's after the other, or all
at once."""
Routing = Literal["even", "top_k"]
"""Where tokens go: to the experts in turn, as many to each; or where the router sends them."""


class Sharding(Record):
    """A tensor degree, what it shards, and what is recomputed."""

    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    """full: only the layer's input is kept; selective: attention is recomputed."""
    expert_degree: int = 1
    """Ranks over which the experts of a mixture-of-experts layer are spread."""
    flash: bool = True
    """Attention that never keeps the matrix of scores; otherwise softmax in the open."""
    dropout: float = 0.0
    context_degree: int = 1
    """Ranks over which the sequence is divided throughout the layer, attention included."""
    context_exchange: ContextExchange = "ring"
    whole_experts: bool = False
    """True where tensor ranks have other experts and not pieces of the same ones."""
    routing: Routing = "even"
    recompute: tuple[Module, ...] = ()
    """Modules that the backward computes again."""

    @property
    def is_tensor(self) -> bool:
        """True when the group shards weights, False for Ulysses."""
        return self.kind != "ulysses"

    @property
    def shards_sequence(self) -> bool:
        """True when the residual stream is split over the group along the sequence."""
        return self.kind in ("sp", "dtensor_sp", "ulysses")

    def local_seq_length(self, seq_length: int) -> int:
        """Return the tokens of a sample that a rank holds between layers."""
        pieces = self.degree if self.shards_sequence else 1
        return seq_length // (pieces * self.context_degree)

    def check(self, layer: LayerSpec) -> None:
        """Raise InputError, one sentence, where a layer cannot be laid out like this."""
        t = self.degree
        if t < 1:
            raise InputError(f"a tensor degree of {t} does not exist; give at least 1")
        numbers: list[tuple[str, int | None]] = [("attention heads", layer.num_heads)]
        # Ulysses keeps weights whole, so that any width will do
        if self.is_tensor and not (self.whole_experts and layer.num_experts is not None):
            numbers.append(("MLP width", layer.ffn_hidden_size))
        if self.is_tensor:
            numbers.append(("width of the shared MLP", layer.shared_expert_width))
        if self.shards_sequence:
            numbers.append(("sequence length", layer.seq_length))
        for name, number in numbers:
            if number is not None and number % t:
                raise InputError(
                    f"tensor degree {t} does not divide the {name} {number}; choose a degree that "
                    "does"
                )
        if self.context_degree > 1:
            self._check_context(layer)
        kv_heads = layer.num_kv_heads
        # ranks divide the heads, or share them; else some would have more than others
        if kv_heads is not None and kv_heads % t and t % kv_heads:
            raise InputError(
                f"tensor degree {t} and the {kv_heads} key-value heads do not divide one another; "
                "choose another degree"
            )

    def _check_context(self, layer: LayerSpec) -> None:
        c, pieces = self.context_degree, self.degree if self.shards_sequence else 1
        alone = not_divided(layer)
        if alone is not None:
            raise InputError(
                f"layers with {alone} are built with context degree 1; give that degree"
            )
        if not self.flash or self.dropout:
            raise InputError(
                f"context degree {c} needs attention without dropout that never keeps the matrix "
                "of scores; choose context degree 1"
            )
        if layer.seq_length % (2 * c * pieces):
            raise InputError(
                f"2 * context degree {c} * degree {pieces} does not divide the sequence length "
                f"{layer.seq_length}; choose degrees that do"
            )


def not_divided(layer: LayerSpec) -> str | None:
    """Return which attention of a layer is not divided over context ranks; None: none."""
    # a window that no sequence reaches is none
    narrow = layer.window is not None and layer.window < layer.seq_length
    for name, is_there in (
        ("cross-attention", layer.cross_attention),
        ("latent attention", layer.latent is not None),
        ("attention within a window", narrow),
        ("attention sinks", layer.attention_sinks),
    ):
        if is_there:
            return name
    return None


def held_tokens(
    length: int, *, context: tuple[int, int] = (1, 0), shard: tuple[int, int] = (1, 0)
) -> tuple[tuple[int, int], ...]:
    """Return first and end of the pieces of a sequence that a rank holds, in its order.

    A context group divides the sequence into twice as many pieces as it has ranks, of which each
    has one from the front and the one as far from the back: with a causal mask all of them have as
    much to do. What a rank of it holds is then divided once more, into consecutive shards.

    context, shard : degree and place.
    """
    c, i = context
    step = length // (2 * c)
    # of one rank both pieces together are everything
    pieces = [(i * step, (i + 1) * step), (length - (i + 1) * step, length - i * step)]
    if c == 1:
        pieces = [(0, length)]
    t, r = shard
    size = length // (c * t)
    low, at = r * size, 0
    found: list[tuple[int, int]] = []
    for first, end in pieces:
        start, stop = max(low, at), min(low + size, at + end - first)
        if start < stop:
            piece = (first + start - at, first + stop - at)
            # the two in the middle of the sequence touch
            if found and found[-1][1] == piece[0]:
                piece = (found.pop()[0], piece[1])
            found.append(piece)
        at += end - first
    return tuple(found)
