"""Bytes per parameter and per activation element that price a plan's rows.

The states of each engine are in `autopar.price.state_layouts`. This module converts them to the
kinds of data parallelism of a plan's layers: DDP, ZeRO-1, ZeRO-2 and ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import field

from autopar.price.state_layouts import StateLayout, layout_of
from autopar.records import Record, replace
from search.request.options import SearchOptions

Kind = Literal["ddp", "zero1", "zero2", "zero3"]
KINDS: tuple[Kind, ...] = ("ddp", "zero1", "zero2", "zero3")


class KindBytes(Record):
    """Bytes per parameter of a layer with one kind of data parallelism."""

    whole: float
    """Bytes per parameter that every rank holds."""
    shared: float
    """Bytes per parameter, divided by the ranks that share states."""
    unit: float = 0.0
    """Bytes per parameter of a layer during its backward, if there are other ranks."""
    ahead: float = 0.0
    """Part of `unit` that may be live at another layer's peak: prefetched units."""
    loss: float | None = None
    """Bytes per parameter of embedding and head during the loss; None: `unit` of the larger one."""
    constant_bytes: float = 0.0
    """Bytes per rank, independent of parameters: buckets."""


class Recipe(Record):
    """Bytes per parameter and per activation element of a training precision."""

    weight: float
    """Bytes of a gathered weight, as communicated."""
    gradient: float
    """Bytes of a gradient, as reduced."""
    optimizer: float
    """Bytes of Adam's moments and of a master weight."""
    element: float
    own_masters: float = 0.0
    """Part of `optimizer` for master weights that replicas and ZeRO-3 do not need: fp32 weights."""
    at_once: dict[Kind, KindBytes] = field(default_factory=dict)
    """Bytes if gradients are sharded as they are reduced: one micro-batch, or a reduction in
    each."""
    at_end: dict[Kind, KindBytes] = field(default_factory=dict)
    """Bytes if gradients are first summed over micro-batches. Kinds that are in neither use the
    FSDP2 formulas of `search.planning.cost.memory`."""

    @staticmethod
    def of(options: SearchOptions) -> Recipe:
        """Return the recipe of the options: `--memory-of`'s engine, else 16-bit weights with fp32.

        fp32 4+4+8; bf16 and fp16 2+2+12 (fp32 gradients 4): Rajbhandari et al., arXiv 1910.02054.
        """
        fp32 = options.mixed_precision == "fp32"
        weight = element = 4.0 if fp32 else 2.0
        gradient = 4.0 if fp32 or options.fp32_gradients else 2.0
        # two moments of 4 bytes; an fp32 weight needs no master copy
        optimizer = 8.0 if fp32 else 12.0
        # FSDP2 shards are fp32: 4 + 4 + 8
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
        """True if the bytes of any kind come from an engine's state layout."""
        return bool(self.at_once)

    @property
    def step_bytes(self) -> float:
        """Memory traffic of the optimizer in bytes per parameter, reads and writes."""
        # three states of 4 bytes are read and written, the gradient is read
        return self.gradient + 24.0

    def kinds(self, *, at_once: bool) -> dict[Kind, KindBytes]:
        """Return the bytes by kind."""
        return self.at_once if at_once else self.at_end


def _kinds(options: SearchOptions, *, at_once: bool) -> Iterable[tuple[Kind, KindBytes]]:
    """Yield the bytes of each kind; at_once : True if gradients are sharded as they are reduced."""
    engine = options.memory_of
    # FSDP2 units that are reduced in fp32 are counted at each point of a step instead
    if engine is None or engine == "torchtitan":
        return
    # Megatron-LM's distributed optimizer keeps gradients unsharded to the end; with a reduction per
    # micro-batch ZeRO-2 is Megatron-FSDP's `optim_grads`
    is_megatron = engine == "megatron"
    stages: dict[Kind, int] = {
        "ddp": 0,
        "zero1": 1,
        "zero2": 1 if is_megatron and not at_once else 2,
        "zero3": 3,
    }
    for kind, stage in stages.items():
        found = layout_of(
            engine,
            stage,
            options.mixed_precision,
            fp32_gradients=options.fp32_gradients,
            each_micro_batch=at_once,
        )
        listed = _of_engine(found)
        if is_megatron and kind == "zero3":
            # Megatron-FSDP gathers embedding, final norm and head as one unit
            listed = replace(listed, loss=4.0 if options.mixed_precision == "fp32" else 2.0)
        yield kind, listed


def _of_engine(recipe: StateLayout) -> KindBytes:
    """Return the bytes of an engine's state layout by their use in a plan's layers.

    Transient tensors of the backward of all parameters of a rank are live at the peak, like states.
    Those of a rank's shard are live only in the step, when activations are freed.
    """
    whole, shared = recipe.whole_and_shared()
    passing = [entry for entry in recipe.passing if "backward" in entry.during]
    unit = ahead = constant = 0.0
    for entry in passing:
        if entry.of == "unit":
            unit += entry.each_bytes * entry.number
            constant += entry.each_bytes * entry.beside
            # gathered units are live during the forward of another layer and the loss
            ahead += entry.each_bytes * entry.number if "forward" in entry.during else 0.0
        elif entry.of == "bucket":
            constant += entry.num_bytes(stage=0.0, unit=0.0, replicas=1)
        elif entry.of == "stage" and entry.elements is None:
            whole += entry.each_bytes
        elif entry.of == "stage":
            # a number of elements, limited by the stage's
            constant += entry.each_bytes * (entry.elements or 0)
    return KindBytes(whole=whole, shared=shared, unit=unit, ahead=ahead, constant_bytes=constant)
