"""Planning: from profile documents to the fastest plan that fits, with numpy and the C++ core.

Nothing here needs torch. The stable interface is `plan`, `Planner`, `solve_stage`, `SearchOptions`
and `SearchResult`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec
    from search.planning.layered.core import solve_stage
    from search.planning.layered.planner import Planner
    from search.planning.layered.prediction import SearchResult
    from search.request.options import SearchOptions

__all__ = ["Planner", "SearchOptions", "SearchResult", "plan", "solve_stage"]

_HOMES = {
    "Planner": "search.planning.layered.planner",
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
    model: str | tuple[ModelSpec, ModelProfile],
    hardware: str | HardwareProfile,
    **options: Any,
) -> SearchResult:
    """Return the fastest plan of a model on a cluster; one search with `Planner`.

    Its alternatives differ in stages or degrees of layers, like those of the command.

    Parameters
    ----------
    model : value of `--model`, or the two documents
    hardware : value of `--hardware` (`h100:4x8`, a shipped name, a directory), or the document
    options : fields of `SearchOptions`; `memory_constraint_gib` in GiB. As on the command line, the
        memory constraint defaults to the memory of the device if it is known, and estimated times
        to the mode `batch`.

    Raises
    ------
    InputError : an input or option is unusable.
    """
    from search.planning.layered.planner import Planner, solve_by_family

    planner = Planner(model, hardware, **options)
    return solve_by_family(planner, planner.options.top)
