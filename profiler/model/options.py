"""What `profile-model` is asked to do, as one validated value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "GALVATRON_BATCHES",
    "DeviceChoice",
    "Dtype",
    "Mode",
    "ModelOptions",
    "ProfileType",
    "Source",
    "TensorImplementation",
    "Unit",
]

Mode = Literal["static", "batch", "sequence"]
ProfileType = Literal["computation", "memory"]
Source = Literal["auto", "device", "exact"]
DeviceChoice = Literal["auto", "cuda", "cpu"]
Dtype = Literal["bf16", "fp16", "fp32"]
TensorImplementation = Literal["megatron", "dtensor"]
Unit = Literal["all", "attention", "mlp"]

GALVATRON_BATCHES = 8
"""Galvatron's search refuses batch mode with fewer batch sizes."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options of one profiling run; defaults are those of the command."""

    model: str
    """Shipped name, config.json, model.json, `hf:...` or `py:package.module:factory`."""
    mode: Mode = "static"
    profile_types: tuple[ProfileType, ...] = ("computation", "memory")
    source: Source = "auto"
    """auto: memory counted exactly, time taken on the device."""
    device: DeviceChoice = "auto"
    """auto: the GPU if torch finds one, else the CPU."""
    dtype: Dtype = "bf16"
    degrees: tuple[int, ...] | None = None
    """Increasing tensor degrees, with 1; None: those of 1, 2, 4, 8 that the model allows."""
    tp_impl: TensorImplementation = "megatron"
    batches: tuple[int, ...] = (8,)
    """Increasing batch sizes of the times."""
    seq_lengths: tuple[tuple[int, ...], ...] | None = None
    """Cases of one length for all layer types, or one per type; None: what the mode wants."""
    layernum_min: int = 2
    layernum_max: int = 4
    """Layers of each type in the whole forwards that check a layer by difference."""
    backward: bool = True
    """Also time backward, recomputation and the optimizer step."""
    unit: Unit = "all"
    """The whole layer, or one half of it."""
    vocab_divisor: int | None = None
    """Replaces the model's `make_vocab_size_divisible_by`."""
    out: Path | None = None
    """Folder of all files; None: `models/NAME/configs`, with times in a folder of the device."""
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    iters: int = 50
    """Most timed repetitions of a cell."""
    warmup: int = 5
    """Most untimed repetitions of a cell; slow cells take fewer, at least one."""
    max_seconds: float = 2.0
    """After so many seconds no further repetition of one quantity begins."""
