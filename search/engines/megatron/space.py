"""What Megatron-LM can be told with one set of degrees, and what it refuses of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Literal

from autopar.records import replace
from autopar.run.launch import BLACKWELL, Launch, Model, Optimizer, Software, default_attention
from autopar.training.offload import OffloadModule
from search.engines.choice import FULL, NONE, Choice, Dispatcher, offload_of, recompute_of, trained
from search.engines.space import (
    BY_LAYER,
    FEW,
    LAYOUTS,
    EngineSpace,
    Job,
    degrees_of,
    device_precisions,
    launch_precision,
)


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
    for some in subsets(modules):
        sets += [frozenset((*some, *more)) for more in subsets(inner)]
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
    sets = list(subsets(modules))
    sets += [("attn_proj", *one) for one in sets if "core_attn" in one]
    words = ["+".join(sorted(one)) for one in sets if one]
    return (NONE, *sorted(words, key=lambda text: (text.count("+"), text)))


def subsets(items: Sequence[str]) -> Iterator[tuple[str, ...]]:
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
        degrees=degrees_of(job, choice),
        seq=job.seq,
        micro_batch=choice.micro_batch,
        global_batch=choice.global_batch,
        precision=launch_precision(choice),
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


SPACE = EngineSpace(
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
    precisions=device_precisions,
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
        FEW,
        LAYOUTS,
        BY_LAYER,
    ),
)
VARIANTS = (SPACE,)
