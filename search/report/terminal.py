"""Shows a result to a person: speed, sections, binding constraint and inputs, in 100 columns.

Reads `SearchResult` and `Prediction` only. Without a terminal the same text has no colours.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape

from autopar.plan import Plan
from autopar.sources import Source
from autopar.units import GIB, format_bytes, format_seconds
from search.report.sections import (
    make_table,
    one_line,
    print_heading,
    print_item,
    print_line,
    show_alternatives,
    show_memory,
    show_plan,
    show_waterfall,
)
from search.result import Infeasibility, Prediction, SearchResult

__all__ = [
    "infeasible_sentence",
    "show_evaluation",
    "show_frontier",
    "show_result",
]

_NAMED = 6
"""Restricting options that a sentence names, at most."""
_MODEL_ROLES = ("model", "computation", "memory")
"""What the roles of the inputs that describe the model begin with."""
_COUNTED = "counted exactly"
"""How the sidecar of a memory file that rests on no device begins to say where it comes from."""
_ROOMY = 0.1
"""Share of the budget that must be free before memory is said not to bind."""


def show_result(console: Console, result: SearchResult, *, title: str) -> None:
    """Print everything a search returned."""
    plan, prediction = result.plan, result.prediction
    if plan is None or prediction is None:
        return
    _title(console, title, result.sources, estimated=result.estimated, synthetic=result.synthetic)
    _headline(console, result, prediction)
    show_plan(console, plan, prediction)
    show_waterfall(console, prediction)
    show_memory(console, prediction)
    _binding(console, plan, prediction)
    show_alternatives(console, result)
    _lists(console, result)
    stats = result.stats
    print_line(
        console,
        f"searched {stats.candidates} combinations of batch, micro-batches, stages and vocabulary "
        f"degree, {stats.opened} of them exactly, in {format_seconds(stats.cpu_s)} of CPU time",
        style="dim",
    )


def show_evaluation(
    console: Console,
    plan: Plan,
    prediction: Prediction,
    *,
    title: str,
    estimated: bool,
    synthetic: bool = False,
    path: str | None = None,
    defaults: Sequence[str] = (),
    notes: Sequence[str] = (),
    sources: Sequence[Source] = (),
) -> None:
    """Print the price of a given plan and why it is illegal or does not fit.

    Parameters
    ----------
    notes : on the inputs. sources : the inputs, to say which of them are estimated or synthetic.
    """
    if path is not None:
        console.print(path, markup=False, soft_wrap=True)
    _title(console, title, sources, estimated=estimated, synthetic=synthetic)
    verdict = f"legal: {_yes(prediction.legal)}   fits: {_yes(prediction.fits)}"
    print_line(console, verdict, style="bold")
    print_line(console, _speed(prediction))
    _spread(console, prediction)
    for problem in prediction.problems:
        print_item(console, problem)
    show_plan(console, plan, prediction)
    show_waterfall(console, prediction)
    show_memory(console, prediction)
    for heading, items in (("defaults used", defaults), ("notes", notes)):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)


def show_frontier(console: Console, results: list[SearchResult]) -> None:
    """Print the best throughput by memory budget."""
    print_heading(console, "throughput by memory budget")
    table = make_table("GiB per GPU", "samples/s", "step", "plan")
    for result in results:
        if result.plan is None or result.prediction is None:
            continue
        budget = result.options.get("memory_constraint_bytes")
        table.add_row(
            f"{budget / GIB:.2f}" if isinstance(budget, int | float) else "-",
            f"{result.prediction.samples_per_s:.4g}",
            format_seconds(result.prediction.step_time_s),
            escape(one_line(result.plan)),
        )
    console.print(table)


def infeasible_sentence(
    infeasibility: Infeasibility,
    budget_bytes: float,
    *,
    options: Mapping[str, object] | None = None,
    subject: str = "",
) -> str:
    """Return why nothing fits: stage, missing bytes, smallest budget that works.

    Parameters
    ----------
    options : those of the search; the ones that restrict it are named where no budget helps.
    subject : what was planned for, such as `gpt2-xl (25 heads) on 8 GPUs`.
    """
    smallest = infeasibility.smallest_budget_bytes
    if smallest <= 0:
        restricting = _restricting(options or {})
        what = (f" for {subject}" if subject else "") + (
            f" with {' '.join(restricting)}" if restricting else ""
        )
        return f"there is no plan{what}, with any --memory-constraint: {infeasibility.reason}"
    stages = infeasibility.num_stages
    where = "the one stage" if stages == 1 else f"stage {infeasibility.stage} of 0-{stages - 1}"
    missing = (
        f"no plan fits in {budget_bytes / GIB:.4g} GiB per GPU: {where} of the smallest plan "
        f"misses {format_bytes(infeasibility.missing_bytes)} ({infeasibility.missing_bytes} bytes)"
    )
    # Rounded up, so that the number shown does work.
    gib = math.ceil(smallest / GIB * 100) / 100
    return missing + f"; the smallest that works is --memory-constraint {gib:.2f}"


def _restricting(options: Mapping[str, object]) -> list[str]:
    """Return the options that leave parts of the search space out, as they are written."""
    found = []
    if options.get("search_space", "full") != "full":
        found.append(f"--search-space {options['search_space']}")
    found += [
        f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if name.startswith("disable_") and value is True
    ]
    for name in ("pin", "forbid"):
        rules = options.get(name)
        if isinstance(rules, list | tuple):
            found += [f"--{name} {shlex.quote(str(rule))}" for rule in rules]
    if len(found) > _NAMED:
        found[_NAMED:] = [f"and {len(found) - _NAMED} more"]
    return found


def _headline(console: Console, result: SearchResult, prediction: Prediction) -> None:
    print_line(console, _speed(prediction), style="bold")
    _spread(console, prediction)
    if result.status == "time_limit":
        text = f"stopped at the time limit: at most {result.gap * 100:.3g} % below the best"
    elif result.gap > 0:
        text = f"at most {result.gap * 100:.3g} % below the best"
    else:
        text = "proven best of the search space"
    print_line(
        console,
        f"{text}: bound {result.bound_samples_per_s:.6g} samples/s, gap {result.gap * 100:.3g} %",
    )


def _speed(prediction: Prediction) -> str:
    if not math.isfinite(prediction.step_time_s):
        return "has no step time, because it cannot run"
    text = (
        f"{prediction.samples_per_s:.5g} samples/s, step {format_seconds(prediction.step_time_s)}"
    )
    if math.isfinite(prediction.replay_s) and prediction.replay_s > 0:
        ratio = prediction.replay_s / prediction.step_time_s - 1
        text += f" (event replay {format_seconds(prediction.replay_s)}, {ratio * 100:+.2f} %)"
    return text


def _spread(console: Console, prediction: Prediction) -> None:
    """Print between which step times the measured spread leaves the plan."""
    if prediction.step_time_interval_s is not None:
        fast, slow = map(format_seconds, prediction.step_time_interval_s)
        span = f"{fast} to {slow}" if fast != slow else f"stays {fast}"
        print_line(
            console,
            f"step {span} within the measured spread of {' and '.join(prediction.interval_of)}",
        )


def _binding(console: Console, plan: Plan, prediction: Prediction) -> None:
    """Name the tightest stage in memory and the slowest in time."""
    if not prediction.stages:
        return
    full = max(prediction.stages, key=lambda s: s.reserved_bytes / max(s.budget_bytes, 1))
    slow = max(prediction.stages, key=lambda s: s.forward_s + s.backward_s)
    spare = full.budget_bytes - full.reserved_bytes
    room = f"{format_bytes(spare)} of {format_bytes(full.budget_bytes)} spare"
    if spare > _ROOMY * full.budget_bytes:
        text = f"memory does not bind: {room} on stage {full.stage}, the fullest"
    else:
        text = f"memory of stage {full.stage} binds: {room}"
    if plan.num_stages > 1:
        busy = format_seconds(slow.forward_s + slow.backward_s)
        text += f"; stage {slow.stage} sets the pace ({busy} per micro-batch)"
    print_line(console, text)


def _lists(console: Console, result: SearchResult) -> None:
    # What is estimated or synthetic stands in the title and beside the inputs already.
    notes = [note for note in result.notes if not note.startswith(("estimated: ", "synthetic: "))]
    for heading, items in (("defaults used", result.defaults_used), ("notes", notes)):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)
    if result.sources:
        print_heading(console, "inputs")
        for source in dict.fromkeys(result.sources):
            marks = [name for name in ("estimated", "synthetic") if getattr(source, name)]
            mark = f" ({', '.join(marks)})" if marks else ""
            # One line each however long, so that paths can be copied.
            console.print(f"  - {source.role}: {source.path}{mark}", markup=False, soft_wrap=True)


def _title(
    console: Console, title: str, sources: Sequence[Source], *, estimated: bool, synthetic: bool
) -> None:
    print_line(console, title, style="bold")
    if synthetic:
        print_line(
            console,
            f"rests on SYNTHETIC timings{_whose(s.role for s in sources if s.synthetic)}, which "
            "exercise the code and describe no machine",
            style="bold red",
        )
    if estimated:
        print_line(
            console,
            f"rests on ESTIMATES{_whose(s.role for s in sources if s.estimated)} from datasheets, "
            "not on measurements",
            style="yellow",
        )
    times = any(s.role in ("computation", "model spec") and s.estimated for s in sources)
    counted = any(s.role == "memory sidecar" and s.notes[0].startswith(_COUNTED) for s in sources)
    if times and counted:
        print_line(console, "memory counted exactly, times estimated", style="yellow")


def _whose(roles: Iterable[str]) -> str:
    """Return ` of the model` or ` of the hardware` where only inputs of one have these roles."""
    names = {"model" if role.startswith(_MODEL_ROLES) else "hardware" for role in roles}
    return f" of the {names.pop()}" if len(names) == 1 else ""


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
