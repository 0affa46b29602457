"""Parses `model.json`, our own file that describes a model, and checks what specs hold."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import shorten
from autopar.model import LayerSpec, ModelSpec

__all__ = [
    "FORMAT",
    "RATIO",
    "checked_layer",
    "is_ratio",
    "largest",
    "parse_own",
    "unexpected",
    "whole",
]

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
RATIO = "a number from 1 to 1e12"
"""What `is_ratio` takes, in words."""


def parse_own(path: Path, data: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of our `model.json`; raises DocumentError naming file, key and value."""
    if data.get("version", 1) != 1:
        raise unexpected(path, "version", data["version"], "1")
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
        raise unexpected(path, "layers", layers, shape)
    parsed = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict):
            raise unexpected(path, f"layers[{index}]", layer, f"a layer type, {one}")
        prefix = f"layers[{index}]."
        checked = _checked(path, _without_comments(layer), _LAYER_FIELDS, prefix)
        parsed.append(
            checked_layer(path, LayerSpec(**checked), {k: prefix + k for k in _LAYER_FIELDS})
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
        elif kind.startswith("float"):
            expected = RATIO
        else:
            least, most = int(key not in _NOT_POSITIVE_ONLY), largest(key)
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
        elif kind.startswith("float"):
            legal = is_ratio(value)
        else:
            legal = whole(value, least, most)
        if not legal:
            raise unexpected(path, prefix + key, value, expected)
    return dict(values)


def _without_comments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a document but those whose key starts with `_`, for people only."""
    return {key: value for key, value in values.items() if not key.startswith("_")}


def largest(key: str) -> int:
    """Return the largest plausible value of a whole number."""
    return _MOST.get(key, _MOST_OTHERS)


def whole(value: object, least: int, most: int) -> bool:
    """Return whether a value of a document is a whole number in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_ratio(value: object) -> bool:
    """Return whether a value of a document is a base or a factor: a number from 1 to 1e12."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 <= value <= 1e12  # infinite numbers and NaN are not


def unexpected(path: Path, key: str, value: object, expected: str) -> DocumentError:
    """Return the error of a value that is not what the key expects."""
    return DocumentError(path, f"the value is {shorten(value)}, expected {expected}", key=key)


def _unknown(path: Path, key: str, known: list[str], prefix: str = "") -> DocumentError:
    (near,) = difflib.get_close_matches(key[:200], known, n=1, cutoff=0.0)
    return DocumentError(
        path,
        f"this key is unknown; the nearest known key is {near!r}",
        key=prefix + (key if len(key) <= 120 else key[:120] + "..."),
    )


def checked_layer(path: Path, layer: LayerSpec, keys: Mapping[str, str]) -> LayerSpec:
    """Return the layer after checking that heads, widths and experts agree with one another.

    keys : what the file calls `num_heads`, `num_kv_heads`, `num_experts`, `experts_per_token`.
    """
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
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
