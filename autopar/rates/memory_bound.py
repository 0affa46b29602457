"""Times of memory-bound kernels: norms, activations, casts, loss, optimizer.

The time is bytes over the fraction of the HBM rate that the kernel's class reaches, plus a launch.
Bytes per operation are a property of an engine's kernels and an argument here. The number of
operations of a layer is in `autopar.rates.layer`, GEMMs are in `autopar.rates.kernels`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from autopar.arrays import F64
from autopar.rates.constants import ELEMENT_BYTES, Kernels, MemoryClass

_EMBEDDING_BYTES = 8.0
"""Bytes per element of the result: 2 read, 2 written, and 4 for the mask and the sum over ranks."""
_PERMUTE_BYTES = {"forward": 8.0, "backward": 12.0}
"""Bytes per element of tokens sent to experts, counted from the kernels of Megatron-Core."""
_SCATTERED_BYTES = 4.0
"""Further bytes per element without `--moe-permute-fusion`.

A fused kernel sums the rows of a token and writes the sum once. `scatter_add_` (forward, unpermute)
and `index_add_` (backward of `index_select`, permute) read and write the sum for every row
(moe_utils.py of Megatron-Core)."""


def memory_bound_s(
    kernels: Kernels,
    moved_bytes: ArrayLike,
    *,
    kind: MemoryClass = "elementwise",
    count: ArrayLike = 1,
) -> F64:
    """Return the seconds of `count` kernels that together read and write `moved_bytes`.

    bytes / (HBM rate of the class) + count launches; arrays broadcast. HBM keeps its clock in a
    long run, so that the time does not depend on the sustained clock.
    """
    moved = np.asarray(moved_bytes, dtype=np.float64)
    rate = kernels.memory_bytes_per_s * kernels.memory_share(kind)
    return moved / rate + np.asarray(count) * kernels.section.memory_launch["launch_s"]


def elements_s(
    kernels: Kernels,
    elements: ArrayLike,
    bytes_per_element: ArrayLike,
    *,
    kind: MemoryClass = "elementwise",
    count: ArrayLike = 1,
) -> F64:
    """Return the seconds of kernels over `elements` that move `bytes_per_element` of each.

    An unfused bf16 norm moves 4 bytes forward and 8 backward, a residual with dropout 7 and 5, an
    activation 4 and 6. A compiled engine moves less; an eager one with fp32 norms 28 and 44.
    """
    moved = np.asarray(elements, dtype=np.float64) * np.asarray(bytes_per_element)
    return memory_bound_s(kernels, moved, kind=kind, count=count)


def cast_s(
    kernels: Kernels,
    elements: ArrayLike,
    *,
    dtype: str,
    bytes_per_element: float | None = None,
    count: ArrayLike = 1,
) -> F64:
    """Return the seconds of quantising 16-bit elements in a separate kernel.

    The result is 0 for a precision of 16 bits or more. Without `bytes_per_element`, an element of e
    bytes moves 2 + e bytes at the rate of the quantising kernels in the card's tables. Otherwise
    `bytes_per_element` move at the elementwise rate: 4 in Transformer Engine, which also writes the
    transpose, 7 in torchtitan. Raises InputError if the card lacks the precision.
    """
    figure, size = kernels.gemm(dtype), ELEMENT_BYTES[dtype]
    many = np.asarray(elements, dtype=np.float64)
    if size >= ELEMENT_BYTES["bf16"]:
        return np.zeros_like(many)
    if bytes_per_element is not None:
        return elements_s(kernels, many, bytes_per_element, count=count)
    rate = figure["cast_share"] * kernels.memory_bytes_per_s
    time: F64 = many * (ELEMENT_BYTES["bf16"] + size) / rate
    return time + np.asarray(count) * kernels.section.memory_launch["launch_s"]


def embedding_s(
    kernels: Kernels,
    tokens: ArrayLike,
    hidden: ArrayLike,
    *,
    backward: bool = False,
    local_parameters: ArrayLike = 0,
    accumulation_bytes: float = 0.0,
) -> F64:
    """Return the seconds of looking up `tokens` rows of width `hidden`, or of its backward.

    8 bytes per element. The backward also clears and accumulates a gradient of this rank's
    `local_parameters` of the table: 2 bytes and `accumulation_bytes` each.
    """
    moved = np.asarray(tokens, dtype=np.float64) * np.asarray(hidden) * _EMBEDDING_BYTES
    if backward:
        table = np.asarray(local_parameters, dtype=np.float64)
        moved = moved + table * (ELEMENT_BYTES["bf16"] + accumulation_bytes)
    return memory_bound_s(kernels, moved, kind="permute")


def cross_entropy_s(
    kernels: Kernels, tokens: ArrayLike, local_vocab: ArrayLike, *, bytes_per_logit: float
) -> F64:
    """Return the seconds of softmax and loss, or their backward, over this rank's logits.

    `bytes_per_logit` is 26 forward and 20 backward for unfused fp32 kernels, 6.8 and 5.1 for
    Megatron-Core's fused ones. `local_vocab` is the number of columns of this rank, with padding.
    """
    logits = np.asarray(tokens, dtype=np.float64) * np.asarray(local_vocab)
    return elements_s(kernels, logits, bytes_per_logit, kind="softmax", count=3)


def optimizer_s(
    kernels: Kernels,
    own_parameters: ArrayLike,
    resident_parameters: ArrayLike,
    *,
    bytes_per_own: float,
    gradient_bytes: float,
) -> F64:
    """Return the seconds of one optimizer update: own states and all resident gradients.

    `bytes_per_own` is 34 to 44 depending on the engine: fp32 weight and two moments read and
    written, gradient read, 16-bit weight written. Gradients are read twice, for their norm and to
    be scaled.
    """
    own = np.asarray(own_parameters, dtype=np.float64) * bytes_per_own
    resident = np.asarray(resident_parameters, dtype=np.float64) * (2 * gradient_bytes)
    # Multi-tensor kernels batch the many small launches.
    return memory_bound_s(kernels, own + resident, kind="optimizer", count=4)


def permute_s(
    kernels: Kernels,
    tokens: ArrayLike,
    hidden: ArrayLike,
    *,
    backward: bool = False,
    fused: bool = True,
) -> F64:
    """Return the seconds of permuting routed `tokens` by expert and back, 8 (12) bytes per element.

    `tokens` counts each copy that is sent to an expert. If not `fused`, 4 more bytes are moved.
    """
    elements = np.asarray(tokens, dtype=np.float64) * np.asarray(hidden)
    per_element = _PERMUTE_BYTES["backward" if backward else "forward"]
    per_element += 0.0 if fused else _SCATTERED_BYTES
    return elements_s(kernels, elements, per_element, kind="permute", count=2)
