"""Model from the arguments of Megatron-LM."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from autopar.errors import shortened
from autopar.records import replace, shorten
from autopar.run.architecture import (
    Attention,
    DeltaNet,
    Experts,
    Indexer,
    LatentAttention,
    Layer,
    LayerGroup,
    Mamba,
    Mlp,
    Model,
    Positions,
    decoder_layers,
    grouped,
    with_attention,
    without_window,
)
from search.engines.arguments import LaunchArguments
from search.engines.megatron.arguments import LayoutError
from search.engines.megatron.release import Release
from search.engines.megatron.stages import PATTERN, LayerPattern, parse_pattern

_MOST = 4096
"""Maximum number of layers, and of experts, of a model; far above any real one."""
_VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "Llama2Tokenizer": 32000,
    "GPTSentencePieceTokenizer": 256000,
}
"""Tokenizer type -> size of the vocabulary in common use; for GPTSentencePiece that of Nemotron."""


def read_pattern(words: LaunchArguments) -> LayerPattern | None:
    """Return the layers of a hybrid model; None for a GPT model.

    Raises DocumentError for an invalid pattern, UnpricedError for layers without a formula.
    """
    if not words.has(PATTERN):
        return None
    text = words.text(PATTERN)
    # Overridden by the number of letters.
    words.has("num-layers")
    depths = words.number("mtp-num-layers", 0, most=_MOST)
    old = "mtp-hybrid-override-pattern"
    if words.has(old) and depths and "/" not in text:
        text = "/".join((text, *[words.text(old)] * depths))
    try:
        found = parse_pattern(text)
    except LayoutError as error:
        raise words.fail(PATTERN, str(error)) from None
    if depths and not found.depths:
        raise words.unpriced("mtp-num-layers", f"has no part in --{PATTERN}", "Add it behind a /")
    if "E" in found.letters + found.mtp and not words.has("num-experts"):
        raise words.missing("num-experts", f"--{PATTERN} has layers E")
    return found


def is_gpt(words: LaunchArguments, pattern: LayerPattern) -> bool:
    """Return True if a pattern has the layers of a GPT model, each of them two letters.

    Windows of every n-th letter and recompute units of an odd number of letters cut such layers.
    """
    number = words.number("recompute-num-layers", 1)
    full = words.open_text("recompute-granularity") == "full"
    cut = words.open_text("window-attn-skip-freq") not in ("", "0") or (full and number % 2)
    return pattern.is_paired and not cut


def model_of(
    words: LaunchArguments, release: Release, pattern: LayerPattern | None = None
) -> Model:
    """Return the model of the arguments.

    pattern : layers of a hybrid model; None: a GPT model.

    Raises DocumentError for an invalid argument, UnpricedError for a size that is not known.
    """
    hidden = words.number("hidden-size")
    gated = words.has("swiglu")
    # Default of Megatron-LM: 4 * hidden, or 8/3 * hidden for a gated MLP with three matrices.
    ffn = words.number("ffn-hidden-size", int(8 * hidden / 3) // 64 * 64 if gated else 4 * hidden)
    experts = _experts(words, ffn, gated=gated)
    kind = words.choice(
        "position-embedding-type",
        ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
        "learned_absolute",
    )
    if kind in ("mrope", "relative"):
        raise words.unpriced("position-embedding-type", f"{kind} is not priced", "Rope is")
    if words.has("use-rotary-position-embeddings"):
        kind = "rope"
    # Flag of earlier releases for a model without position embedding.
    if words.has("no-position-embedding") and kind == "learned_absolute":
        kind = "none"
    positions: Positions = "rotary"
    if kind in ("learned_absolute", "none"):
        positions = "learned" if kind == "learned_absolute" else "none"
    letters = "" if pattern is None else pattern.letters + pattern.mtp
    # `validate_args` sets the flag where the pattern has such layers
    latent = words.has("multi-latent-attention") or not {*"+D"}.isdisjoint(letters)
    attention, whole_every = _attention(
        words, hidden, positions, yarn=kind == "yarn", is_latent=latent
    )
    if _variant(words) == _SPARSE or "D" in letters:
        attention = replace(attention, indexer=_indexer(words, pattern))
    layer = Layer(
        hidden=hidden,
        mixers=(attention,),
        mlp=Mlp(width=ffn, gated=gated),
        norm="rms" if words.text("normalization", "LayerNorm") == "RMSNorm" else "layer",
        biases=not words.has("disable-bias-linear"),
    )
    mtp_block: tuple[Layer, ...] = ()
    mtp = words.number("mtp-num-layers", 0, most=_MOST)
    if pattern is None:
        layers = words.number("num-layers", most=_MOST)
        mixtures = _mixtures(words, layers) if experts else (False,) * layers
        groups, repeat = decoder_layers(layer, mixtures, experts, whole_every)
        linear = _linear_layers(words, layers)
        if any(linear):
            groups, repeat = _with_delta(groups, repeat, linear, _delta(words))
        if attention.indexer is not None and attention.indexer.every > 1:
            groups, repeat = _with_reused(words, groups, repeat, attention)
            # layers of MTP count from 1, so each has an indexer
            last = replace(groups[-1].layer, mixers=(attention,))
            mtp_block = (last,) if mtp and last != groups[-1].layer else ()
    else:
        each, mtp_block = _hybrid_layers(words, pattern, layer, experts, whole_every)
        (groups, repeat), mtp = grouped(each), pattern.depths
    return Model(
        layers=groups,
        repeat=repeat,
        vocab=_vocab(words, release),
        vocab_divisor=_vocab_divisor(words),
        tied=not words.has("untie-embeddings-and-output-weights"),
        positions=positions,
        max_positions=words.number("max-position-embeddings", 0),
        mtp=mtp,
        mtp_block=mtp_block,
        mtp_shared=words.has("mtp-use-repeated-layer"),
        dropout=words.real("hidden-dropout", 0.1, most=1.0),
    )


def _hybrid_layers(
    words: LaunchArguments,
    pattern: LayerPattern,
    layer: Layer,
    experts: Experts | None,
    whole_every: int,
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return (layers of a hybrid model, layers of one MTP layer; empty if like the last layer).

    layer : layer with attention, its window included, and a dense MLP.
    whole_every : n if every n-th layer has full attention; 0: none.
    """
    paired = is_gpt(words, pattern)
    used = pattern.letters + pattern.mtp
    mixers = {
        "M": _mamba(words, layer.hidden) if "M" in used else None,
        "G": _delta(words) if "G" in used else None,
    }

    def single(letter: str, place: int) -> Layer:
        if letter in "-E":
            mlp = experts if letter == "E" else layer.mlp
            return replace(layer, mixers=(), mlp=mlp, norms=1)
        if (mixer := mixers.get(letter)) is not None:
            return replace(layer, mixers=(mixer,), mlp=None, norms=1)
        whole = whole_every and (place + 1) % whole_every == 0
        own = without_window(layer) if whole else layer
        if letter == "+" and (latent := own.attention) is not None:
            own = with_attention(own, replace(latent, indexer=None))
        return replace(own, mlp=None, norms=1)

    def each(letters: str) -> tuple[Layer, ...]:
        if paired:
            return tuple(
                replace(single(mixer, 0), mlp=single(mlp, 0).mlp, norms=2)
                for mixer, mlp in zip(letters[::2], letters[1::2], strict=True)
            )
        return tuple(single(letter, place) for place, letter in enumerate(letters))

    own, further = each(pattern.letters), each(pattern.mtp)
    return own, () if further == own[-1:] else further


def _mamba(words: LaunchArguments, hidden: int) -> Mamba:
    width = words.number("mamba-head-dim", 64)
    return Mamba(
        heads=words.number("mamba-num-heads", 2 * hidden // width),
        width=width,
        state=words.number("mamba-state-dim", 128),
        groups=words.number("mamba-num-groups", 8),
    )


def _delta(words: LaunchArguments) -> DeltaNet:
    if words.has("deterministic-mode"):
        raise words.unpriced(
            "deterministic-mode", "runs gated delta nets in a loop over chunks", "Remove it"
        )
    return DeltaNet(
        key_heads=words.number("linear-num-key-heads", 16),
        value_heads=words.number("linear-num-value-heads", 32),
        key_width=words.number("linear-key-head-dim", 128),
        value_width=words.number("linear-value-head-dim", 128),
        kernel=words.number("linear-conv-kernel-dim", 4),
    )


def _indexer(words: LaunchArguments, pattern: LayerPattern | None) -> Indexer:
    """Return the indexer of sparse attention, for its layers that have one.

    Raises UnpricedError for other kernels than cuDNN's, a loss over all keys, and keys that layers
    of a pattern share.
    """
    if not words.has("multi-latent-attention") and pattern is None:
        raise words.missing("multi-latent-attention", f"--{_VARIANTS[0]} is {_SPARSE}")
    if (kernels := words.text("dsa-kernel-backend", "none")) != "cudnn":
        raise words.unpriced(
            "dsa-kernel-backend", f"{kernels} is not priced for sparse attention", "Use cudnn"
        )
    if words.open_text("attention-backend") == "unfused":
        raise words.unpriced(
            "attention-backend", "unfused is not priced with sparse attention", "Use fused"
        )
    for flag in ("fp8-format", "fp4-format"):
        if words.has(flag) and words.text(flag) != "1":
            raise words.unpriced(flag, "is not priced with sparse attention", "Remove it")
    loss = words.real("dsa-indexer-loss-coeff", 0.0)
    if loss and not words.has("dsa-indexer-use-sparse-loss"):
        raise words.unpriced(
            "dsa-indexer-loss-coeff", "is a loss over all keys", "Add --dsa-indexer-use-sparse-loss"
        )
    every = words.number(_EVERY, 1)
    if every > 1 and pattern is not None:
        raise words.unpriced(_EVERY, f"is not priced with --{PATTERN}", "Use pretrain_gpt.py")
    return Indexer(
        heads=words.number("dsa-indexer-n-heads"),
        width=words.number("dsa-indexer-head-dim"),
        topk=words.number("dsa-indexer-topk"),
        every=every,
        trained=loss > 0,
    )


_EVERY = "dsa-indexer-topk-freq"


def _with_reused(
    words: LaunchArguments, groups: tuple[LayerGroup, ...], repeat: int, attention: Attention
) -> tuple[tuple[LayerGroup, ...], int]:
    """Return the groups of a decoder whose layers without a choice of keys reuse the last one."""
    layers = [one.layer for one in groups for _ in range(one.count)] * repeat
    assert attention.indexer is not None, "asked of sparse attention alone"
    every = attention.indexer.every
    reused = replace(attention, indexer=replace(attention.indexer, reused=True))
    # layers are counted from 1; those up to the offset choose (`is_dsa_skip_topk_layer` of dsa.py)
    offset = max(1, int(words.real("dsa-indexer-skip-topk-offset", 0)))
    return grouped(
        tuple(
            with_attention(one, reused) if max(0, place - offset) % every else one
            for place, one in enumerate(layers, 1)
        )
    )


_DELTA_NETS = ("gdn", "gated_delta_net")
"""Names of the gated delta net; the second is the older one."""
_SPARSE = "dsa"


def _variant(words: LaunchArguments) -> str | None:
    """Return the kind of attention that a flag selects; None without one.

    Raises UnpricedError for kinds other than gated delta nets and sparse attention.
    """
    flag = next((one for one in _VARIANTS if words.has(one)), None)
    kind = None if flag is None else words.text(flag)
    if flag is not None and kind is not None and kind not in (*_DELTA_NETS, _SPARSE):
        raise words.unpriced(flag, f"{shorten(kind)} is not priced", "Only gdn and dsa are priced")
    return kind


def _linear_layers(words: LaunchArguments, layers: int) -> tuple[bool, ...]:
    """Return a boolean for each layer of a GPT model, True for a gated delta net."""
    kind = _variant(words)
    if kind not in _DELTA_NETS:
        return (False,) * layers
    if not words.has("linear-attention-freq"):
        raise words.missing("linear-attention-freq", f"{kind} is chosen")
    # N is N - 1 gated delta nets, then attention
    return _layer_list(words, "linear-attention-freq", layers, lambda place, n: (place + 1) % n > 0)


def _with_delta(
    groups: tuple[LayerGroup, ...], repeat: int, linear: tuple[bool, ...], delta: DeltaNet
) -> tuple[tuple[LayerGroup, ...], int]:
    """Return the groups of a decoder with gated delta nets in place of attention where `linear`."""
    layers = [one.layer for one in groups for _ in range(one.count)] * repeat
    pairs = zip(layers, linear, strict=True)
    return grouped(tuple(replace(one, mixers=(delta,)) if own else one for one, own in pairs))


_VARIANTS = ("experimental-attention-variant", "linear-attention-type")


def _attention(
    words: LaunchArguments, hidden: int, positions: Positions, *, yarn: bool, is_latent: bool
) -> tuple[Attention, int]:
    """Return (attention, n if every n-th layer has full attention, else 0)."""
    heads = words.number("num-attention-heads")
    groups = heads
    if words.has("group-query-attention"):
        groups = words.number("num-query-groups", 1)
    width = value_width = words.number("kv-channels", hidden // heads)
    latent = None
    if is_latent:
        latent = LatentAttention(
            query_rank=words.number("q-lora-rank") if words.has("q-lora-rank") else None,
            kv_rank=words.number("kv-lora-rank"),
            key_width=words.number("qk-head-dim", 128),
            rotary_width=words.number("qk-pos-emb-head-dim", 64),
        )
        width = latent.key_width + latent.rotary_width
        value_width = words.number("v-head-dim", 128)
    window, whole_every = _window(words)
    share = words.real("rotary-percent", 1.0, most=1.0)
    attention = Attention(
        heads=heads,
        kv_heads=groups,
        width=width,
        value_width=value_width,
        window=window,
        rotary_share=share if positions == "rotary" else 0.0,
        yarn=yarn and latent is None,
        head_norms="head" if words.has("qk-layernorm") else "none",
        qkv_biases=words.has("add-qkv-bias") or not words.has("disable-bias-linear"),
        dropout=words.real("attention-dropout", 0.1, most=1.0),
        latent=latent,
        gated=words.has("attention-output-gate"),
    )
    return attention, whole_every


def _window(words: LaunchArguments) -> tuple[int | None, int]:
    """Return (attention window in tokens, n if every n-th layer has full attention, else 0).

    The window includes the token of the query; None: full attention in all layers. `--window-size`
    contains the number of tokens before and after a query; -1 means all.

    Raises UnpricedError for shell variables and for a list of layers, DocumentError for other
    values.
    """
    sizes = words.list("window-size")
    every = words.text("window-attn-skip-freq", "0")
    if not sizes or sizes[0] == "-1":
        return None, 0
    if len(sizes) > 2 or not all(re.fullmatch("-1|[0-9]{1,9}", size) for size in sizes):
        shown = shorten(" ".join(sizes))
        raise words.fail("window-size", f"expected two sizes such as 127,0, got {shown}")
    if not re.fullmatch("[0-9]{1,9}", every):
        raise words.unpriced("window-attn-skip-freq", "is a custom pattern", "Use every n-th layer")
    # `--window-size` does not count the token of the query.
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
        latent=words.number("moe-latent-size") if words.has("moe-latent-size") else None,
        clamped=words.has("activation-func-clamp-value"),
        groups=(groups := words.number("moe-router-num-groups", 1)),
        groups_per_token=min(words.number("moe-router-group-topk", groups), groups),
    )


def _mixtures(words: LaunchArguments, layers: int) -> tuple[bool, ...]:
    """Return a boolean for each layer, True if it has experts, from `--moe-layer-freq`.

    The argument is N for every Nth layer, or a list expression such as [0]*3+[1]*58.

    Raises DocumentError for other arguments and for a list of another length.
    """
    return _layer_list(words, "moe-layer-freq", layers, lambda place, n: place % n == 0)


def _layer_list(
    words: LaunchArguments, flag: str, layers: int, every: Callable[[int, int], bool]
) -> tuple[bool, ...]:
    """Return a boolean for each layer, from a list expression or from a number n.

    every : True for the layers, counted from 0, that a number n selects.
    """
    text = words.text(flag, "1")
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
        return tuple(every(layer, int(text)) for layer in range(layers))
    try:
        pattern = _pattern(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise words.fail(flag, f"expected a list of 0 and 1, got {shortened(text)}") from None
    if len(pattern) != layers or not set(pattern) <= {0, 1}:
        raise words.fail(flag, f"expected {layers} entries of 0 and 1, got {len(pattern)}")
    return tuple(map(bool, pattern))


def _pattern(node: ast.expr) -> list[int]:
    """Return the list of a syntax tree of lists, + and *; raises ValueError for other nodes."""
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
    """Return the vocabulary size before padding, from the arguments or the tokenizer type.

    With `--padded-vocab-size`, it is the padded size; `_vocab_divisor` is 1 then. Raises
    UnpricedError if the size is unknown.
    """
    kind = words.open_text("tokenizer-type")
    given = words.has("vocab-size")
    if words.has("padded-vocab-size"):
        return words.number("padded-vocab-size")
    if given:
        # `NullTokenizer` of older releases adds an end-of-document token to the vocabulary.
        extra = 1 if kind == "NullTokenizer" and not release.has("given vocabulary") else 0
        return words.number("vocab-size") + extra
    # A vocabulary file with merges is that of GPT-2; one without is that of BERT.
    if kind == "" and words.has("vocab-file") and words.has("merge-file"):
        kind = "GPT2BPETokenizer"
    if kind == "" and words.has("vocab-file"):
        raise words.unpriced(
            "vocab-file",
            "is given without --merge-file, as for a BERT model",
            "Only GPT models are priced",
        )
    if kind not in _VOCABULARIES:
        raise words.unpriced(
            "vocab-size", "is not given", "Add the tokenizer's vocabulary size to the script"
        )
    return _VOCABULARIES[kind]


def _vocab_divisor(words: LaunchArguments) -> int:
    divisor = words.number("make-vocab-size-divisible-by", 128)
    # A size that is already padded is not padded again.
    return 1 if words.has("padded-vocab-size") else divisor
