"""Screens of `autopar check`: one golden file each, 24 lines of 80 columns by default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from search.commands import check, compare, explain, export
from search.show.check import _row
from tests.unit.check.test_check import LLAMA, MIXTURE, script, with_flags

SCREENS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "check_fits": (with_flags(LLAMA, tensor_model_parallel_size=8, lr=1e-4), ()),
    "check_does_not_fit": (with_flags(LLAMA, pipeline_model_parallel_size=2), ()),
    "check_mixture": (MIXTURE, ()),
    "check_verbose": (with_flags(LLAMA, recompute_activations=True), ("--verbose", "--strict")),
}
"""Arguments and options of a launch by the golden file of its screen."""


@pytest.mark.parametrize("name", SCREENS)
def test_golden_screens(
    name: str,
    folder: Path,
    golden: Callable[[str, str], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The default screen has 24 lines of 80 columns."""
    arguments, options = SCREENS[name]
    script(folder, arguments)
    check.run(["train.sh", "--hardware", "h100:8x8", *options])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert max(map(len, lines)) <= 80
    assert options or len(lines) <= 24
    golden(f"{name}.txt", out)


@pytest.mark.parametrize("interval", ["8 to 9", "978,489 to 1,702,213", "9,978,489 to 11,702,213"])
def test_columns_of_figures_stay_apart(interval: str) -> None:
    """Rates of small models are longer than their column."""
    line = _row("Tokens/s/GPU", "1,395,815", interval, "8.6 % HFU")
    assert line.split(interval)[1].startswith("  ")
    assert line.endswith("  8.6 % HFU")
    assert _row("Tokens/s/GPU", "1,395,815", interval).endswith(interval)


@pytest.mark.parametrize("card", ["h100", "b200"])
def test_a_card_alone_has_the_gpus_of_the_file(
    card: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of GPUs of the launch command counts, as without --hardware."""
    check.run([script(tmp_path, LLAMA), "--hardware", card, "--no-neighbours"])
    alone = capsys.readouterr().out.splitlines()
    check.run([script(tmp_path, LLAMA), "--hardware", f"{card}:8x8", "--no-neighbours"])
    shaped = capsys.readouterr().out.splitlines()
    assert alone[0].endswith(tuple(f"Megatron-LM on 64 {name}" for name in (card, "h100-80gb")))
    assert alone[:12] == shaped[:12]


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (explain.run, ()),
        (compare.run, ("SCRIPT",)),
        (export.run, ("--to", "megatron", "--allow-approx", "--out", "none")),
        (export.run, ("--from", "megatron", "--out", "none")),
    ],
)
def test_other_commands_take_a_card_alone_for_a_launch(
    command: Callable[[Sequence[str]], int],
    more: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They print what they print for the number of GPUs of the launch command."""
    path = script(tmp_path, LLAMA)
    words = [path, *(path if one == "SCRIPT" else one for one in more)]
    assert command([*words, "--hardware", "h100"]) == 0
    alone = capsys.readouterr().out
    assert command([*words, "--hardware", "h100:8x8"]) == 0
    assert alone.replace('"h100"', '"h100:8x8"') == capsys.readouterr().out
