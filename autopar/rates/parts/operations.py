"""Cost of one operation of a layer: machine, tokens and widths per rank, kernels, casts.

`autopar.rates.layer` combines these for layers of every kind, `autopar.rates.parts.experts` for
mixtures of experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.rates.card import Card, domain_of
from autopar.rates.collectives import GroupShape, SiteFactors, collective_time_s
from autopar.rates.constants import ELEMENT_BYTES, Kernels, kernels_of
from autopar.rates.kernels import LinearTimes
from autopar.rates.memory_bound import cast_s, elements_s
from autopar.rates.site import Site
from autopar.rates.stack import Stack
from autopar.records import Record, replace
from autopar.run.job import Job

Kind = Literal["gemm", "attention", "memory", "cast"]


class Machine(Record):
    """A device, its network, and the software stack of an engine."""

    card: Card
    kernels: Kernels
    """Kernel constants, scaled to the site's HBM rate."""
    clock: float
    """Sustained rate of a run over that of a short benchmark."""
    factors: SiteFactors
    stack: Stack
    domain_gpus: int


def machine_of(
    card: Card, stack: Stack, site: Site | None = None, *, gpus: int | None = None
) -> Machine:
    """Return a machine with a card's devices; known figures of a site replace the card's.

    gpus : number of GPUs of the run, which fill racks equally; None: racks are full.

    Raises DocumentError if the card has no kernel times or the site was measured on another card.
    """
    kernels = kernels_of(card)
    clock, factors = kernels.clock, SiteFactors()
    if site is not None:
        site.require_card(card)
        factors = site.factors
        if site.clock is not None:
            clock, kernels = site.clock, kernels.relative_to_products()
        card = replace(card, network=site.network(card.network))
        if site.elementwise_share is not None:
            # Shares of all classes scale together: they refer to one memory.
            scale = site.elementwise_share / kernels.memory_share("elementwise")
            kernels = replace(kernels, memory_bytes_per_s=kernels.memory_bytes_per_s * scale)
    return Machine(
        card=card,
        kernels=kernels,
        clock=clock,
        factors=factors,
        stack=stack,
        domain_gpus=(card.domain_gpus or card.max_gpus_per_node)
        if gpus is None
        else domain_of(card, gpus),
    )


def group(machine: Machine, ranks: int, stride: int) -> GroupShape:
    """Return the shape of groups of `ranks` GPUs `stride` apart, tensor ranks innermost."""
    return GroupShape.even(ranks=ranks, per_node=max(1, machine.domain_gpus // stride))


Real = float | F64
"""A size or a time; an array for many ranks and batches at once."""


class RankShape(NamedTuple):
    """Tokens of a micro-batch and layer widths on one rank; numbers, or arrays that broadcast."""

    sequences: Real
    """Number of sequences of the micro-batch."""
    tokens: Real
    """Tokens of linear layers."""
    outside: Real
    """Tokens of norms and residual sums."""
    routed: Real
    """Tokens routed to experts."""
    tensor: Real
    """Number of ranks that share the widths of linear layers."""
    expert_tensor: Real
    """Number of ranks that share the widths of experts."""
    heads: Real
    """Number of ranks that share the attention heads."""


def split_of(job: Job) -> RankShape:
    """Return the split of a job's micro-batch and widths for one rank."""
    inner = job.tp if job.sequence_parallel else 1
    return RankShape(
        sequences=job.micro_batch,
        tokens=job.tokens,
        outside=job.tokens / inner,
        # Tensor ranks route their own tokens to whole experts.
        routed=job.tokens / job.tp,
        tensor=job.tp,
        expert_tensor=job.etp,
        heads=job.tp,
    )


class KernelTime(NamedTuple):
    """Seconds of one operation of a layer, for one micro-batch on one rank."""

    name: str
    module: str
    kind: Kind
    forward_s: Real
    input_s: Real
    """Seconds of the input gradient."""
    weight_s: Real = 0.0
    full: float = 1.0
    """Fraction of the forward that full recomputation repeats."""
    per_op: float | None = None
    """Fraction of the forward that torchtitan's per-op recomputation repeats; None: by kind."""


class CommunicationTime(NamedTuple):
    """Communication time of one layer and micro-batch, in seconds."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    calls: float = 0.0
    """Number of collectives of forward and backward together, for the host overhead."""


# --------------------------------------------------------------------------------------------------
# Kernels


def element_part(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    operation: str,
    elements: Real,
    *,
    gated: bool = False,
) -> KernelTime:
    """Return the kernel time of a memory-bound operation, with the stack's bytes per element."""
    # The stack counts bytes in 16 bits; fp32 moves twice as many.
    width = max(1.0, ELEMENT_BYTES[job.precision] / ELEMENT_BYTES["bf16"])
    forward, backward = (
        width * machine.stack.element_bytes(operation, backward=side, gated=gated)
        for side in (False, True)
    )
    return KernelTime(
        name,
        module,
        "memory",
        elements_s(machine.kernels, elements, forward) if forward else 0.0,
        elements_s(machine.kernels, elements, backward) if backward else 0.0,
    )


def product_part(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    times: LinearTimes,
    weights: Real,
    dtype: str,
    per_op: float | None = None,
) -> KernelTime:
    """Return the GEMM times of a linear layer, with gradient accumulation of its weights."""
    forward, inner, outer = times
    if job.row_scales and ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"]:
        rate = machine.stack.figures.cast["row_scales_rate"]
        forward, inner, outer = forward / rate, inner / rate, outer / rate
    moved = accumulation_bytes(machine, job)
    if job.frozen:
        outer = np.zeros_like(outer)
    elif moved:
        outer = outer + elements_s(machine.kernels, weights, moved, kind="optimizer")
    return KernelTime(name, module, "gemm", forward, inner, outer, per_op=per_op)


def accumulation_bytes(machine: Machine, job: Job) -> float:
    """Return the bytes moved per weight and micro-batch to accumulate its gradient."""
    if job.accumulation_bytes is not None:
        return job.accumulation_bytes
    return machine.stack.figures.gradient["accumulation_bytes"]


def cast_parts(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    dtype: str,
    inputs: Real | None,
    outputs: Real | None,
) -> Iterator[KernelTime]:
    """Yield the quantisation of a GEMM's inputs (forward) and of its output gradient (backward).

    inputs, outputs : number of elements; None if the preceding kernel wrote them in low precision.
    """
    moved = machine.stack.figures.cast["row_bytes" if job.row_scales else "bytes"]
    if ELEMENT_BYTES[dtype] >= ELEMENT_BYTES["bf16"] or not moved:
        return
    forward, backward = (
        0.0
        if elements is None
        else cast_s(machine.kernels, elements, dtype=dtype, bytes_per_element=moved)
        for elements in (inputs, outputs)
    )
    yield KernelTime(f"{name} cast", module, "cast", forward, backward)


def as_number(value: Real) -> Any:
    """Return a number or an array of one element as a float, and a larger array unchanged."""
    return value if np.ndim(value) else float(value)


def transfer_s(
    machine: Machine, operation: str, size_bytes: Real, ranks: int, stride: int
) -> float:
    """Return the seconds of a collective in groups of `ranks` GPUs, `stride` apart.

    A number for one size, an array for an array.
    """
    if ranks == 1:
        return 0.0
    shape = group(machine, ranks, stride)
    found: float = collective_time_s(
        machine.card.network, operation, as_number(size_bytes), shape, machine.factors
    )
    return found
