"""Values of a configuration document by dotted key, with a record of the keys looked up.

Documents are TOML, JSON or YAML with sections; `search.engines.arguments` does the same for
command-line arguments. The reader of each engine interprets the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import DocumentError
from autopar.records import Record, shorten
from search.engines.arguments import Ignored, UnpricedError

_MOST = 10**9
"""Largest accepted integer, above any real size or degree."""


def flattened(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is not a section.

    before : prefix of the keys, with its dot.
    """
    for key, value in document.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def words_of_values(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return command-line words by key: `true` or `false` of a boolean, one word per list item."""
    return {key: _words(value) for key, value in values.items()}


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(str(item) for item in value)
    if isinstance(value, bool):
        return ("true" if value else "false",)
    return (str(value),)


class Keys(Record):
    """Values by dotted key, with checked lookups."""

    source: str
    """Name of the source, for error messages."""
    values: Mapping[str, Any]
    asked: set[str]
    """Keys that were looked up; the methods below fill it."""

    def fail(self, key: str, problem: str, remedy: str | None = None) -> DocumentError:
        """Return the error for an invalid or missing value."""
        return DocumentError(self.source, problem, key=key, remedy=remedy)

    def unpriced(self, key: str, problem: str, remedy: str) -> UnpricedError:
        """Return the error for a valid key whose effect on time or memory cannot be estimated."""
        return UnpricedError(self.source, problem, key=key, remedy=remedy)

    def has(self, *keys: str) -> bool:
        """Return whether any of the keys is given."""
        self.asked.update(keys)
        return any(self.values.get(key) is not None for key in keys)

    def first(self, *keys: str) -> str:
        """Return the first given key among the names of a setting; the last name if none is."""
        self.asked.update(keys)
        return next((key for key in keys if self.values.get(key) is not None), keys[-1])

    def number(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return the integer of a key.

        default : value if the key is missing; None: the key is required. least : minimum value.

        Raises DocumentError for other values, and for a missing key without default.
        """
        value = self.values.get(key)
        self.asked.add(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing", "Add it")
            return default
        whole = isinstance(value, int) and not isinstance(value, bool)
        if isinstance(value, float) and value.is_integer():
            value, whole = int(value), True
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
            value, whole = int(value), True
        if not whole or not least <= value <= _MOST:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.fail(key, f"expected {kind}, got {shorten(str(value))}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean of a key, `default` if it is missing.

        Raises DocumentError for values other than true and false.
        """
        value = self.values.get(key)
        self.asked.add(key)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, got {shorten(str(value))}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return the value of a key as text, with list items joined by commas."""
        value = self.values.get(key)
        self.asked.add(key)
        return default if value is None else ",".join(_words(value))

    def choice(self, key: str, known: tuple[str, ...], default: str) -> str:
        """Return the text of a key, `default` if it is missing.

        Raises DocumentError for a text that is not in `known`.
        """
        found = self.text(key, default)
        if found not in known:
            raise self.fail(key, f"expected one of {', '.join(known)}, got {shorten(found)}")
        return found

    def ignored(self, harmless: frozenset[str], known: frozenset[str]) -> tuple[Ignored, ...]:
        """Return the keys that were not looked up, sorted by name.

        harmless : sections and keys that never change memory or time. known : keys that can change
        them, but not in this run.
        """
        return tuple(
            Ignored(
                flag=key,
                value=" ".join(_words(value)),
                understood=key in harmless or key.partition(".")[0] in harmless or key in known,
            )
            for key, value in sorted(self.values.items())
            if key not in self.asked and value is not None
        )
