"""Who answers a request: launches of trainers, plans whose layers may differ, or the best of both.

Trainers with one set of degrees for a whole model have launches (`search.planning.uniform`); what
spans a space of plans whose layers may differ is of the planner of such plans
(`search.planning.layered.parts` and `search.planning.question`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import asdict

from autopar.answer import EngineBest
from autopar.command.fields import rows_of
from autopar.documents.catalog import site_files
from autopar.errors import InputError, OptionError
from autopar.records import Record, replace
from autopar.run.runtime import Engine
from search.engines.table import ENGINES, EXPORTERS
from search.planning.layered.parts import Chosen, choose, choose_any
from search.request.degrees import DegreeOptions, rules_of
from search.request.options import SPACE_PANEL, Shares
from search.request.profiles import card_shape, find_site_of, named_card
from search.request.request import (
    BATCH_OPTIONS,
    ROWS,
    Request,
    extended,
    model_spec,
    with_places,
)

if TYPE_CHECKING:
    from autopar.run.model import ModelSpec
    from search.engines.space import EngineSpace
    from search.planning.uniform.answer import EngineAnswer, Question

TRAINERS = tuple(one.name for one in ENGINES if one.spaces is not None)
"""Engines with one set of degrees."""
_OF_LAUNCHES = frozenset(
    {
        *(row.name for row in rows_of(DegreeOptions)),
        *BATCH_OPTIONS,
        *("model", "hardware", "nodes", "gpus-per-node", "gpus", "stack", "site"),
        *("num-layers", "seq-length", "hidden-size", "num-heads", "num-kv-heads", "head-dim"),
        *("ffn-hidden-size", "vocab-size", "make-vocab-size-divisible-by"),
        *("memory-constraint", "oom-risk", "bsz-scale", "top", "tp-overlap"),
    }
)
"""Options that a search over launches keeps to; all others are of plans whose layers may differ."""


class Route(Record):
    """Whose launches and plans answer a request."""

    launches: Question | None = None
    """What is asked of trainers; None: plans alone answer."""
    layered: tuple[Engine, ...] = ()
    """Engines whose plans may differ by layer; none: plans whatever runs them, unless launches
    answer."""
    why: str = ""
    """Why plans answer where one may have expected launches, in front of it what they are; empty
    elsewhere."""
    reason: str = ""
    """The same reason alone."""


def route_of(request: Request) -> Route:
    """Return who answers a request; raises InputError where its model cannot be read.

    Launches answer for their trainers where model and cluster are estimated, no option spans a
    space of plans whose layers may differ, and one launch can say the model. Where nobody names an
    engine, plans of the others stand beside them.
    """
    engine = request.engine
    if request.output.evaluate is not None or request.output.frontier:
        return _layered(request)
    if engine not in (None, "any", *TRAINERS):
        return _layered(request)
    if not _estimated(request):
        return _layered(request, _unnamed(request))
    others = [name for name in request.given if not _of_launches(name, request)]
    if others:
        return _layered(request, f"--{others[0]} is of such plans")
    from autopar.run.of_plan import uniform_model
    from search.planning.uniform.answer import open_launches

    spec = model_spec(request.inputs)
    if {*(request.degrees.ep or ())} - {1} and not any(one.num_experts for one in spec.layers):
        raise OptionError(f"--ep: {spec.name} has no experts; leave it out")
    try:
        uniform_model(spec)
    except InputError as error:
        return _layered(request, error.short)
    question = open_launches(request)
    plain = not _modern_parts(question.spec) and not request.degrees.any_given
    if plain and engine is None and request.inputs.stack is not None:
        return _layered(request, "--stack says of whose software times are, and no --engine")
    if plain:
        # plans of these trainers may be written where launches are not
        engines = tuple(one for one in question.engines if not _unwritten(question, one))
        if not engines:
            why = _unwritten(question, question.engines[0])
            return _layered(request, why)
        question = replace(question, engines=engines)
    if engine in TRAINERS:
        return Route(launches=question)
    names = {one.name for one in question.engines}
    layered = tuple(cast(Engine, name) for name in EXPORTERS if name not in names)
    return Route(launches=question, layered=layered)


def with_site(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return a request with the site of its cluster that lies in the default folder, as if typed.

    Also what is said of that on stderr. Sites are of estimates: hardware that is measured, or that
    nobody names, has none. Raises OptionError where several are of the cluster.
    """
    inputs = request.inputs
    name = named_card(inputs.hardware)
    if name is None or "site" in request.given or not site_files():
        return request, ()
    shape = card_shape(name, inputs.num_nodes, inputs.num_gpus_per_node, inputs.world_size)
    path, says = find_site_of(*shape)
    if path is None:
        return request, says
    line = f"--site {path} (it lies in {path.parent} and was measured on this cluster)"
    return replace(extended(request, {"site": str(path)}), found=(line,)), says


def _modern_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return what a model has that no plan whose layers may differ spreads over ranks."""
    layers = spec.layers
    found = {
        "experts": any(layer.num_experts is not None for layer in layers),
        "latent attention": any(layer.latent is not None for layer in layers),
        "windows of attention": any(layer.window is not None for layer in layers),
        "modules of further tokens": spec.mtp_layers > 0,
    }
    return tuple(what for what, there in found.items() if there)


def _unwritten(question: Question, engine: EngineSpace) -> str:
    """Return why no launch of a trainer is written for a model, empty where it is."""
    from autopar.run.strategy import chunks_of_sizes
    from search.engines.choice import Choice
    from search.engines.files import unwritten
    from search.engines.place import Place
    from search.engines.space import run_of

    model = question.job.model
    choice = Choice(
        zero=engine.zero[-1], chunks=chunks_of_sizes([model.num_layers], 1, mtp=model.mtp)
    )
    run = run_of(engine, replace(question.job, world=1), choice)
    place = Place(num_nodes=1, gpus_per_node=1, model=question.spec.name, spec=question.spec)
    return unwritten(run, engine=cast(Any, engine.name), place=place)


def _unnamed(request: Request) -> str:
    """Return what is not named of a question about estimates, so that trainers are not asked.

    Empty where nothing was typed, which plans the shipped example, and where files were measured.
    """
    inputs = request.inputs
    alone = {"model", "hardware"} & set(request.given)
    if (
        request.engine is not None
        or len(alone) != 1
        or with_places(inputs, request.options)[1].times
    ):
        return ""
    if inputs.time_profiling_path is not None or inputs.memory_profiling_path is not None:
        return ""
    if alone == {"hardware"}:
        return "" if named_card(inputs.hardware) is None else "give --model to ask trainers"
    return "give --hardware CARD:NxG to ask trainers"


def _estimated(request: Request, *, any_memory: bool = False) -> bool:
    """Return whether model and card are named, and no measured table stands for either.

    any_memory : memory may be measured.
    """
    inputs = request.inputs
    if named_card(inputs.hardware) is None or inputs.model is None:
        return False
    if inputs.time_profiling_path is not None:
        return False
    if inputs.memory_profiling_path is not None and not any_memory:
        return False
    return with_places(inputs, request.options)[1].times is None


def _of_launches(name: str, request: Request) -> bool:
    if name == "mixed-precision":
        # launches train in bf16
        return request.options.mixed_precision == "bf16"
    if name == "cp-kind":
        # plans gather keys and values, too, and of launches Megatron-LM's alone
        return request.options.cp_kind != "all-gather" or request.engine == "megatron"
    return name in _OF_LAUNCHES


def refuse_options_of_plans(path: str, request: Request) -> None:
    """Raise OptionError where something was typed beside a launch that no launch has."""
    for name in request.given:
        if not _of_launches(name, request):
            raise OptionError(
                f"--{name}: {path} is a launch, and the option is of plans whose layers may "
                "differ; leave it out"
            )


def _layered(request: Request, why: str = "") -> Route:
    """Return that plans whose layers may differ answer, as they do without launches."""
    engine = request.engine
    if engine is None and (request.output.frontier or not sweeps(request)):
        engine = "none"
    if engine == "none":
        engines: tuple[Engine, ...] = ()
        found = "plans whose layers may differ, whatever runs them"
    elif engine in (None, "any"):
        engines, found = cast(tuple[Engine, ...], EXPORTERS), "plans whose layers may differ"
    else:
        engines, found = (cast(Engine, engine),), f"plans of {engine} whose layers may differ"
    return Route(layered=engines, why=f"{found}: {why}" if why else "", reason=why)


def sweeps(request: Request) -> bool:
    """Return whether a request without `--engine` means the best of all engines.

    Where times are estimated, each engine has kernels of its own; measured times are of the
    software that was measured, and so are those of a stack that is named. Who says what is searched
    has that.
    """
    space = {row.name for row in ROWS if row.panel == SPACE_PANEL}
    if space & request.given.keys():
        return False
    if request.inputs.stack is not None or request.options.memory_of is not None:
        return False
    return _estimated(request, any_memory=True)


# --------------------------------------------------------------------------------------------------
# The best of launches and of plans whose layers may differ.


def chosen(request: Request, route: Route | None = None) -> Chosen:
    """Return the plans that answer a request; raises InputError, InfeasibleError.

    A limit of time is shared by all engines, the last share is that of what the best has besides.
    """
    from search.planning.uniform.answer import answer

    route = route or route_of(request)
    question = route.launches
    if question is None:
        return _per_layer(request, route)
    shares = Shares(question.seconds, len(question.engines) + len(route.layered) + 1)
    found = answer(question, shares)
    lines = [_line(question, one) for one in found.engines]
    layered = Chosen(request=request)
    if route.layered:
        layered = _plans(request, question, route.layered, shares)
        lines += layered.lines
        lines.sort(key=lambda line: -(line.samples_per_s or 0.0))
    every = tuple(lines) if len(lines) > 1 else ()
    return replace(layered, launches=replace(found, lines=every), lines=every)


def _per_layer(request: Request, route: Route) -> Chosen:
    """Return the per-layer plan of the engines of a route, or of whatever runs it."""
    request = with_rules(request, route.reason)
    if not route.layered:
        return Chosen(request=replace(request, engine=None), why=route.why)
    if request.output.frontier:
        raise OptionError("--engine: not together with --frontier; leave one of them out")
    one = len(route.layered) == 1
    found = choose(request) if one else choose_any(request, route.layered)
    return replace(found, why=route.why)


def _line(question: Question, one: EngineAnswer) -> EngineBest:
    from search.planning.uniform.files import degrees_entry

    engine = cast(Engine, one.engine.name)
    if one.best is None:
        return EngineBest(engine=engine, samples_per_s=None, reason=one.reason, broken=one.broken)
    choice, job = one.best.choice, question.job
    return EngineBest(
        engine=engine,
        samples_per_s=one.best.samples_per_s,
        launch=asdict(degrees_entry(choice, job.world)),
        words=choice.line(job.world, experts=job.model.experts is not None),
    )


def _plans(
    request: Request, question: Question, engines: tuple[Engine, ...], shares: Shares
) -> Chosen:
    """Return the fastest plans of engines for the batch that launches have; why there are none."""
    parts = _modern_parts(question.spec)
    why = f"its plans have no degrees for {' and '.join(parts)}" if parts else ""
    try:
        # what was typed as a degree is a rule there
        asked = with_rules(request)
    except OptionError as error:
        why, asked = why or error.short, request
    if why:
        lines = tuple(EngineBest(engine=one, samples_per_s=None, reason=why) for one in engines)
        return Chosen(request=request, lines=lines)
    if not BATCH_OPTIONS & request.given.keys():
        asked = extended(asked, {"settle_bsz": question.job.global_batches[0]})
    return choose_any(asked, engines, shares)


def with_rules(request: Request, why: str = "") -> Request:
    """Return a request whose fixed degrees are rules of plans whose layers may differ.

    why : `Route.reason`. Raises OptionError with what such plans do not have.
    """
    rules = rules_of(request.degrees, why)
    return extended(request, rules) if rules else request
