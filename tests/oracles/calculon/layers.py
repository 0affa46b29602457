"""The operations of one transformer block on one processor, as a readable table.

Sizes are per micro-batch. The sums and the table of the compiled engine are checked against it.
Source: Calculon (SC'23), doi 10.1145/3581784.3607102; corrections are named in `quirks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tests.oracles.calculon.operations import (
    Kind,
    batched_product,
    dropout,
    flash,
    fork,
    gated_silu,
    gather,
    gelu,
    linear,
    norm,
    reduce,
    residual,
    rms_norm,
    softmax,
    tiled_gather,
    tiled_reduce,
)
from tests.oracles.calculon.shape import Shape

Stage = Literal["fw", "agrad", "wgrad", "optim"]
STAGES: tuple[Stage, ...] = ("fw", "agrad", "wgrad", "optim")
"""Forward, gradient of activations, gradient of weights, optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operation of a block: computation, traffic, saved tensors and communication."""

    name: str
    matrix: bool
    """True on the matrix engine, else vector engine; optimizer steps are always vector work."""
    flops: Mapping[Stage, float]
    bytes: Mapping[Stage, float]
    inputs: float
    outputs: float
    """Output size in elements."""
    weight_bytes: float
    activation_bytes: float
    weight_gradient_bytes: float
    """Bytes of the weight gradient, sharded with the optimizer."""
    whole_gradient_bytes: float
    """Bytes of the fp32 gradient before sharding."""
    activation_gradient_bytes: float
    optimizer_bytes: float
    communicates: Literal["F", "G"] | None = None
    """F gathers before column-parallel layers, G reduces after row-parallel ones; None: neither."""
    tiled: bool = False
    """True if the communication overlaps the layer's own tiles."""
    recomputed: bool = False
    recommunicated: bool = False
    reused: bool = False
    """True if it shares its activation with another layer."""
    kept: bool = True
    """True if the activation is stored from forward to backward."""
    output_kept: bool = True


def block_layers(shape: Shape) -> tuple[Layer, ...]:
    """Return the operations of one block in the order of the forward."""
    return tuple(_layer(shape, name, kind, flags) for name, kind, flags in _table(shape))


_Flags = dict[str, bool]
_Row = tuple[str, Kind, _Flags]


def _row(name: str, kind: Kind, **flags: bool) -> _Row:
    return name, kind, flags


def _table(s: Shape) -> list[_Row]:
    return [
        *_entry(s, "AttnBlock"),
        *_projections(s),
        *(_flash_attention(s) if s.flash else _written_attention(s)),
        *_reduced(s, "AttnBlock_MLP", "AttnBlock_G", s.heads * s.head_size),
        *_exit(s, "AttnBlock"),
        *_entry(s, "MlpBlock"),
        *_feed_forward(s),
        *_reduced(s, "MlpBlock_Mlp2", "MlpBlock_G", s.feedforward),
        *_exit(s, "MlpBlock"),
    ]


def _entry(s: Shape, half: str) -> list[_Row]:
    shard, full = s.local_elements, s.recompute_all
    normalize = rms_norm if s.gated else norm
    return [
        _row(f"{half}_Fork", fork(s, shard, 2), recomputed=full),
        _row(f"{half}_LayerNorm", normalize(s, shard), recomputed=full, reused=True, kept=False),
    ]


def _exit(s: Shape, half: str) -> list[_Row]:
    shard, full = s.local_elements, s.recompute_all
    rows = [] if s.gated else [_row(f"{half}_DropOut", dropout(s, shard), recomputed=full)]
    end = _row(f"{half}_Residual", residual(shard), recomputed=full, reused=True, kept=False)
    return [*rows, end]


def _projections(s: Shape) -> list[_Row]:
    full, again = s.recompute_all, s.regather_attention
    width = s.heads * s.head_size
    narrow = {"recomputed": full, "reused": True, "kept": False}
    keys = [
        _row(f"AttnBlock_{name}", linear(s, s.hidden, s.kv_width), **narrow)
        for name in ("Key", "Value")
    ]
    if not s.tiled:
        dropped = again and (s.rs or s.quirks.attention_input_dropped)
        ways = fork(s, s.elements, 3)
        return [
            _row("AttnBlock_F", gather(s), recommunicated=again),
            _row("AttnBlock_Multihead_Fork", ways, recomputed=again, kept=not dropped),
            _row("AttnBlock_Query", linear(s, s.hidden, width / s.tensor), **narrow),
            *keys,
        ]
    tiled = {"recomputed": full, "recommunicated": again}
    if not s.shared_kv:
        columns = width + 2 * s.kv_heads * s.head_size
        return [_row("AttnBlock_QKV_AG", tiled_gather(s, s.hidden, columns), **tiled)]
    return [
        _row("AttnBlock_Query_AG", tiled_gather(s, s.hidden, width), **tiled),
        _row("AttnBlock_KV_Fork", fork(s, s.elements, 2), recomputed=again, kept=not again),
        *keys,
    ]


def _written_attention(s: Shape) -> list[_Row]:
    """Return the rows of attention that writes its scores to memory."""
    att = s.recompute_attention
    lanes = s.microbatch * s.heads // s.tensor
    scores = lanes * s.seq * s.seq
    name = "AttnBlock_Multihead"
    products = batched_product(lanes, s.seq, s.head_size, s.seq)
    sums = batched_product(lanes, s.seq, s.seq, s.head_size)
    again = {"recomputed": att, "output_kept": not att}
    end = _row(f"{name}_Attn", sums, recomputed=s.recompute_all)
    if s.gated:  # without dropout, the value GEMM saves the softmax output
        return [
            _row(f"{name}_Key_Query", products, recomputed=att),
            _row(f"{name}_SoftMax", softmax(s, scores), reused=True, kept=False, **again),
            end,
        ]
    return [
        _row(f"{name}_Key_Query", products, **again),
        _row(f"{name}_SoftMax", softmax(s, scores), **again),
        _row(f"{name}_DropOut", dropout(s, scores), recomputed=att, kept=not att),
        end,
    ]


def _flash_attention(s: Shape) -> list[_Row]:
    # backward recomputes the scores anyway, so only full recomputation repeats it
    return [_row("AttnBlock_Flash", flash(s), recomputed=s.recompute_all)]


def _feed_forward(s: Shape) -> list[_Row]:
    full, again = s.recompute_all, s.regather_mlp
    ways = 2 if s.gated else 1
    inner = s.feedforward * s.tokens / s.tensor
    if s.tiled:
        product = tiled_gather(s, s.hidden, ways * s.feedforward)
        flags = {"recomputed": full, "recommunicated": again}
        rows = [_row("MlpBlock_Mlp1_AG", product, **flags)]
    else:
        product = linear(s, s.hidden, ways * s.feedforward / s.tensor)
        rows = [
            _row("MlpBlock_F", gather(s), recommunicated=again),
            _row("MlpBlock_Mlp1", product, recomputed=full, kept=not again),
        ]
    if s.gated:
        gate = gated_silu(s, inner)
        return [
            *rows,
            _row("MlpBlock_SwiGLU", gate, recomputed=full, output_kept=not s.fused_activation),
        ]
    return [*rows, _row("MlpBlock_GeLU", gelu(s, inner), recomputed=full)]


def _reduced(s: Shape, name: str, link: str, inputs: float) -> list[_Row]:
    """Return the row-parallel GEMM at the end of a half, and its reduction."""
    full = s.recompute_all
    if s.tiled:
        product = tiled_reduce(s, inputs, s.hidden)
        return [_row(f"{name}_RS", product, recomputed=full, recommunicated=full)]
    return [
        _row(name, linear(s, inputs / s.tensor, s.hidden), recomputed=full),
        _row(link, reduce(s), recommunicated=full, kept=False),
    ]


def _layer(s: Shape, name: str, kind: Kind, flags: _Flags) -> Layer:
    e = s.element_bytes
    p = kind.parameters
    backward = (p + kind.activation + kind.gradient) * e
    fw = (kind.inputs + kind.outputs + p) * e if kind.fw_bytes is None else kind.fw_bytes
    agrad = backward if kind.agrad_bytes is None else kind.agrad_bytes
    optimizer = (12 if e < 4 else 8) * p / s.shards
    gradient_bytes = e if s.quirks.weight_gradient_bytes else 4
    return Layer(
        name=name,
        matrix=kind.matrix,
        flops={
            "fw": kind.fw_flops,
            "agrad": kind.agrad_flops,
            "wgrad": kind.wgrad_flops,
            "optim": 11 * p / s.shards,
        },
        bytes={"fw": fw, "agrad": agrad, "wgrad": backward if p > 0 else 0, "optim": optimizer},
        inputs=kind.inputs,
        outputs=kind.outputs,
        weight_bytes=p * e,
        activation_bytes=(
            kind.activation * e if kind.activation_bytes is None else kind.activation_bytes
        ),
        weight_gradient_bytes=p * gradient_bytes / s.shards,
        whole_gradient_bytes=p * 4,
        activation_gradient_bytes=(
            kind.gradient * e if kind.gradient_bytes is None else kind.gradient_bytes
        ),
        optimizer_bytes=optimizer,
        communicates=("F" if name.endswith(("_F", "_AG")) else "G") if kind.communicates else None,
        tiled=kind.communicates and kind.matrix,
        **flags,
    )
