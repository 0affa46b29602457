"""autopar-search and autopar-explain as a person runs them, on shipped and published inputs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.whole


def new(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run autopar-search in a new interpreter."""
    code = "from autopar.cli import search; search()"
    return checked(warm.new_interpreter(code, *arguments, cwd=cwd))


def run(
    name: str, *arguments: str, cwd: Path, expected: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder and check its exit code."""
    return checked(warm.command(name, *arguments, cwd=cwd).completed(), expected)


def search(*arguments: str, cwd: Path, expected: int = 0) -> subprocess.CompletedProcess[str]:
    """Run autopar-search."""
    return run("autopar-search", *arguments, cwd=cwd, expected=expected)


def checked(
    done: subprocess.CompletedProcess[str], expected: int = 0
) -> subprocess.CompletedProcess[str]:
    """Return how a command ended, which must be with this exit code and without a traceback."""
    assert done.returncode == expected, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def published(cases_dir: Path) -> list[str]:
    """Return the options that name the published A100 profiles of llama2-7b."""
    hardware, model = cases_dir / "galvatron" / "hardware", cases_dir / "galvatron" / "model"
    return [
        *("--num-layers", "32", "--hidden-size", "4096", "--seq-length", "2048"),
        *("--memory_profiling_path", str(model), "--time_profiling_path", str(model)),
        *("--allreduce_bandwidth_config_path", str(hardware), "--bandwidth-unit", "MiB/ms"),
        *("--default_dp_type", "zero2", "time_profile_mode=batch"),
    ]


def test_default_is_planned_without_arguments(tmp_path: Path) -> None:
    """What `make search` runs: a plan, marked as estimated, and two files."""
    done = new(cwd=tmp_path)

    assert "ESTIMATES" in done.stdout
    assert "llama2-7b" in done.stdout
    assert "using the shipped" in done.stderr
    assert len(list((tmp_path / "configs").glob("*.json"))) == 2


def test_reading_either_file_back_prices_the_same(tmp_path: Path, published: list[str]) -> None:
    """Strategy file and plan file carry the whole plan."""
    options = [*published, "settle_bsz=16", "memory_constraint=24", "--json", "-"]
    found = json.loads(search(*options, cwd=tmp_path).stdout)

    files = sorted((tmp_path / "configs").glob("*.json"))
    assert len(files) == 2
    for path in files:
        priced = json.loads(search(*options, "--evaluate", str(path), cwd=tmp_path).stdout)
        assert priced["legal"]
        assert priced["fits"]
        for key in ("step_time_s", "replay_s", "samples_per_s", "memory", "plan"):
            assert priced[key] == found[key]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model", "t5-3b", "--hardware", "a100-40gb:1x8", "--global-batch-size", "32"],
        ["--model", "llama3-70b", "--hardware", "h100:4x8", "--global-batch-size", "64"],
        [
            "--model",
            "llama2-13b",
            "--hardware",
            "h100:2x6",
            "--global-batch-size",
            "48",
            "--min-bsz",
            "1",
        ],
    ],
    ids=["default", "two layer types", "many stages", "twelve GPUs"],
)
def test_estimated_plans_are_read_back_and_repeat(tmp_path: Path, options: list[str]) -> None:
    """Either file gives the figures that were printed, and the same question the same bytes."""
    # a strategy file does not say which engine it is for
    options = [*options, "--engine", "none"]
    contents = []
    for name in ("first", "second"):
        folder = tmp_path / name
        found = json.loads(
            search(
                *options, "--json", "-", "--output-config-path", str(folder), cwd=tmp_path
            ).stdout
        )
        contents.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 2

    for name in contents[0]:
        path = str(tmp_path / "first" / name)
        priced = json.loads(
            search(*options, "--evaluate", path, "--json", "-", cwd=tmp_path).stdout
        )
        for key in ("legal", "fits", "step_time_s", "replay_s", "samples_per_s", "memory", "plan"):
            assert priced[key] == found[key]


def test_explain_needs_no_options_for_our_own_plan_file(tmp_path: Path) -> None:
    """The plan file names even the inputs that nobody typed, so nothing is said about them."""
    search(cwd=tmp_path)
    (own,) = (tmp_path / "configs").glob("autopar_plan_*.json")

    done = run("autopar-explain", str(own), cwd=tmp_path)

    assert done.stderr == ""
    assert "Fastest plan: it is this plan\n" in done.stdout


def test_fewer_samples_than_gpus_is_said(tmp_path: Path) -> None:
    """The documented default batch of 8 suits few clusters; the line says what to give."""
    words = ("--model", "llama2-7b", "--hardware", "h100:2x8", "--json", "-")
    done = search(*words, "--engine", "none", cwd=tmp_path)

    assert "--global-batch-size not given" in done.stderr
    assert "--global-batch-size" in done.stderr
    defaults = json.loads(done.stdout)["defaults_used"]
    assert any(line.startswith("--global-batch-size 8") for line in defaults)
    assert any(line.startswith("--memory-constraint 79.65") for line in defaults)

    # launches and the plans beside them have the batch that models are trained with
    found = json.loads(search(*words, cwd=tmp_path).stdout)
    assert any(line.startswith("--global-batch-size 1024 (not given") for line in found["assumed"])
    plans = [line["plan"] for line in found["engines"] if line["plan"] is not None]
    assert [plan["global_bsz"] for plan in plans] == [1024] * len(plans)


def test_files_are_the_same_every_time(tmp_path: Path, published: list[str]) -> None:
    """Byte for byte, wherever they are written."""
    contents = []
    for name in ("one", "two"):
        folder = tmp_path / name
        options = ["settle_bsz=16", "--output-config-path", str(folder)]
        search(*published, *options, cwd=tmp_path)
        contents.append([path.read_bytes() for path in sorted(folder.iterdir())])

    assert contents[0] == contents[1]
    assert len(contents[0]) == 2


def test_infeasible_budget_is_exit_3_and_the_one_it_names_works(
    tmp_path: Path, published: list[str]
) -> None:
    """The smallest budget is a promise."""
    done = search(*published, "settle_bsz=16", "memory_constraint=3", cwd=tmp_path, expected=3)

    assert done.stderr.count("\n") == 1
    smallest = done.stderr.rsplit("--memory-constraint ", 1)[1].partition(",")[0]
    search(*published, "settle_bsz=16", f"memory_constraint={smallest}", cwd=tmp_path)


def test_peer_file_that_is_illegal_is_priced(tmp_path: Path, published: list[str]) -> None:
    """Seven samples do not divide over eight ranks: legal is false, with the arithmetic."""
    ones, zeros = ",".join("1" * 32), ",".join("0" * 32)
    strategy = {
        "pp_deg": 1,
        "tp_sizes_enc": ones,
        "tp_consecutive_flags": ones,
        "dp_types_enc": ones,
        "use_sp": zeros,
        "checkpoint": ones,
        "global_bsz": 7,
        "chunks": 1,
        "pp_division": "32",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "vtp": 1,
        "vsp": 0,
        "embed_sdp": 0,
    }
    (tmp_path / "s.json").write_text(json.dumps(strategy))

    done = search(*published, "--evaluate", "s.json", "--json", "-", cwd=tmp_path)

    document = json.loads(done.stdout)
    assert document["legal"] is False
    assert any("global batch(7)" in problem for problem in document["problems"])


def test_explain_asks_again_and_answers_why_not(tmp_path: Path, published: list[str]) -> None:
    """The plan file knows its inputs; the pinned plan is no faster."""
    search(*published, "settle_bsz=16", "memory_constraint=24", cwd=tmp_path)
    (own,) = (tmp_path / "configs").glob("autopar_plan_*.json")

    done = run("autopar-explain", str(own), "--why-not", "tp=8", "--verbose", cwd=tmp_path)

    assert "more resources" in done.stdout
    assert "Why not tp=8: " in done.stdout
    assert "Difference per sequence" in done.stdout
