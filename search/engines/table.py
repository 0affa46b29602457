"""The table of engines: which there are, what is read and written of each, and whose a file is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from autopar.errors import DocumentError
from search.engines.engine import Engine, function_of, value_of

if TYPE_CHECKING:
    from search.engines.reader import CheckedFile
    from search.engines.space import EngineSpace
    from search.engines.text import Configuration

ALIKE = 0.005
"""Share by which steps of one plan differ between the planner's price and that of a launch, in the
median: docs/analytic.md. A plan whose layers may differ has to be faster by more."""


def _uniform(name: str, title: str, folder: str, forms: str, **more: Any) -> Engine:
    """Return an engine with one set of degrees, whose folder has all functions."""
    return Engine(
        name=name,
        title=title,
        forms=forms,
        owns=function_of(f"{folder}.check.owns"),
        read=function_of(f"{folder}.check.read"),
        write=function_of(f"{folder}.write.write"),
        spaces=value_of(f"{folder}.space.VARIANTS"),
        near=function_of(f"{folder}.plan.near"),
        handed=function_of(f"{folder}.plan.handed"),
        plans=value_of(f"{folder}.plan.SPACE"),
        **more,
    )


def _layered(name: str, title: str) -> Engine:
    """Return an engine whose layers may differ."""
    return Engine(
        name=name,
        title=title,
        lower=function_of(f"{name}.plan.lower"),
        plans=value_of(f"{name}.plan.SPACE"),
        imports=function_of(f"{name}.plan.import_{name}"),
    )


ENGINES: tuple[Engine, ...] = (
    _layered("galvatron", "Galvatron"),
    _uniform(
        "megatron",
        "Megatron-LM",
        "megatron",
        "script, YAML or JSON",
        imports=function_of("megatron.arguments.import_megatron"),
    ),
    Engine(
        name="megatron-bridge",
        title="Megatron-Bridge",
        forms="script of its launchers, overrides or YAML",
        owns=function_of("bridge.read.is_bridge"),
        read=function_of("bridge.check.read"),
        card=function_of("bridge.check.card"),
        write=function_of("bridge.write.write"),
        starts=("megatron",),
    ),
    _uniform("torchtitan", "torchtitan", "torchtitan", "TOML", titled_by_release=True),
    _uniform("deepspeed", "DeepSpeed", "deepspeed", "JSON or script"),
    _uniform("accelerate", "accelerate", "huggingface", "YAML or script", starts=("deepspeed",)),
    _layered("paddlenlp", "PaddleNLP"),
)
"""In the order in which equally fast plans are ranked."""
EXPORTERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.exports)
"""Engines that plans are written for."""
IMPORTERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.imports is not None)
"""Engines whose configurations are read as plans."""
WRITERS: tuple[str, ...] = tuple(one.name for one in ENGINES if one.write is not None)
"""Engines that launches are written for, and read of."""


def engine_named(name: str) -> Engine:
    """Return an engine by its name."""
    return next(one for one in ENGINES if one.name == name)


# --------------------------------------------------------------------------------------------------
# What engines with one set of degrees can be told.


@cache
def _variants() -> tuple[EngineSpace, ...]:
    return tuple(space for one in ENGINES if one.spaces is not None for space in one.spaces())


def spaces() -> tuple[EngineSpace, ...]:
    """Return the spaces of engines with one set of degrees, with layers as they are written."""
    return tuple(one for one in _variants() if not one.compiled)


def variants(space: EngineSpace) -> tuple[EngineSpace, ...]:
    """Return the spaces of an engine: with its layers as they are written, and compiled."""
    return tuple(one for one in _variants() if one.name == space.name)


def engine_space(name: str, *, compiled: bool = False) -> EngineSpace:
    """Return the space of an engine by its name."""
    return next(one for one in _variants() if one.name == name and one.compiled == compiled)


# --------------------------------------------------------------------------------------------------
# Whose a file is.


def _readers() -> list[Engine]:
    # those with keys of their own come first: scripts of others have flags of Megatron-LM as well
    return [one for one in reversed(ENGINES) if one.owns is not None]


def engine_of(source: Configuration) -> Engine:
    """Return the engine of a file; raises DocumentError, which names all, where it has none."""
    readers = _readers()
    found = next((one for one in readers if one.owns is not None and one.owns(source)), None)
    if found is None:
        known = [f"{one.title} ({one.forms})" for one in readers]
        raise DocumentError(source.path, f"is no launch of {_listed(known)}")
    return found


def named_card(path: str) -> str | None:
    """Return the card that a file itself is for, where it names one; raises as `read_checked`."""
    from search.engines.text import read_configuration

    source = read_configuration(path)
    engine = engine_of(source)
    return None if engine.card is None else engine.card(source)


def read_checked(
    path: str,
    *,
    world_size: int | None,
    gpu: str,
    model: str | None = None,
    seq_length: int | None = None,
) -> CheckedFile:
    """Return what a file of a launch describes; raises DocumentError where it is none.

    world_size : number of GPUs, where the file does not name it. gpu : kind of device. model,
    seq_length : where they are the script's.
    """
    from search.engines.megatron.names import harmless
    from search.engines.reader import Asked
    from search.engines.text import read_configuration

    # names of Megatron-LM that others have as well mean the same there
    source = read_configuration(path, world_size=world_size, harmless=harmless)
    asked = Asked(world_size=world_size, gpu=gpu, model=model, seq_length=seq_length)
    engine = engine_of(source)
    assert engine.read is not None, "an engine that owns a file reads it"
    found: CheckedFile = engine.read(source, asked)
    return found


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
