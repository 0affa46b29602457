"""The whole of `autopar-verify` on a machine whose truth is known, so that it must be found.

The searches are real and run in this process. In the place of the runs stands a machine that takes
what a calibration of ours predicts: what is fitted must be that calibration.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.calibration import MOST, read_calibration
from autopar.documents.json import load_object
from autopar.documents.plan import read_strategy
from autopar.errors import OptionError
from autopar.rates import command as estimate_cli
from autopar.records import replace
from autopar.sources import STACK_ROLE
from profiler.verify.command import Verification, show_verification, verify, verify_document
from profiler.verify.folder import Command, Folder, VerifyOptions, checked_options
from profiler.verify.plans import SMALL_MODEL, Lines, priced
from search.commands import search as cli
from tests.unit.documents.test_calibration import document

pytestmark = pytest.mark.whole

TRUTH = {"computation": 1.3, "communication": 0.6, "fixed_s": 0.0004, "memory": 1.08}


def run(arguments: list[str]) -> tuple[int, str]:
    """Run the search in this process; return its exit code and what it said on stderr."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = cli.run(arguments)
    return code, err.getvalue()


class Machine:
    """Runs searches here, and plans as a calibration predicts them."""

    def __init__(self, folder: Path, truth: Mapping[str, float]) -> None:
        content = document(**{name: {"value": value} for name, value in truth.items()})
        content["hardware"]["name"] = "a100-80gb_1x2"
        self.truth = folder / "truth.json"
        self.truth.write_text(json.dumps(content), encoding="utf-8")
        self.started: list[str] = []
        self._answers: dict[bytes, Mapping[str, Any]] = {}
        """Of plans that ran before."""
        self.broken: set[str] = set()
        self.slower = 1.0
        """What all runs take longer, round after round."""
        self.counts = True
        """Whether peaks are counted, which knows no receive buffers, or the allocator's."""

    def __call__(self, command: Command, log: Path, variables: Mapping[str, str]) -> int:
        """Run a command as `start_process` does."""
        self.started.append(command.name)
        (out,) = command.outputs
        if command.words[0] == "autopar-search":
            code, said = run(list(command.words[1:]))
            log.write_text(f"$ {command.line}\n{said}", encoding="utf-8")
            return code
        plan = Path(command.words[command.words.index("profiler.plan") + 1])
        if plan.stem in self.broken:
            log.write_text("$\nprofile-plan: the executor has no such layer\nnoise", "utf-8")
            return 2
        text = plan.read_bytes()
        if text not in self._answers:
            answer = out.with_suffix(".truth")
            options = ("--calibration", str(self.truth), "--json", str(answer))
            code, said = run([*self.search[1:], "--evaluate", str(plan), *options])
            assert code == 0, said
            self._answers[text] = load_object(answer).data
        found = self._answers[text]
        time_s = found["step_time_s"] * (self.slower if ".1" in command.name else 1.0)
        stages = found["prediction"]["stages"]
        ranks = [
            s["allocated_bytes"] - (s["memory_bytes"]["fixed"] if self.counts else 0)
            for s in stages
            for _ in range(2 // len(stages))
        ]
        out.write_text(
            json.dumps(
                {
                    "step_time_s": [time_s] * 3,
                    "peak_bytes": ranks,
                    "peak_source": "counted" if self.counts else "allocated",
                }
            ),
            encoding="utf-8",
        )
        return 0

    search: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and estimated profiles of it on two GPUs."""
    folder = tmp_path_factory.mktemp("loop")
    (folder / "model.json").write_text(json.dumps(SMALL_MODEL), encoding="utf-8")
    arguments = ("--model", str(folder / "model.json"), "--hardware", "a100-80gb:1x2")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = estimate_cli.run([*arguments, "--precision", "fp32", "--out", str(folder / "files")])
    assert code == 0
    # what is verified is measured, and of measured files nothing is hidden that a factor would bend
    sidecar = folder / "files" / "overlap_coefficient.json.meta.json"
    content = json.loads(sidecar.read_text(encoding="utf-8"))
    del content["hiding"]
    sidecar.write_text(json.dumps(content), encoding="utf-8")
    return folder


def verified(
    files: Path, work: Path, machine: Machine, said: list[str] | None = None, **changes: Any
) -> Verification:
    """Verify a machine with these files."""
    options = checked_options(options_of(files, work, **changes))
    machine.search = (
        *("autopar-search", "--model", str(files / "model.json")),
        *("--hardware", str(files / "files"), "--memory-profiling-path", str(files / "files")),
        *("--time-profiling-path", str(files / "files"), "--mixed-precision", "fp32"),
        *("--time-profile-mode", "batch", "--settle-bsz", "8", "--output-config-path", "none"),
        *("--num-nodes", "1", "--num-gpus-per-node", "2"),
    )
    return verify(options, ([] if said is None else said).append, machine)


def options_of(files: Path, work: Path, **changes: Any) -> VerifyOptions:
    """Return the options of a verification with given files."""
    values: dict[str, Any] = {
        "model": str(files / "model.json"),
        "hardware": str(files / "files"),
        "profiles": str(files / "files"),
        "device": "cpu",
        "repeats": 2,
        "work": work,
    }
    return VerifyOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def found(files: Path) -> tuple[Verification, Machine, Path]:
    """Return what was found of the machine of `TRUTH`, with the work folder."""
    work = files / "work"
    machine = Machine(files, TRUTH)
    return verified(files, work, machine), machine, work


def test_the_truth_is_found(found: tuple[Verification, Machine, Path]) -> None:
    """Factors, fixed seconds and memory; the errors after are none, and those before are not."""
    verification, _, work = found
    calibrated = verification.calibrated
    assert calibrated is not None
    assert verification.calibration_path == work / "calibration.json"
    read = read_calibration(work / "calibration.json")

    assert read.computation.value == pytest.approx(TRUTH["computation"], rel=2e-3)
    assert read.communication.value == pytest.approx(TRUTH["communication"], rel=2e-2)
    assert read.fixed_s.value == pytest.approx(TRUTH["fixed_s"], rel=5e-2)
    assert read.memory.value == pytest.approx(TRUTH["memory"], rel=1e-5)
    assert (read.hardware, read.world_size, read.model) == ("a100-80gb_1x2", 2, "verify-small")
    assert calibrated.error(calibrated.before_s) > 0.05
    assert calibrated.error(calibrated.after_s) < 2e-3
    assert calibrated.error(calibrated.left_out_s) < 5e-3
    for factor in (read.computation, read.communication, read.fixed_s, read.memory):
        assert factor.low is not None
        assert factor.high is not None
        assert factor.low <= factor.value <= factor.high


def test_the_allocator_has_receive_buffers_too(files: Path, tmp_path: Path) -> None:
    """Its peaks are compared with all that is predicted; the factor is the same."""
    machine = Machine(tmp_path, TRUTH)
    machine.counts = False
    found = verified(files, tmp_path / "work", machine, plans=1, contrast=3, repeats=1)

    assert found.calibrated is not None
    assert found.calibrated.factors["memory"].value == pytest.approx(TRUTH["memory"], rel=1e-5)
    rows = found.comparison.plans
    assert any(len(row.plan.predicted_bytes) == 2 for row in rows)
    for row in rows:
        price = load_object(tmp_path / "work" / "plans" / f"{row.plan.name}.json").data
        assert [s["allocated_bytes"] for s in price["memory"]] == list(row.plan.predicted_bytes)


def test_plans_differ_and_span_a_range(found: tuple[Verification, Machine, Path]) -> None:
    """At least eight, no two the same, each with the reason why it is there."""
    comparison = found[0].comparison
    plans = [row.plan for row in comparison.plans]

    assert len(plans) >= 8
    assert len({json.dumps(dict(plan.strategy)) for plan in plans}) == len(plans)
    assert len({plan.label for plan in plans}) == len(plans)
    assert {"best", "ckpt"} <= {plan.name for plan in plans}
    assert sum(plan.chosen.startswith("contrast: ") for plan in plans) == 8
    assert comparison.measured_spread > 1.2
    # the search for the best knows every kind of plan but Ulysses
    assert next(plan.name for plan in plans if plan.name != "ulysses") == "best"
    assert comparison.spearman is not None
    assert comparison.spearman > 0.5


def test_rounds_take_turns(found: tuple[Verification, Machine, Path]) -> None:
    """Every plan once before any again, the second round backwards."""
    runs = [name for name in found[1].started if name.startswith("runs/")]
    half = len(runs) // 2
    first = [name.removesuffix(".0") for name in runs[:half]]

    assert [name.removesuffix(".1") for name in runs[half:]] == first[::-1]
    assert len(set(first)) == half


def test_everything_is_kept(files: Path, found: tuple[Verification, Machine, Path]) -> None:
    """Again, nothing is started; with one round more, just that round."""
    before, machine, work = found
    num_plans = len(before.comparison.plans)
    machine.started.clear()
    again = verified(files, work, machine)
    assert machine.started == []
    assert again.comparison == before.comparison

    verified(files, work, machine, repeats=3)
    runs = [name for name in machine.started if name.startswith("runs/")]
    assert len(runs) == num_plans
    assert all(name.endswith(".2") for name in runs)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model", "model.json"),
        ("hardware", "files/p2p_*.meta.json"),
        ("profiles", "files/computation_*8.json"),
    ],
)
def test_files_with_another_content_are_another_question(
    files: Path, tmp_path: Path, name: str, pattern: str
) -> None:
    """Under the same path; what nobody reads may change."""
    mine = tmp_path / "mine"
    shutil.copytree(files, mine, ignore=shutil.ignore_patterns("work*"))
    options = options_of(mine, tmp_path / "work")
    Folder(options, [].append)
    (mine / "files" / "notes.json").write_text("{}", encoding="utf-8")
    Folder(options, [].append)
    (path,) = mine.glob(pattern)
    path.write_text(path.read_text(encoding="utf-8") + " ", encoding="utf-8")

    with pytest.raises(OptionError, match=rf"\({name}_sha256 \w{{12}} then, \w{{12}} now\)"):
        Folder(options, [].append)


def test_report_and_document_say_the_same(
    files: Path, found: tuple[Verification, Machine, Path]
) -> None:
    """Every plan with its figures, the correlation, the factors; 80 columns are enough."""
    from autopar.command.console import make_console

    verification, _, work = found
    out = io.StringIO()
    show_verification(make_console(out, 80), verification)
    text = out.getvalue()
    document = verify_document(options_of(files, work), verification)
    content = json.loads(json.dumps(document, allow_nan=False))

    assert max(len(line) for line in text.splitlines() if str(work) not in line) <= 80
    for row in content["plans"]:
        assert all(word in text for word in row["label"].split())
        assert row["rounds_s"] == [[row["measured_s"]] * 3] * 2
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1.0)
        assert row["peak_bytes"] is not None
    assert f"{content['summary']['spearman']:.2f}" in text
    assert f"{content['summary']['median_error']:.1%}" in text
    assert f"computation x {content['calibration']['computation']:.3f}" in text
    # a long folder is broken over lines
    applied = f"Next:autopar-search--calibration{work / 'calibration.json'}"
    assert applied in "".join(text.split())
    assert "profiles measured on a100-80gb; other devices are refused" in text
    assert content["calibration"]["advised"] is True
    assert content["inputs"]
    # the trainer's software is a name in sidecars and no file
    files_read = [entry for entry in content["inputs"] if entry["role"] != STACK_ROLE]
    assert all(len(entry["sha256"]) == 64 for entry in files_read)


def test_factors_that_fit_nothing_else_are_advised_against(
    files: Path, found: tuple[Verification, Machine, Path]
) -> None:
    """A left-out error that is no better than before: the report says so, and so does the JSON."""
    from autopar.command.console import make_console

    verification, _, work = found
    assert verification.calibrated is not None
    calibrated = replace(verification.calibrated, left_out_s=verification.calibrated.before_s)
    out = io.StringIO()
    advised_against = replace(verification, calibrated=calibrated)
    show_verification(make_console(out), advised_against)
    content = verify_document(options_of(files, work), advised_against)

    assert f"Do not use {work / 'calibration.json'}" in out.getvalue().replace("\n", " ")
    assert "Next:" not in out.getvalue()
    assert content["calibration"]["advised"] is False


def test_absurd_factors_are_cut_and_said(files: Path, tmp_path: Path) -> None:
    """After hours of runs there is a file that a search reads, and a note."""
    machine = Machine(tmp_path, {**TRUTH, "computation": 900.0, "communication": 900.0})
    machine.slower = 4.0
    found = verified(files, tmp_path / "work", machine, plans=2, contrast=3)
    read = read_calibration(tmp_path / "work" / "calibration.json")

    assert read.computation.value == read.computation.high == MOST
    (note,) = [text for text in found.notes if "factor of computation" in text]
    assert note.startswith("factor of computation is ")
    assert "1000" in note


def test_a_plan_that_does_not_run_is_left_out_and_said(files: Path, tmp_path: Path) -> None:
    """The others count; with too few of them there is no calibration."""
    machine = Machine(tmp_path, TRUTH)
    machine.broken = {"ckpt"}
    said: list[str] = []
    small = {"plans": 2, "contrast": 4, "repeats": 1}
    found = verified(files, tmp_path / "work", machine, said, **small)

    assert "ckpt" not in {row.plan.name for row in found.comparison.plans}
    (note,) = [text for text in found.notes if "did not run" in text]
    assert "torchrun -m profiler.plan failed (exit 2): the executor has no such layer" in note
    assert note in said
    machine.broken = {path.stem for path in (tmp_path / "work" / "plans").glob("*.json")} - {"best"}
    for path in (tmp_path / "work" / "runs").glob("*.json"):
        path.unlink()
    old = tmp_path / "work" / "calibration.json"
    assert old.is_file()
    found = verified(files, tmp_path / "work", machine, said, **small)
    assert found.calibrated is None
    assert not old.exists()
    assert "no calibration: it needs at least 4 plans, 1 ran" in found.notes


def test_a_name_with_another_plan_has_no_old_figures(
    files: Path, found: tuple[Verification, Machine, Path], tmp_path: Path
) -> None:
    """Price, runs and probes are of the plan that had the name before; others keep theirs."""
    work = tmp_path / "work"
    shutil.copytree(found[2], work)
    options = options_of(files, work)
    before = load_object(work / "plans" / "ckpt.strategy.json").data
    plan = read_strategy(before, world_size=2)
    other = replace(plan, vocab=replace(plan.vocab, tp=3 - plan.vocab.tp))
    folder = Folder(options, [].append, Machine(tmp_path, TRUTH))
    probes = set(work.glob("probes/*/*.json"))
    own = {path for path in probes if path.name == "ckpt.json"}
    assert own

    priced(other, "ckpt", "for the test", Lines(options, "cpu"), folder)
    assert set(work.glob("probes/*/*.json")) == probes - own
    assert not list(work.glob("runs/ckpt.*.json"))
    assert list(work.glob("runs/best.*.json"))


def test_drift_between_rounds_widens_the_interval(files: Path, tmp_path: Path) -> None:
    """Rounds that differ are seen in every interval, and in the figures of all."""
    machine = Machine(tmp_path, {**TRUTH, "fixed_s": 0.0})
    machine.slower = 1.5
    found = verified(files, tmp_path / "work", machine, plans=2, contrast=3)

    for row in found.comparison.plans:
        low, high = row.interval_s
        assert high / low == pytest.approx(1.5, rel=1e-6)
    assert found.comparison.measured_noise > 0.1
    low, high = found.comparison.median_error_interval
    assert high > low
