"""Launches as runs and back, while both types exist.

A launch is a run whose layers are split alike. A run that is none is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Literal, cast

from autopar.errors import InputError
from autopar.pipeline.schedules import schedule_of_chunks
from autopar.run.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Model,
    grouped,
)
from autopar.run.launch import (
    Attention as LaunchAttention,
    Checkpointing,
    Degrees,
    Experts as LaunchExperts,
    Latent,
    Launch,
    Model as LaunchModel,
    Optimizer as LaunchOptimizer,
    Precision as LaunchPrecision,
    Recompute,
    Software,
    TorchTrainer,
)
from autopar.run.run import Run
from autopar.run.runtime import (
    ActivationOffload,
    Allocator,
    ExpertKernels,
    Kernels,
    LayerModule,
    Optimizer,
    Overlap,
    Precision,
    Quirks,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import (
    Chunk,
    ContextKind,
    Recomputation,
    Split,
    Strategy,
    split_groups,
)
from autopar.training.offload import Offload

_SHARDING: tuple[Literal["none", "distributed", "zero2", "fsdp"], ...] = (
    *("none", "distributed", "zero2", "fsdp"),
)
"""What a launch calls the ZeRO stages 0 to 3."""


# --------------------------------------------------------------------------------------------------
# A launch as a run.


def run_of_launch(launch: Launch, *, engine: str | None = None) -> Run:
    """Return the run of a launch.

    engine : its name; None: the one that keeps states so, torchtitan for its layers under DDP.
    """
    return Run(
        name=launch.name,
        model=model_of_launch(launch.model, name=launch.name),
        strategy=_strategy_of_launch(launch),
        runtime=_runtime_of_launch(launch, engine or _engine_of(launch.trainer)),
        seq_length=launch.seq,
        gpu=launch.software.gpu,
        steps=launch.steps,
    )


def _engine_of(trainer: TorchTrainer | None) -> str:
    if trainer is None:
        return "megatron"
    if trainer.keeper == "ddp":
        return "torchtitan" if trainer.layers == "torchtitan" else "accelerate"
    return trainer.keeper


def model_of_launch(model: LaunchModel, *, name: str = "") -> Model:
    """Return the architecture of a launch's model."""
    kinds = {
        (mixed, windowed): _layer_of_launch(model, mixed=mixed, windowed=windowed)
        for mixed in {*model.expert_layers}
        for windowed in (False, True)
    }
    layers = tuple(
        kinds[mixed, model.attention.has_window(number)]
        for number, mixed in enumerate(model.expert_layers)
    )
    groups, repeat = grouped(layers)
    return Model(
        name=name,
        layers=groups,
        repeat=repeat,
        vocab=model.vocab,
        vocab_divisor=model.vocab_divisor,
        tied=model.tied,
        positions=model.positions,
        max_positions=model.max_positions,
        mtp=model.mtp,
        mtp_shared=model.mtp_repeated,
        dropout=model.hidden_dropout,
    )


def _layer_of_launch(model: LaunchModel, *, mixed: bool, windowed: bool) -> Layer:
    attention, latent = model.attention, model.attention.latent
    mixture = model.experts if mixed else None
    return Layer(
        hidden=model.hidden,
        mixers=(
            Attention(
                heads=attention.heads,
                kv_heads=attention.groups,
                width=attention.query_width,
                value_width=attention.value_width,
                window=attention.window if windowed else None,
                rotary_share=model.rotary_share if model.positions == "rotary" else 0.0,
                head_norms="head" if attention.head_norms else "none",
                qkv_biases=model.qkv_biases,
                dropout=attention.dropout,
                latent=None
                if latent is None
                else LatentAttention(
                    query_rank=latent.query_rank,
                    kv_rank=latent.key_value_rank,
                    key_width=latent.key_width,
                    rotary_width=latent.rotary_width,
                ),
            ),
        ),
        mlp=Mlp(width=model.ffn, gated=model.gated)
        if mixture is None
        else Experts(
            number=mixture.number,
            per_token=mixture.per_token,
            width=mixture.ffn,
            gated=model.gated,
            shared_width=mixture.shared_ffn,
        ),
        norm=model.norm,
        norms=model.norms,
        biases=model.biases,
    )


def _strategy_of_launch(launch: Launch) -> Strategy:
    degrees, trainer = launch.degrees, launch.trainer
    if trainer is None:
        zero = cast(Zero, _SHARDING.index(launch.optimizer.sharding))
        replicas = launch.optimizer.instances
    else:
        zero, replicas = trainer.zero, trainer.replicas
    shared = Split(
        tp=degrees.tp,
        sequence_parallel=degrees.sequence_parallel,
        cp=degrees.cp,
        cp_kind=_context_kind(degrees),
        rings=degrees.rings,
        zero=zero,
        replicas=replicas,
    )
    splits: dict[int, Split] = {}
    for stage in degrees.chunks:
        for _, layers, _, _ in stage:
            for place, layer in enumerate(layers):
                recompute, unit = _recompute_of_launch(launch, place)
                splits[layer] = Split(
                    tp=shared.tp,
                    sequence_parallel=shared.sequence_parallel,
                    cp=shared.cp,
                    cp_kind=shared.cp_kind,
                    rings=shared.rings,
                    ep=degrees.ep,
                    etp=degrees.etp,
                    zero=zero,
                    replicas=replicas,
                    recompute=recompute,
                    recompute_unit=unit,
                    offload=launch.offload.modules,
                    low_precision=launch.of_layer(layer) is launch,
                )
    return Strategy(
        gpus=degrees.world,
        layers=split_groups(splits[layer] for layer in sorted(splits)),
        ends=shared,
        stages=tuple(tuple(Chunk(*chunk) for chunk in stage) for stage in degrees.chunks),
        schedule=degrees.pipeline,
        group=degrees.group,
        micro_batch=launch.micro_batch,
        global_batch=launch.global_batch,
    )


def _context_kind(degrees: Degrees) -> ContextKind:
    if degrees.heads_exchanged:
        return "a2a"
    return "all-gather" if degrees.keys_gathered else "ring"


def _recompute_of_launch(launch: Launch, place: int) -> tuple[Recomputation, int]:
    """Return what is recomputed of the layer at a place of its chunk, and layers of a unit."""
    recompute, trainer = launch.recompute, launch.trainer
    if trainer is not None:
        if trainer.checkpoint == "op":
            return "op", 1
        every = {"full": 1, "layers": trainer.every}.get(trainer.checkpoint, 0)
        return ("full" if every and (place + 1) % every == 0 else frozenset()), 1
    if recompute.layers == "uniform":
        return "full", recompute.number
    if recompute.layers == "block" and place < recompute.number:
        return "full", 1
    return recompute.modules, 1


def _runtime_of_launch(launch: Launch, engine: str) -> Runtime:
    software, trainer, offload = launch.software, launch.trainer, launch.offload
    optimizer, precision = launch.optimizer, launch.precision
    return Runtime(
        engine=engine,
        precision=Precision(
            kind=precision.kind,
            fp8=precision.fp8,
            fp8_weights=precision.fp8_weights,
            fp8_recipe=precision.fp8_recipe,
            fp8_attention=precision.fp8_attention,
            fp4=precision.fp4,
            fp4_weights=precision.fp4_weights,
            gradients_bf16=precision.gradients_bf16,
            gradients_fp32=precision.gradients_fp32,
        ),
        optimizer=Optimizer(
            kind=optimizer.kind,
            moments_bytes=optimizer.moments_bytes,
            master_bytes=optimizer.master_bytes,
            offload=optimizer.offload,
            offload_master=optimizer.offload_master,
            offload_weights=optimizer.offload_weights,
            host_adam="deepspeed"
            if trainer is not None and trainer.keeper == "deepspeed"
            else "torch",
        ),
        adapters=launch.adapters,
        states=_states_of_launch(launch),
        kernels=_kernels_of_launch(launch),
        experts=_experts_of_launch(
            launch.model.experts if any(launch.model.expert_layers) else None
        ),
        overlap=Overlap(
            tensor=launch.tensor_overlap,
            gradients=optimizer.overlap_gradients,
            experts=launch.degrees.overlap_experts,
            optimizer_host=optimizer.overlap_offload,
        ),
        offload=ActivationOffload(
            fraction=offload.fraction, layers=offload.layers, least_elements=offload.least_elements
        ),
        allocator=Allocator(expandable=software.expandable_segments, cublas=software.cublas_config),
        masks=launch.attention_masks,
    )


def _states_of_launch(launch: Launch) -> States:
    optimizer, trainer = launch.optimizer, launch.trainer
    if trainer is None:
        sharded = optimizer.sharding == "fsdp"
        return States(
            keeper="megatron-fsdp" if sharded else "megatron",
            bucket=optimizer.bucket,
            padded_buckets=optimizer.padded_buckets,
        )
    return States(
        keeper=trainer.keeper,
        reshard=trainer.zero == 3,
        each_micro_batch=trainer.each_micro_batch,
        wide_gradients=trainer.wide_gradients,
        buckets=trainer.buckets,
        bucket=optimizer.bucket,
        padded_buckets=optimizer.padded_buckets,
        one_root=trainer.one_root,
        gathered_fp8=trainer.gathered_fp8,
    )


def _kernels_of_launch(launch: Launch) -> Kernels:
    model, software, trainer = launch.model, launch.software, launch.trainer
    module: LayerModule = "megatron" if software.local_layers else "te"
    return Kernels(
        attention=software.attention,
        module=module if trainer is None else trainer.layers,
        compiled=trainer is not None and trainer.compiled,
        graphs=launch.graphs,
        loss=launch.loss_fusion if trainer is None else trainer.loss,
        loss_chunks=1 if trainer is None else trainer.loss_chunks,
        loss_parallel=trainer is None or trainer.loss_parallel,
        fused_gate=model.fused_gate,
        fused_rotary=model.fused_rotary,
        fused_norms=trainer is None or trainer.fused_norms,
        fused_accumulation=software.fused_accumulation,
        repeated_heads=trainer is not None and trainer.repeated_heads,
        deferred_head=launch.deferred_head,
        quirks=Quirks(
            kept_dummies=software.kept_dummies,
            grouped_workspaces=software.grouped_workspaces,
            expert_workspace=software.expert_workspace,
            saved_expert_output=software.saved_expert_output,
            compiled_experts=software.compiled_experts,
            unfused_backward_copies=software.unfused_backward_copies,
            fused_loss_copies=software.fused_loss_copies,
            regathered_experts=software.regathered_experts,
            stage_outputs=trainer is not None and trainer.stage_outputs,
        ),
    )


def _experts_of_launch(experts: LaunchExperts | None) -> ExpertKernels:
    if experts is None:
        return ExpertKernels()
    return ExpertKernels(
        dispatcher=experts.dispatcher,
        capacity=experts.capacity,
        padded=experts.padded_capacity,
        router_fp32=experts.router_fp32,
        grouped=experts.grouped,
        fused_permutation=experts.fused_permutation,
        fused_weighting=experts.fused_weighting,
        fused_mlp=experts.fused_mlp,
        skew=experts.skew,
    )


# --------------------------------------------------------------------------------------------------
# A run as a launch.


def launch_of_run(run: Run) -> Launch:
    """Return the launch of a run; raises InputError where layers are split or built unlike."""
    strategy, runtime = run.strategy, run.runtime
    first = strategy.first
    alike = {_without_savings(split) for split in strategy.each_layer}
    if len(alike) > 1:
        raise InputError(f"{len(alike)} kinds of splits: a launch has one for all layers")
    if first.tp_kind == "ulysses" or first.strided:
        raise InputError("a launch has neither Ulysses as tensor degree nor strided groups")
    torch = runtime.kernels.module in ("torchtitan", "transformers")
    return Launch(
        name=run.name,
        model=_launch_model(run),
        degrees=Degrees(
            world=strategy.gpus,
            tp=first.tp,
            cp=first.cp,
            pp=strategy.pp,
            ep=first.ep,
            etp=first.etp,
            sequence_parallel=first.sequence_parallel,
            chunks=strategy.stages,
            group=strategy.group,
            heads_exchanged=first.cp_kind == "a2a",
            rings=first.rings,
            keys_gathered=first.cp_kind == "all-gather",
            overlap_experts=runtime.overlap.experts,
            schedule=None
            if strategy.schedule == schedule_of_chunks(strategy.vpp)
            else strategy.schedule,
        ),
        seq=run.seq_length,
        micro_batch=strategy.micro_batch,
        global_batch=strategy.global_batch,
        steps=run.steps,
        precision=_launch_precision(run),
        optimizer=_launch_optimizer(run, torch=torch),
        recompute=_launch_recompute(strategy, torch=torch),
        software=_launch_software(run),
        loss_fusion="none"
        if torch
        else cast(Literal["none", "native", "te"], runtime.kernels.loss),
        attention_masks=runtime.masks,
        tensor_overlap=runtime.overlap.tensor,
        graphs=runtime.kernels.graphs,
        deferred_head=runtime.kernels.deferred_head,
        trainer=_launch_trainer(run) if torch else None,
        adapters=runtime.adapters,
        offload=Offload(
            modules=first.offload,
            fraction=runtime.offload.fraction,
            layers=runtime.offload.layers,
            least_elements=runtime.offload.least_elements,
        ),
    )


def _without_savings(split: Split) -> tuple[object, ...]:
    """Return the degrees of a split, without what may differ by layer in a launch."""
    degrees = (split.tp, split.tp_kind, split.strided, split.sequence_parallel, split.cp)
    exchange = (split.cp_kind, split.rings, split.ep, split.etp, split.zero, split.replicas)
    return (*degrees, *exchange, split.offload)


def _launch_model(run: Run) -> LaunchModel:
    model, kernels = run.model, run.runtime.kernels
    layers = model.each_layer
    first, attention = layers[0], layers[0].attention
    if attention is None:
        raise InputError(f"{model.name}: a launch has attention in all layers")
    mixture = next((layer.experts for layer in model.kinds if layer.experts is not None), None)
    dense = next((layer.mlp for layer in model.kinds if isinstance(layer.mlp, Mlp)), None)
    window, whole_every = _windows(model.name, layers)
    usual = [_common(layer, mixture, dense) for layer in model.kinds]
    if len({*usual}) > 1 or None in usual:
        raise InputError(f"{model.name}: a launch has layers that differ in experts and window")
    gated = first.mlp is not None and first.mlp.gated
    width = dense.width if dense is not None else mixture.width if mixture is not None else 0
    return LaunchModel(
        hidden=first.hidden,
        ffn=width,
        attention=_launch_attention(attention, window, whole_every),
        vocab=model.vocab,
        vocab_divisor=model.vocab_divisor,
        expert_layers=tuple(layer.experts is not None for layer in layers),
        experts=None if mixture is None else _launch_experts(mixture, run.runtime.experts),
        gated=gated,
        fused_gate=kernels.fused_gate,
        biases=first.biases,
        qkv_biases=attention.qkv_biases,
        tied=model.tied,
        norm=first.norm,
        norms=first.norms,
        positions=model.positions,
        max_positions=model.max_positions,
        rotary_share=attention.rotary_share if model.positions == "rotary" else 1.0,
        fused_rotary=kernels.fused_rotary,
        hidden_dropout=model.dropout,
        mtp=model.mtp,
        mtp_repeated=model.mtp_shared,
    )


def _common(layer: Layer, mixture: Experts | None, dense: Mlp | None) -> object:
    """Return what all layers of a launch share; None for a layer that no launch has."""
    attention, mlp = layer.attention, layer.mlp
    if attention is None or len(layer.mixers) > 1 or layer.cross or mlp is None:
        return None
    if mlp not in (mixture, dense) or layer.seq_length is not None:
        return None
    seen = (attention.heads, attention.kv_heads, attention.width, attention.value_width)
    kind = (attention.latent, attention.head_norms, attention.rotary_share, attention.dropout)
    norms = (layer.norm, layer.norms, layer.biases, attention.qkv_biases, mlp.gated)
    return (layer.hidden, *seen, *kind, *norms)


def _windows(name: str, layers: Sequence[Layer]) -> tuple[int | None, int]:
    """Return the window of a model, and every how many layers one has none; 0: all have it."""
    windows = [None if one.attention is None else one.attention.window for one in layers]
    sizes = {*windows} - {None}
    whole = [number for number, window in enumerate(windows, 1) if window is None]
    if not sizes:
        return None, 0
    every = whole[0] if whole else 0
    if len(sizes) > 1 or (every and whole != [*range(every, len(layers) + 1, every)]):
        raise InputError(f"{name}: windows of its layers do not come in turn, as in a launch")
    return sizes.pop(), every


def _launch_attention(
    attention: Attention, window: int | None, whole_every: int
) -> LaunchAttention:
    latent = attention.latent
    return LaunchAttention(
        heads=attention.heads,
        groups=attention.kv_heads,
        width=attention.width,
        head_norms=attention.head_norms != "none",
        dropout=attention.dropout,
        latent=None
        if latent is None
        else Latent(
            query_rank=latent.query_rank,
            key_value_rank=latent.kv_rank,
            key_width=latent.key_width,
            rotary_width=latent.rotary_width,
            value_width=attention.value_width,
        ),
        window=window,
        whole_every=whole_every,
    )


def _launch_experts(experts: Experts, kernels: ExpertKernels) -> LaunchExperts:
    return LaunchExperts(
        number=experts.number,
        per_token=experts.per_token,
        ffn=experts.width,
        shared_ffn=experts.shared_width,
        dispatcher=kernels.dispatcher,
        capacity=kernels.capacity,
        padded_capacity=kernels.padded,
        router_fp32=kernels.router_fp32,
        grouped=kernels.grouped,
        fused_permutation=kernels.fused_permutation,
        fused_weighting=kernels.fused_weighting,
        fused_mlp=kernels.fused_mlp,
        skew=kernels.skew,
    )


def _launch_precision(run: Run) -> LaunchPrecision:
    precision = run.runtime.precision
    low = [split.low_precision for split in run.strategy.each_layer]
    ends = (0, 0)
    if not all(low):
        first = len([*takewhile(lambda one: not one, low)])
        last = len([*takewhile(lambda one: not one, reversed(low))]) if any(low) else 0
        if low != [False] * first + [True] * (len(low) - first - last) + [False] * last:
            raise InputError("a launch has layers in 16 bits at the ends of a model alone")
        ends = (first, last)
    return LaunchPrecision(
        kind=precision.kind,
        fp8=precision.fp8,
        fp8_weights=precision.fp8_weights,
        fp8_recipe=precision.fp8_recipe,
        gradients_bf16=precision.gradients_bf16,
        gradients_fp32=precision.gradients_fp32,
        fp8_attention=precision.fp8_attention,
        fp4=precision.fp4,
        fp4_weights=precision.fp4_weights,
        wide_ends=ends,
    )


def _launch_optimizer(run: Run, *, torch: bool) -> LaunchOptimizer:
    optimizer, states, overlap = run.runtime.optimizer, run.runtime.states, run.runtime.overlap
    if optimizer.kind == "none":
        raise InputError("a launch updates its weights; its optimizer is none")
    first = run.strategy.first
    return LaunchOptimizer(
        kind=optimizer.kind,
        sharding=_SHARDING[first.zero],
        moments_bytes=optimizer.moments_bytes,
        master_bytes=optimizer.master_bytes,
        offload=optimizer.offload,
        offload_master=optimizer.offload_master,
        offload_weights=optimizer.offload_weights,
        overlap_offload=overlap.optimizer_host,
        # copies of torch's engines are counted with their trainer
        instances=1 if torch else first.replicas,
        overlap_gradients=overlap.gradients,
        bucket=states.bucket,
        padded_buckets=states.padded_buckets,
    )


def _recomputed_whole(strategy: Strategy) -> Iterator[tuple[bool, ...]]:
    """Yield for every model chunk whether each of its layers is recomputed whole."""
    splits = strategy.each_layer
    for stage in strategy.stages:
        for chunk in stage:
            yield tuple(splits[layer].recompute == "full" for layer in chunk.layers)


def _launch_recompute(strategy: Strategy, *, torch: bool) -> Recompute:
    splits = strategy.each_layer
    if all(split.recompute == "full" for split in splits):
        return Recompute(layers="uniform", number=strategy.first.recompute_unit)
    others = {s.recompute for s in splits if isinstance(s.recompute, frozenset)}
    modules = others.pop() if len(others) == 1 and not torch else frozenset()
    chunks = [*_recomputed_whole(strategy)]
    if torch or not any(map(any, chunks)):
        return Recompute(modules=modules)
    number = max(map(sum, chunks))
    if others or any(
        chunk != (True,) * min(number, len(chunk)) + (False,) * (len(chunk) - number)
        for chunk in chunks
    ):
        raise InputError("Megatron-LM recomputes the first layers of every chunk, alike in all")
    return Recompute(layers="block", number=number, modules=modules)


def _launch_software(run: Run) -> Software:
    kernels, quirks = run.runtime.kernels, run.runtime.kernels.quirks
    return Software(
        gpu=run.gpu,
        attention=kernels.attention,
        local_layers=kernels.module == "megatron",
        cublas_config=run.runtime.allocator.cublas,
        expandable_segments=run.runtime.allocator.expandable,
        fused_accumulation=kernels.fused_accumulation,
        kept_dummies=quirks.kept_dummies,
        grouped_workspaces=quirks.grouped_workspaces,
        expert_workspace=quirks.expert_workspace,
        saved_expert_output=quirks.saved_expert_output,
        compiled_experts=quirks.compiled_experts,
        unfused_backward_copies=quirks.unfused_backward_copies,
        fused_loss_copies=quirks.fused_loss_copies,
        regathered_experts=quirks.regathered_experts,
    )


def _launch_trainer(run: Run) -> TorchTrainer:
    states, kernels, first = run.runtime.states, run.runtime.kernels, run.strategy.first
    checkpoint, every = _checkpoint(run.strategy)
    return TorchTrainer(
        keeper=states.keeper,
        zero=first.zero,
        replicas=first.replicas,
        wide_gradients=states.wide_gradients,
        each_micro_batch=states.each_micro_batch,
        buckets=states.buckets,
        one_root=states.one_root,
        gathered_fp8=states.gathered_fp8,
        layers=cast(Literal["torchtitan", "transformers"], kernels.module),
        compiled=kernels.compiled,
        checkpoint=checkpoint,
        every=every,
        fused_norms=kernels.fused_norms,
        repeated_heads=kernels.repeated_heads,
        loss=cast(Literal["whole", "compiled", "chunked"], kernels.loss),
        loss_chunks=kernels.loss_chunks,
        loss_parallel=kernels.loss_parallel,
        stage_outputs=kernels.quirks.stage_outputs,
    )


def _checkpoint(strategy: Strategy) -> tuple[Checkpointing, int]:
    """Return how engines of torch checkpoint layers, and every which of a chunk."""
    kinds = {split.recompute for split in strategy.each_layer}
    if kinds == {"op"}:
        return "op", 1
    if kinds == {"full"}:
        return "full", 1
    if kinds == {frozenset[str]()}:
        return "none", 1
    chunks = [*_recomputed_whole(strategy)]
    longest = max(map(len, chunks))
    for every in range(1, longest + 1):
        if all(
            whole == ((place + 1) % every == 0)
            for chunk in chunks
            for place, whole in enumerate(chunk)
        ):
            return "layers", every
    raise InputError("torchtitan checkpoints every n-th layer, alike in all chunks")
