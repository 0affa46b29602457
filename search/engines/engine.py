"""Interface to a training engine: functions that read and write its files and plans.

The functions are in the folder of the engine, which is imported at the first call. Commands that
need no engine, such as `--help`, import none.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from autopar.records import Record


class Engine(Record):
    """Training engine. A function is None if autopar does not support the operation."""

    name: str
    """Value of `--engine`, `--to` and `--from`."""
    title: str
    """Name of the engine in sentences."""
    titled_by_release: bool = False
    """True if messages name the release, because keys differ between releases."""
    asks_for_batch: bool = False
    """True if files may leave the batch to the training script."""
    forms: str = ""
    """File types that `owns` recognises, such as `script, YAML or JSON`."""
    owns: Callable[..., bool] | None = None
    """Function (Configuration) -> True if the file is of this engine. It raises no errors."""
    read: Callable[..., Any] | None = None
    """Function (Configuration, CheckOptions) -> `CheckedFile`. It raises DocumentError if the
    number of GPUs is unknown or contradictory; every other problem becomes a finding."""
    card: Callable[..., str | None] | None = None
    """Function (Configuration) -> name of the GPU model that the file is for, or None."""
    write: Callable[..., Any] | None = None
    """Function (Run, ExportTarget) -> `Draft`. It raises InputError if the engine cannot express
    the model or the layer partition of the run."""
    starts: tuple[str, ...] = ()
    """Names of other engines whose runs can be exported to this engine."""
    as_run: Callable[..., Any] | None = None
    """Function (run of an engine of `starts`) -> the run as this engine trains it; None: equal."""
    tuner: str = ""
    """Name of the engine whose files train adapters; empty: the engine itself, or none."""
    spaces: Callable[[], Any] | None = None
    """Function () -> search spaces of uniform plans: an `EngineSpace` per variant of the engine."""
    lower: Callable[..., Any] | None = None
    """Function (ExportJob) -> `ExportedPlan`, for engines that run per-layer plans."""
    near: Callable[..., Any] | None = None
    """Function (ExportJob) -> `NearestPlan`, for engines with one set of degrees."""
    handed: Callable[..., Any] | None = None
    """Function (ExportJob, plan of its `NearestPlan`) -> (Run, ExportTarget)."""
    plans: Callable[[], Any] | None = None
    """Function () -> `ExporterSpace`: plans that the engine runs unchanged, searched with
    `--engine`."""
    imports: Callable[..., Any] | None = None
    """Function (Configuration, world_size, num_layers) -> `ImportedPlan`."""

    @property
    def exports(self) -> bool:
        """True if per-layer plans can be exported to the engine."""
        return self.plans is not None


def function_of(path: str) -> Callable[..., Any]:
    """Return a function that calls `FOLDER.MODULE.NAME` and imports the module only then."""
    module, _, name = path.rpartition(".")

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"search.engines.{module}"), name)(*arguments, **named)

    return call


def value_of(path: str) -> Callable[[], Any]:
    """Return a function that returns `FOLDER.MODULE.NAME` and imports the module only then."""
    module, _, name = path.rpartition(".")
    return lambda: getattr(import_module(f"search.engines.{module}"), name)
