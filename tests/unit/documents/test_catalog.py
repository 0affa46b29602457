"""Catalog: shipped names, aliases, explicit paths, and the order of places."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.documents import catalog
from autopar.documents.catalog import find_model
from autopar.documents.spec import load_spec, write_spec
from autopar.errors import DocumentError, InputError, OptionError
from autopar.records import replace
from autopar.run.model import head_dim


def test_cards_are_found_by_name_and_alias():
    measured = {"a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "b300", "gb200", "gb300"}
    assert measured < set(catalog.card_names())
    assert catalog.find_card("h100") == catalog.find_card("h100-80gb")
    assert catalog.find_card("A100").stem == "a100-80gb"


def test_explicit_path_wins(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text("{}")
    assert catalog.find_card(str(path)) == path
    assert catalog.find_model(str(path)) == path
    assert catalog.find_hardware(str(tmp_path)) == tmp_path


def test_packaged_data_wins_over_the_repository(tmp_path, monkeypatch):
    packaged, repository = tmp_path / "_data", tmp_path / "repo"
    for root in (packaged, repository):
        (root / "models" / "m").mkdir(parents=True)
        (root / "models" / "m" / "model.json").write_text("{}")
    (repository / "models" / "only").mkdir()
    (repository / "models" / "only" / "model.json").write_text("{}")
    monkeypatch.setattr(catalog, "_ROOTS", (packaged, repository))
    assert catalog.find_model("m").is_relative_to(packaged)
    assert catalog.model_names() == ("m", "only")


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (catalog.find_card, "h10", "Did you mean h100"),
        (catalog.find_model, "qwen2.5-8b", "Did you mean qwen2.5-3b, qwen2.5-7b"),
        (catalog.find_hardware, "a100-80gb_1x9", "Did you mean a100-80gb_1x8"),
        (catalog.find_card, "zzzz", "`autopar cards`"),
        (catalog.find_hardware, "h100x8", "Use a card and the size of the cluster"),
        (catalog.find_model, "llama3", "llama3-8b, llama3-70b or llama3-405b"),
        (catalog.find_model, "qwen3-30b", "Did you mean qwen3-30b-a3b\\?"),
    ],
)
def test_unknown_name_says_the_nearest(find, name, words):
    with pytest.raises(InputError, match=words):
        find(name)


@pytest.mark.parametrize(
    ("name", "own", "seq_length"),
    [
        ("llama-7b", "llama2-7b", 2048),
        ("llama-13b", "llama2-13b", 2048),
        ("gpt-1.5b", "gpt2-xl", 1024),
        ("bert-base-uncased", "bert-base", 512),
        ("bert-large-uncased", "bert-large", 512),
        ("bert-huge-uncased-32", "bert-huge-32", 512),
        ("mixtral-8x7b-e8k2", "mixtral-8x7b", 4096),
    ],
)
def test_names_of_the_zoo_mean_models_of_the_same_sizes(
    name: str, own: str, seq_length: int
) -> None:
    """As these models were published, length and all; a length that is given wins."""
    found, shipped = load_spec(name), load_spec(own, seq_length=(seq_length,))

    assert found == replace(shipped, name=name)
    assert load_spec(name, seq_length=(256,)).layers[0].seq_length == 256


def test_sizes_of_the_zoo_as_published() -> None:
    """LLaMA of 2023, table 2 of its paper."""
    for name, sizes in {
        "llama-7b": (32, 4096, 32, 11008),
        "llama-13b": (40, 5120, 40, 13824),
        "llama-30b": (60, 6656, 52, 17920),
        "gpt-0.3b": (24, 1024, 16, 4096),
        "gpt-1.5b": (48, 1600, 25, 6400),
        "gpt-2.7b": (32, 2560, 32, 10240),
        "bert-huge-32": (32, 1280, 16, 5120),
        "t5-large": (24, 1024, 16, 4096),
        "t5-3B": (24, 1024, 32, 16384),
    }.items():
        layer = load_spec(name).layers[0]
        assert sizes == (
            *(layer.num_layers, layer.hidden_size, layer.num_heads, layer.ffn_hidden_size),
        )


def test_blocks_without_sizes_take_those_of_the_line() -> None:
    """Scripts of PaddleNLP name `llama` and give all sizes of a layer."""
    sizes = {"num_layers": (2,), "hidden_size": (5120,), "seq_length": (1024,)}
    widths = {"num_heads": 64, "num_kv_heads": 8, "ffn_hidden_size": 25600}
    found = load_spec("llama", **sizes, **widths)
    (layer,) = found.layers
    assert (layer.num_layers, layer.hidden_size, layer.seq_length) == (2, 5120, 1024)
    assert (layer.num_heads, layer.num_kv_heads, layer.ffn_hidden_size) == (64, 8, 25600)
    assert head_dim(layer) == 80
    assert layer.gated_mlp
    for missing in ("hidden_size", "num_layers", "num_heads", "ffn_hidden_size"):
        given = {**sizes, **widths}
        given.pop(missing)
        with pytest.raises(OptionError) as caught:
            load_spec("llama", **given)
        assert f"--{missing.replace('_', '-')}" in (caught.value.remedy or "")


def test_a_file_of_that_name_is_itself(folder: Path) -> None:
    (folder / "llama-7b").mkdir()
    write_spec(load_spec("gpt-6.7b"), folder / "llama-7b" / "model.json")

    assert load_spec("llama-7b") == load_spec("gpt-6.7b")


@pytest.mark.parametrize(
    ("typed", "shipped"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"),
        ("llama-3-8b", "llama3-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama3-70b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("zai-org/GLM-5", "glm-5"),
        ("ibm-granite/granite-4.0-h-small-base", "granite-4-small"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("google/gemma-4-31B-it", "gemma-4-31b"),
        ("google/gemma-4-26B-A4B", "gemma-4-26b-a4b"),
        ("moonshotai/Kimi-Linear-48B-A3B-Instruct", "kimi-linear-48b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/QwQ-32B", "qwen2.5-32b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3-8b"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("llama-7b", "llama-7b"),
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev"),
        ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "wan2.1-14b"),
        ("google/vit-large-patch16-224", "vit-l"),
    ],
)
def test_a_model_has_the_names_that_people_type(typed: str, shipped: str) -> None:
    assert catalog.shipped_model(typed) == shipped
    assert find_model(typed).is_file()


@pytest.mark.parametrize(
    "name", ["mistralai/Mistral-7B-v0.3", "Qwen/Qwen2.5-Math-7B", "Qwen/Qwen3-32B-AWQ"]
)
def test_other_sizes_are_not_a_shipped_model(name: str) -> None:
    """A name of another release or of quantised weights is refused, with the nearest names."""
    assert catalog.shipped_model(name) == name
    with pytest.raises(InputError, match="neither a file nor a shipped model"):
        find_model(name)


def test_a_file_may_name_the_repository_of_a_shipped_model(tmp_path: Path) -> None:
    """`Qwen/Qwen3-8B` is no path, though a folder of that name would be."""
    catalog.require_inputs({"model": "Qwen/Qwen3-8B"}, tmp_path / "plan.json")
    with pytest.raises(DocumentError) as raised:
        catalog.require_inputs({"model": "Qwen/Qwen3-7B"}, tmp_path / "plan.json")
    assert raised.value.key == "request.model"


def test_a_folder_of_weights_is_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-32B"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert find_model(str(folder)) == folder / "config.json"


@pytest.mark.parametrize(
    ("typed", "hardware"),
    [
        ("8xh100", "h100:1x8"),
        ("2x8xH100", "H100:2x8"),
        ("h100x8", "h100:1x8"),
        ("8xA100-80GB", "A100-80GB:1x8"),
        ("h100:4x8", "h100:4x8"),
        ("a100-80gb_1x8", "a100-80gb_1x8"),
        ("x8", "x8"),
        ("8x4", "8x4"),
    ],
)
def test_hardware_has_the_forms_that_people_type(typed: str, hardware: str) -> None:
    assert catalog.spelled_hardware(typed) == hardware


def test_cards_are_found_without_separators() -> None:
    for name in ("4090", "rtx4090", "RTX_4090"):
        assert catalog.find_card(name).stem == "rtx-4090"


def test_unknown_names_and_missing_paths_differ(tmp_path: Path) -> None:
    """A path is looked for as a file; of equally close names the most similar is first."""
    with pytest.raises(InputError, match="this file does not exist"):
        find_model("./config.json")
    with pytest.raises(InputError, match=r"contains no model\.json or config\.json"):
        find_model(str(tmp_path))
    with pytest.raises(InputError, match="Did you mean llama3-8b, "):
        find_model("llama3-8")
