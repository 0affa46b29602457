"""Values that a program reads from its process: environment variables and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search.engines.text.python.values import (
    CLASSES,
    MISSING,
    Journal,
    Named,
    Section,
    Unknown,
)

ENVIRONMENT = Named(name="os.environ")
MODULES = (Named(name="os"), Named(name="sys"))
"""Modules with the values of the process."""
NAMESPACE = "Namespace"
"""Class of the parsed arguments."""
_PARSER = "ArgumentParser"
_ARGUMENTS = "arguments of the parser"
"""Field of a parser: default by name of the argument."""
_READS = ("os.environ.get", "os.environ.setdefault", "os.getenv")
_CHANGES = ("os.environ.clear", "os.environ.pop", "os.environ.setdefault", "os.environ.update",
            "os.putenv", "os.unsetenv")  # fmt: skip
_SPECIAL = frozenset({"argument_default", "fromfile_prefix_chars", "parents", "prefix_chars"})
"""Arguments of a parser that change what its arguments mean."""


class Process:
    """Environment variables of a program, and the defaults of its arguments.

    environment : known variables; those with a `$` have a value that only the run knows.
    assumed : pairs (line, sentence on a default that stands for a value of the run).
    """

    def __init__(self, environment: Mapping[str, str], journal: Journal) -> None:
        self.environment: dict[str, Any] = {
            name: Unknown(why=f"{name} has a value of the run", line=1, file="environment")
            if "$" in value
            else value
            for name, value in environment.items()
        }
        self.assumed: list[tuple[int, str]] = []
        self._journal = journal

    def changed_by(self, name: str) -> bool:
        """Return whether a function changes environment variables or arguments."""
        return name in _CHANGES or name.startswith("sys.argv.")

    def variable(self, line: int, name: str, words: list[Any], named: Mapping[str, Any]) -> Any:
        """Return what a call reads of the environment; NotImplemented: it is not followed.

        name : dotted name of the function, such as `os.getenv`.
        """
        given = [*words, *named.values()]
        ends = len(given) in (1, 2) and named.keys() <= {"default"} and words
        if name not in _READS or not ends or not isinstance(words[0], str):
            return NotImplemented
        variable, default = words[0], given[1] if len(given) == 2 else MISSING
        found = self.environment.get(variable, default)
        if found is MISSING:
            return NotImplemented
        if variable not in self.environment and not isinstance(found, Unknown):
            self.assumed.append((line, f"{variable} is not set: {default!r} counts"))
        if name.endswith("setdefault"):
            self._journal.put(self.environment, variable, found)
        return found

    def parser_call(
        self, of: Section, place: Unknown, name: str, words: list[Any], named: Mapping[str, Any]
    ) -> Any:
        """Return the value of a method of `argparse.ArgumentParser`; NotImplemented: not followed.

        place : unknown value at the line of the call. The arguments have their defaults.
        """
        if of.name != _PARSER or of.kind is not None or _SPECIAL & of.fields.keys():
            return NotImplemented
        if not all(isinstance(one, str) for one in words):
            return NotImplemented
        defaults = of.fields.setdefault(_ARGUMENTS, {})
        match name:
            case "add_argument_group" | "add_mutually_exclusive_group":
                return of
            case "add_argument" if words:
                flag = next((one for one in words if one.startswith("--")), words[0])
                own = str(named.get("dest", flag.lstrip("-").replace("-", "_")))
                before = defaults.get(own, MISSING)
                self._journal.put(defaults, own, _default(place, flag, before, named))
                return None
            case "set_defaults" if not words:
                for key, value in named.items():
                    # The type of the argument converts text.
                    text = isinstance(value, str)
                    found = _because(place, f"set_defaults gives {key} as text") if text else value
                    self._journal.put(defaults, key, found)
                return None
            case "parse_args" | "parse_known_args" if not words and not named:
                self.assumed.append((place.line, "arguments of the program have their defaults"))
                read = Section(NAMESPACE, defaults)
                return read if name == "parse_args" else (read, [])
        return NotImplemented


def _because(place: Unknown, why: str, *, absent: bool = False) -> Unknown:
    return Unknown(why=why, line=place.line, file=place.file, absent=absent)


def _default(place: Unknown, flag: str, before: Any, named: Mapping[str, Any]) -> Any:
    """Return the default of an argument; unknown: it is required, or its type is not followed.

    before : default of another argument, or of the parser, for the same name.
    named : keyword arguments of `add_argument`.
    """
    if not flag.startswith("-") or named.get("required", False) is not False:
        return _because(place, f"{flag} has no default")
    if before is not MISSING:
        several = "default" in named
        return _because(place, f"{flag} has two defaults") if several else before
    switch = {"store_true": False, "store_false": True}.get(str(named.get("action")))
    default, kind = named.get("default", switch), named.get("type")
    if isinstance(default, Named):
        return _because(place, f"the default of {flag} is {default.name}", absent=True)
    if not isinstance(default, str) or kind is None:
        return default
    if isinstance(kind, Named) and kind.name in CLASSES:
        try:
            return CLASSES[kind.name](default)
        except ValueError:
            return _because(place, f"the default of {flag} has another type")
    return _because(place, f"the type of {flag} is not followed")
