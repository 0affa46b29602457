"""The table of engines with one set of degrees: which there are, in which order they are ranked."""

from __future__ import annotations

from search.engines.deepspeed.space import SPACE as DEEPSPEED
from search.engines.huggingface.space import SPACE as ACCELERATE
from search.engines.megatron.space import SPACE as MEGATRON
from search.engines.space import EngineSpace
from search.engines.torchtitan.space import COMPILED, SPACE as TORCHTITAN

ENGINES: tuple[EngineSpace, ...] = (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)
"""Engines with one set of degrees, in the order in which equally fast plans are ranked."""
_VARIANTS = (*ENGINES, COMPILED)


def variants(engine: EngineSpace) -> tuple[EngineSpace, ...]:
    """Return the spaces of an engine: with its layers as they are written, and compiled."""
    return tuple(one for one in _VARIANTS if one.name == engine.name)


def engine_space(name: str, *, compiled: bool = False) -> EngineSpace:
    """Return the space of an engine by its name."""
    return next(one for one in _VARIANTS if one.name == name and one.compiled == compiled)
