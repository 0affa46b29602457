"""Words of bash scripts before expansion: quotes, expansions, redirections and here-documents.

`search.engines.text.shell_syntax` parses words into statements.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from autopar.errors import DocumentError

if TYPE_CHECKING:
    from search.engines.text.shell_syntax import Body

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(
    rf"({NAME})(?:\[((?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*)\])?(\+?)=", re.DOTALL
)
"""Pattern of name, index, `+` and `=` before an assigned value."""
HOLES = "\U000f0000-\U000ffffd"
"""Range of characters that stand for values known only at run time; scripts cannot contain them."""

_BLANK = " \t"
_META = " \t\n;&|<>()"
_REDIRECT = re.compile(r"([0-9]*)(<<<|<<-?|<>|<&|>>|>&|>\||<|>)|(&>>?)")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`]+")
_IN_QUOTES = re.compile(r'[^"\\$`]+')
_IN_TEXT = re.compile(r"[^\\$`]+")
_BRACES_EXPAND = re.compile(r"\{[^{}]*(,|\.\.)[^{}]*\}")
"""Pattern of braces that bash expands where quotes within quotes close the outer ones."""
_VARIABLE = re.compile(rf"\$(?:{NAME}|[0-9@*#?$!-])")
_TILDE = re.compile(r"~[\w.+-]*(?=/|$)")
_TILDE_IN_VALUE = re.compile(r"(?<=[=:])~[\w.+-]*(?=[/:]|$)")
_A_HOLE = re.compile(f"[{HOLES}]")
_ESCAPE = re.compile(
    r"\\(?:([abeEfnrtv\\'\"?])|([0-7]{1,3})|x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})"
    r"|U([0-9a-fA-F]{1,8}))"
)
_ESCAPED = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))


def refusal(path: str, line: int, what: str, remedy: str = "Write the value") -> DocumentError:
    """Return the error for a construct of bash that is not interpreted."""
    shown = " ".join(what.split())
    return DocumentError(path, f"line {line}: {shown} is not read", remedy=remedy)


def shadowed(found: Path, other: Path) -> str:
    """Return a note that `found` is read if `other`, of the working folder, is another file.

    The note is empty if there is no other file, or if it has the same content.
    """
    with suppress(OSError, ValueError):
        both = other.is_file() and found.is_file() and not other.samefile(found)
        if both and not cmp(found, other, shallow=False):
            return f"{found} is read, not {other} of the working folder"
    return ""


class Piece(NamedTuple):
    kind: str
    """Type of the piece: text, parameter, command, arithmetic, tilde,
    process or unread."""
    text: str
    quoted: bool
    body: Body | None = None
    """Statements of a command or process substitution; None for other pieces."""


class Word(NamedTuple):
    pieces: tuple[Piece, ...]
    line: int
    items: tuple[Word, ...] | None = None
    """Items of an array assignment, whose `pieces` are the name and `=`; None for other words."""

    @property
    def bare(self) -> str | None:
        """Text of the word; None if a part of it is quoted or expanded."""
        if all(piece.kind == "text" and not piece.quoted for piece in self.pieces):
            return "".join(piece.text for piece in self.pieces)
        return None

    @property
    def written(self) -> str:
        """Text of the word without quotes, before expansion."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class Redirect:
    """Redirection of a file descriptor."""

    descriptor: str
    """Number before the operator; empty if there is none."""
    operator: str
    word: Word
    """Target, or the text of a here-document or here-string."""


def plain_text(pieces: tuple[Piece, ...] | list[Piece]) -> str:
    """Return the text of pieces, with a NUL character for each quoted or expanded piece."""
    return "".join(p.text if p.kind == "text" and not p.quoted else "\0" for p in pieces)


def unescaped(text: str) -> str | None:
    r"""Return the text of `$'...'` with escapes such as `\n` replaced; None for other escapes."""
    done, at = list[str](), 0
    while (start := text.find("\\", at)) >= 0:
        match = _ESCAPE.match(text, start)
        if match is None:
            return None
        done.append(text[at:start])
        letter, octal, *hexes = match.groups()
        code = int(octal, 8) if octal else int(next((h for h in hexes if h), "0"), 16)
        if not letter and (not 0 < code < 0xD800 or (code > 127 and match[4] is match[5] is None)):
            return None  # bytes of a longer character, or the end of the text
        done.append(_ESCAPED[letter] if letter else chr(code))
        at = match.end()
    return "".join(done) + text[at:]


class Scanner:
    """Tokenizer of words and operators; comments are skipped."""

    def __init__(
        self,
        text: str,
        path: str,
        first_line: int = 1,
        commands: Callable[[Scanner, str], Body] | None = None,
    ) -> None:
        self.text, self.path, self.at, self.first_line = text, path, 0, first_line
        self._commands = commands
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._documents: list[tuple[str, bool, bool, Redirect]] = []
        self.redirects: list[Redirect] = []
        """Redirections since the parser last took them."""
        self.extended = -1
        """Line of `shopt -s extglob`; -1 if patterns such as `@(a|b)` are not on."""
        self.depth = 0
        """Number of statements around the current position."""
        self.ended = False
        """True if the text of a command substitution ended without its bracket."""

    def line(self, at: int | None = None) -> int:
        return self.first_line + bisect_right(self._newlines, (self.at if at is None else at) - 1)

    def skip_blanks(self, blanks: str = _BLANK) -> None:
        """Move past blanks and continued lines."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in blanks:
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            else:
                return

    def token(self) -> Word | str:
        """Return the next word or operator; "" at the end of the text."""
        text = self.text
        while True:
            self.skip_blanks()
            if self.at >= len(text):
                return ""
            character = text[self.at]
            if character == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith(("<(", ">("), self.at):
                return self.word()
            elif match := _REDIRECT.match(text, self.at):
                self._redirect(match)
            elif character == "\n":
                self.at += 1
                self._skip_documents()
                return "\n"
            elif character in ";&|()":
                long = (";;&", "&&", "||", ";;", ";&", "|&")
                found = next((one for one in long if text.startswith(one, self.at)), character)
                self.at += len(found)
                return found
            else:
                return self.word()

    def _redirect(self, match: re.Match[str]) -> None:
        at, self.at = self.at, match.end()
        self.skip_blanks()
        if self.at >= len(self.text) or (
            self.text[self.at] in "\n;&|<>()" and not self.text.startswith(("<(", ">("), self.at)
        ):
            self.refuse(f"`{match[0]}` without a file", at)
        operator = match[2] or match[3]
        if operator in ("<<", "<<-"):
            word = self.word()
            end = "".join(piece.text for piece in word.pieces)
            literal = any(piece.quoted for piece in word.pieces)
            found = Redirect(match[1] or "", "<<", word)
            self._documents.append((end, literal, operator == "<<-", found))
        else:
            found = Redirect(match[1] or "", operator, self.word())
        self.redirects.append(found)

    def _skip_documents(self) -> None:
        """Skip the lines of each pending here-document, which become its redirection's text."""
        documents, self._documents = self._documents, []
        for end, literal, tabs, redirect in documents:
            first, lines = self.line(), list[str]()
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = stop + 1
                line = line.lstrip("\t") if tabs else line
                if line == end:
                    break
                lines.append(line + "\n")
            text = "".join(lines)
            if literal:
                redirect.word = Word((Piece("text", text, quoted=True),), first)
            else:
                inner = Scanner(text, self.path, first, self._commands)
                pieces: tuple[Piece, ...] = (Piece("unread", text, quoted=True),)
                with suppress(DocumentError):  # bash reports such a text only if it is read
                    pieces = tuple(inner._quoted_pieces(0, ""))
                redirect.word = Word(pieces, first)
        self.at = min(self.at, len(self.text))

    def word(self, stop: str = _META, *, item: bool = False) -> Word:
        """Return the word from the current position up to a character of `stop`.

        item : True for an item of an array assignment, which may start with `[key]=`.
        """
        text, first, pieces = self.text, self.line(), list[Piece]()
        begin, index_end = self.at, self._index_end(item=item) if stop == _META else 0
        while self.at < len(text) and (text[self.at] not in stop or self.at < index_end):
            start, character = self.at, text[self.at]
            if character == "\\":
                self.at = min(self.at + 2, len(text))
                if text[start + 1 : start + 2] != "\n":
                    pieces.append(Piece("text", text[start + 1 : start + 2] or "\\", quoted=True))
            elif character == "'":
                end = text.find("'", start + 1)
                if end < 0:
                    raise self._unclosed("'", start)
                pieces.append(Piece("text", text[start + 1 : end], quoted=True))
                self.at = end + 1
            elif character == '"' or text.startswith('$"', start):
                self.at += 1 + (character == "$")
                pieces.append(Piece("text", "", quoted=True))
                pieces += self._quoted_pieces(start)
            elif character in "$`":
                pieces.append(self._dollar(quoted=False))
            else:
                match = None if start < index_end else _PLAIN.match(text, start)
                self.at = match.end() if match else start + 1
                pieces.append(Piece("text", text[start : self.at], quoted=False))
                if stop == _META:
                    if text.startswith("(", self.at) and self.at >= index_end:
                        if ASSIGNMENT.fullmatch(plain_text(pieces)):
                            return Word(tuple(pieces), first, self._items())
                        if text[self.at - 1] in "?*+@!":
                            pieces += self._group()
                    if text.startswith(("<", ">"), self.at) and re.fullmatch(
                        rf"\{{{NAME}\}}", text[begin : self.at]
                    ):
                        self.refuse(f"`{text[begin : self.at]}{text[self.at]}`", begin)
        if stop == _META and text.startswith(("<(", ">("), self.at) and not pieces:
            start = self.at
            self.at += 2
            body = self._substituted()
            pieces.append(Piece("process", text[start : self.at], False, body))
            pieces += self.word().pieces
        return Word(_tilded(pieces) if stop == _META else tuple(pieces), first)

    def _index_end(self, *, item: bool) -> int:
        """Return the end of `NAME[index]=` or `[index]=` at the current position; 0 otherwise."""
        match = re.compile(r"\[" if item else rf"{NAME}\[").match(self.text, self.at)
        if match is None:
            return 0
        end = closing(self.text, match.end() - 1)
        return end if self.text.startswith(("=", "+="), end) else 0

    def _group(self) -> Iterator[Piece]:
        """Yield the pieces of an extended pattern such as `(a|b)`, at the current position."""
        if not 0 <= self.extended < self.line():
            self.refuse(f"`{self.text[self.at - 1 :][:20]}` without `shopt -s extglob`")
        start, depth = self.at, 0
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "()|":
                depth += (character == "(") - (character == ")")
                self.at += 1
                yield Piece("text", character, quoted=False)
                if depth == 0:
                    return
            else:
                yield from self.word("()|\n").pieces
                if self.text.startswith("\n", self.at):
                    break
        raise self._unclosed("(", start)

    def _items(self) -> tuple[Word, ...]:
        """Return the words of `(...)` after `NAME=`."""
        start, items = self.at, list[Word]()
        self.at += 1
        while True:
            self.skip_blanks(" \t\n")
            if self.text.startswith("[", self.at):
                items.append(self.word(item=True))
                continue
            token = self.token()
            if token == ")":
                return tuple(items)
            if token == "":
                raise self._unclosed("(", start)
            if isinstance(token, Word):
                items.append(token)
            elif token != "\n":
                self.refuse(f"`{token}` in an array", self.at - 1)

    def _quoted_pieces(self, opened: int, closes: str = '"') -> Iterator[Piece]:
        """Yield pieces up to a double quote, or with an empty `closes` up to the end of the text.

        The latter is how here-documents, arithmetic and defaults in double quotes are expanded.
        """
        text, plain = self.text, _IN_QUOTES if closes else _IN_TEXT
        escapes = '$`"\\' if closes else "$`\\"
        while self.at < len(text) and (not closes or text[self.at] != closes):
            start = self.at
            if text[start] == "\\":
                self.at += 2
                after = text[start + 1 : start + 2]
                # Before other characters, the backslash is literal.
                kept = "" if after == "\n" else after if after in escapes else "\\" + after
                yield Piece("text", kept or ("" if after else "\\"), quoted=True)
            elif text[start] in "$`":
                yield self._dollar(quoted=True)
            else:
                match = plain.match(text, start)
                self.at = match.end() if match else start + 1
                yield Piece("text", text[start : self.at], quoted=True)
        if closes:
            if self.at >= len(text):
                raise self._unclosed('"', opened)
            self.at += 1

    def quoted_word(self, *, quotes: bool = False) -> Word:
        """Return the rest of the text as a word in double quotes.

        quotes : True if double quotes inside are removed, as in a default; False if they stay.
        """
        if not quotes:
            return Word(tuple(self._quoted_pieces(0, "")), self.line())
        self.text += '"'
        pieces = list[Piece]()
        while self.at < len(self.text):
            pieces += self._quoted_pieces(0)
        return Word(tuple(pieces), self.line())

    def _dollar(self, *, quoted: bool) -> Piece:
        """Return the expansion that starts with `$` or a backquote at the current position."""
        text, start = self.text, self.at
        if text[start] == "`":
            match = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL).match(text, start)
            if match is None:
                raise self._unclosed("`", start)
            self.at = match.end()
            inner = re.sub(r'\\([$`\\"])' if quoted else r"\\([$`\\])", r"\1", match[1])
            scanner = Scanner(inner, self.path, self.line(start), self._commands)
            return Piece("command", match[0], quoted, scanner._statements(""))
        if text.startswith("$((", start):
            end = closing(text, start + 1)
            if end and text[end - 2 : end] == "))" and closing(text, start + 2) == end - 1:
                self.at = end
                return Piece("arithmetic", text[start + 3 : end - 2], quoted)
        if text.startswith("$(", start):
            self.at += 2
            body = self._substituted()
            return Piece("command", text[start : self.at], quoted, body)
        if text.startswith("${", start):
            self.at += 2
            if text.startswith((" ", "\t", "\n", "|"), self.at):
                self.refuse("`${ command; }`", start)
            self._past_brace(start, quoted=quoted)
            return Piece("parameter", text[start : self.at], quoted)
        if text.startswith("$[", start):
            end = closing(text, start + 1)
            if not end:
                raise self._unclosed("$[", start)
            self.at = end
            return Piece("arithmetic", text[start + 2 : end - 1], quoted)
        match = _VARIABLE.match(text, start)
        if match is not None:
            self.at = match.end()
            if re.fullmatch(NAME, match[0][1:]) and _A_HOLE.match(text, self.at):
                self.refuse(f"a name that an unknown value continues: {match[0]}", start)
            return Piece("parameter", match[0], quoted)
        if not quoted and text.startswith("$'", start):
            match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(text, start)
            if match is None:
                raise self._unclosed("'", start)
            self.at = match.end()
            found = unescaped(match[1])
            if found is None:
                self.refuse(f"the escape in {match[0][:40]}", start)
            return Piece("text", found, True)
        self.at += 1
        return Piece("text", "$", quoted)

    def _past_brace(self, start: int, *, quoted: bool) -> None:
        """Move past the `}` that closes the `${` at `start`."""
        text = self.text
        # Single quotes are literal in a default in double quotes, and quote in a pattern; a `}`
        # between them closes neither.
        match = re.compile(rf"[#!]?(?:{NAME}|[0-9]+|.)(?:\[[^\]]*\])?:?[-=?+]").match(text, self.at)
        literal = quoted and match is not None
        while self.at < len(text):
            character = text[self.at]
            if character == "}":
                self.at += 1
                return
            if character == "\\":
                self.at += 2
            elif character == "'":
                end = text.find("'", self.at + 1)
                if literal and end < 0:
                    self.refuse("an apostrophe in a default in double quotes", start)
                self.at = len(text) if end < 0 else end + 1
            elif character == '"':
                opened = self.at
                self.at += 1
                for _ in self._quoted_pieces(opened):
                    pass
                if quoted and _BRACES_EXPAND.search(text, opened, self.at):
                    self.refuse("braces in double quotes within double quotes", start)
            elif character in "$`":
                self._dollar(quoted=literal)
            else:
                self.at += 1
        raise self._unclosed("${", start)

    def _substituted(self) -> Body:
        """Return the statements up to the `)` of a command substitution, and move past it."""
        start, redirects = self.at, self.redirects
        documents, self._documents, self.redirects = self._documents, [], []
        body = self._statements(")")
        if self.ended:
            raise self._unclosed("$(", start - 2)
        self._documents, self.redirects = documents + self._documents, redirects
        return body

    def _statements(self, closes: str) -> Body:
        assert self._commands is not None, "texts with commands are scanned for a parser"
        return self._commands(self, closes)

    def _unclosed(self, what: str, at: int) -> DocumentError:
        problem = f"the {what} on line {self.line(at)} is not closed, expected a shell script"
        return DocumentError(self.path, problem)

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        """Raise DocumentError for a construct; at : position, default the current one."""
        raise refusal(self.path, self.line(at), what)


def closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`; 0 if there is none.

    Brackets in quotes do not count.
    """
    opens = text[start]
    closes = {"(": ")", "[": "]", "{": "}"}[opens]
    depth, at = 0, start
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character in "'\"":
            at = text.find(character, at + 1)
            if at < 0:
                return 0
        elif character == opens:
            depth += 1
        elif character == closes:
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return 0


def split_bounds(text: str) -> list[str]:
    """Return the parts of `start:length`, split outside brackets, `?:` and expansions."""
    parts, depth, start, asked = list[str](), 0, 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        asked += character == "?"
        if character == ":" and depth == 0:
            if asked:
                asked -= 1
            else:
                parts.append(text[start:at])
                start = at + 1
    return [*parts, text[start:]]


def _tilded(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of a word, with `~` that bash expands as separate pieces."""
    if "~" not in plain_text(pieces):
        return tuple(pieces)
    done = list[Piece]()
    value = ASSIGNMENT.match(plain_text(pieces)) is not None
    for index, piece in enumerate(pieces):
        last = index + 1 == len(pieces)
        if piece.kind != "text" or piece.quoted:
            done.append(piece)
            continue
        at = 0
        found = [m for m in [_TILDE.match(piece.text)] if m and index == 0]
        found += [*_TILDE_IN_VALUE.finditer(piece.text)] if value else []
        for match in found:
            if match.end() == len(piece.text) and not last:
                continue
            done.append(Piece("text", piece.text[at : match.start()], False))
            done.append(Piece("tilde", match[0], False))
            at = match.end()
        done.append(Piece("text", piece.text[at:], False))
    return tuple(p for p in done if p.text or p.quoted)
