"""One tree of errors for everything a user can run into.

    AutoparError                 base; carries the exit code of the command line
    |-- InputError        (2)    a value the user gave is unusable
    |   |-- RuleError            ... a run breaks rules (`autopar.run.rules`); names their ids
    |   |-- DocumentError (2)    ... inside a file: names file, key, value and the remedy
    |   |   `-- VariantError     ... the file was measured with another sequence parallelism
    |   |-- OptionError   (2)    ... on the command line: names the option and the remedy
    |   `-- UnsupportedError     ... for one engine, and maybe not for another
    |-- InfeasibleError   (3)    the question is valid and has no answer
    |   `-- InfeasibleExecution  ... one execution of an analytic model cannot run
    `-- InstallError      (1)    the installation is incomplete; names the command that completes it

Every message is one sentence a user can act on, and what commands exit with is one table.
Programming errors stay `AssertionError`s. What such a sentence proposes in place of an unknown word
is found here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

FAILED, UNUSABLE, INFEASIBLE, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    FAILED: "done, and what was asked about is not in order: findings with `check --strict`, "
    "regressions and findings of `profile show`, a run that does not match, cells that could not "
    "be measured; or something is not installed, or the program has a mistake",
    UNUSABLE: "an option or a file is unusable; the sentence says which, why, and what to do",
    INFEASIBLE: "the question has no answer: nothing fits, nothing was found in time, or an engine "
    "cannot do all that a plan says",
    INTERRUPTED: "stopped by Ctrl-C; what was found until then is shown where there is something",
    TERMINATED: "stopped by SIGTERM",
}
"""What every command exits with, and `exit_code` of its `--json` says."""


class AutoparError(Exception):
    """Base of every error meant for a user; `exit_code` is what a command exits with."""

    exit_code = FAILED

    @property
    def short(self) -> str:
        """Message without its remedy, which follows the first `; `."""
        return str(self).partition("; ")[0]


class InputError(AutoparError):
    """A value the user gave is unusable."""

    exit_code = UNUSABLE


class DocumentError(InputError):
    """A file is unusable; the message names the file, the key, the value and the remedy."""

    def __init__(
        self,
        path: Path | str,
        problem: str,
        *,
        key: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.path = str(path)
        self.key = key
        self.problem = problem
        self.remedy = remedy
        where = f"{self.path}: " + (f"key {key!r}: " if key is not None else "")
        super().__init__(where + problem + (f"; {remedy}" if remedy else ""))


class VariantError(DocumentError):
    """A memory file has only the tables with, or only those without, sequence parallelism."""


class OptionError(InputError):
    """An option (or an argument of the Python interface) is unusable."""


class UnsupportedError(InputError):
    """An engine has neither the model of a plan nor anything near the plan.

    `remedy` is what else can be done, empty where another engine is all there is.
    """

    def __init__(self, problem: str, *, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(problem + (f"; {remedy}" if remedy else ""))


class InfeasibleError(AutoparError):
    """The question is valid and has no answer, for example no plan fits in memory."""

    exit_code = INFEASIBLE


class InfeasibleExecution(InfeasibleError):  # noqa: N818 - the documented public name
    """An execution of an analytic model that cannot run; `reason` says why in one sentence.

    `kind` is 'input' where the execution contradicts itself (exit code 2), and 'infeasible' where
    this application or system cannot run it (3).
    """

    def __init__(self, reason: str, kind: Literal["input", "infeasible"] = "infeasible") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        if kind == "input":
            self.exit_code = UNUSABLE


class InstallError(AutoparError):
    """The installation is incomplete; the message names the command that completes it."""


# --------------------------------------------------------------------------------------------------
# A sentence that somebody reads to its end.

_SENTENCE = 270
"""Characters of a sentence; with the name of a command before it they are fewer than 300."""
_WORD = 64
"""Characters of a word, such as a path or a value, where a sentence is too long."""


def fitted(text: str, most: int = _SENTENCE) -> str:
    """Return a text of at most `most` characters; of what is too long the middle is left out.

    First of words, the longest first: two ends tell paths apart, and values. Then of the sentence:
    file and key stand at its beginning, and the remedy at its end.
    """
    words = text.split(" ")
    for place in sorted(range(len(words)), key=lambda i: len(words[i]), reverse=True):
        if sum(map(len, words)) + len(words) - 1 <= most:
            break
        words[place] = _without_middle(words[place], _WORD, 0.5)
    return _without_middle(" ".join(words), most, 0.6, " ... ")


def _without_middle(text: str, most: int, share: float, mark: str = "...") -> str:
    """Return a text of at most `most` characters, of which a share are its first ones."""
    if len(text) <= most:
        return text
    first = int((most - len(mark)) * share)
    return text[:first].rstrip() + mark + text[len(text) - (most - len(mark) - first) :].lstrip()


# --------------------------------------------------------------------------------------------------
# What was meant by a word that nobody knows.


_LONGEST = 200
"""Characters of a word that are compared; the time of a comparison grows with their square."""


def nearest_words(word: str, known: Iterable[str], cutoff: float, most: int = 1) -> list[str]:
    """Return the known words that are most like one, the likest first; maybe none.

    cutoff : the least likeness, from 0 (anything) to 1 (the same).
    """
    from difflib import get_close_matches  # late: a command that goes right needs it never

    return get_close_matches(word[:_LONGEST], list(known), n=most, cutoff=cutoff)


def nearest(
    word: str, known: Iterable[str], cutoff: float, *, any_case: bool = False
) -> str | None:
    """Return the known word that is most like one; None: none is.

    any_case : where none is, take the word in lower case.
    """
    words = list(known)
    found = nearest_words(word, words, cutoff)
    if any_case and not found:
        found = nearest_words(word.lower(), words, cutoff)
    return found[0] if found else None


def did_you_mean(
    word: str,
    known: Iterable[str],
    cutoff: float,
    *,
    otherwise: str | None = None,
    form: str = "{!r}",
    any_case: bool = False,
) -> str:
    """Return the end of a sentence on an unknown word: `; did you mean 'X'?`.

    Parameters
    ----------
    otherwise : the remedy where no known word is near; by default there is none.
    form : how the word is written.
    """
    near = nearest(word, known, cutoff, any_case=any_case)
    if near is not None:
        return f"; did you mean {form.format(near)}?"
    return f"; {otherwise}" if otherwise else ""
