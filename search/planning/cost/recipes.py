"""Bytes of a parameter and of an activation element, as a plan's rows are priced with them.

What each engine keeps, and why, is in `autopar.price.state_layouts`; here its figures become those
of the kinds of data parallelism that a plan's layers have: replicas, ZeRO-1, ZeRO-2 and ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import field

from autopar.price.state_layouts import StateRecipe, recipe_of
from autopar.records import Record, replace
from search.request.options import SearchOptions

Kind = Literal["ddp", "zero1", "zero2", "zero3"]
KINDS: tuple[Kind, ...] = ("ddp", "zero1", "zero2", "zero3")


class KindBytes(Record):
    """Bytes of a parameter of a layer whose data ranks are of one kind."""

    whole: float
    """On every rank."""
    shared: float
    """Over the ranks that share states."""
    unit: float = 0.0
    """Of the parameters of a layer, while its backward runs, where there are other ranks."""
    ahead: float = 0.0
    """A part of `unit` that may lie beside another layer's peak: units that are gathered early."""
    loss: float | None = None
    """Of all parameters of embedding and head, while the loss runs; None: `unit` of the larger."""
    constant_bytes: float = 0.0
    """Of a rank, however many parameters it has: buckets."""


class Recipe(Record):
    """Bytes per parameter and per activation element of a training precision."""

    weight: float
    """Of a gathered weight, as it is exchanged."""
    gradient: float
    """Of a gradient, as it is reduced."""
    optimizer: float
    """Of Adam's moments, and of a master copy."""
    element: float
    own_masters: float = 0.0
    """Of the optimizer's bytes, those of weights which replicas and ZeRO-3 keep in fp32 alone."""
    at_once: dict[Kind, KindBytes] = field(default_factory=dict)
    """Where gradients are divided as they are reduced: one micro-batch, or one reduction each."""
    at_end: dict[Kind, KindBytes] = field(default_factory=dict)
    """Where they are summed over micro-batches before. A kind that is in neither has the bytes and
    moments of FSDP2, which `search.planning.cost.memory` has."""

    @staticmethod
    def of(options: SearchOptions) -> Recipe:
        """Return the recipe of the options: of `--memory-of`'s engine, else 16 bits beside fp32.

        fp32 4+4+8; bf16 and fp16 2+2+12 (fp32 gradients 4): Rajbhandari et al., arXiv 1910.02054.
        """
        fp32 = options.mixed_precision == "fp32"
        weight = element = 4.0 if fp32 else 2.0
        gradient = 4.0 if fp32 or options.fp32_gradients else 2.0
        # two moments of 4 bytes; an fp32 weight is its own master copy
        optimizer = 8.0 if fp32 else 12.0
        # its shards are fp32: 4 + 4 + 8
        is_fsdp2 = options.memory_of == "torchtitan" and not fp32
        return Recipe(
            weight=weight,
            gradient=gradient,
            optimizer=optimizer,
            element=element,
            own_masters=2.0 if is_fsdp2 else 0.0,
            at_once=dict(_kinds(options, at_once=True)),
            at_end=dict(_kinds(options, at_once=False)),
        )

    @property
    def lists(self) -> bool:
        """Whether the bytes of any kind are those of an engine's list."""
        return bool(self.at_once)

    @property
    def step_bytes(self) -> float:
        """Memory traffic of the optimizer per parameter: gradient and states read and written."""
        # three states of 4 bytes are read and written, the gradient is read
        return self.gradient + 24.0

    def kinds(self, *, at_once: bool) -> dict[Kind, KindBytes]:
        """Return the bytes by kind."""
        return self.at_once if at_once else self.at_end


def _kinds(options: SearchOptions, *, at_once: bool) -> Iterable[tuple[Kind, KindBytes]]:
    """Yield what layers of each kind have; at_once : gradients are divided as they are reduced."""
    engine = options.memory_of
    # units of FSDP2 that are reduced in fp32 are counted moment by moment
    if engine is None or engine == "torchtitan":
        return
    # Megatron-LM's distributed optimizer keeps gradients whole to the end; where they are reduced
    # at once ZeRO-2 is Megatron-FSDP's `optim_grads`
    is_megatron = engine == "megatron"
    stages: dict[Kind, int] = {
        "ddp": 0,
        "zero1": 1,
        "zero2": 1 if is_megatron and not at_once else 2,
        "zero3": 3,
    }
    for kind, stage in stages.items():
        found = recipe_of(
            engine,
            stage,
            options.mixed_precision,
            fp32_gradients=options.fp32_gradients,
            each_micro_batch=at_once,
        )
        listed = _of_engine(found)
        if is_megatron and kind == "zero3":
            # Megatron-FSDP gathers embedding, final norm and head as one
            listed = replace(listed, loss=4.0 if options.mixed_precision == "fp32" else 2.0)
        yield kind, listed


def _of_engine(recipe: StateRecipe) -> KindBytes:
    """Return the bytes by what a plan's layers have them for.

    What passes while a backward runs: of all parameters of a rank it is there at the peak as states
    are; of a rank's part it is not there before the step, when activations are gone.
    """
    whole, shared = recipe.whole_and_shared()
    passing = [entry for entry in recipe.passing if "backward" in entry.during]
    unit = ahead = constant = 0.0
    for entry in passing:
        if entry.of == "unit":
            unit += entry.each_bytes * entry.number
            constant += entry.each_bytes * entry.beside
            # the forward of another layer, and the loss, have the gathered units beside them
            ahead += entry.each_bytes * entry.number if "forward" in entry.during else 0.0
        elif entry.of == "bucket":
            constant += entry.num_bytes(stage=0.0, unit=0.0, replicas=1)
        elif entry.of == "stage" and entry.elements is None:
            whole += entry.each_bytes
        elif entry.of == "stage":
            # as many as there are, up to a number
            constant += entry.each_bytes * (entry.elements or 0)
    return KindBytes(whole=whole, shared=shared, unit=unit, ahead=ahead, constant_bytes=constant)
