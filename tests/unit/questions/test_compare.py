"""Two plans side by side, and a plan beside a trace: what adds up, and how kernels are read."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.errors import DocumentError, InputError
from search.commands import compare as command, export as export_command

pytestmark = pytest.mark.whole

SMALL = {"global_batch": 32, "seq_length": 4096, "engine": "megatron"}


def found(tp: int, **options: Any) -> autopar.Answer:
    """Return the fastest launch with so many tensor ranks."""
    return autopar.search("llama3-8b", "h100:1x8", **{**SMALL, "tp": tp, **options})


def test_terms_of_two_launches_add_up_to_their_steps(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Degrees that differ, and every term; the difference of the steps is that of the terms."""
    one, two = found(2), found(8)
    seen = autopar.compare(one, two)
    assert {"name": "tp", "first": 2, "second": 8} in seen["degrees"]
    steps = [seen[side]["step_time_s"] for side in ("first", "second")]
    for side, total in zip(("first", "second"), steps, strict=True):
        assert sum(row[f"{side}_s"] for row in seen["terms"]) == pytest.approx(total)
    assert steps[1] - steps[0] == pytest.approx(sum(row["difference_s"] for row in seen["terms"]))
    assert seen["memory"]
    sizes = [abs(row["difference_s"]) for row in seen["terms"]]
    assert sizes == sorted(sizes, reverse=True)
    back = autopar.compare(two, one)
    assert {row["name"]: -row["difference_s"] for row in back["terms"]} == pytest.approx(
        {row["name"]: row["difference_s"] for row in seen["terms"]}
    )
    Path("one.json").write_text(json.dumps(one.to_dict()))
    Path("two.json").write_text(json.dumps(two.to_dict()))
    assert command.run(["one.json", "two.json"]) == 0
    assert "tp" in capsys.readouterr().out


def test_a_launch_beside_a_plan_has_common_terms(folder: Path) -> None:
    """Terms under common names still add up to both steps."""
    plan = autopar.search("llama3-8b", "h100:1x8", **{**SMALL, "engine": "galvatron"})
    seen = autopar.compare(found(2), plan)
    for side in ("first", "second"):
        total = seen[side]["step_time_s"]
        assert sum(row[f"{side}_s"] for row in seen["terms"]) == pytest.approx(total, rel=1e-6)


def test_a_script_is_the_launch_that_it_was_written_of(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts of a trainer stand beside launches, priced on the cluster that is named."""
    one = found(2, engine="megatron")
    Path("one.json").write_text(json.dumps(one.to_dict()))
    assert export_command.run(["one.json", "--to", "megatron", "--out", "."]) == 0
    paths = ["one.json", "megatron_args.sh"]
    assert command.run(paths) == 2
    assert "megatron_args.sh" in capsys.readouterr().err

    assert command.run([*paths, "--hardware", "h100:1x8", "--json", "-"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["second"]["kind"] == "launch"
    assert seen["second"]["step_time_s"] == pytest.approx(seen["first"]["step_time_s"])
    assert seen["second"]["peak_bytes"] == pytest.approx(seen["first"]["peak_bytes"])
    assert [row["name"] for row in seen["degrees"]] == []


def test_a_screen_says_what_fits_and_breaks_no_word(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of chunks each size, of flags a word; in 80 columns, also of what does not fit."""
    one = found(2, pp=2, vpp=2, cp=1)
    Path("one.json").write_text(json.dumps(one.to_dict()))
    assert export_command.run(["one.json", "--to", "megatron", "--out", "."]) == 0
    text = Path("megatron_args.sh").read_text()
    size = re.compile(r"(--micro-batch-size) \d+")
    assert size.search(text)
    Path("more.sh").write_text(size.sub(r"\1 8", text))
    capsys.readouterr()

    assert command.run(["one.json", "more.sh", "--hardware", "h100:1x8"]) == 0
    short = capsys.readouterr().out.splitlines()
    assert max(map(len, short)) <= 80
    assert len(short) <= 24
    assert any(line.startswith("1  one.json  tp2 pp2 dp2") for line in short)
    odds = next(line for line in short if line.startswith("OOM probability"))
    assert odds.endswith("2 does not fit")
    assert any(line.startswith("tokens/s/GPU ") for line in short)
    assert command.run(["one.json", "more.sh", "--hardware", "h100:1x8", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split("  ")[0] for line in lines]
    assert "micro batch size" in rows
    assert "layers of chunks" not in rows

    capsys.readouterr()
    two = found(2, pp=4, vpp=2, ep=1, tp_overlap=True)
    Path("two.json").write_text(json.dumps(two.to_dict()))
    assert command.run(["one.json", "two.json", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^layers of chunks +8 each +4 each$", text, re.MULTILINE)
    seen = autopar.compare(one, autopar.search("llama3-8b", "h200:1x8", **{**SMALL, "tp": 2}))
    assert {"name": "cluster", "first": "h100-80gb_1x8", "second": "h200_1x8"} in seen["degrees"]


def test_batches_that_differ_are_compared_by_sequence(folder: Path) -> None:
    """A step of twice the batch is no slower plan."""
    seen = autopar.compare(found(2), found(2, global_batch=64))
    assert seen["per"] == "sample"
    assert seen["second"]["step_time_s"] > 1.5 * seen["first"]["step_time_s"]
    total = sum(row["difference_s"] for row in seen["terms"])
    assert abs(total) < 0.1 * seen["first"]["step_time_s"] / 32


def test_a_plan_beside_its_own_trace_differs_in_nothing(folder: Path) -> None:
    """The predicted trace is read as a measured one; compressed as well."""
    Path("one.json").write_text(json.dumps(found(2, pp=2).to_dict()))
    autopar.explain("one.json", trace="own.json.gz")
    assert gzip.decompress(Path("own.json.gz").read_bytes())
    seen = autopar.compare("one.json", "own.json.gz")
    assert seen["second"]["kind"] == "trace"
    assert all(row["difference_s"] == pytest.approx(0.0, abs=1e-9) for row in seen["terms"])
    total = sum(row["second_s"] for row in seen["terms"])
    assert total == pytest.approx(seen["second"]["step_time_s"])
    assert total == pytest.approx(seen["first"]["step_time_s"], rel=0.02)


def test_a_trace_of_another_world_is_no_trace_of_the_plan(folder: Path) -> None:
    """Another number of ranks is a note; a rank that the plan lacks is refused, with its file."""
    Path("one.json").write_text(json.dumps(found(2, pp=2).to_dict()))
    autopar.explain("one.json", trace="own.json")
    data = json.loads(Path("own.json").read_text())
    data["distributedInfo"] = {"rank": 7, "world_size": 16}
    Path("other.json").write_text(json.dumps(data))
    (note,) = autopar.compare("one.json", "other.json")["notes"]
    assert "16 ranks" in note
    data["distributedInfo"]["rank"] = 8
    Path("other.json").write_text(json.dumps(data))
    with pytest.raises(DocumentError, match=r"other\.json: key 'distributedInfo\.rank'.* 8, but"):
        autopar.compare("one.json", "other.json")


def test_a_plan_comes_before_its_trace(folder: Path) -> None:
    """Files that are told apart by their content are compared in one order."""
    Path("half.json").write_text('{"traceEvents": [{"ph"')
    Path("one.json").write_text(json.dumps(found(2).to_dict()))
    with pytest.raises(InputError, match="Give the plan first"):
        autopar.compare("half.json", "one.json")
