"""Reads, writes and counts model specs: what an architecture is, before anything is measured.

A spec comes from a shipped name, from a Hugging Face `config.json` or from our own `model.json`
(`{"format": "autopar-model", "version": 1, "name": ..., "layers": [{...}], ...}`, keys as in
`autopar.model.ModelSpec` and `LayerSpec`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from autopar.documents import catalog
from autopar.documents.checks import (
    FLAG,
    StrictObject,
    Value,
    published,
    validate_document,
    whole_number,
)
from autopar.documents.json import load_object, shorten, write_json
from autopar.errors import DocumentError, OptionError, nearest
from autopar.model import LayerSpec, ModelSpec
from autopar.objects import AliasChoices, BaseModel, ConfigDict, Field, create_model
from autopar.units import format_count

__all__ = [
    "FORMAT",
    "ModelDocument",
    "bare_spec",
    "checked_layer",
    "load_spec",
    "parse_hugging_face",
    "parse_own",
    "resized",
    "write_spec",
]


# --------------------------------------------------------------------------------------------------
# Parses `model.json`, our own file that describes a model, and checks what specs hold.


FORMAT = "autopar-model"
"""What `format` says in our own file."""
_NOT_OF_THE_SPEC = ("format", "version", "source")
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


def _largest(key: str) -> int:
    """Return the largest plausible value of a whole number."""
    return _MOST.get(key, _MOST_OTHERS)


def _is_ratio(value: object) -> bool:
    """Return whether a value of a document is a base or a factor: a number from 1 to 1e12."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 <= value <= 1e12  # infinite numbers and NaN are not


_RATIO = Value(
    "a number from 1 to 1e12", _is_ratio, {"type": "number", "minimum": 1, "maximum": 1e12}
)
_LAYER = '{"num_layers": ..., "seq_length": ..., "hidden_size": ...}'


def _field(field: dataclasses.Field[Any]) -> tuple[Any, Any]:
    """Return type and default of a key, from the field of the dataclass that it fills."""
    # annotations are texts here, so the kind is what they begin with
    kind, key = str(field.type), field.name
    if kind.startswith("bool"):
        value = FLAG
    elif kind.startswith("str"):
        text = {"type": "string", "minLength": 1}
        value = Value("a text", lambda x: isinstance(x, str) and bool(x), text)
    elif kind.startswith("float"):
        value = _RATIO
    else:
        # 0 only where it stands for none of them
        value = whole_number(int(key not in _NOT_POSITIVE_ONLY), _largest(key))
    annotated = Annotated[Any, value]
    default = ... if field.default is dataclasses.MISSING else field.default
    return (annotated | None if "None" in kind else annotated), default


def _fields(kind: type[LayerSpec | ModelSpec]) -> dict[str, Any]:
    return {f.name: _field(f) for f in dataclasses.fields(kind) if f.name != "layers"}


_Layer: Any = Annotated[
    create_model(
        "LayerDocument", __base__=StrictObject, __doc__="A layer type.", **_fields(LayerSpec)
    ),
    Value(f"a layer type, {_LAYER}", lambda x: isinstance(x, dict), {}, inside=True),
]
_LAYERS = Value(
    f"a list of layer types, [{_LAYER}]",
    lambda x: isinstance(x, list) and bool(x),
    {"minItems": 1},
    inside=True,
)
_MODEL: dict[str, Any] = {
    "format": (Annotated[Any, Value(repr(FORMAT), lambda x: x == FORMAT, {"const": FORMAT})], None),
    "version": (Annotated[Any, Value("1", lambda x: x == 1, {"const": 1})], 1),
    "source": (Any, None),
    "layers": (Annotated[list[_Layer], _LAYERS], ...),
    **_fields(ModelSpec),
}
ModelDocument = published("model")(
    create_model(
        "ModelDocument",
        __base__=StrictObject,
        __doc__="What an architecture is (`model.json`): layer types in execution order, and the "
        "rest.",
        **_MODEL,
    )
)


def parse_own(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of our `model.json`; raises DocumentError naming file, key and value."""
    try:
        document = validate_document(ModelDocument, path, data)
    except DocumentError as error:
        # pydantic spells an item layers.0.key, users look for layers[0].key
        key = re.sub(r"\.([0-9]+)(?=\.|$)", r"[\1]", error.key or "")
        raise DocumentError(path, error.problem, key=key, remedy=error.remedy) from None
    content = document.model_dump(exclude=set(_NOT_OF_THE_SPEC))
    layers = [
        checked_layer(path, LayerSpec(**layer), {k: f"layers[{index}].{k}" for k in layer})
        for index, layer in enumerate(content.pop("layers"))
    ]
    return ModelSpec(layers=tuple(layers), **content)


def checked_layer(path: Path, layer: LayerSpec, keys: Mapping[str, str]) -> LayerSpec:
    """Return the layer after checking that heads, widths and experts agree with one another.

    keys : what the file calls `num_heads`, `num_kv_heads`, `num_experts`, `experts_per_token`.
    """
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    # heads of a width of their own need not divide the hidden size
    if heads is not None and layer.head_dim is None and layer.hidden_size % heads:
        raise DocumentError(
            path,
            f"the value is {heads}, which does not divide hidden_size {layer.hidden_size}",
            key=keys["num_heads"],
            remedy="change one of them or give head_dim as well",
        )
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise DocumentError(
            path,
            f"the value is {kv_heads}, which does not divide the {heads} attention heads",
            key=keys["num_kv_heads"],
            remedy="give a divisor",
        )
    experts, visited = layer.num_experts, layer.experts_per_token
    if (experts is None) != (visited is None):
        have, missing = ("num_experts", "experts_per_token")[:: 1 if visited is None else -1]
        raise DocumentError(
            path,
            f"this key is missing and {keys[have]} is given",
            key=keys[missing],
            remedy="give both or neither",
        )
    if experts is not None and visited is not None and visited > experts:
        raise DocumentError(
            path,
            f"the value is {visited}, more than the {experts} experts of {keys['num_experts']}",
            key=keys["experts_per_token"],
            remedy="give at most as many",
        )
    return layer


# --------------------------------------------------------------------------------------------------
# Parses the `config.json` of Hugging Face models, without importing any of their code.


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


_Whole = Annotated[int, whole_number(1, _largest("hidden_size"))]
_Layers = Annotated[int, whole_number(1, _largest("num_layers"))]
_Switch = Annotated[bool, FLAG]
_Ratio = Annotated[float, _RATIO]


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
        if kind == "llama3" and alike and factor is not None and _is_ratio(factor):
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


# --------------------------------------------------------------------------------------------------
# A spec by name or path, written again, and what follows from it by counting.


_LAYER_FIELDS = {f.name: f for f in dataclasses.fields(LayerSpec)}
_MODEL_FIELDS = {f.name: f for f in dataclasses.fields(ModelSpec)}


def load_spec(
    name_or_path: str,
    *,
    num_layers: Sequence[int] | None = None,
    seq_length: Sequence[int] | None = None,
    hidden_size: Sequence[int] | None = None,
    **widths: int | None,
) -> ModelSpec:
    """Return the spec of a shipped name, a Hugging Face `config.json` or our `model.json`.

    Overrides hold one value for all layer types or one per type; `widths` are `num_heads`,
    `num_kv_heads`, `head_dim` and `ffn_hidden_size` of all. What is not given follows, see
    `resized`. Raises InputError (DocumentError, OptionError) with the remedy.
    """
    path = catalog.find_model(name_or_path)
    data = load_object(path).data
    if "format" in data and data["format"] != FORMAT:
        # before anything else is said about a document of another kind
        raise DocumentError(
            path,
            f"the value is {shorten(data['format'])}, expected {FORMAT!r}",
            key="format",
            remedy="give a model.json or a config.json",
        )
    if "format" in data or ("layers" in data and "model_type" not in data):
        # without `format` it is ours where it has layers and no family
        spec = parse_own(path, data)
    else:
        spec = parse_hugging_face(path, data)
    published = catalog.published_name(name_or_path)
    if published is not None:
        spec = dataclasses.replace(spec, name=name_or_path)
        seq_length = (published[1],) if seq_length is None else seq_length
    layers = list(spec.layers)
    for option, values in (("num_layers", num_layers), ("seq_length", seq_length)):
        for index, value in enumerate(_per_type(option, values, len(layers), spec.name)):
            changed: dict[str, Any] = {option: value}
            layers[index] = dataclasses.replace(layers[index], **changed)
    hidden: list[Any] = _per_type("hidden_size", hidden_size, len(layers), spec.name)
    hidden = hidden or [None] * len(layers)
    sized = tuple(
        resized(layer, hidden_size=value, **widths)
        for layer, value in zip(layers, hidden, strict=True)
    )
    if sized != tuple(layers):
        # another model: its plans and files must not take the names of those of this one
        first = sized[0]
        spec = dataclasses.replace(
            spec, name=f"{spec.name}_hidden{first.hidden_size}_head{first.num_heads}"
        )
    return dataclasses.replace(spec, layers=sized)


def resized(
    layer: LayerSpec,
    *,
    hidden_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    ffn_hidden_size: int | None = None,
) -> LayerSpec:
    """Return the layer with other sizes; what is not given follows from what is.

    MLP width grows with the hidden size. As many query heads share a key-value head as before.
    Heads divide the hidden size where they did, and keep their width where they did not.

    Raises
    ------
    OptionError: something that follows is no whole number; it names what to give.
    """
    hidden, heads = hidden_size or layer.hidden_size, num_heads or layer.num_heads
    old_heads = layer.num_heads
    follows: dict[str, tuple[int, int, str]] = {}
    if ffn_hidden_size is None and layer.ffn_hidden_size is not None:
        ratio = f"the MLP of width {layer.ffn_hidden_size} over hidden size {layer.hidden_size}"
        follows["ffn_hidden_size"] = (layer.ffn_hidden_size * hidden, layer.hidden_size, ratio)
    if num_kv_heads is None and layer.num_kv_heads and heads and old_heads:
        ratio = f"{layer.num_kv_heads} key-value heads for {old_heads} heads"
        follows["num_kv_heads"] = (layer.num_kv_heads * heads, old_heads, ratio)
    width = layer.head_dim
    if head_dim is None and heads and old_heads:
        if width is None or width * old_heads == layer.hidden_size:
            follows["head_dim"] = (hidden, heads, "heads that divide the hidden size")
        elif hidden != layer.hidden_size:
            ratio = f"heads of width {width} at hidden size {layer.hidden_size}"
            follows["head_dim"] = (width * hidden, layer.hidden_size, ratio)
    given = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "ffn_hidden_size": ffn_hidden_size,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return layer
    changes: dict[str, Any] = dict(chosen)
    for name, (product, divisor, ratio) in follows.items():
        changes[name], rest = divmod(product, divisor)
        if rest or not changes[name]:
            said = ", ".join(f"--{n.replace('_', '-')} {v}" for n, v in chosen.items())
            raise OptionError(
                f"{said}: no whole number keeps {ratio}; give --{name.replace('_', '-')} as well"
            )
    # a width that follows from hidden size and heads is not said again
    if layer.head_dim is None and "head_dim" not in chosen:
        changes.pop("head_dim", None)
    new = dataclasses.replace(layer, **changes)
    if new.num_heads and new.num_kv_heads and new.num_heads % new.num_kv_heads:
        raise OptionError(
            f"--num-kv-heads: {new.num_kv_heads} does not divide the {new.num_heads} attention "
            "heads; give a divisor"
        )
    return new


def bare_spec(
    *,
    num_layers: Sequence[int],
    seq_length: Sequence[int],
    hidden_size: Sequence[int],
    num_heads: Sequence[int] | None = None,
    name: str = "custom",
) -> ModelSpec:
    """Return a spec that knows only sizes, for documented files alone (no divisibility checks).

    Every argument holds one value per layer type; shorter ones hold one value for all.
    """
    types = max(len(num_layers), len(seq_length), len(hidden_size), len(num_heads or ()))
    columns: dict[str, Sequence[Any]] = {
        "num_layers": _per_type("num_layers", num_layers, types, name),
        "seq_length": _per_type("seq_length", seq_length, types, name),
        "hidden_size": _per_type("hidden_size", hidden_size, types, name),
        "num_heads": _per_type("num_heads", num_heads, types, name) or [None] * types,
    }
    return ModelSpec(
        name=name,
        layers=tuple(
            LayerSpec(**{key: column[k] for key, column in columns.items()}) for k in range(types)
        ),
    )


def write_spec(spec: ModelSpec, path: Path, *, source: str | None = None) -> None:
    """Write a spec as our `model.json`; fields that have their default value are left out."""
    document: dict[str, Any] = {"format": FORMAT, "version": 1, "name": spec.name}
    if source is not None:
        document["source"] = source
    document["layers"] = [
        {k: v for k, v in vars(layer).items() if v != _LAYER_FIELDS[k].default}
        for layer in spec.layers
    ]
    for key, field in _MODEL_FIELDS.items():
        value = getattr(spec, key)
        if key not in ("name", "layers") and value != field.default:
            document[key] = value
    write_json(path, document)


# --- overrides -----------------------------------------------------------------------------


def _per_type(option: str, values: Sequence[int] | None, types: int, name: str) -> list[int]:
    if values is None:
        return []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{option} must be a positive whole number, got {value!r}")
    if len(values) not in (1, types):
        raise OptionError(
            f"{option} has {format_count(len(values), 'value')} but model {name!r} has "
            f"{types} layer type(s); give one value or one per type"
        )
    return list(values) * (types if len(values) == 1 else 1)
