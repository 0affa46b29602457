"""The rules of the house that a machine can check; CONTRIBUTING.md says why they exist."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import autopar
from autopar.documents.schemas import json_schemas

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("autopar", "search", "profiler")
FORBIDDEN = {  # package: what none of its modules may import, at any depth of its code
    "autopar": {"search", "profiler", "torch", "_autopar_core"},
    "search": {"profiler", "torch"},
    "profiler": {"search", "_autopar_core"},
}
SOFT_LINES, HARD_LINES = 300, 500
CODE = {".py", ".pyi", ".cpp", ".hpp", ".sh", ".txt", ".cmake"}
MACHINE_PATH = re.compile(r"(?<![\w.:~/-])/(?:tmp|work|root|home)/")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ENTRY_POINTS: dict[str, str] = PROJECT["project"]["scripts"]


@cache
def source_files() -> tuple[Path, ...]:
    """Return the files of the repository: those that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("needs git and a clone to know which files belong to the repository")
    paths = (ROOT / name for name in listing.stdout.split("\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def own_code() -> Iterator[Path]:
    """Yield the code files, third-party code and data left out."""
    for path in source_files():
        if path.suffix in CODE and "third_party" not in path.parts:
            yield path


def imported_modules(source: str) -> set[str]:
    """Return the full names that a module imports, inside functions and type checks too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def layer_violations(package: str, source: str) -> set[str]:
    """Return the imports of a module of `package` that its layer does not allow."""
    imports = imported_modules(source)
    return {name for name in imports if name.split(".")[0] in FORBIDDEN[package]} | {
        name for name in imports if name.startswith(".") or "cli" in name.split(".")
    }


def relative(path: Path) -> str:
    """Return a path as the repository writes it."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_import_only_what_is_below_them(package: str) -> None:
    """autopar knows nobody, search and profiler know autopar, and nobody knows a cli."""
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        relative(path): sorted(found)
        for path in modules
        if path.name != "__main__.py"  # an entry point, which may call its cli
        if (found := layer_violations(package, path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("autopar", "import search.planner.planner", {"search.planner.planner"}),
        ("autopar", "def f():\n    from torch import nn", {"torch", "torch.nn"}),
        (
            "search",
            "from profiler.measure import run",
            {"profiler.measure", "profiler.measure.run"},
        ),
        ("search", "from search import cli", {"search.commands.search"}),
        ("profiler", "import numpy, search", {"search"}),
        ("profiler", "from . import measure", {".", "..measure"}),
        ("profiler", "import torch\nimport autopar.statistics", set()),
        ("search", "import searching, clip", set()),
    ],
)
def test_layer_check_sees_what_it_must(package: str, source: str, expected: set[str]) -> None:
    """The check above finds lazy, renamed and relative imports, and nothing else."""
    assert layer_violations(package, source) == expected


@pytest.mark.filterwarnings("default:over the soft limit")
def test_no_file_is_too_long() -> None:
    """500 lines are the end; files above 300 are listed, since they are the next to be split."""
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in own_code()
    }
    assert lengths
    assert {name: n for name, n in lengths.items() if n > HARD_LINES} == {}
    for name, lines in sorted(lengths.items()):
        if lines > SOFT_LINES:
            warnings.warn(f"over the soft limit: {name} has {lines} lines", stacklevel=1)


def test_no_machine_paths() -> None:
    """Nothing in the repository depends on where somebody's checkout lies."""
    found = []
    for path in source_files():
        if "third_party" in path.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a picture
            continue
        found += [
            f"{relative(path)}:{number}: {line.strip()[:80]}"
            for number, line in enumerate(text.splitlines(), 1)
            if MACHINE_PATH.search(line)
        ]
    assert found == []


@pytest.mark.parametrize("name", ["tmp", "work", "root", "home"])
def test_machine_path_check_sees_what_it_must(name: str) -> None:
    """Absolute paths count; addresses and relative folders of the same name do not."""
    assert MACHINE_PATH.search(f'open("/{name}/x")')
    assert not MACHINE_PATH.search(f"https://example.org/{name}/x and ../{name}/x and a/{name}/x")


def test_one_version() -> None:
    """The version of the package and that of the distribution are the same."""
    assert PROJECT["project"]["version"] == autopar.__version__
    assert importlib.metadata.version("autopar") == autopar.__version__


def test_schemas_in_the_docs_are_those_of_the_code() -> None:
    """docs/schemas is generated; `make docs-schemas` brings it up to date."""
    folder = ROOT / "docs" / "schemas"
    schemas = json_schemas()

    assert {path.name for path in folder.iterdir()} == {f"{role}.schema.json" for role in schemas}
    for role, schema in schemas.items():
        assert json.loads((folder / f"{role}.schema.json").read_text(encoding="utf-8")) == schema


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter, in which nothing has been imported yet."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_planning_imports_no_torch() -> None:
    """A machine without torch plans; one with torch does not wait for it."""
    done = run_python(
        "import search, search.planner.planner, sys\n"
        "print(sorted(m for m in ('torch', 'profiler') if m in sys.modules))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", sorted(ENTRY_POINTS))
def test_entry_point_answers_help(command: str) -> None:
    """`--help` works everywhere, on stdout, and never loads torch."""
    module, function = ENTRY_POINTS[command].split(":")
    done = run_python(
        "import atexit, importlib, sys\n"
        "atexit.register(lambda: print('torch loaded' if 'torch' in sys.modules else 'no torch'))\n"
        f"sys.argv[0] = {command!r}\n"
        f"getattr(importlib.import_module({module!r}), {function!r})()",
        "--help",
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    assert done.stdout.rstrip().endswith("no torch")
    assert "Traceback" not in done.stderr
