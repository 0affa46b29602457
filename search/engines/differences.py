"""Differences between an exported run and the run read back from its files, as sentences.

Each difference is a feature that the files of the engine cannot express.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from autopar.errors import shortened
from autopar.price.states import default_bucket
from autopar.records import replace
from autopar.run.architecture import Layer, LayerGroup, Model, grouped, with_attention
from autopar.run.run import Run
from autopar.run.runtime import (
    BUCKETS,
    ActivationOffload,
    Buckets,
    ExpertKernels,
    Kernels,
    Optimizer,
    Overlap,
    Precision,
    Quirks,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import Split, Strategy, split_groups
from autopar.training.launch_settings import different_fields
from search.engines.exporter_types import UnsupportedFeature

_PHRASES: Mapping[str, str] = {
    "attention.head_norms": "norms of queries and keys",
    "attention.kv_heads": "heads of keys and values",
    "attention.window": "the window of attention",
    "experts.skew": "tokens of the busiest rank over the mean",
    "experts.fused_weighting": "fused multiplication with the router's probabilities",
    "model.vocab": "the vocabulary",
    "strategy.stages": "layers of the stages",
    "strategy.schedule": "the schedule of the pipeline",
    "strategy.group": "micro-batches of a chunk in a row",
    "split.ep": "expert ranks",
    "split.etp": "tensor ranks of experts",
    "split.zero": "the ZeRO stage",
    "kernels.graphs": "CUDA graphs",
    "steps": "steps of the run",
    "runtime.sft": "samples of a task",
    "optimizer.moments_bytes": "bytes of Adam's moments",
    "optimizer.master_bytes": "bytes of an fp32 weight",
    "optimizer.fused": "a fused update of Adam",
    "optimizer.low_rank": "gradients of a low rank",
    "optimizer.paged": "paged moments",
    "optimizer.layerwise": "updates in the backward",
    "kernels.liger": "kernels of Liger",
    "precision.fp8_attention": "scores of 8 bits",
    "precision.fp8_head": "a head in 8 bits",
    "precision.fp8_recipe": "the fp8 recipe",
    "kernels.attention": "the kernel of attention",
    "allocator.cublas": "CUBLAS_WORKSPACE_CONFIG",
    "overlap.experts": "overlapped dispatch and combine (--overlap-moe-expert-parallel-comm)",
    "overlap.gradients": "overlapped gradient reduction (--overlap-grad-reduce)",
    "overlap.optimizer_host": "overlapped copies of states (--overlap-cpu-optimizer-d2h-h2d)",
    "overlap.tensor": "overlapped tensor-parallel communication (--tp-comm-overlap)",
    "states.bucket": "parameters of a gradient bucket (--ddp-bucket-size)",
    "states.one_root": "embedding and head as one unit",
    "states.apart": "embedding and head as two units",
    "kernels.fused_norms": "norms of one kernel",
    "quirks.stage_outputs": "logits that the last stage keeps",
}
"""Field -> phrase for messages; other fields are named by their path."""


def losses_of(run: Run, runs: Run, title: str) -> tuple[UnsupportedFeature, ...]:
    """Return one unsupported feature for each field in which `runs` differs from `run`.

    runs : run read back from the exported files.
    title : name of the engine in sentences.
    """
    one, other = without_effect(run), without_effect(runs)
    mine, found = one.runtime.precision, other.runtime.precision
    if mine.fp8 != found.fp8:
        # The fp8 recipe has no effect without fp8 GEMMs, so only the precision is reported.
        precision = replace(found, fp8_recipe=mine.fp8_recipe)
        other = replace(other, runtime=replace(other.runtime, precision=precision))
    return tuple(
        UnsupportedFeature(
            field=path,
            what=(
                f"{title} does not support {_phrase(path)}: {_shown(asked)} becomes {_shown(gets)}"
            ),
        )
        for path, asked, gets in run_differences(one, other)
    )


def _phrase(path: str) -> str:
    words = path.removeprefix("strategy.").removeprefix("model.")
    return _PHRASES.get(path, words.replace("_", " "))


def run_differences(one: Run, other: Run) -> Iterator[tuple[str, Any, Any]]:
    """Yield (field, value, other value) for each field in which two runs differ.

    Fields are `RECORD.NAME`, such as `split.tp`. A field that differs in several
    layers is reported once, with the values of the first such layer.
    """
    yield from _fields(one, other)


def _fields(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    for path, mine, its in different_fields(one, other, name):
        if path.endswith(".layers"):
            yield from _of_layers(mine, its)
            continue
        names = path.split(".")
        # Where only one run has a record, the record is reported instead of its fields.
        whole = isinstance(mine, Struct) or isinstance(its, Struct)
        yield ".".join(names[-1:] if whole else names[-2:]), mine, its


def _of_layers(one: Sequence[Any], other: Sequence[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between two sequences of layer groups, or of split groups."""
    mine, its = (list(_each(groups)) for groups in (one, other))
    if len(mine) != len(its):
        yield "model.num_layers", len(mine), len(its)
        return
    seen = set[str]()
    for pair in dict.fromkeys(zip(mine, its, strict=True)):
        for path, asked, gets in _of_layer(*pair):
            if path not in seen:
                seen.add(path)
                yield path, asked, gets


def _each(groups: Sequence[Any]) -> Iterator[Any]:
    for group in groups:
        own = group.layer if isinstance(group, LayerGroup) else group.split
        yield from (own,) * group.count


def _of_layer(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Split):
        yield from _fields(one, other, "split")
        return
    yield from _fields(one.attention, other.attention, "attention")
    yield from _fields(one.recurrent, other.recurrent, "mixer")
    yield from _fields(one.mlp, other.mlp, "experts" if one.experts else "mlp")
    bare, its = (replace(layer, mixers=(), mlp=None) for layer in (one, other))
    yield from _fields(bare, its, "layer")


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return " ".join(sorted(value)) or "none"
    return shortened(str(value))


# --------------------------------------------------------------------------------------------------
# Runs with normalised fields


def without_effect(run: Run) -> Run:
    """Return a run with fixed values in all fields without effect on its time and memory.

    Runs that differ only in such fields become equal.
    """
    return replace(
        run,
        name="",
        # Files do not contain the device, and only some contain the engine release.
        gpu="",
        model=_model(run),
        strategy=_strategy(run),
        runtime=_runtime(run),
    )


def _model(run: Run) -> Model:
    model = run.model
    unpadded = replace(run, model=replace(model, vocab_divisor=1))
    layers, repeat = grouped(tuple(_layer(run, layer) for layer in model.each_layer))
    return replace(
        model,
        name="",
        layers=layers,
        repeat=repeat,
        # A divisor that pads no row of the vocabulary has no effect.
        vocab_divisor=1 if unpadded.padded_vocab == run.padded_vocab else model.vocab_divisor,
        max_positions=model.max_positions if model.positions == "learned" else 0,
        mtp_block=tuple(_layer(run, layer) for layer in model.mtp_block),
        mtp_shared=model.mtp_shared and model.mtp > 1,
        dropout=0.0 if run.kernels.torch_layers else model.dropout,
    )


def _layer(run: Run, layer: Layer) -> Layer:
    attention = layer.attention
    if attention is None:
        return layer
    own = replace(
        attention,
        # In latent attention, every head has separate keys and values.
        kv_heads=attention.kv_heads if attention.latent is None else attention.heads,
        qkv_biases=attention.qkv_biases or layer.biases,
        dropout=0.0 if run.kernels.torch_layers else attention.dropout,
    )
    return with_attention(layer, own)


def _strategy(run: Run) -> Strategy:
    strategy, mixed = run.strategy, run.model.experts is not None
    low = run.runtime.precision.low_precision
    offloads = run.offloads_activations
    splits = [
        replace(
            split,
            sequence_parallel=split.splits_sequence,
            cp_kind=split.cp_kind if split.cp > 1 else "ring",
            ep=split.ep if mixed else 1,
            etp=split.etp if mixed else 1,
            low_precision=split.low_precision or not low,
            offload=split.offload if offloads else frozenset(),
        )
        for split in strategy.each_layer
    ]
    layers = split_groups(splits)
    first = layers[0].split
    return replace(
        strategy,
        layers=layers,
        ends=replace(
            strategy.ends, sequence_parallel=first.sequence_parallel, cp_kind=first.cp_kind
        ),
        group=0 if strategy.vpp == 1 or strategy.group == strategy.pp else strategy.group,
        schedule=strategy.schedule if strategy.pp > 1 else "1f1b",
    )


def _runtime(run: Run) -> Runtime:
    runtime, mixed = run.runtime, run.model.experts is not None
    torch = run.kernels.torch_layers
    return replace(
        runtime,
        engine="",
        release="",
        precision=_precision(runtime.precision),
        optimizer=replace(runtime.optimizer, host_adam=Optimizer().host_adam),
        states=_states(run),
        kernels=_of_torch(runtime.kernels) if torch else _of_megatron(run),
        experts=_expert_kernels(runtime.experts, torch=torch) if mixed else ExpertKernels(),
        overlap=replace(
            runtime.overlap,
            tensor=runtime.overlap.tensor and run.split.tp > 1,
            gradients=Overlap().gradients if torch else runtime.overlap.gradients,
        ),
        offload=runtime.offload if run.offloads_activations else ActivationOffload(),
        # For PyTorch layers, allocator settings and masks are not counted.
        allocator=type(runtime.allocator)() if torch else runtime.allocator,
        masks=Runtime(engine="").masks if torch else runtime.masks,
    )


def _precision(precision: Precision) -> Precision:
    return replace(
        precision,
        fp8_weights=precision.fp8 and precision.fp8_weights,
        fp8_recipe=precision.fp8_recipe if precision.fp8 else "delayed",
        fp8_attention=precision.fp8 and precision.fp8_attention,
        fp8_head=precision.fp8 and precision.fp8_head,
        gradients_bf16=precision.gradients_bf16 and precision.kind == "bf16",
        gradients_fp32=precision.gradients_fp32 and precision.kind == "fp16",
    )


def _states(run: Run) -> States:
    states, zero = run.runtime.states, run.split.zero
    if not run.kernels.torch_layers:
        bucket = states.bucket
        if zero < 2:
            bucket = (bucket or default_bucket(run)) if run.runtime.overlap.gradients else None
        return replace(states, keeper="megatron", bucket=bucket)
    return replace(
        states,
        # Without sharding, accelerate uses DDP.
        keeper="ddp" if zero == 0 and states.keeper == "accelerate" else states.keeper,
        each_micro_batch=states.each_micro_batch or run.strategy.micro_batches == 1,
        gathered_fp8=states.gathered_fp8 and zero > 0 and run.runtime.precision.fp8,
        buckets=buckets_at(states.buckets, zero),
    )


def _of_megatron(run: Run) -> Kernels:
    kernels = run.kernels
    return replace(
        kernels,
        fused_rotary=kernels.fused_rotary or run.model.positions != "rotary",
        fused_gate=kernels.fused_gate or run.model.last.gates == 1,
        # Other quirks depend on the release; only this one is set by an argument.
        quirks=Quirks(
            compiled_experts=kernels.quirks.compiled_experts and run.model.experts is not None
        ),
    )


def _of_torch(kernels: Kernels) -> Kernels:
    """Return kernels with defaults for fields that PyTorch layers do not use."""
    usual = Kernels()
    return replace(
        kernels,
        attention=usual.attention,
        fused_gate=usual.fused_gate,
        fused_rotary=usual.fused_rotary,
        fused_accumulation=usual.fused_accumulation,
        # transformers has no setting for norm kernels, which depend on its release.
        fused_norms=kernels.fused_norms or kernels.module == "transformers",
        quirks=Quirks(
            stage_outputs=kernels.quirks.stage_outputs,
            # Other losses hold no logits in fp32.
            logit_bytes=kernels.quirks.logit_bytes
            if kernels.loss in ("whole", "chunked")
            else usual.quirks.logit_bytes,
        ),
    )


def _expert_kernels(experts: ExpertKernels, *, torch: bool) -> ExpertKernels:
    if not torch:
        return experts
    return replace(
        experts,
        dispatcher="flex" if experts.dispatcher == "flex" else "alltoall",
        grouped=True,
        fused_permutation=False,
        fused_weighting=True,
    )


_OF_STAGE_3 = ("prefetch", "live", "reuse", "persistent", "model_persistent", "sub_group")


def buckets_at(buckets: Buckets, zero: Zero) -> Buckets:
    """Return DeepSpeed's bucket sizes, with defaults for those that a ZeRO stage does not use.

    Stage 3 prefetches weights; stages 1 and 2 all-gather them after the optimizer step. Without
    ZeRO, no bucket is used. Source: `deepspeed/runtime/zero/config.py`.
    """
    if zero == 0:
        return BUCKETS
    idle = ("allgather",) if zero == 3 else _OF_STAGE_3
    return replace(buckets, **{name: getattr(BUCKETS, name) for name in idle})
