"""What an update takes, on the device and on the host, and copies to the host and back.

How gradients come to the ranks that update them, and what compute there is to hide a copy under, is
`autopar.price.step`.
"""

from __future__ import annotations

from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.memory_bound import cast_s, optimizer_s
from autopar.rates.parts.operations import Machine
from autopar.run.job import FP32_STATES, Block, Job, parameters
from autopar.training.offload import Host, copy_s, exposed_s, host_update_s


def optimizer_time_s(machine: Machine, job: Job, own: float, resident: float) -> float:
    """Return the seconds of an update of `own` parameters with `resident` gradients.

    What the host updates of them comes on top: it begins when gradients are there, and the device
    has little to do beside it.
    """
    figures = machine.stack.figures
    gradient = job.gradient_bytes or figures.gradient["reduce_bytes"]
    moved = job.optimizer_bytes or figures.optimizer["bytes"]
    # a stack's figure is of fp32 moments and weights, each read and written
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
    if not offloaded:
        return device
    # fp32 weights that the device keeps come back as they are
    weight = job.element_bytes if job.offloaded_master else 4.0
    return device + host_update_s(
        host_of(machine),
        offloaded,
        gradient_bytes=4.0,
        weight_bytes=0.0 if job.offloaded_weights else weight,
        overlap=job.overlap_offload,
        adam=job.host_adam,
    )


def host_of(machine: Machine) -> Host:
    """Return a GPU's share of its host; raises DocumentError where the card does not say it."""
    card = machine.card
    return Host(
        link_bytes_per_s=card.need("host.bytes_per_s", "offloading")
        * card.need("host.efficiency", "offloading"),
        memory_bytes_per_s=card.need("host.memory_bytes_per_s", "offloading"),
    )


def activation_copies_s(
    machine: Machine, offloaded_bytes: float, forward_s: float, device_s: float
) -> float:
    """Return what copies of a layer's activations to the host and back add to its micro-batch.

    They go down while the forward computes the layer and up while the backward does, each on a
    stream of its own (Megatron-Core pipeline_parallel/fine_grained_activation_offload.py): seen is
    what takes longer than that. What they take of the device's memory rate is left out.

    forward_s, device_s : of the layer's forward, and of forward and backward.
    """
    copied = copy_s(host_of(machine), offloaded_bytes)
    forward = min(forward_s, device_s)
    return exposed_s(copied, forward) + exposed_s(copied, device_s - forward)


def weight_copies_s(machine: Machine, loaded_bytes: float, device_s: float) -> float:
    """Return what loading a stage's weights adds to its micro-batch.

    A rank's own part comes in front of the forward and again of the backward, ahead of the layer
    that is computed (DeepSpeed's prefetch, FSDP2's CPUOffloadPolicy), and is then gathered.
    """
    if not loaded_bytes:
        return 0.0
    return exposed_s(2.0 * copy_s(host_of(machine), loaded_bytes), device_s)


def weights_cast_s(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of quantising a layer's weights, which keep their value for a step."""
    moved = machine.stack.figures.cast["bytes"]
    if ELEMENT_BYTES[job.precision] >= ELEMENT_BYTES["bf16"] or not moved:
        return 0.0
    experts, dense = parameters(block)
    held = experts / (job.ep * job.etp) + (0.0 if job.experts_only else dense / job.tp)
    return float(cast_s(machine.kernels, held, dtype=job.precision, bytes_per_element=moved))
