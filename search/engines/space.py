"""What an engine with one degree of each kind can be told, and the launch that a choice is in it.

Each engine's own row is `SPACE` in its folder, and what it refuses are rows of its `rules.py`. Here
are the types and what engines have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, cast

from autopar.pipeline.schedules import Schedule
from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.rules import WHOLE_KEYS, Rule, kept, refuse
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    BLACKWELL,
    HOPPER,
    ExpertKernels,
    HostAdam,
    Kernels,
    Optimizer,
    Overlap,
    Precision as RunPrecision,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import ContextKind, Split, Strategy, uniform_layers
from search.engines.choice import (
    FULL,
    NONE,
    Choice,
    Dispatcher,
    Precision,
    Training,
    offload_of,
    trained,
    with_recompute,
)


class Job(Record, dict=True):
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

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """Values of rules that no choice changes."""
        return job_values(self)


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
    launch: Callable[[Job, Choice], Run]
    """Returns the legal run of a choice."""
    rules: tuple[Rule, ...]
    """What it refuses of degrees that divide, over the values of `values_of`."""
    left_out: tuple[str, ...]
    """What it can run and a search does not choose, with the option that lets it in, if any."""


def run_of(engine: EngineSpace, job: Job, choice: Choice) -> Run:
    """Return the run of a choice; raises RuleError with what the engine refuses."""
    refuse(engine.rules, values_of(job, choice))
    return engine.launch(job, choice)


def values_of(job: Job, choice: Choice) -> dict[str, Any]:
    """Return the values of rules of a job and a choice."""
    given = {name: getattr(choice, name) for name in _FIELDS}
    return {**job.values, **with_words(given)}


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
        "query_groups": model.attention.kv_heads,
        # latent attention has no heads of keys
        "kv_heads": None if latent else model.attention.kv_heads,
        "latent": latent,
        "window": _has_window(model),
        "ffn_hidden_size": model.dense_width,
        "layers": model.num_layers,
        "experts": 0 if experts is None else experts.number,
        "expert_width": None if experts is None else experts.width,
        "biases": model.last.biases,
        "tied": model.tied,
        "mtp": model.mtp,
        "gpu": job.gpu,
        "nvlinked": nvlinked(job.gpu),
        "one_queue": overlaps_one(job.gpu),
    }


def _has_window(model: Model) -> bool:
    attentions = (layer.attention for layer in model.kinds)
    return any(one is not None and one.window is not None for one in attentions)


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


def strategy_of(
    job: Job, choice: Choice, *, zero: Zero, sequence_parallel: bool = True
) -> Strategy:
    """Return the strategy of a choice; recomputation and offload are those of its layers."""
    mixed = job.model.experts is not None
    split = Split(
        tp=choice.tp,
        sequence_parallel=sequence_parallel and choice.tp > 1,
        cp=choice.cp,
        cp_kind=choice.cp_kind if choice.cp > 1 else "ring",
        ep=choice.ep,
        etp=choice.etp if mixed else 1,
        zero=zero,
        replicas=choice.dp_replicate,
        offload=offload_of(choice.offload),
    )
    layers, ends = uniform_layers(job.model.num_layers, split)
    strategy = Strategy(
        gpus=job.world,
        layers=layers,
        ends=ends,
        stages=choice.chunks,
        schedule=choice.schedule,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
    )
    return with_recompute(strategy, choice.recompute)


def run_precision(choice: Choice) -> RunPrecision:
    """Return the types in which a choice computes."""
    recipes: Mapping[str, Literal["tensorwise", "blockwise", "mxfp8"]] = {
        "fp8": "tensorwise",
        "fp8-blockwise": "blockwise",
        "mxfp8": "mxfp8",
    }
    if choice.precision == "bf16":
        return RunPrecision()
    if choice.precision == "nvfp4":
        return RunPrecision(fp4=True)
    return RunPrecision(fp8=True, fp8_recipe=recipes[choice.precision])


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


def torch_run(
    job: Job,
    choice: Choice,
    engine: str,
    *,
    states: States,
    kernels: Kernels,
    sequence_parallel: bool = True,
    host_adam: HostAdam = "torch",
) -> Run:
    """Return the legal run of a choice in an engine with layers of torch."""
    run = Run(
        name=job.name,
        # rows of the vocabulary are made divisible by Megatron's tensor ranks alone
        model=replace(job.model, vocab_divisor=1),
        strategy=strategy_of(
            job, choice, zero=cast(Zero, choice.zero), sequence_parallel=sequence_parallel
        ),
        runtime=Runtime(
            engine=engine,
            precision=run_precision(choice),
            optimizer=Optimizer(host_adam=host_adam),
            states=states,
            kernels=kernels,
            experts=TORCH_EXPERTS if job.model.experts is not None else ExpertKernels(),
            overlap=Overlap(gradients=True, experts=choice.overlap_experts),
        ),
        seq_length=job.seq,
        gpu=job.gpu,
    )
    return legal(trained(run, job.training, engine))


TORCH_EXPERTS = ExpertKernels(dispatcher="alltoall", grouped=True)
"""Experts of torchtitan and transformers: one grouped GEMM, tokens by all-to-all."""


PLAIN_RULES = (
    WHOLE_KEYS,
    Rule("transformers.latent", ("latent",), lambda latent: latent,
         "layers of transformers with latent attention keep activations that nobody counts"),
    Rule("transformers.etp", ("experts", "etp", "tp"), lambda experts, etp, tp:
         (experts > 0) * (etp != tp), "it has no degrees of experts of their own: etp({etp}) is "
         "not tp({tp})"),
)  # fmt: skip
"""Rules of engines with layers of transformers."""


TRANSFORMERS = Kernels(attention="flash", module="transformers", loss="whole", loss_parallel=False)
"""Layers of transformers, under either library."""


def torch_recompute(model: Model) -> tuple[str, ...]:
    return (NONE, FULL)


LAYOUTS = "unequal chunks but those whose longest stage is shortest"
FEW = "fewer micro-batches than stages"
BY_LAYER = "degrees that differ by layer (--engine galvatron)"
