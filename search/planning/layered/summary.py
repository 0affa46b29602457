"""Conversion of per-layer search results to the report record `Answer`, and plans in words.

All figures are copied from `SearchResult` and `Prediction`.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.answer import (
    Alternative,
    Answer,
    EngineBest,
    MemoryTerm,
    Price,
    Priced,
    StagePrice,
    WarningKind,
)
from autopar.command.answers import running_now
from autopar.run.plan import PUBLISHED_RUNS
from autopar.sources import stack_source, stacks_of
from autopar.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from autopar.run.plan import Infeasibility, LayerStrategy, Plan, Prediction, StagePrediction
    from autopar.sources import Source
    from autopar.training.throughput import Throughput
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import ConstrainedResult

# --------------------------------------------------------------------------------------------------
# Record of an answer.


_STEADY = ("states", "vocab_states", "fixed", "shared")
"""Memory categories that are steady-state."""
_MODEL_ROLES = ("model", "computation", "memory")
"""Prefixes of `Source.role` for inputs that describe the model."""
_COUNTED = "counted exactly"
"""Start of the source note of memory files that were counted without a GPU."""


def summary_of(
    result: SearchResult,
    *,
    title: str,
    throughput: Throughput | None = None,
    by_engine: Sequence[EngineBest] = (),
    tokens: float | None = None,
    gpu_hour_price: float | None = None,
    uniform: Priced | None = None,
) -> Answer:
    """Return the record that reports print for a search that found a plan.

    title : model and cluster in words.
    throughput : throughput of the best plan; None if unknown.
    uniform : best plan with one strategy for all layers; None if that is the best plan.
    by_engine, tokens, gpu_hour_price : fields of `Answer`.
    """
    plan, prediction = result.plan, result.prediction
    assert plan is not None, "there is a plan"
    assert prediction is not None, "a plan has a prediction"
    batches = {plan.global_batch, *(one.plan.global_batch for one in result.alternatives)}
    stats = result.stats
    return Answer(
        title=f"{title}, global batch {plan.global_batch}",
        warnings=warnings_of(
            result.sources, estimated=result.estimated, synthetic=result.synthetic
        ),
        best=priced_of(plan, prediction, throughput, result.sources, estimated=result.estimated),
        uniform=uniform,
        others=tuple(
            Alternative(
                one_line(one.plan, batch=len(batches) > 1),
                one.samples_per_s,
                one.probability_faster,
                None,
            )
            for one in result.alternatives
        ),
        by_engine=tuple(by_engine),
        tokens=tokens,
        gpu_hour_price=gpu_hour_price,
        searched=_proof(result),
        unfinished=result.unfinished,
        space=(
            f"{stats.candidates:,} combinations of batch, micro-batches, stages and vocabulary "
            f"degree; {stats.opened:,} of them searched exactly, bounds exclude the others"
        ),
        assumed=result.defaults_used,
        # estimated and synthetic inputs are listed among the warnings and inputs
        notes=tuple(
            note for note in result.notes if not note.startswith(("estimated: ", "synthetic: "))
        ),
        inputs=tuple(map(_input, dict.fromkeys(result.sources))),
        effort=f"CPU time: {format_seconds(stats.cpu_s)}",
    )


def priced_of(
    plan: Plan,
    prediction: Prediction,
    throughput: Throughput | None,
    sources: Sequence[Source],
    *,
    estimated: bool,
) -> Priced:
    """Return the report record of a per-layer plan: time, memory and interval.

    throughput : throughput of the plan; None if it cannot run.
    sources : input files.
    estimated : True if some inputs were not measured.
    """
    stages = tuple(map(_stage_price, prediction.stages))
    verdict = "fits" if prediction.fits else "does not fit"
    fullest = max(prediction.stages, key=lambda stage: stage.reserved_bytes, default=None)
    reserve = 0 if fullest is None else fullest.reserved_bytes - fullest.allocated_bytes
    notes = []
    if prediction.replay_s > 0 and math.isfinite(prediction.replay_s):
        share = prediction.replay_s / prediction.step_time_s - 1
        replayed = f"{format_seconds(prediction.replay_s)}, {share * 100:+.2f} %"
        notes.append(f"event replay of the step: {replayed}")
    return Priced(
        words=one_line(plan),
        uniform=len({*plan.layers}) == 1,
        price=Price(
            throughput=throughput,
            samples_per_s=prediction.samples_per_s,
            terms_s=prediction.waterfall_s,
            stage_s=tuple(stage.forward_s + stage.backward_s for stage in prediction.stages),
            global_batch=plan.global_batch,
            micro_batches=plan.num_microbatches,
            stages=stages,
            oom_probability=max((stage.oom_probability for stage in stages), default=1.0),
            verdict=verdict if prediction.legal else "is illegal",
            problems=prediction.problems,
            basis=tuple(_basis(prediction, sources, estimated)),
            interval=_interval(prediction),
            notes=tuple(notes),
            reserve_bytes=reserve,
            reserve_of="the context and the allocator",
        ),
        layered=(plan, prediction),
        key=plan,
    )


def priced_of_result(result: SearchResult, throughput: Throughput | None = None) -> Priced | None:
    """Return the report record of a search's best plan; None if there is no plan."""
    if result.plan is None or result.prediction is None:
        return None
    return priced_of(
        result.plan, result.prediction, throughput, result.sources, estimated=result.estimated
    )


def _stage_price(stage: StagePrediction) -> StagePrice:
    return StagePrice(
        stage=stage.stage,
        steady_bytes=sum(stage.memory_bytes.get(name, 0) for name in _STEADY),
        peak_bytes=stage.allocated_bytes,
        reserved_bytes=(stage.reserved_bytes, stage.reserved_bytes),
        budget_bytes=stage.budget_bytes,
        oom_probability=stage.odds_of_oom,
        terms=tuple(MemoryTerm(name, size) for name, size in stage.memory_bytes.items()),
    )


def _input(source: Source) -> str:
    marks = [name for name in ("estimated", "synthetic") if getattr(source, name)]
    return f"{source.role}: {source.path}" + (f" ({', '.join(marks)})" if marks else "")


def _proof(result: SearchResult) -> str:
    """Return the number of combinations searched and the proven gap to the best plan, in words."""
    what = f"best of {result.stats.candidates:,} combinations"
    # a search without a time limit ends early if it runs out of memory
    early = "stopped early" if result.too_large else "stopped by the time limit"
    if not math.isfinite(result.gap):
        return f"{what}; {early}, gap unknown"
    if result.status == "time_limit":
        return f"{what}; {early}, at most {result.gap * 100:.3g} % below the best"
    if result.gap > 0:
        return f"{what}; at most {result.gap * 100:.3g} % below the best"
    return f"{what}, proven (gap 0 %)"


def _basis(prediction: Prediction, sources: Sequence[Source], estimated: bool) -> list[str]:
    """Return the basis of the 90 % interval, or why there is none, at most one line.

    Empty without a step time, or with a calibration.
    """
    if prediction.step_time_interval_s is not None:
        if PUBLISHED_RUNS in prediction.interval_of:
            return [f"interval from published runs; {_software(sources)}"]
        return [f"interval from the measured spread of {' and '.join(prediction.interval_of)}"]
    if math.isfinite(prediction.step_time_s) and "calibration" not in {s.role for s in sources}:
        # published runs give errors of estimates, not of measurements
        why = (
            "with a software stack that no file names (--stack)" if estimated else "without spread"
        )
        return [f"no interval: times were measured {why}"]
    return []


def _interval(prediction: Prediction) -> str:
    interval = prediction.step_time_interval_s
    if interval is None:
        return ""
    low, high = map(format_seconds, interval)
    of = " and ".join(prediction.interval_of)
    if of == PUBLISHED_RUNS:
        return f"{low} to {high} (90 %), from the errors on published runs"
    return f"{low} to {high} (90 %), from the measured spread of {of}"


def _software(sources: Sequence[Source]) -> str:
    """Return the software stack of estimates and its source, in words."""
    stacks = stacks_of(sources)
    if len(stacks) > 1:
        return f"widest of all stacks: the files are of {' and '.join(stacks)}"
    known = stack_source(sources)
    if known is None:
        return "widest of all stacks: no file names one (--stack)"
    return ", ".join((f"stack {stacks[0]}", *known.notes[:1]))


def warnings_of(
    sources: Sequence[Source], *, estimated: bool, synthetic: bool
) -> tuple[tuple[WarningKind, str], ...]:
    """Return messages on inputs that were not measured, one line each."""
    lines: list[tuple[WarningKind, str]] = []
    if synthetic:
        whose = _whose(s.role for s in sources if s.synthetic)
        text = f"SYNTHETIC timings{whose}, which describe no machine"
        lines.append(("synthetic", text))
    if estimated:
        whose = _whose(s.role for s in sources if s.estimated)
        text = f"ESTIMATES{whose} from datasheets, not measurements"
        lines.append(("estimated", text))
    times = any(s.role in ("computation", "model spec") and s.estimated for s in sources)
    counted = any(s.role == "memory sidecar" and s.notes[0].startswith(_COUNTED) for s in sources)
    own = next((s.path for s in sources if s.role == "memory" and s.estimated), None)
    if own is not None:
        lines.append(("estimated", f"memory from {own}"))
    elif times and counted:
        lines.append(("exact", "memory counted exactly"))
    return tuple(lines)


def _whose(roles: Iterable[str]) -> str:
    """Return ` of the model` or ` of the hardware` if all roles describe the same one, else ''."""
    names = {"model" if role.startswith(_MODEL_ROLES) else "hardware" for role in roles}
    return f" of the {names.pop()}" if len(names) == 1 else ""


# --------------------------------------------------------------------------------------------------
# Reasons for no plan.


_NAMED = 6
"""Maximum number of restricting options in a sentence."""


def found_or_reason(
    asked: ConstrainedResult, baseline: SearchResult, budget_bytes: float
) -> tuple[Priced | None, str]:
    """Return (plan that obeys an additional rule, None without one; reason if there is none).

    baseline : search without the rule.
    budget_bytes : memory constraint per GPU.
    """
    result = asked.result
    if result is None:
        return None, asked.reason
    if result.infeasibility is not None:
        # ignored options restrict nothing
        options = result.options if asked.left_out else baseline.options
        return None, infeasible_sentence(result.infeasibility, budget_bytes, options=options)
    return priced_of_result(result), "no plan was found before the time limit"


def infeasible_sentence(
    infeasibility: Infeasibility,
    budget_bytes: float,
    *,
    options: Mapping[str, object] | None = None,
    subject: str = "",
) -> str:
    """Return why no plan fits: stage, missing memory and minimum memory constraint, in words.

    budget_bytes : memory constraint per GPU.
    options : options of the search; those that restrict it are named if more memory does not help.
    subject : model and cluster, such as `gpt2-xl (25 heads) on 8 GPUs`.
    """
    smallest = infeasibility.smallest_budget_bytes
    # 0: no budget helps
    if smallest <= 0:
        restricting = _restricting(options or {})
        what = (f" for {subject}" if subject else "") + (
            f" with {' '.join(restricting)}" if restricting else ""
        )
        return f"no plan{what}, with any --memory-constraint: {infeasibility.reason}"
    stages = infeasibility.num_stages
    where = "the one stage" if stages == 1 else f"stage {infeasibility.stage} of 0-{stages - 1}"
    missing = (
        f"no plan fits in {budget_bytes / GIB:.4g} GiB per GPU: {where} of the smallest plan "
        f"needs {format_bytes(infeasibility.missing_bytes)} more "
        f"({infeasibility.missing_bytes} bytes)"
    )
    # Rounded up, so that the printed budget is sufficient.
    gib = math.ceil(smallest / GIB * 100) / 100
    return missing + f". Use --memory-constraint {gib:.2f}, the minimum"


def _restricting(options: Mapping[str, object]) -> list[str]:
    """Return the options that restrict the search space, in command-line syntax."""
    found = []
    if options.get("search_space", "full") != "full":
        found.append(f"--search-space {options['search_space']}")
    found += [
        f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if name.startswith("disable_") and value is True
    ]
    for name in ("pin", "forbid"):
        rules = options.get(name)
        if isinstance(rules, list | tuple):
            found += [
                _as_typed(str(rule)) or f"--{name} {shlex.quote(str(rule))}" for rule in rules
            ]
    if len(found) > _NAMED:
        found[_NAMED:] = [f"and {len(found) - _NAMED} more"]
    return found


_TYPED = {"tp": "tp", "pp": "pp", "cp": "cp", "ckpt": "recompute", "zero3": "zero"}
"""Key of a rule -> option that becomes this rule, see `search.request.degrees.rules_of`."""


def _as_typed(rule: str) -> str:
    """Return the options that became a rule, such as `--tp 6`; empty if it was typed as a rule."""
    now = running_now()
    given = {} if now is None else now.question
    names = [_TYPED.get(term.partition("=")[0], "") for term in rule.split(",")]
    if not all(name in given for name in names):
        return ""
    return " ".join(f"--{name} {shlex.quote(str(given[name]))}" for name in names)


# --------------------------------------------------------------------------------------------------
# Plans in words


def one_line(plan: Plan, *, batch: bool = False) -> str:
    """Return a plan in words: `tp4 pp2 dp8, ZeRO-1, micro-batch 1`.

    If layers differ, each strategy has its number of layers, the most frequent first (`pp2, per
    layer: 3 x tp2 dp2, 1 x dp4`), and common settings follow. Embedding and head are included if
    their strategy differs from that of most layers.

    batch : True to add the global batch.
    """
    counts = Counter(
        (strategy, plan.data_degree(layer)) for layer, strategy in enumerate(plan.layers)
    ).most_common()
    pipeline = [f"pp{plan.num_stages}"] if plan.num_stages > 1 else []
    chunks = [f"vp{plan.num_chunks}"] if plan.num_chunks > 1 else []
    (usual, dp), _ = counts[0]
    sharing = {_sharing(plan, one, dp) for (one, dp), _ in counts}
    again = {_again(one) for (one, _), _ in counts}
    if len(counts) == 1:
        first = " ".join([_degrees(usual, dp, pipeline), *chunks])
    else:
        runs = [
            _joined(
                f"{number} x {_degrees(one, dp)}",
                _sharing(plan, one, dp) if len(sharing) > 1 else "",
                _again(one) if len(again) > 1 else "",
                by=" ",
            )
            for (one, dp), number in counts
        ]
        staged = " ".join([*pipeline, *chunks])
        first = f"{staged}, " * bool(staged) + f"per layer: {', '.join(runs)}"
    vocab, others = plan.vocab.as_layer(), ""
    if _spread_as(vocab) != _spread_as(usual):
        whole = plan.num_stages * max(vocab.tp * vocab.cp, 1)
        spread = _degrees(vocab, plan.world_size // whole)
        others = f"embedding and head {spread}{' ZeRO-3' if vocab.zero3 else ''}"
    schedule = ""
    if plan.num_stages > 1 and plan.pipeline_type not in ("1f1b", "interleaved"):
        schedule = "GPipe" if plan.pipeline_type == "gpipe" else plan.pipeline_type
    return _joined(
        first,
        sharing.pop() if len(sharing) == 1 else "",
        f"micro-batch {_micro_batch(plan, (dp for (_, dp), _ in counts))}",
        schedule,
        again.pop() if len(again) == 1 else "",
        f"batch {plan.global_batch}" if batch else "",
        others,
    )


def _joined(*parts: str, by: str = ", ") -> str:
    return by.join(filter(None, parts))


def _spread_as(strategy: LayerStrategy) -> tuple[object, ...]:
    return strategy.tp, strategy.ulysses, strategy.cp, strategy.zero3


def _degrees(strategy: LayerStrategy, dp: int, pipeline: Sequence[str] = ()) -> str:
    name = "ulysses" if strategy.ulysses else "tp"
    parts = [f"{name}{strategy.tp}"] if strategy.tp > 1 else []
    parts += [f"cp{strategy.cp}"] if strategy.cp > 1 else []
    parts += pipeline
    parts += [f"ep{strategy.ep}"] if strategy.ep > 1 else []
    parts += [f"etp{strategy.etp}"] if strategy.etp is not None else []
    parts += [f"dp{dp}"] if dp > 1 or not parts else []
    return " ".join(parts) + (" strided" if strategy.strided else "")


def _sharing(plan: Plan, strategy: LayerStrategy, dp: int) -> str:
    """Return `DDP` or the ZeRO stage of a layer; empty without data-parallel ranks."""
    if strategy.zero3:
        return "ZeRO-3"
    if dp == 1 and strategy.cp == 1 and not strategy.ulysses:
        return ""
    return {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}[plan.default_dp_type]


def _again(strategy: LayerStrategy) -> str:
    if strategy.checkpoint:
        return "recompute full"
    return f"recompute {'+'.join(strategy.recompute)}" if strategy.recompute else ""


def _micro_batch(plan: Plan, dps: Iterable[int]) -> str:
    """Return the micro-batch size in samples per data-parallel rank, a range if layers differ."""
    whole = plan.global_batch / max(plan.num_microbatches, 1)
    sizes = sorted({whole / max(dp, 1) for dp in dps})
    return f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}"


def result_words(result: SearchResult) -> str:
    """Return a search result in one line: plan, step time and samples/s, or why no plan exists."""
    plan, found = result.plan, result.prediction
    if plan is None or found is None:
        why = result.infeasibility
        return f"{result.status}: {'no plan was found in time' if why is None else why.reason}"
    speed = f"{format_seconds(found.step_time_s)}, {found.samples_per_s:,.5g} samples/s"
    return f"{result.status}: {result.words()}: {speed}"


def result_rows(result: SearchResult) -> list[dict[str, Any]]:
    """Return one row for the best plan of a search and for each alternative, best first."""
    if result.plan is None or result.prediction is None:
        return []
    best = {
        "plan": result.words(),
        "step_time_s": result.prediction.step_time_s,
        "samples_per_s": result.prediction.samples_per_s,
        "probability_faster": None,
    }
    others = [
        {
            "plan": one_line(other.plan),
            "step_time_s": other.step_time_s,
            "samples_per_s": other.samples_per_s,
            "probability_faster": other.probability_faster,
        }
        for other in result.alternatives
    ]
    return [best, *others]
