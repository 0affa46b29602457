"""The part of YAML that launch configurations use: mappings, lists, scalars, comments.

Written and read here so that no command needs a YAML package. What is outside (anchors, tags,
block texts, flow mappings over several lines) is refused with its line, never guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.errors import DocumentError

__all__ = ["dump_yaml", "load_yaml"]

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
