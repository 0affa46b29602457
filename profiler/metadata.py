"""The circumstances that a run records, and which of them make two runs incomparable.

A run may add environment variables as `env.NAME`. A key that is in neither of two runs is equal in
both, so that runs of an older version stay comparable with each other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ENVIRONMENT_PREFIX", "METADATA", "Compared", "Metadata", "MetadataRow", "comparable"]

Metadata = dict[str, str | int | float | bool | None]

Compared = Literal["always", "resume", "never"]
"""When a row must be equal: `always`, for two runs to say anything about each other, since
otherwise they measured different things; `resume`, for the cells of both to stand in one file,
where one of the runs would speak for the other. Versions of software are of the second kind: what
a new driver or NCCL changes is a reason to compare two runs, and none to refuse it."""

ENVIRONMENT_PREFIX = "env."
_TUNING = re.compile(
    r"env\.((NCCL|GLOO|UCX|FI)_(?!DEBUG|HOSTID).*|CUDA_DEVICE_MAX_CONNECTIONS|CUDA_LAUNCH_BLOCKING"
    r"|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|TORCH_CUDNN_SDPA_\w+)"
)
"""Variables that change times; compared as `resume`."""


@dataclass(frozen=True, kw_only=True)
class MetadataRow:
    """One circumstance: its key, its meaning, its unit or format, and whether runs must agree."""

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
    # groups that work at once share links, a group alone does not
    MetadataRow(
        key="isolated", meaning="one group at a time", unit="true or false", compared="always"
    ),
    MetadataRow(
        key="cuda_graph",
        meaning="launched from CUDA graphs",
        unit="true or false",
        compared="always",
    ),
    # the documented bandwidths are those of this size
    MetadataRow(key="reference_bytes", meaning="reference size", unit="bytes", compared="resume"),
    MetadataRow(key="world_size", meaning="number of ranks", unit="count", compared="always"),
    MetadataRow(key="num_nodes", meaning="number of hosts", unit="count", compared="always"),
    MetadataRow(key="gpus_per_node", meaning="ranks per host", unit="count", compared="always"),
    MetadataRow(
        key="ranks_per_gpu", meaning="most ranks on one GPU", unit="count", compared="always"
    ),
    # a scheduler gives other hosts of the same kind to every job
    MetadataRow(key="hosts", meaning="host names", unit="comma list"),
    MetadataRow(key="device", meaning="device of every rank", compared="always"),
    MetadataRow(key="memory_bytes", meaning="memory of one GPU", unit="bytes"),
    MetadataRow(key="cpu", meaning="CPU model of rank 0's host"),
    MetadataRow(
        key="num_cpus",
        meaning="CPUs that a process may use",
        unit="count",
        compared="resume",
    ),
    MetadataRow(key="topology", meaning="links between the GPUs of rank 0's host", unit="table"),
    MetadataRow(key="sm_clock_hz", meaning="clock of the GPU's multiprocessors", unit="Hz"),
    MetadataRow(key="sm_clock_max_hz", meaning="highest such clock", unit="Hz"),
    MetadataRow(key="memory_clock_hz", meaning="clock of the GPU's memory", unit="Hz"),
    MetadataRow(key="power_limit_w", meaning="power limit of the GPU", unit="W"),
    MetadataRow(key="persistence", meaning="persistence mode of the driver"),
)
"""All circumstances but the environment's variables, in the order they are shown."""


def comparable(
    a: Mapping[str, object], b: Mapping[str, object], *, resume: bool = False
) -> list[str]:
    """Return what makes two runs incomparable, one clause each; empty when they are comparable.

    Parameters
    ----------
    resume : True to ask whether their cells may stand in one file, which is stricter.
    """
    found = [
        _clause(f"{row.meaning} ({row.key})", a, b, row.key)
        for row in METADATA
        if row.compared == "always" or (resume and row.compared == "resume")
        if a.get(row.key) != b.get(row.key)
    ]
    if resume:
        found += [
            _clause(f"environment variable {key.removeprefix(ENVIRONMENT_PREFIX)}", a, b, key)
            for key in sorted({*a, *b})
            if _TUNING.fullmatch(key) and a.get(key) != b.get(key)
        ]
    return found


def _clause(what: str, a: Mapping[str, object], b: Mapping[str, object], key: str) -> str:
    return f"{what}: {_text(a.get(key))} and {_text(b.get(key))}"


def _text(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
