"""Launch command of a bash script, found by interpreting the script without running anything.

Words equal those that bash computes; else the script is refused with the construct and its line.
Values known only at run time (command substitutions, files, environment variables) stay as written
and count as one word. A condition on such a value is open: all its branches are interpreted. A
launch command is rejected if they differ in flags that affect memory or time.
`search.engines.text.shell_commands` and `shell_run` interpret it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import NamedTuple

from autopar.errors import DocumentError
from autopar.records import replace
from search.engines.text.shell_commands import Run
from search.engines.text.shell_syntax import Body, parse
from search.engines.text.shell_values import (
    Budget,
    Command,
    Hole,
    Shell,
    Variable,
    split_flags,
    world_flags,
)
from search.engines.text.shell_words import HOLES

_MOST_WAYS = 64
"""Maximum number of interpretations of a script with different branches of open conditions."""
_FORBIDDEN = re.compile(f"[\0\r{HOLES}]")


class _Started(NamedTuple):
    """Arguments and environment of scripts."""

    arguments: tuple[str, ...] | None = None
    """Positional parameters; None if not given."""
    environment: Mapping[str, str] = MappingProxyType({})


STARTED = ContextVar("STARTED", default=_Started())  # noqa: B039 (both are immutable)
"""Arguments and environment with which scripts are read."""


@contextmanager
def scripts_started_with(
    arguments: tuple[str, ...] | None, environment: Mapping[str, str]
) -> Iterator[None]:
    """Read scripts, in the context, as if started with arguments and environment variables.

    arguments : positional parameters; None if not given.
    """
    token = STARTED.set(_Started(arguments, MappingProxyType({**environment})))
    try:
        yield
    finally:
        STARTED.reset(token)


def given_arguments() -> tuple[str, ...]:
    """Return the positional parameters that scripts are read with; empty: not given."""
    return STARTED.get().arguments or ()


def script_command(
    text: str,
    path: object,
    *,
    given: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
    harmless: Callable[[str], bool] | None = None,
    budget: Budget | None = None,
) -> Command:
    """Return the launch command of a bash script: the last one that runs a `.py` file with flags.

    Variables that the script does not set stay `$NAME`, and are empty in conditions.

    path : path of the script, for errors and for sourced files.
    given : environment variables.
    arguments : positional parameters `$1`, `$2`, ... of the script; None if not known.
    harmless : returns True for a flag name that affects neither memory nor time. A condition known
        only at run time is accepted if it decides only such flags.
    budget : limits that several interpretations share.

    Raises DocumentError for an unclosed quote or bracket, for a launch that depends on a value
    known only at run time, and for syntax and constructs that are not interpreted.
    """
    if (match := _FORBIDDEN.search(text)) is not None:
        line = text.count("\n", 0, match.start()) + 1
        problem = f"line {line} has the character {match[0]!r}, which bash passes on"
        raise DocumentError(str(path), problem, remedy="Remove it, for instance with dos2unix")
    try:
        body, names = parse(text, str(path))
        script = _Script(
            body, frozenset(names), str(path), given or {}, arguments, True,
            budget or Budget(str(path)),
        )  # fmt: skip
        found, run = _followed(script, {})
        said: tuple[str, ...] = ()
        if isinstance(found, Command) and not found.program and run.empty:
            # `[ -z "$SLURM_JOB_ID" ] && exit 1`: a script that exits without a variable is meant
            # to run with it.
            other, again = _followed(script._replace(blank=False), {})
            if isinstance(other, Hole) or other.program:
                said = (f"nothing is launched where these are not set: {', '.join(run.empty)}",)
                found, run, script = other, again, script._replace(blank=False)
        if isinstance(found, Hole):
            without = dict[str, None]()
            found = _same_launch([*_ways(script, found, run, without)], harmless, run, found)
            if without:
                said = (*said, f"nothing is launched in some branch of {', '.join(without)}")
    except RecursionError:
        raise DocumentError(str(path), "is nested too deeply, expected a launch script") from None
    return replace(found, notes=(*found.notes, *said))


class _Script(NamedTuple):
    """A parsed script, and the environment to interpret it with."""

    body: Body
    names: frozenset[str]
    path: str
    given: Mapping[str, str]
    arguments: Sequence[str] | None
    blank: bool
    """True if unset variables are empty in conditions; False if such conditions are open."""
    budget: Budget


def _followed(script: _Script, ways: Mapping[str, int]) -> tuple[Command | Hole, Run]:
    """Return (launch command, interpretation) of a script with fixed branches of open conditions.

    The command is a `Hole` if it depends on an open condition that is not in `ways`. Without a
    launch command, the longest array of the script provides the arguments.
    ways : index of the branch to run, by open condition.
    """
    run = Run(script.path, script.budget, ways, blank=script.blank)
    run.assigned |= script.names
    shell = Shell(variables={name: Variable(text, "x") for name, text in script.given.items()})
    shell.variables["IFS"] = Variable(" \t\n")
    if script.arguments is not None:
        shell.given, shell.told = [*script.arguments], True
    run.script(shell, script.body)
    if isinstance(shell.found, Hole):
        return shell.found, run
    if shell.found is not None:
        return run.noted(shell.found, shell.launches), run
    arrays = {
        name: [*variable.items().values()]
        for name, variable in shell.variables.items()
        if isinstance(variable.value, dict) and not variable.mapped
    }
    name = max(arrays, key=lambda name: len(arrays[name]), default="")
    longest, others = arrays.pop(name, []), [other for other, items in arrays.items() if items]
    left = f", and not {', '.join(others)}" if others else ""
    run.left_out[f"no launch command found; using {name}{left}"] = None
    return run.noted(Command(before=(), arguments=tuple(map(run.holes.shown, longest))), 0), run


def _ways(
    script: _Script, found: Hole, run: Run, without: dict[str, None]
) -> Iterator[tuple[Command, Mapping[str, int]]]:
    """Yield (launch command, branch indices by open condition) for each combination of branches.

    Only conditions that affect the launch command are combined. Branches without a launch command
    are skipped, because a script ends there with an error. Raises DocumentError if the command
    depends on another unknown value or on too many conditions.
    without : receives the last condition of each combination without a launch command.
    """
    todo: list[tuple[dict[str, int], Hole, Run]] = [({}, found, run)]
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
            if isinstance(one, Hole):
                todo.append((chosen, one, read))
            elif one.program:
                yield one, chosen
            else:
                without[open_.why] = None


def _same_launch(
    ways: list[tuple[Command, Mapping[str, int]]],
    harmless: Callable[[str], bool] | None,
    run: Run,
    found: Hole,
) -> Command:
    """Return the first of several launch commands that differ only in harmless flags.

    ways : launch commands, each with its branch indices by open condition.
    Raises DocumentError if they differ in other flags, or if there are none.
    """
    if not ways:
        raise run.depends(found)
    commands = [command for command, _ in ways]
    first = commands[0]
    if all(command == first for command in commands):
        return first
    if harmless is None:
        raise run.depends(found)
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
        written={
            name: text if all(c.written.get(name) == text for c in commands) else None
            for name, text in first.written.items()
        },
        notes=tuple(dict.fromkeys((*first.notes, note))),
    )


_Flags = Mapping[str, tuple[str, ...]]


def _differing(one: _Flags, other: _Flags) -> list[str]:
    """Return the names of the flags that differ between two launch commands."""
    names = dict.fromkeys((*one, *other))
    return [name for name in names if one.get(name) != other.get(name)]
