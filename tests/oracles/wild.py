"""Random planning problems with extreme values, and the best plans that differ from better ones.

Up to five layer types in any order, whole fields of zeros or far too large, moves that cost even
where nothing moves, budgets on the byte, and every restriction of a search. Known defects are named
by their seed, so draws keep their order: new kinds of problems are drawn last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.records import replace
from search.planning.cost.tables import PlanTables
from search.planning.layered.core import TableChoice, TableSolution
from tests.oracles.brute import Block, PlanSpace
from tests.oracles.instances import TICK_S, TIME_FIELDS, Rng, Shape, random_tables

MAX_PLANS = 12_000
BYTE_FIELDS = tuple(name for name in PlanTables.__struct_fields__ if name.endswith("_bytes"))
TAIL_FIELDS = ("tail_s", "vocab_tail_s")
MOVE_FIELDS = ("redistribute_forward_s", "redistribute_backward_s")
NO_PLAN = -1.0
"""Throughput if there is no plan."""

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Features by which the planner distinguishes plans."""

    num_stages: int
    dp: str
    vocab_index: int
    layouts: frozenset[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class WildInstance:
    """A planning problem, its restrictions, and the plans that satisfy them."""

    seed: int
    tables: PlanTables
    budget_bytes: int
    alternatives: int
    uniform: bool
    division: tuple[int, ...]
    stage_allowed: NDArray[np.bool_] | None
    blocks: tuple[Block, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `solve_tables` besides tables and budget."""
        return {
            "alternatives": self.alternatives,
            "uniform": self.uniform,
            "division": self.division,
            "stage_allowed": self.stage_allowed,
        }

    @property
    def smallest_budget_bytes(self) -> int:
        """Return the smallest peak of any plan, 0 when there is no plan."""
        return min((int(b.peak_bytes.min()) for b in self.blocks), default=0)

    def kind(self, plan: TableChoice | TableSolution) -> Kind:
        """Return the features of a plan that distinguish it."""
        n = self.tables.candidate_table[plan.candidate]
        return Kind(
            num_stages=int(self.tables.table_stages[n]),
            dp=self.tables.table_dp[n],
            vocab_index=plan.vocab_index,
            layouts=frozenset(self.tables.strategy_layout[list(plan.strategy_index)].tolist()),
        )

    def samples_per_s(self, plan: TableChoice | TableSolution) -> float:
        """Return the throughput that the plan reports."""
        batch = float(self.tables.candidate_batch[plan.candidate])
        return batch / plan.step_time_s if plan.step_time_s else float("inf")

    def priced(self, plan: TableChoice | TableSolution) -> tuple[float, int]:
        """Return the plan's seconds and peak bytes; fails where the plan is not allowed."""
        for b in self.blocks:
            own = (b.candidate, b.stage_sizes, b.vocab_index)
            if own != (plan.candidate, plan.stage_sizes, plan.vocab_index):
                continue
            wanted = np.array(plan.strategy_index)[:, None]
            column = np.flatnonzero((b.choices == wanted).all(axis=0))
            if column.size:
                return float(b.step_time_s[column[0]]), int(b.peak_bytes[column[0]])
        raise AssertionError(f"seed {self.seed}: not a plan of this problem: {plan}")

    def best_samples_per_s(self, better: Iterable[Kind] = ()) -> float:
        """Return the throughput of the best plan that differs from all `better` ones.

        It has another number of stages, data-parallel type or vocabulary strategy, or does not use
        a layout that the better plan uses. NO_PLAN if no such plan fits.
        """
        better = tuple(better)
        return max((self._best_of(b, better) for b in self.blocks), default=NO_PLAN)

    def _best_of(self, block: Block, better: Sequence[Kind]) -> float:
        t = self.tables
        dp = t.table_dp[t.candidate_table[block.candidate]]
        layouts = t.strategy_layout[block.choices]
        fits = block.peak_bytes <= self.budget_bytes
        for other in better:
            if (other.num_stages, other.dp, other.vocab_index) != (
                block.num_stages,
                dp,
                block.vocab_index,
            ):
                continue
            used = [(layouts == y).any(axis=0) for y in other.layouts]
            fits = fits & ~np.logical_and.reduce(used)
        if not fits.any():
            return NO_PLAN
        fastest = float(block.step_time_s[fits].min())
        return block.global_batch / fastest if fastest else float("inf")


def wild_instance(seed: int) -> WildInstance:
    """Return a problem of at most 12,000 plans."""
    rng = np.random.default_rng([seed, 77])
    shape, labels = _draw_shape(rng)
    while shape.num_plans > MAX_PLANS:
        shape, labels = _draw_shape(rng)
    optional = (("ties", 0.4), ("triangle", 0.6), ("transients", 0.5), ("own vocab layout", 0.3))
    labels |= {label for label, share in optional if rng.random() < share}
    tables = _distort(rng, random_tables(rng, shape, labels))

    uniform = bool(rng.random() < 0.15)
    division: tuple[int, ...] = ()
    if rng.random() < 0.15:
        count = int(rng.choice(shape.stages))
        cuts = np.sort(rng.permutation(np.arange(1, shape.layers))[: count - 1]).tolist()
        division = tuple(np.diff([0, *cuts, shape.layers]).tolist())
    allowed = None
    if rng.random() < 0.25:
        size = (int(rng.integers(1, max(shape.stages) + 1)), shape.strategies)
        allowed = rng.random(size) < 0.75

    blocks = _restricted(PlanSpace(tables).blocks, uniform, division, allowed)
    peaks = np.concatenate([b.peak_bytes for b in blocks]) if blocks else np.array([5])
    return WildInstance(
        seed=seed,
        tables=tables,
        budget_bytes=_draw_budget(rng, peaks),
        alternatives=int(rng.integers(0, 5)),
        uniform=uniform,
        division=division,
        stage_allowed=allowed,
        blocks=blocks,
    )


def _draw_shape(rng: Rng) -> tuple[Shape, set[str]]:
    """Draw sizes and the schedule, which decides the fewest micro-batches."""
    layers = int(rng.integers(1, 8))
    types = int(rng.integers(1, min(5, layers) + 1))
    schedule = "gpipe" if rng.random() < 0.35 else "1f1b"
    most = min(4, layers)
    stages = [int(p) for p in rng.integers(1, most + 1, int(rng.integers(1, 4)))]
    if rng.random() < 0.2:
        stages[0] = most
    candidates = set()
    for n, p in enumerate(stages):
        for _ in range(int(rng.integers(1, 3))):
            candidates.add((n, int(rng.integers(1 if schedule == "gpipe" else p, p + 6))))
    shape = Shape(
        layers=layers,
        types=types,
        strategies=int(rng.integers(1, 5)),
        layouts=int(rng.integers(1, 5)),
        vocab=int(rng.integers(1, 4)),
        stages=tuple(stages),
        candidates=tuple(sorted(candidates)),
    )
    return shape, {schedule}


def _distort(rng: Rng, tables: PlanTables) -> PlanTables:
    """Shuffle the layer types, then enlarge or zero one group of fields."""

    def edit(names: Iterable[str], share: float, change: Callable[[Array], Array]) -> None:
        nonlocal tables
        for name in names:
            if rng.random() < share:
                changed: dict[str, Any] = {name: np.array(change(getattr(tables, name)))}
                tables = replace(tables, **changed)

    if rng.random() < 0.4:
        shuffled = rng.permutation(tables.layer_type).astype(np.int32)
        tables = replace(tables, layer_type=shuffled)
    group = int(rng.integers(0, 9))
    if group == 0:
        edit(TIME_FIELDS, 0.6, lambda a: a * 0)
    elif group == 1:
        edit(TIME_FIELDS, 0.8, lambda a: a * (rng.random(a.shape) < 0.5))
    elif group == 2:
        edit(BYTE_FIELDS, 0.6, lambda a: a * 0)
    elif group == 3:
        edit(BYTE_FIELDS, 0.9, lambda a: a * rng.choice([1, 10**5, 10**6]))
    elif group == 5:
        edit(
            TAIL_FIELDS,
            1.0,
            lambda a: a * rng.choice([100, 1000]) * (rng.random(a.shape) < 0.7),
        )
    elif group == 6:
        edit(("send_s",), 1.0, lambda a: a * rng.choice([20, 200]))
        edit(MOVE_FIELDS, 1.0, lambda a: a * rng.choice([1, 30]))
    elif group == 7:  # every move costs, to the same layout too
        edit(MOVE_FIELDS, 1.0, lambda a: a + np.rint(rng.random(a.shape) * 3000) * TICK_S)
    if rng.random() < 0.3 and group != 7:
        own = np.eye(len(tables.layouts), dtype=np.bool_)
        for name in MOVE_FIELDS:
            staying = 12 * TICK_S * int(rng.integers(0, 50))
            changed: dict[str, Any] = {name: np.where(own, staying, getattr(tables, name))}
            tables = replace(tables, **changed)
    return tables


def _restricted(
    blocks: Sequence[Block],
    uniform: bool,
    division: tuple[int, ...],
    allowed: NDArray[np.bool_] | None,
) -> tuple[Block, ...]:
    """Return the blocks with only the plans that satisfy the restrictions."""
    kept = []
    for b in blocks:
        if division and b.stage_sizes != division:
            continue
        keep = np.ones(b.choices.shape[1], dtype=np.bool_)
        if uniform:
            keep &= (b.choices == b.choices[0]).all(axis=0)
        if allowed is not None:
            stage = np.repeat(np.arange(b.num_stages), b.stage_sizes)
            for row, j in zip(b.choices, stage, strict=True):
                if j < len(allowed):
                    keep &= allowed[j][row]
        if keep.any():
            part = replace(
                b,
                choices=b.choices[:, keep],
                step_time_s=b.step_time_s[keep],
                peak_bytes=b.peak_bytes[keep],
            )
            kept.append(part)
    return tuple(kept)


def _draw_budget(rng: Rng, peaks: NDArray[np.int64]) -> int:
    """Draw a budget that is a byte short of some plan, just enough for it, or ample."""
    kind = rng.random()
    if kind < 0.12:
        return int(peaks.min()) - 1
    if kind < 0.3:
        return int(peaks.min())
    if kind < 0.9:
        peak = int(np.quantile(peaks, rng.random() ** 2, method="nearest"))
        return peak - int(rng.random() < 0.3)
    return int(peaks.max()) * 2 + 1
