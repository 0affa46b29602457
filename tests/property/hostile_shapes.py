"""Files that no run has: sizes, nesting and numbers far from any real value, in every document.

    run = make(17, folder)

fills a folder with good files of every kind and changes one or two values of one of them.
`ignored` finds values that a command passes over: with a value of a wrong type it answers as
without it. With the right value its answer is another one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from search.commands import search
from tests.property.hostile import BASES, ROOT, Base, Run, prepare_good
from tests.property.hostile_runs import Done, Runner

TITAN = """[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[training]
local_batch_size = 1
seq_len = 2048
steps = 1000
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_fsdp_float8_all_gather = true
"""
ZERO: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "gradient_clipping": 1.0,
}
FSDP: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    },
    "parallelism_config": {"parallelism_config_dp_shard_size": 8, "parallelism_config_tp_size": 1},
}
ACCELERATE: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 2},
}
MEGATRON: dict[str, Any] = {
    "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": 1},
    "MODEL_ARGS": {
        "--num-layers": 4,
        "--hidden-size": 1024,
        "--ffn-hidden-size": 4096,
        "--num-attention-heads": 16,
        "--num-query-groups": 4,
        "--seq-length": 2048,
        "--max-position-embeddings": 2048,
        "--position-embedding-type": "rope",
        "--swiglu": True,
        "--vocab-size": 32000,
        "--num-experts": 8,
        "--moe-router-topk": 2,
        "--expert-model-parallel-size": 2,
        "--micro-batch-size": 1,
        "--global-batch-size": 16,
        "--tensor-model-parallel-size": 2,
        "--pipeline-model-parallel-size": 2,
        "--sequence-parallel": True,
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--recompute-granularity": "selective",
        "--recompute-modules": "core_attn",
    },
}
BRIDGE: dict[str, Any] = {
    "model": {
        "tensor_model_parallel_size": 4,
        "sequence_parallel": True,
        "seq_length": 4096,
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
    },
    "train": {"global_batch_size": 64, "micro_batch_size": 2},
    "dataset": {"sequence_length": 4096},
}
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def _kernel(name: str, start: float, end: float, **others: Any) -> dict[str, Any]:
    one = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": end - start}
    return one | {"pid": 0, "tid": 7, "args": {"Process Group Description": "tp"}} | others


TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "deviceProperties": [{"name": "NVIDIA H100"}],
    "distributedInfo": {"rank": 0, "world_size": 2},
    "traceEvents": [
        _kernel("ProfilerStep#1", 0, 100, cat="gpu_user_annotation"),
        _kernel("ncclDevKernel_AllReduce", 10, 40),
        _kernel("cutlass_gemm", 30, 80),
        _kernel("flash_fwd", 80, 95, pid=1),
        {"ph": "i", "name": "[memory]", "args": {"Total Allocated": 1000, "Device Type": 1}},
    ],
}
_OVERRIDES = "llama3_8b_pretrain_override_example.yaml"
_ON = ("--hardware", "card.json:1x8")
_OF = ("--model", "config.json", "--seq-length", "2048")
_CALLED = ("--model", "config.json", "--hardware", "card.json:1x2", "--global-batch-size", "8")
_QUIET = ("--output-config-path", "none")


def _check(file: str, *more: str, weight: int = 4) -> Base:
    return Base(name="check", arguments=(file, *_ON, *more), reads=(file,), weight=weight)


SHAPES = (
    *(one for one in BASES if one.reads and not one.reads[0].endswith((".sh", ".yaml"))),
    _check("launch.yaml"),
    _check("titan.toml"),
    _check("zero.json", *_OF),
    _check("fsdp.yaml", *_OF),
    _check("accelerate.yaml", *_OF),
    _check(_OVERRIDES, weight=2),
    *(
        Base(
            name="search",
            arguments=("--model", file, "--hardware", "card.json:1x8", *_CALLED[4:], *_QUIET),
            reads=(file,),
            weight=4,
        )
        for file in ("mixture.json", "moe.json")
    ),
    Base(
        name="search",
        arguments=(*_CALLED, "--site", "site.json", "--stack", "stack.json", *_QUIET),
        reads=("site.json", "stack.json"),
        weight=3,
    ),
    Base(name="compare", arguments=("trace.json", "other.json"), reads=("trace.json",), weight=2),
    Base(name="compare", arguments=("uniform.json", "full_plan.json"), reads=("uniform.json",)),
    Base(name="explain", arguments=("uniform.json",), reads=("uniform.json",), weight=4),
    Base(name="export", arguments=("uniform.json",), reads=("uniform.json",), weight=2),
    Base(name="explain", arguments=("run_v2.json",), reads=("run_v2.json",), weight=2),
    Base(name="explain", arguments=("launch_v1.json",), reads=("launch_v1.json",), weight=2),
)
"""Commands and the files that they read; also those of `hostile`."""


def prepare_shapes(folder: Path) -> None:
    """Fill a folder with the files of every base."""
    for name, content in _good_files().items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


@cache
def _good_files() -> dict[str, bytes]:
    """Return the content of the files of every base by name."""
    found = {"titan.toml": TITAN.encode(), "uniform.json": _uniform_plan()}
    for name, data in (
        ("zero.json", ZERO),
        ("fsdp.yaml", FSDP),
        ("accelerate.yaml", ACCELERATE),
        ("launch.yaml", MEGATRON),
        (_OVERRIDES, BRIDGE),
        ("mixture.json", MIXTURE),
        ("trace.json", TRACE),
        ("other.json", TRACE),
    ):
        found[name] = json.dumps(data).encode()
    for name, source in (
        ("moe.json", "models/deepseek-v2-lite/model.json"),
        ("site.json", "hardware_configs/sites/selene-a100.json"),
        ("stack.json", "hardware_configs/stacks/megatron-core.json"),
    ):
        found[name] = (ROOT / source).read_bytes()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_good(folder)
        (folder / "closed").chmod(0o700)
        (folder / "unreadable.json").unlink()
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                found.setdefault(str(path.relative_to(folder)), path.read_bytes())
    return found


@cache
def _uniform_plan() -> bytes:
    """Return a plan file of a uniform plan that names its inputs, files of the same folder."""
    start = Path.cwd()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        prepare_good(Path(name))
        os.chdir(name)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                code = search.run([*_CALLED, "--engine", "megatron", *_QUIET[:1], "made.json"])
        finally:
            os.chdir(start)
            (Path(name) / "closed").chmod(0o700)
        assert code == 0
        return (Path(name) / "made.json").read_bytes()


# --------------------------------------------------------------------------------------------------
# Values.


def raw(text: str) -> str:
    """Return a value that `write` writes into a file as it is, without quotes."""
    return f"\ue000{text}\ue001"


_RAW = re.compile('"\ue000(.*?)\ue001"')

WHOLE: tuple[Any, ...] = (
    *(0, -1, -0.0, 1.5, 10**6, 10**7, 10**9, 2**31, 2**40, 2**53, 2**60, 2**63, 2**64, 10**30),
    *(10**400, 1e7, 1e18, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf")),
)
WRONG: tuple[Any, ...] = (7, -3.5, True, "x", "8", "", [], {}, [7], {"a": 7}, [[]], [None], None)
"""Values of every type: most are wrong there."""
RAW: dict[str, tuple[str, ...]] = {
    ".json": ("1e400", "-0", "1E+3", "0.1e1", "9" * 4300, "[" * 60 + "]" * 60),
    ".yaml": (
        *("1:2:3", "1:2:3.5", "5e3", "5.0e+3", "0x1F", "010", "0o10", "1_000", ".inf", "-.INF"),
        *(".nan", "~", "2020-01-01", "yes", "off", "!!int 3", "&a [*a]", "0b11", "1:59" * 9),
        *("[" * 60 + "]" * 60, "9" * 4300, "0x" + "f" * 3000, "=", "<<", "? x", "+8", "８"),  # noqa: RUF001
    ),
    ".toml": (
        *("inf", "-nan", "0xFF", "0o17", "0b1", "1_000", "1979-05-27", "07:32:00", "5e3", "-0"),
        *("9" * 4300, "0x" + "f" * 3000, "[" * 60 + "]" * 60, "''", "+8", "{a.b.c = 1}"),
    ),
}


def _long_list(value: Any) -> Any:
    return (value if isinstance(value, list) and value else [value]) * 100_000


GROWN: dict[str, Callable[[Any], Any]] = {
    "a million entries": lambda value: [0] * 1_000_000,
    "a long list": _long_list,
    "5,000 entries": lambda value: [*range(1, 5001)],
    "5,000 in a text": lambda value: ",".join(map(str, range(1, 5001))),
    "a million characters": lambda value: "x" * 1_000_000,
    "a million digits": lambda value: "9" * 1_000_000,
    "many keys": lambda value: {f"key{place}": value for place in range(50_000)},
    "deep objects": lambda value: _nested(value, 50),
}


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = {"a": value}
    return value


def read(path: Path) -> Any:
    """Return the content of a good file."""
    text = path.read_text("utf-8")
    if path.suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    return yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)


def write(path: Path, data: Any) -> None:
    """Write a document, with `raw` values as they are."""
    if path.suffix == ".toml":
        text = "".join(
            f"{_toml(key)} = {_toml(value)}\n"
            for key, value in data.items()
            if not isinstance(value, dict)
        ) + "".join(
            f"[{_toml(key)}]\n"
            + "".join(f"{_toml(name)} = {_toml(inner)}\n" for name, inner in value.items())
            for key, value in data.items()
            if isinstance(value, dict)
        )
    else:
        text = _RAW.sub(r"\1", json.dumps(data, ensure_ascii=False))
        if path.suffix == ".yaml":
            text = text.replace("-Infinity", "-.inf").replace("Infinity", ".inf")
            text = text.replace("NaN", ".nan")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if value is None:
        return '""'
    text = json.dumps(value, ensure_ascii=False)
    return _RAW.sub(r"\1", text).replace("Infinity", "inf").replace("NaN", "nan")


# --------------------------------------------------------------------------------------------------
# Runs.


def base_of(seed: int) -> tuple[random.Random, Base]:
    """Return the generator and the base of a seed."""
    draw = random.Random(seed)
    return draw, draw.choices(SHAPES, [one.weight for one in SHAPES])[0]


def make(seed: int, folder: Path, *, kind: str | None = None) -> Run:
    """Fill an empty folder and return the run of a seed.

    kind : `good` for the unchanged files, `without` to omit the changed values; None for the run.
    """
    draw, base = base_of(seed)
    prepare_shapes(folder)
    files = [
        path
        for pattern in base.reads
        for path in sorted(folder.glob(pattern))
        if path.suffix in RAW
    ]
    what = "good"
    if files and kind != "good":
        path = draw.choice(files)
        data = read(path)
        said = [
            _change(draw, data, path.suffix, without=kind == "without")
            for _ in range(draw.choice((1, 1, 1, 2)))
        ]
        write(path, data)
        what = f"{path.relative_to(folder)}: " + "; ".join(said)
    return Run(seed=seed, name=base.name, kind="shapes", what=what, arguments=base.arguments)


def _change(draw: random.Random, data: Any, suffix: str, *, without: bool) -> str:
    """Change one value of a document, or delete it; returns the description."""
    node, trail = data, []
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = draw.choice(list(keys))
        trail.append(str(key))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            break
        node = inner
    way = draw.randrange(10)
    new: Any
    if way < 4:
        new = draw.choice(WHOLE)
        called = repr(new)
    elif way < 7:
        new = copy.deepcopy(draw.choice(WRONG))
        called = repr(new)
    elif way < 8:
        called = draw.choice(RAW[suffix])
        new = raw(called)
    else:
        grown = draw.choice(sorted(GROWN))
        # Copies of a value that has grown already would fill the memory of this process.
        new, called = GROWN[grown](inner if len(str(inner)) < 100_000 else 8), grown
    node[key] = new
    if without:
        del node[key]
    return f"{'.'.join(trail)} = {called[:60]}"


def is_wrong_type(run: Run) -> bool:
    """Return True for a run with one changed value, which is one of `WRONG`."""
    key, _, value = run.what.partition(" = ")
    # Any text is a category of an event: one without a device is passed over.
    is_text = key.endswith(".cat") and value.startswith("'")
    # A sidecar without curves says so by an empty list.
    is_none = key.endswith(" curves") and value == "[]"
    return "; " not in run.what and value in _WRONG_VALUES and not is_text and not is_none


# An empty object means nothing where a key is harmless.
_WRONG_VALUES = frozenset(repr(one) for one in WRONG if one not in (None, {}))


def ignored(run: Callable[[str], Done], done: Done) -> bool:
    """Return True if a command passes over a value of a wrong type.

    The answer is then that without the value, although the value that belongs there changes it.

    run : starts the run of the same seed with another kind of `make`.
    """
    if done.outcome != "ok" or not is_wrong_type(done.run):
        return False
    answer = _answer(done)
    return answer != _answer(run("good")) and answer == _answer(run("without"))


def _answer(done: Done) -> bytes:
    return _TIMES.sub(b"", done.ended.out + done.ended.err)


# A number is tried once, at its start: an answer may name one of a million digits.
_TIMES = re.compile(rb"(?<![0-9.,])[0-9.,]++ (ms|s) of CPU|sha256:[0-9a-f]+")


def judged(runs: Runner, seed: int) -> Done:
    """Return a run with its class, which is also `IGNORED` if a command passes over a value."""
    done = runs.run(seed, make=make)
    if ignored(lambda kind: runs.run(seed, kind=kind, make=make), done):
        return replace(done, outcome="IGNORED", detail=done.run.what)
    return done
