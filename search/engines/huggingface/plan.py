"""The nearest plan that accelerate can run, and the run of that plan.

Plans without sharding run as DDP, plans with ZeRO as FSDP2, and plans with Ulysses in DeepSpeed.
Tensor parallelism uses the `tp_plan` of the transformers model. There is no pipeline parallelism.
"""

from __future__ import annotations

from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, Plan
from autopar.run.run import Run
from search.engines.deepspeed.space import SPACE as DEEPSPEED
from search.engines.exporter_types import ExportTarget
from search.engines.huggingface.space import SPACE as OWN
from search.engines.huggingface.transformers import script_place
from search.engines.plans import (
    MODEL_GRADIENTS,
    ONE_DEGREE,
    ONE_STAGE,
    REPLICAS,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    UNIFORM,
    ZERO3,
    ExporterSpace,
    ExportJob,
    NearestPlan,
    choice_of_plan,
    different,
    exchange_degree,
    run_of_choice,
    search_fields,
    zero_stage,
)
from search.engines.uniform_approximation import (
    DataMode,
    EngineCapabilities,
    keeps_whole_sequences,
    kv_heads_problems,
    nearest,
    refuse_stages,
    summed_in_precision,
    whole_sequences,
)

_TITLE = "accelerate"


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # accelerate rejects replicas with tensor groups, and shards parameters over context groups.
    beside = shape.cp > 1 or (shape.tp > 1 and data_degree > 1)
    # FSDP2 shards gradients wherever it shards optimizer states.
    if mode == "zero1":
        return "zero2"
    return "zero2" if mode == "ddp" and beside and not shape.ulysses else mode


def _problems(shape: LayerStrategy, spec: ModelSpec) -> tuple[str, ...]:
    if shape.ulysses and shape.cp > 1:
        return (f"ulysses({shape.tp}) and cp({shape.cp}) exclude each other",)
    return kv_heads_problems(shape, spec)


_REACH = EngineCapabilities(
    title=_TITLE,
    ulysses=True,
    context=True,
    data_mode=_data_mode,
    problems=_problems,
    reasons={
        "use_sp": "has tensor or Ulysses parallelism for all layers, not both",
        "cp_sizes_enc": "has one context degree for all layers, and none with Ulysses",
        "default_dp_type": "has no replicas with tensor or context groups",
    },
)


# FSDP2 and DeepSpeed reduce gradients in the precision of the model, DDP reduces them in fp32.
# Replicas of Ulysses groups run in DeepSpeed, so replicas are searched with both precisions.
SPACE = ExporterSpace(
    parts=(
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS}, ZERO3),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **SHARDED_OPTIMIZER}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **REPLICAS}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **REPLICAS}, ""),
    ),
    context=True,
    whole_sequences=True,
)


def near(job: ExportJob) -> NearestPlan:
    """Return the nearest plan that accelerate can run.

    Raises InputError for a plan with stages, and if no plan near this one is legal.
    """
    refuse_stages(job, _TITLE, "")
    plan, losses = nearest(job, _REACH)
    of_deepspeed = exchange_degree(plan) > 1
    runs = {
        "sequence_parallel": job.sequence_parallel and not keeps_whole_sequences(plan),
        # Accumulation (`no_sync`) reduces gradients once per step, except with ZeRO-2 and ZeRO-3 of
        # DeepSpeed.
        "async_grad_reduce": not of_deepspeed or zero_stage(plan) < 2,
        # `set_mixed_precision` of the FSDP plugin: DDP keeps fp32 gradients with autocast, FSDP2
        # reduces in the precision of the model.
        "fp32_gradients": job.precision == "fp32" or not (of_deepspeed or _sharded(plan)),
    }
    who = f"{'DeepSpeed' if of_deepspeed else 'FSDP2'}, as {_TITLE} sets it up,"
    return NearestPlan(
        plan=plan,
        losses=(*losses, *whole_sequences(job, plan, _TITLE)),
        notes=summed_in_precision(job, runs, who),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, (*UNIFORM, *ONE_STAGE)),
    )


def _sharded(plan: Plan) -> bool:
    """Return True if FSDP runs a plan; it shards nothing within a single tensor group."""
    layer = plan.layers[0]
    return (zero_stage(plan) > 0 and plan.world_size > layer.tp) or layer.cp > 1


def handed(job: ExportJob, plan: Plan) -> tuple[Run, ExportTarget]:
    """Return the run of a plan from `near`, and its export target."""
    of_deepspeed = exchange_degree(plan) > 1
    zero = zero_stage(plan) if of_deepspeed or _sharded(plan) else 0
    model, place = script_place(job, _TITLE)
    choice = choice_of_plan(plan, zero=zero)
    return run_of_choice(DEEPSPEED if of_deepspeed else OWN, job, choice, model), place
