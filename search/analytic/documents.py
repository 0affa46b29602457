"""Reads the documents of the analytic models: from keys, or from a JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from autopar.errors import InputError
from autopar.jsonio import load_object, shorten
from autopar.patterns import validate_document

__all__ = ["load_document"]

_Document = TypeVar("_Document", bound=BaseModel)


def load_document(
    kind: type[_Document], source: _Document | Mapping[str, Any] | Path | str
) -> _Document:
    """Return a document from itself, its keys, or a JSON file.

    Raises
    ------
    DocumentError: names the file (or the kind of document), the key, its value and the remedy.
    """
    if isinstance(source, kind):
        return source
    if isinstance(source, Mapping):
        return validate_document(kind, Path(kind.__name__.lower()), dict(source))
    if isinstance(source, str | Path):
        return validate_document(kind, Path(source), load_object(Path(source)).data)
    raise InputError(f"{kind.__name__.lower()}: the value is {shorten(source)}, expected an object")
