"""Memory of a layer on a rank, in bytes: states, transient peaks, shared buffers.

Source: cost-model.md "Memory of a rank". Every function works on flat arrays of rows; layers,
embedding and head share the formulas of states, ZeRO transients and communicators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.price.risk import LaunchKind, odds_of_kind, reserve_share
from autopar.rates.measured import COMMUNICATOR_BYTES, HardwareProfile
from autopar.rates.model import ShardKind, backward_bytes
from autopar.records import Record
from autopar.run.model import LayerMemory, LayerSpec, ModelSpec, head_dim
from autopar.run.plan import LayerStrategy
from autopar.units import GIB
from search.planning.cost.recipes import KINDS, KindBytes, Recipe
from search.planning.cost.tables import Pricing, Rows
from search.request.options import SearchOptions


def to_bytes(values: F64) -> I64:
    """Return whole bytes, rounded up (a millionth of a byte of float noise is ignored)."""
    return np.ceil(values - 1e-6).astype(np.int64)


def state_bytes(
    parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool, kept: F64 | float = 0.0
) -> F64:
    """Return weights, gradients and optimizer of `parameters`, exactly shared by ZeRO, in bytes.

    As an engine lists them, else those of FSDP2: ZeRO-1 shards the optimizer, ZeRO-2 gradients too,
    ZeRO-3 weights too; with one reduction per step (`shard_gradients` False), and of ZeRO-1, full
    gradients are kept until then.

    kept : of the only micro-batch, whose activations are gone where its sharded gradients appear:
        then N*e_g/z - kept of them are added, at least 0.
    """
    weights = recipe.weight / rows.weight_shards
    # fp32 shards are their own masters
    optimizer = np.where(
        rows.whole_weights, recipe.optimizer, recipe.optimizer - recipe.own_masters
    )
    # sums over several micro-batches stay whole until the one reduction of a step
    divided = rows.divides_gradients(at_once=shard_gradients)
    gradients = recipe.gradient / np.where(divided, rows.optimizer_shards, 1.0)
    own = parameters * gradients
    # unsharded sums have a buffer of their own from the beginning of a step
    own = np.where(divided & rows.sharded & rows.several, np.maximum(own - kept, 0.0), own)
    result: F64 = parameters * (weights + optimizer / rows.optimizer_shards) + own
    if not recipe.lists:
        return result
    whole = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.whole)
    shared = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.shared)
    listed = parameters * (whole + shared / rows.optimizer_shards)
    return np.where(listed_rows(rows, recipe), listed, result)


def gathered_weight_bytes(parameters: F64, rows: Rows, recipe: Recipe) -> F64:
    """Return the weights w*N of a unit while ZeRO-3 has gathered it, in bytes."""
    weights = np.where(rows.zero3, recipe.weight, 0.0)
    if recipe.lists:
        ahead = _by_kind(rows, recipe, True, lambda kind: kind.ahead)
        weights = np.where(listed_rows(rows, recipe), ahead, weights)
    # a group of one gathers nothing
    result: F64 = parameters * np.where(rows.several, weights, 0.0)
    return result


def listed_rows(rows: Rows, recipe: Recipe) -> Bool:
    """Return the rows whose bytes are those of the engine's list, (n,)."""
    listed: Bool = _chosen(rows, [float(kind in recipe.at_once) for kind in KINDS]) > 0.0
    return listed


def unit_bytes(parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool) -> F64:
    """Return what a listed engine holds of a unit while its backward runs, in bytes."""
    held = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.unit)
    # a group of one gathers and scatters nothing
    result: F64 = parameters * np.where(rows.several, held, 0.0)
    return result


def loss_bytes(parameters: F64, unit: F64, rows: Rows, recipe: Recipe, *, shard: bool) -> F64:
    """Return what a listed engine holds of embedding and head while the loss runs, in bytes.

    parameters : of both. unit : those of the larger. shard : gradients are divided at once.
    """
    kinds = recipe.kinds(at_once=shard)
    of_all = [kinds[kind].loss if kind in kinds else None for kind in KINDS]
    own = unit_bytes(unit, rows, recipe, shard_gradients=shard)
    gathered = parameters * _chosen(rows, [size or 0.0 for size in of_all])
    is_one = _chosen(rows, [float(size is not None) for size in of_all]) > 0.0
    result: F64 = np.where(is_one & rows.several, gathered, own)
    return result


def bucket_bytes(rows: Rows, recipe: Recipe) -> F64:
    """Return the buckets of a rank in which gradients are reduced and weights fetched, in bytes."""
    if not recipe.lists:
        return np.zeros_like(rows.batch)
    buckets = _by_kind(rows, recipe, True, lambda kind: kind.constant_bytes)
    return np.where(rows.several, buckets, 0.0)


def _by_kind(rows: Rows, recipe: Recipe, at_once: bool, part: Callable[[KindBytes], float]) -> F64:
    """Return one of the bytes of every row's kind of data parallelism; 0 where it is not listed."""
    kinds = recipe.kinds(at_once=at_once)
    return _chosen(rows, [part(kinds[kind]) if kind in kinds else 0.0 for kind in KINDS])


def _chosen(rows: Rows, values: Sequence[float]) -> F64:
    """Return the value of every row's kind, in the order of KINDS."""
    replicas, zero1, zero2, zero3 = values
    return np.select([rows.zero3, rows.zero2, rows.zero1], [zero3, zero2, zero1], replicas)


def reducing_bytes(parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool) -> F64:
    """Return what a unit of ZeRO has at once while its gradients are reduced, in bytes.

    Its gradients, in the precision of the weights as autograd makes them, and the buffer that they
    are reduced in: N*(w + e_g); weights have been given back. Whole sums are among the states: then
    first new gradients beside gathered weights, 2*N*w, and later the buffer and what comes out of
    it alone, N*e_g*(1 + 1/z).
    """
    buffer = recipe.gradient * (1.0 + 1.0 / rows.optimizer_shards)
    beside_sums = np.maximum(recipe.weight * (1.0 + rows.zero3), buffer)
    divided = rows.divides_gradients(at_once=shard_gradients)
    most = np.where(divided, recipe.weight + recipe.gradient, beside_sums)
    result: F64 = parameters * np.where(rows.sharded & rows.several, most, 0.0)
    return result


def layer_transient_bytes(
    parameters: F64,
    matrix: tuple[F64, F64],
    rows: Rows,
    recipe: Recipe,
    *,
    working: F64,
    kept: F64,
    tokens: F64,
    shard_gradients: bool,
    accumulates: bool,
) -> F64:
    """Return what a layer has for a moment above what layers keep, in bytes: its largest moment.

    Either its backward begins, with everything still kept: what that needs (`working`), weights
    that ZeRO-3 has gathered and the gradient of the last matrix; and the buffer of the unit that
    was reduced before, where that is larger than what it had kept. Or its gradients are reduced,
    and of what it kept its input alone is left, and the gradient of that.

    matrix : as `last_matrix` returns it.
    kept, tokens : what the layer keeps, and its input, of one micro-batch.
    accumulates : sharded gradients of earlier micro-batches stay.
    """
    weights, later = matrix
    is_shard = rows.sharded & rows.several
    # replicas add a gradient to their sum at once, before the rest of the MLP begins
    fresh = np.where(
        is_shard,
        recipe.weight * weights,
        np.maximum(recipe.weight * weights - later, 0.0),
    )
    own = parameters * recipe.gradient / rows.optimizer_shards
    # of one micro-batch the states have the larger of both, see `state_bytes`
    gone = kept - own if accumulates else np.maximum(kept - own, 0.0)
    divided = rows.divides_gradients(at_once=shard_gradients)
    gone = np.where(divided, gone, kept)
    reducing = reducing_bytes(parameters, rows, recipe, shard_gradients=shard_gradients)
    reduced = reducing + 2.0 * tokens - gone
    begins = working + gathered_weight_bytes(parameters, rows, recipe) + fresh
    # FSDP2 keeps the buffer of one reduction until the next: here that of a layer alike
    buffer = np.where(is_shard & divided, parameters * recipe.gradient, 0.0)
    begins = begins + np.maximum(buffer - gone, 0.0)
    found: F64 = np.maximum(begins, reduced)
    if not recipe.lists:
        return found
    # an engine's list is added up; weights that are fetched early are among the shared bytes
    unit = unit_bytes(parameters, rows, recipe, shard_gradients=shard_gradients)
    own = working + unit - gathered_weight_bytes(parameters, rows, recipe)
    return np.where(listed_rows(rows, recipe), own, found)


def last_matrix(parameters: F64, rows: Rows, spec: LayerSpec, recipe: Recipe) -> tuple[F64, F64]:
    """Return parameters of the last matrix of the MLP on a rank, and bytes that are not there yet.

    h*f/t, of all experts; and, of what a gated MLP's backward needs, the second gradient of its
    inner values, b*S*f*e/(t*c) of the experts that a token visits. A third of the layer's
    parameters, which no built-in block exceeds, where widths are unknown.
    """
    width = spec.ffn_hidden_size
    if width is None:
        return parameters / 3.0, np.zeros_like(rows.batch)
    experts, visited = spec.num_experts or 1, 1
    if spec.num_experts is not None:
        visited = spec.experts_per_token or spec.num_experts
    # Ulysses divides tokens, not the matrix
    split = np.where(rows.ulysses, 1.0, rows.tensor)
    weights = float(experts * spec.hidden_size * width) / split
    tokens = rows.batch * spec.seq_length / (rows.tensor * rows.context)
    inner = tokens * visited * width * recipe.element
    return weights, inner if spec.gated_mlp else np.zeros_like(inner)


def token_bytes(spec: LayerSpec, recipe: Recipe) -> float:
    """Return the activation of a sample, S*h*e bytes."""
    return float(spec.seq_length) * spec.hidden_size * recipe.element


def gathered_bytes(rows: Rows, sample_bytes: F64 | float, pricing: Pricing) -> F64:
    """Return the input that Megatron TP gathers with SP, b*S*h*e/c bytes, else 0.

    sample_bytes : S*h*e. It lies in the shared buffer, or without `global_memory_buffer` in memory
    of its own for as long as it is used.
    """
    if not pricing.options.sequence_parallel:
        return np.zeros_like(rows.batch)
    # Ulysses exchanges heads, and one tensor rank has its whole input
    return np.where(rows.megatron, rows.batch * sample_bytes / rows.context, 0.0)


def communicator_bytes(rows: Rows, pricing: Pricing) -> F64:
    """Return the buffers of a row's communicators, in bytes: none where hardware is measured."""
    # measured ones are in the context that is reserved
    if not pricing.hardware.estimated:
        return np.zeros_like(rows.batch)
    # all ranks of a stage are one group then, which needs one communicator
    same = rows.ulysses & (rows.zero_size == rows.tensor)
    count = (rows.tensor > 1.0).astype(np.float64) + (rows.context > 1.0) + (rows.several & ~same)
    result: F64 = count * COMMUNICATOR_BYTES
    return result


def layer_shared_bytes(
    rows: Rows, spec: LayerSpec, pricing: Pricing, known: Mapping[int, float]
) -> F64:
    """Return the buffers that layers of a stage share, in bytes.

    With SP the gather buffer b*S*h*e/c, if `global_memory_buffer`; without SP the replicated part
    of the pipeline's receive buffers, 2*(t-1) of the sharded one; when estimated 64 MiB per
    communicator.

    known : by tensor degree what the trainer's layers share instead of the gather buffer.
    """
    shared = communicator_bytes(rows, pricing) + bucket_bytes(rows, pricing.recipe)
    options = pricing.options
    if known:
        # stand-ins of gradients that are added where they are made: not of shards (ZeRO-3)
        shared = shared + np.where(rows.zero3, 0.0, _by_degree(known, rows.tensor))
    if options.sequence_parallel and options.global_memory_buffer and not known:
        shared = gathered_bytes(rows, token_bytes(spec, pricing.recipe), pricing) + shared
    elif not options.sequence_parallel:
        # X, the activation of a micro-batch fully sharded over its stage
        base = rows.samples * token_bytes(spec, pricing.recipe) / rows.ranks
        # a stage's fixed buffers hold one shard a side; t copies are t - 1 more on both sides
        replicated = rows.megatron & (rows.stages > 1.0)
        shared = np.where(replicated, 2.0 * (rows.tensor - 1.0) * base, 0.0) + shared
    return shared


def _by_degree(table: Mapping[int, float], degrees: F64) -> F64:
    """Return the entry of every row's degree, 0 where there is none."""
    found = np.zeros_like(degrees)
    for degree, size in table.items():
        found[degrees == degree] = size
    return found


def stage_fixed_bytes(
    stages: I64,
    samples: I64,
    sample_bytes: float,
    hardware: HardwareProfile,
    rank_bytes: float = 0.0,
) -> I64:
    """Return (N, 4) bytes by stage kind: pipeline receive buffers and, estimated, communicators.

    sample_bytes : S*h*e of the widest layer type. An end stage receives from one side, a middle
    stage from two. rank_bytes : what every rank holds, whatever it runs.
    """
    base = samples * stages / hardware.world_size * sample_bytes
    fixed = base[:, None] * np.array([0.0, 1.0, 2.0, 1.0]) + rank_bytes
    if hardware.estimated:
        # one for the world, one more for the pipeline
        fixed = fixed + COMMUNICATOR_BYTES * (1.0 + (stages > 1))[:, None]
    return to_bytes(fixed)


# --------------------------------------------------------------------------------------------------
# What the layers of a strategy keep, recompute and need in their backward, in bytes per sample.
#
# Source: cost-model.md "Memory of a rank". Degrees that were not counted follow from counted ones,
# never below what would be counted, and every such step leaves a sentence.


_Known = tuple[float | None, str]
"""Bytes, None where nothing says them, and from where they were derived ('': as counted)."""


class ActivationBytes(Record, eq=False):
    """(S,) bytes per sample that a layer's strategy keeps, recomputes, and needs in its backward.

    kept is nan where it was not measured.
    """

    kept: F64
    recomputed: F64
    backward: F64
    """Above what is kept or was recomputed, while the layer's backward runs."""
    derived: tuple[str, ...]
    """Sentences on degrees whose bytes follow from those at another one, or from a rule."""


def activation_bytes(
    memory: LayerMemory,
    strategies: Sequence[LayerStrategy],
    spec: LayerSpec,
    recipe: Recipe,
    *,
    sequence_parallel: bool,
) -> ActivationBytes:
    """Return the activation bytes per sample of every strategy.

    tp: `tensor_bytes`; Ulysses: `ulysses_bytes`; backward: `layer_backward_bytes`; all over c.
    Checkpointed input: entry /t with SP or Ulysses, /c.
    """
    kept = np.full(len(strategies), np.nan)
    recomputed = np.zeros(len(strategies))
    backward = np.zeros(len(strategies))
    derived: dict[tuple[bool, int], str] = {}
    ruled: dict[tuple[bool, int], str] = {}

    def at_degree(ulysses: bool, degree: int) -> tuple[float, float] | None:
        """Return what is kept and what the backward needs above it; None where not measured."""
        if ulysses:
            full, source = ulysses_bytes(memory, degree, spec, recipe)
        else:
            full, source = tensor_bytes(
                memory, degree, spec, recipe, sequence_parallel=sequence_parallel
            )
        if full is None:
            return None
        name = "ulysses" if ulysses else "tp"
        if source:
            derived[ulysses, degree] = f"activations at {name}={degree} are {source}"
        kind: ShardKind = "ulysses" if ulysses else "sp" if sequence_parallel else "tp"
        peak, rule = layer_backward_bytes(memory, degree, kind, spec, recipe, full)
        if rule:
            ruled[ulysses, degree] = rule
        return full, peak

    known: dict[tuple[bool, int], tuple[float, float] | None] = {}
    for k, s in enumerate(strategies):
        if (s.ulysses, s.tp) not in known:
            known[s.ulysses, s.tp] = at_degree(s.ulysses, s.tp)
        found = known[s.ulysses, s.tp]
        # nan marks a strategy that cannot be priced
        if found is None:
            continue
        full, peak = found
        # context ranks have 1/c of the tokens, of whatever is kept
        backward[k] = peak / s.cp
        if not s.checkpoint:
            kept[k] = full / s.cp
        elif memory.checkpoint_bytes_per_sample is not None:
            # whether a rank keeps a share of the tokens, and so of a checkpoint
            split = s.ulysses or sequence_parallel
            # a checkpoint is the input of the layer, which tensor ranks without SP have whole
            kept[k] = memory.checkpoint_bytes_per_sample / ((s.tp if split else 1) * s.cp)
            # there for one layer at a time, so transient and not kept
            recomputed[k] = full / s.cp
    return ActivationBytes(
        kept=kept,
        recomputed=recomputed,
        backward=backward,
        derived=(*(derived[key] for key in sorted(derived)), *_by_rule(ruled)),
    )


def tensor_bytes(
    memory: LayerMemory, degree: int, spec: LayerSpec, recipe: Recipe, *, sequence_parallel: bool
) -> _Known:
    """Return what a tensor-parallel layer keeps of a sample on a rank, in bytes.

    table[t]; without SP a missing t stays unknown, with SP it follows from its neighbours as
    `_derived` says.
    """
    table = memory.activation_bytes_per_sample
    if degree in table or not sequence_parallel:
        return table.get(degree), ""
    return _derived(table, degree, "tp", spec, recipe)


def ulysses_bytes(memory: LayerMemory, degree: int, spec: LayerSpec, recipe: Recipe) -> _Known:
    """Return what a Ulysses layer keeps of a sample on a rank, in bytes.

    Counted degrees are as counted, others follow from them as `_derived` says; without any it is
    table[1]/t, which leaves out what the all-to-alls keep.
    """
    table, counted = memory.activation_bytes_per_sample, memory.ulysses_activation_bytes_per_sample
    # degree 1 is the unsharded layer under either name
    if degree == 1 or not counted:
        whole = table.get(1)
        known = whole is None or degree == 1
        return (
            None if whole is None else whole / degree,
            "" if known else f"those at tp=1 over {degree}, without what its all-to-alls keep",
        )
    if degree in counted:
        return counted[degree], ""
    return _derived(counted, degree, "ulysses", spec, recipe)


def layer_backward_bytes(
    memory: LayerMemory,
    degree: int,
    kind: ShardKind,
    spec: LayerSpec,
    recipe: Recipe,
    kept_bytes: float,
) -> tuple[float, str]:
    """Return what the backward of one sample needs above `kept_bytes`, and the rule if it is one.

    As counted; at another degree the rule of `autopar.rates.model`, raised by what the nearest
    counted degree is above it.
    """
    # degree 1 is the unsharded layer under either name
    counted = (
        memory.ulysses_backward_bytes_per_sample
        if kind == "ulysses" and degree > 1
        else memory.backward_bytes_per_sample
    )
    if degree in counted:
        return counted[degree], ""

    def rule(at: int) -> float:
        return backward_bytes(
            spec, spec.seq_length, at, kind, kept_bytes, element_bytes=recipe.element
        )

    text = "by a rule (not counted)"
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        text = "half of its activations, and its input at tp > 1 (not counted, widths unknown)"
        return rule(degree), text
    if not counted:
        return rule(degree), text
    # of two as near the smaller degree, so that the order of the file does not matter
    nearest = min(counted, key=lambda t: (abs(t - degree), t))
    # upwards only: where the rule is above the count it stays so
    return rule(degree) * max(1.0, counted[nearest] / rule(nearest)), text


def _derived(
    counted: Mapping[int, float], degree: int, name: str, spec: LayerSpec, recipe: Recipe
) -> _Known:
    """Return the bytes at a degree that is not among the counted ones, never below a count of it.

    Over all t ranks a layer never keeps less at a larger degree, and grows by nothing but copies
    of k and v and, with SP, of the tokens that experts see. So up to the largest counted degree
    the next counted t1 gives t1*A(t1)/t, and beyond it the largest t0 gives (t0*A(t0) + copies)/t,
    at most A(t0), which is all that is known without heads.
    """
    if not counted:
        return None, ""
    # t*A(t) never falls with t, so a larger counted degree bounds this one from above
    larger = [t for t in counted if t > degree]
    if larger:
        above = min(larger)
        text = f"those at {name}={above} times {above}/{degree} (an upper bound)"
        return counted[above] * above / degree, text
    below = max(counted)
    heads = spec.num_heads
    if heads is None:
        return counted[below], f"those at {name}={below} (an upper bound)"
    key_value = spec.num_kv_heads or heads
    attentions = 2.0 if spec.cross_attention else 1.0
    # copies begin where t is above kv_heads; those of the counted degree are in its count
    more = max(key_value, degree) - max(key_value, below)
    element = spec.seq_length * recipe.element
    # k and v of all ranks together, which the degree divides again below
    copies = attentions * 2.0 * more * head_dim(spec) * element
    if spec.qk_norms:
        # keys in front of their norm as well, and an fp32 number of each
        copies += attentions * more * (head_dim(spec) * element + 4.0 * spec.seq_length)
    text = f"those at {name}={below} times {below}/{degree}"
    if name == "ulysses" or more:
        text += ", and copies of k and v"
    if name == "tp" and spec.num_experts is not None:
        visited = spec.experts_per_token or spec.num_experts
        # the tokens that experts see are whole on every rank: once more for each further rank
        copies += (degree - below) * visited * spec.hidden_size * element
        text += ", and the tokens of its experts"
    # a larger degree never keeps more on a rank
    return min(counted[below], (counted[below] * below + copies) / degree), text


def _by_rule(ruled: Mapping[tuple[bool, int], str]) -> tuple[str, ...]:
    """Return one sentence for every rule, with the degrees that it stands for."""
    degrees: dict[str, list[str]] = {}
    for (ulysses, degree), text in sorted(ruled.items()):
        name = "ulysses" if ulysses else "tp"
        degrees.setdefault(text, []).append(f"{name}={degree}")
    return tuple(
        f"memory of its backward at {', '.join(names)} is {text}" for text, names in degrees.items()
    )


# --------------------------------------------------------------------------------------------------
# What a device has to hold beside the tensors of a plan: what the allocator reserves, the context.
#
# How sure predictions are is in `autopar.price.risk`.


class Reserve(Record):
    """The memory of a device that no plan may fill."""

    share: float
    """Of what is allocated."""
    context_bytes: float
    kind: LaunchKind
    """Whose errors the odds are of."""
    odds: float | None
    """Of running out of memory that `share` stands for; None: it was given."""

    def reserved_bytes(self, allocated_bytes: int) -> int:
        """Return what is taken of a device for `allocated_bytes`, context included."""
        # fragments are a share of what is allocated, the context is there before
        return math.ceil(allocated_bytes * (1.0 + self.share) + self.context_bytes)

    def budget_bytes(self, memory_bytes: float) -> int:
        """Return the largest allocation whose reservation fits in `memory_bytes`."""
        # two bytes more than rounding may have taken, then down to the largest that fits
        budget = int((memory_bytes - self.context_bytes) / (1.0 + self.share)) + 2
        while self.reserved_bytes(budget) > memory_bytes:
            budget -= 1
        return budget

    def odds_of_oom(self, allocated_bytes: int, memory_bytes: float) -> float:
        """Return the probability that a device of such memory runs out of it."""
        return odds_of_kind(self.kind, allocated_bytes, memory_bytes - self.context_bytes)

    @property
    def sentence(self) -> str:
        """What is reserved, as one of the lines of `defaults used`."""
        why = "" if self.odds is None else f" (--oom-risk {self.odds:g})"
        context = f"{self.context_bytes / GIB:g} GiB"
        return f"reserved memory is allocated * {1.0 + self.share:.4g} + {context}{why}"


def reserve_of(options: SearchOptions, spec: ModelSpec) -> Reserve:
    """Return the reserve of options: `--reserve` as it was given, else that of `--oom-risk`.

    Measured runs are of Megatron-LM; of another engine's memory few are, which is less sure.
    """
    mixture = any(layer.num_experts is not None for layer in spec.layers)
    kind: LaunchKind = "experts" if mixture else "dense"
    if options.memory_of != "megatron" or options.mixed_precision != "bf16":
        kind = "few runs"
    given = options.reserve_fraction
    return Reserve(
        share=reserve_share(kind, options.oom_risk) if given is None else given,
        context_bytes=options.context_bytes,
        kind=kind,
        odds=options.oom_risk if given is None else None,
    )
