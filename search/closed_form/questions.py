"""Sweeps, and the common interface of Calculon and tensor2d searches for tables, files and charts.

The search of each model is in its `exploration` module, and result types are in `answers`.
`session` runs searches and writes files. `search.show.closed_form` prints results.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from msgspec import to_builtins
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.documents.json import read_record
from autopar.errors import OptionError, did_you_mean
from autopar.records import Record, replace
from search.closed_form import MOST_SEARCHES, calculon, tensor2d
from search.closed_form.answers import NOBODY, Answer, SearchCallbacks
from search.closed_form.calculon.documents import (
    CHOICES,
    WHOLE_NUMBERS,
)
from search.closed_form.calculon.engine import open_model, statistic_names
from search.closed_form.calculon.exploration import FIGURES, Space, execution_fields, explore
from search.closed_form.native import GO_ON, Objective
from search.closed_form.tensor2d.engine import CANDIDATE, STATISTICS, known_model, native_engine

# --------------------------------------------------------------------------------------------------
# Sweeps: a number in a document is replaced by each value of a range.


_ROUNDING = 1e-9
"""Tolerance for the last step of a range, as a fraction of a step."""
_GRAMMAR = "PATH=RANGE, such as system.networks.0.bandwidth=300:900:x1.5, 1:5:2 or 300,450"


class Axis(Record):
    """One axis of a sweep: the path of a number in a document, and its values."""

    path: str
    values: tuple[float, ...]


def parse_axis(text: str) -> Axis:
    """Return the sweep axis in a text `PATH=RANGE`.

    A range is a list `a,b,c`, an arithmetic range `a:b:step`, or a geometric range `a:b:xF`, in
    which each value is F times the previous one. Ranges include b if a step ends there.

    Raises OptionError: the text has another form, or the range is endless or has too many values.
    """
    path, equals, words = text.partition("=")
    if not equals or not path.strip() or not words.strip():
        raise OptionError(f"--sweep: expected {_GRAMMAR}, got {text!r:.80}")
    if words.count(",") >= MOST_SEARCHES:
        raise OptionError(
            f"--sweep: {text!r:.80} has too many values, expected {MOST_SEARCHES} at most"
        )
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
    # A repeated value is priced once.
    return Axis(path=path.strip(), values=tuple(dict.fromkeys(values)))


def variants(
    documents: Mapping[str, Record], axes: Sequence[Axis]
) -> Iterator[tuple[tuple[float, ...], dict[str, Any]]]:
    """Yield (values, changed documents) for each combination of values; the last axis is innermost.

    Without axes, the unchanged documents are yielded once.
    documents : documents by name, which is the first part of a path.

    Raises OptionError: a path does not lead to a number (the message suggests the nearest one) or
    appears twice, or there are too many combinations. Raises DocumentError: a value is invalid in a
    document.
    """
    plain = {name: to_builtins(document) for name, document in documents.items()}
    _check(axes, list(_fields(plain)))
    for values in itertools.product(*(axis.values for axis in axes)):
        # Values of one combination must not remain in the next.
        changed = copy.deepcopy(plain)
        for axis, value in zip(axes, values, strict=True):
            *folders, last = axis.path.split(".")
            place: Any = changed
            for key in folders:
                place = place[_key(place, key)]
            # A count written as 8.0 would be refused, while the int 2048 is also a valid float.
            place[_key(place, last)] = int(value) if value.is_integer() else value
        yield (
            values,
            {
                name: read_record(type(document), Path(f"--sweep: {name}"), changed[name])
                for name, document in documents.items()
            },
        )


def _fields(documents: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of all numbers and nulls, such as `system.networks.0.bandwidth`."""

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
            last = "." + axis.path.rpartition(".")[2]
            same = next((path for path in known if path.endswith(last)), known[0])
            raise OptionError(
                f"--sweep: {axis.path!r:.80} is not a number of the documents",
                remedy=did_you_mean(axis.path, known, otherwise=f"Use a path such as {same}"),
            )
        if axis.path in (other.path for other in axes[:place]):
            raise OptionError(
                f"--sweep: {axis.path} is given twice", remedy="Give one list of values"
            )
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_SEARCHES:
        raise OptionError(
            f"--sweep: the ranges have {count} combinations, expected {MOST_SEARCHES} at most"
        )


def _key(place: Any, key: str) -> Any:
    return int(key) if isinstance(place, list) else key


def _number(word: str, text: str) -> float:
    word = word.strip()
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    # float() also accepts inf, nan, 1_000 and spaces.
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
            f"--sweep: {text!r:.80} does not end: its step does not lead {way} to {last:g}"
        )
    # Difference of logarithms, since the ratio of the ends may be infinite.
    if factor:
        length = (math.log(last) - math.log(first)) / math.log(step)
    else:
        length = (last - first) / step
    if not length < MOST_SEARCHES:
        raise OptionError(
            f"--sweep: {text!r:.80} has too many values, expected {MOST_SEARCHES} at most"
        )
    # Include an end that only rounding misses.
    steps = range(math.floor(length + _ROUNDING) + 1)
    values = [first * step**n if factor else first + step * n for n in steps]
    # Powers and sums leave binary noise in the last digits.
    return [float(f"{value:.12g}") for value in values]


# --------------------------------------------------------------------------------------------------
# Searches and their results.


Columns = dict[str, list[str]]
"""Column name -> cell texts of all rows."""
_CHUNK = 50_000
"""Number of rows formatted at a time."""


class SearchSettings(Record):
    """Search options common to Calculon and tensor2d; see `explore` and `survey`."""

    top: int = 10
    """Number of best points to return."""
    objective: Objective = "rate"
    compat: bool = False
    """True for the published model with its defects."""
    threads: int = 1
    frontier: bool = False
    """True to return the Pareto-optimal points in time and memory."""
    degrees: bool = False
    """True to return the best rate per (tensor, pipeline) degree."""


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """One search with fixed inputs, which also formats its points as table columns."""

    asked: SearchSettings
    values: tuple[float, ...] = ()
    """Value of each swept number, in the order of the sweep's axes."""
    figures: ClassVar[Mapping[str, str]]
    """Published name -> field of the results that are known for every point."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Label of the search, for progress and headings."""

    @abstractmethod
    def run(self, watched: SearchCallbacks = NOBODY) -> Answer:
        """Return the result of the search; the best points contain all statistics.

        watched : callbacks for points, progress and stopping.
        """

    @abstractmethod
    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return the columns with the settings of points.

        executions, outcomes : packed points and their results, as from the compiled engine.
        """

    @abstractmethod
    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return (compiled model, names of its statistics)."""

    def columns(
        self, *, statistics: bool
    ) -> Callable[[NDArray[Any], NDArray[Any]], Iterator[Columns]]:
        """Return a function that yields the columns of points, at most `_CHUNK` rows at a time.

        statistics : True to add all statistics, which evaluates the points again; False to add only
        the results in `figures`.
        """
        model, known = self.opened()

        def columns(executions: NDArray[Any], outcomes: NDArray[Any]) -> Iterator[Columns]:
            for start in range(0, len(executions), _CHUNK):
                x, o = executions[start : start + _CHUNK], outcomes[start : start + _CHUNK]
                found = self.fields(x, o)
                if statistics:
                    _, table = model.evaluate_many(
                        np.ascontiguousarray(x), self.asked.threads, True, GO_ON
                    )
                    yield found | {name: _numbers(table[:, n]) for n, name in enumerate(known)}
                else:
                    yield found | {name: _numbers(o[key]) for name, key in self.figures.items()}

        return columns


@dataclass(frozen=True, kw_only=True)
class CalculonSearch(Search):
    """Exhaustive Calculon search over a space of executions."""

    application: calculon.Application
    system: calculon.System
    space: Space
    figures = FIGURES

    @property
    def label(self) -> str:
        """Number of processors, as text."""
        return f"{self.space.num_procs} processors"

    def run(self, watched: SearchCallbacks = NOBODY) -> Answer:
        """Return the result of `calculon.explore`."""
        asked = asdict(self.asked) | asdict(watched)
        found = explore(self.application, self.system, self.space, **asked)
        return replace(found, values=self.values)

    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return one column per execution field, without fields that the published tool lacks."""
        names = execution_fields(published=self.asked.compat)
        return {name: _field(name, executions[name]) for name in names}

    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return the compiled model, and the names of its statistics."""
        model = open_model(self.application, self.system, self.asked.compat)
        return model, statistic_names(self.application, self.asked.compat)


@dataclass(frozen=True, kw_only=True)
class Tensor2dSearch(Search):
    """Exhaustive tensor2d search (arXiv 2410.00273) over all candidates of one strategy."""

    strategy: tensor2d.Strategy
    model: tensor2d.Model
    system: tensor2d.System
    num_gpus: int
    batch: int
    figures = MappingProxyType({"t": "time_s", "mem": "memory_gb"})

    @property
    def label(self) -> str:
        """GPUs and strategy, as text."""
        return f"{self.num_gpus} GPUs, {self.strategy}"

    def run(self, watched: SearchCallbacks = NOBODY) -> Answer:
        """Return the result of `tensor2d.survey`, which takes less than a second.

        Of the callbacks, only `each` and `halt` are used.
        """
        asked = asdict(self.asked) | {"each": watched.each, "halt": watched.halt}
        where = self.strategy, self.model, self.num_gpus, self.batch, self.system
        found = tensor2d.survey(*where, **asked)
        return replace(found, values=self.values)

    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return one column per candidate field, and `throughput` in samples per second.

        The tensor degree of the strategy `1d` is in the column `tp1`.
        """
        known = {
            "strategy": self.strategy,
            "n_gpus": str(self.num_gpus),
            "global_batch_size": str(self.batch),
        }
        return {
            **{name: [text] * len(executions) for name, text in known.items()},
            **{name: list(map(str, executions[name].tolist())) for name in CANDIDATE.names or ()},
            "throughput": _numbers(self.batch / outcomes["time_s"]),
        }

    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return the compiled model, and the names of its statistics."""
        compat = self.asked.compat
        known, quirks = known_model(self.model, compat), tensor2d.Quirks.of(compat)
        where = self.num_gpus, self.batch, self.system
        return native_engine(self.strategy, known, *where, quirks), STATISTICS


def _field(name: str, values: NDArray[Any]) -> list[str]:
    if name in WHOLE_NUMBERS:
        return list(map(str, values.tolist()))
    words = np.array(CHOICES.get(name, ("False", "True")), dtype=object)
    found: list[str] = words[values.astype(np.intp)].tolist()
    return found


def _numbers(values: NDArray[Any]) -> list[str]:
    # The shortest text that reads back as the same number.
    return [repr(value) for value in values.tolist()]
