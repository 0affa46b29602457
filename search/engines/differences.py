"""What two launches differ in, in sentences: what a trainer's files could not say.

Whatever a file says is read back by `search.check`, so that nothing is lost without a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.records import replace
from autopar.run.launch import Launch, Model, Optimizer, Recompute, Software
from autopar.run.runtime import BUCKETS, Buckets, Zero
from autopar.training.launch_settings import different_fields
from autopar.training.offload import Offload

_RELEASE = (
    "gpu",
    "kept_dummies",
    "grouped_workspaces",
    "expert_workspace",
    "saved_expert_output",
    "unfused_backward_copies",
    "fused_loss_copies",
    "regathered_experts",
)
"""Of the software: the device and the release, which is where a launch runs and not what it says.
"""
_PHRASES: Mapping[str, str] = {
    "model.attention.groups": "heads of keys and values",
    "model.attention.window": "the window of attention",
    "model.experts.skew": "tokens of the busiest rank over the mean",
    "model.experts.fused_weighting": "the product with the router's probabilities in one kernel",
    "model.vocab": "the vocabulary",
    "degrees.chunks": "layers of the stages",
    "degrees.schedule": "the schedule of the pipeline",
    "degrees.group": "micro-batches of a chunk in a row",
    "degrees.ep": "expert ranks",
    "degrees.etp": "tensor ranks of experts",
    "graphs": "CUDA graphs",
    "steps": "steps of the run",
    "optimizer.moments_bytes": "bytes of Adam's moments",
    "optimizer.master_bytes": "bytes of an fp32 weight",
    "optimizer.sharding": "states over data ranks",
    "precision.fp8_attention": "scores of 8 bits",
    "precision.fp8_recipe": "the recipe of 8-bit products",
    "software.attention": "the kernel of attention",
    "software.cublas_config": "CUBLAS_WORKSPACE_CONFIG",
    "trainer.one_root": "embedding and head as one unit",
    "trainer.fused_norms": "norms of one kernel",
    "trainer.stage_outputs": "logits that the last stage keeps",
}
"""What a field is, where its name alone does not say it."""


def losses_of(launch: Launch, runs: Launch, title: str) -> tuple[str, ...]:
    """Return a sentence on each field in which what runs is another launch."""
    one, other = without_effect(launch), without_effect(runs)
    if one.precision.fp8 != other.precision.fp8:
        # without products of 8 bits there is no recipe of them to lose
        recipe = one.precision.fp8_recipe
        other = replace(other, precision=replace(other.precision, fp8_recipe=recipe))
    return tuple(
        f"{title} cannot say {_PHRASES.get(path, path.replace('_', ' '))}: "
        f"{_shown(asked)} becomes {_shown(gets)}"
        for path, asked, gets in different_fields(one, other)
    )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return " ".join(sorted(value)) or "none"
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def without_effect(launch: Launch) -> Launch:
    """Return a launch in which fields that change nothing of it have one value.

    Two launches that differ in no more than those are the same.
    """
    model, degrees, precision = launch.model, launch.degrees, launch.precision
    attention, experts = model.attention, model.experts
    own, usual = launch.software, Software()
    if attention.window is None:
        attention = replace(attention, whole_every=0)
    if attention.latent is not None:
        # its heads have keys and values of their own, of the widths of the projections
        attention = replace(attention, groups=attention.heads, width=0)
    unpadded = replace(launch, model=replace(model, vocab_divisor=1))
    rotary = model.positions == "rotary"
    model = replace(
        model,
        attention=attention,
        # a divisor by which no row is added is none
        vocab_divisor=(1 if unpadded.padded_vocab == launch.padded_vocab else model.vocab_divisor),
        max_positions=model.max_positions if model.positions == "learned" else 0,
        rotary_share=model.rotary_share if rotary else 1.0,
        fused_rotary=model.fused_rotary or not rotary,
        fused_gate=model.fused_gate or not model.gated,
        qkv_biases=model.qkv_biases or model.biases,
        mtp_repeated=model.mtp_repeated and model.mtp > 1,
    )
    degrees = replace(
        degrees,
        sequence_parallel=degrees.scattered,
        group=0 if degrees.vpp == 1 or degrees.group == degrees.pp else degrees.group,
        heads_exchanged=degrees.heads_exchanged and degrees.cp > 1,
        keys_gathered=degrees.keys_gathered and degrees.cp > 1,
        etp=degrees.etp if experts is not None else 1,
        ep=degrees.ep if experts is not None else 1,
        schedule=degrees.pipeline if degrees.pp > 1 else None,
    )
    sixteen = precision.kind
    precision = replace(
        precision,
        fp8_weights=precision.fp8 and precision.fp8_weights,
        fp8_recipe=precision.fp8_recipe if precision.fp8 else "delayed",
        fp8_attention=precision.fp8 and precision.fp8_attention,
        wide_ends=precision.wide_ends if precision.low else (0, 0),
        gradients_bf16=precision.gradients_bf16 and sixteen == "bf16",
        gradients_fp32=precision.gradients_fp32 and sixteen == "fp16",
    )
    recompute = launch.recompute
    if recompute.layers == "none":
        recompute = replace(recompute, number=0)
    software = replace(own, **{name: getattr(usual, name) for name in _RELEASE})
    optimizer, trainer = launch.optimizer, launch.trainer
    if trainer is not None:
        # states, what is computed again and kernels are the trainer's, which these repeat
        recompute, software = Recompute(), Software()
        optimizer = replace(
            optimizer,
            sharding=Optimizer().sharding,
            overlap_gradients=Optimizer().overlap_gradients,
        )
        model = _of_torch(model)
        transformers = trainer.layers == "transformers"
        trainer = replace(
            trainer,
            # who replicates does it the same way
            keeper="ddp"
            if trainer.zero == 0 and trainer.keeper == "accelerate"
            else trainer.keeper,
            # which kernels transformers has is its release's to say
            fused_norms=trainer.fused_norms or transformers,
            every=trainer.every if trainer.checkpoint == "layers" else 1,
            gathered_fp8=trainer.gathered_fp8 and trainer.zero > 0 and precision.fp8,
            buckets=buckets_at(trainer.buckets, trainer.zero),
        )
    return replace(
        launch,
        name="",
        model=model,
        degrees=degrees,
        precision=precision,
        optimizer=optimizer,
        recompute=recompute,
        offload=launch.offload if launch.offload.any else Offload(),
        software=software,
        tensor_overlap=launch.tensor_overlap and launch.degrees.tp > 1,
        trainer=trainer,
    )


def _of_torch(model: Model) -> Model:
    """Return a model without the kernels and switches that layers of torch do not have."""
    experts = model.experts
    if experts is not None:
        fused = experts.dispatcher == "flex"
        experts = replace(
            experts,
            dispatcher="flex" if fused else "alltoall",
            grouped=True,
            fused_permutation=False,
            fused_weighting=True,
        )
    return replace(
        model,
        experts=experts,
        attention=replace(model.attention, dropout=0.0),
        fused_gate=True,
        fused_rotary=True,
        hidden_dropout=0.0,
    )


_OF_STAGE_3 = ("prefetch", "live", "reuse", "sub_group")


def buckets_at(buckets: Buckets, zero: Zero) -> Buckets:
    """Return DeepSpeed's buckets with those at their defaults that a stage does not have.

    `deepspeed/runtime/zero/config.py`: stage 3 fetches weights ahead, stages 1 and 2 gather them
    behind the step; without ZeRO there are none.
    """
    if zero == 0:
        return BUCKETS
    idle = ("allgather",) if zero == 3 else _OF_STAGE_3
    return replace(buckets, **{name: getattr(BUCKETS, name) for name in idle})
