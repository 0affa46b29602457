"""Values that a Python file gives to a configuration, found without executing the file.

Callers import from this package; its modules are internal.
"""

from __future__ import annotations

from search.engines.text.python.evaluator import Evaluator, TooLongError
from search.engines.text.python.recipes import BuiltConfiguration, built_by
from search.engines.text.python.values import (
    Known,
    Lost,
    Module,
    Named,
    Section,
    Sets,
    Unknown,
    copied,
    holds_unknown,
    is_python,
    unread,
)

__all__ = [
    "BuiltConfiguration",
    "Evaluator",
    "Known",
    "Lost",
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
    "unread",
]
