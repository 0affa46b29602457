"""Differences between releases of Megatron-LM and its container, and between devices.

Each row of `_CHANGES` is a code change that affects memory, with the date of its first runs.
Everything else about a run follows from its arguments. This module contains no sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from autopar.records import Record
from autopar.run.runtime import Allocator, AttentionKernel, Quirks, default_attention


class Release(Record):
    """Date of a run, and which of the engine's two containers it uses."""

    date: str = "9999-12-31"
    """Date of the engine in ISO format, such as 2026-08-19. Default: newer than any release."""
    container: Literal["dev", "lts"] = "dev"
    """Container: `dev` has the newest libraries, `lts` those that are kept for a year."""

    @property
    def old_libraries(self) -> bool:
        """True if the container is the long-term one from before November 2025."""
        return self.container == "lts" and self.date < "2025-11"

    def has(self, change: str) -> bool:
        """Return whether the release includes a change of `_CHANGES`."""
        since, of_libraries = _CHANGES[change]
        return self.date >= since and not (of_libraries and self.old_libraries)


_CHANGES = {
    # Transformer Engine keeps one dummy weight gradient of each shape.
    "kept stand-ins": ("2025-08", True),
    # Experts of Megatron's own layers use a GEMM of Transformer Engine.
    "expert workspace": ("2025-10", True),
    # Router probabilities are applied inside the experts, not to their outputs.
    "weighted inside": ("2025-04-15", False),
    # Unfused attention multiplies in one more tensor.
    "fourth copy": ("2026", False),
    # The fused loss works in place, which saves two copies of the logits.
    "loss in place": ("2025-02", False),
    # Tokens gathered for experts that tensor parallelism splits are saved a second time.
    "regathered": ("2025-11", False),
    # `NullTokenizer` no longer adds its end-of-document token to the vocabulary.
    "given vocabulary": ("2026-01", False),
}
"""Change -> (first date, True if it comes with the container's libraries)."""


def quirks_of(release: Release, *, compiled_experts: bool = False) -> Quirks:
    """Return the memory behaviour that is specific to a release.

    compiled_experts : True if the run uses the grouped experts that precede Transformer Engine's.
    """
    old = release.old_libraries
    return Quirks(
        kept_dummies=release.has("kept stand-ins"),
        # The old libraries have another grouped GEMM, without workspaces.
        grouped_workspaces=0 if old else 4,
        compiled_experts=compiled_experts or old,
        expert_workspace=release.has("expert workspace"),
        saved_expert_output=not release.has("weighted inside"),
        unfused_backward_copies=4 if release.has("fourth copy") else 3,
        fused_loss_copies=9 if old else 5 if release.has("loss in place") else 7,
        regathered_experts=release.has("regathered"),
    )


def allocator_of(environment: Mapping[str, Any]) -> Allocator:
    """Return the allocator settings in the environment variables of the ranks."""
    settings = str(environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    return Allocator(
        expandable="expandable_segments:true" in settings.lower(),
        cublas=None if config is None else str(config),
    )


def attention_kernel(
    release: Release, gpu: str, environment: Mapping[str, Any], *, local: bool, backend: str
) -> AttentionKernel:
    """Return the attention kernel: as requested, else the choice of Transformer Engine."""
    if local:
        return "local"
    if backend != "auto":
        return cast(AttentionKernel, backend)
    # The variable allows kernels whose sums depend on the order of their blocks.
    deterministic = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")) == "0"
    if release.old_libraries and deterministic:
        return "unfused"
    fused = default_attention(gpu, deterministic=deterministic) == "fused"
    # Each of the two kernels can be disabled by a variable.
    if str(environment.get("NVTE_FUSED_ATTN", "1")) == "0":
        fused = False
    elif str(environment.get("NVTE_FLASH_ATTN", "1")) == "0":
        fused = True
    return "fused" if fused else "flash"
