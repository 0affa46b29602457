"""Write docs/reference from the code: options, exit codes, rules of runs, keys of documents.

The only sources are the dataclasses of the commands, the tree of errors and the models of the
documents; a test compares the pages with this script's output.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar import errors
from autopar.cli import SUBCOMMANDS
from autopar.command.aliases import alias_tables
from autopar.command.fields import Row
from autopar.command.options import MOST_USED, Command
from autopar.documents.schemas import json_schemas
from autopar.errors import EXIT_CODES, INTERRUPTED
from autopar.records import Record
from autopar.run.rules import Rule

FOLDER = Path(__file__).resolve().parent / "reference"
NOTE = "<!-- Written by docs/make_reference.py: `make docs-reference`. -->\n"
MARKER = "<!-- Below: written by docs/make_reference.py. -->\n\n"
"""Line that ends the hand-written part of a page."""
HAND_WRITTEN = frozenset({"files.md"})
"""Pages of the folder that no code writes."""
_GUARD = 1e6
"""Upper bound from which on a bound only catches typing errors."""
_KINDS = {
    "int": "integer",
    "float": "number",
    "ints": "integers",
    "text": "text",
    "texts": "text, repeats",
    "flag": "",
    "switch": "",
}


def pages() -> dict[str, str]:
    """Return all pages of the reference: name -> text."""
    found = {name: "".join(_command_page(name, own)) for name, own in _commands().items()}
    found["json"] = _hand_written("json") + "".join(_json_page())
    found["exit-codes"] = "".join(_exit_page())
    found["rules"] = "".join(_rules_page())
    found["index"] = "".join(_index_page())
    return {f"{name}.md": text.rstrip() + "\n\n" + NOTE for name, text in found.items()}


def _hand_written(name: str) -> str:
    """Return the part of a page above the marker, with the marker; it is written by hand."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    above, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"docs/reference/{name}.md has no line {MARKER.strip()}")
    return above + marker


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"
    yield "\n"


def _cell(text: str) -> str:
    """Return a text as a cell of a table: words in angle brackets are no HTML there."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _typed(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return (
        f"`{text}`"
        if "|" not in text
        else f"<code>{_cell(text).replace(chr(92) + '|', '&#124;')}</code>"
    )


# --------------------------------------------------------------------------------------------------
# Options


class Section(Record):
    """Options of a command under one heading of its page."""

    page: str
    command: str
    heading: str
    anchor: str
    """Anchor of the heading on the page; empty if other headings of the page are equal."""
    rows: tuple[Row, ...]
    """Options that the page lists, because no page before it lists equal ones."""
    shared: tuple[tuple[Section, tuple[Row, ...]], ...] = ()
    """Sections of earlier pages, and options of these that the command has too."""


def _commands() -> dict[str, list[Command]]:
    """Return the command lines of every page: name -> commands."""
    found: dict[str, list[Command]] = {}
    for _, module, _ in SUBCOMMANDS.values():
        own = [one for one in vars(import_module(module)).values() if isinstance(one, Command)]
        first = own[0].name
        page = first.split()[0] if len(own) < 4 else "autopar-lists"
        if first.startswith("torchrun"):
            page = first.split()[-1].replace(".", "-")
        found[page] = own
    return found


@cache
def option_sections() -> tuple[tuple[Command, tuple[Section, ...], Section], ...]:
    """Return the commands in the order of the pages, each with its own options and shared ones.

    An option of several commands is on the page of the first. Its name, values, default and help
    must be equal; an option that differs is an option of its own.
    """
    known: dict[tuple[str, ...], Section] = {}
    found = []
    for page, commands in _commands().items():
        for command in commands:
            panels: dict[str, list[Row]] = {}
            shared: dict[int, tuple[Section, list[Row]]] = {}
            for row in command.rows:
                there = known.get(_option_row(row))
                if there is None:
                    heading = (MOST_USED if row.most_used else row.panel) or "Options"
                    panels.setdefault(heading, []).append(row)
                else:
                    shared.setdefault(id(there), (there, []))[1].append(row)
            sections = tuple(
                Section(
                    page=page,
                    command=command.name,
                    heading=heading,
                    anchor=_anchor(heading) if len(commands) == 1 else "",
                    rows=tuple(rows),
                )
                for heading, rows in panels.items()
            )
            known |= {_option_row(row): one for one in sections for row in one.rows}
            others = Section(
                page=page,
                command=command.name,
                heading="Shared options",
                anchor="",
                rows=(),
                shared=tuple((one, tuple(rows)) for one, rows in shared.values()),
            )
            found.append((command, sections, others))
    return tuple(found)


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _command_page(page: str, commands: Sequence[Command]) -> Iterator[str]:
    title = commands[0].name if page != "autopar-lists" else "autopar models, cards, sites, stacks"
    yield f"# {title}\n\n"
    for command, sections, others in option_sections():
        if command not in commands:
            continue
        words = command.usage.split()[0]
        if command is not commands[0]:
            yield f"## {command.name} {words if words[0] != '[' else ''}".rstrip() + "\n\n"
        yield f"```bash\n{command.name} {command.usage}\n```\n\n"
        for paragraph in command.intro.strip().split("\n\n"):
            yield (
                re.sub(r"(?<![`\w])(--[a-z][\w-]*)", r"`\1`", " ".join(paragraph.split())) + "\n\n"
            )
        mark = "##" if command is commands[0] else "###"
        for section in sections:
            yield f"{mark} {section.heading}\n\n"
            yield from _table(("option", "default", "what"), map(_option_row, section.rows))
        if others.shared:
            yield f"{mark} {others.heading}\n\n"
            yield from _shared(others)
        listed = [row for section in sections for row in section.rows]
        yield from _spellings(command, listed, mark)


def _shared(others: Section) -> Iterator[str]:
    """Yield a line for each section that has options of the command."""
    for there, rows in others.shared:
        target = f"{there.page}.md#{there.anchor}" if there.anchor else f"{there.page}.md"
        title = f"{there.command}, {there.heading[0].lower()}{there.heading[1:]}"
        link = f"[{title}]({target})" if there.page != others.page else title
        labels = {row.label for row in rows}
        missing = [row for row in there.rows if row.label not in labels]
        if not there.anchor or len(missing) >= len(rows):
            yield f"- {link}: {_names(rows)}\n"
        else:
            yield f"- {link}: all{f' except {_names(missing)}' if missing else ''}\n"
    yield "\n"


def _names(rows: Iterable[Row]) -> str:
    return ", ".join(f"`{row.label}`" for row in rows)


def _option_row(row: Row) -> tuple[str, str, str]:
    name = f"--[no-]{row.name}" if row.kind == "switch" else row.label
    default = row.default_text
    return (
        f"`{name}` {_takes(row)}".rstrip(),
        _typed(default) if default and row.shown is None else _cell(default),
        _cell(row.help),
    )


def _takes(row: Row) -> str:
    if row.kind == "choice":
        return ", ".join(f"`{word}`" for word in row.choices)
    bounds = [
        f"{sign} {value:.12g}"
        for sign, value in (("≥", row.low), (">", row.above), ("≤", row.high))
        if value is not None and value < _GUARD
    ]
    kind = _typed(row.metavar) if row.metavar and not row.positional else _KINDS[row.kind]
    return f"{kind} {', '.join(bounds)}".strip()


def _spellings(command: Command, listed: Sequence[Row], mark: str) -> Iterator[str]:
    """Yield other spellings of the listed options, and the answers to options of other tools."""
    names = {row.name for row in command.rows}
    own = {row.name for row in listed}
    others: dict[str, list[str]] = {}
    for alias, targets in sorted(alias_tables().aliases.items()):
        target = next((one for one in targets if one.partition("=")[0] in names), None)
        if target is not None and alias not in names and target.partition("=")[0] in own:
            others.setdefault(target, []).append(f"`--{alias}`")
    if others:
        yield f"{mark} Other spellings\n\n"
        yield from _table(
            ("option", "also written"),
            ((f"`--{target}`", ", ".join(written)) for target, written in sorted(others.items())),
        )
    answers = _foreign(command)
    shared = {}
    for before, sections, _ in option_sections():
        if before is command:
            break
        known = _foreign(before)
        equal = [name for name in answers if answers[name] == known.get(name)]
        answers = {name: answer for name, answer in answers.items() if name not in equal}
        if equal and sections:
            shared[before.name] = f"[{before.name}]({sections[0].page}.md#options-of-other-tools)"
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, answer in sorted(answers.items()):
        reasons.setdefault(answer, []).append(f"`--{name}{'...' * name.endswith('-')}`")
    if reasons:
        yield f"{mark} Options of other tools\n\n"
        more = f" More are on the page of {', '.join(shared.values())}." if shared else ""
        yield f"Ignored with one line on stderr, or refused with a remedy.{more}\n\n"
        yield from _table(
            ("options", "answer"),
            ((", ".join(own), f"{how}: {_cell(why)}") for (how, why), own in reasons.items()),
        )


def _foreign(command: Command) -> dict[str, tuple[str, str]]:
    """Return the answers to options of other tools: name -> (kind, reason)."""
    family = alias_tables().families[command.family]
    found = {
        **{name: ("ignored", why) for name, why in family.ignored.items()},
        **{name: ("refused", why.format(n="N")) for name, why in family.planned.items()},
        **{name: ("refused", why) for name, why in family.refused.items()},
        **{name: ("1 alone", why) for name, why in family.only_one.items()},
    }
    names = {row.name for row in command.rows}
    return {name: answer for name, answer in found.items() if name not in names}


# --------------------------------------------------------------------------------------------------
# Exit codes


def _exit_page() -> Iterator[str]:
    yield "# Exit codes\n\n"
    yield "Exit codes of all commands. Results go to stdout, errors to stderr.\n\n"
    kinds: dict[int, list[str]] = {INTERRUPTED: ["KeyboardInterrupt"]}
    for _, kind in sorted(vars(errors).items()):
        if isinstance(kind, type) and issubclass(kind, errors.AutoparError):
            kinds.setdefault(kind.exit_code, []).append(kind.__name__)
    rows = (
        (str(code), meaning, ", ".join(f"`{kind}`" for kind in kinds.get(code, ())))
        for code, meaning in EXIT_CODES.items()
    )
    yield from _table(("code", "meaning", "in Python (`autopar.errors`)"), rows)
    yield (
        "`AUTOPAR_DEBUG=1` shows the traceback of an error of the program. "
        "The page of a command lists its exit codes.\n"
    )


# --------------------------------------------------------------------------------------------------
# Rules of launches

_DENSE = "--model llama3-8b --hardware h100:1x8 --global-batch-size 64"
_MIXTURE = "--model mixtral-8x7b --hardware h100:2x8 --global-batch-size 64"
_EXAMPLES = (
    f"{_DENSE} --tp 6",
    f"{_DENSE} --micro-batch-size 3",
    f"{_MIXTURE} --pp 4 --ep 8 --engine megatron",
    f"{_DENSE} --precision nvfp4 --engine megatron",
)
"""Command lines of `autopar search` that break a rule each."""


def _rules_page() -> Iterator[str]:
    yield "# Rules of runs\n\n"
    yield (
        "A run that breaks a rule is an input error (exit code 2). "
        "The message has the arithmetic of the rule and the nearest values that keep all rules.\n\n"
    )
    rows = ((_typed(words), _cell(answer)) for words, answer in broken())
    yield from _table(("`autopar search` with", "message"), rows)
    yield (
        "In `--json`, `findings` of [`autopar check`](../guides/check.md), `error.rules` and "
        "`engines[].rules` contain the id of a broken rule, its values and its message. "
        "In Python, `broken` of an `autopar.run.rules.RuleError` lists them.\n\n"
        "Below: the message of each rule by id, with values in braces. "
        "`A.needs.B` means that --A needs --B, `A.excludes.B` that they exclude each other.\n"
    )
    for title, rules in rule_tables().items():
        yield f"\n## {title}\n\n"
        pairs = []
        for one in rules:
            if re.fullmatch(r"[\w.-]+\.(needs|excludes)\.[\w.-]+", one.id) and _is_plain(one):
                pairs.append(f"`{one.id}`")
            else:
                yield f"- `{one.id}`: {_cell(one.message)}\n"
        if pairs:
            yield f"- {', '.join(pairs)}\n"
    yield (
        "\nMessages about unusable files and options are in "
        "[Unusable input](../../tests/golden/bad_input.md).\n"
    )


def _is_plain(rule: Rule) -> bool:
    """Return True if the message of a rule about two options follows from its id."""
    return "{" not in rule.message and rule.message.endswith(
        (" exclude each other", f" needs --{rule.id.rpartition('.')[2]}")
    )


def rule_tables() -> dict[str, tuple[Rule, ...]]:
    """Return the rules by the title of their table, each id once."""
    from autopar.run import rules as general
    from search.engines import candidate, space
    from search.engines.deepspeed import rules as deepspeed
    from search.engines.huggingface import rules as huggingface
    from search.engines.megatron import rules as megatron
    from search.engines.torchtitan import rules as torchtitan
    from search.engines.tuners import rules as tuners
    from search.planning.uniform import infeasibility

    tables = {
        "Any engine": (
            *general.DEGREES, *general.BATCH, general.EVEN_LAYERS, *general.RUN,
            *general.PRECISION, *general.JOB, *general.BLOCK, *infeasibility.GENERAL,
                *candidate.TRAINING,
        ),
        "Per-layer plans": (
            *general.LAYER, *general.LAYER_BATCH, *general.VOCABULARY_GRID, *general.ENDS,
            *general.PLAN, *general.STAGE, *general.CHUNKS,
        ),
        "Megatron-LM": (
            *megatron.RULES, *megatron.LAYERS, *megatron.WRITTEN, *megatron.BY_RELEASE,
            *megatron.SPACE, *megatron.TUNED,
        ),
        "torchtitan": (
            *torchtitan.FILE, *torchtitan.LOCAL_BATCH, *torchtitan.WHOLE_STAGES, *torchtitan.SPACE,
            *torchtitan.FLAVOURED,
        ),
        "DeepSpeed": (*deepspeed.FILE, *deepspeed.SPACE, *space.CONFIGURED),
        "accelerate": (*huggingface.FILE, *huggingface.SPACE, *huggingface.SYNCED_GRADIENTS),
        "Tuners": tuners.FILE,
    }  # fmt: skip
    seen: set[str] = set()
    found = {}
    for title, rules in tables.items():
        found[title] = tuple({one.id: one for one in rules if one.id not in seen}.values())
        seen |= {one.id for one in rules}
    return found


def broken() -> Iterator[tuple[str, str]]:
    """Yield options that break a rule, and the message that they cause."""
    from search.commands.search import run

    for words in _EXAMPLES:
        said, printed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            code = run([*words.split(), "--output-config-path", "none"])
        lines = said.getvalue().splitlines()
        assert code == errors.UNUSABLE, f"{words}: exit code {code}, {lines[:2]}"
        yield words, lines[-1].partition(": ")[2]


# --------------------------------------------------------------------------------------------------
# Documents


def _json_page() -> Iterator[str]:
    yield "## Keys of documents\n\n"
    yield (
        "Keys with the types of their values, from the JSON Schemas: `?` marks a key that may be "
        "missing, `??` one that may be missing or null. "
        "Capitalised types are listed once, under [Types](#types). "
        "[File formats](files.md) explains the keys of files.\n\n"
    )
    types: dict[str, dict[str, Mapping[str, Any]]] = {}
    documents: dict[str, list[str]] = {}
    for role, schema in json_schemas().items():
        for name, part in schema.get("$defs", {}).items():
            if "properties" in part and part not in types.setdefault(name, {}).values():
                types[name][role] = part
        yield f"- [{role}](../schemas/{role}.schema.json): {_listed(schema, documents)}\n"
        documents[role] = [*_keys(schema)]
    yield "\n### Types\n\n"
    for name, parts in sorted(types.items(), key=lambda item: item[0].strip("_")):
        for role, part in parts.items():
            of_role = f" of {role}" if len(parts) > 1 else ""
            yield f"- **{name.strip('_')}**{of_role}: {_listed(part, documents)}\n"


def _listed(schema: Mapping[str, Any], documents: Mapping[str, Sequence[str]]) -> str:
    """Return the keys of a schema in one line; documents : keys of those listed before it."""
    keys = [*_keys(schema)]
    within = [role for role, known in documents.items() if set(known) <= set(keys)]
    role = max(within, key=lambda one: len(documents[one]), default=None)
    if role is None or len(documents[role]) < _SEVERAL:
        return ", ".join(keys)
    own = [key for key in keys if key not in documents[role]]
    return ", ".join([f"all keys of {role}", *own])


_SEVERAL = 5
"""Number of keys from which a document with all of them refers to the other document."""


def _keys(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a schema with their types; keys of comments and of the head have none."""
    required = set(schema.get("required", ()))
    for key, value in schema.get("properties", {}).items():
        if isinstance(value, bool):
            continue
        kind = _type(value)
        mark = ""
        if key not in required:
            mark = "??" if kind.endswith(_OR_NULL) else "?"
            kind = kind.removesuffix(_OR_NULL)
        yield f"`{key}{mark}` {kind}"
    for key, value in schema.get("patternProperties", {}).items():
        if not isinstance(value, bool) and "type" in value:
            yield f"<code>{_cell(_plain(key))}</code> {_type(value)}"


_OR_NULL = " or null"


def _plain(pattern: str) -> str:
    """Return the pattern of a key in readable form: N for a number."""
    number = r"(?:[1-9][0-9]{0,8})"
    one = r"(?:0|[1-9][0-9]{0,8})"
    text = pattern.removeprefix("^").removesuffix("$").replace(one, "N").replace(number, "N")
    text = text.replace("(?:", "(").replace("[1-9][0-9]{0,8}", "N")
    text = text.replace(r"(N|\[N(, ?N)*\]|N([_,]N)+)", "LIST")
    whole = re.fullmatch(r"\(((?:[^()]|\([^()]*\))*)\)", text)
    return (whole[1] if whole else text).replace("|", "&#124;")


def _type(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return f'"{value["const"]}"'
    if "enum" in value:
        return " or ".join(
            f'"{one}"' if isinstance(one, str) else str(one) for one in value["enum"]
        )
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2].strip("_")
    for several in ("anyOf", "oneOf"):
        if several in value:
            kinds = dict.fromkeys(map(_type, value[several]))
            return " or ".join(sorted(kinds, key="null".__eq__))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), Mapping):
        return f"object of {_type(value['additionalProperties'])}"
    kind = value.get("type", "anything")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


# --------------------------------------------------------------------------------------------------


def _index_page() -> Iterator[str]:
    yield "# Reference\n\nOptions of all commands, exit codes, JSON keys, files and rules.\n\n"
    rows = []
    for page, commands in _commands().items():
        words = [
            (word, text)
            for word, (_, module, text) in SUBCOMMANDS.items()
            if commands[0] in vars(import_module(module)).values()
        ]
        names = ", ".join(f"`autopar {word}`" for word, _ in words)
        said = words[0][1] if len(words) == 1 else "list what is shipped"
        rows.append((f"[{names}]({page}.md)", said))
    yield from _table(("command", "purpose"), rows)
    yield (
        "- [Exit codes](exit-codes.md)\n"
        "- [JSON](json.md): `--json`, keys of all documents, MCP\n"
        "- [File formats](files.md), with units and examples\n"
        "- [Rules of runs](rules.md): legal degrees and arguments, by engine\n"
        "- [Unusable input](../../tests/golden/bad_input.md): messages about unusable files and "
        "options\n"
    )


def main() -> None:
    """Rewrite the folder; pages of commands that no longer exist are removed."""
    FOLDER.mkdir(exist_ok=True)
    found = pages()
    for stale in FOLDER.glob("*.md"):
        if stale.name not in {*found, *HAND_WRITTEN}:
            stale.unlink()
    for name, text in found.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
