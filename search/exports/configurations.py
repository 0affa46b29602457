"""Configurations of engines as they are found: shell script, YAML or JSON -> keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten
from autopar.plan import Plan
from search.exports.shell_words import script_command
from search.exports.yaml_text import load_yaml

__all__ = ["Configuration", "Imported", "flags_of", "read_configuration"]

_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A plan that was found in an engine's configuration."""

    plan: Plan
    notes: tuple[str, ...]
    """What a plan does not say, and how to price it; what was read in two ways."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Content of a file: flags of a command line, or a document."""

    path: Path
    flags: Mapping[str, tuple[str, ...]] | None
    """Of a script; None for documents."""
    document: Mapping[str, Any]
    world_size: int | None = None
    """Where the launch says it."""
    notes: tuple[str, ...] = ()


def read_configuration(path: Path | str) -> Configuration:
    """Return the content of a `.json`, a `.yaml` or a script, told apart by suffix and content.

    Raises
    ------
    DocumentError : the file is missing or unreadable, or is none of these.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        return Configuration(path=path, flags=None, document=load_object(path).data)
    text = _read(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return Configuration(path=path, flags=None, document=load_yaml(text, path))
    if text.lstrip().startswith("{"):
        return Configuration(path=path, flags=None, document=load_object(path).data)
    command = script_command(text, path)
    if not any(word.startswith("--") for word in command.arguments):
        raise DocumentError(
            path,
            "holds no command that runs a .py file with --flags and no array of them",
            remedy="give the launch script, a .yaml or a .json",
        )
    notes = ["both branches of its conditions were read"] if command.branches else []
    return Configuration(
        path=path,
        flags=flags_of(command.arguments, path, unique=command.branches),
        document={},
        world_size=_world(command.before),
        notes=tuple(notes),
    )


def _read(path: Path) -> str:
    if not path.exists():
        raise DocumentError(path, "this file does not exist")
    if not path.is_file():
        raise DocumentError(path, "this is not a regular file, expected a configuration")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DocumentError(path, f"is larger than {_MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(path, f"byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise DocumentError(path, f"the file cannot be read ({error.strerror})") from None


def flags_of(
    words: Sequence[str], path: Path | str, *, unique: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command line: name with hyphens -> words; the last one counts.

    Raises
    ------
    DocumentError : with `unique`, a flag is given twice with different words.
    """
    flags: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        given = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            given.append(words[at])
            at += 1
        if unique and flags.get(name, tuple(given)) != tuple(given):
            raise DocumentError(
                path,
                f"gives --{name} twice, as {shorten(' '.join(flags[name]))} and as "
                f"{shorten(' '.join(given))}, in branches that are not followed",
                remedy="give a script without the branch that is not taken",
            )
        flags[name] = tuple(given)
    return flags


def _world(before: Sequence[str]) -> int | None:
    """Return nodes times processes of a torchrun line, where it says both."""
    flags = flags_of(before, "")
    nodes = flags.get("nnodes", ("1",))[:1]
    processes = flags.get("nproc-per-node", ())[:1]
    if not nodes or not processes or not (nodes[0].isdigit() and processes[0].isdigit()):
        return None
    return int(nodes[0]) * int(processes[0])
