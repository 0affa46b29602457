"""Values of shell scripts, known or open, with the state of a shell and the launch commands.

A value known only at run time is a *hole*: one character of a range that scripts cannot contain, so
that texts around it are joined, split and cut as usual.
"""

from __future__ import annotations

import posixpath
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from autopar.errors import DocumentError
from autopar.records import Record
from search.engines.text.shell_syntax import Body
from search.engines.text.shell_words import HOLES

_HOLE = re.compile(f"[{HOLES}]")
_FIRST_HOLE = ord(HOLES[0])


class Hole(NamedTuple):
    """A value known only at run time."""

    written: str
    """Text of the script."""
    why: str = ""
    """Condition that decides the value; empty if it depends on none of the script."""
    many: int = 0
    """1 if word splitting may turn the value into no word or several, 2 if it was split; else 0."""
    refused: str = ""
    """Unsupported construct that contains the value; empty for a value of the machine."""
    line: int = 0
    """Line of that construct."""
    unset: bool = False
    """True if a branch of a condition leaves the variable unset."""


class Open(NamedTuple):
    """Index of an array or bounds of a slice known only at run time."""

    text: str


class Holes:
    """The holes of one interpretation, each with the character that stands for it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._holes, self._characters = list[Hole](), dict[Hole, str]()

    def character(self, hole: Hole) -> str:
        hole = hole._replace(written=self.shown(hole.written)[:400])
        if (known := self._characters.get(hole)) is None:
            if len(self._holes) > 60_000:
                raise DocumentError(self._path, "has more than 60000 values known only at run time")
            known = self._characters[hole] = chr(_FIRST_HOLE + len(self._holes))
            self._holes.append(hole)
        return known

    def of(self, text: str) -> list[Hole]:
        """Return the run-time values (holes) in a text."""
        return [self._holes[ord(found) - _FIRST_HOLE] for found in _HOLE.findall(text)]

    def shown(self, text: str) -> str:
        """Return a text with each placeholder replaced by the source text of its run-time value."""
        return _HOLE.sub(lambda found: self._holes[ord(found[0]) - _FIRST_HOLE].written, text)

    def after_split(self, text: str) -> str:
        """Return a text whose holes with several words are marked as split."""

        def marked(found: re.Match[str]) -> str:
            hole = self._holes[ord(found[0]) - _FIRST_HOLE]
            return self.character(hole._replace(many=2)) if hole.many == 1 else found[0]

        return _HOLE.sub(marked, text)


def is_open(text: str) -> bool:
    """Return True if a part of a text is known only at run time."""
    return _HOLE.search(text) is not None


class Budget:
    """Steps, characters and seconds that all interpretations of one file share."""

    MOST_STEPS = 50_000
    MOST_CHARACTERS = 1 << 24
    MOST_SECONDS = 1.5
    """CPU time of this process."""
    MOST_OF_ONE = 1 << 16
    """Maximum words or characters of a variable: `A=$A$A` doubles with every line."""

    def __init__(self, path: str) -> None:
        self._path, self._steps, self._characters, self._work = path, 0, 0, 0
        self._until = time.process_time() + self.MOST_SECONDS

    def step(self) -> None:
        """Count a statement."""
        self._steps += 1
        if self._steps > self.MOST_STEPS:
            raise self._over(f"runs more than {self.MOST_STEPS} statements")
        self.work(1 << 10)

    def work(self, amount: int) -> None:
        """Count work; the clock is read now and then."""
        self._work += amount
        if self._work > 1 << 15:
            self._work = 0
            if time.process_time() > self._until:
                raise self._over(f"needs more than {self.MOST_SECONDS} CPU-seconds to interpret")

    def size(self, size: int) -> None:
        """Count `size` characters or words of a new text or array."""
        if size > self.MOST_OF_ONE:
            problem = f"a variable grows beyond {self.MOST_OF_ONE} words or characters"
            raise DocumentError(self._path, problem)
        self._characters += size
        if self._characters > self.MOST_CHARACTERS:
            raise self._over(f"builds more than {self.MOST_CHARACTERS} characters")
        self.work(size)

    def _over(self, problem: str) -> DocumentError:
        return DocumentError(self._path, f"{problem}, expected a launch script")


# --------------------------------------------------------------------------------------------------
# Variables.


class Variable(NamedTuple):
    """Value and attributes; a value is replaced, never changed in place."""

    value: str | dict[int, str] | dict[str, str] | None
    """Text, items of an array by place, items by key; None if only declared."""
    marks: str = ""
    """Letters of `declare`: a, A, i, l, r, u, x."""

    @property
    def mapped(self) -> bool:
        return "A" in self.marks

    def text(self) -> str | None:
        """Return the value without an index: of an array, its first item."""
        if isinstance(self.value, dict):
            return self.items().get("0" if self.mapped else 0)
        return self.value

    def items(self) -> Mapping[int | str, str]:
        """Return the items in the order in which bash lists them."""
        if self.value is None:
            return {}
        if isinstance(self.value, str):
            return {0: self.value}
        held: dict[Any, str] = dict(self.value)
        return {key: held[key] for key in (_hashed(held) if self.mapped else sorted(held))}


def _hashed(keys: Iterable[str]) -> list[str]:
    """Return the keys of an associative array in the order of bash 5: its hash table's."""
    buckets = dict[int, list[str]]()
    for key in keys:
        value = 2166136261
        for byte in key.encode():
            value = (value * 16777619 & 0xFFFFFFFF) ^ byte
        buckets.setdefault(value & 1023, []).insert(0, key)
    return [key for bucket in sorted(buckets) for key in buckets[bucket]]


class Input:
    """Text that commands of one redirection read, one after the other."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def line(self, end: str) -> tuple[str, bool]:
        """Return (text up to `end`, True if it was found) and move past it."""
        found = self.text.find(end, self.at) if end else -1
        stop = found if found >= 0 else len(self.text)
        text, self.at = self.text[self.at : stop], stop + (found >= 0)
        return text, found >= 0

    def rest(self) -> str:
        text, self.at = self.text[self.at :], len(self.text)
        return text


@dataclass
class Shell:
    """State of a shell: variables, functions, options, and the launch command found so far."""

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Body | Hole] = field(default_factory=dict)
    given: list[str] = field(default_factory=list)
    """Positional parameters `$1`, `$2`, ..."""
    told: bool = False
    """True if the positional parameters are known; False if the script was given none."""
    options: frozenset[str] = frozenset()
    """Letters of `set` and names of `shopt` that are on."""
    traps: dict[str, str] = field(default_factory=dict)
    """Commands of `trap`, by signal."""
    frames: tuple[dict[str, Variable | None], ...] = ()
    """Running functions: the hidden outer variable by name of each local one."""
    status: int | None = 0
    """Exit status of the last command; None if known only at run time."""
    times: dict[str, int] = field(default_factory=dict)
    """Number of evaluations of each undecided condition."""
    option_at: tuple[int, int] = (1, 1)
    """Place of the next option of `getopts`: word, letter."""
    found: Command | Hole | None = None
    """Last launch command; a `Hole` if it depends on an undecided condition; None if not found."""
    launches: int = 0
    """Number of launch commands found."""
    written: dict[str, str | None] = field(default_factory=dict)
    """Text of each file that the script writes, by path; None if it is known only at run time."""

    def copy(self) -> Shell:
        return Shell(
            variables={**self.variables},
            functions={**self.functions},
            given=[*self.given],
            told=self.told,
            options=self.options,
            traps={**self.traps},
            frames=tuple({**frame} for frame in self.frames),
            status=self.status,
            times={**self.times},
            option_at=self.option_at,
            found=self.found,
            launches=self.launches,
            written={**self.written},
        )

    def take(self, other: Shell) -> None:
        """Become a copy of another state."""
        for name, value in vars(other.copy()).items():
            setattr(self, name, value)

    def keep(self, inner: Shell) -> None:
        """Keep what a subshell leaves behind: its launch command and the files that it wrote."""
        self.found, self.launches, self.times = inner.found, inner.launches, inner.times
        self.written = inner.written

    def merge_written(self, states: Sequence[Shell]) -> None:
        """Make the text of each file that differs between states known only at run time."""
        for name in dict.fromkeys(name for state in states for name in state.written):
            texts = {state.written.get(name) for state in states}
            self.written[name] = texts.pop() if len(texts) == 1 else None


# --------------------------------------------------------------------------------------------------
# Conditions of `[ ]` and comparisons that `[[ ]]` shares.

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}
COMPARED = _NUMBERS
"""Comparison of integers, by operator."""
_TEXTS = frozenset({"=", "==", "!=", "<", ">"})
_OF_FILES = frozenset({"-nt", "-ot", "-ef"})
UNARY = frozenset(f"-{letter}" for letter in "abcdefghknoprstuvwxzGLNORS")


class WrongTestError(ValueError):
    """A condition that bash rejects."""


class Condition:
    """Evaluator of the words of `[ ]`; a result of None is known only at run time."""

    def __init__(self, words: list[str], unary: Callable[[str, str], bool | None]) -> None:
        """Prepare a condition; unary : returns the value of an operator such as `-v`."""
        self._words, self._unary, self._at = words, unary, 0

    def value(self) -> bool | None:
        """Return the truth of the words: by number for up to four words, else as an expression.

        The rules are those of bash's `test`. None: known only at run time.
        """
        words = self._words
        if not words:
            return False
        if len(words) == 1:
            return nonempty(words[0])
        if len(words) == 2:
            return self._of_two(words)
        if len(words) == 3:
            return self._of_three(words)
        if len(words) == 4 and words[0] == "!":
            return _not(self._of_three(words[1:]))
        found = self._any()
        if self._at < len(words):
            raise WrongTestError
        return found

    def _of_two(self, words: list[str]) -> bool | None:
        if words[0] == "!":
            return _not(nonempty(words[1]))
        if words[0] not in UNARY:
            raise WrongTestError
        return self._unary(words[0], words[1])

    def _of_three(self, words: list[str]) -> bool | None:
        one, how, other = words
        if how in ("-a", "-o"):
            return _joined(how, nonempty(one), nonempty(other))
        if how in _NUMBERS or how in _TEXTS or how in _OF_FILES:
            return compared(one, how, other)
        if one == "!":
            return _not(self._of_two(words[1:]))
        if (one, other) == ("(", ")"):
            return nonempty(how)
        raise WrongTestError

    def _peek(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._words[at] if at < len(self._words) else None

    def _any(self) -> bool | None:
        found = self._all()
        while self._peek() == "-o":
            self._at += 1
            found = _joined("-o", found, self._all())
        return found

    def _all(self) -> bool | None:
        found = self._one()
        while self._peek() == "-a":
            self._at += 1
            found = _joined("-a", found, self._one())
        return found

    def _one(self) -> bool | None:
        word, how, other = self._peek(), self._peek(1), self._peek(2)
        if word is None:
            raise WrongTestError
        if how is not None and other is not None and (how in _NUMBERS or how in _TEXTS):
            self._at += 3
            return compared(word, how, other)
        self._at += 1
        if word == "!":
            return _not(self._one())
        if word == "(":
            found = self._any()
            if self._peek() != ")":
                raise WrongTestError
            self._at += 1
            return found
        if word in UNARY and how is not None and how not in ("-a", "-o", ")"):
            self._at += 1
            return self._unary(word, how)
        return nonempty(word)


def nonempty(text: str) -> bool | None:
    """Return True if a text is not empty; None if known only at run time."""
    return True if _HOLE.sub("", text) else None if text else False


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _joined(how: str, one: bool | None, other: bool | None) -> bool | None:
    """Return `one or other`, or for `-a` and `&&` `one and other`."""
    ends = how in ("-o", "||")
    if ends in (one, other):
        return ends
    return None if None in (one, other) else not ends


def compared(one: str, how: str, other: str) -> bool | None:
    """Return the value of a comparison of `[ ]`; raises WrongTestError for a non-number."""
    if how in _OF_FILES or is_open(one) or is_open(other):
        return None
    if how in _NUMBERS:
        if not all(re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text) for text in (one, other)):
            raise WrongTestError
        return _NUMBERS[how](int(one), int(other))
    if how in ("<", ">"):
        return in_order(one, other) if how == "<" else in_order(other, one)
    return (one == other) == (how != "!=")


def in_order(one: str, other: str) -> bool | None:
    """Return True if a text sorts before another; None if the locale decides."""
    plain = all(re.fullmatch("[0-9a-z]*|[0-9A-Z]*", text) for text in (one, other))
    mixed = (one + other).lower() != one + other and (one + other).upper() != one + other
    return one < other if plain and not mixed else None


# --------------------------------------------------------------------------------------------------
# Launch commands.


class Command(Record):
    """Words of one launch command, with its environment and assumptions."""

    around: tuple[str, ...] = ()
    """Words of the commands around it that start a shell: `srun` and its options."""
    before: tuple[str, ...]
    """Words before the program: torchrun and its options; empty if no program was found."""
    program: str = ""
    """The `.py` file, or the module after `-m`; empty if none was found."""
    arguments: tuple[str, ...]
    """Words after the program; words of the longest array if no program was found."""
    loose: tuple[int, ...] = ()
    """Positions of arguments known only at run time that are not the value of a flag."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Environment variables that the script exports, or sets for this command."""
    written: Mapping[str, str | None] = msgspec.field(default_factory=dict)
    """Text of each file that the script writes and this command, or another of these files, names.

    None: its text is known only at run time.
    """
    notes: tuple[str, ...] = ()
    """Sentences for the user on assumptions about the script."""
    needs_arguments: int = 0
    """Number of positional parameters that the script reads and that are not given."""
    ended: int = 0
    """Line of the `exit` with a failure that ends the script; 0: there is none."""
    unset: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Unset variables, with the text used for each: its default, or an empty text."""


_RUNNERS = re.compile(r"(.*/)?(torchrun|python[0-9.]*|accelerate|srun|deepspeed)")
_STARTERS = re.compile(r"(.*/)?(torchrun|accelerate|srun|deepspeed|mpirun)|torch\.distributed.*")
_LAUNCHER = re.compile(r"(.*/)?(torchrun|accelerate|deepspeed)|torch\.distributed\.(run|launch)")
"""Pattern of launchers, which start ranks of a training and nothing else."""
_PROGRAM = re.compile(r".*\.py|(.*/)?scripts/training/train\.sh", re.DOTALL)
"""Pattern of training programs: Python files, and the launcher of Megatron-Bridge."""
_TUNERS = re.compile(r"(.*/)?((llamafactory-cli|lmf|axolotl) train|swift (sft|pt))")
"""Pattern of commands that start ranks, mostly with the arguments in a YAML file."""
_RECIPES = re.compile(r"(.*/)?automodel \S+\.ya?ml")
"""Pattern of commands that start ranks, whose first argument is a YAML file."""
_MODULE = re.compile(r"(?!torch\.|accelerate\.|deepspeed\.)\w+(\.\w+)+")
"""Pattern of modules that are no launchers and no tools around a program."""
_PATHS = re.compile(r"--.*(path|data|blend|file|prefix).*")
"""Pattern of flags with any number of values, such as paths, that do not affect the estimate."""
_SHORT = r"-[a-z]{2,3}"
_LIKE_FLAG = re.compile(rf"--.*|{_SHORT}|\+{{0,2}}[A-Za-z_]\w*(\.\w+)+=.*", re.DOTALL)
"""Pattern of words that identify a launch: `--tp`, `-tp`, and Hydra's `model.tp=4`."""
_FLAG = re.compile(rf"--.*|{_SHORT}", re.DOTALL)


def settled(arguments: list[str], holes: Holes) -> tuple[list[int], list[str]]:
    """Return (positions of open words that may be flags, the other open values).

    An open array, or an open word after the value of a flag, may contain flags or be empty. The
    others count as one word each.
    """
    loose, single = list[int](), list[str]()
    flag, values = "", 0
    for place, word in enumerate(arguments):
        free = not _PATHS.fullmatch(flag)
        if _FLAG.fullmatch(word):
            flag, values = word, 0
        elif (
            free
            and is_open(word)
            and not _LIKE_FLAG.fullmatch(word)
            and nonempty(word) is None
            and (values or any(hole.many == 2 for hole in holes.of(word)))
        ):
            loose.append(place)
            continue
        else:
            values += 1
        single += [holes.shown(one) for one in _HOLE.findall(word)]
    return loose, single


def program_of(words: list[str], holes: Holes) -> tuple[list[str], str, list[str]] | None:
    """Return (words before the program, program, words after it); None for any other command."""
    for before, (word, job) in enumerate(pairwise(words)):
        if _RECIPES.fullmatch(f"{word} {job}"):
            return words[:before], word.rpartition("/")[2], words[before + 1 :]
        if _TUNERS.fullmatch(f"{word} {job}"):
            return words[:before], word.rpartition("/")[2], words[before + 2 :]
    at = next((i for i, word in enumerate(words) if _PROGRAM.fullmatch(word)), None)
    if "-m" in words[1:-1]:
        module = words.index("-m", 1) + 1
        # Behind a module that trains, a `.py` file is an argument of it.
        if at is None or (module < at and _MODULE.fullmatch(words[module])):
            at = module
    if at is None:
        return None
    # An open array of flags counts as flags, and a launcher starts a program without them, too.
    rest, launcher = words[at + 1 :], any(map(_LAUNCHER.fullmatch, words[:at]))
    if not (
        launcher or has_flags(rest) or any(hole.why for word in rest for hole in holes.of(word))
    ):
        return None
    # The script is the command itself, or follows a program that runs scripts.
    if at and not any(_RUNNERS.fullmatch(word) for word in words[:at]):
        return None
    return words[:at], words[at], words[at + 1 :]


def has_flags(arguments: Sequence[str]) -> bool:
    """Return True if a word of a command is a flag, or a setting of Hydra."""
    return any(_LIKE_FLAG.fullmatch(word) for word in arguments)


def with_arguments(number: int) -> str:
    """Return the remedy for a script that needs positional parameters, at least `number`."""
    count = "arguments" if number < 2 else f"{number} arguments"
    return f"Add --args with the {count} of the script"


def path_of(name: str) -> str:
    """Return the path of a file without `./`, as `Shell.written` names it."""
    return posixpath.normpath(name) if name else ""


def runs_ranks(before: Sequence[str]) -> bool:
    """Return True if the words before a program include a distributed launcher such as torchrun."""
    return any(_STARTERS.fullmatch(word) for word in before)


def split_flags(
    words: Sequence[str], left: Callable[[str], bool]
) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return (words without the selected flags, words of the selected flags by name).

    left : returns True for the name of a flag to select, without leading hyphens and with `-` for
    `_`.
    """
    kept, out = list[str](), dict[str, tuple[str, ...]]()
    name: str | None = None
    for word in words:
        if _LIKE_FLAG.fullmatch(word):
            flag = _name(word)
            name = flag if left(flag) else None
            if name is not None:
                out[name] = (word,)
                continue
        if name is None:
            kept.append(word)
        else:
            out[name] = (*out[name], word)
    return kept, out


def _name(word: str) -> str:
    return word.lstrip("-").partition("=")[0].replace("_", "-")


def world_flags(before: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return `--nnodes` and `--nproc-per-node` among the words before a program, by name."""
    wanted = {"nnodes", "nproc-per-node"}
    return split_flags(before, lambda flag: flag in wanted)[1]


def variables_of_scheduler(text: str) -> dict[str, str]:
    """Return the environment variables that Slurm sets for the `#SBATCH` lines of a script.

    Only lines before the first command count. The names are output variables of sbatch.
    """
    words = list[str]()
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words += re.split(r"\s#", line)[0].split()[1:]
    return slurm_variables(words)


def slurm_variables(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that Slurm sets for the options of `sbatch` or `srun`.

    The number of tasks follows from nodes and tasks per node.
    """
    found, at = dict[str, str](), 0
    while at < len(words):
        match = _ASKED.fullmatch(words[at])
        at += 1
        if match is None:
            continue
        option, value = match[1] or match[3], match[2] or match[4]
        if not value and at < len(words):
            value = words[at]
            at += 1
        count = re.fullmatch(r"(?:gpu:)?(?:[A-Za-z]\w*:)?([1-9][0-9]{0,5})", value)
        for name in _SLURM[option] if count is not None else ():
            found[name] = count[1] if count is not None else ""
    nodes, tasks = found.get("SLURM_NNODES"), found.get("SLURM_NTASKS_PER_NODE")
    if nodes is not None or tasks is not None:
        found.setdefault("SLURM_NTASKS", str(int(nodes or 1) * int(tasks or 1)))
        found.setdefault("SLURM_NPROCS", found["SLURM_NTASKS"])
    return found


_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "gpus": ("SLURM_GPUS",),
    "G": ("SLURM_GPUS",),
    "gres": ("SLURM_GPUS_ON_NODE",),
}
"""Option of `#SBATCH` and `srun` -> environment variables that contain its value."""
_ASKED = re.compile(
    r"--(nodes|ntasks-per-node|ntasks|gpus-per-node|gpus|gres)(?:=(.*))?|-([NnG])(.*)"
)
