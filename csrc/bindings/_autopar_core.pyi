from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ABI_VERSION: int
calculon: Any
"""Submodule of the closed-form engine; see search/closed_form/calculon/engine.py."""
tensor2d: Any
"""Submodule of the closed-form engine; see search/closed_form/tensor2d/engine.py."""

class Halt:
    """Gives up work of the closed forms from another thread."""
    def ask(self) -> None: ...
    def asked(self) -> bool: ...

def solve_stage(
    time_s: NDArray[np.float64],
    memory_bytes: NDArray[np.float64],
    transition_s: NDArray[np.float64],
    budget_bytes: float,
    transient_bytes: NDArray[np.float64] | None = None,
) -> tuple[bool, tuple[int, ...], float, float]: ...
def replay(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    tail_s: Sequence[float],
    num_microbatches: int,
    gpipe: bool,
    timeline: bool,
) -> tuple[float, tuple[NDArray[Any], ...] | None]: ...
def read_documents(
    documents: list[Any],
    fields: list[tuple[str, int, bool, dict[str, int] | None, int | None]],
) -> NDArray[np.int64] | None: ...

class Knowledge:
    def __init__(self) -> None: ...

def search_plan(
    arrays: dict[str, NDArray[Any]],
    gpipe: bool,
    division: list[int],
    budget: int,
    time_limit_s: float,
    alternatives: int,
    uniform: bool,
    known: Knowledge | None = None,
) -> dict[str, Any]: ...
