"""Tools of the server under hostile calls: nothing is written elsewhere, and nothing is ignored."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.command.serve import TOOLS
from autopar.command.tools.answers import LIMIT, answer_text
from autopar.command.tools.arguments import RefusedError
from autopar.command.tools.workers import Outcome, outcome_of

SCRIPT = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 1024"
    " --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
    " --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 32000\n"
)
SECRET = "hunter2hunter2"
MODEL = {"model": "llama2-7b", "hardware": "a100-80gb:1x8"}
SEARCH = {**MODEL, "engine": "megatron", "tp": 2, "global_batch_size": 32}
CHECK = {"files": ["train.sh"], "hardware": "h100:1x8", "options": {"neighbours": False}}
PLAN = {"format": "autopar-launch", "version": 1, "launch": None}
Call = tuple[str, dict[str, Any], str]
"""Tool, arguments, and what refuses them: the id of a rule, the kind of an error, or `answer`."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a server, with links out of it, next to folders that must not change."""
    work, outside, temporary = (tmp_path / name for name in ("work", "outside", "temporary"))
    for one in (work, outside, temporary, work / "inside"):
        one.mkdir()
    (work / "train.sh").write_text(SCRIPT)
    (work / "lr=1.sh").write_text(SCRIPT)
    (outside / "page.html").write_text("theirs")
    (outside / "secret").write_text(f"password = '{SECRET}'\n")
    (outside / "secret.json").write_text(json.dumps({"model_type": SECRET, "tp": SECRET}))
    (outside / "bare.json").write_text(SECRET)
    (outside / "secret.yaml").write_text(f"a: [{SECRET}\n  b: : '{SECRET}'\n")
    (outside / "train.sh").write_text(SCRIPT)
    (work / "link").symlink_to(outside)
    (work / "page.html").symlink_to(outside / "page.html")
    (work / "dangling.json").symlink_to(outside / "new.json")
    os.mkfifo(work / "pipe")
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield work
    assert list(temporary.iterdir()) == []


def state(folder: Path) -> dict[str, str]:
    """Return path -> content of everything below a folder; links are not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = "link" if path.is_symlink() else "file" if path.is_file() else "other"
        found[str(path.relative_to(folder))] = path.read_text() if kind == "file" else kind
    return found


def ask(place: Path, tool: str, given: dict[str, Any]) -> Outcome:
    return outcome_of(TOOLS[tool], given, place)


ELSEWHERE = (
    *("../outside/new", "link/new", "inside/../../outside/new", "~/new", "{outside}/new"),
    *("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null", "pipe", "page.html"),
    *("dangling.json", "..", "{outside}"),
)
"""Paths that are not below the folder, or that are links or pipes in it."""
NAMES = ("html", "trace", "output_config_path", "write_skeleton", "plot", "output_dir", "OUT")
"""Options of `search` that write, with other spellings."""


def writing_calls(outside: Path) -> Iterator[Call]:
    """Yield calls that would write elsewhere."""
    for place, path in enumerate(ELSEWHERE):
        path = path.format(outside=outside)
        for name in (NAMES[place % len(NAMES)], NAMES[(place + 3) % len(NAMES)]):
            yield "search", {**SEARCH, "options": {name: path}}, "outside-folder"
        yield "check", {**CHECK, "html": path}, "outside-folder"
        yield "explain", {"plan": PLAN, "trace": path}, "outside-folder"
    page = f"{outside}/new.html"
    for word in (
        f"--html={page}",
        f"html={page}",
        f"--html {page}",
        f"-o={page}",
        "--",
        "-",
        "none",
    ):
        yield "check", {**CHECK, "files": [word]}, "document"
        yield "explain", {"plan": word, "options": {"hardware": "h100:1x8"}}, "document"
    yield "compare", {"first": f"--json={page}", "second": f"json={page}"}, "document"
    yield "search", {**SEARCH, "model": f"--html={page}"}, "input"
    yield "search", {**SEARCH, "tp": f"2 --html={page}"}, "option"
    yield "search", {**SEARCH, "options": {f"tp=2 --html={page}": 1}}, "unknown-argument"
    yield "search", {**SEARCH, "options": {"--html": page}}, "unknown-argument"
    yield "search", {**SEARCH, "json": page}, "unknown-argument"
    yield "search", {**SEARCH, "options": {"json": page}}, "unknown-argument"
    yield "check", {**CHECK, "args": f"--html={page}"}, "answer"
    request = {"model": "llama2-7b", "hardware": "a100-80gb:1x8", "html": page}
    yield (
        "explain",
        {"plan": {"plan": {"pp_deg": 1}, "status": "x", "request": request}},
        "document",
    )
    yield "explain", {"plan": json.dumps({**PLAN, "request": {"trace": page}})}, "document"


def ignored_calls() -> Iterator[Call]:
    """Yield calls with arguments that a server might ignore or misread."""
    for name in (
        "global_batch_siz",
        "globalbatchsize",
        "hardwear",
        "tensor",
        "files",
        "x" * 999,
        "",
    ):
        yield "search", {**SEARCH, name: 8}, "unknown-argument"
    yield "check", {**CHECK, "detial": "full"}, "unknown-argument"
    yield "list_models", {"model": "llama2-7b"}, "unknown-argument"
    yield "list_cards", {"options": {}}, "unknown-argument"
    for name in (
        "lr",
        "help",
        "verbose",
        "wandb_project",
        "micro_batch",
        "set_model_config_manually",
    ):
        yield "search", {**SEARCH, "options": {name: 1}}, "unknown-argument"
    for name in ("model", "tp", "options", "engine", "memory_constraint", "detail"):
        yield "search", {**SEARCH, name: None}, "null-value"
    yield "check", {"files": [None]}, "null-value"
    yield "explain", {"plan": None}, "null-value"
    for name in ("tp", "seq_length", "global_batch_size", "micro_batch_size", "memory_constraint"):
        for value in (
            -1,
            0,
            -(10**30),
            math.nan,
            math.inf,
            True,
            {},
            [],
            "",
            "-1",
            [2, -1],
            [None],
        ):
            yield "search", {**SEARCH, name: value}, "refused"
    yield "search", {**SEARCH, "global_batch_size": 10**5000}, "unusable-value"
    yield "search", {**SEARCH, "tp": 2.0}, "unusable-value"
    yield "search", {**SEARCH, "tp": "2.5"}, "unusable-value"
    yield "search", {**SEARCH, "model": 7}, "unusable-value"
    yield "search", {**SEARCH, "model": ["llama2-7b", "llama3-8b"]}, "unusable-value"
    yield "search", {**SEARCH, "model": "llama2-7b\0"}, "unusable-value"
    yield "search", {**SEARCH, "model": "a" * 30_000}, "unusable-value"
    yield "search", {**SEARCH, "options": {"disable_dp": 2}}, "unusable-value"
    yield "search", {**SEARCH, "options": {"compile": 0.5}}, "unusable-value"
    yield "search", {**SEARCH, "options": {"bf16": False}}, "unusable-value"
    yield "search", {**SEARCH, "options": "tp=2"}, "unusable-value"
    yield "search", {**SEARCH, "options": {"tp": 4}}, "given-twice"
    yield "search", {**SEARCH, "options": {"tensor_parallel_size": 2}}, "given-twice"
    yield "search", {**SEARCH, "global_batch": 64}, "given-twice"
    yield "search", {"model": "llama2-7b"}, "missing-argument"
    yield "check", {}, "missing-argument"
    yield "check", {"files": []}, "unusable-value"
    yield "check", {**CHECK, "detail": ["no_such_key"]}, "unknown-detail"
    yield "check", {**CHECK, "detail": [7]}, "unusable-value"
    yield "explain", {"plan": {}}, "unusable-value"
    yield "explain", {"plan": [1]}, "unusable-value"
    yield "explain", {"plan": {"a": 10**5000}}, "unusable-value"
    deep: dict[str, Any] = {}
    for _ in range(20_000):
        deep = {"a": deep}
    yield "explain", {"plan": {**PLAN, "launch": deep}}, "unusable-value"


def reading_calls(outside: Path) -> Iterator[Call]:
    """Yield calls that would quote a file outside the folder, or never end."""
    for name in ("secret", "secret.json", "secret.yaml", "bare.json"):
        path = f"{outside}/{name}"
        yield "check", {**CHECK, "files": [path]}, "document"
        yield "search", {**SEARCH, "model": path}, "document"
        yield "search", {**SEARCH, "hardware": f"{path}:1x8"}, "document"
        yield "search", {**SEARCH, "site": path}, "document"
        yield "explain", {"plan": path}, "document"
        request = {"model": path, "hardware": "a100-80gb:1x8"}
        yield "explain", {"plan": {**PLAN, "request": request}}, "document"
        yield "check", {**CHECK, "files": ["train.sh", path]}, "answer"
    for path in ("pipe", "/dev/zero"):
        yield "check", {**CHECK, "files": [path]}, "document"
        yield "compare", {"first": path, "second": path}, "refused"


def test_hostile_calls_write_nothing_elsewhere_and_ignore_nothing(place: Path) -> None:
    """Over 100 calls: refused with the expected id, short, quick, without a trace on the disk."""
    outside = place.parent / "outside"
    before = state(place.parent)
    calls = [*writing_calls(outside), *ignored_calls(), *reading_calls(outside)]
    assert len(calls) > 180
    for tool, given, expected in calls:
        began = time.process_time()
        found = ask(place, tool, given)
        case = (tool, {k: v for k, v in given.items() if v != SEARCH.get(k) and v != 10**5000})
        assert time.process_time() - began < 5, case
        assert len(found.text) <= LIMIT, case
        assert SECRET not in found.text, case
        assert state(place.parent) == before, case
        if expected == "answer":
            assert found.error is None, (case, found.text)
            continue
        assert found.error is not None, (case, found.text[:300])
        error = found.error["error"]
        assert error["kind"] != "internal", (case, found.text)
        if expected != "refused":
            assert expected in (error.get("id"), error["kind"]), (case, error)


def test_the_right_name_is_told(place: Path) -> None:
    """Names and values are those of the call, not those of a command line."""
    for given, words in (
        ({"global_batch_siz": 8}, "Did you mean global_batch_size?"),
        ({"options": {"seq_lenght": 8}}, "Did you mean seq_length"),
        ({"memory_gib": -5}, "memory_gib: expected a number of GiB above 0 and up to 4096, got -5"),
        ({"engine": "megatrn"}, "megatron"),
        ({"batch_size": 8}, "global_batch_size"),
    ):
        found = ask(place, "search", {**MODEL, **given})
        assert found.error is not None
        assert words in found.text
        assert "--" not in found.text


def test_files_below_the_folder_are_written(place: Path) -> None:
    """Pages, traces and plans, also in new folders and by links that stay inside."""
    (place / "here").symlink_to(place / "inside")
    before = state(place.parent / "outside")
    found = ask(place, "check", {**CHECK, "html": "here/a.html", "trace": str(place / "b.json")})
    assert found.error is None
    found = ask(place, "search", {**SEARCH, "write_to": "new/plans"})
    assert found.error is None
    assert (place / "inside" / "a.html").is_file()
    assert (place / "b.json").is_file()
    assert len(list((place / "new" / "plans").iterdir())) == 1
    assert state(place.parent / "outside") == before


def test_every_argument_has_an_effect(place: Path) -> None:
    """Accepted arguments are in the question of the answer, under the names of options."""
    given = {
        **MODEL,
        "engine": "megatron",
        "global_batch": "32",
        "seq_length": 1024,
        "memory_gib": 60,
        "options": {"tensor_parallel_size": [2, 4], "no_compile": True, "bf16": True},
        "recompute": "none",
    }
    found = ask(place, "search", given)
    assert found.error is None, found.text
    question = json.loads(found.text)["question"]
    assert question == {
        "model": "llama2-7b",
        "hardware": "a100-80gb:1x8",
        "engine": "megatron",
        "global-batch-size": "32",
        "seq-length": "1024",
        "memory-constraint": "60",
        "tp": "2,4",
        "compile": False,
        "mixed-precision": "bf16",
        "recompute": "none",
    }
    # A file may be called like an option.
    found = ask(place, "check", {**CHECK, "files": "lr=1.sh"})
    assert json.loads(found.text)["launches"][0]["file"] == "lr=1.sh"


def test_a_shortened_answer_is_a_plan(place: Path) -> None:
    """At most 8 kB, the rest by `detail`, and the same explanation as of the whole answer."""
    text = ask(place, "search", SEARCH).text
    short, full = (
        json.loads(text),
        json.loads(ask(place, "search", {**SEARCH, "detail": "full"}).text),
    )
    assert len(text) <= LIMIT < len(json.dumps(full))
    assert short["launch"] == full["launch"]
    assert short["notices"][:-1] == full["notices"]
    assert short["notices"][-1].startswith("omitted: ")
    assert "'full'" in short["notices"][-1]
    explained = [
        json.loads(ask(place, "explain", {"plan": one, "detail": "full"}).text)
        for one in (short, full, text)
    ]
    assert explained[0]["question"] == {"plan": "plan"}
    assert explained[0]["launch"] == explained[1]["launch"] == explained[2]["launch"]
    compared = ask(place, "compare", {"first": short, "second": full})
    assert json.loads(compared.text)["degrees"] == []


def test_parts_of_an_answer_by_name() -> None:
    """The limit holds for every part that is not asked for, whichever is long."""
    stages = [{"stage": n, "terms_bytes": {"a": n, "b": n}} for n in range(200)]
    document: dict[str, Any] = {
        "schema": "autopar/answer/1",
        "command": "x",
        "release": "0",
        "exit_code": 0,
        "question": {"args": "a" * 9000},
        "notices": ["first", "second"],
        "launch": {"degrees": {"tp": 8}, "predicted": {"step_time_s": 1.0, "stages": stages}},
        "engines": [{"engine": str(n), "launches": stages} for n in range(5)],
        "note": "b" * 20_000,
    }
    short = json.loads(answer_text(document))
    assert len(answer_text(document)) <= LIMIT
    assert short["launch"]["degrees"] == {"tp": 8}
    assert short["launch"]["predicted"]["step_time_s"] == 1.0
    assert short["notices"][:2] == ["first", "second"]
    asked = json.loads(answer_text(document, ["stages"]))
    assert asked["launch"]["predicted"]["stages"] == stages
    assert "note" not in asked
    assert json.loads(answer_text(document, ["full"])) == document
    with pytest.raises(RefusedError) as told:
        answer_text(document, ["stagess"])
    assert told.value.id == "unknown-detail"
    assert "'stages'" in str(told.value)
    small = {**document, "question": {}, "launch": {}, "engines": [], "note": ""}
    assert json.loads(answer_text(small)) == small


@pytest.mark.parametrize(("tool", "entries"), [("list_models", "models"), ("list_cards", "cards")])
def test_a_list_names_all_its_entries(place: Path, tool: str, entries: str) -> None:
    """Columns are omitted, and no name; each omitted column can be asked for."""
    text = ask(place, tool, {}).text
    short, full = json.loads(text), json.loads(ask(place, tool, {"detail": "full"}).text)
    assert len(text) <= LIMIT
    assert [one["name"] for one in short[entries]] == [one["name"] for one in full[entries]]
    gone = full[entries][0].keys() - short[entries][0].keys()
    assert all(name in short["notices"][-1] for name in gone)
    if gone:
        name = min(gone)
        again = json.loads(ask(place, tool, {"detail": [name]}).text)
        assert [one[name] for one in again[entries]] == [one[name] for one in full[entries]]
