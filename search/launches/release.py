"""What differs between releases of Megatron-LM and its container, and between devices.

Each row is a change of code that changes memory, by the month from which runs have it; everything
else of a launch is in its arguments. Nothing here is a byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from autopar.memory.launch import AttentionKernel, Software
from autopar.records import dataclass

__all__ = ["Release", "software_of"]


@dataclass(frozen=True, kw_only=True)
class Release:
    """When a launch ran, and in which of the trainer's two containers."""

    date: str = "9999-12-31"
    """Of the trainer, as 2026-08-19; default: newer than any."""
    container: Literal["dev", "lts"] = "dev"
    """Its newest libraries, or those that are kept for a year."""

    @property
    def old_libraries(self) -> bool:
        """Whether the long-lived container is the one before November 2025."""
        return self.container == "lts" and self.date < "2025-11"

    def has(self, since: str) -> bool:
        """Return whether a change of the libraries of a month is in."""
        return self.date >= since and not self.old_libraries

    @property
    def null_adds_one(self) -> bool:
        """Whether the stand-in tokenizer adds a token to the vocabulary."""
        return self.date < "2026-01"


def software_of(
    release: Release,
    *,
    gpu: str,
    environment: Mapping[str, Any],
    local: bool,
    backend: str,
    deterministic: bool,
    fused_accumulation: bool,
) -> Software:
    """Return the software of a launch, whose attention kernel follows from device and release."""
    kernel = _kernel(release, gpu, environment, local=local, backend=backend)
    settings = str(environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    config = environment.get("CUBLAS_WORKSPACE_CONFIG")
    return Software(
        gpu=gpu,
        attention=kernel,
        local_layers=local,
        cublas_config=None if config is None else str(config),
        expandable_segments="expandable_segments:true" in settings.lower(),
        fused_accumulation=fused_accumulation,
        kept_dummies=release.has("2025-08"),
        grouped_workspaces=0 if release.old_libraries else 4,
        expert_workspace=release.has("2025-10"),
        saved_expert_output=release.date < "2025-04-29",
        compiled_experts=release.old_libraries,
        unfused_backward_copies=4 if release.date >= "2026" else 3,
        fused_loss_copies=9 if release.old_libraries else 7 if release.date < "2025-02" else 5,
        regathered_experts=release.date >= "2025-11",
    )


def _kernel(
    release: Release, gpu: str, environment: Mapping[str, Any], *, local: bool, backend: str
) -> AttentionKernel:
    if local:
        return "local"
    if backend in ("flash", "fused", "unfused", "local"):
        chosen: AttentionKernel = backend  # type: ignore[assignment]
        return chosen
    deterministic = str(environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")) == "0"
    if release.old_libraries and deterministic:
        return "unfused"
    if gpu.upper().startswith("A100"):
        return "flash"
    if gpu.upper().startswith(("GB200", "B200", "B300", "GB300")) and deterministic:
        return "flash"
    return "fused"
