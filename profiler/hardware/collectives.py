"""Measured communication operations: their buffers, execution, and check of the result.

Message sizes are defined in `autopar.rates.measured` and rounded up to a multiple of group size
times element size. Buffers contain random values, since devices compute faster on zeros, and
infinities and denormals would distort the bandwidth.
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
# Contents of measured tensors: random values while timing, known patterns in a check.
#
# All contents are periodic, so that a tensor is filled and compared without a second tensor of its
# size.


PERIOD = 65521
"""Period of patterns, elements; a prime, so that a misplaced block does not match by chance."""
_BASE = 251
"""Number of pattern values, -125..125; the sum of two of them is exact in bf16."""
_SPREAD = 17
"""Shift of the values from one block of `_BASE` elements to the next."""
_COMPARED_PERIODS = 32
"""Periods compared at once, which limits the memory of a comparison."""


def random_values(dtype: torch.dtype, device: torch.device, exponent: int = 0) -> torch.Tensor:
    """Return random values of both signs with magnitude 2^exponent..2^(exponent+1), shape (65521,).

    The values are equal on all ranks, so that terms of a sum over ranks do not cancel.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(PERIOD, generator=generator, dtype=torch.float64) * 2 - 1
    # sign + value has a magnitude of 1 to 2: one octave, so no denormals and no infinities.
    values = (uniform.sign() + uniform) * 2.0**exponent
    return values.to(device=device, dtype=dtype)


def tile(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Fill a flat tensor with repetitions of a pattern."""
    # Only whole periods can be viewed as rows; the remainder is filled separately.
    whole = tensor.numel() // pattern.numel() * pattern.numel()
    tensor[:whole].view(-1, pattern.numel()).copy_(pattern)
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def first_difference(tensor: torch.Tensor, pattern: torch.Tensor) -> int | None:
    """Return the first index of a flat tensor that differs from the repeated pattern, or None."""
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
    """Return a pattern of integers in -125..125, shape (65521,), that identifies a label.

    Consecutive elements contain the three base-251 digits of the label in turn, so labels below
    251^3 differ in any three consecutive elements. A tensor contains one label per element.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    weight = torch.tensor([1, _BASE, _BASE**2], device=device)[at % 3]
    digit = torch.div(label, weight, rounding_mode="floor")
    # Shifted from block to block, so that values 251 elements apart differ too.
    return (at + _SPREAD * (at // _BASE) + digit) % _BASE - _BASE // 2


def summand(position: int, block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the input pattern of one of `count` ranks for the check of a reduction.

    At each element, only two ranks (one of one) are nonzero. The sum is therefore exact in bf16, in
    any order and for any number of ranks. Every rank is nonzero at some elements.

    position : index of the rank in its group.
    block : index of the share of the message.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    own = labelled(position * count + block, device)
    # At each element, ranks at % count and (at - 1) % count add: two for any count above 1.
    return own.where((at - position) % count < 2, 0)


def total(block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the sum of the patterns of `summand` over `count` ranks, for one block."""
    import torch

    at = torch.arange(PERIOD, device=device)
    result = labelled(at % count * count + block, device)
    if count > 1:
        result = result + labelled((at - 1) % count * count + block, device)
    return result


# --------------------------------------------------------------------------------------------------
# Tensors of one rank in one cell, and the number of in-place sums before they overflow.


_NO_LIMIT = 1 << 62


class Member(Record):
    """Group, message size and device of one rank in one cell."""

    ranks: Group
    """Global ranks of the group, in order; sender and receiver for a transfer."""
    rank: int
    group: Any
    """torch process group of `ranks`; None if there is no communication."""
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
        """Elements of one share: message size over group size, rounded up."""
        element_bytes: int = self.dtype.itemsize
        # Rounded up, so that all ranks of the group have equal shares.
        return -(-self.size_bytes // (len(self.ranks) * element_bytes))

    @property
    def num_elements(self) -> int:
        """Elements of the message, rounded up to whole shares."""
        return self.share_elements * len(self.ranks)


@dataclass(kw_only=True)
class Buffers:
    """Flat send and receive tensors of one rank; empty if it does not send or receive."""

    send: torch.Tensor
    receive: torch.Tensor
    """Output tensor; `send` itself for in-place operations."""
    values: torch.Tensor
    """Random values that fill both tensors periodically; equal on all ranks."""
    transfers: list[Any] = field(default_factory=list)
    """Point-to-point operations of one execution."""
    limit: int = _NO_LIMIT
    """Number of in-place sums after a refill before values overflow their dtype."""
    room: int = _NO_LIMIT
    """Remaining number of in-place sums before a refill is needed."""
    capturing: bool = False
    """True if the last execution was captured in a graph instead of executed."""
    replayed: bool = False
    """True if a CUDA graph contains executions; their replays are not counted."""

    def refill(self) -> None:
        """Fill the tensors with random values again."""
        tile(self.send, self.values)
        if self.receive is not self.send:
            tile(self.receive, self.values)
        self.room = self.limit


def out_of_place(sends: int, receives: int, member: Member) -> Buffers:
    """Return filled buffers; `sends` and `receives` are their sizes in shares of the message."""
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
    """Return a filled buffer for in-place all-reduce, valid for `limit` sums.

    torch reduces in place, so every execution multiplies the values by the group size. They start
    at the bottom of the normal range of the dtype and are refilled before they overflow. In bf16
    that is after 249 sums over 2 ranks and 83 over 8. A mean or maximum would not overflow, but
    NCCL's fastest algorithm (NVLS) does not support means, nor maxima in fp32. If the group size is
    not a power of two, rounding leaves only some dozen different values in bf16.
    """
    import torch

    info = torch.finfo(member.dtype)
    # Mantissas of frexp are below 1, so its exponents are one above those of 1.x * 2^e.
    lowest, highest = (math.frexp(value)[1] - 1 for value in (info.tiny, info.max))
    tensor = torch.empty(member.num_elements, dtype=member.dtype, device=member.device)
    buffers = Buffers(
        send=tensor,
        receive=tensor,
        values=random_values(member.dtype, member.device, lowest),
    )
    count = len(member.ranks)
    # A sum over one rank does not change the values.
    if count > 1:
        # Four octaves are reserved for the values themselves and the rounding of many sums.
        buffers.limit = max(1, int((highest - lowest - 4) / math.log2(count)))
    buffers.refill()
    return buffers


def make_room(buffers: Buffers, member: Member, loops: int) -> None:
    """Refill an in-place buffer if `loops` more sums might overflow."""
    # Replays are not counted, so the remaining number of sums is unknown.
    if buffers.replayed or buffers.room < loops:
        buffers.refill()
    if buffers.replayed:
        buffers.room = max(0, buffers.limit - loops)


def transfer(sends: bool, receives: bool, member: Member) -> Buffers:
    """Return filled buffers of a point-to-point transfer, with its P2P operations."""
    import torch.distributed as dist

    assert len(member.ranks) == 2, f"a transfer has a sender and a receiver, got {member.ranks}"
    peer = member.ranks[1 - member.position]
    # A share is half of the message here, since the group is a sender and a receiver.
    buffers = out_of_place(2 * sends, 2 * receives, member)
    if sends:
        buffers.transfers.append(dist.P2POp(dist.isend, buffers.send, peer, member.group))
    if receives:
        buffers.transfers.append(dist.P2POp(dist.irecv, buffers.receive, peer, member.group))
    return buffers


# --------------------------------------------------------------------------------------------------
# The table of operations.


def _no_preparation(buffers: Buffers, member: Member, loops: int) -> None:
    """Do nothing, for operations that do not change their input."""


class Collective(Record):
    """One measured operation: functions that create its buffers, check, prepare and run it."""

    name: str
    """Key in `autopar.rates.measured.OPERATIONS`, which defines the bus bandwidth factor."""
    tensor_bytes: Callable[[int, int], int]
    """Function (message bytes, group size) that returns the buffer bytes of a rank."""
    make: Callable[[Member], Buffers]
    run: Callable[[Buffers, Member], None]
    """Function that starts one execution; on return it may be pending on the current stream."""
    sent: Callable[[Member, int], torch.Tensor]
    """Function (member, block) that returns the pattern that this rank sends in a check; a block
    is the index of a share of the message."""
    expected: Callable[[Member, int], torch.Tensor]
    """Function (member, block) that returns the pattern that this rank must receive."""
    prepare: Callable[[Buffers, Member, int], None] = _no_preparation
    """Function that prepares the buffers for a number of executions; called before each barrier
    and not timed."""

    def __post_init__(self) -> None:
        assert self.name in OPERATIONS, self.name

    def check(self, buffers: Buffers, member: Member) -> str | None:
        """Execute once with known patterns; return an error message, or None if exact.

        The output is filled with NaN before. All ranks of the group must call this. The buffers
        contain random values afterwards.
        """
        buffers.refill()
        for index, block in _blocks(buffers.send, member):
            tile(block, self.sent(member, index).to(block))
        if buffers.receive is not buffers.send:
            # NaN equals no pattern, so unwritten elements are detected.
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
        # Timed executions start with random values, not with the labels of the check.
        buffers.refill()
        return wrong


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _blocks(tensor: torch.Tensor, member: Member) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (index, share) for all shares of the message in a tensor."""
    share = member.share_elements
    for index in range(tensor.numel() // share):
        yield index, tensor[index * share : (index + 1) * share]


def _run_allreduce(buffers: Buffers, member: Member) -> None:
    import torch
    import torch.distributed as dist

    capturing = member.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing and not buffers.capturing:
        # Replays start with the values that `prepare` leaves, not with the current ones.
        buffers.replayed, buffers.room = True, buffers.limit
    buffers.capturing = capturing
    # Only if one repetition has more sums than the type allows.
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
    # A batch even for a single transfer: NCCL then uses the group's communicator, and both
    # directions of an exchange are one launch.
    import torch.distributed as dist

    for work in dist.batch_isend_irecv(buffers.transfers):
        work.wait()


def _run_memcopy(buffers: Buffers, member: Member) -> None:
    buffers.receive.copy_(buffers.send)


def _from(position: int, member: Member, block: int) -> torch.Tensor:
    """Return the unique pattern of a block that the rank at `position` of the group sends."""
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
        # The output is the whole tensor, the input one share, rounded up as in `Member`.
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda member: out_of_place(1, len(member.ranks), member),
        run=_run_allgather,
        sent=_from_me,
        # Block i was sent by rank i, which sends a single block.
        expected=lambda member, block: _from(block, member, 0),
    ),
    Collective(
        name="reducescatter",
        # The input is the whole tensor, the output one share.
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda member: out_of_place(len(member.ranks), 1, member),
        run=_run_reducescatter,
        sent=_my_summand,
        # A rank receives the sum of the block at its own position.
        expected=lambda member, block: _total(member.position, member),
    ),
    Collective(
        name="all2all",
        # Every rank sends a whole message and receives one.
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda member: out_of_place(len(member.ranks), len(member.ranks), member),
        run=_run_all2all,
        sent=_from_me,
        # Block i came from rank i, where it was the block at this rank's position.
        expected=lambda member, block: _from(block, member, member.position),
    ),
    Collective(
        name="p2p",
        # A rank either sends or receives.
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
"""Operations by their key in files."""
