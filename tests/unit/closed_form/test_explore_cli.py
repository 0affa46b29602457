"""`autopar-explore` in process: what it prints, refuses and writes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.command.answers import without_head
from autopar.documents import catalog
from search.closed_form.calculon import evaluate
from search.commands import estimate as cli_estimate
from search.commands.explore import run
from tests.parity.test_calculon_engine import APPLICATION, SYSTEM
from tests.unit.explore_documents import calculon, tensor2d

Capture = pytest.CaptureFixture[str]


# titles show paths as they are given, so they are given without folders
pytestmark = pytest.mark.usefixtures("folder")


def answer(arguments: list[str], capsys: Capture) -> Any:
    """Return the object of `--json -`."""
    assert run([*arguments, "--json", "-"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "asked", "counts", "options"),
    [
        ("one", calculon, "8", ["--top", "4"]),
        ("scaling", calculon, "8,16,7", ["--top", "1", "--frontier"]),
        ("sweep", calculon, "8", ["--sweep", "system.mem1.GiB=1:8:x2"]),
        ("tensor2d", tensor2d, "8,16", ["--top", "2"]),
    ],
)
def test_golden_what_is_printed(
    name: str,
    asked: Callable[[Path, str], list[str]],
    counts: str,
    options: list[str],
    golden: Callable[[str, str], None],
    capsys: Capture,
) -> None:
    """Best executions, where time and memory go, why the rest is not there, what was assumed."""
    assert run([*asked(Path(), counts), *options]) == 0

    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    golden(f"explore_{name}.txt", text)


def test_json_is_the_published_form(capsys: Capture) -> None:
    """Places as texts, the execution and all statistics, which pricing it again gives."""
    found = without_head(answer([*calculon(Path()), "--top", "3"], capsys))

    assert list(found) == ["0", "1", "2"]
    rates = [row["stats"]["sample_rate"] for row in found.values()]
    assert rates == sorted(rates, reverse=True)
    for row in found.values():
        assert evaluate(APPLICATION, row["execution"], SYSTEM) == row["stats"]


@pytest.mark.parametrize(
    ("asked", "more", "figure"),
    [(calculon, [], "sample_rate"), (tensor2d, ["--strategy", "2d"], "t")],
)
def test_what_is_found_can_be_priced_alone(
    asked: Callable[[Path], list[str]], more: list[str], figure: str, capsys: Capture
) -> None:
    """An execution of the file is one that autopar-estimate takes, with the same figures."""
    arguments = asked(Path())
    found = answer([*arguments, *more], capsys)["0"]
    Path("execution.json").write_text(json.dumps(found["execution"]))
    inputs = arguments[1:5]
    priced = ["--execution", "execution.json", "--json", "-"]
    assert cli_estimate.run([arguments[0], *inputs, *priced]) == 0

    again = json.loads(capsys.readouterr().out)
    assert again[figure] == pytest.approx(found["stats"][figure], rel=1e-9)


def test_published_searches_write_what_the_published_tool_reads(capsys: Capture) -> None:
    """23 fields and 96 statistics, and the published space: no uneven stages, any batch."""
    found = answer([*calculon(Path(), batch=7), "--compat", "--top", "1"], capsys)["0"]

    assert (len(found["execution"]), len(found["stats"])) == (23, 96)
    assert found["execution"]["batch_size"] < 8
    fixed = [*calculon(Path(), batch=7), "--json", "-"]
    assert answer([*fixed, "--any-batch", "--top", "1"], capsys)["0"]["stats"] != found["stats"]


def test_several_searches_are_a_list(capsys: Capture) -> None:
    """Numbers of processors, settings and the frontier, with the counts of each."""
    sweep = ["--sweep", "system.mem1.GiB=20,40", "--sweep", "application.seq_size=512,1024"]
    found = answer([*calculon(Path(), "16,8"), *sweep, "--frontier"], capsys)["searches"]

    assert [(one["num_procs"], *one["sweep"].values()) for one in found] == [
        (count, memory, length)
        for memory in (20, 40)
        for length in (512, 1024)
        for count in (8, 16)
    ]
    for one in found:
        assert one["complete"]
        assert one["feasible"] + sum(one["rejected"].values()) == one["considered"]
        best, frontier = one["best"]["0"]["stats"], list(one["frontier"].values())
        assert list(one["best"]) == ["0"]
        assert frontier[0]["stats"]["total_time"] == best["total_time"]
        memory = [row["stats"]["proc_mem_tier1_cap_req"] for row in frontier]
        assert memory == sorted(memory, reverse=True)
    # what a setting costs is what the search of that document says
    documents = calculon(Path())
    changed = json.loads(Path("machine.json").read_text())
    changed["mem1"]["GiB"] = 20
    Path("machine.json").write_text(json.dumps(changed))
    again = answer([*documents, "--top", "1"], capsys)["0"]
    assert again == found[2]["best"]["0"]


@pytest.mark.parametrize(
    ("objective", "key"),
    [("rate", "sample_rate"), ("time", "total_time"), ("memory", "proc_mem_tier1_cap_req")],
)
def test_objectives(objective: str, key: str, capsys: Capture) -> None:
    """The best by one figure is no worse by it than the best by another."""
    found = {
        name: answer([*calculon(Path()), "--objective", name, "--any-batch"], capsys)["0"]["stats"]
        for name in ("rate", "time", "memory")
    }
    sign = -1 if objective == "rate" else 1
    assert min(found, key=lambda name: sign * found[name][key]) == objective or (
        found[objective][key] == min(one[key] for one in found.values())
    )


def test_switches_narrow_the_space(capsys: Capture) -> None:
    """Each leaves executions out, and what is left has none of them."""
    whole = answer([*calculon(Path(), "8,16")], capsys)["searches"]
    for option, field, value in (
        ("--no-tp-overlap", "tensor_par_overlap", "none"),
        ("--no-dp-overlap", "data_par_overlap", False),
        ("--no-offload", "weight_offload", False),
        ("--structure=llama", "structure_type", "llama"),
        ("--attention=flash", "attention_type", "flash"),
        ("--fused-activation=false", "fused_activation", False),
    ):
        some = answer([*calculon(Path(), "8,16"), option], capsys)["searches"]
        for one, other in zip(some, whole, strict=True):
            assert {row["execution"][field] for row in one["best"].values()} == {value}, option
            assert one["considered"] <= other["considered"]
    even = answer([*calculon(Path(), "8,16"), "--even-stages"], capsys)["searches"]
    assert even[0]["considered"] < whole[0]["considered"]


def test_where_nothing_can_run(capsys: Capture) -> None:
    """Exit code 3, with the reasons and what may help; no file is left."""
    tiny = ["--top", "1", "--sweep", "system.mem1.GiB=0.001", "--all", "all.csv", "--no-offload"]
    assert run([*calculon(Path()), *tiny]) == 3

    error = capsys.readouterr().err
    assert "need more memory than there is. Use more processors, more memory" in error
    assert not list(Path().glob("all.csv*"))
    assert run(calculon(Path(), batch=8, procs="7")) == 3
    assert "Use another number of processors" in capsys.readouterr().err
    assert run(tensor2d(Path(), gpus="7")) == 3
    assert "Use another number of GPUs" in capsys.readouterr().err


@pytest.mark.whole
def test_pictures(capsys: Capture) -> None:
    """What there is to draw, as PNG and SVG; the same search gives the same file."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    for folder, kind in (("one", "both"), ("two", "svg")):
        assert run([*calculon(Path(), "8,16"), "--plot", folder, "--plot-format", kind]) == 0
    written = {path.name for path in Path("one").iterdir()}

    assert written == {
        f"{name}.{kind}"
        for name in ("breakdown", "scaling", "frontier", "degrees")
        for kind in ("png", "svg")
    }
    for name in sorted(written):
        content = (Path("one") / name).read_bytes()
        assert content.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
        assert name.endswith("png") or content == (Path("two") / name).read_bytes()
    text = (Path("one") / "breakdown.svg").read_text(encoding="utf-8")
    for words in ("small on machine.json", "GiB of one processor", "capacity 60 GiB", "backward"):
        assert words in text
    capsys.readouterr()
    sweep = ["--sweep", "system.networks.1.bandwidth=1:400:x2", "--plot", "sweep"]
    assert run([*tensor2d(Path()), "--plot", "wide", "--plot-format", "svg"]) == 0
    assert run([*calculon(Path(), "16"), *sweep, "--plot-format", "svg"]) == 0
    assert "system.networks.1.bandwidth" in (Path("sweep") / "sweep.svg").read_text()
    assert "wrote sweep/sweep.svg" in capsys.readouterr().err
    assert run([*calculon(Path()), "--plot", "machine.json"]) == 2
    assert "machine.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--json", "small.json"], "small.json"),
        (["--all", "./machine.json"], "./machine.json"),
        (["--json", "a.csv.part", "--all", "a.csv"], "a.csv.part"),
        (["--json", "a.csv", "--all", "a.csv"], "--json"),
        (["--json", "degrees.png", "--plot", "."], "./degrees.png"),
        (["--json", "sweep.svg", "--plot", ".", "--plot-format", "both"], "--plot ./sweep.svg: "),
    ],
)
def test_no_output_is_an_input_or_another_output(
    words: list[str], sentence: str, capsys: Capture
) -> None:
    """Refused before the search, and every file is as it was."""
    asked = calculon(Path())
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    assert run([*asked, *words]) == 2
    assert sentence in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_outputs_of_the_other_model_and_of_a_space(capsys: Capture) -> None:
    """The same where a candidate or the points of a file are searched."""
    assert run([*tensor2d(Path()), "--json", "gpus.json"]) == 2
    assert "gpus.json" in capsys.readouterr().err
    Path("space.json").write_text("{}")
    words = ["--application", "gpt2-xl", "--system", "a100", "--space", "space.json"]
    assert run(["calculon", *words, "--json", "space.json"]) == 2
    assert "space.json" in capsys.readouterr().err
    assert Path("space.json").read_text() == "{}"


def test_outputs_of_one_execution(capsys: Capture) -> None:
    """Neither its documents, nor one file for two answers; shipped files are inputs as well."""
    calculon(Path())
    words = ["calculon", "--application", "small.json", "--system", "machine.json"]
    shipped = str(catalog.find_document("executions", "execution", "1x8-tp8"))
    words = [*words, "--execution", shipped]
    for more, sentence in (
        (["--json", "machine.json"], "machine.json"),
        (["--peers", "small.json"], "small.json"),
        (["--peers", shipped], "json"),
        (["--json", "a.json", "--peers", "a.json"], "--peers"),
    ):
        assert cli_estimate.run([*words, *more]) == 2
        assert sentence in capsys.readouterr().err
    assert cli_estimate.run(["--validate", "--system", "machine.json", "--json", "machine.json"])
    assert "machine.json" in capsys.readouterr().err
    tensor2d(Path())
    two = ["tensor2d", "--model", "model.json", "--system", "gpus.json", "--strategy", "1d"]
    two = [*two, "--config", "dp=1,tp=4,pp=2,mbs=1", "--batch", "8", "--json", "gpus.json"]
    assert cli_estimate.run(two) == 2
    assert "gpus.json" in capsys.readouterr().err
    assert not Path("a.json").exists()


@pytest.mark.whole
def test_outputs_to_devices_and_pipes(capsys: Capture) -> None:
    """Written to as they are, and still there; two options may have the same device."""
    os.mkfifo("pipe")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_bytes()))
    reader.start()
    words = ["--json", "/dev/null", "--all", "/dev/null"]
    assert run([*calculon(Path()), *words]) == 0
    assert run([*calculon(Path()), "--all", "pipe", "--top", "1"]) == 0
    reader.join(10)
    capsys.readouterr()

    assert Path("/dev/null").is_char_device()
    assert Path("pipe").is_fifo()
    assert read[0].startswith(b"num_procs,")
