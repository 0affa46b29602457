"""Tables of docs/concepts/accuracy.md, written between their markers; other text is hand-written.

A table is between `<!-- NAME: made by ... -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.output import write_text

if TYPE_CHECKING:
    from autopar.rates.accuracy import Accuracy
    from benchmarks.ledger_constants import Constant
    from benchmarks.ledger_left_out import Case

__all__ = [
    "PAGE",
    "constants_table",
    "intervals_table",
    "left_out_table",
    "order_table",
    "reasons_table",
    "sources_table",
    "write_tables",
]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "accuracy.md"
_ERRORS = "rows | bias | median | MAPE | p90 | coverage"


def write_tables(tables: Mapping[str, str], page: Path = PAGE) -> None:
    """Replace the text between the markers of each table; raises ValueError without them."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page.name} has no markers of the table {name!r}")
        # a function, because backslashes of a table must stay literal
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)  # type: ignore[misc]
    write_text(page, text)


def _table(heads: str, rows: Iterable[str]) -> str:
    columns = heads.count("|") + 1
    lines = [f"| {heads} |", "|" + "---|" * columns, *(f"| {row} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _errors(found: Mapping[str, float]) -> str:
    return (
        f"{found['rows']:.0f} | {100 * found['bias']:+.1f} | {100 * found['median']:.1f} | "
        f"{100 * found['mape']:.1f} | {100 * found['p90']:.1f} | {100 * found['coverage']:.0f}"
    )


def sources_table(statistics: Mapping[str, Mapping[str, float]]) -> str:
    """Return the errors of every source, in percent."""
    rows = (f"{group} | {_errors(found)}" for group, found in statistics.items())
    return _table(f"source | {_ERRORS}", rows)


def reasons_table(refused: Counter[tuple[str, str]]) -> str:
    """Return the reasons for missing estimates, from numbers of rows by source and reason."""
    rows = (f"{group} | {number} | {reason}" for (group, reason), number in sorted(refused.items()))
    return _table("source | rows | reason", rows)


def order_table(rankings: Iterable[tuple[str, int, float, float]]) -> str:
    """Return the ranking quality of plans of one model."""
    rows = (
        f"{key} | {number} | {order:.2f} | {100 * regret:.1f}"
        for key, number, order, regret in rankings
    )
    return _table("model on a cluster | plans | Spearman | regret", rows)


def intervals_table(accuracy: Accuracy) -> str:
    """Return the intervals of every class of runs, as percent of the estimate."""
    rows = (
        f"{c.stack} | {'yes' if c.experts else 'no'} | {'yes' if c.adapters else 'no'} | "
        f"{'yes' if c.site_known else 'no'} | "
        f"{c.rows} | {c.sources} | {100 * (c.low - 1):+.0f} to {100 * (c.high - 1):+.0f} | "
        f"{100 * c.plan_spread:.1f}"
        for c in accuracy.classes
    )
    heads = "stack | experts | adapters | site known | rows | sources | interval, % of the estimate"
    return _table(f"{heads} | spread of plans", rows)


def left_out_table(cases: Sequence[Case]) -> str:
    """Return the errors of sources that the fit has not seen, in percent."""
    rows = (f"{c.name} | {_errors(c.found)} | {100 * c.mape_with:.1f}" for c in cases)
    return _table(f"held out | {_ERRORS} | MAPE when seen", rows)


def constants_table(constants: Sequence[Constant], fitted: Sequence[float]) -> str:
    """Return the constants: shipped, fitted again, and assumed without any run."""
    rows = (
        f"{c.name} | {c.shipped:.3g} | {value:.3g} ({math.log(value / c.shipped) / c.width:+.1f}) "
        f"| {c.neutral:g}"
        for c, value in zip(constants, fitted, strict=True)
    )
    return _table("constant | shipped | fitted again (deviations) | without runs", rows)
