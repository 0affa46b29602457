"""Arguments of a launch as words: looked up, checked, and counted as understood.

What the words of one trainer mean is another file; here a launch can say what nobody has read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import DocumentError
from autopar.records import Record, shorten
from search.engines.megatron.arguments import SEVERAL
from search.engines.text import flags_of_document


class UnpricedError(DocumentError):
    """A launch that may well run, and has something that nobody here can price."""


class Ignored(Record):
    """An argument that the reading did not need."""

    flag: str
    value: str
    understood: bool
    """It is known to change neither memory nor time."""
    concern: str | None = None
    """What it is about, in a word or two; None: nobody here knows it."""


_NONE_AT_ZERO = frozenset({"mtp-num-layers", "num-experts"})
"""Numbers of what a model need not have, of which 0 says that it has none."""


class LaunchArguments(Record):
    """Words by flag without hyphens in front, and which of them were asked for."""

    source: str
    """What is read, for sentences on what is wrong with it."""
    words: Mapping[str, tuple[str, ...]]
    asked: set[str]
    """Filled by the lookups below."""

    def fail(self, flag: str, problem: str, remedy: str | None = None) -> DocumentError:
        """Return the sentence on an unusable flag."""
        return DocumentError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def unpriced(self, flag: str, problem: str, remedy: str) -> UnpricedError:
        """Return the sentence on a flag that runs and is not priced."""
        return UnpricedError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def has(self, flag: str) -> bool:
        """Return whether a flag is given."""
        self.asked.add(flag)
        return flag in self.words

    def list(self, flag: str) -> tuple[str, ...]:
        """Return the words of a flag, those of `[a b]` apart; none where it is absent."""
        self.asked.add(flag)
        text = " ".join(self.words.get(flag, ()))
        return tuple(re.sub(r"[\[\],]", " ", text).split())

    def text(self, flag: str, default: str = "") -> str:
        """Return the one word of a flag."""
        self.asked.add(flag)
        words = self.words.get(flag)
        if words is None:
            return default
        if len(words) != 1:
            raise self.fail(flag, f"expected one value, got {shorten(' '.join(words))}")
        return words[0]

    def choice(self, flag: str, known: tuple[str, ...], default: str) -> str:
        """Return a word out of the known ones."""
        found = self.text(flag, default)
        if found not in known:
            if is_open(found):
                raise self.unpriced(flag, f"is {shorten(found)}", "write the word to price it")
            raise self.fail(flag, f"expected one of {', '.join(known)}, got {shorten(found)}")
        return found

    def number(
        self, flag: str, default: int | None = None, *, most: int | None = None, digits: int = 9
    ) -> int:
        """Return a positive whole number; raises DocumentError without it and without a default."""
        if not self.has(flag):
            if default is None:
                raise self.fail(flag, "is missing", "add it")
            return default
        found = self._whole(flag, self.text(flag), digits)
        if most is not None and found > most:
            raise self.fail(flag, f"expected at most {most}, got {found}")
        return found

    def numbers(self, flag: str) -> tuple[int, ...]:
        """Return positive whole numbers, none where the flag is absent."""
        return tuple(self._whole(flag, word) for word in self.list(flag))

    def real(self, flag: str, default: float) -> float:
        """Return a finite number that is not negative."""
        text = self.text(flag, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            if is_open(text):
                raise self.unpriced(flag, f"is {shorten(text)}", "write the number to price it")
            raise self.fail(flag, f"expected a number of at least 0, got {shorten(text)}")
        return value

    def ignored(
        self, harmless: Callable[[str], bool], concern_of: Callable[[str], str | None]
    ) -> tuple[Ignored, ...]:
        """Return the flags that were not asked for, in the order of their names.

        harmless : whether a flag changes neither memory nor time. concern_of : what one is about.
        """
        return tuple(
            Ignored(
                flag=flag,
                value=" ".join(self.words[flag]),
                understood=harmless(flag),
                concern=concern_of(flag),
            )
            for flag in sorted(self.words)
            if flag not in self.asked
        )

    def _whole(self, flag: str, text: str, digits: int = 9) -> int:
        # short before int(), which refuses thousands of digits
        if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text) > 0):
            if is_open(text):
                raise self.unpriced(flag, f"is {shorten(text)}", "write the number to price it")
            raise self.fail(flag, f"expected a positive integer, got {shorten(text)}")
        return int(text)


def is_open(text: str) -> bool:
    """Return whether only a running machine tells what stands here: a variable, a command."""
    return "$" in text or "`" in text


def words_of(document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a document of arguments, but those whose 0 says that there is none."""
    return {
        flag: words
        for flag, words in flags_of_document(document, several=SEVERAL).items()
        if not (flag in _NONE_AT_ZERO and words == ("0",))
    }
