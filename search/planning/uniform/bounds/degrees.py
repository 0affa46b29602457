"""Vectorised lower bounds of micro-batch time for all combinations of degrees.

Thousands of combinations consist of a few hundred attention shardings and as many expert
shardings. The time of each sharding is computed once by the formulas of `autopar.rates.layer`, and
the time of a combination is the sum of both. Step times and memory of single candidates are
computed in `search.planning.uniform.cost_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from autopar.arrays import F64, I64
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
from autopar.run.job import Block, Job as StepJob, halves
from autopar.run.strategy import ContextKind
from search.engines.candidate import Candidate, Dispatcher, Precision
from search.planning.uniform.bounds.layer_times import SublayerTimes

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


class ByWord(Protocol):
    """Function that returns the seconds of a part of a layer by recomputation policy."""

    def __call__(self, job: StepJob, times: LayerTimes, size: tuple[int, ...]) -> SublayerTimes: ...


class _DenseTimes(NamedTuple):
    """Times of all but experts for one precision; the last axis is that of attention shardings."""

    device_s: F64
    host_s: F64
    """Seconds of the whole model without recomputation, shape [n]."""
    ends_s: F64
    """Device seconds of embedding, head, loss and MTP modules without layers, shape [n]."""
    layers: dict[Block, SublayerTimes]
    """Times of one layer of each type without its experts, shape [policies + 2, n]."""


class _MixtureTimes(NamedTuple):
    """Times of the experts of a layer for one expert sharding."""

    times: SublayerTimes
    """Shape [policies + 2, m], with one column per number of routed tokens."""
    place: I64
    """Column of each attention sharding, shape [n]."""
    shared: SublayerTimes | None
    """Times of shared experts by attention sharding; None without them."""


class ModelTimeBounds:
    """Lower bounds of micro-batch seconds, by attention and expert sharding.

    They hold with and without TP overlap.
    """

    def __init__(
        self,
        machine: Machine,
        laid: Sequence[AttentionDegrees],
        ways: Sequence[ExpertDegrees],
        base: Callable[[Candidate], StepJob],
        by_word: ByWord,
        number: dict[Block, int],
    ) -> None:
        """Store all attention shardings `laid` and expert shardings `ways`.

        base : returns the step job of a candidate on one data-parallel rank.
        by_word : `UniformCostModel.by_word`
        number : number of layers of each type in the model
        """
        self._machine = machine
        self._laid = tuple(laid)
        self._ways = tuple(ways)
        self._base = base
        self._by_word = by_word
        self._number = number
        self._jobs: dict[object, list[StepJob]] = {}
        self._dense: dict[object, _DenseTimes] = {}
        self._mixtures: dict[object, _MixtureTimes] = {}
        self._shared: dict[object, SublayerTimes] = {}
        self._sends: dict[object, CommunicationTime] = {}

    def seconds(self, ways: ExpertDegrees, at: I64) -> F64:
        """Return lower bounds of whole-model micro-batch seconds for one expert sharding.

        at : indices of attention shardings, one per result
        """
        dense = self._dense_of(ways)
        device, host = dense.device_s[at], dense.host_s[at]
        for block, count in self._number.items():
            if isinstance(block.mlp, Experts):
                times, place, shared = self._mixture(ways, block)
                device = device + count * times.device_s[-2, place[at]]
                host = host + count * times.host_s[-2, place[at]]
                if shared is not None:
                    device += count * shared.device_s[-2, at]
                    host += count * shared.host_s[-2, at]
        return np.asarray(host_device_time_s(device, host)) * _ROUNDING

    def ends_s(self, ways: ExpertDegrees, at: I64) -> F64:
        """Return the device seconds of embedding, head, loss and MTP modules without layers."""
        return self._dense_of(ways).ends_s[at]

    def layer(self, ways: ExpertDegrees, block: Block, at: I64) -> SublayerTimes:
        """Return lower bounds of the seconds of one layer, shape [policies + 2, indices].

        at : indices of attention shardings
        """
        parts = []
        dense = self._dense_of(ways).layers.get(block)
        if dense is not None:
            parts.append(_columns(dense, at))
        if isinstance(block.mlp, Experts):
            times, place, shared = self._mixture(ways, block)
            parts.append(_columns(times, place[at]))
            if shared is not None:
                parts.append(_columns(shared, at))
        return _total(parts)

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

    def _dense_of(self, ways: ExpertDegrees) -> _DenseTimes:
        """Return the times of attention, dense MLPs, embedding, head and MTP modules."""
        found = self._dense.get(ways.precision)
        if found is None:
            jobs = self._jobs_of(ways)
            ends = self._ends(jobs)
            device, host, layers = ends.copy(), np.zeros(len(jobs)), {}
            for block, count in self._number.items():
                timed = []
                if block.attention is not None:
                    timed.append(self._attention(jobs, halves(block)[0]))
                elif block.recurrent is not None:
                    timed.append(self._recurrent(jobs, halves(block)[0], block.recurrent))
                if isinstance(block.mlp, Mlp):
                    timed.append(self._mlp(jobs, halves(block)[1]))
                if not timed:
                    continue
                # each half contains the host overhead of a whole layer, experts have none
                layer = layers[block] = _total(timed, (len(timed) - 1) * self._empty_s(jobs[0]))
                device += count * layer.device_s[-2]
                host += count * layer.host_s[-2]
            found = self._dense[ways.precision] = _DenseTimes(device, host, ends, layers)
        return found

    def _empty_s(self, job: StepJob) -> F64:
        """Return the host overhead of a layer without communication, shape [policies + 2, 1]."""
        return self._priced(job, (), 1).host_s

    def _priced(
        self,
        job: StepJob,
        parts: Sequence[KernelTime],
        size: int,
        held: F64 | None = None,
        **sends: CommunicationTime,
    ) -> SublayerTimes:
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
        found = self._by_word(job, times, (size,))
        return found._replace(forward_s=np.broadcast_to(found.forward_s, size))

    def _attention(self, jobs: Sequence[StepJob], half: Block) -> SublayerTimes:
        assert half.attention is not None, "layers of launches have attention"
        every, order = [], []
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
            every.append(found)
            order += at
        device, host, forward, _ = zip(*every, strict=True)
        joined = SublayerTimes(
            np.concatenate(device, axis=1),
            np.concatenate(host, axis=1),
            np.concatenate(forward),
            0.0,
        )
        return _columns(joined, np.argsort(order))

    def _recurrent(self, jobs: Sequence[StepJob], half: Block, mixer: Recurrent) -> SublayerTimes:
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

    def _mlp(self, jobs: Sequence[StepJob], half: Block) -> SublayerTimes:
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

    def _mixture(self, ways: ExpertDegrees, block: Block) -> _MixtureTimes:
        """Return the time of the MLP of an MoE layer, without the host overhead of a layer."""
        key = (ways, block)
        if key not in self._mixtures:
            self._price_mixtures(ways, block)
        return self._mixtures[key]

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
        alone = replace(halves(block)[1], number=1, mlp=replace(mlp, shared_width=0))
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
        shared = self._of_shared(like, block, mlp, jobs) if mlp.shared_width else None
        for overlap in {one.overlap for one in alike}:
            own = replace(settings, overlap_experts=overlap)
            found = self._priced(own, parts, len(routed), mlp.number / ep, experts=joined)
            found = found._replace(host_s=found.host_s - self._empty_s(own))
            for at, (ranks, splitting) in enumerate(pairs):
                ways = like._replace(ep=ranks, etp=splitting, overlap=overlap)
                columns = at * len(unlike) + np.arange(len(unlike))
                self._mixtures[ways, block] = _MixtureTimes(_columns(found, columns), place, shared)

    def _of_shared(
        self, ways: ExpertDegrees, block: Block, mlp: Experts, jobs: Sequence[StepJob]
    ) -> SublayerTimes:
        """Return the time of shared experts without their norm, which the MoE layer includes."""
        key = (ways.precision, block.hidden, mlp.shared_width, mlp.gated)
        found = self._shared.get(key)
        if found is None:
            dense = Block(
                number=1, hidden=block.hidden, mlp=Mlp(width=mlp.shared_width, gated=mlp.gated)
            )
            parts = layer_kernels(self._machine, jobs[0], dense, _splits(jobs))
            own = [part._replace(module="shared_experts") for part in parts if part.module == "mlp"]
            time = self._priced(jobs[0], own, len(jobs), tensor=self._tensor(jobs, block.hidden))
            found = time._replace(host_s=time.host_s - self._empty_s(jobs[0]))
            self._shared[key] = found
        return found


def _columns(times: SublayerTimes, at: I64) -> SublayerTimes:
    """Return the times of some shardings; `experts_s` is dropped."""
    forward = np.asarray(times.forward_s)
    return SublayerTimes(times.device_s[:, at], times.host_s[:, at], forward[at], 0.0)


def _total(parts: Sequence[SublayerTimes], less_host_s: F64 | float = 0.0) -> SublayerTimes:
    """Return the sum of parts of a layer; less_host_s : host seconds that are counted twice."""
    device, host, forward, _ = (np.sum(field, axis=0) for field in zip(*parts, strict=True))
    return SublayerTimes(device, host - less_host_s, forward, 0.0)


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
