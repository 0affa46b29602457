"""Searched variables of a uniform plan (`Candidate`) and user settings of the search.

`Constraints` limits the values of a candidate, `TrainingSettings` contains adapters and optimizer.
`search.engines.table` lists the search space of each engine. `search.planning.uniform.cost_model`
computes time and memory of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar, cast, get_args

from msgspec.structs import force_setattr

from autopar.pipeline.schedules import SCHEDULES, Schedule, schedule_of_chunks
from autopar.records import Record, replace
from autopar.run.architecture import Mlp, Model, ShortConvolution
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
from autopar.training.adapters import DENSE_TARGETS, MIXER_TARGETS, Adapters, BaseKind, Target
from search.engines.huggingface.named_optimizers import (
    OPTIMIZERS,
    UNTIMED,
    OptimizerName,
    has_narrow_adapters,
    of_flat_tensors,
    of_narrow_weights,
    of_shards,
    updates_shards,
)

Precision = Literal["bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]
"""Precision of GEMMs: 16 bits; 8 bits with a scale per tensor, per block of 128, or per 32
elements; 4 bits with a scale per 16 elements. `mxfp8` and `nvfp4` need Blackwell."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Dispatcher = Literal["alltoall", "flex"]

NONE, FULL = "none", "full"
"""Values of `Candidate.recompute`: no recomputation, full layers. `NONE` also means no offload."""
MODULES: tuple[str, ...] = get_args(Module)
"""Modules of a layer that can be recomputed separately."""


class Candidate(Record, order=True):
    """Candidate of a uniform plan: parallel degrees, batch sizes and options.

    The data-parallel degree follows from the number of GPUs. Equally fast candidates are ranked by
    their fields, in the order below.
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
    """Number of HSDP replicas, in Megatron-LM of distributed optimizer instances; 1: no HSDP."""
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
        """Rename schedule 1F1B to `interleaved` if a stage has several chunks, else to `1f1b`."""
        if self.schedule in ("1f1b", "interleaved"):
            force_setattr(self, "schedule", schedule_of_chunks(self.vpp))

    def line(self, world: int, *, experts: bool) -> str:
        """Return the plan in one line, such as `tp2 pp8 dp64 vp4, ZeRO-1, micro-batch 1`.

        world : number of GPUs.
        experts : True if the model has experts.
        """
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
        """Names of options that set constraints, such as `micro-batch-size`, except `precision`."""
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

    def includes(self, other: Constraints) -> bool:
        """Return True if `other` only restricts precision and settings of layers further."""
        wider = {name: getattr(self, name) for name in ("tp_overlap", "cp", "recompute", "offload")}
        return (
            {*other.precision} <= {*self.precision}
            and all(mine in (None, getattr(other, name)) for name, mine in wider.items())
            and replace(other, precision=self.precision, **wider) == self
        )


_Value = TypeVar("_Value")


def allowed_values(
    values: Iterable[_Value], fixed: tuple[_Value, ...] | None
) -> tuple[_Value, ...]:
    """Return the values that are in `fixed`, in the order of `values`; None allows all values."""
    return tuple(value for value in values if fixed is None or value in fixed)


def recomputation_of(words: str) -> Recomputation:
    """Return the recomputation of one layer from `Candidate.recompute`, except for `block N`."""
    if words == NONE:
        return frozenset()
    if words in (FULL, "op"):
        return cast(Literal["full", "op"], words)
    return frozenset(cast(list[Module], words.split("+")))


def with_recompute(strategy: Strategy, words: str) -> Strategy:
    """Return a strategy with the recomputation that `words`, a `Candidate.recompute`, describe."""
    if words == NONE:
        return strategy
    if words.startswith("block "):
        return recomputing(strategy, "full", first=int(words.removeprefix("block ")))
    return recomputing(strategy, recomputation_of(words))


def recompute_words(recomputed: Recomputed) -> str:
    """Return the recomputation of all layers as `Candidate.recompute`, or `every N`."""
    if recomputed.kind == "modules":
        return "+".join(sorted(recomputed.modules))
    if recomputed.kind in ("block", "every"):
        return f"{recomputed.kind} {recomputed.number}"
    return recomputed.kind


def offload_of(words: str) -> frozenset[OffloadModule]:
    """Return the modules with offloaded activations from `Candidate.offload`."""
    modules = () if words == NONE else words.split("+")
    return frozenset(cast(Iterable[OffloadModule], modules))


def offload_words(split: Split) -> str:
    """Return the modules of a split with offloaded activations as `Candidate.offload`."""
    return "+".join(sorted(split.offload)) or NONE


# --------------------------------------------------------------------------------------------------
# Adapters, optimizer type and optimizer offload. These are user settings and not searched: LoRA
# changes the training result, and low-precision optimizer states may. `with_training` rejects a
# setting that the engine does not support.


BaseName = Literal["bf16", "int8", "nf4"]
BASES: dict[BaseName, BaseKind] = {"bf16": "16 bits", "int8": "int8", "nf4": "nf4"}
"""Value of `--lora-base` -> storage format of the frozen base weights."""


class TrainingSettings(Record):
    """Adapter and optimizer settings of a run."""

    sft: bool = False
    """True if all weights are trained by TRL's script or by Megatron-Bridge's recipe."""
    lora_rank: int | None = None
    """Rank of LoRA adapters with frozen base weights; None: all weights are trained."""
    lora_base: BaseName = "bf16"
    optimizer: OptimizerName = "adam"
    pure_bf16: bool = False
    """True if all weights are trained in bf16, without an fp32 copy."""
    offload: float = 0.0
    """Fraction of the optimizer states stored and updated on the host, 0 to 1."""

    @property
    def fine_tunes(self) -> bool:
        """True if engines of transformers models train with TRL's script."""
        return self.sft or self.lora_rank is not None

    @property
    def options(self) -> tuple[str, ...]:
        """Command-line options of the settings that differ from the defaults, with their values."""
        found = []
        if self.sft and self.lora_rank is None:
            found.append("--sft")
        if self.lora_rank is not None:
            found.append(f"--lora {self.lora_rank}")
            if self.lora_base != "bf16":
                found.append(f"--lora-base {self.lora_base}")
        if self.optimizer != "adam":
            found.append(f"--optimizer {self.optimizer}")
        if self.pure_bf16:
            found.append("--pure-bf16")
        if self.offload:
            found.append(f"--offload-optimizer {self.offload:g}")
        return tuple(found)


SHARDS = Rule(
    "training.shards", ("unsharded_optimizer", "zero", "tp"),
    lambda name, zero, tp: (name != "") * ((zero >= 2) + (tp > 1)),
    "{unsharded_optimizer} does not update the shards of FSDP2 and tensor ranks",
    "Use adam8bit, which is then torchao's, or --zero 0, or DeepSpeed",
)  # fmt: skip
"""Rule on the optimizers of accelerate, searched or read.

Source: `search.engines.huggingface.named_optimizers.updates_shards`."""
TRAINING = (
    Rule("training.sft", ("engine", "sft"),
         lambda engine, sft: sft * (engine not in ("deepspeed", "accelerate", "megatron")),
         "no script of {engine} fine-tunes all weights",
         "Use --engine deepspeed, accelerate or megatron"),
    Rule("training.adam8bit", ("engine", "optimizer"),
         lambda engine, kind: (engine == "torchtitan") * (kind == "adam8bit"),
         "{engine} has no block-scaled 8-bit Adam"),
    Rule("training.optimizer", ("engine", "optimizer"),
         lambda engine, kind: (engine in ("megatron", "torchtitan"))
         * (kind not in ("adam", "adam-bf16", "adam8bit", *UNTIMED))
         * ((engine, kind) != ("megatron", "sgd")),
         "{engine} has no optimizer {optimizer}", "Use --engine deepspeed or accelerate"),
    Rule("training.sgd", ("engine", "optimizer"),
         lambda engine, kind: (engine == "megatron") * (kind == "sgd"),
         "states of SGD in Megatron-Core are not counted", level="unpriced"),
    Rule("training.low-rank", ("optimizer",), lambda kind: kind in UNTIMED,
         "the time of {optimizer} is not known, so that no plan can be the fastest",
         "Check the memory of a script with autopar check", level="unpriced"),
    # DeepSpeed refuses others than its own on the host (`zero_force_ds_cpu_optimizer`).
    Rule("training.host-update", ("optimizer", "offload"),
         lambda kind, share: (share > 0) * (kind not in ("adam", "adam-bf16")),
         "updates of {optimizer} on the host have no price", "Use --optimizer adam",
         level="unpriced"),
    Rule("training.pure-bf16", ("engine", "pure_bf16"),
         lambda engine, pure: pure * (engine not in ("torchtitan", "accelerate")),
         "{engine} keeps fp32 weights", "Use --engine torchtitan or accelerate"),
    Rule("training.pure-adapters", ("pure_bf16", "lora"), lambda pure, lora: pure * lora,
         "--pure-bf16 is for training of all weights", "Remove --pure-bf16 or --lora"),
    Rule("training.adam-bf16", ("engine", "optimizer"),
         lambda engine, kind: (engine != "megatron") * (kind == "adam-bf16"),
         "16-bit Adam moments need Megatron-Core", "Use --pure-bf16 for 16-bit weights as well"),
    # Source: validate_args of Megatron-LM.
    Rule("training.adam-bf16-sharded", ("engine", "optimizer", "zero"),
         lambda engine, kind, zero: (engine == "megatron") * (kind == "adam-bf16") * (zero == 0),
         "16-bit Adam moments need the distributed optimizer"),
    # Source: `ratio` of offload_optimizer in DeepSpeed.
    Rule("training.offload-share", ("engine", "offload", "zero"),
         lambda engine, share, zero:
         (engine == "deepspeed") * (share > 0) * (share < 1) * (zero != 3),
         "DeepSpeed offloads a fraction of the states only with ZeRO-3"),
    SHARDS,
)  # fmt: skip
"""Rules on the optimizer. Rules on adapters are in the folders of the engines."""


def unsharded(name: OptimizerName) -> str:
    """Return the name of an optimizer that has no form for DTensors, else an empty text."""
    known = name in UNTIMED or updates_shards(of_shards(OPTIMIZERS[name].optimizer))
    return "" if known else name


def with_training(run: Run, training: TrainingSettings, engine: str) -> Run:
    """Return a run with training settings; raises RuleError if the engine does not support them."""
    if training == TrainingSettings():
        return run
    runtime, zero, torch = run.runtime, run.split.zero, run.kernels.torch_layers
    optimizer, accelerates = runtime.optimizer, engine == "accelerate"
    refuse(
        TRAINING,
        {
            "engine": engine,
            "sft": training.sft and training.lora_rank is None,
            "lora": training.lora_rank is not None,
            "optimizer": training.optimizer,
            "pure_bf16": training.pure_bf16,
            "offload": training.offload,
            "unsharded_optimizer": unsharded(training.optimizer) if accelerates else "",
            "zero": zero,
            # rules of accelerate exclude tensor ranks, with the same rule
            "tp": 1,
        },
    )
    named = OPTIMIZERS[training.optimizer].optimizer
    optimizer = replace(named, host_adam=optimizer.host_adam)
    if training.optimizer == "adam-bf16":
        # With ZeRO-1 and no offload, Megatron-Core stores an fp32 weight as its bf16 copy and a
        # remainder of 2 bytes.
        whole = training.offload or zero != 1
        optimizer = replace(optimizer, master_bytes=4 if whole else 2)
    if engine == "deepspeed":
        optimizer = of_flat_tensors(optimizer)
    elif accelerates and (zero or run.split.tp > 1):
        optimizer = of_shards(optimizer)
    if training.pure_bf16:
        optimizer = of_narrow_weights(optimizer)
    if training.offload:
        optimizer = replace(
            optimizer,
            offload=training.offload,
            # Megatron-LM offloads only the precision-aware optimizer, including its fp32 weights.
            offload_master=True,
            # FSDP offloads weights, gradients and optimizer states together.
            offload_weights=torch and engine != "deepspeed",
        )
    adapters, kernels = None, run.kernels
    if training.lora_rank is not None:
        # Megatron-Bridge finds modules by name, so that MLP targets include the experts.
        experts = not torch and run.model.experts is not None
        targets = linear_targets(run.model)
        if kernels.module == "transformers" and renames_experts(run.model):
            targets = targets - _OF_EXPERTS
        adapters = Adapters(
            rank=training.lora_rank,
            targets=targets | (_OF_EXPERTS if experts else frozenset()),
            base=BASES[training.lora_base],
            # Megatron-LM fuses query, key and value projections, and gate and up projections.
            fused=not torch,
            shared_by_experts=experts,
        )
        # FSDP2 leaves adapters in their type, DeepSpeed adds fp32 weights
        if accelerates and has_narrow_adapters(adapters):
            optimizer = of_narrow_weights(optimizer)
    if training.fine_tunes and kernels.module == "transformers":
        # Exports start TRL's script (`search.engines.huggingface.trl`).
        kernels = replace(kernels, loss="trl")
    # Megatron-Bridge trains such runs of Megatron-Core.
    sft = training.sft and adapters is None and not torch
    own = replace(runtime, optimizer=optimizer, adapters=adapters, kernels=kernels, sft=sft)
    return replace(run, runtime=own)


_OF_EXPERTS: frozenset[Target] = frozenset({"fc1", "fc2", "expert_fc1", "expert_fc2"})


def linear_targets(model: Model) -> frozenset[Target]:
    """Return the matrices of a model that are linear layers in PyTorch, which experts are not."""
    parts = [one.mlp for one in model.kinds]
    dense = any(isinstance(one, Mlp) or (one is not None and one.shared_width > 0) for one in parts)
    mixers = MIXER_TARGETS if any(one.recurrent is not None for one in model.kinds) else ()
    known = (*DENSE_TARGETS, *mixers)
    return frozenset(one for one in known if dense or not one.startswith("fc"))


def renames_experts(model: Model) -> bool:
    """Return True if PEFT takes modules of an MLP for the routed experts, whose adapters it fuses.

    It does so in families that transformers 4 stored expert by expert, but not in LFM2, Gemma 4 and
    gpt-oss (PEFT 0.21.2, utils/transformers_weight_conversion.py, `_convert_peft_config_moe`).
    """
    short = any(isinstance(one.recurrent, ShortConvolution) for one in model.kinds)
    others = short or model.has_unlike_heads or model.last.biases
    return model.experts is not None and not others
