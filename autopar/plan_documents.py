"""The JSON side of plan files: writing, reading, and the version of our own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten, write_text

__all__ = [
    "PLAN_FILE_FORMAT",
    "PLAN_FILE_VERSION",
    "check_version",
    "read_plan_document",
    "write_document",
]

PLAN_FILE_FORMAT = "autopar-plan"
# 1: first version.
PLAN_FILE_VERSION = 1


def write_document(path: Path | str, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically, keys in the given order.

    Raises
    ------
    DocumentError
        When the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        write_text(target, text)
    except OSError as error:
        raise DocumentError(
            target,
            f"cannot be written ({error.strerror or error})",
            remedy="choose another --output-config-path",
        ) from None


def read_plan_document(path: Path | str) -> dict[str, object]:
    """Return the whole content of a plan or strategy file, its JSON and version checked.

    Raises
    ------
    DocumentError
        When the file is missing, is not a JSON object, or was written by a newer version.
    """
    document: dict[str, object] = load_object(path, remedy="autopar-search writes such a file").data
    if "format" in document:
        check_version(path, document)
    return document


def check_version(path: Path | str, document: Mapping[str, object]) -> None:
    """Raise a DocumentError unless a document is a plan file that this release reads."""
    if document.get("format") != PLAN_FILE_FORMAT:
        raise DocumentError(
            path,
            f"expected {PLAN_FILE_FORMAT!r}, got {shorten(document.get('format'))}",
            key="format",
            remedy="give a plan or strategy file",
        )
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DocumentError(
            path, f"expected a positive integer, got {shorten(version)}", key="version"
        )
    if version > PLAN_FILE_VERSION:
        raise DocumentError(
            path,
            f"is {version} and this release reads up to {PLAN_FILE_VERSION}",
            key="version",
            remedy="update autopar or search again",
        )
