"""What a trainer keeps on the host: activations by module, optimizer states by fraction.

What may be offloaded, which of it excludes what, and the seconds of copies and of updates on the
host. What leaves a device is counted by `autopar.price`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from autopar.records import Record

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""Of which what autograd saves goes to the host, in Megatron-Core's words
(docs/user-guide/features/fine_grained_activation_offloading.md)."""
OFFLOADED: tuple[OffloadModule, ...] = get_args(OffloadModule)


# --------------------------------------------------------------------------------------------------
# Seconds.


class Host(Record):
    """A GPU's share of its host, in bytes/s."""

    link_bytes_per_s: float
    """Of the link to it, each direction, as copies reach it."""
    memory_bytes_per_s: float
    """Of its memory, by the datasheet."""


ADAM_BYTES = 28.0
"""Of a parameter: fp32 weight, gradient and two moments read, all but the gradient written."""
HostAdam = Literal["torch", "deepspeed"]
"""Whose Adam runs on the host: torch's, or DeepSpeed's with vector instructions."""
HOST_SHARES: Mapping[HostAdam, float] = {"torch": 0.25, "deepspeed": 0.43}
"""Of the memory's rate that Adam on the host reaches.

torch: fitted to Megatron-Bridge's Qwen3-30B-A3B on 16 H100 (TP2 PP2 EP4, 1.91e9 parameters updated
by a rank; skills/nemo-mbridge-perf-cpu-offloading/card.yaml): steps of 0.996 s without offload, and
1.871, 2.484, 3.187 and 4.189 s with 25, 50, 75 and 100 % of the states on the host; within 6 %.
deepspeed: ZeRO-Offload (arXiv 2101.06840), table 4: 0.22, 1.03 and 2.57 s for 1, 4 and 10 billion
parameters on a DGX-2, whose two Xeons have 12 channels of DDR4-2666, 256 GB/s: .50, .42 and .43."""


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
    """Return the seconds of an update of so many parameters by the host's processors.

    Gradients come down, Adam runs, weights go up, one after the other; with `overlap` the copies of
    a part, which run both ways at once, hide under the update of another, or it under them.
    gradient_bytes, weight_bytes : of a parameter, as they are copied.
    """
    update = parameters * ADAM_BYTES / (host.memory_bytes_per_s * HOST_SHARES[adam])
    down, up = (copy_s(host, parameters * each) for each in (gradient_bytes, weight_bytes))
    return max(update, down, up) if overlap else update + down + up


def exposed_s(copied_s: float, hidden_under_s: float) -> float:
    """Return what of a copy is not hidden under the compute that runs beside it, in seconds."""
    return max(0.0, copied_s - hidden_under_s)
