"""Model files and plans as runs: a plan is the strategy of a run with one split per layer."""

from __future__ import annotations

from typing import cast

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.architecture import (
    Attention,
    Experts,
    HeadNorms,
    LatentAttention,
    Layer,
    Mlp,
    Model,
    grouped,
    refuse_unlike,
)
from autopar.run.model import LayerSpec, ModelSpec, head_dim, layer_norms
from autopar.run.plan import ZERO_DEFAULTS, LayerStrategy, Plan
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
from autopar.run.strategy import ContextKind, Split, Strategy, chunks_of_sizes, split_groups


def model_of_spec(spec: ModelSpec) -> Model:
    """Return the architecture described by a spec.

    Raises InputError if heads, MLP width or vocabulary are unknown, or if the norms are neither
    RMSNorms nor LayerNorms.
    """
    if spec.vocab_size is None:
        raise InputError(f"model {spec.name!r}: its vocabulary is unknown; give a model spec")
    for layer in spec.layers:
        norms = layer_norms(layer)
        if layer.norm_parameters_per_hidden not in (norms, 2 * norms):
            raise InputError(
                f"model {spec.name!r}: {layer.norm_parameters_per_hidden} norm parameters per "
                f"hidden size in {norms} norms are neither RMSNorms nor LayerNorms"
            )
    groups, repeat = grouped(layers_of_spec(spec))
    return Model(
        name=spec.name,
        layers=groups,
        repeat=repeat,
        vocab=spec.vocab_size,
        vocab_divisor=spec.make_vocab_size_divisible_by,
        tied=spec.tied_embeddings,
        positions="learned" if spec.learned_positions else "rotary",
        max_positions=spec.position_rows,
        rotary_base=spec.rotary_base,
        rotary_scaling=spec.rotary_scaling_factor,
        extra_embedding=spec.extra_embedding_parameters,
        extra_head=spec.extra_head_parameters,
        mtp=spec.mtp_layers,
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
    """Return a model with only the settings that engines with one set of sizes can read.

    Raises InputError like `model_of_spec`, or if layers differ in more than experts and window.
    """
    model = model_of_spec(spec)
    refuse_unlike(model)
    groups = tuple(replace(one, layer=_as_told(one.layer)) for one in model.layers)
    return replace(model, name="", layers=groups, rotary_base=None, rotary_scaling=None)


def _as_told(layer: Layer) -> Layer:
    """Return a layer without sinks, gates and router biases: no effect on memory or time."""
    attention, experts = layer.attention, layer.experts
    if attention is not None:
        head_norms: HeadNorms = "none" if attention.head_norms == "none" else "head"
        own = replace(attention, sinks=False, head_norms=head_norms)
        layer = replace(layer, mixers=(own,))
    if experts is not None:
        layer = replace(layer, mlp=replace(experts, shared_gate=False, router_biases=False))
    return layer


def _layer_of_spec(spec: ModelSpec, layer: LayerSpec, window: int | None) -> Layer:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError(
            f"model {spec.name!r}: heads and MLP width are unknown; give a model spec (--model)"
        )
    norms, latent = layer_norms(layer), layer.latent
    # Encoder-decoders (T5) add biases to the scores instead of turning queries and keys.
    rotary = not spec.learned_positions and not any(one.cross_attention for one in spec.layers)
    width = head_dim(layer)
    attention = Attention(
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads or layer.num_heads,
        width=width,
        value_width=width if latent is None else latent.value_width,
        window=window,
        causal=layer.causal,
        rotary_share=1.0 if rotary else 0.0,
        head_norms=("all" if layer.wide_qk_norms else "head") if layer.qk_norms else "none",
        sinks=layer.attention_sinks,
        qkv_biases=layer.biases or layer.qkv_biases,
        latent=None
        if latent is None
        else LatentAttention(
            query_rank=latent.query_rank,
            kv_rank=latent.key_value_rank,
            key_width=latent.key_width,
            rotary_width=latent.rotary_width,
        ),
    )
    mlp: Mlp | Experts = Mlp(width=layer.ffn_hidden_size, gated=layer.gated_mlp)
    if layer.num_experts is not None:
        mlp = Experts(
            number=layer.num_experts,
            per_token=layer.experts_per_token or layer.num_experts,
            width=layer.ffn_hidden_size,
            gated=layer.gated_mlp,
            shared_width=layer.shared_expert_width,
            shared_gate=layer.shared_expert_gate,
            router_biases=layer.router_biases,
        )
    own_length = layer.seq_length != spec.layers[-1].seq_length
    return Layer(
        hidden=layer.hidden_size,
        mixers=(attention,),
        mlp=mlp,
        cross=layer.cross_attention,
        norm="rms" if layer.norm_parameters_per_hidden == norms else "layer",
        norms=norms,
        biases=layer.biases,
        seq_length=layer.seq_length if own_length else None,
    )


def run_of_plan(
    plan: Plan,
    spec: ModelSpec,
    *,
    engine: str,
    gpu: str,
    sequence_parallel: bool = True,
    cp_kind: ContextKind = "ring",
    precision: PrecisionKind = "bf16",
    fp32_gradients: bool = True,
    async_grad_reduce: bool = True,
    overlap: Overlap = Overlap(gradients=True),
) -> Run:
    """Return the run of a legal plan.

    Parameters
    ----------
    engine, gpu : names
    sequence_parallel, precision, fp32_gradients, async_grad_reduce : options of a search with
        which the plan is priced
    cp_kind, overlap : further settings with which it is priced

    Raises
    ------
    InputError : the model's sizes are unknown.
    """
    default = cast(Zero, ZERO_DEFAULTS.index(plan.default_dp_type))
    scattered = sequence_parallel
    splits = [_split_of_layer(one, default, scattered, cp_kind) for one in plan.layers]
    vocab = _split_of_layer(plan.vocab.as_layer(), default, scattered, cp_kind)
    keeper = cast(Keeper, engine)
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
            states=States(keeper=keeper, each_micro_batch=not async_grad_reduce),
            kernels=Kernels(attention=kernel),
            experts=ExpertKernels(dispatcher="alltoall"),
            overlap=overlap,
        ),
        seq_length=spec.layers[-1].seq_length,
        gpu=gpu,
    )


def _split_of_layer(
    layer: LayerStrategy, default: Zero, sequence_parallel: bool, cp_kind: ContextKind
) -> Split:
    return Split(
        tp=layer.tp,
        tp_kind="ulysses" if layer.ulysses else "megatron",
        strided=layer.strided,
        sequence_parallel=sequence_parallel and not layer.ulysses and layer.tp > 1,
        cp=layer.cp,
        cp_kind=cp_kind,
        ep=layer.ep,
        etp=layer.expert_tp,
        zero=3 if layer.zero3 else default,
        recompute="full" if layer.checkpoint else frozenset(layer.recompute),
    )
