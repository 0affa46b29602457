"""What a trainer keeps on the host: activations by module, optimizer states by fraction.

Records, and which of them exclude each other. What leaves a device is counted by
`autopar.memory`, what the copies take by `autopar.estimate`.
"""

from __future__ import annotations

from typing import Literal, get_args

from autopar.errors import InputError
from autopar.records import dataclass

__all__ = ["OFFLOADED", "Offload", "OffloadModule"]

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""Of which what autograd saves goes to the host, in Megatron-Core's words
(docs/user-guide/features/fine_grained_activation_offloading.md)."""
OFFLOADED: tuple[OffloadModule, ...] = get_args(OffloadModule)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Activations that wait on the host for their backward."""

    modules: frozenset[OffloadModule] = frozenset()
    """Of every layer (`--offload-modules`)."""
    fraction: float = 1.0
    """Of what the modules save (`--activation-offload-fraction`)."""
    layers: int = 0
    """The first so many layers whole (`--cpu-offloading-num-layers`); 0: none."""
    least_elements: int = 1 << 20
    """Smaller tensors stay (`--min-offloaded-tensor-size`)."""

    def __post_init__(self) -> None:
        """Refuse what Megatron-Core's configuration refuses."""
        unknown = sorted(self.modules - set(OFFLOADED))
        if unknown:
            raise InputError(f"offloaded are {', '.join(OFFLOADED)}, got {unknown[0]}")
        if not 0 <= self.fraction <= 1:
            raise InputError(f"the offloaded fraction is {self.fraction}, expected 0 to 1")
        if self.layers < 0 or self.least_elements < 0:
            raise InputError("numbers of offloaded layers and elements are 0 or more")
        if "attn_proj" in self.modules and "core_attn" not in self.modules:
            # transformer_config.py: what attn_proj saves is core_attn's output
            raise InputError("attn_proj is offloaded together with core_attn alone; add core_attn")
        if self.modules and self.layers:
            raise InputError("activations are offloaded by module or by layer, not both")

    @property
    def any(self) -> bool:
        """Whether something goes to the host."""
        return bool((self.modules and self.fraction > 0) or self.layers)
