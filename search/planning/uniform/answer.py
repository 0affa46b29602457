"""Search of uniform plans for a request: the fastest plan of every requested engine.

Model, cluster and training settings of the request become a job. Each engine is estimated with its
default software stack, or with that of `--stack`. Defaults that were used are returned as
sentences.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from autopar.errors import InputError, OptionError
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.run.rules import Notice, RuleError
from autopar.units import GIB, format_bytes
from search.engines.candidate import NONE, Candidate, Constraints, TrainingSettings
from search.engines.space import EngineContext, EngineSpace
from search.engines.table import engine_space, spaces, tuning, variants
from search.planning.space import global_batches, next_batch
from search.request.degrees import fixed_of, training_of
from search.request.options import Shares
from search.request.profiles import card_shape
from search.request.request import BATCH_OPTIONS, Request, model_spec

if TYPE_CHECKING:
    from autopar.answer import EngineBest
    from autopar.price.assessment import Target
    from autopar.rates.card import Card
    from autopar.rates.site import Site
    from autopar.run.run import Run
    from search.planning.uniform.best_first import PricedRun, UniformSearch, VariantResult

_TOKENS = 4 << 20
"""Tokens per step if no batch is given, a usual value at the start of training."""
_USUAL_SEQ = 8192
"""Largest usual length of training samples, tokens; models may support longer ones."""
_SAMPLES = 128
"""Samples per step of fine-tuning if no batch is given, as in Alpaca's and Tulu's recipes."""


class UniformRequest(Record):
    """Input of a search for uniform plans."""

    spec: ModelSpec
    job: EngineContext
    num_nodes: int
    gpus_per_node: int
    card: Card
    """GPU model data, with the memory limit and the GPUs per node of the request."""
    site: Site | None
    """Probed cluster factors; None: datasheet values of the card."""
    engines: tuple[EngineSpace, ...]
    fixed: Constraints
    oom_risk: float
    """Largest accepted OOM probability."""
    within: float = 0.0
    """Share of the throughput that a safer or simpler plan may cost."""
    stack: str | None
    """Software stack for all engines; None: the default of each engine."""
    top: int
    """Number of alternatives with other degrees, in addition to the fastest plan."""
    seconds: float | None = None
    """Time limit of all searches together, seconds; None: until `gap` is proven."""
    gap: float = 0.0
    """Accepted relative excess of the step time of the fastest plan over the optimum."""
    price: float | None = None
    """Price of one GPU-hour, dollars; None if it is not given."""
    assumed: tuple[str, ...]
    """Defaults that were used, one sentence each."""
    usual_batch: bool = False
    """True if the global batch is `usual_batch`, since none was given."""

    @property
    def title(self) -> str:
        """Title of an answer: model, cluster and global batch."""
        batches = self.job.global_batches
        batch = str(batches[0]) if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
        layers = self.spec.num_layers
        return (
            f"{self.spec.name} ({layers} layers, {self.job.seq:,} tokens) on {self.num_nodes} x "
            f"{self.gpus_per_node} {self.card.name}, global batch {batch}"
        )


class EngineResult(Record):
    """Result of the search of one engine."""

    engine: EngineSpace
    target: Target
    solved: VariantResult | None
    reason: str = ""
    """Reason why there is no plan; empty if there is one."""
    broken: tuple[Notice, ...] = ()
    """Violated rules that exclude all plans; empty if there are none."""
    other_precision: PricedRun | None = None
    """Fastest plan in 16 bits, or in lower precision if 16 bits are fastest; None if none is
    allowed."""
    without_host: PricedRun | None = None
    """Fastest plan without activation offload, if the chosen plan has offload; else None."""
    chosen: PricedRun | None = None
    """Safest and simplest plan of those as fast as the fastest; None: the fastest."""
    safer: PricedRun | None = None
    """Fastest plan with an OOM probability of at most 0.1 %, at most 3 % slower than the fastest;
    None if there is none or the chosen one is as safe."""

    @property
    def fastest(self) -> PricedRun | None:
        """Fastest plan that fits; None if nothing fits."""
        return self.solved.solutions[0] if self.solved and self.solved.solutions else None

    @property
    def best(self) -> PricedRun | None:
        """The plan of the answer: the chosen one, by default the fastest; None if nothing fits."""
        return self.chosen or self.fastest


class UniformResult(Record):
    """Results of a request by engine, fastest first."""

    question: UniformRequest
    engines: tuple[EngineResult, ...]
    lines: tuple[EngineBest, ...] = ()
    """Best plan of each engine, per-layer plans included; empty if one engine was searched."""
    wall_s: float = 0.0
    """Wall-clock seconds of all searches."""

    @property
    def best(self) -> EngineResult | None:
        """Engine with the fastest plan; None if nothing fits."""
        return self.engines[0] if self.engines and self.engines[0].best else None

    @property
    def fastest(self) -> PricedRun | None:
        """Fastest plan of all engines; None if nothing fits."""
        return None if self.best is None else self.best.fastest

    @property
    def chosen(self) -> PricedRun | None:
        """The plan of the answer; None if nothing fits."""
        return None if self.best is None else self.best.best

    @property
    def status(self) -> Literal["optimal", "within_gap", "time_limit", "infeasible"]:
        """`optimal` or `within_gap` if that is proven for all engines, `infeasible` without plan.

        `time_limit` if the time limit ended a search.
        """
        searched = [one.solved for one in self.engines if one.solved is not None]
        if not all(one.complete for one in searched):
            return "time_limit"
        if self.best is None:
            return "infeasible"
        return "within_gap" if any(one.gap for one in searched) else "optimal"

    @property
    def bound_samples_per_s(self) -> float:
        """Upper bound of the throughput of any plan of these engines; 0 without plan and bound."""
        searched = [one.solved for one in self.engines if one.solved is not None]
        # a search that ended before it proved the optimum proves only this throughput
        open_s = [one.least_s for one in searched if one.least_s and (not one.complete or one.gap)]
        rate = 0.0 if self.fastest is None else self.fastest.samples_per_s
        return max([rate, *(1.0 / seconds for seconds in open_s)])

    @property
    def gap(self) -> float:
        """Upper bound of the relative excess of the step time over the optimum; 0 without plan."""
        if self.fastest is None:
            return 0.0
        return self.bound_samples_per_s / self.fastest.samples_per_s - 1.0

    @property
    def nearest(self) -> EngineResult:
        """Result of the engine that needs the least additional memory, if no plan fits."""

        def missing(one: EngineResult) -> float:
            shortage = None if one.solved is None else one.solved.shortage
            return math.inf if shortage is None else shortage.missing_bytes

        return min(self.engines, key=missing)

    @property
    def why_none(self) -> str:
        """Reason why no plan fits, of the nearest engine."""
        nearest = self.nearest
        one = len(self.engines) == 1
        return nearest.reason if one else f"{nearest.engine.name}: {nearest.reason}"

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all searches."""
        return sum(one.solved.effort.cpu_s for one in self.engines if one.solved)


def open_launches(
    request: Request, engines: tuple[EngineSpace, ...] | None = None
) -> UniformRequest:
    """Return the search input of a request, with all defaults filled in.

    Raises InputError if an option or file is missing or invalid.

    engines : engines to search; by default those of the request
    """
    from autopar.rates.card import domain_of, load_card, require_node
    from autopar.rates.site import load_site
    from autopar.run.of_plan import uniform_model

    inputs, options = request.inputs, request.options
    spec = model_spec(inputs)
    card_name, nodes, per_node = card_shape(
        str(inputs.hardware), inputs.num_nodes, inputs.num_gpus_per_node, inputs.world_size
    )
    card = load_card(card_name)
    require_node(card, per_node)
    site = None if inputs.site is None else load_site(inputs.site)
    if site is not None:
        site.require_card(card)
    assumed = list(request.found)
    if "memory-constraint" in request.given:
        asked = options.memory_constraint_bytes
        if asked > 1.02 * card.memory_bytes:
            raise OptionError(
                f"--memory-constraint: {asked / GIB:.4g} GiB is more than the "
                f"{card.memory_bytes / GIB:.4g} GiB of {card.name}",
                remedy="Remove it to use all of it",
            )
        card = replace(card, memory_bytes=asked)
    else:
        assumed.append(f"--memory-constraint {card.memory_bytes / GIB:.4g} (all of {card.name})")
    if per_node < card.max_gpus_per_node:
        card = replace(card, max_gpus_per_node=per_node)
    model = uniform_model(spec)
    degrees = request.degrees
    of_experts = {
        "ep": degrees.ep is not None and 1 not in degrees.ep,
        "etp": degrees.etp is not None and 1 not in degrees.etp,
        "dispatcher": degrees.dispatcher is not None,
        "moe-overlap": degrees.moe_overlap,
        "moe-skew": degrees.moe_skew is not None,
    }
    for name, typed in of_experts.items():
        if model.experts is None and typed:
            raise OptionError(f"--{name}: {spec.name} has no experts", remedy=f"Remove --{name}")
    world = nodes * per_node
    training = training_of(request.degrees)
    seq = spec.layers[0].seq_length
    if BATCH_OPTIONS & request.given.keys():
        batches = global_batches(options)
    else:
        batch = usual_batch(training, seq, world, even=model.has_patches)
        about = f"{_SAMPLES} samples" if training.fine_tunes else "4 Mi tokens"
        batches = (batch,)
        assumed.append(
            f"--global-batch-size {batch} (not given: about {about}, a multiple of the GPUs)"
        )
    if inputs.seq_length is None:
        longest = f": the longest of {spec.name}" if seq > _USUAL_SEQ else ""
        assumed.append(f"--seq-length {seq}{longest} (from the file of {spec.name})")
    if degrees.lora is None and training.lora_rank is not None:
        assumed.append(f"--lora {training.lora_rank} (the default of TRL)")
    if request.degrees.moe_skew is None and any(layer.num_experts for layer in spec.layers):
        assumed.append("--moe-skew 1 (tokens are spread evenly over experts)")
    if engines is None:
        named = request.engine not in (None, "any")
        engines = (engine_space(str(request.engine)),) if named else spaces()
    if training.fine_tunes:
        engines = tuple(map(tuning, engines))
    return UniformRequest(
        spec=spec,
        job=EngineContext(
            name=spec.name,
            model=model,
            seq=seq,
            global_batches=batches,
            world=world,
            gpu=card.gpu,
            domain=domain_of(card, world),
            skew=request.degrees.moe_skew,
            attended=None if request.samples is None else request.samples.attended(seq),
            training=training,
        ),
        num_nodes=nodes,
        gpus_per_node=per_node,
        card=card,
        site=site,
        engines=engines,
        fixed=_fixed(request),
        oom_risk=options.oom_risk,
        within=options.within,
        stack=inputs.stack,
        top=options.top,
        seconds=options.time_limit_s,
        gap=options.gap,
        price=request.output.price,
        assumed=tuple(assumed),
        usual_batch=not BATCH_OPTIONS & request.given.keys(),
    )


def usual_batch(training: TrainingSettings, seq: int, world: int, *, even: bool = False) -> int:
    """Return the global batch of a training if none is given, a multiple of the GPUs.

    even : True for a power of two per GPU; the tokens of an image seldom divide those of a batch
    """
    usual = _SAMPLES if training.fine_tunes else _TOKENS / seq
    each = max(1.0, usual / world)
    return world * (1 << round(math.log2(each)) if even else round(each))


def _fixed(request: Request) -> Constraints:
    """Return the constraints of a request, `--tp-overlap` and `--cp-kind` included."""
    fixed = fixed_of(request.degrees)
    if "tp-overlap" in request.given:
        fixed = replace(fixed, tp_overlap=request.options.tp_overlap)
    kind = request.options.cp_kind
    if "cp-kind" not in request.given:
        return fixed
    return replace(fixed, cp_kind=(kind,))


def answer(
    question: UniformRequest,
    shares: Shares | None = None,
    *,
    grace_s: float | None = None,
    spaces: dict[EngineSpace, UniformSearch] | None = None,
) -> UniformResult:
    """Return the fastest plan of every requested engine, and alternatives on the fastest engine.

    Alternatives are plans with other degrees, another precision, or no activation offload. Of the
    plans that are as fast, the safest and simplest is the plan of the answer
    (`search.planning.uniform.choice`). Raises InputError if no engine has a legal plan, for any
    memory size.

    shares : division of the time limit among searches. By default, that of the question with one
        search per engine.
    grace_s : additional CPU seconds for each engine without a plan at its time limit. The default
        is `search.planning.uniform.best_first.GRACE_S`.
    spaces : searches of this request by engine variant, which are continued.
    """
    from search.planning.uniform.best_first import GRACE_S, LEAST_S
    from search.planning.uniform.choice import SAFE_SHARE, choose

    began = time.perf_counter()
    grace_s = GRACE_S if grace_s is None else grace_s
    shares = shares or Shares(question.seconds, len(question.engines))
    spaces = {} if spaces is None else spaces
    found: list[EngineResult] = []
    first = 0.0
    for engine in question.engines:
        own, seconds = allowed_variants(question, engine), shares.following()
        share = None if seconds is None else seconds / len(own)
        # the first engine usually has the fastest plan, for which alternatives are needed
        top = 1 if first else 1 + question.top
        # beside a plan of another engine, the smallest plan of an engine is a detail
        limits = SearchLimits(share, grace_s, 0.0 if first else LEAST_S)
        one = _fastest_variant(question, own, spaces, top, limits)
        if one.best is not None and not first:
            first = one.best.samples_per_s
        found.append(one)
    if all(one.solved is None for one in found):
        from search.planning.uniform.infeasibility import none_is_legal

        raise none_is_legal([(one.engine.name, one.reason, one.broken) for one in found])
    # the sort is stable: equally fast engines keep their order
    found.sort(key=lambda one: -(one.best.samples_per_s if one.best else 0.0))
    best = found[0]
    if question.top and best.best is not None and best.best.samples_per_s > first:
        assert best.solved is not None
        again = spaces[best.engine].solve(
            question.fixed,
            top=1 + question.top,
            seconds=shares.following(),
            gap=question.gap,
        )
        if again.complete:
            cpu_s = best.solved.effort.cpu_s + again.effort.cpu_s
            # other variants of the engine prove no more than they did
            bounds = [one.least_s for one in (best.solved, again) if one.least_s]
            again = replace(
                again,
                effort=replace(again.effort, cpu_s=cpu_s),
                complete=best.solved.complete,
                least_s=min(bounds, default=None),
            )
            found[0] = replace(best, solved=again)
    if (question.within or question.top) and best.fastest is not None:
        chosen, safer = choose(
            spaces[best.engine],
            question.fixed,
            found[0].fastest or best.fastest,
            within=question.within,
            named=SAFE_SHARE if question.top else 0.0,
            shares=shares,
        )
        found[0] = replace(found[0], chosen=chosen, safer=safer)
    if question.top and best.best is not None:
        space = spaces[best.engine]
        found[0] = replace(
            found[0],
            other_precision=_other_precision(question, found[0], space, shares),
            without_host=_without_host(question, found[0], space, shares),
        )
    wall_s = time.perf_counter() - began
    return UniformResult(question=question, engines=tuple(found), wall_s=wall_s)


def searched_in(
    question: UniformRequest,
    engine: EngineSpace,
    spaces: dict[EngineSpace, UniformSearch],
    memory_bytes: float,
) -> EngineResult:
    """Return the fastest plan of an engine with another device memory.

    spaces : searches by engine variant, which keep bounds between calls; missing ones are added
    """
    from search.planning.uniform.best_first import GRACE_S

    own = allowed_variants(question, engine)
    share = None if question.seconds is None else question.seconds / len(own)
    limits = SearchLimits(share, GRACE_S, 0.0)
    asked = replace(question, card=replace(question.card, memory_bytes=memory_bytes))
    return _fastest_variant(asked, own, spaces, 1, limits)


def resized(question: UniformRequest, nodes: int, per_node: int) -> UniformRequest:
    """Return a request on another number of nodes, and of GPUs per node up to that of its card."""
    from autopar.rates.card import domain_of

    most = min(question.card.max_gpus_per_node, per_node)
    card, world = replace(question.card, max_gpus_per_node=most), nodes * per_node
    return replace(
        question,
        job=replace(question.job, world=world, domain=domain_of(card, world)),
        card=card,
        num_nodes=nodes,
        gpus_per_node=per_node,
    )


def least_gpu_s(question: UniformRequest, worlds: Sequence[int]) -> dict[EngineSpace, float]:
    """Return lower bounds of GPU-seconds per sequence by engine variant, on any of `worlds` GPUs.

    Variants that cannot run the request are missing.
    """
    from search.planning.uniform.cost_model import UniformCostModel
    from search.planning.uniform.space import UniformSearchSpace

    # rules allow most within one domain
    job = replace(question.job, domain=None)
    if question.card.domain_gpus is not None:
        # whichever part is used, its groups are at best within one domain
        card = replace(question.card, domain_gpus=max(*worlds, question.card.domain_gpus))
        question = replace(question, card=card)
    found = {}
    for engine in question.engines:
        for one in allowed_variants(question, engine):
            if question.fixed.compiled not in (None, one.compiled):
                continue
            try:
                prices = UniformCostModel(one, job, target_of(question, one, full=True))
                found[one] = UniformSearchSpace(prices, worlds).least_gpu_s(question.fixed)
            except InputError:
                continue  # the engine does not support the job
    return found


def fastest_within(
    question: UniformRequest,
    gpu_s: Mapping[EngineSpace, float],
    sample_s: float,
    shares: Shares,
    spaces: dict[EngineSpace, UniformSearch],
) -> tuple[EngineResult | None, bool]:
    """Return (engine with the fastest plan, True if this is proven), without alternatives.

    gpu_s : result of `least_gpu_s`.
    sample_s : most step seconds per sequence.
    shares : time limit of several requests, divided among them.
    spaces : searches by engine variant; those of this request are added.
    """
    from search.planning.uniform.best_first import UniformSearch

    best, proven = None, True
    until = Shares(shares.following(), len(gpu_s))
    for engine, least in gpu_s.items():
        seconds = until.following()
        if least / question.job.world > sample_s:
            continue
        target = target_of(question, engine)
        try:
            spaces[engine] = UniformSearch(engine, question.job, target)
            solved = spaces[engine].solve(
                question.fixed, seconds=seconds, grace_s=0.0, smallest_s=None, within_s=sample_s
            )
        except InputError:
            continue  # no plan of the engine is legal
        proven &= solved.complete
        if solved.solutions:
            best = EngineResult(engine=engine, target=target, solved=solved)
            sample_s = solved.solutions[0].sample_s
    return best, proven


def allowed_variants(question: UniformRequest, engine: EngineSpace) -> tuple[EngineSpace, ...]:
    """Return the variants of an engine that the constraints allow.

    If they allow none, one variant whose search reports the reason.
    """
    own = variants(engine)
    if question.stack is not None:
        own = tuple(one for one in own if one.stack == question.stack) or (engine,)
    wanted = question.fixed.compiled
    return tuple(one for one in own if wanted in (None, one.compiled)) or own[:1]


class SearchLimits(NamedTuple):
    """Limits of the search of one engine; as in `UniformSearch.solve`."""

    seconds: float | None
    grace_s: float
    smallest_s: float | None
    within_s: float = math.inf


def _fastest_variant(
    question: UniformRequest,
    variants: Sequence[EngineSpace],
    spaces: dict[EngineSpace, UniformSearch],
    top: int,
    limits: SearchLimits,
) -> EngineResult:
    """Return the result of the fastest variant of an engine.

    If one plan is wanted, a variant is not searched above the step time of the variants before it.

    spaces, top, limits : as in `_solved`
    """
    found: dict[EngineSpace, EngineResult] = {}
    # compiled layers are usually faster
    for variant in sorted(variants, key=lambda one: not one.compiled):
        plans = [one.best.sample_s for one in found.values() if one.best is not None]
        if plans and top == 1:
            limits = limits._replace(smallest_s=None, within_s=min(plans))
        found[variant] = _solved(question, variant, spaces, top, limits)
    return _of_variants([found[variant] for variant in variants])


def _solved(
    question: UniformRequest,
    engine: EngineSpace,
    spaces: dict[EngineSpace, UniformSearch],
    top: int,
    limits: SearchLimits,
) -> EngineResult:
    """Return the fastest plans of one variant of an engine, or the reason why there is none.

    spaces : searches by engine variant; that of `engine` is added if it is missing
    top : number of families of degrees to return
    """
    from search.planning.uniform.best_first import UniformSearch
    from search.planning.uniform.infeasibility import violated_rule

    target = target_of(question, engine)
    solved, reason, broken = None, "", tuple[Notice, ...]()
    try:
        if question.fixed.compiled not in (None, engine.compiled):
            raise InputError(_not_compiled(question, engine))
        illegal = violated_rule(engine, question.job, question.fixed)
        if illegal is not None:
            raise RuleError((illegal,))
        if engine not in spaces:
            spaces[engine] = UniformSearch(engine, question.job, target)
        solved = spaces[engine].solve(
            question.fixed,
            top=top,
            seconds=limits.seconds,
            grace_s=limits.grace_s,
            memory_bytes=question.card.memory_bytes,
            smallest_s=limits.smallest_s,
            within_s=limits.within_s,
            gap=question.gap,
        )
        if not solved.solutions and limits.within_s < math.inf:
            reason = "its plans are slower than those of another variant"
        elif not solved.solutions and not solved.complete:
            reason = "time limit reached before a feasible plan was found. Increase --time-limit"
        elif not solved.solutions and solved.smallest is None:
            solved, reason = None, _no_layout(question)
        elif not solved.solutions:
            reason = _shortage(question, solved)
    except RuleError as error:
        reason, broken = str(error), error.broken
    except InputError as error:
        reason = str(error)
    return EngineResult(engine=engine, target=target, solved=solved, reason=reason, broken=broken)


def _not_compiled(question: UniformRequest, engine: EngineSpace) -> str:
    """Return the reason why the requested `torch.compile` setting is not available."""
    if question.stack is not None and len(variants(engine)) > 1:
        stack = f"{engine.title}'s layers are those of --stack {engine.stack}"
        return f"{stack}. Remove one of them"
    return f"{engine.title} does not compile layers. Remove --compile"


def _of_variants(found: Sequence[EngineResult]) -> EngineResult:
    """Return the result of the fastest variant of an engine.

    Search statistics are summed over variants; the search is complete if it is for all variants.
    """

    def rank(one: EngineResult) -> tuple[bool, float, bool, float]:
        rate = one.best.samples_per_s if one.best else 0.0
        shortage = one.solved.shortage if one.solved is not None else None
        # without a plan, prefer a variant that knows its smallest one
        missing = math.inf if shortage is None else shortage.missing_bytes
        return one.best is not None, rate, one.solved is not None, -missing

    best = max(found, key=rank)
    searched = [one.solved for one in found if one.solved is not None]
    if best.solved is None or len(searched) < 2:
        return best
    efforts = [one.effort for one in searched]
    names = ("degrees", "choices", "opened", "timed", "counted", "cpu_s")
    effort = replace(
        best.solved.effort, **{name: sum(getattr(one, name) for one in efforts) for name in names}
    )
    bounds = [one.least_s for one in searched if one.least_s is not None]
    solved = replace(
        best.solved,
        effort=effort,
        complete=all(one.complete for one in searched),
        least_s=min(bounds) if bounds else None,
    )
    return replace(best, solved=solved)


def _other_precision(
    question: UniformRequest, best: EngineResult, space: UniformSearch, shares: Shares
) -> PricedRun | None:
    """Return the fastest 16-bit plan if the best uses lower precision, or vice versa, or None."""
    assert best.best is not None, "there is a launch to compare with"
    chosen = best.best.choice.precision
    allowed = [
        one
        for one in best.engine.precisions(question.job.gpu)
        if one in question.fixed.precision and (one == "bf16") != (chosen == "bf16")
    ]
    if not allowed:
        return None
    fixed = replace(question.fixed, precision=tuple(allowed))
    solved = space.solve(fixed, seconds=shares.following(), numbered=False)
    return solved.solutions[0] if solved.solutions else None


def _without_host(
    question: UniformRequest, best: EngineResult, space: UniformSearch, shares: Shares
) -> PricedRun | None:
    """Return the fastest plan without activation offload, if the search chose offload.

    None otherwise. Few measured runs use offload, so reports give its gain over this plan.
    """
    assert best.best is not None, "there is a launch to compare with"
    if best.best.choice.offload == NONE or question.fixed.offload is not None:
        return None
    fixed = replace(question.fixed, offload=(NONE,), precision=(best.best.choice.precision,))
    solved = space.solve(fixed, seconds=shares.following(), numbered=False)
    return solved.solutions[0] if solved.solutions else None


def _shortage(question: UniformRequest, solved: VariantResult) -> str:
    """Return a sentence on the missing memory of an engine's smallest plan."""
    smallest, shortage = solved.smallest, solved.shortage
    assert smallest is not None, "there is a launch that does not fit"
    assert shortage is not None, "it lacks memory"
    line = smallest.line
    lacks = format_bytes(shortage.missing_bytes)
    if shortage.host:
        return (
            f"no plan fits: the one with the least host memory, {line}, needs "
            f"{format_bytes(shortage.least_bytes)} per GPU, {lacks} more than "
            "the host has. Offload less, or use a card with more (autopar cards "
            "--host-memory)"
        )
    return f"no plan fits: the smallest, {line}, needs {lacks} more"


def _no_layout(question: UniformRequest) -> str:
    """Return the reason why legal degrees have no layer partition under the constraints."""
    layers, fixed = question.job.model.num_layers, question.fixed
    given = {"--vpp": fixed.vpp, "--schedule": fixed.schedule}
    named = [option for option, values in given.items() if values is not None]
    if named:
        return (
            f"{layers} layers cannot be divided into such chunks: the layers of "
            "the longest stage must be a multiple of its chunks. Remove "
            f"{' and '.join(named)}"
        )
    return (
        f"no chunk of {layers} layers has more layers than --recompute block "
        "recomputes. Use a smaller block"
    )


_BETTER_S = 5.0
"""CPU time limit of the search with another batch, seconds.

A suggestion needs no proof of optimality."""
_WORTH = 1.01
"""Minimum ratio of throughputs to suggest another batch."""


def faster_batch(found: UniformResult) -> PricedRun | None:
    """Return the best engine's plan for the next larger batch that divides evenly over ranks.

    None if the batch divides evenly, if several batches were searched, or if throughput increases
    by less than 1 %. The time limit is that of the first search, at most five seconds.
    """
    question, best = found.question, found.best
    batches = question.job.global_batches
    batch = next_batch(batches[0], question.job.world) if len(batches) == 1 else None
    if batch is None or best is None or best.best is None:
        return None
    limit = _BETTER_S if question.seconds is None else min(question.seconds, _BETTER_S)
    job = replace(question.job, global_batches=(batch,))
    asked = replace(question, job=job, engines=(best.engine,), top=0, within=0.0, seconds=limit)
    try:
        other = answer(asked).best
    except InputError:
        return None  # the constraints exclude this batch
    solution = other.best if other is not None else None
    assert best.fastest is not None, "the best engine has a plan"
    if solution is None or solution.samples_per_s < _WORTH * best.fastest.samples_per_s:
        return None
    return solution


def evaluated(
    question: UniformRequest, engine: EngineSpace, choice: Candidate, run: Run
) -> EngineResult:
    """Return step time and memory of one plan of an engine, whether it fits or not.

    Raises InputError if the plan has no step time.

    run : run of the candidate on the engine; its settings may differ from the engine's defaults.
    """
    from autopar.price.assessment import assess
    from search.planning.uniform.best_first import PricedRun, UniformSearchStats, VariantResult

    engine = engine_space(engine.name, compiled=choice.compiled)
    engine = tuning(engine) if run.runtime.fine_tunes else engine
    target = target_of(question, engine)
    assessment = assess(run, target)
    if assessment.step is None:
        raise InputError(f"no step time: {assessment.untimed}")
    solution = PricedRun(choice=choice, run=run, assessment=assessment)
    effort = UniformSearchStats(degrees=1, opened=0, timed=1, counted=1, cpu_s=0.0)
    solved = VariantResult(engine=engine, solutions=(solution,), smallest=None, effort=effort)
    return EngineResult(engine=engine, target=target, solved=solved)


def target_of(question: UniformRequest, engine: EngineSpace, *, full: bool = False) -> Target:
    """Return the target of an engine's plans: machine, accuracy data and OOM limit.

    full : True if the racks are full, whatever the number of GPUs.
    """
    from autopar.price.assessment import Target
    from autopar.rates.accuracy import load_accuracy
    from autopar.rates.parts.operations import machine_of
    from autopar.rates.stack import load_stack

    stack = load_stack(question.stack or engine.stack)
    gpus = None if full else question.job.world
    return Target(
        machine=machine_of(question.card, stack, question.site, gpus=gpus),
        accuracy=load_accuracy(),
        site_known=question.site is not None,
        oom_risk=question.oom_risk,
    )
