"""How many ranks torchrun has started, by the environment that it sets in each of them."""

from __future__ import annotations

import os

from autopar.errors import InputError

__all__ = ["launched_ranks"]

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_VARIABLES = (*_NUMBERS, "MASTER_ADDR")


def launched_ranks() -> int | None:
    """Return the number of ranks that torchrun started, None where it did not.

    Raises
    ------
    InputError: somebody else set its variables.
    """
    if any(name not in os.environ for name in _VARIABLES):
        return None
    for name in _NUMBERS:
        if not os.environ[name].isdecimal():
            raise InputError(
                f"the environment variable {name} is {os.environ[name]!r}, expected a number; "
                "let torchrun set it"
            )
    return max(1, int(os.environ["WORLD_SIZE"]))
