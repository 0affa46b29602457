"""Search spaces of uniform plans for torchtitan: eager layers and compiled layers."""

from __future__ import annotations

from typing import Any

from autopar.errors import UnsupportedError
from autopar.pipeline.schedules import SCHEDULES
from autopar.records import replace
from autopar.run.run import Run
from autopar.run.runtime import Kernels, States
from search.engines.candidate import FULL, NONE, Candidate, Precision
from search.engines.huggingface.named_optimizers import of_narrow_weights
from search.engines.space import (
    BY_LAYER,
    FEW,
    LAYOUTS,
    EngineContext,
    EngineSpace,
    device_precisions,
    never,
    no_offload,
    plain_dispatcher,
    torch_run,
)
from search.engines.torchtitan.flavours import (
    JOB_FILES,
    RECIPES,
    flavour_of,
    linear_modules,
    needs_recipe,
    targets_of,
)
from search.engines.torchtitan.rules import FLAVOURED, LOSS_CHUNKS, SPACE as SPACE_RULES


def _torchtitan(job: EngineContext, choice: Candidate) -> Run:
    # Runs that need a recipe have its defaults: a loss in chunks, one fp8 scale per row.
    recipe = job.known(SPACE)["recipe"]
    run = torch_run(
        job,
        choice,
        "torchtitan",
        states=States(
            keeper="torchtitan" if choice.zero else "ddp", each_micro_batch=choice.pp == 1
        ),
        kernels=Kernels(
            attention="flash",
            module="torchtitan",
            compiled=choice.compiled,
            loss="chunked" if recipe else "compiled" if choice.compiled else "whole",
            loss_chunks=LOSS_CHUNKS if recipe else 1,
            repeated_heads=True,
        ),
    )
    runtime = run.runtime
    if recipe and choice.precision == "fp8":
        runtime = replace(runtime, precision=replace(runtime.precision, row_scales=True))
    if runtime.adapters is not None:
        own = targets_of(linear_modules(job.model))
        runtime = replace(
            runtime,
            adapters=replace(runtime.adapters, targets=runtime.adapters.targets & own, fused="qkv"),
            # Adapters and frozen weights have one type (`training.dtype`), here bf16.
            optimizer=of_narrow_weights(runtime.optimizer),
        )
    return replace(run, runtime=runtime)


def _precisions(gpu: str) -> tuple[Precision, ...]:
    return tuple(one for one in device_precisions(gpu) if one in ("bf16", "fp8", "mxfp8"))


def _said(job: EngineContext) -> dict[str, Any]:
    recipe, problem = needs_recipe(job.model, job.training.lora_rank or 0), ""
    try:
        flavour_of(job.model, RECIPES if recipe else JOB_FILES)
    except UnsupportedError as error:
        problem = error.short
    return {"recipe": recipe, "flavour_problem": problem}


SPACE = EngineSpace(
    name="torchtitan",
    title="torchtitan",
    stack="torchtitan-eager",
    schedules=tuple(name for name in SCHEDULES if "torchtitan" in SCHEDULES[name].engines),
    context=("ring",),
    experts=True,
    expert_tensor=lambda tp: (1,) if tp == 1 else (1, tp),
    zero=(0, 2, 3),
    zero_with_stages=(2, 3),
    replicated=(2, 3),
    recompute=lambda model: (NONE, "op", FULL),
    blocks=False,
    offload=no_offload,
    precisions=_precisions,
    dispatchers=plain_dispatcher,
    overlaps_experts=False,
    overlaps_tensor=never,
    any_layout=True,
    launch=_torchtitan,
    rules=SPACE_RULES,
    writable=FLAVOURED,
    said=_said,
    left_out=(
        "asynchronous tensor parallelism of compiled layers",
        "recomputation of every n-th layer",
        FEW,
        LAYOUTS,
        BY_LAYER,
    ),
)
COMPILED = replace(
    SPACE,
    stack="torchtitan-compiled",
    compiled=True,
    # A compiled backward pass is one graph, so weight gradients cannot be delayed.
    schedules=tuple(one for one in SPACE.schedules if not SCHEDULES[one].splits),
)
"""Search space of torchtitan with compiled layers."""
VARIANTS = (SPACE, COMPILED)
