"""What commands say and write whatever they are given: short sentences, visible names, no clash."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from autopar.cli import SUBCOMMANDS
from autopar.command.answers import OUTPUTS
from autopar.command.console import make_console
from autopar.command.options import Command
from autopar.command.run import Failure, describe_failure, visible
from autopar.command.show import make_table, print_item, print_line, print_pair
from autopar.documents.checks import DOCUMENTS, document_errors
from autopar.documents.json import MOST_ERRORS, load_object
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError, InputError, OptionError, fitted, message_of
from autopar.output import refuse_clashes, write_text
from autopar.rates.command import COMMAND as ESTIMATE
from autopar.records import replace
from autopar.statistics import latency_bandwidth_fit
from profiler.plan.command import COMMAND as PLAN
from profiler.show.pictures import ASCII, Quantity, draw
from profiler.show.read import Point, Series
from search.commands.export import _quoted
from search.engines.galvatron.plan import lower
from tests.e2e.bad_input_table import MEASURED, prepare
from tests.export_cases import HETEROGENEOUS, job
from tests.warm import command

STEERING = "\x1b]0;title\x07\x9b31m\u202e\u2028\x7f"


def test_a_short_message_stays_as_it_is() -> None:
    """Up to the limit nothing is removed."""
    text = "a.json: key 'x': the value is 3, expected 4 " + "x" * 226
    assert len(text) == 270
    assert fitted(text) == text
    assert len(fitted(text + "x")) < 270


@pytest.mark.parametrize(
    "path",
    [
        "d" * 5000,
        "/".join(["folder"] * 300) + "/times.json",
        "é" * 400,
        " ".join(["two words"] * 90),
    ],
)
def test_a_long_name_is_shortened_before_reason_and_remedy(path: str) -> None:
    """Only its middle is removed; reason, remedy and both ends of the name remain."""
    error = DocumentError(path, "file not found", key="a" * 400, remedy="Use --model NAME")
    shown = message_of(error)
    assert len(shown) <= 270
    assert shown[:10] == path[:10]
    assert shown.endswith("file not found. Use --model NAME")


@pytest.mark.parametrize("remedy", ["Remove --b", "Use " + "x" * 200, None])
def test_a_long_list_has_a_line_of_its_own(remedy: str | None) -> None:
    """Whole, and the sentence around it too."""
    values = ", ".join(map(str, range(300)))
    problem = f"--b: expected one of {values}; got 3000"
    first, listed, *hints = message_of(OptionError(problem, remedy=remedy)).split("\n")
    end = f". {remedy}" if remedy == "Remove --b" else ""
    assert first == f"--b: expected one of 300 listed below; got 3000{end}"
    assert listed == f"  {values}"
    assert hints == ([f"hint: {remedy}"] if remedy and not end else [])


def test_a_long_sentence_is_not_cut() -> None:
    """It has neither a list nor a long word, and each of its words may matter."""
    problem = "--c: " + " ".join(f"word{place}" for place in range(90))
    assert message_of(OptionError(problem, remedy="Use --d")) == f"{problem}. Use --d"


def test_a_short_list_stays_in_its_sentence() -> None:
    """A message of a line has no second one."""
    problem = f"--b: expected one of {', '.join('abcdefghijkl')}"
    assert message_of(OptionError(problem)) == problem


@pytest.mark.parametrize("length", [100, 101, 600])
def test_a_long_remedy_is_a_hint(length: int) -> None:
    """A remedy of more than 100 characters has a line of its own, which is never cut."""
    remedy = "Use " + "x" * (length - 4)
    shown = message_of(OptionError("--a 1: too small " + "y" * 5000, remedy=remedy))
    first, *hints = shown.split("\n")
    assert len(first) <= 270
    assert hints == ([] if length == 100 else [f"hint: {remedy}"])
    assert shown.endswith(remedy)


def test_an_error_without_its_remedy() -> None:
    """`short` is for places where the remedy does not apply."""
    error = DocumentError("a.json", "is 3; 4 is possible", key="b", remedy="Use 4")
    assert (error.short, error.problem) == (
        "a.json: key 'b': is 3; 4 is possible",
        "is 3; 4 is possible",
    )
    assert str(error) == f"{error.short}. Use 4"
    assert str(InputError("Is it?", remedy="Use 4")) == "Is it? Use 4"


def test_what_turns_or_ends_lines_is_shown() -> None:
    """Escapes for everything that a terminal obeys, tab and new line but."""
    shown = visible(STEERING + "a\tb\n")
    assert shown == "\\x1b]0;title\\x07\\x9b31m\\u202e\\u2028\\x7fa\tb\n"


def test_tables_and_reports_show_control_characters() -> None:
    """Names of files and models come to stdout in tables, items, pairs and lines."""
    stream = io.StringIO()
    console = make_console(stream)
    table = make_table("name" + STEERING, "value")
    table.add_row(STEERING, "1")
    console.print(table)
    console.print(STEERING)
    print_item(console, STEERING)
    print_line(console, STEERING)
    print_pair(console, "label", STEERING)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", stream.getvalue())
    assert stream.getvalue().count("title") == 6


def test_a_working_directory_that_is_gone_is_one_sentence() -> None:
    """The error of asking for it names no file."""
    assert describe_failure(FileNotFoundError(2, "No such file or directory")) == Failure(
        "the working directory no longer exists. Change to another", 2
    )


def test_a_command_without_a_working_directory_says_so(tmp_path: Path) -> None:
    """Relative names lead nowhere there."""
    program = Path(sys.executable).parent / "autopar-search"
    line = f"mkdir gone && cd gone && rmdir ../gone && exec {program}"
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.whole
@pytest.mark.parametrize("option", ["json", "peers", "all", "out", "output-config-path"])
def test_what_is_read_is_no_output(option: str, tmp_path: Path) -> None:
    """Every command that has the option refuses, through links as well."""
    (tmp_path / "in.json").write_text("{}", encoding="utf-8")
    (tmp_path / "link.json").symlink_to("in.json")
    starts = {
        "json": ["autopar-estimate", "calculon", "--application", "in.json", "--system", "a100"],
        "peers": ["autopar-estimate", "calculon", "--application", "a", "--execution", "in.json"],
        "all": ["autopar-explore", "calculon", "--application", "a", "--system", "in.json"],
        "out": ["autopar-export", "in.json", "--to", "megatron"],
        "output-config-path": ["autopar-search", "--model", "in.json"],
    }
    name, *words = starts[option]
    for target in ("link.json",) if option != "json" else ("in.json", "./in.json"):
        done = command(name, *words, f"--{option}", target, cwd=tmp_path).completed()
        assert done.returncode == 2
        assert done.stderr.endswith(
            f"--{option} {target}: this is an input file of the command. Use another path\n"
        )
    assert (tmp_path / "in.json").read_text(encoding="utf-8") == "{}"


def test_two_outputs_are_two_files(folder: Path) -> None:
    """Each would replace the other; `none` and shipped names are no files."""
    (folder / "card.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OptionError, match=r"--out.*card.json"):
        ESTIMATE.read(["--model", "x", "--hardware", "card.json:1x2", "--out", "card.json"], print)
    (folder / "p.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OptionError, match=r"--json.*p.json"):
        PLAN.read(["p.json", "--json", "p.json"], print)
    assert PLAN.read(["p.json", "--json", "q.json"], print) is not None
    assert ESTIMATE.read(["--model", "m", "--out", "none"], print) is not None


def test_a_search_does_not_write_over_what_lies_in_a_folder_it_reads(tmp_path: Path) -> None:
    """The files of a folder are known once they are read."""
    prepare(tmp_path, Path(__file__).resolve().parents[3])
    name = "p2p_bandwidth_1nodes_8gpus_per_node.json"
    before = (tmp_path / name).read_bytes()
    words = (*MEASURED, "--json", name, "--output-config-path", "none")
    done = command("autopar-search", *words, cwd=tmp_path).completed()
    assert done.returncode == 2, done.stderr
    assert "this is an input file of the command" in done.stderr
    assert (tmp_path / name).read_bytes() == before


def test_dev_stdout_is_the_stream_that_is_open(tmp_path: Path) -> None:
    """A file that stdout leads to stays, and keeps what was printed before."""
    code = (
        "import sys; from pathlib import Path; from autopar.output import write_text\n"
        "print('before'); write_text(Path('/dev/stdout'), 'document\\n'); print('after')"
    )
    path = tmp_path / "out"
    with path.open("wb") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, timeout=60, check=True)
        assert os.fstat(stream.fileno()).st_ino == path.stat().st_ino
    assert path.read_text(encoding="utf-8") == "before\ndocument\nafter\n"
    refuse_clashes({"--json": "/dev/stdout", "--out": "/dev/stdout"}, [])
    write_text(Path("/dev/fd/2"), "")


@pytest.mark.parametrize(("deep", "good"), [(60, True), (64, False), (900, False)])
def test_brackets_nest_only_so_deep(deep: int, good: bool, tmp_path: Path) -> None:
    """The document check recurses for every bracket."""
    path = tmp_path / "deep.json"
    path.write_text('{"a": ' + "[" * deep + "]" * deep + "}", encoding="utf-8")
    if good:
        assert load_object(path).data
    else:
        with pytest.raises(DocumentError, match="brackets nest deeper than 64"):
            load_object(path)
    wide = {str(number): [number] for number in range(1000)}
    path.write_text(json.dumps(wide), encoding="utf-8")
    assert load_object(path).data == wide


def test_a_time_that_no_machine_has_is_fitted() -> None:
    """Its weight would be infinite."""
    fit = latency_bandwidth_fit([1e6, 2e6, 4e6], [1e-320, 2e-3, 4e-3])
    assert np.isfinite([fit.latency_s, fit.seconds_per_byte]).all()


_WRITES = re.compile(r"\b(write|written|plot the|folder of the plots)\b")


def test_every_option_that_writes_is_known() -> None:
    """A new one has to be named where clashes are refused."""
    found = {
        row.name
        for _, module, _ in SUBCOMMANDS.values()
        for one in vars(import_module(module)).values()
        if isinstance(one, Command)
        for row in one.rows
        if row.kind == "text" and _WRITES.search(row.help)
    }
    assert {"json", "all", "out", "peers", "plot"} <= found
    assert found <= OUTPUTS


def test_a_document_of_another_kind_has_a_bounded_list_of_errors(tmp_path: Path) -> None:
    """Tens of thousands of unknown keys would be compared with every known one."""
    data: dict[str, object] = {f"layertype_0_bsz{number}_seq4096": 1 for number in range(5000)}
    found = document_errors(DOCUMENTS["overlap"], tmp_path / "overlap.json", data)
    assert len(found) == MOST_ERRORS + 1
    assert "more errors than these 100" in str(found[-1])
    few = {"overlap_coe": 1.1, **{key: data[key] for key in list(data)[:3]}}
    assert len(document_errors(DOCUMENTS["overlap"], tmp_path / "overlap.json", few)) == 3


@pytest.mark.parametrize("quantity", ["time", "bandwidth"])
def test_a_time_that_no_machine_has_is_drawn_around(quantity: Quantity) -> None:
    """A plot over three hundred decades would show nothing, and has no finite bandwidth."""
    points = tuple(
        Point(size_bytes=size, time_s=time)
        for size, time in ((1e6, 1e-320), (2e6, 2e-3), (4e6, 4e-3), (8e6, 8e-3))
    )
    series = Series(
        operation="allreduce", group_size=2, consecutive=True, points=points, scope=None
    )
    lines = draw([series], quantity, ASCII)
    assert max(len(line.plain) for line in lines) <= 80


@pytest.mark.parametrize("path", ["plain/dir", "two words", "it's\\here\x1b]0;t\x07\u202e"])
def test_a_launch_command_enters_any_folder(path: str, tmp_path: Path) -> None:
    """What a shell reads is the folder's name, and nothing in it steers the terminal."""
    (tmp_path / path).mkdir(parents=True)
    quoted = _quoted(path)
    assert visible(quoted) == quoted
    done = subprocess.run(
        ["bash", "-c", f"cd {quoted} && pwd"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )
    assert os.fsdecode(done.stdout.rstrip(b"\n")) == str(tmp_path / path)


def test_a_name_is_no_interpolation_of_a_yaml() -> None:
    """Galvatron reads its files with OmegaConf, which replaces `${...}` inside any text."""
    spec = replace(load_spec("llama2-7b"), name="${oc.env:HOME} ${x}")
    plan = replace(
        HETEROGENEOUS,
        stage_sizes=(spec.num_layers // 2,) * 2,
        layers=HETEROGENEOUS.layers[:1] * spec.num_layers,
    )
    files = lower(job(plan, spec, model="llama2-7b")).files
    for name, text in files.items():
        if name.endswith(".yaml"):
            sizes = [line for line in text.splitlines() if "model_size" in line]
            assert sizes, name
            assert not [line for line in sizes if "${" in line]
