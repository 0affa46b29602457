"""How much memory messages may take where a container has less than its host."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from profiler.processes import Session, container_bytes


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


def test_the_fullest_gpu_decides_what_its_ranks_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks on two GPUs: two of them divide one, and all take what these two may take."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    owners = ["gpu-0", "gpu-1", "gpu-0"]

    def session(rank: int) -> Any:
        return SimpleNamespace(
            rank=rank,
            infos=[SimpleNamespace(device_uuid=uuid) for uuid in owners],
            device=torch.device("cuda", 0),
            gather=np.array,
        )

    # a tenth is left for NCCL; gathered, the least of the ranks counts for all
    assert [Session.free_bytes(session(rank)) for rank in range(3)] == [450.0, 900.0, 450.0]
