"""`autopar-explore calculon --tuner NAME --space FILE`: spaces that a user writes down."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autopar.command.options import Row, make, option, read_values, rows_of
from autopar.command.run import say
from autopar.errors import InfeasibleError, OptionError
from search.commands.explore_session import AnswerSpec, AskedSpec, numbers

__all__ = ["TunerSpec", "run_tuner", "wants_tuner"]

_COMMAND, _TUNERS = "autopar-explore", "Tuners"


@dataclass(frozen=True, kw_only=True)
class TunerSpec:
    """A space that a file says, and how it is searched."""

    tuner: Literal["exhaustive", "random", "ray", "smac"] = option(
        "exhaustive", help="how to search --space; ray and smac are extras", panel=_TUNERS
    )
    space: str = option(help="JSON file: for every field of an execution its values", panel=_TUNERS)
    evaluations: int | None = option(
        None,
        help="points to price",
        panel=_TUNERS,
        shown="300 of ray and smac, 1000000 of random",
        low=1,
        high=2**32 - 1,
    )
    seed: int = option(0, help="of the tuner's choices", panel=_TUNERS, low=0, high=2**32 - 1)
    ray: str | None = option(
        None, help="Ray cluster to search on: an address, auto, or local", panel=_TUNERS
    )
    ray_search: Literal["optuna", "hyperopt", "random"] = option(
        "optuna", help="search algorithm of Ray Tune", panel=_TUNERS
    )


_OWN = tuple(row.name for row in rows_of(TunerSpec))
_SHARED = ("application", "system", "num-procs", "objective", "compat", "threads", "json")
_QUIET_S = 5.0


def wants_tuner(raw: Mapping[str, Any]) -> bool:
    """Return whether a parsed command line asks for a tuner."""
    return any(name in raw for name in _OWN)


def run_tuner(raw: Mapping[str, Any], rows: Sequence[Row]) -> int:
    """Search the space of a command line, show the best, and return the exit code.

    raw, rows : the parsed options, and those of the command.

    Raises
    ------
    AutoparError: an option or a document is unusable, an extra is missing, or nothing can run.
    """
    from search.closed_form.files import calculon_system, load_application, structure_of
    from search.closed_form.tuners import load_space, tune

    helps = {row.name: row.help for row in rows}
    for name in ("application", "system", "space"):
        if name not in raw:
            raise OptionError(f"--{name} is missing; it takes: {helps[name]}")
    for name in helps:
        if name in raw and name not in (*_OWN, *_SHARED):
            raise OptionError(f"--{name} does not go with --space, whose points the file says")
    values = read_values(rows, raw)
    asked, tuner = make(AskedSpec, values), make(TunerSpec, values)
    files = make(AnswerSpec, values)
    processors = numbers(values["num-procs"]) if "num-procs" in values else (None,)
    if len(processors) > 1:
        raise OptionError("--num-procs: with --space expected one number of processors")
    known = load_application(values["application"])
    built = "gpt" if known.spec is None or asked.compat else structure_of(known.spec)
    result = tune(
        known.application,
        calculon_system(values["system"]),
        load_space(Path(tuner.space), num_procs=processors[0], structure_type=built),
        tuner=tuner.tuner,
        evaluations=tuner.evaluations,
        seed=tuner.seed,
        objective=asked.objective,
        threads=asked.threads,
        compat=asked.compat,
        ray=tuner.ray,
        ray_search=tuner.ray_search,
        progress=_talker(),
    )
    if result.best is None:
        reason, count = next(iter(result.refused.items()))
        raise InfeasibleError(
            f"{tuner.space}: none of {result.evaluations:,} points of {known.name} on "
            f"{values['system']} can run; {count:,} are refused because: {reason}"
        )
    if files.json != "-":
        from autopar.command.show import make_console, print_plain
        from search.report.closed_form import show_tuning

        console = make_console(sys.stdout)
        print_plain(console, f"{known.name} on {values['system']}", style="bold")
        show_tuning(console, result)
    if files.json is not None:
        from search.commands.app import write_answer
        from search.report.closed_form import tuning_document

        write_answer(files.json, tuning_document(result))
    return 0


def _talker() -> Callable[[int, int], None]:
    next_s = time.monotonic() + _QUIET_S

    def progress(done: int, whole: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _QUIET_S
            say(f"{_COMMAND}: {done:,} of {whole:,} evaluations")

    return progress
