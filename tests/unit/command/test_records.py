"""Records: what a subclass of `Record` gets without saying it, and `replace`."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import pytest
from msgspec import field
from msgspec.structs import asdict

from autopar.records import Record, replace

_T = TypeVar("_T")


class _Base(Record):
    unit: ClassVar[str] = "s"
    number: int
    name: str = "x"
    items: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number is negative")


class _Derived(_Base, dict=True):
    name: str = "y"
    more: tuple[int, ...] = (1,)
    needed: int

    @cached_property
    def twice(self) -> int:
        return 2 * self.number


class _Pair(Record, Generic[_T], order=True):
    first: _T
    second: _T


class _Identity(Record, eq=False):
    value: list[int]


@pytest.mark.parametrize("kind", [_Base, _Derived, _Pair, _Identity])
def test_every_record_is_frozen_and_takes_names_alone(kind: type[Record]) -> None:
    assert kind.__struct_config__.frozen
    with pytest.raises(TypeError):
        kind(1, 2)
    with pytest.raises(TypeError, match="Missing required argument"):
        kind()
    one = _Base(number=1)
    for change in (lambda: setattr(one, "number", 2), lambda: setattr(one, "unknown", 2)):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(TypeError, match="unknown"):
        _Base(number=1, unknown=2)


def test_values_compare_show_and_hash() -> None:
    assert repr(_Derived(number=1, needed=2)) == (
        "_Derived(number=1, name='y', items=[], more=(1,), needed=2)"
    )
    assert _Pair(first=1, second=2) == _Pair(first=1, second=2) < _Pair(first=1, second=3)
    assert len({_Pair(first=1, second=2), _Pair(first=1, second=2)}) == 1
    assert _Base(number=1) != _Derived(number=1, needed=1)
    assert _Identity(value=[1]) != _Identity(value=[1])
    assert len({_Identity(value=[1]), _Identity(value=[1])}) == 2
    assert _Base(number=1).items is not _Base(number=1).items


def test_copies_and_pickles() -> None:
    one = _Derived(number=3, needed=1)
    assert one.twice == 6
    for other in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert other == one
        # what was computed is no part of it
        assert other.__dict__ == {}
    assert copy.deepcopy(one).items is not one.items


def test_replace() -> None:
    one = _Derived(number=3, needed=1)
    assert one.twice == 6
    other = replace(one, number=4)
    assert (other.twice, other.items) == (8, one.items)
    assert asdict(other) == {**asdict(one), "number": 4}
    with pytest.raises(TypeError, match="no field 'nmae'"):
        replace(one, nmae="z")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="number is negative"):
        replace(one, number=-1)


def test_replace_of_a_standard_dataclass() -> None:
    """Options of commands are such ones."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        value: int = 1

    assert replace(Options(), value=2) == Options(value=2)


def test_by_position_where_a_class_asks_for_it() -> None:
    class Row(Record, kw_only=False):
        first: int
        second: int = 2

    assert Row(1) == Row(first=1, second=2)
