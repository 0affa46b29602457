"""The work folder and the commands in it: done once, kept, refused, passed on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.plan import PlanDocument
from autopar.errors import DocumentError, InstallError, OptionError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from profiler.verify import command as cli
from profiler.verify.compare import predicted_bytes, read_priced, read_run
from profiler.verify.folder import (
    Command,
    CommandError,
    Folder,
    Usage,
    VerifyOptions,
    checked_options,
    environment,
)
from profiler.verify.plans import Lines, contrasts, describe
from search.planning.space import parse_rules

PYTHON = Path(sys.executable).name


def command(folder: Path, code: str, name: str = "step") -> Command:
    """Return a command that is a line of Python and makes the file `out`."""
    out = folder / "results" / "out"
    words = (
        PYTHON,
        "-c",
        f"import sys; from pathlib import Path; out = Path({str(out)!r}); {code}",
    )
    return Command(name=name, title="testing", words=words, outputs=(out,))


def opened(folder: Path, **changes: Any) -> tuple[Folder, list[str]]:
    """Return a work folder, and what it says."""
    said: list[str] = []
    return Folder(VerifyOptions(work=folder, device="cpu", **changes), said.append), said


def test_done_commands_are_not_repeated(tmp_path: Path) -> None:
    """Neither by this call nor by a later one; another command line is, and a lost file too."""
    add = "out.open('a').write('x')"
    work, said = opened(tmp_path)
    work.run(command(tmp_path, add))
    work.run(command(tmp_path, add))
    opened(tmp_path, repeats=9)[0].run(command(tmp_path, add))
    out = tmp_path / "results" / "out"

    assert out.read_text() == "x"
    assert (work.num_started, said) == (1, ["testing"])
    work.run(command(tmp_path, f"{add}; {add}"))
    assert out.read_text() == "xxx"
    out.unlink()
    work.run(command(tmp_path, f"{add}; {add}"))
    assert out.read_text() == "xx"


def test_other_processes_are_seen(tmp_path: Path) -> None:
    """A process that nobody here started counts, one of ours does not."""
    stat = tmp_path / "stat"
    usable = len(os.sched_getaffinity(0))
    each = "".join(f"cpu{k} 0 0 0 0 0 0 0 0\n" for k in range(usable))
    stat.write_text(f"cpu  100 0 0 900 0 0 0 0 0 0\n{each}", encoding="ascii")
    before = Usage.now(stat)
    assert before is not None
    later = replace(before, wall_s=before.wall_s + 10.0, busy_s=before.busy_s + 12.0)
    cores = before.num_processors

    assert before.busy_s == 100 / os.sysconf("SC_CLK_TCK")
    assert later.others_since(before) == pytest.approx(min(1.0, 1.2 / cores))
    own = replace(later, own_s=before.own_s + 9.0)
    assert own.others_since(before) == pytest.approx(0.3 / cores)
    stat.write_text(f"cpu  1 0 0 9\n{each}cpu99 0 0 0 0\n", encoding="ascii")
    assert Usage.now(stat) is None
    assert Usage.now(tmp_path / "none") is None


@pytest.mark.skipif(Usage.now() is None, reason="/proc/stat says nothing of these processors")
def test_the_share_of_others_is_kept_with_every_command(tmp_path: Path) -> None:
    """By folder, between 0 and 1."""
    work, _ = opened(tmp_path)
    work.run(command(tmp_path, "out.write_text('x')", "runs/a"))

    (share,) = work.others("runs")
    assert 0.0 <= share <= 1.0
    assert work.others("search") == ()


@pytest.mark.parametrize(("code", "passed"), [(1, 1), (2, 2), (3, 3), (9, 1)])
def test_failures_name_command_sentence_and_log(tmp_path: Path, code: int, passed: int) -> None:
    """One sentence; and nothing counts as done."""
    work, _ = opened(tmp_path)
    broken = command(tmp_path, f"print('profile-model: --bsz is odd.'); sys.exit({code})")
    for _ in range(2):
        with pytest.raises(CommandError) as error:
            work.run(broken)

    log = tmp_path / "logs" / "step.log"
    assert str(error.value) == (f"{PYTHON} failed (exit {code}): --bsz is odd. See {log}")
    assert error.value.exit_code == passed
    assert error.value.sentence == "--bsz is odd."
    assert log.read_text().startswith("$ ")
    assert work.num_started == 2


def test_commands_that_write_nothing_have_failed(tmp_path: Path) -> None:
    """Whatever their exit code says."""
    work, _ = opened(tmp_path)
    with pytest.raises(CommandError, match=r"exit 0\): wrote no out"):
        work.run(command(tmp_path, "pass"))


def test_unknown_commands_name_what_installs_them(tmp_path: Path) -> None:
    """As every incomplete installation."""
    work, _ = opened(tmp_path)
    with pytest.raises(InstallError, match="autopar-nothing: this command is not installed"):
        work.run(Command(name="a", title="a", words=("autopar-nothing",), outputs=()))


def test_a_folder_answers_one_question(tmp_path: Path) -> None:
    """Another one is refused with both values, or begins again."""
    opened(tmp_path)[0].run(command(tmp_path, "out.write_text('x')"))
    (tmp_path / "mine.txt").write_text("keep", encoding="utf-8")
    assert (tmp_path / "done" / "step.json").is_file()

    with pytest.raises(OptionError, match=r"results for other inputs \(batch 8 then, 16 now\)"):
        opened(tmp_path, batch=16)
    opened(tmp_path, batch=16, resume=False)
    assert not (tmp_path / "done").exists()
    assert (tmp_path / "mine.txt").is_file()
    with pytest.raises(OptionError, match=r"batch 16 then, 8 now"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["hardware", "profiles", "model"])
@pytest.mark.parametrize("resume", [True, False])
def test_given_files_are_never_deleted(tmp_path: Path, name: str, resume: bool) -> None:
    """Those in a folder that --no-resume empties are refused, also by a detour."""
    work = tmp_path / "work"
    opened(work)
    mine = work / "model" / "mine"
    mine.mkdir(parents=True)
    (work / "calibration.json").write_text("{}", encoding="utf-8")
    (tmp_path / "link").symlink_to(mine)
    changes = {"model": "llama2-7b", name: str(tmp_path / "link")}

    words = rf"--{name}: .*link is in .*model, which .*Copy these files to another folder"
    with pytest.raises(OptionError, match=words):
        checked_options(VerifyOptions(work=work, **changes))
    with pytest.raises(OptionError, match=words):
        opened(work, resume=resume, **changes)
    assert mine.is_dir()
    assert (work / "calibration.json").is_file()


def test_a_calibration_of_other_runs_does_not_stay(tmp_path: Path) -> None:
    """It is deleted where the rest is."""
    opened(tmp_path)
    (tmp_path / "calibration.json").write_text("{}", encoding="utf-8")
    opened(tmp_path)
    assert (tmp_path / "calibration.json").is_file()
    opened(tmp_path, resume=False)
    assert not (tmp_path / "calibration.json").exists()


def test_another_release_is_another_question(tmp_path: Path) -> None:
    """Its predictions and runs may differ."""
    opened(tmp_path)
    path = tmp_path / "question.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**before, "autopar": "0.0.1"}), encoding="utf-8")

    with pytest.raises(
        OptionError, match=r"results for other inputs \(autopar 0.0.1 then, \S+ now\)"
    ):
        opened(tmp_path)


def test_one_call_at_a_time(tmp_path: Path) -> None:
    """A second one is refused while the first is at work, and not after it."""
    first, second = opened(tmp_path)[0], opened(tmp_path)[0]
    with (
        first.held(),
        pytest.raises(OptionError, match="another run is writing to it"),
        second.held(),
    ):
        pass
    with second.held():
        pass


def test_a_folder_of_somebody_else_is_not_emptied(tmp_path: Path) -> None:
    """Only one that an earlier call made."""
    (tmp_path / "model").mkdir()
    opened(tmp_path, resume=False)

    assert (tmp_path / "model").is_dir()


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is measured with the threads that a rank will have; a user's choice stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    alone = int(environment(VerifyOptions(nproc=1))["OMP_NUM_THREADS"])
    assert int(environment(VerifyOptions(nproc=2))["OMP_NUM_THREADS"]) == max(1, alone // 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment(VerifyOptions(nproc=2))["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_contrasts_are_legal_rules(nproc: int) -> None:
    """Their pins parse, their micro-batches divide the batch, and names are unique."""
    options = VerifyOptions(nproc=nproc, batch=2 * nproc)
    found = list(contrasts(options, 4))

    assert len({contrast.name for contrast in found}) == len(found)
    assert len(found) >= (8 if nproc > 1 else 3)
    for contrast in found:
        words = contrast.extra
        pins = [words[k + 1] for k, word in enumerate(words) if word == "--pin"]
        parse_rules(pins, [])
        if "--settle-chunk" in words:
            assert options.batch % int(words[words.index("--settle-chunk") + 1]) == 0


def test_labels_say_what_differs() -> None:
    """Degrees, sharding, recomputation, stages, micro-batches, vocabulary."""
    base = Plan(
        world_size=2,
        num_stages=1,
        stage_sizes=(4,),
        layers=(LayerStrategy(),) * 4,
        vocab=VocabStrategy(),
        global_batch=8,
        num_microbatches=1,
    )
    tensor = replace(base, layers=(LayerStrategy(tp=2),) * 2 + base.layers[2:])
    stages = replace(base, num_stages=2, stage_sizes=(2, 2), num_microbatches=4)
    sharded = replace(base, layers=(LayerStrategy(zero3=True, checkpoint=True),) * 4)

    assert describe(base) == "dp2"
    assert describe(tensor) == "2 x tp2, 2 x dp2"
    assert describe(stages) == "pp2 m4"
    assert describe(replace(stages, pipeline_type="gpipe")) == "pp2 gpipe m4"
    assert describe(replace(sharded, vocab=VocabStrategy(tp=2))) == "dp2-zero3-ckpt vtp2"
    assert describe(replace(base, default_dp_type="zero2")) == "dp2-zero2 vzero2"
    whole = replace(base, layers=(LayerStrategy(tp=2),) * 4, default_dp_type="zero2")
    assert describe(whole) == "tp2 vzero2"
    assert describe(replace(whole, vocab=VocabStrategy(tp=2))) == "tp2 vtp2"
    assert describe(replace(base, world_size=1)) == "one rank"


def test_lines_say_what_was_asked() -> None:
    """Layers, length, precision and ranks reach every command that needs them."""
    options = VerifyOptions(model="m.json", layers="2", seq_length=64, nproc=2, steps=7)
    lines = Lines(options, "cpu")
    profiled = lines.profile_model()
    searched = lines.search("best", ()).line
    run = lines.run("best", "dp2", Path("p.json"), 0).line

    assert profiled is not None
    assert "--bsz 1,2,4,8 --seq 64 --max-tp-deg 2 --device cpu --dtype fp32" in profiled.line
    assert "--settle-bsz 8 --num-layers 2 --seq-length 64" in searched
    assert "--mixed-precision fp32 --time-profile-mode batch" in searched
    assert run.startswith("torchrun --standalone --nproc-per-node 2 -m profiler.plan p.json")
    assert "--num-layers 2 --seq 64 --mode run --no-reference --timed-steps 7" in run
    assert "--backend gloo --mixed-precision fp32" in run
    given = replace(options, hardware="h", profiles="p")
    assert Lines(given, "cpu").profile_hardware() is None
    assert Lines(given, "cpu").profile_model() is None
    assert "--mixed-precision bf16" in Lines(options, "cuda").search("best", ()).line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "key 'step_time_s': expected times above 0, got null"),
        ({"step_time_s": []}, "expected times above 0"),
        ({"step_time_s": [0.1, 0]}, "expected times above 0"),
        ({"step_time_s": [0.1], "peak_bytes": [1]}, "expected a number for each of 2 ranks"),
    ],
)
def test_runs_without_figures_are_refused(
    tmp_path: Path, content: dict[str, Any], words: str
) -> None:
    """They are no measurement."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content), encoding="utf-8")

    with pytest.raises(DocumentError, match=words):
        read_run(path, 2)


def test_plans_without_a_price_are_refused(tmp_path: Path) -> None:
    """A plan that cannot run has no time."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"step_time_s": None}), encoding="utf-8")

    with pytest.raises(DocumentError, match="expected a time above 0, got null"):
        read_priced(path)


def test_counted_peaks_are_predicted_without_receive_buffers() -> None:
    """The allocator's with them; a price without stages is refused."""
    stage = {"allocated_bytes": 100, "memory_bytes": {"states": 70, "fixed": 30}}
    priced = read_as({"prediction": {"stages": [stage, stage]}})
    path = Path("plan.json")

    assert predicted_bytes(path, priced, "counted") == (70, 70)
    assert predicted_bytes(path, priced, "allocated") == (100, 100)
    bad: tuple[dict[str, Any], ...] = (
        {},
        {"prediction": None},
        {"prediction": {"stages": [{"allocated_bytes": 100}]}},
    )
    for content in bad:
        with pytest.raises(DocumentError, match=r"key 'prediction.stages': expected allocated_b"):
            predicted_bytes(path, read_as(content), "counted")


def read_as(content: dict[str, Any]) -> PlanDocument:
    """Return a printed result with this content."""
    return PlanDocument.parse({"status": "evaluated", **content})


def test_peaks_that_nobody_counted_are_unknown(tmp_path: Path) -> None:
    """Zeros are not bytes."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"step_time_s": [0.5], "peak_bytes": [0, 0]}), encoding="utf-8")

    assert read_run(path, 2).peak_bytes == ()


def test_dry_run_prints_commands_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them, as a shell takes them."""
    assert cli.run(["--dry-run", "--device", "cpu", "--layers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    programs = [line.split()[0] for line in lines if not line.startswith("#")]

    assert programs[:3] == ["torchrun", "profile-model", "autopar-search"]
    assert programs[-2:] == ["autopar-search", "torchrun"]
    assert any("layers 0-0:tp=2" in line for line in lines)
    assert list(folder.iterdir()) == []
