"""Plans that a search finds by default, beside what a dry run counts of them: the plan fits.

How a dry run counts is in `test_plan_dryrun`, which categories differ in `benchmarks/dry_run.py`.
"""

from __future__ import annotations

import pytest

from autopar.estimate.model import estimate_model
from autopar.model import LayerSpec, ModelProfile, ModelSpec
from autopar.plans import StagePrediction
from autopar.units import GIB
from search.interface import open_documents
from search.planner.planner import Planner

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("_autopar_core", reason="the C++ core is not built: run `make build`")

from profiler.plan.dryrun import dry_run, first_ranks
from profiler.plan.job import DryRunRank, PlanJob

MODELS = ("llama2-7b", "llama3-8b", "qwen2.5-7b")
MACHINES = ("h100:1x8", "a100-80gb:2x8")


def found_and_counted(
    model: str | tuple[ModelSpec, ModelProfile], machine: str, **options: object
) -> list[tuple[StagePrediction, DryRunRank]]:
    """Return prediction and count of the first, last and largest stage of the best plan."""
    spec, profile, hardware, chosen = open_documents(model, machine, options)
    result = Planner.from_documents(spec, profile, hardware, chosen).solve()
    assert result.plan is not None
    assert result.prediction is not None
    job = PlanJob(plan=result.plan, spec=spec, precision="bf16")
    ranks = dry_run(job, ranks=sorted(set(first_ranks(job).values())))
    return [(result.prediction.stages[rank.stage], rank) for rank in ranks]


def states_bytes(stage: StagePrediction) -> int:
    """Return the predicted weights, gradients and optimizer of a stage."""
    return stage.memory_bytes["states"] + stage.memory_bytes["vocab_states"]


def missing_bytes(rank: DryRunRank) -> int:
    """Return what the recipe of the search has and the executor has not.

    2 bytes for each element that a rank holds: FSDP2 steps fp32 shards, where the recipe has bf16
    ones beside their fp32 copies, and the executor's replicas sum in bf16.
    """
    return 2 * rank.num_parameters


def counted_states_bytes(rank: DryRunRank) -> int:
    """Return weights, gradients and optimizer at the peak of a dry run, made alike."""
    parts = rank.peak_parts
    held = parts["parameters"] + parts["optimizer"] + parts["gradients"]
    return held + missing_bytes(rank)


def check(
    model: str | tuple[ModelSpec, ModelProfile], machine: str, **options: object
) -> list[float]:
    """Hold the count of every stage to its prediction, and print both (`-s` shows them).

    Returns how far each is apart when both are made alike; a dry run has no communicators.
    """
    apart = []
    found = found_and_counted(model, machine, **options)
    name = model if isinstance(model, str) else model[0].name
    for stage, rank in found:
        states, counted = states_bytes(stage), counted_states_bytes(rank)
        without = stage.allocated_bytes - stage.memory_bytes["fixed"]
        apart.append((rank.peak_bytes + missing_bytes(rank)) / without - 1)
        print(
            f"{name} on {machine}, stage {rank.stage}: {stage.allocated_bytes / GIB:.2f} GiB "
            f"predicted, {rank.peak_bytes / GIB:.2f} counted "
            f"({rank.peak_bytes / stage.allocated_bytes - 1:+.1%}); states {states / GIB:.2f}, "
            f"{counted / GIB:.2f} ({counted / states - 1:+.1%}); alike {apart[-1]:+.1%}"
        )
        assert counted == pytest.approx(states, rel=0.03)
        # what is predicted to fit does; less passes than is predicted (docs/benchmarks.md)
        assert rank.peak_bytes <= stage.allocated_bytes
    return apart


def test_gradients_of_shards_are_predicted_as_a_dry_run_counts_them() -> None:
    """Shards that keep whole gradients of 4 bytes from one micro-batch to the next."""
    layer = LayerSpec(
        num_layers=4,
        seq_length=512,
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden_size=4096,
        gated_mlp=True,
    )
    spec = ModelSpec(name="small", layers=(layer,), vocab_size=8192)
    pin = ("tp=1,vtp=1,zero3=1,vzero3=1", "m=4")
    check((spec, estimate_model(spec, "h100")), "h100:1x4", settle_bsz=64, pin=pin)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_default_plans_fit_in_a_dry_run(model: str, machine: str) -> None:
    """Of a batch that needs several micro-batches, in which gradients are summed."""
    assert all(abs(apart) < 0.03 for apart in check(model, machine, settle_bsz=128))
