"""`autopar serve --mcp`: search, check, explain and compare as tools of the Model Context Protocol.

The tools are the functions of `autopar.command.python_api`, and their answers are the objects of
`--json`. The server uses the official `mcp` package over stdin and stdout: an agent starts it as a
process, and stdout contains only protocol messages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

from autopar.command.fields import make, option, read_values
from autopar.command.options import Command
from autopar.command.python_api import ask, check, compare, explain, search
from autopar.command.run import describe_failure
from autopar.errors import InputError, OptionError
from autopar.run.runtime import Engine

if TYPE_CHECKING:
    from mcp.server import MCPServer


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """Protocol options of the server."""

    mcp: bool = option(
        False, help="the Model Context Protocol over stdin and stdout", panel="Protocol"
    )


COMMAND = Command(
    name="autopar serve",
    usage="--mcp",
    fills=(ServeSpec,),
    intro="""Serve search, check, explain, compare and the lists of models and
cards as tools of an MCP server.

An agent starts it as a process, with the command `autopar` and the arguments `serve --mcp`; it ends
with its stdin. Needs the package mcp: pip install 'autopar[mcp]'.
""",
)
_INSTRUCTIONS = """Finds the fastest way to train a large transformer in parallel on a cluster that
fits in memory, in seconds and without a GPU. Ask `search` with a model and a cluster such as
h100:4x8 (4 machines with 8 GPUs); give its answer to `explain` or `compare`; `check` reads launch
scripts and configurations of Megatron-LM, torchtitan, DeepSpeed and accelerate. Answers with
exit_code 3 give the reason and configurations that fit in `notices`. Times are in seconds, memory
in bytes."""


def _is(text: str) -> Any:
    """Return a pydantic field with the description of a tool parameter.

    Without pydantic, a dependency of `mcp`, the text is returned.
    """
    try:
        from pydantic import Field
    except ImportError:  # no server without mcp
        return text
    return Field(description=text)


_Engine = Literal["any", Engine]
_Model = Annotated[str, _is("Shipped name (list_models), or path of a config.json.")]
_Hardware = Annotated[str, _is("CARD:NODESxGPUS such as h100:4x8; cards are listed by list_cards.")]
_Plan = Annotated[
    str | dict[str, Any],
    _is("Path of a plan file, or the whole answer of search."),
]
_Options = Annotated[
    dict[str, str | int | float | bool | list[str]] | None,
    _is("Other options of the command, such as {'precision': 'any'}."),
]


def _search(
    model: _Model,
    hardware: _Hardware,
    global_batch: Annotated[int | None, _is("Sequences of a step over all GPUs.")] = None,
    seq_length: Annotated[
        int | None, _is("Tokens of a sequence; default: the model's own.")
    ] = None,
    engine: Annotated[_Engine | None, _is("Engine; default: all of them.")] = None,
    tp: Annotated[int | None, _is("Fix the tensor ranks.")] = None,
    pp: Annotated[int | None, _is("Fix the pipeline stages.")] = None,
    cp: Annotated[int | None, _is("Fix the context ranks.")] = None,
    ep: Annotated[int | None, _is("Fix the expert ranks.")] = None,
    memory_gib: Annotated[float | None, _is("Memory of a GPU that may be used, in GiB.")] = None,
    write_to: Annotated[str | None, _is("Folder for the plan file.")] = None,
    options: _Options = None,
) -> dict[str, Any]:
    """Find the fastest uniform or per-layer plan of a model on a cluster that fits in memory."""
    asked = {
        **(options or {}),
        "global_batch": global_batch,
        "seq_length": seq_length,
        "engine": engine,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "memory_constraint": memory_gib,
        "output_config_path": write_to or "none",
    }
    return search(model, hardware, **asked).to_dict()


def _check(
    files: Annotated[list[str], _is("Paths of launch scripts or configurations.")],
    hardware: Annotated[str | None, _is("CARD:NODESxGPUS; default: that of the file.")] = None,
    model: Annotated[str | None, _is("Where no script names it, as with DeepSpeed.")] = None,
    seq_length: Annotated[int | None, _is("Tokens of a sequence, in the same case.")] = None,
    options: _Options = None,
) -> dict[str, Any]:
    """Read launch scripts: report errors, memory, OOM probability and step time."""
    asked = {**(options or {}), "hardware": hardware, "model": model, "seq_length": seq_length}
    return check(*files, **asked).to_dict()


def _explain(
    plan: _Plan,
    why_not: Annotated[str | None, _is("Rule such as tp=8: the best plan with it.")] = None,
    options: _Options = None,
) -> dict[str, Any]:
    """Explain the time and memory of a plan, the best plan, and why another one is not chosen."""
    return explain(plan, why_not, **(options or {})).to_dict()


def _compare(
    first: _Plan,
    second: Annotated[
        str | dict[str, Any],
        _is("The same, or path of a trace of torch.profiler of a run of the first."),
    ],
    options: _Options = None,
) -> dict[str, Any]:
    """Compare two plans, or a plan and a measured trace, per term."""
    return compare(first, second, **(options or {})).to_dict()


def _list_models() -> dict[str, Any]:
    """List the shipped models with their sizes."""
    return ask("models").to_dict()


def _list_cards() -> dict[str, Any]:
    """List the device cards, with memory, peaks and links."""
    return ask("cards").to_dict()


_TOOLS: dict[str, Callable[..., dict[str, Any]]] = {
    "search": _search,
    "check": _check,
    "explain": _explain,
    "compare": _compare,
    "list_models": _list_models,
    "list_cards": _list_cards,
}
_P = ParamSpec("_P")


def server() -> MCPServer[Any]:
    """Return the server with its tools; raises InputError if `mcp` is not installed."""
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError as error:
        raise InputError(
            f"--mcp needs the package mcp, version 2 or later, which cannot be imported ({error})",
            remedy="Run `pip install 'autopar[mcp]'`",
        ) from None
    from autopar import __version__

    def told(tool: Callable[_P, dict[str, Any]]) -> Callable[_P, dict[str, Any]]:
        """Return a tool that raises ToolError with the message that the command would print."""

        @wraps(tool)
        def call(*arguments: _P.args, **options: _P.kwargs) -> dict[str, Any]:
            try:
                return tool(*arguments, **options)
            except Exception as error:
                raise ToolError(describe_failure(error).text) from None

        return call

    found: MCPServer[Any] = MCPServer(
        "autopar", instructions=_INSTRUCTIONS, version=__version__, log_level="ERROR"
    )
    for name, tool in _TOOLS.items():
        found.add_tool(told(tool), name=name)
    return found


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def _execute(raw: dict[str, Any]) -> int:
    if not make(ServeSpec, read_values(COMMAND.rows, raw)).mcp:
        raise OptionError("no protocol is given", remedy="Use autopar serve --mcp")
    server().run("stdio")
    return 0


def main() -> None:
    """Entry point of `autopar serve`."""
    sys.exit(run(sys.argv[1:]))
