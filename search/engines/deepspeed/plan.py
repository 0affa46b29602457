"""The nearest plan that DeepSpeed can run, and the run of that plan.

Pipeline stages are written in code in DeepSpeed (`PipelineModule`), so plans with stages are
rejected.
"""

from __future__ import annotations

from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan
from autopar.run.run import Run
from autopar.run.runtime import BUCKETS
from search.engines.deepspeed.space import SPACE as OWN
from search.engines.exporter_types import ExportTarget
from search.engines.huggingface.transformers import script_place
from search.engines.plans import (
    EVERY_MICROBATCH,
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

_TITLE = "DeepSpeed"


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # `_configure_tensor_parallel_states` of engine.py allows at most ZeRO-2 with tensor ranks.
    return "zero2" if mode == "zero3" and shape.tp > 1 and not shape.ulysses else mode


_REACH = EngineCapabilities(
    title=_TITLE,
    ulysses=True,
    data_mode=_data_mode,
    problems=kv_heads_problems,
    reasons={
        "use_sp": "has tensor or Ulysses parallelism for all layers, not both",
        "dp_types_enc": "has no ZeRO-3 with tensor groups",
        "embed_sdp": "has no ZeRO-3 with tensor groups",
    },
)


# Without ZeRO, DeepSpeed accumulates 16-bit gradients in 16 bits.
SPACE = ExporterSpace(
    parts=(
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH, **SHARDED_OPTIMIZER}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **MODEL_GRADIENTS, **REPLICAS}, ""),
    ),
    whole_sequences=True,
)


def near(job: ExportJob) -> NearestPlan:
    """Return the nearest plan that DeepSpeed can run.

    Raises InputError for a plan with stages, and if no plan near this one is legal.
    """
    how = ": DeepSpeed builds them in code, with PipelineModule(num_stages=)"
    refuse_stages(job, "DeepSpeed's configuration", how)
    plan, losses = nearest(job, _REACH)
    sharded = zero_stage(plan) > 0
    runs = {
        "sequence_parallel": job.sequence_parallel and not keeps_whole_sequences(plan),
        # ZeRO-2 and ZeRO-3 reduce gradients in every micro-batch.
        "async_grad_reduce": not sharded,
        # Without ZeRO, 16-bit training uses FP16_Optimizer (`_do_optimizer_sanity_check` of
        # engine.py).
        "fp32_gradients": job.fp32_gradients if sharded else job.precision == "fp32",
    }
    notes = list(summed_in_precision(job, runs, f"{_TITLE} without ZeRO"))
    if plan.num_microbatches > 1 and sharded and job.async_grad_reduce:
        notes.append(
            "gradients are reduced in every micro-batch, as predicted with --no-async-grad-reduce"
        )
    return NearestPlan(
        plan=plan,
        losses=(*losses, *whole_sequences(job, plan, _TITLE)),
        notes=tuple(notes),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, (*UNIFORM, *ONE_STAGE)),
    )


def handed(job: ExportJob, plan: Plan) -> tuple[Run, ExportTarget]:
    """Return the run of a plan from `near`, and its export target.

    With ZeRO, gradient reduction overlaps the backward pass, and gradients are accumulated in fp32
    if the plan was predicted with fp32 gradients.
    """
    stage = zero_stage(plan)
    choice = choice_of_plan(plan, zero=stage)
    if choice.tp > 1:
        # DeepSpeed rejects ZeRO-3 with tensor ranks. Plans may still have it where a single
        # data-parallel rank has nothing to shard.
        choice = replace(choice, zero=min(stage, 2))
    model, place = script_place(job, _TITLE)
    run = run_of_choice(OWN, job, choice, model)
    if choice.zero:
        wide = True if job.fp32_gradients else None
        buckets = replace(BUCKETS, overlap=True)
        states = replace(run.runtime.states, wide_gradients=wide, buckets=buckets)
        run = replace(run, runtime=replace(run.runtime, states=states))
    return run, place
