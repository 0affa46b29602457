"""Engine record: the functions that read, write and describe runs of one training software.

The functions are in the folder of the engine, which is imported at the first call. A command that
only prints its help imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from autopar.records import Record


class Engine(Record):
    """Training software; a function is None where autopar does not support it."""

    name: str
    """Value of `--engine`, `--to` and `--from`."""
    title: str
    """Name of the engine in sentences."""
    titled_by_release: bool = False
    """True if keys differ between releases, so that sentences on files name the release."""
    forms: str = ""
    """File types that `owns` recognises, such as `script, YAML or JSON`."""
    owns: Callable[..., bool] | None = None
    """Function (Configuration) -> True if the file starts this engine; raises nothing."""
    read: Callable[..., Any] | None = None
    """Function (Configuration, Asked) -> `CheckedFile`. It raises DocumentError where the number of
    GPUs is unknown; every other problem is a finding."""
    card: Callable[..., str | None] | None = None
    """Function (Configuration) -> name of the GPU model that the file is for, or None."""
    write: Callable[..., Any] | None = None
    """Function (Run, Place) -> `Draft`; raises InputError where the engine has nothing near the
    run."""
    starts: tuple[str, ...] = ()
    """Engines whose runs this engine can start unchanged."""
    spaces: Callable[[], Any] | None = None
    """Function () -> search spaces of uniform plans, one `EngineSpace` for each variant."""
    lower: Callable[..., Any] | None = None
    """Function (Job of a plan) -> `ExportedPlan`, for engines that run per-layer plans."""
    near: Callable[..., Any] | None = None
    """Function (Job of a plan) -> `NearestPlan`, for engines with one set of degrees."""
    handed: Callable[..., Any] | None = None
    """Function (Job, plan of its `NearestPlan`) -> (Run, ExportTarget)."""
    plans: Callable[[], Any] | None = None
    """Function () -> `ExporterSpace` of plans that the engine runs unchanged, which `--engine`
    searches."""
    imports: Callable[..., Any] | None = None
    """Function (Configuration, world_size, num_layers) -> `ImportedPlan` plan."""

    @property
    def exports(self) -> bool:
        """True if per-layer plans can be exported to the engine."""
        return self.plans is not None


def function_of(path: str) -> Callable[..., Any]:
    """Return a function that imports and calls `FOLDER.MODULE.NAME` when it is called."""
    module, _, name = path.rpartition(".")

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"search.engines.{module}"), name)(*arguments, **named)

    return call


def value_of(path: str) -> Callable[[], Any]:
    """Return a function that imports and returns the value `FOLDER.MODULE.NAME`."""
    module, _, name = path.rpartition(".")
    return lambda: getattr(import_module(f"search.engines.{module}"), name)
