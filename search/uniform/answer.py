"""A request answered by launches: the fastest of every trainer that has one set of degrees.

What is trained where becomes a job, each trainer is priced with its own software, and what was
assumed is said in sentences. Nothing here is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.errors import InputError, OptionError
from autopar.model import ModelSpec
from autopar.records import dataclass
from autopar.units import GIB, format_bytes
from search.degrees import fixed_of, training_of
from search.options import SPACE_PANEL
from search.places import named_card
from search.request import BATCH_OPTIONS, ROWS, Request, model_spec, with_places
from search.space import global_batches
from search.uniform.choice import Choice, Fixed
from search.uniform.engines import ENGINES, EngineSpace, Job, engine_space
from search.uniform.obstacle import obstacle

if TYPE_CHECKING:
    from autopar.estimate.card import Card
    from autopar.estimate.site import Site
    from autopar.memory.launch import Launch
    from search.check.assessment import Target
    from search.uniform.solve import Solution, Solved

__all__ = [
    "Answer",
    "EngineAnswer",
    "Question",
    "Remedy",
    "answer",
    "answers",
    "evaluated",
    "open_launches",
    "remedies",
    "target_of",
]

_TOKENS = 4 << 20
"""Of a step where nobody says its batch: what models of today are trained with at first."""
_TOP = 6
"""Families of degrees that are found of each trainer, the best and what else there is."""
_NAMES = tuple(engine.name for engine in ENGINES)
_OTHERS = (
    *("memory-of", "fp32-gradients", "sequence-parallel", "async-grad-reduce", "tp-overlap"),
    *("calibration", "reserve", "context-gib", "settle-chunk", "mixed-precision"),
)
"""Options of plans whose layers may differ, which a search over launches does not have."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of trainers with one set of degrees."""

    spec: ModelSpec
    job: Job
    num_nodes: int
    gpus_per_node: int
    card: Card
    site: Site | None
    engines: tuple[EngineSpace, ...]
    fixed: Fixed
    oom_risk: float
    stack: str | None
    seconds: float | None = None
    """Of CPU that each trainer's search may take; None: until it is proven."""
    assumed: tuple[str, ...]
    """Defaults that were taken, one sentence each."""

    @property
    def title(self) -> str:
        """Model, cluster and batch in words."""
        batches = self.job.global_batches
        batch = str(batches[0]) if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
        layers = self.spec.num_layers
        return (
            f"{self.spec.name} ({layers} layers, {self.job.seq:,} tokens) on {self.num_nodes} x "
            f"{self.gpus_per_node} {self.card.name}, global batch {batch}"
        )


@dataclass(frozen=True, kw_only=True)
class EngineAnswer:
    """What one trainer can do."""

    engine: EngineSpace
    target: Target
    solved: Solved | None
    reason: str = ""
    """Why there is no launch."""

    @property
    def best(self) -> Solution | None:
        """The fastest launch that fits."""
        return self.solved.solutions[0] if self.solved and self.solved.solutions else None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The launches that answer a question, each trainer's, the fastest first."""

    question: Question
    engines: tuple[EngineAnswer, ...]

    @property
    def best(self) -> EngineAnswer | None:
        """The trainer with the fastest launch; None where nothing fits."""
        return self.engines[0] if self.engines and self.engines[0].best else None

    @property
    def cpu_s(self) -> float:
        """Of all searches."""
        return sum(one.solved.effort.cpu_s for one in self.engines if one.solved)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with which a launch fits, and the fastest one then."""

    words: str
    """Options that say it."""
    engine: EngineSpace
    solution: Solution


def answers(request: Request) -> bool:
    """Return whether a request is one for launches: estimated, and of what launches alone have.

    A model with experts, latent attention, windows or modules of further tokens, or a degree that
    was fixed; and no option that spans a space of plans whose layers differ. Raises OptionError
    where options contradict each other.
    """
    inputs = request.inputs
    if request.engine not in (None, "any", *_NAMES) or request.output.evaluate is not None:
        return False
    if request.output.frontier or named_card(inputs.hardware) is None or inputs.model is None:
        return False
    if inputs.time_profiling_path is not None or inputs.memory_profiling_path is not None:
        return False
    space = {row.name for row in ROWS if row.panel == SPACE_PANEL} - {"engine"}
    if (space | {*_OTHERS}) & request.given.keys():
        return False
    if with_places(inputs, request.options)[1].times is not None:
        return False
    return request.degrees.any_given or _is_modern(model_spec(inputs))


def _is_modern(spec: ModelSpec) -> bool:
    return spec.mtp_layers > 0 or any(
        layer.num_experts is not None or layer.latent is not None or layer.window is not None
        for layer in spec.layers
    )


def open_launches(request: Request) -> Question:
    """Return the question of a request that `answers`; raises InputError for unusable inputs."""
    from autopar.estimate.card import load_card, parse_hardware
    from autopar.estimate.site import load_site
    from autopar.memory.profile import launch_model

    inputs, options = request.inputs, request.options
    spec = model_spec(inputs)
    card_name, nodes, per_node = parse_hardware(str(inputs.hardware))
    card = load_card(card_name)
    assumed = []
    if "memory-constraint" in request.given:
        asked = options.memory_constraint_bytes
        if asked > 1.02 * card.memory_bytes:
            raise OptionError(
                f"--memory-constraint: {asked / GIB:.4g} GiB is more than the "
                f"{card.memory_bytes / GIB:.4g} GiB of {card.name}; leave it out to use all of it"
            )
        card = replace(card, memory_bytes=asked)
    else:
        assumed.append(f"--memory-constraint {card.memory_bytes / GIB:.4g} (all of {card.name})")
    if per_node < card.max_gpus_per_node:
        card = replace(card, max_gpus_per_node=per_node)
    model = launch_model(spec)
    for name, values in (("ep", request.degrees.ep), ("etp", request.degrees.etp)):
        if model.experts is None and values is not None and 1 not in values:
            raise OptionError(f"--{name}: {spec.name} has no experts; leave it out")
    world, seq = nodes * per_node, spec.layers[0].seq_length
    if BATCH_OPTIONS & request.given.keys():
        batches = global_batches(options)
    else:
        batch = world * max(1, round(_TOKENS / seq / world))
        batches = (batch,)
        assumed.append(
            f"--settle-bsz {batch} (nobody said the global batch: about 4 Mi tokens, a multiple of "
            "the GPUs)"
        )
    if inputs.seq_length is None:
        assumed.append(f"--seq-length {seq} (of {spec.name}'s file)")
    if request.degrees.moe_skew is None and any(layer.num_experts for layer in spec.layers):
        assumed.append("--moe-skew 1 (tokens are spread evenly over experts)")
    engines = ENGINES if request.engine in (None, "any") else (engine_space(str(request.engine)),)
    return Question(
        spec=spec,
        job=Job(
            name=spec.name,
            model=model,
            seq=seq,
            global_batches=batches,
            world=world,
            gpu=card.name,
            skew=request.degrees.moe_skew,
            training=training_of(request.degrees),
        ),
        num_nodes=nodes,
        gpus_per_node=per_node,
        card=card,
        site=None if inputs.site is None else load_site(inputs.site),
        engines=engines,
        fixed=_fixed(request),
        oom_risk=options.oom_risk,
        stack=inputs.stack,
        seconds=None if options.time_limit_s is None else options.time_limit_s / len(engines),
        assumed=tuple(assumed),
    )


def _fixed(request: Request) -> Fixed:
    """Return what a search has to keep to; raises OptionError for what no launch has."""
    fixed = fixed_of(request.degrees)
    kind = request.options.cp_kind
    if "cp-kind" not in request.given:
        return fixed
    if kind == "all-gather":
        raise OptionError(
            "--cp-kind: all-gather is not priced of launches; take ring or a2a, or leave it out"
        )
    return replace(fixed, cp_kind=(kind,))


def answer(question: Question, *, top: int = _TOP) -> Answer:
    """Return the fastest launches of every trainer that was asked for.

    top : families of degrees of each trainer that are found. Raises InputError where none of them
    has such a launch at all, whatever the memory.
    """
    found: list[EngineAnswer] = []
    for engine in question.engines:
        target = target_of(question, engine)
        try:
            solved = _solved(question, engine, target, top)
        except InputError as error:
            found.append(EngineAnswer(engine=engine, target=target, solved=None, reason=str(error)))
            continue
        reason = "" if solved.solutions else _why_none(question, solved)
        found.append(EngineAnswer(engine=engine, target=target, solved=solved, reason=reason))
    if all(one.solved is None for one in found):
        raise InputError(_none_is_legal(found))
    # equally fast ones stay in the order of the trainers
    found.sort(key=lambda one: -(one.best.samples_per_s if one.best else 0.0))
    return Answer(question=question, engines=tuple(found))


def _solved(question: Question, engine: EngineSpace, target: Target, top: int) -> Solved:
    """Return the launches of a trainer, or what lacks; raises InputError where there are none."""
    from search.uniform.solve import solve

    illegal = obstacle(engine, question.job, question.fixed)
    if illegal is not None:
        raise InputError(illegal)
    found = solve(engine, question.job, target, question.fixed, top=top, seconds=question.seconds)
    if not found.solutions and found.smallest is None:
        raise InputError(_no_layout(question))
    return found


def _why_none(question: Question, solved: Solved) -> str:
    """Return what the smallest launch of a trainer lacks."""
    smallest, shortage = solved.smallest, solved.shortage
    assert smallest is not None, "there is a launch that does not fit"
    assert shortage is not None, "it lacks memory"
    line = smallest.choice.line(question.job.world, experts=question.job.model.experts is not None)
    return f"nothing fits; the smallest, {line}, lacks {format_bytes(shortage.missing_bytes)}"


def _no_layout(question: Question) -> str:
    """Return why degrees that are legal have no launch: no layout has what somebody has fixed."""
    layers, fixed = question.job.model.num_layers, question.fixed
    if fixed.vpp is not None:
        counts = ", ".join(map(str, fixed.vpp))
        return (
            f"{layers} layers do not lie in vpp {counts}: those of the longest stage have to "
            "divide into its chunks; leave --vpp out"
        )
    return (
        f"no chunk of {layers} layers has more of them than the blocks of --recompute; take fewer"
    )


def _none_is_legal(found: Sequence[EngineAnswer]) -> str:
    """Return why no trainer has a launch, whatever the memory, in one sentence of the first."""
    first, *others = found
    if all(one.reason == first.reason for one in others):
        return first.reason
    names = [one.engine.name for one in others]
    return (
        f"{first.reason} ({first.engine.name}; {', '.join(names[:-1])} and {names[-1]} have no "
        "such launch either)"
    )


_ENOUGH = 3
"""Ways out of an answer without launches that are looked for."""


def remedies(question: Question) -> tuple[Remedy, ...]:
    """Return what would make a launch fit, cheapest first: what changes least of the training.

    Moments of fewer bits, states on the host, adapters, adapters beside 4 bits, more machines; each
    is searched as the question was, and only what fits is returned.
    """
    training = question.job.training
    changed: list[tuple[str, Question]] = []
    for other in (
        replace(training, optimizer="adam-bf16"),
        replace(training, optimizer="adam8bit"),
        replace(training, offload=1.0),
        replace(training, lora_rank=training.lora_rank or 32),
        replace(training, lora_rank=training.lora_rank or 32, lora_base="nf4"),
    ):
        if other != training:
            job = replace(question.job, training=other)
            changed.append((other.words, replace(question, job=job)))
    for factor in (2, 4):
        nodes = factor * question.num_nodes
        job = replace(question.job, world=nodes * question.gpus_per_node)
        if all(batch % factor == 0 for batch in job.global_batches):
            words = f"--hardware {question.card.name}:{nodes}x{question.gpus_per_node}"
            changed.append((words, replace(question, job=job, num_nodes=nodes)))
    found: list[Remedy] = []
    for words, other_question in changed:
        try:
            one = answer(other_question, top=1).best
        except InputError:
            continue  # the change is of what none of them has
        if one is not None and one.best is not None:
            found.append(Remedy(words=words, engine=one.engine, solution=one.best))
        if len(found) == _ENOUGH:
            break
    return tuple(found)


def evaluated(
    question: Question, engine: EngineSpace, choice: Choice, launch: Launch
) -> EngineAnswer:
    """Return one launch of an engine with its price, whether it fits or not; raises InputError.

    launch : what the choice is in the engine, or somebody made of that.
    """
    from search.check.assessment import assess
    from search.uniform.solve import Effort, Solution, Solved

    target = target_of(question, engine)
    assessment = assess(launch, target)
    if assessment.step is None:
        raise InputError(f"the launch has no step time: {assessment.untimed}")
    solution = Solution(choice=choice, launch=launch, assessment=assessment)
    effort = Effort(degrees=1, opened=0, timed=1, counted=1, cpu_s=0.0)
    solved = Solved(engine=engine, solutions=(solution,), smallest=None, effort=effort)
    return EngineAnswer(engine=engine, target=target, solved=solved)


def target_of(question: Question, engine: EngineSpace) -> Target:
    """Return where an engine's launches run, with its own software."""
    from autopar.estimate.accuracy import load_accuracy
    from autopar.estimate.layer import machine_of
    from autopar.estimate.stack import load_stack
    from search.check.assessment import Target

    machine = machine_of(question.card, load_stack(question.stack or engine.stack), question.site)
    return Target(
        machine=machine,
        accuracy=load_accuracy(),
        site_known=question.site is not None,
        oom_risk=question.oom_risk,
    )
