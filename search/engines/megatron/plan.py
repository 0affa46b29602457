"""Megatron-LM: a plan as arguments of pretrain_gpt.py, in a shell script and in YAML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopar.errors import InputError, UnsupportedError
from autopar.records import Record, replace
from autopar.run.model import ModelSpec, head_dim
from autopar.run.plan import (
    LayerStrategy,
    Plan,
    VocabStrategy,
    fewest_microbatches,
    layer_problems,
    violations,
)
from autopar.run.rules import broken
from search.engines.engine import (
    EVERY_MICROBATCH,
    ONE_DEGREE,
    ONE_STAGE,
    REPLICAS,
    ROTARY_BASE,
    SHARDED_OPTIMIZER,
    SINGLE_STAGE,
    UNIFORM,
    ZERO3,
    Job,
    Loss,
    Lowered,
    Space,
    different,
    further_parts,
    has_one_kind,
    layer_ranges,
    per_value,
    required,
    search_fields,
)
from search.engines.megatron.arguments import (
    Argument,
    Flag,
    MegatronDegrees,
    communication,
    engine_vocab,
    layout_string,
)
from search.engines.megatron.files import (
    DATA,
    ENGINE_VERSION,
    FILL_IN,
    NO_MASKS,
    OPTIMIZER,
    SCRIPT,
    YAML,
    command,
    connections,
    script_text,
    yaml_text,
)
from search.engines.megatron.rules import EXCHANGE, violated_rules
from search.planning.space import divisors

# --------------------------------------------------------------------------------------------------
# A model as arguments of Megatron-LM's pretrain_gpt.py.


_LAYER_NORM = 4
"""Norm parameters per hidden unit of two LayerNorms; two RMSNorms have half of them."""


def model_arguments(spec: ModelSpec) -> tuple[list[Argument], list[str]]:
    """Return the arguments that describe an architecture, and what the user has to add.

    Raises InputError: the model is none that pretrain_gpt.py builds, or its description has gaps.
    """
    # one kind of layers is left by the check, so that any of them speaks for all
    layer = spec.layers[-1]
    _check(spec)
    assert layer.num_heads is not None
    arguments: list[Argument] = [
        ("num-layers", (str(spec.num_layers),)),
        ("hidden-size", (str(layer.hidden_size),)),
        ("ffn-hidden-size", (str(layer.ffn_hidden_size),)),
        ("num-attention-heads", (str(layer.num_heads),)),
        # its default, hidden size over heads, is wrong for models with wider heads
        ("kv-channels", (str(head_dim(layer)),)),
    ]
    if layer.num_kv_heads not in (None, layer.num_heads):
        arguments += [
            ("group-query-attention", ()),
            ("num-query-groups", (str(layer.num_kv_heads),)),
        ]
    notes: list[str] = []
    # it refuses a length above max-position-embeddings
    positions = max(spec.learned_positions, layer.seq_length)
    arguments += [
        ("seq-length", (str(layer.seq_length),)),
        ("max-position-embeddings", (str(positions),)),
    ]
    if spec.learned_positions:
        arguments.append(("position-embedding-type", ("learned_absolute",)))
    else:
        arguments += [("position-embedding-type", ("rope",)), *_rotary(spec, notes)]
    norm = "LayerNorm" if layer.norm_parameters_per_hidden == _LAYER_NORM else "RMSNorm"
    arguments.append(("normalization", (norm,)))
    if layer.gated_mlp:
        arguments.append(("swiglu", ()))
    if not layer.biases:
        arguments.append(("disable-bias-linear", ()))
        if layer.qkv_biases:
            arguments.append(("add-qkv-bias", ()))
    if layer.qk_norms:
        arguments.append(("qk-layernorm", ()))
    if not spec.tied_embeddings:
        arguments.append(("untie-embeddings-and-output-weights", ()))
    if layer.num_experts is not None:
        arguments += [
            ("num-experts", (str(layer.num_experts),)),
            ("moe-router-topk", (str(layer.experts_per_token or 1),)),
            # plans have no expert parallelism
            ("expert-model-parallel-size", ("1",)),
        ]
    arguments += [
        ("vocab-size", (str(spec.vocab_size),)),
        ("make-vocab-size-divisible-by", (str(spec.make_vocab_size_divisible_by),)),
        # its default is 0.1, and nothing is counted or measured with dropout
        ("attention-dropout", ("0.0",)),
        ("hidden-dropout", ("0.0",)),
    ]
    return arguments, notes


def _check(spec: ModelSpec) -> None:
    if not has_one_kind(spec):
        raise UnsupportedError(
            f"{spec.name} has layers of several kinds, and Megatron-LM's pretrain_gpt.py builds "
            "models of one kind of decoder layers"
        )
    parts = further_parts(spec)
    if parts:
        raise UnsupportedError(
            f"{spec.name} has {' and '.join(parts)}, for which no arguments of Megatron-LM are "
            "written from a plan"
        )
    layer = spec.layers[0]
    extra = spec.extra_embedding_parameters or spec.extra_head_parameters
    if not layer.causal or extra:
        raise UnsupportedError(
            f"{spec.name} is no decoder-only model, the kind that Megatron-LM's pretrain_gpt.py "
            "builds"
        )
    for what, value in (
        ("num_heads", layer.num_heads),
        ("ffn_hidden_size", layer.ffn_hidden_size),
        ("vocab_size", spec.vocab_size),
    ):
        if value is None:
            raise InputError(
                f"the description of {spec.name} does not hold {what}, which Megatron-LM needs; "
                "give --model NAME, a config.json or a model.json"
            )


def _rotary(spec: ModelSpec, notes: list[str]) -> list[Argument]:
    """Return base and scaling of rotary positions; the launch asks for a base that is unknown.

    Flags: `_add_network_size_args` in `megatron/training/arguments.py`; its scaling has the other
    three numbers of Llama 3.1 fixed.
    """
    base = spec.rotary_base
    if base is None:
        notes.append(
            "the model description does not hold the base of rotary positions: the launch asks for "
            "ROTARY_BASE"
        )
        return [("rotary-base", (required("ROTARY_BASE", ROTARY_BASE),))]
    # `--rotary-base` is an int of argparse, which refuses the text of any other number
    if not base.is_integer():
        raise UnsupportedError(
            f"{spec.name} has rotary positions of base {base}, and Megatron-LM's --rotary-base "
            "takes whole numbers only"
        )
    arguments: list[Argument] = [("rotary-base", (str(int(base)),))]
    if spec.rotary_scaling_factor is not None:
        factor = str(spec.rotary_scaling_factor)
        arguments += [("use-rope-scaling", ()), ("rope-scaling-factor", (factor,))]
    return arguments


# --------------------------------------------------------------------------------------------------
# The nearest plan that Megatron-LM can run, and what it differs in.
#
# Megatron-LM has one tensor and one context degree for the whole model, one data-parallel type,
# recomputes the first k layers of every stage, and splits embedding and head as it does the layers.
# Ulysses is its context parallelism by all-to-all, which may be chosen by layer.


_MOVED = (
    "layers of a stage that are recomputed come first in it: of layers that are alike it makes no "
    "difference which are"
)


class _Nearest(Record):
    """What the engine runs, as a plan and as degrees."""

    plan: Plan
    degrees: MegatronDegrees
    recomputed: int
    """The first so many layers of every stage are recomputed."""
    losses: tuple[Loss, ...]
    notes: tuple[str, ...] = ()


def _nearest(job: Job) -> _Nearest:
    """Return the nearest plan; `losses` is empty exactly when it is that of `checkpoints_first`.

    Raises InputError: no plan with these stages and this batch is both near and legal.
    """
    losses: list[Loss] = []
    plan = checkpoints_first(job.plan, job.spec)
    has_moved = plan != job.plan
    plan = _with_schedule(plan, losses)
    plan = _with_data_type(plan, losses)
    plan, recomputed = _with_prefix(plan, losses)
    after, degrees = _with_degrees(plan, job)
    losses += _degree_losses(plan, after)
    return _Nearest(
        plan=after,
        degrees=degrees,
        recomputed=recomputed,
        losses=tuple(losses),
        notes=(_MOVED,) if has_moved else (),
    )


def checkpoints_first(plan: Plan, spec: ModelSpec) -> Plan:
    """Return the plan with the recomputed layers of a stage first, where that changes no price.

    It does not where the layers of the stage are alike in all else: which of them are recomputed
    changes neither the time of a step nor its memory.
    """
    layers: list[LayerStrategy] = []
    for size in plan.stage_sizes:
        first = len(layers)
        own = plan.layers[first : first + size]
        types = set(spec.layer_types[first : first + size])
        if len(types) == 1 and len({replace(s, checkpoint=False) for s in own}) == 1:
            # sorted() is stable, so nothing but the recomputed layers moves
            own = tuple(sorted(own, key=lambda strategy: not strategy.checkpoint))
        layers += own
    return replace(plan, layers=tuple(layers))


def _with_schedule(plan: Plan, losses: list[Loss]) -> Plan:
    # one stage runs the same under either schedule
    if plan.pipeline_type == "1f1b" or plan.num_stages == 1:
        return plan
    if plan.num_microbatches < fewest_microbatches("1f1b", plan.num_stages):
        raise InputError(
            "Megatron-LM has the 1F1B schedule only, which needs "
            f"micro-batches({plan.num_microbatches}) >= pp({plan.num_stages}); search again "
            "with --pipeline-type pipedream_flush"
        )
    losses.append(Loss(field="pipeline_type", what="GPipe becomes 1F1B, the only schedule"))
    return replace(plan, pipeline_type="1f1b")


def _with_data_type(plan: Plan, losses: list[Loss]) -> Plan:
    """Give all layers, embedding and head one data-parallel type, the one with less memory."""
    sharded = [i for i, strategy in enumerate(plan.layers) if strategy.zero3]
    zero3, default = bool(sharded), plan.default_dp_type
    if plan.num_stages > 1 and (sharded or plan.vocab.zero3):
        zero3, default = False, "zero2"
        where = layer_ranges(sharded) if sharded else "embedding and head"
        losses.append(
            Loss(
                field="dp_types_enc" if sharded else "embed_sdp",
                what=f"ZeRO-3 of {where} becomes a distributed optimizer for the whole model: "
                "Megatron-FSDP is not combined with pipeline stages",
            )
        )
    elif zero3 and len(sharded) < len(plan.layers):
        others = sorted(set(range(len(plan.layers))) - set(sharded))
        losses.append(
            Loss(
                field="dp_types_enc",
                what=f"{layer_ranges(others)} ({default}) become ZeRO-3 as {layer_ranges(sharded)}",
            )
        )
    if plan.vocab.zero3 != zero3 and not (plan.num_stages > 1 and plan.vocab.zero3):
        now = "become ZeRO-3" if zero3 else "lose ZeRO-3"
        losses.append(Loss(field="embed_sdp", what=f"embedding and head {now} as the layers"))
    return replace(
        plan,
        layers=tuple(replace(strategy, zero3=zero3) for strategy in plan.layers),
        vocab=replace(plan.vocab, zero3=zero3),
        default_dp_type=default,
    )


def _with_prefix(plan: Plan, losses: list[Loss]) -> tuple[Plan, int]:
    """Let every stage recompute its first k layers, k the most that any stage recomputes."""
    counts = Counter(
        stage
        for strategy, stage in zip(plan.layers, plan.stage_of_layer(), strict=True)
        if strategy.checkpoint
    )
    most = max(counts.values(), default=0)
    positions = (position for size in plan.stage_sizes for position in range(size))
    layers = [
        replace(strategy, checkpoint=position < most)
        for strategy, position in zip(plan.layers, positions, strict=True)
    ]
    changed = [i for i, new in enumerate(layers) if new != plan.layers[i]]
    if changed:
        now, before = sum(strategy.checkpoint for strategy in layers), counts.total()
        prefix = "the first layer" if most == 1 else f"the first {most} layers"
        count = "as many in all" if now == before else f"{now} in all instead of {before}"
        losses.append(
            Loss(
                field="checkpoint",
                what=f"{prefix} of every stage {'is' if most == 1 else 'are'} recomputed, "
                f"{count} ({layer_ranges(changed)} change)",
            )
        )
    return replace(plan, layers=tuple(layers)), most


def _with_degrees(plan: Plan, job: Job) -> tuple[Plan, MegatronDegrees]:
    """Return a plan of one tensor and one context degree, legal here and in the engine."""
    wanted = job.tensor_degree
    for layers in _uniform(plan, wanted):
        degrees = _shared_degrees(layers)
        if degrees is None or not degrees.data(plan):
            continue
        vocab = engine_vocab(degrees, layers, zero3=plan.vocab.zero3)
        candidate = replace(plan, layers=layers, vocab=vocab)
        if candidate == plan and wanted is not None and _runs(plan, degrees, job):
            return plan, degrees  # of one degree, whatever is wanted
        fits = wanted is None or layers[0].tp == wanted
        if fits and _runs(candidate, degrees, job):
            return candidate, degrees
    what = "any tensor degree" if wanted is None else f"tensor degree {wanted}"
    raise InputError(
        f"Megatron-LM has one strategy for all layers, and this plan's {plan.num_stages} stages "
        f"and batch of {plan.global_batch} in {plan.num_microbatches} micro-batches are legal "
        f"with none of {what}; search again with --no-fine-grained-mode"
    )


def _uniform(plan: Plan, wanted: int | None) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield strategies of all layers that the engine may have, nearest first."""
    straight = tuple(replace(strategy, strided=False) for strategy in plan.layers)
    yield straight
    ranks = plan.world_size // plan.num_stages
    own = sorted({strategy.tp for strategy in plan.layers}, reverse=True)
    degrees = (
        [wanted] if wanted is not None else [*own, *(d for d in divisors(ranks) if d not in own)]
    )
    contexts = sorted({strategy.cp for strategy in plan.layers} | {1}, reverse=True)
    tensors = [strategy.ulysses for strategy in plan.layers if strategy.tp > 1]
    # the kind that most layers have is tried first
    first = 2 * sum(tensors) > len(tensors)
    for degree in degrees:
        for context in contexts:
            for ulysses in (first, not first) if degree > 1 else (False,):
                yield tuple(
                    replace(strategy, tp=degree, ulysses=ulysses, cp=context)
                    for strategy in straight
                )


def _shared_degrees(layers: Sequence[LayerStrategy]) -> MegatronDegrees | None:
    """Return the degrees that all layers have in common, None where they have not."""
    # to the engine Ulysses is context parallelism by all-to-all
    shared = {(1, s.tp * s.cp) if s.ulysses else (s.tp, s.cp) for s in layers}
    exchanges = {s.tp for s in layers if s.ulysses and s.cp > 1}
    if len(shared) > 1 or len(exchanges) > 1:
        return None
    ((tensor, context),) = shared
    return MegatronDegrees(tensor=tensor, context=context, exchange=max(exchanges, default=1))


def _runs(plan: Plan, degrees: MegatronDegrees, job: Job) -> bool:
    """Return whether a plan is legal, also by the engine's stricter rules for heads and tokens."""
    sp = job.sequence_parallel
    # it asks of all-to-all what it asks of a ring
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


def _degree_losses(before: Plan, after: Plan) -> Iterator[Loss]:
    old, new = before.layers, after.layers

    def changed(name: str) -> list[int]:
        return [i for i in range(len(old)) if getattr(old[i], name) != getattr(new[i], name)]

    if changed("tp"):
        yield Loss(
            field="tp_sizes_enc",
            what=f"tensor degrees {per_value([s.tp for s in old])} become {new[0].tp}",
        )
    # A layer whose degree was or is 1 has no kind that could be lost.
    kinds = [i for i in changed("ulysses") if old[i].tp > 1 and new[i].tp > 1]
    if kinds:
        into = "Ulysses" if new[0].ulysses else "Megatron tensor parallelism"
        yield Loss(field="use_sp", what=f"{layer_ranges(kinds)} become {into} as the others")
    if changed("cp"):
        yield Loss(
            field="cp_sizes_enc",
            what=f"context degrees {per_value([s.cp for s in old])} become {new[0].cp}",
        )
    if changed("strided"):
        yield Loss(
            field="tp_consecutive_flags",
            what=f"strided tensor groups of {layer_ranges(changed('strided'))} become neighbours",
        )
    if before.vocab != after.vocab:
        yield Loss(
            field="vtp",
            what=f"embedding and head become {_vocab(after.vocab)} instead of "
            f"{_vocab(before.vocab)}, as the layers",
        )


def _vocab(vocab: VocabStrategy) -> str:
    kind = f"Ulysses degree {vocab.tp}" if vocab.ulysses else f"tensor degree {vocab.tp}"
    return kind + (f" and context degree {vocab.cp}" if vocab.cp > 1 else "")


# --------------------------------------------------------------------------------------------------
# Export: the arguments; as files they are `search.engines.megatron.files`'s.


SPACE = Space(
    parts=(
        ({**SHARDED_OPTIMIZER}, ""),
        ({**SHARDED_OPTIMIZER, **ONE_DEGREE}, ""),
        ({**ONE_DEGREE, **SINGLE_STAGE, **EVERY_MICROBATCH}, ZERO3),
        ({**REPLICAS}, ""),
        ({**REPLICAS, **ONE_DEGREE}, ""),
    ),
    context=True,
    # the arguments ask for no `--tp-comm-overlap`, which takes buffers and the right libraries
    priced={"tp_overlap": False},
    stack="megatron-core",
)


def lower(job: Job) -> Lowered:
    """Return a plan as Megatron-LM takes it.

    Raises InputError: the model is none of pretrain_gpt.py's, or no near plan is legal.
    """
    model, notes = model_arguments(job.spec)
    # what differs from the priced plan is said at the end, this switch included
    priced = job
    if any(layer.num_experts for layer in job.spec.layers):
        job = replace(job, sequence_parallel=True)  # experts do not train without it
    near = _nearest(job)
    parallel, environment, more = _parallel(job, near)
    fully_sharded = "use-megatron-fsdp" in dict(parallel)
    # Megatron-FSDP reduces in every micro-batch, its other gradient buffers once per step.
    runs = {
        "async_grad_reduce": not fully_sharded,
        "fp32_gradients": job.fp32_gradients,
        "tp_overlap": near.degrees.tensor == 1 and job.tp_overlap,
    }
    # with one tensor rank it changes nothing, and is not written
    if near.degrees.tensor > 1:
        runs["sequence_parallel"] = job.sequence_parallel
    space = (*UNIFORM, *(ONE_STAGE if fully_sharded else ()))
    sections = {
        "MODEL": model,
        "PARALLEL": parallel,
        "BATCH": _batch(near),
        "PRECISION": _precision(job),
        "TRAINING": _TRAINING,
        "DATA": DATA,
    }
    arguments = {flag: words for part in sections.values() for flag, words in part}
    # refused on the cluster otherwise; the nearest plan keeps to all rules, so this is our mistake
    wrong = violated_rules(arguments, near.plan.world_size)
    assert not wrong, wrong
    return Lowered(
        engine="megatron",
        engine_version=ENGINE_VERSION,
        plan=near.plan,
        files={
            SCRIPT: script_text(job.spec.name, job, sections, environment),
            YAML: yaml_text(sections, environment),
        },
        losses=near.losses,
        launch=command(job),
        notes=(*notes, *near.notes, *more, *FILL_IN),
        as_run=different(priced, near.plan, runs),
        search=search_fields(near.plan, runs, space),
    )


_TRAINING: Sequence[Argument] = (
    ("train-iters", ("${TRAIN_ITERS:-500}",)),
    *OPTIMIZER,
    NO_MASKS,
)


def _parallel(job: Job, near: _Nearest) -> tuple[list[Argument], dict[str, str | None], list[str]]:
    """Return the arguments of parallelism, the environment they need (None: unset), and notes."""
    plan, degrees = near.plan, near.degrees
    arguments: list[Argument] = [
        (Flag.TENSOR, (str(degrees.tensor),)),
        (Flag.STAGES, (str(plan.num_stages),)),
        (Flag.CONTEXT, (str(degrees.context),)),
    ]
    if degrees.tensor > 1 and job.sequence_parallel:
        arguments.append(("sequence-parallel", ()))
    if degrees.context > 1:
        words = tuple(communication(strategy) for strategy in plan.layers)
        # one word stands for all layers, otherwise every layer has its own
        words = words[:1] if len(set(words)) == 1 else words
        arguments.append((Flag.COMMUNICATION, words))
        if degrees.exchange > 1:
            inner, outer = degrees.exchange, degrees.context // degrees.exchange
            sizes = (str(inner), str(outer))
            arguments.append((Flag.HIERARCHY, sizes))
    # equal stages are its default
    if len(set(plan.stage_sizes)) > 1:
        layout = layout_string(plan.stage_sizes)
        arguments.append((Flag.LAYOUT, (layout,)))
    if near.recomputed:
        arguments += [
            (Flag.GRANULARITY, ("full",)),
            # block recomputes the first layers of every stage, uniform all of them
            (Flag.METHOD, ("block",)),
            (Flag.RECOMPUTED, (str(near.recomputed),)),
        ]
    data, fully_sharded, notes = _data_parallel(job, near)
    split = degrees.tensor * degrees.context > 1
    environment = connections(split=split, fully_sharded=fully_sharded)
    return arguments + data, environment, notes


def _data_parallel(job: Job, near: _Nearest) -> tuple[list[Argument], bool, list[str]]:
    """Return the arguments of data parallelism, whether they are Megatron-FSDP's, and notes.

    ZeRO-1 is Megatron-LM's distributed optimizer, and so is ZeRO-2 with one reduction per step,
    which keeps whole gradients until then; one with a reduction in every micro-batch shards
    gradients at once, which is Megatron-FSDP's `optim_grads`.
    """
    plan, notes = near.plan, list[str]()
    overlap: list[Argument] = [("overlap-grad-reduce", ())] if job.async_grad_reduce else []
    zero3 = plan.layers[0].zero3
    if not zero3 and plan.default_dp_type == "ddp":
        if not job.async_grad_reduce:
            notes.append("gradients are reduced once per step, not in every micro-batch")
        return overlap, False, notes
    at_once = plan.num_microbatches == 1 or not job.async_grad_reduce
    at_once &= plan.default_dp_type == "zero2"
    if zero3 or (at_once and plan.num_stages == 1):
        if job.async_grad_reduce and plan.num_microbatches > 1:
            notes.append(
                "Megatron-FSDP reduces gradients in every micro-batch, not once per step; "
                "--no-async-grad-reduce prices that"
            )
        arguments: list[Argument] = [
            ("use-megatron-fsdp", ()),
            (Flag.SHARDING, ("optim_grads" + "_params" * zero3,)),
            ("use-distributed-optimizer", ()),
            ("no-gradient-accumulation-fusion", ()),
            ("ckpt-format", ("fsdp_dtensor",)),
        ]
    else:
        arguments = [("use-distributed-optimizer", ())]
        if at_once:
            notes.append(
                "the distributed optimizer keeps whole gradients until the end of the step: "
                "more memory than predicted"
            )
    # early gathering needs an overlapped reduction, by its own rule
    if overlap:
        overlap.append(("overlap-param-gather", ()))
    return arguments + overlap, "use-megatron-fsdp" in dict(arguments), notes


def _batch(near: _Nearest) -> list[Argument]:
    plan = near.plan
    # its micro-batch is that of one data rank, a plan's of all of them
    micro = plan.global_batch // (plan.num_microbatches * near.degrees.data(plan))
    return [
        (Flag.MICRO_BATCH, (str(micro),)),
        (Flag.GLOBAL_BATCH, (str(plan.global_batch),)),
    ]


def _precision(job: Job) -> list[Argument]:
    if job.precision == "fp32":
        return []
    arguments: list[Argument] = [(job.precision, ())]
    if job.precision == "bf16" and not job.fp32_gradients:
        arguments.append(("grad-reduce-in-bf16", ()))  # it would accumulate and reduce in fp32
    if job.precision == "fp16" and job.fp32_gradients:
        arguments.append(("accumulate-allreduce-grads-in-fp32", ()))
    return arguments
