"""What a command line of `autopar-search` asks: its options as one typed request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.command.options import Command, make, option, read_values, rows_of, written
from autopar.errors import OptionError
from search.options import PANELS, ProfileMode, SearchOptions
from search.request import InputSpec

__all__ = [
    "FILLS",
    "ROWS",
    "OutputSpec",
    "Request",
    "Shorthands",
    "build_request",
    "extended",
]

_SPACE, _COST, _OUT = PANELS[2:]


Engine = Literal["galvatron", "megatron", "torchtitan", "deepspeed", "accelerate"]


@dataclass(frozen=True, kw_only=True)
class Shorthands:
    """Options that stand for several others, or for a choice among them."""

    engine: Engine | None = option(
        None,
        help="only plans that this engine runs as they are (see autopar-export)",
        panel=_SPACE,
        most_used=True,
    )
    profile_mode: ProfileMode | None = option(
        None, help="both modes below at once", panel=_COST, place=-1
    )


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """What to do with a result."""

    frontier: bool = option(False, help="best throughput by memory budget", panel=_OUT)
    evaluate: str | None = option(
        None,
        help="price this plan or strategy file instead of searching",
        panel=_OUT,
        most_used=True,
    )
    json_path: str | None = option(
        None,
        name="json",
        help="write the result as JSON to a path, or - for stdout",
        panel=_OUT,
        most_used=True,
    )
    config_path: str | None = option(
        "configs",
        name="output-config-path",
        help="strategy file or its folder; `none` writes nothing",
        panel=_OUT,
        most_used=True,
    )
    """None writes nothing."""


FILLS = (InputSpec, SearchOptions, Shorthands, OutputSpec)
ROWS = Command(name="", intro="", fills=FILLS, panels=PANELS).rows
"""Every option of a search, in the order of the help and of plan files."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One whole command line: where the profiles are, what to search, what to write."""

    inputs: InputSpec
    options: SearchOptions
    output: OutputSpec
    given: Mapping[str, object]
    """Option name -> value as typed, for all options that shape the result; a plan file keeps
    them, so that the same question can be asked again."""
    engine: Engine | None = None
    """Whose plans alone are wanted; what that means is in `for_engine`."""


# Options that choose where results go or how fast they come, never what they are; what an engine
# means is kept in its place.
_NOT_KEPT = frozenset(
    {"threads", "json", "output-config-path", "evaluate", "frontier", "time-limit", "engine"}
)


def build_request(raw: Mapping[str, object]) -> Request:
    """Return the request of a parsed command line.

    Parameters
    ----------
    raw : option name (hyphens) -> text, bool, or list of texts; None or absent is not given.

    Raises
    ------
    OptionError
        When a value is unusable or two options contradict each other.
    """
    values = read_values(ROWS, raw)
    given = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in ((name, raw[name]) for name in values if name not in _NOT_KEPT)
    }
    mode = values.get("profile-mode")
    if mode is not None:
        values.setdefault("time-profile-mode", mode)
        # Memory has no batch mode: it is per sample already.
        values.setdefault("memory-profile-mode", "sequence" if mode == "sequence" else "static")
    _check_batches(values)
    options = make(SearchOptions, values)
    _check_rules(options)
    if values.get("output-config-path") == "none":
        values["output-config-path"] = None
    return Request(
        inputs=make(InputSpec, values),
        options=options,
        output=make(OutputSpec, values),
        given=given,
        engine=values.get("engine"),
    )


def extended(request: Request, changes: Mapping[str, Any]) -> Request:
    """Return a request as if options had been typed too: those that were stay, rules are added to.

    changes : fields of `SearchOptions`.
    """
    given, chosen = dict(request.given), {}
    for row in rows_of(SearchOptions):
        if row.field not in changes or (row.kind != "texts" and row.name in given):
            continue
        value = changes[row.field]
        if row.kind == "texts":
            value = (*getattr(request.options, row.field), *value)
        chosen[row.field] = value
        given[row.name] = written(row, value)
    return replace(
        request,
        options=replace(request.options, **chosen),
        given={row.name: given[row.name] for row in ROWS if row.name in given},
    )


def _check_batches(values: dict[str, Any]) -> None:
    """Let one end of the batch range follow the other, and refuse an empty range."""
    low, high = values.get("min-bsz"), values.get("max-bsz")
    if low is not None and high is None:
        values["max-bsz"] = max(low, SearchOptions.max_bsz)
    elif high is not None and low is None:
        values["min-bsz"] = min(high, SearchOptions.min_bsz)
    elif low is not None and high is not None and low > high:
        raise OptionError(f"--min-bsz: {low} exceeds --max-bsz {high}")
    batch, chunks = values.get("settle-bsz"), values.get("settle-chunk")
    if batch is not None and chunks is not None and batch % chunks:
        raise OptionError(
            f"--settle-chunk: {chunks} does not divide --settle-bsz {batch} "
            f"({batch} % {chunks} = {batch % chunks})"
        )


def _check_rules(options: SearchOptions) -> None:
    from search.space import parse_rules

    parse_rules(options.pin, options.forbid)
