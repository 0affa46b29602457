"""Reason why an engine has no legal plan: a rule that the user's constraints violate.

A backtracking search tries fixed values before free ones, and evaluates each rule as soon as its
values are set. A reason is returned only if no combination satisfies all rules. Memory is not
considered here; see `search.planning.uniform.best_first`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any, NamedTuple, cast

from autopar.errors import InputError
from autopar.pipeline.schedules import (
    SCHEDULES,
    SHORT_NAMES,
    Engine as Trainer,
    Schedule,
    schedule_problem,
)
from autopar.records import Record, replace
from autopar.run.rules import (
    ANY,
    BATCH,
    GRID,
    NO_EXPERTS,
    NO_SPLIT_EXPERTS,
    RING,
    WHOLE_GRID,
    Notice,
    Rule,
    RuleError,
    broken,
    nearest,
)
from autopar.run.strategy import chunks_of_sizes
from autopar.units import divisors
from search.engines.candidate import NONE, Candidate, Constraints, Precision
from search.engines.space import EngineContext, EngineSpace, with_words
from search.planning.uniform.space import MICRO_BATCHES, context_kinds

_Values = Mapping[str, Any]
"""Values by field name, for some fields of `Candidate` and for `dp`."""

_ORDER = (
    *(
        "precision",
        "recompute",
        "offload",
        "pp",
        "tp",
        "cp",
        "cp_kind",
        "dp",
        "schedule",
        "vpp",
        "global_batch",
    ),
    *("micro_batch", "etp", "ep", "zero", "dispatcher", "overlap_experts"),
    *("tp_overlap", "dp_replicate"),
)
"""Order in which fields are tried; fields of many rules come first."""
_NEAREST = 2
"""Largest number of values in a suggestion."""


def violated_rule(engine: EngineSpace, job: EngineContext, fixed: Constraints) -> Notice | None:
    """Return the rule that excludes all plans of a job, with a suggestion; None if one is legal.

    The message contains the numbers of one combination of fixed values; no other combination is
    legal either. Layer partitions into chunks are not checked: they depend on layer times, which
    only the search computes.
    """
    failure = _Trial(engine, job, fixed).failure()
    if failure is None:
        return None
    # if the engine cannot train this job at all, report that instead of the user's degrees
    whatever = _Trial(engine, job, Constraints(precision=engine.precisions(job.gpu))).failure()
    failure = whatever or failure
    name, remedy, nearby = _remedy(engine, job, fixed, failure)
    # a suggestion belongs to the rule that it satisfies
    found = failure.named[name] if name else failure.notice
    if not remedy:
        return found
    values = {**found.values, "suggestion": remedy}
    values |= {"option": name, "nearest": nearby} if name else {}
    return replace(found, remedy=remedy, values=values)


# --------------------------------------------------------------------------------------------------
# General rules, capabilities of an engine, and engine-specific rules.


GENERAL = (
    RING,
    Rule("pipeline.layers", ("pp", "layers"), lambda pp, layers: pp > layers,
         "pp({pp}) > layers({layers})"),
    NO_EXPERTS,
    *ANY,
    Rule("batch.micro", ("micro_batch", "largest_batch"), lambda micro, batch: micro > batch,
         "micro batch({micro_batch}) > global batch({largest_batch})"),
    *GRID,
    WHOLE_GRID,
    Rule("pipeline.no-stages", ("vpp", "pp"), lambda vpp, pp: (vpp > 1) * (pp == 1),
         "vpp({vpp}) needs pp 2 or more, got pp({pp})"),
    Rule("pipeline.many-chunks", ("vpp", "pp", "layers"),
         lambda vpp, pp, layers: (vpp > 1) * (pp * vpp > layers),
         "pp({pp}) * vpp({vpp}) chunks > layers({layers})"),
    NO_SPLIT_EXPERTS,
    Rule("replicas.dp", ("dp_replicate", "dp"), lambda replicas, dp: dp % replicas,
         "dp({dp}) % dp_replicate({dp_replicate}) = {rest} != 0"),
    Rule("replicas.alone", ("dp_replicate", "dp", "cp"),
         lambda replicas, dp, cp: (replicas > 1) * (replicas == dp * cp),
         "dp_replicate({dp_replicate}) shards nothing: it equals dp({dp}) * "
         "cp({cp})"),
    Rule("replicas.experts", ("dp_replicate", "ep", "etp", "pp", "world", "experts"),
         lambda replicas, ep, etp, pp, world, experts:
         (experts > 0) * (world // (pp * ep * etp) % replicas),
         "dp_replicate({dp_replicate}) does not divide world size({world}) / (pp({pp}) * ep({ep}) "
         "* etp({etp}))"),
    *BATCH,
    Rule("batch.stages", ("global_batch", "micro_batch", "dp", "pp"),
         lambda batch, micro, dp, pp: batch // (micro * dp) < pp,
         "global batch({global_batch}) / (micro batch({micro_batch}) * dp({dp})) < pp({pp})"),
)  # fmt: skip
"""Rules of all engines that search uniform plans."""


def none_is_legal(engines: Sequence[tuple[str, str, tuple[Notice, ...]]]) -> InputError:
    """Return the error if no engine has a legal plan.

    If the rule of the first engine suggests other values, it stands for all engines; otherwise the
    reason of each engine is given.

    engines : (name, reason, broken rules) of every engine.
    """
    (first, reason, rules), *others = engines
    names = dict[str, list[str]]()
    for name, why, _ in engines:
        names.setdefault(why, []).append(name)
    problem, remedy = reason, ""
    if len(names) > 1:
        each = (f"{', '.join(own)}: {why}" for why, own in names.items())
        problem = f"no engine has a legal plan; {'; '.join(each)}"
    if len(rules) != 1:
        return InputError(problem)
    (rule,) = rules
    if len(names) == 1 or (rule.remedy and "--engine" not in rule.remedy):
        *some, last = [name for name, _, _ in others] or [""]
        rest = " or ".join(filter(None, (", ".join(some), last)))
        either = f" (rule of {first}; no plan of {rest} is legal either)" * (len(names) > 1)
        problem, remedy = f"{rule.problem}{either}", rule.remedy
    return RuleError((replace(rule, problem=problem, remedy=remedy),))


def _capabilities(engine: EngineSpace, job: EngineContext) -> tuple[Rule, ...]:
    """Return the rules that restrict settings to the features of an engine."""
    model, gpu, title = job.model, job.gpu, engine.title

    def rule(name: str, over: str, lacks: Callable[..., Any], message: str) -> Rule:
        return Rule(f"engine.{name}", tuple(over.split(", ")), lacks, f"{title} {message}")

    def schedule(kind: str, pp: int, vpp: int, number: int) -> str | int:
        problem = pp > 1 and schedule_problem(
            cast(Schedule, kind),
            stages=pp,
            chunks=vpp,
            micro_batches=number,
            engine=cast(Trainer, engine.name),
        )
        return problem or 0

    compiled = " for compiled layers" if engine.compiled else ""
    return (
        rule("precision", "precision", lambda one: one not in engine.precisions(gpu),
             f"has no {{precision}} GEMMs on {gpu}"),
        rule("recompute", "recompute", lambda word: word not in engine.recompute(model)
             and not (engine.blocks and word.startswith("block ")),
             f"cannot recompute {{recompute}} of {job.name}"),
        rule("offload", "offload", lambda words: words not in engine.offload(model),
             f"cannot offload {{offload}} of {job.name}"),
        rule("context", "cp", lambda cp: cp > 1 and not engine.context,
             "has no context parallelism, got cp({cp})"),
        rule("stages", "pp", lambda pp: pp > 1 and not engine.schedules,
             "has no pipeline parallelism, got pp({pp})"),
        rule("chunks", "vpp", lambda vpp: vpp > 1 and not engine.schedules,
             "has no pipeline parallelism, got vpp({vpp})"),
        rule("schedule", "schedule, schedule_title",
             lambda name, _: name != "1f1b" and name not in engine.schedules,
             f"has no {{schedule_title}} schedule{compiled}"),
        rule("experts", "ep, experts", lambda ep, experts: ep > 1 and not engine.experts,
             "has no expert parallelism, got ep({ep})"),
        rule("zero", "zero", lambda zero: zero not in engine.zero, "has no ZeRO stage {zero}"),
        Rule("engine.training", ("precision", "zero"), partial(_untrained, engine, job), "{rest}"),
        Rule("pipeline.single", ("schedule", "schedule_name", "pp"),
             lambda name, _, pp: (name != "1f1b") * (pp == 1),
             "schedule {schedule_name} needs pp 2 or more, got pp({pp})"),
        # 2 * pp micro-batches are enough for any schedule
        Rule("pipeline.schedule", ("schedule", "vpp", "pp"),
             lambda name, vpp, pp: schedule(name, pp, vpp, 2 * pp), "{rest}"),
        rule("zero-stages", "zero, pp",
             lambda zero, pp: pp > 1 and zero not in engine.zero_with_stages,
             "has no ZeRO stage {zero} with pp({pp})"),
        Rule("recompute.blocks", ("recompute", "block_layers", "pp", "vpp", "layers"),
             lambda word, number, pp, vpp, layers: (number > 0) * (number > layers - pp * vpp),
             "{recompute} must be fewer than the {layers} layers in a chunk of "
             "pp({pp}) * vpp({vpp})"),
        # engines that split experts freely have a rule on the expert width instead
        rule("expert-tensor", "etp, tp, experts", lambda etp, tp, experts: experts > 0
             and engine.expert_tensor is not None and etp not in engine.expert_tensor(tp),
             "needs etp 1 or tp({tp}), got etp({etp})" if engine.experts else
             "needs etp = tp({tp}), got etp({etp})"),
        # without expert ranks there is nothing to dispatch
        rule("dispatcher", "dispatcher, ep",
             lambda one, ep: ep > 1 and one not in engine.dispatchers(gpu),
             f"has no {{dispatcher}} dispatcher on {gpu}, got ep({{ep}})"),
        rule("overlap-experts", "overlap_experts, ep",
             lambda overlap, ep: overlap and not engine.overlaps_experts,
             "does not overlap expert communication, got ep({ep})"),
        rule("overlap-tensor", "tp_overlap, tp",
             lambda overlap, tp: overlap and not engine.overlaps_tensor(job, tp),
             f"has no TP overlap with tp({{tp}}) on {gpu}"),
        # without context ranks there is no communication
        rule("context-kind", "cp_kind, cp", lambda kind, cp: cp > 1 and kind not in engine.context,
             "has no {cp_kind} context parallelism, got cp({cp})"),
        rule("replicas", "dp_replicate, zero",
             lambda number, zero: number > 1 and zero not in engine.replicated,
             "has no HSDP replicas with ZeRO stage {zero}, got "
             "dp-replicate({dp_replicate})"),
        Rule("pipeline.schedule-rounds",
             ("schedule", "vpp", "pp", "global_batch", "micro_batch", "dp"),
             lambda name, vpp, pp, batch, micro, dp: schedule(name, pp, vpp, batch // (micro * dp)),
             "{rest}"),
    )  # fmt: skip


def _rules(engine: EngineSpace, job: EngineContext) -> tuple[Rule, ...]:
    """Return all rules of an engine for a job."""
    return (*_capabilities(engine, job), *GENERAL, *engine.rules, *engine.writable)


def _known(engine: EngineSpace, job: EngineContext) -> dict[str, Any]:
    """Return the values in rules that depend only on engine and job."""
    return {**job.known(engine), "largest_batch": max(job.global_batches)}


def _untrained(
    engine: EngineSpace, job: EngineContext, precision: Precision, zero: int
) -> str | int:
    """Return the reason why the engine rejects optimizer or adapters; 0 if it accepts them."""
    chunks = chunks_of_sizes([job.model.num_layers], 1, mtp=job.model.mtp)
    try:
        engine.launch(
            replace(job, world=1), Candidate(precision=precision, zero=zero, chunks=chunks)
        )
    except InputError as error:
        return str(error)
    return 0


_EVEN = (
    Rule("layers.alike", ("vpp", "pp", "layers"), lambda vpp, pp, layers:
         (vpp > 1) * all((layers + ends) % (pp * vpp) for ends in (0, 1, 2)),
         "layers({layers}) cannot be divided into pp({pp}) * vpp({vpp}) equal "
         "chunks"),
    Rule("recompute.long-blocks", ("recompute", "block_layers", "pp", "vpp", "layers"),
         lambda word, number, pp, vpp, layers: (number > 0) * (number >= layers // (pp * vpp)),
         "{recompute} is all of layers({layers}) / (pp({pp}) * vpp({vpp}))"),
)  # fmt: skip
"""Sufficient conditions for a layer partition, required of suggestions.

Embedding and head may each count as a layer."""
_MADE_OF: Mapping[str, tuple[str, ...]] = {
    "fp8": ("precision",),
    "whole_layers": ("recompute",),
    "recomputed_experts": ("recompute",),
    "block_layers": ("recompute",),
    "schedule_title": ("schedule",),
    "schedule_name": ("schedule",),
    "dp_shard": ("tp", "cp", "pp", "dp_replicate"),
    # overlap requires several ranks
    "overlap_experts": ("overlap_experts", "ep"),
    "tp_overlap": ("tp_overlap", "tp"),
}
"""Derived value in rules -> fields of a candidate that determine it."""


def _fields_of(rule: Rule) -> tuple[str, ...]:
    """Return the fields of a candidate that a rule depends on."""
    fields = (one for name in rule.over for one in _MADE_OF.get(name, (name,)))
    return tuple(dict.fromkeys(one for one in fields if one in _ORDER))


def _shown(rule: Rule) -> set[str]:
    """Return the values that the message of a rule contains."""
    return {name for _, name, _, _ in Formatter().parse(rule.message) if name}


def _whole_values(values: _Values) -> dict[str, Any]:
    """Return values of a candidate together with derived values that rules use."""
    found = with_words(values)
    word, name = found.get("recompute"), found.get("schedule")
    if word is not None:
        blocks = word.startswith("block ")
        found["block_layers"] = int(word.removeprefix("block ")) if blocks else 0
    if name is not None:
        found |= {"schedule_title": SCHEDULES[name].title, "schedule_name": SHORT_NAMES[name]}
    for overlap, degree in (("overlap_experts", "ep"), ("tp_overlap", "tp")):
        if found.get(overlap) is not None and found.get(degree) is not None:
            found[overlap] = found[overlap] and found[degree] > 1
    return found


# --------------------------------------------------------------------------------------------------
# Combinations

_LEAST = {
    "recompute": NONE,
    "offload": NONE,
    "overlap_experts": False,
    "tp_overlap": False,
    "dp_replicate": 1,
}
"""Least restrictive value of fields that need no other value if they are free."""
_SWITCHES = {"overlap_experts": "moe-overlap", "tp_overlap": "tp-overlap"}
"""Boolean field -> option name."""
_NEEDS = {"dp": ("tp", "cp", "pp"), "vpp": ("pp",), "schedule": ("pp",), "etp": ("tp",)}
"""Free field -> fields that determine its possible values."""


class _Failure(Record):
    """Reason why no combination is legal."""

    notice: Notice
    """Violated rule of the combination with the most fields set."""
    given: tuple[str, ...]
    """Fixed fields of that rule, then of all other violated rules; the global batch is last."""
    named: Mapping[str, Notice]
    """Fixed field -> violated rule that depends on it."""


class _Broken(NamedTuple):
    """Rule that a combination violates."""

    place: int
    """Index in `_Trial.order` of the last field of the rule."""
    rule: Rule
    notice: Notice


class _Trial:
    """Backtracking search for one combination that satisfies all rules.

    If the later fields have no legal values and no violated rule depends on the current field, its
    other values are skipped, as they would not help.
    """

    def __init__(
        self,
        engine: EngineSpace,
        job: EngineContext,
        fixed: Constraints,
        more: tuple[Rule, ...] = (),
    ) -> None:
        self.engine, self.job = engine, job
        self.fixed = _fixed(job, fixed)
        self.order = sorted(_ORDER, key=lambda name: name not in self.fixed)
        rules = (*_rules(engine, job), *more)
        self.rules = [self._asked(place, rules) for place in range(len(self.order))]
        self.known = _known(engine, job)
        self.values: dict[str, Any] = {}
        self.deepest: _Broken | None = None
        self.broken: dict[str, _Broken] = {}
        """Field -> violated rule that depends on it, with the largest `place`."""

    def _asked(self, place: int, rules: Sequence[Rule]) -> list[Rule]:
        """Return the rules with their last field at a place, in order of their number of fields.

        place : index in `order`.
        """
        name, known = self.order[place], {*self.order[: place + 1]}
        # rules that depend on the job only are evaluated first
        found = [
            rule for rule in rules if name in _fields_of(rule) or not (place or _fields_of(rule))
        ]
        found = [rule for rule in found if known.issuperset(_fields_of(rule))]
        return sorted(found, key=lambda rule: len(_fields_of(rule)))

    def failure(self) -> _Failure | None:
        """Return the reason why no combination is legal; None if one is."""
        if self._blamed(0) is None:
            return None
        assert self.deepest is not None, "a combination that fails breaks a rule"
        names = _fields_of(self.deepest.rule)
        others = [name for name in _ORDER if name in self.broken]
        given = [name for name in dict.fromkeys((*names, *others)) if name in self.fixed]
        # the batch comes last: it is always set, while users choose degrees deliberately
        given.sort(key=lambda name: name == "global_batch")
        deepest = self._whole(self.deepest)
        made = {part for name in names for part in _NEEDS.get(name, ())}
        named = {
            name: deepest if name in made.union(names) else self._whole(self.broken[name])
            for name in given
        }
        return _Failure(notice=deepest, given=tuple(given), named=named)

    def _whole(self, broken: _Broken) -> Notice:
        """Return the notice of a violated rule, with the free fields that have no legal value."""
        shown = {*_fields_of(broken.rule)} & _shown(broken.rule)
        if "dp" in shown and "dp" not in self.fixed:
            shown |= {*_NEEDS["dp"]}
        free = [_option(name) for name in _ORDER if name in shown - {"dp", *self.fixed}]
        others = " or ".join(filter(None, (", ".join(free[:-1]), *free[-1:])))
        ends = f", and no other value of {others} makes it legal" if free else ""
        return replace(broken.notice, problem=broken.notice.problem + ends)

    def _blamed(self, place: int) -> set[str] | None:
        """Return the fields before a place that exclude all values of the later fields.

        None if a legal combination exists. place : index in `order`.
        """
        if place == len(self.order):
            return None
        name = self.order[place]
        blamed = set() if name in self.fixed else {*_NEEDS.get(name, ())}
        for value in self.fixed.get(name) or self._free(name):
            self.values[name] = value
            found = self._breaks(place)
            # the set is empty if the violated rule depends only on the job
            found = self._blamed(place + 1) if found is None else found
            if found is None:
                return None
            del self.values[name]
            if name not in found:
                return found
            blamed |= found
        return blamed - {name}

    def _breaks(self, place: int) -> set[str] | None:
        """Return the fields of the first violated rule at a place; None if all rules hold."""
        values = {**self.known, **_whole_values(self.values)}
        for rule in self.rules[place]:
            (notice, *_) = broken((rule,), values) or (None,)
            if notice is not None:
                found = _Broken(place, rule, notice)
                for name in _fields_of(rule):
                    if name not in self.broken or place > self.broken[name].place:
                        self.broken[name] = found
                if self.deepest is None or place > self.deepest.place:
                    self.deepest = found
                return {*_fields_of(rule)}
        return None

    def _free(self, name: str) -> Sequence[Any]:
        """Return the possible values of a field without constraint, given the earlier fields."""
        engine, job, values = self.engine, self.job, self.values
        if name == "dp":
            return (job.world // (values["tp"] * values["cp"] * values["pp"]),)
        if name == "vpp":
            return range(1, job.model.num_layers // values["pp"] + 1) if values["pp"] > 1 else (1,)
        if name == "schedule" and values["pp"] == 1:
            return ("1f1b",)
        if name == "etp" and job.model.experts is None:
            return (1,)
        if name == "etp" and engine.expert_tensor is not None:
            return engine.expert_tensor(values["tp"])
        if name in _LEAST:
            return (_LEAST[name],)
        if name == "cp_kind":
            # other kinds are tried only if the user passes them
            kinds = context_kinds(job.model)
            return [one for one in kinds if one in engine.context] or kinds[:1]
        return field_values(engine, job, name)


def _fixed(job: EngineContext, fixed: Constraints) -> dict[str, tuple[Any, ...]]:
    """Return constrained field -> values that the user allows."""
    found = {name: getattr(fixed, name) for name in _ORDER if name != "global_batch"}
    found |= {name: None if found[name] is None else (found[name],) for name in _SWITCHES}
    found["global_batch"] = job.global_batches
    return {name: values for name, values in found.items() if values is not None}


def field_values(engine: EngineSpace, job: EngineContext, name: str) -> Sequence[Any]:
    """Return all values of a field that may be suggested."""
    ranks = {
        "tp": True,
        "cp": bool(engine.context),
        "dp_replicate": bool(engine.replicated),
        "pp": bool(engine.schedules),
        "dp": True,
        "etp": True,
    }
    if name in ranks:
        return divisors(job.world) if ranks[name] else (1,)
    if name == "ep":
        experts = job.model.experts
        return (1,) if experts is None or not engine.experts else divisors(experts.number)
    if name == "recompute":
        blocks = [f"block {number}" for number in range(job.model.num_layers - 1, 0, -1)]
        return (*engine.recompute(job.model), *(blocks if engine.blocks else ()))
    if name == "offload":
        return engine.offload(job.model)
    return {
        "vpp": range(1, job.model.num_layers + 1),
        "micro_batch": MICRO_BATCHES,
        "zero": engine.zero,
        "schedule": engine.schedules or ("1f1b",),
        "precision": engine.precisions(job.gpu),
        "dispatcher": engine.dispatchers(job.gpu),
        "overlap_experts": (False, True),
        "tp_overlap": (False, True),
        "cp_kind": engine.context or ("ring",),
        "global_batch": _batches(job),
    }[name]


def _batches(job: EngineContext) -> list[int]:
    """Return multiples of each divisor of the world size next to the job's global batches."""
    found = set()
    for batch in job.global_batches:
        for part in divisors(job.world):
            found |= {batch // part * part, -(-batch // part) * part}
    return sorted(found - {0})


# --------------------------------------------------------------------------------------------------
# Suggestions


def _option(name: str) -> str:
    """Return the name of a field in messages."""
    words = {"micro_batch": "micro-batch", "global_batch": "global batch"}
    return words.get(name, name.replace("_", "-"))


def _typed(name: str, values: Sequence[Any]) -> str:
    """Return an option with values as typed on the command line."""
    if name in _SWITCHES:
        return f"--no-{_SWITCHES[name]}" if values and not values[0] else f"--{_SWITCHES[name]}"
    names = {
        "micro_batch": "micro-batch-size",
        "global_batch": "global-batch-size",
        "offload": "offload-activations",
    }
    if name == "schedule":
        values = [SHORT_NAMES[value] for value in values]
    ordered = sorted(values) if all(isinstance(value, int) for value in values) else values
    # policies such as `block 4` contain a space
    texts = [f"'{value}'" if " " in str(value) else str(value) for value in ordered]
    return f"--{names.get(name, name.replace('_', '-'))} {' or '.join(texts)}".rstrip()


def _remedy(
    engine: EngineSpace, job: EngineContext, fixed: Constraints, failure: _Failure
) -> tuple[str | None, str, list[Any]]:
    """Return (field, suggestion of its nearest values that allow a plan, these values).

    If no change of one field allows a plan, return (None, suggestion of options to remove, []); the
    suggestion is empty if the engine cannot train the job.
    """
    for name in failure.given:
        found: list[Any] = []
        for value in _near(engine, job, name, _fixed(job, fixed)[name]):
            if _Trial(engine, *_with(job, fixed, name, value), _EVEN).failure() is None:
                found.append(value)
            if len(found) == _NEAREST:
                break
        if found:
            return name, f"Use {_typed(name, found)}", found
    dropped: list[str] = []
    left: _Failure | None = failure
    while left is not None:
        droppable = [name for name in left.given if name not in ("precision", "global_batch")]
        if not droppable:
            return None, "", []  # the engine cannot train this job
        dropped.append(_typed(droppable[0], ()))
        free: Any = {droppable[0]: None}
        fixed = replace(fixed, **free)
        left = _Trial(engine, job, fixed, _EVEN).failure()
    return None, f"Remove {' and '.join(dropped)}", []


def _with(
    job: EngineContext, fixed: Constraints, name: str, value: Any
) -> tuple[EngineContext, Constraints]:
    """Return job and constraints with one field set to a value."""
    if name == "global_batch":
        return replace(job, global_batches=(value,)), fixed
    values: Any = value if name in _SWITCHES else (value,)
    return job, replace(fixed, **{name: values})


def _near(
    engine: EngineSpace, job: EngineContext, name: str, given: Sequence[Any]
) -> Sequence[Any]:
    """Return alternative values of a field, nearest to the given one first.

    They satisfy the rules that depend only on this field.
    """
    others = [value for value in field_values(engine, job, name) if value not in given]
    if name == "recompute":
        # suggest blocks in place of blocks, modules in place of modules
        block = given[0].startswith("block ")
        others.sort(key=lambda word: word.startswith("block ") != block)
    elif name == "offload":
        wanted = {*given[0].split("+")}
        others.sort(key=lambda word: len(wanted ^ {*word.split("+")}))
    elif name == "zero":
        return others  # in the order of the engine, not of the numbers
    alone = [rule for rule in _rules(engine, job) if _fields_of(rule) == (name,)]
    return nearest(alone, {**_known(engine, job), name: given[0]}, name, others)
