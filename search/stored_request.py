"""What a plan file of ours says about the question that it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from search.cli_options import OPTIONS

__all__ = ["changed_inputs", "stored_request"]


def stored_request(path: str, document: Mapping[str, object]) -> dict[str, object]:
    """Return the options that a plan file of ours was made with, empty for other files."""
    stored = document.get("request", {})
    if not isinstance(stored, Mapping):
        raise DocumentError(path, f"expected an object, got {stored!r:.60}", key="request")
    known = {row.name: row for row in OPTIONS}
    for name, value in stored.items():
        kind = known[name].kind if name in known else None
        legal = {
            None: False,
            "flag": isinstance(value, bool),
            "switch": isinstance(value, bool),
            "texts": isinstance(value, list) and all(isinstance(item, str) for item in value),
        }.get(kind, isinstance(value, str))
        if not legal:
            raise DocumentError(
                path,
                f"holds the option {name!r} with the unusable value {value!r:.60}",
                key="request",
                remedy="write the plan again with autopar-search",
            )
    return dict(stored)


def changed_inputs(document: Mapping[str, object], sources: Sequence[Any]) -> list[str]:
    """Return the names of inputs that are no longer those that the plan file was made from."""
    then = document.get("inputs")
    if not isinstance(then, list):
        return []
    digests = {
        str(item.get("role")): item.get("sha256") for item in then if isinstance(item, Mapping)
    }
    changed = []
    for source in sources:
        old = digests.get(source.role)
        if old and source.sha256 and old != source.sha256:
            changed.append(Path(source.path).name)
    return changed
