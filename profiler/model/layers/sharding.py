"""Sharding of one part of a model over a parallel group, from the view of one rank.

`parallel` implements it. This module does not import torch.
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
"""Exchange of keys and values in a context-parallel group: ring attention, or one all-gather."""
Routing = Literal["even", "top_k"]
"""Routing of tokens to experts: `even` is round-robin, `top_k` follows the router's scores."""


class Sharding(Record):
    """Parallel degrees of a layer, its sharded tensors and its recomputed modules."""

    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    """Recomputation: `full` saves only the layer's input, `selective` recomputes core attention."""
    expert_degree: int = 1
    """Expert-parallel degree: ranks over which the experts of an MoE layer are distributed."""
    flash: bool = True
    """True for fused attention, which stores no score matrix; False for an explicit softmax."""
    dropout: float = 0.0
    context_degree: int = 1
    """Context-parallel degree: ranks over which the sequence is sharded, including in attention."""
    context_exchange: ContextExchange = "ring"
    whole_experts: bool = False
    """True if tensor-parallel ranks hold different, complete experts; False if they hold a shard
    of every expert."""
    routing: Routing = "even"
    recompute: tuple[Module, ...] = ()
    """Modules that are recomputed in the backward, in addition to `checkpoint`."""

    @property
    def is_tensor(self) -> bool:
        """True if the group shards weights; False for Ulysses."""
        return self.kind != "ulysses"

    @property
    def shards_sequence(self) -> bool:
        """True if the residual stream is sharded over the group along the sequence."""
        return self.kind in ("sp", "dtensor_sp", "ulysses")

    def local_seq_length(self, seq_length: int) -> int:
        """Return the tokens per sample in a rank's residual stream."""
        pieces = self.degree if self.shards_sequence else 1
        return seq_length // (pieces * self.context_degree)

    def check(self, layer: LayerSpec) -> None:
        """Raise InputError if a layer cannot have this sharding."""
        t = self.degree
        if t < 1:
            raise InputError(f"tensor degree {t}: expected at least 1")
        numbers: list[tuple[str, int | None]] = [("attention heads", layer.num_heads)]
        # Ulysses does not shard weights, so any width is legal
        if self.is_tensor and not (self.whole_experts and layer.num_experts is not None):
            numbers.append(("MLP width", layer.ffn_hidden_size))
        if self.is_tensor:
            numbers.append(("width of the shared MLP", layer.shared_expert_width))
        if self.shards_sequence:
            numbers.append(("sequence length", layer.seq_length))
        for name, number in numbers:
            if number is not None and number % t:
                raise InputError(
                    f"tensor degree {t} does not divide the {name} {number}",
                    remedy="Use a divisor",
                )
        if self.context_degree > 1:
            self._check_context(layer)
        kv_heads = layer.num_kv_heads
        # otherwise ranks would have different numbers of key-value heads
        if kv_heads is not None and kv_heads % t and t % kv_heads:
            raise InputError(
                f"tensor degree {t} is neither a divisor nor a multiple of the {kv_heads} "
                "key-value heads",
                remedy="Use another degree",
            )

    def _check_context(self, layer: LayerSpec) -> None:
        c, pieces = self.context_degree, self.degree if self.shards_sequence else 1
        alone = not_divided(layer)
        if alone is not None:
            raise InputError(f"layers with {alone} need context degree 1")
        if not self.flash or self.dropout:
            raise InputError(
                f"context degree {c} needs attention without dropout and without "
                "a stored score matrix",
                remedy="Use context degree 1",
            )
        if layer.seq_length % (2 * c * pieces):
            raise InputError(
                f"2 * context degree {c} * degree {pieces} does not divide the sequence length "
                f"{layer.seq_length}",
                remedy="Use divisors",
            )


def not_divided(layer: LayerSpec) -> str | None:
    """Return the attention feature that does not support context parallelism; None without one."""
    # a window as long as the sequence has no effect
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
    """Return the token ranges [first, end) of a sequence on one rank, in the order of its tensors.

    A context-parallel group of c ranks divides the sequence into 2c pieces. Rank i holds the pieces
    i and 2c-1-i, which balances the work under a causal mask. The tokens of a context rank are then
    divided into consecutive shards, for sequence parallelism.

    context, shard : (degree, rank) in the context-parallel group and in the sequence-parallel
    group.
    """
    c, i = context
    step = length // (2 * c)
    # the piece from the front and the one from the back
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
            # merge the two pieces that meet in the middle of the sequence
            if found and found[-1][1] == piece[0]:
                piece = (found.pop()[0], piece[1])
            found.append(piece)
        at += end - first
    return tuple(found)
