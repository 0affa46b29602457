"""Keyword arguments of the Python interface as search options, model and hardware documents.

Module `request` reads command lines; its functions for input files and defaults are used here, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.documents.catalog import spelled_hardware
from autopar.errors import OptionError, did_you_mean
from autopar.records import replace
from autopar.units import GIB
from search.request.options import SearchOptions
from search.request.profiles import named_card
from search.request.request import (
    DEFAULT_HARDWARE,
    ROWS,
    InputSpec,
    Request,
    check_memory,
    extended,
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
    """Return the search options of keyword arguments; raises OptionError for an invalid one.

    Keywords are the fields of `SearchOptions`, and `memory_constraint_gib` and `context_gib` in
    GiB. `pin` and `forbid` accept a single rule as a string, `calibration` accepts the path of its
    file.
    """
    from autopar.documents.calibration import read_calibration

    known = {field.name for field in dataclasses.fields(SearchOptions)}
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        key = _GIB_KEYS.get(name, name)
        if key not in known:
            names = (*known, *_GIB_KEYS)
            hint = did_you_mean(name, names, otherwise="See search.SearchOptions")
            raise OptionError(f"unknown option {name!r}", remedy=hint)
        if key in chosen:
            raise OptionError(f"{name}: also given in its other unit", remedy="Remove one of them")
        # the keyword is in GiB, the field in bytes; SearchOptions rejects values that are no
        # numbers
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
            f"hardware: expected CARD:NODESxGPUS, a name, a folder or a HardwareProfile, "
            f"got {hardware!r:.60}"
        )


def open_documents(
    model: str | tuple[ModelSpec, ModelProfile],
    hardware: str | HardwareProfile,
    options: Mapping[str, Any],
) -> tuple[ModelSpec, ModelProfile, HardwareProfile, SearchOptions]:
    """Return model, profile and hardware documents, and the options with filled defaults.

    Parameters
    ----------
    model, hardware : values as of `--model` and `--hardware`, or the documents themselves.
    options : see `search_options`.

    Raises
    ------
    InputError : an input or option is unusable.
    """
    chosen = search_options(options)
    _check_documents(model, hardware)
    if isinstance(hardware, str):
        hardware = spelled_hardware(hardware)
    if isinstance(model, str) or (isinstance(hardware, str) and named_card(hardware)):
        inputs = InputSpec(
            model=model if isinstance(model, str) else None,
            # with a hardware document, do not search for measured files of another cluster
            hardware=hardware if isinstance(hardware, str) else DEFAULT_HARDWARE,
        )
        inputs, places = with_places(inputs, chosen)
        spec, profile, cluster = load_placed(inputs, chosen)
        unused = places.unused if isinstance(model, str) else ()
        profile = replace(profile, notes=(*profile.notes, *unused))
    elif isinstance(hardware, str):
        # only a card requires the model, which it estimates; measured clusters do not
        cluster = measured_hardware(InputSpec(), hardware)
    if not isinstance(model, str):
        spec, profile = model
    if not isinstance(hardware, str):
        cluster = hardware
    if chosen.memory_of is not None:
        from search.planning.cost.engine_memory import with_memory_of

        profile = with_memory_of(chosen.memory_of, profile, spec, gpu=cluster.name)
    # field names end with a unit, option names do not
    given = {name.removesuffix("_bytes").removesuffix("_gib").replace("_", "-") for name in options}
    check_memory(chosen, given, cluster)
    chosen, _ = fill_options(chosen, given, profile, cluster)
    return spec, profile, cluster, chosen


def changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """Return a request with other values of options, whether the user gave them or not.

    changes : field of `InputSpec` or `SearchOptions` -> value
    """
    names = {row.name for row in ROWS if row.field in changes}
    given = {name: value for name, value in request.given.items() if name not in names}
    return extended(replace(request, given=given), changes)
