"""Specs of small layers and a small model, for tests that build them."""

from __future__ import annotations

import dataclasses

from autopar.model import LayerSpec, ModelSpec

__all__ = ["DECODER", "GPT", "LAYERS", "LLAMA", "MIXTURE", "MODEL"]

LLAMA = LayerSpec(
    num_layers=1,
    seq_length=16,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    gated_mlp=True,
)
GPT = dataclasses.replace(
    LLAMA, num_kv_heads=4, gated_mlp=False, biases=True, norm_parameters_per_hidden=4
)
DECODER = dataclasses.replace(GPT, cross_attention=True, norm_parameters_per_hidden=6)
MIXTURE = dataclasses.replace(LLAMA, num_experts=4, experts_per_token=2)
LAYERS = {"llama": LLAMA, "gpt": GPT, "decoder": DECODER, "mixture": MIXTURE}
MODEL = ModelSpec(
    name="small",
    layers=(dataclasses.replace(GPT, causal=False), DECODER),
    vocab_size=300,
    tied_embeddings=True,
    learned_positions=16,
)
