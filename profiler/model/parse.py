"""Reads the options of `profile-model`: texts in, one validated value out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.documents.json import shorten
from autopar.errors import OptionError
from profiler.model.options import (
    GALVATRON_BATCHES,
    DeviceChoice,
    Dtype,
    Mode,
    ModelOptions,
    ProfileType,
    Source,
    TensorImplementation,
    Unit,
)
from profiler.model.ranges import (
    MAX_DEGREE,
    MAX_NUMBER,
    parse_batches,
    parse_degrees,
    parse_seq_lengths,
)
from profiler.option_values import check_files, choice, count, names, repetitions, seconds

__all__ = [
    "DEFAULT_BATCHES",
    "build_options",
]

DEFAULT_BATCHES: Mapping[Mode, str] = {"static": "8", "batch": "1:12", "sequence": "1"}
"""Batch sizes by mode, as the documented commands have them."""
_MAX_LAYERS = 1024
_PROFILE_TYPES: Mapping[str, tuple[ProfileType, ...]] = {
    "computation": ("computation",),
    "memory": ("memory",),
    "all": ("computation", "memory"),
}


def build_options(
    *,
    model: str | None,
    mode: str = "static",
    profile_type: str | None = None,
    source: str = "auto",
    device: str = "auto",
    dtype: str = "bf16",
    tp: str | None = None,
    max_tp_deg: int | None = None,
    tp_impl: str = "megatron",
    bsz: str | None = None,
    seq: str | None = None,
    min_batch: int | None = None,
    max_batch: int | None = None,
    batch_step: int | None = None,
    min_seq: int | None = None,
    max_seq: int | None = None,
    seq_step: int | None = None,
    layernum_min: int = 2,
    layernum_max: int = 4,
    backward: bool = True,
    unit: str = "all",
    vocab_divisor: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    dry_run: bool = False,
    iters: int = 50,
    warmup: int = 5,
    max_seconds: float = 2.0,
) -> ModelOptions:
    """Return the options that these words of a command line mean.

    Raises
    ------
    OptionError: a value is unusable, or two options contradict each other.
    """
    if not model or not model.strip():
        raise OptionError(
            "--model is missing; name a shipped model such as llama2-7b, a config.json, "
            "hf:NAME or py:package.module:factory"
        )
    check_files(out, resume=resume, force=force)
    chosen_mode: Mode = choice("--mode", mode, names(Mode))
    chosen_source: Source = choice("--source", source, names(Source))
    batch_text = _range_text(
        ("--bsz", bsz), "batch-size", min_batch, max_batch, batch_step, default_step=":1"
    )
    seq_text = _range_text(
        ("--seq", seq), "seq-length", min_seq, max_seq, seq_step, default_step=":x2"
    )
    if layernum_max <= layernum_min:
        raise OptionError(
            f"--layernum-max is {layernum_max} and --layernum-min {layernum_min}: a layer is the "
            "difference of both, so let the former be larger"
        )
    batches = parse_batches(batch_text or DEFAULT_BATCHES[chosen_mode])
    seq_lengths = None if seq_text is None else parse_seq_lengths(seq_text)
    types = _profile_types(profile_type, chosen_source)
    if "computation" in types:
        _check_mode(chosen_mode, batches, seq_lengths)
    return ModelOptions(
        model=model.strip(),
        mode=chosen_mode,
        profile_types=types,
        source=chosen_source,
        device=choice("--device", device, names(DeviceChoice)),
        dtype=choice("--dtype", dtype, names(Dtype)),
        degrees=_degrees(tp, max_tp_deg),
        tp_impl=choice("--tp-impl", tp_impl, names(TensorImplementation)),
        batches=batches,
        seq_lengths=seq_lengths,
        layernum_min=count("--layernum-min", layernum_min, _MAX_LAYERS),
        layernum_max=count("--layernum-max", layernum_max, _MAX_LAYERS),
        backward=backward,
        unit=choice("--profile-unit", unit, names(Unit)),
        vocab_divisor=(
            None
            if vocab_divisor is None
            else count("--make-vocab-size-divisible-by", vocab_divisor, MAX_NUMBER)
        ),
        out=out,
        resume=resume,
        force=force,
        dry_run=dry_run,
        iters=repetitions("--iters", iters),
        warmup=repetitions("--warmup", warmup),
        max_seconds=seconds("--max-seconds", max_seconds),
    )


def _degrees(tp: str | None, max_tp_deg: int | None) -> tuple[int, ...] | None:
    if tp is not None and max_tp_deg is not None:
        raise OptionError("--tp and --max-tp-deg say the same; give one of them")
    if max_tp_deg is not None:
        count("--max-tp-deg", max_tp_deg, MAX_DEGREE)
        return tuple(1 << k for k in range(max_tp_deg.bit_length()))
    return None if tp is None else parse_degrees(tp)


def _profile_types(text: str | None, source: Source) -> tuple[ProfileType, ...]:
    if text is None:
        return ("memory",) if source == "exact" else _PROFILE_TYPES["all"]
    types = _PROFILE_TYPES[choice("--profile-type", text, {name: name for name in _PROFILE_TYPES})]
    if source == "exact" and "computation" in types:
        raise OptionError(
            "--source exact counts memory without a device, and --profile-type "
            f"{shorten(text)} needs times, which only a device has; use --source auto or "
            "--profile-type memory, or let autopar-profile-estimate estimate times"
        )
    return types


def _check_mode(
    mode: Mode, batches: tuple[int, ...], seq_lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    if mode == "static" and len(batches) > 1:
        raise OptionError(
            f"--mode static measures one batch size and --bsz has {len(batches)}; "
            "use --mode batch or name one"
        )
    if mode == "batch" and len(batches) < 2:
        raise OptionError(
            f"--mode batch measures a range of batch sizes and --bsz is {batches[0]} alone; "
            f"write 1:12, with at least {GALVATRON_BATCHES} for Galvatron, or use --mode static"
        )
    if mode == "sequence" and seq_lengths is not None and len(seq_lengths) < 2:
        raise OptionError(
            "--mode sequence measures several sequence lengths and --seq has one; "
            "write 512:32768:x2, or use --mode static"
        )


def _range_text(
    short: tuple[str, str | None],
    name: str,
    low: int | None,
    high: int | None,
    step: int | None,
    *,
    default_step: str,
) -> str | None:
    """Return the range that the documented options describe, in the spelling of the short one."""
    option, text = short
    if low is None and high is None:
        if step is not None:
            raise OptionError(
                f"--profile-{name}-step needs --profile-min-{name} and --profile-max-{name}"
            )
        return text
    if text is not None:
        raise OptionError(
            f"{option} and --profile-min-{name} (or max) say the same; give one of them"
        )
    if low is None or high is None:
        missing, given = ("min", "max") if low is None else ("max", "min")
        raise OptionError(f"--profile-{missing}-{name} is missing beside --profile-{given}-{name}")
    if step is not None and step < 1:
        raise OptionError(f"--profile-{name}-step is {step}; give at least 1")
    if low < 1 or high < low:
        raise OptionError(
            f"--profile-min-{name} {low} and --profile-max-{name} {high} are no range; "
            "let the former be at least 1 and the latter not below it"
        )
    return f"{low}:{high}{default_step if step is None else f':{step}'}"
