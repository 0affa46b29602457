"""Files that commands leave, by real processes: all of them, by their own names, for anywhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.documents.catalog import find_hardware
from autopar.documents.plan import PlanDocument
from tests.e2e.profiling import CONFIG, SHORT

pytestmark = pytest.mark.whole

PROGRAMS = Path(sys.executable).parent
TINY = CONFIG | {"num_key_value_heads": 4}
ASKED = "--model tiny/config.json --hardware h100:1x8 --settle-bsz 8"
ESTIMATED = "--model tiny/config.json --hardware h100:1x8"
CALCULON = "--application llama2-7b --system a100-80gb"
SPACE = "--num-procs 8 --max-batch 8"
PLAN = f"autopar-search {ASKED} --engine galvatron --output-config-path galvatron.json"
LAUNCH = f"autopar-search {ASKED} --engine megatron --output-config-path launch.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working folder with the config.json of a small model."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    return tmp_path


def ran(line: str, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Return what a shell made of a line of commands of this environment."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    return done


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder by name; none is hidden or a part."""
    found = [path for path in folder.rglob("*") if path.is_file() and "tiny" not in path.parts]
    assert not [path for path in found if path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (
            f"autopar-search {ASKED} --engine galvatron --json j --html h.html --trace t.json",
            ("autopar_plan_", "galvatron_config_", "j", "h.html", "t.json"),
        ),
        (
            f"autopar-search {ASKED} --engine megatron --json j --html h.html --trace t.json",
            ("autopar_plan_", "j", "h.html", "t.json"),
        ),
        # the whole document goes into the pipe, too
        (f"autopar-search {ASKED} --engine megatron --json -", ("autopar_plan_",)),
        (f"autopar-search {ASKED} --engine none --json -", ("autopar_plan_", "galvatron_config_")),
        ("autopar-search --evaluate autopar_plan_galvatron.json --json j", ("j",)),
        ("autopar-search --evaluate launch.json --json j --html h.html", ("j", "h.html")),
        ("autopar-explain autopar_plan_galvatron.json --html h.html", ("h.html",)),
        ("autopar-export launch.json --to megatron --json j --out f", ("j", "launch.sh")),
        (
            "autopar-export autopar_plan_galvatron.json --to galvatron --json - --out e",
            ("launch.sh",),
        ),
        ("autopar-check e/launch.sh --json j --html h.html", ("j", "h.html")),
        ("autopar-estimate --plan autopar_plan_galvatron.json --json j", ("j",)),
        (
            f"autopar-estimate calculon {CALCULON} --execution 1x8-tp8 --json j --peers p",
            ("j", "p"),
        ),
        (
            f"autopar-explore {ASKED} --engine galvatron --json j --output-config-path found",
            ("j", "autopar_plan_"),
        ),
        (
            f"autopar-explore calculon {CALCULON} {SPACE} --all a.csv --json j",
            ("a.csv", "j"),
        ),
        ("profile-plan autopar_plan_galvatron.json --json j", ("j",)),
        (
            "autopar-profile-estimate --model tiny/config.json --hardware h100:1x8 --out o",
            ("memory_",),
        ),
    ],
)
def test_a_reader_that_leaves_loses_no_file(
    made: Path, tmp_path: Path, line: str, names: tuple[str, ...]
) -> None:
    """`| head -1`, and with what is said, and a reader that reads nothing: the same files."""
    found = []
    for number, reader in enumerate(("> all", "| head -1", "2>&1 | head -1", "2>&1 | true")):
        folder = tmp_path / f"{number}"
        shutil.copytree(made, folder)
        before = files_of(folder)
        ran(f"{line} {reader}", folder)
        after = files_of(folder)
        after.pop("all", None)
        found.append({name: text for name, text in after.items() if before.get(name) != text})
    for name in names:
        assert any(Path(path).name.startswith(name) for path in found[0]), (name, [*found[0]])
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        # an answer says how long its search took
        assert all(other[name] == found[0][name] for name in other if Path(name).name != "j")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, a plan, a launch and the launch's files."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    ran(f"{PLAN} && {LAUNCH} && autopar-export launch.json --out e", folder)
    return folder


def test_another_question_leaves_another_file_and_the_same_one_none(folder: Path) -> None:
    """Lengths, precisions, engines, pins, budgets; twice each."""
    plans = f"autopar-search {ASKED} --engine galvatron"
    launches = f"autopar-search {ASKED} --engine megatron"
    questions = [
        *(f"{plans} --seq-length {length}" for length in (64, 128)),
        f"{plans} --mixed-precision fp16",
        f"{plans} --pin tp=2",
        f"{plans} --memory-constraint 40",
        f"autopar-search {ASKED} --engine paddlenlp",
        *(f"{launches} --seq-length {length}" for length in (64, 128)),
        f"{launches} --tp 2",
        f"{launches} --precision fp8",
    ]
    for number, question in enumerate(questions, 1):
        for _ in range(2):
            assert "kept" not in ran(question, folder).stderr
        found = [name for name in files_of(folder) if "galvatron_config" not in name]
        assert len(found) == number, found
    for name in files_of(folder):
        assert shlex.quote(name) == name  # no character that a shell reads as anything else


def test_what_would_be_replaced_is_kept_and_said(made: Path, tmp_path: Path) -> None:
    """Whatever the command and the option: the file of somebody stays, beside ours."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    lines = {
        "mine.json": LAUNCH.replace("launch.json", "mine.json"),
        "j.json": f"autopar-search {ASKED} --engine none --json j.json --output-config-path none",
        "h.html": "autopar-explain autopar_plan_galvatron.json --html h.html",
        "c.json": "autopar-check e/launch.sh --json c.json",
        "t.json": "autopar-check e/launch.sh --trace t.json",
        "o/launch.sh": "autopar-export launch.json --out o",
        "p.json": "autopar-estimate --plan autopar_plan_galvatron.json --json p.json",
        "s.json": "profile-plan autopar_plan_galvatron.json --json s.json",
        "w/overlap_coefficient.json": f"autopar-profile-estimate {ESTIMATED} --out w",
        "a.csv": f"autopar-explore calculon {CALCULON} {SPACE} --all a.csv",
    }
    for name, line in lines.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine", encoding="utf-8")
        said = ran(line, folder).stderr
        kept = path.with_name(f"{path.name}.bak-1")
        assert f"{name} had another content, which is kept as {kept.name}\n" in said, line
        assert kept.read_text(encoding="utf-8") == "mine"
        assert path.read_text(encoding="utf-8") != "mine"
        # the same answer again is the same file, however long its search took
        assert "kept" not in ran(line, folder).stderr
        assert not path.with_name(f"{path.name}.bak-2").exists()


def test_a_folder_that_takes_no_file_is_one_sentence(made: Path, tmp_path: Path) -> None:
    """A file in its place stands for all folders that cannot be written."""
    folder = tmp_path / "here"
    shutil.copytree(made, folder)
    (folder / "no").write_text("", encoding="utf-8")
    for line in (
        f"autopar-search {ASKED} --engine none --output-config-path no/x",
        f"autopar-search {ASKED} --engine megatron --output-config-path no/x",
        "autopar-export launch.json --out no/x",
        "autopar-check e/launch.sh --html no/x.html",
        "autopar-explain autopar_plan_galvatron.json --trace no/x.json",
        "profile-plan autopar_plan_galvatron.json --json no/x.json",
    ):
        before = files_of(folder)
        said = ran(line, folder, code=2).stderr.splitlines()[-1]
        assert "no/x" in said
        assert "cannot be written" in said
        assert files_of(folder) == before


def test_a_plan_is_handed_on_from_another_folder(folder: Path) -> None:
    """Made below one folder from paths above it, read from others, and on another machine."""
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "elsewhere").mkdir()
    words = ASKED.replace("tiny/", "../../tiny/")
    for engine in ("galvatron", "megatron"):
        line = f"autopar-search {words} --engine {engine} --output-config-path ../deep/er"
        ran(line, folder / "runs" / "one")
    found = sorted((folder / "runs/deep/er").glob("autopar_plan_*.json"))
    contents = [json.loads(path.read_text("utf-8")) for path in found]
    engines = [one["runtime"]["engine"] for one in contents]
    assert sorted(engines) == ["galvatron", "megatron"]
    for path, content, engine in zip(found, contents, engines, strict=True):
        assert content["request"]["model"] == "../../../tiny/config.json"
        for here, plan in (
            (folder / "elsewhere", os.path.relpath(path, folder / "elsewhere")),
            ("/", path),
        ):
            done = ran(f"autopar-export {plan} --to {engine} --out {folder}/e/{engine}", Path(here))
            assert "not in this folder" not in done.stderr
            ran(f"autopar-explain {plan}", here)
        assert (folder / "e" / engine / "launch.sh").is_file()
        # alone on another machine it says what is missing, and takes what is given instead
        alone = folder / "alone" / path.name
        alone.parent.mkdir(exist_ok=True)
        shutil.copy(path, alone)
        (said,) = ran(
            f"autopar-export {path.name} --to {engine}", alone.parent, 2
        ).stderr.splitlines()
        assert "--model ../../../tiny/config.json" in said
        ran(line.replace("../../tiny", "../tiny"), alone.parent)


def test_what_was_profiled_here_is_planned_without_paths(folder: Path) -> None:
    """`profile-model`, then a search; a card asks for estimates as it does anywhere else."""
    pytest.importorskip("torch", reason="torch is not installed")
    question = "autopar-search --model tiny/config.json --mixed-precision fp32"
    estimated = f"{question} --engine galvatron --settle-bsz 8 --hardware a100-80gb:1x8"
    ran(f"{estimated} --output-config-path before.json", folder)
    ran(f"profile-model --model tiny/config.json --mode batch --bsz 1,2 {' '.join(SHORT)}", folder)
    shutil.copytree(find_hardware("a100-80gb_1x8"), folder / "hardware")

    done = ran(f"{question} --verbose", folder)
    assert "--hardware" in done.stderr
    assert "times of models/tiny/configs/cpu and memory of models/tiny/configs" in done.stderr
    assert "--hardware hardware (hardware of hardware)\n" in done.stdout
    (path,) = (folder / "configs").glob("autopar_plan_*.json")
    plan = PlanDocument.read(path)
    assert plan.request["hardware"] == "../hardware"
    assert plan.request["time-profiling-path"] == "../models/tiny/configs/cpu"
    used = {item.role: item.path for item in plan.inputs}
    assert (path.parent / used["computation"]).resolve().is_relative_to(folder / "models")
    # the plan names what it was made from, wherever it is read
    (folder / "elsewhere").mkdir()
    explained = ran(f"autopar-explain {path}", folder / "elsewhere")
    assert "it is this plan" in explained.stdout
    assert "has changed since" not in explained.stderr

    # files that lie there change nothing of a question that names a card
    said = ran(f"{estimated} --output-config-path after.json", folder).stderr
    assert "--hardware" in said
    before, after = (folder / f"{name}.json" for name in ("before", "after"))
    assert before.read_bytes() == after.read_bytes()


def test_the_site_of_the_cluster_is_planned_with(folder: Path) -> None:
    """As if its path were typed; of another shape it is said alone."""
    (folder / "sites").mkdir()
    clock = {"value": 0.8, "quality": "measured", "source": "a test"}
    site = {"format": "autopar-site", "version": 1, "name": "here", "card": "h100-80gb"}
    whole = {**site, "num_nodes": 1, "gpus_per_node": 8, "clock": clock}
    question = f"autopar-search {ASKED} --engine megatron"
    without = ran(f"{question} --output-config-path none", folder).stdout
    (folder / "sites" / "site_here.json").write_text(json.dumps(whole), encoding="utf-8")

    done = ran(f"{question} --verbose", folder)
    assert "sites/site_here.json" in done.stderr
    assert "--site sites/site_here.json" in " ".join(done.stdout.split())
    (path,) = (folder / "configs").iterdir()
    assert json.loads(path.read_text("utf-8"))["request"]["site"] == "../sites/site_here.json"
    typed = f"{question} --output-config-path typed.json --site sites/site_here.json"
    ran(typed, folder)
    prices = [json.loads(p.read_text("utf-8"))["price"] for p in (path, folder / "typed.json")]
    assert prices[0] == prices[1]
    none = ran(f"{question} --site none --output-config-path none", folder)
    assert "site" not in none.stderr
    # the last line is the time of the search
    assert none.stdout.splitlines()[:-1] == without.splitlines()[:-1]
    other = ran(f"{question.replace('1x8', '2x8')} --output-config-path none", folder).stderr
    assert "--site sites/site_here.json" in other
