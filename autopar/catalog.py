"""Finds shipped models and hardware: explicit path, then packaged data, then the repository.

An installed wheel carries `models/` and `hardware_configs/` as `autopar/_data/...`; an editable
installation does not, so the folder that contains the package is tried after it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from autopar.errors import InputError

__all__ = [
    "card_names",
    "find_card",
    "find_configs",
    "find_document",
    "find_hardware",
    "find_model",
    "hardware_names",
    "model_names",
]

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped model specs, sorted."""
    return tuple(sorted(_files("models", "*/model.json", lambda p: p.parent.name)))


def card_names() -> tuple[str, ...]:
    """Return the names of the shipped device cards, sorted, without their aliases."""
    return tuple(sorted(_files("hardware_configs/cards", "*.json", lambda p: p.stem)))


def hardware_names() -> tuple[str, ...]:
    """Return the names of the shipped sets of hardware files, sorted."""
    return tuple(sorted(_hardware()))


def find_model(name: str) -> Path:
    """Return the spec file of a model: an existing path, or a shipped name's `model.json`.

    Raises InputError, with the nearest names, when there is none.
    """
    path = Path(name)
    if path.is_file():
        return path
    if (path / "model.json").is_file():
        return path / "model.json"
    shipped = _files("models", "*/model.json", lambda p: p.parent.name)
    if name in shipped:
        return shipped[name]
    raise InputError(
        f"no model {name!r}: neither a file nor a shipped model; {_nearest(name, shipped)}"
    )


def find_configs(name: str) -> Path | None:
    """Return the folder of the files that were measured of a shipped model, None for any other.

    Raises InputError as `find_model`.
    """
    path = find_model(name).resolve()
    shipped = _files("models", "*/model.json", lambda p: p.parent.name).values()
    return next((p.parent / "configs" for p in shipped if p.resolve() == path), None)


def find_card(name: str) -> Path:
    """Return the file of a device card: an existing path, a shipped name or one of its aliases.

    Raises InputError, with the nearest names, when there is none.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = _files("hardware_configs/cards", "*.json", lambda p: p.stem)
    aliases = {alias: path for path in shipped.values() for alias in _aliases(path)}
    found = shipped.get(name.lower()) or aliases.get(name.lower())
    if found is None:
        raise InputError(
            f"no device card {name!r}: neither a file nor a shipped card; "
            f"{_nearest(name, {**shipped, **aliases})}"
        )
    return found


def find_hardware(name: str) -> Path:
    """Return the folder of a set of documented hardware files: an existing one or a shipped name.

    Raises InputError, with the nearest names, when there is none.
    """
    if Path(name).is_dir():
        return Path(name)
    shipped = _hardware()
    if name in shipped:
        return shipped[name]
    cards = ", ".join(f"{card}:NxG" for card in card_names())
    raise InputError(
        f"no hardware {name!r}: neither a folder nor a shipped set; {_nearest(name, shipped)}, "
        f"or estimate one from a card ({cards})"
    )


def find_document(folder: str, what: str, name: str) -> Path:
    """Return a file of a folder of `hardware_configs`: an existing path, or a shipped name.

    A name of a card leads to the document of that card; `what` is what it is called in errors.
    Raises InputError, with the nearest names, when there is none.
    """
    if Path(name).is_file():
        return Path(name)
    shipped = _files(f"hardware_configs/{folder}", "*.json", lambda p: p.stem)
    cards = _files("hardware_configs/cards", "*.json", lambda p: p.stem)
    aliases = {alias: path.stem for path in cards.values() for alias in _aliases(path)}
    found = shipped.get(name.lower()) or shipped.get(aliases.get(name.lower(), ""))
    if found is None:
        raise InputError(
            f"no {what} {name!r}: neither a file nor a shipped {what}; {_nearest(name, shipped)}"
        )
    return found


def _files(folder: str, pattern: str, key: Callable[[Path], str]) -> dict[str, Path]:
    """Return the shipped files by name; the first root that has a name wins."""
    found: dict[str, Path] = {}
    for root in _ROOTS:
        for path in sorted((root / folder).glob(pattern)):
            found.setdefault(key(path), path)
    return found


def _hardware() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in _ROOTS:
        for path in sorted((root / "hardware_configs").glob("*/allreduce_bandwidth_*.json")):
            found.setdefault(path.parent.name, path.parent)
    return found


def _aliases(path: Path) -> list[str]:
    try:
        aliases = json.loads(path.read_text(encoding="utf-8")).get("aliases", [])
    except (OSError, ValueError, AttributeError):
        return []  # a broken card is reported where it is read, not where names are listed
    return [str(alias) for alias in aliases] if isinstance(aliases, list) else []


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}"
    return f"known: {', '.join(names)}" if names else "none is shipped"
