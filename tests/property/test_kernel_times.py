"""Kernel times for any shape: never below the roofline, monotone, and equal to the plain oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from autopar.documents.catalog import card_names
from autopar.rates.card import load_card
from autopar.rates.constants import Kernels, kernels_of
from autopar.rates.kernels import (
    attention_pairs,
    attention_s,
    gemm_s,
    grouped_gemm_s,
    linear_s,
    ring_attention_s,
    unfused_attention_s,
)
from autopar.rates.memory_bound import elements_s, memory_bound_s
from tests.oracles.kernels import attention_time_s, gemm_time_s, roofline_s

CARDS: dict[str, Kernels] = {name: kernels_of(load_card(name)) for name in card_names()}
SURFACES = [(name, str(dtype)) for name in CARDS for dtype in CARDS[name].section.gemm]
ATTENTION = [(name, kernel) for name in CARDS for kernel in CARDS[name].section.attention]

surfaces = st.sampled_from(SURFACES)
attentions = st.sampled_from(ATTENTION)
sizes = st.integers(1, 8192).map(lambda eights: 8 * eights)
lengths = st.integers(1, 512).map(lambda blocks: 128 * blocks)


@given(
    surfaces,
    sizes,
    sizes,
    sizes,
    st.integers(1, 64),
    st.sampled_from([0.9, 1.0, 1.1]),
    st.booleans(),
)
def test_gemm_is_the_oracle(
    surface: tuple[str, str], m: int, n: int, k: int, batch: int, clock: float, sustained: bool
) -> None:
    """The arrays of the product and the loops of the oracle give one price."""
    name, dtype = surface
    run: dict[str, Any] = {"clock": clock, "sustained": sustained}
    for many in (1, batch):
        expected = gemm_time_s(name, m, n, k, dtype, batch=many, **run)
        found = gemm_s(CARDS[name], m, n, k, dtype=dtype, batch=many, **run)
        assert float(found) == pytest.approx(expected, rel=1e-9)
        # a single GEMM is cached, those of an array are priced together
        assert (gemm_s(CARDS[name], [m, m], n, k, dtype=dtype, batch=many, **run) == found).all()


@given(attentions, st.integers(1, 8), st.integers(1, 64), lengths, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_attention_is_the_oracle(
    which: tuple[str, str], batch: int, heads: int, seq: int, backward: bool, causal: bool
) -> None:
    """Pairs counted one query at a time give the same price."""
    name, kernel = which
    for width in (64, 128, 192):
        expected = attention_time_s(
            name, kernel, batch, heads, seq, backward=backward, width=width, causal=causal
        )
        found = attention_s(
            CARDS[name],
            batch,
            heads,
            seq,
            seq,
            kernel=kernel,
            phase="backward" if backward else "forward",
            head_dim=width,
            causal=causal,
        )
        assert float(found) == pytest.approx(expected, rel=1e-9)


@given(surfaces, sizes, sizes, sizes)
def test_no_gemm_beats_the_roofline(surface: tuple[str, str], m: int, n: int, k: int) -> None:
    """Neither the FLOP at the peak nor the bytes at HBM's rate take longer than the price."""
    name, dtype = surface
    assert float(gemm_s(CARDS[name], m, n, k, dtype=dtype)) >= roofline_s(name, m, n, k, dtype)


@given(surfaces, sizes, sizes, sizes, st.integers(1, 1024))
def test_gemm_is_monotone(surface: tuple[str, str], m: int, n: int, k: int, more: int) -> None:
    """A larger GEMM takes no less time, in any dimension."""
    name, dtype = surface
    base = float(gemm_s(CARDS[name], m, n, k, dtype=dtype))
    step = 8 * more
    for larger in ((m + step, n, k), (m, n + step, k), (m, n, k + step)):
        assert float(gemm_s(CARDS[name], *larger, dtype=dtype)) >= base * (1 - 1e-12)


@given(surfaces, sizes, sizes, sizes)
def test_work_is_conserved(surface: tuple[str, str], m: int, n: int, k: int) -> None:
    """Two halves take no less than the whole; a linear layer is its three GEMMs."""
    name, dtype = surface
    card = CARDS[name]
    whole = float(gemm_s(card, 2 * m, n, k, dtype=dtype))
    # but for the clock, which falls in a longer kernel
    longer = 1 + card.gemm(dtype)["slowdown"] * np.log1p(whole * 1e3)
    assert 2 * float(gemm_s(card, m, n, k, dtype=dtype)) * longer >= whole * (1 - 1e-9)
    forward, inner, outer = linear_s(card, m, n, k, dtype=dtype, cast=False)
    for found, shape in ((forward, (m, n, k)), (inner, (m, k, n))):
        expected = gemm_s(card, *shape, dtype=dtype, cast=False)
        assert float(found) == pytest.approx(float(expected))
    expected = gemm_s(card, n, k, m, dtype=dtype, cast=False) / 0.94
    assert float(outer) == pytest.approx(float(expected))


@given(attentions, st.integers(1, 8), st.integers(1, 64), lengths, lengths)
def test_window_causal_full(
    which: tuple[str, str], batch: int, heads: int, seq: int, window: int
) -> None:
    """A window sees no more than the triangle, the triangle no more than the square."""
    name, kernel = which
    card = CARDS[name]
    limited = attention_pairs(seq, seq, window=window)
    triangle = attention_pairs(seq, seq)
    square = attention_pairs(seq, seq, causal=False)
    assert limited <= triangle <= square == 2 * triangle
    causal, full = (
        float(attention_s(card, batch, heads, seq, seq, kernel=kernel, causal=causal))
        for causal in (True, False)
    )
    assert causal <= full
    # a window that hides nothing costs nothing
    same = attention_s(card, batch, heads, seq, seq, kernel=kernel, window=seq)
    assert float(same) == causal


@given(attentions, st.integers(1, 8), st.integers(1, 64), lengths, st.sampled_from((2, 4, 8)))
def test_context_parallel_shares_the_pairs(
    which: tuple[str, str], batch: int, heads: int, seq: int, ranks: int
) -> None:
    """Ranks together take no less than one."""
    name, kernel = which
    card = CARDS[name]
    alone = float(attention_s(card, batch, heads, seq, seq, kernel=kernel))
    one = float(ring_attention_s(card, batch, heads, seq, 1, kernel=kernel))
    assert one == pytest.approx(alone)
    shared = float(ring_attention_s(card, batch, heads, seq, ranks, kernel=kernel))
    slowdown = 1 + max(
        figures.forward["slowdown"] for figures in card.section.attention.values()
    ) * np.log1p(alone * 1e3)
    assert shared * ranks * slowdown >= alone * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(CARDS))
def test_arrays_are_scalars(name: str) -> None:
    """Prices of a thousand shapes at once are those of each alone, in any shape of array."""
    card = CARDS[name]
    draws = np.random.default_rng(7)
    m, n, k = (8 * draws.integers(1, 1024, (20, 25)) for _ in range(3))
    dtype = next(iter(card.section.gemm))
    kernel = next(iter(card.section.attention))
    jobs = (
        lambda m, n, k: gemm_s(card, m, n, k, dtype=dtype),
        lambda m, n, k: linear_s(card, m, n, k, dtype=dtype).weight_gradient_s,
        lambda m, n, k: grouped_gemm_s(card, m, 8, n, k, dtype=dtype),
        lambda m, n, k: attention_s(card, 2, 16, m, m, kernel=kernel),
        lambda m, n, k: unfused_attention_s(card, 2, 16, m, head_dim=64, dtype=dtype),
        lambda m, n, k: elements_s(card, m * n, 4, kind="norm"),
    )
    for job in jobs:
        together = job(m, n, k)
        assert together.shape == m.shape
        for row, column in ((0, 0), (3, 7), (19, 24)):
            alone = job(int(m[row, column]), int(n[row, column]), int(k[row, column]))
            assert float(alone) == float(together[row, column])


@given(st.sampled_from(sorted(CARDS)), st.floats(0, 1e12))
def test_memory_bound_is_no_faster_than_hbm(name: str, moved: float) -> None:
    """In every class, bytes take their time at the datasheet's rate plus a kernel launch."""
    card = CARDS[name]
    launch = card.section.memory_launch["launch_s"]
    for kind in ("elementwise", "norm", "softmax", "permute", "optimizer"):
        time = float(memory_bound_s(card, moved, kind=kind))  # type: ignore[arg-type]
        assert time >= moved / card.memory_bytes_per_s + launch
