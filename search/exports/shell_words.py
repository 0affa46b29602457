"""Finds the command that a launch script would run, without running it.

Understood are assignments, arrays, `+=`, continuation lines, quotes, comments, `${NAME:-default}`
and whole-number arithmetic. Nothing is executed: what a command would print stays unknown, and of
an `if` both branches are read, which a note says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from autopar.errors import DocumentError

__all__ = ["Command", "script_command"]

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
