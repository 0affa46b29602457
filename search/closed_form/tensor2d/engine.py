"""Candidates by the million: packs them for the compiled engine and reads its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InputError
from search.closed_form import native
from search.closed_form.native import check_names, integers, packed_rows
from search.closed_form.tensor2d.documents import STRATEGIES, Model, Strategy, System

__all__ = [
    "CANDIDATE",
    "COMPAT",
    "CORRECT",
    "LARGEST",
    "OUTCOME",
    "REASONS",
    "STATISTICS",
    "Quirks",
    "native_engine",
    "pack_candidates",
    "unpack_candidate",
]


# --------------------------------------------------------------------------------------------------
# Switches for what the published numbers of this model contain and should not.
#
# All off is the corrected model and the default; all on reproduces published figures (`compat`).


@dataclass(frozen=True, kw_only=True)
class Quirks:
    """Defects to reproduce, one switch each; numbers are those of the documentation."""

    single_allreduce: bool = False
    """Q1: an all-reduce inside one domain, or with one rank per domain, moves data once, and its
    latency is never doubled; right: twice, everywhere."""
    free_slow_links: bool = False
    """Q2: pipeline links between domains cost nothing once some are inside; right: their time."""
    norm_width_of_sequence: bool = False
    """Q3: norms of the two-dimensional model are as wide as the sequence; right: as the
    hidden size."""
    norm_gradient_group: bool = False
    """Q4: both gradients of such a norm are reduced over the columns; right: weights over the
    rows, statistics over the columns."""
    extra_panel: bool = False
    """Q5: a communication-bound SUMMA product exposes one panel too many and pools the loops of
    backward; right: each loop by itself."""
    bias_shapes: bool = False
    """Q6: biases behind a reduce-scatter work on all rows; right: on their share."""
    one_adapter: bool = False
    """Q7: more than one network adapter per GPU helps only groups with several ranks per domain;
    right: every transfer."""
    flash_traffic: bool = False
    """Q8: keys and values gathered again in backward count as local parts; right: whole."""
    dropped_rows: bool = False
    """Q9: sequences that the tensor degree does not divide lose their remainder; right: rows are
    of the whole micro-batch."""
    recompute_time_only: bool = False
    """Q10: recomputing attention adds time but no FLOP; right: both."""
    repeated_panels: bool = False
    """Q14: SUMMA products count 2*i per output and write every panel; right: 2*i-1, once when
    nothing is divided."""


CORRECT = Quirks()
COMPAT = Quirks(**dict.fromkeys((f.name for f in fields(Quirks)), True))


# --------------------------------------------------------------------------------------------------
# Why the compiled engine refuses a candidate, in the order of its codes.


REASONS: tuple[str, ...] = (
    "",
    "a degree, a panel count or a placement is below 1, or tp2 is above 1 without a second axis",
    "dp * tp1 * tp2 * pp != n_gpus",
    "tp1 does not divide the heads",
    "tp1 does not divide the hidden size",
    "tp1 does not divide the feed-forward width",
    "pp does not divide the layers",
    "dp * mbs does not divide the batch",
    "tp2 does not divide the hidden size",
    "the sequence is shorter than tp1 * tp2",
    "the tokens of a micro-batch do not divide over the GPUs that share them",
    "nb is above the hidden size",
    "neither of kv_heads and tp1 divides the other",
    "a placement does not divide its group",
    "a fast domain is smaller than the placement",
    "needs more memory than a GPU has",
)
"""Sentences without figures; `evaluate` gives them with their figures."""


# --------------------------------------------------------------------------------------------------


CANDIDATE: np.dtype[Any] = native.tensor2d.CANDIDATE
"""Fields of one packed candidate; `1d` has `tp1` for its `tp`, and `tp2` = 1."""
OUTCOME = np.dtype(
    [
        ("ok", np.bool_),
        ("reason", object),
        ("total_time_s", np.float64),
        ("memory_bytes", np.float64),
        ("sample_rate_per_s", np.float64),
    ]
)
"""What is known of one candidate; figures are 0 where it contradicts itself."""
_PARTS = ("comp", "mem", "tp_comm", "dp_comm", "pp_comm", "bubble")
STATISTICS: tuple[str, ...] = (
    "t",
    "flops_per_gpu",
    "mem",
    *(f"t_{name}" for name in _PARTS),
    *(f"{name}_frac" for name in _PARTS),
    "wts_mem",
    "wts_grad_mem",
    "wts_optimizer_states_mem",
    "acts_mem",
)
"""Published names of the engine's statistics, in its order; the placement follows them."""
LARGEST = 2**31 - 1
"""Of GPUs, of a batch, and of every field of a candidate."""
_NAMES: tuple[str, ...] = CANDIDATE.names or ()


def native_engine(
    strategy: Strategy, model: Model, n_gpus: int, batch: int, system: System, quirks: Quirks
) -> Any:
    """Return the compiled engine of a model on a system."""
    for name, value in (("n_gpus", n_gpus), ("batch", batch)):
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise InputError(
                f"{name}: the value is {shorten(value)}, expected an integer from 1 to {LARGEST}"
            )
    if strategy not in STRATEGIES:
        raise InputError(
            f"strategy: the value is {shorten(strategy)}, expected one of {', '.join(STRATEGIES)}"
        )
    return native.tensor2d.Engine(
        model.model_dump()
        | {
            "kv_heads": model.kv_heads or 0,
            "gpt": model.structure == "gpt",
            "gradients": model.gradient_bytes / 2,
        },
        system.model_dump(),
        asdict(quirks),
        STRATEGIES.index(strategy),
        n_gpus,
        batch,
    )


def pack_candidates(
    strategy: Strategy,
    candidates: NDArray[Any] | Mapping[str, Any] | Iterable[Mapping[str, int]],
) -> NDArray[Any]:
    """Return candidates as an array of `CANDIDATE`.

    candidates : such an array; columns by published name, broadcast to one length; or one mapping
        each, the configuration and the placement in one.

    Raises
    ------
    InputError: a name is unknown or missing, or a value is not what it can hold.
    """
    if isinstance(candidates, np.ndarray):
        if candidates.dtype != CANDIDATE:
            raise InputError(
                f"candidates: the array has fields {shorten(candidates.dtype.names)}, expected "
                "those of search.closed_form.tensor2d.CANDIDATE"
            )
        return np.ascontiguousarray(candidates)
    expected = _published(strategy)
    if isinstance(candidates, Mapping):
        return _pack_columns(strategy, expected, candidates)
    rows = list(candidates)
    for n, row in enumerate(rows):
        for name in expected:
            if name not in row:
                raise InputError(f"candidates[{n}].{name}: is missing")
    names = dict.fromkeys(name for row in rows for name in row if name not in expected)
    return _pack_columns(
        strategy,
        expected,
        {name: [row[name] for row in rows] for name in expected}
        | {name: [row.get(name, 0) for row in rows] for name in names},
    )


def unpack_candidate(strategy: Strategy, row: np.void) -> tuple[dict[str, int], dict[str, int]]:
    """Return configuration and placement of one packed candidate under their published names."""
    values = {name: int(row[name]) for name in _NAMES}
    found = {name: values[packed] for name, packed in _published(strategy).items()}
    config = {name: value for name, value in found.items() if not name.startswith("nv_")}
    if strategy != "1d":
        config["tp"] = values["tp1"] * values["tp2"]
    return config, {name: value for name, value in found.items() if name.startswith("nv_")}


def _published(strategy: Strategy) -> dict[str, str]:
    """Return the published names of a candidate, and the fields that hold them."""
    flat = strategy == "1d"
    degrees = ("tp1",) if flat else ("tp1", "tp2")
    panels = ("nb",) if strategy == "2d" else ()
    domains = tuple(f"nv_{name}" for name in degrees)
    fields = ("dp", *degrees, "pp", "mbs", *panels, *domains, "nv_dp", "nv_pp")
    return {name.replace("tp1", "tp") if flat else name: name for name in fields}


def _pack_columns(
    strategy: Strategy, expected: Mapping[str, str], columns: Mapping[str, Any]
) -> NDArray[Any]:
    given = dict(columns)
    if strategy != "1d" and "tp" in given and {"tp1", "tp2"} <= given.keys():
        tp = _column("tp", given.pop("tp"))
        if not np.all(tp == _column("tp1", given["tp1"]) * _column("tp2", given["tp2"])):
            raise InputError("candidates.tp: is not tp1 * tp2 everywhere")
    check_names("candidates", given, expected)
    columns = {packed: _column(name, given[name]) for name, packed in expected.items()}
    return packed_rows("candidates", CANDIDATE, columns)


def _column(name: str, values: Any) -> NDArray[Any]:
    return integers(f"candidates.{name}", values, LARGEST).astype(np.int64)
