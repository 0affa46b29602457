"""Launch command of a bash script, found by interpreting the script without running anything.

Variables, arrays, arithmetic, conditions, cases, loops, functions, `eval` and `bash -c` are
interpreted as in bash. Values known only at run time (command substitutions, files, environment
variables) stay as written. A condition on such a value is open: all its branches are interpreted. A
launch command is rejected if they differ in flags that affect memory or time.
`search.engines.text.shell_syntax` parses the text into statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from autopar.errors import DocumentError
from autopar.records import replace
from search.engines.text.shell_expansion import Expansion, Shell
from search.engines.text.shell_syntax import (
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
    assignment_of,
    is_command,
    parse,
)
from search.engines.text.shell_values import (
    Command,
    Condition,
    Undecided,
    Unknown,
    program_of,
    runs_ranks,
    settled,
    split_flags,
    undecided,
    world_flags,
)

_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_DECLARE = frozenset({"export", "declare", "readonly", "typeset", "local"})
_READS = frozenset({"read", "mapfile", "readarray"})
_LOCAL = frozenset({"declare", "typeset", "local"})
_NO_SETTINGS = re.compile(r".*(activate|conda\.sh|bashrc|profile|setvars\.sh|modules?/.*)")
"""Pattern of sourced files that set up a shell and do not affect the launch command."""
_QUIET = frozenset({"echo", "printf", "mkdir", "set", ":", "true", "cd", "pwd", "chmod", "sleep"})
"""Commands that succeed and change no variable of the script."""
_FOLDER = re.compile(r"(?:\$\(.*\)|\$\{[^}/]*\}|\$\w+)/([^$`]+)", re.DOTALL)
"""Pattern of a path below a folder that is known only at run time."""
_MOST_SOURCED = 1 << 20
_MOST_WAYS = 64
"""Maximum number of interpretations of a script with different branches of open conditions."""
_MOST_STEPS = 50_000


# --------------------------------------------------------------------------------------------------
# Execution of statements.


class _Exit(Exception):  # noqa: N818 (no error)
    """Control-flow signal of `exit`, `return`, `break` or `continue`, which `what` names."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def script_command(
    text: str,
    path: object,
    *,
    given: Mapping[str, str] | None = None,
    harmless: Callable[[str], bool] | None = None,
) -> Command:
    """Return the launch command of a bash script: the last one that runs a `.py` file with flags.

    Variables that the script does not set stay `$NAME`, and are empty in conditions.

    Parameters
    ----------
    path : path of the script, for errors and for sourced files.
    given : environment variables.
    harmless : returns True for a flag name that affects neither memory nor time. A condition known
        only at run time is accepted if it decides only such flags.

    Raises DocumentError for an unclosed quote or bracket, for a launch that depends on a value
    known only at run time, and for unsupported syntax.
    """
    try:
        body, names = parse(text, str(path))
        script = _Script(body, frozenset(names), str(path), given or {}, True)
        found, run = _followed(script, {})
        said: tuple[str, ...] = ()
        if isinstance(found, Command) and not found.program and run.empty:
            # `[ -z "$SLURM_JOB_ID" ] && exit 1`: a script that exits without a variable is meant
            # to run with it.
            other, again = _followed(script._replace(blank=False), {})
            if isinstance(other, Undecided) or other.program:
                said = (f"nothing is launched where these are not set: {', '.join(run.empty)}",)
                found, run, script = other, again, script._replace(blank=False)
        if isinstance(found, Undecided):
            if harmless is None:
                raise run.depends(found)
            found = _same_launch([*_ways(script, found, run)], harmless, run, found)
    except RecursionError:
        raise DocumentError(str(path), "is nested too deeply, expected a launch script") from None
    return replace(found, notes=(*found.notes, *said))


class _Script(NamedTuple):
    """A parsed script, and the environment variables to interpret it with."""

    body: Body
    names: frozenset[str]
    path: str
    given: Mapping[str, str]
    blank: bool
    """True if unset variables are empty in conditions; False if such conditions are open."""


def _followed(script: _Script, ways: Mapping[str, int]) -> tuple[Command | Undecided, _Run]:
    """Return (launch command, interpretation) of a script with fixed branches of open conditions.

    The command is `Undecided` if it depends on an open condition that is not in `ways`. Without a
    launch command, the longest array of the script provides the arguments.
    ways : index of the branch to run, by open condition.
    """
    run, shell = _Run(script.path, ways, blank=script.blank), Shell(scalars={**script.given})
    run.assigned |= script.names
    with suppress(_Exit):
        run.body(shell, script.body)
    if isinstance(shell.found, Undecided):
        return shell.found, run
    if shell.found is not None:
        return run.noted(shell.found, shell.launches), run
    arrays = {n: items for n, items in shell.arrays.items() if not isinstance(items, Undecided)}
    name = max(arrays, key=lambda name: len(arrays[name]), default="")
    longest, others = arrays.pop(name, []), [other for other, items in arrays.items() if items]
    left = f", and not {', '.join(others)}" if others else ""
    run.left_out[f"no launch command found; using {name}{left}"] = None
    return run.noted(Command(before=(), arguments=tuple(map(str, longest))), 0), run


def _ways(
    script: _Script, found: Undecided, run: _Run
) -> Iterator[tuple[Command, Mapping[str, int]]]:
    """Yield (launch command, branch indices by open condition) for each combination of branches.

    Only conditions that affect the launch command are combined. Branches without a launch command
    are skipped, because a script ends there with an error. Raises DocumentError if the command
    depends on another unknown value or on too many conditions.
    """
    todo: list[tuple[dict[str, int], Undecided, _Run]] = [({}, found, run)]
    followed = 0
    while todo:
        ways, open_, reading = todo.pop()
        # A value that depends on no condition of the script has no branches.
        if open_.why not in reading.open or open_.why in ways:
            raise reading.depends(open_)
        for way in range(reading.open[open_.why]):
            followed += 1
            if followed > _MOST_WAYS:
                raise reading.depends(open_)
            chosen = {**ways, open_.why: way}
            one, read = _followed(script, chosen)
            if isinstance(one, Undecided):
                todo.append((chosen, one, read))
            elif one.program:
                yield one, chosen


def _same_launch(
    ways: list[tuple[Command, Mapping[str, int]]],
    harmless: Callable[[str], bool],
    run: _Run,
    found: Undecided,
) -> Command:
    """Return the first of several launch commands that differ only in harmless flags.

    ways : launch commands, each with its branch indices by open condition.
    Raises DocumentError if they differ in other flags, or if there are none.
    """
    if not ways:
        raise run.depends(found)
    commands = [command for command, _ in ways]
    first = commands[0]
    split = [split_flags(command.arguments, harmless) for command in commands]
    started = [world_flags(command.before) for command in commands]
    flags = [split_flags(kept, lambda _: True)[1] for kept, _ in split]
    for at, (kept, _) in enumerate(split):
        differs = [*_differing(flags[0], flags[at]), *_differing(started[0], started[at])]
        if differs or kept != split[0][0]:
            raise run.depends(found, differs)
    decided = sorted({name for _, flags in split for name, words in flags.items()
                      if any(flags_.get(name) != words for _, flags_ in split)})  # fmt: skip
    environment = {
        name: value if all(c.environment.get(name) == value for c in commands) else f"${name}"
        for name, value in first.environment.items()
    }
    what = ", ".join(f"--{name}" for name in decided) or "nothing of the launch command"
    whys = ", ".join(dict.fromkeys(why for _, chosen in ways for why in chosen))
    note = f"{whys} decides {what}, which changes neither memory nor time"
    return replace(
        first,
        environment=environment,
        notes=tuple(dict.fromkeys((*first.notes, note))),
    )


_Flags = Mapping[str, tuple[str, ...]]


def _differing(one: _Flags, other: _Flags) -> list[str]:
    """Return the names of the flags that differ between two launch commands."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if one.get(name) != other.get(name)]


class _Run(Expansion):
    """One interpretation of a script, with its open conditions and assumptions."""

    def __init__(self, path: str, ways: Mapping[str, int], *, blank: bool = True) -> None:
        super().__init__(path, blank=blank)
        self._ways = ways
        """Index of the branch to run, by open condition."""
        self.open: dict[str, int] = {}
        """Number of branches, by open condition found so far."""
        self.left_out: dict[str, None] = {}
        """Sentences on ignored words and on words known only at run time, as ordered keys."""
        self._outer: list[dict[str, tuple[Any, Any, Any]]] = []
        """Stack of running functions: outer (scalar, array, map) of each local variable."""
        self._steps = self._depth = 0

    def noted(self, command: Command, launches: int) -> Command:
        """Return a launch command with notes on assumptions; launches : number of them found."""
        notes = [*self.left_out]
        if launches > 1:
            notes.append(f"the script has {launches} launch commands; the last one is read")
        if self.sourced:
            names = f"; assumed unset: {', '.join(self.defaults)}" if self.defaults else ""
            notes.append(f"variables set in {', '.join(self.sourced)} are not read{names}")
        if self.taken:
            notes.append(f"assumed unset in conditions: {', '.join(self.taken)}")
        return replace(command, notes=tuple(notes), unset=dict(self.unset))

    def depends(self, value: Undecided, flags: Sequence[str] = ()) -> DocumentError:
        """Return the error for a launch command that depends on a value known only at run time.

        flags : names of flags that differ between the branches.
        """
        those = f": {', '.join(f'--{flag}' for flag in flags[:4])}" if flags else ""
        return DocumentError(
            self.path,
            f"the launch command depends on {value.why}, known only at run time{those}",
            remedy="Keep only the branch to check, or use YAML or JSON",
        )

    def body(self, shell: Shell, body: Body) -> bool | None:
        """Run statements; return True if the last one succeeds, None if known only at run time."""
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
            # An unknown command is assumed to succeed.
            if (status is not False) == (operator == "&&"):
                decided = status is not None or not isinstance(chain.first, Simple | Test)
                if decided or is_command(chain.first):
                    status = self._one(shell, statement)
                else:
                    status = self._either(shell, [(statement,), ()], self._shown(chain.first))
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
                why = self._shown(condition[-1]) if condition else "nothing"
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
                return self._either(shell, [loop.body, ()], self._shown(loop.condition[-1]))
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
    # Conditions known only at run time.

    def _either(self, shell: Shell, bodies: list[Body], why: str) -> bool | None:
        """Run every branch of an open condition from the current state, and merge the results.

        Variables that differ between the branches become `Undecided`. Branches that end the script
        are ignored. If `_ways` contains the condition, only the selected branch is run. Returns
        None, an unknown exit status.

        why : text of the condition.
        """
        self.open[why] = len(bodies)
        if why in self._ways:
            self.body(shell, bodies[self._ways[why]])
            return None
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
        for name in dict.fromkeys(n for branch in after for n in branch.maps):
            for key in dict.fromkeys(k for branch in after for k in branch.maps.get(name, ())):
                held = {branch.maps.get(name, {}).get(key) for branch in after}
                if len(held) > 1:
                    values_of = first.maps.setdefault(name, {})
                    values_of[key] = undecided(f"${{{name}[{key}]}}", why, many=False)
        if any(branch.found != first.found for branch in after):
            first.found = undecided("launch", why, many=True)
        shell.scalars, shell.arrays, shell.maps = first.scalars, first.arrays, first.maps
        shell.functions, shell.exported = first.functions, first.exported
        shell.found, shell.launches = first.found, max(branch.launches for branch in after)
        return None

    def _shown(self, statement: Statement) -> str:
        """Return the text and the line of a condition, for messages."""
        words = [
            word if isinstance(word, str) else "".join(piece.text for piece in word.pieces)
            for word in getattr(statement, "words", ())
        ]
        said = " ".join((" ".join(words) or getattr(statement, "text", "")).split())
        return f"`{said[:60]}` on line {statement.line}" if said else f"line {statement.line}"

    # ----------------------------------------------------------------------------------------------
    # Commands.

    def _run_simple(self, shell: Shell, command: Simple) -> bool | None:
        words = [*command.words]
        first = words[0].bare
        if first in _DECLARE:
            return self._declare(shell, str(first), words[1:])
        sets = list[Word]()
        while words and assignment_of(words[0]) is not None:
            sets.append(words.pop(0))
        if not words:
            for word in sets:
                self._assign(shell, word)
            return None if any(p.kind == "command" for w in sets for p in w.pieces) else True
        fields = [item for word in words for item in self._fields(shell, word)]
        if not fields:
            return True
        # Assignments before a command apply to this command only.
        own = shell.copy()
        for word in sets:
            self._assign(own, word)
        names = [found.name for word in sets if (found := assignment_of(word)) is not None]
        alone = {name: own.scalars.get(name, "") for name in names}
        return self._call(shell, fields, command, alone)

    def _declare(self, shell: Shell, what: str, words: list[Word]) -> bool:
        marks = [word.bare for word in words if word.bare and word.bare.startswith("-")]
        for word in words:
            if (word.bare or "").startswith("-"):
                continue
            found = assignment_of(word)
            name = found.name if found is not None else word.bare or ""
            if self._outer and what in _LOCAL and not any("g" in mark for mark in marks):
                old = shell.scalars.get(name), shell.arrays.get(name), shell.maps.get(name)
                self._outer[-1].setdefault(name, old)
                if found is None:
                    self._restore(shell, name, (None, None, None))
            if any("A" in mark for mark in marks):
                shell.scalars.pop(name, None)
                shell.arrays.pop(name, None)
                shell.maps.setdefault(name, {})
            if found is not None:
                self._assign(shell, word)
            if what == "export" or any("x" in mark for mark in marks):
                shell.exported[name] = None
        return True

    def _call(
        self, shell: Shell, fields: list[str], command: Simple, own: Mapping[str, str]
    ) -> bool | None:
        name, rest, line = fields[0], fields[1:], command.line
        if name in ("exit", "return", "break", "continue"):
            raise _Exit(name)
        if name in ("[", "test"):
            return self._tested(shell, [*command.words])
        if name in shell.functions:
            return self._function(shell, name, rest)
        if name == "eval":
            return self._inner(shell, " ".join(rest), line)
        if name == "unset":
            for item in rest:
                shell.scalars.pop(item, None)
                shell.arrays.pop(item, None)
                shell.maps.pop(item, None)
                shell.exported.pop(item, None)
            return True
        if name == "shift":
            count = int(rest[0]) if rest and re.fullmatch("[0-9]{1,9}", rest[0]) else 1
            if count <= len(shell.given):  # otherwise bash shifts nothing
                del shell.given[:count]
            return True
        if name == "set" and "--" in rest:
            shell.given = rest[rest.index("--") + 1 :]
            return True
        if name in (".", "source") and rest:
            return self._source(shell, rest[0])
        if re.match("-[A-Za-z-]", name):
            self.left_out[
                f"line {line} begins a command with {name}: the one in front of it ends "
                "there, with a comment or a blank behind its backslash, and does not have it"
            ] = None
            return None
        if name == "let":
            for item in rest:
                self._arithmetic(shell, item)
            return True
        if name == "read" and command.fed:
            # `read` reads the first line.
            text = self._text(shell, command.fed[0])
            first = text if isinstance(text, Unknown) else text.partition("\n")[0]
            return self._read(shell, rest, first, own.get("IFS"))
        if name == "getopts" and not shell.given:
            return False
        if name in _READS or (name == "printf" and rest[:1] == ["-v"]):
            for item in rest[1:2] if name == "printf" else rest:
                if re.fullmatch(NAME, item):
                    many = name in ("mapfile", "readarray")
                    self._set(shell, item, Unknown(f"${{{item}[@]}}" if many else f"${item}"))
            return None
        if name == "false" or (name.startswith("[") and name != "["):
            return False  # `[$A = 1 ]` is no command; bash reports an error and continues
        launch = program_of(fields)
        if launch is not None:
            self._launch(shell, launch, own)
            return None
        if command.fed and any(_SHELLS.fullmatch(word) for word in fields[-2:]):
            # `srun bash <<END` runs a nested script, unless the command names a script file.
            text = self._text(shell, command.fed[0])
            if not isinstance(text, Undecided) and (
                _SHELLS.fullmatch(fields[-1]) or fields[-1].startswith("-")
            ):
                self._apart(shell, text, line)
                return None
        inner = next((i for i, w in enumerate(fields[:-1]) if w == "-c" and i), None)
        if inner is not None and any(_SHELLS.fullmatch(word) for word in fields[:inner]):
            self._apart(shell, fields[inner + 1], line)
            return None
        return True if name in _QUIET else None

    def _read(self, shell: Shell, rest: list[str], text: str, ifs: str | None) -> bool | None:
        """Assign the words of a line to variables as the builtin `read` does.

        The last variable receives the remaining words; with `-a`, one array receives all words.
        rest : options and variable names. ifs : separators; None for blanks.
        """
        names = [word for word in rest if re.fullmatch(NAME, word)]
        marks = "".join(word[1:] for word in rest if word.startswith("-"))
        if isinstance(text, Unknown) or set(marks) - set("ra") or not names:
            for name in names:
                self._set(shell, name, Unknown(f"${name}"))
            return None
        if "a" in marks:
            shell.arrays[names[0]] = _split(text, ifs, None)
            shell.scalars.pop(names[0], None)
            return True
        parts = _split(text, ifs, len(names))
        for place, name in enumerate(names):
            self._set(shell, name, parts[place] if place < len(parts) else "")
        return True

    def _source(self, shell: Shell, written: str) -> bool | None:
        """Run a sourced file, or record it as not read if it is not found."""
        path = self._sourced_path(written)
        if path is None:
            if not _NO_SETTINGS.fullmatch(written):
                self.sourced[written] = None
            return None
        self._depth += 1
        if self._depth > DEEPEST:
            raise DocumentError(self.path, f"the file {written!r} sources itself too often")
        try:
            text = path.read_text(encoding="utf-8-sig")
            body, names = parse(text, str(path))
            self.assigned |= names
            return self.body(shell, body)
        except _Exit as stop:
            if stop.what != "return":
                raise
            return None
        except (OSError, UnicodeDecodeError):
            self.sourced[written] = None
            return None
        finally:
            self._depth -= 1

    def _sourced_path(self, written: str) -> Path | None:
        """Return the path of a sourced file; None if it is not found or only sets up a shell.

        The folder of the script is tried first, because scripts use `$(dirname "$0")/env.sh`. The
        current folder is next, as in bash.
        """
        if _NO_SETTINGS.fullmatch(written):
            return None
        rest = written
        if isinstance(written, Unknown):
            match = _FOLDER.fullmatch(written)
            if match is None:
                return None
            rest = match[1]
        for folder in (Path(self.path).parent, Path()):
            path = folder / rest
            with suppress(OSError, ValueError):
                if path.is_file() and path.stat().st_size <= _MOST_SOURCED:
                    return path
        return None

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
            # A single value of a flag, which may be a path without effect on the run.
            self.left_out[f"{arguments[at - 1]} depends on {word.why}"] = None
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

    def _restore(self, shell: Shell, name: str, old: tuple[Any, Any, Any]) -> None:
        """Restore the outer value of a local variable; old : (scalar, array, associative array)."""
        kinds: tuple[dict[str, Any], ...] = (shell.scalars, shell.arrays, shell.maps)
        for held, value in zip(kinds, old, strict=True):
            held.pop(name, None)
            if value is not None:
                held[name] = value

    def _apart(self, shell: Shell, text: str, line: int) -> None:
        """Run a text in a subshell: its launch command is kept, its variables are discarded."""
        apart = shell.copy()
        with suppress(_Exit):
            self._inner(apart, text, line)
        shell.found, shell.launches = apart.found, apart.launches

    def _inner(self, shell: Shell, text: str, line: int) -> bool | None:
        """Parse and run a text, as `eval` and `bash -c` do."""
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
                return False  # bash reports an error and continues
            fields.pop()
        return Condition(list(fields), glob=False).value()

    def _run_test(self, shell: Shell, test: Test) -> bool | None:
        items = list[str]()
        quoted = list[bool]()
        for word in test.words:
            # Inside [[ ]], words are not split.
            items.append(word if isinstance(word, str) else self._text(shell, word, unset=""))
            quoted.append(isinstance(word, Word) and any(piece.quoted for piece in word.pieces))
        return Condition(items, glob=True, quoted=quoted).value()


def _split(text: str, ifs: str | None, most: int | None) -> list[str]:
    """Return the parts of a line, split as the builtin `read` does.

    ifs : separators; None for blanks. most : maximum number of parts; None for any number.
    """
    if most == 1 or ifs == "":
        return [text if ifs is not None else text.strip()]
    if ifs is None or not ifs.strip():
        # With blanks as separators, leading and trailing ones are dropped.
        return text.strip().split(maxsplit=-1 if most is None else most - 1)
    return re.split(f"[{re.escape(ifs)}]", text, maxsplit=0 if most is None else most - 1)


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
