"""Reference layers compute what they should, and have the parameters of their specs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.families.config import parse_hugging_face
from autopar.records import replace
from autopar.run.model import (
    embedding_parameter_counts,
    is_hybrid,
    padded_vocab_size,
    parameter_count,
    refuse_hybrid,
)
from profiler.model.layers.sharding import Sharding
from tests.plan_cases import T5
from tests.unit.small_models import GPT, LATENT, LLAMA, MODEL, SHARED

torch = pytest.importorskip("torch", reason="the profilers need torch")

DATA = Path(__file__).resolve().parents[3] / "data"
PUBLISHED = json.loads((DATA / "published_configs.json").read_text(encoding="utf-8"))
KINDS = ("tp", "sp", "dtensor", "dtensor_sp", "ulysses")
F64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def test_operations_agree_with_torch() -> None:
    """Norms, attention, rotation and loss compute what torch's own functions compute."""
    from profiler.model.layers.kernels import (
        attention,
        layer_norm,
        open_attention,
        rms_norm,
        rotary,
    )

    torch.manual_seed(0)
    x = torch.randn(5, 2, 8, requires_grad=True, **F64)
    w, b = torch.randn(8, requires_grad=True, **F64), torch.randn(8, requires_grad=True, **F64)
    functional = torch.nn.functional
    assert torch.allclose(rms_norm(x, w), functional.rms_norm(x, [8], w, 1e-5))
    assert torch.allclose(layer_norm(x, w, b), functional.layer_norm(x, [8], w, b, 1e-5))
    torch.autograd.gradcheck(rms_norm, (x, w))
    torch.autograd.gradcheck(layer_norm, (x, w, b))

    q = torch.randn(6, 2, 4, 8, requires_grad=True, **F64)
    k, v = (torch.randn(6, 2, 2, 8, requires_grad=True, **F64) for _ in range(2))
    for causal in (True, False):
        heads = [t.permute(1, 2, 0, 3) for t in (q, k, v)]
        expected = functional.scaled_dot_product_attention(
            *heads, is_causal=causal, enable_gqa=True
        ).permute(2, 0, 1, 3)
        for function in (attention, open_attention):
            found = function(q, k, v, causal=causal)
            assert torch.allclose(found, expected)
            grads = torch.autograd.grad(found.square().sum(), (q, k, v))
            wanted = torch.autograd.grad(expected.square().sum(), (q, k, v), retain_graph=True)
            assert all(torch.allclose(*pair) for pair in zip(grads, wanted, strict=True))

    angles = torch.randn(6, 1, 1, 4, **F64)
    turned = rotary(q, angles.cos(), angles.sin())
    complex_q = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    assert torch.allclose(turned, torch.cat([complex_q.real, complex_q.imag], -1))
    torch.autograd.gradcheck(lambda t: rotary(t, angles.cos(), angles.sin()), (q,))


def test_loss_is_that_of_torch() -> None:
    """The last stage's loss is the mean cross-entropy of its logits, with its gradient."""
    from profiler.model.layers.vocab import build_vocab, vocab_inputs

    torch.manual_seed(0)
    spec = replace(MODEL, layers=(LLAMA,), tied_embeddings=False)
    module = build_vocab(spec, "last", **F64)
    x, labels = vocab_inputs(spec, "last", batch=3, **F64)
    loss = module(x, labels)
    logits = module.norm(x) @ module.head.weights[0].t()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert torch.allclose(loss, expected)
    (grad,) = torch.autograd.grad(loss, x)
    assert torch.allclose(grad, torch.autograd.grad(expected, x)[0])


@pytest.mark.parametrize("name", ["llama2-7b", "gpt2-xl", "bert-large", "t5-3b", "qwen2.5-7b"])
def test_parameters_are_those_of_the_spec(name: str) -> None:
    """Every layer and both outer parts have as many parameters as the spec counts."""
    from profiler.model.layers.blocks import build_layer
    from profiler.model.layers.vocab import build_vocab

    def count(module: Any) -> int:
        return sum(p.numel() for p in module.parameters())

    spec = load_spec(name)
    on = {"dtype": torch.bfloat16, "device": "meta"}
    for layer in spec.layers:
        assert count(build_layer(layer, Sharding(), group=None, **on)) == parameter_count(layer)
    vocab = padded_vocab_size(spec)
    first, last = embedding_parameter_counts(spec, vocab)
    copy = vocab * spec.layers[-1].hidden_size if spec.tied_embeddings else 0
    assert count(build_vocab(spec, "first", **on)) == first
    assert count(build_vocab(spec, "last", **on)) == last + copy
    assert count(build_vocab(spec, "only", **on)) == first + last


def test_dropout_drops() -> None:
    """With dropout two runs differ, and without they do not."""
    from profiler.model.layers.blocks import build_layer, layer_inputs

    for dropout in (0.0, 0.5):
        sharding = Sharding(flash=False, dropout=dropout)
        layer = build_layer(GPT, sharding, group=None, **F64)
        (x,) = layer_inputs(GPT, sharding, batch=1, **F64)
        assert torch.equal(layer(x), layer(x)) == (dropout == 0)


def test_a_causal_layer_does_not_look_ahead() -> None:
    """A later token changes nothing before it in a causal layer, and does in an encoder's."""
    from profiler.model.layers.blocks import build_layer, layer_inputs

    for causal in (True, False):
        spec = replace(LLAMA, causal=causal)
        layer = build_layer(spec, Sharding(), group=None, **F64)
        (x,) = layer_inputs(spec, Sharding(), batch=1, **F64)
        other = x.detach().clone()
        other[-1] += 1
        assert torch.equal(layer(x)[:-1], layer(other)[:-1]) == causal


@pytest.mark.parametrize(
    ("changes", "sharding", "text"),
    [
        ({}, {"degree": 2}, "needs a process group"),
        ({"num_heads": None}, {}, "heads and MLP width are unknown"),
        ({"norm_parameters_per_hidden": 3}, {}, "norm_parameters_per_hidden 3"),
        ({"num_experts": 4, "experts_per_token": 1}, {"expert_degree": 3}, "expert degree 3"),
        ({}, {"degree": 3}, "tensor degree 3 does not divide"),
    ],
)
def test_what_cannot_be_built_is_said(
    changes: dict[str, Any], sharding: dict[str, Any], text: str
) -> None:
    """A layer that does not exist is one sentence."""
    from profiler.model.layers.blocks import build_layer

    with pytest.raises(InputError, match=text):
        build_layer(replace(LLAMA, **changes), Sharding(**sharding), group=None, **F64)


def test_sequences_beyond_the_position_table_are_refused() -> None:
    """Positions that have no row are a sentence with both numbers, not an index error."""
    from profiler.model.layers.vocab import build_vocab

    spec = replace(MODEL, learned_positions=15)
    with pytest.raises(InputError, match=r"16.*15"):
        build_vocab(spec, "first", **F64)


def test_a_group_of_another_size_is_refused() -> None:
    """A group has to have as many ranks as the layer has pieces."""
    from profiler.model.layers.blocks import build_layer
    from profiler.model.layers.parallel import SoleRank

    with pytest.raises(InputError, match="4 ranks, but the layer has degree 2"):
        build_layer(LLAMA, Sharding(degree=2), group=SoleRank(4), **F64)


def test_weights_are_random_and_finite() -> None:
    """A random layer passes on values of the size of its input: it can be timed as it is."""
    from profiler.model.layers.blocks import build_layer, layer_inputs
    from profiler.model.layers.parallel import SoleRank

    for kind in KINDS:
        sharding = Sharding(degree=2, kind=kind)
        layer = build_layer(LLAMA, sharding, group=SoleRank(2), **F64)
        (x,) = layer_inputs(LLAMA, sharding, batch=2, **F64)
        y = layer(x)
        assert y.shape == x.shape
        assert math.isclose(y.detach().std(), x.detach().std(), rel_tol=0.5)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_layers_have_the_parameters_of_their_specs(name: str) -> None:
    """Those of every `config.json` that is read, but for norms that nobody here has."""
    from profiler.model.layers.blocks import build_layer

    spec = parse_hugging_face(Path(name), PUBLISHED[name]["config"])
    if is_hybrid(spec):
        with pytest.raises(InputError, match=spec.name):
            refuse_hybrid(spec, "profile-model")
        return
    for layer in spec.layers:
        if layer.value_norms:  # Gemma 4
            with pytest.raises(InputError, match="not supported"):
                build_layer(layer, Sharding(), dtype=torch.bfloat16, device="meta")
            continue
        if not layer.norm_parameters_per_hidden:
            with pytest.raises(InputError, match="norm_parameters_per_hidden 0"):
                build_layer(layer, Sharding(), dtype=torch.bfloat16, device="meta")
            continue
        built = build_layer(layer, Sharding(), dtype=torch.bfloat16, device="meta")
        assert sum(p.numel() for p in built.parameters()) == parameter_count(layer)


def scores_in_the_open(q: Any, k: Any, v: Any, *, causal: bool, window: int, sinks: Any) -> Any:
    """Return attention by its definition: one softmax of all scores, a sink's among them."""
    seq, width = q.shape[0], q.shape[-1]
    times = q.shape[2] // k.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(width)
    apart = torch.arange(seq)[:, None] - torch.arange(seq)
    seen = (apart >= 0) if causal else torch.ones_like(apart, dtype=torch.bool)
    if window:
        seen &= apart.abs() < window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        more = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, more], -1)
    weights = scores.softmax(-1)[..., :seq]
    return (weights @ v).permute(2, 0, 1, 3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 99])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("value_width", [4, 8, 10])
def test_windows_sinks_and_widths_are_those_of_the_definition(
    causal: bool, window: int, with_sinks: bool, value_width: int
) -> None:
    """Outputs and every gradient."""
    from profiler.model.layers.kernels import attention

    torch.manual_seed(0)
    q = torch.randn(6, 2, 4, 8, requires_grad=True, **F64)
    k = torch.randn(6, 2, 2, 8, requires_grad=True, **F64)
    v = torch.randn(6, 2, 2, value_width, requires_grad=True, **F64)
    sinks = torch.randn(4, requires_grad=True, **F64) if with_sinks else None
    found = attention(q, k, v, causal=causal, window=window, sinks=sinks)
    expected = scores_in_the_open(q, k, v, causal=causal, window=window, sinks=sinks)
    assert torch.allclose(found, expected)
    inputs = [x for x in (q, k, v, sinks) if x is not None]
    grads = torch.autograd.grad(found.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    assert all(torch.allclose(*pair) for pair in zip(grads, wanted, strict=True))


def test_latent_attention_is_that_of_its_equations() -> None:
    """Section 2.1 and appendix C of arXiv 2405.04434, head after head."""
    from profiler.model.layers.blocks import build_layer, layer_inputs
    from profiler.model.layers.kernels import rotary

    torch.manual_seed(0)
    module = build_layer(LATENT, Sharding(), **F64).attention
    (x,) = layer_inputs(LATENT, Sharding(), batch=2, **F64)
    normed = torch.nn.functional.rms_norm
    c_q = normed(x @ module.query_down.weights[0].t(), [24], module.query_latent_norm.weight, 1e-5)
    down = x @ module.down.weights[0].t()
    c_kv = normed(down[..., :16], [16], module.latent_norm.weight, 1e-5)

    def turned(part: Any) -> Any:
        return rotary(part.unsqueeze(2).contiguous(), module.cos, module.sin).squeeze(2)

    outputs = []
    for head in range(4):
        q = c_q @ module.query.weights[0][12 * head : 12 * head + 12].t()
        q = torch.cat([q[..., :8], turned(q[..., 8:])], -1)
        k = c_kv @ module.key_value.weights[0][8 * head : 8 * head + 8].t()
        k = torch.cat([k, turned(down[..., 16:])], -1)
        v = c_kv @ module.key_value.weights[1][6 * head : 6 * head + 6].t()
        heads = [t.unsqueeze(2) for t in (q, k, v)]
        outputs.append(scores_in_the_open(*heads, causal=True, window=0, sinks=None).squeeze(2))
    expected = torch.cat(outputs, -1) @ module.out.weight.t()
    assert torch.allclose(module(x), expected)


def test_shared_experts_and_biases_are_added() -> None:
    """A mixture's output is that of its experts and of the gated MLP that all tokens visit."""
    from profiler.model.layers.blocks import build_layer, layer_inputs

    torch.manual_seed(0)
    mlp = build_layer(SHARED, Sharding(), **F64).mlp
    (x,) = layer_inputs(SHARED, Sharding(), batch=2, **F64)
    gate = torch.sigmoid(x @ mlp.shared.gate)[..., None]
    assert torch.allclose(mlp.shared(x), gate * mlp.shared.mlp(x))
    # equal experts without inner weights put out their last biases, whose weights add up to one
    with torch.no_grad():
        mlp.experts.down.zero_()
        mlp.experts.biases[-1].fill_(3.0)
    assert torch.allclose(mlp(x), 3.0 + mlp.shared(x))
    mlp(x).sum().backward()
    assert all(p.grad is not None for p in mlp.parameters())


def test_a_decoder_reads_what_the_norm_behind_the_encoder_makes() -> None:
    """The whole model of an encoder and a decoder is its parts in this order."""
    from profiler.model.layers.vocab import build_stack

    torch.manual_seed(0)
    built = build_stack(T5, **F64)
    model, (tokens, labels, source) = built.module, built.make_batch(2, 8)
    (one, two), (three, four) = model.layers
    x, context = model.first(tokens), model.first(source)
    context = torch.nn.functional.rms_norm(
        two(one(context)), [32], model.encoder_norm.weight, eps=1e-5
    )
    (logits,) = model.last.head(model.last.norm(four(three(x, context), context)))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    found = model(tokens, labels, source)

    assert torch.allclose(found, loss)
    found.backward()
    assert model.encoder_norm.weight.grad.abs().min() > 0
