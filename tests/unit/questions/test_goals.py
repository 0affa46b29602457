"""Parts of a cluster that goals choose, against searches of each part alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.errors import OptionError
from autopar.rates.card import load_card
from search.commands import search as search_command
from search.planning.choose import route_of
from search.planning.uniform.answer import least_gpu_s, resized, target_of
from search.planning.uniform.best_first import UniformSearch
from search.questions.goals import clusters_of, solved_goal, too_small
from search.request.request import build_request

pytestmark = pytest.mark.whole

Capture = pytest.CaptureFixture[str]
_ASKED = ("--model", "llama3-8b", "--settle-bsz", "32", "--engine", "megatron")
# parts are compared by their fastest plans
_NONE = ("--output-config-path", "none", "--top", "0", "--within", "0")


pytestmark = pytest.mark.usefixtures("folder")


def alone(card: str, shapes: Iterable[str], asked: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return the answer for each shape, searched alone; without those that fit nothing."""
    found = {}
    for shape in shapes:
        words = [*asked, *_NONE, "--hardware", f"{card}:{shape}", "--use", "all"]
        if search_command.run([*words, "--json", "one.json"]) == 0:
            document = json.loads(Path("one.json").read_text())
            assert "part" not in document
            found[shape] = document
    return found


def rates_of(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return tokens/s of all GPUs of each answer."""
    return {
        shape: one["launch"]["samples_per_s"] * one["seq_length"] for shape, one in found.items()
    }


def gpus(shape: str) -> int:
    nodes, each = map(int, shape.split("x"))
    return nodes * each


def chosen(hardware: str, asked: tuple[str, ...], *words: str) -> tuple[str, dict[str, Any]]:
    """Return the shape of the answer of a search with a goal, and its document."""
    command = [*asked, *_NONE, "--hardware", hardware, *words, "--json", "found.json"]
    assert search_command.run(command) == 0
    found = json.loads(Path("found.json").read_text())
    where = found["hardware"]
    shape = f"{where['num_nodes']}x{where['num_gpus_per_node']}"
    # the request of the answer is that of the part alone
    assert found["request"]["hardware"].endswith(f":{shape}")
    assert not {"goal", "use", "tokens-per-s"} & found["request"].keys()
    if "part" in found:
        part = found["part"]
        assert part["hardware"].endswith(f":{shape}")
        assert part["gpus"] == gpus(shape)
        assert part["proven"]
        rate = found["launch"]["samples_per_s"] * found["seq_length"]
        assert part["tokens_per_s"] == pytest.approx(rate)
    return shape, found


@pytest.mark.parametrize(
    ("card", "whole", "shapes", "asked"),
    [
        ("h100", "3x8", ["1x1", "1x2", "1x4", "1x8", "2x8", "3x8"], _ASKED),
        # two racks: 2 x 36 would be one domain
        ("gb200", "2x40", [f"1x{n}" for n in range(4, 41, 4)] + ["2x40"], _ASKED),
    ],
)
def test_parts_are_chosen_as_by_searches_of_each(
    card: str, whole: str, shapes: list[str], asked: tuple[str, ...], capsys: Capture
) -> None:
    """Fastest, cheapest and fewest of all parts, with and without a rate."""
    answers = alone(card, shapes, asked)
    rates = rates_of(answers)
    hardware = f"{card}:{whole}"
    fastest = max(rates, key=lambda one: (rates[one], -gpus(one)))
    if rates[fastest] <= 1.01 * rates[whole]:
        fastest = whole
    shape, found = chosen(hardware, asked, "--use", "up-to")
    assert shape == fastest
    # searches of the part that are continued find what a fresh search finds
    assert found["launch"] == answers[shape]["launch"]
    part = found["part"]
    assert part["whole_tokens_per_s"] == pytest.approx(rates[whole])
    assert part["free_gpus"] == gpus(whole) - gpus(shape)
    tried = found["clusters_tried"]
    assert {one["hardware"] for one in tried} == {f"{card}:{one}" for one in shapes}
    for one in tried:
        if one["tokens_per_s"] is not None:
            assert one["tokens_per_s"] == pytest.approx(rates[one["hardware"].partition(":")[2]])

    best = max(rates.values())
    for share in (None, 0.6, 0.9):
        limit = () if share is None else ("--tokens-per-s", f"{share * best:.0f}")
        least = 0.0 if share is None else float(f"{share * best:.0f}")
        good = [one for one in rates if rates[one] >= least]
        shape, _ = chosen(hardware, asked, "--goal", "fewest-gpus", *limit)
        assert shape == min(good, key=lambda one: (gpus(one), -rates[one]))
        shape, found = chosen(hardware, asked, "--goal", "cost", *limit)
        assert found["launch"] == answers[shape]["launch"]
        assert rates[shape] / gpus(shape) == pytest.approx(
            max(rates[one] / gpus(one) for one in good)
        )
    capsys.readouterr()


def test_parts_are_used_without_options_in_racks_alone(capsys: Capture) -> None:
    """A batch of 128 divides over 4 of 36 GPUs; racks are told by the trays of their card."""
    asked = ("--model", "llama3-8b", "--settle-bsz", "128", "--engine", "megatron")
    rates = rates_of(alone("gb200", ["1x32", "1x36"], asked))
    assert rates["1x32"] > 1.01 * rates["1x36"]
    shape, found = chosen("gb200:1x36", asked)
    assert shape == "1x32"
    assert found["part"]["gpus"] == 32
    said = " ".join(capsys.readouterr().out.split())
    assert "32 of 36 GPUs of the rack" in said
    # the time limit, or the option, is for all GPUs
    for words in (["--use", "all"], ["--time-limit", "30"]):
        shape, found = chosen("gb200:1x36", asked, *words)
        assert (shape, "part" in found) == ("1x36", False)
    shape, found = chosen("gb200:1x36", asked, "--use", "8")
    assert shape == "1x8"
    assert found["part"]["whole_tokens_per_s"] is None
    shape, found = chosen("h100:3x8", _ASKED)
    assert (shape, "part" in found) == ("3x8", False)
    # no plan is legal on six GPUs
    uneven = (*_ASKED[:2], "--settle-bsz", "4", *_ASKED[4:], "--tp", "1", "--pp", "1", "--cp", "1")
    assert search_command.run([*uneven, *_NONE, "--hardware", "h100:1x6"]) == 2
    shape, found = chosen("h100:1x6", uneven, "--use", "up-to")
    assert shape == "1x4"
    assert found["part"]["whole_tokens_per_s"] is None
    shape, _ = chosen("gb200:1x36", asked, "--use", "up-to", "--time-limit", "90")
    assert shape == "1x32"


def test_what_no_cluster_reaches_ends_with_3(capsys: Capture) -> None:
    """A rate says what is reached; a model that fits nowhere what would fit."""
    words = [*_ASKED, *_NONE, "--hardware", "h100:1x8"]
    fast = [*words, "--goal", "fewest-gpus", "--tokens-per-s", "1e9"]
    assert search_command.run(fast) == 3
    said = capsys.readouterr().err
    assert "--tokens-per-s 1,000,000,000" in said
    large = ["--model", "llama3-70b", *_ASKED[2:], *_NONE, "--hardware", "h100:1x2"]
    for goal in (["--goal", "fewest-gpus"], ["--use", "up-to"], ["--use", "1"]):
        assert search_command.run([*large, *goal]) == 3
        assert "llama3-70b" in capsys.readouterr().err


def test_parts_of_a_cluster_and_what_is_too_small_for_anything() -> None:
    """Trays and whole nodes; weights and moments of 12 bytes a parameter are spread over all."""
    h100, gb200 = load_card("h100"), load_card("gb200")
    assert clusters_of(h100, 3, 8) == ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (3, 8))
    assert clusters_of(h100, 1, 6) == ((1, 1), (1, 2), (1, 4), (1, 6))
    assert clusters_of(gb200, 1, 72) == tuple((1, n) for n in range(4, 73, 4))
    assert clusters_of(gb200, 1, 2) == ((1, 2),)
    # nodes of one tray in racks of 18: 19 of them are two uneven racks
    assert clusters_of(gb200, 20, 4) == (*((n, 4) for n in range(1, 19)), (20, 4))
    racks = clusters_of(gb200, 3, 72)
    assert {(1, 64), (2, 64), (3, 64), (3, 28), (2, 72)} <= {*racks}
    # 2 x 36 are one domain of 72, and 3 x 24 as well
    assert not {(2, 36), (3, 24), (2, 4)} & {*racks}
    sizes = [nodes * gpus for nodes, gpus in racks]
    assert sizes == sorted(sizes)
    for hardware, more, small in (
        ("h100:1x8", {}, True),
        ("h100:2x8", {}, False),
        ("h100:1x8", {"lora": "8"}, False),
    ):
        request = build_request({"model": "llama3-70b", "hardware": hardware, **more})
        question = route_of(request).launches
        assert question is not None
        assert bool(too_small(question, question.spec)) == small


def test_what_cannot_be_used_is_refused() -> None:
    """Numbers of GPUs that no part has, and plans that have no parts."""
    raw = {"model": "llama3-8b", "hardware": "gb200:1x72"}
    with pytest.raises(OptionError, match="--use 70") as error:
        solved_goal({}, build_request({**raw, "use": "70"}))
    assert "68 or 72" in str(error.value)
    for word in ("some", "0", "-4", "1.5"):
        with pytest.raises(OptionError, match="--use"):
            build_request({**raw, "use": word})
    with pytest.raises(OptionError, match="--use up-to"):
        solved_goal({}, build_request({"use": "up-to", "pin": ["tp=2"], **raw}))


@pytest.mark.parametrize(
    ("model", "hardware", "more"),
    [
        ("qwen3-32b", "gb200:1x36", {}),
        ("glm-4.5-air", "gb200:1x24", {"precision": "any"}),
        ("llama3-8b", "h100:2x8", {"tp": "2,4", "micro-batch-size": "1"}),
        ("qwen3-30b-a3b", "h100:2x8", {"lora": "16"}),
    ],
)
def test_bounds_of_all_sizes_hold_on_each(model: str, hardware: str, more: dict[str, str]) -> None:
    """No degrees of any part are below the bound of all, by the bounds of that part alone."""
    raw = {"model": model, "hardware": hardware, "seq-length": "4096", "settle-bsz": "96", **more}
    question = route_of(build_request(raw)).launches
    assert question is not None
    parts = clusters_of(question.card, question.num_nodes, question.gpus_per_node)
    least = least_gpu_s(question, [nodes * each for nodes, each in parts])
    assert {one.name for one in least} >= {"megatron"}
    tight = False
    for shape, (engine, bound) in product(parts, least.items()):
        asked = resized(question, *shape)
        space = UniformSearch(engine, asked.job, target_of(asked, engine)).space
        seconds = space.degrees(asked.fixed).seconds * asked.job.world
        assert np.all(seconds >= bound * (1.0 - 1e-9))
        tight |= bool(np.any(seconds <= bound * 1.1))
    assert tight


def test_a_chosen_plan_reaches_the_wanted_throughput() -> None:
    """A safer plan within 1 % of the fastest is not the answer where it is too slow."""
    asked = (
        *("--model", "llama3-8b", "--engine", "megatron", "--seq-length", "8192"),
        *("--settle-bsz", "1024", "--hardware", "h100:8x8", "--output-config-path", "none"),
    )

    def rate(*words: str) -> float:
        assert search_command.run([*asked, *words, "--json", "one.json"]) == 0
        document = json.loads(Path("one.json").read_text())
        return float(document["launch"]["samples_per_s"] * document["seq_length"])

    fastest = rate("--within", "0")
    assert rate() < fastest
    wanted = 0.9999 * fastest
    goal = ("--goal", "fewest-gpus", "--use", "64", "--tokens-per-s", str(wanted))
    assert rate(*goal) >= wanted


def test_the_sentence_is_of_the_plan_of_the_answer(capsys: Capture) -> None:
    """A safer plan than the fastest is chosen, whose throughput the sentence has."""
    words = ("--model", "llama3-8b", "--engine", "megatron", "--global-batch-size", "256",
             "--hardware", "h100:2x8", "--goal", "cost", "--output-config-path", "none",
             "--json", "found.json")  # fmt: skip
    assert search_command.run(words) == 0
    found = json.loads(Path("found.json").read_text())
    rate = found["launch"]["samples_per_s"] * found["seq_length"]
    tried = {one["hardware"]: one["tokens_per_s"] for one in found["clusters_tried"]}
    # the fastest plan of the part is another one
    assert tried[found["part"]["hardware"]] > 1.001 * rate
    assert found["part"]["tokens_per_s"] == pytest.approx(rate)
    assert f" {rate / found['part']['gpus']:,.0f} tokens/s/GPU" in capsys.readouterr().out
