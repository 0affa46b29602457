"""What torchtitan can be told with one set of degrees, eager or compiled, and what it refuses."""

from __future__ import annotations

from typing import cast

from autopar.pipeline.schedules import SCHEDULES
from autopar.records import replace
from autopar.run.launch import Launch, TorchTrainer
from autopar.run.runtime import Zero
from search.engines.choice import FULL, NONE, Choice, Precision
from search.engines.space import (
    BY_LAYER,
    FEW,
    LAYOUTS,
    EngineSpace,
    Job,
    device_precisions,
    never,
    no_offload,
    plain_dispatcher,
    torch_launch,
)
from search.engines.torchtitan.rules import SPACE as SPACE_RULES


def _torchtitan(job: Job, choice: Choice) -> Launch:
    staged = choice.pp > 1
    return torch_launch(
        job,
        choice,
        "torchtitan",
        keeper="torchtitan" if choice.zero else "ddp",
        zero=cast(Zero, choice.zero),
        trainer=TorchTrainer(
            keeper="torchtitan",
            each_micro_batch=not staged,
            repeated_heads=True,
            compiled=choice.compiled,
            loss="compiled" if choice.compiled else "whole",
        ),
    )


def _precisions(gpu: str) -> tuple[Precision, ...]:
    return tuple(one for one in device_precisions(gpu) if one in ("bf16", "fp8", "mxfp8"))


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
    # a compiled backward is one piece, whose gradients of weights cannot come later
    schedules=tuple(one for one in SPACE.schedules if not SCHEDULES[one].splits),
)
"""The same with compiled layers."""
VARIANTS = (SPACE, COMPILED)
