"""Search space of uniform plans for DeepSpeed."""

from __future__ import annotations

from autopar.run.run import Run
from autopar.run.runtime import States
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
    torch_recompute,
    torch_run,
)


def _deepspeed(job: Job, choice: Choice) -> Run:
    return torch_run(
        job,
        choice,
        "deepspeed",
        states=States(keeper="deepspeed", each_micro_batch=choice.zero >= 2),
        kernels=TRANSFORMERS,
        # AutoTP has no sequence parallelism: tensor ranks hold whole sequences between GEMMs.
        sequence_parallel=False,
        host_adam="deepspeed",
    )


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
