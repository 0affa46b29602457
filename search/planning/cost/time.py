"""Time of a layer on a rank, in seconds: forward and backward of one micro-batch, tail of a step.

Source: cost-model.md sections 1 to 5, 7 and 10. Every function works on flat arrays of rows; the
result is split into the categories that are shown to users.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

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
# Source: cost-model.md "Compute". Sidecars time the step of one layer at every tensor degree, for
# the parameters that a rank of the tensor group holds, not sharded by data.


class OptimizerCurve(Record, eq=False):
    """Seconds of one module's optimizer step over its parameters on a rank, rising."""

    parameters: F64
    """(n + 1,) 0, then the measured numbers of parameters."""
    times_s: F64
    """(n + 1,) launch seconds, independent of parameters, then the measured steps."""

    def step_s(self, parameters: F64) -> F64:
        """Return the seconds of a step of `parameters` on a rank, 0 without any.

        Linear between the points; beyond the largest at its seconds per parameter.
        """
        inside = np.interp(parameters, self.parameters, self.times_s)
        beyond = parameters * (self.times_s[-1] / self.parameters[-1])
        known = np.where(parameters > self.parameters[-1], beyond, inside)
        # the curve begins at its launch, but a rank without parameters launches nothing
        return np.where(parameters > 0.0, known, 0.0)


def fit_optimizer(layers: Iterable[tuple[LayerProfile, float]]) -> OptimizerCurve | None:
    """Return the curve through the measured steps of all layer types; None if none was measured.

    A rank of a tensor group holds the parameters over the degree, one of Ulysses all. Lengths and
    batches do not affect a step, so each number of parameters uses the median of its times. The
    launch is that of the non-negative line through all points, 0 with one point, and at most the
    smallest step.

    layers : profile and parameters of an unsharded layer.
    """
    found: dict[float, list[float]] = {}
    for profile, parameters in layers:
        for cell in profile.sharded_times:
            if cell.optimizer_s is not None:
                share = 1 if cell.kind == "ulysses" else cell.degree
                found.setdefault(parameters / share, []).append(cell.optimizer_s)
    if not found:
        return None
    # length and batch do not change a step: times of one size differ only by noise
    sizes = sorted(found)
    # a larger step that was timed faster is noise, and must not favour a plan
    times = rising_fit(np.array([float(np.median(found[size])) for size in sizes]))
    # the smallest step contains its launch, so the launch cannot be longer
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
        # a tensor group of one rank has no stride
        strided=strategy.strided and strategy.tp > 1,
    )


class Exchange(Record, order=True):
    """One collective of a redistribution; its message is `multiple` times X."""

    operation: str
    size: int
    stride: int
    multiple: int


Way = tuple[tuple[Exchange, ...], ...]
"""Collectives of one direction: a sum of steps, each the maximum of its concurrent members."""


def plan_exchange(source: ActivationLayout, target: ActivationLayout) -> tuple[Way, Way]:
    """Return the collectives that change `source` to `target`, (forward, backward).

    Sharded to sharded (one copy each): an all-to-all in groups of lcm/gcd of the sequence shards.
    If the context degree differs, it is over the larger one; if both differ, the slower of the two
    counts. Only the replicas differ: an all-gather in groups of their ratio, forward where they
    grow and backward where they shrink. Otherwise: an all-to-all in groups of lcm/gcd of
    shards*replicas where that differs, and the all-gather.
    """
    q1, q2, r1, r2 = (
        source.sequence_shards,
        target.sequence_shards,
        source.replicas,
        target.replicas,
    )
    # if one number of shards divides the other, ranks at that distance hold the same shard of other
    # samples
    stride = math.gcd(q1, q2) if source.cp == target.cp else 1
    if r1 == r2 == 1:
        moves = []
        if q1 != q2:
            # other shards regroup samples, another c reorders their zigzag chunks:
            # if both happen, the slower counts
            moves.append(_all_to_all(q1, q2, stride, 1))
        if source.cp != target.cp:
            ring = max(source.cp, target.cp)
            moves.append(Exchange(operation="all2all", size=ring, stride=1, multiple=1))
        # the gradient takes the reverse way of the activation
        both: Way = (tuple(moves),) if moves else ()
        return both, both
    forward: list[tuple[Exchange, ...]] = []
    backward: list[tuple[Exchange, ...]] = []
    w1, w2 = q1 * r1, q2 * r2
    if q1 != q2 and w1 != w2:
        stride = math.gcd(w1, w2) if source.cp == target.cp else 1
        # the all-gather makes the copies afterwards: only those that both sides have move here
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
        # Dropping copies is free: forward only growth communicates, backward the reverse. Degrees
        # that do not divide each other leave samples to fetch in both directions.
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
    """Return (forward, backward) redistribution, each (N, K, Y, Y) seconds.

    If the rank order differs, as between strided and neighbouring tensor ranks, every sample
    changes its ranks. This is an all-to-all of X*max r over the whole stage, or the ordinary
    exchange if that is slower. Layouts that no stage of this world can hold together cost nothing
    here; their rows are not valid.

    sharded_bytes : (N, K) X of every table and layer type.
    stages : (N,) p.
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
        # steps follow one another, and members of a step run at once until the slowest ends
        for slowest in way:
            cost[:, number] += np.maximum.reduce([known[i] for i in slowest])
    cost = cost.reshape(*sharded_bytes.shape, len(ways))
    forward, backward = cost.take(index[0], axis=-1), cost.take(index[1], axis=-1)
    if any(layout.strided for layout in layouts):
        across = _reorder_s(layouts, sharded_bytes, stages, world_size, groups)
        # changing the order moves every sample and includes the ordinary exchange
        forward, backward = np.maximum(forward, across), np.maximum(backward, across)
    return forward, backward


@lru_cache(maxsize=256)
def _ways(
    layouts: tuple[ActivationLayout, ...],
) -> tuple[tuple[Exchange, ...], tuple[tuple[tuple[int, ...], ...], ...], I64]:
    """Return (exchanges between layouts, ways as numbers of exchanges, ways of all pairs).

    The last are (2, Y, Y) numbers of ways. Cached, because plans and searches share few layouts.
    """
    # many pairs of layouts share one way, which is priced once
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
    """Return the seconds of the all-to-all over a stage, (N, K, Y, Y); 0 for equal rank order.

    The order is that of the data ranks. They are neighbours with strided tensor ranks, so it
    depends on the strided degree. A tensor group of the whole stage has only one order.
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
        # a strided group of the whole stage has stride 1, the order of neighbours
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


def send_s(
    layouts: Sequence[ActivationLayout],
    sharded_bytes: F64,
    stages: I64,
    groups: Groups,
    *,
    scattered: bool = False,
) -> F64:
    """Return the transfer of an activation to the next stage, (N, K, Y) seconds; 0 for p == 1.

    All ranks of a stage send X * replicas at once, in the time of a message between p stages.

    scattered : True if each rank sends a share of the copies, as engines do.
    """
    copies = [1 if scattered else layout.replicas for layout in layouts]
    replicas = np.array(copies, dtype=np.float64)
    return groups.transfers_s(stages, sharded_bytes, replicas)


# --------------------------------------------------------------------------------------------------
# A layer: forward, backward and tail, by category.


BACKWARD_FACTOR = 2.0
"""Backward over forward time if the backward is not measured."""


def tensor_parallel_messages(rows: Rows, spec: LayerSpec, pricing: Pricing) -> list[Message]:
    """Return the messages of a block of Megatron tensor parallelism, V = b*S*h*e/c bytes each.

    With SP an all-gather and a reduce-scatter, else an all-reduce; empty if no row has any.
    """
    # a single tensor rank exchanges nothing, and Ulysses exchanges heads
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
    """Return the all-to-alls of a Ulysses attention in one direction: of q, of k or v.

    q and the output move b*(S/c)*heads*head_dim*e/t each (h if heads are unknown). k and v are
    scaled by max(kv_heads, t)/heads. Empty if no row has any.
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
    """Return the exposed context-parallel communication, (forward, backward) in seconds.

    A ring's exchange moves K and V, 2*b*(S/c)*(kv_heads*head_dim/t)*e bytes. Forward: c-1 of them,
    each overlapped with an attention step. Backward: K,V and dK,dV in c-1 steps, in the last only
    dK,dV. Gathered (`cp_kind`), c of them are one all-gather before the attention; the backward
    gathers again and then scatters dK,dV. Causal work is even in both, as every rank has one early
    and one late piece. None if no row has any.
    """
    groups, coefficient = pricing.groups, pricing.hardware.overlap_coefficient
    at = (rows.context > 1.0).nonzero()[0]
    if not at.size:
        return None
    forward, backward = np.zeros_like(rows.batch), np.zeros_like(rows.batch)
    t, c, b = rows.tensor[at], rows.context[at], rows.batch[at]
    width = np.full_like(t, float(spec.hidden_size)) / t
    if spec.num_heads is not None:
        # a rank computes with whole heads, so it holds at least one of k and v
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
    # all ranks send the whole message to the next at once: a ring's bandwidth without (g-1)/g
    exchange = message / groups.bus_bytes_per_s(rows.context_group[at])
    # a rank has 1/(t*c) of the attention, in c steps with the keys of one rank each
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
    """Return the messages of gradients and parameters: reduce-scatter, all-gather, all-reduce.

    ddp: AR(N*e_g); sharded by ZeRO: RS(N*e_g), and AG(w*N) of the parameters. ZeRO-3 gathers before
    each use and ZeRO-2 once after the optimizer: the message is the same.
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
    """Return the optimizer step of the parameters on the ZeRO shard, in seconds.

    Uses the measured curve. Without one: 26 bytes per parameter (28 with fp32 gradients) over the
    memory bandwidth, 0 if that is unknown.
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
    """Return the time of every row by category, in seconds.

    parameters : (n,) of the layer on a rank.
    attention_sample_s : attention seconds of one sample's unsharded forward, the ring's window.
    optimizer : measured optimizer step, None if not measured.

    Tensor parallelism with SP: forward 2 AG + 2 RS; backward 2 AG exposed, 2 re-gathers overlapped
    with the input-gradient and 2 RS with the weight-gradient GEMMs. Without: forward 2 AR, backward
    2 AR overlapped with the weight-gradient GEMMs. A layer with cross attention has three such
    blocks. Estimates use the overlap factors of the engine's software stack: `estimated_time`.
    """
    options, coefficient = pricing.options, pricing.hardware.overlap_coefficient
    compute = fits.seconds("forward", rows)
    backward = fits.seconds("backward", rows, BACKWARD_FACTOR * compute)
    # a checkpointed layer repeats its forward, exposed messages included
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

    # Exposed time beyond the windows, then of the parameters, then of the reduction.
    windows: tuple[tuple[F64, F64], ...] = ()
    if options.tp_overlap:
        # input and weight gradients are half of it each, windows their column-parallel parts
        window = backward / 2.0 * options.column_parallel_share
        windows = ((window, input_gradient), (window, weight_gradient))
    else:
        exposed = exposed + input_gradient + weight_gradient
    busy = backward + recompute
    # one more message in each element, so that a category is what its message adds
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
