"""Values of Python files, and the operations on plain values."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from autopar.records import Record

MOST_ITEMS = 1 << 14
"""Maximum length of a string or list that an operator makes, and of a loop."""
_MOST_BITS = 512
"""Maximum length of an integer that an operator makes, bits."""
MAIN = "__main__"
"""Name of the module that is the file of the user."""
MISSING = object()
"""Value of a name or field that is not set, and key of the items of a container."""


class Unknown(Record):
    """Value that is known only when the program runs."""

    why: str
    """Reason, such as `os.environ is read when it runs`."""
    line: int
    file: str = ""
    absent: bool = False
    """True for a key or field that may not be set."""
    acts: bool = False
    """True for a value that may be an object or function of the file: its calls have effects."""


class Named(Record):
    """Object of a module without source, by its dotted name, such as `torch.bfloat16`."""

    name: str

    @property
    def last(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]

    @property
    def is_class(self) -> bool:
        """True for the name of a class, which is not in capitals alone."""
        return self.last[:1].isupper() and not self.last.isupper()

    @property
    def class_name(self) -> str:
        """Name of a class with that of the class around it, such as `Trainer.Config`."""
        outer = self.name.rpartition(".")[0].rpartition(".")[2]
        return f"{outer}.{self.last}" if outer[:1].isupper() else self.last


class Section:
    """Instance of a class: its name and the fields that were set.

    kind : class with source, whose defaults and properties are read where a field was not set.
    """

    def __init__(
        self, name: str, fields: Mapping[str, Any] | None = None, kind: Class | None = None
    ) -> None:
        self.name = name
        self.fields: dict[str, Any] = dict(fields or {})
        self.kind = kind


class Sets(Record):
    """Fields that a call of a function without source sets; the call returns None."""

    of: Section
    fields: Mapping[str, Any]


class Lost(Record):
    """Place of a file where an effect on the configuration may be lost."""

    what: str
    line: int
    file: str = ""


class Known(Protocol):
    """Knowledge of the caller: modules without source, and default values."""

    def module(self, name: str) -> str | None:
        """Return the source of a module by its dotted name; None: without source."""

    def call(self, name: str, of: Any, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the value of a call of a function or class without source.

        name : dotted name, or name of a method. of : the object of a method; None for a function.
        Returns NotImplemented if the call is not known, and `Sets` if it sets fields.
        """

    def has(self, section: Section, name: str) -> bool | None:
        """Return whether a section has a field that was not set; None: not known."""

    def field(self, section: Section, name: str) -> Any:
        """Return a field of a section that was not set; NotImplemented if it is not known."""


class Function(Record):
    """Function with source."""

    name: str
    node: ast.FunctionDef | ast.Lambda
    module: Module
    scopes: tuple[dict[str, Any], ...]
    """Values of the enclosing functions by name, inner first."""
    defaults: Mapping[str, Any]
    """Values of parameters that a call does not give, by name."""


class Class(Record):
    """Class with source."""

    name: str
    node: ast.ClassDef
    module: Module


class Method(Record):
    """Method of a value, before its call."""

    of: Any
    name: str


class Module:
    """Module with source: its dotted name, file and values by name."""

    def __init__(self, name: str, file: str, *, package: bool = False) -> None:
        self.name = name
        self.file = file
        self.package = package
        self.names: dict[str, Any] = {}
        self.functions: dict[str, ast.FunctionDef] = {}


# --------------------------------------------------------------------------------------------------
# Changes, which an unknown condition takes back.


class Journal:
    """Changes of names, fields and containers, so that a branch can be taken back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] | None = None
        self._written: dict[tuple[int, Any], tuple[Any, Any]] = {}

    def put(self, store: dict[Any, Any], key: Any, value: Any) -> None:
        """Set a key of the names of a frame, the fields of a section or a dict."""
        if self._undo is not None:
            before = store.get(key, MISSING)
            self._undo.append(lambda: _restore(store, key, before))
            self._written[id(store), key] = (store, key)
        store[key] = value

    def altered(self, value: list[Any] | dict[Any, Any] | set[Any]) -> None:
        """Note a value before a method changes it."""
        if self._undo is not None:
            before = value.copy()
            self._undo.append(lambda: refill(value, before))
            self._written[id(value), MISSING] = (value, MISSING)

    @contextmanager
    def branch(self) -> Iterator[dict[tuple[int, Any], tuple[Any, Any, Any]]]:
        """Take back the changes of the block; yields them by place, with their values."""
        undo, written = self._undo, self._written
        self._undo, self._written = [], {}
        found: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        try:
            yield found
        finally:
            for place, (store, key) in self._written.items():
                value = store.copy() if key is MISSING else store.get(key, MISSING)
                found[place] = (store, key, value)
            for back in reversed(self._undo):
                back()
            self._undo, self._written = undo, written


def _restore(store: dict[Any, Any], key: Any, before: Any) -> None:
    if before is MISSING:
        store.pop(key, None)
    else:
        store[key] = before


def refill(value: Any, before: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(before)


# --------------------------------------------------------------------------------------------------
# Operations.


BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
BUILTINS: Mapping[str, Callable[..., Any]] = {
    name.__name__: name
    for name in (
        abs, all, any, bool, dict, divmod, enumerate, float, frozenset, int, len, list, max, min,
        reversed, round, set, sorted, str, sum, tuple, zip,
    )
}  # fmt: skip
PURE = frozenset({
    "copy", "count", "endswith", "format", "get", "index", "items", "join", "keys", "lower",
    "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rpartition", "rsplit",
    "rstrip", "split", "startswith", "strip", "title", "union", "upper", "values",
})  # fmt: skip
"""Methods of plain values that change nothing."""
CHANGING = frozenset({
    "add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update",
})  # fmt: skip
"""Methods of plain values that change the value."""
KEEPING = "append"
"""Method that keeps unknown values as they are."""
CLASSES = {"bool": bool, "dict": dict, "float": float, "frozenset": frozenset, "int": int,
           "list": list, "set": set, "str": str, "tuple": tuple}  # fmt: skip
PLAIN = (type(None), bool, int, float, str, tuple, list, dict, set, frozenset)


def copied(value: Any, done: dict[int, Any]) -> Any:
    """Return a deep copy of sections, lists and dicts; other values are shared."""
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, Section):
        found = done[id(value)] = Section(value.name, kind=value.kind)
        found.fields = {key: copied(item, done) for key, item in value.fields.items()}
        return found
    if isinstance(value, dict):
        pairs = done[id(value)] = {}
        pairs |= {key: copied(item, done) for key, item in value.items()}
        return pairs
    if isinstance(value, list):
        items = done[id(value)] = []
        items += [copied(item, done) for item in value]
        return items
    return tuple(copied(item, done) for item in value) if isinstance(value, tuple) else value


def loaded(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body


def hashable(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(map(hashable, key))
    return isinstance(key, str | int | float | bool | None | Named)


def equal(one: Any, other: Any) -> bool:
    """Return True for equal values of the same type.

    Sections and containers are equal only to themselves: a later change is of one of them.
    """
    if isinstance(one, Section | Function | Class | Unknown) or isinstance(other, Section):
        return one is other
    if isinstance(one, list | dict | set):
        return one is other
    return type(one) is type(other) and bool(one == other)


def holds_unknown(value: Any, seen: set[int] | None = None) -> bool:
    """Return True for an unknown value, and for a list or dict with one.

    seen : `id` of containers without one. A constant of another module is unknown where it is
    computed with or compared.
    """
    if isinstance(value, list | tuple | set | frozenset | dict):
        seen = set() if seen is None else seen
        if id(value) in seen:
            return False
        seen.add(id(value))
        items = (*value, *value.values()) if isinstance(value, dict) else value
        return any(holds_unknown(one, seen) for one in items)
    return isinstance(value, Unknown) or (isinstance(value, Named) and not value.is_class)


def has_unknown_keys(value: Any) -> bool:
    """Return True for a dict with an unknown key, which may be any of its keys."""
    return isinstance(value, dict) and any(map(holds_unknown, value))


def may_lack(value: Any) -> bool:
    """Return True for a dict with a key that may not be set."""
    return isinstance(value, dict) and any(
        isinstance(one, Unknown) and one.absent for one in value.values()
    )


def holds_object(value: Any, seen: set[int] | None = None) -> bool:
    """Return True for a section, function, method or class, and for a container with one."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, dict):
        return any(holds_object(one, seen) for one in value.values())
    if isinstance(value, list | tuple):
        return any(holds_object(one, seen) for one in value)
    return isinstance(value, Section | Function | Method | Class)


def unread(value: Any) -> Unknown | None:
    """Return why a value is no setting of a configuration; None: it is one.

    Fields of a class of the file may have their values from its body, which is not read.
    """
    if isinstance(value, Unknown):
        return value
    if isinstance(value, Section) and value.kind is not None and value.kind.module.name == MAIN:
        why = f"the defaults of {value.name} are not read"
        return Unknown(why=why, line=value.kind.node.lineno)
    if isinstance(value, Function | Class | Method | Module):
        return Unknown(why="it is a function, a class or a module", line=1)
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return next((found for one in value if (found := unread(one))), None)
    return None


def bounded(op: ast.operator, left: Any, right: Any) -> bool:
    """Return whether the result of an operator stays within the limits of size."""
    if isinstance(left, int) and isinstance(right, int):
        if isinstance(op, ast.Pow | ast.LShift):
            return left.bit_length() * max(right, 1) <= _MOST_BITS and right <= _MOST_BITS
        return left.bit_length() + right.bit_length() <= _MOST_BITS
    sizes = [len(one) for one in (left, right) if isinstance(one, str | list | tuple)]
    if isinstance(op, ast.Mult) and sizes:
        number = left if isinstance(left, int) else right
        return isinstance(number, int) and sizes[0] * number <= MOST_ITEMS
    # Text with `%` is formatted, which may be of any width.
    return sum(sizes) <= MOST_ITEMS and not (isinstance(op, ast.Mod) and sizes)


def is_python(text: str) -> bool:
    """Return True for a text with an import or a function, which may have errors of syntax."""
    return re.search(r"(?m)^(import +\w|from +[\w.]+ +import\b|def +\w+ *\()", text) is not None
