"""Architectures that published runs name without giving their sizes.

Figures are those of the models' public configurations. A name that is not listed here needs its
sizes in the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from autopar.run.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LayerGroup,
    Mamba,
    Mlp,
    Model,
)

__all__ = ["decoder", "known_architecture"]


def decoder(
    attention: Attention, *layers: tuple[int, Mlp | Experts], hidden: int, vocab: int, **more: Any
) -> Model:
    """Return a model of one kind of attention; layers : numbers of layers with their MLPs."""
    groups = (
        LayerGroup(count=count, layer=Layer(hidden=hidden, mixers=(attention,), mlp=mlp))
        for count, mlp in layers
        if count
    )
    return Model(layers=tuple(groups), vocab=vocab, vocab_divisor=1, **more)


def _deepseek(
    *,
    layers: int,
    dense: int,
    hidden: int,
    heads: int,
    dense_width: int,
    experts: Experts,
    vocab: int,
    mtp: int = 0,
) -> Model:
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        width=192,
        value_width=128,
        latent=LatentAttention(query_rank=1536, kv_rank=512, key_width=128, rotary_width=64),
    )
    first = (dense, Mlp(width=dense_width, gated=True))
    return decoder(attention, first, (layers - dense, experts), hidden=hidden, vocab=vocab, mtp=mtp)


def _qwen3(*, layers: int, hidden: int, heads: int, width: int) -> Model:
    attention = Attention(heads=heads, kv_heads=4, width=128, value_width=128, head_norms="head")
    experts = Experts(number=128, per_token=8, width=width, gated=True)
    return decoder(attention, (layers, experts), hidden=hidden, vocab=151936)


def _gpt_oss(*, layers: int, experts: int) -> Model:
    # windows of 128 tokens and full attention take turns
    mlp = Experts(number=experts, per_token=4, width=2880, gated=True, clamped=True)
    groups = tuple(
        LayerGroup(
            count=1,
            layer=Layer(
                hidden=2880,
                mixers=(
                    Attention(
                        heads=64, kv_heads=8, width=64, value_width=64, window=window, yarn=True
                    ),
                ),
                mlp=mlp,
                biases=True,
            ),
        )
        for window in (128, None)
    )
    return Model(layers=groups, repeat=layers // 2, vocab=201088, vocab_divisor=1)


def _nemotron(pattern: str, hidden: int, mamba: Mamba, mlp: Experts, mtp: int = 0) -> Model:
    """Return a hybrid whose layers are single mixers: M(amba), E(xperts), * attention."""
    attention = Attention(heads=32, kv_heads=2, width=128, value_width=128, rotary_share=0.0)
    kinds = {
        "M": Layer(hidden=hidden, mixers=(mamba,), mlp=None, norms=1),
        "E": Layer(hidden=hidden, mixers=(), mlp=mlp, norms=1),
        "*": Layer(hidden=hidden, mixers=(attention,), mlp=None, norms=1),
    }
    groups = tuple(LayerGroup(count=1, layer=kinds[letter]) for letter in pattern)
    return Model(layers=groups, vocab=131072, vocab_divisor=1, mtp=mtp)


def _plain(
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, gated: bool
) -> Model:
    width = hidden // heads
    attention = Attention(
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        value_width=width,
        rotary_share=1.0 if gated else 0.0,
    )
    return decoder(attention, (layers, Mlp(width=ffn, gated=gated)), hidden=hidden, vocab=vocab)


def _maverick() -> Model:
    """Return Llama 4 Maverick: dense layers and layers with 128 experts take turns."""
    attention = Attention(heads=40, kv_heads=8, width=128, value_width=128)
    mlps = (
        Mlp(width=16384, gated=True),
        Experts(number=128, per_token=1, width=8192, gated=True, shared_width=8192),
    )
    groups = tuple(
        LayerGroup(count=1, layer=Layer(hidden=5120, mixers=(attention,), mlp=mlp)) for mlp in mlps
    )
    return Model(layers=groups, repeat=24, vocab=202048, vocab_divisor=1)


def _moonlight() -> Model:
    """Return Moonlight 16B-A3B, whose latent attention projects queries directly."""
    attention = Attention(
        heads=16,
        kv_heads=16,
        width=192,
        value_width=128,
        latent=LatentAttention(query_rank=None, kv_rank=512, key_width=128, rotary_width=64),
    )
    experts = Experts(number=64, per_token=6, width=1408, gated=True, shared_width=2816)
    first = (1, Mlp(width=11264, gated=True))
    return decoder(attention, first, (26, experts), hidden=2048, vocab=163840)


_DEEPSEEK_V3_EXPERTS = Experts(
    number=256,
    per_token=8,
    width=2048,
    gated=True,
    shared_width=2048,
    groups=8,
    groups_per_token=4,
)
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_KNOWN: Mapping[str, Model] = {
    "deepseekv3": _deepseek(
        layers=61,
        dense=3,
        hidden=7168,
        heads=128,
        dense_width=18432,
        experts=_DEEPSEEK_V3_EXPERTS,
        vocab=129280,
        mtp=1,
    ),
    "deepseekv2": _deepseek(
        layers=60,
        dense=1,
        hidden=5120,
        heads=128,
        dense_width=12288,
        experts=Experts(number=160, per_token=6, width=1536, gated=True, shared_width=3072),
        vocab=102400,
    ),
    "kimik2": _deepseek(
        layers=61,
        dense=1,
        hidden=7168,
        heads=64,
        dense_width=18432,
        experts=Experts(number=384, per_token=8, width=2048, gated=True, shared_width=2048),
        vocab=163840,
    ),
    "qwen330ba3b": _qwen3(layers=48, hidden=2048, heads=32, width=768),
    "qwen3235ba22b": _qwen3(layers=94, hidden=4096, heads=64, width=1536),
    "gptoss120b": _gpt_oss(layers=36, experts=128),
    "gptoss20b": _gpt_oss(layers=24, experts=32),
    "nemotron3nano": _nemotron(
        _NANO,
        2688,
        Mamba(heads=64, width=64, state=128, groups=8),
        Experts(number=128, per_token=6, width=1856, shared_width=3712),
    ),
    "nemotron3super": _nemotron(
        _SUPER,
        4096,
        Mamba(heads=128, width=64, state=128, groups=8),
        Experts(number=512, per_token=22, width=2688, shared_width=5376, latent=1024),
        mtp=2,
    ),
    "llama4maverick": _maverick(),
    "moonlight16ba3b": _moonlight(),
    "grok1": decoder(
        Attention(heads=48, kv_heads=8, width=128, value_width=128),
        (64, Experts(number=8, per_token=2, width=32768, gated=True)),
        hidden=6144,
        vocab=131072,
    ),
    "gpt39b": _plain(
        layers=48, hidden=8192, ffn=32768, heads=64, kv_heads=64, vocab=51200, gated=False
    ),
    "gpt1t": _plain(
        layers=128, hidden=25600, ffn=102400, heads=160, kv_heads=160, vocab=51200, gated=False
    ),
    "gpt1746b": _plain(
        layers=96, hidden=12288, ffn=49152, heads=96, kv_heads=96, vocab=51200, gated=False
    ),
    "gpt5296b": _plain(
        layers=105, hidden=20480, ffn=81920, heads=128, kv_heads=128, vocab=51200, gated=False
    ),
    "llama38b": _plain(
        layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, gated=True
    ),
    "llama370b": _plain(
        layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, gated=True
    ),
    "qwen257b": _plain(
        layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, vocab=152064, gated=True
    ),
}


def known_architecture(name: str) -> Model | None:
    """Return the architecture of a model's name, whatever its spelling; None for an unknown one."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r"\(.*?\)", "", name.lower()))
    return _KNOWN.get(re.sub(r"(671b|style12layers256expertstop8)$", "", plain))
