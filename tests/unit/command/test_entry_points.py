"""Entry points of the commands: light to import, and Ctrl-C is a sentence from the first moment."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.warm import new_interpreter

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
ENTRIES = {**SCRIPTS, "autopar": "autopar.cli:hardware"}
EVERY = pytest.mark.parametrize("command", ENTRIES)

LIGHT = """
import sys

before = set(sys.modules)
import {module}

heavy = ("numpy", "pydantic", "typer", "rich", "torch", "_autopar_core", "pathlib")
print([name for name in heavy if name in set(sys.modules) - before])
"""
INTERRUPTED = """
import os
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it

import {module}


class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name not in sys.builtin_module_names:
            os.kill(os.getpid(), signal.SIGINT)


sys.meta_path.insert(0, Interrupting())
{module}.{function}()
"""


def run(command: str, script: str) -> subprocess.CompletedProcess[str]:
    """Return how a script ended that names the entry point of a command."""
    module, _, function = ENTRIES[command].partition(":")
    return new_interpreter(script.format(module=module, function=function))


@EVERY
def test_entry_points_import_nothing_heavy(command: str) -> None:
    """What takes time to import does so where Ctrl-C is seen."""
    done = run(command, LIGHT)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.whole
@EVERY
def test_ctrl_c_while_modules_are_imported(command: str) -> None:
    """It is one sentence and 130, not a traceback."""
    done = run(command, INTERRUPTED)
    assert (done.returncode, done.stderr) == (130, f"{command}: interrupted\n")


UNUSED = (
    *("rich", "torch", "yaml", "profiler", "asyncio", "pydantic", "pydantic_core"),
    *("autopar.documents.calibration", "search.closed_form", "search.engines.text.shell"),
    *("search.planning.uniform.best_first", "autopar.families.config", "autopar.rates.layer"),
)
"""What the default question has no part in, where stdout is no terminal."""
HEAVY = ("numpy", "pydantic", "rich", "torch", "yaml", "_autopar_core")
"""What a help has no part in: it is there at once."""
EXECUTION = ("--application", "llama2-7b", "--system", "a100", "--execution", "1x8-tp8")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "arguments", "unused"),
    [
        ("search", ["--help"], HEAVY),
        ("show", ["--help"], HEAVY),
        ("search", ["--output-config-path", "none"], (*UNUSED, "autopar.documents.plan")),
        ("search", ["--output-config-path", "."], UNUSED),
        (
            "search",
            ["--json", "-", "--output-config-path", "none"],
            (*UNUSED, "search.show.terminal"),
        ),
        (
            "estimate",
            ["calculon", *EXECUTION],
            (
                *("rich", "torch", "yaml", "profiler", "asyncio", "pydantic"),
                *(
                    "pydantic_core",
                    "search.planning.cost",
                    "search.planning.layered.planner",
                    "logging",
                ),
            ),
        ),
    ],
)
def test_commands_import_what_they_need(
    name: str, arguments: list[str], unused: tuple[str, ...], tmp_path: Path
) -> None:
    """Start-up is most of the time that a small question takes: see benchmarks/bench_startup.py."""
    script = (
        "import atexit, sys\n"
        "from autopar import cli\n"
        f"unused = {unused}\n"
        "atexit.register(lambda: sys.stderr.write(\n"
        "    str([m for m in unused if m in sys.modules]) + '\\n'))\n"
        f"cli.{name}()"
    )
    done = new_interpreter(script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_planner_starts_no_threads_of_numpy(tmp_path: Path) -> None:
    """They spin without work, in CPU seconds; a number that somebody set stays."""
    script = (
        "import atexit, os\n"
        "from autopar import cli\n"
        "atexit.register(lambda: print(os.environ['OPENBLAS_NUM_THREADS']))\n"
        "cli.search()"
    )
    arguments = ("--output-config-path", "none")
    done = new_interpreter(script, *arguments, cwd=tmp_path, OPENBLAS_NUM_THREADS="2")
    assert done.stdout.splitlines()[-1] == "2"
