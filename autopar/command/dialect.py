"""Rewriting of command lines: other spellings of options become the one that typer parses.

Supported are hyphens and underscores, `--name value`, `--name=value`, `name=value`, `-name` and
`group.name=value`, names and values of other programs, omitted values, and lists of words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from autopar.command.aliases import Family, alias_tables
from autopar.command.fields import Row, unknown
from autopar.errors import OptionError

_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_OVERRIDE = re.compile(r"\+{0,2}((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHORT = re.compile(r"-([A-Za-z][\w-]*)(=.*)?", re.DOTALL)
NO_FILE = frozenset({"", "none", "null"})
"""Words of other programs that mean that no file is given."""
_OF_FILES = {"time-profiling-path", "memory-profiling-path"}
"""Options that name profile files of a model."""
_NO_FAMILY = Family()


def as_file(path: str) -> str:
    """Return a path in words that are neither an option nor one of `NO_FILE`."""
    return f"./{path}" if path.startswith("-") or path.lower() in NO_FILE else path


def normalise(
    arguments: Sequence[str], rows: Sequence[Row], family: Family = _NO_FAMILY
) -> tuple[list[str], list[str]]:
    """Return (arguments in the spelling of `rows`, notices about options without an effect).

    family : treatment of options of other programs

    Raises OptionError: an option is unknown (with the nearest known one), misses its value, or
    contradicts another.
    """
    return _Rewriter(arguments, rows, family).rewrite()


def own_name(written: str, table: Mapping[str, Row], family: Family = _NO_FAMILY) -> str:
    """Return the name of an option in `table`, with `=value` for an alias that sets a value.

    An unknown name is returned in lower case with hyphens. A group before the name, as in
    `--parallelism.tensor_parallel_degree`, is ignored.
    """
    name = _plain(written)
    for spelling in (name, name.rpartition(".")[2]):
        # Option names and answers of the family take precedence over aliases.
        if spelling in table or _is_foreign(spelling, family) or _may_mean(spelling, table):
            return spelling
        for target in alias_tables().aliases.get(spelling, ()):
            if target.partition("=")[0] in table:
                return target
    return name


def own_names(raw: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return stored options with aliases and former names replaced by the names of `rows`."""
    table = {row.name: row for row in rows}
    return {own_name(name, table): value for name, value in raw.items()}


class _Rewriter:
    """State of the rewriting of one command line."""

    def __init__(self, arguments: Sequence[str], rows: Sequence[Row], family: Family) -> None:
        self.table = {row.name: row for row in rows}
        self.family = family
        self.known = alias_tables()
        self.words: list[str] = []
        self.notices: list[str] = []
        self.first: dict[str, tuple[str, str]] = {}
        """Option -> spelling and value of its first appearance."""
        place = arguments.index("--") if "--" in arguments else len(arguments)
        self.literal = list(arguments[place:])
        """`--` and the words after it, which are no options."""
        typed = [self._long(word) for word in arguments[:place]]
        self.queue, switches = self._without_switches(typed)
        self.unused = self._unused_sizes(switches) if switches else {}
        """Size option that is ignored in favour of the size of the model -> reason."""

    def rewrite(self) -> tuple[list[str], list[str]]:
        """Return (rewritten words, notices) of the command line; raises OptionError."""
        while self.queue:
            token = self.queue.pop(0)
            written, value = _split(token)
            if written is not None:
                self._take_option(written, value)
                continue
            self._take_word(token)
        return self.words + self.literal, self.notices

    def _take_word(self, word: str) -> None:
        if word[:1] == "-" and word != "-":
            near = f"Use ./{word} for the file" if os.path.exists(word) else "See --help"  # noqa: PTH110
            raise OptionError(f"{word}: unknown option", remedy=near)
        self.words.append(word)

    def _long(self, word: str) -> str:
        """Return an option such as `-tp` or `-o` with two hyphens; other words are unchanged."""
        found = _SHORT.fullmatch(word)
        if found is None:
            return word
        name = _plain(found[1])
        long = self.known.short.get(name, name)
        if long not in self.table and not self.known.aliases.keys() & {name, long}:
            return word
        return f"--{self.known.short.get(name, found[1])}{found[2] or ''}"

    def _without_switches(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
        """Return (other arguments, switch of Galvatron -> True if on); raises OptionError."""
        queue, left = list(arguments), list[str]()
        switches: dict[str, bool] = {}
        while queue:
            token = queue.pop(0)
            written, value = _split(token)
            name = _plain(written or "")
            if name not in self.known.manual:
                left.append(token)
                continue
            if value is None:
                value = queue.pop(0) if queue and _is_truth(queue[0]) else "1"
            if not _is_truth(value):
                raise OptionError(f"--{written}: expected 0 or 1, got {value!r:.60}")
            switches[name] = value.lower() in _ON
        return left, switches

    def _unused_sizes(self, switches: Mapping[str, bool]) -> dict[str, str]:
        """Return size option -> reason, for options ignored in favour of sizes of the model."""
        written = [name for name, _ in map(_split, self.queue) if name is not None]
        names = {own_name(name, self.table, self.family) for name in written}
        # Profile files without a model: the command line is the only source of sizes.
        if names & _OF_FILES and "model" not in names:
            return {}
        used = {name for switch, on in switches.items() if on for name in self.known.manual[switch]}
        return {
            name: f"--{switch.replace('-', '_')} 0 uses the model's value"
            for switch, on in switches.items()
            if not on
            for name in self.known.manual[switch]
            if name not in used
        }

    def _take_option(self, written: str, value: str | None) -> None:
        name, _, implied = own_name(written, self.table, self.family).partition("=")
        if implied:
            if value is None and self.queue and self.queue[0].lower() in _ON | _OFF:
                value = self.queue.pop(0)
            if value is not None and value.lower() not in _ON | _OFF:
                raise OptionError(f"--{written}: expected no value", remedy=f"Use --{name}")
            if value is not None and value.lower() in _OFF:
                return
            value = implied
        row = self.table.get(name)
        negated = row is None
        if row is None and name.startswith("no-"):
            row = self.table.get(name.removeprefix("no-"))
        if row is None or (negated and row.kind != "switch"):
            self._take_foreign(written, name, value)
        elif row.flaglike:
            self._take_flag(row, written, value, negated)
        else:
            self._take_value(row, written, value)

    def _take_flag(self, row: Row, written: str, value: str | None, negated: bool) -> None:
        def own(text: str) -> str:
            return self.known.values.get((row.name, text), text)

        if value is None and self.queue and _is_truth(own(self.queue[0])):
            value = self.queue.pop(0)
        if value is not None and row.off is not None and value == str(row.off):
            return
        word = own(value).lower() if value is not None else "1"
        if word not in _ON | _OFF:
            raise OptionError(f"--{written}: expected 0 or 1, got {value!r:.60}")
        on = (word in _ON) != negated
        self._refuse_second(row, written, str(int(on)))
        if on:
            self.words.append(f"--{row.name}")
        elif row.kind == "switch":
            self.words.append(f"--no-{row.name}")

    def _take_value(self, row: Row, written: str, value: str | None) -> None:
        name = _plain(written)
        value = self._value(row, written, value)
        meanings = (row.name, name, *self.known.aliases.get(name, ()))
        why = next((self.unused[one] for one in meanings if one in self.unused), None)
        if why is not None:
            self.notices.append(f"--{written} {value} is not used: {why}")
            return
        if row.kind != "texts":
            self._refuse_second(row, written, value)
        if not row.positional:
            self.words += [f"--{row.name}", value]
        elif value.lower() not in NO_FILE:
            self._take_word(value)

    def _value(self, row: Row, written: str, value: str | None) -> str:
        """Return the value in the spelling of `row`; None takes the next words of the queue.

        Raises OptionError if there is no value.
        """
        name = _plain(written)
        joined = name in self.known.joined
        if value is None:
            # A single hyphen may begin a negative number; no option contains blanks.
            if not self.queue or re.match(r"--\S*$", self.queue[0]):
                if row.alone is not None:
                    return row.alone
                raise OptionError(f"--{written} needs a value ({row.help})")
            value = self.queue.pop(0)
            # `--layernum_list 24 24`, expanded by a shell, is one list of two numbers.
            while row.kind == "ints" and self.queue and self.queue[0].isdigit():
                value += "," + self.queue.pop(0)
            while joined and self.queue and self.queue[0][:1] != "-":
                value += "+" + self.queue.pop(0)
        value = value.replace(",", "+") if joined else value
        for spelled in (name, name.rpartition(".")[2], row.name):
            for word in (value, value.lower()):
                if (spelled, word) in self.known.values:
                    return self.known.values[spelled, word]
        return value

    def _refuse_second(self, row: Row, written: str, value: str) -> None:
        """Raise OptionError for a second, different value of an option."""
        before, old = self.first.setdefault(row.name, (written, value))
        if old == value:
            return
        both = f", or --{row.name} {old},{value} for both" if row.kind == "ints" else ""
        raise OptionError(
            f"--{before} {old} and --{written} {value} set the same option",
            remedy=f"Remove one of them{both}",
        )

    def _take_foreign(self, written: str, name: str, value: str | None) -> None:
        """Ignore an option of another program together with its value, or raise OptionError."""
        family, queue = self.family, self.queue
        following = value if value is not None else next(iter(queue), "")
        ignored = _ignored(name, family)
        if ignored is not None:
            is_flag = ignored in family.flags
            is_value = _is_truth(following) if is_flag else not following.startswith("--")
            if value is None and queue and is_value:
                queue.pop(0)
                while name in family.lists and queue and not queue[0].startswith("--"):
                    queue.pop(0)
            self.notices.append(f"--{written} is ignored: {family.ignored[ignored]}")
            return
        if name in family.only_one:
            if value is None and queue:
                queue.pop(0)
            if following not in ("1", "-1"):
                why = family.only_one[name]
                raise OptionError(f"--{name}: expected 1 ({why}), got {following!r:.60}")
            return
        if name in family.planned and "pin" in self.table:
            number = following if re.fullmatch(r"[0-9]{1,9}", following) else "N"
            remedy = family.planned[name].format(n=number)
            raise OptionError(
                f"--{written}: not an option, because the search sets it", remedy=remedy
            )
        if name in family.refused:
            raise OptionError(f"--{written}: not an option, because {family.refused[name]}")
        either = _may_mean(name, self.table)
        if either:
            number = f" {following}" if following and not following.startswith("--") else ""
            ways = " or ".join(f"--{one}{number} ({what})" for one, what in either)
            raise OptionError(f"--{written} is ambiguous", remedy=f"Use {ways}")
        raise unknown(written, name, self.table)


def _plain(written: str) -> str:
    return written.replace("_", "-").lower()


def _split(token: str) -> tuple[str | None, str | None]:
    """Return (name, value) of `--name`, `--name=value` and `group.name=value`."""
    if token.startswith("--") and len(token) > 2:
        name, equals, value = token[2:].partition("=")
        return name, value if equals else None
    match = _OVERRIDE.fullmatch(token)
    return (match[1], match[2]) if match else (None, None)


def _is_truth(text: str) -> bool:
    """Return True if a word is the value of a flag; any integer counts, so that 2 is an error."""
    return text.lower() in _ON | _OFF or re.fullmatch(r"[+-]?[0-9]+", text) is not None


def _is_foreign(name: str, family: Family) -> bool:
    tables = (family.planned, family.refused, family.only_one)
    return any(name in table for table in tables) or _ignored(name, family) is not None


def _ignored(name: str, family: Family) -> str | None:
    """Return the key of `family.ignored` for an option: its name or a prefix."""
    if name in family.ignored:
        return name
    return next((key for key in family.ignored if key.endswith("-") and name.startswith(key)), None)


def _may_mean(name: str, table: Mapping[str, Row]) -> tuple[tuple[str, str], ...]:
    """Return (option, explanation) of every meaning of an ambiguous name; empty if unambiguous."""
    found = alias_tables().ambiguous.get(name, ())
    return found if all(one in table for one, _ in found) else ()
