"""Settings of a uniform plan: fields of a run that differ from the engine's defaults.

They are stored in addition to the degrees, by dotted field name, such as
`{"runtime.states.bucket": 40000000}`. Names of earlier releases are also read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import fields

from autopar.errors import DocumentError, InputError, did_you_mean
from autopar.records import expected_of, replace, shorten
from autopar.run.run import Run, legal
from autopar.training.old_settings import OF_LAYERS, RENAMED

_KEY = "settings"


def different_fields(one: Any, other: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted field, value of `one`, value of `other`) of innermost fields that differ."""
    if one == other:
        return
    if isinstance(one, Struct) and type(one) is type(other):
        for field in one.__struct_fields__:
            name = f"{path}.{field}" if path else field
            yield from different_fields(getattr(one, field), getattr(other, field), name)
    else:
        yield path, one, other


def settings_of(run: Run, usual: Run) -> dict[str, Any]:
    """Return the fields of a run that differ from `usual`, the default run of equal degrees."""
    return {
        path: to_builtins(value, order="deterministic")
        for path, value, _ in different_fields(run, usual)
    }


def with_settings(run: Run, settings: Mapping[str, Any], path: Path) -> Run:
    """Return the run with the settings of a file.

    Raises DocumentError for an unknown field, an invalid value, or a violated rule of runs.
    """
    if not settings:
        return run
    tree: dict[str, Any] = {}
    for said, value in settings.items():
        if said in OF_LAYERS:
            run = OF_LAYERS[said](run, value)
            continue
        name = RENAMED.get(said, said)
        *parents, last = name.split(".")
        below = tree
        for parent in parents:
            below = below.setdefault(parent, {})
            if not isinstance(below, dict):
                raise _wrong(path, name, f"{parent} is also set as a whole")
        below[last] = _Value(value)
    try:
        return legal(_changed(run, tree, path, ""))
    except DocumentError:
        raise
    except InputError as error:
        raise DocumentError(path, str(error), key=f"launch.{_KEY}") from None


class _Value:
    """Wrapper of a setting's value, which distinguishes a mapping from nested fields."""

    def __init__(self, value: object) -> None:
        self.value = value


def _wrong(path: Path, name: str, problem: str, remedy: str = "") -> DocumentError:
    return DocumentError(path, problem, key=f"launch.{_KEY}.{name}", remedy=remedy)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return {field.name: field.type for field in fields(kind)}


def _changed(record: Any, tree: Mapping[str, Any], path: Path, name: str) -> Any:
    kind: Any = type(record)
    hints = _hints(kind)
    found = {}
    for field, below in tree.items():
        whole = f"{name}.{field}" if name else field
        if field not in hints:
            hint = did_you_mean(field, tuple(hints))
            raise _wrong(path, whole, "is not a field of a run", hint)
        if isinstance(below, _Value):
            try:
                found[field] = convert(below.value, hints[field])
            except ValidationError:
                problem = f"expected {expected_of(hints[field])}, got {shorten(below.value)}"
                raise _wrong(path, whole, problem) from None
            continue
        inner = getattr(record, field)
        if not isinstance(inner, Struct):
            raise _wrong(path, whole, "has no fields in this run", remedy="Set it as a whole")
        found[field] = _changed(inner, below, path, whole)
    return replace(record, **found)
