"""Explains a plan: where time and memory go, what binds, what more of a resource would bring."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.rates.measured import OPERATIONS, Curve, HardwareProfile
from autopar.records import Record, replace
from autopar.run.plan import Prediction
from autopar.units import GB, GIB, format_seconds
from search.planning.layered.prediction import SearchResult

if TYPE_CHECKING:
    from autopar.command.console import Console
    from autopar.run.plan import Plan
    from search.planning.question import Session, WhyNot

_WORTH = 1e-3
"""Gains below a thousandth are no bottleneck."""


class Perturbation(Record):
    """What the best plan would gain if one resource were a little larger."""

    name: str
    samples_per_s: float
    gain: float
    """Relative to the best plan with the resources as they are."""
    same_plan: bool


def add_bandwidth(
    hardware: HardwareProfile, *, collective: float = 0.0, p2p: float = 0.0
) -> HardwareProfile:
    """Return the hardware with so many bytes/s more on every collective or p2p link.

    Measured curves follow: the bus bandwidth at every size rises by the same amount.
    """

    def collectives(curves: Mapping[tuple[str, int], Curve]) -> Mapping[tuple[str, int], Curve]:
        return {
            (operation, size): _quicker(
                curve, collective, OPERATIONS[operation].bus_factor(size) * curve.sizes_bytes
            )
            for (operation, size), curve in curves.items()
        }

    return replace(
        hardware,
        # documented values are bus bandwidths already
        allreduce_bytes_per_s={
            key: value + collective for key, value in hardware.allreduce_bytes_per_s.items()
        },
        p2p_bytes_per_s={key: value + p2p for key, value in hardware.p2p_bytes_per_s.items()},
        curves=collectives(hardware.curves),
        strided_curves=collectives(hardware.strided_curves),
        p2p_curves={
            stages: _quicker(curve, p2p, curve.sizes_bytes)
            for stages, curve in hardware.p2p_curves.items()
        },
        sequence_curves={
            size: _quicker(
                curve, collective, OPERATIONS["allreduce"].bus_factor(size) * curve.sizes_bytes
            )
            for size, curve in hardware.sequence_curves.items()
        },
    )


def _quicker(curve: Curve, bytes_per_s: float, wire: NDArray[np.float64]) -> Curve:
    """Return a curve with more bus bandwidth at every size; `wire` is its bus traffic in bytes."""
    # without a change the curve stays the same to the last bit
    if not bytes_per_s:
        return curve

    def less(times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        # 1/t' = 1/t + added/wire, written so that a message of no bytes keeps its time
        return times_s * wire / (wire + bytes_per_s * times_s)

    times = less(curve.times_s)
    return Curve(
        sizes_bytes=curve.sizes_bytes,
        times_s=times,
        low_s=None if curve.low_s is None else less(curve.low_s),
        high_s=None if curve.high_s is None else less(curve.high_s),
        # an empty message takes no longer than the smallest
        latency_s=None if curve.latency_s is None else min(curve.latency_s, float(times[0])),
    )


def perturb(session: Session, baseline: SearchResult) -> tuple[Perturbation, ...]:
    """Return what one more GiB per GPU and one more GB/s would bring, by searching again."""
    if baseline.prediction is None:
        return ()
    best = baseline.prediction.samples_per_s
    budget = session.options.memory_constraint_bytes + GIB
    found: list[tuple[str, SearchResult]] = [
        ("+1 GiB of memory per GPU", session.planner.solve(memory_constraint_bytes=budget))
    ]
    for name, hardware in (
        ("+1 GB/s on every collective", add_bandwidth(session.hardware, collective=GB)),
        ("+1 GB/s between stages", add_bandwidth(session.hardware, p2p=GB)),
    ):
        # other hardware needs other tables; another budget does not
        found.append((name, session.rebuilt(hardware=hardware).solve()))
    return tuple(
        Perturbation(
            name=name,
            samples_per_s=result.prediction.samples_per_s,
            gain=result.prediction.samples_per_s / best - 1,
            same_plan=result.plan == baseline.plan,
        )
        for name, result in found
        if result.prediction is not None
    )


def show_explanation(
    console: Console,
    prediction: Prediction,
    *,
    perturbations: tuple[Perturbation, ...],
) -> None:
    """Print time and memory by category for every stage and layer run, and what binds."""
    for stage in prediction.stages:
        console.print()
        console.print(f"stage {stage.stage}", style="bold cyan")
        _print(console, "  one micro-batch: " + _seconds(stage.time_s))
        if stage.send_s:
            _print(console, f"  transfer to the next stage: {format_seconds(stage.send_s)}")
        _print(console, f"  once per step, not hidden: {format_seconds(stage.tail_s)}")
        flight = f"{stage.in_flight} micro-batch{'es' if stage.in_flight != 1 else ''} in flight"
        _print(console, f"  memory, {flight}: " + _gibibytes(stage.memory_bytes))
        for run in stage.runs:
            last = run.first_layer + run.num_layers - 1
            which = f"layers {run.first_layer}-{last}" if run.num_layers > 1 else f"layer {last}"
            _print(console, f"  {which} {run.label}")
            _print(console, "      time: " + _seconds(run.time_s))
            _print(console, "      memory: " + _gibibytes(run.memory_bytes))
    if prediction.widest_cell is not None:
        cell = prediction.widest_cell
        console.print()
        console.print("what to measure again", style="bold cyan")
        _print(
            console,
            f"  {cell.name}: {cell.share * 100:.0f} % of what the spread of computation adds to "
            "the step time's variance",
        )
    if not perturbations:
        return
    console.print()
    console.print("what more would bring", style="bold cyan")
    for item in perturbations:
        change = "with the same plan" if item.same_plan else "with another plan"
        _print(
            console,
            f"  {item.name}: {item.gain * 100:+.3f} %, {item.samples_per_s:.5g} samples/s {change}",
        )
    best = max(perturbations, key=lambda item: item.gain)
    verdict = (
        f"{best.name} helps most"
        if best.gain >= _WORTH
        else f"none of these brings {_WORTH * 100:g} %: computation binds"
    )
    _print(console, f"  {verdict}")


def show_best(
    console: Console,
    plan: Plan,
    prediction: Prediction,
    baseline: SearchResult,
    budget_bytes: float,
) -> None:
    """Print how a plan compares with the best of the search space, unless it is that one."""
    from search.show.headline import one_line
    from search.show.plan import infeasible_sentence

    console.print()
    if baseline.infeasibility is not None:
        why = infeasible_sentence(baseline.infeasibility, budget_bytes, options=baseline.options)
        _print(console, f"searching with these options: {why}")
        return
    if baseline.plan is None or baseline.prediction is None:
        _print(console, "the search found no plan to compare with before its time limit")
        return
    if baseline.plan == plan:
        _print(console, "this is the best plan of the search space")
        return
    best = baseline.prediction.samples_per_s
    text = f"the best plan of the search space reaches {best:.5g} samples/s"
    # a plan that cannot run has no speed to compare with
    if prediction.samples_per_s > 0:
        text += f", {(best / prediction.samples_per_s - 1) * 100:+.2f} % against this one"
    if not prediction.fits:
        text += "; this one does not fit"
    _print(console, text + ":")
    _print(console, f"  {one_line(baseline.plan)}")


def explanation_document(
    baseline: SearchResult,
    pinned: Sequence[tuple[str, WhyNot]],
    perturbations: Sequence[Perturbation],
) -> dict[str, Any]:
    """Return what `autopar-explain --json` has beside the price of a plan.

    baseline : the best plan of the search space. pinned : the best one under each rule.
    """
    return {
        "best": _found(baseline),
        "what_more_would_bring": [asdict(one) for one in perturbations],
        "why_not": [{"rule": rule, **_against(baseline, found)} for rule, found in pinned],
    }


def _against(baseline: SearchResult, found: WhyNot) -> dict[str, Any]:
    """Return the best plan under a rule, or why there is none, and where its time differs."""
    result, terms = found.result, {}
    if result is not None and result.plan is not None and baseline.plan is not None:
        # of a sample, since global batches may differ
        terms = dict(_differences(baseline, result))
    return {
        **({"status": "infeasible"} if result is None else _found(result)),
        "reason": found.reason,
        "left_out": list(found.left_out),
        "terms_s_per_sample": terms,
    }


def _found(result: SearchResult) -> dict[str, Any]:
    """Return what a search found: its plan and speed, or what is missing."""
    from autopar.documents.plan import plain
    from autopar.documents.strategy import strategy_document

    prediction = result.prediction
    return {
        "status": result.status,
        "plan": None if result.plan is None else strategy_document(result.plan),
        "step_time_s": None if prediction is None else prediction.step_time_s,
        "samples_per_s": None if prediction is None else prediction.samples_per_s,
        "infeasible": plain(result.infeasibility),
    }


def show_why_not(
    console: Console, rule: str, baseline: SearchResult, answer: WhyNot, budget_bytes: float
) -> None:
    """Print the best plan under a rule, the difference, and the term that makes it."""
    from search.show.plan import infeasible_sentence, show_memory, show_plan

    console.print()
    console.print(f"why not {rule}", style="bold cyan", markup=False)
    pinned = answer.result
    if pinned is None:
        _print(console, f"  with {rule}: {answer.reason}")
        return
    if answer.left_out:
        _print(console, f"  {' and '.join(answer.left_out)} left it out; without:")
    if pinned.infeasibility is not None:
        options = pinned.options if answer.left_out else baseline.options
        why = infeasible_sentence(pinned.infeasibility, budget_bytes, options=options)
        _print(console, f"  with {rule}: {why}")
        return
    if pinned.plan is None or pinned.prediction is None or baseline.prediction is None:
        _print(console, f"  no plan of the search space obeys {rule}")
        return
    if pinned.plan == baseline.plan:
        _print(console, f"  the best plan obeys {rule} already")
        return
    best, other = baseline.prediction, pinned.prediction
    _print(
        console,
        f"  best with {rule}: {other.samples_per_s:.5g} samples/s, "
        f"{(other.samples_per_s / best.samples_per_s - 1) * 100:+.2f} % "
        f"(step {format_seconds(other.step_time_s)})",
    )
    terms = _differences(baseline, pinned)
    if terms:
        name, delta = terms[0]
        verb = "makes the difference" if delta > 0 else "is the largest change"
        # s -> ms; less than a microsecond is no reason
        rest = [f"{n.replace('_', ' ')} {d * 1e3:+.3g} ms" for n, d in terms[1:] if abs(d) >= 1e-6]
        _print(
            console,
            f"  {name.replace('_', ' ')} {verb}: {delta * 1e3:+.4g} ms per sample"
            + (f" (also {', '.join(rest)})" if rest else ""),
        )
    show_plan(console, pinned.plan, other)
    show_memory(console, other)


def _differences(baseline: SearchResult, pinned: SearchResult) -> list[tuple[str, float]]:
    """Return (part, seconds per sample more than the best plan), largest loss first.

    Per sample, because the two plans may have different global batches.
    """
    assert baseline.plan is not None
    assert pinned.plan is not None
    assert baseline.prediction is not None
    assert pinned.prediction is not None
    old, new = baseline.prediction.waterfall_s, pinned.prediction.waterfall_s
    names = [*new, *(name for name in old if name not in new)]
    deltas = [
        (
            name,
            new.get(name, 0.0) / pinned.plan.global_batch
            - old.get(name, 0.0) / baseline.plan.global_batch,
        )
        for name in names
    ]
    return sorted(deltas, key=lambda item: -item[1])


def _seconds(values: Mapping[str, float]) -> str:
    return _sorted(values, format_seconds)


def _gibibytes(values: Mapping[str, float]) -> str:
    return _sorted(values, lambda value: f"{value / GIB:.2f} GiB")


def _sorted(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Return the categories that are not zero, largest first."""
    items = sorted(values.items(), key=lambda item: -item[1])
    named = (f"{name.replace('_', ' ')} {text(value)}" for name, value in items if value)
    return ", ".join(named) or "nothing"


def _print(console: Console, text: str) -> None:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    console.print(
        textwrap.fill(text, console.width, subsequent_indent=indent, break_on_hyphens=False),
        markup=False,
    )
