"""Names, documents and keyword options of the Python interface: what a planner is made of.

Command lines are read in `request`; what both load and fill in is there, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError, did_you_mean
from autopar.records import replace
from autopar.units import GIB
from search.request.options import SearchOptions
from search.request.profiles import named_card
from search.request.request import (
    DEFAULT_HARDWARE,
    InputSpec,
    check_memory,
    fill_options,
    load_placed,
    measured_hardware,
    with_places,
)

if TYPE_CHECKING:
    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec

_GIB_KEYS = {"memory_constraint_gib": "memory_constraint_bytes", "context_gib": "context_bytes"}
_TUPLES = ("pin", "forbid")


def search_options(options: Mapping[str, Any]) -> SearchOptions:
    """Return the options of keyword arguments.

    Fields of `SearchOptions`, and `memory_constraint_gib` and `context_gib` in GiB; one rule of
    `pin` or `forbid` may be given as a string, `calibration` as the path of its file.

    Raises
    ------
    OptionError : a name is unknown (with the nearest known one).
    """
    from autopar.documents.calibration import read_calibration

    known = {field.name for field in dataclasses.fields(SearchOptions)}
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        key = _GIB_KEYS.get(name, name)
        if key not in known:
            names = (*known, *_GIB_KEYS)
            hint = did_you_mean(name, names, 0.5, otherwise="see search.SearchOptions")
            raise OptionError(f"unknown option {name!r}{hint}")
        if key in chosen:
            raise OptionError(f"{name}: the other unit of it is given too; leave one of them out")
        # GiB of the keyword, bytes inside; what is no number is refused with the others
        if name in _GIB_KEYS and isinstance(value, int | float) and not isinstance(value, bool):
            value = value * GIB
        if key in _TUPLES and isinstance(value, str):
            value = (value,)
        if key == "calibration" and isinstance(value, str | Path):
            value = read_calibration(value)
        chosen[key] = value
    return SearchOptions(**chosen)


def _check_documents(model: object, hardware: object) -> None:
    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec

    if not isinstance(model, str):
        pair = model if isinstance(model, tuple | list) and len(model) == 2 else (None, None)
        if not (isinstance(pair[0], ModelSpec) and isinstance(pair[1], ModelProfile)):
            raise OptionError(
                f"model: expected a name, a path or (ModelSpec, ModelProfile), got {model!r:.60}"
            )
    if not isinstance(hardware, str | HardwareProfile):
        raise OptionError(
            f"hardware: expected CARD:NxG, a name, a folder or a HardwareProfile, "
            f"got {hardware!r:.60}"
        )


def open_documents(
    model: str | tuple[ModelSpec, ModelProfile],
    hardware: str | HardwareProfile,
    options: Mapping[str, Any],
) -> tuple[ModelSpec, ModelProfile, HardwareProfile, SearchOptions]:
    """Return the documents behind names, and the options with the defaults that they suggest.

    Parameters
    ----------
    model, hardware : what `--model` and `--hardware` take, or the documents themselves.
    options : see `search_options`.

    Raises
    ------
    InputError : an input or option is unusable.
    """
    chosen = search_options(options)
    _check_documents(model, hardware)
    if isinstance(model, str) or (isinstance(hardware, str) and named_card(hardware)):
        inputs = InputSpec(
            model=model if isinstance(model, str) else None,
            # a document is no reason to look for measured files of another cluster
            hardware=hardware if isinstance(hardware, str) else DEFAULT_HARDWARE,
        )
        inputs, places = with_places(inputs, chosen)
        spec, profile, cluster = load_placed(inputs, chosen)
        unused = places.unused if isinstance(model, str) else ()
        profile = replace(profile, notes=(*profile.notes, *unused))
    elif isinstance(hardware, str):
        # only a card needs a model that it estimates: files of a cluster stand alone
        cluster = measured_hardware(InputSpec(), hardware)
    if not isinstance(model, str):
        spec, profile = model
    if not isinstance(hardware, str):
        cluster = hardware
    if chosen.memory_of is not None:
        from search.planning.cost.engine_memory import with_memory_of

        profile = with_memory_of(chosen.memory_of, profile, spec, gpu=cluster.name)
    # fields carry a unit, options do not
    given = {name.removesuffix("_bytes").removesuffix("_gib").replace("_", "-") for name in options}
    check_memory(chosen, given, cluster)
    chosen, _ = fill_options(chosen, given, profile, cluster)
    return spec, profile, cluster, chosen
