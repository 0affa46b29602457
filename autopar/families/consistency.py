"""Consistency checks of the values of one layer, for all file formats.

Types and ranges of single values are checked where files are read. Divisibility of widths by ranks
is checked in `autopar.run.plan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.errors import DocumentError
from autopar.limits import MOST_WORDS
from autopar.run.model import (
    MOST_EXPERTS,
    MOST_LAYERS,
    MOST_PARAMETERS,
    MOST_TYPES,
    LayerSpec,
    ModelSpec,
    parameter_count,
    sizes_known,
)


def is_ratio(value: object) -> bool:
    """Return True if a value of a document is a base or a factor: a number from 1 to 1e12."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 1 <= value <= 1e12  # excludes infinity and NaN


_NEEDS = {
    "shared_expert_width": "num_experts",
    "shared_expert_gate": "shared_expert_width",
    "router_biases": "num_experts",
    "whole_every": "window",
    "wide_qk_norms": "qk_norms",
}
"""Fields that have no meaning without another field."""


def checked_model(path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the model unchanged; raises DocumentError for too many layers, words or parameters."""
    if len(spec.layers) > MOST_TYPES:
        raise DocumentError(
            path, f"has {len(spec.layers)} layer types, expected at most {MOST_TYPES}"
        )
    if spec.num_layers > MOST_LAYERS:
        raise DocumentError(path, f"has {spec.num_layers} layers, expected at most {MOST_LAYERS}")
    if (spec.vocab_size or 0) > MOST_WORDS:
        problem = f"the value is {spec.vocab_size}, expected at most {MOST_WORDS}"
        raise DocumentError(path, problem, key="vocab_size")
    parameters = (spec.vocab_size or 0) * spec.layers[0].hidden_size + sum(
        layer.num_layers * parameter_count(layer) for layer in spec.layers if sizes_known(layer)
    )
    if parameters > MOST_PARAMETERS:
        raise DocumentError(
            path, f"has {parameters:.2g} parameters, expected at most {MOST_PARAMETERS:.0e}"
        )
    return spec


def checked_layer(path: Path, layer: LayerSpec, keys: Mapping[str, str]) -> LayerSpec:
    """Return the layer unchanged; raises DocumentError if heads, widths or experts contradict.

    keys : keys in the file of `num_heads`, `num_kv_heads`, `num_experts`, `experts_per_token`.
    """
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    # With an explicit head width, the heads need not divide the hidden size.
    follows = layer.head_dim is None and layer.latent is None
    if heads is not None and follows and layer.hidden_size % heads:
        raise DocumentError(
            path,
            f"the value is {heads}, which does not divide hidden_size {layer.hidden_size}",
            key=keys["num_heads"],
            remedy="Change one of them, or add head_dim",
        )
    if heads is not None and kv_heads is not None and heads % kv_heads:
        raise DocumentError(
            path,
            f"the value is {kv_heads}, which does not divide the {heads} attention heads",
            key=keys["num_kv_heads"],
            remedy="Use a divisor",
        )
    experts, visited = layer.num_experts, layer.experts_per_token
    if (experts is None) != (visited is None):
        have, missing = ("num_experts", "experts_per_token")[:: 1 if visited is None else -1]
        raise DocumentError(
            path,
            f"this key is missing, but {keys[have]} is given",
            key=keys[missing],
            remedy="Give both or neither",
        )
    if experts is not None and experts > MOST_EXPERTS:
        raise DocumentError(
            path,
            f"the value is {experts}, expected at most {MOST_EXPERTS}",
            key=keys["num_experts"],
        )
    if experts is not None and visited is not None and visited > experts:
        raise DocumentError(
            path,
            f"the value is {visited}, more than the {experts} experts of {keys['num_experts']}",
            key=keys["experts_per_token"],
            remedy="Use at most as many",
        )
    for name, needed in _NEEDS.items():
        if getattr(layer, name) and not getattr(layer, needed):
            raise DocumentError(
                path,
                f"this key is given, but {keys.get(needed, needed)} is not",
                key=keys.get(name, name),
                remedy="Give both or neither",
            )
    if layer.latent is not None:
        _check_latent(path, layer, keys)
    return layer


def _check_latent(path: Path, layer: LayerSpec, keys: Mapping[str, str]) -> None:
    """Raise DocumentError if latent attention is combined with fields that it does not support."""
    for name, given in (
        ("head_dim", layer.head_dim),
        ("biases", layer.biases),
        ("qkv_biases", layer.qkv_biases),
        ("cross_attention", layer.cross_attention),
        ("wide_qk_norms", layer.wide_qk_norms),
    ):
        if given:
            raise DocumentError(
                path,
                "contradicts latent, which has its own widths, no biases and no cross-attention",
                key=keys.get(name, name),
                remedy="Remove one of them",
            )
    if layer.num_kv_heads not in (None, layer.num_heads):
        raise DocumentError(
            path,
            f"the value is {layer.num_kv_heads}, but latent attention has keys "
            f"and values for each of its {layer.num_heads} heads",
            key=keys.get("num_kv_heads", "num_kv_heads"),
            remedy="Remove it",
        )
