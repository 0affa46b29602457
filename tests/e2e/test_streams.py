"""Streams that commands meet: full, closed, of few characters, left early; and SIGTERM."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

PROGRAMS = Path(sys.executable).parent
COMMANDS = [
    "autopar --help",
    "autopar cards",
    "autopar models",
    "autopar stacks",
    "autopar-search --output-config-path none",
    "autopar-explain --help",
    "autopar-estimate --help",
    "autopar-explore --help",
    "autopar-export --help",
    "autopar-verify --help",
    "profile-model --help",
    "profile-plan --help",
    "profile-show --help",
]


def shell(command: str, folder: Path, redirect: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command of this environment with its stdout redirected by a shell."""
    line = f"exec {shlex.quote(str(PROGRAMS))}/{command} {redirect}"
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, stderr=subprocess.PIPE, timeout=60, check=False
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stdout_that_takes_nothing_is_one_sentence(command: str, tmp_path: Path) -> None:
    """Exit 2, since what was asked for did not arrive; a reader that left early is no error."""
    name = command.split(maxsplit=1)[0]
    full = shell(command, tmp_path, ">/dev/full")
    said = full.stderr.decode().splitlines()[-1]
    assert full.returncode == 2, said
    assert said.startswith(name)
    assert said.endswith("stdout cannot be written (No space left on device)")
    closed = shell(command, tmp_path, ">&-")
    said = closed.stderr.decode()
    # of several ranks none knows whether another one's stdout is open
    assert closed.returncode == (0 if name == "profile-plan" else 2), said
    assert "internal error" not in said
    left = shell(command, tmp_path, "| true")
    assert left.returncode == 0
    assert "internal error" not in left.stderr.decode()


def test_a_terminal_of_few_characters_shows_escapes(tmp_path: Path) -> None:
    """Names of files may hold what it lacks, and bytes that are no text."""
    name = os.fsdecode(b"caf\xc3\xa9-\xff-\x1b[31m")
    done = subprocess.run(
        [PROGRAMS / "autopar-search", "--output-config-path", name, "--json", "-"],
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"internal error" not in done.stderr
    # what a name holds is shown, never obeyed
    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stdout.isascii()


def test_a_search_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM unwinds: no temporary file stays, and the exit code says so."""
    process = subprocess.Popen(
        [
            *(PROGRAMS / "autopar-explore", "calculon", "--application", "gpt2-xl"),
            *("--system", "a100-80gb", "--num-procs", "4096", "--max-batch", "4096"),
            *("--all", "points.csv"),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    limit = time.monotonic() + 30.0
    while not any(tmp_path.iterdir()) and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert list(tmp_path.iterdir()) == []
