"""Plan files of format `autopar-run`: written and read again, damaged, and older files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from autopar.documents.plan import HardwareEntry, PlanDocument, RunDocument, read_strategy
from autopar.documents.spec import load_spec
from autopar.errors import DocumentError
from autopar.records import replace
from autopar.run.of_plan import run_of_plan
from autopar.run.plan import Plan, violations
from autopar.run.run import Run, Word, run_with_split
from autopar.training.adapters import Adapters
from search.engines.candidate import recompute_words
from search.planning.uniform.files import choice_of, is_launch, read_launch
from search.questions.given import given_launch
from tests.unit.engines.test_writing import searched
from tests.unit.run.test_of_plan import plans

HARDWARE = HardwareEntry(card="h100-80gb", num_nodes=1, num_gpus_per_node=8)
DATA = Path(__file__).resolve().parent.parent.parent / "data"


def written(run: Run, **figures: Any) -> dict[str, Any]:
    """Return the object of the file of a run, after JSON."""
    text = RunDocument.of(run, HARDWARE, figures).text()
    found: dict[str, Any] = json.loads(text)
    return found


RUNS = {
    "dense": searched("megatron", tp=2, pp=2, vpp=2, recompute="core_attn+layernorm"),
    "blocks": searched("megatron", zero=1, dp_replicate=2, micro_batch=2, recompute="block 3"),
    "moe": searched("megatron", "mixtral-8x7b", ep=8, zero=0, recompute="moe_act"),
    "mla": searched("megatron", "deepseek-v3", ep=8),
    "windows": searched("torchtitan", "gpt-oss-20b", zero=3),
    "fp8": searched("megatron", zero=3, cp=2, cp_kind="a2a", precision="fp8", recompute="full"),
    "offload": searched("megatron", recompute="layernorm", offload="core_attn+qkv_linear"),
    "zbv": searched("torchtitan", pp=2, vpp=2, schedule="zero_bubble_v", zero=3),
    "compiled": searched("torchtitan", zero=3, compiled=True, recompute="op"),
    "hsdp": searched("accelerate", zero=3, dp_replicate=2, cp=2),
    "deepspeed": searched("deepspeed", zero=2, tp=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_uniform_plan_is_read_as_it_was_written(name: str) -> None:
    """Of every engine, with adapters, arguments that no field holds, and steps."""
    adapters = Adapters(rank=8, targets=frozenset({"query"}))
    runtime = replace(RUNS[name].runtime, adapters=adapters)
    word = Word("--seed", ("1", "2"))
    more = replace(RUNS[name], runtime=runtime, steps=50, unread=(word,))
    for run in (RUNS[name], more):
        document = RunDocument.parse(written(run, price={}))
        assert document.run == run
        assert document.is_uniform
        assert document.hardware == HARDWARE


@given(plans())
def test_a_per_layer_plan_is_read_as_it_was_written(plan: Plan) -> None:
    spec = load_spec("llama2-7b")
    if violations(plan, spec, sequence_parallel=True):
        return
    run = run_of_plan(plan, spec, engine="none", gpu="a100-80gb", keeper="galvatron")
    content = written(run, status="optimal", step_time_s=0.5, request={"model": "llama2-7b"})
    assert RunDocument.parse(content).run == run
    document = PlanDocument.parse(content)
    assert (document.step_time_s, document.request) == (0.5, {"model": "llama2-7b"})
    again = read_strategy(document)
    if all(one.zero3 for one in plan.layers) and plan.vocab.zero3:
        # nothing is left that the default is of
        again = replace(again, default_dp_type=plan.default_dp_type)
    assert again == plan


@pytest.mark.parametrize("name", RUNS)
def test_a_choice_is_that_of_its_run(name: str) -> None:
    """Reports name the degrees of the choice, which the file does not hold."""
    choice, run = choice_of(RUNS[name]), RUNS[name]
    assert (choice.pp, choice.chunks) == (run.strategy.pp, run.strategy.stages)
    assert choice.recompute == recompute_words(run.strategy.recomputed)


def test_a_uniform_plan_is_a_plan_of_alike_layers() -> None:
    """For tools of per-layer plans, unless it has what such a plan cannot hold."""
    document = PlanDocument.parse(written(RUNS["dense"], price={}, step_time_s=2.0))
    plan = read_strategy(document)
    assert {(one.tp, one.recompute) for one in plan.layers} == {(2, ("core_attn", "layernorm"))}
    assert (plan.num_stages, plan.num_chunks, plan.chunk_sizes) == (2, 2, ())
    assert (document.options.engine, document.options.mixed_precision) == ("megatron", "bf16")
    assert document.step_time_s == 2.0
    for name, why in (("blocks", "replicas"), ("fp8", "fp8 or fp4"), ("hsdp", "replicas")):
        with pytest.raises(DocumentError, match=why):
            PlanDocument.parse(written(RUNS[name], price={}))
    ulysses = run_with_split(RUNS["dense"], cp=2, cp_kind="a2a")
    with pytest.raises(DocumentError, match="--cp-kind a2a"):
        PlanDocument.parse(written(ulysses, price={}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 3),
        ("format", "autopar-plan"),
        ("strategy.gpus", 0),
        ("strategy.layers[0].split.tp", "two"),
        ("strategy.layers[0].split.zero", 4),
        ("strategy.layers[0].split.recompute", ["lm_head"]),
        ("strategy.layers[0].count", 31),
        ("strategy.layers", []),
        ("strategy.stages", []),
        ("strategy.stages[0]", []),
        ("strategy.stages[0][0]", [True, [0], 0]),
        ("strategy.stages", [[[True, [0, 0], 0, True]]]),
        ("strategy.micro_batch", 10**30),
        ("model.layers[0].layer.mlp", {"kind": "mlps", "width": 8}),
        ("model.layers[0].layer.mixers[0].heads", -1),
        ("model.layers[0].layer.mixers[0].dropout", 1e400),
        ("model.repeat", 2),
        ("runtime.precision.kind", "fp8"),
        ("runtime.adapters", {"rank": 0}),
        ("runtime", None),
        ("seq_length", 2.5),
        ("hardware.num_nodes", True),
        ("prediction.stages", {}),
        ("tp", 2),
    ],
)
def test_a_damaged_file_is_refused(key: str, value: object) -> None:
    """With its key, or that of what contradicts it."""
    content = copy.deepcopy(written(RUNS["dense"], price={}, prediction={"stages": []}))
    at: Any = content
    *folders, last = key.replace("[", ".").replace("]", "").split(".")
    for folder in folders:
        at = at[int(folder)] if folder.isdigit() else at[folder]
    at[int(last) if last.isdigit() else last] = value
    with pytest.raises(DocumentError) as refused:
        RunDocument.parse(content, "p.json")
    named = refused.value.key or ""
    assert named.split(".")[0].split("[")[0] in {key.split(".")[0].split("[")[0], "strategy"}
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.whole
def test_stored_files_have_the_price_that_they_say() -> None:
    """`autopar-launch`, as written before runs were stored, and a run of the same question."""
    paths = DATA / "launch_v1.json", DATA / "run_v2.json"
    old, new = (json.loads(path.read_text()) for path in paths)
    stored = {**old["launch"]["predicted"], "samples_per_s": old["launch"]["samples_per_s"]}
    assert {**new["price"], "samples_per_s": new["samples_per_s"]} == stored
    for path in paths:
        assert is_launch(path)
        best = given_launch(str(path), {}, lambda text: None).one.best
        assert best is not None
        step = best.assessment.step
        assert step is not None
        assert step.total_s == pytest.approx(stored["step_time_s"], rel=1e-12)
        assert best.samples_per_s == pytest.approx(stored["samples_per_s"], rel=1e-12)
    assert read_launch(paths[0]).run == read_launch(paths[1]).run
