"""Kernels and transfers of sparse attention, whose indexer chooses the keys of each query.

The indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) scores all pairs of tokens with few
narrow heads, and queries attend to the keys with the highest scores. All heads attend to the
compressed keys of latent attention (MQA). Kernels are those of Megatron-Core's backend `cudnn`
(d98e8a64, core/transformer/experimental_attention_variant).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.rates.memory_bound import elements_s
from autopar.rates.parts.linear import linear_parts
from autopar.rates.parts.operations import (
    CommunicationTime,
    KernelTime,
    Machine,
    RankShape,
    element_part,
    transfer_s,
)
from autopar.run.architecture import Attention, Indexer, LatentAttention
from autopar.run.job import Job, indexer_matrices

FORWARD_SHARE = 0.645
"""Share of the dense bf16 peak of sparse attention's forward: 640 TFLOP/s on H800, 1450 on B200
(deepseek-ai/FlashMLA, README)."""
BACKWARD_SHARE = 0.304
"""Share of its backward: 4.019 ms for 4,096 tokens, 64 heads of 512 and 2,048 keys on B200
(NVIDIA/cudnn-frontend, pull request 318). No time on Hopper is published."""
SCORES_SHARE = 0.41
"""Share of the indexer's scores: 298.4 us for 8,192 queries, 4,096 keys and 64 heads of 128 on
B200 (NVIDIA/cudnn-frontend, pull request 416)."""
_MOST_SCORES = 2**30
"""Bytes of scores up to which one call of cuDNN's kernel computes them."""
_PADDED_HEADS = 64
"""Query heads of one tile; fewer heads take as long."""
_SCORE_PASSES = 3.0
"""Times that scores are written or read: by the kernel, then twice by the choice of keys."""
_UNFUSED_PASSES = 7.0
"""Times that the scores of one head are written or read where torch computes them, in fp32:
product, ReLU, weighting and sum."""


def sparse_parts(
    machine: Machine,
    job: Job,
    hidden: int,
    attention: Attention,
    indexer: Indexer,
    latent: LatentAttention,
    split: RankShape,
) -> Iterator[KernelTime]:
    """Yield the kernels of sparse attention between the projections of latent attention."""
    n, heads = split.tokens, attention.heads / split.tensor
    narrow = latent.kv_rank + latent.rotary_width
    # absorbed queries copied twice, and the expanded output
    moved = n * heads * (latent.kv_rank + narrow + attention.value_width)
    yield element_part(machine, job, "layout", "mla_up_proj", "layout", moved)
    turned = n * (heads + 1) * latent.rotary_width
    # sparse attention has no fused kernel for rotary positions
    yield element_part(machine, job, "rotary", "mla_up_proj", "plain_rope", turned)
    tiles = -(-heads // _PADDED_HEADS) * _PADDED_HEADS
    pairs = n * indexer.chosen(job.seq)
    peak = machine.kernels.flop_per_s["bf16"] * machine.clock
    each = 2 * pairs * tiles / peak
    forward = each * (narrow + latent.kv_rank) / FORWARD_SHARE
    backward = each * (3 * narrow + 2 * latent.kv_rank) / BACKWARD_SHARE
    yield KernelTime("core attention", "core_attn", "attention", forward, backward)
    if indexer.reused:
        return
    yield from _projections(machine, job, hidden, attention, indexer, split)
    yield from _scores(machine, job, indexer, split, peak)
    if not indexer.trained:
        return
    # The loss compares its scores with those of all heads; it is differentiated in the forward
    # that keeps activations, which recomputation does not add to.
    products = pairs * (2 * tiles * narrow / FORWARD_SHARE)
    gradients = pairs * (6 * indexer.heads * indexer.width / BACKWARD_SHARE)
    again = forward if indexer.every > 1 else 0.0
    seconds = (products + gradients) / peak + again
    yield KernelTime("indexer loss", "indexer", "attention", 0.0, seconds)


def _projections(
    machine: Machine,
    job: Job,
    hidden: int,
    attention: Attention,
    indexer: Indexer,
    split: RankShape,
) -> Iterator[KernelTime]:
    """Yield the projections of an indexer, which passes no gradient to its inputs."""
    n = split.tokens
    for index, (outputs, inputs) in enumerate(indexer_matrices(hidden, attention)):
        name = f"indexer {index}"
        for part in linear_parts(machine, job, name, "core_attn", n, outputs, inputs):
            weights = part.weight_s if indexer.trained else 0.0
            yield part._replace(input_s=0.0, weight_s=weights)
    inner = n * indexer.heads * indexer.width
    yield element_part(machine, job, "indexer rotary", "core_attn", "plain_rope", inner)
    yield element_part(machine, job, "indexer norm", "core_attn", "norm", n * indexer.width)


def _scores(
    machine: Machine, job: Job, indexer: Indexer, split: RankShape, peak: float
) -> Iterator[KernelTime]:
    """Yield scores of all pairs and the choice of keys.

    Torch computes the scores head by head in fp32 if layers share a choice, and if the scores of a
    micro-batch have more than `_MOST_SCORES` bytes (dsa_cudnn_kernels.py,
    `_indexer_topk_from_score_chunks`).
    """
    pairs, each = split.tokens * job.seq, 2 * indexer.heads * indexer.width
    # the kernel computes the pairs of a query with earlier tokens alone
    fused = pairs / 2 * each / (peak * SCORES_SHARE)
    vectors = machine.kernels.flop_per_s["fp32"] * machine.clock
    passes = elements_s(machine.kernels, pairs, 4 * _UNFUSED_PASSES)
    unfused = pairs * each / vectors + indexer.heads * passes
    few = (indexer.every == 1) & (4.0 * np.asarray(pairs) <= _MOST_SCORES)
    seconds = elements_s(machine.kernels, pairs, 4 * _SCORE_PASSES) + np.where(few, fused, unfused)
    yield KernelTime("indexer scores", "core_attn", "attention", seconds, 0.0)


def indexer_sends(
    machine: Machine, job: Job, hidden: int, indexer: Indexer, latent: LatentAttention
) -> CommunicationTime:
    """Return the time of the tensor-parallel collectives of sparse attention alone.

    Each rank gathers compressed keys, and for the indexer its inputs; the loss adds up the scores
    of all heads.
    """
    if job.tp == 1:
        return CommunicationTime()
    element = job.tokens * job.element_bytes
    keys = transfer_s(machine, "allgather", element * latent.kv_rank, job.tp, 1)
    back = transfer_s(machine, "reducescatter", element * latent.kv_rank, job.tp, 1)
    if indexer.reused:
        return CommunicationTime(keys, back, 2)
    widths = hidden + (latent.query_rank or hidden)
    keys += transfer_s(machine, "allgather", element * widths, job.tp, 1)
    if indexer.trained:
        chosen = 4.0 * job.tokens * min(indexer.topk, job.seq)
        back += transfer_s(machine, "allreduce", chosen, job.tp, 1)
    return CommunicationTime(keys, back, 5)


def gathered_keys(
    machine: Machine, job: Job, indexer: Indexer, latent: LatentAttention
) -> CommunicationTime:
    """Return the time in which context ranks gather the keys of a sequence.

    Each rank keeps all compressed keys, and those of the indexer, for its own queries; their
    gradients are reduced and scattered. Nothing overlaps (Megatron-Core d98e8a64, dsa.py).
    """
    element = job.cp * job.tokens * job.element_bytes
    keys, own = latent.kv_rank + latent.rotary_width, 0 if indexer.reused else indexer.width
    back = [keys] if indexer.reused or not indexer.trained else [keys, own]
    forward, backward = (
        sum(transfer_s(machine, kind, element * width, job.cp, job.tp) for width in widths if width)
        for kind, widths in (("allgather", (keys, own)), ("reducescatter", back))
    )
    return CommunicationTime(forward, backward, 2 + len(back))
