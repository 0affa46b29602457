"""The table of measured memory of Megatron-LM's functional tests, made of the reference cases.

Of golden files with one configuration, device, container and month of the trainer the newest is
kept, and of its arguments those that say more than how a run is logged, stored or steered.
`make.py` writes it beside the other tables; `read.py` reads it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["COLUMNS", "SOURCE", "golden_rows", "written"]

SOURCE = "NVIDIA/Megatron-LM d98e8a64 (22 August 2026), functional tests and their history"
_WHERE = "tests/functional_tests/test_cases/"
COLUMNS = (
    "id",
    "source",
    "where",
    "files",
    "config_key",
    "env",
    "platform",
    "second_run",
    "golden_date",
    "world_size",
    "args",
    "env_vars",
    "mem_alloc_last",
    "mem_max_last",
)
_LEFT_OUT = re.compile(
    r"--(adam-|async-|auto-detect|ckpt-|clip-grad|data-(cache-)?path|dist-ckpt|"
    r"distributed-(backend|timeout)|eval-|exit-duration|init-method|load$|log-|lr|manual-gc|min-lr|"
    r"no-ckpt|no-mmap|norm-eps|num-workers|"
    r"save|seed|split|straggler|tensorboard|test-mode|tiktoken|timing|tokenizer-model|"
    r"use-(checkpoint|persistent|mcore)|verify|wandb|weight-decay|langrl|logging-level)"
)
_VARIABLES = re.compile(r"CUBLAS_WORKSPACE_CONFIG|PYTORCH_CUDA_ALLOC_CONF|NVTE_[A-Z_]*")


def golden_rows(cases: Path) -> list[dict[str, str]]:
    """Return the rows of the table from the folder of reference cases, in the order of ids."""
    content = gzip.decompress((cases / "goldens" / "goldens.csv.gz").read_bytes())
    newest: dict[tuple[str, ...], dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(content.decode("utf-8"), newline="")):
        if not row["mem_max_last"]:
            continue
        found = _row(row)
        key = tuple(found[name] for name in ("env", "platform", "second_run", "world_size", "args"))
        key = (*key, found["env_vars"], found["golden_date"][:7])
        before = newest.get(key)
        number = 1 + int(before["files"] if before else 0)
        order = ("golden_date", "id")
        if before is None or [before[n] for n in order] <= [found[n] for n in order]:
            newest[key] = found
        newest[key]["files"] = str(number)
    return sorted(newest.values(), key=lambda row: row["id"])


def _row(row: Mapping[str, str]) -> dict[str, str]:
    arguments: dict[str, Any] = json.loads(row["args"])
    variables: dict[str, Any] = json.loads(row["env_vars"] or "{}")
    own = {
        "source": SOURCE,
        "where": _WHERE + row["id"],
        "files": "1",
        "args": json.dumps({k: v for k, v in arguments.items() if not _LEFT_OUT.match(k)}),
        "env_vars": json.dumps({k: v for k, v in variables.items() if _VARIABLES.fullmatch(k)}),
    }
    return {name: own.get(name, row.get(name, "")) for name in COLUMNS}


def written(rows: list[dict[str, str]]) -> str:
    """Return the table as text."""
    text = io.StringIO()
    out = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue()
