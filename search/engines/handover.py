"""What is handed over to an engine: a job of a plan file and a request, and what prices it.

Lowering is in the engines, choosing among their offers in `reprice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from autopar.documents.plan import PlanDocument, read_strategy
from autopar.errors import DocumentError, OptionError
from autopar.records import replace
from autopar.run.plan import Plan, Prediction, violations
from search.engines.engine import Job, space_of
from search.engines.reprice import Price
from search.planning.best_plan import as_engine
from search.planning.question import Session, check_known, open_session, read_plan_for
from search.request.options import Engine, SearchOptions
from search.request.request import Request, model_spec


def job_of(
    path: str, document: PlanDocument, request: Request, notice: Callable[[str], None]
) -> tuple[Job, Session | None]:
    """Return what is exported, and what prices it: None where no hardware is named.

    notice : takes a sentence on what is assumed.

    Raises
    ------
    OptionError: the model, or a number of nodes that fits the plan, is not given.
    DocumentError: the plan is not one of the model, or not legal for it.
    """
    inputs, options = request.inputs, request.options
    sizes = (inputs.num_layers, inputs.seq_length, inputs.hidden_size)
    if inputs.model is None and None in sizes:
        raise OptionError(
            "--model: is missing, and the plan does not say it; give a shipped name, a config.json "
            "or a model.json"
        )
    session = None
    # nothing names hardware: the export has no price then
    if inputs.uses_default_hardware:
        spec = model_spec(inputs)
        plan, num_nodes, gpus_per_node = _without_hardware(
            path, document, request, spec.num_layers, notice
        )
    else:
        session = open_session(inputs, options, request.given, has_plan=True)
        # measured files may have decided it
        options = replace(options, sequence_parallel=session.options.sequence_parallel)
        spec, plan = session.spec, read_plan_for(document, session, path=path)
        num_nodes, gpus_per_node = session.hardware.num_nodes, session.hardware.gpus_per_node
    problems = violations(plan, spec, sequence_parallel=options.sequence_parallel)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise DocumentError(
            path,
            f"the plan is illegal for {spec.name}: {problems[0]}{more}",
            remedy="autopar-search --evaluate shows everything",
        )
    job = Job(
        plan=plan,
        spec=spec,
        model=inputs.model or spec.name,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=options.async_grad_reduce,
        precision=options.mixed_precision,
        fp32_gradients=options.fp32_gradients,
        tp_overlap=options.tp_overlap,
    )
    return job, session


def _without_hardware(
    path: str,
    document: PlanDocument,
    request: Request,
    num_layers: int,
    notice: Callable[[str], None],
) -> tuple[Plan, int, int]:
    nodes, gpus = request.inputs.num_nodes, request.inputs.num_gpus_per_node
    plan = read_strategy(
        document, world_size=world_size_of(request), num_layers=num_layers, path=path
    )
    world = plan.world_size
    if len(plan.layers) != num_layers:
        raise DocumentError(
            path,
            f"describes {len(plan.layers)} layers while the model has {num_layers}",
            key="tp_sizes_enc",
            remedy="give the plan's --model or --num-layers",
        )
    check_known(plan, path)
    if gpus is None:
        # 8 GPUs a node, the common size, where that comes out even
        gpus = world // nodes if nodes else 8 if world % 8 == 0 else world
    if nodes is None:
        nodes = max(1, world // gpus)
        notice(f"no --nodes given, writing for {nodes} x {gpus} GPUs")
    if nodes * gpus != world:
        raise OptionError(
            f"--nodes: {nodes} x {gpus} GPUs are {nodes * gpus}, the plan is for {world}; give "
            "--nodes and --gpus-per-node of the cluster"
        )
    return plan, nodes, gpus


def world_size_of(request: Request) -> int | None:
    """Return the GPUs that a request says, None where it does not."""
    inputs = request.inputs
    if inputs.world_size is not None:
        return inputs.world_size
    if inputs.num_gpus_per_node is not None:
        return (inputs.num_nodes or 1) * inputs.num_gpus_per_node
    # 8 GPUs a node, as where a plan says how many there are
    return inputs.num_nodes * 8 if inputs.num_nodes is not None else None


def pricer_of(session: Session, request: Request) -> Price:
    """Return what prices plans with options changed; each change loads its own tables once.

    Raises InputError where no tables were measured that way.
    """
    # without changes it is the session's own
    planners = {frozenset[tuple[str, bool | str]](): session.planner}

    def price(plan: Plan, changes: Mapping[str, bool | str]) -> Prediction:
        key = frozenset(changes.items())
        if key not in planners:
            changed: dict[str, Any] = dict(changes)
            asked = _of_engine(request, cast(Engine | None, changed.get("memory_of")))
            options = replace(asked.options, **changed)
            given = {*asked.given, "sequence-parallel"}
            planners[key] = open_session(asked.inputs, options, given).planner
        return planners[key].evaluate(plan)

    return price


def _of_engine(request: Request, engine: Engine | None) -> Request:
    """Return the question of a plan for one engine with the software of another.

    What nobody's plan was priced with stays, as measured times do.
    """
    own = request.options.memory_of
    if engine is None or own in (None, engine):
        return request
    space, inputs, options = space_of(str(own)), request.inputs, request.options
    usual = SearchOptions()
    # what the first engine does otherwise than the search by default, unless something else is said
    left = {
        name: getattr(usual, name)
        for name, value in space.priced.items()
        if getattr(options, name) == value
    }
    names = {"memory-of", *(name.replace("_", "-") for name in left)}
    if space.stack is not None and inputs.stack == space.stack:
        inputs = replace(inputs, stack=None)
        names.add("stack")
    changed: dict[str, Any] = {**left, "memory_of": None}
    given = {name: value for name, value in request.given.items() if name not in names}
    options = replace(options, **changed)
    return as_engine(replace(request, inputs=inputs, options=options, given=given), engine)


def num_layers_of(request: Request) -> int | None:
    """Return the layers of the model that a request says, None where it does not."""
    if request.inputs.model is not None:
        return model_spec(request.inputs).num_layers
    return sum(request.inputs.num_layers) if request.inputs.num_layers else None
