"""Launch files in the shapes that repositories have, each with the fields of its row.

All shapes with the fields of `JOB` describe one run, a Llama of 16 layers on 8 GPUs, and must have
one price. `benchmarks.corpus` makes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["JOB", "SHAPES", "Shape"]

JOB: Mapping[str, Any] = {
    "status": "read",
    "engine": "Megatron-LM",
    "degrees": {"pp": 2, "tp": 2, "cp": 1, "ep": 1, "dp": 2},
    "batch": 64,
}
"""Fields of the one run."""
_LAYERS = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8"
)
_BLOCK = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--vocab-size 128256"
)
_LENGTH = "--seq-length 4096 --max-position-embeddings 4096"
_TRAIN = "--lr 1e-4 --train-iters 10 --bf16 --use-distributed-optimizer"
_BATCH = "--micro-batch-size 1 --global-batch-size 64"
_GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
_REST = f"{_BLOCK} {_LENGTH} {_TRAIN} {_BATCH} {_GRID}"
_EXPORT = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
_RUN = "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py"
_DENSE = {"pp": 1, "tp": 1, "cp": 1, "ep": 1}
_ASKS = ("gpus", "model")


class Shape(NamedTuple):
    """A file and what must be read from it."""

    name: str
    text: str
    row: Mapping[str, Any]
    """Fields of the row; `ids` are some of its ids."""
    beside: Mapping[str, str] = {}
    """Other files of the same folder, by name."""


_SCRIPTS = (
    Shape("one_line.sh", f"{_EXPORT}\n{_RUN} {_LAYERS} {_REST}\n", JOB),
    Shape(
        "arrays.sh",
        f"""#!/bin/bash
{_EXPORT}
GPUS=8
NODES=1
LAUNCH_ARGS=(
    --nproc_per_node $GPUS   # all of the node
    --nnodes $NODES
)
SHAPE_ARGS=( {_LAYERS}
    # --num-layers 80
    {_BLOCK} )
FIT_ARGS=( {_LENGTH} {_TRAIN} {_BATCH} )
torchrun ${{LAUNCH_ARGS[@]}} pretrain_gpt.py ${{SHAPE_ARGS[@]}} ${{FIT_ARGS[@]}} {_GRID}
""",
        JOB,
    ),
    Shape(
        "elements_of_two_words.sh",
        f"""{_EXPORT}
DATA=()
if [[ -z "$TOKENS" ]]; then
    DATA+=("--mock-data" "--vocab-size 128256" "--split '99,1,0'" "--num-workers 1")
fi
MORE=("--seq-length 4096" "--max-position-embeddings 4096" "--global-batch-size 64")
{_RUN} {_LAYERS} {_BLOCK} {_TRAIN} {_GRID} --micro-batch-size 1 ${{MORE[@]}} ${{DATA[@]}}
""",
        JOB,
    ),
    Shape(
        "continued_strings.sh",
        f"""{_EXPORT}
SIZES=" \\
    {_LAYERS} \\
    {_BLOCK} \\
"
FIT="\\
    {_LENGTH} {_BATCH} \\
    {_TRAIN} \\
"
{_RUN} $SIZES \\
    $FIT \\
    {_GRID}
""",
        JOB,
    ),
    Shape(
        "command_in_a_string.sh",
        f"""{_EXPORT}
options=" {_LAYERS} \\
    {_REST}"
command="torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py
 ${{options}}"
echo ${{command}}
eval ${{command}}
set +x
""",
        JOB,
    ),
    Shape(
        "dated_string.sh",
        f"""{_EXPORT}
NAME=run-$(date +%Y%m%d)
ARGS="{_LAYERS} --save out/$NAME --save-interval 9 --tensorboard-dir $PWD/logs {_REST}"
{_RUN} $ARGS
""",
        JOB,
    ),
    Shape(
        "sizes_by_case.sh",
        f"""{_EXPORT}
SCALE="1b"
case "${{SCALE}}" in
    "8b") LAYERS=32; HIDDEN=4096 ;;
    "1b") LAYERS=16; HIDDEN=2048 ;;
    *) echo "unknown"; exit 1 ;;
esac
{_RUN} --num-layers $LAYERS --hidden-size $HIDDEN --ffn-hidden-size $((HIDDEN * 4)) \\
    --num-attention-heads $((HIDDEN / 64)) --group-query-attention --num-query-groups 8 {_REST}
""",
        JOB,
    ),
    Shape(
        "options_by_test.sh",
        f"""{_EXPORT}
TP=2; PP=2; SP=true; CLIP=false
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" --sequence-parallel"
elif [ $SP = false ]; then
    sp_options=" "
fi
[[ $CLIP == true ]] && clip="--clip-grad 1.0"
{_RUN} {_LAYERS} {_BLOCK} {_LENGTH} {_TRAIN} {_BATCH} \\
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${{PP}} $sp_options $clip
""",
        JOB,
    ),
    Shape(
        "defaults.sh",
        f"""{_EXPORT}
: "${{BATCH:=64}}"
OUT=${{1:-"checkpoints/small"}}
LENGTH=${{LENGTH:-4096}}
mkdir -p "$(dirname "$OUT")"
{_RUN} {_LAYERS} {_BLOCK} {_TRAIN} {_GRID} --micro-batch-size ${{MICRO:-1}} \\
    --seq-length $LENGTH --max-position-embeddings $LENGTH --global-batch-size $BATCH \\
    --save "$OUT" --save-interval 500
""",
        JOB,
    ),
    Shape(
        "joined_values.sh",
        f"""{_EXPORT}
ARGS=({_LAYERS})
ARGS+=(--seq-length=4096 --max-position-embeddings=4096)
ARGS+=(--micro-batch-size=1 --global-batch-size=$((2 * 32)))
for word in bf16 use-distributed-optimizer sequence-parallel; do
    ARGS+=(--$word)
done
exec torchrun --standalone --nproc-per-node=8 pretrain_gpt.py "${{ARGS[@]}}" {_BLOCK} \\
    --tensor-model-parallel-size=2 --pipeline-model-parallel-size=2 --lr 1e-4 --train-iters 10
""",
        JOB,
    ),
    Shape(
        "module_launcher.sh",
        f"""cd Megatron-LM || exit 1
CUDA_DEVICE_MAX_CONNECTIONS=1 OMP_NUM_THREADS=4 python3 -u -m torch.distributed.run \\
    --nproc_per_node=8 --nnodes=1 --node_rank 0 pretrain_gpt.py {_LAYERS} {_REST} 2>&1 | tee log
""",
        JOB,
    ),
    Shape(
        "tasks.sbatch",
        f"""#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
{_EXPORT}
options="{_LAYERS} {_REST}"
srun -l --output=logs/%x_%j.log python -u pretrain_gpt.py ${{options}}
""",
        JOB,
    ),
    Shape(
        "one_task_a_node.slurm",
        f"""#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:8
{_EXPORT}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
declare -a LAUNCH=(--nproc_per_node=8 --nnodes=$SLURM_JOB_NUM_NODES --rdzv_endpoint=$HEAD:29500)
srun -l python -m torch.distributed.run "${{LAUNCH[@]}}" pretrain_gpt.py {_LAYERS} {_REST}
""",
        JOB,
    ),
    Shape(
        "here_document.sh",
        f"""{_EXPORT}
read -r -d '' OPTIONS <<EOF
    {_LAYERS}
    {_REST}
EOF
{_RUN} $OPTIONS
""",
        JOB,
    ),
    Shape(
        "guarded_program.sh",
        f"""set -euo pipefail
{_EXPORT}
SCRIPT=pretrain_gpt.py
if [ ! -f "$SCRIPT" ]; then
    echo "run this in the root"
    exit 1
fi
torchrun --nnodes 1 --nproc_per_node 8 "$SCRIPT" {_LAYERS} {_REST}
""",
        JOB,
    ),
)
"""Scripts of one run."""


def _lines(words: str, form: str, *, true: str) -> str:
    """Return the arguments of a text as lines of a document, a name and its value each.

    form : a line, with the fields `name` and `value`. true : value of an argument without one.
    """
    lines: list[str] = []
    for one in f" {words}".split(" --")[1:]:
        name, _, value = one.partition(" ")
        lines.append(form.format(name=name, value=value or true))
    return "\n".join(lines)


_ALL = f"{_LAYERS} {_REST}"
_DOCUMENTS = (
    Shape(
        "test_case.yaml",
        "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\nTEST_TYPE: regular\nMODEL_ARGS:\n"
        + _lines(_ALL, "  --{name}: {value}", true="true"),
        {**JOB, "assumed": ("gpus",)},
    ),
    Shape(
        "arguments.json",
        "{" + _lines(_ALL, '"{name}": "{value}",', true="").replace('""', "true")[:-1] + "}",
        {**JOB, "assumed": ("gpus",)},
    ),
)
_PROBLEMS = (
    Shape(
        "too_few_gpus.sh",
        f"{_RUN} {_LAYERS} {_REST} --tensor-model-parallel-size 8\n",
        {"status": "refused", "engine": "Megatron-LM", "gpus": 8, "ids": ("grid.dense",)},
    ),
    Shape(
        "experts.sh",
        f"{_EXPORT}\n{_RUN} {_LAYERS} {_BLOCK} {_LENGTH} {_TRAIN} {_BATCH} "
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall\n",
        {"status": "read", "degrees": _DENSE | {"ep": 4, "dp": 8}, "batch": 64},
    ),
    Shape(
        "unknown_parameter.sh",
        f"TP=$1\n{_RUN} {_LAYERS} {_REST} --tensor-model-parallel-size $TP\n",
        {"status": "refused", "step_s": None},
    ),
    Shape(
        "hybrid.sh",
        f"{_EXPORT}\n{_RUN} --hybrid-layer-pattern M-M*M-M* {_REST} --hidden-size 1024 "
        "--num-attention-heads 16\n",
        {"status": "read", "engine": "Megatron-LM", "batch": 64},
    ),
    Shape(
        "half_quoted.sh",
        f'{_RUN} {_LAYERS} --save "out {_REST}\n',
        {"status": "refused", "step_s": None},
    ),
)

_MACHINE = "compute_environment: LOCAL_MACHINE\nnum_machines: 1\nnum_processes: 8\nuse_cpu: false\n"
_HUGGING_FACE = (
    Shape(
        "fsdp.yaml",
        f"""{_MACHINE}distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
""",
        {
            "status": "read",
            "engine": "accelerate",
            "degrees": _DENSE | {"dp": 8},
            "assumed": ("model",),
        },
    ),
    Shape(
        "zero3.yaml",
        f"""{_MACHINE}distributed_type: DEEPSPEED
mixed_precision: bf16
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
""",
        {
            "status": "read",
            "engine": "accelerate",
            "degrees": _DENSE | {"dp": 8},
            "batch": 32,
            "assumed": ("model",),
        },
    ),
    Shape(
        "multi_gpu.yaml",
        f"{_MACHINE}distributed_type: MULTI_GPU\nmixed_precision: bf16\nmachine_rank: 0\n",
        {"status": "read", "degrees": _DENSE | {"dp": 8}, "batch": 8, "assumed": ("model",)},
    ),
    Shape(
        "context_parallel.yaml",
        f"""{_MACHINE}distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 4
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
  parallelism_config_tp_size: 1
""",
        {"status": "read", "degrees": _DENSE | {"cp": 2, "dp": 4}, "assumed": ("model",)},
    ),
    Shape(
        "zero2.json",
        """{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2,
 "gradient_accumulation_steps": 4, "gradient_clipping": 1.0,
 "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true}}
""",
        {"status": "read", "engine": "DeepSpeed", "batch": 64, "assumed": _ASKS},
    ),
    Shape(
        "implied_gpus.json",
        """{"fp16": {"enabled": true}, "train_batch_size": 128,
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
 "zero_optimization": {"stage": 1}}
""",
        {"status": "read", "engine": "DeepSpeed", "gpus": 16, "batch": 128},
    ),
    Shape(
        "auto.json",
        """{"bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto",
 "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
 "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
  "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}}
""",
        {"status": "refused", "engine": "DeepSpeed", "step_s": None},
    ),
    Shape(
        "one_bit.json",
        """{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1,
 "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-4, "freeze_step": 400}},
 "fp16": {"enabled": true}, "zero_optimization": {"stage": 1}}
""",
        {"status": "refused", "engine": "DeepSpeed", "ids": ("read.unpriced optimizer.type",)},
    ),
    Shape(
        "finetune.sh",
        """GPUS=2
OUTPUT=./tuned
deepspeed --num_gpus=$GPUS finetune.py \\
    --deepspeed ds.json \\
    --model_name_or_path meta-llama/Llama-2-7b-hf \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
    --model_max_length 2048 --bf16 True --gradient_checkpointing True --output_dir $OUTPUT
""",
        {"status": "read", "engine": "DeepSpeed", "gpus": 2, "batch": 16},
        {
            "ds.json": '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto",'
            ' "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}}'
        },
    ),
)


def _titan(parallelism: str, more: str = "") -> str:
    return f"""[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 4
seq_len = 8192
steps = 100

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
{parallelism}

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
{more}"""


_TITAN = (
    Shape(
        "sharded.toml",
        _titan("tensor_parallel_degree = 1"),
        {"status": "read", "degrees": _DENSE | {"dp": 8}, "batch": 32, "assumed": ("gpus",)},
    ),
    Shape(
        "tensor.toml",
        _titan("tensor_parallel_degree = 4", '[compile]\nenable = true\ncomponents = ["model"]\n'),
        {"status": "read", "degrees": _DENSE | {"tp": 4, "dp": 2}, "batch": 8},
    ),
    Shape(
        "pipeline.toml",
        _titan('pipeline_parallel_degree = 4\npipeline_parallel_schedule = "1F1B"'),
        {"status": "read", "degrees": _DENSE | {"pp": 4, "dp": 2}, "batch": 8},
    ),
    Shape(
        "sixty_four.toml",
        _titan("tensor_parallel_degree = 8\ncontext_parallel_degree = 8"),
        {"status": "read", "gpus": 64, "degrees": _DENSE | {"tp": 8, "cp": 8, "dp": 1}},
    ),
)
_NOTHING: Mapping[str, Any] = {"status": "not a launch", "step_s": None, "engine": ""}
_UNREAD: Mapping[str, Any] = {"step_s": None, "degrees": None}
_OTHERS = (
    Shape(
        "workflow.yml",
        "name: tests\non: [push]\njobs:\n  unit:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - run: torchrun --nproc_per_node 2 test.py\n",
        _NOTHING,
    ),
    Shape(
        "architecture.json",
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16}',
        _NOTHING,
    ),
    Shape("samples.json", '[{"instruction": "add", "input": "1 2", "output": "3"}]', _NOTHING),
    Shape("toctree.yml", "- title: Start\n  sections:\n    - local: index\n", _NOTHING),
    Shape("setup.sh", "set -e\npip install -r requirements.txt\nmkdir -p logs\n", _NOTHING),
    Shape(
        "swift.sh",
        "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B --tuner_type full --deepspeed zero2\n",
        _UNREAD,
    ),
    Shape(
        "tuner.yaml",
        "model_name_or_path: meta-llama/Llama-3.1-8B\nstage: sft\nfinetuning_type: full\n"
        "deepspeed: ds_z3.json\ncutoff_len: 2048\nper_device_train_batch_size: 1\n",
        _UNREAD,
    ),
    Shape(
        "reinforcement.sh",
        "set -x\npython3 -m verl.trainer.main_ppo data.train_batch_size=1024 \\\n"
        "    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.n_gpus_per_node=8\n",
        _UNREAD,
    ),
)
SHAPES: tuple[Shape, ...] = (
    *(_SCRIPTS + _DOCUMENTS),
    *(_PROBLEMS + _HUGGING_FACE + _TITAN + _OTHERS),
)
"""All files."""
