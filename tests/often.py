"""Property tests that try a few examples in `make test`, and all of them in `make test-slow`.

@often(20, 80, st.integers(), st.booleans())
def test_something(number: int, flag: bool) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

__all__ = ["often"]


def often(
    few: int, many: int, *values: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Return a decorator that turns a property into a test with few examples and a slow one."""

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        def test(examples: int) -> None:
            settings(max_examples=examples)(given(*values, **named)(check))()

        # not functools.wraps, which would show pytest the arguments of the property
        test.__name__, test.__qualname__ = check.__name__, check.__qualname__
        test.__module__, test.__doc__ = check.__module__, check.__doc__
        counts = [few, pytest.param(many, marks=pytest.mark.slow)]
        return pytest.mark.parametrize("examples", counts)(test)

    return decorate
