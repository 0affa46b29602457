"""The compiled engines of the analytic models."""

from __future__ import annotations

from typing import Any

from autopar.errors import InputError
from autopar.jsonio import shorten
from search.extension import core

__all__ = ["MOST_THREADS", "calculon", "check_threads", "tensor2d"]

MOST_THREADS = 1024
"""More are refused; no machine answers faster with them."""

calculon: Any = core.calculon
tensor2d: Any = core.tensor2d


def check_threads(threads: object) -> None:
    """Raise InputError where a number of threads is none that can be started."""
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise InputError(
            f"threads: the value is {shorten(threads)}, expected 1 to {MOST_THREADS} threads"
        )
