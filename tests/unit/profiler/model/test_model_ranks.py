"""Reference layers over two real ranks compute what whole ones do: outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.records import replace
from profiler.model.layers.sharding import Sharding
from tests.gloo import run_ranks
from tests.unit.small_models import LAYERS, MIXTURE, MODEL

pytestmark = pytest.mark.whole

torch = pytest.importorskip("torch", reason="the profilers need torch")

KINDS = ("tp", "sp", "dtensor", "dtensor_sp", "ulysses")
F64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def piece(tensor: Any, like: Any, rank: int) -> Any:
    """Return the part of a whole tensor that a rank with a tensor of `like`'s shape has."""
    for dim, (whole, own) in enumerate(zip(tensor.shape, like.shape, strict=True)):
        if whole != own:
            return tensor.chunk(whole // own, dim)[rank]
    return tensor


def compare(
    whole: Any, own: Any, inputs: Any, own_inputs: Any, *, split: bool, own_loss: bool = False
) -> float:
    """Return how far output and gradients of a divided module are from those of the whole one.

    `split`: ranks hold different tokens, so what is not divided has gradients to be summed.
    `own_loss`: each rank's loss is the mean over its tokens, the whole one is the mean of those.
    """
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for (name, parameter), (other, full) in zip(
            own.named_parameters(), whole.named_parameters(), strict=True
        ):
            assert name == other
            parameter.copy_(piece(full, parameter, rank))
            parameter.grad = full.grad = None
    for tensor in (*inputs, *own_inputs):
        tensor.grad = None

    expected, found = whole(*inputs), own(*own_inputs)
    if own_loss:
        found = found / ranks
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), **F64)
    expected.backward(weight)
    found.backward(piece(weight, found, rank))
    with torch.no_grad():
        if own_loss:
            dist.all_reduce(found)
        gaps = [(found - piece(expected, found, rank)).abs().max()]
        for tensor, full in zip(own_inputs, inputs, strict=True):
            if tensor.requires_grad:
                gaps.append((tensor.grad - piece(full.grad, tensor, rank)).abs().max())
        for (name, parameter), full in zip(own.named_parameters(), whole.parameters(), strict=True):
            # norms of heads see a rank's own heads, whatever tokens it has
            summed = split or name.endswith(("query_norm.weight", "key_norm.weight"))
            if summed and parameter.shape == full.shape:
                dist.all_reduce(parameter.grad)
            gaps.append((parameter.grad - piece(full.grad, parameter, rank)).abs().max())
    return float(torch.stack(gaps).max())  # not a number where one of them is not


# --- what ranks do: top-level, since they are started anew ---


def layer_gaps(names: list[str]) -> dict[str, float]:
    """Return the largest difference between divided and whole layers, by layer and kind."""
    import torch.distributed as dist

    from profiler.model.layers.blocks import build_layer, layer_inputs

    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in names:
        spec = LAYERS[name]
        torch.manual_seed(1)
        whole = build_layer(spec, Sharding(), group=None, **F64)
        inputs = layer_inputs(spec, Sharding(), batch=2, **F64)
        for kind in KINDS:
            for checkpoint in ("none", "selective", "full"):
                sharding = Sharding(degree=ranks, kind=kind, checkpoint=checkpoint)
                own = build_layer(spec, sharding, group=dist.group.WORLD, **F64)
                split = sharding.shards_sequence
                own_inputs = [
                    (x.detach().chunk(ranks)[rank] if split else x.detach()).requires_grad_()
                    for x in inputs
                ]
                gap = compare(whole, own, inputs, own_inputs, split=split)
                found[f"{name} {kind} {checkpoint}"] = gap
    return found


def outer_gaps() -> dict[str, float]:
    """Return the largest difference between divided and whole embedding and head."""
    import torch.distributed as dist

    from profiler.model.layers.vocab import build_vocab, vocab_inputs

    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for part in ("only", "first", "last"):
        torch.manual_seed(2)
        # 300 would be padded differently for two ranks
        spec = replace(MODEL, vocab_size=512)
        whole = build_vocab(spec, part, **F64)
        inputs = vocab_inputs(spec, part, batch=2, **F64)
        if part == "first":  # two sequences come out as one, which ranks divide one by one
            inputs = inputs[:1]
        for kind in KINDS:
            own = build_vocab(spec, part, degree=ranks, kind=kind, group=dist.group.WORLD, **F64)
            split = kind in ("sp", "dtensor_sp", "ulysses")
            own_inputs = []
            for x in inputs:
                shard = kind == "ulysses" or (split and x.is_floating_point())
                x = x.detach().chunk(ranks)[rank] if shard else x.detach()
                own_inputs.append(x.requires_grad_(x.is_floating_point()))
            own_loss = kind == "ulysses" and part != "first"
            gap = compare(whole, own, inputs, own_inputs, split=split, own_loss=own_loss)
            found[f"{part} {kind}"] = gap
    return found


def all_gaps() -> dict[str, float]:
    """Return the differences of all divided parts."""
    return {**layer_gaps(list(LAYERS)), **outer_gaps(), "spread mixture": expert_gap()}


def expert_gap() -> float:
    """Return how far a mixture over two ranks is from the same experts on one."""
    import torch.distributed as dist

    from profiler.model.layers.blocks import build_layer, layer_inputs

    torch.manual_seed(4)
    whole = build_layer(MIXTURE, Sharding(), group=None, **F64)
    spread = build_layer(
        MIXTURE, Sharding(expert_degree=2), group=None, expert_group=dist.group.WORLD, **F64
    )
    with torch.no_grad():
        pairs = zip(spread.parameters(), whole.parameters(), strict=True)
        for parameter, full in pairs:
            parameter.copy_(piece(full, parameter, dist.get_rank()))
    (x,) = layer_inputs(MIXTURE, Sharding(), batch=2, **F64)
    return float((whole(x) - spread(x)).abs().max())


# --- tests ---


@pytest.fixture(scope="module")
def gaps() -> dict[str, float]:
    """Return how far two ranks are from one, by part and kind: the worse of both."""
    first, second = run_ranks(all_gaps, 2)
    assert first.keys() == second.keys()
    return {name: max(first[name], second[name]) for name in first}


@pytest.mark.parametrize("name", ["llama", "gpt", "decoder", "normed", "latent"])
def test_divided_layers_compute_what_whole_ones_do(gaps: dict[str, float], name: str) -> None:
    """Outputs, gradients of inputs and of weights agree to the rounding of fp64, on two ranks."""
    own = {key: gap for key, gap in gaps.items() if key.startswith(f"{name} ")}
    assert len(own) == len(KINDS) * 3
    assert {key: gap for key, gap in own.items() if not gap < 1e-10} == {}


def test_divided_mixtures_compute_what_whole_ones_do(gaps: dict[str, float]) -> None:
    """So do mixtures, over a tensor group and over an expert group (Ulysses routes by rank)."""
    names = ("mixture", "shared")
    own = {
        key: gap
        for key, gap in gaps.items()
        if any(name in key for name in names) and "ulysses" not in key
    }
    assert len(own) == 2 * (len(KINDS) - 1) * 3 + 1
    assert {key: gap for key, gap in own.items() if not gap < 1e-10} == {}


@pytest.mark.parametrize("part", ["only", "first", "last"])
def test_divided_outer_parts_compute_what_whole_ones_do(gaps: dict[str, float], part: str) -> None:
    """Tables divided by vocabulary give the same embeddings, loss and gradients."""
    own = {key: gap for key, gap in gaps.items() if key.startswith(f"{part} ")}
    assert len(own) == len(KINDS)
    assert {key: gap for key, gap in own.items() if not gap < 1e-10} == {}
