"""What several end-to-end tests look at; failures of tables show both sides, as of test modules."""

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


# Their rows assert, and are no test modules.
pytest.register_assert_rewrite(
    "tests.e2e.documented_calculon",
    "tests.e2e.documented_files",
    "tests.e2e.documented_lab",
    "tests.e2e.documented_paddle",
    "tests.e2e.documented_search",
    "tests.e2e.documented_tensor2d",
    "tests.e2e.documented_training",
)
