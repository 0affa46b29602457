"""The prediction of one plan, and the result of a search: what is known of it, as frozen values.

Times and bytes come from `search.cost`; nothing is chosen here.

Searching, `--evaluate` and `autopar-explain` all price plans here, so a plan that is written to a
file and read back gets the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError
from autopar.plans import (
    LayerRun,
    Plan,
    Prediction,
    StagePrediction,
    WidestCell,
    violations,
)
from autopar.sources import Source
from autopar.units import format_bytes
from search.cost.fits import NUM_REPLICAS
from search.cost.memory import reserved_bytes
from search.cost.model import CostModel
from search.cost.pipeline import Evaluation, evaluate, replay, vocab_position
from search.cost.tables import LayerRows, PlanTables
from search.cost.vocabulary import VocabRows
from search.options import SearchOptions

__all__ = [
    "Alternative",
    "Infeasibility",
    "SearchResult",
    "SearchStats",
    "Status",
    "allocation_budget",
    "drawn_step_times",
    "interval_s",
    "predict",
    "probabilities_faster",
    "widest_cell",
]


# --------------------------------------------------------------------------------------------------
# What a search returns; the prediction of its plan is `autopar.plans.Prediction`.


Status = Literal["optimal", "infeasible", "time_limit"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan that differs in kind from every better one."""

    plan: Plan
    step_time_s: float
    samples_per_s: float
    bound_samples_per_s: float
    differs_by: str
    """What distinguishes it, e.g. `p=2`, `no tp8 layers`, `vtp=4`."""
    probability_faster: float | None = None
    """Share of the replicas of computation in which it beats the plan; None without spread."""


@dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """Why nothing fits: the plan nearest to fitting and what it lacks."""

    stage: int
    num_stages: int
    missing_bytes: int
    smallest_budget_bytes: int
    """The smallest memory constraint per GPU, in bytes, for which a plan exists (0: none)."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchStats:
    """What the search did."""

    states: int
    """Labels created by the exact kernels."""
    candidates: int
    """(G, m, p, embedding) sub-problems considered."""
    opened: int
    """Sub-problems that had to be solved exactly."""
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Answer of one search; `plan` is None when it is `infeasible`, or none was found in time."""

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
    """Derived, extrapolated or estimated inputs, in plain words."""
    options: Mapping[str, object]
    sources: tuple[Source, ...]
    estimated: bool
    stats: SearchStats
    unfinished: tuple[str, ...] = ()
    """What the time limit kept from being searched, in words."""
    synthetic: bool = False
    """True when some input exercises the code and describes no machine."""


# --------------------------------------------------------------------------------------------------
# The spread of a plan's step time: measured computation drawn again, and priced for one plan.
#
# Source: cost-model.md "Spread of computation". The same replicas serve every plan of a cost model,
# so that two plans can be compared replica by replica.


def drawn_step_times(
    cost: CostModel,
    tables: PlanTables,
    *,
    num_microbatches: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
) -> F64:
    """Return T of a plan in every replica of the measured computation, (NUM_REPLICAS,) seconds.

    tables : one table that holds exactly the plan's strategies and its vocabulary strategy.
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
    vocab = cost.drawn_vocab_s(tables.vocab, table)
    times = np.empty(NUM_REPLICAS)
    for r in range(NUM_REPLICAS):
        # only computation is drawn: redistribution, transfers and memory are those of the medians
        replica = replace(
            tables, forward_s=forward[r][None], backward_s=backward[r][None], tail_s=tail[r][None]
        )
        # without spread the tables hold what every replica would
        if vocab is not None:
            replica = replace(
                replica,
                vocab_forward_s=vocab[0][r][None],
                vocab_backward_s=vocab[1][r][None],
                vocab_tail_s=vocab[2][r][None],
            )
        times[r] = evaluate(
            replica,
            table=0,
            num_microbatches=num_microbatches,
            stage_sizes=stage_sizes,
            strategy_index=strategy_index,
            vocab_index=0,
        ).step_time_s
    return times


def interval_s(
    step_time_s: float, communication: tuple[float, float] | None, drawn: F64 | None
) -> tuple[float, float] | None:
    """Return the fast and the slow step time, both spreads together; None without any.

    communication : T under fast and slow communication; drawn : T of the replicas, of which the
    5th and 95th percentile count. The deviations add up: both are fast, or both are slow.
    """
    if communication is None and drawn is None:
        return None
    fast, slow = communication or (step_time_s, step_time_s)
    if drawn is not None:
        low, high = (float(x) for x in np.quantile(drawn, (0.05, 0.95)))
        # replicas need not lie on both sides of the medians' T
        fast += min(low - step_time_s, 0.0)
        slow += max(high - step_time_s, 0.0)
    return min(fast, step_time_s), max(slow, step_time_s)


def widest_cell(cost: CostModel, drawn: F64) -> WidestCell | None:
    """Return the cell that explains most of the variance of a plan's replicas; None without any.

    Cells are drawn independently, so the square of a cell's correlation with T is its share.
    """
    # a T that never changes has no variance to explain, and no correlation
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
# The prediction of a plan.


def allocation_budget(memory_bytes: float, options: SearchOptions) -> int:
    """Return the largest allocation whose reservation fits in `memory_bytes`."""
    # two bytes more than rounding may have taken, then down to the largest that fits
    budget = int((memory_bytes - options.context_bytes) / (1.0 + options.reserve_fraction)) + 2
    while reserved_bytes(budget, options) > memory_bytes:
        budget -= 1
    return budget


@dataclass(frozen=True, kw_only=True, eq=False)
class _Priced:
    """A plan as indices into tables that hold exactly its own strategies."""

    tables: PlanTables
    layers: tuple[LayerRows, ...]
    vocab: VocabRows
    strategy_index: tuple[int, ...]
    evaluation: Evaluation


def predict(cost: CostModel, plan: Plan, memory_bytes: float) -> Prediction:
    """Return the prediction of any plan for the cost model's cluster, legal or not.

    `memory_bytes` is the memory constraint per GPU. An illegal plan is priced as far as its
    shape allows; its time is infinite where it does not.

    Raises
    ------
    InputError
        When the plan is for another number of GPUs or layers than the inputs.
    """
    world = cost.hardware.world_size
    if plan.world_size != world:
        raise InputError(
            f"the plan is for world_size {plan.world_size}, the hardware has {world} GPUs; "
            "give matching --num-nodes and --num-gpus-per-node"
        )
    if len(plan.layers) != cost.spec.num_layers:
        raise InputError(
            f"the plan has {len(plan.layers)} layers, {cost.spec.name} has "
            f"{cost.spec.num_layers}; give the model of the plan or --num-layers"
        )
    sp = cost.options.sequence_parallel
    problems = list(violations(plan, cost.spec, sequence_parallel=sp))
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
    # before memory adds its problems: a plan that does not fit is legal
    legal = not problems
    stages = tuple(_stages(cost, plan, priced, memory_bytes))
    for stage in stages:
        if stage.reserved_bytes > stage.budget_bytes:
            over = stage.reserved_bytes - stage.budget_bytes
            problems.append(
                f"stage {stage.stage} reserves {format_bytes(stage.reserved_bytes)} of "
                f"{format_bytes(stage.budget_bytes)}, {format_bytes(over)} too much"
            )
    seen = priced.evaluation
    drawn = _drawn(cost, plan, priced)
    communication = _communication_s(cost, plan, seen.step_time_s)
    known = {"communication": communication, "computation": drawn}
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
        step_time_interval_s=interval_s(seen.step_time_s, communication, drawn),
        interval_of=tuple(name for name, found in known.items() if found is not None),
        widest_cell=None if drawn is None else widest_cell(cost, drawn),
    )


def _communication_s(cost: CostModel, plan: Plan, step_time_s: float) -> tuple[float, float] | None:
    """Price the plan again with all communication at both ends of its measured spread."""
    if not cost.hardware.has_spread:
        return None
    fast, slow = (_price(cost.at_spread(speed), plan, []) for speed in ("fast", "slow"))
    assert fast is not None, "spread changes times only"
    assert slow is not None, "spread changes times only"
    # the curves enclose one another; this is for the last bit of their sums
    return (
        min(fast.evaluation.step_time_s, step_time_s),
        max(slow.evaluation.step_time_s, step_time_s),
    )


def _drawn(cost: CostModel, plan: Plan, priced: _Priced) -> F64 | None:
    """Return T in every replica of computation, None where it has no spread."""
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
    """Return for each plan the share of replicas in which its throughput exceeds the best's.

    The replicas of computation are the same for all; None where computation has no spread.
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


def _without_idle_zero3(plan: Plan) -> Plan:
    """Return the plan with ZeRO-3 taken from groups of one rank, where it shards nothing."""
    ranks = plan.world_size // plan.num_stages

    def idle(tp: int, ulysses: bool) -> bool:
        # tensor ranks share no ZeRO states, ranks of Ulysses do
        return ranks == (1 if ulysses else tp)

    layers = tuple(replace(s, zero3=s.zero3 and not idle(s.tp, s.ulysses)) for s in plan.layers)
    vocab = replace(
        plan.vocab, zero3=plan.vocab.zero3 and not idle(plan.vocab.tp, plan.vocab.ulysses)
    )
    return replace(plan, layers=layers, vocab=vocab)


def _price(cost: CostModel, plan: Plan, problems: list[str]) -> _Priced | None:
    """Return the priced plan, or None (and why) when its shape has no price."""
    p, m = plan.num_stages, plan.num_microbatches
    if p < 1 or plan.world_size % p or len(plan.stage_sizes) != p or min(plan.stage_sizes) < 1:
        return None
    if sum(plan.stage_sizes) != len(plan.layers):
        return None
    # where m does not divide the batch, its largest micro-batch is priced
    samples = -(-plan.global_batch // m)
    # rows have no ZeRO-3 of one rank, which is what the plan without it is
    plan = _without_idle_zero3(plan)
    strategies = tuple(sorted(set(plan.layers)))
    table = (p, samples, plan.default_dp_type)
    tables = cost.tables(
        strategies, [plan.vocab], [table], [(0, m)], plan.pipeline_type, price_illegal=True
    )
    layers = tuple(
        cost.layer_rows(k, strategies, [table], price_illegal=True)
        for k in range(len(cost.spec.layers))
    )
    vocab = cost.vocab_rows([plan.vocab], [table], price_illegal=True)
    index = tuple(strategies.index(s) for s in plan.layers)
    kinds = cost.spec.layer_types
    for k, s in sorted(set(zip(kinds, index, strict=True))):
        if not layers[k].valid[0, s]:
            label = strategies[s].label(0, "ddp")
            text = f"layer type {k} cannot use {label} here: no measured or legal row"
            # a broken rule, found before, says it better
            if not problems:
                problems.append(text)
    if not vocab.priced[0, 0]:
        # Its rows hold zeros: without this reason a plan would look faster for being impossible.
        problems.append(
            f"the plan has no price: embedding and head have no measured or derivable row at "
            f"degree {plan.vocab.tp} on {plan.world_size // p} ranks"
        )
        return None
    if not tables.vocab_valid[0, 0] and not problems:
        problems.append(f"embedding and head cannot use degree {plan.vocab.tp} here")
    seen = evaluate(
        tables,
        table=0,
        num_microbatches=m,
        stage_sizes=plan.stage_sizes,
        strategy_index=index,
        vocab_index=0,
    )
    # rows without a price hold infinite seconds
    if not np.isfinite(seen.step_time_s):
        if not problems:
            problems.append("the plan has no price: some layer has no measured or derivable row")
        return None
    return _Priced(tables=tables, layers=layers, vocab=vocab, strategy_index=index, evaluation=seen)


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
                # two are once a step, and redistribution is the stage's, in front of the head too
                if name not in ("tail", "optimizer", "redistribution"):
                    time_s[name] = time_s.get(name, 0.0) + value
        # embedding and head are in no run of layers
        position = vocab_position(j, plan.num_stages)
        if position is not None:
            time_s["vocab"] = float(
                priced.tables.vocab_forward_s[0, position, 0]
                + priced.tables.vocab_backward_s[0, position, 0]
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
                reserved_bytes=reserved_bytes(seen.allocated_bytes[j], cost.options),
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
    kinds, index, tables = cost.spec.layer_types, priced.strategy_index, priced.tables
    now = 0 if plan.num_microbatches == 1 else 1
    flight = priced.evaluation.in_flight[stage]
    runs = []
    for (k, s), group in groupby(layers, key=lambda at: (kinds[at], index[at])):
        members = list(group)
        rows = priced.layers[k]
        time_s = {name: value * len(members) for name, value in rows.time_s(0, s).items()}
        here = int(tables.strategy_layout[s])
        before = members[0] - 1
        source = (
            int(tables.vocab_layout[0])
            if before < 0
            else int(tables.strategy_layout[index[before]])
        )
        producer = kinds[max(before, 0)]
        # within a run the layout stays, so only its first layer pays
        time_s["redistribution"] = float(
            tables.redistribute_forward_s[0, producer, source, here]
            + tables.redistribute_backward_s[0, producer, source, here]
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
                    "states": float(rows.states[now, 0, s]) * len(members),
                    "activations": float(rows.activations[0, s]) * len(members) * flight,
                    "backward": float(rows.backward_peak[0, s]),
                    # shown apart, and a part of the transient bytes
                    "transient": float(rows.transient[now, 0, s] - rows.backward_peak[0, s]),
                    "shared": float(rows.shared[0, s]),
                },
            )
        )
    return runs


def _waterfall(
    plan: Plan, stages: Sequence[StagePrediction], seen: Evaluation, priced: _Priced
) -> Mapping[str, float]:
    """Split T: m passes of the slowest stage by category, then bubble, transfers and the tail."""
    m = plan.num_microbatches
    slowest = max(stages, key=lambda s: s.forward_s + s.backward_s)
    parts = {name: m * value for name, value in slowest.time_s.items()}
    # T has every stage once and the slowest m - 1 times more: what is not its m passes is bubble
    passes = m * (slowest.forward_s + slowest.backward_s)
    compute = seen.parts_s["first_microbatch"] + seen.parts_s["steady"]
    parts["bubble"] = compute - passes
    parts["transfer"] = seen.parts_s["transfer"]
    # T ends with the longest tail, so the parts are those of its stage
    last = max(stages, key=lambda s: s.tail_s)
    optimizer = sum(run.time_s.get("optimizer", 0.0) for run in last.runs)
    position = vocab_position(last.stage, plan.num_stages)
    if position is not None and "optimizer" in priced.vocab.step:
        optimizer += float(priced.vocab.step["optimizer"][0, position, 0])
    fixed = 0.0
    if position is not None and "fixed" in priced.vocab.step:
        fixed = float(priced.vocab.step["fixed"][0, position, 0])
    parts["optimizer"] = optimizer
    parts["fixed"] = fixed
    # the rest of the tail: reduction, ZeRO-2's gather, tied weights
    parts["gradient_sync"] = seen.parts_s["tail"] - optimizer - fixed
    # differences of sums leave a rest of rounding
    return {name: value for name, value in parts.items() if abs(value) > 1e-12}
