"""Checks of option values that both profilers share: a value in, or one sentence on why not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from autopar.documents.json import shorten
from autopar.errors import OptionError

__all__ = ["check_files", "choice", "count", "names", "repetitions", "seconds"]

_MAX_REPETITIONS = 10**6
_MAX_SECONDS = 1e5
_Choice = TypeVar("_Choice")


def check_files(out: Path | None, *, resume: bool, force: bool) -> None:
    """Check where files go and what becomes of those that are there.

    Raises
    ------
    OptionError: `out` is a file, or kept files are to be replaced too.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out: {out} is a file; name a folder")
    if resume and force:
        raise OptionError(
            "--resume keeps what is measured and --force measures it again; give one of them"
        )


def choice(option: str, text: str, choices: Mapping[str, _Choice]) -> _Choice:
    """Return what a word stands for, in upper or lower case.

    Raises
    ------
    OptionError: the word is none of them; names the nearest one.
    """
    value = choices.get(text.lower())
    if value is None:
        near = difflib.get_close_matches(text.lower(), choices, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"{option}: expected {' or '.join(choices)}, got {shorten(text)}{hint}")
    return value


def names(literal: Any) -> dict[str, Any]:
    """Return the words of a `Literal`, each for itself, as `choice` takes them."""
    return {name: name for name in get_args(literal)}


def count(option: str, value: int, most: int, what: str = "") -> int:
    """Return a number that has to be 1 to `most`; `what` is counted.

    Raises
    ------
    OptionError: it is not.
    """
    if not 1 <= value <= most:
        raise OptionError(f"{option}: expected 1 to {most}{what and ' '}{what}, got {value}")
    return value


def repetitions(option: str, value: int) -> int:
    """Return a number of repetitions.

    Raises
    ------
    OptionError: it is below 1 or beyond all reason.
    """
    return count(option, value, _MAX_REPETITIONS, "repetitions")


def seconds(option: str, value: float) -> float:
    """Return a duration, in s.

    Raises
    ------
    OptionError: it is not above 0, not finite or longer than a day.
    """
    if not (math.isfinite(value) and 0 < value <= _MAX_SECONDS):
        raise OptionError(f"{option}: expected seconds above 0 up to {_MAX_SECONDS:g}, got {value}")
    return value
