"""Lengths of samples: reading, errors, statistics; micro-batches against direct simulations."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.errors import DocumentError, InputError, OptionError
from autopar.training.batches import Batches, packed, slowest_mean, sum_distribution
from autopar.training.lengths import Batching, Lengths, lengths_of, read_lengths

SKEWED = lengths_of((round(40 * 1.09**one), 60 - one) for one in range(50))
"""Lengths from 40 to 2,700 tokens, short ones more often."""
DRAWS = np.random.default_rng(20260822)


def drawn(number: int, lengths: Lengths = SKEWED) -> NDArray[np.int64]:
    """Return independent draws of samples."""
    weights = np.array(lengths.counts) / lengths.number
    return DRAWS.choice(np.array(lengths.values), size=number, p=weights)


def batches_of(batching: Batching, lengths: Lengths = SKEWED, **sizes: int) -> Batches:
    """Return micro-batches of 4 rows on 8 ranks, 2 of them a step."""
    limit = sizes.pop("seq_length", 4096)
    own = {"micro_batch": 4, "ranks": 8, "micro_batches": 2} | sizes
    real = lengths.within(limit)
    return Batches(lengths=real, real=real, batching=batching, seq_length=limit, **own)


# --------------------------------------------------------------------------------------------------
# Reading.


def test_a_file_has_one_length_a_line_or_a_length_and_its_count(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("310\n\n 64 , 3\n310,2\n2048\n", encoding="utf-8")
    assert read_lengths(str(path)) == Lengths(values=(64, 310, 2048), counts=(3, 3, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("310\n0\n", "line 2:"),
        ("310\n\n31o\n", "line 3:"),
        ("310,\n", "line 1:"),
        ("310,0\n", "line 1:"),
        ("310,2,1\n", "line 1:"),
        ("1.5\n", "line 1:"),
        ("-4\n", "line 1:"),
        ("99999999999\n", "line 1:"),
        ("\n\n", "contains no lengths"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError) as error:
        read_lengths(str(path))
    assert said in str(error.value)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 600


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError):
        read_lengths(str(tmp_path / "none.txt"))


@pytest.mark.parametrize(
    "text",
    [
        "p50=310",
        "max=310",
        "p50=310,max=200",
        "p50=310,p50=320,max=400",
        "p0=3,max=400",
        "p100=3,max=400",
        "p50=x,max=400",
        "p50=0,max=400",
        "p50=310,max=400,q=3",
        "p50=310,,max=400",
        "p50=310,max=999999999999",
    ],
)
def test_wrong_percentiles_are_errors(text: str) -> None:
    with pytest.raises(OptionError) as error:
        read_lengths(text)
    assert "--lengths" in str(error.value)
    assert len(str(error.value)) < 600


def test_percentiles_are_log_linear_between_points() -> None:
    found = read_lengths("min=50,p50=310,p90=790,p99=1800,max=4096")
    assert found.number == 10_000
    assert found.values[0] == 50
    assert found.values[-1] == 4096
    for share, length in ((0.5, 310), (0.9, 790), (0.99, 1800), (1.0, 4096)):
        assert abs(found.quantile(share) - length) <= 1
    # half way between two points in logarithms
    assert found.quantile(0.7) == pytest.approx(math.sqrt(310 * 790), abs=1)


def test_percentiles_without_a_minimum_continue_the_first_segment() -> None:
    found = read_lengths("p50=310,p90=790,max=4096")
    assert found.values[0] == pytest.approx(310 * math.exp(-math.log(790 / 310) * 0.5 / 0.4), abs=1)


@pytest.mark.parametrize(
    ("values", "counts"),
    [((), ()), ((1, 2), (1,)), ((2, 1), (1, 1)), ((0, 1), (1, 1)), ((1,), (0,))],
)
def test_a_distribution_has_ascending_values_and_counts(
    values: tuple[int, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(InputError):
        Lengths(values=values, counts=counts)


def test_statistics_are_those_of_the_samples() -> None:
    samples = np.repeat(SKEWED.values, SKEWED.counts)
    assert SKEWED.number == len(samples)
    assert SKEWED.tokens == samples.sum()
    assert SKEWED.squares == (samples**2).sum()
    assert SKEWED.mean == samples.mean()
    assert SKEWED.attended == (samples**2).sum() / samples.sum()
    assert SKEWED.beyond(1000) == (samples > 1000).mean()
    cut = np.minimum(np.ceil(np.minimum(samples, 1000) / 64) * 64, 1000)
    own = SKEWED.within(1000, 64)
    assert (own.tokens, own.squares) == (cut.sum(), (cut**2).sum())


# --------------------------------------------------------------------------------------------------
# Rows against simulations.


def test_rows_padded_to_the_longest_have_the_tokens_of_the_formula() -> None:
    """E[max of b] = sum_l l (F(l)^b - F(l-1)^b), against 200,000 micro-batches."""
    own = batches_of("longest").rows
    longest = drawn(4 * 200_000).reshape(-1, 4).max(axis=1)
    assert own.mean_tokens == pytest.approx(longest.mean(), rel=0.005)
    assert (own.tokens**2) @ own.weights == pytest.approx((longest**2.0).mean(), rel=0.01)
    by_hand, before = 0.0, 0.0
    for value, below in zip(SKEWED.values, SKEWED.below, strict=True):
        share = (below / SKEWED.number) ** 4
        by_hand, before = by_hand + value * (share - before), share
    assert own.mean_tokens == pytest.approx(by_hand, rel=1e-12)


def grouped(lengths: NDArray[np.int64], step: int, rows: int) -> NDArray[np.int64]:
    """Return the longest of each group of `rows` samples, sorted 50 steps at a time.

    The order is that of `get_length_grouped_indices` of transformers, without its first exchange.
    """
    pool = step * min(len(lengths) // (4 * step), 50)
    whole = lengths[: len(lengths) // pool * pool].reshape(-1, pool)
    return np.sort(whole, axis=1)[:, ::-1].reshape(-1, rows).max(axis=1)


def test_sorted_rows_have_the_lengths_of_the_sampler() -> None:
    lengths = lengths_of((value, 1000 * count) for value, count in
                         zip(SKEWED.values, SKEWED.counts, strict=True))  # fmt: skip
    own = batches_of("grouped", lengths)
    samples = drawn(400_000)
    rows = grouped(samples, 8, 4)
    assert own.rows.mean_tokens == pytest.approx(rows.mean(), rel=0.01)
    assert own.rows.mean_tokens < 1.06 * lengths.mean
    # micro-batches are dealt to the ranks in turn, 100 of them are sorted together
    for ranks in (5, 8, 64, 250):
        longest = rows[: len(rows) // ranks * ranks].reshape(-1, ranks).max(axis=1)
        weights = own.weights_of_longest(ranks)
        assert own.rows.tokens @ weights == pytest.approx(longest.mean(), rel=0.012), ranks


def test_few_samples_are_sorted_a_quarter_at_a_time() -> None:
    few = lengths_of((value, 1) for value in range(10, 74))
    own = batches_of("grouped", few)  # 64 samples: 2 steps of a rank are sorted together
    samples = np.stack([DRAWS.choice(np.arange(10, 74), 16) for _ in range(20_000)])
    rows = np.sort(samples, axis=1)[:, ::-1].reshape(-1, 4).max(axis=1)
    assert own.rows.mean_tokens == pytest.approx(rows.mean(), rel=0.01)


def test_rows_without_padding_are_sums_of_samples() -> None:
    own = batches_of("padding-free").rows
    sums = drawn(4 * 200_000).reshape(-1, 4).sum(axis=1) / 4
    assert own.mean_tokens == pytest.approx(SKEWED.mean, rel=1e-9)
    mean = own.mean_tokens
    assert ((own.tokens - mean) ** 2) @ own.weights == pytest.approx(sums.var(), rel=0.01)
    assert 1.0 - np.cumsum(own.weights)[np.searchsorted(own.tokens, 900)] == pytest.approx(
        (sums > 900).mean(), abs=0.004
    )
    # pairs of tokens: the sum of the squares of all samples
    assert (4 * own.tokens * own.attended) @ own.weights == pytest.approx(
        4 * SKEWED.squares / SKEWED.number, rel=1e-6
    )


def test_packed_rows_are_nearly_full_and_attend_within_samples() -> None:
    own = batches_of("packed", micro_batch=1).rows
    assert 0.95 < own.real / 4096 <= 1.0
    assert own.mean_tokens == 4096
    # S Q / T of the design of packed attention, times the real share
    expected = SKEWED.attended * own.real / 4096
    assert own.attended @ own.weights == pytest.approx(expected, rel=1e-9)
    two = batches_of("packed", micro_batch=2).rows
    assert two.attended @ two.weights == pytest.approx(expected, rel=1e-6)
    spread = [float(((one.attended - expected) ** 2) @ one.weights) for one in (own, two)]
    assert spread[1] == pytest.approx(spread[0] / 2, rel=1e-3)
    full = batches_of("packed-full").rows
    assert list(full.attended) == [4096.0]
    assert full.real == own.real
    assert batches_of("wrapped").rows.real == 4096.0


def test_best_fit_packs_every_sample_once_and_exceeds_no_row() -> None:
    tokens, squares = packed(SKEWED, 3000)
    assert tokens.sum() == SKEWED.tokens
    assert squares.sum() == SKEWED.squares
    assert tokens.max() <= 3000
    assert len(tokens) <= -(-SKEWED.tokens // 3000) * 1.05
    # longest first into the fullest row with room
    rows, _ = packed(lengths_of([(7, 1), (6, 1), (3, 1), (2, 1), (1, 1)]), 10)
    assert sorted(rows) == [9.0, 10.0]


def test_rows_of_the_sequence_length_do_not_vary() -> None:
    for batching in ("maximum", "packed", "packed-full", "wrapped"):
        own = batches_of(batching)  # type: ignore[arg-type]
        assert not own.varies
        assert set(own.rows.tokens) == {4096.0}


# --------------------------------------------------------------------------------------------------
# Longest rows and slowest ranks.


def test_the_longest_row_of_a_step_and_of_a_run() -> None:
    own = batches_of("longest")
    longest = drawn(64 * 20_000).reshape(-1, 64).max(axis=1)
    weights = own.weights_of_longest(16)
    assert own.rows.tokens @ weights == pytest.approx(longest.mean(), rel=0.01)
    # a run draws without replacement: 300 of 1,775 samples
    samples = np.repeat(SKEWED.values, SKEWED.counts)
    number = 4 * 64
    found = [DRAWS.permutation(samples)[:number].max() for _ in range(4000)]
    run = own.weights_of_run(4)
    assert own.rows.tokens @ run == pytest.approx(np.mean(found), rel=0.003)
    assert run[-1] == pytest.approx(np.mean(np.array(found) == SKEWED.values[-1]), abs=0.03)
    for whole in (own.weights_of_run(10_000), batches_of("grouped").weights_of_run(1)):
        assert whole[-1] == 1.0
        assert whole[:-1].sum() == 0.0


@pytest.mark.parametrize(("number", "ranks"), [(1, 8), (4, 8), (16, 64)])
def test_the_slowest_rank_is_that_of_a_simulation(number: int, ranks: int) -> None:
    values = np.array(SKEWED.values, dtype=np.float64)
    seconds = 0.1 + values / 1e3 + values**2 / 4e6
    weights = np.array(SKEWED.counts) / SKEWED.number
    draws = DRAWS.choice(seconds, p=weights, size=(3000, ranks, number)).mean(axis=2).max(axis=1)
    assert slowest_mean(seconds, weights, number, ranks) == pytest.approx(draws.mean(), rel=0.01)


def test_many_micro_batches_are_nearly_normal() -> None:
    """mean + sqrt(v / m) z(D), where z(8) = 1.4236 is the mean of the largest of eight normals."""
    seconds = np.array([1.0, 2.0, 4.0])
    weights = np.array([0.5, 0.3, 0.2])
    mean = float(seconds @ weights)
    spread = math.sqrt(float(((seconds - mean) ** 2) @ weights) / 4096)
    assert slowest_mean(seconds, weights, 4096, 8) == pytest.approx(
        mean + 1.4236 * spread, rel=2e-4
    )


def test_equal_times_have_no_slowest_rank() -> None:
    assert slowest_mean(np.array([0.3, 0.3]), np.array([0.1, 0.9]), 7, 64) == 0.3


def test_sums_have_the_probabilities_of_a_convolution() -> None:
    values, weights = np.array([3.0, 5.0]), np.array([0.25, 0.75])
    sums, found, squares = sum_distribution(values, weights, 3, 1.0, values * values)
    assert list(sums) == [9.0, 11.0, 13.0, 15.0]
    assert found == pytest.approx([1 / 64, 9 / 64, 27 / 64, 27 / 64])
    assert squares == pytest.approx([27.0, 43.0, 59.0, 75.0])
