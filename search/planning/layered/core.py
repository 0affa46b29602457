"""Python interface of the C++ planner core, which takes cost tables and returns plan indices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import asdict
from numpy.typing import ArrayLike, NDArray

from autopar.errors import InputError, InstallError
from autopar.records import Record

if TYPE_CHECKING:
    from _autopar_core import Knowledge

    from search.planning.cost.tables import PlanTables

# --------------------------------------------------------------------------------------------------
# The compiled module, checked for the version of this package.


try:
    import _autopar_core
except ImportError as error:  # pragma: no cover - depends on the installation
    raise InstallError(
        "the C++ core is not built",
        remedy=f"Run `make build` in a checkout, or reinstall autopar ({error})",
    ) from error

core = _autopar_core

# History of the interface between Python and C++; both sides contain the number.
#   1  the planner
#   2  the closed-form engines
#   4  the event replay; sums of a stage's answer
#   5  cache of proven results between searches of the same tables
#   6  the event replay of every schedule
ABI_VERSION = 6
if core.ABI_VERSION != ABI_VERSION:  # pragma: no cover - depends on the installation
    raise InstallError(
        f"the C++ core has interface version {core.ABI_VERSION}, this package needs {ABI_VERSION}",
        remedy="Run `make build`",
    )


# --------------------------------------------------------------------------------------------------
# Calls of the core, with contiguous arrays and statuses as words.


_LARGEST = 1e150
"""Largest accepted number of seconds or bytes; sums of larger numbers would overflow."""


class StageSolution(Record):
    """Fastest strategies of the layers of one stage within a memory budget."""

    status: Literal["optimal", "infeasible"]
    total_s: float
    """Sum of layer and transition times, seconds; infinite if infeasible."""
    choice: tuple[int, ...]
    """Strategy index of each layer; empty if infeasible."""
    memory_bytes: float
    """Sum of `memory_bytes` of the layers plus the largest transient memory."""
    bound_s: float
    """Lower bound of `total_s` of any choice within the budget."""


class TableChoice(Record):
    """Plan as indices into `PlanTables`, with its step time."""

    candidate: int
    stage_sizes: tuple[int, ...]
    strategy_index: tuple[int, ...]
    vocab_index: int
    step_time_s: float


class TableSolution(Record):
    """Result of `solve_tables`; index fields are -1 or empty if no plan was found."""

    status: Literal["optimal", "time_limit", "infeasible"]
    candidate: int
    stage_sizes: tuple[int, ...]
    strategy_index: tuple[int, ...]
    vocab_index: int
    step_time_s: float
    bound_step_time_s: float
    """Lower bound of the step time of any plan, scaled to the global batch of the found plan."""
    bound_s_per_sample: float
    """Lower bound of the step time over the global batch of any plan, seconds per sample."""
    alternatives: tuple[TableChoice, ...]
    too_large: bool
    """True if the core ran out of its memory for the non-dominated partial plans of a stage."""
    alternatives_complete: bool
    """False if the time limit ended the search before all alternatives were searched."""
    smallest_budget_bytes: int
    """Minimum memory budget with a plan if infeasible, bytes; 0: no budget suffices."""
    binding_candidate: int
    """Candidate that needs `smallest_budget_bytes`."""
    binding_stage: int
    """Stage of that candidate with the largest memory."""
    states: int
    """Partial plans created by the search."""
    items: int
    """Sub-problems (candidate and vocabulary strategy) considered."""
    opened: int
    """Sub-problems solved exactly; bounds excluded the others."""


def _floats(name: str, value: ArrayLike) -> NDArray[np.float64]:
    try:
        return np.ascontiguousarray(value, dtype=np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"{name} is not an array of real numbers ({error})") from None


def _matrix(name: str, value: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    array = _floats(name, value)
    if array.shape != shape:
        raise InputError(f"{name} has shape {array.shape}, expected {shape}")
    return array


def solve_stage(
    time_s: ArrayLike,
    memory_bytes: ArrayLike,
    transition_s: ArrayLike,
    budget_bytes: float,
    transient_bytes: ArrayLike | None = None,
) -> StageSolution:
    """Return the proven fastest choice of one strategy per layer within a memory budget.

    time_s : (L, S) seconds of layer l with strategy s; infinite where not allowed.
    memory_bytes : (L, S) bytes that layer l needs throughout the step with strategy s.
    transition_s : (L, S, S) seconds between strategy x of layer l-1 and strategy y of layer l;
        `transition_s[0]` is ignored.
    budget_bytes : limit of the sum of `memory_bytes` plus the largest `transient_bytes`.
    transient_bytes : (L, S) bytes of transient memory; zero if None.

    Raises InputError: an array has the wrong shape, or contains NaN, a negative number or a finite
    number above 1e150; or the budget is not a number.
    """
    times = _floats("time_s", time_s)
    shape = times.shape
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"time_s has shape {shape}, expected (layers, strategies)")
    memory = _matrix("memory_bytes", memory_bytes, shape)
    moves = _matrix("transition_s", transition_s, (*shape, shape[1]))
    transient = None
    if transient_bytes is not None:
        transient = _matrix("transient_bytes", transient_bytes, shape)
    # the core checks values while reading them; on an error they are checked here for the message
    try:
        feasible, choice, total, kept = core.solve_stage(
            times, memory, moves, float(budget_bytes), transient
        )
    except (OverflowError, TypeError, ValueError) as error:
        named = {"time_s": times, "memory_bytes": memory, "transient_bytes": transient}
        # the first transition is not charged, so it may contain any value
        _check_values({**named, "transition_s": moves[1:]})
        _check_budget(budget_bytes)
        raise InputError(str(error)) from None
    if not feasible:
        infinite = float("inf")
        return StageSolution(
            status="infeasible", total_s=infinite, choice=(), memory_bytes=0.0, bound_s=infinite
        )
    return StageSolution(
        status="optimal", total_s=total, choice=choice, memory_bytes=kept, bound_s=total
    )


def _check_values(arrays: Mapping[str, NDArray[np.float64] | None]) -> None:
    """Raise InputError for the first array with NaN, a negative number or one above `_LARGEST`."""
    for name, array in arrays.items():
        if array is None:
            continue
        if np.isnan(array).any():
            raise InputError(f"{name} contains NaN", remedy="Use infinity for forbidden entries")
        if (array < 0).any():
            raise InputError(f"{name} contains a negative number ({array.min()})")
        if array[np.isfinite(array)].max(initial=0.0) > _LARGEST:
            raise InputError(f"{name} contains a number above {_LARGEST:g}")


def _check_budget(budget_bytes: object) -> None:
    try:
        budget = float(budget_bytes)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InputError(f"budget_bytes is {budget_bytes!r}, expected a number") from None
    except OverflowError:  # an integer that may be too long to print
        raise InputError(
            f"budget_bytes has over 308 digits, expected a number of bytes up to {_LARGEST:g}"
        ) from None
    if np.isnan(budget):
        raise InputError("budget_bytes is NaN, expected a number of bytes")


_GROUPS = {"ddp": 0, "zero2": 1, "zero1": 2}


def _arrays(tables: PlanTables, stage_allowed: NDArray[np.bool_] | None) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        name: value for name, value in asdict(tables).items() if isinstance(value, np.ndarray)
    }
    arrays["valid"] = tables.valid.astype(np.uint8)
    arrays["vocab_valid"] = tables.vocab_valid.astype(np.uint8)
    arrays["table_group"] = np.array([_GROUPS[d] for d in tables.table_dp], dtype=np.int32)
    if stage_allowed is None:
        # an empty array restricts no stage
        stage_allowed = np.ones((0, len(tables.strategies)), dtype=np.bool_)
    arrays["stage_allowed"] = stage_allowed.astype(np.uint8)
    return arrays


# above any memory, and far below the limit where sums of bytes exceed 63 bits
_LARGEST_BUDGET = 2**60


def _check_tables(
    tables: PlanTables,
    stage_allowed: NDArray[np.bool_] | None,
    division: tuple[int, ...],
    alternatives: int,
) -> None:
    """Raise InputError for invalid arguments that the core does not check, such as array shapes."""
    n, k, s = tables.valid.shape
    e, y, layers = len(tables.vocab), len(tables.layouts), len(tables.layer_type)
    shapes = {
        (n, k, s): "forward_s backward_s tail_s activation_bytes shared_bytes",
        (2, n, k, s): "static_bytes transient_bytes",
        (n, k, y, y): "redistribute_forward_s redistribute_backward_s",
        (n, k, y): "send_s",
        (n, e): "vocab_valid",
        (n, 3, e): "vocab_forward_s vocab_backward_s vocab_tail_s vocab_activation_bytes "
        "vocab_shared_bytes",
        (2, n, 3, e): "vocab_static_bytes vocab_transient_bytes",
        (n, 4): "stage_fixed_bytes",
        (n,): "table_stages table_microbatch",
        (s,): "strategy_layout",
        (e,): "vocab_layout",
    }
    wrong = [
        f"{name} has shape {getattr(tables, name).shape}, expected {shape}"
        for shape, names in shapes.items()
        for name in names.split()
        if getattr(tables, name).shape != shape
    ]
    if stage_allowed is not None and stage_allowed.shape[1:] != (s,):
        wrong.append(f"stage_allowed has shape {stage_allowed.shape}, expected (stages, {s})")
    if division and sum(division) != layers:
        wrong.append(f"division sums to {sum(division)}, expected {layers} layers")
    if alternatives < 0:
        wrong.append(f"alternatives is {alternatives}, expected a number from 0")
    if y > _MOST_LAYOUTS:
        wrong.append(f"{y} layouts are more than {_MOST_LAYOUTS}; allow fewer degrees")
    if wrong:
        raise InputError(wrong[0])


# the core stores the layouts of a plan as bits of one 64-bit word
_MOST_LAYOUTS = 64


def solve_tables(
    tables: PlanTables,
    budget_bytes: int,
    *,
    alternatives: int = 0,
    time_limit_s: float | None = None,
    uniform: bool = False,
    division: tuple[int, ...] = (),
    stage_allowed: NDArray[np.bool_] | None = None,
    known: Knowledge | None = None,
) -> TableSolution:
    """Return the plan with the highest throughput (global batch / step time) that fits in memory.

    Ctrl-C interrupts the search.

    budget_bytes : limit of the allocated bytes of every stage.
    alternatives : number of other plans to return.
    time_limit_s : seconds after which the best plan found so far is returned; None: no limit.
    uniform : True to require one strategy for all layers.
    division : number of layers per stage; empty: searched.
    stage_allowed : (R, S) strategies allowed in the first R stages; None: all.
    known : results that earlier searches of the same tables proved at other budgets. The search
        extends them; they make it faster and do not change its result.

    Raises InputError: an array has the wrong shape or an invalid value. Raises MemoryError: the
    search needs more memory than available.
    """
    _check_tables(tables, stage_allowed, division, alternatives)
    try:
        answer = core.search_plan(
            _arrays(tables, stage_allowed),
            tables.pipeline_type == "gpipe",
            list(division),
            # budgets below 0 or above the largest change nothing, but the core accepts 64 bits only
            int(min(max(budget_bytes, -1), _LARGEST_BUDGET)),
            # 0 is no limit
            0.0 if time_limit_s is None else float(time_limit_s),
            alternatives,
            uniform,
            known,
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    best = answer["best"]
    batch = 0
    if answer["found"]:
        batch = int(tables.candidate_batch[best["candidate"]])
    return TableSolution(
        status=answer["status"],
        candidate=best["candidate"],
        stage_sizes=tuple(best["stage_sizes"]),
        strategy_index=tuple(best["strategies"]),
        vocab_index=best["vocab"],
        step_time_s=best["step_time_s"] if answer["found"] else float("inf"),
        # candidates differ in batch, so the core bounds seconds per sample
        bound_step_time_s=answer["bound_s_per_sample"] * batch,
        bound_s_per_sample=answer["bound_s_per_sample"],
        alternatives=tuple(
            TableChoice(
                candidate=a["candidate"],
                stage_sizes=tuple(a["stage_sizes"]),
                strategy_index=tuple(a["strategies"]),
                vocab_index=a["vocab"],
                step_time_s=a["step_time_s"],
            )
            for a in answer["alternatives"]
        ),
        too_large=answer["too_large"],
        alternatives_complete=answer["alternatives_complete"],
        smallest_budget_bytes=answer["smallest_budget"],
        binding_candidate=answer["binding_candidate"],
        binding_stage=answer["binding_stage"],
        states=answer["states"],
        items=answer["items"],
        opened=answer["opened"],
    )
