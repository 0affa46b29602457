"""Sizes of published models, by the names that launches of torch trainers call them.

Only what memory and time depend on. A launch names a flavour (torchtitan), a repository of Hugging
Face or a folder with its `config.json`. Sizes that `search.launches.architectures` has are not
here; the others are those of torchtitan's `models/*/__init__.py` and of published `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.documents.catalog import model_names
from autopar.documents.json import load_object
from autopar.documents.spec import load_spec
from autopar.families.config import parse_hugging_face
from autopar.memory.launch import Attention, Experts, Latent, Model
from autopar.memory.profile import launch_model
from autopar.model import ModelSpec
from autopar.records import dataclass
from search.launches.architectures import architecture

__all__ = ["FLAVOURS", "flavour", "model_named", "model_of_config"]


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """One decoder-only model of Llama's kind, if nothing else is said."""

    hidden: int
    layers: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    width: int = 0
    """Of a head; 0: hidden over heads."""
    tied: bool = False
    head_norms: bool = False
    qkv_biases: bool = False
    plain: bool = False
    """LayerNorm, biases, no gate and learned positions, as GPT-2 and OPT."""
    positions: int = 0
    experts: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Number, of each token, width, width of what every token visits."""
    dense_layers: int = 0
    """In front of those with experts."""
    every: int = 1
    """Each so-manieth layer has experts, the last of them."""
    latent: tuple[int, int, int, int, int] | None = None
    """Ranks of queries (0: none) and of keys and values, widths of key, rotary part and value."""

    def model(self) -> Model:
        number, each, width, shared = self.experts
        latent = self.latent
        return Model(
            hidden=self.hidden,
            ffn=self.ffn,
            attention=Attention(
                heads=self.heads,
                groups=self.groups,
                width=self.width or self.hidden // self.heads,
                head_norms=self.head_norms or latent is not None,
                dropout=0.0,
                latent=None
                if latent is None
                else Latent(
                    query_rank=latent[0] or None,
                    key_value_rank=latent[1],
                    key_width=latent[2],
                    rotary_width=latent[3],
                    value_width=latent[4],
                ),
            ),
            vocab=self.vocab,
            vocab_divisor=1,
            expert_layers=tuple(
                number > 0 and place >= self.dense_layers and (place + 1) % self.every == 0
                for place in range(self.layers)
            ),
            experts=Experts(
                number=number,
                per_token=each,
                ffn=width,
                shared_ffn=shared,
                dispatcher="alltoall",
                grouped=True,
            )
            if number
            else None,
            gated=not self.plain,
            biases=self.plain,
            qkv_biases=self.plain or self.qkv_biases,
            tied=self.tied,
            norm="layer" if self.plain else "rms",
            positions="learned" if self.positions else "none" if self.plain else "rotary",
            max_positions=self.positions,
            hidden_dropout=0.0,
        )


_Entry = _Sizes | str
"""Sizes, or the name of an architecture that has them."""


def _model(entry: _Entry) -> Model:
    """Return the model of an entry of the tables below."""
    if not isinstance(entry, str):
        return entry.model()
    sizes = architecture(entry)
    assert sizes is not None, f"{entry} is one of the architectures"
    width = sizes["kv_channels"]
    number = sizes.get("num_moe_experts", 0)
    layers = sizes["num_layers"]
    latent = sizes.get("multi_latent_attention", False)
    dense = sum(1 for kind in sizes.get("moe_layer_freq", [1] * layers) if not kind)
    return _Sizes(
        hidden=sizes["hidden_size"],
        layers=layers,
        heads=sizes["num_attention_heads"],
        groups=sizes["num_query_groups"],
        ffn=sizes["ffn_hidden_size"],
        vocab=sizes["vocab_size"],
        width=width,
        tied=sizes["share_embeddings_and_output_weights"],
        head_norms=sizes.get("qk_layernorm", False),
        qkv_biases=sizes.get("add_qkv_bias", False),
        experts=(
            number,
            sizes["moe_router_topk"],
            sizes["moe_ffn_hidden_size"],
            sizes.get("moe_shared_expert_intermediate_size", 0),
        )
        if number
        else (0, 0, 0, 0),
        # in front of the others
        dense_layers=dense if number else 0,
        latent=(
            sizes["q_lora_rank"], sizes["kv_lora_rank"], sizes["qk_head_dim"],
            sizes["qk_pos_emb_head_dim"], sizes["v_head_dim"],
        )
        if latent
        else None,
    ).model()  # fmt: skip


_LLAMA3 = {"8B": "llama3_8b", "70B": "llama3_70b", "405B": "llama31_405b"}
_LLAMA2 = {"7B": "llama2_7b", "13B": "llama2_13b", "70B": "llama2_70b"}
_QWEN3 = {
    "0.6B": "qwen3_600m", "1.7B": "qwen3_1p7b", "4B": "qwen3_4b", "8B": "qwen3_8b",
    "14B": "qwen3_14b", "32B": "qwen3_32b", "30B-A3B": "qwen3_30b_a3b",
    "235B-A22B": "qwen3_235b_a22b",
}  # fmt: skip
"""Names of `search.launches.architectures`, which has their sizes."""
_DEEPSEEK: Mapping[str, _Entry] = {
    "16B": _Sizes(
        hidden=2048, layers=27, heads=16, groups=16, ffn=10944, vocab=102400, dense_layers=1,
        experts=(64, 6, 1408, 2816), latent=(0, 512, 128, 64, 128),
    ),
    "236B": _Sizes(
        hidden=5120, layers=60, heads=128, groups=128, ffn=12288, vocab=102400, dense_layers=1,
        experts=(160, 6, 1536, 3072), latent=(1536, 512, 128, 64, 128),
    ),
    "671B": "deepseek_v3",
}  # fmt: skip
_LLAMA4: Mapping[str, _Entry] = {
    "17bx16e": _Sizes(
        hidden=5120, layers=48, heads=40, groups=8, ffn=16384, vocab=202048,
        experts=(16, 1, 8192, 8192),
    ),
    "17bx128e": _Sizes(
        hidden=5120, layers=48, heads=40, groups=8, ffn=16384, vocab=202048, every=2,
        experts=(128, 1, 8192, 8192),
    ),
}  # fmt: skip
FLAVOURS: Mapping[str, Mapping[str, _Entry]] = {
    "llama3": {
        **_LLAMA3,
        "debugmodel": _Sizes(hidden=256, layers=6, heads=16, groups=16, ffn=768, vocab=2048),
    },
    "llama2": _LLAMA2,
    "llama4": _LLAMA4,
    "deepseek_v3": _DEEPSEEK,
    "qwen3": _QWEN3,
}
"""Sizes by torchtitan's name of the model and of its flavour."""


def flavour(name: str, size: str) -> Model | None:
    """Return a model by torchtitan's two names, None for one that is not known here.

    Variants with another kernel of attention (`8B_flex`, `17bx16e_irope`) are the same model.
    """
    known = FLAVOURS.get(name, {})
    found = known.get(size) or known.get(re.sub(r"_(flex|varlen|sdpa|flex_attn|irope)$", "", size))
    return None if found is None else _model(found)


# --------------------------------------------------------------------------------------------------
# Names of Hugging Face.


def _plain(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, positions: int, *, tied: bool = True
) -> _Sizes:
    return _Sizes(
        hidden=hidden, layers=layers, heads=heads, groups=heads, ffn=ffn, vocab=vocab,
        positions=positions, tied=tied, plain=True,
    )  # fmt: skip


_REPOSITORIES: Mapping[str, _Entry] = {
    "llama-2-7b": "llama2_7b",
    "llama-2-13b": "llama2_13b",
    "llama-2-70b": "llama2_70b",
    "llama-3-8b": "llama3_8b",
    "llama-3-70b": "llama3_70b",
    "llama-3-405b": "llama31_405b",
    "llama-3.2-1b": "llama32_1b",
    "llama-3.2-3b": "llama32_3b",
    "mistral-7b": "mistral_7b",
    "mixtral-8x7b": "mixtral_8x7b",
    "qwen2.5-7b": "qwen25_7b",
    "qwen2.5-72b": "qwen25_72b",
    **{f"qwen3-{size.lower()}": name for size, name in _QWEN3.items()},
    "gpt2-xl": _plain(1600, 48, 25, 6400, 50257, 1024),
    "opt-1.3b": _plain(2048, 24, 32, 8192, 50272, 2050),
    "opt-6.7b": _plain(4096, 32, 32, 16384, 50272, 2050),
    "opt-13b": _plain(5120, 40, 40, 20480, 50272, 2050),
    "opt-30b": _plain(7168, 48, 56, 28672, 50272, 2050),
    "opt-66b": _plain(9216, 64, 72, 36864, 50272, 2050),
    "bloom-7b1": _plain(4096, 30, 32, 16384, 250880, 0),
    "bloom": _plain(14336, 70, 112, 57344, 250880, 0),
}  # fmt: skip
"""Sizes by the name of a repository without its owner, small letters, and what is tuned of it."""
_TUNED = re.compile(r"-(hf|instruct|chat|base|v0\.[0-9]|it|chat-hf|meta)(?=-|$)")


def model_named(name: str, beside: Path | None = None) -> Model | None:
    """Return a model by a shipped name, that of its repository, or a folder with its config.json.

    beside : the folder that relative names are looked up in. Returns None for one that is not
    known here; raises DocumentError or InputError for a config.json that cannot be used.
    """
    path = Path(name) if beside is None else beside / name
    for config in (path, path / "config.json"):
        if config.suffix == ".json" and config.is_file():
            return model_of_config(load_object(config).data, config)
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    last = _TUNED.sub("", last).replace("llama-3.1-", "llama-3-").replace("llama-3.3-", "llama-3-")
    found = _REPOSITORIES.get(last)
    return _shipped(name) if found is None else _model(found)


def _shipped(name: str) -> Model | None:
    """Return a shipped decoder by its name (`autopar models`), None for another name."""
    if name not in model_names():
        return None
    spec = load_spec(name)
    if any(layer.cross_attention or not layer.causal for layer in spec.layers):
        return None
    return _of_torch(spec)


_ANY_LENGTH = 1


def model_of_config(config: Mapping[str, Any], path: Path) -> Model:
    """Return the model of a config.json of Hugging Face.

    Raises DocumentError for a family that is not known, InputError for one that a launch cannot
    say.
    """
    # a launch says its own length, so the file need not
    return _of_torch(parse_hugging_face(path, config, seq_length=_ANY_LENGTH))


def _of_torch(spec: ModelSpec) -> Model:
    """Return a model as torch trainers build it from its published code."""
    # embeddings have as many rows as there are words, and modules of further tokens are left out
    return replace(launch_model(spec), vocab_divisor=1, mtp=0)
