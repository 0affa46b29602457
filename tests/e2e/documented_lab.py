"""Where the tables of documented workflows are run: a folder of documented files, and commands.

The files are written by hand here, with the keys that the documents describe and figures of our
own: a machine of 8 GPUs (and one of 2 x 8), a decoder of 24 layers, and an encoder with a decoder.
Rows and what they check stand in `documented_*.py`; they are counted and run by
`test_documented_workflows.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from tests import warm
from tests.command_lines import last_said
from tests.e2e.launching import Copies, Finished

HARDWARE = Path("profile_hardware") / "hardware_configs"
MODEL = Path("models") / "gpt" / "configs"
SHAPE = "1nodes_8gpus_per_node.json"
HIDDEN, HEADS, LAYERS, SEQ = 2048, 16, 24, 1024
COMPUTATION = f"computation_profiling_bf16_hidden_{HIDDEN}_head_{HEADS}.json"
MEMORY = f"memory_profiling_bf16_hidden_{HIDDEN}_head_{HEADS}.json"
_MIB = 2.0**20
_Check = TypeVar("_Check", bound="Callable[[Lab], None]")
_SIZES_MB = tuple(2**n for n in range(11))

GPT = (
    *("--num_layers", str(LAYERS), "--hidden_size", str(HIDDEN), "--num_attention_heads"),
    *(str(HEADS), "--seq_length", str(SEQ)),
    *("--time_profiling_path", str(MODEL), "--memory_profiling_path", str(MODEL)),
    *("--allreduce_bandwidth_config_path", str(HARDWARE), "--p2p_bandwidth_config_path"),
    *(str(HARDWARE), "--overlap_coe_path", str(HARDWARE)),
)
"""The documented files by the documented options; `sp_time` is named where it is searched."""

BASE = ("--settle_bsz", "32", "--memory_constraint", "10", "--reserve", "0.05")
"""So little memory that layers differ in the best plan."""

State = Literal["works", "different", "not yet"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One documented command line, option, file, key or behaviour, and what is checked of it."""

    source: str
    feature: str
    check: Callable[[Lab], None]
    state: State = "works"
    why: str = ""
    """Of `different`: why it is meant to be. Of `not yet`: what happens today instead."""
    marks: tuple[str, ...] = ()


class Table(list[Row]):
    """Rows of one source document, in the order of their definition.

    `@table.works(feature)` makes a row of a function that takes a `Lab`; what it checks is the
    documented outcome. `different` rows check what is done instead, `not_yet` rows what happens
    today, so that they fail as soon as it is mended.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def works(self, feature: str, *marks: str) -> Callable[[_Check], _Check]:
        """Return what adds a row that has the documented outcome."""
        return self._adds(feature, "works", "", marks)

    def different(self, feature: str, why: str, *marks: str) -> Callable[[_Check], _Check]:
        """Return what adds a row with another outcome on purpose."""
        return self._adds(feature, "different", why, marks)

    def not_yet(self, feature: str, today: str, *marks: str) -> Callable[[_Check], _Check]:
        """Return what adds a row that has no documented outcome yet."""
        return self._adds(feature, "not yet", today, marks)

    def plans(self, feature: str, *words: str, expected: int = 0, **outcome: object) -> None:
        """Add a row: a search of the documented files with these words has such a plan.

        `outcome` names keys of `shape`; a search without a plan has none.
        """

        def check(lab: Lab) -> None:
            found = lab.search(*BASE, *words, expected=expected)
            if outcome:
                seen = shape(found)
                assert {key: seen[key] for key in outcome} == outcome

        self.works(feature)(check)

    def _adds(
        self, feature: str, state: State, why: str, marks: tuple[str, ...]
    ) -> Callable[[_Check], _Check]:
        def add(check: _Check) -> _Check:
            self.append(
                Row(
                    source=self._source,
                    feature=feature,
                    check=check,
                    state=state,
                    why=why,
                    marks=marks,
                )
            )
            return check

        return add


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """What stands on stdout as JSON."""
        return json.loads(self.out)


def write(path: Path, content: object) -> Path:
    """Write a JSON file, and the folders above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the object in a JSON file in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    write(path, content)


def hardware_files(folder: Path, num_nodes: int, gpus_per_node: int) -> None:
    """Write the four documented files of a cluster."""
    world = num_nodes * gpus_per_node
    groups = [size for size in (2, 4, 8, 16) if size <= world]
    shape = f"{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"

    def speed(size: int, consecutive: bool) -> float:
        inside = size <= gpus_per_node if consecutive else world <= gpus_per_node
        return (160.0 if consecutive else 120.0) if inside else 20.0

    write(
        folder / f"allreduce_bandwidth_{shape}",
        {
            f"allreduce_size_{size}_consec_{consecutive}": speed(size, bool(consecutive))
            for size in groups
            for consecutive in ((1,) if size == world else (1, 0))
        },
    )
    write(
        folder / f"p2p_bandwidth_{shape}",
        {f"pp_size_{size}": 60.0 if num_nodes == 1 else 12.0 for size in groups},
    )
    write(folder / "overlap_coefficient.json", {"overlap_coe": 1.15})

    def time_ms(size: int, mb: int, times: float) -> float:
        ways = times * (size - 1) / size
        return 0.03 + ways * mb * _MIB / (speed(size, True) * 1e9) * 1e3

    write(
        folder / f"sp_time_{shape}",
        {
            f"{name}_size_{size}_{mb}MB_time": time_ms(size, mb, times)
            for name, times in (("allreduce", 2.0), ("all2all", 1.0))
            for size in groups
            for mb in _SIZES_MB
        },
    )


def _other(states: float, activation: float) -> dict[str, Any]:
    degrees = (1, 2, 4, 8)
    return {
        str(SEQ): {
            "model_states": {str(n): states / n for n in degrees},
            "activation": {str(n): activation / n for n in degrees},
        }
    }


def memory_file(suffix: str = "_sp", lengths: Iterable[int] = (SEQ,)) -> dict[str, Any]:
    """Return the documented memory tables, with or without sequence parallelism, in MiB."""
    without = {1: 170.0, 2: 95.0, 4: 58.0, 8: 39.0}
    shares = {n: 170.0 / n for n in without} if suffix else without
    layer = {
        str(length): {
            "parameter_size": 12.0 * HIDDEN**2 * 4 / _MIB,
            "tp_activation_per_bsz_dict": {
                **{str(n): value * length / SEQ for n, value in shares.items()},
                "checkpoint": 4.0 * length / SEQ,
            },
        }
        for length in lengths
    }
    table = {
        f"layertype_0{suffix}": layer,
        f"other_memory_pp_off{suffix}": _other(1600.0, 600.0),
        f"other_memory_pp_on_first{suffix}": _other(800.0, 20.0),
        f"other_memory_pp_on_last{suffix}": _other(800.0, 580.0),
    }
    for name in list(table)[1:]:
        (entry,) = table[name].values()
        table[name] = {str(length): entry for length in lengths}
    return table


@cache
def _commands() -> dict[str, Callable[[list[str]], int]]:
    """Return what each installed command does with its words."""
    names = {
        "autopar-search": "search.commands.search",
        "autopar-explain": "search.commands.explain",
        "autopar-estimate": "search.commands.estimate",
        "autopar-explore": "search.commands.explore",
        "autopar-export": "search.commands.export",
        "autopar-profile-estimate": "autopar.rates.command",
        "autopar-verify": "profiler.verify.command",
        "profile-model": "profiler.model.command",
        "profile-plan": "profiler.plan.command",
        "profile-show": "profiler.show.command",
    }
    installed = {entry.name for entry in importlib.metadata.entry_points(group="console_scripts")}
    assert set(names) <= installed
    return {name: importlib.import_module(module).run for name, module in names.items()}


def shape(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a `--json` answer in short: degrees as sets over the layers."""
    plan = found["plan"]
    lists = {
        "tp": "tp_sizes_enc",
        "consecutive": "tp_consecutive_flags",
        "zero3": "dp_types_enc",
        "ulysses": "use_sp",
        "ckpt": "checkpoint",
    }
    return {
        **{name: {int(item) for item in plan[key].split(",")} for name, key in lists.items()},
        "layers": len(plan["tp_sizes_enc"].split(",")),
        "stages": tuple(int(item) for item in plan["pp_division"].split(",")),
        "pp": plan["pp_deg"],
        "m": plan["chunks"],
        "bsz": plan["global_bsz"],
        "rate": found["samples_per_s"],
        **{
            key: plan[key]
            for key in ("vtp", "vsp", "embed_sdp", "world_size", "pipeline_type", "default_dp_type")
        },
    }


def times(start: str, factor: float) -> Callable[[dict[str, Any]], None]:
    """Return what multiplies the numbers of all keys that begin so; there has to be one."""

    def change(content: dict[str, Any]) -> None:
        keys = [key for key in content if key.startswith(start)]
        assert keys, f"no key begins with {start}"
        for key in keys:
            content[key] *= factor

    return change


@dataclass(kw_only=True)
class Lab:
    """A folder with the documented files in which commands are run.

    A search that is asked twice in the same folder with the same words is run once: rows that
    compare with the plain question share its answer. Files of the shared folder stay as they are;
    a row that changes some takes a `fresh` folder.
    """

    folder: Path
    known: dict[tuple[str, ...], Answer] = field(default_factory=dict)
    _fresh: list[Path] = field(default_factory=list)

    def fresh(self) -> Lab:
        """Return a laboratory of its own, with the same files."""
        folder = self.folder.parent / f"{self.folder.name}-{len(self._fresh)}"
        folder.mkdir()
        self._fresh.append(folder)
        return prepare(folder)

    def changed(self, file: Path, change: Callable[[dict[str, Any]], object]) -> Lab:
        """Return a laboratory of its own where one file is another."""
        lab = self.fresh()
        edit(lab.folder / file, change)
        return lab

    def without(self, file: Path) -> Lab:
        """Return a laboratory of its own where one file is missing."""
        lab = self.fresh()
        (lab.folder / file).unlink()
        return lab

    def path(self, *parts: str | Path) -> Path:
        """Return a path in the folder."""
        return self.folder.joinpath(*parts)

    def load(self, *parts: str | Path) -> Any:
        """Return what a JSON file in the folder holds."""
        return json.loads(self.path(*parts).read_text(encoding="utf-8"))

    def ask(self, command: str, *words: object, expected: int | None = 0) -> Answer:
        """Run a command in the folder and check its exit code, None for any."""
        answer = self._run(_commands()[command], last_said(words, command))
        return _checked(answer, [command, *map(str, words)], expected)

    def during(
        self, run: Callable[[list[str]], int], *words: object, expected: int | None = 0
    ) -> Answer:
        """Call what a command without a name of its own does, such as that of a module."""
        answer = self._run(run, [str(word) for word in words])
        return _checked(answer, list(map(str, words)), expected)

    def process(self, command: str, *words: object, expected: int | None = 0) -> Answer:
        """Run a command in a process of its own, a copy of one that has imported torch."""
        done = warm.command(command, *words, cwd=self.folder).completed()
        answer = Answer(code=done.returncode, out=done.stdout, err=done.stderr)
        return _checked(answer, done.args, expected)

    def torch(self, command: str, *words: object, expected: int | None = 0) -> Answer:
        """Run a command that needs torch, in a process of its own."""
        _need_torch()
        return self.process(command, *words, expected=expected)

    def ranks(self, num_ranks: int, module: str, *words: object, expected: int = 0) -> Finished:
        """Run a module in several copies, as torchrun does."""
        _need_torch()
        with Copies.of(num_ranks, module, *map(str, words), cwd=self.folder) as copies:
            done = copies.wait(120.0)
        assert done.rank_code == expected, done.stderr
        assert "Traceback" not in done.stderr
        return done

    def search(self, *words: object, expected: int = 0) -> Any:
        """Return what autopar-search answers about the documented files; no files are written."""
        return self.found(*GPT, *words, expected=expected)

    def found(self, *words: object, expected: int = 0) -> Any:
        """Return the answer of autopar-search as JSON, or what was said where there is none."""
        answer = self._asked(*words, expected=expected)
        return answer.err if not answer.out or "error" in answer.data else answer.data

    def said(self, *words: object, expected: int = 0) -> str:
        """Return what autopar-search says on stderr about the documented files."""
        return self._asked(*GPT, *words, expected=expected).err

    def rate(self, *words: object) -> float:
        """Return samples per second of the best plan of the documented files with `BASE`."""
        rate: float = self.search(*BASE, *words)["samples_per_s"]
        return rate

    def planned(self, *words: object) -> dict[str, Any]:
        """Return our plan file of a search of the documented files."""
        folder = self.folder.parent / f"{self.folder.name}-plans-{len(self._fresh)}"
        self._fresh.append(folder)
        self.ask("autopar-search", *GPT, *words, "--output_config_path", folder)
        (path,) = folder.glob("autopar_plan_*.json")
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return plan

    def _asked(self, *words: object, expected: int) -> Answer:
        quiet = ("--output_config_path", "none", "--json", "-")
        wanted = tuple(last_said((*quiet, *words)))
        if wanted not in self.known:
            self.known[wanted] = self._run(_commands()["autopar-search"], list(wanted))
        return _checked(self.known[wanted], wanted, expected)

    def _run(self, run: Callable[[list[str]], int], words: list[str]) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        start, path = Path.cwd(), list(sys.path)
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(words)
        finally:
            os.chdir(start)
            sys.path[:] = path
        return Answer(code=code, out=out.getvalue(), err=err.getvalue())


def _need_torch() -> None:
    """Skip a row where torch is missing; it is imported where it is used, not here."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")


def _checked(answer: Answer, words: Sequence[str], expected: int | None) -> Answer:
    assert "Traceback" not in answer.err
    assert "internal error" not in answer.err
    if expected is not None:
        assert answer.code == expected, f"{' '.join(words)}: {answer.code}\n{answer.err}"
    return answer


def prepare(folder: Path) -> Lab:
    """Return a laboratory in an empty folder."""
    hardware_files(folder / HARDWARE, 1, 8)
    write(
        folder / MODEL / COMPUTATION,
        {f"layertype_0_bsz8_seq{SEQ}": 1.5, f"layertype_other_bsz8_seq{SEQ}": 0.5},
    )
    write(folder / MODEL / MEMORY, memory_file())
    return Lab(folder=folder)
