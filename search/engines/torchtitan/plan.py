"""The nearest plan that torchtitan 0.3.0 can run, and the run of that plan.

torchtitan has one tensor, context and data-parallel degree for the whole model. Stages may have any
size, and each layer may be recomputed or not.
"""

from __future__ import annotations

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import ModelSpec
from autopar.run.of_plan import uniform_model
from autopar.run.plan import LayerStrategy, Plan
from autopar.run.run import Run, run_with_split
from search.engines.exporter_types import ExportTarget, UnsupportedFeature
from search.engines.plans import (
    EVERY_MICROBATCH,
    ONE_STAGE,
    REPLICAS,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    ZERO3,
    ExporterSpace,
    ExporterSubspace,
    ExportJob,
    NearestPlan,
    choice_of_plan,
    different,
    run_of_choice,
    search_fields,
    target_of,
    unsupported_modules,
)
from search.engines.torchtitan.flavours import RECIPES as VERSION
from search.engines.torchtitan.recipe import beyond, refuse_model
from search.engines.torchtitan.space import SPACE as OWN
from search.engines.uniform_approximation import (
    DataMode,
    EngineCapabilities,
    kv_heads_problems,
    nearest,
)


def _data_mode(mode: DataMode, shape: LayerStrategy, data_degree: int) -> DataMode:
    # The FSDP mesh is dp_shard * cp, so a context group always shards its parameters. FSDP2 shards
    # gradients wherever it shards optimizer states, so ZeRO-1 becomes ZeRO-2.
    return "zero2" if mode == "zero1" or (mode == "ddp" and shape.cp > 1) else mode


_REACH = EngineCapabilities(
    title=f"torchtitan {VERSION}",
    context=True,
    layer_checkpoints=True,
    data_mode=_data_mode,
    problems=kv_heads_problems,
    reasons={"default_dp_type": "shards the parameters over every context group"},
)


_STAGES: ExporterSubspace = {"forbid": ("pp=1",)}
# With pipeline stages gradients are reduced once per step.
SPACE = ExporterSpace(
    parts=(
        ({**SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**SINGLE_STAGE, **EVERY_MICROBATCH, **SHARDED_OPTIMIZER}, ""),
        ({**SINGLE_STAGE, **EVERY_MICROBATCH, **REPLICAS}, ""),
        ({**_STAGES}, ZERO3),
        ({**_STAGES, **SHARDED_OPTIMIZER}, ""),
        ({**_STAGES, **REPLICAS}, ""),
    ),
    context=True,
    # The default of `context_parallel_rotate_method` is allgather.
    gathers=True,
)


def _refuse_spec(spec: ModelSpec) -> None:
    """Raise UnsupportedError if torchtitan cannot build the model or its sizes are incomplete."""
    layer = spec.layers[0]
    refuse_model(
        spec.name,
        {
            f"{len(spec.layers)} layer types": len(spec.layers) > 1,
            "cross attention": layer.cross_attention,
            "attention that is not causal": not layer.causal,
            "no vocabulary size": spec.vocab_size is None,
            "no number of heads": layer.num_heads is None,
            "no width of the MLP": layer.ffn_hidden_size is None,
            **dict.fromkeys(unsupported_modules(spec), True),
        },
    )
    refuse_model(spec.name, beyond(uniform_model(spec)))


def near(job: ExportJob) -> NearestPlan:
    """Return the nearest plan that torchtitan can run.

    Raises UnsupportedError if torchtitan cannot build the model. Raises InputError if the model has
    tied embeddings and the plan has pipeline stages, or if no plan near this one is legal.
    """
    _refuse_spec(job.spec)
    if job.spec.tied_embeddings and job.plan.num_stages > 1:
        raise InputError(
            f"torchtitan {VERSION} has no pipeline for models with tied "
            f"embeddings, but the plan has {job.plan.num_stages} stages",
            remedy="Search again with --max-pp-deg 1",
        )
    plan, found = nearest(job, _REACH)
    losses = list(found)
    if job.precision == "fp16":
        losses.append(
            UnsupportedFeature(
                field="mixed_precision",
                what=(
                    f"the plan is for fp16, but torchtitan {VERSION} trains in bf16 "
                    "or fp32: it uses bf16"
                ),
            )
        )
    # Without stages every backward pass reduces gradients, in the only reduce dtype of torchtitan.
    # Schedules of torch.distributed.pipelining reduce them after the last micro-batch.
    staged = plan.num_stages > 1
    runs = {"async_grad_reduce": staged, "fp32_gradients": True}
    stages = (("pin", (f"pp={plan.num_stages}",)),) if staged else ONE_STAGE
    notes = []
    if plan.num_microbatches > 1 and not staged and job.async_grad_reduce:
        notes.append(
            "gradients are reduced in every micro-batch, as predicted with --no-async-grad-reduce"
        )
    return NearestPlan(
        plan=plan,
        losses=tuple(losses),
        notes=tuple(notes),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, stages),
    )


def handed(job: ExportJob, plan: Plan) -> tuple[Run, ExportTarget]:
    """Return the run of a plan from `near`, and the export target for its recipe.

    A plan in fp16 becomes a run in bf16, because torchtitan does not train in fp16.
    """
    if job.precision == "fp16":
        job = replace(job, precision="bf16")
    default = 2 if plan.default_dp_type == "zero2" or plan.vocab.zero3 else 0
    zero = 3 if any(layer.zero3 for layer in plan.layers) else default
    if plan.data_degree(0) * plan.layers[0].cp == 1:
        # A single data-parallel rank has nothing to shard.
        zero = 0
    again = frozenset(i for i, layer in enumerate(plan.layers) if layer.checkpoint)
    choice = choice_of_plan(plan, zero=zero)
    if again:
        choice = replace(choice, recompute="full")
    run = run_of_choice(OWN, job, choice)
    if not job.sequence_parallel:
        run = run_with_split(run, sequence_parallel=False)
    return run, replace(target_of(job), recomputed=again)
