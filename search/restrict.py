"""Pins and forbidden rules on priced tables: what the planner may not use becomes invalid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.pins import Rules
from search.space import SearchSpace
from search.tables import PlanTables

__all__ = ["finite", "restrict", "stage_mask"]


def _with(tables: PlanTables, **arrays: Any) -> PlanTables:
    return replace(tables, **arrays)


def stage_mask(tables: PlanTables, rules: Rules) -> NDArray[np.bool_] | None:
    """Return (stages, S) which strategies the rules about stages allow; None without such rules."""
    if not rules.has_stage_rules:
        return None
    stages = int(tables.table_stages.max())
    return np.array([[rules.allows_stage(j, s) for s in tables.strategies] for j in range(stages)])


def restrict(tables: PlanTables, space: SearchSpace, rules: Rules) -> PlanTables:
    """Apply pins of layers and the data degree to `valid`; differently pinned layers get types."""
    valid = tables.valid
    if space.only_data_degree_1:
        ranks = tables.world_size // tables.table_stages
        shards = np.array([s.tp * s.cp for s in space.strategies])
        valid = valid & (ranks[:, None] == shards)[:, None, :]
        tables = _with(tables, valid=valid)
    if not rules.rules:
        return tables
    masks: dict[tuple[int, tuple[bool, ...]], int] = {}
    types = []
    for layer, kind in enumerate(tables.layer_type.tolist()):
        mask = tuple(rules.allows_layer(layer, s) for s in space.strategies)
        types.append(masks.setdefault((kind, mask), len(masks)))
    source = np.array([kind for kind, _ in masks], dtype=np.int64)
    allowed = np.array([mask for _, mask in masks], dtype=np.bool_)
    second = (
        "forward_s",
        "backward_s",
        "tail_s",
        "activation_bytes",
        "shared_bytes",
        "redistribute_forward_s",
        "redistribute_backward_s",
        "send_s",
    )
    arrays = {name: getattr(tables, name)[:, source] for name in second}
    for name in ("static_bytes", "transient_bytes"):
        arrays[name] = getattr(tables, name)[:, :, source]
    arrays["valid"] = valid[:, source] & allowed
    return _with(
        tables,
        layer_type=np.array(types, dtype=np.int32),
        **{name: np.ascontiguousarray(array) for name, array in arrays.items()},
    )


def finite(tables: PlanTables) -> PlanTables:
    """Return the tables with zeros where rows are not valid; the core reads valid rows only."""
    layer = {
        name: np.where(tables.valid, getattr(tables, name), 0.0)
        for name in ("forward_s", "backward_s", "tail_s")
    }
    vocab = {
        name: np.where(tables.vocab_valid[:, None, :], getattr(tables, name), 0.0)
        for name in ("vocab_forward_s", "vocab_backward_s", "vocab_tail_s")
    }
    return _with(tables, **layer, **vocab)
