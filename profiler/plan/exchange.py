"""Process groups, initial weights and batches of a plan, and exchange of activations.

Two adjacent layers of a stage may have different layouts. A rank holds a block of the micro-batch:
some tokens of some samples. One all-to-all sends every rank its block in the new layout. Where
activations are replicated, a rank receives its block from the replica with its index in the
tensor-parallel group. The backward exchanges gradients in the opposite direction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import InputError
from autopar.records import Record
from profiler.model.layers.attention import Norm
from profiler.model.layers.experts import EXPERT_WEIGHTS
from profiler.model.layers.sharding import held_tokens
from profiler.plan.arithmetic import Axes, Cube, Layout, stream_lengths
from profiler.plan.job import PlanJob

# --------------------------------------------------------------------------------------------------
# The process groups of a plan: one mesh of all stages, and the groups of every layout.


class PlanGroups:
    """Process groups of one rank of a plan.

    torch names a group by the number of groups created before, so all ranks create all groups in
    one order, including groups of other ranks.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_stages: int,
        cube: Cube,
        wanted: Iterable[Axes],
        used: Iterable[Axes],
        device_type: str,
        timeout_s: float | None = None,
        own_only: bool = False,
    ) -> None:
        """Create the groups along the axes `wanted`, in every stage.

        used : axes along which this rank's stage communicates, to count communicators; NCCL
            creates a communicator on first use of a group.
        own_only : True to create only groups of this rank; legal only in `fake_world`.
        """
        self.stage, self.place = divmod(rank, cube.num_ranks)
        self.num_stages, self.cube, self.rank = num_stages, cube, rank
        names = tuple(f"axis{axis}" for axis in range(len(cube.factors)))
        whole = init_device_mesh(
            device_type, (num_stages, *cube.factors), mesh_dim_names=("stage", *names)
        )
        self.pipeline: Any = whole.get_group("stage")
        """Pipeline group: the ranks with this rank's index in all stages."""
        self.num_communicators = 1 + (num_stages > 1)
        """Number of communicators of this rank: world, pipeline, and one per used group."""
        self.num_communicators += len({axes for axes in used if cube.size(axes) > 1})
        self._device_type = device_type
        self._groups: dict[Axes, Any] = {}
        self._meshes: dict[Axes, DeviceMesh] = {}
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for axes in sorted({axes for axes in wanted if cube.size(axes) > 1}):
            # the mesh already has the groups of single axes
            if len(axes) == 1:
                self._groups[axes] = whole.get_group(names[axes[0]])
                continue
            for stage in range(num_stages):
                first = stage * cube.num_ranks
                groups = ([first + member for member in group] for group in cube.groups(axes))
                own = self._open(groups, timeout, own_only)
                if stage == self.stage:
                    self._groups[axes] = own

        # with two stages the first and the last are the whole pipeline
        self.ends: Any = self.pipeline if num_stages == 2 else None
        """Group of the ranks with this index in the first and the last stage; None on other
        stages and without a pipeline."""
        if num_stages > 2:
            last = (num_stages - 1) * cube.num_ranks
            ends = ([place, last + place] for place in range(cube.num_ranks))
            self.ends = self._open(ends, timeout, own_only)

    def _open(self, groups: Iterable[list[int]], timeout: timedelta | None, own_only: bool) -> Any:
        """Create process groups; return the group that contains this rank, or None."""
        found = None
        for ranks in groups:
            if own_only and self.rank not in ranks:
                continue
            group = dist.new_group(ranks, timeout=timeout)
            if self.rank in ranks:
                found = group
        return found

    def group(self, axes: Axes) -> Any:
        """Return this rank's process group along `axes`; None for a group of one rank."""
        return self._groups[axes] if self.cube.size(axes) > 1 else None

    @property
    def whole_stage(self) -> Any:
        """Group of all ranks of this stage; exists only if it was in `wanted`."""
        return self.group(tuple(range(len(self.cube.factors))))

    def flat_mesh(self, axes: Axes) -> DeviceMesh:
        """Return this rank's group along `axes` as a one-dimensional DeviceMesh."""
        if axes not in self._meshes:
            self._meshes[axes] = DeviceMesh.from_group(self._groups[axes], self._device_type)
        return self._meshes[axes]


# --------------------------------------------------------------------------------------------------
# Initial weights that do not depend on the number of ranks, and parameters with partial gradients.
#
# An unsharded parameter is generated from the seed and its name, and every rank copies its shard.
# The sharded dimension is the one in which a rank's parameter is smaller than the unsharded one.


_SPREAD = 0.02
_NORM_SPREAD = 0.1
_HEAD_NORMS = ("query_norm.weight", "key_norm.weight")


class Piece(Record):
    """Tensor- or expert-parallel shard of one parameter on one rank."""

    name: str
    whole: tuple[int, ...]
    """Shape of the parameter on one rank without parallelism."""
    dim: int | None
    """Sharded dimension; None if the parameter is replicated."""
    pieces: int
    index: int
    is_partial: bool
    """True if the gradient must be summed over the tensor-parallel ranks with this shard."""
    is_expert: bool = False
    """True for weights of expert-parallel experts, with separate gradient groups."""


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a module by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def pieces_of(
    module: nn.Module, whole: Mapping[str, tuple[int, ...]], layout: Layout, place: int
) -> dict[str, Piece]:
    """Return a description of this rank's shard of each parameter, by name.

    whole : shapes of the module without parallelism.
    place : index of the rank in its stage.
    """
    t = layout.degree if layout.splits_weights else 1
    tensor_rank = layout.cube.index(place, layout.tensor_axes) if t > 1 else 0
    keys = _key_value_names(module)
    norms = _head_norm_names(module)
    found = {}
    for name, shape in shapes(module).items():
        full = whole[name]
        if layout.expert_axes is not None and f".{EXPERT_WEIGHTS}." in name:
            found[name] = Piece(
                name=name,
                whole=full,
                # weights are stacked by expert
                dim=0 if layout.expert_degree > 1 else None,
                pieces=layout.expert_degree,
                index=layout.cube.index(place, layout.expert_axes),
                is_partial=False,
                is_expert=True,
            )
            continue
        dims = [d for d, (own, all_) in enumerate(zip(shape, full, strict=True)) if own != all_]
        assert len(dims) <= 1, (name, shape, full)
        pieces = full[dims[0]] // shape[dims[0]] if dims else 1
        # With a sharded sequence, norms and biases see only their own tokens. Shared keys see their
        # own queries, and norms of heads their own heads. Other replicas have whole gradients.
        partial = pieces < t and (layout.splits_sequence or name in keys or name in norms)
        found[name] = Piece(
            name=name,
            whole=full,
            dim=dims[0] if dims else None,
            pieces=pieces,
            # with fewer shards than ranks, neighbouring ranks share one
            index=tensor_rank * pieces // t,
            is_partial=partial,
        )
    return found


def fill(
    module: nn.Module, pieces: Mapping[str, Piece], *, seed: int, where: str, tied: bool = False
) -> None:
    """Initialise the parameters of a module in place, with equal values in every plan.

    where : name of the module in the model, so that equal layers have different values.
    tied : True if the tables of embedding and head have equal values.
    """
    norms = {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, child in module.named_modules()
        if isinstance(child, Norm)
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            piece = pieces[name]
            key = _key(where, name, tied)
            value = _value(piece.whole, seed=seed, where=key, norm=name in norms)
            if piece.dim is not None:
                value = value.chunk(piece.pieces, piece.dim)[piece.index]
            parameter.copy_(value)


def _key(where: str, name: str, tied: bool) -> str:
    """Return the name of a parameter in the model, which does not depend on the plan."""
    if where == "ends":  # embedding and head as one part
        prefix, _, name = name.partition(".")
        where = "embedding" if prefix == "first" else "head"
    if tied and where == "head" and name == "head.weights.0":
        where, name = "embedding", "table"
    return f"{where}.{name}"


def _value(shape: tuple[int, ...], *, seed: int, where: str, norm: bool) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{where}".encode()).digest()
    # 7 bytes are within the range of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    # on the CPU in fp32, so that every device and precision starts with the same values
    value = torch.randn(shape, generator=generator, dtype=torch.float32)
    return value.mul_(_NORM_SPREAD).add_(1) if norm else value.mul_(_SPREAD)


def _key_value_names(module: Any) -> set[str]:
    """Return the names of key and value projections, which may be replicated on several ranks."""
    names: set[str] = set()
    for name in shapes(module):
        parts = name.split(".")
        # the linears of `query` are query, key and value in this order
        if "key_value" in parts or ("query" in parts and parts[-1] != "0"):
            names.add(name)
    return names


def _head_norm_names(module: Any) -> set[str]:
    """Return the names of norm parameters that all heads share."""
    return {name for name in shapes(module) if name.endswith(_HEAD_NORMS)}


# --------------------------------------------------------------------------------------------------
# Random tokens of a global batch, which do not depend on the plan, and each rank's part of them.


class Batch(Record):
    """Tokens and labels of one step on one rank."""

    tokens: torch.Tensor
    """Shape (micro-batches * samples, sequence), ordered by micro-batch."""
    labels: tuple[torch.Tensor, ...]
    """Labels of every micro-batch, shape (sequence, samples)."""
    encoder_tokens: torch.Tensor | None = None
    """Tokens of the encoder, in the layout of `tokens`; None without an encoder."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Tokens of every stream, the decoder's first."""
        return (self.tokens,) if self.encoder_tokens is None else (self.tokens, self.encoder_tokens)


def global_tokens(job: PlanJob, step: int) -> tuple[torch.Tensor, ...]:
    """Return random tokens and labels of the global batch, (samples, sequence) each.

    For an encoder-decoder, the encoder's tokens follow. Raises InputError if the vocabulary size is
    unknown.
    """
    vocab = job.spec.vocab_size
    if vocab is None:
        raise InputError(
            f"model {job.spec.name!r}: the vocabulary size is unknown", remedy="Add vocab_size"
        )
    # seeds are far apart, so that the steps of one do not overlap with those of the next
    generator = torch.Generator().manual_seed((job.seed * 1_000_003 + step) % (1 << 63))
    own, *encoder = stream_lengths(job.spec)

    def draw(count: int, length: int) -> torch.Tensor:
        shape = (count, job.plan.global_batch, length)
        return torch.randint(0, vocab, shape, generator=generator)

    return (*draw(2, own), *(tokens for length in encoder for tokens in draw(1, length)))


def local_batch(
    job: PlanJob, layout: Layout, place: int, *, step: int, device: torch.device | str
) -> Batch:
    """Return a rank's part of the batch of a step, on the first or the last stage.

    Tensor-parallel ranks hold equal, complete sequences. Ulysses ranks hold a shard of each
    sequence, and context-parallel ranks two pieces, from the front and from the back.

    layout : layout of embedding and head.
    place : index of the rank in its stage.
    """
    m = job.plan.num_microbatches
    samples = job.plan.global_batch // m // layout.data_degree
    at = layout.cube.index(place, layout.data_axes)
    held = []
    for values in global_tokens(job, step):
        # (micro-batch, data rank, sample, token)
        own = values.view(m, layout.data_degree, samples, -1)[:, at]
        pieces = tokens_of(layout, place, own.shape[-1], sharded=layout.kind == "ulysses")
        own = torch.cat([own[..., first:end] for first, end in pieces], -1)
        held.append(own.contiguous().to(device))
    tokens, labels, *encoder = held
    return Batch(
        tokens=tokens.flatten(0, 1),
        labels=tuple(each.t().contiguous() for each in labels),
        encoder_tokens=encoder[0].flatten(0, 1) if encoder else None,
    )


# --------------------------------------------------------------------------------------------------
# Exchange between layers: the block of every rank in two layouts, and the parts to send.


class Block(NamedTuple):
    """Block of an activation: some tokens of some samples."""

    tokens: tuple[tuple[int, int], ...]
    """Ranges [first, end) of the sequence, in the order of a rank's tensor."""
    samples: tuple[int, int]
    """Range [first, end) of the samples."""

    @property
    def size(self) -> int:
        """Number of tokens, summed over the samples."""
        first, end = self.samples
        return self.num_tokens * (end - first)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one sample."""
        return sum(end - first for first, end in self.tokens)


def local_shape(layout: Layout, *, seq_length: int, batch: int, hidden: int) -> tuple[int, ...]:
    """Return the shape of a rank's activations, (sequence, batch, hidden).

    batch : samples of a micro-batch, summed over all ranks.
    """
    tokens, samples = _splits(layout)
    return (seq_length // tokens, batch // samples, hidden)


def relayout(x: torch.Tensor, groups: PlanGroups, old: Layout, new: Layout) -> torch.Tensor:
    """Convert activations, (sequence, batch, hidden), from layout `old` to layout `new`.

    Differentiable. All ranks of the stage must call this.
    """
    tokens, samples = _splits(old)
    size = (x.shape[0] * tokens, x.shape[1] * samples)
    there, back = _moves(old, new, size, groups.place), _moves(new, old, size, groups.place)
    if there.is_nothing and back.is_nothing:
        return x
    group = None if there.is_local and back.is_local else groups.whole_stage
    result: torch.Tensor = _Relayout.apply(x, there, back, group)
    return result


def is_exchanged(old: Layout, new: Layout) -> bool:
    """Return True if ranks exchange data between two layouts, forward or backward."""
    # any size that both layouts divide is enough, including pieces of context ranks
    size = (2 * _splits(old)[0] * _splits(new)[0], _splits(old)[1] * _splits(new)[1])
    return not (_is_local(old, new, size) and _is_local(new, old, size))


# --- the plan of an exchange ---------------------------------------------------------------


class _Moves(Record):
    """Blocks that one rank sends and receives in one exchange.

    Sent blocks are relative to its old block, received blocks to its new block.
    """

    shape: tuple[int, int]
    """Tokens and samples of the rank's new block."""
    sent: tuple[Block | None, ...]
    """Block for each rank of the stage; None if nothing is sent."""
    received: tuple[Block | None, ...]
    is_local: bool
    """True if no rank needs data of another rank."""
    is_nothing: bool
    """True if every rank already has its block."""


def _splits(layout: Layout) -> tuple[int, int]:
    """Return (number of token shards, number of sample shards) of a layout."""
    shards = layout.degree if layout.splits_sequence else 1
    return (shards * layout.context_degree, layout.data_degree)


@lru_cache(maxsize=256)
def _blocks(layout: Layout, size: tuple[int, int]) -> tuple[Block, ...]:
    """Return the block of every rank of the stage; `size` is (sequence length, samples)."""
    step = size[1] // layout.data_degree
    rows = []
    for place in range(layout.cube.num_ranks):
        sample = layout.cube.index(place, layout.data_axes)
        tokens = tokens_of(layout, place, size[0], sharded=layout.splits_sequence)
        rows.append(Block(tokens, (sample * step, (sample + 1) * step)))
    return tuple(rows)


def tokens_of(
    layout: Layout, place: int, length: int, *, sharded: bool
) -> tuple[tuple[int, int], ...]:
    """Return the ranges [first, end) of a sequence on one rank, in the order of its tensor.

    place : index of the rank in its stage.
    sharded : True if the tokens of a context-parallel rank are sharded over its tensor-parallel
        group.
    """
    shard = (layout.degree, layout.cube.index(place, layout.tensor_axes)) if sharded else (1, 0)
    context = (layout.context_degree, layout.cube.index(place, layout.context_axes))
    return held_tokens(length, context=context, shard=shard)


def _copies(layout: Layout) -> tuple[int, ...]:
    """Return, for each rank, the number of its replica of a block; 0 if nothing is replicated."""
    axes = () if layout.splits_sequence else layout.tensor_axes
    cube = layout.cube
    return tuple(cube.index(place, axes) for place in range(cube.num_ranks))


def _overlap(one: Block, other: Block) -> Block | None:
    """Return the common part of two blocks, in sequence order; None if it is empty."""

    def common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return (max(a[0], b[0]), min(a[1], b[1]))

    low, high = common(one.samples, other.samples)
    pieces = (common(a, b) for a in one.tokens for b in other.tokens)
    tokens = tuple(sorted(piece for piece in pieces if piece[0] < piece[1]))
    return Block(tokens, (low, high)) if tokens and low < high else None


@lru_cache(maxsize=256)
def _is_local(old: Layout, new: Layout, size: tuple[int, int]) -> bool:
    # local: every rank's new block is inside its old one
    for before, after in zip(_blocks(old, size), _blocks(new, size), strict=True):
        found = _overlap(before, after)
        if found is None or found.size != after.size:
            return False
    return True


@lru_cache(maxsize=1024)
def _moves(old: Layout, new: Layout, size: tuple[int, int], place: int) -> _Moves:
    before, after = _blocks(old, size), _blocks(new, size)
    copies = _copies(old)
    is_local = _is_local(old, new, size)
    # a rank that has all its data takes it from itself, otherwise from the copy with its index
    chosen = [
        other == place if is_local else copies[other] == copies[place]
        for other in range(len(copies))
    ]
    own_before, own_after = before[place], after[place]
    first, end = own_after.samples
    return _Moves(
        shape=(own_after.num_tokens, end - first),
        sent=tuple(
            _relative(_overlap(own_before, other), own_before) if is_chosen else None
            for other, is_chosen in zip(after, chosen, strict=True)
        ),
        received=tuple(
            _relative(_overlap(other, own_after), own_after) if is_chosen else None
            for other, is_chosen in zip(before, chosen, strict=True)
        ),
        is_local=is_local,
        is_nothing=before == after,
    )


def _relative(block: Block | None, own: Block) -> Block | None:
    """Return `block`, a part of `own`, in coordinates relative to `own`."""
    if block is None:
        return None
    tokens, at = [], 0
    places = {}
    for first, end in own.tokens:
        places[first, end] = at
        at += end - first
    for first, end in block.tokens:
        start, place = next(
            (a, place) for (a, b), place in places.items() if a <= first and end <= b
        )
        tokens.append((first - start + place, end - start + place))
    sample = own.samples[0]
    return Block(tuple(tokens), (block.samples[0] - sample, block.samples[1] - sample))


# --- the exchange --------------------------------------------------------------------------


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, there: _Moves, back: _Moves, group: Any) -> Any:
        ctx.back, ctx.group = back, group
        return _move(x, there, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _move(grad, ctx.back, ctx.group), None, None, None


def _move(x: torch.Tensor, moves: _Moves, group: Any) -> torch.Tensor:
    if moves.is_nothing:
        return x.view_as(x)
    hidden = x.shape[-1]
    if moves.is_local:
        # the only transfer is from the rank to itself
        ((there, here),) = (
            pair for pair in zip(moves.sent, moves.received, strict=True) if pair[0] is not None
        )
        out = x.new_empty((*moves.shape, hidden))
        _put(out, here, _cut(x, there))
        return out
    send = [0 if block is None else block.size * hidden for block in moves.sent]
    receive = [0 if block is None else block.size * hidden for block in moves.received]
    # other copies may send all the data, so that this rank sends nothing
    pieces = [x.new_empty(0)]
    pieces += [part.flatten() for block in moves.sent if block for part in _cut(x, block)]
    found = x.new_empty(sum(receive))
    dist.all_to_all_single(found, torch.cat(pieces), receive, send, group=group)
    del pieces
    out = x.new_empty((*moves.shape, hidden))
    for piece, target in zip(found.split(receive), moves.received, strict=True):
        if target is not None:
            first, end = target.samples
            sizes = [(b - a) * (end - first) * hidden for a, b in target.tokens]
            _put(out, target, piece.split(sizes))
    return out


def _cut(x: torch.Tensor, block: Block | None) -> list[torch.Tensor]:
    """Return the pieces of a block as views, each (sequence, batch, hidden)."""
    assert block is not None
    first, end = block.samples
    return [x[a:b, first:end] for a, b in block.tokens]


def _put(out: torch.Tensor, block: Block | None, pieces: Iterable[torch.Tensor]) -> None:
    """Write the pieces of a block to their places in `out`."""
    for target, piece in zip(_cut(out, block), pieces, strict=True):
        target.copy_(piece.view(target.shape) if piece.dim() == 1 else piece)
