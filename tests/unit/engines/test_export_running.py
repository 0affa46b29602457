"""How engines run a plan: options that differ, the price of them, and a search that has none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import INFEASIBLE, UnsupportedError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.commands import export as export_cli, search as cli
from search.engines.galvatron.plan import strategy_text
from search.engines.plans import as_typed, different, lower_for
from search.engines.table import EXPORTERS
from search.planning import exports
from search.planning.exports import recommended_export
from search.request.request import ROWS
from tests.export_cases import HETEROGENEOUS, SMALL, job

STAGED = Plan(
    world_size=8,
    num_stages=2,
    stage_sizes=(4, 4),
    layers=(LayerStrategy(tp=2),) * 8,
    vocab=VocabStrategy(tp=2),
    global_batch=64,
    num_microbatches=4,
    default_dp_type="zero2",
)
FLAT = replace(STAGED, num_stages=1, stage_sizes=(8,))
ZERO3 = replace(FLAT, layers=(LayerStrategy(zero3=True),) * 8, vocab=VocabStrategy(zero3=True))
DDP = replace(ZERO3, layers=(LayerStrategy(),) * 8, vocab=VocabStrategy(), default_dp_type="ddp")
TENSOR = {"sequence_parallel": False}
ONCE, EACH = {"async_grad_reduce": True}, {"async_grad_reduce": False}
FP32, BF16 = {"fp32_gradients": True}, {"fp32_gradients": False}


@pytest.mark.parametrize(
    ("engine", "plan", "given", "expected"),
    [
        ("galvatron", HETEROGENEOUS, {}, {}),
        ("megatron", STAGED, {}, {"tp_overlap": False}),
        ("megatron", STAGED, {"tp_overlap": False}, {}),
        ("megatron", DDP, EACH, ONCE),
        ("megatron", ZERO3, {}, EACH),
        ("megatron", replace(ZERO3, num_microbatches=1), {}, {}),
        ("torchtitan", ZERO3, {}, EACH),
        ("torchtitan", ZERO3, BF16, {**EACH, **FP32}),
        ("torchtitan", STAGED, {}, {}),
        ("torchtitan", STAGED, BF16, FP32),
        ("torchtitan", STAGED, {**EACH, **BF16}, {**ONCE, **FP32}),
        ("torchtitan", ZERO3, {"precision": "fp32"}, EACH),
        ("deepspeed", ZERO3, {}, EACH),
        ("deepspeed", FLAT, {}, {**TENSOR, **EACH}),
        ("deepspeed", DDP, {}, BF16),
        ("deepspeed", DDP, {"precision": "fp16", **EACH}, {**ONCE, **BF16}),
        ("deepspeed", DDP, {"precision": "fp32"}, {}),
        ("accelerate", ZERO3, {}, BF16),
        ("accelerate", ZERO3, {**EACH, **BF16}, ONCE),
        ("accelerate", ZERO3, BF16, {}),
        ("accelerate", ZERO3, {"precision": "fp32"}, {}),
        ("accelerate", DDP, {}, {}),
        ("accelerate", DDP, BF16, FP32),
    ],
)
def test_what_an_engine_runs_otherwise(
    engine: str, plan: Plan, given: dict[str, object], expected: dict[str, bool]
) -> None:
    """Only what differs from the job, and nothing that makes no difference."""
    assert lower_for(engine)(job(plan, **given)).as_run == expected


def test_words_are_options_of_the_search() -> None:
    """Every flag is one that autopar-search takes."""
    names = {row.name for row in ROWS}
    for name in ("sequence_parallel", "async_grad_reduce", "fp32_gradients", "tp_overlap"):
        for value in (True, False):
            word = as_typed([(name, value)]).removeprefix("--").removeprefix("no-")
            assert word in names
    assert different(job(FLAT), FLAT, {"sequence_parallel": True}) == {}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with plans for llama2-7b, of which the engine's memory differs."""
    monkeypatch.chdir(tmp_path)
    big = {
        "layers": (LayerStrategy(zero3=True),) * 32,
        "stage_sizes": (32,),
        "global_batch": 32,
    }
    (tmp_path / "zero3.json").write_text(strategy_text(replace(ZERO3, **big)), encoding="utf-8")
    return tmp_path


def export(*arguments: str) -> int:
    """Export the plan of llama2-7b on one machine of 8 GPUs."""
    model = ("--model", "llama2-7b", "--hardware", "h100:1x8", "--no-async-grad-reduce")
    return export_cli.run(["zero3.json", *arguments, *model])


def reserved(*options: str) -> float:
    """Return the GiB that the plan reserves, by autopar-search --evaluate."""
    arguments = ("--evaluate", "zero3.json", "--model", "llama2-7b", "--hardware", "h100:1x8")
    cli.run([*arguments, *options, "--memory-constraint", "1000", "--json", "result.json"])
    document = json.loads(Path("result.json").read_text(encoding="utf-8"))
    return float(document["memory"][0]["reserved_bytes"]) / 2**30


def test_lossless_plans_are_priced_as_they_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The difference is that of two evaluations, one with the engine's options."""
    own = ("--memory-of", "torchtitan")
    before = reserved("--no-async-grad-reduce", "--no-fp32-gradients", *own)
    after = reserved("--no-async-grad-reduce", *own)
    capsys.readouterr()

    assert export("--to", "torchtitan", "--no-fp32-gradients", *own) == 0

    out = capsys.readouterr().out
    assert "Not supported" not in out
    assert "as the engine runs it (--fp32-gradients): +" in out
    assert f"{after - before:+.1f} GiB on stage 0" in out
    assert "it fits" in out


def test_what_an_engine_keeps_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan in the search's own bytes takes those of the engine, which is said."""
    before = reserved("--no-async-grad-reduce")
    after = reserved("--no-async-grad-reduce", "--memory-of", "deepspeed")
    assert abs(after - before) > 0.5
    capsys.readouterr()

    assert export("--to", "deepspeed") == 0
    out = capsys.readouterr().out
    change = f"{after - before:+.1f} GiB on stage 0"
    assert f"as the engine runs it (--memory-of deepspeed): +0.0 % time, {change}" in out


def test_plans_that_no_longer_fit_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between both figures of memory: exit 3 and the search that avoids it; then loud."""
    own = ("--no-fp32-gradients", "--memory-of", "accelerate")
    once = reserved("--async-grad-reduce", *own)  # accelerate leaves whole gradients until the step
    each = reserved("--no-async-grad-reduce", *own)
    assert once > each + 2
    limit = ("--memory-constraint", f"{(once + each) / 2:.2f}", *own)
    capsys.readouterr()

    assert export("--to", "accelerate", *limit) == INFEASIBLE
    err = capsys.readouterr().err
    assert "the plan does not fit as accelerate runs it:" in err
    assert "(--async-grad-reduce): " in err
    assert f"{once - each:+.1f} GiB on stage 0" in err
    (line,) = [line for line in err.splitlines() if "autopar-search --" in line]
    assert not (folder / "exports").exists()

    assert export("--to", "accelerate", *limit, "--allow-approx", "--json", "out.json") == 0
    captured = capsys.readouterr()
    assert "THE WRITTEN PLAN DOES NOT FIT" in captured.err
    assert "does not fit: " in captured.out
    document = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    assert document["as_run"] == {"async_grad_reduce": True}
    assert not document["price"]["after"]["fits"]
    assert document["price"]["before"]["fits"]

    # what it says to search for is exported without a word
    words = shlex.split(line.partition("autopar-search ")[2])
    cluster = ("--model", "llama2-7b", "--hardware", "h100:1x8", "--global-batch-size", "32")
    assert document["search"] == " ".join(words)
    assert cli.run([*words, *cluster, "--output-config-path", "found.json"]) == 0
    (plan,) = folder.glob("autopar_plan_*.json")
    capsys.readouterr()
    assert export_cli.run([str(plan), "--to", "accelerate", "--out", "other"]) == 0
    assert "as the engine runs it" not in capsys.readouterr().out


@pytest.mark.whole
@pytest.mark.parametrize("engine", [e for e in EXPORTERS if e != "galvatron"])
def test_refusals_name_a_search_without_losses(
    engine: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options in the line find a plan that goes through as it was priced."""
    (folder / "mixed.json").write_text(
        strategy_text(replace(HETEROGENEOUS, num_stages=1, stage_sizes=(8,))), encoding="utf-8"
    )
    from autopar.documents.spec import write_spec

    write_spec(SMALL, folder / "model.json")
    cluster = ("--model", "model.json", "--hardware", "h100:2x8")
    assert export_cli.run(["mixed.json", "--to", engine, *cluster]) == INFEASIBLE
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if "autopar-search --" in line]

    words = shlex.split(line.partition("autopar-search ")[2])
    batch = ("--global-batch-size", "64", "--output-config-path", "found.json")
    assert cli.run([*words, *cluster, *batch]) == 0
    (plan,) = folder.glob("autopar_plan_*.json")
    capsys.readouterr()
    assert export_cli.run([str(plan), "--to", engine]) == 0
    out = capsys.readouterr().out
    assert "Not supported" not in out
    assert "as the engine runs it" not in out


def test_a_stored_flag_is_switched_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--no-fp32-gradients`, as the report prints it, changes what a plan file says.

    Sums in another precision are no refusal, and are not passed over: they are priced and said.
    """
    model = ("--model", "llama2-7b", "--hardware", "h100:1x8", "--max-pp-deg", "1")
    arguments = [*model, "--fp32-gradients", "--output-config-path", str(tmp_path)]
    arguments += ["--memory-of", "accelerate"]
    assert cli.run([*arguments, "--pin", "zero3=1,vzero3=1,tp=1,vtp=1"]) == 0
    (path,) = (str(p) for p in tmp_path.glob("autopar_plan_*.json"))
    engine = ("--to", "accelerate", "--out", "none")

    capsys.readouterr()
    assert export_cli.run([path, *engine]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "as the engine runs it (--no-fp32-gradients): -" in out
    assert "FSDP2, as accelerate sets it up, sums gradients" in out
    assert "bf16" in out
    assert export_cli.run([path, *engine, "--no-fp32-gradients"]) == 0
    out = capsys.readouterr().out
    assert "as the engine runs it" not in out
    assert "sums gradients" not in out


def test_what_the_profiles_cannot_price_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory measured with sequence parallelism says nothing of an engine without it."""
    big = {"layers": (LayerStrategy(tp=2),) * 32, "stage_sizes": (32,), "global_batch": 32}
    Path("tp2.json").write_text(strategy_text(replace(FLAT, **big)), encoding="utf-8")
    found = root / "models" / "llama2-7b" / "configs"
    profile = Path("profile")
    shutil.copytree(found, profile)
    for file in profile.glob("memory_profiling_*"):
        document = json.loads(file.read_text(encoding="utf-8"))
        for key in [key for key in document if not key.endswith("_sp")]:
            if f"{key}_sp" in document:
                del document[key]
        file.write_text(json.dumps(document), encoding="utf-8")
    arguments = ["tp2.json", "--to", "deepspeed", "--out", "none", "--model", "llama2-7b"]
    arguments += ["--hardware", "h100:1x8", "--memory-profiling-path", str(profile)]
    arguments += ["--time-profiling-path", str(profile), "--allow-approx"]

    assert export_cli.run(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not priced: " in out
    assert "it fits" not in out
    assert export_cli.run([*arguments, "--json", "-"]) == 0
    price = json.loads(capsys.readouterr().out)["price"]
    assert price["after"] is None
    assert price["before"]["fits"]
    assert price["why"] in out


@pytest.mark.parametrize("name", ["t5-3b", "bert-large", "gpt2-xl", "mixtral-8x7b", "llama2-7b"])
@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_refusal_names_engines_that_take_the_plan(name: str, engine: str, stages: int) -> None:
    """Whoever is named takes it, without a loss where --allow-approx is not named too."""
    spec = load_spec(name)
    count = spec.num_layers
    plan = Plan(
        world_size=8,
        num_stages=stages,
        stage_sizes=(count // stages,) * stages,
        layers=(LayerStrategy(zero3=True),) * count,
        vocab=VocabStrategy(zero3=True),
        global_batch=64,
        num_microbatches=4,
    )
    asked = job(plan, spec, model=name)
    try:
        lower_for(engine)(asked)
    except UnsupportedError as error:
        said = str(recommended_export(asked, engine, error))
        found = re.search(r"[.] Export to (.+?) instead( with --allow-approx)?", said)
        assert found is not None, said
        named = re.split(", | or ", found[1])
        for other in named:
            assert (lower_for(other)(asked).losses == ()) == (found[2] is None)
        assert engine not in named
        assert said.count("\n") == 0


def test_nobody_else_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then that is said, or what else can be done."""
    monkeypatch.setattr(exports, "EXPORTERS", ("megatron",))
    for remedy, said in (("", "No other engine supports it"), ("Search again", "Search again")):
        error = recommended_export(
            job(ZERO3), "megatron", UnsupportedError("it is odd", remedy=remedy)
        )
        assert str(error) == f"it is odd. {said}"


def _searched(name: str, *words: str) -> None:
    """Write the plan of a search on one node to a file."""
    cluster = ("--hardware", "h100:1x8", "--global-batch-size", "64")
    asked = ("--model", name, *cluster, *words, "--top", "0", "--within", "0")
    assert cli.run([*asked, "--output-config-path", "plan.json"]) == 0


def test_the_search_for_another_engine_trains_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options on what is trained belong to it, those on degrees to the first engine."""
    _searched("llama3.2-1b", "--lora", "16", "--engine", "megatron", "--tp", "2")
    capsys.readouterr()
    asked = ["plan.json", "--to", "torchtitan", "--json", "-", "--allow-approx", "--out", "here"]
    assert export_cli.run(asked) == 0
    search = json.loads(capsys.readouterr().out)["search"]
    given = "--model llama3.2-1b --hardware h100:1x8 --within 0 --global-batch-size 64 --lora 16"
    assert search == f"{given} --engine torchtitan"


def test_an_engine_without_the_layers_of_a_hybrid_refuses_its_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rules on models come before the price, which knows no such layers."""
    _searched("nemotron-3-nano", "--engine", "megatron", "--seq-length", "2048")
    capsys.readouterr()
    assert export_cli.run(["plan.json", "--to", "torchtitan"]) == 2
    assert "illegal for torchtitan" in capsys.readouterr().err
