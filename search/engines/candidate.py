"""Searched variables of a uniform plan (Choice), and constraints of the user (Fixed, Training).

Words and values are those of the engines. The search space of each engine is in
`search.engines.table`, time and memory of a choice in `search.planning.uniform.cost_model`.
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
"""Precision of GEMMs: 16 bits; 8 bits with a scale per tensor, per block of 128, or per 32
elements; 4 bits with a scale per 16 elements. `mxfp8` and `nvfp4` need Blackwell."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Dispatcher = Literal["alltoall", "flex"]

NONE, FULL = "none", "full"
"""Recomputation of nothing, and of whole layers; `NONE` also means no offload."""
MODULES: tuple[str, ...] = get_args(Module)
"""Modules of a layer that can be recomputed separately."""


class Candidate(Record, order=True):
    """Candidate of a uniform plan: degrees, batch and switches; GPUs define the data degree.

    The order of the fields is the canonical order, which ranks equally fast plans.
    """

    pp: int = 1
    tp: int = 1
    tp_overlap: bool = False
    """True if tensor-parallel communication is overlapped with GEMMs."""
    cp: int = 1
    cp_kind: ContextKind = "ring"
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    """Virtual pipeline size: model chunks per pipeline stage."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule. 1F1B with several chunks per stage becomes `interleaved`."""
    micro_batch: int = 1
    """Micro-batch size: sequences per micro-batch and data-parallel rank."""
    zero: int = 1
    """ZeRO stage. 0: replicas; 1: sharded optimizer states; 2: also gradients; 3: also weights."""
    dp_replicate: int = 1
    """Number of HSDP replicas, or of instances of Megatron-LM's distributed optimizer."""
    recompute: str = NONE
    """Recomputation: `none`, `full`, `op` (torchtitan), `block N`, or modules joined by `+`."""
    offload: str = NONE
    """Modules of each layer with offloaded activations, joined by `+`, or `none`."""
    precision: Precision = "bf16"
    compiled: bool = False
    """True if torch.compile compiles each layer and the loss."""
    dispatcher: Dispatcher = "alltoall"
    """Token dispatcher: `alltoall`, or `flex` for the kernels of DeepEP or HybridEP."""
    overlap_experts: bool = False
    """True if expert communication of one micro-batch is overlapped with compute of another."""
    global_batch: int = 1
    chunks: tuple[tuple[Chunk, ...], ...] = ()
    """Model chunks of every pipeline stage."""

    def __post_init__(self) -> None:
        """Set the name of 1F1B, `1f1b` or `interleaved`, from the number of chunks."""
        if self.schedule in ("1f1b", "interleaved"):
            force_setattr(self, "schedule", schedule_of_chunks(self.vpp))

    def line(self, world: int, *, experts: bool) -> str:
        """Return the plan in one line, such as `tp2 pp8 dp64 vp4, ZeRO-1, micro-batch 1`."""
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
        if self.vpp > SCHEDULES[self.schedule].least_chunks or self.schedule == "interleaved":
            degrees.append(f"vp{self.vpp}")
        parts = [" ".join(degrees)]
        copies = f" in {self.dp_replicate} replicas" if self.dp_replicate > 1 else ""
        parts.append("DDP" if self.zero == 0 else f"ZeRO-{self.zero}{copies}")
        parts.append(f"micro-batch {self.micro_batch}")
        if self.schedule not in ("1f1b", "interleaved"):
            parts.append(SCHEDULES[self.schedule].title)
        if self.tp_overlap and self.tp > 1:
            parts.append("TP overlap")
        if self.precision != "bf16":
            parts.append(self.precision)
        if self.compiled:
            parts.append("compiled")
        if experts and self.ep > 1 and self.dispatcher == "flex":
            parts.append("fused dispatcher")
        if self.overlap_experts:
            parts.append("EP overlap")
        if self.recompute != NONE:
            parts.append(f"recompute {self.recompute}")
        if self.offload != NONE:
            parts.append(f"offload {self.offload}")
        return ", ".join(parts)


class Constraints(Record):
    """Constraints of a search: allowed values by field of `Candidate`; None: any value."""

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
        """Names of the options that set constraints, except precision."""
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


def allowed_values(
    values: Iterable[_Value], fixed: tuple[_Value, ...] | None
) -> tuple[_Value, ...]:
    """Return the values that a constraint allows, in their order; None allows all."""
    return tuple(value for value in values if fixed is None or value in fixed)


def recomputation_of(words: str) -> Recomputation:
    """Return the recomputation of a layer from the words of a choice other than `block N`."""
    if words == NONE:
        return frozenset()
    if words in (FULL, "op"):
        return cast(Literal["full", "op"], words)
    return frozenset(cast(list[Module], words.split("+")))


def with_recompute(strategy: Strategy, words: str) -> Strategy:
    """Return a strategy with the recomputation that the words of a choice describe."""
    if words == NONE:
        return strategy
    if words.startswith("block "):
        return recomputing(strategy, "full", first=int(words.removeprefix("block ")))
    return recomputing(strategy, recomputation_of(words))


def recompute_words(recomputed: Recomputed) -> str:
    """Return the words for the recomputation of layers."""
    if recomputed.kind == "modules":
        return "+".join(sorted(recomputed.modules))
    if recomputed.kind in ("block", "every"):
        return f"{recomputed.kind} {recomputed.number}"
    return recomputed.kind


def offload_of(words: str) -> frozenset[OffloadModule]:
    """Return the modules with offloaded activations from the words of a choice."""
    modules = () if words == NONE else words.split("+")
    return frozenset(cast(Iterable[OffloadModule], modules))


def offload_words(split: Split) -> str:
    """Return the words for the modules with offloaded activations."""
    return "+".join(sorted(split.offload)) or NONE


# --------------------------------------------------------------------------------------------------
# Adapters, optimizer type and optimizer offload. The user sets these and a search never does: LoRA
# changes the training result, and low-precision optimizer states may. An unsupported setting is
# rejected when the run of an engine is made.


OptimizerName = Literal["adam", "adam-bf16", "adam8bit"]
"""Adam with 32-bit moments, with 16-bit moments (Megatron-Core's precision-aware optimizer), and
with 8-bit moments and a scale per 256 elements (bitsandbytes)."""
BaseName = Literal["bf16", "int8", "nf4"]
BASES: dict[BaseName, BaseKind] = {"bf16": "16 bits", "int8": "int8", "nf4": "nf4"}
"""Word -> storage format of the frozen base weights under adapters."""


class TrainingSettings(Record):
    """Adapter and optimizer settings of a run."""

    lora_rank: int | None = None
    """Rank of LoRA adapters with frozen base weights; None: all weights are trained."""
    lora_base: BaseName = "bf16"
    optimizer: OptimizerName = "adam"
    offload: float = 0.0
    """Fraction of the optimizer states stored and updated on the host, 0 to 1."""

    @property
    def words(self) -> str:
        """Command-line options of these settings; empty for Adam on the device for all weights."""
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
         "{engine} has no block-scaled 8-bit Adam"),
    Rule("training.adam-bf16", ("engine", "optimizer"),
         lambda engine, kind: (engine != "megatron") * (kind == "adam-bf16"),
         "16-bit Adam moments need Megatron-Core"),
    # Source: validate_args of Megatron-LM.
    Rule("training.adam-bf16-sharded", ("engine", "optimizer", "zero"),
         lambda engine, kind, zero: (engine == "megatron") * (kind == "adam-bf16") * (zero == 0),
         "16-bit Adam moments need the distributed optimizer"),
    # Source: `ratio` of offload_optimizer in DeepSpeed.
    Rule("training.offload-share", ("engine", "offload", "zero"),
         lambda engine, share, zero:
         (engine == "deepspeed") * (share > 0) * (share < 1) * (zero != 3),
         "DeepSpeed offloads a fraction of the states only with ZeRO-3"),
)  # fmt: skip
"""Rules on adapters and optimizer; the engines check the others."""


def with_training(run: Run, training: TrainingSettings, engine: str) -> Run:
    """Return a run with training settings; raises RuleError where its engine lacks them."""
    if training == TrainingSettings():
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
        # With both on the device, only the remainder of fp32 weights to bf16 is stored.
        whole = training.offload or zero != 1
        optimizer = replace(optimizer, moments_bytes=4, master_bytes=4 if whole else 2)
    elif training.optimizer == "adam8bit":
        optimizer = replace(optimizer, kind="adam8bit")
    if training.offload:
        optimizer = replace(
            optimizer,
            offload=training.offload,
            # Megatron-LM offloads the optimizer only if it is precision-aware, which includes the
            # fp32 weights.
            offload_master=True,
            # FSDP offloads the weights together with everything else.
            offload_weights=torch and engine != "deepspeed",
        )
    adapters = None
    if training.lora_rank is not None:
        adapters = Adapters(
            rank=training.lora_rank,
            base=BASES[training.lora_base],
            # Megatron has one matrix for queries, keys and values, and one for gate and up.
            fused=not torch,
        )
    return replace(run, runtime=replace(runtime, optimizer=optimizer, adapters=adapters))
