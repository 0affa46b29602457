"""Planner of per-layer plans: returns the fastest plan that fits, with bound and alternatives.

Cost tables are built once per set of batch sizes and reused for other memory constraints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from autopar.command.fields import rows_of, written
from autopar.errors import InputError, OptionError
from autopar.rates.accuracy import probability_faster
from autopar.rates.measured import HardwareProfile
from autopar.records import PositiveNumber, Record, plain, replace, typed
from autopar.run.model import ModelProfile, ModelSpec
from autopar.run.plan import Infeasibility, Plan, Prediction, layer_problems
from autopar.sources import Source
from autopar.units import GIB, format_bytes
from search.planning.cost.model import CostModel, PricedTables
from search.planning.cost.tables import PlanTables, joined
from search.planning.layered.core import (
    TableChoice,
    TableSolution,
    core,
    solve_tables,
)
from search.planning.layered.prediction import (
    Alternative,
    SearchedPlan,
    SearchResult,
    SearchStats,
    predict,
    probabilities_faster,
    published_class,
)
from search.planning.space import (
    Rules,
    SearchSpace,
    Table,
    build_space,
    global_batches,
    parse_rules,
)
from search.request.interface import open_documents
from search.request.options import SearchOptions, batches_of, option_record, widest

if TYPE_CHECKING:
    from pathlib import Path

    from _autopar_core import Knowledge

# --------------------------------------------------------------------------------------------------
# Application of `--pin` and `--forbid` to priced tables: forbidden rows become invalid.


def _with(tables: PlanTables, **arrays: Any) -> PlanTables:
    return replace(tables, **arrays)


def stage_mask(tables: PlanTables, rules: Rules) -> NDArray[np.bool_] | None:
    """Return (stages, S) True if rules of the stage allow a strategy; None without such rules."""
    if not rules.has_stage_rules:
        return None
    stages = int(tables.table_stages.max())
    allowed = np.ones((stages, len(tables.strategies)), dtype=np.bool_)
    for j in rules.stages:
        if j < stages:
            allowed[j] = [rules.allows_stage(j, s) for s in tables.strategies]
    return allowed


def restrict(tables: PlanTables, space: SearchSpace, rules: Rules) -> PlanTables:
    """Return the tables with rows invalid that `--disable-dp` or rules on layers exclude.

    Layers of one type with different rules become separate types.
    """
    valid = tables.valid
    if space.only_data_degree_1:
        # the data degree is 1 if t*c equals the ranks of a stage
        ranks = tables.world_size // tables.table_stages
        shards = np.array([s.tp * s.cp for s in space.strategies])
        valid = valid & (ranks[:, None] == shards)[:, None, :]
        tables = _with(tables, valid=valid)
    if not rules.rules:
        return tables
    # the core restricts strategies by type, so layers with different rules get different types
    masks: dict[tuple[int, tuple[bool, ...]], int] = {}
    types = []
    kinds = tables.layer_type.tolist()
    for kind, mask in zip(
        kinds, rules.layer_masks(range(len(kinds)), space.strategies), strict=True
    ):
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
        # the core reads contiguous arrays, and indexing by lists returns other orders
        **{name: np.ascontiguousarray(array) for name, array in arrays.items()},
    )


def finite(tables: PlanTables) -> PlanTables:
    """Return the tables with 0 s in invalid rows, where the core does not accept infinity."""
    layer = {
        name: np.where(tables.valid, getattr(tables, name), 0.0)
        for name in ("forward_s", "backward_s", "tail_s")
    }
    vocab = {
        name: np.where(tables.vocab_valid[:, None, :], getattr(tables, name), 0.0)
        for name in ("vocab_forward_s", "vocab_backward_s", "vocab_tail_s")
    }
    return _with(tables, **layer, **vocab)


# --------------------------------------------------------------------------------------------------
# Planner.


def changes_of(
    memory_bytes: float | None, memory_gib: float | None, top: int | None
) -> dict[str, Any]:
    """Return the changed fields of `SearchOptions`, whose class checks the values."""
    if memory_bytes is None and memory_gib is not None:
        memory_gib = plain(memory_gib)
        is_number = isinstance(memory_gib, int | float) and not isinstance(memory_gib, bool)
        memory_bytes = memory_gib * GIB if is_number else memory_gib
    asked = {"memory_constraint_bytes": memory_bytes, "top": top}
    return {name: value for name, value in asked.items() if value is not None}


FRONTIER_STEPS = 64
"""Maximum number of searches of `Planner.frontier` after the first."""


class _PricedSpace(Record, eq=False):
    """Search space of some batch sizes with its cost tables."""

    space: SearchSpace
    priced: PricedTables | None
    """Rows by category; None if they need too much memory or were priced in several parts."""
    tables: PlanTables
    stage_allowed: NDArray[np.bool_] | None
    unpriced: int = 0
    """Number of tables not priced before the time limit."""
    known: Knowledge = field(default_factory=core.Knowledge)
    """Results proven by searches at other memory constraints."""


class Planner:
    """Search for the fastest per-layer plan of one model on one cluster.

    Cost tables are reused between searches.

    model : value of `--model`, or (ModelSpec, ModelProfile).
    hardware : value of `--hardware` such as `h100:4x8`, or a HardwareProfile.
    options : fields of `SearchOptions`, and `memory_constraint_gib` in GiB.

    Raises InputError: an input is missing or invalid. Raises OptionError: an option is invalid.
    """

    def __init__(
        self,
        model: str | Path | tuple[ModelSpec, ModelProfile],
        hardware: str | Path | HardwareProfile,
        **options: Any,
    ) -> None:
        self._set(*open_documents(model, hardware, options))

    @classmethod
    @typed
    def from_documents(
        cls,
        spec: ModelSpec,
        profile: ModelProfile,
        hardware: HardwareProfile,
        options: SearchOptions | None = None,
    ) -> Planner:
        """Return a planner of loaded inputs; default options if `options` is None."""
        planner = cls.__new__(cls)
        planner._set(spec, profile, hardware, options or SearchOptions())
        return planner

    def _set(
        self,
        spec: ModelSpec,
        profile: ModelProfile,
        hardware: HardwareProfile,
        options: SearchOptions,
    ) -> None:
        self.spec = spec
        self.profile = profile
        self.hardware = hardware
        self.options = options
        _check(self.options, hardware)
        self.rules = parse_rules(self.options.pin, self.options.forbid)
        _check_rules(self.rules, spec)
        self._built: dict[tuple[int, ...], _PricedSpace] = {}
        self._cost = CostModel(spec, profile, hardware, self.options)

    def solve(
        self,
        memory_constraint_bytes: float | None = None,
        global_batch_sizes: Sequence[int] | None = None,
        *,
        memory_constraint_gib: float | None = None,
        top: int | None = None,
        explained: bool = True,
    ) -> SearchResult:
        """Return the plan with the highest throughput within the memory constraint.

        Arguments that are None default to the options of the planner.

        memory_constraint_bytes, memory_constraint_gib : memory per GPU; the first has precedence.
        global_batch_sizes : batch sizes to search; cost tables of earlier calls are reused.
        top : number of alternatives.
        explained : True to find the option that excludes all plans, if none is legal.

        Raises OptionError for an invalid value.
        """
        changes = changes_of(memory_constraint_bytes, memory_constraint_gib, top)
        # built for their checks, which are those of the command line
        options = replace(self.options, **changes) if changes else self.options
        batches = batches_of(global_batch_sizes) or tuple(global_batches(self.options))
        return self._solve(options.memory_constraint_bytes, batches, options.top, explained)

    def _solve(
        self, memory: float, batches: tuple[int, ...], top: int, explained: bool = True
    ) -> SearchResult:
        wall, cpu = time.perf_counter(), time.process_time()
        until = self._until(wall)
        built = self._tables(batches, until)
        solution = self._solution(built, memory, top, until)
        return self._result(built, solution, memory, wall, cpu, explained=explained)

    def _until(self, start: float) -> float | None:
        """Return the time (`time.perf_counter`) when the time limit ends; None without a limit."""
        limit = self.options.time_limit_s
        return None if limit is None else start + limit

    def _solution(
        self, built: _PricedSpace, memory: float, top: int, until: float | None
    ) -> TableSolution:
        solution = solve_tables(
            built.tables,
            # the constraint limits reserved memory, tables contain allocated bytes
            max(0, self._cost.reserve.budget_bytes(memory)),
            alternatives=top,
            # the remaining time; 0 would mean no limit
            time_limit_s=None if until is None else max(until - time.perf_counter(), 1e-3),
            uniform=built.space.uniform,
            division=self.options.pp_division or (),
            stage_allowed=built.stage_allowed,
            known=built.known,
        )
        if not built.unpriced:
            return solution
        # no bound is known for tables that were not priced
        return replace(solution, status="time_limit", bound_s_per_sample=0.0, bound_step_time_s=0.0)

    @typed
    def evaluate(
        self, plan: Plan, memory_constraint_bytes: PositiveNumber | None = None
    ) -> Prediction:
        """Return step time and memory of a plan, which may be illegal or too large.

        memory_constraint_bytes : memory per GPU; None: that of the options.

        Raises as `predict`.
        """
        memory = memory_constraint_bytes or self.options.memory_constraint_bytes
        return predict(self._fresh_cost(), plan, memory)

    @typed
    def frontier(self, first: SearchResult | None = None) -> list[SearchResult]:
        """Return the best plans under decreasing memory constraints, largest first.

        The first search uses the constraint M of the options. The constraint of search n is one
        byte less than the memory of the last plan, and at most M * (1 - n/64). At most 64 searches
        follow, and some plans may be skipped. The last result has no plan if nothing fits.
        Only the first result has alternatives.

        first : result of the first search, if known
        """
        results = [first or self.solve()]
        most = self.options.memory_constraint_bytes
        while results[-1].prediction is not None and len(results) <= FRONTIER_STEPS:
            # the stage with the largest reserved memory determines the next constraint
            used = max(s.reserved_bytes for s in results[-1].prediction.stages)
            grid = most - most * len(results) / FRONTIER_STEPS
            results.append(self._solve(min(used - 1, grid), global_batches(self.options), 0))
        return results

    @typed
    def why_not(self, rule: str, baseline: SearchResult) -> SearchResult:
        """Return the best plan that obeys one additional pin, such as `tp=8`.

        The global batch is that of the plan in `baseline`. Raises OptionError for an invalid rule.
        """
        options = replace(self.options, pin=(*self.options.pin, rule))
        # at another batch the result would compare batches
        batches = None if baseline.plan is None else (baseline.plan.global_batch,)
        pinned = Planner.from_documents(self.spec, self.profile, self.hardware, options)
        return pinned.solve(global_batch_sizes=batches)

    def _fresh_cost(self) -> CostModel:
        """Return a copy of the cost model whose notes concern one plan only."""
        return self._cost.for_one_plan()

    def _tables(self, batches: tuple[int, ...], until: float | None) -> _PricedSpace:
        built = self._built.get(batches)
        if built is None:
            built = self._build(batches, until)
            # incomplete tables are priced again, because the next search may have more time
            if not built.unpriced:
                self._built[batches] = built
        return built

    def _build(self, batches: tuple[int, ...], until: float | None) -> _PricedSpace:
        space = build_space(
            self.options,
            world_size=self.hardware.world_size,
            num_layers=self.spec.num_layers,
            num_tokens=min(layer.seq_length for layer in self.spec.layers),
            batches=batches,
            rules=self.rules,
        )
        _check_size(space, self.spec)
        unpriced = 0
        priced: PricedTables | None = None
        if until is None or _num_rows(space, self.spec) <= _ROWS_AT_ONCE:
            priced = self._cost.priced(
                space.strategies,
                space.vocab,
                space.tables,
                space.candidates,
                self.options.pipeline_type,
                # the core reads valid rows only, and accepts no infinite time in others
                unpriced_s=0.0,
            )
            tables = priced.tables
            if space.only_data_degree_1 or self.rules.rules:
                tables = finite(restrict(tables, space, self.rules))
        else:
            # part of the time is for the search
            now = time.perf_counter()
            tables, unpriced = self._price_until(space, now + _PRICED_SHARE * (until - now))
            tables = finite(restrict(tables, space, self.rules))
        kept = priced is not None and tables.valid.size <= _MOST_KEPT_ROWS
        return _PricedSpace(
            space=space,
            priced=priced if kept else None,
            tables=tables,
            stage_allowed=stage_mask(tables, self.rules),
            unpriced=unpriced,
        )

    def _price(
        self, space: SearchSpace, tables: Sequence[Table], candidates: Sequence[tuple[int, int]]
    ) -> PlanTables:
        return self._cost.tables(
            space.strategies, space.vocab, tables, candidates, self.options.pipeline_type
        )

    def _price_until(self, space: SearchSpace, until: float) -> tuple[PlanTables, int]:
        """Return (tables priced before `until`, at least one; number of tables not priced)."""
        # scattered by the golden ratio, so that some tables of all numbers of stages and
        # micro-batch sizes are priced early
        order = sorted(range(len(space.tables)), key=lambda i: (i * _GOLDEN) % 1.0)
        parts: list[tuple[NDArray[np.int64], PlanTables]] = []
        done, size = 0, 1
        while done < len(order) and (done == 0 or time.perf_counter() < until):
            start = time.perf_counter()
            numbers = order[done : done + size]
            parts.append(
                (np.array(numbers), self._price(space, [space.tables[i] for i in numbers], ()))
            )
            done += len(numbers)
            # the number of tables that the last rate prices in a time slice, at most twice the
            # previous number
            took = max(time.perf_counter() - start, 1e-6)
            size = max(1, min(2 * len(numbers), int(len(numbers) * _SLICE_S / took)))
        place = {n: i for i, n in enumerate(sorted(order[:done]))}
        candidates = [(place[n], m) for n, m in space.candidates if n in place]
        return joined(parts, candidates), len(order) - done

    def _plan(self, built: _PricedSpace, choice: TableChoice | TableSolution) -> Plan:
        tables = built.tables
        n = int(tables.candidate_table[choice.candidate])
        m = int(tables.candidate_microbatches[choice.candidate])
        return Plan(
            world_size=tables.world_size,
            num_stages=int(tables.table_stages[n]),
            stage_sizes=choice.stage_sizes,
            layers=tuple(tables.strategies[s] for s in choice.strategy_index),
            vocab=tables.vocab[choice.vocab_index],
            global_batch=int(tables.table_microbatch[n]) * m,
            num_microbatches=m,
            pipeline_type=tables.pipeline_type,
            default_dp_type=tables.table_dp[n],
        )

    def _result(
        self,
        built: _PricedSpace,
        solution: TableSolution,
        memory: float,
        wall: float,
        cpu: float,
        *,
        explained: bool = True,
    ) -> SearchResult:
        best: Plan | None = None
        prediction: Prediction | None = None
        # the search's model has notes on every row, a result only those on its plan
        cost = self._fresh_cost()
        bound = 0.0
        if solution.candidate >= 0:
            best = self._plan(built, solution)
            prediction = predict(cost, best, memory, self._searched(built, solution))
            bound = prediction.samples_per_s
            # after an early stop, no plan is faster than the lowest remaining bound
            if solution.status != "optimal":
                bound = max(bound, _per_s(solution.bound_s_per_sample))
        elif solution.status == "time_limit":
            bound = _per_s(solution.bound_s_per_sample)
        if prediction is None:
            gap = 0.0 if solution.status == "infeasible" else float("inf")
        else:
            gap = bound / prediction.samples_per_s - 1.0
        return SearchResult(
            status=solution.status,
            plan=best,
            prediction=prediction,
            bound_samples_per_s=bound,
            gap=gap,
            alternatives=tuple(self._alternatives(built, best, solution)),
            infeasibility=self._infeasibility(built, solution, memory, explained=explained),
            defaults_used=tuple(cost.defaults_used),
            notes=tuple(cost.notes),
            options=option_record(self.options, memory, self.hardware.threads),
            sources=self.hardware.sources + self.profile.sources + _calibrated(self.options),
            estimated=self.hardware.estimated or self.profile.estimated,
            synthetic=self.hardware.synthetic or self.profile.synthetic,
            too_large=solution.too_large,
            unfinished=tuple(_unfinished(built, solution)),
            stats=SearchStats(
                states=solution.states,
                candidates=solution.items,
                opened=solution.opened,
                cpu_s=time.process_time() - cpu,
                wall_s=time.perf_counter() - wall,
            ),
        )

    def _searched(self, built: _PricedSpace, solution: TableSolution) -> SearchedPlan | None:
        """Return the found plan as indices into the priced rows; None if rows were discarded."""
        if built.priced is None:
            return None
        return SearchedPlan(
            priced=built.priced,
            table=int(built.tables.candidate_table[solution.candidate]),
            strategy_index=solution.strategy_index,
            vocab_index=solution.vocab_index,
        )

    def _alternatives(
        self, built: _PricedSpace, best: Plan | None, solution: TableSolution
    ) -> Sequence[Alternative]:
        if best is None:
            return ()
        found = []
        others = [self._plan(built, choice) for choice in solution.alternatives]
        # all plans need the same replicas, so the cost model of the search is used
        faster = probabilities_faster(self._cost, best, others)
        runs = published_class(self._cost)
        if runs is not None:
            # per sample, because alternatives may have other global batches
            mine = solution.step_time_s / best.global_batch
            faster = tuple(
                probability_faster(choice.step_time_s / plan.global_batch, mine, runs.plan_spread)
                for choice, plan in zip(solution.alternatives, others, strict=True)
            )
        for choice, other, probability in zip(solution.alternatives, others, faster, strict=True):
            speed = other.global_batch / choice.step_time_s
            found.append(
                Alternative(
                    plan=other,
                    step_time_s=choice.step_time_s,
                    samples_per_s=speed,
                    bound_samples_per_s=speed,
                    differs_by=_difference(best, other),
                    probability_faster=probability,
                )
            )
        return found

    def _infeasibility(
        self, built: _PricedSpace, solution: TableSolution, memory: float, *, explained: bool = True
    ) -> Infeasibility | None:
        if solution.status != "infeasible":
            return None
        if solution.smallest_budget_bytes == 0:
            return Infeasibility(
                stage=0,
                num_stages=0,
                missing_bytes=0,
                smallest_budget_bytes=0,
                reason=(explained and self._excluded(built))
                or (
                    f"{self._obstacle(built.space)}. Degrees must divide the GPUs, heads, widths, "
                    "sequence and batch"
                ),
            )
        n = int(built.tables.candidate_table[solution.binding_candidate])
        need = self._cost.reserve.reserved_bytes(solution.smallest_budget_bytes)
        missing = need - int(memory)
        stages = int(built.tables.table_stages[n])
        return Infeasibility(
            stage=solution.binding_stage,
            num_stages=stages,
            missing_bytes=missing,
            smallest_budget_bytes=need,
            reason=(
                f"stage {solution.binding_stage} of {stages} of the smallest possible plan "
                f"needs {format_bytes(need)}, {format_bytes(missing)} more than the constraint"
            ),
        )

    def _excluded(self, built: _PricedSpace) -> str | None:
        """Return why all plans are excluded and the single option to change, None without one."""
        batches = tuple(
            sorted({int(b) for b in _batches(built.tables)}) or global_batches(self.options)
        )
        for name, value, words in _relaxations(self.options, self.hardware.world_size):
            # one plan is enough, and an error message must not need a long search
            changes: dict[str, Any] = {name: value, "time_limit_s": _RELAXED_S}
            options = replace(self.options, **changes)
            try:
                other = Planner.from_documents(self.spec, self.profile, self.hardware, options)
                until = other._until(time.perf_counter())
                found = other._solution(other._tables(batches, until), float(1 << 60), 0, until)
            except InputError:
                continue
            if found.candidate >= 0:
                return f"{self._obstacle(built.space)}. {words}"
        return None

    def _obstacle(self, space: SearchSpace) -> str:
        """Return why no strategy of a space is legal: the first broken rule of up to three."""
        masks = self.rules.layer_masks(range(self.spec.num_layers), space.strategies)
        allowed = [one for one, *rest in zip(space.strategies, *masks, strict=True) if any(rest)]
        if not allowed:
            return "no allowed strategy satisfies all rules"
        world = self.hardware.world_size
        ranks = {world // stages for stages, _, _ in space.tables}
        if space.only_data_degree_1:
            allowed = [one for one in allowed if one.tp * one.cp in ranks]
            if not allowed:
                return f"without data parallelism the allowed degrees do not use all {world} GPUs"
        if all(one.zero3 and {one.tp * one.cp} == ranks for one in allowed):
            return "ZeRO-3 needs a data-parallel degree of 2 or more"
        sequence_parallel = self.options.sequence_parallel
        problems: dict[str, None] = {}
        for one in allowed:
            broken = (
                notice.problem
                for layer in self.spec.layers
                for notice in layer_problems(layer, one, sequence_parallel=sequence_parallel)
            )
            problem = next(broken, None)
            if problem is None:
                return "no combination of the allowed strategies is legal for this model and batch"
            problems[problem] = None
        more = f" and {len(problems) - _MOST_PROBLEMS} more" * (len(problems) > _MOST_PROBLEMS)
        return ", ".join([*problems][:_MOST_PROBLEMS]) + more


_MOST_PROBLEMS = 3
"""Maximum number of broken rules in the message of a search without a legal plan."""
_RELAXED_S = 1.0
"""Time limit of a search without one option, seconds."""
_MOST_KEPT_ROWS = 1 << 16
"""Maximum number of rows stored by category for `predict`; about 300 bytes each."""


_MOST_STRATEGIES = 1024
"""Maximum number of strategies per layer; the core numbers them in ten bits."""
_MOST_ROWS = 1 << 22
"""Maximum number of rows (strategy and micro-batch), about 800 bytes each during pricing."""


def _check_size(space: SearchSpace, spec: ModelSpec) -> None:
    """Raise OptionError for a search space whose pricing would need gigabytes or minutes."""
    strategies, tables = len(space.strategies), len(space.tables)
    if strategies > _MOST_STRATEGIES:
        raise OptionError(
            f"{strategies:,} strategies per layer, expected at most {_MOST_STRATEGIES:,}",
            remedy=("Lower --max-tp-deg, --max-sp-deg or --max-cp-deg, or remove --strided-tp"),
        )
    if _num_rows(space, spec) > _MOST_ROWS:
        raise OptionError(
            f"{strategies:,} strategies for {tables:,} combinations of "
            f"micro-batch size and stages are more than {_MOST_ROWS:,}",
            remedy=(
                "Lower --max-bsz, --max-pp-deg or the largest degrees, or increase --bsz-scale"
            ),
        )


_ROWS_AT_ONCE = 1 << 12
"""Maximum number of rows priced without checking the time limit, which takes at most 0.1 s."""
_SLICE_S = 0.05
"""Target time of pricing between two checks of the time limit, seconds."""
_PRICED_SHARE = 0.6
"""Maximum share of the time limit for pricing."""
_GOLDEN = (5**0.5 - 1) / 2


def _num_rows(space: SearchSpace, spec: ModelSpec) -> int:
    return len(space.strategies) * len(space.tables) * len(spec.layers)


def _unfinished(built: _PricedSpace, solution: TableSolution) -> Iterator[str]:
    """Yield sentences on why the search ended early and which parts it skipped."""
    early = "the time limit ended the search early: "
    if solution.too_large:
        yield "the search ended early: one stage has more than 1 GiB of partial plans worth keeping"
    if built.unpriced:
        yield (
            f"{early}{built.unpriced:,} of {len(built.space.tables):,} sizes of micro-batches and "
            "numbers of stages were not priced"
        )
    if not solution.alternatives_complete and solution.candidate >= 0:
        found = len(solution.alternatives)
        yield early + (
            f"only {found} alternatives were found" if found else "no alternatives were looked for"
        )


def _batches(tables: PlanTables) -> NDArray[np.int64]:
    """Return the global batch of every candidate, (Q,) samples."""
    result: NDArray[np.int64] = (
        tables.table_microbatch[tables.candidate_table] * tables.candidate_microbatches
    )
    return result


def _relaxations(options: SearchOptions, world: int) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, least restrictive value, remedy) of options that restrict the search.

    world : number of GPUs.
    """
    widths = widest(world)
    rows = {row.field: row for row in rows_of(SearchOptions)}
    # Degrees before kinds: another kind with the degree may satisfy a rule such as tp=4. Options
    # of the user come before defaults.
    for name in sorted(widths, key=lambda f: getattr(options, f) == rows[f].default):
        row, value = rows[name], getattr(options, name)
        if value == widths[name]:
            continue
        if name.startswith("disable_"):
            yield name, False, f"Remove --{row.name}"
        else:
            # None is the default that the inputs determine
            shown = row.shown if value is None else _words(written(row, value))
            default = " (the default)" if value == row.default else ""
            if isinstance(widths[name], int) and not isinstance(widths[name], bool):
                words = f"Use a larger --{row.name} than {shown}{default}"
            elif widths[name] in (None, ()):
                words = f"Remove --{row.name} {shown}"
            else:
                words = f"Use another --{row.name} than {shown}{default}"
            yield name, widths[name], words


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _per_s(seconds: float) -> float:
    """Return the reciprocal of seconds, infinite for 0."""
    return 1.0 / seconds if seconds > 0 else float("inf")


def _difference(best: Plan, other: Plan) -> str:
    """Return the differences of an alternative to the best plan, most important first."""
    words = []
    if other.num_stages != best.num_stages:
        words.append(f"p={other.num_stages}")
    if other.default_dp_type != best.default_dp_type:
        words.append(other.default_dp_type)
    degrees = [_degrees(plan) for plan in (best, other)]
    if degrees[0] != degrees[1]:
        words.append("layers " + "/".join(degrees[1]))
    if other.vocab != best.vocab:
        kind = "vsp" if other.vocab.ulysses else "vtp"
        zero3 = "" if other.vocab.zero3 == best.vocab.zero3 else " without zero3"
        if other.vocab.zero3:
            zero3 = " zero3"
        context = "" if other.vocab.cp == best.vocab.cp else f" vcp={other.vocab.cp}"
        words.append(f"{kind}={other.vocab.tp}{context}{zero3}")
    if (other.global_batch, other.num_microbatches) != (best.global_batch, best.num_microbatches):
        words.append(f"G={other.global_batch} m={other.num_microbatches}")
    return ", ".join(words) or "other strategies"


def _degrees(plan: Plan) -> list[str]:
    kinds = sorted({(s.tp, s.ulysses, s.cp) for s in plan.layers})
    return [
        ("ulysses" if ulysses else "tp") + str(t) + (f"-cp{c}" if c > 1 else "")
        for t, ulysses, c in kinds
    ]


_LOOKED_AT = 4
"""Number of alternatives searched for each one to show."""


def solve_by_family(planner: Planner, top: int) -> SearchResult:
    """Return the search result of a planner with at most `top` alternatives with other degrees.

    Plans with equal pipeline stages and layer degrees form a family, even if embedding, head or
    ZeRO stage differ. Each alternative is the fastest found plan of another family.
    """
    result = planner.solve(top=_LOOKED_AT * top)
    if result.plan is None:
        return result
    families = {_family(result.plan)}
    kept: list[Alternative] = []
    for other in result.alternatives:
        if _family(other.plan) not in families and len(kept) < top:
            families.add(_family(other.plan))
            kept.append(other)
    return replace(result, alternatives=tuple(kept))


def _family(plan: Plan) -> tuple[object, ...]:
    return plan.num_stages, frozenset((one.tp, one.ulysses, one.cp) for one in plan.layers)


def _calibrated(options: SearchOptions) -> tuple[Source, ...]:
    source = None if options.calibration is None else options.calibration.source
    return () if source is None else (source,)


def _check(options: SearchOptions, hardware: HardwareProfile) -> None:
    if hardware.world_size < 1:
        raise OptionError(f"the cluster has {hardware.world_size} GPUs, expected at least 1")
    if options.cp_kind == "a2a":
        raise OptionError(
            "--cp-kind a2a needs uniform plans",
            remedy="Use ring or all-gather; per-layer plans have a Ulysses degree",
        )
    ulysses = "sp" in options.sp_space.split("+") and not options.disable_sp
    measured = any(operation == "all2all" for operation, _ in hardware.curves)
    if ulysses and not measured and hardware.world_size > 1:
        raise OptionError(
            f"--sp-space {options.sp_space} needs measured all-to-all times "
            "(sp_time_*.json), which the hardware profile does not contain",
            remedy=("Create the file with `torchrun -m profiler.hardware`, or use --sp-space tp"),
        )


def _check_rules(rules: Rules, spec: ModelSpec) -> None:
    last = rules.last_layer()
    if last is not None and last >= spec.num_layers:
        raise OptionError(
            f"--pin: layer {last} does not exist, {spec.name} has layers 0-{spec.num_layers - 1}"
        )
