"""--engine: the fastest plan that an engine runs as it is."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.answer import EngineBest
from autopar.documents.plan import read_strategy
from autopar.errors import InfeasibleError, OptionError
from autopar.records import replace
from search.commands.explain import run as explain
from search.commands.export import run as export
from search.commands.search import run
from search.engines.plans import ExporterSpace, space_of
from search.engines.table import EXPORTERS
from search.planning.choose import SearchChoice, chosen, searches_all_engines
from search.planning.layered.parts import ChosenPlans, choose
from search.planning.session import open_session
from search.planning.uniform.files import is_launch
from search.questions import goals
from search.request.request import Request, build_request

pytestmark = pytest.mark.whole

COMMAND = ["--model", "llama2-7b", "--hardware", "a100-80gb:1x8", "--global-batch-size", "32"]
RAW = {"model": "llama2-7b", "hardware": "a100-80gb:1x8", "global-batch-size": "32"}


def choice_of(engine: str, **changes: object) -> ChosenPlans:
    """Return what is chosen for the common command line with options changed."""
    return choose(build_request({**RAW, **changes, "engine": engine}))


def plan_file(folder: Path, *arguments: str) -> Path:
    """Search, and return our plan file."""
    assert run([*COMMAND, "--output-config-path", str(folder), *arguments]) == 0
    (path,) = folder.glob("autopar_plan_*.json")
    return path


def found_file(folder: Path) -> Path:
    """Return the file of ours that a search has written."""
    (path,) = folder.glob("autopar_plan_*.json")
    return path


@pytest.mark.parametrize("engine", EXPORTERS)
def test_what_is_found_is_exported_without_loss(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the exporter's own word; and the file asks the question of that engine again."""
    assert run([*COMMAND, "--output-config-path", str(tmp_path), "--engine", engine]) == 0
    path = found_file(tmp_path)
    capsys.readouterr()

    assert export([str(path), "--to", engine, "--out", "none", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["losses"] == []
    assert document["status"] == "exported"
    assert "engine" not in json.loads(path.read_text())["request"]


def test_the_engine_of_an_exported_launch_is_not_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--engine` of an export is `--to`, as the files of another engine are asked for."""
    assert run([*COMMAND, "--output-config-path", str(tmp_path), "--engine", "megatron"]) == 0
    capsys.readouterr()
    found = {}
    for flag in ("--to", "--engine"):
        words = [str(found_file(tmp_path)), flag, "deepspeed", "--allow-approx"]
        assert export([*words, "--out", "none", "--json", "-"]) == 0
        found[flag] = json.loads(capsys.readouterr().out)
        del found[flag]["question"]  # in the words of the command
    assert found["--engine"]["engine"] == "deepspeed"
    assert found["--engine"] == found["--to"]


@pytest.mark.parametrize("engine", EXPORTERS)
def test_every_engine_is_searched_and_exported(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launch or a plan of GPT-2, or one sentence on why it has none; never an internal error."""
    assert isinstance(space_of(engine), ExporterSpace)
    words = ["--model", "gpt2-xl", "--hardware", "a100-80gb:1x8", "--global-batch-size", "32"]
    code = run([*words, "--engine", engine, "--output-config-path", str(tmp_path)])
    err = capsys.readouterr().err
    refusals = {"torchtitan": "torchtitan", "paddlenlp": "Llama blocks"}
    if engine in refusals:  # models with biases and learned positions are none of theirs
        assert code == 3
        assert refusals[engine] in err
        return
    assert code == 0, err
    # scripts of libraries name such a model by its repository
    assert is_launch(found_file(tmp_path)) is (engine != "galvatron")
    path = str(found_file(tmp_path))
    assert export([path, "--to", engine, "--out", str(tmp_path / "e")]) == 0
    assert (tmp_path / "e" / "launch.sh").is_file()


def test_no_part_of_the_space_is_faster() -> None:
    """The best of the parts by hand is the one that is chosen."""
    chosen = choice_of("torchtitan").request
    best = open_session(chosen.inputs, chosen.options, chosen.given).planner.solve()

    rates = []
    for degree in (1, 2, 4, 8):
        for options in ({"pin": f"zero3=1,vzero3=1,tp={degree},vtp={degree}"}, None):
            raw = {**RAW, "async-grad-reduce": False}
            if options is None:
                raw |= {"default-dp-type": "zero2", "disable-sdp": True}
                options = {"pin": f"tp={degree},vtp={degree}"}
            request = build_request({**raw, "pin": [options["pin"]]})
            session = open_session(request.inputs, request.options, request.given)
            found = session.planner.solve().prediction
            rates.append(0.0 if found is None else found.samples_per_s)
    assert best.prediction is not None
    assert best.prediction.samples_per_s == pytest.approx(max(rates), rel=1e-12)


def test_what_was_typed_stays() -> None:
    """Options and rules of the command line are kept beside those that are added."""
    raw = {**RAW, "fine-grained-mode": True, "max-pp-deg": "2", "pin": ["tp=2"]}
    request = choice_of("megatron", **raw).request

    assert request.options.fine_grained_mode
    assert request.options.max_pp_deg == 2
    assert request.options.pin[0] == "tp=2"
    assert request.options.pin[1].startswith("tp=2,vtp=2")


def test_nothing_left_is_said() -> None:
    """Typed options may leave an engine nothing: exit code 3, and every reason."""
    with pytest.raises(InfeasibleError, match="deepspeed supports no plan of this search"):
        choice_of("deepspeed", pin=["pp=2"])


def test_an_impossible_rule_is_not_the_engines() -> None:
    """Without the engine there is no plan either, so the answer does not advise to leave it out."""
    with pytest.raises(InfeasibleError, match="--pin tp=6") as caught:
        choice_of("deepspeed", pin=["tp=6"])
    assert caught.value.remedy is None


def test_the_commonest_reason_is_the_first() -> None:
    """One degree may be illegal; that the engine has no such model is said of all others."""
    raw = {"model": "gpt2-xl", "hardware": "h100:1x1", "global-batch-size": "8"}
    with pytest.raises(InfeasibleError, match=r": torchtitan \S+ does not support an MLP that"):
        choice_of("torchtitan", **raw)


def test_a_given_plan_is_not_searched_for_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Its file names the engine."""
    assert run([*COMMAND, "--engine", "megatron", "--evaluate", "plan.json"]) == 2
    assert "--engine cannot be combined with --evaluate" in capsys.readouterr().err


def test_the_plan_file_is_priced_as_it_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--evaluate` uses stack and memory of the found engine, unless options replace them."""
    path = tmp_path / "autopar_plan_p.json"
    words = ["--model", "llama2-7b", "--hardware", "a100-40gb:1x8", "--global-batch-size", "64"]
    # rules of layers are for plans: those of megatron that keep to it
    plans = ["--engine", "megatron", "--pin", "pp=1"]
    assert run([*words, *plans, "--output-config-path", str(tmp_path / "p.json")]) == 0
    found = json.loads(path.read_text())
    assert found["request"]["memory-of"] == "megatron"

    def priced(*arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run(["--evaluate", str(path), "--json", "-", *arguments]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    for arguments in ((), words):
        again = priced(*arguments)
        assert again["fits"]
        assert again["step_time_s"] == found["step_time_s"]
        assert again["prediction"]["stages"] == found["prediction"]["stages"]
    assert not priced("--memory-constraint", "30")["fits"]


@pytest.mark.parametrize(
    ("first", "second"), [("megatron", "torchtitan"), ("torchtitan", "megatron")]
)
def test_an_export_to_another_engine_has_its_kernels(
    first: str, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time and memory are those of the same plan, searched for that engine."""
    pins = [
        "--pin",
        "tp=1,vtp=1,zero3=1,vzero3=1",
        "--no-async-grad-reduce",
        "--micro-batches",
        "4",
    ]
    of_first = plan_file(tmp_path / first, "--engine", first, *pins)
    of_second = plan_file(tmp_path / second, "--engine", second, *pins)
    found = [json.loads(path.read_text()) for path in (of_first, of_second)]
    assert read_strategy(of_first) == read_strategy(of_second)
    assert found[0]["step_time_s"] != pytest.approx(found[1]["step_time_s"], rel=0.05)
    capsys.readouterr()

    assert export([str(of_first), "--to", second, "--out", "none", "--json", "-"]) == 0
    after = json.loads(capsys.readouterr().out)["price"]["after"]
    assert after["step_time_s"] == pytest.approx(found[1]["step_time_s"], rel=1e-12)
    stages = found[1]["prediction"]["stages"]
    assert after["reserved_bytes"] == [stage["reserved_bytes"] for stage in stages]


def test_explain_takes_options_that_are_switched_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--no-X` beside a plan file counts: without sequence parallelism more memory is needed."""
    path = plan_file(tmp_path, "--pin", "tp=8,vtp=8")
    capsys.readouterr()

    def first_gib(*arguments: str) -> str:
        assert explain([str(path), *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        at = next(k for k, line in enumerate(lines) if line.startswith("Memory per GPU"))
        return lines[at + 2].split()[3]

    assert float(first_gib("--no-sequence-parallel")) > float(first_gib())


def test_plain_replicas_are_tried() -> None:
    """DeepSpeed without ZeRO reduces once per step, with it in every micro-batch."""
    raw = {"model": "gpt2-xl", "hardware": "a100-80gb:1x8", "mixed-precision": "fp32"}
    choice = choice_of("deepspeed", **{**raw, "global-batch-size": "1024", "micro-batches": "128"})
    assert choice.request.options.default_dp_type == "ddp"


def test_an_alternative_without_losses_is_found() -> None:
    """The best plan of a part recomputes layers of one stage only; one of one stage does not."""
    typed = {"pin": ["layers 0-0:ckpt=1"], "fine-grained-mode": True, "disable-sdp": True}
    # gradients of 2 bytes, with which such a best plan just fits
    typed["fp32-gradients"] = False
    raw = {**RAW, "hardware": "l40s:1x8", "global-batch-size": "128", **typed}
    choice = choice_of("megatron", **raw)

    request = choice.request
    assert request.options.pin[0] == "layers 0-0:ckpt=1"
    assert "pp=1" in request.options.pin
    (notice,) = choice.notices
    assert notice.count("'layers 0-0:ckpt=1'") == 1  # quoted, and only what was added
    assert "--disable-sdp" not in notice
    found = open_session(request.inputs, request.options, request.given).planner.solve()
    assert found.prediction is not None
    assert f"{found.prediction.samples_per_s:.5g} samples/s" in notice


def test_tensor_degrees_without_sequence_parallelism() -> None:
    """They have tables of their own where memory is estimated."""
    choice = choice_of("deepspeed", pin=["tp=2"])
    assert not choice.request.options.sequence_parallel
    assert "--no-sequence-parallel" in choice.notices[0]


def test_parts_say_how_their_engine_sums_gradients() -> None:
    """accelerate shards with FSDP2, whose sums are in bf16; what is typed stays."""
    rules = {"pin": ["zero3=1,vzero3=1"]}
    assert not choice_of("accelerate", **rules).request.options.fp32_gradients
    assert choice_of("torchtitan", **rules).request.options.fp32_gradients
    assert choice_of("deepspeed", **rules).request.options.fp32_gradients
    typed = choice_of("accelerate", **rules, **{"fp32-gradients": True}).request
    assert typed.options.fp32_gradients


def test_what_is_switched_off_stays_off() -> None:
    """`--no-fp32-gradients` and `--async-grad-reduce 1` are answers, no absence of one."""
    request = choice_of("torchtitan", **{"fp32-gradients": False}).request
    assert request.given["fp32-gradients"] is False


def test_a_rule_that_no_search_has_is_an_error() -> None:
    """As without --engine, and not a reason of the engine."""
    with pytest.raises(OptionError, match="layer 90"):
        choice_of("megatron", pin=["layers 90:tp=2"])
    with pytest.raises(InfeasibleError, match="8 GPUs"):
        choice_of("deepspeed", pin=["pp=2"])


LLAMA = {"model": "llama3-8b", "hardware": "h100:1x8", "global-batch-size": "64"}
SAID = [word for name, value in LLAMA.items() for word in (f"--{name}", value)]


def test_without_an_engine_the_best_of_all_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine's line is what its own search finds; the answer is that of the fastest."""
    out = tmp_path / "found.json"
    assert run([*SAID, "--json", str(out), "--output-config-path", str(tmp_path)]) == 0
    document = json.loads(out.read_text())
    lines = document["engines"]
    assert {line["engine"] for line in lines} == set(EXPORTERS)
    rates = [line["samples_per_s"] or 0.0 for line in lines]
    assert rates == sorted(rates, reverse=True)
    best = lines[0]
    assert best["launch"] == document["launch"]["degrees"]
    assert document["launch"]["samples_per_s"] == best["samples_per_s"]
    shown = " ".join(capsys.readouterr().out.split())
    assert "Fastest plan per engine" in shown
    for line in lines:
        alone = tmp_path / f"{line['engine']}.json"
        words = [*SAID, "--engine", line["engine"], "--json", str(alone)]
        assert run([*words, "--output-config-path", "none"]) == 0
        found = json.loads(alone.read_text())
        assert (line["launch"] is None) == (line["engine"] in ("galvatron", "paddlenlp"))
        if line["launch"] is None:
            assert found["samples_per_s"] == line["samples_per_s"]
            assert found["plan"] == line["plan"]
        else:
            assert found["launch"]["samples_per_s"] == line["samples_per_s"]
            assert found["launch"]["degrees"] == line["launch"]
    # the file of the launch has all lines, too, and is its engine's
    written = json.loads(found_file(tmp_path).read_text())
    assert [line["engine"] for line in written["engines"]] == [line["engine"] for line in lines]
    path = str(found_file(tmp_path))
    assert export([path, "--to", best["engine"], "--out", "none", "--json", "-"]) == 0


def with_rates(lines: tuple[EngineBest, ...], faster: float) -> tuple[EngineBest, ...]:
    """Return lines whose fastest plan is faster than the fastest launch by a share."""
    launch = max(line.samples_per_s or 0.0 for line in lines if line.launch is not None)
    plan = max(line.samples_per_s or 0.0 for line in lines if line.plan is not None)
    scaled = [
        replace(line, samples_per_s=line.samples_per_s * launch * (1.0 + faster) / plan)
        if line.plan is not None and line.samples_per_s is not None
        else line
        for line in lines
    ]
    return tuple(sorted(scaled, key=lambda line: -(line.samples_per_s or 0.0)))


@pytest.mark.parametrize(("faster", "wins"), [(0.004, False), (0.02, True)])
def test_a_plan_whose_layers_differ_has_to_win_by_more_than_prices_differ(
    faster: float,
    wins: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Then its report and its files are the answer, with the launch and the gain over it."""

    def scaled(request: Request, route: SearchChoice | None = None) -> ChosenPlans:
        found = chosen(request, route)
        lines = with_rates(found.lines, faster)
        assert found.launches is not None
        return replace(found, lines=lines, launches=replace(found.launches, lines=lines))

    monkeypatch.setattr(goals, "chosen", scaled)
    out = tmp_path / "found.json"
    assert run([*SAID, "--json", str(out), "--output-config-path", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    document = json.loads(out.read_text())
    assert len(document["engines"]) == len(EXPORTERS)
    if wins:
        assert "Fastest plan: paddlenlp, " in shown
        assert f"Fastest uniform plan (per-layer plan: +{faster * 100:.1f} %): " in shown
    else:
        assert "Fastest plan: Megatron-LM, " in shown
    path = found_file(tmp_path)
    written = json.loads(path.read_text())
    assert written["engines"] == [
        {key: line[key] for key in written["engines"][0]} for line in document["engines"]
    ]
    if not wins:
        assert document["launch"]["engine"] == "megatron"
        assert is_launch(path)
        return
    assert document["plan"] == document["engines"][0]["plan"]
    assert read_strategy(path) == read_strategy(document)
    assert written["options"]["engine"] == document["engines"][0]["engine"] == "paddlenlp"
    launch = next(line["launch"] for line in document["engines"] if line["launch"] is not None)
    assert launch["tp"] * launch["dp"] == 8


def test_where_no_engine_has_anything_each_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The smallest launch of a trainer with what it lacks, and the others' reasons."""
    words = [*SAID, "--memory-constraint", "3", "--output-config-path", "none"]
    assert run(words) == 3
    said, line = capsys.readouterr()
    assert line.count("\n") == 1
    rows = {row.split()[0]: row for row in said.splitlines() if row and row[0] != " "}
    for engine in ("megatron", "galvatron"):
        assert re.match(rf"{engine} +[0-9.]+ [GM]iB  \S", rows[engine])
    assert run([*words, "--verbose"]) == 3
    assert "megatron: no plan fits: the smallest, " in capsys.readouterr().out


def test_a_limit_of_time_is_of_all_engines_together() -> None:
    """And every engine that has begun says what it has found by then."""
    request = build_request({**LLAMA, "hardware": "h100:8x8", "time-limit": "0.5"})
    began = time.process_time()
    found = chosen(request)
    # inputs are read, and smallest launches priced, whatever the limit
    assert time.process_time() - began < 20.0
    assert len(found.lines) == len(EXPORTERS)
    assert found.launches is not None
    assert found.launches.best is not None


def test_a_degree_is_a_rule_for_plans_beside_launches() -> None:
    """One that they do not have leaves them out, with the reason."""
    for given, expected in (({"tp": "2"}, True), ({"vpp": "2"}, False)):
        request = build_request({**LLAMA, **given})
        line = next(line for line in chosen(request).lines if line.engine == "galvatron")
        assert (line.plan is not None) == expected
        if line.plan is not None:
            assert {strategy.tp for strategy in line.plan.layers} == {2}
        else:
            assert "--vpp" in line.reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"mixed-precision": "fp16"}, True),
        ({"stack": "megatron-core"}, False),
        ({"memory-of": "deepspeed"}, False),
        ({"pin": ["tp=2"]}, False),
        ({"max-pp-deg": "1"}, False),
        ({"model": None}, False),
        ({"hardware": "a100-80gb_1x8"}, False),
    ],
)
def test_when_all_engines_are_asked(changes: dict[str, object], expected: bool) -> None:
    """Where times are estimated, and nobody says what is searched or whose software it is."""
    raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    assert searches_all_engines(build_request(raw)) is expected


def test_a_reserve_is_given_in_one_way() -> None:
    """A share, or the odds that it follows from."""
    with pytest.raises(OptionError, match=r"--oom-risk.*--reserve"):
        build_request({**LLAMA, "oom-risk": "0.1", "reserve": "0.1"})
