"""Timeline of one predicted step: the spans of every stage, by stream.

A replay of the schedule computes the waits (`autopar.pipeline.replay`,
`search.planning.cost.pipeline`), and the step model provides the seconds. Times known only as a sum
over the step are apportioned so that the last span ends with the step. `Timeline.notes` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import field

from autopar.errors import InputError
from autopar.pipeline.orders import Kind
from autopar.pipeline.replay import TimedAction, replay
from autopar.pipeline.schedules import SCHEDULES
from autopar.price.assessment import Assessment, Target
from autopar.price.job import job_of_run
from autopar.price.peak import micro_batch_group
from autopar.price.step import LayerTimeCache, StageTime, StepTime, held_blocks
from autopar.records import Record
from autopar.run.plan import Plan, Prediction
from autopar.run.run import Run
from search.show.pictures.layers import Piece, layer_pieces
from search.show.pictures.terms import Stream, stream_of
from search.show.terms import time_name

if TYPE_CHECKING:
    from search.planning.cost.pipeline import Event

_EPSILON = 1e-9
"""Share of a step below which a difference is a rounding error."""


class Work(NamedTuple):
    """A pass of a micro-batch through a model chunk.

    The kind is F (forward), B (backward), I (input gradients) or W (weight gradients).
    """

    kind: Kind
    chunk: int
    micro_batch: int
    start_s: float
    end_s: float


class Span(NamedTuple):
    """Activity of one stream of a rank; spans of the same stream never overlap."""

    stream: Stream
    term: str
    name: str
    start_s: float
    end_s: float
    work: Work | None = None
    """Work that contains the span; None for spans once per step."""
    layer: int | None = None
    num_bytes: float = 0.0
    hidden: bool = False
    """True if part of the span overlaps with computation."""


class Track(Record):
    """One pipeline stage, whose ranks have identical timelines."""

    stage: int
    first_rank: int
    last_rank: int
    layers: tuple[tuple[int, ...], ...]
    """Indices of the layers of each model chunk."""
    work: tuple[Work, ...]
    """Passes of micro-batches in execution order."""
    pieces: Mapping[str, tuple[Piece, ...]]
    """Pieces of each kind of work by term, as shares of its time."""
    detail: Mapping[tuple[str, int], tuple[Piece, ...]]
    """Pieces of each kind of work and chunk layer by layer, for the detailed micro-batch."""
    once: tuple[Span, ...]
    """Spans once per step, outside micro-batches."""
    sends: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the message after each kind of work; empty if messages are part of the work."""

    @property
    def ranks(self) -> str:
        """Ranks of the stage in words."""
        first, last = self.first_rank, self.last_rank
        return f"rank {first}" if first == last else f"ranks {first}-{last}"

    @property
    def busy_s(self) -> float:
        """Total time of micro-batches, seconds."""
        return sum(work.end_s - work.start_s for work in self.work)

    def spans(self, detailed: int | None = None) -> Iterator[Span]:
        """Yield all spans of a rank.

        detailed : index of the micro-batch that is split layer by layer; None for none.
        """
        for work in self.work:
            shares = self.pieces[work.kind]
            if work.micro_batch == detailed:
                shares = self.detail.get((work.kind, work.chunk), shares)
            yield from _parts(work, shares)
        free = 0.0
        for work in self.work:
            if seconds := self.sends.get(work.kind, 0.0):
                # A stage sends one message at a time.
                start = max(work.end_s, free)
                free = start + seconds
                yield Span("pipeline", "transfer", "PP comm", start, free, work)
        yield from self.once


class Timeline(Record):
    """Timeline of a predicted step."""

    step_s: float
    tracks: tuple[Track, ...]
    """One track per pipeline stage."""
    schedule: str
    """Name of the schedule in prose."""
    micro_batches: int
    chunks: int
    detailed: int
    """Index of the micro-batch that is shown layer by layer, if layer times are known."""
    notes: tuple[str, ...]
    """Notes on apportioned times, one sentence each."""


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
# Uniform plans


_FRONT = ("transfer", "sharding")
"""Terms of a micro-batch that are drawn before its computation."""


def launch_timeline(assessment: Assessment, target: Target) -> Timeline:
    """Return the timeline of an assessed run; raises InputError for a run without a step time."""
    step, run = assessment.step, assessment.run
    if step is None:
        raise InputError(f"the plan has no step time: {assessment.untimed}")
    strategy = run.strategy
    seconds = [_phases(stage) for stage in step.stages]
    early = step.early_reduction_s
    moved, notes = _replayed(run, step, seconds)
    apart = _OnceApart(run, step)
    job = job_of_run(run)
    blocks, known = held_blocks(job), LayerTimeCache(target.machine)
    ranks = run.split.tp * run.split.cp * strategy.dp
    # A micro-batch of the steady state, if there is one.
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
    """Seconds of one micro-batch of a stage by phase and term."""

    forward: dict[str, float]
    inputs: dict[str, float]
    weights: dict[str, float]


def _phases(stage: StageTime) -> _Phases:
    forward = {name: stage.forward_s.get(name, 0.0) for name in stage.terms_s}
    weights = {
        # Capped because of rounding, and because some kinds count their kernels twice.
        name: min(stage.weight_s.get(name, 0.0), value - forward[name])
        for name, value in stage.terms_s.items()
    }
    inputs = {name: value - forward[name] - weights[name] for name, value in stage.terms_s.items()}
    return _Phases(forward, inputs, weights)


def _replayed(
    run: Run, step: StepTime, seconds: Sequence[_Phases]
) -> tuple[list[list[TimedAction]], list[str]]:
    """Return the events of every stage, and notes on apportioned times.

    Times are seconds from the start of the pipeline, scaled to the pipeline time of the step model.
    """
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
    stages: list[list[TimedAction]] = [[] for _ in seconds]
    for event in found.timeline:
        stages[event.rank].append(event)
    notes = []
    if strategy.vpp > 1:
        notes.append("the time of a stage is divided evenly over its chunks")
    if early:
        notes.append(
            "gradient reduction after each micro-batch: only its exposed part is drawn, as the "
            "last part of the backward pass"
        )
    return _ended(stages, found.step_s, ends_s, notes), notes


def _ended(
    stages: list[list[TimedAction]], replayed_s: float, ends_s: float, notes: list[str]
) -> list[list[TimedAction]]:
    """Return the events of every stage scaled so that the last one ends at `ends_s` seconds.

    If the replay is too short, only starts are scaled: s' = a s, with the largest a for which every
    s' + d is at most `ends_s`. All dependencies still hold. If it is too long, all spans are
    shortened.
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
            "the bubble of the step model is longer than that of the event replay, by "
            f"{share * 100:.2g} % of the pipeline time: starts are delayed evenly over the step"
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
        f"the event replay is {-share * 100:.2g} % longer than the step model: all spans are "
        "shortened to the step model"
    )
    factor = ends_s / replayed_s
    return [
        [event._replace(start_s=event.start_s * factor, end_s=event.end_s * factor) for event in on]
        for on in stages
    ]


def _shares(phases: _Phases, kind: str, early_s: float) -> tuple[Piece, ...]:
    """Return the pieces of a kind of work by term, as shares of its time."""
    seconds = {
        "F": phases.forward,
        "I": phases.inputs,
        "W": phases.weights,
        "B": {name: phases.inputs[name] + phases.weights[name] for name in phases.inputs},
    }[kind]
    # Terms that are only rounding errors are dropped.
    least = _EPSILON * sum(seconds.values())
    seconds = {name: value for name, value in seconds.items() if value > least}
    late = early_s if kind in "BI" else 0.0
    total = sum(seconds.values()) + late
    if not total:
        return ()
    first = [name for name in _FRONT if name in seconds]
    order = [*first, *(name for name in seconds if name not in first)]
    found = [Piece(name, time_name(name), seconds[name] / total) for name in order]
    if late:
        found.append(Piece("gradients", "gradient reduction", late / total))
    return tuple(found)


class _OnceApart:
    """Spans once per step of a uniform plan, before and after the pipeline."""

    def __init__(self, run: Run, step: StepTime) -> None:
        """Divide exposed data-parallel communication into gradient reduction and weight gather."""
        self._step = step
        terms, number = step.terms_s, run.strategy.micro_batches
        visible = terms["gradients"] - step.tied_s - number * step.early_reduction_s
        worst = max(step.stages, key=lambda stage: stage.reduction_s + stage.gather_s)
        both = worst.reduction_s + worst.gather_s
        gathers = worst.gather_s / both if both else 0.0
        if step.early_reduction_s:
            # Every micro-batch contains its gradient reduction, also the last one.
            gathers = 1.0
        # Overlapped gathers run during the first forward passes of the next step, which is equal to
        # this one, so they are drawn at its start.
        self._first = run.runtime.overlap.gradients
        self._gather_s = max(visible, 0.0) * gathers
        self._reduce_s = max(visible, 0.0) * (1 - gathers)
        self._worst = worst
        self.begins_s = step.weight_cast_s + (self._gather_s if self._first else 0.0)
        self._ends_s = self.begins_s + step.pipeline_s + number * step.early_reduction_s
        self.notes = list(self._notes(run))

    def _notes(self, run: Run) -> Iterator[str]:
        yield (
            "terms of a micro-batch are drawn one after the other, in proportion to their time; "
            "one micro-batch is drawn layer by layer"
        )
        if self._step.terms_s["stragglers"]:
            yield "stragglers: the whole term is a wait after the gradient reduction"
        if self._worst.reduction_s + self._worst.gather_s:
            hidden = "; hidden parts overlap with computation" if self._first else ""
            yield (
                "DP comm is drawn in full length; its exposed part is the end of the longest"
                f"{hidden}"
            )

    def spans(self, index: int, stage: StageTime) -> tuple[Span, ...]:
        """Return the spans of a stage once per step, in the order of their starts."""
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
                    # A stage that gathers weights shards its gradients.
                    f"{'reduce-scatter' if stage.gather_bytes else 'all-reduce'} of gradients",
                    # Reductions of micro-batches are drawn with the micro-batches.
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
# Per-layer plans


def plan_timeline(plan: Plan, prediction: Prediction) -> Timeline:
    """Return the timeline of a per-layer plan; raises InputError if it cannot run."""
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
        "terms of a micro-batch are drawn one after the other, in proportion to their time",
        "categories that forward and backward share are divided in proportion to both",
    ]
    timed = [
        [
            TimedAction(at, (event.kind, 0, event.microbatch), event.start_s, event.end_s)  # type: ignore[arg-type]
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
                    # Activations go to the next stage, gradients to the previous one.
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
    """Return the categories of a micro-batch as shares of its forward and backward pass."""
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
            Piece(name, time_name(name), value / whole)
            for name, value in parts.items()
            if value > 0
        )
    return found


def _tail(prediction: Prediction, at: int, tail: Sequence[TimedAction]) -> Iterator[Span]:
    """Yield the spans once per step: exposed gradient reduction, then the optimizer."""
    parts, stage = prediction.waterfall_s, prediction.stages[at]
    for event in tail:
        length = event.end_s - event.start_s
        update = sum(run.time_s.get("optimizer", 0.0) for run in stage.runs)
        if stage.tail_s == max(one.tail_s for one in prediction.stages):
            # Embedding and head are not part of the stage's groups of layers.
            update = parts.get("optimizer", update)
        update = min(update / stage.tail_s, 1.0) * length if stage.tail_s else 0.0
        middle = event.end_s - update
        if middle > event.start_s:
            yield Span("data", "gradient_sync", "gradient reduction", event.start_s, middle)
        if update:
            yield Span("compute", "optimizer", "optimizer", middle, event.end_s)
