"""Specs: counted parameters against published totals, and every way to name a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.catalog import model_names
from autopar.documents.sidecar import describe_model
from autopar.documents.spec import bare_spec, load_spec, write_spec
from autopar.errors import DocumentError, InputError, OptionError
from autopar.families.config import parse_hugging_face
from autopar.rates.model import activation_bytes
from autopar.records import replace
from autopar.run.model import (
    LayerSpec,
    ModelSpec,
    embedding_parameter_counts,
    padded_vocab_size,
    parameter_count,
)
from autopar.run.of_plan import model_of_spec
from profiler.options import SizeOptions
from search.commands import search

PUBLISHED = {  # totals of the model cards; gpt-6.7b and bert-large (MLM head) counted by hand
    "gpt2-xl": 1_557_611_200,
    "gpt-6.7b": 6_658_404_352,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "t5-3b": 2_851_598_336,
    "bert-large": 335_174_458,
    "bert-base": 109_514_298,
    "bert-huge-32": 671_079_482,  # counted by hand, like the models above
    "gpt-0.3b": 354_823_168,
    "gpt-2.7b": 2_651_553_280,  # counted by hand
    "llama-30b": 32_528_943_616,
    "t5-large": 737_668_096,
    # those of tests/data/published_configs.json: text parts, without modules of further tokens
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_026_404_352 + 61 * (1536 * 64 * 128 + 7168 * 192 + 2 * 128),
    "gemma-3-27b": 27_009_346_304,
    # as transformers 5.24 counts; published: 30.7 and 25.2 billion, and 2.3 of E2B without the
    # embeddings of its layers
    "gemma-4-31b": 30_697_345_280,
    "gemma-4-26b-a4b": 25_233_141_760,
    "gemma-4-e4b": 7_463_013_376,
    "gemma-4-e2b": 4_628_569_344,
    "glm-4.5-air": 106_852_245_504,
    # published: 744 billion; that of GLM-5.2, whose 57 other layers have no indexer, is exact
    "glm-5": 743_377_000_704 + 57 * (2048 * 32 * 128 + 6144 * 160 + 2 * 128),
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "granite-4-small": 32_207_337_984,  # counted by hand; published: 32 billion
    "kimi-k2": 1_026_408_209_408,
    "kimi-linear-48b": 49_122_675_072,  # published: 48 billion
    "llama4-maverick": 400_711_848_960,
    "llama4-scout": 107_769_861_120,
    "mixtral-8x22b": 140_620_634_112,
    # published: 31.6 and 120.6 billion
    "nemotron-3-nano": 31_577_937_344,
    "nemotron-3-super": 120_668_687_360,
    "phi-4": 14_659_507_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # counted by diffusers 0.42 and transformers 5.24; published: 12, 14 and 0.304 billion
    "flux.1-dev": 11_901_408_320,
    "wan2.1-14b": 14_288_491_584,
    "vit-l": 304_326_632,
    "qwen3-next-80b": 79_674_391_296,  # as its checkpoint has, without MTP
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-nemo": 12_247_782_400,
    "mistral-small": 23_572_403_200,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176,
}

HF = {
    "llama": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
    },
    "qwen2": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "max_position_embeddings": 4096,
        "vocab_size": 152064,
    },
    "gpt2": {
        "n_embd": 1600,
        "n_layer": 48,
        "n_head": 25,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt_neox": {
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "max_position_embeddings": 2048,
        "vocab_size": 50432,
        "tie_word_embeddings": False,
    },
    "opt": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "ffn_dim": 16384,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "word_embed_proj_dim": 4096,
    },
    "bert": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "vocab_size": 30522,
    },
    "t5": {
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_layers": 24,
        "num_heads": 32,
        "n_positions": 512,
        "vocab_size": 32128,
    },
}
HF["mistral"] = {**HF["llama"], "vocab_size": 32000}
HF["mixtral"] = {  # mistralai/Mixtral-8x7B-v0.1
    **HF["mistral"],
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
HF_TOTALS = {
    "llama": 8_030_261_248,
    "mistral": 7_241_732_096,
    "mixtral": 46_702_792_704,
    "qwen2": 7_615_616_512,
    "gpt2": 1_557_611_200,
    "gpt_neox": 20_554_567_680,  # EleutherAI/gpt-neox-20b
    "opt": 6_658_473_984,  # facebook/opt-6.7b
    "bert": 335_174_458,
    "t5": 2_851_598_336,
}


def total(spec: ModelSpec) -> int:
    layers = sum(layer.num_layers * parameter_count(layer) for layer in spec.layers)
    return layers + sum(embedding_parameter_counts(spec, spec.vocab_size or 0))


def test_shipped_models_are_complete():
    """Every shipped model has a published total to be checked against."""
    assert set(model_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_match_published_totals(name):
    assert total(load_spec(name)) == PUBLISHED[name]


@pytest.mark.parametrize("family", sorted(HF))
def test_hugging_face_config(tmp_path, family):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **HF[family]}))
    spec = load_spec(str(path))
    assert total(spec) == HF_TOTALS[family]
    assert len(spec.layers) == (2 if family == "t5" else 1)


def test_shipped_mixture_is_its_published_config(tmp_path):
    """mixtral-8x7b is what its published config.json says, router and experts included."""
    path = tmp_path / "mixtral-8x7b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"model_type": "mixtral", **HF["mixtral"]}))
    shipped = load_spec("mixtral-8x7b")
    assert load_spec(str(path)) == shipped
    (layer,) = shipped.layers
    dense = replace(layer, num_experts=None, experts_per_token=None)
    assert parameter_count(layer) - parameter_count(dense) == 7 * 3 * 4096 * 14336 + 8 * 4096
    # biases of experts: 2f + h each; of the attention: QKV and h; none of the router
    biased = replace(layer, biases=True)
    biases = 8 * (2 * 14336 + 4096) + (4096 + 2 * 1024) + 4096
    assert parameter_count(biased) - parameter_count(layer) == biases


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("mixtral", {"num_local_experts": None}, "num_local_experts.*null"),
        ("mixtral", {"num_experts_per_tok": 9}, "per_tok.*9, more than the 8 experts of num_local"),
        ("mistral", {"num_local_experts": 8}, "num_local_experts.*mistral"),
        ("qwen2", {"num_experts": 60}, "qwen2"),
        ("llama", {"attention_bias": True}, "mlp_bias"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_configs_that_cannot_be_counted_are_refused(tmp_path, family, values, words):
    """What would be counted wrong is refused, with the key that says so."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **HF[family], **values}))
    with pytest.raises(DocumentError, match=words):
        load_spec(str(path))


def test_missing_experts_per_token_are_named(tmp_path):
    """A mixture needs both numbers, in either kind of file."""
    values = {k: v for k, v in HF["mixtral"].items() if k != "num_experts_per_tok"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", **values}))
    with pytest.raises(DocumentError, match="'num_experts_per_tok': this key is missing"):
        load_spec(str(path))
    spec = load_spec("mixtral-8x7b")
    for missing in ("num_experts", "experts_per_token"):
        changes: dict[str, int | None] = {missing: None}
        layer = replace(spec.layers[0], **changes)  # type: ignore[arg-type]
        write_spec(replace(spec, layers=(layer,)), path)
        with pytest.raises(
            DocumentError, match=rf"layers\[0\]\.{missing}': this key is missing, but"
        ):
            load_spec(str(path))


@pytest.mark.parametrize("name", ["llama3-8b", "t5-3b", "bert-large", "mixtral-8x7b"])
def test_written_spec_reads_back(tmp_path, name):
    spec = load_spec(name)
    write_spec(spec, tmp_path / "m.json", source="a test")
    assert load_spec(str(tmp_path / "m.json")) == spec


def test_overrides_hold_one_value_or_one_per_type():
    spec = load_spec("t5-3b", num_layers=[2, 3], seq_length=[1024])
    assert [layer.num_layers for layer in spec.layers] == [2, 3]
    assert [layer.seq_length for layer in spec.layers] == [1024, 1024]
    half = load_spec("llama2-7b", hidden_size=[2048]).layers[0]
    assert (half.hidden_size, half.head_dim, half.ffn_hidden_size) == (2048, 64, 5504)
    # 64 heads of 128 at width 5120: together wider than the hidden size
    wide = load_spec("qwen3-32b", hidden_size=[2560]).layers[0]
    assert (wide.num_heads, wide.head_dim, wide.ffn_hidden_size) == (64, 64, 12800)
    fewer = load_spec("qwen3-32b", num_heads=32).layers[0]
    assert (fewer.num_kv_heads, fewer.head_dim) == (4, 128)


@pytest.mark.parametrize("values", [[1, 2], [0], [-1], [True], [1.5]])
def test_bad_override_is_one_sentence(values):
    with pytest.raises(OptionError, match="num_layers"):
        load_spec("llama2-7b", num_layers=values)


def test_unscalable_hidden_size_is_refused():
    with pytest.raises(OptionError, match="Add --ffn-hidden-size"):
        load_spec("llama2-7b", hidden_size=[4097])


def test_unknown_name_says_the_nearest():
    with pytest.raises(InputError, match="Did you mean llama2-7b"):
        load_spec("lama2-7b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "electra"}', "'electra', expected the name of a supported architecture"),
        (
            '{"model_type": "qwen2_mod"}',
            r"'qwen2_mod', expected the name of .* \(the nearest is qwen2_moe\)",
        ),
        ("{}", "model_type.*this key is missing"),
        ("#!/bin/bash", "this is not a JSON file: it begins with '#!/bin/bash'"),
        ('{"zero_optimization": {}}', "this is a configuration of DeepSpeed, expected a config"),
        ('{"pp_deg": 1, "tp_sizes_enc": "1"}', "this is a strategy file, expected a config"),
        ('{"model_type": null}', "model_type.*the value is null"),
        ('{"model_type": "t5", "model_type": "t5"}', "model_type.*appears twice"),
        ('{"model_type": "gpt2", "n_embd": NaN}', "n_embd.*the value is nan"),
        (
            '{"model_type": "t5", "num_head": 4}',
            "num_heads.*this key is missing.*the similar key 'num_head'",
        ),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_ctx": "x"}',
            "n_ctx.*'x', expected a whole number from 1 to 1000000000",
        ),
        (
            '{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_ctx": 8, "n_layer": 90000}',
            "n_layer.*90000, expected a whole number from 1 to 10000$",
        ),
        ('{"format": "autopar-model", "name": "m"}', "layers.*this key is missing"),
        ('{"format": "autopar-model", "layers": null}', "layers.*the value is null, expected a"),
        (
            '{"format": "autopar-model", "layers": [{}], "vocab": 1}',
            "'vocab_size'",
        ),
        (
            '{"format": "autopar-model", "layers": [{"hiden_size": 1}]}',
            r"layers\[0\]\.hiden_size': this key is unknown.*'hidden_size'",
        ),
        (
            '{"format": "autopar-model", "layers": [null]}',
            r"layers\[0\]': the value is null, expected a layer type",
        ),
        (
            '{"format": "autopar-model", "layers": [{"num_layers": null}]}',
            r"layers\[0\]\.num_layers': the value is null, expected a whole number from 1",
        ),
        ("[1]", "expected an object"),
        ('{"model_type": "llama"', "not valid JSON.*truncated"),
        ('{"model_type": "llama"}', "vocab_size.*missing"),
        ('{"model_type": "gpt2", "n_embd": "x", "n_head": 1}', "n_embd.*'x'"),
        ('{"format": "autopar-model", "name": "m", "layers": []}', "layers"),
        ('{"format": "autopar-model", "name": "m", "layers": [{"heads": 1}]}', "heads"),
        ('{"format": "autopar-model", "name": "m", "layers": [{"num_layers": 0}]}', "num_layers"),
        ('{"format": "autopar-model", "name": "m", "version": 2, "layers": [{}]}', "version"),
    ],
)
def test_bad_file_names_file_and_key(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=words) as caught:
        load_spec(str(path))
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "m.json").write_bytes(b'{"a\xff": 1}')
    with pytest.raises(DocumentError, match="byte 3 is not UTF-8"):
        load_spec(str(tmp_path / "m.json"))


def test_comments_of_people_are_left_alone(tmp_path):
    write_spec(load_spec("llama2-7b"), tmp_path / "m.json")
    document = json.loads((tmp_path / "m.json").read_text())
    document["_note"] = document["layers"][0]["_note"] = "of people"
    (tmp_path / "m.json").write_text(json.dumps(document))
    assert load_spec(str(tmp_path / "m.json")) == load_spec("llama2-7b")


@pytest.mark.parametrize(
    ("family", "key"),
    [("llama", "num_attention_heads"), ("gpt2", "n_head"), ("bert", "num_attention_heads")],
)
def test_heads_of_a_config_must_divide(tmp_path, family, key):
    values = {**HF[family], key: 7}
    values.pop("num_key_value_heads", None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **values}))
    with pytest.raises(DocumentError, match=f"'{key}': the value is 7, which does not divide"):
        load_spec(str(path))


def test_heads_must_divide(tmp_path):
    layer = LayerSpec(num_layers=1, seq_length=8, hidden_size=100, num_heads=16)
    write_spec(ModelSpec(name="m", layers=(layer,)), tmp_path / "m.json")
    with pytest.raises(DocumentError, match="does not divide hidden_size 100"):
        load_spec(str(tmp_path / "m.json"))
    other = replace(layer, hidden_size=160, num_kv_heads=5)
    write_spec(ModelSpec(name="m", layers=(other,)), tmp_path / "m.json")
    with pytest.raises(
        DocumentError, match=r"num_kv_heads.*5, which does not divide the 16 attention heads"
    ):
        load_spec(str(tmp_path / "m.json"))


def test_bare_spec_knows_sizes_only():
    spec = bare_spec(num_layers=[2, 3], seq_length=[64], hidden_size=[32])
    assert spec.num_layers == 5
    assert spec.layers[1].seq_length == 64
    assert spec.layers[0].num_heads is None
    with pytest.raises(InputError, match="heads"):
        parameter_count(spec.layers[0])


def test_padding_follows_the_vocabulary_degree():
    spec = load_spec("gpt2-xl")
    assert padded_vocab_size(spec) == 50304
    assert padded_vocab_size(spec, 8) == 51200


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {}, (10000.0, None)),
        ("mixtral", {}, (1e6, None)),
        ("qwen2", {"rope_theta": 1000000.0, "rope_scaling": None}, (1e6, None)),
        ("llama", {"rope_theta": 500000.0, "rope_scaling": SCALED}, (500000.0, 8.0)),
        ("llama", {"rope_parameters": {**SCALED, "rope_theta": 5e5}}, (500000.0, 8.0)),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7}}, (7.0, None)),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, (None, None)),
        ("llama", {"rope_scaling": {**SCALED, "low_freq_factor": 2}}, (None, None)),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, (None, None)),
        ("gpt2", {}, (None, None)),
        ("gpt_neox", {"rotary_emb_base": 10000}, (1e4, None)),
    ],
)
def test_rotary_positions(tmp_path, family, keys, expected):
    """Base and scaling from the keys of transformers 4 and 5; None for what has no field here."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **HF[family], **keys}))

    spec = load_spec(str(path))
    assert (spec.rotary_base, spec.rotary_scaling_factor) == expected
    write_spec(spec, tmp_path / "own.json")
    assert load_spec(str(tmp_path / "own.json")) == spec


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": 8}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": True}}, "rope_parameters.rope_theta"),
    ],
)
def test_rotary_positions_that_are_none(tmp_path, keys, key):
    """The key is named, in files of both kinds."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **HF["llama"], **keys}))

    with pytest.raises(DocumentError, match=f"key '{key}': the value is"):
        load_spec(str(path))
    own = tmp_path / "own.json"
    write_spec(load_spec("llama2-7b"), own)
    own.write_text(json.dumps({**json.loads(own.read_text()), "rotary_base": 0.5}))
    with pytest.raises(DocumentError, match=r"'rotary_base': the value is 0\.5, expected"):
        load_spec(str(own))


NO_ROTARY_BASE = {  # YaRN, two bases, or layers without positions
    "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b",
    "gemma-3-27b", "gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e4b", "gemma-4-e2b", "glm-5",
    "gpt-oss-20b", "gpt-oss-120b", "granite-4-small", "kimi-k2", "kimi-linear-48b",
    "llama4-maverick", "llama4-scout",
}  # fmt: skip


def test_shipped_models_say_their_rotary_base():
    """Gated MLPs have rotary positions, the others none (learned or relative)."""
    for name in model_names():
        spec = load_spec(name)
        said = spec.layers[0].gated_mlp and name not in NO_ROTARY_BASE
        assert (spec.rotary_base is not None) == said, name


SHIPPED_CONFIGS = json.loads(
    (Path(__file__).resolve().parents[2] / "data" / "published_configs.json").read_text()
)


@pytest.mark.parametrize("name", sorted(set(SHIPPED_CONFIGS) & set(model_names())))
def test_shipped_models_are_their_published_files(name: str) -> None:
    """But for name, length, and positions that say more than a config.json."""
    shipped = load_spec(name)
    published = parse_hugging_face(Path(name), SHIPPED_CONFIGS[name]["config"])
    lengths = tuple(
        replace(layer, seq_length=own.seq_length)
        for layer, own in zip(published.layers, shipped.layers, strict=True)
    )
    assert replace(published, layers=lengths, name=name) == shipped


DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
         "linear_value_head_dim": 64, "full_attention_interval": 2}  # fmt: skip
SHARES = {"glm-4.5-air": 0.5, "glm-4.5": 0.5, "glm-4-9b": 0.5, "glm-4-9b-0414": 0.5,
          "phi-2": 0.4, "gpt-neox-20b": 0.25, "pythia-6.9b": 0.25}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SHIPPED_CONFIGS))
def test_published_files_say_the_rotary_part_of_each_head(name: str) -> None:
    """Defaults are those of `configuration_*.py` in transformers 5.24."""
    spec = parse_hugging_face(Path(name), SHIPPED_CONFIGS[name]["config"])
    share = SHARES.get(name, 1.0)
    assert spec.rotary_share == share
    assert describe_model(spec) == describe_model(replace(spec, rotary_share=0.75))
    assert share == 1.0 or model_of_spec(spec).attention.rotary_share == share


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("llama", {}, (1e4, 1.0)),
        ("llama", {"partial_rotary_factor": 0.5}, (1e4, 0.5)),
        ("llama", {"rope_parameters": {"rope_theta": 7, "partial_rotary_factor": 0.25}}, (7, 0.25)),
        ("stablelm", {}, (1e4, 0.25)),
        ("nemotron", {}, (1e4, 0.5)),
        ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 64,
                        "head_dim": 128}, (5e6, 0.5)),
        ("qwen3_5_text", {**DELTA, "rope_theta": 1e7}, (1e7, 0.25)),
        ("qwen3_5_text", {**DELTA, "rope_parameters": {"rope_theta": 1e7}}, (1e7, 0.25)),
    ],
)  # fmt: skip
def test_rotary_positions_in_a_part_of_each_head(
    family: str, more: dict[str, Any], expected: tuple[float, float]
) -> None:
    spec = parse_hugging_face(Path("m"), {**HF["llama"], "model_type": family, **more})
    assert (spec.rotary_base, spec.rotary_share) == expected


def test_qwen3_has_norms_of_queries_and_keys(tmp_path: Path) -> None:
    """Qwen3-0.6B has 596,049,920 parameters; without the norms of its heads 7,168 fewer."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    spec = load_spec(str(path))
    (layer,) = spec.layers
    # its width is 128 where the file says none, and 16 * 128 is not the hidden size
    assert (layer.head_dim, layer.qk_norms) == (128, True)
    embedding, head = embedding_parameter_counts(spec, 151936)
    assert 28 * parameter_count(layer) + embedding + head == 596_049_920
    assert parameter_count(layer) - parameter_count(replace(layer, qk_norms=False)) == 256

    write_spec(spec, tmp_path / "model.json")
    assert load_spec(str(tmp_path / "model.json")) == spec
    plain = replace(layer, qk_norms=False)
    kept = [activation_bytes(one, 4096, 1, kernels="fused") for one in (layer, plain)]
    # what the norms read, and 4 bytes of each head
    assert kept[0] - kept[1] == 4096 * (16 + 8) * (128 * 2 + 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"order": [0, 1, 2]}, "the value 2 is no layer type, expected 0 to 1"),
        ({"order": [0, 1, 1]}, "the value is 2, but order has 1 layers of this type"),
        ({"order": [0, 1, 0, 1], "interleaved": True}, "contradicts interleaved"),
        ({"mtp_order": [5]}, "the value 5 is no layer type"),
    ],
)
def test_an_order_agrees_with_the_types(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    """Every layer has a type, and every type its number of layers."""
    layer = {"num_layers": 2, "seq_length": 128, "hidden_size": 64, "num_heads": 4}
    mixer = {"kind": "mamba", "heads": 8, "width": 16, "state": 16, "groups": 2}
    document = {
        "format": "autopar-model",
        "version": 1,
        "name": "small",
        "vocab_size": 1000,
        "layers": [
            {**layer, "ffn_hidden_size": 256},
            {"num_layers": 2, "seq_length": 128, "hidden_size": 64, "parts": "mixer",
             "mixers": [mixer], "norm_parameters_per_hidden": 1},
        ],
    }  # fmt: skip
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**document, "order": [0, 1, 0, 1]}), encoding="utf-8")
    assert load_spec(str(path)).layer_types == (0, 1, 0, 1)
    path.write_text(json.dumps({**document, **change}), encoding="utf-8")
    with pytest.raises(DocumentError, match=said):
        load_spec(str(path))


def test_only_the_planner_names_an_engine_as_the_way_out(capsys: pytest.CaptureFixture[str]):
    """The profiler has no `--engine`."""
    with pytest.raises(InputError) as caught:
        SizeOptions().load("nemotron-3-nano")
    assert "engine" not in str(caught.value)
    words = ["--model", "nemotron-3-nano", "--hardware", "h100:2x8", "--engine", "galvatron"]
    assert search.run(words) == 2
    assert "Remove --engine" in capsys.readouterr().err
