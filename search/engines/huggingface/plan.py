"""A plan as a configuration of accelerate 1.15: one YAML file for `accelerate launch`.

Keys: `accelerate/commands/config/config_args.py`, `commands/launch.py`, `parallelism_config.py` of
the wheel of 1.15.0. Replicas alone run as DDP, ZeRO as FSDP2, tensor parallelism by the model's own
plan (transformers), Ulysses by DeepSpeed. There is no pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, Plan
from search.engines.deepspeed.plan import zero_stage
from search.engines.engine import (
    MODEL_GRADIENTS,
    NODE_RANK,
    ONE_DEGREE,
    ONE_STAGE,
    REPLICAS,
    SCRIPT_NOTE,
    SCRIPT_WEIGHTS,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    UNIFORM,
    ZERO3,
    Job,
    Lowered,
    Nodes,
    Space,
    different,
    samples_of_a_rank,
    search_fields,
    shell_lines,
)
from search.engines.nearest import (
    DataMode,
    Reach,
    keeps_whole_sequences,
    kv_heads_problems,
    nearest,
    refuse_stages,
    summed_in_precision,
    whole_sequences,
)
from search.engines.text import dump_yaml

VERSION = "1.15.0"
FILE = "autopar_accelerate.yaml"
HEAD = f"# For accelerate {VERSION}, written by autopar-export.\n"
_TITLE = "accelerate"
_Section = dict[str, object]


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # It refuses replicas beside tensor groups, and shards parameters over context groups.
    beside = shape.cp > 1 or (shape.tp > 1 and data_degree > 1)
    # units of FSDP2 share gradients where they share the optimizer
    if mode == "zero1":
        return "zero2"
    return "zero2" if mode == "ddp" and beside and not shape.ulysses else mode


def _problems(shape: LayerStrategy, spec: ModelSpec) -> tuple[str, ...]:
    if shape.ulysses and shape.cp > 1:
        return (f"ulysses({shape.tp}) and cp({shape.cp}) exclude each other",)
    return kv_heads_problems(shape, spec)


_REACH = Reach(
    title=_TITLE,
    ulysses=True,
    context=True,
    data_mode=_data_mode,
    problems=_problems,
    reasons={
        "use_sp": "has either tensor or Ulysses parallelism for all layers",
        "cp_sizes_enc": "has one context degree for all layers, and none beside Ulysses",
        "default_dp_type": "has no replicas beside tensor or context groups",
    },
)


# FSDP2 and DeepSpeed sum gradients in the precision of the model, DDP in fp32. Replicas of Ulysses
# groups are DeepSpeed's: both are tried.
SPACE = Space(
    parts=(
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS}, ZERO3),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **SHARDED_OPTIMIZER}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **REPLICAS}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **REPLICAS}, ""),
    ),
    context=True,
    whole_sequences=True,
)


def lower(job: Job) -> Lowered:
    """Return the configuration of a plan, or of the nearest plan that accelerate can express.

    Raises InputError for a plan with stages, and where no plan near this one is legal.
    """
    refuse_stages(job, _TITLE, "")
    plan, losses = nearest(job, _REACH)
    runs = _runs(job, plan)
    who = "DeepSpeed" if _kind(plan) == "DEEPSPEED" else "FSDP2"
    summed = summed_in_precision(job, runs, f"{who}, as {_TITLE} sets it up,")
    return Lowered(
        engine="accelerate",
        engine_version=VERSION,
        plan=plan,
        files={FILE: HEAD + dump_yaml(_document(job, plan), quoted=True)},
        losses=(*losses, *whole_sequences(job, plan, _TITLE)),
        launch=_launch(job, plan),
        notes=(*_notes(job, plan), *summed),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, (*UNIFORM, *ONE_STAGE)),
    )


def _runs(job: Job, plan: Plan) -> dict[str, bool]:
    """Return how plans run: `no_sync` of accelerator.py, `set_mixed_precision` of FSDP's plug-in.

    Accumulation leaves gradients unreduced but with ZeRO of DeepSpeed. DDP keeps fp32 weights and
    gradients beside autocast, FSDP2 gets the precision of the model as its reduce dtype.
    """
    kind = _kind(plan)
    replicas = kind in ("NO", "MULTI_GPU")
    return {
        "sequence_parallel": job.sequence_parallel and not keeps_whole_sequences(plan),
        "async_grad_reduce": kind != "DEEPSPEED" or zero_stage(plan) < 2,
        "fp32_gradients": replicas or job.precision == "fp32",
    }


def _document(job: Job, plan: Plan) -> _Section:
    layer = plan.layers[0]
    kind = _kind(plan)
    document = common_keys(job, kind, job.precision)
    if kind == "FSDP":
        document["fsdp_config"] = fsdp_keys(reshard=layer.zero3, checkpoint=layer.checkpoint)
    if kind == "DEEPSPEED":
        document["deepspeed_config"] = {
            "deepspeed_multinode_launcher": "standard",
            "gradient_accumulation_steps": plan.num_microbatches,
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": zero_stage(plan) == 3,
            "zero_stage": zero_stage(plan),
        }
    parallelism = _parallelism(job, plan)
    if parallelism:
        document["parallelism_config"] = parallelism_keys(parallelism)
    return document


# What configurations of plans and of launches (`search.engines.huggingface.write`) have in common.


def common_keys(nodes: Nodes, kind: str, precision: str) -> _Section:
    """Return the keys of every configuration.

    kind : of `distributed_type`. precision : such as bf16; fp32 is none that is mixed.
    """
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "num_machines": nodes.num_nodes,
        "num_processes": nodes.num_nodes * nodes.gpus_per_node,
        # the launch overrides it on several nodes
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if precision == "fp32" else precision,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def fsdp_keys(*, reshard: bool, checkpoint: bool, offload: bool = False) -> _Section:
    """Return the section of FSDP2.

    reshard : weights are given back behind the forward. checkpoint : layers are computed again.
    offload : weights and states lie on the host.
    """
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": reshard,
        "fsdp_activation_checkpointing": checkpoint,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": offload,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def parallelism_keys(sizes: Mapping[str, object]) -> _Section:
    """Return the section of degrees, by their names such as `tp_size`."""
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}


RING_KEYS: Mapping[str, object] = {"cp_backend": "torch", "cp_comm_strategy": "alltoall"}
"""Of context ranks: all-to-all is how torch passes keys and values around the ring."""


def launch_lines(nodes: Nodes, accumulation: int) -> list[str]:
    """Return the command up to the script, by lines.

    accumulation : micro-batches of a step.
    """
    parts = [
        f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={accumulation}",
        f"accelerate launch --config_file {FILE}",
    ]
    if nodes.num_nodes > 1:
        parts += [
            f"--machine_rank {NODE_RANK}",
            '--main_process_ip "${MASTER_ADDR:?set it to the first node}"',
            '--main_process_port "${MASTER_PORT:-29500}"',
        ]
    return parts


def _kind(plan: Plan) -> str:
    """DDP is MULTI_GPU, and so is a single tensor group, which leaves FSDP nothing to shard."""
    layer = plan.layers[0]
    if plan.world_size == 1:
        return "NO"
    if layer.ulysses and layer.tp > 1:
        return "DEEPSPEED"
    sharding = zero_stage(plan) > 0 and plan.world_size > layer.tp
    return "FSDP" if sharding or layer.cp > 1 else "MULTI_GPU"


def _parallelism(job: Job, plan: Plan) -> _Section:
    layer, kind = plan.layers[0], _kind(plan)
    if kind == "NO" or (kind == "MULTI_GPU" and layer.tp == 1):
        return {}
    values: _Section = {
        "dp_replicate_size": 1,
        "dp_shard_size": plan.data_degree(0),
        # Ulysses ranks are the sequence ranks below
        "tp_size": 1 if kind == "DEEPSPEED" else layer.tp,
        "cp_size": layer.cp,
    }
    if layer.cp > 1:
        values |= RING_KEYS
    if kind == "DEEPSPEED":
        values |= {
            "sp_size": layer.tp,
            "sp_backend": "deepspeed",
            "sp_seq_length": job.seq_length,
            "sp_seq_length_is_variable": False,
        }
    return values


def _launch(job: Job, plan: Plan) -> str:
    return shell_lines([*launch_lines(job, plan.num_microbatches), f"train.py {SCRIPT_WEIGHTS}"])


def _notes(job: Job, plan: Plan) -> list[str]:
    layer = plan.layers[0]
    micro = samples_of_a_rank(plan)
    script = (
        f"written for accelerate {VERSION}; train.py is your script: its DataLoader has "
        f"batch_size={micro}, and accelerator.accumulate counts {plan.num_microbatches} "
        "micro-batches a step"
    )
    notes = [script, SCRIPT_NOTE]
    if layer.checkpoint and _kind(plan) != "FSDP":
        notes.append(
            "recomputation is switched on in the model: model.gradient_checkpointing_enable() of "
            "transformers"
        )
    if layer.tp > 1 and not layer.ulysses:
        notes.append(
            "the model shards itself: from_pretrained(..., tp_plan='auto', device_mesh=...) of "
            "transformers; what its plan leaves out, such as the embedding, stays whole"
        )
    if layer.tp > 1 and layer.ulysses:
        notes.append("Ulysses needs deepspeed >= 0.18.2 beside accelerate")
    return notes
