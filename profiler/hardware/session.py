"""The processes of one measuring run: who they are, their device, and their groups."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import OptionError
from profiler.environment import RankInfo, check_alike, collect
from profiler.hardware import shared_gpu
from profiler.hardware.cells import Cluster, Group, Round
from profiler.hardware.meeting import connect, introduce
from profiler.hardware.options import HardwareOptions
from profiler.timers import Timer, make_timer

if TYPE_CHECKING:
    import torch

__all__ = ["Session", "available_bytes", "claim_errors", "container_bytes", "open_session"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


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
        import torch

        result: torch.dtype = getattr(torch, _DTYPES[self.dtype_name])
        return result

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
        import torch.distributed as dist

        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
            torch.cuda.synchronize(self.device)
        else:
            dist.barrier()

    def gather(self, values: Sequence[float]) -> NDArray[np.float64]:
        """Return the values of all ranks, shape (world, n); n is the same on every rank."""
        import torch
        import torch.distributed as dist

        own = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        found = own.new_empty(self.world_size * own.numel())
        # one tensor: a list of them costs a copy for every rank
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(found, own)
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
            sharing = max(1, len(self.infos) // max(1, len({i.device_uuid for i in self.infos})))
            own = torch.cuda.mem_get_info(self.device)[0] * 0.9 / sharing
        else:
            own = available_bytes() * 0.7 / self.cluster.gpus_per_node
        return float(self.gather([own]).min())

    def release_memory(self) -> None:
        """Give back what torch keeps of freed tensors: NCCL allocates for itself."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Leave the process groups."""
        import torch.distributed as dist

        dist.destroy_process_group()


def available_bytes() -> float:
    """Return the memory that this host, or its container, can give without swapping, in bytes."""
    free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
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


def _choose_backend(options: HardwareOptions) -> str:
    import torch

    cuda = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    if options.backend == "auto":
        return "nccl" if cuda else "gloo"
    if options.backend == "nccl" and not cuda:
        raise OptionError(
            "--backend nccl: torch finds no CUDA device here; use --backend gloo, or install a "
            "torch with CUDA"
        )
    return options.backend


def claim_errors(environment: MutableMapping[str, str]) -> None:
    """Keep torch from ending this process when NCCL fails: our watch decides, and says why.

    torchrun sets the variable in all of its ranks, so that a default would have no effect.
    """
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


def open_session(options: HardwareOptions) -> Session:
    """Return the session of this rank, once all ranks have met.

    Raises
    ------
    InputError: ranks did not meet, differ in software or devices, or share a GPU unasked.
    OptionError: the backend does not exist here.
    """
    import torch
    import torch.distributed as dist

    backend = _choose_backend(options)
    if options.cuda_graph and backend != "nccl":
        raise OptionError("--cuda-graph needs --backend nccl, and this run uses gloo")
    timeout = timedelta(seconds=options.timeout_s)
    base, other, rank, world = connect(timeout)
    local_rank = int(os.environ["LOCAL_RANK"])
    if backend == "nccl":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # ranks share the cores; more threads only disturb each other

    own = collect(rank, local_rank, device)
    infos, start = introduce(dist.PrefixStore("autopar", base), own, world, timeout)
    prefix = f"autopar/{start}"
    check_alike(infos)
    shared = shared_gpu.sharing(infos)
    if shared:
        if not options.allow_shared_gpu:
            raise shared_gpu.refusal(infos)
        shared_gpu.apply(rank, infos[rank].host)
    claim_errors(os.environ)
    # Without device_id, which would bind the ranks to one NCCL communicator from which torch splits
    # those of groups, a collective of all ranks: each group has one of its own, made on first use.
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"{prefix}/groups", base),
        rank=rank,
        world_size=world,
        timeout=timeout + timedelta(seconds=5),
    )
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bf16" if backend == "nccl" else "fp32"
    return Session(
        rank=rank,
        infos=infos,
        device=device,
        backend=backend,
        dtype=dtype,
        store=dist.PrefixStore(prefix, base),
        watch_store=dist.PrefixStore(f"{prefix}/watch", other),
        timeout_s=options.timeout_s + 5,
        synthetic=bool(shared),
    )
