"""Commands of a bash script: functions, control flow, other shells, sourced files, launches.

`search.engines.text.shell_run` runs the statements around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from autopar.errors import DocumentError
from search.engines.text.shell_builtins import BUILTINS, OUTER_ERREXIT, REFUSED, Exit, Sink
from search.engines.text.shell_run import Statements
from search.engines.text.shell_syntax import DECLARES, DEEPEST, Simple, assignment_of, parse
from search.engines.text.shell_values import (
    Command,
    Condition,
    Hole,
    Shell,
    Variable,
    WrongTestError,
    has_flags,
    is_open,
    path_of,
    program_of,
    runs_ranks,
    settled,
)
from search.engines.text.shell_words import NAME, Piece, Word, refusal, shadowed

_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_NO_SETTINGS = re.compile(r".*(activate|conda\.sh|bashrc|profile|setvars\.sh|modules?/.*)")
"""Pattern of sourced files that set up a shell and do not affect the launch command."""
_MOST_SOURCED = 1 << 18


def _named(written: Mapping[str, str | None], words: Iterable[str]) -> Mapping[str, str | None]:
    """Return the files that the words of a command or the text of another file name."""
    if not written:
        return {}
    inside = (word for text in written.values() for word in re.findall(r"[^\s\"',]+", text or ""))
    named = {path_of(word.rpartition("=")[2]) for word in (*words, *inside)}
    return {name: text for name, text in written.items() if name in named}


class Run(Statements):
    """One interpretation of a script."""

    def _run_simple(self, shell: Shell, command: Simple) -> int | None:
        words = [*command.words]
        sets = list[Word]()
        while words and assignment_of(words[0]) is not None:
            sets.append(words.pop(0))
        if not words:
            self._fed(shell, command.redirects, lambda: self._only_input(shell, command))
            self.substituted = 0
            for word in sets:
                self._assign(shell, word)
            return self.substituted
        first = words[0].bare
        if first in DECLARES and first not in shell.functions:
            if sets:
                raise self.refuse(f"an assignment in front of `{first}`")
            self.substituted = 0
            return self._fed(
                shell, command.redirects, lambda: self.declare(shell, str(first), words[1:])
            )
        self.substituted = 0
        unset = "" if first in ("[", "test") and first not in shell.functions else None
        fields = [item for word in words for item in self._fields(shell, word, unset=unset)]
        if not fields:
            for word in sets:
                self._assign(shell, word)
            return self.substituted
        if fields[0] == "exec" and not sets:
            sink = self.sink
            self._redirect(shell, command.redirects)
            if self.sink is not sink:
                self.sink.unread = True  # what follows goes elsewhere
            return self._exec(shell, fields[1:], command.line)
        return self._fed(
            shell, command.redirects, lambda: self._with(shell, sets, fields, command.line)
        )

    def _only_input(self, shell: Shell, command: Simple) -> int:
        if not command.words and self.input is None:
            self.sink.known = False  # `$(< file)`
        return 0

    def _with(self, shell: Shell, sets: list[Word], fields: list[str], line: int) -> int | None:
        """Run a command with assignments in front of it, which apply to this command only."""
        if fields[0] in ("[", "test") and fields[0] not in shell.functions:
            return self._bracket(shell, fields)
        names = [found.name for word in sets if (found := assignment_of(word)) is not None]
        before = {name: shell.variables.get(name) for name in names}
        for word in sets:
            self._assign(shell, word)
        for name in names:
            variable = shell.variables[name]
            if "x" not in variable.marks:
                shell.variables[name] = variable._replace(marks=variable.marks + "x")
        try:
            return self.call(shell, fields, line)
        finally:
            for name, old in before.items():
                if old is None:
                    shell.variables.pop(name, None)
                else:
                    shell.variables[name] = old

    def call(self, shell: Shell, fields: list[str], line: int) -> int | None:
        if fields[0] in shell.functions:
            return self._function(shell, fields[0], fields[1:])
        return self._builtin(shell, fields, line)

    def _builtin(self, shell: Shell, fields: list[str], line: int) -> int | None:
        """Run a command that is no function of the script."""
        name, rest = fields[0], fields[1:]
        if (control := _CONTROL.get(name)) is not None:
            return control(self, shell, name, rest)
        if name in ("command", "builtin"):
            return self._command(shell, rest, line)
        if name == "exec":
            return self._exec(shell, rest, line)
        if name == "eval":
            return self.evaluate(shell, " ".join(rest), line) if rest else 0
        if name in (".", "source") and rest:
            return self._source(shell, rest[0], rest[1:])
        if name in ("[", "test"):
            if name == "[" and rest[-1:] != ["]"]:
                return 2
            return self._condition(shell, rest[:-1] if name == "[" else rest)
        if (builtin := BUILTINS.get(name)) is not None:
            return builtin(self, shell, rest)
        if name in REFUSED or name in DECLARES:
            raise self.refuse(f"`{name}` here")
        return self._program(shell, fields, line)

    def _command(self, shell: Shell, fields: list[str], line: int) -> int | None:
        if not fields or fields[0].startswith("-"):
            self.sink.known = False
            return None
        return self._builtin(shell, fields, line)

    def _exec(self, shell: Shell, fields: list[str], line: int) -> int | None:
        """Run `exec`: a program in place of the script, or redirections of what follows."""
        if not fields:
            return 0
        if fields[0].startswith("-"):
            raise self.refuse(f"`exec {fields[0]}`")
        raise Exit("exit", 1, self._program(shell, fields, line))

    def _leave(self, shell: Shell, name: str, words: list[str]) -> int | None:
        """Run `exit`, `return`, `break` or `continue`."""
        word = words[0] if words else ""
        if word and not is_open(word) and not re.fullmatch("[-+]?[0-9]{1,9}", word):
            raise self.refuse(f"`{name} {word[:40]}`")
        if name in ("exit", "return"):
            if name == "return" and not self._returns:
                return 1  # bash reports an error and continues
            status = shell.status if not word else None if is_open(word) else int(word) % 256
            raise Exit(name, 1, status)
        if not self._loops:
            return 0
        if is_open(word) or (word and int(word) < 1):
            raise self.refuse(f"`{name} {word[:40]}`")
        raise Exit(name, int(word or 1))

    def _program(self, shell: Shell, fields: list[str], line: int) -> int | None:
        """Take note of a program: the launch command, another shell, or one that sets nothing."""
        name = fields[0]
        self.sink.known = False
        if name == "env" and (sets := _settings(fields[1:])):
            return self._with_environment(shell, sets, fields[1 + len(sets) :], line)
        if name == "kill" and any(self.holes.shown(word) == "$$" for word in fields):
            raise self.refuse("`kill` of the script")
        if re.match("-[A-Za-z-]", name):
            self.left_out[
                f"line {line} begins a command with {name}: the one in front of it ends "
                "there, with a comment or a blank behind its backslash, and does not have it"
            ] = None
            return None
        if name.startswith("["):
            return 127  # `[$A = 1 ]` is no command; bash reports an error and continues
        launch = program_of(fields, self.holes)
        if launch is not None:
            self._launch(shell, launch)
            return None
        for word in fields[1:]:
            if (path := path_of(self.holes.shown(word))) in shell.written:
                shell.written[path] = None  # `sed -i` and `mv` change it
        last = fields[-1]
        runs = any(_SHELLS.fullmatch(word) for word in fields[-2:])
        if self.input is not None and runs and (_SHELLS.fullmatch(last) or last[:1] == "-"):
            # `srun bash <<END` runs a nested script, unless the command names a script file.
            self._child(shell, self.input.rest(), [], line)
            return None
        inner = next((i for i, w in enumerate(fields[:-1]) if re.fullmatch("-[a-z]*c", w) and i), 0)
        if inner and any(_SHELLS.fullmatch(word) for word in fields[:inner]):
            flags = "".join(w[1:] for w in fields[: inner + 1] if re.fullmatch("-[a-z]+", w))
            options = frozenset(flags) & {"e", "u"}
            outer, self.around = self.around, (*self.around, *fields[:inner])
            self._child(shell, fields[inner + 1], fields[inner + 3 :], line, options)
            self.around = outer
        return None

    def _with_environment(
        self, shell: Shell, sets: list[str], fields: list[str], line: int
    ) -> int | None:
        """Run what follows the assignments of `env`."""
        inner = shell.copy()
        for word in sets:
            name, _, text = word.partition("=")
            inner.variables[name] = Variable(text, "x")
        status = self._program(inner, fields, line) if fields else None
        shell.keep(inner)
        return status

    def _child(
        self,
        shell: Shell,
        text: str,
        given: list[str],
        line: int,
        options: frozenset[str] = frozenset(),
    ) -> None:
        """Run a text in a separate shell, which sees only exported variables."""

        def run(inner: Shell) -> int | None:
            inner.variables = {n: v for n, v in inner.variables.items() if "x" in v.marks}
            inner.variables["IFS"] = Variable(" \t\n")
            inner.options, inner.given, inner.told = options, given, True
            inner.frames = ()
            return self.evaluate(inner, text, line)

        self._apart(shell, run)

    def _launch(self, shell: Shell, launch: tuple[list[str], str, list[str]]) -> None:
        before, program, arguments = launch
        flagged = has_flags(arguments) or any(self.holes.of(word) for word in arguments)
        if isinstance(shell.found, Command):
            found, ranks = shell.found, runs_ranks(shell.found.before) - runs_ranks(before)
            if ranks > 0 or (ranks == 0 and has_flags(found.arguments) and not flagged):
                return
        for index, word in enumerate((*before, program, *arguments)):
            at = index - len(before) - 1
            for hole in self.holes.of(word):
                if hole.refused:
                    raise refusal(self.path, hole.line, hole.refused)
                if not hole.why:
                    continue
                if at < 1 or hole.many == 2 or not re.match(r"--\S+$", arguments[at - 1]):
                    shell.found = hole
                    return
                # A single value of a flag, which may be a path without effect on the run.
                self.left_out[f"{arguments[at - 1]} depends on {hole.why}"] = None
        loose, single = settled(arguments, self.holes)
        for place in loose:
            word = self.holes.shown(arguments[place])
            self.left_out[f"{word[:60]} is known only at run time; using no value"] = None
        if single:
            names = ", ".join(dict.fromkeys(word[:60] for word in single))
            self.left_out[f"known only at run time, counted as one word each: {names}"] = None
        if files := [word for word in arguments if word in self.files]:
            names = ", ".join(dict.fromkeys(self.holes.shown(word)[:60] for word in files))
            self.left_out[f"taken as written, as if no file matches: {names}"] = None
        exported = {
            name: variable.text() or ""
            for name, variable in shell.variables.items()
            if "x" in variable.marks and variable.value is not None
        }
        shown = self.holes.shown
        shell.found = Command(
            around=tuple(map(shown, self.around)),
            before=tuple(map(shown, before)),
            program=shown(program),
            arguments=tuple(map(shown, arguments)),
            loose=tuple(loose),
            environment={name: shown(value) for name, value in exported.items()},
            written=_named(shell.written, map(shown, (*before, *arguments))),
        )
        shell.launches += 1

    def _function(self, shell: Shell, name: str, given: list[str]) -> int | None:
        body = shell.functions[name]
        if isinstance(body, Hole):
            raise self.depends(body)
        self._deeper(f"the function {name!r} calls itself too often")
        outer, told, loops = shell.given, shell.told, self._loops
        shell.given, shell.told, self._loops = given, True, []
        shell.frames = (*shell.frames, {})
        self._returns.append(([], []))
        try:
            try:
                shell.status = self.body(shell, body)
            except Exit as stop:
                if stop.what != "return":
                    raise
                shell.status = stop.status
            self._merge_returns(shell)
            return shell.status
        finally:
            self._returns.pop()
            self._loops = loops
            shell.given, shell.told = outer, told
            *frames, own = shell.frames
            shell.frames = tuple(frames)
            for local, old in own.items():
                shell.variables.pop(local, None)
                if old is not None:
                    shell.variables[local] = old
            self._depth -= 1

    def _merge_returns(self, shell: Shell) -> None:
        states, whys = self._returns[-1]
        if states:
            self._merge(shell, [shell.copy(), *states], whys[-1] if whys else "a return")

    def _deeper(self, problem: str) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise DocumentError(self.path, problem)

    def evaluate(self, shell: Shell, text: str, line: int) -> int | None:
        """Parse and run a text, as `eval` and `bash -c` do."""
        holes = [hole for hole in self.holes.of(text) if hole.refused]
        if holes:
            raise refusal(self.path, holes[0].line, holes[0].refused)
        for hole in self.holes.of(text):
            if hole.why and hole.many == 1:  # it would be split, or expanded, once more
                other = self.holes.character(hole._replace(many=2))
                text = text.replace(self.holes.character(hole), other)
        self._deeper("is nested too deeply, expected a launch script")
        try:
            self.budget.size(len(text))
            body, names = parse(text, self.path, line, extended="extglob" in shell.options)
            self.assigned |= names
            return self.body(shell, body)
        finally:
            self._depth -= 1

    def _substitute(self, shell: Shell, piece: Piece, ends: str = "\n") -> str:
        """Return the output of `$(...)` without `ends`; open if a program writes it."""
        outer, self.sink, line = self.sink, Sink(), self.line
        tested = self._tested

        def run(inner: Shell) -> int | None:
            if "inherit_errexit" not in inner.options:
                if "e" in inner.options:  # a failure ends no substitution
                    inner.options = inner.options - {"e"} | {OUTER_ERREXIT}
                self._tested = 1
            return self.body(inner, piece.body or ())

        self._deeper("is nested too deeply, expected a launch script")
        try:
            self.substituted = self._apart(shell, run)
            shell.status = self.substituted  # `$?` behind it in the same command
            known, text, unread = self.sink.known, self.sink.text, self.sink.unread
        finally:
            self.sink, self._tested, self.line = outer, tested, line
            self._depth -= 1
        if unread:
            return self.unread(piece.text)
        return text.rstrip(ends) if known else self.hole(piece.text)

    # ----------------------------------------------------------------------------------------------
    # Other files.

    def _source(self, shell: Shell, written: str, given: list[str]) -> int | None:
        """Run a sourced file, or record it as not read if it is not found."""
        path = self._sourced_path(written)
        if path is None:
            if not _NO_SETTINGS.fullmatch(self.holes.shown(written)):
                self.sourced[written] = None
            return None
        self._deeper(f"the file {written!r} sources itself too often")
        outer = shell.given
        self._returns.append(([], []))
        try:
            text = path.read_text(encoding="utf-8-sig")
            self.budget.size(len(text) // 4)
            body, names = parse(text, str(path), extended="extglob" in shell.options)
            self.assigned |= names
            if given:
                shell.given = given
            try:
                status = self.body(shell, body)
            except Exit as stop:
                if stop.what != "return":
                    raise
                status = stop.status
            self._merge_returns(shell)
            return status
        except (OSError, UnicodeDecodeError):
            self.sourced[written] = None
            return None
        finally:
            if given:
                shell.given = outer
            self._returns.pop()
            self._depth -= 1

    def _sourced_path(self, written: str) -> Path | None:
        """Return the path of a sourced file; None if it is not found or only sets up a shell.

        The folder of the script is tried first, because scripts use `$(dirname "$0")/env.sh`. The
        current folder is next, as in bash.
        """
        if _NO_SETTINGS.fullmatch(self.holes.shown(written)):
            return None
        # A path below a folder that is known only at run time.
        rest = written[2:] if is_open(written[:1]) and written[1:2] == "/" else written
        if is_open(rest):
            return None
        for folder in (Path(self.path).parent, Path()):
            path = folder / rest
            with suppress(OSError, ValueError):
                if path.is_file() and path.stat().st_size <= _MOST_SOURCED:
                    if note := shadowed(path, Path(rest)):
                        self.left_out[note] = None
                    return path
        return None

    def _bracket(self, shell: Shell, words: list[str]) -> int | None:
        name, *fields = words
        if name == "[":
            if fields[-1:] != ["]"]:
                return 2  # bash reports an error and continues
            fields.pop()
        if any(hole.many == 2 for field in fields for hole in self.holes.of(field)):
            return None  # the number of words decides how they are read
        return self._condition(shell, fields)

    def _condition(self, shell: Shell, fields: list[str]) -> int | None:
        try:
            found = Condition(fields, lambda how, word: self._unary(shell, how, word)).value()
        except WrongTestError:
            return 2
        return None if found is None else int(not found)


def _settings(fields: list[str]) -> list[str]:
    """Return the assignments at the begin of the words behind `env`."""
    count = next((i for i, w in enumerate(fields) if not re.match(rf"{NAME}=", w)), len(fields))
    return fields[:count]


_CONTROL: Mapping[str, Callable[[Run, Shell, str, list[str]], int | None]] = dict.fromkeys(
    ("exit", "return", "break", "continue"), Run._leave
)
