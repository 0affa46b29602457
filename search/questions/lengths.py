"""Throughput and memory of a run over samples of different lengths.

The estimate of a run takes every sequence as full. Here the same run is estimated at the lengths of
its micro-batches, which follow from the lengths of the samples and the way they are batched
(`autopar.training.batches`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError, OptionError
from autopar.price.account import account_of
from autopar.price.assessment import Assessment, Target
from autopar.price.job import job_of_run
from autopar.price.oom_risk import CONTEXT_BYTES
from autopar.price.step import LayerTimeCache, step_time
from autopar.records import Record, replace
from autopar.run.run import Run
from autopar.training.batches import Batches, slowest_mean
from autopar.training.lengths import BATCHINGS, Batching, KnownBatching, Lengths

_NODES = 24
"""Largest number of row lengths that are priced; times of others are interpolated linearly."""
_COUNTED = 12
"""Largest number of row lengths whose memory is counted."""
_RISKS = 64
"""Largest number of peaks whose OOM probability is computed."""
_EQUAL = 1e-12
"""Relative difference of lengths that rounding explains."""
QUANTILES = (0.5, 0.9, 0.99)
"""Shares of the steps for which the peak memory is returned."""


class LengthsQuestion(Record):
    """Samples of a run, and the way they are batched."""

    lengths: Lengths
    batching: Batching
    multiple: int = 1
    """Padded lengths are multiples of this number of tokens."""
    steps: int | None = None
    """Steps of the run; None: one epoch of the samples."""

    def attended(self, seq_length: int) -> float | None:
        """Return the mean length of the documents of packed rows, tokens (`Job.attended`).

        None where attention covers whole rows. Rows of other lengths are not packed.
        """
        if self.batching != "packed":
            return None
        rows = self.batches(seq_length, micro_batch=1, ranks=1, micro_batches=1).rows
        mean = float(rows.attended @ rows.weights)
        return None if math.isclose(mean, seq_length, rel_tol=_EQUAL) else mean

    def batches(
        self,
        seq_length: int,
        *,
        micro_batch: int,
        ranks: int,
        micro_batches: int,
        multiple: int = 1,
    ) -> Batches:
        """Return the micro-batches of the samples; the arguments are fields of `Batches`.

        multiple : tokens; rows are a multiple of it, so that ranks have equal parts.
        """
        return Batches(
            lengths=self.lengths.within(seq_length, math.lcm(multiple, self.multiple)),
            real=self.lengths.within(seq_length),
            batching=self.batching,
            seq_length=seq_length,
            micro_batch=micro_batch,
            ranks=ranks,
            micro_batches=micro_batches,
        )


class BatchedRun(Record):
    """Throughput and memory of a run with one way to batch its samples."""

    batching: Batching
    steps: int
    """Steps of the run."""
    row_tokens: float
    """Mean computed tokens of a row of a micro-batch, padding included."""
    real_share: float
    """Share of the computed tokens that is no padding, 0 to 1."""
    step_s: float
    """Mean step time: that of the slowest data-parallel rank."""
    interval_s: tuple[float, float]
    """90 % interval of the step time, seconds."""
    real_tokens_per_s: float
    """Tokens per second and GPU without padding."""
    imbalance: float
    """Step time of the slowest data-parallel rank over the mean of all ranks."""
    peak_bytes: tuple[float, ...]
    """Peak memory that each share of `QUANTILES` of the steps does not exceed, then the median of
    the largest peak of the run; bytes."""
    oom_probability: float
    """Probability that the run is out of memory in any of its steps, 0 to 1."""
    above: float
    """Share of the steps whose peak exceeds the memory of the GPU without the CUDA context."""


class LengthsAnswer(Record):
    """A run with the lengths of its samples, and the same run with other ways to batch them."""

    question: LengthsQuestion
    cut: float
    """Share of the samples that are longer than the sequence length of the run, 0 to 1."""
    own: BatchedRun
    others: tuple[BatchedRun, ...]
    """The same run with the other ways, the fastest first."""
    refused: str = ""
    """Reason why ways with rows of different lengths are missing; empty if none is missing."""

    def gain(self, other: BatchedRun) -> float:
        """Return the throughput in real tokens of another way over the own one."""
        return other.real_tokens_per_s / self.own.real_tokens_per_s


def question_of(
    lengths: Lengths, batching: Batching | None, steps: int | None, known: KnownBatching | None
) -> LengthsQuestion:
    """Return the question about samples of given lengths.

    batching : way to batch them that the user chose. known : that of the launch script.

    Raises OptionError if neither is given.
    """
    if known is not None and batching in (None, known.batching):
        return LengthsQuestion(
            lengths=lengths, batching=known.batching, multiple=known.multiple, steps=steps
        )
    if batching is None:
        raise OptionError(
            "--lengths: it is not known how samples are batched",
            remedy=f"Add --batching with {', '.join(BATCHINGS[:-1])} or {BATCHINGS[-1]}",
        )
    return LengthsQuestion(lengths=lengths, batching=batching, steps=steps)


def with_lengths(
    assessment: Assessment,
    target: Target,
    asked: LengthsQuestion,
    *,
    compare: bool = True,
    skew: float | None = None,
) -> LengthsAnswer:
    """Return throughput and memory of an assessed run over samples of given lengths.

    skew : tokens of the busiest expert-parallel rank over the mean; None: that of the run.
    compare : True to price the other ways to batch, too.

    Raises InputError for a run without a step time, and for rows of different lengths in a
    pipeline, whose stages exchange messages of one size.
    """
    run = assessment.run
    if assessment.step is None:
        raise InputError(f"--lengths: {assessment.untimed}")
    if run.model.first_sparse is not None:
        raise InputError(f"--lengths: sparse attention of {run.model.name} has no price by length")
    pricing = _Pricing(assessment, target, asked, skew)
    own = pricing.batched(asked.batching)
    others, refused = [], ""
    for batching in BATCHINGS if compare else ():
        if batching != asked.batching:
            try:
                others.append(pricing.batched(batching))
            except InputError as error:
                refused = str(error)
    others.sort(key=lambda one: -one.real_tokens_per_s)
    return LengthsAnswer(
        question=asked,
        cut=asked.lengths.beyond(run.seq_length),
        own=own,
        others=tuple(others),
        refused=refused,
    )


class _Pricing:
    """Prices of one run at different row lengths, each computed once."""

    def __init__(
        self, assessment: Assessment, target: Target, asked: LengthsQuestion, skew: float | None
    ) -> None:
        self._assessment, self._target, self._asked = assessment, target, asked
        self._skew = skew
        self._known = LayerTimeCache(target.machine)
        self._seconds: dict[tuple[int, float], float] = {}
        self._peaks: dict[int, float] = {}

    @property
    def _run(self) -> Run:
        return self._assessment.run

    def batched(self, batching: Batching) -> BatchedRun:
        """Return throughput and memory with one way to batch; raises like `with_lengths`."""
        assessment, run, strategy = self._assessment, self._run, self._run.strategy
        assert assessment.step is not None, "the run has a step time"
        assert assessment.interval_s is not None, "a step time has an interval"
        batches = replace(self._asked, batching=batching).batches(
            run.seq_length,
            micro_batch=strategy.micro_batch,
            ranks=strategy.dp,
            micro_batches=strategy.micro_batches,
            multiple=_multiple(run),
        )
        if batches.varies and strategy.pp > 1:
            raise InputError(
                f"--batching {batching}: stages of a pipeline (pp {strategy.pp}) exchange "
                "messages of one size",
                remedy="Use --batching maximum or packed",
            )
        rows = batches.rows
        seconds = self._step_s(rows.tokens, rows.attended)
        mean = float(seconds @ rows.weights)
        step_s = max(mean, self._slowest_s(batches, seconds))
        scale = step_s / assessment.step.total_s
        low, high = assessment.interval_s
        peaks = self._peak_bytes(rows.tokens)
        weights = batches.weights_of_longest(batches.ranks * batches.micro_batches)
        epoch = batches.real.tokens / (strategy.global_batch * rows.real)
        steps = self._asked.steps or math.ceil(epoch * (1.0 - 1e-9))
        of_run = batches.weights_of_run(steps)
        if not batches.varies:
            peaks, weights, of_run = peaks[:1], np.ones(1), np.ones(1)
        oom = _interpolated(peaks, _RISKS, lambda one: self._target.oom_probability(run, one))
        room = self._target.capacity_bytes - CONTEXT_BYTES
        at = [_quantile(weights, one) for one in QUANTILES]
        return BatchedRun(
            batching=batching,
            steps=steps,
            row_tokens=rows.mean_tokens,
            real_share=min(1.0, rows.real / rows.mean_tokens),
            step_s=step_s,
            interval_s=(low * scale, high * scale),
            real_tokens_per_s=strategy.global_batch * rows.real / (step_s * strategy.gpus),
            imbalance=step_s / mean,
            peak_bytes=(*(float(peaks[one]) for one in at), float(peaks[_quantile(of_run, 0.5)])),
            oom_probability=float(oom @ of_run),
            above=float(weights @ (peaks > room)),
        )

    def _slowest_s(self, batches: Batches, seconds: F64) -> float:
        """Return the mean step time of the slowest data-parallel rank.

        A step takes the mean of what steps of each of its micro-batches alone would take. Ranks
        wait for each other in every micro-batch if they gather weights, reduce gradients or
        exchange tokens of experts in it. Sorted samples are dealt to the ranks one micro-batch
        after the other (`BatchSamplerShard` of accelerate), so that the first rank has the longest.
        """
        run, ranks, weights = self._run, batches.ranks, batches.rows.weights
        if batches.batching == "grouped" and batches.varies:
            return float(seconds @ batches.weights_of_longest(ranks))
        job = job_of_run(run)
        waits = run.split.zero == 3 or job.reduce_every_micro_batch or run.split.ep > 1
        return slowest_mean(seconds, weights, 1 if waits else batches.micro_batches, ranks)

    def _step_s(self, tokens: F64, attended: F64) -> F64:
        """Return the seconds of steps whose rows all have these tokens and documents."""
        if tokens[0] == tokens[-1]:
            length = math.ceil(tokens[0])
            return _interpolated(attended, _NODES, lambda one: self._at(length, one))
        nodes = attended / tokens
        return _interpolated(
            np.ceil(tokens),
            _NODES,
            lambda one: self._at(round(one), one * float(np.interp(one, tokens, nodes))),
        )

    def _at(self, length: int, attended: float) -> float:
        """Return the seconds of a step of rows of `length` tokens in documents of `attended`."""
        whole = math.isclose(attended, length, rel_tol=_EQUAL)
        key = length, length if whole else attended
        if key not in self._seconds:
            job = job_of_run(replace(self._run, seq_length=length))
            skew = job.skew if self._skew is None else self._skew
            job = replace(job, skew=skew, attended=None if whole else attended)
            self._seconds[key] = step_time(self._target.machine, job, self._known).total_s
        return self._seconds[key]

    def _peak_bytes(self, tokens: F64) -> F64:
        """Return the peak memory of the peak stage by row length."""
        return _interpolated(np.ceil(tokens), _COUNTED, lambda one: self._peak(round(one)))

    def _peak(self, length: int) -> float:
        if length == self._run.seq_length:
            return self._assessment.fullest.peak_bytes
        if length not in self._peaks:
            run = replace(self._run, seq_length=length)
            stages = range(run.strategy.pp)
            self._peaks[length] = max(account_of(run, one).peak_bytes for one in stages)
        return self._peaks[length]


def _multiple(run: Run) -> int:
    """Return the multiple of tokens of padded rows that gives the ranks equal parts."""
    split = run.split
    return math.lcm(2 * split.cp if split.cp > 1 else 1, split.tp if split.splits_sequence else 1)


def _quantile(weights: F64, share: float) -> int:
    """Return the index of the smallest value that is not exceeded with a probability `share`."""
    return min(int(np.searchsorted(np.cumsum(weights), share - 1e-9)), len(weights) - 1)


def _interpolated(points: F64, most: int, value: Callable[[float], float]) -> F64:
    """Return values at ascending points, computed at most at `most` of them, else interpolated."""
    own = np.unique(points)
    if len(own) > most:
        at = np.unique(np.searchsorted(own, np.geomspace(own[0], own[-1], most) * (1.0 - 1e-12)))
        own = own[np.minimum(at, len(own) - 1)]
    return np.asarray(np.interp(points, own, [value(float(one)) for one in own]), dtype=np.float64)
