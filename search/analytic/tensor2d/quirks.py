"""Switches for what the published numbers of this model contain and should not.

All off is the corrected model and the default; all on reproduces published figures (`compat`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["COMPAT", "CORRECT", "Quirks"]


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """Defects to reproduce, one switch each; numbers are those of the documentation."""

    single_allreduce: bool = False
    """Q1: an all-reduce inside one domain, or with one rank per domain, moves data once, and its
    latency is never doubled; right: twice, everywhere."""
    free_slow_links: bool = False
    """Q2: pipeline links between domains cost nothing once some are inside; right: their time."""
    norm_width_of_sequence: bool = False
    """Q3: norms of the two-dimensional model are as wide as the sequence; right: as the
    hidden size."""
    norm_gradient_group: bool = False
    """Q4: both gradients of such a norm are reduced over the columns; right: weights over the
    rows, statistics over the columns."""
    extra_panel: bool = False
    """Q5: a communication-bound SUMMA product exposes one panel too many and pools the loops of
    backward; right: each loop by itself."""
    bias_shapes: bool = False
    """Q6: biases behind a reduce-scatter work on all rows; right: on their share."""
    one_adapter: bool = False
    """Q7: more than one network adapter per GPU helps only groups with several ranks per domain;
    right: every transfer."""
    flash_traffic: bool = False
    """Q8: keys and values gathered again in backward count as local parts; right: whole."""
    dropped_rows: bool = False
    """Q9: sequences that the tensor degree does not divide lose their remainder; right: rows are
    of the whole micro-batch."""
    recompute_time_only: bool = False
    """Q10: recomputing attention adds time but no FLOP; right: both."""
    repeated_panels: bool = False
    """Q14: SUMMA products count 2*i per output and write every panel; right: 2*i-1, once when
    nothing is divided."""


CORRECT = Quirks()
COMPAT = Quirks(**dict.fromkeys((f.name for f in fields(Quirks)), True))
