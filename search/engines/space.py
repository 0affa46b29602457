"""What an engine with one degree of each kind can be told, and the launch that a choice is in it.

Each engine's own row is `SPACE` in its folder; what it refuses is raised as an InputError with its
arithmetic. Here are the types and what engines have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, cast

from autopar.errors import InputError
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
    attention: Callable[[Job, Choice], Iterator[str]]
    """Yields what it refuses of tensor and context ranks, whatever else is chosen."""
    refused: Callable[[Job, Choice], Iterator[str]]
    """Yields what it refuses of a choice whose degrees divide, of its attention first."""
    left_out: tuple[str, ...]
    """What it can run and a search does not choose, with the option that lets it in, if any."""


def launch_of(engine: EngineSpace, job: Job, choice: Choice) -> Launch:
    """Return the launch of a choice; raises InputError with what the trainer refuses."""
    for problem in engine.refused(job, choice):
        raise InputError(problem)
    return engine.launch(job, choice)


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


def plain_attention(job: Job, choice: Choice) -> Iterator[str]:
    heads = job.model.attention.groups
    if heads % choice.tp:
        yield f"heads of keys and values({heads}) % tp({choice.tp}) = {heads % choice.tp} != 0"
    if job.model.attention.latent is not None:
        yield "layers of transformers with latent attention keep activations that nobody counts"


def plain_refuses(job: Job, choice: Choice) -> Iterator[str]:
    yield from plain_attention(job, choice)
    if job.model.experts is not None and choice.etp != choice.tp:
        yield "it has no degrees of experts of their own"


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
