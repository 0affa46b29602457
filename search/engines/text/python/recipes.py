"""The configuration that a Python file builds, and the effects that were not followed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from autopar.errors import DocumentError
from autopar.records import Record
from search.engines.text.python.evaluator import Evaluator, TooLongError
from search.engines.text.python.values import MAIN, Known, Module, Section, Unknown


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
    function : function that returns it; empty: the only one, without those that another one calls.
    environment : known variables of the run.
    started : configurations that the file trains itself, which come first.

    Raises DocumentError for a file that is not Python, without a configuration, or with several.
    """

    def loaded() -> tuple[Evaluator, Module]:
        evaluator = Evaluator(known, environment=environment)
        return evaluator, evaluator.load(MAIN, text, path.name)

    try:
        evaluator, module = loaded()
        begun = {str(at): (one, evaluator) for at, one in enumerate(started())}
        found = begun or _returned(loaded, module, name, function)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = ""
        if isinstance(error, SyntaxError) and error.lineno is not None:
            where = f"line {error.lineno}: "
        why = f"Python does not accept it ({getattr(error, 'msg', error)!s:.60})"
        remedy = "Correct it, or write the values into a launch script"
        raise DocumentError(path, f"{where}{why}", remedy=remedy) from None
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
    config, evaluator = next(iter(found.values()))
    assumed = dict.fromkeys(evaluator.process.assumed)
    return BuiltConfiguration(
        config=config,
        lost=tuple((one.line, one.what) for one in evaluator.lost),
        assumed=tuple(f"line {line}: {text}" for line, text in assumed),
    )


def _returned(
    loaded: Callable[[], tuple[Evaluator, Module]], module: Module, name: str, function: str
) -> dict[str, tuple[Section, Evaluator]]:
    """Return the configurations by function, without those that another one calls.

    loaded : evaluates the file again, as a function may change values of the module.
    """
    found = {}
    for own, node in module.functions.items():
        required = len(node.args.args) > len(node.args.defaults)
        if own != function and (function or required or own.startswith("_")):
            continue
        evaluator, fresh = loaded()
        value = evaluator.call(fresh, own)
        if isinstance(value, Section) and value.name == name:
            found[own] = (value, evaluator)
    called = {
        inner.func.id
        for own in found
        for inner in ast.walk(module.functions[own])
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name)
    }
    return {own: pair for own, pair in found.items() if own not in called}
