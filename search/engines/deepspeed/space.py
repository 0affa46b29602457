"""Search space of uniform plans for DeepSpeed."""

from __future__ import annotations

from autopar.run.run import Run
from autopar.run.runtime import States
from search.engines.candidate import Candidate
from search.engines.deepspeed.rules import SPACE as SPACE_RULES
from search.engines.huggingface.transformers import unwritable_model
from search.engines.space import (
    BY_LAYER,
    CONFIGURED,
    TRANSFORMERS,
    EngineContext,
    torch_run,
    transformers_space,
)


def _deepspeed(job: EngineContext, choice: Candidate) -> Run:
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


SPACE = transformers_space(
    name="deepspeed",
    title="DeepSpeed",
    context=(),
    zero=(0, 1, 2, 3),
    replicated=(),
    launch=_deepspeed,
    rules=SPACE_RULES,
    writable=CONFIGURED,
    said=lambda job: {"unwritable": unwritable_model(job.model, job.name)},
    left_out=("pipelines", "Ulysses (not modelled)", BY_LAYER),
)
VARIANTS = (SPACE,)
