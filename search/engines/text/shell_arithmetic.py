"""Arithmetic of bash: `$((...))`, `((...))`, `let` and indexes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from search.engines.text.shell_words import HOLES, NAME, closing

_DEEPEST = 8
"""Maximum depth of variables whose values are expressions."""
_ASSIGNS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<=", ">=", "<", ">"),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
    ("**",),
)
_TOKEN = re.compile(
    rf"\s*(\*\*|<<=|>>=|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^]=|[<>=!]=|[-+*/%<>=!~&|^?:(),]"
    rf"|0[xX][0-9a-fA-F]+|[0-9]+#[0-9a-zA-Z@_]+|[0-9]+|{NAME}|[{HOLES}])\s*"
)


class OpenSumError(ValueError):
    """A sum with a value that is known only at run time; `value` is that value."""

    def __init__(self, value: str) -> None:
        super().__init__(value)
        self.value = value


class WrongSumError(ValueError):
    """An expression that bash rejects, or that is not interpreted."""


class Variables(Protocol):
    """Variables of an expression; an index is the text between brackets."""

    def value_of(self, name: str, index: str | None) -> str: ...
    def assign(self, name: str, index: str | None, value: int) -> None: ...


def sum_of(text: str, variables: Variables, depth: int = 0) -> int:
    """Return the value of `$((text))` as a 64-bit integer, as in bash.

    Raises OpenSumError for a value known only at run time, and WrongSumError for an invalid
    expression.
    """
    return _Sum(text, variables, depth).value()


def check_sum(text: str) -> None:
    """Raise WrongSumError if the syntax of an expression is wrong; no variable is read."""
    expression = _Sum(text, None, 0)
    expression.skip()
    expression.value()


class _Sum:
    """Evaluator of one expression by precedence climbing; untaken branches are not evaluated."""

    def __init__(self, text: str, variables: Variables | None, depth: int) -> None:
        self._variables, self._depth, self._at = variables, depth, 0
        self._skipped = 0
        """Number of surrounding operands that are not evaluated."""
        self._tokens = list[str]()
        self._indexes = dict[int, str]()
        at, text = 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise WrongSumError
            at = match.end()
            if text.startswith("[", at) and re.fullmatch(NAME, match[1]):
                end = closing(text, at)
                if not end:
                    raise WrongSumError
                self._indexes[len(self._tokens)] = text[at + 1 : end - 1]
                at = end
            self._tokens.append(match[1])

    def skip(self) -> None:
        """Evaluate nothing from here on."""
        self._skipped += 1

    def value(self) -> int:
        if not self._tokens:
            return 0
        found = self._comma()
        if self._at != len(self._tokens):
            raise WrongSumError
        return found

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _comma(self) -> int:
        found = self._choice()
        while self._peek() == ",":
            self._at += 1
            found = self._choice()
        return found

    def _choice(self) -> int:
        name, at = self._peek(), self._at
        following = self._tokens[at + 1] if at + 1 < len(self._tokens) else ""
        if following in _ASSIGNS and re.fullmatch(NAME, name):
            self._at += 2
            right = self._choice()
            if following != "=":
                right = self._applied(following[:-1], self._of(at), right)
            self._assign(at, right)
            return right
        found = self._level(0)
        if self._peek() == "?":
            self._at += 1
            yes = self._unless(not found, self._comma)
            if self._peek() != ":":
                raise WrongSumError
            self._at += 1
            no = self._unless(bool(found), self._choice)
            return yes if found else no
        return found

    def _unless(self, skipped: bool, evaluate: Callable[[], int]) -> int:
        self._skipped += skipped
        found = evaluate()
        self._skipped -= skipped
        return found

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._unary()
        found = self._level(level + 1)
        while self._peek() in _LEVELS[level]:
            operator = self._peek()
            self._at += 1
            skipped = bool(found) if operator == "||" else operator == "&&" and not found
            # `**` is right-associative.
            above = level if operator == "**" else level + 1
            right = self._unless(skipped, partial(self._level, above))
            found = self._applied(operator, found, right)
        return found

    def _applied(self, operator: str, one: int, other: int) -> int:
        return 0 if self._skipped else applied(operator, one, other)

    def _unary(self) -> int:
        token, at = self._peek(), self._at
        if not token:
            raise WrongSumError
        self._at += 1
        if token in ("+", "-", "!", "~"):
            value = self._unary()
            return wrapped({"+": value, "-": -value, "!": int(not value), "~": ~value}[token])
        if token == "(":
            value = self._comma()
            if self._peek() != ")":
                raise WrongSumError
            self._at += 1
            return value
        if token in ("++", "--"):
            self._at += 1
            if not re.fullmatch(NAME, self._tokens[at + 1] if at + 1 < len(self._tokens) else ""):
                raise WrongSumError
            return self._stepped(at + 1, token)
        if token[0].isdigit():
            return _number(token)
        if re.fullmatch(f"[{HOLES}]", token):
            if self._skipped:
                return 0
            raise OpenSumError(token)
        if not re.fullmatch(NAME, token):
            raise WrongSumError
        value = self._of(at)
        if self._peek() in ("++", "--"):
            self._stepped(at, self._peek())
            self._at += 1
        return value

    def _stepped(self, at: int, how: str) -> int:
        value = wrapped(self._of(at) + (1 if how == "++" else -1))
        self._assign(at, value)
        return value

    def _assign(self, at: int, value: int) -> None:
        if not self._skipped and self._variables is not None:
            self._variables.assign(self._tokens[at], self._indexes.get(at), value)

    def _of(self, at: int) -> int:
        if self._skipped or self._variables is None:
            return 0
        text = self._variables.value_of(self._tokens[at], self._indexes.get(at))
        if re.fullmatch("-?[1-9][0-9]{0,17}", text):
            return int(text)
        if self._depth > _DEEPEST:
            raise WrongSumError
        try:
            return sum_of(text, self._variables, self._depth + 1)
        except OpenSumError:
            check_sum(text)
            raise


def _number(token: str) -> int:
    base, mark, digits = token.partition("#")
    if mark:
        if not 2 <= int(base) <= 36 or base[0] == "0" or not digits.isalnum():
            raise WrongSumError
    elif token[1:2] in ("x", "X"):
        base, digits = "16", token[2:]
    else:
        # A leading zero means octal.
        base, digits = ("8" if token[0] == "0" else "10"), token
    if len(digits) > 64:
        raise WrongSumError
    try:
        return wrapped(int(digits, int(base)))
    except ValueError:
        raise WrongSumError from None


def wrapped(value: int) -> int:
    """Return an integer in the 64 bits of bash."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def applied(operator: str, one: int, other: int) -> int:
    """Return the result of a binary operator; raises WrongSumError for a division by zero."""
    if operator in ("/", "%"):
        if other == 0:
            raise WrongSumError
        # Bash rounds towards zero, Python down.
        quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
        return wrapped(quotient if operator == "/" else one - quotient * other)
    if operator in ("<<", ">>") and not 0 <= other <= 63:
        raise WrongSumError
    if operator == "**":
        if other < 0:
            raise WrongSumError
        return wrapped(pow(one, other, 1 << 64))
    operators: Mapping[str, Callable[[], int]] = {
        "||": lambda: int(bool(one or other)),
        "&&": lambda: int(bool(one and other)),
        "|": lambda: one | other,
        "^": lambda: one ^ other,
        "&": lambda: one & other,
        "==": lambda: int(one == other),
        "!=": lambda: int(one != other),
        "<=": lambda: int(one <= other),
        ">=": lambda: int(one >= other),
        "<": lambda: int(one < other),
        ">": lambda: int(one > other),
        "<<": lambda: one << other,
        ">>": lambda: one >> other,
        "+": lambda: one + other,
        "-": lambda: one - other,
        "*": lambda: one * other,
    }
    return wrapped(operators[operator]())
