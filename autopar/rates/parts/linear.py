"""Linear layers: their products, and the thin ones of adapters beside them.

An adapter's products are tokens x rank x inputs and tokens x outputs x rank, forward and for both
gradients (Hu et al., arXiv 2106.09685); frozen matrices of few bits are made whole in 16 in front
of each product (Dettmers et al., arXiv 2305.14314).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.rates.kernels import grouped_linear_s, linear_s
from autopar.rates.memory_bound import elements_s
from autopar.rates.parts.operations import (
    Machine,
    Part,
    Real,
    Split,
    cast_parts,
    element_part,
    product_part,
)
from autopar.run.job import Job
from autopar.training.adapters import Target, adapted_widths, base_bytes

Beside = Sequence[tuple[Target, Real]]
"""What of a matrix adapters can stand beside, with its outputs on a rank."""

_ADDED = 6.0
"""Bytes per output: what B made, scaled by its own kernel, is added to what the matrix made."""
_GIVEN_BACK = 6.0
"""Bytes per input: its gradient is a sum, too."""
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
) -> Iterator[Part]:
    """Yield a linear layer's products, its gradient's accumulation and its casts.

    beside : where adapters may stand; they, and making the frozen matrix, are yielded as well.
    """
    dtype = "bf16" if job.experts_only and job.precision not in ("fp16", "fp32") else job.precision
    clock = machine.kernels.product_clock(dtype, machine.clock)
    times = linear_s(
        machine.kernels,
        tokens,
        outputs,
        inputs,
        dtype=dtype,
        clock=clock,
        sustained=True,
        cast=False,
    )
    yield product_part(machine, job, name, module, times, outputs * inputs, dtype)
    yield from cast_parts(machine, job, name, module, dtype, tokens * inputs, tokens * outputs)
    if beside:
        yield from dequantised_parts(machine, job, name, module, outputs * inputs)
        yield from adapter_parts(machine, job, name, module, tokens, inputs, beside)


def dequantised_parts(
    machine: Machine, job: Job, name: str, module: str, weights: Real
) -> Iterator[Part]:
    """Yield making a frozen matrix of few bits whole, in front of its product and its gradient."""
    adapters = job.adapters
    if adapters is None or adapters.base == "16 bits":
        return
    # read as it is kept, written in 16 bits
    once = elements_s(machine.kernels, weights, base_bytes(adapters) + 2.0)
    yield Part(f"{name} in 16 bits", module, "cast", once, once)


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
) -> Iterator[Part]:
    """Yield the products and sums of a matrix's adapters, in 16 bits.

    groups : experts of the rank that have an adapter each, and `tokens` of each of them; None: one
    matrix of all tokens.
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
        # a trained weight's gradient is written once, and added up in so few bytes for nothing
        yield Part(f"{name} adapter {index}", module, "gemm", *seconds)
        dropped = _DROPPED if adapters.dropout else 0.0
        # sums over outputs, and over inputs in the backward
        forward = elements_s(kernels, everyone * width, _ADDED)
        backward = elements_s(kernels, everyone * inputs, _GIVEN_BACK + dropped)
        if dropped:
            forward = forward + elements_s(kernels, everyone * inputs, dropped)
        yield Part(f"{name} adapter {index} sums", module, "memory", forward, backward)


def mlp_parts(
    machine: Machine,
    job: Job,
    hidden: int,
    width: int,
    gated: bool,
    module: str,
    split: Split,
) -> Iterator[Part]:
    """Yield an MLP on all tokens; `module` also names its parts."""
    gates, inner = 2 if gated else 1, width / split.tensor
    n, first = split.tokens, gates * inner
    up: Beside = [("fc1", inner)] * gates
    down: Beside = [("fc2", hidden)]
    yield from linear_parts(machine, job, f"{module} up", module, n, first, hidden, up)
    yield from linear_parts(machine, job, f"{module} down", module, n, hidden, inner, down)
    name = f"{module} activation"
    yield element_part(machine, job, name, module, "activation", n * first, gated=gated)
