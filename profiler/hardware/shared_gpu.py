"""Several NCCL ranks on one GPU: code runs as on a cluster, and its times describe no machine.

NCCL before 2.30 refuses two ranks on one GPU of one host, which it tells by NCCL_HOSTID; later
versions have a switch for it. Transports that need a GPU of their own are turned off, and the
kernels are kept small, since the kernels of all ranks have to run at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from autopar.errors import InputError
from profiler.environment import RankInfo

__all__ = ["apply", "recipe", "refusal", "sharing"]


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
        "NCCL_MAX_CTAS": "2",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
    }
    if one_host:  # the ranks of several hosts do not meet on the loopback interface
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
        f"{len(ranks)} ranks ({_listed(ranks)}) share 1 GPU on host {host}; such timings describe "
        f"no machine; start at most {num_gpus} rank{'s' if num_gpus > 1 else ''} per host "
        f"(--nproc-per-node {num_gpus}), or add --allow-shared-gpu to exercise the code, marked "
        "synthetic"
    )


def _listed(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return text + (", ..." if len(ranks) > 8 else "")
