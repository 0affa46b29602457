"""Transformer layers with the shapes of one rank, for counting memory and for timing.

They consist of RMSNorm or LayerNorm, self-attention (`profiler.model.layers.attention`), optional
cross-attention, and a gated (SwiGLU) or plain (GELU) MLP or a mixture of experts (`experts`).
Activations are (sequence, batch, hidden), as in Megatron-LM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerSpec, layer_norms
from profiler.model.layers.attention import Attention, LatentAttention, Norm, has_norm_biases
from profiler.model.layers.context import ContextGroup
from profiler.model.layers.experts import Experts, Mlp
from profiler.model.layers.parallel import TensorGroup
from profiler.model.layers.recompute import discarding, recomputed
from profiler.model.layers.sharding import Sharding


@contextlib.contextmanager
def tensor_defaults(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Create new tensors with this dtype and on this device while the context is active."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_layer(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    group: Any = None,
    dtype: torch.dtype,
    device: torch.device | str,
    expert_group: Any = None,
    context_group: Any = None,
) -> nn.Module:
    """Return one layer with the shapes of one rank; its call is `module(x, context=None)`.

    group : tensor-parallel group, a torch process group or an object with the methods of
        `parallel.SoleRank`; None at degree 1.
    expert_group, context_group : likewise for the expert and context degrees. A decoder layer with
        cross-attention reads the encoder's output as `context`.

    The backward leaves some gradients partial; the caller must sum them over the group. These are
    gradients of key-value heads that several ranks hold, and of norms per head. With sequence
    parallelism, they also include other norms, projections to latents and row-parallel biases.

    Specs do not contain the kind of positions. Causal layers with RMSNorm and without
    cross-attention have rotary positions, which do not change memory. Raises InputError if the
    layer cannot be built.
    """
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown", remedy="Add --model with a model spec")
    if spec.whole_every:
        # profiles contain one time per layer type, so layers without a window are not distinguished
        spec = replace(spec, whole_every=0)
    sharding.check(spec)
    on = TensorGroup(degree=sharding.degree, kind=sharding.kind, group=group)
    context = ContextGroup(
        degree=sharding.context_degree, group=context_group, exchange=sharding.context_exchange
    )
    with tensor_defaults(dtype, device):
        return _Layer(spec, sharding, on, context, expert_group)


def layer_inputs(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
    encoder_seq_length: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return random inputs of a layer on one rank, (sequence, batch, hidden), with gradients.

    The second input of a layer with cross-attention is the encoder's output.

    encoder_seq_length : tokens of the encoder; None means the sequence length of the layer.

    Raises InputError if the degree does not divide a sequence length.
    """
    lengths = [spec.seq_length]
    if spec.cross_attention:
        lengths.append(encoder_seq_length or spec.seq_length)
    for length in lengths:
        if sharding.shards_sequence and length % sharding.degree:
            raise InputError(
                f"degree {sharding.degree} does not divide the sequence length {length}",
                remedy="Use a divisor",
            )
    with tensor_defaults(dtype, device):
        return tuple(
            torch.randn(
                sharding.local_seq_length(length), batch, spec.hidden_size, requires_grad=True
            )
            for length in lengths
        )


class _Layer(nn.Module):
    def __init__(
        self,
        spec: LayerSpec,
        sharding: Sharding,
        on: TensorGroup,
        context: ContextGroup,
        expert_group: Any,
    ) -> None:
        super().__init__()
        self.dropout = sharding.dropout
        self.recompute = sharding.checkpoint == "full"
        self.discards_norms = "layernorm" in sharding.recompute
        has_experts = spec.num_experts is not None
        self.recompute_mlp = ("moe" if has_experts else "mlp") in sharding.recompute
        bias = has_norm_biases(spec)
        h = spec.hidden_size
        number, other = layer_norms(spec), ""
        if number not in ((3,) if spec.cross_attention else (1, 2, 4)):
            other = f"layers with {number} norms"
        elif spec.keys_as_values or spec.keys_reused or spec.value_norms:
            other = "layers whose values are keys, are those of other layers, or have norms"
        if other:
            raise InputError(
                f"{other} are not supported",
                remedy="Measure the model as a custom module (--model py:package.module:factory)",
            )
        self.attention_norm = Norm(h, bias=bias)
        self.attention: nn.Module = (
            Attention(spec, sharding, on, context=context)
            if spec.latent is None
            else LatentAttention(spec, sharding, on, context=context)
        )
        self.cross_norm = Norm(h, bias=bias) if spec.cross_attention else None
        self.cross_attention = (
            Attention(spec, sharding, on, context=context, cross=True)
            if spec.cross_attention
            else None
        )
        self.mlp_norm = Norm(h, bias=bias) if number > 1 else None
        if spec.num_experts is None:
            self.mlp: nn.Module = Mlp(spec, on, width=spec.ffn_hidden_size or 0)
        else:
            self.mlp = Experts(spec, on, sharding, expert_group=expert_group)
        # norms of the outputs of attention and MLP
        self.attention_behind = Norm(h, bias=bias) if number == 4 else None
        self.mlp_behind = Norm(h, bias=bias) if number == 4 else None

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.recompute:
            return recomputed(self._forward, x, context, dropout=self.dropout)
        return self._forward(x, context)

    def _forward(self, x: Any, context: Any) -> Any:
        if self.mlp_norm is None:
            return self._side_by_side(x)
        attended = self._normed(self.attention_norm, self.attention, x)
        attended = _behind(attended, self.attention_behind)
        x = x + self._dropped(attended)
        del attended
        if self.cross_attention is not None and self.cross_norm is not None:
            cross = self.cross_attention
            taken = self._normed(self.cross_norm, lambda normed: cross(normed, context), x)
            x = x + self._dropped(taken)
            # otherwise this tensor would stay alive during the MLP
            del taken
        return x + self._dropped(_behind(self._fed(self.mlp_norm, x), self.mlp_behind))

    def _side_by_side(self, x: Any) -> Any:
        """Return the output of a layer with parallel attention and MLP after one common norm."""
        norm = self.attention_norm
        if self.discards_norms or self.recompute_mlp:
            # attention and MLP recompute the norm separately; a common output would stay alive
            out = x + self._dropped(self._normed(norm, self.attention, x))
            return out + self._dropped(self._fed(norm, x))
        normed = norm(x)
        return x + self._dropped(self.attention(normed)) + self._dropped(self.mlp(normed))

    def _fed(self, norm: nn.Module, x: Any) -> Any:
        """Return the MLP's output for x, including the norm before the MLP."""
        if not self.recompute_mlp:
            return self._normed(norm, self.mlp, x)
        if not self.discards_norms:
            return recomputed(self.mlp, norm(x), dropout=self.dropout)
        # the MLP's input is the norm's output: recompute both together
        return recomputed(lambda x: self.mlp(norm(x)), x, dropout=self.dropout)

    def _normed(self, norm: nn.Module, take: Callable[[Any], Any], x: Any) -> Any:
        return discarding(norm, take, x) if self.discards_norms else take(norm(x))

    def _dropped(self, x: Any) -> Any:
        # F.dropout keeps a wider mask on CPUs than on GPUs
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x


def _behind(x: Any, norm: Norm | None) -> Any:
    return x if norm is None else norm(x)
