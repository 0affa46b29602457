"""A plan whose layers may differ as it is handed to an engine: a job in, files and losses out.

An engine with one set of degrees takes the nearest plan that it can run (`search.engines.nearest`):
a `Choice`, by the space of the engine a `Run`, and by the one writer of the engine files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, cast

from msgspec import field

from autopar.command.fields import rows_of, words_of, written
from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.model import ModelSpec
from autopar.run.of_plan import uniform_model
from autopar.run.plan import Plan
from autopar.run.run import Run
from autopar.run.runtime import Engine
from autopar.run.strategy import ContextKind, chunks_of_sizes
from search.engines.choice import FULL, NONE, Choice
from search.engines.engine import Engine as EngineRecord
from search.engines.place import Draft, Loss, Place
from search.engines.space import EngineSpace, Job as SpaceJob
from search.engines.table import engine_named
from search.request.options import SearchOptions

SearchFields = tuple[tuple[str, Any], ...]
"""(field of `SearchOptions`, value), in the order in which one would type them."""


class Job(Record):
    """A plan and everything else that a launch needs."""

    plan: Plan
    spec: ModelSpec
    model: str
    """As the user named it: a shipped name or a file."""
    num_nodes: int
    gpus_per_node: int
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = True
    tp_overlap: bool = True
    gpu: str = "H100"
    """Kind of device, by its card's name."""
    tensor_degree: int | None = None
    """The one tensor (or Ulysses) degree to take for a plan of several where the engine has one;
    None: the largest of the plan. `autopar-export` prices every one and takes the fastest that
    fits; a plan of one degree keeps it whatever this says."""

    @property
    def seq_length(self) -> int:
        """Tokens per sample of the last layer type."""
        return self.spec.layers[-1].seq_length


class Lowered(Record):
    """A plan as one engine takes it."""

    engine: Engine
    engine_version: str
    """Release that the keys were taken from."""
    plan: Plan
    """What the files make the engine do; the plan itself where nothing is lost."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    losses: tuple[Loss, ...]
    """Empty when the engine does exactly what the plan says."""
    launch: str
    """The command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...] = field(default=())
    """What the user has to know besides: memory-neutral choices, keys to fill in."""
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` as the engine runs the plan, where they differ from the job's; the
    plan is priced with them."""
    search: SearchFields = ()
    """Options of a search that finds plans which the engine runs as they were priced, of the
    degrees of this one; empty where any search does."""
    draft: Draft | None = None
    """Files and command as the writer of launches made them."""
    runs: Run | None = None
    """The run that the files describe; None where layers may differ in the engine."""


Lower = Callable[[Job], Lowered]
"""Raises InputError, one sentence, where the engine has nothing near the plan at all."""


class Part(TypedDict, total=False):
    """Fields of `SearchOptions` that span a part of an engine's space."""

    max_pp_deg: int
    fine_grained_mode: bool
    default_dp_type: Literal["ddp", "zero1", "zero2", "any"]
    disable_sdp: bool
    disable_cp: bool
    disable_tp_consec: bool
    async_grad_reduce: bool
    sequence_parallel: bool
    fp32_gradients: bool
    memory_of: Engine
    tp_overlap: bool
    cp_kind: Literal["ring", "all-gather"]
    pp_division: tuple[int, ...]
    pin: tuple[str, ...]
    forbid: tuple[str, ...]


class Space(Record):
    """The plans that an engine runs as they are: `SPACE` of its module, what `--engine` searches.

    Every part is searched exactly, and what the exporter would lose of its best plan is left out.
    """

    parts: tuple[tuple[Part, str], ...] = ()
    """Options, and rules beside the degree; none where the engine runs every plan."""
    one_degree: bool = True
    """Embedding, head and all layers have one tensor degree: each is a part of its own."""
    context: bool = False
    """They have one context degree too, each a part of its own; else they have none."""
    gathers: bool = False
    """Context ranks gather keys and values before they are used, and have no ring."""
    whole_sequences: bool = False
    """Keeps whole sequences between the blocks of tensor parallelism."""
    priced: Part = field(default_factory=Part)
    """Options that hold for all parts: what the engine does otherwise than the search by default,
    its memory aside, which is `--memory-of`."""
    stack: str | None = None
    """Whose kernels and host code times are estimated with; None: the default one's."""


class Near(Record):
    """The nearest plan that an engine can run, and how the engine runs it."""

    plan: Plan
    losses: tuple[Loss, ...] = ()
    """Changes of the plan; none where the engine does exactly what the plan asks for."""
    notes: tuple[str, ...] = ()
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` that the engine sets otherwise than the job."""
    search: SearchFields = ()
    """Options of a search for plans that this engine runs as they were priced."""


# --------------------------------------------------------------------------------------------------
# What a plan is handed as.


def lower_for(engine: str) -> Lower:
    """Return the function that writes a plan for an engine, one of EXPORTERS."""
    own = engine_named(engine)
    lower: Lower = own.lower if own.lower is not None else partial(_lowered, own)
    return lower


def _lowered(engine: EngineRecord, job: Job) -> Lowered:
    """Return a plan as an engine with one set of degrees takes it, by the writer of launches."""
    assert engine.near is not None, "it runs the nearest plan"
    assert engine.handed is not None, "which is a launch"
    assert engine.write is not None, "that is written"
    near: Near = engine.near(job)
    run, place = engine.handed(job, near.plan)
    draft: Draft = engine.write(run, place)
    return Lowered(
        engine=cast(Engine, engine.name),
        engine_version=draft.version,
        plan=near.plan,
        files=draft.files,
        losses=near.losses,
        launch=draft.launch,
        notes=(*near.notes, *draft.notes),
        as_run=near.as_run,
        search=near.search,
        draft=draft,
        runs=run,
    )


def space_of(engine: str) -> Space:
    """Return the plans that an engine runs as they are, one of EXPORTERS."""
    plans = engine_named(engine).plans
    assert plans is not None, "plans are written for it"
    space: Space = plans()
    return space


def further_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return what a model has that no plan is written with: names of parts, in the field's words.

    Writers of plans know heads, MLPs and equal experts; they refuse a model with more by these.
    """
    found = {
        "latent attention": any(layer.latent is not None for layer in spec.layers),
        "windows of attention": any(
            layer.window is not None and layer.window < layer.seq_length for layer in spec.layers
        ),
        "shared experts": any(layer.shared_expert_width for layer in spec.layers),
        "sinks of attention": any(layer.attention_sinks for layer in spec.layers),
        "norms behind or in the place of others": any(
            layer.num_norms is not None for layer in spec.layers
        ),
        "norms of all queries": any(layer.wide_qk_norms for layer in spec.layers),
        "experts with biases": any(
            layer.router_biases or (layer.biases and layer.num_experts is not None)
            for layer in spec.layers
        ),
        "modules of further tokens": spec.mtp_layers > 0,
    }
    return tuple(what for what, there in found.items() if there)


def has_one_kind(spec: ModelSpec) -> bool:
    """Return whether all layers are self-attending ones of one shape, whatever their runs."""
    shapes = {
        (x.hidden_size, x.num_heads, x.seq_length, x.ffn_hidden_size, x.num_experts)
        for x in spec.layers
    }
    return len(shapes) == 1 and not any(layer.cross_attention for layer in spec.layers)


def samples_of_a_rank(plan: Plan) -> int:
    """Return the samples of a micro-batch on one data rank of a plan whose layers are alike."""
    return plan.global_batch // (plan.num_microbatches * plan.data_degree(0))


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


def run_of_choice(space: EngineSpace, job: Job, choice: Choice, model: Model | None = None) -> Run:
    """Return the run of a plan's choice, in the precision of the job.

    model : sizes to take instead of the spec's own. Raises InputError where no run has them.
    """
    made = space.launch(
        SpaceJob(
            name=job.spec.name,
            model=model or uniform_model(job.spec),
            seq=job.seq_length,
            global_batches=(choice.global_batch,),
            world=job.plan.world_size,
            gpu=job.gpu,
        ),
        choice,
    )
    precision = replace(made.runtime.precision, kind=job.precision)
    return replace(made, runtime=replace(made.runtime, precision=precision))


def place_of(job: Job) -> Place:
    """Return the machines and the model of a job."""
    return Place(
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        model=job.spec.name,
        spec=job.spec,
    )


# --------------------------------------------------------------------------------------------------
# How an engine runs a plan, as options of the search: to price it, and to search again.
#
# What the search takes for granted, such as sequence parallelism, an engine may do otherwise. Each
# exporter says how its engine does it; what differs from the job is priced, and the options that a
# new search needs are fields of `SearchOptions`, which become words only where they are shown.


# Parts of the spaces of engines.
SINGLE_STAGE: Part = {"max_pp_deg": 1}
ONE_DEGREE: Part = {"fine_grained_mode": False}
EVERY_MICROBATCH: Part = {"async_grad_reduce": False}
REPLICAS: Part = {"default_dp_type": "ddp", "disable_sdp": True}
SHARDED_OPTIMIZER: Part = {"default_dp_type": "zero2", "disable_sdp": True}
MODEL_GRADIENTS: Part = {"fp32_gradients": False}
"""Summed in the precision of the model."""
ZERO3 = "zero3=1,vzero3=1"

UNIFORM: SearchFields = (("fine_grained_mode", False),)
ONE_STAGE: SearchFields = (("max_pp_deg", 1),)


def different(job: Job, plan: Plan, runs: Mapping[str, bool]) -> dict[str, bool]:
    """Return the options that an engine runs otherwise than the job was priced.

    When a micro-batch is the whole step it makes no difference when gradients are reduced, nor
    in fp32 how they are.
    """
    return {
        name: value
        for name, value in runs.items()
        if getattr(job, name) != value
        and not (name == "async_grad_reduce" and plan.num_microbatches == 1)
        and not (name == "fp32_gradients" and job.precision == "fp32")
    }


def as_typed(fields: Iterable[tuple[str, Any]]) -> str:
    """Return fields of `SearchOptions` with their values as options are typed."""
    rows = {row.field: row for row in rows_of(SearchOptions)}
    return " ".join(
        word
        for field, value in fields
        for word in words_of(rows[field], written(rows[field], value))
    )


def search_words(lowered: Lowered) -> str:
    """Return what to type so that a search finds plans that an engine runs as they are priced."""
    if not lowered.search:
        return ""
    return as_typed((*lowered.search, ("memory_of", lowered.engine)))


def search_fields(
    plan: Plan, runs: Mapping[str, bool], more: Sequence[tuple[str, Any]] = ()
) -> SearchFields:
    """Return the options whose search finds plans of these degrees that lose nothing.

    more : options of the engine, which come first.
    """
    fields = list(more)
    # defaults need not be typed
    fields += [item for item in runs.items() if item[1] != getattr(SearchOptions, item[0])]
    # a nearest plan treats layers alike, so the first stands for all
    layer = plan.layers[0]
    rules = [f"tp={layer.tp}", f"vtp={plan.vocab.tp}"]
    if layer.tp > 1 and layer.ulysses:
        fields.append(("sp_space", "tp+sp"))
        rules += ["ulysses=1", "vulysses=1"]
    if layer.cp > 1:
        fields.append(("max_cp_deg", layer.cp))
        rules.append(f"cp={layer.cp}")
    if plan.vocab.cp > 1:
        rules.append(f"vcp={plan.vocab.cp}")
    if layer.zero3:
        rules += ["zero3=1", "vzero3=1"]
    else:
        # otherwise the search shards the parameters again
        fields.append(("disable_sdp", True))
        if plan.default_dp_type != "ddp":
            fields.append(("default_dp_type", plan.default_dp_type))
    return (*fields, ("pin", (",".join(rules),)))
