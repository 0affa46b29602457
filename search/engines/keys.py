"""Values of a configuration document by dotted key, with a record of the keys looked up.

Documents are TOML, JSON or YAML with sections; `search.engines.arguments` does the same for
command-line arguments. The reader of each engine interprets the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from autopar.errors import DocumentError
from autopar.records import Record, shorten
from search.engines.arguments import BOTH, Ignored, Unpriced, UnpricedError

_MOST = 10**9
"""Largest accepted integer, above any real size or degree."""
_DIGITS = 18
"""Most digits of a number that is text."""


def whole(value: object) -> int | None:
    """Return a number of a document as an integer: 3, 3.0 or "3"; None for other values."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        text = value.removeprefix("-")
        known = text.isascii() and text.isdigit() and len(text) <= _DIGITS
        return int(value) if known else None
    return value if isinstance(value, int) else None


def flattened(document: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is not a section.

    before : prefix of the keys, with its dot.
    """
    for key, value in document.items():
        name = f"{before}{key}"
        # An empty object may replace a value.
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def sections_of(key: str) -> list[str]:
    """Return the dotted keys of all sections around a key, the outermost first."""
    parts = key.split(".")
    return [".".join(parts[:number]) for number in range(1, len(parts))]


def words_of_values(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return command-line words by key: `true` or `false` of a boolean, one word per list item."""
    return {key: _words(value) for key, value in values.items() if not isinstance(value, Mapping)}


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        return tuple(str(item) for item in value)
    if isinstance(value, bool):
        return ("true" if value else "false",)
    return (str(value),)


class Keys(Record, dict=True):
    """Values by dotted key, with checked lookups.

    All lookups raise DocumentError for a value in place of a section, such as `7` in place of
    `{"stage": 2}`. Lookups of values raise it also for a section in place of a value.
    """

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

    @cached_property
    def _sections(self) -> frozenset[str]:
        """Dotted keys of all objects that have keys."""
        return frozenset(before for key in self.values for before in sections_of(key))

    def _given(self, key: str, *, section: bool = False) -> Any:
        """Return the value of a key, None if it is missing.

        section : True if the key may also be a section.
        """
        self.asked.add(key)
        for before in sections_of(key):
            value = self.values.get(before)
            if isinstance(value, bool):
                problem = f"is {str(value).lower()}, expected an object"
                raise self.unpriced(before, problem, "Give its keys")
            if value is not None and not isinstance(value, Mapping):
                raise self.fail(before, f"expected an object, got {shorten(value)}")
        value = self.values.get(key)
        if not section and (isinstance(value, Mapping) or key in self._sections):
            raise self.fail(key, "expected a value, got an object")
        return value

    def has(self, *keys: str) -> bool:
        """Return True if any of the keys is given."""
        found = [self._given(key, section=True) for key in keys]
        return any(value is not None for value in found)

    def first(self, *keys: str) -> str:
        """Return the first given key among the names of a setting; the last name if none is."""
        given = [key for key in keys if self._given(key, section=True) is not None]
        return given[0] if given else keys[-1]

    def number(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """Return the integer of a key.

        default : value if the key is missing; None: the key is required. least, most : range.

        Raises DocumentError for other values, and for a missing key without default.
        """
        value = self._given(key)
        if value is None:
            if default is None:
                raise self.fail(key, "this key is missing", "Add it")
            return default
        number = whole(value)
        if number is None or not least <= number <= most:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise self.fail(key, f"expected {kind}, got {shorten(str(value))}")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean of a key, `default` if it is missing.

        Raises DocumentError for values other than true and false.
        """
        value = self._given(key)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, got {shorten(str(value))}")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return the value of a key as text, with list items joined by commas."""
        value = self._given(key)
        return default if value is None else ",".join(_words(value))

    def choice(self, key: str, known: tuple[str, ...], default: str) -> str:
        """Return the text of a key, `default` if it is missing.

        Raises DocumentError for a text that is not in `known`.
        """
        found = self.text(key, default)
        if found not in known:
            raise self.fail(
                key, f"expected one of {', '.join(filter(None, known))}, got {shorten(found)}"
            )
        return found

    def ignored(
        self,
        harmless: frozenset[str],
        known: frozenset[str],
        unpriced: Mapping[str, Unpriced] | None = None,
    ) -> tuple[Ignored, ...]:
        """Return the keys that were not looked up, sorted by name.

        harmless : sections and keys that never change memory or time. known : keys that can change
        them, but not in this run. unpriced : keys with an effect and without a price, which may be
        in sections that are harmless otherwise.
        """
        rows = {} if unpriced is None else unpriced
        found = []
        for key, value in sorted(self.values.items()):
            if key in self.asked or value is None or isinstance(value, Mapping):
                continue
            words, row = _words(value), rows.get(key)
            understood = key in known or not harmless.isdisjoint((key, *sections_of(key)))
            # Such keys are comments.
            understood |= key.startswith("_")
            if row is not None:
                understood = row.is_off(words)
            found.append(
                Ignored(
                    flag=key,
                    value=" ".join(words),
                    understood=understood,
                    concern=None if row is None else row.why,
                    changes=BOTH if row is None else row.changes,
                )
            )
        return tuple(found)
