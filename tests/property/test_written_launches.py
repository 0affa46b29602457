"""Launches that are written for a trainer and read back: the same launch, and nothing idle."""

from __future__ import annotations

from autopar.memory.launch import Launch
from search.writing.differences import without_effect
from search.writing.place import Engine, Place
from search.writing.written import checked, written
from tests.launch_cases import megatron_launches, titan_launches, torch_launches
from tests.often import often

NOT_IN_BRIDGE = tuple(
    f"Megatron-Bridge cannot say {what}: "
    for what in (
        # its own rows of positions are those of a sequence
        "model.max positions",
        # of recipes that have no section of overlaps
        "tensor overlap",
        "deferred head",
        # arguments of Megatron-LM without a key
        "software.compiled experts",
        "the product with the router's probabilities in one kernel",
    )
)


def place_of(launch: Launch) -> Place:
    """Return nodes of four GPUs for a launch, or one."""
    world = launch.degrees.world
    each = 4 if world % 4 == 0 else world
    return Place(num_nodes=world // each, gpus_per_node=each)


def read_back(launch: Launch, engine: Engine) -> None:
    """Check that what is written is the launch again, and that nothing of it is idle or unknown."""
    found = written(launch, engine=engine, place=place_of(launch))

    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(launch)
    said = [
        one
        for one in checked(found, launch).findings
        # what ranks that share nothing compute in is said whether or not a file asks for it
        if one.kind not in ("read", "environment") and "mixed_precision_param" not in one.text
    ]
    assert said == []


@often(40, 600, megatron_launches())
def test_megatron_says_all_of_a_launch(launch: Launch) -> None:
    """The script of a launch, read as `autopar check` reads it, is that launch."""
    read_back(launch, "megatron")


@often(40, 400, titan_launches())
def test_torchtitan_says_all_of_a_launch(launch: Launch) -> None:
    """The job file of a launch is that launch again."""
    read_back(launch, "torchtitan")


@often(30, 400, torch_launches(keeper="deepspeed"))
def test_deepspeed_says_all_of_a_launch(launch: Launch) -> None:
    """The configuration of a launch, with its script and its model, is that launch again."""
    read_back(launch, "deepspeed")


@often(40, 400, torch_launches(keeper="accelerate") | torch_launches(keeper="deepspeed"))
def test_accelerate_says_all_of_a_launch(launch: Launch) -> None:
    """The same of accelerate, whose plug-in is handed what DeepSpeed keeps."""
    read_back(launch, "accelerate")


@often(40, 600, megatron_launches())
def test_bridge_says_all_of_a_launch_that_it_can(launch: Launch) -> None:
    """Overrides of a recipe are the launch again, but for what no key of theirs says."""
    found = written(launch, engine="megatron-bridge", place=place_of(launch))

    assert [loss for loss in found.losses if not loss.startswith(NOT_IN_BRIDGE)] == []
