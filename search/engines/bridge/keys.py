"""Keys and launcher arguments of Megatron-Bridge, and their Megatron-LM equivalents.

Keys are dotted fields of `ConfigContainer` (`src/megatron/bridge/training/config.py`), whose
`model` is Megatron-Core's `TransformerConfig`. Arguments are those of
`scripts/performance/argument_parser.py` and of `scripts/training/run_recipe.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from search.engines.arguments import Unpriced
from search.engines.engine import Span
from search.engines.megatron.names import spans_of

VALUES: Mapping[str, str] = {
    **{
        f"model.{name}": name.replace("_", "-")
        for name in (
            "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
            "normalization", "seq_length", "position_embedding_type", "rotary_percent",
            "attention_dropout", "hidden_dropout", "tensor_model_parallel_size",
            "pipeline_model_parallel_size", "context_parallel_size",
            "expert_model_parallel_size", "expert_tensor_parallel_size", "cp_comm_type",
            "hierarchical_context_parallel_sizes", "recompute_granularity", "recompute_method",
            "recompute_num_layers", "recompute_modules", "cross_entropy_fusion_impl",
            "transformer_impl", "mtp_num_layers", "moe_router_topk", "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size", "moe_token_dispatcher_type",
            "moe_flex_dispatcher_backend", "moe_expert_capacity_factor",
            "moe_router_score_function", "moe_latent_size",
            "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
            "hybrid_override_pattern", "hybrid_layer_pattern", "mamba_num_heads",
            "mamba_head_dim", "mamba_state_dim", "mamba_num_groups",
            "experimental_attention_variant", "linear_attention_freq", "linear_num_key_heads",
            "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel_dim", "moe_router_dtype", "dsa_kernel_backend",
            "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk",
            "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset", "dsa_indexer_loss_coeff",
            "cpu_offloading_num_layers", "offload_modules", "activation_offload_fraction",
            "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks",
            "cuda_graph_impl", "cuda_graph_scope",
        )
    },
    "model.num_moe_experts": "num-experts",
    "model.num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "model.num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "model.microbatch_group_size_per_vp_stage":
        "microbatch-group-size-per-virtual-pipeline-stage",
    "train.micro_batch_size": "micro-batch-size",
    "train.global_batch_size": "global-batch-size",
    "train.train_iters": "train-iters",
    "train.train_samples": "train-samples",
    "optimizer.optimizer": "optimizer",
    "model.moe_router_num_groups": "moe-router-num-groups",
    "model.moe_router_group_topk": "moe-router-group-topk",
    "model.activation_func_clamp_value": "activation-func-clamp-value",
    "ddp.num_distributed_optimizer_instances": "num-distributed-optimizer-instances",
    "mixed_precision.fp8": "fp8-format",
    "mixed_precision.fp4": "fp4-format",
    "mixed_precision.num_layers_at_start_in_bf16": "num-layers-at-start-in-bf16",
    "mixed_precision.num_layers_at_end_in_bf16": "num-layers-at-end-in-bf16",
}  # fmt: skip
"""Key -> Megatron-LM argument with equal values."""
WHERE_TRUE: Mapping[str, str] = {
    **{
        f"model.{name}": name.replace("_", "-")
        for name in (
            "sequence_parallel", "qk_layernorm", "multi_latent_attention", "moe_grouped_gemm",
            "moe_permute_fusion", "moe_router_force_load_balancing", "moe_router_fusion",
            "moe_pad_expert_input_to_capacity", "moe_router_pre_softmax",
            "moe_router_enable_expert_bias", "moe_shared_expert_overlap",
            "cross_entropy_loss_fusion", "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split", "cpu_offloading",
            "fine_grained_activation_offloading", "deterministic_mode", "mtp_use_repeated_layer",
            "is_hybrid_model", "distribute_saved_activations", "cpu_offloading_weights",
            "overlap_moe_expert_parallel_comm", "use_transformer_engine_op_fuser",
            "use_fused_weighted_squared_relu",
            "fp8_output_proj", "attention_output_gate", "dsa_indexer_use_sparse_loss",
        )
    },
    "model.gated_linear_unit": "swiglu",
    "model.add_qkv_bias": "add-qkv-bias",
    "mixed_precision.bf16": "bf16",
    "mixed_precision.fp16": "fp16",
    "mixed_precision.fp8_param_gather": "fp8-param-gather",
    "mixed_precision.fp4_param": "fp4-param-gather",
    "mixed_precision.fp4_param_gather": "fp4-param-gather",
    "mixed_precision.first_last_layers_bf16": "first-last-layers-bf16",
    "ddp.use_distributed_optimizer": "use-distributed-optimizer",
    "ddp.use_megatron_fsdp": "use-megatron-fsdp",
    "ddp.use_custom_fsdp": "use-megatron-fsdp",
    "ddp.pad_buckets_for_high_nccl_busbw": "ddp-pad-buckets-for-high-nccl-busbw",
    "dist.use_megatron_fsdp": "use-megatron-fsdp",
    "dist.use_torch_fsdp2": "use-torch-fsdp2",
    "comm_overlap.overlap_moe_expert_parallel_comm": "overlap-moe-expert-parallel-comm",
    "comm_overlap.defer_embedding_wgrad_compute": "defer-embedding-wgrad-compute",
    "optimizer.optimizer_cpu_offload": "optimizer-cpu-offload",
    "optimizer.overlap_cpu_optimizer_d2h_h2d": "overlap-cpu-optimizer-d2h-h2d",
}  # fmt: skip
"""Key -> Megatron-LM flag that corresponds to the value true."""
UNLESS_TRUE: Mapping[str, str] = {
    "model.add_bias_linear": "disable-bias-linear",
    "model.share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "model.apply_rope_fusion": "no-rope-fusion",
    "model.bias_activation_fusion": "no-bias-swiglu-fusion",
    "model.gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "model.dsa_indexer_scoring_relu": "no-dsa-indexer-scoring-relu",
}
"""Key -> Megatron-LM flag that corresponds to the value false."""
_OTHERS: Mapping[str, str] = {
    "model.num_query_groups": "num-query-groups",
    "model.virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "model.pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
    "model.vocab_size": "vocab-size",
    "model.moe_layer_freq": "moe-layer-freq",
    "model.make_vocab_size_divisible_by": "make-vocab-size-divisible-by",
    "model.should_pad_vocab": "make-vocab-size-divisible-by",
    "model.attention_backend": "attention-backend",
    "model.window_size": "window-size",
    "model.window_attn_skip_freq": "window-attn-skip-freq",
    "model.activation_func": "squared-relu",
    "mixed_precision": "bf16",
    "mixed_precision.fp8_recipe": "fp8-recipe",
    "mixed_precision.fp8_param": "fp8-param-gather",
    "mixed_precision.grad_reduce_in_fp32": "grad-reduce-in-bf16",
    "mixed_precision.fp8_dot_product_attention": "fp8-dot-product-attention",
    "ddp.grad_reduce_in_fp32": "grad-reduce-in-bf16",
    "ddp.overlap_grad_reduce": "overlap-grad-reduce",
    "ddp.overlap_param_gather": "overlap-param-gather",
    "ddp.bucket_size": "ddp-bucket-size",
    "ddp.data_parallel_sharding_strategy": "data-parallel-sharding-strategy",
    "model.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.tp_comm_overlap": "tp-comm-overlap",
    "comm_overlap.overlap_grad_reduce": "overlap-grad-reduce",
    "comm_overlap.overlap_param_gather": "overlap-param-gather",
    "comm_overlap.bucket_size": "ddp-bucket-size",
    "comm_overlap.wgrad_deferral_limit": "wgrad-deferral-limit",
    "optimizer.use_precision_aware_optimizer": "use-precision-aware-optimizer",
    "optimizer.optimizer_offload_fraction": "optimizer-offload-fraction",
    "optimizer.store_param_remainders": "store-param-remainders",
    "optimizer.exp_avg_dtype": "exp-avg-dtype",
    "optimizer.exp_avg_sq_dtype": "exp-avg-sq-dtype",
    "dataset.skip_getting_attention_mask_from_dataset": "no-create-attention-mask-in-dataloader",
    **{f"peft.{name}": "peft" for name in ("dim", "target_modules", "dropout")},
}
"""Key -> Megatron-LM argument, for keys whose value is converted in code (`flags_of_settings`)."""
FLAG_OF_KEY: Mapping[str, str] = {**VALUES, **WHERE_TRUE, **UNLESS_TRUE, **_OTHERS}
"""Key -> Megatron-LM argument, used to replace arguments by keys in messages."""
CORE: Mapping[str, str] = {"0.3": "0.16", "0.4": "0.17", "0.5": "0.18", "0.6": "0.19"}
"""Release of Megatron-Bridge, oldest first -> release of Megatron-Core that it contains: submodule
3rdparty/Megatron-LM of the tags v0.3.1, v0.4.2, v0.5.1 and v0.6.0."""
RELEASES = tuple(CORE)
_SPANS: Mapping[str, Span] = {
    "mixed_precision.fp4_param": Span("0.4.2"),
    "mixed_precision.fp4_param_gather": Span("0.4.2"),
    # a field of TransformerConfig before it became an argument
    "model.use_transformer_engine_op_fuser": Span(),
}
"""Key -> releases that have it, unless those of its Megatron-LM argument apply."""


def span_of(key: str) -> Span:
    """Return the releases of Megatron-Bridge that have a key.

    Fields of `model` are those of the `TransformerConfig` of Megatron-Core. The tags were compared.
    """
    found = None if not key.startswith("model.") else spans_of(FLAG_OF_KEY.get(key, "")).values()
    if key in _SPANS or not found:
        return _SPANS.get(key, Span())
    own = [one for one, core in CORE.items() if all(span.has(core) for span in found)]
    if not own:
        return Span()
    return Span("" if own[0] == RELEASES[0] else own[0], "" if own[-1] == RELEASES[-1] else own[-1])


DATASET_LENGTHS = ("dataset.seq_length", "dataset.sequence_length")
"""Keys of the sample length in tokens; the name depends on the release."""
KEYS = frozenset(FLAG_OF_KEY)
"""All keys that are read, except `DATASET_LENGTHS`, which files of other engines also contain."""
HARMLESS_KEYS = re.compile(
    r"""
    (logger | checkpoint | scheduler | rng | profiling | rerun_state_machine | validation |
     nvrx_straggler | straggler | ft | inprocess_restart | tensor_inspect | env_vars | tokenizer |
     dataset | perf_matrix)(\..*)? |
    dist\.(?!use_(megatron_fsdp|torch_fsdp2)$).* |
    train\.(?!(micro|global)_batch_size$|train_(iters|samples)$|rampup_batch_size$|
            decrease_batch_size_if_needed$).* |
    optimizer\.(lr|min_lr|adam_.*|weight_decay.*|clip_grad|sgd_.*|
                muon_(momentum|use_nesterov|nesterov|scale_mode|extra_scale_factor)|decoupled_.*|
                loss_scale.*|initial_loss_scale|min_loss_scale|hysteresis|bf16|fp16|params_dtype|
                main_(grads|params)_dtype|overlap_param_gather.*|log_.*|timers|barrier_.*|
                use_distributed_optimizer|lr_mult|config_logger_dir|eps|
                optimizer_cuda_graph|use_torch_optimizer_.*) |
    ddp\.(check_for_.*|average_in_collective|align_param_gather|nccl_ub|
          fsdp_(manual_registration|all_gather_.*|db_.*)|gradient_reduce_div_fusion|
          disable_symmetric_registration|keep_fp8_transpose_cache|fp8_param_gather|
          delay_wgrad_compute|suggested_communication_unit_size|reuse_grad_buf_.*) |
    mixed_precision\.(params_dtype|pipeline_dtype|autocast_.*|loss_scale.*|initial_loss_scale|
          min_loss_scale|hysteresis|fp8_(margin|amax_.*|wgrad)|fp4_recipe|fp32|
          reuse_grad_buf_for_mxfp8_param_ag) |
    peft\.(_target_|alpha|lora_.*|a2a_experimental|network_alpha|dropout_position|normalize_.*) |
    comm_overlap\.(tp_comm_overlap_cfg(\..*)?|tp_comm_bootstrap_backend|overlap_p2p_comm|
          batch_p2p_comm|align_param_gather|overlap_param_gather_with_optimizer_step|
          delay_wgrad_compute|data_parallel_size) |
    model\.(.*init_method.*|rotary_(base|interleaved|scaling_factor)|rope_scaling.*|yarn_.*|
          scale_factor|low_freq_factor|high_freq_factor|old_context_len|layernorm_epsilon|
          layernorm_zero_centered_gamma|moe_(aux_loss_coeff|shared_expert_gate|z_loss_coeff|router_(load_balancing_type|
          bias_update_rate|topk_scaling_factor|padding_for_.*|
          topk_limited_devices|force_biased)|per_layer_logging|token_drop_policy|token_dropping|
          hybridep_num_sms|deepep_num_sms|input_jitter_eps|enable_.*)|mtp_loss_scaling_factor|
          seq_len_interpolation_factor|calculate_per_token_loss|fp16_lm_cross_entropy|softmax_.*|
          attention_softmax_in_fp32|apply_query_key_layer_scaling|perform_initialization|
          params_dtype|pipeline_dtype|autocast_.*|enable_autocast|bf16|fp16|fp8.*|fp4.*|
          hf_model_id|generation_config|transformer_layer_spec|restore_modelopt_state|timers|
          .*_func|glu_linear_offset|cuda_graph_(warmup_steps|
          use_single_mempool|retain_backward_graph)|use_te_rng_tracker|tp_comm_.*|tp_only_amax_red|
          overlap_p2p_comm.*|batch_p2p_.*|deallocate_pipeline_outputs|barrier_with_L1_time|
          config_logger_dir|parallel_output|scatter_embedding_sequence_parallel|
          variable_seq_lengths|bias_dropout_fusion|masked_softmax_fusion|persist_layer_norm|
          cpu_offloading_(activations|double_buffering)|num_layers_at_(start|end)_in_bf16|
          first_last_layers_bf16|
          init_model_with_meta_device|wgrad_deferral_limit|clone_scatter_output_in_embedding|
          async_tensor_model_parallel_allreduce|fused_single_qkv_rope|
          disable_parameter_transpose_cache|batch_invariant_mode|
          kitchen_.*|mup_.*|dsa_indexer_(rope_interleaved|rotate_activation|k_norm_.*)|
          inference_.*|qk_clip.*|.*_grouped_gemm_backend|mlp_chunks_for_prefill)
    """,
    re.VERBOSE,
)
"""Pattern of keys that change neither memory nor time of the supported models."""
SHORT: Mapping[str, str] = {
    "-m": "model_family_name", "-mr": "model_recipe_name", "-s": "model_size",
    "-nh": "nemo_home", "-ng": "num_gpus", "-d": "dryrun", "-ms": "max_steps",
    "-gb": "global_batch_size", "-mb": "micro_batch_size", "-sl": "seq_length",
    "-hf": "hf_token", "-tp": "tensor_model_parallel_size",
    "-pp": "pipeline_model_parallel_size", "-cp": "context_parallel_size",
    "-vp": "virtual_pipeline_model_parallel_size", "-ep": "expert_model_parallel_size",
    "-et": "expert_tensor_parallel_size", "-a": "account", "-p": "partition",
    "-t": "time_limit", "-gn": "gpus_per_node", "-i": "container_image",
    "-cm": "custom_mounts", "-ce": "custom_env_vars", "-E": "env", "-cs": "custom_srun_args",
    "-cb": "custom_bash_cmds", "-g": "gpu", "-c": "compute_dtype", "-fr": "fp8_recipe",
    "-vb": "enable_vboost", "-lgc": "lock_gpu_freq", "-lmc": "peak_mem_clk",
    "-en": "enable_nsys", "-pyp": "pytorch_profiler", "-mh": "record_memory_history",
    "-rl": "recompute_num_layers", "-ol": "activation_offload_layers", "-wdk": "wandb_key",
    "-wdp": "wandb_project_name", "-wde": "wandb_entity_name",
    "-wdj": "wandb_experiment_name", "-wds": "wandb_save_dir", "-l": "log_dir",
    "-cv": "config_variant",
}  # fmt: skip
"""Short name of an argument -> its long name."""
_PLAIN: Mapping[str, str] = {
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "virtual_pipeline_model_parallel_size": "model.virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size": "model.expert_tensor_parallel_size",
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "max_steps": "train.train_iters",
    "seq_length": "model.seq_length",
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "optimizer_type": "optimizer.optimizer",
}
"""Argument -> key that it sets; the tensor degree also sets `model.sequence_parallel`."""
ARGUMENTS = frozenset({
    *SHORT.values(), *_PLAIN, "recipe", "mode", "dataset", "step_func", "peft_scheme",
    "packed_sequence", "hf_path", "nodes", "max_retries", "detach", "use_recipes", "task",
    "domain", "lr", "min_lr", "warmup_iters", "pretrained_checkpoint", "save_dir", "load_dir",
    "save_interval", "most_recent_k", "data", "dataset_paths", "dataset_root",
    "index_mapping_dir", "dataset_name", "head_only", "c4_root", "c4_train_shards",
    "tokenizer_type", "tokenizer_model", "vocab_size", "offline", "gres", "segment",
    "additional_slurm_params", "packager", "enable_pct_binding", "csp", "use_tokendrop",
    "use_megatron_fsdp", "nccl_ub", "cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap",
    "recompute_modules", "moe_flex_dispatcher_backend", "deterministic", "dump_env",
    "save_config_filepath", "list_config_variants", "is_long_convergence_run",
    "golden_values_path", "profiling_start_step", "profiling_stop_step",
    "profiling_gpu_metrics", "profiling_ranks", "nsys_trace", "nsys_extra_args",
    "export_nsys_sqlite", "first_k_dense_replace", "model", "model_name", "config_file",
    "mount", "srun_arg", "name", "experiment_name", "retry_on_testing_failure",
    "timing_threshold", "no_gpu_resource_request", "hf_token", "debug",
})  # fmt: skip
"""Known launcher arguments. Those without settings in `argument_settings` are assumed to change
neither time nor memory."""
DETERMINISTIC = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""Environment variables that `--deterministic` sets (`apply_determinism_overrides`)."""


UNPRICED_ARGUMENTS: Mapping[str, Unpriced] = {
    "first_k_dense_replace": Unpriced("layers without experts"),
    "lock_gpu_freq": Unpriced("a clock that is set", ("time",)),
    "packed_sequence": Unpriced("packed samples"),
    "peft_scheme": Unpriced("adapters"),
    "vocab_size": Unpriced("the vocabulary"),
}
"""Launcher arguments that change memory or time and have no price."""
UNPRICED_KEYS: Mapping[str, Unpriced] = {
    **{f"dataset.{name}": Unpriced("packed samples", off=("0", "false", "none", "null", "-1"))
       for name in ("packed_sequence_size", "packed_sequence_specs.packed_sequence_size",
                    "offline_packing_specs.packed_sequence_size", "enable_in_batch_packing",
                    "enable_offline_packing",
                    "pack_sequences_in_batch")},
    **{f"optimizer.{name}": Unpriced("states of another type", off=(
        "", "null", "none", "fp32", "float32", "torch.float32"))
       for name in ("main_grads_dtype", "main_params_dtype")},
    # the GEMMs of Newton-Schulz iterations; defaults are priced
    **{f"optimizer.muon_{name}": Unpriced("other iterations of Muon", ("time",), (usual,))
       for name, usual in (("num_ns_steps", "5"), ("fp32_matmul_prec", "medium"),
                           ("coefficient_type", "quintic"), ("split_qkv", "true"),
                           ("use_syrk", "false"), ("scalar_optimizer", "adam"))},
    "model.dynamic_context_parallel": Unpriced("context groups by the lengths of each batch"),
    "model.hybrid_context_parallel": Unpriced("context groups by the lengths of each batch"),
    **{f"model.{name}": Unpriced("weights gathered from a part of the data ranks",
                                 off=("", "null", "none", "1"))
       for name in ("tensor_parallel_num_weight_shards", "gtp_weight_remat_size",
                    "expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size")},
}  # fmt: skip
"""Keys that change memory or time and have no price."""


def argument_settings(name: str, values: Sequence[str]) -> dict[str, Any]:
    """Return the settings, by dotted key, that a launcher argument makes; may be empty.

    name : long name of the argument.
    values : its words.

    Source: `set_user_overrides` of `scripts/performance/utils/overrides.py`.
    """
    text = " ".join(values)
    value: Any = None if text in ("", "None") else int(text) if _is_whole(text) else text
    if name in _PLAIN:
        found: dict[str, Any] = {_PLAIN[name]: value}
        if name == "tensor_model_parallel_size":
            found["model.sequence_parallel"] = isinstance(value, int) and value > 1
        return found
    on = text.lower() in ("true", "1", "t", "yes", "y")
    parts = [part for part in text.split(",") if part]
    match name:
        case "recompute_num_layers":
            return {
                "model.recompute_granularity": "full",
                "model.recompute_method": "block",
                "model.recompute_num_layers": value,
            }
        case "recompute_modules":
            return {"model.recompute_granularity": "selective", "model.recompute_modules": parts}
        case "activation_offload_layers":
            return {"model.cpu_offloading": True, "model.cpu_offloading_num_layers": value}
        case "use_megatron_fsdp" if on:
            return {
                "ddp.use_megatron_fsdp": True,
                "ddp.data_parallel_sharding_strategy": "optim_grads_params",
            }
        case "nccl_ub" if on:
            return {"ddp.nccl_ub": True}
        case "cuda_graph_impl":
            return {"model.cuda_graph_impl": text}
        case "cuda_graph_scope":
            return {"model.cuda_graph_scope": parts}
        case "moe_a2a_overlap" if on:
            return {
                "comm_overlap.overlap_moe_expert_parallel_comm": True,
                "model.moe_shared_expert_overlap": False,
            }
        case "moe_flex_dispatcher_backend":
            return {
                "model.moe_flex_dispatcher_backend": value,
                "model.moe_token_dispatcher_type": "alltoall" if value is None else "flex",
            }
        case "use_tokendrop" if on:
            return {
                "model.moe_expert_capacity_factor": 1,
                "model.moe_pad_expert_input_to_capacity": True,
                "model.moe_token_dispatcher_type": "alltoall",
                "model.moe_router_force_load_balancing": False,
            }
        case "deterministic":
            return {
                "model.deterministic_mode": True,
                "model.cross_entropy_loss_fusion": False,
                "comm_overlap.tp_comm_overlap": False,
            }
        case _:
            return {}


def _is_whole(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,15}", text))
