"""What an optimizer's step takes: of the states that a device updates, and of those the host does.

How gradients come to the ranks that update them is `autopar.estimate.step`.
"""

from __future__ import annotations

from autopar.estimate.job import FP32_STATES, Job
from autopar.estimate.memory_bound import optimizer_s
from autopar.estimate.parts.operations import Machine
from autopar.training.offload import Host, host_update_s

__all__ = ["host_of", "optimizer_time_s"]


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
    )


def host_of(machine: Machine) -> Host:
    """Return a GPU's share of its host; raises DocumentError where the card does not say it."""
    card = machine.card
    return Host(
        link_bytes_per_s=card.need("host.bytes_per_s", "offloading")
        * card.need("host.efficiency", "offloading"),
        memory_bytes_per_s=card.need("host.memory_bytes_per_s", "offloading"),
    )
