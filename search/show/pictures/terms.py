"""Terms of a step in pictures: streams and colours.

Uniform plans and per-layer plans have different terms. Each term has a row here, in the order of
pictures; its printed name is in `search.show.terms`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Stream = Literal["compute", "tensor", "context", "experts", "pipeline", "data", "host"]
"""Stream of a rank: kernels, communication by parallel axis, or waits for the host."""
STREAMS: tuple[Stream, ...] = get_args(Stream)


class Term(NamedTuple):
    """Appearance of a term in pictures."""

    colour: str
    """CSS class of the colour."""
    stream: Stream = "compute"
    """Stream that the term occupies."""
    sends: bool = False
    """True if it is communication."""


TERMS = {
    # Computation: terms of uniform plans, then of per-layer plans.
    "gemm": Term("c1"),
    "attention": Term("c2"),
    "memory": Term("c3"),
    "cast": Term("c4"),
    "forward": Term("c1"),
    "backward": Term("c2"),
    "recompute": Term("c5"),
    "vocab": Term("c3"),
    # Communication: uniform and per-layer plans use different names.
    "tensor": Term("c6", "tensor", sends=True),
    "tp": Term("c6", "tensor", sends=True),
    "ulysses": Term("c6", "tensor", sends=True),
    "context": Term("c7", "context", sends=True),
    "cp": Term("c7", "context", sends=True),
    "experts": Term("c8", "experts", sends=True),
    "redistribution": Term("c8", "tensor", sends=True),
    "transfer": Term("c9", "pipeline", sends=True),
    "sharding": Term("c10", "data", sends=True),
    "zero3": Term("c10", "data", sends=True),
    # Waits and copies.
    "host": Term("c12", "host"),
    "offload": Term("c13", "host"),
    "bubble": Term("c12"),
    # Once per step.
    "gradients": Term("c10", "data", sends=True),
    "gradient_sync": Term("c10", "data", sends=True),
    "optimizer": Term("c11"),
    "fixed": Term("c13", "host"),
    "stragglers": Term("c13", "data"),
}
"""Appearance of each term.

Equal terms of uniform and per-layer plans have different names but one colour, so that two pages
can be compared.
"""
_PLAIN = "c0"
"""CSS class of a term without a row."""


def colour_of(term: str) -> str:
    """Return the CSS class of a term's colour."""
    return TERMS[term].colour if term in TERMS else _PLAIN


def stream_of(term: str) -> Stream:
    """Return the stream of a term, `compute` for an unknown term."""
    return TERMS[term].stream if term in TERMS else "compute"


def sends(term: str) -> bool:
    """Return True if a term is communication."""
    return term in TERMS and TERMS[term].sends
