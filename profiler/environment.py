"""Environment metadata of a measuring run: ranks, device, software and environment variables.

`METADATA` lists every entry that a run records, and which entries must be equal in two runs before
their numbers can be compared.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, Self

from msgspec.structs import asdict

from autopar import __version__
from autopar.errors import InputError, InstallError
from autopar.records import Record
from autopar.units import format_list

# --------------------------------------------------------------------------------------------------
# Metadata of a run, and the entries that make two runs incomparable.
#
# A run may also record environment variables as `env.NAME`. A key that is absent from both runs
# counts as equal, so that runs of an older version stay comparable with each other.


Metadata = dict[str, str | int | float | bool | None]

Compared = Literal["always", "resume", "never"]
"""Condition under which two runs must agree in a row.

- `always`: for any comparison, since the runs otherwise measured different things.
- `resume`: only where the cells of both runs share a file. Software versions are of this kind: the
  effect of a new driver or NCCL is a reason to compare two runs, not to refuse it.
- `never`: no agreement needed.
"""

ENVIRONMENT_PREFIX = "env."
_TUNING = re.compile(
    r"env\.((NCCL|GLOO|UCX|FI)_(?!DEBUG|HOSTID).*|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|TORCH_CUDNN_SDPA_\w+)"
)
"""Environment variables that change times; compared as `resume`."""


class MetadataRow(Record):
    """One metadata entry: key, meaning, unit or format, and the condition of equality."""

    key: str
    meaning: str
    unit: str = "text"
    compared: Compared = "never"


METADATA: tuple[MetadataRow, ...] = (
    MetadataRow(key="time_utc", meaning="beginning of the run", unit="ISO 8601, UTC"),
    MetadataRow(key="command", meaning="command line", unit="shell words"),
    MetadataRow(key="autopar", meaning="version of this tool"),
    MetadataRow(key="python", meaning="version of Python"),
    MetadataRow(key="torch", meaning="version of torch", compared="resume"),
    MetadataRow(key="cuda", meaning="CUDA version that torch was built with", compared="resume"),
    MetadataRow(key="nccl", meaning="version of NCCL", compared="resume"),
    MetadataRow(key="driver", meaning="version of the GPU driver", compared="resume"),
    MetadataRow(key="backend", meaning="communication library", compared="always"),
    MetadataRow(key="dtype", meaning="element type of the messages", compared="always"),
    # Groups that run at the same time share links; a single group does not.
    MetadataRow(
        key="isolated", meaning="one group at a time", unit="true or false", compared="always"
    ),
    MetadataRow(
        key="cuda_graph",
        meaning="launched from CUDA graphs",
        unit="true or false",
        compared="always",
    ),
    # Bandwidths in the hardware files are those of this message size.
    MetadataRow(key="reference_bytes", meaning="reference size", unit="bytes", compared="resume"),
    MetadataRow(key="world_size", meaning="number of ranks", unit="count", compared="always"),
    MetadataRow(key="num_nodes", meaning="number of hosts", unit="count", compared="always"),
    MetadataRow(key="gpus_per_node", meaning="ranks per host", unit="count", compared="always"),
    MetadataRow(
        key="ranks_per_gpu", meaning="most ranks on one GPU", unit="count", compared="always"
    ),
    # Not compared: a scheduler assigns different hosts of one kind to every job.
    MetadataRow(key="hosts", meaning="hosts, by labels or names", unit="comma list"),
    MetadataRow(key="device", meaning="device of every rank", compared="always"),
    MetadataRow(key="memory_bytes", meaning="memory of one GPU", unit="bytes"),
    MetadataRow(key="cpu", meaning="CPU model of rank 0's host"),
    MetadataRow(
        key="num_cpus",
        meaning="CPUs that a process may use",
        unit="count",
        compared="resume",
    ),
    MetadataRow(key="threads", meaning="threads of a CPU", unit="count", compared="resume"),
    MetadataRow(key="topology", meaning="links between the GPUs of rank 0's host", unit="table"),
    MetadataRow(key="sm_clock_hz", meaning="clock of the GPU's multiprocessors", unit="Hz"),
    MetadataRow(key="sm_clock_max_hz", meaning="highest such clock", unit="Hz"),
    MetadataRow(key="memory_clock_hz", meaning="clock of the GPU's memory", unit="Hz"),
    MetadataRow(key="power_limit_w", meaning="power limit of the GPU", unit="W"),
    MetadataRow(key="persistence", meaning="persistence mode of the driver"),
)
"""All metadata entries except environment variables, in display order."""


def comparable(
    a: Mapping[str, object],
    b: Mapping[str, object],
    *,
    resume: bool = False,
    own: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the differences that make two runs incomparable, one clause each; empty if none.

    resume : True to apply the stricter condition for cells that share a file.
    own : further keys that must be equal, mapped to their meaning.
    """
    rows = dict(own or {})
    rows |= {
        row.key: row.meaning
        for row in METADATA
        if row.compared == "always" or (resume and row.compared == "resume")
    }
    found = [
        _clause(f"{meaning} ({key})", a, b, key)
        for key, meaning in rows.items()
        if a.get(key) != b.get(key)
    ]
    if resume:
        found += [
            _clause(f"environment variable {key.removeprefix(ENVIRONMENT_PREFIX)}", a, b, key)
            for key in sorted({*a, *b})
            if _TUNING.fullmatch(key) and not _alike(a.get(key), b.get(key))
        ]
    return found


def _alike(a: object, b: object) -> bool:
    """Return True if two values of a variable may be equal, although one may be hidden."""
    unknown = {a, b} & {_SET, _HIDDEN}
    return a == b or (bool(unknown) and None not in (a, b))


def _clause(what: str, a: Mapping[str, object], b: Mapping[str, object], key: str) -> str:
    return f"{what}: {_text(a.get(key))} and {_text(b.get(key))}"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --------------------------------------------------------------------------------------------------
# Machine data from the operating system and nvidia-smi; None where they give no value.


_TOOL_TIMEOUT_S = 10.0  # without persistence mode, nvidia-smi has to initialise the driver first


def gpu_clocks(uuid: str | None) -> Metadata:
    """Return clocks (Hz), power limit (W) and persistence mode of a GPU; None where unknown."""
    keys = ("sm_clock_hz", "sm_clock_max_hz", "memory_clock_hz", "power_limit_w", "persistence")
    query = "clocks.current.sm,clocks.max.sm,clocks.current.memory,power.limit,persistence_mode"
    found: Metadata = dict.fromkeys(keys)
    if uuid is None:
        return found
    # torch omits the prefix that nvidia-smi requires.
    selected = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    text = nvidia_smi(f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", selected)
    values = [part.strip() for part in (text or "").split(",")]
    if len(values) == len(keys):
        for key, value in zip(keys, values, strict=True):
            # nvidia-smi prints words such as [N/A] for unsupported values.
            if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):
                # nvidia-smi prints clocks in MHz.
                found[key] = float(value) * (1e6 if key.endswith("_hz") else 1.0)
            elif key == "persistence":
                found[key] = value
    return found


def driver_version() -> str | None:
    """Return the version of the GPU driver, or None if there is no driver."""
    # Reading the file is immediate; nvidia-smi may have to initialise the driver.
    known = first_line(Path("/sys/module/nvidia/version"))
    text = known or nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text else None


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi, or None if it is absent, fails or prints nothing."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cpu_name() -> str:
    """Return the model of this machine's CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def first_line(path: Path) -> str | None:
    """Return the first line of a file, or None if it is absent or empty."""
    try:
        return path.read_text(encoding="ascii").split("\n")[0].strip() or None
    except (OSError, UnicodeDecodeError):
        return None


# --------------------------------------------------------------------------------------------------
# Machine, device and software of this process.


_OLDEST_TORCH = (2, 6)
_REMEDY = "Run `pip install 'autopar[profile]'`"
THREADS = "OMP_NUM_THREADS"
_ALIKE = {
    "torch": "torch",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "device": "the device",
    "threads": "the number of threads",
}
"""`RankInfo` fields that must be equal on all ranks, mapped to their display names."""
_VARIABLES = re.compile(
    r"((TORCH_)?NCCL|GLOO|CUDA|OMP|UCX|FI|CUBLAS(LT)?|CUDNN|PYTORCH|TORCH_(CUDNN|CUBLAS|BLAS|ALLOW))"
    r"_[A-Z0-9_]+|NVIDIA_TF32_OVERRIDE"
)
# An allow-list, since no list of secret variables could be complete.
_HARMLESS = frozenset(
    [
        "CUBLASLT_WORKSPACE_SIZE",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "FI_EFA_FORK_SAFE",
        "FI_EFA_USE_DEVICE_RDMA",
        "FI_PROVIDER",
        "NCCL_ALGO",
        "NCCL_BUFFSIZE",
        "NCCL_CHECKS_DISABLE",
        "NCCL_COLLNET_ENABLE",
        "NCCL_CROSS_NIC",
        "NCCL_CUMEM_ENABLE",
        "NCCL_DEBUG",
        "NCCL_DMABUF_ENABLE",
        "NCCL_GRAPH_MIXING_SUPPORT",
        "NCCL_IB_ADAPTIVE_ROUTING",
        "NCCL_IB_DISABLE",
        "NCCL_IB_PCI_RELAXED_ORDERING",
        "NCCL_IB_QPS_PER_CONNECTION",
        "NCCL_IB_RETRY_CNT",
        "NCCL_IB_SL",
        "NCCL_IB_SPLIT_DATA_ON_QPS",
        "NCCL_IB_TC",
        "NCCL_IB_TIMEOUT",
        "NCCL_LAUNCH_MODE",
        "NCCL_MAX_CTAS",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MAX_P2P_NCHANNELS",
        "NCCL_MIN_CTAS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_MIN_P2P_NCHANNELS",
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NET_GDR_READ",
        "NCCL_NSOCKS_PERTHREAD",
        "NCCL_NTHREADS",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_P2P_LEVEL",
        "NCCL_P2P_PXN_LEVEL",
        "NCCL_PROTO",
        "NCCL_PXN_DISABLE",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_NTHREADS",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_DYNAMIC",
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_WAIT_POLICY",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "TORCH_BLAS_PREFER_CUBLASLT",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_NCCL_HIGH_PRIORITY",
        "UCX_TLS",
    ]
)
"""Variables whose values are numbers or known words."""
_WORDS = re.compile(r"[A-Za-z0-9_.,:;^+=\[\]-]{1,100}")
_LONG = re.compile(r"(?=\w*[0-9])(?=\w*[A-Za-z])\w{32,}")
"""Pattern of a value that looks like a secret, for variables of any name."""
_SET, _HIDDEN = "(set)", "(hidden)"
"""Placeholders of values that are not stored; earlier versions wrote `(hidden)` for secrets."""
_LABEL_DIGITS = 4


class RankInfo(Record):
    """One rank of a run: process, host, device and software."""

    rank: int
    local_rank: int
    host: str
    machine: str | None
    """Boot id of the kernel; distinguishes machines that share a host name."""
    pid: int
    device: str
    """Name of the GPU, or `cpu`."""
    device_uuid: str | None
    """UUID of the GPU; None on a CPU."""
    memory_bytes: int | None
    """Memory of the GPU, bytes; None on a CPU."""
    torch: str
    cuda: str | None
    """CUDA version that torch was built with."""
    nccl: str | None
    """NCCL version; None on a CPU."""
    driver: str | None
    python: str
    cpu: str
    num_cpus: int
    """Number of CPUs that the process may use."""
    threads: int | None
    """Threads of one operation on a CPU; None on a GPU."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the `RankInfo` of a dict written by `to_dict`."""
        return cls(**{name: data[name] for name in cls.__struct_fields__})


def require_torch() -> None:
    """Check that torch can be imported and is recent enough.

    Raises InstallError: torch cannot be imported, is too old, or was built without
    torch.distributed.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise InstallError(f"torch cannot be imported ({error})", remedy=_REMEDY) from None
    check_torch_version(str(torch.__version__))
    if not dist.is_available():
        raise InstallError("this torch was built without torch.distributed", remedy=_REMEDY)


def check_torch_version(version: str) -> None:
    """Check that a torch version, such as 2.7.1+cu126, is supported.

    Raises InstallError: the version is older than the oldest supported one.
    """
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise InstallError(f"torch {version} is too old, {oldest} is needed", remedy=_REMEDY)


def collect(rank: int, local_rank: int, device: Any) -> RankInfo:
    """Return the `RankInfo` of this process.

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
        threads=torch.get_num_threads() if uuid is None else None,
    )


def rank_threads() -> int:
    """Return the threads of one operation on a CPU: OMP_NUM_THREADS, else torchrun's 1 per rank.

    All commands that measure or run on a CPU use this number, so that their times belong together.

    Raises InputError: OMP_NUM_THREADS is not a number.
    """
    text = os.environ.get(THREADS, "1")
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise InputError(
            f"the environment variable {THREADS} is {text!r}, expected a number of at least 1",
            remedy=f"Use `{THREADS}=1`, as torchrun does",
        )
    return int(text)


def use_rank_threads() -> None:
    """Set torch to the threads of a rank; torch itself would use all cores of the machine."""
    import torch

    torch.set_num_threads(rank_threads())


def check_alike(infos: Sequence[RankInfo]) -> None:
    """Check that all hosts have equal devices, software and numbers of consecutive ranks.

    infos : in rank order.

    Raises InputError: ranks differ in torch, CUDA, NCCL or device, hosts share a name or have
    different numbers of ranks, or the ranks of a host are not consecutive.
    """
    first = infos[0]
    machines: dict[str, RankInfo] = {}
    for info in infos:
        for field, name in _ALIKE.items():
            own, others = getattr(info, field), getattr(first, field)
            if own != others:
                raise InputError(
                    f"{name} differs between ranks: {_on(info)} has {own or 'none'}, {_on(first)} "
                    f"has {others or 'none'}",
                    remedy="Use the same value on every host",
                )
        same_name = machines.setdefault(info.host, info)
        if info.machine is not None and same_name.machine not in (None, info.machine):
            raise InputError(
                f"two machines are named {info.host} (those of rank "
                f"{same_name.rank} and rank {info.rank}), and hosts are "
                "distinguished by name",
                remedy="Give every host its own name",
            )
    counts = Counter(info.host for info in infos)
    if len(set(counts.values())) > 1:
        (host, num), *others_num = counts.items()
        other, other_num = next((h, n) for h, n in others_num if n != num)
        total = " + ".join(map(str, list(counts.values())[:8])) + (" + ..." * (len(counts) > 8))
        raise InputError(
            f"host {host} has {num} rank{'s' * (num != 1)} and host {other} has {other_num}: "
            f"{total} = {len(infos)} is not {len(counts)} * {num}",
            remedy="Start torchrun with the same --nproc-per-node on every host",
        )
    # Ranks of a host count as neighbours, so they must be consecutive.
    blocks = [host for host, _ in groupby(info.host for info in infos)]
    if len(blocks) != len(counts):
        again = next(host for i, host in enumerate(blocks) if host in blocks[:i])
        ranks = [info.rank for info in infos if info.host == again]
        raise InputError(
            f"the ranks of host {again} ({format_list(ranks)}) do not follow one "
            f"another, expected {ranks[0]} to {ranks[0] + len(ranks) - 1}",
            remedy="Start one torchrun per host, with --node-rank by host",
        )


def machine_metadata(
    infos: Sequence[RankInfo], command: Sequence[str], *, folder: Path | str | None
) -> Metadata:
    """Return the metadata common to all runs: time, command, machine and software.

    command : command line as words.
    folder : output folder, which determines the host labels; None records host names.
    """
    first = infos[0]
    labels = {} if folder is None else host_labels((info.host for info in infos), folder)
    counts = Counter(info.host for info in infos)
    on_gpu = first.device_uuid is not None
    per_gpu = Counter(info.device_uuid for info in infos).values() if on_gpu else ()
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
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
        "hosts": summarize_hosts([labels.get(host, host) for host in counts]),
        "device": first.device if on_gpu else f"cpu ({first.cpu})",
        "memory_bytes": first.memory_bytes,
        "cpu": first.cpu,
        "num_cpus": first.num_cpus,
        "threads": first.threads,
        "topology": nvidia_smi("topo", "-m") if on_gpu else None,
        **gpu_clocks(first.device_uuid),
        **{ENVIRONMENT_PREFIX + k: v for k, v in recorded_environment(os.environ).items()},
    }


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that communication and compute libraries read, with harmless values only.

    Other values are replaced by `(set)`.
    """
    found = {}
    for name, value in sorted(environment.items()):
        if _VARIABLES.fullmatch(name):
            known = name in _HARMLESS and _WORDS.fullmatch(value) and not _LONG.search(value)
            found[name] = value if known else _SET
    return found


def host_labels(hosts: Iterable[str], folder: Path | str) -> dict[str, str]:
    """Return the label of each host, such as `host-3fa2`, constant for all runs of a folder.

    Labels replace host names because files are shared and names reveal more than a measurement
    needs.
    """
    names = sorted(set(hosts))
    where = str(Path(folder).resolve())
    digests = [hashlib.sha256(f"{where}\n{name}".encode()).hexdigest() for name in names]
    # The shortest prefix that distinguishes all hosts.
    length = next(
        n for n in range(_LABEL_DIGITS, 65) if len({d[:n] for d in digests}) == len(digests)
    )
    return {name: f"host-{d[:length]}" for name, d in zip(names, digests, strict=True)}


def summarize_hosts(hosts: Sequence[str]) -> str:
    """Return host names as a comma list; long lists as `node[001-128]` or with their number."""
    if len(hosts) <= 4:
        return ",".join(hosts)
    parts = [re.fullmatch(r"(.*?)([0-9]+)(\D*)", host) for host in hosts]
    if all(parts):
        split = [part.groups() for part in parts if part]
        prefix, start, suffix = split[0]
        expected = [f"{int(start) + i:0{len(start)}d}" for i in range(len(hosts))]
        if split == [(prefix, number, suffix) for number in expected]:
            return f"{prefix}[{start}-{expected[-1]}]{suffix}"
    return ",".join(hosts[:4]) + f",... ({len(hosts)} hosts)"


def _on(info: RankInfo) -> str:
    return f"rank {info.rank} on host {info.host}"


# --------------------------------------------------------------------------------------------------
# Number of ranks, from the environment variables that torchrun sets.


_RANK_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_RANK_VARIABLES = (*_RANK_NUMBERS, "MASTER_ADDR")


def launched_ranks() -> int | None:
    """Return the number of ranks that torchrun started, or None outside of torchrun.

    Raises InputError: a variable of torchrun is set, but not to a number.
    """
    if any(name not in os.environ for name in _RANK_VARIABLES):
        return None
    for name in _RANK_NUMBERS:
        if not re.fullmatch("[0-9]{1,18}", os.environ[name]):
            raise InputError(
                f"the environment variable {name} is {os.environ[name]!r}, expected a number",
                remedy="Start with torchrun, which sets it",
            )
    return max(1, int(os.environ["WORLD_SIZE"]))
