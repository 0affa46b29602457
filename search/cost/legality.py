"""Which strategies a layer's shape allows, for many at once; `autopar.legality` explains one.

Source: cost-model.md "Legality". Rules about ranks and samples are those of `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.model import LayerSpec
from autopar.plan import LayerStrategy

__all__ = ["legal_strategies"]


def legal_strategies(
    spec: LayerSpec, strategies: Sequence[LayerStrategy], *, sequence_parallel: bool
) -> NDArray[np.bool_]:
    """Return (S,) whether heads, widths and sequence divide; unknown ones are not checked."""
    return np.array([_legal(spec, s, sequence_parallel) for s in strategies], dtype=np.bool_)


def _legal(spec: LayerSpec, strategy: LayerStrategy, sequence_parallel: bool) -> bool:
    t, c = strategy.tp, strategy.cp
    heads, kv_heads, ffn = spec.num_heads, spec.num_kv_heads, spec.ffn_hidden_size
    if heads is not None and heads % t:
        return False
    if kv_heads is not None and kv_heads % t and t % kv_heads:
        return False
    if not strategy.ulysses and ffn is not None and ffn % t:
        return False
    shards = t if strategy.ulysses or sequence_parallel else 1
    pieces = 2 * c * shards if c > 1 else shards
    return spec.seq_length % pieces == 0
