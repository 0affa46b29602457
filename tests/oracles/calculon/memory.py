"""Bytes of a processor of the first stage, in both memories.

Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from search.closed_form.calculon.documents import Execution
from tests.oracles.calculon.block import Block
from tests.oracles.calculon.passes import checkpoint_bytes
from tests.oracles.calculon.shape import Shape
from tests.oracles.calculon.vocab import Vocab


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by category, offloaded or not, and sums of both memories."""

    weights: float
    activations: float
    """Bytes of the running block and of all that wait for their backward."""
    smallest_activations: float
    """Bytes of the running block and the next, with activation offload."""
    checkpoint: float
    """Bytes of one block."""
    checkpoints: float
    weight_gradients: float
    optimizer: float
    vocab: float
    """Bytes of embedding, head and logits: the larger of the first and the last stage."""
    tables: int
    """Vocabulary tables on the processor."""
    first: float
    second: float


def memory_of(x: Execution, shape: Shape, block: Block, vocab: Vocab) -> Memory:
    """Return the memory of an execution; needs no times."""
    s = block.spaces
    k, v, p = shape.blocks, shape.chunks, x.pipeline_par
    full = shape.recompute_all
    live = min(shape.microbatches, p) * (1 + (p - 1) / (v * p) if v > 1 else 1)
    activations = s.working
    if shape.training and not full:
        activations += s.stored * (k * live - 1)
    smallest = s.working if full else s.working + s.stored
    checkpoint = checkpoint_bytes(shape)
    checkpoints = k * checkpoint * live
    gradients = 0.0
    if shape.training:
        gradients = s.whole_weight_gradient + s.weight_gradient * (k - 1)
    tables = 2 if p == 1 and not shape.tied else 1
    # logits are on the last stage, where fewer microbatches wait for their backward
    fewer = 0.0
    if p > 1 and shape.training and not x.activations_offload:
        fewer = k * (checkpoint if full else s.stored) * (live - min(live, ((v - 1) * p + 1) / v))
    around = tables * vocab.table_bytes + max(0.0, vocab.logits_bytes - fewer)
    # of an offloaded tensor, the current block and the next stay in the first memory
    first = 2 * s.weight if x.weight_offload else k * s.weight
    first += smallest + 2 * checkpoint if x.activations_offload else activations + checkpoints
    if x.optimizer_offload:
        first += s.whole_weight_gradient + s.weight_gradient + 2 * s.optimizer
    else:
        first += gradients + k * s.optimizer
    second = k * s.weight if x.weight_offload else 0.0
    if x.activations_offload:
        second += checkpoints if full else activations
    if x.optimizer_offload:
        second += k * (s.weight_gradient + s.optimizer)
    return Memory(
        weights=k * s.weight,
        activations=activations,
        smallest_activations=smallest,
        checkpoint=checkpoint,
        checkpoints=checkpoints,
        weight_gradients=gradients,
        optimizer=k * s.optimizer,
        vocab=around,
        tables=tables,
        first=first + s.activation_gradient + around,
        second=second,
    )
