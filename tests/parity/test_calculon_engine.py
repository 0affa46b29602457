"""The compiled Calculon engine against a model in plain Python, defect by defect."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import to_builtins

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution, InputError
from search.closed_form import native
from search.closed_form.calculon import (
    COMPAT,
    CORRECT,
    EXECUTION,
    Application,
    Execution,
    Quirks,
    System,
    evaluate,
    evaluate_many,
)
from search.closed_form.calculon.documents import CHOICES
from search.closed_form.calculon.engine import (
    LAYER_FIGURES,
    REASONS,
    STATISTICS,
    open_model,
    pack_executions,
    refusal,
    unpack_execution,
)
from tests.oracles import calculon as oracle

APPLICATION = {
    "hidden": 2048,
    "feedforward": 8192,
    "seq_size": 1024,
    "attn_heads": 16,
    "attn_size": 128,
    "num_blocks": 10,
}
CURVE = [[100, 0.9], [1, 0.6], [0, 0.1]]
ENGINE = {"float16": {"tflops": 200, "gflops_efficiency": CURVE}}
SYSTEM: dict[str, Any] = {
    "matrix": ENGINE,
    "vector": {"float16": {"tflops": 50, "gflops_efficiency": CURVE}},
    "mem1": {"GiB": 60, "GBps": 1500, "MB_efficiency": CURVE},
    "mem2": {"GiB": 200, "GBps": 40, "MB_efficiency": CURVE},
    "processing_mode": "no_overlap",
    "networks": [
        {
            "bandwidth": 250,
            "efficiency": 0.7,
            "size": 8,
            "latency": 1e-5,
            "ops": {
                "p2p": [1.0, None],
                "reduce_scatter": [1.5, -1],
                "all_gather": [1.5, -1],
                "all_reduce": [2.0, -1],
            },
            "must_be_filled": True,
            "processor_usage": 0.15,
        },
        {
            "bandwidth": 20,
            "efficiency": 0.9,
            "size": 4096,
            "latency": 2e-5,
            "ops": {
                "p2p": [1.0, None],
                "reduce_scatter": [1.0, 0],
                "all_gather": [1.0, 0],
                "all_reduce": [1.0, 0],
            },
            "must_be_filled": False,
            "processor_usage": 0.02,
        },
    ],
}
EXECUTION_DOCUMENT: dict[str, Any] = {
    "num_procs": 16,
    "tensor_par": 8,
    "pipeline_par": 2,
    "data_par": 1,
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": 1,
    "batch_size": 16,
    "microbatch_size": 2,
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "multihead",
    "activation_recompute": "none",
    "pipeline_interleaving": 1,
    "optimizer_sharding": False,
    "tensor_par_comm_type": "ar",
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": False,
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}


def random_point(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return an application, an execution and a system; most are feasible."""
    application = APPLICATION | {"num_blocks": rng.choice([10, 11, 12])}
    if rng.random() < 0.5:
        application |= {"vocab_size": 32000, "tied_embeddings": rng.random() < 0.5}
    if rng.random() < 0.5:
        application |= {"attn_kv_heads": rng.choice([1, 2, 4, 8])}
    system = SYSTEM | {"processing_mode": rng.choice(["no_overlap", "roofline"])}
    t, p, d = rng.choice([(8, 2, 1), (8, 1, 4), (4, 2, 2), (1, 3, 2), (2, 4, 4), (8, 2, 3)])
    training = rng.random() < 0.9
    comm = rng.choice(["ar", "p2p_rs_ag", "rs_ag"])
    recompute = rng.choice(["none", "attn_only", "full"]) if training else "none"
    per_rank = rng.choice([4, 6, 8])
    execution = EXECUTION_DOCUMENT | {
        "num_procs": t * p * d,
        "tensor_par": t,
        "pipeline_par": p,
        "data_par": d,
        "tensor_par_net": rng.choice([0, 1]),
        "pipeline_par_net": rng.choice([0, 1, 1]),
        "data_par_net": rng.choice([0, 1, 1]),
        "batch_size": d * per_rank,
        "microbatch_size": rng.choice([1, 2]),
        "fused_activation": rng.random() < 0.5,
        "attention_type": rng.choice(["multihead", "multiquery", "flash"]),
        "structure_type": rng.choice(["gpt", "llama"]),
        "activation_recompute": recompute,
        "pipeline_interleaving": rng.choice([1, 1, 2, 5]) if p > 1 else 1,
        "optimizer_sharding": d > 1 and rng.random() < 0.5,
        "tensor_par_comm_type": comm,
        "tensor_par_overlap": rng.choice(["none", "ring", "pipe"]) if t > 1 else "none",
        "seq_par_ag_redo": comm == "rs_ag" and recompute != "full" and rng.random() < 0.5,
        "data_par_overlap": d > 1 and training and rng.random() < 0.5,
        "weight_offload": rng.random() < 0.2,
        "activations_offload": rng.random() < 0.2,
        "optimizer_offload": training and rng.random() < 0.2,
        "training": training,
    }
    return application, execution, system


def both(
    application: dict[str, Any],
    execution: dict[str, Any],
    system: dict[str, Any],
    compat: bool | Quirks,
) -> bool:
    """Compare engine and oracle in everything they say; return whether the execution runs."""
    given = (application, execution, system)
    expected = answer(oracle.evaluate, *given, compat=compat)
    found = answer(evaluate, *given, compat=compat)
    if isinstance(expected, tuple) or isinstance(found, tuple):
        assert found == expected
        return False
    rows, expected_rows = found.pop("layers"), expected.pop("layers")
    same(found, expected)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row.pop("name") == expected_row.pop("name")
        same(row, expected_row)
    (outcome,) = evaluate_many(application, [execution], system, compat=compat)
    assert outcome["ok"]
    assert outcome["total_time_s"] == found["total_time"]
    assert outcome["tier1_bytes"] == found["proc_mem_tier1_cap_req"]
    assert outcome["tier2_bytes"] == found["proc_mem_tier2_cap_req"]
    assert outcome["sample_rate_per_s"] == found["sample_rate"]
    return True


def answer(
    price: Callable[..., dict[str, Any]], *given: dict[str, Any], compat: bool | Quirks
) -> dict[str, Any] | tuple[str, str]:
    """Return what a model says: statistics and operations, or the reason and its kind."""
    try:
        return price(*given, compat=compat, layers=True)
    except InfeasibleExecution as error:
        return error.reason, error.kind


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Assert that all names are there in their order, and every figure to 12 digits."""

    def close(one: float | None, other: float | None) -> bool:
        if one is None or other is None:
            return one is other
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-30)

    assert list(found) == list(expected)
    assert not {
        name: (value, expected[name])
        for name, value in found.items()
        if not close(value, expected[name])
    }


@pytest.mark.whole
def test_random_executions_without_defects() -> None:
    """Flash, grouped queries, gates and vocabularies included."""
    rng = random.Random(1)
    assert sum(both(*random_point(rng), CORRECT) for _ in range(400)) > 100


@pytest.mark.whole
def test_random_executions_with_random_defects() -> None:
    """Any subset of the defects."""
    rng = random.Random(2)
    names = list(Quirks.meanings)
    ran = 0
    for _ in range(400):
        quirks = Quirks(**{name: rng.random() < 0.4 for name in names})
        ran += both(*random_point(rng), quirks)
    assert ran > 100


def test_random_executions_of_the_published_model() -> None:
    """All defects, without what the published model lacks."""
    rng = random.Random(5)
    assert sum(both(*random_point(rng), True) for _ in range(200)) > 30
    assert sum(both(*random_point(rng), COMPAT) for _ in range(100)) > 30


def spoil(
    rng: random.Random,
    application: dict[str, Any],
    execution: dict[str, Any],
    system: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the same with one to three fields at random, most of which cannot run."""
    for name in rng.choices(list(execution), k=rng.choice([1, 1, 1, 2, 3])):
        if name in CHOICES:
            execution[name] = rng.choice([*CHOICES[name], "other"])
        elif isinstance(execution[name], bool):
            execution[name] = not execution[name]
        else:
            execution[name] = rng.choice(
                [-(10**30), -1, 0, 1, 2, 3, 4, 6, 8, 16, 30, 64, 2**31 - 1]
            )
        if name.endswith("_net"):
            execution[name] = abs(execution[name]) % 2**31
    if rng.random() < 0.3:
        names = ("hidden", "feedforward", "attn_heads", "attn_kv_heads", "num_blocks", "seq_size")
        application[rng.choice(names)] = rng.choice([1, 2, 3, 7, 12, 30, 33, 100, 1000, 1023])
    if rng.random() < 0.1:  # three heads of keys cannot be shared by four or eight processors
        application |= {"attn_heads": 24, "attn_kv_heads": 3}
    if rng.random() < 0.2:
        system = json.loads(json.dumps(system))
        system["mem1"]["GiB"] = rng.choice([0, 1e-6, 1e-3, 1, 3, 1e10])
        system["mem2"]["GiB"] = rng.choice([0, 0, 1, 20])
    return application, execution, system


@pytest.mark.whole
def test_every_refusal_has_the_same_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several contradictions the same one, with its figures; every reason is met."""
    rng = random.Random(7)
    codes = set()

    def seen(code: int, *given: Any, **more: Any) -> InfeasibleExecution:
        codes.add(code)
        return refusal(code, *given, **more)

    monkeypatch.setattr("search.closed_form.calculon.engine.refusal", seen)
    kinds: list[bool | Quirks] = [
        False,
        True,
        CORRECT,
        Quirks(divisor_fills_tier=True),
        Quirks(unknown_datatype_ends_search=True),
    ]
    for _ in range(1500):
        both(*spoil(rng, *random_point(rng)), rng.choice(kinds))
    assert codes == set(range(1, len(REASONS)))


def test_names_of_figures_are_the_published_ones() -> None:
    """No name is empty or twice; three statistics belong to a vocabulary."""
    for names, number in ((STATISTICS, 96 + 3), (LAYER_FIGURES, 47)):
        assert len(set(names)) == len(names) == number
        assert all(names)
    found = evaluate(APPLICATION, EXECUTION_DOCUMENT, SYSTEM, layers=True)
    assert tuple(found) == (*STATISTICS[:96], "layers")
    application = APPLICATION | {"vocab_size": 100}
    assert tuple(evaluate(application, EXECUTION_DOCUMENT, SYSTEM)) == STATISTICS
    assert list(found["layers"][0]) == ["name", *LAYER_FIGURES]
    figures = [*found["layers"][0].values(), *found.values()]
    assert {type(figure) for figure in figures} == {str, float, list}


def test_the_engine_prices_one_execution_at_a_time() -> None:
    """Tables of operations are of one execution, and of one that runs."""
    model = open_model(
        load_document(Application, APPLICATION), load_document(System, SYSTEM), compat=False
    )
    rows = pack_executions([EXECUTION_DOCUMENT] * 2)
    for price in (model.layers, model.refusing_tier):
        with pytest.raises(ValueError, match="expected one execution"):
            price(rows)
    with pytest.raises(ValueError, match="the execution cannot run"):
        model.layers(np.zeros(1, dtype=EXECUTION))


def test_every_reason_has_a_sentence() -> None:
    """The table of sentences is as long as that of the codes."""
    assert len(REASONS) == native.calculon.NUM_REASONS
    assert len(set(REASONS)) == len(REASONS)


def test_executions_in_any_form_and_number_of_threads() -> None:
    """Documents, columns and packed rows are the same; so are answers of several threads."""
    rng = random.Random(3)
    documents = [random_point(rng)[1] for _ in range(200)]
    packed = pack_executions(documents)
    assert [unpack_execution(row) for row in packed] == [
        to_builtins(Execution(**document)) for document in documents
    ]
    columns = {name: [x.get(name, "gpt") for x in documents] for name in EXECUTION.names or ()}
    assert (pack_executions(columns) == packed).all()
    one = evaluate_many(APPLICATION, packed, SYSTEM)
    for threads in (2, 7):
        again = evaluate_many(APPLICATION, documents, SYSTEM, threads=threads)
        assert (again == one).all()
    assert one["ok"].any()
    assert all(one["reason"][~one["ok"]])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensor_par": [-1]}, r"executions\.tensor_par: the value is -1, expected integers"),
        ({"attention_type": ["linear"]}, r"executions\.attention_type: the value is 'linear'"),
        ({"tensor_parr": [1]}, "executions\\.tensor_parr"),
        ({"batch_size": [16, 16]}, "columns have lengths"),
        ({"batch_size": [1.5]}, r"executions\.batch_size: the value is 1\.5"),
    ],
)
def test_unusable_columns(change: dict[str, Any], sentence: str) -> None:
    """One sentence with the field."""
    columns = {name: [value] * 3 for name, value in EXECUTION_DOCUMENT.items()} | change
    with pytest.raises(InputError, match=sentence):
        evaluate_many(APPLICATION, columns, SYSTEM)


def test_arrays_that_were_joined_are_executions_still() -> None:
    """Joining arrays drops the padding at the end of a row, and nothing else."""
    packed = pack_executions([EXECUTION_DOCUMENT])
    joined = np.concatenate([packed, packed])
    assert joined.dtype.itemsize < EXECUTION.itemsize

    found = evaluate_many(APPLICATION, joined, SYSTEM)

    assert found["ok"].all()
    assert (
        found["total_time_s"] == evaluate_many(APPLICATION, packed, SYSTEM)[0]["total_time_s"]
    ).all()
    with pytest.raises(InputError, match="the array has fields"):
        evaluate_many(APPLICATION, joined[["num_procs"]], SYSTEM)


def test_missing_columns() -> None:
    """A column without a default is named."""
    columns = {name: [value] for name, value in EXECUTION_DOCUMENT.items() if name != "data_par"}
    with pytest.raises(InputError, match=r"executions\.data_par: this key is missing"):
        evaluate_many(APPLICATION, columns, SYSTEM)
    with pytest.raises(InputError, match="threads"):
        evaluate_many(APPLICATION, np.zeros(0, dtype=EXECUTION), SYSTEM, threads=0)
