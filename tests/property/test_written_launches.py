"""Launches that are written for a trainer and read back: the same launch, and nothing idle."""

from __future__ import annotations

from autopar.memory.launch import Launch
from search.writing.differences import without_effect
from search.writing.place import Place
from search.writing.written import written
from tests.launch_cases import megatron_launches
from tests.often import often


def place_of(launch: Launch) -> Place:
    """Return nodes of four GPUs for a launch, or one."""
    world = launch.degrees.world
    each = 4 if world % 4 == 0 else world
    return Place(num_nodes=world // each, gpus_per_node=each)


@often(40, 600, megatron_launches())
def test_megatron_says_all_of_a_launch(launch: Launch) -> None:
    """The script of a launch, read as `autopar check` reads it, is that launch."""
    found = written(launch, engine="megatron", place=place_of(launch))

    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(launch)
