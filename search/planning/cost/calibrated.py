"""Application of a calibration to the times and memory of a search.

Times are multiplied in the profiles before any formula, so that overlap is computed from calibrated
times. Bytes are multiplied in the priced rows instead, since message sizes are computed from the
same number of parameters and must not change.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from msgspec.structs import asdict

from autopar.arrays import I64
from autopar.rates.measured import Curve, HardwareProfile
from autopar.records import replace
from autopar.run.model import (
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherTime,
    ShardedTime,
    TimePoint,
)
from autopar.run.runtime import OverlapFactors
from search.planning.cost.tables import LayerRows, PricedRows
from search.planning.cost.vocabulary import VocabRows
from search.request.options import SearchOptions

_Time = TypeVar("_Time", TimePoint, ShardedTime, OtherTime, Curve)
_Priced = TypeVar("_Priced", bound=PricedRows)


def calibration_doubts(
    spec: ModelSpec, model: ModelProfile, hardware: HardwareProfile, options: SearchOptions
) -> tuple[str, ...]:
    """Return reasons why the calibration may not apply to this model and cluster, one line each.

    Raises OptionError if it was fitted on another device.
    """
    calibration = options.calibration
    if calibration is None:
        return ()
    calibration.require_device(hardware.name)
    return calibration.doubts(
        world_size=hardware.world_size,
        model=spec.name,
        precision=options.mixed_precision,
        estimated=hardware.estimated or model.estimated,
    )


def calibrated(
    model: ModelProfile, hardware: HardwareProfile, options: SearchOptions
) -> tuple[ModelProfile, HardwareProfile]:
    """Return model and hardware profile with all times multiplied by the calibration factors."""
    if options.calibration is None:
        return model, hardware
    computation = options.calibration.computation.value
    communication = options.calibration.communication.value
    if computation != 1.0:
        model = _longer_model(model, computation)
    # optimizer and embedding look-up use the memory bandwidth and count as computation
    if (computation, communication) != (1.0, 1.0):
        hardware = _longer_hardware(hardware, computation, communication)
    return model, hardware


def calibrated_host(hiding: OverlapFactors, options: SearchOptions) -> OverlapFactors:
    """Return the overlap factors with host overhead multiplied by the computation factor."""
    if options.calibration is None:
        return hiding
    factor = options.calibration.computation.value
    names = ("host_forward_s", "host_backward_s", "host_collective_s", "host_experts_s")
    changes: dict[str, Any] = {name: factor * getattr(hiding, name) for name in names}
    return replace(hiding, **changes)


def calibrated_bytes(values: I64, options: SearchOptions) -> I64:
    """Return byte counts times the memory factor of the calibration, rounded to whole bytes."""
    factor = 1.0 if options.calibration is None else options.calibration.memory.value
    return values if factor == 1.0 else np.rint(values * factor).astype(np.int64)


def calibrated_layer(rows: LayerRows, options: SearchOptions) -> LayerRows:
    """Return the rows of a layer type with calibrated bytes."""
    return _more_bytes(rows, options, "backward_peak")


def calibrated_vocab(rows: VocabRows, options: SearchOptions) -> VocabRows:
    """Return the rows of embedding and head with calibrated bytes and fixed seconds per step.

    The fixed seconds are added to the tail of the first and the last stage. They lengthen the step
    by their full value unless a middle stage has a longer tail than both.
    """
    if options.calibration is None:
        return rows
    rows = _more_bytes(rows, options, "loss", "beside_loss", "beside_half", "logits")
    seconds = options.calibration.fixed_s.value
    if seconds == 0.0:
        return rows
    forward, backward, step = rows.seconds
    fixed = np.full(rows.at[0].shape, seconds)
    return replace(rows, seconds=(forward, backward, {**step, "fixed": fixed}))


def _more_bytes(rows: _Priced, options: SearchOptions, *own: str) -> _Priced:
    """Return the rows with memory bytes multiplied; own : names of additional byte fields."""
    if options.calibration is None:
        return rows
    names = ("states", "activations", "transient", "shared", *own)
    changes: dict[str, Any] = {
        name: calibrated_bytes(getattr(rows, name), options) for name in names
    }
    return replace(rows, **changes)


def _longer_hardware(
    hardware: HardwareProfile, computation: float, communication: float
) -> HardwareProfile:
    """Return the profile with communication times multiplied and memory bandwidth divided.

    communication, computation : factors on times.
    """
    rate = hardware.memory_bytes_per_s
    return replace(
        hardware,
        # a factor on times divides rates
        allreduce_bytes_per_s={
            key: value / communication for key, value in hardware.allreduce_bytes_per_s.items()
        },
        p2p_bytes_per_s={
            key: value / communication for key, value in hardware.p2p_bytes_per_s.items()
        },
        # percentiles are scaled like the median, so the relative spread is unchanged
        curves={key: _times(value, communication) for key, value in hardware.curves.items()},
        strided_curves={
            key: _times(value, communication) for key, value in hardware.strided_curves.items()
        },
        p2p_curves={
            key: _times(value, communication) for key, value in hardware.p2p_curves.items()
        },
        sequence_curves={
            key: _times(value, communication) for key, value in hardware.sequence_curves.items()
        },
        # the optimizer step and the look-up are computation, not communication
        memory_bytes_per_s=None if rate is None else rate / computation,
    )


def _longer_model(model: ModelProfile, factor: float) -> ModelProfile:
    return replace(
        model,
        layers=tuple(_layer(layer, factor) for layer in model.layers),
        other_times=tuple(_times(time, factor) for time in model.other_times),
    )


def _layer(layer: LayerProfile, factor: float) -> LayerProfile:
    return replace(
        layer,
        times=tuple(_times(time, factor) for time in layer.times),
        sharded_times=tuple(_times(time, factor) for time in layer.sharded_times),
    )


def _times(time: _Time, factor: float) -> _Time:
    """Return a measured time with every field in seconds multiplied by `factor`."""
    changes = {
        name: value * factor
        for name, value in asdict(time).items()
        # the suffix of a field is its unit
        if name.endswith("_s") and value is not None
    }
    return replace(time, **changes)
