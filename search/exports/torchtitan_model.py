"""The model of a torchtitan recipe, written out of torchtitan's blocks by our spec.

torchtitan's language models with the blocks that our specs describe are Llama 3's: RMSNorm, rotary
positions, grouped-query attention, SwiGLU, no biases. Llama 2 and Mistral are these with other
numbers, which `torchtitan/models/llama3/__init__.py` of 0.3.0 shows how to write. Its own flavours
(8B, 70B, 405B) are Llama 3.1, whose rotary frequencies are scaled, so none of them is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import InputError
from autopar.model import ModelSpec
from autopar.specs import head_dim
from search.exports.common import ROTARY_BASE

__all__ = ["model_source", "plain"]

_BUILT = '''\
DIM = {dim}
NUM_HEADS = {heads}
NUM_KV_HEADS = {kv_heads}
HEAD_DIM = {head_dim}
FFN_DIM = {ffn}
VOCAB_SIZE = {vocab}
{theta}
_INIT = {{"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}}
_EMBEDDING_INIT = {{"weight": {embedding_init}}}
_ONES = {{"weight": nn.init.ones_}}


def _layer() -> Llama3TransformerBlock.Config:
    return Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        ffn_norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        attention=make_gqa_config(
            dim=DIM,
            n_heads=NUM_HEADS,
            n_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            fuse_qkv=True,
            wqkv_param_init=_INIT,
            wo_param_init=_INIT,
            inner_attention=get_attention_config("flex"),
            rope=ComplexRoPE.Config(
                dim=HEAD_DIM, max_seq_len=SEQ_LEN, theta=ROPE_THETA{scaling}
            ),
        ),
        feed_forward=make_ffn_config(
            dim=DIM, hidden_dim=FFN_DIM, w1_param_init=_INIT, w2w3_param_init=_INIT
        ),
    )


def model_spec() -> ModelSpec:
    """Return {name} out of Llama 3's blocks."""
    model = Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCAB_SIZE,
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCAB_SIZE, embedding_dim=DIM, param_init=_EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=_ONES),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCAB_SIZE, param_init=_INIT),
        layers=[_layer() for _ in range(NUM_LAYERS)],
    )
    return replace(model_registry("debugmodel"), flavor="{name}", model=model)
'''

_ASKED = """\
if "ROTARY_BASE" not in environ:  # the model file that was planned with does not hold it
    raise ValueError("{message}")
ROPE_THETA = float(environ["ROTARY_BASE"])"""

# Names to import by module.
_BUILT_IMPORTS = {
    "dataclasses": ("replace",),
    "functools": ("partial",),
    "torch": ("nn",),
    "torchtitan.models.common": ("ComplexRoPE", "Embedding", "Linear", "RMSNorm"),
    "torchtitan.models.common.config_utils": (
        "get_attention_config",
        "make_ffn_config",
        "make_gqa_config",
    ),
    "torchtitan.models.llama3": ("model_registry",),
    "torchtitan.models.llama3.model": ("Llama3Model", "Llama3TransformerBlock"),
}
_TIED_IMPORTS = {"torchtitan.models.common.param_init": ("skip_param_init",)}


def plain(name: str) -> str:
    """Return a name that any string or docstring of Python can hold."""
    return re.sub(r"[^\w./+-]", "_", name)


def model_source(spec: ModelSpec) -> tuple[Mapping[str, tuple[str, ...]], str]:
    """Return the imports, names by module, and the source of `model_spec()`.

    Raises
    ------
    InputError
        Where torchtitan 0.3.0 has no such model, with what stands in the way.
    """
    layer = spec.layers[0]
    obstacles = {
        f"{len(spec.layers)} layer types": len(spec.layers) > 1,
        "experts": layer.num_experts is not None,
        "an MLP that is not gated": not layer.gated_mlp,
        "biases": layer.biases,
        "biases of the QKV projection": layer.qkv_biases,
        "cross attention": layer.cross_attention,
        "attention that is not causal": not layer.causal,
        "learned positions": spec.learned_positions > 0,
        "norms other than two RMSNorms a layer": layer.norm_parameters_per_hidden != 2,
        "no vocabulary size": spec.vocab_size is None,
        "no number of heads": layer.num_heads is None,
        "no width of the MLP": layer.ffn_hidden_size is None,
    }
    found = [text for text, present in obstacles.items() if present]
    if found:
        raise InputError(
            f"torchtitan 0.3.0 has no model like {spec.name}, which has {' and '.join(found)}; "
            "export to megatron or galvatron instead"
        )
    base, factor = spec.rotary_base, spec.rotary_scaling_factor
    source = _BUILT.format(
        name=plain(spec.name),
        dim=layer.hidden_size,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads or layer.num_heads,
        head_dim=head_dim(layer),
        ffn=layer.ffn_hidden_size,
        vocab=spec.vocab_size,
        theta=_ASKED.format(message=ROTARY_BASE) if base is None else f"ROPE_THETA = {base}",
        scaling="" if factor is None else f', scaling="llama", scaling_factor={factor}',
        tied=spec.tied_embeddings,
        # A tied table is initialised once, as the head's weight.
        embedding_init=(
            "skip_param_init" if spec.tied_embeddings else "partial(nn.init.normal_, std=0.02)"
        ),
    )
    return _BUILT_IMPORTS | (_TIED_IMPORTS if spec.tied_embeddings else {}), source
