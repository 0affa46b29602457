"""The exploration of Calculon's space against the published counts and against brute force."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import InputError
from search.closed_form.answers import Answer, Point
from search.closed_form.calculon import EXECUTION, evaluate_many
from search.closed_form.calculon.engine import pack_executions, unpack_execution
from search.closed_form.calculon.exploration import Space, explore
from search.closed_form.native import Objective
from tests.data.read import calculon_best, calculon_documents
from tests.parity.test_calculon_engine import APPLICATION, SYSTEM

PUBLISHED = {"fixed_batch": False, "uneven": False}


@pytest.fixture(scope="module")
def inputs(data_dir: Path) -> dict[str, dict[str, Any]]:
    """Return applications and systems."""
    return calculon_documents(data_dir)


@pytest.mark.parametrize(
    ("model", "system", "procs", "batch", "points"),
    [
        ("turing-530B", "a100_80g", 5128, 2520, 10_944),
        ("gpt3-13B", "a100_80e", 64, 512, 1_380_160),
        ("gpt3-13B", "a100_80g_nomem2", 64, 512, 199_760),
        ("gpt3-13B", "a100_80e", 128, 1024, 1_380_160),
        ("megatron-22B", "a100_80e", 64, 256, 3_392_488),
        ("gpt3-175B", "a100_80e", 64, 64, 3_232_128),
        ("gpt3-175B", "a100_80e", 512, 512, 6_582_816),
        ("gpt3-175B", "a100_80e", 1024, 1536, 11_698_528),
        ("megatron-5B", "h100_80g_nvl8", 16, 64, 861_080),
        ("megatron-126M", "a100_80e", 8, 64, 298_072),
    ],
)
def test_the_space_has_the_published_size(
    inputs: dict[str, Any], model: str, system: str, procs: int, batch: int, points: int
) -> None:
    """Every point is considered once, and told apart by why it is refused."""
    found = explore(
        inputs["models"][model],
        inputs["systems"][system],
        Space(num_procs=procs, max_batch=batch, **PUBLISHED),
        compat=True,
    )
    assert found.considered == points
    assert found.feasible + sum(found.rejected.values()) == points
    if model == "turing-530B":
        assert found.feasible == 1080


def test_without_overlap_the_space_is_the_published_one(inputs: dict[str, Any]) -> None:
    """The switch that leaves out overlapped tensor communication."""
    found = explore(
        inputs["models"]["gpt3-13B"],
        inputs["systems"]["a100_80g_nomem2"],
        Space(num_procs=64, max_batch=512, tensor_overlap=False, **PUBLISHED),
        compat=True,
    )
    assert found.considered == 74_800


def test_the_published_search_has_the_published_rates(
    inputs: dict[str, Any], data_dir: Path
) -> None:
    """The ten best of the documented search."""
    expected = calculon_best(data_dir)
    found = explore(
        inputs["models"]["turing-530B"],
        inputs["systems"]["a100_80g"],
        Space(num_procs=5128, max_batch=2520, **PUBLISHED),
        top=10,
        compat=True,
    )
    rates = [row["stats"]["sample_rate"] for row in expected]
    assert [x.rate_per_s for x in found.best] == pytest.approx(rates, rel=1e-9)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [d for d in range(1, number + 1) if number % d == 0]


def every_execution(procs: int, batch: int) -> list[dict[str, Any]]:
    """Return the whole space by plain loops, illegal points included."""
    rows = []
    layers = APPLICATION["num_blocks"]
    for t, p in itertools.product(divisors(procs), divisors(procs)):
        if procs % (t * p) or p > layers or -(-layers // p) * (p - 1) >= layers:
            continue
        d = procs // (t * p)
        if batch % d:
            continue
        flags = itertools.product(
            [True, False],  # sharding
            ["none", "attn_only", "full"],
            ["ar", "p2p_rs_ag", "rs_ag"],
            [True, False],  # redo
            [True, False],  # data overlap
            ["none", "ring", "pipe"],
            [True, False],  # offloads
            [True, False],
            [True, False],
            divisors(-(-layers // p)) if p > 1 else [1],
            divisors(batch // d),
            [0, 1],
            [0, 1],
            [0, 1],
        )
        rows += [
            dict(
                zip(
                    (
                        "optimizer_sharding",
                        "activation_recompute",
                        "tensor_par_comm_type",
                        "seq_par_ag_redo",
                        "data_par_overlap",
                        "tensor_par_overlap",
                        "weight_offload",
                        "activations_offload",
                        "optimizer_offload",
                        "pipeline_interleaving",
                        "microbatch_size",
                        "tensor_par_net",
                        "pipeline_par_net",
                        "data_par_net",
                    ),
                    point,
                    strict=True,
                ),
                tensor_par=t,
                pipeline_par=p,
                data_par=d,
            )
            for point in flags
        ]
    return rows


@pytest.fixture(scope="module")
def brute_force() -> tuple[np.ndarray, np.ndarray]:
    """Return the feasible executions on 4 processors, and their outcomes."""
    rows = every_execution(4, 8)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= {
        "batch_size": 8,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
    }
    packed = pack_executions(columns)
    found = evaluate_many(APPLICATION, packed, SMALL_SYSTEM)
    # a tier of a dimension of size 1, and offload of checkpoints, are not tried
    tried = (packed["tensor_par_net"] == 0) | (packed["tensor_par"] > 1)
    tried &= (packed["pipeline_par_net"] == 0) | (packed["pipeline_par"] > 1)
    tried &= (packed["data_par_net"] == 0) | (packed["data_par"] > 1)
    tried &= (packed["activations_offload"] == 0) | (packed["activation_recompute"] != 2)
    keep = found["ok"] & tried
    return packed[keep], found[keep]


SMALL_SYSTEM = SYSTEM | {
    "mem1": SYSTEM["mem1"] | {"GiB": 6},
    "networks": [SYSTEM["networks"][0] | {"must_be_filled": False}, SYSTEM["networks"][1]],
}
SPACE = Space(num_procs=4, max_batch=8)


def search(**options: Any) -> Answer:
    """Search the small space."""
    return explore(APPLICATION, SMALL_SYSTEM, SPACE, **options)


@pytest.mark.whole
def test_every_feasible_execution_is_found_once(
    brute_force: tuple[np.ndarray, np.ndarray],
) -> None:
    """All points, uneven stages included, with equal figures."""
    packed, outcomes = brute_force
    seen: list[Any] = []

    def each(executions: np.ndarray, figures: np.ndarray) -> None:
        seen.extend(zip(executions.tolist(), figures["total_time_s"].tolist(), strict=True))

    found = search(each=each)
    assert found.feasible == len(seen) == len(packed) > 1000
    expected = sorted(zip(packed.tolist(), outcomes["total_time_s"].tolist(), strict=True))
    assert [x for x, _ in sorted(seen)] == [x for x, _ in expected]
    assert [s for _, s in sorted(seen)] == pytest.approx([s for _, s in expected])
    assert (packed["pipeline_par"] == 4).any()
    assert APPLICATION["num_blocks"] % 4 != 0


@pytest.mark.whole
@pytest.mark.parametrize("objective", ["rate", "time", "memory"])
def test_the_best_are_the_best(
    brute_force: tuple[np.ndarray, np.ndarray], objective: Objective
) -> None:
    """The figures of the best 20, duplicates kept."""
    _, outcomes = brute_force
    found = search(objective=objective, top=20, duplicates=True)
    memory = objective == "memory"
    expected = np.sort(outcomes["tier1_bytes" if memory else "total_time_s"])[:20].tolist()
    assert [x.memory_bytes if memory else x.time_s for x in found.best] == pytest.approx(
        expected, rel=1e-12
    )


def test_duplicates_are_left_out() -> None:
    """No two of the best differ only in switches without effect; the simplest is kept."""

    def key(x: Point) -> tuple[Any, ...]:
        degrees = ("tensor_par", "pipeline_par", "pipeline_interleaving", "microbatch_size")
        return (x.time_s, x.memory_bytes, *(x.execution[name] for name in degrees))

    with_them = search(top=40, duplicates=True)
    without = search(top=40)
    assert len({key(x) for x in with_them.best}) < 40
    assert len({key(x) for x in without.best}) == 40


def test_the_frontier_is_that_of_all_points(
    brute_force: tuple[np.ndarray, np.ndarray],
) -> None:
    """No point beats one of it, and every other point is beaten."""
    _, outcomes = brute_force
    points = sorted(zip(outcomes["total_time_s"], outcomes["tier1_bytes"], strict=True))
    expected: list[tuple[float, float]] = []
    for time_s, size in points:
        if not expected or size < expected[-1][1]:
            expected.append((time_s, size))
    found = search(frontier=True).frontier
    assert [x.time_s for x in found] == pytest.approx([t for t, _ in expected])
    assert [x.memory_bytes for x in found] == pytest.approx([b for _, b in expected])
    assert len(found) > 2


def test_threads_do_not_change_the_answer() -> None:
    """Best, frontier and counts."""
    calls: list[tuple[int, int]] = []
    one = search(top=30, frontier=True, progress=lambda done, all_: calls.append((done, all_)))
    assert calls[-1][0] == calls[-1][1] == len(calls)
    for threads in (2, 5):
        assert search(top=30, frontier=True, threads=threads) == one
        assert search(top=30, threads=threads).best == one.best


def test_executions_can_be_priced_again() -> None:
    """What is found is a document of its own."""
    for row in search(top=5).best:
        again = evaluate_many(APPLICATION, [row.execution], SMALL_SYSTEM)
        assert again["total_time_s"][0] == row.time_s
    assert set(row.execution) >= set(EXECUTION.names or ()) - {"structure_type"}
    assert unpack_execution(np.zeros(1, dtype=EXECUTION)[0])["datatype"] == "float8"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_procs": 0}, "num_procs: the value is 0"),
        ({"max_batch": 1.5}, "max_batch: the value is 1.5"),
        ({"datatype": "int4"}, "datatype: the value is 'int4'"),
    ],
)
def test_bad_spaces(change: dict[str, Any], sentence: str) -> None:
    """One sentence with the field."""
    with pytest.raises(InputError, match=sentence):
        Space(**({"num_procs": 4, "max_batch": 8} | change))


def test_bad_questions() -> None:
    """An objective or a number that means nothing."""
    with pytest.raises(InputError, match="objective: the value is 'speed'"):
        search(objective="speed")
    with pytest.raises(InputError, match="top: the value is 0"):
        search(top=0)
