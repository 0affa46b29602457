"""Launch scripts: which command a bash script would run, found without running anything.

Variables, arrays, arithmetic, conditions, cases, loops, functions, `eval` and `bash -c` are
followed as bash does. What only a running machine tells (a substituted command, a file, a variable
of the environment) stays as it is written; a launch that depends on it is refused, never guessed.
How text becomes statements is `search.configuration.shell_syntax`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import DocumentError
from autopar.records import dataclass
from search.configuration.shell_syntax import (
    ASSIGNMENT,
    DEEPEST,
    NAME,
    Arithmetic,
    Body,
    Case,
    Chain,
    For,
    Function,
    Group,
    If,
    Loop,
    Not,
    Piece,
    Scanner,
    Simple,
    Statement,
    Test,
    Word,
    behind,
    is_command,
    parse,
    plain_text,
)
from search.configuration.shell_values import (
    Command,
    Condition,
    Undecided,
    Unknown,
    glued,
    program_of,
    runs_ranks,
    settled,
    sum_of,
    undecided,
)

__all__ = ["script_command"]

_PARAMETER = re.compile(
    rf"(?P<mark>[#!])?(?P<name>{NAME}|[0-9]+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<op>:?[-=?+]|\#\#?|%%?|//?|\^\^?|,,?|:)?(?P<word>.*)",
    re.DOTALL,
)
_ALL = re.compile(rf"\$\{{({NAME})\[([@*])\]\}}|\$\{{?([@*])\}}?")
_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_DECLARE = frozenset({"export", "declare", "readonly", "typeset", "local"})
_READS = frozenset({"read", "mapfile", "readarray"})
_LOCAL = frozenset({"declare", "typeset", "local"})
_NO_SETTINGS = re.compile(r".*(activate|conda\.sh|bashrc|profile|setvars\.sh|modules?/.*)")
"""Sourced files that set up a shell, and no launch."""
_QUIET = frozenset({"echo", "printf", "mkdir", "set", ":", "true", "cd", "pwd", "chmod", "sleep"})
"""Commands that end well and change no variable."""
_MOST = 1 << 16
"""Words or characters of a variable: `A=$A$A` doubles with every line."""
_MOST_STEPS = 50_000


# --------------------------------------------------------------------------------------------------
# What statements do.


@dataclass
class _Shell:
    """Variables and what was found so far."""

    scalars: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str] | Undecided] = field(default_factory=dict)
    functions: dict[str, Body] = field(default_factory=dict)
    exported: dict[str, None] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    """`$1` and on, of a function."""
    found: Command | Undecided | None = None
    launches: int = 0

    def copy(self) -> _Shell:
        arrays = {
            name: items if isinstance(items, Undecided) else [*items]
            for name, items in self.arrays.items()
        }
        return _Shell(
            scalars={**self.scalars},
            arrays=arrays,
            functions={**self.functions},
            exported={**self.exported},
            given=[*self.given],
            found=self.found,
            launches=self.launches,
        )


class _Exit(Exception):  # noqa: N818 (no error)
    """The script ends, or with `what` a function, a loop or one round of it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def script_command(text: str, path: object) -> Command:
    """Return the launch in a bash script: the last command that runs a `.py` file with flags.

    Variables that the script does not set stay `$NAME`, and are empty in conditions. Raises
    DocumentError: a quote or bracket is not closed, what is launched depends on what only running
    tells, or the script has what is not read.
    """
    run, shell = _Run(str(path)), _Shell()
    try:
        body, names = parse(text, str(path))
        run.assigned |= names
        with suppress(_Exit):
            run.body(shell, body)
    except RecursionError:
        raise DocumentError(str(path), "is nested too deeply, expected a launch script") from None
    if isinstance(shell.found, Undecided):
        raise run.depends(shell.found)
    if shell.found is not None:
        return run.noted(shell.found, shell.launches)
    arrays = {n: items for n, items in shell.arrays.items() if not isinstance(items, Undecided)}
    name = max(arrays, key=lambda name: len(arrays[name]), default="")
    longest, others = arrays.pop(name, []), [other for other, items in arrays.items() if items]
    left = f", and not {', '.join(others)}" if others else ""
    run.left_out[f"no launch was found, and what {name} holds is read{left}"] = None
    return run.noted(Command(before=(), arguments=tuple(map(str, longest))), 0)


class _Run:
    """One reading of a script: its path and names, and how far it went."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.assigned: set[str] = set()
        """Names that the script assigns, in whatever branch."""
        self._taken: dict[str, None] = {}
        """Variables of the environment that conditions took for empty."""
        self.left_out: dict[str, None] = {}
        """Flags whose value only running tells, a sentence each."""
        self._sourced: dict[str, None] = {}
        """Files that are sourced, and names taken for their defaults behind them."""
        self._defaults: dict[str, None] = {}
        self._outer: list[dict[str, tuple[Any, Any]]] = []
        """Of each function that runs, what its local names are outside of it."""
        self._steps = self._depth = 0

    def noted(self, command: Command, launches: int) -> Command:
        """Return a launch with what was taken for granted."""
        notes = [*self.left_out]
        if launches > 1:
            notes.append(f"the script launches {launches} times, of which the last is read")
        if self._sourced:
            names = f"; taken as not set: {', '.join(self._defaults)}" if self._defaults else ""
            notes.append(f"what {', '.join(self._sourced)} sets is not read{names}")
        if self._taken:
            notes.append(f"taken as not set in conditions: {', '.join(self._taken)}")
        return replace(command, notes=tuple(notes))

    def depends(self, value: Undecided) -> DocumentError:
        """Return why a launch is not known."""
        return DocumentError(
            self.path,
            f"what is launched depends on {value.why}, which only running tells",
            remedy="write the branch that is meant, or give the arguments in YAML or JSON",
        )

    def body(self, shell: _Shell, body: Body) -> bool | None:
        """Run statements; return whether the last one ends well, None where only running tells."""
        status: bool | None = True
        for statement in body:
            status = self._one(shell, statement)
        return status

    def _one(self, shell: _Shell, statement: Statement) -> bool | None:
        self._step()
        return _STATEMENTS[type(statement)](self, shell, statement)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            problem = f"runs more than {_MOST_STEPS} statements, expected a launch script"
            raise DocumentError(self.path, problem)

    def _run_chain(self, shell: _Shell, chain: Chain) -> bool | None:
        status = self._one(shell, chain.first)
        for operator, statement in chain.rest:
            # a command of which nothing is known is meant to end well
            if (status is not False) == (operator == "&&"):
                decided = status is not None or not isinstance(chain.first, Simple | Test)
                if decided or is_command(chain.first):
                    status = self._one(shell, statement)
                else:
                    status = self._either(
                        shell, [(statement,), ()], self._shown(chain.first, shell)
                    )
        return status

    def _run_not(self, shell: _Shell, statement: Not) -> bool | None:
        status = self._one(shell, statement.statement)
        return None if status is None else not status

    def _run_group(self, shell: _Shell, group: Group) -> bool | None:
        if not group.apart:
            return self.body(shell, group.body)
        inner = shell.copy()
        status: bool | None = None
        with suppress(_Exit):
            status = self.body(inner, group.body)
        shell.found, shell.launches = inner.found, inner.launches
        return status

    def _run_function(self, shell: _Shell, function: Function) -> bool:
        shell.functions[function.name] = function.body
        return True

    def _run_if(self, shell: _Shell, statement: If) -> bool | None:
        for index, (condition, body) in enumerate(statement.clauses):
            status = self.body(shell, condition)
            if status:
                return self.body(shell, body)
            if status is None:
                rest: Body = statement.otherwise
                if index + 1 < len(statement.clauses):
                    rest = (If(statement.clauses[index + 1 :], rest, statement.line),)
                why = self._shown(condition[-1], shell) if condition else "nothing"
                return self._either(shell, [body, rest], why)
        return self.body(shell, statement.otherwise)

    def _run_case(self, shell: _Shell, statement: Case) -> bool | None:
        value = self._text(shell, statement.word, unset="")
        if isinstance(value, Unknown):
            bodies: list[Body] = [body for _, body in statement.clauses]
            return self._either(shell, [*bodies, ()], f"`{value}` on line {statement.line}")
        for patterns, body in statement.clauses:
            if any(fnmatchcase(value, self._text(shell, word)) for word in patterns):
                return self.body(shell, body)
        return True

    def _run_for(self, shell: _Shell, loop: For) -> bool | None:
        status: bool | None = True
        for value in [item for word in loop.words for item in self._fields(shell, word, unset="")]:
            self._set(shell, loop.name, value)
            try:
                status = self.body(shell, loop.body)
            except _Exit as stop:
                if stop.what == "break":
                    break
                if stop.what != "continue":
                    raise
        return status

    def _run_loop(self, shell: _Shell, loop: Loop) -> bool | None:
        if loop.first.strip():
            self._arithmetic(shell, loop.first)
        while True:
            status = self.body(shell, loop.condition)
            if status is None:
                return self._either(shell, [loop.body, ()], self._shown(loop.condition[-1], shell))
            if status == loop.until:
                return True
            try:
                self.body(shell, loop.body)
            except _Exit as stop:
                if stop.what == "break":
                    return True
                if stop.what != "continue":
                    raise
            if loop.step.strip():
                self._arithmetic(shell, loop.step)
            self._step()

    def _run_arithmetic(self, shell: _Shell, statement: Arithmetic) -> bool | None:
        value = self._arithmetic(shell, statement.text)
        return None if value is None else value != 0

    # ----------------------------------------------------------------------------------------------
    # What only running tells.

    def _either(self, shell: _Shell, bodies: list[Body], why: str) -> bool | None:
        """Run each of these from here: what is the same after all that go on is known."""
        after, stops = list[_Shell](), list[_Exit]()
        for body in bodies:
            branch = shell.copy()
            try:
                self.body(branch, body)
            except _Exit as stop:
                stops.append(stop)
                continue
            after.append(branch)
        if not after:
            raise stops[0]
        first = after[0]
        for name in dict.fromkeys(n for branch in after for n in branch.scalars):
            values = {branch.scalars.get(name) for branch in after}
            if len(values) > 1:
                many = any(len((value or "").split()) > 1 for value in values)
                first.scalars[name] = undecided(f"${name}", why, many=many)
        for name in dict.fromkeys(n for branch in after for n in branch.arrays):
            arrays = [branch.arrays.get(name) for branch in after]
            if any(items != arrays[0] for items in arrays):
                first.arrays[name] = undecided(f"${{{name}[@]}}", why, many=True)
                first.scalars.pop(name, None)
        if any(branch.found != first.found for branch in after):
            first.found = undecided("launch", why, many=True)
        shell.scalars, shell.arrays = first.scalars, first.arrays
        shell.functions, shell.exported = first.functions, first.exported
        shell.found, shell.launches = first.found, max(branch.launches for branch in after)
        return None

    def _shown(self, statement: Statement, shell: _Shell) -> str:
        """Return line and words of a condition, for a sentence."""
        words = [
            word if isinstance(word, str) else "".join(piece.text for piece in word.pieces)
            for word in getattr(statement, "words", ())
        ]
        said = " ".join(words) or getattr(statement, "text", "")
        return f"`{said[:60]}` on line {statement.line}" if said else f"line {statement.line}"

    # ----------------------------------------------------------------------------------------------
    # Commands.

    def _run_simple(self, shell: _Shell, command: Simple) -> bool | None:
        words = [*command.words]
        first = words[0].bare
        if first in _DECLARE:
            return self._declare(shell, str(first), words[1:])
        sets = list[Word]()
        while words and ASSIGNMENT.match(plain_text([*words[0].pieces])):
            sets.append(words.pop(0))
        if not words:
            for word in sets:
                self._assign(shell, word)
            return None if any(p.kind == "command" for w in sets for p in w.pieces) else True
        fields = [item for word in words for item in self._fields(shell, word)]
        if not fields:
            return True
        # of this command alone
        own = shell.copy()
        for word in sets:
            self._assign(own, word)
        names = [
            str(match[1]) for w in sets if (match := ASSIGNMENT.match(plain_text([*w.pieces])))
        ]
        return self._call(shell, fields, words, {name: own.scalars.get(name, "") for name in names})

    def _declare(self, shell: _Shell, what: str, words: list[Word]) -> bool:
        marks = {word.bare for word in words if (word.bare or "").startswith("-")}
        for word in words:
            if (word.bare or "").startswith("-"):
                continue
            match = ASSIGNMENT.match(plain_text([*word.pieces]))
            name = match[1] if match is not None else word.bare or ""
            if self._outer and what in _LOCAL and "-g" not in marks:
                old = shell.scalars.get(name), shell.arrays.get(name)
                self._outer[-1].setdefault(name, old)
                if match is None:
                    self._restore(shell, name, (None, None))
            if match is not None:
                self._assign(shell, word)
            if what == "export" or "-x" in marks:
                shell.exported[name] = None
        return True

    def _call(
        self, shell: _Shell, fields: list[str], words: list[Word], own: Mapping[str, str]
    ) -> bool | None:
        name, rest = fields[0], fields[1:]
        if name in ("exit", "return", "break", "continue"):
            raise _Exit(name)
        if name in ("[", "test"):
            return self._tested(shell, words)
        if name in shell.functions:
            return self._function(shell, name, rest)
        if name == "eval":
            return self._inner(shell, " ".join(rest), words[0].line)
        if name == "unset":
            for item in rest:
                shell.scalars.pop(item, None)
                shell.arrays.pop(item, None)
                shell.exported.pop(item, None)
            return True
        if name == "shift":
            count = int(rest[0]) if rest and re.fullmatch("[0-9]{1,9}", rest[0]) else 1
            if count <= len(shell.given):  # else bash shifts nothing
                del shell.given[:count]
            return True
        if name == "set" and "--" in rest:
            shell.given = rest[rest.index("--") + 1 :]
            return True
        if name in (".", "source") and rest:
            if not _NO_SETTINGS.fullmatch(rest[0]):
                self._sourced[rest[0]] = None
            return None
        if name.startswith("--"):
            self.left_out[
                f"line {words[0].line} begins a command with {name}: the one in front of it ends "
                "there, with a comment or a blank behind its backslash, and does not have it"
            ] = None
            return None
        if name == "let":
            for item in rest:
                self._arithmetic(shell, item)
            return True
        if name in _READS or (name == "printf" and rest[:1] == ["-v"]):
            for item in rest[1:2] if name == "printf" else rest:
                if re.fullmatch(NAME, item):
                    many = name in ("mapfile", "readarray")
                    self._set(shell, item, Unknown(f"${{{item}[@]}}" if many else f"${item}"))
            return None
        if name == "false" or (name.startswith("[") and name != "["):
            return False  # `[$A = 1 ]` is no command; bash says so and goes on
        launch = program_of(fields)
        if launch is not None:
            self._launch(shell, launch, own)
            return None
        inner = next((i for i, w in enumerate(fields[:-1]) if w == "-c" and i), None)
        if inner is not None and any(_SHELLS.fullmatch(word) for word in fields[:inner]):
            apart = shell.copy()
            with suppress(_Exit):
                self._inner(apart, fields[inner + 1], words[0].line)
            shell.found, shell.launches = apart.found, apart.launches
            return None
        return True if name in _QUIET else None

    def _launch(
        self, shell: _Shell, launch: tuple[list[str], str, list[str]], own: Mapping[str, str]
    ) -> None:
        before, program, arguments = launch
        if isinstance(shell.found, Command) and runs_ranks(shell.found.before) > runs_ranks(before):
            return
        for index, word in enumerate((*before, *arguments)):
            if not isinstance(word, Undecided):
                continue
            at = index - len(before)
            if at < 1 or word.many or not arguments[at - 1].startswith("--"):
                shell.found = word
                return
            # one value of a flag, which may be a path that is no matter
            self.left_out[f"what {arguments[at - 1]} is depends on {word.why}"] = None
        arguments, dropped = settled(arguments)
        self.left_out |= dict.fromkeys(dropped)
        exported = {name: shell.scalars[name] for name in shell.exported if name in shell.scalars}
        shell.found = Command(
            before=tuple(map(str, before)),
            program=str(program),
            arguments=tuple(map(str, arguments)),
            environment={name: str(value) for name, value in {**exported, **own}.items()},
        )
        shell.launches += 1

    def _function(self, shell: _Shell, name: str, given: list[str]) -> bool | None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise DocumentError(self.path, f"the function {name!r} calls itself too often")
        outer, shell.given = shell.given, given
        self._outer.append({})
        try:
            return self.body(shell, shell.functions[name])
        except _Exit as stop:
            if stop.what != "return":
                raise
            return None
        finally:
            shell.given = outer
            for local, old in self._outer.pop().items():
                self._restore(shell, local, old)
            self._depth -= 1

    def _restore(self, shell: _Shell, name: str, old: tuple[Any, Any]) -> None:
        """Give a name what it had outside of a function: as a variable, as an array."""
        scalar, array = old
        shell.scalars.pop(name, None)
        shell.arrays.pop(name, None)
        if scalar is not None:
            shell.scalars[name] = scalar
        if array is not None:
            shell.arrays[name] = array

    def _inner(self, shell: _Shell, text: str, line: int) -> bool | None:
        """Run a text as `eval` and `bash -c` do."""
        self._depth += 1
        if self._depth > DEEPEST:
            raise DocumentError(self.path, "is nested too deeply, expected a launch script")
        try:
            body, names = parse(text, self.path, line)
            self.assigned |= names
            return self.body(shell, body)
        finally:
            self._depth -= 1

    # ----------------------------------------------------------------------------------------------
    # Conditions.

    def _tested(self, shell: _Shell, words: list[Word]) -> bool | None:
        fields = [item for word in words[1:] for item in self._fields(shell, word, unset="")]
        if words[0].bare == "[":
            if fields[-1:] != ["]"]:
                return False  # bash says so, and goes on
            fields.pop()
        return Condition(list(fields), glob=False).value()

    def _run_test(self, shell: _Shell, test: Test) -> bool | None:
        items = list[str]()
        quoted = list[bool]()
        for word in test.words:
            # words are not split here
            items.append(word if isinstance(word, str) else self._text(shell, word, unset=""))
            quoted.append(isinstance(word, Word) and any(piece.quoted for piece in word.pieces))
        return Condition(items, glob=True, quoted=quoted).value()

    # ----------------------------------------------------------------------------------------------
    # Values.

    def _assign(self, shell: _Shell, word: Word) -> None:
        match = ASSIGNMENT.match(plain_text([*word.pieces]))
        assert match is not None, "only assignments are assigned"
        name, index, append = match[1], match[2], bool(match[3])
        if word.items is not None:
            items = [part for item in word.items for part in self._fields(shell, item)]
            before = shell.arrays.get(name, []) if append else []
            if isinstance(before, Undecided):
                return
            self._limited(len(before) + len(items))
            shell.arrays[name] = [*before, *items]
            shell.scalars.pop(name, None)
            return
        text = self._text(shell, behind(word, match.end()))
        if index is not None:
            row = shell.arrays.setdefault(name, [])
            place = self._arithmetic(shell, index)
            if isinstance(row, Undecided) or place is None or not 0 <= place < _MOST:
                return
            if place >= len(row):
                row.append(text)  # bash leaves a gap, which no expansion shows
            else:
                row[place] = glued([row[place], text]) if append else text
            return
        if append and isinstance(array := shell.arrays.get(name), list) and name in shell.arrays:
            array[:1] = [(array[0] if array else "") + text]
            return
        self._set(shell, name, glued([shell.scalars.get(name, ""), text]) if append else text)

    def _set(self, shell: _Shell, name: str, text: str) -> None:
        self._limited(len(text))
        shell.scalars[name] = text
        # a name is one of both: the last assignment counts
        shell.arrays.pop(name, None)

    def _limited(self, size: int) -> None:
        if size > _MOST:
            raise DocumentError(self.path, f"a variable grows beyond {_MOST} words or characters")

    def _text(self, shell: _Shell, word: Word, *, unset: str | None = None) -> str:
        """Return a word in one piece, as the right side of an assignment is."""
        return glued([self._piece(shell, piece, unset) for piece in word.pieces])

    def _fields(self, shell: _Shell, word: Word, *, unset: str | None = None) -> list[str]:
        """Return the words that a word becomes: unquoted values are split at blanks."""
        done, current, none = list[str](), list[str](), False
        for piece in word.pieces:
            items = self._array(shell, piece)
            if items is not None:
                # quotes around an empty array make no word
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
        """Split an unquoted value at its blanks, the first part behind what stands in front."""
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

    def _array(self, shell: _Shell, piece: Piece) -> list[str] | None:
        """Return the words of `${NAME[@]}` and `$@`; None for anything else."""
        if piece.kind != "parameter":
            return None
        match = _ALL.fullmatch(piece.text)
        if match is None:
            return None
        if match[3]:
            return shell.given  # none where the script itself is called
        if match[1] in shell.arrays:
            items = shell.arrays[match[1]]
            if isinstance(items, Undecided):
                return [items]
        elif match[1] in shell.scalars:
            items = [shell.scalars[match[1]]]
        elif match[1] in self.assigned:
            items = []
        else:
            return [Unknown(piece.text)]
        return [" ".join(items)] if match[2] == "*" and piece.quoted else items

    def _piece(self, shell: _Shell, piece: Piece, unset: str | None) -> str:
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

    def _undecided_in(self, shell: _Shell, text: str) -> Undecided | None:
        for name in re.findall(NAME, text):
            if isinstance(value := shell.scalars.get(name), Undecided):
                return value
        return None

    def _parameter(self, shell: _Shell, piece: Piece, unset: str | None) -> str:
        """Return the value of `$NAME` or `${NAME...}`; what is unknown stays as it is written."""
        written = piece.text
        inner = written[2:-1] if written.startswith("${") else written[1:]
        if inner == "#":
            return str(len(shell.given))
        match = _PARAMETER.fullmatch(inner)
        if match is None or match["mark"] == "!":
            return Unknown(written)
        name, index, operator, word = match["name"], match["index"], match["op"], match["word"]
        value = self._named(shell, name, index)
        if match["mark"] == "#":
            if index in ("@", "*"):
                items = shell.arrays.get(name, [])
                return Unknown(written) if isinstance(items, Undecided) else str(len(items))
            return Unknown(written) if isinstance(value, Unknown) else str(len(value or ""))
        if operator is None and word:
            return Unknown(written)
        if operator and operator[-1] in "-=?+":
            # with a colon an empty value counts as none
            has = value is not None and (bool(value) or not operator.startswith(":"))
            if operator[-1] == "+":  # its text stands in where there is a value
                return self._default(shell, word, piece) if has else ""
            if has and value is not None:
                return value
            if operator[-1] == "?":
                return Unknown(written)
            if self._sourced and not name.isdigit():
                self._defaults[name] = None
            text = self._default(shell, word, piece)
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
        if name in self.assigned:
            return ""  # of a branch that was not taken
        if unset is None:
            return Unknown(written)
        self._taken[name] = None
        return unset

    def _named(self, shell: _Shell, name: str, index: str | None) -> str | None:
        if name.isdigit():
            place = int(name) - 1
            return shell.given[place] if 0 <= place < len(shell.given) else None
        if name in shell.arrays:
            items = shell.arrays[name]
            if isinstance(items, Undecided):
                return items
            if index in ("@", "*"):
                return glued([" ".join(items)]) if items else ""
            place = 0 if index is None else (self._arithmetic(shell, index) or 0)
            return items[place] if -len(items) <= place < len(items) else ""
        return shell.scalars.get(name)

    def _default(self, shell: _Shell, text: str, piece: Piece) -> str:
        """Return the text behind `:-`, whose quotes and variables count."""
        scanner = Scanner(text, self.path)
        if not piece.quoted:
            return self._text(shell, scanner.word(""))
        # between double quotes, single ones stand for themselves
        pieces = list[Piece]()
        while scanner.at < len(text):
            part = scanner.word("'")
            pieces += part.pieces
            if scanner.at < len(text):
                pieces.append(Piece("text", "'", quoted=True))
                scanner.at += 1
        return self._text(shell, Word(tuple(pieces), 1))

    def _changed(
        self, shell: _Shell, value: str, operator: str, word: str, piece: Piece
    ) -> str | None:
        """Return a value with a part cut off or replaced; None where that is not read."""
        if operator == ":":
            bounds = [self._arithmetic(shell, part) for part in word.split(":")]
            if len(bounds) > 2 or None in bounds:
                return None
            start, *length = (int(bound or 0) for bound in bounds)
            # from the end, unless that is in front of the beginning
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

    def _arithmetic(self, shell: _Shell, text: str) -> int | None:
        """Return the value of `$((text))`; None where only running tells it, or it is no sum."""
        expanded = self._text(shell, Scanner(text.replace('"', ""), self.path).word(""))
        if isinstance(expanded, Unknown):
            return None

        def value_of(name: str) -> str | None:
            found = self._named(shell, name, None)
            # of another branch it is nothing, of the environment only running tells
            return "0" if found is None and name in self.assigned else found

        return sum_of(expanded, value_of, lambda name, text: self._set(shell, name, text))


_STATEMENTS: Mapping[type, Callable[[_Run, _Shell, Any], bool | None]] = {
    Simple: _Run._run_simple,
    Test: _Run._run_test,
    Arithmetic: _Run._run_arithmetic,
    If: _Run._run_if,
    Case: _Run._run_case,
    For: _Run._run_for,
    Loop: _Run._run_loop,
    Function: _Run._run_function,
    Group: _Run._run_group,
    Chain: _Run._run_chain,
    Not: _Run._run_not,
}
