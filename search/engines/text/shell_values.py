"""Arithmetic, conditions and launch commands of shell scripts, after variable expansion.

`search.engines.text.shell` provides the variables.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import field

from autopar.records import Record
from search.engines.text.shell_syntax import NAME


class Unknown(str):
    """Value known only at run time, as written in the script."""

    __slots__ = ()


class Undecided(Unknown):
    """Value that depends on a condition known only at run time."""

    __slots__ = ("many", "why")
    why: str
    """Text of the condition."""
    many: bool
    """True if the value may be several words."""


def undecided(written: str, why: str, *, many: bool) -> Undecided:
    value = Undecided(written)
    value.why, value.many = why, many
    return value


def glued(parts: list[str]) -> str:
    """Return the concatenation of parts; `Unknown` or `Undecided` if any part is."""
    text = "".join(parts)
    open_ = [part for part in parts if isinstance(part, Undecided)]
    if open_:
        return undecided(text, open_[0].why, many=any(part.many for part in open_))
    return Unknown(text) if any(isinstance(part, Unknown) for part in parts) else text


class Condition:
    """Evaluator of `[ ]` and `[[ ]]`; a result of None is known only at run time."""

    _UNARY = frozenset({"-z", "-n", "-v"})
    _FILES = frozenset(f"-{letter}" for letter in "abcdefghkprstuwxLGNOS")
    _NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
        "-eq": lambda one, other: one == other,
        "-ne": lambda one, other: one != other,
        "-lt": lambda one, other: one < other,
        "-le": lambda one, other: one <= other,
        "-gt": lambda one, other: one > other,
        "-ge": lambda one, other: one >= other,
    }

    def __init__(self, words: list[str], *, glob: bool, quoted: list[bool] | None = None) -> None:
        self._words, self._glob, self._at = words, glob, 0
        self._quoted = quoted or [False] * len(words)

    def value(self) -> bool | None:
        if not self._words:
            return False
        found = self._any()
        return found if self._at >= len(self._words) else None

    def _peek(self) -> str | None:
        return self._words[self._at] if self._at < len(self._words) else None

    def _any(self) -> bool | None:
        found = self._all()
        while self._peek() in ("||", "-o"):
            self._at += 1
            other = self._all()
            found = True if found or other else None if None in (found, other) else False
        return found

    def _all(self) -> bool | None:
        found = self._not()
        while self._peek() in ("&&", "-a"):
            self._at += 1
            other = self._not()
            found = False if False in (found, other) else None if None in (found, other) else True
        return found

    def _not(self) -> bool | None:
        if self._peek() == "!":
            self._at += 1
            found = self._not()
            return None if found is None else not found
        if self._peek() == "(":
            self._at += 1
            found = self._any()
            self._at += self._peek() == ")"
            return found
        return self._primary()

    def _primary(self) -> bool | None:
        words, at = self._words[self._at :], self._at
        if len(words) >= 3 and (words[1] in self._NUMBERS or words[1] in _COMPARES):
            self._at += 3
            return self._compared(words[0], words[1], words[2], literal=self._quoted[at + 2])
        if len(words) >= 2 and words[0] in self._UNARY:
            self._at += 2
            if isinstance(words[1], Unknown) or words[0] == "-v":
                return None
            return bool(words[1]) == (words[0] == "-n")
        if len(words) >= 2 and words[0] in self._FILES:
            self._at += 2
            return None
        self._at += 1
        if not words:
            return False
        return None if isinstance(words[0], Unknown) else bool(words[0])

    def _compared(self, one: str, how: str, other: str, *, literal: bool) -> bool | None:
        if isinstance(one, Unknown) or isinstance(other, Unknown):
            return None
        if how in self._NUMBERS:
            if not all(re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) for text in (one, other)):
                return False if not self._glob else None
            return self._NUMBERS[how](int(one), int(other))
        if how in ("<", ">"):
            return one < other if how == "<" else one > other
        if how == "=~":
            try:
                with warnings.catch_warnings():
                    # Python warns of nested sets, which do not exist in bash.
                    warnings.simplefilter("ignore", FutureWarning)
                    return re.search(other, one) is not None
            except re.error:
                return None
        same = fnmatchcase(one, other) if self._glob and not literal else one == other
        return same == (how != "!=")


_DEEPEST = 8
"""Maximum depth of variables whose values are names of other variables."""
_COMPARES = frozenset({"=", "==", "!=", "=~", "<", ">"})


def sum_of(
    text: str,
    value_of: Callable[[str], str | None],
    assign: Callable[[str, str], None],
    depth: int = 0,
) -> int | None:
    """Return the value of `$((text))` as a 64-bit integer, as in bash.

    Returns None for an invalid expression, or if a variable is unknown.

    value_of : returns the text of a variable, or None if it is unknown.
    assign : sets a variable that the expression changes, from name and text.
    """
    return _Sum(text, value_of, assign, depth).value()


class _Sum:
    """Evaluator of one arithmetic expression by precedence climbing."""

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
        rf"|0[xX][0-9a-fA-F]+|[0-9]+|{NAME})\s*"
    )

    def __init__(
        self,
        text: str,
        value_of: Callable[[str], str | None],
        assign: Callable[[str, str], None],
        depth: int,
    ) -> None:
        self._value_of, self._assign, self._depth, self._at = value_of, assign, depth, 0
        self._tokens = list[str]()
        at = 0
        while at < len(text) and not text[at:].isspace():
            match = self._TOKEN.match(text, at)
            if match is None:
                self._tokens = ["?"]  # an invalid expression
                break
            self._tokens.append(match[1])
            at = match.end()

    def value(self) -> int | None:
        if not self._tokens:
            return 0
        try:
            found = self._comma()
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        return found if self._at == len(self._tokens) else None

    def _peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _comma(self) -> int:
        found = self._choice()
        while self._peek() == ",":
            self._at += 1
            found = self._choice()
        return found

    def _choice(self) -> int:
        name = self._peek()
        following = self._tokens[self._at + 1] if self._at + 1 < len(self._tokens) else None
        if name and re.fullmatch(NAME, name) and following in _ASSIGNS:
            self._at += 2
            right = self._choice()
            if following != "=":
                right = _applied(str(following)[:-1], self._of(name), right)
            self._assign(name, str(right))
            return right
        found = self._level(0)
        if self._peek() == "?":
            self._at += 1
            yes = self._choice()
            if self._peek() != ":":
                raise ValueError
            self._at += 1
            no = self._choice()
            return yes if found else no
        return found

    def _level(self, level: int) -> int:
        if level == len(self._LEVELS):
            return self._unary()
        found = self._level(level + 1)
        while self._peek() in self._LEVELS[level]:
            operator = str(self._peek())
            self._at += 1
            # `**` is right-associative.
            right = self._level(level if operator == "**" else level + 1)
            found = _applied(operator, found, right)
        return found

    def _unary(self) -> int:
        token = self._peek()
        if token is None:
            raise ValueError
        self._at += 1
        if token in ("+", "-", "!", "~"):
            value = self._unary()
            return {"+": value, "-": -value, "!": int(not value), "~": ~value}[token]
        if token == "(":
            value = self._comma()
            if self._peek() != ")":
                raise ValueError
            self._at += 1
            return value
        if token in ("++", "--"):
            name = self._peek() or ""
            self._at += 1
            return self._stepped(name, token)
        if token[0].isdigit():
            # A leading zero means octal.
            return int(token, 16 if token[1:2] in ("x", "X") else 8 if token[0] == "0" else 10)
        if not re.fullmatch(NAME, token):
            raise ValueError
        value = self._of(token)
        if self._peek() in ("++", "--"):
            self._stepped(token, str(self._peek()))
            self._at += 1
        return value

    def _stepped(self, name: str, how: str) -> int:
        value = self._of(name) + (1 if how == "++" else -1)
        self._assign(name, str(value))
        return value

    def _of(self, name: str) -> int:
        text = self._value_of(name)
        if text is None or isinstance(text, Unknown) or self._depth > _DEEPEST:
            raise ValueError
        value = sum_of(text or "0", self._value_of, self._assign, self._depth + 1)
        if value is None:
            raise ValueError
        return value


_ASSIGNS = frozenset({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="})


def _applied(operator: str, one: int, other: int) -> int:
    """Return the result of a binary operator; raises ValueError if it exceeds 64 bits."""
    if operator in ("/", "%"):
        # Bash rounds towards zero, Python down.
        quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
        return quotient if operator == "/" else one - quotient * other
    if operator in ("**", "<<", ">>") and not 0 <= other <= 63:
        raise ValueError
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
        "**": lambda: int(one**other),
    }
    value = operators[operator]()
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError
    return value


# --------------------------------------------------------------------------------------------------
# Launch commands.


class Command(Record):
    """Words of one launch command, with its environment and assumptions."""

    before: tuple[str, ...]
    """Words before the program: torchrun and its options; empty if no program was found."""
    program: str = ""
    """The `.py` file, or the module after `-m`; empty if none was found."""
    arguments: tuple[str, ...]
    """Words after the program; words of the longest array if no program was found."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the script exports, or sets for this command."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on assumptions about the script."""
    unset: Mapping[str, str] = field(default_factory=dict)
    """Unset variables, with the text used for each: its default, or an empty text."""


_RUNNERS = re.compile(r"(.*/)?(torchrun|python[0-9.]*|accelerate|srun|deepspeed)")
_STARTERS = re.compile(r"(.*/)?(torchrun|accelerate|srun|deepspeed|mpirun)|torch\.distributed.*")
_PROGRAM = re.compile(r".*\.py|(.*/)?scripts/training/train\.sh", re.DOTALL)
"""Pattern of training programs: Python files, and the launcher of Megatron-Bridge."""
_PATHS = re.compile(r"--.*(path|data|blend|file|prefix).*")
"""Pattern of flags with any number of values, such as paths, that do not affect the estimate."""
_SHORT = r"-[a-z]{2,3}"
_LIKE_FLAG = re.compile(rf"--.*|{_SHORT}|\+{{0,2}}[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)
"""Pattern of words that identify a launch: `--tp`, `-tp`, and Hydra's `model.tp=4`."""
_FLAG = re.compile(rf"--.*|{_SHORT}", re.DOTALL)


def settled(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (arguments without unknown words that may be flags, one sentence per removed word).

    An unknown array, or an unknown word after the value of a flag, may contain flags or be empty.
    """
    kept, dropped = list[str](), list[str]()
    flag, values = "", 0
    for word in arguments:
        if _FLAG.fullmatch(word):
            flag, values = word, 0
        elif (
            isinstance(word, Unknown)
            and not _LIKE_FLAG.fullmatch(word)
            and (values or "[@]" in word or "[*]" in word or word in ("$@", "$*"))
            and not _PATHS.fullmatch(flag)
        ):
            dropped.append(f"{word[:60]} is known only at run time; using no value")
            continue
        else:
            values += 1
        kept.append(word)
    return kept, dropped


def program_of(words: list[str]) -> tuple[list[str], str, list[str]] | None:
    """Return (words before the program, program, words after it); None for any other command."""
    at = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if at is None and "-m" in words[1:-1]:
        at = words.index("-m", 1) + 1
    if at is None or not any(_LIKE_FLAG.fullmatch(word) for word in words[at + 1 :]):
        # An unknown array of flags counts as flags.
        rest = words[at + 1 :] if at is not None else []
        if at is None or not any(isinstance(word, Undecided) for word in rest):
            return None
    # The script is the command itself, or follows a program that runs scripts.
    if at and not any(_RUNNERS.fullmatch(word) for word in words[:at]):
        return None
    return words[:at], words[at], words[at + 1 :]


def runs_ranks(before: Sequence[str]) -> bool:
    """Return True if the words before a program include a distributed launcher such as torchrun."""
    return any(_STARTERS.fullmatch(word) for word in before)


def split_flags(
    words: Sequence[str], left: Callable[[str], bool]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return (words without the selected flags, words of the selected flags by name).

    left : returns True for the name of a flag to select, without leading hyphens and with `-` for
    `_`.
    """
    kept, out = list[str](), dict[str, tuple[str, ...]]()
    name: str | None = None
    for word in words:
        if _LIKE_FLAG.fullmatch(word):
            flag = _name(word)
            name = flag if left(flag) else None
            if name is not None:
                out[name] = (word,)
                continue
        if name is None:
            kept.append(word)
        else:
            out[name] = (*out[name], word)
    return kept, out


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("_", "-")


def world_flags(before: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return `--nnodes` and `--nproc-per-node` among the words before a program, by name."""
    wanted = {"nnodes", "nproc-per-node"}
    return split_flags(before, lambda flag: flag in wanted)[1]
