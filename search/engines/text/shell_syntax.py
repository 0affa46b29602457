"""Parser for the part of bash that launch scripts use: text -> words and statements.

Nothing is expanded or run. Coprocesses and `select` are not supported. Redirections are skipped,
except here-strings (`<<<`) and here-documents (`<<END`), which become the input of a command.
`search.engines.text.shell` runs the statements.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from autopar.errors import DocumentError

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(rf"({NAME})(?:\[([^\]]*)\])?(\+?)=", re.DOTALL)
"""Pattern of name, index, `+` and `=` before an assigned value."""
DEEPEST = 40
"""Maximum nesting depth of statements, function calls and evaluated texts."""

_BLANK = " \t\r"
_META = " \t\r\n;&|<>()"
_REDIRECT = re.compile(r"[0-9]*(?:<<<|<<-?|<>|<&|>>|>&|>\||<|>)|&>>?")
_PLAIN = re.compile(r"[^\s;&|<>()\\'\"$`]+")
_IN_QUOTES = re.compile(r'[^"\\$`]+')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BACKQUOTED = re.compile(r"`(?:[^`\\]|\\.)*`", re.DOTALL)
_ANSI = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_VARIABLE = re.compile(rf"\$(?:{NAME}|[0-9@*#?$!-])")


def parse(text: str, path: str, first_line: int = 1) -> tuple[Body, set[str]]:
    """Return the statements of a script, and the variable names that any statement assigns.

    path, first_line : file and number of the first line, for errors. Raises DocumentError with the
    line of unsupported syntax.
    """
    parser = _Parser(text + "\n", path, first_line)
    return parser.script(), parser.assigned


# --------------------------------------------------------------------------------------------------
# Words between blanks, before expansion.


class Piece(NamedTuple):
    kind: str
    """Type of the piece: text, parameter, command or arithmetic."""
    text: str
    quoted: bool


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


class Scanner:
    """Tokenizer for words and operators; comments and redirections are skipped."""

    def __init__(self, text: str, path: str, first_line: int = 1) -> None:
        self.text, self.path, self.at, self.first_line = text, path, 0, first_line
        self._newlines = [match.start() for match in re.finditer("\n", text)]
        self._documents: list[tuple[str, bool, list[Word]]] = []
        self.fed: list[Word] = []
        """Text of the last `<<<` or `<<END`, until the parser assigns it to a command."""

    def line(self, at: int | None = None) -> int:
        return self.first_line + bisect_right(self._newlines, (self.at if at is None else at) - 1)

    def token(self) -> Word | str:
        """Return the next word or operator; "" at the end of the text."""
        text = self.text
        while self.at < len(text):
            character = text[self.at]
            if character in _BLANK or text.startswith("\\\n", self.at):
                self.at += 1 if character in _BLANK else 2
            elif character == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif match := _REDIRECT.match(text, self.at):
                self._redirect(match)
            elif character == "\n":
                self.at += 1
                self._skip_documents()
                return "\n"
            elif character in ";&|()":
                two = text[self.at : self.at + 2]
                found = two if two in ("&&", "||", ";;", ";&", "|&") else character
                self.at += len(found)
                return found
            else:
                return self.word()
        return ""

    def _redirect(self, match: re.Match[str]) -> None:
        self.at = match.end()
        if self.text.startswith("(", self.at) and match[0] in ("<", ">"):
            self.balanced("(", ")", self.at)
            return
        while self.at < len(self.text) and self.text[self.at] in _BLANK:
            self.at += 1
        if self.at >= len(self.text) or self.text[self.at] in "\n;&|<>()":
            if self.text.startswith("<(", self.at) or self.text.startswith(">(", self.at):
                self.at += 1
                self.balanced("(", ")", self.at)
            return
        word = self.word()
        if match[0] == "<<<":
            self.fed = [word]
        if match[0] in ("<<", "<<-"):
            self.fed = []  # filled when the lines of the document are reached
            end = "".join(piece.text for piece in word.pieces)
            quoted = any(piece.quoted for piece in word.pieces)
            self._documents.append((end, quoted, self.fed))

    def _skip_documents(self) -> None:
        """Skip the lines of each pending here-document, and append them to its command's input."""
        while self._documents:
            end, literal, reader = self._documents.pop(0)
            first, lines = self.line(), list[str]()
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[self.at : stop]
                self.at = stop + 1
                if line.strip() == end:
                    break
                lines.append(line)
            reader.append(self._document("\n".join(lines), first, literal=literal))

    def _document(self, text: str, line: int, *, literal: bool) -> Word:
        """Return the text of a here-document as a word.

        literal : True if its delimiter is quoted. Otherwise the text is expanded as in double
        quotes.
        """
        if not literal:
            with suppress(DocumentError):
                inner = Scanner('"' + text.replace('"', '\\"') + '"', self.path, line)
                return inner.word("")
        return Word((Piece("text", text, quoted=True),), line)

    def word(self, stop: str = _META) -> Word:
        """Return the word from the current position up to a character of `stop`."""
        text, first, pieces = self.text, self.line(), list[Piece]()
        while self.at < len(text) and text[self.at] not in stop:
            start, character = self.at, text[self.at]
            if character == "\\":
                self.at += 2
                if text[start + 1 : start + 2] != "\n":
                    pieces.append(Piece("text", text[start + 1 : start + 2], quoted=True))
            elif character == "'":
                end = text.find("'", start + 1)
                if end < 0:
                    raise self._unclosed("'", start)
                pieces.append(Piece("text", text[start + 1 : end], quoted=True))
                self.at = end + 1
            elif character == '"':
                self.at += 1
                pieces.append(Piece("text", "", quoted=True))
                pieces += self._in_quotes(start)
            elif character in "$`":
                pieces.append(self._dollar(quoted=False))
            else:
                match = _PLAIN.match(text, start)
                self.at = match.end() if match else start + 1
                pieces.append(Piece("text", text[start : self.at], quoted=False))
                if text.startswith("(", self.at) and ASSIGNMENT.fullmatch(plain_text(pieces)):
                    return Word(tuple(pieces), first, self._items())
        return Word(tuple(pieces), first)

    def _items(self) -> tuple[Word, ...]:
        """Return the words of `(...)` after `NAME=`."""
        start, items = self.at, list[Word]()
        self.at += 1
        while (token := self.token()) != ")":
            if token == "":
                raise self._unclosed("(", start)
            if isinstance(token, Word):
                items.append(token)
            elif token != "\n":
                self.refuse(token, self.at - 1)
        return tuple(items)

    def _in_quotes(self, opened: int) -> Iterator[Piece]:
        text = self.text
        while self.at < len(text) and text[self.at] != '"':
            start = self.at
            if text[start] == "\\":
                self.at += 2
                after = text[start + 1 : start + 2]
                # Before other characters, the backslash is literal.
                kept = "" if after == "\n" else after if after in '$`"\\' else "\\" + after
                yield Piece("text", kept, quoted=True)
            elif text[start] in "$`":
                yield self._dollar(quoted=True)
            else:
                match = _IN_QUOTES.match(text, start)
                self.at = match.end() if match else start + 1
                yield Piece("text", text[start : self.at], quoted=True)
        if self.at >= len(text):
            raise self._unclosed('"', opened)
        self.at += 1

    def _dollar(self, *, quoted: bool) -> Piece:
        """Return the expansion that starts with `$` or a backquote at the current position."""
        text, start = self.text, self.at
        if text[start] == "`":
            match = _BACKQUOTED.match(text, start)
            if match is None:
                raise self._unclosed("`", start)
            self.at = match.end()
            return Piece("command", match[0], quoted)
        if text.startswith("$((", start):
            inner = self.balanced("(", ")", start + 1)
            if inner.startswith("(") and inner.endswith(")"):
                return Piece("arithmetic", inner[1:-1], quoted)
            return Piece("command", text[start : self.at], quoted)
        if text.startswith("$(", start):
            self.balanced("(", ")", start + 1)
            return Piece("command", text[start : self.at], quoted)
        if text.startswith("${", start):
            self.balanced("{", "}", start + 1, quoted=quoted)
            return Piece("parameter", text[start : self.at], quoted)
        match = _VARIABLE.match(text, start)
        if match is not None:
            self.at = match.end()
            return Piece("parameter", match[0], quoted)
        if not quoted and text.startswith("$'", start):
            match = _ANSI.match(text, start)
            if match is None:
                raise self._unclosed("'", start)
            self.at = match.end()
            return Piece("text", match[1].encode().decode("unicode_escape", "replace"), True)
        self.at += 1
        return Piece("text", "$", quoted)

    def balanced(self, opens: str, closes: str, start: int, *, quoted: bool = False) -> str:
        """Return the text inside the bracket at `start`, and move past the closing bracket.

        quoted : True if quotes inside are literal. Raises DocumentError if it is not closed.
        """
        text, depth, at = self.text, 0, start
        while at < len(text):
            character = text[at]
            if character == "\\":
                at += 1
            elif character == "'" and not quoted:
                end = text.find("'", at + 1)
                if end < 0:
                    break
                at = end
            elif character == '"' and not quoted:
                match = _QUOTED.match(text, at)
                if match is None:
                    break
                at = match.end() - 1
            elif character == opens:
                depth += 1
            elif character == closes:
                depth -= 1
                if depth == 0:
                    self.at = at + 1
                    return text[start + 1 : at]
            at += 1
        raise self._unclosed("$" + opens if text[start - 1 : start] == "$" else opens, start)

    def _unclosed(self, what: str, at: int) -> DocumentError:
        problem = f"the {what} on line {self.line(at)} is not closed, expected a shell script"
        return DocumentError(self.path, problem)

    def refuse(self, what: str, at: int | None = None) -> NoReturn:
        """Raise DocumentError for unsupported syntax; at : position, default the current one."""
        raise _unread(self.path, self.line(at), what)


def plain_text(pieces: list[Piece]) -> str:
    """Return the text of pieces, with a NUL character for each quoted or expanded piece."""
    return "".join(p.text if p.kind == "text" and not p.quoted else "\0" for p in pieces)


def _unread(path: str, line: int, what: str) -> DocumentError:
    shown = "ends here" if what in ("", "\n") else f"continues with {what!r}"
    return DocumentError(
        path,
        f"line {line}: not a supported shell statement {shown}",
        remedy="Give the arguments in a plain script, YAML or JSON",
    )


# --------------------------------------------------------------------------------------------------
# Statements.


class Simple(NamedTuple):
    words: tuple[Word, ...]
    line: int
    fed: Sequence[Word] = ()
    """Input from `<<<` or `<<END`, as one word; empty if there is none."""


class Test(NamedTuple):
    words: tuple[Word | str, ...]
    """Words between `[[` and `]]`."""
    line: int


class Arithmetic(NamedTuple):
    text: str
    line: int


class If(NamedTuple):
    clauses: tuple[tuple[Body, Body], ...]
    otherwise: Body
    line: int


class Case(NamedTuple):
    word: Word
    clauses: tuple[tuple[tuple[Word, ...], Body], ...]
    line: int


class For(NamedTuple):
    name: str
    words: tuple[Word, ...]
    body: Body
    line: int


class Loop(NamedTuple):
    """Loop statement: `while`, `until`, or `for ((...))`."""

    first: str
    condition: Body
    until: bool
    body: Body
    step: str
    line: int


class Function(NamedTuple):
    name: str
    body: Body
    line: int


class Group(NamedTuple):
    body: Body
    apart: bool
    """True if the group runs in a subshell."""
    line: int


class Chain(NamedTuple):
    first: Statement
    rest: tuple[tuple[str, Statement], ...]
    line: int


class Not(NamedTuple):
    statement: Statement
    line: int


Statement = Simple | Test | Arithmetic | If | Case | For | Loop | Function | Group | Chain | Not
Body = tuple[Statement, ...]


class _Parser:
    """Recursive descent parser with one method for each type of statement."""

    def __init__(self, text: str, path: str, first_line: int = 1) -> None:
        self._scanner = Scanner(text, path, first_line)
        self.assigned: set[str] = set()
        self._next = self._scanner.token()
        self._depth = 0

    def script(self) -> Body:
        body = self._body(())
        if self._next != "":
            self._refuse()
        return body

    def _take(self) -> Word | str:
        token, self._next = self._next, self._scanner.token()
        if isinstance(token, Word) and (match := ASSIGNMENT.match(plain_text([*token.pieces]))):
            self.assigned.add(match[1])
        return token

    def _is(self, *operators: str) -> bool:
        return self._next in operators

    def _refuse(self) -> NoReturn:
        token = self._next
        if isinstance(token, Word):
            what = token.bare if token.bare is not None else plain_text([*token.pieces])
            raise _unread(self._scanner.path, token.line, what)
        self._scanner.refuse(token, self._scanner.at - len(token))

    def _keyword(self) -> str | None:
        return self._next.bare if isinstance(self._next, Word) else None

    def _expect(self, keyword: str) -> None:
        if self._keyword() != keyword and self._next != keyword:
            self._refuse()
        self._take()

    def _lines(self) -> None:
        while self._next in ("\n", ";", "&"):
            self._take()

    def _body(self, ends: tuple[str, ...]) -> Body:
        self._depth += 1
        if self._depth > DEEPEST:
            raise DocumentError(
                self._scanner.path, "is nested too deeply, expected a launch script"
            )
        body = list[Statement]()
        self._lines()
        while (
            self._next != ""
            and self._next not in (")", ";;", ";&")
            and (self._keyword() not in ends)
        ):
            body.append(self._chain())
            if self._next in ("|", "|&"):
                self._refuse()
            self._lines()
        self._depth -= 1
        return tuple(body)

    def _chain(self) -> Statement:
        line = self._scanner.line()
        first, rest = self._pipe(), list[tuple[str, Statement]]()
        while self._next in ("&&", "||"):
            operator = str(self._take())
            while self._next == "\n":
                self._take()
            rest.append((operator, self._pipe()))
        return Chain(first, tuple(rest), line) if rest else first

    def _pipe(self) -> Statement:
        line = self._scanner.line()
        if self._keyword() == "!":
            self._take()
            return Not(self._pipe(), line)
        found = [self._command()]
        while self._next in ("|", "|&"):
            self._take()
            while self._next == "\n":
                self._take()
            found.append(self._command())
        # Bash runs each part of a pipe in a subshell.
        return found[0] if len(found) == 1 else Group(tuple(found), True, line)

    def _command(self) -> Statement:
        line, scanner = self._scanner.line(), self._scanner
        if self._is("("):
            start = scanner.at
            if scanner.text.startswith("(", start):
                inner = scanner.balanced("(", ")", start - 1)
                if inner.startswith("(") and inner.endswith(")"):
                    self._next = scanner.token()
                    return Arithmetic(inner[1:-1], line)
                scanner.at = start  # a nested subshell
            self._take()
            body = self._body(())
            self._expect(")")
            return Group(body, True, line)
        keyword = self._keyword()
        if keyword in _KEYWORDS:
            return _KEYWORDS[str(keyword)](self, line)
        words = list[Word]()
        while isinstance(self._next, Word):
            words.append(self._next)
            self._take()
            if self._is("(") and len(words) == 1 and words[0].bare is not None:
                self._take()
                self._expect(")")
                return self._named(words[0].bare, line)
        if not words:
            self._refuse()
        fed, scanner.fed = scanner.fed, []
        return Simple(tuple(words), words[0].line, fed)

    def _named(self, name: str, line: int) -> Statement:
        while self._next == "\n":
            self._take()
        return Function(name, (self._command(),), line)

    def _function(self, line: int) -> Statement:
        self._take()
        name = self._take()
        if not isinstance(name, Word):
            self._refuse()
        if self._next == "(":
            self._take()
            self._expect(")")
        return self._named(name.bare or "", line)

    def _group(self, line: int) -> Statement:
        self._take()
        body = self._body(("}",))
        self._expect("}")
        return Group(body, False, line)

    def _test(self, line: int) -> Statement:
        self._take()
        words = list[Word | str]()
        while self._keyword() != "]]":
            if self._next == "":
                self._refuse()
            words.append(self._take())
        self._take()
        return Test(tuple(word for word in words if word != "\n"), line)

    def _if(self, line: int) -> Statement:
        clauses, otherwise = list[tuple[Body, Body]](), Body()
        keyword: str | None = "if"
        while keyword in ("if", "elif"):
            self._take()
            condition = self._body(("then",))
            self._expect("then")
            clauses.append((condition, self._body(("elif", "else", "fi"))))
            keyword = self._keyword()
        if keyword == "else":
            self._take()
            otherwise = self._body(("fi",))
        self._expect("fi")
        return If(tuple(clauses), otherwise, line)

    def _loop(self, line: int) -> Statement:
        until = self._keyword() == "until"
        self._take()
        condition = self._body(("do",))
        return Loop("", condition, until, self._do(), "", line)

    def _do(self) -> Body:
        self._lines()
        self._expect("do")
        body = self._body(("done",))
        self._expect("done")
        return body

    def _for(self, line: int) -> Statement:
        self._take()
        if self._next == "(":
            inner = self._scanner.balanced("(", ")", self._scanner.at - 1)
            self._next = self._scanner.token()
            parts = inner[1:-1].split(";")
            if len(parts) != 3 or not inner.startswith("("):
                raise _unread(self._scanner.path, line, "for")
            condition: Body = (Arithmetic(parts[1].strip() or "1", line),)
            return Loop(parts[0], condition, False, self._do(), parts[2], line)
        name = self._take()
        if not isinstance(name, Word) or not re.fullmatch(NAME, name.bare or ""):
            raise _unread(self._scanner.path, line, "for")
        self.assigned.add(str(name.bare))
        words = list[Word]()
        while self._next == "\n":
            self._take()
        if self._keyword() == "in":
            self._take()
            while isinstance(self._next, Word):
                words.append(self._next)
                self._take()
        return For(name.bare or "", tuple(words), self._do(), line)

    def _case(self, line: int) -> Statement:
        self._take()
        word = self._take()
        if not isinstance(word, Word):
            raise _unread(self._scanner.path, line, "case")
        self._lines()
        self._expect("in")
        self._lines()
        clauses = list[tuple[tuple[Word, ...], Body]]()
        while self._keyword() != "esac":
            if self._next == "(":
                self._take()
            patterns = list[Word]()
            while self._next != ")":
                if isinstance(self._next, Word):
                    patterns.append(self._next)
                elif self._next != "|":
                    self._refuse()
                self._take()
            self._take()
            clauses.append((tuple(patterns), self._body(("esac",))))
            if self._next == ";;":
                self._take()
            elif self._keyword() != "esac":
                self._refuse()
            self._lines()
        self._take()
        return Case(word, tuple(clauses), line)

    def _select(self, line: int) -> Statement:
        raise _unread(self._scanner.path, line, "select")


_KEYWORDS: Mapping[str, Callable[[_Parser, int], Statement]] = {
    "if": _Parser._if,
    "while": _Parser._loop,
    "until": _Parser._loop,
    "for": _Parser._for,
    "case": _Parser._case,
    "select": _Parser._select,
    "function": _Parser._function,
    "{": _Parser._group,
    "[[": _Parser._test,
}


class Assignment(NamedTuple):
    """Parts of a word `NAME[index]+=value`."""

    name: str
    key: Word | None
    """Index between the brackets; None without brackets."""
    append: bool
    value: Word


def assignment_of(word: Word) -> Assignment | None:
    """Return the parts of an assignment; None if the word is not an assignment."""
    plain = plain_text([*word.pieces])
    match = ASSIGNMENT.match(plain)
    if match is None:
        return None
    key = None if match[2] is None else _cut(word, plain, match.start(2), match.end(2))
    return Assignment(match[1], key, bool(match[3]), _cut(word, plain, match.end(), len(plain)))


def _cut(word: Word, plain: str, start: int, end: int) -> Word:
    """Return the part of a word between two positions of its `plain_text`.

    There, every quoted or expanded piece is a single character.
    """
    pieces, at = list[Piece](), 0
    for piece in word.pieces:
        whole = piece.kind != "text" or piece.quoted
        length = 1 if whole else len(piece.text)
        first, last = max(start, at), min(end, at + length)
        if first < last:
            text = piece.text if whole else piece.text[first - at : last - at]
            pieces.append(piece._replace(text=text))
        at += length
    return Word(tuple(pieces), word.line)


def is_command(statement: Statement) -> bool:
    """Return True if a statement runs a command other than `[` and `test`."""
    return isinstance(statement, Simple) and statement.words[0].bare not in ("[", "test")
