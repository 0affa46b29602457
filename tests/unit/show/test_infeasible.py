"""First screen of a search without a plan: defaults, near misses and refusing engines."""

from __future__ import annotations

import re

import pytest

from search.commands import search as search_command

_FULL = ("--model", "qwen3-32b", "--hardware", "h100:1x8", "--sft")


def screen(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a search without a plan prints on one line, and check its length."""
    assert search_command.run([*words, "--output-config-path", "none"]) == 3
    text = capsys.readouterr().out
    assert len(text.strip().splitlines()) <= 24
    return " ".join(text.split())


def test_a_near_miss_has_its_probability(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that mostly fits is offered with the limit that accepts it, and only such a plan."""
    text = screen(capsys, *_FULL)
    (limit,) = re.findall(r"--oom-risk ([0-9.]+)", text)
    assert 0.01 < float(limit) <= 0.1
    assert search_command.run([*_FULL, "--oom-risk", limit, "--output-config-path", "none"]) == 0
    capsys.readouterr()
    assert "--oom-risk" not in screen(
        capsys, "--model", "llama3-70b", "--hardware", "rtx-4090:1x2", "--lora", "16"
    )


def test_defaults_are_those_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A length or batch that was not given may be the reason why nothing fits."""
    text = screen(capsys, *_FULL)
    assert "--global-batch-size 128" in text
    assert "--seq-length 4096" in text
    assert "--seq-length 2048" not in screen(capsys, *_FULL, "--seq-length", "2048")


def test_engines_that_refuse_have_reasons_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the engines with a smallest plan; others have no memory to count."""
    text = screen(capsys, *_FULL)
    assert "memory not counted" not in text
    table = text[: text.index("Configurations that fit")]
    assert table.count("torchtitan") == 2  # both in its reason
    assert table.count("deepspeed") == 2  # its row, and the remedy of torchtitan
