"""Builtin commands of bash that change later words, and those that print words.

`BUILTINS` lists the interpreted ones and `REFUSED` the others; any other command is a program,
which cannot change a variable of the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from signal import Signals

from search.engines.text.shell_expansion import split_at
from search.engines.text.shell_parameters import Expansion
from search.engines.text.shell_syntax import assignment_of
from search.engines.text.shell_values import Input, Open, Shell, Variable, is_open
from search.engines.text.shell_words import NAME, Word, unescaped

OUTER_ERREXIT = "errexit outside"
"""Option of a substitution that clears `set -e`, whose failure may end the script."""
SET_FLAGS = frozenset("abefhmuvxBEHTP")
"""Flags of `set` that are interpreted or change no word; the others are refused."""
SET_NAMES = {
    "allexport": "a", "errexit": "e", "noglob": "f", "nounset": "u", "pipefail": "pipefail",
    "errtrace": "E", "functrace": "T", "braceexpand": "B",
} | dict.fromkeys(
    ("xtrace", "verbose", "monitor", "notify", "hashall", "history", "histexpand",
     "physical", "ignoreeof", "vi", "emacs", "nolog", "interactive-comments"), "",
)  # fmt: skip
"""Names of `set -o` with their flags; an empty flag changes no word."""
SET_KEPT = frozenset({"a", "e", "f", "u", "pipefail"})
SHOPTS = frozenset(
    ("extglob", "nullglob", "failglob", "nocasematch", "dotglob", "globstar", "nocaseglob",
     "globasciiranges", "checkwinsize", "histappend", "cmdhist", "lithist", "checkhash",
     "checkjobs", "huponexit", "mailwarn", "sourcepath", "progcomp", "hostcomplete",
     "interactive_comments", "inherit_errexit", "autocd", "cdspell", "dirspell", "direxpand",
     "execfail", "force_fignore", "gnu_errfmt", "histreedit", "histverify", "promptvars",
     "shift_verbose", "complete_fullquote", "no_empty_cmd_completion")
)  # fmt: skip
"""Names of `shopt` that are interpreted or change no word; the others are refused."""
REFUSED = frozenset({"enable"})
DECLARED = frozenset("aAilruxgpfFt")
"""Attributes of `declare` that are interpreted; the others are refused."""
_SIGNALS = frozenset(Signals.__members__)
_FORMAT = re.compile(r"%(?:%|([-+ 0#]*)([0-9]*|\*)(?:\.([0-9]*))?([a-zA-Z(]))")


class Exit(Exception):  # noqa: N818 (no error)
    """Control-flow signal of `exit`, `return`, `break` or `continue`, which `what` names."""

    def __init__(
        self, what: str, count: int = 1, status: int | None = 0, *, failed: bool = False
    ) -> None:
        super().__init__(what)
        self.what, self.count, self.status = what, count, status
        self.failed = failed
        """True if a failure ends the script, by `set -e`."""


class Sink:
    """Output of a command substitution; `known` is False if it is known only at run time."""

    def __init__(self, file: str = "") -> None:
        self.parts, self.known = list[str](), True
        self.file = file
        """Path of the file that receives the output; empty if no file does."""
        self.unread = False
        """True if a builtin wrote text that is not interpreted, which may be several words."""

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Builtins(Expansion):
    """Builtins of one interpretation; each returns its exit status, None if it is unknown."""

    sink: Sink
    input: Input | None
    """Standard input; None if known only at run time."""

    def evaluate(self, shell: Shell, text: str, line: int) -> int | None:
        """Parse and run a text."""
        raise NotImplementedError

    def call(self, shell: Shell, fields: list[str], line: int) -> int | None:
        """Run a command from its expanded words."""
        raise NotImplementedError

    def write(self, text: str) -> int:
        """Append to the output of a command substitution."""
        self.budget.size(len(text))
        self.sink.parts.append(text)
        return 0

    # ----------------------------------------------------------------------------------------------
    # Variables.

    def declare(self, shell: Shell, what: str, words: list[Word]) -> int | None:
        """Run `declare`, `local`, `export` or `readonly`, whose assignments are not split."""
        on, off, operands = set[str](), set[str](), list[Word | str]()
        for word in words:
            bare = word.bare or ""
            if bare[:1] in "-+" and len(bare) > 1 and not operands:
                if bare != "--":
                    (on if bare[0] == "-" else off).update(bare[1:])
            elif assignment_of(word) is not None:
                for one in self._braced(word):
                    own = assignment_of(one)
                    if own is None or own.key is not None or word.items is not None:
                        operands.append(word if word.items is not None else one)
                    else:  # every value is expanded before any is assigned
                        sign = "+=" if own.append else "="
                        operands.append(f"{own.name}{sign}{self._text(shell, own.value)}")
            else:
                operands += self._fields(shell, word)
        known = DECLARED | {"n"} if what == "export" else DECLARED
        if (bad := (on | off) - known) or ("n" in on and what != "export"):
            letter = sorted(bad or {"n"})[0]
            raise self.refuse(f"`{what} -{letter}`")
        if "p" in on or {"f", "F"} & on or not operands:
            self.sink.known = self.sink.known and bool(operands) and "p" not in on
            return None if "p" in on else 0
        on |= {"export": {"x"} - on.intersection("n"), "readonly": {"r"}}.get(what, set())
        if what == "export" and "n" in on:
            on, off = on - {"n"}, off | {"x"}
        is_local = what == "local" or (what in ("declare", "typeset") and "g" not in on)
        if what == "local" and not shell.frames:
            return 1
        for operand in operands:
            self._declare_one(shell, operand, on, off, is_local=is_local and bool(shell.frames))
        return 0

    def _declare_one(
        self, shell: Shell, operand: Word | str, on: set[str], off: set[str], *, is_local: bool
    ) -> None:
        found = assignment_of(operand) if isinstance(operand, Word) else None
        name = found.name if found is not None else str(operand)
        value: str | None = None
        append = False
        if isinstance(operand, str):
            match = re.fullmatch(rf"({NAME})(?:(\+?)=(.*))?", operand, re.DOTALL)
            if match is None:
                raise self.refuse(f"the declaration of {operand[:40]}")
            name, append, value = match[1], bool(match[2]), match[3]
            if value is not None and value[:1] == "(" and on.intersection("aA"):
                raise self.refuse(f"the declaration of {operand[:40]}")
        if "g" in on and any(name in frame for frame in shell.frames):
            raise self.refuse(f"`declare -g` of {name}, which is local,")
        if is_local and name not in shell.frames[-1]:
            shell.frames[-1][name] = shell.variables.get(name)
            outer = shell.variables.pop(name, None)
            if outer is not None and "r" in outer.marks:
                raise self.refuse(f"the assignment to {name}, which is readonly")
            if found is not None and found.append:
                raise self.refuse(f"`+=` for the local variable {name}")
            # The value may be that of the outer variable: `local X=$X`.
            if outer is not None and (found is not None or value is not None):
                shell.variables[name] = outer
                shell.variables[name] = self._local_value(shell, operand, name, value, on)
                self._mark(shell, name, on, off)
                return
        old = shell.variables.get(name, Variable(None))
        kinds = "".join(sorted(on.intersection("aAilu")))
        if ("A" in on and old.value is not None and not old.mapped) or ("a" in on and old.mapped):
            raise self.refuse(f"another kind of array for {name}")
        if isinstance(old.value, str) and on.intersection("a"):
            old = Variable({0: old.value}, old.marks)
        marks = "".join(dict.fromkeys(old.marks + kinds))
        if "l" in on or "u" in on:
            marks = marks.replace("u" if "l" in on else "l", "")
        shell.variables[name] = Variable(old.value, marks)
        if found is not None and isinstance(operand, Word):
            self._assign(shell, operand)
        elif value is not None:
            self.store(shell, name, None, value, append=append)
        self._mark(shell, name, on, off)

    def _local_value(
        self, shell: Shell, operand: Word | str, name: str, value: str | None, on: set[str]
    ) -> Variable:
        """Return the value of a new local variable, expanded while the outer one is visible."""
        if isinstance(operand, str):
            text = value or ""
        else:
            found = assignment_of(operand)
            assert found is not None, "only assignments have a value"
            if operand.items is not None or found.key is not None:
                inner = shell.copy()
                items = [f for item in operand.items or () for f in self._fields(inner, item)]
                if "A" in on or found.key is not None or any(i.startswith("[") for i in items):
                    inner.variables[name] = Variable({}, "A" if "A" in on else "a")
                    self._assign(inner, operand)
                    return inner.variables[name]
                return Variable(dict(enumerate(items)), "a")
            text = self._text(shell, found.value)
        kinds = "".join(sorted(on.intersection("aAilu")))
        inner = shell.copy()
        inner.variables[name] = Variable({} if on.intersection("aA") else None, kinds)
        self.store(inner, name, None, text)
        return inner.variables[name]

    def _mark(self, shell: Shell, name: str, on: set[str], off: set[str]) -> None:
        variable = shell.variables[name]
        marks = {*variable.marks} | on.intersection("rx")
        if "r" in off or off.intersection("aA"):
            raise self.refuse("`declare +" + "".join(sorted(off)) + "`")
        marks -= off
        shell.variables[name] = variable._replace(marks="".join(sorted(marks)))

    def _unset(self, shell: Shell, words: list[str]) -> int | None:
        flags = "".join(word[1:] for word in words if word.startswith("-"))
        if "n" in flags:
            raise self.refuse("`unset -n`")
        for word in words:
            if word.startswith("-"):
                continue
            match = re.fullmatch(rf"({NAME})(?:\[(.*)\])?", word, re.DOTALL)
            if match is None or is_open(word):
                if "f" in flags and word in shell.functions:
                    del shell.functions[word]
                    continue
                raise self.refuse(f"`unset {word[:40]}`")
            name, index = match.groups()
            if "f" in flags:
                shell.functions.pop(name, None)
                continue
            variable = shell.variables.get(name)
            if variable is None:
                self.assigned.add(name)
                self.removed.add(name)
                if "v" not in flags:
                    shell.functions.pop(name, None)
                continue
            if "r" in variable.marks or any(name in frame for frame in shell.frames[:-1]):
                raise self.refuse(f"`unset {name}`, readonly or local to a caller,")
            if index is None:
                del shell.variables[name]
                self.assigned.add(name)
                self.removed.add(name)
                continue
            key = None if index in ("@", "*") else self._key(shell, variable, index)
            if key is None or isinstance(key, Open) or is_open(variable.text() or ""):
                raise self.refuse(f"`unset {word}`")
            items = {k: v for k, v in variable.items().items() if k != key}
            shell.variables[name] = variable._replace(value=items)  # type: ignore[arg-type]
        return 0

    def _read(self, shell: Shell, words: list[str]) -> int | None:
        names, flags, end, array = list[str](), "", "\n", ""
        at, input_ = 0, self.input
        while at < len(words):
            word = words[at]
            at += 1
            if word[:1] != "-" or len(word) < 2 or word == "--" or names:
                names += [word] if word != "--" else []
                continue
            for place, letter in enumerate(word[1:], 2):
                if letter in "adinNptu":
                    given = word[place:] or (words[at] if at < len(words) else "")
                    at += not word[place:]
                    if letter == "a":
                        array = given
                    elif letter == "d":
                        end = given[:1]
                    elif letter in "inNu":
                        input_ = None
                    break
                flags += letter
        if array or not names:
            names = [array or "REPLY"]
        if any(not re.fullmatch(NAME, name) for name in names):
            raise self.refuse(f"`read {' '.join(names)[:40]}`")
        self.assigned.update(names)
        if input_ is None:
            for name in names:
                shell.variables.pop(name, None) if array else None
                self.store(shell, name, None, self.hole(f"${name}", many=2 if array else 0))
            return None
        line, complete = input_.line(end)
        if "r" not in flags and "\\" in line:
            raise self.refuse("a backslash in what `read` reads without `-r`")
        if self.may_split(shell, line):
            for name in names:
                shell.variables[name] = Variable(self.unread(f"${name}"))
            return 0 if complete else 1
        ifs = self._ifs(shell)
        if array:
            items = _fields_of(line, ifs) if line else []
            self.budget.size(len(items))
            marks = shell.variables.get(array, Variable(None)).marks.replace("a", "") + "a"
            shell.variables[array] = Variable(dict(enumerate(items)), marks)
        else:
            parts = read_parts(line, ifs, len(names)) if names != ["REPLY"] else [line]
            for name, text in zip(names, [*parts, *[""] * len(names)], strict=False):
                self._replace(shell, name, text)
        return 0 if complete else 1

    def _replace(self, shell: Shell, name: str, text: str) -> None:
        """Assign a text to a variable that may be an array, as its first item."""
        self.store(shell, name, None, text)

    def _mapfile(self, shell: Shell, words: list[str]) -> int | None:
        flags = [word for word in words if word.startswith("-")]
        names = [word for word in words if not word.startswith("-")]
        if set(flags) - {"-t"} or len(names) > 1 or not all(re.fullmatch(NAME, n) for n in names):
            raise self.refuse(f"`mapfile {' '.join(words)[:40]}`")
        name = names[0] if names else "MAPFILE"
        self.assigned.add(name)
        if self.input is None:
            shell.variables[name] = Variable(self.hole(f"${{{name}[@]}}", many=2))
            return None
        lines = self.input.rest().splitlines(keepends="-t" not in flags)
        self.budget.size(len(lines))
        shell.variables[name] = Variable(dict(enumerate(lines)), "a")
        return 0

    def _getopts(self, shell: Shell, words: list[str]) -> int | None:
        if len(words) < 2:
            return 2
        letters, name, *rest = words
        given = rest or shell.given
        at, place = shell.option_at
        index = shell.variables.get("OPTIND", Variable("1")).text() or "1"
        if index != str(at):
            at, place = (int(index) if index.isdecimal() and len(index) < 9 else 1), 1
        word = given[at - 1] if at <= len(given) else ""
        if any(is_open(one) for one in (word, letters)):
            raise self.refuse("`getopts` with a value known only at run time")
        silent = letters.startswith(":")
        letters = letters[silent:]
        shell.variables.pop("OPTARG", None)
        self.assigned.update({"OPTARG", name})
        ended = not word.startswith("-") or word in ("-", "--")
        found = "?"
        if not ended:
            letter = word[place]
            place += 1
            known = letter != ":" and letter in letters
            found = letter if known else "?"
            if known and letters[letters.index(letter) + 1 :].startswith(":"):
                argument = word[place:] or (given[at] if at < len(given) else None)
                at += 1 if word[place:] else 2
                place = 1
                if argument is None:
                    found = ":" if silent else "?"
                    argument = letter if silent else None
                if argument is not None:
                    self.store(shell, "OPTARG", None, argument)
            else:
                if place >= len(word):
                    at, place = at + 1, 1
                if not known and silent:
                    self.store(shell, "OPTARG", None, letter)
        elif word == "--":
            at += 1
        self.store(shell, name, None, found)
        self.store(shell, "OPTIND", None, str(at))
        shell.option_at = at, place
        return int(ended)

    def _let(self, shell: Shell, words: list[str]) -> int | None:
        value = "0"
        for word in words:
            value = self.sum(shell, word)
        return None if is_open(value) else int(value == "0")

    # ----------------------------------------------------------------------------------------------
    # Positional parameters and options.

    def _shift(self, shell: Shell, words: list[str]) -> int | None:
        count = words[0] if words else "1"
        if not re.fullmatch("[0-9]{1,9}", count):
            raise self.refuse(f"`shift {count[:40]}`")
        if any(hole.many for word in shell.given for hole in self.holes.of(word)):
            raise self.refuse("`shift` of parameters known only at run time")
        if any(map(self.unplaced, shell.given)):
            raise self.refuse("`shift` of unread parameters")
        if int(count) > len(shell.given):  # bash shifts nothing
            return 1
        del shell.given[: int(count)]
        return 0

    def _set(self, shell: Shell, words: list[str]) -> int | None:
        at = 0
        if not words:
            self.sink.known = False
        while at < len(words):
            word = words[at]
            at += 1
            if word in ("--", "-") or word[:1] not in ("-", "+") or len(word) < 2:
                if word != "-" or at < len(words):
                    shell.given = words[at if word in ("--", "-") else at - 1 :]
                    shell.told = True
                return 0
            flags = [*word[1:]]
            if not set(flags) <= SET_FLAGS | {"o"}:
                raise self.refuse(f"`set {word[:40]}`")
            if "o" in flags:
                flags.remove("o")
                name = words[at] if at < len(words) else ""
                at += 1
                if name not in SET_NAMES:
                    raise self.refuse(f"`set {word} {name[:40]}`")
                flags += [SET_NAMES[name]]
            for flag in flags:
                if flag == "B" and word[0] == "+":
                    raise self.refuse(f"`set {word[0]}{flag}`")
                one = frozenset({flag}) & SET_KEPT
                shell.options = shell.options | one if word[0] == "-" else shell.options - one
        return 0

    def _shopt(self, shell: Shell, words: list[str]) -> int | None:
        flags = "".join(word[1:] for word in words if word.startswith("-"))
        names = [word for word in words if not word.startswith("-")]
        if "o" in flags:
            return self._set(shell, [f for n in names for f in ("-o" if "s" in flags else "+o", n)])
        if not {"s", "u"} & {*flags}:
            self.sink.known = False
            return None
        for name in names:
            if name not in SHOPTS:
                if "u" in flags:
                    continue
                raise self.refuse(f"`shopt -s {name[:40]}`")
            one = frozenset({name})
            shell.options = shell.options | one if "s" in flags else shell.options - one
        return 0

    def _trap(self, shell: Shell, words: list[str]) -> int | None:
        words = words[1:] if words[:1] == ["--"] else words
        if len(words) < 2 or words[0] in ("-l", "-p"):
            return 0
        for signal in words[1:]:
            name = {"0": "EXIT"}.get(signal, signal.upper().removeprefix("SIG"))
            if name in ("DEBUG", "RETURN"):
                raise self.refuse(f"`trap` for {name}")
            if not (name in ("EXIT", "ERR") or name.isdigit() or f"SIG{name}" in _SIGNALS):
                raise self.refuse(f"`trap` for {name[:40]}, which is no signal,")
            shell.traps[name] = "" if words[0] == "-" else words[0]
        return 0

    def _refused(self, shell: Shell, words: list[str]) -> int | None:
        raise self.refuse("a builtin that changes what commands are")

    # ----------------------------------------------------------------------------------------------
    # Output.

    def _echo(self, shell: Shell, words: list[str]) -> int | None:
        end, escapes = "\n", False
        while words and re.fullmatch("-[neE]+", words[0]):
            for letter in words[0][1:]:
                end = "" if letter == "n" else end
                escapes = escapes if letter == "n" else letter == "e"
            words = words[1:]
        text = " ".join(words)
        if escapes and "\\" in text:
            found = unescaped(text)
            if found is None or "\\c" in text or "\\'" in text or "\\0" in text:
                self.sink.unread = True
                return 0
            text = found
        return self.write(text + end)

    def _printf(self, shell: Shell, words: list[str]) -> int | None:
        name = ""
        if words[:1] == ["-v"]:
            name, words = words[1], words[2:]
        words = words[1:] if words[:1] == ["--"] else words
        text = printf_text(words[0], words[1:]) if words else None
        ends = {"e", OUTER_ERREXIT} & shell.options or shell.traps.get("ERR")
        holes = [hole for word in words for hole in self.holes.of(word)]
        wrong = not holes or any(hole.written.startswith("~") for hole in holes)
        unread = any(hole.refused for hole in self.holes.of("".join(words[:1])))
        if ends and ((text is None and wrong) or unread):
            raise self.refuse("what `printf` prints and returns")
        if not name:
            if text is None:
                self.sink.unread = True
                return None
            return self.write(text)
        match = re.fullmatch(rf"({NAME})(?:\[(.*)\])?", name)
        if match is None:
            raise self.refuse(f"`printf -v {name[:40]}`")
        self.assigned.add(match[1])
        unread = text is None
        value = self.unread(f"printf -v {name}") if text is None else text
        self.store(shell, match[1], match[2], value)
        return None if unread else 0

    def _cat(self, shell: Shell, words: list[str]) -> int | None:
        if words not in ([], ["-"]) or self.input is None:
            self.sink.known = False
            return None
        return self.write(self.input.rest())

    def _seq(self, shell: Shell, words: list[str]) -> int | None:
        separator = "\n"
        if words[:1] == ["-s"] and len(words) > 1:
            separator, words = words[1], words[2:]
        if not 1 <= len(words) <= 3 or not all(re.fullmatch("-?[0-9]{1,9}", w) for w in words):
            self.sink.unread = True
            return None
        numbers = [int(word) for word in words]
        first = numbers[0] if len(words) > 1 else 1
        step = numbers[1] if len(words) == 3 else 1
        if step == 0:
            self.sink.unread = True
            return None
        self.budget.size(max(0, (numbers[-1] - first) // step + 1))
        found = range(first, numbers[-1] + (1 if step > 0 else -1), step)
        return self.write(separator.join(map(str, found)) + "\n" if found else "")

    def _basename(self, shell: Shell, words: list[str]) -> int | None:
        if any(is_open(word) for word in words):
            self.sink.known = False
            return None
        if not 1 <= len(words) <= 2 or any(word.startswith("-") for word in words):
            self.sink.unread = True
            return None
        name = words[0].rstrip("/").rpartition("/")[2] or words[0][:1]
        suffix = words[1] if len(words) == 2 else ""
        return self.write((name.removesuffix(suffix) or name) + "\n")

    def _dirname(self, shell: Shell, words: list[str]) -> int | None:
        if any(is_open(word) for word in words):
            self.sink.known = False
            return None
        if len(words) != 1 or words[0].startswith("-") or "//" in words[0]:
            self.sink.unread = True
            return None
        head, slash, _ = words[0].rstrip("/").rpartition("/")
        return self.write((head or ("/" if slash or words[0][:1] == "/" else ".")) + "\n")

    def _expr(self, shell: Shell, words: list[str]) -> int | None:
        terms = all(is_open(word) or re.fullmatch("-?[0-9]{1,18}", word) for word in words[::2])
        if len(words) % 2 == 0 or not terms or not {*words[1::2]} <= {"+", "-", "*", "/", "%"}:
            self.sink.unread = True
            return None
        value = self.sum(shell, " ".join(words))
        self.write(f"{value}\n")
        return None if is_open(value) else int(value == "0")

    def _true(self, shell: Shell, words: list[str]) -> int | None:
        return 0

    def _false(self, shell: Shell, words: list[str]) -> int | None:
        return 1

    def _quiet(self, shell: Shell, words: list[str]) -> int | None:
        return None

    def _told(self, shell: Shell, words: list[str]) -> int | None:
        self.sink.known = False
        return None


def _fields_of(line: str, ifs: str) -> list[str]:
    """Return the fields of a line as `read -a` splits it."""
    fields, current = list[str](), ""
    begun = False
    for part in split_at(line, ifs):
        if part is None or part == "\0":
            if begun or part is not None:
                fields.append(current)
            current, begun = "", False
        else:
            current, begun = part or "", True
    return [*fields, current] if begun else fields


def read_parts(line: str, ifs: str, most: int) -> list[str]:
    """Return the parts of a line as `read` splits it into `most` variables."""
    blanks = "".join(c for c in ifs if c in " \t\n")
    rest, parts = line.lstrip(blanks) if blanks else line, list[str]()
    while len(parts) < most - 1 and rest:
        first = next(iter(split_at(rest, ifs)), "")
        if first is None or first == "\0":  # a separator without text before it
            first = ""
        parts.append(first)
        rest = rest[len(first) :]
        marked = split_at(rest, ifs)
        if marked and (marked[0] is None or marked[0] == "\0"):
            length = len(rest) - len(rest.lstrip(blanks)) if blanks else 0
            if marked[0] == "\0":
                length += 1
                length += len(rest[length:]) - len(rest[length:].lstrip(blanks)) if blanks else 0
            rest = rest[length:]
    rest = rest.rstrip(blanks) if blanks else rest
    # A single field with its separator loses it.
    others = [c for c in ifs if c not in " \t\n"]
    if rest and rest[-1] in others and len(_fields_of(rest, ifs)) == 1:
        rest = rest[:-1].rstrip(blanks) if blanks else rest[:-1]
    return [*parts, rest]


def printf_text(template: str, values: Sequence[str]) -> str | None:
    """Return the text that `printf` prints; None if it is not interpreted."""
    plain = unescaped(template.replace("\\'", "'").replace('\\"', '"'))
    if plain is None or ("%" in plain and _FORMAT.sub("", plain).count("%")):
        return None
    done, rest = list[str](), [*values]
    while True:
        at, taken, used = 0, len(rest), False
        for match in _FORMAT.finditer(plain):
            done.append(plain[at : match.start()])
            at = match.end()
            flags, width, precision, kind = match.groups()
            if kind is None:
                done.append("%")
                continue
            if width == "*" or kind not in "sdiux":
                return None
            used = True
            text = rest.pop(0) if rest else ("" if kind == "s" else "0")
            if kind == "s":
                if (is_open(text) and (width or precision)) or int(width or 0) > 4096:
                    return None
                text = text[: int(precision)] if precision else ("" if precision == "" else text)
                left = "-" in flags
                done.append(text.ljust(int(width or 0)) if left else text.rjust(int(width or 0)))
                continue
            if not re.fullmatch("-?(0|[1-9][0-9]{0,17})", text) or precision is not None:
                return None
            if int(width or 0) > 4096:
                return None
            done.append(f"%{flags}{width}{'x' if kind == 'x' else 'd'}" % int(text))
        done.append(plain[at:])
        if not rest or not used or taken == len(rest) or len(done) > 1 << 16:
            return "".join(done)


_Builtin = Callable[[Builtins, Shell, list[str]], "int | None"]
BUILTINS: Mapping[str, _Builtin] = {
    "unset": Builtins._unset,
    "read": Builtins._read,
    "mapfile": Builtins._mapfile,
    "readarray": Builtins._mapfile,
    "getopts": Builtins._getopts,
    "let": Builtins._let,
    "shift": Builtins._shift,
    "set": Builtins._set,
    "shopt": Builtins._shopt,
    "trap": Builtins._trap,
    "echo": Builtins._echo,
    "printf": Builtins._printf,
    "cat": Builtins._cat,
    "seq": Builtins._seq,
    "basename": Builtins._basename,
    "dirname": Builtins._dirname,
    "expr": Builtins._expr,
    "true": Builtins._true,
    ":": Builtins._true,
    "false": Builtins._false,
    "cd": Builtins._quiet,
    "wait": Builtins._quiet,
    "umask": Builtins._true,
    "ulimit": Builtins._quiet,
    "unalias": Builtins._quiet,
    "sleep": Builtins._true,
    "mkdir": Builtins._quiet,
    "chmod": Builtins._quiet,
}
"""Commands that are interpreted, by name. `shell.py` adds control flow, `eval` and `source`."""
