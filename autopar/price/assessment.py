"""Memory by stage, OOM probability and step time of a run on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

from autopar.errors import InputError
from autopar.price.account import Account, account_of, host_bytes_of
from autopar.price.job import job_of_run
from autopar.price.oom_risk import few_runs, oom_probability_any_stage, oom_probability_at
from autopar.price.step import StepTime, step_time
from autopar.rates.accuracy import Accuracy, RunClass
from autopar.rates.card import Card
from autopar.rates.parts.operations import Machine
from autopar.records import Record
from autopar.run.job import Job
from autopar.run.run import Run
from autopar.training.throughput import Throughput, hardware_flop, least_step_s, model_flop


class Target(Record):
    """Machine of an assessment, accuracy of step times on it, and accepted OOM probability."""

    machine: Machine
    accuracy: Accuracy
    site_known: bool
    """True if cluster factors of the site are known; selects the class of measured runs."""
    oom_risk: float
    """Largest accepted OOM probability, 0 to 1."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of one GPU, bytes."""
        return self.machine.card.memory_bytes

    def oom_probability(self, run: Run, peak_bytes: float) -> float:
        """Return the OOM probability of a run on one GPU, 0 to 1.

        peak_bytes : predicted peak of allocated memory.
        """
        return oom_probability_at(run, peak_bytes, self.capacity_bytes)

    @property
    def host_capacity_bytes(self) -> float | None:
        """Host memory per GPU, bytes; None if the hardware data do not contain it."""
        return self.machine.card.more.get("host.memory_bytes")

    def host_fits(self, host_bytes: float) -> bool:
        """Return True if `host_bytes` per GPU fit in host memory or its size is unknown."""
        return self.host_capacity_bytes is None or host_bytes <= self.host_capacity_bytes


class Assessment(Record, dict=True):
    """Memory, OOM probability, step time and throughput of a run on a target."""

    run: Run
    accounts: tuple[Account, ...]
    """Memory of the requested stages."""
    odds_of_oom: float
    """OOM probability of the stage with the largest one."""
    step: StepTime | None
    untimed: str | None
    """Reason for a missing step time; None if there is a step time."""
    interval_s: tuple[float, float] | None
    """90 % interval of the step time, seconds; None without a step time."""
    runs: RunClass | None
    """Class of measured runs whose errors give the interval; None without a step time."""
    throughput: Throughput | None
    """Tokens per second, TFLOP/s and MFU from the step time; None without a step time."""

    @property
    def fullest(self) -> Account:
        """Memory of the stage with the highest peak."""
        return max(self.accounts, key=lambda account: account.peak_bytes)

    @cached_property
    def host_bytes_at(self) -> dict[int, float]:
        """Lower bound of host bytes per rank, by stage index."""
        return {one.stage: host_bytes_of(self.run, one) for one in self.accounts}

    @property
    def host_bytes(self) -> float:
        """Lower bound of host bytes per rank, largest of the requested stages."""
        return max(self.host_bytes_at.values())

    def fits(self, target: Target) -> bool:
        """Return True if the OOM probability is within the limit and host memory suffices."""
        return self.odds_of_oom <= target.oom_risk and target.host_fits(self.host_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second and GPU; None without a step time."""
        return None if self.throughput is None else self.throughput.tokens_per_s

    @property
    def mfu(self) -> float | None:
        """MFU relative to the peak of the GEMMs' precision, 0 to 1; None without a step time.

        Model FLOP are counted as engines do in their logs.
        """
        return None if self.throughput is None else self.throughput.mfu


class Timing(NamedTuple):
    """Job of a run and its step time; both are None if the run cannot be timed."""

    job: Job | None
    step: StepTime | None
    untimed: str | None
    """Reason for a missing step time; None if there is a step time."""


def timing_of(run: Run, target: Target) -> Timing:
    """Return the job and step time of a run, or the reason why it has no step time."""
    try:
        job = job_of_run(run)
        return Timing(job, step_time(target.machine, job), None)
    except InputError as error:
        return Timing(None, None, str(error))


def assess(
    run: Run,
    target: Target,
    stages: Iterable[int] | None = None,
    timing: Timing | None = None,
    count: Callable[[Run, int], Account] = account_of,
) -> Assessment:
    """Return memory per stage, OOM probability, step time and throughput of a run.

    stages : indices of the pipeline stages, at least one; None: all stages.
    timing : result of `timing_of` if already computed; None: computed here.
    count : function from a run and stage to its memory, for callers with a cache.
    """
    asked = range(run.strategy.pp) if stages is None else sorted({*stages})
    accounts = tuple(count(run, stage) for stage in asked)
    peaks = [account.peak_bytes for account in accounts]
    odds = oom_probability_any_stage(run, peaks, target.capacity_bytes)
    job, step, untimed = timing or timing_of(run, target)
    if job is None or step is None:
        return Assessment(
            run=run,
            accounts=accounts,
            odds_of_oom=odds,
            step=None,
            untimed=untimed,
            interval_s=None,
            runs=None,
            throughput=None,
        )
    runs = target.accuracy.of(
        target.machine.stack.name,
        experts=run.model.experts is not None,
        adapters=run.runtime.adapters is not None,
        site_known=target.site_known,
        architecture=target.machine.card.architecture,
        few_runs=few_runs(run.model),
    )
    flop, precision = hardware_flop(job), _fastest_precision(job, target.machine.card)
    peak = target.machine.card.peak(precision)
    fast_s, slow_s = runs.interval_s(step.total_s)
    interval = max(fast_s, least_step_s(flop, job.gpus, peak)), slow_s
    return Assessment(
        run=run,
        accounts=accounts,
        odds_of_oom=odds,
        step=step,
        untimed=None,
        interval_s=interval,
        runs=runs,
        throughput=Throughput(
            step_s=step.total_s,
            interval_s=interval,
            gpus=job.gpus,
            tokens=job.global_batch * job.seq,
            model_flop=model_flop(job),
            hardware_flop=flop,
            peak_flop_per_s=peak,
            peak_precision="fp8" if precision == "fp8_block" else precision,
        ),
    )


def _fastest_precision(job: Job, card: Card) -> str:
    """Return the precision of a job's layers with the highest peak."""
    used = {job.precision if block.precision is None else block.precision for block in job.blocks}
    if job.low_precision_attention:
        used.add("fp8")
    return max(sorted(used), key=card.peak)
