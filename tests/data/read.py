"""Reads the published figures that lie beside this file; `make.py` writes them.

A file is one JSON object, compressed: what it holds, its source, how the figures were obtained, and
`tables`. A table is an object of columns of equal length. Floating-point figures are written so
that they are read back to the last bit. Cells are null where a row has no such figure.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "calculon_best",
    "calculon_documents",
    "calculon_points",
    "csv_path",
    "galvatron_answers",
    "read_csv",
    "read_file",
    "read_settings",
    "stage_problems",
    "table",
    "tensor2d_attention",
    "tensor2d_collectives",
    "tensor2d_counts",
    "tensor2d_documents",
    "tensor2d_layers",
    "tensor2d_rows",
]

Row = dict[str, Any]


@cache
def read_file(folder: Path, name: str) -> dict[str, Any]:
    """Return the whole document NAME.json.gz of a folder."""
    with gzip.open(folder / f"{name}.json.gz") as file:
        document: dict[str, Any] = json.load(file)
    return document


def table(folder: Path, name: str, which: str) -> list[Row]:
    """Return the rows of one table of a document, as new objects by column."""
    columns = read_file(folder, name)["tables"][which]
    cells = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in cells]


def _given(rows: list[Row]) -> list[Row]:
    """Return rows without the cells that do not apply to them."""
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def _groups(rows: list[Row], by: str) -> dict[Any, list[Row]]:
    """Return rows by the value of a column, which they lose."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.pop(by), []).append(row)
    return groups


def calculon_documents(folder: Path) -> dict[str, dict[str, Any]]:
    """Return applications ("models") and systems by name, as Calculon's documents."""
    name = "calculon"
    applications = table(folder, name, "applications")
    systems: dict[str, Any] = {
        row["name"]: {"processing_mode": row["processing_mode"], "networks": []}
        for row in table(folder, name, "systems")
    }
    for row in table(folder, name, "processors"):
        kinds = systems[row.pop("system")].setdefault(row.pop("unit"), {})
        kinds[row.pop("datatype")] = row
    for row in table(folder, name, "memories"):
        systems[row.pop("system")][row.pop("tier")] = row
    for row in table(folder, name, "networks"):
        system = systems[row.pop("system")]
        row["ops"] = {
            operation: row.pop(operation)
            for operation in ("p2p", "reduce_scatter", "all_gather", "all_reduce")
        }
        system["networks"].append(row)
    return {"models": {row.pop("name"): row for row in applications}, "systems": systems}


def calculon_points(folder: Path) -> list[Row]:
    """Return evaluations by Calculon with statistics or an error; random ones have no `id`."""
    points = table(folder, "calculon_points", "points")
    executions = table(folder, "calculon_points", "executions")
    statistics = table(folder, "calculon_points", "statistics")
    for point, execution, stats in zip(points, executions, statistics, strict=True):
        point["ok"] = point["error_kind"] is None
        point["execution"] = execution
        point["stats"] = stats if point["ok"] else None
    for index, rows in _groups(table(folder, "calculon_points", "operations"), "point").items():
        points[index]["stats"]["layers"] = rows
    return points


def calculon_best(folder: Path) -> list[Row]:
    """Return execution and statistics of the ten best of Calculon's documented search."""
    rows = zip(
        table(folder, "calculon", "best_executions"),
        table(folder, "calculon", "best_statistics"),
        strict=True,
    )
    return [{"execution": execution, "stats": stats} for execution, stats in rows]


def tensor2d_documents(folder: Path) -> dict[str, dict[str, Any]]:
    """Return models and systems of the two-dimensional model by name."""
    return {
        which: {row.pop("name"): row for row in table(folder, "tensor2d", which)}
        for which in ("models", "systems")
    }


def tensor2d_rows(folder: Path, which: str) -> list[Row]:
    """Return the published best rows ("best") or the random candidates ("random")."""
    name = f"tensor2d_{which}"
    rows = table(folder, name, "candidates")
    for part in ("config", "nv", "stats"):
        for row, cells in zip(rows, _given(table(folder, name, part)), strict=True):
            row[part] = cells
    return rows


def tensor2d_layers(folder: Path) -> list[Row]:
    """Return 15 candidates with the rows of their MLP and of their attention."""
    candidates = table(folder, "tensor2d", "layers")
    for part in ("config", "nv"):
        cells = _given(table(folder, "tensor2d", f"layers_{part}"))
        for row, chosen in zip(candidates, cells, strict=True):
            row[part] = chosen
    for index, rows in _groups(table(folder, "tensor2d", "layer_operations"), "layer").items():
        parts = _groups(rows, "part")
        candidates[index] |= {"mlp_layers": parts["mlp"], "sa_layers": parts["attention"]}
    return candidates


def tensor2d_attention(folder: Path) -> list[Row]:
    """Return 12 cases of attention that writes its scores, with their rows."""
    cases = table(folder, "tensor2d", "attention")
    operations = _groups(table(folder, "tensor2d", "attention_operations"), "case")
    return [row | {"rows": operations[index]} for index, row in enumerate(cases)]


def tensor2d_collectives(folder: Path) -> list[Row]:
    """Return the grid of collectives: GB, GPUs, GPUs of a domain, seconds."""
    return table(folder, "tensor2d", "collectives")


def tensor2d_counts(folder: Path) -> list[Row]:
    """Return how many candidates the published space has, by model, domain, GPUs, strategy."""
    return table(folder, "tensor2d", "counts")


def galvatron_answers(folder: Path) -> list[Row]:
    """Return what Galvatron's engine answered; `strategy_file` is None where it found nothing."""
    answers = table(folder, "galvatron", "answers")
    found = iter(_given(table(folder, "galvatron", "strategies")))
    for row in answers:
        row["strategy_file"] = None if row["step_s"] is None else next(found)
    return answers


def stage_problems(folder: Path) -> list[Row]:
    """Return the stage problems of Galvatron's engine; `best_s` is infinite where nothing fits."""
    problems = table(folder, "galvatron_stages", "problems")
    for row in problems:
        row["best_s"] = float("inf") if row["best_s"] is None else row["best_s"]
    return problems


def csv_path(folder: Path, name: str) -> Path:
    """Return the path of a table of runs: NAME.csv.gz where that exists, else NAME.csv."""
    path = folder / f"{name}.csv.gz"
    return path if path.is_file() else path.with_suffix("")


def read_csv(folder: Path, name: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of published runs, as text by column."""
    path = csv_path(folder, name)
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    yield from csv.DictReader(io.StringIO(text, newline=""))


def read_settings(path: Path) -> dict[int, dict[str, Any]]:
    """Return what trainers' recipes set, by line number of the row; a .jsonl or .jsonl.gz file."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    entries = map(json.loads, text.splitlines())
    return {int(entry["row"]): entry["settings"] for entry in entries}
