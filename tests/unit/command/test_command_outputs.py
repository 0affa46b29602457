"""What search and export write: never over inputs, all files or none, and plans from anywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autopar.documents.plan import PlanDocument
from autopar.documents.spec import write_spec
from profiler.plan.job import PlanOptions
from profiler.plan.question import ask
from search.commands import explain, export, search
from tests.export_cases import SMALL

LAUNCHES = ("--model", "model.json", "--hardware", "a100-80gb:1x8", "--global-batch-size", "8")
QUESTION = (*LAUNCHES, "--engine", "none")
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model and its plan, which nobody changes."""
    folder = tmp_path_factory.mktemp("made")
    write_spec(SMALL, folder / "model.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert search.run([*QUESTION, "--output-config-path", "s.json"]) == 0
    return folder


@pytest.fixture(autouse=True)
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a copy of that folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--to", "galvatron", "--json", "autopar_plan_s.json"),
            "this is an input file of the command",
        ),
        (("--to", "galvatron", "--json", "./model.json"), "this is an input file of the command"),
        (("--to", "galvatron", "--out", "e", "--json", "e/launch.sh"), "--json"),
        # refused before anything is written, and its answer is no output then either
        (
            ("--to", "torchtitan", "--json", "autopar_plan_s.json"),
            "this is an input file of the command",
        ),
    ],
)
def test_an_export_replaces_nothing_that_it_reads(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer over the plan would lose it, one over an exported file the export."""
    before = contents(folder)
    allowed = () if words[1] == "galvatron" else ("--allow-approx",)
    assert export.run(["autopar_plan_s.json", *words, *allowed]) == 2
    assert said in capsys.readouterr().err
    assert contents(folder) == before


def test_an_export_of_a_strategy_file_keeps_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--out .` has a file of the same name as the strategy file that is read."""
    (folder / "s.json").rename(folder / "galvatron_config.json")
    words = ("galvatron_config.json", "--to", "galvatron", "--model", "model.json", "--out", ".")
    before = contents(folder)
    assert export.run([*words, "--force"]) == 2
    assert "galvatron_config.json" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_configuration_keeps_the_strategy_that_it_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--from` reads two files where one names the other."""
    assert export.run(["autopar_plan_s.json", "--to", "galvatron", "--out", "e"]) == 0
    before = contents(folder)
    for words in (("--out", "e", "--force"), ("--json", "e/galvatron_config.json")):
        assert export.run(["--from", "galvatron", "e/train_dist.yaml", *words]) == 2
        assert "e/galvatron_config.json" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--evaluate", "s.json", "--json", "s.json"), "this is an input file of the command"),
        (("--json", "model.json"), "this is an input file of the command"),
        (("--json", "t.json", "--output-config-path", "t.json"), "--json"),
        (("--json", "autopar_plan_t.json", "--output-config-path", "t.json"), "of --json"),
        (("--output-config-path", "model.json"), "--output-config-path model.json: "),
    ],
)
def test_a_search_replaces_nothing_that_it_reads(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither answer nor strategy file go over an input, nor over one another."""
    before = contents(folder)
    assert search.run([*QUESTION, *words]) == 2
    assert said in capsys.readouterr().err
    assert contents(folder) == before


def test_a_plan_that_no_strategy_file_says_has_its_plan_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZeRO-1, of which Galvatron knows nothing: our own file alone, and a sentence."""
    assert search.run([*QUESTION, "--default-dp-type", "zero1", "--output-config-path", "z"]) == 0

    (path,) = (folder / "z").iterdir()
    assert PlanDocument.read(path).plan is not None
    assert '"default_dp_type": "zero1"' in path.read_text()
    assert "ZeRO-1" in capsys.readouterr().err
    assert ask(PlanOptions(plan=path), mode="static").job.plan.default_dp_type == "zero1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json", "model.json"), "this is an input file of the command"),
        (("--json", "t.json", "--output-config-path", "t.json"), "--json"),
        (("--output-config-path", "model.json"), "--output-config-path model.json: "),
    ],
)
def test_a_search_over_launches_replaces_nothing_that_it_reads(
    words: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does the file of a launch."""
    before = contents(folder)
    assert search.run([*LAUNCHES, *words]) == 2
    assert said in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_leaves_no_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that finds no room takes the other files with it, and says which one it was."""
    before = contents(folder)
    assert search.run([*QUESTION, "--json", str(FULL), "--output-config-path", "t.json"]) == 2
    assert f"--json {FULL}: the file cannot be written (No space left" in capsys.readouterr().err
    plan = ("autopar_plan_s.json", "--to", "galvatron", "--out", "e")
    assert export.run([*plan, "--json", str(FULL)]) == 2
    assert f"--json {FULL}: the file cannot be written (No space left" in capsys.readouterr().err
    assert export.run(["--from", "galvatron", "s.json", "--out", "t", "--json", str(FULL)]) == 2
    assert contents(folder) == before


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_an_error_whose_answer_finds_no_room_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json -` answers errors too; what finds no room is not tried once more."""
    with FULL.open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert search.run(["--modle", "x", "--json", "-"]) == 2
        full.flush()
    (said,) = capsys.readouterr().err.splitlines()
    assert "--modle" in said


def test_a_file_that_cannot_be_made_leaves_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of the strategy file is a file: the answer is not written either."""
    before = contents(folder)
    words = ("--json", "answer.json", "--output-config-path", "model.json/t.json")
    assert search.run([*QUESTION, *words]) == 2
    assert "Use another --output-config-path" in capsys.readouterr().err
    plan = ("autopar_plan_s.json", "--to", "galvatron")
    assert export.run([*plan, "--json", "answer.json", "--out", "model.json/e"]) == 2
    assert "--out model.json/e: " in capsys.readouterr().err
    assert contents(folder) == before
    (folder / "autopar_plan_t.json").mkdir()  # the second of two files
    assert search.run([*QUESTION, "--json", "answer.json", "--output-config-path", "t.json"]) == 2
    assert "autopar_plan_t.json: cannot be written" in capsys.readouterr().err
    assert contents(folder) == before


@pytest.mark.parametrize("place", ["", "configs"])
def test_a_plan_is_read_from_any_folder(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its inputs are where it says; of one that somebody moved below, beside its folder."""
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "plan.json").write_bytes((folder / "autopar_plan_s.json").read_bytes())
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    plan = str(Path("..", place, "plan.json"))
    said = "--model model.json is not in this folder; using ../model.json"
    for run in (explain.run, lambda words: export.run([*words, "--to", "megatron"])):
        capsys.readouterr()
        run([plan])
        assert (said in capsys.readouterr().err) == bool(place)
    question = ask(PlanOptions(plan=Path(plan)), mode="static")
    assert (said in question.notes) == bool(place)
    assert question.prediction is not None


def test_what_the_file_says_comes_first_and_what_is_typed_is_nobodys(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the same name in the current folder is another one."""
    monkeypatch.chdir(folder)
    document = PlanDocument.read("autopar_plan_s.json")
    assert document.located_request("autopar_plan_s.json") == (dict(document.request), [])
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    plan = "../autopar_plan_s.json"
    assert document.located_request(plan, ("model",)) == (dict(document.request), [])
    (folder / "elsewhere" / "model.json").write_text("{}", encoding="utf-8")
    moved = {**document.request, "model": "../model.json"}
    assert document.located_request(plan) == (moved, [])
    # of earlier files, which have what was typed
    (folder / "model.json").unlink()
    assert document.located_request(plan) == (dict(document.request), [])


def test_a_shipped_name_stays_shipped(folder: Path) -> None:
    """A folder beside the plan that is called like a shipped model is not that model."""
    (folder / "far").mkdir()
    (folder / "far" / "llama2-7b").mkdir()
    request = {"model": "llama2-7b", "hardware": "a100-80gb:1x8"}
    document = PlanDocument.parse(
        {"format": "autopar-plan", "version": 1, "request": request, "plan": {}}
    )
    (folder / "far" / "plan.json").write_text(json.dumps(document.content()), encoding="utf-8")
    assert document.located_request(folder / "far" / "plan.json") == (request, [])
