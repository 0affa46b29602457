"""What choices of the same degrees have in common, and its seconds by recomputation as arrays.

Kinds of layers, elements and seconds of a rank, and layers of stages. How they are priced is
`search.planning.uniform.prices`'s.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.pipeline.schedules import SCHEDULES
from autopar.rates.measured import together_s
from autopar.rates.parts.operations import Real
from autopar.records import Record
from autopar.run.job import Block, Job as StepJob
from search.engines.choice import Choice
from search.planning.uniform.layout import Arrangement, arranged
from search.planning.uniform.memory import Bounds


class Rows(NamedTuple):
    """Seconds of a micro-batch at a sharding."""

    device_s: F64
    """[recomputation, kind], as those of a unit."""
    first_s: float
    last_s: float
    device_of_all_s: F64
    host_of_all_s: F64
    """[recomputation]: of the whole model."""
    whole_s: F64
    """The same of device and host together."""
    again: F64
    """Of the whole model, the device's seconds and the host's, nothing of it made again; and what a
    byte adds to each at least, of those that layers which are made again whole do not save."""
    traffic_s: F64
    """[kind]: of the traffic beside each layer, at least."""
    more: F64
    """[recomputation]: what a second more of the device adds at least: less than one where the
    traffic of sharded weights takes longer than a layer."""


class Kinds(NamedTuple):
    """Kinds of layers that a model has."""

    blocks: tuple[Block, ...]
    """One layer of each."""
    of_layers: tuple[int, ...]
    """Of every layer in execution order."""
    parameters: tuple[tuple[float, float], ...]
    """Of each kind, those of experts and the others."""
    number: F64
    """[kind]: layers of the model."""
    further: F64
    """[kind]: those of its modules of further tokens."""


class Half(NamedTuple):
    """Seconds of a layer, or of its attention or its MLP, for one micro-batch."""

    device_s: F64
    host_s: F64
    """[recomputation], with those of nothing and of whole layers behind."""
    forward_s: float


class Weights(NamedTuple):
    """Elements of a rank of one kind of layer."""

    number: int
    """Layers of this kind in the model."""
    dense: float
    experts: float


class Unit(Record, eq=False, dict=True):
    """What choices of the same degrees, micro-batch and precision have in common."""

    choice: Choice
    """Of one stage, on as few ranks as these degrees have."""
    job: StepJob
    kinds: tuple[int, ...]
    """Of every layer in execution order."""
    blocks: tuple[Block, ...]
    """One layer of each kind."""
    weights: tuple[Weights, ...]
    number: F64
    """[kind]: layers of the model."""
    further: F64
    """[kind]: those of its modules of further tokens, which stand in front of the head."""
    device_s: F64
    host_s: F64
    """[recomputation, kind]: of a micro-batch of one layer; the last two rows are those of nothing
    and of whole layers."""
    forward_s: F64
    """[kind]: of the device, what of a layer is its forward."""
    first_s: float
    last_s: float
    """Of embedding, and of head and loss, with all of further tokens but their layers."""
    bounds: Bounds

    @cached_property
    def layer_s(self) -> tuple[float, ...]:
        """Of every layer in execution order."""
        plain = self.device_s[-2].tolist()
        return tuple(plain[kind] for kind in self.kinds)

    @property
    def end_s(self) -> float:
        """Of what comes behind the last layer."""
        return self.last_s + float(self.device_s[-2] @ self.further)


def degrees_of(choice: Choice) -> tuple[object, ...]:
    """Return what choices of one unit have in common."""
    return (
        *attention_of(choice),
        *(choice.ep, choice.etp, choice.dispatcher, choice.overlap_experts),
    )


def attention_of(choice: Choice) -> tuple[object, ...]:
    """Return what a layer without experts depends on."""
    degrees = choice.tp, choice.tp_overlap, choice.cp, choice.cp_kind
    return *degrees, choice.micro_batch, choice.precision


def rows_of(unit: Unit, device_s: F64, traffic_s: F64, table_s: float, visible: float) -> Rows:
    """Return a unit's seconds with others of the device.

    traffic_s : beside layers, by kind; table_s : of a table's; visible : share of the shorter of
    traffic and layer that is seen.

    No sum of stages is below `whole_s`: the time of device and host together is convex and of the
    first degree.
    """
    first, last = unit.first_s + table_s, unit.last_s + table_s
    number = unit.number + unit.further
    device, host = device_s @ number + first + last, unit.host_s @ number
    freed = np.maximum(unit.bounds.sizes.plain - unit.bounds.sizes.full, 1e-300)
    more = [
        max(0.0, float(((rows[-1] - rows[-2]) / freed).min())) for rows in (device_s, unit.host_s)
    ]
    again = np.array([device[-2], host[-2], *more])
    both = both_s(device, host)
    longer = (unit.device_s[:-2] >= traffic_s).all(axis=1)
    share = np.where(longer, 1.0, visible)
    return Rows(device_s, first, last, device, host, both, again, traffic_s, share)


def partly_s(again: F64, freed_bytes: Real) -> F64:
    """Return a whole model's seconds with as many layers made again as save so many bytes less.

    again : [..., 4] of `Rows`; freed_bytes : a number, or [...].
    """
    device, host = (again[..., at] + freed_bytes * again[..., at + 2] for at in (0, 1))
    return both_s(device, host)


def arrangement_of(unit: Unit, choice: Choice) -> Arrangement:
    """Return a choice's layout by kinds of layers."""
    # put-off gradients of weights keep more alive on later stages, up to what the first one has
    return arranged(choice.chunks, unit.kinds, apart=SCHEDULES[choice.schedule].splits)


def layers_of(unit: Unit, arrangement: Arrangement) -> F64:
    """Return [stage, kind], layers of modules of further tokens in front of the head."""
    layers = arrangement.layers.astype(np.float64)
    layers[arrangement.ends[1]] += unit.further
    return layers


def both_s(device_s: F64, host_s: F64) -> F64:
    return np.asarray(together_s(device_s, host_s))
