"""Two nodes on one machine with a link of known rate: namespaces, a veth pair and `tc tbf`.

    for node in run_on_two_nodes(500, 1, ["-m", "profiler.hardware", "--out", str(folder)]):
        print(node.host, node.stdout)

The rate of the link is known exactly, so a profiler can be compared with the truth. Every call has
network, host name and process namespaces of its own: calls do not disturb each other's addresses
and ports, and when the first process of the namespaces ends, the kernel ends all others and
removes the link. In a user namespace all this needs no privileges; root can do without one.

Runs itself as a program inside the namespaces, with nothing but the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GOODPUT = 1448 / 1514
"""TCP payload per byte on the wire: an MTU of 1500 with 52 bytes of IP and TCP headers and
timestamps, in Ethernet frames of 1514."""
MBIT = 1e6 / 8
"""Bytes per second in a megabit per second."""
HOSTS = ("node-0", "node-1")
_ROOT = Path(__file__).resolve().parent.parent.parent
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_DEVICES = ("veth0", "veth1")
_PORT = 29500
"""Always free: nobody else is in this network."""
_BURST = "256kb"
"""What a link that was idle passes at once: a smaller one loses rate when a busy machine is late
to send, a larger one flatters short messages even more."""
_TOOLS = ("unshare", "nsenter", "ip", "tc", "hostname", "sleep")
_GRACE_S = 20.0
"""When one node has failed, the other has so long to notice and say so."""
_SET_UP_S = 15.0
_UNFINISHED = 124


@dataclass(frozen=True, kw_only=True)
class Node:
    """How torchrun, or a command in its place, ended on one node, and what was written there."""

    host: str
    code: int
    """Exit code; 124: it was ended because the time was over."""
    stdout: str
    stderr: str

    def __str__(self) -> str:
        lines = [f"[{self.host}] exit code {self.code}"]
        for name in ("stdout", "stderr"):
            lines += [f"[{self.host} {name}] {line}" for line in getattr(self, name).splitlines()]
        return "\n".join(lines)


class TwoNodesError(AssertionError):
    """The nodes could not be made, or one failed; the message has what every node wrote."""


@cache
def refusal(user_namespace: bool = True) -> str | None:
    """Return why this machine cannot shape a network, None if it can; it makes one to know."""
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            return f"a shaped network needs the command {tool}, which is not installed"
    with tempfile.TemporaryDirectory() as folder:
        done = _enter(folder, 1, 0, (), timeout_s=_SET_UP_S, user_namespace=user_namespace)
    if done.returncode == 0:
        return None
    return f"the kernel refuses to shape a network: {done.stderr.strip() or done.returncode}"


def run_on_two_nodes(
    rate_mbit: int,
    ranks_per_node: int,
    arguments: Sequence[str],
    *,
    timeout_s: float = 240.0,
    user_namespace: bool = True,
) -> tuple[Node, Node]:
    """Run `torchrun ARGUMENTS` on two nodes joined by a link of this rate; return how both ended.

    Both start in the root of the repository and see the same files. No ranks per node: ARGUMENTS
    are the command itself, without torchrun. `user_namespace=False` needs root. Raises
    TwoNodesError when the nodes cannot be made, when one ends with another code than 0, and after
    `timeout_s`. No process outlives the call.
    """
    assert arguments, "nodes need to know what to run"
    with tempfile.TemporaryDirectory() as folder:
        done = _enter(
            folder,
            rate_mbit,
            ranks_per_node,
            arguments,
            timeout_s=timeout_s,
            user_namespace=user_namespace,
        )
        if not (Path(folder) / "codes").is_file():
            raise TwoNodesError(f"no nodes, exit code {done.returncode}: {done.stderr.strip()}")
        codes = (Path(folder) / "codes").read_text(encoding="ascii").split()
        first, second = (
            Node(
                host=host,
                code=int(code),
                stdout=_text(_output(folder, host, "stdout")),
                stderr=_text(_output(folder, host, "stderr")),
            )
            for host, code in zip(HOSTS, codes, strict=True)
        )
    if first.code or second.code:
        launcher = "torchrun " if ranks_per_node else ""
        raise TwoNodesError(f"{rate_mbit} Mbit, {launcher}{' '.join(arguments)}\n{first}\n{second}")
    return first, second


def _output(folder: Path | str, host: str, name: str) -> Path:
    return Path(folder) / f"{host}.{name}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _enter(
    folder: str,
    rate_mbit: int,
    ranks_per_node: int,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    user_namespace: bool,
) -> subprocess.CompletedProcess[str]:
    """Run this file as the first process of new namespaces; killing it ends everything in them."""
    command = [
        "unshare", *(["--user", "--map-root-user"] if user_namespace else []),
        "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc",
        sys.executable, str(Path(__file__).resolve()),
        folder, str(rate_mbit), str(ranks_per_node), str(timeout_s), *arguments,
    ]  # fmt: skip
    limit_s = timeout_s + _SET_UP_S + _GRACE_S  # it watches the time itself, and keeps the output
    try:
        return subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"not done after {limit_s:g} s"
        return subprocess.CompletedProcess(command, _UNFINISHED, stdout="", stderr=reason)


def main(folder: Path, rate_mbit: int, ranks_per_node: int, limit_s: float, *arguments: str) -> int:
    """Make both nodes and run torchrun on them, or only make them where there are no arguments.

    Inside the namespaces, as the first process. Leaves in the folder what each node wrote and the
    exit codes of both. Returns 0 when the nodes could be made.
    """
    ends_s = time.monotonic() + limit_s
    enter_node = _make_nodes(rate_mbit)
    if not arguments:
        return 0
    launchers = []
    for node, prefix in enumerate(enter_node):
        launcher = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(ranks_per_node),
            "--master-addr", _ADDRESSES[0], "--master-port", str(_PORT),
        ]  # fmt: skip
        command = [*prefix, *(launcher if ranks_per_node else []), *arguments]
        with (
            _output(folder, HOSTS[node], "stdout").open("wb") as stdout,
            _output(folder, HOSTS[node], "stderr").open("wb") as stderr,
        ):
            launchers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={
                        **os.environ,
                        "GLOO_SOCKET_IFNAME": _DEVICES[node],
                        "OMP_NUM_THREADS": "1",
                    },
                )
            )
    codes = _wait(launchers, ends_s)
    text = " ".join(str(_UNFINISHED if code is None else code) for code in codes)
    (folder / "codes").write_text(text, encoding="ascii")
    return 0  # with this process everything else in the namespaces ends


def _wait(launchers: Sequence[subprocess.Popen[bytes]], ends_s: float) -> list[int | None]:
    """Return exit codes, None for those that are still running when the time is over."""
    failed = False
    while None in (codes := [launcher.poll() for launcher in launchers]):
        if not failed and any(codes):
            failed, ends_s = True, min(ends_s, time.monotonic() + _GRACE_S)
        if time.monotonic() > ends_s:
            break
        time.sleep(0.05)
    return codes


def _make_nodes(rate_mbit: int) -> tuple[list[str], list[str]]:
    """Join two network namespaces by a shaped link; return what precedes a command on each node.

    The first node is this process's namespaces, the second those of a sleeping child.
    """
    sleeper = subprocess.Popen(["unshare", "--net", "--uts", "sleep", "infinity"])
    own: list[str] = []
    enter_node = (own, ["nsenter", "--target", str(sleeper.pid), "--net", "--uts"])
    own_network = Path("/proc/self/ns/net").readlink()
    while sleeper.poll() is None:
        if Path(f"/proc/{sleeper.pid}/ns/net").readlink() != own_network:
            break
        time.sleep(0.01)
    else:
        sys.exit(f"`unshare --net --uts` ended with code {sleeper.returncode}")
    _sh("ip", "link", "add", _DEVICES[0], "type", "veth", "peer", "name", _DEVICES[1])
    _sh("ip", "link", "set", _DEVICES[1], "netns", str(sleeper.pid))
    for node, prefix in enumerate(enter_node):
        device = _DEVICES[node]
        _sh(*prefix, "hostname", HOSTS[node])
        _sh(*prefix, "ip", "addr", "add", f"{_ADDRESSES[node]}/24", "dev", device)
        _sh(*prefix, "ip", "link", "set", "lo", "up")
        _sh(*prefix, "ip", "link", "set", device, "up")
        _sh(
            *prefix, "tc", "qdisc", "add", "dev", device, "root",
            "tbf", "rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", "50ms",
        )  # fmt: skip
    return enter_node


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}`: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(
        main(
            Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:]
        )
    )
