"""`__all__` is the public interface: present, sorted, and exactly the public names defined."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = sorted(
    path
    for package in ("autopar", "search", "profiler")
    for path in (ROOT / package).rglob("*.py")
    if path.name == "__init__.py" or not path.stem.startswith("_")
)


@cache
def imported_from() -> dict[str, set[str]]:
    """Return, for every module, the names that other modules of the packages import from it."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def module_name(path: Path) -> str:
    """Return the name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def declared_names(tree: ast.Module) -> list[str] | None:
    """Return the literal value of `__all__`, None when the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def public_names(tree: ast.Module, used_elsewhere: set[str]) -> set[str]:
    """Return the public names that a module itself defines at its top level.

    An alias for the module's own annotations (`F64 = NDArray[np.float64]`, a TypeVar) counts
    only once another module imports it; a function registered as a command does not count.
    """
    names: set[str] = set()
    aliases: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not any(is_registration(decorator) for decorator in node.decorator_list):
                names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = [n for target in node.targets for n in ast.walk(target)]
            names |= {n.id for n in targets if isinstance(n, ast.Name)}
            aliases |= {n.id for n in targets if isinstance(n, ast.Name) and is_alias(n.id)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {n for n in names - (aliases - used_elsewhere) if not n.startswith("_")}


def is_registration(decorator: ast.expr) -> bool:
    """Return whether a decorator hands the function to a command line (`@app.command()`)."""
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Attribute) and call.attr in {"command", "callback"}


def is_alias(name: str) -> bool:
    """Return whether an assigned name is spelt like a type: CamelCase, or F64 and the like."""
    return re.fullmatch(r"[A-Z]\d*|[A-Z]+[a-z]\w*", name) is not None


def imported_names(tree: ast.Module) -> set[str]:
    """Return the names that a module imports, which `__all__` may pass on."""
    return {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def sort_key(name: str) -> tuple[int, list[str | int]]:
    """Order as the linter does: CONSTANTS, Classes, functions; numbers by value."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_all_is_the_public_interface(path: Path) -> None:
    """What a module defines in public is declared, and what it declares is there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    declared = declared_names(tree)
    public = public_names(tree, imported_from().get(module_name(path), set()) | set(declared or ()))

    if declared is None:
        assert path.name in {"__init__.py", "__main__.py"}, "every public module defines __all__"
        assert public <= {"main"}, "a module with public names defines __all__"
        return

    assert declared == sorted(declared, key=sort_key)
    assert len(declared) == len(set(declared))
    extra = set(declared) - public - {n for n in declared if n.startswith("__")}
    assert public - set(declared) == set(), "public, but not in __all__"
    assert extra - imported_names(tree) == set(), "in __all__, but neither defined nor imported"


def test_check_sees_what_it_must() -> None:
    """Functions, classes and constants count always, aliases once somebody imports them."""
    tree = ast.parse(
        "F64 = x\nKind = y\nLIMIT = 1\n_a = 2\nclass C: ...\ndef f(): ...\n"
        "n: int = 3\n@app.command()\ndef c(): ..."
    )

    assert public_names(tree, set()) == {"LIMIT", "C", "f", "n"}
    assert public_names(tree, {"Kind"}) == {"Kind", "LIMIT", "C", "f", "n"}
    assert sorted(["f10", "f9", "Kind", "LIMIT", "A"], key=sort_key) == [
        "LIMIT",
        "A",
        "Kind",
        "f9",
        "f10",
    ]
