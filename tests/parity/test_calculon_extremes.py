"""Engine and oracle of Calculon at the ends of what a document or an array can hold."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleExecution, InputError
from search.closed_form.calculon import CORRECT, EXECUTION, evaluate, evaluate_many
from search.closed_form.calculon.engine import pack_executions
from search.closed_form.calculon.exploration import Space, explore
from tests.parity.test_calculon_engine import (
    APPLICATION,
    EXECUTION_DOCUMENT,
    SYSTEM,
    both,
)

LARGE = {
    "hidden": 2**27,
    "feedforward": 2**29,
    "seq_size": 2**28,
    "attn_heads": 2**12,
    "attn_size": 2**15,
    "vocab_size": 10**9,
}


def roomy() -> dict[str, Any]:
    """Return the system with memories and a tier that take anything."""
    system = copy.deepcopy(SYSTEM)
    system["mem1"]["GiB"] = system["mem2"]["GiB"] = 1e15
    return system


@pytest.mark.parametrize(
    "name",
    [
        "datatype",
        "attention_type",
        "activation_recompute",
        "tensor_par_comm_type",
        "tensor_par_overlap",
        "structure_type",
    ],
)
def test_a_code_that_means_nothing_is_refused(name: str) -> None:
    """Rows of an array are not checked one by one, and codes are places in tables."""
    rows = pack_executions([EXECUTION_DOCUMENT] * 2)
    rows[name][1] = 200

    found = evaluate_many(APPLICATION, rows, SYSTEM)

    assert found["ok"].tolist() == [True, False]
    assert found["reason"][1] == "a code is none of its field's"


def test_a_switch_is_off_or_on() -> None:
    """Columns of switches hold 0 and 1."""
    columns = {name: [value] for name, value in EXECUTION_DOCUMENT.items()}
    with pytest.raises(InputError, match=r"fused_activation: the value is 7, .* from 0 to 1"):
        evaluate_many(APPLICATION, columns | {"fused_activation": [7]}, SYSTEM)


def test_degrees_whose_product_wraps_are_refused() -> None:
    """Their product is 2^64 + 4."""
    degrees = {"tensor_par": 769_546, "pipeline_par": 494_770, "data_par": 48_448_661}
    execution = EXECUTION_DOCUMENT | degrees | {"num_procs": 4}

    (found,) = evaluate_many(APPLICATION, [execution], roomy())

    assert found["reason"] == "tensor * pipeline * data parallelism != num_procs"
    with pytest.raises(InfeasibleExecution, match="parallelism != num_procs"):
        evaluate(APPLICATION, execution, roomy())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensors_of_more_than_two_to_the_63_elements(recompute: str) -> None:
    """The engine counts elements as the oracle does, whose integers have no end."""
    change = {"attention_type": "flash", "microbatch_size": 256, "batch_size": 1024}
    execution = EXECUTION_DOCUMENT | change | {"activation_recompute": recompute}

    assert both(APPLICATION | LARGE, execution, roomy(), CORRECT)
    found = evaluate(APPLICATION | LARGE, execution, roomy())
    assert found["block_fw_pp_size"] == 2**28 * 256 * 2**27 * 2 > 2**63
    assert found["total_time"] > 0


@pytest.mark.parametrize("threads", [0, -1, 1025, 10**9, 1.5, True])
def test_threads_that_no_machine_starts(threads: Any) -> None:
    """One sentence, whatever is priced."""
    with pytest.raises(InputError, match=r"threads: the value is .*, expected 1 to 1024"):
        evaluate_many(APPLICATION, [EXECUTION_DOCUMENT], SYSTEM, threads=threads)
    with pytest.raises(InputError, match=r"threads: the value is .*, expected 1 to 1024"):
        explore(APPLICATION, SYSTEM, Space(num_procs=8, max_batch=8), threads=threads)


def test_more_threads_than_executions() -> None:
    """Nothing is priced twice or left out."""
    found = evaluate_many(APPLICATION, [EXECUTION_DOCUMENT] * 1000, SYSTEM, threads=1024)
    assert found["ok"].all()


def test_no_executions() -> None:
    """None in, none out, in every form."""
    for nothing in ([], np.zeros(0, dtype=EXECUTION), {name: [] for name in EXECUTION.names or ()}):
        assert evaluate_many(APPLICATION, nothing, SYSTEM, threads=3).shape == (0,)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("batch_size", 10**400, "batch_size"),
        ("num_procs", 2**31, "num_procs"),
        ("tensor_par_net", 2**31, "tensor_par_net"),
    ],
)
def test_numbers_that_no_execution_has(key: str, value: int, sentence: str) -> None:
    """Both models take the same numbers."""
    for price in (evaluate, lambda a, x, s: evaluate_many(a, [x], s)):
        with pytest.raises(InputError, match=sentence):
            price(APPLICATION, {**EXECUTION_DOCUMENT, key: value}, SYSTEM)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("matrix", "float16", "tflops"), 1e308),
        (("mem1", "GBps"), 1e-300),
        (("mem1", "GiB"), float("inf")),
        (("mem2", "GBps"), float("nan")),
        (("networks", 0, "latency"), 1e300),
        (("networks", 0, "ops", "all_reduce"), [1.0, -3]),
    ],
)
def test_numbers_that_no_system_has(keys: tuple[Any, ...], value: object) -> None:
    """They would make times infinite, not a number or negative."""
    system = copy.deepcopy(SYSTEM)
    place: Any = system
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value

    with pytest.raises(InputError, match=str(keys[-1])):
        evaluate(APPLICATION, EXECUTION_DOCUMENT, system)


@pytest.mark.whole
@pytest.mark.parametrize("duplicates", [True, False])
@pytest.mark.parametrize("objective", ["rate", "time", "memory"])
def test_a_long_list_of_the_best_is_sorted_and_whole(objective: Any, duplicates: bool) -> None:
    """Against all executions that can run; the same by two callers with threads at once."""
    space = Space(num_procs=16, max_batch=16)
    scores: list[tuple[float, float]] = []

    def collect(executions: Any, outcomes: Any) -> None:
        time_s, size = outcomes["total_time_s"], outcomes["tier1_bytes"]
        first = {"time": time_s, "rate": time_s / executions["batch_size"], "memory": size}
        second = {"time": size, "rate": size, "memory": first["rate"]}
        scores.extend(zip(first[objective].tolist(), second[objective].tolist(), strict=True))

    def best(threads: int) -> Any:
        return explore(
            APPLICATION,
            SYSTEM,
            space,
            top=700,
            objective=objective,
            duplicates=duplicates,
            threads=threads,
        ).best

    explore(APPLICATION, SYSTEM, space, each=collect)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(best, [1, 3])

    assert one == two
    assert len(one) == 700
    name = {"time": "time_s", "memory": "memory_bytes"}.get(objective)
    found = [getattr(x, name) if name else x.time_s / 16 for x in one]
    assert found == sorted(found)
    if duplicates:
        assert found == [first for first, _ in sorted(scores)[:700]]
    else:
        keys = {(x.time_s, x.memory_bytes, x.second_bytes, *_shape(x.execution)) for x in one}
        assert len(keys) == 700


def _shape(execution: dict[str, Any]) -> tuple[Any, ...]:
    names = ("tensor_par", "pipeline_par", "pipeline_interleaving", "microbatch_size")
    return tuple(execution[name] for name in (*names, "activation_recompute"))


@pytest.mark.parametrize(
    ("change", "waiting"),
    [
        ({}, 1),  # the first stage holds two microbatches, the last one
        ({"pipeline_interleaving": 5}, 2 * (1 + 1 / 10) - (4 * 2 + 1) / 5),
        ({"activations_offload": True}, 0),
        ({"batch_size": 2}, 0),  # one microbatch
    ],
)
def test_logits_are_on_the_last_stage(change: dict[str, Any], waiting: float) -> None:
    """Where fewer activations wait, so that only what exceeds them counts."""
    application = APPLICATION | {"vocab_size": 512_000}
    execution = EXECUTION_DOCUMENT | {"attention_type": "flash"} | change

    found = evaluate(application, execution, SYSTEM)

    rows = 512_000 // 8
    table = rows * 2048 * (2 + 4 + 12)
    logits = 2 * 1024 * rows * (2 + 4)
    fewer = waiting * 5 * found["block_act_storage_space"]
    assert found["outer_space"] == pytest.approx(table + max(0.0, logits - fewer))
    assert both(application, execution, SYSTEM, CORRECT)
