"""The modules of one stage of a plan on one rank: built, laid out, filled and stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autopar.model import ModelSpec
from autopar.records import dataclass
from profiler.measure import torch_dtype
from profiler.model.counting import local_tensor
from profiler.model.layers.attention import Norm, has_norm_biases
from profiler.model.layers.blocks import build_layer, made_of
from profiler.model.layers.sharding import Checkpoint, Sharding
from profiler.model.layers.vocab import build_vocab, take_encoder_norm
from profiler.plan.arithmetic import (
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
from profiler.plan.job import PlanJob, Precision

__all__ = [
    "Part",
    "Replica",
    "Shard",
    "Stage",
    "build_stage",
    "gradient_of",
    "make_optimizer",
    "make_root",
    "open_groups",
    "padded_spec",
    "sums_by_itself",
]


# --------------------------------------------------------------------------------------------------
# Parameters that every rank of a data group has whole: ddp, and groups of one rank.
#
# Parameters and gradients of a part lie in one buffer each. Its gradients are summed by one
# all-reduce that starts as soon as the last of them is there, while the backward goes on: in the
# last micro-batch, or in every one.


_MAIN = "main_grad"
"""The attribute in which a narrow parameter has its sum in fp32, by the name engines gave it."""


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the optimizer will get of a parameter, None before there is one.

    In fp32 where gradients are summed so beside narrower weights.
    """
    found: torch.Tensor | None = getattr(parameter, _MAIN, parameter.grad)
    return found


class Replica:
    """The parameters of one part of a model, replicated over a group, and their optimizer."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        *,
        precision: Precision,
        fp32_gradients: bool,
        learning_rate: float,
    ) -> None:
        """Move the parameters into one buffer; `group` is None where the rank is alone.

        In bf16 and fp16 the optimizer has fp32 copies of the weights, and with `fp32_gradients` so
        has their sum over micro-batches and ranks, as Megatron-LM's has.
        """
        self._group = group
        self._parameters = list(parameters)
        with torch.no_grad():
            self._weights = torch.cat([p.detach().flatten() for p in self._parameters])
            wide = precision != "fp32"
            # summed apart from where autograd puts them, whose type is that of the weights
            self._sums_wide = wide and fp32_gradients
            self._gradients = torch.zeros_like(
                self._weights, dtype=torch.float32 if self._sums_wide else None
            )
            start = 0
            for parameter in self._parameters:
                end = start + parameter.numel()
                parameter.data = self._weights[start:end].view_as(parameter)
                gradient = self._gradients[start:end].view_as(parameter)
                if self._sums_wide:
                    setattr(parameter, _MAIN, gradient)
                else:
                    parameter.grad = gradient
                start = end
            # in fp32 the buffer itself is stepped, without a copy
            self._master = nn.Parameter(self._weights.float() if wide else self._weights)
        self.optimizer = make_optimizer([self._master], learning_rate)
        self._work: Any = None
        self._arrived = 0
        self._reduces = False
        if group is not None or self._sums_wide:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def before_backward(self, *, reduces: bool) -> None:
        """Say whether the next backward sums the gradients over the group, as the last one does."""
        self._reduces, self._arrived = reduces, 0
        if self._work is not None:
            # every rank has the sum so far, which the next sum would multiply
            self._work.wait()
            self._work = None
            self._gradients.div_(self._group.size())

    def finish_backward(self) -> None:
        """Wait until the gradients are summed over the group."""
        if self._group is None:
            return
        if self._work is None:  # parameters that nothing uses never have a gradient
            self._reduce()
        self._work.wait()
        self._work = None

    def step(self, loss_scale: float = 1.0) -> None:
        """Let the optimizer step with gradients of a scaled loss, and clear them."""
        if self._master.dtype == self._weights.dtype:  # then they are one tensor
            self._master.grad = self._gradients
            self.optimizer.step()
        else:
            # unscaled in fp32, where what fp16 cannot hold is not lost; sums in fp32 are taken as
            # they are, since they are cleared below
            self._master.grad = self._gradients.float().div_(loss_scale)
            self.optimizer.step()
            with torch.no_grad():
                self._weights.copy_(self._master)
        self._master.grad = None
        self.skip()

    def skip(self) -> None:
        """Clear the gradients."""
        self._gradients.zero_()

    def _on_gradient(self, parameter: Any) -> None:
        if self._sums_wide:
            getattr(parameter, _MAIN).add_(parameter.grad)
            parameter.grad = None
        if self._group is None:
            return
        self._arrived += 1
        if self._reduces and self._arrived == len(self._parameters):
            self._reduce()

    def _reduce(self) -> None:
        self._work = dist.all_reduce(self._gradients, group=self._group, async_op=True)


def make_optimizer(parameters: Sequence[nn.Parameter], learning_rate: float) -> Any:
    """Return AdamW that keeps no temporary copies of the parameters."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, fused=True)


# --------------------------------------------------------------------------------------------------
# Parameters that ZeRO divides over a data group: FSDP2's fully_shard, one unit per part.


class Shard:
    """The parameters of one part of a model, divided over a group, and their optimizer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        gathers_twice: bool,
        precision: Precision,
        fp32_gradients: bool,
        learning_rate: float,
    ) -> None:
        """Divide the parameters of modules, in place.

        gathers_twice : ZeRO-3, where weights are given back after the forward.
        """
        self.modules = list(modules)
        self._gathers_twice = gathers_twice
        self._size = mesh.size()
        for module in self.modules:
            for parameter in module.parameters():
                # the optimizer steps fp32 shards; narrower weights are gathered from them
                parameter.data = parameter.data.float()
        fully_shard(
            self.modules if len(self.modules) > 1 else self.modules[0],
            mesh=mesh,
            reshard_after_forward=gathers_twice,
            mp_policy=_policy(precision, fp32_gradients=fp32_gradients),
        )
        self._unit: Any = self.modules[0]
        self._is_sum = _reduce_by_sum(self._unit)
        self._parameters = list(dict.fromkeys(p for m in self.modules for p in m.parameters()))
        self.optimizer = make_optimizer(self._parameters, learning_rate)

    def before_backward(self, *, is_last: bool, reduces: bool) -> None:
        """Say whether the next backward is the last of the step, and whether it sums gradients."""
        self._unit.set_requires_gradient_sync(reduces, recurse=False)
        # ZeRO-2 keeps its gathered weights for the micro-batches that follow
        self._unit.set_reshard_after_backward(self._gathers_twice or is_last, recurse=False)

    def finish_backward(self) -> None:
        """Correct for versions of torch that can only average over the group."""
        if not self._is_sum:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._size)

    def step(self, loss_scale: float = 1.0) -> None:
        """Let the optimizer step with gradients of a scaled loss, and drop them."""
        if loss_scale != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(loss_scale)
        self.optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def sums_by_itself() -> bool:
    """Return whether this torch sums gradients over a group; before 2.8 it can only average."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def make_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module that runs all units one of FSDP's, so that they share streams and order."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)


def _policy(precision: Precision, *, fp32_gradients: bool) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    narrow = torch_dtype(precision)
    # weights are gathered in bf16 or fp16; shards of gradients are fp32 as the weights' are
    return MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=torch.float32 if fp32_gradients else narrow
    )


def _reduce_by_sum(unit: Any) -> bool:
    """Let a unit sum gradients over its group; return False where it can only average them."""
    if not sums_by_itself():
        return False
    # sums, not means: the loss is divided by the number of ranks already
    unit.set_gradient_divide_factor(1.0)
    # otherwise the factor is NCCL's own kind of reduction, which gloo has not
    unit.set_force_sum_reduction_for_comms(True)
    return True


# --------------------------------------------------------------------------------------------------
# The stage of a rank: its layers in order, with what lies between them.


_Streams: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
"""What goes between stages: one tensor, or with an encoder the decoder's and the encoder's."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer, or the embedding, the head, or both where they share their table."""

    name: str
    modules: tuple[nn.Module, ...]
    layout: Layout
    holder: nn.Module
    """Has the modules as its children, or is the only one: gives parameters their names."""
    pieces: dict[str, Piece]
    unit: Replica | Shard
    streams: tuple[int, ...] = (0,)
    """Which streams of activations it takes; it makes the first of them."""

    def gradients(self) -> Iterator[tuple[str, Piece, torch.Tensor]]:
        """Yield what this rank holds of every gradient."""
        for name, parameter in self.holder.named_parameters():
            grad = gradient_of(parameter)
            if grad is not None:
                yield name, self.pieces[name], local_tensor(grad)


def padded_spec(job: PlanJob) -> ModelSpec:
    """Return the model with the vocabulary padded as the plan pads it, whatever the degree."""
    vocab = job.plan.vocab
    # Ulysses has whole tables, which nothing divides
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
    """Return the process groups of a plan; every rank calls this."""
    distinct = set(layouts(job, cube))
    wanted = {axes for layout in distinct for axes in (layout.tensor_axes, layout.sync_axes)}
    # an exchange between two layouts is an all-to-all over the whole stage
    if any(is_exchanged(one, other) for one in distinct for other in distinct):
        wanted.add(tuple(range(len(cube.factors))))
    return PlanGroups(
        rank=rank,
        num_stages=job.plan.num_stages,
        cube=cube,
        wanted=wanted,
        device_type=device_type,
        timeout_s=timeout_s,
        own_only=own_only,
    )


class Stage(nn.Module):
    """What one rank runs of a plan: `stage(tokens or activations) -> activations or loss`.

    An encoder-decoder has two streams, the decoder's and the encoder's: both come in and go out.
    Forwards and backwards of a step's micro-batches each come in order. The loss is scaled so
    that the sum over micro-batches and ranks is the mean over the global batch.
    """

    def __init__(
        self,
        job: PlanJob,
        groups: PlanGroups,
        parts: Sequence[Part],
        *,
        entry: Sequence[Layout],
        exit_: Sequence[Layout],
    ) -> None:
        """Join the parts; `entry` and `exit_` are how each stream comes and goes."""
        super().__init__()
        self.job, self.groups, self.parts = job, groups, tuple(parts)
        self.is_first = groups.stage == 0
        self.is_last = groups.stage == groups.num_stages - 1
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
        # ranks that see other tokens: of the data group, and of a Ulysses group
        copies = self.vocab.data_degree * (self.vocab.degree if self.vocab.kind == "ulysses" else 1)
        # each loss is a mean: their sum over micro-batches and ranks becomes one too
        self._scale = 1.0 / (job.plan.num_microbatches * copies)
        self.loss_scale = 1.0
        """Of the losses, and so of the gradients, of this step; more than 1 in fp16 alone."""
        self._body: Callable[..., _Streams] = self._run
        sharded = [m for p in parts if isinstance(p.unit, Shard) for m in p.modules]
        if sharded:
            root = _Root(sharded)
            shard = next(p for p in parts if isinstance(p.unit, Shard))
            make_root(root, groups.flat_mesh(shard.layout.sync_axes))
            # not a child: its units are children of `held` already
            self._body = lambda *xs: root(self._run, *xs)

    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every stream that a stage after the first receives."""
        return self._shapes(self._entry)

    def exit_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of every stream that a stage before the last sends."""
        return self._shapes(self._exit)

    def token_shapes(self) -> tuple[tuple[int, int], ...]:
        """Return samples and tokens of a micro-batch, by stream, where embedding or head is."""
        plan, vocab = self.job.plan, self.vocab
        split = vocab.degree if vocab.kind == "ulysses" else 1
        samples = plan.global_batch // plan.num_microbatches // vocab.data_degree
        return tuple((samples, length // split) for length in stream_lengths(self.job.spec))

    def begin_step(self, labels: Sequence[torch.Tensor]) -> None:
        """Give the last stage the labels of every micro-batch, (sequence, batch) each."""
        self._labels = labels
        self._forwards = self._backwards = 0

    def forward(self, *xs: torch.Tensor) -> _Streams:
        """Return activations for the next stage, or on the last one this rank's scaled loss, (1,).

        The first stage takes tokens, (batch, sequence).
        """
        out: _Streams = self._body(*xs)
        self._forwards += 1
        return out

    def before_backward(self) -> None:
        """Prepare the next backward; called before each of them."""
        self._backwards += 1
        is_last = self._backwards == self.job.plan.num_microbatches
        reduces = is_last or not self.job.async_grad_reduce
        for part in self.parts:
            if isinstance(part.unit, Shard):
                part.unit.before_backward(is_last=is_last, reduces=reduces)
            else:
                part.unit.before_backward(reduces=reduces)

    def finish_backward(self) -> None:
        """Make the gradients of all micro-batches whole: over data, tensor group and both ends."""
        for part in self.parts:
            part.unit.finish_backward()
        # after the sums over the data group, which write the same gradients
        for part in self.parts:
            self._sum_partial(part)
        self._sum_ends()

    def step(self) -> None:
        """Let the optimizers step."""
        for part in self.parts:
            part.unit.step(self.loss_scale)

    def skip_step(self) -> None:
        """Drop the gradients of a step."""
        for part in self.parts:
            part.unit.skip()

    def squared_gradient_norm(self) -> torch.Tensor:
        """Return this rank's share: summed over all ranks it is the squared norm of the model.

        Of gradients whose losses are not scaled.
        """
        ranks = self.groups.cube.num_ranks
        total: Any = 0.0
        for part in self.parts:
            shards = part.layout.sync_degree if isinstance(part.unit, Shard) else 1
            for name, piece, grad in part.gradients():
                if part.name == "head" and name == self._copied_table():
                    continue  # the embedding on the first stage counts it
                # each rank that has these elements counts its share of them
                copies = ranks / (piece.pieces * shards)
                total = total + grad.double().square().sum() / copies
        return torch.as_tensor(total / self.loss_scale**2, dtype=torch.float64)

    def loss_share(self, loss: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of a loss: summed over all ranks it is that of the batch."""
        # tensor ranks have the same loss, Ulysses ranks that of their own tokens
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
            # batches come (batch, sequence), layers work on (sequence, batch)
            embedded = self._embedding(*(tokens.t().contiguous() for tokens in streams))
            # both come one after the other along the sequence
            lengths = [shape[0] for shape in self._shapes(lie)]
            streams = list(embedded.split(lengths)) if len(lengths) > 1 else [embedded]
            del embedded
        for part in self._layers:
            for k in part.streams:
                streams[k] = relayout(streams[k], groups, lie[k], part.layout)
                lie[k] = part.layout
            streams[part.streams[0]] = part.modules[0](*(streams[k] for k in part.streams))
        if self._head is None:
            # of a stream that no layer replaced this may be a piece of what is embedded, and FSDP
            # wants no views out of a stage
            whole = tuple(x.clone() if x._is_view() else x for x in streams)
            return whole if len(whole) > 1 else whole[0]
        x = relayout(streams[0], groups, lie[0], self.vocab)
        del streams
        # one dimension: the pipeline joins the outputs of micro-batches
        loss = self._head(x, self._labels[self._forwards]).view(1)
        return loss * (self._scale * self.loss_scale)

    def _sum_partial(self, part: Part) -> None:
        """Sum what ranks of a tensor group each have a part of; one all-reduce per part."""
        found = [(piece, grad) for _, piece, grad in part.gradients() if piece.is_partial]
        if not found:
            return
        buffers = []
        for piece, grad in found:
            # a row for each piece: one sum over the group adds only what belongs together
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
    """Has all units that FSDP divides as children, and runs the whole stage."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.units = nn.ModuleList(modules)

    def forward(self, run: Callable[..., _Streams], *xs: torch.Tensor) -> _Streams:
        return run(*xs)


class _Vocab(nn.Module):
    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last


def build_stage(
    job: PlanJob,
    groups: PlanGroups,
    *,
    device: torch.device | str,
    has_values: bool = True,
) -> Stage:
    """Return this rank's stage of a plan.

    has_values : False where tensors have no contents.
    """
    builder = _Builder(job, groups, torch.device(device), has_values)
    plan = job.plan
    first = sum(plan.stage_sizes[: groups.stage])
    layers = range(first, first + plan.stage_sizes[groups.stage])
    parts = []
    for k in layers:
        parts.append(builder.layer(k))
        if k + 1 == num_encoder_layers(job.spec):
            parts.append(builder.encoder_norm(k))
    at_start, at_end = groups.stage == 0, groups.stage == plan.num_stages - 1
    # a tied table on one stage is one parameter, which one unit must own
    if at_start and at_end and job.spec.tied_embeddings:
        parts = [builder.ends(), *parts]
    else:
        if at_start:
            parts = [builder.vocab_part("first"), *parts]
        if at_end:
            parts = [*parts, builder.vocab_part("last")]
    entry, exit_ = (entry_layouts(job, groups.cube, k) for k in (first, layers.stop))
    return Stage(job, groups, parts, entry=entry, exit_=exit_)


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
        full: Checkpoint = "full" if self.job.plan.layers[index].checkpoint else "none"
        module = build_layer(
            spec,
            Sharding(degree=layout.degree, kind=layout.kind, checkpoint=full),
            group=self.groups.group(layout.tensor_axes),
            dtype=self.dtype,
            device=self.device,
        )
        self._share_tables(module, (kind, layout.kind, layout.tensor_axes))
        whole = self._whole(
            kind, lambda: build_layer(spec, Sharding(), dtype=self.dtype, device="meta")
        )
        streams = layer_streams(self.spec, index)
        return self._part(f"layer{index}", (module,), module, layout, whole, streams)

    def _share_tables(self, layer: nn.Module, alike: object) -> None:
        """Let layers that are alike have one table of positions, as engines do."""
        for place, module in layer.named_modules():
            for name, table in module.named_buffers(recurse=False):
                setattr(module, name, self._tables.setdefault((alike, place, name), table))

    def encoder_norm(self, index: int) -> Part:
        """Return the norm behind the last layer of the encoder, laid out as that layer is."""
        layout = layer_layout(self.job, self.groups.cube, index)
        kind = self.spec.layers[self._types[index]]
        with made_of(self.dtype, self.device):
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
        )
        if which == "last":
            take_encoder_norm(module)  # a part of its own
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
        unit: Replica | Shard
        if layout.is_sharded:
            unit = Shard(
                modules,
                self.groups.flat_mesh(layout.sync_axes),
                gathers_twice=layout.zero == "zero3",
                precision=job.precision,
                fp32_gradients=job.fp32_gradients,
                learning_rate=job.learning_rate,
            )
        else:
            unit = Replica(
                list(holder.parameters()),
                self.groups.group(layout.sync_axes),
                precision=job.precision,
                fp32_gradients=job.fp32_gradients,
                learning_rate=job.learning_rate,
            )
        return Part(
            name=name,
            modules=modules,
            layout=layout,
            holder=holder,
            pieces=pieces,
            unit=unit,
            streams=streams,
        )
