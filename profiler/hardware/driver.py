"""Measures one cell: the only place that knows when something is timed, and on which ranks.

All groups of a round work at the same time. The slowest rank of a group is its time, since an
operation is over when everybody has the result; the slowest group is the value of the cell, since
a training step waits for it. Repetitions go on until the median is certain or the time is spent;
every rank sees all times, so all take the same decision without another message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.documents.sidecar import Measurement, Straggler
from autopar.records import Record, replace
from autopar.units import format_bytes
from profiler.hardware.collectives import COLLECTIVES, Buffers, Collective, Member
from profiler.hardware.options import Cell, Group, Round
from profiler.hardware.overlap import local_overlap, slowdowns
from profiler.measure import Policy, Timer, choose_loops, next_block, warmups
from profiler.processes import Session
from profiler.watch import Watch

# --------------------------------------------------------------------------------------------------
# From the times of groups to the measurement of a cell: who counts, and who is slow.


STRAGGLER_RATIO = 1.5
"""A group whose median is so much above the median group's is slow, and its ranks are named."""


def identity(cell: Cell) -> dict[str, Any]:
    """Return the fields of a measurement that say which cell it is of."""
    return {
        "key": cell.key,
        "operation": cell.operation,
        "group_size": cell.group_size,
        "consecutive": cell.consecutive,
        "size_bytes": float(cell.size_bytes),
        "scope": cell.scope,
    }


def unmeasured(cell: Cell, status: Literal["failed", "skipped"], reason: str) -> Measurement:
    """Return the measurement of a cell that gave no samples, with the reason in words."""
    return Measurement(**identity(cell), status=status, reason=reason)


def stragglers(
    groups: Sequence[Group], medians_s: NDArray[np.float64], hosts: Sequence[str]
) -> list[Straggler]:
    """Return the ranks that are only in groups much slower than the others.

    Ranks of one group wait for each other, so that a group is what can be slow; of two groups the
    quicker one is taken for normal.
    """
    if len(groups) < 2:
        return []
    # the median of two is their mean, beside which the slower one looks normal
    normal_s = float(np.median(medians_s) if len(groups) > 2 else medians_s.min())
    ratios: dict[int, list[float]] = {}
    for group, median_s in zip(groups, medians_s, strict=True):
        for rank in group:
            ratios.setdefault(rank, []).append(float(median_s) / normal_s)
    return [
        Straggler(rank=rank, host=hosts[rank], ratio=max(of_rank))
        for rank, of_rank in sorted(ratios.items())
        # a rank that is quick in another group is not what makes its slow group slow
        if min(of_rank) > STRAGGLER_RATIO
    ]


class GroupTimes(Record):
    """What the repetitions of one group took."""

    group: Group
    samples_s: NDArray[np.float64]
    """Seconds of one operation on the slowest rank, by repetition."""
    loops: int
    """Operations in a repetition; rounds decide for themselves."""


def combined(
    cell: Cell, found: Sequence[GroupTimes], hosts: Sequence[str], *, checked: bool
) -> Measurement:
    """Return the measurement of a cell: the samples of the slowest group, and what all took."""
    # by rank and not by round, so that files list groups in one order
    ordered = sorted(found, key=lambda times: times.group)
    medians = np.array([np.median(times.samples_s) for times in ordered])
    worst = ordered[int(medians.argmax())]
    return Measurement(
        **identity(cell),
        status="ok",
        samples_s={"time": [float(v) for v in worst.samples_s]},
        loops=worst.loops,
        worst_group=list(worst.group),
        group_medians_s=[float(v) for v in medians],
        stragglers=stragglers([times.group for times in ordered], medians, hosts),
        checked=checked,
    )


# --------------------------------------------------------------------------------------------------
# The measurement of a cell: its operation is bound, timed and checked.


OVERLAP_PREFIX = "overlap_"
"""Cells that measure a collective while GEMMs run."""
_MISJUDGED = 4
"""Loops that the first timed repetitions ask for when the warm-up was slow only because NCCL
connected for an algorithm that it had not used yet; they are taken again."""


class Driver:
    """Measures cells on this rank together with the same object on all others."""

    def __init__(
        self,
        session: Session,
        watch: Watch,
        policy: Policy,
        *,
        check: bool = True,
        cuda_graph: bool = False,
    ) -> None:
        self._session = session
        self._watch = watch
        self._policy = policy
        self._check = check
        self._timer: Timer = session.timer(cuda_graph)
        self._free_bytes = session.free_bytes()
        self._checked: dict[tuple[str, int, bool, int], str] = {}
        """What was wrong with a checked operation, '' if nothing was."""
        self._overlap_group: object | None = None

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return str(self._session.device.type)

    def fits(self, cell: Cell) -> bool:
        """Return whether every rank has the memory for the buffers of a cell."""
        return self._needed_bytes(cell) <= self._free_bytes

    def _needed_bytes(self, cell: Cell) -> int:
        row = COLLECTIVES[cell.operation.removeprefix(OVERLAP_PREFIX)]
        return row.tensor_bytes(cell.size_bytes, cell.group_size)

    def measure(self, cell: Cell) -> Measurement:
        """Return the measurement of a cell, the same on every rank."""
        row = COLLECTIVES[cell.operation.removeprefix(OVERLAP_PREFIX)]
        self._watch.step(cell.key)
        if not self.fits(cell):
            return unmeasured(
                cell,
                "skipped",
                f"its buffers take {format_bytes(self._needed_bytes(cell))} on a rank, "
                f"{format_bytes(self._free_bytes)} are free",
            )
        overlaps = cell.operation.startswith(OVERLAP_PREFIX)
        return self.timed(lambda: (self._overlap if overlaps else self._collective)(cell, row))

    def timed(self, measure: Callable[[], Measurement]) -> Measurement:
        """Return what `measure` returns, with the seconds that it took, and free its memory."""
        begun_s = time.perf_counter()
        found = measure()
        self._session.release_memory()
        # a decision of later cells may rest on this figure: it is rank 0's for everyone
        elapsed_s = float(self._session.gather([time.perf_counter() - begun_s])[0, 0])
        return replace(found, elapsed_s=elapsed_s)

    def _collective(self, cell: Cell, row: Collective) -> Measurement:
        found: list[GroupTimes] = []
        for number, groups_at_once in enumerate(cell.rounds):
            buffers, member = self._prepare(cell, row, groups_at_once)
            # before anything is timed: the speed of a wrong operation says nothing
            wrong = self._verify(cell, row, number, buffers, member)
            if wrong:
                return unmeasured(cell, "failed", wrong)
            times_s, loops = self._repeat(cell, row, buffers, member, groups_at_once)
            for group in groups_at_once:
                samples_s = times_s[list(group)].max(axis=0)
                found.append(GroupTimes(group=group, samples_s=samples_s, loops=loops))
        return combined(cell, found, self._session.cluster.hosts, checked=self._check)

    def _prepare(
        self, cell: Cell, row: Collective, groups_at_once: Round
    ) -> tuple[Buffers | None, Member | None]:
        """Return this rank's buffers and place in a round, None if it only watches."""
        session = self._session
        alone = row.name == "memcopy"
        # a copy has no group to connect
        if not alone:
            session.join(groups_at_once)
        mine = next((group for group in groups_at_once if session.rank in group), None)
        # a rank outside of the round still takes part in every barrier and gather
        if mine is None:
            return None, None
        member = Member(
            ranks=mine,
            rank=session.rank,
            group=None if alone else session.group(mine),
            size_bytes=cell.size_bytes,
            dtype=session.dtype,
            device=session.device,
        )
        return row.make(member), member

    def _verify(
        self,
        cell: Cell,
        row: Collective,
        number: int,
        buffers: Buffers | None,
        member: Member | None,
    ) -> str:
        """Compare the result once in every round of a kind of group; return what is wrong."""
        if not self._check:
            return ""
        kind = (cell.operation, cell.group_size, cell.consecutive, number)
        if kind not in self._checked:
            session = self._session
            self._watch.step(f"the check of {cell.key}")
            found = row.check(buffers, member) if buffers and member else None
            # only ranks of the round know, and all must take the same way on
            flags = session.gather([0.0 if found is None else 1.0])[:, 0]
            wrong = ""
            if flags.any():
                speaker = int(flags.argmax())
                said = session.share(
                    f"check/{cell.key}/{number}", found if session.rank == speaker else None
                )
                wrong = f"the result is wrong on host {session.cluster.hosts[speaker]}: {said}"
            self._checked[kind] = wrong
        return self._checked[kind]

    def _repeat(
        self,
        cell: Cell,
        row: Collective,
        buffers: Buffers | None,
        member: Member | None,
        groups_at_once: Round,
    ) -> tuple[NDArray[np.float64], int]:
        """Return seconds per operation, shape (world, repetitions), and the loops of one."""

        def operation() -> None:
            assert buffers is not None
            assert member is not None
            row.run(buffers, member)

        session, policy = self._session, self._policy
        # others report 0 s, which is no fast operation
        members = [rank for group in groups_at_once for rank in group]

        def block(loops: int, count: int, since_s: float) -> tuple[NDArray[np.float64], float]:
            """Return seconds per operation (world, count), and rank 0's seconds since then."""
            repetition = self._timer.bind(operation, loops) if member is not None else None
            own = []
            for _ in range(count):
                self._watch.step(cell.key)
                # before the barrier, so that filling buffers is in nobody's time
                if buffers is not None and member is not None:
                    row.prepare(buffers, member, loops)
                session.barrier()
                own.append(repetition() if repetition is not None else 0.0)
            self._watch.step(cell.key)
            # one clock decides for everyone
            found = session.gather([*own, time.perf_counter() - since_s])
            return found[:, :-1], float(found[0, -1])

        now_s = time.perf_counter()
        # the first use connects and faults pages in: an upper bound, unless it was slow anyway
        found, _ = block(1, 1, now_s)
        # the block above was one of them
        further = warmups(float(found[members].max()), policy) - 1
        if further > 0:
            found, _ = block(1, further, now_s)
        # the slowest rank decides how long an operation takes
        loops = choose_loops(float(np.median(found[members].max(axis=0))), policy)

        collected = np.zeros((session.world_size, 0))
        begun_s, spent_s = time.perf_counter(), 0.0
        while count := next_block(self._worst(collected, groups_at_once), spent_s, policy):
            found, spent_s = block(loops, count, begun_s)
            if loops == 1 and collected.size == 0:
                seen = choose_loops(float(np.median(found[members].max(axis=0))), policy)
                # these samples are single operations, too short for the clock: they do not count
                if seen >= _MISJUDGED:
                    loops = seen
                    continue
            collected = np.hstack([collected, found])
        return collected, loops

    @staticmethod
    def _worst(times_s: NDArray[np.float64], groups_at_once: Round) -> Sequence[float]:
        """Return the samples of the group with the largest median."""
        if times_s.shape[1] == 0:
            return []
        # the slowest group is the cell's value, so its interval says when to stop
        of_groups = [times_s[list(group)].max(axis=0) for group in groups_at_once]
        worst = max(of_groups, key=lambda samples: float(np.median(samples)))
        return [float(v) for v in worst]

    def _overlap(self, cell: Cell, row: Collective) -> Measurement:
        session = self._session
        emulated = session.world_size == 1
        # nobody to communicate with: a copy takes memory bandwidth as communication does
        if emulated:
            row = COLLECTIVES["memcopy"]
        elif self._overlap_group is None:
            self._overlap_group = session.separate_group()
        member = Member(
            ranks=tuple(range(session.world_size)),
            rank=session.rank,
            group=self._overlap_group,
            size_bytes=cell.size_bytes,
            dtype=session.dtype,
            device=session.device,
        )
        buffers = row.make(member)

        def agree(value: float) -> float:
            self._watch.step(cell.key)
            return session.largest(value)

        found = local_overlap(
            lambda: row.run(buffers, member),
            session.device,
            dtype=session.dtype,
            agree=agree,
            repetitions=self._policy.iters,
            max_seconds=self._policy.max_seconds,
        )
        if not found.overlapped:
            # the reason is the verdict of all ranks, but not always in the same words
            reason = session.share(
                f"overlap/{cell.key}", found.reason if not session.rank else None
            )
            return unmeasured(cell, "failed", reason)
        own = max(slowdowns(found.samples_s).compute, slowdowns(found.samples_s).communication)
        # overlap_coe is the largest slow-down of all: the rank that has it gives the samples
        slowest = int(session.gather([own]).argmax())
        said = session.share(
            f"overlap/{cell.key}",
            json.dumps(found.samples_s) if session.rank == slowest else None,
        )
        return Measurement(
            **identity(cell),
            status="ok",
            samples_s=json.loads(said),
            worst_group=[slowest],
            emulated=emulated,
        )
