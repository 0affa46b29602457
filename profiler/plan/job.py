"""Options, job, results and verdict of `profile-plan`.

This module does not import torch, since `--help` loads it.
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
_SAY, _GLOBAL = "Plan settings that the file does not contain", "GLOBAL mode, without PLAN.json"
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
    """Options of Galvatron's GLOBAL mode: one strategy for all layers; None means not given."""

    PANEL: ClassVar[str] = _GLOBAL

    pp_deg: int | None = option(None, help="pipeline stages", shown="1", between=(1, MAX_RANKS))
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
        None, help="use that degree for the sequence (Ulysses)", shown="off"
    )
    embed_sdp: bool | None = option(None, help="ZeRO-3 for embedding and head", shown="off")
    global_train_batch_size: int | None = option(
        None, help="global batch size in samples", between=(1, MAX_SIZE)
    )
    default_dp_type: Literal["ddp", "zero1", "zero2"] | None = option(
        None, help="data parallelism of layers without ZeRO-3", shown="ddp"
    )
    use_ulysses: bool | None = option(None, help="use the tensor degree for the sequence instead")

    def __post_init__(self) -> None:
        validate(self)

    @property
    def given(self) -> tuple[str, ...]:
        """Command-line names of the options that are given."""
        return tuple(
            f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None
        )


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of one check of a plan, with the defaults of the command."""

    PANEL: ClassVar[str] = _WHAT

    plan: Path | None = option(
        None,
        help="plan file, strategy file, or --json answer of autopar-search",
        positional=True,
        metavar="PLAN.json",
        place=-2,
        most_used=True,
    )
    """Path of the plan; None if `uniform` describes it."""
    uniform: GlobalOptions = GlobalOptions()
    sizes: SizeOptions = field(default_factory=SizeOptions)
    model: str | None = option(
        None,
        help="shipped name, config.json or model.json",
        metavar="MODEL",
        shown="model of the plan file",
        most_used=True,
    )
    num_layers: tuple[int, ...] | None = option(
        None,
        help="layers of the model, per layer type",
        metavar="N[,N]",
        between=(1, _MAX_LAYERS),
        of="layers",
        shown="its own",
    )
    seq_length: int | None = option(
        None,
        name="seq",
        help="sequence length",
        shown="that of the plan file, or of the model",
        between=(1, MAX_SIZE),
    )
    mode: Mode | None = option(
        None,
        help="static: arithmetic; dryrun: memory on meta tensors; run: real processes",
        shown="run under torchrun, else static",
        place=-1,
        most_used=True,
    )
    layers: int | None = option(
        None,
        help="number of layers of a scaled-down plan, at least one per stage",
        between=(1, _MAX_LAYERS),
        most_used=True,
    )
    global_batch: int | None = option(
        None, help="global batch size instead of the plan's", between=(1, MAX_SIZE)
    )
    num_microbatches: int | None = option(
        None,
        name="microbatches",
        help="micro-batches per step instead of the plan's",
        between=(1, MAX_SIZE),
    )
    world_size: int | None = option(
        None, help="ranks, if the plan does not name them", between=(1, MAX_RANKS)
    )
    steps: int = option(
        2,
        help="steps compared with one process",
        panel=_HOW,
        between=(1, MAX_REPETITIONS),
        of="steps",
        most_used=True,
    )
    timed_steps: int = option(
        3,
        help="timed steps after them",
        panel=_HOW,
        between=(0, MAX_REPETITIONS),
        most_used=True,
    )
    seed: int = option(
        0, help="random seed of weights and tokens", panel=_HOW, between=(0, (1 << 63) - 1)
    )
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
        help="precision of weights and activations",
        panel=_SAY,
        shown=("that of the plan file; without one, bf16 for a dry run and fp32 otherwise"),
        most_used=True,
    )
    sequence_parallel: bool | None = option(
        None,
        help="Megatron sequence parallelism of tensor-parallel layers",
        panel=_SAY,
        shown="that of the plan file, or on",
    )
    async_grad_reduce: bool | None = option(
        None,
        help="reduce gradients once per step, else in every micro-batch",
        panel=_SAY,
        shown="that of the plan file, or on",
    )
    fp32_gradients: bool | None = option(
        None,
        help="sum gradients of bf16 and fp16 in fp32",
        panel=_SAY,
        shown="that of the plan file, or on",
    )
    routing: Routing = option(
        "even",
        help="even: equal tokens per expert; top-k: by router score",
        panel=_HOW,
        choices={"even": "even", "top-k": "top_k", "top_k": "top_k"},
    )
    context_exchange: ContextExchange = option(
        "ring",
        help="context-parallel communication: ring or all-gather",
        panel=_HOW,
        choices={"ring": "ring", "all-gather": "all_gather", "all_gather": "all_gather"},
    )
    reference: bool = option(
        True, help="run one process without parallelism for comparison", panel=_HOW
    )
    timeout_s: float = duration(
        300.0,
        name="timeout",
        help="time limit of a step and of the set-up, seconds",
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
    """Ranks of a dry run: names of stages, `all`, or rank numbers."""
    json: str | None = json_option(_FILES, most_used=True)

    def __post_init__(self) -> None:
        validate(self)
        if self.backend == "nccl" and self.device == "cpu":
            raise OptionError(
                "--backend nccl needs GPUs, but --device is cpu",
                remedy="Remove one of them",
            )
        if self.backend == "gloo" and self.device == "cuda":
            raise OptionError(
                "--backend gloo runs on the CPU, but --device is cuda",
                remedy="Remove one of them",
            )


def build_options(**given: object) -> PlanOptions:
    """Return the validated options of a command line.

    given : option name, with hyphens or underscores -> text or value.

    Raises OptionError: a value is unusable, two options contradict each other, or no plan is given.
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
            "no plan is given",
            remedy=(
                "Give a strategy or plan file (autopar-search writes both), or one "
                "strategy for all layers (--pp-deg, --global-tp-deg, --sdp, "
                "--global-train-batch-size, ...)"
            ),
        )
    return options


# --------------------------------------------------------------------------------------------------
# The job and its results.


class PlanJob(Record):
    """Plan with its model and the settings of its execution."""

    plan: Plan
    spec: ModelSpec
    """Model with as many layers as the plan, at the sequence length of the run."""
    sequence_parallel: bool = True
    """True for Megatron sequence parallelism in tensor-parallel layers."""
    async_grad_reduce: bool = True
    """True reduces gradients once per step, in the last micro-batch; False in every one."""
    precision: Precision = "fp32"
    """Precision of the computation. With bf16 and fp16, weights for the optimizer and its states
    are fp32; fp16 also scales losses."""
    fp32_gradients: bool = True
    """True to accumulate and reduce bf16 and fp16 gradients in fp32, as in Megatron-LM; False to
    use the precision of the weights."""
    narrow_shards: bool = False
    """True if the plan's engine has bf16 or fp16 weight shards in addition to the fp32 shards of
    ZeRO-3. A dry run counts them; this executor has none, since FSDP2 casts before gathering."""
    routing: Routing = "even"
    """Routing of tokens to experts in a run; a dry run always routes evenly."""
    context_exchange: ContextExchange = "ring"
    seed: int = 0
    """Seed of weights and tokens, which are equal on any number of ranks."""
    learning_rate: float = 1e-3
    loss_scale: float = 2.0**16
    """Loss scale of fp16 in the first step, a power of two so that scaling is exact. Default of
    torch.amp.GradScaler."""


class DryRunRank(Record):
    """Memory of one rank of a plan, in bytes, counted with fake tensors."""

    stage: int
    rank: int
    """Global rank; by default the first of its stage."""
    num_parameters: int
    """Number of parameters in this rank's shards, before any gathering."""
    parameter_bytes: int
    gradient_bytes: int
    """Bytes of gradients before the optimizer step, sharded or replicated."""
    optimizer_bytes: int
    """Bytes of AdamW's two moments and of fp32 copies of bf16 or fp16 weights."""
    peak_bytes: int
    """Peak of the bytes alive in the second step, including `engine_bytes`."""
    peak_parts: Mapping[str, int]
    """Bytes by category at the peak, which sum to `peak_bytes`: parameters, gathered parameters,
    gradients, optimizer, activations, other."""
    num_microbatches_run: int
    engine_bytes: int = 0
    """bf16 or fp16 shards of the plan's engine, included in the parameters at the peak."""
    num_communicators: int = 0
    """Number of communicators of the rank; their buffers are not in the bytes above."""


class RunResult(Record):
    """Results of a run in real processes; one value per step, unless noted."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    """Infinite if gradients overflowed fp16 and the step was skipped."""
    reference_loss: tuple[float, ...] = ()
    """Losses of one process without parallelism; empty if not requested."""
    reference_grad_norm: tuple[float, ...] = ()
    step_time_s: tuple[float, ...] = ()
    """Seconds of every timed step, on its slowest rank."""
    stage_time_s: tuple[Mapping[str, float], ...] = ()
    """Median seconds of a step by stage, on its slowest rank: all forwards, all backwards and
    optimizer (`forward_s`, `backward_s`, `optimizer_s`)."""
    peak_bytes: tuple[int, ...] = ()
    """Peak memory by rank, bytes."""
    peak_source: PeakSource = "counted"
    """Source of `peak_bytes`: torch's CUDA allocator, or storages counted in one step."""
    notes: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------------
# Comparison of a run with its reference: losses and gradient norms, step by step.


TOLERANCE: Mapping[Precision, Mapping[str, float]] = {
    "fp32": {"loss": 2e-4, "grad_norm": 1e-3},
    # one rounding to bf16 is 2e-3, not 6e-8; over many tokens and parameters the errors cancel
    "bf16": {"loss": 2e-3, "grad_norm": 1e-2},
    # three bits more than bf16: an eighth of its rounding, and sums in another order
    "fp16": {"loss": 5e-4, "grad_norm": 3e-3},
}
"""Largest accepted difference by precision, relative to the reference."""


class Verdict(Record):
    """Result of the comparison of a run with one process."""

    tolerance: Mapping[str, float]
    largest: Mapping[str, float]
    """Largest relative difference over the steps; infinite if a value is not finite."""

    @property
    def matches(self) -> bool:
        """True if all differences are within their tolerance."""
        return all(self.largest[key] <= most for key, most in self.tolerance.items())

    @property
    def sentence(self) -> str:
        """Error message with the differences beyond their tolerance."""
        worst = [
            f"{name} {self.largest[key]:.2g} (at most {self.tolerance[key]:g})"
            for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if not self.largest[key] <= self.tolerance[key]
        ]
        return f"the run does not match one process without parallelism: {', '.join(worst)}"


def judge(result: RunResult, precision: Precision) -> Verdict | None:
    """Return the comparison of a run with its reference; None without a reference."""
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
        # steps that both skipped have no norm; if there are no others, nothing was compared
        pairs = [pair for pair in pairs if pair != (math.inf, math.inf)] or pairs
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return math.inf
    return max(_difference(value, reference) for value, reference in pairs)


def _difference(value: float, reference: float) -> float:
    # includes 0 and 0, for which a relative difference does not exist
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf
