"""Terms of a step in pictures: names in prose, streams and colours.

Uniform plans and per-layer plans have different terms. Each term has a row here, in the order of
pictures.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Stream = Literal["compute", "tensor", "context", "experts", "pipeline", "data", "host"]
"""Stream of a rank: kernels, communication by parallel axis, or waits for the host."""
STREAMS: tuple[Stream, ...] = get_args(Stream)


class Term(NamedTuple):
    """Appearance of a term in pictures."""

    words: str
    colour: str
    """CSS class of the colour."""
    stream: Stream = "compute"
    sends: bool = False
    """True if it is communication."""


TERMS = {
    # Computation: terms of uniform plans, then of per-layer plans.
    "gemm": Term("products", "c1"),
    "attention": Term("attention", "c2"),
    "memory": Term("elementwise kernels", "c3"),
    "cast": Term("casts to 8 bits or fewer", "c4"),
    "forward": Term("forward", "c1"),
    "backward": Term("backward", "c2"),
    "recompute": Term("recomputation", "c5"),
    "vocab": Term("embedding, head", "c3"),
    # Communication: uniform and per-layer plans use different names.
    "tensor": Term("tensor parallel", "c6", "tensor", sends=True),
    "tp": Term("tensor parallel", "c6", "tensor", sends=True),
    "ulysses": Term("Ulysses", "c6", "tensor", sends=True),
    "context": Term("context parallel", "c7", "context", sends=True),
    "cp": Term("context parallel", "c7", "context", sends=True),
    "experts": Term("dispatch and combine", "c8", "experts", sends=True),
    "redistribution": Term("redistribution", "c8", "tensor", sends=True),
    "transfer": Term("transfer between stages", "c9", "pipeline", sends=True),
    "sharding": Term("gather and scatter of weights (ZeRO-3)", "c10", "data", sends=True),
    "zero3": Term("ZeRO-3 gather", "c10", "data", sends=True),
    # Waits and copies.
    "host": Term("waits for the host", "c12", "host"),
    "offload": Term("copies to and from the host", "c13", "host"),
    "bubble": Term("pipeline bubble", "c12"),
    # Once per step.
    "gradients": Term("gradients and new weights", "c10", "data", sends=True),
    "gradient_sync": Term("gradient sync", "c10", "data", sends=True),
    "optimizer": Term("optimizer", "c11"),
    "fixed": Term("fixed, by calibration", "c13", "host"),
    "stragglers": Term("stragglers", "c13", "data"),
}
_PLAIN = "c0"
"""CSS class of a term without a row."""


def words_of(term: str) -> str:
    """Return the name of a term in prose."""
    return TERMS[term].words if term in TERMS else term.replace("_", " ")


def colour_of(term: str) -> str:
    """Return the CSS class of a term's colour."""
    return TERMS[term].colour if term in TERMS else _PLAIN


def stream_of(term: str) -> Stream:
    """Return the stream of a term, `compute` for an unknown term."""
    return TERMS[term].stream if term in TERMS else "compute"


def sends(term: str) -> bool:
    """Return True if a term is communication."""
    return term in TERMS and TERMS[term].sends
