"""Estimated ModelProfile of a model spec on a card: memory and times from the architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from autopar.documents import catalog
from autopar.errors import InputError
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
from autopar.run.rules import RuleError, notice
from autopar.sanity_checks import doubtful_rate, notes_of
from autopar.sources import Source
from autopar.units import MS

if TYPE_CHECKING:
    from autopar.rates.card import Card
    from autopar.rates.site import Site

# --------------------------------------------------------------------------------------------------
# Saved activations of layers and vocabulary, by the operation that saves them.
#
# Activations are what autograd saves for one sample, in Megatron's partitioning (Korthikanti et al.
# 2022, arXiv 2205.05198, section 4) with flash attention and no dropout. With S tokens, h hidden, a
# heads and k key-value heads of width d, f MLP width, e bytes per element, per sample:
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
# In a mixture of E experts a token visits c of them, evenly and without dropped tokens. M becomes
# c*M, and the tokens sorted by expert, which every rank needs whole, add:
#         P = c*S*h*e                     input of the experts, not divided by t
#         R = (28 + e)*c*S                weights of the chosen in fp32, again in order, int64
#                                         indices of experts, tokens and places
#         O = c*S*h*e (eager: twice)      output of the experts; eager also saves it weighted
#     R and O belong to the tokens of a rank, as X does. All experts are on every rank, 1/t of each.
# A shared expert adds an M of its width, and its gate S*h*e + 2*S*e around it.
#
# Norms of queries and keys save their input and 4 bytes per head. Latent attention (DeepSeek-V2,
# arXiv 2405.04434, section 2.1) has ranks q and r, and heads of width n without positions, p with
# them and v in their values. It saves
#         L = S*(q + r + p)*e + S*(q + r)*e + 8*S     latents, these normed, a number of each norm
#         A = S*a*(2*(n + p) + v)*e + S*a*v*e + 4*S*a  q, k and v of all heads, output, log-sum-exp
#     where L belongs to the tokens of a rank, as X does. A window changes none of it.
#
# `kernels="fused"` is exactly that. `kernels="eager"` adds what unfused code of current engines
# saves in addition: the sequence-first copy of the attention output (S*a*d*e); with RMSNorm, fp32
# input and normalised value instead of the input alone (n * S*h*4); with rotary positions (no
# learned ones, gated MLP), the fused qkv buffer that the value is a view of, next to the rotated q
# and k (S*a*d*e + S*k*d*e).


Kernels = Literal["eager", "fused"]
STATE_BYTES_PER_PARAMETER = 16
"""Model states with Adam: weights, gradients, fp32 weights and moments, bytes per parameter.

2 + 2 + 12, or 4 + 4 + 8 for fp32.
"""
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
    """Return the saved activations of one layer per sample at a tensor degree, in bytes.

    The formulas are in the comment above. `memory_seq_length` is the length of the sequence that
    cross-attention reads. Raises InputError if heads or MLP width are unknown.
    """
    if kernels not in ("eager", "fused"):
        raise InputError(f"kernels must be 'eager' or 'fused', got {kernels!r}")
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown", remedy="Add --model with a model spec")
    s, e, h = seq_length, element_bytes, layer.hidden_size
    heads, width = layer.num_heads, head_dim(layer)
    kv_heads = layer.num_kv_heads or heads
    kv_share = max(kv_heads, degree) * width / degree  # at least one head on every rank
    num_norms = layer_norms(layer)
    layer_norm = layer.norm_parameters_per_hidden == 2 * num_norms
    eager = kernels == "eager"

    # 4 bytes per token: fp32 mean and deviation of a LayerNorm, one number of an RMSNorm.
    around = num_norms * (s * h * e + 4.0 * s * (2 if layer_norm else 1))
    # GEMMs save the output of the norms before them; nothing saves the output of a norm after
    # them.
    around += min(num_norms, 3 if layer.cross_attention else 2) * s * h * e
    # Eager RMSNorm saves its input in fp32 in addition to the normalised value.
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
        # q and the attention output have one width, k and v another.
        inside += 2 * query + 2.0 * kv_length * kv_share * e + logsumexp
        if layer.qk_norms:
            # Input of the query and key norms; eager code saves it in fp32 as well, as around the
            # blocks.
            elements = s * heads * width / degree + kv_length * kv_share
            inside += elements * (e + (4 if eager else 0))
            # One number per row: per head, or for all heads together.
            rows = s * heads / degree + kv_length * kv_share / width
            inside += 4.0 * (s + kv_length if layer.wide_qk_norms else rows)
        if eager:
            # Sequence-first copy of the output.
            inside += query
            # Rotary positions turn q and k of self-attention; v is a view of the fused qkv.
            if index == 0 and layer.gated_mlp:
                inside += query + s * kv_share * e
    mlp = (4.0 if layer.gated_mlp else 2.0) * s * layer.ffn_hidden_size * e / degree
    if layer.num_experts is None:
        inside += mlp
    else:
        visited = layer.experts_per_token or layer.num_experts
        # Every rank holds the experts' whole input, so it is not divided by the degree.
        inside += visited * (mlp + s * h * e)
        if layer.shared_expert_width:
            inside += mlp / layer.ffn_hidden_size * layer.shared_expert_width
        if layer.shared_expert_gate:
            # The product of gate and output saves both, the gate's own function its output.
            around += s * h * e + 2.0 * s * e
        # The router selects before the softmax, so that no other scores are saved.
        around += (28.0 + e) * s * visited
        around += (2 if eager else 1) * visited * s * h * e
    # Sequence parallelism splits activations around the blocks; without it they are replicated.
    return around / (degree if sequence_parallel else 1) + inside


def _latent_bytes(
    layer: LayerSpec, latent: LatentSpec, s: int, degree: int, e: int, *, eager: bool
) -> tuple[float, float]:
    """Return the saved bytes of latent attention (inside heads, latents); formula above."""
    heads = (layer.num_heads or 0) / degree
    query, rank = latent.query_rank or 0, latent.key_value_rank
    value, both = latent.value_width, 2.0 * (latent.key_width + latent.rotary_width)
    # Eager code saves the sequence-first copy of the output and queries before rotation.
    copies = value + both / 2 if eager else 0
    inside = s * heads * ((both + 2.0 * value + copies) * e + 4.0)
    narrow = float(s * (query + rank + latent.rotary_width) * e)
    if layer.qk_norms:
        norms = 1 + (latent.query_rank is not None)
        narrow += s * (query + rank) * (e + (4 if eager else 0)) + 4.0 * s * norms
    return inside, narrow


def checkpoint_bytes(layer: LayerSpec, seq_length: int, element_bytes: int = 2) -> float:
    """Return the saved bytes of a checkpointed layer per sample, unsharded: its input, S*h*e."""
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
    """Return the memory of embedding, head and loss by position and vocabulary degree v.

    States: 16 bytes x (padded_vocab*h / v for each table, plus the unsplit rest). Tied weights are
    one table on the only stage, and one each on the first and the last. Activations per sample:
    token ids (8*S) on the first stage; final norm (input and output, /v with sequence parallelism)
    and 4 bytes per logit / v on the last. The loss adds `logits_peak_bytes` while it runs.
    """
    first, last = spec.layers[0], spec.layers[-1]
    s_last = seq_lengths[-1]
    layer_norm = last.norm_parameters_per_hidden >= 2 * layer_norms(last)
    norm = s_last * last.hidden_size * (2 * element_bytes + (4 if kernels == "eager" else 0))
    if layer_norm:
        norm = s_last * last.hidden_size * 2 * element_bytes
    states: dict[str, dict[int, float]] = {"only": {}, "first": {}, "last": {}}
    kept: dict[str, dict[int, float]] = {"only": {}, "first": {}, "last": {}}
    # A vocabulary of 0 rows leaves the parameters that are never split.
    embedding_rest, head_rest = embedding_parameter_counts(spec, 0)
    # Token ids are int64.
    tokens = 8.0 * sum(seq_lengths)
    for v in degrees:
        vocab = padded_vocab_size(spec, v)
        embedding = vocab / v * first.hidden_size + embedding_rest
        head = vocab / v * last.hidden_size + head_rest
        # The only stage has a tied table once; first and last stage need a copy each.
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
# Transient memory of a layer above its saved activations, while its backward runs.
#
# There is one formula for each moment that can be the peak: tensors allocated by then, minus saved
# activations that are freed by then. In units of X = S*h*e of one sample, with F = f/h (n*F: twice
# that for gated MLPs), A = a*d/h and K = k*d/h (at least one head on every rank), for t ranks:
#
#     MLP         1 + n*F             incoming gradient, gradients of the MLP's inner values
#     row linear  1 + (1 + F)/t       sp: the gathered gradient, besides incoming and inner one
#     attention   1 + 2*A + 2*K - M   gradients of output, q, k and v; the MLP's M = 2 + 2*F (gated:
#                                     2 + 4*F), norm included, is freed
#     least       2                   a gradient in and one out; tp: both whole on every rank
#
# Inside the tensor-parallel region terms are over t; outside they are over t with sp and Ulysses.
# For a mixture of experts whose tokens visit c experts:
#
#     experts     1 + c*n*F           gated: c less, as outputs of the experts are freed
#     routing     1 + 3*c             outputs, their gradients, weighted ones; tp: whole on every
#                                     rank; sp: 2*c + c/t, or c + (1 + c*F - c)/t
#     attention   as above            M has c*(2 + 2*F) (gated: c*(2 + 4*F)) for its MLP
#
#     shared      1/t more            for the terms not over t with sp: the gradient of the shared
#                                     expert waits for that of the routed experts
#
# Norms after attention and MLP: their saved inputs are freed, one in the line of the MLP and two in
# that of attention, with 4 bytes per token (LayerNorm: 8) each.
#
# The weights of the visits add 2*c*S bytes (sp: 4*c*S/t, Ulysses: 2*c*S/t). No formula gives less
# than `profile-model --source exact` counts for the built-in layers. They are equal for the shipped
# models, except for 1 % with experts.


ShardKind = Literal["sp", "tp", "ulysses"]
"""Tensor parallelism with and without sequence parallelism, Ulysses; equal at degree 1."""

_UNKNOWN_SHARE = 0.5
"""Transient over saved bytes of a layer whose heads or MLP width are unknown.

Gated MLPs save at least 4*F and their gradients need 2*F, plain ones 2*F and F. With the incoming
gradient no shipped dense layer is above 0.43 at degree 1.
"""


def backward_bytes(
    layer: LayerSpec,
    seq_length: int,
    degree: int,
    kind: ShardKind,
    kept_bytes: float,
    *,
    element_bytes: float = 2.0,
) -> float:
    """Return the transient bytes of a layer's backward per sample and rank, above `kept_bytes`.

    kept_bytes : saved activations of the layer per sample on that rank. Used only if heads or MLP
    width are unknown: half of it without inputs of norms after a part, and at degrees above 1 one
    whole activation more.
    """
    unit = float(seq_length) * layer.hidden_size * element_bytes
    # If the number of visited experts is not given, a token visits all of them.
    visited = float(layer.experts_per_token or layer.num_experts or 0)
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        # The saved inputs of norms after attention and MLP are freed before the largest moment.
        freed = 2.0 * unit / degree if layer_norms(layer) > 3 else 0.0
        share = _UNKNOWN_SHARE * max(kept_bytes - freed, 0.0)
        return share + unit * (2.0 * visited + (degree > 1))
    t, h = float(degree), float(layer.hidden_size)
    inner = layer.ffn_hidden_size / h
    # n*F of the table above: gate and up each have a gradient
    gradients = (2.0 if layer.gated_mlp else 1.0) * inner
    width = head_dim(layer)
    # At least one key-value head on every rank.
    key_value = max(layer.num_kv_heads or layer.num_heads, degree) * width / h
    # Gradients of output and q are 2*A wide, those of k and v 2*K.
    attention = 2.0 * layer.num_heads * width / h + 2.0 * key_value
    if layer.latent is not None:
        # q and k have their own width; v and the output have the width of values.
        attention = 2.0 * layer.num_heads * (width + layer.latent.value_width) / h
    if visited:
        weights = {"sp": 4.0 / t, "tp": 2.0, "ulysses": 2.0 / t}[kind] * visited * seq_length
        # By then 2 + 2*n*F of every visited expert is freed.
        attention -= 2.0 * visited * (gradients + 1.0)
        return unit * _mixture(layer, visited, t, kind, inner, gradients, attention) + weights
    # M = 2 + 2*n*F is freed; its 2 turns the 1 of the table into the - 1 of the lines below.
    attention -= 2.0 * gradients
    # The saved inputs of a norm after the MLP, and then of that after attention, are freed.
    behind = 0.0
    if layer_norms(layer) > 3:
        statistics = 8 if layer.norm_parameters_per_hidden > layer_norms(layer) else 4
        behind = 1.0 + statistics / (h * element_bytes)
    if kind == "tp":
        # Without sp, activations outside the tensor-parallel region are whole on every rank.
        mlp = 1.0 + gradients / t - behind
        return unit * max(mlp, 2.0, attention / t - 1.0 - 2.0 * behind)
    moments = [1.0 + gradients - behind, 2.0, attention - 1.0 - 2.0 * behind]
    moments = [moment / t for moment in moments]
    if kind == "sp" and degree > 1:
        # Before the row-parallel GEMM, sp gathers a whole gradient on every rank.
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
    """Return the transient peak of an MoE layer in units of X, without router weights."""
    # With gated MLPs, outputs of the experts are freed when their gradients arrive.
    gone = visited if layer.gated_mlp else 0.0
    if kind == "tp":
        return max(1.0 + visited * gradients / t - gone, 1.0 + 3.0 * visited, attention / t - 1.0)
    moments = [
        (1.0 + visited * gradients - gone) / t,
        (1.0 + 3.0 * visited) / t,
        (attention - 1.0) / t,
    ]
    if kind == "sp" and t > 1.0:
        # The gradient of the shared expert waits for that of the routed experts.
        waiting = 1.0 / t if layer.shared_expert_width else 0.0
        # sp: tokens sorted by expert are whole on every rank during routing.
        moments.append(2.0 * visited + visited / t + waiting)
        moments.append(visited + (1.0 + visited * inner - visited) / t + waiting)
    return max(moments)


# --------------------------------------------------------------------------------------------------
# Plausibility of measured forward times.


def check_rates(
    profile: ModelProfile, spec: ModelSpec, hardware: HardwareProfile
) -> tuple[str, ...]:
    """Return notes on measured forward times that exceed the peak FLOP/s of the device.

    The device is the card whose name the hardware profile starts with, else the fastest card.

    Raises
    ------
    DocumentError: a forward is faster than twice the device's peak.
    """
    from autopar.rates.card import load_card

    cards = [load_card(name) for name in catalog.card_names()]
    named = [card for card in cards if hardware.name.startswith(f"{card.name}_")]
    # fp32 matrices may be multiplied in TF32, at half the rate of bf16.
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


def check_threads(profile: ModelProfile, hardware: HardwareProfile) -> None:
    """Raise RuleError if layers and collectives were measured on CPUs with different threads."""
    numbers = (profile.threads, hardware.threads)
    if None in numbers or len({*numbers}) == 1:
        return
    problem = "layer times were measured with {layers} threads, collectives with {collectives}"
    remedy = "Measure both with the OMP_NUM_THREADS of training; torchrun uses 1 per rank"
    layers, collectives = numbers
    found = notice(
        "profiles.threads", "illegal", problem, remedy, layers=layers, collectives=collectives
    )
    raise RuleError((found,))


def layer_flop(layer: LayerSpec, seq_length: int, memory_seq_length: int) -> float:
    """Return the FLOP of one sample's forward: GEMMs, and scores, half of them if causal.

    `memory_seq_length` is the length of the sequence that cross-attention reads. Raises InputError
    if heads or MLP width are unknown.
    """
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown", remedy="Add --model with a model spec")
    h, width = layer.hidden_size, head_dim(layer)
    query = value = layer.num_heads * width
    key_value = 2 * (layer.num_kv_heads or layer.num_heads) * width
    # A token visits this number of MLPs, each of two or three matrices, and a router selects them.
    visited = layer.experts_per_token or layer.num_experts or 1
    mlps = visited * layer.ffn_hidden_size + layer.shared_expert_width
    weights = h * ((3 if layer.gated_mlp else 2) * mlps + (layer.num_experts or 0))
    if layer.latent is None:
        weights += h * (2 * query + key_value)
    else:
        value = layer.num_heads * layer.latent.value_width
        weights += attention_weights(replace(layer, qk_norms=False, attention_sinks=False))
    flop = 2.0 * seq_length * weights
    # Two GEMMs over all pairs: scores, and their product with the values.
    flop += 2.0 * (query + value) * _pairs(layer, seq_length)
    if layer.cross_attention:
        flop += 2.0 * h * (2 * seq_length * query + memory_seq_length * key_value)
        flop += 4.0 * seq_length * memory_seq_length * query
    return flop


def _pairs(layer: LayerSpec, seq_length: int) -> float:
    """Return the number of pairs of a query and a visible key, averaged over layers of a type."""
    every = seq_length * seq_length * (0.5 if layer.causal else 1.0)
    if layer.window is None or layer.window >= seq_length:
        return every
    # The first queries see fewer keys, and so do the last ones without a causal mask.
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
# Whole profile: layer times, vocabulary times, memory tables.


VOCAB_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Degrees of embedding and head: the vocabulary is padded, so heads need not be divisible."""


STACKS: dict[Kernels, str] = {"eager": "torchtitan-eager", "fused": "megatron-core"}
"""Default software stack for each choice of `kernels`."""


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

    `seq_lengths` apply to all layer types; the default is each type's own length. `stack` names the
    software stack that defines kernels, host overheads and saved activations. Without it, `kernels`
    selects PyTorch's own kernels or fused ones. Known figures of `site` replace the card's. Raises
    InputError for unknown names and incomplete specs.
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
    # Given lengths apply to all layer types; otherwise each type has its own.
    cases = [tuple(s for _ in spec.layers) for s in seq_lengths] if seq_lengths else [own]

    times: list[list[TimePoint]] = [[] for _ in spec.layers]
    sharded: list[list[ShardedTime]] = [[] for _ in spec.layers]
    memory: list[dict[int, LayerMemory]] = [{} for _ in spec.layers]
    other_times: list[OtherTime] = []
    others: dict[str, dict[tuple[int, ...], OtherMemory]] = {}
    # The vocabulary may be sharded like any layer.
    tensor = {t for layer in spec.layers for t in tensor_degrees(layer)}
    vocab_degrees = tuple(sorted(tensor | set(VOCAB_DEGREES)))
    vocab = padded_vocab_size(spec)
    for lengths in dict.fromkeys(cases):
        own_lengths = _resized(spec, lengths)
        blocks, kinds = blocks_of(own_lengths), type_blocks(own_lengths)
        for index, (layer, length) in enumerate(zip(spec.layers, lengths, strict=True)):
            # Cross-attention reads the output of the preceding layer type, the encoder.
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
            # A layer of the type is the mean of its layers with a window and those without.
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
