"""ModelProfile from a spec and a card: memory and times counted from the architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autopar.documents import catalog
from autopar.errors import InputError
from autopar.plausible import doubtful_rate, notes_of
from autopar.rates.measured import HardwareProfile
from autopar.records import replace
from autopar.run.model import (
    LatentSpec,
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    ShardedTime,
    TimePoint,
    attention_weights,
    embedding_parameter_counts,
    head_dim,
    layer_norms,
    padded_vocab_size,
    parameter_count,
)
from autopar.run.plan import tensor_degrees
from autopar.sources import Source
from autopar.units import MS

if TYPE_CHECKING:
    from autopar.rates.card import Card
    from autopar.rates.site import Site

# --------------------------------------------------------------------------------------------------
# What layers and vocabulary keep until their backward, by the operations that keep it.
#
# Activations are what autograd keeps of one sample, in Megatron's partitioning (Korthikanti et al.
# 2022, arXiv 2205.05198, section 4) with flash attention and no dropout. With S tokens, h hidden,
# a heads and k key-value heads of width d, f MLP width, e bytes per element, per sample:
#
#     around the tensor-parallel blocks, n = 2 norms (3 with cross-attention):
#         X = n * S*h*(e + e)             norm input and output (= input of the next linears)
#         r = n * S*4                     fp32 statistics of a norm (twice for LayerNorm)
#     inside them:
#         A = S*a*d*e + 2*S*kv*e + S*a*d*e + 4*S*a    q, k+v, attention output, log-sum-exp
#         M = 2*S*f*e (GELU, ReLU) or 4*S*f*e (gated: gate, up, their activation, product)
#     sequence parallelism at degree t: (X + r + A + M) / t;  without: X + r + (A + M) / t
#     k+v: kv = k*d heads / t, but at least one head per rank: max(k, t)*d / t.
#
# A mixture of E experts, of which a token visits c evenly, without dropping tokens: M becomes c*M,
# and the tokens in the order of their experts, which every rank needs whole, add to it:
#         P = c*S*h*e                     input of the experts, not divided by t
#         R = (28 + e)*c*S                weights of the chosen in fp32, again in order, int64
#                                         indices of experts, tokens and places
#         O = c*S*h*e (eager: twice)      output of the experts; eager keeps it weighted as well
#     R and O belong to the tokens of a rank, as X does. All experts are on every rank, 1/t of each.
# The MLP that all tokens visit adds an M of its width, and its gate S*h*e + 2*S*e around it.
#
# Norms of queries and keys keep what they read and 4 bytes of each of its heads. Latent attention
# (DeepSeek-V2, arXiv 2405.04434, section 2.1) of ranks q and r, and heads that are n wide without
# positions, p wide with them and v wide in their values, keeps
#         L = S*(q + r + p)*e + S*(q + r)*e + 8*S     latents, these normed, a number of each norm
#         A = S*a*(2*(n + p) + v)*e + S*a*v*e + 4*S*a  q, k and v of all heads, output, log-sum-exp
#     where L belongs to the tokens of a rank, as X does. A window changes none of it.
#
# `kernels="fused"` is exactly that. `kernels="eager"` adds what unfused code of today's runtimes
# keeps beside it: the sequence-first copy of the attention output (S*a*d*e); with RMSNorm the fp32
# input and the normalised value instead of the input alone (n * S*h*4); with rotary positions (no
# learned ones, gated MLP) the fused qkv buffer that the value is a view of, beside the rotated q
# and k (S*a*d*e + S*k*d*e).


Kernels = Literal["eager", "fused"]
STATE_BYTES_PER_PARAMETER = 16
"""Weights, gradients and Adam's fp32 weights and moments: 2 + 2 + 12, or 4 + 4 + 8 for fp32."""
_LOGIT_BYTES = 4


def activation_bytes(
    layer: LayerSpec,
    seq_length: int,
    degree: int,
    *,
    element_bytes: int = 2,
    sequence_parallel: bool = True,
    kernels: Kernels = "eager",
    memory_seq_length: int | None = None,
) -> float:
    """Return the bytes one layer keeps per sample at a tensor degree (formula: above).

    `memory_seq_length` is the length of the sequence that cross-attention reads.
    """
    if kernels not in ("eager", "fused"):
        raise InputError(f"kernels must be 'eager' or 'fused', got {kernels!r}")
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    s, e, h = seq_length, element_bytes, layer.hidden_size
    heads, width = layer.num_heads, head_dim(layer)
    kv_heads = layer.num_kv_heads or heads
    kv_share = max(kv_heads, degree) * width / degree  # at least one head on every rank
    num_norms = layer_norms(layer)
    layer_norm = layer.norm_parameters_per_hidden == 2 * num_norms
    eager = kernels == "eager"

    # 4 bytes a token: fp32 mean and deviation of a LayerNorm, one number of an RMSNorm
    around = num_norms * (s * h * e + 4.0 * s * (2 if layer_norm else 1))
    # products read what norms in front of them put out; behind them nothing keeps it
    around += min(num_norms, 3 if layer.cross_attention else 2) * s * h * e
    # RMSNorm in steps keeps its input in fp32 beside the normalised value
    if eager and not layer_norm:
        around += num_norms * 4.0 * s * h
    query = s * heads * width * e / degree
    logsumexp = 4.0 * s * heads / degree
    inside, latents = 0.0, 0.0
    lengths = [s] + ([memory_seq_length or s] if layer.cross_attention else [])
    if layer.latent is not None:
        inside, latents = _latent_bytes(layer, layer.latent, s, degree, e, eager=eager)
        around, lengths = around + latents, []
    for index, kv_length in enumerate(lengths):
        # q and the attention output are of the same width, k and v of the other
        inside += 2 * query + 2.0 * kv_length * kv_share * e + logsumexp
        if layer.qk_norms:
            # what their norms read; in steps it is kept in fp32 besides, as around the blocks
            elements = s * heads * width / degree + kv_length * kv_share
            inside += elements * (e + (4 if eager else 0))
            # a number of each row: of a head, or of all heads together
            rows = s * heads / degree + kv_length * kv_share / width
            inside += 4.0 * (s + kv_length if layer.wide_qk_norms else rows)
        if eager:
            # the sequence-first copy of the output
            inside += query
            # rotary positions turn q and k of self-attention; v is a view of the fused qkv
            if index == 0 and layer.gated_mlp:
                inside += query + s * kv_share * e
    mlp = (4.0 if layer.gated_mlp else 2.0) * s * layer.ffn_hidden_size * e / degree
    if layer.num_experts is None:
        inside += mlp
    else:
        visited = layer.experts_per_token or layer.num_experts
        # the experts' input is whole on every rank, so not over the degree
        inside += visited * (mlp + s * h * e)
        if layer.shared_expert_width:
            inside += mlp / layer.ffn_hidden_size * layer.shared_expert_width
        if layer.shared_expert_gate:
            # the product of gate and output keeps both, the gate's own function what it puts out
            around += s * h * e + 2.0 * s * e
        # the router's best are taken before the softmax, whose other values nothing keeps
        around += (28.0 + e) * s * visited
        around += (2 if eager else 1) * visited * s * h * e
    # sequence parallelism splits what lies around the blocks; without it every rank has all of it
    return around / (degree if sequence_parallel else 1) + inside


def _latent_bytes(
    layer: LayerSpec, latent: LatentSpec, s: int, degree: int, e: int, *, eager: bool
) -> tuple[float, float]:
    """Return what latent attention keeps of its heads, and of its latents (formula: above)."""
    heads = (layer.num_heads or 0) / degree
    query, rank = latent.query_rank or 0, latent.key_value_rank
    value, both = latent.value_width, 2.0 * (latent.key_width + latent.rotary_width)
    # eager: the sequence-first copy of the output, and queries before they are turned
    copies = value + both / 2 if eager else 0
    inside = s * heads * ((both + 2.0 * value + copies) * e + 4.0)
    narrow = float(s * (query + rank + latent.rotary_width) * e)
    if layer.qk_norms:
        norms = 1 + (latent.query_rank is not None)
        narrow += s * (query + rank) * (e + (4 if eager else 0)) + 4.0 * s * norms
    return inside, narrow


def checkpoint_bytes(layer: LayerSpec, seq_length: int, element_bytes: int = 2) -> float:
    """Return the bytes a checkpointed layer keeps per sample, unsharded: its input, S*h*e."""
    return float(seq_length * layer.hidden_size * element_bytes)


def other_memory(
    spec: ModelSpec,
    seq_lengths: tuple[int, ...],
    degrees: tuple[int, ...],
    *,
    element_bytes: int = 2,
    sequence_parallel: bool = True,
    kernels: Kernels = "eager",
) -> dict[str, OtherMemory]:
    """Return memory of embedding, head and loss by position and vocabulary degree v.

    States: 16 bytes x (padded_vocab*h / v for each table, the rest whole); tied weights are one
    table on the only stage and one each on the first and the last. Activations per sample: first,
    the token numbers (8*S); last, final norm (input and output, /v with sequence parallelism) and
    4 bytes per logit / v; the loss needs `logits_peak_bytes` more while it runs.
    """
    first, last = spec.layers[0], spec.layers[-1]
    s_last = seq_lengths[-1]
    layer_norm = last.norm_parameters_per_hidden >= 2 * layer_norms(last)
    norm = s_last * last.hidden_size * (2 * element_bytes + (4 if kernels == "eager" else 0))
    if layer_norm:
        norm = s_last * last.hidden_size * 2 * element_bytes
    states: dict[str, dict[int, float]] = {"only": {}, "first": {}, "last": {}}
    kept: dict[str, dict[int, float]] = {"only": {}, "first": {}, "last": {}}
    # 0 rows of vocabulary leave what is never split by it
    embedding_rest, head_rest = embedding_parameter_counts(spec, 0)
    # token numbers are int64
    tokens = 8.0 * sum(seq_lengths)
    for v in degrees:
        vocab = padded_vocab_size(spec, v)
        embedding = vocab / v * first.hidden_size + embedding_rest
        head = vocab / v * last.hidden_size + head_rest
        # the only stage has a tied table once; first and last stage need a copy each
        shared = vocab / v * first.hidden_size if spec.tied_embeddings else 0.0
        loss = norm / (v if sequence_parallel else 1) + _LOGIT_BYTES * s_last * vocab / v
        states["only"][v] = STATE_BYTES_PER_PARAMETER * (embedding + head - shared)
        states["first"][v] = STATE_BYTES_PER_PARAMETER * embedding
        states["last"][v] = STATE_BYTES_PER_PARAMETER * head
        kept["only"][v], kept["first"][v], kept["last"][v] = tokens + loss, tokens, loss
    return {
        position: OtherMemory(
            model_state_bytes=states[position], activation_bytes_per_sample=kept[position]
        )
        for position in states
    }


def logits_peak_bytes(spec: ModelSpec, seq_length: int) -> float:
    """Return the extra bytes per sample while the loss runs: 4 more per logit (8 at the peak)."""
    return float(_LOGIT_BYTES * seq_length * padded_vocab_size(spec))


# --------------------------------------------------------------------------------------------------
# Memory that a layer needs for a moment above what it keeps, while its backward runs.
#
# A formula for each moment that can be the peak: what is alive then, less what is gone by then. In
# units of X = S*h*e of one sample, with F = f/h (n*F: twice that for gated MLPs), A = a*d/h and
# K = k*d/h (at least one head on every rank), for t ranks:
#
#     MLP         1 + n*F             incoming gradient, gradients of the MLP's inner values
#     row linear  1 + (1 + F)/t       sp: the gathered gradient, beside incoming and inner one
#     attention   1 + 2*A + 2*K - M   gradients of output, q, k and v; the MLP's M = 2 + 2*F (gated:
#                                     2 + 4*F), norm included, are gone
#     least       2                   a gradient in and one out; tp: both whole on every rank
#
# Inside the tensor-parallel region terms are over t; outside they are over t with sp and Ulysses.
# A mixture, whose tokens visit c experts:
#
#     experts     1 + c*n*F           gated: c less, as outputs of the experts are gone
#     routing     1 + 3*c             outputs, their gradients, weighted ones; tp: whole on every
#                                     rank; sp: 2*c + c/t, or c + (1 + c*F - c)/t
#     attention   as above            M has c*(2 + 2*F) (gated: c*(2 + 4*F)) for its MLP
#
#     shared      1/t more            of what is not over t with sp: the gradient of an MLP that all
#                                     tokens visit waits for that of the experts
#
# Norms behind attention and MLP: their inputs are gone, one in the line of the MLP and two in that
# of attention, with 4 bytes a token (LayerNorm: 8) each.
#
# and the weights of the visits, 2*c*S bytes (sp: 4*c*S/t, Ulysses: 2*c*S/t). Every rule is at least
# what `profile-model --source exact` counts of the built-in layers, and equal to it for the models
# that are shipped, but for 1 % of a mixture's.


ShardKind = Literal["sp", "tp", "ulysses"]
"""Tensor parallelism with and without sequence parallelism, Ulysses; all the same at degree 1."""

_UNKNOWN_SHARE = 0.5
"""Of what a layer keeps. Gated MLPs keep at least 4*F and their gradients take 2*F, plain ones
2*F and F; with the incoming gradient no shipped dense layer is above 0.43 at degree 1."""


def backward_bytes(
    layer: LayerSpec,
    seq_length: int,
    degree: int,
    kind: ShardKind,
    kept_bytes: float,
    *,
    element_bytes: float = 2.0,
) -> float:
    """Return the bytes above `kept_bytes` that one sample's backward needs on a rank.

    kept_bytes : what the layer keeps per sample on that rank. It is used only where heads or MLP
    width are unknown: half of it, and at degrees above 1 one whole activation more.
    """
    unit = float(seq_length) * layer.hidden_size * element_bytes
    # a mixture that does not say how many: a token visits all experts
    visited = float(layer.experts_per_token or layer.num_experts or 0)
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        return _UNKNOWN_SHARE * kept_bytes + unit * (2.0 * visited + (degree > 1))
    t, h = float(degree), float(layer.hidden_size)
    inner = layer.ffn_hidden_size / h
    # n*F of the table above: gate and up each have a gradient
    gradients = (2.0 if layer.gated_mlp else 1.0) * inner
    width = head_dim(layer)
    # at least one key-value head on every rank
    key_value = max(layer.num_kv_heads or layer.num_heads, degree) * width / h
    # gradients of output and q are 2*A wide, those of k and v 2*K
    attention = 2.0 * layer.num_heads * width / h + 2.0 * key_value
    if layer.latent is not None:
        # of all heads: q and k of their width, v and the output of that of values
        attention = 2.0 * layer.num_heads * (width + layer.latent.value_width) / h
    if visited:
        weights = {"sp": 4.0 / t, "tp": 2.0, "ulysses": 2.0 / t}[kind] * visited * seq_length
        # of every visited expert 2 + 2*n*F is gone by then
        attention -= 2.0 * visited * (gradients + 1.0)
        return unit * _mixture(layer, visited, t, kind, inner, gradients, attention) + weights
    # M = 2 + 2*n*F is gone; its 2 turns the 1 of the table into the - 1 of the lines below
    attention -= 2.0 * gradients
    # a norm behind the MLP, and then that behind attention, have let their inputs go
    behind = 0.0
    if layer_norms(layer) > 3:
        statistics = 8 if layer.norm_parameters_per_hidden > layer_norms(layer) else 4
        behind = 1.0 + statistics / (h * element_bytes)
    if kind == "tp":
        # without sp what lies outside the tensor-parallel region is whole on every rank
        mlp = 1.0 + gradients / t - behind
        return unit * max(mlp, 2.0, attention / t - 1.0 - 2.0 * behind)
    moments = [1.0 + gradients - behind, 2.0, attention - 1.0 - 2.0 * behind]
    moments = [moment / t for moment in moments]
    if kind == "sp" and degree > 1:
        # in front of the row-parallel product sp gathers a whole gradient on every rank
        moments.append(1.0 + max(1.0 + inner, 2.0) / t)
    return unit * max(moments)


def _mixture(
    layer: LayerSpec,
    visited: float,
    t: float,
    kind: ShardKind,
    inner: float,
    gradients: float,
    attention: float,
) -> float:
    """Return the peak of a mixture of experts in units of one activation, its weights left out."""
    # with gates the outputs of the experts are gone when their gradients arrive
    gone = visited if layer.gated_mlp else 0.0
    if kind == "tp":
        return max(1.0 + visited * gradients / t - gone, 1.0 + 3.0 * visited, attention / t - 1.0)
    moments = [
        (1.0 + visited * gradients - gone) / t,
        (1.0 + 3.0 * visited) / t,
        (attention - 1.0) / t,
    ]
    if kind == "sp" and t > 1.0:
        # the gradient of what all tokens visit waits for that of the experts
        waiting = 1.0 / t if layer.shared_expert_width else 0.0
        # sp: tokens sorted by expert are whole on every rank while they are routed
        moments.append(2.0 * visited + visited / t + waiting)
        moments.append(visited + (1.0 + visited * inner - visited) / t + waiting)
    return max(moments)


# --------------------------------------------------------------------------------------------------
# Whether measured forwards are possible.


def check_rates(
    profile: ModelProfile, spec: ModelSpec, hardware: HardwareProfile
) -> tuple[str, ...]:
    """Return a note where measured forwards are faster than the device computes.

    The device is that of the hardware's name, where it is of a card; else the fastest card.

    Raises
    ------
    DocumentError: one is faster than twice the device's peak.
    """
    from autopar.rates.card import load_card

    cards = [load_card(name) for name in catalog.card_names()]
    named = [card for card in cards if hardware.name.startswith(f"{card.name}_")]
    # matrices of fp32 may be multiplied in TF32, at half the rate of bf16
    tf32 = 0.5 if profile.precision == "fp32" else 0.0
    peaks = {
        card.name: max(card.flop_per_s[profile.precision], tf32 * card.flop_per_s["bf16"])
        for card in named or cards
    }
    card = max(named or cards, key=lambda card: peaks[card.name])
    peak = peaks[card.name]
    device = f"{card.name}" + ("" if named else ", the fastest device that is known,")
    doubts = []
    lengths = [layer.seq_length for layer in spec.layers]
    for kind, (layer, measured) in enumerate(zip(spec.layers, profile.layers, strict=True)):
        if layer.num_heads is None or layer.ffn_hidden_size is None:
            continue
        for p in measured.times:
            flop = p.batch * layer_flop(layer, p.seq_length, lengths[0])
            key = f"layertype_{kind}_bsz{p.batch}_seq{p.seq_length}"
            value = f"{p.forward_s / p.batch / MS:.4g} ms per sample"
            doubt = doubtful_rate(key, value, flop / p.forward_s, peak, device)
            doubts += [] if doubt is None else [doubt]
    return notes_of(Path(profile.sources[0].path), doubts)


def layer_flop(layer: LayerSpec, seq_length: int, memory_seq_length: int) -> float:
    """Return the FLOP of one sample's forward: matrices, and scores, of which masks hide half.

    `memory_seq_length` is the length of the sequence that cross-attention reads. Raises InputError.
    """
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    h, width = layer.hidden_size, head_dim(layer)
    query = value = layer.num_heads * width
    key_value = 2 * (layer.num_kv_heads or layer.num_heads) * width
    # a token visits so many MLPs, each of two or three matrices, and asks a router for them
    visited = layer.experts_per_token or layer.num_experts or 1
    mlps = visited * layer.ffn_hidden_size + layer.shared_expert_width
    weights = h * ((3 if layer.gated_mlp else 2) * mlps + (layer.num_experts or 0))
    if layer.latent is None:
        weights += h * (2 * query + key_value)
    else:
        value = layer.num_heads * layer.latent.value_width
        weights += attention_weights(replace(layer, qk_norms=False, attention_sinks=False))
    flop = 2.0 * seq_length * weights
    # two products of all pairs
    flop += 2.0 * (query + value) * _pairs(layer, seq_length)
    if layer.cross_attention:
        flop += 2.0 * h * (2 * seq_length * query + memory_seq_length * key_value)
        flop += 4.0 * seq_length * memory_seq_length * query
    return flop


def _pairs(layer: LayerSpec, seq_length: int) -> float:
    """Return the pairs of a query and a key that it sees, the mean of a type's layers."""
    every = seq_length * seq_length * (0.5 if layer.causal else 1.0)
    if layer.window is None or layer.window >= seq_length:
        return every
    # the first queries see fewer, and so do the last ones where there is no order
    narrow = layer.window * (seq_length - layer.window / 2.0) * (1.0 if layer.causal else 2.0)
    number = layer.num_layers
    whole = number // layer.whole_every if layer.whole_every else 0
    return (whole * every + (number - whole) * min(narrow, every)) / number


def _check_precision(card: Card, precision: str) -> None:
    if precision not in card.flop_per_s:
        raise InputError(f"precision must be bf16, fp16 or fp32, got {precision!r}")


def _element_bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2


# --------------------------------------------------------------------------------------------------
# A whole profile: layer times, vocabulary times, memory tables.


VOCAB_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Degrees of embedding and head: the vocabulary is padded, so heads need not be divisible."""


STACKS: dict[Kernels, str] = {"eager": "torchtitan-eager", "fused": "megatron-core"}
"""Whose times are estimated where only what kernels keep is said."""


def estimate_model(
    spec: ModelSpec,
    card: str,
    *,
    precision: str = "bf16",
    sequence_parallel: bool = True,
    seq_lengths: Sequence[int] | None = None,
    batches: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    kernels: Kernels = "eager",
    stack: str | None = None,
    site: Site | None = None,
) -> ModelProfile:
    """Return the estimated profile of a model on one device of a card.

    `seq_lengths` are applied to all layer types; the default is every type's own length. `stack`
    names the trainer whose kernels and host code are priced, and what its layers keep; without it
    `kernels` says whether those are PyTorch's own or fused. What a `site` knows replaces the card's
    figures. Raises InputError.
    """
    from autopar.rates.card import load_card  # the planner needs the counts alone
    from autopar.rates.parts.operations import machine_of
    from autopar.rates.profile import cells_job, layer_cells, mean_cells, other_cells
    from autopar.rates.stack import load_stack
    from autopar.run.job import blocks_of, type_blocks

    device = load_card(card)
    _check_precision(device, precision)
    if not batches or min(batches) < 1 or (seq_lengths and min(seq_lengths) < 1):
        raise InputError("batches and sequence lengths must be whole numbers from 1")
    trainer = load_stack(stack or STACKS[kernels])
    kept = trainer.figures.activations if stack else kernels
    machine = machine_of(device, trainer, site)
    element = _element_bytes(precision)
    own = tuple(layer.seq_length for layer in spec.layers)
    # lengths that are asked for hold for all layer types; else every type has its own
    cases = [tuple(s for _ in spec.layers) for s in seq_lengths] if seq_lengths else [own]

    times: list[list[TimePoint]] = [[] for _ in spec.layers]
    sharded: list[list[ShardedTime]] = [[] for _ in spec.layers]
    memory: list[dict[int, LayerMemory]] = [{} for _ in spec.layers]
    other_times: list[OtherTime] = []
    others: dict[str, dict[tuple[int, ...], OtherMemory]] = {}
    # the vocabulary may be sharded as any layer is
    tensor = {t for layer in spec.layers for t in tensor_degrees(layer)}
    vocab_degrees = tuple(sorted(tensor | set(VOCAB_DEGREES)))
    vocab = padded_vocab_size(spec)
    for lengths in dict.fromkeys(cases):
        own_lengths = _resized(spec, lengths)
        blocks, kinds = blocks_of(own_lengths), type_blocks(own_lengths)
        for index, (layer, length) in enumerate(zip(spec.layers, lengths, strict=True)):
            # cross-attention reads what the layer type in front of it, the encoder, puts out
            source_length = lengths[index - 1] if layer.cross_attention and index else None
            alike = [
                layer_cells(
                    machine,
                    cells_job(spec.name, blocks, vocab, length, precision),
                    block,
                    layer_type=index,
                    batches=batches,
                    degrees=tensor_degrees(layer),
                    sequence_parallel=sequence_parallel,
                )
                for block in kinds[index]
            ]
            # a layer of the type is the mean of those with a window and those without
            numbers = [block.number for block in kinds[index]]
            times[index] += mean_cells([whole for whole, _ in alike], numbers)
            sharded[index] += mean_cells([cells for _, cells in alike], numbers)
            memory[index][length] = LayerMemory(
                parameter_count=float(parameter_count(layer)),
                activation_bytes_per_sample={
                    degree: activation_bytes(
                        layer,
                        length,
                        degree,
                        element_bytes=element,
                        sequence_parallel=sequence_parallel,
                        kernels=kept,
                        memory_seq_length=source_length,
                    )
                    for degree in tensor_degrees(layer)
                },
                checkpoint_bytes_per_sample=checkpoint_bytes(layer, length, element),
            )
        job = cells_job(spec.name, blocks, vocab, lengths[-1], precision)
        other_times += other_cells(machine, job, lengths, batches)
        found = other_memory(
            spec,
            lengths,
            vocab_degrees,
            element_bytes=element,
            sequence_parallel=sequence_parallel,
            kernels=kept,
        )
        for position, value in found.items():
            others.setdefault(position, {})[lengths] = value
    note = f"estimated: {spec.name} on card {device.name}, {precision}, {trainer.name}"
    return ModelProfile(
        layers=tuple(
            LayerProfile(times=tuple(t), memory=m, sharded_times=tuple(c))
            for t, m, c in zip(times, memory, sharded, strict=True)
        ),
        other_times=tuple(other_times),
        other_memory=others,
        sequence_parallel=sequence_parallel,
        precision=precision,
        estimated=True,
        logits_peak_bytes_per_sample=logits_peak_bytes(spec, max(x[-1] for x in cases)),
        sources=(
            Source(role="model spec", path=spec.name, estimated=True),
            device.source,
            trainer.source,
            *(() if site is None else (site.source,)),
        ),
        notes=(note,),
    )


def _resized(spec: ModelSpec, lengths: Sequence[int]) -> ModelSpec:
    """Return a spec whose layer types have these sequence lengths."""
    layers = tuple(
        replace(layer, seq_length=length)
        for layer, length in zip(spec.layers, lengths, strict=True)
    )
    return replace(spec, layers=layers)
