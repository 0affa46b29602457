"""Long work in its own thread, the help page, and the options that follow the inputs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autopar.command.options import HELP_WIDTH
from autopar.errors import INTERRUPTED
from autopar.records import replace
from autopar.run.model import LayerProfile, OtherTime, TimePoint
from autopar.units import GIB
from search.commands import explain as explain_cli, search as cli
from search.commands.app import working
from search.request.options import SearchOptions
from search.request.request import ROWS, fill_options
from tests.unit.cli_results import HARDWARE, PROFILE

ROOT = Path(__file__).resolve().parents[3]


def test_working_returns_what_the_call_returns_and_raises_what_it_raises() -> None:
    """The thread is invisible to the caller."""
    assert working("x", lambda: 7) == 7
    with pytest.raises(ValueError, match="boom"):
        working("x", lambda: int("boom"))
    assert working("x", lambda: threading.current_thread()) is not threading.main_thread()


def test_ctrl_c_ends_a_long_search_with_one_sentence() -> None:
    """Exit 130 at once, though the worker would go on for a minute."""
    code = (
        "import sys, time, types; from search.commands.app import working\n"
        "from autopar.cli import enter; from autopar.command.options import Command\n"
        "def go(raw): print('ready', flush=True); return working('x', lambda: time.sleep(600))\n"
        "run = lambda words: Command(name='tool', intro='').run(words, go)\n"
        "sys.modules['search.tool'] = types.SimpleNamespace(run=run)\n"
        "enter('tool', 'search.tool')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)

    assert process.returncode == INTERRUPTED
    assert err == "tool: interrupted\n"


@pytest.mark.parametrize("command", [cli, explain_cli])
def test_help_names_every_option_within_the_width(
    command: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name is cut off."""
    assert command.run(["--help", "all"]) == 0  # type: ignore[attr-defined]

    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= HELP_WIDTH
    for row in ROWS:
        shown = f"--[no-]{row.name}" if row.kind == "switch" else f"--{row.name}"
        if command is cli:
            assert shown in text


def test_memory_follows_the_hardware_unless_it_is_given() -> None:
    """24 GiB only where nothing is known; what was typed stays."""
    known = replace(HARDWARE, memory_bytes=80.0 * GIB)

    unknown, lines = fill_options(SearchOptions(), (), PROFILE, HARDWARE)
    assert unknown.memory_constraint_bytes == 24 * GIB
    assert lines[0] == "--memory-constraint 24 (the GPU's memory is unknown)"
    filled, lines = fill_options(SearchOptions(), (), PROFILE, known)
    assert filled.memory_constraint_bytes == 80 * GIB
    assert lines[0] == "--memory-constraint 80 (all memory of box)"
    kept, lines = fill_options(SearchOptions(), ("memory-constraint",), PROFILE, known)
    assert kept.memory_constraint_bytes == 24 * GIB
    assert not any("--memory-constraint" in line for line in lines)


@pytest.mark.parametrize(
    ("estimated", "batches", "given", "mode"),
    [
        (True, (1, 2), (), "batch"),
        (True, (4,), (), "static"),
        (False, (1, 2), (), "static"),
        (True, (1, 2), ("time-profile-mode",), "static"),
        (True, (1, 2), ("profile-mode",), "static"),
    ],
)
def test_estimated_times_of_several_batches_are_fitted(
    estimated: bool, batches: tuple[int, ...], given: tuple[str, ...], mode: str
) -> None:
    """Measured files keep the documented default, because their owner chose what to measure."""
    profile = replace(
        PROFILE,
        estimated=estimated,
        layers=(
            LayerProfile(
                times=tuple(TimePoint(batch=b, seq_length=8, forward_s=1.0) for b in batches),
                memory={},
            ),
        ),
        other_times=tuple(OtherTime(batch=b, seq_lengths=(8,), forward_s=1.0) for b in batches),
    )

    options, lines = fill_options(SearchOptions(), given, profile, HARDWARE)

    assert options.time_profile_mode == mode
    assert any(line.startswith("--time-profile-mode") for line in lines) is not bool(given)
