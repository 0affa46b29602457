"""The configuration that a Python file builds, with what is lost of it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from autopar.errors import DocumentError
from autopar.records import Record
from search.engines.text.python.evaluator import Evaluator, TooLongError
from search.engines.text.python.values import Known, Module, Section, Unknown


class BuiltConfiguration(Record):
    """Configuration of a file: an instance of its class, and effects that were not followed."""

    config: Section
    lost: tuple[tuple[int, str], ...]
    """Pairs (line, effect that may change the configuration)."""
    assumed: tuple[str, ...]
    """Sentences on defaults that stand for values of the run."""

    def sentences(self, unknown: Mapping[str, Unknown]) -> tuple[str, ...]:
        """Return sentences on lost effects and on unknown values by key, in order of lines."""
        said = [(one.line, f"{key} is not known: {one.why}") for key, one in unknown.items()]
        return tuple(f"line {line}: {text}" for line, text in sorted({*said, *self.lost}))


def built_by(
    path: Path,
    text: str,
    known: Known,
    name: str,
    *,
    function: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    started: Callable[[], Sequence[Section]] = tuple,
) -> BuiltConfiguration:
    """Return the configuration of a file.

    name : class of the configuration.
    function : function that returns it; empty for the only one that no other such function calls.
    environment : known variables of the run.
    started : configurations that the file trains itself, which come first.

    Raises DocumentError for a file that is not Python, without a configuration, or with several.
    """
    evaluator = Evaluator(known, environment=environment)
    try:
        module = evaluator.load("__main__", text, path.name)
        begun = {str(at): one for at, one in enumerate(started())}
        found = begun or _returned(evaluator, module, name, function)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno} " if isinstance(error, SyntaxError) else ""
        raise DocumentError(path, f"{line}is no Python that can be read") from None
    except TooLongError:
        raise DocumentError(path, "computes too much to be followed") from None
    if not found:
        what = f"no function {function}" if function else "no function"
        remedy = "Give the file whose function returns the recipe"
        raise DocumentError(path, f"has {what} that returns {name}", remedy=remedy)
    if len(found) > 1:
        names = "" if begun else f": {', '.join(sorted(found))}"
        remedy = "Keep one of them, or give a launch script that names one"
        raise DocumentError(path, f"has {len(found)} recipes{names}", remedy=remedy)
    config = next(iter(found.values()))
    parts = {id(config), *_parts(config)}
    lost = (one for one in evaluator.lost if not one.of or parts & {*one.of})
    return BuiltConfiguration(
        config=config,
        lost=tuple((one.line, one.what) for one in lost),
        assumed=tuple(f"line {line}: {text}" for line, text in dict.fromkeys(evaluator.assumed)),
    )


def _returned(evaluator: Evaluator, module: Module, name: str, function: str) -> dict[str, Section]:
    """Return the configurations by function, without those that another one calls."""
    found = {}
    for own, node in module.functions.items():
        required = len(node.args.args) > len(node.args.defaults)
        if own != function and (function or required or own.startswith("_")):
            continue
        lost = len(evaluator.lost)
        value = evaluator.call(module, own)
        if isinstance(value, Section) and value.name == name:
            found[own] = value
        else:
            del evaluator.lost[lost:]
    called = {
        inner.func.id
        for own in found
        for inner in ast.walk(module.functions[own])
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
    }
    return {own: value for own, value in found.items() if own not in called}


def _parts(section: Section) -> Iterator[int]:
    """Yield the `id` of all sections of a configuration."""
    for value in section.fields.values():
        if isinstance(value, Section):
            yield id(value)
            yield from _parts(value)
