"""Answers of limited length: details are omitted in a fixed order, and a notice names them.

What remains is a usable answer: `explain` and `compare` accept it as a plan.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autopar.command.answers import HEAD
from autopar.command.tools.arguments import FULL, RefusedError
from autopar.errors import did_you_mean, shortened

LIMIT = 8_000
"""Maximum bytes of an answer in compact JSON without `detail`."""
_DETAILS = (
    *("terms_bytes", "memory_bytes", "time_s", "runs", "search", "throughput", "settings"),
    *("terms_s", "terms_s_per_sample", "stages", "predicted", "plan", "options"),
)
"""Keys omitted while an answer is too long, the first ones first."""
_TABLES = ("models", "cards")
"""Lists with an entry for each name; their last columns are omitted, and no entry."""
_BEST = ("launch", "plan")
"""Keys of the best plan, whose details are omitted last."""
_NEEDED = ("predicted", "plan", "options")
"""Details without which the best plan cannot be read again."""
_TEXT = 200
"""Characters of a text in an answer that is still too long."""


def answer_text(document: Mapping[str, Any], detail: Collection[str] = ()) -> str:
    """Return an answer as compact JSON of at most `LIMIT` bytes, plus the parts asked for.

    A last notice names the omitted keys.

    detail : keys that are never omitted; `full` for all

    Raises RefusedError for a key that the answer does not have.
    """
    if FULL in detail:
        return _written(document)
    names = {name for one in _objects(document) for name in one}
    for name in detail:
        if name not in names:
            hint = did_you_mean(name, names, otherwise="Use 'full', or a key of the answer")
            raise RefusedError(
                "unknown-detail", f"detail: the answer has no {name!r:.60}", remedy=hint
            )
    return _Shortened(document, frozenset(detail)).text


class _Shortened:
    """An answer during the omission of its parts."""

    def __init__(self, document: Mapping[str, Any], kept: frozenset[str]) -> None:
        # Unlike in a copy, no value is in two places.
        self.document: dict[str, Any] = json.loads(_written(document))
        self.kept = kept
        self.omitted: Counter[str] = Counter()
        """Omitted key -> its bytes."""
        asked = (one[name] for one in _objects(document) for name in kept & one.keys())
        self.limit = LIMIT + sum(len(_written(value)) for value in asked)
        whole = {*_BEST, *HEAD, *kept}
        others = [value for key, value in self.document.items() if key not in whole]
        self._drop_details(others)
        self._drop_columns()
        self._drop_entries(spared=HEAD)
        self._drop_details([self.document], spared=_NEEDED)
        self._drop_keys()
        self._cut_texts()
        self._drop_entries()

    @property
    def text(self) -> str:
        """The answer, with a notice about its omitted keys."""
        if not self.omitted:
            return _written(self.document)
        parts = ", ".join(f"{name} ({size} bytes)" for name, size in self.omitted.most_common())
        first = self.omitted.most_common(1)[0][0]
        notice = f"omitted: {parts}. Ask with detail ['{first}'] or 'full' to get them"
        return _written({**self.document, "notices": [*self.document["notices"], notice]})

    @property
    def too_long(self) -> bool:
        """True while more must be omitted."""
        return len(self.text) > self.limit

    def _drop_details(self, roots: list[Any], spared: Collection[str] = ()) -> None:
        for name in _DETAILS:
            if self.too_long and name not in spared:
                for one in list(_objects(roots, self.kept)):
                    self._drop(one, name)

    def _drop(self, owner: dict[str, Any], name: str) -> None:
        value = owner.get(name)
        inside = {key for one in _objects(value) for key in one}
        if value and not self.kept & {name, *inside}:
            self.omitted[name] += len(_written(owner.pop(name)))

    def _drop_columns(self) -> None:
        """Omit the last keys of the entries of a table, except for their names."""
        for table in _TABLES:
            entries = self.document.get(table) or [{}]
            for name in [*entries[0]][:0:-1]:
                if self.too_long and name not in self.kept:
                    gone = [one.pop(name) for one in entries if name in one]
                    self.omitted[name] += len(_written(gone))

    def _drop_entries(self, spared: Collection[str] = ()) -> None:
        """Omit the second half of the longest list, inner lists first."""
        whole = (*_BEST, *spared)
        others = {key: value for key, value in self.document.items() if key not in whole}
        while self.too_long:
            lists = self._lists(others)
            inner = [one for one in lists if not self._lists(one[2])]
            if not inner:
                return
            size, name, longest = max(inner, key=lambda one: one[0])
            del longest[(len(longest) + 1) // 2 :]
            self.omitted[name] += size - len(_written(longest))

    def _lists(self, value: Any) -> list[tuple[int, str, list[Any]]]:
        """Return (bytes, key, list) of the lists of several objects or texts."""
        return [
            (len(_written(found)), name, found)
            for one in _objects(value, self.kept)
            for name, found in one.items()
            if isinstance(found, list) and len(found) > 1 and name not in self.kept
            if isinstance(found[0], dict | str)
        ]

    def _drop_keys(self) -> None:
        """Omit the longest keys at the top."""
        for name in sorted(self.document, key=lambda key: -len(_written(self.document[key]))):
            if self.too_long and name not in (*_BEST, *HEAD):
                self._drop(self.document, name)

    def _cut_texts(self) -> None:
        """Shorten long texts, such as an option of thousands of characters in the question."""
        for name in self.document:
            if self.too_long and name not in (*_BEST, *self.kept):
                before = len(_written(self.document[name]))
                self.document[name] = _with_short_texts(self.document[name])
                self.omitted[name] += before - len(_written(self.document[name]))
        self.omitted += Counter()  # without keys with zero bytes


def _with_short_texts(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value, _TEXT)
    if isinstance(value, dict):
        return {shortened(key, _TEXT): _with_short_texts(one) for key, one in value.items()}
    return [_with_short_texts(one) for one in value] if isinstance(value, list) else value


def _objects(value: Any, whole: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield every object in a JSON value, outer ones first, but none in the keys of `whole`."""
    inner = value if isinstance(value, list) else []
    if isinstance(value, dict):
        yield value
        inner = [one for name, one in value.items() if name not in whole]
    for one in inner:
        yield from _objects(one, whole)


def _written(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
