"""Spaces that a user writes down: for every field of an execution, the values it may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten
from autopar.patterns import nearest_key
from search.analytic.calculon import EXECUTION
from search.analytic.calculon.documents import CHOICES, Execution

__all__ = ["Domain", "TuningSpace", "load_space"]

_DEGREES = ("tensor_par", "pipeline_par", "data_par")
_FIXED = ("num_procs", "training")
_FLAGS = tuple(
    name
    for name, field in Execution.model_fields.items()
    if name not in CHOICES and field.annotation is not int
)
# The engine computes a block once and keeps it: what blocks depend on varies slowest.
_ORDER = (
    "datatype",
    "structure_type",
    "attention_type",
    "fused_activation",
    "tensor_par",
    "tensor_par_net",
    "tensor_par_comm_type",
    "tensor_par_overlap",
    "seq_par_ag_redo",
    "activation_recompute",
    "microbatch_size",
    "optimizer_sharding",
    "data_par",
    "pipeline_par",
    "pipeline_interleaving",
    "batch_size",
    "pipeline_par_net",
    "data_par_net",
    "data_par_overlap",
    "weight_offload",
    "activations_offload",
    "optimizer_offload",
)
_LARGEST = 2**31 - 1
_MOST_VALUES = 1_000_000
_SPELLING = 'a value, a list of values, or {"from": 1, "to": 64, "times": 2} (or "step")'


@dataclass(frozen=True, kw_only=True)
class Domain:
    """The values that one field of an execution may take; numbers ascend, words do not order."""

    name: str
    values: tuple[int | str | bool, ...]

    @property
    def ordered(self) -> bool:
        """Return whether neighbouring values are alike: numbers, not words and switches."""
        return self.name not in CHOICES and self.name not in _FLAGS

    @cached_property
    def codes(self) -> NDArray[np.int32]:
        """Return the values as the compiled engine has them."""
        if self.name in CHOICES:
            return np.array([CHOICES[self.name].index(str(v)) for v in self.values], np.int32)
        return np.array(self.values, np.int32)


@dataclass(frozen=True, kw_only=True)
class TuningSpace:
    """A product of domains on a fixed number of processors.

    A point is a row of digits, the positions of its values in the domains.
    """

    num_procs: int
    training: bool
    domains: tuple[Domain, ...]
    """In the order in which points are counted, the last one fastest."""
    derived: str | None
    """The degree that follows from the other two and num_procs."""

    @property
    def size(self) -> int:
        """Return the number of points."""
        return math.prod(len(domain.values) for domain in self.domains)

    def digits(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the digits of points by their number, a row each."""
        result = np.empty((len(points), len(self.domains)), np.int64)
        rest = points
        for column in range(len(self.domains) - 1, -1, -1):
            rest, result[:, column] = np.divmod(rest, len(self.domains[column].values))
        return result

    def executions(self, digits: NDArray[np.int64]) -> NDArray[Any]:
        """Return points as an array of `EXECUTION`."""
        packed = np.empty(len(digits), EXECUTION)
        packed["num_procs"], packed["training"] = self.num_procs, self.training
        for column, domain in enumerate(self.domains):
            packed[domain.name] = domain.codes[digits[:, column]]
        if self.derived is not None:
            given = [packed[name].astype(np.int64) for name in _DEGREES if name != self.derived]
            # Where the others do not divide num_procs, the product is wrong and the check says so.
            packed[self.derived] = np.maximum(self.num_procs // (given[0] * given[1]), 1)
        return packed


def load_space(
    source: Mapping[str, Any] | Path | str,
    *,
    num_procs: int | None = None,
    structure_type: str = "gpt",
) -> TuningSpace:
    """Return the space of a JSON file or of its keys.

    source : for every field of an execution a value, a list, or a range such as
        {"from": 1, "to": 64, "times": 2}; one degree may be left out, it follows from num_procs.
    num_procs : where the space does not say; without both, three single degrees do.
    structure_type : where the space does not say.

    Raises
    ------
    DocumentError: names the file, the field, its value and the remedy.
    """
    path = "space" if isinstance(source, Mapping) else str(source)
    keys = dict(source) if isinstance(source, Mapping) else load_object(Path(source)).data
    known = tuple(Execution.model_fields)
    for name in keys:
        if name not in known:
            near = f"the nearest known key is {nearest_key(name, list(known))!r}"
            raise DocumentError(path, "this key is unknown", key=name, remedy=near)
    keys.setdefault("training", True)
    keys.setdefault("structure_type", structure_type)
    found = {name: Domain(name=name, values=_values(path, name, keys[name])) for name in keys}
    for name in _FIXED:
        if name in found and len(found[name].values) > 1:
            raise DocumentError(
                path,
                f"the value is {shorten(keys[name])}",
                key=name,
                remedy="give one value, a space has one",
            )
    absent = [name for name in _ORDER if name not in found]
    derived = absent[0] if len(absent) == 1 and absent[0] in _DEGREES else None
    if absent and derived is None:
        lost = next((name for name in absent if name not in _DEGREES), absent[-1])
        raise DocumentError(path, "this key is missing", key=lost, remedy=f"give {_SPELLING}")
    return TuningSpace(
        num_procs=_num_procs(path, found, num_procs, derived),
        training=bool(found["training"].values[0]),
        domains=tuple(found[name] for name in _ORDER if name in found),
        derived=derived,
    )


def _num_procs(
    path: str, found: Mapping[str, Domain], given: int | None, derived: str | None
) -> int:
    said = int(found["num_procs"].values[0]) if "num_procs" in found else None
    if given is not None and not 1 <= given <= _LARGEST:
        raise DocumentError(path, f"the value is {given}, expected at least 1", key="num_procs")
    if said is not None and given not in (None, said):
        raise DocumentError(
            path,
            f"the value is {said}, but {given} are asked for",
            key="num_procs",
            remedy="drop one",
        )
    if said is None and given is None:
        degrees = [found[name].values for name in _DEGREES if name in found]
        if derived is None and all(len(values) == 1 for values in degrees):
            return math.prod(int(values[0]) for values in degrees)
        raise DocumentError(
            path,
            "this key is missing, and degrees with several values do not tell it",
            key="num_procs",
            remedy="give the number of processors",
        )
    number = given if given is not None else said
    assert number is not None, "one of them is given"
    return number


def _values(path: str, name: str, written: Any) -> tuple[int | str | bool, ...]:
    listed = written if isinstance(written, list) else [written]
    if isinstance(written, dict):
        listed = _range(path, name, written)
    if not listed:
        raise DocumentError(path, "the list is empty", key=name, remedy=f"give {_SPELLING}")
    values = [_value(path, name, value) for value in listed]
    if len(set(values)) < len(values):
        raise DocumentError(path, f"a value of {shorten(written)} appears twice", key=name)
    numbers = name not in CHOICES and name not in _FLAGS
    return tuple(sorted(values, key=int) if numbers else values)


def _value(path: str, name: str, value: Any) -> int | str | bool:
    if name in CHOICES:
        expected, good = f"one of {', '.join(CHOICES[name])}", value in CHOICES[name]
    elif name in _FLAGS:
        expected, good = "true or false", type(value) in (bool, int) and value in (0, 1)
    else:
        least = 0 if name.endswith("_net") else 1
        expected = f"an integer from {least} to {_LARGEST}"
        good = type(value) is int and least <= value <= _LARGEST
    if not good:
        raise DocumentError(path, f"the value is {shorten(value)}, expected {expected}", key=name)
    return bool(value) if name in _FLAGS else value


def _range(path: str, name: str, written: Mapping[str, Any]) -> list[int]:
    """Return the values of {"from", "to"} with "step" or "times", both ends included if met."""
    problem = f"the value is {shorten(dict(written))}, expected {_SPELLING}"
    if name in CHOICES or name in _FLAGS:
        raise DocumentError(path, problem, key=name, remedy="this field takes no range")
    if not {"from", "to"} <= set(written) <= {"from", "to", "step", "times"} or len(written) > 3:
        raise DocumentError(path, problem, key=name)
    if any(type(value) is not int for value in written.values()):
        raise DocumentError(path, problem, key=name, remedy="ranges are of integers")
    first, last = written["from"], min(written["to"], _LARGEST + 1)
    if "times" not in written:
        step = written.get("step", 1)
        if step < 1 or last < first:
            raise DocumentError(path, problem, key=name, remedy="let the range ascend")
        if (last - first) // step >= _MOST_VALUES:
            raise DocumentError(
                path,
                f"the range has more than {_MOST_VALUES} values",
                key=name,
                remedy="widen its step",
            )
        return list(range(first, last + 1, step))
    factor, values = written["times"], []
    if factor < 2 or not 1 <= first <= last:
        raise DocumentError(path, problem, key=name, remedy="let the range ascend from 1 or more")
    while first <= last:
        values.append(first)
        first *= factor
    return values
