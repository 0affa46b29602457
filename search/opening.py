"""Names, documents and keyword options of the Python interface -> what a planner works on."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.calibration import read_calibration
from autopar.errors import OptionError
from autopar.hardware import HardwareProfile
from autopar.model import ModelProfile, ModelSpec
from autopar.units import GIB
from search.inputs import InputSpec, load_inputs
from search.options import SearchOptions
from search.session import fill_options

__all__ = ["open_documents", "search_options"]

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
    known = {field.name for field in dataclasses.fields(SearchOptions)}
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        key = _GIB_KEYS.get(name, name)
        if key not in known:
            near = difflib.get_close_matches(name, [*known, *_GIB_KEYS], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else "see search.SearchOptions"
            raise OptionError(f"unknown option {name!r}; {hint}")
        if name in _GIB_KEYS:
            value = float(value) * GIB
        if key in _TUPLES:
            value = (value,) if isinstance(value, str) else tuple(value)
        if key == "pp_division" and value is not None:
            value = tuple(value)
        if key == "calibration" and isinstance(value, str | Path):
            value = read_calibration(value)
        chosen[key] = value
    return SearchOptions(**chosen)


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
    if isinstance(model, str) or isinstance(hardware, str):
        inputs = InputSpec(
            model=model if isinstance(model, str) else None,
            hardware=hardware if isinstance(hardware, str) else None,
        )
        spec, profile, cluster = load_inputs(inputs, chosen)
    if not isinstance(model, str):
        spec, profile = model
    if not isinstance(hardware, str):
        cluster = hardware
    given = {name.removesuffix("_bytes").removesuffix("_gib").replace("_", "-") for name in options}
    chosen, _ = fill_options(chosen, given, profile, cluster)
    return spec, profile, cluster, chosen
