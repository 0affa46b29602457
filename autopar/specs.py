"""Reads, writes and counts model specs: what an architecture is, before anything is measured.

A spec comes from a shipped name, from a Hugging Face `config.json` or from our own `model.json`
(`{"format": "autopar-model", "version": 1, "name": ..., "layers": [{...}], ...}`, keys as in
`autopar.model.ModelSpec` and `LayerSpec`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar import catalog
from autopar.errors import DocumentError, InputError, OptionError
from autopar.model import LayerSpec, ModelSpec

__all__ = [
    "bare_spec",
    "embedding_parameter_counts",
    "head_dim",
    "load_spec",
    "padded_vocab_size",
    "parameter_count",
    "write_spec",
]

_FORMAT = "autopar-model"
_LAYER_FIELDS = {f.name: f for f in dataclasses.fields(LayerSpec)}
_MODEL_FIELDS = {f.name: f for f in dataclasses.fields(ModelSpec)}
_NOT_POSITIVE_ONLY = {  # integers that may be 0
    "learned_positions",
    "extra_embedding_parameters",
    "extra_head_parameters",
    "norm_parameters_per_hidden",
}


def load_spec(
    name_or_path: str,
    *,
    num_layers: Sequence[int] | None = None,
    seq_length: Sequence[int] | None = None,
    hidden_size: Sequence[int] | None = None,
) -> ModelSpec:
    """Return the spec of a shipped name, a Hugging Face `config.json` or our `model.json`.

    Overrides hold one value for all layer types or one per type. A new hidden size keeps the
    number of heads and scales head and MLP width with it. Raises InputError (DocumentError,
    OptionError) with the remedy.
    """
    path = catalog.find_model(name_or_path)
    data = _read_object(path)
    if data.get("format") == _FORMAT or ("layers" in data and "model_type" not in data):
        spec = _parse_own(path, data)
    else:
        spec = _parse_hugging_face(path, data)
    layers = list(spec.layers)
    for option, values in (
        ("num_layers", num_layers),
        ("seq_length", seq_length),
        ("hidden_size", hidden_size),
    ):
        for index, value in enumerate(_per_type(option, values, len(layers), spec.name)):
            layers[index] = _override(layers[index], option, value)
    return dataclasses.replace(spec, layers=tuple(layers))


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
    document: dict[str, Any] = {"format": _FORMAT, "version": 1, "name": spec.name}
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
    path.write_text(json.dumps(document, indent=4) + "\n", encoding="utf-8")


def head_dim(layer: LayerSpec) -> int:
    """Return the width of one attention head; raises InputError when the heads are unknown."""
    if layer.num_heads is None:
        raise InputError("the number of attention heads is unknown; give a model spec (--model)")
    return layer.head_dim or layer.hidden_size // layer.num_heads


def parameter_count(layer: LayerSpec) -> int:
    """Return the exact number of parameters of one layer.

    h(a + 2k)d + adh for attention (twice with cross-attention), 2hf or 3hf for the MLP, biases
    and norms; a heads and k key-value heads of width d. Raises InputError when a, f are unknown.
    """
    width = head_dim(layer)
    heads = layer.num_heads or 0
    kv_heads = layer.num_kv_heads or heads
    if layer.ffn_hidden_size is None:
        raise InputError("the width of the MLP is unknown; give a model spec (--model)")
    h, ffn = layer.hidden_size, layer.ffn_hidden_size
    qkv = (heads + 2 * kv_heads) * width
    attention = h * qkv + heads * width * h
    if layer.biases or layer.qkv_biases:
        attention += qkv
    if layer.biases:
        attention += h
    up = 2 if layer.gated_mlp else 1
    mlp = (up + 1) * h * ffn + ((up * ffn + h) if layer.biases else 0)
    blocks = 2 if layer.cross_attention else 1
    return blocks * attention + mlp + layer.norm_parameters_per_hidden * h


def padded_vocab_size(spec: ModelSpec, vocab_degree: int = 1) -> int:
    """Return the vocabulary padded to a multiple of the divisor times the vocabulary degree."""
    if spec.vocab_size is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown; give vocab_size in model.json"
        )
    unit = spec.make_vocab_size_divisible_by * vocab_degree
    return math.ceil(spec.vocab_size / unit) * unit


def embedding_parameter_counts(spec: ModelSpec, vocab: int) -> tuple[int, int]:
    """Return the parameters in front of the first layer and behind the last one, unsharded.

    `vocab` is the (padded) vocabulary. The first: vocab*h, learned positions, extras. The second:
    vocab*h unless tied, the final norm of every stack (encoder, decoder), extras.
    """
    first, last = spec.layers[0], spec.layers[-1]
    embedding = vocab * first.hidden_size + spec.learned_positions * first.hidden_size
    head = 0 if spec.tied_embeddings else vocab * last.hidden_size
    stacks = {layer.cross_attention: layer for layer in spec.layers}
    for layer in stacks.values():
        norms = 3 if layer.cross_attention else 2
        head += layer.norm_parameters_per_hidden // norms * layer.hidden_size
    return embedding + spec.extra_embedding_parameters, head + spec.extra_head_parameters


# --- overrides -----------------------------------------------------------------------------


def _per_type(option: str, values: Sequence[int] | None, types: int, name: str) -> list[int]:
    if values is None:
        return []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{option} must be a positive whole number, got {value!r}")
    if len(values) not in (1, types):
        raise OptionError(
            f"{option} has {len(values)} values but model {name!r} has {types} layer type(s); "
            "give one value or one per type"
        )
    return list(values) * (types if len(values) == 1 else 1)


def _override(layer: LayerSpec, option: str, value: int) -> LayerSpec:
    if option != "hidden_size" or value == layer.hidden_size:
        single: dict[str, Any] = {option: value}
        return dataclasses.replace(layer, **single)
    changes: dict[str, Any] = {"hidden_size": value}
    for key in ("head_dim", "ffn_hidden_size"):
        old = getattr(layer, key)
        if old is not None:
            changes[key], rest = divmod(old * value, layer.hidden_size)
            if rest:
                raise OptionError(
                    f"hidden_size {value} does not scale {key} {old} of hidden size "
                    f"{layer.hidden_size} to a whole number; write a model.json instead"
                )
    return dataclasses.replace(layer, **changes)


# --- our own file --------------------------------------------------------------------------


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(path, f"cannot be read ({error})") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(path, f"is not JSON ({error})", remedy="check its end") from error
    if not isinstance(data, dict):
        raise DocumentError(path, f"is a JSON {type(data).__name__}, expected an object")
    return data


def _parse_own(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    if data.get("version", 1) != 1:
        raise DocumentError(path, f"is {data['version']!r}, expected 1", key="version")
    values = {k: v for k, v in data.items() if k not in ("format", "version", "source")}
    layers = values.pop("layers", None)
    if not isinstance(layers, list) or not layers or not all(isinstance(x, dict) for x in layers):
        raise DocumentError(
            path, f"is {layers!r:.60}, expected a list of layer types", key="layers"
        )
    parsed = []
    for index, layer in enumerate(layers):
        prefix = f"layers[{index}]."
        checked = _checked(path, layer, _LAYER_FIELDS, prefix)
        parsed.append(_checked_layer(path, LayerSpec(**checked), prefix))
    known = {k: f for k, f in _MODEL_FIELDS.items() if k != "layers"}
    return ModelSpec(layers=tuple(parsed), **_checked(path, values, known, ""))


def _checked(
    path: Path, values: Mapping[str, Any], fields: Mapping[str, dataclasses.Field[Any]], prefix: str
) -> dict[str, Any]:
    """Return the values of known fields, checked for type and sign."""
    for key in values:
        if key not in fields:
            known = ", ".join(sorted(fields))
            raise DocumentError(path, f"is not a known key (known: {known})", key=prefix + key)
    for key, field in fields.items():
        if key not in values:
            if field.default is dataclasses.MISSING:
                raise DocumentError(path, "is missing", key=prefix + key)
            continue
        value = values[key]
        kind = str(field.type)
        if value is None and "None" in kind:
            continue
        if kind.startswith("bool"):
            legal, expected = isinstance(value, bool), "true or false"
        elif kind.startswith("str"):
            legal, expected = isinstance(value, str) and bool(value), "a text"
        else:
            least = 0 if key in _NOT_POSITIVE_ONLY else 1
            legal = isinstance(value, int) and not isinstance(value, bool) and value >= least
            expected = f"a whole number >= {least}"
        if not legal:
            raise DocumentError(path, f"is {value!r:.60}, expected {expected}", key=prefix + key)
    return dict(values)


def _checked_layer(path: Path, layer: LayerSpec, prefix: str = "") -> LayerSpec:
    """Return the layer after checking that heads, key-value heads and widths agree."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    if heads is not None and layer.head_dim is None and layer.hidden_size % heads:
        raise DocumentError(
            path,
            f"is {heads}, which does not divide hidden_size {layer.hidden_size}",
            key=prefix + "num_heads",
            remedy="give head_dim as well",
        )
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise DocumentError(
            path,
            f"is {kv_heads}, which does not divide num_heads {heads}",
            key=prefix + "num_kv_heads",
        )
    return layer


# --- Hugging Face config.json --------------------------------------------------------------


class _Config:
    """A `config.json` whose values are checked as they are asked for."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data

    def number(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            if default is None:
                raise DocumentError(self.path, "is missing", key=key)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DocumentError(
                self.path, f"is {value!r:.60}, expected a whole number >= 1", key=key
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise DocumentError(self.path, f"is {value!r:.60}, expected true or false", key=key)
        return value

    def name(self) -> str:
        text = self.data.get("_name_or_path") or self.path.resolve().parent.name
        return str(text).rstrip("/").split("/")[-1]

    def model(self, *layers: LayerSpec, tied: bool, **values: int) -> ModelSpec:
        for layer in layers:
            _checked_layer(self.path, layer)
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
        head_dim=config.number("head_dim", max(hidden // heads, 1)),
        ffn_hidden_size=config.number("intermediate_size"),
        gated_mlp=True,
        qkv_biases=qkv_biases,
        biases=config.flag("mlp_bias", False),
    )
    return config.model(layer, tied=False)


def _gpt2(config: _Config) -> ModelSpec:
    hidden, heads = config.number("n_embd"), config.number("n_head")
    positions = config.number("n_positions", config.data.get("n_ctx"))
    layer = _biased(
        config, hidden, heads, "n_layer", positions, config.number("n_inner", 4 * hidden)
    )
    return config.model(layer, tied=True, learned_positions=positions)


def _gpt_neox(config: _Config) -> ModelSpec:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    positions = config.number("max_position_embeddings")
    ffn = config.number("intermediate_size")
    layer = _biased(config, hidden, heads, "num_hidden_layers", positions, ffn)
    return config.model(layer, tied=False)


def _opt(config: _Config) -> ModelSpec:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    if config.number("word_embed_proj_dim", hidden) != hidden:
        raise DocumentError(
            config.path,
            f"is {config.data['word_embed_proj_dim']}, not hidden_size {hidden}; projected "
            "embeddings are not supported",
            key="word_embed_proj_dim",
        )
    positions = config.number("max_position_embeddings")
    ffn = config.number("ffn_dim")
    layer = _biased(config, hidden, heads, "num_hidden_layers", positions, ffn)
    return config.model(layer, tied=True, learned_positions=positions + 2)  # OPT's offset of 2


def _bert(config: _Config) -> ModelSpec:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    positions = config.number("max_position_embeddings")
    ffn = config.number("intermediate_size")
    layer = _biased(config, hidden, heads, "num_hidden_layers", positions, ffn, causal=False)
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
    config: _Config,
    hidden: int,
    heads: int,
    layers_key: str,
    positions: int,
    ffn: int,
    *,
    causal: bool = True,
) -> LayerSpec:
    """Return a layer with LayerNorms (4h), biases everywhere and a two-matrix MLP."""
    return LayerSpec(
        num_layers=config.number(layers_key),
        seq_length=positions,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(hidden // heads, 1),
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


def _parse_hugging_face(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    family = data.get("model_type")
    parse = _FAMILIES.get(family) if isinstance(family, str) else None
    if parse is None:
        raise DocumentError(
            path,
            f"is {family!r:.60}; supported are {', '.join(_FAMILIES)}",
            key="model_type",
            remedy='or write {"format": "autopar-model", "name": ..., "layers": [{"num_layers": '
            '..., "seq_length": ..., "hidden_size": ..., "num_heads": ..., "ffn_hidden_size": '
            '...}], "vocab_size": ...} (docs/estimates.md)',
        )
    return parse(_Config(path, data))
