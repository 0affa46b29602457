"""A file of a launch as it is checked: what it says, and what is wrong with it.

Which trainer a file is for is found here; its arguments are read by `search.launches`.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import DocumentError, InputError
from autopar.memory.launch import Launch
from autopar.records import dataclass
from search.check.findings import Finding, findings_of
from search.configuration import Configuration, read_configuration
from search.launches.arguments import Ignored, UnpricedError, words_of
from search.launches.megatron import arguments_of_configuration, read_launch

__all__ = ["CheckedFile", "read_checked"]

_OF_MEGATRON = frozenset({"num-layers", "hidden-size", "micro-batch-size", "seq-length"})
"""Arguments that every launch of Megatron-LM has most of."""


@dataclass(frozen=True, kw_only=True)
class CheckedFile:
    """What a file says."""

    path: str
    trainer: str
    world_size: int
    launch: Launch | None
    """None: an argument is unusable, which is a finding."""
    findings: tuple[Finding, ...]
    harmless: tuple[Ignored, ...]
    """Arguments that change neither time nor memory."""
    environment: Mapping[str, str]


def read_checked(path: str, *, world_size: int | None, gpu: str) -> CheckedFile:
    """Return what a file of a launch says; raises DocumentError where it is none that is read.

    world_size : number of GPUs, where the file does not say it. gpu : kind of device.
    """
    source = read_configuration(path)
    arguments, environment = arguments_of_configuration(source)
    words = words_of(arguments)
    if len(_OF_MEGATRON & words.keys()) < 2:
        raise DocumentError(
            path,
            "has no arguments of Megatron-LM such as --num-layers and --micro-batch-size",
            remedy="give a launch script, YAML or JSON of Megatron-LM",
        )
    world = _world(source, words, world_size)
    launch: Launch | None = None
    ignored: tuple[Ignored, ...] = ()
    problem: str | None = None
    unpriced: str | None = None
    try:
        read = read_launch(
            arguments, world_size=world, environment=environment, gpu=gpu, source=str(source.path)
        )
        launch, ignored = read.launch, read.ignored
    except UnpricedError as error:
        unpriced = f"{error.key} {error.problem}; {error.remedy}"
    except DocumentError as error:
        problem = f"{error.key}: {error.problem}" if error.key else error.problem
    except InputError as error:
        problem = str(error)
    found = findings_of(
        words, world_size=world, environment=environment, gpu=gpu, ignored=ignored, problem=problem
    )
    if unpriced is not None:
        found = (Finding(kind="not priced", text=unpriced), *found)
    notes = tuple(Finding(kind="read", text=text) for text in source.notes)
    return CheckedFile(
        path=str(source.path),
        trainer="Megatron-LM",
        world_size=world,
        launch=launch,
        findings=(*found, *notes),
        harmless=tuple(entry for entry in ignored if entry.understood),
        environment=environment,
    )


def _world(
    source: Configuration, words: Mapping[str, tuple[str, ...]], world_size: int | None
) -> int:
    own = source.world_size
    if own is None and words.get("world-size", ("",))[0].isdigit():
        own = int(words["world-size"][0])
    if world_size is not None and own is not None and own != world_size:
        raise DocumentError(
            source.path,
            f"the launch starts {own} processes and --hardware has {world_size} GPUs",
            remedy="give the hardware that it is for",
        )
    found = world_size or own
    if found is None:
        raise DocumentError(
            source.path,
            "does not say the number of GPUs",
            remedy="give --hardware, such as h100:8x8",
        )
    return found
