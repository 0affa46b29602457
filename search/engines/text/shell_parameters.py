"""Variables of bash scripts: assignment, `${NAME...}` with its operators, arithmetic.

`search.engines.text.shell_expansion` splits the results into words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from search.engines.text.shell_arithmetic import OpenSumError, WrongSumError, check_sum, sum_of
from search.engines.text.shell_expansion import Words, is_list
from search.engines.text.shell_patterns import Matcher, Pattern, UnreadPatternError, glob_pattern
from search.engines.text.shell_syntax import Assignment, assignment_of, scanner_of
from search.engines.text.shell_values import Hole, Open, Shell, Variable, is_open
from search.engines.text.shell_words import NAME, Piece, Word, closing, plain_text, split_bounds

OPERATORS = re.compile(r":?[-=?+]|##?|%%?|/[/#%]?|\^\^?|,,?|:|@[QUuL](?=$)")
"""Operators of `${NAME...}` that are interpreted: defaults, cuts, replacements, case, slices."""
OF_BASH = frozenset(
    ("PWD", "OLDPWD", "HOME", "PATH", "USER", "SHELL", "HOSTNAME", "RANDOM", "SRANDOM", "SECONDS",
     "UID", "EUID", "PPID", "GROUPS", "OSTYPE", "MACHTYPE", "HOSTTYPE", "SHLVL", "BASH", "BASHPID",
     "BASH_VERSION", "BASH_VERSINFO", "BASH_SOURCE", "BASH_LINENO", "EPOCHSECONDS",
     "EPOCHREALTIME", "TERM", "LOGNAME")
)  # fmt: skip
"""Variables that bash or the system sets."""
_UNREAD = frozenset(
    ("-", "_", "BASH_REMATCH", "PIPESTATUS", "DIRSTACK", "FUNCNAME", "BASH_COMMAND", "LINENO",
     "BASH_SUBSHELL", "SHELLOPTS", "BASHOPTS", "OPTIND", "REPLY", "MAPFILE", "COPROC")
)  # fmt: skip
"""Variables that commands of the script set, and that are read only where they do so."""
_UNSET = frozenset({"BASH_REMATCH", "REPLY", "MAPFILE", "COPROC"})
"""Those of `_UNREAD` that are unset before such a command."""


class Parameter(NamedTuple):
    """Parameter expansion `${...}`, split into its parts."""

    mark: str
    """`#` for a length, `!` for keys or the variable that another names, else empty."""
    name: str
    key: str | None
    operator: str
    """Empty if there is none."""
    word: str
    """Text after the operator."""


@lru_cache(maxsize=4096)
def parameter_of(inner: str) -> Parameter | None:
    """Return the parts of the text between `${` and `}`; None if it is not interpreted."""
    mark = ""
    special = inner[0] == "!" and inner[1:2] in "-:=?+#%" and inner != "!#"
    if len(inner) > 1 and inner[0] in "#!" and not special:
        mark, inner = inner[0], inner[1:]
    match = re.match(rf"{NAME}|[0-9]+|[@*#?$!-]", inner)
    if match is None:
        return None
    index, at = None, match.end()
    if inner.startswith("[", at):
        end = closing(inner, at)
        if not end:
            return None
        index, at = inner[at + 1 : end - 1], end
    if at == len(inner):
        return Parameter(mark, match[0], index, "", "")
    operator = OPERATORS.match(inner, at)
    if operator is None or mark == "#" or (operator[0] == ":" and not inner[operator.end() :]):
        return None
    return Parameter(mark, match[0], index, operator[0], inner[operator.end() :])


class Expansion(Words):
    """Values of the pieces of words."""

    def _substitute(self, shell: Shell, piece: Piece, ends: str = "\n") -> str:
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------
    # Assignments.

    def _assign(self, shell: Shell, word: Word) -> None:
        found = assignment_of(word)
        assert found is not None, "only assignments are assigned"
        if word.items is not None:
            self._assign_items(shell, found, word.items)
            return
        text = self._text(shell, found.value)
        self.store(shell, found.name, self._index(shell, found), text, append=found.append)

    def _index(self, shell: Shell, found: Assignment) -> str | None:
        return None if found.key is None else "".join(_source(p) for p in found.key.pieces)

    def store(
        self, shell: Shell, name: str, index: str | None, text: str, *, append: bool = False
    ) -> None:
        """Assign a text to a variable, or to an item of an array."""
        old = shell.variables.get(name, Variable(None))
        if "n" in old.marks:
            raise self.refuse(f"the name reference {name}")
        if "r" in old.marks:
            raise self.refuse(f"the assignment to {name}, which is readonly")
        if isinstance(old.value, str) and self._many(old.value):
            of_array = {hole.written for hole in self.holes.of(old.value)} == {f"${{{name}[@]}}"}
            if append or index or (index is None and of_array):
                return  # an array that a condition decides stays so; a text is its first item
        if index is None and not isinstance(old.value, dict):
            before = old.text() if append else None
            self._put(shell, name, old, self._converted(shell, old, before, text))
            return
        key = self._key(shell, old, "0" if index is None else index)
        if isinstance(key, Open):
            open_ = self.hole(f"${{{name}[@]}}", many=2, why=f"line {self.line}")
            shell.variables[name] = Variable(open_, old.marks.replace("a", ""))
            return
        items = dict(old.items())
        items[key] = self._converted(shell, old, items.get(key) if append else None, text)
        self.budget.size(len(items))
        marks = old.marks if old.mapped or "a" in old.marks else old.marks + "a"
        shell.variables[name] = Variable(items, marks)  # type: ignore[arg-type]

    def _put(self, shell: Shell, name: str, old: Variable, text: str) -> None:
        self.budget.size(len(text))
        marks = old.marks.replace("a", "").replace("A", "")
        if "a" in shell.options and "x" not in marks:
            marks += "x"
        shell.variables[name] = Variable(text, marks)

    def _converted(self, shell: Shell, old: Variable, before: str | None, text: str) -> str:
        """Return the text that a variable gets by its attributes; before : what `+=` extends."""
        if "i" in old.marks:
            value = self.sum(shell, text)
            if before:
                value = self.sum(shell, f"({before})+({value})")
            return value
        text = (before or "") + text
        if "u" in old.marks or "l" in old.marks:
            text = text.upper() if "u" in old.marks else text.lower()
        return text

    def _key(self, shell: Shell, variable: Variable, index: str) -> int | str | Open:
        """Return the key of an item."""
        if variable.mapped:
            key = self._text(shell, scanner_of(index, self.path, self.line).word(""))
            if not key:
                raise self.refuse("an empty key")
            return Open(key) if is_open(key) else key
        value = self.sum(shell, index)
        if is_open(value):
            return Open(value)
        place = int(value)
        if place < 0:
            places = [p for p in variable.items() if isinstance(p, int)]
            place += max(places, default=-1) + 1
        if not 0 <= place < 1 << 31:
            raise self.refuse(f"the index {index}")
        return place

    def _assign_items(self, shell: Shell, found: Assignment, words: Sequence[Word]) -> None:
        """Assign `(...)` to an array."""
        name = found.name
        if found.key is not None:
            raise self.refuse(f"a list assigned to an item of {name}")
        old = shell.variables.get(name, Variable(None))
        if "r" in old.marks or "n" in old.marks:
            raise self.refuse(f"the assignment to {name}, which is readonly or a reference")
        if isinstance(old.value, str) and self._many(old.value) and found.append:
            return
        kept = {**old.items()} if found.append else {}
        marks = old.marks if old.mapped or "a" in old.marks else old.marks + "a"
        at = max((p for p in kept if isinstance(p, int)), default=-1) + 1
        plain = list[str]()
        for word in words:
            # `assignment_of` expects a name before the bracketed key, so one is added.
            pieces = (Piece("text", "x", False), *word.pieces)
            item = assignment_of(Word(pieces, word.line)) if word.pieces else None
            if item is not None and item.key is not None and plain_text(pieces)[1:2] == "[":
                key = self._key(shell, Variable(kept, marks), self._index(shell, item) or "")  # type: ignore[arg-type]
                if isinstance(key, Open):
                    raise self.refuse(f"the index of {name}, known only at run time,")
                text = self._text(shell, item.value)
                kept[key] = self._converted(
                    shell, old, kept.get(key) if item.append else None, text
                )
                at = key + 1 if isinstance(key, int) else at
                continue
            if "A" in marks:
                plain.append(self._text(shell, word))  # not split
                continue
            for text in self._fields(shell, word):
                kept[at] = self._converted(shell, old, None, text)
                at += 1
        if not all(plain[::2]) or any(map(is_open, plain[::2])):
            raise self.refuse(f"a key of {name} that is empty or known only at run time")
        if plain:
            kept |= dict(zip(plain[::2], [*plain[1::2], ""], strict=False))
        if "A" in marks and len(kept) > 1000:
            raise self.refuse(f"an associative array of {len(kept)} items")
        self.budget.size(len(kept))
        shell.variables[name] = Variable(kept, marks)  # type: ignore[arg-type]

    def _many(self, text: str) -> bool:
        return len(text) == 1 and any(hole.many == 2 and hole.why for hole in self.holes.of(text))

    # ----------------------------------------------------------------------------------------------
    # Variables.

    def _items(
        self, shell: Shell, piece: Piece, unset: str | None
    ) -> tuple[Sequence[str], bool | None]:
        """Return (values of a piece, True if `*` joins them); only lists have several or none."""
        if piece.kind in ("text", "value"):
            return [piece.text], False
        if piece.kind == "unread":
            return [self.unread(piece.text)], False
        if piece.kind in ("tilde", "process"):
            return [self.hole(piece.text)], False
        if piece.kind == "command":
            return [self._substitute(shell, piece)], False
        if piece.kind == "arithmetic":
            return [self.sum(shell, piece.text, f"$(({piece.text}))")], False
        text = piece.text
        inner = text[2:-1] if text.startswith("${") else text[1:]
        return self._parameter(shell, inner, piece, unset)

    def _parameter(
        self, shell: Shell, inner: str, piece: Piece, unset: str | None
    ) -> tuple[Sequence[str], bool | None]:
        written = piece.text
        found = parameter_of(inner)
        if found is None:
            return [self.unread(written)], False
        mark, name, index, operator, _ = found
        if mark == "!" and index not in ("@", "*"):
            return self._indirect(shell, found, piece, unset)
        if index in ("@", "*") or name in ("@", "*"):
            return self._list(shell, found, piece)
        value = self._named(shell, name, index)
        if mark == "#":
            if value is None:
                value = "".join(self._missing(shell, name, written, "" if index else unset))
            return [self.hole(written) if is_open(value) else str(len(value))], False
        if operator and operator[-1] in "-=?+":
            return self._defaulted(shell, found, value, piece, unset)
        if value is None:
            if index is not None and name in shell.variables:
                if "u" in shell.options:
                    raise self.refuse(f"{written}, unset with `set -u`,")
                value = ""
            else:
                value = self._missing(shell, name, written, unset)
            # An unset variable is not quoted, and nothing is replaced, not even an empty match.
            if is_open(value) or operator[:1] in ("/", "@"):
                return [value], False
        if "u" in shell.options and any(hole.unset for hole in self.holes.of(value)):
            self.left_out[f"nothing is launched if {written} is unset"] = None
        if not operator:
            return [value], False
        return [self._changed(shell, value, found, piece)], False

    def _indirect(
        self, shell: Shell, found: Parameter, piece: Piece, unset: str | None
    ) -> tuple[Sequence[str], bool | None]:
        """Return the value of `${!NAME}`: that of the variable that another names."""
        written = piece.text
        if found.word.startswith("@") or (found.operator == "" and written.endswith(("*}", "@}"))):
            return [self.unread(written)], False
        if (other := self._named(shell, found.name, found.key)) is None:
            return [self.unread(written)], False
        if is_open(other):
            holes = self.holes.of(other)
            if found.name == "#":  # the last parameter, which may be several words
                return [self.unread(written)], False
            return [other if holes[0].why else self.hole(written)], False
        if not re.fullmatch(rf"(?:{NAME}|[0-9]+)(?:\[.*\])?", other):
            return [self.unread(written)], False
        inner = f"{other}{found.operator}{found.word}"
        return self._parameter(shell, inner, piece._replace(text=f"${{{inner}}}"), unset)

    def _list(
        self, shell: Shell, found: Parameter, piece: Piece
    ) -> tuple[Sequence[str], bool | None]:
        """Return the items of `${NAME[@]}`, `$@` or `$*`, after an operator."""
        mark, name, index, operator, word = found
        star = "*" in (index, name)
        places: Sequence[int | str]
        if name in ("@", "*"):
            if mark == "!":
                return [self.unread(piece.text)], False
            self.needs_arguments = self.needs_arguments or int(not shell.told)
            values = [*shell.given]
            places = range(1, len(values) + 1)
        else:
            variable = shell.variables.get(name)
            if variable is not None and self._list_hole(variable):
                if mark:
                    return [self.unread(piece.text)], star
                held = self.holes.of(str(variable.value))[0]
                many = 1 if star and piece.quoted else 2
                return [self.holes.character(held._replace(many=many))], star
            if variable is None and (name in OF_BASH or name not in self.assigned):
                return [self.hole(piece.text, many=1 if star and piece.quoted else 2)], star
            items = variable.items() if variable is not None else {}
            places, values = [*items], [*items.values()]
            if mark == "!":
                if any(map(self.uncertain, values)) and not (variable and variable.mapped):
                    return [self.unread(piece.text)], star
                return self._starred(shell, [str(place) for place in places], piece, star)
            if mark and "u" in shell.options and (variable is None or variable.value is None):
                raise self.refuse(f"{piece.text}, unset with `set -u`,")
        if mark == "#":
            known = not any(self.uncertain(value) for value in values)
            return [str(len(values)) if known else self.hole(piece.text)], False
        if operator and operator[-1] in "-=?+":
            # Two empty items are not empty: a blank joins them.
            has = bool(values) and not (operator[0] == ":" and values == [""])
            if has and operator[0] == ":" and not any(values) and self._ifs(shell)[:1] == "":
                raise self.refuse(f"{piece.text[:40]}, a list with this IFS,")
            if operator[-1] == "+":
                missing = [""] if values or star else []
                return self._default_items(shell, word, piece) if has else (missing, star)
            if not has:
                if operator[-1] != "-":
                    return [self.unread(piece.text)], False
                return self._default_items(shell, word, piece)
        elif operator == ":":
            if any(map(self.unplaced, values)):
                return [self.unread(piece.text)], star
            open_ = [hole for value in values for hole in self.holes.of(value) if hole.many]
            if open_:
                first = open_[0]
                return [
                    self.holes.character(first._replace(many=2))
                    if first.why
                    else self.unread(piece.text)
                ], star
            bounds = self._bounds(shell, word)
            mapped = name in shell.variables and shell.variables[name].mapped
            if isinstance(bounds, Open) or mapped:
                return [self.unread(piece.text)], False
            start, length = bounds
            if length is not None and length < 0:
                raise self.refuse(f"{piece.text}, a list of negative length,")
            if name in ("@", "*"):
                values, places = ["", *values], range(len(values) + 1)
                values[0] = self.hole("$0")
            last = int(places[-1]) + 1 if places else 0
            start = start + last if start < 0 else start
            rest = [v for p, v in zip(places, values, strict=True) if int(p) >= start >= 0]
            values = rest if length is None else rest[:length]
        elif operator:
            values = [self._changed(shell, value, found, piece) for value in values]
        return self._starred(shell, values, piece, star)

    def _starred(
        self, shell: Shell, values: list[str], piece: Piece, star: bool
    ) -> tuple[Sequence[str], bool | None]:
        if star and piece.quoted:
            return [self._ifs(shell)[:1].join(values)], True
        return values, star

    def _list_hole(self, variable: Variable) -> bool:
        """Return True if a variable is an array known only at run time."""
        value = variable.value
        return isinstance(value, str) and any(hole.many == 2 for hole in self.holes.of(value))

    def _defaulted(
        self, shell: Shell, found: Parameter, value: str | None, piece: Piece, unset: str | None
    ) -> tuple[Sequence[str], bool | None]:
        """Return `${NAME:-text}` and its kin."""
        name, operator, word, written = found.name, found.operator, found.word, piece.text
        if value is None and name in OF_BASH:
            value = self.hole(f"${name}")
        # With a colon, an empty value counts as unset.
        has = value is not None and (bool(value) or not operator.startswith(":"))
        if operator[-1] == "+":  # the text replaces a value that is set
            open_ = self.holes.of(value or "")
            if open_ and open_[0].why and len(str(value)) == 1:
                return [self.holes.character(open_[0]._replace(many=1))], False
            return self._default_items(shell, word, piece) if has else ([""], False)
        if has and value is not None:
            return [value], False
        if operator[-1] == "?":
            if value is not None or name in self.removed or (name.isdigit() and shell.told):
                raise self.refuse(f"{written}, which ends the script,")
            return [self.hole(written)], False
        if name.isdigit() and not shell.told:
            self.needs_arguments = max(self.needs_arguments, int(name[:3]))
        if self.sourced and not name.isdigit():
            self.defaults[name] = None
        items = self._default_items(shell, word, piece)
        text = " ".join(items[0])
        if re.fullmatch(NAME, name):
            self.unset.setdefault(name, self.holes.shown(text))
            if not text and unset is not None and value is None:
                self.empty[name] = None
                if not self._blank:
                    return [self.hole(written)], False
        if operator[-1] == "=":
            if not re.fullmatch(NAME, name):
                return [self.unread(written)], False
            self.store(shell, name, found.key, text)
            self._spliced = None
            return [text], False
        return items

    def _missing(self, shell: Shell, name: str, written: str, unset: str | None) -> str:
        """Return the value of an unset variable."""
        if name in _UNREAD:
            if "u" in shell.options and name in _UNSET:
                raise self.refuse(f"{written}, which may be unset here,")
            return self.unread(written)
        if name in OF_BASH or not (name.isdigit() or re.fullmatch(NAME, name)):
            return self.hole(written)
        if name.isdigit():
            if shell.told:
                if "u" in shell.options:
                    raise self.refuse(f"{written}, unset with `set -u`,")
                return ""
            self.needs_arguments = max(self.needs_arguments, int(name[:3]))
            return self.hole(written)
        self.unset.setdefault(name, "")
        if name in self.assigned:
            if "u" in shell.options:
                raise self.refuse(f"{written}, unset with `set -u`,")
            return ""  # assigned only in a branch that was not taken
        if unset is None or not self._blank or "u" in shell.options:
            return self.hole(written)
        self.taken[name] = self.empty[name] = None
        return unset

    def _named(self, shell: Shell, name: str, index: str | None) -> str | None:
        """Return the value of a variable or of an item; None if it is unset."""
        if name.isdigit() and name.strip("0"):
            place = int(name) - 1 if len(name) < 9 else 1 << 30
            for word in shell.given[: place + 1]:
                if self._many(word) or self.unplaced(word):
                    return word
            return shell.given[place] if 0 <= place < len(shell.given) else None
        if name == "#":
            self.needs_arguments = self.needs_arguments or int(not shell.told)
            many = any(hole.many for word in shell.given for hole in self.holes.of(word))
            many = many or any(map(self.unplaced, shell.given))
            return self.unread("$#") if many else str(len(shell.given))
        if name == "0":
            return self.hole("$0")
        if name == "?":
            return self.unread("$?") if shell.status is None else str(shell.status)
        variable = shell.variables.get(name)
        if variable is None:
            return None
        if index is None:
            return variable.text()
        if isinstance(variable.value, str) and (
            self._list_hole(variable) or any(h.refused for h in self.holes.of(variable.value))
        ):
            return variable.value
        key = self._key(shell, variable, index)
        if isinstance(key, Open):
            if "u" in shell.options:
                raise self.refuse(f"${{{name}[{index}]}}, which may be unset with `set -u`,")
            return self._decided(key, f"${{{name}[{index}]}}")
        items = variable.items()
        if not variable.mapped and len(items) > 1:
            for at, item in items.items():
                if at != key and self.unplaced(item):
                    return item  # it may move the other items
        return items.get(key)

    # ----------------------------------------------------------------------------------------------
    # Operators.

    def _default(self, shell: Shell, text: str, piece: Piece) -> str:
        return " ".join(self._default_items(shell, text, piece)[0])

    def _default_items(
        self, shell: Shell, text: str, piece: Piece
    ) -> tuple[Sequence[str], bool | None]:
        """Return the expanded text after an operator such as `:-`."""
        if piece.quoted and re.search(r"(?s)\".*\\|\\.*\"|\$'|\".*(?<!\$)\{[^}]*(,|\.\.)", text):
            # Braces, backslashes and `$'...'` in or between inner quotes.
            return [self.unread(piece.text)], False
        word = _operand(text, self.path, piece.quoted)
        if len(word.pieces) == 1 and word.pieces[0].kind == "parameter":
            items, star = self._items(shell, word.pieces[0]._replace(quoted=piece.quoted), None)
            if len(items) > 1:
                self.needs_blank(shell, piece.text)
            return items, star
        if piece.quoted and any(map(is_list, word.pieces)):
            return [self.unread(piece.text)], False  # a list among other text
        if piece.quoted or not any(p.quoted for p in word.pieces):
            return [self._text(shell, word)], False
        # Its other parts are split, as values are. Commands and sums run only once.
        values = list[Piece]()
        for one in word.pieces:
            if one.kind in ("command", "arithmetic"):
                one = one._replace(kind="value", text=self._text(shell, Word((one,), word.line)))
            elif one.kind == "text" and not one.quoted:
                one = one._replace(kind="value")
            values.append(one)
        spliced = word._replace(pieces=tuple(values))
        text = self._text(shell, spliced)
        self._spliced = spliced
        return [text], False

    def _decided(self, by: Open, written: str) -> str:
        """Return a value that an index or a bound known only at run time decides.

        If a condition of the script decides that, the value may be empty or several words.
        """
        first = next((hole for hole in self.holes.of(by.text) if hole.why), None)
        return self.hole(written, why=first.why, many=1) if first else self.hole(written)

    def _bounds(self, shell: Shell, word: str) -> tuple[int, int | None] | Open:
        """Return (start, length) of a slice."""
        parts = split_bounds(word)
        if len(parts) > 2:
            raise self.refuse(f"the slice `{word[:40]}`")
        sums = [self.sum(shell, part) for part in parts]
        if any(map(is_open, sums)):
            return Open("".join(sums))
        return int(sums[0]), (int(sums[1]) if len(sums) > 1 else None)

    def _changed(self, shell: Shell, value: str, found: Parameter, piece: Piece) -> str:
        """Return a value after a slice, a cut, a replacement or a change of case."""
        operator, word, written = found.operator, found.word, piece.text
        if not value and operator[0] in "#%^,":
            return value
        if is_open(value):
            holes = self.holes.of(value)
            if not piece.quoted and (re.search(r"\s", value) or any(h.many for h in holes)):
                return self.unread(written)
            if self._takes_all(shell, found, piece):
                return self.unread(written)
            if operator[0] in "#%/" and (cut := self._open_cut(shell, value, found)) is not None:
                return cut
            first = next((hole for hole in holes if hole.why or hole.refused), Hole(written))
            # The rest may be empty, or several words where a text of `eval` splits it.
            several = first.why or re.search(r"\s", value)
            return self.holes.character(first._replace(many=1) if several else first)
        if operator == ":":
            bounds = self._bounds(shell, word)
            if isinstance(bounds, Open):
                return self._decided(bounds, written)
            start, length = bounds
            if start < 0:
                # A negative start counts from the end; beyond the beginning, nothing is left.
                start = start + len(value) if start + len(value) >= 0 else len(value)
            if length is not None and length < 0:
                if len(value) + length < start:
                    raise self.refuse(f"{written}, which ends before its start,")
                return value[start : len(value) + length]
            return value[start:] if length is None else value[start : start + length]
        if operator[0] == "@":
            return self._transformed(value, operator[1], written)
        if operator[0] == "/":
            return self._replaced(shell, value, found, piece)
        pattern = self._pattern(shell, word, written)
        if isinstance(pattern, str):
            return self._uncut(value, pattern, piece)
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            count = len(value) if len(operator) == 2 else 1
            changed = [
                change(c) if not pattern or self.matcher(shell, c, fold=False).whole(pattern) else c
                for c in value[:count]
            ]
            return "".join(changed) + value[count:]
        back = operator[0] == "%"
        ends = Matcher(value, self.budget.work, fold=False, back=back).ends(pattern, 1)
        if not ends:
            return value
        length = ends.bit_length() - 1 if len(operator) == 2 else (ends & -ends).bit_length() - 1
        return value[: len(value) - length] if back else value[length:]

    def _open_cut(self, shell: Shell, value: str, found: Parameter) -> str | None:
        """Return an open value without the same open text at its begin or end, else None.

        A replacement is known if that text is the whole value.
        """
        at = _slash(found.word) if found.operator[0] == "/" else len(found.word)
        text = self.pattern_text(shell, _operand(found.word[:at], self.path, False))
        plain = re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
        if not is_open(text) or re.search(r"(?<!\\)[*?[]", text):
            return None
        if found.operator[0] == "#" and value.startswith(plain):
            return value[len(plain) :]
        if found.operator[0] == "%" and value.endswith(plain):
            return value[: len(value) - len(plain)]
        if found.operator[0] == "/" and value == plain:
            return self._text(shell, _operand(found.word[at + 1 :], self.path, False))
        return None

    def _uncut(self, value: str, open_: str, piece: Piece) -> str:
        """Return `open_` for a value after an unknown pattern; refuse what may be several words."""
        return self.unread(piece.text) if not piece.quoted and re.search(r"\s", value) else open_

    def _takes_all(self, shell: Shell, found: Parameter, piece: Piece) -> bool:
        """Return True if a cut or a replacement of everything leaves no word of an open value."""
        operator = found.operator
        if operator not in ("##", "%%", "/", "//", "/#", "/%"):
            return False
        at = _slash(found.word) if operator[0] == "/" else len(found.word)
        pattern = self._pattern(shell, found.word[:at], piece.text)
        # no script has this character
        return not isinstance(pattern, str) and any(
            self.matcher(shell, "\ue000" * number, fold=False).whole(pattern) for number in (1, 9)
        )

    def _transformed(self, value: str, how: str, written: str) -> str:
        if how == "Q":
            if not value.isprintable():
                return self.unread(written)
            return "'" + value.replace("'", "'\\''") + "'"
        if how == "u":
            return value[:1].upper() + value[1:]
        return value.upper() if how == "U" else value.lower()

    def _pattern(self, shell: Shell, text: str, written: str) -> Pattern | str:
        """Return the pattern behind an operator; a text if known only at run time or not read."""
        word = _operand(text, self.path, False)
        return self.compiled(shell, self.pattern_text(shell, word), written)

    def compiled(
        self, shell: Shell, text: str, written: str, *, extended: bool | None = None
    ) -> Pattern | str:
        """Return the pattern of a glob; a text if known only at run time or not read."""
        if is_open(text):
            holes = self.holes.of(text)
            return self.holes.character(
                next((h for h in holes if h.why or h.refused), Hole(written))
            )
        if "nocasematch" in shell.options and re.search(r"\[:(upper|lower):\]", text):
            raise self.refuse(f"{written[:40]} with `shopt -s nocasematch`")
        extended = "extglob" in shell.options if extended is None else extended
        self.budget.work(len(text))
        try:
            return _glob(text, extended)
        except UnreadPatternError:
            return self.unread(written)

    def matcher(self, shell: Shell, text: str, *, fold: bool | None = None) -> Matcher:
        folded = "nocasematch" in shell.options if fold is None else fold
        return Matcher(text, self.budget.work, fold=folded)

    def _replaced(self, shell: Shell, value: str, found: Parameter, piece: Piece) -> str:
        """Return a value after `${NAME/pattern/text}`."""
        operator, written = found.operator, piece.text
        if found.word.startswith("/") and operator in ("/", "//"):
            return self.unread(written)
        at = _slash(found.word)
        old, new_text = found.word[:at], found.word[at + 1 :]
        pattern = self._pattern(shell, old, written)
        word = _operand(new_text, self.path, False)
        new = self._text(shell, word)
        if isinstance(pattern, str):
            return self._uncut(value, pattern, piece)
        if "&" in new or "\\" in new:
            return self.unread(written)  # versions of bash differ
        if is_open(new) or not pattern:
            if not pattern and operator in ("/#", "/%"):
                return new + value if operator == "/#" else value + new
            return value if not pattern else self._open_change(value, pattern, new, shell, piece)
        if operator in ("/#", "/%"):
            matcher = Matcher(
                value, self.budget.work, fold="nocasematch" in shell.options, back=operator == "/%"
            )
            ends = matcher.ends(pattern, 1)
            if not ends:
                return value
            length = ends.bit_length() - 1
            return new + value[length:] if operator == "/#" else value[: len(value) - length] + new
        done, at = list[str](), 0
        while at < len(value) or not value:
            place = self.matcher(shell, value[at:]).found(pattern)
            if place is None:
                break
            start, end = place
            if start == end:
                return self.unread(written)
            done += [value[at : at + start], new]
            at += end
            self.budget.size(len(new))
            if operator == "/" or at >= len(value):
                break
        text = "".join(done) + value[at:]
        self.budget.size(len(text))
        return text

    def _open_change(
        self, value: str, pattern: Pattern, new: str, shell: Shell, piece: Piece
    ) -> str:
        """Return a value with an open replacement: unchanged if the pattern is not in it."""
        if self.matcher(shell, value).found(pattern) is None:
            return value
        holes = self.holes.of(new)
        first = next((h for h in holes if h.why or h.refused), Hole(piece.text))
        changed = self.holes.character(first._replace(many=max(h.many for h in holes)))
        return self._uncut(new, changed, piece)

    # ----------------------------------------------------------------------------------------------
    # Arithmetic.

    def sum(self, shell: Shell, text: str, written: str | None = None) -> str:
        """Return the value of `$((text))` as text; open if known only at run time.

        Raises DocumentError for an expression that bash rejects or that is not interpreted.
        """
        shown = written or text
        if re.fullmatch("[1-9][0-9]{0,17}|0", text):
            return text
        if any(mark in text for mark in "$`\\\"'"):
            text = self._text(shell, _operand(text.replace('"', ""), self.path, True, False))
        self.budget.work(len(text) * 16)
        try:
            return str(sum_of(text, _Sums(self, shell)))
        except OpenSumError as error:
            self._checked_sum(text, shown)
            hole = self.holes.of(error.value)[0]
            if hole.why or hole.refused:
                return error.value
            return self.hole(shown)
        except WrongSumError:
            raise self.refuse(f"the expression `{shown.strip()[:60]}`") from None

    def _checked_sum(self, text: str, shown: str) -> None:
        try:
            check_sum(text)
        except WrongSumError:
            raise self.refuse(f"the expression `{shown.strip()[:60]}`") from None


class _Sums:
    """Variables of the script as an expression sees them."""

    def __init__(self, expansion: Expansion, shell: Shell) -> None:
        self._expansion, self._shell = expansion, shell

    def value_of(self, name: str, index: str | None) -> str:
        own = self._expansion
        found = own._named(self._shell, name, index)
        if found is None and "u" in self._shell.options and name not in OF_BASH:
            raise own.refuse(f"{name}, which may be unset with `set -u`,")
        known = name in own.assigned or name in self._shell.variables
        # A name assigned in another branch is 0; an environment variable is open.
        if found is None and index is None and (name in OF_BASH or not known):
            own.unset.setdefault(name, "")
            return own.hole(f"${name}")
        return found or ""

    def assign(self, name: str, index: str | None, value: int) -> None:
        self._expansion.store(self._shell, name, index, str(value))


@lru_cache(maxsize=4096)
def _operand(text: str, path: str, quoted: bool, quotes: bool = True) -> Word:
    """Return the word behind an operator.

    quoted : True if it is read as in double quotes; quotes : True if those inside are removed.
    """
    scanner = scanner_of(text, path, 1)
    if not quoted:
        return scanner.word("")
    return scanner.quoted_word(quotes=quotes)


_glob = lru_cache(maxsize=1024)(lambda text, extended: glob_pattern(text, extended=extended))


def _slash(text: str) -> int:
    """Return the position of the `/` between a pattern and its replacement, or the length."""
    scanner = scanner_of(text, "", 1)
    while scanner.at < len(text) and text[scanner.at] != "/":
        if text[scanner.at] in "\\'\"$`":
            character = text[scanner.at]
            if character == "\\":
                scanner.at += 2
            elif character in "$`":
                scanner._dollar(quoted=False)
            else:
                end = text.find(character, scanner.at + 1)
                scanner.at = len(text) if end < 0 else end + 1
        else:
            scanner.at += 1
    return min(scanner.at, len(text))


def _source(piece: Piece) -> str:
    """Return the text of a piece of an index, quoted again so that it is read the same."""
    if piece.kind == "text" and piece.quoted:
        return re.sub(r"[^\w,.:/-]", r"\\\g<0>", piece.text)
    return f'"{piece.text}"' if piece.quoted else piece.text
