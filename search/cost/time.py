"""Time of a layer on a rank, in seconds: forward and backward of one micro-batch, tail of a step.

Source: cost-model.md sections 1 to 5, 7 and 10. Every function works on flat arrays of rows; the
result is split into the categories that a person wants to see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import F64, I64
from autopar.model import LayerProfile, LayerSpec, head_dim
from autopar.plans import LayerStrategy
from autopar.statistics import latency_bandwidth_fit, rising_fit
from search.cost.communication import Groups
from search.cost.fits import ComputeFits
from search.cost.tables import ActivationLayout, Pricing, Rows

__all__ = [
    "BACKWARD_FACTOR",
    "Exchange",
    "LayerTime",
    "OptimizerCurve",
    "TensorParallelTime",
    "Way",
    "fit_optimizer",
    "gradient_sync_s",
    "layer_time",
    "layout_of",
    "optimizer_s",
    "overlap_s",
    "overlapped_backward_s",
    "plan_exchange",
    "redistribution_s",
    "ring_s",
    "send_s",
    "tensor_parallel_s",
    "ulysses_s",
]


# --------------------------------------------------------------------------------------------------
# Overlap of communication with compute: one scalar slows down both while both run.
#
# Source: cost-model.md sections 3, 5 and 7. All times in seconds, arrays broadcast.


def overlap_s(window_s: F64, comm_s: F64, coefficient: float) -> F64:
    """Return the time of `window_s` of compute beside `comm_s` of communication, in seconds.

    min(k*min(x, y) + |x - y|, x + y): the shorter runs wholly beside the longer, k times slower.
    """
    # the shorter is slowed down by k while both run, the rest of the longer runs alone
    both = coefficient * np.minimum(window_s, comm_s) + np.abs(window_s - comm_s)
    # k above 2 would make overlap slower than one after the other
    return np.minimum(both, window_s + comm_s)


def overlapped_backward_s(
    compute_s: F64,
    windows: tuple[tuple[F64, F64], ...],
    other_comm_s: F64,
    coefficient: float,
) -> F64:
    """Return the backward of a layer whose communications hide under its compute, in seconds.

    max(B + sum_i (overlap(w_i, y_i) - w_i), overlap(B, sum_i y_i + y_other)): each tensor-parallel
    message y_i hides only in its own window w_i, and all messages together share the compute B.
    """
    separate = compute_s
    together = other_comm_s
    for window_s, comm_s in windows:
        # the window is a part of B already: only its excess lengthens the backward
        separate = separate + (overlap_s(window_s, comm_s, coefficient) - window_s)
        together = together + comm_s
    # two limits on what hides, each in its own window and all under B: the tighter one counts
    return np.maximum(separate, overlap_s(compute_s, together, coefficient))


# --------------------------------------------------------------------------------------------------
# The optimizer step as it was measured: seconds over the parameters that a rank updates.
#
# Source: cost-model.md "Compute". Sidecars time the step of one layer at every tensor degree, for
# the parameters that a rank of the tensor group holds, not sharded by data.


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerCurve:
    """Seconds of one module's step over its parameters on a rank, rising."""

    parameters: F64
    """(n + 1,) 0, then the numbers that were measured."""
    times_s: F64
    """(n + 1,) what a step takes however few parameters it has, then the measured steps."""

    def step_s(self, parameters: F64) -> F64:
        """Return the step of so many parameters on a rank, 0 without any, in seconds.

        Straight between the points; beyond the largest at its seconds per parameter.
        """
        inside = np.interp(parameters, self.parameters, self.times_s)
        beyond = parameters * (self.times_s[-1] / self.parameters[-1])
        known = np.where(parameters > self.parameters[-1], beyond, inside)
        # the curve begins at its launch, but a rank without parameters launches nothing
        return np.where(parameters > 0.0, known, 0.0)


def fit_optimizer(layers: Iterable[tuple[LayerProfile, float]]) -> OptimizerCurve | None:
    """Return the curve through the measured steps of all layer types; None without any.

    layers : profile and parameters of an unsharded layer. A rank of a tensor group holds them over
    the degree, one of Ulysses all. Lengths and batches do not matter to a step, so a number of
    parameters has the median of its cells. The launch is that of the non-negative line through all
    points, 0 with one, and at most the smallest step.
    """
    found: dict[float, list[float]] = {}
    for profile, parameters in layers:
        for cell in profile.sharded_times:
            if cell.optimizer_s is not None:
                share = 1 if cell.kind == "ulysses" else cell.degree
                found.setdefault(parameters / share, []).append(cell.optimizer_s)
    if not found:
        return None
    # length and batch do not change a step: the cells of one size differ by noise alone
    sizes = sorted(found)
    # a larger step that was timed faster is noise, and no plan may win by it
    times = rising_fit(np.array([float(np.median(found[size])) for size in sizes]))
    # the smallest step contains its launch, so none can be longer
    launch = min(latency_bandwidth_fit(sizes, list(times)).latency_s, float(times[0]))
    return OptimizerCurve(
        parameters=np.array([0.0, *sizes]), times_s=np.array([launch, *times], dtype=np.float64)
    )


# --------------------------------------------------------------------------------------------------
# Layouts of the activation between layers, and the cost of changing from one to another.
#
# Source: cost-model.md section 8 and the transfer part of section 9. A stage has W/p ranks; the
# fully sharded activation of a micro-batch is X = g*S*h*e*p/W bytes on each of them.


def layout_of(strategy: LayerStrategy, *, sequence_parallel: bool) -> ActivationLayout:
    """Return the layout of a layer's input and output."""
    # without SP every tensor rank holds the whole activation: replicas instead of shards
    sharded = strategy.ulysses or sequence_parallel
    return ActivationLayout(
        sequence_shards=strategy.cp * (strategy.tp if sharded else 1),
        cp=strategy.cp,
        replicas=1 if sharded else strategy.tp,
        # a tensor group of one rank has no neighbours to be apart from
        strided=strategy.strided and strategy.tp > 1,
    )


@dataclass(frozen=True, kw_only=True, order=True)
class Exchange:
    """One collective of a redistribution; its message is `multiple` times X."""

    operation: str
    size: int
    stride: int
    multiple: int


Way = tuple[tuple[Exchange, ...], ...]
"""Collectives of one direction: a sum over alternatives, each the maximum of its members."""


def plan_exchange(source: ActivationLayout, target: ActivationLayout) -> tuple[Way, Way]:
    """Return the collectives that turn `source` into `target`: forward, and backward.

    Sharded to sharded (one copy each): an all-to-all in groups of lcm/gcd of the sequence
    shards, over the larger context degree where that differs (the slower of both where both do).
    Only the replicas differ: an all-gather in groups of their ratio, forward where they grow and
    backward where they shrink. Otherwise: an all-to-all in groups of lcm/gcd of shards*replicas
    where that differs, and the all-gather.
    """
    q1, q2, r1, r2 = (
        source.sequence_shards,
        target.sequence_shards,
        source.replicas,
        target.replicas,
    )
    # where one number of shards divides the other, ranks that far apart hold
    # the same shard of other samples
    stride = math.gcd(q1, q2) if source.cp == target.cp else 1
    if r1 == r2 == 1:
        moves = []
        if q1 != q2:
            # other shards regroup samples, another c reorders their zigzag chunks:
            # where both happen the slower counts
            moves.append(_all_to_all(q1, q2, stride, 1))
        if source.cp != target.cp:
            ring = max(source.cp, target.cp)
            moves.append(Exchange(operation="all2all", size=ring, stride=1, multiple=1))
        # the gradient goes back the way that the activation came
        both: Way = (tuple(moves),) if moves else ()
        return both, both
    forward: list[tuple[Exchange, ...]] = []
    backward: list[tuple[Exchange, ...]] = []
    w1, w2 = q1 * r1, q2 * r2
    if q1 != q2 and w1 != w2:
        stride = math.gcd(w1, w2) if source.cp == target.cp else 1
        # copies are made by the all-gather behind it: only those that both sides have move here
        move = (_all_to_all(w1, w2, stride, min(r1, r2)),)
        forward.append(move)
        backward.append(move)
    if r1 != r2:
        stride = math.gcd(q1 * r1, q2 * r2) if q1 == q2 else math.gcd(q1, q2)
        stride = stride if source.cp == target.cp else 1
        small, large = sorted((r1, r2))
        gather = (
            # the message of an all-gather is what it gathers: X times the larger number of copies
            Exchange(operation="allgather", size=-(-large // small), stride=stride, multiple=large),
        )
        # Copies are dropped for free: forward only growth communicates, backward the reverse.
        # Degrees that do not divide each other leave samples to fetch in both directions.
        if r2 > r1 or large % small:
            forward.append(gather)
        if r2 < r1 or large % small:
            backward.append(gather)
    return tuple(forward), tuple(backward)


def _all_to_all(first: int, second: int, stride: int, multiple: int) -> Exchange:
    size = math.lcm(first, second) // math.gcd(first, second)
    return Exchange(operation="all2all", size=size, stride=stride, multiple=multiple)


def redistribution_s(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    world_size: int,
    groups: Groups,
) -> tuple[F64, F64]:
    """Return forward and backward redistribution, each (N, K, Y, Y) seconds.

    sharded_bytes : (N, K) X of every table and layer type; stages : (N,) p. Where the rank order
    differs, as between strided and neighbouring tensor ranks, every sample changes its ranks: an
    all-to-all of X*max r over the whole stage, or the ordinary exchange if that is slower.
    Layouts that no stage of this world can hold together cost nothing here, their rows are not
    valid.
    """
    count = len(layouts)
    plans = [[plan_exchange(a, b) for b in layouts] for a in layouts]
    # many pairs of layouts share one way: each is priced once
    ways: dict[Way, int] = {(): 0}
    index = np.zeros((2, count, count), dtype=np.int64)
    for i, row in enumerate(plans):
        for j, pair in enumerate(row):
            for k, way in enumerate(pair):
                index[k, i, j] = ways.setdefault(way, len(ways))

    flat = sharded_bytes.ravel()
    cost = np.zeros((flat.size, len(ways)))
    known: dict[Exchange, F64] = {}
    for way, number in ways.items():
        # collectives follow one another, and members of one run at once until the slowest ends
        for slowest in way:
            times = [_exchange_s(e, flat, world_size, groups, known) for e in slowest]
            cost[:, number] += np.maximum.reduce(times)
    cost = cost.reshape(*sharded_bytes.shape, len(ways))
    forward, backward = cost.take(index[0], axis=-1), cost.take(index[1], axis=-1)
    if any(layout.strided for layout in layouts):
        across = _reorder_s(layouts, sharded_bytes, stages, world_size, groups)
        # changing the order moves every sample and carries the ordinary exchange with it
        forward, backward = np.maximum(forward, across), np.maximum(backward, across)
    return forward, backward


def _reorder_s(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    world_size: int,
    groups: Groups,
) -> F64:
    """(N, K, Y, Y) seconds of the all-to-all over a stage where the rank order differs, else 0.

    The order is that of the data ranks: they are neighbours with strided tensor ranks, so it
    depends on the strided degree; a tensor group of the whole stage has one order only.
    """
    replicas = np.array([layout.replicas for layout in layouts], dtype=np.float64)
    # the side with more copies has the larger tensor on a rank
    copies = np.maximum.outer(replicas, replicas)
    degree = np.array([x.sequence_shards // x.cp * x.replicas for x in layouts], dtype=np.int64)
    strided = np.array([layout.strided for layout in layouts], dtype=np.bool_)
    result = np.zeros((*sharded_bytes.shape, len(layouts), len(layouts)))
    for p in sorted(set(stages.tolist())):
        ranks, rest = divmod(world_size, p)
        if rest or ranks == 1:
            # such a table is not valid, and a single rank has no order
            continue
        # a strided group of the whole stage has stride 1: it is in the order of neighbours
        order = np.where(strided & (degree < ranks), degree, 1)
        tables = np.flatnonzero(stages == p)
        local = sharded_bytes[tables].ravel()
        group = np.full(local.shape, groups.index(ranks, 1), dtype=np.int64)
        for multiple in sorted(set(replicas.tolist())):
            seconds = groups.seconds("all2all", local * multiple, group)
            where = (order[:, None] != order[None, :]) & (copies == multiple)
            # Not a product: the time is infinite where the stage's bandwidth is unknown.
            result[tables] += np.where(where, seconds.reshape(len(tables), -1, 1, 1), 0.0)
    return result


def _exchange_s(
    exchange: Exchange,
    sharded_bytes: F64,
    world_size: int,
    groups: Groups,
    known: dict[Exchange, F64],
) -> F64:
    if exchange not in known:
        if exchange.size > world_size:
            known[exchange] = np.zeros_like(sharded_bytes)
        else:
            group = np.full(
                sharded_bytes.shape, groups.index(exchange.size, exchange.stride), dtype=np.int64
            )
            known[exchange] = groups.seconds(
                exchange.operation, sharded_bytes * exchange.multiple, group
            )
    return known[exchange]


def send_s(
    layouts: Sequence[ActivationLayout], sharded_bytes: F64, stages: I64, groups: Groups
) -> F64:
    """Return the transfer of an activation to the next stage, (N, K, Y) seconds; 0 for p == 1.

    X * replicas from every rank of a stage at once, in the time of a message between p stages.
    """
    replicas = np.array([layout.replicas for layout in layouts], dtype=np.float64)
    result = np.zeros((*sharded_bytes.shape, len(layouts)))
    for p in sorted(set(stages.tolist()) - {1}):
        rows = stages == p
        result[rows] = groups.point_to_point_s(p, sharded_bytes[rows][:, :, None], replicas)
    return result


# --------------------------------------------------------------------------------------------------
# A layer: forward, backward and tail, by category.


BACKWARD_FACTOR = 2.0
"""Backward divided by forward, where the backward is not measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTime:
    """Seconds by category, each (n,): of one micro-batch, and `step` once per training step."""

    forward: dict[str, F64]
    """forward, tp, ulysses, cp, zero3"""
    backward: dict[str, F64]
    """backward, recompute, tp, ulysses, cp, zero3, sync (reduction in every micro-batch)"""
    step: dict[str, F64]
    """tail (exposed reduction and ZeRO-2 gather), optimizer"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallelTime:
    """Communication of Megatron tensor parallelism, each (n,) seconds."""

    forward_s: F64
    exposed_backward_s: F64
    input_gradient_s: F64
    """Hides under the input-gradient GEMMs of the column-parallel linears."""
    weight_gradient_s: F64


def tensor_parallel_s(rows: Rows, spec: LayerSpec, pricing: Pricing) -> TensorParallelTime:
    """Return the messages of Megatron tensor parallelism, V = b*S*h*e/c bytes each, in seconds.

    With SP: forward 2 AG + 2 RS; backward 2 AG exposed, 2 re-gathers beside the input-gradient
    and 2 RS beside the weight-gradient GEMMs. Without: forward 2 AR, backward 2 AR beside the
    weight-gradient GEMMs. A layer with cross attention has three such blocks instead of two.
    """
    groups, recipe = pricing.groups, pricing.recipe
    # attention and MLP are a block each, and so is cross attention
    blocks = 3.0 if spec.cross_attention else 2.0
    # one tensor rank exchanges nothing, and Ulysses exchanges heads
    megatron = np.flatnonzero(~rows.ulysses & (rows.tensor > 1.0))
    count = np.zeros_like(rows.batch)
    zero = np.zeros_like(count)
    if not megatron.size:
        return TensorParallelTime(
            forward_s=zero, exposed_backward_s=zero, input_gradient_s=zero, weight_gradient_s=zero
        )
    # V: the group's b samples, of whose tokens a context rank has 1/c
    token_bytes = float(spec.seq_length) * spec.hidden_size * recipe.element
    message = (rows.batch[megatron] / rows.context[megatron]) * token_bytes
    group = rows.tensor_group[megatron]
    if not pricing.options.sequence_parallel:
        reduce = count
        # a row-parallel product is a partial sum that every tensor rank needs whole
        reduce[megatron] = blocks * groups.seconds("allreduce", message, group)
        return TensorParallelTime(
            forward_s=reduce,
            exposed_backward_s=zero,
            input_gradient_s=zero,
            # gradients of the inputs are partial sums too; weight gradients do not wait for them
            weight_gradient_s=reduce,
        )
    gather, scatter = count, np.zeros_like(count)
    # before the column-parallel product tokens are gathered, behind the row-parallel one scattered
    gather[megatron] = blocks * groups.seconds("allgather", message, group, sequence=True)
    scatter[megatron] = blocks * groups.seconds("reducescatter", message, group, sequence=True)
    return TensorParallelTime(
        forward_s=gather + scatter,
        # the gradient of a block's output is gathered before anything is computed with it
        exposed_backward_s=gather,
        # inputs are kept scattered, and gathered again for the backward
        input_gradient_s=gather,
        # what the forward gathered is scattered in the backward
        weight_gradient_s=scatter,
    )


def ulysses_s(rows: Rows, spec: LayerSpec, pricing: Pricing) -> F64:
    """Return the all-to-alls of Ulysses in one direction, in seconds.

    q and the output move b*(S/c)*heads*head_dim*e/t each (h where heads are unknown), k and v are
    scaled by max(kv_heads, t)/heads.
    """
    groups, recipe = pricing.groups, pricing.recipe
    result = np.zeros_like(rows.batch)
    at = np.flatnonzero(rows.ulysses & (rows.tensor > 1.0))
    if at.size:
        attentions = 2.0 if spec.cross_attention else 1.0
        heads = spec.num_heads
        width = spec.hidden_size
        if heads is not None:
            # heads times their width may differ from the hidden size
            width = heads * head_dim(spec)
        token_bytes = float(spec.seq_length) * width * recipe.element
        # the message of an all-to-all is the tensor of one rank, 1/(t*c) of the group's
        query = rows.batch[at] * token_bytes / rows.shards[at]
        key_value = query
        if heads is not None:
            # a rank computes with whole heads: below t heads of k and v are copied to t
            key_value = query * (np.maximum(spec.num_kv_heads or heads, rows.tensor[at]) / heads)
        group = rows.tensor_group[at]
        # q and the output have one size, k and v the other
        result[at] = (2.0 * attentions) * (
            groups.seconds("all2all", query, group) + groups.seconds("all2all", key_value, group)
        )
    return result


def ring_s(
    rows: Rows, spec: LayerSpec, attention_sample_s: float, pricing: Pricing
) -> tuple[F64, F64]:
    """Return the exposed ring exchanges of context parallelism, forward and backward, in seconds.

    An exchange moves K and V, 2*b*(S/c)*(kv_heads*head_dim/t)*e bytes. Forward: c-1 of them, one
    beside each attention step; backward: in c-1 steps K,V and dK,dV, in the last dK,dV alone.
    """
    groups, coefficient = pricing.groups, pricing.hardware.overlap_coefficient
    forward, backward = np.zeros_like(rows.batch), np.zeros_like(rows.batch)
    at = np.flatnonzero(rows.context > 1.0)
    if not at.size:
        return forward, backward
    t, c, b = rows.tensor[at], rows.context[at], rows.batch[at]
    width = np.full_like(t, float(spec.hidden_size)) / t
    if spec.num_heads is not None:
        # a rank computes with whole heads, so it holds one of k and v at least
        width = np.maximum(spec.num_kv_heads or spec.num_heads, t) * head_dim(spec) / t
    # 2.0: k and v travel together
    message = 2.0 * b * (spec.seq_length / c) * width * pricing.recipe.element
    # every rank sends to the next at once, the whole message: a ring's bandwidth without (g-1)/g
    exchange = message / groups.bus_bytes_per_s(rows.context_group[at])
    # a rank has 1/(t*c) of the attention, in c steps with the keys of one rank each
    step = b * attention_sample_s / rows.shards[at] / c
    # cross attention has a ring of its own
    rings = 2.0 if spec.cross_attention else 1.0
    # the last step has its keys already: c - 1 exchanges in c steps
    forward[at] = rings * (c - 1.0) * (overlap_s(step, exchange, coefficient) - step)
    back = BACKWARD_FACTOR * step
    # k and v travel with their gradients; in the last step only the gradients go on
    backward[at] = rings * (
        (c - 1.0) * (overlap_s(back, 2.0 * exchange, coefficient) - back)
        + (overlap_s(back, exchange, coefficient) - back)
    )
    return forward, backward


def gradient_sync_s(parameters: F64, rows: Rows, pricing: Pricing) -> tuple[F64, F64]:
    """Return gradient reduction and parameter gathering of a layer, in seconds.

    ddp: AR(N*e_g); sharded by ZeRO: RS(N*e_g). The gathering AG(w*N) is 0 without ZeRO.
    """
    groups, recipe, group = pricing.groups, pricing.recipe, rows.zero_group
    gradients = parameters * recipe.gradient
    # a shard of the optimizer needs its share of the sum only, a whole one needs all of it
    reduce = np.zeros_like(parameters)
    # ZeRO-3 gathers before each use and ZeRO-2 once behind the optimizer: the message is the same
    gather = np.zeros_like(parameters)
    yes, no = np.flatnonzero(rows.sharded), np.flatnonzero(~rows.sharded)
    if yes.size:
        reduce[yes] = groups.seconds("reducescatter", gradients[yes], group[yes])
        weights = parameters[yes] * recipe.weight
        gather[yes] = groups.seconds("allgather", weights, group[yes])
    if no.size:
        reduce[no] = groups.seconds("allreduce", gradients[no], group[no])
    return reduce, gather


def optimizer_s(
    parameters: F64, rows: Rows, pricing: Pricing, measured: OptimizerCurve | None
) -> F64:
    """Return the optimizer step of the parameters on the ZeRO shard, in seconds.

    The measured curve; without one 26 bytes per parameter (28 with fp32 gradients) over the memory
    bandwidth, 0 when that is unknown.
    """
    shard = parameters / np.where(rows.sharded, rows.zero_size, 1.0)
    if measured is not None:
        # the curve knows the launch, so it is asked at the shard and not divided
        return measured.step_s(shard)
    rate = pricing.hardware.memory_bytes_per_s
    if rate is None:
        return np.zeros_like(parameters)
    return shard * (pricing.recipe.step_bytes / rate)


def layer_time(
    rows: Rows,
    spec: LayerSpec,
    fits: ComputeFits,
    parameter_count: float,
    attention_sample_s: float,
    pricing: Pricing,
    optimizer: OptimizerCurve | None,
) -> LayerTime:
    """Return the time of every row by category, in seconds.

    attention_sample_s : attention part of one sample's unsharded forward, the ring's window;
    optimizer : its measured step, if there is one.
    """
    options, coefficient = pricing.options, pricing.hardware.overlap_coefficient
    compute = fits.seconds("forward", rows)
    backward = fits.seconds("backward", rows, BACKWARD_FACTOR * compute)
    # a checkpointed layer runs its forward again, exposed messages included
    again = np.where(rows.checkpoint, 1.0, 0.0)
    recompute = again * fits.seconds("recompute", rows, compute)
    tensor = tensor_parallel_s(rows, spec, pricing)
    ulysses = ulysses_s(rows, spec, pricing)
    ring_forward, ring_backward = ring_s(rows, spec, attention_sample_s, pricing)
    # tensor ranks share a layer's parameters, ranks of Ulysses have all of them
    parameters = parameter_count / np.where(rows.ulysses, 1.0, rows.tensor)
    reduce, gather = gradient_sync_s(parameters, rows, pricing)
    # ZeRO-3 drops what it gathered after each pass, so both passes gather
    gather3 = np.where(rows.zero3, gather, 0.0)

    # Exposed part of what the windows hide, then of the parameters, then of the reduction.
    exposed = tensor.exposed_backward_s
    windows: tuple[tuple[F64, F64], ...] = ()
    if options.tp_overlap:
        # input and weight gradients are half of it each, windows their column-parallel parts
        window = backward / 2.0 * options.column_parallel_share
        windows = ((window, tensor.input_gradient_s), (window, tensor.weight_gradient_s))
    else:
        exposed = exposed + tensor.input_gradient_s + tensor.weight_gradient_s
    busy = backward + recompute
    nothing = np.zeros_like(busy)
    # with one message more each time, so that a category is what its message adds
    with_tensor = overlapped_backward_s(busy, windows, nothing, coefficient)
    with_gather = overlapped_backward_s(busy, windows, gather3, coefficient)
    with_reduce = overlapped_backward_s(busy, windows, gather3 + reduce, coefficient)
    sync = np.maximum(with_reduce - with_gather, 0.0)
    # gathered behind the optimizer, ZeRO-2's weights hide only under the next step's forward
    gather_tail = np.where(rows.zero2, overlap_s(compute, gather, coefficient) - compute, 0.0)

    backward_parts = {
        "backward": backward,
        "recompute": recompute,
        "tp": exposed + again * tensor.forward_s + (with_tensor - busy),
        "ulysses": ulysses * (1.0 + again),
        "cp": ring_backward + again * ring_forward,
        "zero3": with_gather - with_tensor,
        # asynchronous reduction runs in the last micro-batch only: then it is part of the tail
        "sync": nothing if options.async_grad_reduce else sync,
    }
    return LayerTime(
        forward={
            "forward": compute,
            "tp": tensor.forward_s,
            "ulysses": ulysses,
            "cp": ring_forward,
            "zero3": overlap_s(compute, gather3, coefficient) - compute,
        },
        backward=backward_parts,
        step={
            "tail": (sync if options.async_grad_reduce else nothing) + gather_tail,
            "optimizer": optimizer_s(parameters, rows, pricing, optimizer),
        },
    )
