"""A model as arguments of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

from autopar.errors import InputError
from autopar.model import ModelSpec
from autopar.specs import head_dim
from search.exports.common import ROTARY_BASE, required

__all__ = ["Argument", "model_arguments"]

Argument = tuple[str, tuple[str, ...]]
"""A flag without its hyphens in front, and its words."""
_LAYER_NORM = 4
"""Norm parameters per hidden unit of two LayerNorms; two RMSNorms have half of them."""


def model_arguments(spec: ModelSpec) -> tuple[list[Argument], list[str]]:
    """Return the arguments that describe an architecture, and what the user has to add.

    Raises
    ------
    InputError : the model is none that pretrain_gpt.py builds, or its description has gaps.
    """
    layer = spec.layers[-1]
    _check(spec)
    assert layer.num_heads is not None
    arguments: list[Argument] = [
        ("num-layers", (str(spec.num_layers),)),
        ("hidden-size", (str(layer.hidden_size),)),
        ("ffn-hidden-size", (str(layer.ffn_hidden_size),)),
        ("num-attention-heads", (str(layer.num_heads),)),
        ("kv-channels", (str(head_dim(layer)),)),
    ]
    if layer.num_kv_heads not in (None, layer.num_heads):
        arguments += [
            ("group-query-attention", ()),
            ("num-query-groups", (str(layer.num_kv_heads),)),
        ]
    notes: list[str] = []
    positions = max(spec.learned_positions, layer.seq_length)
    arguments += [
        ("seq-length", (str(layer.seq_length),)),
        ("max-position-embeddings", (str(positions),)),
    ]
    if spec.learned_positions:
        arguments.append(("position-embedding-type", ("learned_absolute",)))
    else:
        arguments += [("position-embedding-type", ("rope",)), *_rotary(spec, notes)]
    norm = "LayerNorm" if layer.norm_parameters_per_hidden == _LAYER_NORM else "RMSNorm"
    arguments.append(("normalization", (norm,)))
    if layer.gated_mlp:
        arguments.append(("swiglu", ()))
    if not layer.biases:
        arguments.append(("disable-bias-linear", ()))
        if layer.qkv_biases:
            arguments.append(("add-qkv-bias", ()))
    if not spec.tied_embeddings:
        arguments.append(("untie-embeddings-and-output-weights", ()))
    if layer.num_experts is not None:
        arguments += [
            ("num-experts", (str(layer.num_experts),)),
            ("moe-router-topk", (str(layer.experts_per_token or 1),)),
            ("expert-model-parallel-size", ("1",)),
        ]
    arguments += [
        ("vocab-size", (str(spec.vocab_size),)),
        ("make-vocab-size-divisible-by", (str(spec.make_vocab_size_divisible_by),)),
        ("attention-dropout", ("0.0",)),
        ("hidden-dropout", ("0.0",)),
    ]
    return arguments, notes


def _check(spec: ModelSpec) -> None:
    shapes = {(x.hidden_size, x.num_heads, x.seq_length, x.ffn_hidden_size) for x in spec.layers}
    if len(shapes) > 1 or any(layer.cross_attention for layer in spec.layers):
        raise InputError(
            f"{spec.name} has layers of several kinds, and Megatron-LM's pretrain_gpt.py builds "
            "models of one kind of decoder layers; export to galvatron instead"
        )
    layer = spec.layers[0]
    extra = spec.extra_embedding_parameters or spec.extra_head_parameters
    if not layer.causal or extra:
        raise InputError(
            f"{spec.name} is no decoder-only model, the kind that Megatron-LM's pretrain_gpt.py "
            "builds; export to galvatron instead"
        )
    for what, value in (
        ("num_heads", layer.num_heads),
        ("ffn_hidden_size", layer.ffn_hidden_size),
        ("vocab_size", spec.vocab_size),
    ):
        if value is None:
            raise InputError(
                f"the description of {spec.name} does not hold {what}, which Megatron-LM needs; "
                "give --model NAME, a config.json or a model.json"
            )


def _rotary(spec: ModelSpec, notes: list[str]) -> list[Argument]:
    """Return base and scaling of rotary positions; the launch asks for a base that is unknown.

    Flags: `_add_network_size_args` in `megatron/training/arguments.py`; its scaling has the other
    three numbers of Llama 3.1 fixed.
    """
    base = spec.rotary_base
    if base is None:
        notes.append(
            "the model description does not hold the base of rotary positions: the launch asks for "
            "ROTARY_BASE"
        )
        return [("rotary-base", (required("ROTARY_BASE", ROTARY_BASE),))]
    arguments: list[Argument] = [
        ("rotary-base", (str(int(base)) if base.is_integer() else repr(base),))
    ]
    if spec.rotary_scaling_factor is not None:
        factor = str(spec.rotary_scaling_factor)
        arguments += [("use-rope-scaling", ()), ("rope-scaling-factor", (factor,))]
    return arguments
