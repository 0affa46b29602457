"""The operations that are measured, one row each: buffers, one run of it, and its check.

Sizes are messages as `autopar.rates.measured` defines them, rounded up to a multiple of the group
size times the element size. Buffers hold random values: a device computes faster on zeros, and what
infinities and denormals cost is nobody's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autopar.rates.measured import OPERATIONS
from autopar.records import Record
from profiler.hardware.options import Group
from profiler.measure import renamed

if TYPE_CHECKING:
    import torch

# --------------------------------------------------------------------------------------------------
# What measured tensors hold: random values while they are timed, known ones in a check.
#
# All of them repeat with one period, so that a tensor of any size is filled and compared without a
# second one of its size.


PERIOD = 65521
"""Elements after which patterns repeat: a prime, so that no misplaced block lands on a copy."""
_BASE = 251
"""Number of different pattern values, -125..125: sums of two are exact in bf16."""
_SPREAD = 17
"""Shifts the values from one run of `_BASE` places to the next."""
_COMPARED_PERIODS = 32
"""Periods that are compared at once; it bounds the memory of a comparison."""


def random_values(dtype: torch.dtype, device: torch.device, exponent: int = 0) -> torch.Tensor:
    """Return values of both signs in 2^exponent..2^(exponent+1), shape (65521,).

    They are the same on every rank, so that sums over ranks cancel nowhere.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(PERIOD, generator=generator, dtype=torch.float64) * 2 - 1
    # sign + value has a magnitude of 1 to 2: one octave, so no denormals and no infinities
    values = (uniform.sign() + uniform) * 2.0**exponent
    return values.to(device=device, dtype=dtype)


def tile(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Fill a flat tensor with repetitions of a pattern."""
    # only whole periods can be viewed as rows; what is left over is filled on its own
    whole = tensor.numel() // pattern.numel() * pattern.numel()
    tensor[:whole].view(-1, pattern.numel()).copy_(pattern)
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def first_difference(tensor: torch.Tensor, pattern: torch.Tensor) -> int | None:
    """Return the first element of a flat tensor that differs from the repeated pattern."""
    period = pattern.numel()
    step = _COMPARED_PERIODS * period
    for start in range(0, tensor.numel(), step):
        part = tensor[start : start + step]
        whole = part.numel() // period * period
        for offset, differs in (
            (0, (part[:whole].view(-1, period) != pattern).view(-1)),
            (whole, part[whole:] != pattern[: part.numel() - whole]),
        ):
            if bool(differs.any()):
                return start + offset + int(differs.nonzero()[0])
    return None


def labelled(label: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return integers in -125..125, shape (65521,), that tell labels and places apart.

    The three digits of a label to base 251 take turns: labels below 251^3 differ within any three
    consecutive places. A tensor has one label for every place.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    weight = torch.tensor([1, _BASE, _BASE**2], device=device)[at % 3]
    digit = torch.div(label, weight, rounding_mode="floor")
    # the place is shifted from run to run, so that values 251 places apart differ too
    return (at + _SPREAD * (at // _BASE) + digit) % _BASE - _BASE // 2


def summand(position: int, block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return what one of `count` ranks adds: at every place two of them have a value, others 0.

    So no order of summation leaves the integers that the narrowest type represents, however many
    ranks there are, and every rank's turn comes.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    own = labelled(position * count + block, device)
    # at a place the ranks at % count and (at - 1) % count add: two, whatever the count
    return own.where((at - position) % count < 2, 0)


def total(block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the sum of what `count` ranks add in a block."""
    import torch

    at = torch.arange(PERIOD, device=device)
    result = labelled(at % count * count + block, device)
    if count > 1:
        result = result + labelled((at - 1) % count * count + block, device)
    return result


# --------------------------------------------------------------------------------------------------
# The tensors of one rank in one cell: their sizes, what they hold, and for how long it lasts.


_NO_LIMIT = 1 << 62


class Member(Record):
    """One rank as a member of its group, in one cell."""

    ranks: Group
    """Global ranks of the group, in order; of a transfer the sender and the receiver."""
    rank: int
    group: Any
    """The torch process group of `ranks`; None where nothing is communicated."""
    size_bytes: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        assert self.rank in self.ranks, f"rank {self.rank} is not in {self.ranks}"
        assert self.size_bytes > 0, self.size_bytes

    @property
    def position(self) -> int:
        """Index of this rank in the group."""
        return self.ranks.index(self.rank)

    @property
    def share_elements(self) -> int:
        """Elements of a message divided by the group size, rounded up."""
        element_bytes: int = self.dtype.itemsize
        # rounded up, so that every rank of the group has an equal share
        return -(-self.size_bytes // (len(self.ranks) * element_bytes))

    @property
    def num_elements(self) -> int:
        """Elements of a message: as many as fit the size, rounded up to whole shares."""
        return self.share_elements * len(self.ranks)


@dataclass(kw_only=True)
class Buffers:
    """One rank's tensors, flat; empty where it sends or receives nothing."""

    send: torch.Tensor
    receive: torch.Tensor
    """`send` itself where the operation works in place."""
    values: torch.Tensor
    """Random values, the same on every rank, with which both are filled."""
    transfers: list[Any] = field(default_factory=list)
    """Point-to-point operations of one run."""
    limit: int = _NO_LIMIT
    """Sums in place after which freshly filled values would leave the range of their type."""
    room: int = _NO_LIMIT
    """Sums in place that are left."""
    capturing: bool = False
    """Whether the last run was captured in a graph instead of carried out."""
    replayed: bool = False
    """Whether a graph holds a run, whose replays nobody counts."""

    def refill(self) -> None:
        """Fill the tensors with random values again."""
        tile(self.send, self.values)
        if self.receive is not self.send:
            tile(self.receive, self.values)
        self.room = self.limit


def out_of_place(sends: int, receives: int, member: Member) -> Buffers:
    """Return filled buffers of so many shares of the message each."""
    import torch

    share = member.share_elements
    buffers = Buffers(
        send=torch.empty(sends * share, dtype=member.dtype, device=member.device),
        receive=torch.empty(receives * share, dtype=member.dtype, device=member.device),
        values=random_values(member.dtype, member.device),
    )
    buffers.refill()
    return buffers


def summed_in_place(member: Member) -> Buffers:
    """Return one tensor, whose values can be summed in place `limit` times.

    torch reduces in place, so every run multiplies the values by the group size. They begin at
    the bottom of their type's normal range and are filled in anew before they reach its top: in
    bf16 after 249 sums over 2 ranks and 83 over 8. In groups of another size than a power of two
    rounding thins them out: to some dozen different values in bf16. A mean or a maximum would keep
    them bounded, but NCCL's fastest algorithm (NVLS) has no mean, and no maximum in fp32.
    """
    import torch

    info = torch.finfo(member.dtype)
    # frexp's mantissas are below 1: its exponents are one above those of 1.x * 2^e
    lowest, highest = (math.frexp(value)[1] - 1 for value in (info.tiny, info.max))
    tensor = torch.empty(member.num_elements, dtype=member.dtype, device=member.device)
    buffers = Buffers(
        send=tensor,
        receive=tensor,
        values=random_values(member.dtype, member.device, lowest),
    )
    count = len(member.ranks)
    # a sum over one rank leaves the values as they are
    if count > 1:
        # four octaves are spare for the values themselves and the rounding of many sums
        buffers.limit = max(1, int((highest - lowest - 4) / math.log2(count)))
    buffers.refill()
    return buffers


def make_room(buffers: Buffers, member: Member, loops: int) -> None:
    """Fill a tensor that is summed in place anew unless `loops` further sums are sure to fit."""
    # replays are not counted: how much room is left is unknown, so it is made anew
    if buffers.replayed or buffers.room < loops:
        buffers.refill()
    if buffers.replayed:
        buffers.room = max(0, buffers.limit - loops)


def transfer(sends: bool, receives: bool, member: Member) -> Buffers:
    """Return filled buffers of the message in each direction, and the operations that move it."""
    import torch.distributed as dist

    assert len(member.ranks) == 2, f"a transfer has a sender and a receiver, got {member.ranks}"
    peer = member.ranks[1 - member.position]
    # a share is half of the message here, since the group is a sender and a receiver
    buffers = out_of_place(2 * sends, 2 * receives, member)
    if sends:
        buffers.transfers.append(dist.P2POp(dist.isend, buffers.send, peer, member.group))
    if receives:
        buffers.transfers.append(dist.P2POp(dist.irecv, buffers.receive, peer, member.group))
    return buffers


# --------------------------------------------------------------------------------------------------
# The table: one row for each operation.


def _no_preparation(buffers: Buffers, member: Member, loops: int) -> None:
    """Leave the buffers as they are: nothing in them changes by repetition."""


class Collective(Record):
    """One operation: `make` its buffers, `check` it once, then `prepare` and `run` it often."""

    name: str
    """Key of `autopar.rates.measured.OPERATIONS`, which has the bus factor."""
    tensor_bytes: Callable[[int, int], int]
    """Bytes a rank allocates, of message size and group size; a check takes a few MiB more."""
    make: Callable[[Member], Buffers]
    run: Callable[[Buffers, Member], None]
    """One operation; it may still be under way on the device's current stream on return."""
    sent: Callable[[Member, int], torch.Tensor]
    """Pattern that this rank sends in a block; a block is a share of the message."""
    expected: Callable[[Member, int], torch.Tensor]
    """Pattern that this rank must find in a block afterwards."""
    prepare: Callable[[Buffers, Member, int], None] = _no_preparation
    """Make room for so many runs; untimed, before every repetition and before its barrier."""

    def __post_init__(self) -> None:
        assert self.name in OPERATIONS, self.name

    def check(self, buffers: Buffers, member: Member) -> str | None:
        """Return what is wrong with one run's result on this rank, None when it is exact.

        Sends known patterns into a poisoned output; all ranks of the group must call it. The
        buffers hold random values afterwards.
        """
        buffers.refill()
        for index, block in _blocks(buffers.send, member):
            tile(block, self.sent(member, index).to(block))
        if buffers.receive is not buffers.send:
            # nan equals no pattern, so that what was never written is found
            buffers.receive.fill_(math.nan)
        _synchronize(member.device)
        self.run(buffers, member)
        _synchronize(member.device)
        wrong = None
        for index, block in _blocks(buffers.receive, member):
            pattern = self.expected(member, index).to(block)
            at = first_difference(block, pattern)
            if at is not None:
                wrong = (
                    f"{self.name}: rank {member.rank}, number {member.position} of "
                    f"{len(member.ranks)}, found {float(block[at]):g} at element "
                    f"{index * member.share_elements + at} of {buffers.receive.numel()}, "
                    f"expected {float(pattern[at % PERIOD]):g}"
                )
                break
        # timed runs begin with random values, not with the labels of the check
        buffers.refill()
        return wrong


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _blocks(tensor: torch.Tensor, member: Member) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the shares that a tensor consists of, with their numbers."""
    share = member.share_elements
    for index in range(tensor.numel() // share):
        yield index, tensor[index * share : (index + 1) * share]


def _run_allreduce(buffers: Buffers, member: Member) -> None:
    import torch
    import torch.distributed as dist

    capturing = member.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing and not buffers.capturing:
        # replays begin with what `prepare` leaves, not with what is in the tensor now
        buffers.replayed, buffers.room = True, buffers.limit
    buffers.capturing = capturing
    # only where one repetition has more sums than the type has room for
    if buffers.room == 0:
        buffers.refill()
    buffers.room -= 1
    dist.all_reduce(buffers.send, group=member.group)


def _run_allgather(buffers: Buffers, member: Member) -> None:
    gather = renamed("all_gather_single", "all_gather_into_tensor")
    gather(buffers.receive, buffers.send, group=member.group)


def _run_reducescatter(buffers: Buffers, member: Member) -> None:
    scatter = renamed("reduce_scatter_single", "reduce_scatter_tensor")
    scatter(buffers.receive, buffers.send, group=member.group)


def _run_all2all(buffers: Buffers, member: Member) -> None:
    import torch.distributed as dist

    dist.all_to_all_single(buffers.receive, buffers.send, group=member.group)


def _run_transfers(buffers: Buffers, member: Member) -> None:
    # As a batch even if it is one: NCCL then uses the group's communicator, and both directions
    # of an exchange are one launch.
    import torch.distributed as dist

    for work in dist.batch_isend_irecv(buffers.transfers):
        work.wait()


def _run_memcopy(buffers: Buffers, member: Member) -> None:
    buffers.receive.copy_(buffers.send)


def _from(position: int, member: Member, block: int) -> torch.Tensor:
    """Return what the rank at a position of the group sends in a block, different from all else."""
    return labelled(position * len(member.ranks) + block, member.device)


def _from_me(member: Member, block: int) -> torch.Tensor:
    return _from(member.position, member, block)


def _from_peer(member: Member, block: int) -> torch.Tensor:
    return _from(1 - member.position, member, block)


def _my_summand(member: Member, block: int) -> torch.Tensor:
    return summand(member.position, block, len(member.ranks), member.device)


def _total(block: int, member: Member) -> torch.Tensor:
    return total(block, len(member.ranks), member.device)


_ROWS = (
    Collective(
        name="allreduce",
        tensor_bytes=lambda size, n: size,
        make=summed_in_place,
        prepare=make_room,
        run=_run_allreduce,
        sent=_my_summand,
        expected=lambda member, block: _total(block, member),
    ),
    Collective(
        name="allgather",
        # the whole tensor comes out, one share, rounded up as a member has it, goes in
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda member: out_of_place(1, len(member.ranks), member),
        run=_run_allgather,
        sent=_from_me,
        # block i is the only one that rank i sent
        expected=lambda member, block: _from(block, member, 0),
    ),
    Collective(
        name="reducescatter",
        # the whole tensor goes in, one share comes out
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda member: out_of_place(len(member.ranks), 1, member),
        run=_run_reducescatter,
        sent=_my_summand,
        # a rank gets the sum of the block that has its own position
        expected=lambda member, block: _total(member.position, member),
    ),
    Collective(
        name="all2all",
        # every rank sends a whole message and receives one
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda member: out_of_place(len(member.ranks), len(member.ranks), member),
        run=_run_all2all,
        sent=_from_me,
        # block i came from rank i, where it was the block of this rank's position
        expected=lambda member, block: _from(block, member, member.position),
    ),
    Collective(
        name="p2p",
        # a rank sends or receives, never both
        tensor_bytes=lambda size, n: size,
        make=lambda member: transfer(member.position == 0, member.position == 1, member),
        run=_run_transfers,
        sent=_from_me,
        expected=_from_peer,
    ),
    Collective(
        name="p2p_bidirectional",
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda member: transfer(True, True, member),
        run=_run_transfers,
        sent=_from_me,
        expected=_from_peer,
    ),
    Collective(
        name="memcopy",
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda member: out_of_place(1, 1, member),
        run=_run_memcopy,
        sent=_from_me,
        expected=_from_me,
    ),
)
COLLECTIVES: dict[str, Collective] = {row.name: row for row in _ROWS}
"""Collectives by their key in files."""
