"""Arguments of a launch command, with checked lookups and a record of the flags looked up.

The reader of each engine interprets the words of a flag. `autopar check` reports flags that the
reader did not look up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from autopar.errors import DocumentError
from autopar.records import Record, shorten
from autopar.run.rules import Estimate
from search.engines.megatron.arguments import SEVERAL
from search.engines.text import flags_of_document


class UnpricedError(DocumentError):
    """Error for a run that may be valid, but whose time or memory cannot be estimated."""


class MissingError(DocumentError):
    """Error for an argument that a run needs and its file does not contain."""


BOTH: tuple[Estimate, ...] = ("memory", "time")
"""Estimates that an argument of unknown effect may change."""
_OFF = ("", "0", "0.0", "-1", "false", "no", "none", "null", "auto")
"""Values, in lower case, with which most settings are off."""


class Unpriced(NamedTuple):
    """Row of a key table: a setting that changes memory or time and has no formula."""

    why: str
    """Reason, the rest of a sentence that begins with the setting."""
    changes: tuple[Estimate, ...] = BOTH
    off: tuple[str, ...] = _OFF
    """Values, in lower case, with which the setting has no effect."""

    def is_off(self, words: Sequence[str]) -> bool:
        """Return True if the words of the setting leave it without effect."""
        return bool(words) and " ".join(words).lower() in self.off


class Ignored(Record):
    """Argument that the reader did not use."""

    flag: str
    value: str
    understood: bool
    """True if the argument is known to change neither memory nor time."""
    concern: str | None = None
    """Topic of the argument, such as `checkpoints`, or the reason why it is not priced; None:
    unknown argument."""
    changes: tuple[Estimate, ...] = BOTH
    """Estimates that the argument may change, if it is not understood."""


def variables_of(environment: Mapping[str, str], pattern: str, known: str) -> Iterator[Ignored]:
    """Yield the environment variables of an engine; those of other programs have no effect.

    pattern : pattern of the names that the engine reads. known : pattern of the names that are read
    here, or that change neither memory nor time.
    """
    for name, value in sorted(environment.items()):
        if re.fullmatch(pattern, name):
            understood = re.fullmatch(known, name) is not None
            yield Ignored(flag=name, value=value, understood=understood)


def spelled_variable(flag: str, value: str | None) -> str | None:
    """Return an environment variable as in a script; None if the name is that of an argument."""
    return None if not flag.isupper() else flag if value is None else f"{flag}={value}"


_NONE_AT_ZERO = frozenset({"mtp-num-layers", "num-experts"})
"""Flags for which a value of 0 means that the model does not have the feature."""


class LaunchArguments(Record):
    """Words by flag, without leading hyphens, and the set of flags that were looked up."""

    source: str
    """Name of the source, for error messages."""
    words: Mapping[str, tuple[str, ...]]
    asked: set[str]
    """Flags that were looked up; the methods below fill it."""

    def fail(self, flag: str, problem: str, remedy: str | None = None) -> DocumentError:
        """Return the error for a flag with an invalid value; one with a shell variable is open."""
        given = " ".join(self.words.get(flag, ()))
        if is_open(given):
            return self.unpriced(flag, f"is {shorten(given)}", "Give the value")
        return DocumentError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def missing(self, flag: str, remedy: str) -> MissingError:
        """Return the error for a flag that is needed and not given."""
        return MissingError(self.source, "this key is missing", key=f"--{flag}", remedy=remedy)

    def unpriced(self, flag: str, problem: str, remedy: str) -> UnpricedError:
        """Return the error for a valid flag whose effect on time or memory cannot be estimated."""
        return UnpricedError(self.source, problem, key=f"--{flag}", remedy=remedy)

    def has(self, flag: str) -> bool:
        """Return True if a flag is given."""
        self.asked.add(flag)
        return flag in self.words

    def open_text(self, flag: str) -> str:
        """Return the words of a flag, which may contain shell variables; empty: flag not given."""
        self.asked.add(flag)
        return " ".join(self.words.get(flag, ()))

    def list(self, flag: str) -> tuple[str, ...]:
        """Return the words of a flag, with lists such as `[a b]` split; empty: flag not given.

        Raises UnpricedError for a shell variable.
        """
        text = self.open_text(flag)
        if is_open(text):
            raise self.fail(flag, "")
        return tuple(re.sub(r"[\[\],]", " ", text).split())

    def text(self, flag: str, default: str = "") -> str:
        """Return the single word of a flag.

        Raises DocumentError for several words, UnpricedError for a shell variable.
        """
        text = self.open_text(flag)
        if flag not in self.words:
            return default
        if len(self.words[flag]) != 1 or is_open(text):
            raise self.fail(flag, f"expected one value, got {shorten(text)}")
        return text

    def choice(self, flag: str, known: tuple[str, ...], default: str) -> str:
        """Return the word of a flag, or `default` if the flag is not given.

        Raises DocumentError for a word not in `known`, or UnpricedError for a shell variable.
        """
        found = self.text(flag, default)
        if found not in known:
            raise self.fail(
                flag, f"expected one of {', '.join(filter(None, known))}, got {shorten(found)}"
            )
        return found

    def number(
        self, flag: str, default: int | None = None, *, most: int | None = None, digits: int = 9
    ) -> int:
        """Return the positive integer of a flag, or `default` if the flag is not given.

        default : None requires the flag.
        most : maximum value.
        digits : maximum number of digits.

        Raises MissingError, DocumentError for an invalid value, UnpricedError for a shell variable.
        """
        if not self.has(flag):
            if default is None:
                raise self.missing(flag, "Add it")
            return default
        found = self._whole(flag, self.text(flag), digits)
        if most is not None and found > most:
            raise self.fail(flag, f"expected at most {most}, got {found}")
        return found

    def numbers(self, flag: str) -> tuple[int, ...]:
        """Return the positive integers of a flag; empty: flag not given."""
        return tuple(self._whole(flag, word) for word in self.list(flag))

    def real(self, flag: str, default: float, *, most: float = math.inf) -> float:
        """Return the finite number >= 0 of a flag, or `default` if the flag is not given.

        most : maximum value.

        Raises DocumentError for other values, or UnpricedError for a shell variable.
        """
        text = self.text(flag, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 <= value <= most and math.isfinite(value)):
            bound = f" and at most {most:g}" if math.isfinite(most) else ""
            raise self.fail(flag, f"expected a number of at least 0{bound}, got {shorten(text)}")
        return value

    def ignored(
        self,
        changes_of: Callable[[str], tuple[Estimate, ...]],
        concern_of: Callable[[str], str | None],
    ) -> tuple[Ignored, ...]:
        """Return the flags that were not looked up, sorted by name.

        changes_of : returns the estimates that a flag may change.
        concern_of : returns the topic of a flag.
        """
        return tuple(
            Ignored(
                flag=flag,
                value=" ".join(self.words[flag]),
                understood=not changes_of(flag),
                concern=concern_of(flag),
                changes=changes_of(flag),
            )
            for flag in sorted(self.words)
            if flag not in self.asked
        )

    def _whole(self, flag: str, text: str, digits: int = 9) -> int:
        # The length is checked before int(), which rejects thousands of digits.
        if not (text.isascii() and text.isdigit() and len(text) <= digits and int(text) > 0):
            raise self.fail(flag, f"expected a positive integer, got {shorten(text)}")
        return int(text)


def is_open(text: str) -> bool:
    """Return True if a text contains a shell variable or command, so that its value is unknown."""
    return "$" in text or "`" in text


def words_of(document: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the words by flag of a mapping of arguments, such as the content of a YAML file.

    Flags of `_NONE_AT_ZERO` with the value 0 are omitted.
    """
    return {
        flag: words
        for flag, words in flags_of_document(document, several=SEVERAL).items()
        if not (flag in _NONE_AT_ZERO and words == ("0",))
    }
