"""Published `config.json` of every family that is read, and how many parameters each has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.spec import length_key, load_spec, write_spec
from autopar.errors import DocumentError, InputError
from autopar.families.config import parse_hugging_face
from autopar.price.parameters import stage_weights
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec, model_parameter_count
from autopar.run.of_plan import uniform_model
from autopar.run.plan import tensor_degrees
from tests.runs import run_of

DATA = Path(__file__).resolve().parents[2] / "data"
FILES = json.loads((DATA / "published_configs.json").read_text(encoding="utf-8"))
"""What each file says of the architecture, and the parameters that transformers 4.57.6 counts of
it on the device `meta` (`tests/parity/test_transformers_counts.py` counts them again)."""
BILLIONS = {  # what papers and model cards say, none of them counted here
    "llama-3.1-8b": 8.03,
    "mixtral-8x7b": 46.7,
    "mixtral-8x22b": 140.6,
    "qwen1.5-moe-a2.7b": 14.3,
    "qwen2-57b-a14b": 57.4,
    "qwen3-8b": 8.2,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1,
    "deepseek-v2": 236,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1026,
    "kimi-linear-48b": 49.1,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "glm-4.5-air": 106.9,
    "gemma-2-9b": 9.24,
    "gemma-2-27b": 27.2,
    "gemma-3-27b": 27.0,
    "gemma-4-31b": 30.7,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-e4b": 7.46,
    "gemma-4-e2b": 2.28 + 35 * 256 * 262144 / 1e9,
    "phi-4": 14.7,
    "olmo-2-32b": 32.2,
    "olmoe-1b-7b": 6.9,
    "falcon-40b": 41.3,
    "bloom": 176.2,
    "gpt-neox-20b": 20.6,
    "starcoder": 15.5,
    "mpt-7b": 6.65,
    "hunyuan-a13b": 80.4,
    "internlm3-8b": 8.8,
    "xlm-roberta-large": 0.56,
}


NOT_UNIFORM = {
    *("gemma-4-e2b", "t5-3b", "flan-t5-xl", "bert-large", "olmo-7b"),
    "xlm-roberta-large",
}


def spec_of(name: str) -> ModelSpec:
    """Return the spec of a published file."""
    return parse_hugging_face(Path(f"{name}.json"), FILES[name]["config"])


@pytest.mark.parametrize("name", FILES)
def test_every_parameter_of_a_published_model_is_counted(name: str) -> None:
    """To the last one, without modules of further tokens, which transformers leaves out."""
    assert model_parameter_count(spec_of(name), mtp=False) == FILES[name]["parameters"]


@pytest.mark.parametrize("name", BILLIONS)
def test_counts_are_those_of_model_cards(name: str) -> None:
    """Within the digits that are published."""
    counted = FILES[name]["parameters"] / 1e9
    assert counted == pytest.approx(BILLIONS[name], rel=6e-3)


def test_modules_of_further_tokens_are_counted_apart() -> None:
    """The checkpoint of GLM-4.5 has 358,337,791,296 with its module, its tables and 90 biases.

    Tables of embedding and head are stored twice, and each mixture's balancing biases with them.
    """
    spec = spec_of("glm-4.5")
    tables, biases = 2 * 151552 * 5120, 90 * 160
    assert model_parameter_count(spec) + tables + biases == 358_337_791_296


@pytest.mark.parametrize("name", FILES)
def test_a_model_is_written_and_read_again(name: str, tmp_path: Path) -> None:
    """As our own file."""
    write_spec(spec_of(name), tmp_path / "model.json")
    assert load_spec(str(tmp_path / "model.json")) == spec_of(name)


def types(name: str) -> list[tuple[int, int | None, int, int | None]]:
    """Return layers, window, whole ones and experts of each type."""
    return [
        (layer.num_layers, layer.window, layer.whole_every, layer.num_experts)
        for layer in spec_of(name).layers
    ]


def test_layers_are_as_the_files_say() -> None:
    """Dense ones first, windows in turn, and experts in every second layer."""
    assert types("deepseek-v3") == [(3, None, 0, None), (58, None, 0, 256)]
    assert types("gpt-oss-20b") == [(24, 128, 2, 32)]
    assert types("gemma-3-27b") == [(62, 1024, 6, None)]
    assert types("olmo-3-7b") == [(32, 4096, 4, None)]
    assert types("mistral-7b-v0.1") == [(32, 4096, 0, None)]
    # the key that says a window says as well that it is not used
    assert types("qwen2.5-7b") == [(28, None, 0, None)]
    assert types("llama4-maverick") == [(24, 8192, 0, None), (24, 8192, 2, 128)]
    assert spec_of("llama4-maverick").interleaved
    assert spec_of("llama4-scout").name == "llama4-scout-text"


@pytest.mark.parametrize("name", FILES)
def test_what_a_uniform_model_can_say_it_says(name: str) -> None:
    """Every decoder with norms that have parameters becomes one; others say why not."""
    spec = spec_of(name)
    if name in NOT_UNIFORM:
        words = {
            "olmo-7b": "neither RMSNorm nor LayerNorm", "gemma-4-e2b": "dense MLPs of two kinds"
        }.get(name, "decoder-only")  # fmt: skip
        with pytest.raises(InputError, match=words):
            uniform_model(spec)
        return
    model = uniform_model(spec)
    assert model.num_layers == spec.num_layers
    found = [layer.attention for layer in model.each_layer]
    assert sum(one is not None and one.window is not None for one in found) == sum(
        map(narrow_layers, spec.layers)
    )


def unsaid(layer: LayerSpec) -> int:
    """Return the parameters of a layer that no run says: vectors beside its matrices."""
    heads, experts = layer.num_heads or 0, layer.num_experts or 0
    found = heads * layer.attention_sinks + experts * layer.router_biases
    return found + layer.hidden_size * layer.shared_expert_gate


@pytest.mark.parametrize("name", sorted(set(FILES) - NOT_UNIFORM - {"gemma-4-e4b"}))
def test_a_run_has_the_parameters_of_its_model(name: str) -> None:
    """Tensor by tensor, modules of further tokens included, but for a few vectors.

    The rule layer-inputs refuses a run of Gemma 4 E4B.
    """
    spec = spec_of(name)
    run = run_of(replace(uniform_model(spec), vocab_divisor=1))
    counted = sum(weight.elements for chunk in stage_weights(run, 0) for weight in chunk)
    beside = sum(layer.num_layers * unsaid(layer) for layer in spec.layers)
    # of BLOOM the norm behind the embedding, of Phi the head's biases
    ends = spec.extra_embedding_parameters + spec.extra_head_parameters
    assert counted + beside + ends == model_parameter_count(spec)


def narrow_layers(layer: LayerSpec) -> int:
    """Return how many layers of a type have its window."""
    whole = layer.num_layers // layer.whole_every if layer.whole_every else 0
    return 0 if layer.window is None else layer.num_layers - whole


def test_heads_divide_where_the_model_lets_them() -> None:
    """Latent attention splits its heads, of which all have keys and values of their own."""
    (dense, _) = spec_of("deepseek-v3").layers
    assert tensor_degrees(dense) == (1, 2, 4, 8, 16, 32, 64, 128)


def refused(tmp_path: Path, config: dict[str, Any]) -> str:
    """Return what is said of a file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(DocumentError) as caught:
        load_spec(str(path))
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "jamba"}, "recurrence instead of attention"),
        ({"model_type": "qwen3_next"}, "key 'linear_num_key_heads': this key is missing"),
        ({"layer_types": ["full_attention"]}, "expected a list of 36 kinds of layers"),
        (
            {"layer_types": ["linear_attention"] * 27 + ["full_attention"] * 9},
            "27 of 36 layers are 'linear_attention'",
        ),
        ({"layer_types": ["sliding_attention"] * 36}, "key 'sliding_window'"),
        ({"num_experts": 8}, "one MLP per layer"),
        (
            {"text_config": {"model_type": "qwen9"}, "model_type": "qwen9_vl"},
            "'qwen9_vl', expected",
        ),
    ],
)
def test_what_a_spec_cannot_say_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """And never read as something else."""
    assert words in refused(tmp_path, {**FILES["qwen3-8b"]["config"], **change})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("llama-3.1-8b", "max_position_embeddings"),
        ("llama4-scout", "max_position_embeddings"),
        # its file leaves the key out, and the family has a default
        ("gemma-3-27b", "max_position_embeddings that the family has by default"),
    ],
)
def test_a_length_that_nobody_chose_has_a_key(name: str, key: str, tmp_path: Path) -> None:
    """Which planner and profiler say; files of ours and shipped names say the length meant."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FILES[name]["config"]))
    assert length_key(str(path)) == key
    write_spec(spec_of(name), tmp_path / "model.json")
    assert length_key(str(tmp_path / "model.json")) is None
    assert length_key("llama3-8b") is None


# --------------------------------------------------------------------------------------------------
# Files that leave something out, or say it otherwise


def _behind(family: str, **more: Any) -> list[tuple[int | None, int]]:
    """Return experts and the width of the shared MLP of every layer of a file."""
    config = {
        **FILES["deepseek-v3" if family.startswith("deepseek") else "glm-4.5-air"]["config"],
        "model_type": family,
        "num_hidden_layers": 6,
    }
    for key in ("first_k_dense_replace", "n_shared_experts", "moe_layer_freq"):
        config.pop(key, None)
    spec = parse_hugging_face(Path("own.json"), {**config, **more})
    return [
        (layer.num_experts, (layer.shared_expert_width or 0) // layer.ffn_hidden_size)
        for layer in spec.layers
        for _ in range(layer.num_layers)
    ]


@pytest.mark.parametrize(
    ("family", "more", "dense", "shared"),
    [
        ("deepseek_v3", {}, [0, 1, 2], 1),
        ("deepseek_v2", {}, [], 2),
        ("glm4_moe", {}, [0], 1),
        ("deepseek_v3", {"first_k_dense_replace": 0, "n_shared_experts": None}, [], 0),
        ("deepseek_v2", {"moe_layer_freq": 3}, [1, 2, 4, 5], 2),
        ("deepseek_v2", {"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, [0, 3], 2),
    ],
)
def test_what_a_mixture_leaves_out_is_what_transformers_takes(
    family: str, more: dict[str, Any], dense: list[int], shared: int
) -> None:
    found = _behind(family, **more)
    assert [place for place, (experts, _) in enumerate(found) if experts is None] == dense
    assert {width for experts, width in found if experts is not None} == {shared}


@pytest.mark.parametrize("turns", [[1, 0], [0, 1, 1, 0, 1, 2], 0, "all"])
def test_turns_that_are_of_no_layer_are_refused(turns: object) -> None:
    with pytest.raises(DocumentError, match="moe_layer_freq"):
        _behind("deepseek_v2", moe_layer_freq=turns)


@pytest.mark.parametrize(
    ("outer", "own", "inner", "billions"),
    [
        ("qwen3_vl_moe", "qwen3-235b-a22b", "qwen3_vl_moe_text", 235.09),
        ("qwen3_vl", "qwen3-8b", "qwen3_vl_text", 8.19),
        ("qwen2_5_vl", "qwen2.5-7b", "qwen2_5_vl_text", 7.62),
        ("qwen2_5_vl", "qwen2.5-7b", None, 7.62),
        ("glm4v_moe", "glm-4.5-air", "glm4v_moe_text", 106.85),
    ],
)
def test_models_that_see_pictures_have_their_part_for_text(
    outer: str, own: str, inner: str | None, billions: float
) -> None:
    """Its keys stand in a section, or at the top as in files of the first releases."""
    text = {**FILES[own]["config"], "num_nextn_predict_layers": 0}
    sections: dict[str, Any] = {"text_config": {**text, "model_type": inner}} if inner else text
    file = {**sections, "model_type": outer, "vision_config": {"hidden_size": 1280}}
    spec = parse_hugging_face(Path("own.json"), file)
    assert spec.name == "own-text"
    assert model_parameter_count(spec) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("hidden", "width", "heads", "parameters"),
    [
        (1024, 6656, 16, 354_483_968),
        (1536, 10240, 24, 742_489_344),
        (2048, 12288, 32, 1_170_340_608),
    ],
)
def test_lfm2_has_the_parameters_of_its_card(
    hidden: int, width: int, heads: int, parameters: int
) -> None:
    """Model cards of LiquidAI/LFM2-350M, LFM2-700M and LFM2-1.2B, to the last parameter."""
    file = {
        "model_type": "lfm2",
        "hidden_size": hidden,
        "block_ff_dim": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
    }
    spec = parse_hugging_face(Path("own.json"), file)
    assert model_parameter_count(spec) == parameters


def test_minimax_m2_has_one_norm_of_all_heads() -> None:
    """Its card says 230 billion, the files of its weights 228.7."""
    file = {
        "model_type": "minimax_m2",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "num_attention_heads": 48,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 200064,
        "use_qk_norm": True,
    }
    spec = parse_hugging_face(Path("own.json"), file)
    assert (spec.layers[0].wide_qk_norms, spec.layers[0].gated_mlp) == (True, True)
    assert model_parameter_count(spec) / 1e9 == pytest.approx(228.69, abs=0.01)
