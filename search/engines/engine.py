"""Interface to a training engine: functions that read and write its files and plans.

The functions are in the folder of the engine, which is imported at the first call. Commands that
need no engine, such as `--help`, import none.

A word of a key table may end in the releases of the engine that have the key: `NAME@0.18` from 0.18
on, `NAME@-0.16` up to 0.16, `NAME@0.16-0.17` both. A word without releases makes no statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from autopar.errors import OptionError
from autopar.records import Record, shorten


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
    releases: Callable[[], tuple[str, ...]] | None = None
    """Function () -> releases with known keys, oldest first; None: keys have no releases."""
    released_by: str = ""
    """Package whose releases those are; empty: the engine."""
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


# --------------------------------------------------------------------------------------------------
# Releases of engines.


class Span(NamedTuple):
    """First and last release with a key or rule; empty: no such limit is known."""

    first: str = ""
    last: str = ""

    def has(self, release: str) -> bool:
        """Return True if a release is in the span; 0.17 stands for all releases 0.17.N."""
        own, first, last = map(_numbers, (release, self.first, self.last))
        return own >= first[: len(own)] and (not last or own[: len(last)] <= last)

    @property
    def text(self) -> str:
        """Sentence part such as `new in 0.18` or `removed after 0.16`."""
        new, gone = f"new in {self.first}", f"removed after {self.last}"
        return ", ".join((*[new] * bool(self.first), *[gone] * bool(self.last)))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split("."))) if release else ()


def spanned(word: str) -> tuple[str, Span]:
    """Return the key of a word of a key table, and the releases that have it."""
    name, _, releases = word.partition("@")
    first, _, last = releases.partition("-")
    return name, Span(first, last)


class EngineRelease(Record):
    """Release of an engine that a file is checked or written for."""

    name: str
    """Number without patch or with it, such as `0.17` or `0.17.1`."""
    given: bool = False
    """True if the user or the file names it; False: the newest known."""
    newer_than: str = ""
    """Newest known release, if `name` is newer; empty: `name` is known."""

    @property
    def note(self) -> str:
        """Sentence on a release that is newer than the known ones; empty for a known one."""
        if not self.newer_than:
            return ""
        return f"release {self.name} is newer than {self.newer_than}, the newest with known keys"


def asked_release(asked: str | None, known: Sequence[str], package: str = "") -> EngineRelease:
    """Return the release of `--release`, such as `0.17`, `v0.17.1` or `main`; None: the newest.

    known : releases with known keys, oldest first. package : package of the releases; empty: the
    engine.

    Raises OptionError for other words and for a release before the oldest known one.
    """
    newest = known[-1]
    remedy = f"Use {known[0]} to {newest}{f' of {package}' * bool(package)}, or main"
    if asked is None or asked in ("main", "newest"):
        return EngineRelease(name=newest, given=asked is not None)
    found = re.fullmatch(r"(?:core_)?v?([0-9]{1,4}(?:\.[0-9]{1,4}){1,2})(?:[a-z]\w*)?", asked)
    if found is None:
        raise OptionError(f"--release {shorten(asked)}: not a release", remedy=remedy)
    own = _numbers(found[1])
    if own < _numbers(known[0])[: len(own)]:
        raise OptionError(
            f"--release {found[1]}: older than {known[0]}, the oldest release with known keys",
            remedy=remedy,
        )
    is_newer = own[: len(_numbers(newest))] > _numbers(newest)
    return EngineRelease(name=found[1], given=True, newer_than=newest if is_newer else "")
