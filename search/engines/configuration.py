"""Configurations of engines as they are found: shell script, YAML or JSON -> keys and values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.documents.json import load_object, shorten
from autopar.errors import DocumentError
from autopar.plans import Plan

__all__ = [
    "Command",
    "Configuration",
    "Imported",
    "dump_yaml",
    "flags_of",
    "load_yaml",
    "read_configuration",
    "script_command",
]


# --------------------------------------------------------------------------------------------------
# Finds the command that a launch script would run, without running it.
#
# Understood are assignments, arrays, `+=`, continuation lines, quotes, comments, `${NAME:-default}`
# and whole-number arithmetic. Nothing is executed: what a command would print stays unknown, and of
# an `if` both branches are read, which a note says.


_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BLOCKS = frozenset({"if", "elif", "case", "while", "until", "for", "select"})
_KEYWORDS = frozenset({"then", "else", "do", "done", "fi", "esac", "{", "}", "!", "time", "exec"})
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_RUNNERS = re.compile(r"(.*/)?(torchrun|python[0-9.]*|accelerate|srun|deepspeed)")
_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Command:
    """The words of one launch."""

    before: tuple[str, ...]
    """Words in front of the program: torchrun and its options; empty where none was found."""
    arguments: tuple[str, ...]
    """Words behind the program; those of all arrays where the script runs none."""
    branches: bool
    """The script has branches, and all of them were read."""


@dataclass
class _Shell:
    path: str
    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)


def script_command(text: str, path: object) -> Command:
    """Return the launch in a shell script: the last command that runs a `.py` file with flags.

    Raises
    ------
    DocumentError : a quote or bracket is not closed.
    """
    shell = _Shell(str(path))
    found: Command | None = None
    branches = False
    for statement in _statements(text, shell.path):
        words = list(statement)
        while words and words[0] in _KEYWORDS:
            words.pop(0)
        if words and words[0] in _BLOCKS:
            branches = True
            continue
        if words and words[0] in _DECLARE:
            words.pop(0)
            words = [word for word in words if not word.startswith("-")]
        while words and (match := _ASSIGN.fullmatch(words[0])) is not None:
            _assign(shell, match[1], bool(match[2]), match[3])
            words.pop(0)
        if not words:
            continue
        expanded = [part for word in words for part in _expand(shell, word)]
        command = _program(expanded)
        if command is not None:
            found = command
    if found is not None:
        return Command(before=found.before, arguments=found.arguments, branches=branches)
    joined = max(shell.arrays.values(), key=len, default=[])
    return Command(before=(), arguments=tuple(joined), branches=branches)


def _program(words: list[str]) -> Command | None:
    """Return the launch in a command's words, None where it is none."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or not any(word.startswith("--") for word in words[at + 1 :]):
        return None
    if at and not any(_RUNNERS.fullmatch(word) for word in words[:at]):
        return None
    return Command(before=tuple(words[:at]), arguments=tuple(words[at + 1 :]), branches=False)


# --- lexing -----------------------------------------------------------------------------------


def _statements(text: str, path: str) -> list[list[str]]:
    """Return the words of every statement, quotes and variables kept in the words."""
    statements: list[list[str]] = [[]]
    word, at, line = "", 0, 1
    while at < len(text):
        character = text[at]
        if character == "\\":
            if text[at + 1 : at + 2] == "\n":
                line += 1
                if word:
                    statements[-1].append(word)
                    word = ""
            else:
                word += text[at : at + 2]
            at += 2
            continue
        if character == "#" and not word:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        if character in "'\"`" or text.startswith(("$(", "${"), at):
            end = _closing(text, at, path, line)
            word += text[at:end]
            line += text.count("\n", at, end)
            at = end
            continue
        if character == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", word):
            end = _array_end(text, at, path, line)
            word += text[at:end]
            line += text.count("\n", at, end)
            at = end
            continue
        if character in " \t\n;|&<>":
            if word:
                statements[-1].append(word)
                word = ""
            if character in "\n;|&":
                statements.append([])
                line += character == "\n"
        else:
            word += character
        at += 1
    if word:
        statements[-1].append(word)
    return [statement for statement in statements if statement]


def _closing(text: str, at: int, path: str, line: int) -> int:
    """Return where a quote or `$(` or `${` that begins at `at` is over."""
    start = at
    if text[at] in "'`":
        end = text.find(text[at], at + 1)
        if end < 0:
            raise _open(path, line, text[start])
        return end + 1
    if text[at] == '"':
        at += 1
        while at < len(text):
            if text[at] == "\\":
                at += 2
            elif text.startswith(("$(", "${"), at):
                at = _closing(text, at, path, line)
            elif text[at] == '"':
                return at + 1
            else:
                at += 1
        raise _open(path, line, '"')
    opening, closing = ("(", ")") if text[at + 1] == "(" else ("{", "}")
    depth, at = 0, at + 1
    while at < len(text):
        if text[at] in "'\"" and depth:
            at = _closing(text, at, path, line)
            continue
        depth += (text[at] == opening) - (text[at] == closing)
        at += 1
        if depth == 0:
            return at
    raise _open(path, line, "$" + opening)


def _array_end(text: str, at: int, path: str, line: int) -> int:
    at += 1
    fresh = True
    while at < len(text):
        if text[at] == "#" and fresh:
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text[at] in "'\"`" or text.startswith(("$(", "${"), at):
            at = _closing(text, at, path, line)
            fresh = False
        elif text[at] == ")":
            return at + 1
        else:
            fresh = text[at] in " \t\n"
            at += 2 if text[at] == "\\" else 1
    raise _open(path, line, "(")


def _open(path: str, line: int, what: str) -> DocumentError:
    where = f" on line {line}" if line else ""
    return DocumentError(path, f"the {what}{where} is not closed, expected a shell script")


# --- expansion --------------------------------------------------------------------------------


def _assign(shell: _Shell, name: str, append: bool, value: str) -> None:
    if value.startswith("(") and value.endswith(")"):
        items = [
            part
            for statement in _statements(value[1:-1], shell.path)
            for word in statement
            for part in _expand(shell, word)
        ]
        shell.arrays[name] = (shell.arrays.get(name, []) if append else []) + items
        _limited(shell, len(shell.arrays[name]))
        return
    text = _text(shell, value)
    if append:
        text = shell.scalars.get(name, "") + text
    _limited(shell, len(text))
    shell.scalars[name] = text
    shell.arrays.pop(name, None)


def _limited(shell: _Shell, size: int) -> None:
    if size > _MOST:
        raise DocumentError(shell.path, f"a variable grows beyond {_MOST} words or characters")


def _text(shell: _Shell, word: str) -> str:
    """Return a word expanded and unquoted, as the right side of an assignment is."""
    return "".join(text for text, _ in _pieces(shell, word))


def _expand(shell: _Shell, word: str) -> list[str]:
    """Return the words that a word becomes: unquoted variables are split at blanks."""
    match = re.fullmatch(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?', word)
    if match is not None:
        items = shell.arrays.get(match[1], [])
        # Elements such as "--fp8-format hybrid" are meant to fall apart, and unquoted they do.
        return list(items) if word.startswith('"') else [p for item in items for p in item.split()]
    parts = [""]
    for text, quoted in _pieces(shell, word):
        if quoted:
            parts[-1] += text
            continue
        split = re.split(r"\s+", text)
        parts[-1] += split[0]
        parts += split[1:]
    return [part for part in parts if part]


def _pieces(shell: _Shell, word: str, quoted: bool = False) -> list[tuple[str, bool]]:
    """Return a word's pieces, variables replaced, with whether blanks in them are kept."""
    pieces: list[tuple[str, bool]] = []
    at = 0
    while at < len(word):
        character = word[at]
        if character == "\\":
            pieces.append((word[at + 1 : at + 2], True))
            at += 2
        elif character == "'" and not quoted:
            end = word.find("'", at + 1)
            if end < 0:  # inside ${NAME:-...}, where it stands for itself
                end = len(word)
            pieces.append((word[at + 1 : end], True))
            at = end + 1
        elif character == '"' and not quoted:
            end = _closing(word, at, shell.path, 0)
            inner = word[at + 1 : end - 1].replace("\\\n", " ")
            pieces += [(text, True) for text, _ in _pieces(shell, inner, quoted=True)]
            at = end
        elif character == "`":
            end = _closing(word, at, shell.path, 0)
            pieces.append((word[at:end], True))
            at = end
        elif character == "$":
            end, value = _variable(shell, word, at)
            pieces.append((value, quoted or value.startswith("$")))
            at = end
        else:
            pieces.append((character, True))
            at += 1
    return pieces


def _variable(shell: _Shell, word: str, at: int) -> tuple[int, str]:
    """Return where a variable ends and its value; what is unknown stays as it is written."""
    if word.startswith("$((", at):
        end = _closing(word, at, shell.path, 0)
        return end, _arithmetic(shell, word[at + 3 : end - 2], word[at:end])
    if word.startswith("$(", at):
        end = _closing(word, at, shell.path, 0)
        return end, word[at:end]
    if word.startswith("${", at):
        end = _closing(word, at, shell.path, 0)
        inner = word[at + 2 : end - 1]
        match = re.fullmatch(r"([A-Za-z_]\w*|\d)(?:\[[@*]\])?(:?[-=?+])?(.*)", inner, re.DOTALL)
        if match is None:
            return end, word[at:end]
        name, mark, default = match[1], match[2] or "", match[3]
        value = _known(shell, name)
        if value is not None and (value or not mark.startswith(":")):
            return end, value if "+" not in mark else _text(shell, default)
        if mark.endswith(("-", "=")):
            return end, _text(shell, default)
        return end, word[at:end]
    match = _NAME.match(word, at + 1)
    if match is None:
        return at + 2, word[at : at + 2]
    value = _known(shell, match[0])
    return match.end(), "$" + match[0] if value is None else value


def _known(shell: _Shell, name: str) -> str | None:
    if name in shell.arrays:
        return " ".join(shell.arrays[name])
    return shell.scalars.get(name)


def _arithmetic(shell: _Shell, expression: str, written: str) -> str:
    """Return the value of sums and products of whole numbers, left to right by rank."""

    def value(match: re.Match[str]) -> str:
        known = _known(shell, match[1])
        return known if known is not None and known.strip().isdigit() else match[0]

    text = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", value, expression)
    tokens = re.findall(r"\d{1,9}|[-+*/()%]", text)
    if "".join(tokens) != re.sub(r"\s", "", text) or not tokens:
        return written
    try:
        result, rest = _sum(tokens)
    except (ValueError, ZeroDivisionError, IndexError, RecursionError):
        return written
    return str(result) if not rest else written


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    left, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        right, rest = _product(tokens[1:])
        left, tokens = left + right if tokens[0] == "+" else left - right, rest
    return left, tokens


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    left, tokens = _atom(tokens)
    while tokens and tokens[0] in "*/%":
        right, rest = _atom(tokens[1:])
        left = left * right if tokens[0] == "*" else divmod(left, right)[tokens[0] == "%"]
        tokens = rest
    return left, tokens


def _atom(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        inner, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError
        return inner, rest[1:]
    return int(tokens[0]), tokens[1:]


# --------------------------------------------------------------------------------------------------
# The part of YAML that launch configurations use: mappings, lists, scalars, comments.
#
# Written and read here so that no command needs a YAML package. What is outside (anchors, tags,
# block texts, flow mappings over several lines) is refused with its line, never guessed.


_PLAIN = re.compile(r"[A-Za-z0-9_./${][A-Za-z0-9_./${}:@+\-]*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_PAIR = re.compile(
    r"""("[^"]*"|'[^']*'|[^\s"'\[\]{}&*!|>%@`#][^\n]*?)\s*:(?:\s+(.*))?""", re.DOTALL
)
_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


def dump_yaml(document: Mapping[str, Any], indent: int = 0) -> str:
    """Return a document of mappings, lists of scalars and scalars as YAML; ends in a newline."""
    pad, lines = "  " * indent, []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:\n" + dump_yaml(value, indent + 1))
        elif isinstance(value, list | tuple):
            lines.append(f"{pad}{key}: [{', '.join(_scalar(item) for item in value)}]\n")
        else:
            lines.append(f"{pad}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        # YAML 1.1 takes 3e-05, without a point, for a text.
        mantissa, mark, exponent = repr(value).partition("e")
        return mantissa + (".0" if mark and "." not in mantissa else "") + mark + exponent
    text = str(value)
    plain = _PLAIN.fullmatch(text) and ": " not in text and not text.endswith(":")
    return text if plain and isinstance(_value(text), str) else json.dumps(text)


def load_yaml(text: str, path: object) -> dict[str, Any]:
    """Return the mapping in a YAML text.

    Raises
    ------
    DocumentError : it is none, or uses a part of YAML that is not read here; names the line.
    """
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = _without_comment(line)
        if bare.strip() and bare.strip() != "---":
            if "\t" in bare[: len(bare) - len(bare.lstrip())]:
                raise _fail(path, number, "is indented with a tab")
            lines.append((number, len(bare) - len(bare.lstrip()), bare.strip()))
    if not lines:
        raise DocumentError(str(path), "is empty, expected keys and values")
    value, rest = _block(lines, 0, lines[0][1], path)
    if rest < len(lines):
        raise _fail(path, lines[rest][0], "is indented less than the keys above it")
    if not isinstance(value, dict):
        raise DocumentError(str(path), "is a list, expected keys and values")
    return value


def _fail(path: object, number: int, problem: str) -> DocumentError:
    return DocumentError(
        str(path), f"line {number} {problem}", remedy="simplify the YAML, or give JSON"
    )


def _without_comment(line: str) -> str:
    quote = ""
    for at, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at].rstrip()
    return line.rstrip()


_Lines = Sequence[tuple[int, int, str]]


def _block(lines: _Lines, at: int, indent: int, path: object) -> tuple[Any, int]:
    """Return the mapping or list that begins at a line, and the line behind it."""
    if lines[at][2] == "-" or lines[at][2].startswith("- "):
        return _list(lines, at, indent, path)
    result: dict[str, Any] = {}
    while at < len(lines) and lines[at][1] == indent:
        number, _, text = lines[at]
        key, value = _pair(text, number, path)
        if key in result:
            raise _fail(path, number, f"gives the key {key!r} a second time")
        at += 1
        deeper = at < len(lines) and (
            lines[at][1] > indent or (lines[at][1] == indent and lines[at][2].startswith("- "))
        )
        if value == "" and deeper:
            result[key], at = _block(lines, at, lines[at][1], path)
        else:
            result[key] = _parsed(value, number, path)
    if at < len(lines) and lines[at][1] > indent:
        raise _fail(path, lines[at][0], "is indented more than the key above it allows")
    return result, at


def _list(lines: _Lines, at: int, indent: int, path: object) -> tuple[list[Any], int]:
    items = []
    while at < len(lines) and lines[at][1] == indent and f"{lines[at][2]} ".startswith("- "):
        number, _, text = lines[at]
        item = text[1:].strip()
        if re.match(r"""[^"'\[{]*:(\s|$)""", item):
            raise _fail(path, number, "is a list of mappings, which is not read here")
        items.append(_parsed(item, number, path))
        at += 1
    return items, at


def _pair(text: str, number: int, path: object) -> tuple[str, str]:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise _fail(path, number, f"is no `key: value`: {text[:40]!r}")
    key = match[1]
    return (key[1:-1] if key[0] in "\"'" else key), (match[2] or "").strip()


def _parsed(text: str, number: int, path: object) -> Any:
    if text[:1] in ("&", "*", "!", "|", ">", "%", "@", "`"):
        raise _fail(path, number, f"uses {text[:1]!r}, a part of YAML that is not read here")
    if text.startswith("["):
        if not text.endswith("]"):
            raise _fail(path, number, "begins a list that does not end on the line")
        inner = text[1:-1].strip().rstrip(",")
        return [_parsed(item.strip(), number, path) for item in _items(inner)] if inner else []
    if text == "{}":
        return {}
    if text.startswith("{"):
        raise _fail(path, number, "holds a mapping in braces, which is not read here")
    return _value(text)


def _items(text: str) -> list[str]:
    """Return the items of a flow list, commas in quotes kept."""
    return [m[0] for m in re.finditer(r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\[[^\]]*\]|[^,])+""", text)]


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return json.loads(text)
        except ValueError:
            return text[1:-1]
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if _NUMBER.fullmatch(text) and len(text) < 30:
        digits = text.lstrip("+-")
        return int(text) if digits.isdigit() else float(text)
    return text


# --------------------------------------------------------------------------------------------------


_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A plan that was found in an engine's configuration."""

    plan: Plan
    notes: tuple[str, ...]
    """What a plan does not say, and how to price it; what was read in two ways."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Content of a file: flags of a command line, or a document."""

    path: Path
    flags: Mapping[str, tuple[str, ...]] | None
    """Of a script; None for documents."""
    document: Mapping[str, Any]
    world_size: int | None = None
    """Where the launch says it."""
    notes: tuple[str, ...] = ()


def read_configuration(path: Path | str) -> Configuration:
    """Return the content of a `.json`, a `.yaml` or a script, told apart by suffix and content.

    Raises
    ------
    DocumentError : the file is missing or unreadable, or is none of these.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        return Configuration(path=path, flags=None, document=load_object(path).data)
    text = _read(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return Configuration(path=path, flags=None, document=load_yaml(text, path))
    if text.lstrip().startswith("{"):
        return Configuration(path=path, flags=None, document=load_object(path).data)
    command = script_command(text, path)
    if not any(word.startswith("--") for word in command.arguments):
        raise DocumentError(
            path,
            "holds no command that runs a .py file with --flags and no array of them",
            remedy="give the launch script, a .yaml or a .json",
        )
    notes = ["both branches of its conditions were read"] if command.branches else []
    return Configuration(
        path=path,
        flags=flags_of(command.arguments, path, unique=command.branches),
        document={},
        world_size=_world(command.before),
        notes=tuple(notes),
    )


def _read(path: Path) -> str:
    if not path.exists():
        raise DocumentError(path, "this file does not exist")
    if not path.is_file():
        raise DocumentError(path, "this is not a regular file, expected a configuration")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DocumentError(path, f"is larger than {_MAX_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(path, f"byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise DocumentError(path, f"the file cannot be read ({error.strerror})") from None


def flags_of(
    words: Sequence[str], path: Path | str, *, unique: bool = False
) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command line: name with hyphens -> words; the last one counts.

    Raises
    ------
    DocumentError : with `unique`, a flag is given twice with different words.
    """
    flags: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("_", "-")
        given = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            given.append(words[at])
            at += 1
        if unique and flags.get(name, tuple(given)) != tuple(given):
            raise DocumentError(
                path,
                f"gives --{name} twice, as {shorten(' '.join(flags[name]))} and as "
                f"{shorten(' '.join(given))}, in branches that are not followed",
                remedy="give a script without the branch that is not taken",
            )
        flags[name] = tuple(given)
    return flags


def _world(before: Sequence[str]) -> int | None:
    """Return nodes times processes of a torchrun line, where it says both."""
    flags = flags_of(before, "")
    nodes = flags.get("nnodes", ("1",))[:1]
    processes = flags.get("nproc-per-node", ())[:1]
    if not nodes or not processes or not (nodes[0].isdigit() and processes[0].isdigit()):
        return None
    return int(nodes[0]) * int(processes[0])
