"""Suggestions if no uniform plan fits: changes that make one fit, and its throughput.

The search of each change is limited by the number of candidates, not only by time, so that the
answer is reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.errors import InputError
from autopar.records import Record, replace
from search.engines.space import EngineSpace
from search.planning.space import next_batch
from search.planning.uniform.answer import (
    UniformRequest,
    allowed_variants,
    resized,
    target_of,
    usual_batch,
)
from search.planning.uniform.infeasibility import violated_rule

if TYPE_CHECKING:
    from search.planning.uniform.best_first import PricedRun

_LAYERS = 2000
"""Maximum number of layers whose memory is counted per engine, summed over candidates.

In most cases the first candidate fits.
"""
_ENOUGH = 4
"""Maximum number of suggestions."""
_ENOUGH_NODES = 2
"""Maximum number of suggestions with more nodes; larger clusters fit as well."""


class Suggestion(Record):
    """A change that makes a plan fit, with the fastest plan under it."""

    words: str
    """Options that make the change."""
    engine: EngineSpace
    solution: PricedRun
    host_bytes: float
    """Lower bound of host memory per GPU, bytes."""
    world: int
    """Number of GPUs of the plan."""


def remedies(question: UniformRequest) -> tuple[Suggestion, ...]:
    """Return up to four changes that make a plan fit, smallest change of the training first.

    The order is another batch, no offload, low-precision moments, 16-bit weights and gradients,
    optimizer offload, LoRA, LoRA on 4-bit weights, more nodes. Each has the plan of the first
    engine that fits. 8-bit moments of 16-bit weights are tried if neither of the two fits.
    """
    found: list[Suggestion] = []
    larger = 0
    for words, asked in _changes(question):
        made = asked.job.training
        if made.pure_bf16 and made.optimizer != "adam" and any(map(_is_narrow, found)):
            continue
        remedy = _found(words, asked)
        if remedy is not None:
            found.append(remedy)
            larger += asked.num_nodes > question.num_nodes
        if len(found) == _ENOUGH or larger == _ENOUGH_NODES:
            break
    return tuple(found)


def _is_narrow(remedy: Suggestion) -> bool:
    """Return True if a suggestion trains all weights with states of fewer bits."""
    optimizer = remedy.solution.run.runtime.optimizer
    return optimizer.kind == "adam8bit" or optimizer.master_bytes == 0


def _changes(question: UniformRequest) -> Iterator[tuple[str, UniformRequest]]:
    """Yield options that change a question, each with the changed question."""
    training = question.job.training
    batches = question.job.global_batches
    batch = next_batch(batches[0], question.job.world) if len(batches) == 1 else None
    if batch is not None:
        job = replace(question.job, global_batches=(batch,))
        yield f"--global-batch-size {batch}", replace(question, job=job)
    if training.offload:
        # Device memory may suffice for optimizer states where host memory does not.
        off = replace(question.job, training=replace(training, offload=0.0))
        yield "--offload-optimizer 0", replace(question, job=off)
    pure = replace(training, pure_bf16=True)
    # A pretraining in 16 bits does not converge as one with fp32 weights.
    fine_tunes = training.sft and training.lora_rank is None
    for other in (
        replace(training, optimizer="adam-bf16"),
        replace(training, optimizer="adam8bit"),
        *((pure, replace(pure, optimizer="adam8bit")) if fine_tunes else ()),
        replace(training, offload=1.0),
        replace(training, lora_rank=training.lora_rank or 32),
        replace(training, lora_rank=training.lora_rank or 32, lora_base="nf4"),
    ):
        if other != training:
            words = " ".join(one for one in other.options if one not in training.options)
            job = replace(question.job, training=other)
            if question.usual_batch:  # as if the words were typed
                batch = usual_batch(other, job.seq, job.world)
                job = replace(job, global_batches=(batch,))
            yield words, replace(question, job=job)
    for factor in (2, 4, 8, 16):
        nodes = factor * question.num_nodes
        if all(batch % factor == 0 for batch in question.job.global_batches):
            words = f"--hardware {question.card.name}:{nodes}x{question.gpus_per_node}"
            yield words, resized(question, nodes, question.gpus_per_node)


def _found(words: str, asked: UniformRequest) -> Suggestion | None:
    """Return the fastest fitting plan of a changed request, from the first engine that has one.

    None if no engine has one. words : command-line options that make the change
    """
    from search.planning.uniform.best_first import UniformSearch

    counts = max(1, _LAYERS // asked.spec.num_layers)
    for engine in (one for own in asked.engines for one in allowed_variants(asked, own)):
        if violated_rule(engine, asked.job, asked.fixed) is not None:
            continue
        try:
            solved = UniformSearch(engine, asked.job, target_of(asked, engine)).solve(
                asked.fixed, counts=counts, seconds=asked.seconds, grace_s=0.0
            )
        except InputError:
            continue  # the engine does not support the change
        for solution in solved.solutions:
            host = solution.assessment.host_bytes
            return Suggestion(
                words=words,
                engine=engine,
                solution=solution,
                host_bytes=host,
                world=asked.job.world,
            )
    return None
