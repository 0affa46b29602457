"""What `autopar-export` prints: the report, a refusal, and what keeps everything."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from autopar.console import make_console
from autopar.units import format_seconds
from search.exports.contract import Job
from search.exports.reprice import Choice, change_sentence
from search.exports.running import flags
from search.report.sections import print_heading, print_item, print_line

__all__ = ["overfull_lines", "refusal_lines", "show_export"]


def refusal_lines(choice: Choice) -> Iterator[str]:
    """Yield why nothing is written, and what keeps everything."""
    lowered = choice.lowered
    if lowered.losses:
        yield f"{lowered.engine} cannot do all that the plan says:"
        for loss in lowered.losses:
            yield f"  {loss.field}: {loss.what}"
    else:
        yield f"the plan does not fit as {lowered.engine} runs it:"
        yield f"  memory: {_too_large(choice)}"
    yield from _remedy(choice)
    what = "takes the nearest plan" if lowered.losses else "writes it all the same"
    yield f"nothing was written; --allow-approx {what}"


def overfull_lines(choice: Choice) -> Iterator[str]:
    """Yield a warning where what is written does not fit."""
    if choice.too_large:
        yield f"WARNING: WHAT IS WRITTEN DOES NOT FIT: {_too_large(choice)}"
        yield from _remedy(choice)


def _remedy(choice: Choice) -> Iterator[str]:
    lowered = choice.lowered
    if lowered.search:
        yield f"to find a plan that it runs as priced: autopar-search {lowered.search}"


def _too_large(choice: Choice) -> str:
    """Return what changes as the engine runs a plan, and what is too much then."""
    assert choice.after is not None
    return "; ".join([*_changes(choice), *choice.after.problems])


def _changes(choice: Choice) -> list[str]:
    """Return the difference that an engine makes, none where it runs the plan as it was given."""
    lowered = choice.lowered
    if not (lowered.losses or lowered.as_run):
        return []
    how = f" ({flags(lowered.as_run)})" if lowered.as_run else ""
    if choice.not_priced:
        change = f"not priced: {choice.not_priced}"
    elif choice.before is None or choice.after is None:
        change = "unknown without hardware; --hardware CARD:NxG prices it"
    else:
        change = change_sentence(choice.before, choice.after)
    return [f"as the engine runs it{how}: {change}"]


def show_export(job: Job, choice: Choice, written: Sequence[str]) -> None:
    """Print the report of an export and its launch command, the command last."""
    console, lowered = make_console(sys.stdout), choice.lowered
    print_line(
        console,
        f"{job.spec.name} ({job.spec.num_layers} layers) on {job.num_nodes} x "
        f"{job.gpus_per_node} GPUs for {lowered.engine}, {lowered.engine_version}",
        style="bold",
    )
    if lowered.losses:
        print_heading(console, "what is lost")
        for loss in lowered.losses:
            print_item(console, f"{loss.field}: {loss.what}")
    changes = _changes(choice)
    if changes or choice.too_large:
        print_heading(console, "price of the nearest plan" if lowered.losses else "price")
        for change in changes:
            print_item(console, change)
        if choice.before is not None and choice.after is not None:
            times = [format_seconds(p.step_time_s) for p in (choice.after, choice.before)]
            print_item(console, f"{times[0]} per step instead of {times[1]}")
            for problem in choice.after.problems:
                print_item(console, f"does not fit: {problem}")
            if not choice.too_large:
                print_item(console, "it fits")
        if choice.how:
            print_item(console, choice.how)
    for heading, items in (("notes", lowered.notes), ("files", tuple(written))):
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)
    where = "on the node" if job.num_nodes == 1 else "on every node, with its NODE_RANK"
    print_heading(console, f"launch, {where}")
    home = f"cd {shlex.quote(str(Path(written[0]).parent))}\n" if written else ""
    sys.stdout.write(home + lowered.launch)
