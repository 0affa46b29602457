"""Choice: what a search decides about a launch; Fixed and Training: what somebody has decided.

Words and values are those of trainers. What an engine can be told is
`search.engines.table`'s; what a choice takes is `search.planning.uniform.prices`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar, cast, get_args

from msgspec.structs import force_setattr

from autopar.pipeline.schedules import SCHEDULES, Schedule, schedule_of_chunks
from autopar.records import Record, replace
from autopar.run.plan import Module
from autopar.run.rules import Rule, refuse
from autopar.run.run import Run
from autopar.run.strategy import (
    Chunk,
    ContextKind,
    OffloadModule,
    Recomputation,
    Recomputed,
    Split,
    Strategy,
    recomputing,
)
from autopar.training.adapters import Adapters, BaseKind

Precision = Literal["bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]
"""Of products: 16 bits; 8 bits scaled per tensor, per block of 128, per 32 elements; 4 bits scaled
per 16 elements (the last two on Blackwell)."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Dispatcher = Literal["alltoall", "flex"]

NONE, FULL = "none", "full"
"""Recomputation of nothing, and of whole layers."""
MODULES: tuple[str, ...] = get_args(Module)
"""Parts of a layer that can be computed again apart."""


class Choice(Record, order=True):
    """Degrees, batch and switches of a launch; the data degree follows from the GPUs.

    The order of the fields is the canonical one, in which equally fast launches are ranked.
    """

    pp: int = 1
    tp: int = 1
    tp_overlap: bool = False
    """Products run beside the transfers of tensor ranks."""
    cp: int = 1
    cp_kind: ContextKind = "ring"
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    """Chunks of layers that a stage holds."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's micro-batches; 1F1B is interleaved where a stage has several chunks."""
    micro_batch: int = 1
    """Sequences of a micro-batch on one data rank."""
    zero: int = 1
    """0: replicas; 1 to 3: optimizer, gradients, weights as well are sharded over data ranks."""
    dp_replicate: int = 1
    """Copies of what is sharded: HSDP, instances of Megatron-LM's distributed optimizer."""
    recompute: str = NONE
    """`none`, `full`, `op` (torchtitan's), `block N` or modules joined by `+`."""
    offload: str = NONE
    """Modules of each layer whose activations wait on the host, joined by `+`, or `none`."""
    precision: Precision = "bf16"
    compiled: bool = False
    """Each layer, and the loss, by torch.compile."""
    dispatcher: Dispatcher = "alltoall"
    """How tokens come to experts of other ranks; `flex` is DeepEP's or HybridEP's kernels."""
    overlap_experts: bool = False
    """One micro-batch's exchanges run beside another's compute."""
    global_batch: int = 1
    chunks: tuple[tuple[Chunk, ...], ...] = ()
    """Layers of every stage by chunk."""

    def __post_init__(self) -> None:
        """Call 1F1B by the name that it has with so many chunks."""
        if self.schedule in ("1f1b", "interleaved"):
            force_setattr(self, "schedule", schedule_of_chunks(self.vpp))

    def line(self, world: int, *, experts: bool) -> str:
        """Return the degrees as one says them: `tp2 pp8 dp64, ZeRO-1, micro-batch 1, v4`."""
        dp = world // (self.tp * self.cp * self.pp)
        degrees = [f"tp{self.tp}"] if self.tp > 1 else []
        exchanged = f" ({self.cp_kind})" if self.cp_kind != "ring" else ""
        degrees += [f"cp{self.cp}{exchanged}"] if self.cp > 1 else []
        degrees += [f"pp{self.pp}"] if self.pp > 1 else []
        degrees += [f"dp{dp}"]
        if experts:
            edp = world // (self.ep * self.etp * self.pp)
            degrees += [f"ep{self.ep}"] + ([f"etp{self.etp}"] if self.etp > 1 else [])
            degrees += [f"edp{edp}"]
        parts = [" ".join(degrees)]
        copies = f" in {self.dp_replicate} replicas" if self.dp_replicate > 1 else ""
        parts.append("replicas" if self.zero == 0 else f"ZeRO-{self.zero}{copies}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.schedule not in ("1f1b", "interleaved"):
            parts.append(SCHEDULES[self.schedule].title)
        if self.vpp > SCHEDULES[self.schedule].least_chunks or self.schedule == "interleaved":
            parts.append(f"v{self.vpp}")
        if self.tp_overlap and self.tp > 1:
            parts.append("tp overlap")
        if self.precision != "bf16":
            parts.append(self.precision)
        if self.compiled:
            parts.append("compiled")
        if experts and self.ep > 1 and self.dispatcher == "flex":
            parts.append("flex dispatcher")
        if self.overlap_experts:
            parts.append("exchanges overlapped")
        if self.recompute != NONE:
            parts.append(f"recompute {self.recompute}")
        if self.offload != NONE:
            parts.append(f"offload {self.offload}")
        return ", ".join(parts)


class Fixed(Record):
    """Values that a search has to keep to, by field of `Choice`; None: any."""

    tp: tuple[int, ...] | None = None
    tp_overlap: bool | None = None
    cp: tuple[int, ...] | None = None
    cp_kind: tuple[ContextKind, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    vpp: tuple[int, ...] | None = None
    schedule: tuple[Schedule, ...] | None = None
    dp: tuple[int, ...] | None = None
    zero: tuple[int, ...] | None = None
    dp_replicate: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    offload: tuple[str, ...] | None = None
    precision: tuple[Precision, ...] = ("bf16",)
    compiled: bool | None = None
    dispatcher: tuple[Dispatcher, ...] | None = None
    overlap_experts: bool | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that say what is left, precisions apart."""
        names = {
            "micro_batch": "micro-batch-size",
            "overlap_experts": "moe-overlap",
            "offload": "offload-activations",
            "compiled": "compile",
        }
        given = [
            name
            for name in self.__struct_fields__
            if name != "precision" and getattr(self, name) is not None
        ]
        return tuple(names.get(name, name.replace("_", "-")) for name in given)


_Value = TypeVar("_Value")


def kept(values: Iterable[_Value], fixed: tuple[_Value, ...] | None) -> tuple[_Value, ...]:
    """Return the values that somebody has left, in their order."""
    return tuple(value for value in values if fixed is None or value in fixed)


def recomputation_of(words: str) -> Recomputation:
    """Return what a layer recomputes by a choice's words, which are not those of blocks."""
    if words == NONE:
        return frozenset()
    if words in (FULL, "op"):
        return cast(Literal["full", "op"], words)
    return frozenset(cast(list[Module], words.split("+")))


def with_recompute(strategy: Strategy, words: str) -> Strategy:
    """Return a strategy whose layers recompute what a choice's words say."""
    if words == NONE:
        return strategy
    if words.startswith("block "):
        return recomputing(strategy, "full", first=int(words.removeprefix("block ")))
    return recomputing(strategy, recomputation_of(words))


def recompute_words(recomputed: Recomputed) -> str:
    """Return the words of what layers recompute."""
    if recomputed.kind == "modules":
        return "+".join(sorted(recomputed.modules))
    if recomputed.kind in ("block", "every"):
        return f"{recomputed.kind} {recomputed.number}"
    return recomputed.kind


def offload_of(words: str) -> frozenset[OffloadModule]:
    """Return the modules whose activations are offloaded by a choice's words."""
    modules = () if words == NONE else words.split("+")
    return frozenset(cast(Iterable[OffloadModule], modules))


def offload_words(split: Split) -> str:
    """Return the words of the modules whose activations are offloaded."""
    return "+".join(sorted(split.offload)) or NONE


# --------------------------------------------------------------------------------------------------
# What is trained of a model and where its optimizer's states lie: given, not chosen, since LoRA
# changes what is learned, and so may states of fewer bits. What a trainer does not have is refused
# where its launch is made.


OptimizerName = Literal["adam", "adam-bf16", "adam8bit"]
"""Adam with moments of 32 bits, of 16 (Megatron-Core's precision-aware optimizer), and of 8 with a
scale of each 256 (bitsandbytes)."""
BaseName = Literal["bf16", "int8", "nf4"]
BASES: dict[BaseName, BaseKind] = {"bf16": "16 bits", "int8": "int8", "nf4": "nf4"}
"""Word -> in what the frozen weights beside adapters are kept."""


class Training(Record):
    """Adapters and optimizer of a launch."""

    lora_rank: int | None = None
    """Of low-rank adapters beside frozen weights; None: all weights are trained."""
    lora_base: BaseName = "bf16"
    optimizer: OptimizerName = "adam"
    offload: float = 0.0
    """Share of the optimizer's states that lie, and are updated, on the host."""

    @property
    def words(self) -> str:
        """The options that say it, empty where all weights are trained with Adam on the device."""
        found = []
        if self.lora_rank is not None:
            found.append(f"--lora {self.lora_rank}")
            if self.lora_base != "bf16":
                found.append(f"--lora-base {self.lora_base}")
        if self.optimizer != "adam":
            found.append(f"--optimizer {self.optimizer}")
        if self.offload:
            found.append(f"--offload-optimizer {self.offload:g}")
        return " ".join(found)


TRAINING = (
    Rule("training.adapters", ("engine", "adapters"),
         lambda engine, adapters: (engine == "torchtitan") * adapters, "{engine} has no adapters"),
    Rule("training.adam8bit", ("engine", "optimizer"),
         lambda engine, kind: (engine == "torchtitan") * (kind == "adam8bit"),
         "{engine} has no Adam with scales of blocks"),
    Rule("training.adam-bf16", ("engine", "optimizer"),
         lambda engine, kind: (engine != "megatron") * (kind == "adam-bf16"),
         "moments of Adam in 16 bits are Megatron-Core's"),
    # validate_args of Megatron-LM
    Rule("training.adam-bf16-sharded", ("engine", "optimizer", "zero"),
         lambda engine, kind, zero: (engine == "megatron") * (kind == "adam-bf16") * (zero == 0),
         "moments of 16 bits are of the distributed optimizer alone"),
    # `ratio` of offload_optimizer
    Rule("training.offload-share", ("engine", "offload", "zero"),
         lambda engine, share, zero:
         (engine == "deepspeed") * (share > 0) * (share < 1) * (zero != 3),
         "DeepSpeed offloads a share of the states with ZeRO-3 alone"),
)  # fmt: skip
"""Rules of adapters and optimizer; the others are those of the launch."""


def trained(run: Run, training: Training, engine: str) -> Run:
    """Return a run that trains so; raises RuleError where its engine does not."""
    if training == Training():
        return run
    runtime, zero, torch = run.runtime, run.split.zero, run.kernels.torch_layers
    optimizer = runtime.optimizer
    refuse(
        TRAINING,
        {
            "engine": engine,
            "optimizer": training.optimizer,
            "adapters": training.lora_rank is not None,
            "offload": training.offload,
            "zero": zero,
        },
    )
    if training.optimizer == "adam-bf16":
        # where both are on the device, fp32 weights lose what bf16 ones have of them
        whole = training.offload or zero != 1
        optimizer = replace(optimizer, moments_bytes=4, master_bytes=4 if whole else 2)
    elif training.optimizer == "adam8bit":
        optimizer = replace(optimizer, kind="adam8bit")
    if training.offload:
        optimizer = replace(
            optimizer,
            offload=training.offload,
            # Megatron-LM has the host's optimizer beside the precision-aware one alone, which takes
            # fp32 weights along
            offload_master=True,
            # FSDP's weights go with everything
            offload_weights=torch and engine != "deepspeed",
        )
    adapters = None
    if training.lora_rank is not None:
        adapters = Adapters(
            rank=training.lora_rank,
            base=BASES[training.lora_base],
            # Megatron's matrices are one of queries, keys and values, and one of gate and up
            fused=not torch,
        )
    return replace(run, runtime=replace(runtime, optimizer=optimizer, adapters=adapters))
