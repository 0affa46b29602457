"""A readable model of arXiv 2410.00273: the oracle of the compiled one, with the same figures.

It shares documents and switches with the product, but no computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.documents.checks import load_document
from search.closed_form.tensor2d.documents import Model, Strategy, System
from search.closed_form.tensor2d.engine import COMPAT, CORRECT, Quirks
from tests.oracles.tensor2d.checks import candidate_of, check_attention, check_candidate
from tests.oracles.tensor2d.step import Candidate, all_rows, step_statistics
from tests.oracles.tensor2d.tables import row_table

__all__ = ["Candidate", "evaluate"]


def evaluate(
    strategy: Strategy,
    model: Any,
    config: Mapping[str, int],
    placement: Mapping[str, int],
    n_gpus: int,
    global_batch_size: int,
    system: Any,
    *,
    compat: bool | Quirks = False,
    attention: str = "flash",
    recompute: bool = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return or raise what `search.closed_form.tensor2d.evaluate` must return or raise."""
    m, s = load_document(Model, model), load_document(System, system)
    if compat is True:
        m = m.published()
    quirks = compat if isinstance(compat, Quirks) else (COMPAT if compat else CORRECT)
    c = candidate_of(strategy, config, placement)
    check_candidate(m, strategy, c, n_gpus, global_batch_size, s)
    check_attention(attention, m, strategy, c, recompute=recompute, compat=compat is True)
    way: dict[str, Any] = {"attention": attention, "recompute": recompute}
    statistics = step_statistics(m, strategy, c, global_batch_size, s, quirks, **way)
    if layers:
        statistics["layers"] = row_table(all_rows(m, strategy, c, s, quirks, **way), s)
    return statistics
