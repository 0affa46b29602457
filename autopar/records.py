"""`dataclass` whose methods are made when they are first used, and a `replace` for many of them.

`dataclasses.dataclass` writes the methods of a class as source and compiles it, which takes longer
than everything else in a module that describes data. A command uses few of the classes that it
imports, and of those hardly more than making an object. Here a class stays as it was written until
somebody makes an object of it or asks for its fields, and only then gets its `__init__`; how it is
compared, hashed and shown is made when it is first asked for, by the standard decorator. What that
refuses, such as a mutable default, is refused then and not on import.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # to a type checker they are the standard ones
    from dataclasses import Field, dataclass as dataclass, replace as replace
else:

    def dataclass(cls=None, /, **options):
        """Return the class, or the decorator with these options of `dataclasses.dataclass`.

        What is seldom asked for, such as `slots`, is done at once by the standard decorator.
        """

        def decorate(kind):
            if not _KNOWN.issuperset(options):
                from dataclasses import dataclass as standard

                return standard(kind, **options)
            if options.get("frozen"):
                kind.__setattr__, kind.__delattr__ = _refusals(kind)
            deferred = _Deferred(kind, options)
            for name in (*deferred.data, *deferred.methods):
                setattr(kind, name, _Pending(name, deferred))
            return kind

        return decorate if cls is None else decorate(cls)

    def replace(instance, /, **changes):
        """Return a copy with other values of some fields, as `dataclasses.replace`.

        In a fifth of its time, which searches spend ten thousands of times: values are copied as
        they are and not handed to `__init__`. Of classes without slots and `InitVar`.
        """
        kind = type(instance)
        names, own = kind.__dataclass_fields__, instance.__dict__
        if not changes.keys() <= names.keys():
            unknown = ", ".join(changes.keys() - names.keys())
            raise TypeError(f"{kind.__name__} has no field {unknown}")
        found = object.__new__(kind)
        values = {**own, **changes}
        if values.keys() != names.keys():
            # nothing else that an instance has been given, such as a cached property; and what is
            # the class's alone stays there
            values = {name: values[name] for name in names if name in values}
        object.__setattr__(found, "__dict__", values)
        if hasattr(kind, "__post_init__"):
            found.__post_init__()
        return found


_KNOWN = frozenset({"eq", "frozen", "kw_only", "order", "repr"})
_DATA = ("__init__", "__dataclass_fields__", "__dataclass_params__", "__match_args__")
_ORDER = ("__lt__", "__le__", "__gt__", "__ge__")
_OF_EVERY_CLASS = ("__dict__", "__weakref__")
# of all classes: the fields of one may be made from those of another
_LOCK = threading.RLock()


def _described(kind: Any) -> dict[str, Field[Any]]:
    """Return the fields that a class describes by `field`; it has their defaults from here on."""
    # told by the name, so that dataclasses need not be imported
    found = {
        name: value
        for name, value in vars(kind).items()
        if type(value).__name__ == "Field" and type(value).__module__ == "dataclasses"
    }
    if found:
        from dataclasses import MISSING

        for name, value in found.items():
            if value.default is MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, value.default)
    return found


def _refusals(kind: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return what assigns and deletes attributes of a frozen class: of its fields nothing does."""

    def refuse(instance: object, name: str, verb: str) -> None:
        from dataclasses import FrozenInstanceError, fields

        if type(instance) is kind or name in {field.name for field in fields(kind)}:
            raise FrozenInstanceError(f"cannot {verb} field {name!r}")

    def assign(self: object, name: str, value: object) -> None:
        refuse(self, name, "assign to")
        super(kind, self).__setattr__(name, value)

    def delete(self: object, name: str) -> None:
        refuse(self, name, "delete")
        super(kind, self).__delattr__(name)

    return assign, delete


class _Factory:
    """Default of a parameter in the place of what a factory returns."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Factory()


class _Deferred:
    """A class whose attributes are still to be made."""

    def __init__(self, kind: Any, options: dict[str, Any]) -> None:
        self.described = _described(kind)
        own = vars(kind)
        methods = ["__repr__"] if options.get("repr", True) else []
        if options.get("eq", True):
            # the hash depends on it: what is equal by value and can change has none
            methods += ["__eq__", "__hash__"]
        if options.get("order"):
            methods += _ORDER
        self.kind = kind
        self.options = options
        self.data = [name for name in _DATA if name not in own]
        self.methods = [name for name in methods if name not in own]
        self.made: set[str] = set()

    def make(self, name: str) -> None:
        """Make what is missing of the kind of this name, once.

        On another class, so that another thread finds every attribute made or in waiting.
        """
        with _LOCK:
            if name in self.made:
                return
            names = self.data if name in self.data else self.methods
            found = self._data() if names is self.data else None
            found = found or vars(self._standard())
            for made in names:
                setattr(self.kind, made, found[made])
            self.made.update(names)

    def _standard(self) -> Any:
        """Return a copy of the class as the standard decorator makes it."""
        from dataclasses import dataclass as standard

        kind = self.kind
        # the decorator refuses a frozen class that has these two already
        without = {*self.data, *self.methods, *_OF_EVERY_CLASS, "__setattr__", "__delattr__"}
        written = {name: value for name, value in vars(kind).items() if name not in without}
        written |= self.described
        return standard(type(kind)(kind.__name__, kind.__bases__, written), **self.options)

    def _data(self) -> dict[str, Any] | None:
        """Return the fields and what fills them; None where only the standard decorator does."""
        from dataclasses import dataclass as standard, fields as fields_of

        kind, options = self.kind, self.options
        frozen = bool(options.get("frozen"))
        bases = [base for base in kind.__mro__[:0:-1] if hasattr(base, "__dataclass_fields__")]
        if any(base.__dataclass_params__.frozen is not frozen for base in bases):
            return None  # it refuses to mix them
        own = vars(kind)
        annotations = own.get("__annotations__", {})
        written = {name: own[name] for name in annotations if name in own} | self.described
        # words, lest it writes a signature
        written |= {"__annotations__": annotations, "__module__": kind.__module__, "__doc__": "-"}
        # no method is made, so that nothing is compiled, and of no base
        bare: Any = standard(
            init=False, repr=False, eq=False, kw_only=bool(options.get("kw_only"))
        )(type(kind.__name__, (), written))
        known: dict[str, Field[Any]] = {}
        for base in bases:
            known |= base.__dataclass_fields__
        bare.__dataclass_fields__ = known | bare.__dataclass_fields__
        fields = fields_of(bare)
        if any("InitVar" in str(field.type) for field in bare.__dataclass_fields__.values()):
            return None
        init = _init(kind, fields, frozen)
        if init is None:
            return None
        params = bare.__dataclass_params__
        params.init, params.repr = True, options.get("repr", True)
        params.eq, params.order = options.get("eq", True), options.get("order", False)
        params.frozen = frozen
        return {
            "__init__": init,
            "__dataclass_fields__": bare.__dataclass_fields__,
            "__dataclass_params__": params,
            "__match_args__": tuple(f.name for f in fields if f.init and not f.kw_only),
        }


def _init(kind: type, fields: Sequence[Field[Any]], frozen: bool) -> Callable[..., None] | None:
    """Return `__init__` of a class with these fields; None where that is not simple."""
    from dataclasses import MISSING

    positional = [field for field in fields if not field.kw_only]
    optional = [f.default is not MISSING or f.default_factory is not MISSING for f in positional]
    # behind one that may be left out all may
    if not all(field.init for field in fields) or optional != sorted(optional):
        return None
    names: dict[str, object] = {"_set": object.__setattr__, "_made": _MADE}
    parameters, body = ["self"], []
    for field in (*positional, *(field for field in fields if field.kw_only)):
        name = value = field.name
        default = ""
        if field.default is not MISSING:
            names[f"_default_{name}"] = field.default
            default = f"=_default_{name}"
        elif field.default_factory is not MISSING:
            names[f"_default_{name}"] = field.default_factory
            default = "=_made"
            value = f"_default_{name}() if {name} is _made else {name}"
        if field.kw_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(name + default)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if {"self", *names} & {field.name for field in fields}:
        return None
    if hasattr(kind, "__post_init__"):
        body.append("self.__post_init__()")
    lines = [
        f"def _make({', '.join(names)}):",
        f" def __init__({', '.join(parameters)}):",
        *(f"  {line}" for line in body or ["pass"]),
        " return __init__",
    ]
    space: dict[str, Any] = {}
    exec("\n".join(lines), vars(sys.modules[kind.__module__]), space)
    init: Callable[..., None] = space["_make"](**names)
    init.__qualname__ = f"{kind.__qualname__}.__init__"
    init.__annotations__ = {**{field.name: field.type for field in fields}, "return": None}
    return init


class _Pending:
    """In the place of an attribute that is made when it is looked up."""

    def __init__(self, name: str, deferred: _Deferred) -> None:
        self.name = name
        self.deferred = deferred

    def __get__(self, instance: object | None, owner: type) -> Any:
        self.deferred.make(self.name)
        # of this class and not by a lookup: somebody below it may ask by way of super()
        made = vars(self.deferred.kind)[self.name]
        bind = getattr(type(made), "__get__", None)
        return made if bind is None else bind(made, instance, owner)
