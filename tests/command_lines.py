"""Command lines that rows of tables are made of: a base, and what a row says otherwise."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.command.aliases import alias_tables

_REPEAT = frozenset({"pin", "forbid", "price", "sweep", "why-not"})


def last_said(words: Iterable[object], command: str = "") -> list[str]:
    """Return the words without options that come again behind them, in these or in other words.

    Commands refuse what is said twice; a row replaces what its base says.
    """
    words = [str(word) for word in words]
    if command == "autopar-explore" and words and words[0].startswith("-"):
        return words  # a choice is what comes several times there
    groups: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--") and len(word) > 2:
            groups.append([word])
        else:
            groups[-1].append(word)
    kept: list[list[str]] = []
    seen: set[str] = set()
    for group in reversed(groups[1:]):
        name = group[0][2:].partition("=")[0].replace("_", "-").lower()
        # profilers have lengths in two ways, whose names are one elsewhere
        others = () if command == "profile-model" else alias_tables().aliases.get(name, ())
        own = {name, *others} - _REPEAT
        if not own & seen:
            kept.append(group)
        seen |= own
    return [word for group in (groups[0], *reversed(kept)) for word in group]
