"""Which ranks of a stage work together in which layer: a cube of mesh axes for a whole plan.

The ranks of every stage form one mesh whose axes are prime factors of their number (a binary
hypercube for powers of two). A layer's tensor group is a product of its last axes (consecutive
ranks) or of its first ones (strided ranks), and the other axes are its data group, so that every
layer has its own degree and all activations lie on the same mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from autopar.errors import InputError
from autopar.legality import violations
from autopar.model_measurements import TensorKind
from autopar.plan import Plan
from profiler.plan.job import PlanJob

__all__ = ["Axes", "Cube", "Layout", "check_job", "cube_of", "layer_layout", "vocab_layout"]

Axes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cube:
    """The mesh of the ranks of one stage; the last axis is that of neighbouring ranks."""

    factors: tuple[int, ...]
    """Sizes of the axes, prime; (1,) for a stage of one rank."""

    @property
    def num_ranks(self) -> int:
        """Ranks of a stage."""
        return math.prod(self.factors)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank of the stage on every axis."""
        places = []
        for size in reversed(self.factors):
            rank, place = divmod(rank, size)
            places.append(place)
        return tuple(reversed(places))

    def size(self, axes: Axes) -> int:
        """Return the number of ranks along these axes."""
        return math.prod(self.factors[axis] for axis in axes)

    def index(self, rank: int, axes: Axes) -> int:
        """Return the place of a rank of the stage among those that differ along these axes."""
        places = self.coordinates(rank)
        index = 0
        for axis in axes:
            index = index * self.factors[axis] + places[axis]
        return index

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks of the stage that differ along these axes, in mesh order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.num_ranks):
            places = self.coordinates(rank)
            rest = tuple(p for axis, p in enumerate(places) if axis not in axes)
            found.setdefault(rest, []).append(rank)
        return tuple(tuple(group) for group in found.values())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one layer, or embedding and head, lies on the cube of its stage."""

    cube: Cube
    kind: TensorKind
    tensor_axes: Axes
    zero: str
    """ddp, zero2 or zero3."""

    @property
    def degree(self) -> int:
        """Tensor or Ulysses degree."""
        return self.cube.size(self.tensor_axes)

    @cached_property
    def data_axes(self) -> Axes:
        """Axes along which samples are divided."""
        return tuple(a for a in range(len(self.cube.factors)) if a not in self.tensor_axes)

    @property
    def data_degree(self) -> int:
        """Ranks among which samples are divided."""
        return self.cube.size(self.data_axes)

    @property
    def splits_weights(self) -> bool:
        """True where weights are divided over the tensor axes."""
        return self.kind != "ulysses" and self.degree > 1

    @property
    def splits_sequence(self) -> bool:
        """True where the residual stream is divided along the sequence."""
        return self.kind != "tp" and self.degree > 1

    @property
    def sync_axes(self) -> Axes:
        """Axes over which gradients are summed, and which ZeRO shards over."""
        if self.splits_weights:
            return self.data_axes
        return tuple(range(len(self.cube.factors)))

    @property
    def sync_degree(self) -> int:
        """Ranks over which gradients are summed."""
        return self.cube.size(self.sync_axes)

    @property
    def is_sharded(self) -> bool:
        """True where ZeRO divides something."""
        return self.zero != "ddp" and self.sync_degree > 1


def cube_of(plan: Plan) -> Cube:
    """Return a cube on which every layer of a plan can lie.

    Raises
    ------
    InputError
        When two degrees need axes that no order of factors has, such as consecutive groups of 2
        and of 3 among 6 ranks.
    """
    ranks, rest = divmod(plan.world_size, plan.num_stages)
    if rest:
        raise InputError(
            f"world_size({plan.world_size}) % pp({plan.num_stages}) = {rest} != 0; choose a "
            "number of stages that divides the ranks"
        )
    # A strided group of t ranks takes the first axes, so the ranks / t last ones are its data.
    names: dict[int, str] = {}
    for layer, strategy in enumerate(plan.layers):
        if strategy.tp > 1:
            size = ranks // strategy.tp if strategy.strided else strategy.tp
            word = "strided" if strategy.strided else "consecutive"
            names.setdefault(size, f"the {word} groups of {strategy.tp} of layer {layer}")
    if plan.vocab.tp > 1:
        names.setdefault(plan.vocab.tp, f"the groups of {plan.vocab.tp} of embedding and head")
    names.setdefault(ranks, f"the {ranks} ranks of a stage")
    factors: list[int] = []
    before = 1
    for size in sorted(names):
        if size % before:
            raise InputError(
                f"{names[before]} and {names[size]} do not fit on one mesh of {ranks} ranks "
                f"({before} does not divide {size}); choose degrees that divide one another"
            )
        factors = [*reversed(_primes(size // before)), *factors]
        before = size
    return Cube(factors=tuple(factors) or (1,))


def layer_layout(job: PlanJob, cube: Cube, layer: int) -> Layout:
    """Return how one layer of a plan lies on the cube."""
    plan = job.plan
    strategy = plan.layers[layer]
    kind: TensorKind = "ulysses" if strategy.ulysses else "sp" if job.sequence_parallel else "tp"
    axes = _first_axes(cube, strategy.tp) if strategy.strided else _last_axes(cube, strategy.tp)
    zero = "zero3" if strategy.zero3 else plan.default_dp_type
    return Layout(cube=cube, kind=kind, tensor_axes=axes, zero=zero)


def vocab_layout(job: PlanJob, cube: Cube) -> Layout:
    """Return how embedding, head and loss lie on the cube."""
    vocab = job.plan.vocab
    kind: TensorKind = "ulysses" if vocab.ulysses else "sp" if job.sequence_parallel else "tp"
    zero = "zero3" if vocab.zero3 else job.plan.default_dp_type
    return Layout(cube=cube, kind=kind, tensor_axes=_last_axes(cube, vocab.tp), zero=zero)


def check_job(job: PlanJob) -> Cube:
    """Return the cube of a plan that can be run.

    Raises
    ------
    InputError
        When the plan is illegal, or holds what is not run here.
    """
    plan = job.plan
    problems = violations(plan, job.spec, sequence_parallel=job.sequence_parallel)
    if problems:
        raise InputError(f"the plan cannot run: {'; '.join(problems)}")
    for layer, strategy in enumerate(plan.layers):
        if strategy.cp > 1:
            raise InputError(
                f"layer {layer} has context degree {strategy.cp}, and plans with ring attention "
                "are not run here; give a plan with context degree 1"
            )
    if any(layer.cross_attention for layer in job.spec.layers):
        raise InputError(
            f"model {job.spec.name!r} has an encoder and a decoder, and only stacks of one kind "
            "of layer are run here; give a decoder-only or encoder-only model"
        )
    return cube_of(plan)


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _last_axes(cube: Cube, degree: int) -> Axes:
    axis, size = len(cube.factors), 1
    while size < degree:
        axis -= 1
        size *= cube.factors[axis]
    assert size == degree, (cube, degree)
    return tuple(range(axis, len(cube.factors))) if degree > 1 else ()


def _first_axes(cube: Cube, degree: int) -> Axes:
    axis, size = 0, 1
    while size < degree:
        size *= cube.factors[axis]
        axis += 1
    assert size == degree, (cube, degree)
    return tuple(range(axis))
