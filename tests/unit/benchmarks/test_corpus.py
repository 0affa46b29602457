"""Rows of launch files: values read from each shape, the format, and what counts as a change."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import autopar
from autopar.records import replace
from benchmarks.corpus import Row, changes, launch_files, load_rows, main, row_of, write_rows
from tests.launch_shapes import JOB, SHAPES, Shape

STORED = "corpus.jsonl"


def made(shape: Shape, folder: Path) -> Row:
    """Return the row of a shape, written to a folder with its other files."""
    for name, text in {**shape.beside, shape.name: shape.text}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return row_of(folder / shape.name, folder)


@pytest.fixture(scope="module")
def price(tmp_path_factory: pytest.TempPathFactory) -> tuple[float | None, float | None]:
    """Return step time and peak of the run that all scripts of one run describe."""
    row = made(SHAPES[0], tmp_path_factory.mktemp("one"))
    assert row.step_s is not None
    assert row.peak_bytes is not None
    return row.step_s, row.peak_bytes


def test_number_of_shapes() -> None:
    """There are 40 files or more, each with a separate name."""
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 40


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shape(shape: Shape, tmp_path: Path, price: tuple[float | None, float | None]) -> None:
    """A file has the fields that it must, and all files of one run have one price."""
    row = made(shape, tmp_path)
    for name, expected in shape.row.items():
        found = getattr(row, name)
        assert set(expected) <= set(found) if name == "ids" else found == expected, (name, row)
    assert (row.step_s is not None) == (row.status == "read")
    if JOB.items() <= shape.row.items():
        assert (row.gpus, row.step_s, row.peak_bytes) == (8, *price)


def test_ids_have_no_text(tmp_path: Path) -> None:
    """The reason of a refusal keeps the words of autopar, without those of the file."""
    test = "if [ -d /secret ]; then kind=--fp16; else kind=--bf16; fi\n"
    text = test + SHAPES[0].text.replace("--bf16", "$kind")
    row = made(Shape("run.sh", text, {}), tmp_path)
    other = made(
        Shape("open.sh", "torchrun a.py --num-layers 2 --save 'secret out\n", {}), tmp_path
    )
    assert (row.status, other.status) == ("refused", "refused")
    assert row.ids[0].startswith("the launch command depends on _ on line _")
    assert other.ids == ("the _ on line _ is not closed, expected a shell script",)
    assert not any("secret" in one for one in row.ids + other.ids)


# --------------------------------------------------------------------------------------------------
# Folders, files and changes.

ROW = Row(
    repository="one/repository",
    path="a/run.sh",
    commit="0" * 40,
    blob="0" * 12,
    status="read",
    engine="Megatron-LM",
    gpus=8,
    degrees={"pp": 1, "tp": 2, "cp": 1, "ep": 1, "dp": 4},
    batch=64,
    step_s=1.5,
    peak_bytes=2.0**35,
)


def test_rows_are_written_and_read(tmp_path: Path) -> None:
    """Rows return from their file, sorted and with all fields."""
    other = replace(ROW, path="a/a.json", status="refused", ids=("read.key x",), assumed=("gpus",))
    write_rows([ROW, other], tmp_path / "rows")
    assert load_rows(tmp_path / "rows") == [other, ROW]
    first = json.loads((tmp_path / "rows").read_text(encoding="utf-8").splitlines()[0])
    assert first["ids"] == ["read.key x"]


@pytest.mark.parametrize(
    ("now", "names"),
    [
        (ROW, []),
        (replace(ROW, step_s=1.5 * (1 + 0.9e-4), commit="1" * 40), []),
        (replace(ROW, step_s=1.5 * (1 + 1.1e-4)), ["step_s"]),
        (replace(ROW, peak_bytes=2.0**35 * (1 - 2e-4)), ["peak_bytes"]),
        (replace(ROW, batch=32, degrees=dict(ROW.degrees or {}, tp=1)), ["degrees", "batch"]),
        (
            replace(ROW, status="refused", ids=("grid.dense",), step_s=None),
            ["status", "ids", "step_s"],
        ),
    ],
)
def test_changes(now: Row, names: list[str]) -> None:
    """A change of status, reason, run or price by more than 1e-4 is listed; a commit is not."""
    assert [text.partition(":")[0] for text in changes(ROW, now)] == names
    assert [text.partition(":")[0] for text in changes(now, ROW)] == names


def clone(folder: Path) -> Path:
    """Return a clone `folder/one/repository` with a launch, a document and another file."""
    root = folder / "one" / "repository"
    root.mkdir(parents=True)
    (root / "run.sh").write_text(SHAPES[0].text, encoding="utf-8")
    (root / "list.json").write_text("[1]", encoding="utf-8")
    (root / "notes.md").write_text("notes", encoding="utf-8")
    (root / "link.sh").symlink_to(root / "run.sh")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "first")):
        subprocess.run(("git", "-C", str(root), *words), check=True)
    return root


def git(root: Path, *words: str) -> str:
    """Return the output of a git command."""
    command = ("git", "-C", str(root), *words)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows name repository, path and commit; a run against them lists what changed."""
    root, rows = clone(tmp_path), tmp_path / "rows"
    assert [path.name for path in launch_files(tmp_path)] == ["list.json", "run.sh"]

    assert main([str(tmp_path), "--out", str(rows)]) == 0
    listed, run = load_rows(rows)
    assert (listed.path, listed.status) == ("list.json", "not a launch")
    assert (run.repository, run.path, run.status) == ("one/repository", "run.sh", "read")
    assert run.commit == git(root, "rev-parse", "HEAD")
    assert run.blob == git(root, "rev-parse", "HEAD:run.sh")[:12]
    assert main([str(tmp_path), "--against", str(rows)]) == 0

    assert run.step_s is not None
    write_rows([listed, replace(run, step_s=run.step_s * 1.01)], rows)
    capsys.readouterr()
    assert main([str(tmp_path), "--against", str(rows)]) == 1
    assert "one/repository run.sh: step_s" in capsys.readouterr().out

    # Another content is another file, and a file that is gone is counted.
    (root / "run.sh").write_text(SHAPES[0].text + "# more\n", encoding="utf-8")
    (root / "list.json").unlink()
    assert main([str(tmp_path), "--against", str(rows)]) == 1
    out = capsys.readouterr().out
    assert "0 of 2 rows compared: 1 files are not there, 1 have other content" in out


def test_limit_and_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file over the CPU limit and one that crashes autopar are rows, not the end of a run."""

    def spin(*_: object, **__: object) -> None:
        while True:
            pass

    def crash(*_: object, **__: object) -> None:
        raise KeyError("none")

    path = tmp_path / "run.sh"
    path.write_text(SHAPES[0].text, encoding="utf-8")
    monkeypatch.setattr(autopar, "check", spin)
    assert row_of(path, tmp_path, cpu_limit_s=0.05).status == "slow"
    monkeypatch.setattr(autopar, "check", crash)
    row = row_of(path, tmp_path)
    assert (row.status, row.ids, row.repository) == ("crashed", ("KeyError",), "")
    assert main([str(tmp_path)]) == 1


# --------------------------------------------------------------------------------------------------
# The stored rows.


def test_stored_rows(data_dir: Path) -> None:
    """At least 200 launches of ten repositories, as figures and ids, without a text of theirs."""
    rows = load_rows(data_dir / STORED)
    assert len({row.key for row in rows}) == len(rows) >= 200
    assert len({row.repository for row in rows}) >= 10
    assert {row.status for row in rows} <= {"read", "refused", "not a launch"}
    assert sum(row.status == "read" for row in rows) >= 100
    for row in rows:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", row.repository)
        assert re.fullmatch("[0-9a-f]{40}", row.commit)
        assert re.fullmatch("[0-9a-f]{12}", row.blob)
        assert row.ids or row.status != "refused"
        assert all(len(one) <= 120 and one.isprintable() for one in row.ids)
        if row.status == "read":
            assert all((row.engine, row.gpus, row.batch))
            assert row.degrees is not None
            assert list(row.degrees) == ["pp", "tp", "cp", "ep", "dp"]
