"""Selection of the search for a request: uniform plans, per-layer plans, or the best of both.

Engines with one set of degrees for the whole model have uniform plans (`search.planning.uniform`).
Options that define a space of per-layer plans select the planner of such plans
(`search.planning.layered.parts` and `search.planning.session`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from autopar.answer import EngineBest
from autopar.command.fields import rows_of
from autopar.documents.catalog import site_files
from autopar.documents.model import is_file_of_paddle
from autopar.errors import InputError, OptionError
from autopar.records import Record, replace
from autopar.run.rules import RuleError, broken
from autopar.run.runtime import Engine
from search.engines.table import ENGINES, EXPORTERS
from search.planning.layered.parts import (
    ChosenPlans,
    choose,
    choose_any,
    within_strategy_file,
)
from search.planning.layered.prediction import SearchResult
from search.planning.session import Session, open_session
from search.request.degrees import DegreeOptions, rules_of
from search.request.options import SPACE_PANEL, Shares
from search.request.profiles import card_shape, find_site_of, named_card
from search.request.request import (
    BATCH_OPTIONS,
    ROWS,
    Once,
    Request,
    extended,
    model_spec,
    with_places,
)

if TYPE_CHECKING:
    from autopar.run.model import ModelSpec
    from search.engines.space import EngineSpace
    from search.planning.uniform.answer import UniformRequest
    from search.planning.uniform.best_first import UniformSearch

TRAINERS = tuple(one.name for one in ENGINES if one.spaces is not None)
"""Engines with uniform plans."""
_OF_LAUNCHES = frozenset(
    {
        *(row.name for row in rows_of(DegreeOptions)),
        *BATCH_OPTIONS,
        *("model", "hardware", "nodes", "gpus-per-node", "gpus", "stack", "site"),
        *("num-layers", "seq-length", "hidden-size", "num-heads", "num-kv-heads", "head-dim"),
        *("ffn-hidden-size", "vocab-size", "make-vocab-size-divisible-by"),
        *("memory-constraint", "oom-risk", "within", "gap", "bsz-scale", "top", "tp-overlap"),
    }
)
"""Options of the search for uniform plans; any other option selects per-layer plans.

`_of_launches` adds the options whose effect depends on their value."""


class SearchChoice(Record):
    """Searches of a request: uniform plans, per-layer plans of some engines, or both."""

    launches: UniformRequest | None = None
    """Input of the search for uniform plans; None: only per-layer plans are searched."""
    layered: tuple[Engine, ...] = ()
    """Engines whose per-layer plans are searched.

    Empty: none if `launches` is set, else per-layer plans that no engine restricts."""
    why: str = ""
    """Kind of plans searched and why uniform plans are not; empty if this needs no explanation."""
    reason: str = ""
    """Reason in `why`, without the kind of plans."""


def route_of(request: Request) -> SearchChoice:
    """Return the kinds of plans to search for a request.

    Uniform plans are searched if times are estimated from a named model and card, all given options
    apply to uniform plans, and uniform plans can describe the model. Without `--engine`, per-layer
    plans of the remaining engines are searched, too. Raises InputError if the model cannot be read,
    and OptionError for `--ep` with a model without experts.
    """
    engine = request.engine
    if request.output.evaluate is not None:
        return _layered(request)
    if engine not in (None, "any", *TRAINERS):
        return _layered(request)
    if not _estimated(request):
        return _layered(request, _unnamed(request))
    others = [name for name in request.given if not _of_launches(name, request)]
    from autopar.run.model import is_uniform
    from autopar.run.of_plan import uniform_model
    from search.planning.uniform.answer import open_launches

    if others:
        precision = f"--precision {request.options.mixed_precision}"
        option = precision if others[0] == "mixed-precision" else f"--{others[0]}"
        why = f"{option} is an option of per-layer plans"
        if is_uniform(model_spec(request.inputs)):
            raise OptionError(
                f"{why}, which have no layers of this model", remedy=f"Remove {option}"
            )
        return _layered(request, why)
    spec = model_spec(request.inputs)
    if {*(request.degrees.ep or ())} - {1} and not any(one.num_experts for one in spec.layers):
        raise OptionError(f"--ep: {spec.name} has no experts", remedy="Remove --ep")
    try:
        uniform_model(spec)
    except InputError as error:
        if is_uniform(spec):
            # per-layer plans have no such models either
            raise
        return _layered(request, error.short)
    question = open_launches(request)
    plain = not _modern_parts(question.spec) and not request.degrees.any_given
    if plain and engine is None and request.inputs.stack is not None:
        return _layered(request, "--stack selects a software stack, but --engine is not given")
    if plain:
        # per-layer plans of these engines may be exportable where uniform plans are not
        engines = tuple(one for one in question.engines if not _unwritten(question, one))
        if not engines:
            why = _unwritten(question, question.engines[0])
            return _layered(request, why)
        question = replace(question, engines=engines)
    if engine in TRAINERS or is_uniform(spec):
        return SearchChoice(launches=question)
    names = {one.name for one in question.engines}
    layered = tuple(cast(Engine, name) for name in EXPORTERS if name not in names)
    return SearchChoice(launches=question, layered=layered)


def completed(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return (request, messages for stderr), completed by `with_engine` and `with_site`."""
    request, engine = with_engine(request)
    request, site = with_site(request)
    return request, (*engine, *site)


def with_engine(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return (request, messages for stderr), with the engine whose profiler wrote the memory file.

    The request is returned unchanged if `--engine` is given, or if the file is not of PaddleNLP.
    """
    memory = request.inputs.memory_profiling_path
    if memory is None or request.engine is not None:
        return request, ()
    if not is_file_of_paddle(Path(memory)):
        return request, ()
    line = (
        f"--engine not given; using paddlenlp, whose profiler wrote {memory}. Use --engine none "
        "for plans of any engine"
    )
    return replace(request, engine="paddlenlp"), (line,)


def with_site(request: Request) -> tuple[Request, tuple[str, ...]]:
    """Return (request, messages for stderr), with `--site` set to a file in the default folder.

    The request is returned unchanged if `--site` is given, if no site matches the cluster, or if
    `--hardware` does not name a card: a site corrects estimates, not measured profiles. Raises
    OptionError if several sites match the cluster.
    """
    inputs = request.inputs
    name = named_card(inputs.hardware)
    if name is None or "site" in request.given or not site_files():
        return request, ()
    shape = card_shape(name, inputs.num_nodes, inputs.num_gpus_per_node, inputs.world_size)
    path, says = find_site_of(*shape)
    if path is None:
        return request, says
    line = f"--site {path} (found in {path.parent}, measured on this cluster)"
    return replace(extended(request, {"site": str(path)}), found=(line,)), says


def _modern_parts(spec: ModelSpec) -> tuple[str, ...]:
    """Return the parts of a model that per-layer plans cannot parallelise."""
    from autopar.run.model import is_uniform

    layers = spec.layers
    found = {
        "experts": any(layer.num_experts is not None for layer in layers),
        "latent attention": any(layer.latent is not None for layer in layers),
        "sliding-window attention": any(layer.window is not None for layer in layers),
        "MTP layers": spec.mtp_layers > 0,
        "mixers": is_uniform(spec),
    }
    return tuple(what for what, there in found.items() if there)


def _unwritten(question: UniformRequest, engine: EngineSpace) -> str:
    """Return why an engine cannot export uniform plans of a model, empty if it can."""
    return ". ".join(one.text for one in broken(engine.writable, question.job.known(engine)))


def _unnamed(request: Request) -> str:
    """Return the advice to add `--model` or `--hardware`, without which no plan is estimated.

    Empty if the request gives both options, neither (which selects the shipped example), an engine,
    or measured files.
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
        return "" if named_card(inputs.hardware) is None else "use --model to search by engine"
    return "use --hardware CARD:NODESxGPUS to search by engine"


def _estimated(request: Request, *, any_memory: bool = False) -> bool:
    """Return True if model and card are named and no measured file replaces an estimate.

    any_memory : True to allow a measured memory file; measured times are never allowed.
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
        # uniform plans train in bf16
        return request.options.mixed_precision == "bf16"
    if name == "cp-kind":
        # per-layer plans support all-gather, too, but of the uniform plans only those of
        # Megatron-LM
        return request.options.cp_kind != "all-gather" or request.engine == "megatron"
    return name in _OF_LAUNCHES


def refuse_options_of_plans(path: str, request: Request) -> None:
    """Raise OptionError for options that do not apply to a given uniform plan."""
    for name in request.given:
        if not _of_launches(name, request):
            raise OptionError(
                f"--{name}: an option of per-layer plans, but {path} is a uniform plan",
                remedy=f"Remove --{name}",
            )


def _layered(request: Request, why: str = "") -> SearchChoice:
    """Return the choice of per-layer plans only; why : reason shown to the user."""
    engine = request.engine
    if engine is None and not searches_all_engines(request):
        engine = "none"
    if engine == "none":
        engines: tuple[Engine, ...] = ()
        found = "per-layer plans, for any engine"
    elif engine in (None, "any"):
        engines, found = cast(tuple[Engine, ...], EXPORTERS), "per-layer plans"
    else:
        engines, found = (cast(Engine, engine),), f"per-layer plans of {engine}"
    return SearchChoice(layered=engines, why=f"{found}: {why}" if why else "", reason=why)


def searches_all_engines(request: Request) -> bool:
    """Return True if a request without `--engine` searches per-layer plans of every engine.

    Times must be estimated, because measured times and those of `--stack` belong to one software
    stack. False if an option of the search space or `--memory-of` is given.
    """
    space = {row.name for row in ROWS if row.panel == SPACE_PANEL}
    if space & request.given.keys():
        return False
    if request.inputs.stack is not None or request.options.memory_of is not None:
        return False
    return _estimated(request, any_memory=True)


# --------------------------------------------------------------------------------------------------
# Best of uniform and per-layer plans.


class Solved(Record, eq=False):
    """The fastest plan of all searches of a request, or the reason why there is none."""

    request: Request
    found: ChosenPlans
    per_layer: tuple[Session, SearchResult] | None = None
    """Inputs and result of the search for per-layer plans; None if a uniform plan is the answer."""

    @property
    def result(self) -> SearchResult:
        """The answer; a `UniformSearchResult` unless a per-layer plan is the fastest."""
        if self.per_layer is not None:
            return self.per_layer[1]
        from search.planning.uniform.result import result_of

        assert self.found.launches is not None, "a uniform plan is the answer"
        return result_of(self.found.launches, self.request)


def solve(
    request: Request,
    route: SearchChoice | None = None,
    *,
    alternatives: bool = True,
    once: Once = lambda key, make: make(),
) -> Solved:
    """Return the answer of a request; every command and Python function calls this function.

    route : result of `route_of`, if known
    alternatives : False to search no alternatives of per-layer plans, which halves their time
    once : cache of inputs, as in `open_session`

    Raises as `chosen`.
    """
    found = chosen(request, route)
    if found.launches is not None and not found.layers_differ:
        return Solved(request=request, found=found)
    session = opened(found, once)
    result = best_per_layer(found, session, alternatives=alternatives)
    return Solved(request=request, found=found, per_layer=(session, result))


def opened(found: ChosenPlans, once: Once = lambda key, make: make()) -> Session:
    """Return the session that finds the best per-layer plan; once : as in `open_session`."""
    request = found.request
    session = open_session(request.inputs, request.options, request.given, once=once)
    return replace(session, defaults=(*request.found, *session.defaults))


def best_per_layer(
    found: ChosenPlans, session: Session, *, alternatives: bool = True
) -> SearchResult:
    """Return the best per-layer plan, with alternatives unless these are not wanted.

    session : result of `opened`
    """
    # With a time limit, the plan found so far is not searched again.
    known = None if found.request.options.time_limit_s is None else found.result
    result = known or (session.solve() if alternatives else session.planner.solve(top=0))
    return replace(
        result, defaults_used=session.defaults + result.defaults_used, engines=found.lines
    )


def chosen(
    request: Request,
    route: SearchChoice | None = None,
    spaces: dict[EngineSpace, UniformSearch] | None = None,
) -> ChosenPlans:
    """Return the best uniform and per-layer plans of a request.

    The time limit is divided among the engines, with one more share for the follow-up searches of
    the best engine. Raises InputError for invalid inputs and InfeasibleError if no plan fits.

    spaces : searches for uniform plans by engine variant, as in `answer`
    """
    route = route or route_of(request)
    question = route.launches
    if question is None:
        return _per_layer(request, route)
    from search.planning.uniform.answer import answer
    from search.planning.uniform.summary import best_of

    shares = Shares(question.seconds, len(question.engines) + len(route.layered) + 1)
    try:
        found = answer(question, shares, spaces=spaces)
    except RuleError as error:
        helps = any(one.remedy and "--engine" not in one.remedy for one in error.broken)
        if not route.layered or request.degrees.any_given or helps:
            raise
        # rules on files of uniform plans are no rules of per-layer plans
        try:
            why = f"per-layer plans: {error.short}"
            route = replace(route, launches=None, why=why, reason=error.short)
            return _per_layer(request, route)
        except InputError:
            raise error from None
    lines = [best_of(question, one) for one in found.engines]
    layered = ChosenPlans(request=request)
    if route.layered:
        layered = plans_of(request, question, route.layered, shares)
        lines += layered.lines
        lines.sort(key=lambda line: -(line.samples_per_s or 0.0))
    every = tuple(lines) if len(lines) > 1 else ()
    return replace(layered, launches=replace(found, lines=every), lines=every)


def _per_layer(request: Request, route: SearchChoice) -> ChosenPlans:
    """Return the per-layer plans of the engines in `route.layered`.

    Without engines, returns the request for a later search.
    """
    if "within" in request.given:
        raise OptionError(
            "--within: a choice among uniform plans, but per-layer plans are searched",
            remedy="Remove --within",
        )
    if request.options.gap:
        raise OptionError(
            "--gap: a limit of the search for uniform plans, but per-layer plans are searched",
            remedy="Remove --gap",
        )
    request = with_pinned_degrees(request, route.reason)
    if not route.layered:
        own = request if request.engine == "none" else within_strategy_file(request)
        return ChosenPlans(request=replace(own, engine=None), why=route.why)
    one = len(route.layered) == 1
    found = choose(request) if one else choose_any(request, route.layered)
    return replace(found, why=route.why)


def plans_of(
    request: Request, question: UniformRequest | None, engines: tuple[Engine, ...], shares: Shares
) -> ChosenPlans:
    """Return the fastest per-layer plan of each engine, or the reason why it has none.

    question : input of the search for uniform plans of the request, if there is one. The global
        batch is that of its plans unless the user sets a batch.
    """
    parts = () if question is None else _modern_parts(question.spec)
    why = f"its plans have no degrees for {' and '.join(parts)}" if parts else ""
    try:
        # degrees that the user gave become rules of per-layer plans
        asked = with_pinned_degrees(request)
    except OptionError as error:
        why, asked = why or error.short, request
    if why:
        lines = tuple(EngineBest(engine=one, samples_per_s=None, reason=why) for one in engines)
        return ChosenPlans(request=request, lines=lines)
    if question is not None and not BATCH_OPTIONS & request.given.keys():
        asked = extended(asked, {"settle_bsz": question.job.global_batches[0]})
    return choose_any(asked, engines, shares)


def with_pinned_degrees(request: Request, why: str = "") -> Request:
    """Return the request with degrees such as `--tp 8` converted to pins of per-layer plans.

    why : `SearchChoice.reason`, for errors.

    Raises OptionError for degrees that per-layer plans do not support.
    """
    rules = rules_of(request.degrees, why)
    return extended(request, rules) if rules else request
