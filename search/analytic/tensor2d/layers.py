"""The operations of one transformer layer on one GPU, as a table that can be read.

Volumes are in elements. The compiled engine is checked against this table, and the per-layer
output is made from it. Source: arXiv 2410.00273; corrections are named in `quirks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from search.analytic.tensor2d.documents import Model, Strategy
from search.analytic.tensor2d.quirks import Quirks

__all__ = ["Link", "Pass", "Row", "Sizes", "layer_rows", "plain_attention_rows"]


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
    """Of a SUMMA product: the collectives of each loop over panels."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation of a layer."""

    name: str
    matrix: bool
    weights: float = 0.0
    kept: float = 0.0
    """Elements from forward to backward."""
    forward: Pass
    backward: Pass
    panels: int = 0
    """Of a SUMMA product; 0 for everything else."""
    recomputed: bool = False
    """Its forward is repeated in backward."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One layer of a model under one strategy, for one micro-batch."""

    model: Model
    quirks: Quirks
    strategy: Strategy
    batch: int
    """Samples of a micro-batch."""
    columns: int
    """m1: the group that divides heads and hidden size."""
    rows: int = 1
    """m2: the group that divides the sequence."""
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
        """Return the tokens of a sample that a row of GPUs has."""
        if self.quirks.dropped_rows:
            return self.model.l // self.rows
        return self.model.l / self.rows

    def scattered(self, seq: float, columns: int) -> float:
        """Return the tokens of the micro-batch that a GPU of the columns has between layers."""
        if self.quirks.dropped_rows:
            return self.batch * (seq // columns)
        return self.batch * seq / columns


def layer_rows(s: Sizes, *, attention: str = "flash", recompute: bool = False) -> tuple[Row, ...]:
    """Return the rows of one layer, feed-forward before attention.

    attention : 'flash', 'plain', or 'summa' for plain attention whose products are SUMMA too.
    """
    m, f, e = s.model, s.model.f, s.model.e
    l2, m1 = s.local_seq, s.columns
    product = partial(_summa, s) if s.strategy == "2d" else partial(_linear, s)
    wide = f // m1
    middle = s.batch * l2 * wide
    if s.strategy == "2d":
        residual = float(s.batch * l2 * (e // m1))
        bias1 = _bias(s, "fc2-bias", s.batch * l2, e // m1)
        bias2 = _bias(s, "vproj-bias", s.batch * l2, e // m1)
        norms = [_norm2(s, "ln1"), _norm2(s, "ln2")]
    else:
        residual = s.scattered(m.l, m1 * s.rows) * e
        shard = s.scattered(l2, m1)
        whole = float(s.batch * l2)
        q6 = s.quirks.bias_shapes
        if s.strategy == "1d":
            bias1 = _bias(s, "fc2-bias", whole if q6 else shard, e)
            bias2 = _bias(s, "vproj-bias", whole if q6 else shard, e)
        else:
            bias1 = _bias(s, "fc2-bias", shard, e)
            bias2 = _bias(s, "vproj-bias", *((whole, e // m1) if q6 else (shard, e)))
        norms = [_norm(s, "ln1"), _norm(s, "ln2")]
    rows = [
        product("fc1", e, f),
        _bias(s, "fc1-bias", s.batch * l2, wide),
        _activation("act1", middle),
        _dropout(s, "dpr1", middle),
        product("fc2", f, e),
        bias1,
        _dropout(s, "dpr2", residual),
        norms[0],
        product("qkv", e, 3 * e),
    ]
    if attention == "flash":
        rows.append(_flash(s))
    else:
        rows += plain_attention_rows(s, attention, recompute=recompute)
    rows += [product("vproj", e, e), bias2, _dropout(s, "dpr_v", residual), norms[1]]
    return tuple(rows)


def plain_attention_rows(s: Sizes, attention: str, *, recompute: bool = False) -> tuple[Row, ...]:
    """Return the four rows of attention that writes its scores, 'plain' or 'summa'."""
    m, b, l2 = s.model, s.batch, s.local_seq
    if attention == "summa":
        dropped = b * m.h * l2 * (m.l // s.columns)
        rows = [
            _summa_logits(s),
            _summa_softmax(s),
            _dropout(s, "dpr_at", dropped),
            _summa_attend(s),
        ]
    else:
        heads = m.h // s.columns
        scores = b * heads * l2 * m.l
        rows = [
            _logits(s),
            _softmax("softmax", scores, b * heads * l2),
            _dropout(s, "dpr_at", scores),
            _attend(s),
        ]
    if not recompute:
        return tuple(rows)
    logits, softmax, dropout, attend = (replace(row, recomputed=True) for row in rows)
    # what the softmax made is the first part of what the last product keeps
    return (
        logits,
        replace(softmax, kept=0.0),
        replace(dropout, kept=0.0),
        replace(attend, kept=attend.kept - softmax.kept, recomputed=False),
    )


def _linear(s: Sizes, name: str, inputs: int, outputs: int) -> Row:
    """A product over the heads' group: columns divide the outputs of fc1 and qkv, else inputs."""
    b, seq, m1, t1 = s.batch, s.local_seq, s.columns, s.columns_in_domain
    split_inputs = name in ("fc2", "vproj")
    i = inputs // m1 if split_inputs else inputs
    o = outputs if split_inputs else outputs // m1
    x, y, w = b * seq * i, b * seq * o, i * o
    mi, ti = (m1, t1) if split_inputs else (1, 1)
    mo, to = (1, 1) if split_inputs else (m1, t1)
    return Row(
        name=name,
        matrix=True,
        weights=w,
        kept=x,
        forward=Pass(
            flops=y * (2 * i - 1),
            traffic=x + y + w,
            links=(_link("reducescatter", b * seq * outputs, mi, ti),),
        ),
        backward=Pass(
            flops=x * (2 * o - 1) + w * (2 * b * seq - 1),
            traffic=2 * (w + x + y),
            links=(_link("reducescatter", b * seq * inputs, mo, to),),
        ),
    )


def _summa(s: Sizes, name: str, inputs: int, outputs: int) -> Row:
    b, l2, m1, m2 = s.batch, s.local_seq, s.columns, s.rows
    o = outputs // m1
    x, w, y = b * l2 * inputs, inputs * o, b * l2 * o
    bx, bw = _over_columns(s, "broadcast", x), _over_rows(s, "broadcast", w)
    rx, rw = _over_columns(s, "reduce", x), _over_rows(s, "reduce", w)
    writes = _panel_writes(s, y)
    per_output = 2 * inputs if s.quirks.repeated_panels else 2 * inputs - 1
    return Row(
        name=name,
        matrix=True,
        weights=(inputs // m2) * o,
        kept=b * l2 * (inputs // m1),
        forward=Pass(
            flops=y * per_output, traffic=x + w + writes, links=(bx, bw), loops=((bx, bw),)
        ),
        backward=Pass(
            flops=x * (2 * o - 1) + w * (2 * b * l2 - 1),
            traffic=2 * (x + w + writes),
            links=(bw, rx, bx, rw),
            loops=((bw, rx), (bx, rw)),
        ),
        panels=s.panels,
    )


def _bias(s: Sizes, name: str, rows: float, outputs: int) -> Row:
    n = rows * outputs
    one = Pass(flops=n, traffic=n + outputs)
    return Row(name=name, matrix=False, weights=outputs, forward=one, backward=one)


def _activation(name: str, n: float) -> Row:
    return Row(
        name=name,
        matrix=False,
        kept=n,
        forward=Pass(flops=8 * n, traffic=2 * n),
        backward=Pass(flops=13 * n, traffic=3 * n),
    )


def _dropout(s: Sizes, name: str, n: float) -> Row:
    one = Pass(flops=n, traffic=(2 + s.mask) * n)
    return Row(name=name, matrix=False, kept=s.mask * n, forward=one, backward=one)


def _norm(s: Sizes, name: str) -> Row:
    e, seq = s.model.e, s.local_seq
    r = s.scattered(seq, s.columns)
    n = r * e
    return Row(
        name=name,
        matrix=False,
        weights=2 * e,
        kept=n,
        forward=Pass(
            flops=9 * n,
            traffic=2 * n + 2 * r + 2 * e,
            links=(_over_columns(s, "allgather", s.batch * seq * e),),
        ),
        backward=Pass(
            flops=12 * n - 4 * r,
            traffic=5 * n + 2 * e,
            links=(_over_columns(s, "reducescatter", s.batch * seq * e),),
        ),
    )


def _norm2(s: Sizes, name: str) -> Row:
    m, b, m1, m2 = s.model, s.batch, s.columns, s.rows
    r = b * s.local_seq
    w = (m.l if s.quirks.norm_width_of_sequence else m.e) // m1
    n = r * w
    backward: tuple[Link, ...]
    if s.quirks.norm_gradient_group:
        backward = (_over_columns(s, "allreduce", (2 * m.e) // m1 + (2 * b * m.l) // m2),)
    else:
        backward = (
            _over_rows(s, "allreduce", 2 * m.e / m1),
            _over_columns(s, "allreduce", 2 * b * m.l / m2),
        )
    return Row(
        name=name,
        matrix=False,
        weights=2 * w,
        kept=n,
        forward=Pass(
            flops=9 * n,
            traffic=2 * n + 2 * r + 2 * w,
            links=(_over_columns(s, "allreduce", 2 * r),),
        ),
        backward=Pass(flops=12 * n - 4 * r, traffic=5 * n + 2 * w, links=backward),
    )


def _flash(s: Sizes) -> Row:
    l, seq, q, rho = s.model.l, s.local_seq, s.heads_width, s.matrix_per_vector  # noqa: E741
    h = s.batch * (s.model.h // s.columns)
    z, r, queries, keys = h * seq * l, h * seq, h * seq * q, h * l * q
    forward, backward = _gathered(s, 2 * keys)
    local = s.quirks.flash_traffic
    return Row(
        name="fusedla",
        matrix=True,
        kept=4 * queries + 2 * r,
        forward=Pass(
            flops=z * (2 * q - 1) + queries * (2 * l - 1) + rho * (4 * z - r),
            traffic=2 * queries + 2 * keys + r,
            links=forward,
        ),
        backward=Pass(
            flops=2 * z * (2 * q - 1)
            + queries * (2 * l - 1)
            + 2 * keys * (2 * seq - 1)
            + rho * (9 * z - 2 * r),
            traffic=(6 * queries + 2 * keys if local else 4 * queries + 4 * keys) + 2 * r,
            links=backward,
        ),
    )


def _logits(s: Sizes) -> Row:
    l, seq, q = s.model.l, s.local_seq, s.heads_width  # noqa: E741
    h = s.batch * (s.model.h // s.columns)
    z, queries, keys = h * seq * l, h * seq * q, h * l * q
    forward, backward = _gathered(s, keys)
    return Row(
        name="logits",
        matrix=True,
        kept=2 * queries,
        forward=Pass(flops=z * (2 * q - 1), traffic=queries + keys + z, links=forward),
        backward=Pass(
            flops=queries * (2 * l - 1) + keys * (2 * seq - 1),
            traffic=3 * queries + keys + 2 * z,
            links=backward,
        ),
    )


def _softmax(name: str, z: float, r: float, link: Sequence[Link] = ()) -> Row:
    return Row(
        name=name,
        matrix=False,
        kept=z,
        forward=Pass(flops=3 * z - r, traffic=2 * z, links=tuple(link)),
        backward=Pass(flops=4 * z - r, traffic=3 * z, links=tuple(link)),
    )


def _attend(s: Sizes) -> Row:
    l, seq, q = s.model.l, s.local_seq, s.heads_width  # noqa: E741
    h = s.batch * (s.model.h // s.columns)
    z, queries, keys = h * seq * l, h * seq * q, h * l * q
    forward, backward = _gathered(s, keys)
    return Row(
        name="attend",
        matrix=True,
        kept=z + queries,
        forward=Pass(flops=queries * (2 * l - 1), traffic=z + keys + queries, links=forward),
        backward=Pass(
            flops=z * (2 * q - 1) + keys * (2 * seq - 1),
            traffic=3 * queries + 2 * z + keys,
            links=backward,
        ),
    )


def _summa_logits(s: Sizes) -> Row:
    scores, keys, outputs, p = _summa_attention(s)
    bk, rk = _over_rows(s, "broadcast", keys), _over_rows(s, "reduce", keys)
    bs, rs = _over_columns(s, "broadcast", scores), _over_columns(s, "reduce", scores)
    writes = _panel_writes(s, outputs)
    return Row(
        name="logits",
        matrix=True,
        kept=2 * outputs,
        forward=Pass(
            flops=scores * (2 * p - 1),
            traffic=keys + scores + writes,
            links=(bk, rs),
            loops=((bk, rs),),
        ),
        backward=Pass(
            flops=outputs * (2 * s.model.l - 1) + keys * (2 * s.local_seq - 1),
            traffic=2 * (keys + scores + writes),
            links=(bs, bk, bs, rk),
            loops=((bs, bk), (bs, rk)),
        ),
        panels=s.panels,
    )


def _summa_softmax(s: Sizes) -> Row:
    r = s.batch * s.model.h * s.local_seq
    return _softmax("softmax", r * (s.model.l // s.columns), r, (_over_columns(s, "allreduce", r),))


def _summa_attend(s: Sizes) -> Row:
    scores, keys, outputs, p = _summa_attention(s)
    l = s.model.l  # noqa: E741
    bk, rk = _over_rows(s, "broadcast", keys), _over_rows(s, "reduce", keys)
    bs, rs = _over_columns(s, "broadcast", scores), _over_columns(s, "reduce", scores)
    writes = _panel_writes(s, outputs)
    per_output = 2 * l if s.quirks.repeated_panels else 2 * l - 1
    return Row(
        name="attend",
        matrix=True,
        kept=s.batch * s.model.h * s.local_seq * (l // s.columns) + outputs,
        forward=Pass(
            flops=outputs * per_output,
            traffic=scores + keys + writes,
            links=(bs, bk),
            loops=((bs, bk),),
        ),
        backward=Pass(
            flops=scores * (2 * p - 1) + keys * (2 * s.local_seq - 1),
            traffic=2 * (scores + keys + writes),
            links=(bk, rs, bs, rk),
            loops=((bk, rs), (bs, rk)),
        ),
        panels=s.panels,
    )


def _summa_attention(s: Sizes) -> tuple[float, int, float, int]:
    m, p = s.model, s.heads_width // s.columns
    lanes = s.batch * m.h
    return lanes * s.local_seq * m.l, lanes * m.l * p, lanes * s.local_seq * p, p


def _panel_writes(s: Sizes, outputs: float) -> float:
    alone = s.columns == s.rows == 1 and not s.quirks.repeated_panels
    return outputs if alone else s.panels * outputs


def _gathered(s: Sizes, volume: float) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Return the collectives of keys and values whose sequence is divided, forward, backward."""
    if s.strategy == "1d":
        return (), ()
    gather = _over_rows(s, "allgather", volume)
    return (gather,), (gather, _over_rows(s, "reducescatter", volume))


def _over_columns(s: Sizes, operation: str, volume: float) -> Link:
    return _link(operation, volume, s.columns, s.columns_in_domain)


def _over_rows(s: Sizes, operation: str, volume: float) -> Link:
    return _link(operation, volume, s.rows, s.rows_in_domain)


def _link(operation: str, volume: float, ranks: int, in_domain: int) -> Link:
    return Link(operation, volume if ranks > 1 else 0.0, ranks, in_domain)
