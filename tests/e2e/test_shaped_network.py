"""The hardware profiler against the truth: links whose rate the kernel enforces.

Rates of a busy machine only fall, and only for a while: a measurement is repeated before it
counts as wrong, and a wrong formula is wrong every time. Bandwidths are compared with the payload
that TCP brings through the link, 0.9564 of its rate.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.sidecar import CurveData, Measurement, read_sidecar, sidecar_path
from autopar.units import GB, MIB
from profiler.environment import host_labels
from tests.e2e.shaped_network import (
    GOODPUT,
    HOSTS,
    MBIT,
    TwoNodesError,
    refusal,
    run_on_two_nodes,
)

pytestmark = pytest.mark.whole

ATTEMPTS = 3
HARDWARE = ("-m", "profiler.hardware")
TORCHRUN = (1, "--no-python")
"""Ranks per node, and the option with which torchrun starts any command."""
DIRECTLY = (0,)
EITHER = pytest.mark.parametrize(
    "how", [DIRECTLY, pytest.param(TORCHRUN, marks=pytest.mark.ranks)], ids=["directly", "torchrun"]
)


@pytest.fixture
def shaped() -> None:
    """Skip where the kernel gives no network namespaces or does not shape them."""
    if reason := refusal():
        pytest.skip(reason)


def eventually(tmp_path: Path, measure: Callable[[Path], dict[str, Any]]) -> None:
    """Pass as soon as one of a few measurements, each in a folder of its own, is as expected.

    `measure` returns by name what it found beside what is right, as `pytest.approx` or plain.
    """
    missed = []
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        found = measure(folder)
        wrong = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
        if not wrong:
            return
        missed.append(f"attempt {attempt + 1}: {wrong}")
    pytest.fail("\n".join(missed))


def documented(path: Path) -> dict[str, float]:
    """Return the content of a documented file."""
    data: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return data


def cells(path: Path) -> dict[str, Measurement]:
    """Return the measured cells of the only run in the sidecar of a documented file."""
    sidecar = read_sidecar(path)
    assert sidecar is not None
    (run,) = sidecar.runs
    assert all(m.status == "ok" and m.checked for m in run.measurements)
    return {m.key: m for m in run.measurements}


def curve(path: Path) -> CurveData:
    """Return the only curve in the sidecar of a documented file."""
    sidecar = read_sidecar(path)
    assert sidecar is not None
    (found,) = sidecar.curves
    return found


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.usefixtures("shaped")
def test_bandwidths_are_those_of_the_link(tmp_path: Path) -> None:
    """At 500 Mbit slopes are within 5 % and bus bandwidth is within 10 % of what TCP can carry."""
    goodput = GOODPUT * 500 * MBIT

    def measure(out: Path) -> dict[str, Any]:
        options = ("--sizes", "1M,8M", "--reference-size", "8M", "--out", str(out))
        run_on_two_nodes(500, 1, [*HARDWARE, "allreduce", "p2p", *options])
        allreduce = out / "allreduce_bandwidth_2nodes_1gpus_per_node.json"
        p2p = out / "p2p_bandwidth_2nodes_1gpus_per_node.json"
        sp_time = out / "sp_time_2nodes_1gpus_per_node.json"
        files = {p for path in (allreduce, p2p, sp_time) for p in (path, sidecar_path(path))}
        assert {path for path in out.iterdir() if path.suffix == ".json"} == files

        found = {**cells(allreduce), **cells(p2p)}
        assert set(found) == {
            "allreduce_size_2_consec_1_1048576B",
            "allreduce_size_2_consec_1_8388608B",
            "p2p_stages_2_1048576B",
            "p2p_stages_2_8388608B",
            "p2p_bidirectional_stages_2_8388608B",
        }
        assert {m.scope for m in found.values()} == {"inter-node"}
        metadata = read_sidecar(p2p).runs[0].metadata  # type: ignore[union-attr]
        labels = host_labels(HOSTS, out)
        assert metadata["hosts"] == ",".join(labels[host] for host in HOSTS)

        line = curve(p2p)
        assert line.sizes_bytes == [MIB, 8 * MIB]
        assert line.seconds_per_byte is not None
        slope = 7 * MIB / (line.times_s[1] - line.times_s[0])
        near = pytest.approx
        return {
            "p2p, slope": (slope, near(goodput, rel=0.05)),
            "p2p, fit": (1.0 / line.seconds_per_byte, near(goodput, rel=0.05)),
            "p2p, 8 MiB": (documented(p2p)["pp_size_2"] * GB, near(goodput, rel=0.1)),
            "all-reduce, bus": (
                documented(allreduce)["allreduce_size_2_consec_1"] * GB,
                near(goodput, rel=0.1),
            ),
        }

    eventually(tmp_path, measure)


@pytest.mark.ranks
@pytest.mark.alone
@pytest.mark.usefixtures("shaped")
def test_strided_groups_share_the_link_of_their_nodes(tmp_path: Path) -> None:
    """Two groups across nodes have half the bandwidth together that each has alone."""
    goodput = GOODPUT * 1000 * MBIT
    sizes = ("--groups", "2", "--sizes", "16M", "--reference-size", "16M")

    def busy(out: Path, *isolated: str) -> float:
        run_on_two_nodes(1000, 2, [*HARDWARE, "allreduce", *sizes, *isolated, "--out", str(out)])
        path = out / "allreduce_bandwidth_2nodes_2gpus_per_node.json"
        found = cells(path)
        strided = found["allreduce_size_2_consec_0_16777216B"]
        neighbours = found["allreduce_size_2_consec_1_16777216B"]
        assert (strided.scope, neighbours.scope) == ("inter-node", "intra-node")
        assert strided.worst_group in ([0, 2], [1, 3])
        assert neighbours.worst_group in ([0, 1], [2, 3])
        assert len(strided.group_medians_s) == len(neighbours.group_medians_s) == 2
        return documented(path)["allreduce_size_2_consec_0"] * GB

    def measure(out: Path) -> dict[str, Any]:
        alone = busy(out / "alone", "--isolated")
        together = busy(out / "together")
        return {
            "alone": (alone, pytest.approx(goodput, rel=0.1)),
            "together over alone": (together / alone, pytest.approx(0.5, abs=0.05)),
        }

    eventually(tmp_path, measure)


@EITHER
@pytest.mark.parametrize("user_namespace", [True, False], ids=["user namespace", "root"])
def test_two_hosts_and_their_words_are_kept_apart(
    user_namespace: bool, how: tuple[Any, ...]
) -> None:
    """Ranks are on two hosts, and what each node prints stays with it."""
    if not user_namespace and os.geteuid() != 0:
        pytest.skip("needs root, as it makes no user namespace")
    if reason := refusal(user_namespace):
        pytest.skip(reason)
    num_ranks, *options = how
    nodes = run_on_two_nodes(500, num_ranks, [*options, "hostname"], user_namespace=user_namespace)
    assert [node.stdout.strip() for node in nodes] == list(HOSTS)
    assert [node.host for node in nodes] == list(HOSTS)


@EITHER
@pytest.mark.usefixtures("shaped")
def test_a_node_that_fails_is_named_with_its_words(how: tuple[Any, ...]) -> None:
    """The error has the exit code and the prefixed output of every node."""
    num_ranks, *options = how
    with pytest.raises(TwoNodesError) as caught:
        run_on_two_nodes(500, num_ranks, [*options, "sh", "-c", "echo of $(hostname); exit 3"])
    code = 1 if num_ranks else 3  # torchrun has its own
    for host in HOSTS:
        assert f"[{host}] exit code {code}" in str(caught.value)
        assert f"[{host} stdout] of {host}" in str(caught.value)


@pytest.mark.usefixtures("shaped")
def test_nothing_outlives_the_time_limit(tmp_path: Path) -> None:
    """A call that takes too long ends with every process in its namespaces, children's included."""
    beat = tmp_path / "beat"
    script = f"(while true; do date +%N >> {beat}; sleep 0.05; done) & wait"
    with pytest.raises(TwoNodesError, match=r"\[node-0\] exit code 124"):
        run_on_two_nodes(500, 0, ["sh", "-c", script], timeout_s=3.0)
    before = beat.read_bytes()
    assert before
    time.sleep(0.5)
    assert beat.read_bytes() == before
