"""`autopar-explore` as a process: published answers, files, Ctrl-C, pipes and what is missing."""

from __future__ import annotations

import csv
import gzip
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import explore
from autopar.command.answers import without_head
from tests import warm
from tests.data.read import calculon_best, calculon_documents
from tests.unit.explore_documents import calculon

pytestmark = pytest.mark.whole

COMMAND = "from autopar.cli import explore; explore()"


def started(*arguments: str, cwd: Path) -> warm.Warm:
    """Return the running command."""
    return warm.command("autopar-explore", *arguments, cwd=cwd)


def ended(*arguments: str, cwd: Path, before: str | None = None) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of the command.

    before : what a new interpreter does first; without it, a copy of a warm one.
    """
    if before is None:
        done = started(*arguments, cwd=cwd).completed()
    else:
        done = warm.new_interpreter(f"import sys; {before}{COMMAND}", *arguments, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def written(folder: Path) -> int:
    """Return the bytes of the file of all points, which has another name until its end."""
    return max((path.stat().st_size for path in folder.glob(".all.csv*.part")), default=0)


def published(data_dir: Path, folder: Path, model: str, system: str) -> list[str]:
    """Write published documents and return the arguments that name them."""
    inputs = calculon_documents(data_dir)
    for kind, name in (("models", model), ("systems", system)):
        (folder / f"{name}.json").write_text(json.dumps(inputs[kind][name]))
    return ["calculon", "--application", f"{model}.json", "--system", f"{system}.json"]


def test_the_published_search(data_dir: Path, tmp_path: Path) -> None:
    """The ten best of the documented example, and all that can run, in the published form."""
    expected = {str(place): row for place, row in enumerate(calculon_best(data_dir))}
    code, out, err = ended(
        *published(data_dir, tmp_path, "turing-530B", "a100_80g"),
        *("--num-procs", "5128", "--max-batch", "2520", "--compat"),
        *("--json", "best.json", "--all", "all.csv.gz", "--all-statistics"),
        cwd=tmp_path,
    )
    assert code == 0, err
    assert "1,080 of 10,944 executions are possible" in out
    assert err == "autopar-explore: wrote all.csv.gz, rows: 1,080\n"

    found = json.loads((tmp_path / "best.json").read_text())
    assert list(without_head(found)) == list(expected)
    for place, row in expected.items():
        assert found[place]["stats"].keys() == row["stats"].keys()
        assert found[place]["execution"].keys() == row["execution"].keys()
        rate = found[place]["stats"]["sample_rate"]
        assert rate == pytest.approx(row["stats"]["sample_rate"], rel=1e-9)
    with gzip.open(tmp_path / "all.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1080
    assert list(rows[0]) == [*expected["0"]["execution"], *expected["0"]["stats"]]
    rates = sorted((float(row["sample_rate"]) for row in rows), reverse=True)
    wanted = [row["stats"]["sample_rate"] for row in expected.values()]
    assert rates[:10] == pytest.approx(wanted, rel=1e-9)


def test_ctrl_c_shows_what_was_found(tmp_path: Path) -> None:
    """Exit code 130, the best until then as tables and JSON, and a whole part of the file."""
    asked = calculon(tmp_path, "64,128,256,512,1024,2048,4096", 4096)
    part = tmp_path / "all.csv.gz.part"
    with started(
        *asked, "--all", "all.csv.gz", "--all-statistics", "--json", "found.json", cwd=tmp_path
    ) as process:
        until_s = time.monotonic() + 60
        while not written(tmp_path) > 100_000:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    said = err.splitlines()
    assert "autopar-explore: stopping (Ctrl-C again aborts)" in said
    assert said[-1] == "autopar-explore: interrupted"
    assert "the best until then follows" in err
    assert "interrupted; results so far" in out
    assert "64 processors" in out
    searches = json.loads((tmp_path / "found.json").read_text())["searches"]
    assert [one["complete"] for one in searches][-1] is False
    assert searches[-1]["best"]
    assert not (tmp_path / "all.csv.gz").exists()
    with gzip.open(part, "rt", newline="") as file:
        rows = sum(1 for _ in file) - 1
    assert f"partial results are in all.csv.gz.part, rows: {rows:,}\n" in err
    assert 0 < rows <= sum(one["feasible"] for one in searches)


def test_ctrl_c_twice_gives_up(tmp_path: Path) -> None:
    """At once, without tables; what was written stays."""
    asked = calculon(tmp_path, "4096", 4096)
    with started(*asked, "--all", "all.csv", "--all-statistics", cwd=tmp_path) as process:
        until_s = time.monotonic() + 60
        part = tmp_path / "all.csv.part"
        while not written(tmp_path) > 100_000:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until_s
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=30)
        _, err = process.communicate()

    # the search may have reached its next stop before the second one came
    assert code == 130
    assert err.endswith("autopar-explore: interrupted\n")
    assert part.exists()


def talkative() -> None:
    """Do what the command does, and say after a moment how far it is, not after seconds."""
    from search.commands import explore as command

    command._QUIET_S = 0.4
    explore()


def test_progress_is_lines_where_nobody_watches(tmp_path: Path) -> None:
    """On stderr, which search it is and how far."""
    asked = (*calculon(tmp_path, "1024,2048", 1024), "--all", "all.csv", "--all-statistics")
    with warm.Warm(talkative, name="autopar-explore", arguments=asked, cwd=tmp_path) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    label, _, share = line.partition(": ")[2].partition(": ")
    assert label in ("1024 processors", "2048 processors")
    assert share.endswith(" % searched\n")


def test_stdout_is_the_json_alone(tmp_path: Path) -> None:
    """For programs; threads do not change it."""
    answers = [
        ended(*calculon(tmp_path), "--json", "-", "--threads", count, cwd=tmp_path, before=before)
        for count, before in (("1", ""), ("2", None))
    ]
    assert [(code, err) for code, _, err in answers] == [(0, "")] * 2
    found: list[dict[str, Any]] = [json.loads(out) for _, out, _ in answers]
    assert [one["question"].pop("threads") for one in found] == ["1", "2"]
    assert found[0] == found[1]
    assert list(without_head(found[0])) == [str(place) for place in range(10)]


def test_without_matplotlib(tmp_path: Path) -> None:
    """Said before the search, with what to install."""
    code, out, err = ended(
        *calculon(tmp_path),
        *("--plot", "pictures"),
        cwd=tmp_path,
        before="sys.modules['matplotlib'] = None; ",
    )
    assert (code, out) == (1, "")
    assert err.startswith("autopar-explore: --plot needs matplotlib")
    assert "pip install 'autopar[plot]'" in err
    assert not (tmp_path / "pictures").exists()


@pytest.mark.parametrize("model", [[], ["calculon"], ["tensor2d"]])
def test_help_comes_at_once(model: list[str], tmp_path: Path) -> None:
    """Neither the engine nor numpy is loaded for it."""
    code, out, _ = ended(
        *model,
        "--help",
        cwd=tmp_path,
        before="import atexit; atexit.register(lambda: print("
        "[m for m in ('numpy', 'pydantic', 'rich', '_autopar_core') if m in sys.modules])); ",
    )
    assert code == 0
    assert out.startswith("usage: autopar-explore ")
    assert out.endswith("\n[]\n")
