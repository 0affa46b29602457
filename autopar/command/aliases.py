"""Other spellings of options from `aliases.toml`, and suggestions for unknown options.

Names are spelled with hyphens. A word that is the name of an option of the command always means
that option, even if it is an alias elsewhere. Options are defined as fields of dataclasses, see
`fields`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import field

from autopar.errors import nearest
from autopar.records import Record


class Family(Record):
    """Treatment of options of other programs that a command does not define."""

    ignored: Mapping[str, str] = field(default_factory=dict)
    """Option that is accepted and ignored together with its value -> reason. A name that ends in a
    hyphen is a prefix."""
    flags: frozenset[str] = frozenset()
    """Ignored options without a value, or with the value 0 or 1."""
    lists: frozenset[str] = frozenset()
    """Ignored options with any number of values."""
    planned: Mapping[str, str] = field(default_factory=dict)
    """Option whose value the search determines -> remedy, with `{n}` for the given number."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Option without an equivalent -> reason."""
    only_one: Mapping[str, str] = field(default_factory=dict)
    """Degree that must be 1, or -1 for not given -> reason."""


class AliasTables(Record):
    """Tables of `aliases.toml`."""

    aliases: Mapping[str, tuple[str, ...]]
    """Other name -> option names; the first one that the command has is used. `=` sets a value."""
    ambiguous: Mapping[str, tuple[tuple[str, str], ...]]
    """Name with several meanings -> (option, explanation of its value such as `per node`)."""
    short: Mapping[str, str]
    """Word after a single hyphen -> name of the option or alias."""
    joined: frozenset[str]
    """Options whose value may be several words, which are joined with `+`."""
    hints: Mapping[str, tuple[str, str]]
    """Unknown name -> (option that the command must have for the suggestion, suggestion)."""
    elsewhere: Mapping[str, str]
    """Option of another command -> command line that uses it."""
    values: Mapping[tuple[str, str], str]
    """(option name or alias, other spelling of a value) -> value."""
    manual: Mapping[str, tuple[str, ...]]
    """Switch of Galvatron -> size options that count only if the switch is 1."""
    families: Mapping[str, Family]
    """Name (`Command.family`) -> treatment of options of other programs; it takes precedence over
    aliases."""


@cache
def alias_tables() -> AliasTables:
    """Return the tables of `aliases.toml`; the file is read once, on the first call."""
    import tomllib  # late: command lines without options need no tables

    path = Path(__file__).with_name("aliases.toml")
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    values = {
        (name, other): value
        for names, table in data["values"].items()
        for value, others in table.items()
        for name in names.split()
        for other in others.split()
    }
    hints = {
        name: (needed, words)
        for needed, table in data["hints"].items()
        for name, words in _by_name(table).items()
    }
    return AliasTables(
        aliases=_aliases(data["same"]),
        ambiguous={
            name: tuple(ways.items())
            for names, ways in data["ambiguous"].items()
            for name in names.split()
        },
        short=data["short"],
        joined=frozenset(data["joined"].split()),
        hints=hints,
        elsewhere=data["elsewhere"],
        values=values,
        manual={name: tuple(sizes.split()) for name, sizes in data["manual"].items()},
        families={"": Family(), **{name: _family(data["family"], name) for name in data["family"]}},
    )


def _aliases(same: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for own, others in same.items():
        if "=" in own:
            found |= {name: [own] for name in others.split()}
            continue
        names = own.split()
        for name in (*names, *others.split()):
            found.setdefault(name, []).extend(one for one in names if one != name)
    return {name: tuple(dict.fromkeys(targets)) for name, targets in found.items() if targets}


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return name -> text from a table of text -> names."""
    return {name: text for text, names in table.items() for name in names.split()}


def _family(data: Mapping[str, Any], name: str) -> Family:
    """Return a family together with the entries of the families in its `like` key."""
    parts = [*(data[one] for one in data[name].get("like", "").split()), data[name]]

    def table(key: str) -> dict[str, str]:
        return {one: text for part in parts for one, text in _by_name(part.get(key, {})).items()}

    def names(key: str) -> frozenset[str]:
        return frozenset(one for part in parts for one in part.get(key, "").split())

    return Family(
        ignored=table("ignored"),
        flags=names("flags"),
        lists=names("lists"),
        planned=table("planned"),
        refused=table("refused"),
        only_one=table("only_one"),
    )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown option, such as `Did you mean --tp?`.

    known : option names of the command
    """
    tables, own = alias_tables(), frozenset(known)
    for one in (name, *tables.aliases.get(name, ())):
        if one in tables.elsewhere:
            return f"Use {tables.elsewhere[one]}"
    for spelling in (name, name.rpartition(".")[2]):
        needed, words = tables.hints.get(spelling, ("", ""))
        if needed in own:
            return f"Did you mean {words}{'' if '?' in words else '?'}"
    spellings: dict[str, tuple[str, ...]] = {one: (one,) for one in own}
    for alias, targets in tables.aliases.items():
        target = next((one for to in targets if (one := to.partition("=")[0]) in own), None)
        if target is not None:
            spellings.setdefault(alias, (target,))
    for alias, ways in tables.ambiguous.items():
        if own.issuperset(one for one, _ in ways):
            spellings[alias] = tuple(one for one, _ in ways)
    near = nearest(name, spellings)
    if near is None:
        return "See --help"
    return f"Did you mean {' or '.join(f'--{one}' for one in spellings[near])}?"
