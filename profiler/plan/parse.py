"""Reads the options of `profile-plan`: texts in, one validated value out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from autopar.documents.json import shorten
from autopar.errors import OptionError
from profiler.option_values import choice, count, names, seconds
from profiler.plan.job import Precision
from profiler.plan.options import Backend, DeviceChoice, GlobalOptions, Mode, PlanOptions

__all__ = ["MAX_WORLD", "build_options"]

MAX_WORLD = 1 << 20
_MAX_SIZE = 1 << 28
_MAX_STEPS = 10**6
_MAX_LAYERS = 1 << 16
_MAX_SEED = (1 << 63) - 1
_STAGES = ("first", "last", "largest", "all")
_PIPELINES: Mapping[str, Literal["1f1b", "gpipe"]] = {
    "gpipe": "gpipe",
    "pipedream_flush": "1f1b",
    "1f1b": "1f1b",
}


def build_options(
    *,
    plan: Path | None = None,
    model: str | None = None,
    num_layers: str | None = None,
    seq: int | None = None,
    mode: str | None = None,
    world_size: int | None = None,
    layers: int | None = None,
    global_batch: int | None = None,
    microbatches: int | None = None,
    steps: int = 2,
    timed_steps: int = 3,
    seed: int = 0,
    reference: bool = True,
    ranks: str = "first,last,largest",
    backend: str = "auto",
    device: str = "auto",
    mixed_precision: str | None = None,
    sequence_parallel: bool | None = None,
    async_grad_reduce: bool | None = None,
    timeout: float = 300.0,
    json: str | None = None,
    pp_deg: int | None = None,
    global_tp_deg: int | None = None,
    global_tp_consec: int | None = None,
    sdp: int | None = None,
    chunks: int | None = None,
    global_checkpoint: int | None = None,
    pipeline_type: str | None = None,
    vocab_tp: int | None = None,
    vocab_sp: int | None = None,
    embed_sdp: int | None = None,
    global_train_batch_size: int | None = None,
    default_dp_type: str | None = None,
    use_ulysses: bool | None = None,
) -> PlanOptions:
    """Return the options that these words of a command line mean.

    Raises
    ------
    OptionError: a value is unusable, or two options contradict each other.
    """
    chosen_backend: Backend = choice("--backend", backend, names(Backend))
    chosen_device: DeviceChoice = choice("--device", device, names(DeviceChoice))
    if chosen_backend == "nccl" and chosen_device == "cpu":
        raise OptionError(
            "--backend nccl communicates between GPUs and --device is cpu; leave one of them out"
        )
    if chosen_backend == "gloo" and chosen_device == "cuda":
        raise OptionError(
            "--backend gloo runs the plan on the CPU and --device is cuda; leave one of them out"
        )
    uniform = GlobalOptions(
        pp_deg=_whole("--pp-deg", pp_deg, MAX_WORLD),
        global_tp_deg=_whole("--global-tp-deg", global_tp_deg, MAX_WORLD),
        global_tp_consec=_flag("--global-tp-consec", global_tp_consec),
        sdp=_flag("--sdp", sdp),
        chunks=_whole("--chunks", chunks, _MAX_SIZE),
        global_checkpoint=_flag("--global-checkpoint", global_checkpoint),
        pipeline_type=_word("--pipeline-type", pipeline_type, _PIPELINES),
        vocab_tp=_whole("--vocab-tp", vocab_tp, MAX_WORLD),
        vocab_sp=_flag("--vocab-sp", vocab_sp),
        embed_sdp=_flag("--embed-sdp", embed_sdp),
        global_train_batch_size=_whole(
            "--global-train-batch-size", global_train_batch_size, _MAX_SIZE
        ),
        default_dp_type=_word(
            "--default-dp-type", default_dp_type, {"ddp": "ddp", "zero2": "zero2"}
        ),
        use_ulysses=use_ulysses,
    )
    if plan is None and not uniform.given:
        raise OptionError(
            "no plan is given; name a strategy or plan file (autopar-search writes both), or "
            "describe one strategy for all layers (--pp-deg, --global-tp-deg, --sdp, "
            "--global-train-batch-size, ...)"
        )
    if not 0 <= seed <= _MAX_SEED:
        raise OptionError(f"--seed: expected 0 to {_MAX_SEED}, got {seed}")
    if not 0 <= timed_steps <= _MAX_STEPS:
        raise OptionError(f"--timed-steps: expected 0 to {_MAX_STEPS}, got {timed_steps}")
    return PlanOptions(
        plan=plan,
        uniform=uniform,
        model=model,
        num_layers=None if num_layers is None else _counts(num_layers),
        seq_length=_whole("--seq", seq, _MAX_SIZE),
        mode=_word("--mode", mode, names(Mode)),
        layers=_whole("--layers", layers, _MAX_LAYERS),
        global_batch=_whole("--global-batch", global_batch, _MAX_SIZE),
        num_microbatches=_whole("--microbatches", microbatches, _MAX_SIZE),
        world_size=_whole("--world-size", world_size, MAX_WORLD),
        steps=count("--steps", steps, _MAX_STEPS, "steps"),
        timed_steps=timed_steps,
        seed=seed,
        backend=chosen_backend,
        device=chosen_device,
        precision=_word("--mixed-precision", mixed_precision, names(Precision)),
        sequence_parallel=sequence_parallel,
        async_grad_reduce=async_grad_reduce,
        reference=reference,
        timeout_s=seconds("--timeout", timeout),
        ranks=_ranks(ranks),
        json=json,
    )


def _whole(option: str, value: int | None, most: int) -> int | None:
    return None if value is None else count(option, value, most)


def _flag(option: str, value: int | None) -> bool | None:
    if value is not None and value not in (0, 1):
        raise OptionError(f"{option}: expected 0 or 1, got {value}")
    return None if value is None else bool(value)


def _word(option: str, text: str | None, choices: Mapping[str, Any]) -> Any:
    return None if text is None else choice(option, text, choices)


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,9}", part) for part in parts):
        raise OptionError(
            f"--num-layers: {shorten(text)} is no number of layers; write 4, or 2,2 for two types"
        )
    return tuple(count("--num-layers", int(part), _MAX_LAYERS, "layers") for part in parts)


def _ranks(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip().lower() for part in text.split(","))
    for part in parts:
        if part not in _STAGES and not re.fullmatch(r"\d{1,9}", part):
            raise OptionError(
                f"--ranks: {shorten(part)} is neither a rank nor one of {', '.join(_STAGES)}"
            )
    return parts
