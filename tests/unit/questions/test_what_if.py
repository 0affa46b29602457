"""`autopar-explore` without a word: every combination is the search of its words, in order."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.command.answers import without_head
from autopar.documents.json import read_record
from autopar.documents.spec import load_spec
from autopar.exploration import ExplorationDocument
from autopar.rates import card as rates_of_card, model as rates_of_model
from autopar.rates.accuracy import load_accuracy, probability_faster
from autopar.records import replace
from autopar.training.throughput import spec_flop
from search.commands import search as search_command, what_if as what_if_command
from search.commands.explore import run
from search.planning.choose import TRAINERS
from search.planning.layered.planner import Planner

pytestmark = pytest.mark.whole

Capture = pytest.CaptureFixture[str]
SMALL = ("--num-layers", "4")
MODELS, HARDWARE = ("llama2-7b", "gpt2-xl"), ("a100:1x4", "h100:1x2")
STACKS, BATCHES = ("megatron-core", "torchtitan-eager"), ("8", "16")


# what is written lies in a folder of its own, where no measured files are
pytestmark = pytest.mark.usefixtures("folder")


def several(**choices: tuple[str, ...]) -> list[str]:
    """Return options that are given several times."""
    return [
        word
        for name, values in choices.items()
        for value in values
        for word in (f"--{name.replace('_', '-')}", value)
    ]


def asked(*arguments: str, capsys: Capture, code: int = 0) -> Any:
    """Return the object of `--json -`, which is as published."""
    got = run([*arguments, "--json", "-"])
    out, err = capsys.readouterr()
    assert got == code, err
    found = json.loads(out)
    read_record(ExplorationDocument, "answer", without_head(found))
    return found


def rows(found: Any) -> list[Any]:
    """Return the answers of all groups."""
    return [answer for group in found["groups"] for answer in group["answers"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder and the object of 16 combinations, with their plan files."""
    folder = tmp_path_factory.mktemp("whole")
    words = several(model=MODELS, hardware=HARDWARE, stack=STACKS, global_batch=BATCHES)
    outputs = ("--output-config-path", str(folder / "plans"), "--json", str(folder / "all.json"))
    assert run([*words, *SMALL, *outputs]) == 0
    return folder, json.loads((folder / "all.json").read_text(encoding="utf-8"))


def test_each_answer_is_that_of_a_search(whole: tuple[Path, Any], capsys: Capture) -> None:
    """Plan, step, interval, memory, and both files byte for byte, with and without alternatives."""
    _, found = whole
    answers = rows(found)
    combinations = list(itertools.product(MODELS, HARDWARE, STACKS, BATCHES))
    assert len(answers) == len(combinations)
    for model, hardware, stack, batch in combinations:
        words = {"model": model, "hardware": hardware, "stack": stack, "global-batch-size": batch}
        (answer,) = (one for one in answers if one["choice"] == words)
        same = [word for name, value in words.items() for word in (f"--{name}", value)]
        own = Path("own.json")
        assert (
            search_command.run([*same, *SMALL, "--json", "-", "--output-config-path", str(own)])
            == 0
        )
        direct = json.loads(capsys.readouterr().out)

        assert answer["plan"] == direct["plan"]
        assert answer["step_time_s"] == direct["step_time_s"]
        assert answer["step_time_interval_s"] == direct["step_time_interval_s"]
        full = max(direct["memory"], key=lambda stage: stage["reserved_bytes"])
        assert answer["reserved_bytes"] == full["reserved_bytes"]
        assert answer["budget_bytes"] == full["budget_bytes"]
        plan_file = Path(answer["plan_file"])
        assert plan_file.read_bytes() == Path("autopar_plan_own.json").read_bytes()
        strategy = plan_file.with_name(plan_file.name.removeprefix("autopar_plan_"))
        assert strategy.read_bytes() == own.read_bytes()
        quick = asked(*same, *SMALL, capsys=capsys)  # without plan files nobody needs alternatives
        assert {**rows(quick)[0], "rank": 0, "plan_file": None} == {
            **answer,
            "rank": 0,
            "plan_file": None,
        }


def test_each_launch_is_that_of_a_search(capsys: Capture) -> None:
    """Of one trainer, and of all where nobody names one, to the file's last byte."""
    base = ("--model", "llama2-7b", "--global-batch-size", "16", "--seq-length", "2048")
    words = several(hardware=("h100:1x4", "a100:1x2"), engine=("megatron", "deepspeed"))
    found = rows(asked(*base, *words, "--output-config-path", "all", capsys=capsys))
    found += rows(asked(*base, "--hardware", "h100:1x4", capsys=capsys))
    assert len(found) == 5
    for answer in found:
        same = [word for name, value in answer["choice"].items() for word in (f"--{name}", value)]
        own = ["--json", "-", "--output-config-path", "own.json"]
        assert search_command.run([*same, *own]) == 0
        direct = json.loads(capsys.readouterr().out)["launch"]

        assert answer["engine"] == direct["engine"]
        assert answer["degrees"] == direct["degrees"]
        assert "plan" not in answer
        predicted = direct["predicted"]
        assert answer["step_time_s"] == predicted["step_time_s"]
        assert answer["step_time_interval_s"] == predicted["step_time_interval_s"]
        assert answer["summary"].startswith(f"{direct['engine']} ")
        if answer["plan_file"] is not None:
            assert Path(answer["plan_file"]).read_text(encoding="utf-8") == Path(
                "own.json"
            ).read_text(encoding="utf-8")


def test_degrees_and_the_choice_of_none(capsys: Capture) -> None:
    """A degree that launches alone have is taken, and `none` is no trainer, not all of them."""
    words = ("--model", "llama2-7b", "--hardware", "h100:1x4", "--global-batch-size", "16")
    (launch,) = rows(asked(*words, "--dp", "2", "--vpp", "1", capsys=capsys))
    assert (launch["degrees"]["dp"], launch["degrees"]["vpp"]) == (2, 1)
    assert run([*words, "--engine", "none"]) == 0
    assert re.search(r"^Next .* --engine none$", capsys.readouterr().out, re.MULTILINE)
    (plan,) = rows(asked(*words, "--engine", "none", capsys=capsys))
    assert plan["engine"] is None
    assert "degrees" not in plan
    assert plan["plan"]["pp_deg"] >= 1


def test_order_and_rates(whole: tuple[Path, Any]) -> None:
    """By tokens per second and GPU for each model; rates, interval and MFU from their words."""
    _, found = whole
    gpus = {"a100:1x4": 4, "h100:1x2": 2}
    peak = {"a100:1x4": 312e12, "h100:1x2": 989.4e12}  # dense bf16 of the datasheets
    assert [group["trained"] for group in found["groups"]] == [{"model": m} for m in MODELS]
    for group in found["groups"]:
        spec = load_spec(group["trained"]["model"], num_layers=(4,))
        length = spec.layers[0].seq_length
        rates = []
        for answer in group["answers"]:
            name, batch = answer["choice"]["hardware"], int(answer["choice"]["global-batch-size"])
            rate = batch * length / answer["step_time_s"] / gpus[name]
            assert answer["tokens_per_s_per_gpu"] == pytest.approx(rate, rel=1e-12)
            assert (answer["num_gpus"], answer["tokens_per_sample"]) == (gpus[name], length)
            scale = answer["step_time_s"] * rate
            fast, slow = answer["step_time_interval_s"]
            assert answer["interval_tokens_per_s_per_gpu"] == pytest.approx(
                [scale / slow, scale / fast], rel=1e-12
            )
            mfu = spec_flop(spec) * rate / length / peak[name]
            assert answer["mfu"] == pytest.approx(mfu, rel=1e-3)
            rates.append(rate)
        assert rates == sorted(rates, reverse=True)
        assert [answer["rank"] for answer in group["answers"]] == list(range(1, 9))


def test_what_choices_are_worth(whole: tuple[Path, Any]) -> None:
    """The geometric mean of best over worst among answers that differ in one option alone."""
    _, found = whole
    answers = rows(found)
    names = ("hardware", "stack", "global-batch-size")
    assert {one["option"] for one in found["effects"]} == set(names)
    for one in found["effects"]:
        ratios, best = [], []
        others = [name for name in ("model", *names) if name != one["option"]]
        for place in {tuple(a["choice"][n] for n in others) for a in answers}:
            alike = [a for a in answers if tuple(a["choice"][n] for n in others) == place]
            speeds = {a["choice"][one["option"]]: a["tokens_per_s_per_gpu"] for a in alike}
            ratios.append(max(speeds.values()) / min(speeds.values()))
            best.append(max(speeds, key=speeds.__getitem__))
        assert one["comparisons"] == len(ratios) == 8
        assert one["ratio"] == pytest.approx(math.prod(ratios) ** (1 / 8), rel=1e-12)
        assert one["wins"] == best.count(one["best"]) == max(map(best.count, best))
    ratios = [one["ratio"] for one in found["effects"]]
    assert ratios == sorted(ratios, reverse=True)


def test_how_sure_the_order_is(whole: tuple[Path, Any]) -> None:
    """Odds where errors are shared, which only batches of one cluster and trainer do."""
    _, found = whole
    for group in found["groups"]:
        first = group["answers"][0]
        elsewhere = [
            a["rank"]
            for a in group["answers"]
            if a["choice"]["hardware"] != first["choice"]["hardware"]
        ]
        assert [one["over"] for one in group["leads"]] == sorted({2, elsewhere[0]})
        for one in group["leads"]:
            other = group["answers"][one["over"] - 1]
            ratio = first["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"]
            assert one["ratio"] == pytest.approx(ratio, rel=1e-12)
            differ = {n for n in first["choice"] if first["choice"][n] != other["choice"][n]}
            if differ == {"global-batch-size"}:
                stack = first["choice"]["stack"]
                runs = load_accuracy().of(stack, experts=False, site_known=False)
                odds = probability_faster(1.0, ratio, runs.plan_spread)
                assert one["probability_faster"] == pytest.approx(odds, rel=1e-9)
                assert one["intervals_overlap"] is None
            else:
                slowest = first["interval_tokens_per_s_per_gpu"][0]
                overlap = slowest <= other["interval_tokens_per_s_per_gpu"][1]
                assert (one["intervals_overlap"], one["probability_faster"]) == (overlap, None)
    assert any(one["probability_faster"] for group in found["groups"] for one in group["leads"])
    assert any(one["probability_faster"] is None for g in found["groups"] for one in g["leads"])


def test_golden_what_is_printed(golden: Callable[[str, str], None], capsys: Capture) -> None:
    """Answers, what does not fit and what is not tried, in 80 columns."""
    words = several(
        model=("llama2-7b", "bert-large"),
        hardware=("a100:1x4", "h100:1x2", "a10g:1x1"),
        stack=STACKS,
        global_batch=("16",),
    )
    assert run([*words, "--pin", "layers 30-31:tp=1", "--price", "a100=1.5"]) == 0

    out, err = capsys.readouterr()
    assert max(map(len, out.split("\nNext")[0].splitlines())) <= 80
    # a slow machine may be told how far the search is
    assert [line for line in err.splitlines() if "combinations searched" not in line] == []
    golden("explore_what_if.txt", out)


def test_what_the_command_at_the_end_says(capsys: Capture) -> None:
    """The search of the first answer is its line, with all options."""
    words = several(model=("llama2-7b",), hardware=HARDWARE, engine=("none", "deepspeed"))
    words += [
        *SMALL,
        "--global-batch-size",
        "8",
        "--forbid",
        "tp=4",
        "--no-tp-overlap",
        "--by",
        "step",
    ]
    assert run(words) == 0
    (line,) = re.findall(r"^Next +(.*)$", capsys.readouterr().out, re.MULTILINE)
    step = rows(asked(*words, capsys=capsys))[0]["step_time_s"]

    assert line.startswith("autopar search --model llama2-7b --hardware ")
    assert search_command.run([*line.split()[2:], "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == step


def test_orders(capsys: Capture) -> None:
    """By the time of a step, and by the price of a token: a GPU hour over its tokens."""
    words = several(model=("llama2-7b",), hardware=HARDWARE, stack=STACKS, settle_bsz=("8",))
    prices = ("--price", "a100=1.5", "--price", "h100:1x2=6")
    found = asked(*words, *SMALL, *prices, "--by", "cost", capsys=capsys)
    costs = [answer["cost_per_mtoken"] for answer in rows(found)]
    for answer in rows(found):
        hour = 1.5 if answer["choice"]["hardware"] == "a100:1x4" else 6.0
        tokens = answer["tokens_per_s_per_gpu"] * 3600
        assert answer["cost_per_mtoken"] == pytest.approx(1e6 * hour / tokens, rel=1e-12)
    assert costs == sorted(costs)
    steps = [a["step_time_s"] for a in rows(asked(*words, *SMALL, "--by", "step", capsys=capsys))]
    assert steps == sorted(steps)


def test_lengths_are_groups_and_equal_words_are_one(capsys: Capture) -> None:
    """Tokens of another length are another work; what is said twice is searched once."""
    words = several(model=("llama2-7b",) * 2, hardware=("h100:1x2",), seq_length=("1024", "2048"))
    found = asked(*words, *SMALL, "--global-batch-size", "8", capsys=capsys)

    assert [group["trained"]["seq-length"] for group in found["groups"]] == ["1024", "2048"]
    assert [answer["tokens_per_sample"] for answer in rows(found)] == [1024, 2048]
    assert found["choices"]["model"] == ["llama2-7b"] * 2


def test_tokens_of_an_encoder_and_a_decoder(capsys: Capture) -> None:
    """A sample has those of both."""
    words = ("--model", "t5-3b", "--num-layers", "2,2", "--seq-length", "512,128")
    found = asked(*words, "--hardware", "h100:1x2", "--global-batch-size", "8", capsys=capsys)

    assert rows(found)[0]["tokens_per_sample"] == 640


def test_what_makes_no_sense_is_not_tried(capsys: Capture) -> None:
    """With its reason, beside the others; where nothing makes sense it is a mistake, as alone."""
    pinned = ("--hardware", "h100:1x2", "--global-batch-size", "8", "--pin", "layers 30-31:tp=1")
    found = asked("--model", "llama2-7b", "--model", "bert-large", *pinned, capsys=capsys)
    one, other = rows(found)
    assert (one["status"], other["status"]) == ("found", "not tried")
    assert other["reason"] == "--pin: layer 31 does not exist, bert-large has layers 0-23"
    assert "rank" not in other

    assert run(["--model", "bert-large", *pinned]) == 2
    assert capsys.readouterr() == ("", f"autopar-explore: {other['reason']}\n")


def test_sites_are_of_their_card(capsys: Capture) -> None:
    """A site stands for its own card alone, `none` for no site; each as in a search of its own."""
    words = several(model=("llama2-7b",), hardware=("a100:1x2", "h100:1x2"))
    words += several(site=("none", "jean-zay-a100"), stack=("megatron-core",), settle_bsz=("8",))
    answers = rows(asked(*words, *SMALL, capsys=capsys))
    found = {(a["choice"]["hardware"], a["choice"]["site"]): a for a in answers}

    assert {a["status"] for a in answers if a is not found["h100:1x2", "jean-zay-a100"]} == {
        "found"
    }
    refused = found["h100:1x2", "jean-zay-a100"]
    assert refused["status"] == "not tried"
    assert refused["reason"] == (
        "jean-zay-a100.json: the site was measured on a100-80gb, but --hardware is h100-80gb"
    )
    own = ["--model", "llama2-7b", "--hardware", "a100:1x2", "--global-batch-size", "8", *SMALL]
    own += ["--stack", "megatron-core", "--json", "-", "--output-config-path", "none"]
    for site in ("none", "jean-zay-a100"):
        assert search_command.run([*own, *(() if site == "none" else ("--site", site))]) == 0
        direct = json.loads(capsys.readouterr().out)
        assert found["a100:1x2", site]["step_time_s"] == direct["step_time_s"]
    assert run([*BASE, "--site", "jean-zay-a100"]) == 2
    assert "a100-80gb" in capsys.readouterr().err


def test_measured_hardware_stands_beside_cards(capsys: Capture) -> None:
    """Where times of the model lie beside it, and what is estimated is said of whom."""
    root = Path(what_if_command.__file__).parents[2]
    shutil.copytree(root / "models" / "llama2-7b" / "configs", "models/llama2-7b/configs")
    shutil.copytree(root / "hardware_configs" / "a100-80gb_1x8", "measured")
    for path in (*Path("measured").glob("*.meta.json"), *Path("models").rglob("*.meta.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**content, "estimated": False}), encoding="utf-8")
    words = several(model=("llama2-7b",), hardware=("measured", "h100:1x8"), settle_bsz=("8",))
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "\nESTIMATES from datasheets for h100:1x8. Sorted by tokens/s/GPU.\n" in out
    assert "using times and memory of models/llama2-7b/configs. " in err

    found = {answer["choice"]["hardware"]: answer for answer in rows(asked(*words, capsys=capsys))}
    assert {name: answer["estimated"] for name, answer in found.items()} == {
        "measured": False,
        "h100:1x8": True,
    }
    assert found["measured"]["mfu"] is None  # whose peak nobody knows
    own = [
        "--model",
        "llama2-7b",
        "--hardware",
        "measured",
        "--global-batch-size",
        "8",
        "--json",
        "-",
    ]
    assert search_command.run([*own, "--output-config-path", "none"]) == 0
    direct = json.loads(capsys.readouterr().out)
    assert found["measured"]["step_time_s"] == direct["step_time_s"]


def test_nothing_fits(capsys: Capture) -> None:
    """Exit 3 where no combination has a plan; each says what it needs."""
    small = (
        *["--model", "llama2-7b", "--global-batch-size", "8", "--engine", "none"],
        "--hardware",
        "a10g:1x1",
    )
    found = asked(*small, capsys=capsys, code=3)
    assert run([*small, "--hardware", "a100:1x4"]) == 0
    assert "22." in capsys.readouterr().out
    assert rows(found)[0]["status"] == "no plan"
    need = rows(found)[0]["reason"].rpartition(" ")[2]

    plans = [*small, "--output-config-path", "none"]
    assert search_command.run(plans) == 3
    assert f"--memory-constraint {need}, " in capsys.readouterr().err


def test_no_launch_fits(capsys: Capture) -> None:
    """Of several trainers the one that lacks least says what; one says it as its search does."""
    small = ("--model", "llama2-7b", "--global-batch-size", "8", "--hardware", "a10g:1x1")
    (every,) = rows(asked(*small, capsys=capsys, code=3))
    (one,) = rows(asked(*small, "--engine", "megatron", capsys=capsys, code=3))
    assert every["status"] == one["status"] == "no plan"
    engine, _, reason = every["reason"].partition(": ")
    assert engine in TRAINERS
    assert reason.startswith("no plan fits: the ")
    assert one["reason"].startswith("no plan fits: the ")
    assert search_command.run([*small, "--engine", "megatron", "--verbose"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert one["reason"] in said


BASE = ("--model", "llama2-7b", "--hardware", "h100:1x2", "--global-batch-size", "8")


def test_files_of_ones_own(capsys: Capture) -> None:
    """Cards, stacks and models by their path, which no output may replace."""
    root = Path(what_if_command.__file__).parents[2]
    for source, name in (
        ("hardware_configs/cards/h100-80gb.json", "card.json"),
        ("hardware_configs/stacks/megatron-core.json", "stack.json"),
        ("models/llama2-7b/model.json", "model.json"),
    ):
        Path(name).write_bytes((root / source).read_bytes())
    words = ("--model", "model.json", "--hardware", "card.json:1x2", "--stack", "stack.json")
    rest = (*SMALL, "--global-batch-size", "8")
    own = rows(asked(*words, *rest, capsys=capsys))[0]
    shipped = several(model=("llama2-7b",), hardware=("h100-80gb:1x2",), stack=("megatron-core",))
    assert own["step_time_s"] == rows(asked(*shipped, *rest, capsys=capsys))[0]["step_time_s"]

    for name in ("card.json", "stack.json", "model.json"):
        assert run([*words, *rest, "--json", name]) == 2
        assert name in capsys.readouterr().err
    assert run([*words, *rest, "--output-config-path", "card.json"]) == 2


def test_names_of_files_differ() -> None:
    """Also where two paths end alike."""
    Path("a").mkdir()
    root = Path(what_if_command.__file__).parents[2]
    for folder in (".", "a"):
        content = (root / "hardware_configs/cards/h100-80gb.json").read_bytes()
        (Path(folder) / "card.json").write_bytes(content)
    words = several(hardware=("card.json:1x2", "a/card.json:1x2"), engine=("none",))
    assert (
        run(["--model", "gpt2-xl", "--global-batch-size", "8", *words, "--output-config-path", "f"])
        == 0
    )

    names = sorted(path.name for path in Path("f").iterdir())
    plain = ("gpt2-xl_card.json-1x2_b8.json", "gpt2-xl_card.json-1x2_b8~2.json")
    assert names == sorted([*plain, *(f"autopar_plan_{name}" for name in plain)])


def test_profiles_are_made_once(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A model for each card and stack, a cluster for each shape and stack; batches share both."""
    calls: list[str] = []
    for module, name in ((rates_of_model, "estimate_model"), (rates_of_card, "estimate_hardware")):
        make = getattr(module, name)

        def counted(*given: Any, _make: Any = make, _name: str = name, **more: Any) -> Any:
            calls.append(_name)
            return _make(*given, **more)

        monkeypatch.setattr(module, name, counted)
    words = several(model=MODELS, hardware=("h100:1x2", "h100:1x4"), stack=STACKS)
    asked(*words, *several(settle_bsz=("8", "16", "24")), *SMALL, capsys=capsys)

    # 24 combinations
    assert calls.count("estimate_model") == len(MODELS) * len(STACKS)
    assert calls.count("estimate_hardware") == 2 * len(STACKS)


def test_ctrl_c_shows_what_was_searched(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Exit 130, and the object says that there is more."""
    before = what_if_command.working

    def working(text: str, call: Callable[[], Any]) -> Any:
        if text == "searching 2 of 2":
            raise KeyboardInterrupt
        return before(text, call)

    monkeypatch.setattr(what_if_command, "working", working)
    words = several(model=("llama2-7b",), hardware=HARDWARE, settle_bsz=("8",))
    found = asked(*words, *SMALL, capsys=capsys, code=130)

    assert [answer["choice"]["hardware"] for answer in rows(found)] == ["a100:1x4"]
    assert not found["complete"]
    monkeypatch.setattr(what_if_command, "working", before)
    assert asked(*words, *SMALL, capsys=capsys)["complete"]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"gap": 0.03}, 0, "stopped early: at most 3 % below the best"),
        ({"gap": math.inf}, 0, "stopped early: how far below the best is unknown"),
        ({"plan": None, "prediction": None}, 3, "no plan was found within --time-limit 9"),
    ],
)
def test_a_limit_of_time_is_said(
    changes: dict[str, Any], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A search that was cut short may have missed the best."""
    solve = Planner.solve

    def stopped(self: Planner, **given: Any) -> Any:
        return replace(solve(self, **given), status="time_limit", **changes)

    monkeypatch.setattr(Planner, "solve", stopped)
    plans = (*BASE, *SMALL, "--engine", "none", "--time-limit", "9")
    assert run(plans) == code
    assert said in capsys.readouterr().out
    found = rows(asked(*plans, capsys=capsys, code=code))
    assert found[0]["reason"] == said


def test_picture(capsys: Capture) -> None:
    """One plot for each group, in the formats asked for."""
    pytest.importorskip("matplotlib")
    words = several(model=MODELS, hardware=HARDWARE, settle_bsz=("8",))
    assert run([*words, *SMALL, "--plot", "drawn", "--plot-format", "svg"]) == 0

    text = Path("drawn/what_if.svg").read_text(encoding="utf-8")
    for said in (*MODELS, *HARDWARE, "tokens/s/GPU"):
        assert said in text
    assert "autopar-explore: wrote drawn/what_if.svg\n" in capsys.readouterr().err
