"""The MCP server: its tools asked by the client of the official package over stdin and stdout."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.command import serve

START = "import sys; sys.argv = ['autopar', 'serve', '--mcp']; import autopar.cli as e; e.main()"
SMALL = {
    "model": "llama3-8b",
    "hardware": "h100:1x8",
    "global_batch": 32,
    "seq_length": 4096,
    "engine": "megatron",
    "tp": 2,
}


async def _talk(folder: Path) -> dict[str, Any]:
    """Return what the tools answer in one conversation."""
    from mcp import Client, StdioServerParameters

    start = StdioServerParameters(
        command=sys.executable,
        args=["-c", START],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        cwd=str(folder),
    )
    async with Client(start, read_timeout_seconds=120) as client:
        listed = (await client.list_tools()).tools
        found = await client.call_tool("search", SMALL)
        plan = found.structured_content
        return {
            "tools": {tool.name: tool for tool in listed},
            "search": found,
            "explain": await client.call_tool("explain", {"plan": plan, "why_not": "tp=4"}),
            "compare": await client.call_tool("compare", {"first": plan, "second": plan}),
            "cards": await client.call_tool("list_cards", {}),
            "misspelt": await client.call_tool("search", {**SMALL, "model": "lama3-8b"}),
            "no number": await client.call_tool("search", {**SMALL, "tp": "two"}),
            "no file": await client.call_tool("check", {"files": ["none.sh"]}),
        }


@pytest.mark.whole
def test_a_client_asks_every_tool(tmp_path: Path) -> None:
    """Typed parameters with words, answers of the schema, and errors in one sentence."""
    pytest.importorskip("mcp.server.mcpserver", reason="needs the package mcp, 2 or newer")
    anyio = pytest.importorskip("anyio")
    found = anyio.run(_talk, tmp_path)

    tools = found["tools"]
    assert set(tools) == {"search", "check", "explain", "compare", "list_models", "list_cards"}
    fields = tools["search"].input_schema
    assert fields["required"] == ["model", "hardware"]
    assert all("description" in field for field in fields["properties"].values())
    answer = found["search"].structured_content
    assert answer["launch"]["degrees"]["tp"] == 2
    assert json.loads(found["search"].content[0].text) == answer
    for name in ("search", "explain", "compare", "cards"):
        assert not found[name].is_error, found[name].content
        assert found[name].structured_content["schema"] == "autopar/answer/1"
    for name, words in (
        ("misspelt", "Did you mean llama3-8b"),
        ("no number", "valid integer"),
        ("no file", "none.sh: "),
    ):
        assert found[name].is_error
        text = found[name].content[0].text
        assert words in text
        assert "Traceback" not in text
    assert list(tmp_path.iterdir()) == []


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
