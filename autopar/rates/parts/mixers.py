"""Kernels of mixers other than attention: scans, delta rules, convolutions, lightning attention."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.memory_bound import elements_s
from autopar.rates.parts.linear import Beside, linear_parts
from autopar.rates.parts.operations import KernelTime, Machine, RankShape, element_part
from autopar.run.architecture import (
    DeltaNet,
    KimiDelta,
    LightningAttention,
    Mamba,
    Recurrent,
    ShortConvolution,
    input_matrices,
    rank_matrices,
)
from autopar.run.job import Job

SCAN_FLOP = 2600.0, 5200.0
"""Peak fp32 FLOP of the vector units in the time that convolution, gate and scan take per token and
element of a mixer's inner width: forward, backward. From published steps of Nemotron 3 Nano; its
state is 128. Kernels on Hopper and Blackwell differ as their vector units do, not as their HBM."""
_MAMBA_RATE = 0.25
"""Fraction of the peak that the GEMMs of a scan reach."""
_SCAN_KERNELS = 6
"""Kernels of convolution, gate and scan, each with a launch."""


_DELTA_RATES = 1.13, 0.59
"""Counted FLOP of a delta rule over those of the vector units in its time: forward, backward.

From published times of flash-linear-attention with heads of 128. The forward of 8,192 tokens and 96
heads takes 2.03 ms on H800 (PaddlePaddle/flash-attention, pull request 133). Forward and backward
of 32,768 tokens and 32 heads take 15.8 ms on H200 (fla-org/flash-linear-attention, issue 645). This
rate predicts 1.8 ms on B200 for the first, where 1.49 ms were measured (flashinfer-ai/flashinfer,
pull request 2742)."""


def mixer_parts(
    machine: Machine, job: Job, hidden: int, mixer: Recurrent, split: RankShape
) -> Iterator[KernelTime]:
    """Yield the kernels of a mixer other than attention, with its projections."""
    n, t = split.tokens, split.tensor
    first: Beside = [("mixer_in", width / t) for width in input_matrices(mixer)]
    last: Beside = [("mixer_out", hidden)]
    outputs, inner = mixer.projected / t, mixer.inner / t
    apart = input_matrices(mixer) if isinstance(mixer, KimiDelta) else ()
    yield from linear_parts(
        machine, job, "mixer in", "mixer", n, outputs, hidden, first, apart=apart
    )
    for rows, columns in rank_matrices(mixer):
        yield from linear_parts(machine, job, "mixer rank", "mixer", n, rows, columns)
    yield from linear_parts(machine, job, "mixer out", "mixer", n, hidden, inner, last)
    if isinstance(mixer, Mamba):
        yield _scan(machine, job, mixer, split)
    elif isinstance(mixer, ShortConvolution):
        yield _convolution(machine, job, mixer, split)
    elif isinstance(mixer, LightningAttention):
        yield from _lightning(machine, job, mixer, split)
    elif isinstance(mixer, KimiDelta):
        yield from _kimi_parts(machine, job, mixer, split)
    else:
        yield from _delta_parts(machine, job, mixer, split)


_DECAY_BYTES = (64.0, 104.0)
"""Bytes per channel and token that the fp32 operators of a decay read and write, forward and
backward: cast, sum, softplus of five operators, product (transformers 5.24, models/kimi_linear)."""
_DECAY_KERNELS = (8, 13)


def _kimi_parts(
    machine: Machine, job: Job, mixer: KimiDelta, split: RankShape
) -> Iterator[KernelTime]:
    """Yield the kernels of Kimi delta attention between its projections.

    The decay is made by operators of transformers; the rule takes the time of a gated delta net.
    """
    inner = split.tokens * mixer.inner
    forward, backward = (
        elements_s(machine.kernels, inner, moved, count=count)
        for moved, count in zip(_DECAY_BYTES, _DECAY_KERNELS, strict=True)
    )
    yield KernelTime("decay", "mixer", "memory", forward, backward)
    alike = DeltaNet(
        key_heads=mixer.heads,
        value_heads=mixer.heads,
        key_width=mixer.width,
        value_width=mixer.width,
        kernel=mixer.kernel,
    )
    yield from _delta_parts(machine, job, alike, split)


def _delta_parts(
    machine: Machine, job: Job, delta: DeltaNet, split: RankShape
) -> Iterator[KernelTime]:
    """Yield the kernels of a gated delta net between its projections.

    Queries and keys are normed, then repeated to the heads of the values; the output is normed and
    gated (Megatron-Core d98e8a64, core/ssm/gated_delta_net).
    """
    n, t = split.tokens, split.tensor
    repeated = 2 * delta.value_heads * delta.key_width if delta.value_heads > delta.key_heads else 0
    for name, module, operation, width in (
        ("convolution", "mixer", "layout", delta.convolved),
        ("norms of keys", "mixer", "norm", 2 * delta.keys),
        ("repeated keys", "mixer", "layout", repeated),
        ("gated norm", "gdn_norm_out", "norm", delta.inner),
        ("output gate", "gdn_norm_out", "residual", delta.inner),
    ):
        if width:
            yield element_part(machine, job, name, module, operation, n * width / t)
    keys, values = delta.key_width, delta.value_width
    # products within a chunk, and of keys and values with the state (arXiv 2406.06484, section 3)
    each = 4 * delta.chunk * (2 * keys + values) + 6 * keys * values
    flop = n * delta.value_heads / t * each
    vectors = machine.kernels.flop_per_s["fp32"]
    forward, backward = (
        passes * flop / (vectors * rate)
        for passes, rate in zip((1.0, 2.5), _DELTA_RATES, strict=True)
    )
    yield KernelTime("delta rule", "mixer", "memory", forward, backward)


_CONVOLUTION_BYTES = (20.0, 46.0)
"""Bytes per channel and token that the kernels of a short convolution read and write, forward and
backward. Forward: two gates, convolution, copy. Backward: their gradients and the projected input's
(transformers 5.24, models/lfm2, with causal_conv1d)."""
_CONVOLUTION_KERNELS = (4, 8)


def _convolution(
    machine: Machine, job: Job, mixer: ShortConvolution, split: RankShape
) -> KernelTime:
    """Return the time of gates and convolution of a short convolution."""
    wide = max(1.0, ELEMENT_BYTES[job.precision] / ELEMENT_BYTES["bf16"])
    forward, backward = (
        elements_s(machine.kernels, split.tokens * mixer.inner, wide * moved, count=count)
        for moved, count in zip(_CONVOLUTION_BYTES, _CONVOLUTION_KERNELS, strict=True)
    )
    return KernelTime("short convolution", "mixer", "memory", forward, backward)


_LIGHTNING_ELEMENTS = (24.0, 4.0, 5.0)
"""Elements that the loop of lightning attention reads and writes forward, per element of a token's
values, of its scores, and of a block's state (transformers 5.24, models/minimax)."""
_LIGHTNING_KERNELS = (11, 25)
"""Kernels of one block of tokens, forward and backward."""


def _lightning(
    machine: Machine, job: Job, mixer: LightningAttention, split: RankShape
) -> Iterator[KernelTime]:
    """Yield the kernels of lightning attention between its projections.

    Products with keys and values of a block, and with the state of earlier ones; their backward has
    twice the products. Operands are read from memory each time.
    """
    n, chunk = split.tokens, min(mixer.chunk, job.seq)
    values, scores, states = _LIGHTNING_ELEMENTS
    each = values * mixer.inner + scores * mixer.heads * chunk
    each += states * mixer.inner * mixer.width / chunk
    moved = 2 * max(1.0, ELEMENT_BYTES[job.precision] / ELEMENT_BYTES["bf16"])
    dtype = job.precision if job.precision in ("fp16", "fp32") else "bf16"
    flop = 4 * n * mixer.inner * (chunk + mixer.width)
    products = flop / (machine.kernels.flop_per_s[dtype] * machine.clock)
    forward, backward = (
        passes * products + elements_s(machine.kernels, n * each, passes * moved, count=kernels)
        for passes, kernels in zip((1, 2), _launches(job, mixer), strict=True)
    )
    yield KernelTime("lightning attention", "mixer", "memory", forward, backward)
    for name, operation in (("mixer norm", "norm"), ("mixer gate", "residual")):
        yield element_part(machine, job, name, "mixer", operation, n * mixer.inner)


def _scan(machine: Machine, job: Job, mamba: Mamba, split: RankShape) -> KernelTime:
    """Return the time of convolution, gate and scan of a Mamba-2 mixer."""
    n, inner = split.tokens, mamba.inner / split.tensor
    # 2 n d (2 N + c): states in and out, and within a chunk of c tokens.
    flop = 2 * n * inner * (2 * mamba.state + mamba.chunk)
    dtype = job.precision if job.precision in ("fp16", "fp32") else "bf16"
    scan = flop / (machine.kernels.flop_per_s[dtype] * _MAMBA_RATE)
    launches = _SCAN_KERNELS * machine.kernels.section.memory_launch["launch_s"]
    forward, backward = (
        n * inner * each / machine.kernels.flop_per_s["fp32"] + launches for each in SCAN_FLOP
    )
    return KernelTime("mixer", "mixer", "memory", forward + scan, backward + 2 * scan)


_LAYER_KERNELS = (40.0, 60.0)
"""Kernels of a usual eager layer, forward and backward: norms and rotary positions of several
operators, GEMMs, attention, MLP, and their gradients (transformers 5.24, models/llama)."""


def loops_of(job: Job, mixer: Recurrent) -> tuple[float, float]:
    """Return `LayerTimes.loops` of a mixer."""
    if not isinstance(mixer, LightningAttention):
        return 0.0, 0.0
    forward, backward = _launches(job, mixer)
    return forward / _LAYER_KERNELS[0], backward / _LAYER_KERNELS[1]


def _launches(job: Job, mixer: LightningAttention) -> tuple[float, float]:
    """Return the kernels of all blocks of tokens, forward and backward."""
    blocks = math.ceil(job.seq / mixer.chunk)
    forward, backward = _LIGHTNING_KERNELS
    return blocks * forward, blocks * backward
