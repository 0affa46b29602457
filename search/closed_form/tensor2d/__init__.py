"""Time and memory of one training step under one- and two-dimensional tensor parallelism.

Source: arXiv 2410.00273.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InfeasibleExecution
from search.closed_form.native import check_threads
from search.closed_form.tensor2d.documents import STRATEGIES, Attention, Model, Strategy, System
from search.closed_form.tensor2d.engine import (
    CANDIDATE,
    COMPAT,
    CORRECT,
    OUTCOME,
    REASONS,
    Quirks,
    native_engine,
    pack_candidates,
    price_candidate,
)
from search.closed_form.tensor2d.exploration import Found, Objective, Survey, explore_space

__all__ = [
    "CANDIDATE",
    "COMPAT",
    "CORRECT",
    "OUTCOME",
    "STRATEGIES",
    "Attention",
    "Found",
    "InfeasibleExecution",
    "Model",
    "Objective",
    "Quirks",
    "Strategy",
    "Survey",
    "System",
    "evaluate",
    "evaluate_many",
    "explore",
    "survey",
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
    attention: Attention = "flash",
    recompute: bool = False,
    layers: bool = False,
) -> dict[str, Any]:
    """Return the statistics of one candidate by name, in seconds, 1e9 bytes and 1e12 FLOP.

    config : `dp`, `tp`, `pp`, `mbs`; two-dimensional strategies also `tp1`, `tp2`, and `2d` `nb`.
    placement : ranks of each group in one fast domain: `nv_tp` (or `nv_tp1`, `nv_tp2`), `nv_dp`,
        `nv_pp`.
    compat : True for the published model with its defects, which knows only the five sizes; or
        the defects to keep.
    attention : `plain` writes its scores, and causal masks save it nothing; `summa` (of `2d`)
        divides both of its products like the other ones. Searches know `flash` alone.
    recompute : what plain attention writes is made again in backward, not kept.
    layers : add a row per operation of a layer, and of what surrounds the layers, under `layers`.

    Memory is not tested: `mem` is for comparison with the system's `hbm_capacity`.

    Raises
    ------
    InputError: a document or a number is unusable.
    InfeasibleExecution: the candidate cannot run; its `reason` says why.
    """
    return price_candidate(
        strategy,
        _model(model, compat),
        config,
        placement,
        n_gpus,
        global_batch_size,
        load_document(System, system),
        _quirks(compat),
        attention=attention,
        recompute=recompute,
        layers=layers,
        published=compat is True,
    )


def evaluate_many(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    candidates: NDArray[Any] | Mapping[str, Any] | Iterable[Mapping[str, int]],
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    compat: bool | Quirks = False,
    threads: int = 1,
) -> NDArray[Any]:
    """Return what is known of many candidates, as a structured array in their order.

    candidates : an array of `CANDIDATE`; columns by published name; or one mapping each, with the
        names of `config` and `placement` in one.
    threads : of the compiled engine, 1 to 1024; answers do not depend on their number.

    Fields: `ok`, `reason` (a sentence without figures, empty where it runs), `total_time_s`,
    `memory_bytes` and `sample_rate_per_s`. One that needs more memory than a GPU has is not `ok`,
    and has its figures all the same.

    Raises
    ------
    InputError: a document or a column is unusable.
    """
    check_threads(threads)
    m = _model(model, compat)
    s = load_document(System, system)
    engine = native_engine(strategy, m, n_gpus, global_batch_size, s, _quirks(compat))
    found, _ = engine.evaluate_many(pack_candidates(strategy, candidates), threads, False)
    result = np.zeros(found.shape, dtype=OUTCOME)
    result["ok"] = found["ok"]
    result["reason"] = _TEXTS[found["reason"]]
    result["total_time_s"] = found["time_s"]
    # the engine counts 1e9 bytes
    result["memory_bytes"] = found["memory_gb"] * 1e9
    # what contradicts itself has no time to divide by
    priced = found["time_s"] > 0
    result["sample_rate_per_s"][priced] = global_batch_size / found["time_s"][priced]
    return result


def explore(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    top: int = 10,
    compat: bool | Quirks = False,
    threads: int = 1,
    objective: Objective = "rate",
) -> list[Found]:
    """Return the best candidates of the whole space, best first; `survey` says more."""
    return survey(
        strategy,
        model,
        n_gpus,
        global_batch_size,
        system,
        top=top,
        compat=compat,
        threads=threads,
        objective=objective,
    ).best


def survey(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    top: int = 10,
    compat: bool | Quirks = False,
    threads: int = 1,
    objective: Objective = "rate",
    keep_all: bool = False,
) -> Survey:
    """Return the best candidates of the whole space, and how many there are of which kind.

    top : how many, exactly the best ones, none twice.
    objective : `rate` and `time` are one order, as the batch is given; `memory` is the least.
    keep_all : add every feasible candidate with its time and memory; none is then skipped.

    Raises
    ------
    InputError: a document or a number is unusable.
    """
    return explore_space(
        strategy,
        _model(model, compat),
        n_gpus,
        global_batch_size,
        load_document(System, system),
        _quirks(compat),
        top=top,
        threads=threads,
        objective=objective,
        keep_all=keep_all,
    )


_TEXTS = np.array(REASONS, dtype=object)


def _quirks(compat: bool | Quirks) -> Quirks:
    return compat if isinstance(compat, Quirks) else (COMPAT if compat else CORRECT)


def _model(model: Model | Mapping[str, Any] | Path | str, compat: bool | Quirks) -> Model:
    known = load_document(Model, model)
    return known.published() if compat is True else known
