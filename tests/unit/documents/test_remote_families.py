"""Families whose code is with their checkpoints, and families with other names of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar.command import lists
from autopar.errors import DocumentError
from autopar.families.config import family_names, parse_hugging_face
from autopar.run.model import ModelSpec, model_parameter_count

LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}  # fmt: skip
GLM: dict[str, Any] = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40,
    "ffn_hidden_size": 13696, "multi_query_group_num": 2, "multi_query_attention": True,
    "kv_channels": 128, "seq_length": 8192, "padded_vocab_size": 151552, "add_qkv_bias": True,
    "add_bias_linear": False, "rmsnorm": True, "tie_word_embeddings": False,
}  # fmt: skip
EXAONE = {key: one for key, one in LLAMA.items() if key != "num_hidden_layers"}
MINIMAX: dict[str, Any] = {
    "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 80, "intermediate_size": 9216, "num_local_experts": 32,
    "num_experts_per_tok": 2, "vocab_size": 200064, "max_position_embeddings": 10240000,
    "attn_type_list": [int(at % 8 == 7) for at in range(80)], "tie_word_embeddings": False,
}  # fmt: skip


def read(**config: Any) -> ModelSpec:
    """Return the spec of a file."""
    return parse_hugging_face(Path("config.json"), config)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({**LLAMA, "model_type": "internlm2", "vocab_size": 92544, "bias": False}, 7_737_708_544),
        ({**EXAONE, "model_type": "exaone", "num_layers": 32, "vocab_size": 102400},
         7_818_448_896),
        ({**LLAMA, "model_type": "qwen", "num_key_value_heads": None, "intermediate_size": 22016,
          "vocab_size": 151936, "no_bias": True}, 7_721_324_544),
        (GLM, 9_399_951_360),
        ({**GLM, "num_layers": 28, "padded_vocab_size": 65024}, 6_243_584_000),
    ],
    ids=["internlm2-7b", "exaone-3-7.8b", "qwen-7b", "glm-4-9b", "chatglm3-6b"],
)  # fmt: skip
def test_parameters_are_those_of_the_checkpoint(config: dict[str, Any], parameters: int) -> None:
    """The totals of their model cards, to the last parameter."""
    assert model_parameter_count(read(**config)) == parameters


@pytest.mark.parametrize("family", ["minimax", "minimax_m1", "minimax_text_01"])
def test_names_of_minimax_are_one_family(family: str) -> None:
    """456 billion are published for MiniMax-M1."""
    spec = read(**MINIMAX, model_type=family)
    assert model_parameter_count(spec) == pytest.approx(456e9, rel=1e-3)


KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 72, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "vocab_size": 163840, "model_max_length": 1048576, "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [at for at in range(1, 27) if at % 4],
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
"""Kimi-Linear-48B-A3B."""


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # one bias per expert and layer, which is no parameter, is in the checkpoint as well
        (KIMI, 49_122_675_072),
        ({**MINIMAX, "model_type": "minimax"}, 456_089_655_296),
    ],
    ids=["kimi-linear", "minimax-text-01"],
)
def test_linear_attention_has_the_parameters_of_transformers(
    config: dict[str, Any], parameters: int
) -> None:
    """Sums over `parameters()` of the models of transformers 5.24 on the device meta."""
    assert model_parameter_count(read(**config)) == parameters


def test_kimi_delta_attention_is_in_listed_layers() -> None:
    """In files of transformers 5 a list has the kinds of all layers."""
    spec = read(**KIMI)
    mixers = [bool(spec.layers[kind].mixers) for kind in spec.layer_types]
    assert [at for at, mixed in enumerate(mixers, 1) if not mixed] == [4, 8, 12, 16, 20, 24, 27]
    kinds = ["linear_attention" if mixed else "full_attention" for mixed in mixers]
    own = {key: one for key, one in KIMI.items() if key != "linear_attn_config"}
    assert read(**own, layer_types=kinds, linear_num_heads=32) == spec


def test_gemma_4_has_full_attention_in_its_last_layer() -> None:
    """And in every sixth: with wider heads, and with keys as values if the file sets that."""
    text = {**LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 8, "head_dim": 256,
            "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": None}  # fmt: skip
    spec = read(model_type="gemma4", text_config=text)
    assert spec.layer_types == (0, 0, 0, 0, 0, 1, 0, 1)
    assert [(one.head_dim, one.window, one.keys_as_values) for one in spec.layers] == [
        (256, 512, False),
        (512, None, True),
    ]
    # without keys as values the other number of key-value heads has no effect
    other = read(model_type="gemma4", text_config={**text, "attention_k_eq_v": False})
    assert other.layers[1].num_kv_heads == other.layers[0].num_kv_heads


def test_mimo_has_further_tokens() -> None:
    """Qwen 2 with MTP layers, which are counted apart."""
    spec = read(**LLAMA, model_type="mimo", vocab_size=151680, num_nextn_predict_layers=1)
    assert spec.mtp_layers == 1
    assert all(one.qkv_biases for one in spec.layers)


def test_a_window_of_mellum_needs_no_switch() -> None:
    """Qwen 3 mixtures have one; `layer_types` alone decides here."""
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 896}
    kinds = ["full_attention", *["sliding_attention"] * 3] * 8
    config = {**LLAMA, **sparse, "vocab_size": 98304, "sliding_window": 1024, "layer_types": kinds}
    windows = {one.window for one in read(**config, model_type="mellum").layers}
    assert 1024 in windows
    with pytest.raises(DocumentError, match="sliding_window"):
        read(**config, model_type="qwen3_moe")


def test_values_of_minicpm3_have_a_default_width() -> None:
    """The hidden size over the heads, where the file has none."""
    latent = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
              "qk_rope_head_dim": 32}  # fmt: skip
    config = {**LLAMA, **latent, "model_type": "minicpm3", "vocab_size": 73448, "hidden_size": 2560,
              "num_attention_heads": 40, "num_hidden_layers": 62, "intermediate_size": 6400,
              "tie_word_embeddings": True}  # fmt: skip
    assert model_parameter_count(read(**config)) == pytest.approx(4.07e9, rel=2e-3)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"swa_num_key_value_heads": 4, "hybrid_layer_pattern": [0, 1]},
         "other heads in layers with a window"),
        ({"compress_ratios": [0, 4, 128], "index_topk": 512}, "attention to compressed keys"),
        ({"index_topk": 512}, "attention to tokens chosen by an indexer"),
        ({"mamba_d_state": 16}, "recurrence instead of attention"),
    ],
)  # fmt: skip
def test_the_true_reason_is_given(more: dict[str, Any], reason: str) -> None:
    """The first thing that no `model.json` can express."""
    with pytest.raises(DocumentError, match=reason):
        read(**LLAMA, **more, model_type="newcomer", vocab_size=1000)


def test_biases_of_the_output_of_attention_are_named() -> None:
    """Phi-3.5-MoE has biases in all projections of attention and none in its experts."""
    sparse = {"num_local_experts": 16, "num_experts_per_tok": 2, "attention_bias": True}
    with pytest.raises(DocumentError, match="without those of the MLP"):
        read(**LLAMA, **sparse, model_type="phimoe", vocab_size=32064)


def test_names_of_families_are_the_start_of_what_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each once, without versions. HyperCLOVA X is none of Hunyuan's."""
    assert lists.run(["--all"], "models") == 0
    shown = " ".join(capsys.readouterr().out.split())
    names = family_names()
    assert {"bert", "bloom", "glm", "starcoder", "t5", "xverse"} <= {*names}
    assert [one for one in names if one.startswith(tuple({*names} - {one}))] == ["hyperclovax"]
    assert ", ".join(names) in shown
