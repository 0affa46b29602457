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
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from autopar.errors import DocumentError
from search.configuration.shell_expansion import Expansion, Shell
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
    Simple,
    Statement,
    Test,
    Word,
    is_command,
    parse,
    plain_text,
)
from search.configuration.shell_values import (
    Command,
    Condition,
    Undecided,
    Unknown,
    program_of,
    runs_ranks,
    settled,
    undecided,
)

__all__ = ["script_command"]

_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_DECLARE = frozenset({"export", "declare", "readonly", "typeset", "local"})
_READS = frozenset({"read", "mapfile", "readarray"})
_LOCAL = frozenset({"declare", "typeset", "local"})
_NO_SETTINGS = re.compile(r".*(activate|conda\.sh|bashrc|profile|setvars\.sh|modules?/.*)")
"""Sourced files that set up a shell, and no launch."""
_QUIET = frozenset({"echo", "printf", "mkdir", "set", ":", "true", "cd", "pwd", "chmod", "sleep"})
"""Commands that end well and change no variable."""
_MOST_STEPS = 50_000


# --------------------------------------------------------------------------------------------------
# What statements do.


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
    run, shell = _Run(str(path)), Shell()
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


class _Run(Expansion):
    """One reading of a script: its path and names, and how far it went."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.left_out: dict[str, None] = {}
        """Flags whose value only running tells, a sentence each."""
        self._outer: list[dict[str, tuple[Any, Any]]] = []
        """Of each function that runs, what its local names are outside of it."""
        self._steps = self._depth = 0

    def noted(self, command: Command, launches: int) -> Command:
        """Return a launch with what was taken for granted."""
        notes = [*self.left_out]
        if launches > 1:
            notes.append(f"the script launches {launches} times, of which the last is read")
        if self.sourced:
            names = f"; taken as not set: {', '.join(self.defaults)}" if self.defaults else ""
            notes.append(f"what {', '.join(self.sourced)} sets is not read{names}")
        if self.taken:
            notes.append(f"taken as not set in conditions: {', '.join(self.taken)}")
        return replace(command, notes=tuple(notes))

    def depends(self, value: Undecided) -> DocumentError:
        """Return why a launch is not known."""
        return DocumentError(
            self.path,
            f"what is launched depends on {value.why}, which only running tells",
            remedy="write the branch that is meant, or give the arguments in YAML or JSON",
        )

    def body(self, shell: Shell, body: Body) -> bool | None:
        """Run statements; return whether the last one ends well, None where only running tells."""
        status: bool | None = True
        for statement in body:
            status = self._one(shell, statement)
        return status

    def _one(self, shell: Shell, statement: Statement) -> bool | None:
        self._step()
        return _STATEMENTS[type(statement)](self, shell, statement)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            problem = f"runs more than {_MOST_STEPS} statements, expected a launch script"
            raise DocumentError(self.path, problem)

    def _run_chain(self, shell: Shell, chain: Chain) -> bool | None:
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

    def _run_not(self, shell: Shell, statement: Not) -> bool | None:
        status = self._one(shell, statement.statement)
        return None if status is None else not status

    def _run_group(self, shell: Shell, group: Group) -> bool | None:
        if not group.apart:
            return self.body(shell, group.body)
        inner = shell.copy()
        status: bool | None = None
        with suppress(_Exit):
            status = self.body(inner, group.body)
        shell.found, shell.launches = inner.found, inner.launches
        return status

    def _run_function(self, shell: Shell, function: Function) -> bool:
        shell.functions[function.name] = function.body
        return True

    def _run_if(self, shell: Shell, statement: If) -> bool | None:
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

    def _run_case(self, shell: Shell, statement: Case) -> bool | None:
        value = self._text(shell, statement.word, unset="")
        if isinstance(value, Unknown):
            bodies: list[Body] = [body for _, body in statement.clauses]
            return self._either(shell, [*bodies, ()], f"`{value}` on line {statement.line}")
        for patterns, body in statement.clauses:
            if any(fnmatchcase(value, self._text(shell, word)) for word in patterns):
                return self.body(shell, body)
        return True

    def _run_for(self, shell: Shell, loop: For) -> bool | None:
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

    def _run_loop(self, shell: Shell, loop: Loop) -> bool | None:
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

    def _run_arithmetic(self, shell: Shell, statement: Arithmetic) -> bool | None:
        value = self._arithmetic(shell, statement.text)
        return None if value is None else value != 0

    # ----------------------------------------------------------------------------------------------
    # What only running tells.

    def _either(self, shell: Shell, bodies: list[Body], why: str) -> bool | None:
        """Run each of these from here: what is the same after all that go on is known."""
        after, stops = list[Shell](), list[_Exit]()
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

    def _shown(self, statement: Statement, shell: Shell) -> str:
        """Return line and words of a condition, for a sentence."""
        words = [
            word if isinstance(word, str) else "".join(piece.text for piece in word.pieces)
            for word in getattr(statement, "words", ())
        ]
        said = " ".join(words) or getattr(statement, "text", "")
        return f"`{said[:60]}` on line {statement.line}" if said else f"line {statement.line}"

    # ----------------------------------------------------------------------------------------------
    # Commands.

    def _run_simple(self, shell: Shell, command: Simple) -> bool | None:
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

    def _declare(self, shell: Shell, what: str, words: list[Word]) -> bool:
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
        self, shell: Shell, fields: list[str], words: list[Word], own: Mapping[str, str]
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
                self.sourced[rest[0]] = None
            return None
        if re.match("-[A-Za-z-]", name):
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
        self, shell: Shell, launch: tuple[list[str], str, list[str]], own: Mapping[str, str]
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

    def _function(self, shell: Shell, name: str, given: list[str]) -> bool | None:
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

    def _restore(self, shell: Shell, name: str, old: tuple[Any, Any]) -> None:
        """Give a name what it had outside of a function: as a variable, as an array."""
        scalar, array = old
        shell.scalars.pop(name, None)
        shell.arrays.pop(name, None)
        if scalar is not None:
            shell.scalars[name] = scalar
        if array is not None:
            shell.arrays[name] = array

    def _inner(self, shell: Shell, text: str, line: int) -> bool | None:
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

    def _tested(self, shell: Shell, words: list[Word]) -> bool | None:
        fields = [item for word in words[1:] for item in self._fields(shell, word, unset="")]
        if words[0].bare == "[":
            if fields[-1:] != ["]"]:
                return False  # bash says so, and goes on
            fields.pop()
        return Condition(list(fields), glob=False).value()

    def _run_test(self, shell: Shell, test: Test) -> bool | None:
        items = list[str]()
        quoted = list[bool]()
        for word in test.words:
            # words are not split here
            items.append(word if isinstance(word, str) else self._text(shell, word, unset=""))
            quoted.append(isinstance(word, Word) and any(piece.quoted for piece in word.pieces))
        return Condition(items, glob=True, quoted=quoted).value()


_STATEMENTS: Mapping[type, Callable[[_Run, Shell, Any], bool | None]] = {
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
