"""Planning: from profile documents to the fastest plan that fits, with numpy and the C++ core.

Nothing here needs torch. The stable interface is `plan`, `Planner`, `solve_stage`, `SearchOptions`
and `SearchResult`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec
    from search.planning.layered.core import solve_stage
    from search.planning.layered.prediction import SearchResult
    from search.planning.planner import Planner
    from search.request.options import SearchOptions

__all__ = ["Planner", "SearchOptions", "SearchResult", "plan", "solve_stage"]

_HOMES = {
    "Planner": "search.planning.planner",
    "SearchOptions": "search.request.options",
    "SearchResult": "search.planning.layered.prediction",
    "solve_stage": "search.planning.layered.core",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `--help` and the readers start quickly.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'search' has no attribute {name!r}")


def plan(
    model: str | Path | tuple[ModelSpec, ModelProfile],
    hardware: str | Path | HardwareProfile,
    **options: Any,
) -> SearchResult:
    """Return the fastest plan of a model on all GPUs of a cluster: `autopar search --use all`.

    model : value of `--model`, or the two documents
    hardware : value of `--hardware` (`h100:4x8`, a shipped name, a directory), or the document
    options : keywords of `request_of`: the options of the command, with its defaults

    Raises InputError: an input or option is unusable.
    """
    from search.planning.planner import Planner

    return Planner(model, hardware, **options).best()
