"""Export of a per-layer plan to an engine: files, command, and plan features that are lost.

An engine with one set of degrees gets the nearest plan that it can run
(`search.engines.uniform_approximation`). This plan becomes a `Candidate`, then a `Run` by the
search space of the engine, then files by its writer.
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
from autopar.run.plan import ZERO_DEFAULTS, Plan
from autopar.run.run import Run
from autopar.run.runtime import Engine
from autopar.run.strategy import ContextKind, chunks_of_sizes
from search.engines.candidate import FULL, NONE, Candidate
from search.engines.engine import Engine as EngineRecord
from search.engines.exporter_types import Draft, ExportTarget, UnsupportedFeature
from search.engines.space import EngineContext as SpaceJob, EngineSpace
from search.engines.table import engine_named
from search.request.options import SearchOptions

SearchFields = tuple[tuple[str, Any], ...]
"""Pairs (field of `SearchOptions`, value), in the order of the command line."""


class ExportJob(Record):
    """Plan with model, cluster and training settings for an export."""

    plan: Plan
    spec: ModelSpec
    model: str
    """Model as the user named it: a shipped name or a file."""
    num_nodes: int
    gpus_per_node: int
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = True
    tp_overlap: bool = True
    gpu: str = "H100"
    """GPU model, by the name of its card."""
    tensor_degree: int | None = None
    """Tensor (or Ulysses) degree for a plan of several degrees, where the engine has one. None: the
    largest degree of the plan. `autopar-export` prices each degree and selects the fastest that
    fits. A plan of one degree keeps it, whatever this value."""

    @property
    def seq_length(self) -> int:
        """Sequence length of the last layer type, tokens per sample."""
        return self.spec.layers[-1].seq_length


class ExportedPlan(Record):
    """Plan exported to one engine: files, launch command and losses."""

    engine: Engine
    engine_version: str
    """Release of the engine that the keys come from."""
    plan: Plan
    """Plan that the engine executes with the files; the plan itself where nothing is lost."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    losses: tuple[UnsupportedFeature, ...]
    """Features of the plan that the engine cannot express; empty if it runs exactly this plan."""
    launch: str
    """Launch command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...] = field(default=())
    """Further notes for the user: memory-neutral choices, keys to fill in."""
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` as the engine runs the plan, where they differ from the job. The
    plan is priced with these values."""
    search: SearchFields = ()
    """Options of a search for plans of these degrees that the engine runs as priced; empty where
    any search finds such plans."""
    draft: Draft | None = None
    """Files and command from the writer of the engine; None: made without that writer."""
    runs: Run | None = None
    """Run that the files describe; None for engines with per-layer plans."""


Lower = Callable[[ExportJob], ExportedPlan]
"""Function that exports a plan. It raises InputError, one sentence, where no near plan exists."""


class ExporterSubspace(TypedDict, total=False):
    """Fields of `SearchOptions` that define one subspace of an engine's plans."""

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


class ExporterSpace(Record):
    """Space of plans that an engine runs unchanged: `SPACE` of its module, searched by `--engine`.

    Every subspace is searched exactly. Plans that the exporter would change are excluded.
    """

    parts: tuple[tuple[ExporterSubspace, str], ...] = ()
    """Subspaces as pairs (options, rules in addition to the degree); empty: the engine runs every
    plan."""
    one_degree: bool = True
    """True if embedding, head and all layers share one tensor degree: one subspace per degree."""
    context: bool = False
    """True if they also share one context degree: one subspace per degree. False: no context
    parallelism."""
    gathers: bool = False
    """True if context ranks all-gather keys and values instead of using a ring."""
    whole_sequences: bool = False
    """True if tensor parallelism has no sequence parallelism: whole sequences between blocks."""
    priced: ExporterSubspace = field(default_factory=ExporterSubspace)
    """Options of all subspaces in which the engine differs from the defaults of the search, except
    its memory (`--memory-of`)."""
    stack: str | None = None
    """Software stack used for step times; None: the default stack."""


class NearestPlan(Record):
    """Nearest plan that an engine can run, and its settings in the engine."""

    plan: Plan
    losses: tuple[UnsupportedFeature, ...] = ()
    """Changes of the plan; empty if the engine executes the plan exactly."""
    notes: tuple[str, ...] = ()
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` whose value in the engine differs from the job."""
    search: SearchFields = ()
    """Options of a search for plans that this engine runs as priced."""


# --------------------------------------------------------------------------------------------------
# Export of a plan.


def lower_for(engine: str) -> Lower:
    """Return the function that exports a plan to an engine, one of EXPORTERS."""
    own = engine_named(engine)
    lower: Lower = own.lower if own.lower is not None else partial(_lowered, own)
    return lower


def _lowered(engine: EngineRecord, job: ExportJob) -> ExportedPlan:
    """Return the export of a plan to an engine with one set of degrees, by the engine's writer."""
    assert engine.near is not None, "it runs the nearest plan"
    assert engine.handed is not None, "which is a uniform plan"
    assert engine.write is not None, "that is written"
    near: NearestPlan = engine.near(job)
    run, place = engine.handed(job, near.plan)
    draft: Draft = engine.write(run, place)
    return ExportedPlan(
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


def space_of(engine: str) -> ExporterSpace:
    """Return the space of plans that an engine, one of EXPORTERS, runs unchanged."""
    plans = engine_named(engine).plans
    assert plans is not None, "plans are written for it"
    space: ExporterSpace = plans()
    return space


def unsupported_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of model parts that no plan can be exported with.

    Plan writers support heads, MLPs and equal experts, and reject a model with other parts.
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
    """Return whether all layers have one shape and self-attention only, in any layer groups."""
    shapes = {
        (x.hidden_size, x.num_heads, x.seq_length, x.ffn_hidden_size, x.num_experts)
        for x in spec.layers
    }
    return len(shapes) == 1 and not any(layer.cross_attention for layer in spec.layers)


def zero_stage(plan: Plan) -> int:
    """Return the ZeRO stage of a plan with equal layers."""
    if plan.layers[0].zero3:
        return 3
    return ZERO_DEFAULTS.index(plan.default_dp_type)


def exchange_degree(plan: Plan) -> int:
    """Return the Ulysses degree of a plan with equal layers; 1: no Ulysses."""
    layer = plan.layers[0]
    return layer.tp if layer.ulysses else 1


def choice_of_plan(plan: Plan, *, zero: int, context: ContextKind = "ring") -> Candidate:
    """Return the choice (degrees and batch) of a plan with equal layers.

    Ulysses ranks become context ranks with all-to-all communication.
    context : context-parallel type of a plan without Ulysses.
    """
    layer, exchanged = plan.layers[0], exchange_degree(plan)
    tp = layer.tp // exchanged
    return Candidate(
        tp=tp,
        cp=layer.cp * exchanged,
        cp_kind="a2a" if exchanged > 1 else context,
        # In plans, tensor ranks split experts like all other weights.
        etp=tp,
        pp=plan.num_stages,
        schedule=plan.pipeline_type if plan.num_stages > 1 else "1f1b",
        micro_batch=plan.micro_batch,
        zero=zero,
        recompute=FULL if all(one.checkpoint for one in plan.layers) else NONE,
        global_batch=plan.global_batch,
        chunks=chunks_of_sizes(plan.stage_sizes, plan.num_stages),
    )


def run_of_choice(
    space: EngineSpace, job: ExportJob, choice: Candidate, model: Model | None = None
) -> Run:
    """Return the run of a choice made from a plan, in the precision of the job.

    model : model to use instead of that of the job. Raises InputError where no run has this model.
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


def target_of(job: ExportJob) -> ExportTarget:
    """Return the machines and the model of a job."""
    return ExportTarget(
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        model=job.spec.name,
        spec=job.spec,
    )


# --------------------------------------------------------------------------------------------------
# Search options for the plan as an engine runs it: to price it, and to search again.
#
# An engine may differ from the defaults of the search, such as sequence parallelism. Each exporter
# lists the settings of its engine, and the plan is priced with those that differ from the job.
# Options for a new search are fields of `SearchOptions`, converted to text only for display.


# Options and rules of subspaces.
SINGLE_STAGE: ExporterSubspace = {"max_pp_deg": 1}
ONE_DEGREE: ExporterSubspace = {"fine_grained_mode": False}
EVERY_MICROBATCH: ExporterSubspace = {"async_grad_reduce": False}
REPLICAS: ExporterSubspace = {"default_dp_type": "ddp", "disable_sdp": True}
SHARDED_OPTIMIZER: ExporterSubspace = {"default_dp_type": "zero2", "disable_sdp": True}
MODEL_GRADIENTS: ExporterSubspace = {"fp32_gradients": False}
"""Gradients are summed in the precision of the model."""
ZERO3 = "zero3=1,vzero3=1"

UNIFORM: SearchFields = (("fine_grained_mode", False),)
ONE_STAGE: SearchFields = (("max_pp_deg", 1),)


def different(job: ExportJob, plan: Plan, runs: Mapping[str, bool]) -> dict[str, bool]:
    """Return the options whose value in the engine differs from that of the priced job.

    With one micro-batch per step, the time of the gradient reduction makes no difference; in fp32,
    the precision of gradients makes none.
    """
    return {
        name: value
        for name, value in runs.items()
        if getattr(job, name) != value
        and not (name == "async_grad_reduce" and plan.num_microbatches == 1)
        and not (name == "fp32_gradients" and job.precision == "fp32")
    }


def as_typed(fields: Iterable[tuple[str, Any]]) -> str:
    """Return fields of `SearchOptions` and their values as command-line options."""
    rows = {row.field: row for row in rows_of(SearchOptions)}
    return " ".join(
        word
        for field, value in fields
        for word in words_of(rows[field], written(rows[field], value))
    )


def search_words(lowered: ExportedPlan) -> str:
    """Return command-line options of a search for plans that the engine runs as priced."""
    if not lowered.search:
        return ""
    return as_typed((*lowered.search, ("memory_of", lowered.engine)))


def search_fields(
    plan: Plan, runs: Mapping[str, bool], more: Sequence[tuple[str, Any]] = ()
) -> SearchFields:
    """Return the options of a search for plans of these degrees without losses.

    runs : options as the engine runs the plan. more : further options of the engine, put first.
    """
    fields = list(more)
    # Options at their default are omitted.
    fields += [item for item in runs.items() if item[1] != getattr(SearchOptions, item[0])]
    # All layers of a nearest plan have the same degrees, so the first layer is used.
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
        # Otherwise the search could select ZeRO-3.
        fields.append(("disable_sdp", True))
        if plan.default_dp_type != "ddp":
            fields.append(("default_dp_type", plan.default_dp_type))
    return (*fields, ("pin", (",".join(rules),)))
