"""What the switches of a quirks table are documented to do, for reports."""

from __future__ import annotations

import ast
import inspect
from typing import Any

__all__ = ["quirk_texts"]


def quirk_texts(quirks: type[Any]) -> dict[str, str]:
    """Return switch -> its documentation, which begins with its number (`B1: ...`).

    The text stands below the field, where the tables of both models keep it.
    """
    (table,) = ast.parse(inspect.getsource(quirks)).body
    assert isinstance(table, ast.ClassDef)
    found: dict[str, str] = {}
    name = ""
    for node in table.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and name and isinstance(node.value, ast.Constant):
            found[name] = " ".join(str(node.value.value).split())
    return found
