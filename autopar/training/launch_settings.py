"""What one launch says otherwise than another one, by dotted field, and a launch changed by that.

The file of a launch holds degrees; whatever else the launch says than its trainer does by itself
stands beside them as such settings: `{"optimizer.bucket": 40000000}`. Values are those of JSON.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from autopar.documents.json import shorten
from autopar.errors import DocumentError, InputError, did_you_mean
from autopar.run.launch import Launch

_KEY = "settings"


def different_fields(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted field, value, other value) of the innermost fields in which two differ."""
    if one == other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            name = f"{path}.{field.name}" if path else field.name
            yield from different_fields(getattr(one, field.name), getattr(other, field.name), name)
    else:
        yield path, one, other


def settings_of(launch: Launch, usual: Launch) -> dict[str, Any]:
    """Return what a launch says otherwise than the usual one of its degrees."""
    return {path: _written(value) for path, value, _ in different_fields(launch, usual)}


def with_settings(launch: Launch, settings: Mapping[str, Any], path: Path) -> Launch:
    """Return the launch with the settings of a file.

    Raises DocumentError for a field that no launch has, a value that it does not take, and what the
    launch refuses.
    """
    if not settings:
        return launch
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
            if not isinstance(below, dict):
                raise _wrong(path, name, f"{parent} is set as a whole as well")
        below[last] = _Value(value)
    try:
        changed = _changed(launch, tree, path, "")
    except DocumentError:
        raise
    except InputError as error:
        raise DocumentError(path, str(error), key=f"launch.{_KEY}") from None
    assert isinstance(changed, Launch), "a launch changed is a launch"
    return changed


class _Value:
    """A value of a setting, which may itself be a mapping."""

    def __init__(self, value: object) -> None:
        self.value = value


def _wrong(path: Path, name: str, problem: str) -> DocumentError:
    return DocumentError(path, problem, key=f"launch.{_KEY}.{name}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _changed(record: Any, tree: Mapping[str, Any], path: Path, name: str) -> Any:
    kind: Any = type(record)
    hints = _hints(kind)
    found = {}
    for field, below in tree.items():
        whole = f"{name}.{field}" if name else field
        if field not in hints:
            hint = did_you_mean(field, tuple(hints), 0.6)
            raise _wrong(path, whole, f"is no field of a launch{hint}")
        if isinstance(below, _Value):
            try:
                found[field] = _read(hints[field], below.value)
            except (TypeError, ValueError):
                expected = str(hints[field]).replace("typing.", "")
                problem = f"expected {expected:.80}, got {shorten(below.value)}"
                raise _wrong(path, whole, problem) from None
            continue
        inner = getattr(record, field)
        if not is_dataclass(inner):
            raise _wrong(path, whole, "has no fields in this launch; set it as a whole")
        found[field] = _changed(inner, below, path, whole)
    return replace(record, **found)


def _written(value: Any) -> Any:
    """Return a value as JSON has it."""
    if is_dataclass(value):
        return {field.name: _written(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    return value


def _read(hint: Any, value: Any) -> Any:
    """Return a value of JSON as a field of such a type has it; TypeError where it is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        if any(value == one and type(value) is type(one) for one in inner):
            return value
        raise TypeError
    if origin in (Union, types.UnionType):
        return _read_any(inner, value)
    if origin is frozenset:
        return frozenset(_read(inner[0], item) for item in _list(value))
    if origin is tuple:
        items = _list(value)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_read(inner[0], item) for item in items)
        if len(items) != len(inner):
            raise TypeError
        return tuple(_read(kind, item) for kind, item in zip(inner, items, strict=True))
    if is_dataclass(hint) and isinstance(value, Mapping):
        assert isinstance(hint, type), "the class of a record"
        hints = _hints(hint)
        if value.keys() - hints.keys():
            raise TypeError
        return hint(**{name: _read(hints[name], value[name]) for name in hints if name in value})
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise TypeError


def _read_any(kinds: Sequence[Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return _read(kind, value)
        except TypeError:
            continue
    raise TypeError


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value
