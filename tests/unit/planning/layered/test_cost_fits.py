"""Fits: non-negative, relative, exact; modes of the computation file and their refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import nnls

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerMemory, LayerProfile, OtherMemory, OtherTime, TimePoint
from autopar.statistics import latency_bandwidth_fit, nonnegative_fit, relative_weights
from search.planning.cost.fits import (
    attention_share,
    fit_layer_time,
    fit_other_time,
    layer_memory,
    other_memory,
)
from search.request.options import SearchOptions
from tests.cost_cases import toy_model, toy_spec
from tests.often import often

BATCH = SearchOptions(time_profile_mode="batch")
SEQUENCE = SearchOptions(time_profile_mode="sequence", memory_profile_mode="sequence")


def ignore(_: str) -> None:
    """Take a note that the test does not look at."""


def points(*values: tuple[int, int, float]) -> LayerProfile:
    """Return a profile with these (batch, sequence length, seconds)."""
    return LayerProfile(
        times=tuple(TimePoint(batch=b, seq_length=s, forward_s=t) for b, s, t in values), memory={}
    )


numbers = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))


@often(
    25,
    100,
    rows=st.lists(st.tuples(numbers, numbers, numbers, numbers), min_size=4, max_size=8),
    unknowns=st.integers(1, 3),
)
def test_fit_is_the_one_of_scipy(rows: list[tuple[float, ...]], unknowns: int) -> None:
    """The residual is that of scipy's active-set solver, and nothing is negative."""
    matrix = np.array(rows)[:, :unknowns]
    target = np.array(rows)[:, 3]
    ours = nonnegative_fit(matrix, target, np.ones(len(rows)))
    _, residual = nnls(matrix, target)

    assert (ours >= 0.0).all()
    assert np.linalg.norm(matrix @ ours - target) == pytest.approx(residual, abs=1e-6)


def test_relative_weights_count_small_values_like_large_ones() -> None:
    """A target of zero gets the weight of a thousandth of the largest; all zero gets ones."""
    np.testing.assert_allclose(relative_weights(np.array([2.0, 0.0])), [0.5, 500.0])
    np.testing.assert_allclose(relative_weights(np.zeros(2)), [1.0, 1.0])


@given(
    latency_s=st.floats(0.0, 1e-3),
    bandwidth=st.floats(1e8, 1e12),
    doublings=st.integers(1, 14),
)
def test_a_line_of_latency_and_bandwidth_is_recovered(
    latency_s: float, bandwidth: float, doublings: int
) -> None:
    """Exact times give back both parameters, from 64 KiB up to 1 GiB."""
    sizes = [float(1 << (16 + i)) for i in range(doublings + 1)]
    fit = latency_bandwidth_fit(sizes, [latency_s + size / bandwidth for size in sizes])

    assert fit.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-9 * sizes[0] / bandwidth)
    assert fit.bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert fit.residual < 1e-9


def test_small_messages_count_as_much_as_large_ones() -> None:
    """Ten percent off at the largest size leaves the latency within a percent of its value."""
    sizes = [float(1 << k) for k in range(10, 31)]
    times = [20e-6 + size / 1e9 for size in sizes]
    times[-1] *= 1.1
    design = np.stack((np.ones(len(sizes)), np.array(sizes)), axis=1)
    equal = nonnegative_fit(design, np.array(times), np.ones(len(sizes)))
    fit = latency_bandwidth_fit(sizes, times)

    assert fit.latency_s == pytest.approx(20e-6, rel=0.01)
    assert equal[0] != pytest.approx(20e-6, rel=0.5)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert 0.05 < fit.residual < 0.1


def test_line_is_never_negative() -> None:
    """Times that grow faster than sizes give latency 0; falling ones an infinite bandwidth."""
    steep = latency_bandwidth_fit([1e6, 2e6, 4e6], [1e-3, 4e-3, 16e-3])
    falling = latency_bandwidth_fit([1e6, 2e6, 4e6], [4e-3, 2e-3, 1e-3])

    assert steep.latency_s == 0.0
    assert steep.residual > 0.5
    assert (falling.seconds_per_byte, falling.bytes_per_s) == (0.0, math.inf)


@pytest.mark.parametrize("count", [1, 3])
def test_one_size_is_all_bandwidth(count: int) -> None:
    """A single size, measured once or more often, cannot show a latency, so it is 0."""
    fit = latency_bandwidth_fit([4e6] * count, [2e-3] * count)

    assert fit.latency_s == 0.0
    assert fit.bytes_per_s == pytest.approx(2e9)
    assert fit.residual == pytest.approx(0.0, abs=1e-12)


def test_static_is_proportional() -> None:
    """One line through 0, over all entries at this sequence length and no other."""
    fit = fit_layer_time(
        0, points((2, 64, 4e-3), (4, 64, 8e-3), (4, 640, 1.0)), 64, SearchOptions(), ignore
    )

    assert (fit.launch_s, fit.sample_s, fit.largest_batch) == (0.0, pytest.approx(2e-3), 4)


def test_batch_has_an_intercept_that_sharding_keeps() -> None:
    """F = c0 + c1*b, and over 4 ranks c0 + (F - c0)/4."""
    fit = fit_layer_time(0, toy_model().layers[0], 1024, BATCH, ignore)

    assert fit.launch_s == pytest.approx(1e-3)
    assert fit.forward_s(np.array(16.0)) == pytest.approx(33e-3)
    assert fit.sharded_forward_s(np.array(16.0), np.array(4.0)) == pytest.approx(9e-3)


def test_sequence_separates_attention() -> None:
    """F = c0 + b*(c1*S + c2*S^2) is recovered, and c2*S^2 is attention."""
    values = [
        (b, s, 1e-3 + b * (1e-6 * s + 2e-9 * s * s)) for b in (1, 2) for s in (512, 1024, 2048)
    ]
    fit = fit_layer_time(0, points(*values), 4096, SEQUENCE, ignore)

    assert fit.launch_s == pytest.approx(1e-3, rel=1e-6)
    assert fit.attention_s == pytest.approx(2e-9 * 4096**2, rel=1e-6)
    assert fit.sample_s == pytest.approx(1e-6 * 4096 + 2e-9 * 4096**2, rel=1e-6)


def test_sequence_with_one_batch_has_no_launch_part() -> None:
    """With a single batch size the constant cannot be told apart, so it is 0."""
    values = [(1, s, 1e-6 * s) for s in (512, 1024, 2048)]
    fit = fit_layer_time(0, points(*values), 1024, SEQUENCE, ignore)

    assert fit.launch_s == 0.0
    assert fit.sample_s == pytest.approx(1.024e-3)


def test_other_is_linear_in_the_sequence() -> None:
    """O = b*(o1 + o2*S) with one batch size; the sum of the types' lengths counts."""
    times = tuple(
        OtherTime(batch=1, seq_lengths=(s, s), forward_s=1e-3 + 1e-6 * 2 * s) for s in (256, 512)
    )
    fit = fit_other_time(toy_model(other_times=times), (384, 384), SEQUENCE, ignore)

    assert fit.sample_s == pytest.approx(1e-3 + 1e-6 * 768)


@pytest.mark.parametrize(
    ("profile", "length", "options", "words"),
    [
        (points((1, 64, 1.0)), 128, SearchOptions(), "measured: 64.*--time-profile-mode sequence"),
        (points((1, 64, 1.0)), 64, BATCH, "only batch size 1.*static"),
        (points((1, 64, 1.0)), 128, SEQUENCE, "only sequence length 64"),
        (points((1, 64, 1.0), (1, 128, 2.0)), 257, SEQUENCE, "257.*128.*--extrapolate"),
        (points(), 64, SearchOptions(), "no times"),
    ],
)
def test_refusals_name_the_remedy(
    profile: LayerProfile, length: int, options: SearchOptions, words: str
) -> None:
    """What was not measured is refused in one sentence with what to do."""
    with pytest.raises(InputError, match=words):
        fit_layer_time(0, profile, length, options, ignore)


def test_extrapolation_is_allowed_and_noted() -> None:
    """`--extrapolate` lets a long sequence through and says so."""
    notes: list[str] = []
    fit = fit_layer_time(
        0,
        points((1, 64, 1.0), (1, 128, 2.0)),
        512,
        replace(SEQUENCE, extrapolate=True),
        notes.append,
    )

    assert fit.sample_s == pytest.approx(8.0)
    assert "extrapolated" in notes[0]


def test_attention_share_of_a_causal_layer() -> None:
    """4*S^2*h halved by causality, against 2*S*(4*h^2 + 2*h*ffn)."""
    spec = toy_spec().layers[0]
    scores = 2.0 * 1024**2 * 512
    matrices = 2.0 * 1024 * (4 * 512**2 + 2 * 512 * 2048)

    assert attention_share(spec) == pytest.approx(scores / (scores + matrices))
    assert attention_share(replace(spec, num_heads=None)) is None


def test_memory_in_sequence_mode_grows_from_the_largest_length() -> None:
    """Activations scale from the largest length, parameters come from the smallest."""
    entries = {
        s: LayerMemory(
            parameter_count=float(s),
            activation_bytes_per_sample={1: 10.0 * s},
            checkpoint_bytes_per_sample=1.0 * s,
        )
        for s in (128, 512)
    }
    profile = LayerProfile(times=(), memory=entries)
    notes: list[str] = []
    found = layer_memory(0, profile, 256, SEQUENCE, notes.append)

    assert found.parameter_count == 128.0
    assert found.activation_bytes_per_sample == {1: 2560.0}
    assert found.checkpoint_bytes_per_sample == 256.0
    assert "512" in notes[0]
    assert layer_memory(0, profile, 128, SearchOptions(), ignore) is entries[128]
    with pytest.raises(InputError, match=r"measured: 128, 512.*--memory-profile-mode sequence"):
        layer_memory(0, profile, 256, SearchOptions(), ignore)


def test_other_memory_in_sequence_mode() -> None:
    """Model states come from the smallest lengths, activations scale from the largest."""
    table = {
        (s, s): OtherMemory(model_state_bytes={1: s}, activation_bytes_per_sample={1: 2.0 * s})
        for s in (128, 512)
    }
    found = other_memory("only", table, (256, 256), SEQUENCE, ignore)

    assert found.model_state_bytes == {1: 128}
    assert found.activation_bytes_per_sample == {1: 512.0}


@pytest.mark.parametrize(
    ("wanted", "suggested"), [(4096, "2048"), (1500, "1024"), (1600, "2048"), (1, "1024")]
)
def test_a_length_that_was_not_measured_names_the_option_of_the_nearest(
    wanted: int, suggested: str
) -> None:
    """The refusals of times and of memory offer the nearest measured length."""
    memory = {
        s: LayerMemory(
            parameter_count=1.0,
            activation_bytes_per_sample={1: 1.0},
            checkpoint_bytes_per_sample=None,
        )
        for s in (1024, 2048)
    }
    profile = replace(points((1, 1024, 1.0), (1, 2048, 2.0)), memory=memory)
    for ask, option in ((fit_layer_time, "time"), (layer_memory, "memory")):
        with pytest.raises(InputError) as caught:
            ask(0, profile, wanted, SearchOptions(), ignore)
        assert f"(--seq-length {suggested}), or --{option}-profile-mode sequence" in str(
            caught.value
        )
