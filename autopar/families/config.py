"""Reads the `config.json` of Hugging Face models, without importing any of their code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from autopar.documents.checks import FLAG, Value, validate_document, whole_number
from autopar.documents.json import shorten
from autopar.errors import DocumentError, nearest
from autopar.families.consistency import MOST_LAYERS, MOST_SIZE, RATIO, checked_layer, is_ratio
from autopar.model import LayerSpec, ModelSpec
from autopar.objects import AliasChoices, BaseModel, ConfigDict, Field

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


_Whole = Annotated[int, whole_number(1, MOST_SIZE)]
_Layers = Annotated[int, whole_number(1, MOST_LAYERS)]
_Switch = Annotated[bool, FLAG]
_Ratio = Annotated[float, RATIO]


class _Config(BaseModel):
    """The keys of a `config.json` that say what the architecture is; files have many others."""

    model_config = ConfigDict(defer_build=True, frozen=True)

    vocab_size: _Whole
    tie_word_embeddings: _Switch | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        """Return the architecture; raises DocumentError where keys contradict each other."""
        raise NotImplementedError

    def model(
        self, path: Path, name: str, *layers: LayerSpec, tied: bool, **values: Any
    ) -> ModelSpec:
        """Return the model of these layers; tied : what the family does where it is not said."""
        for layer in layers:
            checked_layer(path, layer, _LAYER_KEYS)
        said = self.tie_word_embeddings
        return ModelSpec(
            name=name,
            layers=layers,
            vocab_size=self.vocab_size,
            tied_embeddings=tied if said is None else said,
            **values,
        )


def _divided(path: Path, config: BaseModel, hidden_key: str, heads_key: str) -> int:
    """Return the width of a head where the file does not give it: hidden size / heads."""
    hidden, heads = getattr(config, hidden_key), getattr(config, heads_key)
    if hidden % heads:
        raise DocumentError(
            path,
            f"the value is {heads}, which does not divide {hidden_key} {hidden}",
            key=heads_key,
            remedy="change one of them",
        )
    width: int = hidden // heads
    return width


class _Rope(BaseModel):
    """Of rotary positions: what transformers 4 calls rope_scaling and 5 rope_parameters."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow")

    rope_theta: _Ratio | None = None


_Section = Annotated[
    _Rope, Value("an object or null", lambda value: isinstance(value, dict), {}, inside=True)
]


class _Llama(_Config):
    """Llama and those that are built like it."""

    base: ClassVar[float] = 1e4
    """`default_theta` of the family in transformers, src/transformers/models/*/"""
    qkv_biases: ClassVar[bool] = False
    qk_norms: ClassVar[bool] = False

    num_hidden_layers: _Layers
    max_position_embeddings: _Whole
    hidden_size: _Whole
    num_attention_heads: _Whole
    num_key_value_heads: _Whole | None = None
    head_dim: _Whole | None = None
    intermediate_size: _Whole
    attention_bias: _Switch | None = None
    mlp_bias: _Switch | None = None
    rope_theta: _Ratio | None = None
    rope_scaling: _Section | None = None
    rope_parameters: _Section | None = None
    partial_rotary_factor: Any = None

    @property
    def experts(self) -> dict[str, Any]:
        """Number of experts, and of those that a token visits; empty for one MLP."""
        return {}

    def spec(self, path: Path, name: str) -> ModelSpec:
        biases = bool(self.mlp_bias)
        if not self.qkv_biases and bool(self.attention_bias) != biases:
            raise DocumentError(
                path,
                f"is {str(not biases).lower()} and mlp_bias is {str(biases).lower()}; layers with "
                "biases in only one of attention and MLP are not supported",
                key="attention_bias",
                remedy="describe the model in a model.json",
            )
        layer = LayerSpec(
            num_layers=self.num_hidden_layers,
            seq_length=self.max_position_embeddings,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_dim or _divided(path, self, "hidden_size", "num_attention_heads"),
            ffn_hidden_size=self.intermediate_size,
            gated_mlp=True,
            qkv_biases=self.qkv_biases,
            qk_norms=self.qk_norms,
            biases=biases,
            **self.experts,
        )
        return self.model(path, name, layer, tied=False, **self._rotary())

    def _rotary(self) -> dict[str, float | None]:
        """Return base and scaling of rotary positions, from the keys of transformers 4 or 5."""
        unknown: dict[str, float | None] = {"rotary_base": None, "rotary_scaling_factor": None}
        section: dict[str, Any] = {}
        for part in (self.rope_scaling, self.rope_parameters):
            section = (part.model_dump(exclude_unset=True) if part is not None else {}) or section
        # transformers 5 keeps the base in the section, 4 at the top
        given = section.get("rope_theta")
        given = self.rope_theta if given is None else given
        found: dict[str, float | None] = {"rotary_base": float(given or self.base)}
        parts = (self.partial_rotary_factor, section.get("partial_rotary_factor"))
        kind = section.get("rope_type", section.get("type", "default"))
        # positions that turn a part of every head cannot be said in a spec
        if any(part not in (None, 1) for part in parts):
            return unknown
        # objects inside the section: one set of positions for each kind of layers
        if kind == "default" and not any(isinstance(value, dict) for value in section.values()):
            return found
        factor = section.get("factor")
        alike = all(section.get(key) == value for key, value in _LLAMA3_SCALING.items())
        if kind == "llama3" and alike and factor is not None and is_ratio(factor):
            return {**found, "rotary_scaling_factor": float(factor)}
        return unknown


class _Qwen2(_Llama):
    qkv_biases = True


class _Qwen3(_Llama):
    qk_norms = True

    head_dim: _Whole | None = 128


class _Mixtral(_Llama):
    base = 1e6

    num_local_experts: _Whole
    num_experts_per_tok: _Whole

    @property
    def experts(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_local_experts,
            "experts_per_token": self.num_experts_per_tok,
        }


def _biased(
    path: Path,
    config: BaseModel,
    keys: tuple[str, str, str],
    positions: int,
    ffn: int,
    *,
    causal: bool = True,
) -> LayerSpec:
    """Return a layer with LayerNorms (4h), biases everywhere and a two-matrix MLP.

    `keys`: what the file calls hidden size, heads and layers.
    """
    hidden, heads, layers = (getattr(config, key) for key in keys)
    return LayerSpec(
        num_layers=layers,
        seq_length=positions,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_divided(path, config, *keys[:2]),
        ffn_hidden_size=ffn,
        causal=causal,
        biases=True,
        norm_parameters_per_hidden=4,
    )


class _Gpt2(_Config):
    n_embd: _Whole
    n_head: _Whole
    n_layer: _Layers
    n_inner: _Whole | None = None
    # files of the first releases call it n_ctx
    n_positions: _Whole = Field(validation_alias=AliasChoices("n_positions", "n_ctx"))

    def spec(self, path: Path, name: str) -> ModelSpec:
        keys = ("n_embd", "n_head", "n_layer")
        layer = _biased(path, self, keys, self.n_positions, self.n_inner or 4 * self.n_embd)
        return self.model(path, name, layer, tied=True, learned_positions=self.n_positions)


class _GptNeox(_Config):
    hidden_size: _Whole
    num_attention_heads: _Whole
    num_hidden_layers: _Layers
    max_position_embeddings: _Whole
    intermediate_size: _Whole

    def spec(self, path: Path, name: str) -> ModelSpec:
        layer = _biased(path, self, _NAMES, self.max_position_embeddings, self.intermediate_size)
        return self.model(path, name, layer, tied=False)


class _Opt(_Config):
    hidden_size: _Whole
    num_attention_heads: _Whole
    num_hidden_layers: _Layers
    max_position_embeddings: _Whole
    ffn_dim: _Whole
    word_embed_proj_dim: _Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        if (self.word_embed_proj_dim or self.hidden_size) != self.hidden_size:
            raise DocumentError(
                path,
                f"is {self.word_embed_proj_dim}, not hidden_size {self.hidden_size}; projected "
                "embeddings are not supported",
                key="word_embed_proj_dim",
            )
        positions = self.max_position_embeddings
        layer = _biased(path, self, _NAMES, positions, self.ffn_dim)
        # OPT's offset of 2
        return self.model(path, name, layer, tied=True, learned_positions=positions + 2)


class _Bert(_GptNeox):
    type_vocab_size: _Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        hidden, positions = self.hidden_size, self.max_position_embeddings
        layer = _biased(path, self, _NAMES, positions, self.intermediate_size, causal=False)
        return self.model(
            path,
            name,
            layer,
            tied=True,
            learned_positions=positions,
            extra_embedding_parameters=(self.type_vocab_size or 2) * hidden,
            # masked-language-model head: dense h*h + h, LayerNorm 2h, output bias
            extra_head_parameters=hidden * hidden + 3 * hidden + self.vocab_size,
        )


class _T5(_Config):
    num_heads: _Whole
    num_layers: _Layers
    num_decoder_layers: _Layers | None = None
    n_positions: _Whole | None = None
    d_model: _Whole
    d_kv: _Whole
    d_ff: _Whole
    feed_forward_proj: Any = "relu"
    relative_attention_num_buckets: _Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        encoder = LayerSpec(
            num_layers=self.num_layers,
            seq_length=self.n_positions or 512,
            hidden_size=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.d_kv,
            ffn_hidden_size=self.d_ff,
            gated_mlp=str(self.feed_forward_proj).startswith("gated"),
            causal=False,
        )
        decoder = dataclasses.replace(
            encoder,
            num_layers=self.num_decoder_layers or encoder.num_layers,
            causal=True,
            cross_attention=True,
            norm_parameters_per_hidden=3,
        )
        # one table of relative position biases each for encoder and decoder
        biases = 2 * (self.relative_attention_num_buckets or 32) * self.num_heads
        return self.model(
            path, name, encoder, decoder, tied=True, extra_embedding_parameters=biases
        )


_FAMILIES: dict[str, type[_Config]] = {
    "bert": _Bert,
    "gpt2": _Gpt2,
    "gpt_neox": _GptNeox,
    "llama": _Llama,
    "mistral": _Llama,
    "mixtral": _Mixtral,
    "opt": _Opt,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "t5": _T5,
}


def parse_hugging_face(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Hugging Face `config.json`; raises DocumentError naming the key."""
    family = data.get("model_type")
    kind = _FAMILIES.get(family) if isinstance(family, str) else None
    if kind is None:
        found = f"the value is {shorten(family)}" if "model_type" in data else "this key is missing"
        near = nearest(str(family)[:50], _FAMILIES, 0.6)
        raise DocumentError(
            path,
            f"{found}, expected one of {', '.join(_FAMILIES)}"
            + (f" (the nearest is {near})" if near else ""),
            key="model_type",
            remedy="or describe the model in a model.json, as docs/estimates.md does",
        )
    for key in _EXPERTS:
        if family != "mixtral" and key in data and data[key] not in (None, 1):
            raise DocumentError(
                path,
                f"the value is {shorten(data[key])}, but {family} is read with one MLP per layer",
                key=key,
                remedy="use model_type mixtral, or describe the model in a model.json",
            )
    given = str(data.get("_name_or_path") or "").rstrip("/").split("/")[-1]
    # files without a name lie in a folder that has it; others that lie there have names
    own = path.resolve().parent.name if path.name == "config.json" else path.stem
    name = own if given in ("", ".", "..") else given
    return validate_document(kind, path, data).spec(path, name)
