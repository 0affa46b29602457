"""Shared fixtures and settings: reproducible property tests, published figures, golden files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from autopar.price.assessment import Target
    from autopar.rates.parts.operations import Machine

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

# A shell that starts pytest in the background ignores Ctrl-C for all that follows; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Threads of torch and numpy wait in busy loops: on cores that processes share they take more time
# than they save. Read when the libraries are imported, here and in processes that tests start.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# One profile for all machines: a failure on one is a failure on all of them.
settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that rewrites golden files instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """Return the folder of other projects' files, next to a developer's checkout.

    It contains only files that may not be in this repository; published figures are in `data_dir`.
    """
    path = ROOT.parent / "shared" / "cases"
    if not path.is_dir():
        pytest.skip("needs other projects' own files (../shared/cases), not on this machine")
    return path


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Return the folder of published figures, which `tests.data.read` reads."""
    return ROOT / "tests" / "data"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def machine() -> Machine:
    """Return H100 with Megatron-Core."""
    from tests.step_cases import machine_named

    return machine_named()


@pytest.fixture(scope="session")
def target() -> Target:
    """Return H100 with Megatron-Core, on no known site."""
    from tests.step_cases import target_named

    return target_named()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return `golden(name, text)`: text must equal the file tests/golden/NAME.

    `make golden` rewrites the files; a missing one is a failure, never a silent pass.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.is_file(), f"tests/golden/{name} does not exist; `make golden` writes it"
        assert path.read_text(encoding="utf-8") == text, f"tests/golden/{name} differs"

    return compare
