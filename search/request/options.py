"""Options of a search in base units, validated when they are made, and options of its output.

The command line, the Python interface and plan files share `SearchOptions`: its fields are the
options of `autopar-search`, with their help. `OutputSpec` contains the options of the output.
Locations of input files are in `request.InputSpec`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from msgspec import to_builtins

from autopar.command.fields import json_option, option, validate
from autopar.errors import OptionError
from autopar.records import checked_value, shown
from autopar.run.runtime import Engine
from autopar.units import GIB
from search.engines.table import ENGINES, NOISE

if TYPE_CHECKING:
    from autopar.documents.calibration import Calibration

EngineChoice = Literal["any", "none", Engine]
"""Engine name, `any` for each engine in turn, or `none` for plans independent of engines."""
ProfileMode = Literal["static", "batch", "sequence", "hybrid"]

_IN, _MEM, _SPACE, _COST, _OUT = (
    "Inputs",
    "Memory and batch",
    "Search space",
    "Cost model",
    "Solver and output",
)
SPACE_PANEL = _SPACE
LARGEST_MEMORY_GIB = 4096
"""Largest accepted memory of one device, GiB; a larger value was probably meant in MiB."""
LARGEST_BATCH = 1 << 24
"""Largest accepted global batch, samples.

It is far above any real batch, and candidates up to it are counted within seconds."""
MOST_BATCHES = 2_000
"""Maximum number of global batches of one search."""


def _too_much(number: float) -> str:
    """Return the error for too many GiB: the value in a smaller unit that a GPU can have."""
    problem = f"{number:.12g} GiB is more than any GPU has"
    for power, unit in enumerate(("MiB", "KiB", "bytes"), 1):
        gib = number / 1024**power
        if gib <= LARGEST_MEMORY_GIB:
            return f"{problem}. If it is in {unit}, use {gib:.4g}"
    return f"{problem}. Use the memory of one GPU in GiB, such as 80"


PANELS = (_IN, _MEM, "Degrees", "Fine-tuning", _SPACE, _COST, _OUT)
"""Headings of option groups of a search, in display order."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of one search, with the defaults of `autopar-search`, in base units."""

    # memory
    memory_constraint_bytes: float = option(
        24 * 2.0**30,
        name="memory-constraint",
        help="memory per GPU, GiB",
        brief="memory per GPU, GiB [memory of the card]",
        panel=_MEM,
        shown="memory of the card, or 24",
        above=0,
        high=LARGEST_MEMORY_GIB,
        too_high=_too_much,
        scale=GIB,
        most_used=True,
    )
    oom_risk: float = option(
        0.01,
        help="largest OOM probability of a plan that fits",
        panel=_MEM,
        # no measurement supports lower probabilities
        low=1e-5,
        high=0.5,
    )
    within: float = option(
        NOISE,
        help="share of the throughput that a safer or simpler plan may cost",
        panel=_MEM,
        low=0,
        high=0.5,
    )
    """The safest, then the simplest plan is chosen among those this close to the fastest; 0 chooses
    the fastest."""
    reserve_fraction: float | None = option(
        None,
        name="reserve",
        help="allocator overhead over allocated memory",
        panel=_MEM,
        shown="overhead at --oom-risk",
        low=0,
        high=1,
    )
    """reserved = allocated * (1 + reserve_fraction) + context_bytes."""
    context_bytes: float = option(
        2.0**30,
        name="context-gib",
        help="device context, GiB per GPU",
        panel=_MEM,
        low=0,
        high=1 << 20,
        scale=GIB,
    )
    # batch
    min_bsz: int = option(
        8, help="smallest global batch of a range", panel=_MEM, low=1, high=LARGEST_BATCH
    )
    max_bsz: int = option(
        8, help="largest global batch of a range", panel=_MEM, low=1, high=LARGEST_BATCH
    )
    bsz_scale: int = option(8, help="step between batches", panel=_MEM, low=1, high=LARGEST_BATCH)
    settle_bsz: int | None = option(
        None,
        name="global-batch-size",
        also="settle-bsz",
        help="samples per step, over all GPUs",
        panel=_MEM,
        low=1,
        high=LARGEST_BATCH,
        off=-1,
        most_used=True,
    )
    settle_chunk: int | None = option(
        None,
        name="micro-batches",
        also="settle-chunk",
        help="micro-batches per step",
        panel=_MEM,
        low=1,
        high=LARGEST_BATCH,
        off=-1,
    )
    # space
    search_space: Literal["full", "3d", "dp+tp", "dp+pp", "dp", "sdp", "tp", "pp"] = option(
        "full", help="search space: dimensions to combine", panel=_SPACE
    )
    sp_space: Literal["tp", "sp", "tp+sp"] = option(
        "tp", help="tensor parallelism, Ulysses, or either per layer", panel=_SPACE
    )
    disable_dp: bool = option(False, help="exclude data parallelism", panel=_SPACE)
    disable_tp: bool = option(False, help="exclude tensor parallelism", panel=_SPACE)
    disable_vtp: bool = option(False, help="exclude vocabulary parallelism", panel=_SPACE)
    disable_sp: bool = option(False, help="exclude Ulysses sequence parallelism", panel=_SPACE)
    disable_cp: bool = option(False, help="exclude context parallelism", panel=_SPACE)
    enable_cp: bool = option(
        False, help="context parallelism in plans for Galvatron, whose v2.4 has none", panel=_SPACE
    )
    disable_pp: bool = option(False, help="exclude pipeline parallelism", panel=_SPACE)
    disable_sdp: bool = option(False, help="exclude ZeRO-3", panel=_SPACE)
    disable_ckpt: bool = option(False, help="exclude activation checkpointing", panel=_SPACE)
    disable_tp_consec: bool = option(False, help="exclude strided tensor groups", panel=_SPACE)
    disable_embedding_lmhead_tp: bool = option(
        False, help="exclude tensor parallelism of embedding and head", panel=_SPACE
    )
    disable_embedding_lmhead_sp: bool = option(
        False, help="exclude Ulysses for embedding and head", panel=_SPACE
    )
    strided_tp: bool = option(False, help="also try strided tensor groups", panel=_SPACE)
    max_tp_deg: int = option(8, help="largest tensor degree", panel=_SPACE, low=1)
    max_pp_deg: int | None = option(
        None, help="largest number of stages", panel=_SPACE, low=1, shown="no limit"
    )
    """None: limited only by the number of layers and ranks."""
    max_sp_deg: int = option(8, help="largest Ulysses degree", panel=_SPACE, low=1)
    max_cp_deg: int | None = option(
        None,
        help="largest context degree",
        panel=_SPACE,
        low=1,
        shown="tokens / 1024 with --search-space full, else 1",
    )
    """None: limited by `planning.space.TOKENS_OF_RANK` tokens of a sample per rank."""
    fine_grained_mode: bool = option(
        True, help="a strategy per layer (1) or one for all (0)", panel=_SPACE, shown="1"
    )
    """True: a strategy per layer; False: one strategy for all layers."""
    pipeline_type: Literal["1f1b", "gpipe"] = option(
        "1f1b",
        help="schedule",
        panel=_SPACE,
        choices={"pipedream_flush": "1f1b", "1f1b": "1f1b", "gpipe": "gpipe"},
    )
    default_dp_type: Literal["ddp", "zero1", "zero2", "any"] = option(
        "ddp", help="data parallelism of layers without ZeRO-3", panel=_SPACE
    )
    pp_division: tuple[int, ...] | None = option(
        None, help="layers per stage, such as 9,7,8,8", panel=_SPACE, low=1
    )
    pin: tuple[str, ...] = option(
        (),
        help="required rule, such as 'layers 0-3:tp=4' (repeatable)",
        panel=_SPACE,
        metavar="RULE",
    )
    """Rules such as `layers 0-3:tp=4`, `stage 0:ckpt=0`, `tp=2`, `pp=4`, `vtp=2`."""
    forbid: tuple[str, ...] = option(
        (), help="excluded rule, same grammar (repeatable)", panel=_SPACE, metavar="RULE"
    )
    # model of cost
    time_profile_mode: ProfileMode = option(
        "static",
        help="growth of time with the batch",
        panel=_COST,
        shown="static; batch for estimates",
    )
    memory_profile_mode: Literal["static", "sequence"] = option(
        "static",
        help="growth of memory with the sequence",
        panel=_COST,
        # Memory is per sample already: a batch changes nothing.
        choices={
            "static": "static",
            "batch": "static",
            "sequence": "sequence",
            "hybrid": "sequence",
        },
    )
    mixed_precision: Literal["bf16", "fp16", "fp32"] = option(
        "bf16", help="training precision", panel=_COST
    )
    fp32_gradients: bool = option(True, help="sum gradients in fp32", panel=_COST)
    memory_of: Engine | None = option(
        None,
        help="engine of the memory model",
        panel=_COST,
        shown="engine of --engine, or fp32 master weights",
    )
    """Engine whose layout of weights, gradients, optimizer states and buckets is counted.

    For Megatron-LM the activations of layers and head are counted, too, instead of read from the
    memory file. None: 16-bit weights with fp32 master weights and gradients."""
    sequence_parallel: bool = option(True, help="Megatron sequence parallelism", panel=_COST)
    """True if tensor-parallel layers use sequence parallelism."""
    global_memory_buffer: bool = option(True, help="one gather buffer per stage", panel=_COST)
    async_grad_reduce: bool = option(True, help="reduce gradients once per step", panel=_COST)
    cp_kind: Literal["ring", "all-gather", "a2a"] = option(
        "ring",
        help="context-parallel communication (a2a: uniform plans)",
        panel=_COST,
        shown="ring; in uniform plans ring or a2a",
    )
    """Context-parallel communication: overlapped with attention (ring), or before it.

    Per-layer plans treat Ulysses, an all-to-all of heads, as a kind of `tp`, which can be combined
    with ring or all-gather. Uniform plans have one context degree and call Ulysses `a2a`."""
    tp_overlap: bool = option(
        True,
        help="overlap TP communication with backward",
        panel=_COST,
        shown="on; in uniform plans either",
    )
    column_parallel_share: float = option(
        0.5, help="share of column-parallel linears in backward", panel=_COST, low=0, high=1
    )
    """Column-parallel share of the backward FLOP of linear layers, for overlap windows."""
    extrapolate: bool = option(False, help="extrapolate far beyond the measured range", panel=_IN)
    calibration: Calibration | None = None
    """Correction factors of times and bytes from measured plans (`--calibration`)."""
    # solver
    top: int = option(5, help="number of alternatives in the report", panel=_OUT, low=0, high=1000)
    gap: float = option(
        0.0,
        help="stop if the plan is proven to be at most this share slower than the fastest",
        panel=_OUT,
        low=0,
        high=0.5,
    )
    """Only the search for uniform plans may stop; that for per-layer plans proves the optimum."""
    time_limit_s: float | None = option(
        None,
        name="time-limit",
        help="search time limit, seconds; the best plan so far is returned",
        panel=_OUT,
        unit="seconds",
        above=0,
    )

    def __post_init__(self) -> None:
        validate(self)
        # import Calibration only if one is given, to keep startup fast
        if self.calibration is not None:
            from autopar.documents.calibration import Calibration

            if not isinstance(self.calibration, Calibration):
                raise OptionError(
                    "--calibration: expected a path or the result of "
                    f"read_calibration, got {shown(self.calibration)}"
                )
        if self.min_bsz > self.max_bsz:
            raise OptionError(f"--min-bsz: {self.min_bsz} exceeds --max-bsz {self.max_bsz}")
        if (self.max_bsz - self.min_bsz) // self.bsz_scale >= MOST_BATCHES:
            raise OptionError(
                f"--bsz-scale: {self.min_bsz} to {self.max_bsz} by {self.bsz_scale} are more than "
                f"{MOST_BATCHES} global batches",
                remedy="Use a larger step or a smaller range",
            )


def widest(world: int) -> dict[str, Any]:
    """Return the search-space limits that can be lifted, each with its least restrictive value.

    Limits are lifted in this order: degrees, strategy types and rules, then the `disable_`
    switches. `pin`, `pipeline_type`, `strided_tp` and the global batch are not limits.

    world : number of GPUs
    """
    names = [row.name for row in fields(SearchOptions)]
    return {
        "max_tp_deg": world,
        "max_sp_deg": world,
        "max_cp_deg": world,
        "max_pp_deg": None,
        "pp_division": None,
        "sp_space": "tp+sp",
        "search_space": "full",
        "fine_grained_mode": True,
        "default_dp_type": "any",
        "settle_chunk": None,
        "forbid": (),
        **{name: False for name in names if name.startswith("disable_")},
    }


class Shares:
    """Division of a time limit, in seconds, among a number of consecutive searches.

    Each search gets an equal share of the remaining time, so unused time goes to later searches.
    """

    def __init__(self, seconds: float | None, number: int) -> None:
        self._until = None if seconds is None else time.perf_counter() + seconds
        self._left = number

    def following(self) -> float | None:
        """Return the time limit of the next search in seconds, None without a limit."""
        number, self._left = max(self._left, 1), self._left - 1
        if self._until is None:
            return None
        return max(self._until - time.perf_counter(), 0.0) / number


def batches_of(sizes: Any) -> tuple[int, ...]:
    """Return given global batch sizes; raises OptionError if one is invalid."""
    given = checked_value("global_batch_sizes", Sequence[Any] | None, sizes) or ()
    for size in given:
        if size is None:  # as an option, it leaves the size to the search
            raise OptionError("global_batch_sizes: expected integers, got None")
        SearchOptions(settle_bsz=size)  # for its checks
    return tuple(given)


def option_record(
    options: SearchOptions, memory_bytes: float, threads: int | None = None
) -> dict[str, object]:
    """Return the options that affect the result by name, for plan files, without the time limit.

    memory_bytes : memory budget that is stored in place of the one of `options`
    threads : threads of one operation on the measured CPU; None on a GPU, or if unknown
    """
    # only the calibration is a document, all other values are plain
    record: dict[str, object] = {row.name: getattr(options, row.name) for row in fields(options)}
    if options.calibration is not None:
        record["calibration"] = to_builtins(options.calibration)
    record["memory_constraint_bytes"] = memory_bytes
    # limits must not change the bytes of the same result
    del record["time_limit_s"], record["gap"]
    if options.calibration is None:  # plan files of searches without a calibration omit the key
        del record["calibration"]
    if not options.enable_cp:  # as do plan files of searches without it
        del record["enable_cp"]
    return record if threads is None else {**record, "threads": threads}


def _of_program(name: str) -> str:
    """Return the remedy for a program that trains plans of other engines; empty for other words."""
    own = next((one for one in ENGINES if one.name == name and one.starts), None)
    if own is None:
        text = "Use --engine accelerate with --sft or --lora; its export starts the script of TRL"
        return text if name.lower() == "trl" else ""
    return f"Use --engine {own.starts[0]}, then `autopar export PLAN --to {name}`"


@dataclass(frozen=True, kw_only=True)
class Shorthands:
    """Options that set several other options, or select the plans to search."""

    engine: EngineChoice | None = option(
        None,
        help="engine of the plan; `any` searches all",
        instead=_of_program,
        brief="megatron, torchtitan, deepspeed, ... or any [any]",
        panel=_SPACE,
        shown="any with estimates, none with measured profiles",
        most_used=True,
    )
    profile_mode: ProfileMode | None = option(
        None, help="set both modes below", panel=_COST, place=-1
    )


_ENCODER_LAYERS, _DECODER_LAYERS, _ENCODER_LENGTH = (
    *("num-encoder-layers", "num-decoder-layers"),
    "encoder-seq-length",
)


@dataclass(frozen=True, kw_only=True)
class StackSizes:
    """Sizes of encoder and decoder, as options of Galvatron's T5; see `with_stacks`."""

    num_encoder_layers: str | None = option(
        None, help="layers of the encoder; --num-layers has both", panel=_IN, metavar="N"
    )
    num_decoder_layers: str | None = option(
        None, help="layers of the decoder", panel=_IN, metavar="N"
    )
    encoder_seq_length: str | None = option(
        None,
        help="tokens of the encoder; --seq-length is then that of the decoder",
        panel=_IN,
        metavar="N",
    )


def with_stacks(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return typed options with sizes of encoder and decoder as `--num-layers`, `--seq-length`.

    Raises OptionError if a size of the other stack is missing or given twice.
    """
    found = dict(raw)
    encoder, decoder, length = (
        found.pop(name, None) for name in (_ENCODER_LAYERS, _DECODER_LAYERS, _ENCODER_LENGTH)
    )
    if (encoder is None) != (decoder is None):
        given, other = (
            (_DECODER_LAYERS, _ENCODER_LAYERS)
            if encoder is None
            else (_ENCODER_LAYERS, _DECODER_LAYERS)
        )
        raise OptionError(f"--{given} needs --{other}", remedy=f"Add --{other}")
    if encoder is not None:
        if found.get("num-layers") is not None:
            raise OptionError(
                f"--num-layers and --{_ENCODER_LAYERS} set the same sizes",
                remedy="Remove one of them",
            )
        found["num-layers"] = f"{encoder},{decoder}"
    if length is not None:
        own = str(found.get("seq-length") or length)
        if "," in own:
            raise OptionError(
                f"--seq-length {own} and --{_ENCODER_LENGTH} set the same sizes",
                remedy="Remove one of them",
            )
        found["seq-length"] = f"{length},{own}"
    return found


ALL, UP_TO = "all", "up-to"
"""Values of `--use` other than numbers."""


def _gpus_to_use(text: str) -> str:
    """Return the value of `--use`; raises OptionError if it is neither a word nor a number."""
    word = text.strip().lower()
    if word in (ALL, UP_TO):
        return word
    if not (word.isascii() and word.isdigit() and int(word[:9]) > 0):
        raise OptionError(f"--use: expected all, up-to or a number of GPUs, got {text!r:.60}")
    return str(int(word))


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """Options of the output of a search."""

    frontier: bool = option(False, help="best throughput at smaller memory budgets", panel=_OUT)
    plot_path: str | None = option(
        None,
        name="plot",
        help="plot the frontier, .png or .svg (extra: plot)",
        panel=_OUT,
        metavar="FILE",
    )
    evaluate: str | None = option(
        None,
        help="estimate this plan or strategy file instead of searching",
        panel=_OUT,
        metavar="FILE",
        brief="estimate this plan instead of searching",
        most_used=True,
    )
    json_path: str | None = json_option(_OUT, name="json", most_used=True)
    config_path: str | None = option(
        "configs",
        name="output-config-path",
        help="folder of the written plans, or `none`",
        panel=_OUT,
        metavar="DIR",
        brief="folder of the written plans, or none [configs]",
    )
    """Path of the strategy file or its folder; None writes no file."""
    verbose: bool = option(False, help="print stages, terms, alternatives and inputs", panel=_OUT)
    goal: Literal["throughput", "cost", "fewest-gpus"] = option(
        "throughput",
        help="objective: tokens/s, tokens/s per GPU, or few GPUs",
        brief="throughput, cost, or fewest-gpus [throughput]",
        panel=_OUT,
        most_used=True,
    )
    use: str | None = option(
        None,
        help="GPUs of --hardware to use: `all`, a number, or `up-to` for the best part",
        panel=_OUT,
        metavar="N",
        shown="up-to with --goal and in racks of trays, else all",
        parse=_gpus_to_use,
    )
    tokens_per_s: float | None = option(
        None,
        name="tokens-per-s",
        help="smallest tokens/s of all GPUs, for --goal cost or fewest-gpus",
        panel=_OUT,
        above=0,
        high=1e12,
    )
    price: float | None = option(
        None,
        help="price of a GPU-hour, $; adds the cost per billion tokens",
        panel=_OUT,
        unit="dollars",
        above=0,
        high=1e6,
    )
    html_path: str | None = option(
        None,
        name="html",
        help="write an HTML page with charts (docs/guides/pictures.md)",
        brief="write an HTML page with charts",
        panel=_OUT,
        metavar="FILE",
        most_used=True,
    )
    trace_path: str | None = option(
        None,
        name="trace",
        help="write the predicted step as a trace for Perfetto; .gz compresses",
        panel=_OUT,
        metavar="FILE",
    )
