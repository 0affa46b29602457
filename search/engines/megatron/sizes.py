"""Arguments of Megatron-LM that say what is trained, read as a model."""

from __future__ import annotations

import ast
import re

from autopar.records import shorten
from autopar.run.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    Mlp,
    Model,
    Positions,
    decoder_layers,
)
from search.engines.arguments import LaunchArguments, is_open
from search.engines.megatron.release import Release

_MOST = 4096
"""Layers, and experts, of a model; far above any."""
_VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
}
"""Of tokenizers with one vocabulary in use; GPTSentencePiece's is that of Nemotron's model."""


def model_of(words: LaunchArguments, release: Release) -> Model:
    hidden = words.number("hidden-size")
    gated = words.has("swiglu")
    # what Megatron-LM takes where no width is given: two thirds of 4h for three matrices
    ffn = words.number("ffn-hidden-size", int(8 * hidden / 3) // 64 * 64 if gated else 4 * hidden)
    layers = words.number("num-layers", most=_MOST)
    experts = _experts(words, ffn, gated=gated)
    kind = words.choice(
        "position-embedding-type",
        ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
        "learned_absolute",
    )
    if kind in ("mrope", "relative"):
        raise words.unpriced("position-embedding-type", f"{kind} is not priced", "rope is")
    if words.has("use-rotary-position-embeddings"):
        kind = "rope"
    # the old way to have none
    if words.has("no-position-embedding") and kind == "learned_absolute":
        kind = "none"
    positions: Positions = "rotary"
    if kind in ("learned_absolute", "none"):
        positions = "learned" if kind == "learned_absolute" else "none"
    attention, whole_every = _attention(words, hidden, positions)
    layer = Layer(
        hidden=hidden,
        mixers=(attention,),
        mlp=Mlp(width=ffn, gated=gated),
        norm="rms" if words.text("normalization", "LayerNorm") == "RMSNorm" else "layer",
        biases=not words.has("disable-bias-linear"),
    )
    mixtures = _mixtures(words, layers) if experts else (False,) * layers
    groups, repeat = decoder_layers(layer, mixtures, experts, whole_every)
    return Model(
        layers=groups,
        repeat=repeat,
        vocab=_vocab(words, release),
        vocab_divisor=_vocab_divisor(words),
        tied=not words.has("untie-embeddings-and-output-weights"),
        positions=positions,
        max_positions=words.number("max-position-embeddings", 0),
        mtp=words.number("mtp-num-layers", 0, most=_MOST),
        mtp_shared=words.has("mtp-use-repeated-layer"),
        dropout=words.real("hidden-dropout", 0.1),
    )


def _attention(words: LaunchArguments, hidden: int, positions: Positions) -> tuple[Attention, int]:
    """Return attention, and every how many layers one has no window."""
    heads = words.number("num-attention-heads")
    groups = heads
    if words.has("group-query-attention"):
        groups = words.number("num-query-groups", 1)
    width = value_width = words.number("kv-channels", hidden // heads)
    latent = None
    if words.has("multi-latent-attention"):
        latent = LatentAttention(
            query_rank=words.number("q-lora-rank") if words.has("q-lora-rank") else None,
            kv_rank=words.number("kv-lora-rank"),
            key_width=words.number("qk-head-dim", 128),
            rotary_width=words.number("qk-pos-emb-head-dim", 64),
        )
        width = latent.key_width + latent.rotary_width
        value_width = words.number("v-head-dim", 128)
    window, whole_every = _window(words)
    share = words.real("rotary-percent", 1.0)
    attention = Attention(
        heads=heads,
        kv_heads=groups,
        width=width,
        value_width=value_width,
        window=window,
        rotary_share=share if positions == "rotary" else 0.0,
        head_norms="head" if words.has("qk-layernorm") else "none",
        qkv_biases=words.has("add-qkv-bias") or not words.has("disable-bias-linear"),
        dropout=words.real("attention-dropout", 0.1),
        latent=latent,
    )
    return attention, whole_every


def _window(words: LaunchArguments) -> tuple[int | None, int]:
    """Return the window of attention, None where there is none, and how often a layer has none.

    `--window-size` holds the tokens before a query and behind it; -1 stands for all.
    """
    sizes = words.list("window-size")
    every = words.text("window-attn-skip-freq", "0")
    if not sizes or sizes[0] == "-1":
        return None, 0
    if any(map(is_open, sizes)):
        raise words.unpriced("window-size", f"is {shorten(' '.join(sizes))}", "write the numbers")
    if len(sizes) > 2 or not all(re.fullmatch("-1|[0-9]{1,9}", size) for size in sizes):
        shown = shorten(" ".join(sizes))
        raise words.fail("window-size", f"expected two sizes such as 127,0, got {shown}")
    if not re.fullmatch("[0-9]{1,9}", every):
        raise words.unpriced(
            "window-attn-skip-freq", "is a pattern of its own", "every so-manieth layer is priced"
        )
    # a query sees itself as well
    return int(sizes[0]) + 1, int(every)


def _experts(words: LaunchArguments, ffn: int, *, gated: bool) -> Experts | None:
    if not words.has("num-experts"):
        return None
    return Experts(
        number=words.number("num-experts", most=_MOST),
        per_token=words.number("moe-router-topk", 2),
        width=words.number("moe-ffn-hidden-size", ffn),
        gated=gated,
        shared_width=words.number("moe-shared-expert-intermediate-size", 0),
    )


def _mixtures(words: LaunchArguments, layers: int) -> tuple[bool, ...]:
    """Return for every layer whether it has experts: every Nth, or as a list such as [0]+[1]."""
    text = words.text("moe-layer-freq", "1")
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return tuple(layer % int(text) == 0 for layer in range(layers))
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise words.fail("moe-layer-freq", f"is no list of 0 and 1: {text[:60]}") from None
    if len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise words.fail(
            "moe-layer-freq", f"has {len(pattern)} entries for {layers} layers, of 0 and 1"
        )
    return tuple(map(bool, pattern))


def _pattern(node: ast.expr) -> list[int]:
    """Return the list that sums and repetitions of lists of numbers make; ValueError otherwise."""
    if isinstance(node, ast.List):
        return [_constant(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        times = _constant(node.right)
        if times > _MOST:
            raise ValueError("too many")
        return _pattern(node.left) * times
    raise ValueError("no list")


def _constant(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("no number")


def _vocab(words: LaunchArguments, release: Release) -> int:
    """Return the vocabulary without padding: as given, or that of the tokenizer."""
    kind = words.text("tokenizer-type")
    given = words.has("vocab-size")
    if words.has("padded-vocab-size"):
        return words.number("padded-vocab-size")
    if given:
        # the stand-in tokenizer once added its end of document to the vocabulary
        extra = 1 if kind == "NullTokenizer" and not release.has("given vocabulary") else 0
        return words.number("vocab-size") + extra
    # a vocabulary with merges is GPT-2's, and one without is BERT's
    if kind == "" and words.has("vocab-file") and words.has("merge-file"):
        kind = "GPT2BPETokenizer"
    if kind == "" and words.has("vocab-file"):
        raise words.unpriced(
            "vocab-file",
            "comes without --merge-file, as that of a BERT model",
            "only models of the GPT kind are priced",
        )
    if kind not in _VOCABULARIES:
        raise words.unpriced(
            "vocab-size", "is not given", "add the size of the tokenizer's vocabulary"
        )
    return _VOCABULARIES[kind]


def _vocab_divisor(words: LaunchArguments) -> int:
    divisor = words.number("make-vocab-size-divisible-by", 128)
    # a size that is padded already stays as it is
    return 1 if words.has("padded-vocab-size") else divisor
