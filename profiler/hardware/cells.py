"""Which groups of ranks exist on a cluster, and the cells of a sweep over them.

A cell is one operation, in the groups of one size and kind, at one message size. Its groups are
arranged in rounds: those of a round work at the same time, as they do in training, and rounds
follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import OptionError
from profiler.hardware.options import HardwareOptions

__all__ = [
    "COLLECTIVES",
    "OVERLAPPED",
    "OVERLAP_SIZES_BYTES",
    "PIPELINE",
    "STRIDED",
    "Cell",
    "Cluster",
    "Group",
    "Round",
    "Scope",
    "check_world",
    "divisors",
    "plan_cells",
    "rounds",
]

Group = tuple[int, ...]
"""Ranks that take part in one operation, in their order inside it."""
Round = tuple[Group, ...]
"""Groups that work at the same time; no rank is in two of them."""
Scope = Literal["one device", "intra-node", "inter-node"]

COLLECTIVES = ("allreduce", "allgather", "reducescatter", "all2all")
STRIDED = frozenset({"allreduce"})
"""Collectives that are measured in strided groups too: the others are only priced there."""
PIPELINE = ("p2p", "p2p_bidirectional")
OVERLAPPED = ("allreduce", "allgather", "reducescatter")
OVERLAP_SIZES_BYTES = (8 << 20, 64 << 20, 256 << 20)
"""Message sizes of the overlap measurement; the documented peers use 64 MiB alone."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks of a run and the hosts they are on; every host has as many, in rank order."""

    hosts: tuple[str, ...]
    """Host name by rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def num_nodes(self) -> int:
        """Number of different hosts."""
        return len(set(self.hosts))

    @property
    def gpus_per_node(self) -> int:
        """Ranks on each host."""
        return self.world_size // self.num_nodes

    def scope(self, group: Group) -> Scope:
        """Return whether a group stays on a device, on a node, or crosses nodes."""
        if len(group) == 1:
            return "one device"
        return "intra-node" if len({self.hosts[rank] for rank in group}) == 1 else "inter-node"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One operation in the groups of one size and kind, at one message size."""

    operation: str
    """A row of the table of collectives, or `overlap_` and the name of one."""
    group_size: int
    """Ranks of a group; of `p2p` the pipeline stages."""
    consecutive: bool
    size_bytes: int
    rounds: tuple[Round, ...]
    scope: Scope

    @property
    def key(self) -> str:
        """Unique name of the cell in files and messages."""
        if self.operation in PIPELINE:
            return f"{self.operation}_stages_{self.group_size}_{self.size_bytes}B"
        kind = int(self.consecutive)
        return f"{self.operation}_size_{self.group_size}_consec_{kind}_{self.size_bytes}B"


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number above 1, increasing."""
    return tuple(d for d in range(2, number + 1) if number % d == 0)


def check_world(options: HardwareOptions, world: int) -> None:
    """Check what can only be checked once the number of ranks is known.

    Raises
    ------
    OptionError: a group size does not divide the world size, or nothing is left to measure.
    """
    for size in options.groups or ():
        if world % size:
            known = ", ".join(map(str, divisors(world)))
            remedy = f"choose from {known}" if known else "start more ranks"
            raise OptionError(
                f"--groups: the group size {size} does not divide the world size, "
                f"{world} = {world // size} * {size} + {world % size}; {remedy}"
            )
    if world == 1 and options.operations == ("p2p",):
        raise OptionError(
            "p2p sends from one rank to another and the world size is 1; "
            "start torchrun with --nproc-per-node 2 or more"
        )


def rounds(
    operation: str, group_size: int, consecutive: bool, world_size: int, isolated: bool
) -> tuple[Round, ...]:
    """Return the groups of a cell in the rounds they work in.

    Collectives: all groups at once. Transfers between stages: every second boundary at once, so
    that no rank sends and receives; a group is (sender, receiver). `isolated`: one at a time.
    """
    count = world_size // group_size
    found: tuple[Round, ...]
    if operation in PIPELINE:
        # stage s of pipeline i is rank i + s * W/p; count pipelines run side by side
        found = tuple(
            tuple(
                (i + s * count, i + (s + 1) * count)
                for s in range(first, group_size - 1, 2)
                for i in range(count)
            )
            # one round of even boundaries and one of odd ones; two stages have one boundary
            for first in range(min(2, group_size - 1))
        )
    elif consecutive:
        found = (tuple(tuple(range(i, i + group_size)) for i in range(0, world_size, group_size)),)
    else:
        found = (tuple(tuple(range(i, world_size, count)) for i in range(count)),)
    if isolated:
        return tuple((group,) for groups in found for group in groups)
    return found


def plan_cells(options: HardwareOptions, cluster: Cluster) -> tuple[Cell, ...]:
    """Return the cells of a run, in the order they are measured.

    What the documented files cannot do without comes first, so that a run that ends early has
    left usable files.
    """
    world = cluster.world_size
    sizes = options.groups if options.groups is not None else divisors(world)
    swept = options.sizes_bytes
    if world == 1:
        # nobody to communicate with: that every operation works is all that can be seen
        sizes, swept = (1,), (options.reference_bytes,)
    plan: list[tuple[str, int, bool, Sequence[int]]] = []
    for operation in COLLECTIVES:
        if operation not in options.operations:
            continue
        for group_size in sorted(sizes, reverse=True):
            plan.append((operation, group_size, True, swept))
            # a group of all ranks is the same ranks at any stride
            if operation in STRIDED and 1 < group_size < world:
                plan.append((operation, group_size, False, swept))
    if "p2p" in options.operations and world > 1:
        for stages in sorted(sizes):
            plan.append(("p2p", stages, True, swept))
            # no document has a key for it: one size shows what both directions cost
            plan.append(("p2p_bidirectional", stages, True, (options.reference_bytes,)))
    if "overlap" in options.operations:
        # large, since caches hold small messages
        plan.append(("memcopy", 1, True, (max(options.reference_bytes, 64 << 20),)))
        # sizes of its own: a machine where even the smallest does not fit is left out with a reason
        largest = max(options.sizes_bytes[-1], OVERLAP_SIZES_BYTES[0])
        chosen = [size for size in OVERLAP_SIZES_BYTES if size <= largest]
        # alone, one copy stands in for all of them
        names = OVERLAPPED if world > 1 else OVERLAPPED[:1]
        plan += [(f"overlap_{name}", world, True, chosen) for name in names]

    def waits(cell: Cell) -> bool:
        # the one size that documented peers use: overlap_coe needs it
        overlap = cell.operation == "overlap_allreduce" and cell.size_bytes == 64 << 20
        return cell.size_bytes != options.reference_bytes and not overlap

    cells = [
        _cell(operation, group_size, consecutive, size, cluster, options.isolated)
        for operation, group_size, consecutive, of_operation in plan
        for size in of_operation
    ]
    # sorting is stable, so that both halves keep the order of the plan
    return tuple(sorted(cells, key=waits))


def _cell(
    operation: str,
    group_size: int,
    consecutive: bool,
    size_bytes: int,
    cluster: Cluster,
    isolated: bool,
) -> Cell:
    arranged = rounds(operation, group_size, consecutive, cluster.world_size, isolated)
    scopes = {cluster.scope(group) for groups in arranged for group in groups}
    # one group that crosses nodes makes it a cell of the network
    order: tuple[Scope, ...] = ("inter-node", "intra-node", "one device")
    return Cell(
        operation=operation,
        group_size=group_size,
        consecutive=consecutive,
        size_bytes=size_bytes,
        rounds=arranged,
        scope=next((scope for scope in order if scope in scopes), "one device"),
    )
