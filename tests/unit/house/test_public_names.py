"""`__all__` is the face of a package: `__init__.py` alone has one, sorted and complete."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = [
    path for package in ("autopar", "search", "profiler") for path in (ROOT / package).rglob("*.py")
]
FACES = sorted(path for path in PRODUCT if path.name == "__init__.py")


def declared_names(tree: ast.Module) -> list[str] | None:
    """Return the literal value of `__all__`, None when the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            value: list[str] = ast.literal_eval(node.value)
            return value
    return None


def public_names(tree: ast.Module) -> set[str]:
    """Return the public names that a module itself defines at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            targets = [n for target in node.targets for n in ast.walk(target)]
            names |= {n.id for n in targets if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {n for n in names if not n.startswith("_")}


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


def test_inner_modules_have_no_all() -> None:
    """A name without an underscore is public; a second list of them would only repeat it."""
    inner = {
        path.relative_to(ROOT).as_posix()
        for path in PRODUCT
        if path.name != "__init__.py"
        and declared_names(ast.parse(path.read_text(encoding="utf-8"))) is not None
    }
    assert inner == set()


@pytest.mark.parametrize("path", FACES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_all_is_the_face_of_a_package(path: Path) -> None:
    """What a package defines in public is declared, and what it declares is there."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    declared = declared_names(tree)
    public = public_names(tree)
    if declared is None:
        assert public == set(), "a package with public names defines __all__"
        return
    assert declared == sorted(declared, key=sort_key)
    assert len(declared) == len(set(declared))
    assert public - set(declared) == set(), "public, but not in __all__"
    extra = {n for n in set(declared) - public if not n.startswith("__")}
    assert extra - imported_names(tree) == set(), "in __all__, but neither defined nor imported"


def test_check_sees_what_it_must() -> None:
    """Functions, classes and constants are public, names with an underscore are not."""
    tree = ast.parse("LIMIT = 1\n_a = 2\nclass C: ...\ndef f(): ...\nn: int = 3\ndef _g(): ...")
    assert public_names(tree) == {"LIMIT", "C", "f", "n"}
    assert declared_names(ast.parse("__all__ = ['b', 'a']")) == ["b", "a"]


def documented_imports() -> list[tuple[str, str, str]]:
    """Return (page, module, name) of the names that Python in the documentation imports."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for node in ast.walk(ast.parse(block)):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                if module.partition(".")[0] in ("autopar", "search"):
                    assert isinstance(node, ast.ImportFrom)
                    found += [(page.name, module, name.name) for name in node.names]
    return found


@pytest.mark.parametrize(("page", "module", "name"), documented_imports())
def test_names_in_the_documentation_exist(page: str, module: str, name: str) -> None:
    assert hasattr(import_module(module), name), f"{page}: no {name} in {module}"
