"""Finds the documents of the analytic models by name: systems and executions that are shipped."""

from __future__ import annotations

from pathlib import Path

from autopar import catalog
from autopar.jsonio import load_object
from autopar.patterns import validate_document
from search.analytic.calculon.documents import System as CalculonSystem
from search.analytic.tensor2d.documents import System as Tensor2dSystem

__all__ = ["calculon_system", "execution_keys", "tensor2d_system"]


def calculon_system(name: str) -> CalculonSystem:
    """Return the machine of a file, a shipped name, or an alias of its card.

    Raises InputError (DocumentError: file, key, value, remedy).
    """
    path, data = _keys("systems/calculon", "system", name)
    return validate_document(CalculonSystem, path, data)


def tensor2d_system(name: str) -> Tensor2dSystem:
    """Return the machine of a file, a shipped name, or an alias of its card; errors as above."""
    path, data = _keys("systems/tensor2d", "system", name)
    return validate_document(Tensor2dSystem, path, data)


def execution_keys(name: str) -> tuple[Path, dict[str, object]]:
    """Return the path and the keys of an execution, before they are checked."""
    return _keys("executions", "execution", name)


def _keys(folder: str, what: str, name: str) -> tuple[Path, dict[str, object]]:
    path = catalog.find_document(folder, what, name)
    return path, load_object(path).data
