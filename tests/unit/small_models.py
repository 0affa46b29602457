"""Specs of small layers and a small model, for tests that build them."""

from __future__ import annotations

from autopar.records import replace
from autopar.run.model import LatentSpec, LayerSpec, ModelSpec

LLAMA = LayerSpec(
    num_layers=1,
    seq_length=16,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=48,
    gated_mlp=True,
)
GPT = replace(LLAMA, num_kv_heads=4, gated_mlp=False, biases=True, norm_parameters_per_hidden=4)
DECODER = replace(GPT, cross_attention=True, norm_parameters_per_hidden=6)
MIXTURE = replace(LLAMA, num_experts=4, experts_per_token=2)
NORMED = replace(  # as gpt-oss and Gemma 3 together
    LLAMA,
    qk_norms=True,
    window=5,
    whole_every=2,
    attention_sinks=True,
    num_norms=4,
    norm_parameters_per_hidden=4,
)
LATENT = replace(
    LLAMA,
    num_kv_heads=None,
    qk_norms=True,
    latent=LatentSpec(query_rank=24, key_value_rank=16, key_width=8, rotary_width=4, value_width=6),
)
SHARED = replace(  # every part that a mixture may have
    MIXTURE,
    biases=True,
    router_biases=True,
    shared_expert_width=40,
    shared_expert_gate=True,
)
LAYERS = {
    "llama": LLAMA,
    "gpt": GPT,
    "decoder": DECODER,
    "mixture": MIXTURE,
    "normed": NORMED,
    "latent": LATENT,
    "shared": SHARED,
}
MODEL = ModelSpec(
    name="small",
    layers=(replace(GPT, causal=False), DECODER),
    vocab_size=300,
    tied_embeddings=True,
    learned_positions=16,
)
