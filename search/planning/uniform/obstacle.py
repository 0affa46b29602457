"""Why a trainer has no launch at all: the first rule that what somebody has fixed breaks.

Fixed values come first and free ones after them, each rule is asked as soon as it can be, and only
where no combination keeps all of them is there an obstacle. Which launch of those that are legal
fits, or is fastest, is `search.planning.uniform.solve`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from autopar.errors import InputError
from autopar.pipeline.schedules import (
    SCHEDULES,
    SHORT_NAMES,
    Engine as Trainer,
    schedule_problem,
)
from autopar.records import Record, replace
from autopar.run.launch import chunks_of_sizes
from search.engines.choice import NONE, Choice, Fixed
from search.engines.space import EngineSpace, Job
from search.planning.space import divisors
from search.planning.uniform.space import CONTEXT_KINDS, MICRO_BATCHES

_Values = Mapping[str, Any]
"""Values of some fields of a choice, and `dp`."""

_GRID = ("tp", "cp", "pp", "dp")
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
"""In which values are tried: what many rules are of comes first."""
_NEAREST = 2
"""Values of a remedy at most."""


def obstacle(engine: EngineSpace, job: Job, fixed: Fixed) -> str | None:
    """Return the rule that leaves no launch of a job, with what would keep it; None: there is one.

    Its arithmetic is of one combination of what is fixed, and no other combination is legal either.
    Whether layers can be laid out in as many chunks is left to the search, which has their times.
    """
    failure = _Trial(engine, job, fixed).failure()
    if failure is None:
        return None
    # what a trainer does not do at all is no fault of the degrees
    whatever = _Trial(engine, job, Fixed(precision=engine.precisions(job.gpu))).failure()
    failure = whatever or failure
    name, remedy = _remedy(engine, job, fixed, failure)
    # a remedy is of the rule that it keeps
    return (failure.said[name] if name else failure.sentence) + remedy


# --------------------------------------------------------------------------------------------------
# Rules. Each yields its sentences where it is broken; the first is taken.


def _words(values: _Values, names: Sequence[str]) -> str:
    return " * ".join(f"{name} {values[name]}" for name in names)


def _grid(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    names = [name for name in _GRID if name in values]
    number = math.prod(values[name] for name in names)
    equals = f" = {number}" if len(names) > 1 else ""
    if job.world % number:
        yield f"{_words(values, names)}{equals} does not divide {job.world} GPUs"
    elif len(names) == len(_GRID) and number != job.world:
        yield f"{_words(values, names)}{equals} is not the {job.world} GPUs"


def _tensor(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    heads = job.model.attention.heads
    if heads % values["tp"]:
        yield f"tp {values['tp']} does not divide {heads} heads"


def _context(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    cp = values["cp"]
    if cp > 1 and not engine.context:
        yield f"{engine.title} has no context degree, and cp is {cp}"
    if cp > 1 and job.seq % (2 * cp):
        yield f"2 * cp {cp} = {2 * cp} does not divide {job.seq} tokens"


def _stages(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    pp, layers = values["pp"], job.model.num_layers
    if pp > 1 and not engine.schedules:
        yield f"{engine.title} has no pipeline stages, and pp is {pp}"
    if pp > layers:
        yield f"pp {pp} is more than {layers} layers"


def _chunks(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    if values["vpp"] > 1 and not engine.schedules:
        yield f"{engine.title} has no pipeline stages, and vpp {values['vpp']} is of chunks of them"


def _chunks_of_stages(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    pp, vpp, layers = values["pp"], values["vpp"], job.model.num_layers
    if vpp > 1 and pp == 1:
        yield f"vpp {vpp} is of chunks of pipeline stages, and pp is 1"
    if pp * vpp > max(pp, layers):
        yield f"pp {pp} * vpp {vpp} = {pp * vpp} chunks are more than {layers} layers"


def _schedule(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    schedule = values["schedule"]
    if schedule != "1f1b" and schedule not in engine.schedules:
        beside = " for compiled layers" if engine.compiled else ""
        yield f"{engine.title} has no {SCHEDULES[schedule].title} schedule{beside}"


def _schedule_of_stages(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    schedule, pp = values["schedule"], values["pp"]
    if schedule != "1f1b" and pp == 1:
        yield f"schedule {SHORT_NAMES[schedule]} is of pipeline stages, and pp is 1"


def _schedule_of_chunks(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    # with as many micro-batches as any schedule wants
    if values["pp"] > 1:
        yield from _order(engine, values, 2 * values["pp"])


def _schedule_of_rounds(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    if values["pp"] > 1:
        yield from _order(engine, values, _rounds(values))


def _order(engine: EngineSpace, values: _Values, micro_batches: int) -> Iterator[str]:
    problem = schedule_problem(
        values["schedule"],
        stages=values["pp"],
        chunks=values["vpp"],
        micro_batches=micro_batches,
        engine=cast(Trainer, engine.name),
    )
    if problem is not None:
        yield problem


def _rounds(values: _Values) -> int:
    return int(values["global_batch"] // (values["micro_batch"] * values["dp"]))


def _batch(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    batch, size, dp = values["global_batch"], values["micro_batch"], values["dp"]
    if batch % (size * dp):
        yield (
            f"micro-batch {size} * dp {dp} = {size * dp} does not divide the global batch {batch}"
        )


def _enough(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    number, pp = _rounds(values), values["pp"]
    if number < pp:
        size, dp = values["micro_batch"], values["dp"]
        yield (
            f"global batch {values['global_batch']} / (micro-batch {size} * dp {dp}) = {number} "
            f"micro-batches are fewer than pp {pp}"
        )


def _micro_batch(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    size, most = values["micro_batch"], max(job.global_batches)
    if size > most:
        yield f"micro-batch {size} is more than the global batch {most}"


def _experts(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    ep, experts = values["ep"], job.model.experts
    if ep > 1 and experts is None:
        yield f"{job.name} has no experts, and ep is {ep}"
    elif ep > 1 and not engine.experts:
        yield f"{engine.title} has no expert degree, and ep is {ep}"
    elif experts is not None and experts.number % ep:
        yield f"ep {ep} does not divide {experts.number} experts"
    elif job.world % ep:
        yield f"ep {ep} does not divide {job.world} GPUs"


def _split_experts(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    etp, tp = values["etp"], values["tp"]
    if job.model.experts is None:
        if etp > 1:
            yield f"{job.name} has no experts, and etp is {etp}"
        return
    # where a trainer splits experts as it likes, its own rule is of their width
    if engine.expert_tensor is None or etp in engine.expert_tensor(tp):
        return
    if engine.experts:
        yield f"etp {etp} is neither 1 nor tp {tp}"
    else:
        yield f"{engine.title} has no degrees of experts of their own: etp {etp} is not tp {tp}"


def _expert_grid(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    ep, etp, ranks = values["ep"], values["etp"], job.world // values["pp"]
    if ranks % (ep * etp):
        yield f"ep {ep} * etp {etp} = {ep * etp} does not divide the {ranks} GPUs of a stage"


def _sharding(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    if values["zero"] not in engine.zero:
        yield f"{engine.title} has no ZeRO stage {values['zero']}"


def _sharding_of_stages(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    zero, pp = values["zero"], values["pp"]
    if pp > 1 and zero not in engine.zero_with_stages:
        yield f"{engine.title} has no ZeRO stage {zero} beside pp {pp}"


def _products(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    has = engine.precisions(job.gpu)
    if values["precision"] not in has:
        yield f"{engine.title} has no products in {values['precision']} on {job.gpu}"


def _trains(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    """Yield what the trainer says against optimizer and adapters."""
    one = Choice(
        precision=values["precision"],
        zero=values["zero"],
        chunks=chunks_of_sizes([job.model.num_layers], 1, mtp=job.model.mtp),
    )
    try:
        engine.launch(replace(job, world=1), one)
    except InputError as error:
        yield str(error)


def _recomputed(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    word = values["recompute"]
    if word.startswith("block ") and engine.blocks:
        return
    if word not in engine.recompute(job.model):
        yield f"{engine.title} does not recompute {word} of {job.name}"


def _hosted(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    word = values["offload"]
    if word not in engine.offload(job.model):
        yield f"{engine.title} does not put {word} of {job.name} on the host"


def _blocks(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    word, parts = values["recompute"], values["pp"] * values["vpp"]
    longest = job.model.num_layers - parts + 1
    if word.startswith("block ") and int(word.removeprefix("block ")) >= longest:
        yield (
            f"{word} has to be fewer than the layers of a chunk, {longest} at most of "
            f"{job.model.num_layers} in pp {values['pp']} * vpp {values['vpp']}"
        )


def _even(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    """Yield where no chunks are alike by themselves, with embedding and head counted or not."""
    parts, word = values["pp"] * values["vpp"], values["recompute"]
    longest, layers = job.model.num_layers // parts, job.model.num_layers
    if values["vpp"] > 1 and all((layers + ends) % parts for ends in (0, 1, 2)):
        yield f"{layers} layers are no {parts} chunks that are alike"
    if word.startswith("block ") and int(word.removeprefix("block ")) >= longest:
        yield f"{word} is more than {longest} layers"


def _dispatched(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    dispatcher, ep = values["dispatcher"], values["ep"]
    # without ranks of experts there is nothing to dispatch
    if ep > 1 and dispatcher not in engine.dispatchers(job.gpu):
        yield f"{engine.title} has no {dispatcher} dispatcher on {job.gpu}, and ep is {ep}"


def _overlapped(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    if values["overlap_experts"] and values["ep"] > 1 and not engine.overlaps_experts:
        yield f"{engine.title} does not overlap exchanges of experts, and ep is {values['ep']}"


def _beside(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    if values["tp_overlap"] and values["tp"] > 1 and not engine.overlaps_tensor(job, values["tp"]):
        yield f"{engine.title} does not send beside products of tp {values['tp']} on {job.gpu}"


def _exchanged(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    kind, cp = values["cp_kind"], values["cp"]
    # without context ranks there is nothing to exchange
    if cp > 1 and kind not in engine.context:
        yield f"{engine.title} has no {kind} of context ranks, and cp is {cp}"


def _attention(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    kept = {name: values[name] for name in ("tp", "cp", "cp_kind")}
    yield from engine.attention(job, Choice(**kept))


def _copies(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    number, zero = values["dp_replicate"], values["zero"]
    if number > 1 and zero not in engine.replicated:
        yield f"{engine.title} has no copies of ZeRO stage {zero}, and dp-replicate is {number}"


def _copies_of_ranks(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    number, dp, cp = values["dp_replicate"], values["dp"], values["cp"]
    if dp % number:
        yield f"dp-replicate {number} does not divide dp {dp}"
    elif 1 < number == dp * cp:
        yield f"dp-replicate {number} leaves each of dp {dp} * cp {cp} = {dp * cp} ranks alone"


def _copies_of_experts(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    number, expert = values["dp_replicate"], values["ep"] * values["etp"]
    ranks = job.world // (values["pp"] * expert)
    if job.model.experts is not None and ranks % number:
        yield f"dp-replicate {number} does not divide the {ranks} ranks of the same experts"


def _refused(engine: EngineSpace, job: Job, values: _Values) -> Iterator[str]:
    given = {name: value for name, value in values.items() if name != "dp"}
    given["overlap_experts"] &= values["ep"] > 1
    given["tp_overlap"] &= values["tp"] > 1
    yield from engine.refused(job, Choice(**given))


class _Rule(Record):
    """A rule, and the values that it is of; `partial`: it is asked as soon as there is one."""

    names: tuple[str, ...]
    broken: Callable[[EngineSpace, Job, _Values], Iterator[str]]
    partial: bool = False


_RULES = (
    _Rule(names=("precision",), broken=_products),
    _Rule(names=("recompute",), broken=_recomputed),
    _Rule(names=("offload",), broken=_hosted),
    _Rule(names=("tp",), broken=_tensor),
    _Rule(names=("cp",), broken=_context),
    _Rule(names=("pp",), broken=_stages),
    _Rule(names=("vpp",), broken=_chunks),
    _Rule(names=("schedule",), broken=_schedule),
    _Rule(names=("ep",), broken=_experts),
    _Rule(names=("zero",), broken=_sharding),
    _Rule(names=("micro_batch",), broken=_micro_batch),
    _Rule(names=("precision", "zero"), broken=_trains),
    _Rule(names=_GRID, broken=_grid, partial=True),
    _Rule(names=("vpp", "pp"), broken=_chunks_of_stages),
    _Rule(names=("schedule", "pp"), broken=_schedule_of_stages),
    _Rule(names=("schedule", "vpp", "pp"), broken=_schedule_of_chunks),
    _Rule(names=("zero", "pp"), broken=_sharding_of_stages),
    _Rule(names=("recompute", "pp", "vpp"), broken=_blocks),
    _Rule(names=("etp", "tp"), broken=_split_experts),
    _Rule(names=("ep", "etp", "pp"), broken=_expert_grid),
    _Rule(names=("dispatcher", "ep"), broken=_dispatched),
    _Rule(names=("overlap_experts", "ep"), broken=_overlapped),
    _Rule(names=("tp_overlap", "tp"), broken=_beside),
    _Rule(names=("cp_kind", "cp"), broken=_exchanged),
    _Rule(names=("tp", "cp", "cp_kind"), broken=_attention),
    _Rule(names=("dp_replicate", "zero"), broken=_copies),
    _Rule(names=("dp_replicate", "dp", "cp"), broken=_copies_of_ranks),
    _Rule(names=("dp_replicate", "ep", "etp", "pp"), broken=_copies_of_experts),
    _Rule(names=("global_batch", "micro_batch", "dp"), broken=_batch),
    _Rule(names=("global_batch", "micro_batch", "dp", "pp"), broken=_enough),
    _Rule(
        names=("global_batch", "micro_batch", "dp", "pp", "vpp", "schedule"),
        broken=_schedule_of_rounds,
    ),
    _Rule(
        names=(
            *("overlap_experts", "recompute", "dispatcher", "precision", "zero", "vpp", "schedule"),
            *(
                "offload",
                "tp_overlap",
                "cp_kind",
                "dp_replicate",
                "etp",
                "ep",
                "tp",
                "cp",
                "pp",
                "dp",
            ),
        ),
        broken=_refused,
    ),
)

_SURELY = (*_RULES, _Rule(names=("recompute", "pp", "vpp"), broken=_even))
"""Rules of a combination that surely has a layout, whatever layers take."""

# --------------------------------------------------------------------------------------------------
# Combinations

_LEAST = {
    "recompute": NONE,
    "offload": NONE,
    "overlap_experts": False,
    "tp_overlap": False,
    "dp_replicate": 1,
}
"""Of free values, those that ask least of all else."""
_SWITCHES = {"overlap_experts": "moe-overlap", "tp_overlap": "tp-overlap"}
"""Of values that are on or off, their options."""
_NEEDS = {"dp": ("tp", "cp", "pp"), "vpp": ("pp",), "schedule": ("pp",), "etp": ("tp",)}
"""Of free values, those that they are made of."""


class _Failure(Record):
    """Why no combination is legal."""

    sentence: str
    """The rule that the combination which keeps the most rules breaks."""
    given: tuple[str, ...]
    """What somebody has fixed of that rule, and of all others that were broken, in this order."""
    said: Mapping[str, str]
    """The same of the rules with each of these that were broken."""


class _Trial:
    """Looks for one combination that keeps all rules.

    Where nothing that comes after a value works out, and none of the rules that were broken is of
    that value, its other values would not help either, and are skipped.
    """

    def __init__(
        self, engine: EngineSpace, job: Job, fixed: Fixed, rules: Sequence[_Rule] = _RULES
    ) -> None:
        self.engine, self.job = engine, job
        self.fixed = _fixed(job, fixed)
        self.order = sorted(_ORDER, key=lambda name: name not in self.fixed)
        self.rules = [self._asked(place, rules) for place in range(len(self.order))]
        self.values: dict[str, Any] = {}
        self.deepest = -1
        self.sentence = ""
        self.names: tuple[str, ...] = ()
        self.broken: dict[str, tuple[int, str, tuple[str, ...]]] = {}
        """Value -> the deepest place, the sentence and the values of a rule of it."""

    def _asked(self, place: int, rules: Sequence[_Rule]) -> list[_Rule]:
        """Return the rules that can be asked once the value at a place is there."""
        name, known = self.order[place], {*self.order[: place + 1]}
        return [
            rule
            for rule in rules
            if name in rule.names and (rule.partial or known.issuperset(rule.names))
        ]

    def failure(self) -> _Failure | None:
        """Return why nothing is legal; None where something is."""
        if self._blamed(0) is None:
            return None
        others = [name for name in _ORDER if name in self.broken]
        given = [name for name in dict.fromkeys((*self.names, *others)) if name in self.fixed]
        # there is always a batch, and who says degrees means them
        given.sort(key=lambda name: name == "global_batch")
        sentence = self._whole(self.sentence, self.names)
        made = {part for name in self.names for part in _NEEDS.get(name, ())}
        said = {
            name: sentence
            if name in made.union(self.names)
            else self._whole(*self.broken[name][1:])
            for name in given
        }
        return _Failure(sentence=sentence, given=tuple(given), said=said)

    def _whole(self, sentence: str, names: Sequence[str]) -> str:
        """Return a sentence with the free values that were tried in vain."""
        said = {*names} & {name for name in _ORDER if _has_word(sentence, name)}
        if "dp" in said and "dp" not in self.fixed:
            said |= {*_NEEDS["dp"]}
        free = [_option(name) for name in _ORDER if name in said - {"dp", *self.fixed}]
        return sentence + (f", and no other {' or '.join(free)} helps" if free else "")

    def _blamed(self, place: int) -> set[str] | None:
        """Return the values before a place that leave nothing behind it; None: something is."""
        if place == len(self.order):
            return None
        name = self.order[place]
        blamed = set() if name in self.fixed else {*_NEEDS.get(name, ())}
        for value in self.fixed.get(name) or self._free(name):
            self.values[name] = value
            found = self._breaks(place) or self._blamed(place + 1)
            if found is None:
                return None
            del self.values[name]
            if name not in found:
                return found
            blamed |= found
        return blamed - {name}

    def _breaks(self, place: int) -> set[str] | None:
        """Return the values of the first rule that the last of them breaks."""
        for rule in self.rules[place]:
            sentence = next(rule.broken(self.engine, self.job, self.values), None)
            if sentence is not None:
                names = [name for name in rule.names if name in self.values]
                found = place, sentence, tuple(names)
                for name in names:
                    if place > self.broken.get(name, (-1,))[0]:
                        self.broken[name] = found
                if place > self.deepest:
                    self.deepest, self.sentence, self.names = found
                return {*names}
        return None

    def _free(self, name: str) -> Sequence[Any]:
        """Return the values of what nobody has fixed, beside those before it."""
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
            # others are tried where somebody says so alone
            return [one for one in CONTEXT_KINDS if one in engine.context] or CONTEXT_KINDS[:1]
        return _domain(engine, job, name)


def _fixed(job: Job, fixed: Fixed) -> dict[str, tuple[Any, ...]]:
    """Return the values that somebody has left, of those that are fixed."""
    found = {name: getattr(fixed, name) for name in _ORDER if name != "global_batch"}
    found |= {name: None if found[name] is None else (found[name],) for name in _SWITCHES}
    found["global_batch"] = job.global_batches
    return {name: values for name, values in found.items() if values is not None}


def _domain(engine: EngineSpace, job: Job, name: str) -> Sequence[Any]:
    """Return the values that something can have at all."""
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


def _batches(job: Job) -> list[int]:
    """Return global batches next to those of a job, which many data ranks can share."""
    found = set()
    for batch in job.global_batches:
        for part in divisors(job.world):
            found |= {batch // part * part, -(-batch // part) * part}
    return sorted(found - {0})


# --------------------------------------------------------------------------------------------------
# Remedies


def _option(name: str) -> str:
    words = {"micro_batch": "micro-batch", "global_batch": "global batch"}
    return words.get(name, name.replace("_", "-"))


def _has_word(sentence: str, name: str) -> bool:
    return re.search(rf"\b{_option(name)}\b", sentence) is not None


def _typed(name: str, values: Sequence[Any]) -> str:
    """Return an option with values as somebody types them."""
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
    # a word such as `block 4` has a space in it
    texts = [f"'{value}'" if " " in str(value) else str(value) for value in ordered]
    return f"--{names.get(name, name.replace('_', '-'))} {' or '.join(texts)}".rstrip()


def _remedy(
    engine: EngineSpace, job: Job, fixed: Fixed, failure: _Failure
) -> tuple[str | None, str]:
    """Return the nearest values of one option with which there is a launch, else what to drop.

    In front of it the value that the option is of, where it is one.
    """
    for name in failure.given:
        found: list[Any] = []
        for value in _near(engine, job, name, _fixed(job, fixed)[name]):
            if _Trial(engine, *_with(job, fixed, name, value), _SURELY).failure() is None:
                found.append(value)
            if len(found) == _NEAREST:
                break
        if found:
            return name, f"; {_typed(name, found)} {'does' if len(found) == 1 else 'do'}"
    dropped: list[str] = []
    left: _Failure | None = failure
    while left is not None:
        droppable = [name for name in left.given if name not in ("precision", "global_batch")]
        if not droppable:
            return None, ""  # it is no trainer of such a job
        dropped.append(_typed(droppable[0], ()))
        free: Any = {droppable[0]: None}
        fixed = replace(fixed, **free)
        left = _Trial(engine, job, fixed, _SURELY).failure()
    return None, f"; leave {' and '.join(dropped)} out"


def _with(job: Job, fixed: Fixed, name: str, value: Any) -> tuple[Job, Fixed]:
    if name == "global_batch":
        return replace(job, global_batches=(value,)), fixed
    values: Any = value if name in _SWITCHES else (value,)
    return job, replace(fixed, **{name: values})


def _near(engine: EngineSpace, job: Job, name: str, given: Sequence[Any]) -> list[Any]:
    """Return the values that something could have instead, those next to the given ones first."""
    others = [value for value in _domain(engine, job, name) if value not in given]
    if name == "recompute":
        # blocks instead of blocks, modules instead of modules
        block = given[0].startswith("block ")
        return sorted(others, key=lambda word: word.startswith("block ") != block)
    if name == "offload":
        wanted = {*given[0].split("+")}
        return sorted(others, key=lambda word: len(wanted ^ {*word.split("+")}))
    if name in ("zero", "schedule", "precision", "dispatcher", "cp_kind", *_SWITCHES):
        return others
    return sorted(others, key=lambda value: min(abs(math.log(value / one)) for one in given))
