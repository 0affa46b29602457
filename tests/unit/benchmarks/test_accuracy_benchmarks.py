"""Comparisons with published runs and measured collectives: what is read, refused and reported."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from autopar.records import replace
from benchmarks import accuracy, accuracy_collectives
from benchmarks.accuracy_models import MODELS, Answer, calculon, planner, tensor2d
from benchmarks.accuracy_rows import FILES, UnusableError, read_rows, run_of
from search.closed_form.files import calculon_system
from search.closed_form.validation import validate

ROW = {
    "source": "a table",
    "where": "",
    "model": "megatron-22B",
    "arch": "gpt",
    "params_b": "22",
    "layers": "48",
    "hidden": "6144",
    "ffn": "24576",
    "heads": "64",
    "kv_heads": "64",
    "vocab": "51200",
    "seq": "2048",
    "gpu_type": "A100-SXM",
    "gpu_mem_gb": "80",
    "gpus_per_node": "8",
    "num_gpus": "8",
    "tp": "8",
    "pp": "1",
    "dp": "1",
    "cp": "1",
    "ep": "1",
    "vpp": "1",
    "micro_batch": "4",
    "global_batch": "4",
    "sequence_parallel": "0",
    "recompute": "full",
    "zero_stage": "0",
    "sharded_optimizer": "0",
    "precision": "float16",
    "iter_time_s": "1.42",
    "tflops_per_gpu": "",
    "tflops_kind": "",
    "tokens_s_gpu": "",
    "peak_mem_gb": "40",
    "quality": "direct",
    "inferred_fields": "",
    "notes": "",
}
LLAMA = {"arch": "llama", "source": "SimuMax", "tp": "2", "dp": "4", "global_batch": "16"}


@pytest.mark.parametrize("mode", ["full", "seqsel"])
def test_a_row_is_the_run_that_it_names(mode: str) -> None:
    """The 22B rows get the times of the validation, which builds its executions by itself."""
    check = next(
        check
        for check in validate(calculon_system("a100-80gb"))
        if (check.group, check.model, check.mode) == ("step time", "megatron-22B", mode)
    )
    row = ROW if mode == "full" else ROW | {"sequence_parallel": "1", "recompute": "selective"}

    assert check.computed == calculon(run_of(row)).time_s


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": ""}, "heads is not given"),
        ({"micro_batch": ""}, "micro_batch is not given"),
        ({"dp": "2"}, "degrees do not multiply"),
        ({"arch": "moe/hybrid"}, "mixture of experts"),
        ({"precision": "fp8"}, "8- or 4-bit"),
        ({"cp": "2"}, "context parallelism"),
        ({"gpu_type": "GB300"}, "GB300"),
        ({"recompute": ""}, "recomputation is not given"),
        ({"sequence_parallel": ""}, "sequence parallelism is not given"),
        ({"tp": "4", "pp": "2", "vpp": ""}, "interleaving is not given"),
        ({"tp": "4", "dp": "2", "zero_stage": "", "sharded_optimizer": ""}, "data groups shard"),
        ({"iter_time_s": "", "peak_mem_gb": ""}, "neither time nor memory"),
    ],
)
def test_a_row_that_says_too_little_is_refused_with_its_reason(
    change: dict[str, str], reason: str
) -> None:
    """Nothing is guessed for it."""
    with pytest.raises(UnusableError, match=reason):
        run_of(ROW | change)


def test_what_a_source_leaves_open_is_listed() -> None:
    """SimuMax's rows do not say how tensor groups divide norms."""
    run = run_of(ROW | LLAMA | {"sequence_parallel": "", "sharded_optimizer": ""})

    assert run.taken == ("sequence_parallel=1", "sharded_optimizer=1")
    assert run.sequence_parallel
    assert run.zero == 1


def test_a_network_that_is_slower_than_the_shipped_one_costs_time() -> None:
    """Rows of BLOOM ran on 4 x 100 Gb/s for 8 GPUs, not 8 x 200."""
    row = ROW | {"num_gpus": "64", "dp": "8", "global_batch": "32"}
    slow = row | {"source": "BigScience BLOOM"}

    assert calculon(run_of(slow)).time_s > calculon(run_of(row)).time_s


def test_a_model_refuses_what_it_does_not_have() -> None:
    """Models are not compared where they would price something else."""
    zero3 = run_of(ROW | {"zero_stage": "3", "tp": "1", "dp": "8", "global_batch": "32"})
    with pytest.raises(UnusableError, match="ZeRO-3"):
        calculon(zero3)
    with pytest.raises(UnusableError, match="recomputation"):
        tensor2d(run_of(ROW))
    with pytest.raises(UnusableError, match="attention that keeps"):
        planner(run_of(ROW))
    with pytest.raises(UnusableError, match="published model"):
        calculon(run_of(ROW | LLAMA), compat=True)


def test_a_run_that_all_fit_gets_three_answers_of_one_size() -> None:
    """Flash attention, no recomputation, no interleaving: within a factor of two of each other."""
    run = run_of(ROW | LLAMA | {"recompute": "none", "sequence_parallel": "1", "micro_batch": "1"})
    # a made-up row of A100, while the cluster of its source has B200
    run = replace(run, site=None)
    answers = [calculon(run), tensor2d(run), planner(run)]

    assert max(a.time_s for a in answers) < 2 * min(a.time_s for a in answers)
    assert max(a.memory_bytes for a in answers) < 2 * min(a.memory_bytes for a in answers)


def test_absent_cases_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither benchmark fails where the published rows are not there."""
    assert accuracy.main(["--cases", str(tmp_path)]) == 0
    assert accuracy_collectives.main(["--cases", str(tmp_path)]) == 0

    assert capsys.readouterr().err.count("skipped: ") == 2


def test_tables_and_csv_name_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of CSV for each row and model; a row without an answer says why."""
    for name, rows in zip(FILES, ([ROW, ROW | {"heads": ""}], [ROW | LLAMA]), strict=True):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            out = csv.DictWriter(file, ROW)
            out.writeheader()
            out.writerows(rows)
    path = tmp_path / "out.csv"

    assert accuracy.main(["--cases", str(tmp_path), "--rows", "--csv", str(path)]) == 0

    text = capsys.readouterr().out
    assert "### a table" in text
    assert "| 1 | 1 | heads is not given |" in text
    assert "2 of 3 rows can be priced" in text
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert 3 * len(MODELS) == len(lines)
    first = lines[0]
    assert float(first["time_s_error"]) == pytest.approx(float(first["time_s"]) / 1.42 - 1)
    assert lines[len(MODELS)]["reason"] == "heads is not given"


def test_published_rows_are_read_whole(data_dir: Path) -> None:
    """Most rows are refused or priced for a reason that is written down; none is lost."""
    reasons: list[str] = []
    rows = list(read_rows(data_dir))
    assert len(rows) == 381 + 717
    for row in rows:
        try:
            run_of(row)
        except UnusableError as error:
            reasons.append(str(error))

    assert len(rows) > 2 * len(reasons) > 0
    assert all(reasons)


def test_doubling_the_all_reduce_is_nearer_to_measured_ones(cases_dir: Path) -> None:
    """Q1, on large tensors and one GPU of each node, where the published model moves them once."""
    folder = cases_dir / "perf_estimates"
    rows = accuracy_collectives.read(folder)
    found = accuracy_collectives.compare(rows)

    def error(name: str) -> float:
        return median(
            abs((found[name][i] or 0.0) / row.time_s - 1)
            for i, row in enumerate(rows)
            if row.operation == "allreduce" and row.topology == "one GPU of each node"
            if row.size_bytes >= 2**25
        )

    assert error("corrected") < 0.5 * error("published")


def test_coverage_counts_the_steps_inside_of_intervals() -> None:
    """Ends count; models without an interval, and rows without a time, do not."""
    run = run_of(ROW)

    def row(interval: tuple[float, float] | None) -> accuracy.Compared:
        answer = Answer(time_s=1.0, memory_bytes=1.0, interval_s=interval)
        return accuracy.Compared(
            source="", quality="", label="", run=run, answers={"planner": answer, "other": "none"}
        )

    rows = [row((1.42, 2.0)), row((1.0, 1.41)), row((1.0, 1.5)), row((1.5, 2.0)), row(None)]
    assert [found.covered("planner") for found in rows] == [True, False, True, False, None]
    assert accuracy.coverage(rows, "planner") == "50 %"
    assert accuracy.coverage(rows, "other") == ""


def test_planner_says_how_far_it_may_be_off() -> None:
    """As its answers in reports do: of the stack and the cluster of the source."""
    answer = planner(
        run_of(ROW | LLAMA | {"sequence_parallel": "1", "gpu_type": "B200", "gpu_mem_gb": "192"})
    )
    assert answer.interval_s is not None
    assert answer.interval_s[0] < answer.interval_s[1]
    assert calculon(run_of(ROW)).interval_s is None
