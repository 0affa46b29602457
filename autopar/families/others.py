"""Other architectures, read from their `config.json`: GPT, BERT, T5 and parallel layers.

Their LayerNorms have biases, their MLPs two matrices, and positions are learned or absent. Parallel
layers run attention and MLP side by side. Defaults are those of transformers, as in
`autopar.families.decoders`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from autopar.errors import DocumentError
from autopar.families.base import (
    Config,
    Layers,
    Ratio,
    Section,
    Share,
    Switch,
    Whole,
    divided_width,
    read_rotary,
)
from autopar.records import Record, replace
from autopar.run.model import LayerSpec, ModelSpec

_NAMES = ("hidden_size", "num_attention_heads", "num_hidden_layers")


def _biased(
    path: Path,
    config: Record,
    keys: tuple[str, str, str],
    positions: int,
    ffn: int,
    *,
    causal: bool = True,
) -> LayerSpec:
    """Return a layer with LayerNorms (4h), biases everywhere and a two-matrix MLP.

    keys : keys in the file of hidden size, number of heads and number of layers.
    positions : sequence length.
    ffn : MLP width.
    """
    hidden, heads, layers = (getattr(config, key) for key in keys)
    return LayerSpec(
        num_layers=layers,
        seq_length=positions,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=divided_width(path, config, *keys[:2]),
        ffn_hidden_size=ffn,
        causal=causal,
        biases=True,
        norm_parameters_per_hidden=4,
    )


class _Gpt2(Config):
    other_names: ClassVar = {"n_positions": "n_ctx"}

    n_embd: Whole
    n_head: Whole
    n_layer: Layers
    n_inner: Whole | None = None
    n_positions: Whole

    def spec(self, path: Path, name: str) -> ModelSpec:
        keys = ("n_embd", "n_head", "n_layer")
        layer = _biased(path, self, keys, self.n_positions, self.n_inner or 4 * self.n_embd)
        return self.model(path, name, layer, tied=True, learned_positions=self.n_positions)


class _GptBigCode(_Gpt2):
    """SantaCoder and StarCoder: one key-value head for all query heads."""

    multi_query: Switch | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        spec = super().spec(path, name)
        if self.multi_query is False:
            return spec
        return replace(spec, layers=tuple(replace(one, num_kv_heads=1) for one in spec.layers))


class _Mpt(Config):
    """Attention with linear biases (ALiBi), and no biases in norms and linear layers."""

    d_model: Whole
    n_heads: Whole
    n_layers: Layers
    max_seq_len: Whole = 2048

    def spec(self, path: Path, name: str) -> ModelSpec:
        keys = ("d_model", "n_heads", "n_layers")
        layer = replace(
            _biased(path, self, keys, self.max_seq_len, 4 * self.d_model),
            biases=False,
            norm_parameters_per_hidden=2,
        )
        return self.model(path, name, layer, tied=True)


class _GptNeox(Config):
    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    max_position_embeddings: Whole
    intermediate_size: Whole
    rotary_emb_base: Ratio | None = None
    rotary_pct: Share | None = None
    rope_scaling: Section | None = None
    rope_parameters: Section | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        layer = _biased(path, self, _NAMES, self.max_position_embeddings, self.intermediate_size)
        sections = (self.rope_scaling, self.rope_parameters)
        rotary = read_rotary(sections, self.rotary_emb_base or 1e4, self.rotary_pct or 0.25)
        return self.model(path, name, layer, tied=False, **rotary)


class _Opt(Config):
    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    max_position_embeddings: Whole
    ffn_dim: Whole
    word_embed_proj_dim: Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        if (self.word_embed_proj_dim or self.hidden_size) != self.hidden_size:
            raise DocumentError(
                path,
                f"the value is {self.word_embed_proj_dim}, but hidden_size is "
                f"{self.hidden_size}: projected embeddings are not supported",
                key="word_embed_proj_dim",
            )
        positions = self.max_position_embeddings
        layer = _biased(path, self, _NAMES, positions, self.ffn_dim)
        # OPT offsets positions by 2.
        return self.model(path, name, layer, tied=True, learned_positions=positions + 2)


class _Bert(_GptNeox):
    type_vocab_size: Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        hidden, positions = self.hidden_size, self.max_position_embeddings
        layer = _biased(path, self, _NAMES, positions, self.intermediate_size, causal=False)
        return self.model(
            path,
            name,
            layer,
            tied=True,
            learned_positions=positions,
            extra_embedding_parameters=(self.type_vocab_size or 2) * hidden,
            # masked-language-model head: dense h*h + h, LayerNorm 2h, output bias
            extra_head_parameters=hidden * hidden + 3 * hidden + self.vocab_size,
        )


class _Roberta(_Bert):
    """BERT whose first learned positions, up to that of padding, no token has."""

    pad_token_id: Whole = 1

    def spec(self, path: Path, name: str) -> ModelSpec:
        spec = super().spec(path, name)
        length = self.max_position_embeddings - self.pad_token_id - 1
        return replace(spec, layers=tuple(replace(one, seq_length=length) for one in spec.layers))


class _T5(Config):
    num_heads: Whole
    num_layers: Layers
    num_decoder_layers: Layers | None = None
    n_positions: Whole | None = None
    d_model: Whole
    d_kv: Whole
    d_ff: Whole
    feed_forward_proj: Any = "relu"
    relative_attention_num_buckets: Whole | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        encoder = LayerSpec(
            num_layers=self.num_layers,
            seq_length=self.n_positions or 512,
            hidden_size=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.d_kv,
            ffn_hidden_size=self.d_ff,
            gated_mlp=str(self.feed_forward_proj).startswith("gated"),
            causal=False,
        )
        decoder = replace(
            encoder,
            num_layers=self.num_decoder_layers or encoder.num_layers,
            causal=True,
            cross_attention=True,
            norm_parameters_per_hidden=3,
        )
        # Encoder and decoder each have one table of relative position biases.
        biases = 2 * (self.relative_attention_num_buckets or 32) * self.num_heads
        return self.model(
            path, name, encoder, decoder, tied=True, extra_embedding_parameters=biases
        )


class _Mt5(_T5):
    pass


class _Bloom(Config):
    """Attention with linear biases (ALiBi), and a norm after the embedding."""

    keys: ClassVar = {"num_heads": "n_head"}
    other_names: ClassVar = {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    # Training length of published files; the configuration class has no length.
    seq_length: Whole = 2048

    def spec(self, path: Path, name: str) -> ModelSpec:
        layer = _biased(path, self, _NAMES, self.seq_length, 4 * self.hidden_size)
        norm = 2 * self.hidden_size
        return self.model(path, name, layer, tied=True, extra_embedding_parameters=norm)


class _Falcon(Config):
    """Falcon: attention and MLP in parallel after a common norm, or with a norm each."""

    other_names: ClassVar = {
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_kv_heads": "n_head_kv",
    }

    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    num_kv_heads: Whole | None = None
    max_position_embeddings: Whole = 2048
    ffn_hidden_size: Whole | None = None
    multi_query: Switch | None = None
    new_decoder_architecture: Switch | None = None
    parallel_attn: Switch | None = None
    num_ln_in_parallel_attn: Whole | None = None
    bias: Switch | None = None
    alibi: Switch | None = None
    rope_theta: Ratio | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        new = bool(self.new_decoder_architecture)
        # One key-value head for all query heads, except in the second release.
        one = not new and self.multi_query is not False
        groups = self.num_kv_heads if new else 1 if one else self.num_attention_heads
        norms = (
            (self.num_ln_in_parallel_attn or 2) if new else 2 - (self.parallel_attn is not False)
        )
        layer = LayerSpec(
            num_layers=self.num_hidden_layers,
            seq_length=self.max_position_embeddings,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=groups or self.num_attention_heads,
            head_dim=divided_width(path, self, *_NAMES[:2]),
            ffn_hidden_size=self.ffn_hidden_size or 4 * self.hidden_size,
            biases=bool(self.bias),
            num_norms=norms if norms != 2 else None,
            norm_parameters_per_hidden=2 * norms,
        )
        base = None if self.alibi else self.rope_theta or 1e4
        return self.model(path, name, layer, tied=True, rotary_base=base)


class _Phi(Config):
    """Phi-1 to Phi-2: one norm before attention and MLP, biases everywhere including the head."""

    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    num_key_value_heads: Whole | None = None
    max_position_embeddings: Whole
    intermediate_size: Whole
    qk_layernorm: Switch | None = None
    rope_theta: Ratio | None = None
    partial_rotary_factor: Share | None = None
    rope_scaling: Section | None = None
    rope_parameters: Section | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        if self.qk_layernorm:
            raise DocumentError(
                path,
                "the value is true: LayerNorms of queries and keys are not supported",
                key="qk_layernorm",
                remedy="Describe the model in a model.json",
            )
        positions = self.max_position_embeddings
        layer = replace(
            _biased(path, self, _NAMES, positions, self.intermediate_size),
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            num_norms=1,
            norm_parameters_per_hidden=2,
        )
        sections, share = (self.rope_scaling, self.rope_parameters), self.partial_rotary_factor
        rotary: dict[str, Any] = read_rotary(sections, self.rope_theta or 1e4, share or 0.5)
        rotary["extra_head_parameters"] = self.vocab_size
        return self.model(path, name, layer, tied=False, **rotary)


class _Starcoder2(Config):
    hidden_size: Whole
    num_attention_heads: Whole
    num_hidden_layers: Layers
    num_key_value_heads: Whole | None = None
    max_position_embeddings: Whole
    intermediate_size: Whole
    sliding_window: Whole | None = None
    use_bias: Switch | None = None
    rope_theta: Ratio | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        positions = self.max_position_embeddings
        layer = replace(
            _biased(path, self, _NAMES, positions, self.intermediate_size),
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            biases=self.use_bias is not False,
            window=self.sliding_window,
        )
        return self.model(path, name, layer, tied=True, rotary_base=float(self.rope_theta or 1e4))


OTHERS: dict[str, type[Config]] = {
    "bert": _Bert,
    "bloom": _Bloom,
    "camembert": _Roberta,
    "falcon": _Falcon,
    "gpt2": _Gpt2,
    "gpt_bigcode": _GptBigCode,
    "gpt_neox": _GptNeox,
    "mpt": _Mpt,
    "mt5": _Mt5,
    "opt": _Opt,
    "phi": _Phi,
    "roberta": _Roberta,
    "starcoder2": _Starcoder2,
    "t5": _T5,
    "xlm-roberta": _Roberta,
}
"""Families by `model_type`."""
