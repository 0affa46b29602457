"""One predicted step as tracks and spans: what every stage does when, on which stream.

Who waits for whom is the replay's (`autopar.pipeline.replay`, `search.planning.cost.pipeline`),
seconds are the step model's; nothing is written here. What the model has only as a sum is
apportioned, which `Timeline.notes` says, so that the last span ends with the predicted step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import field

from autopar.errors import InputError
from autopar.pipeline.orders import Kind
from autopar.pipeline.replay import Timed, replay
from autopar.pipeline.schedules import SCHEDULES
from autopar.price.assessment import Assessment, Target
from autopar.price.job import job_of_run
from autopar.price.peak import micro_batch_group
from autopar.price.step import KnownLayers, StageTime, StepTime, held_blocks
from autopar.records import Record
from autopar.run.plan import Plan, Prediction
from autopar.run.run import Run
from search.show.pictures.layers import Piece, layer_pieces
from search.show.pictures.terms import Stream, stream_of, words_of

if TYPE_CHECKING:
    from search.planning.cost.pipeline import Event

_EPSILON = 1e-9
"""Of a step: differences of rounding."""


class Work(NamedTuple):
    """Forward (F), backward (B), or its gradients of inputs (I) and of weights (W), of a chunk."""

    kind: Kind
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


class Span(NamedTuple):
    """What a stream of a rank does for some time; a rank's spans of a stream never overlap."""

    stream: Stream
    term: str
    name: str
    start_s: float
    end_s: float
    work: Work | None = None
    """Of which it is a part; None: of the step."""
    layer: int | None = None
    num_bytes: float = 0.0
    hidden: bool = False
    """Part of it runs beside computation."""


class Track(Record):
    """One stage of the pipeline, whose ranks all do the same at the same time."""

    stage: int
    first_rank: int
    last_rank: int
    layers: tuple[tuple[int, ...], ...]
    """Of each chunk."""
    work: tuple[Work, ...]
    """In the order in which it is done."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """Of a kind of work: shares of its time by term."""
    detail: Mapping[tuple[str, int], tuple[Piece, ...]]
    """The same layer by layer, of a kind of work and chunk, for the micro-batch that is shown so"""
    once: tuple[Span, ...]
    """What comes once a step."""
    sends: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the message behind a kind of work, where messages run beside what comes next."""

    @property
    def ranks(self) -> str:
        """Which ranks these are, in words."""
        first, last = self.first_rank, self.last_rank
        return f"rank {first}" if first == last else f"ranks {first}-{last}"

    @property
    def busy_s(self) -> float:
        """Of its micro-batches."""
        return sum(work.end_s - work.start_s for work in self.work)

    def spans(self, detailed: int | None = None) -> Iterator[Span]:
        """Yield everything that the rank does; layer by layer of the micro-batch `detailed`."""
        for work in self.work:
            shares = self.pieces[work.kind]
            if work.micro_batch == detailed:
                shares = self.detail.get((work.kind, work.chunk), shares)
            yield from _parts(work, shares)
        free = 0.0
        for work in self.work:
            if seconds := self.sends.get(work.kind, 0.0):
                # one at a time
                start = max(work.end_s, free)
                free = start + seconds
                yield Span("pipeline", "transfer", "transfer between stages", start, free, work)
        yield from self.once


class Timeline(Record):
    """A predicted step, event by event."""

    step_s: float
    tracks: tuple[Track, ...]
    """Of every stage."""
    schedule: str
    """As pages call it."""
    micro_batches: int
    chunks: int
    detailed: int
    """The micro-batch that is shown layer by layer, where something is."""
    notes: tuple[str, ...]
    """What is apportioned, and how."""


def _parts(work: Work, shares: Iterable[Piece]) -> Iterator[Span]:
    length = work.end_s - work.start_s
    done, start = 0.0, work.start_s
    for piece in shares:
        done += piece.share
        end = min(work.start_s + done * length, work.end_s)
        yield Span(
            stream=stream_of(piece.term),
            term=piece.term,
            name=piece.name,
            start_s=start,
            end_s=end,
            work=work,
            layer=piece.layer,
            num_bytes=piece.num_bytes,
        )
        start = end


# --------------------------------------------------------------------------------------------------
# Launches


_FRONT = ("transfer", "sharding")
"""Terms of a micro-batch that are drawn before its computation."""


def launch_timeline(assessment: Assessment, target: Target) -> Timeline:
    """Return the step of a launch that has a step time; raises InputError for one without."""
    step, run = assessment.step, assessment.run
    if step is None:
        raise InputError(f"the launch has no step time: {assessment.untimed}")
    strategy = run.strategy
    seconds = [_phases(stage) for stage in step.stages]
    early = step.early_reduction_s
    moved, notes = _replayed(run, step, seconds)
    apart = _OnceApart(run, step)
    job = job_of_run(run)
    blocks, known = held_blocks(job), KnownLayers(target.machine)
    ranks = run.split.tp * run.split.cp * strategy.dp
    # in the steady state where there is one
    detailed = min(strategy.micro_batches - 1, strategy.pp)
    tracks = []
    for at, stage in enumerate(step.stages):
        work = tuple(
            Work(*event.action, apart.begins_s + event.start_s, apart.begins_s + event.end_s)
            for event in moved[at]
        )
        pieces = {kind: _shares(seconds[at], kind, early) for kind in "FBIW"}
        layers = tuple(chunk.layers for chunk in strategy.stages[at])
        tracks.append(
            Track(
                stage=at,
                first_rank=at * ranks,
                last_rank=(at + 1) * ranks - 1,
                layers=layers,
                work=work,
                pieces=pieces,
                detail=layer_pieces(
                    job, blocks[at], stage, pieces, known, strategy.stages[at], step.transfer_bytes
                ),
                once=apart.spans(at, stage),
            )
        )
    return Timeline(
        step_s=step.total_s,
        tracks=tuple(tracks),
        schedule=SCHEDULES[strategy.schedule].title,
        micro_batches=strategy.micro_batches,
        chunks=strategy.vpp,
        detailed=detailed,
        notes=(*notes, *apart.notes),
    )


class _Phases(NamedTuple):
    """Seconds of a micro-batch of a stage by term."""

    forward: dict[str, float]
    inputs: dict[str, float]
    weights: dict[str, float]


def _phases(stage: StageTime) -> _Phases:
    forward = {name: stage.forward_s.get(name, 0.0) for name in stage.terms_s}
    weights = {
        # of rounding, and of kinds whose kernels are counted twice over
        name: min(stage.weight_s.get(name, 0.0), value - forward[name])
        for name, value in stage.terms_s.items()
    }
    inputs = {name: value - forward[name] - weights[name] for name, value in stage.terms_s.items()}
    return _Phases(forward, inputs, weights)


def _replayed(
    run: Run, step: StepTime, seconds: Sequence[_Phases]
) -> tuple[list[list[Timed]], list[str]]:
    """Return what every stage does from the start of the pipeline, ended when the model says so."""
    strategy, early = run.strategy, step.early_reduction_s
    found = replay(
        strategy.schedule,
        [sum(each.forward.values()) for each in seconds],
        [sum(each.inputs.values()) + early for each in seconds],
        [sum(each.weights.values()) for each in seconds],
        micro_batches=strategy.micro_batches,
        chunks=strategy.vpp,
        group=micro_batch_group(run),
        ahead=int(run.runtime.overlap.experts),
        timeline=True,
    )
    ends_s = step.pipeline_s + strategy.micro_batches * early
    stages: list[list[Timed]] = [[] for _ in seconds]
    for event in found.timeline:
        stages[event.rank].append(event)
    notes = []
    if strategy.vpp > 1:
        notes.append("the seconds of a stage are spread evenly over its chunks")
    if early:
        notes.append(
            "sums of gradients behind each micro-batch: only what computation does not hide is "
            "drawn, as the last part of its backward"
        )
    return _ended(stages, found.step_s, ends_s, notes), notes


def _ended(
    stages: list[list[Timed]], replayed_s: float, ends_s: float, notes: list[str]
) -> list[list[Timed]]:
    """Return events whose last one ends at a time: starts are moved apart, or all is shortened.

    s' = a s with the largest a for which every s' + d is within the time; what waits for something
    still waits for it.
    """
    if abs(ends_s - replayed_s) <= _EPSILON * ends_s:
        return stages
    share = ends_s / replayed_s - 1.0
    if ends_s > replayed_s:
        last = [events[-1] for events in stages if events]
        factor = min(
            (ends_s - (event.end_s - event.start_s)) / event.start_s
            for event in last
            if event.start_s > 0
        )
        notes.append(
            f"the step model's bubble is {share * 100:.2g} % of the step's pipeline longer than "
            "that of the replay: starts are moved apart by it, evenly over the step"
        )
        return [
            [
                event._replace(
                    start_s=event.start_s * factor,
                    end_s=event.start_s * factor + (event.end_s - event.start_s),
                )
                for event in events
            ]
            for events in stages
        ]
    notes.append(
        f"the replay takes {-share * 100:.2g} % longer than the step model: all of its spans are "
        "shortened by it"
    )
    factor = ends_s / replayed_s
    return [
        [event._replace(start_s=event.start_s * factor, end_s=event.end_s * factor) for event in on]
        for on in stages
    ]


def _shares(phases: _Phases, kind: str, early_s: float) -> tuple[Piece, ...]:
    """Return the terms of a kind of work as shares of its time."""
    seconds = {
        "F": phases.forward,
        "I": phases.inputs,
        "W": phases.weights,
        "B": {name: phases.inputs[name] + phases.weights[name] for name in phases.inputs},
    }[kind]
    # what rounding leaves of a term is none
    least = _EPSILON * sum(seconds.values())
    seconds = {name: value for name, value in seconds.items() if value > least}
    late = early_s if kind in "BI" else 0.0
    total = sum(seconds.values()) + late
    if not total:
        return ()
    first = [name for name in _FRONT if name in seconds]
    order = [*first, *(name for name in seconds if name not in first)]
    found = [Piece(name, words_of(name), seconds[name] / total) for name in order]
    if late:
        found.append(Piece("gradients", "sum of gradients", late / total))
    return tuple(found)


class _OnceApart:
    """What comes once a step of a launch: where the pipeline begins, and spans around it."""

    def __init__(self, run: Run, step: StepTime) -> None:
        """Split what is visible of the gradients' traffic between the sum and the gather."""
        self._step = step
        terms, number = step.terms_s, run.strategy.micro_batches
        visible = terms["gradients"] - step.tied_s - number * step.early_reduction_s
        worst = max(step.stages, key=lambda stage: stage.reduction_s + stage.gather_s)
        both = worst.reduction_s + worst.gather_s
        gathers = worst.gather_s / both if both else 0.0
        if step.early_reduction_s:
            # the sum behind the last micro-batch is drawn with it, as the others are
            gathers = 1.0
        # overlapped gathers run beside the first forwards of the next step, which is as this one
        self._first = run.runtime.overlap.gradients
        self._gather_s = max(visible, 0.0) * gathers
        self._reduce_s = max(visible, 0.0) * (1 - gathers)
        self._worst = worst
        self.begins_s = step.weight_cast_s + (self._gather_s if self._first else 0.0)
        self._ends_s = self.begins_s + step.pipeline_s + number * step.early_reduction_s
        self.notes = list(self._notes(run))

    def _notes(self, run: Run) -> Iterator[str]:
        yield (
            "terms of a micro-batch are shares of its time, drawn one behind the other; of one "
            "micro-batch they are drawn layer by layer"
        )
        if self._step.terms_s["stragglers"]:
            yield "stragglers: the whole term is a wait behind the sum of gradients"
        if self._worst.reduction_s + self._worst.gather_s:
            hidden = "; hidden parts run beside computation" if self._first else ""
            yield (
                "data-parallel traffic has its full length, the end of the longest is visible"
                f"{hidden}"
            )

    def spans(self, index: int, stage: StageTime) -> tuple[Span, ...]:
        """Return the spans of a stage, in the order in which they start."""
        step, found = self._step, list[Span]()
        clock = 0.0
        if self._first and stage.gather_s:
            found.append(self._gather(stage, 0.0))
        clock += self._gather_s if self._first else 0.0
        if step.weight_cast_s:
            end = clock + step.weight_cast_s
            found.append(Span("compute", "cast", "cast of weights", clock, end))
        clock = self._ends_s
        visible = self._share(stage.reduction_s, self._worst.reduction_s) * self._reduce_s
        if stage.reduction_s:
            start = max(clock + visible - stage.reduction_s, self.begins_s)
            found.append(
                Span(
                    "data",
                    "gradients",
                    # who gathers weights has a share of the sum
                    f"{'reduce-scatter' if stage.gather_bytes else 'all-reduce'} of gradients",
                    # what each micro-batch sums is drawn with it
                    clock if step.early_reduction_s else start,
                    clock + visible,
                    num_bytes=stage.reduction_bytes,
                    hidden=start < clock and not step.early_reduction_s,
                )
            )
        clock += self._reduce_s
        if step.tied_s:
            if index in (0, len(step.stages) - 1):
                name = "all-reduce of the tied embedding"
                found.append(Span("data", "gradients", name, clock, clock + step.tied_s))
            clock += step.tied_s
        if waits := step.terms_s["stragglers"]:
            found.append(
                Span("data", "stragglers", "wait for the slowest rank", clock, clock + waits)
            )
            clock += waits
        if stage.optimizer_s:
            found.append(
                Span("compute", "optimizer", "optimizer", clock, clock + stage.optimizer_s)
            )
        clock += step.optimizer_s
        if not self._first and stage.gather_s:
            found.append(self._gather(stage, clock))
        return tuple(span for span in found if span.end_s > span.start_s)

    def _gather(self, stage: StageTime, start: float) -> Span:
        return Span(
            "data",
            "gradients",
            "all-gather of weights",
            start,
            start + stage.gather_s,
            num_bytes=stage.gather_bytes,
            hidden=self._first,
        )

    @staticmethod
    def _share(own: float, most: float) -> float:
        return own / most if most else 0.0


# --------------------------------------------------------------------------------------------------
# Plans whose layers differ


def plan_timeline(plan: Plan, prediction: Prediction) -> Timeline:
    """Return the step of a plan; raises InputError for one that cannot run."""
    from search.planning.cost.pipeline import replay as replay_plan

    stages = prediction.stages
    if not stages:
        raise InputError(f"the plan has no step time: {'; '.join(prediction.problems)}")
    sends = [stage.send_s for stage in stages]
    found = replay_plan(
        [stage.forward_s for stage in stages],
        [stage.backward_s for stage in stages],
        sends,
        [stage.tail_s for stage in stages],
        plan.num_microbatches,
        plan.pipeline_type,
        timeline=True,
    )
    events: list[list[Event]] = [[] for _ in stages]
    for event in found.timeline or ():
        events[event.stage].append(event)
    notes = [
        "terms of a micro-batch are shares of its time, drawn one behind the other",
        "categories that forward and backward share are in both in the same proportion",
    ]
    timed = [
        [
            Timed(at, (event.kind, 0, event.microbatch), event.start_s, event.end_s)  # type: ignore[arg-type]
            for event in on
        ]
        for at, on in enumerate(events)
    ]
    moved = _ended(timed, found.step_time_s, prediction.step_time_s, notes)
    ranks = plan.world_size // plan.num_stages
    tracks, first = [], 0
    for at, stage in enumerate(stages):
        work = tuple(
            Work("F" if event.action[0] == "forward" else "B", 0, event.action[2], *event[2:])  # type: ignore[comparison-overlap]
            for event in moved[at]
            if event.action[0] != "tail"  # type: ignore[comparison-overlap]
        )
        tail = [event for event in moved[at] if event.action[0] == "tail"]  # type: ignore[comparison-overlap]
        size = plan.stage_sizes[at]
        tracks.append(
            Track(
                stage=at,
                first_rank=at * ranks,
                last_rank=(at + 1) * ranks - 1,
                layers=(tuple(range(first, first + size)),),
                work=work,
                pieces=_plan_shares(stage.time_s, stage.forward_s, stage.backward_s),
                detail={},
                once=tuple(_tail(prediction, at, tail)),
                sends={
                    # activations go on, gradients go back
                    "F": sends[at] if at < len(sends) - 1 else 0.0,
                    "B": sends[at - 1] if at else 0.0,
                },
            )
        )
        first += size
    return Timeline(
        step_s=prediction.step_time_s,
        tracks=tuple(tracks),
        schedule="GPipe" if plan.pipeline_type == "gpipe" else "1F1B",
        micro_batches=plan.num_microbatches,
        chunks=1,
        detailed=0,
        notes=tuple(notes),
    )


def _plan_shares(
    time_s: Mapping[str, float], forward_s: float, backward_s: float
) -> dict[str, tuple[Piece, ...]]:
    """Return the categories of a micro-batch as shares of its forward and of its backward."""
    own = {"forward": ("forward",), "backward": ("backward", "recompute")}
    shared = {
        name: value
        for name, value in time_s.items()
        if name not in ("forward", "backward", "recompute") and value > 0
    }
    total = sum(shared.values())
    found = {}
    for kind, phase, seconds in (("F", "forward", forward_s), ("B", "backward", backward_s)):
        parts = {name: time_s.get(name, 0.0) for name in own[phase]}
        rest = max(seconds - sum(parts.values()), 0.0)
        parts |= {name: rest * value / total for name, value in shared.items()}
        whole = sum(parts.values())
        found[kind] = tuple(
            Piece(name, words_of(name), value / whole) for name, value in parts.items() if value > 0
        )
    return found


def _tail(prediction: Prediction, at: int, tail: Sequence[Timed]) -> Iterator[Span]:
    """Yield what comes once a step: the visible sum of gradients, then the optimizer."""
    parts, stage = prediction.waterfall_s, prediction.stages[at]
    for event in tail:
        length = event.end_s - event.start_s
        update = sum(run.time_s.get("optimizer", 0.0) for run in stage.runs)
        if stage.tail_s == max(one.tail_s for one in prediction.stages):
            # embedding and head are in no run
            update = parts.get("optimizer", update)
        update = min(update / stage.tail_s, 1.0) * length if stage.tail_s else 0.0
        middle = event.end_s - update
        if middle > event.start_s:
            yield Span("data", "gradient_sync", "sum of gradients", event.start_s, middle)
        if update:
            yield Span("compute", "optimizer", "optimizer", middle, event.end_s)
