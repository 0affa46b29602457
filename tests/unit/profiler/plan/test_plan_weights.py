"""Weights are the same on any number of ranks, and ranks know which part of them they have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the profilers need torch")

from autopar.run.model import ModelSpec  # noqa: E402
from profiler.model.layers.blocks import build_layer  # noqa: E402
from profiler.model.layers.parallel import SoleRank  # noqa: E402
from profiler.model.layers.sharding import Sharding  # noqa: E402
from profiler.model.layers.vocab import build_vocab  # noqa: E402
from profiler.plan.arithmetic import Cube, Layout  # noqa: E402
from profiler.plan.exchange import Piece, fill, pieces_of, shapes  # noqa: E402
from tests.plan_cases import GPT, LATENT, LLAMA, MOE, MQA, NORMED, TIED  # noqa: E402

_ONE = Layout(cube=Cube(factors=(1,)), kind="sp", tensor_axes=(), zero="ddp")
_ALL, _KV, _ROWS = "all", "kv", "rows"
"""How a parameter is divided: not at all, by key-value heads, by rows or columns of the group."""
_COLUMNS = "columns"
_HEAD = "head"
"""All of it, of which every rank has used its own heads."""

_LAYER = {
    "attention_norm.weight": _ALL,
    "attention_norm.bias": _ALL,
    "attention.query.weights.0": _ROWS,
    "attention.query.weights.1": _KV,
    "attention.query.weights.2": _KV,
    "attention.query.biases.0": _ROWS,
    "attention.query.biases.1": _KV,
    "attention.query.biases.2": _KV,
    "attention.out.weight": _COLUMNS,
    "attention.out.bias": _ALL,
    "mlp_norm.weight": _ALL,
    "mlp_norm.bias": _ALL,
    "mlp.up.weights.0": _ROWS,
    "mlp.up.weights.1": _ROWS,
    "mlp.up.biases.0": _ROWS,
    "mlp.down.weight": _COLUMNS,
    "mlp.down.bias": _ALL,
    "attention.sinks": _ROWS,
    "attention.query_norm.weight": _HEAD,
    "attention.key_norm.weight": _HEAD,
    "attention_behind.weight": _ALL,
    "mlp_behind.weight": _ALL,
}
_LATENT = {
    **_LAYER,
    "attention.query_down.weights.0": _ALL,
    "attention.query_latent_norm.weight": _ALL,
    "attention.down.weights.0": _ALL,
    "attention.latent_norm.weight": _ALL,
    "attention.key_value.weights.0": _ROWS,
    "attention.key_value.weights.1": _ROWS,
}
_OUTER = {
    "table": _ROWS,
    "positions": _ALL,
    "extra_embedding": _ALL,
    "norm.weight": _ALL,
    "norm.bias": _ALL,
    "head.weights.0": _ROWS,
    "extra_head": _ALL,
}


class _Rank(SoleRank):
    """A rank of a group whose other ranks are not here."""

    def __init__(self, degree: int, rank: int) -> None:
        super().__init__(degree)
        self._rank = rank

    def rank(self) -> int:
        return self._rank


@dataclass(frozen=True, kw_only=True)
class _Case:
    spec: ModelSpec
    kind: Any = "sp"
    degree: int = 2
    strided: bool = False

    @property
    def layout(self) -> Layout:
        cube = Cube(factors=(2, 2, 2))
        axes = math.frexp(self.degree)[1] - 1
        chosen = tuple(range(axes)) if self.strided else tuple(range(3 - axes, 3))
        return Layout(cube=cube, kind=self.kind, tensor_axes=chosen, zero="ddp")


_CASES = [
    _Case(spec=LLAMA),
    _Case(spec=LLAMA, degree=4),
    _Case(spec=LLAMA, degree=4, strided=True),
    _Case(spec=LLAMA, degree=4, kind="tp"),
    _Case(spec=LLAMA, degree=4, kind="ulysses"),
    _Case(spec=MQA),
    _Case(spec=MQA, degree=4, kind="tp"),
    _Case(spec=GPT),
    _Case(spec=GPT, degree=4, kind="tp", strided=True),
    _Case(spec=GPT, kind="ulysses"),
    _Case(spec=NORMED),
    _Case(spec=NORMED, degree=4, kind="tp"),
    _Case(spec=NORMED, kind="ulysses"),
    _Case(spec=LATENT, degree=4),
    _Case(spec=LATENT, kind="tp"),
]
_IDS = [f"{c.spec.name}-{c.kind}{c.degree}{'-strided' * c.strided}" for c in _CASES]


def _layer(case: _Case, tensor_rank: int | None) -> Any:
    """Return a layer as one rank of a group has it; None: the whole one."""
    sharding, group = Sharding(), None
    if tensor_rank is not None:
        sharding = Sharding(degree=case.degree, kind=case.kind)
        group = _Rank(case.degree, tensor_rank)
    return build_layer(
        case.spec.layers[0], sharding, group=group, dtype=torch.float32, device="cpu"
    )


def _filled(module: Any, whole: Mapping[str, Any], layout: Layout, place: int, where: str) -> Any:
    """Return pieces and values of the parameters of a module."""
    pieces = pieces_of(module, whole, layout, place)
    fill(module, pieces, seed=3, where=where)
    return pieces, {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("case", _CASES, ids=_IDS)
def test_pieces_of_a_layer_put_together_are_the_whole_one(case: _Case) -> None:
    layout = case.layout
    module = _layer(case, None)
    whole = shapes(module)
    _, values = _filled(module, whole, _ONE, 0, "layer1")
    kv_heads = case.spec.layers[0].num_kv_heads or 4
    divided = _LATENT if case.spec is LATENT else _LAYER
    held: dict[str, dict[int, Any]] = {}
    for place in range(8):
        rank = layout.cube.groups(layout.tensor_axes)
        tensor_rank = next(group.index(place) for group in rank if place in group)
        module = _layer(case, tensor_rank)
        pieces, own = _filled(module, whole, layout, place, "layer1")
        assert set(pieces) == set(whole)
        for name, piece in pieces.items():
            _check_piece(piece, divided[name], case, kv_heads, tensor_rank)
            seen = held.setdefault(name, {}).setdefault(piece.index, own[name])
            assert torch.equal(seen, own[name])
    for name, parts in held.items():
        ordered = [parts[index] for index in range(len(parts))]
        dim = 1 if divided[name] == _COLUMNS else 0
        joined = torch.cat(ordered, dim) if len(ordered) > 1 else ordered[0]
        assert torch.equal(joined, values[name]), name


def _check_piece(piece: Piece, divided: str, case: _Case, kv_heads: int, rank: int) -> None:
    t = 1 if case.kind == "ulysses" else case.degree
    expected = {_ALL: 1, _HEAD: 1, _KV: min(t, kv_heads), _ROWS: t, _COLUMNS: t}[divided]
    assert piece.pieces == expected, piece
    # groups of ranks that share a head are neighbours
    assert piece.index == (rank * expected // t if t > 1 else 0)
    # with a divided sequence every rank sees its own tokens in what all of them have
    shares = t > expected and (case.kind == "sp" or divided in (_KV, _HEAD))
    assert piece.is_partial == shares, piece


@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.parametrize("kind", ["sp", "tp", "ulysses"])
def test_pieces_of_embedding_and_head_put_together_are_the_whole_one(which: Any, kind: Any) -> None:
    def build(rank: int | None) -> Any:
        group = {} if rank is None else {"degree": 4, "kind": kind, "group": _Rank(4, rank)}
        return build_vocab(GPT, which, **group, dtype=torch.float32, device="cpu")

    case = _Case(spec=GPT, kind=kind, degree=4)
    where = "embedding" if which == "first" else "head"
    module = build(None)
    whole = shapes(module)
    _, values = _filled(module, whole, _ONE, 0, where)
    held: dict[str, dict[int, Any]] = {}
    for rank in range(4):
        module = build(rank)
        pieces, own = _filled(module, whole, case.layout, rank, where)
        for name, piece in pieces.items():
            _check_piece(piece, _OUTER[name], case, 4, rank)
            held.setdefault(name, {})[piece.index] = own[name]
    for name, parts in held.items():
        joined = torch.cat([parts[index] for index in range(len(parts))])
        assert torch.equal(joined, values[name]), name


def test_experts_are_divided_by_their_width() -> None:
    case = _Case(spec=MOE)
    whole = shapes(_layer(case, None))
    pieces = pieces_of(_layer(case, 1), whole, case.layout, 1)
    found = {name: (p.dim, p.pieces, p.index, p.is_partial) for name, p in pieces.items()}
    assert found["mlp.router"] == (None, 1, 0, True)
    assert found["mlp.experts.ups.0"] == found["mlp.experts.ups.1"] == (2, 2, 1, False)
    assert found["mlp.experts.down"] == (1, 2, 1, False)
    assert not pieces_of(_layer(case, 1), whole, _Case(spec=MOE, kind="tp").layout, 1)[
        "mlp.router"
    ].is_partial


def test_every_parameter_has_values_of_its_own() -> None:
    module = _layer(_Case(spec=GPT), None)
    whole = shapes(module)
    _, values = _filled(module, whole, _ONE, 0, "layer0")
    _, others = _filled(module, whole, _ONE, 0, "layer1")
    pieces = pieces_of(module, whole, _ONE, 0)
    fill(module, pieces, seed=4, where="layer0")
    for name, parameter in module.named_parameters():
        assert not torch.equal(values[name], others[name]), name
        assert not torch.equal(values[name], parameter), name
        # norms are near one, the rest near nothing; none of them is constant
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        assert float(values[name].mean()) == pytest.approx(mean, abs=0.1)
        assert float(values[name].std()) > 0.005
    equal = [(a, b) for a in values for b in values if a < b and _same(values[a], values[b])]
    assert equal == []


def _same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def test_tied_tables_are_equal_wherever_they_are() -> None:
    def table(which: Any, name: str, where: str, tied: bool) -> Any:
        module = build_vocab(TIED, which, dtype=torch.float32, device="cpu")
        pieces = pieces_of(module, shapes(module), _ONE, 0)
        fill(module, pieces, seed=3, where=where, tied=tied)
        return dict(module.named_parameters())[name].detach()

    first = table("first", "table", "embedding", True)
    assert torch.equal(first, table("last", "head.weights.0", "head", True))
    assert not torch.equal(first, table("last", "head.weights.0", "head", False))
