"""The price of a run on a machine: memory by stage, probability of running out, step time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import NamedTuple

from autopar.errors import InputError
from autopar.price.account import Account, account_of, host_bytes_of
from autopar.price.job import job_of_run
from autopar.price.risk import odds_of_any, odds_of_more
from autopar.price.step import StepTime, step_time
from autopar.rates.accuracy import Accuracy, RunClass
from autopar.rates.parts.operations import Machine
from autopar.records import Record
from autopar.run.job import Job
from autopar.run.run import Run
from autopar.training.throughput import Throughput, hardware_flop, model_flop


class Target(Record):
    """Machine and context of a price: where a run is, and how well steps are known there."""

    machine: Machine
    accuracy: Accuracy
    site_known: bool
    oom_risk: float
    """Odds of running out of memory above which a launch does not fit."""

    @property
    def capacity_bytes(self) -> float:
        """Memory of a device."""
        return self.machine.card.memory_bytes

    def odds(self, run: Run, peak_bytes: float) -> float:
        """Return the odds that a device runs out of memory at such a predicted peak."""
        return odds_of_more(run, peak_bytes, self.capacity_bytes)

    @property
    def host_room_bytes(self) -> float | None:
        """Memory of the host for each device; None where the card does not say it."""
        return self.machine.card.more.get("host.memory_bytes")

    def host_fits(self, host_bytes: float) -> bool:
        """Return whether the host has as much for each device, as far as is known."""
        return self.host_room_bytes is None or host_bytes <= self.host_room_bytes


class Assessment(Record, dict=True):
    """The price of a run."""

    run: Run
    accounts: tuple[Account, ...]
    """Of the stages that were asked for."""
    odds_of_oom: float
    """Of the fullest of them."""
    step: StepTime | None
    untimed: str | None
    """Why there is no step time."""
    interval_s: tuple[float, float] | None
    runs: RunClass | None
    """Whose errors the interval is made of."""
    throughput: Throughput | None
    """The step in the units of logs; None without a step time."""

    @property
    def fullest(self) -> Account:
        """The stage with the highest peak."""
        return max(self.accounts, key=lambda account: account.peak_bytes)

    @cached_property
    def host_bytes_at(self) -> dict[int, float]:
        """By stage, what a rank has on the host at least."""
        return {one.stage: host_bytes_of(self.run, one) for one in self.accounts}

    @property
    def host_bytes(self) -> float:
        """Of these stages, the one with the most on the host."""
        return max(self.host_bytes_at.values())

    def fits(self, target: Target) -> bool:
        """Return whether the odds of running out of memory are allowed, and the host has room."""
        return self.odds_of_oom <= target.oom_risk and target.host_fits(self.host_bytes)

    @property
    def tokens_per_s(self) -> float | None:
        """Of one GPU."""
        return None if self.throughput is None else self.throughput.tokens_per_s

    @property
    def mfu(self) -> float | None:
        """Share of the device's 16-bit peak, of the FLOP that trainers count."""
        return None if self.throughput is None else self.throughput.mfu


class Timing(NamedTuple):
    """A run as a job, and its step time; without either, why there is none."""

    job: Job | None
    step: StepTime | None
    untimed: str | None


def timing_of(run: Run, target: Target) -> Timing:
    """Return the step time of a run, without its memory."""
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
    """Return the price of a run; stages default to all, timing to what `timing_of` has.

    count : returns the memory of a stage, for somebody who has counted some already.
    """
    asked = range(run.strategy.pp) if stages is None else sorted({*stages})
    accounts = tuple(count(run, stage) for stage in asked)
    peaks = [account.peak_bytes for account in accounts]
    odds = odds_of_any(run, peaks, target.capacity_bytes)
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
        site_known=target.site_known,
    )
    interval = runs.interval_s(step.total_s)
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
            hardware_flop=hardware_flop(job),
            peak_flop_per_s=target.machine.card.flop_per_s["bf16"],
        ),
    )
