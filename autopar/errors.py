"""One tree of errors for everything a user can run into.

    AutoparError                 base; carries the exit code of the command line
    |-- InputError        (2)    a value the user gave is unusable
    |   |-- DocumentError (2)    ... inside a file: names file, key, value and the remedy
    |   `-- OptionError   (2)    ... on the command line: names the option and the remedy
    |-- InfeasibleError   (3)    the question is valid and has no answer
    |   `-- InfeasibleExecution  ... one execution of an analytic model cannot run
    `-- InstallError      (1)    the installation is incomplete; names the command that completes it

Every message is one sentence a user can act on. Programming errors stay `AssertionError`s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

__all__ = [
    "AutoparError",
    "DocumentError",
    "InfeasibleError",
    "InfeasibleExecution",
    "InputError",
    "InstallError",
    "OptionError",
]


class AutoparError(Exception):
    """Base of every error meant for a user; `exit_code` is what a command exits with."""

    exit_code = 1


class InputError(AutoparError):
    """A value the user gave is unusable."""

    exit_code = 2


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


class OptionError(InputError):
    """An option (or an argument of the Python interface) is unusable."""


class InfeasibleError(AutoparError):
    """The question is valid and has no answer, for example no plan fits in memory."""

    exit_code = 3


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
            self.exit_code = 2


class InstallError(AutoparError):
    """The installation is incomplete; the message names the command that completes it."""
