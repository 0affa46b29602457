"""Every plan of a small instance, priced, so that the optimum can be looked up.

`drop` removes single terms of the step time or of the memory. This shows the answer of a planner
without that term.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from search.planning.cost.tables import PlanTables

TIME_TERMS = (
    "sum_of_stages",
    "bottleneck",
    "tail",
    "send",
    "forward",
    "backward",
    "redistribution_in_stage",
    "redistribution_across_stages",
    "embedding_to_first",
    "last_to_head",
    "vocab_time",
    "vocab_tail",
)
MEMORY_TERMS = (
    "static",
    "activation",
    "in_flight",
    "transient",
    "shared",
    "vocab_static",
    "vocab_activation",
    "vocab_transient",
    "vocab_shared",
    "fixed",
)


@dataclass(frozen=True, kw_only=True)
class BruteSolution:
    """The canonical first optimum, or the smallest budget for which there is one (0: none)."""

    status: str
    candidate: int = -1
    stage_sizes: tuple[int, ...] = ()
    strategy_index: tuple[int, ...] = ()
    vocab_index: int = -1
    step_time_s: float = float("inf")
    samples_per_s: float = 0.0
    smallest_budget_bytes: int = 0

    @property
    def plan(self) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        """Return the key of the plan: candidate, stage sizes, strategies, vocabulary strategy."""
        return self.candidate, self.stage_sizes, self.strategy_index, self.vocab_index


@dataclass(frozen=True, kw_only=True, eq=False)
class StageInstance:
    """A problem of `solve_stage`, with arrays in its format."""

    seed: int
    time_s: NDArray[np.float64]
    memory_bytes: NDArray[np.float64]
    transition_s: NDArray[np.float64]
    budget_bytes: float
    transient_bytes: NDArray[np.float64] | None
    labels: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Block:
    """All strategy choices for one candidate, one division into stages and one vocabulary."""

    candidate: int
    num_stages: int
    num_microbatches: int
    global_batch: int
    stage_sizes: tuple[int, ...]
    vocab_index: int
    choices: NDArray[np.intp]
    """(L, n), columns in lexicographic order"""
    step_time_s: NDArray[np.float64]
    peak_bytes: NDArray[np.int64]


@dataclass(frozen=True)
class PlanSpace:
    """Every legal plan of `tables`, priced once."""

    tables: PlanTables
    drop: frozenset[str] = frozenset()
    blocks: tuple[Block, ...] = field(init=False)

    def __post_init__(self) -> None:
        unknown = self.drop - {*TIME_TERMS, *MEMORY_TERMS}
        assert not unknown, unknown
        object.__setattr__(self, "blocks", tuple(_blocks(self.tables, self.drop)))

    @property
    def num_plans(self) -> int:
        """Return the number of legal plans."""
        return sum(b.step_time_s.size for b in self.blocks)

    @property
    def smallest_budget_bytes(self) -> int:
        """Return the smallest peak of any plan, 0 when there is no plan."""
        return min((int(b.peak_bytes.min()) for b in self.blocks), default=0)

    def optimum(self, budget_bytes: int) -> BruteSolution:
        """Return the best plan within the budget; ties go to the canonical first plan."""
        best: tuple[float, tuple[object, ...], Block, int] | None = None
        for block in self.blocks:
            time = np.where(block.peak_bytes <= budget_bytes, block.step_time_s, np.inf)
            i = int(np.argmin(time))  # the first of equals
            if not np.isfinite(time[i]):
                continue
            rate = block.global_batch / float(time[i]) if time[i] else float("inf")
            if best is not None and rate < best[0]:
                continue
            key = (
                block.num_stages,
                block.num_microbatches,
                block.stage_sizes,
                tuple(block.choices[:, i].tolist()),
                block.vocab_index,
                block.candidate,
            )
            if best is None or rate > best[0] or key < best[1]:
                best = (rate, key, block, i)
        if best is None:
            return BruteSolution(
                status="infeasible", smallest_budget_bytes=self.smallest_budget_bytes
            )
        rate, _, block, i = best
        return BruteSolution(
            status="optimal",
            candidate=block.candidate,
            stage_sizes=block.stage_sizes,
            strategy_index=tuple(block.choices[:, i].tolist()),
            vocab_index=block.vocab_index,
            step_time_s=float(block.step_time_s[i]),
            samples_per_s=rate,
        )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write `total` as `parts` positive numbers, in lexicographic order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        ends = (0, *cuts, total)
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@lru_cache(maxsize=64)
def _all_choices(num_strategies: int, num_layers: int) -> NDArray[np.intp]:
    """(L, S**L), columns in lexicographic order."""
    grid: NDArray[np.intp] = np.indices((num_strategies,) * num_layers).reshape(num_layers, -1)
    return grid


def _blocks(t: PlanTables, drop: frozenset[str]) -> Iterator[Block]:
    """Yield the priced plans of every candidate, division and vocabulary strategy."""
    num_layers, num_strategies = len(t.layer_type), len(t.strategies)
    types = t.layer_type[:, None]
    keep = {term: 0.0 if term in drop else 1.0 for term in TIME_TERMS}
    hold = {term: 0 if term in drop else 1 for term in MEMORY_TERMS}
    for q, (table, microbatches) in enumerate(
        zip(t.candidate_table, t.candidate_microbatches, strict=True)
    ):
        n, m = int(table), int(microbatches)
        p, batch = int(t.table_stages[n]), int(t.table_microbatch[n]) * m
        many = int(m > 1)
        choices = _all_choices(num_strategies, num_layers)
        choices = choices[:, t.valid[n, types, choices].all(axis=0)]
        if choices.shape[1] == 0:
            continue
        layouts = t.strategy_layout[choices]
        row = (n, types, choices)
        forward = t.forward_s[row] * keep["forward"]
        backward = t.backward_s[row] * keep["backward"]
        tail = t.tail_s[row]
        static = t.static_bytes[(many, *row)] * hold["static"]
        activation = t.activation_bytes[row] * hold["activation"]
        transient = t.transient_bytes[(many, *row)] * hold["transient"]
        shared = t.shared_bytes[row] * hold["shared"]
        moves = [
            (r[n, types[:-1], layouts[:-1], layouts[1:]], r[n, t.layer_type[0]], r[n, types[-1, 0]])
            for r in (t.redistribute_forward_s, t.redistribute_backward_s)
        ]
        send = t.send_s[n, types, layouts] * keep["send"]
        stages = np.arange(p)
        held = p - stages if t.pipeline_type == "1f1b" or p == 1 else np.full(p, m)
        in_flight = held[:, None]
        if "in_flight" in drop:
            in_flight = np.ones((p, 1), dtype=np.int64)
        kinds = [0] if p == 1 else [1, *[2] * (p - 2), 3]
        fixed = t.stage_fixed_bytes[n, kinds][:, None] * hold["fixed"]
        ends_of_pipe = [(0, 0)] if p == 1 else [(0, 1), (p - 1, 2)]  # (stage, position)
        for e in np.flatnonzero(t.vocab_valid[n]).tolist():
            y = int(t.vocab_layout[e])
            for sizes in compositions(num_layers, p):
                starts = np.cumsum((0, *sizes[:-1]))
                weight = np.full((num_layers, 1), keep["redistribution_in_stage"])
                weight[starts] = keep["redistribution_across_stages"]
                f, g = (
                    np.add.reduceat(
                        work
                        + np.vstack([first[y, layouts[:1]] * keep["embedding_to_first"], inner])
                        * np.vstack([np.ones((1, 1)), weight[1:]]),
                        starts,
                    )
                    for work, (inner, first, _) in zip((forward, backward), moves, strict=True)
                )
                f[-1] += moves[0][2][layouts[-1], y] * keep["last_to_head"]
                g[-1] += moves[1][2][layouts[-1], y] * keep["last_to_head"]
                ends = np.add.reduceat(tail, starts)
                kept = np.add.reduceat(static, starts) + fixed
                kept += np.add.reduceat(activation, starts) * in_flight
                peak = np.maximum.reduceat(transient, starts)
                common = np.maximum.reduceat(shared, starts)
                for j, v in ends_of_pipe:
                    f[j] += t.vocab_forward_s[n, v, e] * keep["vocab_time"]
                    g[j] += t.vocab_backward_s[n, v, e] * keep["vocab_time"]
                    ends[j] += t.vocab_tail_s[n, v, e] * keep["vocab_tail"]
                    kept[j] += t.vocab_static_bytes[many, n, v, e] * hold["vocab_static"]
                    kept[j] += (
                        t.vocab_activation_bytes[n, v, e] * in_flight[j] * hold["vocab_activation"]
                    )
                    extra = t.vocab_transient_bytes[many, n, v, e] * hold["vocab_transient"]
                    peak[j] = np.maximum(peak[j], extra)
                    extra = t.vocab_shared_bytes[n, v, e] * hold["vocab_shared"]
                    common[j] = np.maximum(common[j], extra)
                sends = send[starts[1:] - 1] if p > 1 else np.zeros((1, f.shape[1]))
                if t.pipeline_type == "1f1b":
                    slot = f + g + 2 * sends.max(axis=0) * (p - 1) / p
                    slowest, extra_time = slot.max(axis=0), 0.0
                else:
                    slot = f + g
                    link = sends.max(axis=0)
                    slowest = np.maximum(f.max(axis=0), link) + np.maximum(g.max(axis=0), link)
                    extra_time = 2 * sends.sum(axis=0)
                time = (
                    slot.sum(axis=0) * keep["sum_of_stages"]
                    + (m - 1) * slowest * keep["bottleneck"]
                    + extra_time
                    + ends.max(axis=0) * keep["tail"]
                )
                yield Block(
                    candidate=q,
                    num_stages=p,
                    num_microbatches=m,
                    global_batch=batch,
                    stage_sizes=sizes,
                    vocab_index=e,
                    choices=choices,
                    step_time_s=time,
                    peak_bytes=(kept + peak + common).max(axis=0),
                )


def stage_optimum(
    instance: StageInstance, *, unlimited: bool = False, transients: bool = True
) -> float:
    """Return the optimal total of a one-stage problem in seconds, infinity when nothing fits."""
    num_layers, num_strategies = instance.time_s.shape
    choices = _all_choices(num_strategies, num_layers)
    layer = np.arange(num_layers)[:, None]
    total = instance.time_s[layer, choices].sum(axis=0)
    total += instance.transition_s[layer[1:], choices[:-1], choices[1:]].sum(axis=0)
    memory = instance.memory_bytes[layer, choices].sum(axis=0)
    if instance.transient_bytes is not None and transients:
        memory = memory + instance.transient_bytes[layer, choices].max(axis=0)
    fits = np.full(memory.shape, True) if unlimited else memory <= instance.budget_bytes
    return float(total[fits].min(initial=np.inf))
