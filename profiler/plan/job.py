"""What `profile-plan` is asked, and what it finds: options, the job they mean, results, a verdict.

Reading plan files is in `question`, running in `run`. Nothing here is heavy: `--help` reads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from autopar.command.fields import json_option, make, option, read_given, validate
from autopar.errors import OptionError
from autopar.records import Record, shorten
from autopar.run.model import ModelSpec
from autopar.run.plan import Plan
from profiler.model.layers.sharding import ContextExchange, Routing
from profiler.options import (
    MAX_RANKS,
    MAX_REPETITIONS,
    MAX_SIZE,
    SIZES,
    Backend,
    DeviceChoice,
    Precision,
    SizeOptions,
    duration,
)

if TYPE_CHECKING:
    from autopar.documents.plan import PeakSource

# --------------------------------------------------------------------------------------------------
# The options of the command.


Mode = Literal["static", "dryrun", "run"]

_MAX_LAYERS = 1 << 16
_STAGES = ("first", "last", "largest", "all")
_WHAT, _HOW, _DRY, _FILES = "What to check", "How to run it", "Dry run", "Files"
_SAY, _GLOBAL = "What the plan does not say", "GLOBAL mode, without PLAN.json"
PANELS = (_WHAT, _SAY, SIZES, _HOW, _DRY, _FILES, _GLOBAL)


def _ranks(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip().lower() for part in text.split(","))
    for part in parts:
        if part not in _STAGES and not re.fullmatch(r"[0-9]{1,9}", part):
            raise OptionError(
                f"--ranks: {shorten(part)} is neither a rank nor one of {', '.join(_STAGES)}"
            )
    return parts


@dataclass(frozen=True, kw_only=True)
class GlobalOptions:
    """One strategy for all layers, as GLOBAL mode describes it; None is what was not given."""

    PANEL: ClassVar[str] = _GLOBAL

    pp_deg: int | None = option(None, help="stages", shown="1", between=(1, MAX_RANKS))
    global_tp_deg: int | None = option(
        None, help="tensor degree", shown="1", between=(1, MAX_RANKS), off=-1
    )
    global_tp_consec: bool | None = option(
        None, help="tensor groups of neighbours, or strided", shown="on", off=-1
    )
    sdp: bool | None = option(None, help="ZeRO-3 for the layers", shown="off")
    chunks: int | None = option(
        None, help="micro-batches", shown="one per stage", between=(1, MAX_SIZE), off=-1
    )
    global_checkpoint: bool | None = option(None, help="recompute every layer", shown="off")
    pipeline_type: Literal["1f1b", "gpipe"] | None = option(
        None,
        help="schedule",
        shown="gpipe",
        choices={"gpipe": "gpipe", "pipedream_flush": "1f1b", "1f1b": "1f1b"},
    )
    vocab_tp: int | None = option(
        None, help="degree of embedding and head", shown="1", between=(1, MAX_RANKS)
    )
    vocab_sp: bool | None = option(
        None, help="that degree divides the sequence (Ulysses)", shown="off"
    )
    embed_sdp: bool | None = option(None, help="ZeRO-3 for embedding and head", shown="off")
    global_train_batch_size: int | None = option(
        None, help="samples of a step", between=(1, MAX_SIZE)
    )
    default_dp_type: Literal["ddp", "zero1", "zero2"] | None = option(
        None, help="what layers without ZeRO-3 do", shown="ddp"
    )
    use_ulysses: bool | None = option(None, help="the tensor degree divides the sequence instead")

    def __post_init__(self) -> None:
        validate(self)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that were given, as they are written."""
        return tuple(
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of one check of a plan; defaults are those of the command."""

    PANEL: ClassVar[str] = _WHAT

    plan: Path | None = option(
        None,
        help="strategy file in any spelling, our plan file, or what autopar-search --json wrote",
        positional=True,
        metavar="PLAN.json",
        place=-2,
        most_used=True,
    )
    """None: `uniform` says the plan."""
    uniform: GlobalOptions = GlobalOptions()
    sizes: SizeOptions = field(default_factory=SizeOptions)
    model: str | None = option(
        None,
        help="shipped name, config.json or model.json",
        metavar="MODEL",
        shown="the plan file's",
        most_used=True,
    )
    num_layers: tuple[int, ...] | None = option(
        None,
        help="layers of the model, for each type",
        metavar="N[,N]",
        between=(1, _MAX_LAYERS),
        of="layers",
        shown="its own",
    )
    seq_length: int | None = option(
        None,
        name="seq",
        help="sequence length",
        shown="the plan file's, or the model's own",
        between=(1, MAX_SIZE),
    )
    mode: Mode | None = option(
        None,
        help="arithmetic; memory of tensors without contents; real processes",
        shown="run under torchrun, else static",
        place=-1,
        most_used=True,
    )
    layers: int | None = option(
        None,
        help="scale down to so many layers, at least one per stage, evenly spaced over the plan's",
        between=(1, _MAX_LAYERS),
        most_used=True,
    )
    global_batch: int | None = option(
        None, help="another global batch than the plan's", between=(1, MAX_SIZE)
    )
    num_microbatches: int | None = option(
        None,
        name="microbatches",
        help="another number of micro-batches than the plan's",
        between=(1, MAX_SIZE),
    )
    world_size: int | None = option(
        None, help="ranks of a plan that does not say them", between=(1, MAX_RANKS)
    )
    steps: int = option(
        2,
        help="steps that are compared with one process",
        panel=_HOW,
        between=(1, MAX_REPETITIONS),
        of="steps",
        most_used=True,
    )
    timed_steps: int = option(
        3,
        help="steps after them that are timed",
        panel=_HOW,
        between=(0, MAX_REPETITIONS),
        most_used=True,
    )
    seed: int = option(0, help="of weights and tokens", panel=_HOW, between=(0, (1 << 63) - 1))
    backend: Backend = option(
        "auto",
        help="auto: nccl where torch finds a GPU, otherwise gloo",
        panel=_HOW,
        most_used=True,
    )
    device: DeviceChoice = option(
        "auto", help="cuda is --backend nccl, cpu is --backend gloo", panel=_HOW
    )
    precision: Precision | None = option(
        None,
        name="mixed-precision",
        help="of weights and activations",
        panel=_SAY,
        shown="the plan file's; where it says none, bf16 for a dry run and fp32 otherwise",
        most_used=True,
    )
    sequence_parallel: bool | None = option(
        None,
        help="Megatron sequence parallelism of tensor-parallel layers",
        panel=_SAY,
        shown="the plan file's, or on",
    )
    async_grad_reduce: bool | None = option(
        None,
        help="reduce gradients once per step, else in every micro-batch",
        panel=_SAY,
        shown="the plan file's, or on",
    )
    fp32_gradients: bool | None = option(
        None,
        help="sum gradients of bf16 and fp16 in fp32",
        panel=_SAY,
        shown="the plan file's, or on",
    )
    routing: Routing = option(
        "even",
        help="as many tokens to every expert, or those of its highest scores",
        panel=_HOW,
        choices={"even": "even", "top-k": "top_k", "top_k": "top_k"},
    )
    context_exchange: ContextExchange = option(
        "ring",
        help="how context ranks get keys and values: one rank's after the other, or all at once",
        panel=_HOW,
        choices={"ring": "ring", "all-gather": "all_gather", "all_gather": "all_gather"},
    )
    reference: bool = option(
        True, help="run one process without parallelism to compare with", panel=_HOW
    )
    timeout_s: float = duration(
        300.0,
        name="timeout",
        help="a step, or the building of stages, that takes longer has failed",
        panel=_HOW,
    )
    ranks: tuple[str, ...] = option(
        ("first", "last", "largest"),
        help="first, last, largest: the first rank of such a stage; all: of every one; or numbers",
        panel=_DRY,
        metavar="RANKS",
        parse=_ranks,
        most_used=True,
    )
    """Of a dry run: words for stages, `all`, or numbers of ranks."""
    json: str | None = json_option(_FILES, most_used=True)

    def __post_init__(self) -> None:
        validate(self)
        if self.backend == "nccl" and self.device == "cpu":
            raise OptionError(
                "--backend nccl communicates between GPUs and --device is cpu; leave one of them "
                "out"
            )
        if self.backend == "gloo" and self.device == "cuda":
            raise OptionError(
                "--backend gloo runs the plan on the CPU and --device is cuda; leave one of them "
                "out"
            )


def build_options(**given: object) -> PlanOptions:
    """Return the options that the words of a command line mean.

    given : option, with hyphens or underscores -> text, or value.

    Raises
    ------
    OptionError: a value is unusable, two options contradict each other, or nothing says a plan.
    """
    values = read_given(given, PlanOptions, GlobalOptions, SizeOptions)
    options = make(
        PlanOptions,
        values,
        uniform=make(GlobalOptions, values),
        sizes=make(SizeOptions, values),
    )
    if options.plan is None and not options.uniform.given:
        raise OptionError(
            "no plan is given; name a strategy or plan file (autopar-search writes both), or "
            "describe one strategy for all layers (--pp-deg, --global-tp-deg, --sdp, "
            "--global-train-batch-size, ...)"
        )
    return options


# --------------------------------------------------------------------------------------------------
# The job, and what was found of it.


class PlanJob(Record):
    """A plan, the model it is of, and what a strategy file does not say."""

    plan: Plan
    spec: ModelSpec
    """Has as many layers as the plan, at the sequence length that is run."""
    sequence_parallel: bool = True
    """Megatron sequence parallelism of tensor-parallel layers."""
    async_grad_reduce: bool = True
    """One reduction of gradients per step, in the last micro-batch; otherwise in every one."""
    precision: Precision = "fp32"
    """bf16: computes in bf16 and keeps weights and optimizer states in fp32 as well. fp16: the same
    in fp16, with losses scaled."""
    fp32_gradients: bool = True
    """Gradients of bf16 and fp16 are summed in fp32 over micro-batches and ranks, as engines do;
    otherwise in the precision of the model."""
    narrow_shards: bool = False
    """The engine that the plan is for keeps, beside the fp32 shards of weights that ZeRO-3 divides,
    shards in bf16 or fp16 which it gathers. A dry run counts them; this executor has none, as FSDP2
    casts while it gathers."""
    routing: Routing = "even"
    """Where a run sends tokens of a mixture; a dry run sends as many to every expert."""
    context_exchange: ContextExchange = "ring"
    seed: int = 0
    """Of weights and tokens: the same on any number of ranks."""
    learning_rate: float = 1e-3
    loss_scale: float = 2.0**16
    """Of fp16, in the first step: a power of two, so that scaling rounds nothing. The default of
    torch.amp.GradScaler."""


class DryRunRank(Record):
    """What one rank of a plan would hold, in bytes, counted on tensors without contents."""

    stage: int
    rank: int
    """Global rank: the first of its stage."""
    num_parameters: int
    """Elements of the parameters that this rank holds when nothing is gathered."""
    parameter_bytes: int
    gradient_bytes: int
    """Sharded or replicated, as they are when the optimizer steps."""
    optimizer_bytes: int
    """AdamW's two moments, and fp32 copies of the weights where those are not fp32."""
    peak_bytes: int
    """The most that is alive at once in one step after the first, with `engine_bytes`."""
    peak_parts: Mapping[str, int]
    """What `peak_bytes` was made of at that moment: parameters, gathered parameters, gradients,
    optimizer, activations, other; sums to it."""
    num_microbatches_run: int
    engine_bytes: int = 0
    """Of the parameters at the peak: narrow shards of the engine that the plan is for."""
    num_communicators: int = 0
    """That the rank opens; their buffers lie outside of the tensors."""


class RunResult(Record):
    """What real processes found; one value per step where not said otherwise."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    """Infinite where gradients overflowed fp16, and the step was skipped."""
    reference_loss: tuple[float, ...] = ()
    """Of one process and no parallelism; empty when it was not asked for."""
    reference_grad_norm: tuple[float, ...] = ()
    step_time_s: tuple[float, ...] = ()
    """Of every timed step: the slowest rank's."""
    stage_time_s: tuple[Mapping[str, float], ...] = ()
    """By stage: median seconds of forwards, backwards and optimizer of a step on its slowest rank
    (`forward_s`, `backward_s`, `optimizer_s`)."""
    peak_bytes: tuple[int, ...] = ()
    """By rank."""
    peak_source: PeakSource = "counted"
    """allocated: torch's CUDA allocator said so; counted: storages were counted in one step."""
    notes: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------
# Whether a run matches its reference: losses and gradient norms, step by step.


TOLERANCE: Mapping[Precision, Mapping[str, float]] = {
    "fp32": {"loss": 2e-4, "grad_norm": 1e-3},
    # one rounding to bf16 is 2e-3 and not 6e-8; over many tokens and parameters they cancel
    "bf16": {"loss": 2e-3, "grad_norm": 1e-2},
    # three bits more than bf16: an eighth of its rounding, and sums in another order
    "fp16": {"loss": 5e-4, "grad_norm": 3e-3},
}
"""Largest difference, as a share of the reference's value."""


class Verdict(Record):
    """The comparison of a run with one process."""

    tolerance: Mapping[str, float]
    largest: Mapping[str, float]
    """Largest relative difference over the steps; infinite where a value is not finite."""

    @property
    def matches(self) -> bool:
        """Whether everything is within its tolerance."""
        return all(self.largest[key] <= most for key, most in self.tolerance.items())

    @property
    def sentence(self) -> str:
        """What is wrong, in words."""
        worst = [
            f"{name} {self.largest[key]:.2g} (at most {self.tolerance[key]:g})"
            for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if not self.largest[key] <= self.tolerance[key]
        ]
        return f"the run does not match one process without parallelism: {', '.join(worst)}"


def judge(result: RunResult, precision: Precision) -> Verdict | None:
    """Return how far a run is from its reference; None where it has none."""
    if not result.reference_loss:
        return None
    return Verdict(
        tolerance=TOLERANCE[precision],
        largest={
            "loss": _largest(result.loss, result.reference_loss),
            "grad_norm": _largest(
                result.grad_norm, result.reference_grad_norm, may_skip=precision == "fp16"
            ),
        },
    )


def _largest(
    values: Sequence[float], references: Sequence[float], *, may_skip: bool = False
) -> float:
    pairs = list(zip(values, references, strict=True))
    if may_skip:
        # steps that both skipped have no norm; where there are no others, nothing was compared
        pairs = [pair for pair in pairs if pair != (math.inf, math.inf)] or pairs
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return math.inf
    return max(_difference(value, reference) for value, reference in pairs)


def _difference(value: float, reference: float) -> float:
    # also where both are 0, which has no relative difference
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
