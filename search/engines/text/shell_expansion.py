"""Expansion of words in shell scripts: variables, arrays, defaults, substrings, arithmetic.

Values known only at run time become `Unknown`, with the text of the script.
`search.engines.text.shell` runs the statements.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.errors import DocumentError
from search.engines.text.shell_syntax import (
    NAME,
    Body,
    Piece,
    Scanner,
    Word,
    assignment_of,
)
from search.engines.text.shell_values import (
    Command,
    Undecided,
    Unknown,
    glued,
    sum_of,
)

_PARAMETER = re.compile(
    rf"(?P<mark>[#!])?(?P<name>{NAME}|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<op>:?[-=?+]|\#\#?|%%?|//?|\^\^?|,,?|:)?(?P<word>.*)",
    re.DOTALL,
)
_ALL = re.compile(rf"\$\{{(!?)({NAME})\[([@*])\]\}}|\$\{{?([@*])\}}?")
_MOST = 1 << 16
"""Maximum words or characters of a variable: `A=$A$A` doubles with every line."""


@dataclass
class Shell:
    """State of a shell: variables, functions, and the launch command found so far."""

    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str] | Undecided] = field(default_factory=dict)
    maps: dict[str, dict[str, str]] = field(default_factory=dict)
    """Associative arrays (`declare -A`)."""
    functions: dict[str, Body] = field(default_factory=dict)
    exported: dict[str, None] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    """Positional parameters `$1`, `$2`, ... of a function."""
    found: Command | Undecided | None = None
    """Last launch command; `Undecided` if it depends on an open condition; None if not found."""
    launches: int = 0
    """Number of launch commands found."""

    def copy(self) -> Shell:
        arrays = {
            name: items if isinstance(items, Undecided) else [*items]
            for name, items in self.arrays.items()
        }
        return Shell(
            scalars={**self.scalars},
            arrays=arrays,
            maps={name: {**items} for name, items in self.maps.items()},
            functions={**self.functions},
            exported={**self.exported},
            given=[*self.given],
            found=self.found,
            launches=self.launches,
        )


class Expansion:
    """Expansion of words, with a record of the unset variables that affect it."""

    def __init__(self, path: str, *, blank: bool = True) -> None:
        self.path = path
        self._blank = blank
        """True if unset variables are empty in conditions; False if they are unknown."""
        self.assigned: set[str] = set()
        """Names that the script assigns in any branch."""
        self.taken: dict[str, None] = {}
        """Unset variables without default, assumed empty in conditions."""
        self.empty: dict[str, None] = {}
        """Variables of `taken`, and those with an empty default in conditions (`${NAME:-}`)."""
        self.sourced: dict[str, None] = {}
        """Sourced files that are not read."""
        self.defaults: dict[str, None] = {}
        """Variables replaced by their default, although an unread sourced file may set them."""
        self.unset: dict[str, str] = {}
        """Unset variables, with the text used for each: its default, or an empty text."""

    def _assign(self, shell: Shell, word: Word) -> None:
        found = assignment_of(word)
        assert found is not None, "only assignments are assigned"
        name, index, append = found.name, found.key, found.append
        if word.items is not None:
            if name in shell.maps:
                self._assign_map(shell, name, word.items, append=append)
                return
            items = [part for item in word.items for part in self._fields(shell, item)]
            before = shell.arrays.get(name, []) if append else []
            if isinstance(before, Undecided):
                return
            self._limited(len(before) + len(items))
            shell.arrays[name] = [*before, *items]
            shell.scalars.pop(name, None)
            return
        text = self._text(shell, found.value)
        if index is not None:
            if name in shell.maps:
                key = self._text(shell, index)
                shell.maps[name][key] = (
                    glued([shell.maps[name].get(key, ""), text]) if append else text
                )
                return
            row = shell.arrays.setdefault(name, [])
            place = self._arithmetic(shell, "".join(piece.text for piece in index.pieces))
            if isinstance(row, Undecided) or place is None or not 0 <= place < _MOST:
                return
            if place >= len(row):
                row.append(text)  # bash leaves a gap, which is invisible in expansions
            else:
                row[place] = glued([row[place], text]) if append else text
            return
        if append and isinstance(array := shell.arrays.get(name), list) and name in shell.arrays:
            array[:1] = [(array[0] if array else "") + text]
            return
        self._set(shell, name, glued([shell.scalars.get(name, ""), text]) if append else text)

    def _assign_map(
        self, shell: Shell, name: str, items: tuple[Word, ...], *, append: bool
    ) -> None:
        """Assign `([key]=value ...)` to an associative array."""
        kept = shell.maps[name] if append else {}
        for item in items:
            # `assignment_of` expects a name before the bracketed key, so one is added.
            found = assignment_of(Word((Piece("text", "x", False), *item.pieces), item.line))
            if found is not None and found.key is not None:
                kept[self._text(shell, found.key)] = self._text(shell, found.value)
        self._limited(len(kept))
        shell.maps[name] = kept

    def _set(self, shell: Shell, name: str, text: str) -> None:
        self._limited(len(text))
        shell.scalars[name] = text
        # A name is a scalar, an array or an associative array: the last assignment counts.
        shell.arrays.pop(name, None)
        shell.maps.pop(name, None)

    def _limited(self, size: int) -> None:
        if size > _MOST:
            raise DocumentError(self.path, f"a variable grows beyond {_MOST} words or characters")

    def _text(self, shell: Shell, word: Word, *, unset: str | None = None) -> str:
        """Return the expansion of a word without splitting, as in an assigned value.

        unset : text for unset variables; None leaves them unknown.
        """
        return glued([self._piece(shell, piece, unset) for piece in word.pieces])

    def _fields(self, shell: Shell, word: Word, *, unset: str | None = None) -> list[str]:
        """Return the words of an expanded word; unquoted values are split at blanks.

        unset : text for unset variables; None leaves them unknown.
        """
        done, current, none = list[str](), list[str](), False
        for piece in word.pieces:
            items = self._array(shell, piece)
            if items is not None:
                # A quoted empty array expands to no word.
                none = none or not items
                for index, item in enumerate(items):
                    if index and (current or piece.quoted):
                        done.append(glued(current))
                        current = []
                    if piece.quoted or isinstance(item, Unknown):
                        current.append(item)
                    else:
                        self._split(item, done, current)
                continue
            value = self._piece(shell, piece, unset)
            if piece.kind == "text" or piece.quoted or isinstance(value, Unknown):
                if value or piece.quoted:
                    current.append(value)
            else:
                self._split(value, done, current)
        if current and not (none and not done and not any(current)):
            done.append(glued(current))
        self._limited(len(done))
        return done

    def _split(self, value: str, done: list[str], current: list[str]) -> None:
        """Split an unquoted value at blanks; its first part is joined to the current word.

        done : receives complete words. current : parts of the last word.
        """
        parts = value.split()
        if current and value[:1].isspace():
            done.append(glued(current))
            current.clear()
        for index, part in enumerate(parts):
            if index:
                done.append(glued(current))
                current.clear()
            current.append(part)
        if current and parts and value[-1:].isspace():
            done.append(glued(current))
            current.clear()

    def _array(self, shell: Shell, piece: Piece) -> list[str] | None:
        """Return the words of `${NAME[@]}` or `$@`; None for other pieces."""
        if piece.kind != "parameter":
            return None
        match = _ALL.fullmatch(piece.text)
        if match is None:
            return None
        keys, name, star, given = match.groups()
        if given:
            return shell.given  # empty outside functions
        if name in shell.maps:
            # Bash has an unspecified order; sorting makes the result stable.
            found = shell.maps[name]
            items = sorted(found) if keys else [found[key] for key in sorted(found)]
        elif name in shell.arrays:
            held = shell.arrays[name]
            if isinstance(held, Undecided):
                return [held]
            items = [str(place) for place in range(len(held))] if keys else held
        elif name in shell.scalars:
            items = ["0"] if keys else [shell.scalars[name]]
        elif name in self.assigned:
            items = []
        else:
            return [Unknown(piece.text)]
        return [" ".join(items)] if star == "*" and piece.quoted else items

    def _piece(self, shell: Shell, piece: Piece, unset: str | None) -> str:
        if piece.kind == "text":
            return piece.text
        if piece.kind == "command":
            return Unknown(piece.text)
        if piece.kind == "arithmetic":
            value = self._arithmetic(shell, piece.text)
            if value is not None:
                return str(value)
            undecided = self._undecided_in(shell, piece.text)
            return undecided or Unknown(f"$(({piece.text}))")
        return self._parameter(shell, piece, unset)

    def _undecided_in(self, shell: Shell, text: str) -> Undecided | None:
        for name in re.findall(NAME, text):
            if isinstance(value := shell.scalars.get(name), Undecided):
                return value
        return None

    def _parameter(self, shell: Shell, piece: Piece, unset: str | None) -> str:
        """Return the value of `$NAME` or `${NAME...}`; `Unknown` if known only at run time.

        unset : text for an unset variable; None leaves it unknown.
        """
        written = piece.text
        inner = written[2:-1] if written.startswith("${") else written[1:]
        if inner == "#":
            return str(len(shell.given))
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return Unknown(written)
        name, index, operator, word = match["name"], match["index"], match["op"], match["word"]
        if match["mark"] == "!":
            # The value is the name of another variable (indirect expansion).
            other = self._named(shell, name, index) or ""
            if not re.fullmatch(NAME, other) or isinstance(other, Unknown):
                return other if isinstance(other, Undecided) else Unknown(written)
            text = f"${{{other}{operator or ''}{word}}}"
            return self._parameter(shell, piece._replace(text=text), unset)
        value = self._named(shell, name, index)
        if match["mark"] == "#":
            if index in ("@", "*"):
                items = shell.arrays.get(name, [*shell.maps.get(name, ())])
                return Unknown(written) if isinstance(items, Undecided) else str(len(items))
            return Unknown(written) if isinstance(value, Unknown) else str(len(value or ""))
        if operator is None and word:
            return Unknown(written)
        if operator and operator[-1] in "-=?+":
            # With a colon, an empty value counts as unset.
            has = value is not None and (bool(value) or not operator.startswith(":"))
            if operator[-1] == "+":  # the text replaces a value that is set
                return self._default(shell, word, piece) if has else ""
            if has and value is not None:
                return value
            if operator[-1] == "?":
                return Unknown(written)
            if self.sourced and not name.isdigit():
                self.defaults[name] = None
            text = self._default(shell, word, piece)
            if not name.isdigit():
                self.unset.setdefault(name, text)
                if not text and unset is not None:
                    self.empty[name] = None
                    if not self._blank:
                        return Unknown(written)
            if operator[-1] == "=":
                self._set(shell, name, text)
            return text
        if value is None:
            return self._missing(name, written, unset)
        if operator is None or isinstance(value, Unknown):
            return value
        found = self._changed(shell, value, operator, word, piece)
        return Unknown(written) if found is None else found

    def _missing(self, name: str, written: str, unset: str | None) -> str:
        if re.fullmatch(NAME, name):
            self.unset.setdefault(name, "")
        if name in self.assigned:
            return ""  # assigned only in a branch that was not taken
        if unset is None or not self._blank:
            return Unknown(written)
        self.taken[name] = self.empty[name] = None
        return unset

    def _named(self, shell: Shell, name: str, index: str | None) -> str | None:
        if name.isdigit():
            place = int(name) - 1
            return shell.given[place] if 0 <= place < len(shell.given) else None
        if name in shell.maps:
            found = shell.maps[name]
            if index in ("@", "*"):
                return " ".join(found[key] for key in sorted(found))
            key = "0" if index is None else self._text(shell, Scanner(index, self.path).word(""))
            return key if isinstance(key, Unknown) else found.get(key)
        if name in shell.arrays:
            items = shell.arrays[name]
            if isinstance(items, Undecided):
                return items
            if index in ("@", "*"):
                return glued([" ".join(items)]) if items else ""
            place = 0 if index is None else (self._arithmetic(shell, index) or 0)
            return items[place] if -len(items) <= place < len(items) else ""
        return shell.scalars.get(name)

    def _default(self, shell: Shell, text: str, piece: Piece) -> str:
        """Return the expanded text after an operator such as `:-`."""
        scanner = Scanner(text, self.path)
        if not piece.quoted:
            return self._text(shell, scanner.word(""))
        # Inside double quotes, single quotes are literal.
        pieces = list[Piece]()
        while scanner.at < len(text):
            part = scanner.word("'")
            pieces += part.pieces
            if scanner.at < len(text):
                pieces.append(Piece("text", "'", quoted=True))
                scanner.at += 1
        return self._text(shell, Word(tuple(pieces), 1))

    def _changed(
        self, shell: Shell, value: str, operator: str, word: str, piece: Piece
    ) -> str | None:
        """Return a value after a substring, case, replacement or prefix operator.

        Returns None if the operator is not supported or its operand is unknown.
        """
        if operator == ":":
            bounds = [self._arithmetic(shell, part) for part in word.split(":")]
            if len(bounds) > 2 or None in bounds:
                return None
            start, *length = (int(bound or 0) for bound in bounds)
            # A negative start counts from the end; beyond the beginning, the result is empty.
            tail = value[start:] if start >= -len(value) else ""
            return tail if not length else tail[: length[0]]
        text = self._default(shell, word, piece)
        if isinstance(text, Unknown):
            return None
        if operator in ("^^", ",,", "^", ","):
            change = str.upper if operator[0] == "^" else str.lower
            return change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
        if operator in ("/", "//"):
            pattern, _, new = text.partition("/")
            if not pattern or any(mark in pattern for mark in "*?["):
                return None
            return value.replace(pattern, new, -1 if operator == "//" else 1)
        lengths = range(len(value) + 1)
        cuts_end = operator[0] == "%"
        for n in reversed(lengths) if len(operator) == 2 else lengths:
            at = len(value) - n if cuts_end else n
            if fnmatchcase(value[at:] if cuts_end else value[:at], text):
                return value[:at] if cuts_end else value[at:]
        return value

    def _arithmetic(self, shell: Shell, text: str) -> int | None:
        """Return the value of `$((text))`; None if it is invalid or known only at run time."""
        expanded = self._text(shell, Scanner(text.replace('"', ""), self.path).word(""))
        if isinstance(expanded, Unknown):
            return None

        def value_of(name: str) -> str | None:
            found = self._named(shell, name, None)
            # A name assigned in another branch is 0; an environment variable is unknown.
            return "0" if found is None and name in self.assigned else found

        return sum_of(expanded, value_of, lambda name, text: self._set(shell, name, text))
