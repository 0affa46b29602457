"""The object of `--json`: one head for all commands, exit codes, errors; commands as functions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.cli import SUBCOMMANDS
from autopar.command.answers import HEAD, SCHEMA, answers_stdout, is_answer, without_head
from autopar.documents.schemas import json_schemas
from autopar.errors import EXIT_CODES, DocumentError, InstallError, OptionError
from search.planning.uniform.files import read_launch

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--model", "llama3-8b", "--hardware", "h100:1x8", "--settle-bsz", "32")
LAUNCH = (*SMALL, "--seq-length", "4096", "--engine", "megatron", "--tp", "2")
SCRIPT = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024 "
SCRIPT += "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
SCRIPT += "--micro-batch-size 1 --global-batch-size 8 --bf16 --train-iters 10 --vocab-size 32000 "
SCRIPT += "--lr 1e-4 --mock-data --tokenizer-type NullTokenizer\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that commands run in."""
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(SCRIPT)
    Path("huge.sh").write_text(SCRIPT.replace("size 1024", "size 32768"))
    return tmp_path


def run(name: str, *words: str) -> int:
    """Return the exit code of a command."""
    module = import_module(SUBCOMMANDS[name][1])
    if name in ("models", "cards", "sites", "stacks"):
        return int(module.run([*words], name))
    return int(module.run([*words]))


ASKED: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "a launch": ("search", LAUNCH, 0),
    "no launch": ("search", ("--model", "llama3-70b", "--hardware", "h100:1x1", "--tp", "1"), 3),
    "no such option": ("search", ("--modle", "llama3-8b"), 2),
    "no such file": ("search", ("--evaluate", "none.json"), 2),
    "a check": ("check", ("train.sh", "--hardware", "h100:1x8"), 0),
    "findings": ("check", ("huge.sh", "--hardware", "h100:1x8", "--strict"), 1),
    "no launch among two": ("check", ("train.sh", "none.sh"), 2),
    "a closed form": (
        "estimate",
        ("calculon", "--application", "llama2-7b", "--system", "a100", "--execution", "1x8-tp8"),
        0,
    ),
    "models": ("models", (), 0),
    "cards": ("cards", (), 0),
    "sites": ("sites", (), 0),
    "stacks": ("stacks", (), 0),
    "no such model": ("estimate", ("llama3-8b",), 2),
    "no folder": ("profile show", ("none",), 2),
    "illegal plan": ("plan", ("none.json",), 2),
}


@pytest.mark.whole
@pytest.mark.parametrize("case", ASKED)
def test_every_answer_has_the_head_and_its_exit_code(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stdout is one object of the schema; `exit_code` is that of the process, errors included."""
    jsonschema = pytest.importorskip("jsonschema")
    name, words, code = ASKED[case]
    assert run(name, *words, "--json", "-") == code
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    jsonschema.Draft202012Validator(json_schemas()["answer"]).validate(found)
    assert tuple(found)[: len(HEAD)] == HEAD
    assert found["schema"] == SCHEMA
    assert found["exit_code"] == code
    assert code in EXIT_CODES
    assert "json" not in found["question"]
    if "error" in found:
        # the sentence of stderr, behind the command's name
        assert captured.err.endswith(f": {found['error']['message']}\n")
        assert set(found) == {*HEAD, "error"}
    else:
        assert len(found) > len(HEAD)


FORMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "a launch": ("search", (*LAUNCH, "--output-config-path", "none")),
    "every engine": ("search", (*SMALL, "--tp", "2", "--output-config-path", "none")),
    "ways out": ("search", ("--model", "llama2-7b", "--hardware", "rtx-4090:1x4")),
    "a goal": (
        "search",
        (
            *("--model", "llama3-8b", "--hardware", "h100:2x8", "--settle-bsz", "32"),
            *("--goal", "cost", "--engine", "megatron", "--tp", "2"),
            *("--output-config-path", "none"),
        ),
    ),
    "a plan": ("search", (*SMALL, "--engine", "none", "--output-config-path", "plan.json")),
    "a launch explained": ("explain", ("launch.json", "--why-not", "tp=4", "--why-not", "tp=3")),
    "a plan explained": ("explain", ("autopar_plan_plan.json", "--why-not", "tp=4")),
    "what if": (
        "explore",
        (*LAUNCH, "--hardware", "h200:1x8"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FORMS)
def test_one_schema_has_all_keys_of_an_answer(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its command: whoever checks an answer needs no other file, and a new key is in it."""
    jsonschema = pytest.importorskip("jsonschema")
    if "explained" in case:
        run("search", *LAUNCH, "--output-config-path", "launch.json")
        run("search", *SMALL, "--engine", "none", "--output-config-path", "plan.json")
    capsys.readouterr()
    name, words = FORMS[case]
    assert run(name, *words, "--json", "-") == (3 if case == "ways out" else 0)
    found = json.loads(capsys.readouterr().out)
    schema = jsonschema.Draft202012Validator(json_schemas()["answer"])
    schema.validate(found)
    assert not schema.is_valid({**found, "no_such_key": 1})


def test_error_names_file_and_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a document the parts of the sentence stand for themselves."""
    Path("bad.json").write_text('{"format": "autopar-plan", "version": 99}')
    assert run("explain", "bad.json", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["file"]) == ("document", "bad.json")
    assert error["remedy"] in error["message"]


def test_nothing_is_added_without_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error goes to stderr alone, and to no file."""
    assert run("search", "--evaluate", "none.json") == 2
    assert run("search", "--evaluate", "none.json", "--json", "out.json") == 2
    assert capsys.readouterr().out == ""
    assert not Path("out.json").exists()


@pytest.mark.parametrize(
    ("words", "asks"),
    [
        (["--json", "-"], True),
        (["--json"], True),
        (["--json", "--top", "3"], True),
        (["--json=-"], True),
        (["json=-"], True),
        (["--json", "a.json"], False),
        (["a", "-"], False),
        (["json"], False),
        ([], False),
    ],
)
def test_who_asks_for_stdout(words: list[str], asks: bool) -> None:
    """Also of a command line that is no good."""
    assert answers_stdout(words) is asks


@pytest.mark.whole
def test_an_answer_is_read_as_a_launch_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the launches of every trainer in it, and its head."""
    assert run("search", *LAUNCH, "--json", "answer.json", "--output-config-path", "own.json") == 0
    answer = json.loads(Path("answer.json").read_text())
    assert is_answer(answer)
    assert not is_answer(without_head(answer))
    own, read = read_launch("own.json"), read_launch("answer.json")
    assert (own.choice, own.request) == (read.choice, read.request)


def test_notices_are_in_the_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said on stderr beside an answer, without the command's name."""
    assert run("check", "train.sh", "--json") == 0
    captured = capsys.readouterr()
    (notice,) = json.loads(captured.out)["notices"]
    assert captured.err == f"autopar-check: {notice}\n"


# --------------------------------------------------------------------------------------------------
# Commands as functions.


@pytest.mark.whole
def test_functions_answer_as_the_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same object, and nothing on stdout, stderr or the disk."""
    before = set(folder.iterdir())
    own = autopar.search(
        "llama3-8b", "h100:1x8", global_batch=32, seq_length=4096, engine="megatron", tp=2
    )
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""
    assert set(folder.iterdir()) == before
    assert run("search", *LAUNCH, "--output-config-path", "none", "--json") == 0
    theirs = json.loads(capsys.readouterr().out)
    assert without_head(own.to_dict()) == without_head(theirs)
    explained = autopar.explain(own, "tp=4")
    assert explained["why_not"][0]["launch"]["degrees"]["tp"] == 4
    terms = explained["why_not"][0]["terms_s_per_sample"]
    difference = (
        1 / explained["why_not"][0]["launch"]["samples_per_s"] - 1 / own.rows()[0]["samples_per_s"]
    )
    assert sum(terms.values()) == pytest.approx(difference)
    assert explained["one_more_gib"]["gain"] >= -1e-12


@pytest.mark.whole
def test_functions_raise_what_commands_say(folder: Path) -> None:
    """Errors are those of `autopar.errors`, and no answer is an answer with its exit code."""
    with pytest.raises(OptionError, match="Did you mean --model"):
        autopar.ask("search", modle="llama3-8b")
    with pytest.raises(DocumentError, match=r"none\.sh"):
        autopar.check("none.sh")
    with pytest.raises(OptionError, match="unknown command"):
        autopar.ask("verify")
    none = autopar.search("llama3-70b", "h100:1x1", tp=1)
    assert none.exit_code == 3
    assert any(" needs " in text for text in none["notices"])
    assert none.rows() == []


def test_what_a_notebook_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for the question and its best rows; HTML is escaped; frames need pandas."""
    Path("a<b>.sh").write_text(SCRIPT)
    found = autopar.check("a<b>.sh", hardware="h100:1x8")
    assert "a&lt;b&gt;.sh" in found._repr_html_()
    assert "<b>.sh" not in found._repr_html_()
    assert repr(found).startswith("autopar-check: ")
    assert len(repr(found)) < 1500
    cards = autopar.ask("cards")
    assert [row["name"] for row in cards.rows()] == [row["name"] for row in cards["cards"]]
    assert "more" in repr(cards)
    copied: dict[str, Any] = cards.to_dict()
    copied["cards"].clear()
    assert cards["cards"]
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(InstallError, match="pip install pandas"):
        cards.to_frame()


@pytest.mark.whole
@pytest.mark.parametrize("engine", ["none", "megatron"])
def test_what_a_notebook_shows_of_a_plan(engine: str) -> None:
    """A result of Python's own functions is a line and a table, not every field of every layer."""
    found = autopar.plan("llama2-7b", "a100-80gb:1x8", global_batch_size=32, engine=engine)
    assert repr(found).startswith("SearchResult(optimal: ")
    assert len(repr(found)) < 300
    assert "samples/s" in repr(found)
    rows = found.rows()
    assert len(rows) == 1 + len(found.alternatives)
    # alternatives differ in more than the embedding, as those of the command
    kinds = [
        (one.num_stages, {(layer.tp, layer.cp) for layer in one.layers})
        for one in (found.plan, *(other.plan for other in found.alternatives))
        if one is not None
    ]
    assert all(kinds.count(kind) == 1 for kind in kinds)
    assert found.prediction is not None
    assert rows[0]["step_time_s"] == found.prediction.step_time_s
    assert found._repr_html_().count("<tr>") == 1 + len(rows)
    seen = found.to_dict()
    own = seen["launch"] if engine == "megatron" else seen
    assert own["samples_per_s"] == found.prediction.samples_per_s
    assert json.loads(json.dumps(seen)) == seen

    none = autopar.plan("llama3-70b", "a100-80gb:1x8", engine=engine, memory_constraint=8)
    assert none.rows() == []
    assert repr(none).startswith("SearchResult(infeasible: ")
    assert none.infeasibility is not None
    assert none.to_dict()["launch" if engine == "megatron" else "plan"] is None


def test_exit_codes_in_the_docs() -> None:
    """docs/reference/exit-codes.md has the table of the code, word for word."""
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \| .*\|$", text, flags=re.MULTILINE)
    assert {int(code): words for code, words in rows} == dict(EXIT_CODES)
