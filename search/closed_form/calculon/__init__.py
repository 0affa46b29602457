"""Time and memory of one training step in closed form, after Calculon (SC'23)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution
from search.closed_form.calculon.documents import Application, Execution, System
from search.closed_form.calculon.engine import (
    COMPAT,
    CORRECT,
    EXECUTION,
    OUTCOME,
    REASONS,
    Quirks,
    evaluate_one,
    open_model,
    pack_executions,
)
from search.closed_form.native import check_threads

__all__ = [
    "COMPAT",
    "CORRECT",
    "EXECUTION",
    "OUTCOME",
    "Application",
    "Execution",
    "InfeasibleExecution",
    "Quirks",
    "System",
    "evaluate",
    "evaluate_many",
]


def evaluate(
    application: Application | Mapping[str, Any] | Path | str,
    execution: Execution | Mapping[str, Any] | Path | str,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return the statistics of one execution by name, in seconds, bytes and FLOP.

    compat : True for the published figures with their defects, or the defects to keep.
    layers : add a row per operation of a block, under `layers`.

    Raises
    ------
    InputError: a document is unusable.
    InfeasibleExecution: the execution cannot run; its `reason` says why.
    """
    a = load_document(Application, application)
    x = load_document(Execution, execution)
    s = load_document(System, system)
    return evaluate_one(a, x, s, compat, layers=layers)


def evaluate_many(
    application: Application | Mapping[str, Any] | Path | str,
    executions: NDArray[Any] | Mapping[str, Any] | Iterable[Execution | Mapping[str, Any]],
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    threads: int = 1,
) -> NDArray[Any]:
    """Return what is known of many executions, as a structured array in their order.

    executions : an array of `EXECUTION`, columns by field name, or one document each.
    threads : of the compiled engine, 1 to 1024; answers do not depend on their number.

    Fields: `ok`, `reason` (a sentence without figures, empty where it runs), `total_time_s`,
    `tier1_bytes`, `tier2_bytes` and `sample_rate_per_s`.

    Raises
    ------
    InputError: a document or a column is unusable.
    """
    check_threads(threads)
    a = load_document(Application, application)
    s = load_document(System, system)
    packed = pack_executions(executions)
    found, _ = open_model(a, s, compat).evaluate_many(packed, threads, False)
    result = np.zeros(found.shape, dtype=OUTCOME)  # empty fills objects one by one
    for name in ("total_time_s", "tier1_bytes", "tier2_bytes", "sample_rate_per_s"):
        result[name] = found[name]
    result["ok"] = found["ok"]
    result["reason"] = _TEXTS[found["reason"]]
    return result


_TEXTS = np.array(REASONS, dtype=object)
