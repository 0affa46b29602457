"""Command, Python and exploration give one answer to one question, under the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.documents.plan import write_strategy
from autopar.errors import InputError, OptionError
from autopar.run.of_plan import UniformPlan
from benchmarks import same_answers
from search.planning.frontier import least_budget
from search.request.interface import changed, request_of
from search.request.request import build_request

SMALL: dict[str, Any] = {
    "model": "llama3-8b",
    "hardware": "h100:1x8",
    "global_batch_size": 64,
    "num_layers": 4,
    "seq_length": 4096,
}


@pytest.mark.parametrize(
    "more",
    [
        {"engine": "megatron"},
        {"engine": "megatron", "memory_constraint": 8.0, "tp": 2},
        {"engine": "galvatron"},
        {"engine": "none", "micro_batches": 8},
        {"pin": "pp=2"},
        {"default_dp_type": "any"},
        {"engine": "deepspeed", "memory_constraint": 2.0},
        {"engine": "galvatron", "vpp": 2},
        {"engine": "megatron", "global_batch_size": 7, "pp": 8},
    ],
)
def test_every_door_gives_the_answer_of_the_command(more: dict[str, Any]) -> None:
    """Equal time, memory and degrees; or no plan fits, or all refuse the question."""
    assert [*same_answers.differences(SMALL | more, None)] == []


def test_python_searches_every_engine() -> None:
    """`plan` once searched only per-layer plans: 7.95 samples/s where the command finds 11.0."""
    options = {name: value for name, value in SMALL.items() if name not in ("model", "hardware")}
    answer = autopar.search("llama3-8b", "h100:1x8", **options)
    result = autopar.plan("llama3-8b", "h100:1x8", **options)
    assert result.prediction is not None
    assert result.prediction.samples_per_s == answer["launch"]["samples_per_s"]
    assert result.to_dict()["launch"] == answer["launch"]
    assert [one.engine for one in result.engines] == [one["engine"] for one in answer["engines"]]
    assert result.rows()[0]["samples_per_s"] == answer["launch"]["samples_per_s"]
    assert "Megatron-LM" in repr(result)


@pytest.fixture(scope="module")
def planner() -> autopar.Planner:
    """Planner of a question whose answer is uniform."""
    options = {name: value for name, value in SMALL.items() if name not in ("model", "hardware")}
    # the frontier is that of the fastest plans
    return autopar.Planner("llama3-8b", "h100:1x8", engine="megatron", within=0.0, **options)


def test_every_point_of_the_frontier_is_the_answer_at_its_budget(
    planner: autopar.Planner,
) -> None:
    """And its plan fits in no smaller budget than that which the next one begins below."""
    points = planner.frontier()
    assert len(points) > 8
    last = points[-1]
    assert (last.plan, last.status, last.bound_samples_per_s) == (None, "infeasible", 0.0)
    assert last.infeasibility is not None
    assert last.to_dict()["status"] == "infeasible"
    for point in points[:-1:5]:
        budget = point.options["memory_constraint_bytes"]
        assert isinstance(budget, int | float)
        again = planner.solve(memory_constraint_bytes=budget, top=0)
        assert again.prediction is not None
        assert point.prediction is not None
        assert point.prediction.samples_per_s == again.prediction.samples_per_s
        assert planner.evaluate(again.plan, least_budget(again)).fits  # type: ignore[arg-type]
        assert not planner.evaluate(again.plan, least_budget(again) - 2.0).fits  # type: ignore[arg-type]


def test_the_smallest_budget_is_sufficient(planner: autopar.Planner) -> None:
    """It is in bytes of the device, of which allocations get a part."""
    why = planner.solve(memory_constraint_gib=2.0).infeasibility
    assert why is not None
    assert why.smallest_budget_bytes == 2 * 2**30 + why.missing_bytes
    assert planner.solve(why.smallest_budget_bytes, top=0).plan is not None
    assert planner.solve(why.smallest_budget_bytes - 2, top=0).plan is None


@pytest.mark.parametrize("engine", ["megatron", "galvatron"])
def test_a_frontier_without_a_plan_is_its_reason(engine: str) -> None:
    """Also for per-layer plans of an engine, whose search raises an error."""
    options = {"engine": engine, "fine_grained_mode": True, "global_batch_size": 64}
    planner = autopar.Planner("llama3-70b", "h100:1x2", **options)
    (point,) = planner.frontier()
    assert point.plan is None
    assert point.infeasibility is not None
    assert point.infeasibility.reason


def test_live_micro_batches_are_those_of_the_schedule() -> None:
    """Interleaved stages hold more than 1F1B: a chunk counts as its part."""
    result = autopar.plan(**SMALL | {"num_layers": 16}, engine="megatron", pp=4, vpp=2, tp=1)
    assert result.prediction is not None
    assert [stage.in_flight for stage in result.prediction.stages] == [6, 5, 4, 3]


@pytest.mark.whole
def test_a_frontier_has_the_best_of_all_engines() -> None:
    """Engines whose plans are slower at more memory may win at less."""
    small = {"num_layers": 2, "seq_length": 2048, "global_batch_size": 8}
    planner = autopar.Planner("llama3-8b", "h100:1x4", within=0.0, **small)
    points = planner.frontier()
    for point in points[1:-1:16]:
        budget = float(point.options["memory_constraint_bytes"])  # type: ignore[arg-type]
        again = planner.solve(memory_constraint_bytes=budget, top=0)
        assert point.prediction is not None
        assert again.prediction is not None
        assert point.prediction.samples_per_s == again.prediction.samples_per_s


def test_a_uniform_plan_is_a_plan_with_its_run(planner: autopar.Planner, tmp_path: Path) -> None:
    """It is priced as it was found, and no file loses its settings in silence."""
    result = planner.solve()
    plan = result.plan
    assert isinstance(plan, UniformPlan)
    assert (plan.engine, len(plan.layers), plan.global_batch) == ("megatron", 4, 64)
    assert planner.evaluate(plan) == result.prediction
    offloaded = autopar.plan(**SMALL, engine="megatron", offload_activations="core_attn").plan
    assert offloaded is not None
    assert offloaded.beyond == ("activation offload",)
    with pytest.raises(InputError, match="activation offload"):
        write_strategy(offloaded, tmp_path / "strategy.json")
    slower = planner.why_not("tp=4", result)
    assert slower.plan is not None
    assert {layer.tp for layer in slower.plan.layers} == {4}
    none = planner.why_not("tp=3", result)
    assert none.infeasibility is not None
    assert "tp(3)" in none.infeasibility.reason


def test_changed_lists_are_replaced() -> None:
    """A rule that stays is not there twice."""
    request = build_request({"model": "llama3-8b", "hardware": "h100:1x8", "pin": ["tp=2"]})
    rules = (*request.options.pin, "pp=2")
    assert changed(request, {"pin": rules}).options.pin == rules


def test_both_switches_of_context_parallelism_are_refused() -> None:
    with pytest.raises(OptionError, match="--enable-cp cannot be combined with --disable-cp"):
        autopar.plan("llama3-8b", "h100:1x8", enable_cp=True, disable_cp=True)


def test_batches_of_a_planner_are_searched_each(planner: autopar.Planner) -> None:
    """The fastest is the answer."""
    each = [planner.solve(global_batch_sizes=(batch,)) for batch in (32, 64)]
    both = planner.solve(global_batch_sizes=(32, 64))
    rates = [one.prediction.samples_per_s for one in each if one.prediction is not None]
    assert both.prediction is not None
    assert both.prediction.samples_per_s == max(rates)
    with pytest.raises(OptionError, match="global_batch_sizes"):
        planner.solve(global_batch_sizes=[None])  # type: ignore[list-item]


NAMES: list[tuple[dict[str, Any], dict[str, object]]] = [
    ({"global_batch_size": 32}, {"global-batch-size": "32"}),
    ({"settle_bsz": 32}, {"global-batch-size": "32"}),
    ({"global_batch": 32}, {"global-batch-size": "32"}),
    ({"gbs": 32}, {"global-batch-size": "32"}),
    ({"seq_length": 2048}, {"seq-length": "2048"}),
    ({"seqlen": (2048,)}, {"seq-length": "2048"}),
    ({"micro_batch_size": 2}, {"micro-batch-size": "2"}),
    ({"micro_bsz": [1, 2]}, {"micro-batch-size": "1,2"}),
    ({"micro_batches": 4}, {"micro-batches": "4"}),
    ({"settle_chunk": 4}, {"micro-batches": "4"}),
    ({"tensor_model_parallel_size": 2}, {"tp": "2"}),
    ({"recompute": "full"}, {"recompute": "full"}),
    ({"recompute": ("none", "full")}, {"recompute": "none,full"}),
    ({"precision": "fp8"}, {"precision": "fp8"}),
    ({"precision": "fp16"}, {"precision": "fp16"}),
    ({"engine": "torchtitan"}, {"engine": "torchtitan"}),
    ({"memory_constraint": 40}, {"memory-constraint": "40"}),
    ({"memory_constraint_gib": 40}, {"memory-constraint": "40"}),
    ({"memory_constraint_bytes": 40 * 2.0**30}, {"memory-constraint": "40"}),
    ({"time_limit": 3}, {"time-limit": "3"}),
    ({"lora": 16, "lora_base": "nf4"}, {"lora": "16", "lora-base": "nf4"}),
    ({"pin": "tp=2"}, {"pin": ["tp=2"]}),
    ({"pin": ["tp=2", "pp=1"]}, {"pin": ["tp=2", "pp=1"]}),
    ({"moe_overlap": True}, {"moe-overlap": True}),
    ({"sequence_parallel": False}, {"sequence-parallel": False}),
    ({"nodes": 2, "gpus_per_node": 4}, {"nodes": "2", "gpus-per-node": "4"}),
    ({"profile_mode": "batch"}, {"profile-mode": "batch"}),
    ({"seq_length": None, "tp": None}, {}),
]


@pytest.mark.parametrize(("keywords", "typed"), NAMES)
def test_keywords_are_the_options_of_the_command(
    keywords: dict[str, Any], typed: dict[str, object]
) -> None:
    """With the same request, to the texts that a plan file stores."""
    base = {"model": "llama3-8b", "hardware": "h100"}
    if "nodes" not in keywords:
        base["hardware"] = "h100:1x8"
    assert request_of(base["model"], base["hardware"], keywords) == build_request(base | typed)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"global_batch_siz": 8}, "Did you mean 'global_batch_size'"),
        ({"seq_lenght": 8}, "Did you mean 'seq_length'"),
        ({"micro_batchsize": 8}, "Did you mean 'micro_batch_size'"),
        ({"json": "x.json"}, "unknown option 'json'"),
        ({"global_batch_size": 8, "settle_bsz": 8}, "also given as global_batch_size"),
        ({"global_batch_size": "8"}, "--global-batch-size: expected an integer"),
        ({"tp": "two"}, "--tp: expected"),
        ({"tp": True}, "--tp: expected"),
        ({"recompute": 1}, "--recompute: expected a text, got 1"),
        ({"engine": "megatr"}, "--engine: expected"),
        ({"engine": 3}, "--engine: expected"),
    ],
)
def test_a_wrong_name_or_type_is_refused(keywords: dict[str, Any], said: str) -> None:
    """With the nearest right name."""
    with pytest.raises(OptionError) as caught:
        autopar.plan("llama3-8b", "h100:1x8", **keywords)
    assert said in str(caught.value)
