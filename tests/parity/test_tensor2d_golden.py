"""The readable two-dimensional model against published figures, with its defects on."""

from __future__ import annotations

import ast
import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from search.closed_form.tensor2d import COMPAT, Candidate, Model, System, evaluate, explore, survey
from search.closed_form.tensor2d.attention import plain_attention_rows
from search.closed_form.tensor2d.checks import candidate_of
from search.closed_form.tensor2d.exploration import assignments, candidates
from search.closed_form.tensor2d.layers import layer_rows
from search.closed_form.tensor2d.links import collective_s
from search.closed_form.tensor2d.step import row_time, sizes_of
from search.closed_form.tensor2d.tables import row_table

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(cases_dir: Path) -> Path:
    """Return the folder of this model's cases."""
    return cases_dir / "perf_estimates"


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Any]:
    """Return models and systems."""
    data: dict[str, Any] = json.loads((folder / "inputs.json").read_text())
    return data


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a compressed file."""
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]


def close(ours: Any, theirs: Any) -> bool:
    """Return whether two figures agree; lists are text in the reference."""
    if isinstance(theirs, str) and theirs.startswith("["):
        theirs = ast.literal_eval(theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(theirs, str):
        return bool(ours == theirs)
    return bool(ours == theirs or abs(ours - theirs) <= TOLERANCE * abs(theirs))


def test_every_random_candidate(folder: Path, inputs: dict[str, Any]) -> None:
    """All statistics of 1,750 candidates, feasible or not."""
    rows = lines(folder / "random.jsonl.gz")
    assert len(rows) == 1750
    for row in rows:
        ours = evaluate(
            row["strat"],
            inputs["models"][row["model"]],
            row["config"],
            row["nv"],
            row["n_gpus"],
            row["global_batch_size"],
            inputs["systems"][row["system"]],
            compat=True,
        )
        assert len(ours) == (22 if row["strat"] == "1d" else 23)
        assert not {k for k, v in row["stats"].items() if not close(ours[k], v)}
        assert {k: ours[k] for k in row["nv"]} == row["nv"]


def test_every_published_best_row(folder: Path, inputs: dict[str, Any]) -> None:
    """Every row is reproduced by its assignment, or by one of them where it names none."""
    rows = lines(folder / "best10.jsonl.gz")
    assert len(rows) == 1745
    for row in rows:
        config, flat = row["config"], row["strat"] == "1d"
        names = ("nv_tp", "nv_dp", "nv_pp") if flat else ("nv_tp1", "nv_tp2", "nv_dp", "nv_pp")
        dims = tuple(config[k] for k in (("tp",) if flat else ("tp1", "tp2")) + ("dp", "pp"))
        system = inputs["systems"][row["system"]]
        if names[0] in row["published_stats"]:
            choices = [{k: row["published_stats"][k] for k in names}]
        else:
            found = assignments(dims, system["nvlink_size"])
            choices = [dict(zip(names, inside, strict=True)) for inside in found]
        answers = [
            evaluate(
                row["strat"],
                inputs["models"][row["model"]],
                config,
                placement,
                row["n_gpus"],
                row["global_batch_size"],
                system,
                compat=True,
            )
            for placement in choices
        ]
        assert any(
            all(close(ours[k], v) for k, v in row["current_stats"].items()) for ours in answers
        )


def test_every_row_of_the_layer_tables(folder: Path, inputs: dict[str, Any]) -> None:
    """All figures of every operation of 15 layers."""
    tables = json.loads((folder / "layer_tables.json").read_text())
    assert len(tables) == 15
    for table in tables:
        model, system = (
            Model(**inputs["models"][table["model"]]),
            System(**inputs["systems"][table["system"]]),
        )
        candidate = candidate_of(table["strat"], table["config"], table["nv"])
        sizes = sizes_of(model, table["strat"], candidate, system, COMPAT)
        ours = row_table([row_time(row, system, COMPAT) for row in layer_rows(sizes)], system)
        for mine, theirs in zip(ours, table["mlp_layers"] + table["sa_layers"], strict=True):
            assert list(mine) == list(theirs)
            assert not [k for k, v in theirs.items() if not close(mine[k], v)], mine["name"]


def test_every_row_of_plain_attention(folder: Path, inputs: dict[str, Any]) -> None:
    """Attention that writes its scores: over heads, over rows, in SUMMA, and recomputed."""
    tables = json.loads((folder / "plain_attention.json").read_text())
    assert len(tables) == 12
    for table in tables:
        model, system = (
            Model(**inputs["models"][table["model"]]),
            System(**inputs["systems"][table["system"]]),
        )
        candidate = Candidate(
            data=1,
            columns=table["m1"],
            rows=table["m2"],
            pipeline=1,
            microbatch=table["b"],
            panels=table["summa_nb"],
            columns_in_domain=table["t1"],
            rows_in_domain=table["t2"],
        )
        strategy = "1d" if table["module"].startswith("1d") else "2d"
        rows = plain_attention_rows(
            sizes_of(model, strategy, candidate, system, COMPAT),  # type: ignore[arg-type]
            "summa" if "SUMMA" in table["module"] else "plain",
            recompute="recompute" in table["module"],
        )
        ours = row_table([row_time(row, system, COMPAT) for row in rows], system)
        for mine, theirs in zip(ours, table["rows"], strict=True):
            assert not [k for k, v in theirs.items() if not close(mine[k], v)], mine["name"]


def test_every_point_of_the_communication_grid(folder: Path, inputs: dict[str, Any]) -> None:
    """Every branch of a collective's time."""
    with (folder / "comm_grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 500
    for row in rows:
        ours = collective_s(
            System(**inputs["systems"][row["system"]]),
            COMPAT,
            row["comm_type"],
            float(row["vol_GB"]),
            int(row["n_gpus"]),
            int(row["topology"]),
        )
        assert close(ours, float(row["time_s"])), row


def test_the_number_of_candidates(folder: Path, inputs: dict[str, Any]) -> None:
    """The compiled space has every published count, the readable one the small ones."""
    counts = json.loads((folder / "candidate_counts.json").read_text())
    assert len(counts) == 81
    readable = 0
    for key, count in counts.items():
        name, domain, gpus, strategy = key.split("|")
        model = Model(**inputs["models"][name])
        system = System(**inputs["systems"]["B200-NVS4"] | {"nvlink_size": int(domain[3:])})
        found = survey(strategy, model, int(gpus), 4096, system, compat=True)
        assert found.candidates == count, key
        if count < 10_000:
            readable += 1
            space = candidates(model, strategy, int(gpus), 4096, int(domain[3:]))
            assert sum(1 for _ in space) == count, key
    assert readable > 20


def test_the_search_finds_the_published_best(folder: Path, inputs: dict[str, Any]) -> None:
    """Every row that is there has the throughput of its rank; candidates may be equally fast."""
    rows = lines(folder / "best10.jsonl.gz")
    assert {row["rank"] for row in rows} == set(range(10))
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        names = ("strat", "model", "n_gpus", "global_batch_size", "system")
        key = tuple(row[name] for name in names)
        if key not in found:
            strategy, model, gpus, batch, system = key
            best = explore(
                strategy,
                inputs["models"][model],
                gpus,
                batch,
                inputs["systems"][system],
                compat=True,
            )
            found[key] = [x.throughput for x in best]
        assert close(found[key][row["rank"]], row["global_batch_size"] / row["current_t"]), key
    assert len(found) > 200


def test_no_published_vision_model_fits_without_rows(inputs: dict[str, Any]) -> None:
    """Its sequence is so long that no number of GPUs holds it when only heads are divided."""
    for system in inputs["systems"].values():
        for exponent in range(2, 15):
            model = inputs["models"]["vit_era5"]
            assert explore("1d", model, 2**exponent, 4096, system, compat=True) == []
