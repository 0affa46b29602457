"""Patterns of bash, matched in a time that grows with text times pattern: globs and `=~`.

A set of positions of the text is an integer, one bit each. A part of a pattern maps the positions
where it may begin to those where it may end, so no part is tried twice.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

_CLASSES = {
    "alpha": string.ascii_letters,
    "digit": string.digits,
    "alnum": string.ascii_letters + string.digits,
    "upper": string.ascii_uppercase,
    "lower": string.ascii_lowercase,
    "space": string.whitespace,
    "blank": " \t",
    "punct": string.punctuation,
    "xdigit": string.hexdigits,
    "print": string.digits + string.ascii_letters + string.punctuation + " ",
    "graph": string.digits + string.ascii_letters + string.punctuation,
    "cntrl": "".join(map(chr, (*range(32), 127))),
    "word": string.ascii_letters + string.digits + "_",
}


class UnreadPatternError(ValueError):
    """A part of a pattern that is not interpreted."""


class AnyText(NamedTuple):
    """Any number of any characters."""


class One(NamedTuple):
    """One character of a set."""

    characters: frozenset[str]
    negated: bool = False


class Repeat(NamedTuple):
    """One of several sequences, repeated."""

    choices: tuple[tuple[Node, ...], ...]
    least: int = 1
    most: int | None = 1
    negated: bool = False
    """True for `!(a|b)`: any text but these."""


class Edge(NamedTuple):
    """Anchor at the beginning or end of the text."""

    end: bool


Node = AnyText | One | Repeat | Edge
Pattern = tuple[Node, ...]
_ANY_ONE = One(frozenset(), negated=True)


def glob_pattern(text: str, *, extended: bool) -> Pattern:
    r"""Return the pattern of a glob, in which `\` quotes; extended : True to read `@(a|b)`.

    Raises UnreadPatternError for equivalence classes and collating symbols.
    """
    nodes, at = _glob(text, 0, "", extended=extended)
    assert at == len(text), "without closing characters a glob is read to its end"
    return nodes


def _glob(text: str, at: int, closes: str, *, extended: bool) -> tuple[Pattern, int]:
    nodes = list[Node]()
    while at < len(text) and text[at] not in closes:
        character = text[at]
        if extended and character in "?*+@!" and text.startswith("(", at + 1):
            choices, end = list[Pattern](), at + 1
            while text[end : end + 1] in ("(", "|") and (end == at + 1 or text[end] == "|"):
                choice, end = _glob(text, end + 1, "|)", extended=True)
                choices.append(choice)
            if text.startswith(")", end):
                least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(character, (1, 1))
                nodes.append(Repeat(tuple(choices), least, most, character == "!"))
                at = end + 1
                continue
        if character == "*":
            if not nodes or not isinstance(nodes[-1], AnyText):
                nodes.append(AnyText())
        elif character == "?":
            nodes.append(_ANY_ONE)
        elif character == "[" and (found := _bracket(text, at, escapes=True)) is not None:
            nodes.append(found[0])
            at = found[1]
            continue
        else:
            at += character == "\\" and at + 1 < len(text)
            nodes.append(One(frozenset(text[at])))
        at += 1
    return tuple(nodes), at


def _bracket(text: str, at: int, *, escapes: bool) -> tuple[One, int] | None:
    """Return (set, position behind it) of `[...]` at a position; None if it is not closed."""
    at += 1
    negated = text.startswith(("!", "^") if escapes else "^", at)
    at += negated
    first, found = at, set[str]()
    while at < len(text) and (text[at] != "]" or at == first):
        if text.startswith("[:", at) and (end := text.find(":]", at)) > 0:
            name = text[at + 2 : end]
            if name not in _CLASSES:
                raise UnreadPatternError(f"[:{name}:]")
            found |= {*_CLASSES[name]}
            at = end + 2
            continue
        if text.startswith(("[=", "[."), at):
            raise UnreadPatternError(text[at : at + 2])
        at += escapes and text[at] == "\\" and at + 1 < len(text)
        low = text[at]
        at += 1
        if text.startswith("-", at) and at + 1 < len(text) and text[at + 1] != "]":
            at += 1
            at += escapes and text[at] == "\\" and at + 1 < len(text)
            high = text[at]
            if high == "[" or ord(high) - ord(low) > 4096:
                raise UnreadPatternError(f"{low}-{high}")
            found |= {chr(code) for code in range(ord(low), ord(high) + 1)}
            at += 1
        else:
            found.add(low)
    return (One(frozenset(found), negated), at + 1) if at < len(text) else None


def regular_pattern(text: str) -> Pattern:
    """Return the pattern of an extended regular expression, for use with `found`.

    Raises UnreadPatternError for back references and other escapes of letters and digits,
    unbalanced parentheses, and quantifiers without an operand.
    """
    nodes, at = _choices(text, 0)
    if at < len(text):
        raise UnreadPatternError(text[at])
    return nodes


def _choices(text: str, at: int) -> tuple[Pattern, int]:
    choices = list[Pattern]()
    while True:
        nodes, at = _sequence(text, at)
        choices.append(nodes)
        if not text.startswith("|", at):
            return (nodes if len(choices) == 1 else (Repeat(tuple(choices)),)), at
        at += 1


def _sequence(text: str, at: int) -> tuple[Pattern, int]:
    nodes = list[Node]()
    while at < len(text) and text[at] not in "|)":
        character = text[at]
        at += 1
        if character in "*+?{":
            raise UnreadPatternError(character)
        node: Node
        if character == "(":
            inner, at = _choices(text, at)
            if not text.startswith(")", at):
                raise UnreadPatternError("(")
            at += 1
            node = Repeat((inner,))
        elif character in "^$":
            nodes.append(Edge(character == "$"))
            continue
        elif character == ".":
            node = _ANY_ONE
        elif character == "[":
            found = _bracket(text, at - 1, escapes=False)
            if found is None:
                raise UnreadPatternError("[")
            node, at = found
        else:
            if character == "\\":
                character = text[at : at + 1]
                at += 1
                if not character or character.isalnum() or character in "<>`'":
                    raise UnreadPatternError(f"\\{character}")
            node = One(frozenset(character))
        least, most, at = _times(text, at)
        choice = node.choices if isinstance(node, Repeat) and node.most == 1 else ((node,),)
        nodes.append(node if (least, most) == (1, 1) else Repeat(choice, least, most))
    return tuple(nodes), at


def _times(text: str, at: int) -> tuple[int, int | None, int]:
    """Return (least, most, position after them) of a repetition; (1, 1) if there is none."""
    mark = text[at : at + 1]
    if mark in ("*", "+", "?") and mark:
        return int(mark == "+"), (1 if mark == "?" else None), at + 1
    if mark != "{":
        return 1, 1, at
    end = text.find("}", at)
    low, comma, high = text[at + 1 : max(end, at + 1)].partition(",")
    if not low.isdecimal() or not (high.isdecimal() or not high) or max(len(low), len(high)) > 3:
        raise UnreadPatternError("{")
    return int(low), (int(high) if high else None if comma else int(low)), end + 1


def groups_of(text: str, value: str, place: tuple[int, int]) -> list[str] | None:
    """Return the matches of an expression and of its groups; None if that is not decided here.

    Without alternatives and repeated groups, the longest match is the greedy one of Python, whose
    time is bounded by the lengths and the number of repetitions.
    place : (start, end) of the match.
    """
    if "(" not in text:
        return [value[place[0] : place[1]]]
    if re.search(r"[|\\]|\)[*+?{]|\[[.=]", text) or len(re.findall("[*+?{]", text)) > 3:
        return None
    for name in re.findall(r"\[:(\w+):\]", text):
        text = text.replace(f"[:{name}:]", re.escape(_CLASSES[name]))
    if len(value) > 200:
        return None
    match = re.search(text, value)
    if match is None or match.span() != place:
        return None
    return [match[0], *(group or "" for group in match.groups())]


class Matcher:
    """One text, with the positions that patterns can reach in it."""

    def __init__(
        self, text: str, spend: Callable[[int], None], *, fold: bool = False, back: bool = False
    ) -> None:
        """Prepare a text.

        spend : is told the work of each step. fold : True if case does not count. back : True to
        match from the end of the text.
        """
        self.text, self._fold, self._spend, self._back = text, fold, spend, back
        self.all = (2 << len(text)) - 1
        """Every position, from 0 to the length of the text."""
        self._masks = dict[One, int]()

    def ends(self, pattern: Sequence[Node], starts: int) -> int:
        """Return the positions where a pattern may end that begins at one of `starts`."""
        for node in reversed(pattern) if self._back else pattern:
            if not starts:
                return 0
            starts = self._after(node, starts)
        return starts

    def whole(self, pattern: Pattern) -> bool:
        """Return True if a pattern matches the whole text."""
        return bool(self.ends(pattern, 1) >> len(self.text) & 1)

    def found(self, pattern: Pattern) -> tuple[int, int] | None:
        """Return (start, end) of the leftmost longest match; None without one."""
        if not self.ends(pattern, self.all):
            return None
        back = Matcher(self.text, self._spend, fold=self._fold, back=True)
        starts = back.ends(pattern, back.all)
        start = len(self.text) - (starts.bit_length() - 1)
        return start, self.ends(pattern, 1 << start).bit_length() - 1

    def _after(self, node: Node, starts: int) -> int:
        self._spend(1 + len(self.text) // 64)
        if isinstance(node, One):
            return (starts & self._mask(node)) << 1
        if isinstance(node, AnyText):
            return self.all & ~((starts & -starts) - 1)
        if isinstance(node, Edge):
            return starts & (1 << len(self.text) if node.end != self._back else 1)
        if node.negated:
            found = 0
            while starts:
                start = starts & -starts
                reached = 0
                for choice in node.choices:
                    reached |= self.ends(choice, start)
                found |= self.all & ~(start - 1) & ~reached
                starts &= starts - 1
            return found
        if node.most is None and len(node.choices) == 1 and len(node.choices[0]) == 1:
            one = node.choices[0][0]
            if isinstance(one, One):
                for _ in range(node.least):
                    starts = self._after(one, starts)
                return self._run(self._mask(one), starts)
        found, count = 0, 0
        fresh = starts
        while fresh:
            if count >= node.least:
                found |= fresh
            if node.most is not None and count >= node.most:
                break
            count += 1
            reached = 0
            for choice in node.choices:
                reached |= self.ends(choice, fresh)
            # Beyond the least number of times, positions that were reached before add nothing.
            fresh = reached & ~found if count >= node.least else reached
        return found

    def _run(self, mask: int, starts: int) -> int:
        """Return the positions that any number of characters of a mask reach."""
        step = 1
        while step <= len(self.text):
            self._spend(1 + len(self.text) // 64)
            starts |= (starts & mask) << step
            mask &= mask >> step
            step *= 2
        return starts

    def _mask(self, one: One) -> int:
        """Return the positions in front of a character of a set."""
        if (known := self._masks.get(one)) is not None:
            return known
        self._spend(len(self.text))
        has, yes, no = one.characters, "1", "0"
        if self._fold:
            has = frozenset(c for o in has for c in (o, o.lower(), o.upper()))
        if one.negated:
            yes, no = no, yes
        text = self.text if self._back else self.text[::-1]
        mask = int("".join([yes if c in has else no for c in text]) or "0", 2)
        self._masks[one] = mask
        return mask
