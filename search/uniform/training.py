"""What is trained of a model and where its optimizer's states lie, whatever the degrees.

Given, not chosen: LoRA changes what is learned, and so may states of fewer bits. What a trainer
does not have is refused where its launch is made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from autopar.memory.launch import Launch
from autopar.records import dataclass
from autopar.training.adapters import Adapters, BaseKind

__all__ = ["BASES", "OPTIMIZERS", "OptimizerName", "Training", "trained"]

OptimizerName = Literal["adam", "adam-bf16", "adam8bit"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("adam", "adam-bf16", "adam8bit")
"""Adam with moments of 32 bits, of 16 (Megatron-Core's precision-aware optimizer), and of 8 with a
scale of each 256 (bitsandbytes)."""
BASES: dict[str, BaseKind] = {"bf16": "16 bits", "int8": "int8", "nf4": "nf4"}
"""Word -> in what the frozen weights beside adapters are kept."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Adapters and optimizer of a launch."""

    lora_rank: int | None = None
    """Of low-rank adapters beside frozen weights; None: all weights are trained."""
    lora_base: str = "bf16"
    """Of `BASES`."""
    optimizer: OptimizerName = "adam"
    offload: float = 0.0
    """Share of the optimizer's states that lie, and are updated, on the host."""

    @property
    def words(self) -> str:
        """The options that say it, empty where all weights are trained with Adam on the device."""
        found = []
        if self.lora_rank is not None:
            found.append(f"--lora {self.lora_rank}")
            if self.lora_base != "bf16":
                found.append(f"--lora-base {self.lora_base}")
        if self.optimizer != "adam":
            found.append(f"--optimizer {self.optimizer}")
        if self.offload:
            found.append(f"--offload-optimizer {self.offload:g}")
        return " ".join(found)


def trained(launch: Launch, training: Training) -> Launch:
    """Return a launch that trains so; raises InputError where its trainer does not."""
    if training == Training():
        return launch
    optimizer = launch.optimizer
    if training.optimizer == "adam-bf16":
        optimizer = replace(optimizer, moments_bytes=4)
    elif training.optimizer == "adam8bit":
        optimizer = replace(optimizer, kind="adam8bit")
    if training.offload:
        trainer = launch.trainer
        deepspeed = trainer is not None and trainer.keeper == "deepspeed"
        optimizer = replace(
            optimizer,
            offload=training.offload,
            # DeepSpeed's master weights go with the moments, FSDP's weights with everything
            offload_master=deepspeed,
            offload_weights=trainer is not None and not deepspeed,
        )
    adapters = None
    if training.lora_rank is not None:
        adapters = Adapters(
            rank=training.lora_rank,
            base=BASES[training.lora_base],
            # Megatron's matrices are one of queries, keys and values, and one of gate and up
            fused=launch.trainer is None,
        )
    return replace(launch, optimizer=optimizer, adapters=adapters)
