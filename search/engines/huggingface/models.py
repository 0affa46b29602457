"""Sizes of published models by the names that PyTorch engines use.

A launch file names a torchtitan flavor, a Hugging Face repository or a folder with a `config.json`.
The tables refer to shipped models (`models/`).
All other sizes are in this module and come from published `config.json` files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autopar.documents.catalog import model_names, repository_name, shipped_model
from autopar.documents.json import load_object
from autopar.documents.spec import FORMAT, load_spec, parse_own
from autopar.families.config import parse_hugging_face
from autopar.records import Record, replace
from autopar.run.architecture import (
    Attention,
    Layer,
    LayerGroup,
    LightningAttention,
    Mlp,
    Model,
    Recurrent,
    ShortConvolution,
    decoder_layers,
    grouped,
    without_window,
)
from autopar.run.model import ModelSpec, has_patches
from autopar.run.of_plan import uniform_model
from autopar.training.adapters import Target
from search.engines.text import named_path


class Decoder(Record):
    """Sizes of a decoder-only model, by default with the blocks of Llama."""

    hidden: int
    layers: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    tied: bool = False
    plain: bool = False
    """True for the blocks of GPT-2 and OPT: LayerNorm, biases, ungated MLP, no rotary positions."""
    positions: int = 0
    """Number of learned positions; 0 means rotary positions, or none if `plain`."""

    def model(self) -> Model:
        """Return the model with these sizes."""
        width = self.hidden // self.heads
        attention = Attention(
            heads=self.heads,
            kv_heads=self.groups,
            width=width,
            value_width=width,
            rotary_share=0.0 if self.plain else 1.0,
            qkv_biases=self.plain,
        )
        layer = Layer(
            hidden=self.hidden,
            mixers=(attention,),
            mlp=Mlp(width=self.ffn, gated=not self.plain),
            norm="layer" if self.plain else "rms",
            biases=self.plain,
        )
        return Model(
            layers=(LayerGroup(count=self.layers, layer=layer),),
            vocab=self.vocab,
            vocab_divisor=1,
            tied=self.tied,
            positions="learned" if self.positions else "none" if self.plain else "rotary",
            max_positions=self.positions,
        )


_Entry = Decoder | str
"""Sizes of a model, the name of a shipped model, or `deepseek_v2`."""


def _model(entry: _Entry) -> Model:
    """Return the model with the sizes or the name in a table entry."""
    if not isinstance(entry, str):
        return entry.model()
    if entry == "deepseek_v2":
        return _deepseek_v2()
    shipped = _shipped(entry)
    assert shipped is not None, f"{entry} is a shipped decoder"
    return shipped


def _deepseek_v2() -> Model:
    """Return DeepSeek-V2, built from the layers of DeepSeek-V2-Lite with other sizes."""
    small = _model("deepseek-v2-lite")
    attention, experts = small.attention, small.experts
    assert attention.latent is not None, "it has latent attention"
    assert experts is not None, "and experts"
    latent = replace(attention.latent, query_rank=1536)
    layer = replace(
        small.last,
        hidden=5120,
        mixers=(replace(attention, heads=128, kv_heads=128, latent=latent),),
        mlp=Mlp(width=12288, gated=True),
    )
    experts = replace(experts, number=160, per_token=6, width=1536, shared_width=3072)
    layers, repeat = decoder_layers(layer, (False, *(True,) * 59), experts)
    return replace(small, layers=layers, repeat=repeat)


_DEEPSEEK: Mapping[str, _Entry] = {
    "16B": "deepseek-v2-lite",
    "236B": "deepseek_v2",
    "671B": "deepseek-v3",
}
FLAVOURS: Mapping[str, Mapping[str, _Entry]] = {
    "llama3": {
        "1B": "llama3.2-1b",
        "3B": "llama3.2-3b",
        "8B": "llama3-8b",
        "70B": "llama3-70b",
        "405B": "llama3-405b",
        "debugmodel": Decoder(hidden=256, layers=6, heads=16, groups=16, ffn=768, vocab=2048),
    },
    "llama2": {"7B": "llama2-7b", "13B": "llama2-13b", "70B": "llama2-70b"},
    "llama4": {"17bx16e": "llama4-scout", "17bx128e": "llama4-maverick"},
    "deepseek_v3": _DEEPSEEK,
    "qwen3": {
        size: f"qwen3-{size.lower()}"
        for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
    },
    "gpt_oss": {"20b": "gpt-oss-20b", "120b": "gpt-oss-120b"},
}
"""Sizes or model name, by torchtitan's model name and flavor."""


def flavour(name: str, size: str) -> Model | None:
    """Return a model by torchtitan's name and flavor; None if it is unknown.

    A suffix for the attention kernel (`8B_flex`, `17bx16e_irope`) is ignored. Chunked attention of
    `irope` flavors is therefore counted as full attention.
    """
    known = FLAVOURS.get(name, {})
    found = known.get(size) or known.get(re.sub(r"_(flex|varlen|sdpa|flex_attn|irope)$", "", size))
    if found is None:
        return None
    model = _model(found)
    if name != "llama4":
        return model
    # Only `irope` variants have chunked attention, with chunks of 8,192 tokens, so it is removed.
    layers, repeat = grouped(tuple(map(without_window, model.each_layer)))
    return replace(model, layers=layers, repeat=repeat)


# --------------------------------------------------------------------------------------------------
# Names of Hugging Face.


def _plain(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, positions: int, *, tied: bool = True
) -> Decoder:
    return Decoder(
        hidden=hidden, layers=layers, heads=heads, groups=heads, ffn=ffn, vocab=vocab,
        positions=positions, tied=tied, plain=True,
    )  # fmt: skip


_REPOSITORIES: Mapping[str, _Entry] = {
    "opt-1.3b": _plain(2048, 24, 32, 8192, 50272, 2050),
    "opt-6.7b": _plain(4096, 32, 32, 16384, 50272, 2050),
    "opt-13b": _plain(5120, 40, 40, 20480, 50272, 2050),
    "opt-30b": _plain(7168, 48, 56, 28672, 50272, 2050),
    "opt-66b": _plain(9216, 64, 72, 36864, 50272, 2050),
    "bloom-7b1": _plain(4096, 30, 32, 16384, 250880, 0),
    "bloom": _plain(14336, 70, 112, 57344, 250880, 0),
}  # fmt: skip
"""Sizes of models that are not shipped, by `repository_name`."""


def model_named(name: str, beside: Path | None = None) -> Model | None:
    """Return a model by shipped name, repository name or path of its config.json or folder.

    beside : folder for relative paths, before the working folder. Returns None for an unknown
        model.

    Raises DocumentError or InputError for an invalid or unsupported config.json.
    """
    config = config_named(name, beside)
    if config is not None:
        return model_of_config(load_object(config).data, config)
    return published_model(name)


def config_named(name: str, beside: Path | None) -> Path | None:
    """Return the config.json of a path or folder; None for another name."""
    path = named_path(name, beside) or Path(name)
    files = (one for one in (path, path / "config.json") if one.suffix == ".json")
    return next((one for one in files if one.is_file()), None)


def tokens_of_images(name: str, beside: Path | None = None) -> int | None:
    """Return the tokens of a sample of a model of images or videos; None for another model.

    They follow from the pixels that its config.json or model.json names. Parameters and errors as
    `model_named`.
    """
    config, shipped = config_named(name, beside), shipped_model(name)
    if config is not None:
        spec = _spec_of_config(load_object(config).data, config, None)
    elif shipped in model_names():
        spec = load_spec(shipped)
    else:
        return None
    return spec.layers[0].seq_length if has_patches(spec) else None


def published_model(name: str) -> Model | None:
    """Return a model by shipped name or repository name; None for an unknown one."""
    found = _REPOSITORIES.get(repository_name(name))
    return _shipped(shipped_model(name)) if found is None else _model(found)


@cache
def _shipped(name: str) -> Model | None:
    """Return a shipped decoder by its name in `autopar models`; None for all other names."""
    if name not in model_names():
        return None
    spec = load_spec(name)
    reads_words = not has_patches(spec)
    if reads_words and any(one.cross_attention or not one.causal for one in spec.layers):
        return None
    return _of_torch(spec)


_PROJECTIONS: Mapping[str, tuple[Target, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("projection",),
    "gate_proj": ("fc1",),
    "up_proj": ("fc1",),
    "down_proj": ("fc2",),
}
_OF_MIXERS: Mapping[type[Recurrent], Mapping[str, tuple[Target, ...]]] = {
    ShortConvolution: {
        "o_proj": (), "gate_proj": (), "up_proj": (), "down_proj": (),
        "in_proj": ("mixer_in",), "out_proj": ("projection", "mixer_out"),
        "w1": ("fc1",), "w3": ("fc1",), "w2": ("fc2",),
    },
    LightningAttention: {
        "qkv_proj": ("mixer_in",), "output_gate": ("mixer_in",), "out_proj": ("mixer_out",)
    },
}  # fmt: skip


def projections_of(model: Model) -> dict[str, tuple[Target, ...]]:
    """Return the targets of adapters by the names of their modules in transformers.

    A name that the model does not have has none (transformers 5.24: models/lfm2, models/minimax).
    """
    mixers = {type(one.recurrent): None for one in model.kinds if one.recurrent is not None}
    own = {name: one for kind in mixers for name, one in _OF_MIXERS.get(kind, {}).items()}
    return {**_PROJECTIONS, **own}


_ANY_LENGTH = 1


def model_of_config(config: Mapping[str, Any], path: Path) -> Model:
    """Return the model of a config.json of Hugging Face, or of a model.json.

    Raises DocumentError for an unknown family. Raises InputError for a model whose layers differ in
    more than experts and attention windows.
    """
    # A run has its own sequence length, so the file need not contain one.
    return _of_torch(_spec_of_config(config, path, _ANY_LENGTH))


def _spec_of_config(config: Mapping[str, Any], path: Path, seq_length: int | None) -> ModelSpec:
    if config.get("format") == FORMAT:
        return parse_own(path, config)
    return parse_hugging_face(path, config, seq_length=seq_length)


def _of_torch(spec: ModelSpec) -> Model:
    """Return the model of a spec as PyTorch engines build it."""
    # The vocabulary is not padded, and MTP layers are not built.
    return replace(uniform_model(spec), vocab_divisor=1, mtp=0)
