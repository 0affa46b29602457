"""Hand-made results that reports and commands are tested with, and a planner that returns them."""

from __future__ import annotations

from autopar.rates.measured import HardwareProfile
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelProfile, ModelSpec
from autopar.run.plan import (
    Infeasibility,
    LayerRun,
    LayerStrategy,
    Plan,
    Prediction,
    StagePrediction,
    VocabStrategy,
)
from autopar.sources import Source
from autopar.units import GIB
from search.planning.layered.prediction import Alternative, SearchResult, SearchStats
from search.planning.session import Session
from search.request.options import SearchOptions, option_record

SPEC = ModelSpec(
    name="toy",
    layers=(
        LayerSpec(
            num_layers=4,
            seq_length=2048,
            hidden_size=1024,
            num_heads=16,
            num_kv_heads=8,
            ffn_hidden_size=4096,
        ),
    ),
    vocab_size=32000,
)
ZERO3 = LayerStrategy(tp=2, zero3=True, checkpoint=True)
PLAIN = LayerStrategy(tp=2)
PLAN = Plan(
    world_size=8,
    num_stages=2,
    stage_sizes=(2, 2),
    layers=(ZERO3, PLAIN, PLAIN, PLAIN),
    vocab=VocabStrategy(tp=4, zero3=True),
    global_batch=16,
    num_microbatches=4,
    default_dp_type="zero2",
)
HARDWARE = HardwareProfile(
    num_nodes=1,
    gpus_per_node=8,
    allreduce_bytes_per_s={(2, True): 1e11, (4, True): 1e11, (8, True): 1e11},
    p2p_bytes_per_s={2: 1e10},
    name="box",
)
PROFILE = ModelProfile(layers=(), other_times=(), other_memory={}, sequence_parallel=True)


def _run(first: int, count: int, label: str) -> LayerRun:
    return LayerRun(
        first_layer=first,
        num_layers=count,
        layer_type=0,
        label=label,
        time_s={"forward": 0.004, "backward": 0.008, "tp": 0.001, "tail": 0.002},
        memory_bytes={"states": 2.0 * GIB, "activations": 1.0 * GIB},
    )


def _stage(index: int, runs: tuple[LayerRun, ...]) -> StagePrediction:
    return StagePrediction(
        stage=index,
        forward_s=0.01,
        backward_s=0.02,
        send_s=0.001 if index == 0 else 0.0,
        tail_s=0.004,
        allocated_bytes=(10 + index) * GIB,
        reserved_bytes=(12 + index) * GIB,
        odds_of_oom=0.004,
        budget_bytes=24 * GIB,
        in_flight=2 - index,
        memory_bytes={"states": (8 + index) * GIB, "activations": 2 * GIB},
        time_s={"forward": 0.01, "backward": 0.018, "tp": 0.002},
        runs=runs,
    )


PREDICTION = Prediction(
    step_time_s=0.16,
    samples_per_s=100.0,
    replay_s=0.158,
    stages=(
        _stage(0, (_run(0, 1, "tp2-dp2-zero3-ckpt"), _run(1, 1, "tp2-dp2"))),
        _stage(1, (_run(2, 2, "tp2-dp2"),)),
    ),
    legal=True,
    fits=True,
    waterfall_s={"forward": 0.05, "backward": 0.09, "bubble": 0.016, "gradient_sync": 0.004},
)
RESULT = SearchResult(
    status="optimal",
    plan=PLAN,
    prediction=PREDICTION,
    bound_samples_per_s=100.0,
    gap=0.0,
    alternatives=(
        Alternative(
            plan=replace(PLAN, num_stages=1, stage_sizes=(4,)),
            step_time_s=0.2,
            samples_per_s=80.0,
            bound_samples_per_s=80.0,
            differs_by="p=1",
        ),
    ),
    infeasibility=None,
    defaults_used=("backward is twice the forward",),
    notes=("layertype_other was halved",),
    options=option_record(SearchOptions(), 24.0 * GIB),
    sources=(Source(role="computation", path="computation.json", sha256="ab" * 32),),
    estimated=True,
    stats=SearchStats(states=123, candidates=45, opened=6, cpu_s=0.01, wall_s=0.02),
)
INFEASIBLE = replace(
    RESULT,
    status="infeasible",
    plan=None,
    prediction=None,
    bound_samples_per_s=0.0,
    alternatives=(),
    infeasibility=Infeasibility(
        stage=1,
        num_stages=2,
        missing_bytes=3 * GIB,
        smallest_budget_bytes=27 * GIB + 1,
        reason="model states of 2 layers",
    ),
)


class FixedPlanner:
    """A planner that answers every question with a result made beforehand."""

    def __init__(self, result: SearchResult, prediction: Prediction = PREDICTION) -> None:
        self.result = result
        self.prediction = prediction
        self.asked: list[Plan] = []

    def solve(
        self,
        memory_constraint_bytes: float | None = None,
        global_batch_sizes: list[int] | None = None,
        top: int | None = None,
    ) -> SearchResult:
        """Return the result, faster when more memory is asked for."""
        del global_batch_sizes, top
        if memory_constraint_bytes is None:
            return self.result
        assert self.result.prediction is not None
        faster = replace(self.result.prediction, samples_per_s=110.0)
        return replace(self.result, prediction=faster)

    def evaluate(self, plan: Plan) -> Prediction:
        """Return the prediction and remember the plan."""
        self.asked.append(plan)
        return self.prediction

    def frontier(self, first: SearchResult | None = None) -> list[SearchResult]:
        """Return one point."""
        return [first or self.result]

    def why_not(self, rule: str, baseline: SearchResult) -> SearchResult:
        """Return a slower plan whose gradients take longer."""
        del rule
        assert baseline.prediction is not None
        assert baseline.plan is not None
        waterfall = dict(baseline.prediction.waterfall_s) | {"gradient_sync": 0.044}
        slower = replace(
            baseline.prediction, step_time_s=0.2, samples_per_s=80.0, waterfall_s=waterfall
        )
        plan = replace(baseline.plan, default_dp_type="ddp")
        return replace(baseline, plan=plan, prediction=slower)


class FixedSession(Session):
    """A session whose rebuilt planners answer as the first one does."""

    def rebuilt(self, **changes: object) -> FixedPlanner:  # type: ignore[override]
        """Return the same planner."""
        del changes
        return self.planner  # type: ignore[return-value]


def make_session(
    result: SearchResult = RESULT, prediction: Prediction = PREDICTION
) -> FixedSession:
    """Return a session around a fixed planner."""
    return FixedSession(
        spec=SPEC,
        profile=PROFILE,
        hardware=HARDWARE,
        options=SearchOptions(),
        planner=FixedPlanner(result, prediction),  # type: ignore[arg-type]
    )
