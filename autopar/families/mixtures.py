"""Mixture-of-experts models, read from their `config.json`.

Experts are in all layers, after the first layers, or in periodic layers, with or without a shared
expert. Defaults are those of transformers, as in `autopar.families.decoders`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from autopar.errors import DocumentError
from autopar.families.base import Config, Switch, Whole, WholeOrZero
from autopar.families.decoders import Decoder, Mistral, Qwen3
from autopar.records import replace
from autopar.run.model import LatentSpec, LayerSpec


class _Mixtral(Mistral):
    """Mixtral: experts of width `intermediate_size` in every layer."""

    base: ClassVar[float | None] = 1e6
    mixture = True
    other_names: ClassVar = {"num_local_experts": "num_experts"}

    num_local_experts: Whole
    num_experts_per_tok: Whole

    def layer(self, path: Path, place: int) -> LayerSpec:
        return replace(
            super().layer(path, place),
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
        )


class _MiniMaxM2(_Mixtral):
    """One norm over all queries and one over all keys; half of every head is rotary."""

    base = None

    use_qk_norm: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        norms = self.use_qk_norm is not False
        return replace(super().layer(path, place), qk_norms=norms, wide_qk_norms=norms)


class _GptOss(_Mixtral):
    """Biases everywhere, attention sinks, and a window in every second layer."""

    base = None

    head_dim: Whole | None = 64
    sliding_window: Whole | None = 128

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        return replace(layer, router_biases=True, attention_sinks=True, clamped_activation=True)

    def biases(self, path: Path) -> tuple[bool, bool]:
        # Experts have biases like attention, and no key of the file sets them.
        return True, False

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 2 > 0


class _Olmoe(Decoder):
    """64 experts in every layer, and one norm over all queries and over all keys."""

    mixture = True
    qk_norms = True
    wide_qk_norms = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    other_names: ClassVar = {"num_experts": "num_local_experts"}

    num_experts: Whole
    num_experts_per_tok: Whole

    def layer(self, path: Path, place: int) -> LayerSpec:
        return replace(
            super().layer(path, place),
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
        )


class _Qwen3Moe(Qwen3):
    """Experts in each `decoder_sparse_step`-th layer that is not listed as dense."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    # transformers 5 writes the second name.
    other_names: ClassVar = {"num_experts": "num_local_experts"}

    num_experts: Whole
    num_experts_per_tok: Whole
    moe_intermediate_size: Whole
    decoder_sparse_step: Whole | None = None
    mlp_only_layers: Any = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        dense = self.mlp_only_layers or []
        if not isinstance(dense, list):
            raise DocumentError(path, "expected a list of layers", key="mlp_only_layers")
        if place in dense or (place + 1) % (self.decoder_sparse_step or 1):
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
        )


class _Qwen2Moe(_Qwen3Moe):
    """Qwen3-MoE layers with a gated shared expert, QKV biases, and no query and key norms."""

    qkv_biases = True
    qk_norms = False

    head_dim: Whole | None = None
    shared_expert_intermediate_size: Whole

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        if layer.num_experts is None:
            return layer
        width = self.shared_expert_intermediate_size
        return replace(layer, shared_expert_width=width, shared_expert_gate=True)


class DenseFirst(Decoder):
    """Base class of families whose first layers may be dense, with the keys of their order."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "n_routed_experts"}
    other_names: ClassVar = {"n_routed_experts": "num_local_experts"}

    n_shared_experts: WholeOrZero | None = None
    first_k_dense_replace: WholeOrZero | None = None
    moe_layer_freq: Any = None
    num_nextn_predict_layers: WholeOrZero | None = None

    def turns(self, path: Path, place: int) -> bool:
        """Return True if a layer has experts according to `moe_layer_freq`."""
        turns = self.moe_layer_freq
        if turns is None:
            return True
        if type(turns) is int and turns > 0:
            return place % turns == 0
        listed = isinstance(turns, list) and len(turns) == self.num_hidden_layers
        if not listed or any(turn not in (0, 1) for turn in turns):
            raise DocumentError(
                path,
                f"expected a whole number above 0, or 0 or 1 for each of {self.num_hidden_layers} "
                "layers",
                key="moe_layer_freq",
            )
        return bool(turns[place])

    def beside(self) -> dict[str, Any]:
        return {"mtp_layers": self.num_nextn_predict_layers or 0}


class _Behind(DenseFirst):
    """Base class of families with dense first layers, then experts and shared experts."""

    dense: ClassVar[int] = 0
    shared: ClassVar[int] = 0
    """Defaults of the family for the numbers of dense layers and of shared experts."""

    n_routed_experts: Whole
    num_experts_per_tok: Whole
    moe_intermediate_size: Whole

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        first = self._said("first_k_dense_replace", self.dense)
        shared = self._said("n_shared_experts", self.shared)
        if place < first or not self.turns(path, place):
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_expert_width=shared * self.moe_intermediate_size,
        )

    def _said(self, key: str, silent: int) -> int:
        """Return the number under a key of the file, 0 for null, `silent` if the key is missing."""
        return int(getattr(self, key) or 0) if key in self.given else silent


class _Deepseek(_Behind):
    """Multi-head latent attention; also used for Kimi K2."""

    base = None
    qk_norms = True

    q_lora_rank: Whole | None = None
    kv_lora_rank: Whole
    qk_nope_head_dim: Whole
    qk_rope_head_dim: Whole
    v_head_dim: Whole

    def layer(self, path: Path, place: int) -> LayerSpec:
        latent = LatentSpec(
            query_rank=self.q_lora_rank,
            key_value_rank=self.kv_lora_rank,
            key_width=self.qk_nope_head_dim,
            rotary_width=self.qk_rope_head_dim,
            value_width=self.v_head_dim,
        )
        # Keys and values are expanded to all heads, whatever their number in the file.
        return replace(super().layer(path, place), num_kv_heads=None, latent=latent)

    def head_width(self, path: Path) -> int | None:
        return None


class _DeepseekV2(_Deepseek):
    shared = 2


class _DeepseekV3(_Deepseek):
    dense = 3
    shared = 1

    n_group: Whole | None = None
    topk_group: Whole | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        if layer.num_experts is None:
            return layer
        groups = self.n_group or 1
        chosen = min(self.topk_group or groups, groups)
        return replace(layer, expert_groups=groups, groups_per_token=chosen)


class _Glm4Moe(_Behind):
    """Rotary positions in half of every head; norms of queries and keys if the file sets them."""

    base = None
    said_biases = True
    dense = 1
    shared = 1

    use_qk_norm: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        return replace(super().layer(path, place), qk_norms=bool(self.use_qk_norm))


class _Llama4(Decoder):
    """Experts and a shared expert in each `interleave_moe_layer_step`-th layer.

    Attention is restricted to chunks of tokens, except in every fourth layer. A spec expresses a
    chunk as a window of the same size, the most that a query attends to. Norms of queries and keys
    have no parameters.
    """

    base = None
    mixture = True
    other_names: ClassVar = {"num_local_experts": "num_experts"}

    num_local_experts: Whole
    num_experts_per_tok: Whole
    intermediate_size_mlp: Whole
    interleave_moe_layer_step: Whole | None = None
    attention_chunk_size: Whole | None = 8192
    no_rope_layers: Any = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        if (place + 1) % (self.interleave_moe_layer_step or 1):
            return replace(layer, ffn_hidden_size=self.intermediate_size_mlp)
        return replace(
            layer,
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_expert_width=self.intermediate_size,
        )

    def window(self) -> int | None:
        return self.attention_chunk_size

    def is_narrow(self, place: int) -> bool:
        turning = self.no_rope_layers
        # 1 marks a layer with positions, whose attention is restricted to its chunk.
        if isinstance(turning, list) and len(turning) == self.num_hidden_layers:
            return bool(turning[place])
        return (place + 1) % 4 > 0


MIXTURES: dict[str, type[Config]] = {
    "deepseek_v2": _DeepseekV2,
    "deepseek_v3": _DeepseekV3,
    "glm4_moe": _Glm4Moe,
    "glm4v_moe_text": _Glm4Moe,
    "gpt_oss": _GptOss,
    "kimi_k2": _Deepseek,
    "llama4_text": _Llama4,
    "minimax_m2": _MiniMaxM2,
    "mixtral": _Mixtral,
    "olmoe": _Olmoe,
    "qwen2_moe": _Qwen2Moe,
    "qwen3_moe": _Qwen3Moe,
    "qwen3_vl_moe_text": _Qwen3Moe,
}
"""Families by `model_type`."""
