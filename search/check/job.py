"""A launch as the question that a step time answers: what is trained, how it is split and run.

`autopar.run.launch.Launch` has what memory depends on, `autopar.run.job.Job` what time
does; here one is made of the other. Neither is priced here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from autopar.errors import InputError
from autopar.price.activations import offloaded_bytes
from autopar.price.sharded import recipe_of_launch
from autopar.run.job import (
    Attention,
    Block,
    Experts,
    Job,
    LatentAttention,
    Mlp,
    Precision,
    Recomputation,
)
from autopar.run.launch import Launch, Precision as LaunchPrecision

_FP8: dict[str, Precision] = {
    "delayed": "fp8",
    "tensorwise": "fp8",
    "blockwise": "fp8_block",
    "mxfp8": "mxfp8",
}
_DISPATCHERS: dict[str, Literal["all_to_all", "allgather", "fused"]] = {
    "alltoall": "all_to_all",
    "allgather": "allgather",
    "flex": "fused",
}
_ZERO = {"none": 0, "distributed": 1, "fsdp": 3}


def job_of_launch(launch: Launch, *, skew: float = 1.0) -> Job:
    """Return what a launch trains and how; raises InputError for what has no time.

    skew : tokens of the busiest rank of experts over the mean, where the launch does not fix it: 1
    as published rates have it, or `autopar.training.mixtures.NATURAL_SKEW`.
    """
    model, degrees, precision = launch.model, launch.degrees, launch.precision
    optimizer = launch.optimizer
    if optimizer.kind == "muon":
        raise InputError(f"the optimizer {launch.optimizer.kind} has no measured time; adam has")
    stages = tuple(sum(len(chunk[1]) for chunk in chunks) for chunks in degrees.chunks)
    experts = model.experts
    return Job(
        name=launch.name,
        blocks=tuple(_blocks(launch)),
        vocab=launch.padded_vocab,
        tied=model.tied,
        seq=launch.seq,
        micro_batch=launch.micro_batch,
        global_batch=launch.global_batch,
        gpus=degrees.world,
        tp=degrees.tp,
        cp=degrees.cp,
        pp=degrees.pp,
        dp=degrees.dp,
        ep=degrees.ep,
        etp=degrees.etp if any(model.expert_layers) else 1,
        vpp=degrees.vpp,
        schedule=degrees.schedule,
        stage_layers=stages if degrees.pp > 1 else (),
        sequence_parallel=degrees.scattered,
        heads_exchanged=degrees.heads_exchanged,
        rings=degrees.rings,
        keys_gathered=degrees.keys_gathered,
        **_sharding(launch),
        precision=_precision(precision),
        gathered_bytes=_gathered_bytes(launch),
        attention_kernel=_kernel(launch),
        dispatcher=_DISPATCHERS["alltoall" if experts is None else experts.dispatcher],
        router_fp32=experts is not None and experts.router_fp32,
        capacity=None if experts is None else experts.capacity,
        padded_capacity=experts is not None and experts.padded_capacity,
        overlap_experts=degrees.overlap_experts,
        overlap_tensor=launch.tensor_overlap,
        overlap_gradients=launch.optimizer.overlap_gradients,
        mtp=model.mtp,
        stage_mtp=tuple(sum(chunk[2] for chunk in chunks) for chunks in degrees.chunks)
        if model.mtp and degrees.pp > 1
        else (),
        graphs=launch.graphs,
        low_precision_attention=precision.fp8_attention,
        fused_experts=experts is not None and experts.fused_mlp,
        skew=skew if experts is None or experts.skew is None else experts.skew,
        adapters=launch.adapters,
        frozen=launch.adapters is not None,
        state_bytes=optimizer.adam_bytes
        + (optimizer.master_bytes if precision.element_bytes == 2 else 4),
        optimizer_offload=optimizer.offload,
        offloaded_master=optimizer.offload_master,
        overlap_offload=optimizer.overlap_offload,
        host_adam="deepspeed"
        if launch.trainer is not None and launch.trainer.keeper == "deepspeed"
        else "torch",
        offloaded_weights=optimizer.offload_weights,
    )


def _precision(precision: LaunchPrecision) -> Precision:
    if precision.fp4:
        return "nvfp4"
    return _FP8[precision.fp8_recipe] if precision.fp8 else precision.kind


def _gathered_bytes(launch: Launch) -> float | None:
    """Return the bytes of a weight of a product that ranks gather; None: as products' sums are.

    MXFP8's two copies have scales of their own, so bf16 weights are gathered, unless all is sharded
    (Megatron-LM, `--reuse-grad-buf-for-mxfp8-param-ag` left out).
    """
    precision, sharded = launch.precision, launch.optimizer.sharding == "fsdp"
    if launch.trainer is not None:
        return 1.0 if launch.trainer.gathered_fp8 else None
    if not precision.low_weights or (precision.fp8_recipe == "mxfp8" and not sharded):
        return None
    return precision.low_bytes


def _sharding(launch: Launch) -> dict[str, Any]:
    """Return who keeps states, and in what and when gradients are reduced."""
    trainer = launch.trainer
    if trainer is None:
        return {
            "zero": _ZERO[launch.optimizer.sharding],
            "replicas": 1 if launch.optimizer.sharding == "none" else launch.optimizer.instances,
            "gradient_bytes": float(launch.precision.gradient_bytes),
        }
    recipe = recipe_of_launch(launch)
    reduced = [one.each_bytes for one in recipe.passing if one.what == "input of the reduction"]
    return {
        "zero": trainer.zero,
        "replicas": trainer.replicas if trainer.zero else 1,
        "gradient_bytes": reduced[0] if reduced else recipe.gradients.each_bytes,
        "reduce_every_micro_batch": trainer.each_micro_batch and trainer.zero > 1,
        # weights that are not given back are gathered once
        "reshard": trainer.zero == 3,
        # as torchtitan's published runs of context ranks are priced (benchmarks/ledger_rows.py)
        "ring_balanced": False,
    }


def _kernel(launch: Launch) -> str | None:
    """Return the kernel of attention by the card's name for it; None: what the stack uses."""
    kernel = launch.software.attention
    return "unfused" if kernel in ("unfused", "local") else None


def _blocks(launch: Launch) -> Iterator[Block]:
    """Yield runs of layers that are alike, stage after stage."""
    model = launch.model
    for chunks in launch.degrees.chunks:
        layers = [
            (
                model.expert_layers[layer],
                _recomputed(launch, place, len(chunk[1])),
                model.attention.has_window(layer),
                layer < launch.offload.layers,
                None if launch.of_layer(layer) is launch else launch.precision.kind,
            )
            for chunk in chunks
            for place, layer in enumerate(chunk[1])
        ]
        for (is_mixture, recompute, windowed, whole, precision), run in groupby(layers):
            # of layers that are computed again nothing but the input is there to offload
            offloaded = recompute != "full" and launch.offload.any
            yield Block(
                number=len(list(run)),
                hidden=model.hidden,
                attention=_attention(launch, windowed=windowed),
                mlp=_mixture(launch) if is_mixture else Mlp(width=model.ffn, gated=model.gated),
                recompute=recompute,
                precision=precision,
                offloaded_bytes=float(
                    offloaded_bytes(
                        launch, experts=is_mixture, layer=0 if whole else launch.offload.layers
                    )
                )
                if offloaded
                else 0.0,
                num_norms=None if model.norms == 2 else model.norms,
            )


def _recomputed(launch: Launch, place: int, of: int) -> Recomputation:
    """Return what the backward computes again of a layer at a place of a chunk of so many."""
    recompute, trainer = launch.recompute, launch.trainer
    if trainer is not None:
        if trainer.checkpoint == "op":
            return frozenset({"per_op"})
        whole = trainer.checkpoint == "full" or (
            trainer.checkpoint == "layers" and (place + 1) % trainer.every == 0
        )
        return "full" if whole else frozenset()
    if recompute.layers == "uniform" or (recompute.layers == "block" and place < recompute.number):
        return "full"
    return recompute.modules


def _attention(launch: Launch, *, windowed: bool) -> Attention:
    model, attention = launch.model, launch.model.attention
    latent = attention.latent
    return Attention(
        heads=attention.heads,
        kv_heads=attention.heads if latent is not None else attention.groups,
        width=attention.query_width,
        value_width=attention.value_width,
        window=attention.window if windowed else None,
        rotary=model.positions == "rotary",
        head_norms=attention.head_norms,
        latent=None
        if latent is None
        else LatentAttention(
            query_rank=latent.query_rank,
            key_value_rank=latent.key_value_rank,
            rotary_width=latent.rotary_width,
        ),
    )


def _mixture(launch: Launch) -> Experts:
    experts = launch.model.experts
    assert experts is not None, "a launch with a mixture has experts"
    return Experts(
        number=experts.number,
        per_token=experts.per_token,
        width=experts.ffn,
        gated=launch.model.gated,
        shared_width=experts.shared_ffn,
    )
