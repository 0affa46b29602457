"""Validated options of `profile-model`, with parsers of their lists and ranges."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from autopar.command.fields import make, option, read_given, validate
from autopar.documents.catalog import DEFAULT_MODEL
from autopar.errors import OptionError
from autopar.records import shorten
from profiler.options import (
    FILES,
    HOW,
    SIZES,
    DeviceChoice,
    MeasuringOptions,
    Precision,
    SizeOptions,
    check_out,
)

# --------------------------------------------------------------------------------------------------
# Parsers of batch sizes, sequence lengths and tensor-parallel degrees, given as lists and ranges.


MAX_NUMBER = 1 << 24
"""Largest batch size or sequence length."""
MAX_DEGREE = 1024
"""Largest tensor-parallel degree."""
_MAX_CASES = 4096
_NUMBER = re.compile(r"[0-9]{1,12}")


def parse_batches(text: str) -> tuple[int, ...]:
    """Return the batch sizes, increasing, of a comma-separated list of numbers and ranges.

    Raises OptionError if the list is malformed.
    """
    found: set[int] = set()
    for part in text.split(","):
        found |= set(_range("--bsz", part, "1:12, 1:64:x2 or 1,2,4"))
    return tuple(sorted(found))


def parse_seq_lengths(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the cases of sequence lengths in a comma-separated list, ordered by mean length.

    A number or range (512:32768:x2) gives cases of one length for all layer types. A bracket
    ([512,128]) is a case with one length per type. Raises OptionError if the list is malformed.
    """
    example = "512:32768:x2, 1024,2048 or [512,128]"
    found: set[tuple[int, ...]] = set()
    # brackets contain commas too
    for part in re.findall(r"\[[^\]]*\]?|[^,]+|,(?=,|$)", text) or [text]:
        if part.startswith("["):
            inner = part.removeprefix("[").removesuffix("]").split(",")
            numbers = [_range("--seq", number, example) for number in inner]
            if not part.endswith("]") or any(len(one) != 1 for one in numbers):
                raise OptionError(
                    f"--seq: {shorten(part)} is not a list of one length per layer type",
                    remedy="Use [512,128]",
                )
            found.add(tuple(one[0] for one in numbers))
        else:
            found |= {(number,) for number in _range("--seq", part, example)}
    # by mean length, so that cases with one and with several lengths have a common order
    return tuple(sorted(found, key=lambda case: (sum(case) / len(case), case)))


def parse_degrees(text: str) -> tuple[int, ...]:
    """Return the tensor-parallel degrees of a comma-separated list and 1, increasing."""
    found = {1}
    for part in text.split(","):
        if not _NUMBER.fullmatch(part.strip()) or not 1 <= int(part) <= MAX_DEGREE:
            raise OptionError(
                f"--tp: {shorten(text)} is not a list of tensor degrees from 1 to {MAX_DEGREE}",
                remedy="Use 1,2,4,8",
            )
        found.add(int(part))
    return tuple(sorted(found))


def _range(option: str, text: str, example: str) -> list[int]:
    """Return the numbers of `N`, `A:B`, `A:B:STEP` or `A:B:xFACTOR`, from A up to at most B."""
    parts = [part.strip() for part in text.strip().split(":")]
    step = parts[2] if len(parts) == 3 else "1"
    factor = step[:1] in ("x", "*")
    numbers = [*parts[:2], step[1:] if factor else step]
    if len(parts) > 3 or not all(_NUMBER.fullmatch(number) for number in numbers):
        raise OptionError(
            f"{option}: {shorten(text)} is neither a number nor a range", remedy=f"Use {example}"
        )
    low, high, by = int(parts[0]), int(parts[min(1, len(parts) - 1)]), int(numbers[-1])
    if not 1 <= low <= high <= MAX_NUMBER:
        raise OptionError(
            f"{option}: {shorten(text)} is not an ascending range from 1 to {MAX_NUMBER}",
        )
    # neither a step of 0 nor a factor of 1 ever reaches the end
    if by < 1 + factor:
        raise OptionError(
            f"{option}: the step of {shorten(text)} never reaches the end",
            remedy=f"Use {example}",
        )
    found = [low]
    while (following := found[-1] * by if factor else found[-1] + by) <= high:
        found.append(following)
        if len(found) > _MAX_CASES:
            raise OptionError(
                f"{option}: {shorten(text)} has more than {_MAX_CASES} values",
                remedy="Use a larger step",
            )
    return found


# --------------------------------------------------------------------------------------------------
# The options, and checks that involve several of them.


Mode = Literal["static", "batch", "sequence"]
ProfileType = Literal["computation", "memory"]
Source = Literal["auto", "device", "exact"]
TensorImplementation = Literal["megatron", "dtensor"]
Unit = Literal["all", "attention", "mlp"]

GALVATRON_BATCHES = 8
"""Fewest batch sizes that Galvatron's search accepts in batch mode."""
DEFAULT_BATCHES: Mapping[Mode, str] = {"static": "8", "batch": "1:12", "sequence": "1"}
"""Default batch sizes by mode."""
_MAX_LAYERS = 1024
_ALL: tuple[ProfileType, ...] = ("computation", "memory")
_WHAT, _SIZES, _DOCUMENTED = "What to profile", "Sizes", "Documented spellings"
PANELS = (_WHAT, _SIZES, SIZES, HOW, FILES, _DOCUMENTED)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(MeasuringOptions):
    """Options of one profiling run, with the defaults of the command."""

    PANEL: ClassVar[str] = _SIZES

    model: str = option(
        help="shipped name, config.json, model.json, hf:NAME, or py:package.module:factory",
        panel=_WHAT,
        metavar="MODEL",
        most_used=True,
    )
    profile_types: tuple[ProfileType, ...] = option(
        _ALL,
        name="profile-type",
        help="computation, memory, or both (all)",
        panel=_WHAT,
        choices={"computation": ("computation",), "memory": ("memory",), "all": _ALL},
        most_used=True,
    )
    mode: Mode = option(
        "static",
        help="one size, several batch sizes, or several sequence lengths",
        panel=_WHAT,
        most_used=True,
    )
    source: Source = option(
        "auto",
        help=(
            "auto: count memory without a device, measure times on one; exact: "
            "memory only; device: measure memory too"
        ),
        panel=_WHAT,
        most_used=True,
    )
    unit: Unit = option(
        "all", name="profile-unit", help="whole layers, or one half of them", panel=_WHAT
    )
    backward: bool = option(
        True, help="also time backward, recomputation and the optimizer step", panel=_WHAT
    )
    batches: tuple[int, ...] = option(
        (8,),
        name="bsz",
        help="batch sizes of the times: 8, 1:12, 1:64:x2 or 1,2,4",
        metavar="SIZES",
        parse=parse_batches,
        shown="by mode 8, 1:12, 1",
        most_used=True,
    )
    """Batch sizes at which times are measured, increasing."""
    seq_lengths: tuple[tuple[int, ...], ...] | None = option(
        None,
        name="seq",
        help=("sequence lengths: 2048, 512:32768:x2, 1024,2048; [512,128]: one per layer type"),
        metavar="LENGTHS",
        parse=parse_seq_lengths,
        shown="that of the model; in sequence mode five up to it",
        most_used=True,
    )
    """Cases to measure, each with one length for all layer types or one per type. None means the
    model's length, or in sequence mode five cases up to it."""
    degrees: tuple[int, ...] | None = option(
        None,
        name="tp",
        help="tensor degrees",
        metavar="DEGREES",
        parse=parse_degrees,
        shown="those of 1,2,4,8 that the model allows",
        most_used=True,
    )
    """Tensor-parallel degrees, increasing and starting with 1. None means those of 1, 2, 4, 8 that
    the model allows."""
    tp_impl: TensorImplementation = option(
        "megatron", help="saved by sequence parallelism: shards (megatron) or gathered copies"
    )
    layernum_min: int = option(
        2, help="smallest number of layers in whole forwards", between=(1, _MAX_LAYERS)
    )
    layernum_max: int = option(
        4,
        help="layers of the longer forward pass that checks layer times",
        between=(1, _MAX_LAYERS),
    )
    """Layers of one type in the longer forward pass. Its difference to the pass with
    `layernum_min` layers checks the time of a layer."""
    vocab_divisor: int | None = option(
        None,
        name="make-vocab-size-divisible-by",
        help="pad the vocabulary to a multiple",
        shown="that of the model",
        between=(1, MAX_NUMBER),
    )
    device: DeviceChoice = option(
        "auto",
        help="device of the times; auto: a GPU if torch finds one",
        panel=HOW,
        most_used=True,
    )
    dtype: Precision = option(
        "bf16", help="type of weights and activations", panel=HOW, most_used=True
    )
    out: Path | None = option(
        None,
        help=("output folder; default: models/NAME/configs, and times in its folder of the device"),
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )

    sizes: SizeOptions = field(default_factory=SizeOptions)

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise _no_model()
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class DocumentedRanges:
    """Ranges of batch sizes, sequence lengths and tensor degrees, as options of Galvatron."""

    PANEL: ClassVar[str] = _DOCUMENTED

    min_batch: int | None = option(None, name="profile-min-batch-size", help="first batch size")
    max_batch: int | None = option(None, name="profile-max-batch-size", help="last batch size")
    batch_step: int | None = option(
        None, name="profile-batch-size-step", help="between batch sizes", shown="1"
    )
    min_seq: int | None = option(None, name="profile-min-seq-length", help="first sequence length")
    max_seq: int | None = option(None, name="profile-max-seq-length", help="last sequence length")
    seq_step: int | None = option(
        None,
        name="profile-seq-length-step",
        help=("step between sequence lengths; without it each is twice the previous one"),
    )
    seq_length: tuple[tuple[int, ...], ...] | None = option(
        None,
        help="sequence lengths if --seq is not given; in sequence mode the longest",
        metavar="LENGTHS",
        parse=parse_seq_lengths,
    )
    max_tp_deg: int | None = option(
        None, help="tensor degrees 1, 2, 4, ... up to this", between=(1, MAX_DEGREE)
    )

    def __post_init__(self) -> None:
        validate(self)


def build_options(tell: Callable[[str], None] | None = None, /, **given: object) -> ModelOptions:
    """Return the validated options of a command line.


    tell : function called with a sentence for each default used and each ignored option.
    given : option name, with hyphens or underscores -> text or value.

    Raises OptionError: a value is unusable, or two options contradict each other.
    """
    say = tell or (lambda _: None)
    if "model" not in given and "mode" in given:
        # the documented `profile-model --mode sequence` has no --model
        given["model"] = DEFAULT_MODEL
        say(f"--model not given; using the shipped {DEFAULT_MODEL}")
    if not given.get("model"):
        raise _no_model()
    values = read_given(given, ModelOptions, DocumentedRanges, SizeOptions)
    mode: Mode = values.get("mode", ModelOptions.mode)
    ranges = make(DocumentedRanges, values)
    batches = (ranges.min_batch, ranges.max_batch, ranges.batch_step)
    lengths = (ranges.min_seq, ranges.max_seq, ranges.seq_step)
    for short, long, text in (
        ("bsz", "batch-size", _range_text("batch-size", *batches, ":1", say)),
        ("seq", "seq-length", _range_text("seq-length", *lengths, ":x2", say)),
    ):
        if text is None:
            continue
        if short in values:
            raise OptionError(
                f"--{short} sets the same values as --profile-min-{long} and --profile-max-{long}",
                remedy="Remove one of them",
            )
        values[short] = (parse_batches if short == "bsz" else parse_seq_lengths)(text)
    if ranges.seq_length is not None:
        _take_length(ranges.seq_length, mode, values, say)
    if ranges.max_tp_deg is not None:
        if "tp" in values:
            raise OptionError(
                "--tp and --max-tp-deg set the same degrees", remedy="Remove one of them"
            )
        values["tp"] = tuple(1 << k for k in range(ranges.max_tp_deg.bit_length()))
    values.setdefault("bsz", parse_batches(DEFAULT_BATCHES[mode]))
    if values.get("source") == "exact":
        values.setdefault("profile-type", ("memory",))
    model = str(values["model"]).strip()
    options = make(ModelOptions, values, model=model, sizes=make(SizeOptions, values))
    check_out(options.out)
    if options.layernum_max <= options.layernum_min:
        raise OptionError(
            f"--layernum-max {options.layernum_max} must exceed --layernum-min "
            f"{options.layernum_min}: the time of a layer is their difference"
        )
    if "computation" in options.profile_types:
        if options.source == "exact":
            raise OptionError(
                "--source exact counts memory without a device, but "
                "--profile-type "
                f"'{'all' if len(options.profile_types) > 1 else 'computation'}' "
                "needs times",
                remedy=(
                    "Use --source auto or --profile-type memory, or estimate times "
                    "with autopar-profile-estimate"
                ),
            )
        _check_mode(options.mode, options.batches, options.seq_lengths)
    return options


def _take_length(
    cases: tuple[tuple[int, ...], ...],
    mode: Mode,
    values: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Set `values["seq"]` from `--seq-length`, unless `--seq` or a range already sets it."""
    if "seq" in values:
        say("--seq-length is not used: other options set the lengths")
    elif mode == "sequence" and len(cases) == 1 == len(cases[0]):
        (longest,) = cases[0]
        values["seq"] = parse_seq_lengths(f"{_shortest(longest)}:{longest}:x2")
    else:
        values["seq"] = cases


def _shortest(longest: int) -> int:
    """Return the start of a range of up to five lengths, each twice the previous, to `longest`."""
    for _ in range(4):
        if longest % 2 == 0 and longest // 2 >= 64:
            longest //= 2
    return longest


def _no_model() -> OptionError:
    return OptionError(
        "--model is missing",
        remedy=(
            "Add --model with a shipped model such as llama2-7b, a config.json, "
            "hf:NAME or py:package.module:factory"
        ),
    )


def _check_mode(
    mode: Mode, batches: tuple[int, ...], seq_lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    if mode == "static" and len(batches) > 1:
        raise OptionError(
            f"--mode static needs one batch size, but --bsz has {len(batches)}",
            remedy="Use --mode batch or one --bsz",
        )
    if mode == "batch" and len(batches) < 2:
        raise OptionError(
            f"--mode batch needs a range of batch sizes, but --bsz is {batches[0]}",
            remedy=(
                f"Use --bsz 1:12, with at least {GALVATRON_BATCHES} for Galvatron, or --mode static"
            ),
        )
    if mode == "sequence" and seq_lengths is not None and len(seq_lengths) < 2:
        raise OptionError(
            "--mode sequence needs several sequence lengths, but --seq has one",
            remedy="Use --seq 512:32768:x2, or --mode static",
        )


def _range_text(
    name: str,
    low: int | None,
    high: int | None,
    step: int | None,
    default_step: str,
    say: Callable[[str], None],
) -> str | None:
    """Return the range of `--profile-min-NAME` and its companions in the form of `--bsz`, or None.

    low, high, step : values of the options; None if not given.
    default_step : suffix without a step.

    Raises OptionError for an incomplete or empty range.
    """
    if low is None and high is None:
        if step is not None:
            raise OptionError(
                f"--profile-{name}-step needs --profile-min-{name} and --profile-max-{name}"
            )
        return None
    if high is None:
        raise OptionError(f"--profile-min-{name} needs --profile-max-{name}")
    if step is not None and step < 1:
        raise OptionError(f"--profile-{name}-step {step}: expected at least 1")
    if low is None and high >= 1:
        # default start: 1 for batches; for lengths the step, or the shortest default length
        low = 1 if name == "batch-size" else min(step or _shortest(high), high)
        say(f"--profile-min-{name} not given; using {low}")
    if low is None or low < 1 or high < low:
        first = "" if low is None else f"--profile-min-{name} {low} and "
        raise OptionError(
            f"{first}--profile-max-{name} {high} {'is' if low is None else 'are'} not a range",
            remedy=("Use a first value of at least 1 and a second one of at least the first"),
        )
    return f"{low}:{high}{default_step if step is None else f':{step}'}"
