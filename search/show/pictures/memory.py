"""Allocated memory of every stage over a step, by term and piece of work.

`autopar.price` and `search.planning.cost` provide the bytes. The live micro-batches follow from the
order of the work in a `Timeline`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autopar.price.account import Account, Term, moment_terms
from autopar.price.peak import Event, Moment, partners_of
from autopar.records import Record
from autopar.run.plan import Prediction
from autopar.run.run import Run
from search.show.pictures.timeline import Timeline, Track
from search.show.terms import memory_name

_JOINED = {
    "saved activations": "activations",
    "rounding of activations": "activations",
    # A negative term: saved activations that are already freed.
    "freed before": "activations",
}
_SHOWN = 8
"""Number of separate terms of a stage; smaller terms are merged."""
_OTHERS = "others"
_KINDS = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}


class StageMemory(Record):
    """Allocated memory of a rank of one stage over a step."""

    names: tuple[str, ...]
    """Names of memory terms, from persistent to transient ones."""
    rows: tuple[tuple[float, ...], ...]
    """Distinct memory states: bytes of each term; the first row is between two steps."""
    at: tuple[int, ...]
    """Index into `rows` for every piece of work of the stage."""
    odds_of_oom: float

    @property
    def peak_bytes(self) -> float:
        """Peak allocated memory, bytes."""
        return max(map(sum, self.rows))

    @property
    def fullest(self) -> dict[str, float]:
        """Bytes by term at the peak."""
        return dict(zip(self.names, max(self.rows, key=sum), strict=True))


def launch_memory(
    run: Run, accounts: Sequence[Account], timeline: Timeline, odds: Sequence[float]
) -> tuple[StageMemory, ...]:
    """Return the memory of every stage of a run.

    accounts : memory accounts of all stages.
    odds : OOM probability of each stage.
    """
    found = []
    for account, track, odds_of_oom in zip(accounts, timeline.tracks, odds, strict=True):
        terms_at = moment_terms(run, account)
        heads = [chunk.head for chunk in run.strategy.stages[account.stage]]
        rows: dict[object, int] = {}
        moments: list[dict[str, float]] = [_joined(account.states)]
        at = []
        for moment in _moments(run, account.stage, track, heads):
            key = (
                *(moment.event.kind, moment.event.chunk, moment.live),
                *(moment.waiting_logits, moment.partner),
            )
            if key not in rows:
                rows[key] = len(moments)
                moments.append(_joined(terms_at(moment)))
            at.append(rows[key])
        found.append(_stage(moments, at, odds_of_oom))
    return tuple(found)


def _moments(run: Run, stage: int, track: Track, heads: Sequence[bool]) -> Iterator[Moment]:
    """Yield the work of a stage with its live micro-batches, like `autopar.price.peak.moments`.

    For engines without split backward passes, each half counts as a full backward.
    """
    live = [0] * len(heads)
    waiting: set[int] = set()
    kinds = [_KINDS[work.kind] for work in track.work]
    if not run.kernels.torch_layers:
        kinds = ["backward" if kind in ("inputs", "weights") else kind for kind in kinds]
    events = [
        Event(kind=kind, chunk=work.chunk, micro_batch=work.micro_batch)  # type: ignore[arg-type]
        for kind, work in zip(kinds, track.work, strict=True)
    ]
    partners = partners_of(run, stage, events)
    for place, (event, work) in enumerate(zip(events, track.work, strict=True)):
        if event.kind == "forward":
            live[work.chunk] += 1
        yield Moment(
            event=event,
            live=tuple(live),
            waiting_logits=bool(waiting),
            partner=partners.get(place),
        )
        if work.kind in "BW":
            live[work.chunk] -= 1
        if heads[work.chunk]:
            if work.kind == "F":
                waiting.add(work.micro_batch)
            elif work.kind in "BW":
                waiting.discard(work.micro_batch)


def _joined(terms: Iterable[Term]) -> dict[str, float]:
    found: dict[str, float] = {}
    for term in terms:
        name = _JOINED.get(term.name, term.name)
        found[name] = found.get(name, 0.0) + term.num_bytes
    return found


def _stage(
    moments: Sequence[Mapping[str, float]], at: Sequence[int], odds_of_oom: float
) -> StageMemory:
    """Return the memory of a stage with its smallest terms merged into `others`."""
    most: dict[str, float] = {}
    for moment in moments:
        for name, size in moment.items():
            most[name] = max(most.get(name, 0.0), size)
    # A list and not a set, whose order of equal terms would depend on hashes.
    large = sorted(most, key=lambda name: -most[name])[:_SHOWN]
    # Persistent terms are at the bottom of the chart.
    least = {name: min(moment.get(name, 0.0) for moment in moments) for name in most}
    names = sorted(large, key=lambda name: (most[name] - least[name] > 0, -least[name]))
    others = [name for name in most if name not in large]
    rows = [
        (
            *(moment.get(name, 0.0) for name in names),
            *([sum(moment.get(name, 0.0) for name in others)] if others else []),
        )
        for moment in moments
    ]
    return StageMemory(
        names=(*map(memory_name, names), *([_OTHERS] if others else [])),
        rows=tuple(rows),
        at=tuple(at),
        odds_of_oom=odds_of_oom,
    )


_ALWAYS = ("states", "vocab_states", "fixed", "shared")
_BY_MICRO_BATCH = ("activations", "vocab_activations")


def plan_memory(prediction: Prediction, timeline: Timeline) -> tuple[StageMemory, ...]:
    """Return the memory of every stage of a per-layer plan.

    Activations are proportional to the micro-batches in flight. Transient memory is allocated
    during every piece of work.
    """
    found = []
    for stage, track in zip(prediction.stages, timeline.tracks, strict=True):
        always = {name: float(stage.memory_bytes.get(name, 0)) for name in _ALWAYS}
        moments: list[dict[str, float]] = [always]
        rows: dict[int, int] = {}
        at, live = [], 0
        for work in track.work:
            live += work.kind == "F"
            if live not in rows:
                rows[live] = len(moments)
                share = live / max(stage.in_flight, 1)
                moments.append(
                    {
                        name: size * (share if name in _BY_MICRO_BATCH else 1.0)
                        for name, size in stage.memory_bytes.items()
                    }
                )
            at.append(rows[live])
            live -= work.kind != "F"
        found.append(_stage(moments, at, stage.odds_of_oom))
    return tuple(found)
