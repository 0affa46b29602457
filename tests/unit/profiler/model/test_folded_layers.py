"""Layers whose sequence or experts are divided, and what of them is recomputed, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerSpec
from autopar.run.plan import LayerStrategy, Module
from profiler.model.layers.sharding import Sharding, held_tokens
from profiler.plan.arithmetic import cube_of, examine, layer_layout
from tests.plan_cases import LLAMA as MODEL, MOE, SHARED, make_job
from tests.unit.small_models import LATENT

torch = pytest.importorskip("torch", reason="the profilers need torch")

DENSE = LayerSpec(
    num_layers=1,
    seq_length=512,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=640,
    gated_mlp=True,
)
MIXTURE = replace(DENSE, num_experts=8, experts_per_token=2, ffn_hidden_size=128)


@given(
    context=st.integers(1, 5), shards=st.integers(1, 4), step=st.integers(1, 3), fine=st.booleans()
)
def test_ranks_hold_the_sequence_once_and_have_as_much_to_do(
    context: int, shards: int, step: int, fine: bool
) -> None:
    """Every token is on one rank; with a causal mask context ranks see as many tokens."""
    # a shard need not begin where a piece does
    length = 2 * context * shards * step if fine else context * shards * 2
    held, seen = [], []
    for i in range(context):
        own = []
        for r in range(shards):
            pieces = held_tokens(length, context=(context, i), shard=(shards, r))
            tokens = [token for first, end in pieces for token in range(first, end)]
            assert len(tokens) == length // (context * shards)
            own += tokens
        held += own
        # the query at place k sees k + 1 keys
        seen.append(sum(token + 1 for token in own))
    assert sorted(held) == list(range(length))
    assert len(set(seen)) == 1


def test_front_and_back_come_in_the_order_of_the_sequence() -> None:
    assert held_tokens(16, context=(4, 1)) == ((2, 4), (12, 14))
    assert held_tokens(16, context=(4, 3)) == ((6, 10),)
    assert held_tokens(16, context=(2, 0), shard=(2, 1)) == ((12, 16),)
    assert held_tokens(16, shard=(4, 1)) == ((4, 8),)


def test_experts_lie_across_the_other_groups() -> None:
    """Four neighbours have an expert group, whichever tensor and context groups they are in."""
    job = make_job(8, LayerStrategy(tp=2, cp=2, ep=4), model=MOE)
    cube = cube_of(job.plan)
    layout = layer_layout(job, cube, 0)

    assert layout.expert_axes is not None
    assert cube.groups(layout.tensor_axes)[0] == (0, 1)
    assert cube.groups(layout.context_axes)[0] == (0, 2)
    assert cube.groups(layout.expert_axes) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert cube.groups(layout.expert_sync_axes)[0] == (0, 4)
    assert cube.groups(layout.sync_axes)[0] == (0, 2, 4, 6)


# --- memory ----------------------------------------------------------------------------------


def kept(spec: LayerSpec, *modules: Module, **sharding: Any) -> int:
    """Return the bytes that a layer keeps for its backward, of one sample in bf16."""
    from profiler.model.counting import layer_memory

    recompute = tuple(sorted(modules))
    return layer_memory(spec, Sharding(recompute=recompute, **sharding)).activation_bytes


def test_recomputation_saves_what_a_module_keeps() -> None:
    """To the byte: sums of softmax, norms' outputs, all of an MLP, an expert's product."""
    tokens, h, ffn = DENSE.seq_length, DENSE.hidden_size, DENSE.ffn_hidden_size or 0
    whole = kept(DENSE)

    # its output is kept by the projection behind it: of attention itself one fp32 sum a row
    assert whole - kept(DENSE, "core_attn") == 4 * tokens * (DENSE.num_heads or 0)
    # of two norms; their inputs, and a number a token, stay
    assert whole - kept(DENSE, "layernorm") == 2 * 2 * tokens * h
    # both products, what the function makes of one, and their product
    assert whole - kept(DENSE, "mlp") == 4 * 2 * tokens * ffn
    # the norm in front is made again with it, its number a token too
    both = kept(DENSE, "mlp", "layernorm")
    assert kept(DENSE, "mlp") - both == 2 * 2 * tokens * h + 4 * tokens

    visits = 2 * tokens
    mixture, width = kept(MIXTURE), MIXTURE.ffn_hidden_size or 0
    assert mixture - kept(MIXTURE, "moe_act") == 2 * visits * width
    assert kept(MIXTURE, "moe") < mixture - 4 * 2 * visits * width
    assert kept(MIXTURE, "mlp") == mixture
    assert kept(DENSE, "moe", "moe_act", "shared_experts") == whole


@pytest.mark.whole
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("kind", ["sp", "tp", "ulysses"])
@pytest.mark.parametrize("query_rank", [24, None])
def test_expanded_latents_are_made_again(degree: int, kind: Any, query_rank: int | None) -> None:
    """Queries, keys and values go, latents stay; with attention itself its sums go too."""
    assert LATENT.latent is not None
    spec = replace(LATENT, latent=replace(LATENT.latent, query_rank=query_rank))
    how: dict[str, Any] = {"degree": degree, "kind": kind}
    whole = kept(spec, **how)
    latent, rows = LATENT.latent, spec.seq_length * (spec.num_heads or 0) // degree
    wide = 2 * (latent.key_width + latent.rotary_width) + latent.value_width

    assert whole - kept(spec, "mla_up_proj", **how) == 2 * rows * wide
    both = kept(spec, "core_attn", "mla_up_proj", **how)
    # under Ulysses the output is kept twice else: by heads, and as tokens have it
    sums = 4 + (2 * latent.value_width if kind == "ulysses" and degree > 1 else 0)
    assert whole - both == rows * (2 * wide + sums)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_context_ranks_keep_their_share(exchange: Any) -> None:
    """Half the tokens, half the bytes: what others send is kept by nobody."""
    assert kept(DENSE, context_degree=2, context_exchange=exchange) == kept(DENSE) // 2
    both = kept(DENSE, context_degree=2, degree=2, context_exchange=exchange)
    assert both == kept(DENSE, degree=2) // 2


# --- experts ---------------------------------------------------------------------------------


def built(spec: LayerSpec, **sharding: Any) -> Any:
    from profiler.model.layers.blocks import build_layer

    torch.manual_seed(5)
    layer = build_layer(spec, Sharding(**sharding), dtype=torch.float64, device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer


def test_tokens_go_where_the_router_sends_them() -> None:
    """Every token is the weighted sum of its two best experts, and of what all tokens visit."""
    spec = SHARED.layers[0]
    mixture = built(spec, routing="top_k").mlp
    x = torch.randn(6, 3, spec.hidden_size, dtype=torch.float64)
    expected = torch.empty_like(x)
    for place in torch.cartesian_prod(torch.arange(6), torch.arange(3)).tolist():
        token = x[tuple(place)]
        scores = mixture.router @ token + mixture.router_bias
        best = scores.argsort(descending=True)[:2]
        weights = scores[best].exp() / scores[best].exp().sum()
        out = torch.zeros_like(token)
        for weight, expert in zip(weights, best, strict=True):
            gate, up = (token @ matrix[expert] for matrix in mixture.experts.ups)
            inner = torch.nn.functional.silu(gate) * up
            out += weight * (inner @ mixture.experts.down[expert])
        gate, up = (matrix @ token for matrix in mixture.shared.mlp.up.weights)
        all_visit = mixture.shared.mlp.down.weight @ (torch.nn.functional.silu(gate) * up)
        expected[tuple(place)] = out + torch.sigmoid(mixture.shared.gate @ token) * all_visit
    # softmax and its sums are of 32 bits at least
    torch.testing.assert_close(mixture(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("routing", ["even", "top_k"])
@pytest.mark.parametrize(
    "modules",
    [
        ("core_attn",),
        ("layernorm",),
        ("moe_act",),
        ("moe",),
        ("layernorm", "moe", "shared_experts"),
    ],
)
def test_recomputed_layers_have_the_same_gradients(
    routing: Any, modules: tuple[Module, ...]
) -> None:
    """What is made again is what it was."""
    spec = SHARED.layers[0]
    x = torch.randn(16, 2, spec.hidden_size, dtype=torch.float64)
    found = []
    for recompute in ((), modules):
        layer = built(spec, routing=routing, recompute=recompute)
        own = x.clone().requires_grad_()
        layer(own).square().sum().backward()
        found.append([own.grad, *(p.grad for p in layer.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=0)


@pytest.mark.parametrize("modules", [("mla_up_proj",), ("core_attn", "mla_up_proj")])
def test_latents_are_expanded_twice_to_the_same(modules: tuple[Module, ...]) -> None:
    """Gradients are those of a layer that keeps its queries, keys and values."""
    x = torch.randn(LATENT.seq_length, 2, LATENT.hidden_size, dtype=torch.float64)
    found = []
    for recompute in ((), modules, ("layernorm", *modules)):
        layer = built(LATENT, recompute=recompute)
        own = x.clone().requires_grad_()
        layer(own).square().sum().backward()
        found.append([own.grad, *(p.grad for p in layer.parameters())])
    for plain, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(plain, other, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"latent": LATENT.latent, "num_kv_heads": None}, "latent attention"),
        ({"window": 8}, "attention within a window"),
        ({"attention_sinks": True}, "attention sinks"),
    ],
)
def test_attention_that_context_ranks_do_not_divide_is_refused(
    changes: dict[str, Any], name: str
) -> None:
    """By the layer, and by the examination of a plan; alone it is built."""
    spec = replace(MODEL.layers[0], **changes)
    built(spec)
    with pytest.raises(InputError) as caught:
        built(spec, context_degree=2)
    assert str(caught.value) == (f"layers with {name} need context degree 1")
    plan = make_job(2, LayerStrategy(cp=2), model=replace(MODEL, layers=(spec,)))
    assert examine(plan).obstacle == (
        f"layer 0 has {name} and context degree 2, which the executor does not support. "
        "Use context degree 1"
    )


def test_what_is_not_built_is_said() -> None:
    """A window as long as the sequence is none."""
    built(replace(MODEL.layers[0], window=MODEL.layers[0].seq_length))
    with pytest.raises(InputError, match="2 \\* context degree 3 \\* degree 1 does not divide"):
        built(MODEL.layers[0], context_degree=3)
