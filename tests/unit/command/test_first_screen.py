"""What an answer says first: 24 lines of 80 columns with all that somebody spends by."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from autopar.command.show import wrapped
from autopar.units import format_figure
from search.commands import explain, search as search_command
from search.show.summary import SCREEN_HEIGHT, SCREEN_WIDTH, shortened

Capture = pytest.CaptureFixture[str]
_DENSE = ("--model", "llama3-8b", "--hardware", "h100:1x8", "--settle-bsz", "64")
_SMALL = (*_DENSE, "--num-layers", "4")
_MIXTURE = ("--model", "mixtral-8x7b", "--hardware", "h200:1x8", "--num-layers", "4")
_LAYERED = ("--model", "llama2-7b", "--hardware", "a100-40gb:1x8", "--settle-bsz", "64")


pytestmark = pytest.mark.usefixtures("folder")


@pytest.mark.whole
@pytest.mark.parametrize(
    "words",
    [
        _SMALL,
        (*_SMALL, "--price", "2.5", "--engine", "megatron"),
        (*_DENSE, "--engine", "torchtitan", "--recompute", "full"),
        _MIXTURE,
        (*_MIXTURE, "--engine", "megatron", "--precision", "any"),
        (*_LAYERED, "--engine", "galvatron"),
        (*_LAYERED, "--engine", "none", "--price", "1"),
        ("--model", "llama2-7b", "--hardware", "a100:1x8"),
        (),
    ],
    ids=" ".join,
)
def test_it_fits_and_holds_what_a_spender_needs(words: tuple[str, ...], capsys: Capture) -> None:
    """Question, plan, time with its interval, rates, shares, memory, odds, sureness, and next."""
    assert search_command.run([*words, "--json", "found.json"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) <= SCREEN_HEIGHT, shown
    assert max(map(len, lines)) <= SCREEN_WIDTH, shown
    said = " ".join(shown.split())
    for pattern in (
        r"global batch \d+",
        r"micro-batch \d",
        r"estimate 90 % interval",
        r"Step time [0-9.,]+ m?s [0-9.,]+ to [0-9.,]+ [0-9.,]+ samples/s",
        r"Tokens/s/GPU [0-9,]+ [0-9,]+ to [0-9,]+ [0-9.,]+ GPU-h/1e9 tok \([0-9.,]+-[0-9.,]+\)",
        r"TFLOP/s/GPU [0-9.,]+ [0-9.,]+ to [0-9.,]+ [0-9.]+ % MFU \([0-9.]+-[0-9.]+\) of \w+",
        r"Peak allocated [0-9.]+ GiB ([0-9.]+ to )?[0-9.]+ reserved, of [0-9.]+ GiB",
        r"OOM probability (< )?[0-9.]+ %",
        r"Basis .*interval from ",
        r"Optimality best of [0-9,]+ (plans|combinations)",
        r"Next autopar export PLAN",
    ):
        assert re.search(pattern, said), f"{pattern} in\n{shown}"
    assert ("$" in said) == ("--price" in words)
    assert ("HFU" in said) == ("full" in words)


@pytest.mark.whole
def test_figures_are_those_of_the_document(capsys: Capture) -> None:
    """Of a launch, in the object of `--json`, its file, and what explain and evaluate show."""
    words = (*_SMALL, "--engine", "megatron", "--price", "2.5")
    assert search_command.run([*words, "--json", "found.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    (path,) = Path("configs").glob("autopar_plan_*.json")
    found = json.loads(Path("found.json").read_text())["launch"]["predicted"]
    entry = found["throughput"]
    assert f"Tokens/s/GPU {entry['tokens_per_s_per_gpu']:,.0f} " in said
    assert f"TFLOP/s/GPU {entry['flop_per_s_per_gpu'] / 1e12:,.4g} " in said
    assert f"{entry['mfu'] * 100:.1f} % MFU (" in said
    assert f"${entry['cost_per_billion_tokens']:,.4g} " in said
    assert entry["cost_per_billion_tokens"] == 2.5 * entry["gpu_hours_per_billion_tokens"]
    low, high = found["step_time_interval_s"]
    assert entry["tokens_per_s_per_gpu_interval"] == pytest.approx(
        [entry["tokens_per_s_per_gpu"] * found["step_time_s"] / end for end in (high, low)]
    )
    assert (found["tokens_per_s_per_gpu"], found["mfu"]) == (
        entry["tokens_per_s_per_gpu"],
        entry["mfu"],
    )

    rows = said[said.index("Step time ") : said.index(" Other degrees")]
    for run, asked in (
        (search_command.run, ["--evaluate", str(path), "--price", "2.5"]),
        (explain.run, [str(path), "--price", "2.5"]),
    ):
        assert run(asked) == 0
        assert rows in " ".join(capsys.readouterr().out.split())


@pytest.mark.whole
def test_plans_say_the_gain_over_the_best_uniform_one(capsys: Capture) -> None:
    """It is that of a search with one strategy for all layers, and the gain is over it."""
    words = [*_LAYERED, "--engine", "galvatron", "--output-config-path", "plan.json"]
    assert search_command.run([*words, "--json", "found.json"]) == 0
    shown = capsys.readouterr().out
    found = json.loads(Path("found.json").read_text())
    alone = [*words[:-1], "none", "--fine_grained_mode", "0", "--json", "one.json"]
    assert search_command.run(alone) == 0
    uniform = capsys.readouterr().out
    one = json.loads(Path("one.json").read_text())
    gain = found["samples_per_s"] / one["samples_per_s"] - 1.0
    assert gain > 0.01
    heading = f"Fastest uniform plan (per-layer plan: {gain * 100:+.1f} %): "
    # long plans take two lines
    plan = re.search(rf"{re.escape(heading)}(.*?) estimate ", " ".join(shown.split()))
    assert plan is not None
    assert f"Fastest plan: {plan[1]} estimate " in " ".join(uniform.split())
    assert found["throughput"]["tokens_per_s_per_gpu"] == pytest.approx(
        found["samples_per_s"] * 4096 / 8
    )

    # the same figures where the file is priced, whoever prices it
    assert search_command.run(["--evaluate", "autopar_plan_plan.json", "--json", "again.json"]) == 0
    again = json.loads(Path("again.json").read_text())
    assert again["throughput"] == found["throughput"]
    written = json.loads(Path("autopar_plan_plan.json").read_text())
    assert written["throughput"] == found["throughput"]


@pytest.mark.whole
def test_all_of_it_is_no_wider_and_has_the_rest(capsys: Capture) -> None:
    """`--verbose` adds terms, stages, alternatives and options that were not searched."""
    for words in (_SMALL, (*_LAYERED, "--engine", "galvatron")):
        assert search_command.run([*words, "--output-config-path", "none"]) == 0
        short = capsys.readouterr().out
        assert search_command.run([*words, "--output-config-path", "none", "--verbose"]) == 0
        shown = capsys.readouterr().out
        # paths are left as long as they are
        assert max(len(line) for line in shown.splitlines() if "/" not in line) <= SCREEN_WIDTH
        assert len(shown.splitlines()) > 1.5 * len(short.splitlines())
        assert shown.splitlines()[:5] == short.splitlines()[:5]
        assert "Memory per GPU" in shown


@pytest.mark.parametrize(
    ("words", "width", "short"),
    [
        ("tp2 dp4, ZeRO-1", 15, "tp2 dp4, ZeRO-1"),
        ("tp2 dp4, ZeRO-1", 14, "tp2 dp4 .."),
        ("pp8, per layer: 76 x cp8", 20, "pp8, per layer .."),
    ],
)
def test_plans_are_cut_between_words(words: str, width: int, short: str) -> None:
    """What is left out is marked, and the cut fits."""
    assert shortened(words, width) == short
    assert len(short) <= width


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1399.8, 3, "1,400"),
        (12345.0, 4, "12,340"),
        (9999.9, 4, "10,000"),
        (580.24, 4, "580.2"),
        (0.0123456, 4, "0.01235"),
        (128.8432, 5, "128.84"),
    ],
)
def test_figures_have_no_exponent(value: float, digits: int, text: str) -> None:
    """Dollars and TFLOP/s of large jobs are read by people."""
    assert format_figure(value, digits) == text


def test_shares_stand_on_one_line() -> None:
    """No line begins with a percent sign, nor with a number whose sign is on the one before."""
    found = wrapped("memory 88.76 of 79.65 GiB; out of memory > 99.9 %", 47)
    assert found == ["memory 88.76 of 79.65 GiB; out of memory", "> 99.9 %"]


@pytest.mark.parametrize("name", ["check", "compare", "explain", "explore", "export", "search"])
def test_help_of_an_option_is_not_cut(name: str, capsys: Capture) -> None:
    """A row that would not fit is on the screen of its group."""
    module = import_module(f"search.commands.{name}")
    assert module.run(["--help"]) == 0
    options, _, _ = capsys.readouterr().out.partition("--help GROUP")

    assert options.count("\n  --") > 5
    assert not [line for line in options.splitlines() if line.endswith("...")]
