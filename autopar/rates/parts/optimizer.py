"""Seconds of the optimizer on device and host, and of offload copies.

The reduction of gradients, and compute that can hide a copy, are in `autopar.price.step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.kernels import gemm_s
from autopar.rates.memory_bound import cast_s, elements_s, optimizer_s
from autopar.rates.parts.operations import Machine
from autopar.records import Record
from autopar.run.job import (
    FP32_STATES,
    Block,
    Job,
    Matrices,
    data_shards,
    expert_shards,
    parameters,
)
from autopar.run.runtime import HostAdam


def optimizer_time_s(machine: Machine, job: Job, own: float, resident: float) -> float:
    """Return the seconds of an update of `own` parameters that reads `resident` gradients.

    Host updates of offloaded states are added: they begin when gradients are available, and the
    device has little to do at that time. So are copies of paged moments.
    """
    figures = machine.stack.figures
    gradient = job.gradient_bytes or figures.gradient["reduce_bytes"]
    moved = job.optimizer_bytes or figures.optimizer["bytes"]
    # The figure of a stack assumes fp32 moments and weights, each read and written.
    moved -= 2.0 * (FP32_STATES - job.state_bytes)
    offloaded = own * job.optimizer_offload
    device = float(
        optimizer_s(
            machine.kernels,
            own - offloaded,
            resident,
            bytes_per_own=moved,
            gradient_bytes=gradient,
        )
    )
    if job.paged_bytes:
        device += 2.0 * copy_s(host_of(machine), own * job.paged_bytes)
    if not offloaded:
        return device
    # fp32 weights that the device keeps return without conversion.
    weight = job.element_bytes if job.offloaded_master else 4.0
    return device + host_update_s(
        host_of(machine),
        offloaded,
        gradient_bytes=4.0,
        weight_bytes=0.0 if job.offloaded_weights else weight,
        overlap=job.overlap_offload,
        adam=job.host_adam,
    )


_ITERATIONS = 5
_WHOLE_BYTES = 32.0
"""Bytes per element that kernels around the iterations move: norm (4), division (8), casts to bf16
and back (12), scale (8)."""


def orthogonalization_s(machine: Machine, matrices: Sequence[Matrices]) -> float:
    """Return the seconds of Muon's Newton-Schulz iterations on a rank, as derived from GEMM rates.

    One of 5 iterations of an m x n matrix X, m <= n, has three bf16 GEMMs of 4 m^2 n + 2 m^3 FLOP:
    A = X X^T, A A, and their sum times X. Matrices are distributed over ranks by cost, so a rank
    has an equal part, and at least one matrix.

    No measured run was compared. Sources: newton_schulz of Emerging-Optimizers (muon_utils.py);
    LayerWiseDistributedOptimizer of Megatron-Core 0.20.
    """
    kernels = machine.kernels
    clock = kernels.product_clock("bf16", machine.clock)
    loads = dict[int, tuple[float, float]]()
    for one in matrices:
        small, large = sorted((one.rows, one.columns))
        shapes = np.array([(small, small, large), (small, small, small), (small, large, small)])
        gemms = gemm_s(kernels, *shapes.T, clock=clock, sustained=True).sum()
        around = elements_s(kernels, small * large, _WHOLE_BYTES, count=5)
        seconds = float(_ITERATIONS * gemms + around)
        total, longest = loads.get(one.ranks, (0.0, 0.0))
        loads[one.ranks] = (total + seconds * one.number / one.ranks, max(longest, seconds))
    # dense weights and experts have separate optimizers, one after the other
    return sum(max(load) for load in loads.values())


def host_of(machine: Machine) -> Host:
    """Return link and memory rates of a GPU's host; raises DocumentError if the card has none."""
    card = machine.card
    return Host(
        link_bytes_per_s=card.need("host.bytes_per_s", "offloading")
        * card.need("host.efficiency", "offloading"),
        memory_bytes_per_s=card.need("host.memory_bytes_per_s", "offloading"),
    )


def activation_copies_s(
    machine: Machine, offloaded_bytes: float, forward_s: float, device_s: float
) -> float:
    """Return the exposed seconds of activation offload of a layer, per micro-batch.

    Copies to the host run while the forward computes the layer, copies back while its backward
    does, each on a separate stream (Megatron-Core
    pipeline_parallel/fine_grained_activation_offload.py). Only the time beyond that compute is
    exposed. Their use of device memory bandwidth is ignored.

    forward_s, device_s : seconds of the layer's forward, and of forward and backward.
    """
    copied = copy_s(host_of(machine), offloaded_bytes)
    forward = min(forward_s, device_s)
    return exposed_s(copied, forward) + exposed_s(copied, device_s - forward)


def weight_copies_s(machine: Machine, loaded_bytes: float, device_s: float) -> float:
    """Return the exposed seconds of loading a stage's weights from the host, per micro-batch.

    A rank's shard is loaded before the forward and again before the backward, ahead of the layer
    that is computed (DeepSpeed's prefetch, FSDP2's CPUOffloadPolicy), and is then gathered.
    """
    if not loaded_bytes:
        return 0.0
    return exposed_s(2.0 * copy_s(host_of(machine), loaded_bytes), device_s)


def weights_cast_s(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of quantising a layer's weights, which are constant during a step."""
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[job.precision] >= ELEMENT_BYTES["bf16"] or not moved:
        return 0.0
    experts, dense = parameters(block)
    # shards are quantised before they are gathered
    sharded = job.zero == 3 and job.gathered_bytes is not None and job.gathered_bytes < 2.0
    of_experts, of_dense = (expert_shards(job), data_shards(job)) if sharded else (1, 1)
    held = experts / (job.ep * job.etp * of_experts)
    held += 0.0 if job.experts_only else dense / (job.tp * of_dense)
    return float(cast_s(machine.kernels, held, dtype=job.precision, bytes_per_element=moved))


# --------------------------------------------------------------------------------------------------
# The host.


class Host(Record):
    """Rates of host link and host memory available to one GPU."""

    link_bytes_per_s: float
    """Copy rate of the link to the host, each direction."""
    memory_bytes_per_s: float
    """Datasheet rate of the host memory."""


ADAM_BYTES = 28.0
"""Bytes per parameter: fp32 weight, gradient and two moments read, all but the gradient written."""
HOST_SHARES: Mapping[HostAdam, float] = {"torch": 0.25, "deepspeed": 0.43}
"""Fraction of the host memory rate that Adam on the host reaches.

torch: fitted to Megatron-Bridge's Qwen3-30B-A3B on 16 H100 (TP2 PP2 EP4, 1.91e9 parameters updated
by a rank; skills/nemo-mbridge-perf-cpu-offloading/card.yaml): steps of 0.996 s without offload, and
1.871, 2.484, 3.187 and 4.189 s with 25, 50, 75 and 100 % of the states on the host; within 6 %.

deepspeed: ZeRO-Offload (arXiv 2101.06840), table 4: 0.22, 1.03 and 2.57 s for 1, 4 and 10 billion
parameters on a DGX-2, whose two Xeons have 12 channels of DDR4-2666, 256 GB/s: .50, .42 and .43.
"""


def copy_s(host: Host, num_bytes: float) -> float:
    """Return the seconds of a copy to or from the host."""
    return num_bytes / host.link_bytes_per_s


def host_update_s(
    host: Host,
    parameters: float,
    *,
    gradient_bytes: float,
    weight_bytes: float,
    overlap: bool,
    adam: HostAdam = "torch",
) -> float:
    """Return the seconds of an update of `parameters` parameters by the host's processors.

    Gradients are copied to the host, Adam runs, and weights are copied back, in sequence. With
    `overlap` these run concurrently on different parts, copies in both directions at once, and the
    longest counts.

    gradient_bytes, weight_bytes : bytes per parameter as copied.
    """
    update = parameters * ADAM_BYTES / (host.memory_bytes_per_s * HOST_SHARES[adam])
    down, up = (copy_s(host, parameters * each) for each in (gradient_bytes, weight_bytes))
    return max(update, down, up) if overlap else update + down + up


def exposed_s(copied_s: float, hidden_under_s: float) -> float:
    """Return the exposed seconds of a copy that runs during compute of `hidden_under_s`."""
    return max(0.0, copied_s - hidden_under_s)
