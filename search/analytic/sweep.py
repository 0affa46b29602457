"""Questions of the kind "what if": numbers of a document replaced by a range of others."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from autopar.errors import OptionError
from autopar.patterns import nearest_key, validate_document

__all__ = ["MOST", "Axis", "parse_axis", "variants"]

MOST = 10_000
"""Settings of one command, at most."""
_ROUNDING = 1e-9
"""What rounding may lose of the last step of a range, as a share."""
_GRAMMAR = "PATH=RANGE, such as system.networks.0.bandwidth=300:900:x1.5, 1:5:2 or 300,450"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A number of a document, by its path, and the values that it takes."""

    path: str
    values: tuple[float, ...]


def parse_axis(text: str) -> Axis:
    """Return the axis of `PATH=RANGE`.

    A range is a list `a,b,c`, or `a:b:step` with both ends where the steps meet them, or
    `a:b:xF` where each value is F times the one before.

    Raises
    ------
    OptionError: the text is none of these, or a range has no end.
    """
    path, equals, words = text.partition("=")
    if not equals or not path.strip() or not words.strip():
        raise OptionError(f"--sweep: expected {_GRAMMAR}, got {text!r:.80}")
    if ":" not in words:
        values = [_number(word, text) for word in words.split(",")]
    else:
        parts = words.split(":")
        if len(parts) != 3:
            raise OptionError(f"--sweep: expected {_GRAMMAR}, got {text!r:.80}")
        first, last = _number(parts[0], text), _number(parts[1], text)
        factor = parts[2].strip().startswith("x")
        step = _number(parts[2].strip().removeprefix("x"), text)
        values = _range(first, last, step, factor=factor, text=text)
    return Axis(path=path.strip(), values=tuple(dict.fromkeys(values)))


def variants(
    documents: Mapping[str, BaseModel], axes: Sequence[Axis]
) -> Iterator[tuple[tuple[float, ...], dict[str, Any]]]:
    """Yield (values, the documents that have them), the last axis fastest; once without axes.

    documents : the first word of a path -> document.

    Raises
    ------
    OptionError: a path leads to no number (names the nearest one), appears twice, or there are
        too many combinations.
    DocumentError: a document cannot have a value.
    """
    plain = {name: document.model_dump() for name, document in documents.items()}
    _check(axes, list(_fields(plain)))
    for values in itertools.product(*(axis.values for axis in axes)):
        changed = copy.deepcopy(plain)
        for axis, value in zip(axes, values, strict=True):
            *folders, last = axis.path.split(".")
            place: Any = changed
            for key in folders:
                place = place[_key(place, key)]
            # a count that is written as 8.0 would be refused, and 2048 is as good a float
            place[_key(place, last)] = int(value) if value.is_integer() else value
        yield (
            values,
            {
                name: validate_document(type(document), Path(f"--sweep: {name}"), changed[name])
                for name, document in documents.items()
            },
        )


def _fields(documents: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of all numbers, and of what is not given and could be one."""

    def walk(path: str, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(f"{path}.{key}", item)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                yield from walk(f"{path}.{place}", item)
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path

    for name, document in documents.items():
        yield from walk(name, document)


def _check(axes: Sequence[Axis], known: list[str]) -> None:
    for place, axis in enumerate(axes):
        if axis.path not in known:
            raise OptionError(
                f"--sweep: {axis.path!r:.80} is no number of the documents; "
                f"the nearest one is {nearest_key(axis.path, known)!r}"
            )
        if axis.path in (other.path for other in axes[:place]):
            raise OptionError(f"--sweep: {axis.path} is given twice; give one list of values")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST:
        raise OptionError(f"--sweep: the ranges have {count} combinations, expected {MOST} at most")


def _key(place: Any, key: str) -> Any:
    return int(key) if isinstance(place, list) else key


def _number(word: str, text: str) -> float:
    word = word.strip()
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or re.search("[^0-9eE.+-]", word):
        raise OptionError(f"--sweep: {word!r:.40} of {text!r:.80} is not a number")
    return value


def _range(first: float, last: float, step: float, *, factor: bool, text: str) -> list[float]:
    upwards = last >= first
    if factor:
        moves = step > 1 if upwards else 0 < step < 1
        endless = not moves or first <= 0 or last <= 0
    else:
        endless = step == 0 or (step > 0) != upwards
    if endless:
        way = "up" if upwards else "down"
        raise OptionError(
            f"--sweep: {text!r:.80} never ends; its step does not lead {way} to {last:g}"
        )
    if factor:
        count = math.floor(math.log(last / first) / math.log(step) + _ROUNDING)
    else:
        count = math.floor((last - first) / step + _ROUNDING)
    if count >= MOST:
        raise OptionError(f"--sweep: {text!r:.80} has {count + 1} values, expected {MOST} at most")
    steps = range(count + 1)
    values = [first * step**n if factor else first + step * n for n in steps]
    return [float(f"{value:.12g}") for value in values]
