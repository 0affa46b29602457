"""Clusters that goals choose: the smallest and the cheapest, against searches of each alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search.commands import search as search_command
from search.planning.choose import route_of
from search.questions.goals import clusters_of, too_small
from search.request.request import build_request

pytestmark = pytest.mark.whole

Capture = pytest.CaptureFixture[str]
_ASKED = ("--model", "llama3-8b", "--settle-bsz", "32", "--engine", "megatron")
_NONE = ("--output-config-path", "none")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rate(shape: str, capsys: Capture) -> float | None:
    """Return tokens/s of all GPUs of a shape that is searched alone; None where nothing fits."""
    words = [*_ASKED, *_NONE, "--hardware", f"h100:{shape}", "--json", "one.json"]
    code = search_command.run(words)
    capsys.readouterr()
    if code:
        return None
    return float(json.loads(Path("one.json").read_text())["launch"]["samples_per_s"]) * 8192


def chosen(capsys: Capture, *words: str) -> tuple[str, dict[str, float | None], str]:
    """Return the shape that a search of a goal has, what it tried, and what it says."""
    asked = [*_ASKED, *_NONE, "--hardware", "h100:2x8", *words, "--json", "found.json"]
    assert search_command.run(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = json.loads(Path("found.json").read_text())
    where = found["hardware"]
    tried = {
        one["hardware"].rpartition(":")[2]: one["tokens_per_s"] for one in found["clusters_tried"]
    }
    assert found["request"]["hardware"].endswith(
        f":{where['num_nodes']}x{where['num_gpus_per_node']}"
    )
    return f"{where['num_nodes']}x{where['num_gpus_per_node']}", tried, said


def test_goals_are_exact_over_what_was_tried(capsys: Capture) -> None:
    """The first that fits, the first that is fast enough, the best of a GPU."""
    shapes = {"1x1": 1, "1x2": 2, "1x4": 4, "1x8": 8, "2x8": 16}
    alone = {shape: rate(shape, capsys) for shape in shapes}
    assert alone["1x1"] is None
    fitting = [shape for shape in shapes if alone[shape] is not None]
    assert len(fitting) > 1

    shape, tried, said = chosen(capsys, "--goal", "fewest-gpus")
    assert shape == fitting[0]
    assert tried == {one: pytest.approx(alone[one]) for one in tried}
    assert [*tried] == [*shapes][: [*shapes].index(shape) + 1]
    assert "Goal fewest GPUs; " in said

    wanted = max(value for value in alone.values() if value is not None) * 0.9
    shape, tried, said = chosen(capsys, "--goal", "fewest-gpus", "--tokens-per-s", f"{wanted:.0f}")
    reaching = [one for one in shapes if (alone[one] or 0.0) >= wanted]
    assert shape == reaching[0]
    assert f"fewest GPUs with {wanted:,.0f} tokens/s; " in said

    shape, tried, said = chosen(capsys, "--goal", "cost", "--price", "2")
    assert [*tried] == [*shapes]
    assert shape == max(fitting, key=lambda one: (alone[one] or 0.0) / shapes[one])
    assert "Goal cheapest per token; " in said
    assert "$" in said


def test_what_no_cluster_reaches_ends_with_3(capsys: Capture) -> None:
    """A rate says the fastest; a model that fits nowhere what would fit."""
    words = [*_ASKED, *_NONE, "--hardware", "h100:1x8"]
    fast = [*words, "--goal", "fewest-gpus", "--tokens-per-s", "1e9"]
    assert search_command.run(fast) == 3
    said = capsys.readouterr().err
    assert "--tokens-per-s 1,000,000,000" in said
    large = ["--model", "llama3-70b", *_ASKED[2:], *_NONE, "--hardware", "h100:1x2"]
    assert search_command.run([*large, "--goal", "fewest-gpus"]) == 3
    assert "llama3-70b" in capsys.readouterr().err


def test_parts_of_a_cluster_and_what_is_too_small_for_anything() -> None:
    """Divisors alone; weights and moments of 12 bytes a parameter are spread over all GPUs."""
    assert clusters_of(6, 4) == ((1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (6, 4))
    assert clusters_of(1, 8) == ((1, 1), (1, 2), (1, 4), (1, 8))
    for hardware, more, small in (
        ("h100:1x8", {}, True),
        ("h100:2x8", {}, False),
        ("h100:1x8", {"lora": "8"}, False),
    ):
        request = build_request({"model": "llama3-70b", "hardware": hardware, **more})
        question = route_of(request).launches
        assert question is not None
        assert bool(too_small(question, question.spec)) == small
