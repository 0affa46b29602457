"""Prediction of step time and memory of one per-layer plan, and records of a search result.

Times and bytes are computed in `search.planning.cost`. Search, `--evaluate` and `autopar-explain`
all use `predict`, so a plan that is written to a file and read back gets the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import groupby
from typing import Any, Literal

import numpy as np

from autopar.answer import EngineBest
from autopar.arrays import F64
from autopar.errors import InputError
from autopar.rates.accuracy import RunClass, class_of_sources
from autopar.records import Record, replace
from autopar.run.plan import (
    PUBLISHED_RUNS,
    Infeasibility,
    LayerRun,
    LayerStrategy,
    Plan,
    Prediction,
    StagePrediction,
    WidestCell,
    refinements,
    violations,
)
from autopar.sources import Source, stacks_of
from autopar.units import format_bytes
from search.planning.cost.model import CostModel, PricedTables
from search.planning.cost.pipeline import (
    Evaluation,
    evaluate,
    replay,
    replica_step_times,
    vocab_position,
)
from search.planning.cost.tables import LayerRows, PlanTables
from search.planning.cost.vocabulary import VocabRows
from search.planning.layered.summary import one_line, result_rows, result_words

# --------------------------------------------------------------------------------------------------
# Results of a search; the prediction of its plan is `autopar.run.plan.Prediction`.


Status = Literal["optimal", "within_gap", "time_limit", "infeasible"]


class Alternative(Record):
    """Plan slower than the best one, which differs from every faster plan of the result."""

    plan: Plan
    step_time_s: float
    samples_per_s: float
    bound_samples_per_s: float
    differs_by: str
    """Differences to the best plan, e.g. `p=2`, `no tp8 layers`, `vtp=4`."""
    probability_faster: float | None = None
    """Probability of being faster than the best plan, 0 to 1; None if no errors are known.

    Measured times: share of the computation replicas in which this plan is faster. Estimates: from
    the errors of published runs, without the error that all runs of one model have in common."""


class SearchStats(Record):
    """Statistics of a search."""

    states: int
    """Partial plans created by the exact search."""
    candidates: int
    """Sub-problems considered: (global batch, micro-batches, stages, vocabulary strategy)."""
    opened: int
    """Sub-problems solved exactly; bounds excluded the others."""
    cpu_s: float
    wall_s: float


class SearchResult(Record, checked=True):
    """Result of a search.

    `plan` is None if the search is infeasible or found none in time; a uniform plan is a
    `UniformPlan`. Notebooks show a sentence and a table instead of the fields.
    """

    status: Status
    plan: Plan | None
    prediction: Prediction | None
    bound_samples_per_s: float
    gap: float
    """(bound - found) / found throughput; 0 when optimal, infinite when no bound is known."""
    alternatives: tuple[Alternative, ...]
    infeasibility: Infeasibility | None
    defaults_used: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences on derived, extrapolated or estimated inputs."""
    options: Mapping[str, object]
    sources: tuple[Source, ...]
    estimated: bool
    stats: SearchStats
    too_large: bool = False
    """True if the core ran out of its memory for the non-dominated partial plans of a stage."""
    unfinished: tuple[str, ...] = ()
    """Parts of the search that were skipped because of time or memory, in words."""
    synthetic: bool = False
    """True if some input is synthetic: invented for tests, not measured on a machine."""
    engines: tuple[EngineBest, ...] = ()
    """Best plan of each engine, the fastest first; empty if engines were not searched."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that `--json` prints, without its header fields."""
        # reports import results, so importing them here at run time avoids a cycle
        reports = import_module("search.show.files")
        found: dict[str, Any] = reports.result_document(self, engines=self.engines).content()
        return found

    def words(self, *, batch: bool = False) -> str:
        """Return the plan in one line; batch : True to add the global batch."""
        assert self.plan is not None, "there is a plan"
        return one_line(self.plan, batch=batch)

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per plan, best first: plan in words, step time (s), samples/s."""
        return result_rows(self)

    def to_frame(self) -> Any:
        """Return `rows` as a pandas.DataFrame; raises InstallError without pandas."""
        from autopar.command.python_api import frame

        return frame(self.rows())

    def __repr__(self) -> str:
        return f"SearchResult({result_words(self)})"

    def _repr_html_(self) -> str:
        from autopar.command.python_api import shown_table

        return shown_table(result_words(self), self.rows())


# --------------------------------------------------------------------------------------------------
# Spread of a plan's step time: the plan is priced with resampled times of measured computation.
#
# Source: cost-model.md "Spread of computation". All plans of a cost model use the same replicas, so
# that two plans can be compared replica by replica.


def result_without_plan(
    options: Mapping[str, object],
    reason: str,
    *,
    missing_bytes: int = 0,
    smallest_budget_bytes: int = 0,
) -> SearchResult:
    """Return the result of a search that has no plan, whichever engines it asked.

    options : as `option_record` returns them.
    missing_bytes, smallest_budget_bytes : as in `Infeasibility`; 0 if unknown.
    """
    return SearchResult(
        status="infeasible",
        plan=None,
        prediction=None,
        bound_samples_per_s=0.0,
        gap=0.0,
        alternatives=(),
        infeasibility=Infeasibility(
            stage=0,
            num_stages=0,
            missing_bytes=missing_bytes,
            smallest_budget_bytes=smallest_budget_bytes,
            reason=reason,
        ),
        defaults_used=(),
        notes=(),
        options=options,
        sources=(),
        estimated=True,
        stats=SearchStats(states=0, candidates=0, opened=0, cpu_s=0.0, wall_s=0.0),
    )


def drawn_step_times(
    cost: CostModel,
    tables: PlanTables,
    *,
    num_microbatches: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
) -> F64:
    """Return the step time of a plan in each replica of the computation, (NUM_REPLICAS,) seconds.

    A replica is a random draw of all measured compute times.

    tables : one table with exactly the layer strategies and the vocabulary strategy of the plan.
    """
    table = (int(tables.table_stages[0]), int(tables.table_microbatch[0]), tables.table_dp[0])
    drawn = [
        np.stack(parts, axis=1)
        for parts in zip(
            *(
                cost.drawn_layer_s(k, tables.strategies, table)
                for k in range(len(cost.spec.layers))
            ),
            strict=True,
        )
    ]
    forward, backward, tail = drawn
    # only computation is resampled; redistribution, transfers and memory use the medians
    return replica_step_times(
        tables,
        (forward, backward, tail),
        # None without spread: the values of the tables apply to every replica
        cost.drawn_vocab_s(tables.vocab, table),
        num_microbatches=num_microbatches,
        stage_sizes=stage_sizes,
        strategy_index=strategy_index,
    )


def interval_s(
    step_time_s: float, communication: tuple[float, float] | None, drawn: F64 | None
) -> tuple[float, float] | None:
    """Return the 90 % interval of the step time, (low, high) seconds; None without any spread.

    The deviations of communication and computation are added, as if both were fast or slow at once.

    communication : step time with fast and with slow communication, seconds.
    drawn : step times of the replicas, seconds; their 5th and 95th percentiles are used.
    """
    if communication is None and drawn is None:
        return None
    fast, slow = communication or (step_time_s, step_time_s)
    if drawn is not None:
        low, high = (float(x) for x in np.quantile(drawn, (0.05, 0.95)))
        # all replicas may be faster, or slower, than the step time of the medians
        fast += min(low - step_time_s, 0.0)
        slow += max(high - step_time_s, 0.0)
    return min(fast, step_time_s), max(slow, step_time_s)


def widest_cell(cost: CostModel, drawn: F64) -> WidestCell | None:
    """Return the measured time that contributes most to the variance of the step time.

    Measured times are drawn independently, so the share of one is its squared correlation with the
    step time. None if the step time has no variance.

    drawn : step times of the replicas, seconds.
    """
    # the correlation with a constant step time is undefined
    if np.ptp(drawn) == 0.0:
        return None
    shares = {
        name: float(np.corrcoef(times, drawn)[0, 1] ** 2)
        for draws in cost.all_draws
        for name, times in draws.cells().items()
    }
    name = max(shares, key=lambda cell: shares[cell])
    return WidestCell(name=name, share=shares[name])


# --------------------------------------------------------------------------------------------------
# Prediction of a plan.


class SearchedPlan(Record, eq=False):
    """Plan found by a search, as indices into the tables of the search."""

    priced: PricedTables
    table: int
    strategy_index: tuple[int, ...]
    vocab_index: int


class _Priced(Record, eq=False):
    """Evaluated plan, as indices into tables that contain its strategies."""

    tables: PlanTables
    table: int
    layers: tuple[LayerRows, ...]
    vocab: VocabRows
    vocab_index: int
    strategy_index: tuple[int, ...]
    evaluation: Evaluation


def predict(
    cost: CostModel, plan: Plan, memory_bytes: float, searched: SearchedPlan | None = None
) -> Prediction:
    """Return step time and memory of a legal or illegal plan on the cluster of the cost model.

    An illegal plan has an infinite step time if its shape does not allow pricing.

    memory_bytes : memory constraint per GPU.
    searched : the plan in the tables of its search, which saves pricing it again; figures and notes
        are the same without it.

    Raises InputError: number of GPUs or layers of the plan differs from that of the inputs.
    """
    world = cost.hardware.world_size
    if plan.world_size != world:
        raise InputError(
            f"the plan is for {plan.world_size} GPUs, but the hardware has {world}",
            remedy="Use matching --nodes and --gpus-per-node",
        )
    if len(plan.layers) != cost.spec.num_layers:
        raise InputError(
            f"the plan has {len(plan.layers)} layers, but {cost.spec.name} has "
            f"{cost.spec.num_layers}",
            remedy="Use the model of the plan, or --num-layers",
        )
    sp = cost.options.sequence_parallel
    problems = list(violations(plan, cost.spec, sequence_parallel=sp))
    priced = None if searched is None else _looked_up(cost, plan, searched)
    if priced is None:
        priced = _price(cost, plan, problems)
    if priced is None:
        return Prediction(
            step_time_s=float("inf"),
            samples_per_s=0.0,
            replay_s=float("inf"),
            stages=(),
            legal=False,
            fits=False,
            problems=tuple(problems),
        )
    # evaluated before memory problems are added: a plan that does not fit is still legal
    legal = not problems
    stages = tuple(_stages(cost, plan, priced, memory_bytes))
    for stage in stages:
        if stage.reserved_bytes > stage.budget_bytes:
            over = stage.reserved_bytes - stage.budget_bytes
            problems.append(
                f"stage {stage.stage} reserves "
                f"{format_bytes(stage.reserved_bytes)} of "
                f"{format_bytes(stage.budget_bytes)}, {format_bytes(over)} too "
                "much"
            )
    seen = priced.evaluation
    drawn = _drawn(cost, plan, priced)
    communication = _communication_s(cost, plan, seen.step_time_s)
    known = {"communication": communication, "computation": drawn}
    interval = interval_s(seen.step_time_s, communication, drawn)
    interval_of = tuple(name for name, found in known.items() if found is not None)
    published = published_class(cost)
    if interval is None and published is not None:
        interval, interval_of = published.interval_s(seen.step_time_s), (PUBLISHED_RUNS,)
    replayed = replay(
        seen.forward_s,
        seen.backward_s,
        seen.send_s,
        seen.tail_s,
        plan.num_microbatches,
        plan.pipeline_type,
    )
    return Prediction(
        step_time_s=seen.step_time_s,
        samples_per_s=plan.global_batch / seen.step_time_s,
        replay_s=replayed.step_time_s,
        stages=stages,
        legal=legal,
        fits=all(s.reserved_bytes <= s.budget_bytes for s in stages),
        problems=tuple(problems),
        waterfall_s=_waterfall(plan, stages, seen, priced),
        step_time_interval_s=interval,
        interval_of=interval_of,
        widest_cell=None if drawn is None else widest_cell(cost, drawn),
    )


def published_class(cost: CostModel) -> RunClass | None:
    """Return the class of published runs whose errors give the interval of this estimate.

    None if both times and bandwidths were measured, or if a calibration applies: published runs
    give errors of estimates only. The result is also None if one of them was measured and no file
    names the software stack.
    """
    model, hardware = cost.model, cost.hardware
    if cost.options.calibration or not (model.estimated or hardware.estimated):
        return None
    if not (model.estimated and hardware.estimated) and not stacks_of(model.sources):
        return None
    experts = any(layer.num_experts is not None for layer in cost.spec.layers)
    return class_of_sources((*cost.model.sources, *cost.hardware.sources), experts=experts)


def _communication_s(cost: CostModel, plan: Plan, step_time_s: float) -> tuple[float, float] | None:
    """Return the step time with fast and with slow communication, seconds.

    Communication is set to the ends of its measured spread. None if it has no spread.
    """
    if not cost.hardware.has_spread:
        return None
    fast, slow = (_price(cost.at_spread(speed), plan, []) for speed in ("fast", "slow"))
    assert fast is not None, "spread changes times only"
    assert slow is not None, "spread changes times only"
    # the median curve is between both, so this corrects rounding errors only
    return (
        min(fast.evaluation.step_time_s, step_time_s),
        max(slow.evaluation.step_time_s, step_time_s),
    )


def _drawn(cost: CostModel, plan: Plan, priced: _Priced) -> F64 | None:
    """Return the step time in each replica of computation, seconds; None without spread."""
    if not cost.has_computation_spread:
        return None
    return drawn_step_times(
        cost,
        priced.tables,
        num_microbatches=plan.num_microbatches,
        stage_sizes=plan.stage_sizes,
        strategy_index=priced.strategy_index,
    )


def probabilities_faster(
    cost: CostModel, best: Plan, others: Sequence[Plan]
) -> tuple[float | None, ...]:
    """Return for each of `others` the share of replicas in which it is faster than `best`, 0 to 1.

    Plans are compared by throughput, replica by replica. None if computation has no spread.
    """

    def speeds(plan: Plan) -> F64 | None:
        priced = _price(cost, plan, [])
        drawn = None if priced is None else _drawn(cost, plan, priced)
        # by throughput, as an alternative may have another batch
        return None if drawn is None else plan.global_batch / drawn

    if not others or not cost.has_computation_spread:
        return (None,) * len(others)
    reference = speeds(best)
    return tuple(
        None if reference is None or speed is None else float(np.mean(speed > reference))
        for speed in map(speeds, others)
    )


def _looked_up(cost: CostModel, plan: Plan, searched: SearchedPlan) -> _Priced | None:
    """Return the evaluated plan from the tables of its search; None if it must be priced again."""
    # with spread, replicas need a table with the strategies of this plan only
    if cost.has_computation_spread or cost.hardware.has_spread:
        return None
    used = sorted(set(searched.strategy_index))
    if not cost.note_plan(searched.priced, searched.table, used, searched.vocab_index):
        return None
    seen = evaluate(
        searched.priced.tables,
        table=searched.table,
        num_microbatches=plan.num_microbatches,
        stage_sizes=plan.stage_sizes,
        strategy_index=searched.strategy_index,
        vocab_index=searched.vocab_index,
    )
    return _Priced(
        tables=searched.priced.tables,
        table=searched.table,
        layers=searched.priced.layers,
        vocab=searched.priced.vocab,
        vocab_index=searched.vocab_index,
        strategy_index=searched.strategy_index,
        evaluation=seen,
    )


def _without_idle_zero3(plan: Plan) -> Plan:
    """Return the plan without ZeRO-3 where states have one rank, which ZeRO-3 cannot shard."""
    ranks = plan.world_size // plan.num_stages

    def idle(tp: int, ulysses: bool) -> bool:
        # ZeRO shards over Ulysses ranks, but not over tensor-parallel ranks
        return ranks == (1 if ulysses else tp)

    changed = {
        key: replace(s, zero3=False)
        for key, s in _by_id(plan.layers).items()
        if s.zero3 and idle(s.tp, s.ulysses)
    }
    if changed:
        plan = replace(plan, layers=tuple(changed.get(id(s), s) for s in plan.layers))
    if plan.vocab.zero3 and idle(plan.vocab.tp, plan.vocab.ulysses):
        plan = replace(plan, vocab=replace(plan.vocab, zero3=False))
    return plan


def _by_id(layers: Sequence[LayerStrategy]) -> dict[int, LayerStrategy]:
    """Return the distinct strategy objects by `id`; hashing each layer's would be slower."""
    return {id(s): s for s in layers}


def unpriced(plan: Plan) -> tuple[str, ...]:
    """Return the settings of a plan that `predict` does not support, in words."""
    # a context degree of embedding and head, and ZeRO-1, are supported
    rest = replace(plan, vocab=replace(plan.vocab, cp=1), default_dp_type="ddp")
    return refinements(rest)


def _price(cost: CostModel, plan: Plan, problems: list[str]) -> _Priced | None:
    """Return the evaluated plan; None if it cannot be priced.

    Reasons are appended to `problems`, except for shapes that `violations` has reported.
    """
    p, m = plan.num_stages, plan.num_microbatches
    if p < 1 or plan.world_size % p or len(plan.stage_sizes) != p or min(plan.stage_sizes) < 1:
        return None
    if sum(plan.stage_sizes) != len(plan.layers):
        return None
    unknown = unpriced(plan)
    if unknown:
        problems.append(f"the planner does not support {', '.join(unknown)}")
        return None
    # if m does not divide the batch, its largest micro-batch is priced
    samples = -(-plan.global_batch // m)
    # tables have no ZeRO-3 rows for one rank, which equals the plan without it
    plan = _without_idle_zero3(plan)
    known = _by_id(plan.layers)
    strategies = tuple(sorted(set(known.values())))
    table = (p, samples, plan.default_dp_type)
    priced = cost.priced(
        strategies, [plan.vocab], [table], [(0, m)], plan.pipeline_type, price_illegal=True
    )
    tables, layers, vocab = priced.tables, priced.layers, priced.vocab
    number = {s: i for i, s in enumerate(strategies)}
    numbers = {key: number[s] for key, s in known.items()}
    index = tuple(numbers[id(s)] for s in plan.layers)
    kinds = cost.spec.layer_types
    for k, s in sorted(set(zip(kinds, index, strict=True))):
        if not layers[k].valid[0, s]:
            label = strategies[s].label(0, "ddp")
            text = f"layer type {k} cannot use {label} here: no measured or legal row"
            # a broken rule found before is the better message
            if not problems:
                problems.append(text)
    if not vocab.priced[0, 0]:
        # Its rows are zeros: without this reason an impossible plan would look faster.
        problems.append(
            f"the plan cannot be estimated: embedding and head have no measured or derived time at "
            f"degree {plan.vocab.tp * plan.vocab.cp} on {plan.world_size // p} ranks"
        )
        return None
    if not tables.vocab_valid[0, 0] and not problems:
        degree = plan.vocab.tp * plan.vocab.cp
        problems.append(f"embedding and head cannot use degree {degree}")
    seen = evaluate(
        tables,
        table=0,
        num_microbatches=m,
        stage_sizes=plan.stage_sizes,
        strategy_index=index,
        vocab_index=0,
    )
    # rows without a price contain infinite seconds
    if not np.isfinite(seen.step_time_s):
        if not problems:
            problems.append("the plan cannot be estimated: a layer has no measured or derived time")
        return None
    return _Priced(
        tables=tables,
        table=0,
        layers=layers,
        vocab=vocab,
        vocab_index=0,
        strategy_index=index,
        evaluation=seen,
    )


def _stages(
    cost: CostModel, plan: Plan, priced: _Priced, memory_bytes: float
) -> Sequence[StagePrediction]:
    seen = priced.evaluation
    stages = []
    first = 0
    for j, size in enumerate(plan.stage_sizes):
        layers = range(first, first + size)
        runs = tuple(_runs(cost, plan, priced, j, layers))
        first += size
        time_s: dict[str, float] = {}
        for run in runs:
            for name, value in run.time_s.items():
                # tail and optimizer occur once per step; redistribution belongs to the whole stage
                if name not in ("tail", "optimizer", "redistribution"):
                    time_s[name] = time_s.get(name, 0.0) + value
        # embedding and head are in no run of layers
        position = vocab_position(j, plan.num_stages)
        if position is not None:
            at = (priced.table, position, priced.vocab_index)
            time_s["vocab"] = float(
                priced.tables.vocab_forward_s[at] + priced.tables.vocab_backward_s[at]
            )
        time_s["redistribution"] = seen.redistribute_forward_s[j] + seen.redistribute_backward_s[j]
        stages.append(
            StagePrediction(
                stage=j,
                forward_s=seen.forward_s[j],
                backward_s=seen.backward_s[j],
                send_s=seen.send_s[j],
                tail_s=seen.tail_s[j],
                allocated_bytes=seen.allocated_bytes[j],
                reserved_bytes=cost.reserve.reserved_bytes(seen.allocated_bytes[j]),
                odds_of_oom=cost.reserve.oom_probability(seen.allocated_bytes[j], memory_bytes),
                budget_bytes=int(memory_bytes),
                in_flight=seen.in_flight[j],
                memory_bytes=seen.bytes_by_category[j],
                time_s={name: value for name, value in time_s.items() if value},
                runs=runs,
            )
        )
    return stages


def _runs(
    cost: CostModel, plan: Plan, priced: _Priced, stage: int, layers: range
) -> Sequence[LayerRun]:
    kinds, index = cost.spec.layer_types, priced.strategy_index
    tables, n = priced.tables, priced.table
    now = 0 if plan.num_microbatches == 1 else 1
    flight = priced.evaluation.in_flight[stage]
    runs = []
    for (k, s), group in groupby(layers, key=lambda at: (kinds[at], index[at])):
        members = list(group)
        rows = priced.layers[k]
        time_s = {name: value * len(members) for name, value in rows.time_s(n, s).items()}
        here = int(tables.strategy_layout[s])
        before = members[0] - 1
        source = (
            int(tables.vocab_layout[priced.vocab_index])
            if before < 0
            else int(tables.strategy_layout[index[before]])
        )
        producer = kinds[max(before, 0)]
        # the layout is constant within a run, so only its first layer needs redistribution
        time_s["redistribution"] = float(
            tables.redistribute_forward_s[n, producer, source, here]
            + tables.redistribute_backward_s[n, producer, source, here]
        )
        runs.append(
            LayerRun(
                first_layer=members[0],
                num_layers=len(members),
                layer_type=k,
                label=tables.strategies[s].label(
                    plan.data_degree(members[0]), plan.default_dp_type
                ),
                time_s={name: value for name, value in time_s.items() if value},
                memory_bytes={
                    "states": float(rows.states[now, n, s]) * len(members),
                    "activations": float(rows.activations[n, s]) * len(members) * flight,
                    "backward": float(rows.backward_peak[n, s]),
                    # listed separately from the transient bytes, which include it
                    "transient": float(rows.transient[now, n, s] - rows.backward_peak[n, s]),
                    "shared": float(rows.shared[n, s]),
                },
            )
        )
    return runs


def _waterfall(
    plan: Plan, stages: Sequence[StagePrediction], seen: Evaluation, priced: _Priced
) -> Mapping[str, float]:
    """Return the step time split into categories, seconds.

    These are m micro-batches of the slowest stage by category, then bubble, transfers and tail.
    """
    m = plan.num_microbatches
    slowest = max(stages, key=lambda s: s.forward_s + s.backward_s)
    parts = {name: m * value for name, value in slowest.time_s.items()}
    # the step contains every stage once and the slowest m - 1 times more; the rest is bubble
    passes = m * (slowest.forward_s + slowest.backward_s)
    compute = seen.parts_s["first_microbatch"] + seen.parts_s["steady"]
    parts["bubble"] = compute - passes
    parts["transfer"] = seen.parts_s["transfer"]
    # the step ends with the longest tail, so only that stage's tail is split
    last = max(stages, key=lambda s: s.tail_s)
    optimizer = sum(run.time_s.get("optimizer", 0.0) for run in last.runs)
    position = vocab_position(last.stage, plan.num_stages)
    fixed = 0.0
    if position is not None:
        row = priced.vocab.row(priced.table, position, priced.vocab_index)
        assert row is not None, "embedding and head of a plan with a price have one"
        step = priced.vocab.seconds[2]
        optimizer += float(step["optimizer"][row])
        # only with a calibration
        if "fixed" in step:
            fixed = float(step["fixed"][row])
    parts["optimizer"] = optimizer
    parts["fixed"] = fixed
    # the rest of the tail: reduction, ZeRO-2's gather, tied weights
    parts["gradient_sync"] = seen.parts_s["tail"] - optimizer - fixed
    # differences of sums leave rounding errors
    return {name: value for name, value in parts.items() if abs(value) > 1e-12}
