"""Who takes part in a measurement and on what: recorded with every run, and compared.

A number without its circumstances cannot be compared with another one. `METADATA` names every
circumstance that a run records, and says which of them make two runs incomparable.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from autopar import __version__
from autopar.errors import InputError, InstallError
from profiler.hardware.options import HardwareOptions
from profiler.metadata import ENVIRONMENT_PREFIX, METADATA, Metadata, comparable
from profiler.system import cpu_name, driver_version, first_line, gpu_clocks, nvidia_smi

__all__ = [
    "METADATA",
    "RankInfo",
    "check_alike",
    "check_torch_version",
    "collect",
    "comparable",
    "machine_metadata",
    "recorded_environment",
    "require_torch",
    "run_metadata",
    "summarize_hosts",
]

_OLDEST_TORCH = (2, 6)
_REMEDY = "`pip install 'autopar[profile]'` installs one"
_ALIKE = {"torch": "torch", "cuda": "CUDA", "nccl": "NCCL", "device": "the device"}
"""Fields of `RankInfo` in which all ranks must agree, and their names."""
_VARIABLES = re.compile(
    r"((TORCH_)?NCCL|GLOO|CUDA|OMP|UCX|FI|CUBLAS(LT)?|CUDNN|PYTORCH|TORCH_(CUDNN|CUBLAS|BLAS|ALLOW))"
    r"_[A-Z0-9_]+|NVIDIA_TF32_OVERRIDE"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY$|_AUTH")
_SECRET_VALUE = re.compile(
    r"\w://[^/\s]*:[^/\s]*@|(?<![\w-])(?=\w*\d)(?=\w*[A-Za-z])\w{32,}(?![\w-])"
)
_HIDDEN = "(hidden)"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank of a run: its process, its host, its device and its software."""

    rank: int
    local_rank: int
    host: str
    machine: str | None
    """Identity of the running kernel: tells apart machines that have the same host name."""
    pid: int
    device: str
    """Name of the GPU, or `cpu`."""
    device_uuid: str | None
    """None on a CPU."""
    memory_bytes: int | None
    """Memory of the GPU; None on a CPU."""
    torch: str
    cuda: str | None
    """CUDA version that torch was built with."""
    nccl: str | None
    """None on a CPU."""
    driver: str | None
    python: str
    cpu: str
    num_cpus: int
    """CPUs that the process may use."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values of JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return what `to_dict` made."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def require_torch() -> None:
    """Check that torch can be used.

    Raises
    ------
    InstallError: it cannot be imported, or is too old.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise InstallError(f"torch cannot be imported ({error}); {_REMEDY}") from None
    check_torch_version(str(torch.__version__))
    if not dist.is_available():
        raise InstallError(f"this torch was built without torch.distributed; {_REMEDY}")


def check_torch_version(version: str) -> None:
    """Check that a version of torch, such as 2.7.1+cu126, is one this code works with.

    Raises
    ------
    InstallError: it is older.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise InstallError(f"torch {version} is too old, {oldest} is needed; {_REMEDY}")


def collect(rank: int, local_rank: int, device: Any) -> RankInfo:
    """Return what this process knows of itself.

    Parameters
    ----------
    device : a torch device, or its text such as `cpu` or `cuda:1`.
    """
    import torch

    name, uuid, memory_bytes, nccl, driver = "cpu", None, None, None, None
    if str(device).startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = str(properties.name), int(properties.total_memory)
        uuid = str(properties.uuid)
        driver = driver_version()
        if torch.distributed.is_nccl_available():
            nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return RankInfo(
        rank=rank,
        local_rank=local_rank,
        host=socket.gethostname(),
        machine=first_line(Path("/proc/sys/kernel/random/boot_id")),
        pid=os.getpid(),
        device=name,
        device_uuid=uuid,
        memory_bytes=memory_bytes,
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        nccl=nccl,
        driver=driver,
        python=platform.python_version(),
        cpu=cpu_name(),
        num_cpus=len(os.sched_getaffinity(0)),
    )


def check_alike(infos: Sequence[RankInfo]) -> None:
    """Check that the ranks, in their order, make up a cluster of equal hosts and software.

    Raises
    ------
    InputError: ranks differ in torch, CUDA, NCCL or device, hosts share a name or have different
        numbers of ranks, or the ranks of a host do not follow one another.
    """
    first = infos[0]
    machines: dict[str, RankInfo] = {}
    for info in infos:
        for field, name in _ALIKE.items():
            own, others = getattr(info, field), getattr(first, field)
            if own != others:
                raise InputError(
                    f"{name} differs between ranks: {_on(info)} has {own or 'none'}, {_on(first)} "
                    f"has {others or 'none'}; use the same on every host"
                )
        same_name = machines.setdefault(info.host, info)
        if info.machine is not None and same_name.machine not in (None, info.machine):
            raise InputError(
                f"two machines are called {info.host} (those of rank {same_name.rank} and rank "
                f"{info.rank}), and hosts are told apart by their names; give each its own"
            )
    counts = Counter(info.host for info in infos)
    if len(set(counts.values())) > 1:
        (host, num), *others_num = counts.items()
        other, other_num = next((h, n) for h, n in others_num if n != num)
        total = " + ".join(map(str, list(counts.values())[:8])) + (" + ..." * (len(counts) > 8))
        raise InputError(
            f"host {host} has {num} rank{'s' * (num != 1)} and host {other} has {other_num}: "
            f"{total} = {len(infos)} is not {len(counts)} * {num}; start torchrun with the same "
            "--nproc-per-node on every host"
        )
    blocks = [host for host, _ in groupby(info.host for info in infos)]
    if len(blocks) != len(counts):
        again = next(host for i, host in enumerate(blocks) if host in blocks[:i])
        ranks = [info.rank for info in infos if info.host == again]
        raise InputError(
            f"the ranks of host {again} ({', '.join(map(str, ranks[:8]))}) do not follow one "
            f"another, expected {ranks[0]} to {ranks[0] + len(ranks) - 1}; start one torchrun per "
            "host, and give them their --node-rank by host"
        )


def run_metadata(
    infos: Sequence[RankInfo],
    argv: Sequence[str],
    backend: str,
    options: HardwareOptions,
    *,
    dtype: str | None = None,
) -> Metadata:
    """Return the circumstances of a run, by the keys of `METADATA`; called on rank 0.

    Parameters
    ----------
    argv : arguments of the command.
    backend, dtype : those in use, which `auto` became.
    """
    command = shlex.join(["torchrun", "...", "-m", "profiler.hardware", *argv])
    return {
        **machine_metadata(infos, command),
        "backend": backend,
        "dtype": dtype or options.dtype,
        "isolated": options.isolated,
        "cuda_graph": options.cuda_graph,
        "reference_bytes": options.reference_bytes,
    }


def machine_metadata(infos: Sequence[RankInfo], command: str) -> Metadata:
    """Return the circumstances that any run has: its time, command, machine and software."""
    first = infos[0]
    counts = Counter(info.host for info in infos)
    on_gpu = first.device_uuid is not None
    per_gpu = Counter(info.device_uuid for info in infos).values() if on_gpu else ()
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "autopar": __version__,
        "python": first.python,
        "torch": first.torch,
        "cuda": first.cuda,
        "nccl": first.nccl,
        "driver": first.driver,
        "world_size": len(infos),
        "num_nodes": len(counts),
        "gpus_per_node": len(infos) // len(counts),
        "ranks_per_gpu": max(per_gpu, default=None),
        "hosts": summarize_hosts(list(counts)),
        "device": first.device if on_gpu else f"cpu ({first.cpu})",
        "memory_bytes": first.memory_bytes,
        "cpu": first.cpu,
        "num_cpus": first.num_cpus,
        "topology": nvidia_smi("topo", "-m") if on_gpu else None,
        **gpu_clocks(first.device_uuid),
        **{ENVIRONMENT_PREFIX + k: v for k, v in recorded_environment(os.environ).items()},
    }


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that communication and compute libraries read, without secrets."""
    found = {}
    for name, value in sorted(environment.items()):
        if _VARIABLES.fullmatch(name):
            is_secret = _SECRET_NAME.search(name) or _SECRET_VALUE.search(value)
            found[name] = _HIDDEN if is_secret else value
    return found


def summarize_hosts(hosts: Sequence[str]) -> str:
    """Return host names as a comma list; long ones as `node[001-128]` or with their number."""
    if len(hosts) <= 4:
        return ",".join(hosts)
    parts = [re.fullmatch(r"(.*?)(\d+)(\D*)", host) for host in hosts]
    if all(parts):
        split = [part.groups() for part in parts if part]
        prefix, start, suffix = split[0]
        expected = [f"{int(start) + i:0{len(start)}d}" for i in range(len(hosts))]
        if split == [(prefix, number, suffix) for number in expected]:
            return f"{prefix}[{start}-{expected[-1]}]{suffix}"
    return ",".join(hosts[:4]) + f",... ({len(hosts)} hosts)"


def _on(info: RankInfo) -> str:
    return f"rank {info.rank} on host {info.host}"
