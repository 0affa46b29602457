"""Reads, writes and counts model specs: what an architecture is, before anything is measured.

A spec comes from a shipped name, from a Hugging Face `config.json` or from our own `model.json`
(`{"format": "autopar-model", "version": 1, "name": ..., "layers": [{...}], ...}`, keys as in
`autopar.model.ModelSpec` and `LayerSpec`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar import catalog
from autopar.errors import InputError, OptionError
from autopar.hf_config import parse_hugging_face
from autopar.jsonio import load_object
from autopar.model import LayerSpec, ModelSpec
from autopar.spec_files import FORMAT, parse_own
from autopar.units import format_count

__all__ = [
    "bare_spec",
    "embedding_parameter_counts",
    "head_dim",
    "load_spec",
    "padded_vocab_size",
    "parameter_count",
    "write_spec",
]

_LAYER_FIELDS = {f.name: f for f in dataclasses.fields(LayerSpec)}
_MODEL_FIELDS = {f.name: f for f in dataclasses.fields(ModelSpec)}


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
    data = load_object(path).data
    if data.get("format") == FORMAT or ("layers" in data and "model_type" not in data):
        spec = parse_own(path, data)
    else:
        spec = parse_hugging_face(path, data)
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
    path.write_text(json.dumps(document, indent=4) + "\n", encoding="utf-8")


def head_dim(layer: LayerSpec) -> int:
    """Return the width of one attention head; raises InputError when the heads are unknown."""
    if layer.num_heads is None:
        raise InputError("the number of attention heads is unknown; give a model spec (--model)")
    return layer.head_dim or layer.hidden_size // layer.num_heads


def parameter_count(layer: LayerSpec) -> int:
    """Return the exact number of parameters of one layer.

    h(a + 2k)d + adh for attention (twice with cross-attention), 2hf or 3hf for the MLP, biases
    and norms; a heads and k key-value heads of width d. With E experts, E MLPs and a router of hE
    without biases. Raises InputError when a, f are unknown.
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
    if layer.num_experts is not None:
        mlp = layer.num_experts * (mlp + h)
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
            f"{option} has {format_count(len(values), 'value')} but model {name!r} has "
            f"{types} layer type(s); give one value or one per type"
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
