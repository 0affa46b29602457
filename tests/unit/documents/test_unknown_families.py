"""Drafts of `model.json` for families without a reader, and families that none can express."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import DocumentError
from autopar.families.config import parse_hugging_face, skeleton_of
from autopar.run.model import model_parameter_count
from search.commands import search

DENSE: dict[str, Any] = {
    "model_type": "newcomer",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
MIXED: dict[str, Any] = {
    "model_type": "deepseek",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 28,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 102400,
    "max_position_embeddings": 4096,
}
QWEN3_MOE: dict[str, Any] = {
    **{key: value for key, value in DENSE.items() if key != "model_type"},
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    """Return the path of a config.json in a separate folder."""
    (folder / "newcomer").mkdir(exist_ok=True)
    path = folder / "newcomer" / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_draft_is_the_model_and_is_read_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16.38 billion parameters, as the model card of DeepSeekMoE 16B says: experts and all."""
    path, target = written(tmp_path, MIXED), tmp_path / "model.json"

    assert search.run(["--model", str(path), "--write-skeleton", str(target)]) == 0
    spec = load_spec(str(target))
    assert [(x.num_layers, x.ffn_hidden_size, x.num_experts) for x in spec.layers] == [
        (1, 10944, None),
        (27, 1408, 64),
    ]
    assert all(layer.gated_mlp for layer in spec.layers)
    assert spec.layers[1].shared_expert_width == 2 * 1408
    assert spec.layers[1].experts_per_token == 6
    assert model_parameter_count(spec) == pytest.approx(16.38e9, rel=1e-3)
    assert spec == skeleton_of(path, MIXED)[0]
    # The assumptions are printed, and are in the file.
    said = capsys.readouterr().err
    source = json.loads(target.read_text(encoding="utf-8"))["source"]
    for sentence in skeleton_of(path, MIXED)[1]:
        assert sentence in said
        assert sentence in source


@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_a_draft_replaces_no_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Least of all the configuration itself."""
    path = written(tmp_path, DENSE)
    target = path.parent / name
    target.write_bytes(path.read_bytes())

    assert search.run(["--model", str(path), "--write-skeleton", str(target)]) == 2
    assert json.loads(target.read_text(encoding="utf-8")) == DENSE
    assert f"--write-skeleton {target}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "missing"),
    [([], "--model"), (["--model", "llama3-8b", "--json", "-"], "--json")],
)
def test_a_draft_needs_a_model_and_has_no_answer(
    words: list[str], missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not a search."""
    assert search.run([*words, "--write-skeleton", str(tmp_path / "m.json")]) == 2
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama3-8b", "deepseek-v3", "mixtral-8x7b"])
def test_a_known_model_is_written_as_it_is_read(name: str, tmp_path: Path) -> None:
    """So that it can be changed."""
    target = tmp_path / "m.json"

    assert search.run(["--model", name, "--write-skeleton", str(target)]) == 0
    assert load_spec(str(target)) == load_spec(name)


def test_names_of_other_families_are_read(tmp_path: Path) -> None:
    """The sizes of one model under two sets of names; and activations without a gate."""
    other = {
        "model_type": "other",
        "n_embd": 1024,
        "n_head": 16,
        "num_kv_heads": 4,
        "n_layer": 12,
        "n_inner": 2816,
        "vocab_size": 32000,
        "n_positions": 2048,
        "activation_function": "silu",
    }
    path = tmp_path / "a" / "config.json"
    one, two = (skeleton_of(path, config)[0] for config in (DENSE, other))
    assert one == two

    (layer,) = skeleton_of(path, {**other, "activation_function": "relu"})[0].layers
    assert not layer.gated_mlp


def test_latent_attention_of_an_unknown_family(tmp_path: Path) -> None:
    """Its widths are those of the file, and no head width is made up."""
    widths = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    }
    (layer,) = skeleton_of(tmp_path / "a" / "config.json", {**DENSE, **widths})[0].layers
    assert layer.latent is not None
    assert (layer.latent.key_value_rank, layer.latent.query_rank) == (256, 768)

    with pytest.raises(DocumentError, match="latent attention") as raised:
        skeleton_of(tmp_path / "config.json", {**DENSE, **widths, "v_head_dim": None})
    assert raised.value.key == "v_head_dim"


def test_keys_without_a_usual_meaning_are_listed(tmp_path: Path) -> None:
    """All of them, for the user to judge."""
    more = {f"strange_{place}": place for place in range(40)}
    *_, last = skeleton_of(tmp_path / "config.json", {**DENSE, **more})[1]
    assert last.endswith(", ".join(more))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**DENSE, "model_type": "zamba2"}, "recurrence"),
        ({**DENSE, "layer_types": ["conv", "full_attention"] * 6}, "recurrence"),
        ({**DENSE, "layer_types": ["linear_attention", "full_attention"] * 6}, "recurrence"),
        ({**DENSE, "mamba_d_state": 128}, "recurrence"),
        ({**DENSE, "hybrid_override_pattern": "M*M*"}, "recurrence"),
        ({**DENSE, "index_topk": 2048, "index_n_heads": 64}, "indexer"),
        ({"model_type": "newvision", "image_size": 224, "patch_size": 14, "hidden_size": 768},
         "token model"),
    ],
)  # fmt: skip
def test_a_family_that_no_model_file_expresses_is_refused_with_the_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """And no model.json is advised."""
    path = tmp_path / "config.json"
    for read in (parse_hugging_face, skeleton_of):
        with pytest.raises(DocumentError, match=reason) as raised:
            read(path, config)
        assert "model.json" not in str(raised.value)


def test_an_unknown_family_is_told_the_commands_that_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is whole; it suggests no command that would fail for lack of a size."""
    path = written(tmp_path, DENSE)
    arguments = ["--model", str(path), "--hardware", "h100:1x8"]
    assert search.run(arguments) == 2
    said = capsys.readouterr().err
    assert f"--model {path} --write-skeleton model.json" in said
    assert "..." not in said
    assert "autopar models --all" in said

    written(tmp_path, {key: one for key, one in DENSE.items() if key != "intermediate_size"})
    assert search.run(arguments) == 2
    assert "--write-skeleton" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (QWEN3_MOE, "num_experts"),
        ({**QWEN3_MOE, "model_type": "olmoe"}, "num_experts"),
        ({**MIXED, "model_type": "glm4_moe"}, "n_routed_experts"),
    ],
)
def test_the_number_of_experts_has_two_names(
    config: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """transformers 5 writes num_local_experts for families that had another name before."""
    other = {("num_local_experts" if name == key else name): one for name, one in config.items()}
    path = tmp_path / "config.json"
    assert parse_hugging_face(path, other) == parse_hugging_face(path, config)
