"""A launch as a recipe of Megatron-Bridge with overrides, which `run_recipe.py` takes.

The recipe is that of the model where one is known by its sizes, else `vanilla_gpt_pretrain_config`,
whose values are those of Megatron-LM. Keys are the dotted fields of `ConfigContainer` that
`search.engines.bridge.keys` has; sizes that a recipe has already are not said again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from autopar.run.launch import Experts, Launch, Model
from search.engines.bridge.recipes import (
    PRECISIONS,
    Recipe,
    Settings,
    named_recipe,
    precision_settings,
)
from search.engines.huggingface.architectures import architecture, architecture_names
from search.engines.megatron import write as megatron
from search.engines.megatron.files import quoted
from search.engines.megatron.stages import context_words, even_ends, layout_of
from search.engines.place import Draft, Place, refuse_others, step_count
from search.engines.words import one_line, required, torchrun

_TITLE = "Megatron-Bridge"
VERSION = "0.6.0"
_FILE = "bridge_overrides.sh"
_VANILLA = "vanilla_gpt_pretrain_config"


def write(launch: Launch, place: Place) -> Draft:
    """Return the overrides of a launch in a script, and the command.

    Raises InputError for a launch of another trainer, and for stages that no layout says.
    """
    refuse_others(launch, _TITLE, ())
    recipe = recipe_of(launch.model, place)
    settings = settings_of(launch, recipe)
    given = {key: value for key, value in settings.items() if not _is_said(key, value, recipe)}
    path = required("BRIDGE_PATH", "set BRIDGE_PATH to a checkout of Megatron-Bridge")
    program = f'"{path}/scripts/training/run_recipe.py" "${{BRIDGE_ARGS[@]}}"'
    return Draft(
        version=VERSION,
        files={_FILE: _script(launch, place, recipe, given)},
        launch=f"source {_FILE}\n" + torchrun(place, program),
        notes=tuple(_notes(launch, place, recipe)),
    )


def recipe_of(model: Model, place: Place) -> Recipe:
    """Return the recipe of a model: that of its name, else of its sizes, else the one of none."""
    named = None if place.model is None else place.model.replace("-", "_").replace(".", "p")
    if named in architecture_names():
        return named_recipe(f"{named}_pretrain_config")
    for name in reversed(architecture_names()):
        sizes = architecture(name)
        if sizes is not None and _alike(sizes, model):
            return named_recipe(f"{name}_pretrain_config")
    return named_recipe(_VANILLA)


def _alike(sizes: Mapping[str, Any], model: Model) -> bool:
    experts = model.experts
    return (
        sizes["num_layers"] == model.num_layers
        and sizes["hidden_size"] == model.hidden
        and sizes["num_attention_heads"] == model.attention.heads
        and sizes["vocab_size"] == model.vocab
        and sizes.get("num_moe_experts") == (None if experts is None else experts.number)
    )


def _is_said(key: str, value: Any, recipe: Recipe) -> bool:
    """Return whether a recipe says a key by itself; None is what is not set."""
    own = recipe.settings.get(key)
    if key == "model.position_embedding_type" and value == "rope" and own in ("yarn", "mrope"):
        return True  # rotary as well, with frequencies of its own
    if own is None and value is None:
        return True
    # degrees and precisions are said in any case: other releases have other ones
    return key in _SIZES and own == value and type(own) is type(value)


# --------------------------------------------------------------------------------------------------
# The settings of a launch.


def settings_of(launch: Launch, recipe: Recipe) -> Settings:
    """Return all that a launch sets, by dotted key; None is `null`."""
    sections = any(key.startswith("comm_overlap.") for key in recipe.settings)
    return {
        **_model(launch, recipe),
        **_degrees(launch),
        **_training(launch, recipe),
        **_precision(launch),
        **_sharding(launch),
        **(_overlaps(launch) if sections else _overlaps_of_model(launch)),
    }


def _model(launch: Launch, recipe: Recipe) -> Settings:
    model, software = launch.model, launch.software
    attention, latent = model.attention, model.attention.latent
    windowed = attention.window is not None
    padded = model.vocab_divisor > 1
    found: Settings = {
        "model.num_layers": model.num_layers,
        "model.hidden_size": model.hidden,
        "model.ffn_hidden_size": model.ffn,
        "model.num_attention_heads": attention.heads,
        "model.num_query_groups": attention.groups,
        "model.kv_channels": attention.width,
        "model.normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "model.position_embedding_type": {
            "learned": "learned_absolute", "rotary": "rope", "none": "none"
        }[model.positions],
        "model.rotary_percent": model.rotary_share,
        "model.attention_dropout": attention.dropout,
        "model.hidden_dropout": model.hidden_dropout,
        "model.qk_layernorm": attention.head_norms,
        "model.gated_linear_unit": model.gated,
        "model.activation_func": _activation(model),
        "model.add_bias_linear": model.biases,
        "model.add_qkv_bias": model.qkv_biases and not model.biases,
        "model.share_embeddings_and_output_weights": model.tied,
        "model.vocab_size": model.vocab,
        "model.should_pad_vocab": padded,
        "model.make_vocab_size_divisible_by": model.vocab_divisor if padded else None,
        "model.mtp_num_layers": model.mtp or None,
        "model.mtp_use_repeated_layer": model.mtp_repeated or None,
        "model.window_size": [attention.window - 1, 0] if attention.window is not None else None,
        "model.window_attn_skip_freq": attention.whole_every or None if windowed else None,
        "model.multi_latent_attention": latent is not None or None,
        "model.apply_rope_fusion": model.fused_rotary,
        "model.bias_activation_fusion": model.fused_gate,
        "model.transformer_impl": "local" if software.local_layers else "transformer_engine",
        "model.attention_backend": megatron.asked_attention(launch),
        "model.gradient_accumulation_fusion": software.fused_accumulation,
    }  # fmt: skip
    if latent is not None:
        found |= {
            "model.q_lora_rank": latent.query_rank,
            "model.kv_lora_rank": latent.key_value_rank,
            "model.qk_head_dim": latent.key_width,
            "model.qk_pos_emb_head_dim": latent.rotary_width,
            "model.v_head_dim": latent.value_width,
        }
    if model.experts is not None:
        scored = recipe.settings.get("model.moe_router_score_function", "softmax")
        found |= _experts(model, model.experts, launch, softmax=scored == "softmax")
    return found


def _activation(model: Model) -> str | None:
    """Return the activation by torch's name; None: that of the recipe."""
    if model.gated:
        return "silu"
    weighted = model.experts is not None and model.experts.fused_weighting
    return "squared_relu" if weighted else None


def _experts(model: Model, experts: Experts, launch: Launch, *, softmax: bool) -> Settings:
    whole = all(model.expert_layers)
    pattern = [int(kind) for kind in model.expert_layers]
    flex = experts.dispatcher == "flex"
    return {
        "model.num_moe_experts": experts.number,
        "model.moe_router_topk": experts.per_token,
        "model.moe_ffn_hidden_size": experts.ffn,
        "model.moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "model.moe_layer_freq": 1 if whole else pattern,
        "model.moe_token_dispatcher_type": experts.dispatcher,
        "model.moe_flex_dispatcher_backend": megatron.flex_backend(launch) if flex else None,
        "model.moe_grouped_gemm": experts.grouped,
        "model.moe_permute_fusion": experts.fused_permutation,
        "model.moe_router_force_load_balancing": experts.skew == 1.0,
        "model.moe_expert_capacity_factor": experts.capacity,
        "model.moe_pad_expert_input_to_capacity": experts.padded_capacity or None,
        "model.moe_router_dtype": "fp32" if experts.router_fp32 else None,
        "model.use_transformer_engine_op_fuser": experts.fused_mlp,
        # one score behind a softmax of one is always 1
        "model.moe_router_pre_softmax": (experts.per_token == 1 and softmax) or None,
    }


def _degrees(launch: Launch) -> Settings:
    degrees, recompute = launch.degrees, launch.recompute
    ends = even_ends(launch)
    whole = recompute.layers != "none"
    modules = sorted(recompute.modules)
    found: Settings = {
        "model.tensor_model_parallel_size": degrees.tp,
        "model.pipeline_model_parallel_size": degrees.pp,
        "model.context_parallel_size": degrees.cp,
        "model.sequence_parallel": degrees.scattered,
        "model.virtual_pipeline_model_parallel_size": (
            degrees.vpp if degrees.vpp > 1 and ends is not None else None
        ),
        "model.pipeline_model_parallel_layout": layout_of(launch.degrees) if ends is None else None,
        "model.account_for_embedding_in_pipeline_split": bool(ends and ends[0]) or None,
        "model.account_for_loss_in_pipeline_split": bool(ends and ends[1]) or None,
        "model.microbatch_group_size_per_vp_stage": (
            degrees.group or None if degrees.vpp > 1 else None
        ),
        "model.cp_comm_type": context_words(degrees) if degrees.cp > 1 else None,
        "model.hierarchical_context_parallel_sizes": (
            [degrees.cp // degrees.rings, degrees.rings] if degrees.rings > 1 else None
        ),
        "model.recompute_granularity": "full" if whole else "selective" if modules else None,
        "model.recompute_method": recompute.layers if whole else None,
        "model.recompute_num_layers": recompute.number if whole else None,
        "model.recompute_modules": modules if modules and not whole else None,
        **_offload(launch),
    }
    if launch.model.experts is not None:
        found |= {
            "model.expert_model_parallel_size": degrees.ep,
            "model.expert_tensor_parallel_size": degrees.etp,
        }
    return found


def _offload(launch: Launch) -> Settings:
    """Return which activations wait on the host."""
    offload = launch.offload
    fine = offload.any and not offload.layers
    return {
        "model.cpu_offloading": bool(offload.layers) or None,
        "model.cpu_offloading_num_layers": offload.layers or None,
        "model.fine_grained_activation_offloading": fine or None,
        "model.offload_modules": sorted(offload.modules) if fine else None,
        "model.activation_offload_fraction": offload.fraction if fine else None,
        "model.min_offloaded_tensor_size": offload.least_elements if fine else None,
    }


def _training(launch: Launch, recipe: Recipe) -> Settings:
    fused = launch.loss_fusion != "none"
    return {
        "train.micro_batch_size": launch.micro_batch,
        "train.global_batch_size": launch.global_batch,
        "train.train_iters": step_count(launch),
        # `run_recipe.py` takes the length of samples for the model's, other scripts want both
        "model.seq_length": launch.seq,
        "dataset.seq_length": launch.seq,
        "dataset.skip_getting_attention_mask_from_dataset": not launch.attention_masks,
        "model.cross_entropy_loss_fusion": fused,
        "model.cross_entropy_fusion_impl": launch.loss_fusion if fused else None,
        **_graphs(launch, recipe),
    }


def _graphs(launch: Launch, recipe: Recipe) -> Settings:
    """Return the settings of CUDA graphs; of parts of layers, attention and the router's."""
    if launch.graphs == "none":
        return {"model.cuda_graph_impl": None, "model.cuda_graph_scope": None}
    if launch.graphs == "full":
        return {
            "model.cuda_graph_impl": "local",
            "model.cuda_graph_scope": ["full_iteration"],
        }
    scope = recipe.settings.get("model.cuda_graph_scope") or ()
    if recipe.settings.get("model.cuda_graph_impl") and "full_iteration" not in scope:
        return {}  # its own parts are those that run there
    routed = ["moe_router", "moe_preprocess"] if launch.model.experts is not None else []
    return {
        "model.cuda_graph_impl": "transformer_engine",
        "model.cuda_graph_scope": ["attn", *routed],
    }


def _precision(launch: Launch) -> Settings:
    """Return a recipe of mixed precision, and what is other than it says."""
    precision = launch.precision
    wanted: Settings = {
        "mixed_precision.bf16": precision.kind == "bf16",
        "mixed_precision.fp16": precision.kind == "fp16",
        "mixed_precision.fp8_param_gather": precision.fp8 and precision.fp8_weights,
        "mixed_precision.first_last_layers_bf16": any(precision.wide_ends),
        "mixed_precision.fp4_param_gather": precision.fp4_weights or None,
        "mixed_precision.grad_reduce_in_fp32": precision.gradient_bytes == 4,
        "mixed_precision.fp8_dot_product_attention": precision.fp8_attention or None,
    }
    for name, fields in PRECISIONS.items():
        own = fields.get("fp8_recipe") if "fp8" in fields else None
        asked = precision.fp8_recipe if precision.fp8 else None
        if own != asked or ("fp4" in fields) != precision.fp4 or not fields.get(precision.kind):
            continue
        said = precision_settings(name) or {}
        more = {key: value for key, value in wanted.items() if said.get(key) != value}
        if any(precision.wide_ends):
            first, last = precision.wide_ends
            more |= {
                "mixed_precision.num_layers_at_start_in_bf16": first,
                "mixed_precision.num_layers_at_end_in_bf16": last,
            }
        return {"mixed_precision": name, **more}
    # fp32 has no recipe
    return wanted


_DTYPES = {
    8: ("float32", "float32"), 6: ("bfloat16", "float32"), 5: ("uint8", "float32"),
    4: ("bfloat16", "bfloat16"), 3: ("uint8", "bfloat16"), 2: ("uint8", "uint8"),
}  # fmt: skip
"""Of Adam's two moments, by their bytes together."""


def _sharding(launch: Launch) -> Settings:
    optimizer = launch.optimizer
    fully_sharded = optimizer.sharding == "fsdp"
    sharded = optimizer.sharding != "none"
    precise = (
        optimizer.moments_bytes != 8 or optimizer.master_bytes != 4 or optimizer.offload_master
    )
    first, second = _DTYPES.get(optimizer.moments_bytes, _DTYPES[8])
    found: Settings = {
        "optimizer.optimizer": optimizer.kind,
        "optimizer.use_precision_aware_optimizer": precise,
        "ddp.use_distributed_optimizer": sharded,
        "ddp.use_megatron_fsdp": fully_sharded,
        "ddp.num_distributed_optimizer_instances": (
            optimizer.instances if optimizer.instances > 1 else None
        ),
        "ddp.overlap_grad_reduce": optimizer.overlap_gradients,
        "ddp.overlap_param_gather": optimizer.overlap_gradients and sharded,
        "ddp.pad_buckets_for_high_nccl_busbw": optimizer.padded_buckets or None,
        "ddp.bucket_size": optimizer.bucket,
    }
    if optimizer.offload:
        found |= {
            "optimizer.optimizer_cpu_offload": True,
            "optimizer.optimizer_offload_fraction": optimizer.offload,
            "optimizer.overlap_cpu_optimizer_d2h_h2d": optimizer.overlap_offload,
        }
    if precise:
        found |= {
            "optimizer.exp_avg_dtype": first,
            "optimizer.exp_avg_sq_dtype": second,
            "optimizer.store_param_remainders": optimizer.master_bytes == 2,
        }
    if fully_sharded:
        found |= {
            "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            "model.init_model_with_meta_device": True,
            "checkpoint.ckpt_format": "fsdp_dtensor",
        }
    return found


def _overlaps(launch: Launch) -> Settings:
    """Return the overlaps of a recipe that has a section for them."""
    overlap = launch.optimizer.overlap_gradients
    return {
        "comm_overlap.tp_comm_overlap": launch.tensor_overlap and launch.degrees.tp > 1,
        "comm_overlap.overlap_grad_reduce": overlap,
        "comm_overlap.overlap_param_gather": overlap and launch.optimizer.sharding != "none",
        "comm_overlap.overlap_moe_expert_parallel_comm": launch.degrees.overlap_experts or None,
        "comm_overlap.defer_embedding_wgrad_compute": launch.deferred_head is not None or None,
        "comm_overlap.wgrad_deferral_limit": launch.deferred_head or None,
        "comm_overlap.bucket_size": launch.optimizer.bucket,
    }


def _overlaps_of_model(launch: Launch) -> Settings:
    """Return those that the model has by itself: an override has no section to go into."""
    return {
        "model.overlap_moe_expert_parallel_comm": launch.degrees.overlap_experts or None,
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
    )
})  # fmt: skip
"""Keys of the architecture, which a recipe of the model has from Hugging Face's config.json."""


# --------------------------------------------------------------------------------------------------
# The script, and what is to be known.


def _script(launch: Launch, place: Place, recipe: Recipe, given: Settings) -> str:
    name = one_line(place.model or launch.name or "a model of these sizes")
    environment = megatron.environment_of(launch)
    # Bridge sets its own number of connections
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    lines = [
        f"# A recipe of Megatron-Bridge {VERSION} with its overrides",
        f"# for {name} on {place.num_nodes} x {place.gpus_per_node} GPUs; to be sourced by bash.",
        *(f"export {variable}={value}" for variable, value in environment.items()),
        "",
        "BRIDGE_ARGS=(",
        f"    --recipe {recipe.name}",
        *(f"    {quoted(f'{key}={_value(value)}')}" for key, value in given.items()),
        '    ${DATA_PATH:+"dataset.blend=[[$DATA_PATH],null]"}',
        '    ${LOAD:+"checkpoint.pretrained_checkpoint=$LOAD"}',
        '    ${SAVE:+"checkpoint.save=$SAVE"}',
        ")",
    ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Return a value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(_value, value))}]"
    # Hydra's `null` is spelt otherwise, its readers here take this word for it as well
    return "'none'" if value == "none" else str(value)


def _notes(launch: Launch, place: Place, recipe: Recipe) -> Iterator[str]:
    yield (
        "set BRIDGE_PATH; DATA_PATH is the prefix of preprocessed data, without which recipes "
        "train on made-up samples"
    )
    yield (
        "LOAD is a checkpoint that examples/conversion/convert_checkpoints.py made of Hugging "
        "Face's, SAVE the folder of checkpoints"
    )
    if recipe.name == _VANILLA:
        yield "no recipe has these sizes: set the tokenizer (tokenizer.tokenizer_model) as well"
    yield from (text for text in megatron.notes_of(launch, place) if "ROTARY_BASE" not in text)
