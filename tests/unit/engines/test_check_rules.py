"""Arguments that Megatron-LM refuses, and legal ones that look broken: each rule alone.

Rules of degrees and layers are in `test_check.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.price.assessment import Target, assess
from search.check.alternatives import neighbours_of
from search.engines.changes import changed_words
from search.engines.reader import CheckedFile
from search.engines.table import read_checked

DENSE: dict[str, Any] = {
    "--num-layers": 32,
    "--hidden-size": 4096,
    "--ffn-hidden-size": 14336,
    "--num-attention-heads": 32,
    "--group-query-attention": True,
    "--num-query-groups": 8,
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--position-embedding-type": "rope",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--untie-embeddings-and-output-weights": True,
    "--vocab-size": 128256,
    "--micro-batch-size": 1,
    "--global-batch-size": 64,
    "--tensor-model-parallel-size": 2,
    "--sequence-parallel": True,
    "--pipeline-model-parallel-size": 2,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--lr": 1e-4,
    "--train-iters": 1000,
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "--num-experts": 8,
    "--moe-token-dispatcher-type": "alltoall",
    "--moe-grouped-gemm": True,
    "--expert-model-parallel-size": 4,
    "--expert-tensor-parallel-size": 1,
}


def checked(
    folder: Path, base: dict[str, Any], *, gpu: str = "h100-80gb", **changes: Any
) -> CheckedFile:
    """Return what 32 GPUs' arguments with some changed say; None takes one out."""
    arguments = {**base, **{f"--{k.replace('_', '-')}": v for k, v in changes.items()}}
    path = folder / "launch.json"
    document = {"MODEL_ARGS": arguments, "ENV_VARS": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}}
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_checked(str(path), world_size=32, gpu=gpu)


def illegal(file: CheckedFile) -> list[str]:
    """Return the sentences on what is illegal."""
    return [one.text for one in file.findings if one.kind == "illegal"]


SAMPLES = {"train_iters": None, "train_samples": 6400}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    ("base", "changes", "rule"),
    [
        (DENSE, {"fp16": True}, "--fp16 and --bf16 exclude"),
        (DENSE, {"attention_dropout": 3}, "--attention-dropout: expected a number of at least 0 a"),
        (DENSE, {"hidden_dropout": 1.5}, "--hidden-dropout: expected a number of at least 0 and"),
        (DENSE, {"rotary_percent": 2}, "--rotary-percent: expected a number of at least 0 and at"),
        (DENSE, {"recompute_granularity": "part"}, "expected one of full, selective, got"),
        (DENSE, {"train_samples": 1000}, "--train-iters and --train-samples exclude"),
        (DENSE, {"fp8_format": "hybrid", "fp4_format": "e2m1"}, "--fp4-format and --fp8-format"),
        (DENSE, {"multi_latent_attention": True}, "--multi-latent-attention and --group-query"),
        (DENSE, {"squared_relu": True}, "--swiglu, --squared-relu and"),
        (DENSE, {"pipeline_model_parallel_layout": "Et*16|t*16L",
                 "account_for_loss_in_pipeline_split": True}, "--pipeline-model-parallel-layout"),
        (DENSE, {"max_position_embeddings": None}, "--max-position-embeddings is missing"),
        (DENSE, {"num_attention_heads": 24}, "hidden-size % num-attention-heads"),
        (DENSE, {"save": "/ckpt"}, "--save needs --save-interval"),
        (DENSE, {"min_lr": 1e-3}, "--min-lr is above --lr"),
        (DENSE, {"fp8_format": "hybrid", "fp8_param_gather": True,
                 "use_distributed_optimizer": None}, "--fp8-param-gather needs --use-dist"),
        (DENSE, {"fp8_param_gather": True}, "--fp8-param-gather needs --fp8-format"),
        (DENSE, {"fp8_format": "hybrid", "gpu": "a100-80gb"}, "--fp8-format"),
        (DENSE, {"fp8_format": "hybrid", "fp8_recipe": "mxfp8"}, "mxfp8 needs Blackwell"),
        (DENSE, {**FULL, "recompute_granularity": "selective"}, "--recompute-method"),
        # the old word counts over the granularity
        (DENSE, {**FULL, "recompute_activations": True}, "--recompute-num-layers"),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": ["moe_act"],
                   "moe_grouped_gemm": None}, "moe_act needs --moe-grouped-gemm"),
        (DENSE, {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
         "mla_up_proj needs --multi-latent-attention"),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": ["layernorm"],
                   "fp8_format": "hybrid"}, "--fp8-recipe"),
        (MIXTURE, {**FULL, "moe_layer_recompute": True}, "--moe-layer-recompute and full"),
        (DENSE, {**FULL, "distribute_saved_activations": True}, "--distribute-saved-activations"),
        (DENSE, {"tp_comm_overlap": True, "sequence_parallel": None}, "--tp-comm-overlap needs"),
        (DENSE, {"tp_comm_overlap": True, "tensor_model_parallel_size": 1}, "--tp-comm-overlap"),
        (DENSE, {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 1},
         "--defer-embedding-wgrad-compute needs"),
        (DENSE, {"defer_embedding_wgrad_compute": True, "no_gradient_accumulation_fusion": True},
         "--defer-embedding-wgrad-compute and --no-gradient"),
        (DENSE, {"overlap_param_gather_with_optimizer_step": True}, "-with-optimizer-step needs"),
        (DENSE, {"decoder_first_pipeline_num_layers": 16,
                 "num_layers_per_virtual_pipeline_stage": 4}, "need --num-virtual-stages-per"),
        (DENSE, {"context_parallel_size": 2, "transformer_impl": "local"}, "transformer_engine"),
        (DENSE, {"deterministic_mode": True, "cross_entropy_loss_fusion": True},
         "--deterministic-mode and --cross"),
        *((DENSE, {"mtp_num_layers": 1, "position_embedding_type": kind}, "--mtp-num-layers needs")
          for kind in ("relative", "learned_absolute", "mrope", None)),
        (DENSE, {"attention_backend": "local"}, "--attention-backend local needs --spec local"),
        (DENSE, {"fp4_param_gather": True}, "--fp4-param-gather needs --fp4-format"),
        (DENSE, {"optimizer": "muon", "use_torch_fsdp2": True}, "--optimizer muon excludes"),
        (DENSE, {"pipeline_model_parallel_size": 1, "num_layers_per_virtual_pipeline_stage": 8},
         "4 chunks per pipeline stage need"),
        (DENSE, {"pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": 2},
         "2 chunks per pipeline stage need"),
        (DENSE, {"pipeline_model_parallel_size": 1,
                 "pipeline_model_parallel_layout": "Et*16|t*16L"},
         "2 chunks per pipeline stage need"),
        (DENSE, {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 9},
         "--decoder-first-pipeline-num-layers 9: the rest of 32 layers"),
        (DENSE, {"decoder_first_pipeline_num_layers": 33}, "the rest of 32 layers"),
        (DENSE, {"decoder_first_pipeline_num_layers": 16, "decoder_last_pipeline_num_layers": 10},
         "--decoder-last-pipeline-num-layers 10: the rest"),
        (DENSE, {"expert_model_parallel_size": 4}, "--expert-model-parallel-size 4 needs"),
        (DENSE, {"batch_size": 4}, "--batch-size"),
        (DENSE, {"warmup": 4}, "--warmup"),
        (DENSE, {"model_parallel_size": 4}, "--model-parallel-size"),
        (DENSE, {"checkpoint_activations": True}, "--checkpoint-activations"),
        (DENSE, {"encoder_num_layers": 32}, "--num-layers and --encoder-num-layers exclude"),
        (DENSE, {"encoder_seq_length": 4096}, "--seq-length and --encoder-seq-length exclude"),
        (DENSE, {"lr_decay_samples": 100}, "--lr-decay-samples needs --train-samples"),
        (DENSE, {"train_iters": None, "train_samples": 6400, "lr_decay_iters": 100},
         "--lr-decay-iters needs --train-iters"),
        (DENSE, {"lr_warmup_samples": 100}, "--lr-warmup-samples needs --train-samples"),
        (DENSE, {"train_iters": None, "train_samples": 6400, "lr_warmup_iters": 100},
         "--lr-warmup-iters needs --train-iters"),
        (DENSE, {"lr_warmup_iters": 100, "lr_warmup_fraction": 0.01}, "--lr-warmup-fraction excl"),
        (DENSE, {"start_weight_decay": 0.1}, "need --weight-decay-incr-style linear or cosine"),
        (DENSE, {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1},
         "--weight-decay-incr-style needs --start-weight-decay and"),
        (DENSE, {"save": "/c", "save_interval": 100, "save_retain_interval": 250},
         "save-retain-interval % save-interval"),
        (DENSE, {"mock_data": True, "data_path": "/d"}, "--mock-data, --data-path and the data"),
        (DENSE, {"data_path": "/d", "data_args_path": "/a"}, "--data-path and --data-args-path"),
        (DENSE, {"fp16_lm_cross_entropy": True}, "--fp16-lm-cross-entropy needs --fp16"),
        (DENSE, {"fp32_residual_connection": True, "bf16": None}, "needs --bf16 or --fp16"),
        (DENSE, {"distribute_saved_activations": True, "sequence_parallel": None},
         "--distribute-saved-activations needs tensor ranks"),
        (DENSE, {"no_position_embedding": True, "position_embedding_type": None},
         "--no-position-embedding needs"),
        (DENSE, {"first_last_layers_bf16": True, "fp8_format": "hybrid"},
         "--first-last-layers-bf16"),
        (DENSE, {"fp8_recipe": "custom", "fp8_format": "hybrid"},
         "--fp8-recipe custom needs --fp8-quantizer-factory"),
        (DENSE, {"reuse_grad_buf_for_mxfp8_param_ag": True}, "needs --fp8-param-gather"),
        (DENSE, {"rope_type": "yarn"}, "--rope-type yarn needs --multi-latent-attention"),
        (DENSE, {"decoder_first_pipeline_num_layers": 16,
                 "account_for_loss_in_pipeline_split": True}, "--account-for-embedding"),
        (DENSE, {"overlap_p2p_communication_warmup_flush": True}, "-warmup-flush needs virtual"),
        (DENSE, {"overlap_p2p_communication_warmup_flush": True, "no_overlap_p2p_communication":
                 True, "num_layers_per_virtual_pipeline_stage": 4,
                 "pipeline_model_parallel_size": 4}, "-warmup-flush needs virtual"),
        (DENSE, {"use_te_activation_func": True}, "needs --no-bias-swiglu-fusion"),
        (DENSE, {"delay_wgrad_compute": True}, "--delay-wgrad-compute needs --overlap-moe"),
        (DENSE, {"use_precision_aware_optimizer": True, "use_distributed_optimizer": None},
         "--use-precision-aware-optimizer needs"),
        (DENSE, {"exp_avg_dtype": "bf16"}, "need --use-precision-aware-optimizer"),
        (DENSE, {"optimizer_cpu_offload": True}, "needs --use-precision-aware-optimizer"),
        (DENSE, {"overlap_param_gather_with_optimizer_step": True, "overlap_param_gather": True,
                 "overlap_grad_reduce": True, "num_layers_per_virtual_pipeline_stage": 4},
         "needs --ckpt-format torch"),
        (DENSE, {"ckpt_format": "fsdp_dtensor"}, "--ckpt-format fsdp_dtensor needs"),
        (DENSE, {"ckpt_format": "torch_dcp"}, "--ckpt-format torch_dcp needs"),
        (DENSE, {"cpu_offloading_num_layers": 2}, "--cpu-offloading-num-layers excludes pipeline"),
        (DENSE, {"moe_ffn_hidden_size": 1024}, "--moe-ffn-hidden-size needs --num-experts"),
        (DENSE, {"use_torch_fsdp2": True, "no_gradient_accumulation_fusion": True,
                 "use_distributed_optimizer": None}, "needs --pipeline-model-parallel-size 1"),
        (DENSE, {"use_torch_fsdp2": True, "pipeline_model_parallel_size": 1},
         "--use-torch-fsdp2 needs no --use-distributed-optimizer"),
        (DENSE, {"use_torch_fsdp2": True, "pipeline_model_parallel_size": 1,
                 "use_distributed_optimizer": None}, "needs --no-gradient-accumulation-fusion"),
        # 64 sequences on 8 data ranks
        (DENSE, {"step_batch_size_schedule": "0:32 2B:64"}, "excludes --global-batch-size"),
        (DENSE, {"step_batch_size_schedule": "1B:32 2B:64", "global_batch_size": None},
         "with thresholds from 0 on"),
        (DENSE, {"step_batch_size_schedule": "0:32 2B:64", "global_batch_size": None,
                 "decrease_batch_size_if_needed": True}, "excludes --decrease-batch-size"),
        (DENSE, {**SAMPLES, "rampup_batch_size": [16, 16]}, "needs a first batch, an increment"),
        (DENSE, {**SAMPLES, "rampup_batch_size": "16 0 100"}, "needs a first batch, an increment"),
        (DENSE, {**SAMPLES, "rampup_batch_size": [128, 16, 100]}, "begins with 128, above"),
        (DENSE, {**SAMPLES, "rampup_batch_size": "16 20 100"}, "% increment(20) = 8 != 0"),
        (DENSE, {**SAMPLES, "rampup_batch_size": [4, 4, 100]}, "batch(4) % (micro batch * dp(8))"),
        (DENSE, {**SAMPLES, "rampup_batch_size": [16, 12, 100]}, "batch(28) % (micro batch * dp"),
        (DENSE, {**SAMPLES, "rampup_batch_size": [8, 8, 100],
                 "num_layers_per_virtual_pipeline_stage": 4}, "begins with 8: an interleaved"),
        (MIXTURE, {"moe_router_num_groups": 2, "moe_router_group_topk": 4}, "is above moe-router-"),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": "moe_act "
                   "shared_experts", "moe_shared_expert_overlap": True}, "shared_experts excludes"),
        (MIXTURE, {"moe_router_padding_for_fp8": True}, "needs --fp8-format or --fp4-format"),
        (MIXTURE, {"moe_router_padding_for_quantization": True, "fp8_format": "hybrid",
                   "moe_token_dispatcher_type": "allgather"}, "alltoall or flex"),
        (MIXTURE, {"moe_expert_capacity_factor": 1.0,
                   "moe_router_load_balancing_type": "sinkhorn"}, "type sinkhorn"),
        (MIXTURE, {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
                   "moe_aux_loss_coeff": 0.01}, "needs a coefficient for each"),
        # names of no release
        (DENSE, {"tensor_model_paralell_size": 4}, "Megatron-LM"),
        (DENSE, {"seq_length": None, "seq_lenght": 4096}, "Use --seq-length"),
        (MIXTURE, {"moe_router_top_k": 2}, "--moe-router-top-k"),
        (MIXTURE, {"moe_enable_deepep": True}, "--moe-enable-deepep needs"),
        (MIXTURE, {"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 1},
         "--moe-token-dispatcher-type flex needs --expert-model-parallel-size"),
        (MIXTURE, {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "allgather"},
         "--moe-shared-expert-overlap needs"),
        (MIXTURE, {"moe_router_enable_expert_bias": True}, "score-function sigmoid"),
        (MIXTURE, {"moe_router_topk": 1}, "--moe-router-topk 1 needs"),
        (MIXTURE, {"moe_router_group_topk": 2}, "--moe-router-group-topk needs"),
        (MIXTURE, {"moe_router_group_topk": 2, "moe_router_num_groups": 3}, "does not divide num-"),
        (MIXTURE, {"moe_pad_expert_input_to_capacity": True}, "needs --moe-expert-capacity"),
        (MIXTURE, {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0,
                   "moe_token_dispatcher_type": "flex"}, "excludes --moe-token-dispatcher-type"),
        (MIXTURE, {"disable_bias_linear": None, "expert_tensor_parallel_size": 2}, "with biases"),
        # 6 micro-batches: whole groups, or a rest of as many as there are stages
        (DENSE, {"pipeline_model_parallel_size": 4, "global_batch_size": 24,
                 "num_layers_per_virtual_pipeline_stage": 4}, "micro-batches(6) % 4 = 2"),
        (DENSE, {"pipeline_model_parallel_size": 4, "global_batch_size": 8,
                 "num_layers_per_virtual_pipeline_stage": 4}, "at most 2 micro-batches"),
        (DENSE, {"num_layers_per_virtual_pipeline_stage": 4,
                 "no_overlap_p2p_communication": True}, "excludes --no-overlap-p2p"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_found(
    base: dict[str, Any], changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    """Alone: without its change the launch is legal."""
    assert illegal(checked(tmp_path, base)) == []
    found = illegal(checked(tmp_path, base, **changes))

    assert any(rule in text for text in found), found


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        # 6 micro-batches in no interleaved pipeline, 7 in groups of 4 of 2 stages
        (DENSE, {"pipeline_model_parallel_size": 4, "global_batch_size": 24}),
        (DENSE, {"global_batch_size": 56, "num_layers_per_virtual_pipeline_stage": 4,
                 "microbatch_group_size_per_virtual_pipeline_stage": 4}),
        # 15 trillion tokens in sequences of 8192
        (DENSE, {"train_iters": None, "train_samples": 1831054688}),
        (DENSE, {"mtp_num_layers": 0, "num_experts": 0}),
        (DENSE, {"recompute_activations": True}),
        (MIXTURE, {"moe_router_topk": 1, "moe_router_pre_softmax": True}),
        (DENSE, {"fp8_format": "hybrid", "fp8_recipe": "mxfp8", "gpu": "b200"}),
        (DENSE, {"use_megatron_fsdp": True, "pipeline_model_parallel_size": 1,
                 "ckpt_format": "fsdp_dtensor",
                 "data_parallel_sharding_strategy": "optim_grads_params"}),
        (DENSE, {**SAMPLES, "rampup_batch_size": "16 16 1000", "lr_warmup_samples": 100}),
        (DENSE, {**SAMPLES, "rampup_batch_size": [16, 12, 1000], "global_batch_size": 64,
                 "decrease_batch_size_if_needed": True}),
        (DENSE, {"num_layers": None, "encoder_num_layers": 32}),
        (DENSE, {"vocab_size": None, "padded_vocab_size": 128512}),
        (DENSE, {"save": "/c", "save_interval": 100, "save_retain_interval": 500,
                 "lr_warmup_samples": 0, "lr_warmup_iters": 10, "data_path": "/d"}),
        # main of 2026 runs what core 0.15 refused
        (MIXTURE, {"bf16": None, "fp16": True}),
        (DENSE, {"rampup_batch_size": [32, 32, 1000]}),
        (DENSE, {"deterministic_mode": True, "use_flash_attn": True}),
        (MIXTURE, {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0,
                   "moe_token_dispatcher_type": "flex",
                   "moe_flex_dispatcher_backend": "hybridep"}),
        # and core 0.15 runs what later releases refuse
        (DENSE, {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}),
        (DENSE, {"mtp_num_layers": 1, "position_embedding_type": None,
                 "use_rotary_position_embeddings": True}),
        # one stage of all layers is one stage
        *((DENSE, {"pipeline_model_parallel_size": 1, flag: 32}) for flag in (
            "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
            "num_layers_per_virtual_pipeline_stage")),
        (DENSE, {"pipeline_model_parallel_size": 1, "num_virtual_stages_per_pipeline_rank": 1}),
        # a number that no release has may be a fork's
        (DENSE, {"adam_beta3": 0.9, "some_new_switch": 7}),
    ],
)  # fmt: skip
def test_legal_ones_are_priced(
    base: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Though they are near to a rule."""
    file = checked(tmp_path, base, **changes)

    assert illegal(file) == []
    assert file.run is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"}, "--vocab-size"),
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}, "linear"),
        ({"use_megatron_fsdp": True, "pipeline_model_parallel_size": 1,
          "ckpt_format": "fsdp_dtensor", "data_parallel_sharding_strategy": "optim_grads"},
         "optim_grads is not priced"),
    ],
)  # fmt: skip
def test_what_nobody_prices_is_not_illegal(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """A tokenizer from a hub runs, and its vocabulary is not in the file."""
    file = checked(tmp_path, DENSE, **changes)

    assert illegal(file) == []
    assert [one.kind for one in file.findings if said in one.text] == ["not priced"]


def found_of(file: CheckedFile, kind: str) -> list[str]:
    """Return the sentences of a kind."""
    return [one.text for one in file.findings if one.kind == kind]


def test_what_arguments_are_about(tmp_path: Path) -> None:
    """Known ones that no price depends on are said with a word, those of nobody as such."""
    changes = {"softmax_type": "learnable", "log_energy": True, "some_new_switch": 7}
    file = checked(tmp_path, DENSE, **changes)
    (about,) = found_of(file, "not priced")
    assert about.startswith("--softmax-type learnable (attention) ")
    assert found_of(file, "not understood") == ["--some-new-switch 7 may change time or memory"]
    assert "log-energy" in {entry.flag for entry in file.harmless}


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    """Not as misspelt and not understood, nor as without effect and not priced."""
    file = checked(tmp_path, DENSE, moe_router_topk=2, micro_batch_sise=2)
    assert [(one.kind, one.text[:18]) for one in file.findings] == [
        ("illegal", "--micro-batch-sise"),
        ("no effect", "--moe-router-topk "),
    ]


def test_a_batch_that_grows_is_priced_as_the_last_one(tmp_path: Path) -> None:
    """And said."""
    file = checked(tmp_path, DENSE, **SAMPLES, rampup_batch_size=[16, 16, 1000])
    assert [(one.kind, one.text) for one in file.findings] == [
        ("read", "--rampup-batch-size begins with 16 sequences, and 64 are priced")
    ]


@pytest.mark.parametrize("flag", ["decoder_first", "decoder_last"])
def test_one_stage_of_some_layers_is_one_finding(flag: str, tmp_path: Path) -> None:
    """It names the argument; that argument is not also without effect."""
    changes = {f"{flag}_pipeline_num_layers": 1, "pipeline_model_parallel_size": 1}
    (found,) = checked(tmp_path, DENSE, **changes).findings

    assert (found.id, found.kind) == ("megatron.placed.one-stage", "illegal")
    assert found.values["placed_words"] == f"--{flag.replace('_', '-')}-pipeline-num-layers 1"


def test_an_illegal_argument_is_not_also_without_effect(tmp_path: Path) -> None:
    """Only one of both can be true."""
    changes = {"use_distributed_optimizer": None, "use_precision_aware_optimizer": True}
    found = checked(tmp_path, DENSE, **changes).findings

    assert [one.id for one in found] == [
        "megatron.use-precision-aware-optimizer.needs.use-distributed-optimizer"
    ]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, "since.te-loss"),
        ({"mtp_num_layers": 1, "position_embedding_type": None,
          "use_rotary_position_embeddings": True}, "since.rotary-mtp"),
        ({"rampup_batch_size": [32, 32, 1000]}, "before.rampup"),
    ],
)  # fmt: skip
def test_what_some_releases_refuse_is_of_the_environment(
    changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    """The run is priced, and the finding names the releases."""
    file = checked(tmp_path, DENSE, **changes)
    found = [one for one in file.findings if one.id == f"megatron.{rule}"]

    assert [one.kind for one in found] == ["environment"]
    assert "core 0.1" in found[0].text
    assert file.run is not None


def test_what_only_earlier_releases_refuse(tmp_path: Path) -> None:
    """Is no error, and said with the release."""
    file = checked(tmp_path, MIXTURE, bf16=None, fp16=True)
    assert [text[-16:] for text in found_of(file, "environment")] == [" up to core 0.15"] * 2
    overlap = {"overlap_moe_expert_parallel_comm": True, "mtp_num_layers": 1}
    merged = checked(tmp_path, MIXTURE, **overlap, pipeline_model_parallel_size=1)
    assert found_of(merged, "environment")[-1] == (
        "--overlap-moe-expert-parallel-comm with MTP layers needs pipeline stages up to core 0.17"
    )
    muon = checked(tmp_path, DENSE, optimizer="muon")
    assert found_of(muon, "environment") == [
        "--optimizer muon excludes --use-distributed-optimizer up to core 0.17"
    ]


@pytest.mark.parametrize(
    ("gpu", "changes", "said"),
    [
        ("h100-80gb", {}, ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        ("gb200", {}, ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        ("h100-80gb", {"tp_comm_overlap": True},
         ["CUDA_DEVICE_MAX_CONNECTIONS",
          "--tp-comm-overlap and --overlap-moe-expert-parallel-comm"]),
    ],
)  # fmt: skip
def test_exchanges_beside_kernels_need_several_queues(
    gpu: str, changes: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    """Where transfers of tensor ranks need one, as before Blackwell, one of both is not hidden."""
    overlap = {"overlap_moe_expert_parallel_comm": True, "num_virtual_stages_per_pipeline_rank": 2}
    found = found_of(checked(tmp_path, MIXTURE, gpu=gpu, **overlap, **changes), "environment")
    assert [text[: len(one)] for text, one in zip(found, said, strict=True)] == said


def test_modules_on_the_host_need_their_variable(tmp_path: Path) -> None:
    """Of Transformer Engine, which else moves weights, too."""
    modules = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    (said,) = found_of(checked(tmp_path, DENSE, **modules), "environment")
    assert said.startswith("NVTE_CPU_OFFLOAD_V1 is not set, but --fine-grained-activation")


def test_deterministic_mode_needs_an_algorithm(tmp_path: Path) -> None:
    """Of NCCL, from the environment."""
    file = checked(tmp_path, DENSE, deterministic_mode=True)
    (said,) = found_of(file, "environment")
    assert said.startswith("NCCL_ALGO is not set, but --deterministic-mode needs Tree, Ring")


@pytest.mark.parametrize(
    ("cp", "kinds", "noted"),
    [(2, ["p2p", "a2a"], True), (1, ["p2p", "a2a"], False), (2, ["p2p", "p2p"], False)],
)
def test_kinds_of_context_parallelism_by_layer_are_priced_as_one(
    cp: int, kinds: list[str], noted: bool, tmp_path: Path
) -> None:
    file = checked(tmp_path, DENSE, context_parallel_size=cp, cp_comm_type=kinds * 16)
    assert illegal(file) == []
    assert ("megatron.cp-comm-types" in {one.id for one in file.findings}) == noted


def test_a_value_of_nothing_ends_in_a_sentence(tmp_path: Path) -> None:
    """Degrees and heads of 0 divide nothing."""
    zeros = ("num_attention_heads", "expert_model_parallel_size", "pipeline_model_parallel_size")
    for flag in zeros:
        found = illegal(checked(tmp_path, MIXTURE, **{flag: 0}))
        assert any("expected a positive integer, got '0'" in text for text in found), found


def test_a_flag_without_a_value_takes_none(tmp_path: Path) -> None:
    """`$MORE` behind it is no value of it: what it holds is not known, which is said."""
    found = illegal(checked(tmp_path, DENSE, use_distributed_optimizer="false"))
    assert found == ["--use-distributed-optimizer has no value, got 'false'"]

    file = checked(tmp_path, DENSE, sequence_parallel="$MORE")
    assert file.run is not None
    assert file.run.split.splits_sequence
    assert [(one.kind, one.text) for one in file.findings] == [
        ("read", "$MORE is known only at run time; using no value")
    ]


# --------------------------------------------------------------------------------------------------
# Advice in the words of the file.


@pytest.mark.whole
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (DENSE, {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 4}),
        (DENSE, {"num_layers": 31, "pipeline_model_parallel_size": 4,
                 "decoder_last_pipeline_num_layers": 7}),
        (DENSE, {"pipeline_model_parallel_size": 4,
                 "pipeline_model_parallel_layout": "Et*7|t*9|t*9|t*7L"}),
        (DENSE, {"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2,
                 "microbatch_group_size_per_virtual_pipeline_stage": 8}),
        (DENSE, {"recompute_activations": True, "tensor_model_parallel_size": 8}),
        (MIXTURE, {"moe_layer_recompute": True}),
        (DENSE, {"context_parallel_size": 4, "cp_comm_type": "a2a+p2p", "seq_length": 32768,
                 "hierarchical_context_parallel_sizes": [2, 2],
                 "max_position_embeddings": 32768}),
        (DENSE, {"defer_embedding_wgrad_compute": True, "pipeline_model_parallel_size": 4}),
        (DENSE, {"transformer_impl": "local"}),
    ],
)  # fmt: skip
def test_advice_is_in_the_words_of_the_file(
    base: dict[str, Any], changes: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """What goes is there, and what is left with what comes runs and has the price that is said."""
    file = checked(tmp_path, base, **changes)
    assert file.run is not None
    found = neighbours_of(assess(file.run, target), target, file.written)

    assert found.any is not None
    for neighbour in (found.one, found.two, found.any):
        if neighbour is None:
            continue
        for flag, before, after in neighbour.changes:
            assert before == (" ".join(file.words[flag]) if flag in file.words else None)
            assert before != after
        words = changed_words(file.words, neighbour.changes)
        arguments = {f"--{flag}": list(given) or True for flag, given in words.items()}
        again = checked(tmp_path, arguments)
        assert [one.text for one in again.findings if one.kind in ("illegal", "no effect")] == []
        assert again.run is not None
        priced = assess(again.run, target)
        assert priced.step == neighbour.assessment.step
        assert priced.fullest.peak_bytes == neighbour.assessment.fullest.peak_bytes
        assert "--tp-comm-overlap" not in arguments or "--transformer-impl" not in arguments


# --------------------------------------------------------------------------------------------------
# Devices, and what stands beside the arguments


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (DENSE, {"tp_comm_overlap": True}, "--tp-comm-overlap"),
        (MIXTURE, {"moe_token_dispatcher_type": "flex"}, "NVIDIA"),
    ],
)
def test_libraries_of_one_maker_are_not_on_the_devices_of_another(
    base: dict[str, Any], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert any(said in text for text in illegal(checked(tmp_path, base, gpu="mi300x", **changes)))
    assert not any(said in text for text in illegal(checked(tmp_path, base, **changes)))


_BESIDE = {"overlap_moe_expert_parallel_comm": True, "pipeline_model_parallel_size": 1}
_HOSTED = {"fine_grained_activation_offloading": True, "offload_modules": "core_attn"}


@pytest.mark.parametrize(
    ("changes", "variables", "said"),
    [
        (_BESIDE, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "_CONNECTIONS is 1, but"),
        (_BESIDE, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, None),
        (_HOSTED, {}, "--fine-grained-activation"),
        (_HOSTED, {"NVTE_CPU_OFFLOAD_V1": "0"}, "NVTE_CPU_OFFLOAD_V1 is 0, but --fine-grained"),
        (_HOSTED, {"NVTE_CPU_OFFLOAD_V1": "1"}, None),
    ],
)
def test_settings_have_the_environment_that_they_need(
    changes: dict[str, Any], variables: dict[str, str], said: str | None, tmp_path: Path
) -> None:
    checked(tmp_path, MIXTURE, **changes)
    path = tmp_path / "launch.json"
    document = json.loads(path.read_text())
    document["ENV_VARS"] |= variables
    path.write_text(json.dumps(document))
    file = read_checked(str(path), world_size=32, gpu="h100-80gb")
    found = [one.text for one in file.findings if "CONNECT" in one.text or "NVTE" in one.text]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize("steps", ["0:64 250B:384", "250b:384,0:64", "0:384"])
def test_a_schedule_of_batches_is_priced_at_its_last(steps: str, tmp_path: Path) -> None:
    """The finding names the first batch if it is another one, like that of a ramp-up."""
    file = checked(tmp_path, DENSE, global_batch_size=None, step_batch_size_schedule=steps)
    assert file.run is not None
    assert file.run.strategy.global_batch == 384
    said = [one.values["start"] for one in file.findings if one.id == "megatron.ramp"]
    assert said == ([64] if "64" in steps else [])
