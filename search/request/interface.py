"""Keyword arguments of the Python interface as a request, or with documents in place of names.

Module `request` reads command lines; its functions for input files and defaults are used here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.aliases import alias_tables
from autopar.command.dialect import own_name
from autopar.command.fields import Row, checked, rows_of, written
from autopar.errors import OptionError, did_you_mean
from autopar.records import plain, replace, shown
from search.engines.candidate import Constraints
from search.request.degrees import DegreeOptions, fixed_of, rules_of
from search.request.options import OutputSpec, SearchOptions
from search.request.profiles import named_card
from search.request.request import (
    DEFAULT_HARDWARE,
    ROWS,
    InputSpec,
    Request,
    build_request,
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

_ROWS = tuple(row for row in ROWS if row.field not in {one.field for one in rows_of(OutputSpec)})
"""Options of a question: all options of a search but those of its output."""
_TABLE = {row.name: row for row in _ROWS}


def request_of(model: str | None, hardware: str | None, options: Mapping[str, Any]) -> Request:
    """Return the request of keyword arguments, equal to that of the same command line.

    Keywords are the options of `autopar search` with underscores, other names of them that the
    command accepts, or fields of `SearchOptions`. Values have the types of the fields;
    `memory_constraint` is in GiB. A field of several values accepts one, and `calibration` the
    path of its file.

    Raises OptionError for an invalid value, or an unknown name, with the nearest known one.
    """
    raw: dict[str, Any] = {"model": model, "hardware": hardware}
    document = options.get("calibration")
    if isinstance(document, str | Path):
        document = None
    if document is not None:
        options = {name: value for name, value in options.items() if name != "calibration"}
        SearchOptions(calibration=document)  # for its check
    spelled: dict[str, str] = {}
    for name, value in options.items():
        row, factor = _option(name)
        if row.name in spelled:
            other = spelled[row.name]
            raise OptionError(f"{name}: also given as {other}", remedy="Remove one of them")
        spelled[row.name] = name
        if value is not None or not row.optional:
            raw[row.name] = _value(row, value, factor)
    request = build_request(raw)
    given: dict[str, object] = {
        name: value if isinstance(value, str) else written(_TABLE[name], value)
        for name, value in request.given.items()
    }
    if document is not None:
        given["calibration"] = "a document" if document.source is None else document.source.path
        request = replace(request, options=replace(request.options, calibration=document))
    return replace(request, given=given)


def _option(keyword: str) -> tuple[Row, float]:
    """Return the option of a keyword, and the factor from its value to that of the field."""
    for row in _ROWS:
        if keyword == row.field:
            return row, 1.0
    found = _TABLE.get(own_name(keyword, _TABLE))
    if found is None:
        aliases = [name.replace("-", "_") for name in alias_tables().aliases]
        names = [*(row.key for row in _ROWS), *(row.field for row in _ROWS), *aliases]
        hint = did_you_mean(keyword, names, otherwise="See docs/guides/python.md")
        raise OptionError(f"unknown option {keyword!r}", remedy=hint)
    return found, found.scale


def _value(row: Row, value: Any, factor: float) -> Any:
    """Return a value for the field of an option; words that are parsed are returned as text.

    Raises OptionError for another type.
    """
    value = plain(value)
    if row.parse is not None or row.kind == "text":
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if not isinstance(part, str | Path):
                raise OptionError(f"--{row.name}: expected a text, got {shown(value)}")
        return ",".join(map(str, parts))
    single = {"ints": int, "texts": str}.get(row.kind)
    # True is an int, but neither a degree nor a number of GiB
    if isinstance(value, bool):
        return checked(row, value)
    if single is not None and isinstance(value, single) and row not in _LISTS:
        value = (value,)
    if factor != 1.0 and isinstance(value, int | float):
        # an integer may exceed every float
        with suppress(OverflowError):
            value = value * factor
    return checked(row, value)


_LISTS = tuple(row for row in _ROWS if row.name == "pp-division")
"""Options that need several values: the layers of one stage do not divide a model."""


def checked_documents(
    model: Any, hardware: Any
) -> tuple[str | tuple[ModelSpec, ModelProfile], str | HardwareProfile]:
    """Return model and hardware, paths as text.

    Raises OptionError if they are neither names nor documents.
    """
    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec

    model, hardware = (str(one) if isinstance(one, Path) else one for one in (model, hardware))
    if not isinstance(model, str):
        pair = model if isinstance(model, tuple | list) and len(model) == 2 else (None, None)
        if not (isinstance(pair[0], ModelSpec) and isinstance(pair[1], ModelProfile)):
            raise OptionError(
                f"model: expected a name, a path or (ModelSpec, ModelProfile), got {shown(model)}"
            )
    if not isinstance(hardware, str | HardwareProfile):
        raise OptionError(
            f"hardware: expected CARD:NODESxGPUS, a name, a folder or a HardwareProfile, "
            f"got {shown(hardware)}"
        )
    return model, hardware


def open_documents(
    model: str | Path | tuple[ModelSpec, ModelProfile],
    hardware: str | Path | HardwareProfile,
    options: Mapping[str, Any],
) -> tuple[ModelSpec, ModelProfile, HardwareProfile, SearchOptions]:
    """Return model, profile and hardware documents, and the options with filled defaults.

    model, hardware : values as of `--model` and `--hardware`, or the documents themselves.
    options : see `request_of`; degrees become rules, as of per-layer plans.

    Raises InputError: an input or option is unusable.
    """
    model, hardware = checked_documents(model, hardware)
    request = request_of(
        model if isinstance(model, str) else None,
        # with a hardware document, do not search for measured files of another cluster
        hardware if isinstance(hardware, str) else DEFAULT_HARDWARE,
        options,
    )
    if not (isinstance(model, str) and isinstance(hardware, str)):
        _refuse_names(model, request)
    request = extended(request, rules_of(request.degrees))
    chosen, named = request.options, request.inputs.hardware
    if isinstance(model, str) or (isinstance(hardware, str) and named_card(named)):
        inputs, places = with_places(request.inputs, chosen)
        spec, profile, cluster = load_placed(inputs, chosen)
        unused = places.unused if isinstance(model, str) else ()
        profile = replace(profile, notes=(*profile.notes, *unused))
    elif isinstance(hardware, str):
        # only a card requires the model, which it estimates; measured clusters do not
        cluster = measured_hardware(InputSpec(), named)
    if not isinstance(model, str):
        spec, profile = model
    if not isinstance(hardware, str):
        cluster = hardware
    if chosen.memory_of is not None:
        from search.planning.cost.engine_memory import with_memory_of

        profile = with_memory_of(chosen.memory_of, profile, spec, gpu=cluster.name)
    if request.inputs.calibration is not None:
        from autopar.documents.calibration import read_calibration

        chosen = replace(chosen, calibration=read_calibration(request.inputs.calibration))
    check_memory(chosen, request.given, cluster)
    chosen, _ = fill_options(chosen, request.given, profile, cluster)
    return spec, profile, cluster, chosen


def _refuse_names(model: object, request: Request) -> None:
    """Raise OptionError for options of a named model or an engine, where documents are given."""
    if request.engine not in (None, "none"):
        raise OptionError(
            f"engine: {request.engine} needs the names of model and hardware, not documents",
            remedy="Remove it",
        )
    sizes = {row.name for row in rows_of(InputSpec)} - {"model", "hardware", "calibration"}
    for name in request.given:
        if name in sizes and not isinstance(model, str):
            raise OptionError(f"--{name}: the model is a document", remedy="Remove it")


def changed(request: Request, changes: Mapping[str, Any]) -> Request:
    """Return a request with other values of options, whether the user gave them or not.

    changes : field of `InputSpec` or `SearchOptions` -> value; lists are replaced
    """
    names = {row.name for row in ROWS if row.field in changes}
    given = {name: value for name, value in request.given.items() if name not in names}
    # `extended` appends to lists
    lists: dict[str, Any] = {
        r.field: () for r in rows_of(SearchOptions) if r.kind == "texts" and r.field in changes
    }
    options = replace(request.options, **lists)
    return extended(replace(request, given=given, options=options), changes)


def fixed_by_rule(rule: str, fixed: Constraints) -> Constraints:
    """Return the constraints of a search over uniform plans under a rule such as `tp=8,pp=2`.

    fixed : constraints of the search that found the plan; only the precision is taken from them

    Raises OptionError for an unknown name or an invalid value.
    """
    known = {row.name: row for row in rows_of(DegreeOptions)}
    typed: dict[str, object] = {}
    for part in rule.split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        name = name.replace("_", "-")
        if name not in known or not value:
            every = f"Use {', '.join(sorted(known))}"
            hint = "" if name in known else did_you_mean(name, tuple(known), otherwise=every)
            raise OptionError(
                f"--why-not: expected degrees such as tp=8,pp=2, got {part!r:.60}", remedy=hint
            )
        # A command line gives flags without a value; another value is refused by the option.
        typed[name] = value == "1" if known[name].flaglike and value in ("0", "1") else value
    try:
        asked = fixed_of(build_request(typed).degrees)
    except OptionError as error:
        raise OptionError(f"--why-not: {error.short}") from None
    names = {name for name in Constraints.__struct_fields__ if getattr(asked, name) is not None}
    if "precision" not in typed:
        names.discard("precision")
    whole = Constraints(precision=fixed.precision)
    return replace(whole, **{name: getattr(asked, name) for name in names})
