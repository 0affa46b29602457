"""The two-dimensional model against published figures, with its defects on: engine and oracle."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from search.closed_form.tensor2d import COMPAT, Model, System, evaluate, explore, survey
from search.closed_form.tensor2d.engine import link_s
from tests.data.read import (
    tensor2d_attention,
    tensor2d_collectives,
    tensor2d_counts,
    tensor2d_documents,
    tensor2d_layers,
    tensor2d_rows,
)
from tests.oracles.tensor2d import evaluate as readable
from tests.oracles.tensor2d.links import collective_s
from tests.oracles.tensor2d.space import candidates

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def inputs(data_dir: Path) -> dict[str, dict[str, Any]]:
    """Return models and systems."""
    return tensor2d_documents(data_dir)


def close(ours: Any, theirs: Any) -> bool:
    """Return whether two figures agree; lists are text in the reference."""
    if isinstance(theirs, str) and theirs.startswith("["):
        theirs = ast.literal_eval(theirs)
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(close, ours, theirs))
    if isinstance(theirs, str):
        return bool(ours == theirs)
    return bool(ours == theirs or abs(ours - theirs) <= TOLERANCE * abs(theirs))


BOTH = pytest.mark.parametrize("price", [evaluate, readable], ids=["engine", "oracle"])


def priced(price: Any, row: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return our statistics of a published row's candidate."""
    found: dict[str, Any] = price(
        row["strat"],
        inputs["models"][row["model"]],
        row["config"],
        row["nv"],
        row["n_gpus"],
        row["global_batch_size"],
        inputs["systems"][row["system"]],
        compat=True,
    )
    return found


@BOTH
def test_every_random_candidate(data_dir: Path, inputs: dict[str, Any], price: Any) -> None:
    """All statistics of 1,750 candidates, feasible or not."""
    rows = tensor2d_rows(data_dir, "random")
    assert len(rows) == 1750
    for row in rows:
        ours = priced(price, row, inputs)
        assert len(ours) == (22 if row["strat"] == "1d" else 23)
        assert not {k for k, v in row["stats"].items() if not close(ours[k], v)}
        assert {k: ours[k] for k in row["nv"]} == row["nv"]


@BOTH
def test_every_published_best_row(data_dir: Path, inputs: dict[str, Any], price: Any) -> None:
    """Every row is reproduced by the assignment that it names."""
    rows = tensor2d_rows(data_dir, "best")
    assert len(rows) == 1745
    for row in rows:
        ours = priced(price, row, inputs)
        assert not {k for k, v in row["stats"].items() if not close(ours[k], v)}


@BOTH
def test_every_row_of_the_layer_tables(data_dir: Path, inputs: dict[str, Any], price: Any) -> None:
    """All figures of every operation of 15 layers."""
    tables = tensor2d_layers(data_dir)
    assert len(tables) == 15
    for table in tables:
        config = table["config"]
        tensor = config["tp"] if table["strat"] == "1d" else config["tp1"] * config["tp2"]
        ours = price(
            table["strat"],
            inputs["models"][table["model"]],
            config,
            table["nv"],
            tensor * config["pp"] * config["dp"],
            config["dp"] * config["mbs"],
            inputs["systems"][table["system"]],
            compat=True,
            layers=True,
        )["layers"]
        for mine, theirs in zip(ours, table["mlp_layers"] + table["sa_layers"], strict=True):
            assert list(mine) == list(theirs)
            assert not [k for k, v in theirs.items() if not close(mine[k], v)], mine["name"]


@BOTH
def test_every_row_of_plain_attention(data_dir: Path, inputs: dict[str, Any], price: Any) -> None:
    """Attention that writes its scores: over heads, over rows, in SUMMA, and recomputed."""
    tables = tensor2d_attention(data_dir)
    assert len(tables) == 12
    for table in tables:
        config = {"dp": 1, "pp": 1, "mbs": table["b"]}
        placement = {"nv_dp": 1, "nv_pp": 1}
        strategy = "1d" if table["module"].startswith("1d") else "2d"
        if strategy == "1d":
            config["tp"], placement["nv_tp"] = table["m1"], table["t1"]
        else:
            config |= {"tp1": table["m1"], "tp2": table["m2"], "nb": table["summa_nb"]}
            placement |= {"nv_tp1": table["t1"], "nv_tp2": table["t2"]}
        ours = price(
            strategy,
            inputs["models"][table["model"]],
            config,
            placement,
            table["m1"] * table["m2"],
            table["b"],
            inputs["systems"][table["system"]],
            compat=COMPAT,
            attention="summa" if "SUMMA" in table["module"] else "plain",
            recompute="recompute" in table["module"],
            layers=True,
        )["layers"]
        names = ("logits", "softmax", "dpr_at", "attend")
        rows = [row for row in ours if row["name"] in names]
        for mine, theirs in zip(rows, table["rows"], strict=True):
            assert not [k for k, v in theirs.items() if not close(mine[k], v)], mine["name"]


@pytest.mark.parametrize("seconds", [link_s, collective_s], ids=["engine", "oracle"])
def test_every_point_of_the_communication_grid(
    data_dir: Path, inputs: dict[str, Any], seconds: Any
) -> None:
    """Every branch of a collective's time."""
    rows = tensor2d_collectives(data_dir)
    assert len(rows) > 500
    for row in rows:
        ours = seconds(
            System(**inputs["systems"][row["system"]]),
            COMPAT,
            row["comm_type"],
            row["vol_GB"],
            row["n_gpus"],
            row["topology"],
        )
        assert close(ours, row["time_s"]), row


def test_the_number_of_candidates(data_dir: Path, inputs: dict[str, Any]) -> None:
    """The compiled space has every published count, the readable one the small ones."""
    counts = tensor2d_counts(data_dir)
    assert len(counts) == 81
    readable = 0
    for row in counts:
        model, domain = Model(**Model.prepared(inputs["models"][row["model"]])), row["nvlink_size"]
        system = System(**inputs["systems"]["B200-NVS4"] | {"nvlink_size": domain})
        found = survey(row["strat"], model, row["n_gpus"], 4096, system, compat=True)
        assert found.considered == row["candidates"], row
        if row["candidates"] < 10_000:
            readable += 1
            space = candidates(model, row["strat"], row["n_gpus"], 4096, domain)
            assert sum(1 for _ in space) == row["candidates"], row
    assert readable > 20


def test_the_search_finds_the_published_best(data_dir: Path, inputs: dict[str, Any]) -> None:
    """Every row that is there has the throughput of its rank; candidates may be equally fast."""
    rows = tensor2d_rows(data_dir, "best")
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
            found[key] = [x.rate_per_s for x in best]
        assert close(found[key][row["rank"]], row["global_batch_size"] / row["stats"]["t"]), key
    assert len(found) > 200


def test_no_published_vision_model_fits_without_rows(inputs: dict[str, Any]) -> None:
    """Its sequence is so long that no number of GPUs holds it when only heads are divided."""
    for system in inputs["systems"].values():
        for exponent in range(2, 15):
            model = inputs["models"]["vit_era5"]
            assert explore("1d", model, 2**exponent, 4096, system, compat=True) == ()
