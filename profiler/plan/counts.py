"""Parameters that a rank holds, exactly: the shapes of its tensors, and ZeRO's pieces of them.

The shapes are those of `profiler.model.blocks` and `outer`; ZeRO divides every tensor along its
first dimension (torch's FSDP2), so a rank has whole rows and the first ranks have the most.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autopar.errors import InputError
from autopar.model import LayerSpec, ModelSpec
from autopar.specs import head_dim, padded_vocab_size

__all__ = ["Shape", "first_shapes", "held", "last_shapes", "layer_shapes"]


class Shape(NamedTuple):
    """Tensors of one shape: rows, elements of a row, and how many tensors there are."""

    rows: int
    row: int
    copies: int = 1


def layer_shapes(layer: LayerSpec, degree: int) -> tuple[Shape, ...]:
    """Return the parameters of one layer on a rank whose weights are divided by `degree`.

    A rank has at least one key-value head. Raises InputError where heads or MLP width are unknown.
    """
    width = head_dim(layer)
    if layer.ffn_hidden_size is None:
        raise InputError("the width of the MLP is unknown; give a model spec (--model)")
    h, heads = layer.hidden_size, layer.num_heads or 1
    kv_heads = layer.num_kv_heads or heads
    query, pair = heads // degree * width, max(1, kv_heads // degree) * width
    attention = [Shape(query, h), Shape(pair, h, 2), Shape(h, query)]
    if layer.biases or layer.qkv_biases:
        attention += [Shape(query, 1), Shape(pair, 1, 2)]
    if layer.biases:
        attention.append(Shape(h, 1))
    ffn, ups = layer.ffn_hidden_size // degree, 2 if layer.gated_mlp else 1
    if layer.num_experts is not None:  # experts are stacked and have no biases
        e = layer.num_experts
        mlp = [Shape(e, h), Shape(e, h * ffn, ups + 1)]
    else:
        mlp = [Shape(ffn, h, ups), Shape(h, ffn)]
        if layer.biases:
            mlp += [Shape(ffn, 1, ups), Shape(h, 1)]
    blocks = 2 if layer.cross_attention else 1
    return (*attention * blocks, *mlp, Shape(h, 1, layer.norm_parameters_per_hidden))


def first_shapes(spec: ModelSpec, degree: int) -> tuple[Shape, ...]:
    """Return the parameters in front of the layers on a rank of a vocabulary degree."""
    h = spec.layers[0].hidden_size
    shapes = [Shape(_rows(spec, degree), h)]
    if spec.learned_positions:
        shapes.append(Shape(spec.learned_positions, h))
    return (*shapes, Shape(spec.extra_embedding_parameters, 1))


def last_shapes(spec: ModelSpec, degree: int, *, own_table: bool) -> tuple[Shape, ...]:
    """Return the parameters behind the layers on a rank of a vocabulary degree.

    own_table : whether the output matrix is another tensor than the embedding's on this rank.
    """
    last = spec.layers[-1]
    stacks = {layer.cross_attention: layer for layer in spec.layers}
    norms = [
        Shape(layer.hidden_size, 1, layer.norm_parameters_per_hidden // (2 + cross))
        for cross, layer in stacks.items()
    ]
    head = [Shape(_rows(spec, degree), last.hidden_size)] if own_table else []
    return (*head, *norms, Shape(spec.extra_head_parameters, 1))


def held(shapes: Iterable[Shape], pieces: int = 1) -> int:
    """Return the elements that the first of so many ranks holds, which no other rank exceeds."""
    return sum(-(-shape.rows // pieces) * shape.row * shape.copies for shape in shapes)


def _rows(spec: ModelSpec, degree: int) -> int:
    return padded_vocab_size(spec, degree) // degree
