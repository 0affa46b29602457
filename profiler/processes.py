"""The processes of one measuring run: who they are, their device, and their groups."""

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
from profiler.environment import RankInfo, check_alike, collect
from profiler.hardware.options import Cluster, Group, Round
from profiler.measure import Timer, make_timer, renamed, torch_dtype
from profiler.options import RankOptions
from profiler.watch import Trouble, Watch

if TYPE_CHECKING:
    import torch

# --------------------------------------------------------------------------------------------------
# How the ranks of a run find each other: the launcher's store, and what each says of itself.


_POLL_S = 0.05
_MARGIN_S = 10.0
"""The others wait so much longer than rank 0, which says who is missing."""
_REMEDY = (
    "start torchrun on every node, with the same --nnodes and --rdzv-endpoint, or raise --timeout"
)


def connect(timeout: timedelta) -> tuple[Any, Any, int, int]:
    """Return two connections to the launcher's store, the rank and the world size.

    Two, because a wait on one of them would keep the watching thread from the other.

    Raises
    ------
    InputError: there is no store.
    """
    from torch.distributed.rendezvous import rendezvous

    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        # torch before 2.8 cannot clone, but connect again
        again = getattr(store, "clone", lambda: next(rendezvous("env://", timeout=timeout))[0])
        return store, again(), rank, world
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"the ranks cannot meet in the launcher's store at {where} ({reason}); {_REMEDY}"
        ) from None


def introduce(
    store: Any, own: RankInfo, world: int, timeout: timedelta
) -> tuple[list[RankInfo], str]:
    """Return what every rank says of itself, and a name that only this start of the ranks has.

    A launcher that starts its ranks again keeps the store, with all that the earlier ones wrote,
    and its count of restarts differs between hosts. So rank 0 names the start, and the others take
    a name for valid once they find themselves under it.

    Raises
    ------
    InputError: ranks are missing.
    """
    token = secrets.token_hex(8)
    said = json.dumps({**own.to_dict(), "token": token})
    if own.rank == 0:
        # before its name: whoever reads the name finds rank 0 there
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
                # an earlier start of as many ranks may have said as much: the token tells
                if own.rank < len(entries) and entries[own.rank]["token"] == token:
                    return [RankInfo.from_dict(entry) for entry in entries], start
        time.sleep(_POLL_S)
    raise InputError(
        f"rank 0 of {world} did not start within {timeout.total_seconds() + _MARGIN_S:g} s; "
        f"{_REMEDY}"
    )


def _collected(store: Any, start: str, world: int, timeout: timedelta) -> list[RankInfo]:
    """Return what all ranks said under the name of a start, and tell them."""
    keys = [f"{start}/info/{rank}" for rank in range(world)]
    try:
        store.wait(keys, timeout)
    except Exception:  # of different types, by store and by version
        absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise InputError(
            f"rank{'s' if len(absent) > 1 else ''} {format_list(absent)} of {world} did not start "
            f"within {timeout.total_seconds():g} s; {_REMEDY}"
        ) from None
    # once for all, so that the others ask one question each
    entries = [json.loads(store.get(key)) for key in keys]
    store.set(f"{start}/infos", json.dumps(entries))
    return [RankInfo.from_dict(entry) for entry in entries]


class Meeting(Record):
    """The ranks of one start, and the stores that they share."""

    rank: int
    infos: tuple[RankInfo, ...]
    store: Any
    watch_store: Any
    """Of another connection, so that the watch never waits for this rank."""
    groups_store: Any

    def open_groups(self, backend: str, timeout_s: float) -> None:
        """Make the process group of all ranks."""
        import torch.distributed as dist

        claim_errors(os.environ)
        # Without device_id, which would bind the ranks to one NCCL communicator from which torch
        # splits those of groups, a collective of all ranks: each group has one of its own, made on
        # first use.
        dist.init_process_group(
            backend,
            store=self.groups_store,
            rank=self.rank,
            world_size=len(self.infos),
            timeout=timedelta(seconds=timeout_s),
        )


def claim_errors(environment: MutableMapping[str, str]) -> None:
    """Keep torch from ending this process when NCCL fails: our watch decides, and says why.

    torchrun sets the variable in all of its ranks, so that a default would have no effect.
    """
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def meet(name: str, device: torch.device, timeout_s: float) -> Meeting:
    """Return this rank's meeting with all others that torchrun started.

    name : of what they do, in front of their keys in the launcher's store.

    Raises
    ------
    InputError: there is no store, or ranks are missing.
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
    """A meeting, or a session."""

    @property
    def rank(self) -> int: ...
    @property
    def infos(self) -> Sequence[RankInfo]: ...
    @property
    def watch_store(self) -> Any: ...


@contextmanager
def watched(of: _Met, *, timeout_s: float, finish: Callable[[Trouble], None]) -> Iterator[Watch]:
    """Watch this rank until all have left the process groups; trouble ends the process.

    timeout_s : no step of the watch takes longer; finish : as `Watch`.
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
        dist.destroy_process_group()  # under watch: NCCL lets nobody leave before all do
    except BaseException as error:
        watch.fail(error)
        raise
    watch.close()


# --------------------------------------------------------------------------------------------------
# Several NCCL ranks on one GPU: code runs as on a cluster, and its times describe no machine.
#
# NCCL before 2.30 refuses two ranks on one GPU of one host, which it tells by NCCL_HOSTID; later
# versions have a switch for it. Transports that need a GPU of their own are turned off, and the
# kernels are kept small, since the kernels of all ranks have to run at the same time.


def recipe(rank: int, host: str, *, one_host: bool = True) -> dict[str, str]:
    """Return the environment of a rank that shares its GPU, to be set before NCCL is used.

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
        # kernels of all ranks wait for each other, so all must run at once
        "NCCL_MAX_CTAS": "2",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    if one_host:  # the ranks of several hosts do not meet on the loopback interface
        # they meet on one host, whatever interfaces it has
        variables["NCCL_SOCKET_IFNAME"] = "lo"
    return variables


def apply(rank: int, host: str) -> None:
    """Set the environment of a rank that shares its GPU; what the user set stays as it is."""
    # torchrun sets both; they are equal where all ranks are on one host
    one_host = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
    for name, value in recipe(rank, host, one_host=one_host).items():
        os.environ.setdefault(name, value)


def sharing(infos: Sequence[RankInfo]) -> dict[str, list[int]]:
    """Return the ranks on every GPU that has more than one, by the GPU's uuid."""
    ranks: dict[str, list[int]] = {}
    for info in infos:
        if info.device_uuid is not None:
            ranks.setdefault(info.device_uuid, []).append(info.rank)
    return {uuid: found for uuid, found in ranks.items() if len(found) > 1}


def refusal(infos: Sequence[RankInfo]) -> InputError:
    """Return the error for ranks that share a GPU without being asked to."""
    uuid, ranks = next(iter(sharing(infos).items()))
    host = next(info.host for info in infos if info.device_uuid == uuid)
    num_gpus = len({info.device_uuid for info in infos if info.host == host})
    return InputError(
        f"{len(ranks)} ranks ({format_list(ranks)}) share 1 GPU on host {host}; such timings "
        f"describe no machine; start at most {num_gpus} rank{'s' if num_gpus > 1 else ''} per host "
        f"(--nproc-per-node {num_gpus}), or add --allow-shared-gpu to exercise the code, marked "
        "synthetic"
    )


# --------------------------------------------------------------------------------------------------
# The session: this rank, its device, its groups, and an end in order.


class Session:
    """What one rank needs to measure with the others; made by `open_session`."""

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
        """Make the process groups that do not exist yet; every rank calls this, with all of them.

        torch names a group by the number of groups before it. Were only its members to make it
        (`use_local_synchronization`), their numbers would differ after a round in which some ranks
        only watch, and they would wait for each other under different names.
        """
        import torch.distributed as dist

        for ranks in groups:
            if len(ranks) < self.world_size and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)

    def group(self, ranks: Group) -> Any:
        """Return the process group of `ranks`, which this rank is one of and `join` has made."""
        import torch.distributed as dist

        return dist.group.WORLD if len(ranks) == self.world_size else self._groups[ranks]

    def separate_group(self) -> Any:
        """Return a new group of all ranks, whose operations queue beside the usual one's."""
        import torch.distributed as dist

        return dist.new_group(timeout=self._timeout)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        import torch

        barrier(self.device)
        if self.device.type == "cuda":
            # NCCL's barrier is over for the host when it is queued
            torch.cuda.synchronize(self.device)

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the values of all ranks, shape (world, n); n is the same on every rank."""
        import torch

        own = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        found = own.new_empty(self.world_size * own.numel())
        # one tensor: a list of them costs a copy for every rank
        renamed("all_gather_single", "all_gather_into_tensor")(found, own)
        result: NDArray[np.float64] = found.cpu().numpy().reshape(self.world_size, -1)
        return result

    def largest(self, value: float) -> float:
        """Return the largest value of all ranks."""
        return float(self.gather([value]).max())

    def share(self, key: str, text: str | None) -> str:
        """Return the text that one rank gives; every rank calls this, the others with None."""
        self._num_shared += 1  # the same on every rank: no text of an earlier call is read
        numbered = f"{self._num_shared}/{key}"
        if text is not None:
            self.store.set(numbered, text)
        result: str = self.store.get(numbered).decode()
        return result

    def free_bytes(self) -> float:
        """Return what every rank may allocate for messages, in bytes."""
        import torch

        if self.device.type == "cuda":
            # ranks of one GPU divide what is free of it; another GPU may have more or fewer
            uuid = self.infos[self.rank].device_uuid
            num_sharing = sum(info.device_uuid == uuid for info in self.infos)
            # a tenth is left for NCCL's buffers
            own = torch.cuda.mem_get_info(self.device)[0] * 0.9 / num_sharing
        else:
            # the ranks of a host share its memory
            own = available_bytes() * 0.7 / self.cluster.gpus_per_node
        return float(self.gather([own]).min())

    def release_memory(self) -> None:
        """Give back what torch keeps of freed tensors: NCCL allocates for itself."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def barrier(device: torch.device) -> None:
    """Let all ranks wait for each other; on a GPU what is queued behind it waits."""
    import torch.distributed as dist

    dist.barrier(**({"device_ids": [device.index]} if device.type == "cuda" else {}))


def available_bytes() -> float:
    """Return the memory that this host, or its container, can give without swapping, in bytes."""
    # half of all, where the system does not say what is free
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            # meminfo counts KiB
            free = float(line.split()[1]) * 1024
    return min(free, container_bytes(Path("/sys/fs/cgroup")))


def container_bytes(folder: Path) -> float:
    """Return what the control group in a folder leaves free, in bytes; inf without a limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = float((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or the older kind
        return math.inf
    return math.inf if limit == "max" else max(0.0, float(limit) - used)


def choose_backend(backend: str) -> str:
    """Return the backend that `--backend` means here.

    Raises
    ------
    OptionError: it needs a GPU, and torch finds none.
    """
    import torch

    cuda = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    if backend == "auto":
        return "nccl" if cuda else "gloo"
    if backend == "nccl" and not cuda:
        raise OptionError(
            "--backend nccl: torch finds no CUDA device here; use --backend gloo, or install a "
            "torch with CUDA"
        )
    return backend


def open_session(options: RankOptions, *, cuda_graph: bool = False) -> Session:
    """Return the session of this rank, once all ranks have met.

    cuda_graph : whether operations will be captured in graphs.

    Raises
    ------
    InputError: ranks did not meet, differ in software or devices, or share a GPU unasked.
    OptionError: the backend does not exist here.
    """
    import torch

    backend = choose_backend(options.backend)
    if cuda_graph and backend != "nccl":
        raise OptionError("--cuda-graph needs --backend nccl, and this run uses gloo")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # ranks share the cores; more threads only disturb each other

    met = meet("autopar", device, options.timeout_s)
    check_alike(met.infos)
    shared = sharing(met.infos)
    if shared:
        if not options.allow_shared_gpu:
            raise refusal(met.infos)
        apply(met.rank, met.infos[met.rank].host)
    # longer than our watch, which says who is missing
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
