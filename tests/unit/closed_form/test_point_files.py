"""CSV files of every execution that can run: complete, readable, whole under their name."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar import output
from autopar.documents.checks import load_document
from autopar.errors import OptionError
from autopar.records import replace
from search.closed_form import session
from search.closed_form.answers import Answer, SearchCallbacks
from search.closed_form.calculon import Application, System
from search.closed_form.calculon.exploration import Space
from search.closed_form.questions import CalculonSearch, SearchSettings, Tensor2dSearch
from search.closed_form.session import PointFile
from search.closed_form.tensor2d import (
    Model,
    System as Tensor2dSystem,
    evaluate as evaluate_tensor2d,
)
from tests.interrupts import ended_at_each_moment
from tests.oracles.calculon import evaluate
from tests.parity.test_calculon_engine import APPLICATION, SYSTEM

APP = load_document(Application, APPLICATION | {"vocab_size": 32000})
MACHINE = load_document(System, SYSTEM)
MODEL = Model(l=1024, e=2048, h=16, depth=8, f=8192)
GPU = Tensor2dSystem(
    matrix_flops_fp16=300,
    vector_flops_fp16=75,
    hbm_bandwidth=1500,
    hbm_capacity=40,
    nvlink_bandwidth=300,
    nvlink_eff=0.8,
    nvlink_latency=2e-6,
    ib_bandwidth=25,
    ib_eff=0.8,
    ib_latency=5e-6,
    nvlink_size=4,
)
ROWS = {"a": ["1", "2"], "b": ["True", "none"]}


def calculon_rows(
    path: Path, *, compat: bool, statistics: bool, num_procs: int = 8
) -> tuple[Answer, list[Any]]:
    """Search a small space and return the answer and the rows of its file."""
    search = CalculonSearch(
        application=APP,
        system=MACHINE,
        space=Space(num_procs=num_procs, max_batch=4, fixed_batch=not compat, uneven=not compat),
        asked=SearchSettings(top=3, compat=compat),
    )
    columns = search.columns(statistics=statistics)
    with PointFile(str(path), "--all") as points:
        answer = search.run(
            SearchCallbacks(
                each=lambda x, o: [points.write(part) for part in columns(x, o)].clear()
            )
        )
    with path.open(newline="") as file:
        return answer, list(csv.DictReader(file))


def document(row: dict[str, str]) -> dict[str, Any]:
    """Return a row with numbers and truths as such."""

    def value(text: str) -> Any:
        if text in ("True", "False"):
            return text == "True"
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    return {name: value(text) for name, text in row.items()}


@pytest.mark.whole
@pytest.mark.parametrize("compat", [False, True])
def test_every_calculon_point_is_there_and_can_be_priced_again(
    tmp_path: Path, compat: bool
) -> None:
    """Words and truths are those of documents; the figures are those of the oracle."""
    answer, rows = calculon_rows(tmp_path / "all.csv", compat=compat, statistics=False)

    assert len(rows) == answer.feasible > 1000
    assert max(float(row["sample_rate"]) for row in rows) == answer.best[0].rate_per_s
    assert ("structure_type" in rows[0]) == (not compat)
    figures = [name for name in rows[0] if name not in answer.best[0].execution]
    assert figures == [
        "total_time",
        "sample_rate",
        "proc_mem_tier1_cap_req",
        "proc_mem_tier2_cap_req",
    ]
    for row in rows[:: len(rows) // 40]:
        known = document(row)
        execution = {name: known[name] for name in answer.best[0].execution}
        statistics = evaluate(APP, execution, MACHINE, compat=compat)
        for name in figures:
            assert statistics[name] == pytest.approx(known[name], rel=1e-9)


def test_all_statistics_of_calculon(tmp_path: Path) -> None:
    """Every name of the oracle, in its order, with its value."""
    answer, rows = calculon_rows(tmp_path / "all.csv", compat=False, statistics=True, num_procs=4)

    assert len(rows) == answer.feasible
    names = list(answer.best[0].execution)
    for row in rows[:: len(rows) // 20]:
        known = document(row)
        statistics = evaluate(APP, {name: known[name] for name in names}, MACHINE)
        assert list(known) == [*names, *statistics]
        for name, value in statistics.items():
            assert float(row[name]) == pytest.approx(value, rel=1e-9, abs=1e-30), name


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("strategy", ["1d", "2d", "2d-seqp"])
def test_every_tensor2d_point(tmp_path: Path, strategy: Any, statistics: bool) -> None:
    """The same for the other model; `1d` has its degree under tp1."""
    path = tmp_path / "all.csv"
    search = Tensor2dSearch(
        strategy=strategy,
        model=MODEL,
        system=GPU,
        num_gpus=8,
        batch=8,
        asked=SearchSettings(top=3, frontier=True),
    )
    columns = search.columns(statistics=statistics)
    with PointFile(str(path), "--all") as points:
        answer = search.run(
            SearchCallbacks(
                each=lambda x, o: [points.write(part) for part in columns(x, o)].clear()
            )
        )
    with path.open(newline="") as file:
        rows = [document(row) for row in csv.DictReader(file)]

    assert len(rows) == answer.feasible > 10
    assert max(row["throughput"] for row in rows) == pytest.approx(answer.best[0].rate_per_s)
    for row in rows[:: len(rows) // 10]:
        flat = strategy == "1d"
        tensor = {"tp": row["tp1"]} if flat else {"tp1": row["tp1"], "tp2": row["tp2"]}
        inside = {"nv_tp": row["nv_tp1"]} if flat else {k: row[k] for k in ("nv_tp1", "nv_tp2")}
        again = evaluate_tensor2d(
            strategy,
            MODEL,
            {k: row[k] for k in ("dp", "pp", "mbs")}
            | tensor
            | ({"nb": row["nb"]} if strategy == "2d" else {}),
            inside | {k: row[k] for k in ("nv_dp", "nv_pp")},
            8,
            8,
            GPU,
        )
        names = set(again) & set(row) if statistics else {"t", "mem"}
        assert len(names) > 15 or not statistics
        for name in names:
            assert row[name] == pytest.approx(again[name], rel=1e-9, abs=1e-30), name
    # the frontier, by its definition
    time, memory = (np.array([row[name] for row in rows]) for name in ("t", "mem"))
    kept = {
        (t, m)
        for t, m in zip(time.tolist(), memory.tolist(), strict=True)
        if not any((time <= t) & (memory <= m) & ((time < t) | (memory < m)))
    }
    found = [(point.time_s, point.memory_bytes / 1e9) for point in answer.frontier]
    assert found == [pytest.approx(pair) for pair in sorted(kept)]


def test_all_statistics_of_the_published_model() -> None:
    """The file knows of a model what the search knew, which priced it without its vocabulary."""
    search = Tensor2dSearch(
        strategy="1d",
        model=replace(MODEL, vocab=32000),
        system=GPU,
        num_gpus=8,
        batch=8,
        asked=SearchSettings(compat=True),
    )
    columns = search.columns(statistics=True)
    found: list[float] = []
    answer = search.run(
        SearchCallbacks(
            each=lambda x, o: [found.extend(map(float, c["t"])) for c in columns(x, o)].clear()
        )
    )

    assert min(found) == answer.best[0].time_s


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    """An old file stays until then."""
    path = tmp_path / "new" / "all.csv"
    with PointFile(str(path), "--all") as points:
        points.write(ROWS)
        assert not path.exists()
        points.write({name: texts[:1] for name, texts in ROWS.items()})

    assert path.read_text() == "a,b\n1,True\n2,none\n1,True\n"
    assert points.rows == 3
    assert list(path.parent.iterdir()) == [path]


def test_compressed_files_are_the_same_every_time(tmp_path: Path) -> None:
    """Neither name nor time is in them."""
    for name in ("one.csv.gz", "two.csv.gz"):
        with PointFile(str(tmp_path / name), "--all") as points:
            points.write(ROWS)

    one = (tmp_path / "one.csv.gz").read_bytes()
    assert gzip.decompress(one) == b"a,b\n1,True\n2,none\n"
    assert one == (tmp_path / "two.csv.gz").read_bytes()


@pytest.mark.parametrize("given_up", [False, True])
def test_what_was_found_until_ctrl_c_stays(tmp_path: Path, given_up: bool) -> None:
    """As `.part`, whole as far as it goes, whether the search was stopped or given up."""
    path = tmp_path / "all.csv.gz"
    path.write_text("old")
    try:
        with PointFile(str(path), "--all") as points:
            points.write(ROWS)
            points.keep = True
            if given_up:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        points.write(ROWS)  # by the thread of the search, which nobody waits for

    assert path.read_text() == "old"
    assert gzip.decompress(points.part.read_bytes()) == b"a,b\n1,True\n2,none\n"


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    """A part would be taken for what was found."""

    def fail() -> None:
        with PointFile(str(tmp_path / "a.csv"), "--all") as points:
            points.write(ROWS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of streams left open
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_signal_at_any_moment_leaves_no_temporary_file(tmp_path: Path, name: str) -> None:
    """Points are whole under their name, or not there."""

    def write() -> None:
        (tmp_path / name).unlink(missing_ok=True)
        with PointFile(str(tmp_path / name), "--all") as points:
            points.write(ROWS)

    last = 0
    for last in ended_at_each_moment(write, output, session):
        assert {path.name for path in tmp_path.iterdir()} <= {name}, last
    assert last > 50
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Said before the search, with the option."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "a.csv"):
        with pytest.raises(OptionError, match=r"^--all .* cannot be written .*another file"):
            PointFile(str(path), "--all")
