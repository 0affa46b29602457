"""Trainers of `autopar check`: whose a file is, and that what a trainer gives is what is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError, InputError
from autopar.run.run import Run
from search.commands import check
from search.engines import table
from search.engines.changes import MOVES, Changes, changes_of
from search.engines.engine import Engine
from search.engines.megatron import check as megatron
from search.engines.megatron.read import read_run
from search.engines.reader import CheckedFile, CheckOptions
from search.engines.table import ENGINES, engine_of, read_checked
from search.engines.text import Configuration, read_configuration

ARGUMENTS: dict[str, Any] = {
    "--num-layers": 32,
    "--hidden-size": 4096,
    "--ffn-hidden-size": 14336,
    "--num-attention-heads": 32,
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--position-embedding-type": "rope",
    "--swiglu": True,
    "--vocab-size": 128256,
    "--micro-batch-size": 1,
    "--global-batch-size": 128,
    "--tensor-model-parallel-size": 4,
    "--sequence-parallel": True,
    "--bf16": True,
    "--use-distributed-optimizer": True,
}
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return what runs the command."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = check.run(arguments)
        return code, *capsys.readouterr()

    return run


def _read_plain(source: Configuration, asked: CheckOptions) -> CheckedFile:
    """Return a launch of another trainer, which calls a tensor degree `tp` and changes it alone."""
    arguments = {**ARGUMENTS, "--tensor-model-parallel-size": source.document["plain"]["tp"]}
    run = read_run(arguments, world_size=asked.world_size, gpu=asked.gpu).run

    def written(other: Run) -> Changes | None:
        changed = {flag for flag, _, _ in changes_of(None, run, other)}
        if changed - {"tensor-model-parallel-size", "sequence-parallel"}:
            return None
        return (("tp", str(run.split.tp), str(other.split.tp)),)

    return CheckedFile(
        path=str(source.path),
        trainer="plain",
        stack="megatron-2021",
        world_size=asked.world_size or 8,
        run=run,
        findings=(),
        moves=frozenset({"tensor"}),
        written=written,
        spelled=lambda key, value: f"[plain] {key}" + (f" = {value}" if value else ""),
    )


READERS = [engine for engine in ENGINES if engine.owns is not None]
PLAIN = Engine(
    name="plain",
    title="plain",
    forms="TOML",
    owns=lambda source: "plain" in source.document,
    read=_read_plain,
)


def test_another_trainer_is_shown_in_its_own_words(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name, its software, only what it can change, and that as it spells it."""
    monkeypatch.setattr(table, "ENGINES", (*ENGINES, PLAIN))
    path = tmp_path / "job.toml"
    path.write_text("[plain]\ntp = 8\n", encoding="utf-8")
    code, out, err = ask(str(path), "--hardware", "h100:4x8", "--verbose")

    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: plain on 32 h100-80gb")
    assert "megatron-2021" in out
    assert "  - [plain] tp = 8\n  + [plain] tp = " in out
    assert "micro-batch-size 2" not in out
    code, out, _ = ask(str(path), "--hardware", "h100:4x8", "--stack", "megatron-core",
                       "--json", "-")  # fmt: skip
    (launch,) = json.loads(out)["launches"]
    assert (code, launch["trainer"], launch["stack"]) == (0, "plain", "megatron-core")
    (changed,) = launch["neighbours"]["any"]["arguments"]
    assert (changed["flag"], changed["before"]) == ("[plain] tp", "8")


def test_a_wrong_stack_is_said_before_files_are_read(ask: Ask, tmp_path: Path) -> None:
    """With the names that there are."""
    code, out, err = ask(str(tmp_path / "none.sh"), "--stack", "megatron")
    assert (code, out) == (2, "")
    assert "megatron-core" in err
    assert "none.sh" not in err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", '[x]\ny = "z"\n', "is not a launch script"),
        ("a.toml", "[x\n", "is not TOML"),
        ("a.json", "{}", "is not a launch script"),
        ("a.yaml", "model: {}\n", "is not a launch script"),
        ("a.sh", "python x.py --epochs 3\n", "is not a launch script"),
        ("a.sh", "echo hello\n", ".py"),
    ],
)
def test_a_file_of_nobody_names_who_is_read(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    """In one sentence, with every trainer and its files, unless these are plain YAML."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError, match=said) as error:
        read_checked(str(path), world_size=8, gpu="h100-80gb")
    if said == "is not a launch script":
        for engine in READERS:
            assert engine.title in str(error.value)
            assert engine.forms in str(error.value) or engine.forms in ("YAML", "script")
    assert len(str(error.value)) - len(str(path)) < 270


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("a.json", json.dumps(ARGUMENTS), "Megatron-LM"),
        ("a.yaml", "MODEL_ARGS:\n  --num-layers: 2\n  --seq-length: 8\n", "Megatron-LM"),
        ("a.sh", "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8\n", "Megatron-LM"),
    ],
)
def test_whose_a_file_is(name: str, text: str, trainer: str, tmp_path: Path) -> None:
    """One trainer alone takes it, and all of them look at any file without an error."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    source = read_configuration(path)
    assert engine_of(source).title == trainer
    assert {type(one.owns(source)) for one in READERS if one.owns} == {bool}


def test_moves_are_those_of_neighbours(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that can change nothing has no launches next to it."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(ARGUMENTS), encoding="utf-8")
    assert ask(str(path), "--hardware", "h100:4x8")[0] == 0
    file = read_checked(str(path), world_size=32, gpu="h100-80gb")
    assert file.moves == MOVES

    still = Engine(
        name="still",
        title="still",
        forms="JSON",
        owns=lambda _: True,
        read=lambda source, asked: _still(source, asked),
    )
    monkeypatch.setattr(table, "ENGINES", (still,))
    _, out, _ = ask(str(path), "--hardware", "h100:4x8", "--json", "-")
    (launch,) = json.loads(out)["launches"]
    assert launch["neighbours_tried"] == 0


def _still(source: Configuration, asked: CheckOptions) -> CheckedFile:
    from autopar.records import replace

    return replace(megatron.read(source, asked), moves=frozenset())


def test_words_of_a_command_are_kept_as_they_stand(tmp_path: Path) -> None:
    """Short flags and dotted keys make a launch as well, and what runs is named."""
    path = tmp_path / "x.sh"
    path.write_text(
        "TP=4\npython scripts/run.py -tp $TP -vp $VP model.cp=$CP train.steps=10 ++a.b.c=1\n"
        "python notify.py done\n",
        encoding="utf-8",
    )
    source = read_configuration(path)
    assert source.command is not None
    assert source.command.program == "scripts/run.py"
    assert source.command.arguments == (
        "-tp", "4", "-vp", "$VP", "model.cp=$CP", "train.steps=10", "++a.b.c=1",
    )  # fmt: skip
    assert source.notes == ("known only at run time, counted as one word each: $VP, $CP",)


@pytest.mark.parametrize("named", [table.engine_named, table.engine_space])
def test_an_unknown_engine_of_a_file_is_bad_input(named: Callable[[str], object]) -> None:
    """Plan files name engines, and may be edited."""
    with pytest.raises(InputError, match=r"engine: expected .*, got 'megatorn'"):
        named("megatorn")
