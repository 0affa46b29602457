"""Properties of a run that depend on the release of Megatron-LM, its container and the device.

Each row of `_CHANGES` is a code change that affects memory, with the date of the first runs
that include it. Everything else about a run follows from its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from autopar.rates.devices import default_attention
from autopar.records import Record
from autopar.run.runtime import Allocator, AttentionKernel, PrecisionKind, Quirks
from search.engines.engine import EngineRelease

CORE: Mapping[str, str] = {
    "0.15": "2025-10-20", "0.16": "2026-02-02", "0.17": "2026-03-31", "0.18": "2026-06-01",
    "0.19": "2026-07-28", "0.20": "9999-12-31",
}  # fmt: skip
"""Release of Megatron-Core, oldest first -> date of its last commit from main (git merge-base of
the tag and main). Release 0.20 is main of August 2026."""


RELEASES = tuple(CORE)


def code_of(release: EngineRelease) -> Release:
    """Return the code of a release of Megatron-Core, as a date."""
    minor = ".".join(release.name.split(".")[:2])
    return Release(date=CORE.get(minor, Release().date))


class Release(Record):
    """Release of Megatron-LM, as a date, and the container that a run uses."""

    date: str = "9999-12-31"
    """Date of the Megatron-LM code in ISO format, such as 2026-08-19. Default: the newest."""
    container: Literal["dev", "lts"] = "dev"
    """Container: `dev` contains the newest libraries, `lts` older ones with long-term support."""

    @property
    def old_libraries(self) -> bool:
        """True for an `lts` container from before November 2025."""
        return self.container == "lts" and self.date < "2025-11"

    def has(self, change: str) -> bool:
        """Return True if the release includes a change of `_CHANGES`."""
        since, of_libraries = _CHANGES[change]
        return self.date >= since and not (of_libraries and self.old_libraries)


_CHANGES = {
    # Transformer Engine caches one dummy weight gradient per shape.
    "kept stand-ins": ("2025-08", True),
    # Experts of local Megatron layers use GEMMs of Transformer Engine, which allocate a workspace.
    "expert workspace": ("2025-10", True),
    # Router probabilities are applied inside the experts, not to their outputs.
    "weighted inside": ("2025-04-15", False),
    # The backward pass of unfused attention allocates a fourth tensor of scores.
    "fourth copy": ("2026", False),
    # The fused loss works in place and needs two fewer copies of the logits.
    "loss in place": ("2025-02", False),
    # With expert tensor parallelism, gathered tokens of experts are saved a second time.
    "regathered": ("2025-11", False),
    # Megatron-FSDP without `--data-parallel-sharding-strategy` shards everything (#3691).
    "sharded by default": ("2026-04", False),
    # `NullTokenizer` no longer adds its end-of-document token to the vocabulary.
    "given vocabulary": ("2026-01", False),
}
"""Change -> (first date, True if it is a change of the libraries of the container)."""


def quirks_of(release: Release, *, compiled_experts: bool = False) -> Quirks:
    """Return the memory behaviour that depends on the release.

    compiled_experts : True for grouped experts without Transformer Engine
    (`--moe-use-legacy-grouped-gemm`).
    """
    old = release.old_libraries
    return Quirks(
        kept_dummies=release.has("kept stand-ins"),
        # Grouped GEMMs of the old libraries allocate no workspaces.
        grouped_workspaces=0 if old else 4,
        compiled_experts=compiled_experts or old,
        expert_workspace=release.has("expert workspace"),
        saved_expert_output=not release.has("weighted inside"),
        unfused_backward_copies=4 if release.has("fourth copy") else 3,
        fused_loss_copies=9 if old else 5 if release.has("loss in place") else 7,
        regathered_experts=release.has("regathered"),
    )


def allocator_of(environment: Mapping[str, Any]) -> Allocator:
    """Return the PyTorch allocator and cuBLAS workspace settings of environment variables."""
    settings = str(environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    return Allocator(
        expandable="expandable_segments:true" in settings.lower(),
        cublas=None if config is None else str(config),
    )


def attention_kernel(
    release: Release,
    gpu: str,
    environment: Mapping[str, Any],
    *,
    precision: PrecisionKind,
    local: bool,
    backend: str,
) -> AttentionKernel:
    """Return the attention kernel: `backend`, or for `auto` the choice of Transformer Engine.

    environment : environment variables of the ranks.
    local : True for layers without Transformer Engine.
    """
    if local:
        return "local"
    if backend != "auto":
        return cast(AttentionKernel, backend)
    # The value 0 excludes kernels with nondeterministic summation order.
    deterministic = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")) == "0"
    if release.old_libraries and deterministic:
        return "unfused"
    kernel = default_attention(gpu, precision=precision, deterministic=deterministic)
    if kernel == "unfused":
        return kernel
    fused = kernel == "fused"
    # One variable for each of the two kernels can disable it.
    if str(environment.get("NVTE_FUSED_ATTN", "1")) == "0":
        fused = False
    elif str(environment.get("NVTE_FLASH_ATTN", "1")) == "0":
        fused = True
    return "fused" if fused else "flash"
