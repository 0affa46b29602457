"""Writer of a run as arguments of Megatron-LM's pretrain_gpt.py or pretrain_hybrid.py.

`search.engines.megatron.read` reads all of these arguments. The layer partition is in
`search.engines.megatron.stages`, files and command in `search.engines.megatron.files`. Source of
names and rules: `megatron/training/arguments.py` and `TransformerConfig` of NVIDIA/Megatron-LM,
main of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import UnsupportedError
from autopar.rates.devices import default_attention
from autopar.run.architecture import (
    Attention,
    DeltaNet,
    Experts,
    Indexer,
    Mamba,
    Model,
    windows_of,
)
from autopar.run.run import Run
from autopar.run.runtime import BLACKWELL, Optimizer
from autopar.run.strategy import wide_ends
from autopar.units import divisors
from search.engines.changes import recompute_arguments
from search.engines.engine import Span
from search.engines.exporter_types import Draft, ExportTarget, refuse_others, spec_of, step_count
from search.engines.huggingface.architectures import INDEXER_LOSS, architecture
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
from search.engines.megatron.names import spans_of
from search.engines.megatron.stages import context_words, layer_pattern, stage_arguments
from search.engines.words import ROTARY_BASE, required

_TITLE = "Megatron-LM"


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the arguments of a run as a script and as YAML, with the launch command.

    Raises InputError for a run of another engine, and for a layer partition that no argument can
    express. Raises UnsupportedError for a hybrid model in a release without `pretrain_hybrid.py`.
    """
    refuse_others(run, _TITLE, ())
    version = ENGINE_VERSION
    if place.release is not None and place.release.given:
        version = f"core {place.release.name}"
        if run.model.is_hybrid and not _HYBRID.has(place.release.name):
            raise UnsupportedError(
                f"core {place.release.name} has no pretrain_hybrid.py, which is {_HYBRID.text}",
                remedy=f"Use --release {_HYBRID.first} or newer",
            )
    sections, environment = sections_of(run, place), environment_of(run)
    name = place.model or run.name or "a model of these sizes"
    return Draft(
        version=version,
        files={
            SCRIPT: script_text(name, place, program_of(run), sections, environment, version),
            YAML: yaml_text(sections, environment, version),
        },
        launch=command(place, program_of(run)),
        notes=(*notes_of(run, place), *FILL_IN),
    )


_HYBRID = Span("0.18")
"""Releases with `pretrain_hybrid.py`. Earlier ones have `pretrain_mamba.py`, which needs a
`--spec` of layers."""


def program_of(run: Run) -> str:
    """Return the training program of a run; `pretrain_gpt.py` has GPT models alone."""
    return "pretrain_hybrid.py" if run.model.is_hybrid else "pretrain_gpt.py"


def sections_of(run: Run, place: ExportTarget) -> Sections:
    """Return all arguments of a run by section, such as MODEL or DATA."""
    return {
        "MODEL": [*_model(run, place)],
        "PARALLEL": [*_parallel(run, place)],
        "BATCH": [
            (Flag.MICRO_BATCH, (str(run.strategy.micro_batch),)),
            (Flag.GLOBAL_BATCH, (str(run.strategy.global_batch),)),
        ],
        "RECOMPUTE": [*recompute_arguments(run.strategy), *_offload(run)],
        "PRECISION": [*_precision(run)],
        "OPTIMIZER": [*_optimizer(run)],
        "TRAINING": [
            ("train-iters", (step_count(run),)),
            *OPTIMIZER,
            *(() if run.runtime.masks else (NO_MASKS,)),
        ],
        "DATA": DATA,
    }


def _one(flag: str, value: object) -> Argument:
    return (flag, (str(value),))


def _where(*flags: tuple[str, bool]) -> Iterator[Argument]:
    """Yield an argument without words for each (flag, condition) whose condition is true."""
    for flag, on in flags:
        if on:
            yield (flag, ())


# --------------------------------------------------------------------------------------------------
# The model.


def _model(run: Run, place: ExportTarget) -> Iterator[Argument]:
    model, layer, kernels = run.model, run.model.last, run.kernels
    gated, attention = any(one.gates == 2 for one in model.kinds), model.attention
    if not model.is_hybrid:
        # the pattern of a hybrid has its layers, those of MTP included
        yield _one("num-layers", model.num_layers)
    if model.first_mamba is not None:
        yield from _mamba(model.first_mamba)
    if model.first_delta is not None:
        yield from _delta(model, model.first_delta)
    yield _one("hidden-size", model.hidden)
    if model.dense_width:
        yield _one("ffn-hidden-size", model.dense_width)
    yield from _attention(model, attention)
    yield _one("seq-length", run.seq_length)
    # Megatron-LM rejects a sequence length above this value.
    yield _one("max-position-embeddings", max(model.max_positions, run.seq_length))
    yield from _positions(run, place)
    yield _one("normalization", "RMSNorm" if layer.norm == "rms" else "LayerNorm")
    yield from _where(
        ("swiglu", gated),
        ("no-bias-swiglu-fusion", gated and not kernels.fused_gate),
        ("disable-bias-linear", not layer.biases),
        ("add-qkv-bias", attention.qkv_biases and not layer.biases),
        ("untie-embeddings-and-output-weights", not model.tied),
    )
    if model.experts is not None:
        yield from _experts(run, place, model.experts)
        yield from _router(place, model)
    if model.mtp:
        if not model.is_hybrid:
            yield _one("mtp-num-layers", model.mtp)
        yield from _where(("mtp-use-repeated-layer", model.mtp_shared))
    yield _one("vocab-size", model.vocab)
    yield _one("make-vocab-size-divisible-by", model.vocab_divisor)
    yield _one("hidden-dropout", model.dropout)


def _mamba(mamba: Mamba) -> Iterator[Argument]:
    yield _one("mamba-num-heads", mamba.heads)
    yield _one("mamba-head-dim", mamba.width)
    yield _one("mamba-state-dim", mamba.state)
    yield _one("mamba-num-groups", mamba.groups)


def _delta(model: Model, delta: DeltaNet) -> Iterator[Argument]:
    if not model.is_hybrid:
        linear = tuple(isinstance(one.recurrent, DeltaNet) for one in model.each_layer)
        # the name gdn is new; all releases have the older one
        yield _one("experimental-attention-variant", "gated_delta_net")
        yield _one("linear-attention-freq", layer_pattern(linear, last=True))
    yield _one("linear-num-key-heads", delta.key_heads)
    yield _one("linear-num-value-heads", delta.value_heads)
    yield _one("linear-key-head-dim", delta.key_width)
    yield _one("linear-value-head-dim", delta.value_width)
    yield _one("linear-conv-kernel-dim", delta.kernel)


def _indexer(model: Model, indexer: Indexer) -> Iterator[Argument]:
    if not model.is_hybrid:
        yield _one("experimental-attention-variant", "dsa")
    yield _one("dsa-kernel-backend", "cudnn")
    yield _one("dsa-indexer-n-heads", indexer.heads)
    yield _one("dsa-indexer-head-dim", indexer.width)
    yield _one("dsa-indexer-topk", indexer.topk)
    if indexer.every > 1:
        first = (*model.reused, True).index(True)
        yield _one("dsa-indexer-topk-freq", indexer.every)
        yield _one("dsa-indexer-skip-topk-offset", first)
    if indexer.trained:
        yield _one("dsa-indexer-loss-coeff", INDEXER_LOSS)
        yield ("dsa-indexer-use-sparse-loss", ())


def _attention(model: Model, attention: Attention) -> Iterator[Argument]:
    yield _one("num-attention-heads", attention.heads)
    # The default, hidden size / heads, is wrong for some models, such as Qwen3.
    yield _one("kv-channels", attention.width)
    latent = attention.latent
    if latent is not None:
        yield ("multi-latent-attention", ())
        if latent.query_rank is not None:
            yield _one("q-lora-rank", latent.query_rank)
        yield _one("kv-lora-rank", latent.kv_rank)
        yield _one("qk-head-dim", latent.key_width)
        yield _one("qk-pos-emb-head-dim", latent.rotary_width)
        yield _one("v-head-dim", attention.value_width)
        if attention.indexer is not None:
            yield from _indexer(model, attention.indexer)
    elif attention.kv_heads != attention.heads:
        yield ("group-query-attention", ())
        yield _one("num-query-groups", attention.kv_heads)
    yield from _where(
        ("qk-layernorm", attention.head_norms != "none"),
        ("attention-output-gate", attention.gated),
    )
    window, whole_every = windows_of(model)
    if window is not None:
        # Number of tokens before the token of the query, and after it.
        yield _one("window-size", f"{window - 1},0")
        if whole_every:
            yield _one("window-attn-skip-freq", whole_every)
    yield _one("attention-dropout", attention.dropout)


def _positions(run: Run, place: ExportTarget) -> Iterator[Argument]:
    model, share = run.model, run.model.attention.rotary_share
    if model.positions != "rotary":
        kind = "learned_absolute" if model.positions == "learned" else "none"
        yield _one("position-embedding-type", kind)
        return
    yield _one("position-embedding-type", "yarn" if model.attention.yarn else "rope")
    spec = spec_of(place, model)
    base = None if spec is None else spec.rotary_base
    # `--rotary-base` is an int in argparse, which rejects other numbers.
    if base is None or not base.is_integer():
        yield ("rotary-base", (required("ROTARY_BASE", ROTARY_BASE),))
    else:
        yield _one("rotary-base", int(base))
    if spec is not None and spec.rotary_scaling_factor is not None:
        yield ("use-rope-scaling", ())
        yield _one("rope-scaling-factor", spec.rotary_scaling_factor)
    if share != 1.0:
        yield _one("rotary-percent", share)
    yield from _where(("no-rope-fusion", not run.kernels.fused_rotary))


def _flex(place: ExportTarget, backend: str) -> Iterator[Argument]:
    flag = "moe-flex-dispatcher-backend"
    # releases without backends have a flag for DeepEP
    if backend == "deepep" and not _is_in(place, flag):
        yield ("moe-enable-deepep", ())
    else:
        yield _one(flag, backend)


def _is_in(place: ExportTarget, flag: str) -> bool:
    """Return True if the release of an export has an argument."""
    spans = spans_of(flag).values()
    return place.release is None or all(span.has(place.release.name) for span in spans)


def _experts(run: Run, place: ExportTarget, experts: Experts) -> Iterator[Argument]:
    kernels = run.runtime.experts
    yield _one("num-experts", experts.number)
    yield _one("moe-router-topk", experts.per_token)
    yield _one("moe-ffn-hidden-size", experts.width)
    if experts.latent is not None:
        yield _one("moe-latent-size", experts.latent)
    if experts.shared_width:
        yield _one("moe-shared-expert-intermediate-size", experts.shared_width)
    if not run.model.is_hybrid:
        pattern = layer_pattern(run.model.mixtures)
        if pattern != "1":
            yield _one("moe-layer-freq", pattern)
    yield _one("moe-token-dispatcher-type", kernels.dispatcher)
    if kernels.dispatcher == "flex":
        yield from _flex(place, flex_backend(run))
    if kernels.router_fp32:
        yield _one("moe-router-dtype", "fp32")
    # Squared ReLU is the only ungated activation with fused weighting.
    squared = kernels.fused_weighting and not experts.gated
    yield from _where(
        ("moe-grouped-gemm", kernels.grouped),
        ("moe-permute-fusion", kernels.fused_permutation),
        ("use-transformer-engine-op-fuser", kernels.fused_mlp),
        ("squared-relu", squared),
        ("use-fused-weighted-squared-relu", squared),
        ("moe-use-legacy-grouped-gemm", run.kernels.quirks.compiled_experts),
        ("moe-router-force-load-balancing", kernels.skew == 1.0),
    )
    if kernels.capacity is not None:
        yield _one("moe-expert-capacity-factor", kernels.capacity)
    yield from _where(("moe-pad-expert-input-to-capacity", kernels.padded))


_LINKED = 72
"""Number of GPUs in an NVLink domain of GB200, GB300 and VR200."""


def _dispatches(run: Run) -> bool:
    """Return True if tokens are sent to other ranks by a fused dispatcher (DeepEP, HybridEP)."""
    flex = run.runtime.experts.dispatcher == "flex"
    return run.model.experts is not None and flex and run.split.ep > 1


def flex_backend(run: Run) -> str:
    """Return the backend of the flex dispatcher: `hybridep` in racks of 72 GPUs, else `deepep`.

    Only `hybridep` has padded experts.
    """
    linked = run.gpu.upper().startswith(("GB200", "GB300", "VR200"))
    return "hybridep" if linked or run.runtime.experts.padded else "deepep"


ROUTER: Mapping[str, str] = {
    "moe_router_score_function": "moe-router-score-function",
    "moe_router_enable_expert_bias": "moe-router-enable-expert-bias",
    "moe_router_load_balancing_type": "moe-router-load-balancing-type",
    "moe_router_topk_scaling_factor": "moe-router-topk-scaling-factor",
    "moe_router_pre_softmax": "moe-router-pre-softmax",
}
"""Router setting of `architecture` -> argument. These settings change neither time nor memory."""


def gates_shared_expert(place: ExportTarget, model: Model) -> bool:
    """Return True if a trained vector gates the shared expert, which no run contains."""
    spec = spec_of(place, model)
    return spec is not None and any(layer.shared_expert_gate for layer in spec.layers)


def _router(place: ExportTarget, model: Model) -> Iterator[Argument]:
    experts = model.experts
    assert experts is not None, "asked of models with experts alone"
    known = architecture(place.model) if place.model is not None else None
    sizes = known or {}
    for key, flag in ROUTER.items():
        value = sizes.get(key)
        if value is True:
            yield (flag, ())
        elif value not in (None, False):
            yield _one(flag, value)
    yield from _where(("moe-shared-expert-gate", gates_shared_expert(place, model)))
    if experts.groups > 1:
        yield _one("moe-router-num-groups", experts.groups)
        yield _one("moe-router-group-topk", experts.groups_per_token)
    if experts.clamped:
        yield _one("activation-func-clamp-value", 7.0)
    softmax = sizes.get("moe_router_score_function", "softmax") == "softmax"
    if experts.per_token == 1 and softmax and not sizes.get("moe_router_pre_softmax"):
        # A softmax over a single selected score is always 1.
        yield ("moe-router-pre-softmax", ())


# --------------------------------------------------------------------------------------------------
# Parallel degrees and training.


def _parallel(run: Run, place: ExportTarget) -> Iterator[Argument]:
    split, overlap, deferred = run.split, run.runtime.overlap, run.kernels.deferred_head
    yield _one(Flag.TENSOR, split.tp)
    yield _one(Flag.STAGES, run.strategy.pp)
    yield _one(Flag.CONTEXT, split.cp)
    yield from _where(
        ("sequence-parallel", split.splits_sequence),
        ("tp-comm-overlap", overlap.tensor and split.tp > 1),
    )
    if split.cp > 1:
        yield (Flag.COMMUNICATION, place.exchanges or (context_words(split),))
        inner = split.cp // split.rings if split.rings > 1 else place.exchange_degree
        if inner > 1:
            yield (Flag.HIERARCHY, (str(inner), str(split.cp // inner)))
    if run.model.experts is not None:
        yield _one("expert-model-parallel-size", split.ep)
        yield _one("expert-tensor-parallel-size", split.etp)
        yield from _where(("overlap-moe-expert-parallel-comm", overlap.experts))
    yield from stage_arguments(run)
    if deferred is not None:
        yield ("defer-embedding-wgrad-compute", ())
        if deferred:
            yield _one("wgrad-deferral-limit", deferred)


_FP8_FORMATS = {"mxfp8": "e4m3", "blockwise": "e4m3"}
"""fp8 recipe -> format, as in `training/mixed_precision.py` of Megatron-Bridge; others: hybrid.
With small blocks, gradients do not need the range of e5m2."""


def _precision(run: Run) -> Iterator[Argument]:
    precision, kernels, ends = run.runtime.precision, run.kernels, wide_ends(run.strategy)
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
        yield from _where(
            ("fp8-param-gather", precision.fp8_weights), ("fp8-output-proj", precision.fp8_head)
        )
    if precision.fp4:
        # nvfp4 has one scale per 16 elements.
        yield _one("fp4-format", "e2m1")
        yield _one("fp4-recipe", "nvfp4")
        yield from _where(("fp4-param-gather", precision.fp4_weights))
    if precision.low_precision and any(ends):
        yield ("first-last-layers-bf16", ())
        yield _one("num-layers-at-start-in-bf16", ends[0])
        yield _one("num-layers-at-end-in-bf16", ends[1])
    if kernels.loss != "none":
        yield ("cross-entropy-loss-fusion", ())
        yield _one("cross-entropy-fusion-impl", kernels.loss)
    if kernels.own_layers:
        yield _one("transformer-impl", "local")
    kernel = asked_attention(run)
    if kernel is not None:
        yield _one("attention-backend", kernel)


def asked_attention(run: Run) -> str | None:
    """Return the value of `--attention-backend`; None: default of the device, or local layers."""
    kernel = run.kernels.attention
    usual = default_attention(run.gpu, precision=run.runtime.precision.kind)
    return None if run.kernels.own_layers or kernel == usual else kernel


def _optimizer(run: Run) -> Iterator[Argument]:
    optimizer, states, overlaps = run.runtime.optimizer, run.runtime.states, run.runtime.overlap
    zero, replicas = run.split.zero, run.split.replicas
    sharded, fully_sharded = zero > 0, zero > 1
    if optimizer.kind != "adam":
        yield _one("optimizer", optimizer.kind)
    yield from _where(("use-distributed-optimizer", sharded), ("use-megatron-fsdp", fully_sharded))
    if fully_sharded:
        yield _one(Flag.SHARDING, "optim_grads_params" if zero == 3 else "optim_grads")
        # Without it, each rank would first allocate all weights of the model.
        yield ("init-model-with-meta-device", ())
        yield _one("ckpt-format", "fsdp_dtensor")
    yield from _states(optimizer)
    if optimizer.offload:
        yield ("optimizer-cpu-offload", ())
        yield _one("optimizer-offload-fraction", optimizer.offload)
        yield from _where(("overlap-cpu-optimizer-d2h-h2d", overlaps.optimizer_host))
    if replicas > 1:
        yield _one("num-distributed-optimizer-instances", replicas)
    yield from _where(
        ("no-gradient-accumulation-fusion", not run.kernels.fused_accumulation),
        ("overlap-grad-reduce", overlaps.gradients),
        # Megatron-LM requires --overlap-grad-reduce for --overlap-param-gather.
        ("overlap-param-gather", overlaps.gradients and sharded),
        ("ddp-pad-buckets-for-high-nccl-busbw", states.padded_buckets),
    )
    if states.bucket is not None:
        yield _one("ddp-bucket-size", states.bucket)


_MOMENTS = {
    8: ("fp32", "fp32"), 6: ("bf16", "fp32"), 5: ("fp8", "fp32"), 4: ("bf16", "bf16"),
    3: ("fp8", "bf16"), 2: ("fp8", "fp8"),
}  # fmt: skip
"""Bytes of both Adam moments per parameter -> data types of first and second moment."""


def _states(optimizer: Optimizer) -> Iterator[Argument]:
    """Yield the arguments of the precision-aware optimizer, if the optimizer states need it."""
    small = optimizer.moments_bytes in _MOMENTS and optimizer.moments_bytes != 8
    if small or optimizer.master_bytes != 4 or optimizer.offload_master:
        # With 2 master bytes, fp32 weights are stored as a remainder to their bf16 copy
        # (`store_param_remainders`).
        first, second = _MOMENTS.get(optimizer.moments_bytes, _MOMENTS[8])
        yield ("use-precision-aware-optimizer", ())
        yield _one("exp-avg-dtype", first)
        yield _one("exp-avg-sq-dtype", second)


def _offload(run: Run) -> Iterator[Argument]:
    """Yield the arguments for activation offload."""
    offload = run.runtime.offload
    if not run.offloads_activations:
        return
    if offload.layers:
        yield _one("cpu-offloading-num-layers", offload.layers)
        return
    yield ("fine-grained-activation-offloading", ())
    yield ("offload-modules", tuple(sorted(run.split.offload)))
    if offload.fraction != 1.0:
        yield _one("activation-offload-fraction", offload.fraction)
    yield _one("min-offloaded-tensor-size", offload.least_elements)


# --------------------------------------------------------------------------------------------------
# Environment variables and notes.


def environment_of(run: Run) -> dict[str, str | None]:
    """Return the environment variables of the ranks; None: the variable must be unset."""
    split, allocator = run.split, run.runtime.allocator
    found = connections(
        # `validate_args` requires the value 1 on devices before Blackwell.
        split=split.tp * split.cp > 1 and not run.gpu.upper().startswith(BLACKWELL),
        fully_sharded=split.zero > 1,
        experts_overlap=run.runtime.overlap.experts,
    )
    if split.offload:
        # TransformerConfig requires it with Transformer Engine 2.10 and later. Otherwise,
        # weights are offloaded as well.
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    if _dispatches(run) and flex_backend(run) == "hybridep":
        ranks = split.ep * split.etp
        linked = max(divisor for divisor in divisors(ranks) if divisor <= _LINKED)
        found |= {
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(linked),
            "NVLINK_DOMAIN_SIZE": str(_LINKED),
            "USE_MNNVL": "1",
        }
    if allocator.cublas is not None:
        found["CUBLAS_WORKSPACE_CONFIG"] = allocator.cublas
    if allocator.expandable:
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return found


def notes_of(run: Run, place: ExportTarget) -> Iterator[str]:
    """Yield notes for the user on settings to complete or check before training."""
    model, experts = run.model, run.runtime.experts
    spec = spec_of(place, model)
    if model.positions == "rotary" and (spec is None or spec.rotary_base is None):
        yield "the base of rotary positions is unknown: set ROTARY_BASE"
    if model.experts is None:
        return
    if place.model is None or architecture(place.model) is None:
        yield (
            "router scores (--moe-router-score-function, bias, groups and "
            "auxiliary loss) keep Megatron-LM's defaults; set those of the "
            "model"
        )
    if experts.skew == 1.0:
        yield ("--moe-router-force-load-balancing is for measurements: remove it to train")
    if experts.capacity is not None:
        yield f"tokens beyond {experts.capacity} times the mean of an expert are dropped"
