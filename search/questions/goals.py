"""Choice of a part of a cluster for a goal: the fastest, the cheapest per token, or the smallest.

`--hardware CARD:NODESxGPUS` names all GPUs, `--use` how many of them a plan may use. The uniform
plans of a part are searched as those of a separate cluster, but only as far as its bounds allow a
better one, so that the choice is exact over all parts. Per-layer plans are searched on all GPUs
and on the chosen part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.errors import InfeasibleError, OptionError
from autopar.rates.card import nodes_joined, parse_hardware, tray_gpus
from autopar.records import Record, replace
from autopar.run.model import ModelSpec, model_parameter_count
from autopar.run.rules import RuleError
from autopar.units import format_bytes
from search.engines.candidate import TrainingSettings
from search.engines.table import NOISE
from search.planning.choose import SearchChoice, chosen, route_of
from search.planning.uniform.answer import (
    UniformRequest,
    UniformResult,
    fastest_within,
    least_gpu_s,
    resized,
)
from search.request.options import ALL, UP_TO, Shares
from search.request.request import BATCH_OPTIONS, Request, build_request

if TYPE_CHECKING:
    from autopar.command.answer_schemas import ClusterResult, PartEntry
    from autopar.rates.card import Card
    from search.engines.space import EngineSpace
    from search.planning.layered.parts import ChosenPlans
    from search.planning.uniform.best_first import UniformSearch

_STATES_BYTES = 12
"""Lower bound of bytes per parameter over all GPUs with Adam: two fp32 moments, an fp32 weight."""
_WORTH = 1.0 + NOISE
"""Ratio of throughputs above which a part is faster than all GPUs."""
_BY_SIZE = ("batch.", "grid.")
"""Beginnings of the ids of rules that may exclude all plans of one number of GPUs alone."""

Shape = tuple[int, int]
"""(number of nodes, GPUs of each)."""


class GoalResult(Record, eq=False):
    """The part of a cluster chosen for a goal, and all parts that were searched."""

    words: str
    """Sentence with the part, its throughput and that of all GPUs."""
    part: PartEntry
    tried: tuple[ClusterResult, ...]
    whole: UniformResult | None
    """Fastest uniform plan of all GPUs if fewer are faster; else None."""


class GoalAnswer(Record, eq=False):
    """The best plans on the chosen part of a cluster."""

    request: Request
    """Request of the search on the part, as typed."""
    route: SearchChoice
    found: ChosenPlans
    reached: GoalResult | None = None
    """Choice of the part; None if there was none."""


# --------------------------------------------------------------------------------------------------
# Parts


def clusters_of(card: Card, nodes: int, per_node: int) -> tuple[Shape, ...]:
    """Return the shapes of a cluster and its parts, smallest first.

    Parts of a node are 1, 2, 4 .. GPUs, or whole trays. Several nodes are used whole, or, if they
    have several trays, with equal numbers of trays. All domains of a part have equally many GPUs.
    """
    tray = tray_gpus(card)
    if tray is None:
        some = [1 << power for power in range(per_node.bit_length()) if 1 << power < per_node]
    else:
        some = [*range(tray, per_node, tray)]
    shapes = [(1, gpus) for gpus in some]
    shapes += [(number, per_node) for number in range(1, nodes + 1)]
    if tray is not None:
        shapes += [(number, gpus) for number in range(2, nodes + 1) for gpus in some]

    def is_even(number: int, gpus: int) -> bool:
        joined = nodes_joined(card, number, gpus)
        # parts of nodes that one domain joins are fewer whole nodes
        return number % joined == 0 and (gpus == per_node or joined == 1)

    kept = [one for one in shapes if is_even(*one) or one == (nodes, per_node)]
    return tuple(sorted(kept, key=lambda one: (one[0] * one[1], one[0])))


def _parts(request: Request, question: UniformRequest | None) -> tuple[Shape, ...]:
    """Return the shapes that a request may use, smallest first; empty for all GPUs.

    Without `--use` and `--goal`, parts are considered in racks alone, whose numbers of GPUs have
    other factors than batches and models. Elsewhere all GPUs are nearly always the fastest.

    Raises OptionError if the request has no uniform plans, or no part has the given GPUs.
    """
    use, named = request.output.use, _named(request)
    if question is None:
        if not named:
            return ()
        raise OptionError(
            f"{named[0]} needs --model NAME and --hardware CARD:NODESxGPUS, without "
            "measured files or options of per-layer plans",
            remedy=f"Remove {named[0].partition(' ')[0]}",
        )
    nodes, per_node = question.num_nodes, question.gpus_per_node
    if use is None and not named:
        limited = request.output.frontier or request.options.time_limit_s is not None
        if limited or tray_gpus(question.card) is None:
            return ()
    if use == ALL:
        return ((nodes, per_node),) if named else ()
    found = clusters_of(question.card, nodes, per_node)
    if use in (None, UP_TO):
        return found
    some = tuple(one for one in found if one[0] * one[1] == int(use))
    if not some:
        near = sorted({a * b for a, b in found}, key=lambda gpus: abs(gpus - int(use)))[:2]
        raise OptionError(
            f"--use {use}: no part of {nodes} x {per_node} {question.card.name} has {use} GPUs",
            remedy=f"Use {' or '.join(map(str, sorted(near)))}",
        )
    return some


def _named(request: Request) -> list[str]:
    """Return the given options that choose among parts of a cluster."""
    use, goal = request.output.use, request.output.goal
    named = [f"--goal {goal}"] if goal != "throughput" else []
    return named + ([f"--use {use}"] if use not in (None, ALL) else [])


def too_small(question: UniformRequest, spec: ModelSpec) -> str:
    """Return why no run of any engine fits on a cluster; empty if one may fit.

    The lower bound is the memory of weights and Adam moments, sharded over all GPUs. It is not
    applied to fine-tuning, offload or low-precision moments.
    """
    if question.job.training != TrainingSettings():
        return ""
    least = _STATES_BYTES * model_parameter_count(spec) / question.job.world
    if least <= question.card.memory_bytes:
        return ""
    return f"weights and moments alone need {format_bytes(least)} per GPU"


# --------------------------------------------------------------------------------------------------
# Search


def solved_goal(raw: Mapping[str, object], request: Request) -> GoalAnswer:
    """Return the best plans of a request on the part of its cluster that reaches its goal.

    If nothing fits on any part, return the search on the largest, which reports suggestions. A
    time limit is divided equally among all GPUs, the parts, and the chosen part.

    Raises InputError as `chosen`, also OptionError if the request has no uniform plans. Raises
    InfeasibleError if plans fit but none reaches `--tokens-per-s`.
    """
    route = route_of(request)
    question = route.launches
    parts = _parts(request, question)
    if question is None or not parts:
        return GoalAnswer(request=request, route=route, found=chosen(request, route))
    limit = request.options.time_limit_s
    if limit is not None:
        raw = {**raw, "time-limit": str(limit / 3.0)}
        request = replace(request, options=replace(request.options, time_limit_s=limit / 3.0))
        question = replace(question, seconds=limit / 3.0)
        route = replace(route, launches=question)
    whole = (question.num_nodes, question.gpus_per_node)
    search = _PartSearch(request, question, parts)
    if search.goal == "throughput" and whole in parts:
        search.search(whole)
        if whole not in search.rates and search.proven:
            try:
                found = chosen(request, route, search.spaces.get(whole))
            except RuleError as error:
                if not all(one.startswith(_BY_SIZE) for one in error.ids):
                    raise
                search.refusal = error
            else:
                # fewer GPUs have less memory
                return GoalAnswer(request=request, route=route, found=found)
    search.run()
    if route.layered and search.of_all is not None and search.best != whole:
        # a per-layer plan on all GPUs may be faster than the part
        found = chosen(request, route, search.spaces[whole])
        search.rates[whole] = _tokens_per_s(found, question)
    best = search.best
    if best is None:
        _refuse_all(search)
    shape = best or parts[-1]
    if shape != whole:
        request = build_request(_options_on(raw, request, question, search.hardware(shape)))
    if best is not None and search.wanted:
        # a safer plan must reach the wanted throughput, too
        spare = max(search.rates[best] / search.wanted - 1.0, 0.0)
        within = min(request.options.within, spare)
        request = replace(request, options=replace(request.options, within=within))
    route = route_of(request)
    found = chosen(request, route, search.spaces.get(shape))
    reached = None
    # without --use and --goal, an answer for all GPUs needs no mention
    if best is not None and (shape != whole or _named(request)):
        reached = search.result(found)
    return GoalAnswer(request=request, route=route, found=found, reached=reached)


_OF_WHOLE = frozenset(
    {"num-nodes", "num-gpus-per-node", "world-size", "nodes", "gpus-per-node", "gpus"}
    | {"goal", "tokens-per-s", "use"}
)
"""Options of the given cluster, and of the choice among its parts."""


def _options_on(
    raw: Mapping[str, object], request: Request, question: UniformRequest, hardware: str
) -> dict[str, object]:
    """Return the options of a request on a part, with the global batch and site of the whole."""
    common = {key: value for key, value in raw.items() if key not in _OF_WHOLE}
    if not BATCH_OPTIONS & request.given.keys():
        common["global-batch-size"] = str(question.job.global_batches[0])
    if "site" in request.given:
        common["site"] = request.given["site"]
    return {**common, "hardware": hardware}


def _tokens_per_s(found: ChosenPlans, question: UniformRequest) -> float:
    """Return the throughput of the fastest plan, tokens/s of all its GPUs; 0 without one."""
    rates = [line.samples_per_s or 0.0 for line in found.lines]
    best = None if found.launches is None else found.launches.fastest
    rates += [] if best is None else [best.samples_per_s]
    return max(rates, default=0.0) * question.job.seq


def _of_answer(found: ChosenPlans, question: UniformRequest) -> float:
    """Return the throughput of the plan of the answer, which may be safer than the fastest."""
    plan = None if found.launches is None or found.layers_differ else found.launches.chosen
    return _tokens_per_s(found, question) if plan is None else plan.samples_per_s * question.job.seq


class _PartSearch:
    """Search for the part of a cluster whose uniform plans reach a goal best."""

    def __init__(self, request: Request, question: UniformRequest, parts: Sequence[Shape]) -> None:
        self.goal = request.output.goal
        self.wanted = request.output.tokens_per_s or 0.0
        self.question, self.parts = question, parts
        self.whole = (question.num_nodes, question.gpus_per_node)
        self._card = parse_hardware(str(request.inputs.hardware))[0]
        self.rates: dict[Shape, float] = {}
        """Tokens/s of the fastest plan by part, as far as known."""
        self.reasons: dict[Shape, str] = {}
        """Why the fastest plan of a part is not known."""
        self.proven = True
        self.of_all: UniformResult | None = None
        """Fastest uniform plan of all GPUs, without alternatives; None if it is not known."""
        self.spaces: dict[Shape, dict[EngineSpace, UniformSearch]] = {}
        """Searches by engine variant, of all GPUs and of the best part."""
        self.refusal: RuleError | None = None
        """Why no plan is legal on all GPUs."""
        self.least_gpu_s = least_gpu_s(question, sorted({_gpus(one) for one in parts}))
        self._shares = Shares(question.seconds, len(parts))

    def hardware(self, shape: Shape) -> str:
        """Return a part as value of `--hardware`."""
        return f"{self._card}:{shape[0]}x{shape[1]}"

    @property
    def best(self) -> Shape | None:
        """Part that reaches the goal best, of those with a known throughput."""
        good = [one for one, rate in self.rates.items() if rate >= self.wanted]
        return max(good, key=self._value, default=None)

    def _value(self, shape: Shape) -> tuple[float, float]:
        rate, gpus = self.rates[shape], _gpus(shape)
        if self.goal == "fewest-gpus":
            return -gpus, rate
        if self.goal == "cost":
            return rate / gpus, -gpus
        return rate / (1.0 if shape == self.whole else _WORTH), -gpus

    def _needed(self, shape: Shape) -> float:
        """Return the tokens/s that a part needs to be better than the best one."""
        best, gpus = self.best, _gpus(shape)
        if best is None or self.goal == "fewest-gpus":
            return self.wanted
        if self.goal == "cost":
            return max(self.wanted, self.rates[best] / _gpus(best) * gpus)
        return self.rates[best] * (_WORTH if best == self.whole else 1.0)

    def run(self) -> None:
        """Search all parts, smallest first for the fewest GPUs."""
        order = [*self.parts]
        if self.goal != "fewest-gpus":
            # the whole for comparison, then sizes with many factors of two, which usually have the
            # best plans, so that bounds exclude most of the others
            order.sort(
                key=lambda one: (one != self.whole, -(_gpus(one) & -_gpus(one)), -_gpus(one))
            )
        for shape in order:
            best = self.best
            if self.goal == "fewest-gpus" and best and _gpus(shape) > _gpus(best):
                break
            if shape not in self.rates and (shape != self.whole or self.refusal is None):
                self.search(shape)

    def search(self, shape: Shape) -> None:
        """Search the uniform plans of a part that are better than those of the best part."""
        asked, seq = resized(self.question, *shape), self.question.job.seq
        reason, needed = too_small(asked, asked.spec), self._needed(shape)
        if not reason:
            sample_s = seq / needed if needed else math.inf
            spaces: dict[EngineSpace, UniformSearch] = {}
            found, proven = fastest_within(asked, self.least_gpu_s, sample_s, self._shares, spaces)
            self.proven &= proven
            if found is not None and found.best is not None:
                self.rates[shape] = found.best.samples_per_s * seq
                if shape == self.whole:
                    self.of_all = UniformResult(question=asked, engines=(found,))
            kept = {**self.spaces, shape: spaces}
            self.spaces = {one: kept[one] for one in (self.whole, self.best) if one in kept}
            if shape in self.rates:
                return
            reason = "no plan fits or is legal"
            if needed:
                reason = f"no plan reaches {needed / _gpus(shape):,.0f} tokens/s/GPU"
        self.reasons[shape] = reason

    def result(self, found: ChosenPlans) -> GoalResult:
        """Return the chosen part; found : its plans, per-layer plans included."""
        from autopar.command.answer_schemas import ClusterResult, PartEntry

        best = self.best
        assert best is not None, "a part reaches the goal"
        gpus = _gpus(best)
        tried = tuple(
            ClusterResult(
                hardware=self.hardware(one),
                gpus=_gpus(one),
                tokens_per_s=self.rates.get(one),
                reason=self.reasons.get(one, ""),
            )
            for one in self.parts
            if one in self.rates or one in self.reasons
        )
        part = PartEntry(
            hardware=self.hardware(best),
            gpus=gpus,
            free_gpus=_gpus(self.whole) - gpus,
            tokens_per_s=_of_answer(found, self.question),
            whole_tokens_per_s=self.rates.get(self.whole),
            proven=self.proven,
        )
        return GoalResult(
            words=self._words(best, part, _tokens_per_s(found, self.question)),
            part=part,
            tried=tried,
            whole=self.of_all if best != self.whole and self.goal == "throughput" else None,
        )

    def _words(self, best: Shape, part: PartEntry, fastest: float) -> str:
        """Return a sentence on the chosen part, its throughput and that of all GPUs.

        fastest : throughput of its fastest plan, tokens/s, which is compared with that of all GPUs
        """
        wanted = f" with {self.wanted:,.0f} tokens/s" if self.wanted else ""
        goal = {"cost": "Cheapest per token", "fewest-gpus": "Fewest GPUs"}.get(self.goal, "")
        per_gpu = self.goal == "cost"
        rate, other = part.tokens_per_s, part.whole_tokens_per_s
        unit = "tokens/s/GPU" if per_gpu else "tokens/s"
        if per_gpu:
            rate, fastest = rate / part.gpus, fastest / part.gpus
            other = other and other / _gpus(self.whole)
        said = [f"{rate:,.0f} {unit}"]
        every = _gpus(self.whole)
        if other and best != self.whole:
            share = (fastest / other - 1.0) * 100.0
            said.append(
                f"{abs(share):.1f} % {'more' if share >= 0 else 'less'} than on all {every}"
            )
        text = f"{_shape_words(best, self.whole, self.question.card)}: {', '.join(said)}"
        if part.free_gpus:
            text += f"; {_free_words(best, self.whole, self.question.card)}"
        if len(self.parts) > 1:
            text += f"; best of {len(self.parts)} sizes" + ("" if self.proven else ", not proven")
        return f"{goal}{wanted}: {text}" if goal else text


def _gpus(shape: Shape) -> int:
    return shape[0] * shape[1]


def _unit(per_node: int, card: Card) -> str:
    return "rack" if per_node > (tray_gpus(card) or per_node) else "node"


def _free_words(shape: Shape, whole: Shape, card: Card) -> str:
    """Return the number of unused GPUs in words, of each rack if racks are used equally."""
    if shape[0] == whole[0] > 1:
        return f"{whole[1] - shape[1]} a {_unit(whole[1], card)} are free"
    return f"{_gpus(whole) - _gpus(shape)} are free"


def _shape_words(shape: Shape, whole: Shape, card: Card) -> str:
    """Return a part in words, such as `64 of 72 GPUs of each rack`."""
    (nodes, gpus), (every, per_node) = shape, whole
    unit = _unit(per_node, card)
    if shape == whole:
        return f"all {_gpus(whole)} GPUs"
    if gpus == per_node:
        return f"{nodes} of {every} {unit}s ({_gpus(shape)} of {_gpus(whole)} GPUs)"
    some = f"{gpus} of {per_node} GPUs"
    if nodes == every:
        return f"{some} of {'the' if every == 1 else 'each'} {unit}"
    return f"{some} of {'one' if nodes == 1 else nodes} of {every} {unit}s"


def _refuse_all(search: _PartSearch) -> None:
    """Raise the error if no part reaches a goal: broken rules, or the throughput that is reached.

    Raise nothing if no plan fits, for which a search has suggestions.
    """
    if search.refusal is not None:
        raise search.refusal
    if not search.wanted:
        return
    question, largest = search.question, search.parts[-1]
    asked, shares = resized(question, *largest), Shares(question.seconds, 1)
    found, _ = fastest_within(asked, search.least_gpu_s, math.inf, shares, {})
    if found is not None and found.best is not None:
        raise InfeasibleError(
            f"--tokens-per-s {search.wanted:,.0f}: no part of {search.hardware(search.whole)} "
            "reaches it",
            remedy=f"Use more nodes: {search.hardware(largest)} reaches "
            f"{found.best.samples_per_s * question.job.seq:,.0f}",
        )
