"""Linear layers: their GEMMs, and the low-rank GEMMs of adapters.

An adapter's GEMMs are tokens x rank x inputs and tokens x outputs x rank, forward and for both
gradients (Hu et al., arXiv 2106.09685). Frozen matrices in low precision are dequantised to 16 bits
before each GEMM (Dettmers et al., arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.rates.kernels import LinearTimes, grouped_linear_s, linear_s
from autopar.rates.memory_bound import elements_s
from autopar.rates.parts.operations import (
    KernelTime,
    Machine,
    RankShape,
    Real,
    as_number,
    cast_parts,
    element_part,
    product_part,
)
from autopar.run.job import Job
from autopar.training.adapters import Target, adapted_widths, base_bytes

Beside = Sequence[tuple[Target, Real]]
"""(Target, outputs per rank) of the parts of a matrix that adapters can be attached to."""

_ADDED = 6.0
"""Bytes per output: the result of B, scaled by a separate kernel, is added to the matrix's result.
"""
_GIVEN_BACK = 6.0
"""Bytes per input: the input gradient is a sum as well."""
_DROPPED = 5.0
"""Bytes per input of dropout, each way: 16 bits read and written, a byte of mask."""


def linear_parts(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    tokens: Real,
    outputs: Real,
    inputs: Real,
    beside: Beside = (),
    *,
    apart: Sequence[Real] = (),
    per_op: float | None = None,
) -> Iterator[KernelTime]:
    """Yield kernel times of a linear layer: GEMMs, gradient accumulation and casts.

    beside : possible targets of adapters; if given, parts of adapters and of the dequantisation of
        the frozen matrix are yielded as well.
    apart : outputs of the separate matrices that make up the layer; empty: one matrix.
    per_op : as in `KernelTime`; of separate matrices, every second one is repeated.
    """
    dtype = "bf16" if job.experts_only and job.precision not in ("fp16", "fp32") else job.precision
    clock = machine.kernels.product_clock(dtype, machine.clock)
    each = [
        linear_s(
            machine.kernels,
            tokens,
            width,
            inputs,
            dtype=dtype,
            clock=clock,
            sustained=True,
            cast=False,
        )
        for width in (apart or (outputs,))
    ]
    times = LinearTimes(*(sum(parts) for parts in zip(*each, strict=True)))
    if apart:
        per_op = as_number(sum(one.forward_s for one in each[1::2]) / times.forward_s)
    yield product_part(machine, job, name, module, times, outputs * inputs, dtype, per_op=per_op)
    yield from cast_parts(machine, job, name, module, dtype, tokens * inputs, tokens * outputs)
    if beside:
        yield from dequantised_parts(machine, job, name, module, outputs * inputs)
        yield from adapter_parts(machine, job, name, module, tokens, inputs, beside)


def dequantised_parts(
    machine: Machine, job: Job, name: str, module: str, weights: Real
) -> Iterator[KernelTime]:
    """Yield the dequantisation of a frozen low-precision matrix, forward and backward."""
    adapters = job.adapters
    if adapters is None or adapters.base == "16 bits":
        return
    # Read in the stored precision, written in 16 bits.
    once = elements_s(machine.kernels, weights, base_bytes(adapters) + 2.0)
    yield KernelTime(f"{name} in 16 bits", module, "cast", once, once)


def adapter_parts(
    machine: Machine,
    job: Job,
    name: str,
    module: str,
    tokens: Real,
    inputs: Real,
    beside: Beside,
    *,
    groups: Real | None = None,
) -> Iterator[KernelTime]:
    """Yield the GEMMs and sums of a matrix's adapters, in 16 bits.

    groups : number of local experts with one adapter each, where `tokens` is per expert; None: one
    adapter for all tokens.
    """
    adapters, kernels = job.adapters, machine.kernels
    if adapters is None:
        return
    clock = kernels.product_clock("bf16", machine.clock)
    everyone = tokens if groups is None else tokens * groups
    for index, width in enumerate(adapted_widths(adapters, beside)):
        seconds: list[Real] = [0.0, 0.0, 0.0]
        for outputs, columns in ((adapters.rank, inputs), (width, adapters.rank)):
            times = (
                linear_s(
                    kernels, tokens, outputs, columns,
                    dtype="bf16", clock=clock, sustained=True, cast=False,
                )
                if groups is None
                else grouped_linear_s(
                    kernels, tokens, groups, outputs, columns,
                    dtype="bf16", clock=clock, sustained=True, cast=False,
                )
            )  # fmt: skip
            seconds = [one + other for one, other in zip(seconds, times, strict=True)]
        # The gradient of an adapter weight is written once; its few accumulated bytes are ignored.
        ahead, inner, outer = seconds
        yield KernelTime(f"{name} adapter {index}", module, "gemm", ahead, inner, outer)
        dropped = _DROPPED if adapters.dropout else 0.0
        # Sums over outputs, and over inputs in the backward.
        forward = elements_s(kernels, everyone * width, _ADDED)
        backward = elements_s(kernels, everyone * inputs, _GIVEN_BACK + dropped)
        if dropped:
            forward = forward + elements_s(kernels, everyone * inputs, dropped)
        yield KernelTime(f"{name} adapter {index} sums", module, "memory", forward, backward)


def mlp_parts(
    machine: Machine,
    job: Job,
    hidden: int,
    width: int,
    gated: bool,
    module: str,
    split: RankShape,
) -> Iterator[KernelTime]:
    """Yield kernel times of a dense MLP or shared expert; part names start with `module`."""
    gates, inner = 2 if gated else 1, width / split.tensor
    n, first = split.tokens, gates * inner
    up: Beside = [("fc1", inner)] * gates
    down: Beside = [("fc2", hidden)]
    apart = (inner, inner) if gated and job.torch_layers else ()
    # Queries, keys, values, projection, gate, up, down: every second one is repeated.
    yield from linear_parts(
        machine, job, f"{module} up", module, n, first, hidden, up,
        apart=apart, per_op=None if gated else 0.0,
    )  # fmt: skip
    for part in linear_parts(
        machine, job, f"{module} down", module, n, hidden, inner, down, per_op=float(not gated)
    ):
        ends = job.torch_layers and part.name == f"{module} down"
        yield part._replace(full=0.0) if ends else part
    name = f"{module} activation"
    yield element_part(machine, job, name, module, "activation", n * first, gated=gated)
