"""`autopar-explore calculon --tuner NAME --space FILE`: spaces that a user writes down."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InfeasibleError, OptionError
from search.cli_options import OptionRow
from search.commands.app import talk

__all__ = ["TUNER_ROWS", "run_tuner", "wants_tuner"]

_COMMAND, _TUNERS = "autopar-explore", "Tuners"
TUNER_ROWS = (
    OptionRow(
        "tuner",
        "choice",
        "how to search --space [default: exhaustive]; ray and smac are extras",
        _TUNERS,
        choices=("exhaustive", "random", "ray", "smac"),
    ),
    OptionRow("space", "text", "JSON file: for every field of an execution its values", _TUNERS),
    OptionRow(
        "evaluations",
        "int",
        "points to price [default: 300 of ray and smac, 1000000 of random]",
        _TUNERS,
        low=1,
        high=2**32 - 1,
    ),
    OptionRow("seed", "int", "of the tuner's choices [default: 0]", _TUNERS, low=0, high=2**32 - 1),
    OptionRow("ray", "text", "Ray cluster to search on: an address, auto, or local", _TUNERS),
    OptionRow(
        "ray-search",
        "choice",
        "search algorithm of Ray Tune [default: optuna]",
        _TUNERS,
        choices=("optuna", "hyperopt", "random"),
    ),
)
_OWN = tuple(row.name for row in TUNER_ROWS)
_SHARED = ("application", "system", "num-procs", "objective", "compat", "threads", "json")
_QUIET_S = 5.0


def wants_tuner(raw: Mapping[str, Any]) -> bool:
    """Return whether a parsed command line asks for a tuner."""
    return any(raw[name] is not None for name in _OWN)


def run_tuner(raw: Mapping[str, Any], rows: Sequence[OptionRow]) -> int:
    """Search the space of a command line, show the best, and return the exit code.

    raw, rows : the parsed options, and the table that they are read by.

    Raises
    ------
    AutoparError: an option or a document is unusable, an extra is missing, or nothing can run.
    """
    from search.closed_form.files import calculon_system, load_application, structure_of
    from search.closed_form.tuners import load_space, tune
    from search.commands.explore_session import numbers, read_options, required

    required(raw, ("application", "system", "space"), rows)
    for row in rows:
        given = raw[row.name] if row.kind == "flag" else raw[row.name] not in (None, [])
        if given and row.name not in (*_OWN, *_SHARED):
            raise OptionError(f"--{row.name} does not go with --space, whose points the file says")
    values = read_options(raw, rows)
    processors = numbers(values["num-procs"]) if "num-procs" in values else (None,)
    if len(processors) > 1:
        raise OptionError("--num-procs: with --space expected one number of processors")
    known = load_application(values["application"])
    built = "gpt" if known.spec is None or values["compat"] else structure_of(known.spec)
    result = tune(
        known.application,
        calculon_system(values["system"]),
        load_space(Path(values["space"]), num_procs=processors[0], structure_type=built),
        tuner=values.get("tuner", "exhaustive"),
        evaluations=values.get("evaluations"),
        seed=values.get("seed", 0),
        objective=values.get("objective", "rate"),
        threads=values.get("threads", 1),
        compat=bool(values["compat"]),
        ray=values.get("ray"),
        ray_search=values.get("ray-search", "optuna"),
        progress=_talker(),
    )
    if result.best is None:
        reason, count = next(iter(result.refused.items()))
        raise InfeasibleError(
            f"{values['space']}: none of {result.evaluations:,} points of {known.name} on "
            f"{values['system']} can run; {count:,} are refused because: {reason}"
        )
    if values.get("json") != "-":
        from autopar.command.show import make_console
        from search.report.closed_form import show_tuning
        from search.report.plan import print_line

        console = make_console(sys.stdout)
        print_line(console, f"{known.name} on {values['system']}", style="bold")
        show_tuning(console, result)
    if "json" in values:
        from search.commands.estimate import write_answer
        from search.report.closed_form import tuning_document

        write_answer(values["json"], tuning_document(result))
    return 0


def _talker() -> Callable[[int, int], None]:
    next_s = time.monotonic() + _QUIET_S

    def progress(done: int, whole: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _QUIET_S
            talk(f"{_COMMAND}: {done:,} of {whole:,} evaluations")

    return progress
