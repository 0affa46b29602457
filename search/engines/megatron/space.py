"""Search space of uniform plans for Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import cast

from autopar.rates.devices import default_attention
from autopar.run.architecture import Mlp, Model
from autopar.run.run import Run, legal
from autopar.run.runtime import (
    ExpertKernels,
    Kernels,
    Overlap,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import OffloadModule
from search.engines.bridge.recipes import recipe_model
from search.engines.candidate import FULL, NONE, Candidate, Dispatcher, with_training
from search.engines.megatron.rules import SPACE as SPACE_RULES, TUNED
from search.engines.space import (
    BY_LAYER,
    FEW,
    LAYOUTS,
    EngineContext,
    EngineSpace,
    device_precisions,
    nvlinked,
    run_precision,
    strategy_of,
)


def _userbuffers(job: EngineContext, tp: int) -> bool:
    """Return True if TP overlap is possible: it needs NVLink between all ranks of a tensor group.

    With userbuffers of Transformer Engine, ranks write directly to the memory of other ranks.
    """
    joined = job.domain is None or job.world <= job.domain or job.domain % tp == 0
    return tp > 1 and nvlinked(job.gpu) and joined


def _megatron_dispatchers(gpu: str) -> tuple[Dispatcher, ...]:
    """Return the token dispatchers of a GPU model: `flex` needs NVLink and Ampere or later.

    Source: `validate_flex_dispatcher_backend` of Megatron-Bridge.
    """
    return ("alltoall", "flex") if nvlinked(gpu) else ("alltoall",)


def _megatron_modules(model: Model) -> tuple[str, ...]:
    """Return all values of `Candidate.recompute` for a model: `none`, sets of modules, `full`.

    `moe` includes `moe_act` and `shared_experts`, so no set contains it together with these.
    """
    modules = ["core_attn", "layernorm"]
    if model.attention.latent is not None:
        modules.append("mla_up_proj")
    if model.first_delta is not None:
        modules.append("gdn_norm_out")
    if any(isinstance(layer.mlp, Mlp) for layer in model.kinds):
        modules.append("mlp")
    inner = []
    if model.experts is not None:
        inner.append("moe_act")
        if model.experts.shared_width:
            inner.append("shared_experts")
    sets = []
    for some in subsets(modules):
        sets += [frozenset((*some, *more)) for more in subsets(inner)]
        if inner:
            sets.append(frozenset((*some, "moe")))
    words = ["+".join(sorted(found)) for found in sets if found]
    return (NONE, *sorted(words, key=lambda text: (text.count("+"), text)), FULL)


def _megatron_offload(model: Model) -> tuple[str, ...]:
    """Return all values of `Candidate.offload` for a model: `none`, then sets of modules.

    A norm that is fused with the following GEMM is not a separate module. `attn_proj` is offloaded
    only together with `core_attn`.
    """
    # sparse attention has no such modules
    modules: list[OffloadModule] = [] if model.first_sparse else ["core_attn", "qkv_linear"]
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


def _megatron(job: EngineContext, choice: Candidate) -> Run:
    experts = ExpertKernels()
    if job.model.experts is not None:
        experts = ExpertKernels(dispatcher=choice.dispatcher, grouped=True, fused_permutation=True)
    run = Run(
        name=job.name,
        model=job.model,
        strategy=strategy_of(job, choice, zero=cast(Zero, choice.zero)),
        runtime=Runtime(
            engine="megatron",
            precision=run_precision(choice),
            states=States(keeper="megatron-fsdp" if choice.zero == 3 else "megatron"),
            kernels=Kernels(
                attention=default_attention(job.gpu), fused_rotary=job.model.first_sparse is None
            ),
            experts=experts,
            overlap=Overlap(
                tensor=choice.tp_overlap, gradients=True, experts=choice.overlap_experts
            ),
            masks=False,
        ),
        seq_length=job.seq,
        gpu=job.gpu,
    )
    return legal(with_training(run, job.training, "megatron"))


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
    rules=SPACE_RULES,
    writable=TUNED,
    said=lambda job: {
        "tuned": not job.training.fine_tunes
        or recipe_model(job.model, job.name, "sft" if job.training.lora_rank is None else "peft")
        is not None
    },
    left_out=(
        "CUDA graphs (memory not modelled)",
        "hierarchical context parallelism (--cp-comm-type a2a+p2p)",
        "offload of whole layers or of parts of modules (--cpu-offloading)",
        "recomputation of several layers at once (uniform N)",
        FEW,
        LAYOUTS,
        BY_LAYER,
    ),
)
VARIANTS = (SPACE,)
