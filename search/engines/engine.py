"""Engine: software that trains, as the functions that read, write and describe its launches.

The functions are in the folder of the engine, which is imported when one of them is called: a
command that prints its help imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from autopar.records import Record


class Engine(Record):
    """Software that trains; None stands for what is not written or read of it here."""

    name: str
    """Value of `--engine`, `--to` and `--from`."""
    title: str
    """Name in sentences."""
    titled_by_release: bool = False
    """Releases have other keys, so that sentences on files name the release."""
    forms: str = ""
    """Kinds of files that `owns` knows, such as `script, YAML or JSON`."""
    owns: Callable[..., bool] | None = None
    """Takes a Configuration: whether a file starts this engine; raises nothing."""
    read: Callable[..., Any] | None = None
    """Takes a Configuration and an Asked, returns a `CheckedFile`; raises DocumentError where not
    even the number of GPUs is known. Everything else that is wrong is a finding."""
    card: Callable[..., str | None] | None = None
    """Takes a Configuration, returns the name of the card that the file is for, if it names one."""
    write: Callable[..., Any] | None = None
    """Takes a Launch and a Place, returns a `Draft`; raises InputError where nothing of the engine
    is near the launch."""
    starts: tuple[str, ...] = ()
    """Engines whose launches this one starts as they are."""
    spaces: Callable[[], Any] | None = None
    """Returns the values of a `Choice` that it can be told, an `EngineSpace` for each variant."""
    lower: Callable[..., Any] | None = None
    """Takes the Job of a plan, returns a `Lowered`: of engines that run layers of several kinds."""
    near: Callable[..., Any] | None = None
    """Takes the Job of a plan, returns the `Near` that the engine can run, one set of degrees."""
    handed: Callable[..., Any] | None = None
    """Takes a Job and the plan of its `Near`, returns the Launch that it is and its Place."""
    plans: Callable[[], Any] | None = None
    """Returns the `Space` of plans that it runs as they are, which `--engine` searches."""
    imports: Callable[..., Any] | None = None
    """Takes a Configuration, world_size and num_layers, returns the `Imported` plan."""

    @property
    def exports(self) -> bool:
        """Whether plans whose layers may differ are written for it."""
        return self.plans is not None


def function_of(path: str) -> Callable[..., Any]:
    """Return a function that imports another one, `FOLDER.MODULE.NAME`, when it is called."""
    module, _, name = path.rpartition(".")

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"search.engines.{module}"), name)(*arguments, **named)

    return call


def value_of(path: str) -> Callable[[], Any]:
    """Return a function that returns a value of a module, `FOLDER.MODULE.NAME`."""
    module, _, name = path.rpartition(".")
    return lambda: getattr(import_module(f"search.engines.{module}"), name)
