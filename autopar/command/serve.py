"""`autopar serve --mcp`: search, check, explain and compare as tools of the Model Context Protocol.

The tools are the functions of `autopar.command.python_api`, and their answers are the objects of
`--json`, cut to a readable length. The server uses the official `mcp` package over stdin and
stdout: an agent starts it as a process, and stdout contains only protocol messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.fields import make, option, read_values
from autopar.command.options import Command
from autopar.command.tools.arguments import Tool
from autopar.command.tools.workers import Worker, outcome_of, prepare
from autopar.errors import InputError, OptionError, did_you_mean

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """Options of the server."""

    mcp: bool = option(
        False, help="the Model Context Protocol over stdin and stdout", panel="Protocol"
    )
    time_limit: float = option(
        120.0, help="time limit of a call, seconds", panel="Protocol", above=0, high=86_400
    )


COMMAND = Command(
    name="autopar serve",
    usage="--mcp [OPTIONS]",
    fills=(ServeSpec,),
    intro="""Serve search, check, explain, compare and the lists of models and
cards as tools of an MCP server.

An agent starts it as a process, with the command `autopar` and the arguments `serve --mcp`; it ends
with its stdin. It reads any file, and writes only below the folder in which it is started. Needs
the package mcp: pip install 'autopar[mcp]'.
""",
)
_INSTRUCTIONS = """Finds the fastest way to train a large transformer in parallel on a cluster that
fits in memory, in seconds and without a GPU. Ask `search` with a model and a cluster such as
h100:4x8 (4 machines with 8 GPUs); give its answer to `explain` or `compare`; `check` reads launch
scripts and configurations of Megatron-LM, torchtitan, DeepSpeed and accelerate. Answers with
exit_code 3 give the reason and configurations that fit in `notices`. Times are in seconds, memory
in bytes. The last notice of a long answer lists omitted keys; `detail` returns them."""
TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="search",
            asks="search",
            text="Find the fastest plan that fits in memory, of a model (list_models) on a cluster "
            "of cards (list_cards).",
            required=("model", "hardware"),
            listed=(
                *("global_batch_size", "seq_length", "micro_batch_size", "engine", "precision"),
                *("tp", "pp", "cp", "ep", "memory_constraint", "output_config_path"),
            ),
        ),
        Tool(
            name="check",
            asks="check",
            text="Read launch scripts: report errors, memory, OOM probability and step time.",
            required=("files",),
            listed=("hardware", "model", "seq_length", "micro_batch_size", "global_batch_size"),
        ),
        Tool(
            name="explain",
            asks="explain",
            text="Explain the time and memory of a plan, and why another one is not chosen.",
            required=("plan",),
            listed=("why_not", "hardware"),
            documents=frozenset({"plan"}),
        ),
        Tool(
            name="compare",
            asks="compare",
            text="Compare two plans, or a plan and a measured trace, by term.",
            required=("first", "second"),
            listed=("hardware",),
            documents=frozenset({"first", "second"}),
        ),
        Tool(name="list_models", asks="models", text="List the shipped models with their sizes."),
        Tool(
            name="list_cards",
            asks="cards",
            text="List the device cards, with memory, peaks and links.",
        ),
    )
}


def server(seconds: float) -> Server[Any]:
    """Return the server of the current folder; raises InputError if `mcp` is not installed.

    seconds : time limit of a call
    """
    try:
        import anyio
        from mcp.server.lowlevel import Server
        from mcp_types import (
            CallToolRequestParams,
            CallToolResult,
            ListToolsResult,
            PaginatedRequestParams,
            TextContent,
            Tool as McpTool,
        )
    except ImportError as error:
        raise InputError(
            f"--mcp needs the package mcp, version 2 or later, which cannot be imported ({error})",
            remedy="Run `pip install 'autopar[mcp]'`",
        ) from None
    from autopar import __version__

    folder = Path.cwd()
    # Waiting for a processor counts as time of the call.
    processors = anyio.Semaphore(max(os.cpu_count() or 1, 2))

    async def list_tools(context: Any, asked: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(
            tools=[
                McpTool(name=tool.name, description=tool.text, input_schema=tool.schema)
                for tool in TOOLS.values()
            ]
        )

    async def call_tool(context: Any, asked: CallToolRequestParams) -> CallToolResult:
        tool = TOOLS.get(asked.name)
        if tool is None:
            hint = did_you_mean(asked.name, TOOLS, otherwise=f"Use {', '.join(TOOLS)}")
            text = f"{asked.name:.60}: unknown tool. {hint}"
            return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True)
        call = partial(outcome_of, tool, asked.arguments or {}, folder)
        worker = Worker(call, name=tool.name, folder=folder, seconds=seconds)
        try:
            with anyio.move_on_after(seconds) as waiting:
                await processors.acquire()
            if waiting.cancelled_caught:
                found = worker.late()
            else:
                try:
                    found = await anyio.to_thread.run_sync(worker.outcome, abandon_on_cancel=True)
                finally:
                    processors.release()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(worker.stop)
        return CallToolResult(
            content=[TextContent(type="text", text=found.text)],
            structured_content=json.loads(found.text) if found.error is None else found.error,
            is_error=found.error is not None,
        )

    return Server(
        "autopar",
        version=__version__,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def _execute(raw: dict[str, Any]) -> int:
    asked = make(ServeSpec, read_values(COMMAND.rows, raw))
    if not asked.mcp:
        raise OptionError("no protocol is given", remedy="Use autopar serve --mcp")
    found = server(asked.time_limit)
    import anyio
    from mcp.server.stdio import stdio_server

    async def serve() -> None:
        # The streams of the protocol are private from here on: no other process gets them.
        async with stdio_server() as (received, sent):
            prepare()
            await found.run(received, sent, found.create_initialization_options())

    anyio.run(serve)
    return 0
