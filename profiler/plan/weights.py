"""The same weights on any number of ranks, and what their gradients need besides a data group.

A parameter of a whole layer is made from the seed and its name, and every rank keeps its piece of
it. Which piece that is shows in the shapes: the dimension along which a rank's parameter is
smaller than the whole one is the one that is divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.model.blocks import Norm
from profiler.plan.layout import Layout

__all__ = ["Piece", "fill", "pieces_of", "shapes"]

_SPREAD = 0.02
_NORM_SPREAD = 0.1


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rank's part of one parameter of a whole layer."""

    name: str
    whole: tuple[int, ...]
    """Shape of the parameter on one rank without parallelism."""
    dim: int | None
    """The divided dimension; None where every rank has all of it."""
    pieces: int
    index: int
    is_partial: bool
    """True where the ranks that share this piece each have only a part of its gradient."""


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a module by name."""
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def pieces_of(
    module: nn.Module, whole: Mapping[str, tuple[int, ...]], layout: Layout, place: int
) -> dict[str, Piece]:
    """Return which part of each parameter a rank has.

    whole : shapes of the same module without parallelism; place : the rank within its stage.
    """
    t = layout.degree if layout.splits_weights else 1
    tensor_rank = layout.cube.index(place, layout.tensor_axes) if t > 1 else 0
    keys = _key_value_names(module)
    found = {}
    for name, shape in shapes(module).items():
        full = whole[name]
        dims = [d for d, (own, all_) in enumerate(zip(shape, full, strict=True)) if own != all_]
        assert len(dims) <= 1, (name, shape, full)
        pieces = full[dims[0]] // shape[dims[0]] if dims else 1
        # Norms and biases of a divided sequence see their own tokens, shared keys their own
        # queries; other replicas have the whole gradient already.
        partial = pieces < t and (layout.splits_sequence or name in keys)
        found[name] = Piece(
            name=name,
            whole=full,
            dim=dims[0] if dims else None,
            pieces=pieces,
            index=tensor_rank * pieces // t,
            is_partial=partial,
        )
    return found


def fill(
    module: nn.Module, pieces: Mapping[str, Piece], *, seed: int, where: str, tied: bool = False
) -> None:
    """Give the parameters of a module their values, in place.

    where : names the module within the model, so that equal layers get different values; with
    `tied` tables those of embedding and head are equal.
    """
    norms = {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, child in module.named_modules()
        if isinstance(child, Norm)
    }
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            piece = pieces[name]
            key = _key(where, name, tied)
            value = _value(piece.whole, seed=seed, where=key, norm=name in norms)
            if piece.dim is not None:
                value = value.chunk(piece.pieces, piece.dim)[piece.index]
            parameter.copy_(value)


def _key(where: str, name: str, tied: bool) -> str:
    """Return what a parameter is called, the same on every plan."""
    if where == "ends":  # embedding and head as one part
        prefix, _, name = name.partition(".")
        where = "embedding" if prefix == "first" else "head"
    if tied and where == "head" and name == "head.weights.0":
        where, name = "embedding", "table"
    return f"{where}.{name}"


def _value(shape: tuple[int, ...], *, seed: int, where: str, norm: bool) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{where}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    value = torch.randn(shape, generator=generator, dtype=torch.float32)
    return value.mul_(_NORM_SPREAD).add_(1) if norm else value.mul_(_SPREAD)


def _key_value_names(module: Any) -> set[str]:
    """Return names of the parameters that make keys and values, which ranks may share."""
    names: set[str] = set()
    for name in shapes(module):
        parts = name.split(".")
        if "key_value" in parts or ("query" in parts and parts[-1] != "0"):
            names.add(name)
    return names
