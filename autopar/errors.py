"""Base classes of the errors that are meant for users; modules derive more specific ones.

    AutoparError                 base; carries the exit code of the command line
    |-- InputError        (2)    a value the user gave is unusable
    |   |-- RuleError            ... a run breaks rules (`autopar.run.rules`); names their ids
    |   |-- DocumentError (2)    ... inside a file: names file, key, value and the remedy
    |   |   `-- VariantError     ... a memory file with tables of other sequence parallelism
    |   |-- OptionError   (2)    ... on the command line: names the option and the remedy
    |   `-- UnsupportedError     ... for one engine, and maybe not for another
    |-- InfeasibleError   (3)    the question is valid and has no answer
    |   `-- InfeasibleExecution  ... one closed-form execution; (2) if it contradicts itself
    `-- InstallError      (1)    the installation is incomplete; names the command that completes it

A message is `OPTION or FILE: problem. Remedy`: what is wrong with its value, then one thing to
type. `EXIT_CODES` lists the exit codes of commands. Programming errors are `AssertionError`s. This
module also shortens values in messages, and suggests known words for an unknown one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

FAILED, UNUSABLE, INFEASIBLE, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
EXIT_CODES: Mapping[int, str] = {
    0: "done",
    FAILED: "done, with a negative result: findings with `check --strict`, "
    "regressions and findings of `profile show`, a run that does not match, cells that could not "
    "be measured; or something is not installed, or the program has a mistake",
    UNUSABLE: "an option or a file is unusable; the message names it, the reason and the remedy",
    INFEASIBLE: "the question has no answer: nothing fits, nothing was found in time, or an engine "
    "does not support a part of the plan",
    INTERRUPTED: "stopped by Ctrl-C; partial results are printed",
    TERMINATED: "stopped by SIGTERM",
}
"""Exit codes of all commands, also the `exit_code` of `--json`."""


def with_remedy(problem: str, remedy: str | None) -> str:
    """Return `problem. Remedy`, or only the problem if there is no remedy."""
    if not remedy:
        return problem
    return f"{problem}{'' if problem.endswith(('.', '?')) else '.'} {remedy}"


class AutoparError(Exception):
    """Base of all errors meant for a user; `exit_code` is the exit code of the command.

    problem : what is wrong: the option or file, its value and the reason, without a period
    remedy : what to type instead; empty or None if nothing helps
    """

    exit_code = FAILED

    def __init__(self, problem: str = "", *, remedy: str | None = None) -> None:
        self.problem = problem
        self.remedy = remedy or None
        self.short = problem
        """Message without its remedy."""
        super().__init__(with_remedy(problem, remedy))


class InputError(AutoparError):
    """A value given by the user is unusable."""

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
        super().__init__(self.located(self.path, key or ""), remedy=remedy)
        self.problem = problem

    def located(self, path: str, key: str) -> str:
        """Return the problem after a path and, if the error is of a key, after a key."""
        where = f"{path}: " + (f"key {key!r}: " if self.key is not None else "")
        return where + self.problem


class VariantError(DocumentError):
    """A memory file has no table for the requested setting of sequence parallelism."""


class OptionError(InputError):
    """An option (or an argument of the Python interface) is unusable."""


class UnsupportedError(InputError):
    """Error for a plan, or its model, that an engine supports neither exactly nor approximately.

    `remedy` is an alternative; it is None if only another engine helps.
    """


class InfeasibleError(AutoparError):
    """A valid question without an answer, for example because no plan fits in memory."""

    exit_code = INFEASIBLE


class InfeasibleExecution(InfeasibleError):  # noqa: N818 - the documented public name
    """An execution of a closed-form model is not possible; `reason` is one sentence.

    `kind` is 'input' if the execution contradicts itself (exit code 2), and 'infeasible' if this
    application or system cannot run it (3).
    """

    def __init__(self, reason: str, kind: Literal["input", "infeasible"] = "infeasible") -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind
        if kind == "input":
            self.exit_code = UNUSABLE


class InstallError(AutoparError):
    """The installation is incomplete; the message names the command that completes it."""


OS_REMEDY = "Use another path, or make this one usable"


def os_problem(error: OSError) -> str:
    """Return what is wrong with the file of an error of the operating system."""
    named = not isinstance(error.filename, int)
    where = shortened(os.fsdecode(error.filename), 200) if named else "stdout"
    return f"{where}: {error.strerror}"


@contextmanager
def input_errors() -> Iterator[None]:
    """Raise InputError in place of the error of a file that the operating system refuses."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise InputError(os_problem(error), remedy=OS_REMEDY) from error


# --------------------------------------------------------------------------------------------------
# Length of messages

_SENTENCE = 270
"""Characters of a message above which its values are shortened and its list has its own line."""
_WORD = 64
"""Maximum characters of a word, such as a path or a value, in a message that is too long."""
_LIST = re.compile(r"(?:[^\s,]{1,64}, ){9,}(?:and |or )?[^\s,;]{1,63}[^\s,;.]|")
"""Pattern of a list of at least ten words; empty where there is none."""
_REMEDY = 100
"""Maximum characters of a remedy on the line of its problem; a longer one has a `hint:` line."""


def message_of(error: AutoparError) -> str:
    """Return the console message of an error: a line, then one each for a long list and a hint.

    Sentences are never cut. In a message that is too long, paths and values are shortened in their
    middle, and a long list has a separate line.
    """
    problem, remedy = (_on_one_line(text) for text in (error.short, error.remedy or ""))
    hint = remedy if len(remedy) > _REMEDY else ""
    ends = "" if hint else remedy
    most = _SENTENCE - len(ends) - 2 * bool(ends)
    if len(problem) > most and isinstance(error, DocumentError):
        problem = _on_one_line(error.located(shortened(error.path), shortened(error.key or "")))
    problem, listed = _without_list(fitted(problem, most), most)
    lines = (with_remedy(problem, ends), listed and f"  {listed}", hint and f"hint: {hint}")
    return "\n".join(filter(None, lines))


def _without_list(text: str, most: int) -> tuple[str, str]:
    """Return a text without its longest list, and that list; the list is empty in a short text."""
    listed = max(_LIST.findall(text), key=len) if len(text) > most else ""
    number = listed.count(", ") + 1
    return (text.replace(listed, f"{number} listed below", 1) if listed else text), listed


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def fitted(text: str, most: int = _SENTENCE) -> str:
    """Return a text of about `most` characters: its longest words are shortened first.

    A shortened word keeps both ends, which distinguish paths and values. A text of many short words
    stays longer.
    """
    words = text.split(" ")
    for place in sorted(range(len(words)), key=lambda i: len(words[i]), reverse=True):
        if sum(map(len, words)) + len(words) - 1 <= most:
            break
        words[place] = shortened(words[place])
    return " ".join(words)


def shortened(text: str, most: int = _WORD) -> str:
    """Return a path or value of at most `most` characters, with its middle as `...`."""
    if len(text) <= most:
        return text
    first = (most - 3) // 2
    return text[:first].rstrip() + "..." + text[len(text) - (most - 3 - first) :].lstrip()


# --------------------------------------------------------------------------------------------------
# Suggestions for unknown words


_LONGEST = 200
"""Maximum compared characters of a word; the time of a comparison grows with their square."""


_NEAR = 0.66
"""Minimum similarity of a suggestion, from 0 to 1: one wrong letter of three, or two of six."""
_NEARER = 0.75
"""Minimum similarity of a word with another first letter, where misprints are rare."""
_PREFIX = 3
"""Minimum characters of the beginning of a word that suggests the word."""


def nearest_words(
    word: str, known: Iterable[str], *, least: float = _NEAR, most: int = 1
) -> list[str]:
    """Return up to `most` known words similar to `word`, the most similar first.

    Known words that begin with `word` count as the most similar. If no word is similar, the
    lower-case form of `word` is compared.

    least : minimum similarity, from 0 (anything) to 1 (equal)
    """
    from difflib import SequenceMatcher, get_close_matches  # late: only needed after an error

    words = list(known)
    begun = [one for one in words if len(word) >= _PREFIX and one.startswith(word)]
    for text in dict.fromkeys((word[:_LONGEST], word[:_LONGEST].lower())):
        similar = [
            one
            for one in get_close_matches(text, words, n=most, cutoff=least)
            if one[:1] == text[:1] or SequenceMatcher(None, one, text).ratio() >= _NEARER
        ]
        if found := [*dict.fromkeys((*sorted(begun, key=len), *similar))][:most]:
            return found
    return []


def nearest(word: str, known: Iterable[str], *, least: float = _NEAR) -> str | None:
    """Return the known word most similar to `word`, or None; `least` as in `nearest_words`."""
    return next(iter(nearest_words(word, known, least=least)), None)


def did_you_mean(
    word: str,
    known: Iterable[str],
    *,
    least: float = _NEAR,
    otherwise: str | None = None,
    form: str = "{!r}",
) -> str:
    """Return the remedy `Did you mean 'X'?` for an unknown word; `otherwise` without a similar one.

    least : minimum similarity, as in `nearest_words`
    otherwise : remedy if no known word is similar; by default an empty text
    form : format of the suggested word
    """
    near = nearest(word, known, least=least)
    if near is not None:
        return f"Did you mean {form.format(near)}?"
    return otherwise or ""
