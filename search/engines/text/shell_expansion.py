"""Expansion of words by the rules of bash: braces, splitting at IFS, patterns of files.

Values known only at run time become holes, with the text of the script.
`search.engines.text.shell_parameters` provides the values of variables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from autopar.errors import DocumentError
from search.engines.text.shell_values import Budget, Hole, Holes, Shell, is_open, with_arguments
from search.engines.text.shell_words import NAME, Piece, Word, plain_text, refusal

_BRACES = re.compile(
    r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})(?:\.\.(-?[0-9]{1,9}))?|"
    r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?[0-9]{1,9}))?"
)
_GLOB = re.compile(r"[*?]|\[[^\]]*\]")
_GROUPS = re.compile(r"[?*+@!]\(")
_SPECIAL = re.compile(r"[][*?\\(){}|+@!.^$]")


class Words:
    """Expansion of words, with a record of the unset variables that affect it."""

    def __init__(self, path: str, budget: Budget, *, blank: bool = True) -> None:
        self.path, self.budget, self.holes = path, budget, Holes(path)
        self._blank = blank
        """True if unset variables are empty in conditions; False if they are unknown."""
        self.line = 0
        """Line of the current statement."""
        self.assigned: set[str] = set()
        """Names that the script assigns in any branch."""
        self.removed: set[str] = set()
        """Names that `unset` removed."""
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
        self.needs_arguments = self.ended = 0
        """Number of positional parameters that the script reads and that are not given."""
        self.counted: set[str] = set()
        """Holes of values without quotes, which count as one word each."""
        self.files: set[str] = set()
        """Words with `*`, `?` or `[...]`, taken as written."""
        self.left_out: dict[str, None] = {}
        """Sentences on ignored words and on words known only at run time, as ordered keys."""
        self._spliced: Word | None = None
        """Text behind an operator with quoted parts that the last value is."""
        self.substituted: int | None = 0
        """Exit status of the last command substitution; None if known only at run time."""

    def _items(
        self, shell: Shell, piece: Piece, unset: str | None
    ) -> tuple[Sequence[str], bool | None]:
        """Return (values of a piece, True if `*` joins them); only lists have several or none."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------
    # Holes and refusals.

    def hole(self, written: str, *, why: str = "", many: int = 0) -> str:
        """Return the text of a value known only at run time."""
        return self.holes.character(Hole(written, why, many))

    def unread(self, written: str) -> str:
        """Return the text of a construct that is not interpreted; a launch with it is refused."""
        return self.holes.character(Hole(written, refused=f"`{written[:60]}`", line=self.line))

    def refuse(self, what: str) -> DocumentError:
        remedy = "Write the value"
        if "`set -u`" in what:
            remedy = "Give it with --env"
        elif self.needs_arguments:
            remedy = with_arguments(self.needs_arguments)
        return refusal(self.path, self.line, self.holes.shown(what), remedy)

    # ----------------------------------------------------------------------------------------------
    # Words.

    def _text(self, shell: Shell, word: Word, *, unset: str | None = None) -> str:
        """Return the expansion of a word without splitting, as in an assigned value.

        unset : text for unset variables; None leaves them open.
        """
        if len(word.pieces) == 1 and word.pieces[0].kind == "text":
            return word.pieces[0].text
        parts = list[str]()
        for piece in word.pieces:
            items, joined = self._items(shell, piece, unset)
            separator = self._ifs(shell)[:1] if joined else " "
            as_is = separator if joined else is_plain_list(piece)
            if len(items) > 1 and not as_is:
                self.needs_blank(shell, piece.text)
            parts.append(separator.join(items))
        self._spliced = None
        found = "".join(parts)
        self.budget.size(len(found))
        return found

    def pattern_text(self, shell: Shell, word: Word, *, unset: str | None = None) -> str:
        """Return a pattern with a backslash before each quoted character."""
        parts = list[str]()
        for piece in word.pieces:
            text = self._text(shell, Word((piece,), word.line), unset=unset)
            parts.append(_SPECIAL.sub(r"\\\g<0>", text) if piece.quoted else text)
        return "".join(parts)

    def _fields(self, shell: Shell, word: Word, *, unset: str | None = None) -> list[str]:
        """Return the words of an expanded word, split at the characters of IFS.

        unset : text for unset variables; None leaves them open.
        """
        if len(word.pieces) == 1 and word.pieces[0].kind == "text" and word.pieces[0].quoted:
            return [word.pieces[0].text]
        done = list[str]()
        for one in self._braced(word):
            done += self._split_word(shell, one, unset)
        self.budget.size(len(done))
        return done

    def _split_word(self, shell: Shell, word: Word, unset: str | None) -> list[str]:
        done, glob = list[str](), False
        current: list[str] | None = None
        none = False
        if _GROUPS.search(plain_text(word.pieces)):
            raise self.refuse(f"the pattern {word.written[:40]}")

        def end() -> None:
            nonlocal current, glob
            if current is not None:
                text = "".join(current)
                self.budget.size(len(text))
                done.append(self._globbed(shell, text) if glob else text)
            current, glob = None, False

        pieces = [*word.pieces]
        self._spliced = None
        while pieces:
            piece = pieces.pop(0)
            if piece.kind == "text":
                if piece.text or piece.quoted:
                    current = current or []
                    open_ = not piece.quoted and is_open(piece.text)  # in a text of `eval`
                    if open_ and any(h.many == 1 and not h.why for h in self.holes.of(piece.text)):
                        raise self.refuse(f"{piece.text[:40]}, split again,")
                    current.append(self.holes.after_split(piece.text) if open_ else piece.text)
                    glob = glob or (not piece.quoted and _GLOB.search(piece.text) is not None)
                continue
            items, _ = self._items(shell, piece, unset)
            if self._spliced is not None:
                # Quoted parts of a default are not split.
                pieces, self._spliced = [*self._spliced.pieces, *pieces], None
                continue
            none = none or (not items and piece.quoted)
            if len(items) > 1 and not piece.quoted and not self._ifs(shell).isspace():
                self._plain_list(shell, items, piece)
            for index, item in enumerate(items):
                if index:
                    end()
                if piece.quoted or piece.kind in ("tilde", "process"):
                    current = current or []
                    current.append(item)
                    continue
                value = item
                if is_open(value):
                    value = self.holes.after_split(value)
                    if self.may_split(shell, value):
                        value = self.unread(self.holes.shown(value))
                    self.counted.update(c for c in value if is_open(c))
                for text in self._split(shell, value):
                    if text is None:
                        end()
                    elif text == "\0":  # a separator that is not a blank ends even an empty word
                        current = current or []
                        end()
                    elif text:
                        current = current or []
                        current.append(text)
                        glob = glob or _GLOB.search(text) is not None
        if current is not None and not (none and not done and not any(current)):
            end()
        return done

    def uncertain(self, value: str) -> bool:
        """Return True if a value may be no word, or several."""
        return value in self.files or any(
            character in self.counted or hole.many == 2 or hole.refused
            for character in value
            for hole in self.holes.of(character)
        )

    def unplaced(self, value: str) -> bool:
        """Return True for the unquoted result of a construct that is not interpreted.

        It may be no word or several, which shifts the words after it.
        """
        return any(
            character in self.counted and hole.refused
            for character in value
            for hole in self.holes.of(character)
        )

    def _plain_list(self, shell: Shell, items: Sequence[str], piece: Piece) -> None:
        """Refuse an unquoted list where IFS decides about empty items, ends and joins."""
        written = piece.text
        ends = tuple(c for c in self._ifs(shell) if not c.isspace())
        odd = not all(items) or any(one in item for item in items for one in ends)
        if odd or (self._ifs(shell) == "" and not written.endswith(("[@]}", "$@"))):
            raise self.refuse(f"{written} with this IFS")

    def _globbed(self, shell: Shell, text: str) -> str:
        """Return a word with a pattern of files: as written, as where none matches."""
        if "f" in shell.options:
            return text
        if "failglob" in shell.options:
            raise self.refuse(f"{text[:40]} with `shopt -s failglob`")
        if "nullglob" in shell.options:
            unread = self.unread(text)
            self.counted.add(unread)
            return unread
        self.files.add(text)
        return text

    def needs_blank(self, shell: Shell, written: str) -> None:
        """Refuse a list that bash joins with a blank or with IFS, depending on the operator."""
        if self._ifs(shell)[:1] != " ":
            raise self.refuse(f"{written[:40]}, a list with this IFS,")

    def _ifs(self, shell: Shell) -> str:
        variable = shell.variables.get("IFS")
        text = " \t\n" if variable is None or variable.value is None else variable.text() or ""
        if is_open(text):
            raise self.refuse("IFS with a value known only at run time")
        return text

    def _split(self, shell: Shell, value: str) -> list[str | None]:
        """Return the parts of an unquoted value; None for blanks, NUL for another separator."""
        return split_at(value, self._ifs(shell))

    def may_split(self, shell: Shell, text: str) -> bool:
        """Return True if this IFS or `nullglob` may split a value that counts as one word.

        It is the folder of `~`, or a value that a condition or a loop decides.
        """
        ifs = self._ifs(shell)
        odd = bool(ifs.strip())
        if not odd and not {"nullglob", "failglob"} & shell.options:
            return False
        return any(
            (self._is_decided(hole) and (odd or hole.why))
            or ("/" in ifs and hole.written.startswith("~"))
            for hole in self.holes.of(text)
        )

    def _is_decided(self, hole: Hole) -> bool:
        """Return True for a value of the script that a condition or a loop decides."""
        name = re.match(rf"\$\{{?({NAME})", hole.written)
        return name is not None and name[1] in self.assigned

    # ----------------------------------------------------------------------------------------------
    # Braces.

    def _braced(self, word: Word) -> list[Word]:
        """Return the words of `a{b,c}` and `a{1..3}`; a word without braces is itself."""
        if "{" not in plain_text(word.pieces):
            return [word]
        atoms = list[str | Piece]()
        for piece in word.pieces:
            whole = piece.kind != "text" or piece.quoted
            atoms += [piece] if whole else [*piece.text]
        found = list[Word]()
        for one in self._alternatives(atoms):
            pieces = list[Piece]()
            for atom in one:
                if isinstance(atom, Piece):
                    pieces.append(atom)
                elif pieces and _joins(pieces[-1], atom):
                    raise self.refuse(f"a name that braces join: {pieces[-1].text}{atom}")
                elif pieces and pieces[-1].kind == "text" and not pieces[-1].quoted:
                    pieces[-1] = pieces[-1]._replace(text=pieces[-1].text + atom)
                else:
                    pieces.append(Piece("text", atom, False))
            if pieces:
                found.append(Word(tuple(pieces), word.line))
        return found

    def _alternatives(self, atoms: list[str | Piece]) -> list[list[str | Piece]]:
        for start, atom in enumerate(atoms):
            if atom != "{":
                continue
            depth, commas, end = 0, [start], 0
            for at in range(start, len(atoms)):
                depth += (atoms[at] == "{") - (atoms[at] == "}")
                if depth == 1 and atoms[at] == ",":
                    commas.append(at)
                if depth == 0:
                    end = at
                    break
            self.budget.work(len(atoms))
            if not end:
                continue
            inner = atoms[start + 1 : end]
            choices: list[list[str | Piece]] = []
            if len(commas) > 1:
                for one, other in zip(commas, [*commas[1:], end], strict=True):
                    choices += self._alternatives(atoms[one + 1 : other])
            elif all(isinstance(atom, str) for atom in inner):
                choices = [[*text] for text in self._range("".join(map(str, inner)))]
            if choices:
                tails = self._alternatives(atoms[end + 1 :])
                self.budget.size(len(choices) * len(tails))
                return [[*atoms[:start], *one, *tail] for one in choices for tail in tails]
        return [atoms]

    def _range(self, text: str) -> list[str]:
        match = _BRACES.fullmatch(text)
        if match is None:
            return []
        first, last, by, letter, to, by_letters = match.groups()
        low, high = (ord(letter), ord(to)) if letter else (int(first), int(last))
        step = abs(int(by or by_letters or 1)) or 1
        self.budget.size(abs(high - low) // step + 1)
        values = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
        if letter:
            return [chr(value) for value in values]
        padded = any(re.match("-?0[0-9]", end) for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        return [f"{value:0{width}d}" for value in values]


def _joins(piece: Piece, atom: str) -> bool:
    """Return True if a character behind a brace expansion belongs to a name: `$A{b,c}` is `$Ab`."""
    named = piece.kind == "parameter" and re.fullmatch(rf"\${NAME}", piece.text)
    return bool(named) and re.fullmatch("[A-Za-z0-9_]", atom) is not None


@lru_cache(maxsize=64)
def _separators(ifs: str) -> re.Pattern[str] | None:
    blanks = "".join(c for c in ifs if c in " \t\n")
    others = re.escape("".join(c for c in ifs if c not in " \t\n"))
    blank = f"[{blanks}]" if blanks else "(?!)"
    if not ifs:
        return None
    return re.compile(f"({blank}*[{others}]{blank}*)|{blank}+" if others else f"((?!))|{blank}+")


def is_plain_list(piece: Piece) -> bool:
    """Return True for `$@` and `${NAME[@]}` without an operator."""
    return re.fullmatch(rf"\$@|\$\{{(@|{NAME}\[@\])\}}", piece.text) is not None


def is_list(piece: Piece) -> bool:
    """Return True for `$@` and `${NAME[@]}`, also with an operator."""
    return re.match(rf"\$@|\$\{{!?(@|{NAME}\[@\])", piece.text) is not None


def split_at(value: str, ifs: str) -> list[str | None]:
    """Return the parts of a text: None for separating blanks, NUL for another separator."""
    pattern = _separators(ifs)
    if pattern is None:
        return [value]
    found, at = list[str | None](), 0
    for match in pattern.finditer(value):
        if match.start() > at:
            found.append(value[at : match.start()])
        found.append(None if match[1] is None else "\0")
        at = match.end()
    if at < len(value):
        found.append(value[at:])
    return found
