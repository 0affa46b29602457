"""Reference layers compute what they should, and have the parameters of their specs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.model import embedding_parameter_counts, padded_vocab_size, parameter_count
from profiler.model.layers.sharding import Sharding
from tests.plan_cases import T5
from tests.unit.small_models import GPT, LLAMA, MODEL

torch = pytest.importorskip("torch", reason="the profilers need torch")

KINDS = ("tp", "sp", "dtensor", "dtensor_sp", "ulysses")
F64: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}


def test_operations_agree_with_torch() -> None:
    """Norms, attention, rotation and loss compute what torch's own functions compute."""
    from profiler.model.layers.blocks import attention, layer_norm, open_attention, rms_norm, rotary

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
    spec = dataclasses.replace(MODEL, layers=(LLAMA,), tied_embeddings=False)
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
        spec = dataclasses.replace(LLAMA, causal=causal)
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
        build_layer(dataclasses.replace(LLAMA, **changes), Sharding(**sharding), group=None, **F64)


def test_sequences_beyond_the_position_table_are_refused() -> None:
    """Positions that have no row are a sentence with both numbers, not an index error."""
    from profiler.model.layers.vocab import build_vocab

    spec = dataclasses.replace(MODEL, learned_positions=15)
    with pytest.raises(InputError, match="16 is beyond the 15 learned positions"):
        build_vocab(spec, "first", **F64)


def test_a_group_of_another_size_is_refused() -> None:
    """A group has to have as many ranks as the layer has pieces."""
    from profiler.model.layers.blocks import build_layer
    from profiler.model.layers.parallel import SoleRank

    with pytest.raises(InputError, match="4 ranks and the layer has degree 2"):
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


def test_experts_with_biases_are_refused() -> None:
    """Their biases would be missing from the counts, silently."""
    from profiler.model.layers.blocks import build_layer

    layer = dataclasses.replace(LLAMA, num_experts=4, experts_per_token=2, biases=True)

    with pytest.raises(InputError, match="experts with biases cannot be built"):
        build_layer(layer, Sharding(), group=None, dtype=torch.float32, device="cpu")


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
