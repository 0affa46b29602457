"""Launches next to a launch: the same model, batch and GPUs with a few arguments changed.

Each knob offers other values of one argument, with what has to follow it (sequence parallelism
tensor parallelism, chunks the stages). Those that run and fit are compared by step time; which
launch is first is `search.check.assessment`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from typing import cast

from autopar.errors import InputError
from autopar.price.step import StepTime
from autopar.records import Record, replace
from autopar.run.launch import Checkpointing, Launch, Recompute
from autopar.run.runtime import Zero
from search.check.assessment import Assessment, Target, Timing, assess, timing_of
from search.engines.changes import (
    MOVES,
    Changes,
    Move,
    arguments_of,
    changes_of,
    ends_of,
    laid_out,
)

_BEAM = 4
"""Launches of each number of changes from which the next are tried."""
_GAIN = 0.005
"""Share of a step by which a change has to be faster to be one."""
_MOST_CHANGES = 6
_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Neighbour(Record):
    """A launch with some arguments changed."""

    assessment: Assessment
    changes: Changes
    knobs: int
    """How many things were changed: an argument with what follows from it is one."""


class Neighbours(Record):
    """The best launches by how many changes they take; None where none is better."""

    one: Neighbour | None
    two: Neighbour | None
    any: Neighbour | None
    tried: int


# --------------------------------------------------------------------------------------------------
# Knobs.


_Offer = Callable[[], Launch]
"""Makes a launch; raises InputError for one that cannot be run."""
_Written = Callable[[Launch], Changes | None]


def _with_degrees(
    launch: Launch,
    *,
    tp: int | None = None,
    cp: int | None = None,
    pp: int | None = None,
    vpp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
) -> Launch:
    """Return a launch with other degrees; where stages change, layers are laid out evenly."""
    degrees = launch.degrees
    stages, pieces = pp or degrees.pp, vpp or degrees.vpp
    chunks = degrees.chunks
    if (stages, pieces) != (degrees.pp, degrees.vpp):
        chunks = laid_out(launch, stages, pieces)
    tensor = tp or degrees.tp
    return replace(
        launch,
        degrees=replace(
            degrees,
            tp=tensor,
            cp=cp or degrees.cp,
            pp=stages,
            ep=ep or degrees.ep,
            etp=degrees.etp if etp is None else etp,
            # scattered norms cost nothing, and experts ask for them
            sequence_parallel=tensor > 1,
            chunks=chunks,
            group=degrees.group if stages == degrees.pp else 0,
            # another number of chunks is another schedule
            schedule=degrees.schedule if pieces == degrees.vpp else None,
        ),
        tensor_overlap=launch.tensor_overlap and tensor > 1,
    )


def _tensor(launch: Launch) -> Iterator[_Offer]:
    groups = launch.model.attention.groups
    for tp in _SIZES[:4]:
        if tp != launch.degrees.tp and groups % tp == 0:
            yield partial(_with_degrees, launch, tp=tp)


def _context(launch: Launch) -> Iterator[_Offer]:
    for cp in _SIZES[:6]:
        # a ring balances a causal triangle with two pieces a rank
        if cp != launch.degrees.cp and launch.seq % (2 * cp * launch.degrees.tp) == 0:
            yield partial(_with_degrees, launch, cp=cp)


def _stages(launch: Launch) -> Iterator[_Offer]:
    for pp in _SIZES[:6]:
        if pp != launch.degrees.pp:
            yield partial(_with_degrees, launch, pp=pp, vpp=1)


def _chunks(launch: Launch) -> Iterator[_Offer]:
    pp, layers = launch.degrees.pp, launch.model.num_layers + sum(ends_of(launch))
    for vpp in range(1, layers // pp + 1) if pp > 1 else ():
        # an interleaved schedule runs groups of as many micro-batches as there are stages
        runs = vpp == 1 or launch.micro_batches % pp == 0
        if vpp != launch.degrees.vpp and layers % (pp * vpp) == 0 and runs:
            yield partial(_with_degrees, launch, vpp=vpp)


def _experts(launch: Launch) -> Iterator[_Offer]:
    if launch.model.experts is not None:
        for ep in _SIZES:
            if ep != launch.degrees.ep and ep <= launch.model.experts.number:
                yield partial(_with_degrees, launch, ep=ep)
        for etp in _SIZES[:4]:
            if etp != launch.degrees.etp and launch.model.experts.ffn % etp == 0:
                yield partial(_with_degrees, launch, etp=etp)


def _micro_batch(launch: Launch) -> Iterator[_Offer]:
    for size in _SIZES[:4]:
        if size != launch.micro_batch:
            yield partial(replace, launch, micro_batch=size)


def _recompute(launch: Launch) -> Iterator[_Offer]:
    if launch.trainer is not None:
        # eager layers of transformers have no list of operations
        ways = ("none", "op", "full") if launch.trainer.layers == "torchtitan" else ("none", "full")
        for way in ways:
            if way != launch.trainer.checkpoint:
                yield partial(_checkpointed, launch, cast(Checkpointing, way))
        return
    for kind in (
        Recompute(),
        Recompute(modules=frozenset({"core_attn"})),
        Recompute(layers="uniform", number=1),
    ):
        if kind != launch.recompute:
            yield partial(replace, launch, recompute=kind)


def _checkpointed(launch: Launch, way: Checkpointing) -> Launch:
    """Return a launch whose layers of torch compute something else again."""
    assert launch.trainer is not None, "Megatron-LM has words of its own for it"
    return replace(
        launch,
        trainer=replace(launch.trainer, checkpoint=way, every=1),
        recompute=Recompute(layers="uniform", number=1) if way == "full" else Recompute(),
    )


def _optimizer(launch: Launch) -> Iterator[_Offer]:
    optimizer, trainer = launch.optimizer, launch.trainer
    if trainer is not None:
        stages: tuple[Zero, ...] = (1, 2, 3)
        for zero in stages:
            if zero != trainer.zero and trainer.keeper == "deepspeed":
                yield partial(replace, launch, trainer=replace(trainer, zero=zero))
        return
    if optimizer.sharding == "none" and launch.degrees.dp * launch.degrees.cp > 1:
        yield partial(replace, launch, optimizer=replace(optimizer, sharding="distributed"))
    if not optimizer.overlap_gradients:
        yield partial(replace, launch, optimizer=replace(optimizer, overlap_gradients=True))


def _overlap(launch: Launch) -> Iterator[_Offer]:
    # Megatron-LM's own layers have no such products
    runs = launch.degrees.scattered and not launch.software.local_layers
    if runs and not launch.tensor_overlap:
        yield partial(replace, launch, tensor_overlap=True)


_KNOBS: Mapping[Move, Callable[[Launch], Iterator[_Offer]]] = {
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


def _offers(launch: Launch, moves: Set[Move]) -> Iterator[Launch]:
    """Yield the launches one knob away that are legal."""
    for move, knob in _KNOBS.items():
        for offer in knob(launch) if move in moves else ():
            with suppress(InputError):
                yield offer()


# --------------------------------------------------------------------------------------------------
# The walk.


def neighbours_of(
    assessment: Assessment,
    target: Target,
    written: Callable[[Launch], Changes | None] | None = None,
    moves: Set[Move] = MOVES,
) -> Neighbours:
    """Return the fastest launches that fit with one, two and any number of changes.

    written : returns what changes in the file of the launch so that it is another one, None where
    that would not run; default: the changes of its arguments, as if none had another spelling.
    moves : what may be changed.

    From the best few of each number of changes all further single changes are tried, until two
    changes and the last one have made nothing faster by half a percent: what is found is no bound
    of all launches. Of a launch that does not fit, every one that does counts as faster.
    """
    start = assessment.launch
    written = written or partial(changes_of, None, start)
    seen, front = {_key(start)}, [assessment]
    fastest = _time(assessment) if _fits(assessment, target) else float("inf")
    best: dict[int, Neighbour] = {}
    for knobs in range(1, _MOST_CHANGES + 1):
        found = list[tuple[Launch, Timing]]()
        for launch in [launch for entry in front for launch in _offers(entry.launch, moves)]:
            if _key(launch) not in seen:
                seen.add(_key(launch))
                found.append((launch, timing_of(launch, target)))
        wanted_s = fastest * (1.0 - _GAIN)
        front, top, changes = _best(found, target, written, wanted_s)
        if top is not None:
            fastest = _time(top)
            best[knobs] = Neighbour(assessment=top, changes=changes, knobs=knobs)
        elif knobs > 1 and fastest < float("inf"):
            break
    return Neighbours(
        one=best.get(1),
        two=best.get(2),
        any=best[max(best)] if best else None,
        tried=len(seen) - 1,
    )


def _best(
    found: list[tuple[Launch, Timing]], target: Target, written: _Written, wanted_s: float
) -> tuple[list[Assessment], Assessment | None, Changes]:
    """Return the launches that the walk goes on from, and the fastest that is wanted.

    The latter fits with all of its stages, can be written, and takes less than `wanted_s`; None
    where there is none. Memory is counted in the order of times, and as far as either asks for it.
    """
    fits, others = list[Assessment](), list[Assessment]()
    top: Assessment | None = None
    changes: Changes = ()
    for launch, timing in sorted(found, key=lambda one: _seconds(one[1].step)):
        wanted = top is None and _seconds(timing.step) < wanted_s
        if not wanted and len(fits) >= _BEAM:
            break
        one = _quick(launch, target, timing)
        if not _fits(one, target):
            others.append(one)
            continue
        fits.append(one)
        how = written(launch) if wanted else None
        if how is not None:
            whole = assess(launch, target, timing=timing)
            if _fits(whole, target):
                top, changes = whole, how
    # of those that do not fit the smallest are nearest to fitting
    others.sort(key=lambda one: (one.fullest.peak_bytes, _time(one)))
    return [*fits, *others][:_BEAM], top, changes


def _key(launch: Launch) -> str:
    degrees = launch.degrees
    return f"{arguments_of(launch)} {degrees.vpp} {degrees.ep} {launch.trainer}"


def _quick(launch: Launch, target: Target, timing: Timing) -> Assessment:
    """Return the price of a launch by the stages of which one is fullest, for nearly all launches.

    The first, the last, and of those with the most layers the earliest.
    """
    sizes = [sum(len(chunk[1]) for chunk in stage) for stage in launch.degrees.chunks]
    stages = (0, sizes.index(max(sizes)), launch.degrees.pp - 1)
    return assess(launch, target, stages, timing)


def _fits(one: Assessment, target: Target) -> bool:
    return one.fits(target) and one.step is not None


def _time(one: Assessment) -> float:
    return _seconds(one.step)


def _seconds(step: StepTime | None) -> float:
    return float("inf") if step is None else step.total_s
