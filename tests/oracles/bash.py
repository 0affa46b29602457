"""Launch scripts run by the real bash, to compare with the words that the reader finds.

The programs that a launch starts are stubs that store their arguments. A script runs in a folder of
its own with a clean environment, a limit of CPU time, of memory and of file size, and a path of
harmless commands only. Nothing is launched, and nothing is written elsewhere.
"""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from autopar.errors import DocumentError
from search.engines.text import Command, script_command

Words = tuple[str, ...]

RUN_TIME_WORD = "Qqrstu"
"""Value of everything that is known only at run time: one word without special characters."""
RUN_TIME_NAMES = ("RUN_ID", "DATA_PATH", "MASTER_ADDR", "SLURM_JOB_ID")
"""Environment variables that are set to `RUN_TIME_WORD`."""
RUN_TIME_COMMANDS = ("date", "hostname", "whoami", "awk", "sed", "tr", "cut", "bc", "nvidia-smi",
                     "some-command")  # fmt: skip
"""Commands that print `RUN_TIME_WORD`, whatever they are asked."""
PROGRAM = ".data/x.bin"
"""Path of such a command, below the folder of each script; `*` does not match it."""
_FILTERS = ("awk", "sed", "tr", "cut", "bc")
LAUNCH = "torchrun pretrain_gpt.py --first 1"
"""Launch of every script, before the words that are compared."""
_LAUNCHERS = ("torchrun", "python", "srun")
_COMMANDS = ("bash", "basename", "cat", "dirname", "env", "expr", "head", "mkdir", "nohup",
             "seq", "sh", "sort", "tail", "tee", "timeout", "true", "wc")  # fmt: skip
"""Real commands that a script may use; none removes or overwrites a file."""
_LAUNCHED = """#!/bin/sh
case "${0##*/} $1" in
"python -c") echo WORD; exit ;;
"srun bash" | "srun sh") exec "$@" ;;
esac
printf '%s\\0' $(($# + 1)) "${0##*/}" "$@" >>"$_AUTOPAR_LAUNCHES"
"""
_GREP = """#!/bin/sh
found=$(REAL "$@"); status=$?
echo "${found:-WORD}"; exit $status
"""
"""`grep` whose output is known only at run time, and therefore not empty."""
_UNKNOWN = """command_not_found_handle() {
  case $1 in "["*) return 127 ;; esac
  echo WORD
}
"""
"""Start file of every bash: an unknown command succeeds, as the reader assumes."""
_DRIVER = """ulimit -c 0; ulimit -t 5; ulimit -f 1024; ulimit -v 1000000
i=0
while [ $i -lt $1 ]; do
  : "$(cd $i; exec 9>&1 <$2/input >/dev/null 2>&1
    _AUTOPAR_LAUNCHES=$2/$i.out timeout -k 1 10 bash $2/$i.sh)"  # ends when all that hold 9 end
  i=$((i + 1))
done
"""


class Outcome(NamedTuple):
    """One script, as the reader and bash understand it."""

    script: str
    kind: str
    """equal, refused, or silent: other words than those of bash without an error."""
    ours: Words | None
    """Words of the last launch that the reader finds; None if it refuses or finds no launch."""
    bash: Words | None
    """Words of the last launch that bash starts; None if it starts none."""
    why: str = ""
    """Error of the reader."""


def is_parsed(script: str) -> bool:
    """Return True if bash finds no syntax error in a script; nothing of it is run."""
    asked = [shutil.which("bash") or "bash", "-n"]
    return subprocess.run(asked, input=script.encode(), capture_output=True).returncode == 0


@cache
def bash_version() -> int:
    """Return the major version of the bash of this machine; 0 if there is none."""
    bash = shutil.which("bash")
    if bash is None:
        return 0
    asked = [bash, "-c", "echo ${BASH_VERSINFO[0]}"]
    return int(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)


def bash_launches(
    scripts: Sequence[str],
    environment: Sequence[str] = RUN_TIME_NAMES,
    word: str = RUN_TIME_WORD,
) -> list[Words | None]:
    """Return for each script the words of the last launch that bash starts, None without one.

    A script is stopped after ten seconds.
    Launches by torchrun or srun go before those by python, as in the reader.

    environment : names of variables that are set to `word`.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-") as name:
        folder = Path(name).resolve()
        commands = _folder_of_commands(folder, word)
        for number, script in enumerate(scripts):
            (folder / f"{number}.sh").write_text(script, encoding="utf-8")
            path = folder / str(number) / PROGRAM
            path.parent.mkdir(parents=True)
            path.symlink_to(commands / "some-command")
        subprocess.run(
            [commands / "sh", "-c", _DRIVER, "sh", str(len(scripts)), str(folder)],
            cwd=folder,
            env={
                **dict.fromkeys(environment, word),
                "PATH": str(commands),
                "BASH_ENV": str(commands / "unknown"),
                "HOME": str(folder / "home"),
                "TMPDIR": str(folder),
                "LC_ALL": "C.UTF-8",
            },
            stderr=subprocess.DEVNULL,  # a shell that a script kills
            check=True,
        )
        return [_last_launch(folder / f"{number}.out") for number in range(len(scripts))]


def _folder_of_commands(folder: Path, word: str) -> Path:
    """Return a new folder with the stubs and links to the commands that scripts may use.

    word : output of the stubs.
    """
    commands = folder / "commands"
    commands.mkdir()
    for name in _COMMANDS:
        found = shutil.which(name)
        if found is not None:
            (commands / name).symlink_to(found)
    for name in RUN_TIME_COMMANDS:
        # A filter that left its pipe unread would kill the command in front of it.
        reads = "[ -p /dev/stdin ] && cat >/dev/null\n" if name in _FILTERS else ""
        _stub(commands / name, f"#!/bin/sh\n{reads}echo {word}\n")
    grep = _GREP.replace("REAL", shutil.which("grep") or "grep")
    _stub(commands / "grep", grep.replace("WORD", word))
    (folder / "input").write_text(f"{word}\n", encoding="utf-8")
    (commands / "unknown").write_text(_UNKNOWN.replace("WORD", word), encoding="utf-8")
    for name in _LAUNCHERS:
        _stub(commands / name, _LAUNCHED.replace("WORD", word))
    return commands


def _stub(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _last_launch(path: Path) -> Words | None:
    """Return the words of the last launch in a file of counts and words, each ended by NUL."""
    if not path.exists():
        return None
    words = path.read_bytes().decode("utf-8", "surrogateescape").split("\0")
    launches, at = list[Words](), 0
    while at < len(words) - 1:
        end = at + 1 + int(words[at])
        launches.append(tuple(words[at + 1 : end]))
        at = end
    if not launches:  # stopped before the words were written
        return None
    return max(enumerate(launches), key=lambda one: (one[1][0] != "python", one[0]))[1]


def sections(name: str) -> list[tuple[str, list[str]]]:
    """Return (title, lines) for each `## ` section of a file in `tests/data`."""
    path = Path(__file__).resolve().parents[1] / "data" / name
    _, *texts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    parts = [text.removesuffix("\n").split("\n") for text in texts]
    return [(title, [_with_launch(line) for line in lines]) for title, *lines in parts]


def _with_launch(line: str) -> str:
    return re.sub(r"\bRUN\b", LAUNCH, line)


def manual_scripts() -> list[tuple[str, str]]:
    """Return (section, script) for each construct of `tests/data/bash_manual.bash`."""
    found = list[tuple[str, str]]()
    for section, lines in sections("bash_manual.bash"):
        for line in lines:
            if line.startswith("  "):
                found[-1] = (section, f"{found[-1][1]}{line[2:]}\n")
            else:
                found.append((section, f"{line}\n"))
    return found


# --------------------------------------------------------------------------------------------------
# Comparison with the reader.


def outcomes(scripts: Sequence[str]) -> list[Outcome]:
    """Return the outcome of each script; those that the reader refuses are not run.

    A value that the reader calls known only at run time equals one non-empty word of bash.
    """
    found: list[Command | str] = [_read(script) for script in scripts]
    read = [n for n, answer in enumerate(found) if isinstance(answer, Command)]
    launched = dict(zip(read, bash_launches([scripts[n] for n in read]), strict=True))
    results = list[Outcome]()
    for number, (script, answer) in enumerate(zip(scripts, found, strict=True)):
        if isinstance(answer, str):
            kind = "silent" if answer.startswith("internal error") else "refused"
            results.append(Outcome(script, kind, None, None, answer))
            continue
        ours, theirs = _launched_words(answer), launched[number]
        if (
            _same(answer, theirs)
            or _may_not_launch(answer, theirs)
            or _same_with_set(script, answer)
            or _same_with_number(script, answer)
        ):
            kind = "equal"
        elif ours is None and not any(word.startswith("--") for word in answer.arguments):
            kind = "refused"  # by the reader of configurations: no launch, and no array of flags
        else:
            kind = "silent"
        results.append(Outcome(script, kind, ours, theirs))
    return results


def shown(outcome: Outcome) -> str:
    """Return a script with the words of the reader and those of bash."""
    ours = outcome.why or _shown_words(outcome.ours)
    return f"{outcome.script.rstrip()}\n  read: {ours}\n  bash: {_shown_words(outcome.bash)}\n"


def _shown_words(words: Words | None) -> str:
    if words is None:
        return "no launch"
    return " ".join(map(repr, words[len(LAUNCH.split()) :])) or "no words"


def _read(script: str) -> Command | str:
    """Return the launch that the reader finds in a script, or its error."""
    try:
        return script_command(script, "launch.sh", arguments=())
    except DocumentError as error:
        return str(error)
    except Exception as error:
        return f"internal error: {error!r}"


def _launched_words(command: Command) -> Words | None:
    """Return the words from the first launcher on; words such as `env` and `time` go before it."""
    if not command.program:
        return None
    words = (*command.before, command.program, *command.arguments)
    first = next((n for n, word in enumerate(words) if word in _LAUNCHERS), 0)
    return words[first:]


def _may_not_launch(command: Command, theirs: Words | None) -> bool:
    """Return True if bash launches nothing and a note reports that this may happen."""
    return theirs is None and any(n.startswith("nothing is launched") for n in command.notes)


def _same_with_set(script: str, command: Command) -> bool:
    """Return True if the words are right where unset environment variables have one word.

    These are the variables that the words contain, or all that the script uses, or all of these
    without a default. The reader names those whose `$` and name a text of `eval` joins.
    """
    words = " ".join(_launched_words(command) or ())
    for text, tail in ((words, ""), (script, ""), (script, r"\b(?!:?[-=+])")):
        joined = () if text == words else command.unset
        used = [*re.findall(rf"\$\{{?[!#]?([A-Za-z_]\w*){tail}", text), *joined]
        names = {name for name in used if not _is_set(name, script)}
        if names:
            (theirs,) = bash_launches([script], sorted({*names, *RUN_TIME_NAMES}))
            if _same(command, theirs):
                return True
    return False


def _same_with_number(script: str, command: Command) -> bool:
    """Return True if the words are right where the environment has a number, used in a sum."""
    if re.search(r"\(\(|\$\[|\blet\b", script) is None:
        return False
    names = sorted({*command.unset, *RUN_TIME_NAMES})
    (theirs,) = bash_launches([script], names, word="73")
    return _same(command, theirs)


def _is_set(name: str, script: str) -> bool:
    """Return True if a script or every shell sets a variable."""
    takes = r"(read|mapfile|readarray|getopts|local|declare|typeset|printf -v|unset)\b[^;\n<$]*"
    sets = rf"\b{name}(\[[^]]*\])?\+?=|\b({takes}|for |select ){name}\b"
    return name in ("IFS", "OPTIND", "PATH") or re.search(sets, script) is not None


def _same(command: Command, theirs: Words | None) -> bool:
    """Return True for equal words.

    Text that a note calls unknown equals any text that is not empty; the value of a flag that
    `depends on` a condition, by a note, equals any word.
    """
    ours = _launched_words(command)
    if ours is None or theirs is None:
        return ours is theirs
    unknown = [text for note in command.notes for text in _unknown_of(note)]
    decided = [note.split()[0] for note in command.notes if " depends on " in note]
    return len(ours) == len(theirs) and all(
        same_word(one, other, unknown) or flag in decided
        for flag, one, other in zip(("", *ours), ours, theirs, strict=False)
    )


def _unknown_of(note: str) -> list[str]:
    """Return the texts that a note calls unknown: values of run time, and names of files."""
    one = re.match(r"(.*) is known only at run time", note, re.DOTALL)
    if one is not None:
        return [one[1]]
    heads = ("known only at run time, counted as", "taken as written, as if no file matches")
    if not note.startswith(heads):
        return []
    found, part = list[str](), ""
    for one_of in note.partition(": ")[2].split(", "):
        part = f"{part}, {one_of}" if part else one_of
        if part.count("(") <= part.count(")"):  # `$(tr , -)` contains a comma
            found.append(part)
            part = ""
    return [*found, *part.split(", ")] if part else found


def same_word(ours: str, theirs: str, unknown: Sequence[str]) -> bool:
    """Return True for equal words; unknown : texts and parameters that equal any text.

    So does a `~` before `/`.
    """
    if ours == theirs:
        return True
    names = [name for text in unknown for name in re.findall(r"^\$\{?[!#]?(\w+)", text)]
    open_ = [re.escape(text) for text in sorted(unknown, key=len, reverse=True)]
    open_ += [rf"\$\{{[!#]?{name}\b[^}}]*\}}|\${name}\b" for name in names]
    open_.append("~(?=/)")
    if not theirs and ours in unknown:
        # An item of an unknown key, and a part of an unknown value, may be empty.
        item, cut = r"\[[^]]*\$[^]]*\]", r":[^-=?+}][^}]*|[#%/][^}]*\$[^}]*"
        part = rf"\$\{{\w+({item}|(\[[@*]\])?({cut}))\}}"
        return re.fullmatch(part, ours) is not None
    texts = [re.escape(text) for text in re.split("|".join(open_), ours)]
    return re.fullmatch(".+".join(texts), theirs, re.DOTALL) is not None
