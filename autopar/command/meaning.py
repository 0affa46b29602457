"""What was meant by an option that nobody knows: by its letters if mistyped, else by its words.

Spellings that mean the same are in `aliases`; what a command takes is not decided here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

from autopar.command.aliases import ALIASES, AMBIGUOUS, ELSEWHERE, HINTS
from autopar.errors import nearest

_TYPO = 0.8
"""Likeness of letters from which on a name is taken for a mistyped one."""
_ENOUGH = 0.42
"""Share of the meaning of an unknown name that the proposed one has to have."""
_NAME = 4
"""Words of a help that is a name."""
_UNHEARD = 0.4
"""Weight of a word that no option has."""
_SHORT = {
    "len": "length",
    "seq": "sequence",
    "num": "number",
    "n": "number",
    "deg": "degree",
    "ckpt": "checkpoint",
    "mem": "memory",
    "bsz": "batch",
    "sp": "sequence",
}
_OPPOSITES = frozenset({"disable", "no", "max", "min", "forbid"})
"""Words that turn a meaning round or bound it: who means them writes them."""


def meant(name: str, known: Mapping[str, str]) -> str:
    """Return the end of a sentence on an unknown option, such as `; did you mean --tp?`.

    known : the options of a command, and the help of each.
    """
    elsewhere = next((one for one in (name, *ALIASES.get(name, ())) if one in ELSEWHERE), None)
    if elsewhere is not None:
        return f"; another command does that: {ELSEWHERE[elsewhere]}"
    for spelling in (name, name.rpartition(".")[2]):
        needed, words = HINTS.get(spelling, ("", ""))
        if needed in known:
            return f"; did you mean {words}{'' if '?' in words else '?'}"
    spellings: dict[str, tuple[str, ...]] = {one: (one,) for one in known}
    for alias, targets in ALIASES.items():
        own = next((to.partition("=")[0] for to in targets if to.partition("=")[0] in known), None)
        if own is not None:
            spellings.setdefault(alias, (own,))
    for alias, ways in AMBIGUOUS.items():
        if all(one in known for one, _ in ways):
            spellings[alias] = tuple(one for one, _ in ways)
    near = nearest(name, spellings, _TYPO, any_case=True)
    found = spellings[near] if near is not None else _by_words(name, spellings, known)
    if not found:
        # two letters of a short name are much of it
        near = nearest(name, known, 0.6, any_case=True)
        found = () if near is None else (near,)
    if not found:
        return "; see --help"
    return f"; did you mean {' or '.join(f'--{one}' for one in found)}?"


def _by_words(
    name: str, spellings: Mapping[str, tuple[str, ...]], known: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the options whose spellings, or else helps, have most of the words of a name."""
    asked = _words(name)
    meanings: dict[tuple[str, ...], list[frozenset[str]]] = {}
    for spelling, own in spellings.items():
        meanings.setdefault(own, []).append(_words(spelling))
    for one, text in known.items():
        # a short help is one more name
        if len(text.split()) <= _NAME:
            meanings[one,].append(_words(text))
    # a word that many options have says little
    often = Counter(word for sets in meanings.values() for word in frozenset().union(*sets))
    weight = {word: 1.0 / (1.0 + math.log(1 + often[word])) for word in often}
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for own, sets in meanings.items():
        for words in sets:
            score = _likeness(asked, words, weight)
            if score > best[0]:
                best = (score, own)
    if best[0] >= _ENOUGH:
        return best[1]
    helps = {own: _words(text) for own, text in known.items()}
    told = Counter(word for words in helps.values() for word in words)
    rare = [word for word in asked if 1 <= told[word] <= 2]
    found = [own for own, words in helps.items() if rare and words.issuperset(rare)]
    return tuple(found[:1]) if len(rare) == len(asked) else ()


def _likeness(asked: frozenset[str], words: frozenset[str], weight: Mapping[str, float]) -> float:
    """Return the shared weight over that of what is asked, less for what is not asked."""

    def sum_of(some: frozenset[str]) -> float:
        return sum(weight.get(word, _UNHEARD) for word in some)

    shared = frozenset(word for word in asked if any(_alike(word, other) for other in words))
    if not shared or (words - asked) & _OPPOSITES:
        return 0.0
    covered = sum_of(shared) / sum_of(asked)
    return covered * (0.6 + 0.4 * sum_of(shared) / max(sum_of(asked | words), 1e-9))


def _alike(one: str, other: str) -> bool:
    """Return whether one word is the other, or its beginning: `accum` and `accumulation`."""
    short, long = sorted((one, other), key=len)
    return one == other or (len(short) >= 4 and long.startswith(short))


def _words(text: str) -> frozenset[str]:
    """Return the words of a name or a sentence, in one form each."""
    found = set()
    for word in re.findall(r"[a-z]+|[0-9]+", text.lower()[:200]):
        plain = word.removesuffix("ism")
        plain = plain[:-1] if plain.endswith("s") and len(plain) > 3 else plain
        found.add(_SHORT.get(plain, plain))
    return frozenset(found)
