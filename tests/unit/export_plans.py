"""Plans for the tests of exporters: random legal ones of a small model, and what must hold."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import assume, strategies as st

from autopar.documents.strategy import strategy_document
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.differences import without_effect
from search.engines.files import read_back
from search.engines.plans import ExportedPlan, ExportJob

__all__ = [
    "SMALL",
    "check_lowered",
    "check_read_back",
    "job_of",
    "jobs",
    "lowered_or_refused",
    "uniform_plan",
]

SMALL = ModelSpec(
    name="small-llama",
    layers=(
        LayerSpec(
            num_layers=5,
            seq_length=96,
            hidden_size=48,
            num_heads=12,
            num_kv_heads=6,
            ffn_hidden_size=96,
            gated_mlp=True,
        ),
    ),
    vocab_size=512,
)
_KEYS = frozenset(strategy_document(Plan(
    world_size=1, num_stages=1, stage_sizes=(1,), layers=(LayerStrategy(cp=2),),
    vocab=VocabStrategy(), global_batch=1, num_microbatches=1,
)))  # fmt: skip


def uniform_plan(
    world: int,
    layer: LayerStrategy,
    vocab: VocabStrategy | None = None,
    *,
    layers: int = 5,
    **changes: object,
) -> Plan:
    """Return a plan of one strategy for all layers, its vocabulary sharded as the layers."""
    own = VocabStrategy(tp=layer.tp, ulysses=layer.ulysses, zero3=layer.zero3)
    plan = Plan(
        world_size=world,
        num_stages=1,
        stage_sizes=(layers,),
        layers=(layer,) * layers,
        vocab=vocab or own,
        global_batch=48,
        num_microbatches=2,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def job_of(plan: Plan, spec: ModelSpec = SMALL, **changes: object) -> ExportJob:
    """Return the job of a plan on nodes of at most 4 GPUs."""
    per_node = min(plan.world_size, 4)
    nodes, rest = divmod(plan.world_size, per_node)
    if rest:
        nodes, per_node = 1, plan.world_size
    job = ExportJob(plan=plan, spec=spec, model=spec.name, num_nodes=nodes, gpus_per_node=per_node)
    return replace(job, **changes)  # type: ignore[arg-type]


@st.composite
def jobs(draw: st.DrawFn, max_stages: int = 3) -> ExportJob:
    """Draw a job of a legal plan of SMALL; half of them have one strategy for all layers."""
    stages = draw(st.integers(1, max_stages))
    ranks = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    cuts = sorted(draw(st.sets(st.integers(1, 4), min_size=stages - 1, max_size=stages - 1)))
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 5], strict=True))
    degrees = st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0])
    flag = st.booleans()

    def strategy() -> LayerStrategy:
        tp = draw(degrees)
        cp = draw(st.sampled_from([c for c in (1, 1, 2, 3) if ranks % (tp * c) == 0]))
        values = [draw(flag) for _ in range(4)]
        return LayerStrategy(
            tp=tp, cp=cp, ulysses=values[0], zero3=values[1], checkpoint=values[2],
            strided=values[3] and tp > 1,
        )  # fmt: skip

    layers = (strategy(),) * 5 if draw(flag) else tuple(strategy() for _ in range(5))
    same = VocabStrategy(tp=layers[0].tp, ulysses=layers[0].ulysses, zero3=layers[0].zero3)
    other = VocabStrategy(tp=draw(degrees), ulysses=draw(flag), zero3=draw(flag))
    plan = Plan(
        world_size=stages * ranks,
        num_stages=stages,
        stage_sizes=sizes,
        layers=layers,
        vocab=same if draw(flag) else other,
        global_batch=draw(st.sampled_from([24, 48, 144])),
        num_microbatches=draw(st.sampled_from([1, 2, 4])),
        pipeline_type=draw(st.sampled_from(["1f1b", "gpipe"])),
        default_dp_type=draw(st.sampled_from(["ddp", "zero2"])),
    )
    job = job_of(
        plan,
        sequence_parallel=draw(flag),
        async_grad_reduce=draw(flag),
        tensor_degree=draw(st.none() | st.sampled_from(sorted({s.tp for s in layers}))),
    )
    assume(not violations(plan, SMALL, sequence_parallel=job.sequence_parallel))
    return job


def lowered_or_refused(
    lower: Callable[[ExportJob], ExportedPlan], job: ExportJob
) -> ExportedPlan | None:
    """Return what an exporter makes of a job, None where it has nothing near it."""
    try:
        return lower(job)
    except InputError as error:
        if error.remedy is None or "\n" in str(error):
            raise  # a refusal is one line and names the remedy
        return None


def check_read_back(lowered: ExportedPlan) -> None:
    """Fail unless the files of an export describe the launch that they were made of."""
    assert lowered.draft is not None
    assert lowered.runs is not None
    runs = read_back(lowered.draft, lowered.runs, lowered.engine)
    assert without_effect(runs) == without_effect(lowered.runs)


def check_lowered(
    lower: Callable[[ExportJob], ExportedPlan], job: ExportJob, lowered: ExportedPlan
) -> None:
    """Fail unless the nearest plan is legal, as large, and every change of it is a loss."""
    plan, near = job.plan, lowered.plan
    assert not violations(near, job.spec, sequence_parallel=job.sequence_parallel)
    for name in ("world_size", "num_stages", "stage_sizes", "global_batch", "num_microbatches"):
        assert getattr(near, name) == getattr(plan, name)

    before, after = strategy_document(plan), strategy_document(near)
    for document in (before, after):
        document.setdefault("cp_sizes_enc", ",".join("1" for _ in plan.layers))
        del document["vocab_sdp"]  # the other name of embed_sdp
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {loss.field for loss in lowered.losses} & _KEYS
    if not lowered.losses:
        assert near == plan

    for old, new in zip(plan.layers, near.layers, strict=True):
        assert new.checkpoint or not old.checkpoint
    again = lower(replace(job, plan=near))
    assert again.plan == near
    assert not {loss.field for loss in again.losses} & _KEYS
    assert again.files == lowered.files
    check_read_back(lowered)
    for line in lowered.launch.splitlines():
        assert line.endswith("\\") or line == lowered.launch.splitlines()[-1]
    assert lowered.launch.endswith("\n")
