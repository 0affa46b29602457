"""Faster variants of a given run: the same model, batch and GPUs with a few arguments changed.

A knob tries other values of one argument and adapts the arguments that depend on it: sequence
parallelism depends on tensor parallelism, and model chunks on the stages. Legal runs that fit are
compared by step time, which `autopar.price.assessment` estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial

from autopar.errors import InputError
from autopar.pipeline.schedules import schedule_of_chunks
from autopar.price.assessment import Assessment, Target, Timing, assess, timing_of
from autopar.price.step import StepTime
from autopar.records import Record, replace
from autopar.run.run import Run, legal, run_with_micro_batch, run_with_split
from autopar.run.strategy import Recomputation, recomputing, with_split, with_stages
from search.engines.changes import (
    MOVES,
    Changes,
    Move,
    changes_of,
    ends_of,
    with_balanced_chunks,
)
from search.engines.space import beyond_search
from search.engines.table import ENGINES, NOISE

_BEAM = 4
"""Beam width: the search continues from this number of runs at each number of changes."""
_MOST_CHANGES = 6
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class ChangedRun(Record):
    """A run with changed arguments and its assessment."""

    assessment: Assessment
    changes: Changes
    knobs: int
    """Number of changes; an argument together with its dependent arguments counts as one."""


class BestChanges(Record):
    """Fastest runs with one, two and any number of changes; None if no run is faster."""

    one: ChangedRun | None
    two: ChangedRun | None
    any: ChangedRun | None
    tried: int
    """Number of legal runs whose step time was estimated."""


# --------------------------------------------------------------------------------------------------
# Knobs.


_Offer = Callable[[], Run]
"""Function that builds a run, which may be illegal; raises InputError if layers do not divide."""
_Written = Callable[[Run], Changes | None]


def _with_degrees(run: Run, *, pp: int | None = None, vpp: int | None = None, **of: int) -> Run:
    """Return a run with other degrees; new stages have an even layer partition.

    of : degrees of the layers by name, such as `tp`.
    """
    strategy = run.strategy
    stages, pieces = pp or strategy.pp, vpp or strategy.vpp
    tensor = of.get("tp", run.split.tp)
    # Sequence parallelism costs no time, and mixtures of experts require it.
    own = with_split(strategy, **of, sequence_parallel=tensor > 1)
    if (stages, pieces) != (strategy.pp, strategy.vpp):
        # The schedule depends on the number of model chunks per stage.
        schedule = strategy.schedule if pieces == strategy.vpp else schedule_of_chunks(pieces)
        own = with_stages(own, with_balanced_chunks(run, stages, pieces), schedule)
        own = replace(own, group=strategy.group if stages == strategy.pp else 0)
    overlap = replace(run.runtime.overlap, tensor=run.runtime.overlap.tensor and tensor > 1)
    return replace(run, strategy=own, runtime=replace(run.runtime, overlap=overlap))


def _tensor(run: Run) -> Iterator[_Offer]:
    groups = run.model.attention.kv_heads
    for tp in _SIZES[:4]:
        if tp != run.split.tp and groups % tp == 0:
            yield partial(_with_degrees, run, tp=tp)


def _context(run: Run) -> Iterator[_Offer]:
    for cp in _SIZES[:6]:
        # Ring attention balances the causal mask with two sequence pieces per rank.
        if cp != run.split.cp and run.seq_length % (2 * cp * run.split.tp) == 0:
            yield partial(_with_degrees, run, cp=cp)


def _stages(run: Run) -> Iterator[_Offer]:
    for pp in _SIZES[:6]:
        if pp != run.strategy.pp:
            yield partial(_with_degrees, run, pp=pp, vpp=1)


def _chunks(run: Run) -> Iterator[_Offer]:
    pp, layers = run.strategy.pp, run.model.num_layers + sum(ends_of(run))
    for vpp in range(1, layers // pp + 1) if pp > 1 else ():
        # An interleaved schedule runs micro-batches in groups of the number of stages.
        runs = vpp == 1 or run.strategy.micro_batches % pp == 0
        if vpp != run.strategy.vpp and layers % (pp * vpp) == 0 and runs:
            yield partial(_with_degrees, run, vpp=vpp)


def _experts(run: Run) -> Iterator[_Offer]:
    experts = run.model.experts
    if experts is not None:
        for ep in _SIZES:
            if ep != run.split.ep and ep <= experts.number:
                yield partial(_with_degrees, run, ep=ep)
        for etp in _SIZES[:4]:
            if etp != run.split.etp and experts.width % etp == 0:
                yield partial(_with_degrees, run, etp=etp)


def _micro_batch(run: Run) -> Iterator[_Offer]:
    for size in _SIZES[:4]:
        if size != run.strategy.micro_batch:
            yield partial(run_with_micro_batch, run, size, synced=run.syncs_each_batch)


def _recompute(run: Run) -> Iterator[_Offer]:
    ways: tuple[Recomputation, ...] = (frozenset(), frozenset({"core_attn"}), "full")
    if run.kernels.torch_layers:
        # Only torchtitan has selective recomputation by a list of operations.
        torchtitan = run.kernels.module == "torchtitan"
        ways = (frozenset(), "op", "full") if torchtitan else (frozenset(), "full")
    for way in ways:
        strategy = recomputing(run.strategy, way)
        if strategy != run.strategy:
            yield partial(replace, run, strategy=strategy)


def _optimizer(run: Run) -> Iterator[_Offer]:
    zero, strategy, overlap = run.split.zero, run.strategy, run.runtime.overlap
    if run.kernels.torch_layers:
        for stage in (1, 2, 3) if run.runtime.states.keeper == "deepspeed" else ():
            if stage != zero:
                yield partial(run_with_split, run, zero=stage)
        if run.runtime.states.keeper == "accelerate" and zero and strategy.micro_batches > 1:
            size = strategy.micro_batch
            yield partial(run_with_micro_batch, run, size, synced=not run.syncs_each_batch)
        return
    if zero == 0 and strategy.dp * run.split.cp > 1:
        yield partial(run_with_split, run, zero=1)
    if not overlap.gradients:
        own = replace(overlap, gradients=True)
        yield partial(replace, run, runtime=replace(run.runtime, overlap=own))


def _overlap(run: Run) -> Iterator[_Offer]:
    overlap = run.runtime.overlap
    # Overlap of tensor-parallel communication with GEMMs needs Transformer Engine layers.
    runs = run.split.splits_sequence and not run.kernels.own_layers
    if runs and not overlap.tensor:
        own = replace(overlap, tensor=True)
        yield partial(replace, run, runtime=replace(run.runtime, overlap=own))


_KNOBS: Mapping[Move, Callable[[Run], Iterator[_Offer]]] = {
    "tensor": _tensor,
    "context": _context,
    "stages": _stages,
    "chunks": _chunks,
    "experts": _experts,
    "micro_batch": _micro_batch,
    "recompute": _recompute,
    "optimizer": _optimizer,
    "overlap": _overlap,
}


def _single_changes(
    run: Run, moves: Set[Move], beyond: Callable[[Run], frozenset[str]]
) -> Iterator[Run]:
    """Yield the legal runs that differ from a run by one knob.

    Runs that no search returns are excluded, unless the given run is one of their kind.

    beyond : function that returns the ids of the rules of searches that a run breaks
    """
    known = beyond(run)
    for move, knob in _KNOBS.items():
        for offer in knob(run) if move in moves else ():
            with suppress(InputError):
                other = legal(offer())
                if beyond(other) <= known:
                    yield other


def _beyond(run: Run, target: Target) -> Callable[[Run], frozenset[str]]:
    """Return the function of `_single_changes` for the engine of a run."""
    own = (one for one in ENGINES if one.name == run.runtime.engine and one.spaces is not None)
    engine = next(own, None)
    space = None if engine is None or engine.spaces is None else engine.spaces()[0]
    return partial(beyond_search, space, domain=target.machine.domain_gpus)


# --------------------------------------------------------------------------------------------------
# The search.


def neighbours_of(
    assessment: Assessment,
    target: Target,
    written: Callable[[Run], Changes | None] | None = None,
    moves: Set[Move] = MOVES,
) -> BestChanges:
    """Return the fastest runs that fit with one, two and any number of changes.

    written : function that returns the changes of the file for a run, None if the file cannot
        describe the run. The default returns changes of Megatron-LM arguments.
    moves : arguments that may be changed

    This is a beam search: all single changes are tried from the best runs of each number of
    changes. It ends after two or more changes when the last one saves less than half a percent, so
    a faster run may exist. If the given run does not fit, every run that fits counts as faster.
    """
    start = assessment.run
    written = written or partial(changes_of, None, start)
    beyond = _beyond(start, target)
    seen, front = {_key(start)}, [assessment]
    fastest = _time(assessment) if _fits(assessment, target) else float("inf")
    best: dict[int, ChangedRun] = {}
    for knobs in range(1, _MOST_CHANGES + 1):
        found = list[tuple[Run, Timing]]()
        for run in [run for entry in front for run in _single_changes(entry.run, moves, beyond)]:
            if _key(run) not in seen:
                seen.add(_key(run))
                found.append((run, timing_of(run, target)))
        wanted_s = fastest * (1.0 - NOISE)
        front, top, changes = _best(found, target, written, wanted_s)
        if top is not None:
            fastest = _time(top)
            best[knobs] = ChangedRun(assessment=top, changes=changes, knobs=knobs)
        elif knobs > 1 and fastest < float("inf"):
            break
    return BestChanges(
        one=best.get(1),
        two=best.get(2),
        any=best[max(best)] if best else None,
        tried=len(seen) - 1,
    )


def _best(
    found: list[tuple[Run, Timing]], target: Target, written: _Written, wanted_s: float
) -> tuple[list[Assessment], Assessment | None, Changes]:
    """Return the next beam, and the fastest acceptable run with its changes.

    An acceptable run fits in memory on all stages, can be written to the file and takes less than
    `wanted_s` seconds; None if there is none. Memory is counted in the order of step times, until
    both results are known.
    """
    fits, others = list[Assessment](), list[Assessment]()
    top: Assessment | None = None
    changes: Changes = ()
    for run, timing in sorted(found, key=lambda one: _seconds(one[1].step)):
        wanted = top is None and _seconds(timing.step) < wanted_s
        if not wanted and len(fits) >= _BEAM:
            break
        one = _quick(run, target, timing)
        if not _fits(one, target):
            others.append(one)
            continue
        fits.append(one)
        how = written(run) if wanted else None
        if how is not None:
            whole = assess(run, target, timing=timing)
            if _fits(whole, target):
                top, changes = whole, how
    # Runs that do not fit follow by peak memory: the smallest are closest to fitting.
    others.sort(key=lambda one: (one.fullest.peak_bytes, _time(one)))
    return [*fits, *others][:_BEAM], top, changes


def _key(run: Run) -> tuple[object, ...]:
    strategy, overlap = run.strategy, run.runtime.overlap
    return (
        strategy.layers,
        strategy.stages,
        strategy.micro_batch,
        run.syncs_each_batch,
        overlap.tensor,
        overlap.gradients,
    )


def _quick(run: Run, target: Target, timing: Timing) -> Assessment:
    """Return the assessment of a run on three stages, which nearly always include the peak stage.

    They are the first stage, the last stage and the earliest of the stages with the most layers.
    """
    sizes = [sum(len(chunk.layers) for chunk in stage) for stage in run.strategy.stages]
    stages = (0, sizes.index(max(sizes)), run.strategy.pp - 1)
    return assess(run, target, stages, timing)


def _fits(one: Assessment, target: Target) -> bool:
    return one.fits(target) and one.step is not None


def _time(one: Assessment) -> float:
    return _seconds(one.step)


def _seconds(step: StepTime | None) -> float:
    return float("inf") if step is None else step.total_s
