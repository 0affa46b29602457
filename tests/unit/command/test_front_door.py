"""`autopar`: one door to every command, to what is shipped, and to Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import autopar
import search
from autopar.cli import COMPLETION, SUBCOMMANDS
from autopar.command import lists, parser
from autopar.documents.catalog import (
    card_names,
    find_card,
    model_names,
    site_names,
    stack_names,
)
from autopar.rates.card import load_card
from autopar.rates.stack import load_stack
from autopar.records import replace
from tests import warm


def door(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return how `autopar WORDS...` ended, as a process of its own."""
    return warm.command("autopar", *words, env={**os.environ, **environment}).completed()


def new_door(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return the same of a new interpreter."""
    return warm.new_interpreter("from autopar.cli import main; main()", *words, **environment)


def test_help_names_every_command(golden: Callable[[str, str], None]) -> None:
    """One screen of commands by task; those that measure have a screen of their own."""
    done, inner = new_door(), door("profile", "--help")

    assert (done.returncode, inner.returncode) == (0, 0)
    assert done.stdout == door("--help").stdout
    for name, (_, _, text) in SUBCOMMANDS.items():
        out = inner.stdout if " " in name else done.stdout
        assert f"  {name.rpartition(' ')[2]} " in out
        assert text in out
    for out in (done.stdout, inner.stdout):
        assert len(out.splitlines()) <= 24
        assert max(map(len, out.splitlines())) <= 80
    golden("autopar_help.txt", done.stdout)


def test_module_runs_the_command() -> None:
    """`python -m autopar` serves where scripts of the environment are not on the path."""
    words = [sys.executable, "-m", "autopar", "search", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == door("search", "--help").stdout != ""


@pytest.mark.whole
def test_a_command_behind_the_door_is_the_command() -> None:
    """The same code answers, under the same name."""
    words = ("--evaluate", "no-such-plan.json")
    ours = new_door("search", *words)
    own = subprocess.run(
        [sys.executable, "-c", "from autopar.cli import search; search()", *words],
        cwd=warm.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ours.returncode, ours.stdout, ours.stderr) == (2, own.stdout, own.stderr)
    assert ours.stderr.startswith("autopar-search: ")


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if " " in name])
def test_commands_of_two_words(name: str) -> None:
    """`autopar profile X --help` is the help of X."""
    done = door(*name.split(), "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serch",), "autopar: unknown command 'serch'. Did you mean 'search'?\n"),
        (("zzz",), "autopar: unknown command 'zzz'. See autopar --help\n"),
        (
            ("profile",),
            ("autopar profile needs a second word. Use model, hardware, site, show, estimate\n"),
        ),
        (
            ("--show-completion", "tcsh"),
            "autopar --show-completion: expected bash, zsh, fish, got 'tcsh'\n",
        ),
    ],
)
def test_what_the_door_refuses(words: tuple[str, ...], said: str) -> None:
    """One sentence and 2."""
    done = door(*words)

    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_version() -> None:
    """It is the package's."""
    assert door("--version").stdout == f"autopar {autopar.__version__}\n"


@pytest.mark.parametrize("shell", parser.SHELLS)
def test_scripts_of_shells(shell: str) -> None:
    """Each is a script that asks the door."""
    script = door("--show-completion", shell).stdout

    assert COMPLETION in script
    assert f"complete_{shell}" in script


def test_a_script_is_installed(tmp_path: Path) -> None:
    """typer writes it below the home of the user."""
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    done = door("--install-completion", "bash", **named)

    assert done.returncode == 0, done.stderr
    script = (tmp_path / ".bash_completions" / "autopar.sh").read_text("utf-8")
    assert COMPLETION in script


@pytest.mark.whole
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("autopar ex", {"explain", "explore", "export"}),
        ("autopar search --mod", {"--model"}),
        ("autopar search --model llama2-7b", {"llama2-7b"}),
        ("autopar estimate calculon --sys", {"--system"}),
        ("autopar estimate --va", {"--validate"}),
        ("autopar explore calc", {"calculon"}),
        ("autopar explore calculon --num-p", {"--num-procs"}),
        ("autopar explore --hardw", {"--hardware"}),
        ("autopar explore --model llama3-8b --model mixtral", {"mixtral-8x22b", "mixtral-8x7b"}),
        ("autopar explore --stack megatron-c", {"megatron-core"}),
        ("autopar search --site sel", {"selene-a100"}),
        ("autopar profile s", {"show", "site"}),
        ("autopar search --pipeline-type g", {"gpipe"}),
    ],
)
def test_words_that_a_shell_completes(line: str, expected: set[str]) -> None:
    """Commands, options, shipped names and choices, as bash asks for them."""
    done = door(
        **{
            COMPLETION: "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split()) - 1),
        }
    )

    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_words_that_other_shells_complete(shell: str) -> None:
    """They say the line in another variable, and show what a word means."""
    done = door(
        **{
            COMPLETION: f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": "autopar search --mod",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "_TYPER_COMPLETE_WORD_TO_COMPLETE": "--mod",
        }
    )

    assert "--model" in done.stdout, done.stderr
    assert "shipped name" in done.stdout


def test_lists_of_what_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    """Every model, card and site is a row, with figures that are known."""
    sites = {row["name"]: row for row in lists.site_rows()}
    models = {row["name"]: row for row in lists.model_rows()}
    cards = {row["name"]: row for row in lists.card_rows()}

    assert tuple(models) == model_names()
    assert tuple(cards) == card_names()
    assert tuple(sites) == site_names()
    assert {row["card"] for row in sites.values()} <= set(cards)
    assert sites["jean-zay-a100"]["adapter_bytes_per_s"] == 4 * 100e9 / 8 / 8
    assert models["llama2-7b"]["num_parameters"] == 6_738_415_616  # as its authors publish it
    assert cards["h100-80gb"]["bf16_flop_per_s"] == pytest.approx(989.4e12)

    # the first layers of these are dense
    assert models["deepseek-v3"]["num_experts"] == 256
    assert models["deepseek-v3"]["experts_per_token"] == 8

    assert lists.run([], "models") == 0
    table = capsys.readouterr().out
    assert {name for name in models if f"{name} " not in table} == models.keys() - lists._SHOWN
    assert lists.run(["--all"], "models") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in models)
    assert all(len(line) <= 80 for line in table.splitlines())

    assert lists.run(["--json"], "models") == 0
    assert json.loads(capsys.readouterr().out)["models"] == lists.model_rows()
    assert lists.run([], "cards") == 0
    table = capsys.readouterr().out
    assert {name for name in cards if f"{name} " not in table} == lists._OLDER_CARDS
    assert lists.run(["--verbose"], "cards") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in cards)
    assert lists.run([], "sites") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in sites)


@pytest.mark.parametrize("what", ["models", "cards", "sites", "stacks"])
def test_golden_lists(
    what: lists.What, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A list is one screen of 24 lines and 80 columns."""
    assert lists.run([], what) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) <= 24
    assert max(map(len, table.splitlines())) <= 80
    golden(f"list_{what}.txt", table)


def test_a_card_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the other card with the figures that were given, in base units, and where from."""
    words = "--like h100 --between 12.5 --memory 64 --gpus-per-node 4 --source switch.pdf"
    assert lists.run([*words.split(), "--out", "mine.json"], "cards") == 0
    assert "--hardware mine.json:NODESx4" in capsys.readouterr().err

    mine, h100 = load_card("mine.json"), load_card("h100")
    assert mine.name == "mine"
    assert mine.inter_node == replace(h100.inter_node, bytes_per_s=12.5e9)
    assert mine.network is not None
    assert mine.network.adapter_bytes_per_s == 12.5e9
    assert (mine.memory_bytes, mine.max_gpus_per_node) == (64 * 2**30, 4)
    assert (mine.intra_node, mine.flop_per_s) == (h100.intra_node, h100.flop_per_s)
    written = json.loads(Path("mine.json").read_text())
    assert written["inter_node"]["bytes_per_s"]["source"] == "switch.pdf"
    assert "aliases" not in written

    again = ["--like", "h100", "--in-node", "300", "--out", "mine.json", "--json"]
    assert lists.run(again, "cards") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["card"]["intra_node"]["bytes_per_s"] == {"value": 3e11, "basis": "given by hand"}
    assert json.loads(Path("mine.json.bak-1").read_text()) == written
    itself = ["--like", "mine.json", "--in-node", "200", "--out", "mine.json"]
    assert lists.run(itself, "cards") == 2
    assert "mine.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--like h100 --out x.json", "--memory"),
        ("--like h100 --between 5", "--like needs --out FILE"),
        ("--between 5 --out x.json", "--like CARD"),
        ("--like h1000 --between 5 --out x.json", "h1000"),
        ("--like h100 --between 50000000000 --out x.json", "--between: expected"),
        ("--like h100 --memory 1e-6 --out x.json", "'device.memory_bytes.value'"),
    ],
)
def test_a_card_that_is_none_says_why(
    words: str,
    problem: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written."""
    assert lists.run(words.split(), "cards") == 2
    assert problem in capsys.readouterr().err
    assert not list(folder.iterdir())


def test_list_of_stacks(capsys: pytest.CaptureFixture[str]) -> None:
    """Every shipped stack is a row with the figures of its document, whole in the table."""
    rows = {row["name"]: row for row in lists.stack_rows()}

    assert tuple(rows) == stack_names()
    assert rows["megatron-2021"]["attention"] == ["unfused"]
    core = load_stack("megatron-core").figures
    assert rows["megatron-core"]["host_forward_s"] == core.host["forward_s"]
    assert rows["megatron-core"]["tensor_hidden"] == core.overlap["tensor"]

    assert lists.run(["--json"], "stacks") == 0
    assert json.loads(capsys.readouterr().out)["stacks"] == lists.stack_rows()
    assert lists.run([], "stacks") == 0
    table = capsys.readouterr().out
    figures, kernels = (line for line in table.splitlines() if line.startswith("megatron-core "))
    assert f"{core.overlap['tensor'] * 100:.0f} %" in figures
    assert "cudnn" in kernels
    assert all(f"\n{name} " in table for name in rows)
    assert lists.run(["--jsn"], "stacks") == 2
    assert "Did you mean --json" in capsys.readouterr().err


def test_python_offers_what_a_user_needs() -> None:
    """Names of the planner are those of `search`; the list of names is what there is."""
    assert autopar.plan is search.plan
    assert autopar.Planner is search.Planner
    assert set(autopar.__all__) <= set(dir(autopar))
    with pytest.raises(AttributeError, match="no_such"):
        _ = autopar.no_such  # type: ignore[attr-defined]


@pytest.mark.whole
def test_a_card_of_another_gpu_has_its_peak(folder: Path) -> None:
    """Peaks of other element types keep their share of that in 16 bits, and say so."""
    words = ["--like", "h100", "--bf16", "494.7", "--hbm", "2000", "--out", "half.json"]
    assert lists.run(words, "cards") == 0
    own = json.loads(Path("half.json").read_text())
    other = json.loads(find_card("h100").read_text())
    for name in ("bf16", "fp16", "fp8", "fp32", "vector_bf16"):
        key = f"{name}_flop_per_s"
        assert own["device"][key]["value"] == pytest.approx(other["device"][key]["value"] / 2)
        assert "given by hand" in own["device"][key]["basis"]
    slower = autopar.search("llama3-8b", "half.json:1x8", engine="megatron", tp=2, pp=1)
    faster = autopar.search("llama3-8b", "h100:1x8", engine="megatron", tp=2, pp=1)
    rates = [one.rows()[0]["tokens_per_s_per_gpu"] for one in (slower, faster)]
    assert 0.4 < rates[0] / rates[1] < 0.7
    assert slower.rows()[0]["mfu"] > faster.rows()[0]["mfu"]
