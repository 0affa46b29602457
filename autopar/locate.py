"""Chooses the model file in a directory: documented name, then published releases' names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar.errors import DocumentError
from autopar.model import ModelSpec

__all__ = ["Content", "locate", "model_file_name"]

Content = Literal["processed", "raw", "none"]
"""What a candidate offers: processed keys, raw runs they can be derived from, or neither."""

_OTHER_UNITS = ("_attention", "_mlp", "_first", "_last")
"""Ends of names of files that hold a part of a model (or of a measurement) only."""


@dataclass(frozen=True, kw_only=True)
class _Tier:
    """File names that are equally good."""

    paths: tuple[Path, ...]
    note: str | None = None


def model_file_name(kind: Literal["computation", "memory"], precision: str, spec: ModelSpec) -> str:
    """Return the documented name of a model file; `*` stands for an unknown number of heads."""
    heads = spec.layers[0].num_heads
    hidden = spec.layers[0].hidden_size
    return f"{kind}_profiling_{precision}_hidden_{hidden}_head_{heads or '*'}.json"


def locate(
    directory: Path,
    kind: Literal["computation", "memory"],
    precision: str,
    spec: ModelSpec,
    content: Callable[[Path], Content],
    remedy: str,
) -> tuple[Path, tuple[str, ...]]:
    """Return the file of a model in a directory, and notes on what was skipped.

    The documented name wins, then the newest release's (`_all`), then v2.4's; files that name
    the model come before others. Files without processed keys are skipped; files whose raw
    entries suffice are taken only if no file has processed keys.

    Raises
    ------
    DocumentError: no usable file (with `remedy`), or several equally good ones.
    """
    tiers = _tiers(directory, kind, precision, spec)
    found = {path: content(path) for tier in tiers[:1] for path in tier.paths}
    skipped = []
    for wanted in ("processed", "raw"):
        for tier in tiers:
            for path in tier.paths:
                if path not in found:
                    found[path] = content(path)
            chosen = [path for path in tier.paths if found[path] == wanted]
            if len(chosen) > 1:
                raise DocumentError(
                    directory,
                    f"{len(chosen)} files could be the {kind} profile of model {spec.name!r}: "
                    + ", ".join(path.name for path in chosen),
                    remedy="name the file instead of the directory",
                )
            if chosen:
                skipped = [
                    f"{path.name} was skipped: it has no processed keys"
                    for path, what in found.items()
                    if what != "processed" and path != chosen[0]
                ]
                return chosen[0], (*skipped, *([tier.note] if tier.note else []))
    expected = model_file_name(kind, precision, spec)
    present = [p.name for p in _documents(directory, f"{kind}_profiling_*.json")]
    unusable = [path.name for path, what in found.items() if what == "none"]
    problem = f"no {kind} profile of model {spec.name!r} in this directory, expected {expected}"
    if unusable:
        problem += f" ({', '.join(unusable[:4])} has no processed keys)"
    elif present:
        problem += f" (present: {', '.join(present[:4])})"
    raise DocumentError(directory, problem, remedy=remedy)


def _documents(directory: Path, pattern: str) -> tuple[Path, ...]:
    """Return the matching files in the order of their names, without sidecars."""
    found = sorted(directory.glob(pattern))
    return tuple(path for path in found if not path.name.endswith(".meta.json"))


def _tiers(
    directory: Path, kind: Literal["computation", "memory"], precision: str, spec: ModelSpec
) -> list[_Tier]:
    layer = spec.layers[0]
    documented = _documents(directory, model_file_name(kind, precision, spec))
    prefix = f"{kind}_profiling_{precision}_"
    names = [spec.name]
    if layer.num_heads is not None:
        names.append(f"hidden{layer.hidden_size}_head{layer.num_heads}")
    names += [f"{name}_seqlen{layer.seq_length}" for name in names]
    newest: list[Path] = []
    older: list[Path] = []
    other_newest: list[Path] = []
    other_older: list[Path] = []
    for path in _documents(directory, f"{prefix}*.json"):
        stem = path.name.removeprefix(prefix).removesuffix(".json")
        if path in documented:
            continue
        base = stem.removesuffix("_all")
        if base in names:
            (newest if base != stem else older).append(path)
        elif _may_be(base, spec):
            (other_newest if base != stem else other_older).append(path)
    note = f"the file was taken though its name does not name model {spec.name!r}"
    return [
        _Tier(paths=documented),
        _Tier(paths=tuple(newest)),
        _Tier(paths=tuple(older)),
        _Tier(paths=tuple(other_newest), note=note),
        _Tier(paths=tuple(other_older), note=note),
    ]


def _may_be(base: str, spec: ModelSpec) -> bool:
    """Return whether a name without the model's name does not contradict the model."""
    if base.endswith(_OTHER_UNITS):
        return False
    layer = spec.layers[0]
    for pattern, actual in (
        (r"hidden_?([0-9]+)", layer.hidden_size),
        (r"head_?([0-9]+)", layer.num_heads),
        (r"seqlen_?([0-9]+)", layer.seq_length),
    ):
        match = re.search(pattern, base)
        if match and actual is not None and int(match[1]) != actual:
            return False
    return True
