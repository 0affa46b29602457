"""Times and sizes of one block: the sums over its operations, for base and edge blocks.

The edge block of a chunk is the one next to another stage. Source: Calculon (SC'23), doi
10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.oracles.calculon.layers import STAGES, Layer, Stage
from tests.oracles.calculon.machine import Rate, Tier
from tests.oracles.calculon.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Processor of an execution: engines for its datatype, memories, network tiers."""

    matrix: Rate
    vector: Rate
    memory: Rate
    memory_bytes: float
    second_memory: Rate
    second_memory_bytes: float
    roofline: bool
    tensor: Tier
    pipeline: Tier
    data: Tier

    def processing_s(self, flops_s: float, memory_s: float) -> float:
        """Return the time of an operation that computes and moves."""
        return max(flops_s, memory_s) if self.roofline else flops_s + memory_s


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One figure of a base block and of an edge block."""

    base: float = 0.0
    edge: float = 0.0

    def __add__(self, other: Pair | float) -> Pair:
        return self._with(other, float.__add__)

    def __sub__(self, other: Pair | float) -> Pair:
        return self._with(other, float.__sub__)

    def _with(self, other: Pair | float, operation: Callable[[float, float], float]) -> Pair:
        right = other if isinstance(other, Pair) else Pair(base=other, edge=other)
        return Pair(
            base=operation(float(self.base), float(right.base)),
            edge=operation(float(self.edge), float(right.edge)),
        )

    def positive(self) -> Pair:
        """Return both figures, at least 0."""
        return Pair(base=max(0.0, self.base), edge=max(0.0, self.edge))

    def chunk(self, blocks: int) -> float:
        """Return the sum over a chunk of `blocks` blocks, one of which is the edge block."""
        return (blocks - 1) * self.base + self.edge


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass over a block; communication is counted separately."""

    flops: float = 0.0
    flops_s: float = 0.0
    bytes: float = 0.0
    memory_s: float = 0.0
    time_s: Pair = Pair()
    link_bytes: Pair = Pair()
    link_s: Pair = Pair()
    exposed_s: Pair = Pair()
    """Communication of the tensor group: bytes, network time, exposed time."""


@dataclass(frozen=True, kw_only=True)
class Spaces:
    """Bytes of one block in the memory of a processor."""

    weight: float
    working: float
    """Activations of the block that is running."""
    stored: float
    """Saved activations, from forward to backward."""
    weight_gradient: float = 0.0
    whole_weight_gradient: float = 0.0
    activation_gradient: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Block:
    """All figures of a block that the step uses."""

    fw: Work
    agrad: Work
    wgrad: Work
    optim: Work
    again: Work
    """Forward operations that are repeated in backward."""
    again_link: Work
    """Collectives that are repeated in backward."""
    spaces: Spaces
    required_bytes_per_s: float
    """Bandwidth that would hide the tiled collectives."""


@dataclass(frozen=True, kw_only=True)
class LayerTiming:
    """One layer in one stage, for a base or an edge block."""

    flops_s: float
    memory_s: float
    alone_s: float
    """Seconds without a concurrent collective."""
    processing_s: float
    link_bytes: float
    link_s: float
    exposed_s: float


def sum_block(shape: Shape, layers: Iterable[Layer], machine: Machine) -> Block:
    """Return the sums over the operations of a block."""
    layers = tuple(layers)
    times = {
        (n, stage, edge): layer_timing(shape, layer, machine, stage, edge=edge)
        for n, layer in enumerate(layers)
        for stage in STAGES
        for edge in (False, True)
    }

    def work(stage: Stage) -> Work:
        if stage != "fw" and not shape.training:
            return Work()
        own = [n for n, x in enumerate(layers) if _counted(shape, x)]
        linked = stage in ("fw", "agrad")
        return Work(
            flops=sum(layers[n].flops[stage] for n in own),
            flops_s=sum(times[n, stage, False].flops_s for n in own),
            bytes=sum(layers[n].bytes[stage] for n in own),
            memory_s=sum(times[n, stage, False].memory_s for n in own),
            time_s=_pair(lambda edge: _total(times, "processing_s", stage, edge)),
            link_bytes=_pair(lambda edge: _total(times, "link_bytes", stage, edge) * linked),
            link_s=_pair(lambda edge: _total(times, "link_s", stage, edge) * linked),
            exposed_s=_pair(lambda edge: _total(times, "exposed_s", stage, edge) * linked),
        )

    return Block(
        fw=work("fw"),
        agrad=work("agrad"),
        wgrad=work("wgrad"),
        optim=work("optim"),
        again=_again(shape, layers, times),
        again_link=_again_link(shape, layers, times),
        spaces=_spaces(shape, layers),
        required_bytes_per_s=_required(shape, layers, machine, times),
    )


_Times = dict[tuple[int, Stage, bool], LayerTiming]


def layer_timing(
    shape: Shape, layer: Layer, machine: Machine, stage: Stage, *, edge: bool
) -> LayerTiming:
    """Return the seconds of a layer in a stage, and of its collective."""
    engine = machine.matrix if layer.matrix and stage != "optim" else machine.vector
    flops_s = engine.seconds(layer.flops[stage])
    memory_s = machine.memory.seconds(layer.bytes[stage])
    alone_s = machine.processing_s(flops_s, memory_s)
    link_bytes, link_s = _link(shape, layer, machine, stage, edge, alone_s)
    processing_s, exposed_s = alone_s, 0.0
    if layer.communicates and not layer.tiled:
        processing_s, exposed_s = 0.0, link_s
    elif layer.tiled:
        overlapped_s = link_s
        if edge and shape.quirks.edge_overlaps_as_base:
            overlapped_s = _link(shape, layer, machine, stage, False, alone_s)[1]
        processing_s, exposed_s = _tiles(shape, machine, flops_s, memory_s, alone_s, overlapped_s)
    return LayerTiming(
        flops_s=flops_s,
        memory_s=memory_s,
        alone_s=alone_s,
        processing_s=processing_s,
        link_bytes=link_bytes,
        link_s=link_s,
        exposed_s=exposed_s,
    )


def _collective(shape: Shape, layer: Layer, stage: Stage, edge: bool) -> str | None:
    if layer.communicates is None or shape.tensor == 1 or stage == "optim":
        return None
    if stage == "wgrad" and not layer.recommunicated:
        return None
    split = shape.rs or (shape.rs_at_edges and edge)
    gathers = (layer.communicates == "F") == (stage != "agrad")
    if gathers:
        return "all_gather" if split else None
    return "reduce_scatter" if split else "all_reduce"


def _link(
    shape: Shape, layer: Layer, machine: Machine, stage: Stage, edge: bool, alone_s: float
) -> tuple[float, float]:
    """Return the bytes of the collective of a layer and its time, reductions included."""
    operation = _collective(shape, layer, stage, edge)
    size = 0.0
    seconds = 0.0
    if operation is not None:
        size = float(shape.elements * shape.element_bytes)
        seconds = machine.tensor.seconds(operation, size, shape.tensor)
    if layer.communicates and stage not in ("wgrad", "optim"):
        if not layer.tiled:
            seconds += alone_s
        elif operation in ("all_reduce", "reduce_scatter"):
            added = shape.elements * (shape.tensor - 1) / shape.tensor
            seconds += machine.vector.seconds(added)
    return size, seconds


def _tiles(
    shape: Shape,
    machine: Machine,
    flops_s: float,
    memory_s: float,
    alone_s: float,
    link_s: float,
) -> tuple[float, float]:
    """Return processing and exposed seconds of a layer in t tiles with its collective."""
    if link_s == 0.0:
        return alone_s, 0.0
    t = shape.tensor
    free = 1.0 - machine.tensor.processor_usage
    slowed_s = machine.processing_s(flops_s / free, memory_s)
    over_s = link_s / t - flops_s / free / t
    if over_s > 0.0:
        processing_s, exposed_s = alone_s / t + (t - 1) * slowed_s / t, (t - 1) * over_s
    else:
        processing_s = alone_s + (t - 1) * machine.tensor.processor_usage * link_s / t
        exposed_s = 0.0
    if shape.pipe:
        exposed_s += link_s / t
        processing_s += link_s / t if shape.quirks.pipe_tile_twice else 0.0
    return processing_s, exposed_s


def _counted(shape: Shape, layer: Layer) -> bool:
    """Return True if FLOP and bytes of a layer count for the block, not for its communication."""
    return layer.tiled or not layer.communicates or shape.quirks.communication_flops


def _again(shape: Shape, layers: tuple[Layer, ...], times: _Times) -> Work:
    if not shape.training:
        return Work()
    total = [0.0] * 4
    running = [0.0] * 4
    for n, layer in enumerate(layers):
        timing = times[n, "fw", False]
        own = (layer.flops["fw"], timing.flops_s, layer.bytes["fw"], timing.memory_s)
        running = [a + b for a, b in zip(running, own, strict=True)]
        if layer.recomputed:
            add = running if shape.quirks.running_recompute_totals else own
            total = [a + b for a, b in zip(total, add, strict=True)]

    def seconds(edge: bool) -> float:
        result = 0.0
        for n, layer in enumerate(layers):
            if not layer.recomputed:
                continue
            timing = times[n, "fw", edge]
            beside = layer.tiled and not shape.quirks.recommunication_as_forward
            # the slowdown during a repeated collective is counted with the weight gradient
            result += timing.alone_s if beside else timing.processing_s
        return result

    flops, flops_s, moved, memory_s = total
    return Work(flops=flops, flops_s=flops_s, bytes=moved, memory_s=memory_s, time_s=_pair(seconds))


def _again_link(shape: Shape, layers: tuple[Layer, ...], times: _Times) -> Work:
    if not shape.training:
        return Work()
    repeated = [n for n, layer in enumerate(layers) if layer.recommunicated]

    def exposed(edge: bool) -> float:
        result = 0.0
        for n in repeated:
            as_forward = layers[n].tiled and shape.quirks.recommunication_as_forward
            result += times[n, "fw" if as_forward else "wgrad", edge].exposed_s
        return result

    return Work(
        link_bytes=_pair(lambda edge: sum(times[n, "wgrad", edge].link_bytes for n in repeated)),
        link_s=_pair(lambda edge: sum(times[n, "wgrad", edge].link_s for n in repeated)),
        exposed_s=_pair(exposed),
    )


def _spaces(shape: Shape, layers: tuple[Layer, ...]) -> Spaces:
    stored = 0.0
    if not shape.recompute_all:
        stored = sum(x.activation_bytes for x in layers)
        if shape.training:
            stored -= sum(x.outputs * shape.element_bytes for x in layers if not x.output_kept)
            stored -= sum(x.activation_bytes for x in layers if not x.kept)
    weight = sum(x.weight_bytes for x in layers)
    working = sum(x.activation_bytes for x in layers if not x.reused)
    if not shape.training:
        return Spaces(weight=weight, working=working, stored=stored)
    return Spaces(
        weight=weight,
        working=working,
        stored=stored,
        weight_gradient=sum(x.weight_gradient_bytes for x in layers),
        whole_weight_gradient=sum(x.whole_gradient_bytes for x in layers),
        activation_gradient=sum(x.activation_gradient_bytes for x in layers),
        optimizer=sum(x.optimizer_bytes for x in layers),
    )


def _required(shape: Shape, layers: tuple[Layer, ...], machine: Machine, times: _Times) -> float:
    free = 1.0 - machine.tensor.processor_usage
    stages: tuple[Stage, ...] = ("fw", "agrad") if shape.training else ("fw",)

    def traffic(layer: Layer, stage: Stage, edge: bool, size: float) -> float:
        operation = _collective(shape, layer, stage, edge)
        if operation is None or shape.quirks.overlap_requirements:
            return size
        return machine.tensor.collectives[operation].traffic_bytes(size, shape.tensor)

    return max(
        (
            traffic(layer, stage, edge, times[n, stage, edge].link_bytes)
            * free
            / times[n, stage, edge].flops_s
            for n, layer in enumerate(layers)
            if layer.tiled
            for stage in stages
            for edge in (False, True)
        ),
        default=0.0,
    )


def _total(times: _Times, name: str, stage: Stage, edge: bool) -> float:
    return float(sum(getattr(t, name) for (_, s, e), t in times.items() if (s, e) == (stage, edge)))


def _pair(figure: Callable[[bool], float]) -> Pair:
    return Pair(base=figure(False), edge=figure(True))
