"""What an engine with one degree of each kind can be told, and the launch that a choice is in it.

Each engine's own row is `SPACE` in its folder, and what it refuses are rows of its `rules.py`. Here
are the types and what engines have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from autopar.pipeline.schedules import Schedule
from autopar.records import Record, replace
from autopar.run.launch import (
    BLACKWELL,
    HOPPER,
    AttentionKernel,
    Checkpointing,
    Degrees,
    Launch,
    Model,
    Optimizer,
    Precision as LaunchPrecision,
    Recompute,
    Software,
    TorchTrainer,
)
from autopar.run.rules import WHOLE_KEYS, Rule, kept, refuse
from autopar.run.runtime import Keeper, Zero
from search.engines.choice import (
    FULL,
    NONE,
    Choice,
    ContextKind,
    Dispatcher,
    Precision,
    Training,
    trained,
)


class Job(Record):
    """What is trained where, whatever the plan."""

    name: str
    model: Model
    seq: int
    global_batches: tuple[int, ...]
    world: int
    gpu: str
    """Kind of device, by its card's name."""
    domain: int | None = None
    """Neighbouring GPUs that links join without the network; None: all."""
    skew: float | None = None
    """Tokens of the busiest expert rank over the mean, in the times of a step; None: even."""
    training: Training = Training()


_UNLINKED = re.compile(r"MI[0-9]|RTX|L4|L40|T4|V100|A(2|10|16|30|40)([^0-9]|$)|.*PCIE")
"""Names of devices that NVLink does not join, or whose architecture the kernels below are not of;
somebody's own card is taken for one that has both."""


def nvlinked(gpu: str) -> bool:
    """Return whether a device has the links that kernels of NVIDIA's libraries write through."""
    return _UNLINKED.match(gpu.upper()) is None


def overlaps_one(gpu: str) -> bool:
    """Return whether a device sends tokens of experts, or tensors, beside kernels, but not both.

    Before Blackwell a transfer that is launched before the product beside it needs one queue of
    launches, and another micro-batch's exchanges need several: CUDA_DEVICE_MAX_CONNECTIONS is 1 or
    32 (`PerfEnvPlugin` of Megatron-Bridge's scripts/performance, `validate_args` of Megatron-LM).
    """
    return not gpu.upper().startswith(BLACKWELL)


class EngineSpace(Record):
    """A trainer, and the values of a choice that it knows."""

    name: str
    title: str
    stack: str
    """Whose kernels and host code it is timed with."""
    schedules: tuple[Schedule, ...]
    """Of its pipelines, in the order in which equally fast launches are ranked; none: it has no
    stages."""
    context: tuple[ContextKind, ...]
    """How its context ranks exchange; none: it has no context ranks."""
    experts: bool
    """It spreads experts over ranks."""
    expert_tensor: Callable[[int], tuple[int, ...]] | None
    """Returns the expert tensor degrees beside a tensor degree; None: any that divides experts."""
    zero: tuple[int, ...]
    zero_with_stages: tuple[int, ...]
    replicated: tuple[int, ...]
    """Shardings of which it can have several copies."""
    recompute: Callable[[Model], tuple[str, ...]]
    """Returns what it can compute again of a model's layers."""
    blocks: bool
    """It can recompute some layers of a chunk whole."""
    offload: Callable[[Model], tuple[str, ...]]
    """Returns what of a layer can wait on the host, nothing first."""
    precisions: Callable[[str], tuple[Precision, ...]]
    """Returns those that it has on a device."""
    dispatchers: Callable[[str], tuple[Dispatcher, ...]]
    """Returns those that it has on a device, the plain one first."""
    compiled: bool = False
    """Its layers are compiled; others of its variants are not."""
    overlaps_experts: bool
    overlaps_tensor: Callable[[Job, int], bool]
    """Returns whether products can run beside the transfers of so many tensor ranks."""
    any_layout: bool
    """Layers can be placed on stages as one likes."""
    launch: Callable[[Job, Choice], Launch]
    rules: tuple[Rule, ...]
    """What it refuses of degrees that divide, over the values of `values_of`."""
    left_out: tuple[str, ...]
    """What it can run and a search does not choose, with the option that lets it in, if any."""


def launch_of(engine: EngineSpace, job: Job, choice: Choice) -> Launch:
    """Return the launch of a choice; raises RuleError with what the engine refuses."""
    refuse(engine.rules, values_of(job, choice))
    return engine.launch(job, choice)


def values_of(job: Job, choice: Choice) -> dict[str, Any]:
    """Return the values of rules of a job and a choice."""
    given = {name: getattr(choice, name) for name in _FIELDS}
    return {**job_values(job), **with_words(given)}


def runs(engine: EngineSpace, job: Job, choice: Choice) -> bool:
    """Return whether an engine runs a choice whose degrees divide."""
    return bool(kept(engine.rules, values_of(job, choice)))


def job_values(job: Job) -> dict[str, Any]:
    """Return the values that no choice changes."""
    model, experts = job.model, job.model.experts
    latent = model.attention.latent is not None
    return {
        "world": job.world,
        "domain": job.domain or job.world,
        "seq_length": job.seq,
        "sequence_parallel": True,
        "ulysses": 1,
        "heads": model.attention.heads,
        "query_groups": model.attention.groups,
        # latent attention has no heads of keys
        "kv_heads": None if latent else model.attention.groups,
        "latent": latent,
        "window": model.attention.window is not None,
        "ffn_hidden_size": model.ffn,
        "layers": model.num_layers,
        "experts": 0 if experts is None else experts.number,
        "expert_width": None if experts is None else experts.ffn,
        "biases": model.biases,
        "tied": model.tied,
        "mtp": model.mtp,
        "gpu": job.gpu,
        "nvlinked": nvlinked(job.gpu),
        "one_queue": overlaps_one(job.gpu),
    }


_FIELDS = (
    *("tp", "tp_overlap", "cp", "cp_kind", "pp", "vpp", "ep", "etp", "zero", "dp_replicate"),
    *("recompute", "offload", "overlap_experts"),
)
"""Fields of a choice that rules read."""
OF_WORDS = {"whole_layers": "recompute", "recomputed_experts": "recompute"}
"""Value of rules -> the field whose words it follows from."""


def with_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of a choice with those that follow from its words."""
    word = values.get("recompute")
    if word is None:
        return {**values}
    whole = word == FULL or word.startswith("block ")
    experts = whole or "moe" in word.split("+")
    return {**values, "whole_layers": whole, "recomputed_experts": experts}


def degrees_of(job: Job, choice: Choice) -> Degrees:
    experts = job.model.experts is not None
    return Degrees(
        world=job.world,
        tp=choice.tp,
        cp=choice.cp,
        heads_exchanged=choice.cp > 1 and choice.cp_kind == "a2a",
        keys_gathered=choice.cp > 1 and choice.cp_kind == "all-gather",
        pp=choice.pp,
        ep=choice.ep,
        etp=choice.etp if experts else 1,
        sequence_parallel=choice.tp > 1,
        chunks=choice.chunks,
        overlap_experts=choice.overlap_experts,
        schedule=None if choice.schedule in ("1f1b", "interleaved") else choice.schedule,
    )


def launch_precision(choice: Choice) -> LaunchPrecision:
    recipes: Mapping[str, Literal["tensorwise", "blockwise", "mxfp8"]] = {
        "fp8": "tensorwise",
        "fp8-blockwise": "blockwise",
        "mxfp8": "mxfp8",
    }
    if choice.precision == "bf16":
        return LaunchPrecision()
    if choice.precision == "nvfp4":
        return LaunchPrecision(fp4=True)
    return LaunchPrecision(fp8=True, fp8_recipe=recipes[choice.precision])


def device_precisions(gpu: str) -> tuple[Precision, ...]:
    """Return the precisions of products that a device has."""
    name = gpu.upper()
    if name.startswith(BLACKWELL):
        return ("bf16", "fp8", "mxfp8", "nvfp4")
    if name.startswith(HOPPER):
        return ("bf16", "fp8", "fp8-blockwise")
    return ("bf16",)


def plain_dispatcher(gpu: str) -> tuple[Dispatcher, ...]:
    return ("alltoall",)


def never(job: Job, tp: int) -> bool:
    return False


def no_offload(model: Model) -> tuple[str, ...]:
    return (NONE,)


# --------------------------------------------------------------------------------------------------
# Engines with layers of torch.


def torch_launch(
    job: Job, choice: Choice, engine: str, *, keeper: Keeper, zero: Zero, trainer: TorchTrainer
) -> Launch:
    kernel: AttentionKernel = "flash"
    own = replace(
        trainer,
        keeper=keeper,
        zero=zero,
        replicas=choice.dp_replicate,
        checkpoint=cast(Checkpointing, choice.recompute),
    )
    sharding: tuple[Literal["none", "distributed", "zero2", "fsdp"], ...] = (
        *("none", "distributed", "zero2", "fsdp"),
    )
    launch = Launch(
        name=job.name,
        # rows of the vocabulary are made divisible by Megatron's tensor ranks alone
        model=replace(job.model, vocab_divisor=1),
        degrees=degrees_of(job, choice),
        seq=job.seq,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
        precision=launch_precision(choice),
        optimizer=Optimizer(sharding=sharding[zero], overlap_gradients=True),
        recompute=(
            Recompute(layers="uniform", number=1) if choice.recompute == FULL else Recompute()
        ),
        software=Software(gpu=job.gpu, attention=kernel),
        trainer=own,
    )
    return trained(launch, job.training, engine)


PLAIN_RULES = (
    WHOLE_KEYS,
    Rule("transformers.latent", ("latent",), lambda latent: latent,
         "layers of transformers with latent attention keep activations that nobody counts"),
    Rule("transformers.etp", ("experts", "etp", "tp"), lambda experts, etp, tp:
         (experts > 0) * (etp != tp), "it has no degrees of experts of their own: etp({etp}) is "
         "not tp({tp})"),
)  # fmt: skip
"""Rules of engines with layers of transformers."""


TRANSFORMERS = TorchTrainer(keeper="deepspeed", layers="transformers", loss_parallel=False)
"""Layers of transformers, under either library."""


def whole_sequences(launch: Launch) -> Launch:
    """Return a launch whose tensor ranks hold whole sequences between products."""
    return replace(launch, degrees=replace(launch.degrees, sequence_parallel=False))


def torch_recompute(model: Model) -> tuple[str, ...]:
    return (NONE, FULL)


LAYOUTS = "unequal chunks but those whose longest stage is shortest"
FEW = "fewer micro-batches than stages"
BY_LAYER = "degrees that differ by layer (--engine galvatron)"
