"""Random tokens of a global batch, and what of them a rank holds; the same on any plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.errors import InputError
from profiler.plan.job import PlanJob
from profiler.plan.layout import Layout

__all__ = ["Batch", "global_tokens", "local_batch"]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens and labels of one step on one rank."""

    tokens: torch.Tensor
    """(micro-batches * samples, sequence), micro-batch after micro-batch."""
    labels: tuple[torch.Tensor, ...]
    """(sequence, samples) of every micro-batch."""


def global_tokens(job: PlanJob, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels of the global batch, (samples, sequence) each."""
    vocab = job.spec.vocab_size
    if vocab is None:
        raise InputError(
            f"model {job.spec.name!r}: the vocabulary size is unknown; give vocab_size"
        )
    generator = torch.Generator().manual_seed((job.seed * 1_000_003 + step) % (1 << 63))
    shape = (2, job.plan.global_batch, job.spec.layers[0].seq_length)
    tokens, labels = torch.randint(0, vocab, shape, generator=generator)
    return tokens, labels


def local_batch(
    job: PlanJob, layout: Layout, place: int, *, step: int, device: torch.device | str
) -> Batch:
    """Return what a rank of the first and the last stage holds of a step's batch.

    layout : of embedding and head; place : the rank within its stage. The ranks of a tensor group
    hold the same whole sequences, those of a Ulysses group a piece of each.
    """
    m = job.plan.num_microbatches
    samples = job.plan.global_batch // m // layout.data_degree
    at = layout.cube.index(place, layout.data_axes)
    held = []
    for values in global_tokens(job, step):
        own = values.view(m, layout.data_degree, samples, -1)[:, at]
        if layout.kind == "ulysses":
            own = own.chunk(layout.degree, -1)[layout.cube.index(place, layout.tensor_axes)]
        held.append(own.contiguous().to(device))
    tokens, labels = held
    return Batch(
        tokens=tokens.flatten(0, 1), labels=tuple(each.t().contiguous() for each in labels)
    )
