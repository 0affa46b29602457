"""Dense decoders similar to Llama, read from their `config.json`.

Defaults of missing keys are those of transformers, `src/transformers/models/*/`
(`configuration_*.py` and `modeling_*.py`, release 4.57).
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
    WholeOrZero,
    divided_width,
    in_order,
    read_rotary,
    runs_of,
)
from autopar.records import replace, shorten
from autopar.run.model import LayerSpec, ModelSpec

_NARROW = ("sliding_attention", "chunked_attention")


class Decoder(Config):
    """Llama and models with the same structure."""

    base: ClassVar[float | None] = 1e4
    """Default base of rotary positions; None if a spec cannot express those of the family."""
    rotary_share: ClassVar[float] = 1.0
    """Default rotary fraction of a head."""
    tied: ClassVar[bool] = False
    qkv_biases: ClassVar[bool] = False
    said_biases: ClassVar[bool] = False
    """True if `attention_bias` applies only to queries, keys and values."""
    qk_norms: ClassVar[bool] = False
    wide_qk_norms: ClassVar[bool] = False
    num_norms: ClassVar[int | None] = None
    norm_parameters: ClassVar[int] = 2

    num_hidden_layers: Layers
    max_position_embeddings: Whole
    hidden_size: Whole
    num_attention_heads: Whole
    num_key_value_heads: Whole | None = None
    head_dim: Whole | None = None
    intermediate_size: Whole
    attention_bias: Switch | None = None
    mlp_bias: Switch | None = None
    rope_theta: Ratio | None = None
    rope_scaling: Section | None = None
    rope_parameters: Section | None = None
    partial_rotary_factor: Share | None = None
    sliding_window: WholeOrZero | None = None
    layer_types: Any = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        layers = [
            replace(self.layer(path, place), window=window)
            for place, window in enumerate(self._windows(path))
        ]
        types, interleaved = runs_of(layers)
        return self.model(
            path,
            name,
            *types,
            tied=self.tied,
            interleaved=interleaved,
            **self._rotary(),
            **self.beside(),
        )

    def layer(self, path: Path, place: int) -> LayerSpec:
        """Return layer `place`, counted from 0, before its window is set."""
        everywhere, of_qkv = self.biases(path)
        return LayerSpec(
            num_layers=1,
            seq_length=self.max_position_embeddings,
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads or self.num_attention_heads,
            head_dim=self.head_width(path),
            ffn_hidden_size=self.intermediate_size,
            gated_mlp=True,
            qkv_biases=of_qkv,
            qk_norms=self.qk_norms,
            wide_qk_norms=self.wide_qk_norms,
            biases=everywhere,
            num_norms=self.num_norms,
            norm_parameters_per_hidden=self.norm_parameters,
        )

    def head_width(self, path: Path) -> int | None:
        """Return the head width for a `LayerSpec`; None if the layer defines it otherwise (MLA)."""
        return self.head_dim or divided_width(path, self, "hidden_size", "num_attention_heads")

    def biases(self, path: Path) -> tuple[bool, bool]:
        """Return (biases in all linear layers, biases only in the QKV projection) as booleans."""
        everywhere = bool(self.mlp_bias)
        if self.qkv_biases or self.said_biases:
            return everywhere, self.qkv_biases or bool(self.attention_bias)
        if bool(self.attention_bias) != everywhere:
            raise DocumentError(
                path,
                f"the value is {str(not everywhere).lower()}, but mlp_bias is "
                f"{str(everywhere).lower()}: biases in only one of attention and "
                "MLP are not supported",
                key="attention_bias",
                remedy="Describe the model in a model.json",
            )
        return everywhere, False

    def beside(self) -> dict[str, Any]:
        """Return fields of the ModelSpec in addition to layers, vocabulary and positions."""
        return {}

    def is_narrow(self, place: int) -> bool:
        """Return True if layer `place`, counted from 0, has sliding-window attention by default.

        `layer_types` of the file takes precedence.
        """
        return False

    def window(self) -> int | None:
        """Return the sliding window in tokens; None without one, which some files give as 0."""
        return self.sliding_window or None

    def _windows(self, path: Path) -> list[int | None]:
        """Return the attention window of each layer in tokens, None for full attention."""
        number, window = self.num_hidden_layers, self.window()
        kinds = self.layer_types
        if kinds is None:
            return [window if self.is_narrow(place) else None for place in range(number)]
        if not isinstance(kinds, list) or len(kinds) != number:
            raise DocumentError(
                path, f"expected a list of {number} kinds of layers", key="layer_types"
            )
        for kind in kinds:
            if kind not in ("full_attention", *_NARROW):
                raise DocumentError(
                    path,
                    f"{kinds.count(kind)} of {number} layers are "
                    f"{shorten(kind)}, but only full and sliding-window attention "
                    "are supported",
                    key="layer_types",
                    remedy="Use a model with attention and MLP layers",
                )
        if window is None and any(kind in _NARROW for kind in kinds):
            raise DocumentError(
                path,
                "this key is missing, but layer_types has layers with a window",
                remedy="Add it",
                key="sliding_window",
            )
        return [window if kind in _NARROW else None for kind in kinds]

    def _rotary(self) -> dict[str, float | None]:
        """Return rotary positions for a `ModelSpec`, from the keys of transformers 4 or 5."""
        # Both keys are at the top level only in families that read them there.
        base = None if self.base is None else self.rope_theta or self.base
        sections = (self.rope_scaling, self.rope_parameters)
        return read_rotary(sections, base, self.partial_rotary_factor or self.rotary_share)


class Mistral(Decoder):
    """Decoder whose layers all have the sliding window, if there is one."""

    def is_narrow(self, place: int) -> bool:
        return True


class Qwen2(Decoder):
    """Decoder with QKV biases, and a window after the first layers if it is enabled."""

    qkv_biases = True

    use_sliding_window: Switch | None = None
    max_window_layers: Any = None

    def window(self) -> int | None:
        return super().window() if self.use_sliding_window else None

    def is_narrow(self, place: int) -> bool:
        first = self.max_window_layers
        return place >= (first if isinstance(first, int) else 0)


class Qwen3(Qwen2):
    """Decoder with norms of queries and keys, and with biases only if the file sets them."""

    qkv_biases = False
    qk_norms = True

    head_dim: Whole | None = 128


class _Gemma(Decoder):
    tied = True

    head_dim: Whole | None = 256


class _Gemma2(_Gemma):
    """Decoder with norms before and after each part, and a window in every other layer."""

    num_norms = 4
    norm_parameters = 4

    sliding_window: Whole | None = 4096

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 2 > 0


class _Gemma3(_Gemma2):
    """Decoder with two bases of rotary positions and with default sizes of transformers."""

    base = None
    qk_norms = True

    vocab_size: Whole = 262208
    max_position_embeddings: Whole = 131072
    num_attention_heads: Whole = 8
    num_key_value_heads: Whole | None = 4
    sliding_window_pattern: Whole | None = None

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % (self.sliding_window_pattern or 6) > 0


class _Gemma4(_Gemma):
    """Decoder with wider and fewer heads in its full-attention layers, all with norms of values.

    Some models have experts in addition to the MLP. In others each layer has an embedding of the
    tokens, and the last layers have keys and values of earlier ones. Names and defaults are from
    transformers 5.24, models/gemma4.
    """

    base = None
    mixture = True
    keys: ClassVar = {
        **Config.keys, "num_experts": "num_experts", "experts_per_token": "top_k_experts"
    }  # fmt: skip

    vocab_size: Whole = 262144
    max_position_embeddings: Whole = 131072
    sliding_window: Whole | None = 512
    global_head_dim: Whole = 512
    num_global_key_value_heads: Whole | None = None
    attention_k_eq_v: Switch | None = None
    num_kv_shared_layers: WholeOrZero = 0
    use_double_wide_mlp: Switch | None = None
    hidden_size_per_layer_input: WholeOrZero | None = 256
    vocab_size_per_layer_input: Whole = 262144
    enable_moe_block: Switch | None = None
    num_experts: Whole | None = None
    top_k_experts: Whole | None = None
    moe_intermediate_size: Whole | None = None
    final_logit_softcapping: Any = None
    use_bidirectional_attention: Any = None

    def spec(self, path: Path, name: str) -> ModelSpec:
        if self.use_bidirectional_attention == "all":
            raise DocumentError(
                path,
                "the value is all, but only causal attention is supported",
                key="use_bidirectional_attention",
            )
        windows = self._windows(path)
        # transformers forces the last layer to full attention
        windows[-1] = None
        types, order = in_order([self._mixed(path, at, one) for at, one in enumerate(windows)])
        width = self.num_hidden_layers * (self.hidden_size_per_layer_input or 0)
        # table, projection of the hidden states, and a norm of the sum
        table = width * (self.vocab_size_per_layer_input + self.hidden_size)
        return self.model(
            path,
            name,
            *types,
            tied=self.tied,
            order=order,
            extra_embedding_parameters=table + (self.hidden_size_per_layer_input or 0),
            capped_logits=self.final_logit_softcapping is not None,
            **self._rotary(),
        )

    def _mixed(self, path: Path, place: int, window: int | None) -> LayerSpec:
        reused = place >= self.num_hidden_layers - self.num_kv_shared_layers
        inputs = self.hidden_size_per_layer_input or 0
        norms = 5 if inputs else 4
        layer = replace(
            self.layer(path, place),
            window=window,
            qk_norms=True,
            value_norms=True,
            fp32_norms=True,
            keys_reused=reused,
            token_inputs=inputs,
            num_norms=norms,
            norm_parameters_per_hidden=norms,
        )
        if reused and self.use_double_wide_mlp:
            layer = replace(layer, ffn_hidden_size=2 * self.intermediate_size)
        if window is None:
            same, groups = bool(self.attention_k_eq_v), layer.num_kv_heads
            own = self.num_global_key_value_heads if same else None
            layer = replace(
                layer,
                head_dim=self.global_head_dim,
                num_kv_heads=own or groups,
                keys_as_values=same and not reused,
            )
        return self._with_experts(path, layer) if self.enable_moe_block else layer

    def _with_experts(self, path: Path, layer: LayerSpec) -> LayerSpec:
        """Return a layer with experts and an MLP, which is counted as a shared expert."""
        if self.moe_intermediate_size is None:
            raise DocumentError(path, "this key is missing", key="moe_intermediate_size")
        norms = (layer.num_norms or 4) + 3
        return replace(
            layer,
            ffn_hidden_size=self.moe_intermediate_size,
            num_experts=self.num_experts,
            experts_per_token=self.top_k_experts,
            shared_expert_width=self.intermediate_size,
            num_norms=norms,
            norm_parameters_per_hidden=norms,
            # the router has a norm in fp32, and saves its scaled output and a product with it
            elementwise=4,
            extra_parameters=self.hidden_size + (self.num_experts or 0),
        )

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 6 > 0


class _Phi3(Mistral):
    """Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini."""


class _Glm(Decoder):
    """Decoder with rotary positions in half of every head."""

    rotary_share = 0.5
    said_biases = True


class _Glm4(_Glm):
    num_norms = 4
    norm_parameters = 4


class _Olmo(Decoder):
    """Decoder with LayerNorms without parameters."""

    norm_parameters = 0


class _Olmo2(Decoder):
    """Decoder with one norm over all queries, and one over all keys."""

    qk_norms = True
    wide_qk_norms = True


class _Olmo3(_Olmo2):
    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 4 > 0


class _SeedOss(Decoder):
    said_biases = True


class _Arcee(Decoder):
    """Decoder with an MLP of two matrices (squared ReLU)."""

    def layer(self, path: Path, place: int) -> LayerSpec:
        return replace(super().layer(path, place), gated_mlp=False)


class _Biased(_Arcee):
    """Jais 2: LayerNorms with biases, and an MLP of two matrices."""

    norm_parameters = 4


class _Nemotron(_Biased):
    rotary_share = 0.5


class _Ernie45(Decoder):
    """Decoder whose linear layers all have biases if `use_bias` is set."""

    tied = True

    use_bias: Switch | None = None

    def biases(self, path: Path) -> tuple[bool, bool]:
        return bool(self.use_bias), False


class _Exaone4(Decoder):
    """Decoder with norms after attention and MLP alone, and a window in three of four layers."""

    qk_norms = True

    sliding_window_pattern: Any = 4

    def is_narrow(self, place: int) -> bool:
        every = self.sliding_window_pattern
        return (place + 1) % (every if isinstance(every, int) else 4) > 0


class _HyperClovaX(Decoder):
    """Decoder with norms also after attention and MLP if `use_post_norm` is set."""

    use_post_norm: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        norms = 4 if self.use_post_norm else None
        return replace(
            super().layer(path, place), num_norms=norms, norm_parameters_per_hidden=norms or 2
        )


class _VaultGemma(_Gemma):
    """Gemma 2 without norms after attention and MLP."""

    sliding_window: WholeOrZero | None = 512

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 2 > 0


class _Cohere(Decoder):
    """Attention and MLP in parallel behind one LayerNorm without bias."""

    tied = True
    num_norms = 1
    norm_parameters = 1

    use_qk_norm: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        norms = bool(self.use_qk_norm)
        return replace(super().layer(path, place), qk_norms=norms, wide_qk_norms=norms)


class _Cohere2(_Cohere):
    """Windows in three of four layers; the others have no positions."""

    base = None

    sliding_window: WholeOrZero | None = 4096
    sliding_window_pattern: Whole | None = None

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % (self.sliding_window_pattern or 4) > 0


class _StableLm(Decoder):
    """LayerNorms with biases; attention and MLP in parallel if `use_parallel_residual` is set."""

    rotary_share = 0.25

    use_qkv_bias: Switch | None = None
    qk_layernorm: Switch | None = None
    use_parallel_residual: Switch | None = None

    def layer(self, path: Path, place: int) -> LayerSpec:
        if self.qk_layernorm:
            raise DocumentError(
                path,
                "the value is true, but a norm of its own for every head is not supported",
                key="qk_layernorm",
                remedy="Describe the model in a model.json",
            )
        norms = 1 if self.use_parallel_residual else 2
        return replace(
            super().layer(path, place), num_norms=norms, norm_parameters_per_hidden=2 * norms
        )

    def biases(self, path: Path) -> tuple[bool, bool]:
        return False, bool(self.use_qkv_bias)


class _SmolLm3(Decoder):
    """Decoder without positions in every fourth layer."""

    base = None
    tied = True


class _ChatGlm(_Glm):
    """ChatGLM 3 and GLM-4 of 2024, with keys of Megatron-LM."""

    # a factor, `rope_ratio`, multiplies it
    base = None

    other_names: ClassVar = {
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "max_position_embeddings": "seq_length",
        "num_key_value_heads": "multi_query_group_num",
        "head_dim": "kv_channels",
        "attention_bias": "add_qkv_bias",
    }


class _Exaone(Decoder):
    """EXAONE 3."""

    other_names: ClassVar = {"num_hidden_layers": "num_layers"}


class _InternLm2(Decoder):
    """Decoder whose key `bias` sets biases of attention."""

    said_biases = True

    other_names: ClassVar = {"attention_bias": "bias"}


class _InternLm3(Decoder):
    said_biases = True

    other_names: ClassVar = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}


class HunYuan(Decoder):
    """Decoder with norms of queries and keys after the rotation."""

    qk_norms = True


class _MiMo(Qwen2):
    """Qwen 2 with MTP layers."""

    num_nextn_predict_layers: WholeOrZero = 0

    def beside(self) -> dict[str, Any]:
        return {"mtp_layers": self.num_nextn_predict_layers}


class _Qwen1(Decoder):
    """The first Qwen, whose `intermediate_size` is that of gate and up together."""

    qkv_biases = True

    other_names: ClassVar = {"rope_theta": "rotary_emb_base"}

    def layer(self, path: Path, place: int) -> LayerSpec:
        layer = super().layer(path, place)
        return replace(layer, ffn_hidden_size=self.intermediate_size // 2)


DECODERS: dict[str, type[Config]] = {
    "arcee": _Arcee,
    "chatglm": _ChatGlm,
    "cohere": _Cohere,
    "cohere2": _Cohere2,
    "cwm": Decoder,
    "ernie4_5": _Ernie45,
    "exaone": _Exaone,
    "exaone4": _Exaone4,
    "gemma": _Gemma,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
    "gemma4_text": _Gemma4,
    "glm": _Glm,
    "glm4": _Glm4,
    "granite": Decoder,
    "helium": Decoder,
    "hunyuan_v1_dense": HunYuan,
    "hyperclovax": _HyperClovaX,
    "internlm2": _InternLm2,
    "internlm3": _InternLm3,
    "jais2": _Biased,
    "llama": Decoder,
    "mimo": _MiMo,
    "ministral": Decoder,
    "ministral3": Decoder,
    "mistral": Mistral,
    "nemotron": _Nemotron,
    "olmo": _Olmo,
    "olmo2": _Olmo2,
    "olmo3": _Olmo3,
    "phi3": _Phi3,
    "qwen": _Qwen1,
    "qwen2": Qwen2,
    # Vision-language models; older files have all keys at the top level.
    "qwen2_5_vl": Qwen2,
    "qwen2_5_vl_text": Qwen2,
    "qwen2_vl": Qwen2,
    "qwen2_vl_text": Qwen2,
    "qwen3": Qwen3,
    "qwen3_vl_text": Qwen3,
    "seed_oss": _SeedOss,
    "smollm3": _SmolLm3,
    "stablelm": _StableLm,
    "vaultgemma": _VaultGemma,
    "xverse": Decoder,
}
"""Families by `model_type`."""
