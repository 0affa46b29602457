"""Answers about LoRA and QLoRA: each is exported, read back and checked, as a user would do."""

from __future__ import annotations

from pathlib import Path

from benchmarks.random_questions import asked_of, drawn_adapters

LARGEST = 24
"""Questions; `python -m benchmarks.random_questions --adapters` asks more."""


def test_answers_about_adapters_are_what_their_files_say(folder: Path) -> None:
    """Nothing is refused, lost or priced otherwise, and no launch next to an answer is faster."""
    answered = 0
    for seed in range(LARGEST):
        for kind, what in asked_of(folder, drawn_adapters(seed)):
            answered += kind == "answered"
            assert kind in ("answered", "no answer", "given to another program"), (seed, kind, what)
    assert answered > LARGEST // 4
