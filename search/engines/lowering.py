"""A plan whose layers may differ as files of an engine with one set of degrees.

The nearest plan that the engine can run (`search.engines.nearest`) becomes a `Choice`, by the
space of the engine a `Launch`, and the one writer of the engine makes files of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from autopar.price.profile import launch_model
from autopar.records import dataclass
from autopar.run.launch import Launch, Model, chunks_of_sizes
from autopar.run.plan import Plan
from search.engines.choice import FULL, NONE, Choice, ContextKind
from search.engines.engine import Job, Loss, SearchFields, samples_of_a_rank
from search.engines.place import Place
from search.engines.space import EngineSpace, Job as SpaceJob


@dataclass(frozen=True, kw_only=True)
class Near:
    """The nearest plan that an engine can run, and how the engine runs it."""

    plan: Plan
    losses: tuple[Loss, ...] = ()
    """Changes of the plan; none where the engine does exactly what the plan asks for."""
    notes: tuple[str, ...] = ()
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` that the engine sets otherwise than the job."""
    search: SearchFields = ()
    """Options of a search for plans that this engine runs as they were priced."""


def zero_stage(plan: Plan) -> int:
    """Return the ZeRO stage of a plan whose layers are alike."""
    if plan.layers[0].zero3:
        return 3
    return {"ddp": 0, "zero1": 1, "zero2": 2}[plan.default_dp_type]


def exchange_degree(plan: Plan) -> int:
    """Return the Ulysses degree of a plan whose layers are alike; 1: none."""
    layer = plan.layers[0]
    return layer.tp if layer.ulysses else 1


def choice_of_plan(plan: Plan, *, zero: int, context: ContextKind = "ring") -> Choice:
    """Return the degrees and the batch of a plan whose layers are alike.

    Ulysses ranks are context ranks that exchange heads. context : kind of other context ranks.
    """
    layer, exchanged = plan.layers[0], exchange_degree(plan)
    tp = layer.tp // exchanged
    return Choice(
        tp=tp,
        cp=layer.cp * exchanged,
        cp_kind="a2a" if exchanged > 1 else context,
        # tensor ranks divide experts as all other weights
        etp=tp,
        pp=plan.num_stages,
        schedule=plan.pipeline_type if plan.num_stages > 1 else "1f1b",
        micro_batch=samples_of_a_rank(plan),
        zero=zero,
        recompute=FULL if all(one.checkpoint for one in plan.layers) else NONE,
        global_batch=plan.global_batch,
        chunks=chunks_of_sizes(plan.stage_sizes, plan.num_stages),
    )


def launch_of_plan(
    space: EngineSpace, job: Job, choice: Choice, model: Model | None = None
) -> Launch:
    """Return the launch of a plan's choice, in the precision of the job.

    model : sizes to take instead of the spec's own. Raises InputError where no launch has them.
    """
    made = space.launch(
        SpaceJob(
            name=job.spec.name,
            model=model or launch_model(job.spec),
            seq=job.seq_length,
            global_batches=(choice.global_batch,),
            world=job.plan.world_size,
            gpu=job.gpu,
        ),
        choice,
    )
    return replace(made, precision=replace(made.precision, kind=job.precision))


def place_of(job: Job) -> Place:
    """Return the machines and the model of a job."""
    return Place(
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        model=job.spec.name,
        spec=job.spec,
    )
