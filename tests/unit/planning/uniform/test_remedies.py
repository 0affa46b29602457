"""Ways out where no launch fits: they fit, they are the same on every machine, cheapest first."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.records import replace
from search.commands import search as search_command
from search.planning.choose import route_of
from search.planning.uniform import best_first
from search.planning.uniform.answer import UniformRequest, answer, open_launches, target_of
from search.planning.uniform.best_first import VariantResult
from search.questions.suggestions import Suggestion, remedies
from search.request.request import build_request

pytestmark = pytest.mark.whole

SMALL = {"model": "llama2-7b", "hardware": "rtx-4090:1x4", "seq-length": "4096"}


@pytest.fixture(scope="module")
def question() -> UniformRequest:
    """Return one that has no answer: 7B in full on four GPUs of 24 GB."""
    asked = route_of(build_request(SMALL)).launches
    assert asked is not None
    return replace(asked, top=0)


def test_every_way_out_fits_and_is_what_the_changed_question_has(question: UniformRequest) -> None:
    """The first ones leave the training most as it is, and the rate is that of its own search."""
    found = remedies(question)
    assert [one.words for one in found] == [
        "--offload-optimizer 1",
        "--lora 32",
        "--lora 32 --lora-base nf4",
        "--hardware rtx-4090:2x4",
    ]
    for one in found:
        given = SMALL | _words(one.words) | {"engine": one.engine.name}
        best = answer(replace(open_launches(build_request(given)), top=0, within=0.0)).best
        assert best is not None
        assert best.best is not None
        assert one.solution.samples_per_s == pytest.approx(best.best.samples_per_s, rel=1e-9)


def test_a_slow_machine_finds_the_same(
    question: UniformRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock decides: here every look at one is an hour later."""
    before = [(one.words, one.solution.choice) for one in remedies(question)]
    hours = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(time, "process_time", lambda: next(hours))
    assert [(one.words, one.solution.choice) for one in remedies(question)] == before


def test_an_exhaustive_proof_is_not_awaited(
    question: UniformRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates without a memory count take time as well; the effort over all is limited."""
    expanded = list[int]()
    solved = best_first._Search.solved

    def counted(search: best_first._Search, *given: Any) -> VariantResult:
        expanded.append(search.expanded)
        return solved(search, *given)

    monkeypatch.setattr(best_first._Search, "solved", counted)
    assert remedies(question)
    assert max(expanded) > 6
    expanded.clear()
    monkeypatch.setattr(best_first, "_MOST_ENTRIES", 3)
    remedies(question)
    assert max(expanded) == 6  # as many again to find any plan


def test_a_host_that_is_too_small_is_no_way_out(question: UniformRequest) -> None:
    """States of 7B take 18 GiB of host memory for each of four GPUs."""
    one = _on_host(question)
    # weights, moments: 12 bytes of 6.74e9 parameters over four GPUs lie elsewhere at most
    assert 0.7 * 12 * 6.74e9 / 4 < one.host_bytes < 1.1 * 12 * 6.74e9 / 4

    def with_host(memory_bytes: float) -> UniformRequest:
        more = dict(question.card.more) | {"host.memory_bytes": memory_bytes}
        return replace(question, card=replace(question.card, more=more))

    # with a byte less another launch is the way out, with less on the host, and then there is none
    other = _on_host(with_host(one.host_bytes - 1.0))
    assert other.host_bytes < one.host_bytes
    assert other.solution.samples_per_s <= one.solution.samples_per_s
    found = remedies(with_host(2.0**30))
    assert found
    assert all("offload" not in another.words for another in found)


def test_what_lies_on_the_host_is_said_beside_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a launch that has nothing there, nothing is."""
    words = ["--model", "llama3-8b", "--hardware", "h100:1x8", "--seq-length", "4096"]
    words += ["--engine", "megatron", "--global-batch-size", "64", "--verbose"]
    words += ["--output-config-path", "none"]
    assert search_command.run([*words, "--offload-optimizer", "1"]) == 0
    (line,) = (one for one in capsys.readouterr().out.splitlines() if "Host memory: " in one)
    assert line.endswith(" of 238.42 GiB per GPU")
    assert search_command.run([*words, "--offload-activations", "none"]) == 0
    assert "Host memory" not in capsys.readouterr().out
    # next to the peak of the GPU, with an engine without activation offload too
    other = ["deepspeed" if word == "megatron" else word for word in words]
    assert search_command.run([*other, "--offload-optimizer", "1"]) == 0
    screen = capsys.readouterr().out.split("Basis")[0]
    assert "\n  Host memory  " in screen


def test_they_are_said_where_every_trainer_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """With what the host has to hold, after why nothing fits: on one screen, and as objects."""
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    assert search_command.run(words) == 3
    out, err = capsys.readouterr()
    assert err.startswith("autopar-search: no plan fits: llama2-7b ")
    assert err.count("\n") == 1
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 22
    (row,) = (line.split() for line in lines if "--offload-optimizer 1 " in line)
    assert row[2] == "megatron"

    assert search_command.run([*words, "--json", "-"]) == 3
    out, err = capsys.readouterr()
    assert "fits with --offload-optimizer 1: " in err
    assert "GiB" in err
    first, *_, last, _ = json.loads(out)["remedies"]
    assert first["options"] == "--offload-optimizer 1"
    assert f"{first['tokens_per_s_per_gpu']:,.0f}" == row[3]
    assert f"{first['host_bytes'] / 2**30:.2f}" == row[5]
    assert (last["options"], last["degrees"]["dp"]) == ("--lora 32 --lora-base nf4", 4)


def test_looking_for_any_launch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a layout is not opened again from its slowest recomputation on."""
    config = {
        "model_type": "glm4_moe",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "num_hidden_layers": 92,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "vocab_size": 151552,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 3,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": True,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    asked = {"model": str(path), "hardware": "b200:8x2", "engine": "megatron", "seq-length": "4096"}
    question = open_launches(build_request({**asked, "lora": "32"}))
    opened = itertools.count()
    open_one = best_first._Search.open

    def counted(search: best_first._Search, entry: best_first._QueueEntry) -> None:
        assert next(opened) < 5000
        open_one(search, entry)

    monkeypatch.setattr(best_first._Search, "open", counted)
    (engine,) = question.engines
    space = best_first.UniformSearch(engine, question.job, target_of(question, engine))
    found = space.solve(question.fixed, counts=21)
    assert found.solutions


def _on_host(question: UniformRequest) -> Suggestion:
    return next(one for one in remedies(question) if one.words == "--offload-optimizer 1")


def _words(options: str) -> dict[str, str]:
    words = iter(options.split())
    return {name.removeprefix("--"): next(words) for name in words}
