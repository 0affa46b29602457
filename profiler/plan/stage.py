"""Modules of one stage of a plan on one rank: built, sharded, initialised and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from profiler.measure import torch_dtype
from profiler.model.counting import local_tensor
from profiler.model.layers.attention import Norm, has_norm_biases
from profiler.model.layers.blocks import build_layer, tensor_defaults
from profiler.model.layers.experts import EXPERT_WEIGHTS
from profiler.model.layers.sharding import Checkpoint, Sharding
from profiler.model.layers.vocab import build_vocab, take_encoder_norm
from profiler.plan.arithmetic import (
    Axes,
    Cube,
    Layout,
    entry_layouts,
    layer_layout,
    layer_streams,
    layouts,
    num_encoder_layers,
    stream_lengths,
    vocab_layout,
)
from profiler.plan.exchange import (
    Piece,
    PlanGroups,
    fill,
    is_exchanged,
    local_shape,
    pieces_of,
    relayout,
    shapes,
)
from profiler.plan.job import PlanJob
from profiler.plan.units import Replica, Shard, gradient_of, make_root

# --------------------------------------------------------------------------------------------------
# The stage of a rank: its layers in order, with the exchanges between them.


_Streams: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""Activations between stages: one tensor, or the decoder's and the encoder's."""


class Part(Record):
    """Part of a stage: a layer, the embedding, the head, or both of these if tied."""

    name: str
    modules: tuple[nn.Module, ...]
    layout: Layout
    holder: nn.Module
    """Parent of `modules`, or the only one of them; defines the names of parameters."""
    pieces: dict[str, Piece]
    unit: Replica | Shard
    experts: Replica | Shard | None = None
    """Unit of expert-parallel weights, with separate gradient groups; None without them."""
    streams: tuple[int, ...] = (0,)
    """Indices of the input streams of activations; the output replaces the first of them."""

    @property
    def units(self) -> tuple[Replica | Shard, ...]:
        """Units with the part's parameters: `unit`, then `experts` if there are any."""
        return (self.unit,) if self.experts is None else (self.unit, self.experts)

    def num_shards(self, piece: Piece) -> int:
        """Return the number of ZeRO shards of a parameter on a rank; 1 if it is replicated."""
        unit, axes = self.unit, self.layout.sync_axes
        if piece.is_expert and self.experts is not None:
            unit, axes = self.experts, self.layout.expert_sync_axes
        return self.layout.cube.size(axes) if isinstance(unit, Shard) else 1

    def gradients(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """Yield (name, piece, gradient) of each parameter with a gradient on this rank.

        With ZeRO-2 and ZeRO-3, the gradient is this rank's shard.
        """
        for name, parameter in self.holder.named_parameters():
            grad = gradient_of(parameter)
            if grad is not None:
                yield name, self.pieces[name], local_tensor(grad)


def padded_spec(job: PlanJob) -> ModelSpec:
    """Return the model with a padding of the vocabulary that does not depend on its sharding."""
    vocab = job.plan.vocab
    # Ulysses does not shard the tables
    times = 1 if vocab.ulysses else vocab.tp
    divisor = job.spec.make_vocab_size_divisible_by * times
    return replace(job.spec, make_vocab_size_divisible_by=divisor)


def open_groups(
    job: PlanJob,
    cube: Cube,
    *,
    rank: int,
    device_type: str,
    timeout_s: float | None = None,
    own_only: bool = False,
) -> PlanGroups:
    """Return this rank's process groups of a plan; every rank must call this.

    own_only : as in `PlanGroups`.
    """
    return PlanGroups(
        rank=rank,
        num_stages=job.plan.num_stages,
        cube=cube,
        wanted=_axes_of(layouts(job, cube), cube=cube),
        used=_axes_of(*_stage_layouts(job, cube, rank // cube.num_ranks), cube=cube),
        device_type=device_type,
        timeout_s=timeout_s,
        own_only=own_only,
    )


def _axes_of(parts: Iterable[Layout], entries: Iterable[Layout] = (), *, cube: Cube) -> set[Axes]:
    """Return the communication axes of parts with these layouts; `entries` are input layouts."""
    distinct = set(parts)
    axes = {
        axes
        for layout in distinct
        for axes in (layout.tensor_axes, layout.context_axes, layout.sync_axes)
    }
    for layout in distinct:
        if layout.expert_axes is not None:
            axes |= {layout.expert_axes, layout.expert_sync_axes}
    # an exchange between two layouts is an all-to-all over the whole stage
    if any(is_exchanged(one, other) for one in distinct for other in distinct.union(entries)):
        axes.add(tuple(range(len(cube.factors))))
    return axes


def _stage_layouts(job: PlanJob, cube: Cube, stage: int) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of a stage's parts, and the layouts of its chunks' inputs."""
    plan = job.plan
    chunks = range(plan.num_stages * plan.num_chunks)
    own: list[Layout] = []
    entries: list[Layout] = []
    for chunk in chunks:
        if plan.stage_of_chunk(chunk) != stage:
            continue
        first = sum(plan.chunks[:chunk])
        layers = range(first, first + plan.chunks[chunk])
        own += [layer_layout(job, cube, layer) for layer in layers]
        if chunk in (chunks[0], chunks[-1]):
            own.append(vocab_layout(job, cube))
        entries += entry_layouts(job, cube, first)
    return own, entries


class Stage(nn.Module):
    """Pipeline stage of one rank, or one model chunk of it, as a module.

    It maps tokens or activations to activations or a loss. An encoder-decoder has two streams as
    input and output, the decoder's and the encoder's. Micro-batches must be run in order. The loss
    is scaled so that its sum over micro-batches and ranks is the mean over the global batch.
    """

    def __init__(
        self,
        job: PlanJob,
        groups: PlanGroups,
        parts: Sequence[Part],
        *,
        chunk: int,
        entry: Sequence[Layout],
        exit_: Sequence[Layout],
    ) -> None:
        """Create the stage of `parts`; `entry` and `exit_` are layouts of input and output
        streams."""
        super().__init__()
        self.job, self.groups, self.parts, self.chunk = job, groups, tuple(parts), chunk
        self.is_first = chunk == 0
        self.is_last = chunk == groups.num_stages * job.plan.num_chunks - 1
        self._entry, self._exit = tuple(entry), tuple(exit_)
        self.vocab = vocab_layout(job, groups.cube)
        self._layers = [part for part in parts if part.name.startswith(("layer", "encoder"))]
        self._embedding: Any = next((p.modules[0] for p in parts if p.name == "embedding"), None)
        self._head: Any = next((p.modules[-1] for p in parts if p.name == "head"), None)
        ends = next((part for part in parts if part.name == "ends"), None)
        if ends is not None:
            self._embedding, self._head = ends.modules
        self.held = nn.ModuleList(part.holder for part in parts)
        self._labels: Sequence[torch.Tensor] = ()
        self._forwards = self._backwards = 0
        # ranks with different tokens: of the data, the context and the Ulysses group
        copies = self.vocab.data_degree * self.vocab.context_degree
        copies *= self.vocab.degree if self.vocab.kind == "ulysses" else 1
        # each loss is a mean; this scale makes their sum over micro-batches and ranks a mean too
        self._scale = 1.0 / (job.plan.num_microbatches * copies)
        self.loss_scale = 1.0
        """Loss scale of this step; 1 except in fp16."""
        self._body: Callable[..., _Streams] = self._run
        shards = [unit for unit in self.units if isinstance(unit, Shard)]
        if shards:
            root = _Root([module for unit in shards for module in unit.modules])
            make_root(root, shards[0].mesh)
            # not a child module: its units are already children of `held`
            self._body = lambda *xs: root(self._run, *xs)

    @property
    def units(self) -> Iterator[Replica | Shard]:
        """Replication and sharding units (DDP, FSDP) of all parts, in order."""
        return (unit for part in self.parts for unit in part.units)

    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every input stream of activations; not for the first stage."""
        return self._shapes(self._entry)

    def exit_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every output stream of activations; not for the last stage."""
        return self._shapes(self._exit)

    def token_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return (samples, tokens) of a micro-batch by stream, in the layout of the embedding."""
        plan, vocab = self.job.plan, self.vocab
        split = vocab.context_degree * (vocab.degree if vocab.kind == "ulysses" else 1)
        samples = plan.global_batch // plan.num_microbatches // vocab.data_degree
        return tuple((samples, length // split) for length in stream_lengths(self.job.spec))

    def begin_step(self, labels: Sequence[torch.Tensor]) -> None:
        """Set the labels of every micro-batch, (sequence, batch) each, for the last stage."""
        self._labels = labels
        self._forwards = self._backwards = 0

    def forward(self, *xs: torch.Tensor) -> _Streams:
        """Return activations for the next stage, or on the last stage the scaled loss, (1,).

        The input of the first stage is tokens, (batch, sequence).
        """
        out: _Streams = self._body(*xs)
        self._forwards += 1
        return out

    def before_backward(self) -> None:
        """Prepare the units for the next backward; must be called before each backward."""
        self._backwards += 1
        is_last = self._backwards == self.job.plan.num_microbatches
        reduces = is_last or not self.job.async_grad_reduce
        for unit in self.units:
            if isinstance(unit, Shard):
                unit.before_backward(is_last=is_last, reduces=reduces)
            else:
                unit.before_backward(reduces=reduces)

    def finish_backward(self) -> None:
        """Finish gradient sums over the data- and tensor-parallel groups and both tied tables."""
        for unit in self.units:
            unit.finish_backward()
        # after the sums over the data group, which write the same gradients
        for part in self.parts:
            self._sum_partial(part)
        self._sum_ends()

    def step(self) -> None:
        """Step the optimizers."""
        for unit in self.units:
            unit.step(self.loss_scale)

    def skip_step(self) -> None:
        """Discard the gradients of a step without an optimizer step."""
        for unit in self.units:
            unit.skip()

    def squared_gradient_norm(self) -> torch.Tensor:
        """Return this rank's share of the squared gradient norm, without the loss scale.

        The sum over all ranks is the squared norm of the model's gradient.
        """
        ranks = self.groups.cube.num_ranks
        total: Any = 0.0
        for part in self.parts:
            for name, piece, grad in part.gradients():
                if part.name == "head" and name == self._copied_table():
                    continue  # the embedding on the first stage counts it
                # each rank with these elements counts an equal share of them
                copies = ranks / (piece.pieces * part.num_shards(piece))
                total = total + grad.double().square().sum() / copies
        return torch.as_tensor(total / self.loss_scale**2, dtype=torch.float64)

    def loss_share(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss divided by its replicas, so that the sum over ranks is the batch's loss."""
        # tensor-parallel ranks have equal losses, each Ulysses rank the loss of its shard
        return loss / (self.vocab.degree if self.vocab.kind != "ulysses" else 1)

    def _shapes(self, layouts: Sequence[Layout]) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a micro-batch's activations on this rank, by stream."""
        plan, spec = self.job.plan, self.job.spec
        batch = plan.global_batch // plan.num_microbatches
        hidden = spec.layers[0].hidden_size
        return tuple(
            local_shape(layout, seq_length=length, batch=batch, hidden=hidden)
            for layout, length in zip(layouts, stream_lengths(spec), strict=True)
        )

    def _run(self, *xs: torch.Tensor) -> _Streams:
        groups, streams, lie = self.groups, list(xs), list(self._entry)
        if self._embedding is not None:
            # batches are (batch, sequence), layers work on (sequence, batch)
            embedded = self._embedding(*(tokens.t().contiguous() for tokens in streams))
            # both streams are concatenated along the sequence
            lengths = [shape[0] for shape in self._shapes(lie)]
            streams = list(embedded.split(lengths)) if len(lengths) > 1 else [embedded]
            del embedded
        for part in self._layers:
            for k in part.streams:
                streams[k] = relayout(streams[k], groups, lie[k], part.layout)
                lie[k] = part.layout
            streams[part.streams[0]] = part.modules[0](*(streams[k] for k in part.streams))
        if self._head is None:
            # a stream that no layer replaced may be a view of the embedding's output, and FSDP
            # does not allow views as outputs of a stage
            whole = tuple(x.clone() if x._is_view() else x for x in streams)
            return whole if len(whole) > 1 else whole[0]
        x = relayout(streams[0], groups, lie[0], self.vocab)
        del streams
        # one dimension, since the pipeline concatenates the outputs of micro-batches
        loss = self._head(x, self._labels[self._forwards]).view(1)
        return loss * (self._scale * self.loss_scale)

    def _sum_partial(self, part: Part) -> None:
        """Sum the partial gradients of a part over its tensor-parallel group, in one all-reduce."""
        found = [(piece, grad) for _, piece, grad in part.gradients() if piece.is_partial]
        if not found:
            return
        buffers = []
        for piece, grad in found:
            # one row per shard, so that the sum over the group adds only equal shards
            buffer = grad.new_zeros((piece.pieces, grad.numel()))
            buffer[piece.index] = grad.flatten()
            buffers.append(buffer.flatten())
        flat = torch.cat(buffers)
        dist.all_reduce(flat, group=self.groups.group(part.layout.tensor_axes))
        sizes = [buffer.numel() for buffer in buffers]
        for (piece, grad), summed in zip(found, flat.split(sizes), strict=True):
            grad.copy_(summed.view(piece.pieces, -1)[piece.index].view_as(grad))

    def _copied_table(self) -> str | None:
        tied = self.job.spec.tied_embeddings and self.groups.num_stages > 1
        return "head.weights.0" if tied else None

    def _sum_ends(self) -> None:
        if self._copied_table() is None or not (self.is_first or self.is_last):
            return
        name = "table" if self.is_first else "head.weights.0"
        part = next(p for p in self.parts if p.name in ("embedding", "head"))
        grad = next(grad for key, _, grad in part.gradients() if key == name)
        # both copies of a tied table get the sum, and so stay equal
        dist.all_reduce(grad, group=self.groups.ends)


class _Root(nn.Module):
    """FSDP root: parent of all sharded units, which runs the whole stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)

    def forward(self, run: Callable[..., _Streams], *xs: torch.Tensor) -> _Streams:
        return run(*xs)


class _Vocab(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last


def build_stages(
    job: PlanJob,
    groups: PlanGroups,
    *,
    device: torch.device | str,
    has_values: bool = True,
) -> tuple[Stage, ...]:
    """Build this rank's model chunks of a plan, in the order of the forward pass.

    has_values : False for fake tensors, whose parameters are not initialised.
    """
    builder = _Builder(job, groups, torch.device(device), has_values)
    plan = job.plan
    chunks = range(plan.num_stages * plan.num_chunks)
    return tuple(
        _build_chunk(builder, chunk)
        for chunk in chunks
        if plan.stage_of_chunk(chunk) == groups.stage
    )


def _build_chunk(builder: _Builder, chunk: int) -> Stage:
    job, groups = builder.job, builder.groups
    sizes = job.plan.chunks
    first = sum(sizes[:chunk])
    layers = range(first, first + sizes[chunk])
    parts = []
    for k in layers:
        parts.append(builder.layer(k))
        if k + 1 == num_encoder_layers(job.spec):
            parts.append(builder.encoder_norm(k))
    at_start, at_end = chunk == 0, chunk == len(sizes) - 1
    # a tied table on one stage is one parameter, and must belong to one unit
    if at_start and at_end and job.spec.tied_embeddings:
        parts = [builder.ends(), *parts]
    else:
        if at_start:
            parts = [builder.vocab_part("first"), *parts]
        if at_end:
            parts = [*parts, builder.vocab_part("last")]
    entry, exit_ = (entry_layouts(job, groups.cube, k) for k in (first, layers.stop))
    return Stage(job, groups, parts, chunk=chunk, entry=entry, exit_=exit_)


class _Builder:
    def __init__(
        self, job: PlanJob, groups: PlanGroups, device: torch.device, has_values: bool
    ) -> None:
        self.job, self.groups, self.device, self.has_values = job, groups, device, has_values
        self.dtype = torch_dtype(job.precision)
        self.spec = job.spec
        self.vocab = vocab_layout(job, groups.cube)
        self._types = job.spec.layer_types
        self._tables: dict[Any, torch.Tensor] = {}
        self._shapes: dict[Any, dict[str, tuple[int, ...]]] = {}

    def layer(self, index: int) -> Part:
        kind = self._types[index]
        spec, layout = self.spec.layers[kind], layer_layout(self.job, self.groups.cube, index)
        strategy = self.job.plan.layers[index]
        full: Checkpoint = "full" if strategy.checkpoint else "none"
        module = build_layer(
            spec,
            Sharding(
                degree=layout.degree,
                kind=layout.kind,
                checkpoint=full,
                expert_degree=layout.expert_degree,
                whole_experts=layout.expert_axes is not None,
                context_degree=layout.context_degree,
                context_exchange=self.job.context_exchange,
                routing=self.job.routing if self.has_values else "even",
                recompute=strategy.recompute,
            ),
            group=self.groups.group(layout.tensor_axes),
            dtype=self.dtype,
            device=self.device,
            expert_group=self.groups.group(layout.expert_axes or ()),
            context_group=self.groups.group(layout.context_axes),
        )
        alike = (kind, layout.kind, layout.tensor_axes, layout.context_axes)
        self._share_tables(module, alike)
        whole = self._whole(
            kind, lambda: build_layer(spec, Sharding(), dtype=self.dtype, device="meta")
        )
        streams = layer_streams(self.spec, index)
        return self._part(f"layer{index}", (module,), module, layout, whole, streams)

    def _share_tables(self, layer: nn.Module, alike: object) -> None:
        """Replace rotary tables of a layer by those of earlier layers with equal `alike`."""
        for place, module in layer.named_modules():
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, self._tables.setdefault((alike, place, name), table))

    def encoder_norm(self, index: int) -> Part:
        """Return the norm after the last encoder layer, with the layout of that layer."""
        layout = layer_layout(self.job, self.groups.cube, index)
        kind = self.spec.layers[self._types[index]]
        with tensor_defaults(self.dtype, self.device):
            norm = Norm(kind.hidden_size, bias=has_norm_biases(kind))
        return self._part("encoder_norm", (norm,), norm, layout, shapes(norm), (1,))

    def vocab_part(self, which: Any) -> Part:
        module = self._vocab_module(which)
        whole = self._whole(which, lambda: self._vocab_whole(which))
        name = "embedding" if which == "first" else "head"
        return self._part(name, (module,), module, self.vocab, whole)

    def ends(self) -> Part:
        first, last = self._vocab_module("first"), self._vocab_module("last")
        last.head.weights[0] = first.table

        def make() -> nn.Module:
            ends = _Vocab(self._vocab_whole("first"), self._vocab_whole("last"))
            ends.last.head.weights[0] = ends.first.table
            return ends

        whole = self._whole("ends", make)
        return self._part("ends", (first, last), _Vocab(first, last), self.vocab, whole)

    def _vocab_module(self, which: Any) -> Any:
        module = build_vocab(
            self.spec,
            which,
            degree=self.vocab.degree,
            kind=self.vocab.kind,
            group=self.groups.group(self.vocab.tensor_axes),
            dtype=self.dtype,
            device=self.device,
            context=(
                self.vocab.context_degree,
                self.groups.cube.index(self.groups.place, self.vocab.context_axes),
            ),
        )
        if which == "last":
            take_encoder_norm(module)  # it is a separate part
        return module

    def _vocab_whole(self, which: Any) -> Any:
        module = build_vocab(padded_spec(self.job), which, dtype=self.dtype, device="meta")
        if which == "last":
            take_encoder_norm(module)
        return module

    def _whole(self, key: Any, make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
        if key not in self._shapes:
            self._shapes[key] = shapes(make())
        return self._shapes[key]

    def _part(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        holder: nn.Module,
        layout: Layout,
        whole: dict[str, tuple[int, ...]],
        streams: tuple[int, ...] = (0,),
    ) -> Part:
        job = self.job
        pieces = pieces_of(holder, whole, layout, self.groups.place)
        if self.has_values:
            fill(holder, pieces, seed=job.seed, where=name, tied=job.spec.tied_embeddings)
        apart = [p for key, p in holder.named_parameters() if pieces[key].is_expert]
        experts = None
        if apart:
            # experts first, so that the unit of the layer can exclude their parameters
            own = [m for key, m in holder.named_modules() if key.endswith(f".{EXPERT_WEIGHTS}")]
            experts = self._unit(own, layout, layout.expert_sync_axes)
        unit = self._unit(modules, layout, layout.sync_axes, others=apart, holder=holder)
        return Part(
            name=name,
            modules=modules,
            layout=layout,
            holder=holder,
            pieces=pieces,
            unit=unit,
            experts=experts,
            streams=streams,
        )

    def _unit(
        self,
        modules: Sequence[nn.Module],
        layout: Layout,
        axes: Axes,
        *,
        others: Sequence[nn.Parameter] = (),
        holder: nn.Module | None = None,
    ) -> Replica | Shard:
        """Return the parameter unit of modules whose gradients are summed over these axes.

        others : parameters of the modules that belong to another unit.
        holder : parent of the modules.
        """
        job = self.job
        options: dict[str, Any] = {
            "precision": job.precision,
            "fp32_gradients": job.fp32_gradients,
            "learning_rate": job.learning_rate,
        }
        if layout.zero in ("zero2", "zero3") and self.groups.cube.size(axes) > 1:
            mesh, twice = self.groups.flat_mesh(axes), layout.zero == "zero3"
            return Shard(modules, mesh, gathers_twice=twice, others=others, **options)
        (whole,) = (holder,) if holder is not None else modules
        apart = set(others)
        own = [p for p in whole.parameters() if p not in apart]
        divides = layout.zero == "zero1"
        return Replica(own, self.groups.group(axes), divides_states=divides, **options)
