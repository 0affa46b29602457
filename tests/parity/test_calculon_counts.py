"""Blocks of the default Calculon model beside what the profiler counted in a real block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from search.closed_form.calculon import evaluate
from search.closed_form.files import load_application
from tests.parity.test_calculon_engine import EXECUTION_DOCUMENT
from tests.parity.test_calculon_extremes import roomy

ROOT = Path(__file__).parents[2]
COUNTED: dict[str, Any] = json.loads(
    (ROOT / "models/llama2-7b/configs/memory_profiling_bf16_hidden_4096_head_32.json").read_text()
)
LLAMA = {
    "pipeline_par": 1,
    "attention_type": "flash",
    "structure_type": "llama",
    "fused_activation": False,
    "batch_size": 1,
    "microbatch_size": 1,
}
MIB = 2**20


@pytest.mark.parametrize(
    ("tensor", "change"),
    [(1, {}), (8, {"tensor_par_comm_type": "rs_ag", "seq_par_ag_redo": True})],
)
def test_activations_of_a_llama_block(tensor: int, change: dict[str, Any]) -> None:
    """The same but for SiLU's output, which a fused gate saves, and norms' statistics."""
    application = load_application("llama2-7b").application
    execution = EXECUTION_DOCUMENT | LLAMA | change | {"tensor_par": tensor, "num_procs": tensor}
    system = roomy()
    system["networks"][0]["must_be_filled"] = False

    found = evaluate(application, execution, system)

    tokens = 4096
    silu, statistics = 2 * application.feedforward * tokens, 2 * 4 * tokens
    counted = COUNTED["layertype_0_sp"]["4096"]["tp_activation_per_bsz_dict"]
    expected = counted[str(tensor)] * MIB - (silu + statistics) / tensor
    assert found["block_act_storage_space"] == pytest.approx(expected, rel=1e-9)


def test_weights_and_checkpoint_of_a_llama_block() -> None:
    """Parameters to the last one, and the input that a recomputed block keeps."""
    application = load_application("llama2-7b").application
    change = {"tensor_par": 1, "num_procs": 1, "activation_recompute": "full"}
    system = roomy()
    system["networks"][0]["must_be_filled"] = False

    found = evaluate(application, EXECUTION_DOCUMENT | LLAMA | change, system)

    layer = COUNTED["layertype_0_sp"]["4096"]
    assert found["block_weight_space"] / 2 * 4 == layer["parameter_size"] * MIB
    assert found["block_act_checkpoint_size"] == (
        layer["tp_activation_per_bsz_dict"]["checkpoint"] * MIB
    )
    states = ("block_weight_space", "block_weight_grad_space", "block_optimizer_space")
    assert sum(found[name] for name in states) == 18 * found["block_weight_space"] / 2
