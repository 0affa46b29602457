"""Models and plans that the tests of the exporters share."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.plans import ExportJob

__all__ = ["HETEROGENEOUS", "SMALL", "job", "legal_plans"]

SMALL = ModelSpec(
    name="small",
    layers=(
        LayerSpec(
            num_layers=8,
            seq_length=256,
            hidden_size=256,
            num_heads=8,
            num_kv_heads=4,
            head_dim=32,
            ffn_hidden_size=512,
            gated_mlp=True,
        ),
    ),
    vocab_size=1000,
)
HETEROGENEOUS = Plan(
    world_size=16,
    num_stages=2,
    stage_sizes=(3, 5),
    layers=(
        LayerStrategy(tp=2),
        LayerStrategy(tp=2, strided=True),
        LayerStrategy(tp=4, checkpoint=True),
        LayerStrategy(tp=4, zero3=True),
        LayerStrategy(tp=2, ulysses=True),
        LayerStrategy(tp=2, ulysses=True, checkpoint=True),
        LayerStrategy(zero3=True),
        LayerStrategy(),
    ),
    vocab=VocabStrategy(tp=4, zero3=True),
    global_batch=64,
    num_microbatches=4,
    default_dp_type="zero2",
)
"""Per-layer degrees, strided groups, Ulysses, ZeRO-3 and recomputation on some layers.

Stages differ in length, and embedding and head have a separate degree.
"""


def job(
    plan: Plan, spec: ModelSpec = SMALL, *, model: str = "small", **fields: object
) -> ExportJob:
    """Return the job of a plan on nodes of 8 GPUs, or on one smaller node."""
    gpus = min(8, plan.world_size)
    return ExportJob(
        plan=plan,
        spec=spec,
        model=model,
        num_nodes=plan.world_size // gpus,
        gpus_per_node=gpus,
        **fields,  # type: ignore[arg-type]
    )


@st.composite
def legal_plans(draw: st.DrawFn, *, uniform: bool = False) -> Plan:
    """Draw legal plans of the small model on 1 to 16 GPUs; `uniform`: one strategy for all."""
    world = 2 ** draw(st.integers(0, 4))
    stages = min(world, 2 ** draw(st.integers(0, 2)))
    ranks = world // stages
    cuts = draw(st.lists(st.integers(1, 7), min_size=stages - 1, max_size=stages - 1, unique=True))
    edges = [0, *sorted(cuts), 8]
    powers = [d for d in (1, 2, 4, 8) if d <= ranks]

    @st.composite
    def strategies(draw: st.DrawFn) -> LayerStrategy:
        tp = draw(st.sampled_from(powers))
        ulysses = tp in (2, 4) and draw(st.booleans())
        cp = draw(st.sampled_from([c for c in (1, 2) if tp * c <= ranks]))
        return LayerStrategy(
            tp=tp,
            ulysses=ulysses,
            cp=cp,
            zero3=draw(st.booleans()),
            checkpoint=draw(st.booleans()),
            strided=1 < tp < ranks and not ulysses and not uniform and draw(st.booleans()),
        )

    layers = (
        (draw(strategies()),) * 8
        if uniform
        else tuple(draw(st.lists(strategies(), min_size=8, max_size=8)))
    )
    vtp = draw(st.sampled_from(powers))
    plan = Plan(
        world_size=world,
        num_stages=stages,
        stage_sizes=tuple(b - a for a, b in itertools.pairwise(edges)),
        layers=layers,
        vocab=VocabStrategy(
            tp=vtp, ulysses=vtp > 1 and draw(st.booleans()), zero3=draw(st.booleans())
        ),
        global_batch=64,
        num_microbatches=draw(st.sampled_from([m for m in (1, 4) if m >= stages or m == 4])),
        pipeline_type=draw(st.sampled_from(["1f1b", "gpipe"])),
        default_dp_type=draw(st.sampled_from(["ddp", "zero2"])),
    )
    assert not violations(plan, SMALL, sequence_parallel=True)
    return plan
