"""A plan as a configuration of DeepSpeed 0.19: one JSON file for `deepspeed.initialize`.

Keys: `deepspeed/runtime/config.py`, `runtime/zero/config.py`, `runtime/tensor_parallel/config.py`
of the wheel of 0.19.8. Stages are code in DeepSpeed (`PipelineModule`), so plans with stages are
refused; so is what is switched on in the model (recomputation, Ulysses' attention) a note.
"""

from __future__ import annotations

import json

from autopar.run.plan import LayerStrategy, Plan
from search.engines.engine import (
    EVERY_MICROBATCH,
    MODEL_GRADIENTS,
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
    Space,
    different,
    samples_of_a_rank,
    search_fields,
    torchrun,
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

VERSION = "0.19.8"
_FILE = "autopar_deepspeed.json"
_TITLE = "DeepSpeed"


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # `_configure_tensor_parallel_states` of engine.py asserts a stage of 2 at most
    return "zero2" if mode == "zero3" and shape.tp > 1 and not shape.ulysses else mode


_REACH = Reach(
    title=_TITLE,
    ulysses=True,
    data_mode=_data_mode,
    problems=kv_heads_problems,
    reasons={
        "use_sp": "has either tensor or Ulysses parallelism for all layers",
        "dp_types_enc": "has no ZeRO-3 beside tensor groups",
        "embed_sdp": "has no ZeRO-3 beside tensor groups",
    },
)


def zero_stage(plan: Plan) -> int:
    """Return the ZeRO stage of a plan whose layers are all alike."""
    if plan.layers[0].zero3:
        return 3
    return {"ddp": 0, "zero1": 1, "zero2": 2}[plan.default_dp_type]


# Without ZeRO it sums gradients of 16 bits as they are.
SPACE = Space(
    parts=(
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH, **SHARDED_OPTIMIZER}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **REPLICAS}, ""),
    ),
    whole_sequences=True,
)


def lower(job: Job) -> Lowered:
    """Return the configuration of a plan, or of the nearest plan that DeepSpeed can express.

    Raises InputError for a plan with stages, and where no plan near this one is legal.
    """
    how = ": DeepSpeed builds them in code, with PipelineModule(num_stages=)"
    refuse_stages(job, "DeepSpeed's configuration", how)
    plan, found = nearest(job, _REACH)
    document = _document(job, plan)
    sharded = zero_stage(plan) > 0
    runs = {
        "sequence_parallel": job.sequence_parallel and not keeps_whole_sequences(plan),
        # ZeRO of stages 2 and 3 reduces in every micro-batch
        "async_grad_reduce": not sharded,
        # `_do_optimizer_sanity_check` of engine.py: 16 bits without ZeRO are FP16_Optimizer's
        "fp32_gradients": job.fp32_gradients if sharded else job.precision == "fp32",
    }
    return Lowered(
        engine="deepspeed",
        engine_version=VERSION,
        plan=plan,
        files={_FILE: json.dumps(document, indent=4) + "\n"},
        losses=(*found, *whole_sequences(job, plan, _TITLE)),
        launch=torchrun(job, f"train.py --deepspeed --deepspeed_config {_FILE} {SCRIPT_WEIGHTS}"),
        notes=(*_notes(job, plan), *summed_in_precision(job, runs, f"{_TITLE} without ZeRO")),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, (*UNIFORM, *ONE_STAGE)),
    )


def _document(job: Job, plan: Plan) -> dict[str, object]:
    layer = plan.layers[0]
    micro = samples_of_a_rank(plan)
    tensor = layer.tp > 1 and not layer.ulysses
    document: dict[str, object] = {}
    # With AutoTP the configuration is read before the tensor groups exist: its check of the
    # batch product takes every rank for a data rank, so the product is left to DeepSpeed.
    if not tensor:
        document["train_batch_size"] = plan.global_batch
    document |= {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
        "bf16": {"enabled": job.precision == "bf16"},
        "fp16": {"enabled": job.precision == "fp16"},
        "zero_optimization": _zero(zero_stage(plan)),
    }
    if tensor:
        document["tensor_parallel"] = {"autotp_size": layer.tp, "vocab_parallel_lm_head": True}
    if layer.tp > 1 and layer.ulysses:
        document["sequence_parallel_size"] = layer.tp
    # without ZeRO there is nothing to ask for: see `runs`
    if job.fp32_gradients and zero_stage(plan) > 0:
        document["data_types"] = {"grad_accum_dtype": "fp32"}
    return document


def _zero(stage: int) -> dict[str, object]:
    values: dict[str, object] = {"stage": stage}
    if stage > 0:
        values |= {"overlap_comm": True, "contiguous_gradients": True}
    if stage == 2:
        values["reduce_scatter"] = True
    if stage == 3:
        values["stage3_gather_16bit_weights_on_model_save"] = True
    return values


def _notes(job: Job, plan: Plan) -> list[str]:
    layer = plan.layers[0]
    script = "train.py is your script: model, data, deepspeed.initialize"
    notes = [f"written for DeepSpeed {VERSION}; {script}", SCRIPT_NOTE]
    if layer.checkpoint:
        notes.append(
            "recomputation is switched on in the model: model.gradient_checkpointing_enable() of "
            "transformers before deepspeed.initialize"
        )
    if layer.tp > 1 and layer.ulysses:
        notes.append(
            "Ulysses is switched on in the script: pass the mpu that "
            "UlyssesSPAttentionHF.register_with_transformers(sequence_parallel_size="
            f"{layer.tp}, micro_batch_size="
            f"{samples_of_a_rank(plan)}, "
            f"seq_length={job.seq_length}, ...) returns to deepspeed.initialize"
        )
    elif layer.tp > 1:
        notes.append(
            f"the global batch is {plan.global_batch}: micro-batch times accumulation steps times "
            f"{plan.data_degree(0)} data ranks; DeepSpeed's own train_batch_size counts tensor "
            "ranks too, which its step does not use"
        )
    if plan.num_microbatches > 1 and zero_stage(plan) > 0 and job.async_grad_reduce:
        notes.append(
            "gradients are reduced in every micro-batch, as --no-async-grad-reduce predicts it"
        )
    return notes
