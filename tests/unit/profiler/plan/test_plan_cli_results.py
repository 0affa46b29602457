"""What `profile-plan` shows and writes: documents, tables, verdicts and exit codes."""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from autopar.command import run
from autopar.command.console import make_console
from autopar.documents.plan import read_strategy
from autopar.records import replace
from profiler.plan import command as plan_cli
from profiler.plan.job import DryRunRank, RunResult, judge
from profiler.plan.question import Question, ask
from profiler.plan.report import (
    dry_run_document,
    fits_of,
    run_document,
    show_dry_run,
    show_run,
)
from tests import warm
from tests.unit.plan_cli_support import PREDICTED, STRATEGY, read, set_launcher, small_files, write

ROOT = Path(__file__).resolve().parents[4]
RESULT = RunResult(
    loss=(5.0, 4.9),
    grad_norm=(1.0, 2.0),
    reference_loss=(5.0005, 4.9),
    reference_grad_norm=(1.0, 2.001),
    step_time_s=(0.03, 0.01, 0.02),
    stage_time_s=(
        {"forward_s": 0.004, "backward_s": 0.01, "optimizer_s": 0.001},
        {"forward_s": 0.005, "backward_s": 0.008},
    ),
    peak_bytes=(2900, 2900, 1450, 1450),
    notes=("a note",),
)
RANK = DryRunRank(
    stage=1,
    rank=2,
    num_parameters=100,
    parameter_bytes=400,
    gradient_bytes=400,
    optimizer_bytes=800,
    peak_bytes=3200,
    peak_parts={
        "parameters": 400,
        "gathered parameters": 600,
        "gradients": 200,
        "optimizer": 800,
        "activations": 900,
        "other": 300,
    },
    num_microbatches_run=3,
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def question(*arguments: str) -> Question:
    """Return the question of a command line about the plan file."""
    return ask(read("plan.json", *arguments), mode="run")


def shown(show: Any, *arguments: Any) -> str:
    """Return what a function prints."""
    stream = io.StringIO()
    show(make_console(stream), *arguments)
    return stream.getvalue()


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a process of its own."""
    return warm.command("profile-plan", *arguments, cwd=folder).completed()


def test_verdict_is_relative_to_the_reference() -> None:
    """Loss 1e-4 of 2e-4, gradient norm 5e-4 of 1e-3: it matches; twice the loss does not."""
    verdict = judge(RESULT, "fp32")
    assert verdict is not None
    assert verdict.matches
    assert verdict.largest == pytest.approx({"loss": 1e-4, "grad_norm": 5e-4}, rel=1e-3)
    worse = judge(replace(RESULT, loss=(4.999, 4.9)), "fp32")
    assert worse is not None
    assert not worse.matches
    assert "loss 0.0003 (at most 0.0002)" in worse.sentence
    assert "gradient norm" not in worse.sentence
    assert judge(replace(RESULT, reference_loss=(), reference_grad_norm=()), "fp32") is None


def test_values_that_are_not_finite_never_match() -> None:
    """Even where both are the same."""
    lost = replace(RESULT, loss=(math.nan, 4.9), reference_loss=(math.nan, 4.9))
    verdict = judge(lost, "bf16")
    assert verdict is not None
    assert not verdict.matches
    document = run_document(question(), lost, verdict)
    assert json.loads(json.dumps(document, allow_nan=False))["loss"] == [None, 4.9]


def test_steps_that_overflowed_fp16_are_skipped_by_both() -> None:
    """What is left is compared; a step that only one of them skipped matches nothing."""
    both = replace(RESULT, grad_norm=(math.inf, 2.0), reference_grad_norm=(math.inf, 2.001))
    verdict = judge(both, "fp16")
    assert verdict is not None
    assert verdict.largest["grad_norm"] == pytest.approx(5e-4, rel=1e-3)
    assert verdict.matches
    text = shown(show_run, question("--mixed-precision", "fp16"), both, verdict)
    assert "1 step skipped, because gradients overflowed fp16 (0)" in " ".join(text.split())
    one = judge(replace(both, reference_grad_norm=(1.0, 2.001)), "fp16")
    none = judge(
        replace(both, grad_norm=(math.inf,) * 2, reference_grad_norm=(math.inf,) * 2), "fp16"
    )
    for lost in (one, none, judge(both, "bf16")):
        assert lost is not None
        assert lost.largest["grad_norm"] == math.inf


def test_run_document_has_the_public_keys_and_the_prediction() -> None:
    """The prediction has the keys of what it is of; communicators are in no measurement."""
    document: dict[str, Any] = run_document(question(), RESULT, judge(RESULT, "fp32"))

    for key in (
        "loss",
        "grad_norm",
        "reference_loss",
        "reference_grad_norm",
        "step_time_s",
        "peak_bytes",
    ):
        assert list(document[key]) == list(getattr(RESULT, key))
    assert document["reference"]["matches"] is True
    assert document["predicted"] == {
        "step_time_s": 0.02,
        "step_time_interval_s": [0.018, 0.023],
        "stage_time_s": [
            {"forward_s": 0.004, "backward_s": 0.008, "tail_s": 0.001},
            {"forward_s": 0.006, "backward_s": 0.008, "tail_s": 0.001},
        ],
        "peak_bytes": [2900] * 4,
        "rests_on": "estimates from datasheets, not on measurements of this machine",
    }
    assert document["notes"] == ["a note"]
    assert read_strategy(document["plan"]) == read_strategy(STRATEGY)
    assert run_document(question("--layers", "2"), RESULT, None)["predicted"] is None


def test_run_report_compares_time_and_memory() -> None:
    """Medians, differences of the prediction, and what cannot be compared."""
    text = shown(show_run, question(), RESULT, judge(RESULT, "fp32"))

    assert "largest relative difference: loss 0.0001 (at most 0.0002)" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["step", "20", "ms", "20", "ms", "+0.0", "%"] in rows
    assert ["stage", "0:", "backward", "8", "ms", "10", "ms", "-20.0", "%"] in rows
    assert ["stage", "0:", "optimizer", "1", "ms"] in rows
    assert any(row[:2] == ["2", "1"] and row[-2:] == ["+100.0", "%"] for row in rows)
    for words in (
        "with the exposed gradient reduction",
        "Basis: estimates",
        "a note",
        "CPU processes",
    ):
        assert words in text
    alone = replace(RESULT, reference_loss=(), reference_grad_norm=())
    text = shown(show_run, question("--layers", "2"), alone, None)
    for words in ("not compared with one process", "no predicted times", "no predicted memory"):
        assert words in text


@pytest.mark.parametrize(
    ("source", "estimated", "expected"),
    [
        ("allocated", False, 3000),  # the allocator gives out receive buffers, all that is fixed
        ("allocated", True, 2900),  # beside them communicators, which it does not see
        ("counted", False, 2900),
    ],
)
def test_document_and_table_predict_the_same_peak(
    source: Literal["allocated", "counted"], estimated: bool, expected: int
) -> None:
    """Of what the measurement holds, wherever it is written."""
    write(Path("plan.json"), {**PREDICTED, "estimated": estimated})
    result = replace(RESULT, peak_source=source)

    document: Any = run_document(question(), result, None)
    rows = [line.split() for line in shown(show_run, question(), result, None).splitlines()]

    assert document["predicted"]["peak_bytes"] == [expected] * 4
    # 1450 bytes are measured on rank 2
    share = f"{100 * (expected / 1450 - 1):+.1f}"
    assert any(row[:2] == ["2", "1"] and row[-2:] == [share, "%"] for row in rows)


def test_dry_run_report_and_document() -> None:
    """Parts that mean the same stand side by side, and make up the peak."""
    text = shown(show_dry_run, question(), [RANK])
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:1] == ["gradients"] and row[-1] == "%" for row in rows)
    assert any(row[:1] == ["transient"] and row[-1] != "%" for row in rows)
    # 900 + 500 predicted; 900 + 300 counted, since ZeRO-2 keeps all that is gathered
    assert any(row[:3] == ["activations", "and", "transient"] and "+16.7" in row for row in rows)
    assert any(
        row[:3] == ["total", "without", "communicators"] and row[-2] == "-9.4" for row in rows
    )
    assert "unsharded copies of ZeRO-2" in text
    document: Any = dry_run_document(question(), [RANK])
    (rank,) = document["ranks"]
    assert (rank["rank"], rank["peak_parts"]) == (2, dict(RANK.peak_parts))
    assert rank["predicted"]["allocated_bytes"] == 3000
    assert sum(part["counted_bytes"] for part in rank["compared"]) == RANK.peak_bytes
    assert sum(part["predicted_bytes"] for part in rank["compared"]) == 2900
    assert "no predicted memory" in shown(show_dry_run, question("--layers", "2"), [RANK])


def llama(*, fp32_gradients: bool) -> tuple[Question, DryRunRank]:
    """Return 64 ranks of llama2-7b, tp 4, ZeRO-2, two micro-batches, and a rank of its dry run."""
    layers = {"tp_sizes_enc": "4", "tp_consecutive_flags": "1", "dp_types_enc": "0", "use_sp": "0"}
    plan: dict[str, Any] = {key: ",".join([value] * 32) for key, value in layers.items()}
    plan |= {"pp_deg": 1, "pp_division": "32", "world_size": 64, "global_bsz": 64, "chunks": 2}
    plan |= {"vtp": 2, "default_dp_type": "zero2", "pipeline_type": "pipedream_flush"}
    memory = {"states": 7690567680, "vocab_states": 573457920}
    memory |= {"activations": 10075242496, "transient": 628223999, "fixed": 67108864}
    stage = {"allocated_bytes": sum(memory.values()), "memory_bytes": memory}
    options = {"mixed_precision": "bf16", "fp32_gradients": fp32_gradients}
    write(
        Path("llama.json"),
        {
            "format": "autopar-plan",
            "version": 1,
            "plan": plan,
            "step_time_s": 1.0,
            "prediction": {"stages": [stage]},
            "options": options,
            "request": {"model": "llama2-7b"},
        },
    )
    parts = {
        "parameters": 454_000_000,
        "gathered parameters": 3_500_679_168 + 1_000_000,
        "gradients": 7_002_000_000,
        "optimizer": 842_400_768,
        "activations": 10_000_000_000,
        "other": 130_000_000,
    }
    rank = replace(RANK, stage=0, rank=0, peak_parts=parts, peak_bytes=sum(parts.values()))
    return ask(read("llama.json"), mode="dryrun"), rank


@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_weights_and_gradients_are_booked_alike(fp32_gradients: bool) -> None:
    """Gathered weights of ZeRO-2 beside its states; gradients as many bytes as were predicted."""
    asked, rank = llama(fp32_gradients=fp32_gradients)
    document: Any = dry_run_document(asked, [rank])
    parts = {part["name"]: part for part in document["ranks"][0]["compared"]}

    layers = 32 * ((4 * 4096 * 4096 + 3 * 4096 * 11008) // 4 + 2 * 4096)
    vocab = 2 * 32000 * 4096 // 2 + 4096
    whole = layers + vocab
    assert parts["weights and optimizer"]["counted_bytes"] == 454_000_000 + 842_400_768 + 2 * whole
    assert parts["passing"]["counted_bytes"] == 131_000_000
    predicted = parts["gradients"]["predicted_bytes"]
    states = 7690567680 + 573457920
    bytes_ = 4 if fp32_gradients else 2
    optimizer = 12 * (layers / 16 + vocab / 32)
    assert predicted == pytest.approx(
        states * bytes_ * whole / ((2 + bytes_) * whole + optimizer), rel=1e-9
    )
    assert predicted + parts["weights and optimizer"]["predicted_bytes"] == states
    assert asked.job.fp32_gradients == fp32_gradients


@pytest.mark.parametrize("estimated", [False, True])
def test_a_dry_run_prints_whether_it_fits(estimated: bool) -> None:
    """Tensors, communicators of estimated hardware, and what the plan reserves, of its budget."""
    asked, rank = llama(fp32_gradients=True)
    assert asked.prediction is not None
    (stage,) = asked.prediction.stages
    assert stage.allocated_bytes is not None
    assert fits_of(asked, [rank]) == ()
    rank = replace(rank, num_communicators=3)
    needed = rank.peak_bytes + 1000 + (3 * 64 * 2**20 if estimated else 0)

    def answer(budget: int) -> tuple[Question, bool, str, Any]:
        changes = {"reserved_bytes": stage.allocated_bytes + 1000, "budget_bytes": budget}
        prediction = replace(asked.prediction.prediction, stages=[replace(stage, **changes)])
        document = replace(asked.prediction, prediction=prediction, estimated=estimated)
        question = replace(asked, prediction=document)
        (fit,) = fits_of(question, [rank])
        assert fit.needed_bytes == needed
        return question, fit.fits, shown(show_dry_run, question, [rank]), fit

    question, fits, text, _ = answer(needed)
    assert fits
    assert "FITS: stage 0 needs" in text
    assert dry_run_document(question, [rank])["fits"] is True
    question, fits, text, fit = answer(needed - 2**20)
    assert not fits
    assert "DOES NOT FIT: stage 0 (rank 0) needs" in text
    assert "1.00 MiB too much" in fit.sentence
    document: Any = dry_run_document(question, [rank])
    assert document["fits"] is False
    assert document["ranks"][0]["needed_bytes"] - document["ranks"][0]["budget_bytes"] == 2**20


def test_static_explains_the_columns_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Tensor axes where some layer has them; what ZeRO holds where it holds it."""
    assert plan_cli.run(["plan.json"]) == 0
    text = capsys.readouterr().out
    for words in ("tensor axes", "gathered: unsharded weights of ZeRO-2"):
        assert words in text
    assert "accumulated" not in text  # reduced in every micro-batch
    layers = {"tp_sizes_enc": "1,1,1,1", "use_sp": "0,0,0,0", "vtp": 1}
    write(Path("data.json"), {**STRATEGY, **layers, "default_dp_type": "ddp"})
    assert plan_cli.run(["data.json", "--model", "small.json"]) == 0
    text = capsys.readouterr().out
    assert "accumulated: unsharded fp32 gradients" in text
    for words in ("tensor axes", "gathered"):
        assert words not in text


def test_static_writes_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Tables, or the document alone."""
    assert plan_cli.run(["plan.json", "--json", "out.json"]) == 0
    text = capsys.readouterr().out
    assert "ulysses2-zero3" in text
    assert "bubble: 33.3 %" in text
    assert plan_cli.run(["plan.json", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(Path("out.json").read_text("utf-8"))
    assert (document["format"], document["version"], document["mode"]) == (
        "autopar-plan-check",
        1,
        "static",
    )
    assert document["executor"] == {"runs": True, "obstacle": None, "mesh": [2]}
    assert [s["num_parameters"] for s in document["stages"]] == [
        sum(run["num_parameters"] for run in s["runs"]) + s["vocab"]["num_parameters"]
        for s in document["stages"]
    ]
    assert document["predicted"][1]["memory_bytes"]["activations"] == 900


def test_illegal_plan_is_written_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2, all reasons in one sentence, and the document says it too."""
    write(Path("bad.json"), {**STRATEGY, "chunks": 1, "tp_sizes_enc": "2,8,2,1"})
    arguments = ["bad.json", "--model", "small.json", "--json", "out.json"]
    assert plan_cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    document = json.loads(Path("out.json").read_text("utf-8"))
    assert document["legal"] is False
    assert len(document["problems"]) > 1
    assert all(problem in err for problem in document["problems"])


def test_run_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The command has the user's own arguments, quoted."""
    assert plan_cli.run(["plan.json", "--mode", "run", "--json", "my out.json"]) == 2
    err = capsys.readouterr().err
    command = err.partition("`")[2].partition("`")[0]
    expected = "torchrun --standalone --nproc-per-node 4 -m profiler.plan plan.json --mode run"
    assert shlex.split(command) == [*expected.split(), "--json", "my out.json"]


def test_run_under_another_number_of_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both numbers are named, by the first rank alone."""
    monkeypatch.setattr(run, "_GRACE_S", 0.0)
    set_launcher(monkeypatch, 0, 2)
    assert plan_cli.run(["plan.json"]) == 2
    assert "the plan is for 4 ranks, but torchrun started 2" in capsys.readouterr().err
    set_launcher(monkeypatch, 1, 2)
    assert plan_cli.run(["plan.json"]) == 2
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_works_out_the_arithmetic(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are done at once, and say nothing."""
    for rank in (0, 1):
        set_launcher(monkeypatch, rank, 2)
        assert plan_cli.run(["plan.json", "--mode", "static"]) == 0
        assert bool(capsys.readouterr().out) == (rank == 0)


def test_reader_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """`profile-plan ... | head -1` ends without a word."""
    code = "from autopar.cli import plan; plan()"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} plan.json | head -1"
    done = subprocess.run(
        command,
        shell=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_one_rank_runs_without_a_launcher(tmp_path: Path) -> None:
    """Two checked steps of one process match the reference, whose process it is itself."""
    pytest.importorskip("torch")
    one = {**STRATEGY, "pp_deg": 1, "pp_division": "4", "world_size": 1, "vtp": 1, "chunks": 2}
    one |= {"tp_sizes_enc": "1,1,1,1", "use_sp": "0,0,0,0"}
    write(tmp_path / "one.json", one)
    arguments = ["one.json", "--model", "small.json", "--mode", "run", "--timed-steps", "1"]
    done = command(tmp_path, *arguments, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert document["reference"]["matches"] is True
    assert len(document["loss"]) == len(document["reference_grad_norm"]) == 2
    assert len(document["step_time_s"]) == len(document["peak_bytes"]) == 1
    assert document["peak_bytes"][0] > 0
    assert document["loss"][0] == pytest.approx(math.log(256), rel=0.05)


@pytest.mark.whole
def test_dry_run_counts_what_the_arithmetic_says(tmp_path: Path) -> None:
    """Parameters, weights, gradients and optimizer of a rank of every stage, byte for byte."""
    pytest.importorskip("torch")
    same = ["strategy.json", "--model", "small.json", "--mixed-precision", "bf16"]
    assert plan_cli.run([*same, "--json", "static.json"]) == 0
    done = command(tmp_path, *same, "--mode", "dryrun", "--ranks", "all", "--json", "dry.json")
    assert done.returncode == 0, done.stderr
    stages = json.loads(Path("static.json").read_text("utf-8"))["stages"]
    ranks = json.loads(Path("dry.json").read_text("utf-8"))["ranks"]

    assert [rank["rank"] for rank in ranks] == [stage["ranks"][0] for stage in stages] == [0, 2]
    for key in ("num_parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert [rank[key] for rank in ranks] == [stage[key] for stage in stages]
