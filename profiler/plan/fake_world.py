"""A job of any number of ranks of which one exists: process groups that send nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch.distributed as dist

from autopar.errors import InputError

__all__ = ["fake_world"]


@contextlib.contextmanager
def fake_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job, for as long as the context lasts.

    Every collective returns at once, its result as large as in a real job and of no meaning.
    Raises InputError in a process that is part of a real job.
    """
    # torch has it for tests only, and no other backend that needs no second rank
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise InputError(
            "a dry run makes process groups of its own, and this process has some; run it in one "
            "process, without torchrun"
        )
    # advice on slow collectives is of no use where nothing is sent
    adviser = logging.getLogger("torch.distributed.tensor")
    level = adviser.level
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        adviser.setLevel(logging.ERROR)
        yield
    finally:
        adviser.setLevel(level)
        dist.destroy_process_group()
