"""Arguments of Hugging Face scripts by what they change: nothing, or memory and time without price.

`search.engines.huggingface.script` reads the arguments that are priced.

Sources of the names: `TrainingArguments` and `Seq2SeqTrainingArguments` of transformers 4.20 to
5.24, its example scripts, `SFTConfig`, `ModelConfig` and `ScriptArguments` of TRL 1.16. Others are
those of LLaMA-Factory 0.9.5, axolotl 0.19, ms-swift 4.6, FastChat and qlora.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from search.engines.arguments import Unpriced
from search.engines.engine import Span, spanned

RELEASES = ("4.20", "5.24")
"""First and last release of transformers whose `TrainingArguments` were compared."""
_TRAINER_ARGUMENTS = """
    accelerator_config@4.38 activation_checkpointing@5.24 activation_checkpointing_kwargs@5.24
    adafactor@-4.57 average_tokens_across_devices@4.46 batch_eval_metrics@4.41
    dataloader_in_order@5.16 dataloader_multiprocessing_context@5.16
    dataloader_persistent_workers@4.37 dataloader_prefetch_factor@4.38 ddp_backend@4.30
    ddp_broadcast_buffers@4.31 ddp_static_graph@5.6 ddp_timeout@4.25 dispatch_batches@4.33-4.50
    enable_jit_checkpoint@5.0 eval_do_concat_batches@4.40 eval_on_start@4.42 eval_strategy@4.41
    eval_use_gather_object@4.43 evaluation_strategy@-4.50 fp16_backend@-4.57 fp16_opt_level@-4.57
    fsdp_config@4.28 fsdp_min_num_params@-4.57 fsdp_transformer_layer_cls_to_wrap@4.25-4.57
    gradient_checkpointing_kwargs@4.35 group_by_length@-5.1 half_precision_backend@-4.57
    hub_always_push@4.33 hub_revision@4.53 include_for_metrics@4.46
    include_inputs_for_metrics@-4.57 include_num_input_tokens_seen@4.37
    include_tokens_per_second@4.35-4.57 jit_mode_eval@-4.57 liger_kernel_config@4.53
    logging_dir@-5.14 lr_scheduler_kwargs@4.37 mp_parameters@-4.57 neftune_noise_alpha@4.35
    no_cuda@-4.57 optim_args@4.25 optim_target_modules@4.39 overwrite_output_dir@-4.57
    parallelism_config@4.56 past_index@-4.57 per_gpu_eval_batch_size@-4.57
    per_gpu_train_batch_size@-4.57 project@4.57 push_to_hub_model_id@-4.57
    push_to_hub_organization@-4.57 push_to_hub_token@-4.57 ray_scope@-4.57
    restore_callback_states_from_checkpoint@4.41 save_only_model@4.37 save_safetensors@4.28-4.57
    sharded_ddp@-4.33 split_batches@4.35-4.50 torch_compile@4.28 torch_compile_backend@4.28
    torch_compile_mode@4.28 torch_empty_cache_steps@4.43 torchdynamo@-4.57 tp_size@4.50-4.51
    tpu_metrics_debug@-4.57 tpu_num_cores@-4.57 trackio_bucket_id@5.6 trackio_space_id@4.57
    trackio_static_space_id@5.6 train_sampling_strategy@5.2 use_cache@5.0 use_cpu@4.33
    use_ipex@-4.56 use_legacy_prediction_loop@-4.57 use_liger_kernel@4.45 use_mps_device@4.25-4.57
    warmup_ratio@-5.14 xpu_backend@-4.31
"""
"""Arguments that some of these releases lack, as `name@first-last`: fields of `TrainingArguments`
in 43 wheels of transformers 4.20.1 to 5.24.0, of every minor release to 5.4 but for five before
4.30, then of every second."""

_HARMLESS: Mapping[str, str] = {
    "outputs and evaluation": """
        output_dir overwrite_output_dir do_train do_eval do_predict do_test eval_strategy
        evaluation_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps
        eval_do_concat_batches eval_use_gather_object batch_eval_metrics prediction_loss_only
        per_device_eval_batch_size per_gpu_eval_batch_size include_inputs_for_metrics
        include_for_metrics load_best_model_at_end metric_for_best_model greater_is_better
        predict_with_generate generation_max_length generation_num_beams generation_config
        bf16_full_eval fp16_full_eval past_index use_legacy_prediction_loop jit_mode_eval

        compute_accuracy plot_loss eval_on_each_dataset eval_num_beams do_sample temperature top_p
        top_k num_beams max_new_tokens repetition_penalty length_penalty skip_special_tokens
        do_mmlu_eval mmlu_split mmlu_dataset max_mmlu_samples eval_dataset_size max_eval_samples
        max_predict_samples
    """,
    "logging": """
        log_level log_level_replica log_on_each_node logging_dir logging_strategy
        logging_first_step logging_steps logging_nan_inf_filter report_to run_name disable_tqdm
        project trackio_space_id skip_memory_metrics include_tokens_per_second
        include_num_input_tokens_seen include_effective_tokens_per_second with_tracking
        wandb_project wandb_entity wandb_run_name wandb_watch use_wandb tensorboard_dir
        use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode
        swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret

        enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps
        profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory
        profiler_with_stack profile_modules print_param_status log_completions verbose debug

        wandb_name wandb_run_id wandb_mode wandb_log_model use_tensorboard use_mlflow
        mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts
        use_comet comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode
        comet_online comet_experiment_config use_trackio trackio_project_name trackio_run_name
        use_otel_metrics otel_metrics_host otel_metrics_port include_tkps swanlab_description
        swanlab_experiment_name loss_watchdog_threshold loss_watchdog_patience
    """,
    "checkpoints": """
        save_strategy save_steps save_total_limit save_safetensors save_on_each_node
        save_only_model save_interval save_dir restore_callback_states_from_checkpoint
        resume_from_checkpoint ignore_data_skip checkpointing_steps enable_jit_checkpoint
        saves_per_epoch auto_resume_from_checkpoints save_first_step
        push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token hub_model_id
        hub_strategy hub_token hub_private_repo hub_always_push hub_revision create_new_adapter
        export_dir export_size export_device export_legacy_format export_hub_model_id
    """,
    "optimizer": """
        learning_rate lr weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        num_train_epochs num_epochs epochs max_train_steps lr_scheduler_type lr_scheduler
        lr_scheduler_kwargs warmup_ratio warmup_steps num_warmup_steps optim_args
        optim_target_modules average_tokens_across_devices early_stopping_steps
        early_stopping_patience fp16_opt_level fp16_backend half_precision_backend
        neftune_noise_alpha loraplus_lr_ratio loraplus_lr_embedding cosine_min_lr_ratio
        cosine_constant_lr_ratio lr_quadratic_warmup lr_div_factor adam_epsilon2 adam_beta3
    """,
    "processes": """
        local_rank seed data_seed full_determinism ddp_backend ddp_timeout
        ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph no_cuda use_cpu
        use_mps_device use_ipex tpu_num_cores tpu_metrics_debug ray_scope ray_num_workers
        ray_init_kwargs master_addr master_port node_rank mp_parameters ignore_bias_buffers
        data_shared_file_system max_memory_MB hf_hub_token ms_hub_token om_hub_token
    """,
    "data": """
        dataset dataset_name dataset_config dataset_config_name dataset_train_split
        dataset_test_split dataset_split dataset_streaming dataset_text_field dataset_kwargs
        dataset_num_proc dataset_batch_size dataset_dir dataset_path dataset_format dataset_mixer
        dataset_mixture datasets data_path data_dir data_files train_file train_data train_path
        validation_file validation_split_percentage test_file eval_data_path eval_dataset val_size

        test_size media_dir max_train_samples max_samples max_steps_per_epoch streaming
        buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_num_workers
        preprocessing_batch_size tokenized_path keep_linebreaks text_column text_columns
        label_names length_column_name group_by_length train_sampling_strategy
        remove_unused_columns dataloader_drop_last dataloader_num_workers
        dataloader_prefetch_factor dataloader_pin_memory dataloader_persistent_workers
        num_workers split_train lazy_preprocess conv_template template chat_template

        chat_template_path default_system system_prompt tool_format enable_thinking
        preserve_thinking train_on_prompt train_on_source mask_history mask_prompt
        completion_only_loss assistant_only_loss ignore_pad_token_for_loss
        shuffle_dataset disable_shuffling truncation_mode pad_to_multiple_of
        eval_packing packing_strategy eos_token pad_token padding padding_side split
        include_tokens dataset_text_column prompt_template packing neat_packing padding_free
        block_diag_attn test_split_size image_max_pixels image_min_pixels image_do_pan_and_scan
        crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen
        use_audio_in_video audio_sampling_rate dataloader_in_order sortish_sampler
        dataloader_multiprocessing_context trackio_bucket_id trackio_static_space_id

        sample_packing eval_sample_packing pad_to_sequence_len dataset_prepared_path val_set_size
        evals_per_epoch train_on_inputs dataset_processes chat_template_jinja special_tokens strict
        shuffle_merged_datasets shuffle_before_merging_datasets test_datasets skip_prepare_dataset
        dataset_shard_num dataset_shard_idx num_dataset_shards_to_save push_dataset_to_hub
        dataset_exact_deduplication dataset_keep_in_memory hf_use_auth_token curriculum_sampling
        excess_length_strategy min_sample_len eval_sequence_len eval_batch_size eot_tokens
        chat_template_kwargs default_system_message
    """,
    "model": """
        model_revision model_type config_name tokenizer_name tokenizer_name_or_path tokenizer
        tokenizer_path use_fast_tokenizer use_fast cache_dir token use_auth_token use_slow_tokenizer
        trust_remote_code low_cpu_mem_usage device_map lora_alpha lora_task_type use_rslora
        lora_bias init_lora_weights bnb_4bit_quant_type bnb_4bit_compute_dtype quant_type
        use_bnb_nested_quant double_quant double_quantization
        bnb_4bit_quant_storage quant_storage quantization_method quantization_type
        quantization_device_map pissa_init pissa_iter pissa_convert split_special_tokens

        rope_scaling moe_aux_loss_coef router_aux_loss_coef use_kv_cache infer_backend infer_dtype
        model_name_hf attention_dropout pre_norm upcast_layernorm use_cache

        tokenizer_type tokenizer_config tokenizer_use_fast tokenizer_legacy
        tokenizer_use_mistral_common tokenizer_save_jinja_files is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model
        heads_k_stride ring_attn_func
    """,
    "ms-swift": """
        acc_strategy add_non_thinking_prefix add_version agent_template bnb_4bit_use_double_quant
        cached_dataset cached_val_dataset check_model columns create_checkpoint_symlink
        custom_dataset_info dataset_shuffle disable_auto_column_mapping disable_ignore_empty_think
        download_mode ds3_gather_for_generation early_stop_interval enable_npu_model_patch
        eval_dataset_args eval_generation_config eval_limit eval_metric extra_eval_args

        init_weights interleave_prob is_binary_loss_scale lazy_tokenize load_args load_data_args
        load_from_cache_file local_repo_path lorap_lr_ratio max_epochs max_model_len max_pixels
        max_shard_size model_author norm_bbox packing_num_proc resume_only_model

        safe_serialization shuffle_buffer_size split_dataset_ratio stop_words stopping_strategy
        stream swanlab_exp_name swanlab_email_language system template_backend
        train_dataloader_shuffle truncation_strategy use_chat_template use_flash_ckpt use_hf
        eval_use_evalscope response_prefix use_logits_to_keep val_dataset val_dataset_shuffle

        vit_gradient_checkpointing problem_type ENV
    """,
}
"""Arguments that change neither memory nor time, by topic.

Estimates take every sequence as full. Those of packing and padding change the batches of samples
(`batching_of` of `search.engines.huggingface.script`), which `--lengths` prices.
"""
_STATES = "its optimizer states are not counted"
_COPIES = "a second model is not counted"
_LOGITS = "its loss makes no logits"
_UNPRICED: Mapping[str, Unpriced] = {
    "optim": Unpriced(_STATES),
    "adafactor": Unpriced(_STATES),
    "optimizer": Unpriced(_STATES),
    "use_galore": Unpriced(_STATES),
    "use_apollo": Unpriced(_STATES),
    "use_badam": Unpriced(_STATES),
    "use_adam_mini": Unpriced(_STATES),
    "use_muon": Unpriced(_STATES),
    "use_liger_kernel": Unpriced(_LOGITS),
    "use_liger": Unpriced(_LOGITS),
    "enable_liger_kernel": Unpriced(_LOGITS),
    "liger_kernel_config": Unpriced("kernels of Liger"),
    "loss_type": Unpriced("a loss of another kind", off=("nll",)),
    "use_unsloth": Unpriced("kernels of Unsloth"),
    "use_unsloth_gc": Unpriced("inputs of layers are on the host"),
    "shift_attn": Unpriced("attention of another kind"),
    "mixture_of_depths": Unpriced("layers process a part of the tokens"),
    "torch_compile_backend": Unpriced("another compiler", off=("inductor",)),
    "torch_compile_mode": Unpriced("CUDA graphs", off=("default",)),
    "torch_empty_cache_steps": Unpriced("blocks of the allocator are freed"),
    "torchdynamo": Unpriced("layers are compiled"),
    "auto_find_batch_size": Unpriced("the batch changes at run time"),
    "label_smoothing_factor": Unpriced("the loss stores log-probabilities"),
    "tf32": Unpriced("GEMMs of another precision", ("time",)),
    "dtype": Unpriced("weights and optimizer states have its type", off=("float32",)),
    "torch_dtype": Unpriced("weights and optimizer states have its type", off=("float32",)),
    "pure_bf16": Unpriced("weights and optimizer states have 16 bits"),
    "fp8": Unpriced("GEMMs of 8 bits"),
    "fsdp": Unpriced("FSDP of the script"),
    "fsdp_config": Unpriced("FSDP of the script"),
    "fsdp_min_num_params": Unpriced("FSDP of the script"),
    "fsdp_transformer_layer_cls_to_wrap": Unpriced("FSDP of the script"),
    "dp_shard_size": Unpriced("replicas of shards", off=("1", "none", "null", "")),
    "dp_replicate_size": Unpriced("replicas of shards", off=("1", "none", "null", "")),
    "sharded_ddp": Unpriced("sharding by fairscale"),
    "parallelism_config": Unpriced("degrees of the script"),
    "accelerator_config": Unpriced("settings of accelerate"),
    "ddp_bucket_cap_mb": Unpriced("buckets of another size"),
    "gradient_checkpointing_kwargs": Unpriced(
        "another way to recompute",
        off=('{"every_n_layers": 1}',
             "{'use_reentrant': false}", '{"use_reentrant": false}', '{"use_reentrant":false}',
             "{'use_reentrant': true}", '{"use_reentrant": true}', '{"use_reentrant":true}', ""),
    ),
    "activation_offloading": Unpriced("activations are on the host"),
    "load_in_4bit": Unpriced("quantised weights without adapters"),
    "load_in_8bit": Unpriced("quantised weights without adapters"),
    "use_dora": Unpriced("magnitudes and norms of weights are not counted"),
    "lora_modules_to_save": Unpriced("modules are trained whole"),
    "modules_to_save": Unpriced("modules are trained whole"),
    "additional_target": Unpriced("modules are trained whole"),
    "lora_target_parameters": Unpriced("adapters of experts"),
    "finetuning_type": Unpriced("weights are trained in part", off=("full",)),
    "freeze_trainable_layers": Unpriced("weights are trained in part"),
    "freeze_trainable_modules": Unpriced("weights are trained in part"),
    "freeze_extra_modules": Unpriced("weights are trained in part"),
    "use_llama_pro": Unpriced("weights are trained in part"),
    "adapter_name_or_path": Unpriced("adapters of another run"),
    "resize_vocab": Unpriced("the vocabulary is resized"),
    "upcast_lmhead_output": Unpriced("logits are copied to fp32", ("memory",)),
    "model_init_kwargs": Unpriced("settings of the model"),
    "config_overrides": Unpriced("sizes of the model"),
    "use_kt": Unpriced("experts are on the host"),
    "use_mca": Unpriced("the run is that of Megatron-Core"),
    "use_megatron_bridge": Unpriced("the run is that of Megatron-Bridge"),
    "stage": Unpriced(_COPIES, off=("sft", "pt")),
    "ref_model": Unpriced(_COPIES),
    "reward_model": Unpriced(_COPIES),
    "config": Unpriced("the arguments in it are not read"),
    "tuner_type": Unpriced("weights are trained in another way", off=("full", "lora")),
    "tuner_backend": Unpriced("kernels of Unsloth", off=("peft",)),
    "use_swift_lora": Unpriced("adapters of another kind"),
    "lora_dtype": Unpriced("adapters of this type", off=("float32", "none", "null", "")),
    "adapters": Unpriced("adapters of another run"),
    "target_regex": Unpriced("adapters of modules of these names"),
    "target_parameters": Unpriced("adapters of experts"),
    "freeze_parameters": Unpriced("weights are trained in part"),
    "freeze_parameters_regex": Unpriced("weights are trained in part"),
    "freeze_parameters_ratio": Unpriced("weights are trained in part"),
    "trainable_parameters": Unpriced("weights are trained in part"),
    "trainable_parameters_regex": Unpriced("weights are trained in part"),
    "freeze_llm": Unpriced("weights are trained in part"),
    "lisa_activated_layers": Unpriced("weights are trained in part"),
    "loss_scale": Unpriced(
        "tokens are weighed one by one", off=("default", "last_round", "all", "ignore_empty_think",
                                              "default+ignore_empty_think")
    ),
    "enable_dft_loss": Unpriced("a loss of another kind"),
    "enable_channel_loss": Unpriced("a loss of another kind"),
    "task_type": Unpriced("a head of another kind", off=("causal_lm", "causallm")),
    "num_labels": Unpriced("a head of another kind"),
    "new_special_tokens": Unpriced("the vocabulary is resized"),
    "experts_impl": Unpriced("another kernel of experts"),
    "callbacks": Unpriced("code of other files"),
    "external_plugins": Unpriced("code of other files"),
    "custom_register_path": Unpriced("code of other files"),
    "zero_hpz_partition_size": Unpriced("weights are sharded in a node"),
    "use_ray": Unpriced("ranks of Ray"),
}  # fmt: skip
"""Arguments that change memory or time and have no price, by name."""
RANKS: Mapping[str, str] = {
    "context-parallel-size": "context ranks",
    "sequence-parallel-degree": "context ranks",
    "sequence-parallel-size": "ranks that share a sequence",
    "tensor-parallel-size": "tensor ranks",
    "deepspeed-autotp-size": "tensor ranks",
    "expert-parallel-size": "expert ranks",
}
"""Degrees of axolotl 0.19 and ms-swift 4.6 that have no price above 1, with hyphens."""
VARIABLES = r"(ACCELERATE|FSDP|PARALLELISM_CONFIG)_\w+"
"""Pattern of the environment variables of accelerate, which settings of its launcher become."""
KNOWN_VARIABLES = (
    r"ACCELERATE_(GRADIENT_ACCUMULATION_STEPS|LOG_LEVEL|DEBUG_MODE|DISABLE_RICH|CONFIG_FILE"
    r"|BYPASS_DEVICE_MAP|ENABLE_RICH|TORCH_DEVICE)"
)
"""Pattern of those that are read, or that change neither memory nor time."""
_OWN = re.compile(
    r"lora|peft|adapter|quant|bits|offload|checkpointing|recompute|optim|pack|flash|liger|fsdp"
    r"|deepspeed|compile|freeze|galore|unsloth"
)
"""Pattern of names that a script does not give to a setting without effect."""


@cache
def _harmless() -> frozenset[str]:
    names = (name for text in _HARMLESS.values() for name in text.split())
    return frozenset(name.replace("_", "-") for name in names)


@cache
def _unpriced() -> dict[str, Unpriced]:
    return {name.replace("_", "-"): row for name, row in _UNPRICED.items()}


@cache
def _spans() -> dict[str, Span]:
    found = dict(spanned(word) for word in _TRAINER_ARGUMENTS.split())
    return {name.replace("_", "-"): span for name, span in found.items()}


def span_of(flag: str) -> Span:
    """Return the releases of transformers that have an argument, with hyphens, of the Trainer."""
    return _spans().get(flag, Span())


def harmless(flag: str) -> bool:
    """Return whether an argument, with hyphens, is known to change neither memory nor time."""
    return flag in _harmless()


def unpriced(flag: str) -> Unpriced | None:
    """Return the row of an argument, with hyphens, that has no price; None if there is none."""
    return _unpriced().get(flag)


def names_a_cost(flag: str) -> bool:
    """Return whether the name of a script's own argument is that of a setting with an effect."""
    return _OWN.search(flag) is not None
