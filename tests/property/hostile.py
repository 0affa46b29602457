"""Hostile input, one run of a command for every seed: words, documents, outputs, environments.

    run = make(17, folder)

fills a folder with good files, spoils those that the run tests, and returns the command to start.
Equal seeds make equal runs. Nothing here starts a process; `hostile_runs` does.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.cli import SUBCOMMANDS
from search.commands import search
from tests.e2e.bad_estimates_table import CALCULON as PRICED, TWO as PRICED_TWO
from tests.e2e.bad_explore_table import (
    CALCULON as EXPLORED,
    TUNER,
    TWO as EXPLORED_TWO,
    WHAT_IF,
    prepare_explore,
)
from tests.e2e.bad_export_table import GALVATRON, MEGATRON, TO, prepare_exports
from tests.e2e.bad_input_table import DOCUMENTS, MEASURED, prepare
from tests.e2e.bad_models_table import QUICK, prepare_models
from tests.e2e.bad_plan_table import GLOBAL, STRATEGY_ONLY, WITH_MODEL, prepare_plans

ROOT = Path(__file__).resolve().parent.parent.parent
CANARY = b"nobody asked for this file to change\n"
KINDS = ("words", "document", "output", "environment")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A command line that works in the folder of `prepare_good`."""

    name: str
    """Name of the command in `SUBCOMMANDS`."""
    arguments: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Files of the folder that the command reads."""
    outputs: tuple[str, ...] = ()
    """Options that name files or folders to write."""
    weight: int = 1
    """Relative frequency among all bases."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process to start, with the files that it must not change."""

    seed: int
    name: str
    kind: str
    what: str
    arguments: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    """Files that the process must leave unchanged."""
    stdout: str = "file"
    """Kind of stdout: file, ascii, closed, full or terminal."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Variables to set, None removes one."""
    gone: bool = False
    """True if the working directory no longer exists."""


_MEASURED_FILES = tuple(one.file for one in DOCUMENTS if one.arguments == MEASURED)
_SMALL = ("--model", "config.json", "--hardware", "card.json:1x2", "--global-batch-size", "8")
BASES = (
    Base(
        name="search",
        arguments=("--output-config-path", "found", *MEASURED),
        reads=_MEASURED_FILES,
        outputs=("json", "output-config-path"),
        weight=5,
    ),
    Base(
        name="search",
        arguments=("--output-config-path", "found", *_SMALL),
        reads=("config.json", "card.json"),
        outputs=("json", "output-config-path"),
        weight=4,
    ),
    Base(
        name="search",
        arguments=("--output-config-path", "found", "--model", "spec.json", *_SMALL[2:]),
        reads=("spec.json", "card.json"),
        outputs=("json", "output-config-path"),
        weight=2,
    ),
    Base(
        name="search",
        arguments=(*MEASURED, "--evaluate", "strategy.json"),
        reads=("strategy.json",),
        outputs=("json",),
        weight=3,
    ),
    Base(
        name="explain",
        arguments=("strategy.json", *MEASURED),
        reads=("strategy.json",),
        weight=2,
    ),
    Base(
        name="explain",
        arguments=("full_plan.json",),
        reads=("full_plan.json", "config.json"),
        weight=3,
    ),
    Base(
        name="estimate",
        arguments=PRICED,
        reads=("application.json", "system.json", "execution.json"),
        outputs=("json", "peers"),
        weight=3,
    ),
    Base(
        name="estimate",
        arguments=PRICED_TWO,
        reads=("two.json", "two_system.json", "candidate.json"),
        outputs=("json",),
        weight=2,
    ),
    Base(
        name="explore",
        arguments=WHAT_IF,
        reads=("config.json", "card.json"),
        outputs=("json", "output-config-path"),
        weight=3,
    ),
    Base(
        name="explore",
        arguments=EXPLORED,
        reads=("application.json", "system.json"),
        outputs=("json", "all"),
        weight=3,
    ),
    Base(
        name="explore",
        arguments=EXPLORED_TWO,
        reads=("two.json", "two_system.json"),
        outputs=("json", "all"),
        weight=2,
    ),
    Base(
        name="explore",
        arguments=TUNER,
        reads=("application.json", "system.json", "space.json"),
        outputs=("json", "all"),
        weight=2,
    ),
    *(
        Base(
            name="export",
            arguments=("full_plan.json", "--to", engine, "--allow-approx", "--out", "here"),
            reads=("full_plan.json", "config.json"),
            outputs=("json", "out"),
        )
        for engine in ("megatron", "galvatron", "torchtitan", "deepspeed", "accelerate")
    ),
    Base(
        name="export",
        arguments=TO,
        reads=("plan.json",),
        outputs=("json", "out"),
        weight=2,
    ),
    Base(name="export", arguments=MEGATRON, reads=("train.sh",), outputs=("out",), weight=2),
    Base(name="export", arguments=GALVATRON, reads=("train_dist.yaml",), outputs=("out",)),
    Base(
        name="check",
        arguments=("launch.sh", "--hardware", "card.json:1x8"),
        reads=("launch.sh", "card.json"),
        outputs=("json",),
        weight=3,
    ),
    Base(
        name="export",
        arguments=("--from", "galvatron", "plan.json"),
        reads=("plan.json",),
        outputs=("out",),
    ),
    Base(
        name="profile estimate",
        arguments=("--model", "config.json", "--hardware", "card.json:1x2", "--out", "files"),
        reads=("config.json", "card.json"),
        outputs=("out",),
        weight=3,
    ),
    Base(
        name="profile show", arguments=("shown",), reads=("shown/*",), outputs=("plot",), weight=3
    ),
    Base(name="profile show", arguments=("shown", "--validate"), reads=("shown/*",)),
    Base(name="profile show", arguments=("shown", "--diff", "shown"), reads=("shown/*",)),
    Base(
        name="profile model",
        arguments=("--model", "llama.json", *QUICK, "--tp", "1", "--source", "exact", "--dry-run"),
        reads=("llama.json",),
        outputs=("out",),
        weight=2,
    ),
    Base(
        name="plan", arguments=STRATEGY_ONLY, reads=("tried.json", "tiny.json"), outputs=("json",)
    ),
    Base(name="plan", arguments=WITH_MODEL, reads=("tried_plan.json",), outputs=("json",)),
    Base(name="plan", arguments=(*GLOBAL, "--world-size", "4"), reads=("tiny.json",)),
    Base(name="models", arguments=()),
    Base(name="cards", arguments=()),
    Base(
        name="cards",
        arguments=("--like", "card.json", "--between", "12.5", "--out", "mine.json"),
        reads=("card.json",),
        outputs=("out", "json"),
    ),
    Base(name="sites", arguments=()),
    Base(name="stacks", arguments=()),
    Base(
        name="verify",
        arguments=("--dry-run", "--work", "w", "--device", "cpu"),
        outputs=("work", "json"),
    ),
)

_HUGE = "9" * 400
NUMBERS = (
    *("0", "-1", "1", "2", "3", "7", "64", "1000", "1e3", "1e9", "1000000000", "1e308", "1e309"),
    *("1e-308", "nan", "inf", "-inf", "NaN", "٣", "１２", "²", "−1", "+1", "0x10", "1_000"),  # noqa: RUF001
    *("1,000", "1.5", ".5", "5.", "-0", "-0.0", " 8 ", "8 GB", "8;9", "1,2,3", ",", "1,,2"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "2147483648"),
    *(_HUGE, "-" + _HUGE, "1" + "0" * 5000, "1:9", "1:1000000000", "1:64:x2", "8:1:-1"),
    *(",".join(map(str, range(1, 5001))), "1152921504606846976", "5e3", "1:2:3"),
    *("1:2:x1", "1:1000000000:x1.0000001", "[1,2]", "1e400", "True", "1" * 30),
)
PLAUSIBLE = (
    *("1", "2", "3", "4", "5", "6", "8", "12", "16", "24", "32", "48", "64", "100", "128", "256"),
    *(
        "1000",
        "1024",
        "4096",
        "10000",
        "100000",
        "1000000",
        "100000000",
        "0.001",
        "0.5",
        "1.5",
        "1,1",
    ),
    *("1,2", "8,16", "1e-6", "1e6"),
)
"""Plausible values of any size."""
WORDS = (
    *("", " ", "none", "null", "-", "--", "---", "=", "a=b", ".", "..", "../..", "x" * 256),
    *("y" * 5000, "z" * 100_000, "é" * 200, "\x07bell", "\x1b]0;title\x07", "\x1b[2Jgone", "a\nb"),
    *("a\tb", "a\rb", "\u202egpj.exe", "\u2028", "\x85", "\x7f", "\udcff", "caf\udce9"),
    *("${HOME}", "$(touch pwned)", "`touch pwned`", "; touch pwned", "'", '"', "\\", "%s%n", "{}"),
    *("{0}", "[red]", "[/]", "[bold", ":smile:", "*", "?", "#", "!", "&&", "|", "<", ">", "\x00"),
    *("layers 0-3:tp=4", "layers 0-999999999:tp=4", "tp=4", "tp=", "tp=0", "tp=3", "=4", "pp=99"),
    *("layers 3-0:tp=2", "layers :", "dp=٣", "system.networks.0.bandwidth=300:900:x1.5"),
    *("system.networks.0.bandwidth=1:1e18:1", "system.x=1", "system=1:2:1", "model.l=0:10:0"),
    *("a100-80gb:1x8", "a100-80gb:0x8", "a100-80gb:1000000x8", "a100-80gb:1x", "a100-80gb:-1x-8"),
    *("a100-80gb:1152921504606846976x8", "a100-80gb:1048576x1048576", "8", "5e9:1x8", "1e308"),
    *("a100-80gb:99999999999999999999x8", "card.json:1x2", "config.json", "shown", "fifo", "loop"),
    *("unreadable.json", "llama2-7b", "LLAMA2-7B", "llama2-7", "no/such/file.json", "true", "-5"),
    *("dp=2,tp=8,pp=4,mbs=1", "dp=2,dp=2", "dp=0", "dp=1e9,tp=1,pp=1,mbs=1", "nv_tp=8", "socket"),
)
NODES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 0.5, 1e-320, 1e-9, 1e9, 1e18, 1e308, -1e308, 10**30),
    *(10**400, 2**31, 2**63, 2**64, float("nan"), float("inf"), float("-inf"), "", "1", "x", "nan"),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"": {}}, "\x1b]0;t\x07", "\ud800", "\u202e", "é"),
    *("${HOME}", "a\nb", "'; touch pwned; '", "$(touch pwned)", "x" * 300, "y" * 20_000),
    *("[red]x[/red]", "{}", "%s", "\x00", "٣", "../../x", [0] * 5000, "\x85\x9b31m"),
)
FACTORS = (1.5, 2.0, 0.5, 10.0, 0.1, 18.0, 1 / 18, 1e6, 1e-6, -1.0, 1e3, 1e-3, 1e30, 1 + 1e-12)
ENVIRONMENTS: tuple[dict[str, str | None], ...] = (
    *({"COLUMNS": text} for text in ("1", "0", "-5", "99999", "x", "", _HUGE, "1e3", "٣")),
    {"LINES": "0", "COLUMNS": "2"},
    {"LANG": "C", "LC_ALL": "C"},
    {"LANG": "xx_YY.KOI8-R"},
    {"HOME": None},
    {"HOME": "/nonexistent"},
    {"TERM": "dumb"},
    {"TERM": ""},
    {"TERM": "nonsense"},
    {"NO_COLOR": "1"},
    {"FORCE_COLOR": "1"},
    {"TMPDIR": "/nonexistent"},
    {"PATH": ""},
    {"RANK": "x", "WORLD_SIZE": "-1"},
    {"RANK": "-1"},
    {"RANK": "٣"},
    {"WORLD_SIZE": _HUGE},
    {"LOCAL_RANK": "999999"},
    {"OMP_NUM_THREADS": "-3"},
    {"CUDA_VISIBLE_DEVICES": "nonsense"},
    {"XDG_CACHE_HOME": "/nonexistent", "HF_HOME": "/nonexistent"},
    {"_AUTOPAR_COMPLETE": ""},
)


def prepare_good(folder: Path) -> None:
    """Fill a folder with the files of every base, and with canaries."""
    prepare(folder, ROOT)
    prepare_explore(folder, ROOT)
    prepare_exports(folder)
    prepare_plans(folder)
    prepare_models(folder)
    (folder / "launch.sh").write_text(LAUNCH, "utf-8")
    shown = folder / "shown"
    shown.mkdir()
    for path in (ROOT / "hardware_configs" / "a100-80gb_1x8").iterdir():
        (shown / path.name).write_bytes(path.read_bytes())
    (folder / "full_plan.json").write_bytes(_full_plan())
    (folder / "canary").write_bytes(CANARY)
    (folder / "canary_link").symlink_to("canary")
    (folder / "dangling").symlink_to("nowhere/at/all")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "fifo")
    (folder / "unreadable.json").write_text("{}", "utf-8")
    (folder / "unreadable.json").chmod(0)
    (folder / "closed").mkdir(mode=0)
    (folder / "empty").mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        start = Path.cwd()
        os.chdir(folder)  # the name of a socket has at most 107 bytes
        try:
            one.bind("socket")
        finally:
            os.chdir(start)
    # separate devices, so that those of the machine stay safe
    for name, minor in (("null", 3), ("full", 7)):
        with contextlib.suppress(OSError):
            os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))


LAUNCH = """export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
ARGS=(
    --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
    --max-position-embeddings 2048 --vocab-size 32000 --swiglu --normalization RMSNorm
    --micro-batch-size 1 --global-batch-size 8 --bf16
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $((4 / TP))
)
if [ "$TP" -gt 1 ]; then ARGS+=(--sequence-parallel); fi
torchrun --nproc-per-node 8 pretrain_gpt.py ${ARGS[@]}
"""
"""A launch of Megatron-LM with its model."""


@cache
def _full_plan() -> bytes:
    """Return a plan file that names all of its inputs, files of the same folder."""
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        prepare(Path(name), ROOT)
        os.chdir(name)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                code = search.run(
                    [*_SMALL, "--engine", "none", "--output-config-path", "full.json"]
                )
        finally:
            os.chdir(start)
        assert code == 0
        return (Path(name) / "autopar_plan_full.json").read_bytes()


@cache
def _rows(name: str, first: str) -> tuple[Any, ...]:
    """Return the options of a command."""
    module = import_module(SUBCOMMANDS[name][1])
    models = ("calculon", "tensor2d")
    command = getattr(module, f"_{first.upper()}") if first in models else module.COMMAND
    return tuple(one for one in command.rows if one.name not in _NEVER)


_NEVER = {"ray", "ray-search", "tuner", "plot", "plot-format", "timeout"}
"""Options that need other projects' packages, or draw for a second."""


def make(seed: int, folder: Path, *, kind: str | None = None) -> Run:
    """Fill an empty folder and return the run of a seed.

    kind : one of `KINDS`; by default the seed decides.
    """
    draw = random.Random(seed)
    base = draw.choices(BASES, [one.weight for one in BASES])[0]
    kind = kind or draw.choices(KINDS, (5, 6, 2, 1))[0]
    prepare_good(folder)
    if kind == "document" and not base.reads:
        kind = "words"
    if kind == "output" and not base.outputs:
        kind = "environment"
    making: dict[str, Callable[[random.Random, Base, Path], dict[str, Any]]] = {
        "words": _words,
        "document": _document,
        "output": _output,
        "environment": _environment,
    }
    found = {"arguments": base.arguments, **making[kind](draw, base, folder)}
    inputs = tuple(
        str(path.relative_to(folder))
        for pattern in base.reads
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not path.is_symlink()
    )
    return Run(seed=seed, name=base.name, kind=kind, inputs=inputs, **found)


# --------------------------------------------------------------------------------------------------
# Words.


def _words(draw: random.Random, base: Base, folder: Path) -> dict[str, Any]:
    """Spoil one to three words of the command line."""
    del folder
    arguments = list(base.arguments)
    said = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        row = draw.choice(_rows(base.name, base.arguments[0] if base.arguments else ""))
        value = draw.choice(NUMBERS if row.kind in ("int", "float", "ints") else WORDS)
        chance = draw.random()
        if chance < 0.1:
            value = draw.choice((*NUMBERS, *WORDS))
        elif chance < 0.6 and row.kind in ("int", "float", "ints"):
            value = draw.choice(PLAUSIBLE)  # most of the others are refused at once
        elif row.choices and draw.random() < 0.6:
            value = draw.choice(list(row.choices))
        name = draw.choice((row.name, row.name, row.name.replace("-", "_"), row.name.upper()))
        way = draw.randrange(12)
        if way < 5:
            arguments += [f"--{name}", value]
        elif way < 7:
            arguments += [f"--{name}={value}"]
        elif way == 7:
            arguments += [f"{name.replace('-', '_')}={value}"]
        elif way == 8:
            arguments += [f"--{name}", value, f"--{name.replace('-', '_')}", draw.choice(NUMBERS)]
        elif way == 9:
            arguments += [f"--{name}"]
        elif way == 10:
            arguments.insert(draw.randrange(len(arguments) + 1), value)
        elif arguments:
            arguments[draw.randrange(len(arguments))] = value
        said.append(f"--{row.name} {_short(value)}")
    # arguments of a process contain no zero bytes
    return {
        "arguments": tuple(one.replace("\x00", "\x01") for one in arguments),
        "what": "; ".join(said),
    }


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 50 else f"{text[:24]}...({len(text)})"


# --------------------------------------------------------------------------------------------------
# Documents.


def _document(draw: random.Random, base: Base, folder: Path) -> dict[str, Any]:
    """Spoil one file that the command reads: its bytes or its kind, or values in it."""
    files = [path for one in base.reads for path in sorted(folder.glob(one))]
    path = draw.choice(files)
    name = path.relative_to(folder)
    if draw.random() < 0.3:
        way = draw.choice(sorted(_RAW))
        _RAW[way](path)
        return {"what": f"{name}: {way}"}
    if path.suffix != ".json":
        lines = path.read_text("utf-8").split("\n")
        place = draw.randrange(len(lines))
        words = lines[place].split(" ")
        words[draw.randrange(len(words))] = draw.choice((*WORDS, *NUMBERS))
        lines[place] = " ".join(words)
        path.write_bytes("\n".join(lines).encode("utf-8", "replace"))
        return {"what": f"{name}: line {place + 1}"}
    data = json.loads(path.read_text("utf-8"))
    said = [_change(draw, data) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    path.write_text(json.dumps(data), "utf-8")
    return {"what": f"{name}: " + "; ".join(said)}


def _change(draw: random.Random, data: Any) -> str:
    """Change one place of a document and return its description."""
    node, trail = data, []
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        if not keys:
            return "nothing"
        key = draw.choice(list(keys))
        trail.append(str(key))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.15:
            break
        node = inner
    where = _short(".".join(trail))
    way = draw.randrange(10)
    if way < 5:
        node[key] = draw.choice(NODES)
        return f"{where} = {_short(node[key])}"
    if way < 7 and isinstance(inner, int | float):
        factor = draw.choice(FACTORS)
        node[key] = type(inner)(inner * factor)
        return f"{where} x {factor:g}"
    if way == 7:
        del node[key]
        return f"{where} is missing"
    if way == 8 and isinstance(node, dict):
        new = draw.choice((*WORDS, str(key) + "x", str(key).upper()))
        node[new] = node.pop(key)
        return f"{where} is called {_short(new)}"
    if isinstance(node, dict):
        new = draw.choice(WORDS)
        node[new] = draw.choice(NODES)
        return f"{_short(new)} is added"
    node.append(draw.choice(NODES))
    return f"{where}: one more"


def _instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(change(path.read_bytes())), None)[1]


def _duplicate(raw: bytes) -> bytes:
    found = raw.find(b'"')
    end = raw.find(b",", found)
    return raw[:found] + raw[found : end + 1] * 2 + raw[end + 1 :] if end > 0 else raw


_RAW: dict[str, Callable[[Path], None]] = {
    "truncated": _bytes(lambda raw: raw[: len(raw) * 2 // 3]),
    "byte-order mark": _bytes(lambda raw: b"\xef\xbb\xbf" + raw),
    "UTF-16": _bytes(lambda raw: raw.decode().encode("utf-16")),
    "binary": _bytes(lambda raw: bytes(range(256)) * 20),
    "empty": _bytes(lambda raw: b""),
    "blanks": _bytes(lambda raw: b" \n\t" * 50),
    "gzip": _bytes(gzip.compress),
    "zero bytes": _bytes(lambda raw: raw.replace(b":", b"\x00", 1)),
    "deep": _bytes(lambda raw: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep lists": _bytes(lambda raw: b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "long number": _bytes(lambda raw: b'{"a": ' + b"9" * 6000 + b"}"),
    "long text": _bytes(lambda raw: b'{"' + b"k" * 10_000_000 + b'": "' + b"v" * 1000 + b'"}'),
    "many keys": _bytes(
        lambda raw: json.dumps({f"layertype_0_bsz{i}_seq4096": 1 for i in range(50_000)}).encode()
    ),
    "a key twice": _bytes(_duplicate),
    "a list": _bytes(lambda raw: b"[" + raw + b"]"),
    "a text": _bytes(lambda raw: b'"text"'),
    "null": _bytes(lambda raw: b"null"),
    "no object": _bytes(lambda raw: b"{}"),
    "escapes": _bytes(lambda raw: b'{"\\u001b]0;t\\u0007": "\\ud800"}'),
    "carriage returns": _bytes(lambda raw: raw.replace(b"\n", b"\r\n")),
    "a comment": _bytes(lambda raw: b"// comment\n" + raw),
    "more behind": _bytes(lambda raw: raw + raw),
    "a folder": _instead(Path.mkdir),
    "a pipe": _instead(os.mkfifo),
    "a loop": _instead(lambda path: path.symlink_to(path.name)),
    "a dangling link": _instead(lambda path: path.symlink_to("no/where")),
    "a file as folder": _instead(lambda path: path.symlink_to("canary/x")),
    "a device": _instead(lambda path: path.symlink_to("null")),
    "a socket": _instead(lambda path: path.symlink_to("socket")),
    "missing": Path.unlink,
    "unreadable": lambda path: path.chmod(0),
    "endless": _instead(lambda path: path.symlink_to("/dev/zero")),
    "sparse": lambda path: os.truncate(path, 3 << 30),
}


# --------------------------------------------------------------------------------------------------
# Outputs and environments.

_TARGETS = (
    *(
        "null",
        "full",
        "fifo",
        "canary_link",
        "dangling",
        "loop",
        "socket",
        "closed",
        "closed/x.json",
    ),
    *("a/b/c/d.json", "x" * 251 + ".json", "é" * 150, "y" * 250 + ".json", "z" * 5000, "", " "),
    *(".", "..", "empty", "canary/child.json", "canary/../x.json", "-", "--", "new/", "./new.json"),
    *("\x1b]0;t\x07.json", "caf\udce9.json", "a\nb.json", "${HOME}.json", "$(touch pwned).json"),
    *("[red]x.json", "\u202ex.json", "x.json.gz", "x.GZ", "x.csv", "noending", "/dev/stdout"),
    *("none", "None", "null/x", "fifo/x", "a" * 100 + "/" + "b" * 255 + "/c.json", "\x7f.json"),
    *("/".join(["d" * 200] * 30), "x.json:stream", "con", "x.json\x01", "\u2028.json", "/proc/x/y"),
)


def _output(draw: random.Random, base: Base, folder: Path) -> dict[str, Any]:
    """Redirect an output of the command to a place that is impossible or forbidden."""
    arguments = list(base.arguments)
    options = draw.sample(base.outputs, draw.choice((1, min(2, len(base.outputs)))))
    target = draw.choice(_TARGETS)
    if draw.random() < 0.25 and base.reads:
        path = draw.choice([path for one in base.reads for path in sorted(folder.glob(one))])
        target = str(path.relative_to(folder))
        if draw.random() < 0.4:
            (folder / "input_link").symlink_to(target)
            target = "input_link"
    for option in options:
        # repeated options are another case
        if f"--{option}" in arguments:
            arguments[arguments.index(f"--{option}") + 1] = target
        else:
            arguments += [f"--{option}", target]
    stdout = draw.choice(("file", "file", "file", "closed", "full", "ascii"))
    return {
        "arguments": tuple(arguments),
        "stdout": stdout,
        "what": f"{', '.join(options)} to {_short(target)}, stdout {stdout}",
    }


def _environment(draw: random.Random, base: Base, folder: Path) -> dict[str, Any]:
    """Start the command in an unusual environment."""
    chosen = draw.choice(ENVIRONMENTS)
    gone = draw.random() < 0.15
    arguments = base.arguments
    if gone and draw.random() < 0.7:
        arguments = tuple(
            str(folder / one) if (folder / one.partition(":")[0]).exists() else one
            for one in arguments
        )
    stdout = draw.choice(("file", "ascii", "closed", "full", "terminal", "terminal"))
    if draw.random() < 0.2:
        arguments = (*arguments, "--help")
    words = " ".join(f"{name}={_short(value)}" for name, value in chosen.items())
    return {
        "arguments": arguments,
        "environment": dict(chosen),
        "stdout": stdout,
        "gone": gone,
        "what": f"{words}, stdout {stdout}" + (", no working directory" if gone else ""),
    }
