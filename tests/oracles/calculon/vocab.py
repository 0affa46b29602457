"""Layers around the blocks: embedding on the first stage, head and loss on the last.

The published model has none of them. The tensor group divides the vocabulary, as in Megatron-LM.
The look-up is reduced over the group, the head gathers its input, and the loss exchanges its
maximum, its sum and the logit of the label, 4 bytes per token each.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.oracles.calculon.block import Machine
from tests.oracles.calculon.shape import Shape

_LOSS_FLOPS = 7.0
"""FLOP per logit: maximum, difference, exponential, sum forward; difference and scale backward."""


@dataclass(frozen=True, kw_only=True)
class Vocab:
    """Embedding, head and loss of one processor."""

    embedding_s: float = 0.0
    """Seconds of look-up and its gradient, for one micro-batch on the first stage."""
    head_s: float = 0.0
    """Seconds of head and loss, forward and backward, for one micro-batch on the last stage."""
    optimizer_s: float = 0.0
    """Seconds of the optimizer for one table."""
    table_bytes: float = 0.0
    """Bytes of weights, gradients and optimizer states of one table."""
    logits_bytes: float = 0.0
    """Bytes of logits and their gradient, while the loss runs."""


def vocab_of(shape: Shape, machine: Machine) -> Vocab:
    """Return the layers around the blocks; zeros if the vocabulary is unknown."""
    if not shape.vocab:
        return Vocab()
    s, e, t = shape, shape.element_bytes, shape.tensor
    parameters = s.vocab * s.hidden
    logits = s.tokens * s.vocab
    passes = 3 if s.training else 1
    product = 2 * s.tokens * s.hidden * s.vocab
    moved = (parameters + s.tokens * s.hidden + logits) * e
    head_s = passes * machine.processing_s(
        machine.matrix.seconds(product), machine.memory.seconds(moved)
    )
    head_s += machine.processing_s(
        machine.vector.seconds(_LOSS_FLOPS * logits), machine.memory.seconds(2 * logits * (e + 4))
    )
    rows = s.local_elements * e
    embedding_s = (passes - 1 or 1) * machine.memory.seconds(2 * rows)
    if t > 1:
        whole = s.elements * e
        around = ("reduce_scatter", "all_gather") if s.rs else ("all_reduce",)
        link_s = sum(machine.tensor.seconds(name, whole, t) for name in around)
        # the forward of one is the backward of the other, so each pays for the pair once
        embedding_s += link_s
        head_s += link_s + 3 * machine.tensor.seconds("all_reduce", 4 * s.tokens, t)
    optimizer = (12 if e < 4 else 8) * parameters / s.shards
    states = float(parameters * e)
    if s.training:
        states += 4 * parameters + optimizer
    return Vocab(
        embedding_s=embedding_s,
        head_s=head_s,
        optimizer_s=machine.processing_s(
            machine.vector.seconds(11 * parameters / s.shards), machine.memory.seconds(optimizer)
        )
        if s.training
        else 0.0,
        table_bytes=states,
        logits_bytes=logits * (e + 4 if s.training else e),
    )
