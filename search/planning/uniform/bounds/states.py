"""Model states in lower bounds of memory: bytes per parameter, and parameters of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.price.parameters import Weight, frozen_bytes
from autopar.price.sharded_peak import unsharded_bytes
from autopar.price.states import layout_of_run, low_precision_bytes
from autopar.records import replace
from autopar.run.run import Run

_LOW = 0.5
"""Bytes that a weight stored in 8 or 4 bits takes at least."""


class StateBytes(NamedTuple):
    """Bytes that a rank keeps per trained parameter, and the parts of other bytes it keeps."""

    dense: float
    experts: float
    """Bytes per trained parameter of dense layers and of experts."""
    frozen: float
    frozen_experts: float
    """Part of the frozen weights of dense layers and of experts, 0 to 1."""
    copies: float
    """Part of the low-precision copies of weights, 0 or 1."""


def trained_elements(weights: Sequence[Weight]) -> tuple[float, float]:
    """Return the numbers of trained parameters as (dense, expert)."""
    # fp32 weights of mixers have other bytes per element, and are few
    trained = [weight for weight in weights if weight.trained and not weight.wide]
    return (
        float(sum(weight.elements for weight in trained if not weight.expert)),
        float(sum(weight.elements for weight in trained if weight.expert)),
    )


def frozen_weight_bytes(run: Run, weights: Sequence[Weight]) -> tuple[float, float]:
    """Return the bytes of frozen weights as (dense, expert)."""
    frozen = [weight for weight in weights if not weight.trained]
    return (
        sum(frozen_bytes(run, one) * one.elements for one in frozen if not one.expert),
        sum(frozen_bytes(run, one) * one.elements for one in frozen if one.expert),
    )


def copied_bytes(run: Run, weights: Sequence[Weight]) -> float:
    """Return the bytes of low-precision copies of trained weights.

    With weights stored in 8 or 4 bits, they include those above `_LOW` bytes per weight.
    """
    precision = run.runtime.precision
    if run.kernels.torch_layers or not precision.low_precision:
        return 0.0
    trained = [weight for weight in weights if weight.trained and not weight.wide]
    less, copied = low_precision_bytes(run, sum(one.elements for one in trained if one.quantized))
    wider = (precision.element_bytes - _LOW) * sum(trained_elements(trained)) if less else 0.0
    return wider - less + copied


def frozen_states_of_run(run: Run) -> tuple[float, float]:
    """Return the (replicated, sharded) parts of frozen weights that ranks keep on the device.

    Both are 0 if weights are offloaded, except for those that FSDP2 gathers.
    """
    torch = run.kernels.torch_layers
    sharded = layout_of_run(run).weights.sharded if torch else run.split.zero == 3
    stored = 0.0 if run.runtime.optimizer.offload_weights else 1.0
    if not sharded:
        return stored, 0.0
    return (1.0 if torch and unsharded_bytes(run)[1] else 0.0), stored


def states_of_run(run: Run, *, staged: bool, several: bool = False) -> tuple[float, float]:
    """Return (replicated, sharded) state bytes per trained parameter at the end of a forward.

    run : run with one pipeline stage
    staged, several : True for its bytes with several stages, and with several micro-batches
    """
    if run.kernels.torch_layers:
        return _torch_states(run, staged=staged, several=several)
    return _megatron_states(run)


def _megatron_states(run: Run) -> tuple[float, float]:
    precision, optimizer, zero = run.runtime.precision, run.runtime.optimizer, run.split.zero
    element = float(precision.element_bytes)
    on_device = 1.0 - optimizer.offload
    master = optimizer.master_bytes * (on_device if optimizer.offload_master else 1.0)
    moments = optimizer.state_bytes * on_device * (0.5 if optimizer.kind == "muon" else 1.0)
    shared = (master if element == 2 else 0.0) + moments
    stored = _LOW if precision.fp8_weights or precision.fp4_weights else element
    whole = stored + precision.gradient_bytes
    if zero == 0:
        return whole + shared, 0.0
    if zero == 3:
        return 0.0, whole + shared
    return whole, shared


def _torch_states(run: Run, *, staged: bool, several: bool) -> tuple[float, float]:
    runtime = run.runtime
    if staged:
        # `torch.distributed.pipelining` reduces gradients after the last micro-batch
        states = replace(runtime.states, each_micro_batch=False)
        run = replace(run, runtime=replace(runtime, states=states))
    recipe = layout_of_run(run)
    # gradients of earlier micro-batches exist only if several are accumulated, as in pipelines
    kept = staged or several
    there = [
        entry
        for name, entry in recipe.kept
        if name != "gradients" or entry.always or (kept and not (entry.to_host and entry.sharded))
    ]
    whole = sum(entry.each_bytes for entry in there if not entry.sharded)
    shared = sum(entry.each_bytes for entry in there if entry.sharded)
    return whole + unsharded_bytes(run)[0], shared
