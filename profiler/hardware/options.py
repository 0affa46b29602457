"""Options of `torchrun -m profiler.hardware`, and the cells that they request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from autopar.command.fields import make, option, read_given, validate
from autopar.documents.catalog import HARDWARE_FOLDER
from autopar.errors import OptionError, did_you_mean
from autopar.rates.measured import COLLECTIVES
from autopar.records import Record, replace, shorten
from autopar.units import GIB, KIB, MIB, divisors
from profiler.options import FILES, HOW, MACHINE, MAX_RANKS, WHAT, RankOptions, check_out

# --------------------------------------------------------------------------------------------------
# Options as one validated value.


OPERATIONS = ("allreduce", "p2p", "all2all", "allgather", "reducescatter", "overlap")
"""Operations that can be requested by name; `all` requests all of them."""
MAX_BYTES = 1 << 40
"""Maximum message size, bytes."""
_ELEMENT_BYTES = 4
"""Size of the largest element type, bytes; every message size is a multiple of it."""
_UNITS = {"": 1, "B": 1, "K": KIB, "M": MIB, "G": GIB}
_SIZE = re.compile(r"([0-9]{1,15})\s*(?:([KMG])(?:iB)?|B)?", re.IGNORECASE | re.ASCII)
_FACTOR = re.compile(r"[x*]([0-9]{1,6})", re.IGNORECASE | re.ASCII)


def parse_operations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the requested operations without duplicates, in table order.

    No name, or `all`, requests all operations; `all_reduce` and `all-reduce` mean `allreduce`.
    """
    found: set[str] = set()
    for name in names:
        plain = re.sub("[-_]", "", name).lower()
        if plain == "all":
            found |= set(OPERATIONS)
        elif plain in OPERATIONS:
            found.add(plain)
        else:
            hint = did_you_mean(plain, OPERATIONS)
            raise OptionError(
                f"unknown operation {shorten(name)}, expected {', '.join(OPERATIONS)} or all",
                remedy=hint,
            )
    return tuple(name for name in OPERATIONS if name in found or not found)


def parse_size(text: str, option: str = "--sizes") -> int:
    """Return the bytes of a size such as 64K, 32MiB or 4096; K, M and G are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"{option}: {shorten(text)} is not a size",
            remedy="Use 64K, 32M, 1G (powers of 1024) or bytes",
        )
    size = int(match[1]) * _UNITS[(match[2] or "").upper()]
    if not 0 < size <= MAX_BYTES:
        raise OptionError(
            f"{option}: {shorten(text)} is {size} bytes, expected 1 to {MAX_BYTES} (1024G)"
        )
    if size % _ELEMENT_BYTES:
        raise OptionError(
            f"{option}: {shorten(text)} is not a whole number of elements, {size} = "
            f"{size // _ELEMENT_BYTES} * {_ELEMENT_BYTES} + {size % _ELEMENT_BYTES}",
            remedy=f"Use a multiple of {_ELEMENT_BYTES} bytes",
        )
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes of a comma-separated list of sizes and ranges, in bytes, increasing.

    A range such as 64K:1G:x2 multiplies by its factor (default x2) up to at most its end. Raises
    OptionError if the list is malformed.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, *rest = part.split(":")
        low = parse_size(first)
        if not rest:
            found.add(low)
            continue
        if len(rest) > 2:
            raise OptionError(
                f"--sizes: {shorten(part)} has too many parts", remedy="Use 64K:1G:x2"
            )
        high = parse_size(rest[0])
        factor = _factor(rest[1]) if len(rest) == 2 else 2
        if high < low:
            raise OptionError(
                f"--sizes: {shorten(part)} ends before it begins",
                remedy=f"Use {rest[0]}:{first}:x{factor}",
            )
        while low <= high:
            found.add(low)
            low *= factor
    return tuple(sorted(found))


def parse_groups(text: str) -> tuple[int, ...] | None:
    """Return the group sizes of a comma list, increasing; None for `all`."""
    if text.strip().lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        if not re.fullmatch(r"\s*[0-9]{1,9}\s*", part):
            raise OptionError(
                f"--groups: {shorten(text)} is not a list of group sizes", remedy="Use 2,4,8 or all"
            )
        if int(part) < 2:
            raise OptionError(
                f"--groups: a group of {int(part)} has no partners",
                remedy="Use sizes from 2, or all",
            )
        found.add(int(part))
    return tuple(sorted(found))


def _factor(text: str) -> int:
    match = _FACTOR.fullmatch(text.strip())
    if match is None:
        raise OptionError(
            f"--sizes: {shorten(text)} is not a factor", remedy="Use x2, x4 or another integer"
        )
    if int(match[1]) < 2:
        raise OptionError(
            f"--sizes: the factor {shorten(text)} never reaches the end of the range",
            remedy="Use x2 or more",
        )
    return int(match[1])


_DOCUMENTED = "Documented spellings"
PANELS = (WHAT, HOW, MACHINE, FILES, _DOCUMENTED)
_SIZES = "64K:1G:x2"


@dataclass(frozen=True, kw_only=True)
class HardwareOptions(RankOptions):
    """Options of one measuring run; defaults are those of the command."""

    PANEL: ClassVar[str] = WHAT

    operations: tuple[str, ...] = option(
        OPERATIONS,
        help="allreduce, p2p, all2all, allgather, reducescatter, overlap; or all",
        positional=True,
        metavar="OPERATION",
        parse=lambda names: parse_operations(names),
        most_used=True,
        shown="all",
    )
    sizes_bytes: tuple[int, ...] = option(
        parse_sizes(_SIZES),
        name="sizes",
        help="message sizes: FROM:TO:xFACTOR or a comma list; K, M, G are powers of 1024",
        metavar="SIZES",
        parse=parse_sizes,
        shown=_SIZES,
        most_used=True,
    )
    """Message sizes in bytes, increasing; includes the reference size."""
    reference_bytes: int = option(
        32 << 20,
        name="reference-size",
        help="message size of the bandwidths in the documented files",
        metavar="SIZE",
        parse=lambda text: parse_size(text, "--reference-size"),
        shown="32M",
    )
    """Message size of the bandwidths in the hardware files, bytes."""
    groups: tuple[int, ...] | None = option(
        None,
        help="group sizes such as 2,4,8, or all divisors of the number of ranks",
        metavar="SIZES",
        parse=parse_groups,
        shown="all",
        most_used=True,
    )
    """Group sizes; None for every divisor of the world size above 1."""
    isolated: bool = option(
        False,
        help=("measure one group at a time; default: all groups of a size at once, as in training"),
    )
    cuda_graph: bool = option(
        False,
        help="launch from CUDA graphs, without the launch cost of small messages",
        panel=HOW,
    )
    out: Path = option(
        HARDWARE_FOLDER,
        help="output folder, for --hardware of autopar-search",
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )
    max_tp_deg: int | None = option(
        None,
        help="largest group of all2all",
        panel=_DOCUMENTED,
        shown="all",
        between=(1, MAX_RANKS),
    )
    max_pp_deg: int | None = option(
        None,
        help="largest number of pipeline stages of p2p",
        panel=_DOCUMENTED,
        between=(1, MAX_RANKS),
    )
    num_nodes: int | None = option(
        None,
        help="number of nodes, compared with torchrun's",
        panel=_DOCUMENTED,
        between=(1, MAX_RANKS),
    )
    num_gpus_per_node: int | None = option(
        None,
        help="ranks per node, compared with torchrun's",
        panel=_DOCUMENTED,
        between=(1, MAX_RANKS),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cuda_graph and self.backend == "gloo":
            raise OptionError(
                "--cuda-graph needs a GPU, but --backend is gloo",
                remedy="Remove one of them",
            )


SP_TIME_SIZES = "1M:1G:x2"
"""Message sizes of the sp_time file, as a value of --sizes."""
_SP_TIME_FROM = 512 << 20
"""Largest message, bytes, from which the sizes of --start-mb and --end-mb also include those of the
sp_time file."""


@dataclass(frozen=True, kw_only=True)
class DocumentedSizes:
    """Message sizes in MiB, as options of Galvatron (named like those of nccl-tests)."""

    PANEL: ClassVar[str] = _DOCUMENTED

    start_mb: int | None = option(
        None, help="smallest message in MiB", shown="16", between=(1, 1 << 20)
    )
    end_mb: int | None = option(
        None, help="largest message in MiB", shown="512", between=(1, 1 << 20)
    )
    scale: int | None = option(
        None, help="factor between messages", shown="2", between=(2, 1 << 20)
    )

    def __post_init__(self) -> None:
        validate(self)

    @property
    def text(self) -> str | None:
        """Sizes in the spelling of --sizes; None if no option is given."""
        if self.start_mb is None and self.end_mb is None and self.scale is None:
            return None
        # The other end may be nearer than its default.
        start = self.start_mb or min(16, self.end_mb or 16)
        end = self.end_mb or max(512, start)
        if end < start:
            raise OptionError(
                f"--end-mb: {end} is below --start-mb {start}", remedy="Exchange their values"
            )
        return f"{start}M:{end}M:x{self.scale or 2}"


def build_options(**given: object) -> HardwareOptions:
    """Return the options of a parsed command line.

    given : option, with hyphens or underscores -> text, or value in base units.

    Raises OptionError: a value is invalid, or two options contradict each other.
    """
    values = read_given(given, HardwareOptions, DocumentedSizes)
    documented = make(DocumentedSizes, values).text
    if documented is not None:
        if "sizes" in values:
            raise OptionError(
                "--sizes sets the same values as --start-mb, --end-mb and --scale",
                remedy="Remove one of them",
            )
        sizes = {*parse_sizes(documented)}
        if max(sizes) >= _SP_TIME_FROM:
            # profile_hardware.sh sweeps its bandwidths by --end-mb, but sp_time up to 1,024 MB.
            sizes |= {*parse_sizes(SP_TIME_SIZES)}
        values["sizes"] = tuple(sorted(sizes))
    options = make(HardwareOptions, values)
    check_out(options.out)
    # Bandwidths in the files are those of the reference size, so it is always measured.
    sizes = {*options.sizes_bytes, options.reference_bytes}
    return replace(options, sizes_bytes=tuple(sorted(sizes)))


# --------------------------------------------------------------------------------------------------
# Groups of ranks on a cluster, and the cells of a sweep over them.
#
# A cell is one operation, in the groups of one size and kind, at one message size. Its groups are
# arranged in rounds. The groups of a round run concurrently, as in training; rounds run one after
# another.


Group = tuple[int, ...]
"""Ranks of one operation, in group order."""
Round = tuple[Group, ...]
"""Groups that run concurrently; no rank is in two of them."""
Scope = Literal["one device", "intra-node", "inter-node"]

STRIDED = frozenset({"allreduce"})
"""Collectives measured in strided groups too; the others are only estimated there."""
PIPELINE = ("p2p", "p2p_bidirectional")
OVERLAPPED = ("allreduce", "allgather", "reducescatter")
OVERLAP_SIZES_BYTES = (8 << 20, 64 << 20, 256 << 20)
"""Message sizes of the overlap measurement, bytes; Galvatron's profiler uses only 64 MiB."""


class Cluster(Record):
    """Ranks of a run and their hosts; all hosts have equally many ranks, in rank order."""

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
        """Number of ranks on each host."""
        return self.world_size // self.num_nodes

    def scope(self, group: Group) -> Scope:
        """Return the scope of a group: one device, one node, or several nodes."""
        if len(group) == 1:
            return "one device"
        return "intra-node" if len({self.hosts[rank] for rank in group}) == 1 else "inter-node"


def cell_key(operation: str, group_size: int, consecutive: bool, size_bytes: float) -> str:
    """Return the name of a cell in files and messages."""
    kind = f"size_{group_size}_consec_{int(consecutive)}"
    if operation in PIPELINE:
        kind = f"stages_{group_size}"
    return f"{operation}_{kind}_{size_bytes:.0f}B"


class Cell(Record):
    """One operation in the groups of one size and kind, at one message size."""

    operation: str
    """Name of a collective in `COLLECTIVES`, optionally with the prefix `overlap_`."""
    group_size: int
    """Number of ranks in a group; number of pipeline stages for `p2p`."""
    consecutive: bool
    size_bytes: int
    rounds: tuple[Round, ...]
    scope: Scope

    @property
    def key(self) -> str:
        """Unique name of the cell in files and messages."""
        return cell_key(self.operation, self.group_size, self.consecutive, self.size_bytes)


def check_world(options: HardwareOptions, world: int) -> None:
    """Check the options that depend on the number of ranks.

    Raises OptionError: a group size does not divide the world size, `--num-nodes` times
    `--num-gpus-per-node` differs from it, or a single rank is to measure p2p.
    """
    for size in options.groups or ():
        if world % size:
            known = ", ".join(map(str, divisors(world)[1:]))
            remedy = f"Use {known}" if known else "start more ranks"
            raise OptionError(
                f"--groups: the group size {size} does not divide the world size, "
                f"{world} = {world // size} * {size} + {world % size}",
                remedy=remedy,
            )
    nodes, gpus = options.num_nodes, options.num_gpus_per_node
    if nodes is not None and gpus is not None and nodes * gpus != world:
        raise OptionError(
            f"--num-nodes: --num-nodes({nodes}) * --num-gpus-per-node({gpus}) = "
            f"{nodes * gpus} != {world}, the number of ranks of torchrun",
            remedy="Change one of them",
        )
    if world == 1 and options.operations == ("p2p",):
        raise OptionError(
            "p2p needs at least 2 ranks, but the world size is 1",
            remedy="Start torchrun with --nproc-per-node 2 or more",
        )


def check_shape(options: HardwareOptions, cluster: Cluster) -> None:
    """Raise OptionError if the options contradict the cluster of the ranks."""
    for name, said, there in (
        ("--num-nodes", options.num_nodes, cluster.num_nodes),
        ("--num-gpus-per-node", options.num_gpus_per_node, cluster.gpus_per_node),
    ):
        if said not in (None, there):
            raise OptionError(
                f"{name} {said}: torchrun started {cluster.num_nodes} x "
                f"{cluster.gpus_per_node} ranks (nodes x ranks per node)",
                remedy="Change one of them",
            )


def rounds(
    operation: str, group_size: int, consecutive: bool, world_size: int, isolated: bool
) -> tuple[Round, ...]:
    """Return the groups of a cell, arranged in rounds of concurrent groups.

    Collectives run in all groups concurrently. A transfer group is (sender, receiver); a round
    contains every second stage boundary, so that no rank both sends and receives.

    isolated : True for one group per round.
    """
    count = world_size // group_size
    found: tuple[Round, ...]
    if operation in PIPELINE:
        # Stage s of pipeline i is rank i + s * W/p; `count` pipelines run concurrently.
        found = tuple(
            tuple(
                (i + s * count, i + (s + 1) * count)
                for s in range(first, group_size - 1, 2)
                for i in range(count)
            )
            # One round for even boundaries and one for odd ones; two stages have a single boundary.
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
    """Return the cells of a run, in measuring order.

    Cells that the documents require come first, so that a run that ends early leaves usable files.
    """
    world = cluster.world_size
    sizes = options.groups if options.groups is not None else divisors(world)[1:]
    swept = options.sizes_bytes
    if world == 1:
        # A single rank cannot communicate: this only shows that every operation works.
        sizes, swept = (1,), (options.reference_bytes,)
    plan: list[tuple[str, int, bool, Sequence[int]]] = []
    for operation in COLLECTIVES:
        if operation not in options.operations:
            continue
        most = options.max_tp_deg if operation == "all2all" else None
        for group_size in sorted(sizes, reverse=True):
            if most is not None and group_size > most:
                continue
            plan.append((operation, group_size, True, swept))
            # The group of all ranks contains the same ranks at any stride.
            if operation in STRIDED and 1 < group_size < world:
                plan.append((operation, group_size, False, swept))
    if "p2p" in options.operations and world > 1:
        for stages in sorted(sizes):
            if options.max_pp_deg is not None and stages > options.max_pp_deg:
                continue
            plan.append(("p2p", stages, True, swept))
            # No document has a key for it: one size shows the cost of both directions.
            plan.append(("p2p_bidirectional", stages, True, (options.reference_bytes,)))
    if "overlap" in options.operations:
        # Large, since small messages fit in caches.
        plan.append(("memcopy", 1, True, (max(options.reference_bytes, 64 << 20),)))
        # Fixed sizes: a machine without memory for even the smallest skips it with a reason.
        largest = max(options.sizes_bytes[-1], OVERLAP_SIZES_BYTES[0])
        chosen = [size for size in OVERLAP_SIZES_BYTES if size <= largest]
        # On a single rank, one copy replaces all collectives.
        names = OVERLAPPED if world > 1 else OVERLAPPED[:1]
        plan += [(f"overlap_{name}", world, True, chosen) for name in names]

    def waits(cell: Cell) -> bool:
        # The size of Galvatron's profiler; overlap_coe needs it.
        overlap = cell.operation == "overlap_allreduce" and cell.size_bytes == 64 << 20
        return cell.size_bytes != options.reference_bytes and not overlap

    cells = [
        arranged(operation, group_size, consecutive, size, cluster, isolated=options.isolated)
        for operation, group_size, consecutive, of_operation in plan
        for size in of_operation
    ]
    # Sorting is stable, so both halves keep the order of the plan.
    return tuple(sorted(cells, key=waits))


def arranged(
    operation: str,
    group_size: int,
    consecutive: bool,
    size_bytes: int,
    cluster: Cluster,
    *,
    isolated: bool = False,
) -> Cell:
    """Return the cell of an operation with its groups on a cluster; parameters as in `rounds`."""
    found = rounds(operation, group_size, consecutive, cluster.world_size, isolated)
    scopes = {cluster.scope(group) for groups in found for group in groups}
    # One group that crosses nodes makes it an inter-node cell.
    order: tuple[Scope, ...] = ("inter-node", "intra-node", "one device")
    return Cell(
        operation=operation,
        group_size=group_size,
        consecutive=consecutive,
        size_bytes=size_bytes,
        rounds=found,
        scope=next((scope for scope in order if scope in scopes), "one device"),
    )
