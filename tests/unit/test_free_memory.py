"""How much memory messages may take where a container has less than its host."""

from __future__ import annotations

import math
from pathlib import Path

from profiler.processes import container_bytes


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    """A limit counts less what is in use; no limit, or no control group, is no bound."""
    assert container_bytes(tmp_path) == math.inf

    (tmp_path / "memory.current").write_text("300\n", encoding="ascii")
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert container_bytes(tmp_path) == math.inf

    (tmp_path / "memory.max").write_text("1000\n", encoding="ascii")
    assert container_bytes(tmp_path) == 700.0

    (tmp_path / "memory.max").write_text("200\n", encoding="ascii")
    assert container_bytes(tmp_path) == 0.0
