"""Conversion between `Plan`, the type of the planner, and `Run`, the type stored in files.

A plan contains only the strategy of a run, layer by layer. Settings that a plan cannot express
raise InputError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.records import replace
from autopar.run.architecture import (
    Attention,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    Mamba,
    Mixer,
    Mlp,
    Model,
    Norm,
    ShortConvolution,
    grouped,
    windows_of,
    with_attention,
)
from autopar.run.model import (
    ConvolutionSpec,
    LayerSpec,
    MixerSpec,
    ModelSpec,
    has_attention,
    has_patches,
    head_dim,
    layer_norms,
    sizes_known,
)
from autopar.run.plan import ZERO_DEFAULTS, LayerStrategy, Plan, VocabStrategy
from autopar.run.run import Run
from autopar.run.runtime import (
    AttentionKernel,
    ExpertKernels,
    Keeper,
    Kernels,
    Overlap,
    Precision,
    PrecisionKind,
    Runtime,
    States,
    Zero,
)
from autopar.run.strategy import Split, Strategy, chunks_of_sizes, split_groups


def model_of_spec(spec: ModelSpec) -> Model:
    """Return the architecture described by a spec.

    Raises InputError if heads, MLP width or vocabulary are unknown, or if the norms are neither
    RMSNorms nor LayerNorms.
    """
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown",
            remedy="Add --model with a model spec",
        )
    for layer in spec.layers:
        norms = layer_norms(layer)
        known = (norms, 2 * norms, *((0,) if has_patches(spec) else ()))
        if layer.norm_parameters_per_hidden not in known:
            raise InputError(
                f"model {spec.name!r}: {layer.norm_parameters_per_hidden} norm parameters per "
                f"hidden size in {norms} norms are neither RMSNorm nor LayerNorm"
            )
    groups, repeat = grouped(layers_of_spec(spec))
    return Model(
        name=spec.name,
        layers=groups,
        repeat=repeat,
        vocab=spec.vocab_size,
        vocab_divisor=spec.make_vocab_size_divisible_by,
        tied=spec.tied_embeddings,
        positions="learned"
        if spec.learned_positions
        else "none"
        if spec.no_positions
        else "rotary",
        max_positions=spec.position_rows,
        rotary_base=spec.rotary_base,
        rotary_scaling=spec.rotary_scaling_factor,
        extra_embedding=spec.extra_embedding_parameters,
        extra_head=spec.extra_head_parameters,
        capped_logits=spec.capped_logits,
        mtp=spec.mtp_layers,
        mtp_block=tuple(_layer_of_spec(spec, spec.layers[k], None) for k in spec.mtp_order),
    )


def layers_of_spec(spec: ModelSpec) -> tuple[Layer, ...]:
    """Return the layers described by a spec, in execution order; equal layers are one object.

    Raises InputError if heads or MLP width are unknown.
    """
    made: dict[tuple[int, bool], Layer] = {}
    seen = [0] * len(spec.layers)
    found = []
    for kind in spec.layer_types:
        layer = spec.layers[kind]
        seen[kind] += 1
        whole = layer.whole_every > 0 and seen[kind] % layer.whole_every == 0
        if (kind, whole) not in made:
            window = None if whole else layer.window
            made[kind, whole] = _layer_of_spec(spec, layer, window)
        found.append(made[kind, whole])
    return tuple(found)


def uniform_model(spec: ModelSpec) -> Model:
    """Return the model of a spec for uniform plans, reduced to settings that affect them.

    Name, rotary base and scaling are removed, and `_as_told` reduces each layer. A layer of a
    hybrid model is one part, as in Megatron-LM: a mixer and an MLP are two layers. Raises
    InputError like `model_of_spec` and `refuse_unlike`.
    """
    model = model_of_spec(spec)
    refuse_unlike(model)
    groups, repeat = model.layers, model.repeat
    if model.is_hybrid:
        single = tuple(part for layer in model.each_layer for part in _single(layer))
        groups, repeat = grouped(single)
    groups = tuple(replace(one, layer=_as_told(one.layer)) for one in groups)
    plain = replace(model, name="", layers=groups, repeat=repeat)
    return replace(plain, rotary_base=None, rotary_scaling=None)


def refuse_unlike(model: Model) -> None:
    """Raise InputError if the layers of a model do not allow a uniform plan.

    A uniform plan needs a decoder-only model with attention. Layers may differ only in their parts
    (attention or one other mixer, experts or a dense MLP), in the sliding window, and layers with a
    window in their heads from those without.
    """
    if model.first_attention is None:
        raise InputError(f"model {model.name!r}: uniform plans need a layer with attention")
    if not {*model.mtp_block} <= {*model.kinds}:
        raise InputError(
            f"model {model.name!r}: uniform plans do not support MTP layers of a kind that the "
            "model does not have"
        )
    for layer in model.kinds:
        attention = layer.attention
        causal = attention is None or attention.causal or model.has_patches
        if layer.cross or not causal:
            raise InputError(
                f"model {model.name!r}: memory of Megatron-LM is counted for decoder-only models",
                remedy="Remove --engine megatron",
            )
        if len(layer.mixers) > 1:
            raise InputError(
                f"model {model.name!r}: uniform plans do not support layers with several mixers"
            )
    # torch layers, the only ones of such models, are priced one by one
    for what, of in _ALIKE.items() if not model.has_patches else ():
        if len({of(layer) for layer in model.kinds} - {None}) > 1:
            raise InputError(
                f"model {model.name!r}: layers differ in {what}, which uniform plans do not "
                "support",
                remedy="Check a launch of it instead (autopar check)",
            )
    mixtures = {layer.experts for layer in model.kinds} - {None}
    dense = {layer.mlp for layer in model.kinds if isinstance(layer.mlp, Mlp)}
    for what, kinds in (("experts", mixtures), ("dense MLPs", dense)):
        if len(kinds) > 1:
            raise InputError(
                f"model {model.name!r}: uniform plans do not support {what} of two kinds"
            )
    windows_of(model)


def _heads(layer: Layer, *, narrow: bool) -> tuple[object, ...] | None:
    """Return the heads of a layer with a window, or of one without; None for the other."""
    one = layer.attention
    if one is None or (one.window is not None) is not narrow:
        return None
    sizes = (one.heads, one.kv_heads, one.width, one.value_width, one.rotary_share)
    return (*sizes, one.latent, one.head_norms, one.dropout, one.gated)


def _indexer(attention: Attention) -> Indexer | Literal[0]:
    one = attention.indexer
    return 0 if one is None else replace(one, reused=False)


def _norms(layer: Layer) -> tuple[object, ...]:
    return (layer.norm, layer.norms - layer.parts)


_ALIKE: Mapping[str, Callable[[Layer], object | None]] = {
    "widths": lambda layer: layer.hidden,
    "sequence lengths": lambda layer: layer.seq_length,
    "heads": lambda layer: _heads(layer, narrow=False),
    "heads with a window": lambda layer: _heads(layer, narrow=True),
    "indexers": lambda layer: None if layer.attention is None else _indexer(layer.attention),
    "mixers": lambda layer: layer.recurrent,
    "norms": _norms,
    "biases": lambda layer: layer.biases,
    "QKV biases": lambda layer: None if layer.attention is None else layer.attention.qkv_biases,
    "gates": lambda layer: None if layer.mlp is None else layer.mlp.gated,
}
"""Values that must be equal in all layers of a uniform plan, in the order of the checks; None for
layers without the part."""


def _single(layer: Layer) -> tuple[Layer, ...]:
    """Return a layer's parts as layers of one part each."""
    if layer.mlp is None or not layer.mixers:
        return (layer,)
    return replace(layer, mlp=None, norms=1), replace(layer, mixers=(), norms=1)


def _as_told(layer: Layer) -> Layer:
    """Return a layer without attention sinks, shared-expert gate and router biases.

    They affect neither memory nor time. Chunks of a scan become those of Megatron-LM, which has no
    argument for them.
    """
    attention, experts = layer.attention, layer.experts
    if isinstance(mixer := layer.recurrent, Mamba):
        layer = replace(layer, mixers=(replace(mixer, chunk=128),))
    if attention is not None:
        layer = with_attention(layer, replace(attention, sinks=False))
    if experts is not None:
        layer = replace(layer, mlp=replace(experts, shared_gate=False, router_biases=False))
    return layer


def _layer_of_spec(spec: ModelSpec, layer: LayerSpec, window: int | None) -> Layer:
    if not sizes_known(layer):
        raise InputError(
            f"model {spec.name!r}: heads and MLP width are unknown",
            remedy="Add --model with a model spec",
        )
    mixers = [_mixer_of_spec(layer, one) for one in layer.mixers]
    norms = layer_norms(layer)
    kinds: dict[int, Norm] = {0: "plain", norms: "rms"}
    if has_attention(layer):
        mixers.insert(0, _attention_of_spec(spec, layer, window))
    own_length = layer.seq_length != spec.layers[-1].seq_length
    return Layer(
        hidden=layer.hidden_size,
        mixers=tuple(mixers),
        mlp=None if layer.ffn_hidden_size is None else _mlp_of_spec(layer, layer.ffn_hidden_size),
        cross=layer.cross_attention,
        norm=kinds.get(layer.norm_parameters_per_hidden, "layer"),
        norms=norms,
        cross_tokens=layer.cross_tokens,
        fp32_norms=layer.fp32_norms,
        token_inputs=layer.token_inputs,
        elementwise=layer.elementwise,
        extra=layer.extra_parameters,
        biases=layer.biases,
        seq_length=layer.seq_length if own_length else None,
    )


def _mixer_of_spec(layer: LayerSpec, mixer: MixerSpec) -> Mixer:
    if isinstance(mixer, ConvolutionSpec):
        return ShortConvolution(width=layer.hidden_size, kernel=mixer.kernel, biases=mixer.biases)
    return mixer


def _attention_of_spec(spec: ModelSpec, layer: LayerSpec, window: int | None) -> Attention:
    latent = layer.latent
    assert layer.num_heads is not None, "asked of layers with known sizes alone"
    # Encoder-decoders (T5) add biases to the scores instead of turning queries and keys.
    none = spec.learned_positions or spec.no_positions
    rotary = not none and not any(one.cross_attention for one in spec.layers)
    width = head_dim(layer)
    return Attention(
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads or layer.num_heads,
        width=width,
        value_width=width if latent is None else latent.value_width,
        window=window,
        causal=layer.causal,
        rotary_share=0.0 if not rotary else 1.0 if latent is not None else spec.rotary_share,
        head_norms=("all" if layer.wide_qk_norms else "head") if layer.qk_norms else "none",
        yarn=spec.yarn_positions and latent is None,
        sinks=layer.attention_sinks,
        qkv_biases=layer.biases or layer.qkv_biases,
        gated=layer.output_gate,
        indexer=layer.indexer,
        keys_as_values=layer.keys_as_values,
        value_norms=layer.value_norms,
        keys_reused=layer.keys_reused,
        latent=None
        if latent is None
        else LatentAttention(
            query_rank=latent.query_rank,
            kv_rank=latent.key_value_rank,
            key_width=latent.key_width,
            rotary_width=latent.rotary_width,
        ),
    )


def _mlp_of_spec(layer: LayerSpec, width: int) -> Mlp | Experts:
    if layer.num_experts is None:
        return Mlp(width=width, gated=layer.gated_mlp)
    return Experts(
        number=layer.num_experts,
        per_token=layer.experts_per_token or layer.num_experts,
        width=width,
        gated=layer.gated_mlp,
        shared_width=layer.shared_expert_width,
        shared_gate=layer.shared_expert_gate,
        router_biases=layer.router_biases,
        latent=layer.expert_latent,
        clamped=layer.clamped_activation,
        groups=layer.expert_groups,
        groups_per_token=layer.groups_per_token,
    )


def run_of_plan(
    plan: Plan,
    spec: ModelSpec,
    *,
    engine: str,
    gpu: str,
    sequence_parallel: bool = True,
    precision: PrecisionKind = "bf16",
    fp32_gradients: bool = True,
    async_grad_reduce: bool = True,
    overlap: Overlap = Overlap(gradients=True),
    keeper: Keeper | None = None,
) -> Run:
    """Return the run of a legal plan.

    Parameters
    ----------
    engine, gpu : names of the engine and of the GPU model
    sequence_parallel, precision, fp32_gradients, async_grad_reduce : search options that the
        prediction of the plan assumes
    overlap : overlapped communication that it assumes
    keeper : software that stores the model states; None for `engine`

    Raises
    ------
    InputError : the model's sizes are unknown.
    """
    default = cast(Zero, ZERO_DEFAULTS.index(plan.default_dp_type))
    scattered = sequence_parallel
    splits = [_split_of_layer(one, default, scattered) for one in plan.layers]
    vocab = _split_of_layer(plan.vocab.as_layer(), default, scattered)
    kernel: AttentionKernel = "flash"
    return Run(
        name=spec.name,
        model=model_of_spec(spec),
        strategy=Strategy(
            gpus=plan.world_size,
            layers=split_groups(splits),
            ends=vocab,
            stages=chunks_of_sizes(
                plan.chunks, plan.num_stages, mtp=spec.mtp_layers, schedule=plan.pipeline_type
            ),
            schedule=plan.pipeline_type,
            micro_batch=plan.micro_batch,
            global_batch=plan.global_batch,
        ),
        runtime=Runtime(
            engine=engine,
            precision=Precision(
                kind=precision, gradients_bf16=not fp32_gradients, gradients_fp32=fp32_gradients
            ),
            states=States(
                keeper=keeper or cast(Keeper, engine), each_micro_batch=not async_grad_reduce
            ),
            kernels=Kernels(attention=kernel),
            experts=ExpertKernels(dispatcher="alltoall"),
            overlap=overlap,
        ),
        seq_length=spec.layers[-1].seq_length,
        gpu=gpu,
    )


def _split_of_layer(layer: LayerStrategy, default: Zero, sequence_parallel: bool) -> Split:
    return Split(
        tp=layer.tp,
        tp_kind="ulysses" if layer.ulysses else "megatron",
        strided=layer.strided,
        sequence_parallel=sequence_parallel and not layer.ulysses and layer.tp > 1,
        cp=layer.cp,
        cp_kind="ring",
        ep=layer.ep,
        etp=layer.expert_tp,
        zero=3 if layer.zero3 else default,
        recompute="full" if layer.checkpoint else frozenset(layer.recompute),
    )


class UniformPlan(Plan):
    """Plan of a uniform run: degrees, stages and batch as in `Plan`, and the run with all settings.

    `layers` and `vocab` do not hold the settings that `beyond` lists, such as activation offload.
    """

    engine: str
    """Name of the engine that the plan is for."""
    run: Run

    @property
    def beyond(self) -> tuple[str, ...]:
        """Settings of the run that per-layer plans do not have, in words."""
        return beyond_plans(self.run)


def uniform_plan(run: Run) -> UniformPlan:
    """Return a uniform run as a plan."""
    plan = _plan_of(run)
    same = {name: getattr(plan, name) for name in Plan.__struct_fields__}
    return UniformPlan(**same, engine=run.runtime.engine, run=run)


def plan_of_run(run: Run) -> Plan:
    """Return the strategy of a run as a plan.

    Raises InputError for settings that a plan cannot express, such as fp8 GEMMs or HSDP replicas.
    """
    strategy = run.strategy
    stages = {split.zero for split in (*strategy.each_layer, strategy.ends) if split.zero < 3}
    if len(stages) > 1:
        raise InputError("all layers without ZeRO-3 need the same ZeRO stage")
    if not strategy.micro_batches:
        raise InputError(
            "the batch is not a whole number of micro-batches",
            remedy="Change the degrees or the batch",
        )
    unsaid = beyond_plans(run)
    if unsaid:
        raise InputError(
            f"only search, check, explain and export support {', '.join(unsaid)}",
            remedy="Search for a plan without it",
        )
    return _plan_of(run)


def beyond_plans(run: Run) -> tuple[str, ...]:
    """Return the settings of a run that `Plan` cannot express, in words; empty for none."""
    splits = dict.fromkeys((*run.strategy.each_layer, run.strategy.ends))
    kinds = sorted({one.cp_kind for one in splits if one.cp > 1 and one.cp_kind != "ring"})
    features = {
        "fp8 or fp4 GEMMs": bool(run.runtime.precision.low_precision),
        "adapters": run.runtime.adapters is not None,
        "recompute op": any(one.recompute == "op" for one in splits),
        "HSDP replicas": any(one.replicas > 1 for one in splits),
        "rings": any(one.rings > 1 for one in splits),
        "activation offload": any(one.offload for one in splits),
        **{f"--cp-kind {kind}": True for kind in kinds},
    }
    return tuple(name for name, is_used in features.items() if is_used)


def _plan_of(run: Run) -> Plan:
    strategy = run.strategy
    splits, ends, pp = strategy.each_layer, strategy.ends, strategy.pp
    experts = run.model.experts is not None
    stages = {split.zero for split in (*splits, ends) if split.zero < 3}
    sizes = tuple(sum(len(chunk.layers) for chunk in stage) for stage in strategy.stages)
    order = [
        strategy.stages[rank_of(strategy.schedule, part, pp)][part // pp]
        for part in range(pp * strategy.vpp)
    ]
    found = Plan(
        world_size=strategy.gpus,
        num_stages=strategy.pp,
        stage_sizes=sizes,
        layers=tuple(_layer_of_split(split, experts=experts) for split in splits),
        vocab=VocabStrategy(
            tp=ends.tp, ulysses=ends.tp_kind == "ulysses", zero3=ends.zero == 3, cp=ends.cp
        ),
        global_batch=strategy.global_batch,
        num_microbatches=strategy.micro_batches,
        pipeline_type=strategy.schedule,
        default_dp_type=ZERO_DEFAULTS[min(stages, default=0)],
        num_chunks=strategy.vpp,
    )
    parts = tuple(len(chunk.layers) for chunk in order)
    return found if found.chunks == parts else replace(found, chunk_sizes=parts)


def _layer_of_split(split: Split, *, experts: bool) -> LayerStrategy:
    usual = split.tp if split.ep == 1 and split.tp_kind == "megatron" else 1
    return LayerStrategy(
        tp=split.tp,
        ulysses=split.tp_kind == "ulysses",
        cp=split.cp,
        zero3=split.zero == 3,
        checkpoint=split.recompute == "full",
        strided=split.strided,
        ep=split.ep,
        etp=split.etp if experts and split.etp != usual else None,
        recompute=tuple(sorted(split.modules)),
    )
