"""The JSON side of plan files: atomic writing, careful reading, and the version check."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from autopar.errors import DocumentError

__all__ = [
    "PLAN_FILE_FORMAT",
    "PLAN_FILE_VERSION",
    "check_version",
    "read_plan_document",
    "shown",
    "write_document",
]

PLAN_FILE_FORMAT = "autopar-plan"
# 1: first version.
PLAN_FILE_VERSION = 1


def write_document(path: Path | str, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically; numbers that are not finite are refused.

    Raises
    ------
    DocumentError
        When the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # mkstemp makes files private; a plan is meant to be shared like any other output.
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(0o666 & ~umask)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise DocumentError(
            target,
            f"cannot be written ({error.strerror or error})",
            remedy="choose another --output-config-path",
        ) from error


def read_plan_document(path: Path | str) -> dict[str, object]:
    """Return the whole content of a plan or strategy file, its JSON and version checked.

    Raises
    ------
    DocumentError
        When the file is missing, is not a JSON object, or was written by a newer version.
    """
    source = Path(path)
    try:
        text = source.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise DocumentError(source, "is a directory", remedy="name the plan file in it") from None
    except FileNotFoundError:
        raise DocumentError(
            source, "does not exist", remedy="autopar-search writes such a file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DocumentError(source, f"cannot be read ({reason})") from None
    if not text.strip():
        raise DocumentError(source, "is empty", remedy="write the plan again")
    try:
        document = json.loads(text, object_pairs_hook=_refuse_duplicates(source))
    except json.JSONDecodeError as error:
        raise DocumentError(
            source,
            f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}",
            remedy="it may be truncated; write the plan again",
        ) from None
    except RecursionError:
        raise DocumentError(source, "is nested too deeply to be a plan") from None
    except ValueError:
        # The only other ValueError of json: an integer of thousands of digits.
        raise DocumentError(source, "holds a number with too many digits") from None
    if not isinstance(document, dict):
        raise DocumentError(
            source, f"expected a JSON object, got {shown(document)}", remedy="give a plan file"
        )
    if document.get("format") == PLAN_FILE_FORMAT or "format" in document:
        check_version(source, document)
    return document


def check_version(path: Path | str, document: Mapping[str, object]) -> None:
    """Raise a DocumentError unless a document is a plan file that this release reads."""
    if document.get("format") != PLAN_FILE_FORMAT:
        raise DocumentError(
            path,
            f"expected {PLAN_FILE_FORMAT!r}, got {shown(document.get('format'))}",
            key="format",
            remedy="give a plan or strategy file",
        )
    version = document.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise DocumentError(
            path, f"expected a positive integer, got {shown(version)}", key="version"
        )
    if version > PLAN_FILE_VERSION:
        raise DocumentError(
            path,
            f"is {version} and this release reads up to {PLAN_FILE_VERSION}",
            key="version",
            remedy="update autopar or search again",
        )


def _refuse_duplicates(
    path: Path,
) -> Callable[[list[tuple[str, object]]], dict[str, object]]:
    def hook(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result: dict[str, object] = {}
        for key, value in pairs:
            if key in result:
                raise DocumentError(path, "appears twice", key=key, remedy="keep one")
            result[key] = value
        return result

    return hook


def shown(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
