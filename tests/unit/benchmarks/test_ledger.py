"""The ledger of published runs: no source gets worse unseen, and every row has a time or a reason.

Its golden file holds rows, median, mean absolute error and coverage of every source, and why rows
are not priced; a source may be better than that, and worse by a point at most.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.rates.accuracy import load_accuracy
from benchmarks import ledger
from benchmarks.ledger import Priced, Refused, price_rows, read_runs, statistics_of
from benchmarks.ledger_docs import PAGE

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "ledger.json"
POINT = 0.01
HOW = "if that is meant, `make golden` records it and `python -m benchmarks.ledger --docs` shows it"


def recorded() -> dict[str, Any]:
    """Return the golden figures."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return found


def worse(found: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    """Return what got worse from the known figures to those found, one sentence each."""
    problems = []
    for group, was in known["sources"].items():
        now = found["sources"].get(group)
        if now is None:
            problems.append(f"{group}: no row is priced, {was['rows']} were")
            continue
        if now["rows"] < was["rows"]:
            problems.append(f"{group}: {now['rows']} rows are priced, {was['rows']} were")
        for key in ("median", "mape"):
            if now[key] > was[key] + POINT:
                problems.append(f"{group}: {key} is {now[key]:.1%}, was {was[key]:.1%}")
        # one row more may lie outside: of few rows that is many points
        if now["coverage"] < was["coverage"] - POINT - 1.0 / was["rows"]:
            problems.append(f"{group}: covers {now['coverage']:.0%}, was {was['coverage']:.0%}")
    problems += [
        f"not priced: {reason}" for reason in found["refused"] if reason not in known["refused"]
    ]
    return problems


def figures() -> dict[str, Any]:
    """Price all shipped rows; seconds long, so only one test does."""
    entries = list(price_rows(*read_runs()))
    statistics = statistics_of([e for e in entries if isinstance(e, Priced)], load_accuracy())
    refused = Counter(f"{e.group}: {e.reason}" for e in entries if isinstance(e, Refused))
    return {
        "sources": {
            group: {
                "rows": found["rows"],
                **{key: round(found[key], 4) for key in ("median", "mape", "coverage")},
            }
            for group, found in statistics.items()
        },
        "refused": dict(sorted(refused.items())),
    }


@pytest.mark.whole
def test_golden_no_source_is_worse(request: pytest.FixtureRequest) -> None:
    """Every source is priced as well as recorded, to a point, and every row that was."""
    found = figures()
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return

    problems = worse(found, recorded())

    assert not problems, "; ".join([*problems, HOW])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"median": 0.05}, "A: median is 5.0%, was 3.0%"),
        ({"mape": 0.055}, "A: mape is 5.5%, was 4.0%"),
        ({"coverage": 0.6}, "A: covers 60%, was 90%"),
        ({"rows": 9}, "A: 9 rows are priced, 10 were"),
        ({"median": 0.0399, "mape": 0.049, "coverage": 0.8}, None),
        ({"median": 0.0, "mape": 0.01, "coverage": 1.0, "rows": 11}, None),
    ],
)
def test_what_is_worse_is_said(change: dict[str, float], problem: str | None) -> None:
    """A point more is no failure, more is; better never is."""
    was = {"rows": 10, "median": 0.03, "mape": 0.04, "coverage": 0.9}
    known = {"sources": {"A": was}, "refused": {}}

    found = worse({"sources": {"A": was | change}, "refused": {}}, known)

    assert found == ([] if problem is None else [problem])


def test_a_lost_source_and_a_new_reason_are_said() -> None:
    """A source without any priced row is worse, and so is a reason that was not there."""
    was = {"rows": 10, "median": 0.03, "mape": 0.04, "coverage": 0.9}

    found = worse(
        {"sources": {}, "refused": {"A: no card": 10}}, {"sources": {"A": was}, "refused": {}}
    )

    assert found == ["A: no row is priced, 10 were", "not priced: A: no card"]


def test_the_page_has_the_recorded_figures() -> None:
    """docs/concepts/accuracy.md says of every source what the golden file says, to a point."""
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- sources:")[2].partition("<!-- end of sources -->")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]

    known = recorded()["sources"]
    assert [row[0] for row in cells] == [*known]
    for group, rows, _, median, mape, _, coverage in cells:
        was = known[group]
        assert int(rows) == was["rows"], group
        assert float(median) / 100 == pytest.approx(was["median"], abs=POINT), group
        assert float(mape) / 100 == pytest.approx(was["mape"], abs=POINT), group
        assert float(coverage) / 100 == pytest.approx(was["coverage"], abs=POINT + 1 / was["rows"])


# --------------------------------------------------------------------------------------------------
# Small tables


def shipped(wanted: Callable[[Mapping[str, str]], bool]) -> tuple[int, dict[str, str]]:
    """Return the first shipped row that is wanted, with its line."""
    return next((line, dict(row)) for line, row in read_runs()[0] if wanted(row))


GOOD = shipped(lambda row: row["source"].startswith("Korthikanti") and bool(row["iter_time_s"]))[1]
MEMORY_ONLY = shipped(
    lambda row: row["source"].startswith("Korthikanti") and not row["iter_time_s"]
)[1]


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write a table of runs with the columns of the first row."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def answers(tmp_path: Path, rows: list[dict[str, str]], *options: str) -> list[dict[str, Any]]:
    """Return the rows of the JSON file that the command writes for a table."""
    out = tmp_path / "out.json"
    table = written(tmp_path / "runs.csv", rows)

    assert ledger.main(["--runs", str(table), "--json", str(out), *options]) == 0

    document = json.loads(out.read_text(encoding="utf-8"))
    assert list(document) == ["rows"]
    found: list[dict[str, Any]] = document["rows"]
    return found


def test_a_table_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows come out in order by line number: with a time and its interval, or with a reason."""
    odd = GOOD | {"layers": "many"}
    found = answers(tmp_path, [GOOD, MEMORY_ONLY, odd])

    good, unusable, wrong = found
    assert [row["row"] for row in found] == [2, 3, 4]
    assert (good["source"], good["group"]) == (GOOD["source"], "Korthikanti")
    assert unusable["source"] == MEMORY_ONLY["source"]
    assert good["measured_s"] == float(GOOD["iter_time_s"])
    assert good["predicted_s"] == pytest.approx(good["measured_s"], rel=0.06)
    low, high = good["interval_s"]
    assert low < good["predicted_s"] < high
    assert good["reason"] is None
    for row, reason in ((unusable, "memory only"), (wrong, "layers is many, no number")):
        assert row["reason"] == reason
        assert row["predicted_s"] is row["interval_s"] is row["measured_s"] is None
    assert "1 rows priced, 2 not:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "Colossal-AI 1.0"}, "the software that ran it is not known"),
        (
            {"iter_time_s": "", "tflops_per_gpu": "", "tokens_s_gpu": "", "peak_mem_gb": ""},
            "no time",
        ),
        ({"iter_time_s": "0"}, "iter_time_s is 0, no number above 0"),
        ({"iter_time_s": "nan"}, "iter_time_s is nan, no number above 0"),
        ({"tp": "-8"}, "tp is -8, no number above 0"),
        ({"micro_batch": "1.5"}, "micro_batch is 1.5, no whole number from 1 to 100000000"),
        ({"global_batch": "1e99"}, "global_batch is 1e99, no whole number from 1 to 100000000"),
        ({"global_batch": ""}, "global_batch is not given"),
        ({"zero_stage": "4"}, "zero_stage is 4, not 0, 1, 2 or 3"),
        ({"pp": "1000"}, f"pp 1000 is more than the {GOOD['layers']} layers"),
        ({"hidden": "3"}, f"hidden 3 is less than the {GOOD['heads']} heads"),
        ({"gpu_type": "TPUv4"}, "no card of TPUv4"),
        ({"precision": "int8"}, "precision int8"),
        ({"arch": "moe", "model": "Unheard"}, "sizes of Unheard are not given"),
        ({"cp": "x"}, "cp is x, no number"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(change: dict[str, str], reason: str) -> None:
    """Whatever a cell holds, the reason names it and nothing is raised."""
    (found,) = price_rows([(2, GOOD | change)], {})

    assert isinstance(found, Refused)
    assert found.reason == reason


def test_a_table_of_ones_own_says_what_was_assumed() -> None:
    """An unknown source has the software that its name contains, and a model its shipped sizes."""
    mixture = {"arch": "moe", "model": "zai-org/GLM-4.5-Air", "gpu_type": "H100"}
    for source, like in (("our torchtitan runs", "torchtitan"), ("us", "NVIDIA Megatron-Bridge")):
        (found,) = price_rows([(2, GOOD | mixture | {"source": source})], {})
        assert isinstance(found, Priced), found
        assert f"software as of {like}" in found.run.taken
        assert found.run.job.blocks[-1].mlp is not None
        assert not found.run.site_known


@pytest.mark.parametrize("column", [*GOOD])
def test_no_column_is_needed_to_get_an_answer(column: str, tmp_path: Path) -> None:
    """A table without a column has it empty: its row is priced or refused, never an error."""
    rows = read_runs(
        written(tmp_path / "runs.csv", [{k: v for k, v in GOOD.items() if k != column}])
    )

    (found,) = price_rows(*rows)

    assert isinstance(found, Priced) or found.reason


def test_settings_are_those_of_the_line(tmp_path: Path) -> None:
    """Settings of a recipe change the time of the row with their line number, and of no other."""
    row = shipped(lambda row: row["source"].startswith("NVIDIA Megatron-Bridge"))[1]
    path = tmp_path / "settings.jsonl"
    path.write_text(json.dumps({"row": 3, "settings": {"recompute_modules": ["core_attn"]}}) + "\n")

    plain, again = answers(tmp_path, [row, row], "--settings", str(path))
    both = answers(tmp_path, [row, row])

    assert both[0]["predicted_s"] == both[1]["predicted_s"] == plain["predicted_s"]
    assert again["predicted_s"] > plain["predicted_s"]


LONG = GOOD | {
    "source": "NVIDIA NeMo long-sequence performance (with CP)",
    "model": "LLAMA2-7B",
    "arch": "llama",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "11008",
    "vocab": "32000",
    "seq": "262144",
    "gpu_type": "H100-SXM",
    "gpu_mem_gb": "80",
    "gpus_per_node": "8",
    "num_gpus": "256",
    "tp": "4",
    "pp": "1",
    "dp": "8",
    "cp": "8",
    "global_batch": "16",
    "micro_batch": "1",
    "precision": "fp8",
    "iter_time_s": "",
    "tflops_per_gpu": "549",
}


def test_floating_point_operations_are_counted_as_a_source_counts_them() -> None:
    """NeMo's logs of that time have the whole square of scores, which is most of a long step."""
    (found,) = price_rows([(2, LONG)], {})

    assert isinstance(found, Priced)
    tokens, hidden, wide, layers = 16 * 262144, 4096, 11008, 32
    linear = layers * (4 * hidden * hidden + 3 * hidden * wide) + hidden * 32000
    square = layers * 2 * hidden * 262144
    expected_s = 6.0 * tokens * (linear + square) / (549e12 * 256)
    assert found.run.measured_s == pytest.approx(expected_s)
    assert "attention=flash2" in found.run.taken
