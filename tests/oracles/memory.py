"""The memory of a launch, written a second time: sums over layers, a pipeline played move by move.

Without it `autopar.price` would be compared with itself. It is written from the formulas of
docs/memory.md and shares nothing with the product but the record of a launch. The allocator here
keeps a plain list of holes, and the pipeline a list of what is live. Muon, Megatron-FSDP and 8-bit
weights are not here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.records import replace
from autopar.run.launch import Launch

MIB = 1048576


class _Sizes(NamedTuple):
    """What every formula needs, by the letters of the page."""

    t: int
    p: int
    v: int
    h: int
    e: int
    tokens: int
    scattered: int
    vocab: int


def _sizes(launch: Launch) -> _Sizes:
    degrees, model = launch.degrees, launch.model
    tokens = launch.micro_batch * launch.seq // degrees.cp
    unit = model.vocab_divisor * degrees.tp
    return _Sizes(
        t=degrees.tp,
        p=degrees.pp,
        v=len(degrees.chunks[0]),
        h=model.hidden,
        e=4 if launch.precision.kind == "fp32" else 2,
        tokens=tokens,
        scattered=tokens // degrees.tp if degrees.sequence_parallel else tokens,
        vocab=(model.vocab + unit - 1) // unit * unit,
    )


# --------------------------------------------------------------------------------------------------
# Weights: a list of (elements, of experts, shape of a product, has 8-bit copies, tied).


def _layer(launch: Launch, s: _Sizes, experts: bool) -> list[tuple]:
    model = launch.model
    a, x = model.attention, model.experts
    q = 2 if model.norm == "layer" else 1
    gates = 2 if model.gated else 1
    found: list[tuple] = []

    def matrix(rows: int, columns: int, bias: int, *, expert: bool = False, number: int = 1):
        found.extend([(rows * columns, expert, (rows, columns), True, False)] * number)
        if bias:
            found.extend([(bias, expert, None, False, False)] * number)

    def vector(size: int, number: int) -> None:
        if size:
            found.extend([(size, False, None, False, False)] * number)

    value = a.latent.value_width if a.latent else a.width
    matrix(s.h, a.heads * value // s.t, s.h if model.biases else 0)
    vector(s.h, q)
    if a.latent is None:
        rows = (a.heads + 2 * a.groups) * a.width // s.t
        matrix(rows, s.h, rows if model.qkv_biases else 0)
        if a.head_norms:
            vector(a.width, 2 * q)
    else:
        query = a.heads * (a.latent.key_width + a.latent.rotary_width) // s.t
        if a.latent.query_rank is None:
            matrix(query, s.h, 0)
        else:
            matrix(a.latent.query_rank, s.h, 0)
            matrix(query, a.latent.query_rank, 0)
        matrix(a.latent.key_value_rank + a.latent.rotary_width, s.h, 0)
        rows = a.heads * (a.latent.key_width + a.latent.value_width) // s.t
        matrix(rows, a.latent.key_value_rank, 0)
        if a.head_norms:
            vector(a.latent.query_rank or 0, q)
            vector(a.latent.key_value_rank, q)
    vector(s.h, q)

    def mlp(width: int, ranks: int, *, expert: bool = False, number: int = 1) -> None:
        rows = gates * (width // ranks) if expert else gates * width // ranks
        matrix(rows, s.h, rows if model.biases else 0, expert=expert, number=number)
        bias = s.h if model.biases else 0
        matrix(s.h, width // ranks, bias, expert=expert, number=number)

    if experts:
        assert x is not None
        found.append((x.number * s.h, False, None, False, False))
        local = x.number // launch.degrees.ep
        mlp(x.ffn, launch.degrees.etp, expert=True, number=local)
        if x.shared_ffn:
            mlp(x.shared_ffn, s.t)
    else:
        mlp(model.ffn, s.t)
    return found


def _chunk(launch: Launch, s: _Sizes, chunk: tuple) -> list[tuple]:
    embeds, layers, mtp, head = chunk
    model = launch.model
    q = 2 if model.norm == "layer" else 1
    words = s.vocab // s.t * s.h
    shape = (s.vocab // s.t, s.h)
    found: list[tuple] = []
    two_copies = model.tied and s.p > 1
    if embeds or mtp:
        is_head = embeds and head and model.tied
        shared = two_copies or (mtp > 0 and not embeds)
        found.append((words, False, shape if is_head else None, False, shared))
    if embeds and model.positions == "learned":
        found.append((model.max_positions * s.h, False, None, False, False))
    for layer in layers:
        found += _layer(launch, s, model.expert_layers[layer])
    if head:
        found += [(s.h, False, None, False, False)] * q
    for _ in range(1 if model.mtp_repeated and mtp else mtp):
        found += [(s.h, False, None, False, False)] * (2 * q)
        found.append((s.h // s.t * 2 * s.h, False, (s.h // s.t, 2 * s.h), True, False))
        found += _layer(launch, s, model.expert_layers[-1])
        found += [(s.h, False, None, False, False)] * q
    if head and not (embeds and model.tied):
        found.append((words, False, shape, False, two_copies))
    return found


# --------------------------------------------------------------------------------------------------
# Blocks.


class _Blocks:
    """Holes in a plain list; the smallest that fits is taken."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.holes: list[int] = []
        self.extra = 0

    def take(self, size: int) -> None:
        asked = size
        size = math.ceil(size / 512) * 512
        if size > MIB and not self.expandable:
            fitting = [hole for hole in self.holes if hole >= size]
            if fitting:
                hole = min(fitting)
                self.holes.remove(hole)
            elif size < 10 * MIB:
                hole = 20 * MIB
            else:
                hole = math.ceil(size / (2 * MIB)) * 2 * MIB
            if hole - size > MIB:
                self.holes.append(hole - size)
            else:
                size = hole
        self.extra += size - asked


def _come_and_go(size: int, expandable: bool, hole: int = 0) -> int:
    size = math.ceil(size / 512) * 512
    if not expandable and size > MIB and 0 <= hole - size <= MIB:
        return hole
    whole = math.ceil(size / (2 * MIB)) * 2 * MIB
    return whole if not expandable and size > MIB and whole - size <= MIB else size


# --------------------------------------------------------------------------------------------------
# After a step.


def _buffers(launch: Launch, s: _Sizes, weights: list[tuple]) -> list[tuple]:
    """Return (expert, elements, replicas, spans, weights with 8-bit copies) of a chunk."""
    degrees, optimizer = launch.degrees, launch.optimizer
    found = []
    for expert in (False, True):
        group = [weight for weight in weights if weight[1] == expert]
        if not group:
            continue
        eighth = sum(weight[0] for weight in group if weight[3])
        if optimizer.sharding == "none":
            sizes = [weight[0] for weight in group]
            found.append((expert, sum(sizes), 1, sizes, eighth))
            continue
        ranks = launch.degrees.world // s.p
        ranks //= degrees.etp * degrees.ep if expert else s.t
        parts = max(1, ranks // optimizer.instances)
        unit = parts * 128 // math.gcd(parts, 128)
        most = max(40_000_000, 1_000_000 * ranks) if optimizer.overlap_gradients else math.inf
        buckets: list[list[int]] = [[]]
        for weight in group[::-1]:
            # a bucket is a list of weights; tied ones are alone
            if weight[4] and buckets[-1]:
                buckets.append([])
            buckets[-1].append(weight[0])
            length = 0
            for size in buckets[-1]:
                length = math.ceil(length / 64) * 64 + size
            if length >= most or weight[4]:
                buckets.append([])
        total, spans = 0, []
        for bucket in buckets:
            if not bucket:
                continue
            places, length = [], 0
            for size in bucket:
                start = math.ceil(length / 64) * 64
                length = start + size
                places.append((start, length))
            whole = math.ceil(length / unit) * unit
            first = whole - whole // parts
            total += whole
            spans += [b - max(a, first) for a, b in places[::-1] if b > first]
        found.append((expert, total, parts, spans, eighth))
    return found


def _states(launch: Launch, s: _Sizes, chunks: list[list[tuple]]) -> tuple[int, int]:
    """Return the bytes of states after a step, and of them what fp16 has only then."""
    kind = launch.precision.kind
    gradient = (
        4 if kind == "fp32" or (kind == "bf16" and not launch.precision.gradients_bf16) else 2
    )
    buffers = [buffer for chunk in chunks for buffer in _buffers(launch, s, chunk)]
    blocks = _Blocks(launch.software.expandable_segments)
    total = only_then = 0
    if launch.optimizer.sharding == "none":
        for weight in (weight for chunk in chunks for weight in chunk):
            blocks.take(weight[0] * s.e)
    for _, elements, parts, _, eighth in buffers:
        if launch.optimizer.sharding != "none":
            blocks.take(elements * s.e)
        blocks.take(elements * gradient)
        own = elements // parts
        total += elements * (s.e + gradient) + own * (12 if s.e == 2 else 8)
        if launch.precision.fp8:
            one = launch.software.gpu == "GB200" and launch.precision.fp8_recipe != "mxfp8"
            total += eighth if one else 2 * eighth
        if kind == "fp16":
            only_then += 4 * own
    spans = [n for which in (False, True) for b in buffers if b[0] == which for n in b[3]]
    if s.e == 2:
        for span in spans:
            blocks.take(4 * span)
    for span in spans:
        blocks.take(4 * span)
        blocks.take(4 * span)
    if kind == "fp16":
        for span in spans:
            blocks.take(4 * span)
    return total + only_then + blocks.extra, only_then


def _kept(launch: Launch, s: _Sizes, stage: int, chunks: list[list[tuple]]) -> tuple[int, int]:
    """Return workspaces and kept buffers, and of them the inputs of a pipeline."""
    software, model, degrees = launch.software, launch.model, launch.degrees
    x = model.experts
    total = 0
    if software.cublas_config == ":4096:8":
        total += 2 * 32 * MIB
    else:
        total += 2 * (32 * MIB if software.gpu == "H100" else 8 * MIB + MIB // 8)
    one = (4 if software.gpu == "A100" else 32) * MIB
    if software.local_layers:
        total += one if x is not None and software.expert_workspace else 0
    else:
        number = 1 + (software.grouped_workspaces if x is not None and x.grouped else 0)
        total += one * (number + (2 if launch.tensor_overlap else 0))
    if launch.tensor_overlap:
        total += 12 * s.tokens * s.h * s.e
    pipeline = 2 * s.v * s.scattered * s.h * s.e if s.p > 1 else 0
    gathered = [0]
    here = degrees.chunks[stage]
    gathers = software.local_layers or any(chunk[3] for chunk in here)
    if degrees.sequence_parallel and s.t > 1 and gathers:
        gathered.append(s.tokens * s.h)
    kinds = [model.expert_layers[layer] for chunk in here for layer in chunk[1]]
    kinds += [model.expert_layers[-1] for chunk in here if chunk[2]]
    all_to_all = x is None or x.dispatcher != "allgather" or True not in kinds
    if not all_to_all and degrees.ep * degrees.etp > 1:
        gathered.append(s.scattered * degrees.ep * degrees.etp * s.h)
    if software.attention == "local":
        length = launch.seq // degrees.cp
        gathered.append(launch.micro_batch * (model.attention.heads // s.t) * length * length)
    total += max(gathered) * s.e
    layers = [layer for chunk in degrees.chunks[stage] for layer in chunk[1]]
    mtp = sum(chunk[2] for chunk in degrees.chunks[stage])
    latent = model.attention.latent
    if latent is not None:
        total += (len(layers) + mtp) * 4 * latent.rotary_width * (launch.seq + 4096)
    elif model.positions == "rotary":
        width = int(model.attention.width * model.rotary_share)
        total += 4 * (launch.seq // degrees.cp) * width
    if x is not None:
        number = sum(model.expert_layers[layer] for layer in layers)
        number += mtp * model.expert_layers[-1]
        ranks = degrees.ep * degrees.etp if x.dispatcher == "allgather" else 1
        each = s.scattered * ranks * (x.number + 8)
        if x.fused_permutation:
            each += s.scattered * (12 * x.number + 4)
        total += number * each
    if software.fused_accumulation and software.kept_dummies:
        shapes = {weight[2] for chunk in chunks for weight in chunk if weight[2]}
        total += s.e * sum(a * b for a, b in shapes)
    return total + pipeline, pipeline


def states_bytes(launch: Launch, stage: int) -> int:
    """Return what a rank of a stage has allocated after a step."""
    s = _sizes(launch)
    chunks = [_chunk(launch, s, chunk) for chunk in launch.degrees.chunks[stage]]
    return _states(launch, s, chunks)[0] + _kept(launch, s, stage, chunks)[0]


# --------------------------------------------------------------------------------------------------
# At the peak.


def _attention(launch: Launch, s: _Sizes) -> list[int]:
    model, again = launch.model, launch.recompute.modules
    a = model.attention
    heads = a.heads // s.t
    thin = 1 if launch.precision.fp8 else s.e
    tokens = s.tokens
    if a.latent is None:
        sizes = [tokens * a.width * (a.heads + 2 * a.groups) // s.t * s.e]
        if launch.software.attention == "flash" and not a.head_norms and launch.degrees.cp == 1:
            each = tokens * a.width * a.groups // s.t * s.e
            sizes = [tokens * a.width * heads * s.e, each, each]
        if a.head_norms:
            groups = tokens * a.width * a.groups // s.t * s.e
            sizes += [tokens * a.width * heads * s.e, groups, groups]
            each = 8 if model.norm == "layer" else 4
            sizes.append(tokens * (a.heads + a.groups) // s.t * each)
        value = a.width
    else:
        r, k = a.latent.query_rank or 0, a.latent.key_value_rank
        width = a.latent.key_width + a.latent.rotary_width
        value = a.latent.value_width
        sizes = [tokens * r * s.e, tokens * (k + a.latent.rotary_width) * s.e]
        if a.head_norms:
            sizes.append(tokens * (r + k) * thin)
        if "mla_up_proj" not in again:
            sizes += [tokens * heads * w * s.e for w in (width, width, value)]
    if model.positions == "rotary" and not model.fused_rotary:
        width = a.latent.rotary_width if a.latent else int(a.width * model.rotary_share)
        sizes.append(4 * (launch.seq // launch.degrees.cp) * width * s.e)
    out = tokens * heads * value
    scores = launch.micro_batch * heads * (launch.seq // launch.degrees.cp) * launch.seq
    kernel = launch.software.attention
    if "core_attn" in again:
        sizes.append(out * s.e)
    elif kernel in ("unfused", "local"):
        sizes += [out * thin, scores * s.e]
        if a.dropout:
            sizes += [scores * s.e, scores]
    else:
        sizes.append(out * s.e)
        split = launch.degrees.heads_exchanged or launch.degrees.keys_gathered
        if kernel == "flash" or launch.precision.fp8 or split:
            sizes.append(out * thin)
        sizes.append(tokens * heads * 4)
    return sizes


def _behind(launch: Launch, s: _Sizes, experts: bool) -> tuple[list[int], int]:
    """Return what a layer saves from its second norm on, and the output of its first product."""
    model, again, degrees = launch.model, launch.recompute.modules, launch.degrees
    thin = 1 if launch.precision.fp8 else s.e
    gates = 2 if model.gated else 1
    whole = s.scattered * s.h
    sizes = [whole * s.e]
    if "layernorm" not in again:
        sizes.append(whole * (s.e if experts else thin))
    first = 0

    def mlp(width: int) -> list[int]:
        inner = s.tokens * (width // s.t)
        found = [gates * inner * s.e, inner * thin]
        return [*found, inner * s.e] if model.gated and not model.fused_gate else found

    if not experts:
        if "mlp" not in again:
            dense = mlp(model.ffn)
            first = dense[0]
            sizes += dense
    elif "moe" not in again:
        x = model.experts
        assert x is not None
        skew = 1.1 if x.number == degrees.ep else 1.025
        if launch.steps is None or launch.steps >= 1000:
            skew = 1.17
        skew = 1.0 if degrees.ep == 1 else skew if x.skew is None else x.skew
        routed = math.ceil(s.scattered * degrees.etp * x.per_token * skew)
        inner = routed * (x.ffn // degrees.etp)
        # grouped products of 8 bits keep two copies
        copies = (2 if x.grouped else 1) if launch.precision.fp8 else s.e
        first = gates * inner * s.e
        sizes += [routed * s.h * copies, first]
        if x.dispatcher == "allgather" and degrees.etp > 1 and launch.software.regathered_experts:
            sizes.append(routed * s.h * s.e)
        if "moe_act" not in again:
            sizes.append(inner * copies)
            if x.grouped and launch.software.saved_expert_output:
                sizes.append(routed * s.h * s.e)
            elif not (x.fused_weighting or (x.grouped and launch.software.compiled_experts)):
                sizes.append(inner * s.e)
        sizes.append(s.scattered * x.number * 9)
        if x.shared_ffn and "shared_experts" not in again:
            sizes += mlp(x.shared_ffn)
    if model.hidden_dropout:
        sizes.append(whole)
    sizes.append(16 * s.tokens)
    return sizes, first


def _layer_saved(launch: Launch, s: _Sizes, experts: bool) -> list[int]:
    whole = s.scattered * s.h
    sizes = [whole * s.e]
    if "layernorm" not in launch.recompute.modules:
        sizes.append(whole if launch.precision.fp8 else whole * s.e)
    sizes += _attention(launch, s)
    if launch.model.hidden_dropout:
        sizes.append(whole)
    return sizes + _behind(launch, s, experts)[0]


def _saved(launch: Launch, s: _Sizes, chunk: tuple) -> list[int]:
    embeds, layers, mtp, head = chunk
    model, recompute = launch.model, launch.recompute
    whole = s.scattered * s.h
    sizes: list[int] = [whole] if embeds and model.hidden_dropout else []
    for place, layer in enumerate(layers):
        if recompute.layers == "uniform":
            sizes += [whole * s.e] if place % recompute.number == 0 else []
        elif recompute.layers == "block" and place < recompute.number:
            sizes.append(whole * s.e)
        else:
            sizes += _layer_saved(launch, s, model.expert_layers[layer])
    for _ in range(mtp):
        sizes += _layer_saved(launch, s, model.expert_layers[-1])
    return sizes + [whole * s.e] * (2 if head else 0)


def _kept_layers(launch: Launch, chunk: tuple) -> int:
    """Return the layers of a chunk, with MTP modules, that are not recomputed as a whole."""
    recompute = launch.recompute
    layers = len(chunk[1])
    if recompute.layers == "uniform":
        layers = 0
    elif recompute.layers == "block":
        layers = max(0, layers - recompute.number)
    return layers + chunk[2]


def _backward(launch: Launch, s: _Sizes, chunk: tuple) -> int:
    """Return what a chunk's backward adds to what is live, less what it has freed, at its most."""
    _, layers, mtp, head = chunk
    if not layers and not mtp:
        return 0
    experts = launch.model.expert_layers[-1 if mtp else layers[-1]]
    again = 0
    recompute = launch.recompute
    if not mtp and recompute.layers == "uniform":
        again = recompute.number * sum(_layer_saved(launch, s, experts))
    elif not mtp and recompute.layers == "block" and recompute.number >= len(layers):
        again = sum(_layer_saved(launch, s, experts))
    whole = s.scattered * s.h * s.e
    behind = _behind(launch, s, experts)[0]
    # modules are computed again, each before its own backward
    bare = launch
    if recompute.modules:
        bare = replace(launch, recompute=replace(recompute, modules=frozenset()))
    all_behind, first = _behind(bare, s, experts)
    late = sum(all_behind) - sum(behind)
    core = launch
    if "core_attn" in recompute.modules:
        others = recompute.modules - {"core_attn"}
        core = replace(launch, recompute=replace(recompute, modules=others))
    early = sum(_attention(core, s)) - sum(_attention(launch, s))
    freed = 2 * whole if head else 0
    most = again + late + first + whole - freed
    if again or "moe" in recompute.modules:
        most = max(most, again + late + _dispatched(launch, s, chunk) - freed)
    if launch.software.attention in ("unfused", "local"):
        heads = launch.model.attention.heads // s.t
        scores = launch.micro_batch * heads * (launch.seq // launch.degrees.cp) * launch.seq
        copies = launch.software.unfused_backward_copies
        most = max(most, again + early + scores * s.e * copies - freed - sum(behind))
    return most


def _dispatched(launch: Launch, s: _Sizes, chunk: tuple) -> int:
    """Return tokens between ranks of experts when the last mixture of a chunk is done."""
    _, layers, mtp, _ = chunk
    kinds = [launch.model.expert_layers[layer] for layer in layers]
    kinds += [launch.model.expert_layers[-1]] * mtp
    x, degrees = launch.model.experts, launch.degrees
    if not kinds or not kinds[-1] or x is None:
        return 0
    skew = 1.1 if x.number == degrees.ep else 1.025
    if launch.steps is None or launch.steps >= 1000:
        skew = 1.17
    skew = 1.0 if degrees.ep == 1 else skew if x.skew is None else x.skew
    routed = math.ceil(s.scattered * degrees.etp * x.per_token * skew)
    split, several = degrees.ep * degrees.etp > 1, x.number // degrees.ep > 1
    # one of either, two where they are both sent and sorted; of what goes in the last one is saved
    copies = {(False, False): 2, (True, False): 3, (False, True): 3, (True, True): 4}
    shared = s.scattered * s.h * s.e if x.shared_ffn else 0
    everyone = s.scattered * degrees.ep * degrees.etp
    if x.dispatcher == "allgather":
        return (routed + everyone) * s.h * s.e + shared
    if x.dispatcher == "flex":
        return (routed + 2 * min(routed, everyone)) * s.h * s.e + shared
    return copies[split, several] * routed * s.h * s.e + shared


def _head(launch: Launch, s: _Sizes, mtp: int) -> int:
    numbers = s.tokens * (s.vocab // s.t)
    if launch.loss_fusion == "te":
        halves = s.tokens * s.h
        if launch.degrees.sequence_parallel and s.t > 1:
            halves += s.scattered * s.h
        # what was in front of it is sent no more where stages follow each other once
        halves -= s.scattered * s.h if s.p > 1 and s.v == 1 else 0
        return (numbers * (1 + mtp) + halves) * s.e
    each = 4 + (2 if s.e == 2 else 0) + 4 * mtp
    if launch.loss_fusion == "native":
        each += 2 * (launch.software.fused_loss_copies - 3)
    return numbers * each


def peak_bytes(launch: Launch, stage: int) -> int:
    """Return what a rank of a stage has allocated at most, by playing its moves one by one."""
    s = _sizes(launch)
    degrees = launch.degrees
    weights = [_chunk(launch, s, chunk) for chunk in degrees.chunks[stage]]
    states, only_then = _states(launch, s, weights)
    kept, pipeline = _kept(launch, s, stage, weights)
    base = states - only_then + kept - pipeline
    tokens = s.tokens
    if stage in (0, s.p - 1):
        base += 12 * tokens + (tokens * launch.seq if launch.attention_masks else 0)
    # tensors that are sent or received, in a forward and in a backward
    sent = (0, 0) if s.p == 1 else (3, 3) if s.v > 1 else (1, 0) if stage == 0 else (2, 2)
    sent = tuple(n * s.scattered * s.h * s.e for n in sent)

    chunks = degrees.chunks[stage]
    expandable = launch.software.expandable_segments
    a = launch.model.attention
    apart = launch.software.attention == "flash" and not (a.head_norms or a.latent)
    apart = apart and degrees.cp == 1
    hole = tokens * a.width * (a.heads + 2 * a.groups) // s.t * s.e if apart else 0
    mask = s.scattered * s.h if launch.model.hidden_dropout else 0
    saved = []
    for c in chunks:
        blocks = [(n, _come_and_go(n, expandable)) for n in _saved(launch, s, c)]
        # masks, of which a layer has two and the embedding one, land in what was copied
        masks = int(c[0]) + 2 * _kept_layers(launch, c) if mask else 0
        more = _come_and_go(mask, expandable, hole) - _come_and_go(mask, expandable)
        saved.append(sum(block for _, block in blocks) + masks * more)
    exact = [sum(_saved(launch, s, chunk)) for chunk in chunks]
    assert all(a >= b for a, b in zip(saved, exact, strict=True))

    # forwards in groups of micro-batches, backwards in the same order with chunks reversed
    group = degrees.group or s.p
    moves = []
    for first in range(0, launch.micro_batches, group):
        some = range(first, min(first + group, launch.micro_batches))
        moves += [(chunk, micro) for chunk in range(s.v) for micro in some]
    ahead = s.p - 1 - stage
    if s.v > 1:
        ahead = 2 * ahead + (s.v - 1) * group
    ahead += int(degrees.overlap_experts)
    ahead = min(ahead, len(moves))
    most = 0
    live: list[tuple[int, int]] = []
    logits: set[int] = set()
    left = [(s.v - 1 - chunk, micro) for chunk, micro in moves]

    def forward(chunk: int, micro: int) -> int:
        live.append((chunk, micro))
        here = sum(saved[c] for c, _ in live) + sent[0]
        waiting = 4 * s.tokens * (s.vocab // s.t) if logits else 0
        extra = _dispatched(launch, s, chunks[chunk])
        if chunks[chunk][3]:
            extra -= 2 * s.scattered * s.h * s.e
            logits.add(micro)
            deferred = 0
            if launch.deferred_head is not None:
                numbers = s.tokens * (s.vocab // s.t + 3 * s.h)
                deferred = launch.deferred_head * numbers * s.e
            extra = max(extra, _head(launch, s, chunks[chunk][2]) + deferred)
        return here + waiting + extra

    def backward(chunk: int, micro: int) -> int:
        waiting = 4 * s.tokens * (s.vocab // s.t) if logits else 0
        if chunks[chunk][3]:
            logits.discard(micro)
            waiting -= 4 * s.tokens * (s.vocab // s.t)
        here = sum(saved[c] for c, _ in live) + sent[1]
        live.remove((chunk, micro))
        return here + waiting + _backward(launch, s, chunks[chunk])

    for at in range(ahead):
        most = max(most, forward(*moves[at]))
    for at in range(len(moves) - ahead):
        most = max(most, forward(*moves[ahead + at]))
        most = max(most, backward(*left[at]))
    for move in left[len(moves) - ahead :]:
        most = max(most, backward(*move))
    assert not live
    return base + most
