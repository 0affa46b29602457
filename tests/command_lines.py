"""Command lines of table rows: a base command and the options that a row changes."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.command.aliases import alias_tables

_REPEAT = frozenset({"pin", "forbid", "price", "sweep", "why-not"})


def last_said(words: Iterable[object], command: str = "") -> list[str]:
    """Return the words without options that are repeated later, also under another spelling.

    Commands refuse repeated options; a row replaces those of its base.
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
        # two options of profilers for lengths are aliases of one option elsewhere
        others = () if command == "profile-model" else alias_tables().aliases.get(name, ())
        own = {name, *others} - _REPEAT
        if not own & seen:
            kept.append(group)
        seen |= own
    return [word for group in (groups[0], *reversed(kept)) for word in group]
