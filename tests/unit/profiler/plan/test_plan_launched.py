"""Whether torchrun has started this process is decided by all that it sets, or not at all."""

from __future__ import annotations

import pytest

from autopar.errors import InputError
from profiler.environment import launched_ranks

ALL = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_PORT": "29500",
    "MASTER_ADDR": "localhost",
}


@pytest.mark.parametrize("missing", [*ALL, None])
def test_all_variables_or_none(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's own MASTER_ADDR or WORLD_SIZE starts nothing."""
    for name, value in ALL.items():
        if name == missing:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert launched_ranks() == (4 if missing is None else None)


def test_numbers_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence with the variable and its value."""
    for name, value in {**ALL, "WORLD_SIZE": "four"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="WORLD_SIZE is 'four', expected a number"):
        launched_ranks()
