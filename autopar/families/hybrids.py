"""Hybrid models, read from their `config.json`: layers with mixers of several kinds.

Mixers are attention, Mamba-2, delta rules, short convolutions and lightning attention. Sparse
attention with an indexer is read here, too. Defaults are those of transformers 5.18.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from autopar.errors import DocumentError
from autopar.families.base import Config, Switch, Whole, WholeOrZero, in_order
from autopar.families.decoders import Decoder
from autopar.families.mixtures import DeepseekV3, is_sparse
from autopar.records import Entry, replace, shorten
from autopar.run.architecture import DeltaNet, Indexer, KimiDelta, LightningAttention, Mamba
from autopar.run.model import (
    ConvolutionSpec,
    LayerSpec,
    ModelSpec,
)

_ATTENTION = ("attention", "full_attention")
_RECURRENT = ("mamba", "linear_attention")
"""Kinds of layers in files; transformers 5 has the second names."""


class Hybrid(Decoder):
    """Decoder whose layers differ in their mixers."""

    base: ClassVar[float | None] = None
    mixture = True

    def spec(self, path: Path, name: str) -> ModelSpec:
        types, order = in_order(self.each(path))
        return self.model(
            path, name, *types, tied=self.tied, order=order, **self._rotary(), **self.beside()
        )

    def each(self, path: Path) -> list[LayerSpec]:
        """Return all layers in execution order."""
        return [self.mixed(path, place) for place in range(self.num_hidden_layers)]

    def mixed(self, path: Path, place: int) -> LayerSpec:
        """Return layer `place`, counted from 0, with its mixer."""
        raise NotImplementedError

    def kinds(self, path: Path) -> Sequence[str]:
        """Return the kind of every layer in the file; raises DocumentError for another length."""
        return _kinds(path, self)

    def is_attention(self, path: Path, place: int) -> bool:
        """Return True for attention, False for a recurrence; raises DocumentError for others."""
        return _attends(path, self, place)


def _kinds(path: Path, config: Decoder) -> Sequence[str]:
    kinds, number = config.layer_types, config.num_hidden_layers
    if not isinstance(kinds, list) or len(kinds) != number:
        raise DocumentError(path, f"expected a list of {number} kinds of layers", key="layer_types")
    return kinds


def _attends(path: Path, config: Decoder, place: int) -> bool:
    kind = _kinds(path, config)[place]
    if kind not in (*_ATTENTION, *_RECURRENT):
        raise DocumentError(
            path,
            f"layer {place} is {shorten(kind)}, expected attention or a recurrence",
            key="layer_types",
            remedy="Describe the model in a model.json",
        )
    return kind in _ATTENTION


def _without_attention(layer: LayerSpec, *mixers: Any) -> LayerSpec:
    """Return a layer with mixers in place of its attention."""
    return replace(
        layer, num_heads=None, num_kv_heads=None, head_dim=None, qk_norms=False,
        wide_qk_norms=False, mixers=mixers, output_gate=False, latent=None, indexer=None,
    )  # fmt: skip


def refuse_given(path: Path, config: Config, **usual: object) -> None:
    """Raise DocumentError for a key with another value than the only one that is supported."""
    for key, value in usual.items():
        given = getattr(config, key)
        if given not in (None, value):
            raise DocumentError(
                path,
                f"the value is {shorten(given)}, but only {shorten(value)} is supported",
                key=key,
                remedy="Describe the model in a model.json",
            )


# --------------------------------------------------------------------------------------------------
# Mamba-2


_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


class _NemotronH(Hybrid):
    """Nemotron-H and Nemotron 3: layers that are a mixer, an MLP or experts alone."""

    keys: ClassVar = {**Config.keys, "num_experts": "n_routed_experts"}
    other_names: ClassVar = {"n_routed_experts": "num_local_experts"}

    # The number of layers is that of their list.
    num_hidden_layers: Any = None
    num_key_value_heads: Whole | None = 8
    head_dim: Whole | None = 128
    attention_head_dim: Whole | None = None
    intermediate_size: Whole = 21504
    layers_block_type: Any = None
    hybrid_override_pattern: Any = None
    mtp_layers_block_type: Any = None
    mtp_hybrid_override_pattern: Any = None
    num_nextn_predict_layers: WholeOrZero | None = None
    mamba_num_heads: Whole = 128
    mamba_head_dim: Whole = 64
    ssm_state_size: Whole = 128
    n_groups: Whole = 8
    conv_kernel: Whole = 4
    chunk_size: Whole = 128
    mlp_hidden_act: Any = None
    n_routed_experts: Whole = 8
    num_experts_per_tok: Whole = 2
    n_shared_experts: WholeOrZero | None = 1
    moe_intermediate_size: Whole = 7688
    moe_shared_expert_intermediate_size: Whole = 7688
    moe_latent_size: Whole | None = None
    n_group: Whole | None = None
    topk_group: Whole | None = None
    use_bias: Switch | None = None
    mamba_proj_bias: Switch | None = None
    use_conv_bias: Switch | None = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        refuse_given(
            path, self, use_bias=False, use_conv_bias=True, mlp_bias=False, attention_bias=False,
            mlp_hidden_act="relu2",
        )  # fmt: skip
        types, order = in_order([self._alone(path, kind) for kind in self._listed(path)])
        depths = self.num_nextn_predict_layers or 0
        block: tuple[int, ...] = ()
        if depths:
            places = {replace(one, num_layers=1): place for place, one in enumerate(types)}
            kinds = [self._alone(path, kind) for kind in self._mtp(path)]
            if not {*kinds} <= {*places}:
                raise DocumentError(
                    path,
                    "MTP layers have a kind that the model does not have",
                    key="mtp_layers_block_type",
                )
            block = tuple(places[one] for one in kinds)
        return self.model(
            path, name, *types, tied=False, order=order, no_positions=True, mtp_layers=depths,
            mtp_order=block,
        )  # fmt: skip

    def _listed(self, path: Path) -> Sequence[str]:
        given = self.layers_block_type if self.layer_types is None else self.layer_types
        if given is not None:
            return _names(path, given, "layers_block_type")
        if self.hybrid_override_pattern is None:
            raise DocumentError(path, "this key is missing", key="hybrid_override_pattern")
        return _names(path, self.hybrid_override_pattern, "hybrid_override_pattern")

    def _mtp(self, path: Path) -> Sequence[str]:
        if self.mtp_layers_block_type is not None:
            return _names(path, self.mtp_layers_block_type, "mtp_layers_block_type")
        pattern = self.mtp_hybrid_override_pattern or "*E"
        return _names(path, pattern, "mtp_hybrid_override_pattern")

    def _alone(self, path: Path, kind: str) -> LayerSpec:
        base = replace(
            super().layer(path, 0), gated_mlp=False, norm_parameters_per_hidden=1, num_norms=1
        )
        if kind == "full_attention":
            return replace(base, parts="mixer", ffn_hidden_size=None)
        if kind == "linear_attention":
            mixer = Mamba(
                heads=self.mamba_num_heads,
                width=self.mamba_head_dim,
                state=self.ssm_state_size,
                groups=self.n_groups,
                kernel=self.conv_kernel,
                chunk=self.chunk_size,
            )
            return replace(_without_attention(base, mixer), parts="mixer", ffn_hidden_size=None)
        plain = replace(_without_attention(base), parts="mlp")
        if kind == "mlp":
            return plain
        groups = self.n_group or 1
        return replace(
            plain,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.n_routed_experts,
            experts_per_token=self.num_experts_per_tok,
            # one MLP of this width, whatever `n_shared_experts`
            shared_expert_width=self.moe_shared_expert_intermediate_size,
            expert_latent=self.moe_latent_size,
            expert_groups=groups,
            groups_per_token=min(self.topk_group or groups, groups),
        )

    def head_width(self, path: Path) -> int | None:
        return self.attention_head_dim or self.head_dim


def _names(path: Path, given: Any, key: str) -> list[str]:
    """Return kinds of layers from a pattern of letters or a list, in the names of transformers 5.

    Raises DocumentError for other values.
    """
    if isinstance(given, str):
        unknown = next((letter for letter in given if letter not in _LETTERS), None)
        if unknown is None and given:
            return [_LETTERS[letter] for letter in given]
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    if isinstance(given, list) and given:
        names = [old.get(one, one) if isinstance(one, str) else "" for one in given]
        if {*names} <= {*_LETTERS.values()}:
            return names
    raise DocumentError(
        path,
        f"the value is {shorten(given)}, expected letters M, E, * and - or a list of kinds",
        key=key,
    )


class _WithMamba(Hybrid):
    """Granite 4 and Bamba: a mixer and an MLP in every layer."""

    mamba_n_heads: Whole = 128
    mamba_d_head: Any = None
    mamba_n_groups: Whole = 1
    mamba_d_state: Whole = 256
    mamba_d_conv: Whole = 4
    mamba_chunk_size: Whole = 256
    mamba_expand: Whole = 2
    mamba_conv_bias: Switch | None = None
    mamba_proj_bias: Switch | None = None

    def mamba(self, path: Path, inner: int | None = None, *, norm: bool = True) -> Mamba:
        """Return the Mamba-2 mixer.

        inner : inner width; None: `mamba_expand` times the hidden size. norm : True with a gated
        norm.
        """
        refuse_given(path, self, mamba_conv_bias=True, mamba_proj_bias=False)
        width = self.mamba_d_head
        if type(width) is not int:
            width = (inner or self.mamba_expand * self.hidden_size) // self.mamba_n_heads
        return Mamba(
            heads=self.mamba_n_heads,
            width=width,
            state=self.mamba_d_state,
            groups=self.mamba_n_groups,
            kernel=self.mamba_d_conv,
            chunk=self.mamba_chunk_size,
            gated_norm=norm,
        )


class _GraniteHybrid(_WithMamba):
    """Experts beside a shared MLP, or the shared MLP alone."""

    other_names: ClassVar = {"layer_types": "layers_block_type"}

    num_local_experts: WholeOrZero = 8
    num_experts_per_tok: WholeOrZero = 2
    shared_intermediate_size: Whole = 1024
    position_embedding_type: Any = None

    def mixed(self, path: Path, place: int) -> LayerSpec:
        layer = self.layer(path, place)
        if not self.num_local_experts:
            layer = replace(layer, ffn_hidden_size=self.shared_intermediate_size)
        else:
            layer = replace(
                layer,
                num_experts=self.num_local_experts,
                experts_per_token=self.num_experts_per_tok,
                shared_expert_width=self.shared_intermediate_size,
            )
        if self.layer_types is not None and self.is_attention(path, place):
            return layer
        return _without_attention(layer, self.mamba(path))

    def beside(self) -> dict[str, Any]:
        return {"no_positions": self.position_embedding_type != "rope"}


class _Bamba(_WithMamba):
    rotary_share = 0.5

    attn_layer_indices: Any = None

    def mixed(self, path: Path, place: int) -> LayerSpec:
        places = self.attn_layer_indices or []
        if not isinstance(places, list):
            raise DocumentError(path, "expected a list of layers", key="attn_layer_indices")
        layer = self.layer(path, place)
        return layer if place in places else _without_attention(layer, self.mamba(path))


class _FalconH1(_WithMamba):
    """Attention and Mamba-2 in parallel in every layer, then an MLP."""

    mamba_d_ssm: Whole | None = 1024
    mamba_rms_norm: Switch | None = None
    projectors_bias: Switch | None = None

    def mixed(self, path: Path, place: int) -> LayerSpec:
        refuse_given(path, self, projectors_bias=False)
        mixer = self.mamba(path, self.mamba_d_ssm, norm=bool(self.mamba_rms_norm))
        return replace(self.layer(path, place), mixers=(mixer,))


# --------------------------------------------------------------------------------------------------
# Linear attention and short convolutions


class _Delta(Hybrid):
    """Gated delta nets, and in each `full_attention_interval`-th layer attention."""

    linear_num_key_heads: Whole
    linear_num_value_heads: Whole
    linear_key_head_dim: Whole
    linear_value_head_dim: Whole
    linear_conv_kernel_dim: Whole = 4
    full_attention_interval: Whole | None = 4

    def mixed(self, path: Path, place: int) -> LayerSpec:
        layer = self.layer(path, place)
        if self._attends(path, place):
            return layer
        return _without_attention(layer, self._delta())

    def _attends(self, path: Path, place: int) -> bool:
        if self.layer_types is not None:
            return self.is_attention(path, place)
        return (place + 1) % (self.full_attention_interval or 4) == 0

    def _delta(self) -> DeltaNet:
        return DeltaNet(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_width=self.linear_key_head_dim,
            value_width=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
        )


class _Qwen35(_Delta):
    """Qwen3.5: gated attention with norms of queries and keys in every fourth layer."""

    base = 1e4
    rotary_share = 0.25
    mixture = False
    qk_norms = True

    head_dim: Whole | None = 256
    mtp_num_hidden_layers: WholeOrZero | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        return replace(super().layer(path, place), output_gate=True)

    def beside(self) -> dict[str, Any]:
        return {"mtp_layers": self.mtp_num_hidden_layers or 0}


class _Qwen3Next(_Qwen35):
    """Qwen3.5 with experts and a gated shared expert."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    other_names: ClassVar = {"num_experts": "num_local_experts"}

    intermediate_size: Whole = 5632
    num_experts: Whole
    num_experts_per_tok: Whole
    moe_intermediate_size: Whole
    shared_expert_intermediate_size: Whole
    decoder_sparse_step: Whole | None = None
    mlp_only_layers: Any = None
    num_nextn_predict_layers: WholeOrZero | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        if not is_sparse(path, self, place):
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
            shared_expert_width=self.shared_expert_intermediate_size,
            shared_expert_gate=True,
        )

    def beside(self) -> dict[str, Any]:
        return {"mtp_layers": self.num_nextn_predict_layers or self.mtp_num_hidden_layers or 0}


class _OlmoHybrid(_Delta):
    """One norm over all queries and one over all keys; values are wider than keys."""

    mixture = False
    qk_norms = True
    wide_qk_norms = True


class _Lfm2(Hybrid):
    """Short convolutions, and attention in the listed layers."""

    mixture = False
    tied = True
    qk_norms = True
    other_names: ClassVar = {"intermediate_size": "block_ff_dim"}

    conv_L_cache: Whole = 3  # noqa: N815 (key of the file)
    conv_bias: Switch | None = None
    full_attn_idxs: Any = None
    block_auto_adjust_ff_dim: Switch | None = True
    block_ffn_dim_multiplier: Any = 1.0
    block_multiple_of: Whole = 256

    def mixed(self, path: Path, place: int) -> LayerSpec:
        layer = replace(self.layer(path, place), ffn_hidden_size=self._width())
        listed = self.full_attn_idxs
        attends = place in listed if isinstance(listed, list) else listed is None
        if self.layer_types is not None:
            attends = self.kinds(path)[place] in _ATTENTION
        if attends:
            return layer
        mixer = ConvolutionSpec(kernel=self.conv_L_cache, biases=bool(self.conv_bias))
        return _without_attention(layer, mixer)

    def _width(self) -> int:
        width, unit = self.intermediate_size, self.block_multiple_of
        if not self.block_auto_adjust_ff_dim:
            return width
        width = int(2 * width / 3)
        factor = self.block_ffn_dim_multiplier
        if factor is None:
            return width
        return unit * -(-int(factor * width) // unit)


class _Lfm2Moe(_Lfm2):
    """Experts behind the first dense layers."""

    mixture = True
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}

    block_auto_adjust_ff_dim: Switch | None = False
    num_experts: Whole = 32
    num_experts_per_tok: Whole = 4
    moe_intermediate_size: Whole = 1792
    num_dense_layers: WholeOrZero = 2

    def mixed(self, path: Path, place: int) -> LayerSpec:
        layer = super().mixed(path, place)
        if place < self.num_dense_layers:
            return layer
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.num_experts_per_tok,
        )


class _MiniMax(Hybrid):
    """MiniMax-01: lightning attention and experts; attention in some layers."""

    other_names: ClassVar = {"num_local_experts": "num_experts", "layer_types": "attn_type_list"}

    num_local_experts: Whole = 8
    num_experts_per_tok: Whole = 2
    block_size: Whole = 256

    def mixed(self, path: Path, place: int) -> LayerSpec:
        layer = replace(
            self.layer(path, place),
            num_experts=self.num_local_experts,
            experts_per_token=self.num_experts_per_tok,
        )
        # transformers' default has recurrent odd layers, counted from 1
        attends = place % 2 == 1
        if self.layer_types is not None:
            # released files list 0 for lightning attention and 1 for attention
            attends = self.kinds(path)[place] in (*_ATTENTION, 1)
        if attends:
            return layer
        width = self.head_width(path) or 0
        mixer = LightningAttention(
            heads=self.num_attention_heads, width=width, chunk=self.block_size
        )
        return _without_attention(layer, mixer)


class _LinearAttention(Entry, forbid_unknown_fields=False):
    """Section `linear_attn_config`; layers count from 1."""

    kda_layers: Any = None
    head_dim: Whole = 128
    num_heads: Whole = 32
    short_conv_kernel_size: Whole = 4


class _KimiLinear(DeepseekV3):
    """Kimi delta attention, and latent attention without rotary positions in some layers."""

    dense = 1
    keys: ClassVar = {**Config.keys, "num_experts": "num_experts"}
    other_names: ClassVar = {
        "n_routed_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
        "max_position_embeddings": "model_max_length",
        "n_group": "num_expert_group",
    }

    linear_attn_config: (
        Annotated[_LinearAttention, Meta(extra={"expected": "an object with kda_layers"})] | None
    ) = None
    layer_types: Any = None
    linear_head_dim: Whole = 128
    linear_num_heads: Whole = 32
    linear_conv_kernel_dim: Whole = 4

    def spec(self, path: Path, name: str) -> ModelSpec:
        types, order = in_order([self.mixed(path, at) for at in range(self.num_hidden_layers)])
        return self.model(path, name, *types, tied=self.tied, order=order, no_positions=True)

    def mixed(self, path: Path, place: int) -> LayerSpec:
        own, layer = self.linear_attn_config, self.layer(path, place)
        if layer.num_experts is not None:
            # the router reads a copy of the hidden states in fp32 (transformers 5.24)
            layer = replace(layer, elementwise=2)
        if own is None:
            # files of transformers 5
            if _attends(path, self, place):
                return layer
            sizes = (self.linear_num_heads, self.linear_head_dim, self.linear_conv_kernel_dim)
        else:
            if not isinstance(own.kda_layers, list):
                raise DocumentError(path, "expected a list of layers", key="linear_attn_config")
            if place + 1 not in own.kda_layers:
                return layer
            sizes = (own.num_heads, own.head_dim, own.short_conv_kernel_size)
        heads, width, kernel = sizes
        return _without_attention(layer, KimiDelta(heads=heads, width=width, kernel=kernel))


# --------------------------------------------------------------------------------------------------
# Sparse attention


class _Sparse(DeepseekV3):
    """DeepSeek-V3.2 and GLM-5: latent attention to the keys that an indexer chooses."""

    index_n_heads: Whole
    index_head_dim: Whole = 128
    index_topk: Whole = 2048
    indexer_types: Any = None
    index_topk_freq: Whole = 1
    index_skip_topk_offset: WholeOrZero = 2
    index_topk_pattern: Any = None
    mlp_layer_types: Any = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        each = [self.layer(path, place) for place in range(self.num_hidden_layers)]
        types, order = in_order(each)
        more = self.beside()
        last = each[-1].indexer
        if last is not None and last.reused and more.get("mtp_layers"):
            # each MTP layer has an indexer, as one of the layers has
            own = replace(each[-1], indexer=replace(last, reused=False))
            alike = [replace(one, num_layers=own.num_layers) for one in types]
            more["mtp_order"] = (alike.index(own),) if own in alike else ()
        return self.model(path, name, *types, tied=self.tied, order=order, **self._rotary(), **more)

    def layer(self, path: Path, place: int) -> LayerSpec:
        reused = self._reused(path)
        run = max(len(list(run)) for own, run in groupby(reused) if own) if any(reused) else 0
        own = Indexer(
            heads=self.index_n_heads,
            width=self.index_head_dim,
            topk=self.index_topk,
            every=run + 1,
            reused=reused[place],
        )
        return replace(super().layer(path, place), indexer=own)

    def _reused(self, path: Path) -> tuple[bool, ...]:
        """Return a boolean for each layer, True if it attends to the keys of an earlier layer."""
        key = "index_topk_pattern" if self.indexer_types is None else "indexer_types"
        types = self.indexer_types or self.index_topk_pattern
        if types is None:
            return tuple(
                max(place + 1 - self.index_skip_topk_offset, 0) % self.index_topk_freq > 0
                for place in range(self.num_hidden_layers)
            )
        words = {"full": False, "F": False, "shared": True, "S": True}
        given = [*types] if isinstance(types, str | list) else []
        found = [words.get(one) if isinstance(one, str) else None for one in given]
        if len(found) != self.num_hidden_layers or None in found or found[0]:
            expected = f"{self.num_hidden_layers} entries of full (F) and shared (S), full first"
            raise DocumentError(path, f"expected {expected}", key=key)
        return tuple(map(bool, found))


HYBRIDS: dict[str, type[Config]] = {
    "bamba": _Bamba,
    "deepseek_v32": _Sparse,
    "falcon_h1": _FalconH1,
    "glm_moe_dsa": _Sparse,
    "granitemoehybrid": _GraniteHybrid,
    "kimi_linear": _KimiLinear,
    "lfm2": _Lfm2,
    "lfm2_moe": _Lfm2Moe,
    "minimax": _MiniMax,
    "minimax_m1": _MiniMax,
    "minimax_text_01": _MiniMax,
    "nemotron_h": _NemotronH,
    "olmo_hybrid": _OlmoHybrid,
    "qwen3_5_moe_text": _Qwen3Next,
    "qwen3_5_text": _Qwen35,
    "qwen3_next": _Qwen3Next,
}
"""Families by `model_type`."""
