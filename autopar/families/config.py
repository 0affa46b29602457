"""Reader of the `config.json` of Hugging Face models, which imports none of their code.

Families are looked up by `model_type`. Of multimodal models only the text part is read. The error
for an unknown family contains the smallest sufficient `model.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.documents.json import read_record
from autopar.errors import DocumentError, nearest
from autopar.families.base import Config
from autopar.families.decoders import DECODERS
from autopar.families.mixtures import MIXTURES
from autopar.families.others import OTHERS
from autopar.records import shorten
from autopar.run.model import MOST_LAYERS, MOST_SIZE, ModelSpec

_FAMILIES: dict[str, type[Config]] = dict(sorted({**DECODERS, **MIXTURES, **OTHERS}.items()))
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in files."""
_LENGTH = "max_position_embeddings"
_NO_ATTENTION = "layers that mix tokens by a recurrence instead of attention"
_UNSAID = {
    **dict.fromkeys(
        ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
         "mamba", "mamba2", "minimax", "nemotron_h", "qwen3_5", "qwen3_next", "recurrent_gemma",
         "rwkv", "zamba", "zamba2"),
        _NO_ATTENTION,
    ),
    **dict.fromkeys(
        ("deepseek_v32", "glm_moe_dsa"), "attention to tokens chosen by an indexer"
    ),
    **dict.fromkeys(
        ("clip", "dinov2", "resnet", "siglip", "swin", "vit", "wav2vec2", "whisper"),
        "not a token model",
    ),
}  # fmt: skip
"""Families that a `model.json` cannot express, and the reason."""
_SMALLEST: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("num_layers", ("num_hidden_layers", "n_layer", "num_layers", "n_layers"), MOST_LAYERS),
    # No config.json contains a training sequence length.
    ("seq_length", (), 0),
    ("hidden_size", ("hidden_size", "n_embd", "d_model", "dim"), MOST_SIZE),
    ("num_heads", ("num_attention_heads", "n_head", "num_heads", "n_heads"), MOST_SIZE),
    ("num_kv_heads", ("num_key_value_heads", "num_kv_heads", "n_kv_heads"), MOST_SIZE),
    ("ffn_hidden_size", ("intermediate_size", "ffn_dim", "d_ff", "n_inner"), MOST_SIZE),
)
"""Keys of a layer type in a `model.json`, their names in other files, and the largest plausible
value."""
_OPTIONAL = "num_kv_heads"
_OPEN = "..."


def parse_hugging_face(
    path: Path, data: Mapping[str, Any], *, seq_length: int | None = None
) -> ModelSpec:
    """Return the spec of a Hugging Face `config.json`; raises DocumentError naming the key.

    seq_length : sequence length that replaces a missing `max_position_embeddings`

    The name of a model with image or audio parts ends with `-text`, because those are not read.
    """
    family, text, part = data.get("model_type"), data, ""
    inner = data.get("text_config")
    # An unhashable value is no family.
    known = _is_family(family)
    if isinstance(inner, dict) and (not known or _is_family(inner.get("model_type"))):
        family, text, part = inner.get("model_type"), inner, "-text"
    elif isinstance(data.get("vision_config"), dict):
        part = "-text"
    kind = _FAMILIES.get(family) if isinstance(family, str) else None
    if kind is None:
        raise _unknown(path, data)
    for key in _EXPERTS:
        if not kind.mixture and key in text and text[key] not in (None, 0, 1):
            raise DocumentError(
                path,
                f"the value is {shorten(text[key])}, but {family} has one MLP per layer",
                key=key,
                remedy="Use model_type mixtral, or describe the model in a model.json",
            )
    given = str(data.get("_name_or_path") or "").rstrip("/").split("/")[-1]
    # Files without a name are in a folder with the name of the model; others have a file name.
    own = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = own if given in ("", ".", "..") else given
    if part and "tie_word_embeddings" in data:
        text = {"tie_word_embeddings": data["tie_word_embeddings"], **text}
    if seq_length is not None:
        text = {_LENGTH: seq_length, **text}
    return read_record(kind, path, text).spec(path, name + part)


def _is_family(value: object) -> bool:
    return isinstance(value, str) and value in _FAMILIES


def _unknown(path: Path, data: Mapping[str, Any]) -> DocumentError:
    """Return the error for an unknown family."""
    family = data.get("model_type")
    if isinstance(family, str) and family in _UNSAID:
        return DocumentError(
            path,
            f"the value is {shorten(family)}: not supported ({_UNSAID[family]})",
            key="model_type",
            remedy="Use a model with attention or MLP layers over tokens",
        )
    found = f"the value is {shorten(family)}" if "model_type" in data else "this key is missing"
    near = nearest(str(family)[:50], _FAMILIES)
    return DocumentError(
        path,
        f"{found}, expected the name of a supported architecture"
        + (f" (the nearest is {near})" if near else ""),
        key="model_type",
        remedy=(
            f"Use a supported architecture, or describe the model in a model.json: "
            f"{_smallest(data)} with values for {_OPEN} (docs/concepts/estimates.md)"
        ),
    )


def _smallest(data: Mapping[str, Any]) -> str:
    """Return a minimal `model.json` with the values of a file, and `...` for unknown ones."""

    def said(names: tuple[str, ...], most: int) -> Any:
        values = [data[name] for name in names if name in data]
        good = [value for value in values if type(value) is int and 0 < value <= most]
        return good[0] if good else _OPEN

    layer = {key: said(names, most) for key, names, most in _SMALLEST}
    if layer[_OPTIONAL] == _OPEN:
        del layer[_OPTIONAL]
    document = {
        "layers": [layer],
        "vocab_size": said(("vocab_size",), MOST_SIZE),
    }
    return json.dumps(document).replace(f'"{_OPEN}"', _OPEN)
