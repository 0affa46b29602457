"""`--gap` from the command line to the answer, in text and JSON."""

from __future__ import annotations

import json

import pytest

from search.commands import search as search_command


def test_a_gap_is_proven_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is within the proven gap, which is at most the accepted one; percent are shares."""
    asked = ["--model", "mixtral-8x7b", "--hardware", "h100:8x8", "--engine", "megatron"]
    asked += ["--seq-length", "4096", "--global-batch-size", "512", "--top", "0", "--within", "0"]
    asked += ["--output-config-path", "none"]
    found = {}
    for gap in ("0", "5%", "0.05"):
        assert search_command.run([*asked, "--gap", gap, "--json", "-"]) == 0
        found[gap] = json.loads(capsys.readouterr().out)
    exact, near = found["0"], found["5%"]
    assert found["0.05"]["launch"] == near["launch"]
    assert (exact["status"], near["status"]) == ("optimal", "within_gap")
    best_s, near_s = (one["launch"]["predicted"]["step_time_s"] for one in (exact, near))
    gap = near["engines"][0]["search"]["gap"]
    assert near["engines"][0]["search"]["complete"]
    assert exact["engines"][0]["search"]["gap"] == 0.0
    assert 0.0 < gap <= 0.05
    assert best_s <= near_s <= best_s * (1 + gap)
    assert search_command.run([*asked, "--gap", "5%"]) == 0
    assert f"proven (gap {gap * 100:.3g} %)" in " ".join(capsys.readouterr().out.split())


def test_the_gap_holds_for_all_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest plan of one engine may be proven while that of another is not found."""
    asked = ["--model", "qwen3-4b", "--hardware", "h100:1x8", "--output-config-path", "none"]
    asked += ["--top", "0", "--within", "0"]
    rates = {}
    for gap in ("0", "30%"):
        assert search_command.run([*asked, "--gap", gap]) == 0
        text = " ".join(capsys.readouterr().out.split())
        rates[gap] = float(text.split(" samples/s")[0].rpartition(" ")[2])
    proven = float(text.split("proven (gap ")[1].split(" %")[0]) / 100.0
    assert rates["30%"] <= rates["0"] <= rates["30%"] * (1.0 + proven) * (1.0 + 1e-3)
