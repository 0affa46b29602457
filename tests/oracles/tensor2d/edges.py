"""Layers around the stack: embedding on the first stage, head and loss on the last.

The published model has none of them. Columns divide the vocabulary, padded to a multiple of them,
and look-ups of tokens outside a GPU's part are reduced; under SUMMA columns divide the hidden size
and rows the vocabulary. The loss exchanges its maximum, its sum and the logit of the label, 4 bytes
per token each.
"""

from __future__ import annotations

from tests.oracles.tensor2d.layers import norm_row, product_row
from tests.oracles.tensor2d.rows import Pass, Row, Sizes, over_columns, over_rows

_WORD = 2
"""Elements of a 4-byte number."""


def embedding_rows(s: Sizes) -> tuple[Row, ...]:
    """Return the embedding look-up, to which backward adds its gradients."""
    e, link = s.model.e, over_columns
    n = volume = float(s.batch * s.local_seq * e)
    if s.strategy == "2d":
        link = over_rows
        n, volume = n / s.columns, n * s.rows / s.columns
    parts = s.rows if s.strategy == "2d" else 1
    return (
        Row(
            name="embedding",
            matrix=False,
            weights=_local_vocab(s) * (e // parts),
            forward=Pass(flops=0.0, traffic=2 * n, links=(link(s, "reducescatter", volume),)),
            backward=Pass(flops=n, traffic=3 * n, links=(link(s, "allgather", volume),)),
        ),
    )


def head_rows(s: Sizes) -> tuple[Row, ...]:
    """Return the last norm, the output GEMM, and the loss."""
    local = _local_vocab(s)
    r = s.batch * s.local_seq
    n = r * local
    exchange = over_columns(s, "allreduce", _WORD * r)
    return (
        norm_row(s, "ln_f"),
        product_row(s, "head", s.model.e, local * s.columns),
        Row(
            name="loss",
            matrix=False,
            kept=(1 + _WORD) * n,
            forward=Pass(flops=5 * n, traffic=(1 + _WORD) * n, links=(exchange,) * 3),
            backward=Pass(flops=2 * n, traffic=(1 + _WORD) * n),
        ),
    )


def _local_vocab(s: Sizes) -> int:
    return -(-s.model.vocab // s.columns)
