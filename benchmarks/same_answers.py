"""One question through every door: command, Python, exploration and server give one answer.

`python -m benchmarks.random_questions --doors [--questions 100] [--seed 1] [--part 1/2]` draws
cheap questions and asks each through

- the command `autopar search --json -`, in this process;
- `autopar.search`, `autopar.plan` and, if a batch is given, `autopar explore`;
- the tool `search` of `autopar serve --mcp`, if the package mcp is installed.

Step time, memory of stages and degrees must be equal, or every door must refuse the question.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import autopar
from autopar.documents.strategy import strategy_document
from autopar.errors import AutoparError, InfeasibleError, InputError
from search.commands import search as command
from search.planning.uniform.result import UniformSearchResult

MODELS = ("llama2-7b", "llama3-8b", "gpt-6.7b", "qwen2.5-7b", "llama2-13b", "mixtral-8x7b")
CLUSTERS = ("h100:1x8", "h100:2x8", "a100-80gb:1x8", "a100-80gb:1x4", "l40s:1x8", "h200:1x8")
ENGINES = ("megatron", "torchtitan", "deepspeed", "accelerate", "galvatron", "paddlenlp", "none")
_SAME = 1e-9
"""Relative difference below which two numbers are equal."""

Figures = dict[str, Any]
"""Status of an answer, and if there is a plan its step time, memory and degrees."""


def drawn(seed: int) -> dict[str, Any]:
    """Return the keywords of a question."""
    rng = random.Random(seed)
    asked: dict[str, Any] = {"model": rng.choice(MODELS), "hardware": rng.choice(CLUSTERS)}
    if rng.random() < 0.9:
        asked["engine"] = rng.choice(ENGINES)
    if rng.random() < 0.9:
        asked["global_batch_size"] = rng.choice((8, 16, 64, 512))
    options: tuple[tuple[str, tuple[Any, ...], float], ...] = (
        ("seq_length", (1024, 2048, 4096), 0.5),
        ("tp", (1, 2, 4), 0.2),
        ("pp", (1, 2), 0.15),
        ("micro_batch_size", (1, 2), 0.15),
        ("zero", (1, 3), 0.1),
        ("recompute", ("none", "full"), 0.1),
        ("memory_constraint", (16.0, 24.0, 40.0), 0.2),
        ("pin", ("pp=2", "tp=2"), 0.05),
        ("max_tp_deg", (2, 4), 0.05),
        ("default_dp_type", ("zero2", "any"), 0.05),
    )
    for name, values, share in options:
        if rng.random() < share:
            asked[name] = rng.choice(values)
    return asked


def differences(asked: Mapping[str, Any], server: Callable[..., Any] | None) -> Iterator[str]:
    """Yield the differences between the answer of a door and that of the command.

    server : function that asks the tool `search`, with model, hardware and options; None to skip
    """
    first = figures_of(partial(_of_command, asked))
    options = {name: value for name, value in asked.items() if name not in ("model", "hardware")}
    names = asked["model"], asked["hardware"]
    doors: dict[str, Callable[[], Figures]] = {
        "autopar.search": lambda: _of_document(autopar.search(*names, **options)),
        "autopar.plan": lambda: _of_result(autopar.plan(*names, **options)),
    }
    if "global_batch_size" in asked:
        doors["autopar explore"] = lambda: _of_exploration(autopar.ask("explore", **asked))
    if server is not None:
        doors["server"] = lambda: _of_document(server(*names, **options))
    for name, door in doors.items():
        found = figures_of(door)
        for key in found.keys() & first.keys():
            if not _equal(found[key], first[key]):
                yield f"{name}: {key} {found[key]!s:.200}, {first[key]!s:.200} of the command"


def figures_of(door: Callable[[], Figures]) -> Figures:
    """Return the figures of a door; a refused question has only a status."""
    try:
        return door()
    except AutoparError as error:
        return {"status": "none" if error.exit_code == 3 else "refused"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _SAME * abs(other)
    if isinstance(one, dict) and isinstance(other, dict):
        # doors may list other parts, such as only the largest stages
        return all(_equal(one[key], other[key]) for key in one.keys() & other.keys())
    return bool(one == other)


def _words(asked: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]


def _of_command(asked: Mapping[str, Any]) -> Figures:
    text = io.StringIO()
    words = [*_words(asked), "--json", "-", "--output-config-path", "none"]
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        code = command.run(words)
    if code == 2:
        return {"status": "refused"}
    return _of_document(json.loads(text.getvalue()))


def _of_document(found: Mapping[str, Any]) -> Figures:
    """Return the figures of an answer of `autopar search`."""
    launch = found.get("launch")
    if launch is not None:
        stages = launch["predicted"]["stages"]
        return {
            "status": "found",
            "step_time_s": launch["predicted"]["step_time_s"],
            "peak_bytes": {stage["stage"]: stage["peak_bytes"] for stage in stages},
            "engine": launch["engine"],
            "degrees": launch["degrees"],
        }
    if found.get("plan") is None:
        return {"status": "none"}
    return {
        "status": "found",
        "step_time_s": found["step_time_s"],
        "peak_bytes": {row["stage"]: row["allocated_bytes"] for row in found["memory"]},
        "plan": found["plan"],
    }


def _of_exploration(found: Mapping[str, Any]) -> Figures:
    answer = found["groups"][0]["answers"][0]
    if answer["status"] != "found":
        return {"status": "none"}
    parts = {name: answer.get(name) for name in ("degrees", "plan")}
    return {
        "status": "found",
        "step_time_s": answer["step_time_s"],
        **{name: part for name, part in parts.items() if part is not None},
    }


def _of_result(found: autopar.SearchResult) -> Figures:
    """Return the figures of a result, from its attributes."""
    plan, prediction = found.plan, found.prediction
    if plan is None or prediction is None:
        return {"status": "none"}
    figures: Figures = {
        "status": "found",
        "step_time_s": prediction.step_time_s,
        "peak_bytes": {stage.stage: stage.allocated_bytes for stage in prediction.stages},
    }
    if not isinstance(found, UniformSearchResult):
        return {**figures, "plan": strategy_document(plan)}
    first = plan.layers[0]
    assert found.found.best is not None, "there is a plan"
    return {
        **figures,
        "engine": found.found.best.engine.name,
        "degrees": {
            "tp": first.tp,
            "cp": first.cp,
            "ep": first.ep,
            "pp": plan.num_stages,
            "dp": plan.data_degree(0),
            "vpp": plan.num_chunks,
            "micro_batch_size": plan.micro_batch,
            "num_microbatches": plan.num_microbatches,
            "global_batch_size": plan.global_batch,
        },
    }


# --------------------------------------------------------------------------------------------------
# The server, asked by the client of the official package.


_START = "import sys; sys.argv = ['autopar', 'serve', '--mcp']; import autopar.cli as e; e.main()"


@contextlib.contextmanager
def server(folder: Path) -> Iterator[Callable[..., Any] | None]:
    """Start a server in a folder, and return a function that asks its tool `search`.

    None if the package mcp is not installed.
    """
    if importlib.util.find_spec("mcp") is None:
        yield None
        return
    from anyio.from_thread import start_blocking_portal
    from mcp import Client, StdioServerParameters

    start = StdioServerParameters(
        command=sys.executable,
        args=["-c", _START],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        cwd=str(folder),
    )
    client = Client(start, read_timeout_seconds=600)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client) as session:

        def ask(model: str, hardware: str, **options: Any) -> Any:
            given = {"model": model, "hardware": hardware, **options}
            found = portal.call(partial(session.call_tool, "search", given))
            answer = found.structured_content or {}
            if found.is_error:
                kind = answer.get("error", {}).get("kind")
                failure = InfeasibleError if kind == "infeasible" else InputError
                raise failure(str(found.content[0].text))
            return answer

        yield ask


def run(seeds: Iterable[int]) -> int:
    """Ask the questions, print the differences, and return 1 if there are any."""
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder, server(Path(folder)) as ask:
        for seed in seeds:
            question = drawn(seed)
            found = [*differences(question, ask)]
            status = figures_of(partial(_of_command, question))["status"]
            kinds[status] += 1
            kinds["differs"] += bool(found)
            for line in found:
                print(f"{seed}: {line}\n    {' '.join(_words(question))}", flush=True)
    print(", ".join(f"{kind} {number}" for kind, number in kinds.most_common()))
    return 1 if kinds["differs"] else 0
