"""Execution of the statements of a bash script, without running any program.

`search.engines.text.shell_commands` adds the commands, and `search.engines.text.shell` decides
between the branches of conditions known only at run time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from autopar.errors import DocumentError
from autopar.records import replace
from search.engines.text.shell_builtins import Exit, Sink
from search.engines.text.shell_conditions import Conditions
from search.engines.text.shell_syntax import (
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
    Pipe,
    Redirected,
    Simple,
    Statement,
    Test,
    text_of,
)
from search.engines.text.shell_values import (
    Budget,
    Command,
    Hole,
    Input,
    Shell,
    Variable,
    is_open,
    path_of,
    runs_ranks,
    with_arguments,
)
from search.engines.text.shell_words import Redirect, Word, refusal

_SUCCEEDS = frozenset({"cd", "mkdir", "source", ".", "pushd", "popd", "chmod", "ulimit", "wait"})
"""Commands after which a script is meant to go on: `cd x && torchrun`."""


class _Frame:
    """States of a running loop that left it, or its current round, under an open condition."""

    def __init__(self) -> None:
        self.breaks, self.continues = list[Shell](), list[Shell]()
        self.why = ""


class Statements(Conditions):
    """Statements of one interpretation, with its open conditions and assumptions."""

    def __init__(
        self, path: str, budget: Budget, ways: Mapping[str, int], *, blank: bool = True
    ) -> None:
        super().__init__(path, budget, blank=blank)
        self._ways = ways
        """Index of the branch to run, by open condition."""
        self.open: dict[str, int] = {}
        """Number of branches, by open condition found so far."""
        self.sink, self.input = Sink(), None
        self._loops = list[_Frame]()
        self._returns = list[tuple[list[Shell], list[str]]]()
        """States that returned under an open condition, and its text, by running function."""
        self._may_end = False
        """True if a branch of an open condition has ended the shell that runs."""
        self._failures = 0
        """Number of branches of open conditions that left a function or a shell in failure."""
        self._endings = list[tuple[Command | Hole | None, str]]()
        """Launch commands of such branches, each with its condition."""
        self._tested = 0
        """Number of surrounding conditions, in which a failure does not end the script."""
        self._depth = 0
        self.around: tuple[str, ...] = ()

    def script(self, shell: Shell, body: Body) -> None:
        """Run a whole script, and the commands of its EXIT trap."""
        try:
            self.body(shell, body)
        except Exit as stop:
            self.ended = self.line if stop.status else 0
        self._close(shell)
        if text := shell.traps.pop("EXIT", ""):
            with suppress(Exit):
                self.evaluate(shell, text, self.line)

    def _close(self, shell: Shell) -> None:
        """Make the launch command of a shell open if one of its branches ended with another."""
        for found, why in self._endings:
            if found != shell.found:
                shell.found = Hole("launch", why, many=2)

    def noted(self, command: Command, launches: int) -> Command:
        """Return a launch command with notes on assumptions; launches : number of them found."""
        notes = [*self.left_out]
        if launches > 1:
            notes.append(f"the script has {launches} launch commands; the last one is read")
        if self.sourced:
            names = f"; assumed unset: {', '.join(self.defaults)}" if self.defaults else ""
            sourced = ", ".join(map(self.holes.shown, self.sourced))
            notes.append(f"variables set in {sourced} are not read{names}")
        if self.needs_arguments:
            notes.append("read without the arguments of the script (--args)")
        if self.taken:
            notes.append(f"assumed unset in conditions: {', '.join(self.taken)}")
        return replace(
            command,
            notes=tuple(notes),
            unset=dict(self.unset),
            needs_arguments=self.needs_arguments,
            ended=self.ended,
        )

    def depends(self, hole: Hole, flags: Sequence[str] = ()) -> DocumentError:
        """Return the error for a launch command that depends on a value known only at run time.

        flags : names of flags that differ between the branches.
        """
        those = f": {', '.join(f'--{flag}' for flag in flags[:4])}" if flags else ""
        return DocumentError(
            self.path,
            f"the launch command depends on {hole.why}, known only at run time{those}",
            remedy=with_arguments(self.needs_arguments)
            if self.needs_arguments
            else "Keep only the branch to check, or use YAML or JSON",
        )

    # ----------------------------------------------------------------------------------------------
    # Statements; each returns its exit status, or None if known only at run time.

    def body(self, shell: Shell, body: Body) -> int | None:
        status: int | None = 0
        for statement in body:
            status = self._one(shell, statement)
        return status

    def _one(self, shell: Shell, statement: Statement) -> int | None:
        self.budget.step()
        self.line = statement.line
        failures = self._failures
        status = _STATEMENTS[type(statement)](self, shell, statement)
        shell.status = status
        if status and not self._tested and isinstance(statement, _ENDING):
            if shell.traps.get("ERR"):
                raise self.refuse("`trap` for ERR, which runs here,")
            if "e" in shell.options:
                raise Exit("exit", 1, status, failed=True)
        if (
            status is None
            and not self._tested
            and "e" in shell.options
            and (
                _decides(statement)
                or self._decides_last(shell, statement)
                or (isinstance(statement, _LEFT) and self._failures > failures)
            )
        ):
            self.left_out[f"nothing is launched if {self._shown(statement)} fails"] = None
            self._may_end = True
        return status

    def _decides_last(self, shell: Shell, statement: Statement, depth: int = 0) -> bool:
        """Return True for a function or a subshell that may end with `[ ... ] && command`."""
        if isinstance(statement, Simple) and statement.words:
            found = shell.functions.get(statement.words[0].bare or "", ())
            return not isinstance(found, Hole) and self._ends_open(shell, found, depth)
        return (
            isinstance(statement, Group)
            and statement.apart
            and self._ends_open(shell, statement.body, depth)
        )

    def _ends_open(self, shell: Shell, body: Body, depth: int) -> bool:
        *rest, last = body or (None,)
        if isinstance(last, Simple) and [word.bare for word in last.words] == ["return"] and rest:
            last = rest[-1]
        if isinstance(last, Chain):
            fails = last.rest[-1][0] == "&&" and not self._goes_on(last.first)
            return fails or _decides(last.first) or not isinstance(last.first, Simple)
        if isinstance(last, Redirected):
            return self._ends_open(shell, (last.statement,), depth)
        bodies: list[Body] = []
        if isinstance(last, If):
            bodies = [*(inner for _, inner in last.clauses), last.otherwise]
        elif isinstance(last, Case):
            bodies = [inner for _, inner, _ in last.clauses]
        elif isinstance(last, Group | For | Loop):
            bodies = [last.body]
        elif isinstance(last, Simple) and depth < 8:
            return self._decides_last(shell, last, depth + 1)
        return any(self._ends_open(shell, inner, depth) for inner in bodies)

    def _in_test(self, shell: Shell, body: Body) -> int | None:
        """Run statements whose failure does not end the script."""
        self._tested += 1
        try:
            return self.body(shell, body)
        finally:
            self._tested -= 1

    def _run_simple(self, shell: Shell, command: Simple) -> int | None:
        raise NotImplementedError

    def _run_chain(self, shell: Shell, chain: Chain) -> int | None:
        launches = shell.launches
        before, status = chain.first, self._in_test(shell, (chain.first,))
        for index, (operator, statement) in enumerate(chain.rest):
            run = self.body if index + 1 == len(chain.rest) else self._in_test
            if status is None and operator == "&&" and self._goes_on(before):
                status = 0
            if status is None and shell.launches > launches and self._runs_ranks(shell):
                status = 0  # a launch is meant to succeed
            if status is None:
                status = self._either(shell, [(statement,), ()], self._shown(before), run)
            elif (status == 0) == (operator == "&&"):
                status = run(shell, (statement,))
            else:
                continue
            before = statement
        return status

    def _runs_ranks(self, shell: Shell) -> bool:
        return isinstance(shell.found, Command) and runs_ranks(shell.found.before)

    def _goes_on(self, statement: Statement) -> bool:
        return isinstance(statement, Simple) and any(
            word.bare in _SUCCEEDS for word in statement.words[:1]
        )

    def _run_not(self, shell: Shell, statement: Not) -> int | None:
        status = self._in_test(shell, (statement.statement,))
        return None if status is None else int(status == 0)

    def _run_group(self, shell: Shell, group: Group) -> int | None:
        if not group.apart:
            return self.body(shell, group.body)
        return self._apart(shell, lambda inner: self.body(inner, group.body))

    def _apart(self, shell: Shell, run: Callable[[Shell], int | None]) -> int | None:
        """Run statements in a subshell: its launch command is kept, its variables are not."""
        inner = shell.copy()
        inner.traps.clear()
        loops, returns, self._loops, self._returns = self._loops, self._returns, [], []
        ends, endings, self._may_end, self._endings = self._may_end, self._endings, False, []
        try:
            status = run(inner)
        except Exit as stop:
            status = stop.status
        finally:
            self._close(inner)
            status_is_open = self._may_end
            self._loops, self._returns = loops, returns
            self._may_end, self._endings = ends, endings
        if status_is_open:
            status = None
        shell.keep(inner)
        return status

    def _run_pipe(self, shell: Shell, pipe: Pipe) -> int | None:
        input_, sink = self.input, self.sink
        statuses = list[int | None]()
        try:
            for part in pipe.parts:
                last = part is pipe.parts[-1]
                self.sink = sink if last else Sink()
                one = (part,)
                statuses.append(self._apart(shell, partial(self.body, body=one)))
                self.input = Input(self.sink.text) if self.sink.known else None
        finally:
            self.input, self.sink = input_, sink
        if "pipefail" not in shell.options:
            return statuses[-1]
        if None in statuses:
            return None
        return next((status for status in reversed(statuses) if status), 0)

    def _run_redirected(self, shell: Shell, statement: Redirected) -> int | None:
        return self._fed(shell, statement.redirects, lambda: self._one(shell, statement.statement))

    def _fed(
        self, shell: Shell, redirects: Sequence[Redirect], run: Callable[[], int | None]
    ) -> int | None:
        """Run a command with its input and output redirected."""
        if not redirects:
            return run()
        input_, sink = self.input, self.sink
        before = {**shell.variables}
        self._redirect(shell, redirects)
        if shell.variables != before:  # bash expands those of a program in a subshell
            raise self.refuse("an assignment in a redirection")
        try:
            return run()
        finally:
            if self.sink is not sink and self.sink.file:
                self._write_file(shell, self.sink)
            self.input, self.sink = input_, sink

    def _write_file(self, shell: Shell, sink: Sink) -> None:
        """Take note of the output of a command that goes to a file."""
        name, text = path_of(sink.file), self.holes.shown(sink.text)
        shell.written[name] = text if sink.known and not sink.unread else None

    def _redirect(self, shell: Shell, redirects: Sequence[Redirect]) -> None:
        for one in redirects:
            pieces = one.word.pieces
            if one.operator == "<" and len(pieces) == 1 and pieces[0].kind == "process":
                found = self._substitute(shell, pieces[0], ends="")
                for hole in self.holes.of(found):
                    if hole.refused:
                        raise refusal(self.path, hole.line, hole.refused)
                self.input = None if is_open(found) else Input(found)
                continue
            for piece in pieces if one.operator in ("<<", "<<-") else ():
                if piece.kind == "parameter" and re.match(r"\$\{?\*|.*\[\*\]", piece.text):
                    joined = self._text(shell, one.word._replace(pieces=(piece,)))
                    if self._ifs(shell)[:1] != " " or joined != " ".join(joined.split()):
                        raise self.refuse(f"{piece.text[:40]} in a here-document, with this IFS")
            text = self._text(shell, one.word)
            if one.operator.startswith("<"):
                if one.descriptor in ("", "0"):
                    known = one.operator in ("<<", "<<<") or text == "/dev/null"
                    end = "\n" if one.operator == "<<<" else ""
                    text = "" if text == "/dev/null" and one.operator == "<" else text
                    self.input = Input(text + end) if known else None
            elif one.descriptor in ("", "1") and (one.operator, text) != (">&", "1"):
                file = self.holes.shown(text) if one.operator in (">", ">|", ">>") else ""
                self.sink = Sink(file)
                if one.operator == ">>":
                    earlier = shell.written.get(path_of(file))
                    self.sink.parts.append(earlier or "")
                    self.sink.known = earlier is not None

    def _run_function(self, shell: Shell, function: Function) -> int:
        shell.functions[function.name] = function.body
        return 0

    def _run_if(self, shell: Shell, statement: If) -> int | None:
        for index, (condition, body) in enumerate(statement.clauses):
            status = self._in_test(shell, condition)
            if status == 0:
                return self.body(shell, body)
            if status is None:
                rest: Body = statement.otherwise
                if index + 1 < len(statement.clauses):
                    rest = (If(statement.clauses[index + 1 :], rest, statement.line),)
                return self._either(shell, [body, rest], self._shown(condition[-1]))
        return self.body(shell, statement.otherwise)

    def _run_case(self, shell: Shell, statement: Case) -> int | None:
        value = self._text(shell, statement.word, unset="")
        status: int | None = 0
        through = False
        for index, (patterns, body, end) in enumerate(statement.clauses):
            matched = through or self._matches(shell, value, patterns)
            if matched is None:
                rest = statement.clauses[index + 1 :]
                if end == ";;&" or (end == ";&" and not rest):
                    raise self.refuse("`;;&` behind a pattern known only at run time")
                taken = body
                for at, (_, more, more_end) in enumerate(rest):
                    if end != ";&":
                        break
                    taken, end = (*taken, *more), more_end
                    if at + 1 == len(rest) or end == ";;&":
                        break
                shown = f"`{self.holes.shown(value)}` on line {statement.line}"
                return self._either(shell, [taken, (statement._replace(clauses=rest),)], shown)
            if not matched:
                continue
            status = self.body(shell, body)
            if end == ";;":
                return status
            through = end == ";&"
        return status

    def _matches(self, shell: Shell, value: str, patterns: Sequence[Word]) -> bool | None:
        """Return True if one of the patterns of `case` matches; None if known only at run time."""
        found: bool | None = False
        for word in patterns:
            one = self._matches_glob(shell, value, word, extended=None)
            if one:
                return True
            found = None if one is None else found
        return found

    # ----------------------------------------------------------------------------------------------
    # Loops.

    def _run_for(self, shell: Shell, loop: For) -> int | None:
        if loop.words is None:
            values = [*shell.given]
        else:
            values = [v for word in loop.words for v in self._fields(shell, word)]
        if any(self.uncertain(value) for value in values):
            why = f"the words of the loop on line {loop.line}"
            for hole in self.holes.of("".join(values)):
                if hole.refused:
                    raise refusal(self.path, hole.line, hole.refused)
            many = any(self._split_up(shell, value) for value in values)
            open_ = self.hole(f"${loop.name}", why=why if many else "", many=int(many))
            self._set_plain(shell, loop.name, open_)
            return self._open_loop(shell, loop.body, why, loop.name)
        frame = _Frame()
        status: int | None = 0
        self._loops.append(frame)
        try:
            for value in values:
                self._set_plain(shell, loop.name, value)
                if not self._round(shell, loop.body):
                    break
            status = shell.status if values else 0
        finally:
            self._loops.pop()
        return self._left(shell, frame, status)

    def _set_plain(self, shell: Shell, name: str, value: str) -> None:
        self.store(shell, name, None, value)

    def _round(self, shell: Shell, body: Body) -> bool:
        """Run a loop's statements once; return False if the loop ends."""
        frame = self._loops[-1]
        try:
            self.body(shell, body)
        except Exit as stop:
            if stop.what in ("break", "continue") and stop.count > 1 and len(self._loops) > 1:
                raise Exit(stop.what, stop.count - 1) from None
            left, frame.continues = frame.continues, []
            if stop.what == "continue":
                left.append(shell.copy())
            elif not left and stop.what == "break":
                shell.status = 0
                return False
            elif not left:
                raise
            elif stop.what == "break":
                frame.breaks.append(shell.copy())
            elif stop.what == "return":
                self._returns[-1][0].append(shell.copy())
            self._merge(shell, left, frame.why)
            return True
        left, frame.continues = frame.continues, []
        if left:
            self._merge(shell, [shell.copy(), *left], frame.why)
        return True

    def _left(self, shell: Shell, frame: _Frame, status: int | None) -> int | None:
        """Merge the states that left a loop; status : that of its regular end."""
        if not frame.breaks:
            return status
        self._merge(shell, [shell.copy(), *frame.breaks], frame.why)
        return None

    def _run_loop(self, shell: Shell, loop: Loop) -> int | None:
        if loop.first.strip():
            self.sum(shell, loop.first)
        frame = _Frame()
        status: int | None = 0
        while True:
            tested = self._in_test(shell, loop.condition)
            self.line = loop.line
            if tested is None:
                body = (*loop.condition, *loop.body)
                if loop.step.strip():
                    body = (*body, Arithmetic(loop.step, loop.line))
                self._open_loop(shell, body, self._shown(loop.condition[-1]), None)
                return self._left(shell, frame, None)
            if (tested != 0) != loop.until:
                return self._left(shell, frame, status)
            before = self._progress(shell)
            self._loops.append(frame)
            try:
                if not self._round(shell, loop.body):
                    return self._left(shell, frame, 0)
            finally:
                self._loops.pop()
            status = shell.status
            if loop.step.strip():
                self.sum(shell, loop.step)
            if not frame.breaks and not loop.step.strip() and before == self._progress(shell):
                if shell.found is None:
                    problem = f"line {loop.line}: this loop does not end"
                    remedy = "Use the script that starts the training"
                    raise DocumentError(self.path, problem, remedy=remedy)
                raise Exit("exit")
            if frame.breaks and before == self._progress(shell):
                # Nothing changes until a command of the machine ends the loop.
                self._merge(shell, frame.breaks, frame.why)
                return None
            self.budget.step()

    def _progress(self, shell: Shell) -> tuple[object, ...]:
        """Return the state that a round can change; a round without changes repeats for ever."""
        at = self.input.at if self.input is not None else 0
        state = ({**shell.variables}, [*shell.given], shell.option_at, shell.options)
        return (*state, {**shell.functions}, {**shell.traps}, at)

    def _open_loop(self, shell: Shell, body: Body, why: str, name: str | None) -> int | None:
        """Run a loop with an unknown number of rounds; its variables are open afterwards."""
        sink, input_, before = self.sink, self.input, shell.copy()
        changed = {name} if name else set[str]()
        while True:
            inner = shell.copy()
            self.sink, self.input = Sink(), None
            self._loops.append(_Frame())
            try:
                self.body(inner, body)
            except Exit as stop:
                if stop.what in ("exit", "return"):
                    raise self.refuse(f"`{stop.what}` in a loop of unknown length") from None
            finally:
                frame = self._loops.pop()
                if self.sink.parts or not self.sink.known:
                    sink.known = False
                    sink.unread = sink.unread or self.sink.unread
                self.sink, self.input = sink, None
            states = [inner, *frame.breaks, *frame.continues]
            fresh = {
                one
                for state in states
                for one in {*state.variables, *shell.variables} - changed
                if state.variables.get(one) != shell.variables.get(one)
            }
            for one in fresh:
                self._open_variable(shell, one, [shell, *states], why)
            for one in changed:
                grown = self._grown(shell, one, states)
                if grown is not None:
                    shell.variables[one] = grown
                    fresh.add(one)
            changed |= fresh
            if any(state.functions != shell.functions for state in states):
                raise self.refuse("a function defined in a loop of unknown length")
            if any(state.given != shell.given for state in states):
                shell.given = [self.hole("$@", many=2, why=why)]
                fresh.add("@")
            if not fresh:
                break
        self.input = None if input_ is not None else input_
        shell.keep(inner)
        shell.merge_written([before, inner])
        return None

    def _grown(self, shell: Shell, name: str, states: Sequence[Shell]) -> Variable | None:
        """Return an open variable as several words if a round of a loop appends to it."""
        own = shell.variables.get(name)
        if own is None or not isinstance(own.value, str) or len(own.value) != 1:
            return None
        for state in states:
            value = state.variables.get(name, own).value
            if isinstance(value, str) and own.value in value and value != own.value:
                for hole in self.holes.of(own.value):
                    if not hole.many:
                        return own._replace(value=self.holes.character(hole._replace(many=1)))
        return None

    def _run_arithmetic(self, shell: Shell, statement: Arithmetic) -> int | None:
        value = self.sum(shell, statement.text)
        return None if is_open(value) else int(value == "0")

    # ----------------------------------------------------------------------------------------------
    # Conditions known only at run time.

    def _either(
        self,
        shell: Shell,
        bodies: list[Body],
        why: str,
        run: Callable[[Shell, Body], int | None] | None = None,
    ) -> int | None:
        """Run every branch of an open condition from the current state, and merge the results.

        Variables that differ between the branches become open. Branches that end the script are
        ignored. If `_ways` contains the condition, only the selected branch is run.

        why : text of the condition.
        """
        run = run or self.body
        times = shell.times[why] = shell.times.get(why, 0) + 1
        why = why if times == 1 else f"{why}, time {times}"
        self.open[why] = len(bodies)
        if why in self._ways:
            return run(shell, bodies[self._ways[why]])
        after, stops = list[Shell](), list[tuple[Exit, Shell]]()
        sink, outputs = self.sink, list[Sink]()
        at = self.input.at if self.input is not None else 0
        ends, input_ = set[int](), self.input
        for body in bodies:
            branch, self.sink = shell.copy(), Sink()
            if input_ is not None:
                input_.at = at
            try:
                run(branch, body)
                after.append(branch)
            except Exit as stop:
                stops.append((stop, branch))
                if stop.failed and branch.launches > shell.launches:
                    raise self.refuse(f"a failure behind a launch under {why}") from None
                if stop.failed:
                    self.left_out[f"nothing is launched in some branch of {why}"] = None
            finally:
                outputs.append(self.sink)
                self.sink = sink
            ends.add(input_.at if input_ is not None else 0)
        if len(ends) > 1:
            raise self.refuse(f"`read` under {why}")
        if all(one.known and one.parts == outputs[0].parts for one in outputs):
            sink.parts.append(outputs[0].text)
        else:
            sink.known = False
            sink.unread = sink.unread or any(one.unread for one in outputs)
        self._failures += any(one.status != 0 for one, _ in stops if one.what != "continue")
        ended = [state for stop, state in stops if stop.what == "exit"]
        if ended and (after or len({(stop.what, stop.status) for stop, _ in stops}) > 1):
            self._may_end = True
            self._endings += [(state.found, why) for state in ended if state.found != shell.found]
        self._set_aside(stops, why, all_of_them=not after)
        if not after:
            end, last = stops[-1]
            alike = [state for one, state in stops if one.what == end.what]
            self._merge(shell, alike or [last], why)
            same = all(one.status == end.status for one, _ in stops if one.what == end.what)
            raise Exit(end.what, end.count, end.status if same else None)
        self._merge(shell, after, why)
        return shell.status

    def _set_aside(self, stops: list[tuple[Exit, Shell]], why: str, *, all_of_them: bool) -> None:
        """Keep the states of branches that left a loop or a function, for its end."""
        if all_of_them:
            # Where a branch goes on outside, those that end the script are ignored.
            goes = [one for one in stops if one[0].what != "exit"]
            stops[:] = goes or stops
            last = stops[-1][0]
            if all((one.what, one.count) == (last.what, last.count) for one, _ in stops):
                return
        for stop, state in stops[:-1] if all_of_them else stops:
            if stop.what in ("break", "continue") and self._loops:
                frame = self._loops[-min(stop.count, len(self._loops))]
                frame.why = why
                (frame.breaks if stop.what == "break" else frame.continues).append(state)
            elif stop.what == "return" and self._returns:
                states, whys = self._returns[-1]
                states.append(state)
                whys.append(why)
        if all_of_them:
            stops[:] = stops[-1:]

    def _merge(self, shell: Shell, states: list[Shell], why: str) -> None:
        """Make one state of several; variables that differ are open."""
        first = states[0].copy()
        if len(states) > 1:
            for name in dict.fromkeys(n for state in states for n in state.variables):
                held = [state.variables.get(name) for state in states]
                if any(one != held[0] for one in held):
                    self._open_variable(first, name, states, why)
            for name in dict.fromkeys(n for state in states for n in state.functions):
                bodies = [state.functions.get(name) for state in states]
                if any(body is not bodies[0] for body in bodies):
                    first.functions[name] = Hole(name, why, many=2)
            if any(state.given != first.given for state in states):
                first.given = [self.hole("$@", why=why, many=2)]
            if any((state.options ^ first.options) - {"e", "u", "pipefail"} for state in states):
                raise self.refuse(f"an option set under {why}")
            first.options = frozenset.intersection(*(state.options for state in states))
            if any(state.found != first.found for state in states):
                first.found = Hole("launch", why, many=2)
            if any(state.status != first.status for state in states):
                first.status = None
            first.launches = max(state.launches for state in states)
            first.merge_written(states)
            for state in states:
                for condition, times in state.times.items():
                    first.times[condition] = max(times, first.times.get(condition, 0))
        shell.take(first)

    def _open_variable(self, shell: Shell, name: str, states: Sequence[Shell], why: str) -> None:
        """Give a variable the value that stands for its values in several states."""
        held = [state.variables.get(name, Variable(None)) for state in states]
        marks = "".join(dict.fromkeys(mark for one in held for mark in one.marks))
        if {"i", "l", "u", "n", "r"} & {*marks} and any(one.marks != marks for one in held):
            raise self.refuse(f"an attribute of {name} set under {why}")
        tables = [one.value for one in held if isinstance(one.value, dict)]
        if len(tables) == len(held) and all(table.keys() == tables[0].keys() for table in tables):
            items: dict[Any, str] = dict(tables[0])
            for key in items:
                found = {table[key] for table in tables}
                if len(found) > 1:
                    many = self._may_be_many(shell, found)
                    items[key] = self.hole(f"${{{name}[{key}]}}", why=why, many=int(many))
            value: Any = items
        elif tables:
            value = self.hole(f"${{{name}[@]}}", why=why, many=2)
            marks = marks.replace("a", "").replace("A", "")
        else:
            texts = [one.value or "" for one in held]
            many = self._may_be_many(shell, map(str, texts))
            # `eval` and `bash -c` would expand such a text once more.
            many = many or any(re.search(r"[$`\\'\"{;&|<>()]", str(text)) for text in texts)
            unset = any(one.value is None for one in held)
            value = self.holes.character(Hole(f"${name}", why, int(many), unset=unset))
        shell.variables[name] = Variable(value, marks)

    def _may_be_many(self, shell: Shell, texts: Iterable[str]) -> bool:
        """Return True if one of several unquoted texts may be no word or several."""
        return any(
            self._split_up(shell, text)
            or any(hole.many or hole.refused for hole in self.holes.of(text))
            for text in texts
        )

    def _split_up(self, shell: Shell, text: str) -> bool:
        """Return True if an unquoted text becomes no word or several, by this IFS or the usual."""
        return len(text.split()) != 1 or self._split(shell, text) != [text]

    def _shown(self, statement: Statement) -> str:
        """Return the text and the line of a condition, for messages."""
        said = self.holes.shown(" ".join(text_of(statement).split()))
        return f"`{said[:60]}` on line {statement.line}" if said else f"line {statement.line}"


def _last(statement: Statement) -> tuple[Statement, ...]:
    """Return the commands of a chain, each of them possibly the last to run."""
    if isinstance(statement, Chain):
        return statement.first, *(one for _, one in statement.rest)
    return (statement,)


def _decides(statement: Statement) -> bool:
    """Return True for a condition without a branch: with `set -e` its failure ends a script."""
    if isinstance(statement, Simple):
        pieces = [p for word in statement.words for p in word.pieces]
        if any(_decides(last) for p in pieces if p.body for last in _last(p.body[-1])):
            return True  # `A=$([ ... ])`
        return any(word.bare in ("[", "test", "let") for word in statement.words[:1])
    return isinstance(statement, Test | Arithmetic)


_ENDING = (Simple, Test, Arithmetic, Group, Pipe, Redirected)
"""Statements whose failure ends a script with `set -e`."""
_LEFT = (Simple, Group, Redirected)
"""Statements with functions, substitutions and subshells, which their commands may leave."""
_STATEMENTS: Mapping[type, Callable[[Statements, Shell, Any], int | None]] = {
    Simple: lambda run, shell, command: run._run_simple(shell, command),
    Test: Statements.run_test,
    Arithmetic: Statements._run_arithmetic,
    If: Statements._run_if,
    Case: Statements._run_case,
    For: Statements._run_for,
    Loop: Statements._run_loop,
    Function: Statements._run_function,
    Group: Statements._run_group,
    Pipe: Statements._run_pipe,
    Redirected: Statements._run_redirected,
    Chain: Statements._run_chain,
    Not: Statements._run_not,
}
