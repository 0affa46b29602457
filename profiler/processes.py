"""Processes of one measuring run: identity, device and process groups of each rank."""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, OptionError
from autopar.records import Record
from autopar.units import format_list
from profiler.environment import RankInfo, check_alike, collect, use_rank_threads
from profiler.hardware.options import Cluster, Group, Round
from profiler.measure import Timer, make_timer, renamed, torch_dtype
from profiler.options import RankOptions
from profiler.progress import Trouble, Watch

if TYPE_CHECKING:
    import torch

# --------------------------------------------------------------------------------------------------
# Rendezvous of the ranks: the launcher's store, and the description of each rank.


_POLL_S = 0.05
_MARGIN_S = 10.0
"""Seconds that other ranks wait longer than rank 0, which reports the missing ranks."""
_REMEDY = (
    "Start torchrun on every node, with the same --nnodes and --rdzv-endpoint, or increase "
    "--timeout"
)


def connect(timeout: timedelta) -> tuple[Any, Any, int, int]:
    """Return two connections to the launcher's store, the rank and the world size.

    A blocking wait on a single connection would also block the watching thread.

    Raises InputError: there is no store.
    """
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # torch before 2.8 cannot clone a store, so connect a second time.
        again = getattr(store, "clone", lambda: next(rendezvous("env://", timeout=timeout))[0])
        return store, again(), rank, world
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the ranks cannot connect to the launcher's store at {where} ({reason})",
            remedy=_REMEDY,
        ) from None


def introduce(
    store: Any, own: RankInfo, world: int, timeout: timedelta
) -> tuple[list[RankInfo], str]:
    """Return the `RankInfo` of every rank, and a name unique to this start of the ranks.

    A launcher that restarts its ranks keeps the store, including all keys of the earlier ranks, and
    its restart count differs between hosts. Rank 0 therefore names the start. The other ranks
    accept a name once they find their own entry under it.

    Raises InputError: ranks are missing.
    """
    token = secrets.token_hex(8)
    said = json.dumps({**own.to_dict(), "token": token})
    if own.rank == 0:
        # Before the name: a rank that reads the name must find rank 0 there.
        store.set(f"{token}/info/0", said)
        store.set("start", token)
        return _collected(store, token, world, timeout), token
    until_s = time.monotonic() + timeout.total_seconds() + _MARGIN_S
    start = ""
    while time.monotonic() < until_s:
        if store.check(["start"]):
            found = store.get("start").decode()
            if found != start:
                start = found
                store.set(f"{start}/info/{own.rank}", said)
            if store.check([f"{start}/infos"]):
                entries = json.loads(store.get(f"{start}/infos"))
                # An earlier start of equal size may have an entry for this rank; the token
                # distinguishes them.
                if own.rank < len(entries) and entries[own.rank]["token"] == token:
                    return [RankInfo.from_dict(entry) for entry in entries], start
        time.sleep(_POLL_S)
    raise InputError(
        f"rank 0 of {world} did not start within {timeout.total_seconds() + _MARGIN_S:g} s",
        remedy=_REMEDY,
    )


def _collected(store: Any, start: str, world: int, timeout: timedelta) -> list[RankInfo]:
    """Return the entries of all ranks under the name of a start, and publish them."""
    keys = [f"{start}/info/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except Exception:  # the type depends on store and torch version
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise InputError(
            f"rank{'s' if len(absent) > 1 else ''} {format_list(absent)} of {world} did not start "
            f"within {timeout.total_seconds():g} s",
            remedy=_REMEDY,
        ) from None
    # Published once, so that every other rank needs a single request.
    entries = [json.loads(store.get(key)) for key in keys]
    store.set(f"{start}/infos", json.dumps(entries))
    return [RankInfo.from_dict(entry) for entry in entries]


class Meeting(Record):
    """Ranks of one start and the stores that they share."""

    rank: int
    infos: tuple[RankInfo, ...]
    store: Any
    watch_store: Any
    """Store on a second connection, so that the watching thread never waits for this rank."""
    groups_store: Any

    def open_groups(self, backend: str, timeout_s: float) -> None:
        """Create the process group of all ranks."""
        import torch.distributed as dist

        claim_errors(os.environ)
        # No device_id: it would bind the ranks to one NCCL communicator from which torch splits
        # those of groups, which is a collective of all ranks. Without it, each group creates its
        # communicator on first use.
        dist.init_process_group(
            backend,
            store=self.groups_store,
            rank=self.rank,
            world_size=len(self.infos),
            timeout=timedelta(seconds=timeout_s),
        )


def claim_errors(environment: MutableMapping[str, str]) -> None:
    """Disable torch's process abort on NCCL errors, so that the watch can report the cause.

    torchrun sets the variable in all ranks, so a default would have no effect.
    """
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def meet(name: str, device: torch.device, timeout_s: float) -> Meeting:
    """Return the `Meeting` of this rank with all other ranks that torchrun started.

    name : name of the activity, used as key prefix in the launcher's store.

    Raises InputError: there is no store, or ranks are missing.
    """
    from torch.distributed import PrefixStore

    timeout = timedelta(seconds=timeout_s)
    base, other, rank, world = connect(timeout)
    own = collect(rank, int(os.environ["LOCAL_RANK"]), device)
    infos, start = introduce(PrefixStore(name, base), own, world, timeout)
    prefix = f"{name}/{start}"
    return Meeting(
        rank=rank,
        infos=tuple(infos),
        store=PrefixStore(prefix, base),
        watch_store=PrefixStore(f"{prefix}/watch", other),
        groups_store=PrefixStore(f"{prefix}/groups", base),
    )


class _Met(Protocol):
    """Common interface of `Meeting` and `Session`."""

    @property
    def rank(self) -> int: ...
    @property
    def infos(self) -> Sequence[RankInfo]: ...
    @property
    def watch_store(self) -> Any: ...


@contextmanager
def watched(of: _Met, *, timeout_s: float, finish: Callable[[Trouble], None]) -> Iterator[Watch]:
    """Watch this rank until all ranks have left the process groups; trouble ends the process.

    timeout_s : maximum seconds of one step of the watch.
    finish : callback of `Watch`.
    """
    import torch.distributed as dist

    watch = Watch(
        of.watch_store,
        rank=of.rank,
        hosts=[info.host for info in of.infos],
        pids=[info.pid for info in of.infos],
        timeout_s=timeout_s,
        finish=finish,
    )
    watch.start()
    try:
        yield watch
        watch.step("the end of the process groups")
        dist.destroy_process_group()  # under watch, since NCCL blocks until all ranks leave
    except BaseException as error:
        watch.fail(error)
        raise
    watch.close()


# --------------------------------------------------------------------------------------------------
# Several NCCL ranks on one GPU: exercises the code of a cluster; the times are synthetic.
#
# NCCL before 2.30 refuses two ranks on one GPU of one host, where NCCL_HOSTID identifies the host.
# Later versions have a switch. Transports that need one GPU per rank are disabled. The kernels are
# kept small, since the kernels of all ranks must run at the same time.


def recipe(rank: int, host: str, *, one_host: bool = True) -> dict[str, str]:
    """Return the environment of a rank that shares its GPU; it must be set before NCCL is used.

    Source: NCCL's documentation of its environment variables, and the check for duplicate GPUs in
    its init.cc.
    """
    variables = {
        "NCCL_HOSTID": f"{host}-rank{rank}",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        # Kernels of all ranks wait for each other, so all must run concurrently.
        "NCCL_MAX_CTAS": "2",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    if one_host:  # the loopback interface does not connect several hosts
        # Loopback works on a single host with any network configuration.
        variables["NCCL_SOCKET_IFNAME"] = "lo"
    return variables


def apply(rank: int, host: str) -> None:
    """Set the environment of a rank that shares its GPU; variables set by the user are kept."""
    # torchrun sets both variables; they are equal if all ranks are on one host.
    one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    for name, value in recipe(rank, host, one_host=one_host).items():
        os.environ.setdefault(name, value)


def sharing(infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Return the ranks of every GPU that is used by more than one, by GPU UUID."""
    ranks: dict[str, list[int]] = {}
    for info in infos:
        if info.device_uuid is not None:
            ranks.setdefault(info.device_uuid, []).append(info.rank)
    return {uuid: found for uuid, found in ranks.items() if len(found) > 1}


def refusal(infos: Sequence[RankInfo]) -> InputError:
    """Return the error for ranks that share a GPU without `--allow-shared-gpu`."""
    uuid, ranks = next(iter(sharing(infos).items()))
    host = next(info.host for info in infos if info.device_uuid == uuid)
    num_gpus = len({info.device_uuid for info in infos if info.host == host})
    return InputError(
        f"{len(ranks)} ranks ({format_list(ranks)}) share 1 GPU on host {host}",
        remedy=(
            f"Start at most {num_gpus} rank{'s' if num_gpus > 1 else ''} per host "
            f"(--nproc-per-node {num_gpus}), or add --allow-shared-gpu to test the "
            "code (marked synthetic)"
        ),
    )


# --------------------------------------------------------------------------------------------------
# The session: rank, device, process groups and orderly shutdown.


class Session:
    """State of one rank in a measurement with the others; created by `open_session`."""

    def __init__(
        self,
        *,
        rank: int,
        infos: Sequence[RankInfo],
        device: torch.device,
        backend: str,
        dtype: str,
        store: Any,
        watch_store: Any,
        timeout_s: float,
        synthetic: bool,
    ) -> None:
        self.rank = rank
        self.infos = tuple(infos)
        self.cluster = Cluster(hosts=tuple(info.host for info in infos))
        self.device = device
        self.backend = backend
        self.dtype_name = dtype
        self.synthetic = synthetic
        self.store = store
        self.watch_store = watch_store
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[Group, Any] = {}
        self._num_shared = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.world_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of every message."""
        return torch_dtype(self.dtype_name)

    def timer(self, cuda_graph: bool) -> Timer:
        """Return the timer of this device."""
        return make_timer(self.device, cuda_graph)

    def join(self, groups: Round) -> None:
        """Create missing process groups; every rank calls this with all groups.

        torch names a group by the number of groups created before it. If only its members created
        it (`use_local_synchronization`), these numbers would diverge after a round in which some
        ranks do not take part. The ranks would then wait for each other under different names.
        """
        import torch.distributed as dist

        for ranks in groups:
            if len(ranks) < self.world_size and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def group(self, ranks: Group) -> Any:
        """Return the process group of `ranks`; it contains this rank and `join` has created it."""
        import torch.distributed as dist

        return dist.group.WORLD if len(ranks) == self.world_size else self._groups[ranks]

    def separate_group(self) -> Any:
        """Return a new group of all ranks, whose operations queue separately from the default
        group."""
        import torch.distributed as dist

        return dist.new_group(timeout=self._timeout)

    def barrier(self) -> None:
        """Wait until all ranks reach this call."""
        import torch

        barrier(self.device)
        if self.device.type == "cuda":
            # NCCL's barrier returns to the host as soon as it is queued.
            torch.cuda.synchronize(self.device)

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the values of all ranks, shape (world, n); n is equal on all ranks."""
        import torch

        own = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        found = own.new_empty(self.world_size * own.numel())
        # A single tensor: a list of tensors costs one copy per rank.
        renamed("all_gather_single", "all_gather_into_tensor")(found, own)
        result: NDArray[np.float64] = found.cpu().numpy().reshape(self.world_size, -1)
        return result

    def largest(self, value: float) -> float:
        """Return the maximum of a value over all ranks."""
        return float(self.gather([value]).max())

    def share(self, key: str, text: str | None) -> str:
        """Return the text given by one rank; every rank calls this, the others with None."""
        self._num_shared += 1  # equal on all ranks, so that no earlier text is read
        numbered = f"{self._num_shared}/{key}"
        if text is not None:
            self.store.set(numbered, text)
        result: str = self.store.get(numbered).decode()
        return result

    def free_bytes(self) -> float:
        """Return the bytes that every rank may allocate for messages."""
        import torch

        if self.device.type == "cuda":
            # Ranks on one GPU divide its free memory; the number per GPU may vary.
            uuid = self.infos[self.rank].device_uuid
            num_sharing = sum(info.device_uuid == uuid for info in self.infos)
            # A tenth is reserved for NCCL's buffers.
            own = torch.cuda.mem_get_info(self.device)[0] * 0.9 / num_sharing
        else:
            # The ranks of a host share its memory.
            own = available_bytes() * 0.7 / self.cluster.gpus_per_node
        return float(self.gather([own]).min())

    def release_memory(self) -> None:
        """Release torch's cached device memory, since NCCL allocates its own."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def barrier(device: torch.device) -> None:
    """Block until all ranks arrive; on a GPU only later work of the stream waits."""
    import torch.distributed as dist

    dist.barrier(**({"device_ids": [device.index]} if device.type == "cuda" else {}))


def available_bytes() -> float:
    """Return the bytes that this host or its container can provide without swapping."""
    # Half of all memory if the system does not report free memory.
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            # meminfo counts in KiB.
            free = float(line.split()[1]) * 1024
    return min(free, container_bytes(Path("/sys/fs/cgroup")))


def container_bytes(folder: Path) -> float:
    """Return the free bytes of the control group in a folder; inf without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = float((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or cgroup v1
        return math.inf
    return math.inf if limit == "max" else max(0.0, float(limit) - used)


def choose_backend(backend: str) -> str:
    """Return the backend selected by `--backend` on this machine.

    Raises OptionError: NCCL is requested, but torch finds no CUDA device.
    """
    import torch

    cuda = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    if backend == "auto":
        return "nccl" if cuda else "gloo"
    if backend == "nccl" and not cuda:
        raise OptionError(
            "--backend nccl: torch finds no CUDA device",
            remedy="Use --backend gloo, or install a torch with CUDA",
        )
    return backend


def open_session(options: RankOptions, *, cuda_graph: bool = False) -> Session:
    """Return the session of this rank after the rendezvous of all ranks.

    cuda_graph : True if operations will be captured in CUDA graphs.

    Raises InputError: ranks did not meet, differ in software or devices, or share a GPU without
    `--allow-shared-gpu`. Raises OptionError: the backend is not available here, or graphs are
    captured without NCCL.
    """
    import torch

    backend = choose_backend(options.backend)
    if cuda_graph and backend != "nccl":
        raise OptionError("--cuda-graph needs --backend nccl, but --backend is gloo")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        use_rank_threads()

    met = meet("autopar", device, options.timeout_s)
    check_alike(met.infos)
    shared = sharing(met.infos)
    if shared:
        if not options.allow_shared_gpu:
            raise refusal(met.infos)
        apply(met.rank, met.infos[met.rank].host)
    # Longer than the timeout of the watch, which reports the missing ranks.
    timeout_s = options.timeout_s + 5
    met.open_groups(backend, timeout_s)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bf16" if backend == "nccl" else "fp32"
    return Session(
        rank=met.rank,
        infos=met.infos,
        device=device,
        backend=backend,
        dtype=dtype,
        store=met.store,
        watch_store=met.watch_store,
        timeout_s=timeout_s,
        synthetic=bool(shared),
    )
