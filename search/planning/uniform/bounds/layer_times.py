"""Layer types, parameter counts and layer times shared by candidates of equal degrees.

Times are arrays over recomputation policies, computed in `search.planning.uniform.cost_model`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.pipeline.schedules import SCHEDULES
from autopar.rates.measured import host_device_time_s
from autopar.rates.parts.operations import Real
from autopar.records import Record
from autopar.run.job import Block, Job as StepJob
from search.engines.candidate import Candidate
from search.planning.uniform.layout import Arrangement, arranged
from search.planning.uniform.memory import MemoryBounds


class MicroBatchTimes(NamedTuple):
    """Seconds of a micro-batch, including ZeRO-3 traffic for one number of stages."""

    device_s: F64
    """Device seconds of one layer, shape [policies + 2, layer types], as in `DegreeTimes`.

    They include the exposed traffic of sharded weights."""
    first_s: float
    last_s: float
    """Seconds of the embedding, and of head, loss and MTP modules without their layers."""
    device_of_all_s: F64
    host_of_all_s: F64
    """Device and host seconds of the whole model, shape [policies + 2]."""
    whole_s: F64
    """Combined device and host seconds of the whole model, shape [policies + 2]."""
    layer_s: F64
    """Lower bounds of the combined seconds of any layer, shape [policies + 2]."""
    again: F64
    """Whole-model seconds with some layers fully recomputed, as linear functions, shape [4].

    Device and host seconds without recomputation, then lower bounds of the seconds that full
    recomputation of layers adds to each, per byte of activations that is no longer saved."""
    traffic_s: F64
    """Lower bounds of the ZeRO-3 traffic seconds during a layer, shape [layer types]."""
    more: F64
    """Lower bounds of the added seconds per additional device second, shape [policies], 0 to 1.

    Below 1 where the ZeRO-3 traffic takes longer than a layer."""


class LayerTypes(NamedTuple):
    """Layer types of a model."""

    blocks: tuple[Block, ...]
    """One layer of each type."""
    of_layers: tuple[int, ...]
    """Type index of every layer in execution order."""
    parameters: tuple[tuple[float, float], ...]
    """Parameters of one layer by type: (experts, others)."""
    number: F64
    """Number of layers in the model, shape [layer types]."""
    further: F64
    """Number of layers in MTP modules, shape [layer types]."""


class SublayerTimes(NamedTuple):
    """Seconds of a layer, or of its attention or MLP half, for one micro-batch."""

    device_s: F64
    host_s: F64
    """Device and host seconds, shape [policies + 2]; the last two are no and full recomputation."""
    forward_s: Real
    """Device seconds of the forward."""
    experts_s: Real
    """Seconds of dispatch and combine that another micro-batch may hide; 0 without overlap."""


class LayerParameterCounts(NamedTuple):
    """Parameters of one layer type on one rank."""

    number: int
    """Number of layers of this type in the model."""
    dense: float
    experts: float
    """Parameters of one layer on a rank, without experts and of experts."""


class DegreeTimes(Record, eq=False, dict=True):
    """Data shared by candidates of equal degrees, micro-batch size and precision."""

    choice: Candidate
    """Candidate with one stage and the fewest data-parallel ranks that these degrees allow."""
    job: StepJob
    kinds: tuple[int, ...]
    """Type index of every layer in execution order."""
    blocks: tuple[Block, ...]
    """One layer of each type."""
    weights: tuple[LayerParameterCounts, ...]
    number: F64
    """Number of layers in the model, shape [layer types]."""
    further: F64
    """Number of MTP layers, which precede the head, shape [layer types]."""
    device_s: F64
    host_s: F64
    """Device and host seconds of one layer and micro-batch, shape [policies + 2, layer types].

    The last two rows are no and full recomputation."""
    forward_s: F64
    """Device seconds of the forward of one layer, shape [layer types]."""
    experts_s: F64
    """Seconds of dispatch and combine of one layer that another micro-batch may hide, by type.

    Device seconds contain the exposed part of many micro-batches."""
    first_s: float
    last_s: float
    """Seconds of the embedding, and of head, loss and MTP modules without their layers."""
    bounds: MemoryBounds

    @cached_property
    def layer_s(self) -> tuple[float, ...]:
        """Device seconds of every layer in execution order, without recomputation."""
        plain = self.device_s[-2].tolist()
        return tuple(plain[kind] for kind in self.kinds)

    @property
    def end_s(self) -> float:
        """Device seconds after the last layer: MTP modules, head and loss."""
        return self.last_s + float(self.device_s[-2] @ self.further)


def degrees_of(choice: Candidate) -> tuple[object, ...]:
    """Return the settings that candidates of one `DegreeTimes` share, as a cache key."""
    return (
        *attention_of(choice),
        *(choice.ep, choice.etp, choice.dispatcher, choice.overlap_experts),
    )


def attention_of(choice: Candidate) -> tuple[object, ...]:
    """Return the settings that attention and dense MLP times depend on, as a cache key."""
    degrees = choice.tp, choice.tp_overlap, choice.cp, choice.cp_kind
    return *degrees, choice.micro_batch, choice.precision


def rows_of(
    unit: DegreeTimes, device_s: F64, traffic_s: F64, table_s: float, visible: float
) -> MicroBatchTimes:
    """Return micro-batch times from device seconds of layers that include exposed traffic.

    The result's `whole_s` is a lower bound of any sum over stages, as the combined time of device
    and host is convex and homogeneous of degree 1.

    device_s : device seconds of one layer, shape [policies + 2, layer types]
    traffic_s : ZeRO-3 traffic seconds during one layer, shape [layer types]
    table_s : traffic seconds of an embedding table
    visible : exposed share of the shorter of traffic and layer, 0 to 1
    """
    first, last = unit.first_s + table_s, unit.last_s + table_s
    number, sizes = unit.number + unit.further, unit.bounds.sizes
    whole = model_times(
        device_s, unit.host_s, number, np.asarray(first + last), sizes.plain - sizes.full
    )
    longer = (unit.device_s[:-2] >= traffic_s).all(axis=1)
    share = np.where(longer, 1.0, visible)
    return MicroBatchTimes(device_s, first, last, *whole, traffic_s, share)


class ModelTimes(NamedTuple):
    """Seconds of a micro-batch of the whole model, as in `MicroBatchTimes`, for any degrees."""

    device_of_all_s: F64
    host_of_all_s: F64
    whole_s: F64
    layer_s: F64
    """Shapes [..., policies + 2]."""
    again: F64
    """Shape [..., 4]."""


def model_times(
    device_s: F64, host_s: F64, number: F64, ends_s: F64, freed_bytes: F64
) -> ModelTimes:
    """Return whole-model seconds from those of layers.

    device_s, host_s : seconds of one layer, shape [..., policies + 2, layer types]
    number : number of layers by type
    ends_s : device seconds of embedding, head, loss and MTP modules without layers, shape [...]
    freed_bytes : bytes that full recomputation of a layer frees, shape [..., layer types]
    """
    device, host = device_s @ number + ends_s[..., None], host_s @ number
    freed = np.maximum(freed_bytes, 1e-300)
    more = [
        np.maximum(0.0, ((rows[..., -1, :] - rows[..., -2, :]) / freed).min(axis=-1))
        for rows in (device_s, host_s)
    ]
    return ModelTimes(
        device,
        host,
        layer_total_s(device, host),
        layer_total_s(device_s.min(axis=-1), host_s.min(axis=-1)),
        np.stack([device[..., -2], host[..., -2], *more], axis=-1),
    )


def partial_recompute_s(again: F64, freed_bytes: Real) -> F64:
    """Return lower bounds of whole-model seconds if full recomputation frees `freed_bytes`.

    again : `MicroBatchTimes.again`, shape [..., 4].
    freed_bytes : a number, or an array of shape [...].
    """
    device, host = (again[..., at] + freed_bytes * again[..., at + 2] for at in (0, 1))
    return layer_total_s(device, host)


def arrangement_of(unit: DegreeTimes, choice: Candidate) -> Arrangement:
    """Return the layer partition of a candidate as numbers of layers by type."""
    # deferred weight gradients keep more activations live on later stages, up to those of the first
    return arranged(choice.chunks, unit.kinds, apart=SCHEDULES[choice.schedule].splits)


def layer_total_s(device_s: F64, host_s: F64) -> F64:
    """Return the combined seconds of device and host, which partly overlap."""
    return np.asarray(host_device_time_s(device_s, host_s))
