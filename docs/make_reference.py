"""Write docs/reference from the code: options, exit codes, rules of launches, keys of documents.

The only sources are the dataclasses of the commands, the tree of errors and the models of the
documents; a test compares the pages with this script's output.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar import errors
from autopar.command.aliases import alias_tables
from autopar.command.fields import Row
from autopar.command.options import MOST_USED, Command
from autopar.documents.schemas import json_schemas
from autopar.entry import SUBCOMMANDS
from autopar.errors import INTERRUPTED
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
    "ints": "integers, by commas",
    "text": "text",
    "texts": "text, repeats",
    "flag": "flag",
    "switch": "on or off",
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


def _command_page(page: str, commands: Sequence[Command]) -> Iterator[str]:
    title = commands[0].name if page != "autopar-lists" else "autopar models, cards, sites, stacks"
    yield f"# {title}\n\n"
    for command in commands:
        words = command.usage.split()[0]
        if command is not commands[0]:
            yield f"## {command.name} {words if words[0] != '[' else ''}".rstrip() + "\n\n"
        yield f"```bash\n{command.name} {command.usage}\n```\n\n"
        for paragraph in command.intro.strip().split("\n\n"):
            yield (
                re.sub(r"(?<![`\w])(--[a-z][\w-]*)", r"`\1`", " ".join(paragraph.split())) + "\n\n"
            )
        panels: dict[str, list[Row]] = {}
        for row in command.rows:
            panels.setdefault(MOST_USED if row.most_used else row.panel, []).append(row)
        for panel, rows in panels.items():
            yield f"##{'#' * (command is not commands[0])} {panel or 'Options'}\n\n"
            heads = ("option", "takes", "default", "what")
            yield from _table(heads, map(_option_row, rows))
        yield from _spellings(command, len(commands) > 1)


def _option_row(row: Row) -> tuple[str, str, str, str]:
    name = f"--[no-]{row.name}" if row.kind == "switch" else row.label
    default = row.default_text
    return (
        f"`{name}`",
        _takes(row),
        _typed(default) if default and row.shown is None else _cell(default),
        _cell(row.help),
    )


def _takes(row: Row) -> str:
    if row.kind == "choice":
        return ", ".join(f"`{word}`" for word in row.choices)
    bounds = [
        f"{words} {value:.12g}"
        for words, value in (("at least", row.low), ("above", row.above), ("at most", row.high))
        if value is not None and value < _GUARD
    ]
    kind = _typed(row.metavar) if row.metavar else _KINDS[row.kind]
    return ", ".join([kind, *bounds])


def _spellings(command: Command, nested: bool) -> Iterator[str]:
    """Yield the other spellings of options, and the answers to the peers' spellings."""
    names = {row.name for row in command.rows}
    others = []
    for alias, targets in sorted(alias_tables().aliases.items()):
        target = next((one for one in targets if one.partition("=")[0] in names), None)
        if target is not None and alias not in names:
            others.append((f"`--{alias}`", f"`--{target}`"))
    mark = "###" if nested else "##"
    if others:
        yield f"{mark} Other spellings\n\n"
        yield from _table(("also written", "is"), others)
    family = alias_tables().families[command.family]
    said = [
        *((name, "ignored", why) for name, why in family.ignored.items()),
        *((name, "refused", why.format(n="N")) for name, why in family.planned.items()),
        *((name, "refused", why) for name, why in family.refused.items()),
        *((name, "1 alone", why) for name, why in family.only_one.items()),
    ]
    said = [(name, how, why) for name, how, why in said if name not in names]
    if said:
        yield f"{mark} Options of other tools\n\n"
        yield "Accepted without an effect, with one line on stderr, or refused with a remedy.\n\n"
        rows = (
            (f"`--{name}{'...' * name.endswith('-')}`", how, _cell(why))
            for name, how, why in sorted(said)
        )
        yield from _table(("option", "is", "because"), rows)


# --------------------------------------------------------------------------------------------------
# Exit codes


def _exit_page() -> Iterator[str]:
    yield "# Exit codes\n\n"
    yield "Of all commands. Results go to stdout, the sentence that says why to stderr.\n\n"
    kinds: dict[int, list[type[errors.AutoparError]]] = {}
    for _, kind in sorted(vars(errors).items()):
        if isinstance(kind, type) and issubclass(kind, errors.AutoparError):
            kinds.setdefault(kind.exit_code, []).append(kind)
    rows = [("0", "done", "")]
    for code, own in sorted(kinds.items()):
        meaning = {
            1: "the installation is incomplete, or an error of the program "
            "(`AUTOPAR_DEBUG=1` shows the traceback)",
            2: "an input or an option is unusable",
            3: "the question is valid and has no answer: nothing fits, or none was found in time",
        }[code]
        rows.append((str(code), meaning, ", ".join(f"`{kind.__name__}`" for kind in own)))
    rows.append((str(INTERRUPTED), "Ctrl-C", "`KeyboardInterrupt`"))
    yield from _table(("code", "means", "in Python (`autopar.errors`)"), rows)
    yield "Where a command has more to say:\n\n"
    said = []
    for page, own in _commands().items():
        for command in own:
            found = re.search(r"Exit codes?:?.*?\.(?=\s|$)", " ".join(command.intro.split()))
            if found:
                said.append((f"[`{command.name}`]({page}.md)", _cell(found[0])))
    yield from _table(("command", "exit codes"), dict(said).items())


# --------------------------------------------------------------------------------------------------
# Rules of launches

_LAUNCH = ("--model", "llama3-8b", "--hardware", "h100:1x8", "--settle-bsz", "64")
_MIXTURE = ("--model", "mixtral-8x7b", "--hardware", "h100:2x8", "--settle-bsz", "64")
BROKEN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("degrees multiply to the GPUs", (*_LAUNCH, "--tp", "4", "--pp", "4")),
    ("tensor degree and heads", (*_LAUNCH, "--tp", "6")),
    (
        "context degree and tokens",
        (*_LAUNCH, "--seq-length", "4100", "--cp", "4", "--engine", "megatron"),
    ),
    ("context ranks of the trainer", (*_LAUNCH, "--cp", "2", "--engine", "deepspeed")),
    (
        "stages and layers",
        ("--model", "llama3-8b", "--hardware", "h100:8x8", "--settle-bsz", "64", "--pp", "64"),
    ),
    ("stages of the trainer", (*_LAUNCH, "--pp", "2", "--engine", "accelerate")),
    ("chunks need stages", (*_LAUNCH, "--pp", "1", "--vpp", "2")),
    ("chunks and layers", (*_LAUNCH, "--pp", "4", "--vpp", "16", "--engine", "megatron")),
    (
        "a schedule needs stages",
        (*_LAUNCH, "--pp", "1", "--schedule", "zbv", "--engine", "torchtitan"),
    ),
    (
        "schedules of the trainer",
        (*_LAUNCH, "--pp", "2", "--schedule", "zbv", "--engine", "megatron"),
    ),
    ("micro-batches fill the stages", (*_LAUNCH[:-1], "8", "--pp", "8", "--micro-batch-size", "2")),
    ("the global batch divides", (*_LAUNCH, "--micro-batch-size", "3")),
    ("a micro-batch and the batch", (*_LAUNCH, "--micro-batch-size", "128")),
    ("experts need a mixture", (*_LAUNCH, "--ep", "2")),
    ("expert degree and experts", (*_MIXTURE, "--ep", "16")),
    ("expert degree of the trainer", (*_MIXTURE, "--ep", "4", "--engine", "accelerate")),
    (
        "expert degrees fold over a stage",
        (*_MIXTURE, "--pp", "4", "--ep", "8", "--engine", "megatron"),
    ),
    ("ZeRO of the trainer", (*_LAUNCH, "--zero", "2", "--engine", "megatron")),
    ("ZeRO beside stages", (*_LAUNCH, "--zero", "3", "--pp", "2", "--engine", "megatron")),
    ("recomputation of the trainer", (*_LAUNCH, "--recompute", "op", "--engine", "megatron")),
    ("precision of the GPU", (*_LAUNCH, "--precision", "nvfp4", "--engine", "megatron")),
    (
        "dispatcher of the trainer",
        (*_MIXTURE, "--ep", "4", "--dispatcher", "flex", "--engine", "torchtitan"),
    ),
    (
        "copies divide the data ranks",
        (*_LAUNCH, "--tp", "2", "--dp-replicate", "3", "--engine", "megatron"),
    ),
)
"""A rule in words -> a command line that breaks it."""


def _rules_page() -> Iterator[str]:
    yield "# Rules of launches\n\n"
    yield (
        "A run that breaks a rule is an input error (exit code 2): the rule with its arithmetic, "
        "and the nearest values that keep all rules. Each row was run. "
        "[Degrees](../guides/fastest.md#degrees) are listed in the guide.\n\n"
    )
    rows = ((title, _typed(" ".join(words)), _cell(answer)) for title, words, answer in broken())
    yield from _table(("rule", "`autopar-search` with", "answers"), rows)
    yield (
        "\n## Ids\n\n"
        "Every rule has an id. In `--json`, `findings` of [`autopar-check`](../guides/check.md), "
        "`error.rules` and `engines[].rules` contain the id of a broken rule, the values that it "
        "reads, and the sentence. In Python, `broken` of an `autopar.run.rules.RuleError` lists "
        "them. "
        "Values are in braces.\n"
    )
    for title, rules in rule_tables().items():
        yield f"\n### {title}\n\n"
        rows = ((f"`{one.id}`", _cell(one.message)) for one in rules)
        yield from _table(("id", "sentence"), rows)
    yield (
        "\nAnswers to unusable files and options are on [a page of their own]"
        "(../../tests/golden/bad_input.md).\n"
    )


def rule_tables() -> dict[str, tuple[Rule, ...]]:
    """Return the rules by the title of their table, each id once."""
    from autopar.run import rules as general
    from search.engines import choice
    from search.engines.deepspeed import rules as deepspeed
    from search.engines.huggingface import rules as huggingface
    from search.engines.megatron import rules as megatron
    from search.engines.torchtitan import rules as torchtitan
    from search.planning.uniform import obstacle

    tables = {
        "Any engine": (
            *general.DEGREES, *general.BATCH, general.EVEN_LAYERS, *general.RUN,
            *general.PRECISION, *general.JOB, *general.BLOCK, *obstacle.GENERAL, *choice.TRAINING,
        ),
        "Per-layer plans": (
            *general.LAYER, *general.LAYER_BATCH, *general.VOCABULARY_GRID, *general.ENDS,
            *general.PLAN, *general.STAGE, *general.CHUNKS,
        ),
        "Megatron-LM": (
            *megatron.RULES, *megatron.LAYERS, *megatron.WRITTEN, *megatron.EARLIER,
            *megatron.SPACE,
        ),
        "torchtitan": (
            *torchtitan.FILE, *torchtitan.LOCAL_BATCH, *torchtitan.WHOLE_STAGES, *torchtitan.SPACE,
        ),
        "DeepSpeed": (*deepspeed.FILE, *deepspeed.SPACE),
        "accelerate": (*huggingface.FILE, *huggingface.SPACE),
    }  # fmt: skip
    seen: set[str] = set()
    found = {}
    for title, rules in tables.items():
        found[title] = tuple({one.id: one for one in rules if one.id not in seen}.values())
        seen |= {one.id for one in rules}
    return found


def broken() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield every rule, options that break it, and the message that they cause."""
    from search.commands.search import run

    for title, words in BROKEN:
        said, printed = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
            code = run([*words, "--output-config-path", "none"])
        lines = said.getvalue().splitlines()
        assert code == 2, f"{title}: exit code {code}, {lines[:2]}"
        yield title, words, lines[-1].removeprefix("autopar-search: ")


# --------------------------------------------------------------------------------------------------
# Documents


_MOST_PARTS = 25
"""Largest number of parts of a document that are shown; with more, only its own keys are."""


def _json_page() -> Iterator[str]:
    yield "## Keys of documents\n\n"
    yield (
        "Every file that is read or written, and what `--json` prints, from the JSON Schemas. "
        "[File formats](files.md) says the same in words, with examples.\n\n"
    )
    for role, schema in json_schemas().items():
        yield f"### {role}\n\n{_cell(schema.get('description', ''))} "
        yield f"[Schema](../schemas/{role}.schema.json).\n\n"
        yield from _keys(schema)
        parts = {
            name: part for name, part in schema.get("$defs", {}).items() if "properties" in part
        }
        if len(parts) > _MOST_PARTS:
            continue
        for name, part in parts.items():
            yield f"**{name}**: {_cell(part.get('description', ''))}\n\n"
            yield from _keys(part)


def _keys(schema: Mapping[str, Any]) -> Iterator[str]:
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{key}`",
            _type(value),
            "yes" if key in required else "",
            _cell(value.get("description", "")),
        )
        for key, value in schema.get("properties", {}).items()
    ]
    rows += [
        (
            f"<code>{_cell(_plain(key))}</code>",
            _type(value),
            "",
            _cell(value.get("description", "")),
        )
        for key, value in schema.get("patternProperties", {}).items()
    ]
    described = any(row[3] for row in rows)
    heads = ("key", "value", "required", "what")
    yield from _table(
        heads if described else heads[:3], rows if described else (row[:3] for row in rows)
    )


def _plain(pattern: str) -> str:
    """Return the pattern of a key in readable form: N for a number."""
    number = r"(?:[1-9][0-9]{0,8})"
    one = r"(?:0|[1-9][0-9]{0,8})"
    text = pattern.removeprefix("^").removesuffix("$").replace(one, "N").replace(number, "N")
    return text.replace("(?:", "(").replace("[1-9][0-9]{0,8}", "N").replace("|", "&#124;")


def _type(value: Mapping[str, Any]) -> str:
    if "const" in value:
        return _typed(str(value["const"]))
    if "enum" in value:
        return ", ".join(_typed(str(one)) for one in value["enum"])
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    for several in ("anyOf", "oneOf"):
        if several in value:
            return " or ".join(dict.fromkeys(map(_type, value[several])))
    if value.get("type") == "array":
        return f"list of {_type(value['items'])}" if "items" in value else "list"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), Mapping):
        return f"object of {_type(value['additionalProperties'])}"
    kind = value.get("type", "anything")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


# --------------------------------------------------------------------------------------------------


def _index_page() -> Iterator[str]:
    yield "# Reference\n\nWritten from the code, so that it is what the commands do.\n\n"
    what: dict[str, list[str]] = {}
    for word, (_, module, text) in SUBCOMMANDS.items():
        what.setdefault(module, []).append(f"`autopar {word}`: {text}")
    rows = []
    for page, commands in _commands().items():
        module = next(
            module
            for _, module, _ in SUBCOMMANDS.values()
            if commands[0] in vars(import_module(module)).values()
        )
        said = (
            what[module]
            if len(what[module]) == 1
            else [", ".join(one.split(":")[0] for one in what[module])]
        )
        name = commands[0].name if page != "autopar-lists" else "lists"
        rows.append((f"[`{name}`]({page}.md)", said[0]))
    yield from _table(("options of", "which is"), rows)
    others = (
        ("[Exit codes](exit-codes.md)", "of all commands"),
        ("[JSON](json.md)", "every key of every file, and of `--json`"),
        ("[File formats](files.md)", "the same in words, with units and examples"),
        ("[Rules of launches](rules.md)", "what no trainer runs, and what is answered"),
        (
            "[Unusable input](../../tests/golden/bad_input.md)",
            "what is answered to files and options that cannot be used",
        ),
    )
    yield from _table(("further", ""), others)


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
