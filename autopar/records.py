"""Records: the frozen, keyword-only classes that hold data.

A subclass of `Record` is a `msgspec.Struct`: annotations are its fields, it is compared, hashed and
shown by value, and `msgspec.structs` has `asdict` and `fields` of it. Options of a class:

- `order=True` compares as tuples do; `eq=False` compares by identity (records of arrays);
- `dict=True` where it has a `functools.cached_property`;
- `kw_only=False` takes its fields by position as well.

What changes is a standard `dataclasses.dataclass`; so are the options of commands, whose fields
have metadata (`autopar.command.fields`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, dataclass_transform

from msgspec import Struct, StructMeta, field, structs

if TYPE_CHECKING:
    # to a type checker it is the standard one, whose changes it compares with the fields
    from dataclasses import replace as replace
else:

    def replace(one, /, **changes):
        """Return a copy with other values of some fields, as `copy.replace` of Python 3.13.

        Of a record or a standard dataclass; TypeError for what is no field.
        """
        if isinstance(one, Struct):
            return structs.replace(one, **changes)
        import dataclasses

        return dataclasses.replace(one, **changes)


class _RecordType(StructMeta):
    """Set the options of `Record` for its subclasses, which do not inherit `kw_only`."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        frozen: bool = True,
        kw_only: bool = True,
        **options: Any,
    ) -> _RecordType:
        options |= {"frozen": frozen, "kw_only": kw_only}
        return super().__new__(mcs, name, bases, namespace, **options)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Record(Struct, metaclass=_RecordType, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""
