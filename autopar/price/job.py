"""Conversion of a run to a `Job`, the input of `autopar.price.step`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal

from autopar.errors import InputError
from autopar.price.activations import offloaded_bytes
from autopar.price.parameters import stage_weights
from autopar.price.states import has_one_moment, layout_of_run
from autopar.rates.kernels import WIDE
from autopar.records import replace
from autopar.run.architecture import WIDEST_FLASH
from autopar.run.job import (
    FP32_STATES,
    Block,
    Job,
    Matrices,
    Precision,
    Recomputation,
    block_of_layer,
)
from autopar.run.run import RankLayer, Run
from autopar.run.runtime import Precision as RunPrecision

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


def _attention_kernel(run: Run) -> str | None:
    """Return the attention kernel that the settings of a run name; None for that of the stack."""
    if run.kernels.attention in ("unfused", "local"):
        return "unfused"
    wide = run.kernels.torch_layers and run.model.widest_head > WIDEST_FLASH
    return WIDE if wide and run.runtime.precision.kind != "fp32" else None


_ADAFACTOR_BYTES = 80.0
"""Bytes per parameter that Adafactor of transformers reads and writes in fp32 kernels.

Square and sum with epsilon (16), two means (8), outer product (4). Product with the gradient (12),
its norm (4), two scalings (16), negation (8), weight (12)."""


def job_of_run(run: Run, *, skew: float = 1.0) -> Job:
    """Return the job of a run; raises InputError for settings without a step-time model.

    Layers may differ in TP and CP degree, ZeRO stage, precision and recomputation. Embedding and
    head may differ from the layers in TP degree and ZeRO stage.

    skew : tokens of the busiest expert-parallel rank over the mean, if the run does not set it: 1
        as in published benchmarks, or `autopar.training.mixtures.NATURAL_SKEW`.
    """
    model, strategy, runtime, split = run.model, run.strategy, run.runtime, run.split
    optimizer, precision, mixed = runtime.optimizer, runtime.precision, model.experts is not None
    if optimizer.low_rank is not None:
        # a low rank decomposes gradients in GEMMs that are not priced
        raise InputError("optimizer of a low rank: no measured time", remedy="Use adam")
    _refuse_unpriced(run)
    stages, ends, torch = strategy.stages, strategy.ends, runtime.kernels.torch_layers
    staged, experts = strategy.pp > 1, runtime.experts
    master = optimizer.master_bytes if precision.element_bytes == 2 else 4
    adafactor = optimizer.kind == "adafactor"
    return Job(
        name=run.name,
        blocks=tuple(_blocks(run)),
        vocab=run.padded_vocab,
        tied=model.tied,
        seq=run.seq_length,
        micro_batch=strategy.micro_batch,
        global_batch=strategy.global_batch,
        gpus=strategy.gpus,
        tp=split.tp,
        cp=split.cp,
        pp=strategy.pp,
        dp=strategy.dp,
        ep=split.ep,
        etp=split.etp if mixed else 1,
        vpp=strategy.vpp,
        schedule=None if strategy.schedule in ("1f1b", "interleaved") else strategy.schedule,
        stage_layers=tuple(sum(len(chunk.layers) for chunk in stage) for stage in stages)
        if staged
        else (),
        vocab_tp=None if ends.tp == split.tp else ends.tp,
        vocab_zero=None if ends.zero == split.zero else ends.zero,
        sequence_parallel=ends.splits_sequence
        or any(one.split.splits_sequence for one in strategy.layers),
        heads_exchanged=split.exchanges_heads,
        rings=split.rings,
        keys_gathered=split.gathers_keys,
        zero=split.zero,
        replicas=split.replicas if split.zero else 1,
        gradient_bytes=_gradient_bytes(run),
        # engines with torch layers reduce unsharded gradients once per step
        reduce_every_micro_batch=runtime.states.each_micro_batch and (not torch or split.zero > 1),
        # with torch layers, ZeRO-1 and ZeRO-2 keep gathered weights until the backward
        reshard=split.zero == 3 or not torch,
        torch_layers=torch,
        precision=_precision(precision),
        row_scales=precision.row_scales,
        experts_only=precision.experts_only,
        gathered_bytes=_gathered_bytes(run),
        attention_kernel=_attention_kernel(run),
        dispatcher=_DISPATCHERS[experts.dispatcher if mixed else "alltoall"],
        router_fp32=mixed and experts.router_fp32,
        capacity=experts.capacity if mixed else None,
        padded_capacity=mixed and experts.padded,
        overlap_experts=runtime.overlap.experts,
        overlap_tensor=runtime.overlap.tensor,
        overlap_gradients=runtime.overlap.gradients,
        mtp=model.mtp,
        mtp_block=tuple(_mtp_block(run)) if model.mtp_block else (),
        stage_mtp=tuple(sum(chunk.mtp for chunk in stage) for stage in stages)
        if model.mtp and staged
        else (),
        graphs="partial" if runtime.kernels.graphs == "attention" else runtime.kernels.graphs,
        low_precision_attention=precision.fp8_attention,
        low_precision_head=precision.fp8_head,
        tiled_loss=runtime.kernels.loss == "trl",
        fused_rotary=runtime.kernels.fused_rotary,
        fused_experts=mixed and experts.fused_mlp,
        fused_permutation=torch or not mixed or experts.fused_permutation,
        skew=skew if not mixed or experts.skew is None else experts.skew,
        optimizer=optimizer.kind != "none",
        adapters=runtime.adapters,
        frozen=runtime.adapters is not None,
        state_bytes=FP32_STATES if adafactor else optimizer.state_bytes + master,
        optimizer_bytes=_ADAFACTOR_BYTES if adafactor else None,
        paged_bytes=optimizer.state_bytes if optimizer.paged else 0.0,
        orthogonalized=tuple(_orthogonalized(run)),
        optimizer_offload=optimizer.offload,
        offloaded_master=optimizer.offload_master,
        overlap_offload=runtime.overlap.optimizer_host,
        host_adam=optimizer.host_adam,
        offloaded_weights=optimizer.offload_weights,
    )


def _orthogonalized(run: Run) -> Iterator[tuple[Matrices, ...]]:
    """Yield the matrices that Muon orthogonalizes in each stage; nothing for other optimizers.

    A fused QKV weight is three matrices. Sharded optimizer states distribute whole matrices.

    Raises InputError for matrices that tensor ranks share, and for mixers with other splits.
    """
    model, split = run.model, run.split
    if run.runtime.optimizer.kind != "muon":
        return
    remedy = "Use adam, or price its memory alone"
    if split.tp * split.etp > 1:
        # how tensor ranks share the iterations depends on --muon-tp-mode
        raise InputError(f"optimizer muon with tp {split.tp}: no measured time", remedy=remedy)
    if not model.is_conventional:
        raise InputError("optimizer muon with other mixers: no measured time", remedy=remedy)
    attention = model.attention
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    for stage in range(run.strategy.pp):
        found = []
        for weight in (one for chunk in stage_weights(run, stage) for one in chunk):
            if weight.trained and has_one_moment(weight):
                rows, columns = weight.shape
                parts = [rows] if weight.name != "qkv" else [n * attention.width for n in heads]
                ranks = run.strategy.edp if weight.expert else run.strategy.dp * split.cp
                ranks = ranks // split.replicas if split.zero else 1
                found += [Matrices(part, columns, weight.number, ranks) for part in parts]
        yield tuple(found)


def _refuse_unpriced(run: Run) -> None:
    """Raise InputError for models and layer splits that the step-time model does not support."""
    model, strategy = run.model, run.strategy
    if any(layer.cross for layer in model.kinds):
        raise InputError(
            f"{model.name} is an encoder-decoder model, which only the planner prices, not "
            "bottom-up"
        )
    lengths = {layer.seq_length or run.seq_length for layer in model.kinds}
    if len(lengths) > 1:
        listed = ", ".join(map(str, sorted(lengths)))
        raise InputError(f"layers of {model.name} see sequences of {listed} tokens, not one length")
    splits = [group.split for group in strategy.layers]
    wide = [split for split in (*splits, strategy.ends) if split.tp > 1]
    if any(split.tp_kind == "ulysses" for split in wide):
        raise InputError("only the planner prices Ulysses sequence parallelism, not bottom-up")
    if any(split.strided for split in wide):
        raise InputError(
            "only the planner prices tensor groups of ranks that are no neighbours, not bottom-up"
        )
    if model.experts is not None and len({(split.ep, split.etp) for split in splits}) > 1:
        raise InputError("only the planner prices expert degrees that differ by layer")


def _precision(precision: RunPrecision) -> Precision:
    if precision.fp4:
        return "nvfp4"
    return _FP8[precision.fp8_recipe] if precision.fp8 else precision.kind


def _gathered_bytes(run: Run) -> float | None:
    """Return the bytes per element of a GEMM weight in the data-parallel all-gather.

    None stands for the run's 16- or 32-bit precision. MXFP8 has two copies with separate scales, so
    Megatron-LM gathers bf16 weights except at ZeRO-3 (`--reuse-grad-buf-for-mxfp8-param-ag` is not
    modelled).
    """
    precision, sharded = run.runtime.precision, run.split.zero == 3
    if run.kernels.torch_layers:
        return 1.0 if run.runtime.states.gathered_fp8 else None
    if not precision.low_weights or (precision.fp8_recipe == "mxfp8" and not sharded):
        return None
    return precision.low_bytes


def _gradient_bytes(run: Run) -> float:
    """Return the bytes per gradient element in the data-parallel reduction."""
    if not run.kernels.torch_layers:
        return float(run.runtime.precision.gradient_bytes)
    recipe = layout_of_run(run)
    reduced = [one.each_bytes for one in recipe.passing if one.what == "input of the reduction"]
    return reduced[0] if reduced else recipe.gradients.each_bytes


def _blocks(run: Run) -> Iterator[Block]:
    """Yield one block per group of consecutive equal layers, stage after stage."""
    for chunks in run.strategy.stages:
        layers = (run.rank_layers[layer] for chunk in chunks for layer in chunk.layers)
        for at, alike in groupby(layers):
            yield _block(run, at, len(list(alike)))


def _mtp_block(run: Run) -> Iterator[Block]:
    """Yield the layers of one MTP layer, recomputed like the last layer of the model."""
    again = run.rank_layers[-1].split.recompute
    for at in run.mtp_layers:
        yield _block(run, at.recomputing(again), 1)


def _block(run: Run, at: RankLayer, number: int) -> Block:
    low, split, first = run.runtime.precision.low_precision, at.split, run.split
    recompute: Recomputation = frozenset({"per_op"}) if split.recompute == "op" else split.recompute
    # fully recomputed layers save only their input, so nothing else can be offloaded
    offloaded = recompute != "full" and run.offloads_activations
    return replace(
        block_of_layer(at.layer),
        number=number,
        recompute=recompute,
        # None: the degree of the job, taken from the first layer
        tp=None if split.tp == first.tp else split.tp,
        cp=None if split.cp == first.cp else split.cp,
        zero=None if split.zero == first.zero else split.zero,
        precision=None if split.low_precision or not low else run.runtime.precision.kind,
        offloaded_bytes=float(offloaded_bytes(at)) if offloaded else 0.0,
    )
