"""What torchtitan can be told with one set of degrees, eager or compiled, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from autopar.pipeline.schedules import SCHEDULES
from autopar.records import replace
from autopar.run.launch import Launch, TorchTrainer
from autopar.run.runtime import Zero
from search.engines.choice import FULL, NONE, Choice, Precision
from search.engines.space import (
    BY_LAYER,
    FEW,
    LAYOUTS,
    EngineSpace,
    Job,
    device_precisions,
    never,
    no_offload,
    plain_dispatcher,
    torch_launch,
)


def _torchtitan(job: Job, choice: Choice) -> Launch:
    staged = choice.pp > 1
    return torch_launch(
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


def _precisions(gpu: str) -> tuple[Precision, ...]:
    return tuple(one for one in device_precisions(gpu) if one in ("bf16", "fp8", "mxfp8"))


SPACE = EngineSpace(
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
    offload=no_offload,
    precisions=lambda gpu: tuple(
        p for p in device_precisions(gpu) if p in ("bf16", "fp8", "mxfp8")
    ),
    dispatchers=plain_dispatcher,
    overlaps_experts=False,
    overlaps_tensor=never,
    any_layout=True,
    launch=_torchtitan,
    attention=_torchtitan_attention,
    refused=_torchtitan_refuses,
    left_out=(
        "asynchronous tensor parallelism of compiled layers",
        "recomputation of every n-th layer",
        FEW,
        LAYOUTS,
        BY_LAYER,
    ),
)
COMPILED = replace(
    SPACE,
    stack="torchtitan-compiled",
    compiled=True,
    # a compiled backward is one piece, whose gradients of weights cannot come later
    schedules=tuple(one for one in SPACE.schedules if not SCHEDULES[one].splits),
)
"""The same with compiled layers."""
VARIANTS = (SPACE, COMPILED)
