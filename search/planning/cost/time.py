"""Time of a layer on a rank, seconds: forward and backward of one micro-batch, tail of a step.

Source: cost-model.md sections 1 to 5, 7 and 10. Functions take flat arrays of rows and return the
categories that are reported to users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import median

import numpy as np

from autopar.arrays import F64, I64
from autopar.records import Record
from autopar.run.model import LayerProfile, LayerSpec, head_dim
from autopar.run.plan import LayerStrategy
from autopar.statistics import latency_bandwidth_fit, rising_fit
from search.planning.cost.communication import Asking, Groups, Message
from search.planning.cost.fits import ComputeFits
from search.planning.cost.overlap import (
    IsolatedTimes,
    LayerTime,
    estimated_time,
    exposed_tensor_s,
    overlap_s,
    overlapped_backward_s,
)
from search.planning.cost.tables import ActivationLayout, Pricing, Rows

# --------------------------------------------------------------------------------------------------
# Measured optimizer step: seconds over the parameters that a rank updates.
#
# Source: cost-model.md "Compute". Sidecars contain the optimizer time of one layer at every tensor
# degree, for the parameters of a tensor rank without ZeRO.


class OptimizerCurve(Record, eq=False):
    """Optimizer time of one module as a non-decreasing function of its parameters on a rank."""

    parameters: F64
    """(n + 1,) numbers of parameters: 0, then the measured ones."""
    times_s: F64
    """(n + 1,) seconds: launch overhead, then the measured times."""

    def step_s(self, parameters: F64) -> F64:
        """Return the optimizer time for a number of parameters on a rank, seconds.

        Interpolated linearly; above the largest measured number, proportional to it. 0 without
        parameters.
        """
        inside = np.interp(parameters, self.parameters, self.times_s)
        beyond = parameters * (self.times_s[-1] / self.parameters[-1])
        known = np.where(parameters > self.parameters[-1], beyond, inside)
        # the curve begins at the launch overhead, but a rank without parameters launches no kernel
        return np.where(parameters > 0.0, known, 0.0)


def fit_optimizer(layers: Iterable[tuple[LayerProfile, float]]) -> OptimizerCurve | None:
    """Return the optimizer times of all layer types over parameters; None if not measured.

    A tensor rank holds 1/t of the parameters, a Ulysses rank all. Sequence length and batch do not
    affect the optimizer, so the median of all times at a number of parameters is used. The launch
    overhead is the intercept of a non-negative line through all points (0 for one point), at most
    the smallest time.

    layers : (profile, number of parameters of the unsharded layer) of each layer type.
    """
    found: dict[float, list[float]] = {}
    for profile, parameters in layers:
        for cell in profile.sharded_times:
            if cell.optimizer_s is not None:
                share = 1 if cell.kind == "ulysses" else cell.degree
                found.setdefault(parameters / share, []).append(cell.optimizer_s)
    if not found:
        return None
    sizes = sorted(found)
    # a smaller time for more parameters is noise, which must not favour a plan
    times = rising_fit(np.array([median(found[size]) for size in sizes]))
    # the smallest time includes the launch overhead, which therefore cannot be larger
    launch = min(latency_bandwidth_fit(sizes, list(times)).latency_s, float(times[0]))
    return OptimizerCurve(
        parameters=np.array([0.0, *sizes]), times_s=np.array([launch, *times], dtype=np.float64)
    )


# --------------------------------------------------------------------------------------------------
# Layouts of the activation between layers, and redistribution from one layout to another.
#
# Source: cost-model.md section 8 and the transfer part of section 9. A stage has W/p ranks; the
# fully sharded activation of a micro-batch is X = g*S*h*e*p/W bytes on each of them.


def layout_of(strategy: LayerStrategy, *, sequence_parallel: bool) -> ActivationLayout:
    """Return the distribution of a layer's input and output over the ranks of a stage."""
    # without SP every tensor rank holds the whole activation: replicas instead of shards
    sharded = strategy.ulysses or sequence_parallel
    return ActivationLayout(
        sequence_shards=strategy.cp * (strategy.tp if sharded else 1),
        cp=strategy.cp,
        replicas=1 if sharded else strategy.tp,
        # a tensor group of one rank has no stride
        strided=strategy.strided and strategy.tp > 1,
    )


class Exchange(Record, order=True):
    """Collective of a redistribution in groups (size, stride), with `multiple` times X bytes."""

    operation: str
    size: int
    stride: int
    multiple: int


Way = tuple[tuple[Exchange, ...], ...]
"""Collectives of one direction: consecutive steps, each of concurrent collectives."""


def plan_exchange(source: ActivationLayout, target: ActivationLayout) -> tuple[Way, Way]:
    """Return the collectives that redistribute an activation, (forward, backward).

    - No replicas, other sequence shards: all-to-all in groups of lcm/gcd of the shards.
    - No replicas, other context degree: all-to-all in groups of the larger context degree. If both
      differ, both run concurrently.
    - Other number of replicas: all-gather in groups of their ratio, in the forward if replicas
      increase, in the backward if they decrease, and in both if no number divides the other.
    - Replicas, and other sequence shards: if shards*replicas differ, an all-to-all in groups of
      their lcm/gcd precedes the all-gather.
    """
    q1, q2, r1, r2 = (
        source.sequence_shards,
        target.sequence_shards,
        source.replicas,
        target.replicas,
    )
    # if one number of shards divides the other, ranks at that distance hold the same shard of
    # different samples
    stride = math.gcd(q1, q2) if source.cp == target.cp else 1
    if r1 == r2 == 1:
        moves = []
        if q1 != q2:
            # other shards regroup samples, another context degree reorders their zigzag chunks
            moves.append(_all_to_all(q1, q2, stride, 1))
        if source.cp != target.cp:
            ring = max(source.cp, target.cp)
            moves.append(Exchange(operation="all2all", size=ring, stride=1, multiple=1))
        # the gradient needs the reverse collectives of the activation
        both: Way = (tuple(moves),) if moves else ()
        return both, both
    forward: list[tuple[Exchange, ...]] = []
    backward: list[tuple[Exchange, ...]] = []
    w1, w2 = q1 * r1, q2 * r2
    if q1 != q2 and w1 != w2:
        stride = math.gcd(w1, w2) if source.cp == target.cp else 1
        # the all-gather then makes the other copies, so only common replicas are sent here
        move = (_all_to_all(w1, w2, stride, min(r1, r2)),)
        forward.append(move)
        backward.append(move)
    if r1 != r2:
        stride = math.gcd(q1 * r1, q2 * r2) if q1 == q2 else math.gcd(q1, q2)
        stride = stride if source.cp == target.cp else 1
        small, large = sorted((r1, r2))
        gather = (
            # the message of an all-gather is its result: X times the larger number of copies
            Exchange(operation="allgather", size=-(-large // small), stride=stride, multiple=large),
        )
        # Dropping replicas is free: the forward communicates only if replicas increase, the
        # backward if they decrease. If no number divides the other, both directions communicate.
        if r2 > r1 or large % small:
            forward.append(gather)
        if r2 < r1 or large % small:
            backward.append(gather)
    return tuple(forward), tuple(backward)


def _all_to_all(first: int, second: int, stride: int, multiple: int) -> Exchange:
    size = math.lcm(first, second) // math.gcd(first, second)
    return Exchange(operation="all2all", size=size, stride=stride, multiple=multiple)


def redistribution(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    world_size: int,
    groups: Groups,
) -> Asking[tuple[F64, F64]]:
    """Return the redistribution between all pairs of layouts, (forward, backward).

    Each array is (N, K, Y, Y) seconds. If the rank order differs, as between strided and contiguous
    tensor groups, every sample moves to other ranks. This is an all-to-all of X times the larger
    number of replicas over the stage, or `plan_exchange` if that is slower. Groups larger than
    `world_size` cost 0, since rows of such layouts are not valid.

    sharded_bytes : (N, K) fully sharded activation X of every table and layer type.
    stages : (N,) numbers of stages p.
    """
    exchanges, ways, index = _ways(tuple(layouts))
    flat = sharded_bytes.ravel()
    # groups larger than the world have no cost
    possible = {i: e for i, e in enumerate(exchanges) if e.size <= world_size}
    seconds = yield [
        Message(
            operation=e.operation,
            num_bytes=flat * e.multiple,
            group=np.full(flat.shape, groups.index(e.size, e.stride), dtype=np.int64),
        )
        for e in possible.values()
    ]
    known = [np.zeros_like(flat)] * len(exchanges)
    for i, found in zip(possible, seconds, strict=True):
        known[i] = found
    cost = np.zeros((flat.size, len(ways)))
    for number, way in enumerate(ways):
        # steps run one after the other; the slowest collective of a step determines its time
        for slowest in way:
            cost[:, number] += np.maximum.reduce([known[i] for i in slowest])
    cost = cost.reshape(*sharded_bytes.shape, len(ways))
    forward, backward = cost.take(index[0], axis=-1), cost.take(index[1], axis=-1)
    if any(layout.strided for layout in layouts):
        across = _reorder_s(layouts, sharded_bytes, stages, world_size, groups)
        # a change of the rank order moves every sample, which includes the redistribution
        forward, backward = np.maximum(forward, across), np.maximum(backward, across)
    return forward, backward


@lru_cache(maxsize=256)
def _ways(
    layouts: tuple[ActivationLayout, ...],
) -> tuple[tuple[Exchange, ...], tuple[tuple[tuple[int, ...], ...], ...], I64]:
    """Return the distinct collectives of all pairs of layouts, and their use by each pair.

    The result is (collectives; sequences of steps as indices of collectives; (2, Y, Y) index of the
    sequence of each direction and pair). Cached, because searches use few sets of layouts.
    """
    # many pairs of layouts have equal collectives, which are priced once
    ways: dict[Way, int] = {(): 0}
    numbers = [
        [ways.setdefault(way, len(ways)) for way in plan_exchange(a, b)]
        for a in layouts
        for b in layouts
    ]
    index = np.array(numbers, dtype=np.int64).T.reshape(2, len(layouts), len(layouts))
    exchanges = list(dict.fromkeys(e for way in ways for slowest in way for e in slowest))
    numbered = tuple(
        tuple(tuple(exchanges.index(e) for e in slowest) for slowest in way) for way in ways
    )
    return tuple(exchanges), numbered, index


def _reorder_s(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    world_size: int,
    groups: Groups,
) -> F64:
    """Return the all-to-all over a stage that changes the rank order, (N, K, Y, Y) seconds.

    0 for pairs of layouts with equal order. The order depends on the degree of strided tensor
    groups; a tensor group that contains all ranks of a stage has only one order.
    """
    replicas = np.array([layout.replicas for layout in layouts], dtype=np.float64)
    # the layout with more replicas has the larger tensor per rank
    copies = np.maximum.outer(replicas, replicas)
    degree = np.array([x.sequence_shards // x.cp * x.replicas for x in layouts], dtype=np.int64)
    strided = np.array([layout.strided for layout in layouts], dtype=np.bool_)
    result = np.zeros((*sharded_bytes.shape, len(layouts), len(layouts)))
    for p in sorted(set(stages.tolist())):
        ranks, rest = divmod(world_size, p)
        if rest or ranks == 1:
            # such a table is not valid, and a single rank has no order
            continue
        # a strided group of the whole stage has stride 1, the order of neighbours
        order = np.where(strided & (degree < ranks), degree, 1)
        tables = np.flatnonzero(stages == p)
        local = sharded_bytes[tables].ravel()
        group = np.full(local.shape, groups.index(ranks, 1), dtype=np.int64)
        for multiple in sorted(set(replicas.tolist())):
            seconds = groups.seconds("all2all", local * multiple, group)
            where = (order[:, None] != order[None, :]) & (copies == multiple)
            # A product would give nan: the time is infinite if the bandwidth is unknown.
            result[tables] += np.where(where, seconds.reshape(len(tables), -1, 1, 1), 0.0)
    return result


def send_s(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    groups: Groups,
    *,
    scattered: bool = False,
) -> F64:
    """Return the time of sending an activation to the next stage, (N, K, Y) seconds; 0 for p == 1.

    All ranks of a stage send X * replicas bytes concurrently.

    scattered : True if replicas are not sent: each rank sends X bytes, as engines do.
    """
    copies = [1 if scattered else layout.replicas for layout in layouts]
    replicas = np.array(copies, dtype=np.float64)
    return groups.transfers_s(stages, sharded_bytes, replicas)


# --------------------------------------------------------------------------------------------------
# Forward, backward and tail of a layer by category.


BACKWARD_FACTOR = 2.0
"""Ratio of backward to forward time if the backward is not measured."""


def tensor_parallel_messages(rows: Rows, spec: LayerSpec, pricing: Pricing) -> list[Message]:
    """Return the tensor-parallel collectives of attention or MLP in one direction.

    With SP an all-gather and a reduce-scatter, else an all-reduce, of b*S*h*e/c bytes each. Empty
    if no row has Megatron tensor parallelism.
    """
    # a single tensor rank has no collectives, and Ulysses uses all-to-alls
    if not rows.megatron.any():
        return []
    # V: the group's b samples, with 1/c of their tokens on a context-parallel rank
    token_bytes = float(spec.seq_length) * spec.hidden_size * pricing.recipe.element
    message = (rows.batch / rows.context) * token_bytes
    group = np.where(rows.megatron, rows.tensor_group, 0)
    if not pricing.options.sequence_parallel:
        return [Message(operation="allreduce", num_bytes=message, group=group)]
    return [
        Message(operation=operation, num_bytes=message, group=group, sequence=True)
        for operation in ("allgather", "reducescatter")
    ]


def ulysses_messages(rows: Rows, spec: LayerSpec, pricing: Pricing) -> list[Message]:
    """Return the all-to-alls of Ulysses attention in one direction: [q or output, k or v].

    q and the output have b*(S/c)*heads*head_dim*e/t bytes each (h instead of heads*head_dim if the
    number of heads is unknown), k and v max(kv_heads, t)/heads of that. Empty if no row has Ulysses
    ranks.
    """
    exchanges = rows.ulysses & (rows.tensor > 1.0)
    if not exchanges.any():
        return []
    heads = spec.num_heads
    width = spec.hidden_size
    if heads is not None:
        # heads times their width may differ from the hidden size
        width = heads * head_dim(spec)
    token_bytes = float(spec.seq_length) * width * pricing.recipe.element
    # the message of an all-to-all is the tensor of one rank, 1/(t*c) of the group's
    query = rows.batch * token_bytes / rows.shards
    key_value = query
    if heads is not None:
        # a rank computes with whole heads: fewer than t heads of k and v are copied to t
        key_value = query * (np.maximum(spec.num_kv_heads or heads, rows.tensor) / heads)
    group = np.where(exchanges, rows.tensor_group, 0)
    return [
        Message(operation="all2all", num_bytes=num_bytes, group=group)
        for num_bytes in (query, key_value)
    ]


def ring_s(
    rows: Rows, spec: LayerSpec, attention_sample_s: float, pricing: Pricing
) -> tuple[F64, F64] | None:
    """Return the exposed context-parallel communication, (forward, backward) seconds.

    A message of ring attention contains K and V, 2*b*(S/c)*(kv_heads*head_dim/t)*e bytes.

    - Ring, forward: c-1 messages, each overlapped with one of c attention steps.
    - Ring, backward: c-1 steps send K, V, dK and dV, the last step only dK and dV.
    - `cp_kind` all-gather: one all-gather of c messages before the attention, not overlapped. The
      backward repeats it and reduce-scatters dK and dV.

    Causal attention is balanced, since every rank has one early and one late chunk. None if no row
    has context parallelism.

    attention_sample_s : attention time of one sample's unsharded forward, seconds.
    """
    groups, coefficient = pricing.groups, pricing.hardware.overlap_coefficient
    at = (rows.context > 1.0).nonzero()[0]
    if not at.size:
        return None
    forward, backward = np.zeros_like(rows.batch), np.zeros_like(rows.batch)
    t, c, b = rows.tensor[at], rows.context[at], rows.batch[at]
    width = np.full_like(t, float(spec.hidden_size)) / t
    if spec.num_heads is not None:
        # a rank computes whole heads, so it has at least one head of k and v
        width = np.maximum(spec.num_kv_heads or spec.num_heads, t) * head_dim(spec) / t
    # 2.0: k and v are sent together
    message = 2.0 * b * (spec.seq_length / c) * width * pricing.recipe.element
    # cross attention has a separate ring
    rings = 2.0 if spec.cross_attention else 1.0
    if pricing.options.cp_kind == "all-gather":
        group, whole = rows.context_group[at], c * message
        gathered = groups.seconds("allgather", whole, group)
        forward[at] = rings * gathered
        backward[at] = rings * (gathered + groups.seconds("reducescatter", whole, group))
        return forward, backward
    # all ranks send whole messages at once: bus bandwidth without the factor (g-1)/g
    exchange = message / groups.bus_bytes_per_s(rows.context_group[at])
    # a rank computes 1/(t*c) of the attention, in c steps
    step = b * attention_sample_s / rows.shards[at] / c
    # the last step already has its keys: c - 1 exchanges in c steps
    forward[at] = rings * (c - 1.0) * (overlap_s(step, exchange, coefficient) - step)
    back = BACKWARD_FACTOR * step
    # k and v are sent with their gradients; after the last step only the gradients
    backward[at] = rings * (
        (c - 1.0) * (overlap_s(back, 2.0 * exchange, coefficient) - back)
        + (overlap_s(back, exchange, coefficient) - back)
    )
    return forward, backward


def gradient_messages(parameters: F64, rows: Rows, pricing: Pricing) -> list[Message]:
    """Return the data-parallel collectives: [reduce-scatter, all-gather, all-reduce].

    DDP: all-reduce of the gradients. ZeRO: reduce-scatter of the gradients and all-gather of the
    weights, which ZeRO-3 repeats before each use and ZeRO-1 and 2 run once after the optimizer.

    parameters : (n,) number of parameters on a rank before ZeRO.
    """
    recipe, sharded = pricing.recipe, rows.sharded
    gradients = parameters * recipe.gradient
    # a sharded optimizer needs only its share of the sum, an unsharded one all of it
    shards, whole = np.where(sharded, rows.zero_group, 0), np.where(sharded, 0, rows.zero_group)
    return [
        Message(operation="reducescatter", num_bytes=gradients, group=shards),
        Message(operation="allgather", num_bytes=parameters * recipe.weight, group=shards),
        Message(operation="allreduce", num_bytes=gradients, group=whole),
    ]


def optimizer_s(
    parameters: F64, rows: Rows, pricing: Pricing, measured: OptimizerCurve | None
) -> F64:
    """Return the optimizer time of a rank for its ZeRO shard, seconds.

    Without measured times: 26 bytes per parameter (28 with fp32 gradients) over the memory
    bandwidth, or 0 if the bandwidth is unknown.

    parameters : (n,) number of parameters on a rank before ZeRO.
    measured : measured optimizer times; None if not measured.
    """
    shard = parameters / rows.optimizer_shards
    if measured is not None:
        # the curve contains the launch, so it is evaluated at the shard instead of divided
        updated, hiding = measured.step_s(shard), pricing.hiding
        if hiding is None:
            return updated
        # ZeRO-1 and 2 shard the states; the norm is computed on unsharded gradients
        resident = measured.step_s(np.where(rows.whole_weights, parameters, shard))
        of_gradients = hiding.update_gradients * pricing.recipe.gradient
        return hiding.update_states * updated + of_gradients * resident
    rate = pricing.hardware.memory_bytes_per_s
    if rate is None:
        return np.zeros_like(parameters)
    return shard * (pricing.recipe.step_bytes / rate)


def layer_time(
    rows: Rows,
    spec: LayerSpec,
    fits: ComputeFits,
    parameters: F64,
    attention_sample_s: float,
    pricing: Pricing,
    optimizer: OptimizerCurve | None,
) -> Asking[LayerTime]:
    """Return the time of every row by category, seconds.

    Collectives of tensor parallelism for attention and MLP (three blocks with cross attention):

    - With SP: forward 2 all-gathers and 2 reduce-scatters. Backward 2 exposed all-gathers, 2
      all-gathers overlapped with input-gradient GEMMs, and 2 reduce-scatters overlapped with
      weight-gradient GEMMs.
    - Without SP: forward 2 all-reduces. Backward 2 all-reduces, overlapped with weight-gradient
      GEMMs.

    Estimates use the overlap factors of the engine's software stack: `estimated_time`.

    parameters : (n,) number of parameters of the layer on a rank before ZeRO.
    attention_sample_s : attention time of one sample's unsharded forward, seconds, which overlaps
        ring communication.
    optimizer : measured optimizer times; None if not measured.
    """
    options, coefficient = pricing.options, pricing.hardware.overlap_coefficient
    compute = fits.seconds("forward", rows)
    backward = fits.seconds("backward", rows, BACKWARD_FACTOR * compute)
    # full recomputation repeats the forward with its exposed communication
    again = rows.checkpoint.astype(np.float64)
    recompute = again * fits.seconds("recompute", rows, compute)
    tensor = tensor_parallel_messages(rows, spec, pricing)
    heads = ulysses_messages(rows, spec, pricing)
    sync = gradient_messages(parameters, rows, pricing)
    seconds = iter((yield [*tensor, *heads, *sync]))
    nothing = np.zeros_like(rows.batch)

    # attention, MLP and cross attention are one block each
    blocks = 3.0 if spec.cross_attention else 2.0
    tensor_s = [blocks * next(seconds) for _ in tensor]
    exposed = input_gradient = nothing
    if not tensor_s:
        tensor_forward = weight_gradient = nothing
    elif options.sequence_parallel:
        # Tokens are gathered before the column-parallel GEMM and scattered after the row-parallel
        # one. The gradient of a block's output is gathered before any use. Inputs are saved
        # scattered, so the backward gathers them again.
        exposed = input_gradient = tensor_s[0]
        # the backward scatters the tensors gathered in the forward
        weight_gradient = tensor_s[1]
        tensor_forward = tensor_s[0] + tensor_s[1]
    else:
        # A row-parallel GEMM gives a partial sum that every tensor rank needs complete. Gradients
        # of the inputs are partial sums too; weight gradients do not wait for them.
        tensor_forward = weight_gradient = tensor_s[0]
    # q and the output have one size, k and v the other
    attentions = 2.0 if spec.cross_attention else 1.0
    ulysses = (2.0 * attentions) * (next(seconds) + next(seconds)) if heads else nothing
    ring = ring_s(rows, spec, attention_sample_s, pricing)
    ring_forward, ring_backward = ring or (nothing, nothing)
    scattered, gather, reduced = seconds
    reduce = scattered + reduced
    updated = optimizer_s(parameters, rows, pricing, optimizer)
    if pricing.hiding is not None:
        raw = IsolatedTimes(
            forward=compute,
            backward=backward,
            recompute=recompute,
            again=again,
            tensor=exposed_tensor_s(tensor_s, pricing.hiding, options) if tensor_s else None,
            ulysses=ulysses,
            ring=(ring_forward, ring_backward),
            reduce=reduce,
            gather=gather,
            optimizer=updated,
            routing_s=0.0 if spec.num_experts is None else pricing.hiding.host_experts_s,
        )
        return estimated_time(raw, rows, pricing, pricing.hiding)
    # ZeRO-3 frees gathered weights after each pass, so both passes gather
    gather3 = np.where(rows.zero3, gather, 0.0)

    # exposed time of tensor parallelism, then of ZeRO-3 gathers, then of the gradient reduction
    windows: tuple[tuple[F64, F64], ...] = ()
    if options.tp_overlap:
        # input and weight gradients are half of the backward each; their column-parallel GEMMs
        # overlap with communication
        window = backward / 2.0 * options.column_parallel_share
        windows = ((window, input_gradient), (window, weight_gradient))
    else:
        exposed = exposed + input_gradient + weight_gradient
    busy = backward + recompute
    # each element adds one message, so that differences give the time of a category
    others = np.array((nothing, gather3, gather3 + reduce))
    with_tensor, with_gather, with_reduce = overlapped_backward_s(
        busy, windows, others, coefficient
    )
    unhidden = np.maximum(with_reduce - with_gather, 0.0)
    # ZeRO-2's gather follows the optimizer, so it overlaps only with the next step's forward
    gathering = overlap_s(compute, np.array((gather3, gather)), coefficient) - compute
    gather_tail = np.where(rows.whole_weights, gathering[1], 0.0)

    backward_parts = {
        "backward": backward,
        "recompute": recompute,
        "tp": exposed + again * tensor_forward + (with_tensor - busy),
        "ulysses": ulysses * (1.0 + again) if heads else nothing,
        "cp": ring_backward + again * ring_forward if ring else nothing,
        "zero3": with_gather - with_tensor,
        # asynchronous reduction runs only in the last micro-batch, as part of the tail
        "sync": nothing if options.async_grad_reduce else unhidden,
    }
    return LayerTime(
        forward={
            "forward": compute,
            "tp": tensor_forward,
            "ulysses": ulysses,
            "cp": ring_forward,
            "zero3": gathering[0],
        },
        backward=backward_parts,
        step={
            "tail": unhidden + gather_tail if options.async_grad_reduce else gather_tail,
            "optimizer": updated,
        },
    )
