"""Models of documents as pydantic has them, which need pydantic only where a value is refused.

Pydantic takes longer to import, and to build the validators of a document, than most questions
take to answer. A model is written here as for pydantic, with the same names. What is given to it is
first read by a few lines of our own that take what is plainly right: exact types within their
bounds, and whatever the model's own validators accept. On anything else, be it wrong or only
unusual (a tuple for a list, a key by an alias), pydantic's model is made of the same class, and
what that says counts: the object it returns, or its error. JSON Schemas come from there as well.
So this file must never take what pydantic would refuse, nor read it otherwise; what it does not
know it leaves.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

if TYPE_CHECKING:
    # to a type checker they are pydantic's
    from pydantic import (
        AliasChoices as AliasChoices,
        BaseModel as BaseModel,
        BeforeValidator as BeforeValidator,
        ConfigDict as ConfigDict,
        Field as Field,
        PlainValidator as PlainValidator,
        RootModel as RootModel,
        TypeAdapter as TypeAdapter,
        ValidationError,
        WithJsonSchema as WithJsonSchema,
        create_model as create_model,
        field_validator as field_validator,
        model_serializer as model_serializer,
        model_validator as model_validator,
    )
    from pydantic.fields import FieldInfo as FieldInfo

_T = TypeVar("_T")


def refusal() -> type[ValidationError]:
    """Return the error of a value that a model refuses; imported where one is caught."""
    from pydantic import ValidationError

    return ValidationError


# --------------------------------------------------------------------------------------------------
# What is plainly right. A reader takes a value and returns what the model holds of it.


class _Unsure(Exception):  # noqa: N818 - no error: pydantic is asked
    """The value may be wrong, or only unusual."""


_Reader = Callable[[Any], Any]
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": lambda value, bound: value >= bound,
    "gt": lambda value, bound: value > bound,
    "le": lambda value, bound: value <= bound,
    "lt": lambda value, bound: value < bound,
    "min_length": lambda value, bound: len(value) >= bound,
    "max_length": lambda value, bound: len(value) <= bound,
    # as pydantic: wherever in the text it is found
    "pattern": lambda value, bound: re.search(bound, value) is not None,
}


def _same(value: Any) -> Any:
    return value


def _exactly(kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise _Unsure
        return value

    return read


def _float(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    # type() and not isinstance: true is an int in Python; beyond, floats have gaps
    if type(value) is int and -(2**53) <= value <= 2**53:
        return float(value)
    raise _Unsure


_PLAIN: dict[Any, _Reader] = {
    Any: _same,
    float: _float,
    **{kind: _exactly(kind) for kind in (bool, int, str, type(None))},
    None: _exactly(type(None)),
}


def _reader(kind: Any) -> _Reader | None:
    """Return the reader of a type; None for one of which only pydantic knows what it takes."""
    if isinstance(kind, _ModelType):
        return kind._read
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is None:
        return _PLAIN.get(kind)
    if origin is Annotated:
        return _annotated(*arguments)
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    inner = [read for argument in arguments if (read := _reader(argument)) is not None]
    if len(inner) < len(arguments):
        return None
    if origin is list and len(inner) == 1:
        return _list(*inner)
    if origin is dict and len(inner) == 2:
        return _dict(*inner)
    return None


def _annotated(kind: Any, *metadata: Any) -> _Reader | None:
    read = _reader(kind)
    for item in metadata:
        if hasattr(item, "reader"):
            read = item.reader(read)
        elif isinstance(item, _Later):
            read = _changed(read, item)
        else:
            return None
        if read is None:
            return None
    return read


def _changed(read: _Reader | None, item: _Later) -> _Reader | None:
    """Return the reader with what pydantic's own metadata add to it."""
    if item.name == "PlainValidator":
        plain: _Reader = item.arguments[0]
        return plain
    if read is None or item.name == "WithJsonSchema":
        return read
    inner: _Reader = read
    if item.name == "BeforeValidator":
        before = item.arguments[0]
        return lambda value: inner(before(value))
    if item.name != "Field" or item.arguments or not _BOUNDS.keys() >= item.named.keys():
        return None
    bounds = [(_BOUNDS[name], bound) for name, bound in item.named.items()]

    def bounded(value: Any) -> Any:
        found = inner(value)
        if not all(holds(found, bound) for holds, bound in bounds):
            raise _Unsure
        return found

    return bounded


def _literal(words: tuple[Any, ...]) -> _Reader:
    known = {(type(word), word) for word in words}

    def read(value: Any) -> Any:
        # 1, 1.0 and true are equal, and each is another word
        if type(value) not in (str, int, bool, type(None)) or (type(value), value) not in known:
            raise _Unsure
        return value

    return read


def _union(kinds: tuple[Any, ...]) -> _Reader | None:
    rest = [kind for kind in kinds if kind is not type(None)]
    if len(rest) == 1 and len(kinds) == 2:
        read = _reader(rest[0])
        if read is None:
            return None
        some: _Reader = read
        return lambda value: None if value is None else some(value)
    if not all(kind in (str, int, float, bool, type(None)) for kind in kinds):
        return None
    readers = {kind: _PLAIN[kind] for kind in kinds}

    def of_kind(value: Any) -> Any:
        # the type itself, so that no other could take it as well
        found = readers.get(type(value))
        if found is None:
            raise _Unsure
        return found(value)

    return of_kind


def _list(item: _Reader) -> _Reader:
    def read(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _Unsure
        return [item(each) for each in value]

    return read


def _dict(key: _Reader, item: _Reader) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _Unsure
        return {key(name): item(each) for name, each in value.items()}

    return read


# --------------------------------------------------------------------------------------------------
# What is written in the body of a model, kept until pydantic is asked.


class _Later:
    """A call of pydantic, such as `Field(ge=1)`, that is made when its model is."""

    def __init__(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.name = name
        self.arguments = arguments
        self.named = named

    def made(self) -> Any:
        import pydantic

        named = {key: _made(value) for key, value in self.named.items()}
        return getattr(pydantic, self.name)(*map(_made, self.arguments), **named)


class _Decorated:
    """A method that pydantic calls: when, and what it is."""

    def __init__(self, later: _Later, method: Any) -> None:
        self.later = later
        self.method = method

    @property
    def mode(self) -> str:
        return str(self.later.named.get("mode", ""))

    def made(self) -> Any:
        """Return it for pydantic's model; of the two classes, class methods know ours."""
        method = self.method
        if isinstance(method, classmethod):
            function = method.__func__

            @functools.wraps(function)
            def of_ours(theirs: Any, *arguments: Any) -> Any:
                return function(theirs.__ours__, *arguments)

            method = classmethod(of_ours)
        return self.later.made()(method)


def _made(value: Any) -> Any:
    return value.made() if isinstance(value, _Later | _Decorated) else value


def _later(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return _Later(name, arguments, named)

    call.__name__ = name
    return call


def _decorator(name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return functools.partial(_Decorated, _Later(name, arguments, named))

    call.__name__ = name
    return call


class _Field:
    """What a key of a model takes: as `pydantic.fields.FieldInfo`, as far as it is looked at."""

    def __init__(self, annotation: Any, value: Any) -> None:
        self.written = annotation
        self.metadata: list[Any] = []
        if get_origin(annotation) is Annotated:
            annotation, *self.metadata = get_args(annotation)
        self.annotation = annotation
        self.default_factory: Callable[[], Any] | None = None
        self.default = value
        # whether pydantic alone reads it
        self.unusual = False
        if isinstance(value, _Later):
            named = dict(value.named)
            self.default = named.pop("default", ...)
            self.default_factory = named.pop("default_factory", None)
            self.unusual = bool(named or value.arguments)

    def is_required(self) -> bool:
        return self.default is ... and self.default_factory is None

    def gives(self, value: Any) -> bool:
        """Return whether this is the value where none is given."""
        return not self.is_required() and bool(value == self.get_default())

    def get_default(self) -> Any:
        if self.default_factory is not None:
            return self.default_factory()
        # what can be changed belongs to one object
        return copy.deepcopy(self.default) if _can_change(self.default) else self.default


def _can_change(value: Any) -> bool:
    return isinstance(value, list | dict | set)


# --------------------------------------------------------------------------------------------------
# Models.


class _Once(Generic[_T]):
    """A property of a class that is made when it is first asked for."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self.make = make

    def __get__(self, kind: Any, owner: type) -> _T:
        # of the class itself: what is inherited is another's
        kept = vars(kind)["_kept"]
        name = self.make.__name__
        if name not in kept:
            kept[name] = self.make(kind)
        made: _T = kept[name]
        return made


class _ModelType(type):
    """The class of models: what is written in them, their fields, and pydantic's model of them."""

    _kept: dict[str, Any]
    _written: dict[str, Any]
    _names: tuple[str, ...]
    _config: dict[str, Any]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], written: dict[str, Any], **options: Any
    ) -> _ModelType:
        parents = [base for base in bases if isinstance(base, _ModelType)]
        own = [
            key
            for key, kind in written.get("__annotations__", {}).items()
            if not key.startswith("_") and key != "model_config" and "ClassVar" not in str(kind)
        ]
        shown = {
            key: value.method if isinstance(value, _Decorated) else value
            for key, value in written.items()
            if key not in own
        }
        made = super().__new__(mcs, name, bases, shown, **options)
        made._kept = {}
        made._written = written
        names: dict[str, None] = {}
        config: dict[str, Any] = {}
        # the nearest base last, whose word counts
        for parent in reversed(parents):
            names |= dict.fromkeys(parent._names)
            config |= parent._config
        made._names = tuple(names | dict.fromkeys(own))
        made._config = config | written.get("model_config", {})
        return made

    @property
    def model_fields(cls) -> Mapping[str, _Field]:
        """What the model takes, by key."""
        return cls._fields

    @_Once
    def _fields(cls) -> dict[str, _Field]:
        found: dict[str, _Field] = {}
        for kind in reversed(cls.__mro__):
            written = vars(kind).get("_written", {}) if isinstance(kind, _ModelType) else {}
            for key, annotation in written.get("__annotations__", {}).items():
                if key in cls._names:
                    found[key] = _Field(_resolved(annotation, kind), written.get(key, ...))
        # in the order of the bases, where a class says a key again
        return {name: found[name] for name in cls._names}

    @_Once
    def _validators(cls) -> dict[str, list[Any]] | None:
        """Methods that look at a whole object, by mode; None where others look at a single key."""
        found: dict[str, dict[str, Any]] = {"before": {}, "wrap": {}, "after": {}}
        for kind in reversed(cls.__mro__):
            for key, item in vars(kind).get("_written", {}).items():
                if not isinstance(item, _Decorated):
                    continue
                if item.later.name == "field_validator":
                    return None
                if item.later.name == "model_validator":
                    # a method that a class writes again has the place of the first
                    found[item.mode][key] = item.method
        return {mode: list(methods) for mode, methods in found.items()}

    @_Once
    def _serializers(cls) -> list[Any]:
        """What makes JSON of an object in another way than key by key: the nearest."""
        found = [
            item.method
            for kind in cls.__mro__
            for item in vars(kind).get("_written", {}).values()
            if isinstance(item, _Decorated) and item.later.name == "model_serializer"
        ]
        return found[:1]

    @_Once
    def _readers(cls) -> list[tuple[str, _Reader, _Field]] | None:
        """Readers of the keys; None where only pydantic can read one of them."""
        if cls._validators is None:
            return None
        found = []
        for name, field in cls._fields.items():
            read = None if field.unusual else _reader(field.written)
            if read is None:
                return None
            found.append((name, read, field))
        return found

    def _read(cls, value: Any) -> Any:
        """Return the object of what is plainly right; raises _Unsure, or whatever a method does."""
        if isinstance(value, cls):
            return value
        validators, readers = cls._validators, cls._readers
        if validators is None or readers is None:
            raise _Unsure

        def read(data: Any) -> Any:
            # the last that is written comes first
            for name in reversed(validators["before"]):
                data = getattr(cls, name)(data)
            made = cls._taken(data, readers)
            for name in validators["after"]:
                made = getattr(made, name)()
            return made

        wrapped: Callable[[Any], Any] = read
        for name in validators["wrap"]:
            wrapped = functools.partial(_call_wrapped, getattr(cls, name), wrapped)
        return wrapped(value)

    def _taken(cls, data: Any, readers: list[tuple[str, _Reader, _Field]]) -> Any:
        if type(data) is not dict:
            raise _Unsure
        if issubclass(cls, _Root):
            data = {"root": data}
        values: dict[str, Any] = {}
        given: set[str] = set()
        for name, read, field in readers:
            if name in data:
                values[name] = read(data[name])
                given.add(name)
            elif field.is_required():
                raise _Unsure
            else:
                values[name] = field.get_default()
        if len(given) < len(data):
            extra = cls._config.get("extra", "ignore")
            if extra == "forbid" or not all(type(key) is str for key in data):
                raise _Unsure
            if extra == "allow":
                more = {key: value for key, value in data.items() if key not in given}
                values |= more
                given |= more.keys()
        return cls._filled(values, given)

    def _filled(cls, values: dict[str, Any], given: Collection[str]) -> Any:
        kind: Any = cls
        made = object.__new__(kind)
        object.__setattr__(made, "_given", set(given))
        object.__getattribute__(made, "__dict__").update(values)
        return made

    def _validated(cls, data: Any) -> Any:
        """Return the object of some data, or raise pydantic's error."""
        # a method of the model may raise anything for what it does not expect
        try:
            return cls._read(data)
        except Exception:
            pass
        # outside the except, so that nothing hangs behind pydantic's error
        return cls._of_theirs(cls._theirs.model_validate(data))

    def _of_theirs(cls, theirs: Any) -> Any:
        """Return the object that holds what an object of pydantic's model does."""
        values = vars(theirs) | (theirs.model_extra or {})
        return theirs.__ours__._filled(values, theirs.model_fields_set)

    @_Once
    def _theirs(cls) -> Any:
        """Pydantic's model of what is written in the class."""
        import pydantic

        if cls is _Base:
            return pydantic.BaseModel
        if cls is _Root:
            return pydantic.RootModel[dict[str, Any]]
        written = {
            key: _made(value) for key, value in cls._written.items() if key != "__classcell__"
        }
        written["__annotations__"] = {
            key: _theirs_of(_resolved(kind, cls)) if key in cls._names else kind
            for key, kind in cls._written.get("__annotations__", {}).items()
        }
        written["__ours__"] = cls
        bases = tuple(b._theirs if isinstance(b, _ModelType) else b for b in cls.__bases__)
        return type(bases[0])(cls.__name__, bases, written)

    def model_json_schema(cls, **options: Any) -> dict[str, Any]:
        """Return the JSON Schema of the model."""
        schema: dict[str, Any] = cls._theirs.model_json_schema(**options)
        return schema


def _call_wrapped(method: Callable[[Any, Any], Any], inner: _Reader, data: Any) -> Any:
    return method(data, inner)


def _resolved(annotation: Any, kind: type) -> Any:
    """Return the type that an annotation of a class says."""
    if not isinstance(annotation, str):
        return annotation
    return eval(annotation, vars(sys.modules[kind.__module__]))


def _theirs_of(kind: Any) -> Any:
    """Return a type with pydantic's models in the place of ours, which read our objects as well."""
    if isinstance(kind, _ModelType):
        from pydantic import WrapValidator

        def ours(value: Any, read: Callable[[Any], Any]) -> Any:
            return value if isinstance(value, kind) else kind._of_theirs(read(value))

        return Annotated[kind._theirs, WrapValidator(ours)]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is None or origin is Literal:
        return kind
    if origin is Annotated:
        return Annotated[(_theirs_of(arguments[0]), *map(_made, arguments[1:]))]
    inner = tuple(map(_theirs_of, arguments))
    return (
        functools.reduce(operator.or_, inner)
        if origin in (Union, types.UnionType)
        else origin[inner]
    )


class _Base(metaclass=_ModelType):
    """An object of a document."""

    __slots__ = ("__dict__", "__weakref__", "_given")
    _given: set[str]

    def __init__(self, /, **data: Any) -> None:
        self._become(type(self)._validated(data))

    def _become(self, made: _Base) -> None:
        object.__setattr__(self, "_given", made._given)
        vars(self).update(vars(made))

    @classmethod
    def model_validate(cls, data: Any) -> Any:
        """Return the object of some data; raises `refusal()`."""
        return cls._validated(data)

    @classmethod
    def model_construct(cls, **values: Any) -> Any:
        """Return an object of values that are known to be right."""
        defaults = {
            name: field.get_default()
            for name, field in cls._fields.items()
            if name not in values and not field.is_required()
        }
        return cls._filled(defaults | values, values)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Any:
        """Return a copy with other values of some keys, which are not validated."""
        changes = dict(update or {})
        return type(self)._filled(vars(self) | changes, self._given | changes.keys())

    @property
    def model_fields_set(self) -> set[str]:
        """Keys that were given."""
        return self._given

    def model_dump(
        self, exclude: Collection[str] = (), mode: str = "python", **leave_out: bool
    ) -> dict[str, Any]:
        """Return the object as JSON has it.

        leave_out : `exclude_none`, `exclude_unset`, `exclude_defaults`.
        """
        for item in type(self)._serializers:
            found: dict[str, Any] = item(self, lambda own: own._dumped(exclude, mode, leave_out))
            return found
        return self._dumped(exclude, mode, leave_out)

    def _dumped(
        self, exclude: Collection[str], mode: str, leave_out: Mapping[str, bool]
    ) -> dict[str, Any]:
        fields = type(self)._fields
        found = {}
        for name, value in vars(self).items():
            if name in exclude or (value is None and leave_out.get("exclude_none")):
                continue
            if name not in self._given and leave_out.get("exclude_unset"):
                continue
            if leave_out.get("exclude_defaults") and name in fields and fields[name].gives(value):
                continue
            found[name] = _plain(value, mode, leave_out)
        return found

    def model_dump_json(self) -> str:
        """Return the text of the object as JSON."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"), ensure_ascii=False)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(vars(self).items())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return vars(self) == vars(other)

    def __hash__(self) -> int:
        if not type(self)._config.get("frozen"):
            raise TypeError(f"unhashable type: {type(self).__name__!r}")
        return hash((type(self), *vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self)})"

    def __setattr__(self, name: str, value: Any) -> None:
        if type(self)._config.get("frozen"):
            raise _frozen(type(self), name, value)
        object.__setattr__(self, name, value)
        self._given.add(name)

    def __delattr__(self, name: str) -> None:
        if type(self)._config.get("frozen"):
            raise _frozen(type(self), name, None)
        object.__delattr__(self, name)

    def __getstate__(self) -> tuple[dict[str, Any], set[str]]:
        return vars(self), self._given

    def __setstate__(self, state: tuple[dict[str, Any], set[str]]) -> None:
        values, given = state
        object.__setattr__(self, "_given", set(given))
        vars(self).update(values)


def _frozen(kind: type, name: str, value: Any) -> Exception:
    from pydantic_core import InitErrorDetails

    details = [InitErrorDetails(type="frozen_instance", loc=(name,), input=value)]
    return refusal().from_exception_data(kind.__name__, details)


def _plain(value: Any, mode: str, leave_out: Mapping[str, bool]) -> Any:
    if isinstance(value, _Base):
        return value.model_dump((), mode, **leave_out)
    if isinstance(value, dict):
        return {key: _plain(item, mode, leave_out) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, mode, leave_out) for item in value]
        return tuple(items) if isinstance(value, tuple) and mode == "python" else items
    return value


class _Root(_Base):
    """An object whose keys are not known beforehand: `root` holds them."""

    __slots__ = ()
    root: dict[str, Any]

    def __init__(self, root: Any = None, /, **data: Any) -> None:
        self._become(type(self)._validated(data if root is None else root))

    def __class_getitem__(cls, kind: Any) -> type[_Root]:
        # of no other kind there is a document
        assert kind == dict[str, Any]
        return cls

    def model_dump(
        self, exclude: Collection[str] = (), mode: str = "python", **leave_out: bool
    ) -> dict[str, Any]:
        """Return the object as JSON has it."""
        found: dict[str, Any] = super().model_dump(exclude, mode, **leave_out)["root"]
        return found


class _Adapter:
    """Reader of a type that is no model."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    @functools.cached_property
    def _reader(self) -> _Reader | None:
        return _reader(self.kind)

    @functools.cached_property
    def _theirs(self) -> Any:
        import pydantic

        return pydantic.TypeAdapter(_theirs_of(self.kind))

    def validate_python(self, value: Any) -> Any:
        """Return what the type holds of a value; raises `refusal()`."""
        if self._reader is not None:
            # as of models: anything may be raised for what is not expected
            try:
                return self._reader(value)
            except Exception:
                pass
        return self._theirs.validate_python(value)

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the type."""
        schema: dict[str, Any] = self._theirs.json_schema()
        return schema


def _create_model(name: str, /, *, __base__: Any, __doc__: str | None = None, **fields: Any) -> Any:
    """Return a model with these fields, each a type and a default."""
    written = {
        "__module__": sys._getframe(1).f_globals["__name__"],
        "__qualname__": name,
        "__annotations__": {key: kind for key, (kind, _) in fields.items()},
        **{key: default for key, (_, default) in fields.items() if default is not ...},
    }
    if __doc__ is not None:
        written["__doc__"] = __doc__
    return type(__base__)(name, (__base__,), written)


if not TYPE_CHECKING:
    AliasChoices = _later("AliasChoices")
    BaseModel = _Base
    BeforeValidator = _later("BeforeValidator")
    ConfigDict = dict
    Field = _later("Field")
    FieldInfo = _Field
    PlainValidator = _later("PlainValidator")
    RootModel = _Root
    TypeAdapter = _Adapter
    WithJsonSchema = _later("WithJsonSchema")
    create_model = _create_model
    field_validator = _decorator("field_validator")
    model_serializer = _decorator("model_serializer")
    model_validator = _decorator("model_validator")
