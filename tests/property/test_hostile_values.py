"""Values that once ended in an internal error, a hang or another answer, one of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.property.hostile import Base, Run
from tests.property.hostile_runs import BAD, Runner, runner
from tests.property.hostile_shapes import SHAPES, prepare_shapes, read, write

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="processes are copies of one that has torch imported")

_BRIDGE = "llama3_8b_pretrain_override_example.yaml"
_SP = "shown/sp_time_1nodes_8gpus_per_node.json"
ROWS: tuple[tuple[str, str, str, Any, int, str], ...] = (
    ("explain", "strategy.json", "vtp", 10**7, 0, "cannot be estimated"),
    ("cards", "card.json", "collectives", float("-inf"), 2, "with 25 keys"),
    ("search", "card.json", "collectives", [10**60], 2, "with 25 keys"),
    ("profile estimate", "card.json", "kernels.memory", {}, 2, "kernels.memory.elementwise"),
    ("profile show", _SP, "all2all_size_8_32MB_time", 5e-324, 2, "a number above 0"),
    ("check", "zero.json", "zero_optimization.offload_optimizer.device", "", 0, "empty text"),
    ("check", "titan.toml", "model.converters", [""], 0, "empty text"),
    ("check", _BRIDGE, "train", float("inf"), 2, "expected a section"),
    ("check", _BRIDGE, "train.global_batch_size", [], 0, "expected one value"),
    ("check", _BRIDGE, "model.num_layers", [7], 0, "expected one value"),
    ("check", _BRIDGE, "model.context_parallel_size", [[]], 0, "expected one value"),
    ("search", "moe.json", "vocab_size", 10**7, 2, "expected at most 4194304"),
    ("search", "config.json", "vocab_size", 10**9, 2, "expected at most 4194304"),
    ("search", "spec.json", "source", float("nan"), 2, "expected a finite number"),
    ("search", "moe.json", "source", {"a": [float("inf")]}, 2, "key 'source.a[0]'"),
    ("compare", "trace.json", "traceEvents.1.ts", 10**60, 2, "expected microseconds"),
    ("compare", "trace.json", "traceEvents.1.dur", 1e300, 2, "expected microseconds"),
)
"""(command, file, dotted key, value, exit code, part of what is said)."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Yield the runner of commands; its processes end with the module."""
    with runner(tmp_path_factory.mktemp("values")) as one:
        yield one


def _base(name: str, file: str) -> Base:
    """Return the first command of a name that reads a file."""
    return next(
        one
        for one in SHAPES
        if one.name == name and any(Path(file).match(pattern) for pattern in one.reads)
    )


@pytest.mark.parametrize(("name", "file", "key", "value", "code", "part"), ROWS)
def test_a_value_no_run_has_is_answered(
    runs: Runner, tmp_path: Path, name: str, file: str, key: str, value: Any, code: int, part: str
) -> None:
    """Each is refused in one sentence, or answered without what cannot be estimated."""
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    prepare_shapes(folder)
    data = node = read(folder / file)
    *trail, last = key.split(".")
    for step in trail:
        node = node[int(step)] if isinstance(node, list) else node.setdefault(step, {})
    node[last] = value
    write(folder / file, data)
    base = _base(name, file)
    run = Run(seed=0, name=name, kind="shapes", what=f"{key} = {value}", arguments=base.arguments)
    done = runs.start(run, folder)
    said = (done.ended.out + done.ended.err).decode()
    assert done.outcome not in BAD, (done.outcome, done.detail)
    assert done.ended.code == code, said
    assert part in " ".join(said.split())
