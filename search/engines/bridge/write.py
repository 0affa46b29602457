"""Writer of a run as a Megatron-Bridge recipe with overrides, for `run_recipe.py`.

A model with a known name or known sizes uses its recipe. Other models use
`vanilla_gpt_pretrain_config`, whose defaults are those of Megatron-LM, and other hybrids the recipe
of Nemotron 3 Nano, whose provider makes a `HybridModel`. Keys are dotted fields of
`ConfigContainer` (`search.engines.bridge.keys`). Sizes equal to those of the recipe are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autopar.errors import UnsupportedError
from autopar.price.states import default_bucket
from autopar.run.architecture import Experts, windows_of
from autopar.run.run import Run
from autopar.run.strategy import wide_ends
from search.engines.bridge.keys import WHERE_TRUE
from search.engines.bridge.read import ADAPTED
from search.engines.bridge.recipes import (
    PACKS,
    PRECISIONS,
    Recipe,
    Settings,
    Task,
    alike,
    named_recipe,
    precision_settings,
    recipe_model,
    recompute_settings,
)
from search.engines.exporter_types import Draft, ExportTarget, refuse_others, spec_of, step_count
from search.engines.huggingface.architectures import architecture, mixer_sizes
from search.engines.megatron import write as megatron
from search.engines.megatron.files import quoted
from search.engines.megatron.stages import context_words, even_ends, layout_of, pattern_of
from search.engines.words import ROTARY_BASE, one_line, required, torchrun

_TITLE = "Megatron-Bridge"
VERSION = "0.6.0"
"""Release that files are written for, unless the user names another."""
_FILE = "bridge_overrides.sh"
_VANILLA = "vanilla_gpt_pretrain_config"
_HYBRID = "nemotron_3_nano_pretrain_config"


def write(run: Run, place: ExportTarget) -> Draft:
    """Return the overrides of a run as a script, with the launch command.

    Raises InputError for a run of another engine, and for a layer partition that no layout can
    express.
    """
    refuse_others(run, _TITLE, ())
    version = _version(place)
    recipe = recipe_of(run, place)
    settings = {**settings_of(run, recipe), **_unsaid(run, place, recipe)}
    given = {
        key: _off(key) if value is None else value
        for key, value in settings.items()
        if not _is_said(key, value, recipe)
    }
    path = required("BRIDGE_PATH", "set BRIDGE_PATH to a checkout of Megatron-Bridge")
    program = f'"{path}/scripts/training/run_recipe.py" "${{BRIDGE_ARGS[@]}}"'
    return Draft(
        version=version,
        files={_FILE: _script(run, place, recipe, given)},
        launch=f"source {_FILE}\n" + torchrun(place, program),
        notes=tuple(_notes(run, place, recipe)),
    )


def recipe_of(run: Run, place: ExportTarget) -> Recipe:
    """Return the recipe of a model by its name, else by its sizes, else the vanilla GPT recipe.

    Raises UnsupportedError if there is none for fine-tuning.
    """
    runtime, version = run.runtime, _version(place)
    task: Task = "peft" if runtime.adapters is not None else "sft" if runtime.sft else "pretrain"
    name = recipe_model(run.model, place.model, task)
    if name is None and runtime.fine_tunes:
        kind = {"peft": "LoRA", "sft": "SFT"}[task]
        raise UnsupportedError(f"{_TITLE} {version} has no {kind} recipe for {place.model}")
    if name is not None:
        return named_recipe(f"{name}_{task}_config", version)
    if not run.model.is_conventional and not run.model.is_hybrid:
        raise UnsupportedError(
            f"{_TITLE} {version} has no recipe for {place.model or run.name}, whose attention is "
            "gated or sparse, or with gated delta nets",
            remedy="Export the plan for Megatron-LM",
        )
    return named_recipe(_HYBRID if run.model.is_hybrid else _VANILLA, version)


def _version(place: ExportTarget) -> str:
    return VERSION if place.release is None else place.release.name


def _is_said(key: str, value: Any, recipe: Recipe) -> bool:
    """Return True if a recipe sets a key to this value, so that no override is needed."""
    own = recipe.settings.get(key)
    if key == "model.position_embedding_type" and value == "rope" and own in ("yarn", "mrope"):
        return True  # rotary positions as well, with the frequencies of the recipe
    if own is None and value is None:
        return True
    if key == "model.rotary_percent":
        return value in (None, 1.0 if own is None else own)
    # Degrees and precisions are always written: recipes change them between releases.
    return key in _SIZES and own == value and type(own) is type(value)


_OFF: Settings = {
    "model.cuda_graph_impl": "none",
    "model.cpu_offloading_num_layers": 0,
    "model.activation_offload_fraction": 1.0,
    "model.min_offloaded_tensor_size": 1 << 20,
    "model.cross_entropy_fusion_impl": "native",
    "model.make_vocab_size_divisible_by": 128,
    "mixed_precision.fp8_dot_product_attention": False,
    "ddp.num_distributed_optimizer_instances": 1,
}
"""Key whose type excludes null -> default of Megatron-Core and Megatron-Bridge."""


def _off(key: str) -> Any:
    """Return the value that undoes a setting of a recipe; None, written as null, if allowed."""
    return False if key in WHERE_TRUE else _OFF.get(key)


# --------------------------------------------------------------------------------------------------
# Settings of a run.


def settings_of(run: Run, recipe: Recipe) -> Settings:
    """Return all settings of a run by dotted key; None means that of Megatron-Core."""
    sections = any(key.startswith("comm_overlap.") for key in recipe.settings)
    return {
        **_model(run, recipe),
        **_degrees(run),
        **_training(run, recipe),
        **_precision(run),
        **_sharding(run),
        **(_overlaps(run) if sections else _overlaps_of_model(run)),
    }


def _unsaid(run: Run, place: ExportTarget, recipe: Recipe) -> Settings:
    """Return the settings that no run contains, for a recipe of another model.

    They are the base of rotary positions and the router, which change neither time nor memory.
    """
    if alike(recipe.model, run.model):
        return {}
    model, found = run.model, Settings()
    if model.positions == "rotary":
        spec = spec_of(place, model)
        base = None if spec is None else spec.rotary_base
        found["model.rotary_base"] = (
            required("ROTARY_BASE", ROTARY_BASE) if base is None else f"{base:.0f}"
        )
        if spec is not None and spec.rotary_scaling_factor is not None:
            found |= {
                "model.rope_scaling": True,
                "model.rope_scaling_factor": spec.rotary_scaling_factor,
            }
    if model.experts is not None:
        known = architecture(place.model or "") or {}
        found |= {f"model.{key}": known[key] for key in megatron.ROUTER if key in known}
        if megatron.gates_shared_expert(place, model):
            found["model.moe_shared_expert_gate"] = True
    return found


def _model(run: Run, recipe: Recipe) -> Settings:
    model, layer, kernels = run.model, run.model.last, run.kernels
    attention, latent = model.attention, model.attention.latent
    window, whole_every = windows_of(model)
    padded = model.vocab_divisor > 1
    found: Settings = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden,
        "model.ffn_hidden_size": model.dense_width,
        "model.num_attention_heads": attention.heads,
        "model.num_query_groups": attention.kv_heads,
        "model.kv_channels": attention.width,
        "model.normalization": "RMSNorm" if layer.norm == "rms" else "LayerNorm",
        "model.position_embedding_type": {
            "learned": "learned_absolute", "none": "none",
            "rotary": "yarn" if attention.yarn else "rope",
        }[model.positions],
        "model.rotary_percent": attention.rotary_share if model.positions == "rotary" else None,
        "model.attention_dropout": attention.dropout,
        "model.hidden_dropout": model.dropout,
        "model.qk_layernorm": attention.head_norms != "none",
        "model.gated_linear_unit": any(one.gates == 2 for one in model.kinds),
        "model.activation_func": _activation(run, recipe),
        "model.add_bias_linear": layer.biases,
        "model.add_qkv_bias": attention.qkv_biases and not layer.biases,
        "model.share_embeddings_and_output_weights": model.tied,
        "model.vocab_size": model.vocab,
        "model.should_pad_vocab": padded,
        "model.make_vocab_size_divisible_by": model.vocab_divisor if padded else None,
        "model.mtp_num_layers": model.mtp or None,
        "model.mtp_use_repeated_layer": model.mtp_shared or None,
        "model.window_size": [window - 1, 0] if window is not None else None,
        "model.window_attn_skip_freq": whole_every or None,
        "model.multi_latent_attention": latent is not None or None,
        "model.apply_rope_fusion": kernels.fused_rotary,
        "model.bias_activation_fusion": kernels.fused_gate,
        "model.transformer_impl": "local" if kernels.own_layers else "transformer_engine",
        "model.attention_backend": megatron.asked_attention(run),
        "model.gradient_accumulation_fusion": kernels.fused_accumulation,
        **{f"model.{name}": value for name, value in mixer_sizes(model).items()},
    }  # fmt: skip
    if model.is_hybrid:
        found["model.hybrid_layer_pattern"] = str(pattern_of(run))
    if latent is not None:
        found |= {
            "model.q_lora_rank": latent.query_rank,
            "model.kv_lora_rank": latent.kv_rank,
            "model.qk_head_dim": latent.key_width,
            "model.qk_pos_emb_head_dim": latent.rotary_width,
            "model.v_head_dim": attention.value_width,
        }
    if model.experts is not None:
        scored = recipe.settings.get("model.moe_router_score_function", "softmax")
        found |= _experts(run, model.experts, softmax=scored == "softmax")
    return found


def _activation(run: Run, recipe: Recipe) -> str | None:
    """Return the activation function by its PyTorch name; None: use that of the recipe."""
    model = run.model
    if any(one.gates == 2 for one in model.kinds):
        return "silu"
    if recipe.settings.get("model.activation_func") == "squared_relu":
        return "squared_relu"
    weighted = model.experts is not None and run.runtime.experts.fused_weighting
    return "squared_relu" if weighted else None


def _experts(run: Run, experts: Experts, *, softmax: bool) -> Settings:
    mixtures, kernels = run.model.mixtures, run.runtime.experts
    flex = kernels.dispatcher == "flex"
    return {
        "model.num_moe_experts": experts.number,
        "model.moe_router_topk": experts.per_token,
        "model.moe_ffn_hidden_size": experts.width,
        "model.moe_shared_expert_intermediate_size": experts.shared_width or None,
        "model.moe_router_num_groups": experts.groups if experts.groups > 1 else None,
        "model.moe_router_group_topk": experts.groups_per_token if experts.groups > 1 else None,
        "model.activation_func_clamp_value": 7.0 if experts.clamped else None,
        "model.moe_latent_size": experts.latent,
        **(
            {}
            if run.model.is_hybrid
            else {"model.moe_layer_freq": 1 if all(mixtures) else [int(kind) for kind in mixtures]}
        ),
        "model.moe_token_dispatcher_type": kernels.dispatcher,
        "model.moe_flex_dispatcher_backend": megatron.flex_backend(run) if flex else None,
        "model.moe_grouped_gemm": kernels.grouped,
        "model.moe_permute_fusion": kernels.fused_permutation,
        "model.moe_router_force_load_balancing": kernels.skew == 1.0,
        "model.moe_expert_capacity_factor": kernels.capacity,
        "model.moe_pad_expert_input_to_capacity": kernels.padded or None,
        "model.moe_router_dtype": "fp32" if kernels.router_fp32 else None,
        "model.use_transformer_engine_op_fuser": kernels.fused_mlp,
        "model.use_fused_weighted_squared_relu": (
            (kernels.fused_weighting and not experts.gated) or None
        ),
        # A softmax over a single selected score is always 1.
        "model.moe_router_pre_softmax": (experts.per_token == 1 and softmax) or None,
    }


def _degrees(run: Run) -> Settings:
    strategy, split, pp, vpp = run.strategy, run.split, run.strategy.pp, run.strategy.vpp
    # the pattern of a hybrid has its stages and chunks
    ends = (0, 0) if run.model.is_hybrid else even_ends(run)
    chunked = vpp > 1 and ends is not None and not run.model.is_hybrid
    found: Settings = {
        "model.tensor_model_parallel_size": split.tp,
        "model.pipeline_model_parallel_size": pp,
        "model.context_parallel_size": split.cp,
        "model.sequence_parallel": split.splits_sequence,
        "model.virtual_pipeline_model_parallel_size": vpp if chunked else None,
        "model.pipeline_model_parallel_layout": layout_of(strategy) if ends is None else None,
        "model.num_layers_in_first_pipeline_stage": None,
        "model.num_layers_in_last_pipeline_stage": None,
        "model.account_for_embedding_in_pipeline_split": bool(ends and ends[0]) or None,
        "model.account_for_loss_in_pipeline_split": bool(ends and ends[1]) or None,
        "model.microbatch_group_size_per_vp_stage": strategy.group or None if vpp > 1 else None,
        "model.cp_comm_type": context_words(split) if split.cp > 1 else None,
        "model.hierarchical_context_parallel_sizes": (
            [split.cp // split.rings, split.rings] if split.rings > 1 else None
        ),
        **recompute_settings(strategy),
        **_offload(run),
    }
    if run.model.experts is not None:
        found |= {
            "model.expert_model_parallel_size": split.ep,
            "model.expert_tensor_parallel_size": split.etp,
        }
    return found


def _offload(run: Run) -> Settings:
    """Return the settings for activation offload."""
    offload = run.runtime.offload
    fine = run.offloads_activations and not offload.layers
    return {
        "model.cpu_offloading": bool(offload.layers) or None,
        "model.cpu_offloading_num_layers": offload.layers or None,
        "model.fine_grained_activation_offloading": fine or None,
        "model.offload_modules": sorted(run.split.offload) if fine else None,
        "model.activation_offload_fraction": offload.fraction if fine else None,
        "model.min_offloaded_tensor_size": offload.least_elements if fine else None,
    }


def _training(run: Run, recipe: Recipe) -> Settings:
    loss = run.kernels.loss
    fused = loss != "none"
    return {
        "train.micro_batch_size": run.strategy.micro_batch,
        "train.global_batch_size": run.strategy.global_batch,
        "train.train_iters": step_count(run),
        # `run_recipe.py` uses the sample length for the model; other scripts need both keys.
        "model.seq_length": run.seq_length,
        "dataset.seq_length": run.seq_length,
        **_samples(run),
        "model.cross_entropy_loss_fusion": fused,
        "model.cross_entropy_fusion_impl": loss if fused else None,
        **_graphs(run, recipe),
    }


def _samples(run: Run) -> Settings:
    """Return the settings of samples, which fine-tuning does not pack, and of adapters.

    Raises UnsupportedError for adapters that the names of modules cannot express.
    """
    adapters = run.runtime.adapters
    if run.runtime.sft:
        return {PACKS: False}
    if adapters is None:
        return {"dataset.skip_getting_attention_mask_from_dataset": not run.runtime.masks}
    if adapters.base != "16 bits":
        raise UnsupportedError(f"{_TITLE} {VERSION} has no weights in {adapters.base}")
    names = [name for name in _MODULES if adapters.targets.issuperset(ADAPTED[name])]
    if not names or not adapters.fused:
        raise UnsupportedError(
            f"{_TITLE} {VERSION} supports adapters only in {', '.join(_MODULES)}"
        )
    return {
        "peft.dim": adapters.rank,
        "peft.target_modules": names,
        "peft.dropout": adapters.dropout,
        PACKS: False,
    }


_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "in_proj", "out_proj")
"""Modules of Megatron-Core that have an adapter: by default (`peft/lora.py`), and those of mixers
in recipes of hybrids (`recipes/nemotronh`)."""


def _graphs(run: Run, recipe: Recipe) -> Settings:
    """Return the CUDA graph settings of a run.

    Partial graphs are those of the recipe, by default of attention and the router.
    """
    if run.kernels.graphs == "none":
        return {"model.cuda_graph_impl": None, "model.cuda_graph_scope": None}
    if run.kernels.graphs == "full":
        return {
            "model.cuda_graph_impl": "local",
            "model.cuda_graph_scope": ["full_iteration"],
        }
    if run.kernels.graphs == "attention":
        return {
            "model.cuda_graph_impl": "transformer_engine",
            "model.cuda_graph_scope": ["attn"],
        }
    impl = recipe.settings.get("model.cuda_graph_impl")
    scope = recipe.settings.get("model.cuda_graph_scope") or ()
    whole = impl == "full_iteration" or "full_iteration" in scope
    if impl not in (None, "none") and not whole and [*scope] != ["attn"]:
        return {}  # keep the partial graphs of the recipe
    routed = ["moe_router", "moe_preprocess"] if run.model.experts is not None else []
    return {
        "model.cuda_graph_impl": "transformer_engine",
        "model.cuda_graph_scope": ["attn", *routed],
    }


def _precision(run: Run) -> Settings:
    """Return the name of a mixed-precision recipe, and settings in which the run differs from it.

    Without a matching recipe, such as for fp32, all settings are returned.
    """
    precision, ends = run.runtime.precision, wide_ends(run.strategy)
    wanted: Settings = {
        "mixed_precision.bf16": precision.kind == "bf16",
        "mixed_precision.fp16": precision.kind == "fp16",
        "mixed_precision.fp8_param_gather": precision.fp8 and precision.fp8_weights,
        "mixed_precision.first_last_layers_bf16": any(ends),
        "mixed_precision.fp4_param_gather": precision.fp4_weights or None,
        "mixed_precision.grad_reduce_in_fp32": precision.gradient_bytes == 4,
        "mixed_precision.fp8_dot_product_attention": precision.fp8_attention or None,
        "model.fp8_output_proj": precision.fp8_head or None,
    }
    for name, fields in PRECISIONS.items():
        own = fields.get("fp8_recipe") if "fp8" in fields else None
        asked = precision.fp8_recipe if precision.fp8 else None
        if own != asked or ("fp4" in fields) != precision.fp4 or not fields.get(precision.kind):
            continue
        said = precision_settings(name) or {}
        more = {key: value for key, value in wanted.items() if said.get(key) != value}
        if any(ends):
            more |= {
                "mixed_precision.num_layers_at_start_in_bf16": ends[0],
                "mixed_precision.num_layers_at_end_in_bf16": ends[1],
            }
        return {"mixed_precision": name, **more}
    # Bridge has no mixed-precision recipe for fp32.
    return wanted


_DTYPES = {
    8: ("float32", "float32"), 6: ("bfloat16", "float32"), 5: ("uint8", "float32"),
    4: ("bfloat16", "bfloat16"), 3: ("uint8", "bfloat16"), 2: ("uint8", "uint8"),
}  # fmt: skip
"""Bytes of both Adam moments per parameter -> data types of first and second moment."""


def _sharding(run: Run) -> Settings:
    optimizer, states, overlaps = run.runtime.optimizer, run.runtime.states, run.runtime.overlap
    zero, replicas = run.split.zero, run.split.replicas
    precise = (
        optimizer.moments_bytes != 8 or optimizer.master_bytes != 4 or optimizer.offload_master
    )
    first, second = _DTYPES.get(optimizer.moments_bytes, _DTYPES[8])
    found: Settings = {
        "optimizer.optimizer": optimizer.kind,
        "optimizer.use_precision_aware_optimizer": precise,
        "ddp.use_distributed_optimizer": zero > 0,
        "ddp.use_megatron_fsdp": zero == 3,
        **({} if zero == 3 else {"dist.use_megatron_fsdp": None}),
        "ddp.num_distributed_optimizer_instances": replicas if replicas > 1 else None,
        "ddp.overlap_grad_reduce": overlaps.gradients,
        "ddp.overlap_param_gather": overlaps.gradients and zero > 0,
        "ddp.pad_buckets_for_high_nccl_busbw": states.padded_buckets or None,
        "ddp.bucket_size": states.bucket,
    }
    if optimizer.offload:
        found |= {
            "optimizer.optimizer_cpu_offload": True,
            "optimizer.optimizer_offload_fraction": optimizer.offload,
            "optimizer.overlap_cpu_optimizer_d2h_h2d": overlaps.optimizer_host,
        }
    if precise:
        found |= {
            "optimizer.exp_avg_dtype": first,
            "optimizer.exp_avg_sq_dtype": second,
            "optimizer.store_param_remainders": optimizer.master_bytes == 2,
        }
    if zero == 3:
        found |= {
            "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            "model.init_model_with_meta_device": True,
            "checkpoint.ckpt_format": "fsdp_dtensor",
        }
    return found


def _overlaps(run: Run) -> Settings:
    """Return the overlap settings for a recipe with a `comm_overlap` section."""
    overlap, deferred = run.runtime.overlap, run.kernels.deferred_head
    bucket = run.runtime.states.bucket
    if run.split.zero == 1 and overlap.gradients:
        # The default of this section is not that of Megatron-Core.
        bucket = bucket or default_bucket(run)
    return {
        "comm_overlap.tp_comm_overlap": overlap.tensor and run.split.tp > 1,
        "comm_overlap.overlap_grad_reduce": overlap.gradients,
        "comm_overlap.overlap_param_gather": overlap.gradients and run.split.zero > 0,
        "comm_overlap.overlap_moe_expert_parallel_comm": overlap.experts or None,
        # Megatron-Core has one of both overlaps, and providers set the other.
        **({"model.moe_shared_expert_overlap": False} if overlap.experts else {}),
        "comm_overlap.defer_embedding_wgrad_compute": deferred is not None or None,
        "comm_overlap.wgrad_deferral_limit": deferred or None,
        "comm_overlap.bucket_size": bucket,
    }


def _overlaps_of_model(run: Run) -> Settings:
    """Return the overlap settings for a recipe without a `comm_overlap` section."""
    experts, tensor = run.runtime.overlap.experts, run.runtime.overlap.tensor
    return {
        "model.tp_comm_overlap": (tensor and run.split.tp > 1) or None,
        "model.overlap_moe_expert_parallel_comm": experts or None,
        **({"model.moe_shared_expert_overlap": False} if experts else {}),
    }


_SIZES = frozenset({
    f"model.{name}" for name in (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "normalization", "position_embedding_type", "attention_dropout",
        "hidden_dropout", "qk_layernorm", "gated_linear_unit", "add_bias_linear", "add_qkv_bias",
        "share_embeddings_and_output_weights", "vocab_size", "mtp_num_layers", "window_size",
        "window_attn_skip_freq", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
        "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_moe_experts", "moe_router_topk",
        "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
        "moe_router_num_groups", "moe_router_group_topk", "activation_func_clamp_value",
        "activation_func", "moe_latent_size", "attention_output_gate", "is_hybrid_model",
        "hybrid_layer_pattern",
        "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
        "experimental_attention_variant", "linear_attention_freq", "linear_num_key_heads",
        "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim", "dsa_indexer_n_heads", "dsa_indexer_head_dim",
        "dsa_indexer_topk",
    )
})  # fmt: skip
"""Keys of model sizes, which recipes read from the Hugging Face configuration of the model."""


# --------------------------------------------------------------------------------------------------
# Script and notes.


def _script(run: Run, place: ExportTarget, recipe: Recipe, given: Settings) -> str:
    name = one_line(place.model or run.name or "a model of these sizes")
    # Fine-tuning loads weights; samples of the recipe are those of SQuAD.
    words = (
        ['    ${DATA_PATH:+"dataset.blend=[[$DATA_PATH],null]"}',
         '    ${LOAD:+"checkpoint.pretrained_checkpoint=$LOAD"}']
        if not run.runtime.fine_tunes
        else [f"    --mode {'sft' if run.runtime.sft else 'lora'}",
              *(f'    ${{DATA_PATH:+"dataset.{key}"}}' for key in (
                  "dataset_root=$DATA_PATH", "hf_dataset=null", "hf_validation_proportion=null")),
              f'    "checkpoint.pretrained_checkpoint={required("LOAD", _BASE)}"']
    )  # fmt: skip
    environment = megatron.environment_of(run)
    # Bridge sets this variable at startup.
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    lines = [
        f"# A recipe of Megatron-Bridge {_version(place)} with its overrides",
        (f"# for {name} on {place.num_nodes} x {place.gpus_per_node} GPUs; source it with bash."),
        *(f"export {variable}={value}" for variable, value in environment.items()),
        "",
        "BRIDGE_ARGS=(",
        f"    --recipe {recipe.name}",
        *(f"    {quoted(f'{key}={_value(value)}')}" for key, value in given.items()),
        *words,
        '    ${SAVE:+"checkpoint.save=$SAVE"}',
        ")",
    ]
    return "\n".join(lines) + "\n"


_BASE = "set LOAD to the checkpoint of the weights to fine-tune"


def _value(value: Any) -> str:
    """Return a value in the syntax of Hydra overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    return str(value)


def _notes(run: Run, place: ExportTarget, recipe: Recipe) -> Iterator[str]:
    data = "the prefix of preprocessed data, without which recipes train on synthetic samples"
    if run.runtime.fine_tunes:
        data = "the folder of training.jsonl, without which recipes train on SQuAD"
    yield f"set BRIDGE_PATH; DATA_PATH is {data}"
    yield (
        "LOAD is a checkpoint that examples/conversion/convert_checkpoints.py made of Hugging "
        "Face's, SAVE the folder of checkpoints"
    )
    if recipe.name == _VANILLA:
        yield "no recipe has these sizes: set the tokenizer (tokenizer.tokenizer_model) as well"
    if recipe.name == _HYBRID and not alike(recipe.model, run.model):
        yield (
            "no recipe has these sizes, so the router and the tokenizer are those of Nemotron 3 "
            "Nano: set model.moe_router_* and tokenizer.tokenizer_model as well"
        )
    known = alike(recipe.model, run.model)
    yield from (text for text in megatron.notes_of(run, place) if not known or "ROTARY" not in text)
