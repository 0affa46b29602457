"""Memory that a layer needs for a moment above what it keeps, while its backward runs.

A formula for each moment that can be the peak: what is alive then, less what is gone by then. In
units of X = S*h*e of one sample, with F = f/h (n*F: twice that for gated MLPs), A = a*d/h and
K = k*d/h (at least one head on every rank), for t ranks:

    MLP         1 + n*F             incoming gradient, gradients of the MLP's inner values
    row linear  1 + (1 + F)/t       sp: the gathered gradient, beside incoming and inner one
    attention   1 + 2*A + 2*K - M   gradients of output, q, k and v; the MLP's M = 2 + 2*F (gated:
                                    2 + 4*F), norm included, are gone
    least       2                   a gradient in and one out; tp: both whole on every rank

Inside the tensor-parallel region terms are over t; outside they are over t with sp and Ulysses.
A mixture, whose tokens visit c experts:

    experts     1 + c*n*F           gated: c less, as outputs of the experts are gone
    routing     1 + 3*c             outputs, their gradients, weighted ones; tp: whole on every
                                    rank; sp: 2*c + c/t, or c + (1 + c*F - c)/t
    attention   as above            M has c*(2 + 2*F) (gated: c*(2 + 4*F)) for its MLP

and the weights of the visits, 2*c*S bytes (sp: 4*c*S/t, Ulysses: 2*c*S/t).
Every rule is at least what `profile-model --source exact` counts of the built-in layers, and equal
to it for the models that are shipped, but for 1 % of a mixture's.
"""

from __future__ import annotations

from typing import Literal

from autopar.model import LayerSpec
from autopar.specs import head_dim

__all__ = ["ShardKind", "backward_bytes"]

ShardKind = Literal["sp", "tp", "ulysses"]
"""Tensor parallelism with and without sequence parallelism, Ulysses; all the same at degree 1."""

_UNKNOWN_SHARE = 0.5
"""Of what a layer keeps. Gated MLPs keep at least 4*F and their gradients take 2*F, plain ones
2*F and F; with the incoming gradient no shipped dense layer is above 0.43 at degree 1."""


def backward_bytes(
    layer: LayerSpec,
    seq_length: int,
    degree: int,
    kind: ShardKind,
    kept_bytes: float,
    *,
    element_bytes: float = 2.0,
) -> float:
    """Return the bytes above `kept_bytes` that one sample's backward needs on a rank.

    kept_bytes : what the layer keeps per sample on that rank. It is used only where heads or MLP
    width are unknown: half of it, and at degrees above 1 one whole activation more.
    """
    unit = float(seq_length) * layer.hidden_size * element_bytes
    visited = float(layer.experts_per_token or layer.num_experts or 0)
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        return _UNKNOWN_SHARE * kept_bytes + unit * (2.0 * visited + (degree > 1))
    t, h = float(degree), float(layer.hidden_size)
    inner = layer.ffn_hidden_size / h
    gradients = (2.0 if layer.gated_mlp else 1.0) * inner
    width = head_dim(layer)
    key_value = max(layer.num_kv_heads or layer.num_heads, degree) * width / h
    attention = 2.0 * layer.num_heads * width / h + 2.0 * key_value
    if visited:
        weights = {"sp": 4.0 / t, "tp": 2.0, "ulysses": 2.0 / t}[kind] * visited * seq_length
        attention -= 2.0 * visited * (gradients + 1.0)
        return unit * _mixture(layer, visited, t, kind, inner, gradients, attention) + weights
    attention -= 2.0 * gradients
    if kind == "tp":
        return unit * max(1.0 + gradients / t, 2.0, attention / t - 1.0)
    moments = [(1.0 + gradients) / t, 2.0 / t, (attention - 1.0) / t]
    if kind == "sp" and degree > 1:
        moments.append(1.0 + max(1.0 + inner, 2.0) / t)
    return unit * max(moments)


def _mixture(
    layer: LayerSpec,
    visited: float,
    t: float,
    kind: ShardKind,
    inner: float,
    gradients: float,
    attention: float,
) -> float:
    """Return the peak of a mixture of experts in units of one activation, its weights left out."""
    gone = visited if layer.gated_mlp else 0.0
    if kind == "tp":
        return max(1.0 + visited * gradients / t - gone, 1.0 + 3.0 * visited, attention / t - 1.0)
    moments = [
        (1.0 + visited * gradients - gone) / t,
        (1.0 + 3.0 * visited) / t,
        (attention - 1.0) / t,
    ]
    if kind == "sp" and t > 1.0:
        moments.append(2.0 * visited + visited / t)
        moments.append(visited + (1.0 + visited * inner - visited) / t)
    return max(moments)
