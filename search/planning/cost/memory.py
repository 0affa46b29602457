"""Memory of a layer on a rank, bytes: model states, activations, transient memory, buffers.

Source: cost-model.md "Memory of a rank". Functions take flat arrays of rows. The formulas of model
states, ZeRO buffers and communicators also apply to embedding and head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.price.oom_risk import LaunchKind, oom_probability_of_kind, reserve_share
from autopar.rates.measured import COMMUNICATOR_BYTES, HardwareProfile
from autopar.rates.model import ShardKind, backward_bytes
from autopar.records import Record
from autopar.run.model import LayerMemory, LayerSpec, ModelSpec, head_dim
from autopar.run.plan import LayerStrategy
from autopar.units import GIB
from search.planning.cost.state_layouts import KINDS, KindBytes, Recipe
from search.planning.cost.tables import Pricing, Rows
from search.request.options import SearchOptions


def to_bytes(values: F64) -> I64:
    """Return the values rounded up to whole bytes; excess below 1e-6 is rounded down."""
    return np.ceil(values - 1e-6).astype(np.int64)


def state_bytes(
    parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool, kept: F64 | float = 0.0
) -> F64:
    """Return the bytes of weights, gradients and optimizer states on a rank, (n,).

    Rows of `listed_rows` use the state layout of the engine, others that of FSDP2. ZeRO-1 shards
    the optimizer, ZeRO-2 also gradients, ZeRO-3 also weights.

    parameters : (n,) number of parameters before ZeRO.
    shard_gradients : True if gradients are sharded in each reduction. If False, and with ZeRO-1,
        unsharded gradients exist until the reduction at the end of the step.
    kept : saved activations of the only micro-batch. Sharded gradients reuse their memory, so only
        the excess of the gradients over them is added.
    """
    weights = recipe.weight / rows.weight_shards
    # fp32 weights need no separate master weights
    optimizer = np.where(
        rows.whole_weights, recipe.optimizer, recipe.optimizer - recipe.own_masters
    )
    # gradients summed over micro-batches are unsharded until the single reduction of a step
    divided = rows.divides_gradients(at_once=shard_gradients)
    gradients = recipe.gradient / np.where(divided, rows.optimizer_shards, 1.0)
    own = parameters * gradients
    # unsharded gradients have a buffer that exists from the beginning of a step
    own = np.where(divided & rows.sharded & rows.several, np.maximum(own - kept, 0.0), own)
    result: F64 = parameters * (weights + optimizer / rows.optimizer_shards) + own
    if not recipe.lists:
        return result
    whole = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.whole)
    shared = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.shared)
    listed = parameters * (whole + shared / rows.optimizer_shards)
    return np.where(listed_rows(rows, recipe), listed, result)


def gathered_weight_bytes(parameters: F64, rows: Rows, recipe: Recipe) -> F64:
    """Return the bytes of the gathered weights of a ZeRO-3 unit, (n,); 0 for other rows."""
    weights = np.where(rows.zero3, recipe.weight, 0.0)
    if recipe.lists:
        ahead = _by_kind(rows, recipe, True, lambda kind: kind.ahead)
        weights = np.where(listed_rows(rows, recipe), ahead, weights)
    # a group of one rank gathers nothing
    result: F64 = parameters * np.where(rows.several, weights, 0.0)
    return result


def listed_rows(rows: Rows, recipe: Recipe) -> Bool:
    """Return (n,) True if the bytes of a row are those of an engine's state layout."""
    listed: Bool = _chosen(rows, [float(kind in recipe.at_once) for kind in KINDS]) > 0.0
    return listed


def unit_bytes(parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool) -> F64:
    """Return the transient bytes of a ZeRO unit during its backward, (n,).

    0 for engines without a state layout, and without other data-parallel ranks.
    """
    held = _by_kind(rows, recipe, shard_gradients, lambda kind: kind.unit)
    # a group of one rank gathers and scatters nothing
    result: F64 = parameters * np.where(rows.several, held, 0.0)
    return result


def loss_bytes(parameters: F64, unit: F64, rows: Rows, recipe: Recipe, *, shard: bool) -> F64:
    """Return the bytes of embedding and head during the loss, for an engine with a state layout.

    parameters : number of parameters of embedding and head together.
    unit : number of parameters of the larger one.
    shard : True if gradients are sharded in each reduction.
    """
    kinds = recipe.kinds(at_once=shard)
    of_all = [kinds[kind].loss if kind in kinds else None for kind in KINDS]
    own = unit_bytes(unit, rows, recipe, shard_gradients=shard)
    gathered = parameters * _chosen(rows, [size or 0.0 for size in of_all])
    is_one = _chosen(rows, [float(size is not None) for size in of_all]) > 0.0
    result: F64 = np.where(is_one & rows.several, gathered, own)
    return result


def bucket_bytes(rows: Rows, recipe: Recipe) -> F64:
    """Return the bytes of a rank's buckets for gradient reduction and weight prefetch."""
    if not recipe.lists:
        return np.zeros_like(rows.batch)
    buckets = _by_kind(rows, recipe, True, lambda kind: kind.constant_bytes)
    return np.where(rows.several, buckets, 0.0)


def _by_kind(rows: Rows, recipe: Recipe, at_once: bool, part: Callable[[KindBytes], float]) -> F64:
    """Return a byte count of the data-parallel type of every row, (n,); 0 without a state layout.

    part : function that selects the byte count.
    """
    kinds = recipe.kinds(at_once=at_once)
    return _chosen(rows, [part(kinds[kind]) if kind in kinds else 0.0 for kind in KINDS])


def _chosen(rows: Rows, values: Sequence[float]) -> F64:
    """Return the value of every row's data-parallel type, (n,); values : in the order of KINDS."""
    replicas, zero1, zero2, zero3 = values
    return np.select([rows.zero3, rows.zero2, rows.zero1], [zero3, zero2, zero1], replicas)


def reducing_bytes(parameters: F64, rows: Rows, recipe: Recipe, *, shard_gradients: bool) -> F64:
    """Return the peak bytes of an FSDP2 unit while its gradients are reduced, (n,).

    0 without sharding, or with one rank. N: parameters; w, e_g: bytes of a weight and of a reduced
    gradient; z: shards.

    - Sharded gradients: gradients in the precision of the weights, and the reduction buffer,
      N*(w + e_g); gathered weights are already freed.
    - Gradients summed unsharded (their sums are part of the states): the larger of the new
      gradients (N*w; with ZeRO-3 2*N*w, with the gathered weights) and the reduction buffer with
      its output (N*e_g*(1 + 1/z)).
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
    """Return the peak transient bytes of a layer in addition to saved activations, (n,).

    The peak is the larger of two points:

    - Start of the backward: `working`, gathered ZeRO-3 weights, the gradient of the last matrix,
      and the previous unit's reduction buffer as far as it exceeds that unit's freed activations.
    - Reduction of the gradients: `reducing_bytes`, the input and its gradient, less the freed
      activations.

    With a state layout: `working` and the bytes of the unit.

    matrix : result of `last_matrix`.
    working : bytes of one micro-batch's backward in addition to saved activations.

    kept, tokens : bytes of saved activations, and of the layer's input, for one micro-batch.
    accumulates : True if sharded gradients of earlier micro-batches exist.
    """
    weights, later = matrix
    is_shard = rows.sharded & rows.several
    # DDP adds a gradient to the sum before the backward of the rest of the MLP begins
    fresh = np.where(
        is_shard,
        recipe.weight * weights,
        np.maximum(recipe.weight * weights - later, 0.0),
    )
    own = parameters * recipe.gradient / rows.optimizer_shards
    # with one micro-batch the states contain the larger of both, see `state_bytes`
    gone = kept - own if accumulates else np.maximum(kept - own, 0.0)
    divided = rows.divides_gradients(at_once=shard_gradients)
    gone = np.where(divided, gone, kept)
    reducing = reducing_bytes(parameters, rows, recipe, shard_gradients=shard_gradients)
    reduced = reducing + 2.0 * tokens - gone
    begins = working + gathered_weight_bytes(parameters, rows, recipe) + fresh
    # FSDP2 frees a reduction buffer at the next reduction; the previous layer is assumed equal
    buffer = np.where(is_shard & divided, parameters * recipe.gradient, 0.0)
    begins = begins + np.maximum(buffer - gone, 0.0)
    found: F64 = np.maximum(begins, reduced)
    if not recipe.lists:
        return found
    # bytes of a state layout are added up; prefetched weights are among the shared bytes
    unit = unit_bytes(parameters, rows, recipe, shard_gradients=shard_gradients)
    own = working + unit - gathered_weight_bytes(parameters, rows, recipe)
    return np.where(listed_rows(rows, recipe), own, found)


def last_matrix(parameters: F64, rows: Rows, spec: LayerSpec, recipe: Recipe) -> tuple[F64, F64]:
    """Return (parameters of the MLP's down projection on a rank, bytes not yet allocated then).

    The parameters are h*f/t for all experts. The bytes are the second gradient of a gated MLP's
    inner activations, b*S*f*e/(t*c) times the experts per token, which is allocated after the
    weight gradient. If the MLP width is unknown: a third of the layer's parameters, an upper bound
    for built-in models, and 0.
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
    """Return the bytes of one sample's hidden states between two layers, S*h*e."""
    return float(spec.seq_length) * spec.hidden_size * recipe.element


def gathered_bytes(rows: Rows, sample_bytes: F64 | float, pricing: Pricing) -> F64:
    """Return the bytes of the input gathered by TP with sequence parallelism, b*S*h*e/c; else 0.

    It is part of the shared buffers with `global_memory_buffer`, else transient memory.

    sample_bytes : S*h*e.
    """
    if not pricing.options.sequence_parallel:
        return np.zeros_like(rows.batch)
    # Ulysses exchanges heads, and a single tensor rank has its whole input
    return np.where(rows.megatron, rows.batch * sample_bytes / rows.context, 0.0)


def communicator_bytes(rows: Rows, pricing: Pricing) -> F64:
    """Return the buffer bytes of a row's NCCL communicators; 0 for measured hardware."""
    # for measured hardware they are part of the CUDA and NCCL reserve
    if not pricing.hardware.estimated:
        return np.zeros_like(rows.batch)
    # if all ranks of a stage are one group, they need one communicator
    same = rows.ulysses & (rows.zero_size == rows.tensor)
    count = (rows.tensor > 1.0).astype(np.float64) + (rows.context > 1.0) + (rows.several & ~same)
    result: F64 = count * COMMUNICATOR_BYTES
    return result


def layer_shared_bytes(
    rows: Rows, spec: LayerSpec, pricing: Pricing, known: Mapping[int, float]
) -> F64:
    """Return the bytes of buffers that all layers of a stage use in turn, (n,).

    - With SP and `global_memory_buffer`: the gather buffer, b*S*h*e/c.
    - Without SP: the additional pipeline receive buffers for t replicas, 2*(t-1)*X.
    - Buckets of the state layout, and for estimates buffers of communicators.

    known : tensor degree -> shared bytes of the engine's layers, which replace the gather buffer.
    """
    shared = communicator_bytes(rows, pricing) + bucket_bytes(rows, pricing.recipe)
    options = pricing.options
    if known:
        # dummy weight gradients, which ZeRO-3 does not use
        shared = shared + np.where(rows.zero3, 0.0, _by_degree(known, rows.tensor))
    if options.sequence_parallel and options.global_memory_buffer and not known:
        shared = gathered_bytes(rows, token_bytes(spec, pricing.recipe), pricing) + shared
    elif not options.sequence_parallel:
        # X, the activation of a micro-batch fully sharded over its stage
        base = rows.samples * token_bytes(spec, pricing.recipe) / rows.ranks
        # `stage_fixed_bytes` has one shard per side; t replicas need t - 1 more on both sides
        replicated = rows.megatron & (rows.stages > 1.0)
        shared = np.where(replicated, 2.0 * (rows.tensor - 1.0) * base, 0.0) + shared
    return shared


def _by_degree(table: Mapping[int, float], degrees: F64) -> F64:
    """Return the table entry of every row's degree, (n,); 0 without an entry."""
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
    """Return the bytes of a stage that no strategy changes, (N, 4) by stage kind.

    These are pipeline receive buffers (one side for first and last stage, two for middle stages),
    `rank_bytes`, and for estimated hardware buffers of communicators.

    sample_bytes : S*h*e of the widest layer type.
    rank_bytes : constant bytes of every rank, such as workspaces.
    """
    base = samples * stages / hardware.world_size * sample_bytes
    fixed = base[:, None] * np.array([0.0, 1.0, 2.0, 1.0]) + rank_bytes
    if hardware.estimated:
        # one for the world, one more for the pipeline
        fixed = fixed + COMMUNICATOR_BYTES * (1.0 + (stages > 1))[:, None]
    return to_bytes(fixed)


# --------------------------------------------------------------------------------------------------
# Activation bytes per sample by strategy: saved, recomputed, and needed in the backward.
#
# Source: cost-model.md "Memory of a rank". Degrees without an entry are derived from other degrees
# as upper bounds, and every derivation adds a sentence.


_Known = tuple[float | None, str]
"""(bytes, None if unknown; source of derived bytes, '' if counted)."""


class ActivationBytes(Record, eq=False):
    """Activation bytes per sample of a layer by strategy, (S,)."""

    kept: F64
    """Saved activations; nan if not measured."""
    recomputed: F64
    """Activations that the backward recomputes; 0 without recomputation."""
    backward: F64
    """Bytes in addition to saved and recomputed activations during the layer's backward."""
    derived: tuple[str, ...]
    """Sentences on degrees whose bytes are derived from another degree or from a rule."""


def activation_bytes(
    memory: LayerMemory,
    strategies: Sequence[LayerStrategy],
    spec: LayerSpec,
    recipe: Recipe,
    *,
    sequence_parallel: bool,
) -> ActivationBytes:
    """Return the activation bytes per sample and rank of every strategy.

    Saved bytes are `tensor_bytes` or `ulysses_bytes`, those of the backward `layer_backward_bytes`,
    each divided by the context degree c. With recomputation only the layer's input is saved,
    divided by c, and by t with SP or Ulysses.
    """
    kept = np.full(len(strategies), np.nan)
    recomputed = np.zeros(len(strategies))
    backward = np.zeros(len(strategies))
    derived: dict[tuple[bool, int], str] = {}
    ruled: dict[tuple[bool, int], str] = {}

    def at_degree(ulysses: bool, degree: int) -> tuple[float, float] | None:
        """Return (saved bytes, additional bytes of the backward); None if not measured."""
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
        # context-parallel ranks hold 1/c of the tokens, saved or recomputed
        backward[k] = peak / s.cp
        if not s.checkpoint:
            kept[k] = full / s.cp
        elif memory.checkpoint_bytes_per_sample is not None:
            # True if a rank keeps a share of the tokens, and so of a checkpoint
            split = s.ulysses or sequence_parallel
            # a checkpoint is the layer's input, which tensor ranks without SP hold unsharded
            kept[k] = memory.checkpoint_bytes_per_sample / ((s.tp if split else 1) * s.cp)
            # only one layer at a time is recomputed, so the bytes are transient
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
    """Return (saved bytes of a tensor-parallel layer per sample and rank, source if derived).

    A degree without an entry is derived by `_derived` with SP, and unknown (None) without.
    """
    table = memory.activation_bytes_per_sample
    if degree in table or not sequence_parallel:
        return table.get(degree), ""
    return _derived(table, degree, "tp", spec, recipe)


def ulysses_bytes(memory: LayerMemory, degree: int, spec: LayerSpec, recipe: Recipe) -> _Known:
    """Return (saved bytes of a Ulysses layer per sample and rank, source if derived).

    Degrees without an entry are derived by `_derived`. Without any entry for Ulysses, the bytes of
    the unsharded layer are divided by t, which ignores all-to-all buffers.
    """
    table, counted = memory.activation_bytes_per_sample, memory.ulysses_activation_bytes_per_sample
    # degree 1 is the unsharded layer under either name
    if degree == 1 or not counted:
        whole = table.get(1)
        known = whole is None or degree == 1
        return (
            None if whole is None else whole / degree,
            "" if known else f"those at tp=1 over {degree}, without all-to-all buffers",
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
    """Return (bytes of a sample's backward above `kept_bytes`, name of the rule if one was used).

    Degrees without an entry use the rule of `autopar.rates.model.backward_bytes`, times the ratio
    of entry and rule at the nearest degree with an entry, at least 1.
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
    # of two equally near degrees the smaller, so the order of the file does not matter
    nearest = min(counted, key=lambda t: (abs(t - degree), t))
    # upwards only: where the rule is above the count it stays so
    return rule(degree) * max(1.0, counted[nearest] / rule(nearest)), text


def _derived(
    counted: Mapping[int, float], degree: int, name: str, spec: LayerSpec, recipe: Recipe
) -> _Known:
    """Return (upper bound of the saved bytes A(t) at a degree t without an entry, its source).

    The sum over ranks, t*A(t), does not decrease with t. It grows only by replicated heads of k and
    v, and with SP by tokens replicated for experts. A larger degree t1 with an entry gives
    t1*A(t1)/t. Otherwise the largest entry t0 gives (t0*A(t0) + replicas)/t, at most A(t0); if the
    number of heads is unknown, A(t0).
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
    # heads are replicated if t exceeds kv_heads; those of degree `below` are in its entry
    more = max(key_value, degree) - max(key_value, below)
    element = spec.seq_length * recipe.element
    # k and v of all ranks together; the division by the degree follows below
    copies = attentions * 2.0 * more * head_dim(spec) * element
    if spec.qk_norms:
        # also keys before their norm, and one fp32 number per key
        copies += attentions * more * (head_dim(spec) * element + 4.0 * spec.seq_length)
    text = f"those at {name}={below} times {below}/{degree}"
    if name == "ulysses" or more:
        text += ", and copies of k and v"
    if name == "tp" and spec.num_experts is not None:
        visited = spec.experts_per_token or spec.num_experts
        # each rank holds all tokens that its experts see: once more for each further rank
        copies += (degree - below) * visited * spec.hidden_size * element
        text += ", and the tokens of its experts"
    # a larger degree never keeps more on a rank
    return min(counted[below], (counted[below] * below + copies) / degree), text


def _by_rule(ruled: Mapping[tuple[bool, int], str]) -> tuple[str, ...]:
    """Return one sentence for every rule, with its degrees; ruled : (ulysses, t) -> rule."""
    degrees: dict[str, list[str]] = {}
    for (ulysses, degree), text in sorted(ruled.items()):
        name = "ulysses" if ulysses else "tp"
        degrees.setdefault(text, []).append(f"{name}={degree}")
    return tuple(
        f"memory of its backward at {', '.join(names)} is {text}" for text, names in degrees.items()
    )


# --------------------------------------------------------------------------------------------------
# Device memory in addition to the tensors of a plan: allocator overhead and CUDA context.
#
# The uncertainty of predictions is in `autopar.price.oom_risk`.


class Reserve(Record):
    """Reserved memory in addition to allocated memory: allocator overhead, CUDA and NCCL."""

    share: float
    """Reserved over allocated memory, minus 1."""
    context_bytes: float
    kind: LaunchKind
    """Kind of run whose errors give the OOM probability."""
    odds: float | None
    """OOM probability that `share` is derived from; None if the user gave `share`."""

    def reserved_bytes(self, allocated_bytes: int) -> int:
        """Return the reserved device memory for a peak of allocated memory, bytes."""
        # fragments are a share of allocated memory, the context is not
        return math.ceil(allocated_bytes * (1.0 + self.share) + self.context_bytes)

    def budget_bytes(self, memory_bytes: float) -> int:
        """Return the largest allocated memory whose reserved memory fits in a device, bytes.

        memory_bytes : device memory.
        """
        # start two bytes above possible rounding, then go down to the largest that fits
        budget = int((memory_bytes - self.context_bytes) / (1.0 + self.share)) + 2
        while self.reserved_bytes(budget) > memory_bytes:
            budget -= 1
        return budget

    def oom_probability(self, allocated_bytes: int, memory_bytes: float) -> float:
        """Return the probability (0 to 1) that a device runs out of memory.

        memory_bytes : device memory, including CUDA and NCCL.
        """
        return oom_probability_of_kind(
            self.kind, allocated_bytes, memory_bytes - self.context_bytes
        )

    @property
    def sentence(self) -> str:
        """Formula of reserved memory in words, a line of `defaults used`."""
        why = "" if self.odds is None else f" (--oom-risk {self.odds:g})"
        context = f"{self.context_bytes / GIB:g} GiB"
        return f"reserved memory is allocated * {1.0 + self.share:.4g} + {context}{why}"


def reserve_of(options: SearchOptions, spec: ModelSpec) -> Reserve:
    """Return the allocator overhead and context of the options.

    The overhead is `--reserve` if given, else follows from `--oom-risk`. Measured runs are mostly
    of Megatron-LM in bf16; other engines and precisions have few, so their margin is larger.
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
