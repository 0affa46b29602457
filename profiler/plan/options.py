"""What `profile-plan` is asked to do, as one validated value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profiler.plan.job import Precision

__all__ = [
    "Backend",
    "DeviceChoice",
    "GlobalOptions",
    "Mode",
    "PlanOptions",
]

Mode = Literal["static", "dryrun", "run"]
Backend = Literal["auto", "nccl", "gloo"]
DeviceChoice = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, kw_only=True)
class GlobalOptions:
    """One strategy for all layers, as GLOBAL mode describes it; None is what was not given."""

    pp_deg: int | None = None
    global_tp_deg: int | None = None
    global_tp_consec: bool | None = None
    sdp: bool | None = None
    chunks: int | None = None
    global_checkpoint: bool | None = None
    pipeline_type: Literal["1f1b", "gpipe"] | None = None
    vocab_tp: int | None = None
    vocab_sp: bool | None = None
    embed_sdp: bool | None = None
    global_train_batch_size: int | None = None
    default_dp_type: Literal["ddp", "zero2"] | None = None
    use_ulysses: bool | None = None

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that were given, as they are written."""
        return tuple(
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of one check of a plan; defaults are those of the command."""

    plan: Path | None = None
    """A strategy or plan file; None: `uniform` says the plan."""
    uniform: GlobalOptions = GlobalOptions()
    model: str | None = None
    """Shipped name, config.json or model.json; None: the plan file's."""
    num_layers: tuple[int, ...] | None = None
    """Replaces the layers of the model, for all of its types or one by one."""
    seq_length: int | None = None
    mode: Mode | None = None
    """None: run where torchrun started the process, else static."""
    layers: int | None = None
    """Scale the plan down to so many layers."""
    global_batch: int | None = None
    num_microbatches: int | None = None
    world_size: int | None = None
    """Of a plan that does not say it."""
    steps: int = 2
    """Steps whose loss and gradient norm are compared with the reference."""
    timed_steps: int = 3
    """Steps after them whose time is taken."""
    seed: int = 0
    backend: Backend = "auto"
    device: DeviceChoice = "auto"
    precision: Precision | None = None
    """None: the plan file's; where it says none, bf16 for a dry run, else fp32."""
    sequence_parallel: bool | None = None
    async_grad_reduce: bool | None = None
    """None: the plan file's, or on."""
    reference: bool = True
    """Run one process without parallelism beside it."""
    timeout_s: float = 300.0
    """A communication that takes longer has failed."""
    ranks: tuple[str, ...] = ("first", "last", "largest")
    """Of a dry run: words for stages, `all`, or numbers of ranks."""
    json: str | None = None
    """Where the document goes; `-` is stdout."""
