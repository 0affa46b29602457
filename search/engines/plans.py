"""Export of a per-layer plan to an engine: files, launch command, and unsupported features.

For an engine with one set of degrees, the nearest plan that it can run is exported
(`search.engines.uniform_approximation`). The plan is converted to a `Candidate`, the candidate to a
`Run` by the search space of the engine, and the run to files by its writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypedDict, cast

from msgspec import field
from msgspec.structs import asdict

from autopar.command.fields import rows_of, words_of, written
from autopar.errors import InputError
from autopar.records import Record, replace
from autopar.run.architecture import Model
from autopar.run.model import ModelSpec
from autopar.run.of_plan import uniform_model
from autopar.run.plan import ZERO_DEFAULTS, Plan
from autopar.run.run import Run
from autopar.run.runtime import Engine
from autopar.run.strategy import chunks_of_sizes
from search.engines.candidate import FULL, NONE, Candidate
from search.engines.engine import Engine as EngineRecord, EngineRelease
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
    """Value of `--model`: a name shipped with autopar, or a file."""
    num_nodes: int
    gpus_per_node: int
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = True
    tp_overlap: bool = True
    gpu: str = "H100"
    """GPU model: the name of its card."""
    release: EngineRelease | None = None
    """Release of the engine to write for; None: the newest known."""
    tensor_degree: int | None = None
    """Tensor (or Ulysses) degree to use if layers differ in it and the engine supports only one.
    None: the largest degree of the plan. `autopar-export` tries each degree and selects the fastest
    that fits in memory. Ignored for a plan with one degree."""

    @property
    def seq_length(self) -> int:
        """Sequence length of the last layer type, tokens per sample."""
        return self.spec.layers[-1].seq_length


class NearestPlan(Record):
    """Nearest plan that an engine can run, with its differences from the requested plan."""

    plan: Plan
    losses: tuple[UnsupportedFeature, ...] = ()
    """Features of the requested plan that the engine cannot express; empty if it runs that plan."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as values to fill in."""
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    """Fields of `SearchOptions` whose value in the engine differs from the job. Estimates of time
    and memory use these values."""
    search: SearchFields = ()
    """Options of a search that finds only plans with these degrees that the engine runs unchanged;
    empty if every plan is such a plan."""


class ExportedPlan(NearestPlan):
    """Plan exported to one engine: files, launch command and unsupported features."""

    engine: Engine
    engine_version: str
    """Release of the engine that the keys come from."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    launch: str
    """Launch command of one node, with its environment; ends in a newline."""
    draft: Draft | None = None
    """Output of `Engine.write`; None for engines with per-layer plans."""
    runs: Run | None = None
    """Run that the files describe; None for engines with per-layer plans."""


Lower = Callable[[ExportJob], ExportedPlan]
"""Function that exports a plan. It raises InputError if the engine runs no similar plan."""


class ExporterSubspace(TypedDict, total=False):
    """Fields of `SearchOptions` that define one part of the plans that an engine runs."""

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
    """Space of per-layer plans that an engine runs unchanged, searched with `--engine`.

    It is `SPACE` in `plan.py` of the engine. Each subspace is searched exactly.
    """

    parts: tuple[tuple[ExporterSubspace, str], ...] = ()
    """Subspaces as pairs (options, constraints for `--pin` in addition to the degrees); empty: the
    engine runs every plan."""
    one_degree: bool = True
    """True if embedding, head and all layers share one tensor degree; each degree is searched."""
    context: bool = False
    """True if embedding, head and all layers share one context degree; each degree is searched.
    False: no context parallelism."""
    gathers: bool = False
    """True if context ranks all-gather keys and values instead of using a ring."""
    whole_sequences: bool = False
    """True if the engine has tensor parallelism without sequence parallelism."""
    priced: ExporterSubspace = field(default_factory=ExporterSubspace)
    """Options common to all subspaces, where the engine differs from the defaults of the search;
    `memory_of` is set separately."""
    stack: str | None = None
    """Software stack for step-time estimates; None: the default stack."""


# --------------------------------------------------------------------------------------------------
# Export of a plan.


def lower_for(engine: str) -> Lower:
    """Return the function that exports plans to an engine, which is named in EXPORTERS."""
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
    draft: Draft = engine.write(run, replace(place, release=job.release))
    return ExportedPlan(
        **asdict(replace(near, notes=(*near.notes, *draft.notes))),
        engine=cast(Engine, engine.name),
        engine_version=draft.version,
        files=draft.files,
        launch=draft.launch,
        draft=draft,
        runs=run,
    )


def space_of(engine: str) -> ExporterSpace:
    """Return the space of plans that an engine, named in EXPORTERS, runs unchanged."""
    plans = engine_named(engine).plans
    assert plans is not None, "plans are written for it"
    space: ExporterSpace = plans()
    return space


def unsupported_modules(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of model features that the export of per-layer plans does not support.

    Supported are multi-head and grouped-query attention, MLPs, and routed experts of one size.
    """
    found = {
        "latent attention": any(layer.latent is not None for layer in spec.layers),
        "sliding-window attention": any(
            layer.window is not None and layer.window < layer.seq_length for layer in spec.layers
        ),
        "shared experts": any(layer.shared_expert_width for layer in spec.layers),
        "attention sinks": any(layer.attention_sinks for layer in spec.layers),
        "more or fewer than two norms per layer": any(
            layer.num_norms is not None for layer in spec.layers
        ),
        "QK norms over all heads": any(layer.wide_qk_norms for layer in spec.layers),
        "experts with biases": any(
            layer.router_biases or (layer.biases and layer.num_experts is not None)
            for layer in spec.layers
        ),
        "MTP layers": spec.mtp_layers > 0,
    }
    return tuple(what for what, there in found.items() if there)


def has_one_kind(spec: ModelSpec) -> bool:
    """Return True if all layers have equal sizes and none has cross-attention."""
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


def choice_of_plan(plan: Plan, *, zero: int) -> Candidate:
    """Return the candidate with the degrees, batch sizes and stages of a plan with equal layers.

    Ulysses ranks become context-parallel ranks with all-to-all communication.

    zero : ZeRO stage.
    """
    layer, exchanged = plan.layers[0], exchange_degree(plan)
    tp = layer.tp // exchanged
    return Candidate(
        tp=tp,
        cp=layer.cp * exchanged,
        cp_kind="a2a" if exchanged > 1 else "ring",
        # In per-layer plans, tensor parallelism also shards the experts.
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
    """Return the run of a candidate made from a plan, in the precision of the job.

    model : model of the run; None: that of the job.

    Raises InputError if the model cannot be converted or the run is illegal.
    """
    own = model or uniform_model(job.spec)
    if own.has_unlike_heads:
        raise InputError(f"{own.torch_mixers} of {job.spec.name} have uniform plans alone")
    made = space.launch(
        SpaceJob(
            name=job.spec.name,
            model=own,
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
    """Return the export target of a job: its machines and its model."""
    return ExportTarget(
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        model=job.spec.name,
        spec=job.spec,
    )


# --------------------------------------------------------------------------------------------------
# Search options that match the behaviour of an engine, for estimates and for a new search.
#
# Engines may differ from the defaults of the search, such as in sequence parallelism. Each exporter
# lists the settings of its engine; estimates use those that differ from the job. Options for a new
# search are fields of `SearchOptions`, converted to text only for display.


# Options and rules of subspaces.
SINGLE_STAGE: ExporterSubspace = {"max_pp_deg": 1}
ONE_DEGREE: ExporterSubspace = {"fine_grained_mode": False}
EVERY_MICROBATCH: ExporterSubspace = {"async_grad_reduce": False}
REPLICAS: ExporterSubspace = {"default_dp_type": "ddp", "disable_sdp": True}
SHARDED_OPTIMIZER: ExporterSubspace = {"default_dp_type": "zero2", "disable_sdp": True}
MODEL_GRADIENTS: ExporterSubspace = {"fp32_gradients": False}
"""Gradients are accumulated and reduced in the precision of the weights, not in fp32."""
ZERO3 = "zero3=1,vzero3=1"

UNIFORM: SearchFields = (("fine_grained_mode", False),)
ONE_STAGE: SearchFields = (("max_pp_deg", 1),)


def different(job: ExportJob, plan: Plan, runs: Mapping[str, bool]) -> dict[str, bool]:
    """Return the options, with their value in the engine, that differ from the job.

    Options without effect are omitted: `async_grad_reduce` with one micro-batch per step, and
    `fp32_gradients` in fp32 training.

    runs : value in the engine by field of `ExportJob`.
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
    """Return the command-line options of a search for plans that the engine runs unchanged."""
    if not lowered.search:
        return ""
    return as_typed((*lowered.search, ("memory_of", lowered.engine)))


def search_fields(
    plan: Plan, runs: Mapping[str, bool], more: Sequence[tuple[str, Any]] = ()
) -> SearchFields:
    """Return the options of a search for plans with the degrees of `plan` that run unchanged.

    runs : value in the engine by field of `SearchOptions`.
    more : options of the engine, put first.
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
