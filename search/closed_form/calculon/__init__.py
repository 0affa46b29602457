"""Closed-form time and memory of one training step, after Calculon (SC'23)."""

from __future__ import annotations

from autopar.errors import InfeasibleExecution
from search.closed_form.calculon.documents import Application, Execution, System
from search.closed_form.calculon.engine import (
    COMPAT,
    CORRECT,
    EXECUTION,
    OUTCOME,
    Quirks,
    evaluate,
    evaluate_many,
)

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
