"""Memory counted without a device is that of real ranks, to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from profiler.model.layers.sharding import Sharding
from tests.gloo import run_ranks

pytestmark = pytest.mark.whole

torch = pytest.importorskip("torch", reason="the profilers need torch")

SMALL = LayerSpec(
    num_layers=1,
    seq_length=64,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=160,
    gated_mlp=True,
)
REAL = tuple(
    (kind, checkpoint, experts)
    for kind, checkpoint, experts in product(
        ("tp", "sp", "dtensor_sp", "ulysses"), ("none", "full"), (None, 8)
    )
    if checkpoint == "none" or experts is None
)


def small(experts: int | None) -> LayerSpec:
    """Return the small layer, dense or with experts."""
    return replace(SMALL, num_experts=experts, experts_per_token=2 if experts else None)


def real_counts() -> list[tuple[int, int, int]]:
    """Count parameters, activation and peak of real layers on this rank of a real group."""
    import torch.distributed as dist

    from profiler.model.counting import count_memory, layer_memory
    from profiler.model.layers.blocks import build_layer, layer_inputs
    from profiler.model.layers.vocab import build_vocab, vocab_inputs

    group, found = dist.group.WORLD, []
    on: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    for kind, checkpoint, experts in REAL:
        sharding = Sharding(degree=dist.get_world_size(), kind=kind, checkpoint=checkpoint)
        counts = []
        for _ in range(2):
            layer = build_layer(small(experts), sharding, group=group, **on)
            inputs = layer_inputs(small(experts), sharding, batch=2, **on)
            counts.append(count_memory(layer, inputs))
        # gloo's thread lets go of tensors late, on a busy machine very late: that only adds
        found.append(min(counts, key=lambda counted: counted.peak_bytes))
    spec = ModelSpec(name="small", layers=(SMALL,), vocab_size=1000)
    for kind, part in product(("tp", "sp", "ulysses"), ("only", "first", "last")):
        where: dict[str, Any] = {"degree": dist.get_world_size(), "kind": kind, **on}
        outer = build_vocab(spec, part, group=group, **where)
        found.append(count_memory(outer, vocab_inputs(spec, part, batch=2, **where)))
    # counting leaves the process's own groups alone
    layer_memory(SMALL, Sharding(degree=4))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert int(ones) == dist.get_world_size()
    return [(m.num_parameters, m.activation_bytes, m.peak_bytes) for m in found]


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_counts_are_those_of_real_ranks(degree: int) -> None:
    """Shapes alone give what real tensors on real ranks give, to the byte."""
    from profiler.model.counting import layer_memory, vocab_memory

    spec = ModelSpec(name="small", layers=(SMALL,), vocab_size=1000)
    expected = [
        layer_memory(
            small(experts), Sharding(degree=degree, kind=kind, checkpoint=checkpoint), batch=2
        )
        for kind, checkpoint, experts in REAL
    ] + [
        vocab_memory(spec, part, degree=degree, kind=kind, batch=2)
        for kind, part in product(("tp", "sp", "ulysses"), ("only", "first", "last"))
    ]
    for counts in run_ranks(real_counts, degree):
        for found, memory in zip(counts, expected, strict=True):
            assert found[:2] == (memory.num_parameters, memory.activation_bytes)
            # gloo copies what it reduces and scatters, and its thread lets go of tensors late
            assert memory.peak_bytes <= found[2] <= 1.6 * memory.peak_bytes
