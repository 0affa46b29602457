"""Tuners for user-defined search spaces of Calculon executions, also too large for exhaustion.

For its fixed space, the search of `search.closed_form.calculon.exploration` is exact and faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.documents.checks import load_document
from autopar.errors import InputError
from search.closed_form import MOST_KEPT, MOST_TOP
from search.closed_form.calculon.documents import Application, System
from search.closed_form.calculon.engine import Quirks
from search.closed_form.native import OBJECTIVES, Objective, check_choice, check_count
from search.closed_form.tuners.packages import (
    LOCAL,
    RAY_SEARCHES,
    price_all_on_ray,
    price_with_ray_tune,
    price_with_smac,
)
from search.closed_form.tuners.tune import (
    Domain,
    Pricer,
    Progress,
    Record,
    TraceStep,
    TuningResult,
    TuningSpace,
    load_space,
    price_range,
    price_sample,
    result_of,
)

__all__ = [
    "EVALUATIONS",
    "RAY_SEARCHES",
    "TUNERS",
    "Domain",
    "TraceStep",
    "TunerName",
    "TuningResult",
    "TuningSpace",
    "load_space",
    "tune",
]

TunerName = Literal["exhaustive", "random", "ray", "smac"]
TUNERS: tuple[TunerName, ...] = ("exhaustive", "random", "ray", "smac")
EVALUATIONS: Mapping[TunerName, int] = {
    "exhaustive": 200_000_000,
    "random": 1_000_000,
    "ray": 300,
    "smac": 300,
}
"""Default number of points to evaluate, which takes one or two minutes in all.

For `exhaustive`, the size of the largest accepted space.
"""


def tune(
    application: Application | Mapping[str, Any] | Path | str,
    system: System | Mapping[str, Any] | Path | str,
    space: TuningSpace | Mapping[str, Any] | Path | str,
    *,
    tuner: TunerName = "exhaustive",
    evaluations: int | None = None,
    seed: int = 0,
    objective: Objective = "rate",
    threads: int = 1,
    compat: bool | Quirks = False,
    top: int = 1,
    ray: str | None = None,
    ray_search: str = "optuna",
    progress: Progress | None = None,
) -> TuningResult:
    """Return the best executions that a tuner finds in a space, and the trace of the tuning.

    evaluations : number of points to evaluate, default `EVALUATIONS`. For `exhaustive`, the maximum
        size of the space.
    seed : equal seeds give equal results for any number of threads. SMAC also needs an equal
        PYTHONHASHSEED.
    top : number of best points to return, without duplicates.
    ray : address of a Ray cluster, or 'local'. It distributes `exhaustive` and runs `ray`, whose
        default is 'local'.
    ray_search : search algorithm of Ray Tune, one of `RAY_SEARCHES`.
    progress : called with the number of evaluated points and of points to evaluate.

    Raises InputError: a document or an argument is invalid, the space is too large for
    `exhaustive`, or no Ray cluster answers. Raises InstallError: the tuner's package is not
    installed.
    """
    for name, value, choices in (
        ("tuner", tuner, TUNERS),
        ("objective", objective, OBJECTIVES),
        ("ray_search", ray_search, tuple(RAY_SEARCHES)),
    ):
        check_choice(name, value, choices)
    count = EVALUATIONS[tuner] if evaluations is None else evaluations
    for name, number, least in (
        ("evaluations", count, 1),
        ("threads", threads, 1),
        ("seed", seed, 0),
    ):
        check_count(name, number, f"an integer of at least {least}", least, 2**32 - 1)
    check_count("top", top, f"1 to {MOST_TOP}", 1, MOST_TOP)
    if ray is not None and tuner not in ("exhaustive", "ray"):
        raise InputError(f"--ray needs --tuner exhaustive or ray, got --tuner {tuner}")
    known = space if isinstance(space, TuningSpace) else load_space(space)
    if tuner == "random" and count > MOST_KEPT:
        raise InputError(
            f"evaluations: the value is {count:,}, but random draws at most {MOST_KEPT:,} points"
        )
    if tuner == "exhaustive" and known.size > count:
        raise InputError(
            f"space: {known.size:,} points, but exhaustive prices at most {count:,}",
            remedy="Shorten its lists, increase --evaluations, or use --tuner random",
        )
    pricer = Pricer(
        application=load_document(Application, application),
        system=load_document(System, system),
        space=known,
        objective=objective,
        compat=compat,
        threads=threads,
        top=top,
    )
    record: Record
    if tuner == "random":
        record = price_sample(pricer, count, seed, progress)
    elif tuner == "smac":
        record = price_with_smac(pricer, count, seed, progress)
    elif tuner == "ray":
        record = price_with_ray_tune(
            pricer, count, seed, search=ray_search, address=ray or LOCAL, progress=progress
        )
    elif ray is not None:
        record = price_all_on_ray(pricer, ray, progress)
    else:
        record = price_range(pricer, 0, known.size, progress)
    return result_of(tuner, objective, known, record)
