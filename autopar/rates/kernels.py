"""Times of GEMMs and attention kernels from the constants of a card.

A GEMM is modelled by its tiles, their waves over the multiprocessors and the possible splits of its
inner dimension; attention by the pairs of tokens it visits. Every function takes arrays of shapes
and computes all times at once. Memory-bound kernels are in `autopar.rates.memory_bound`, and layers
are put together in `autopar.rates.layer`.

Times are those of a short benchmark unless `clock` and `sustained` are set: `Kernels.clock` is the
fraction of that rate which a training run sustains.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from autopar.arrays import F64, Bool
from autopar.rates.constants import ELEMENT_BYTES, Kernels
from autopar.rates.memory_bound import memory_bound_s

Phase = Literal["forward", "backward"]

# --------------------------------------------------------------------------------------------------
# GEMM

_TILES = (
    (256, 256),
    (256, 128),
    (128, 256),
    (128, 128),
    (256, 64),
    (64, 256),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
)
"""Rows and columns of the result per thread block, as offered by cuBLAS and CUTLASS."""
_TILE_SIDES = np.array(_TILES, dtype=np.float64).T[:, :, None]
"""`_TILES` as arrays of shape [tiles, 1]: rows, and columns."""
_SPLITS = (1, 2, 4, 8)
"""Split-K factors: parts of the inner dimension computed by separate blocks."""
_BEST_TILE = 256 * 128 / (256 + 128)
"""tm tn / (tm + tn) of the tile 256 x 128: larger tiles have no higher rate."""
_SPLIT_MEMORY_SHARE = 0.8
"""Fraction of the HBM rate at which partial sums of split GEMMs are written and added."""
_LONG_S = 1e-3
"""Kernel length in seconds above which a kernel draws full power and the clock falls."""
_SUSTAINED_SLOWDOWN = 0.4
"""Fraction of the slow-down of long kernels that applies in a run, where the clock is low already;
fitted to published runs with small and large GEMMs."""
_ALIGNMENT = 8
_MISALIGNED = 2.95
"""Slowdown of weights with a dimension that is no multiple of 8: vTrain's head of 50,257 rows."""
_WEIGHT_GRADIENT_RATE = 0.94
"""Rate of the weight gradient (both inputs transposed) over the forward's.

SimuMax's tables have 1/1.07 on B200 and 1/1.06 on A100 PCIe; the input gradient is within 1.5 % of
the forward.
"""
_GROUPED_WEIGHT_GRADIENT_RATE = 0.8
"""Rate of the weight gradient of grouped GEMMs over the grouped forward's: SimuMax has 0.66 on B200
and 0.82 on A100 PCIe."""
_BLOCK = 512
"""Shapes computed at a time, so that the intermediate arrays fit in the cache of one core."""


_MOST_SINGLE = 1 << 14
"""Size of the cache of single GEMM times: a search asks for the same shapes repeatedly."""


class _Run(NamedTuple):
    """Conditions of a GEMM: precision, clock, and whether it is part of a long run."""

    dtype: str
    clock: float
    sustained: bool


class _Surface(NamedTuple):
    """Constants of a card that determine GEMM times, in base units."""

    flop_per_s: float
    memory_bytes_per_s: float
    num_sms: int
    peak_share: float
    wave_rounding: float
    prologue_elements: float
    tile_exponent: float
    split_s: float
    slowdown: float
    memory_share: float
    launch_s: float


def _surface(kernels: Kernels, dtype: str) -> _Surface:
    figure = kernels.gemm(dtype)
    return _Surface(
        kernels.flop_per_s[dtype],
        kernels.memory_bytes_per_s,
        kernels.num_sms,
        *(figure[name] for name in _Surface._fields[3:]),
    )


class LinearTimes(NamedTuple):
    """Seconds of the three GEMMs of a linear layer."""

    forward_s: F64
    input_gradient_s: F64
    weight_gradient_s: F64


def gemm_s(
    kernels: Kernels,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    dtype: str = "bf16",
    batch: ArrayLike = 1,
    clock: float = 1.0,
    sustained: bool = False,
    cast: bool = True,
) -> F64:
    """Return the seconds of `batch` GEMMs out[m, n] = x[m, k] w[n, k]^T.

    Arrays broadcast; sizes are elements. Time =
    max(min over tile and split of [q 2 tm tn (k/s + k0) / (P eff) + split], bytes / (hb HBM)) + t0
    with P = peak c clock / SMs, x = batch ceil(m/tm) ceil(n/tn) s / SMs, q = max(1, w ceil(x) +
    (1-w) x), eff = min(1, tile / 85.3)^a and tile = tm tn / (tm + tn). The first term grows by 1 +
    z ln(1 + t / 1 ms), since a long kernel lowers the clock. With `sustained` z is reduced to 0.4
    z, because a run has lowered the clock already; this does not depend on `clock`. With `cast`,
    low precisions include the quantisation of x, as in the tables that the constants were fitted
    to. Raises InputError if the card lacks the precision.
    """
    m, n, k, batch = _floats(m, n, k, batch)
    run = _Run(dtype, clock, sustained)
    time = _gemm(kernels, m, n, k, batch, run, _misaligned(n, k, dtype))
    return time + _cast(kernels, batch * m * k, dtype) if cast else time


def linear_s(
    kernels: Kernels,
    tokens: ArrayLike,
    outputs: ArrayLike,
    inputs: ArrayLike,
    *,
    dtype: str = "bf16",
    clock: float = 1.0,
    sustained: bool = False,
    cast: bool = True,
) -> LinearTimes:
    """Return the seconds of a linear layer's forward, input gradient and weight gradient.

    The gradients of (m, n, k) are the GEMMs (m, k, n) and (n, k, m). The latter reads both inputs
    transposed and runs at 0.94 of the rate. `cast` adds one quantisation of the input and one of
    the output's gradient, which both gradients share. Raises InputError if the card lacks the
    precision.
    """
    m, n, k = _floats(tokens, outputs, inputs)
    one, run = np.ones_like(m), _Run(dtype, clock, sustained)
    forward, inner, outer = _three(kernels, (m, n, k, one), run, _misaligned(n, k, dtype))
    outer = outer / _WEIGHT_GRADIENT_RATE
    if cast:
        forward = forward + _cast(kernels, m * k, dtype)
        inner = inner + _cast(kernels, m * n, dtype)
    return LinearTimes(forward, inner, outer)


def grouped_gemm_s(
    kernels: Kernels,
    rows: ArrayLike,
    groups: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    *,
    dtype: str = "bf16",
    fused: bool = False,
    clock: float = 1.0,
    sustained: bool = False,
    pad: int = 1,
    cast: bool = True,
) -> F64:
    """Return the seconds of `groups` GEMMs [rows, k] x [n, k]^T in one kernel.

    rows : rows of one group, such as the tokens of an expert, padded to multiples of `pad` (128 for
        block-scaled precisions).
    fused : True for kernels that run an expert's whole MLP in one launch.

    t = batched / share + groups x group_s: the batched GEMM at the card's relative rate of grouped
    ones, and for each expert's GEMM its tail and, unless fused, its launch. Raises InputError if
    the card lacks the precision.
    """
    rows, groups, n, k = _floats(rows, groups, n, k)
    rows = np.ceil(rows / pad) * pad
    run, slow = _Run(dtype, clock, sustained), _misaligned(n, k, dtype)
    figure = _grouped(kernels, dtype, fused=fused)
    time = _gemm(kernels, rows, n, k, groups, run, slow) / figure.share + groups * figure.group_s
    return time + _cast(kernels, groups * rows * k, dtype) if cast else time


def grouped_linear_s(
    kernels: Kernels,
    rows: ArrayLike,
    groups: ArrayLike,
    outputs: ArrayLike,
    inputs: ArrayLike,
    *,
    dtype: str = "bf16",
    fused: bool = False,
    clock: float = 1.0,
    sustained: bool = False,
    pad: int = 1,
    cast: bool = True,
) -> LinearTimes:
    """Return the seconds of the experts' linear layers: forward, input and weight gradient.

    Like `linear_s` for each group. The inner dimension of weight gradients is the small number of
    rows of a group; they run at 0.8 of the rate. Raises InputError if the card lacks the precision.
    """
    m, groups, n, k = _floats(rows, groups, outputs, inputs)
    m = np.ceil(m / pad) * pad
    run, figure = _Run(dtype, clock, sustained), _grouped(kernels, dtype, fused=fused)
    forward, inner, outer = (
        time / figure.share + groups * figure.group_s
        for time in _three(kernels, (m, n, k, groups), run, _misaligned(n, k, dtype))
    )
    if cast:
        forward = forward + _cast(kernels, groups * m * k, dtype)
        inner = inner + _cast(kernels, groups * m * n, dtype)
    return LinearTimes(forward, inner, outer / _GROUPED_WEIGHT_GRADIENT_RATE)


class _Grouped(NamedTuple):
    """Rate of a grouped GEMM over that of a batched one, and seconds of each group."""

    share: float
    group_s: float


def _grouped(kernels: Kernels, dtype: str, *, fused: bool) -> _Grouped:
    figure = kernels.section.grouped_gemm
    if fused:
        share = kernels.section.fused_grouped_gemm["share"]
    else:
        share = figure["narrow_share" if ELEMENT_BYTES[dtype] < ELEMENT_BYTES["bf16"] else "share"]
    return _Grouped(share, figure["group_s"])


def _three(
    kernels: Kernels, sizes: tuple[F64, F64, F64, F64], run: _Run, slow: Bool
) -> tuple[F64, F64, F64]:
    """Return the seconds of a layer's GEMMs (m, n, k, batch): forward, input, weight gradient."""
    m, n, k, batch = sizes
    if m.size > 1:
        return (
            _gemm(kernels, m, n, k, batch, run, slow),
            _gemm(kernels, m, k, n, batch, run, slow),
            _gemm(kernels, n, k, m, batch, run, slow),
        )
    one = _single_three(_surface(kernels, run.dtype), run, *(float(size.item()) for size in sizes))
    forward, inner, outer = (np.where(slow, _MISALIGNED * time, time) for time in one)
    return forward, inner, outer


@lru_cache(maxsize=_MOST_SINGLE)
def _single_three(
    surface: _Surface, run: _Run, m: float, n: float, k: float, batch: float
) -> tuple[float, float, float]:
    """Return the seconds of the three GEMMs of a layer, computed in one call and cached."""
    shapes = np.array([[m, n, k, batch], [m, k, n, batch], [n, k, m, batch]])
    forward, inner, outer = _block(surface, [*shapes.T.copy()], run).tolist()
    return forward, inner, outer


def _misaligned(n: F64, k: F64, dtype: str) -> Bool:
    """Return a mask of weights [n, k] that tensor cores cannot load in whole vectors.

    The number of tokens is no stride of row-major inputs, so that only the weight must be aligned.
    """
    aligned: Bool = (n % _ALIGNMENT == 0) & (k % _ALIGNMENT == 0)
    # Kernels without tensor cores have no alignment rule.
    return ~aligned & (ELEMENT_BYTES[dtype] < ELEMENT_BYTES["fp32"])


def _cast(kernels: Kernels, elements: F64, dtype: str) -> F64 | float:
    """Return the seconds of quantising a 16-bit operand; its launch is part of the GEMM's t0."""
    size = ELEMENT_BYTES[dtype]
    if size >= ELEMENT_BYTES["bf16"]:
        return 0.0
    # The operand is read in 16 bits and written in low precision; a cast_share below 1 also covers
    # the pass that finds the largest element.
    rate = kernels.gemm(dtype)["cast_share"] * kernels.memory_bytes_per_s
    return elements * (ELEMENT_BYTES["bf16"] + size) / rate


def _floats(*sizes: ArrayLike) -> tuple[F64, ...]:
    return tuple(np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in sizes)))


def _gemm(kernels: Kernels, m: F64, n: F64, k: F64, batch: F64, run: _Run, slow: Bool) -> F64:
    """Return the seconds of batched GEMMs for arrays of one shape, computed in blocks."""
    surface = _surface(kernels, run.dtype)
    shape = m.shape
    flat = [np.ascontiguousarray(size).ravel() for size in (m, n, k, batch)]
    time: F64 = np.empty(flat[0].size)
    if time.size == 1:
        time[0] = _single(surface, run, *(float(size[0]) for size in flat))
    else:
        for start in range(0, time.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            time[part] = _block(surface, [size[part] for size in flat], run)
    time = time.reshape(shape)
    return np.where(slow, _MISALIGNED * time, time)


@lru_cache(maxsize=_MOST_SINGLE)
def _single(surface: _Surface, run: _Run, m: float, n: float, k: float, batch: float) -> float:
    """Return the seconds of one GEMM; cached, since one shape costs as much as a whole block."""
    return float(_block(surface, [np.array([size]) for size in (m, n, k, batch)], run)[0])


def _block(surface: _Surface, sizes: Sequence[F64], run: _Run) -> F64:
    """Return the seconds of one block of shapes (m, n, k, batch); see `gemm_s` for the formula."""
    m, n, k, batch = sizes
    memory, sms = surface.memory_bytes_per_s, surface.num_sms
    rate = surface.flop_per_s * surface.peak_share * run.clock / sms
    rounding = surface.wave_rounding
    # All tiles at once, shape [tiles, shapes]: with few shapes, the calls take most of the time.
    blocks = np.ceil(m / _TILE_SIDES[0]) * (np.ceil(n / _TILE_SIDES[1]) * batch)
    loads = [
        min(1.0, (tm * tn / (tm + tn)) / _BEST_TILE) ** surface.tile_exponent for tm, tn in _TILES
    ]
    each = [2 * tm * tn / (rate * load) for (tm, tn), load in zip(_TILES, loads, strict=True)]
    element_s = np.array(each)[:, None]
    best = np.full(m.shape, np.inf)
    for splits in _SPLITS:
        waves = blocks * splits
        waves /= sms  # divided last, so that whole waves stay whole numbers
        rounded = np.ceil(waves)
        rounded -= waves
        rounded *= rounding
        waves += rounded  # w ceil(x) + (1-w) x
        np.maximum(waves, 1.0, out=waves)
        waves *= k / splits + surface.prologue_elements
        waves *= element_s
        least = waves.min(axis=0)
        if splits > 1:
            # A second kernel reads and adds s partial results of 4 bytes.
            partial = 4 * m * n * (splits + 1) / (_SPLIT_MEMORY_SHARE * memory)
            least += partial + surface.split_s
            # A batch fills the device already, and libraries do not split it.
            least = np.where(batch > 1, np.inf, least)
        np.minimum(best, least, out=best)
    slowdown = surface.slowdown * (_SUSTAINED_SLOWDOWN if run.sustained else 1.0)
    best *= 1 + slowdown * np.log1p(best / _LONG_S)
    size = ELEMENT_BYTES[run.dtype]
    # Low-precision GEMMs write their result in 16 bits.
    result = max(size, ELEMENT_BYTES["bf16"])
    moved = batch * ((m * k + n * k) * size + m * n * result)
    time: F64 = np.maximum(best, moved / (surface.memory_share * memory))
    return time + surface.launch_s


# --------------------------------------------------------------------------------------------------
# Attention

_QUERY_TILE = 128
"""Queries of one head per thread block of a flash attention kernel."""
_ATTENTION_MEMORY_SHARE = 0.6
"""Fraction of the HBM rate for queries, keys, values and results, where few pairs are visited."""
_HEAD_DIM = 128
"""Head dimension to which the rates of the cards refer."""
_SCORE_BYTES = {"forward": 10.1, "backward": 12.4}
"""Bytes per score of unfused softmax, mask and dropout, from layer times of BLOOM and vTrain."""
_UNFUSED_GEMM_RATE = 0.96
"""Rate of the batched GEMMs of unfused attention over `gemm_s`; same sources."""
_UNFUSED_MISALIGNED = 10.0
"""Slowdown of unfused attention with a head dimension that is no multiple of 8."""


def attention_pairs(
    seq_q: ArrayLike, seq_kv: ArrayLike, *, causal: bool = True, window: ArrayLike | None = None
) -> F64:
    """Return the mean number of keys that a query attends to.

    Multiplied by the number of queries, it is the number of pairs of queries and keys. Causal
    queries are the last `seq_q` of `seq_kv` tokens. A window of w tokens limits it to w, or to 2 w
    without a causal mask: w on both sides.
    """
    queries, keys = _floats(seq_q, seq_kv)
    # On the diagonal of the causal mask half of the keys are visible.
    seen = keys - queries / 2 if causal else keys
    sides = 1.0 if causal else 2.0
    return seen if window is None else np.minimum(seen, sides * np.asarray(window, np.float64))


def attention_s(
    kernels: Kernels,
    batch: ArrayLike,
    heads: ArrayLike,
    seq_q: ArrayLike,
    seq_kv: ArrayLike,
    *,
    kernel: str,
    phase: Phase = "forward",
    kv_heads: ArrayLike | None = None,
    head_dim: ArrayLike = _HEAD_DIM,
    head_dim_v: ArrayLike | None = None,
    causal: bool = True,
    window: ArrayLike | None = None,
    clock: float = 1.0,
) -> F64:
    """Return the seconds of a flash attention kernel over `batch` sequences.

    Arrays broadcast; lengths are tokens, and an infinite window means none. With d and dv the head
    dimensions of keys and values, a query costs (seen + h/2) (2 d + 2 dv) FLOP forward and (6 d + 4
    dv) backward, where h is the masked part of diagonal blocks and the prologue, in keys. Time =
    max(all + tail longest block, longest block) / (R f(d) clock), times (1 + z ln(1 + t / 1 ms)),
    or bytes / HBM if longer, + t0. f = (d/128)^a, with one exponent each for narrow and wide heads.
    `kv_heads` and `head_dim_v` (MLA) change bytes and FLOP only. Raises InputError if the card
    lacks the kernel.
    """
    figures = kernels.attention(kernel)
    figure = figures.forward if phase == "forward" else figures.backward
    if figure is None:
        figure = figures.forward  # inference kernel: backward FLOP at the forward rate
    batch, heads, queries, keys = _floats(batch, heads, seq_q, seq_kv)
    width = np.asarray(head_dim, dtype=np.float64)
    width_v = width if head_dim_v is None else np.asarray(head_dim_v, dtype=np.float64)
    shared = heads if kv_heads is None else np.asarray(kv_heads, dtype=np.float64)
    limit = np.asarray(np.inf if window is None else window, dtype=np.float64)
    seen = attention_pairs(queries, keys, causal=causal, window=limit)
    # Forward: scores and their product with values. Backward: scores again, and the gradients of
    # queries and keys (widths d), of probabilities and values (widths dv).
    flop = 2 * (width + width_v) if phase == "forward" else 6 * width + 4 * width_v
    mean = (width + width_v) / 2
    exponent = np.where(mean < _HEAD_DIM, figure["narrow_exponent"], figure["wide_exponent"])
    rate = figure["flop_per_s"] * clock * (mean / _HEAD_DIM) ** exponent
    # A window cuts both ends of every row of blocks, and few blocks remain to hide that.
    prologue = np.where(limit < keys, figure["window_keys"], figure["prologue_keys"])
    work = batch * heads * queries * (seen + prologue / 2) * flop
    # The last queries see most keys; the kernel takes at least as long as their block alone.
    last = np.minimum(keys, limit if causal else 2.0 * limit)
    block = np.minimum(_QUERY_TILE, queries) * (last + prologue / 2) * flop * kernels.num_sms
    time = np.maximum(work + figure["tail"] * block, block) / rate
    time = time * (1 + figure["slowdown"] * np.log1p(time / _LONG_S))
    # The backward also reads results and writes three gradients.
    tensors = 1 if phase == "forward" else 2
    moved = 2 * batch * (queries * heads + keys * shared) * (width + width_v) * tensors
    bytes_per_s = _ATTENTION_MEMORY_SHARE * kernels.memory_bytes_per_s
    return np.maximum(time, moved / bytes_per_s) + figure["launch_s"]


def ring_attention_s(
    kernels: Kernels,
    batch: ArrayLike,
    heads: ArrayLike,
    seq_length: ArrayLike,
    ranks: ArrayLike,
    *,
    kernel: str,
    phase: Phase = "forward",
    kv_heads: ArrayLike | None = None,
    head_dim: ArrayLike = _HEAD_DIM,
    head_dim_v: ArrayLike | None = None,
    clock: float = 1.0,
) -> F64:
    """Return the seconds of a rank's causal ring attention, without communication.

    Each of `ranks` steps is one kernel over 1/ranks of the queries and keys. In zigzag order every
    rank has the same number of pairs: one step is causal, and in the others the queries see half of
    the keys. Raises InputError if the card lacks the kernel.
    """
    batch, heads, length, ranks = _floats(batch, heads, seq_length, ranks)
    part = length / ranks

    def step(keys: F64, *, causal: bool) -> F64:
        return attention_s(
            kernels,
            batch,
            heads,
            part,
            keys,
            kernel=kernel,
            phase=phase,
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            causal=causal,
            clock=clock,
        )

    # In each further step half of the queries see all keys, or all queries half of them.
    return step(part, causal=True) + (ranks - 1) * step(part / 2, causal=False)


WIDE = "wide heads"
"""`Job.attention_kernel` of PyTorch's memory-efficient kernel with heads above 256. For narrower
heads, cards name its rates `efficient`."""
_EFFICIENT_SHARE, _EFFICIENT_FLOP_PER_S = 0.5, 1e14
_EFFICIENT_BACKWARD = 0.47
"""Rates of PyTorch's memory-efficient kernel with wide heads.

Forward at head width 512: half of the peak on an L20 and an RTX 4090. On a GH200 it is about
100 TFLOP/s, since it does not use the tensor cores in full (README of xlite-dev/ffpa-attn, and its
benchmark by wkun-upenn). Backward: 2.5 times the FLOP in 5.3 times the time
(xlite-dev/ffpa-attn#137). Both give the 72 ms of a layer with a window on an H200
(verl-project/verl#7131) within 5 %.
"""


def efficient_attention_s(
    kernels: Kernels,
    heads: ArrayLike,
    seq_length: ArrayLike,
    *,
    head_dim: float,
    phase: Phase,
    causal: bool,
    clock: float = 1.0,
) -> F64:
    """Return the seconds of PyTorch's memory-efficient attention with wide heads.

    heads : of all sequences. causal : False if a mask is given, which skips no scores.
    """
    number, length = _floats(heads, seq_length)
    peak = kernels.flop_per_s["bf16"]
    rate = min(_EFFICIENT_SHARE * peak, _EFFICIENT_FLOP_PER_S) * clock
    pairs = attention_pairs(length, length, causal=causal)
    if phase == "forward":
        return number * length * pairs * 4 * head_dim / rate
    return number * length * pairs * 10 * head_dim / (_EFFICIENT_BACKWARD * rate)


def unfused_attention_s(
    kernels: Kernels,
    batch: ArrayLike,
    heads: ArrayLike,
    seq_length: ArrayLike,
    *,
    head_dim: ArrayLike,
    phase: Phase = "forward",
    dtype: str = "bf16",
    clock: float = 1.0,
    sustained: bool = False,
) -> F64:
    """Return the seconds of unfused attention, which writes its scores.

    2 batched GEMMs forward, 4 backward. All s^2 scores are computed. Softmax, mask and dropout move
    10.1 (12.4 backward) bytes per score; causal masks save nothing. Raises InputError if the card
    lacks the precision.
    """
    batch, heads, length, width = _floats(batch, heads, seq_length, head_dim)
    many = batch * heads
    run, never = _Run(dtype, clock, sustained), np.zeros(many.shape, dtype=np.bool_)
    scores = _gemm(kernels, length, length, width, many, run, never)
    values = _gemm(kernels, length, width, length, many, run, never)
    products = (scores + values) * (1 if phase == "forward" else 2) / _UNFUSED_GEMM_RATE
    products = np.where(width % _ALIGNMENT != 0, _UNFUSED_MISALIGNED * products, products)
    moved = many * length * length * _SCORE_BYTES[phase]
    return products + memory_bound_s(kernels, moved, kind="elementwise", count=3)
