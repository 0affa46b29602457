"""Conversion of per-layer plans to runs of Megatron-LM, and of its arguments to plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.errors import DocumentError, InputError, UnsupportedError, shortened
from autopar.records import replace, shorten
from autopar.run.model import ModelSpec
from autopar.run.plan import (
    ZERO_DEFAULTS,
    LayerStrategy,
    Plan,
    fewest_microbatches,
    layer_problems,
    violations,
)
from autopar.run.rules import broken
from autopar.run.run import Run, legal, run_with_split
from autopar.run.runtime import ExpertKernels, Zero
from autopar.run.strategy import Strategy
from autopar.units import divisors
from search.engines.arguments import LaunchArguments, words_of
from search.engines.candidate import FULL, NONE
from search.engines.exporter_types import ExportTarget, ImportedPlan, UnsupportedFeature
from search.engines.megatron.arguments import (
    WAYS,
    Flag,
    MegatronDegrees,
    communication,
    engine_vocab,
)
from search.engines.megatron.read import (
    arguments_of_configuration,
    precision_of,
    renamed,
    strategy_of,
)
from search.engines.megatron.release import Release
from search.engines.megatron.rules import EXCHANGE
from search.engines.megatron.setting import VIRTUAL
from search.engines.megatron.space import SPACE as OWN
from search.engines.plans import (
    EVERY_MICROBATCH,
    ONE_DEGREE,
    ONE_STAGE,
    REPLICAS,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    UNIFORM,
    ZERO3,
    ExporterSpace,
    ExportJob,
    NearestPlan,
    choice_of_plan,
    different,
    has_one_kind,
    run_of_choice,
    search_fields,
    target_of,
    unsupported_modules,
)
from search.engines.text import Configuration
from search.engines.uniform_approximation import losses_between


def _check(spec: ModelSpec) -> None:
    """Raise InputError for a model that pretrain_gpt.py cannot build, or for missing sizes."""
    if not has_one_kind(spec):
        raise UnsupportedError(
            f"{spec.name} has layers of several types, but Megatron-LM's "
            "pretrain_gpt.py builds models with one type of decoder layer"
        )
    parts = unsupported_modules(spec)
    if parts:
        raise UnsupportedError(
            f"{spec.name} has {' and '.join(parts)}, which cannot be exported "
            "from a per-layer plan to Megatron-LM"
        )
    layer = spec.layers[0]
    extra = spec.extra_embedding_parameters or spec.extra_head_parameters
    if not layer.causal or extra:
        raise UnsupportedError(
            f"{spec.name} is not a decoder-only model, which Megatron-LM's pretrain_gpt.py builds"
        )
    for what, value in (
        ("num_heads", layer.num_heads),
        ("ffn_hidden_size", layer.ffn_hidden_size),
        ("vocab_size", spec.vocab_size),
    ):
        if value is None:
            raise InputError(
                f"the description of {spec.name} has no {what}, which Megatron-LM needs",
                remedy="Use --model NAME, a config.json or a model.json",
            )
    base = spec.rotary_base
    # `--rotary-base` is an int in argparse, which rejects other numbers.
    if base is not None and not base.is_integer():
        raise UnsupportedError(
            f"{spec.name} has rotary positions of base {base}, but --rotary-base "
            "of Megatron-LM is a whole number"
        )


# --------------------------------------------------------------------------------------------------
# Nearest plan that Megatron-LM can run, and the differences to the requested plan.
#
# Megatron-LM has one tensor degree, one context degree and one data-parallel type for the whole
# model. It recomputes the first k layers of every stage and splits embedding and head like the
# layers. Ulysses is its all-to-all context parallelism, which may differ by layer.


_TITLE = "Megatron-LM"
_MOVED = (
    "layers of a stage that are recomputed come first in it: of layers that are alike it makes no "
    "difference which are"
)


def _nearest(job: ExportJob) -> tuple[Plan, MegatronDegrees, tuple[UnsupportedFeature, ...]]:
    """Return (nearest plan, its degrees, unsupported features of the plan of the job).

    job : job whose plan comes from `checkpoints_first`.

    Raises InputError if no similar plan with equal stages and batch sizes is legal.
    """
    plan = _with_prefix(_with_data_type(_with_schedule(job.plan)))
    after, degrees = _with_degrees(plan, job)
    reasons = {
        "checkpoint": "recomputes the first layers of every stage, as many of each",
        "use_sp": "has no Ulysses with tensor parallelism",
        "cp_sizes_enc": "has one context degree for all layers",
    }
    if plan.num_stages > 1:
        reasons |= dict.fromkeys(
            ("dp_types_enc", "embed_sdp"), "has no ZeRO-3 with pipeline stages"
        )
    losses = losses_between(job.plan, after, _TITLE, reasons)
    if after.pipeline_type != job.plan.pipeline_type:
        gone = UnsupportedFeature(
            field="pipeline_type", what="GPipe becomes 1F1B, the only schedule"
        )
        losses = (gone, *losses)
    return after, degrees, losses


def checkpoints_first(plan: Plan, spec: ModelSpec) -> Plan:
    """Return the plan with the recomputed layers of each stage moved to its start.

    Only stages whose layers are otherwise equal are changed: there, the position of recomputed
    layers affects neither step time nor memory.
    """
    layers: list[LayerStrategy] = []
    for size in plan.stage_sizes:
        first = len(layers)
        own = plan.layers[first : first + size]
        types = set(spec.layer_types[first : first + size])
        if len(types) == 1 and len({replace(s, checkpoint=False) for s in own}) == 1:
            # sorted() is stable, so only the recomputed layers move.
            own = tuple(sorted(own, key=lambda strategy: not strategy.checkpoint))
        layers += own
    return replace(plan, layers=tuple(layers))


def _with_schedule(plan: Plan) -> Plan:
    # The schedule has no effect with a single stage.
    if plan.pipeline_type == "1f1b" or plan.num_stages == 1:
        return plan
    if plan.num_microbatches < fewest_microbatches("1f1b", plan.num_stages):
        raise InputError(
            "Megatron-LM has only the 1F1B schedule, which needs "
            f"micro-batches({plan.num_microbatches}) >= pp({plan.num_stages})",
            remedy="Search again with --pipeline-type pipedream_flush",
        )
    return replace(plan, pipeline_type="1f1b")


def _with_data_type(plan: Plan) -> Plan:
    """Return the plan with one data-parallel type for all layers, embedding and head.

    The type is ZeRO-3 if any layer has it. With several stages, ZeRO-3 becomes ZeRO-2.
    """
    zero3, default = any(layer.zero3 for layer in plan.layers), plan.default_dp_type
    if plan.num_stages > 1 and (zero3 or plan.vocab.zero3):
        # ZeRO-3 is Megatron-FSDP, which is not exported with pipeline stages.
        zero3, default = False, "zero2"
    return replace(
        plan,
        layers=tuple(replace(strategy, zero3=zero3) for strategy in plan.layers),
        vocab=replace(plan.vocab, zero3=zero3),
        default_dp_type=default,
    )


def _with_prefix(plan: Plan) -> Plan:
    """Return the plan with the first k layers of every stage recomputed.

    k is the largest number of recomputed layers in any stage of the given plan.
    """
    most = max(_recomputed(plan).values(), default=0)
    positions = (position for size in plan.stage_sizes for position in range(size))
    layers = tuple(
        replace(strategy, checkpoint=position < most)
        for strategy, position in zip(plan.layers, positions, strict=True)
    )
    return replace(plan, layers=layers)


def _recomputed(plan: Plan) -> Counter[int]:
    """Return the number of recomputed layers by stage."""
    stages = zip(plan.layers, plan.stage_of_layer(), strict=True)
    return Counter(stage for strategy, stage in stages if strategy.checkpoint)


def _with_degrees(plan: Plan, job: ExportJob) -> tuple[Plan, MegatronDegrees]:
    """Return (legal plan with one tensor degree and one context degree, these degrees).

    Raises InputError if no degrees are legal.
    """
    wanted = job.tensor_degree
    for layers in _uniform(plan, wanted):
        degrees = _shared_degrees(layers)
        if degrees is None or not degrees.data(plan):
            continue
        vocab = engine_vocab(degrees, layers, zero3=plan.vocab.zero3)
        candidate = replace(plan, layers=layers, vocab=vocab)
        if candidate == plan and wanted is not None and _runs(plan, degrees, job):
            return plan, degrees  # a plan with one degree keeps it, whatever degree is requested
        fits = wanted is None or layers[0].tp == wanted
        if fits and _runs(candidate, degrees, job):
            return candidate, degrees
    what = "any tensor degree" if wanted is None else f"tensor degree {wanted}"
    raise InputError(
        f"Megatron-LM has one strategy for all layers, and none of {what} is "
        f"legal with the plan's {plan.num_stages} stages and batch of "
        f"{plan.global_batch} in {plan.num_microbatches} micro-batches",
        remedy="Search again with --no-fine-grained-mode",
    )


def _uniform(plan: Plan, wanted: int | None) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield strategies of all layers to try, nearest to the plan first.

    wanted : requested tensor degree; None: any degree.
    """
    straight = tuple(replace(strategy, strided=False) for strategy in plan.layers)
    yield straight
    ranks = plan.world_size // plan.num_stages
    own = sorted({strategy.tp for strategy in plan.layers}, reverse=True)
    degrees = (
        [wanted] if wanted is not None else [*own, *(d for d in divisors(ranks) if d not in own)]
    )
    contexts = sorted({strategy.cp for strategy in plan.layers} | {1}, reverse=True)
    tensors = [strategy.ulysses for strategy in plan.layers if strategy.tp > 1]
    # Try first the type that most layers use: Ulysses or tensor parallelism.
    first = 2 * sum(tensors) > len(tensors)
    for degree in degrees:
        for context in contexts:
            for ulysses in (first, not first) if degree > 1 else (False,):
                yield tuple(
                    replace(strategy, tp=degree, ulysses=ulysses, cp=context)
                    for strategy in straight
                )


def _shared_degrees(layers: Sequence[LayerStrategy]) -> MegatronDegrees | None:
    """Return the Megatron-LM degrees of layers; None if layers differ in them."""
    # In the engine, Ulysses is all-to-all context parallelism.
    shared = {(1, s.tp * s.cp) if s.ulysses else (s.tp, s.cp) for s in layers}
    exchanges = {s.tp for s in layers if s.ulysses and s.cp > 1}
    if len(shared) > 1 or len(exchanges) > 1:
        return None
    ((tensor, context),) = shared
    return MegatronDegrees(tensor=tensor, context=context, exchange=max(exchanges, default=1))


def _runs(plan: Plan, degrees: MegatronDegrees, job: ExportJob) -> bool:
    """Return True if a plan is legal, including rules of Megatron-LM on heads and tokens."""
    sp = job.sequence_parallel
    # Megatron-LM applies the rules of ring context parallelism to all-to-all as well.
    ring = LayerStrategy(tp=degrees.tensor, cp=degrees.context)
    exchanged = max((s.tp for s in plan.layers if s.ulysses), default=1)
    return not violations(plan, job.spec, sequence_parallel=sp) and not any(
        any(layer_problems(layer, ring, sequence_parallel=sp))
        or broken(
            EXCHANGE,
            {
                "heads": layer.num_heads,
                "kv_heads": layer.num_kv_heads,
                "tp": 1,
                "exchange": exchanged,
            },
        )
        for layer in job.spec.layers
    )


# --------------------------------------------------------------------------------------------------
# Nearest plan with its settings in Megatron-LM, and its run.


SPACE = ExporterSpace(
    parts=(
        ({**SHARDED_OPTIMIZER}, ""),
        ({**SHARDED_OPTIMIZER, **ONE_DEGREE}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**REPLICAS}, ""),
        ({**REPLICAS, **ONE_DEGREE}, ""),
    ),
    context=True,
    # The exported arguments omit `--tp-comm-overlap`, which needs buffers and certain libraries.
    priced={"tp_overlap": False},
    stack="megatron-core",
)


def near(job: ExportJob) -> NearestPlan:
    """Return the nearest plan that Megatron-LM can run, with its differences from that of the job.

    Raises InputError if pretrain_gpt.py cannot build the model, or if no similar plan is legal.
    """
    _check(job.spec)
    first = checkpoints_first(job.plan, job.spec)
    moved = (_MOVED,) if first != job.plan else ()
    plan, degrees, losses = _nearest(replace(_with_experts(job), plan=first))
    zero = _zero(job, plan)
    fully_sharded = zero > 1
    # Megatron-FSDP reduces gradients in every micro-batch, Megatron's DDP once per step.
    runs = {
        "async_grad_reduce": not fully_sharded,
        "fp32_gradients": job.fp32_gradients,
        "tp_overlap": degrees.tensor == 1 and job.tp_overlap,
    }
    # With one tensor rank, sequence parallelism has no effect and is not exported.
    if degrees.tensor > 1:
        runs["sequence_parallel"] = _with_experts(job).sequence_parallel
    space = (*UNIFORM, *(ONE_STAGE if fully_sharded else ()))
    return NearestPlan(
        plan=plan,
        losses=losses,
        notes=(*moved, *_data_notes(job, plan, zero)),
        as_run=different(job, plan, runs),
        search=search_fields(plan, runs, space),
    )


def _with_experts(job: ExportJob) -> ExportJob:
    """Return the job, with sequence parallelism on if the model has experts, which require it."""
    experts = any(layer.num_experts for layer in job.spec.layers)
    return replace(job, sequence_parallel=job.sequence_parallel or experts)


def _at_once(job: ExportJob, plan: Plan) -> bool:
    """Return True if a plan has ZeRO-2 and reduces gradients after every micro-batch."""
    each = plan.num_microbatches == 1 or not job.async_grad_reduce
    return each and plan.default_dp_type == "zero2"


def _zero(job: ExportJob, plan: Plan) -> Zero:
    """Return the ZeRO stage with which Megatron-LM runs a plan.

    1 is the distributed optimizer, which stores unsharded gradients until their reduction. It also
    runs ZeRO-2 plans with one reduction per step or with several stages. 2 is `optim_grads` of
    Megatron-FSDP, for ZeRO-2 plans of one stage with a reduction in every micro-batch.
    """
    if plan.layers[0].zero3:
        return 3
    if plan.default_dp_type == "ddp":
        return 0
    return 2 if _at_once(job, plan) and plan.num_stages == 1 else 1


def _data_notes(job: ExportJob, plan: Plan, zero: Zero) -> Iterator[str]:
    if zero == 0 and not job.async_grad_reduce:
        yield "gradients are reduced once per step, not in every micro-batch"
    if zero > 1 and job.async_grad_reduce and plan.num_microbatches > 1:
        yield (
            "Megatron-FSDP reduces gradients in every micro-batch, not once per "
            "step, as predicted with --no-async-grad-reduce"
        )
    if zero == 1 and _at_once(job, plan):
        yield (
            "the distributed optimizer keeps whole gradients until the end of the step: "
            "more memory than predicted"
        )


def handed(job: ExportJob, plan: Plan) -> tuple[Run, ExportTarget]:
    """Return (run, export target) of a plan that `near` returned; raises RuleError if illegal."""
    job = _with_experts(job)
    degrees = _shared_degrees(plan.layers)
    assert degrees is not None, "the nearest plan has one set of degrees"
    zero = _zero(job, plan)
    most = max(_recomputed(plan).values(), default=0)
    whole = all(layer.checkpoint for layer in plan.layers)
    choice = replace(
        # The search space has no ZeRO-2; the run gets the ZeRO stage below.
        choice_of_plan(plan, zero=1 if zero == 2 else zero),
        tp=degrees.tensor,
        etp=degrees.tensor,
        cp=degrees.context,
        recompute=FULL if whole else f"block {most}" if most else NONE,
    )
    words = tuple(communication(strategy) for strategy in plan.layers)
    mixed = degrees.context > 1 and len(set(words)) > 1
    if mixed:
        choice = replace(choice, cp_kind="ring")
    run = run_with_split(
        run_of_choice(OWN, job, choice),
        zero=zero,
        sequence_parallel=choice.tp > 1 and job.sequence_parallel,
        rings=degrees.context // degrees.exchange if degrees.exchange > 1 and not mixed else 1,
    )
    runtime = run.runtime
    runtime = replace(
        runtime,
        precision=replace(
            runtime.precision,
            gradients_bf16=job.precision == "bf16" and not job.fp32_gradients,
            gradients_fp32=job.precision == "fp16" and job.fp32_gradients,
        ),
        # Megatron-FSDP uses separate gradient buffers and disables fused accumulation with a
        # warning.
        kernels=replace(runtime.kernels, fused_accumulation=zero < 2),
        # As in the cost model of plans: every rank has a shard of all experts, and all tokens.
        experts=ExpertKernels(),
        overlap=replace(runtime.overlap, gradients=job.async_grad_reduce),
    )
    place = target_of(job)
    if mixed:
        place = replace(place, exchanges=words, exchange_degree=degrees.exchange)
    return legal(replace(run, runtime=runtime)), place


# --------------------------------------------------------------------------------------------------
# Import of arguments as a plan. Of the model, only the number of layers is needed.
# `search.engines.megatron.read` reads the strategy. Arguments that no plan can express raise an
# error. Settings that affect only estimates become notes.


_EXPERTS = "expert-model-parallel-size"


def import_megatron(
    source: Configuration, *, world_size: int | None = None, num_layers: int | None = None
) -> ImportedPlan:
    """Return the plan that Megatron-LM arguments describe.

    world_size : number of GPUs; None: the source contains it.
    num_layers : number of layers if the source does not contain it.

    Raises DocumentError for an invalid argument, and for one that no plan can express.
    """
    arguments, _ = arguments_of_configuration(source)
    given = renamed(words_of(arguments))
    words = LaunchArguments(source=str(source.path), words=given, asked=set())
    world = source.num_gpus(world_size or source.world_size or words.number("world-size", 0))
    if words.number(_EXPERTS, 1) > 1:
        raise words.fail(
            _EXPERTS,
            f"the value is {words.text(_EXPERTS)}, but plans have expert degree 1",
            "Remove it to price the rest",
        )
    layers = words.number("num-layers", num_layers)
    try:
        strategy = strategy_of(words, world, Release(), num_layers=layers)
    except DocumentError:
        raise
    except InputError as error:
        # Only the error for layers that do not divide evenly names no argument.
        remedy = "Megatron-LM refuses it too; give --pipeline-model-parallel-layout"
        raise words.fail(Flag.STAGES, error.short, remedy) from None
    _check_ranks(words, strategy)
    if any(group.split.recompute == "full" for group in strategy.layers):
        # Full recomputation needs this argument in Megatron-LM: the lookup fails if it is missing.
        words.number(Flag.RECOMPUTED)
    notes = (*_recomputation_notes(strategy), *_pricing_notes(words, strategy))
    return ImportedPlan(plan=_plan(words, strategy), notes=notes)


def _check_ranks(words: LaunchArguments, strategy: Strategy) -> None:
    """Raise DocumentError unless tp * pp * cp divides the GPUs and micro-batch * dp the batch."""
    split, pp, world = strategy.first, strategy.pp, strategy.gpus
    rest = world % (split.tp * pp * split.cp)
    if rest:
        raise words.fail(
            Flag.TENSOR,
            f"{world} GPUs % (tp({split.tp}) * pp({pp}) * cp({split.cp})) = {rest} != 0",
            "Use the --nodes and --gpus-per-node of the script",
        )
    batch, micro, dp = strategy.global_batch, strategy.micro_batch, strategy.dp
    if batch % (micro * dp):
        raise words.fail(
            Flag.GLOBAL_BATCH,
            f"{batch} % (micro batch({micro}) * dp({dp})) = {batch % (micro * dp)} != 0",
            "Megatron-LM refuses it too; make it a multiple",
        )


def _plan(words: LaunchArguments, strategy: Strategy) -> Plan:
    zero, sizes = strategy.first.zero, _stage_sizes(words, strategy)
    kinds, degrees = _communication(words, strategy)
    layers = tuple(
        replace(degrees.layer(kind), zero3=zero == 3, checkpoint=split.recompute == "full")
        for kind, split in zip(kinds, strategy.each_layer, strict=True)
    )
    return Plan(
        world_size=strategy.gpus,
        num_stages=strategy.pp,
        stage_sizes=sizes,
        layers=layers,
        vocab=engine_vocab(degrees, layers, zero3=zero == 3),
        global_batch=strategy.global_batch,
        num_microbatches=strategy.micro_batches,
        default_dp_type="ddp" if zero == 3 else ZERO_DEFAULTS[zero],
    )


def _stage_sizes(words: LaunchArguments, strategy: Strategy) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Raises DocumentError for virtual stages and for stages without layers, which no plan has.
    """
    if strategy.vpp > 1 or words.number(VIRTUAL[1], 1) > 1:
        flag = next(flag for flag in (*VIRTUAL, Flag.LAYOUT) if words.has(flag))
        raise words.fail(
            flag,
            f"the value is {shortened(words.text(flag))}, an interleaved schedule, which "
            "no plan has",
            "Remove it to price the same stages with 1F1B",
        )
    sizes = tuple(len(chunk.layers) for (chunk,) in strategy.stages)
    if not all(sizes):
        raise words.fail(
            Flag.LAYOUT if words.has(Flag.LAYOUT) else Flag.STAGES,
            f"leaves stage {sizes.index(0)} without a layer, which no plan does",
            "Use fewer stages",
        )
    return sizes


def _communication(
    words: LaunchArguments, strategy: Strategy
) -> tuple[tuple[str, ...], MegatronDegrees]:
    """Return (`--cp-comm-type` of each layer, degrees of the model).

    Raises DocumentError for unknown types, a wrong number of them, and all-to-all with tp > 1.
    """
    flag, split, layers = Flag.COMMUNICATION, strategy.first, strategy.num_layers
    # The default of Megatron-LM is the ring.
    kinds = (words.list(flag) if split.cp > 1 else ()) or ("p2p",)
    if len(kinds) == 1:
        kinds *= layers
    if len(kinds) != layers:
        raise words.fail(flag, f"the list has {len(kinds)} entries for {layers} layers")
    unknown = [kind for kind in kinds if kind not in WAYS]
    if unknown:
        raise words.fail(
            flag, f"expected p2p, all_gather, a2a or a2a+p2p, got {shorten(unknown[0])}"
        )
    if split.tp > 1 and any(kind.startswith("a2a") for kind in kinds):
        raise words.fail(
            flag,
            f"all-to-all (Ulysses) with --tensor-model-parallel-size {split.tp} cannot be read as "
            "a per-layer plan",
            "Use p2p",
        )
    exchange = words.numbers(Flag.HIERARCHY)[0] if "a2a+p2p" in kinds else 1
    return kinds, MegatronDegrees(tensor=split.tp, context=split.cp, exchange=exchange)


def _recomputation_notes(strategy: Strategy) -> Iterator[str]:
    split = strategy.first
    if split.modules:
        yield "selective recomputation is priced as none: it needs less memory than that"
    if split.recompute_unit > 1:
        yield (
            f"recomputation in units of {split.recompute_unit} layers is priced as of single "
            "layers, which keep more activations and need less for a moment"
        )


def _pricing_notes(words: LaunchArguments, strategy: Strategy) -> Iterator[str]:
    """Yield a note for each setting outside the plan, with the option to use in an estimate."""
    split, precision = strategy.first, precision_of(words)
    if split.tp > 1 and not split.sequence_parallel:
        yield "no --sequence-parallel: price it with --no-sequence-parallel"
    narrow = precision.gradient_bytes == 2
    if precision.kind == "fp16":
        gradients = " --no-fp32-gradients" if narrow else ""
        yield f"--fp16: price it with --mixed-precision fp16{gradients}"
    elif precision.kind == "fp32":
        yield "neither --bf16 nor --fp16: price it with --mixed-precision fp32"
    elif narrow:
        yield "--grad-reduce-in-bf16: price it with --no-fp32-gradients"
    if not words.has("overlap-grad-reduce"):
        yield "no --overlap-grad-reduce: the price assumes that reductions overlap"
    if split.zero > 1 and not words.has("use-torch-fsdp2") and strategy.micro_batches > 1:
        yield (
            "Megatron-FSDP reduces gradients in every micro-batch: price it with "
            "--no-async-grad-reduce"
        )
