"""Parses the `config.json` of Hugging Face models, without importing any of their code."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import shorten
from autopar.model import LayerSpec, ModelSpec
from autopar.spec_files import RATIO, checked_layer, is_ratio, largest, unexpected, whole

__all__ = ["parse_hugging_face"]

_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers")
_LAYER_KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
"""What the file calls the fields that are checked against one another."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What files call the number of experts."""
_LLAMA3_SCALING = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""What every release of Llama from 3.1 on has beside its factor; engines take it for granted."""


class _Config:
    """A `config.json` whose values are checked as they are asked for."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data

    def number(self, key: str, default: int | None = None) -> int:
        value, most = self.data.get(key), largest("num_layers" if "layer" in key else key)
        expected = f"a whole number from 1 to {most}"
        if value is None and default is not None:
            return default
        if key not in self.data:
            near = difflib.get_close_matches(key, list(self.data), n=1, cutoff=0.8)
            remedy = f"the file has the similar key {near[0]!r}" if near else None
            raise DocumentError(
                self.path, f"this key is missing, expected {expected}", key=key, remedy=remedy
            )
        if not whole(value, 1, most):
            raise unexpected(self.path, key, value, expected)
        assert isinstance(value, int)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise unexpected(self.path, key, value, "true or false")
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

    def rotary(self, default: float) -> dict[str, float | None]:
        """Return base and scaling of rotary positions, from the keys of transformers 4 or 5.

        default : the base that the family's configuration class of transformers has.
        """
        unknown: dict[str, float | None] = {"rotary_base": None, "rotary_scaling_factor": None}
        section: Mapping[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.data.get(key)
            if value is not None and not isinstance(value, dict):
                raise unexpected(self.path, key, value, "an object or null")
            section = value or section
        base = section.get("rope_theta")
        key = "rope_theta" if base is None else "rope_parameters.rope_theta"
        base = self.data.get("rope_theta") if base is None else base
        if base is not None and not is_ratio(base):
            raise unexpected(self.path, key, base, RATIO)
        found: dict[str, float | None] = {"rotary_base": float(default if base is None else base)}
        parts = (self.data.get("partial_rotary_factor"), section.get("partial_rotary_factor"))
        kind = section.get("rope_type", section.get("type", "default"))
        if any(part not in (None, 1) for part in parts):
            return unknown
        if kind == "default" and not any(isinstance(value, dict) for value in section.values()):
            return found
        factor = section.get("factor")
        alike = all(section.get(key) == value for key, value in _LLAMA3_SCALING.items())
        if kind == "llama3" and alike and factor is not None and is_ratio(factor):
            return {**found, "rotary_scaling_factor": float(factor)}
        return unknown

    def name(self) -> str:
        text = self.data.get("_name_or_path") or self.path.resolve().parent.name
        return str(text).rstrip("/").split("/")[-1]

    def model(self, *layers: LayerSpec, tied: bool, **values: Any) -> ModelSpec:
        for layer in layers:
            checked_layer(self.path, layer, _LAYER_KEYS)
        return ModelSpec(
            name=self.name(),
            layers=layers,
            vocab_size=self.number("vocab_size"),
            tied_embeddings=self.flag("tie_word_embeddings", tied),
            **values,
        )


def _llama(
    config: _Config, *, base: float = 1e4, qkv_biases: bool = False, experts: bool = False
) -> ModelSpec:
    # base: `default_theta` of the family in transformers, src/transformers/models/*/
    heads, hidden = config.number("num_attention_heads"), config.number("hidden_size")
    biases = config.flag("mlp_bias", False)
    if not qkv_biases and config.flag("attention_bias", False) != biases:
        raise DocumentError(
            config.path,
            f"is {str(not biases).lower()} and mlp_bias is {str(biases).lower()}; layers with "
            "biases in only one of attention and MLP are not supported",
            key="attention_bias",
            remedy="describe the model in a model.json",
        )
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
        biases=biases,
        num_experts=config.number("num_local_experts") if experts else None,
        experts_per_token=config.number("num_experts_per_tok") if experts else None,
    )
    return config.model(layer, tied=False, **config.rotary(base))


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
    "mixtral": lambda config: _llama(config, base=1e6, experts=True),
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
        near = difflib.get_close_matches(str(family)[:50], list(_FAMILIES), n=1, cutoff=0.6)
        raise DocumentError(
            path,
            f"{found}, expected one of {', '.join(_FAMILIES)}"
            + (f" (the nearest is {near[0]})" if near else ""),
            key="model_type",
            remedy='or write {"format": "autopar-model", "name": ..., "layers": [{"num_layers": '
            '..., "seq_length": ..., "hidden_size": ..., "num_heads": ..., "ffn_hidden_size": '
            '...}], "vocab_size": ...} (docs/estimates.md)',
        )
    for key in _EXPERTS:
        if family != "mixtral" and key in data and data[key] not in (None, 1):
            raise DocumentError(
                path,
                f"the value is {shorten(data[key])}, but {family} is read with one MLP per layer",
                key=key,
                remedy="use model_type mixtral, or describe the model in a model.json",
            )
    return parse(_Config(path, data))
