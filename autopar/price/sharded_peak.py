"""Peak memory of a rank for engines with torch layers: FSDP2, DeepSpeed and DDP.

Bytes per parameter of model states are in `autopar.price.state_layouts`, saved activations in
`autopar.price.torch_layers`. This module counts the live tensors at each point of a step: gathered
units, gradients before and after their reduction, and buckets. The peak is the largest of these
points. Megatron-LM is in `autopar.price.account`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from autopar.price import torch_layers
from autopar.price.activations import stream_bytes
from autopar.price.parameters import layer_weights
from autopar.price.peak import Moment, moments
from autopar.price.state_layouts import UPDATE, Phase
from autopar.price.states import (
    FsdpUnit,
    is_joined,
    layout_of_run,
    shards_of,
    units_of,
    update_factor,
)
from autopar.records import Record
from autopar.run.run import Run
from autopar.run.runtime import HOPPER
from autopar.run.strategy import Chunk
from autopar.units import MIB

_CUBLAS = 32 * MIB
_MOMENTS = "Adam moments"
_THREADS = 2
"""Number of cuBLAS handles: one of the forward thread, one of the backward thread."""


class MemoryItem(NamedTuple):
    """One item of live memory."""

    name: str
    num_bytes: int
    switch: str
    """Options that control the size of the item."""


class LivePoint(Record):
    """Live tensors at one point of a step."""

    name: str
    parts: tuple[MemoryItem, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(part.num_bytes for part in self.parts)


# --------------------------------------------------------------------------------------------------
# States.


def _switches(run: Run) -> dict[str, str]:
    """Return the engine's options that control "states" and "activations"."""
    names = {
        "torchtitan": ("dp_shard, tp, pp", "local_batch_size, seq_len, activation_checkpoint"),
        "accelerate": ("num_processes, fsdp_version", "batch size, gradient checkpointing"),
        "deepspeed": ("zero_optimization.stage", "micro-batch, gradient checkpointing"),
    }
    states, activations = names.get(run.runtime.states.keeper, ("ranks", "micro-batch"))
    return {"states": states, "activations": activations}


def _kept(
    run: Run, units: Sequence[FsdpUnit], *, gradients: bool, step: bool = False
) -> Iterator[MemoryItem]:
    """Yield the persistent memory of a rank: model states and cuBLAS workspaces.

    gradients : True to include gradients that the optimizer step frees.
    step : True for the optimizer step, which may keep only the rank's shard of gradients.
    """
    whole, own = _elements(units), sum(n * unit.own for unit, n in _runs(units))
    switch, optimizer = _switches(run)["states"], run.runtime.optimizer
    on_device = 0.0 if optimizer.paged else 1.0 - optimizer.offload
    for name, kept in layout_of_run(run).kept:
        if name == "gradients" and not (kept.always or gradients):
            continue
        if kept.to_host and (step or kept.sharded):
            continue
        size = own if kept.sharded or (step and kept.stepped_sharded) else whole
        num_bytes = kept.each_bytes * size
        if name == _MOMENTS:
            num_bytes = on_device * sum(n * unit.moments_bytes for unit, n in _runs(units))
        if name == "weights" and not run.runtime.optimizer.offload_weights:
            num_bytes += sum(
                unit.own_frozen_bytes if kept.sharded else unit.frozen_bytes for unit in units
            )
        yield MemoryItem(name, math.ceil(num_bytes), switch)
    if layout_of_run(run).gradients.to_host:
        # `temp_grad_buffer_for_gpu_offload` of DeepSpeed
        buffer = run.element_bytes * max((unit.largest_matrix for unit in units), default=0)
        yield MemoryItem("offload buffer", buffer, switch)
    # a parameter is kept if the sum stays below the limit (`mark_persistent_parameters`), which
    # is at most one small parameter below it
    limit = run.runtime.states.buckets.model_persistent
    most = math.inf if limit is None else limit * run.element_bytes
    persistent = math.ceil(min(most, sum(n * unit.persistent_bytes for unit, n in _runs(units))))
    yield MemoryItem("weights kept whole", persistent, "stage3_param_persistence_threshold")
    yield MemoryItem("cuBLAS workspaces", _THREADS * _cublas(run), "CUBLAS_WORKSPACE_CONFIG, GPU")


def _cublas(run: Run) -> int:
    # PyTorch's defaults of CUBLAS_WORKSPACE_CONFIG
    return _CUBLAS if run.gpu.upper().startswith(HOPPER) else 8 * MIB + MIB // 8


# --------------------------------------------------------------------------------------------------
# Gathered weights, and gradients in reduction.


def _reduced(run: Run) -> float:
    """Return the bytes per element of the reduce-scatter's input, 0 if nothing is sharded."""
    return sum(
        entry.each_bytes
        for entry in layout_of_run(run).passing
        if entry.what == "input of the reduction"
    )


def _waiting(run: Run) -> float:
    """Return the bytes per element of gradients kept unsharded until the last micro-batch.

    It is 0 if gradients are reduced after every micro-batch.
    """
    return sum(
        entry.each_bytes for entry in layout_of_run(run).passing if entry.what == "whole gradients"
    )


def _gathered(run: Run, units: Sequence[FsdpUnit]) -> float:
    """Return the bytes of gathered units, their frozen weights included if these are sharded."""
    frozen = layout_of_run(run).weights.sharded
    each, eighths = run.element_bytes, run.runtime.states.gathered_fp8
    found = 0.0
    for unit, number in _runs(units):
        # weights of GEMMs may be gathered in 8 bits
        size = unit.elements * (1.0 if eighths and unit.name == "layer" else each)
        found += number * (size + (unit.frozen_bytes if frozen else 0))
    return found


def _runs(units: Sequence[FsdpUnit]) -> Iterator[tuple[FsdpUnit, int]]:
    """Yield each unit once, with the number of references to it."""
    places = [*map(id, units)]
    known = dict(zip(places, units, strict=True))
    for place, number in Counter(places).items():
        yield known[place], number


def _elements(units: Sequence[FsdpUnit]) -> int:
    """Return the number of trained elements of units."""
    return sum(number * unit.elements for unit, number in _runs(units))


def _casts(run: Run) -> bool:
    """Return True if gathered units are separate tensors from the stored weights."""
    return run.element_bytes < 4 or run.split.zero > 0


def _is_fsdp2(run: Run) -> bool:
    keeper = run.runtime.states.keeper
    return keeper == "torchtitan" or (keeper == "accelerate" and run.split.zero > 0)


def unsharded_bytes(run: Run) -> tuple[float, bool]:
    """Return what FSDP2 keeps unsharded from the forward to the loss.

    They are bytes per trained element of gathered weights and of gradients, and True if frozen
    weights are gathered, too.
    """
    if not _is_fsdp2(run):
        return 0.0, False
    held = _holds(run) and _casts(run)
    each = 1.0 if run.runtime.states.gathered_fp8 else float(run.element_bytes)
    return _waiting(run) + held * each, held and layout_of_run(run).weights.sharded


def _table_passing(run: Run, units: Sequence[FsdpUnit], phase: Phase) -> Iterator[MemoryItem]:
    """Yield the transient memory in a phase of engines other than FSDP2, from their layout."""
    switch = _switches(run)["states"]
    alone = run.strategy.dp * run.split.cp == 1
    each = [*_runs(units)]
    for entry in layout_of_run(run).passing:
        sizes = [(unit.elements, number) for unit, number in each]
        if entry.what in ("gathered weights", "output of the gather"):
            # frozen weights are also gathered, in fewer bytes if quantised
            sizes = [(math.ceil(_gathered(run, [u]) / entry.each_bytes), n) for u, n in each]
        # a single rank reduces nothing
        if phase in entry.during and not (alone and "reduction" in entry.what):
            stage = sum(size * number for size, number in sizes)
            size = entry.num_bytes(stage=stage, unit=max(sizes)[0], replicas=shards_of(run))
            own = "--optim, optimizer" if entry.what == UPDATE else switch
            yield MemoryItem(entry.what, math.ceil(size), own)


def _other_streams(run: Run, units: Sequence[FsdpUnit], there: Sequence[MemoryItem]) -> int:
    """Return the reserved bytes of FSDP2's other CUDA streams that are not live at the peak.

    PyTorch's allocator has separate blocks per stream. All-gather outputs of two units are on one
    stream and sharded gradients on another, and the compute stream cannot use their free blocks.

    there : items at the peak, which are not counted again.
    """
    if not run.split.zero:
        return 0
    names = {part.name: part.num_bytes for part in there}
    of = {id(unit): _gathered(run, [unit]) for unit, _ in _runs(units)}
    sizes = [of[id(unit)] for unit in units]
    pairs = [sum(sizes[at : at + 2]) for at in range(len(sizes))]
    gathers = max(pairs, default=0) - names.get("weights fetched ahead", 0)
    if run.runtime.states.flat:
        # FSDP1 gathers in place, two units ahead at most, and frees one when the compute stream is
        # through with it (`limit_all_gathers`, `record_stream` of fsdp/_runtime_utils.py)
        layers = (of[id(unit)] for unit in units if unit.name == "layer")
        gathers = max(layers, default=0)
    each = layout_of_run(run).gradients.each_bytes
    gradients = each * sum(unit.own for unit in units) - names.get("gradients", 0)
    return math.ceil(max(gathers, 0.0) + max(gradients, 0.0))


# --------------------------------------------------------------------------------------------------
# Points of a step.


def _exchanged(run: Run) -> int:
    """Return the bytes of a stage's send and receive buffers: one per micro-batch and direction.

    `torch.distributed.pipelining` allocates all of them before the first step.
    """
    if run.strategy.pp == 1:
        return 0
    return 2 * run.strategy.micro_batches * stream_bytes(run)


def _beside_layers(run: Run, chunk: Chunk) -> int:
    """Return the bytes that a micro-batch saves in a chunk beside those of its layers."""
    if chunk.head:
        return torch_layers.final_bytes(run)
    # the output is kept until its gradient arrives
    return stream_bytes(run) if run.strategy.pp > 1 else 0


def live_points(run: Run, stage: int) -> Iterator[LivePoint]:
    """Yield the points of a stage's step at which memory may peak.

    In the forward these are the last layer and the loss, where all activations are live. In the
    backward, gradients grow and activations shrink from unit to unit, so these are the backward
    and the gradient reduction of units. The last point is the optimizer step.
    """
    room = _LiveTensors(run, stage)
    seen = set[tuple[str, int, tuple[int, ...]]]()
    for moment in moments(run, stage):
        event = moment.event
        if event.kind == "weights":
            # no more is live than in the preceding input gradient
            continue
        if (key := (event.kind, event.chunk, moment.live)) in seen:
            continue
        seen.add(key)
        yield from room.at(moment)
    stepped = _kept(run, room.units, gradients=True, step=True)
    yield _at_step(run, room.units, [*stepped, room.inputs])


class _LiveTensors:
    """Live tensors at the events of a stage's step."""

    def __init__(self, run: Run, stage: int) -> None:
        """Compute the items that are live at every event."""
        self._run = run
        self._chunks = chunks = run.strategy.stages[stage]
        self._own = [units_of(run, chunk) for chunk in chunks]
        self._turns = [*map(_turning, self._own)]
        self.units = [unit for own in self._own for unit in own]
        self._words = words = _switches(run)["activations"]
        self.inputs = MemoryItem("pipeline inputs", _exchanged(run), words)
        # earlier micro-batches have accumulated gradients
        there = [*_kept(run, self.units, gradients=run.strategy.micro_batches > 1), self.inputs]
        last = chunks[-1]
        if run.strategy.pp > 1 and last.head and run.kernels.quirks.stage_outputs:
            logits = torch_layers.logits(run) * run.element_bytes
            size = run.strategy.micro_batches * logits
            there.append(MemoryItem("outputs of all micro-batches", size, words))
        self._there = there
        self._of_layers = [torch_layers.chunk_saved_bytes(run, chunk) for chunk in chunks]
        beside = [_beside_layers(run, chunk) for chunk in chunks]
        self._saved = [one + more for one, more in zip(self._of_layers, beside, strict=True)]

    def at(self, moment: Moment) -> Iterator[LivePoint]:
        """Yield the possible peaks within one event."""
        run, place = self._run, moment.event.chunk
        chunk = self._chunks[place]
        saved = sum(n * each for n, each in zip(moment.live, self._saved, strict=True))
        if moment.event.kind == "forward":
            kept = MemoryItem("saved activations", saved, self._words)
            own = self._own[place]
            yield from _in_forward(run, chunk, own, self.units, [*self._there, kept])
        else:
            yield from self._in_backward(place, saved)

    def _in_backward(self, place: int, saved: int) -> Iterator[LivePoint]:
        """Yield the possible peaks in a chunk's backward.

        place : index of the chunk in its stage.
        saved : bytes of saved activations of all live micro-batches.
        """
        run, chunk, own = self._run, self._chunks[place], self._own[place]
        units, there, words = self.units, self._there, self._words
        layers = [at for at, unit in enumerate(own) if unit.name == "layer"]
        each = self._of_layers[place] / max(len(layers), 1)
        width = run.tokens * run.model.hidden * run.element_bytes
        for at in reversed(self._turns[place]):
            unit, left = own[at], sum(place <= at for place in layers)
            # layers whose backward has finished and the last norm have freed their activations
            kept = saved - int((len(layers) - left) * each)
            if chunk.head:
                kept -= torch_layers.final_bytes(run)
                # working memory of the last norm's backward
                kept += 2 * width if unit.name == "head" else 0
            states = [*there, *_made(run, own, at, there)]
            if unit.name == "layer":
                assert unit.layer is not None, "a unit of a layer has it"
                again = torch_layers.recompute_bytes(unit.layer)
                inside = torch_layers.backward_gradients_bytes(unit.layer)
                yield LivePoint(
                    name="backward of a layer",
                    parts=(
                        *states,
                        MemoryItem("saved activations", kept, words),
                        MemoryItem("layer computed again", again, words),
                        MemoryItem("a matrix in 16 bits", _dequantized_bytes(run, unit), words),
                        MemoryItem("gradients inside of a layer", inside, words),
                        *_beside(run, own, at, units, reducing=False),
                    ),
                )
                kept -= int(each)
            yield LivePoint(
                name="reduction of a unit",
                parts=(
                    *states,
                    MemoryItem("saved activations", max(kept, 0), words),
                    MemoryItem("gradients inside of a layer", 2 * width, words),
                    *_beside(run, own, at, units, reducing=True),
                ),
            )
            if run.strategy.pp > 1 and unit.name == "layer":
                # the other layers need no more memory
                return
        if any(unit.in_root for unit in own):
            yield self._at_root(own)

    def _at_root(self, own: Sequence[FsdpUnit]) -> LivePoint:
        """Return the reduction of a root that contains weights of layers, after the backward."""
        run, states, root = self._run, _switches(self._run)["states"], own[-1]
        reduced = max(_reduced(run), _waiting(run)) * root.elements
        return LivePoint(
            name="reduction of the root",
            parts=(
                *self._there,
                *_made(run, own, -1, self._there),
                MemoryItem("gathered weights", math.ceil(_gathered(run, [root])), states),
                MemoryItem("unreduced gradients", root.elements * run.element_bytes, states),
                MemoryItem("input of the reduction", math.ceil(reduced), states),
            ),
        )


def _in_forward(
    run: Run,
    chunk: Chunk,
    own: Sequence[FsdpUnit],
    units: Sequence[FsdpUnit],
    there: list[MemoryItem],
) -> Iterator[LivePoint]:
    """Yield the possible peaks in a chunk's forward: its last layer, and head and loss.

    own, units : units of the chunk, and of the stage.
    there : items that are live during the whole forward.
    """
    names = _switches(run)
    states = names["states"]
    if not _is_fsdp2(run):
        passing = list(_table_passing(run, units, "forward"))
        if chunk.head:
            loss = MemoryItem("head and loss", torch_layers.loss_bytes(run), "vocabulary, loss")
            yield LivePoint(name="loss", parts=(*there, loss, *passing))
        return
    waits = MemoryItem(
        "gradients of earlier micro-batches",
        math.ceil(_waiting(run) * _elements(units)),
        states,
    )
    layers = [unit for unit in own if unit.name == "layer"]
    if layers:
        # the output of the last norm is not computed yet
        normed = run.tokens * run.model.hidden * run.element_bytes
        ahead = MemoryItem("saved activations", -normed if chunk.head else 0, names["activations"])
        # the output of the gather is kept until the next unit's is copied
        output = _gathered(run, layers[-1:])
        before = [unit for unit in units if unit.name != "head"] if _holds(run) else layers[-1:]
        # a root with weights of layers is gathered first
        before = [*before, *(own[-1:] if any(unit.in_root for unit in own) else ())]
        yield LivePoint(
            name="forward of a layer",
            parts=(
                *there,
                ahead,
                waits,
                MemoryItem("gathered weights", math.ceil(_gathered(run, before)), states),
                MemoryItem(
                    "output of the gather",
                    math.ceil(output if run.split.zero and not run.runtime.states.flat else 0),
                    states,
                ),
            ),
        )
    if chunk.head:
        held = units if _holds(run) else own[-1:]
        if not _holds(run) and run.runtime.states.one_root and layers:
            # the last layer stays gathered because the backward starts with it
            held = [*layers[-1:], *[unit for unit in own if unit.name != "layer"]]
        size = _gathered(run, held) if _casts(run) else 0.0
        yield LivePoint(
            name="loss",
            parts=(
                *there,
                waits,
                MemoryItem("head and loss", torch_layers.loss_bytes(run), "vocabulary, loss"),
                MemoryItem("gathered weights", math.ceil(size), states),
            ),
        )


def _holds(run: Run) -> bool:
    """Return True if units stay gathered from their forward to their backward."""
    return run.split.zero in (1, 2)


def _turning(own: Sequence[FsdpUnit]) -> list[int]:
    """Return the indices of units whose backward may be the peak.

    These are the ends of each group of equal units, and the first and the last period of each
    periodic group. Every period frees and allocates equally much, so memory changes monotonically.
    """
    around = [
        (own[at - 1] if at else None, own[at], own[at + 1] if at + 1 < len(own) else None)
        for at in range(len(own))
    ]

    def inside(at: int) -> bool:
        most = min(_LONGEST_PERIOD, at, len(own) - 1 - at)
        return any(
            around[at - period] == around[at] == around[at + period]
            and own[at - period + 1 : at + 1] == own[at + 1 : at + period + 1]
            for period in range(1, most + 1)
        )

    return [at for at in range(len(own)) if not inside(at)]


_LONGEST_PERIOD = 8
"""Largest number of units in the pattern of a periodic model that is recognised."""


def _dequantized_bytes(run: Run, unit: FsdpUnit) -> int:
    """Return the bytes of a layer's largest dequantised matrix, 0 if the base is in 16 bits.

    bitsandbytes dequantises the whole matrix before each GEMM.
    """
    adapters = run.runtime.adapters
    if adapters is None or adapters.base == "16 bits" or unit.layer is None:
        return 0
    largest = max(weight.size for weight in layer_weights(unit.layer) if weight.quantized)
    return largest * run.element_bytes


def _made(
    run: Run, own: Sequence[FsdpUnit], at: int, there: Sequence[MemoryItem]
) -> Iterator[MemoryItem]:
    """Yield the gradients that a chunk's backward has produced before it reaches unit `at`.

    Nothing is yielded if `there` contains gradients of earlier micro-batches or the gradient buffer
    is persistent.
    """
    gradients = dict(layout_of_run(run).kept)["gradients"]
    if gradients.always or any(part.name == "gradients" for part in there):
        return
    if gradients.to_host and gradients.sharded and run.strategy.micro_batches == 1:
        # the only micro-batch copies each gradient to the host right after its reduction
        return
    # a root unit reduces its gradients at the end of the backward
    behind = [unit for unit in own[at + 1 :] if not _is_root(run, unit)]
    size = sum(unit.own for unit in behind) if gradients.sharded else _elements(behind)
    yield MemoryItem("gradients", math.ceil(gradients.each_bytes * size), _switches(run)["states"])


def _is_root(run: Run, unit: FsdpUnit) -> bool:
    """Return True for the FSDP2 root: the weights outside of the separately wrapped layers."""
    return unit.name == "head" and _is_fsdp2(run) and is_joined(run)


def _beside(
    run: Run, own: Sequence[FsdpUnit], at: int, units: Sequence[FsdpUnit], *, reducing: bool
) -> Iterator[MemoryItem]:
    """Yield gathered weights and unreduced gradients that are live in the backward of unit `at`.

    For FSDP2 these are the unit's weights, the prefetched weights of the preceding unit, and the
    reduce-scatter input of the following unit.

    reducing : True for the gradient reduction at the end of the unit's backward.
    """
    zero, states, element = run.split.zero, _switches(run)["states"], run.element_bytes
    unit, behind = own[at], own[at + 1 :]
    # elements of layers in the root, which is reduced at the end of the backward
    inner = sum(one.in_root for one in own)
    if reducing:
        made = unit.largest if run.runtime.optimizer.layerwise else unit.elements
        made -= inner if unit.name == "head" else 0
        yield MemoryItem("unreduced gradients", made * element, states)
    if not _is_fsdp2(run):
        yield from _table_passing(run, units, "backward")
        return
    # the root is the last unit of a chunk
    root = [one for one in behind[-1:] if _is_root(run, one)]
    # only the head's gradient exists until the backward reaches the root's other weights
    late = (
        (sum(one.elements for one in root) - inner) // (1 if run.model.tied else 2) if root else 0
    )
    late += sum(one.in_root for one in (*behind, unit))
    yield MemoryItem("unreduced gradients", late * element, states)
    # norm and head are reduced one after the other, and stay gathered until both are
    last = unit.name == "head"
    if _holds(run):
        # in a pipeline no unit is freed
        given = [one for one in behind if one not in root]
        freed = () if run.strategy.pp > 1 else (*given, *([unit] if reducing and not last else ()))
        held = _gathered(run, units) - _gathered(run, freed)
        yield MemoryItem("gathered weights", math.ceil(held), states)
    else:
        held = _gathered(run, [*root, *([unit] if last or not reducing else ())])
        yield MemoryItem("gathered weights", math.ceil(held if _casts(run) else 0), states)
        if at and zero:
            ahead = _gathered(run, [own[at - 1]])
            yield MemoryItem("weights fetched ahead", math.ceil(ahead), states)
    if run.runtime.states.each_micro_batch:
        layers = (one for one in behind if one.name == "layer")
        root_waits = inner and unit.name == "head"
        source = [] if root_waits else [unit] if reducing else [*islice(layers, 1)]
        size = _reduced(run) * _elements(source)
        yield MemoryItem("input of the reduction", math.ceil(size), states)
        if reducing and last and not root:
            reduced = 4 * unit.own if zero else 0
            yield MemoryItem("gradients", reduced, states)
    elif _waiting(run):
        size = _waiting(run) * _elements(units)
        yield MemoryItem("gradients of earlier micro-batches", math.ceil(size), states)


def _at_step(run: Run, units: Sequence[FsdpUnit], there: list[MemoryItem]) -> LivePoint:
    passing = _table_passing(run, units, "step")
    largest = max((unit.largest for unit in units), default=0)
    update = math.ceil(update_factor(run.runtime.optimizer) * largest)
    item = MemoryItem(UPDATE, update, "--optim")
    return LivePoint(name="step", parts=(*there, *passing, item))


def _added(parts: Sequence[MemoryItem]) -> Iterator[MemoryItem]:
    """Yield one item per name, with the summed bytes."""
    for name in dict.fromkeys(part.name for part in parts):
        same = [part for part in parts if part.name == name]
        yield same[0]._replace(num_bytes=sum(part.num_bytes for part in same))


def sharded_parts(run: Run, stage: int) -> tuple[tuple[MemoryItem, ...], tuple[MemoryItem, ...]]:
    """Return (items after a step, items at the peak of a step) of a rank.

    The items at the peak include reserved blocks of other CUDA streams.
    """
    units = [unit for chunk in run.strategy.stages[stage] for unit in units_of(run, chunk)]
    after = (
        *_kept(run, units, gradients=False),
        MemoryItem("pipeline inputs", _exchanged(run), "local_batch_size, seq_len"),
    )
    fullest = max(live_points(run, stage), key=lambda instant: instant.num_bytes)
    parts = list(_added(fullest.parts))
    if _is_fsdp2(run):
        size = _other_streams(run, units, parts)
        parts.append(MemoryItem("blocks of other streams", size, _switches(run)["states"]))
    return after, tuple(part for part in parts if part.num_bytes)


def sharded_moments(run: Run, stage: int) -> Callable[[Moment], tuple[MemoryItem, ...]]:
    """Return a function from an event of a stage to the live items at the event's peak.

    The reserved blocks of other CUDA streams are excluded, in contrast to `sharded_parts`.
    """
    room = _LiveTensors(run, stage)

    def at(moment: Moment) -> tuple[MemoryItem, ...]:
        # a chunk without layers and head yields no point
        found = max(room.at(moment), key=lambda instant: instant.num_bytes, default=None)
        parts = (room.inputs,) if found is None else found.parts
        return tuple(part for part in _added(parts) if part.num_bytes)

    return at
