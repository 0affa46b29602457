"""Legal parallel degrees of an engine for a job, with lower bounds of step time and memory.

A combination consists of tensor, context and expert degrees, micro-batch size, global batch,
precision and dispatcher settings. Pipeline stages, layer partition and recomputation are chosen in
`search.planning.uniform.best_first`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.records import replace
from autopar.run.architecture import Experts, Model
from autopar.run.job import Block, Job as StepJob, mtp_blocks, parameters
from autopar.run.rules import (
    ANY,
    EXPERT_WIDTH,
    HEADS,
    MIXERS,
    RING,
    WHOLE_EXPERTS,
    Rule,
    holds_all as keeps,
)
from autopar.run.strategy import ContextKind
from autopar.training.adapters import base_bytes
from autopar.units import divisors
from search.engines.candidate import Candidate, Constraints, Precision, allowed_values
from search.engines.space import job_values, runs, values_of
from search.planning.uniform.bounds.degrees import AttentionDegrees, ExpertDegrees, ModelTimeBounds
from search.planning.uniform.bounds.states import frozen_states_of_run, states_of_run
from search.planning.uniform.cost_model import UniformCostModel

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Micro-batch sizes searched by default, sequences."""
CONTEXT_KINDS: tuple[ContextKind, ...] = ("ring", "a2a")


def context_kinds(model: Model) -> tuple[ContextKind, ...]:
    """Return the types of context parallelism that are tried unless the user names others."""
    return CONTEXT_KINDS if model.first_sparse is None else ("all-gather",)


"""Context-parallel communication types searched by default.

All-gather of keys is seldom faster than ring and all-to-all, and would add 50 % more degrees."""


_LAID = ("tp", "cp", "cp_kind")
"""Fields of `AttentionDegrees` that rules of engines depend on."""


class DegreeArrays(NamedTuple):
    """Combinations of degrees with their lower bounds, as arrays of equal length."""

    seconds: F64
    """Lower bounds of step seconds per sequence."""
    bytes: F64
    """Lower bounds of the peak stage's bytes per rank."""
    way: I64
    """Indices into `UniformSearchSpace.expert_degrees`."""
    laid: I64
    """Indices into `UniformSearchSpace.attention_degrees`."""
    batch: I64
    """Global batch sizes, sequences."""


class UniformSearchSpace:
    """Legal degrees of one engine for one job, selected by constraints."""

    def __init__(self, prices: UniformCostModel, worlds: Sequence[int] = ()) -> None:
        """Store the cost model of a job.

        worlds : numbers of GPUs for `least_gpu_s`, in place of that of the job.
        """
        self.prices = prices
        self.worlds = tuple(worlds) or (prices.job.world,)
        self.micro_batches: tuple[int, ...] = MICRO_BATCHES
        self.context_kinds: tuple[ContextKind, ...] = context_kinds(prices.job.model)
        """Values of both fields: defaults, and all values that constraints requested so far."""
        self._exchanges: dict[tuple[int, int], tuple[ContextKind, ...]] = {}
        self._legal: dict[object, Bool] = {}
        self._seconds: dict[object, F64] = {}
        self._degrees: dict[Constraints, DegreeArrays] = {}
        self._stages: dict[object, tuple[int, ...]] = {}
        self.numbers: dict[Constraints, int] = {}
        """Cache of `number_of_candidates` by constraints."""

    # ----------------------------------------------------------------------------------------------
    # Values of each degree

    @cached_property
    def attention_degrees(self) -> tuple[AttentionDegrees, ...]:
        """Attention shardings, with micro-batch size and context-parallel communication type."""
        engine, job = self.prices.engine, self.prices.job
        tensor = self._degrees_that_keep("tp", HEADS, *MIXERS)
        context = self._degrees_that_keep("cp", RING) if engine.context else [1]
        largest = max(job.global_batches)
        return tuple(
            AttentionDegrees(tp, cp, size, kind)
            for tp, cp, size in product(tensor, context, self.micro_batches)
            if any(world % (tp * cp) == 0 for world in self.worlds) and size <= largest
            for kind in self._kinds(tp, cp)
        )

    def _degrees_that_keep(self, name: str, *rules: Rule) -> list[int]:
        """Return the divisors of the world sizes that satisfy rules on the degree `name`."""
        values = job_values(self.prices.job)
        degrees = sorted({one for world in self.worlds for one in divisors(world)})
        return [one for one in degrees if keeps(rules, {**values, name: one})]

    def _kinds(self, tp: int, cp: int) -> tuple[ContextKind, ...]:
        """Return the context-parallel communication types allowed with these degrees."""
        engine, job = self.prices.engine, self.prices.job
        if cp == 1:
            return ("ring",)
        key = (tp, cp)
        if key not in self._exchanges:
            alone = len(engine.context) == 1
            self._exchanges[key] = tuple(
                kind
                for kind in engine.context
                if kind in self.context_kinds
                # all-to-all needs heads that divide over cp; rings do not support every attention
                and (
                    (
                        kind == "ring"
                        and job.model.first_sparse is None
                        and (job.model.attention.window is None or alone)
                    )
                    or runs(engine, job, Candidate(tp=tp, cp=cp, cp_kind=kind))
                )
            )
        return self._exchanges[key]

    @cached_property
    def expert_degrees(self) -> tuple[ExpertDegrees, ...]:
        """Expert shardings, with precision and dispatch settings."""
        engine, job = self.prices.engine, self.prices.job
        experts = job.model.experts
        expert, splits = [1], [1]
        if experts is not None:
            if engine.experts:
                expert = self._degrees_that_keep("ep", WHOLE_EXPERTS)
            if engine.expert_tensor is None:
                splits = self._degrees_that_keep("etp", EXPERT_WIDTH)
            else:
                splits = sorted(
                    {n for one in self.attention_degrees for n in engine.expert_tensor(one.tp)}
                )
        found = []
        for precision, ep, etp in product(engine.precisions(job.gpu), expert, splits):
            dispatchers = engine.dispatchers(job.gpu)[: None if ep > 1 else 1]
            overlaps = (False, True) if ep > 1 and engine.overlaps_experts else (False,)
            found += [
                ExpertDegrees(ep, etp, precision, dispatcher, overlap)
                for dispatcher, overlap in product(dispatchers, overlaps)
            ]
        return tuple(found)

    def _admit(self, sizes: Iterable[int], kinds: Iterable[ContextKind]) -> None:
        """Add micro-batch sizes and communication types to the searched values."""
        if {*sizes} <= {*self.micro_batches} and {*kinds} <= {*self.context_kinds}:
            return
        self.micro_batches = tuple(sorted({*self.micro_batches, *sizes}))
        self.context_kinds = tuple(dict.fromkeys((*self.context_kinds, *kinds)))
        self._exchanges.clear()
        self._legal.clear()
        for name in (
            *("attention_degrees", "expert_degrees"),
            *("times", "_columns", "_inner", "_by_ranks"),
        ):
            self.__dict__.pop(name, None)
        self._seconds.clear()
        self._degrees.clear()

    def choice(self, way: ExpertDegrees, laid: AttentionDegrees, batch: int) -> Candidate:
        """Return a candidate with these degrees and the global batch `batch`, on one stage."""
        return Candidate(
            tp=laid.tp,
            cp=laid.cp,
            cp_kind=laid.cp_kind,
            ep=way.ep,
            etp=way.etp,
            micro_batch=laid.micro_batch,
            precision=way.precision,
            compiled=self.prices.engine.compiled,
            dispatcher=way.dispatcher,
            overlap_experts=way.overlap,
            global_batch=batch,
        )

    def _going(self, way: ExpertDegrees, laid: Sequence[AttentionDegrees]) -> Bool:
        """Return a mask of the attention shardings that are legal with an expert sharding.

        Rules on pipeline stages, such as those of overlapped expert communication, are checked
        when stages are chosen.
        """
        key = (way.ep, way.etp, self._deciding(way))
        if key not in self._legal:
            engine, job = self.prices.engine, self.prices.job
            plain = values_of(
                engine, job, Candidate(ep=way.ep, etp=way.etp, precision=way.precision)
            )
            arrays = {name: np.array([getattr(one, name) for one in laid]) for name in _LAID}
            rules = (*ANY, *engine.rules)
            found = np.full(len(laid), fill_value=True) & keeps(rules, {**plain, **arrays})
            beside = engine.expert_tensor
            if job.model.experts is not None and beside is not None:
                found &= np.array([way.etp in beside(one.tp) for one in laid], dtype=bool)
            self._legal[key] = found
        return self._legal[key]

    def _deciding(self, way: ExpertDegrees) -> Precision | None:
        """Return the precision if legality depends on it, as in a model with mixers."""
        return None if self.prices.job.model.is_conventional else way.precision

    # ----------------------------------------------------------------------------------------------
    # Degrees with their bounds

    def degrees(self, fixed: Constraints) -> DegreeArrays:
        """Return the legal degrees that the constraints allow, with their lower bounds."""
        ways, laid = self._allowed(fixed)
        # bounds and stages depend only on these constraints; the others select degrees
        broad = Constraints(
            pp=fixed.pp,
            dp=fixed.dp,
            zero=fixed.zero,
            precision=fixed.precision,
            offload=fixed.offload,
        )
        # bounds with more precisions and offload sets hold, too
        wider = (degrees for known, degrees in self._degrees.items() if known.includes(broad))
        found = next(wider, None)
        if found is None:
            found = self._degrees[broad] = self._every(broad)
        left = ways[found.way] & laid[found.laid]
        return DegreeArrays._make(column[left] for column in found)

    def least_gpu_s(self, fixed: Constraints) -> float:
        """Return a lower bound of GPU-seconds per sequence, on any of `worlds` GPUs.

        It is that of `degrees` over all combinations, legal or not, without stragglers; infinite
        if the constraints allow none.
        """
        ways, laid = self._allowed(fixed)
        at = np.flatnonzero(laid)
        if not len(at):
            return math.inf
        return min(
            (
                float((self.times.seconds(way, at) * self._inner[at]).min())
                for way, left in zip(self.expert_degrees, ways, strict=True)
                if left
            ),
            default=math.inf,
        )

    def _allowed(self, fixed: Constraints) -> tuple[Bool, Bool]:
        """Return masks of the expert and of the attention shardings that constraints allow."""
        self._admit(fixed.micro_batch or (), fixed.cp_kind or ())
        sizes = MICRO_BATCHES if fixed.micro_batch is None else fixed.micro_batch
        kinds = fixed.cp_kind or context_kinds(self.prices.job.model)
        ways = np.array([self._left(way, fixed) for way in self.expert_degrees], dtype=bool)
        laid = np.array(
            [
                bool(
                    one.micro_batch in sizes
                    and allowed_values((one.tp,), fixed.tp)
                    and allowed_values((one.cp,), fixed.cp)
                    # without context ranks there is no communication
                    and (one.cp == 1 or one.cp_kind in kinds)
                )
                for one in self.attention_degrees
            ],
            dtype=bool,
        )
        return ways, laid

    def _every(self, fixed: Constraints) -> DegreeArrays:
        """Return the legal degrees with all tensor and context degrees and micro-batch sizes."""
        found: list[tuple[F64, F64, I64, I64, I64]] = []
        # legality depends on precision in models with mixers alone, and never on the dispatcher
        groups: dict[object, list[tuple[int, tuple[int, ...], I64]]] = {}
        sizes: dict[object, F64] = {}
        for number, way in enumerate(self.expert_degrees):
            if not self._left(way, fixed):
                continue
            key = (way.ep, way.etp, way.overlap, self._deciding(way))
            if key not in groups:
                groups[key] = [*self._grouped(way, fixed)]
            for batch, stages, some in groups[key]:
                of_size = (way.ep, way.etp, way.precision, stages, some.tobytes())
                if of_size not in sizes:
                    sizes[of_size] = self._bound_bytes(way, some, stages, fixed)
                many = np.full(len(some), number), some, np.full(len(some), batch)
                found.append((self._bound_s(number, some), sizes[of_size], *many))
        if not found:
            none = np.zeros(0)
            return DegreeArrays(none, none, *(none.astype(np.int64) for _ in range(3)))
        return DegreeArrays(*map(np.concatenate, zip(*found, strict=True)))

    def _grouped(
        self, way: ExpertDegrees, fixed: Constraints
    ) -> Iterator[tuple[int, tuple[int, ...], I64]]:
        """Yield (global batch, allowed numbers of stages, indices of attention shardings)."""
        (attention, laid_as), (inner, shared_by) = self._by_ranks
        goes = self._going(way, attention)[laid_as]
        for batch in self.prices.job.global_batches:
            at: dict[tuple[int, ...], list[int]] = {}
            for place, one in enumerate(inner):
                key = (one.tp * one.cp, way.ep * way.etp, one.micro_batch, batch, fixed)
                if key not in self._stages:
                    choice = self.choice(way, one, batch)
                    self._stages[key] = self.prices.stages(choice, fixed)
                if self._stages[key]:
                    at.setdefault(self._stages[key], []).append(place)
            for stages, places in at.items():
                found = np.flatnonzero(goes & np.isin(shared_by, places))
                if len(found):
                    yield batch, stages, found

    @cached_property
    def _by_ranks(self) -> tuple[tuple[list[AttentionDegrees], I64], ...]:
        """Results of `_unlike` by degrees and kind, and by ranks and micro-batch size."""
        return (
            self._unlike(lambda one: (one.tp, one.cp, one.cp_kind)),
            self._unlike(lambda one: (one.tp * one.cp, one.micro_batch)),
        )

    def _unlike(
        self, of: Callable[[AttentionDegrees], object]
    ) -> tuple[list[AttentionDegrees], I64]:
        """Return one attention sharding per distinct key, and each sharding's index of its key.

        of : returns the key of a sharding.
        """
        first: dict[object, int] = {}
        like = [first.setdefault(of(one), len(first)) for one in self.attention_degrees]
        places = {number: place for place, number in reversed([*enumerate(like)])}
        return [self.attention_degrees[places[number]] for number in range(len(first))], np.array(
            like
        )

    def _left(self, way: ExpertDegrees, fixed: Constraints) -> bool:
        """Return True if the constraints allow an expert sharding."""
        overlap = way.overlap if fixed.overlap_experts is None else fixed.overlap_experts
        several = way.ep > 1
        return bool(
            allowed_values((way.ep,), fixed.ep)
            and allowed_values((way.etp,), fixed.etp)
            and allowed_values((way.precision,), fixed.precision)
            # without expert ranks there is nothing to dispatch
            and (not several or allowed_values((way.dispatcher,), fixed.dispatcher))
            and (not several or way.overlap == overlap)
        )

    @cached_property
    def blocks(self) -> dict[Block, int]:
        """Number of layers of each layer type in the model, without MTP modules."""
        found: dict[Block, int] = {}
        for block in self.prices.base(Candidate()).blocks:
            one = replace(block, number=1)
            found[one] = found.get(one, 0) + block.number
        return found

    @cached_property
    def _timed(self) -> dict[Block, int]:
        """Number of layers of each layer type, those of MTP included."""
        job, found = self.prices.base(Candidate()), {**self.blocks}
        for block in mtp_blocks(job) if job.mtp else ():
            one = replace(block, number=1)
            found[one] = found.get(one, 0) + job.mtp
        return found

    @cached_property
    def times(self) -> ModelTimeBounds:
        """Lower bounds of micro-batch times of all degrees."""
        return ModelTimeBounds(
            self.prices.target.machine,
            self.attention_degrees,
            self.expert_degrees,
            self._fastest_base,
            self.prices.by_word,
            self._timed,
        )

    def _fastest_base(self, choice: Candidate) -> StepJob:
        """Return a job of one data-parallel rank, with TP overlap if any degree allows it."""
        return self.prices.base(replace(choice, tp_overlap=self._beside))

    @cached_property
    def _beside(self) -> bool:
        """True if the engine supports TP overlap with any of the tensor degrees."""
        engine, job = self.prices.engine, self.prices.job
        return any(
            engine.overlaps_tensor(job, tp) for tp in {one.tp for one in self.attention_degrees}
        )

    @cached_property
    def _columns(self) -> tuple[F64, ...]:
        """Arrays of tensor degree, context degree, micro-batch size and sequence-parallel ranks."""
        rows = [
            (*one[:3], one.tp if self.prices.base(Candidate(tp=one.tp)).sequence_parallel else 1)
            for one in self.attention_degrees
        ]
        return tuple(np.array(rows, dtype=np.float64).T)

    @cached_property
    def _inner(self) -> F64:
        """Ranks of one model replica without stages and experts, divided by micro-batch size."""
        return np.array([one.tp * one.cp / one.micro_batch for one in self.attention_degrees])

    def _bound_s(self, way: int, at: I64) -> F64:
        """Return lower bounds of step seconds per sequence, as `UniformCostModel.least_s` does.

        way : index of the expert sharding.
        at : indices of attention shardings.
        """
        found = self._seconds.get(way)
        if found is None:
            every = np.arange(len(self.attention_degrees))
            whole = self.times.seconds(self.expert_degrees[way], every)
            # w ranks with tp t, cp c and micro-batch size m run t c / (m w) micro-batches of the
            # whole model per sequence of the global batch
            found = self.prices.stragglers * whole * self._inner / self.prices.job.world
            self._seconds[way] = found
        bound: F64 = found[at]
        return bound

    def _bound_bytes(
        self, way: ExpertDegrees, at: I64, stages: tuple[int, ...], fixed: Constraints
    ) -> F64:
        """Return lower bounds of the peak stage's bytes, by attention sharding.

        Each is the minimum over the pipeline sizes in `stages` and the allowed ZeRO stages, by the
        formula of `UniformCostModel.many_spread_bytes`, with model states and the layer inputs of
        live micro-batches. Inputs of MoE layers are not counted if their norms can be offloaded.

        way : expert degrees.
        at : indices of attention shardings.
        """
        job, engine = self.prices.job, self.prices.engine
        tp, cp, size, scattered = (column[at] for column in self._columns)
        element = self.prices.base(Candidate(precision=way.precision)).element_bytes
        saved = size * job.seq / cp / scattered * job.model.hidden * element
        least = np.full(len(at), np.inf)
        sets = allowed_values(engine.offload(job.model), fixed.offload)
        hosted = any("attn_norm" in one for one in sets)
        weights = [
            (count, *parameters(block), not (hosted and isinstance(block.mlp, Experts)))
            for block, count in self.blocks.items()
        ]
        layers = sum(count for count, _, _, _ in weights)
        for pp in stages:
            live = np.arange(pp, 0, -1, dtype=np.float64)
            for zero in allowed_values(
                engine.zero if pp == 1 else engine.zero_with_stages, fixed.zero
            ):
                if not self.prices.has(way.precision, zero):
                    continue
                whole, shared = self._states(way, zero, staged=pp > 1)
                data = job.world / (tp * pp)
                of_experts = job.world / (way.ep * way.etp * pp)
                kinds = [
                    (
                        count,
                        dense / tp * (whole + shared / data)
                        + experts / (way.ep * way.etp) * (whole + shared / of_experts),
                        saved * stays,
                    )
                    for count, experts, dense, stays in weights
                ]
                mean = np.sum([count * own for count, own, _ in kinds], axis=0) / layers
                share = 1.0 / (mean[:, None] + saved[:, None] * live)
                share /= share.sum(axis=1, keepdims=True)
                found = [
                    count * (share * (own[:, None] + left[:, None] * live)).min(axis=1)
                    for count, own, left in kinds
                ]
                np.minimum(least, np.sum(found, axis=0), out=least)
        return least * (1.0 - 1e-9)

    def _states(self, way: ExpertDegrees, zero: int, *, staged: bool) -> tuple[float, float]:
        """Return lower bounds of (replicated, sharded) state bytes per parameter.

        With adapters they are those of the frozen weights; the adapters are ignored.
        """
        key = ("states", way.precision, zero, staged)
        found = self._seconds.get(key)
        if found is None:
            choice = Candidate(tp=1, precision=way.precision, zero=zero)
            run = self.prices.engine.launch(
                replace(self.prices.job, world=1), self.prices.single_stage(choice)
            )
            adapters = run.runtime.adapters
            if adapters is None:
                found = np.array(states_of_run(run, staged=staged))
            else:
                # only matrices of layers are quantised
                least = min(float(run.element_bytes), base_bytes(adapters))
                found = least * np.array(frozen_states_of_run(run))
            self._seconds[key] = found
        return float(found[0]), float(found[1])
