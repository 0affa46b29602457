"""Overlap of communication with compute: one scalar slows down both while both run.

Source: cost-model.md sections 3, 5 and 7. All times in seconds, arrays broadcast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["overlap_s", "overlapped_backward_s"]

F64 = NDArray[np.float64]


def overlap_s(window_s: F64, comm_s: F64, coefficient: float) -> F64:
    """Return the time of `window_s` of compute beside `comm_s` of communication, in seconds.

    min(k*min(x, y) + |x - y|, x + y): the shorter runs wholly beside the longer, k times slower.
    """
    both = coefficient * np.minimum(window_s, comm_s) + np.abs(window_s - comm_s)
    result: F64 = np.minimum(both, window_s + comm_s)
    return result


def overlapped_backward_s(
    compute_s: F64,
    windows: tuple[tuple[F64, F64], ...],
    other_comm_s: F64,
    coefficient: float,
) -> F64:
    """Return the backward of a layer whose communications hide under its compute, in seconds.

    max(B + sum_i (overlap(w_i, y_i) - w_i), overlap(B, sum_i y_i + y_other)): each tensor-parallel
    message y_i hides only in its own window w_i, and all messages together share the compute B.
    """
    separate = compute_s
    together = other_comm_s
    for window_s, comm_s in windows:
        separate = separate + (overlap_s(window_s, comm_s, coefficient) - window_s)
        together = together + comm_s
    result: F64 = np.maximum(separate, overlap_s(compute_s, together, coefficient))
    return result
