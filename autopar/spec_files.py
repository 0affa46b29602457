"""Parses the files that describe a model: our own `model.json` and Hugging Face's `config.json`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import shorten
from autopar.model import LayerSpec, ModelSpec

__all__ = ["FORMAT", "parse_hugging_face", "parse_own"]

FORMAT = "autopar-model"
"""What `format` says in our own file."""
_LAYER_FIELDS = {f.name: f for f in dataclasses.fields(LayerSpec)}
_MODEL_FIELDS = {f.name: f for f in dataclasses.fields(ModelSpec)}
_NOT_POSITIVE_ONLY = {  # integers that may be 0
    "learned_positions",
    "extra_embedding_parameters",
    "extra_head_parameters",
    "norm_parameters_per_hidden",
}
_MOST = {
    "num_layers": 10**4,
    "extra_embedding_parameters": 10**13,
    "extra_head_parameters": 10**13,
}
"""Largest plausible integers; `_MOST_OTHERS` for every other key."""
_MOST_OTHERS = 10**9


# --- our own file --------------------------------------------------------------------------


def parse_own(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of our `model.json`; raises DocumentError naming file, key and value."""
    if data.get("version", 1) != 1:
        raise _unexpected(path, "version", data["version"], "1")
    values = {k: v for k, v in data.items() if k not in ("format", "version", "source")}
    values = _without_comments(values)
    for key in values:
        if key not in _MODEL_FIELDS:
            raise _unknown(path, key, list(_MODEL_FIELDS))
    one = '{"num_layers": ..., "seq_length": ..., "hidden_size": ...}'
    shape = f"a list of layer types, [{one}]"
    if "layers" not in values:
        raise DocumentError(path, f"this key is missing, expected {shape}", key="layers")
    layers = values.pop("layers")
    if not isinstance(layers, list) or not layers:
        raise _unexpected(path, "layers", layers, shape)
    parsed = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise _unexpected(path, f"layers[{index}]", layer, f"a layer type, {one}")
        prefix = f"layers[{index}]."
        checked = _checked(path, _without_comments(layer), _LAYER_FIELDS, prefix)
        layer_spec = LayerSpec(**checked)
        parsed.append(
            _checked_layer(path, layer_spec, prefix + "num_heads", prefix + "num_kv_heads")
        )
    known = {k: f for k, f in _MODEL_FIELDS.items() if k != "layers"}
    return ModelSpec(layers=tuple(parsed), **_checked(path, values, known, ""))


def _checked(
    path: Path, values: Mapping[str, Any], fields: Mapping[str, dataclasses.Field[Any]], prefix: str
) -> dict[str, Any]:
    """Return the values of known fields, checked for type and range."""
    for key in values:
        if key not in fields:
            raise _unknown(path, key, list(fields), prefix)
    for key, field in fields.items():
        kind = str(field.type)
        if kind.startswith("bool"):
            expected = "true or false"
        elif kind.startswith("str"):
            expected = "a text"
        else:
            least, most = int(key not in _NOT_POSITIVE_ONLY), _MOST.get(key, _MOST_OTHERS)
            expected = f"a whole number from {least} to {most}"
        if key not in values:
            if field.default is dataclasses.MISSING:
                raise DocumentError(
                    path, f"this key is missing, expected {expected}", key=prefix + key
                )
            continue
        value = values[key]
        if value is None and "None" in kind:
            continue
        if kind.startswith("bool"):
            legal = isinstance(value, bool)
        elif kind.startswith("str"):
            legal = isinstance(value, str) and bool(value)
        else:
            legal = _is_whole(value, least, most)
        if not legal:
            raise _unexpected(path, prefix + key, value, expected)
    return dict(values)


def _without_comments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a document but those whose key starts with `_`, for people only."""
    return {key: value for key, value in values.items() if not key.startswith("_")}


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _unexpected(path: Path, key: str, value: object, expected: str) -> DocumentError:
    return DocumentError(path, f"the value is {shorten(value)}, expected {expected}", key=key)


def _unknown(path: Path, key: str, known: list[str], prefix: str = "") -> DocumentError:
    (near,) = difflib.get_close_matches(key[:200], known, n=1, cutoff=0.0)
    return DocumentError(
        path,
        f"this key is unknown; the nearest known key is {near!r}",
        key=prefix + (key if len(key) <= 120 else key[:120] + "..."),
    )


def _checked_layer(path: Path, layer: LayerSpec, heads_key: str, kv_heads_key: str) -> LayerSpec:
    """Return the layer after checking that heads, key-value heads and widths agree."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads is not None and layer.head_dim is None and layer.hidden_size % heads:
        raise DocumentError(
            path,
            f"the value is {heads}, which does not divide hidden_size {layer.hidden_size}",
            key=heads_key,
            remedy="change one of them or give head_dim as well",
        )
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise DocumentError(
            path,
            f"the value is {kv_heads}, which does not divide the {heads} attention heads",
            key=kv_heads_key,
            remedy="give a divisor",
        )
    return layer


# --- Hugging Face config.json --------------------------------------------------------------


_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers")


class _Config:
    """A `config.json` whose values are checked as they are asked for."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data

    def number(self, key: str, default: int | None = None) -> int:
        value, most = self.data.get(key), _MOST_OTHERS
        if "layer" in key:
            most = _MOST["num_layers"]
        expected = f"a whole number from 1 to {most}"
        if value is None and default is not None:
            return default
        if key not in self.data:
            near = difflib.get_close_matches(key, list(self.data), n=1, cutoff=0.8)
            remedy = f"the file has the similar key {near[0]!r}" if near else None
            raise DocumentError(
                self.path, f"this key is missing, expected {expected}", key=key, remedy=remedy
            )
        if not _is_whole(value, 1, most):
            raise _unexpected(self.path, key, value, expected)
        assert isinstance(value, int)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _unexpected(self.path, key, value, "true or false")
        return value

    def head_dim(self, hidden_key: str, heads_key: str) -> int:
        """Return the width of a head where the file does not give it: hidden size / heads."""
        hidden, heads = self.number(hidden_key), self.number(heads_key)
        if hidden % heads:
            raise DocumentError(
                self.path,
                f"the value is {heads}, which does not divide {hidden_key} {hidden}",
                key=heads_key,
                remedy="change one of them",
            )
        return hidden // heads

    def name(self) -> str:
        text = self.data.get("_name_or_path") or self.path.resolve().parent.name
        return str(text).rstrip("/").split("/")[-1]

    def model(self, *layers: LayerSpec, tied: bool, **values: int) -> ModelSpec:
        for layer in layers:
            _checked_layer(self.path, layer, "num_attention_heads", "num_key_value_heads")
        return ModelSpec(
            name=self.name(),
            layers=layers,
            vocab_size=self.number("vocab_size"),
            tied_embeddings=self.flag("tie_word_embeddings", tied),
            **values,
        )


def _llama(config: _Config, *, qkv_biases: bool = False) -> ModelSpec:
    heads, hidden = config.number("num_attention_heads"), config.number("hidden_size")
    layer = LayerSpec(
        num_layers=config.number("num_hidden_layers"),
        seq_length=config.number("max_position_embeddings"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.number("num_key_value_heads", heads),
        head_dim=(
            config.head_dim("hidden_size", "num_attention_heads")
            if config.data.get("head_dim") is None
            else config.number("head_dim")
        ),
        ffn_hidden_size=config.number("intermediate_size"),
        gated_mlp=True,
        qkv_biases=qkv_biases,
        biases=config.flag("mlp_bias", False),
    )
    return config.model(layer, tied=False)


def _gpt2(config: _Config) -> ModelSpec:
    ffn = config.number("n_inner", 4 * config.number("n_embd"))
    old_name = config.data.get("n_positions") is None and "n_ctx" in config.data
    positions = config.number("n_ctx" if old_name else "n_positions")
    layer = _biased(config, ("n_embd", "n_head", "n_layer"), positions, ffn)
    return config.model(layer, tied=True, learned_positions=positions)


def _gpt_neox(config: _Config) -> ModelSpec:
    positions = config.number("max_position_embeddings")
    ffn = config.number("intermediate_size")
    layer = _biased(config, _NAMES, positions, ffn)
    return config.model(layer, tied=False)


def _opt(config: _Config) -> ModelSpec:
    hidden = config.number("hidden_size")
    if config.number("word_embed_proj_dim", hidden) != hidden:
        raise DocumentError(
            config.path,
            f"is {config.data['word_embed_proj_dim']}, not hidden_size {hidden}; projected "
            "embeddings are not supported",
            key="word_embed_proj_dim",
        )
    positions = config.number("max_position_embeddings")
    ffn = config.number("ffn_dim")
    layer = _biased(config, _NAMES, positions, ffn)
    return config.model(layer, tied=True, learned_positions=positions + 2)  # OPT's offset of 2


def _bert(config: _Config) -> ModelSpec:
    hidden = config.number("hidden_size")
    positions = config.number("max_position_embeddings")
    ffn = config.number("intermediate_size")
    layer = _biased(config, _NAMES, positions, ffn, causal=False)
    vocab = config.number("vocab_size")
    return config.model(
        layer,
        tied=True,
        learned_positions=positions,
        extra_embedding_parameters=config.number("type_vocab_size", 2) * hidden,
        # masked-language-model head: dense h*h + h, LayerNorm 2h, output bias
        extra_head_parameters=hidden * hidden + 3 * hidden + vocab,
    )


def _t5(config: _Config) -> ModelSpec:
    heads = config.number("num_heads")
    encoder = LayerSpec(
        num_layers=config.number("num_layers"),
        seq_length=config.number("n_positions", 512),
        hidden_size=config.number("d_model"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.number("d_kv"),
        ffn_hidden_size=config.number("d_ff"),
        gated_mlp=str(config.data.get("feed_forward_proj", "relu")).startswith("gated"),
        causal=False,
    )
    decoder = dataclasses.replace(
        encoder,
        num_layers=config.number("num_decoder_layers", encoder.num_layers),
        causal=True,
        cross_attention=True,
        norm_parameters_per_hidden=3,
    )
    # one table of relative position biases each for encoder and decoder
    biases = 2 * config.number("relative_attention_num_buckets", 32) * heads
    return config.model(encoder, decoder, tied=True, extra_embedding_parameters=biases)


def _biased(
    config: _Config, keys: tuple[str, str, str], positions: int, ffn: int, *, causal: bool = True
) -> LayerSpec:
    """Return a layer with LayerNorms (4h), biases everywhere and a two-matrix MLP.

    `keys`: what the file calls hidden size, heads and layers.
    """
    hidden_key, heads_key, layers_key = keys
    hidden, heads = config.number(hidden_key), config.number(heads_key)
    return LayerSpec(
        num_layers=config.number(layers_key),
        seq_length=positions,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=config.head_dim(hidden_key, heads_key),
        ffn_hidden_size=ffn,
        causal=causal,
        biases=True,
        norm_parameters_per_hidden=4,
    )


_FAMILIES: dict[str, Callable[[_Config], ModelSpec]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "opt": _opt,
    "qwen2": lambda config: _llama(config, qkv_biases=True),
    "t5": _t5,
}


def parse_hugging_face(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Hugging Face `config.json`; raises DocumentError naming the key."""
    family = data.get("model_type")
    parse = _FAMILIES.get(family) if isinstance(family, str) else None
    if parse is None:
        found = f"the value is {shorten(family)}" if "model_type" in data else "this key is missing"
        raise DocumentError(
            path,
            f"{found}, expected one of {', '.join(_FAMILIES)}",
            key="model_type",
            remedy='or write {"format": "autopar-model", "name": ..., "layers": [{"num_layers": '
            '..., "seq_length": ..., "hidden_size": ..., "num_heads": ..., "ffn_hidden_size": '
            '...}], "vocab_size": ...} (docs/estimates.md)',
        )
    return parse(_Config(path, data))
