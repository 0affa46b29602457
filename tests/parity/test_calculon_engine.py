"""The compiled Calculon engine against the readable model, defect by defect."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from autopar.errors import InfeasibleExecution, InputError
from search.closed_form import native
from search.closed_form.calculon import (
    CORRECT,
    EXECUTION,
    Application,
    Execution,
    Quirks,
    System,
    evaluate,
    evaluate_many,
)
from search.closed_form.calculon.engine import (
    REASONS,
    native_model,
    pack_executions,
    unpack_execution,
)
from search.closed_form.files import load_document

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
    application: dict[str, Any], execution: dict[str, Any], system: dict[str, Any], quirks: Quirks
) -> bool:
    """Compare both models; return whether the execution runs."""
    model = native_model(
        load_document(Application, application),
        load_document(System, system),
        quirks,
        published=False,
    )
    outcomes, rows = model.evaluate_many(pack_executions([execution]), 1, True)
    try:
        expected = evaluate(application, execution, system, compat=quirks)
    except InfeasibleExecution:
        expected = {}
    assert bool(outcomes["ok"][0]) == bool(expected), REASONS[outcomes["reason"][0]]
    assert bool(outcomes["reason"][0]) != bool(expected)
    if not expected:
        return False
    wrong = {
        name: (value, row)
        for (name, value), row in zip(expected.items(), rows[0], strict=False)
        if value is not None and value != pytest.approx(row, rel=1e-9, abs=1e-30)
    }
    assert not wrong
    assert outcomes["total_time_s"][0] == pytest.approx(expected["total_time"], rel=1e-12)
    assert outcomes["tier1_bytes"][0] == pytest.approx(expected["proc_mem_tier1_cap_req"])
    return True


def test_random_executions_without_defects() -> None:
    """Flash, grouped queries, gates and vocabularies included."""
    rng = random.Random(1)
    assert sum(both(*random_point(rng), CORRECT) for _ in range(400)) > 100


def test_random_executions_with_random_defects() -> None:
    """Any subset of the defects."""
    rng = random.Random(2)
    names = [f.name for f in fields(Quirks)]
    ran = 0
    for _ in range(400):
        quirks = Quirks(**{name: rng.random() < 0.4 for name in names})
        ran += both(*random_point(rng), quirks)
    assert ran > 100


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
        Execution(**document).model_dump() for document in documents
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
        ({"tensor_parr": [1]}, r"executions\.tensor_parr: is unknown"),
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
    with pytest.raises(InputError, match=r"executions\.data_par: is missing"):
        evaluate_many(APPLICATION, columns, SYSTEM)
    with pytest.raises(InputError, match="threads"):
        evaluate_many(APPLICATION, np.zeros(0, dtype=EXECUTION), SYSTEM, threads=0)
