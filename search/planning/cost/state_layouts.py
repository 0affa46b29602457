"""Bytes per parameter and per activation element for the memory of per-layer plans.

The model states of each engine are in `autopar.price.state_layouts`. This module converts them to
the data-parallel types of layers: DDP, ZeRO-1, ZeRO-2 and ZeRO-3.
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
    """Bytes per parameter of a layer with one data-parallel type."""

    whole: float
    """Unsharded bytes per parameter."""
    shared: float
    """Sharded bytes per parameter, before division by the number of data-parallel ranks."""
    unit: float = 0.0
    """Transient bytes per parameter of the backward, with several data-parallel ranks."""
    ahead: float = 0.0
    """Part of `unit` for prefetched weights, which may be live at the peak of another layer."""
    loss: float | None = None
    """Bytes per parameter of embedding and head during the loss; None: `unit` of the larger one."""
    constant_bytes: float = 0.0
    """Bytes per rank, independent of parameters: buckets."""


class Recipe(Record):
    """Bytes per parameter and per activation element of a training precision."""

    weight: float
    """Bytes of a weight in compute and all-gather."""
    gradient: float
    """Bytes of a gradient in its reduction."""
    optimizer: float
    """Bytes of Adam's moments and master weight, per parameter."""
    element: float
    """Bytes of an activation element."""
    own_masters: float = 0.0
    """Part of `optimizer` that DDP and ZeRO-3 do not need, because FSDP2 has fp32 weights."""
    at_once: dict[Kind, KindBytes] = field(default_factory=dict)
    """State layout if gradients are reduced in every micro-batch, or if there is only one."""
    at_end: dict[Kind, KindBytes] = field(default_factory=dict)
    """State layout if gradients are reduced once, after several micro-batches. Types without a
    layout use the FSDP2 formulas of `search.planning.cost.memory`."""

    @staticmethod
    def of(options: SearchOptions) -> Recipe:
        """Return the bytes of a parameter for the precision and the `--memory-of` of the options.

        Weight + gradient + optimizer: 4+4+8 in fp32, 2+2+12 in bf16 and fp16, 2+4+12 with fp32
        gradients (Rajbhandari et al., arXiv 1910.02054).
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
        """True if some data-parallel type uses the state layout of an engine."""
        return bool(self.at_once)

    @property
    def step_bytes(self) -> float:
        """Memory traffic of the optimizer in bytes per parameter, reads and writes."""
        # three states of 4 bytes are read and written, the gradient is read
        return self.gradient + 24.0

    def kinds(self, *, at_once: bool) -> dict[Kind, KindBytes]:
        """Return the state layouts; at_once : True for a reduction in every micro-batch."""
        return self.at_once if at_once else self.at_end


def _kinds(options: SearchOptions, *, at_once: bool) -> Iterable[tuple[Kind, KindBytes]]:
    """Yield (data-parallel type, state layout) of the engine of `--memory-of`; none for FSDP2.

    at_once : True for a reduction in every micro-batch.
    """
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
    """Return the bytes of an engine's state layout, classified for the layers of a plan.

    Transient tensors for all parameters of a stage in the backward count like states, since they
    are live at the peak. Those of the optimizer step do not count: activations are freed by then.
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
