"""Commands as Python functions, with the same options and the `--json` answer as an object.

    answer = autopar.search("llama3-8b", "h100:1x8", global_batch=64, seq_length=4096)
    answer["launch"]["degrees"], answer.to_frame()

Keywords are the options of the command, or their aliases, with underscores. Invalid input raises
the error of `autopar.errors` with the message that the command prints. A search without a feasible
plan returns an answer with `exit_code` 3, whose `notices` give the reason. Nothing is printed, and
only requested files are written.
"""

from __future__ import annotations

import copy
import html
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.cli import SUBCOMMANDS
from autopar.command.answers import HEAD, is_answer, running
from autopar.command.dialect import as_file
from autopar.errors import DocumentError, InputError, InstallError, OptionError, did_you_mean
from autopar.records import is_too_long, is_word, plain, shown, typed
from autopar.units import GIB

_LISTS = ("models", "cards", "sites", "stacks")
_ROWS = 12
"""Maximum number of table rows shown in a notebook."""


class Answer(Mapping[str, Any]):
    """Answer of a command: the object of its `--json`, with a notebook representation."""

    @typed
    def __init__(self, document: Mapping[str, Any]) -> None:
        if not is_answer(document):
            raise OptionError(
                f"document: expected the object of `--json`, got {shown(dict(document))}",
                remedy="Use autopar.ask, or read the file of `--json`",
            )
        self._document = dict(document)

    def __getitem__(self, key: str) -> Any:
        return self._document[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __len__(self) -> int:
        return len(self._document)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 for success, 3 if no plan was found."""
        return int(self._document["exit_code"])

    @property
    def title(self) -> str:
        """One line with the command and its question."""
        question = self._document["question"]
        words = (
            f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in question.items()
        )
        return f"{self._document['command']}: {', '.join(words) or 'all'}"

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the object that `--json` prints; it may be modified."""
        return copy.deepcopy(self._document)

    def rows(self) -> list[dict[str, Any]]:
        """Return the answer as rows: one per plan, file, combination or entry; plans best first."""
        return rows_of(self._document)

    def to_frame(self) -> Any:
        """Return `rows` as a pandas.DataFrame; raises InstallError without pandas."""
        return frame(self.rows())

    def __repr__(self) -> str:
        rows = self.rows()
        lines = [self.title]
        if self.exit_code:
            lines += self._document["notices"] or [f"exit code {self.exit_code}"]
        lines += [
            ", ".join(f"{name} {_short(value)}" for name, value in row.items()) for row in rows[:3]
        ]
        if len(rows) > 3:
            lines.append(f"and {len(rows) - 3} more: rows()")
        return "\n  ".join(lines)

    def _repr_html_(self) -> str:
        notices = self._document["notices"] if self.exit_code else ()
        return shown_table(self.title, self.rows(), notices)


def shown_table(title: str, rows: Sequence[Mapping[str, Any]], notices: Sequence[str] = ()) -> str:
    """Return a title, messages and the first 12 rows of a table as HTML, with all text escaped."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(_head(name))}</th>" for name in names)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{html.escape(_cell(name, row.get(name)))}</td>" for name in names)
        + "</tr>"
        for row in rows[:_ROWS]
    )
    more = f"<p>and {len(rows) - _ROWS} more</p>" if len(rows) > _ROWS else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
    said = "".join(f"<p>{html.escape(text)}</p>" for text in notices)
    return f"<div><p><b>{html.escape(title)}</b></p>{said}{table}{more}</div>"


_BYTES = "_bytes"
"""Suffix of names whose values are shown in GiB."""


def _head(name: str) -> str:
    return f"{name.removesuffix(_BYTES)}{', GiB' * name.endswith(_BYTES)}".replace("_", " ")


def _cell(name: str, value: Any) -> str:
    if name.endswith(_BYTES) and isinstance(value, int | float):
        return f"{value / GIB:.2f}"
    return _short(value)


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return rows as a pandas.DataFrame; raises InstallError without pandas."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise InstallError(
            "to_frame needs pandas, which is not installed",
            remedy="Run `pip install pandas`, or use rows()",
        ) from None
    return pandas.DataFrame(list(rows))


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_short(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(_short(one) for one in value)
    return str(value)


# --------------------------------------------------------------------------------------------------
# Table of an answer: the key of a document with the rows, and the columns of a row.


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the main list of a document as rows; one row of its scalar values if it has none."""
    for key in (*_LISTS, "terms", "plans", "answers", "searches", "profiles", "changes"):
        if isinstance(document.get(key), list):
            return [_flat(row) for row in document[key]]
    if "groups" in document:
        return [_flat(one) for group in document["groups"] for one in group["answers"]]
    if "launches" in document:
        return [_checked(one) for one in document["launches"]]
    if document.get("format") == "autopar-launch":
        return _launches(document)
    if "samples_per_s" in document and "plan" in document:
        return _plans(document)
    rest = {key: value for key, value in document.items() if key not in HEAD}
    return [_flat(rest)] if rest else []


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scalar values of a row."""
    return {name: value for name, value in row.items() if not isinstance(value, list | Mapping)}


_DEGREES = ("tp", "cp", "pp", "dp", "ep", "etp", "vpp", "zero", "micro_batch_size")
_WORDS = ("schedule", "precision", "recompute")


def _launch(entry: Mapping[str, Any]) -> dict[str, Any]:
    degrees, predicted = entry["degrees"], entry["predicted"]
    return {
        "engine": entry["engine"],
        **{name: degrees[name] for name in (*_DEGREES, *_WORDS)},
        "samples_per_s": entry["samples_per_s"],
        "tokens_per_s_per_gpu": predicted["tokens_per_s_per_gpu"],
        "step_time_s": predicted["step_time_s"],
        "mfu": predicted["mfu"],
        "peak_bytes": max(stage["peak_bytes"] for stage in predicted["stages"]),
        "odds_of_oom": predicted["odds_of_oom"],
    }


def _launches(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    best = document["launch"]
    others = [one for line in document["engines"] for one in line.get("launches") or ()]
    found = [] if best is None else [best]
    found += [one for one in others if one != best]
    return sorted(map(_launch, found), key=lambda row: -row["samples_per_s"])


def _plans(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    if document["plan"] is None:
        return []
    first = {"differs_by": "", **{key: document[key] for key in ("step_time_s", "samples_per_s")}}
    return [first, *(_flat(one) for one in document.get("alternatives") or ())]


def _checked(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `autopar check`: the scalar values of a file, and its number of findings."""
    return _flat(entry) | {"findings": len(entry.get("findings") or ())}


# --------------------------------------------------------------------------------------------------
# Calling a command


@typed
def ask(command: str, *words: str | Path, **options: Any) -> Answer:
    """Return the answer of a command, such as `ask("check", "train.sh", hardware="h100:1x8")`.

    command : name in the list of `autopar --help`
    words : positional arguments, such as files or `calculon`; no options
    options : by name with underscores: a text, a number, True or False, or a list of them; None
        means not given

    Raises AutoparError: with the message that the command would print.
    """
    # Commands of `profiler` need separate processes: ranks, and torch.
    known = [
        name
        for name, (_, module, _) in SUBCOMMANDS.items()
        if module.startswith(("search.", "autopar.command."))
    ]
    if command not in known:
        hint = did_you_mean(command, known, otherwise=f"Use one of {', '.join(known)}")
        raise OptionError(f"unknown command {command!r:.60}", remedy=hint)
    module = import_module(SUBCOMMANDS[command][1])
    run = partial(module.run, what=command) if command in _LISTS else module.run
    # A leading hyphen does not make a word an option; `name=value` does.
    places = [f"./{word}" if str(word).startswith("-") else str(word) for word in words]
    arguments = [*places, *_typed(module, options), "--json", "-"]
    for word in arguments:
        if not is_word(word):
            raise OptionError(f"{word!r:.60}: a command line cannot contain this text")
    with running(command, asked=True) as now:
        run(arguments)
    if now.answer is None:
        raise InputError(f"autopar {command} has no JSON answer with these options")
    return Answer(now.answer)


def _typed(module: Any, options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line; raises OptionError for a value of another type."""
    command = getattr(module, "COMMAND", None)
    kinds = {} if command is None else {row.name: row.kind for row in command.rows}
    found = []
    for key, given in options.items():
        name = key.rstrip("_").replace("_", "-")
        if given is None:
            continue
        value = plain(given)
        kind = kinds.get(name, "flag")
        values = value if isinstance(value, list | tuple) else [value]
        words = [_word(f"--{name}", one, kind) for one in values]
        found += [f"--{name}={one}" for one in (words if kind == "texts" else [",".join(words)])]
    return found


def _word(name: str, given: object, kind: str) -> str:
    """Return a Python value as a word of a command line, which the option `name` then checks.

    kind : kind of the option; that of aliases is not known yet and may be a flag
    """
    value = plain(given)
    if isinstance(value, bool) and kind in ("flag", "switch"):
        return str(int(value))
    if not isinstance(value, str | Path | int | float) or is_too_long(value):
        raise OptionError(f"{name}: expected a text or a number, got {shown(value)}")
    return str(value)


@typed
def search(model: str | Path, hardware: str | Path, **options: Any) -> Answer:
    """Return the fastest uniform or per-layer plan of a model on a cluster: `autopar search`.

    model, hardware : values of `--model` and `--hardware`
    options : options of the command; `output_config_path` writes the file that `explain` reads, by
        default none is written
    """
    options.setdefault("output_config_path", "none")
    return ask("search", model=model, hardware=hardware, **options)


@typed
def check(*files: str | Path, **options: Any) -> Answer:
    """Return findings, memory and step time of launch scripts: `autopar check`."""
    # By name, because a word such as `--html=page.html` or `lr=1.sh` would be an option.
    return ask("check", files=[_file(one) for one in files], **options)


def _file(given: str | Path) -> str:
    """Return the word for a file; raises OptionError for an empty text."""
    if not str(given):
        raise OptionError("file: expected a path, got ''")
    return as_file(str(given))


@typed
def explain(
    plan: str | Path | Mapping[str, Any], why_not: str | None = None, **options: Any
) -> Answer:
    """Return the time and memory breakdown of a plan, and better plans: `autopar explain`.

    Better plans are the best one and, with `why_not`, the best one under that constraint.

    plan : a launch, plan or strategy file, or the answer of a search
    """
    return _of_files("explain", {"plan": plan}, why_not=why_not, **options)


@typed
def compare(
    first: str | Path | Mapping[str, Any], second: str | Path | Mapping[str, Any], **options: Any
) -> Answer:
    """Return the differences between two plans, or a plan and a measured trace, per term.

    first, second : launch or plan files, or answers of searches; `second` may be a trace
    """
    return _of_files("compare", {"first": first, "second": second}, **options)


def _of_files(
    command: str, given: Mapping[str, str | Path | Mapping[str, Any]], **options: Any
) -> Answer:
    """Return the answer of a command for files; given answers are written to temporary files.

    given : file or answer by argument of the command
    """
    with tempfile.TemporaryDirectory(prefix="autopar") as folder:
        words, written = {}, {}
        for name, one in given.items():
            if isinstance(one, str | Path):
                words[name] = _file(one)
                continue
            path = Path(folder) / f"{name}.json"
            document = dict(one)
            # Answers with plans contain the question in place of the `request` of plan files.
            if is_answer(document) and "request" not in document:
                document["request"] = {
                    name: value for name, value in document["question"].items() if name != "plan"
                }
            path.write_text(json.dumps(document), encoding="utf-8")
            words[name] = str(path)
            written[str(path)] = name
        try:
            return ask(command, **words, **options)
        except DocumentError as error:
            if error.path not in written:
                raise
            name = written[error.path]  # the file is gone with the call
            raise DocumentError(name, error.problem, key=error.key, remedy=error.remedy) from error
