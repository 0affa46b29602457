"""Search space of uniform plans for accelerate."""

from __future__ import annotations

from autopar.run.run import Run
from autopar.run.runtime import States
from search.engines.choice import Choice
from search.engines.huggingface.rules import SPACE as SPACE_RULES
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


def _accelerate(job: Job, choice: Choice) -> Run:
    single = choice.global_batch == choice.micro_batch * job.world // (choice.tp * choice.cp)
    return torch_run(
        job,
        choice,
        "accelerate",
        states=States(keeper="accelerate" if choice.zero else "ddp", each_micro_batch=single),
        kernels=TRANSFORMERS,
        # transformers has no sequence parallelism: tensor ranks hold whole sequences between GEMMs.
        sequence_parallel=False,
    )


SPACE = EngineSpace(
    name="accelerate",
    title="accelerate",
    stack="torchtitan-eager",
    schedules=(),
    context=("ring",),
    experts=False,
    expert_tensor=lambda tp: (tp,),
    zero=(0, 2, 3),
    zero_with_stages=(),
    replicated=(2, 3),
    recompute=torch_recompute,
    blocks=False,
    offload=no_offload,
    precisions=lambda gpu: ("bf16",),
    dispatchers=plain_dispatcher,
    overlaps_experts=False,
    overlaps_tensor=never,
    any_layout=False,
    launch=_accelerate,
    rules=SPACE_RULES,
    left_out=("torch.compile", "Ulysses, which is not priced", BY_LAYER),
)
VARIANTS = (SPACE,)
