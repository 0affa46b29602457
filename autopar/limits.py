"""Limits of files from users, checked before or while a parser expands them.

A short text can stand for gigabytes of values or minutes of parsing: aliases of aliases, dotted
keys, numbers of many digits. All readers of JSON, YAML and TOML share these limits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError, nearest

MOST_DOCUMENT_BYTES = 64 << 20
"""Maximum size of a JSON document."""
MOST_SCRIPT_BYTES = 4 << 20
"""Maximum size of a launch script or a TOML file."""
MOST_YAML_BYTES = 256 << 10
"""Maximum size of a YAML file, which PyYAML parses in about 15 CPU seconds per MiB."""
MOST_DOCUMENT_VALUES = 1 << 21
"""Maximum number of commas and opening brackets of a JSON document, about one for each value."""
MOST_ALIASED_VALUES = 1 << 16
"""Maximum number of values of a YAML file after its aliases and merged keys are resolved."""
MOST_WORDS = 1 << 22
"""Maximum vocabulary of a model, four times the largest published one."""
DEEPEST = 64
"""Maximum nesting of brackets or keys; no document has a dozen levels."""
MOST_DIGITS = 4300
"""Maximum number of digits of an integer; Python converts no more to text."""
_LONG = 10**MOST_DIGITS
_DIGITS = re.compile(rf"(?<![0-9_])[0-9][0-9_]{{{MOST_DIGITS},}}+")
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+"""
# Without a look behind, the search would begin again at each character of a part.
_DOTTED = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:\.[ \t]*+{_PART})++(?=[=\]])")


def read_bytes(path: Path, most: int, expected: str, *, remedy: str | None = None) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes.

    expected : kind of file, such as `a JSON file`. remedy : how to create it, for its errors.

    Raises DocumentError.
    """
    try:
        if not path.exists():
            raise missing_file(path, remedy)
        if path.is_dir():
            inside = min(path.glob("*.json"), default=None) if "JSON" in expected else None
            raise DocumentError(
                path,
                f"this is a directory, expected {expected}",
                remedy=f"Use a file in it, such as {inside}"
                if inside
                else f"Give the path of {expected}",
            )
        if not path.is_file():
            raise DocumentError(path, f"this is not a regular file, expected {expected}")
        if path.stat().st_size > most:
            size = f"{most >> 20} MiB" if most >> 20 else f"{most >> 10} KiB"
            raise DocumentError(path, f"the file is larger than {size}, expected {expected}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(path, f"the file cannot be read ({reason})") from None


def missing_file(path: Path, remedy: str | None = None) -> DocumentError:
    """Return the error for a missing file: the remedy is a file with a similar name, if any.

    remedy : remedy if there is no such file
    """
    try:
        names = [one.name for one in path.parent.iterdir() if one.is_file()]
    except OSError:
        names = []
    near = nearest(path.name, names, least=0.85)
    if near is not None:
        remedy = f"Did you mean {path.parent / near}?"
    return DocumentError(path, "this file does not exist", remedy=remedy)


def refuse_many_values(path: Path, raw: bytes) -> None:
    """Raise DocumentError if a JSON text has too many values to be parsed in memory."""
    number = sum(map(raw.count, (b",", b"[", b"{")))
    if number > MOST_DOCUMENT_VALUES:
        raise DocumentError(
            path, f"has {number:,} commas and brackets, expected at most {MOST_DOCUMENT_VALUES:,}"
        )


def refuse_dotted_keys(path: Path, text: str) -> None:
    """Raise DocumentError for a dotted TOML key of more than `DEEPEST` parts.

    Parsers take memory quadratic in the number of parts.
    """
    for found in _DOTTED.finditer(text):
        parts = found[0].count(".") + 1
        if parts > DEEPEST:
            line = text.count("\n", 0, found.start()) + 1
            raise DocumentError(
                path, f"line {line} has a key of {parts:,} parts, expected at most {DEEPEST}"
            )


def too_many_digits(path: Path, text: str) -> DocumentError:
    """Return the error for a text whose parser refused an integer because of its length."""
    found = _DIGITS.search(text)
    if found is None:
        return DocumentError(path, f"has an integer of more than {MOST_DIGITS:,} digits")
    line = text.count("\n", 0, found.start()) + 1
    digits = len(found[0].replace("_", ""))
    return DocumentError(
        path, f"line {line} has an integer of {digits:,} digits, expected at most {MOST_DIGITS:,}"
    )


def refuse_deep_values(path: Path, data: object) -> None:
    """Raise DocumentError for brackets nested deeper than `DEEPEST`: readers recurse for each."""
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return
    raise DocumentError(path, f"brackets nest deeper than {DEEPEST}, expected a document")


def refuse_long_integers(path: Path, data: object, key: str = "") -> None:
    """Raise DocumentError for an integer of more than `MOST_DIGITS` digits, such as `0xfff...`."""
    if isinstance(data, dict):
        for name, item in data.items():
            refuse_long_integers(path, item, f"{key}.{name}" if key else name)
    elif isinstance(data, list):
        for place, item in enumerate(data):
            refuse_long_integers(path, item, f"{key}[{place}]")
    elif is_long_integer(data):
        raise DocumentError(
            path, f"the value is an integer of more than {MOST_DIGITS:,} digits", key=key
        )


def is_long_integer(value: object) -> bool:
    """Return True for an integer of more than `MOST_DIGITS` digits."""
    return type(value) is int and abs(value) >= _LONG
