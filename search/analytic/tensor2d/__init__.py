"""Time and memory of one training step under one- and two-dimensional tensor parallelism.

Source: arXiv 2410.00273.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import InfeasibleExecution
from search.analytic.documents import load_document
from search.analytic.tensor2d.checks import candidate_of, check_candidate
from search.analytic.tensor2d.documents import STRATEGIES, Model, Strategy, System
from search.analytic.tensor2d.quirks import COMPAT, CORRECT, Quirks
from search.analytic.tensor2d.step import Candidate, step_statistics

__all__ = [
    "COMPAT",
    "CORRECT",
    "STRATEGIES",
    "Candidate",
    "InfeasibleExecution",
    "Model",
    "Quirks",
    "Strategy",
    "System",
    "evaluate",
]


def evaluate(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    config: Mapping[str, int],
    placement: Mapping[str, int],
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
) -> dict[str, Any]:
    """Return the statistics of one candidate by name, in seconds, 1e9 bytes and 1e12 FLOP.

    config : `dp`, `tp`, `pp`, `mbs`; two-dimensional strategies also `tp1`, `tp2`, and `2d` `nb`.
    placement : ranks of each group in one fast domain: `nv_tp` (or `nv_tp1`, `nv_tp2`), `nv_dp`,
        `nv_pp`.
    compat : True for the published figures with their defects, or the defects to keep.

    Memory is not tested: `mem` is for comparison with the system's `hbm_capacity`.

    Raises
    ------
    InputError: a document is unusable.
    InfeasibleExecution: the candidate cannot run; its `reason` says why.
    """
    m = load_document(Model, model)
    s = load_document(System, system)
    quirks = compat if isinstance(compat, Quirks) else (COMPAT if compat else CORRECT)
    candidate = candidate_of(strategy, config, placement)
    check_candidate(m, strategy, candidate, n_gpus, global_batch_size, s)
    return step_statistics(m, strategy, candidate, global_batch_size, s, quirks)
