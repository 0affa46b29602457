"""Mixture-of-experts models, read from their `config.json`.

Experts are in all layers, after the first layers, or in periodic layers, with or without a shared
expert. Defaults are those of transformers, as in `autopar.families.decoders`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from autopar.errors import DocumentError
from autopar.families.base import Config, Switch, Whole, WholeOrZero
from autopar.families.decoders import Decoder, HunYuan, Mistral, Qwen3
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

    base = 5e6

    use_qk_norm: Switch | None = None
    rotary_dim: Whole | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        norms = self.use_qk_norm is not False
        return replace(super().layer(path, place), qk_norms=norms, wide_qk_norms=norms)

    def _rotary(self) -> dict[str, float | None]:
        found = super()._rotary()
        if self.partial_rotary_factor is None and self.rotary_dim is not None and self.head_dim:
            found["rotary_share"] = self.rotary_dim / self.head_dim
        return found


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


class _HunYuanMoe(HunYuan):
    """Experts and one shared expert of width `intermediate_size` in every layer."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts", "experts_per_token": "moe_topk"}

    num_experts: Whole
    # Published files list one number for each layer.
    moe_topk: Whole | list[Whole]

    def layer(self, path: Path, place: int) -> LayerSpec:
        listed = self.moe_topk if isinstance(self.moe_topk, list) else [self.moe_topk]
        if len({*listed}) != 1:
            raise DocumentError(path, "expected one number for all layers", key="moe_topk")
        return replace(
            super().layer(path, place),
            num_experts=self.num_experts,
            experts_per_token=listed[0],
            shared_expert_width=self.intermediate_size,
        )


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


class Qwen3Moe(Qwen3):
    """Experts in each `decoder_sparse_step`-th layer that is not listed as dense."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    # transformers 5 writes the second name.
    other_names: ClassVar = {"num_experts": "num_local_experts"}

    head_dim: Whole | None = None
    num_experts: Whole
    num_experts_per_tok: Whole
    moe_intermediate_size: Whole
    decoder_sparse_step: Whole | None = None
    mlp_only_layers: Any = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        if not is_sparse(path, self, place):
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
        )


class _Mellum(Qwen3Moe):
    """Qwen 3 mixture whose windows `layer_types` sets alone."""

    def window(self) -> int | None:
        return self.sliding_window or None


def is_sparse(path: Path, config: Any, place: int) -> bool:
    """Return True if layer `place` of a Qwen model, counted from 0, has experts."""
    dense = config.mlp_only_layers or []
    if not isinstance(dense, list):
        raise DocumentError(path, "expected a list of layers", key="mlp_only_layers")
    return place not in dense and (place + 1) % (config.decoder_sparse_step or 1) == 0


class _Qwen2Moe(Qwen3Moe):
    """Qwen3-MoE layers with a gated shared expert, QKV biases, and no query and key norms."""

    qkv_biases = True
    qk_norms = False

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
    mlp_layer_types: Any = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        first = self._said("first_k_dense_replace", self.dense)
        shared = self._said("n_shared_experts", self.shared)
        if self._is_dense(path, place, first):
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_expert_width=shared * self.moe_intermediate_size,
        )

    def _is_dense(self, path: Path, place: int, first: int) -> bool:
        """Return True for a layer with one MLP; `mlp_layer_types` of the file takes precedence."""
        kinds = self.mlp_layer_types
        if kinds is None:
            return place < first or not self.turns(path, place)
        number = self.num_hidden_layers
        if not isinstance(kinds, list) or len(kinds) != number:
            raise DocumentError(
                path, f"expected a list of {number} kinds of MLPs", key="mlp_layer_types"
            )
        return bool(kinds[place] == "dense")

    def _said(self, key: str, silent: int) -> int:
        """Return the number under a key of the file, 0 for null, `silent` if the key is missing."""
        return int(getattr(self, key) or 0) if key in self.given else silent


class _Latent(Decoder):
    """Dense decoder with multi-head latent attention."""

    base = None
    tied = True
    qk_norms = True

    q_lora_rank: Whole | None = None
    kv_lora_rank: Whole
    qk_nope_head_dim: Whole
    qk_rope_head_dim: Whole
    v_head_dim: Whole | None = None
    """Width of a value; None for the hidden size over the heads (transformers 5.18)."""

    def layer(self, path: Path, place: int) -> LayerSpec:
        return _with_latent(super().layer(path, place), self)

    def head_width(self, path: Path) -> int | None:
        return None


def _with_latent(layer: LayerSpec, config: _Latent | _Deepseek) -> LayerSpec:
    """Return a layer with the latent attention of a file."""
    latent = LatentSpec(
        query_rank=config.q_lora_rank,
        key_value_rank=config.kv_lora_rank,
        key_width=config.qk_nope_head_dim,
        rotary_width=config.qk_rope_head_dim,
        value_width=config.v_head_dim or config.hidden_size // config.num_attention_heads,
    )
    # Keys and values are expanded to all heads, whatever their number in the file.
    return replace(layer, num_kv_heads=None, latent=latent)


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
        return _with_latent(super().layer(path, place), self)

    def head_width(self, path: Path) -> int | None:
        return None


class _Glm4MoeLite(_Deepseek):
    dense = 1
    shared = 1


class _SolarOpen(_Behind):
    """Experts and a shared expert in every layer; no MLP has `intermediate_size`."""

    shared = 1

    intermediate_size: Whole = 1


class _ExaoneMoe(_Behind):
    """Norms of queries and keys, and a window in three of four layers."""

    dense = 1
    shared = 1
    qk_norms = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    other_names: ClassVar = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }

    sliding_window_pattern: Any = 4

    def is_narrow(self, place: int) -> bool:
        every = self.sliding_window_pattern
        return (place + 1) % (every if isinstance(every, int) else 4) > 0


class _HyV3(_Behind):
    """Hunyuan 3: norms of queries and keys, one dense layer, then experts and a shared one."""

    dense = 1
    shared = 1
    qk_norms = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    other_names: ClassVar = _ExaoneMoe.other_names


class _Dots1(_Behind):
    """Norms of queries and keys, dense first layers, then experts and shared experts."""

    qk_norms = True


class _Ernie45Moe(Decoder):
    """Experts from one layer on, in each `moe_layer_interval`-th, with shared experts."""

    mixture = True
    tied = True
    keys: ClassVar = {
        **Config.keys, "num_experts": "moe_num_experts", "experts_per_token": "moe_k"
    }  # fmt: skip

    use_bias: Switch | None = None
    moe_num_experts: Whole
    moe_k: Whole
    moe_intermediate_size: Whole
    moe_num_shared_experts: WholeOrZero | None = None
    moe_layer_start_index: WholeOrZero = 1
    moe_layer_end_index: Any = None
    moe_layer_interval: Whole = 1

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        last = self.moe_layer_end_index
        end = last if isinstance(last, int) and last >= 0 else self.num_hidden_layers - 1
        inside = self.moe_layer_start_index <= place <= end
        if not inside or (place + 1) % self.moe_layer_interval:
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.moe_num_experts,
            experts_per_token=self.moe_k,
            shared_expert_width=(self.moe_num_shared_experts or 0) * self.moe_intermediate_size,
            router_biases=True,
        )

    def biases(self, path: Path) -> tuple[bool, bool]:
        return bool(self.use_bias), False


class _GraniteMoe(_Mixtral):
    """Experts in every layer, and in some models a shared expert."""

    base = 1e4

    shared_intermediate_size: WholeOrZero | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        shared = self.shared_intermediate_size or 0
        return replace(super().layer(path, place), shared_expert_width=shared)


class _PhiMoe(_Mixtral):
    """LayerNorms with biases, and in some models biases of attention and of the head."""

    base = None
    norm_parameters = 4
    said_biases = True

    lm_head_bias: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        if self.attention_bias:
            raise DocumentError(
                path,
                "the value is true, but biases of attention's output without those of the MLP are "
                "not supported",
                key="attention_bias",
                remedy="Describe the model in a model.json",
            )
        return super().layer(path, place)

    def beside(self) -> dict[str, Any]:
        return {"extra_head_parameters": self.vocab_size if self.lm_head_bias else 0}


class _DeepseekV2(_Deepseek):
    shared = 2


class DeepseekV3(_Deepseek):
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

    rotary_share = 0.5
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
    "deepseek_v3": DeepseekV3,
    "dots1": _Dots1,
    "ernie4_5_moe": _Ernie45Moe,
    "exaone_moe": _ExaoneMoe,
    "flex_olmo": _Olmoe,
    "glm4_moe": _Glm4Moe,
    "glm4_moe_lite": _Glm4MoeLite,
    "glm4v_moe_text": _Glm4Moe,
    "gpt_oss": _GptOss,
    "granitemoe": _GraniteMoe,
    "granitemoeshared": _GraniteMoe,
    "hunyuan_v1_moe": _HunYuanMoe,
    "hy_v3": _HyV3,
    "kimi_k2": _Deepseek,
    "llama4_text": _Llama4,
    "mellum": _Mellum,
    "minicpm3": _Latent,
    "minimax_m2": _MiniMaxM2,
    "mixtral": _Mixtral,
    "olmoe": _Olmoe,
    "phimoe": _PhiMoe,
    "qwen2_moe": _Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
    "qwen3_vl_moe_text": Qwen3Moe,
    "solar_open": _SolarOpen,
    "youtu": _Latent,
}
"""Families by `model_type`."""
