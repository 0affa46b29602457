"""Data types of the operations of one layer on one GPU: rows, their collectives, and sizes.

Volumes are in elements. Source: arXiv 2410.00273; corrections are named in `quirks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from search.closed_form.tensor2d.documents import Model, Strategy
from search.closed_form.tensor2d.engine import Quirks


@dataclass(frozen=True)
class Link:
    """A collective: operation, elements of the whole tensor, ranks, ranks that share a domain."""

    operation: str
    volume: float
    ranks: int
    in_domain: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Forward or backward of a row."""

    flops: float
    traffic: float
    """Elements read and written."""
    links: tuple[Link, ...] = ()
    loops: tuple[tuple[Link, ...], ...] = ()
    """Collectives of each loop over panels of a SUMMA GEMM; empty for other operations."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation of a layer."""

    name: str
    matrix: bool
    weights: float = 0.0
    kept: float = 0.0
    """Elements saved from forward to backward."""
    forward: Pass
    backward: Pass
    panels: int = 0
    """Panels of a SUMMA GEMM; 0 for all other operations."""
    recomputed: bool = False
    """True if its forward is repeated in backward."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One layer of a model under one strategy, for one micro-batch."""

    model: Model
    quirks: Quirks
    strategy: Strategy
    batch: int
    """Samples of a micro-batch."""
    columns: int
    """m1: size of the group that divides heads and hidden size."""
    rows: int = 1
    """m2: size of the group that divides the sequence."""
    columns_in_domain: int = 1
    rows_in_domain: int = 1
    panels: int = 1
    mask: float = 0.5
    """Bytes of a mask element over those of an element."""
    matrix_per_vector: float = 4.0
    """Peak of the matrix engine over that of the vector engine."""
    heads_width: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads_width", self.model.e // self.model.h)

    @property
    def local_seq(self) -> float:
        """Return the tokens of a sample in one row of GPUs."""
        if self.quirks.dropped_rows:
            return self.model.l // self.rows
        return self.model.l / self.rows

    @property
    def key_heads(self) -> int:
        """Return the key and value heads on a GPU; columns share one if there are fewer."""
        return max(self.model.key_heads // self.columns, 1)

    @property
    def qkv_width(self) -> int:
        """Return the outputs of the qkv GEMM over all columns."""
        if self.model.kv_heads is None:
            return 3 * self.model.e
        return self.model.e + 2 * self.key_heads * self.columns * self.heads_width

    @property
    def gpt(self) -> bool:
        """Return True if blocks have biases, dropout, a shift in norms, and no gate."""
        return self.model.structure == "gpt"

    def scattered(self, seq: float, columns: int) -> float:
        """Return the tokens of the micro-batch on one GPU of the columns between layers."""
        if self.quirks.dropped_rows:
            return self.batch * (seq // columns)
        return self.batch * seq / columns


def dropout_row(s: Sizes, name: str, n: float) -> Row:
    """Return dropout of n elements, which saves its mask."""
    one = Pass(flops=n, traffic=(2 + s.mask) * n)
    return Row(name=name, matrix=False, kept=s.mask * n, forward=one, backward=one)


def panel_writes(s: Sizes, outputs: float) -> float:
    """Return the elements that a SUMMA GEMM writes: its outputs once per panel."""
    alone = s.columns == s.rows == 1 and not s.quirks.repeated_panels
    return outputs if alone else s.panels * outputs


def over_columns(s: Sizes, operation: str, volume: float) -> Link:
    """Return a collective over the columns."""
    return rank_link(operation, volume, s.columns, s.columns_in_domain)


def over_rows(s: Sizes, operation: str, volume: float) -> Link:
    """Return a collective over the rows."""
    return rank_link(operation, volume, s.rows, s.rows_in_domain)


def rank_link(operation: str, volume: float, ranks: int, in_domain: int) -> Link:
    """Return a collective, without volume for a single rank."""
    return Link(operation, volume if ranks > 1 else 0.0, ranks, in_domain)
