"""Families without a reader: architecture from the usual keys of a `config.json`.

The result is a draft of a `model.json`, which `autopar-search --write-skeleton` writes for the user
to check. Prices never use it directly, because a family may give a key another meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from autopar.documents.json import read_record
from autopar.errors import DocumentError
from autopar.families.base import Switch, Whole, WholeOrZero
from autopar.families.decoders import Decoder
from autopar.families.mixtures import DenseFirst
from autopar.records import replace
from autopar.run.model import LatentSpec, LayerSpec, ModelSpec

NO_ATTENTION = "layers that mix tokens by a recurrence instead of attention"
INDEXED = "attention to tokens chosen by an indexer"
COMPRESSED = "attention to compressed keys"
NARROW_HEADS = "other heads in layers with a window"
NO_TOKENS = "not a token model"
TWO_TOWERS = "a tower of images and one of text: save its vision_config as a file"
_RECURRENT_LAYERS = ("linear", "mamba", "recurrent", "conv", "ssm", "rwkv", "delta", "lightning")
"""Words in entries of `layer_types` that are no attention."""
_RECURRENT = ("mamba_", "ssm_", "linear_num_", "linear_key_", "linear_attn", "lru_", "gdn_", "rwkv")
"""Prefixes of keys that describe recurrent layers."""
_RECURRENT_KEYS = frozenset(
    {
        "state_size", "time_step_rank", "conv_l_cache", "attn_layer_period", "attn_type_list",
        "hybrid_override_pattern", "hybrid_layer_pattern", "block_types", "layers_block_type",
        "linear_conv_kernel_dim",
    }
)  # fmt: skip
_IMAGE_OR_SOUND = frozenset({"image_size", "num_mel_bins", "num_channels", "patch_size"})
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "hidden_size": ("n_embd", "d_model", "dim", "hidden_dim", "n_embed"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "intermediate_size": ("ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "moe_intermediate_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length",
                                "max_sequence_length", "model_max_length"),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "hidden_act": ("activation_function", "hidden_activation", "activation"),
    "n_routed_experts": ("num_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_top_k", "moe_topk", "num_experts_per_token", "top_k"),
    "moe_intermediate_size": ("expert_intermediate_size", "moe_ffn_hidden_size"),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",
                                        "shared_intermediate_size"),
    "first_k_dense_replace": ("moe_layer_start_index", "num_dense_layers"),
    "num_nextn_predict_layers": ("mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers"),
    "use_qk_norm": ("qk_norm", "qk_layernorm", "use_qk_layernorm"),
    "attention_bias": ("use_qkv_bias", "qkv_bias", "add_qkv_bias"),
}  # fmt: skip
"""Usual key -> names that other families give it."""
_HARMLESS = (
    "_", "architectures", "attention_dropout", "auto_map", "bos_", "embd_pdrop", "eos_", "pad_",
    "initializer_range", "model_type", "name_or_path", "pretraining_tp", "quantization_config",
    "resid_pdrop", "rms_norm_eps", "layer_norm_eps", "norm_eps", "torch_dtype", "dtype",
    "transformers_version", "use_cache", "output_router_logits", "router_aux_loss_coef",
    "aux_loss_alpha", "scoring_func", "seq_aux", "norm_topk_prob", "topk_method", "topk_group",
    "n_group", "routed_scaling_factor", "ep_size", "hidden_dropout", "rope_theta", "rope_scaling",
    "rope_parameters",
)  # fmt: skip
"""Prefixes of keys that change no size of a layer."""


class Usual(DenseFirst):
    """Decoder with or without experts whose keys have their usual meaning."""

    base: ClassVar[float | None] = Decoder.base
    said_biases: ClassVar[bool] = True

    n_routed_experts: WholeOrZero | None = None
    num_experts_per_tok: WholeOrZero | None = None
    moe_intermediate_size: WholeOrZero | None = None
    shared_expert_intermediate_size: WholeOrZero | None = None
    decoder_sparse_step: Whole | None = None
    mlp_only_layers: Any = None
    q_lora_rank: Whole | None = None
    kv_lora_rank: Whole | None = None
    qk_nope_head_dim: WholeOrZero | None = None
    qk_rope_head_dim: WholeOrZero | None = None
    v_head_dim: Whole | None = None
    hidden_act: Any = None
    use_qk_norm: Switch | None = None
    rms_norm_eps: Any = None
    layer_norm_eps: Any = None
    layer_norm_epsilon: Any = None

    @property
    def is_gated(self) -> bool:
        """True if the activation is one of those that families use with a gate."""
        act = str(self.hidden_act or "silu").lower()
        return any(word in act for word in ("silu", "swish", "glu"))

    @property
    def has_layer_norms(self) -> bool:
        """True if norms are LayerNorms, with a bias each."""
        given = (self.layer_norm_eps, self.layer_norm_epsilon)
        return self.rms_norm_eps is None and any(one is not None for one in given)

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = replace(
            Decoder.layer(self, path, place),
            gated_mlp=self.is_gated,
            qk_norms=bool(self.use_qk_norm),
            norm_parameters_per_hidden=4 if self.has_layer_norms else 2,
        )
        if self.kv_lora_rank is not None:
            layer = replace(layer, num_kv_heads=None, head_dim=None, latent=self._latent(path))
        if not self.n_routed_experts or self._is_dense(path, place):
            return layer
        if not self.num_experts_per_tok:
            raise DocumentError(path, "this key is missing", key="num_experts_per_tok")
        width = self.moe_intermediate_size or self.intermediate_size
        shared = self.shared_expert_intermediate_size or (self.n_shared_experts or 0) * width
        return replace(
            layer,
            ffn_hidden_size=width,
            num_experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_expert_width=shared,
        )

    def _is_dense(self, path: Path, place: int) -> bool:
        """Return True if a layer of a model with experts has one MLP."""
        listed = self.mlp_only_layers if isinstance(self.mlp_only_layers, list) else []
        return (
            place < (self.first_k_dense_replace or 0)
            or place in listed
            or (place + 1) % (self.decoder_sparse_step or 1) > 0
            or not self.turns(path, place)
        )

    def _latent(self, path: Path) -> LatentSpec:
        widths = {
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
        }
        if missing := [name for name, width in widths.items() if not width]:
            raise DocumentError(
                path, "this key is missing, and latent attention needs it", key=missing[0]
            )
        return LatentSpec(
            query_rank=self.q_lora_rank,
            key_value_rank=int(self.kv_lora_rank or 0),
            key_width=int(self.qk_nope_head_dim or 0),
            rotary_width=int(self.qk_rope_head_dim or 0),
            value_width=int(self.v_head_dim or 0),
        )

    def head_width(self, path: Path) -> int | None:
        return None if self.kv_lora_rank is not None else Decoder.head_width(self, path)

    def assumptions(self) -> Iterator[str]:
        """Yield the properties without a key, one clause each, for the user to check."""
        act = "no hidden_act" if self.hidden_act is None else f"hidden_act {self.hidden_act}"
        yield f"{'gated MLPs of three' if self.is_gated else 'MLPs of two'} matrices ({act})"
        norms = "LayerNorms with biases" if self.has_layer_norms else "RMSNorms"
        yield f"{norms}, one before attention and one before the MLP"
        biases = {None: "no biases (no attention_bias)", False: "no biases", True: "QKV biases"}
        yield biases[self.attention_bias]
        if self.use_qk_norm is None:
            yield "no norms of queries and keys"
        if self.tie_word_embeddings is None:
            yield "separate embedding and head (no tie_word_embeddings)"
        yield f"sequences of {self.max_position_embeddings} tokens"


def usual_spec(path: Path, text: Mapping[str, Any], name: str) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return the architecture that usual keys describe, and its assumptions.

    text : keys of the text model. Raises DocumentError for a missing or invalid key, or for an
    encoder with a decoder.
    """
    if text.get("is_encoder_decoder") is True:
        raise DocumentError(
            path,
            "the value is true, but encoder-decoder models of this family are not supported",
            key="encoder",
        )
    renamed, used = dict(text), set(text) & set(Usual.__struct_fields__)
    for key, others in _ALIASES.items():
        other = next((one for one in others if text.get(one) is not None), None)
        if text.get(key) is None and other is not None:
            renamed[key] = text[other]
            used.add(other)
    config = read_record(Usual, path, renamed)
    unread = [key for key in text if key not in used and not key.startswith(_HARMLESS)]
    notes = [*config.assumptions()]
    if unread:
        notes.append(f"keys that were not read: {', '.join(map(str, unread))}")
    return config.spec(path, name), tuple(notes)


def unsaid(text: Mapping[str, Any]) -> str | None:
    """Return the reason why no `model.json` can express a file's layers; None if there is none.

    text : keys of the text model.
    """
    names = [str(key).lower() for key, value in text.items() if value not in (None, False, 0, [])]
    kinds = text.get("layer_types")
    listed = " ".join(map(str, kinds)) if isinstance(kinds, list) else ""
    if any(word in listed for word in _RECURRENT_LAYERS):
        return NO_ATTENTION
    if "sparse" in listed:
        return INDEXED
    if any(name.startswith("swa_") and "heads" in name for name in names):
        return NARROW_HEADS
    if any(name.startswith(_RECURRENT) or name in _RECURRENT_KEYS for name in names):
        return NO_ATTENTION
    if "compress_ratios" in names or "hc_mult" in names:
        return COMPRESSED
    if any(name.startswith("index_") for name in names):
        return INDEXED
    if "vocab_size" not in text and _IMAGE_OR_SOUND & {*names}:
        return NO_TOKENS
    return None
