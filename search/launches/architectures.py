"""Published models by the names that trainers give them: sizes in the words of Megatron-Core.

A model that is shipped (`models/`) has its sizes there alone; the others are below, from the
`config.json` that each is published with. How a model is trained is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.documents.spec import load_spec
from autopar.model import ModelSpec

__all__ = ["architecture", "architecture_names"]

Sizes = dict[str, Any]
"""Fields of Megatron-Core's `TransformerConfig` and of Bridge's `GPTModelProvider`; the rest is
theirs by default."""

_SHIPPED = {
    "llama2_7b": "llama2-7b",
    "llama2_13b": "llama2-13b",
    "llama2_70b": "llama2-70b",
    "llama3_8b": "llama3-8b",
    "llama31_8b": "llama3-8b",
    "llama3_70b": "llama3-70b",
    "llama31_70b": "llama3-70b",
    "llama31_405b": "llama3-405b",
    "mistral_7b": "mistral-7b",
    "mixtral_8x7b": "mixtral-8x7b",
    "qwen25_7b": "qwen2.5-7b",
    "qwen25_72b": "qwen2.5-72b",
}
"""Name here, and folder of `models/`; Llama 3.1 has the sizes of Llama 3."""
_RMS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
"""What all of them have in common."""


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


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, groups: int = 8, **more: Any) -> Sizes:
    return _sizes(layers, hidden, ffn, heads, groups, 128, 151936, qk_layernorm=True, **more)


def _mixture(number: int, per_token: int, width: int, **more: Any) -> Sizes:
    return {
        "num_moe_experts": number,
        "moe_router_topk": per_token,
        "moe_ffn_hidden_size": width,
        **more,
    }


def _deepseek(heads: int, experts: int, dense: int, vocab: int, **more: Any) -> Sizes:
    """Return DeepSeek-V3's shape: latent attention, a few dense layers, a shared expert."""
    return {
        **_sizes(61, 7168, 18432, heads, heads, 128, vocab),
        **_mixture(experts, 8, 2048, moe_shared_expert_intermediate_size=2048),
        "moe_layer_freq": [0] * dense + [1] * (61 - dense),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "multi_latent_attention": True,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "qk_layernorm": True,
        **more,
    }


def _gpt_oss(layers: int, experts: int) -> Sizes:
    """Return GPT-OSS's shape: biases, and windows of 128 tokens in every other layer."""
    return {
        **_sizes(layers, 2880, 2880, 64, 8, 64, 201088),
        **_mixture(experts, 4, 2880),
        "add_bias_linear": True,
        "position_embedding_type": "yarn",
        "window_size": [127, 0],
        "window_attn_skip_freq": 2,
    }


_TIED = {"share_embeddings_and_output_weights": True}
_PUBLISHED: Mapping[str, Sizes] = {
    "llama32_1b": _sizes(16, 2048, 8192, 32, 8, 64, 128256, **_TIED),
    "llama32_3b": _sizes(28, 3072, 8192, 24, 8, 128, 128256, **_TIED),
    "qwen3_600m": _qwen3(28, 1024, 3072, 16, **_TIED),
    "qwen3_1p7b": _qwen3(28, 2048, 6144, 16, **_TIED),
    "qwen3_4b": _qwen3(36, 2560, 9728, 32, **_TIED),
    "qwen3_8b": _qwen3(36, 4096, 12288, 32),
    "qwen3_14b": _qwen3(40, 5120, 17408, 40),
    "qwen3_32b": _qwen3(64, 5120, 25600, 64),
    "qwen3_30b_a3b": _qwen3(48, 2048, 6144, 32, 4, **_mixture(128, 8, 768)),
    "qwen3_235b_a22b": _qwen3(94, 4096, 12288, 64, 4, **_mixture(128, 8, 1536)),
    "deepseek_v3": _deepseek(128, 256, 3, 129280, mtp_num_layers=1),
    "kimi_k2": _deepseek(64, 384, 1, 163840),
    "gpt_oss_20b": _gpt_oss(24, 32),
    "gpt_oss_120b": _gpt_oss(36, 128),
}
"""From the `config.json` of meta-llama, Qwen, deepseek-ai, moonshotai and openai on the Hugging
Face hub; names as Megatron-Bridge's recipes have them."""


def architecture_names() -> tuple[str, ...]:
    """Return the names that `architecture` knows, the longest first."""
    return tuple(sorted({*_SHIPPED, *_PUBLISHED}, key=lambda name: (-len(name), name)))


def architecture(name: str) -> Sizes | None:
    """Return the sizes of a model by its name, such as `qwen3_30b_a3b`; None for an unknown one."""
    if name in _PUBLISHED:
        return {**_PUBLISHED[name]}
    shipped = _SHIPPED.get(name)
    return None if shipped is None else _of_spec(load_spec(shipped))


def _of_spec(spec: ModelSpec) -> Sizes:
    """Return the sizes of a shipped decoder; all of `_SHIPPED` have one type of layer."""
    (layer,) = spec.layers
    assert layer.num_heads is not None, "a shipped model has them"
    heads, hidden, ffn = layer.num_heads, layer.hidden_size, layer.ffn_hidden_size
    assert ffn is not None, "as it has this"
    assert spec.vocab_size is not None, "and this"
    sizes = _sizes(
        layer.num_layers,
        hidden,
        ffn,
        heads,
        layer.num_kv_heads or heads,
        layer.head_dim or hidden // heads,
        spec.vocab_size,
        share_embeddings_and_output_weights=spec.tied_embeddings,
        add_qkv_bias=layer.qkv_biases,
    )
    if layer.num_experts is not None:
        sizes |= _mixture(layer.num_experts, layer.experts_per_token or 1, ffn)
    return sizes
