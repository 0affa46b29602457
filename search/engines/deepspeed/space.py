"""What DeepSpeed can be told with one set of degrees, and what it refuses of it."""

from __future__ import annotations

from typing import cast

from autopar.records import replace
from autopar.run.launch import Launch
from autopar.run.runtime import Zero
from search.engines.choice import Choice
from search.engines.deepspeed.rules import SPACE as SPACE_RULES
from search.engines.space import (
    BY_LAYER,
    TRANSFORMERS,
    EngineSpace,
    Job,
    never,
    no_offload,
    plain_dispatcher,
    torch_launch,
    torch_recompute,
    whole_sequences,
)


def _deepspeed(job: Job, choice: Choice) -> Launch:
    launch = torch_launch(
        job,
        choice,
        "deepspeed",
        keeper="deepspeed",
        zero=cast(Zero, choice.zero),
        trainer=replace(TRANSFORMERS, each_micro_batch=choice.zero >= 2),
    )
    return whole_sequences(launch)


SPACE = EngineSpace(
    name="deepspeed",
    title="DeepSpeed",
    stack="torchtitan-eager",
    schedules=(),
    context=(),
    experts=False,
    expert_tensor=lambda tp: (tp,),
    zero=(0, 1, 2, 3),
    zero_with_stages=(),
    replicated=(),
    recompute=torch_recompute,
    blocks=False,
    offload=no_offload,
    precisions=lambda gpu: ("bf16",),
    dispatchers=plain_dispatcher,
    overlaps_experts=False,
    overlaps_tensor=never,
    any_layout=False,
    launch=_deepspeed,
    rules=SPACE_RULES,
    left_out=("pipelines", "Ulysses, which is not priced", BY_LAYER),
)
VARIANTS = (SPACE,)
