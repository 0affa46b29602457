"""The operations of one transformer layer on one GPU, as a readable table.

Volumes are in elements. The compiled engine is checked against this table. Source: arXiv
2410.00273; corrections are named in `quirks`.
"""

from __future__ import annotations

from functools import partial

from tests.oracles.tensor2d.attention import flash_row, plain_attention_rows
from tests.oracles.tensor2d.rows import (
    Link,
    Pass,
    Row,
    Sizes,
    dropout_row,
    over_columns,
    over_rows,
    panel_writes,
    rank_link,
)

_GPT_ONLY = ("fc1-bias", "dpr1", "fc2-bias", "dpr2", "vproj-bias", "dpr_v")


def layer_rows(s: Sizes, *, attention: str = "flash", recompute: bool = False) -> tuple[Row, ...]:
    """Return the rows of one layer, feed-forward before attention.

    attention : 'flash', 'plain', or 'summa' for plain attention with SUMMA GEMMs.
    """
    m, f, e = s.model, s.model.f, s.model.e
    l2, m1 = s.local_seq, s.columns
    product = partial(product_row, s)
    wide = f // m1
    middle = s.batch * l2 * wide
    if s.strategy == "2d":
        residual = float(s.batch * l2 * (e // m1))
        bias1 = _bias(s, "fc2-bias", s.batch * l2, e // m1)
        bias2 = _bias(s, "vproj-bias", s.batch * l2, e // m1)
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
    rows = [
        product("fc1", e, f if s.gpt else 2 * f),
        _bias(s, "fc1-bias", s.batch * l2, wide),
        _activation("act1", middle) if s.gpt else _gated(middle),
        dropout_row(s, "dpr1", middle),
        product("fc2", f, e),
        bias1,
        dropout_row(s, "dpr2", residual),
        norm_row(s, "ln1"),
        product("qkv", e, s.qkv_width),
    ]
    if attention == "flash":
        rows.append(flash_row(s))
    else:
        rows += plain_attention_rows(s, attention, recompute=recompute)
    rows += [
        product("vproj", e, e),
        bias2,
        dropout_row(s, "dpr_v", residual),
        norm_row(s, "ln2"),
    ]
    return tuple(row for row in rows if s.gpt or row.name not in _GPT_ONLY)


def product_row(s: Sizes, name: str, inputs: int, outputs: int) -> Row:
    """Return a GEMM of the strategy; columns divide the outputs, except for fc2 and vproj."""
    return (_summa if s.strategy == "2d" else _linear)(s, name, inputs, outputs)


def norm_row(s: Sizes, name: str) -> Row:
    """Return a norm of the strategy, with its gathers or reductions."""
    return (_norm2 if s.strategy == "2d" else _norm)(s, name)


def _linear(s: Sizes, name: str, inputs: int, outputs: int) -> Row:
    """Return a GEMM whose outputs (fc1 and qkv) or inputs are divided by the columns."""
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
            links=(rank_link("reducescatter", b * seq * outputs, mi, ti),),
        ),
        backward=Pass(
            flops=x * (2 * o - 1) + w * (2 * b * seq - 1),
            traffic=2 * (w + x + y),
            links=(rank_link("reducescatter", b * seq * inputs, mo, to),),
        ),
    )


def _summa(s: Sizes, name: str, inputs: int, outputs: int) -> Row:
    b, l2, m1, m2 = s.batch, s.local_seq, s.columns, s.rows
    o = outputs // m1
    x, w, y = b * l2 * inputs, inputs * o, b * l2 * o
    bx, bw = over_columns(s, "broadcast", x), over_rows(s, "broadcast", w)
    rx, rw = over_columns(s, "reduce", x), over_rows(s, "reduce", w)
    writes = panel_writes(s, y)
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


def _gated(n: float) -> Row:
    """Return SiLU of one half times the other half; backward needs both."""
    return Row(
        name="act1",
        matrix=False,
        kept=2 * n,
        forward=Pass(flops=6 * n, traffic=3 * n),
        backward=Pass(flops=10 * n, traffic=5 * n),
    )


def _norm_work(s: Sizes, n: float, rows: float) -> tuple[int, float, float]:
    """Return parameters per column (as many as statistics per row), and FLOP of both passes.

    An RMS norm has squares, their sum and two scalings.
    """
    return (2, 9 * n, 12 * n - 4 * rows) if s.gpt else (1, 4 * n, 9 * n)


def _norm(s: Sizes, name: str) -> Row:
    e, seq = s.model.e, s.local_seq
    r = s.scattered(seq, s.columns)
    n = r * e
    k, forward_flops, backward_flops = _norm_work(s, n, r)
    return Row(
        name=name,
        matrix=False,
        weights=k * e,
        kept=n,
        forward=Pass(
            flops=forward_flops,
            traffic=2 * n + k * r + k * e,
            links=(over_columns(s, "allgather", s.batch * seq * e),),
        ),
        backward=Pass(
            flops=backward_flops,
            traffic=5 * n + k * e,
            links=(over_columns(s, "reducescatter", s.batch * seq * e),),
        ),
    )


def _norm2(s: Sizes, name: str) -> Row:
    m, b, m1, m2 = s.model, s.batch, s.columns, s.rows
    r = b * s.local_seq
    w = (m.l if s.quirks.norm_width_of_sequence else m.e) // m1
    n = r * w
    k, forward_flops, backward_flops = _norm_work(s, n, r)
    backward: tuple[Link, ...]
    if s.quirks.norm_gradient_group:
        backward = (over_columns(s, "allreduce", (k * m.e) // m1 + (k * b * m.l) // m2),)
    else:
        backward = (
            over_rows(s, "allreduce", k * m.e / m1),
            over_columns(s, "allreduce", k * b * m.l / m2),
        )
    return Row(
        name=name,
        matrix=False,
        weights=k * w,
        kept=n,
        forward=Pass(
            flops=forward_flops,
            traffic=2 * n + k * r + k * w,
            links=(over_columns(s, "allreduce", k * r),),
        ),
        backward=Pass(flops=backward_flops, traffic=5 * n + k * w, links=backward),
    )
