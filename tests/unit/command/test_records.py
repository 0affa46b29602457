"""Classes whose methods are made late behave as those of the standard decorator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from autopar import records

_T = TypeVar("_T")
_OPTIONS: list[dict[str, Any]] = [
    {},
    {"frozen": True},
    {"kw_only": True},
    {"frozen": True, "kw_only": True},
    {"frozen": True, "kw_only": True, "eq": False},
    {"frozen": True, "order": True},
    {"repr": False},
]


def _classes(decorate: Callable[..., Any], **options: Any) -> tuple[type, type, type]:
    @decorate(**options)
    class Base:
        """With a default of every kind."""

        unit: ClassVar[str] = "s"
        number: int
        name: str = "x"
        items: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            object.__setattr__(self, "checked", True)

    @decorate(**options)
    class Derived(Base):
        """With a field more, and one that is replaced."""

        name: str = "y"
        more: tuple[int, ...] = (1,)

    class Plain(Derived):
        """Below, without fields of its own."""

        def __init__(self, number: int) -> None:
            super().__init__(number=number)

    return Base, Derived, Plain


@pytest.mark.parametrize("options", _OPTIONS, ids=str)
def test_as_the_standard_decorator(options: dict[str, Any]) -> None:
    for ours, theirs in zip(
        _classes(records.dataclass, **options),
        _classes(dataclasses.dataclass, **options),
        strict=True,
    ):
        mine, other = ours(number=3), theirs(number=3)
        if options.get("repr", True):
            assert repr(mine) == repr(other)
        assert vars(mine) == vars(other)
        assert (
            inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
        )
        assert str(inspect.signature(ours)) == str(inspect.signature(theirs))
        assert dataclasses.asdict(mine) == dataclasses.asdict(other)
        assert [f.name for f in dataclasses.fields(ours)] == [
            f.name for f in dataclasses.fields(theirs)
        ]
        assert ours.__match_args__ == theirs.__match_args__
        assert str(ours.__dataclass_params__) == str(theirs.__dataclass_params__)
        assert (mine == ours(number=3)) is (other == theirs(number=3))
        assert mine != other
        assert (ours.__hash__ is None) is (theirs.__hash__ is None)
        assert hasattr(ours, "items") is hasattr(theirs, "items") is False
        assert copy.deepcopy(mine).items == []
        if options.get("order"):
            assert mine < ours(number=4)
        else:
            with pytest.raises(TypeError):
                assert mine < ours(number=4)


def test_what_is_frozen_stays() -> None:
    *both, below = _classes(records.dataclass, frozen=True)
    for kind in both:
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'number'"):
            kind(number=1).number = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'number'"):
            del kind(number=1).number
        with pytest.raises(FrozenInstanceError):
            kind(number=1).unknown = 2
    below(1).unknown = 2  # as the standard: a class below that is no dataclass may have more
    with pytest.raises(FrozenInstanceError):
        below(1).number = 2


@records.dataclass(frozen=True, kw_only=True)
class _Pair(Generic[_T]):
    first: _T
    second: _T

    @property
    def both(self) -> tuple[_T, _T]:
        """Return what it holds."""
        return self.first, self.second


def test_copies_replaces_and_pickles() -> None:
    pair = _Pair(first=1, second=2)
    assert dataclasses.replace(pair, second=3).both == (1, 3)
    assert pickle.loads(pickle.dumps(pair)) == pair
    assert len({pair, _Pair(first=1, second=2)}) == 1
    assert dataclasses.is_dataclass(_Pair)


def test_of_another_process_without_init() -> None:
    """What is unpickled never saw its `__init__`: it is compared and frozen all the same."""
    code = (
        "import pickle, sys, dataclasses\n"
        "from autopar.sources import Source\n"
        "one, two = (pickle.loads(bytes.fromhex(sys.argv[1])) for _ in range(2))\n"
        "assert one == two and hash(one) == hash(two)\n"
        "try: one.path = ''\n"
        "except dataclasses.FrozenInstanceError: print('frozen')\n"
    )
    from autopar.sources import Source

    text = pickle.dumps(Source(role="p2p", path="a", sha256="")).hex()
    done = subprocess.run(
        [sys.executable, "-c", code, text], capture_output=True, text=True, check=True
    )
    assert done.stdout == "frozen\n"


def test_many_threads_meet_one_class() -> None:
    for _ in range(20):
        _, derived, below = _classes(records.dataclass, frozen=True)
        start, made = threading.Barrier(8), list[Any]()

        def make(
            start: threading.Barrier = start,
            made: list[Any] = made,
            kinds: tuple[Any, ...] = (derived, below),
        ) -> None:
            start.wait()
            made.extend(kind(3) for kind in kinds)

        threads = [threading.Thread(target=make) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 16
        assert made[0] == made[2]


def test_the_standard_says_what_it_refuses() -> None:
    @records.dataclass
    class Mutable:
        """With what all objects would share."""

        items: list[int] = []  # noqa: RUF012 - what is refused

    with pytest.raises(ValueError, match="mutable default"):
        Mutable()

    @records.dataclass
    class Order:
        """With a default before what has none."""

        first: int = 1
        second: int  # type: ignore[misc]

    with pytest.raises(TypeError, match="non-default argument"):
        Order(2)  # type: ignore[call-arg]


def test_fields_that_are_no_plain_ones() -> None:
    @records.dataclass
    class Kinds:
        """With what only `__post_init__` sees, and what nobody gives."""

        seed: dataclasses.InitVar[int]
        value: int = field(init=False)
        shown: int = field(default=7, metadata={"help": "text"})

        def __post_init__(self, seed: int) -> None:
            self.value = 2 * seed

    assert Kinds.shown == 7
    assert Kinds(3).value == 6
    assert repr(Kinds(3)).endswith("Kinds(value=6, shown=7)")


@pytest.mark.parametrize("options", [{"frozen": True}, {"frozen": True, "kw_only": True}, {}])
def test_a_copy_with_other_values(options: dict[str, Any]) -> None:
    """As `dataclasses.replace` makes it, without what else an instance has been given."""
    for kind in _classes(records.dataclass, **options)[:2]:
        one = kind(number=3)
        object.__setattr__(one, "seen", 7)
        object.__setattr__(one, "checked", False)
        assert records.replace(one, name="z") == dataclasses.replace(one, name="z")
        assert records.replace(one).items is one.items
        assert vars(records.replace(one, number=4)) == vars(dataclasses.replace(one, number=4))
        with pytest.raises(TypeError, match="no field nmae"):
            records.replace(one, nmae="z")
