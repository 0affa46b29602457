"""Failures of the tables of documented workflows show both sides, as those of test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "tests.e2e.documented_calculon",
    "tests.e2e.documented_files",
    "tests.e2e.documented_lab",
    "tests.e2e.documented_paddle",
    "tests.e2e.documented_search",
    "tests.e2e.documented_tensor2d",
    "tests.e2e.documented_training",
)
