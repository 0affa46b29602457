"""Random launch scripts, drawn from a grammar of what real ones contain and bash's manual allows.

`random_script(seed)` returns a script and the constructs in it. Every name that it uses is set at
its start; a value known only at run time is one word (`tests.oracles.bash`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from tests.oracles.bash import LAUNCH, Outcome, is_parsed, outcomes, sections

__all__ = ["Script", "minimised", "random_script"]

_DEEPEST = 5
_STATEMENTS = frozenset({"script", "statements", "statement", "simple", "body"})
_GIVEN = re.compile(r"\$\{?[!#]?[1-9@*#]|\bshift\b|getopts|for i\d+; do")
"""Uses of positional parameters."""
_TOKEN = re.compile(r"<([a-z]+)>|%([ij])")


class _Form(NamedTuple):
    weight: int
    text: str


def _forms(lines: Sequence[str]) -> tuple[_Form, ...]:
    """Return the forms of a symbol from lines `WEIGHT | FORM`, or `FORM` for a weight of one."""
    matches = [re.fullmatch(r"(?:([1-9][0-9]*) \| )?(.*)", line) for line in lines]
    return tuple(_Form(int(match[1] or 1), match[2]) for match in matches if match is not None)


_GRAMMAR: Mapping[str, tuple[_Form, ...]] = {
    name: _forms(lines) for name, lines in sections("bash_grammar.bash")
}


class Script(NamedTuple):
    text: str
    constructs: frozenset[str]
    """`SYMBOL: FORM` for each form of the grammar in the script."""


class _Writer:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._names = 0
        self.constructs = set[str]()

    def symbol(self, name: str, depth: int) -> str:
        """Return a random text of a symbol; deep ones take their first form."""
        forms = _GRAMMAR[name]
        if depth > _DEEPEST:
            ends = tuple(form for form in forms if "<" not in form.text)
            forms = forms[:1] if name in _STATEMENTS or not ends else ends
        (form,) = self._rng.choices(forms, [form.weight for form in forms])
        self.constructs.add(f"{name}: {form.text}")
        return self.filled(form.text, depth)

    def filled(self, text: str, depth: int) -> str:
        """Return a form with random texts for its symbols, and new names for `%i` and `%j`."""
        self._names += 1
        number = self._names

        def one(match: re.Match[str]) -> str:
            if match[1] == "nl":
                return "\n"
            if match[1] in _GRAMMAR:
                return self.symbol(match[1], depth + 1)
            return f"{match[2]}{number}" if match[2] else match[0]

        return _TOKEN.sub(one, text)


def random_script(seed: int) -> Script:
    """Return the random script of a seed."""
    writer = _Writer(random.Random(seed))
    body = writer.symbol("script", 0)
    sets = list[str]()
    for name in reversed([name for name in _GRAMMAR if name.startswith("set ")]):
        if re.search(rf"\b{name[4:]}\b", "\n".join((*sets, body))):
            sets.insert(0, writer.symbol(name, 1))
    if _GIVEN.search(body):
        sets.append(writer.filled("set -- <first> <first>", 1))
    return Script("\n".join((*sets, body)) + "\n", frozenset(writer.constructs))


# --------------------------------------------------------------------------------------------------
# The smallest script with a difference.


def minimised(outcome: Outcome) -> Outcome:
    """Return the smallest script with the same kind of silent difference.

    Lines, then words are removed. What bash does not launch stays so, and the other way round, and
    every name stays set by the script.
    """
    smaller = True
    while smaller:
        smaller = False
        for shorter in (_without_lines, _without_words):
            while found := _first_alike(outcome, shorter(outcome.script)):
                outcome, smaller = found, True
    return outcome


def _first_alike(outcome: Outcome, scripts: Sequence[str], batch: int = 32) -> Outcome | None:
    scripts = [script for script in scripts if LAUNCH in script and _sets_its_names(script)]
    for start in range(0, len(scripts), batch):
        for found in outcomes(scripts[start : start + batch]):
            if found.kind == "silent" and _alike(found, outcome):
                return found
    return None


def _alike(one: Outcome, other: Outcome) -> bool:
    if (one.ours is None, one.bash is None) != (other.ours is None, other.bash is None):
        return False
    return one.bash is not None or is_parsed(one.script) == is_parsed(other.script)


def _sets_its_names(script: str) -> bool:
    """Return True if a script sets every name of the grammar that is in it."""
    used = re.findall(r"(?:(?<![\w$.-])|\$\{?[!#]?)([A-Z]|[ij]\d+)\b", script)
    for name in set(used):
        takes = rf"\b(read|mapfile|readarray|getopts|for|unset|local)\b[^;\n<$]*\b{name}\b"
        if not re.search(rf"(^|; )(declare -A )?{name}=|\b{name}\(\)|{takes}", script, re.M):
            return False
    return not _GIVEN.search(script) or "set --" in script or "() {" in script


def _without_lines(script: str) -> list[str]:
    """Return the script without each run of lines, the longest first, and without two lines each.

    Two lines may be the first and the last of a statement.
    """
    lines = script.splitlines(keepends=True)
    runs = [
        {*range(start, start + length)}
        for length in range(len(lines) - 1, 0, -1)
        for start in range(len(lines) - length + 1)
    ]
    pairs = [{*two} for two in combinations(range(len(lines)), 2)] if len(lines) < 16 else []
    return [
        "".join(line for n, line in enumerate(lines) if n not in left) for left in (*runs, *pairs)
    ]


def _without_words(script: str) -> list[str]:
    """Return the script without each of its words, and without the blanks before it."""
    return [
        script[: match.start()] + script[match.end() :]
        for match in re.finditer(r"[ \t]*[^\s]+", script)
    ]
