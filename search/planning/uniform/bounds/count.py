"""Number of candidates of a search, computed without enumeration."""

from __future__ import annotations

import numpy as np

from autopar.records import replace
from search.engines.candidate import Candidate
from search.planning.uniform.expansion import CandidateExpander
from search.planning.uniform.space import DegreeArrays, UniformSearchSpace


def number_of_candidates(
    openings: CandidateExpander, space: UniformSearchSpace, degrees: DegreeArrays
) -> int:
    """Return the number of candidates with these degrees, all stages, chunks and settings.

    Layouts with equal numbers of chunks are one candidate, with the `block N` policies of an even
    layout.
    """
    if openings.fixed not in space.numbers:
        space.numbers[openings.fixed] = _number(openings, space, degrees)
    return space.numbers[openings.fixed]


def _number(openings: CandidateExpander, space: UniformSearchSpace, degrees: DegreeArrays) -> int:
    # some engines do not support every sharding with every context-parallel communication
    laid = [(one.tp, one.cp, one.micro_batch, one.cp_kind) for one in space.attention_degrees]
    # engines that combine any degrees of experts depend on their product only
    whole = openings.engine.expert_tensor is None
    ways = [
        (*((one.ep * one.etp, 1) if whole else (one.ep, one.etp)), one.overlap)
        for one in space.expert_degrees
    ]
    first, place = np.unique(
        np.array([ways.index(one) for one in ways])[degrees.way] * len(laid) + degrees.laid,
        return_inverse=True,
    )
    batches, of_batch = np.unique(degrees.batch, return_inverse=True)
    keys, times = np.unique(place * len(batches) + of_batch, return_counts=True)
    policies: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    words: dict[tuple[int, int], int] = {}
    shardings: dict[tuple[object, ...], int] = {}
    overlaps: dict[tuple[int, bool], int] = {}
    total = 0
    for key, count in zip(keys.tolist(), times.tolist(), strict=True):
        pair, batch = first[key // len(batches)], int(batches[key % len(batches)])
        tp, cp, size, kind = laid[pair % len(laid)]
        ep, etp, overlap = ways[pair // len(laid)]
        one = Candidate(
            tp=tp, cp=cp, cp_kind=kind, ep=ep, etp=etp, micro_batch=size, global_batch=batch
        )
        inner = (tp * cp, ep * etp, size, batch)
        if inner not in policies:
            policies[inner] = []
            for each in openings.stages(one):
                stages = (each.pp, openings.prices.micro_batches(each))
                if stages not in words:
                    words[stages] = _policies(openings, *stages)
                policies[inner].append((each.pp, words[stages]))
        number = 0
        for pp, of_layouts in policies[inner]:
            of_ranks = (tp, cp, kind, ep, etp, pp)
            if of_ranks not in shardings:
                ranks = replace(one, pp=pp)
                shardings[of_ranks] = sum(
                    len(openings.copies(replace(ranks, zero=zero)))
                    for zero in openings.zeros_at(ranks, pp)
                )
            number += shardings[of_ranks] * of_layouts
        if (tp, overlap) not in overlaps:
            overlaps[tp, overlap] = len(openings.overlap_values(tp, overlap))
        total += count * number * overlaps[tp, overlap]
    return total


def _policies(openings: CandidateExpander, pp: int, micro_batches: int) -> int:
    """Return the number of pipelines of a number of stages, with their activation policies."""
    layers, total = openings.job.model.num_layers, 0
    for _, vpp in openings.legal_pipelines(pp, micro_batches):
        plain = int(openings.words.sum()) if openings.device else 0
        hosted = int(openings.hosted.sum()) * int(openings.sets.sum())
        # layers of the longest chunk
        total += plain + hosted + len(openings.blocks(-(-layers // (pp * vpp))))
    return total
