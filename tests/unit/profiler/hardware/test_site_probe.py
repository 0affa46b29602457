"""What `profiler.site` measures on which cluster, and the file that follows from measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.documents.sidecar import Measurement, read_sidecar
from autopar.errors import InputError, OptionError
from autopar.rates.card import load_card
from autopar.rates.collectives import GroupShape, SiteFactors, collective_time_s
from autopar.rates.constants import kernels_of
from autopar.rates.kernels import gemm_s
from autopar.rates.site import load_site
from autopar.records import replace
from autopar.units import MIB
from profiler.environment import Metadata
from profiler.hardware.options import Cell, Cluster
from profiler.site.documents import SiteDescription, SiteRecord, figures
from profiler.site.driver import repetitions, settled
from profiler.site.options import (
    GEMM,
    HOST,
    MEMCOPY,
    SiteOptions,
    build_options,
    check_world,
    default_name,
    guess_card,
    plan_cells,
)
from tests.unit.measured import METADATA, make_cluster

A100 = load_card("a100-80gb")
CLOCK, SHARE, FACTORS = 0.9, 0.8, SiteFactors(in_node=0.7, cross_node=0.4)
"""Of the cluster that does not exist."""
FORWARD_S, BACKWARD_S = 2e-4, 3e-4


def planned(cluster: Cluster, **changes: object) -> tuple[Cell, ...]:
    """Return the cells of a run on GPUs."""
    options = build_options(**{"sizes": "1M,16M,128M", **changes})
    return plan_cells(options, cluster, device_type="cuda", element_bytes=2)


def measured(cell: Cell, cluster: Cluster) -> Measurement:
    """Return what a cluster with these factors takes for a cell."""
    size = float(cell.size_bytes)
    if cell.operation == GEMM:
        # 8192 rows of bf16; the first second at the full clock
        long_s = float(gemm_s(kernels_of(A100), 8192, 8192, 8192)) / CLOCK
        samples_s = {"time": [long_s] * 3, "first": [CLOCK * long_s] * 2}
    elif cell.operation == MEMCOPY:
        samples_s = {"time": [2 * size / (SHARE * A100.memory_bytes_per_s)] * 5}
    elif cell.operation == HOST:
        samples_s = {"forward": [FORWARD_S] * 4, "backward": [BACKWARD_S] * 4}
    else:
        nodes = len({cluster.hosts[rank] for rank in cell.rounds[0][0]})
        shape = GroupShape.even(ranks=cell.group_size, per_node=cell.group_size // nodes)
        time_s = collective_time_s(A100.network, cell.operation, size, shape, FACTORS)
        samples_s = {"time": [time_s] * 7}
    groups = [group for groups in cell.rounds for group in groups]
    first = next(iter(samples_s.values()))[0]
    return Measurement(
        key=cell.key,
        operation=cell.operation,
        group_size=cell.group_size,
        consecutive=cell.consecutive,
        size_bytes=size,
        status="ok",
        scope=cell.scope,
        samples_s=samples_s,
        worst_group=list(groups[0]),
        group_medians_s=[first] * len(groups),
    )


def asked(cluster: Cluster, **changes: Any) -> SiteDescription:
    """Return what a file says beside the measurements."""
    said = SiteDescription(
        name="mine",
        card=A100,
        card_name="a100-80gb",
        adapter_bytes_per_s=None,
        cluster=cluster,
        device="NVIDIA A100-SXM4-80GB",
        torch="2.11.0",
        dtype="bf16",
        synthetic=False,
    )
    return replace(said, **changes)


def all_of(cluster: Cluster) -> dict[str, Measurement]:
    """Return the measurements of a whole run."""
    return {cell.key: measured(cell, cluster) for cell in planned(cluster)}


# --------------------------------------------------------------------------------------------------
# Cells.


@pytest.mark.parametrize(
    ("nodes", "gpus", "expected"),
    [
        (1, 1, []),
        (1, 2, [(2, True)]),
        (1, 8, [(8, True), (4, True), (2, True)]),
        (1, 6, [(6, True), (2, True)]),
        (2, 1, [(2, True)]),
        (2, 4, [(4, True), (2, True), (8, True), (2, False)]),
        (4, 8, [(8, True), (4, True), (2, True), (32, True), (4, False)]),
    ],
)
def test_groups_of_a_cluster(nodes: int, gpus: int, expected: list[tuple[int, bool]]) -> None:
    """In a node 2, 4, 8 and all of it; across nodes all ranks, and one of every node."""
    cluster = make_cluster(nodes, gpus)
    cells = planned(cluster)

    assert [cell.operation for cell in cells[:3]] == [GEMM, MEMCOPY, HOST]
    kinds = dict.fromkeys((cell.group_size, cell.consecutive) for cell in cells[3:])
    assert list(kinds) == expected
    assert len(cells) == 3 + len(expected) * 4 * 3
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        # all GPUs at once
        ranks = [rank for groups in cell.rounds for group in groups for rank in group]
        assert sorted(ranks) == list(range(nodes * gpus))
        assert len(cell.rounds) == 1
        across = cell.group_size > gpus or not cell.consecutive
        assert (cell.scope == "inter-node") == across


def test_sizes_of_products_and_copies() -> None:
    """Larger on GPUs than on CPUs, and as asked for."""
    cluster = make_cluster(1, 2)
    gpu = planned(cluster)
    cpu = plan_cells(build_options(), cluster, device_type="cpu", element_bytes=4)
    own = planned(cluster, gemm_size="256", copy_size="4M")

    assert [cell.size_bytes for cell in gpu[:2]] == [8192 * 8192 * 2, 1 << 30]
    assert [cell.size_bytes for cell in cpu[:2]] == [1024 * 1024 * 4, 64 * MIB]
    assert [cell.size_bytes for cell in own[:2]] == [256 * 256 * 2, 4 * MIB]
    assert [c.size_bytes for c in cpu[3:7]] == [512 * MIB, 128 * MIB, 16 * MIB, MIB]


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA H2000", None),
        ("cpu", None),
    ],
)
def test_the_card_of_a_device(device: str, card: str | None) -> None:
    """By what it calls itself; of another device nothing is assumed."""
    assert guess_card(device) == card
    if card is not None:
        assert load_card(card).name == card
        assert default_name(device, make_cluster(2, 4)) == f"{card}_2x4"


def test_options() -> None:
    """Units of the command line become base units; what cannot be is refused."""
    options = build_options(adapter="12.5", name="two-nodes", batch="3")

    assert (options.adapter_bytes_per_s, options.name, options.batch) == (12.5e9, "two-nodes", 3)
    with pytest.raises(OptionError, match=r"--name.*'\.\./x'"):
        build_options(name="../x")
    with pytest.raises(OptionError, match="--gemm-seconds"):
        build_options(gemm_seconds="0")
    with pytest.raises(OptionError, match="--sizes"):
        build_options(sizes="1X")
    with pytest.raises(InputError, match="no device card 'zzz'"):
        check_world(build_options(card="zzz"), 2)
    with pytest.raises(InputError, match="no model 'zzz'"):
        check_world(build_options(model="zzz"), 2)


@pytest.mark.parametrize(
    ("seconds", "operation_s", "count", "loops"),
    [(30.0, 1.5e-3, 120, 167), (0.2, 1e-2, 9, 2), (0.01, 1.0, 9, 1), (3600.0, 1e-3, 1200, 3000)],
)
def test_repetitions_fill_the_time(
    seconds: float, operation_s: float, count: int, loops: int
) -> None:
    """A quarter of a second each, and nine at least."""
    assert repetitions(seconds, operation_s) == (count, loops)


def test_the_last_third_counts() -> None:
    """Of every rank."""
    assert settled(np.arange(9.0)).tolist() == [6.0, 7.0, 8.0]
    assert settled(np.arange(20.0).reshape(2, 10)).tolist() == [[7, 8, 9], [17, 18, 19]]
    assert settled(np.array([4.0])).tolist() == [4.0]


# --------------------------------------------------------------------------------------------------
# Figures.


def test_figures_are_those_of_the_cluster() -> None:
    """Clock, share and factors with which the times were made up."""
    cluster = make_cluster(2, 8)
    data, notes = figures(all_of(cluster), asked(cluster))

    assert notes == []
    assert data["clock"]["value"] == pytest.approx(CLOCK, rel=1e-5)
    ratio = data["gemm"]["first_flop_per_s"]["value"] / data["gemm"]["flop_per_s"]["value"]
    assert ratio == pytest.approx(1 / CLOCK, rel=1e-5)
    assert (data["gemm"]["size"], data["gemm"]["dtype"]) == (8192, "bf16")
    assert data["memory_share"]["value"] == pytest.approx(SHARE, rel=1e-5)
    assert data["in_node"]["value"] == pytest.approx(FACTORS.in_node, rel=1e-5)
    assert data["cross_node"]["value"] == pytest.approx(FACTORS.cross_node, rel=1e-5)
    assert data["host"]["forward_s"]["value"] == FORWARD_S
    assert data["host"]["backward_s"]["value"] == BACKWARD_S
    assert data["clock"]["quality"] == "measured"
    groups = {(row["ranks"], row["nodes"]) for row in data["collectives"]}
    assert groups == {(2, 1), (4, 1), (8, 1), (2, 2), (16, 2)}


def test_without_a_card_there_are_rates_only() -> None:
    """What the factors would be over is unknown, and the note says how to add them."""
    cluster = make_cluster(1, 4)
    data, notes = figures(all_of(cluster), asked(cluster, card=None, card_name=None))

    assert not {"card", "clock", "memory_share", "in_node", "cross_node"} & set(data)
    assert {"gemm", "copy_bytes_per_s", "host", "collectives"} <= set(data)
    assert len(notes) == 1
    assert "--card NAME" in notes[0]


def test_a_slow_rank_is_named() -> None:
    """The slowest rank's rate is the figure, since all others wait for it."""
    cluster = make_cluster(1, 4)
    found = all_of(cluster)
    key = next(iter(found))
    (time_s,) = set(found[key].samples_s["time"])
    medians = [0.8 * time_s, 0.8 * time_s, time_s, 0.8 * time_s]
    found[key] = replace(found[key], group_medians_s=medians, worst_group=[2])
    data, notes = figures(found, asked(cluster))

    (said,) = notes
    assert said.startswith("GEMMs are slow on rank 2: 0.80 of the median rank's rate")
    assert data["clock"]["value"] == pytest.approx(CLOCK, rel=1e-5)
    assert data["clock"]["spread"] == pytest.approx(0.2)


def test_what_a_card_does_not_know() -> None:
    """A precision without kernels leaves the clock out; small messages leave the factors out."""
    cluster = make_cluster(1, 4)
    assert A100.kernels is not None
    fp32 = {"fp32": A100.kernels.gemm["fp32"]}
    narrow = replace(A100, kernels=replace(A100.kernels, gemm=fp32))
    found = {k: m for k, m in all_of(cluster).items() if not 0 < m.size_bytes < 128 * MIB}
    small = {k: m for k, m in all_of(cluster).items() if m.size_bytes in (0, MIB)}

    data, notes = figures(found, asked(cluster, card=narrow))
    assert "clock" not in data
    assert len(notes) == 1
    assert "'a100-80gb'" in notes[0]
    data, notes = figures(small, asked(cluster))
    assert "in_node" not in data
    (said,) = notes
    assert said.startswith("no collective of 16M or more was measured")


def test_shared_gpus_say_nothing_of_a_machine(tmp_path: Path) -> None:
    """Their figures are nominal, so that nothing is known of the site."""
    cluster = make_cluster(1, 2)
    data, _ = figures(all_of(cluster), asked(cluster, synthetic=True))
    path = tmp_path / "site.json"
    path.write_text(json.dumps(data), encoding="utf-8")

    assert load_site(str(path)).known == frozenset()
    assert data["clock"]["source"].startswith("synthetic: several ranks share one GPU")


# --------------------------------------------------------------------------------------------------
# The record.


CLUSTER = make_cluster(2, 2)


def opened(out: Path, metadata: Metadata = METADATA, **changes: Any) -> SiteRecord:
    """Return the record of a folder."""
    given = {name: changes.pop(name) for name in ("resume", "force") if name in changes}
    options = SiteOptions(out=out, **given)
    own = {"gemm_size": 8192, "gemm_seconds": 30.0}
    return SiteRecord(options, {**metadata, **own}, asked(CLUSTER, **changes))


def put(record: SiteRecord, cells: Iterable[Cell]) -> None:
    """Put the measurements of these cells."""
    for cell in cells:
        record.put(measured(cell, CLUSTER))


def test_a_record_is_written_after_every_cell_and_resumed(tmp_path: Path) -> None:
    """What a run left is read by the next, which lacks the rest."""
    cells = planned(CLUSTER)
    with opened(tmp_path) as record:
        assert record.missing(cells) == list(cells)
        put(record, cells[:1])
        site = load_site(str(record.path))
        assert site.clock == pytest.approx(CLOCK, rel=1e-5)
        assert site.memory_share is None
        put(record, cells[1:5])
    with opened(tmp_path, resume=True) as record:
        assert record.missing(cells) == list(cells[5:])
        put(record, cells[5:])
        assert record.counts() == (len(cells), 0, 0)
    site = load_site(str(tmp_path / "site_mine.json"))
    assert site.factors.cross_node == pytest.approx(FACTORS.cross_node, rel=1e-5)
    sidecar = read_sidecar(tmp_path / "site_mine.json", "site")
    assert sidecar is not None
    assert [len(run.measurements) for run in sidecar.runs] == [5, len(cells) - 5]


def test_a_record_is_not_replaced_silently(tmp_path: Path) -> None:
    """Neither a site of before, nor one of another machine or of shorter products."""
    with opened(tmp_path) as record:
        put(record, planned(CLUSTER)[:2])
    path = tmp_path / "site_mine.json"
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"an earlier run wrote this file. .*--resume"):
        opened(tmp_path)
    for other, said in (
        ({"device": "Other GPU"}, r"device of every rank \(device\): Some GPU and Other GPU"),
        ({"dtype": "fp16"}, r"element type of the messages \(dtype\): bf16 and fp16"),
    ):
        with pytest.raises(InputError, match=f"cannot be resumed: it differs in {said}"):
            opened(tmp_path, {**METADATA, **other}, resume=True)
    options = SiteOptions(out=tmp_path, resume=True)
    shorter = {**METADATA, "gemm_size": 8192, "gemm_seconds": 3.0}
    with pytest.raises(InputError, match=r"\(gemm_seconds\): 30.0 and 3.0"):
        SiteRecord(options, shorter, asked(CLUSTER))
    assert path.read_bytes() == before
    hand_made = tmp_path / "site_other.json"
    hand_made.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="another command wrote this file"):
        opened(tmp_path, name="other")


def test_force_measures_again_and_keeps_the_history(tmp_path: Path) -> None:
    """Samples of before stay in the sidecar and count no more."""
    cells = planned(CLUSTER)
    with opened(tmp_path) as record:
        put(record, cells[:3])
    with opened(tmp_path, {**METADATA, "device": "Other GPU"}, force=True) as record:
        assert record.missing(cells) == list(cells)
        put(record, cells[1:2])
        assert record.missing(cells) == [cells[0], *cells[2:]]
    data = json.loads((tmp_path / "site_mine.json").read_text("utf-8"))
    assert "gemm" not in data
    assert "memory_share" in data
    sidecar = read_sidecar(tmp_path / "site_mine.json", "site")
    assert sidecar is not None
    assert [len(run.measurements) for run in sidecar.runs] == [3, 1]
    # what followed counts with what replaced, and not with what it replaced
    with opened(tmp_path, {**METADATA, "device": "Other GPU"}, resume=True) as record:
        assert set(record.measurements) == {cells[1].key}


def test_another_card_is_a_matter_of_reading_again(tmp_path: Path) -> None:
    """Factors follow from the samples: nothing is measured for them."""
    cells = planned(CLUSTER)
    with opened(tmp_path, card=None, card_name=None) as record:
        put(record, cells)
    path = tmp_path / "site_mine.json"
    assert load_site(str(path)).clock is None
    with opened(tmp_path, resume=True) as record:
        assert record.missing(cells) == []
        assert any("derived again" in note for note in record.notes)
    site = load_site(str(path))
    assert site.clock == pytest.approx(CLOCK, rel=1e-5)
    assert site.factors.in_node == pytest.approx(FACTORS.in_node, rel=1e-5)


def test_a_failed_cell_makes_no_figure_and_is_tried_again(tmp_path: Path) -> None:
    """Its reason stays in the sidecar, hosts by their labels."""
    cells = planned(CLUSTER)
    failed = replace(
        measured(cells[0], CLUSTER), status="failed", reason="rank 1 on host a: gone", samples_s={}
    )
    with opened(tmp_path) as record:
        record.put(failed)
        assert not record.path.exists()
        put(record, cells[1:2])
        assert record.missing(cells)[0] == cells[0]
    data = json.loads((tmp_path / "site_mine.json").read_text("utf-8"))
    assert "gemm" not in data
    sidecar = read_sidecar(tmp_path / "site_mine.json", "site")
    assert sidecar is not None
    reason = sidecar.runs[0].measurements[0].reason or ""
    assert reason.startswith("rank 1 on host host-")
