"""Vectorised lower bounds of micro-batch time for all combinations of degrees.

Thousands of combinations consist of a few hundred attention shardings and as many expert
shardings. The time of each sharding is computed once by the formulas of `autopar.rates.layer`, and
the time of a combination is the sum of both. Step times and memory of single candidates are
computed in `search.planning.uniform.cost_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64
from autopar.price.step import seconds_of_times
from autopar.rates.layer import (
    LayerTimes,
    context_parallel_comm,
    embedding_times,
    head_sends_s,
    head_times,
    layer_kernels,
    mtp_times,
    recurrent_sends,
    tensor_parallel_comm,
)
from autopar.rates.measured import host_device_time_s
from autopar.rates.parts.experts import expert_sends
from autopar.rates.parts.operations import (
    CommunicationTime,
    KernelTime,
    Machine,
    RankShape,
    split_of,
)
from autopar.records import replace
from autopar.run.architecture import Attention, Experts, Mlp, Recurrent
from autopar.run.job import Block, Job as StepJob
from autopar.run.strategy import ContextKind
from search.engines.candidate import Candidate, Dispatcher, Precision

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""


class AttentionDegrees(NamedTuple):
    """Sharding of attention and dense MLPs, with micro-batch size."""

    tp: int
    cp: int
    micro_batch: int
    cp_kind: ContextKind = "ring"


class ExpertDegrees(NamedTuple):
    """Sharding of experts, with precision and dispatch settings."""

    ep: int
    etp: int
    precision: Precision
    dispatcher: Dispatcher
    overlap: bool


class _Time(NamedTuple):
    """Device and host seconds of a part of the model for one micro-batch, (n,).

    The axis is that of the attention shardings.
    """

    device_s: F64
    host_s: F64


class ModelTimeBounds:
    """Lower bounds of whole-model micro-batch seconds, by attention and expert sharding."""

    def __init__(
        self,
        machine: Machine,
        laid: Sequence[AttentionDegrees],
        ways: Sequence[ExpertDegrees],
        base: Callable[[Candidate], StepJob],
    ) -> None:
        """Store all attention shardings `laid` and expert shardings `ways`.

        base : returns the step job of a candidate on one data-parallel rank.
        """
        self._machine = machine
        self._laid = tuple(laid)
        self._ways = tuple(ways)
        self._base = base
        self._jobs: dict[object, list[StepJob]] = {}
        self._dense: dict[object, _Time] = {}
        self._mixtures: dict[object, _Time] = {}
        self._sends: dict[object, CommunicationTime] = {}

    def seconds(self, ways: ExpertDegrees, number: dict[Block, int], at: I64) -> F64:
        """Return lower bounds of whole-model micro-batch seconds for one expert sharding.

        number : number of layers of each type in the model
        at : indices of attention shardings, one per result
        """
        plain = self._time_of_dense(ways, number)
        device, host = plain.device_s[at].copy(), plain.host_s[at].copy()
        for block, count in number.items():
            if isinstance(block.mlp, Experts):
                mixture = self._time_of_mixture(ways, block, at)
                device += count * mixture.device_s
                host += count * mixture.host_s
        return np.asarray(host_device_time_s(device, host)) * _ROUNDING

    def _jobs_of(self, ways: ExpertDegrees) -> list[StepJob]:
        """Return one step job per attention sharding, at the precision of an expert sharding."""
        found = self._jobs.get(ways.precision)
        if found is None:
            found = self._jobs[ways.precision] = []
            for one in self._laid:
                choice = Candidate(tp=one.tp, precision=ways.precision)
                job = self._base(choice)
                found.append(
                    replace(
                        job,
                        cp=one.cp,
                        heads_exchanged=one.cp_kind == "a2a",
                        keys_gathered=one.cp_kind == "all-gather",
                        micro_batch=one.micro_batch,
                        ep=1,
                    )
                )
        return found

    # ----------------------------------------------------------------------------------------------

    def _time_of_dense(self, ways: ExpertDegrees, number: dict[Block, int]) -> _Time:
        """Return the time of attention, dense MLPs, embedding, head and MTP modules."""
        found = self._dense.get(ways.precision)
        if found is None:
            jobs = self._jobs_of(ways)
            device, host = self._ends(jobs), np.zeros(len(jobs))
            for block, count in number.items():
                halves = []
                if block.attention is not None:
                    halves.append(self._attention(jobs, block))
                elif block.recurrent is not None:
                    halves.append(self._recurrent(jobs, block, block.recurrent))
                if isinstance(block.mlp, Mlp):
                    halves.append(self._mlp(jobs, replace(block, attention=None, recurrent=None)))
                for half in halves:
                    device += count * half.device_s
                    host += count * half.host_s
                # each half contains the host overhead of a whole layer, experts have none
                host -= count * (len(halves) - 1) * self._empty_s(jobs[0])
            found = self._dense[ways.precision] = _Time(device, host)
        return found

    def _empty_s(self, job: StepJob) -> float:
        """Return the host overhead of a layer without communication, seconds."""
        empty = LayerTimes(
            (), CommunicationTime(), CommunicationTime(), CommunicationTime(), 0.0, held=None
        )
        return float(seconds_of_times(self._machine, job, empty)[1])

    def _priced(
        self,
        job: StepJob,
        parts: Sequence[KernelTime],
        size: int,
        held: F64 | None = None,
        **sends: CommunicationTime,
    ) -> _Time:
        """Return the time of kernels and communication for `size` shardings.

        held : experts per rank, None without experts.
        """
        tensor, context, experts = (
            sends.get(axis, CommunicationTime()) for axis in ("tensor", "context", "experts")
        )
        times = LayerTimes(
            parts=tuple(parts),
            tensor=tensor,
            context=context,
            experts=experts,
            weight_cast_s=0.0,
            held=held,
        )
        device, host = seconds_of_times(self._machine, job, times)
        return _Time(np.broadcast_to(device, size), np.broadcast_to(host, size))

    def _attention(self, jobs: Sequence[StepJob], block: Block) -> _Time:
        half = replace(block, mlp=None)
        assert half.attention is not None, "layers of launches have attention"
        device, host = np.empty(len(jobs)), np.empty(len(jobs))
        kinds = [(job.cp, job.heads_exchanged, job.keys_gathered) for job in jobs]
        for kind in {*kinds}:
            at = [place for place, one in enumerate(kinds) if one == kind]
            some = [jobs[place] for place in at]
            parts = tuple(layer_kernels(self._machine, some[0], half, _splits(some)))
            core = next(part for part in parts if part.module == "core_attn")
            rings = self._rings(some, half.attention, core)
            found = self._priced(
                some[0], parts, len(some), tensor=self._tensor(some, half.hidden), context=rings
            )
            device[at], host[at] = found
        return _Time(device, host)

    def _recurrent(self, jobs: Sequence[StepJob], block: Block, mixer: Recurrent) -> _Time:
        half = replace(block, mlp=None)
        parts = tuple(layer_kernels(self._machine, jobs[0], half, _splits(jobs)))
        sends = _stacked([recurrent_sends(self._machine, job, mixer) for job in jobs])
        tensor = self._tensor(jobs, half.hidden)
        return self._priced(jobs[0], parts, len(jobs), tensor=tensor, context=sends)

    def _rings(
        self, jobs: Sequence[StepJob], attention: Attention, core: KernelTime
    ) -> CommunicationTime:
        if jobs[0].cp == 1:
            return CommunicationTime()
        forward, backward = (
            np.broadcast_to(side, len(jobs)) for side in (core.forward_s, core.input_s)
        )
        return _stacked(
            [
                context_parallel_comm(
                    self._machine, job, attention, (float(forward[at]), float(backward[at]))
                )
                for at, job in enumerate(jobs)
            ]
        )

    def _mlp(self, jobs: Sequence[StepJob], half: Block) -> _Time:
        parts = tuple(layer_kernels(self._machine, jobs[0], half, _splits(jobs)))
        return self._priced(jobs[0], parts, len(jobs), tensor=self._tensor(jobs, half.hidden))

    def _tensor(self, jobs: Sequence[StepJob], hidden: int) -> CommunicationTime:
        found = []
        for job in jobs:
            key = (job.precision, job.tp, job.tokens, job.element_bytes, hidden)
            if key not in self._sends:
                self._sends[key] = tensor_parallel_comm(self._machine, job, hidden)
            found.append(self._sends[key])
        return _stacked(found)

    def _ends(self, jobs: Sequence[StepJob]) -> F64:
        """Return the device seconds of embedding, head, loss and MTP modules without layers."""
        seconds = np.zeros(len(jobs))
        for tp in {job.tp for job in jobs}:
            at = [place for place, job in enumerate(jobs) if job.tp == tp]
            job = jobs[at[0]]
            tokens = np.array([jobs[place].tokens for place in at])
            sends = np.array([head_sends_s(self._machine, jobs[place]) for place in at])
            embedding = _sum_s(embedding_times(self._machine, job, tokens))
            head = _sum_s(head_times(self._machine, job, tokens)) + sends
            seconds[at] = embedding + (1 + job.mtp) * head
            if job.mtp:
                sent = self._tensor([jobs[place] for place in at], job.blocks[-1].hidden)
                beside = _sum_s(mtp_times(self._machine, job, tokens)) + embedding
                seconds[at] += job.mtp * (beside + sent.forward_s + sent.backward_s)
        return seconds

    # ----------------------------------------------------------------------------------------------

    def _time_of_mixture(self, ways: ExpertDegrees, block: Block, at: I64) -> _Time:
        """Return the time of the MLP of an MoE layer, without the host overhead of a layer."""
        key = (ways, block)
        if key not in self._mixtures:
            self._price_mixtures(ways, block)
        found = self._mixtures[key]
        return _Time(found.device_s[at], found.host_s[at])

    def _price_mixtures(self, like: ExpertDegrees, block: Block) -> None:
        """Compute MoE layer times of all expert shardings of one precision and dispatcher."""
        mlp = block.mlp
        assert isinstance(mlp, Experts), "a mixture has experts"
        jobs = self._jobs_of(like)
        splits = _splits(jobs)
        # expert time depends on the tokens that a rank routes, not on the degrees behind them
        rows = np.stack([splits.routed, splits.outside], axis=1)
        unlike, place = np.unique(rows, axis=0, return_inverse=True)
        place = place.ravel()
        alike = [
            one
            for one in self._ways
            if (one.precision, one.dispatcher) == (like.precision, like.dispatcher)
        ]
        pairs = list(dict.fromkeys((one.ep, one.etp) for one in alike))
        ep, etp = (
            np.repeat(np.array(one, dtype=np.float64), len(unlike))
            for one in zip(*pairs, strict=True)
        )
        routed, outside = (np.tile(unlike[:, at], len(pairs)) for at in (0, 1))
        settings = self._base(replace(_settings(like), overlap_experts=False))
        # kernel formulas accept arrays of degrees, too
        many = replace(settings, ep=ep, etp=etp)  # type: ignore[arg-type]
        few = splits._replace(routed=routed, outside=outside, expert_tensor=etp)
        alone = Block(number=1, hidden=block.hidden, mlp=replace(mlp, shared_width=0))
        parts = tuple(layer_kernels(self._machine, many, alone, few))
        sends = [
            expert_sends(self._machine, _routing(settings, *pair, unlike[:, 0]), block.hidden, mlp)
            for pair in pairs
        ]
        joined = CommunicationTime(
            *(
                np.concatenate([np.broadcast_to(one[at], len(unlike)) for one in sends])
                for at in range(3)
            )  # type: ignore[arg-type]
        )
        shared = self._shared(like, block, mlp, jobs) if mlp.shared_width else None
        for overlap in {one.overlap for one in alike}:
            own = replace(settings, overlap_experts=overlap)
            found = self._priced(own, parts, len(routed), mlp.number / ep, experts=joined)
            for at, (ranks, splitting) in enumerate(pairs):
                rows_of = at * len(unlike) + place
                device = found.device_s[rows_of]
                host = found.host_s[rows_of] - self._empty_s(own)
                if shared is not None:
                    device, host = device + shared.device_s, host + shared.host_s
                ways = like._replace(ep=ranks, etp=splitting, overlap=overlap)
                self._mixtures[ways, block] = _Time(device, host)

    def _shared(
        self, ways: ExpertDegrees, block: Block, mlp: Experts, jobs: Sequence[StepJob]
    ) -> _Time:
        """Return the time of shared experts without their norm, which the MoE layer includes."""
        key = ("shared", ways.precision, block.hidden, mlp.shared_width, mlp.gated)
        found = self._mixtures.get(key)
        if found is None:
            dense = Block(
                number=1, hidden=block.hidden, mlp=Mlp(width=mlp.shared_width, gated=mlp.gated)
            )
            parts = layer_kernels(self._machine, jobs[0], dense, _splits(jobs))
            own = [part for part in parts if part.module == "mlp"]
            time = self._priced(jobs[0], own, len(jobs), tensor=self._tensor(jobs, block.hidden))
            found = _Time(time.device_s, time.host_s - self._empty_s(jobs[0]))
            self._mixtures[key] = found
        return found


def _settings(ways: ExpertDegrees) -> Candidate:
    return Candidate(
        precision=ways.precision, dispatcher=ways.dispatcher, overlap_experts=ways.overlap
    )


def _routing(job: StepJob, ep: int, etp: int, routed: F64) -> StepJob:
    """Return a job with tp 1 and cp 1; routed : routed tokens per rank, a number or an array."""
    return replace(job, ep=ep, etp=etp, tp=1, cp=1, micro_batch=1, seq=routed)  # type: ignore[arg-type]


def _sum_s(parts: Sequence[KernelTime]) -> F64:
    """Return forward and backward seconds of kernels."""
    return np.asarray(sum(part.forward_s + part.input_s + part.weight_s for part in parts))


def _splits(jobs: Sequence[StepJob]) -> RankShape:
    """Return the tensor shapes per rank of many jobs, as arrays over jobs."""
    found = zip(*map(split_of, jobs), strict=True)
    return RankShape(*(np.array(sizes, dtype=np.float64) for sizes in found))


def _stacked(sends: Sequence[CommunicationTime]) -> CommunicationTime:
    return CommunicationTime(*(np.array(one) for one in zip(*sends, strict=True)))  # type: ignore[arg-type]
