"""Every measured operation computes what it should, and the check sees one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.rates.measured import OPERATIONS
from autopar.records import replace
from profiler.hardware import collectives as patterns
from profiler.hardware.collectives import COLLECTIVES, Buffers, Collective, Member
from profiler.hardware.options import PIPELINE
from profiler.measure import make_timer
from tests.gloo import RanksFailedError, run_ranks

torch = pytest.importorskip("torch", reason="the profilers need torch")

DTYPES = ("bfloat16", "float16", "float32")
SIZES_BYTES = (1, 7, 4099, 600_001)
"""None of them a multiple of anything; the last is longer than a pattern's period."""


def here(size_bytes: int, dtype: str, name: str = "allreduce") -> Member:
    """Return this rank's place in a group of all ranks, or alone where it only copies."""
    import torch.distributed as dist

    alone = name == "memcopy"
    rank = dist.get_rank()
    return Member(
        ranks=(rank,) if alone else tuple(range(dist.get_world_size())),
        rank=rank,
        group=None if alone else dist.group.WORLD,
        size_bytes=size_bytes,
        dtype=getattr(torch, dtype),
        device=torch.device("cpu"),
    )


def names_for(num_ranks: int) -> list[str]:
    """Return the operations that exist in groups of a size."""
    return [name for name in COLLECTIVES if num_ranks == 2 or name not in PIPELINE]


# --- what ranks do: top-level, since they are started anew ---


def check_rows(names: list[str]) -> dict[str, str | None]:
    """Return what the check says of every operation, size and type."""
    found = {}
    for name in names:
        row = COLLECTIVES[name]
        for dtype in DTYPES:
            for size_bytes in SIZES_BYTES:
                member = here(size_bytes, dtype, name)
                found[f"{name} {dtype} {size_bytes}"] = row.check(row.make(member), member)
    return found


def nothing(buffers: Buffers, member: Member) -> None:
    """Do nothing in place of an operation."""


def shifted(buffers: Buffers, member: Member) -> None:
    """Do what is asked, and move the result by one element."""
    COLLECTIVES[_current].run(buffers, member)
    buffers.receive.copy_(buffers.receive.roll(1))


def swapped(buffers: Buffers, member: Member) -> None:
    """Do what is asked, and exchange two shares of the result."""
    COLLECTIVES[_current].run(buffers, member)
    share = member.share_elements
    first = buffers.receive[:share].clone()
    buffers.receive[:share] = buffers.receive[share : 2 * share]
    buffers.receive[share : 2 * share] = first


def one_ulp(buffers: Buffers, member: Member) -> None:
    """Do what is asked, and spoil the very last element by as little as there is."""
    COLLECTIVES[_current].run(buffers, member)
    last = buffers.receive[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))


def largest(buffers: Buffers, member: Member) -> None:
    """Take the maximum in place of the sum."""
    import torch.distributed as dist

    dist.all_reduce(buffers.send, op=dist.ReduceOp.MAX, group=member.group)


def sum_twice(buffers: Buffers, member: Member) -> None:
    """Sum what is already summed."""
    for _ in range(2):
        COLLECTIVES["allreduce"].run(buffers, member)


WRONG: list[tuple[str, Callable[[Buffers, Member], None]]] = [
    *((name, nothing) for name in COLLECTIVES),
    *((name, shifted) for name in COLLECTIVES if name != "p2p"),
    *((name, one_ulp) for name in COLLECTIVES if name != "p2p"),
    *((name, swapped) for name in ("allreduce", "allgather", "all2all", "p2p_bidirectional")),
    ("allreduce", largest),
    ("allreduce", sum_twice),
]
_current = ""


def check_wrong_rows() -> dict[str, str | None]:
    """Return what the check says of operations that go wrong."""
    global _current
    found = {}
    for name, run in WRONG:
        _current = name
        row = replace(COLLECTIVES[name], run=run)
        member = here(150_001, "bfloat16", name)
        found[f"{name} {run.__name__}"] = row.check(row.make(member), member)
    return found


def sum_for_long(dtype: str, times: int, prepare_for: int | None) -> tuple[bool, bool, int]:
    """Sum in place; return: always finite and normal, still varied, refills inside of a run."""
    row, member = COLLECTIVES["allreduce"], here(256, dtype)
    buffers = row.make(member)
    fine, refills = True, 0
    smallest = torch.finfo(member.dtype).tiny
    for i in range(times):
        if prepare_for is not None and i % prepare_for == 0:
            row.prepare(buffers, member, prepare_for)
        room = buffers.room
        row.run(buffers, member)
        refills += buffers.room >= room
        fine &= bool((buffers.send.isfinite() & (buffers.send.abs() >= smallest)).all())
    return fine, len(buffers.send.unique()) > 8, refills


def run_all_once(names: list[str]) -> dict[str, tuple[int, bool]]:
    """Return bytes of the buffers and whether values stay random, after a check and two runs."""
    found = {}
    for name in names:
        row, member = COLLECTIVES[name], here(96_000, "float32", name)
        buffers = row.make(member)
        row.check(buffers, member)
        for _ in range(2):
            row.prepare(buffers, member, 1)
            row.run(buffers, member)
        tensors = {tensor.data_ptr(): tensor for tensor in (buffers.send, buffers.receive)}
        full = [tensor for tensor in tensors.values() if tensor.numel()]
        random = all(bool(t.isfinite().all()) and len(t.unique()) > 1000 for t in full)
        found[name] = (sum(t.numel() * t.element_size() for t in full), random)
    return found


def replayed_like_a_graph() -> bool:
    """Sum as replays of a captured graph do, uncounted; return whether all stays finite."""
    import torch.distributed as dist

    row, member = COLLECTIVES["allreduce"], here(256, "bfloat16")
    buffers = row.make(member)
    buffers.replayed = True  # what a capture leaves behind
    loops = min(buffers.limit, 300)
    fine = True
    for _ in range(3):
        row.prepare(buffers, member, loops)
        for _ in range(loops):
            dist.all_reduce(buffers.send)
        fine &= bool(buffers.send.isfinite().all())
    return fine


def several(num_ranks: int) -> dict[str, Any]:
    """Do on one set of processes what several tests look at."""
    return {
        "checks": check_rows(names_for(num_ranks)),
        "run": run_all_once(names_for(num_ranks)),
        # more than fit in between two refills
        "sums": {dtype: sum_for_long(dtype, 300, None) for dtype in DTYPES},
        "prepared": {dtype: sum_for_long(dtype, 300, 5) for dtype in DTYPES},
        "replayed": replayed_like_a_graph(),
    }


def raise_on_rank_1() -> None:
    """Fail where others wait."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("that is rank 1's fault")


@pytest.fixture(
    scope="module",
    params=[1, 2, pytest.param(3, marks=pytest.mark.ranks)],
    ids=lambda n: f"{n} ranks",
)
def found(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of ranks and what each of them found."""
    return request.param, run_ranks(several, request.param, request.param)


@pytest.mark.whole
def test_every_row_is_right(found: tuple[int, list[dict[str, Any]]]) -> None:
    """Every operation passes its check at odd sizes in three types, a group of one included."""
    num_ranks, of_ranks = found

    assert len(of_ranks) == num_ranks
    for of_rank in of_ranks:
        checks = of_rank["checks"]
        assert len(checks) == len(names_for(num_ranks)) * len(DTYPES) * len(SIZES_BYTES)
        assert {key: said for key, said in checks.items() if said is not None} == {}


@pytest.mark.whole
def test_buffers_are_as_large_as_announced(found: tuple[int, list[dict[str, Any]]]) -> None:
    """What a rank allocates is what the row says; after a check it is full of random values."""
    num_ranks, of_ranks = found

    for of_rank in of_ranks:
        for name, (num_bytes, random) in of_rank["run"].items():
            assert num_bytes == COLLECTIVES[name].tensor_bytes(96_000, num_ranks), name
            assert random, name


def test_sums_in_place_stay_in_range(found: tuple[int, list[dict[str, Any]]]) -> None:
    """Sums in place, with and without preparation, never leave the normal numbers."""
    num_ranks, of_ranks = found

    for of_rank in of_ranks:
        for dtype in DTYPES:
            fine, varied, refills = of_rank["sums"][dtype]
            assert (fine, varied) == (True, True), dtype
            assert (refills > 0) == (num_ranks > 1), dtype
            # what `prepare` does is not timed, what a run does is
            assert of_rank["prepared"][dtype] == (True, True, 0), dtype
        # nobody counts the sums of a replayed graph: each replay begins anew
        assert of_rank["replayed"]


@pytest.mark.whole
@pytest.mark.parametrize("times", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_sums_in_place_are_finite(times: int) -> None:
    """Values of a long measurement are as good as those of a short one."""
    of_ranks = run_ranks(sum_for_long, 2, "bfloat16", times, None)

    # 249 sums by two fit in: the values of bf16 span 2^-126 to 2^127, four octaves are spare
    assert of_ranks == [(True, True, times // 249)] * 2


def test_the_check_sees_what_it_must() -> None:
    """Nothing done, a shift by one, two shares exchanged, one rounding off: all are found."""
    of_ranks = run_ranks(check_wrong_rows, 2)

    for name, run in WRONG:
        key = f"{name} {run.__name__}"
        said = [of_rank[key] for of_rank in of_ranks]
        receivers = said[1:] if name == "p2p" else said
        assert all(text is not None for text in receivers), key
    assert of_ranks[0]["p2p nothing"] is None, "a sender has nothing to compare"
    assert of_ranks[1]["p2p nothing"] == (
        "p2p: rank 1, number 1 of 2, found nan at element 0 of 75002, expected -125"
    )


@pytest.mark.whole
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 257])
def test_summands_are_exact_in_any_number(num_ranks: int) -> None:
    """Every rank adds something everywhere it should, and bf16 holds every sum."""
    cpu = torch.device("cpu")
    total = torch.zeros(patterns.PERIOD, dtype=torch.bfloat16)
    for position in range(num_ranks):
        own = patterns.summand(position, num_ranks // 2, num_ranks, cpu)
        assert own.any(), position
        total += own.to(torch.bfloat16)

    assert torch.equal(total.long(), patterns.total(num_ranks // 2, num_ranks, cpu))


def test_patterns_tell_labels_and_places_apart() -> None:
    """Labels that differ in any digit differ somewhere, and so does a moved pattern."""
    cpu = torch.device("cpu")
    labels = (0, 1, 250, 251, 252, 502, 63001, 63002, 1024 * 1024)
    seen = [patterns.labelled(label, cpu) for label in labels]

    for i, one in enumerate(seen):
        assert int(one.abs().max()) <= 125
        assert all(not torch.equal(one[:3], other[:3]) for other in seen[:i])
    for shift in (1, 3, 251, 753, 1024, 4096, 32768):
        assert (seen[0] != seen[0].roll(shift)).float().mean() > 0.5, shift


def test_the_first_difference_is_found_wherever_it_is() -> None:
    """In the first element, in the last, across the parts that are compared at once, or nowhere."""
    pattern = torch.arange(5.0)
    for length in (1, 5, 7, 163, 1000):
        tensor = torch.empty(length)
        patterns.tile(tensor, pattern)
        assert patterns.first_difference(tensor, pattern) is None
        for at in {0, length // 2, length - 1}:
            spoilt = tensor.clone()
            spoilt[at] = torch.nan
            assert patterns.first_difference(spoilt, pattern) == at


def test_rows_are_those_of_the_vocabulary() -> None:
    """Every operation has a bus factor, a transfer is between two, and names are not invented."""
    assert set(COLLECTIVES) == set(OPERATIONS)
    with pytest.raises(AssertionError):
        replace(COLLECTIVES["allreduce"], name="broadcast")
    member = Member(
        ranks=(0, 1, 2),
        rank=0,
        group=None,
        size_bytes=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with pytest.raises(AssertionError, match="a sender and a receiver"):
        COLLECTIVES["p2p"].make(member)


def test_sizes_are_rounded_up_to_whole_shares() -> None:
    """100 bytes of bf16 over 3 ranks are 17 elements each, 51 in all."""
    member = Member(
        ranks=(4, 8, 9),
        rank=8,
        group=None,
        size_bytes=100,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )

    assert (member.position, member.share_elements, member.num_elements) == (1, 17, 51)
    with pytest.raises(AssertionError, match="rank 5 is not in"):
        replace(member, rank=5)


def test_a_failing_rank_is_reported() -> None:
    """The helper of these tests names the rank that raised, and what it raised."""
    with pytest.raises(RanksFailedError, match=r"rank 1 raised[^!]*that is rank 1's fault"):
        run_ranks(raise_on_rank_1, 2, timeout_s=60)


def alone_on_a_gpu(cuda_graph: bool) -> dict[str, tuple[str | None, float, bool]]:
    """Return check, seconds and finiteness of every collective in a group of one on a GPU."""
    import torch.distributed as dist

    device = torch.device("cuda", torch.cuda.current_device())
    found = {}
    for name in names_for(1):
        row: Collective = COLLECTIVES[name]
        member = Member(
            ranks=(0,),
            rank=0,
            group=dist.group.WORLD,
            size_bytes=1 << 20,
            dtype=torch.bfloat16,
            device=device,
        )
        buffers = row.make(member)
        said = row.check(buffers, member)
        repetition = make_timer(device, cuda_graph).bind(lambda: row.run(buffers, member), 8)  # noqa: B023
        row.prepare(buffers, member, 8)
        found[name] = (said, repetition(), bool(buffers.receive.isfinite().all()))
        del repetition  # a graph goes before its process group
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["launched", "graph"])
def test_nccl_with_one_rank(cuda_graph: bool) -> None:
    """A group of one on a GPU: every check passes, launched or replayed, and takes some time."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    (found,) = run_ranks(alone_on_a_gpu, 1, cuda_graph, backend="nccl")

    for name, (said, time_s, finite) in found.items():
        assert said is None, name
        assert 0.0 <= time_s < 1.0, name
        assert finite, name
