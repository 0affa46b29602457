"""Megatron-LM arguments of others as plans: what is read, noted and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import DocumentError
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.engines.megatron.plan import import_megatron
from search.engines.text import Configuration, read_configuration

BASE = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "micro_batch_size": 2,
    "global_batch_size": 64,
    "bf16": True,
    "overlap_grad_reduce": True,
    "sequence_parallel": True,
}


def imported(**change: object) -> tuple[Plan, tuple[str, ...]]:
    """Return plan and notes of a JSON object of arguments on 16 GPUs."""
    document = {k: v for k, v in {**BASE, **change}.items() if v is not None}
    source = Configuration(path=Path("args.json"), flags=None, document=document)
    result = import_megatron(source, world_size=16)
    return result.plan, result.notes


def test_arguments_become_a_plan() -> None:
    """Degrees, even stages, batch; nothing to say where pricing assumes the same."""
    plan, notes = imported()

    assert plan.layers == (LayerStrategy(tp=2),) * 8
    assert plan.vocab == VocabStrategy(tp=2)
    assert (plan.num_stages, plan.stage_sizes) == (2, (4, 4))
    assert (plan.global_batch, plan.num_microbatches) == (64, 8)
    assert (plan.pipeline_type, plan.default_dp_type) == ("1f1b", "ddp")
    assert notes == ()


@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        ({"decoder_first_pipeline_num_layers": 3}, (3, 5)),
        ({"decoder_last_pipeline_num_layers": 3}, (5, 3)),
        ({"pipeline_model_parallel_layout": "Et*2|t*6L"}, (2, 6)),
        (
            {"num_layers": 7, "account_for_embedding_in_pipeline_split": True},
            (3, 4),
        ),
        ({"num_layers": 7, "account_for_loss_in_pipeline_split": True}, (4, 3)),
        ({"num_layers_per_virtual_pipeline_stage": 4}, (4, 4)),
    ],
)
def test_stages(change: dict[str, object], sizes: tuple[int, ...]) -> None:
    """Every way to say how many layers a stage has."""
    assert imported(**change)[0].stage_sizes == sizes


@pytest.mark.parametrize(
    ("change", "zero3", "default"),
    [
        ({"use_distributed_optimizer": True}, False, "zero1"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim"},
            False,
            "zero1",
        ),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard"}, False, "ddp"),
        ({"use_megatron_fsdp": True}, True, "ddp"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            False,
            "zero2",
        ),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            True,
            "ddp",
        ),
        ({"use_torch_fsdp2": True}, True, "ddp"),
        (
            {"use_torch_fsdp2": True, "torch_fsdp2_no_reshard_after_forward": True},
            False,
            "zero2",
        ),
    ],
)
def test_data_types(change: dict[str, object], zero3: bool, default: str) -> None:
    """Every way to shard states, gradients and parameters."""
    plan, _ = imported(**change)

    assert {s.zero3 for s in plan.layers} | {plan.vocab.zero3} == {zero3}
    assert plan.default_dp_type == default


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"sequence_parallel": False}, "--no-sequence-parallel"),
        ({"bf16": None}, "--mixed-precision fp32"),
        ({"bf16": None, "fp16": True}, "--mixed-precision fp16 --no-fp32-gradients"),
        ({"grad_reduce_in_bf16": True}, "--no-fp32-gradients"),
        ({"overlap_grad_reduce": False}, "overlap"),
        ({"recompute_granularity": "selective"}, "selective"),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 4,
            },
            "units of 4 layers",
        ),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"},
            "--no-async-grad-reduce",
        ),
    ],
)
def test_what_pricing_must_know_is_said(change: dict[str, object], note: str) -> None:
    """One note each."""
    notes = imported(**change)[1]

    assert len(notes) == 1
    assert note in notes[0]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size"),
        ({"num_layers_per_virtual_pipeline_stage": 2}, "--num-layers-per-virtual-pipeline-stage"),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank"),
        ({"pipeline_model_parallel_layout": "Et*9|tL"}, "--pipeline-model-parallel-layout"),
        ({"pipeline_model_parallel_layout": "Et|tt|tt|t*3L"}, "--pipeline-model-parallel-layout"),
        ({"pipeline_model_parallel_layout": "E|t*8L"}, "--pipeline-model-parallel-layout"),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "--recompute-num-layers",
        ),
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size"),
        ({"tensor_model_parallel_size": "$TP"}, "--tensor-model-parallel-size"),
        ({"global_batch_size": 60}, "--global-batch-size"),
        ({"num_layers": 7}, "--pipeline-model-parallel-size"),
        ({"num_layers": None}, "--num-layers"),
        ({"micro_batch_size": None}, "--micro-batch-size"),
        ({"context_parallel_size": 2, "cp_comm_type": ["a2a"]}, "--cp-comm-type"),
        ({"context_parallel_size": 2, "cp_comm_type": ["ring"]}, "--cp-comm-type"),
        ({"context_parallel_size": 2, "cp_comm_type": ["p2p", "p2p"]}, "--cp-comm-type"),
        (
            {
                "tensor_model_parallel_size": 1,
                "context_parallel_size": 4,
                "cp_comm_type": ["a2a+p2p"],
            },
            "--hierarchical-context-parallel-sizes",
        ),
        ({"recompute_granularity": "some"}, "--recompute-granularity"),
        ({"recompute_granularity": "full"}, "--recompute-method"),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "all"},
            "--data-parallel-sharding-strategy",
        ),
    ],
)
def test_what_no_plan_says_is_refused(change: dict[str, object], key: str) -> None:
    """The error names the flag."""
    with pytest.raises(DocumentError) as caught:
        imported(**change)

    assert caught.value.key == key


def test_published_script_is_read(tmp_path: Path) -> None:
    """In the manner of examples/llama/train_llama3_8b_h100_fp8.sh: arrays, sums, conditions."""
    script = tmp_path / "train.sh"
    script.write_text(
        """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
DATA_ARG=${4:-"MOCK"}     # Data prefix, or "MOCK"
mkdir -p "$(dirname "$DATA_ARG")"
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DTYPE="fp8"
TP_SIZE=2
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=$((WORLD_SIZE * 8))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096   # a ) in a comment
    --group-query-attention
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size $GLOBAL_BATCH_SIZE
    --bf16
    --grad-reduce-in-bf16
)
if [[ "$DTYPE" == "fp8" ]]; then
    TRAINING_ARGS+=(
        "--fp8-format hybrid"
    )
fi
if [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS=("--mock-data")
else
    DATA_ARGS=("--data-path $DATA_ARG" --sequence-parallel=no)
fi
if [ ! -f "pretrain_gpt.py" ]; then
    echo "no program"
    exit 1
fi
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP_SIZE
    # --pipeline-model-parallel-size 4
    --sequence-parallel  # Always
)
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
torchrun ${DISTRIBUTED_ARGS[@]} \\
    "pretrain_gpt.py" \\
    ${MODEL_ARGS[@]} \\
    ${TRAINING_ARGS[@]} \\
    ${MODEL_PARALLEL_ARGS[@]} ${DATA_ARGS[@]}
""",
        encoding="utf-8",
    )

    result = import_megatron(read_configuration(script))

    plan = result.plan
    assert (plan.world_size, plan.global_batch, plan.num_microbatches) == (16, 128, 16)
    assert plan.layers == (LayerStrategy(tp=2),) * 32
    assert plan.default_dp_type == "zero1"
    assert result.notes == ("--grad-reduce-in-bf16: price it with --no-fp32-gradients",)
