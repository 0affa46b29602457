"""Step time of one plan in four models: bottom-up estimate, planner, Calculon and tensor2d.

Every model receives the plan as far as it can represent it. The parts of its step time are mapped
to common names, so that the models can be compared. For a model that cannot represent the plan, the
result contains a reason instead of a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Literal

from msgspec import (
    convert,
    field,
    to_builtins,
)
from msgspec.structs import asdict

from autopar.errors import DocumentError, InfeasibleExecution, InputError, OptionError
from autopar.rates.card import Card
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.run.of_plan import run_of_plan
from autopar.run.plan import LayerStrategy, Plan, refinements, violations
from autopar.run.runtime import Overlap

if TYPE_CHECKING:
    from autopar.documents.plan import PlanDocument
    from autopar.rates.accuracy import RunClass
    from autopar.rates.site import Site
    from autopar.rates.stack import Stack
    from autopar.run.run import Run
    from search.request.request import InputSpec

MODELS: Mapping[str, str] = {
    "bottom_up": "bottom-up",
    "planner": "planner",
    "calculon": "Calculon",
    "tensor2d": "2D",
}
"""Model keys in display order -> column headings."""
KINDS = ("products", "attention", "memory-bound")
"""Kinds of computation: GEMMs, attention, memory-bound operations. Not all models separate them."""
TERMS = (
    "compute",
    "recomputation",
    "tensor parallel",
    "context parallel",
    "ZeRO-3 traffic",
    "stage transfer",
    "pipeline bubble",
    "gradients",
    "optimizer",
    "host",
    "stragglers",
    "other",
)
"""Common names of the parts of a step, which add up to the step time."""
OF_STEP = {
    "gemm": "compute",
    "attention": "compute",
    "memory": "compute",
    "cast": "compute",
    "recompute": "recomputation",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "experts": "other",
    "transfer": "stage transfer",
    "host": "host",
    "sharding": "ZeRO-3 traffic",
    "bubble": "pipeline bubble",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "stragglers": "stragglers",
}
_KINDS_OF_STEP = {
    "gemm": "products",
    "attention": "attention",
    "memory": "memory-bound",
    "cast": "memory-bound",
}
OF_WATERFALL = {
    "forward": "compute",
    "backward": "compute",
    "vocab": "compute",
    "recompute": "recomputation",
    "tp": "tensor parallel",
    "ulysses": "tensor parallel",
    "cp": "context parallel",
    "zero3": "ZeRO-3 traffic",
    "sync": "gradients",
    "host": "host",
    "stragglers": "stragglers",
    "transfer": "stage transfer",
    "bubble": "pipeline bubble",
    "gradient_sync": "gradients",
    "optimizer": "optimizer",
}
"""Parts of the planner's prediction in a plan file -> common name; all others are `other`."""
_OF_CALCULON = {
    "forward": "compute",
    "backward": "compute",
    "embedding": "compute",
    "head and loss": "compute",
    "recomputation": "recomputation",
    "tensor parallel": "tensor parallel",
    "tensor parallel, repeated": "tensor parallel",
    "stage transfer": "stage transfer",
    "pipeline bubble": "pipeline bubble",
    "data parallel": "gradients",
    "offload": "other",
    "optimizer": "optimizer",
}
_OF_TENSOR2D = {
    "computation": "compute",
    "memory traffic": "compute",
    "tensor parallel": "tensor parallel",
    "stage transfer": "stage transfer",
    "pipeline bubble": "pipeline bubble",
    "data parallel": "gradients",
}
_CALCULON_PRODUCTS = ("_Query", "_Key", "_Value", "_MLP", "_Mlp1", "_Mlp2")
_CALCULON_ATTENTION = ("_Flash",)
_TENSOR2D_PRODUCTS = frozenset({"fc1", "fc2", "qkv", "vproj", "head"})
_TENSOR2D_ENDS = frozenset({"embedding", "ln_f", "head", "loss"})
"""Operations that occur once, not in every layer."""
_ROOM_GIB = 1e6
"""Memory capacity used for Calculon, GiB, so that it never rejects a plan; only times are compared.
"""
_DATATYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class PlanQuestion(Record):
    """A plan, with the model, card and engine settings from its file and the command line."""

    path: str
    plan: Plan
    spec: ModelSpec
    card: Card
    """Card of the devices, with the GPUs per node of the plan's cluster."""
    stack: Stack
    site: Site | None
    """Probed cluster used for the plan's prediction; None if there was none."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    fp32_gradients: bool = True
    tp_overlap: bool = True
    step_time_s: float | None = None
    """Step time predicted by the planner, seconds; None if the plan file has no prediction."""
    waterfall_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of `step_time_s` by the planner's names, seconds; empty without a prediction."""
    estimated: bool = True
    """True if the planner's prediction is based on datasheets, False if on measured profiles."""


class Column(Record):
    """Prediction of one model for a plan."""

    model: str
    """Key in `MODELS`."""
    total_s: float | None
    """Step time, seconds; None if the model cannot represent the plan."""
    terms_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of the step time by name in `TERMS`, seconds; they add up to `total_s`."""
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of `compute` by name in `KINDS`, seconds; empty if the model does not separate them."""
    own_s: Mapping[str, float] = field(default_factory=dict)
    """Parts of the step time by the model's original names, seconds."""
    reason: str = ""
    """Reason why there is no step time; empty if there is one."""
    notes: tuple[str, ...] = ()
    """Differences between the plan that the model evaluates and the given plan, as sentences."""
    runs: RunClass | None = None
    """Published runs whose errors give the 90 % interval of the bottom-up estimate.

    They use another stack if there are none with this one. None for the other models.
    """

    @property
    def parts_s(self) -> dict[str, float]:
        """Most detailed parts of the step time, seconds: `kinds_s` replaces `compute` if known."""
        if not self.kinds_s:
            return dict(self.terms_s)
        rest = {name: value for name, value in self.terms_s.items() if name != "compute"}
        return {**self.kinds_s, **rest}


class Difference(Record):
    """Difference between the step times of two models, with the part that contributes most."""

    one: str
    other: str
    seconds: float
    """Step time of model `other` minus step time of model `one`, seconds."""
    share: float
    """Difference as a fraction of the step time of `one`."""
    term: str
    """Part that contributes most to the difference."""
    term_s: float
    """Difference of the part `term`, seconds."""
    against: str
    """Part that reduces the difference most; empty if none does."""
    against_s: float
    """Difference of the part `against`, seconds; 0 if there is none."""


class Comparison(Record):
    """Predictions of all models for one plan."""

    question: PlanQuestion
    columns: tuple[Column, ...]

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Differences between every two models that predict a step time for the plan."""
        priced = [column for column in self.columns if column.total_s is not None]
        return tuple(_difference(one, other) for one, other in combinations(priced, 2))


def load_question(
    path: str,
    *,
    model: str | None = None,
    system: str | None = None,
    stack: str | None = None,
    notice: Callable[[str], None] | None = None,
) -> PlanQuestion:
    """Return the plan, model, card and settings in a plan file; options override its content.

    model, system, stack : shipped names or files. The card `system` is required if the plan was
        searched with measured profiles. Strategy files contain neither model nor card, so both are
        required.
    notice : receives a sentence on each input found next to the plan file, and on an ignored site.

    Raises InputError: a file is invalid or the plan is illegal. Raises OptionError: the model or
    the card is not given.
    """
    from autopar.documents.plan import PlanDocument, read_strategy
    from autopar.rates.site import load_site
    from autopar.rates.stack import load_stack
    from search.request.request import build_request, model_spec, stored_request

    document = PlanDocument.read(path)
    given = {} if model is None else {"model": model}
    stored = stored_request(path, document, given, notice)
    for option, value in (("model", model), ("system", system)):
        if value is None and not stored:
            what = "model" if option == "model" else "devices"
            raise OptionError(f"{path} does not name its {what}", remedy=f"Add --{option}")
    request = build_request({**stored, **given})
    spec = model_spec(request.inputs)
    options = request.options
    plan = read_strategy(document, num_layers=spec.num_layers, path=path)
    if len(plan.layers) != spec.num_layers:
        raise DocumentError(
            path,
            f"describes {len(plan.layers)} layers, but {spec.name} has {spec.num_layers}",
            key="tp_sizes_enc",
            remedy="Use the model of the plan, with --model",
        )
    problems = violations(plan, spec, sequence_parallel=options.sequence_parallel)
    if problems:
        raise InputError(f"{path}: illegal plan, no step time: {problems[0]}")
    card = _card(path, request.inputs, system, plan)
    site = None if request.inputs.site is None else load_site(request.inputs.site)
    if site is not None and system is not None and site.card not in (None, card.name):
        # The user asks about another device, which the plan's cluster does not describe.
        if notice is not None:
            notice(
                f"the plan's site {site.name} was measured on {site.card} and is "
                f"ignored for {card.name}"
            )
        site = None
    waterfall = document.prediction.waterfall_s if document.prediction is not None else {}
    return PlanQuestion(
        path=path,
        plan=plan,
        spec=spec,
        card=card,
        stack=load_stack(stack or _stack_of(document, request.inputs)),
        site=site,
        precision=options.mixed_precision,
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=options.async_grad_reduce,
        fp32_gradients=options.fp32_gradients,
        tp_overlap=options.tp_overlap,
        step_time_s=document.step_time_s,
        waterfall_s={name: value for name, value in waterfall.items() if value is not None},
        estimated=document.estimated,
    )


_STACKS = {"torchtitan": "torchtitan-eager", "accelerate": "composer-fsdp"}
"""Software stack of each engine; all other engines use that of Megatron-Core."""
_MEASURED_STACK = "megatron-core"


def _stack_of(document: PlanDocument, inputs: InputSpec) -> str:
    """Return the name of the software stack used for a plan's prediction, else of its engine."""
    from autopar.documents.catalog import stack_names
    from autopar.rates.stack import DEFAULT_STACK
    from autopar.sources import Source, stacks_of

    if inputs.stack is not None:
        return inputs.stack
    if document.estimated:
        # Stacks named in the input files of the plan.
        named = stacks_of(Source(role=entry.role, path=entry.path) for entry in document.inputs)
        return named[0] if len(named) == 1 and named[0] in stack_names() else DEFAULT_STACK
    return _STACKS.get(document.options.engine or "", _MEASURED_STACK)


def _card(path: str, inputs: InputSpec, system: str | None, plan: Plan) -> Card:
    """Return the card of a plan's devices, with the GPUs per node of the plan's cluster.

    Raises OptionError if the plan was searched with measured profiles and `system` is not given.
    """
    from autopar.rates.card import load_card, parse_hardware
    from search.request.profiles import named_card
    from search.request.request import DEFAULT_HARDWARE, measured_hardware

    hardware = DEFAULT_HARDWARE if inputs.uses_default_hardware else inputs.hardware
    name, per_node = system, None
    asked = named_card(hardware)
    if asked is not None:
        of_plan, nodes, gpus = parse_hardware(asked)
        name = system or of_plan
        # The default cluster of a strategy file describes no real machine.
        per_node = gpus if nodes * gpus == plan.world_size else None
    elif system is None:
        raise OptionError(
            f"{path} describes a measured cluster, and estimates need a card",
            remedy="Add --system",
        )
    else:
        per_node = measured_hardware(inputs, hardware).gpus_per_node
    assert name is not None, "a cluster that is no card's was refused"
    card = load_card(name)
    if per_node is None or per_node >= card.max_gpus_per_node:
        return card
    return replace(card, max_gpus_per_node=per_node)


# --------------------------------------------------------------------------------------------------
# The comparison.


def compare(question: PlanQuestion) -> Comparison:
    """Return the predictions of all models; a model that fails has a reason instead of a time."""
    priced = (
        ("bottom_up", _bottom_up),
        ("planner", _planner),
        ("calculon", _calculon),
        ("tensor2d", _tensor2d),
    )
    columns = []
    for model, price in priced:
        try:
            columns.append(price(question))
        except InfeasibleExecution as error:
            columns.append(Column(model=model, total_s=None, reason=error.reason))
        except InputError as error:
            # The remedy is omitted, since the plan is given.
            columns.append(Column(model=model, total_s=None, reason=error.short))
    return Comparison(question=question, columns=tuple(columns))


def _difference(one: Column, other: Column) -> Difference:
    assert one.total_s is not None
    assert other.total_s is not None
    both = one.kinds_s and other.kinds_s
    left, right = (c.parts_s if both else dict(c.terms_s) for c in (one, other))
    gaps = {name: right.get(name, 0.0) - left.get(name, 0.0) for name in {**left, **right}}
    seconds = other.total_s - one.total_s
    sign = math.copysign(1.0, seconds)
    term = max(gaps, key=lambda name: sign * gaps[name])
    against = min(gaps, key=lambda name: sign * gaps[name])
    # A part in the direction of the total is not opposed to it.
    opposed = sign * gaps[against] < 0.0
    return Difference(
        one=one.model,
        other=other.model,
        seconds=seconds,
        share=seconds / one.total_s,
        term=term,
        term_s=gaps[term],
        against=against if opposed else "",
        against_s=gaps[against] if opposed else 0.0,
    )


def summed(names: Mapping[str, str], parts: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of parts by common name; names : part -> common name, default `other`."""
    found: dict[str, float] = {}
    for name, value in parts.items():
        common = names.get(name, "other")
        found[common] = found.get(common, 0.0) + value
    return found


def _under(names: Mapping[str, str], parts: Mapping[str, float]) -> dict[str, float]:
    """Return the nonzero sums of parts by common name, in the order of `TERMS` and `KINDS`."""
    found = summed(names, parts)
    order = (*TERMS, *KINDS)
    return {name: found[name] for name in order if found.get(name)}


# --------------------------------------------------------------------------------------------------
# Bottom-up: card, stack and run.


def bottom_up_run(question: PlanQuestion) -> Run:
    """Return the run of a plan; raises InputError for features that only the planner supports."""
    plan, spec = question.plan, question.spec
    # Of the features in `refinements`, the bottom-up estimate supports only ZeRO-1.
    unknown = refinements(replace(plan, default_dp_type="ddp"))
    if unknown:
        raise InputError(f"this comparison does not support {', '.join(unknown)} of the plan")
    if any(
        spec.layers[kind].num_experts is not None and strategy.tp > 1
        for kind, strategy in zip(spec.layer_types, plan.layers, strict=True)
    ):
        raise InputError("only the planner prices experts that tensor ranks split, not bottom-up")
    return run_of_plan(
        plan,
        # The planner does not count MTP layers either.
        replace(spec, mtp_layers=0),
        engine="galvatron",
        gpu=question.card.gpu,
        sequence_parallel=question.sequence_parallel,
        precision=question.precision,
        fp32_gradients=question.fp32_gradients,
        async_grad_reduce=question.async_grad_reduce,
        overlap=Overlap(tensor=question.tp_overlap, gradients=True),
    )


def _bottom_up(question: PlanQuestion) -> Column:
    from autopar.price.job import job_of_run
    from autopar.price.step import step_time
    from autopar.rates.accuracy import load_accuracy
    from autopar.rates.parts.operations import machine_of

    stack = question.stack
    job = job_of_run(bottom_up_run(question))
    step = step_time(machine_of(question.card, stack, question.site, gpus=job.gpus), job)
    experts = any(layer.num_experts is not None for layer in question.spec.layers)
    known = question.site is not None and bool(question.site.known)
    runs = load_accuracy().of(stack.name, experts=experts, site_known=known)
    return Column(
        model="bottom_up",
        total_s=step.total_s,
        terms_s=_under(OF_STEP, step.terms_s),
        kinds_s=_under(_KINDS_OF_STEP, {k: step.terms_s[k] for k in _KINDS_OF_STEP}),
        own_s=dict(step.terms_s),
        notes=tuple(_unpriced(question)),
        runs=runs,
    )


def _unpriced(question: PlanQuestion) -> Iterator[str]:
    """Yield sentences on differences between the bottom-up estimate and the plan."""
    plan = question.plan
    sharded = any(strategy.zero3 for strategy in plan.layers)
    if sharded and question.async_grad_reduce and plan.num_microbatches > 1:
        yield "gradients of ZeRO-3 are scattered in every micro-batch, not once a step"
    if {(strategy.tp, strategy.cp) for strategy in plan.layers} != {(plan.vocab.tp, 1)}:
        yield "redistribution between layers of different degrees is ignored"


# --------------------------------------------------------------------------------------------------
# The planner: the prediction in the plan file.


def _planner(question: PlanQuestion) -> Column:
    if question.step_time_s is None or not question.waterfall_s:
        raise InputError(
            "the file contains no prediction; autopar-search --evaluate --json writes one"
        )
    basis = "datasheets" if question.estimated else "measured files"
    return Column(
        model="planner",
        total_s=question.step_time_s,
        terms_s=_under(OF_WATERFALL, question.waterfall_s),
        own_s=dict(question.waterfall_s),
        notes=(f"from the plan file, based on {basis}",),
    )


# --------------------------------------------------------------------------------------------------
# Closed forms, which assume equal blocks.


def _uniform(question: PlanQuestion, model: str) -> LayerStrategy:
    """Return the common strategy of all layers.

    Raises InputError if layers differ, and for context parallelism, Ulysses and ZeRO-3, which the
    closed forms do not support. model : name for the message.
    """
    plan = question.plan
    strategies = dict.fromkeys(plan.layers)
    if len(strategies) > 1:
        fields = [
            name
            for name in asdict(plan.layers[0])
            if len({getattr(strategy, name) for strategy in strategies}) > 1
        ]
        raise InputError(f"layers differ in {', '.join(fields)}, and {model} needs equal layers")
    first = plan.layers[0]
    if first.cp > 1:
        raise InputError("no context-parallel ring in this model")
    if first.ulysses and first.tp > 1:
        raise InputError("no Ulysses sequence parallelism in this model")
    if first.zero3 and plan.data_degree(0) > 1:
        raise InputError(
            "this model does not shard weights over data-parallel ranks as ZeRO-3 does"
        )
    return first


def _closed_notes(question: PlanQuestion, equal: Sequence[int]) -> Iterator[str]:
    """Yield sentences on differences between the evaluated plan and the given plan.

    equal : evaluated number of layers per stage.
    """
    plan = question.plan
    if tuple(equal) != plan.stage_sizes:
        sizes = ", ".join(map(str, plan.stage_sizes))
        yield f"stages of {max(equal)} layers in the place of {sizes}"
    if plan.vocab.tp != plan.layers[0].tp:
        yield f"embedding and head have tp {plan.layers[0].tp} as the layers, not {plan.vocab.tp}"
    if plan.vocab.zero3 and plan.data_degree(0) > 1:
        yield "embedding and head are whole on every data-parallel rank"
    if not question.async_grad_reduce and plan.num_microbatches > 1:
        yield "gradients are reduced once a step, not in every micro-batch"


def _calculon(question: PlanQuestion) -> Column:
    from search.closed_form.calculon import Execution, System, evaluate
    from search.closed_form.calculon.exploration import time_parts
    from search.closed_form.files import application_of, calculon_from_card, structure_of

    plan, per_node = question.plan, question.card.max_gpus_per_node
    application = application_of(question.spec)
    first, dp = _uniform(question, "Calculon"), plan.data_degree(0)
    pp = plan.num_stages
    # The last stage has the remaining layers.
    each = -(-len(plan.layers) // pp)
    scattered = question.sequence_parallel and first.tp > 1

    def tier(ranks: int) -> int:
        # Tier of two, from the number of GPUs over which the ranks of a group are spread.
        return int(ranks > per_node)

    execution = Execution(
        num_procs=plan.world_size,
        tensor_par=first.tp,
        pipeline_par=pp,
        data_par=dp,
        tensor_par_net=tier(first.tp),
        data_par_net=tier(first.tp * dp),
        pipeline_par_net=tier(plan.world_size),
        batch_size=plan.global_batch,
        microbatch_size=plan.micro_batch,
        datatype=_DATATYPES[question.precision],
        fused_activation=True,
        attention_type="flash",
        activation_recompute="full" if first.checkpoint else "none",
        pipeline_interleaving=1,
        optimizer_sharding=plan.default_dp_type == "zero2" and dp > 1,
        tensor_par_comm_type="rs_ag" if scattered else "ar",
        tensor_par_overlap="none",
        # Megatron gathers the input again; a recomputed block already has it.
        seq_par_ag_redo=scattered and not first.checkpoint,
        data_par_overlap=dp > 1,
        weight_offload=False,
        activations_offload=False,
        optimizer_offload=False,
        structure_type=structure_of(question.spec),
    )
    system = to_builtins(calculon_from_card(question.card))
    room = convert({**system, "mem1": {**system["mem1"], "GiB": _ROOM_GIB}}, System)
    statistics = evaluate(application, execution, room, layers=True)
    own = {part.name: part.amount for part in time_parts(statistics)}
    block = _by_kind(
        (_calculon_kind(row["name"]), sum(row[f"{key}_processing_time"] for key in _PASSES))
        for row in statistics["layers"]
    )
    kinds = _scaled(block, statistics["fw_time"] + statistics["bw_time"])
    kinds["products"] += own.get("head and loss", 0.0)
    kinds["memory-bound"] += own.get("embedding", 0.0)
    sizes = (*(each for _ in range(pp - 1)), len(plan.layers) - each * (pp - 1))
    return Column(
        model="calculon",
        total_s=statistics["total_time"],
        terms_s=_under(_OF_CALCULON, own),
        kinds_s=kinds,
        own_s=own,
        notes=tuple(_closed_notes(question, sizes)),
    )


_PASSES = ("fw", "agrad", "wgrad")


def _calculon_kind(name: str) -> str:
    if name.endswith(_CALCULON_PRODUCTS):
        return "products"
    return "attention" if name.endswith(_CALCULON_ATTENTION) else "memory-bound"


def _tensor2d(question: PlanQuestion) -> Column:
    from search.closed_form.files import model_of, tensor2d_from_card
    from search.closed_form.tensor2d import evaluate
    from search.closed_form.tensor2d.exploration import time_parts

    plan, per_node = question.plan, question.card.max_gpus_per_node
    model = model_of(question.spec)
    first, dp = _uniform(question, "the 2D model"), plan.data_degree(0)
    if first.checkpoint:
        raise InputError("this model recomputes attention scores only, not whole layers")
    if question.precision == "fp32":
        raise InputError("this model has 16-bit GEMMs only")
    config = {
        "dp": dp,
        "tp": first.tp,
        "pp": plan.num_stages,
        "mbs": plan.micro_batch,
    }
    # Tensor ranks are neighbours, then data ranks, then stages.
    placement, left = {}, per_node
    for group in ("tp", "dp", "pp"):
        placement[f"nv_{group}"] = inside = math.gcd(config[group], left)
        left //= inside
    statistics = evaluate(
        "1d",
        model,
        config,
        placement,
        n_gpus=plan.world_size,
        global_batch_size=plan.global_batch,
        system=tensor2d_from_card(question.card),
        layers=True,
    )
    own = {part.name: part.amount for part in time_parts(statistics)}
    each = len(plan.layers) // plan.num_stages
    kinds = _by_kind(
        (
            _tensor2d_kind(row["name"]),
            (1 if row["name"] in _TENSOR2D_ENDS else each)
            * sum(row[f"t_{way}_{what}"] for way in ("fwd", "bwd") for what in ("comp", "mem")),
        )
        for row in statistics["layers"]
    )
    notes = [*_closed_notes(question, [each] * plan.num_stages), "it has no optimizer"]
    return Column(
        model="tensor2d",
        total_s=statistics["t"],
        terms_s=_under(_OF_TENSOR2D, own),
        kinds_s=_scaled(kinds, statistics["t_comp"] + statistics["t_mem"]),
        own_s=own,
        notes=tuple(notes),
    )


def _tensor2d_kind(name: str) -> str:
    if name in _TENSOR2D_PRODUCTS:
        return "products"
    return "attention" if name == "fusedla" else "memory-bound"


def _by_kind(parts: Iterator[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for kind, seconds in parts:
        found[kind] += seconds
    return found


def _scaled(parts: Mapping[str, float], total_s: float) -> dict[str, float]:
    """Return parts scaled in constant proportion so that they add up to a total, seconds."""
    whole = sum(parts.values())
    return {name: value * total_s / whole if whole else 0.0 for name, value in parts.items()}
