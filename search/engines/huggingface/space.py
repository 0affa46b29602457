"""Search space of uniform plans for accelerate."""

from __future__ import annotations

from autopar.records import replace
from autopar.run.run import Run
from autopar.run.runtime import States
from search.engines.candidate import Candidate
from search.engines.huggingface.rules import SPACE as SPACE_RULES, SYNCED_GRADIENTS
from search.engines.huggingface.transformers import unwritable_model
from search.engines.space import (
    BY_LAYER,
    CONFIGURED,
    TRANSFORMERS,
    EngineContext,
    torch_run,
    transformers_space,
)


def _synced(job: EngineContext, choice: Candidate) -> Run:
    run = _accelerate(job, choice)
    states = replace(run.runtime.states, each_micro_batch=True)
    return replace(run, runtime=replace(run.runtime, states=states))


def _accelerate(job: EngineContext, choice: Candidate) -> Run:
    single = choice.global_batch == choice.micro_batch * job.world // (choice.tp * choice.cp)
    return torch_run(
        job,
        choice,
        "accelerate",
        states=States(keeper="accelerate" if choice.zero else "ddp", each_micro_batch=single),
        # Context ranks need SDPA (`_prepare_context_parallel_inputs` of transformers' Trainer).
        kernels=replace(TRANSFORMERS, repeated_heads=choice.cp > 1),
        # transformers has no sequence parallelism: tensor ranks hold whole sequences between GEMMs.
        sequence_parallel=False,
    )


SPACE = transformers_space(
    name="accelerate",
    title="accelerate",
    context=("ring",),
    zero=(0, 2, 3),
    replicated=(2, 3),
    launch=_accelerate,
    rules=SPACE_RULES,
    writable=CONFIGURED,
    said=lambda job: {
        "unwritable": unwritable_model(job.model, job.name),
        "packing": "packed samples" if job.training.fine_tunes and job.attended else "",
    },
    left_out=("torch.compile", "Ulysses (not modelled)", BY_LAYER),
)
# FSDP keeps whole gradients of earlier micro-batches, unless each micro-batch reduces them.
SYNCED = replace(
    SPACE, zero=SPACE.replicated, launch=_synced, rules=(*SPACE.rules, *SYNCED_GRADIENTS)
)
"""Search space of plans that reduce gradients after each micro-batch (`sync_each_batch`)."""
VARIANTS = (SPACE, SYNCED)
