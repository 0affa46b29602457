"""Writes the tables of published figures in this folder from the folder of reference cases.

`python -m tests.data.make CASES_FOLDER [--out DIR]`. What is written is read back and compared with
the originals, cell by cell; the same cases give the same bytes. Columns that nothing here reads
are left out, and so are cells that follow from others (each is checked before it is dropped).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.data import goldens, read

__all__ = ["check", "columns", "compressed", "documents", "main", "write"]

Row = dict[str, Any]
Tables = dict[str, dict[str, list[Any]]]

TABLES_OF_RUNS = {
    "published_runs": "published_runs",
    "published_runs_more": "published_runs_more",
    "published_runs_later": "new_runs_shared",
    "published_runs_single_node": "published_runs_single_node",
}
"""Tables of runs, and their names in the folder of cases."""
SETTINGS = {
    "published_runs_settings": "published_runs_settings",
    "published_runs_later_settings": "new_runs_shared",
}
"""Recipes' settings by line of a table, and their names in the folder of cases."""
MEMORY = "memory_goldens"
_CALCULON = "Calculon (SC'23, doi 10.1145/3581784.3607102)"
_TENSOR2D = "the performance model of arXiv 2410.00273"
_GALVATRON = "Galvatron's search engine, its newest release and v2.4.0"
_OWN_UNITS = "the program's own, under its own names; docs/concepts/closed-form.md lists them"


def columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns in the order of their first appearance; absent cells are None."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _lines(path: Path) -> list[Row]:
    with gzip.open(path) as file:
        return [json.loads(line) for line in file]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _only(rows: Iterable[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    return columns({name: row.get(name) for name in names} for row in rows)


def _calculon_systems(systems: Mapping[str, Row]) -> Tables:
    """Return processors, memories and networks of Calculon's systems, one row each."""
    processors, memories, networks = [], [], []
    for name, system in systems.items():
        for unit in ("matrix", "vector"):
            for datatype, figures in system[unit].items():
                processors.append({"system": name, "unit": unit, "datatype": datatype, **figures})
        memories += [{"system": name, "tier": tier, **system[tier]} for tier in ("mem1", "mem2")]
        for network in system["networks"]:
            row = {"system": name, **network}
            networks.append(row | row.pop("ops"))
    return {
        "systems": columns(
            {"name": name, "processing_mode": system["processing_mode"]}
            for name, system in systems.items()
        ),
        "processors": columns(processors),
        "memories": columns(memories),
        "networks": columns(networks),
    }


def calculon(cases: Path) -> Tables:
    """Return applications, systems and the ten best of the documented search."""
    inputs = _json(cases / "calculon" / "inputs.json")
    best = list(_json(cases / "calculon" / "turing530B_5128_top10.json").values())
    return {
        "applications": columns(
            {"name": name, **figures} for name, figures in inputs["models"].items()
        ),
        **_calculon_systems(inputs["systems"]),
        "best_executions": columns(row["execution"] for row in best),
        "best_statistics": columns(row["stats"] for row in best),
    }


def _original_points(cases: Path) -> list[Row]:
    with gzip.open(cases / "calculon" / "named.json.gz") as file:
        named: list[Row] = json.load(file)
    return named + _lines(cases / "calculon" / "random.jsonl.gz")


def calculon_points(cases: Path) -> Tables:
    """Return every evaluation; its application is the one of its model's name."""
    models = _json(cases / "calculon" / "inputs.json")["models"]
    points = _original_points(cases)
    for point in points:
        assert point.get("application", models[point["model"]]) == models[point["model"]]
        assert point["ok"] == (point["error_kind"] is None)
    stats = [point["stats"] or {} for point in points]
    return {
        "points": _only(points, ("id", "model", "system", "error_kind", "error")),
        "executions": columns(point["execution"] for point in points),
        "statistics": columns(
            {name: cell for name, cell in row.items() if name != "layers"} for row in stats
        ),
        "operations": columns(
            {"point": index, **operation}
            for index, row in enumerate(stats)
            for operation in row.get("layers", ())
        ),
    }


def tensor2d(cases: Path) -> Tables:
    """Return models, systems, tables of operations, the grid of collectives and the counts."""
    folder = cases / "perf_estimates"
    inputs = _json(folder / "inputs.json")
    layers = _json(folder / "layer_tables.json")
    attention = _json(folder / "plain_attention.json")
    with (folder / "comm_grid.csv").open(encoding="utf-8", newline="") as file:
        grid = list(csv.DictReader(file))
    counts = []
    for key, count in _json(folder / "candidate_counts.json").items():
        model, domain, gpus, strategy = key.split("|")
        counts.append(
            {
                "model": model,
                "nvlink_size": int(domain.removeprefix("nvs")),
                "n_gpus": int(gpus),
                "strat": strategy,
                "candidates": count,
            }
        )
    return {
        "models": columns({"name": name, **row} for name, row in inputs["models"].items()),
        "systems": columns({"name": name, **row} for name, row in inputs["systems"].items()),
        "layers": _only(layers, ("strat", "model", "system")),
        "layers_config": columns(row["config"] for row in layers),
        "layers_nv": columns(row["nv"] for row in layers),
        "layer_operations": columns(
            {"layer": index, "part": part, **operation}
            for index, row in enumerate(layers)
            for part, key in (("mlp", "mlp_layers"), ("attention", "sa_layers"))
            for operation in row[key]
        ),
        "attention": columns({k: v for k, v in row.items() if k != "rows"} for row in attention),
        "attention_operations": columns(
            {"case": index, **operation}
            for index, row in enumerate(attention)
            for operation in row["rows"]
        ),
        "collectives": columns(
            {
                "system": row["system"],
                "comm_type": row["comm_type"],
                "vol_GB": float(row["vol_GB"]),
                "n_gpus": int(row["n_gpus"]),
                "topology": int(row["topology"]),
                "time_s": float(row["time_s"]),
            }
            for row in grid
        ),
        "counts": columns(counts),
    }


def _originals_of(cases: Path, which: str) -> list[Row]:
    """Return best or random candidates, the placement apart from the statistics."""
    name = "best10" if which == "best" else which
    rows = _lines(cases / "perf_estimates" / f"{name}.jsonl.gz")
    for row in rows:
        if which == "best":  # published, and computed again from the same inputs: the same figures
            published = row.pop("published_stats")
            row["stats"] = row.pop("current_stats")
            row["nv"] = {k: v for k, v in published.items() if k.startswith("nv_")}
            assert published == row["stats"] | row["nv"]
            assert row.pop("published_mem") == row.pop("current_mem") == row["stats"]["mem"]
            seconds = row.pop("current_t")
            assert seconds == row["stats"]["t"]
            assert row.pop("published_throughput") == row["global_batch_size"] / seconds
        else:
            assert (row.pop("t"), row.pop("mem")) == (row["stats"]["t"], row["stats"]["mem"])
    return rows


def tensor2d_rows(cases: Path, which: str) -> Tables:
    """Return candidates with configuration, placement and statistics."""
    rows, parts = _originals_of(cases, which), ("config", "nv", "stats")
    return {
        "candidates": columns({k: v for k, v in row.items() if k not in parts} for row in rows),
        **{part: columns(row[part] for row in rows) for part in parts},
    }


def galvatron(cases: Path) -> Tables:
    """Return what was asked and answered; only answers have a strategy."""
    rows = _json(cases / "galvatron" / "results.json")
    for row in rows:
        assert (row["strategy_file"] is None) == (row["step_s"] is None)
    names = ("engine", "case", "options", "step_s", "cpu_s", "error")
    return {
        "answers": _only(rows, names),
        "strategies": columns(row["strategy_file"] for row in rows if row["strategy_file"]),
    }


def galvatron_stages(cases: Path) -> Tables:
    """Return the stage problems; infinity, which JSON does not have, is None."""
    rows = []
    for path in sorted((cases / "dp").glob("*.npz")):
        with np.load(path) as file:
            row = {"name": path.stem} | {name: file[name].tolist() for name in file.files}
        rows.append(row | {"best_s": None if np.isinf(row["best_s"]) else row["best_s"]})
    return {"problems": columns(rows)}


def documents(cases: Path) -> dict[str, dict[str, Any]]:
    """Return every document by the name of its file."""

    def told(what: str, source: str, obtained: str, units: str, tables: Tables) -> dict[str, Any]:
        head = {"what": what, "source": source, "obtained": obtained, "units": units}
        return head | {"tables": tables}

    run, published = "by running the program", "published outputs, computed again by running it"
    return {
        "calculon": told(
            "13 applications, 8 systems, and the ten best of the documented search",
            *(_CALCULON, run, _OWN_UNITS, calculon(cases)),
        ),
        "calculon_points": told(
            "170 named and 1,320 random evaluations, and the operations of 24 of them",
            *(_CALCULON, run, _OWN_UNITS, calculon_points(cases)),
        ),
        "tensor2d": told(
            "models, systems, operations of layers, collectives, numbers of candidates",
            *(_TENSOR2D, run, _OWN_UNITS, tensor2d(cases)),
        ),
        "tensor2d_best": told(
            "1,745 of the ten best candidates of published searches",
            *(_TENSOR2D, published, _OWN_UNITS, tensor2d_rows(cases, "best")),
        ),
        "tensor2d_random": told(
            "1,750 random candidates, feasible or not",
            *(_TENSOR2D, run, _OWN_UNITS, tensor2d_rows(cases, "random")),
        ),
        "galvatron": told(
            "16 questions for llama2-7b on 8 A100, and the answers",
            *(_GALVATRON, run, "seconds; CPU seconds of another machine", galvatron(cases)),
        ),
        "galvatron_stages": told(
            "68 stage problems out of its searches, with its optimum of each",
            *(_GALVATRON, run, "seconds and its MB, 2**20 bytes", galvatron_stages(cases)),
        ),
    }


def _compressed(text: str) -> bytes:
    # without a time of writing, so that the same content is the same file
    return gzip.compress(text.encode(), 9, mtime=0)


def compressed(document: Mapping[str, Any]) -> bytes:
    """Return a document as it is stored; raises ValueError for a figure that JSON does not have."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return _compressed(text)


def write(cases: Path, out: Path) -> dict[str, int]:
    """Write every table to `out`; return their sizes in bytes by file name."""
    contents = {
        f"{name}.json.gz": compressed(document) for name, document in documents(cases).items()
    }
    for name, original in TABLES_OF_RUNS.items():
        rows = list(read.read_csv(cases, original))
        text = io.StringIO()
        out_rows = csv.DictWriter(text, rows[0], lineterminator="\n")
        out_rows.writeheader()
        out_rows.writerows(rows)
        contents[f"{name}.csv.gz"] = _compressed(text.getvalue())
    # without the names of the recipes: what they set is all that is read
    for name, original in SETTINGS.items():
        lines = (cases / f"{original}.jsonl").read_text(encoding="utf-8").splitlines()
        entries = map(json.loads, lines)
        kept = [{key: entry[key] for key in ("row", "settings")} for entry in entries]
        contents[f"{name}.jsonl.gz"] = _compressed("".join(f"{json.dumps(k)}\n" for k in kept))
    contents[f"{MEMORY}.csv.gz"] = _compressed(goldens.written(goldens.golden_rows(cases)))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (out / name).write_bytes(content)
    return {name: len(content) for name, content in contents.items()}


def check(cases: Path, out: Path) -> None:
    """Read back what was written; raises AssertionError where a cell is not the original's."""
    inputs = _json(cases / "calculon" / "inputs.json")
    assert read.calculon_documents(out) == {key: inputs[key] for key in ("models", "systems")}
    best = _json(cases / "calculon" / "turing530B_5128_top10.json")
    assert read.calculon_best(out) == list(best.values())
    originals = _original_points(cases)
    for ours, theirs in zip(read.calculon_points(out), originals, strict=True):
        assert ours == {"id": None} | {key: theirs[key] for key in ours if key in theirs}
        if theirs["ok"]:  # the order of the statistics is part of them
            assert list(ours["stats"]) == list(theirs["stats"])
    folder = cases / "perf_estimates"
    inputs = _json(folder / "inputs.json")
    assert read.tensor2d_documents(out) == {key: inputs[key] for key in ("models", "systems")}
    for which in ("best", "random"):
        assert read.tensor2d_rows(out, which) == _originals_of(cases, which)
    tables = _json(folder / "layer_tables.json")
    for ours, theirs in zip(read.tensor2d_layers(out), tables, strict=True):
        assert ours == {key: theirs[key] for key in ours}
    assert read.tensor2d_attention(out) == _json(folder / "plain_attention.json")
    counts = {
        f"{row['model']}|nvs{row['nvlink_size']}|{row['n_gpus']}|{row['strat']}": row["candidates"]
        for row in read.tensor2d_counts(out)
    }
    assert counts == _json(folder / "candidate_counts.json")
    with (folder / "comm_grid.csv").open(encoding="utf-8", newline="") as file:
        for ours, text in zip(read.tensor2d_collectives(out), csv.DictReader(file), strict=True):
            assert ours == {key: type(ours[key])(cell) for key, cell in text.items()}
    answers = _json(cases / "galvatron" / "results.json")
    for ours, theirs in zip(read.galvatron_answers(out), answers, strict=True):
        assert ours == {key: theirs[key] for key in ours}
    for row in read.stage_problems(out):
        with np.load(cases / "dp" / f"{row['name']}.npz") as file:
            assert row == {"name": row["name"]} | {key: file[key].tolist() for key in file.files}
    for name, original in TABLES_OF_RUNS.items():
        assert list(read.read_csv(out, name)) == list(read.read_csv(cases, original))
    assert list(read.read_csv(out, MEMORY)) == goldens.golden_rows(cases)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write and check the tables; print their sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path, metavar="CASES_FOLDER")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    given = parser.parse_args(arguments)
    sizes = write(given.cases, given.out)
    read.read_file.cache_clear()
    check(given.cases, given.out)
    for name, size in sizes.items():
        print(f"{name:40s} {size:9,d}")
    print(f"{'together':40s} {sum(sizes.values()):9,d} bytes, equal to the originals")
    return 0


if __name__ == "__main__":
    sys.exit(main())
