"""What several end-to-end tests look at: one measurement of two ranks in a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launching import STARTS, TWO_RANKS, Finished, Start, measured


@pytest.fixture(scope="session", params=STARTS)
def start(request: pytest.FixtureRequest) -> Start:
    """Return what starts the ranks: torchrun does, where there is time for it."""
    pytest.importorskip("torch", reason="torch is not installed")
    found: Start = request.param
    return found


@pytest.fixture(scope="session")
def two(start: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Return the folder that two ranks measured everything into, and how they ended.

    Nobody writes there.
    """
    out = tmp_path_factory.mktemp("two") / "hardware"
    return out, measured(2, out, *TWO_RANKS, start=start)
