"""What differs between releases of Megatron-LM and its container, and between devices.

Each row of `_CHANGES` is a change of code that changes memory, by the day from which runs have it;
everything else of a run is in its arguments. Nothing here is a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from autopar.records import Record
from autopar.run.runtime import Allocator, AttentionKernel, Quirks, default_attention


class Release(Record):
    """When a run was, and in which of the trainer's two containers."""

    date: str = "9999-12-31"
    """Of the trainer, as 2026-08-19; default: newer than any."""
    container: Literal["dev", "lts"] = "dev"
    """Its newest libraries, or those that are kept for a year."""

    @property
    def old_libraries(self) -> bool:
        """Whether the long-lived container is the one before November 2025."""
        return self.container == "lts" and self.date < "2025-11"

    def has(self, change: str) -> bool:
        """Return whether a change of `_CHANGES` is in."""
        since, of_libraries = _CHANGES[change]
        return self.date >= since and not (of_libraries and self.old_libraries)


_CHANGES = {
    # Transformer Engine keeps one stand-in of each shape of weight gradient
    "kept stand-ins": ("2025-08", True),
    # experts of Megatron's own layers use a product of Transformer Engine
    "expert workspace": ("2025-10", True),
    # the router's probabilities are applied inside the experts, not to their outputs
    "weighted inside": ("2025-04-15", False),
    # attention that is not fused multiplies in one more tensor
    "fourth copy": ("2026", False),
    # the fused loss works in place of two copies
    "loss in place": ("2025-02", False),
    # tokens that were gathered for split experts are kept a second time
    "regathered": ("2025-11", False),
    # the stand-in tokenizer no longer adds its end of document to the vocabulary
    "given vocabulary": ("2026-01", False),
}
"""Day from which a change is in, and whether the container's libraries bring it."""


def quirks_of(release: Release, *, compiled_experts: bool = False) -> Quirks:
    """Return what a release does in memory otherwise than others.

    compiled_experts : grouped experts before Transformer Engine's are asked for.
    """
    old = release.old_libraries
    return Quirks(
        kept_dummies=release.has("kept stand-ins"),
        # those libraries have grouped products of another kind, without workspaces
        grouped_workspaces=0 if old else 4,
        compiled_experts=compiled_experts or old,
        expert_workspace=release.has("expert workspace"),
        saved_expert_output=not release.has("weighted inside"),
        unfused_backward_copies=4 if release.has("fourth copy") else 3,
        fused_loss_copies=9 if old else 5 if release.has("loss in place") else 7,
        regathered_experts=release.has("regathered"),
    )


def allocator_of(environment: Mapping[str, Any]) -> Allocator:
    """Return the settings of the allocator that variables of the ranks make."""
    settings = str(environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    return Allocator(
        expandable="expandable_segments:true" in settings.lower(),
        cublas=None if config is None else str(config),
    )


def attention_kernel(
    release: Release, gpu: str, environment: Mapping[str, Any], *, local: bool, backend: str
) -> AttentionKernel:
    """Return the kernel of attention: as asked, else what Transformer Engine takes by itself."""
    if local:
        return "local"
    if backend != "auto":
        return cast(AttentionKernel, backend)
    # the variable that allows kernels whose sums depend on the order of their blocks
    deterministic = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")) == "0"
    if release.old_libraries and deterministic:
        return "unfused"
    fused = default_attention(gpu, deterministic=deterministic) == "fused"
    # either can be switched off
    if str(environment.get("NVTE_FUSED_ATTN", "1")) == "0":
        fused = False
    elif str(environment.get("NVTE_FLASH_ATTN", "1")) == "0":
        fused = True
    return "fused" if fused else "flash"
