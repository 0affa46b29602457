"""The rules of the house that a machine can check; CONTRIBUTING.md says why they exist."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter, namedtuple
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import autopar
from autopar.documents.schemas import json_schemas
from autopar.records import record_of
from tests.warm import new_interpreter

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("autopar", "search", "profiler")
FORBIDDEN = {  # package: what none of its modules may import, at any depth of its code
    "autopar": {"search", "profiler", "torch", "_autopar_core"},
    "search": {"profiler", "torch"},
    "profiler": {"search", "_autopar_core"},
}
LEAST_LINES, MOST_LINES, MOST_FILES = 80, 800, 15
SMALL = {  # modules that are one idea and shorter: name, and why it stands alone
    "autopar/arrays.py": "imports numpy, which the light modules beside it must not",
    "autopar/sources.py": "what documents of every kind carry along",
    "profiler/model/command.py": "light: what is wrong with an option is said before torch is here",
    "profiler/hardware/command.py": "light, as that of models",
    "profiler/site/command.py": "light, as that of models",
}
TABLES = {"__init__.py", "__main__.py", "engine.py", "keys.py", "rules.py", "space.py"}
"""Names of files without a least length: faces, and tables of an engine."""
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


FACE = ROOT / "autopar" / "__init__.py"
"""Offers the planner's names too: imported on first use, and named above for type checkers."""


parsed = cache(ast.parse)


def typing_only(tree: ast.Module) -> set[ast.AST]:
    """Return what stands below `if TYPE_CHECKING`, which never runs."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }


def imported_modules(source: str, *, all_of_it: bool = True) -> set[str]:
    """Return the full names that a module imports, inside functions too.

    all_of_it : also those below `if TYPE_CHECKING`.
    """
    names: set[str] = set()
    tree = parsed(source)
    skipped = set() if all_of_it else typing_only(tree)
    for node in (node for node in ast.walk(tree) if node not in skipped):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def layer_violations(package: str, source: str, *, all_of_it: bool = True) -> set[str]:
    """Return the imports of a module of `package` that its layer does not allow."""
    imports = imported_modules(source, all_of_it=all_of_it)
    return {
        name for name in imports if name.startswith(".") or name.split(".")[0] in FORBIDDEN[package]
    }


def relative(path: Path) -> str:
    """Return a path as the repository writes it."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_import_only_what_is_below_them(package: str) -> None:
    """autopar knows nobody; search and profiler know autopar, and not each other."""
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        relative(path): sorted(found)
        for path in modules
        if (
            found := layer_violations(
                package, path.read_text(encoding="utf-8"), all_of_it=path != FACE
            )
        )
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("package", "source", "expected"),
    [
        ("autopar", "import search.planning.layered.planner", {"search.planning.layered.planner"}),
        ("autopar", "def f():\n    from torch import nn", {"torch", "torch.nn"}),
        (
            "search",
            "from profiler.measure import run",
            {"profiler.measure", "profiler.measure.run"},
        ),
        ("profiler", "import numpy, search", {"search"}),
        ("profiler", "from . import measure", {".", "..measure"}),
        ("profiler", "import torch\nimport autopar.statistics", set()),
        ("search", "import searching, clip", set()),
    ],
)
def test_layer_check_sees_what_it_must(package: str, source: str, expected: set[str]) -> None:
    """The check above finds lazy, renamed and relative imports, and nothing else."""
    assert layer_violations(package, source) == expected


def python_modules() -> dict[str, Path]:
    """Return the product's Python files by module name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def test_a_file_is_one_idea() -> None:
    """Code is neither a street of small rooms nor one hall: 80 to 800 lines a file."""
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in own_code()
    }
    product = {relative(path) for path in python_modules().values()}
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}
    short = {
        name: lengths[name]
        for name in product
        if lengths[name] < LEAST_LINES and Path(name).name not in TABLES
    }
    assert {name: n for name, n in short.items() if name not in SMALL} == {}
    assert set(SMALL) - set(short) == set(), "no longer small: take it off the list"


def test_a_folder_is_read_at_a_glance() -> None:
    """At most 15 files of code a folder, `__init__.py` included."""
    folders = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in own_code()
        if path.relative_to(ROOT).parts[0] in (*PACKAGES, "csrc")
    )
    assert folders
    assert {name: n for name, n in folders.items() if n > MOST_FILES} == {}


@cache
def import_graph() -> dict[str, set[str]]:
    """Return for every module of the product those it imports, lazily too.

    An import for type checkers alone is none: it never runs.
    """
    modules = python_modules()
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = parsed(path.read_text(encoding="utf-8"))
        never_run = typing_only(tree)
        graph[name] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node not in never_run:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    graph[name].add(full if full in modules else node.module)
            elif isinstance(node, ast.Import) and node not in never_run:
                graph[name] |= {alias.name for alias in node.names}
        graph[name] &= modules.keys()
        parents = {part for found in graph[name] for part in packages_of(found)}
        graph[name] = ((graph[name] | parents) & modules.keys()) - {name, *packages_of(name)}
    return graph


def packages_of(module: str) -> set[str]:
    """Return the packages around a module; importing it imports them first."""
    parts = module.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts))}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the circles of a graph: the groups of names that reach each other."""
    found: set[tuple[str, ...]] = set()
    reached: dict[str, set[str]] = {}
    for name in graph:
        seen: set[str] = set()
        queue = [name]
        while queue:
            for other in graph[queue.pop()] - seen:
                seen.add(other)
                queue.append(other)
        reached[name] = seen
    for name in graph:
        if name in reached[name]:
            found.add(tuple(sorted(o for o in reached[name] if name in reached[o])))
    return [list(circle) for circle in sorted(found)]


def test_no_import_circle() -> None:
    """Also inside a package, and also of imports inside functions."""
    assert circles(import_graph()) == []


def test_circle_check_sees_what_it_must() -> None:
    """A circle of three with a tail is one circle; a tree has none."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


NOT_ABOVE = {  # room: rooms that none of its modules imports
    "autopar.pipeline": {"autopar.run", "autopar.rates", "autopar.price", "autopar.documents"},
    "autopar.run": {"autopar.rates", "autopar.price", "autopar.documents", "autopar.command"},
    "autopar.rates": {"autopar.price", "autopar.answer"},
    "autopar.price": {"autopar.answer", "autopar.families"},
    "search.engines": {"search.planning", "search.questions", "search.show"},
    "search.check": {"search.planning", "search.questions", "search.show"},
    "search.planning": {"search.questions", "search.show"},
    "search.request": {"search.check", "search.questions", "search.show"},
}


def room_of(module: str) -> str:
    """Return the folder of a module below its package, or the module itself on the top level."""
    return ".".join(module.split(".")[:2])


def test_rooms_import_no_room_above_them() -> None:
    """The lines of docs/architecture.md: a run knows no price, an engine no planner."""
    graph = import_graph()
    assert NOT_ABOVE.keys() <= set(map(room_of, graph))
    wrong = {
        name: sorted(above)
        for name, found in graph.items()
        if (above := {one for one in found if room_of(one) in NOT_ABOVE.get(room_of(name), ())})
    }
    assert wrong == {}


def test_lines_by_room(capsys: pytest.CaptureFixture[str]) -> None:
    """Printed in every run with `-s`, so that growth is seen; a room is not a quarter of all."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module, path in python_modules().items():
        lines[room_of(module)] += len(path.read_text(encoding="utf-8").splitlines())
        files[room_of(module)] += 1
    with capsys.disabled():
        rows = [f"{room} {lines[room]:,}/{files[room]}" for room in sorted(lines)]
        print(f"\nlines/files by room: {', '.join(rows)}; all {lines.total():,}/{files.total()}")
    assert max(lines.values()) < lines.total() / 4


def test_nothing_imports_a_command() -> None:
    """Commands read options, call the library and print; who needs what they do calls it too."""

    def is_command(module: str) -> bool:
        parts = module.split(".")
        return "commands" in parts or (parts[-1] == "command" and len(parts) > 2)

    graph = import_graph()
    assert any(map(is_command, graph))
    wrong = {
        name: sorted(filter(is_command, found))
        for name, found in graph.items()
        if not is_command(name) and any(map(is_command, found))
    }
    assert wrong == {}


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


def test_what_builds_is_what_the_wheel_asks_for() -> None:
    """An editable install builds with no more than pip gives to a wheel that it isolates."""
    asked = set(PROJECT["build-system"]["requires"])
    installed = set(PROJECT["dependency-groups"]["build"])
    assert asked <= installed
    # scikit-build-core asks for these itself where a machine has none
    assert {name.partition(">=")[0] for name in installed - asked} == {"cmake", "ninja"}


def test_schemas_in_the_docs_are_those_of_the_code() -> None:
    """docs/schemas is generated; `make docs-schemas` brings it up to date."""
    folder = ROOT / "docs" / "schemas"
    schemas = json_schemas()

    assert {path.name for path in folder.iterdir()} == {f"{role}.schema.json" for role in schemas}
    for role, schema in schemas.items():
        assert json.loads((folder / f"{role}.schema.json").read_text(encoding="utf-8")) == schema


def spelled_literals(source: str) -> set[tuple[str, ...]]:
    """Return the values of every Literal of a module, in their order."""
    return {
        tuple(ast.unparse(v) for v in getattr(node.slice, "elts", [node.slice]))
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Subscript)
        if isinstance(node.value, ast.Name) and node.value.id == "Literal"
    }


def test_the_same_values_are_a_literal_in_one_order() -> None:
    """Python takes two orders for equal: `| None` of one gives the other, by what came first.

    The schemas of documents would then depend on what was imported before.
    """
    found: dict[frozenset[str], set[tuple[str, ...]]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for values in spelled_literals(path.read_text(encoding="utf-8")):
                found.setdefault(frozenset(values), set()).add(values)
    assert len(found) > 20
    assert [orders for orders in found.values() if len(orders) > 1] == []
    assert spelled_literals("a: Literal[4, 2] | None; b: Literal[2, 4]") == {
        ("4", "2"),
        ("2", "4"),
    }


def test_no_private_module_of_typer_is_imported() -> None:
    """Its copy of click is private and new in 0.26; earlier versions import click itself."""
    pattern = re.compile(r"^\s*(from|import) (typer\._|click\b)", re.MULTILINE)
    code = [path for path in own_code() if path.suffix == ".py"]
    assert [path for path in code if pattern.search(path.read_text(encoding="utf-8"))] == []


def test_planning_imports_no_torch() -> None:
    """A machine without torch plans; one with torch does not wait for it."""
    done = new_interpreter(
        "import autopar, search.planning.layered.planner, sys\n"
        "assert all(hasattr(autopar, name) for name in autopar.__all__)\n"
        "print(sorted(m for m in ('torch', 'profiler') if m in sys.modules))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


SLOWER_HELP = {
    "autopar-verify": ["numpy"],
}
"""Commands whose options stand in modules that import more."""


@pytest.mark.parametrize("command", sorted(ENTRY_POINTS))
def test_entry_point_answers_help(command: str) -> None:
    """`--help` works everywhere, on stdout, and waits for nothing heavy: it is text of fields."""
    heavy = ("torch", "numpy", "pydantic", "rich", "yaml", "_autopar_core")
    module, function = ENTRY_POINTS[command].split(":")
    done = new_interpreter(
        "import atexit, importlib, sys\n"
        f"atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))\n"
        f"sys.argv[0] = {command!r}\n"
        f"getattr(importlib.import_module({module!r}), {function!r})()",
        "--help",
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    assert done.stdout.splitlines()[-1] == str(SLOWER_HELP.get(command, []))
    assert "Traceback" not in done.stderr


def test_an_editable_install_adds_no_folder_above_the_clone(tmp_path: Path) -> None:
    """A folder that is named as a package and lies beside the clone is not imported."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import autopar, json, sys; print(json.dumps([list(autopar.__path__), sys.path]))",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    packages, path = json.loads(done.stdout)

    assert packages == [str(ROOT / "autopar")]
    assert {str(parent) for parent in ROOT.parents} & set(path) == set()


PARTS = {
    *("startswith", "endswith", "partition", "rpartition", "split", "rsplit"),
    *("removeprefix", "removesuffix", "find", "index"),
}
"""Methods that read a part of a text."""
OF_DOCUMENTS = {"file", "scanner", "self"}
"""Names of records whose `text` is a document's, not a sentence."""


def is_sentence(node: ast.AST) -> bool:
    """Return whether an expression is the text of a notice or of an error."""
    if isinstance(node, ast.Attribute):
        owner = node.value
        named = isinstance(owner, ast.Name) and owner.id not in OF_DOCUMENTS
        return node.attr == "text" and named
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "str"
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in ("error", "refused")
    )


def compared_sentences(source: str) -> list[str]:
    """Return the places of a module that read parts of sentences, or compare them."""
    found = []
    for node in ast.walk(parsed(source)):
        reads = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if reads and node.func.attr in PARTS and is_sentence(node.func.value):  # type: ignore[attr-defined]
            found.append(ast.unparse(node))
        if isinstance(node, ast.Compare):
            kinds = (ast.In, ast.NotIn, ast.Eq, ast.NotEq)
            sides = (node.left, *node.comparators)
            if any(isinstance(op, kinds) for op in node.ops) and any(map(is_sentence, sides)):
                found.append(ast.unparse(node))
    return found


def test_no_code_compares_sentences() -> None:
    """Rules have ids: what a notice or an error is of is read there, never in its text.

    The profiler reads exceptions of torch, which have none.
    """
    wrong = {
        relative(path): found
        for name, path in python_modules().items()
        if not name.startswith("profiler.")
        if (found := compared_sentences(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_sentence_check_sees_what_it_must() -> None:
    """Each of the ways in which sentences were compared."""
    for source in (
        "one.text.startswith('--sequence-parallel')",
        "str(error).partition('; ')[0]",
        "'heads' in finding.text",
        "problem not in str(error)",
        "notice.text == 'no experts'",
    ):
        assert compared_sentences(source), source
    assert not compared_sentences("one.id.startswith('grid.')")
    assert not compared_sentences("print(one.text, str(error))")


SAME_FIELDS = {  # pairs of types that say the same of two things, and why they stay two
    ("LayerRun", "LayerRunEntry"): "a plan file has null for what is not finite, digits as written",
    ("Alternative", "AlternativeEntry"): "a plan file has a strategy spelt, null for no number",
}


def fields_of(kind: type) -> frozenset[str]:
    """Return the fields of a record or a named tuple; none of any other class."""
    found = getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
    return frozenset(found) if isinstance(found, tuple) else frozenset()


def same_fields(first: type, second: type) -> bool:
    """Return whether two types have the same fields but for a tenth: five at least, not inherited.

    What both have from a class that both extend stands once.
    """
    if issubclass(first, second) or issubclass(second, first):
        return False
    inherited = (fields_of(base) for base in first.__mro__ if base in second.__mro__)
    once = frozenset().union(*inherited)
    mine, other = fields_of(first) - once, fields_of(second) - once
    return len(mine & other) >= 5 and len(mine & other) >= 0.9 * len(mine | other)


def test_no_second_type_has_the_same_fields() -> None:
    """A noun is one type: of two, a field is added to one and forgotten in what makes the other.

    Families of models describe files of others, whose keys are alike.
    """
    names = (
        name
        for name in python_modules()
        if name.startswith(("autopar.", "search."))
        and not name.startswith("autopar.families")
        and not name.endswith("__main__")
    )
    kinds = {
        kind
        for name in names
        for kind in vars(importlib.import_module(name)).values()
        if isinstance(kind, type) and kind.__module__ == name and len(fields_of(kind)) >= 5
    }
    ordered = sorted(kinds, key=lambda kind: (kind.__name__, kind.__module__))
    found = {
        (first.__name__, second.__name__)
        for first, second in combinations(ordered, 2)
        if same_fields(first, second)
    }
    assert found == SAME_FIELDS.keys(), "make one type of the two, or extend one"


def test_check_of_types_sees_what_it_must() -> None:
    """The same fields in another order are the same; those of a base that both extend are not."""
    base = record_of("Base", dict.fromkeys("abcde", int))
    again = namedtuple("again", "e d c b a")
    more = record_of("More", dict.fromkeys("abcdefg", int))
    longer = type(base)("Longer", (base,), {"__annotations__": {"f": int}})
    other = type(base)("Other", (base,), {"__annotations__": {"f": int}})
    assert same_fields(base, again)
    assert not same_fields(base, more)
    assert not same_fields(base, longer)
    assert not same_fields(longer, other)
