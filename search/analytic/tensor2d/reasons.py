"""Why the compiled engine refuses a candidate, in the order of its codes."""

from __future__ import annotations

__all__ = ["REASONS"]

REASONS: tuple[str, ...] = (
    "",
    "a degree, a panel count or a placement is below 1, or tp2 is above 1 without a second axis",
    "dp * tp1 * tp2 * pp != n_gpus",
    "tp1 does not divide the heads",
    "tp1 does not divide the hidden size",
    "tp1 does not divide the feed-forward width",
    "pp does not divide the layers",
    "dp * mbs does not divide the batch",
    "tp2 does not divide the hidden size",
    "the sequence is shorter than tp1 * tp2",
    "the tokens of a micro-batch do not divide over the GPUs that share them",
    "nb is above the hidden size",
    "neither of kv_heads and tp1 divides the other",
    "a placement does not divide its group",
    "a fast domain is smaller than the placement",
    "needs more memory than a GPU has",
)
"""Sentences without figures; `evaluate` gives them with their figures."""
