"""The plan nearest to a given one that Megatron-LM can run, and what it differs in.

Megatron-LM has one tensor and one context degree for the whole model, one data-parallel type,
recomputes the first k layers of every stage, and splits embedding and head as it does the layers.
Ulysses is its context parallelism by all-to-all, which may be chosen by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.errors import InputError
from autopar.model import ModelSpec
from autopar.plans import LayerStrategy, Plan, VocabStrategy, violations
from search.engines.job import Job, Loss, layer_ranges, per_value
from search.space import divisors

__all__ = [
    "Communication",
    "Degrees",
    "Nearest",
    "checkpoints_first",
    "engine_vocab",
    "nearest",
]

Communication = Literal["p2p", "a2a", "a2a+p2p"]
_MOVED = (
    "layers of a stage that are recomputed come first in it: of layers that are alike it makes no "
    "difference which are"
)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The degrees of the whole model."""

    tensor: int = 1
    context: int = 1
    exchange: int = 1
    """Part of the context degree over which layers that mix both kinds exchange heads; else 1."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """What the engine runs, as a plan and as degrees."""

    plan: Plan
    degrees: Degrees
    communication: tuple[Communication, ...]
    """By layer; without meaning at context degree 1."""
    recomputed: int
    """The first so many layers of every stage are recomputed."""
    losses: tuple[Loss, ...]
    notes: tuple[str, ...] = ()


def nearest(job: Job) -> Nearest:
    """Return the nearest plan; `losses` is empty exactly when it is that of `checkpoints_first`.

    Raises
    ------
    InputError : no plan with these stages and this batch is both near and legal.
    """
    losses: list[Loss] = []
    plan = checkpoints_first(job.plan, job.spec)
    has_moved = plan != job.plan
    plan = _with_schedule(plan, losses)
    plan = _with_data_type(plan, losses)
    plan, recomputed = _with_prefix(plan, losses)
    after, degrees = _with_degrees(plan, job)
    losses += _degree_losses(plan, after)
    return Nearest(
        plan=after,
        degrees=degrees,
        communication=tuple(_communication(strategy) for strategy in after.layers),
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


def engine_vocab(degrees: Degrees, plan: Plan, *, zero3: bool) -> VocabStrategy:
    """Return embedding and head as the engine splits them: weights by tensor, tokens by context.

    A plan has no context degree for them. Without a tensor degree it is called Ulysses. With one,
    a rank's tokens are those of a data degree where the batch divides so far; where it does not,
    all is called one Ulysses group, whose ranks hold more weights than the engine's.
    """
    tensor, context = degrees.tensor, degrees.context
    if context == 1:
        return VocabStrategy(tp=tensor, zero3=zero3)
    # context ranks have tokens of their own, as data ranks do
    data = plan.world_size // (plan.num_stages * tensor)
    if tensor > 1 and plan.global_batch % (plan.num_microbatches * data) == 0:
        return VocabStrategy(tp=tensor, zero3=zero3)
    return VocabStrategy(tp=tensor * context, ulysses=True, zero3=zero3)


def _communication(strategy: LayerStrategy) -> Communication:
    if not strategy.ulysses:
        return "p2p"
    return "a2a" if strategy.cp == 1 else "a2a+p2p"


# --- schedule, data parallelism, recomputation ------------------------------------------------


def _with_schedule(plan: Plan, losses: list[Loss]) -> Plan:
    # one stage runs the same under either schedule
    if plan.pipeline_type == "1f1b" or plan.num_stages == 1:
        return plan
    if plan.num_microbatches < plan.num_stages:
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
    stages = plan.stage_of_layer()
    counts = [0] * plan.num_stages
    for strategy, stage in zip(plan.layers, stages, strict=True):
        counts[stage] += strategy.checkpoint
    most = max(counts)
    layers, position, last = [], 0, 0
    for strategy, stage in zip(plan.layers, stages, strict=True):
        position = position + 1 if stage == last else 1
        last = stage
        layers.append(replace(strategy, checkpoint=position <= most))
    changed = [i for i, new in enumerate(layers) if new != plan.layers[i]]
    if changed:
        now, before = sum(strategy.checkpoint for strategy in layers), sum(counts)
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


# --- tensor, Ulysses and context degrees ------------------------------------------------------


def _with_degrees(plan: Plan, job: Job) -> tuple[Plan, Degrees]:
    """Return a plan of one tensor and one context degree, legal here and in the engine."""
    wanted = job.tensor_degree
    for layers in _uniform(plan, wanted):
        degrees = _shared_degrees(layers)
        ranks = plan.world_size // plan.num_stages
        if degrees is None or ranks % (degrees.tensor * degrees.context):
            continue
        vocab = engine_vocab(degrees, plan, zero3=plan.vocab.zero3)
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


def _shared_degrees(layers: Sequence[LayerStrategy]) -> Degrees | None:
    """Return the degrees that all layers have in common, None where they have not."""
    # to the engine Ulysses is context parallelism by all-to-all
    shared = {(1, s.tp * s.cp) if s.ulysses else (s.tp, s.cp) for s in layers}
    exchanges = {s.tp for s in layers if s.ulysses and s.cp > 1}
    if len(shared) > 1 or len(exchanges) > 1:
        return None
    ((tensor, context),) = shared
    return Degrees(tensor=tensor, context=context, exchange=max(exchanges, default=1))


def _runs(plan: Plan, degrees: Degrees, job: Job) -> bool:
    """Return whether a plan is legal, also by the engine's stricter rules for heads and tokens."""
    if violations(plan, job.spec, sequence_parallel=job.sequence_parallel):
        return False
    if degrees.context > 1 and job.seq_length % (2 * degrees.context):
        return False  # asked of all-to-all too
    exchanged = max((s.tp for s in plan.layers if s.ulysses), default=1)
    return exchanged == 1 or all(
        count is None or count % exchanged == 0
        for layer in job.spec.layers
        for count in (layer.num_heads, layer.num_kv_heads)
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
    return f"Ulysses degree {vocab.tp}" if vocab.ulysses else f"tensor degree {vocab.tp}"
