"""Reads a command line by the option table: any accepted spelling in, typed values out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import OptionError
from search.cli_options import ALIASES, IGNORED, OPTIONS, PLANNED, VALUES, OptionRow
from search.options import SearchOptions
from search.request import InputSpec

__all__ = ["OutputSpec", "Request", "Value", "build_request", "convert", "normalise"]

Value = int | float | str | bool | tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """What to do with a result."""

    config_path: str | None = "configs"
    """Strategy file or its folder; None writes nothing."""
    json_path: str | None = None
    evaluate: str | None = None
    frontier: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """One whole command line: where the profiles are, what to search, what to write."""

    inputs: InputSpec
    options: SearchOptions
    output: OutputSpec
    given: Mapping[str, object]
    """Option name -> value as typed, for all options that shape the result; a plan file keeps
    them, so that the same question can be asked again."""


_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_OVERRIDE = re.compile(r"\+{0,2}(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)=(.*)", re.DOTALL)


def normalise(
    arguments: Sequence[str], rows: Iterable[OptionRow] = OPTIONS
) -> tuple[list[str], list[str]]:
    """Return (arguments in the spelling of `rows`, notices about options that do nothing).

    Raises
    ------
    OptionError
        On an unknown option (with the nearest known one) or a missing value.
    """
    table = {row.name: row for row in rows}
    result: list[str] = []
    notices: list[str] = []
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        if token in ("--help", "-h"):
            result.append("--help")
            continue
        written, value = _split(token)
        if written is None:
            result.append(token)
            continue
        name = written.replace("_", "-").lower()
        name = name if name in table else ALIASES.get(name, name)
        negated = name.startswith("no-") and table.get(name[3:], _NO_ROW).kind == "switch"
        if negated:
            name = name[3:]
        if name in IGNORED and name not in table:
            if value is None and queue and not queue[0].startswith("--"):
                queue.pop(0)
            notices.append(f"--{written} is accepted and ignored: {IGNORED[name]}")
            continue
        row = table.get(name)
        if row is None:
            if name in PLANNED and "pin" in table:
                raise _planned(written, name, value if value is not None else next(iter(queue), ""))
            raise _unknown(written, name, table)
        if row.kind in ("flag", "switch"):
            if value is None and queue and _is_truth(VALUES.get((name, queue[0]), queue[0])):
                value = queue.pop(0)
            on = _truth(written, VALUES.get((name, value), value) if value is not None else "1")
            on ^= negated
            if row.kind == "switch":
                result.append(f"--{name}" if on else f"--no-{name}")
            else:
                result = [item for item in result if item != f"--{name}"]
                result += [f"--{name}"] if on else []
            continue
        if value is None:
            if not queue or queue[0].startswith("--"):
                raise OptionError(f"--{written}: a value is missing; it takes: {row.help}")
            value = queue.pop(0)
            # A shell list such as `--layernum_list 24 24` is one list of two numbers.
            while row.kind == "ints" and queue and queue[0].isdigit():
                value += "," + queue.pop(0)
        result += [f"--{name}", VALUES.get((name, value), value)]
    return result, notices


def convert(row: OptionRow, text: str) -> Value:
    """Return the value of an option in the unit of the command line.

    Raises
    ------
    OptionError
        When the text is not a value of the row; the message says what was expected.
    """
    name = f"--{row.name}"
    if row.kind == "choice":
        if text not in row.choices:
            near = difflib.get_close_matches(text, row.choices, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(f"{name}: expected {_listed(row.choices)}, got {text!r}{hint}")
        return text
    if row.kind == "int":
        return _integer(row, text)
    if row.kind == "ints":
        return tuple(_integer(row, part.strip()) for part in text.strip("[] ").split(","))
    if row.kind == "float":
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not _inside(row, number):
            raise OptionError(f"{name}: expected a number{_range(row)}, got {text!r}")
        return number
    if not text:
        raise OptionError(f"{name}: expected a text, got ''")
    return text


def _integer(row: OptionRow, text: str) -> int:
    valid = re.fullmatch(r"[+-]?\d{1,12}", text) is not None
    if not valid or not _inside(row, int(text)):
        raise OptionError(f"--{row.name}: expected an integer{_range(row)}, got {text!r}")
    return int(text)


def _inside(row: OptionRow, number: float) -> bool:
    return (
        (row.low is None or number >= row.low)
        and (row.above is None or number > row.above)
        and (row.high is None or number <= row.high)
    )


def _range(row: OptionRow) -> str:
    parts = [f" of at least {row.low:.12g}"] if row.low is not None else []
    parts += [f" above {row.above:.12g}"] if row.above is not None else []
    parts += [f" up to {row.high:.12g}"] if row.high is not None else []
    return " and".join(parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]


# Options that choose where results go or how fast they come, never what they are.
_NOT_KEPT = frozenset(
    {"threads", "json", "output-config-path", "evaluate", "frontier", "time-limit"}
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
    values: dict[str, Value] = {}
    given: dict[str, object] = {}
    for row in OPTIONS:
        value = raw.get(row.name)
        if value is None or (value is False and row.kind == "flag") or value == []:
            continue
        if row.kind == "texts":
            assert isinstance(value, list | tuple)
            values[row.name] = tuple(str(item) for item in value)
        elif isinstance(value, bool):
            values[row.name] = value
        elif row.off is not None and str(value) == str(row.off):
            continue
        else:
            values[row.name] = convert(row, str(value))
        if row.name not in _NOT_KEPT:
            given[row.name] = list(value) if isinstance(value, tuple) else value
    return Request(
        inputs=_inputs(values),
        options=_options(values),
        output=_output(values),
        given=given,
    )


def _inputs(values: Mapping[str, Value]) -> InputSpec:
    names = InputSpec.__dataclass_fields__
    chosen = {key.replace("-", "_"): value for key, value in values.items()}
    if "parameter_bytes" in chosen:
        chosen["parameter_bytes"] = int(str(chosen["parameter_bytes"]))
    return InputSpec(**{key: value for key, value in chosen.items() if key in names})  # type: ignore[arg-type]


def _output(values: Mapping[str, Value]) -> OutputSpec:
    path = str(values.get("output-config-path", "configs"))
    return OutputSpec(
        config_path=None if path == "none" else path,
        json_path=_text(values, "json"),
        evaluate=_text(values, "evaluate"),
        frontier=bool(values.get("frontier", False)),
    )


def _text(values: Mapping[str, Value], name: str) -> str | None:
    return str(values[name]) if name in values else None


def _options(values: Mapping[str, Value]) -> SearchOptions:
    fields: dict[str, Value] = {}
    mode = values.get("profile-mode")
    if mode is not None:
        fields["time_profile_mode"] = mode
        # Memory has no batch mode: it is per sample already.
        fields["memory_profile_mode"] = "sequence" if mode == "sequence" else "static"
    for row in OPTIONS:
        if row.field is not None and row.name in values:
            value = values[row.name]
            fields[row.field] = (
                value * row.scale if row.scale != 1.0 and isinstance(value, int | float) else value
            )
    if fields.get("pipeline_type") == "pipedream_flush":
        fields["pipeline_type"] = "1f1b"
    if fields.get("memory_profile_mode") == "batch":
        fields["memory_profile_mode"] = "static"
    _check_batches(fields)
    options = SearchOptions(**fields)  # type: ignore[arg-type]
    _check_rules(options)
    return options


def _check_batches(fields: dict[str, Value]) -> None:
    """Let one end of the batch range follow the other, and refuse an empty range."""
    low, high = fields.get("min_bsz"), fields.get("max_bsz")
    if isinstance(low, int) and high is None:
        fields["max_bsz"] = max(low, SearchOptions.max_bsz)
    elif isinstance(high, int) and low is None:
        fields["min_bsz"] = min(high, SearchOptions.min_bsz)
    elif isinstance(low, int) and isinstance(high, int) and low > high:
        raise OptionError(f"--min-bsz: {low} exceeds --max-bsz {high}")
    batch, chunks = fields.get("settle_bsz"), fields.get("settle_chunk")
    if isinstance(batch, int) and isinstance(chunks, int) and batch % chunks:
        raise OptionError(
            f"--settle-chunk: {chunks} does not divide --settle-bsz {batch} "
            f"({batch} % {chunks} = {batch % chunks})"
        )


def _check_rules(options: SearchOptions) -> None:
    from search.space import parse_rules

    parse_rules(options.pin, options.forbid)


def _split(token: str) -> tuple[str | None, str | None]:
    """Return (name, value) of `--name`, `--name=value` and `group.name=value`."""
    if token.startswith("--") and len(token) > 2:
        name, equals, value = token[2:].partition("=")
        return name, value if equals else None
    match = _OVERRIDE.fullmatch(token)
    return (match[1], match[2]) if match else (None, None)


def _is_truth(text: str) -> bool:
    """Return whether the word after a flag is its value; a wrong integer is, for `_truth`."""
    return text.lower() in _ON | _OFF or re.fullmatch(r"[+-]?[0-9]+", text) is not None


def _truth(written: str, value: str) -> bool:
    if value.lower() not in _ON | _OFF:
        raise OptionError(f"--{written}: expected 0 or 1, got {value!r}")
    return value.lower() in _ON


def _unknown(written: str, name: str, table: Mapping[str, OptionRow]) -> OptionError:
    known = [*table, *(a for a, row in ALIASES.items() if row in table)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean --{near[0]}?" if near else "see --help"
    return OptionError(f"--{written}: this option is unknown; {hint}")


def _planned(written: str, name: str, value: str) -> OptionError:
    number = value if re.fullmatch(r"[0-9]{1,9}", value) else "N"
    remedy = PLANNED[name].format(n=number)
    return OptionError(f"--{written}: not an option, because the search finds it; {remedy}")


_NO_ROW = OptionRow("", "text", "", "")
