"""Measurement of one hardware cell on all ranks: repetitions, statistics and checks.

All groups of a round run concurrently. The time of a group is that of its slowest rank, and the
time of the cell is that of its slowest group, for which a training step would wait. Repetitions
continue until the median is precise or the time limit is reached. All ranks gather all times, so
they decide alike without another message.
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
from profiler.progress import Watch

# --------------------------------------------------------------------------------------------------
# From group times to the measurement of a cell: slowest group and stragglers.


STRAGGLER_RATIO = 1.5
"""Smallest ratio of a group's median time to that of all groups for its ranks to be stragglers."""


def identity(cell: Cell) -> dict[str, Any]:
    """Return the fields of a measurement that identify its cell."""
    return {
        "key": cell.key,
        "operation": cell.operation,
        "group_size": cell.group_size,
        "consecutive": cell.consecutive,
        "size_bytes": float(cell.size_bytes),
        "scope": cell.scope,
    }


def unmeasured(cell: Cell, status: Literal["failed", "skipped"], reason: str) -> Measurement:
    """Return a measurement of a cell without samples: failed or skipped, with the reason."""
    return Measurement(**identity(cell), status=status, reason=reason)


def stragglers(
    groups: Sequence[Group], medians_s: NDArray[np.float64], hosts: Sequence[str]
) -> list[Straggler]:
    """Return the ranks whose fastest group exceeds `STRAGGLER_RATIO` times the median time.

    Ranks of a group wait for each other, so a slow rank can only be found by its groups. With two
    groups, the faster one is the reference.
    """
    if len(groups) < 2:
        return []
    # The median of two groups is their mean, to which the slower one would look normal.
    normal_s = float(np.median(medians_s) if len(groups) > 2 else medians_s.min())
    ratios: dict[int, list[float]] = {}
    for group, median_s in zip(groups, medians_s, strict=True):
        for rank in group:
            ratios.setdefault(rank, []).append(float(median_s) / normal_s)
    return [
        Straggler(rank=rank, host=hosts[rank], ratio=max(of_rank))
        for rank, of_rank in sorted(ratios.items())
        # A rank that is fast in another group is not the cause of its slow group.
        if min(of_rank) > STRAGGLER_RATIO
    ]


class GroupTimes(Record):
    """Repetition times of one group."""

    group: Group
    samples_s: NDArray[np.float64]
    """Seconds per operation on the slowest rank, by repetition."""
    loops: int
    """Operations per repetition."""


def combined(
    cell: Cell, found: Sequence[GroupTimes], hosts: Sequence[str], *, checked: bool
) -> Measurement:
    """Return the measurement of a cell with samples of the slowest group and all medians.

    checked : True if results were verified.
    """
    # Sorted by rank, not by round, so that all files list groups in one order.
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
# Measurement of a cell: its operation is checked and timed.


OVERLAP_PREFIX = "overlap_"
"""Prefix of operations that measure a collective concurrently with GEMMs."""
_OVERLAP_TRIES = 2
"""Measurements of an overlap cell before it counts as failed: other processes may have disturbed
the first."""
_MISJUDGED = 4
"""Smallest number of loops, estimated from the first samples, that discards these samples. The
warm-up was then slow only because NCCL connected, and single operations are too short to time."""


class Driver:
    """Driver that measures cells on this rank, in step with those of all other ranks."""

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
        """Error by (operation, group size, consecutive, round); '' if the result was correct."""
        self._overlap_group: object | None = None

    @property
    def device_type(self) -> str:
        """Device type, `cuda` or `cpu`."""
        return str(self._session.device.type)

    def fits(self, cell: Cell) -> bool:
        """Return True if every rank has the memory for the buffers of a cell."""
        return self._needed_bytes(cell) <= self._free_bytes

    def _needed_bytes(self, cell: Cell) -> int:
        row = COLLECTIVES[cell.operation.removeprefix(OVERLAP_PREFIX)]
        return row.tensor_bytes(cell.size_bytes, cell.group_size)

    def measure(self, cell: Cell) -> Measurement:
        """Return the measurement of a cell, equal on all ranks."""
        row = COLLECTIVES[cell.operation.removeprefix(OVERLAP_PREFIX)]
        self._watch.step(cell.key)
        if not self.fits(cell):
            return unmeasured(
                cell,
                "skipped",
                f"buffers need {format_bytes(self._needed_bytes(cell))} on a "
                f"rank, but {format_bytes(self._free_bytes)} are free",
            )
        overlaps = cell.operation.startswith(OVERLAP_PREFIX)
        return self.timed(lambda: (self._overlap if overlaps else self._collective)(cell, row))

    def timed(self, measure: Callable[[], Measurement]) -> Measurement:
        """Run `measure`, release cached memory, and return the result with rank 0's elapsed
        time."""
        begun_s = time.perf_counter()
        found = measure()
        self._session.release_memory()
        # Later decisions may depend on this value, so all ranks use that of rank 0.
        elapsed_s = float(self._session.gather([time.perf_counter() - begun_s])[0, 0])
        return replace(found, elapsed_s=elapsed_s)

    def _collective(self, cell: Cell, row: Collective) -> Measurement:
        found: list[GroupTimes] = []
        for number, groups_at_once in enumerate(cell.rounds):
            buffers, member = self._prepare(cell, row, groups_at_once)
            # Checked before timing: the speed of a wrong operation is meaningless.
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
        """Return this rank's (buffers, member) in a round; (None, None) if it is in no group."""
        session = self._session
        alone = row.name == "memcopy"
        # A memory copy has no group to connect.
        if not alone:
            session.join(groups_at_once)
        mine = next((group for group in groups_at_once if session.rank in group), None)
        # A rank outside of the round still takes part in every barrier and gather.
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
        """Return the error of a checked execution, or ''; checked once per operation and group.

        number : index of the round. All ranks return an equal result.
        """
        if not self._check:
            return ""
        kind = (cell.operation, cell.group_size, cell.consecutive, number)
        if kind not in self._checked:
            session = self._session
            self._watch.step(f"the check of {cell.key}")
            found = row.check(buffers, member) if buffers and member else None
            # Only ranks of the round know the result, and all must agree on it.
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
        """Return seconds per operation, shape (world, repetitions), and loops per repetition."""

        def operation() -> None:
            assert buffers is not None
            assert member is not None
            row.run(buffers, member)

        session, policy = self._session, self._policy
        # Other ranks report 0 s, which must not count as a fast operation.
        members = [rank for group in groups_at_once for rank in group]

        def block(loops: int, count: int, since_s: float) -> tuple[NDArray[np.float64], float]:
            """Return seconds per operation (world, count), and rank 0's seconds since `since_s`."""
            repetition = self._timer.bind(operation, loops) if member is not None else None
            own = []
            for _ in range(count):
                self._watch.step(cell.key)
                # Before the barrier, so that filling buffers is not timed.
                if buffers is not None and member is not None:
                    row.prepare(buffers, member, loops)
                session.barrier()
                own.append(repetition() if repetition is not None else 0.0)
            self._watch.step(cell.key)
            # One clock decides for all ranks.
            found = session.gather([*own, time.perf_counter() - since_s])
            return found[:, :-1], float(found[0, -1])

        now_s = time.perf_counter()
        # The first use connects and faults pages in, so it is an upper bound of the operation time.
        found, _ = block(1, 1, now_s)
        # The block above already ran one warm-up.
        further = warmups(float(found[members].max()), policy) - 1
        if further > 0:
            found, _ = block(1, further, now_s)
        # The slowest rank determines the duration of an operation.
        loops = choose_loops(float(np.median(found[members].max(axis=0))), policy)

        collected = np.zeros((session.world_size, 0))
        begun_s, spent_s = time.perf_counter(), 0.0
        while count := next_block(self._worst(collected, groups_at_once), spent_s, policy):
            found, spent_s = block(loops, count, begun_s)
            if loops == 1 and collected.size == 0:
                seen = choose_loops(float(np.median(found[members].max(axis=0))), policy)
                # These samples are single operations, too short for the clock, and are discarded.
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
        # The slowest group is the value of the cell, so its interval decides when to stop.
        of_groups = [times_s[list(group)].max(axis=0) for group in groups_at_once]
        worst = max(of_groups, key=lambda samples: float(np.median(samples)))
        return [float(v) for v in worst]

    def _overlap(self, cell: Cell, row: Collective) -> Measurement:
        session = self._session
        emulated = session.world_size == 1
        # A single rank cannot communicate: a copy uses memory bandwidth in its place.
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

        for _ in range(_OVERLAP_TRIES):
            found = local_overlap(
                lambda: row.run(buffers, member),
                session.device,
                dtype=session.dtype,
                agree=agree,
                repetitions=self._policy.iters,
                max_seconds=self._policy.max_seconds,
                prepare=lambda number: row.prepare(buffers, member, number),
                most=buffers.limit,
            )
            # All ranks agree on the verdict.
            if found.overlapped:
                break
        if not found.overlapped:
            # All ranks share the verdict, but not always its wording.
            reason = session.share(
                f"overlap/{cell.key}", found.reason if not session.rank else None
            )
            return unmeasured(cell, "failed", reason)
        own = max(slowdowns(found.samples_s).compute, slowdowns(found.samples_s).communication)
        # overlap_coe is the largest slowdown of all ranks: that rank provides the samples.
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
