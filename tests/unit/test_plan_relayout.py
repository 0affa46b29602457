"""Relayouts between any two layouts, every rank in turn, against slices of the whole tensor."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, strategies as st

from profiler.plan.arithmetic import Cube, Layout

pytest.importorskip("torch")

from profiler.plan.exchange import _blocks, _moves, is_exchanged

CUBES = [(1,), (2,), (2, 2), (2, 2, 2), (3, 2), (2, 3, 2)]
SIZE = (24, 24)


def layouts(cube: Cube) -> list[Layout]:
    """Return all layouts whose tensor group is the first or the last axes."""
    count = len(cube.factors)
    suffixes = [tuple(range(start, count)) for start in range(count + 1)]
    prefixes = [tuple(range(end)) for end in range(count + 1)]
    return [
        Layout(cube=cube, kind=kind, tensor_axes=axes, zero="ddp")  # type: ignore[arg-type]
        for axes, kind in product(sorted({*suffixes, *prefixes}), ("sp", "tp", "ulysses"))
    ]


@given(st.data())
def test_every_rank_gets_its_block(data: st.DataObject) -> None:
    """What all ranks send, put together, is each rank's slice; each element arrives once."""
    cube = Cube(factors=data.draw(st.sampled_from(CUBES)))
    old, new = (data.draw(st.sampled_from(layouts(cube))) for _ in range(2))
    whole = np.arange(SIZE[0] * SIZE[1]).reshape(SIZE)

    def held(layout: Layout, place: int) -> np.ndarray:
        first, end, sample, last = _blocks(layout, SIZE)[place]
        return whole[first:end, sample:last]

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
            part = found[target[0] : target[1], target[2] : target[3]]
            assert (part == -1).all()
            part[:] = held(old, source)[sent[0] : sent[1], sent[2] : sent[3]]
        assert (found == held(new, place)).all()
    assert exchanged != moves[0].is_local
    assert {own.is_local for own in moves} == {moves[0].is_local}
    if exchanged:
        assert is_exchanged(old, new)
