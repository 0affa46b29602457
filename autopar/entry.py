"""Entry points of commands: a module that imports next to nothing, so that Ctrl-C is always seen.

`autopar.commands.guarded` cannot see it while a command's own modules are imported, which takes a
third of a second and more.
"""

from __future__ import annotations

import sys
from importlib import import_module

__all__ = ["enter", "profile_estimate", "verify"]


def enter(command: str, module: str, *, speaks: bool = True) -> None:
    """Run `main` of a module as the entry point of a command; it ends the process.

    Parameters
    ----------
    speaks : whether Ctrl-C is said; of several processes one does.
    """
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        if speaks:
            sys.stderr.write(f"{command}: interrupted\n")
        sys.exit(130)  # `autopar.commands.INTERRUPTED`


def profile_estimate() -> None:
    """Run `autopar-profile-estimate`."""
    enter("autopar-profile-estimate", "autopar.estimate.cli")


def verify() -> None:
    """Run `autopar-verify`."""
    enter("autopar-verify", "autopar.verify.cli")
