"""Relayouts between any two layouts, every rank in turn, against slices of the whole tensor."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from profiler.plan.arithmetic import Cube, Layout

pytest.importorskip("torch")

from profiler.plan.exchange import Block, _blocks, _moves, is_exchanged

CUBES = [(1,), (2,), (2, 2), (2, 2, 2), (3, 2), (2, 3, 2)]
SIZE = (48, 24)


def layouts(cube: Cube) -> list[Layout]:
    """Return all layouts whose tensor group is the first or the last axes, with context groups."""
    count = len(cube.factors)
    suffixes = [tuple(range(start, count)) for start in range(count + 1)]
    prefixes = [tuple(range(end)) for end in range(count + 1)]
    return [
        Layout(cube=cube, kind=kind, tensor_axes=axes, zero="ddp", context_axes=ring)  # type: ignore[arg-type]
        for axes, kind in product(sorted({*suffixes, *prefixes}), ("sp", "tp", "ulysses"))
        # the context group has what is left, from its first or its last axis on
        for free in (tuple(a for a in range(count) if a not in axes),)
        for ring in sorted({(), free, free[1:], free[:1]})
    ]


def cut(x: np.ndarray, block: Block) -> np.ndarray:
    """Return the tokens and samples of a block, its pieces one after the other."""
    return np.concatenate([x[a:b, slice(*block.samples)] for a, b in block.tokens])


@given(st.data())
def test_every_rank_gets_its_block(data: st.DataObject) -> None:
    """What all ranks send, put together, is each rank's slice; each element arrives once."""
    cube = Cube(factors=data.draw(st.sampled_from(CUBES)))
    old, new = (data.draw(st.sampled_from(layouts(cube))) for _ in range(2))
    whole = np.arange(SIZE[0] * SIZE[1]).reshape(SIZE)

    def held(layout: Layout, place: int) -> np.ndarray:
        return cut(whole, _blocks(layout, SIZE)[place])

    moves = [_moves(old, new, SIZE, place) for place in range(cube.num_ranks)]
    exchanged = False
    for place, own in enumerate(moves):
        found = np.full(own.shape, -1)
        for source, target in enumerate(own.received):
            sent = moves[source].sent[place]
            assert (sent is None) == (target is None)
            if sent is None or target is None:
                continue
            exchanged |= source != place
            assert (cut(found, target) == -1).all()
            part, (low, high) = cut(held(old, source), sent), target.samples
            rows = np.concatenate([np.arange(*ends) for ends in target.tokens])
            found[rows, low:high] = part
        assert (found == held(new, place)).all()
    assert exchanged != moves[0].is_local
    assert {own.is_local for own in moves} == {moves[0].is_local}
    if exchanged:
        assert is_exchanged(old, new)
