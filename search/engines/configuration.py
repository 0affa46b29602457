"""Configurations of engines as they are found: shell script, YAML or JSON -> keys and values."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from autopar.documents.json import load_object
from autopar.errors import DocumentError
from autopar.records import dataclass

__all__ = [
    "Command",
    "Configuration",
    "dump_yaml",
    "flags_of",
    "load_yaml",
    "read_configuration",
    "script_command",
]


# --------------------------------------------------------------------------------------------------
# The command that a launch script would run, found without running it.


_NAME = r"[A-Za-z_]\w*"
# What begins with a character is one thing only, so that an open quote in a long script takes
# linear time. Not `*+`, which Python before 3.11.5 matches wrongly (CPython issue 106052).
_BRACES = r"\$\{(?:[^{}$]|\$(?!\{)|\$\{[^{}]*\})*\}"
_QUOTES = rf"""'[^']*'|"(?:{_BRACES}|\\.|\$(?!\{{)|[^"\\$])*\""""
_PIECE = rf"""{_QUOTES}|\\.|{_BRACES}|\$(?![{{(])|[^\s'"\\$;&|<>()#`]"""
_WORD = rf"(?:{_PIECE})(?:{_PIECE}|\#)*"
# a comment begins where a word would; elsewhere its sign is a part of the word
_ITEMS = re.compile(rf"(?:\s|\\\n|(?<![^\s(])\#[^\n]*|(?<=[^\s(])\#|{_PIECE})*", re.DOTALL)
# tried in this order: a redirection may begin with a digit, an array with a word
_TOKEN = re.compile(
    rf"(?P<blank>(?:[^\S\n]|\\\n)+|\#[^\n]*)"
    rf"|(?P<redirect>[0-9&]?(?:>[>&|]?|<&?)[ \t]*{_WORD})"
    rf"|(?P<end>[\n;&|])"
    rf"|(?P<array>{_NAME}\+?=\({_ITEMS.pattern}\))"
    rf"|(?P<word>{_WORD})",
    re.DOTALL,
)
_ASSIGN = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(rf"{_QUOTES}|\\.|{_BRACES}|\${_NAME}", re.DOTALL)
_IN_QUOTES = re.compile(rf"\\.|{_BRACES}|\${_NAME}", re.DOTALL)
_PARAMETER = re.compile(rf"({_NAME}|[0-9])(?:\[[@*]\])?(?:(:?[-=?+])(.*))?", re.DOTALL)
_SUBSTITUTION = re.compile(r"\\.|(\$\(|`)", re.DOTALL)
_RUNNERS = re.compile(r"(.*/)?(torchrun|python[0-9.]*|accelerate|srun|deepspeed)")
_DECLARE = frozenset({"export", "declare", "readonly", "typeset"})
_FLOW = frozenset(
    {"if", "for", "while", "until", "case", "select", "function", "{", "[", "[[", "test"}
)
# words or characters of a variable: `A=$A$A` doubles with every line
_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Command:
    """The words of one launch."""

    before: tuple[str, ...]
    """Words in front of the program: torchrun and its options; empty where none was found."""
    arguments: tuple[str, ...]
    """Words behind the program; those of the longest array where the script runs none."""


@dataclass
class _Shell:
    path: str
    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)


def script_command(text: str, path: object) -> Command:
    """Return the launch in a shell script: the last command that runs a `.py` file with flags.

    Read are assignments, arrays, `+=`, quotes, comments, continuation lines and `${NAME:-default}`.
    What the environment says stays `$NAME`.

    Raises DocumentError: a quote or bracket is not closed, or the script has anything else.
    """
    shell = _Shell(str(path))
    found: Command | None = None
    for line, statement in _statements(text + "\n", shell.path):
        words = list(statement)
        # what runs behind a condition only a shell can say
        if words[0] in _FLOW:
            raise _unread(shell.path, line, words[0])
        if words[0] in _DECLARE:
            words = [word for word in words[1:] if not word.startswith("-")]
        while words and (match := _ASSIGN.fullmatch(words[0])) is not None:
            _assign(shell, match[1], bool(match[2]), match[3])
            words.pop(0)
        found = _program([part for word in words for part in _expand(shell, word)]) or found
    if found is not None:
        return found
    longest: list[str] = max(shell.arrays.values(), key=len, default=[])
    return Command(before=(), arguments=tuple(longest))


def _program(words: list[str]) -> Command | None:
    """Return the launch in a command's words, None where it is none."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None or not any(word.startswith("--") for word in words[at + 1 :]):
        return None
    # a script as the command itself, or behind something that runs scripts
    if at and not any(_RUNNERS.fullmatch(word) for word in words[:at]):
        return None
    return Command(before=tuple(words[:at]), arguments=tuple(words[at + 1 :]))


def _statements(text: str, path: str) -> Iterator[tuple[int, list[str]]]:
    """Yield line and words of every statement, quotes and variables kept in the words."""
    words: list[str] = []
    at, line, first = 0, 1, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _unreadable(text, at, line, path)
        if match.lastgroup in ("word", "array"):
            for item in _items(match[0]) if match.lastgroup == "array" else (match,):
                # word by word, so that an error names the line inside the array
                within = text.count("\n", at, at + item.start()) if item is not match else 0
                _refuse_substitution(item[0], line + within, path)
            first = first if words else line
            words.append(match[0])
        elif match.lastgroup == "end" and words:
            yield first, words
            words = []
        line += match[0].count("\n")
        at = match.end()


def _items(array: str) -> Iterator[re.Match[str]]:
    """Yield the words of `NAME=(...)`, its comments left out."""
    for match in _TOKEN.finditer(array, array.index("(") + 1, len(array) - 1):
        if match.lastgroup == "word":
            yield match


def _refuse_substitution(word: str, line: int, path: str) -> None:
    for piece in _VARIABLE.finditer(word):
        # single quotes keep everything as it is
        for match in _SUBSTITUTION.finditer(piece[0] if piece[0][0] != "'" else ""):
            if match[1]:
                at = piece.start() + match.start()
                raise _unread(path, line + word.count("\n", 0, at), match[1])


def _unreadable(text: str, at: int, line: int, path: str) -> DocumentError:
    """Return what is wrong where no word begins: something is not closed, or not read."""
    what = text[at : at + 2] if text.startswith(("$(", "${"), at) else text[at]
    if what == "(" and at and text[at - 1] == "=":
        items = _ITEMS.match(text, at + 1)
        end = items.end() if items is not None else len(text)
        if end < len(text):
            line += text.count("\n", at, end)
            nested = text[end] == "("
            return _unread(path, line, "(") if nested else _unreadable(text, end, line, path)
    elif what not in ("'", '"', "${"):
        return _unread(path, line, what)
    return DocumentError(path, f"the {what} on line {line} is not closed, expected a shell script")


def _unread(path: str, line: int, what: str) -> DocumentError:
    return DocumentError(
        path,
        f"line {line} has {what!r}, and of scripts only assignments, arrays and the command are "
        "read",
        remedy="give the arguments in a plain script, YAML or JSON",
    )


def _assign(shell: _Shell, name: str, append: bool, value: str) -> None:
    if value.startswith("("):
        items = [part for match in _items(value) for part in _expand(shell, match[0])]
        shell.arrays[name] = (shell.arrays.get(name, []) if append else []) + items
        _limited(shell, len(shell.arrays[name]))
        return
    text = _text(shell, value)
    if append:
        text = shell.scalars.get(name, "") + text
    _limited(shell, len(text))
    shell.scalars[name] = text
    # a name is one of both: the last assignment counts
    shell.arrays.pop(name, None)


def _limited(shell: _Shell, size: int) -> None:
    if size > _MOST:
        raise DocumentError(shell.path, f"a variable grows beyond {_MOST} words or characters")


def _expand(shell: _Shell, word: str) -> list[str]:
    """Return the words that a word becomes: unquoted variables are split at blanks."""
    match = re.fullmatch(rf'"?\$\{{({_NAME})\[[@*]\]\}}"?', word)
    if match is not None:
        items = shell.arrays.get(match[1], [])
        # Elements such as "--fp8-format hybrid" are meant to fall apart, and unquoted they do.
        return list(items) if word.startswith('"') else [p for item in items for p in item.split()]
    return _split(_replaced(shell, word, apart=True))


def _text(shell: _Shell, word: str) -> str:
    """Return a word expanded and unquoted, as the right side of an assignment is."""
    return " ".join(_split(_replaced(shell, word, apart=False)))


def _split(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:  # a quote inside ${NAME:-...}, where it stands for itself
        return [word]


def _replaced(shell: _Shell, word: str, *, apart: bool) -> str:
    """Return a word with values in place of variables, quoted as shlex has to see them."""

    def quoted(match: re.Match[str]) -> str:
        if match[0][0] == "\\":
            character = match[0][1]
            # shlex leaves a backslash in front of these two
            return "" if character == "\n" else character if character in "$`" else match[0]
        return re.sub(r'(["\\])', r"\\\1", _value(shell, match[0]))

    def bare(match: re.Match[str]) -> str:
        if match[0][0] == "'":
            return match[0]
        if match[0][0] == "\\":
            return match[0].replace("\\\n", "")
        if match[0][0] == '"':
            return '"' + _IN_QUOTES.sub(quoted, match[0][1:-1]) + '"'
        value = _value(shell, match[0])
        if value == match[0] or not apart:
            return shlex.quote(value) if value else ""
        # bash splits an unquoted value at blanks, and quotes inside it stand for themselves
        return re.sub(r"\S+", lambda part: shlex.quote(part[0]), value)

    return _VARIABLE.sub(bare, word)


def _value(shell: _Shell, written: str) -> str:
    """Return the value of `$NAME` or `${NAME...}`; what is unknown stays as it is written."""
    match = _PARAMETER.fullmatch(written[2:-1] if written[1] == "{" else written[1:])
    if match is None:
        return written
    name, mark, default = match[1], match[2] or "", match[3]
    value = shell.scalars.get(name)
    if name in shell.arrays:
        value = " ".join(shell.arrays[name])
    # with a colon an empty value counts as none
    if value is not None and (value or not mark.startswith(":")):
        # `+` is the other way round: its text stands in where there is a value
        return value if "+" not in mark else _text(shell, default)
    if mark.endswith("+"):  # what is there only if somebody sets the variable
        return ""
    return _text(shell, default) if mark.endswith(("-", "=")) else written


# --------------------------------------------------------------------------------------------------
# YAML. PyYAML reads it; it is written here, since the engines' own files have lists on one line and
# mappings below their keys, which no one style of PyYAML gives.


_PLAIN = re.compile(r"[A-Za-z0-9_./$][A-Za-z0-9_./${}:@+\-]*")
_BRACE = re.compile(r"[{}]")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def dump_yaml(document: Mapping[str, Any], indent: int = 0, *, quoted: bool = False) -> str:
    """Return a document of mappings, lists of scalars and scalars as YAML; ends in a newline.

    quoted : all texts, not only those that a reader would take for something else.
    """
    pad, lines = "  " * indent, []
    for key, value in document.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{key}:\n" + dump_yaml(value, indent + 1, quoted=quoted))
        elif isinstance(value, list | tuple):
            items = (_scalar(item, in_list=True, quoted=quoted) for item in value)
            lines.append(f"{pad}{key}: [{', '.join(items)}]\n")
        else:
            lines.append(f"{pad}{key}: {_scalar(value, quoted=quoted)}\n")
    return "".join(lines)


def _scalar(value: Any, *, in_list: bool = False, quoted: bool) -> str:
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
    # in a list a brace would begin a mapping
    plain = not quoted and _is_plain(text) and not (in_list and _BRACE.search(text))
    return text if plain else json.dumps(text)


def _is_plain(text: str) -> bool:
    """Return whether every reader takes a text for itself without quotes.

    1e5 is a text in YAML 1.1 and a number in 1.2, `no` the other way round.
    """
    import yaml

    if not _PLAIN.fullmatch(text) or text.endswith(":") or _NUMBER.fullmatch(text):
        return False
    tag = yaml.SafeLoader("").resolve(yaml.ScalarNode, text, (True, False))
    return bool(tag == yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG)


def load_yaml(text: str, path: object) -> dict[str, Any]:
    """Return the mapping in a YAML text.

    Raises DocumentError: it is none, gives a key twice, or has anchors or tags; names the line.
    """
    import yaml  # only where a file is YAML

    try:
        for token in yaml.scan(text):
            # An alias can hold itself, and no launch needs one.
            if isinstance(token, yaml.AnchorToken | yaml.AliasToken | yaml.TagToken):
                problem = f"uses {text[token.start_mark.index]!r}, a part of YAML that is not read"
                raise _fail(path, token.start_mark.line, problem + " here")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise DocumentError(str(path), "is empty, expected keys and values")
        if isinstance(root, yaml.SequenceNode):
            raise DocumentError(str(path), "is a list, expected keys and values")
        if isinstance(root, yaml.ScalarNode):
            line = root.start_mark.line
            raise _fail(path, line, f"is no `key: value`: {root.value[:40]!r}")
        built: dict[str, Any] = _built(root, path)
        return built
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position)
        raise _fail(path, line, f"has the character {chr(error.character)!r}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(str(error.problem or error.context).split())
        raise _fail(path, mark.line, f"is not YAML: {problem}") from None
    except RecursionError:
        raise DocumentError(str(path), "is nested too deeply", remedy="give JSON") from None


def _built(node: Any, path: object) -> Any:
    """Return what a node of PyYAML holds; keys are texts."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return [_built(item, path) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        # a date or `=` in a launch is a text
        if node.tag in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value"):
            return node.value
        try:
            return yaml.SafeLoader("").construct_object(node)
        except ValueError:  # 0x_, or a number of thousands of digits
            return node.value
    result: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _fail(path, key.start_mark.line, "has a key that is no text")
        if key.value in result:
            raise _fail(path, key.start_mark.line, f"gives the key {key.value!r} a second time")
        result[key.value] = _built(value, path)
    return result


def _fail(path: object, line: int, problem: str) -> DocumentError:
    return DocumentError(
        str(path), f"line {line + 1} {problem}", remedy="simplify the YAML, or give JSON"
    )


# --------------------------------------------------------------------------------------------------
# A configuration, whatever it is written in.


_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Content of a file: flags of a command line, or a document."""

    path: Path
    flags: Mapping[str, tuple[str, ...]] | None
    """Of a script; None for documents."""
    document: Mapping[str, Any]
    world_size: int | None = None
    """Where the launch says it."""

    def num_gpus(self, known: int | None) -> int:
        """Return the known number of GPUs, else the launch's; raises DocumentError without both."""
        found = known or self.world_size
        if not found:
            raise DocumentError(
                self.path,
                "does not say the number of GPUs",
                remedy="give --num-nodes and --num-gpus-per-node",
            )
        return found


def read_configuration(path: Path | str) -> Configuration:
    """Return the content of a `.json`, a `.yaml` or a script, told apart by suffix and content.

    Raises DocumentError: the file is missing or unreadable, or is none of these.
    """
    path = Path(path)
    if path.suffix.lower() == ".json":
        return Configuration(path=path, flags=None, document=load_object(path).data)
    text = _read(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        return Configuration(path=path, flags=None, document=load_yaml(text, path))
    # JSON without its suffix
    if text.lstrip().startswith("{"):
        return Configuration(path=path, flags=None, document=load_object(path).data)
    command = script_command(text, path)
    if not any(word.startswith("--") for word in command.arguments):
        raise DocumentError(
            path,
            "holds no command that runs a .py file with --flags and no array of them",
            remedy="give the launch script, a .yaml or a .json",
        )
    return Configuration(
        path=path,
        flags=flags_of(command.arguments),
        document={},
        world_size=_world(command.before),
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


def flags_of(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the flags of a command line: name with hyphens -> words; the last one counts."""
    flags: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("--") or len(word) == 2:
            continue
        name, equals, value = word[2:].partition("=")
        # argparse programs spell a flag either way
        name = name.replace("_", "-")
        given = [value] if equals else []
        while not equals and at < len(words) and not words[at].startswith("--"):
            given.append(words[at])
            at += 1
        flags[name] = tuple(given)
    return flags


def _world(before: Sequence[str]) -> int | None:
    """Return nodes times processes of a torchrun line, where it says both."""
    flags = flags_of(before)
    nodes = flags.get("nnodes", ("1",))[:1]
    processes = flags.get("nproc-per-node", ())[:1]
    # a variable or a range such as 1:4 is no number
    if not all(words and re.fullmatch("[0-9]{1,9}", words[0]) for words in (nodes, processes)):
        return None
    return int(nodes[0]) * int(processes[0])
