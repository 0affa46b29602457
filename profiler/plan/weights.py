"""Shapes of the parameters on one rank, and the number of elements of its ZeRO shards.

Shapes equal those of the modules in `profiler.model.layers.blocks` and `vocab`. ZeRO (torch's
FSDP2) shards every tensor along its first dimension, so shards are whole rows, and the first ranks
have the largest shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from autopar.errors import InputError
from autopar.run.model import LayerSpec, ModelSpec, head_dim, layer_norms, padded_vocab_size


class Tensors(NamedTuple):
    """Tensors of equal shape: rows, elements per row, and number of tensors."""

    rows: int
    row: int
    copies: int = 1


def layer_shapes(
    layer: LayerSpec, degree: int, *, whole_experts: bool = False
) -> tuple[Tensors, ...]:
    """Return the parameter shapes of one layer on one of `degree` tensor-parallel ranks.

    A rank has at least one key-value head. Raises InputError if the MLP width is unknown.

    whole_experts : True to exclude the experts, whose shapes `expert_shapes` returns.
    """
    if layer.ffn_hidden_size is None:
        raise InputError("the width of the MLP is unknown", remedy="Add --model with a model spec")
    h = layer.hidden_size
    attention = [
        *(_head_shapes(layer, degree) if layer.latent is None else _latent_shapes(layer, degree)),
        # attention sinks: one number per head
        Tensors((layer.num_heads or 1) // degree, 1, layer.attention_sinks),
    ]
    if layer.num_experts is not None:
        mlp = [Tensors(layer.num_experts, h), Tensors(layer.num_experts, 1, layer.router_biases)]
        if layer.shared_expert_width:
            mlp += _mlp_shapes(layer, layer.shared_expert_width // degree)
            mlp.append(Tensors(h, 1, layer.shared_expert_gate))
        if not whole_experts:
            mlp += expert_shapes(layer, 1, width=layer.ffn_hidden_size // degree)
    else:
        mlp = _mlp_shapes(layer, layer.ffn_hidden_size // degree)
    blocks = 2 if layer.cross_attention else 1
    return (*attention * blocks, *mlp, Tensors(h, 1, layer.norm_parameters_per_hidden))


def _head_shapes(layer: LayerSpec, degree: int) -> list[Tensors]:
    """Return the parameter shapes of multi-head or grouped-query attention on a rank."""
    width, h, heads = head_dim(layer), layer.hidden_size, layer.num_heads or 1
    kv_heads = layer.num_kv_heads or heads
    query, pair = heads // degree * width, max(1, kv_heads // degree) * width
    # rows are output features, as in torch's linears; ZeRO shards rows
    found = [Tensors(query, h), Tensors(pair, h, 2), Tensors(h, query)]
    if layer.biases or layer.qkv_biases:
        found += [Tensors(query, 1), Tensors(pair, 1, 2)]
    if layer.biases:
        found.append(Tensors(h, 1))
    if layer.qk_norms and layer.wide_qk_norms:
        found += [Tensors(query, 1), Tensors(pair, 1)]
    elif layer.qk_norms:
        found.append(Tensors(width, 1, 2))
    return found


def _latent_shapes(layer: LayerSpec, degree: int) -> list[Tensors]:
    """Return the parameter shapes of latent attention on a rank; down projections are
    replicated."""
    latent, h, own = layer.latent, layer.hidden_size, (layer.num_heads or 1) // degree
    assert latent is not None, "a layer with latent attention"
    rank, narrow = latent.query_rank, latent.key_value_rank
    found = [
        Tensors(own * head_dim(layer), rank or h),
        Tensors(narrow + latent.rotary_width, h),
        Tensors(own * latent.key_width, narrow),
        Tensors(own * latent.value_width, narrow),
        Tensors(h, own * latent.value_width),
    ]
    if rank is not None:
        found.append(Tensors(rank, h))
    if layer.qk_norms:
        found += [Tensors(rank or 0, 1), Tensors(narrow, 1)]
    return found


def _mlp_shapes(layer: LayerSpec, width: int) -> list[Tensors]:
    """Return the parameter shapes of an MLP with hidden width `width` on a rank."""
    h, ups = layer.hidden_size, 2 if layer.gated_mlp else 1
    found = [Tensors(width, h, ups), Tensors(h, width)]
    return [*found, Tensors(width, 1, ups), Tensors(h, 1)] if layer.biases else found


def expert_shapes(layer: LayerSpec, degree: int, *, width: int) -> tuple[Tensors, ...]:
    """Return the parameter shapes of experts on one of `degree` expert-parallel ranks.

    width : MLP width of an expert on the rank.
    """
    own, ups = (layer.num_experts or 0) // degree, 2 if layer.gated_mlp else 1
    h = layer.hidden_size
    # stacked by expert: ZeRO divides between experts, not within one
    found = (Tensors(own, h * width, ups + 1),)
    return (*found, Tensors(own, width, ups), Tensors(own, h)) if layer.biases else found


def first_shapes(spec: ModelSpec, degree: int) -> tuple[Tensors, ...]:
    """Return the parameter shapes of the embedding on one of `degree` vocabulary-parallel ranks."""
    h = spec.layers[0].hidden_size
    shapes = [Tensors(_rows(spec, degree), h)]
    if spec.learned_positions:
        shapes.append(Tensors(spec.learned_positions, h))
    return (*shapes, Tensors(spec.extra_embedding_parameters, 1))


def last_shapes(spec: ModelSpec, degree: int, *, own_table: bool) -> tuple[Tensors, ...]:
    """Return the parameter shapes of final norm and head on one of `degree` ranks.

    own_table : False if the head is tied to an embedding table on this rank.
    """
    last = spec.layers[-1]
    head = [Tensors(_rows(spec, degree), last.hidden_size)] if own_table else []
    # the norm of an encoder is not here: it follows the last encoder layer
    return (*head, final_norm(last), Tensors(spec.extra_head_parameters, 1))


def held(shapes: Iterable[Tensors], pieces: int = 1) -> int:
    """Return the number of elements on the first of `pieces` ZeRO ranks, which has the most."""
    # FSDP2 gives each rank ceil(rows / pieces) rows until none are left
    return sum(-(-shape.rows // pieces) * shape.row * shape.copies for shape in shapes)


def final_norm(layer: LayerSpec) -> Tensors:
    """Return the parameter shape of the norm after the last of these layers."""
    # parameters of a single norm
    return Tensors(layer.hidden_size, 1, layer.norm_parameters_per_hidden // layer_norms(layer))


def _rows(spec: ModelSpec, degree: int) -> int:
    return padded_vocab_size(spec, degree) // degree
