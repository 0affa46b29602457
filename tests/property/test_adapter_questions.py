"""Answers about LoRA and QLoRA: each is exported, read back and checked, as a user would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.random_questions import asked_of, drawn_adapters

pytest.importorskip("_autopar_core", reason="the C++ core is not built: run `make build`")

LARGEST = 24
"""Questions; `python -m benchmarks.random_questions --adapters` asks more."""


def test_answers_about_adapters_are_what_their_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is refused, lost or priced otherwise, and no launch next to an answer is faster."""
    monkeypatch.chdir(tmp_path)
    answered = 0
    for seed in range(LARGEST):
        for kind, what in asked_of(tmp_path, drawn_adapters(seed)):
            answered += kind == "answered"
            assert kind in ("answered", "no answer"), (seed, kind, what)
    assert answered > LARGEST // 4
