"""The operations of attention, as rows of the table of a layer: flash, plain, and in SUMMA.

Source: arXiv 2410.00273; corrections are named in `quirks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.oracles.tensor2d.rows import (
    Link,
    Pass,
    Row,
    Sizes,
    dropout_row,
    over_columns,
    over_rows,
    panel_writes,
)


def plain_attention_rows(s: Sizes, attention: str, *, recompute: bool = False) -> tuple[Row, ...]:
    """Return the rows of attention that writes its scores, 'plain' or 'summa', with its dropout."""
    m, b, l2 = s.model, s.batch, s.local_seq
    if attention == "summa":
        dropped = b * m.h * l2 * (m.l // s.columns)
        rows = [
            _summa_logits(s),
            _summa_softmax(s),
            dropout_row(s, "dpr_at", dropped),
            _summa_attend(s),
        ]
    else:
        heads = m.h // s.columns
        scores = b * heads * l2 * m.l
        rows = [
            _logits(s),
            _softmax("softmax", scores, b * heads * l2),
            dropout_row(s, "dpr_at", scores),
            _attend(s),
        ]
    logits, softmax, dropout, attend = rows
    drops = (dropout,) if s.gpt else ()
    if not recompute:
        # without dropout, the last GEMM saves the softmax output
        return (logits, softmax if s.gpt else replace(softmax, kept=0.0), *drops, attend)
    # the softmax output is the first part of the tensors that the last GEMM saves
    return (
        replace(logits, recomputed=True),
        *(replace(row, kept=0.0, recomputed=True) for row in (softmax, *drops)),
        replace(attend, kept=attend.kept - softmax.kept),
    )


def flash_row(s: Sizes) -> Row:
    """Return attention that saves no scores."""
    seq, q, rho = s.local_seq, s.heads_width, s.matrix_per_vector
    h, shared, keys = _heads(s)
    seen = (s.model.l + 1) / 2 if s.model.causal else float(s.model.l)
    z, r, queries = h * seq * seen, h * seq, h * seq * q
    parts = s.batch * s.key_heads * seq * q
    forward, backward = _gathered(s, 2 * keys)
    again = 2 * parts + 2 * keys if s.quirks.flash_traffic else 4 * keys
    drops = 1 if s.gpt else 0
    # queries per key on one GPU
    met = shared * seq * seen / s.model.l
    return Row(
        name="fusedla",
        matrix=True,
        kept=2 * queries + 2 * parts + (1 + drops) * r,
        forward=Pass(
            flops=z * (2 * q - 1) + queries * (2 * seen - 1) + rho * ((3 + drops) * z - r),
            traffic=2 * queries + 2 * keys + r,
            links=forward,
        ),
        backward=Pass(
            flops=2 * z * (2 * q - 1)
            + queries * (2 * seen - 1)
            + 2 * keys * (2 * met - 1)
            + rho * ((7 + 2 * drops) * z - 2 * r),
            traffic=4 * queries + again + 2 * r,
            links=backward,
        ),
    )


def _heads(s: Sizes) -> tuple[int, int, int]:
    """Return query heads times samples, heads that share a key, and elements of all keys."""
    heads = s.model.h // s.columns
    keys = s.batch * s.key_heads * s.model.l * s.heads_width
    return s.batch * heads, heads // s.key_heads, keys


def _logits(s: Sizes) -> Row:
    l, seq, q = s.model.l, s.local_seq, s.heads_width  # noqa: E741
    h, shared, keys = _heads(s)
    z, queries, parts = h * seq * l, h * seq * q, s.batch * s.key_heads * seq * q
    forward, backward = _gathered(s, keys)
    return Row(
        name="logits",
        matrix=True,
        kept=queries + parts,
        forward=Pass(flops=z * (2 * q - 1), traffic=queries + keys + z, links=forward),
        backward=Pass(
            flops=queries * (2 * l - 1) + keys * (2 * shared * seq - 1),
            traffic=2 * queries + parts + keys + 2 * z,
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
    h, shared, keys = _heads(s)
    z, queries, parts = h * seq * l, h * seq * q, s.batch * s.key_heads * seq * q
    forward, backward = _gathered(s, keys)
    return Row(
        name="attend",
        matrix=True,
        kept=z + queries,
        forward=Pass(flops=queries * (2 * l - 1), traffic=z + keys + queries, links=forward),
        backward=Pass(
            flops=z * (2 * q - 1) + keys * (2 * shared * seq - 1),
            traffic=2 * queries + parts + 2 * z + keys,
            links=backward,
        ),
    )


def _summa_logits(s: Sizes) -> Row:
    scores, keys, outputs, p, shared = _summa_attention(s)
    bk, rk = over_rows(s, "broadcast", keys), over_rows(s, "reduce", keys)
    bs, rs = over_columns(s, "broadcast", scores), over_columns(s, "reduce", scores)
    writes = panel_writes(s, outputs)
    return Row(
        name="logits",
        matrix=True,
        kept=outputs + outputs / shared,
        forward=Pass(
            flops=scores * (2 * p - 1),
            traffic=keys + scores + writes,
            links=(bk, rs),
            loops=((bk, rs),),
        ),
        backward=Pass(
            flops=outputs * (2 * s.model.l - 1) + keys * (2 * shared * s.local_seq - 1),
            traffic=2 * (keys + scores + writes),
            links=(bs, bk, bs, rk),
            loops=((bs, bk), (bs, rk)),
        ),
        panels=s.panels,
    )


def _summa_softmax(s: Sizes) -> Row:
    r = s.batch * s.model.h * s.local_seq
    return _softmax("softmax", r * (s.model.l // s.columns), r, (over_columns(s, "allreduce", r),))


def _summa_attend(s: Sizes) -> Row:
    scores, keys, outputs, p, shared = _summa_attention(s)
    l = s.model.l  # noqa: E741
    bk, rk = over_rows(s, "broadcast", keys), over_rows(s, "reduce", keys)
    bs, rs = over_columns(s, "broadcast", scores), over_columns(s, "reduce", scores)
    writes = panel_writes(s, outputs)
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
            flops=scores * (2 * p - 1) + keys * (2 * shared * s.local_seq - 1),
            traffic=2 * (scores + keys + writes),
            links=(bk, rs, bs, rk),
            loops=((bk, rs), (bs, rk)),
        ),
        panels=s.panels,
    )


def _summa_attention(s: Sizes) -> tuple[float, int, float, int, int]:
    m, p = s.model, s.heads_width // s.columns
    lanes = s.batch * m.h
    keys = s.batch * m.key_heads * m.l * p
    return lanes * s.local_seq * m.l, keys, lanes * s.local_seq * p, p, m.h // m.key_heads


def _gathered(s: Sizes, volume: float) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Return the collectives of keys and values with a divided sequence, forward and backward."""
    if s.strategy == "1d":
        return (), ()
    gather = over_rows(s, "allgather", volume)
    return (gather,), (gather, over_rows(s, "reducescatter", volume))
