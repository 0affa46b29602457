"""What each trainer can be told, and the launch that a choice is in it.

A trainer has one degree of each kind for a whole model. Its row says which values there are, and
makes a launch of a choice; what it refuses is raised as an InputError with its arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal, cast

from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import dataclass, replace
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
    default_attention,
)
from autopar.run.runtime import Keeper, Zero
from autopar.training.offload import OffloadModule
from search.planning.uniform.choice import (
    FULL,
    NONE,
    Choice,
    ContextKind,
    Dispatcher,
    Precision,
    Training,
    offload_of,
    recompute_of,
    trained,
)


@dataclass(frozen=True, kw_only=True)
class Job:
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


@dataclass(frozen=True, kw_only=True)
class EngineSpace:
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


def _degrees(job: Job, choice: Choice) -> Degrees:
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


def _precision(choice: Choice) -> LaunchPrecision:
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


def _precisions(gpu: str) -> tuple[Precision, ...]:
    """Return the precisions of products that a device has."""
    name = gpu.upper()
    if name.startswith(BLACKWELL):
        return ("bf16", "fp8", "mxfp8", "nvfp4")
    if name.startswith(HOPPER):
        return ("bf16", "fp8", "fp8-blockwise")
    return ("bf16",)


def _alltoall(gpu: str) -> tuple[Dispatcher, ...]:
    return ("alltoall",)


def _never(job: Job, tp: int) -> bool:
    return False


# --------------------------------------------------------------------------------------------------
# Megatron-LM


def overlaps_one(gpu: str) -> bool:
    """Return whether a device sends tokens of experts, or tensors, beside kernels, but not both.

    Before Blackwell a transfer that is launched before the product beside it needs one queue of
    launches, and another micro-batch's exchanges need several: CUDA_DEVICE_MAX_CONNECTIONS is 1 or
    32 (`PerfEnvPlugin` of Megatron-Bridge's scripts/performance, `validate_args` of Megatron-LM).
    """
    return not gpu.upper().startswith(BLACKWELL)


_UNLINKED = re.compile(r"MI[0-9]|RTX|L4|L40|T4|V100|A(2|10|16|30|40)([^0-9]|$)|.*PCIE")
"""Names of devices that NVLink does not join, or whose architecture the kernels below are not of;
somebody's own card is taken for one that has both."""


def _nvlinked(gpu: str) -> bool:
    """Return whether a device has the links that kernels of NVIDIA's libraries write through."""
    return _UNLINKED.match(gpu.upper()) is None


def _userbuffers(job: Job, tp: int) -> bool:
    """Return whether tensor ranks write into one another's memory, as Transformer Engine does."""
    joined = job.domain is None or job.world <= job.domain or job.domain % tp == 0
    return tp > 1 and _nvlinked(job.gpu) and joined


def _megatron_dispatchers(gpu: str) -> tuple[Dispatcher, ...]:
    """Return the dispatchers of a device: DeepEP's and HybridEP's kernels are of Ampere and later.

    `validate_flex_dispatcher_backend` of Megatron-Bridge.
    """
    return ("alltoall", "flex") if _nvlinked(gpu) else ("alltoall",)


def _megatron_modules(model: Model) -> tuple[str, ...]:
    """Return every selective recomputation that Megatron-Core has for a model, and the ends.

    Sets of modules; of `moe` everything inside is a part.
    """
    modules = ["core_attn", "layernorm"]
    if model.attention.latent is not None:
        modules.append("mla_up_proj")
    if not all(model.expert_layers):
        modules.append("mlp")
    inner = []
    if model.experts is not None:
        inner.append("moe_act")
        if model.experts.shared_ffn:
            inner.append("shared_experts")
    sets = []
    for some in _subsets(modules):
        sets += [frozenset((*some, *more)) for more in _subsets(inner)]
        if inner:
            sets.append(frozenset((*some, "moe")))
    words = ["+".join(sorted(found)) for found in sets if found]
    return (NONE, *sorted(words, key=lambda text: (text.count("+"), text)), FULL)


def _megatron_offload(model: Model) -> tuple[str, ...]:
    """Return every set of modules whose activations Megatron-Core can put on the host, of a model.

    Norms that are one kernel with the product behind them are no modules of their own.
    """
    modules: list[OffloadModule] = ["core_attn", "qkv_linear"]
    if model.attention.latent is not None:
        modules.append("attn_norm")
    if model.experts is not None:
        modules += ["expert_fc1", "mlp_norm", "moe_act"]
    sets = list(_subsets(modules))
    sets += [("attn_proj", *one) for one in sets if "core_attn" in one]
    words = ["+".join(sorted(one)) for one in sets if one]
    return (NONE, *sorted(words, key=lambda text: (text.count("+"), text)))


def _no_offload(model: Model) -> tuple[str, ...]:
    return (NONE,)


def _subsets(items: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(items) + 1):
        yield from combinations(items, size)


def _megatron_attention(job: Job, choice: Choice) -> Iterator[str]:
    model = job.model
    groups = model.attention.groups
    if model.attention.latent is None and groups % choice.tp and choice.tp % groups:
        yield f"heads of keys and values({groups}) and tp({choice.tp}) do not divide each other"
    if model.ffn % choice.tp:
        yield f"MLP width({model.ffn}) % tp({choice.tp}) = {model.ffn % choice.tp} != 0"
    pieces = choice.tp * (2 * choice.cp if choice.cp > 1 else 1)
    if job.seq % pieces:
        yield f"sequence({job.seq}) % (tp * 2 cp)({pieces}) = {job.seq % pieces} != 0"
    if choice.cp > 1 and choice.cp_kind == "a2a":
        # Transformer Engine's AttnFuncWithCPAndQKVOA2A
        for heads, name in ((model.attention.heads, "heads"), (groups, "heads of keys and values")):
            if heads % (choice.tp * choice.cp):
                rest = heads % (choice.tp * choice.cp)
                yield f"{name}({heads}) % (tp * cp)({choice.tp * choice.cp}) = {rest} != 0"
    if choice.cp > 1 and choice.cp_kind != "ring" and model.attention.latent is not None:
        yield "latent attention has rings alone: its queries and values differ in width"
    if choice.cp > 1 and choice.cp_kind == "ring" and model.attention.window is not None:
        # attn_forward_func_with_cp
        yield "attention with a window has no rings"


def _megatron_refuses(job: Job, choice: Choice) -> Iterator[str]:
    model = job.model
    yield from _megatron_attention(job, choice)
    if choice.tp_overlap and choice.tp == 1:
        yield "--tp-comm-overlap needs tensor ranks"
    elif choice.tp_overlap and not _userbuffers(job, choice.tp):
        yield f"--tp-comm-overlap: no memory of {choice.tp} {job.gpu} is joined by NVLink"
    if choice.tp_overlap and choice.overlap_experts and overlaps_one(job.gpu):
        yield (
            "--tp-comm-overlap and --overlap-moe-expert-parallel-comm need other values of "
            f"CUDA_DEVICE_MAX_CONNECTIONS on {job.gpu}, 1 and 32"
        )
    if model.experts is not None:
        if model.experts.ffn % choice.etp:
            rest = model.experts.ffn % choice.etp
            yield f"width of an expert({model.experts.ffn}) % etp({choice.etp}) = {rest} != 0"
        if model.biases and choice.etp > 1:
            yield "experts with biases are not split over tensor ranks"
    if choice.offload != NONE and (
        choice.recompute == FULL or choice.recompute.startswith("block ")
    ):
        # its guide combines modules on the host with recomputation of modules alone
        yield "modules go to the host beside layers of which modules alone are recomputed"
    if choice.zero == 3 and choice.pp > 1:
        yield "Megatron-FSDP is not combined with pipeline stages"
    words = choice.recompute.split("+")
    if choice.overlap_experts:
        if choice.pp > 1 and choice.vpp == 1:
            yield "--overlap-moe-expert-parallel-comm needs chunks of stages"
        if choice.recompute == FULL or choice.recompute.startswith("block") or "moe" in words:
            yield "--overlap-moe-expert-parallel-comm excludes recomputed experts"
        if model.mtp > 1:
            yield "--overlap-moe-expert-parallel-comm needs one MTP layer at most"
        if model.mtp == 1 and choice.pp == 1:
            # TransformerConfig up to core 0.16
            yield "--overlap-moe-expert-parallel-comm needs pipeline stages beside an MTP layer"


def _megatron(job: Job, choice: Choice) -> Launch:
    model = job.model
    if model.experts is not None:
        experts = replace(
            model.experts, dispatcher=choice.dispatcher, grouped=True, fused_permutation=True
        )
        model = replace(model, experts=experts)
    sharding: Mapping[int, Literal["none", "distributed", "fsdp"]] = {
        0: "none",
        1: "distributed",
        3: "fsdp",
    }
    launch = Launch(
        name=job.name,
        model=model,
        degrees=_degrees(job, choice),
        seq=job.seq,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
        precision=_precision(choice),
        optimizer=Optimizer(
            sharding=sharding[choice.zero], instances=choice.dp_replicate, overlap_gradients=True
        ),
        recompute=recompute_of(choice.recompute),
        offload=offload_of(choice.offload),
        software=Software(gpu=job.gpu, attention=default_attention(job.gpu)),
        attention_masks=False,
        tensor_overlap=choice.tp_overlap,
    )
    return trained(launch, job.training, "megatron")


# --------------------------------------------------------------------------------------------------
# Trainers with layers of torch


def _torch(
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
        degrees=_degrees(job, choice),
        seq=job.seq,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
        precision=_precision(choice),
        optimizer=Optimizer(sharding=sharding[zero], overlap_gradients=True),
        recompute=(
            Recompute(layers="uniform", number=1) if choice.recompute == FULL else Recompute()
        ),
        software=Software(gpu=job.gpu, attention=kernel),
        trainer=own,
    )
    return trained(launch, job.training, engine)


def _torchtitan(job: Job, choice: Choice) -> Launch:
    staged = choice.pp > 1
    return _torch(
        job,
        choice,
        "torchtitan",
        keeper="torchtitan" if choice.zero else "ddp",
        zero=cast(Zero, choice.zero),
        trainer=TorchTrainer(
            keeper="torchtitan",
            each_micro_batch=not staged,
            repeated_heads=True,
            compiled=choice.compiled,
            loss="compiled" if choice.compiled else "whole",
        ),
    )


def _torchtitan_attention(job: Job, choice: Choice) -> Iterator[str]:
    model = job.model
    groups = model.attention.groups
    if choice.tp > 1 and model.attention.latent is None and groups % choice.tp:
        # it copies no heads of keys and values
        yield f"heads of keys and values({groups}) % tp({choice.tp}) = {groups % choice.tp} != 0"
    if model.ffn % choice.tp:
        yield f"MLP width({model.ffn}) % tp({choice.tp}) = {model.ffn % choice.tp} != 0"
    unit = choice.tp * (2 * choice.cp if choice.cp > 1 else 1)
    if job.seq % unit:
        yield f"seq_len({job.seq}) % (tp * 2 cp)({unit}) = {job.seq % unit} != 0"


def _torchtitan_refuses(job: Job, choice: Choice) -> Iterator[str]:
    model = job.model
    yield from _torchtitan_attention(job, choice)
    if choice.pp > 1 and model.tied:
        yield "tied embeddings have no pipeline"
    shard = job.world // (choice.tp * choice.pp * choice.dp_replicate)
    if choice.zero and shard == 1 < choice.tp * choice.pp:
        # `maybe_enable_amp` of distributed/utils.py
        yield "beside tensor and pipeline ranks alone (dp_shard * cp = 1) it computes in fp32"
    if choice.zero == 0 and (choice.tp * choice.pp > 1 or choice.cp > 1):
        yield "replicas alone (DDP) have no tensor, context or pipeline ranks beside them"
    if model.experts is not None and choice.ep > 1:
        own, name = (choice.cp, "cp") if choice.etp == choice.tp > 1 else (
            choice.cp * choice.tp, "cp * tp",
        )  # fmt: skip
        if choice.ep % own:
            yield f"ep({choice.ep}) % ({name})({own}) = {choice.ep % own} != 0"
        ranks = shard * (1 if choice.etp == choice.tp > 1 else choice.tp)
        if ranks % choice.ep:
            yield f"dp_shard * {name}({ranks}) % ep({choice.ep}) = {ranks % choice.ep} != 0"
    elif model.experts is not None and choice.etp != choice.tp:
        yield "without expert ranks tensor ranks split the experts"


def _plain_attention(job: Job, choice: Choice) -> Iterator[str]:
    heads = job.model.attention.groups
    if heads % choice.tp:
        yield f"heads of keys and values({heads}) % tp({choice.tp}) = {heads % choice.tp} != 0"
    if job.model.attention.latent is not None:
        yield "layers of transformers with latent attention keep activations that nobody counts"


def _plain_refuses(job: Job, choice: Choice) -> Iterator[str]:
    yield from _plain_attention(job, choice)
    if job.model.experts is not None and choice.etp != choice.tp:
        yield "it has no degrees of experts of their own"


def _deepspeed_refuses(job: Job, choice: Choice) -> Iterator[str]:
    yield from _plain_refuses(job, choice)
    if choice.zero == 3 and choice.tp > 1:
        # `_configure_tensor_parallel_states` of runtime/engine.py
        yield f"ZeRO-3 has no tensor ranks beside it, and tp is {choice.tp}"


def _accelerate_refuses(job: Job, choice: Choice) -> Iterator[str]:
    yield from _plain_refuses(job, choice)
    dp = job.world // (choice.tp * choice.cp * choice.pp)
    if choice.tp > 1 and dp == choice.dp_replicate > 1:
        # ParallelismConfig of accelerate 1.15
        yield "replicas beside tensor ranks need dp_shard_size above 1"


_TRANSFORMERS = TorchTrainer(keeper="deepspeed", layers="transformers", loss_parallel=False)
"""Layers of transformers, under either library."""


def _deepspeed(job: Job, choice: Choice) -> Launch:
    launch = _torch(
        job,
        choice,
        "deepspeed",
        keeper="deepspeed",
        zero=cast(Zero, choice.zero),
        trainer=replace(_TRANSFORMERS, each_micro_batch=choice.zero >= 2),
    )
    return _whole_sequences(launch)


def _accelerate(job: Job, choice: Choice) -> Launch:
    single = choice.global_batch == choice.micro_batch * job.world // (choice.tp * choice.cp)
    launch = _torch(
        job,
        choice,
        "accelerate",
        keeper="accelerate" if choice.zero else "ddp",
        zero=cast(Zero, choice.zero),
        trainer=replace(_TRANSFORMERS, each_micro_batch=single),
    )
    return _whole_sequences(launch)


def _whole_sequences(launch: Launch) -> Launch:
    """Return a launch whose tensor ranks hold whole sequences between products."""
    return replace(launch, degrees=replace(launch.degrees, sequence_parallel=False))


def _torch_recompute(model: Model) -> tuple[str, ...]:
    return (NONE, FULL)


_LAYOUTS = "unequal chunks but those whose longest stage is shortest"
_FEW = "fewer micro-batches than stages"
_BY_LAYER = "degrees that differ by layer (--engine galvatron)"

ENGINES: tuple[EngineSpace, ...] = (
    EngineSpace(
        name="megatron",
        title="Megatron-LM",
        stack="megatron-core",
        schedules=("1f1b", "interleaved"),
        context=("ring", "a2a", "all-gather"),
        experts=True,
        expert_tensor=None,
        zero=(0, 1, 3),
        zero_with_stages=(0, 1),
        replicated=(1,),
        recompute=_megatron_modules,
        blocks=True,
        offload=_megatron_offload,
        precisions=_precisions,
        dispatchers=_megatron_dispatchers,
        overlaps_experts=True,
        overlaps_tensor=_userbuffers,
        any_layout=True,
        launch=_megatron,
        attention=_megatron_attention,
        refused=_megatron_refuses,
        left_out=(
            "CUDA graphs, whose memory nobody has counted",
            "rings of ranks that exchange heads (--cp-comm-type a2a+p2p)",
            "parts of modules, or whole layers, on the host (--cpu-offloading)",
            "recomputation of several layers at once (uniform N)",
            _FEW,
            _LAYOUTS,
            _BY_LAYER,
        ),
    ),
    EngineSpace(
        name="torchtitan",
        title="torchtitan",
        stack="torchtitan-eager",
        schedules=tuple(name for name in SCHEDULES if "torchtitan" in SCHEDULES[name].engines),
        context=("ring",),
        experts=True,
        expert_tensor=lambda tp: (1,) if tp == 1 else (1, tp),
        zero=(0, 2, 3),
        zero_with_stages=(2, 3),
        replicated=(2, 3),
        recompute=lambda model: (NONE, "op", FULL),
        blocks=False,
        offload=_no_offload,
        precisions=lambda gpu: tuple(p for p in _precisions(gpu) if p in ("bf16", "fp8", "mxfp8")),
        dispatchers=_alltoall,
        overlaps_experts=False,
        overlaps_tensor=_never,
        any_layout=True,
        launch=_torchtitan,
        attention=_torchtitan_attention,
        refused=_torchtitan_refuses,
        left_out=(
            "asynchronous tensor parallelism of compiled layers",
            "recomputation of every n-th layer",
            _FEW,
            _LAYOUTS,
            _BY_LAYER,
        ),
    ),
    EngineSpace(
        name="deepspeed",
        title="DeepSpeed",
        stack="torchtitan-eager",
        schedules=(),
        context=(),
        experts=False,
        expert_tensor=lambda tp: (tp,),
        zero=(0, 1, 2, 3),
        zero_with_stages=(),
        replicated=(),
        recompute=_torch_recompute,
        blocks=False,
        offload=_no_offload,
        precisions=lambda gpu: ("bf16",),
        dispatchers=_alltoall,
        overlaps_experts=False,
        overlaps_tensor=_never,
        any_layout=False,
        launch=_deepspeed,
        attention=_plain_attention,
        refused=_deepspeed_refuses,
        left_out=("pipelines", "Ulysses, which is not priced", _BY_LAYER),
    ),
    EngineSpace(
        name="accelerate",
        title="accelerate",
        stack="torchtitan-eager",
        schedules=(),
        context=("ring",),
        experts=False,
        expert_tensor=lambda tp: (tp,),
        zero=(0, 2, 3),
        zero_with_stages=(),
        replicated=(2, 3),
        recompute=_torch_recompute,
        blocks=False,
        offload=_no_offload,
        precisions=lambda gpu: ("bf16",),
        dispatchers=_alltoall,
        overlaps_experts=False,
        overlaps_tensor=_never,
        any_layout=False,
        launch=_accelerate,
        attention=_plain_attention,
        refused=_accelerate_refuses,
        left_out=("torch.compile", "Ulysses, which is not priced", _BY_LAYER),
    ),
)
"""Trainers with one set of degrees, in the order in which equally fast plans are ranked."""


_TORCHTITAN = next(engine for engine in ENGINES if engine.name == "torchtitan")
_COMPILED = (
    replace(
        _TORCHTITAN,
        stack="torchtitan-compiled",
        compiled=True,
        # a compiled backward is one piece, whose gradients of weights cannot come later
        schedules=tuple(one for one in _TORCHTITAN.schedules if not SCHEDULES[one].splits),
    ),
)
"""Variants of trainers whose layers are compiled."""


def variants(engine: EngineSpace) -> tuple[EngineSpace, ...]:
    """Return a trainer's spaces: with its layers as they are written, and compiled."""
    return tuple(one for one in (*ENGINES, *_COMPILED) if one.name == engine.name)


def engine_space(name: str, *, compiled: bool = False) -> EngineSpace:
    """Return the space of a trainer by the name of its engine."""
    return next(
        engine
        for engine in (*ENGINES, *_COMPILED)
        if engine.name == name and engine.compiled == compiled
    )
