"""An independent implementation of the memory of a run: sums over layers, and a stepwise pipeline.

Without it `autopar.price` would be compared with itself. It is written from the formulas of
docs/concepts/memory.md and shares only the record of a run with the product. Its allocator keeps a
plain list of holes, and its pipeline a list of live tensors. Muon, Megatron-FSDP and 8-bit weights
are not supported.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from autopar.run.architecture import Layer
from autopar.run.run import Run
from autopar.run.strategy import Chunk

MIB = 1048576


class _Sizes(NamedTuple):
    """Sizes used by every formula, named by the letters of docs/concepts/memory.md."""

    t: int
    p: int
    v: int
    h: int
    e: int
    tokens: int
    scattered: int
    vocab: int


def _sizes(run: Run) -> _Sizes:
    split, model = run.split, run.model
    tokens = run.strategy.micro_batch * run.seq_length // split.cp
    unit = model.vocab_divisor * split.tp
    return _Sizes(
        t=split.tp,
        p=len(run.strategy.stages),
        v=len(run.strategy.stages[0]),
        h=model.hidden,
        e=4 if run.runtime.precision.kind == "fp32" else 2,
        tokens=tokens,
        scattered=tokens // split.tp if split.sequence_parallel else tokens,
        vocab=(model.vocab + unit - 1) // unit * unit,
    )


def _modules(run: Run) -> frozenset[str]:
    """Return the modules recomputed in layers without full recomputation, MTP layers included."""
    found = [split.recompute for split in run.strategy.each_layer if split.recompute != "full"]
    return frozenset().union(*found)


# --------------------------------------------------------------------------------------------------
# Weights: a list of (elements, of experts, shape of a product, has 8-bit copies, tied).


def _layer(run: Run, s: _Sizes, layer: Layer) -> list[tuple]:
    a, x = layer.attention, layer.experts
    q = 2 if layer.norm == "layer" else 1
    gates = 2 if layer.mlp.gated else 1
    found: list[tuple] = []

    def matrix(rows: int, columns: int, bias: int, *, expert: bool = False, number: int = 1):
        found.extend([(rows * columns, expert, (rows, columns), True, False)] * number)
        if bias:
            found.extend([(bias, expert, None, False, False)] * number)

    def vector(size: int, number: int) -> None:
        if size:
            found.extend([(size, False, None, False, False)] * number)

    matrix(s.h, a.heads * a.value_width // s.t, s.h if layer.biases else 0)
    vector(s.h, q)
    if a.latent is None:
        rows = (a.heads + 2 * a.kv_heads) * a.width // s.t
        matrix(rows, s.h, rows if a.qkv_biases else 0)
        if a.head_norms != "none":
            vector(a.width, 2 * q)
    else:
        query = a.heads * (a.latent.key_width + a.latent.rotary_width) // s.t
        if a.latent.query_rank is None:
            matrix(query, s.h, 0)
        else:
            matrix(a.latent.query_rank, s.h, 0)
            matrix(query, a.latent.query_rank, 0)
        matrix(a.latent.kv_rank + a.latent.rotary_width, s.h, 0)
        rows = a.heads * (a.latent.key_width + a.value_width) // s.t
        matrix(rows, a.latent.kv_rank, 0)
        if a.head_norms != "none":
            vector(a.latent.query_rank or 0, q)
            vector(a.latent.kv_rank, q)
    vector(s.h, q)

    def mlp(width: int, ranks: int, *, expert: bool = False, number: int = 1) -> None:
        rows = gates * (width // ranks) if expert else gates * width // ranks
        matrix(rows, s.h, rows if layer.biases else 0, expert=expert, number=number)
        bias = s.h if layer.biases else 0
        matrix(s.h, width // ranks, bias, expert=expert, number=number)

    if x is not None:
        found.append((x.number * s.h, False, None, False, False))
        local = x.number // run.split.ep
        mlp(x.width, run.split.etp, expert=True, number=local)
        if x.shared_width:
            mlp(x.shared_width, s.t)
    else:
        mlp(layer.mlp.width, s.t)
    return found


def _chunk(run: Run, s: _Sizes, chunk: Chunk) -> list[tuple]:
    embeds, layers, mtp, head = chunk
    model = run.model
    q = 2 if model.last.norm == "layer" else 1
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
        found += _layer(run, s, model.each_layer[layer])
    if head:
        found += [(s.h, False, None, False, False)] * q
    for _ in range(1 if model.mtp_shared and mtp else mtp):
        found += [(s.h, False, None, False, False)] * (2 * q)
        found.append((s.h // s.t * 2 * s.h, False, (s.h // s.t, 2 * s.h), True, False))
        found += _layer(run, s, model.last)
        found += [(s.h, False, None, False, False)] * q
    if head and not (embeds and model.tied):
        found.append((words, False, shape, False, two_copies))
    return found


# --------------------------------------------------------------------------------------------------
# Blocks.


class _Blocks:
    """Allocator with a plain list of holes; the smallest hole that fits is taken."""

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


def _buffers(run: Run, s: _Sizes, weights: list[tuple]) -> list[tuple]:
    """Return (expert, elements, replicas, spans, weights with 8-bit copies) of a chunk."""
    split = run.split
    found = []
    for expert in (False, True):
        group = [weight for weight in weights if weight[1] == expert]
        if not group:
            continue
        eighth = sum(weight[0] for weight in group if weight[3])
        if not split.zero:
            sizes = [weight[0] for weight in group]
            found.append((expert, sum(sizes), 1, sizes, eighth))
            continue
        ranks = run.strategy.gpus // s.p
        ranks //= split.etp * split.ep if expert else s.t
        parts = max(1, ranks // split.replicas)
        unit = parts * 128 // math.gcd(parts, 128)
        overlaps = run.runtime.overlap.gradients
        most = max(40_000_000, 1_000_000 * ranks) if overlaps else math.inf
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


def _states(run: Run, s: _Sizes, chunks: list[list[tuple]]) -> tuple[int, int]:
    """Return the bytes of states after a step, and the part that fp16 has only then."""
    precision = run.runtime.precision
    kind = precision.kind
    gradient = 4 if kind == "fp32" or (kind == "bf16" and not precision.gradients_bf16) else 2
    buffers = [buffer for chunk in chunks for buffer in _buffers(run, s, chunk)]
    blocks = _Blocks(run.runtime.allocator.expandable)
    total = only_then = 0
    if not run.split.zero:
        for weight in (weight for chunk in chunks for weight in chunk):
            blocks.take(weight[0] * s.e)
    for _, elements, parts, _, eighth in buffers:
        if run.split.zero:
            blocks.take(elements * s.e)
        blocks.take(elements * gradient)
        own = elements // parts
        total += elements * (s.e + gradient) + own * (12 if s.e == 2 else 8)
        if precision.fp8:
            one = run.gpu == "GB200" and precision.fp8_recipe != "mxfp8"
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


def _kept(run: Run, s: _Sizes, stage: int, chunks: list[list[tuple]]) -> tuple[int, int]:
    """Return the bytes of workspaces and kept buffers, and the part for pipeline inputs."""
    kernels, model, split = run.kernels, run.model, run.split
    experts = run.runtime.experts
    x = model.experts
    total = 0
    if run.runtime.allocator.cublas == ":4096:8":
        total += 2 * 32 * MIB
    else:
        total += 2 * (32 * MIB if run.gpu == "H100" else 8 * MIB + MIB // 8)
    one = (4 if run.gpu == "A100" else 32) * MIB
    own_layers = kernels.module == "megatron"
    if own_layers:
        total += one if x is not None and kernels.quirks.expert_workspace else 0
    else:
        grouped = x is not None and experts.grouped
        number = 1 + (kernels.quirks.grouped_workspaces if grouped else 0)
        total += one * (number + (2 if run.runtime.overlap.tensor else 0))
    if run.runtime.overlap.tensor:
        total += 12 * s.tokens * s.h * s.e
    pipeline = 2 * s.v * s.scattered * s.h * s.e if s.p > 1 else 0
    gathered = [0]
    here = run.strategy.stages[stage]
    gathers = own_layers or any(chunk.head for chunk in here)
    if split.sequence_parallel and s.t > 1 and gathers:
        gathered.append(s.tokens * s.h)
    layers = [model.each_layer[layer] for chunk in here for layer in chunk.layers]
    layers += [model.last for chunk in here for _ in range(chunk.mtp)]
    mixtures = sum(layer.experts is not None for layer in layers)
    ranks = split.ep * split.etp if experts.dispatcher == "allgather" else 1
    if mixtures and ranks > 1:
        gathered.append(s.scattered * ranks * s.h)
    if kernels.attention == "local":
        length = run.seq_length // split.cp
        heads = model.attention.heads // s.t
        gathered.append(run.strategy.micro_batch * heads * length * length)
    total += max(gathered) * s.e
    latent = model.attention.latent
    if latent is not None:
        total += len(layers) * 4 * latent.rotary_width * (run.seq_length + 4096)
    elif model.positions == "rotary":
        width = int(model.attention.width * model.attention.rotary_share)
        total += 4 * (run.seq_length // split.cp) * width
    if x is not None:
        each = s.scattered * ranks * (x.number + 8)
        if experts.fused_permutation:
            each += s.scattered * (12 * x.number + 4)
        total += mixtures * each
    if kernels.fused_accumulation and kernels.quirks.kept_dummies:
        shapes = {weight[2] for chunk in chunks for weight in chunk if weight[2]}
        total += s.e * sum(a * b for a, b in shapes)
    return total + pipeline, pipeline


def states_bytes(run: Run, stage: int) -> int:
    """Return the allocated bytes of a rank of a stage after a step."""
    s = _sizes(run)
    chunks = [_chunk(run, s, chunk) for chunk in run.strategy.stages[stage]]
    return _states(run, s, chunks)[0] + _kept(run, s, stage, chunks)[0]


# --------------------------------------------------------------------------------------------------
# At the peak.


def _scores(run: Run, s: _Sizes) -> int:
    heads, length = run.model.attention.heads // s.t, run.seq_length
    return run.strategy.micro_batch * heads * (length // run.split.cp) * length


def _attention(run: Run, s: _Sizes, layer: Layer, again: frozenset[str]) -> list[int]:
    a, split, kernel = layer.attention, run.split, run.kernels.attention
    heads = a.heads // s.t
    norms = a.head_norms != "none"
    thin = 1 if run.runtime.precision.fp8 else s.e
    tokens = s.tokens
    if a.latent is None:
        sizes = [tokens * a.width * (a.heads + 2 * a.kv_heads) // s.t * s.e]
        if kernel == "flash" and not norms and split.cp == 1:
            each = tokens * a.width * a.kv_heads // s.t * s.e
            sizes = [tokens * a.width * heads * s.e, each, each]
        if norms:
            groups = tokens * a.width * a.kv_heads // s.t * s.e
            sizes += [tokens * a.width * heads * s.e, groups, groups]
            each = 8 if layer.norm == "layer" else 4
            sizes.append(tokens * (a.heads + a.kv_heads) // s.t * each)
    else:
        r, k = a.latent.query_rank or 0, a.latent.kv_rank
        width = a.latent.key_width + a.latent.rotary_width
        sizes = [tokens * r * s.e, tokens * (k + a.latent.rotary_width) * s.e]
        if norms:
            sizes.append(tokens * (r + k) * thin)
        if "mla_up_proj" not in again:
            sizes += [tokens * heads * w * s.e for w in (width, width, a.value_width)]
    if run.model.positions == "rotary" and not run.kernels.fused_rotary:
        width = a.latent.rotary_width if a.latent else int(a.width * a.rotary_share)
        sizes.append(4 * (run.seq_length // split.cp) * width * s.e)
    out = tokens * heads * a.value_width
    scores = _scores(run, s)
    if "core_attn" in again:
        sizes.append(out * s.e)
    elif kernel in ("unfused", "local"):
        sizes += [out * thin, scores * s.e]
        if a.dropout:
            sizes += [scores * s.e, scores]
    else:
        sizes.append(out * s.e)
        if kernel == "flash" or run.runtime.precision.fp8 or split.cp_kind != "ring":
            sizes.append(out * thin)
        sizes.append(tokens * heads * 4)
    return sizes


def _routed(run: Run, s: _Sizes) -> int:
    """Return the tokens of the busiest expert rank."""
    x, split = run.model.experts, run.split
    skew = 1.1 if x.number == split.ep else 1.025
    if run.steps is None or run.steps >= 1000:
        skew = 1.17
    given = run.runtime.experts.skew
    skew = 1.0 if split.ep == 1 else skew if given is None else given
    return math.ceil(s.scattered * split.etp * x.per_token * skew)


def _behind(run: Run, s: _Sizes, layer: Layer, again: frozenset[str]) -> tuple[list[int], int]:
    """Return the bytes a layer saves from its second norm on, and its first GEMM's output."""
    split, x, fp8 = run.split, layer.experts, run.runtime.precision.fp8
    kernels, told = run.kernels, run.runtime.experts
    thin = 1 if fp8 else s.e
    gates = 2 if layer.mlp.gated else 1
    whole = s.scattered * s.h
    sizes = [whole * s.e]
    # a norm that is fused with the next GEMM is not computed again
    if "layernorm" not in again or not (x or kernels.module == "megatron"):
        sizes.append(whole * (s.e if x else thin))
    first = 0

    def mlp(width: int) -> list[int]:
        inner = s.tokens * (width // s.t)
        found = [gates * inner * s.e, inner * thin]
        return [*found, inner * s.e] if gates == 2 and not kernels.fused_gate else found

    if x is None:
        if "mlp" not in again:
            dense = mlp(layer.mlp.width)
            first = dense[0]
            sizes += dense
    elif "moe" not in again:
        routed = _routed(run, s)
        inner = routed * (x.width // split.etp)
        # grouped fp8 GEMMs keep two copies
        copies = (2 if told.grouped else 1) if fp8 else s.e
        first = gates * inner * s.e
        sizes += [routed * s.h * copies, first]
        regathers = kernels.quirks.regathered_experts
        if told.dispatcher == "allgather" and split.etp > 1 and regathers:
            sizes.append(routed * s.h * s.e)
        if "moe_act" not in again:
            sizes.append(inner * copies)
            compiled = told.grouped and kernels.quirks.compiled_experts
            if told.grouped and kernels.quirks.saved_expert_output:
                sizes.append(routed * s.h * s.e)
            elif not (told.fused_weighting or compiled):
                sizes.append(inner * s.e)
        sizes.append(s.scattered * x.number * 9)
        if x.shared_width and "shared_experts" not in again:
            sizes += mlp(x.shared_width)
    if run.model.dropout:
        sizes.append(whole)
    sizes.append(16 * s.tokens)
    return sizes, first


def _layer_saved(run: Run, s: _Sizes, layer: Layer, again: frozenset[str]) -> list[int]:
    whole = s.scattered * s.h
    sizes = [whole * s.e]
    alone = layer.attention.latent is not None or run.kernels.module == "megatron"
    if "layernorm" not in again or not alone:
        sizes.append(whole if run.runtime.precision.fp8 else whole * s.e)
    sizes += _attention(run, s, layer, again)
    if run.model.dropout:
        sizes.append(whole)
    return sizes + _behind(run, s, layer, again)[0]


def _saved(run: Run, s: _Sizes, chunk: Chunk) -> list[int]:
    model = run.model
    whole = s.scattered * s.h
    sizes: list[int] = [whole] if chunk.embeds and model.dropout else []
    for place, number in enumerate(chunk.layers):
        split = run.strategy.each_layer[number]
        if split.recompute == "full":
            sizes += [whole * s.e] if place % split.recompute_unit == 0 else []
        else:
            sizes += _layer_saved(run, s, model.each_layer[number], split.recompute)
    for _ in range(chunk.mtp):
        sizes += _layer_saved(run, s, model.last, _modules(run))
    return sizes + [whole * s.e] * (2 if chunk.head else 0)


def _kept_layers(run: Run, chunk: Chunk) -> int:
    """Return the layers of a chunk without full recomputation, MTP layers included."""
    splits = [run.strategy.each_layer[number] for number in chunk.layers]
    return sum(split.recompute != "full" for split in splits) + chunk.mtp


def _each(run: Run, chunk: Chunk) -> list[tuple[Layer, frozenset[str] | str, int]]:
    """Return (layer, recomputation, layers per unit) of a chunk's layers, MTP layers last."""
    splits = run.strategy.each_layer
    found = [
        (run.model.each_layer[n], splits[n].recompute, splits[n].recompute_unit)
        for n in chunk.layers
    ]
    return found + [(run.model.last, _modules(run), 1)] * chunk.mtp


def _later(run: Run, s: _Sizes, chunk: Chunk, place: int) -> int:
    """Return the bytes that the layers after one of a chunk save."""
    later = 0
    for number, (layer, again, unit) in enumerate(_each(run, chunk)):
        if number > place and again == "full":
            later += s.scattered * s.h * s.e if number % unit == 0 else 0
        elif number > place:
            later += sum(_layer_saved(run, s, layer, again))
    return later


def _backward(run: Run, s: _Sizes, chunk: Chunk) -> int:
    """Return the peak of (allocated - freed) bytes in the backward of a chunk."""
    each = _each(run, chunk)
    found = [
        _layer_backward(run, s, chunk, each, place) - _later(run, s, chunk, place)
        for place in range(len(each))
    ]
    return max(found, default=0)


def _layer_backward(
    run: Run,
    s: _Sizes,
    chunk: Chunk,
    each: list[tuple[Layer, frozenset[str] | str, int]],
    place: int,
) -> int:
    """Return the peak of (allocated - freed) bytes in the backward of one layer."""
    layer, modules, unit = each[place]
    again = 0
    if modules == "full":
        modules = frozenset()
        first = place - place % unit
        own = [one for one, word, _ in each[first : first + unit] if word == "full"]
        again = sum(sum(_layer_saved(run, s, one, modules)) for one in own)
    whole = s.scattered * s.h * s.e
    behind = _behind(run, s, layer, modules)[0]
    # modules are recomputed, each before its own backward
    all_behind, first = _behind(run, s, layer, frozenset())
    late = sum(all_behind) - sum(behind)
    core = _attention(run, s, layer, modules - {"core_attn"})
    early = sum(core) - sum(_attention(run, s, layer, modules))
    freed = 2 * whole if chunk.head else 0
    most = again + late + first + whole - freed
    if again or "moe" in modules:
        most = max(most, again + late + _dispatched(run, s, layer) - freed)
    if run.kernels.attention in ("unfused", "local"):
        copies = _scores(run, s) * s.e * run.kernels.quirks.unfused_backward_copies
        most = max(most, again + early + copies - freed - sum(behind))
    return most


def _forward(run: Run, s: _Sizes, chunk: Chunk) -> int:
    """Return the most bytes in transit in a chunk's forward, less what is not yet saved."""
    found = [
        _dispatched(run, s, layer) - _later(run, s, chunk, place)
        for place, (layer, _, _) in enumerate(_each(run, chunk))
    ]
    return max(found, default=0)


def _last(run: Run, s: _Sizes, chunk: Chunk) -> int:
    """Return the bytes in transit in the last layer of a chunk."""
    each = _each(run, chunk)
    return _dispatched(run, s, each[-1][0]) if each else 0


def _dispatched(run: Run, s: _Sizes, layer: Layer) -> int:
    """Return the bytes of dispatched tokens of a layer."""
    x = layer.experts
    if x is None:
        return 0
    routed, ranks = _routed(run, s), run.split.ep * run.split.etp
    dispatcher, several = run.runtime.experts.dispatcher, x.number // run.split.ep > 1
    # copies by (sent, sorted): two if both are needed; of the input of the last GEMM one is saved
    copies = {(False, False): 2, (True, False): 3, (False, True): 3, (True, True): 4}
    shared = s.scattered * s.h * s.e if x.shared_width else 0
    everyone = s.scattered * ranks
    if dispatcher == "allgather":
        return (routed + everyone) * s.h * s.e + shared
    if dispatcher == "flex":
        return (routed + 2 * min(routed, everyone)) * s.h * s.e + shared
    return copies[ranks > 1, several] * routed * s.h * s.e + shared


def _head(run: Run, s: _Sizes, mtp: int) -> int:
    numbers = s.tokens * (s.vocab // s.t)
    loss = run.kernels.loss
    if loss == "te":
        halves = s.tokens * s.h
        if run.split.sequence_parallel and s.t > 1:
            halves += s.scattered * s.h
        # the input is no longer sent where stages follow each other once
        halves -= s.scattered * s.h if s.p > 1 and s.v == 1 else 0
        return (numbers * (1 + mtp) + halves) * s.e
    each = 4 + (2 if s.e == 2 else 0) + 4 * mtp
    if loss == "native":
        each += 2 * (run.kernels.quirks.fused_loss_copies - 3)
    return numbers * each


def peak_bytes(run: Run, stage: int) -> int:
    """Return the peak allocated bytes of a rank of a stage, by playing its moves one by one."""
    s = _sizes(run)
    split, kernel = run.split, run.kernels.attention
    chunks = run.strategy.stages[stage]
    weights = [_chunk(run, s, chunk) for chunk in chunks]
    states, only_then = _states(run, s, weights)
    kept, pipeline = _kept(run, s, stage, weights)
    base = states - only_then + kept - pipeline
    tokens = s.tokens
    if stage in (0, s.p - 1):
        base += 12 * tokens + (tokens * run.seq_length if run.runtime.masks else 0)
    # tensors that are sent or received, in a forward and in a backward
    sent = (0, 0) if s.p == 1 else (3, 3) if s.v > 1 else (1, 0) if stage == 0 else (2, 2)
    sent = tuple(n * s.scattered * s.h * s.e for n in sent)

    expandable = run.runtime.allocator.expandable
    a = run.model.attention
    apart = kernel == "flash" and a.head_norms == "none" and not a.latent and split.cp == 1
    hole = tokens * a.width * (a.heads + 2 * a.kv_heads) // s.t * s.e if apart else 0
    mask = s.scattered * s.h if run.model.dropout else 0
    saved = []
    for c in chunks:
        blocks = [(n, _come_and_go(n, expandable)) for n in _saved(run, s, c)]
        # masks, two per layer and one of the embedding, reuse the copied blocks
        masks = int(c.embeds) + 2 * _kept_layers(run, c) if mask else 0
        more = _come_and_go(mask, expandable, hole) - _come_and_go(mask, expandable)
        saved.append(sum(block for _, block in blocks) + masks * more)
    exact = [sum(_saved(run, s, chunk)) for chunk in chunks]
    assert all(a >= b for a, b in zip(saved, exact, strict=True))

    # forwards in groups of micro-batches, backwards in the same order with chunks reversed
    group = run.strategy.group or s.p
    moves = []
    number = run.strategy.micro_batches
    for first in range(0, number, group):
        some = range(first, min(first + group, number))
        moves += [(chunk, micro) for chunk in range(s.v) for micro in some]
    ahead = s.p - 1 - stage
    if s.v > 1:
        ahead = 2 * ahead + (s.v - 1) * group
    ahead += int(run.runtime.overlap.experts)
    ahead = min(ahead, len(moves))
    most = 0
    live: list[tuple[int, int]] = []
    logits: set[int] = set()
    left = [(s.v - 1 - chunk, micro) for chunk, micro in moves]

    def forward(chunk: int, micro: int) -> int:
        live.append((chunk, micro))
        here = sum(saved[c] for c, _ in live) + sent[0]
        waiting = 4 * s.tokens * (s.vocab // s.t) if logits else 0
        extra = _forward(run, s, chunks[chunk])
        if chunks[chunk].head:
            extra -= 2 * s.scattered * s.h * s.e
            logits.add(micro)
            deferred = 0
            if run.kernels.deferred_head is not None:
                numbers = s.tokens * (s.vocab // s.t + 3 * s.h)
                deferred = run.kernels.deferred_head * numbers * s.e
            extra = max(extra, _head(run, s, chunks[chunk].mtp) + deferred)
        return here + waiting + extra

    def backward(chunk: int, micro: int) -> int:
        waiting = 4 * s.tokens * (s.vocab // s.t) if logits else 0
        if chunks[chunk].head:
            logits.discard(micro)
            waiting -= 4 * s.tokens * (s.vocab // s.t)
        here = sum(saved[c] for c, _ in live) + sent[1]
        live.remove((chunk, micro))
        return here + waiting + _backward(run, s, chunks[chunk])

    def merged(new: tuple[int, int], old: tuple[int, int]) -> int:
        """Play a forward and a backward layer by layer: one is saved while one is freed."""
        there = sum(saved[chunk] for chunk, _ in live)
        place, chunk = chunks[new[0]], chunks[old[0]]
        layers = [
            sum(_layer_saved(run, s, run.model.each_layer[n], run.strategy.each_layer[n].recompute))
            for n in place.layers
        ]
        begun = min(max(layers, default=0), saved[new[0]])
        most = there + begun + _last(run, s, place) + _backward(run, s, chunk) + sent[1]
        if chunk.head:  # its logits, before the forward begins
            most = max(most, there + _head(run, s, chunk.mtp) + sent[1])
        logits.clear()
        before = len(live)
        live.remove(old)
        # the head of the forward, when the backward is done
        most = max(most, forward(*new))
        assert len(live) == before
        return most

    for at in range(ahead):
        most = max(most, forward(*moves[at]))
    for at in range(len(moves) - ahead):
        if run.runtime.overlap.experts:
            most = max(most, merged(moves[ahead + at], left[at]))
            continue
        most = max(most, forward(*moves[ahead + at]))
        most = max(most, backward(*left[at]))
    for move in left[len(moves) - ahead :]:
        most = max(most, backward(*move))
    assert not live
    return base + most
