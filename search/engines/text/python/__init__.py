"""Values that a Python file gives to a configuration, found without executing the file.

Callers import from this package; its modules are internal.
"""

from __future__ import annotations

from search.engines.text.python.evaluator import Evaluator, TooLongError
from search.engines.text.python.recipes import BuiltConfiguration, built_by
from search.engines.text.python.values import (
    Class,
    Function,
    Known,
    Lost,
    Method,
    Module,
    Named,
    Section,
    Sets,
    Unknown,
    copied,
    holds_unknown,
    is_python,
)

__all__ = [
    "BuiltConfiguration",
    "Class",
    "Evaluator",
    "Function",
    "Known",
    "Lost",
    "Method",
    "Module",
    "Named",
    "Section",
    "Sets",
    "TooLongError",
    "Unknown",
    "built_by",
    "copied",
    "holds_unknown",
    "is_python",
]
