"""Random planning problems of real depth: 20 to 400 layers, up to 64 stages, types in any pattern.

They are too large for exhaustive search. They are tested with answers of another core
(compare_cores in benchmarks), and with equivalent problems, which must have the same optimum. An
integer program solves the `small` ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.records import replace
from search.planning.cost.tables import PlanTables
from tests.oracles.instances import GRAIN_BYTES, Rng, Shape, random_tables

PATTERNS = ("one", "runs", "alternating", "periodic", "shuffled", "ends", "sparse")


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepInstance:
    """A planning problem with its restrictions and its special features."""

    seed: int
    tables: PlanTables
    budget_bytes: int
    options: dict[str, Any]
    """Further options of `solve_tables`."""
    labels: tuple[str, ...]

    @property
    def words(self) -> str:
        """The problem in one line."""
        t = self.tables
        _, k, s = t.valid.shape
        pairs = zip(t.candidate_table.tolist(), t.candidate_microbatches.tolist(), strict=True)
        candidates = " ".join(f"{t.table_stages[n]}x{m}" for n, m in pairs)
        return (
            f"L={len(t.layer_type)} K={k} S={s} Y={len(t.layouts)} E={len(t.vocab)} "
            f"p x m {candidates} {t.pipeline_type} {' '.join(self.labels)}"
        )


def deep_instance(seed: int, *, small: bool = False) -> DeepInstance:
    """Return the problem of a seed; with `small`, at most 14 layers on 3 stages."""
    rng = np.random.default_rng([seed, 11, small])
    labels = ["gpipe" if rng.random() < 0.35 else "1f1b"]
    for label, share in (
        ("ties", 0.25),
        ("inexact", 0.15),
        ("triangle", 0.4),
        ("transients", 0.5),
        ("own vocab layout", 0.3),
    ):
        if rng.random() < share and not ({label, *labels} >= {"ties", "inexact"}):
            labels.append(label)
    if small:
        labels = [label for label in labels if label != "inexact"] + ["grains"]
    shape = _draw_shape(rng, labels[0] == "gpipe", small)
    pattern = str(rng.choice(PATTERNS)) if shape.types > 1 else "one"
    if shape.types > 1 and pattern == "one":  # seeds fix the order of draws
        pattern = "shuffled"
    tables = random_tables(rng, shape, set(labels))
    tables = replace(tables, layer_type=_pattern(rng, pattern, shape))
    if rng.random() < 0.5:
        tables = _smoothed(rng, tables)
        labels.append("smooth")
    options: dict[str, Any] = {} if small else _draw_options(rng, shape)
    labels += [f"{name}={value}" for name, value in options.items() if np.isscalar(value)]
    labels += [name for name, value in options.items() if not np.isscalar(value)]
    kind, budget = _draw_budget(rng, tables)
    if small:
        # half a grain off, far outside a solver's tolerance
        budget = budget // GRAIN_BYTES * GRAIN_BYTES + GRAIN_BYTES // 2
    return DeepInstance(
        seed=seed,
        tables=tables,
        budget_bytes=budget,
        options=options,
        labels=(pattern, kind, *labels),
    )


def _draw_shape(rng: Rng, gpipe: bool, small: bool) -> Shape:
    # a third is shallow, so that most of these are solved in a moment
    shallow = rng.random() < 0.35
    layers = int(20 * (3 if shallow else 20) ** rng.random())
    layers = int(rng.integers(8, 15)) if small else layers
    most = 3 if small else 8 if shallow else min(64, layers)
    stages = [int(most ** rng.random()) for _ in range(int(rng.integers(1, 3 if small else 5)))]
    if rng.random() < 0.5:  # powers of two, as in real clusters
        stages = [2 ** (p.bit_length() - 1) for p in stages]
    candidates = set()
    for n, p in enumerate(stages):
        for _ in range(int(rng.integers(1, 3))):
            # just enough micro-batches to fill the stages, or so many that the slowest decides
            more = int(rng.integers(0, 6)) if rng.random() < 0.5 else int(600 ** rng.random())
            candidates.add((n, (1 if gpipe else p) + more))
    types = int(rng.integers(1, 4)) if rng.random() < 0.7 else int(40 ** rng.random())
    strategies = int(rng.integers(2, 4 if small else 13))
    return Shape(
        layers=layers,
        types=min(types, 3 if small else layers // 2),
        strategies=strategies,
        layouts=int(rng.integers(1, min(strategies, 2 if small else 6) + 1)),
        vocab=int(rng.integers(1, 4)),
        stages=tuple(stages),
        candidates=tuple(sorted(candidates)),
    )


def _pattern(rng: Rng, pattern: str, shape: Shape) -> NDArray[np.int32]:
    """Return the type of every layer; every type occurs."""
    layers, types = shape.layers, shape.types
    at = np.arange(layers)
    if pattern == "runs":
        cuts = np.sort(rng.permutation(np.arange(1, layers))[: types - 1])
        found = np.searchsorted(cuts, at, side="right")
    elif pattern == "alternating":
        found = at % types
    elif pattern == "periodic":  # for example, one layer of another kind in every period
        period = int(rng.integers(types, max(types + 1, min(layers, 3 * types + 6))))
        found = np.maximum(0, at % period - (period - types))
    elif pattern == "ends":  # the first layers differ, and the last
        found = np.where(at < types // 2, at + 1, 0)
        found = np.where(at >= layers - (types - 1 - types // 2), types - (layers - at), found)
    elif pattern == "sparse":
        found = np.zeros(layers, dtype=np.int64)
        found[rng.permutation(layers)[: types - 1]] = np.arange(1, types)
    else:
        found = np.concatenate([np.arange(types), rng.integers(0, types, layers - types)])
        found = rng.permutation(found)
    assert set(found.tolist()) == set(range(types)), (pattern, shape)
    return found.astype(np.int32)


def _smoothed(rng: Rng, tables: PlanTables) -> PlanTables:
    """Make the types nearly alike, like layers of one model, and stages of equal tables too."""
    changed: dict[str, Any] = {}
    spread = float(rng.choice([0.0, 1e-3, 0.05]))
    for name in ("forward_s", "backward_s", "tail_s", "static_bytes", "activation_bytes"):
        table = getattr(tables, name)
        axis = table.ndim - 2
        factor = 1.0 + spread * rng.random(table.shape)
        alike = np.repeat(table.take([0], axis=axis), table.shape[axis], axis=axis) * factor
        if table.dtype == np.float64:
            tick = 2.0**-20 * (12 if spread == 0 else 1)
            changed[name] = np.ascontiguousarray(np.rint(alike / tick) * tick)
        else:
            changed[name] = np.ascontiguousarray(np.rint(alike / GRAIN_BYTES)).astype(np.int64)
            changed[name] *= GRAIN_BYTES
    valid = np.repeat(tables.valid[:, :1], tables.valid.shape[1], axis=1)
    return replace(tables, valid=valid, **changed)


def _draw_options(rng: Rng, shape: Shape) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["alternatives"] = int(rng.integers(1, 5))
    if rng.random() < 0.06:
        options["uniform"] = True
    if rng.random() < 0.08:
        count = int(rng.choice(shape.stages))
        cuts = np.sort(rng.permutation(np.arange(1, shape.layers))[: count - 1]).tolist()
        options["division"] = tuple(np.diff([0, *cuts, shape.layers]).tolist())
    if rng.random() < 0.12:
        size = (int(rng.integers(1, max(shape.stages) + 1)), shape.strategies)
        allowed = rng.random(size) < 0.8
        allowed[:, 0] = True
        options["stage_allowed"] = allowed
    return options


# --------------------------------------------------------------------------------------------------
# Budgets: between the needs of the smallest and of the fastest strategies.


def _draw_budget(rng: Rng, tables: PlanTables) -> tuple[str, int]:
    """Return a word for the tightness of the budget, and its bytes."""
    least = _needed(tables, lambda kept, work: kept)
    fastest = max(least, _needed(tables, lambda kept, work: work))
    draw = rng.random()
    if least == 0:
        return "no legal plan", int(rng.integers(1, 1 << 30))
    if draw < 0.1:
        return "short", int(least * rng.uniform(0.7, 1.0))
    if draw < 0.25:
        return "just", least
    if draw < 0.8:
        return "tight", int(least + rng.random() ** 2 * (fastest - least))
    return "loose", int(fastest * rng.uniform(1.0, 2.0))


def _needed(
    tables: PlanTables,
    weight: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]],
) -> int:
    """Return a budget that suffices for the strategies of least weight, 0 if none is valid.

    weight : of kept bytes and seconds of a micro-batch, (K, S).
    Stages are filled one after the other, so the division is the best for these strategies except
    for transients: every stage is charged the largest.
    """
    found = []
    for n, m in zip(tables.candidate_table, tables.candidate_microbatches, strict=True):
        if not tables.valid[n].any(axis=1).all() or not tables.vocab_valid[n].any():
            continue
        p, many = int(tables.table_stages[n]), int(m > 1)
        if p > len(tables.layer_type):
            continue
        in_flight = np.full(p, m) if tables.pipeline_type == "gpipe" and p > 1 else p - np.arange(p)
        work = tables.forward_s[n] + tables.backward_s[n]
        above = tables.transient_bytes[many, n] + tables.shared_bytes[n]
        before, extra = [], 0
        for held in in_flight.tolist():
            kept = tables.static_bytes[many, n] + tables.activation_bytes[n] * held
            cost = np.where(tables.valid[n], weight(kept, work), np.inf)
            chosen = cost.argmin(axis=1)
            of_type = np.take_along_axis(kept, chosen[:, None], axis=1)[:, 0]
            before.append(np.concatenate([[0], np.cumsum(of_type[tables.layer_type])]))
            extra = max(extra, int(np.take_along_axis(above, chosen[:, None], axis=1).max()))
        e = int(np.flatnonzero(tables.vocab_valid[n])[0])
        own = [_vocab_bytes(tables, int(n), e, j, p, int(in_flight[j]), many) for j in range(p)]
        found.append(_smallest(before, own, extra))
    return min(found, default=0)


def _vocab_bytes(
    tables: PlanTables, n: int, e: int, j: int, p: int, held: int, many: int
) -> tuple[int, int]:
    """Return the bytes that stage j keeps besides its layers, and the vocabulary's transients."""
    kind = 0 if p == 1 else 1 if j == 0 else 3 if j == p - 1 else 2
    kept, above = int(tables.stage_fixed_bytes[n, kind]), 0
    if kind != 2:
        v = (0, 1, 0, 2)[kind]
        kept += int(tables.vocab_static_bytes[many, n, v, e])
        kept += int(tables.vocab_activation_bytes[n, v, e]) * held
        above = int(tables.vocab_transient_bytes[many, n, v, e])
        above += int(tables.vocab_shared_bytes[n, v, e])
    return kept, above


def _smallest(before: list[NDArray[np.int64]], own: list[tuple[int, int]], extra: int) -> int:
    """Return the smallest budget in which stages, filled one after the other, hold all layers."""
    layers, stages = before[0].size - 1, len(before)
    low, high = 0, max(int(b[-1]) for b in before) + sum(map(sum, own)) + extra
    while low < high:
        middle = (low + high) // 2
        at = 0
        for j, (kept, above) in enumerate(own):
            room = middle - kept - above - extra + int(before[j][at])
            # every later stage needs a layer, too
            end = min(
                int(np.searchsorted(before[j], room, side="right")) - 1, layers - stages + j + 1
            )
            if end <= at:
                break
            at = end
        if at == layers:
            high = middle
        else:
            low = middle + 1
    return low


# --------------------------------------------------------------------------------------------------
# Equivalent problems.


def split_types(instance: DeepInstance) -> DeepInstance:
    """Return the problem with every type split into two equal ones, alternating by layer."""
    t = instance.tables
    changed: dict[str, Any] = {"layer_type": 2 * t.layer_type + np.arange(len(t.layer_type)) % 2}
    k = t.valid.shape[1]
    for name in (
        "valid", "forward_s", "backward_s", "tail_s", "activation_bytes", "shared_bytes",
        "redistribute_forward_s", "redistribute_backward_s", "send_s",
    ):  # fmt: skip
        changed[name] = np.repeat(getattr(t, name), 2, axis=1)
    for name in ("static_bytes", "transient_bytes"):
        changed[name] = np.repeat(getattr(t, name), 2, axis=2)
    changed["layer_type"] = changed["layer_type"].astype(np.int32)
    assert changed["valid"].shape[1] == 2 * k
    return replace(instance, tables=replace(t, **changed))


def with_strategies_shuffled(instance: DeepInstance) -> DeepInstance:
    """Return the problem with its strategies in another order."""
    t = instance.tables
    order = np.random.default_rng([instance.seed, 12]).permutation(len(t.strategies))
    changed: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(t, name)[..., order])
        for name in (
            "valid", "forward_s", "backward_s", "tail_s", "activation_bytes", "shared_bytes",
            "static_bytes", "transient_bytes", "strategy_layout",
        )
    }  # fmt: skip
    changed["strategies"] = tuple(t.strategies[i] for i in order.tolist())
    options = dict(instance.options)
    if "stage_allowed" in options:
        options["stage_allowed"] = np.ascontiguousarray(options["stage_allowed"][:, order])
    tables = replace(t, **changed)
    return replace(instance, tables=tables, options=options)
