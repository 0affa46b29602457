"""Sizes of published models by recipe name, with the field names of Megatron-Core.

Sizes of shipped models are read from `models/`. The other sizes are in this module and come from
the published `config.json` of each model. Training settings are not part of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.documents.spec import load_spec
from autopar.run.architecture import DeltaNet, Model, windows_of
from autopar.run.of_plan import uniform_model
from search.engines.megatron.stages import letters_of

Sizes = dict[str, Any]
"""Fields of Megatron-Core's `TransformerConfig` and Megatron-Bridge's `GPTModelProvider`.

Missing fields have the defaults of these classes.
"""

_SHIPPED = {
    "llama2_7b": "llama2-7b",
    "llama2_13b": "llama2-13b",
    "llama2_70b": "llama2-70b",
    "llama3_8b": "llama3-8b",
    "llama31_8b": "llama3-8b",
    "llama3_70b": "llama3-70b",
    "llama31_70b": "llama3-70b",
    "llama31_405b": "llama3-405b",
    "llama32_1b": "llama3.2-1b",
    "llama32_3b": "llama3.2-3b",
    "mistral_7b": "mistral-7b",
    "mixtral_8x7b": "mixtral-8x7b",
    "qwen25_500m": "qwen2.5-0.5b",
    "qwen25_1p5b": "qwen2.5-1.5b",
    "qwen25_7b": "qwen2.5-7b",
    "qwen25_14b": "qwen2.5-14b",
    "qwen25_32b": "qwen2.5-32b",
    "qwen25_72b": "qwen2.5-72b",
    "qwen3_600m": "qwen3-0.6b",
    "qwen3_1p7b": "qwen3-1.7b",
    "qwen3_4b": "qwen3-4b",
    "qwen3_8b": "qwen3-8b",
    "qwen3_14b": "qwen3-14b",
    "qwen3_32b": "qwen3-32b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v32": "deepseek-v3.2",
    "glm45_air_106b": "glm-4.5-air",
    "glm5": "glm-5",
    "kimi_k2": "kimi-k2",
    "nemotron_3_nano": "nemotron-3-nano",
    "nemotron_3_super": "nemotron-3-super",
    "qwen3_next_80b_a3b": "qwen3-next-80b",
    "gpt_oss_20b": "gpt-oss-20b",
    "gpt_oss_120b": "gpt-oss-120b",
}
"""Folder of `models/` for each name; Llama 3.1 has the sizes of Llama 3."""
_SIGMOID_ROUTER: Mapping[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
INDEXER_LOSS = 0.001
"""Weight of the loss of an indexer in Megatron-Bridge's recipes of GLM-5."""
_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 2.5},
    "deepseek_v32": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 2.5},
    "glm45_air_106b": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 1.0},
    "glm5": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 2.5},
    "kimi_k2": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 2.827},
    "nemotron_3_nano": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 2.5},
    "nemotron_3_super": {**_SIGMOID_ROUTER, "moe_router_topk_scaling_factor": 5.0},
}
"""Router fields from `config.json`, and from Megatron-Bridge's `models` for their loss, that
`models/` does not contain, by name."""
_RMS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""Common fields of all models in this module."""


def _sizes(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, width: int, vocab: int, **more: Any
) -> Sizes:
    return {
        **_RMS,
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": width,
        "vocab_size": vocab,
        **more,
    }


def architecture_names() -> tuple[str, ...]:
    """Return the names that `architecture` accepts, longest first."""
    return tuple(sorted(_SHIPPED, key=lambda name: (-len(name), name)))


def architecture(name: str) -> Sizes | None:
    """Return the sizes of a model; None for an unknown name.

    name : architecture name such as `qwen3_30b_a3b`, or shipped name such as `qwen3-30b-a3b`.
    """
    own = next((own for own, shipped in _SHIPPED.items() if name in (own, shipped)), None)
    if own is None:
        return None
    return {**_of_model(uniform_model(load_spec(_SHIPPED[own]))), **_BESIDE.get(own, {})}


def _of_model(model: Model) -> Sizes:
    """Return the sizes of a decoder by field name of Megatron-Core."""
    attention, latent, experts = model.attention, model.attention.latent, model.experts
    biases = model.last.biases
    window, whole_every = windows_of(model)
    found = _sizes(
        model.num_layers,
        model.hidden,
        model.dense_width or 4 * model.hidden,
        attention.heads,
        attention.kv_heads,
        attention.width if latent is None else latent.key_width,
        model.vocab,
        share_embeddings_and_output_weights=model.tied,
        add_bias_linear=biases,
        add_qkv_bias=attention.qkv_biases and not biases,
        qk_layernorm=attention.head_norms != "none",
    )
    if not any(one.gates == 2 for one in model.kinds):
        # of the shipped models only those of Nemotron
        found |= {"gated_linear_unit": False, "activation_func": "squared_relu"}
    if model.positions == "none":
        found["position_embedding_type"] = "none"
    elif attention.rotary_share != 1.0:
        found["rotary_percent"] = attention.rotary_share
    found |= mixer_sizes(model)
    if attention.yarn:
        found["position_embedding_type"] = "yarn"
    if model.mtp:
        found["mtp_num_layers"] = model.mtp
    if window is not None:
        # Megatron-Core counts the tokens before a query, without the query itself.
        found["window_size"] = [window - 1, 0]
        found["window_attn_skip_freq"] = whole_every
    if latent is not None:
        found |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.kv_rank,
            "qk_head_dim": latent.key_width,
            "qk_pos_emb_head_dim": latent.rotary_width,
            "v_head_dim": attention.value_width,
        }
    if experts is not None:
        found |= {
            "num_moe_experts": experts.number,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.width,
        }
        if experts.latent is not None:
            found["moe_latent_size"] = experts.latent
        if experts.groups > 1:
            found["moe_router_num_groups"] = experts.groups
            found["moe_router_group_topk"] = experts.groups_per_token
        if experts.clamped:
            found["activation_func_clamp_value"] = 7.0
        if experts.shared_width:
            found["moe_shared_expert_intermediate_size"] = experts.shared_width
        if not all(model.mixtures) and not model.is_hybrid:
            found["moe_layer_freq"] = [int(kind) for kind in model.mixtures]
    return found


def mixer_sizes(model: Model) -> Sizes:
    """Return the fields of gated and sparse attention, other mixers, and layers of one part."""
    found: Sizes = {"attention_output_gate": True} if model.attention.gated else {}
    mamba, delta, sparse = model.first_mamba, model.first_delta, model.first_sparse
    if sparse is not None and sparse.indexer is not None:
        indexer = sparse.indexer
        found |= {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_n_heads": indexer.heads,
            "dsa_indexer_head_dim": indexer.width,
            "dsa_indexer_topk": indexer.topk,
            "dsa_indexer_loss_coeff": INDEXER_LOSS if indexer.trained else None,
            "dsa_indexer_use_sparse_loss": indexer.trained,
            "apply_rope_fusion": False,
        }
        if indexer.every > 1:
            found["dsa_indexer_topk_freq"] = indexer.every
            found["dsa_indexer_skip_topk_offset"] = (*model.reused, True).index(True)
    if model.is_hybrid:
        main = "".join(map(letters_of, model.each_layer))
        further = "".join(map(letters_of, model.each_mtp))
        pattern = "/".join((main, *[further] * model.mtp))
        found |= {"is_hybrid_model": True, "hybrid_layer_pattern": pattern}
    if mamba is not None:
        found |= {
            "mamba_num_heads": mamba.heads,
            "mamba_head_dim": mamba.width,
            "mamba_state_dim": mamba.state,
            "mamba_num_groups": mamba.groups,
        }
    if delta is not None:
        linear = [int(isinstance(one.recurrent, DeltaNet)) for one in model.each_layer]
        found |= {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": linear,
            "linear_num_key_heads": delta.key_heads,
            "linear_num_value_heads": delta.value_heads,
            "linear_key_head_dim": delta.key_width,
            "linear_value_head_dim": delta.value_width,
            "linear_conv_kernel_dim": delta.kernel,
        }
    return found
