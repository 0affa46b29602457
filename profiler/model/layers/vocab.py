"""Embedding, head and loss of a model, with the shapes of one rank.

The tables of embedding and head are sharded over the group by vocabulary, as in Megatron-LM. With
Ulysses they are replicated and the sequence is sharded. The loss is computed in fp32 and saves its
softmax. Tokens and labels have shape (sequence, batch).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.run.model import ModelSpec, padded_vocab_size
from profiler.model.layers.attention import Norm, has_norm_biases
from profiler.model.layers.blocks import build_layer, tensor_defaults
from profiler.model.layers.parallel import (
    ColumnParallel,
    TensorGroup,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from profiler.model.layers.sharding import Routing, Sharding, held_tokens
from profiler.model.modules import Built

VocabPart = Literal["only", "first", "last"]


def build_vocab(
    spec: ModelSpec,
    part: VocabPart,
    *,
    degree: int = 1,
    kind: TensorKind = "sp",
    group: Any = None,
    dtype: torch.dtype,
    device: torch.device | str,
    context: tuple[int, int] = (1, 0),
) -> nn.Module:
    """Return the module of embedding, head or both on one rank of a vocabulary-parallel group.

    Its inputs are those of `vocab_inputs`.

    part : `first` maps tokens to activations; `last` maps activations and labels to the loss.
    `only` maps tokens and labels to the loss, without the layers in between.

    degree : size of the vocabulary-parallel group.
    group : as in `build_layer`.
    context : (degree, rank) in a context-parallel group.

    In encoder-decoder models, every input and output except the loss has two sequences; the
    decoder's comes first. Tied tables are one tensor in `only`, and two in `first` and `last`.
    Parameters that a spec describes only by their number are allocated, but not used. Raises
    InputError if the part cannot be built.
    """
    on = TensorGroup(degree=degree, kind=kind, group=group)
    for length in _lengths(spec):
        if on.splits_sequence and length % degree:
            raise InputError(
                f"vocabulary degree {degree} does not divide the sequence length {length}",
                remedy="Use a divisor",
            )
        if 0 < spec.learned_positions < length:
            raise InputError(
                f"model {spec.name!r}: the sequence length {length} exceeds the "
                f"{spec.learned_positions} learned positions",
                remedy="Use a shorter sequence",
            )
    with tensor_defaults(dtype, device):
        return _Vocab(spec, part, on, context)


def take_encoder_norm(last: Any) -> Norm | None:
    """Remove the final norm of the encoder from a `last` module and return it; None without one.

    The `last` module contains the norm so that its memory is counted. A caller that also runs the
    layers must apply it between encoder and decoder.
    """
    norm: Norm | None = last.encoder_norm
    last.encoder_norm = None
    return norm


def vocab_inputs(
    spec: ModelSpec,
    part: VocabPart,
    *,
    degree: int = 1,
    kind: TensorKind = "sp",
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[torch.Tensor, ...]:
    """Return random inputs for the module of `build_vocab` on one rank.

    With a sharded vocabulary, tokens and labels are whole sequences, since every rank looks up all
    tokens; with Ulysses they are a shard of the sequence. Activations have the shape of a rank's
    residual stream. In encoder-decoder models, the order is: input of the decoder, labels, input of
    the encoder. Raises InputError if the vocabulary size is unknown.
    """
    vocab = spec.vocab_size
    if vocab is None:
        raise InputError(
            f"model {spec.name!r}: the vocabulary size is unknown", remedy="Add vocab_size"
        )
    split_tokens = kind == "ulysses"
    split = kind in ("sp", "dtensor_sp", "ulysses")
    hidden = spec.layers[-1].hidden_size

    def tokens(length: int) -> torch.Tensor:
        local = length // degree if split_tokens else length
        return torch.randint(0, vocab, (local, batch), dtype=torch.int64)

    def activations(length: int) -> torch.Tensor:
        return torch.randn(length // degree if split else length, batch, hidden, requires_grad=True)

    own, *encoder = _lengths(spec)
    with tensor_defaults(dtype, device):
        source = activations if part == "last" else tokens
        labels = [] if part == "first" else [tokens(own)]
        return (source(own), *labels, *(source(length) for length in encoder))


def _lengths(spec: ModelSpec) -> list[int]:
    """Return the sequence lengths of the decoder and, for an encoder-decoder, of the encoder."""
    if not spec.layers[-1].cross_attention:
        return [spec.layers[-1].seq_length]
    return [spec.layers[-1].seq_length, spec.layers[0].seq_length]


# --- functions -----------------------------------------------------------------------------


class _Embed(torch.autograd.Function):
    """Embedding lookup in the rows of this rank, summed over the group; saves the tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, table: Any, group: Any, split: bool, first: int) -> Any:
        ctx.group, ctx.split, ctx.first, ctx.rows = group, split, first, table.shape[0]
        ctx.save_for_backward(tokens)
        if group is None:
            return nn.functional.embedding(tokens, table)
        places, foreign = _own(tokens, first, table.shape[0])
        # rows of other ranks are 0 in the sum over the group
        out = nn.functional.embedding(places, table).masked_fill_(foreign[..., None], 0)
        return reduce_scatter(out, group) if split else all_reduce(out, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        if ctx.group is None:
            places = tokens
        else:
            # every rank has looked up all tokens, so its rows need all their gradients
            grad = all_gather(grad, ctx.group) if ctx.split else grad
            places, foreign = _own(tokens, ctx.first, ctx.rows)
            grad = grad.masked_fill(foreign[..., None], 0)
        table = grad.new_zeros(ctx.rows, grad.shape[-1])
        # gradients of a token that occurs several times are summed
        table.index_add_(0, places.flatten(), grad.flatten(0, -2))
        return None, table, None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits sharded by vocabulary; saves the fp32 softmax and the labels."""

    @staticmethod
    def forward(ctx: Any, logits: Any, labels: Any, group: Any, first: int) -> Any:
        ctx.first, ctx.dtype = first, logits.dtype
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        del logits
        # subtracting the largest logit of all ranks prevents overflow, and leaves softmax unchanged
        wide.sub_(all_reduce(wide.amax(-1, keepdim=True), group, largest=True))
        places, foreign = _own(labels, first, wide.shape[-1])
        # the label's logit is on one rank, and 0 in the sum on all others
        chosen = wide.gather(-1, places[..., None]).squeeze(-1).masked_fill_(foreign, 0)
        chosen = all_reduce(chosen, group)
        total = all_reduce(wide.exp_().sum(-1, keepdim=True), group)
        # in place: the copy of the logits becomes their softmax
        ctx.save_for_backward(wide.div_(total), labels)
        # -log softmax of the label = log of the sum - its logit
        return (total.squeeze(-1).log_() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        softmax, labels = ctx.saved_tensors
        places, foreign = _own(labels, ctx.first, softmax.shape[-1])
        hit = (~foreign).to(softmax.dtype)[..., None]
        # gradient per token: softmax, minus 1 at the label; the loss is the mean over tokens
        softmax.scatter_add_(-1, places[..., None], -hit).mul_(grad / labels.numel())
        return softmax.to(ctx.dtype), None, None, None


class _Context(torch.autograd.Function):
    """Identity of the loss that saves the encoder's output once, as the decoder layers would."""

    @staticmethod
    def forward(ctx: Any, loss: Any, context: Any) -> Any:
        ctx.save_for_backward(context)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, torch.zeros_like(ctx.saved_tensors[0])


def _own(numbers: Any, first: int, count: int) -> tuple[Any, Any]:
    """Return token numbers as rows of this rank's table, and the mask of tokens of other ranks.

    first, count : first token and number of rows of this rank's table.
    """
    places = numbers - first
    foreign = (places < 0) | (places >= count)
    # row 0 is a placeholder: its result is masked
    return places.masked_fill_(foreign, 0), foreign


# --- the module ----------------------------------------------------------------------------


class _Vocab(nn.Module):
    def __init__(
        self, spec: ModelSpec, part: VocabPart, on: TensorGroup, context: tuple[int, int]
    ) -> None:
        super().__init__()
        self.on, self.part, self.context = on, part, context
        first, last = spec.layers[0], spec.layers[-1]
        # padded so that every rank has an equal number of rows
        vocab = padded_vocab_size(spec, on.weight_ranks)
        self.rows = vocab // on.weight_ranks
        self.start = self.rows * on.rank if on.splits_weights else 0
        self.table: Any = None
        self.positions: Any = None
        self.head: Any = None
        if part != "last":
            self.table = _table(self.rows, first.hidden_size)
            if spec.learned_positions:
                self.positions = _table(spec.learned_positions, first.hidden_size)
            self.extra_embedding = _unused(spec.extra_embedding_parameters)
        if part == "first":
            return
        bias = has_norm_biases(last)
        self.norm = Norm(last.hidden_size, bias=bias)
        self.encoder_norm = None
        # an encoder ends with a separate norm, which all decoder layers read
        if last.cross_attention and not first.cross_attention:
            self.encoder_norm = Norm(first.hidden_size, bias=has_norm_biases(first))
        self.head = ColumnParallel(last.hidden_size, [self.rows], bias=False, on=on)
        if self.table is not None and spec.tied_embeddings:
            self.head.weights[0] = self.table
        self.extra_head = _unused(spec.extra_head_parameters)

    def forward(self, x: Any, *others: Any) -> Any:
        if self.part == "first":
            if others:
                return torch.cat([self._embedded(tokens) for tokens in (x, *others)])
            return self._embedded(x)
        labels, *encoder = others
        if self.part == "only":
            x = self._embedded(x)
            encoder = [self._embedded(tokens) for tokens in encoder]
        return self._loss(x, labels, *encoder)

    def _embedded(self, tokens: Any) -> Any:
        on = self.on
        group = on.group if on.splits_weights else None
        split = on.splits_sequence and on.splits_weights
        x = _Embed.apply(tokens, self.table, group, split, self.start)
        if self.positions is None:
            return x
        # after the embedding a rank has only its own tokens
        shard = (on.degree, on.rank) if on.splits_sequence else (1, 0)
        length = len(x) * shard[0] * self.context[0]
        held = held_tokens(length, context=self.context, shard=shard)
        places = torch.cat([torch.arange(*ends, device=x.device) for ends in held])
        # the position table is replicated on every rank, so there is no group
        return x + _Embed.apply(places, self.positions, None, False, 0)[:, None]

    def _loss(self, x: Any, labels: Any, encoder: Any = None) -> Any:
        group = self.on.group if self.on.splits_weights else None
        # no variable here keeps the logits alive while the loss makes its copy of them
        loss = _CrossEntropy.apply(*self.head(self.norm(x)), labels, group, self.start)
        if encoder is None or self.encoder_norm is None:
            return loss
        return _Context.apply(loss, self.encoder_norm(encoder))


def _table(rows: int, width: int) -> Any:
    return nn.Parameter(torch.empty(rows, width).normal_(std=0.02))


def _unused(count: int) -> Any:
    return nn.Parameter(torch.zeros(count)) if count else None


# --------------------------------------------------------------------------------------------------
# A complete model with few layers on one device: embedding, layers, head and loss.


def build_stack(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    routing: Routing = "even",
) -> Built:
    """Return the complete model of a spec on one device, with random weights.

    Its `make_batch` returns tokens and labels of shape (sequence, batch) and, for an
    encoder-decoder, the encoder's tokens. It accepts only the sequence length of the spec. Raises
    InputError if the model cannot be built.
    """
    whole = Sharding(routing=routing)
    first = build_vocab(spec, "first", dtype=dtype, device=device)
    layers = [
        [build_layer(layer, whole, dtype=dtype, device=device) for _ in range(layer.num_layers)]
        for layer in spec.layers
    ]
    last = build_vocab(spec, "last", dtype=dtype, device=device)
    norm = take_encoder_norm(last)
    # on one device a tied table is one tensor
    if spec.tied_embeddings:
        last.head.weights[0] = first.table

    def make_batch(batch: int, seq_length: int) -> Any:
        if seq_length != spec.layers[-1].seq_length:
            raise InputError(
                f"model {spec.name!r} was built for {spec.layers[-1].seq_length} "
                f"tokens, but is called with {seq_length}",
                remedy=f"Build it for {seq_length} tokens",
            )
        return vocab_inputs(spec, "only", batch=batch, dtype=dtype, device=device)

    crosses = [layer.cross_attention for layer in spec.layers]
    return Built(_Stack(first, layers, crosses, norm, last), make_batch, layers)


class _Stack(nn.Module):
    def __init__(
        self,
        first: nn.Module,
        layers: list[list[nn.Module]],
        crosses: list[bool],
        encoder_norm: Any,
        last: nn.Module,
    ) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.encoder_norm: Any = encoder_norm
        self.layers = nn.ModuleList(nn.ModuleList(of_type) for of_type in layers)
        self.crosses = crosses

    def forward(self, tokens: Any, labels: Any, *encoder_tokens: Any) -> Any:
        x = self.first(tokens, *encoder_tokens)
        context = None
        if encoder_tokens:
            x, context = x.split([len(tokens), len(encoder_tokens[0])])
        is_normed = self.encoder_norm is None
        for of_type, crosses in zip(self.layers, self.crosses, strict=True):
            if crosses and not is_normed:
                context, is_normed = self.encoder_norm(context), True
            for layer in of_type:
                # in an encoder-decoder, layers without cross-attention belong to the encoder
                if encoder_tokens and not crosses:
                    context = layer(context)
                else:
                    x = layer(x, context) if crosses else layer(x)
        return self.last(x, labels)
