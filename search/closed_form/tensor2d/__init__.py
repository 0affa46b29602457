"""tensor2d: closed-form time and memory of a step with one- or two-dimensional tensor parallelism.

Source: arXiv 2410.00273.
"""

from __future__ import annotations

from autopar.errors import InfeasibleExecution
from search.closed_form.native import Objective
from search.closed_form.tensor2d.documents import STRATEGIES, Attention, Model, Strategy, System
from search.closed_form.tensor2d.engine import (
    CANDIDATE,
    COMPAT,
    CORRECT,
    OUTCOME,
    Quirks,
    evaluate,
    evaluate_many,
)
from search.closed_form.tensor2d.exploration import explore, survey

__all__ = [
    "CANDIDATE",
    "COMPAT",
    "CORRECT",
    "OUTCOME",
    "STRATEGIES",
    "Attention",
    "InfeasibleExecution",
    "Model",
    "Objective",
    "Quirks",
    "Strategy",
    "System",
    "evaluate",
    "evaluate_many",
    "explore",
    "survey",
]
