"""Two nodes on one machine with a link of known rate: namespaces, a veth pair and `tc tbf`.

Needs no privileges: everything is made inside a user namespace and vanishes with its processes.
The rate of the link is known exactly, so a profiler can be compared with the truth.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["GOODPUT", "MBIT", "main", "refusal", "run_on_two_nodes"]

GOODPUT = 1448 / 1514
"""TCP payload per byte on the wire: an MTU of 1500 with 52 bytes of IP and TCP headers and
timestamps, in Ethernet frames of 1514."""
MBIT = 1e6 / 8
"""Bytes per second in a megabit per second."""
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_DEVICES = ("veth0", "veth1")
_HOSTS = ("node-0", "node-1")


def refusal() -> str | None:
    """Return why this machine cannot shape a network, None if it can."""
    for tool in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    script = (
        "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit "
        "burst 32kb latency 50ms && hostname node-0"
    )
    done = subprocess.run(
        ["unshare", "-Urn", "--uts", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else f"the kernel refuses: {done.stderr.strip()}"


def run_on_two_nodes(
    rate_mbit: int, ranks_per_node: int, arguments: Sequence[str], timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun ARGUMENTS` on two nodes joined by a link of this rate; return how it ended."""
    return subprocess.run(
        [
            "unshare", "-Urn", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
            sys.executable, str(Path(__file__)), str(rate_mbit), str(ranks_per_node), *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )  # fmt: skip


def _sh(*command: str) -> None:
    subprocess.run(command, check=True)


def main(rate_mbit: int, ranks_per_node: int, arguments: Sequence[str]) -> int:
    """Set the two nodes up and run torchrun on both; runs inside the namespaces."""
    other = subprocess.Popen(["unshare", "-n", "--uts", "sleep", "infinity"])
    inside = ["nsenter", "-t", str(other.pid), "-n", "-u"]
    own_net = Path("/proc/self/ns/net").readlink()
    while Path(f"/proc/{other.pid}/ns/net").readlink() == own_net:
        time.sleep(0.01)
    _sh("ip", "link", "add", _DEVICES[0], "type", "veth", "peer", "name", _DEVICES[1])
    _sh("ip", "link", "set", _DEVICES[1], "netns", str(other.pid))
    for node, prefix in enumerate(([], inside)):
        device = _DEVICES[node]
        _sh(*prefix, "hostname", _HOSTS[node])
        _sh(*prefix, "ip", "addr", "add", f"{_ADDRESSES[node]}/24", "dev", device)
        _sh(*prefix, "ip", "link", "set", "lo", "up")
        _sh(*prefix, "ip", "link", "set", device, "up")
        _sh(
            *prefix, "tc", "qdisc", "add", "dev", device, "root",
            "tbf", "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "50ms",
        )  # fmt: skip
    launchers = []
    for node, prefix in enumerate(([], inside)):
        command = [
            *prefix, sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks_per_node),
            "--master-addr", _ADDRESSES[0], "--master-port", "29500", *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": _DEVICES[node], "OMP_NUM_THREADS": "1"}
        launchers.append(subprocess.Popen(command, env=environment))
    codes = [launcher.wait() for launcher in launchers]
    other.kill()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
