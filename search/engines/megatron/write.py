"""A launch as arguments of Megatron-LM's pretrain_gpt.py.

Each argument is one that `search.engines.megatron.read` reads; which layers stand where is
`search.engines.megatron.stages`, files and command are `search.engines.megatron.files`. Names and
rules: `megatron/training/arguments.py` and `TransformerConfig` of NVIDIA/Megatron-LM, main of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.run.launch import BLACKWELL, Attention, Experts, Launch, Model, Optimizer
from autopar.training.offload import Offload
from autopar.units import divisors
from search.engines.huggingface.architectures import architecture
from search.engines.megatron.arguments import Argument, Flag
from search.engines.megatron.files import (
    DATA,
    ENGINE_VERSION,
    FILL_IN,
    NO_MASKS,
    OPTIMIZER,
    SCRIPT,
    YAML,
    Sections,
    command,
    connections,
    script_text,
    yaml_text,
)
from search.engines.megatron.release import Release, software_of
from search.engines.megatron.stages import context_words, layer_pattern, stage_arguments
from search.engines.place import Draft, Place, refuse_others, spec_of, step_count
from search.engines.words import ROTARY_BASE, required

_TITLE = "Megatron-LM"


def write(launch: Launch, place: Place) -> Draft:
    """Return the arguments of a launch in a script and in YAML, and the command.

    Raises InputError for a launch of another trainer, and for stages that no argument says.
    """
    refuse_others(launch, _TITLE, ())
    sections, environment = sections_of(launch, place), environment_of(launch)
    name = place.model or launch.name or "a model of these sizes"
    return Draft(
        version=ENGINE_VERSION,
        files={
            SCRIPT: script_text(name, place, sections, environment),
            YAML: yaml_text(sections, environment),
        },
        launch=command(place),
        notes=(*notes_of(launch, place), *FILL_IN),
    )


def sections_of(launch: Launch, place: Place) -> Sections:
    """Return all arguments of a launch, by what they are about."""
    return {
        "MODEL": [*_model(launch, place)],
        "PARALLEL": [*_parallel(launch, place)],
        "BATCH": [
            (Flag.MICRO_BATCH, (str(launch.micro_batch),)),
            (Flag.GLOBAL_BATCH, (str(launch.global_batch),)),
        ],
        "RECOMPUTE": [*_recompute(launch), *_offload(launch.offload)],
        "PRECISION": [*_precision(launch)],
        "OPTIMIZER": [*_optimizer(launch)],
        "TRAINING": [
            ("train-iters", (step_count(launch),)),
            *OPTIMIZER,
            *(() if launch.attention_masks else (NO_MASKS,)),
        ],
        "DATA": DATA,
    }


def _one(flag: str, value: object) -> Argument:
    return (flag, (str(value),))


def _where(*flags: tuple[str, bool]) -> Iterator[Argument]:
    """Yield the flags without values that are on."""
    for flag, on in flags:
        if on:
            yield (flag, ())


# --------------------------------------------------------------------------------------------------
# The model.


def _model(launch: Launch, place: Place) -> Iterator[Argument]:
    model = launch.model
    yield _one("num-layers", model.num_layers)
    yield _one("hidden-size", model.hidden)
    yield _one("ffn-hidden-size", model.ffn)
    yield from _attention(model.attention)
    yield _one("seq-length", launch.seq)
    # it refuses a length above this one
    yield _one("max-position-embeddings", max(model.max_positions, launch.seq))
    yield from _positions(model, place)
    yield _one("normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm")
    yield from _where(
        ("swiglu", model.gated),
        ("no-bias-swiglu-fusion", model.gated and not model.fused_gate),
        ("disable-bias-linear", not model.biases),
        ("add-qkv-bias", model.qkv_biases and not model.biases),
        ("untie-embeddings-and-output-weights", not model.tied),
    )
    if model.experts is not None:
        yield from _experts(model, model.experts, launch)
        yield from _router(place, model.experts)
    if model.mtp:
        yield _one("mtp-num-layers", model.mtp)
        yield from _where(("mtp-use-repeated-layer", model.mtp_repeated))
    yield _one("vocab-size", model.vocab)
    yield _one("make-vocab-size-divisible-by", model.vocab_divisor)
    yield _one("hidden-dropout", model.hidden_dropout)


def _attention(attention: Attention) -> Iterator[Argument]:
    yield _one("num-attention-heads", attention.heads)
    # its default, hidden size over heads, is wrong for models with wider heads
    yield _one("kv-channels", attention.width)
    latent = attention.latent
    if latent is not None:
        yield ("multi-latent-attention", ())
        if latent.query_rank is not None:
            yield _one("q-lora-rank", latent.query_rank)
        yield _one("kv-lora-rank", latent.key_value_rank)
        yield _one("qk-head-dim", latent.key_width)
        yield _one("qk-pos-emb-head-dim", latent.rotary_width)
        yield _one("v-head-dim", latent.value_width)
    elif attention.groups != attention.heads:
        yield ("group-query-attention", ())
        yield _one("num-query-groups", attention.groups)
    yield from _where(("qk-layernorm", attention.head_norms))
    if attention.window is not None:
        # the tokens before a query, without itself, and none behind it
        yield _one("window-size", f"{attention.window - 1},0")
        if attention.whole_every:
            yield _one("window-attn-skip-freq", attention.whole_every)
    yield _one("attention-dropout", attention.dropout)


def _positions(model: Model, place: Place) -> Iterator[Argument]:
    if model.positions != "rotary":
        kind = "learned_absolute" if model.positions == "learned" else "none"
        yield _one("position-embedding-type", kind)
        return
    yield _one("position-embedding-type", "rope")
    spec = spec_of(place, model)
    base = None if spec is None else spec.rotary_base
    # an int of its argparse, which refuses the text of any other number
    if base is None or not base.is_integer():
        yield ("rotary-base", (required("ROTARY_BASE", ROTARY_BASE),))
    else:
        yield _one("rotary-base", int(base))
    if spec is not None and spec.rotary_scaling_factor is not None:
        yield ("use-rope-scaling", ())
        yield _one("rope-scaling-factor", spec.rotary_scaling_factor)
    if model.rotary_share != 1.0:
        yield _one("rotary-percent", model.rotary_share)
    yield from _where(("no-rope-fusion", not model.fused_rotary))


def _experts(model: Model, experts: Experts, launch: Launch) -> Iterator[Argument]:
    yield _one("num-experts", experts.number)
    yield _one("moe-router-topk", experts.per_token)
    yield _one("moe-ffn-hidden-size", experts.ffn)
    if experts.shared_ffn:
        yield _one("moe-shared-expert-intermediate-size", experts.shared_ffn)
    pattern = layer_pattern(model.expert_layers)
    if pattern != "1":
        yield _one("moe-layer-freq", pattern)
    yield _one("moe-token-dispatcher-type", experts.dispatcher)
    if experts.dispatcher == "flex":
        yield _one("moe-flex-dispatcher-backend", flex_backend(launch))
    if experts.router_fp32:
        yield _one("moe-router-dtype", "fp32")
    yield from _where(
        ("moe-grouped-gemm", experts.grouped),
        ("moe-permute-fusion", experts.fused_permutation),
        ("use-transformer-engine-op-fuser", experts.fused_mlp),
        # the only activation without a gate that weights in its kernel
        ("squared-relu", experts.fused_weighting and not model.gated),
        ("use-fused-weighted-squared-relu", experts.fused_weighting and not model.gated),
        ("moe-use-legacy-grouped-gemm", launch.software.compiled_experts),
    )
    yield from _where(("moe-router-force-load-balancing", experts.skew == 1.0))
    if experts.capacity is not None:
        yield _one("moe-expert-capacity-factor", experts.capacity)
    yield from _where(("moe-pad-expert-input-to-capacity", experts.padded_capacity))


_LINKED = 72
"""GPUs of GB200 and GB300 that NVLink joins."""


def _dispatches(launch: Launch) -> bool:
    """Return whether tokens go to experts of other ranks by kernels of their own."""
    experts = launch.model.experts
    return experts is not None and experts.dispatcher == "flex" and launch.degrees.ep > 1


def flex_backend(launch: Launch) -> str:
    """Return who dispatches tokens: over NVLink between nodes another one than over InfiniBand."""
    linked = launch.software.gpu.upper().startswith(("GB200", "GB300"))
    return "hybridep" if linked else "deepep"


_ROUTER: Mapping[str, str] = {
    "moe_router_score_function": "moe-router-score-function",
    "moe_router_enable_expert_bias": "moe-router-enable-expert-bias",
    "moe_router_num_groups": "moe-router-num-groups",
    "moe_router_group_topk": "moe-router-group-topk",
    "moe_router_topk_scaling_factor": "moe-router-topk-scaling-factor",
    "moe_router_pre_softmax": "moe-router-pre-softmax",
}
"""What a named architecture says of its router, which changes numbers alone."""


def _router(place: Place, experts: Experts) -> Iterator[Argument]:
    known = architecture(place.model) if place.model is not None else None
    sizes = known or {}
    for key, flag in _ROUTER.items():
        value = sizes.get(key)
        if value is True:
            yield (flag, ())
        elif value not in (None, False):
            yield _one(flag, value)
    softmax = sizes.get("moe_router_score_function", "softmax") == "softmax"
    if experts.per_token == 1 and softmax and not sizes.get("moe_router_pre_softmax"):
        # one score behind a softmax of one is always 1
        yield ("moe-router-pre-softmax", ())


# --------------------------------------------------------------------------------------------------
# How it is split and trained.


def _parallel(launch: Launch, place: Place) -> Iterator[Argument]:
    degrees, model = launch.degrees, launch.model
    yield _one(Flag.TENSOR, degrees.tp)
    yield _one(Flag.STAGES, degrees.pp)
    yield _one(Flag.CONTEXT, degrees.cp)
    yield from _where(
        ("sequence-parallel", degrees.scattered),
        ("tp-comm-overlap", launch.tensor_overlap and degrees.tp > 1),
    )
    if degrees.cp > 1:
        yield (Flag.COMMUNICATION, place.exchanges or (context_words(degrees),))
        inner = degrees.cp // degrees.rings if degrees.rings > 1 else place.exchange_degree
        if inner > 1:
            yield (Flag.HIERARCHY, (str(inner), str(degrees.cp // inner)))
    if model.experts is not None:
        yield _one("expert-model-parallel-size", degrees.ep)
        yield _one("expert-tensor-parallel-size", degrees.etp)
        yield from _where(("overlap-moe-expert-parallel-comm", degrees.overlap_experts))
    yield from stage_arguments(launch)
    if launch.deferred_head is not None:
        yield ("defer-embedding-wgrad-compute", ())
        if launch.deferred_head:
            yield _one("wgrad-deferral-limit", launch.deferred_head)


def _recompute(launch: Launch) -> Iterator[Argument]:
    recompute = launch.recompute
    if recompute.layers != "none":
        yield _one(Flag.GRANULARITY, "full")
        yield _one(Flag.METHOD, recompute.layers)
        yield _one(Flag.RECOMPUTED, recompute.number)
    elif recompute.modules:
        yield _one(Flag.GRANULARITY, "selective")
        yield ("recompute-modules", tuple(sorted(recompute.modules)))


_FP8_FORMATS = {"mxfp8": "e4m3", "blockwise": "e4m3"}
"""Of a recipe, as Megatron-Bridge's recipes have them (`training/mixed_precision.py`); blocks of
few elements do not need the range of gradients that e5m2 has."""


def _precision(launch: Launch) -> Iterator[Argument]:
    precision, software = launch.precision, launch.software
    if precision.kind != "fp32":
        yield (precision.kind, ())
    yield from _where(
        ("grad-reduce-in-bf16", precision.kind == "bf16" and precision.gradients_bf16),
        (
            "accumulate-allreduce-grads-in-fp32",
            precision.kind == "fp16" and precision.gradients_fp32,
        ),
    )
    if precision.fp8:
        yield _one("fp8-format", _FP8_FORMATS.get(precision.fp8_recipe, "hybrid"))
        yield _one("fp8-recipe", precision.fp8_recipe)
        yield from _where(("fp8-param-gather", precision.fp8_weights))
    if precision.fp4:
        # a scale of 16 elements
        yield _one("fp4-format", "e2m1")
        yield _one("fp4-recipe", "nvfp4")
        yield from _where(("fp4-param-gather", precision.fp4_weights))
    if precision.low and any(precision.wide_ends):
        first, last = precision.wide_ends
        yield ("first-last-layers-bf16", ())
        yield _one("num-layers-at-start-in-bf16", first)
        yield _one("num-layers-at-end-in-bf16", last)
    if launch.loss_fusion != "none":
        yield ("cross-entropy-loss-fusion", ())
        yield _one("cross-entropy-fusion-impl", launch.loss_fusion)
    if software.local_layers:
        yield _one("transformer-impl", "local")
    kernel = asked_attention(launch)
    if kernel is not None:
        yield _one("attention-backend", kernel)


def asked_attention(launch: Launch) -> str | None:
    """Return the kernel of attention where it is not what a launch gets without asking for it."""
    software = launch.software
    if software.local_layers or software.attention == _usual_attention(launch):
        return None
    return software.attention


def _usual_attention(launch: Launch) -> str:
    """Return the kernel of attention that is taken where nobody asks for one."""
    return software_of(
        Release(),
        gpu=launch.software.gpu,
        environment={},
        local=False,
        backend="auto",
        fused_accumulation=True,
    ).attention


def _optimizer(launch: Launch) -> Iterator[Argument]:
    optimizer = launch.optimizer
    # `optim_grads` is ZeRO-2
    fully_sharded = optimizer.sharding in ("zero2", "fsdp")
    sharded = optimizer.sharding != "none"
    if optimizer.kind != "adam":
        yield _one("optimizer", optimizer.kind)
    yield from _where(("use-distributed-optimizer", sharded), ("use-megatron-fsdp", fully_sharded))
    if fully_sharded:
        weights = optimizer.sharding == "fsdp"
        yield _one(Flag.SHARDING, "optim_grads_params" if weights else "optim_grads")
        # weights of a large model would not fit on the device before they are sharded
        yield ("init-model-with-meta-device", ())
        yield _one("ckpt-format", "fsdp_dtensor")
    yield from _states(optimizer)
    if optimizer.instances > 1:
        yield _one("num-distributed-optimizer-instances", optimizer.instances)
    yield from _where(
        ("no-gradient-accumulation-fusion", not launch.software.fused_accumulation),
        ("overlap-grad-reduce", optimizer.overlap_gradients),
        # early gathering needs an overlapped reduction, by its own rule
        ("overlap-param-gather", optimizer.overlap_gradients and sharded),
        ("ddp-pad-buckets-for-high-nccl-busbw", optimizer.padded_buckets),
    )
    if optimizer.bucket is not None:
        yield _one("ddp-bucket-size", optimizer.bucket)


_MOMENTS = {
    8: ("fp32", "fp32"), 6: ("bf16", "fp32"), 5: ("fp8", "fp32"), 4: ("bf16", "bf16"),
    3: ("fp8", "bf16"), 2: ("fp8", "fp8"),
}  # fmt: skip
"""Types of Adam's two moments by their bytes together."""


def _states(optimizer: Optimizer) -> Iterator[Argument]:
    """Yield in what the optimizer's states are kept, and where."""
    small = optimizer.moments_bytes in _MOMENTS and optimizer.moments_bytes != 8
    if small or optimizer.master_bytes != 4 or optimizer.offload_master:
        # fp32 weights are what their bf16 copies have not (`store_param_remainders`)
        first, second = _MOMENTS.get(optimizer.moments_bytes, _MOMENTS[8])
        yield ("use-precision-aware-optimizer", ())
        yield _one("exp-avg-dtype", first)
        yield _one("exp-avg-sq-dtype", second)
    if optimizer.offload:
        yield ("optimizer-cpu-offload", ())
        yield _one("optimizer-offload-fraction", optimizer.offload)
        yield from _where(("overlap-cpu-optimizer-d2h-h2d", optimizer.overlap_offload))


def _offload(offload: Offload) -> Iterator[Argument]:
    """Yield which activations wait on the host."""
    if not offload.any:
        return
    if offload.layers:
        yield ("cpu-offloading", ())
        yield _one("cpu-offloading-num-layers", offload.layers)
        return
    yield ("fine-grained-activation-offloading", ())
    yield ("offload-modules", tuple(sorted(offload.modules)))
    yield _one("activation-offload-fraction", offload.fraction)
    yield _one("min-offloaded-tensor-size", offload.least_elements)


# --------------------------------------------------------------------------------------------------
# What stands beside the arguments.


def environment_of(launch: Launch) -> dict[str, str | None]:
    """Return the variables that the ranks of a launch need, None for one that must not be set."""
    degrees, software = launch.degrees, launch.software
    # `validate_args` asks for one queue on devices before Blackwell
    split = degrees.tp * degrees.cp > 1 and not software.gpu.upper().startswith(BLACKWELL)
    found = connections(
        split=split,
        fully_sharded=launch.optimizer.sharding in ("zero2", "fsdp"),
        experts_overlap=degrees.overlap_experts,
    )
    if launch.offload.modules:
        # TransformerConfig asks for it from Transformer Engine 2.10 on: else weights go along
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    if _dispatches(launch) and flex_backend(launch) == "hybridep":
        ranks = degrees.ep * degrees.etp
        linked = max(divisor for divisor in divisors(ranks) if divisor <= _LINKED)
        found |= {
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(linked),
            "NVLINK_DOMAIN_SIZE": str(_LINKED),
            "USE_MNNVL": "1",
        }
    if software.cublas_config is not None:
        found["CUBLAS_WORKSPACE_CONFIG"] = software.cublas_config
    if software.expandable_segments:
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return found


def notes_of(launch: Launch, place: Place) -> Iterator[str]:
    """Yield what of a launch is to be known before its arguments are run."""
    model, experts = launch.model, launch.model.experts
    spec = spec_of(place, model)
    if model.positions == "rotary" and (spec is None or spec.rotary_base is None):
        yield "the base of rotary positions is not known: the launch asks for ROTARY_BASE"
    if experts is None:
        return
    if place.model is None or architecture(place.model) is None:
        yield (
            "how the router scores (--moe-router-score-function, its bias, groups and auxiliary "
            "loss) is the model's own, and stands at Megatron-LM's defaults"
        )
    if experts.skew == 1.0:
        yield (
            "experts are forced to be balanced, which is for measuring alone: to train, take "
            "--moe-router-force-load-balancing out"
        )
    if experts.capacity is not None:
        yield f"tokens beyond {experts.capacity} times the mean of an expert are dropped"
