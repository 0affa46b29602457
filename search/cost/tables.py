"""PlanTables: the contiguous arrays that the planner works on, and the only place that fixes
their layout.

A *table* is one (number of stages p, samples per micro-batch g = G/m, default dp type); time and
memory of a layer depend on those and its strategy only, never on the global batch itself. So
every distinct table is priced once, and a *candidate* is a table and a number of micro-batches m
(global batch G = g*m).

Axes: N tables, K layer types, S layer strategies (canonical order), Y layouts of the activation
between layers, E strategies of embedding and head. `POSITIONS` and `STAGE_KINDS` index the
position of the vocabulary layers and of a stage in the pipeline. Arrays named `*_bytes` with a
leading axis of two hold [m == 1, m > 1]: with one reduction per step, gradients of several
micro-batches are kept whole until it.

Memory of stage j of p, which must not exceed `budget_bytes`:
    stage_fixed_bytes[n, kind(j)]
  + vocab_static_bytes + vocab_activation_bytes * in_flight(j)          (first / last / only stage)
  + sum over its layers of (static_bytes + activation_bytes * in_flight(j))
  + max over its layers and vocabulary layers of transient_bytes
  + max over its layers and vocabulary layers of shared_bytes
with in_flight(j) = p - j (1F1B) or m (GPipe), and 1 when there is one stage only.

Time, with f_j and g_j the forward and backward of one micro-batch on stage j (layers, vocabulary
layers, redistribution in front of every layer, charged to the receiving stage; in front of the
head charged to the last stage), tail_j the sum of its tails, c_j = send_s of the last layer of
stage j, cbar = max c_j:
    1F1B  s_j = f_j + g_j + 2*cbar*(p-1)/p;   T = sum s_j + (m-1)*max s_j + max tail_j
    GPipe T = sum (f_j+g_j) + (m-1)*(max(f_j, c_j) + max(g_j, c_j)) + 2*sum c_j + max tail_j
Redistribution uses [type of the producing layer, from layout, to layout]; between embedding and
first layer the type of the first layer, between last layer and head that of the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64, I64
from autopar.plans import LayerStrategy, PipelineType, VocabStrategy, ZeroDefault

__all__ = ["POSITIONS", "STAGE_KINDS", "Layout", "PlanTables"]

POSITIONS = ("only", "first", "last")
"""Where vocabulary layers stand: p == 1 has 'only'; otherwise the first and the last stage."""
STAGE_KINDS = ("only", "first", "middle", "last")


@dataclass(frozen=True, kw_only=True, order=True)
class Layout:
    """How the activation between two layers is spread over a stage's ranks."""

    sequence_shards: int
    """Shards of the sequence dimension (t*c with SP or Ulysses, c otherwise)."""
    cp: int
    """Zigzag context degree contained in `sequence_shards`."""
    replicas: int
    """Copies of each shard (t for tensor parallelism without SP)."""
    strided: bool = False
    """Tensor ranks are not neighbours: the same shards of a sample lie on other ranks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanTables:
    """Everything the planner core needs; see the module docstring for axes and formulas."""

    world_size: int
    pipeline_type: PipelineType
    layer_type: NDArray[np.int32]
    """(L,) type of every layer."""
    strategies: tuple[LayerStrategy, ...]
    layouts: tuple[Layout, ...]
    strategy_layout: NDArray[np.int32]
    """(S,)"""
    vocab: tuple[VocabStrategy, ...]
    vocab_layout: NDArray[np.int32]
    """(E,) layout of the embedding's output and of the head's input."""

    table_stages: NDArray[np.int32]
    """(N,) p"""
    table_microbatch: I64
    """(N,) g, samples of one micro-batch over all ranks"""
    table_dp: tuple[ZeroDefault, ...]
    """(N,)"""

    valid: NDArray[np.bool_]
    """(N, K, S)"""
    forward_s: F64
    backward_s: F64
    tail_s: F64
    static_bytes: I64
    """(2, N, K, S)"""
    activation_bytes: I64
    """(N, K, S) per micro-batch in flight"""
    transient_bytes: I64
    """(2, N, K, S)"""
    shared_bytes: I64
    """(N, K, S)"""

    redistribute_forward_s: F64
    """(N, K, Y, Y)"""
    redistribute_backward_s: F64
    send_s: F64
    """(N, K, Y)"""

    vocab_valid: NDArray[np.bool_]
    """(N, E)"""
    vocab_forward_s: F64
    """(N, 3, E)"""
    vocab_backward_s: F64
    vocab_tail_s: F64
    vocab_static_bytes: I64
    """(2, N, 3, E)"""
    vocab_activation_bytes: I64
    """(N, 3, E)"""
    vocab_transient_bytes: I64
    """(2, N, 3, E)"""
    vocab_shared_bytes: I64
    """(N, 3, E)"""
    stage_fixed_bytes: I64
    """(N, 4)"""

    candidate_table: NDArray[np.int32]
    """(Q,)"""
    candidate_microbatches: NDArray[np.int32]
    """(Q,) m"""

    @property
    def candidate_batch(self) -> I64:
        """(Q,) global batch of every candidate."""
        batch: I64 = self.table_microbatch[self.candidate_table] * self.candidate_microbatches
        return batch

    def num_bytes(self) -> int:
        """Return the memory of all arrays, in bytes."""
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))
