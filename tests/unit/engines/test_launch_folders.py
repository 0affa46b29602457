"""Launch files of any folder, read from any working folder, and exports moved elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import autopar
from autopar.errors import DocumentError, OptionError
from search.engines.text.files import read_configuration

ASKED = ("MEGATRON_PATH", "TRAIN_ITERS", "DATA_PATH", "TOKENIZER_MODEL")
FOLDERS = (
    "plain",
    "my dir's",
    'a"b',
    "$HOME",
    "#1 é 日本",
    "-dash",
    "~",
    "*[a]?",
    "$(false)`x`",
    "semi;a&b|c",
    "tab\tand\nline",
    "back\\slash",
)
LAUNCH = 'torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --tp "$TP" --config "$CONF"\n'
SOURCES = (
    'cd "$(dirname "$0")"\nsource ./env.sh\n',
    'SCRIPT_DIR="$( cd "$( dirname "${BASH_SOURCE[0]}" )" && pwd )"\n. "$SCRIPT_DIR/env.sh"\n',
    "HERE=$(dirname $(readlink -f $0))\nsource $HERE/env.sh\n",
    'DIR=${0%/*}\nsource "$DIR/env.sh"\n',
    'pushd "$(dirname "$0")" > /dev/null\nsource env.sh\npopd\n',
    'DIR=$(cd -- "$(dirname -- "$BASH_SOURCE")" &> /dev/null && pwd)\nsource "$DIR"/env.sh\n',
    "set -euo pipefail\nsource env.sh\n",
)


@pytest.mark.parametrize("name", FOLDERS)
def test_sourced_files_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """However the script names its folder, and wherever it is read from."""
    folder, other = tmp_path / name, tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "env.sh").write_text("export TP=2 CONF=c.yaml\n")
    for place, start in enumerate(SOURCES):
        (folder / f"{place}.sh").write_text(start + LAUNCH)
    ways = (
        (folder, Path()),
        (tmp_path, Path(name)),
        (other, Path("..", name)),
        (other, tmp_path / "link"),
        (other, Path("..", name, "..", "link")),
    )
    for at, written in ways:
        monkeypatch.chdir(at)
        for place in range(len(SOURCES)):
            flags = read_configuration(written / f"{place}.sh").flags
            assert flags is not None
            assert (flags["tp"], flags["config"]) == (("2",), ("c.yaml",)), (at, place)


def test_another_file_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file beside the script wins, and a note says so if the other one differs."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "run.sh").write_text("source env.sh\n" + LAUNCH)
    (folder / "env.sh").write_text("TP=2 CONF=c.yaml\n")
    monkeypatch.chdir(tmp_path)
    note = "scripts/env.sh is read, not env.sh of the working folder"
    for text, notes in (("TP=2 CONF=c.yaml\n", ()), ("TP=4 CONF=c.yaml\n", (note,))):
        Path("env.sh").write_text(text)
        read = read_configuration("scripts/run.sh")
        assert read.flags is not None
        assert read.flags["tp"] == ("2",)
        assert tuple(one for one in read.notes if one == note) == notes


def test_a_file_whose_name_begins_with_a_hyphen(folder: Path) -> None:
    """Python takes words as files, never as options; the command shows how to write them."""
    Path("-run.sh").write_text("echo nothing\n")
    for given in ("-run.sh", Path("-run.sh"), "--html=page.html"):
        with pytest.raises(DocumentError):
            autopar.check(given)
    assert not Path("page.html").exists()
    from search.commands.check import COMMAND

    with pytest.raises(OptionError, match=r"Use \./-run\.sh for the file"):
        COMMAND.read(["-run.sh"], print)


@pytest.mark.parametrize("suffix", ["md", "rst", "py"])
def test_documents_that_are_no_scripts(tmp_path: Path, suffix: str) -> None:
    """The kind of the file is named, not a statement of it; a script in it is read all the same."""
    path = tmp_path / f"notes.{suffix}"
    path.write_text("# Title\n\nUse `--tp 8` (see below) for 64 GPUs (8 nodes).\n")
    with pytest.raises(DocumentError, match="not a launch script"):
        read_configuration(path)
    path.write_text("torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4\n")
    assert read_configuration(path).world_size == 8


def test_an_export_runs_from_any_folder(tmp_path: Path) -> None:
    """`launch.sh` finds its files after its folder moved, under any name."""
    written = tmp_path / "out"
    plan = tmp_path / "plan.json"
    autopar.search(
        "gpt2-xl", "h100:1x2", global_batch_size=8, engine="megatron", output_config_path=plan
    )
    autopar.ask("export", plan, to="megatron", out=written)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tools / "torchrun").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    said = []
    for name in FOLDERS:
        folder = tmp_path / "moved" / name
        shutil.copytree(written, folder)
        done = subprocess.run(
            ["bash", str(folder / "launch.sh")],
            env={**os.environ, **dict.fromkeys(ASKED, "/given"), "PATH": path},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.splitlines())
    assert said == said[:1] * len(FOLDERS)
    assert "--num-layers" in said[0]


def test_a_plan_moves_with_its_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a plan names relative to its folder are found from any working folder."""
    from autopar.documents.catalog import find_card

    first = tmp_path / "first dir's"
    first.mkdir()
    shutil.copy(find_card("h100"), first / "mine.json")
    monkeypatch.chdir(first)
    autopar.search("gpt2-xl", "mine.json:1x2", global_batch_size=8, output_config_path="plan.json")
    expected = autopar.explain("plan.json").rows()
    second = tmp_path / "$second #2"
    first.rename(second)
    monkeypatch.chdir("/")
    assert autopar.explain(second / "plan.json").rows() == expected
    assert autopar.compare(second / "plan.json", Path(os.path.relpath(second), "plan.json"))
