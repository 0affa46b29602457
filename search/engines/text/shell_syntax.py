"""Parser for bash: text -> statements. Nothing is expanded or run.

`select` and coprocesses are refused, and so is everything that is not in the grammar below.
`search.engines.text.shell` runs the statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, NoReturn

from autopar.errors import DocumentError
from search.engines.text.shell_words import (
    ASSIGNMENT,
    NAME,
    Piece,
    Redirect,
    Scanner,
    Word,
    closing,
    plain_text,
    refusal,
)

DEEPEST = 40
"""Maximum nesting depth of statements, function calls and evaluated texts."""
_MOST = 1 << 18
"""Maximum characters of a script."""
_NAMES = frozenset(
    {"declare", "typeset", "local", "export", "readonly", "read", "mapfile", "readarray", "printf",
     "getopts", "let", "unset"}
)  # fmt: skip
"""Commands whose words name variables that they set."""
DECLARES = frozenset({"declare", "typeset", "local", "export", "readonly"})
"""Commands whose arguments are assignments, which are not split."""


class Simple(NamedTuple):
    words: tuple[Word, ...]
    """Empty if there are only redirections."""
    line: int
    redirects: tuple[Redirect, ...] = ()


class Test(NamedTuple):
    """Condition between `[[` and `]]`."""

    how: str
    """Operator: `&&`, `||`, `!`, a unary or binary one, or "" for a single word."""
    parts: tuple[Test | Word, ...]
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
    clauses: tuple[tuple[tuple[Word, ...], Body, str], ...]
    """(patterns, statements, `;;` or `;&` or `;;&`)."""
    line: int


class For(NamedTuple):
    name: str
    words: tuple[Word, ...] | None
    """None without `in`: the positional parameters."""
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


class Pipe(NamedTuple):
    """Commands connected by `|`, each in a subshell."""

    parts: Body
    line: int


class Chain(NamedTuple):
    first: Statement
    rest: tuple[tuple[str, Statement], ...]
    line: int


class Not(NamedTuple):
    statement: Statement
    line: int


class Redirected(NamedTuple):
    """Compound statement with redirections."""

    statement: Statement
    redirects: tuple[Redirect, ...]
    line: int


Statement = (
    Simple | Test | Arithmetic | If | Case | For | Loop | Function | Group | Pipe | Chain | Not
    | Redirected
)  # fmt: skip
Body = tuple[Statement, ...]

_UNARY = frozenset(f"-{letter}" for letter in "abcdefghknoprstuvwxzGLNORS")
_BINARY = frozenset(
    {"=", "==", "!=", "=~", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef"}
)


def parse(
    text: str, path: str, first_line: int = 1, *, extended: bool = False
) -> tuple[Body, set[str]]:
    """Return the statements of a script, and the variable names that any statement assigns.

    path, first_line : file and number of the first line, for errors. extended : True if `extglob`
    is on. Raises DocumentError with the line of a construct that is not read.
    """
    if len(text) > _MOST:
        raise DocumentError(path, f"is longer than {_MOST} characters, expected a launch script")
    assigned = set[str]()
    scanner = scanner_of(text + "\n", path, first_line, assigned)
    scanner.extended = 0 if extended else -1
    return _Parser(scanner, assigned).script(""), assigned


def scanner_of(text: str, path: str, line: int, assigned: set[str] | None = None) -> Scanner:
    """Return a scanner of a text whose command substitutions are parsed.

    assigned : receives the names that substitutions assign.
    """
    names = set[str]() if assigned is None else assigned

    def commands(scanner: Scanner, closes: str) -> Body:
        return _Parser(scanner, names).script(closes)

    return Scanner(text, path, line, commands)


class _Parser:
    """Recursive descent parser with one method for each type of statement."""

    def __init__(self, scanner: Scanner, assigned: set[str]) -> None:
        self._scanner, self._assigned = scanner, assigned
        self._next = scanner.token()

    def script(self, closes: str) -> Body:
        """Return the statements up to a closing bracket, or with "" up to the end of the text."""
        body = self._body(())
        self._scanner.ended = self._next == ""
        if self._next not in (closes, ""):
            self._refuse()
        return body

    def _take(self) -> Word | str:
        token, self._next = self._next, self._scanner.token()
        return token

    def _refuse(self) -> NoReturn:
        token = self._next
        if isinstance(token, Word):
            raise self._unread(token.line, token.bare or token.written)
        self._unread_here(token)

    def _unread_here(self, token: str) -> NoReturn:
        raise self._unread(self._scanner.line(self._scanner.at - len(token)), token)

    def _unread(self, line: int, what: str) -> DocumentError:
        shown = "it ends here" if what in ("", "\n") else f"it continues with {what!r}"
        return DocumentError(
            self._scanner.path,
            f"line {line}: not a supported shell statement: {shown}",
            remedy="Give the arguments in a plain script, YAML or JSON",
        )

    def _is(self, operator: str) -> bool:
        return self._next == operator

    def _keyword(self) -> str | None:
        return self._next.bare if isinstance(self._next, Word) else None

    def _expect(self, keyword: str) -> None:
        if self._keyword() != keyword and self._next != keyword:
            self._refuse()
        self._take()

    def _lines(self) -> None:
        while self._next in ("\n", ";") and not self._scanner.redirects:
            self._take()

    def _body(self, ends: tuple[str, ...]) -> Body:
        scanner = self._scanner
        scanner.depth += 1
        if scanner.depth > DEEPEST:
            raise DocumentError(scanner.path, "is nested too deeply, expected a launch script")
        body = list[Statement]()
        self._lines()
        while scanner.redirects or (
            self._next not in ("", ")", ";;", ";&", ";;&") and self._keyword() not in ends
        ):
            statement = self._chain()
            if self._next == "&":
                self._take()
                statement = Group((statement,), True, statement.line)
            elif self._next not in ("", "\n", ";", ")", ";;", ";&", ";;&"):
                self._refuse()
            body.append(statement)
            self._lines()
        scanner.depth -= 1
        if not body and ends and "esac" not in ends:
            self._refuse()
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
        if self._keyword() == "time":
            self._take()
            if self._keyword() == "-p":
                self._take()
            return self._pipe()
        found = [self._command()]
        while self._next in ("|", "|&"):
            self._take()
            while self._next == "\n":
                self._take()
            found.append(self._command())
        return found[0] if len(found) == 1 else Pipe(tuple(found), line)

    def _redirects(self) -> tuple[Redirect, ...]:
        found, self._scanner.redirects = tuple(self._scanner.redirects), []
        return found

    def _command(self) -> Statement:
        line = self._next.line if isinstance(self._next, Word) else self._scanner.line()
        if self._next == "(" or self._keyword() in _KEYWORDS:
            before = self._redirects()
            found = self._compound(line)
            after = (*before, *self._redirects())
            return Redirected(found, after, line) if after else found
        if self._keyword() in _CLOSING:
            self._refuse()
        return self._simple(line)

    def _compound(self, line: int) -> Statement:
        scanner = self._scanner
        keyword = self._keyword()
        if keyword is not None:
            return _KEYWORDS[keyword](self, line)
        start = scanner.at - 1
        if scanner.text.startswith("((", start):
            end = closing(scanner.text, start)
            if end and scanner.text[end - 2] == ")" and closing(scanner.text, start + 1) == end - 1:
                scanner.at = end
                self._next = scanner.token()
                return self._arithmetic(scanner.text[start + 2 : end - 2], line)
        self._take()
        body = self._body(())
        if not body:
            self._refuse()
        self._expect(")")
        return Group(body, True, line)

    def _arithmetic(self, text: str, line: int) -> Arithmetic:
        self._assigned |= set(_SET_IN_SUM.findall(text))
        return Arithmetic(text, line)

    def _simple(self, line: int) -> Statement:
        words = list[Word]()
        name: str | None = None
        while isinstance(self._next, Word):
            word = self._next
            words.append(word)
            self._note_names(word, name)
            if name is None and not ASSIGNMENT.match(plain_text(word.pieces)):
                name = word.bare or ""
            self._take()
            if self._is("(") and len(words) == 1 and word.bare is not None:
                self._take()
                self._expect(")")
                return self._named(word.bare, line)
        redirects = self._redirects()
        if not words and not redirects:
            self._refuse()
        if name == "shopt" and [word.bare for word in words[1:3]] == ["-s", "extglob"]:
            self._scanner.extended = words[0].line
        return Simple(tuple(words), words[0].line if words else line, redirects)

    def _note_names(self, word: Word, command: str | None) -> None:
        """Record the variable that a word assigns; command : name of the command before it."""
        match = ASSIGNMENT.match(plain_text(word.pieces))
        if match is not None and (command is None or command in _NAMES):
            self._assigned.add(match[1])
        elif command in _NAMES and word.bare and re.fullmatch(NAME, word.bare):
            self._assigned.add(word.bare)

    def _named(self, name: str, line: int) -> Statement:
        while self._next == "\n":
            self._take()
        body = self._command()
        if isinstance(body, Simple):
            raise self._unread(line, name)
        return Function(name, (body,), line)

    def _function(self, line: int) -> Statement:
        self._take()
        name = self._take()
        if not isinstance(name, Word) or not name.bare:
            self._refuse()
        if self._is("(") and not self._scanner.text.startswith("(", self._scanner.at):
            self._take()
            self._expect(")")
        return self._named(name.bare, line)

    def _group(self, line: int) -> Statement:
        self._take()
        body = self._body(("}",))
        self._expect("}")
        return Group(body, False, line)

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
        if self._keyword() == "{":
            self._take()
            body = self._body(("}",))
            self._expect("}")
            return body
        self._expect("do")
        body = self._body(("done",))
        self._expect("done")
        return body

    def _for(self, line: int) -> Statement:
        self._take()
        if self._next == "(":
            scanner = self._scanner
            start = scanner.at - 1
            end = closing(scanner.text, start)
            inner = scanner.text[start + 1 : end - 1]
            parts = inner[1:-1].split(";")
            if len(parts) != 3 or not (inner.startswith("(") and inner.endswith(")")):
                raise self._unread(line, "for")
            scanner.at = end
            self._next = scanner.token()
            first, condition, step = (self._arithmetic(part, line) for part in parts)
            if not condition.text.strip():
                condition = Arithmetic("1", line)
            return Loop(first.text, (condition,), False, self._do(), step.text, line)
        name = self._take()
        if not isinstance(name, Word) or not re.fullmatch(NAME, name.bare or ""):
            raise self._unread(line, "for")
        self._assigned.add(str(name.bare))
        words: list[Word] | None = None
        while self._next == "\n":
            self._take()
        if self._keyword() == "in":
            self._take()
            words = []
            while isinstance(self._next, Word):
                words.append(self._next)
                self._take()
        return For(name.bare or "", None if words is None else tuple(words), self._do(), line)

    def _case(self, line: int) -> Statement:
        self._take()
        word = self._take()
        if not isinstance(word, Word):
            raise self._unread(line, "case")
        self._lines()
        self._expect("in")
        self._lines()
        clauses = list[tuple[tuple[Word, ...], Body, str]]()
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
            body, end = self._body(("esac",)), ";;"
            if self._next in (";;", ";&", ";;&"):
                end = str(self._take())
            elif self._keyword() != "esac":
                self._refuse()
            clauses.append((tuple(patterns), body, end))
            self._lines()
        self._take()
        return Case(word, tuple(clauses), line)

    def _unsupported(self, line: int) -> Statement:
        raise refusal(self._scanner.path, line, f"`{self._keyword()}`")

    # ----------------------------------------------------------------------------------------------
    # Conditions in double brackets, which have separate words and operators.

    def _test(self, line: int) -> Statement:
        found = self._any_of(line)
        if self._mark("]]") is None:
            raise self._unread(self._scanner.line(), self._scanner.text[self._scanner.at :][:20])
        self._next = self._scanner.token()
        return found

    def _mark(self, *marks: str) -> str | None:
        """Move past the next token if it is one of several operators, and return it."""
        scanner = self._scanner
        scanner.skip_blanks(" \t\n")
        for mark in marks:
            if scanner.text.startswith(mark, scanner.at):
                after = scanner.text[scanner.at + len(mark) :][:1]
                if mark[0] in "&|()<>" or not after or after in " \t\n;&|()<>":
                    scanner.at += len(mark)
                    return mark
        return None

    def _any_of(self, line: int) -> Test:
        parts = [self._all_of(line)]
        while self._mark("||"):
            parts.append(self._all_of(line))
        return parts[0] if len(parts) == 1 else Test("||", tuple(parts), line)

    def _all_of(self, line: int) -> Test:
        parts = [self._negated(line)]
        while self._mark("&&"):
            parts.append(self._negated(line))
        return parts[0] if len(parts) == 1 else Test("&&", tuple(parts), line)

    def _negated(self, line: int) -> Test:
        if self._mark("!"):
            return Test("!", (self._negated(line),), line)
        if self._mark("("):
            found = self._any_of(line)
            if self._mark(")") is None:
                raise self._unread(line, "[[")
            return found
        word = self._test_word()
        if word.bare in _UNARY and self._at_end():
            raise self._unread(line, str(word.bare))
        if word.bare in _UNARY:
            binary = self._peek_binary()
            if binary is None:
                return Test(word.bare or "", (self._test_word(),), line)
        how = self._mark(*sorted(_BINARY, key=len, reverse=True))
        if how is None:
            return Test("", (word,), line)
        other = self._regex_word() if how == "=~" else self._pattern_word(how)
        return Test(how, (word, other), line)

    def _peek_binary(self) -> str | None:
        at = self._scanner.at
        found = self._mark(*sorted(_BINARY, key=len, reverse=True))
        self._scanner.at = at
        return found

    def _at_end(self) -> bool:
        scanner = self._scanner
        scanner.skip_blanks(" \t\n")
        return scanner.text.startswith(("]]", "&&", "||", ")"), scanner.at)

    def _test_word(self) -> Word:
        scanner = self._scanner
        scanner.skip_blanks(" \t\n")
        at = scanner.at
        word = scanner.word()
        if scanner.at == at or word.bare == "]]":
            raise self._unread(scanner.line(), scanner.text[at : at + 2])
        return word

    def _pattern_word(self, how: str) -> Word:
        """Return the word behind an operator: behind `==`, extended patterns are always on."""
        scanner, before = self._scanner, self._scanner.extended
        if how in ("=", "==", "!="):
            scanner.extended = 0
        word = self._test_word()
        scanner.extended = before
        return word

    def _regex_word(self) -> Word:
        scanner = self._scanner
        scanner.skip_blanks(" \t\n")
        start = scanner.at
        word = scanner.word(" \t\n")
        plain = plain_text(word.pieces)
        if re.search(r"\\[A-Za-z0-9]", scanner.text[start : scanner.at]):
            raise refusal(
                scanner.path, word.line, f"a back reference in the pattern {word.written[:40]}"
            )
        if not word.pieces or plain.count("(") != plain.count(")") or "#" in plain[:1]:
            raise refusal(scanner.path, word.line, f"the pattern {word.written[:40]} after `=~`")
        return word


_CLOSING = frozenset({"then", "elif", "else", "fi", "do", "done", "esac", "}"})
"""Reserved words that begin no statement."""
_SET_IN_SUM = re.compile(rf"({NAME})\s*(?:(?:\*|/|%|\+|-|<<|>>|&|\^|\|)?=(?!=)|\+\+|--)")
_KEYWORDS: Mapping[str, Callable[[_Parser, int], Statement]] = {
    "if": _Parser._if,
    "while": _Parser._loop,
    "until": _Parser._loop,
    "for": _Parser._for,
    "case": _Parser._case,
    "function": _Parser._function,
    "{": _Parser._group,
    "[[": _Parser._test,
    "select": _Parser._unsupported,
    "coproc": _Parser._unsupported,
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
    plain = plain_text(word.pieces)
    match = ASSIGNMENT.match(plain)
    if match is None:
        return None
    key = None if match[2] is None else cut(word, plain, match.start(2), match.end(2))
    return Assignment(match[1], key, bool(match[3]), cut(word, plain, match.end(), len(plain)))


def cut(word: Word, plain: str, start: int, end: int) -> Word:
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


def text_of(statement: object) -> str:
    """Return the text of a condition, if it is one command."""
    if isinstance(statement, Test):
        texts = [text_of(p) if isinstance(p, Test) else p.written for p in statement.parts]
        if len(texts) == 1:
            return f"{statement.how} {texts[0]}"
        return f" {statement.how} ".join(texts)
    if isinstance(statement, Arithmetic):
        return statement.text
    if isinstance(statement, Simple):
        return " ".join(word.written for word in statement.words)
    if isinstance(statement, Not | Redirected):
        return text_of(statement.statement)
    if isinstance(statement, Chain):
        return text_of(statement.rest[-1][1])
    if isinstance(statement, Pipe):
        return " | ".join(map(text_of, statement.parts))
    return ""
