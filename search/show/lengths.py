"""Lengths of samples in reports and in JSON: throughput without padding, memory over the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from autopar.command.answer_schemas import BatchingEntry, LengthsEntry
from autopar.units import GIB, format_bytes, format_figure, format_probability

if TYPE_CHECKING:
    from autopar.price.assessment import Target
    from autopar.training.lengths import Batching
    from search.questions.lengths import BatchedRun, LengthsAnswer

_WORDS: dict[Batching, str] = {
    "maximum": "padded to the sequence length",
    "longest": "padded to the longest of the micro-batch",
    "grouped": "sorted by length, padded to the longest",
    "padding-free": "concatenated without padding",
    "packed": "packed, attention within samples",
    "packed-full": "packed, attention over all samples",
    "wrapped": "cut into full rows",
}
_LEAST_GAIN = 1.01
"""Throughput over that of the run at which another way to batch is suggested."""
_MOST_GAINS = 3
"""Largest number of suggested ways to batch."""


def length_rows(found: LengthsAnswer, target: Target) -> list[tuple[str, str]]:
    """Return (label, text) rows: samples, batches, throughput, memory, and gains of other ways."""
    asked, own = found.question, found.own
    lengths = asked.lengths
    cut = f", {found.cut * 100:.2g} % cut" if found.cut else ""
    samples = (
        f"{lengths.number:,} samples, mean {lengths.mean:,.0f}, 99 % up to "
        f"{lengths.quantile(0.99):,}, longest {lengths.values[-1]:,}{cut}"
    )
    batches = f"{_WORDS[own.batching]}: {own.real_share * 100:.1f} % of the tokens are real"
    if own.imbalance > 1.0005:
        batches += (
            f"; the slowest rank takes {(own.imbalance - 1.0) * 100:.1f} % more than the mean"
        )
    slow, fast = (own.step_s / one for one in reversed(own.interval_s))
    rate = own.real_tokens_per_s
    real = (
        f"{rate:,.0f} real tokens/s/GPU ({rate * slow:,.0f} to {rate * fast:,.0f}), "
        f"step {format_figure(own.step_s)} s"
    )
    rows = [("Lengths", samples), ("Batches", batches), ("Real rate", real)]
    rows.append(("Memory", _memory(found, target)))
    gains = [one for one in found.others if found.gain(one) >= _LEAST_GAIN]
    shown = gains[:_MOST_GAINS]
    if shown:
        text = ", ".join(f"{one.batching} {found.gain(one):.2f} times" for one in shown)
        tight = [one.batching for one in shown if one.oom_probability > target.oom_risk]
        text += " the real tokens/s"
        if tight:
            text += f"; {' and '.join(tight)} {'do' if tight[1:] else 'does'} not fit"
        rows.append(("Gain", text))
    return rows


def _memory(found: LengthsAnswer, target: Target) -> str:
    """Return the peak memory of steps, the OOM probability of the run, and the steps above it."""
    own, peaks = found.own, [f"{one / GIB:.2f}" for one in found.own.peak_bytes]
    text = f"{peaks[-1]} GiB in all steps"
    if own.peak_bytes[0] != own.peak_bytes[-1]:
        half, most = peaks[0], peaks[2]
        text = f"{half} GiB in half of the steps, {most} in 99 %, {peaks[-1]} at most"
    odds = format_probability(own.oom_probability)
    text += f"; OOM probability {odds} in {own.steps:,} step{'s' * (own.steps > 1)}"
    if own.above:
        # the allocated peak leaves no room for the CUDA context of 1 GiB
        room = format_bytes(target.capacity_bytes - GIB)
        text += f"; {_one_in(own.above)} above {room}"
    return text


def _one_in(share: float) -> str:
    """Return a share of the steps in words."""
    return "every step is" if share > 0.5 else f"1 step of {1.0 / share:,.0f} is"


def table_rows(found: LengthsAnswer) -> list[tuple[str, ...]]:
    """Return one row of texts for each way to batch, the run's own first."""
    return [
        (
            one.batching,
            f"{one.real_tokens_per_s:,.0f}",
            f"{found.gain(one):.2f}",
            f"{one.real_share * 100:.1f} %",
            f"{(one.imbalance - 1.0) * 100:+.1f} %",
            f"{one.peak_bytes[-1] / GIB:.2f}",
            format_probability(one.oom_probability),
        )
        for one in (found.own, *found.others)
    ]


TABLE = ("batching", "tokens/s/GPU", "gain", "real", "slowest", "peak GiB", "OOM")
"""Columns of `table_rows`."""


def lengths_entry(found: LengthsAnswer) -> dict[str, Any]:
    """Return the object `lengths` of JSON, in seconds, bytes and shares."""
    lengths = found.question.lengths
    entry = LengthsEntry(
        samples=lengths.number,
        mean_tokens=lengths.mean,
        cut=found.cut,
        batchings=[_entry(one) for one in (found.own, *found.others)],
    )
    return {**asdict(entry), "batchings": [asdict(one) for one in entry.batchings]}


def _entry(one: BatchedRun) -> BatchingEntry:
    names = ("p50", "p90", "p99", "max")
    return BatchingEntry(
        batching=one.batching,
        steps=one.steps,
        row_tokens=one.row_tokens,
        real_share=one.real_share,
        step_time_s=one.step_s,
        step_time_interval_s=list(one.interval_s),
        real_tokens_per_s_per_gpu=one.real_tokens_per_s,
        imbalance=one.imbalance,
        peak_bytes={name: round(size) for name, size in zip(names, one.peak_bytes, strict=True)},
        oom_probability=one.oom_probability,
        steps_above_memory=one.above,
    )
