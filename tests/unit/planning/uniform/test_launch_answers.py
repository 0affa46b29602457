"""Launches of trainers with one set of degrees, from the command line to their files and back."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection
from pathlib import Path

import pytest

from autopar.errors import InputError, OptionError
from autopar.records import content_of, replace
from search.commands import check, explain, export, search as search_command
from search.engines.candidate import PRECISIONS
from search.planning.choose import TRAINERS, SearchChoice, route_of
from search.planning.uniform.answer import UniformResult, answer, open_launches
from search.planning.uniform.files import is_launch, read_launch
from search.request.degrees import DegreeOptions, fixed_of, rules_of
from search.request.request import build_request
from search.show.terminal import infeasible_lines
from search.show.uniform_files import launch_document, launch_result, launch_text

pytestmark = pytest.mark.whole

_SMALL = {
    "model": "mixtral-8x7b",
    "hardware": "h200:1x8",
    "seq-length": "4096",
    "global-batch-size": "64",
    "num-layers": "8",
}
_FIXED = {"engine": "megatron", "tp": "2", "ep": "4", "cp": "1", "micro-batch-size": "1,2"}


def _answer(**more: object) -> UniformResult:
    request = build_request({**_SMALL, **{key.replace("_", "-"): v for key, v in more.items()}})
    question = route_of(request).launches
    assert question is not None
    return answer(question)


@pytest.fixture(scope="module")
def small() -> UniformResult:
    return _answer(**{key.replace("-", "_"): value for key, value in _FIXED.items()})


def test_a_mixture_is_answered_with_launches_and_degrees_that_are_given_are_kept(
    small: UniformResult,
) -> None:
    best = small.best
    assert best is not None
    assert best.solved is not None
    for solution in best.solved.solutions:
        choice = solution.choice
        assert (choice.tp, choice.ep, choice.cp) == (2, 4, 1)
        assert choice.micro_batch in (1, 2)
        assert choice.precision == "bf16"
        assert solution.run.split.ep == 4
        assert solution.assessment.odds_of_oom <= 0.01


def test_the_fastest_comes_first_and_no_two_are_of_the_same_degrees(small: UniformResult) -> None:
    best = small.best
    assert best is not None
    assert best.solved is not None
    rates = [solution.samples_per_s for solution in best.solved.solutions]
    assert rates == sorted(rates, reverse=True)
    families = [
        (s.choice.pp, s.choice.tp, s.choice.cp, s.choice.ep, s.choice.etp)
        for s in best.solved.solutions
    ]
    assert len(set(families)) == len(families)


def test_a_file_makes_the_same_launch_again(
    small: UniformResult, stored: Path, tmp_path: Path
) -> None:
    """That of a run, and the object of `--json` with its degrees."""
    request = {**_SMALL, **_FIXED}
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(content_of(launch_document(small, request), whole=True)))
    best = small.best
    assert best is not None
    assert best.best is not None
    for file in (stored, path):
        assert is_launch(file)
        found = read_launch(file)
        assert found.engine == "megatron"
        assert (found.run, found.choice) == (best.best.run, best.best.choice)
    again = read_launch(stored, {"memory-constraint": "100"})
    assert again.run == best.best.run


def test_a_file_with_other_stages_than_it_says_is_refused(
    small: UniformResult, tmp_path: Path
) -> None:
    document = content_of(launch_document(small, {**_SMALL, **_FIXED}), whole=True)
    document["launch"]["degrees"]["layers_of_chunks"].append([1])
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match="does not describe pp"):
        read_launch(path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("launch.engine", "horovod", "expected 'megatron', 'torchtitan'"),
        ("launch.degrees.cp", 0, "launch.degrees.cp"),
        ("launch.degrees.tp", -2, "launch.degrees.tp"),
        ("launch.degrees.zero", -1, "expected 0, 1, 2 or 3"),
        ("launch.degrees.dp", 7, "is 7, but the rest of the file implies"),
        ("launch.degrees.edp", 7, "is 7, but the rest of the file implies"),
        ("launch.degrees.num_microbatches", 7, "the rest of the file implies"),
        ("launch.degrees.dp_replicate", 3, "is 3, which does not divide dp"),
        ("launch.degrees.recompute", "everything", "expected none, full, op, block N"),
        ("launch.degrees.layers_of_chunks", [[10**30]], "launch.degrees.layers_of_chunks"),
        ("hardware.num_nodes", 2, "is 2, but the rest of the file implies 1"),
        ("hardware.card", "a100", "'a100'"),
        ("model", "mixtral", "'mixtral-8x7b'"),
        ("seq_length", 2048, "2048"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_its_key(
    small: UniformResult, tmp_path: Path, key: str, value: object, said: str
) -> None:
    document = content_of(launch_document(small, {**_SMALL, **_FIXED}), whole=True)
    at = document
    *folders, name = key.split(".")
    for folder in folders:
        at = at[folder]
    at[name] = value
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        read_launch(path)
    assert f"key '{key}" in str(refused.value)


def test_the_object_of_json_names_every_degree(small: UniformResult) -> None:
    document = launch_result(small, {**_SMALL, **_FIXED})
    degrees = document["launch"]["degrees"]
    world = degrees["tp"] * degrees["cp"] * degrees["dp"] * degrees["pp"]
    assert world == 8
    assert degrees["ep"] * degrees["etp"] * degrees["edp"] * degrees["pp"] == 8
    batch = degrees["dp"] * degrees["micro_batch_size"] * degrees["num_microbatches"]
    assert batch == degrees["global_batch_size"] == 64
    assert sum(map(sum, degrees["layers_of_chunks"])) == 8
    assert document["launch"]["predicted"]["step_time_s"] > 0
    assert [one["engine"] for one in document["engines"]] == ["megatron"]


def test_from_a_search_to_the_arguments_of_its_trainer_the_price_stays(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in {**_SMALL, **_FIXED}.items() for word in (f"--{key}", value)]
    assert search_command.run([*words, "--json", "found.json", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert "Fastest plan: Megatron-LM" in shown
    assert "Search space" in shown
    (written,) = Path("configs").glob("autopar_plan_*.json")
    assert export.run([str(written), "--out", "out"]) == 0
    capsys.readouterr()
    assert check.run(["out/launch.sh", "--hardware", "h200:1x8", "--json", "-"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["launches"]
    found = json.loads(Path("found.json").read_text())["launch"]["predicted"]
    assert checked["step_time_s"] == pytest.approx(found["step_time_s"], rel=1e-9)
    assert checked["odds_of_oom"] == pytest.approx(found["odds_of_oom"], rel=1e-6)
    peaks = [stage["peak_bytes"] for stage in found["stages"]]
    assert [stage["peak_bytes"] for stage in checked["stages"]] == peaks


_DENSE = {
    "model": "llama3-8b",
    "hardware": "h100:2x8",
    "seq-length": "8192",
    "global-batch-size": "96",
}


@pytest.mark.parametrize(
    ("engine", "options", "says"),
    [
        *(
            ("torchtitan", {"schedule": name, "pp": "4"}, {"schedule": schedule})
            for name, schedule in (
                ("zbv", "zero_bubble_v"),
                ("DualPipeV", "dual_pipe_v"),
                ("zero-bubble", "interleaved_zero_bubble"),
                ("LoopedBFS", "looped_bfs"),
                ("gpipe", "gpipe"),
                ("interleaved", "interleaved"),
                ("1F1B", "1f1b"),
            )
        ),
        ("megatron", {"schedule": "interleaved", "pp": "4", "vpp": "2"}, {"vpp": 2}),
        ("megatron", {"cp": "4", "cp-kind": "a2a"}, {"cp_kind": "a2a"}),
        ("megatron", {"cp": "4", "cp-kind": "ring"}, {"cp_kind": "ring"}),
        ("megatron", {"cp": "4", "cp-kind": "all-gather"}, {"cp_kind": "all-gather"}),
        (
            "megatron",
            {"offload-activations": "core_attn+attn_proj"},
            {"offload": "attn_proj+core_attn"},
        ),
        ("megatron", {"offload-activations": "none"}, {"offload": "none"}),
        ("megatron", {"micro-batch-size": "3", "dp": "8"}, {"micro_batch_size": 3}),
        ("torchtitan", {"micro-batch-size": "3", "dp": "8"}, {"micro_batch_size": 3}),
        ("megatron", {"tp": "4", "tp-overlap": "1"}, {"tp_overlap": True}),
        ("megatron", {"tp": "4", "tp-overlap": "0"}, {"tp_overlap": False}),
        ("megatron", {"dp-replicate": "2", "cp": "2"}, {"dp_replicate": 2, "zero": 1}),
        ("torchtitan", {"dp-replicate": "2", "zero": "3"}, {"dp_replicate": 2}),
        ("torchtitan", {"lora": "16", "tp": "2", "pp": "2"}, {"tp": 2, "pp": 2}),
        ("torchtitan", {"dp-replicate": "2", "schedule": "zbv"}, {"dp_replicate": 2, "pp": 2}),
        ("accelerate", {"dp-replicate": "4", "zero": "3"}, {"dp_replicate": 4}),
        ("accelerate", {"dp-replicate": "2", "zero": "3", "cp": "2"}, {"dp_replicate": 2}),
        ("megatron", {**_SMALL, "tp": "2", "ep": "2", "etp": "4"}, {"etp": 4}),
    ],
)
def test_what_is_chosen_costs_the_same_when_its_trainer_s_file_is_read(
    engine: str,
    options: dict[str, str],
    says: dict[str, object],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {**_DENSE, "engine": engine, **options}
    words = [word for key, value in asked.items() for word in (f"--{key}", value)]
    assert search_command.run([*words, "--json", "found.json"]) == 0
    launch = json.loads(Path("found.json").read_text())["launch"]
    assert {key: launch["degrees"][key] for key in says} == says
    (written,) = Path("configs").glob("autopar_plan_*.json")
    assert export.run([str(written), "--out", "out"]) == 0
    capsys.readouterr()
    read = ["out/launch.sh", "--hardware", asked["hardware"]]
    assert check.run([*read, "--json", "-"]) == 0
    (checked,) = json.loads(capsys.readouterr().out)["launches"]
    assert checked["step_time_s"] == pytest.approx(launch["predicted"]["step_time_s"], rel=1e-12)
    peaks = [stage["peak_bytes"] for stage in launch["predicted"]["stages"]]
    counted = [stage["peak_bytes"] for stage in checked["stages"]]
    assert max(counted) == max(peaks)
    assert counted[0] == peaks[0]


def test_a_launch_is_priced_again_also_where_it_does_not_fit(
    small: UniformResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "launch.json"
    path.write_text(
        json.dumps(content_of(launch_document(small, {**_SMALL, **_FIXED}), whole=True))
    )
    assert search_command.run(["--evaluate", str(path), "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["status"] == "evaluated"
    first = content_of(launch_document(small, {}), whole=True)["launch"]
    assert again["launch"]["degrees"] == first["degrees"]
    step_s = first["predicted"]["step_time_s"]
    assert again["launch"]["predicted"]["step_time_s"] == pytest.approx(step_s, rel=1e-9)
    assert search_command.run(["--evaluate", str(path), "--memory-constraint", "16"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.fixture
def stored(small: UniformResult, tmp_path: Path) -> Path:
    path = tmp_path / "launch.json"
    path.write_text(launch_text(small, {**_SMALL, **_FIXED}))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "4"], "--tp: "),
        (["--micro-batch-size", "2"], "--micro-batch-size: "),
        (["--precision", "fp8"], "--precision: "),
        (["--pin", "tp=2"], "--pin: "),
        (["--reserve", "0.1"], "--reserve: "),
        (["--engine", "torchtitan"], "--engine"),
    ],
)
def test_what_would_be_ignored_beside_a_launch_is_refused(
    words: list[str], said: str, stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Degrees are those of the file; `--evaluate` took them in silence."""
    for run, asked in ((search_command.run, ["--evaluate"]), (explain.run, [])):
        assert run([*asked, str(stored), *words]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert err.count("\n") == 1


def test_another_batch_is_priced_of_the_same_degrees(stored: Path) -> None:
    first, other = read_launch(stored), read_launch(stored, {"global-batch-size": "128"})
    assert other.run.strategy == replace(first.run.strategy, global_batch=128)
    with pytest.raises(OptionError, match="a plan has one global batch"):
        read_launch(stored, {"min-bsz": "64", "max-bsz": "128"})
    with pytest.raises(InputError, match=r"world size\(3\) % "):
        read_launch(stored, {"hardware": "h200:1x3"})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("seq_length", 2048, "is 2048, but the rest of the file implies 4096"),
        ("gpu", "a100", "is 'a100', but the rest of the file implies 'h200"),
        ("strategy.gpus", 16, "is 16, but the rest of the file implies 8"),
        ("hardware.num_nodes", 2, "is 2, but the rest of the file implies 1"),
        ("runtime.engine", "galvatron", "expected 'megatron', 'torchtitan'"),
        ("strategy.micro_batch", 7, "global batch"),
    ],
)
def test_a_key_that_contradicts_the_others_is_refused(
    key: str, value: object, said: str, stored: Path
) -> None:
    document = json.loads(stored.read_text())
    *folders, name = key.split(".")
    at = document
    for folder in folders:
        at = at[folder]
    at[name] = value
    stored.write_text(json.dumps(document))
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        read_launch(stored)
    assert f"key '{key.split('.')[0]}" in str(refused.value)


def test_a_launch_is_explained_and_compared_with_others(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where its time and memory go, that nothing is faster, and what others take or lack."""
    assert explain.run([str(stored), "--why-not", "tp=1", "--verbose"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Plan: Megatron-LM", "Peak memory of stage ", "Fastest plan: it is this plan"):
        assert part in shown
    compared = shown.partition(" Plan: Megatron-LM")[0]
    assert "Why not tp=1 (without --cp and --ep and --micro-batch-size)" in compared
    # the terms add up to the total, and that to the difference of the rates
    terms = re.findall(r"([+-][\d.]+) ms", compared.partition("Difference per sequence")[2])
    *parts, total = map(float, terms)
    assert sum(parts) == pytest.approx(total, abs=0.03)
    row = re.search(r"samples/s ([\d.,]+) ([\d.,]+)", compared)
    assert row is not None
    rates = [float(one.replace(",", "")) for one in row.groups()]
    assert total == pytest.approx(1e3 / rates[1] - 1e3 / rates[0], rel=0.01, abs=0.01)

    # the same as a search with that degree alone
    best = _answer(engine="megatron", tp="1").best
    assert best is not None
    assert best.best is not None
    assert f" {best.best.samples_per_s:,.5g} " in row[0] + " "

    assert explain.run([str(stored), "--why-not", "pp=3"]) == 0
    assert "world size(8) % (tp(1) * cp(1) * pp(3)) = 2 != 0" in " ".join(
        capsys.readouterr().out.split()
    )
    assert explain.run([str(stored), "--why-not", "tq=2"]) == 2
    assert "Use compile, cp, dispatcher" in " ".join(capsys.readouterr().err.split())


def test_a_search_ends_though_nothing_was_found_in_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count(step=10)  # every look at the clock takes ten seconds
    monkeypatch.setattr(
        "search.planning.uniform.best_first.time.process_time", lambda: float(next(ticks))
    )
    found = _answer(engine="megatron", time_limit="1")
    assert found.best is None
    assert not found.engines[0].solved.complete  # type: ignore[union-attr]
    title, reason = infeasible_lines(found)
    assert "within the time limit" in title
    assert "--time-limit" in reason


def test_a_limit_of_time_leaves_a_launch_and_says_how_far_off_it_may_be() -> None:
    limited = _answer(engine="megatron", time_limit="0.001")
    best = limited.best
    assert best is not None
    assert best.solved is not None
    assert best.solved.gap >= 0.0
    free = _answer(engine="megatron").best
    assert free is not None
    assert free.best is not None
    assert best.best is not None
    fastest, found = free.best.samples_per_s, best.best.samples_per_s
    assert found <= fastest <= found * (1.0 + best.solved.gap) * (1.0 + 1e-9)


def test_gathered_keys_are_searched_where_they_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Else they are named under what is left out, with the option that lets them in."""
    asked = {**_SMALL, "engine": "megatron", "cp": "2", "tp": "2", "micro-batch-size": "1"}
    words = [word for key, value in asked.items() for word in (f"--{key}", value)]
    said = []
    for kind in ([], ["--cp-kind", "all-gather"]):
        wanted = [*words, *kind, "--verbose", "--output-config-path", "none"]
        assert search_command.run(wanted) == 0
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "not searched: context parallelism by all-gather (--cp-kind all-gather)" in said[0]
    assert "cp2 (all-gather)" not in said[0]
    assert "cp2 (all-gather)" in said[1]
    assert "(--cp-kind all-gather)" not in said[1]


def test_nothing_waits_on_the_host_where_it_is_as_fast_without() -> None:
    """Copies that are all hidden leave two launches equally fast."""
    asked = {"model": "llama3-70b", "hardware": "h100:8x8", "engine": "megatron"}
    asked |= {"seq-length": "8192", "global-batch-size": "512", "top": "0"}
    best = answer(open_launches(build_request(asked))).best
    assert best is not None
    assert best.best is not None
    assert best.best.choice.offload == "none"


@pytest.mark.parametrize(
    ("own", "compiled"),
    [
        ({}, True),
        ({"compile": False}, False),
        ({"stack": "torchtitan-eager"}, False),
        ({"schedule": "zbv", "pp": "2"}, False),
    ],
)
def test_layers_are_compiled_unless_something_speaks_against_it(
    own: dict[str, object], compiled: bool
) -> None:
    """Predicted, counted and written as what it is."""
    asked = {"model": "llama3-8b", "hardware": "h100:1x8", "engine": "torchtitan", "top": "0"}
    best = answer(open_launches(build_request({**asked, "seq-length": "8192", **own}))).best
    assert best is not None
    assert best.best is not None
    assert best.best.choice.compiled == compiled
    assert best.best.run.kernels.torch_layers
    assert best.best.run.kernels.compiled == compiled
    assert best.target.machine.stack.name == f"torchtitan-{'compiled' if compiled else 'eager'}"


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"engine": "megatron"}, "Megatron-LM"),
        ({"engine": "torchtitan", "schedule": "zbv", "pp": "2"},
         "torchtitan has no ZBV schedule for compiled layers"),
        ({"engine": "torchtitan", "stack": "torchtitan-eager"},
         "--stack"),
    ],
)  # fmt: skip
def test_what_compiles_no_layers_says_so(own: dict[str, object], said: str) -> None:
    """Or what compiled layers do not have."""
    asked = {"model": "llama3-8b", "hardware": "h100:1x8", "seq-length": "8192", "compile": True}
    with pytest.raises(InputError, match=re.escape(said)):
        answer(open_launches(build_request({**asked, **own})))


def test_what_modules_on_the_host_bring_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the fastest launch without, where nobody asked for either."""
    asked = ["--model", "llama3-8b", "--hardware", "h100:1x8", "--engine", "megatron"]
    asked += ["--seq-length", "8192", "--global-batch-size", "512", "--output-config-path", "none"]
    rates, slower = [], []
    for own in ([], ["--offload-activations", "none"], ["--offload-activations", "core_attn"]):
        assert search_command.run([*asked, *own]) == 0
        shown = capsys.readouterr().out
        rates += re.findall(r"([\d.]+) samples/s", shown)
        slower += re.findall(r"GiB per GPU; --offload-activations none is ([\d.]+) %", shown)
    any_s, none_s, _ = map(float, rates)
    (told,) = map(float, slower)
    assert told == pytest.approx(100 * (any_s / none_s - 1), abs=0.06)
    assert told > 0


@pytest.mark.parametrize(("tokens", "within"), [(8192, True), (4096, False)])
def test_a_safer_plan_is_that_of_its_own_search(tokens: int, within: bool) -> None:
    """It is named if it is at most 3 % slower; not by a search for safe plans or a stopped one."""
    asked = {"model": "gpt-oss-20b", "hardware": "h100:1x8", "engine": "megatron"}
    asked |= {"global_batch_size": "64", "seq_length": str(tokens)}
    fastest, safest, stopped = (
        answer(open_launches(build_request({key.replace("_", "-"): v for key, v in own.items()})))
        for own in (asked, {**asked, "oom_risk": "0.001"}, {**asked, "time_limit": "0.01"})
    )
    assert fastest.best is not None
    assert safest.best is not None
    first, last = fastest.best.best, safest.best.best
    assert first is not None
    assert last is not None
    assert last.assessment.odds_of_oom <= 0.001 < first.assessment.odds_of_oom
    assert (first.samples_per_s <= 1.03 * last.samples_per_s) == within
    assert fastest.best.safer == (last if within else None)
    assert safest.best.safer is None
    assert stopped.best is not None
    assert stopped.best.safer is None


@pytest.mark.parametrize(
    ("given", "zeros"),
    [
        # DeepSpeed offloads what is sharded
        ({"hardware": "h200:1x1", "engine": "deepspeed", "offload-optimizer": "1"}, {1}),
        ({"hardware": "h200:1x1", "engine": "megatron", "offload-optimizer": "1"}, {1}),
        # torchtitan has no flavour of fewer layers
        ({"hardware": "b300:1x1", "engine": "torchtitan", "num-layers": "32"}, {0}),
    ],
)
def test_one_data_rank_has_the_first_sharding_that_its_trainer_runs(
    given: dict[str, object], zeros: set[int]
) -> None:
    asked = {
        "model": "llama3-8b",
        "num-layers": "2",
        "global-batch-size": "8",
        "seq-length": "2048",
    }
    best = answer(open_launches(build_request({**asked, **given, "top": "0"}))).best
    assert best is not None
    assert best.solved is not None
    assert {solution.choice.zero for solution in best.solved.solutions} == zeros


@pytest.mark.parametrize(
    ("option", "value"),
    [("ep", "2"), ("etp", "2"), ("dispatcher", "flex"), ("moe-overlap", True), ("moe-skew", "2")],
)
def test_a_model_without_experts_has_no_settings_of_them(option: str, value: object) -> None:
    asked = {"model": "llama3-8b", "hardware": "h100:1x8", option: value}
    with pytest.raises(OptionError, match=f"--{option}: llama3-8b has no experts"):
        open_launches(build_request(asked))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--ep", "8", "--pin", "tp=4"], "--pin"),
        (
            ["--vpp", "2", "--max-tp-deg", "4", "--engine", "megatron"],
            "--max-tp-deg",
        ),
        (["--tp", "2,4", "--max-tp-deg", "4"], "Remove one of them"),
        (["--lora", "8", "--engine", "galvatron"], "--engine"),
    ],
)
def test_what_made_it_plans_whose_layers_may_differ_is_said(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", "llama3-8b", "--num-layers", "2", "--hardware", "h100:1x8"]
    assert search_command.run([*base, "--global-batch-size", "64", *given]) == 2
    assert said in capsys.readouterr().err


def test_what_does_not_fit_ends_with_3_and_names_the_trainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for key, value in {**_SMALL, **_FIXED}.items() for word in (f"--{key}", value)]
    code = search_command.run([*words, "--memory-constraint", "4", "--output-config-path", "none"])
    assert code == 3
    said = capsys.readouterr().out
    assert re.search(r"\nmegatron +[0-9.]+ GiB  \S", said)


_OTHERS = ("galvatron", "paddlenlp")
_EVERY = {*TRAINERS, *_OTHERS}
_PLAIN = {"model": "llama3-8b", "num-layers": "32"}


def _of(given: dict[str, object]) -> tuple[SearchChoice, set[str], set[str]]:
    """Return the route of a request, and whose launches and plans it asks."""
    route = route_of(build_request({**_SMALL, **given}))
    launches = set() if route.launches is None else {one.name for one in route.launches.engines}
    return route, launches, set(route.layered)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": "6"}, "heads\\(32\\) % tp\\(6\\) = 2 != 0"),
        (
            {"tp": "2", "cp": "8"},
            r"world size\(8\) % \(tp\(2\) \* cp\(8\) .* = 8 != 0.*[.] Use --tp 1",
        ),
        (
            {"vpp": "2", "pp": "1"},
            "vpp\\(2\\)",
        ),
        ({"vpp": "7"}, r"vpp\(7\).* and no other value of pp makes it legal.*[.] Use --vpp 2 or 4"),
        (
            {"pp": "2", "vpp": "3", "engine": "megatron"},
            "--vpp",
        ),
        ({"ep": "3"}, "experts\\(8\\) % ep\\(3\\) = 2 != 0"),
        (
            {"zero": "2", "engine": "megatron"},
            "Megatron-LM has no ZeRO stage 2[.] Use --zero 0 or 1",
        ),
        ({"precision": "nvfp4"}, "Megatron-LM"),
        ({"recompute": "op", "engine": "megatron"}, "--rec"),
        ({"recompute": "block 8", "engine": "megatron"}, "Use --recompute 'block 7' or 'block 6'"),
        (
            {"offload-activations": "attn_norm", "engine": "megatron"},
            "--offload-activations",
        ),
        (
            {"offload-activations": "core_attn", "recompute": "full", "engine": "megatron"},
            "recomputation of whole layers. Use --",
        ),
        (
            {"global-batch-size": "3", "tp": "2", "pp": "1", "cp": "1"},
            r"global batch\(3\) % .* != 0, and no ",
        ),
        ({"optimizer": "adam8bit", "engine": "megatron"}, "Use 16-bit moments"),
        (
            {"dispatcher": "flex", "engine": "torchtitan", "ep": "8"},
            "torchtitan .* has no model of 8",
        ),
    ],
)
def test_what_no_trainer_has_is_an_input_error_with_its_reason(
    given: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in {**_SMALL, **given}.items() for word in (f"--{key}", value)]
    assert search_command.run([*map(str, words), "--output-config-path", "none"]) == 2
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


@pytest.mark.parametrize(
    ("given", "launches", "layered"),
    [
        ({}, TRAINERS, _OTHERS),
        ({"engine": "any"}, TRAINERS, _OTHERS),
        ({"engine": "torchtitan"}, ["torchtitan"], ()),
        ({"stack": "megatron-core"}, TRAINERS, _OTHERS),
        ({**_PLAIN}, TRAINERS, _OTHERS),
        ({**_PLAIN, "vpp": "2"}, TRAINERS, _OTHERS),
        ({**_PLAIN, "engine": "megatron"}, ["megatron"], ()),
        ({**_PLAIN, "engine": "megatron", "mixed-precision": "bf16"}, ["megatron"], ()),
        ({**_PLAIN, "engine": "accelerate", "time-limit": "5"}, ["accelerate"], ()),
        ({**_PLAIN, "stack": "megatron-core", "engine": "any"}, TRAINERS, _OTHERS),
        # torchtitan has no flavour of these sizes, and its recipes of plans are written
        ({"model": "llama2-7b", "num-layers": "32"}, {*TRAINERS} - {"torchtitan"}, None),
    ],
)
def test_which_requests_are_for_launches(
    given: dict[str, object], launches: Collection[str], layered: Collection[str] | None
) -> None:
    """Those that are estimated; beside them stand plans of the engines without launches."""
    route, trainers, others = _of(given)
    assert trainers == set(launches)
    assert others == (_EVERY - trainers if layered is None else set(layered))
    assert route.why == ""


@pytest.mark.parametrize(
    ("given", "layered", "why"),
    [
        ({"engine": "galvatron"}, ["galvatron"], ""),
        ({"engine": "none"}, (), ""),
        ({"max-cp-deg": "2"}, (), "--max-cp-deg"),
        ({**_PLAIN, "pin": ["tp=2"]}, (), "--pin"),
        (
            {**_PLAIN, "pin": ["tp=2"], "engine": "megatron"},
            ["megatron"],
            "--pin",
        ),
        ({**_PLAIN, "reserve": "0.1"}, _EVERY, "--reserve"),
        ({**_PLAIN, "cp-kind": "all-gather"}, _EVERY, "--cp-kind"),
        ({**_PLAIN, "stack": "megatron-core"}, (), "--stack"),
        ({"model": "t5-3b", "num-layers": "4,4", "seq-length": "512,512"}, _EVERY, "decoder-only"),
        (
            {"model": "llama2-7b", "num-layers": "8", "engine": "torchtitan"},
            ["torchtitan"],
            "torchtitan 0.2.2 has no model of 8 layers",
        ),
    ],
)
def test_which_requests_are_for_plans_whose_layers_may_differ(
    given: dict[str, object], layered: Collection[str], why: str
) -> None:
    """And why, where one may have expected launches."""
    route, trainers, others = _of(given)
    assert trainers == set()
    assert others == set(layered)
    assert why in route.why
    assert bool(why) == bool(route.why)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hardware": "h200:1x16"}, "connects at most 8 GPUs of a node, got 16"),
        ({"site": "selene-a100"}, "h200"),
    ],
)
def test_a_cluster_that_its_card_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    """As for plans: launches were priced on nodes of any size."""
    with pytest.raises(InputError, match=said):
        open_launches(build_request({**_SMALL, **given}))


def test_a_shape_beside_a_card_that_says_otherwise_is_refused() -> None:
    """As for plans: it was ignored."""
    with pytest.raises(OptionError, match="--nodes: 2 contradicts --hardware h200:1x8"):
        open_launches(build_request({**_SMALL, "num-nodes": "2"}))


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ({}, 1024),  # 4 Mi tokens of 4,096
        ({"lora": "8"}, 128),
        ({"sft": True}, 128),
        ({"lora": "8", "hardware": "h100:3x4"}, 132),  # a multiple of the GPUs
    ],
)
def test_a_batch_that_is_not_given_is_that_of_the_kind_of_training(
    given: dict[str, object], batch: int
) -> None:
    options = {"model": "llama2-7b", "hardware": "h100:1x8", "seq-length": "4096", **given}
    question = route_of(build_request(options)).launches
    assert question is not None
    assert question.job.global_batches == (batch,)
    assert any(f"--global-batch-size {batch} " in one for one in question.assumed)


def test_lists_of_degrees_are_read_and_what_is_none_is_refused() -> None:
    read = build_request(
        {"tp": "2,4", "recompute": "none,mlp+core_attn, block 4", "precision": "any"}
    ).degrees
    assert read.tp == (2, 4)
    assert read.recompute == ("none", "core_attn+mlp", "block 4")
    assert fixed_of(read).precision == PRECISIONS
    with pytest.raises(OptionError, match=r"--recompute: .*got 'core-atn'"):
        build_request({"recompute": "core-atn"})
    with pytest.raises(OptionError, match=r"--precision: .*Did you mean"):
        build_request({"precision": "fp"})
    with pytest.raises(OptionError, match="--zero: expected an integer"):
        build_request({"zero": "4"})
    found = build_request({"schedule": "ZBVZeroBubble, 1f1b,zero-bubble"}).degrees.schedule
    assert found == ("zero_bubble_v", "1f1b", "interleaved_zero_bubble")
    with pytest.raises(OptionError, match=r"--schedule.*'zvb'.*'zbv'"):
        build_request({"schedule": "zvb"})
    words = "none, moe-act+Core_attn"
    found = fixed_of(build_request({"offload-activations": words}).degrees)
    assert found.offload == ("none", "core_attn+moe_act")
    assert fixed_of(build_request({"offload-activations": "any"}).degrees).offload is None
    with pytest.raises(OptionError, match=r"--offload-activations: .*got 'core_atn'"):
        build_request({"offload-activations": "core_atn"})
    with pytest.raises(OptionError, match=r"Use attn_proj\+core_attn$"):
        build_request({"offload-activations": "attn_proj"})


def test_single_degrees_are_rules_of_plans_whose_layers_may_differ() -> None:
    rules = rules_of(DegreeOptions(tp=(4,), cp=(2,), pp=(2,), zero=(3,), recompute=("full",)))
    assert rules == {"pin": ("tp=4,pp=2,cp=2,ckpt=1,zero3=1",), "max_cp_deg": 2}
    assert rules_of(DegreeOptions(ep=(1,), precision=("bf16",))) == {}
    assert rules_of(DegreeOptions(zero=(1,)))["default_dp_type"] == "zero1"
    with pytest.raises(OptionError, match="--ep"):
        rules_of(DegreeOptions(ep=(8,)))
    with pytest.raises(OptionError, match="--tp"):
        rules_of(DegreeOptions(tp=(2, 4)))


def test_what_a_precision_brings_is_said_in_terms(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the fastest launch in 16 bits, which is that of a search of its own."""
    asked = {**_PLAIN, "hardware": "h100:1x8", "global-batch-size": "64", "engine": "megatron"}
    words = [word for key, value in asked.items() for word in (f"--{key}", value)]
    rates = []
    for precision in ("bf16,fp8", "bf16"):
        wanted = [*words, "--precision", precision, "--output-config-path", "none"]
        assert search_command.run(wanted) == 0
        said = " ".join(capsys.readouterr().out.split())
        rates.append(float(re.search(r"([0-9.]+) samples/s", said)[1]))  # type: ignore[index]
        found = re.search(r"the fastest bf16 plan is ([0-9.]+) % slower: GEMM \+", said)
        assert (found is None) == (precision == "bf16")
        if found is not None:
            slower = float(found[1])
    assert slower == pytest.approx(100 * (rates[0] / rates[1] - 1), abs=0.1)


def test_an_export_says_what_was_predicted(
    stored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the launch's own trainer, in the units and with the interval of the search."""
    assert search_command.run(["--evaluate", str(stored)]) == 0
    (found,) = re.findall(r"^  Tokens/s/GPU .*$", capsys.readouterr().out, re.MULTILINE)
    assert export.run([str(stored), "--out", "none"]) == 0
    assert found.split() in [line.split() for line in capsys.readouterr().out.splitlines()]

    assert export.run([str(stored), "--out", "none", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    low, high = predicted["tokens_per_s_per_gpu_interval"]
    assert low < predicted["tokens_per_s_per_gpu"] < high
    figures = f" {predicted['tokens_per_s_per_gpu']:,.0f} {low:,.0f} to {high:,.0f} "
    assert figures in " ".join(found.split())
