"""The MCP server: its tools asked by the client of the official package over stdin and stdout."""

from __future__ import annotations

import builtins
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from autopar.command import serve
from autopar.command.tools.answers import LIMIT
from autopar.command.tools.workers import Outcome, Worker, outcome_of
from autopar.output import PendingFile

START = "import sys; sys.argv = ['autopar', *{words}]; import autopar.cli as e; e.main()"
SMALL = {
    "model": "llama3-8b",
    "hardware": "h100:1x8",
    "global_batch_size": 32,
    "seq_length": 4096,
    "engine": "megatron",
    "tp": 2,
}


async def _talk(folder: Path) -> dict[str, Any]:
    """Return what the tools answer in one conversation."""
    import anyio
    from mcp import Client, StdioServerParameters

    start = StdioServerParameters(
        command=sys.executable,
        args=["-c", START.format(words=["serve", "--mcp", "--time-limit", "60"])],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        cwd=str(folder),
    )
    async with Client(start, read_timeout_seconds=120) as client:
        listed = (await client.list_tools()).tools
        found = await client.call_tool("search", SMALL)
        plan = found.structured_content
        answers = {
            "tools": {tool.name: tool for tool in listed},
            "search": found,
            "explain": await client.call_tool("explain", {"plan": plan, "why_not": "tp=4"}),
            "compare": await client.call_tool("compare", {"first": plan, "second": plan}),
            "misspelt": await client.call_tool("search", {**SMALL, "model": "lama3-8b"}),
            "no number": await client.call_tool("search", {**SMALL, "tp": "two"}),
            "null": await client.call_tool("search", {**SMALL, "tp": None}),
            "unknown": await client.call_tool("search", {**SMALL, "global_batch_siz": 8}),
            "outside": await client.call_tool("check", {"files": ["a.sh"], "html": "../a.html"}),
            "protocol": await client.call_tool("check", {"files": ["/dev/stdin"]}),
            "no file": await client.call_tool("check", {"files": ["none.sh"]}),
            "no tool": await client.call_tool("serch", {}),
        }
        async with anyio.create_task_group() as group:  # several at once

            async def one(name: str) -> None:
                answers[name] = await client.call_tool("list_cards", {})

            for number in range(4):
                group.start_soon(one, f"cards {number}")
        return answers


@pytest.mark.whole
def test_a_client_asks_every_tool(tmp_path: Path) -> None:
    """Typed parameters with words, answers of the schema, and errors in one sentence."""
    pytest.importorskip("mcp.server.lowlevel", reason="needs the package mcp, 2 or newer")
    anyio = pytest.importorskip("anyio")
    found = anyio.run(_talk, tmp_path)

    tools = found["tools"]
    assert set(tools) == {"search", "check", "explain", "compare", "list_models", "list_cards"}
    fields = tools["search"].input_schema
    assert fields["required"] == ["model", "hardware"]
    assert not fields["additionalProperties"]
    assert all("description" in field for field in fields["properties"].values())
    answer = found["search"].structured_content
    assert answer["launch"]["degrees"]["tp"] == 2
    assert json.loads(found["search"].content[0].text) == answer
    cards = [f"cards {number}" for number in range(4)]
    for name in ("search", "explain", "compare", *cards):
        assert not found[name].is_error, found[name].content
        assert found[name].structured_content["schema"] == "autopar/answer/1"
        assert len(found[name].content[0].text) <= LIMIT
    for name, words in (
        ("misspelt", "Did you mean llama3-8b"),
        ("no number", "expected an integer"),
        ("null", "tp: expected an integer or a list of integers, got null"),
        ("unknown", "Did you mean global_batch_size?"),
        ("outside", "files are written only below"),
        ("protocol", "not a regular file"),
        ("no file", "none.sh: "),
        ("no tool", "Did you mean 'search'?"),
    ):
        assert found[name].is_error, name
        text = found[name].content[0].text
        assert words in text
        assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


LONG = {
    "model": "qwen3-235b-a22b",
    "hardware": "h100:2048x8",
    "global_batch_size": 131072,
    "goal": "cost",
}


def _searches(folder: Path) -> Outcome:
    """A search of a minute, over all numbers of nodes."""
    (folder / "begun").touch()
    return outcome_of(serve.TOOLS["search"], LONG, folder)


def _backtracks(folder: Path) -> Outcome:
    """A call that holds the interpreter: no signal handler of Python runs meanwhile."""
    (folder / "begun").touch()
    re.fullmatch(r"(a|aa)+b", "a" * 200)
    raise AssertionError("it never ends")


def _writes(folder: Path) -> Outcome:
    """A call that is stopped while it writes a file, with a temporary one elsewhere."""
    with tempfile.NamedTemporaryFile(delete=False):
        file = PendingFile(folder / "page.html")
        try:
            file.stream.write(b"half")
            (folder / "begun").touch()
            time.sleep(600)
            file.end()
        finally:
            file.drop()
    raise AssertionError("it never ends")


@pytest.mark.whole
@pytest.mark.parametrize("call", [_searches, _backtracks, _writes])
def test_the_time_limit_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], Outcome]
) -> None:
    """In a search, in a regular expression, and while a file is written; nothing is left."""
    folder, temporary = tmp_path / "folder", tmp_path / "temporary"
    for one in (folder, temporary):
        one.mkdir()
    # the process that others are forked from outlives this test, and its socket's path is short
    forkserver.ensure_running()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seconds = 5.0
    began = time.monotonic()
    worker = Worker(partial(call, folder), name="search", folder=folder, seconds=seconds)
    found = worker.outcome()
    assert found.error is not None
    assert found.error["error"]["id"] == "time-limit"
    assert time.monotonic() - began < 2 * seconds
    assert worker.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
    assert [path.name for path in folder.iterdir()] == ["begun"]
    assert list(temporary.iterdir()) == []


@pytest.mark.whole
def test_a_call_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    """A client that cancels a call, before and while it runs."""
    for early in (True, False):
        worker = Worker(partial(_writes, tmp_path), name="check", folder=tmp_path, seconds=60.0)
        if early:
            worker.stop()
        else:
            Thread(target=_stop_when_begun, args=(worker, tmp_path), daemon=True).start()
        found = worker.outcome()
        assert found.error is not None
        assert found.error["error"]["id"] == "no-answer"
        assert {path.name for path in tmp_path.iterdir()} <= {"begun"}


def _stop_when_begun(worker: Worker, folder: Path) -> None:
    while not (folder / "begun").exists():
        time.sleep(0.05)
    worker.stop()


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the command that installs it; exit code 2."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "mcp":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert serve.run(["--mcp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'autopar[mcp]'" in captured.err
    assert captured.err.count("\n") == 1


def test_the_protocol_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is served where nothing was asked for."""
    assert serve.run([]) == 2
    assert "autopar serve --mcp" in capsys.readouterr().err
