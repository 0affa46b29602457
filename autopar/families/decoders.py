"""Dense decoders of Llama's kind, as their `config.json` says them.

Defaults of keys and of what is not said are those of transformers, `src/transformers/models/*/`
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
    Switch,
    Whole,
    divided_width,
    read_rotary,
    runs_of,
)
from autopar.records import replace, shorten
from autopar.run.model import LayerSpec, ModelSpec

_NARROW = ("sliding_attention", "chunked_attention")


class Decoder(Config):
    """Llama and those that are built like it."""

    base: ClassVar[float | None] = 1e4
    """Of rotary positions where no key gives it; None: the family's are not said in a spec."""
    tied: ClassVar[bool] = False
    qkv_biases: ClassVar[bool] = False
    said_biases: ClassVar[bool] = False
    """Whether `attention_bias` is that of queries, keys and values alone."""
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
    partial_rotary_factor: Any = None
    sliding_window: Whole | None = None
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
        """Return one layer, counted from 0, whose window is not said yet."""
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
        """Return the width of a head as a layer says it."""
        return self.head_dim or divided_width(path, self, "hidden_size", "num_attention_heads")

    def biases(self, path: Path) -> tuple[bool, bool]:
        """Return whether all linear layers have biases, and whether the QKV projection alone."""
        everywhere = bool(self.mlp_bias)
        if self.qkv_biases or self.said_biases:
            return everywhere, self.qkv_biases or bool(self.attention_bias)
        if bool(self.attention_bias) != everywhere:
            raise DocumentError(
                path,
                f"is {str(not everywhere).lower()} and mlp_bias is {str(everywhere).lower()}; "
                "layers with biases in only one of attention and MLP are not supported",
                key="attention_bias",
                remedy="describe the model in a model.json",
            )
        return everywhere, False

    def beside(self) -> dict[str, Any]:
        """Return what the model has besides layers and vocabulary, as fields of a ModelSpec."""
        return {}

    def is_narrow(self, place: int) -> bool:
        """Return whether a layer, counted from 0, has the window, where no key lists them."""
        return False

    def window(self) -> int | None:
        """Return the tokens of a window; None where the file has none."""
        return self.sliding_window

    def _windows(self, path: Path) -> list[int | None]:
        """Return the window of each layer."""
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
                    f"{kinds.count(kind)} of {number} layers are {shorten(kind)}; only attention "
                    "to all tokens, or to a window of them, can be said in a spec",
                    key="layer_types",
                    remedy="give a model whose layers are attention and MLP",
                )
        if window is None and any(kind in _NARROW for kind in kinds):
            raise DocumentError(
                path,
                "layers of layer_types have a window and this key does not say its tokens",
                key="sliding_window",
                remedy="give it",
            )
        return [window if kind in _NARROW else None for kind in kinds]

    def _rotary(self) -> dict[str, float | None]:
        """Return base and scaling of rotary positions, from the keys of transformers 4 or 5."""
        # both are read at the top of a file by those families alone that read them there
        base = None if self.base is None else self.rope_theta or self.base
        sections = (self.rope_scaling, self.rope_parameters)
        return read_rotary(sections, base, (self.partial_rotary_factor,))


class Mistral(Decoder):
    """All layers have the window, where there is one."""

    def is_narrow(self, place: int) -> bool:
        return True


class Qwen2(Decoder):
    """Biases of queries, keys and values; a window behind the first layers, if it is used."""

    qkv_biases = True

    use_sliding_window: Switch | None = None
    max_window_layers: Any = None

    def window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def is_narrow(self, place: int) -> bool:
        first = self.max_window_layers
        return place >= (first if isinstance(first, int) else 0)


class Qwen3(Qwen2):
    """Norms of queries and keys, and biases where they are said."""

    qkv_biases = False
    qk_norms = True

    head_dim: Whole | None = 128


class _Gemma(Decoder):
    tied = True

    head_dim: Whole | None = 256


class _Gemma2(_Gemma):
    """Norms before and behind each part, and a window in every layer but each second."""

    num_norms = 4
    norm_parameters = 4

    sliding_window: Whole | None = 4096

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 2 > 0


class _Gemma3(_Gemma2):
    """Bases of rotary positions are two; sizes that files leave out are those of transformers."""

    base = None
    qk_norms = True

    vocab_size: Whole = 262208
    max_position_embeddings: Whole = 131072
    num_attention_heads: Whole = 8
    num_key_value_heads: Whole | None = 4
    sliding_window_pattern: Whole | None = None

    def is_narrow(self, place: int) -> bool:
        return (place + 1) % (self.sliding_window_pattern or 6) > 0


class _Phi3(Mistral):
    """Also Phi-3.5-mini, Phi-4 and Phi-4-mini."""


class _Glm(Decoder):
    """Half of every head turns."""

    base = None
    said_biases = True


class _Glm4(_Glm):
    num_norms = 4
    norm_parameters = 4


class _Olmo(Decoder):
    """LayerNorms without parameters."""

    norm_parameters = 0


class _Olmo2(Decoder):
    """One norm of all queries, and one of all keys."""

    qk_norms = True
    wide_qk_norms = True


class _Olmo3(_Olmo2):
    def is_narrow(self, place: int) -> bool:
        return (place + 1) % 4 > 0


class _SeedOss(Decoder):
    said_biases = True


class _SmolLm3(Decoder):
    """Every fourth layer has no positions."""

    base = None
    tied = True


DECODERS: dict[str, type[Config]] = {
    "gemma": _Gemma,
    "gemma2": _Gemma2,
    "gemma3_text": _Gemma3,
    "glm": _Glm,
    "glm4": _Glm4,
    "granite": Decoder,
    "llama": Decoder,
    "mistral": Mistral,
    "olmo": _Olmo,
    "olmo2": _Olmo2,
    "olmo3": _Olmo3,
    "phi3": _Phi3,
    "qwen2": Qwen2,
    # of models that see pictures; first files have all keys at the top
    "qwen2_5_vl": Qwen2,
    "qwen2_5_vl_text": Qwen2,
    "qwen2_vl": Qwen2,
    "qwen2_vl_text": Qwen2,
    "qwen3": Qwen3,
    "qwen3_vl_text": Qwen3,
    "seed_oss": _SeedOss,
    "smollm3": _SmolLm3,
}
"""By `model_type`."""
