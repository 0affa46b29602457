"""Export of a per-layer or uniform plan to the files of an engine, with time and memory.

A per-layer plan that the engine cannot run exactly is replaced by the fastest similar plan that it
can run. A uniform plan is exported unchanged, or converted to the nearest plan of another engine.
Written files are parsed again and compared with the plan.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

from msgspec import field

from autopar.documents.catalog import typed_repository
from autopar.documents.plan import PlanDocument, read_strategy
from autopar.documents.strategy import strategy_document
from autopar.errors import DocumentError, InputError, OptionError, UnsupportedError
from autopar.price.assessment import Assessment, Target, assess
from autopar.rates.card import hosts_of
from autopar.records import Record, replace
from autopar.run.plan import Plan, Prediction, violations
from autopar.run.run import Run, run_with_micro_batch
from autopar.run.runtime import Engine
from autopar.run.strategy import recomputing
from autopar.training.throughput import Throughput
from autopar.units import GIB, divisors, format_probability, format_seconds
from search.engines.differences import losses_of
from search.engines.engine import EngineRelease
from search.engines.exporter_types import ExportTarget, UnsupportedFeature
from search.engines.files import read_back, title_of, with_script, written
from search.engines.plans import (
    ExportedPlan,
    ExportJob,
    Lower,
    as_typed,
    lower_for,
    search_words,
    space_of,
)
from search.engines.space import EngineSpace, run_of
from search.engines.table import (
    EXPORTERS,
    as_trained,
    engine_named,
    engine_space,
    planned_as,
    release_for,
    writer_of,
)
from search.planning.layered.parts import as_engine
from search.planning.session import Session, check_known, open_session, read_plan_for
from search.planning.uniform.answer import target_of
from search.planning.uniform.files import StoredRun
from search.planning.uniform.imports import ConvertedRun, converted
from search.request.options import SearchOptions
from search.request.request import ROWS, Request, model_spec

# --------------------------------------------------------------------------------------------------
# Exported plans of both kinds.


class Export(Record):
    """Files of a plan for one engine, and its differences from the plan."""

    kind: Literal["plan", "launch"]
    title: str
    """Model and cluster in one line."""
    engine: str
    engine_version: str
    """Engine release whose configuration keys are written."""
    num_nodes: int
    files: Mapping[str, str]
    """Text by file name; the launch script is last."""
    launch: str
    """Launch command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...]
    losses: tuple[UnsupportedFeature, ...]
    """Settings of the plan that the engine does not support; empty if it runs the exact plan."""
    lossy: bool
    """True if the user must pass `--allow-approx` to write the files."""
    changes: tuple[str, ...] = ()
    """Effects of unsupported settings on time and memory, in words."""
    details: tuple[str, ...] = ()
    """Lines printed after the changes: step times, missing memory, choice of the tensor degree."""
    too_large: str = ""
    """Reason why the exported plan does not fit or is illegal; empty otherwise or if unpriced."""
    price: Mapping[str, object] | None = None
    """Time and memory before and after the export, a JSON object; None if not priced."""
    search: str = ""
    """Search options that restrict a search to plans which the engine supports."""
    plan: Plan | None = None
    as_run: Mapping[str, bool | str] = field(default_factory=dict)
    how: str = ""
    rates: Throughput | None = None
    """Throughput of a uniform plan exported to the engine it was searched for, else None."""
    samples_per_s: float | None = None

    @property
    def loss_lines(self) -> Iterator[str]:
        """Unsupported settings in words, for a per-layer plan after their key in the plan file."""
        for loss in self.losses:
            yield f"{loss.field}: {loss.what}" if self.kind == "plan" else loss.what


def plan_export(choice: ExportCandidate, job: ExportJob) -> Export:
    """Return the export of a per-layer plan; raises InputError if the files cannot be read back."""
    lowered, engine = choice.lowered, engine_named(choice.lowered.engine)
    losses = lowered.losses
    if lowered.draft is not None and lowered.runs is not None:
        title = title_of(engine, lowered.draft)
        runs = read_back(lowered.draft, lowered.runs, title, job.release)
        losses = (*losses, *losses_of(lowered.runs, runs, title))
    changes = _changes(choice)
    details = []
    if choice.before is not None and choice.after is not None and (changes or choice.too_large):
        times = [format_seconds(p.step_time_s) for p in (choice.after, choice.before)]
        details.append(f"{times[0]} per step instead of {times[1]}")
        details += [f"does not fit: {problem}" for problem in choice.after.problems]
        details += [] if choice.too_large else ["it fits"]
    if choice.how and (changes or choice.too_large):
        details.append(choice.how)
    problems = choice.after.problems if choice.after is not None else ()
    return Export(
        kind="plan",
        title=f"{job.spec.name} ({job.spec.num_layers} layers) on {job.num_nodes} x "
        f"{job.gpus_per_node} GPUs",
        engine=engine.name,
        engine_version=lowered.engine_version,
        num_nodes=job.num_nodes,
        files=with_script(lowered.files, lowered.launch),
        launch=lowered.launch,
        notes=(*lowered.notes, *_of_release(job.release)),
        losses=losses,
        lossy=bool(losses),
        changes=tuple(changes),
        details=tuple(details),
        too_large="; ".join([*changes, *problems]) if choice.too_large else "",
        price=_prices(choice),
        search=search_words(lowered),
        plan=lowered.plan,
        as_run=lowered.as_run,
        how=choice.how,
    )


_KEPT = ("Inputs", "Memory and batch", "Fine-tuning")
"""Panels of a search's options that do not depend on the engine."""
_OF_MODEL = ("attention", "layer", "mixer", "mlp", "model")
"""Records of `run_differences` that describe the model."""


def launch_export(stored: StoredRun, engine: str, release: str | None = None) -> Export:
    """Return the export of a uniform plan to an engine, which may differ from that of the search.

    release : release of the engine; None: the newest known.

    Raises InputError if the engine supports no uniform plans, or not this one.
    """
    question = stored.question
    hosts, each = hosts_of(question.card, question.num_nodes, question.gpus_per_node)
    place = ExportTarget(
        num_nodes=hosts,
        gpus_per_node=each,
        model=question.spec.name,
        repository=typed_repository(stored.request.get("model")),
        spec=question.spec,
        release=release_for(engine_named(engine), release),
    )
    run, losses = stored.run, tuple[UnsupportedFeature, ...]()
    changes, price = tuple[str, ...](), None
    own = engine_space(stored.engine, compiled=stored.choice.compiled)
    target = target_of(question, own)
    assessment = assess(run, target)
    is_own = engine in (stored.engine, writer_of(stored.engine, stored.run))
    if not is_own and stored.engine not in engine_named(engine).starts:
        converted_to, other = _of_other(stored, engine)
        run, losses = converted_to.run, converted_to.losses
        after = assess(run, target_of(question, other))
        changes = (_change(assessment, after, own.title),)
        untimed = after.untimed or assessment.untimed
        price = {
            "before": _timed(assessment, target),
            "after": _timed(after, target),
            "why": untimed,
        }
        assessment = after
    if as_trained(engine, run) != run:
        before = assessment
        planned = run
        run, assessment = _trained(run, engine, target)
        changes = (_change(before, assessment, own.title),)
        changed = _new_settings(planned, run)
        if changed:
            changes = (*changes, f"{changed}, without which the plan does not fit")
        price = {
            "before": _timed(before, target),
            "after": _timed(assessment, target),
            "why": assessment.untimed,
        }
    found = written(run, engine=engine, place=place)
    losses = (*losses, *found.losses)
    rates, samples_per_s = None, None
    # for an engine with other kernels, `changes` contains the time
    if (is_own or not changes) and assessment.step is not None:
        rates = assessment.throughput
        samples_per_s = stored.choice.global_batch / assessment.step.total_s
    too_large = _too_large(assessment, target)
    return Export(
        kind="launch",
        title=question.title,
        engine=engine,
        engine_version=found.engine_version,
        num_nodes=question.num_nodes,
        files=with_script(found.files, found.launch),
        launch=found.launch,
        notes=(*found.notes, *_of_release(place.release)),
        losses=losses,
        # losses need `--allow-approx` only on another engine, or in the model
        lossy=any(not is_own or one.field.split(".")[0] in _OF_MODEL for one in losses),
        changes=changes,
        too_large=too_large,
        price=price,
        # a search prices the run of its engine, not that of an engine which starts it
        search=_search_of(stored, engine) if too_large and engine_named(engine).spaces else "",
        rates=rates,
        samples_per_s=samples_per_s,
    )


def _of_release(release: EngineRelease | None) -> tuple[str, ...]:
    """Return the note on a release that is newer than the known ones."""
    return (release.note,) if release is not None and release.note else ()


def _trained(run: Run, engine: str, target: Target) -> tuple[Run, Assessment]:
    """Return a run as an engine trains it, and its price.

    If it does not fit, it is the first that fits with a smaller micro-batch, gradients that are
    reduced after each micro-batch, or full recomputation.
    """
    found = as_trained(engine, run)
    price = assess(found, target)
    for smaller in () if price.fits(target) else _smaller(run):
        other = as_trained(engine, smaller)
        if (other_price := assess(other, target)).fits(target):
            return other, other_price
    return found, price


def _new_settings(before: Run, after: Run) -> str:
    """Return the settings of a run of `_smaller` that differ from the given one; empty for none."""
    one, other = before.strategy, after.strategy
    found = {
        f"micro-batch {other.micro_batch}": one.micro_batch != other.micro_batch,
        "sync_each_batch": after.syncs_each_batch and not before.syncs_each_batch,
        "full recomputation": one.recomputed != other.recomputed,
    }
    return ", ".join(text for text, new in found.items() if new)


def _smaller(run: Run) -> Iterator[Run]:
    """Yield runs that need less memory, large micro-batches first, full recomputation last."""
    # FSDP may reduce gradients of each of several micro-batches; those of adapters are small.
    several = run.runtime.states.keeper == "accelerate" and run.runtime.adapters is None
    again = replace(run, strategy=recomputing(run.strategy, "full"))
    for way in dict.fromkeys((run, again)):
        for micro in reversed(divisors(run.strategy.micro_batch)):
            for synced in (False, True) if several else (False,):
                other = run_with_micro_batch(way, micro, synced=synced)
                if other != run:
                    yield other


def _of_other(stored: StoredRun, engine: str) -> tuple[ConvertedRun, EngineSpace]:
    """Return the nearest run of another engine, and the space of that engine."""
    question = stored.question
    own = engine_space(stored.engine, compiled=stored.choice.compiled)
    usual = run_of(own, question.job, stored.choice)
    planned = planned_as(engine)
    found = converted(question, stored.run, usual, stored.choice, planned)
    return found, engine_space(planned, compiled=found.choice.compiled)


def _change(before: Assessment, after: Assessment, title: str) -> str:
    """Return the step times of two engines in words; title : name of the engine before."""
    if before.step is None or after.step is None:
        return f"not priced: {after.untimed or before.untimed}"
    return (
        f"{format_seconds(after.step.total_s)} per step instead of "
        f"{format_seconds(before.step.total_s)} with {title}"
    )


def _too_large(assessment: Assessment, target: Target) -> str:
    """Return the memory of a run that does not fit in words; empty if it fits."""
    if assessment.fits(target):
        return ""
    full, host = assessment.fullest, target.host_capacity_bytes
    text = (
        f"peak {full.peak_bytes / GIB:.2f} of {target.capacity_bytes / GIB:.2f} GiB (stage "
        f"{full.stage}), OOM probability {format_probability(assessment.odds_of_oom)} (limit "
        f"{format_probability(target.oom_risk)})"
    )
    if host is not None and not target.host_fits(assessment.host_bytes):
        text += f"; host memory {assessment.host_bytes / GIB:.2f} of {host / GIB:.2f} GiB per GPU"
    return text


def _search_of(stored: StoredRun, engine: str) -> str:
    """Return the options of a search for plans of an engine that replace a run.

    They are the given ones on the model, the batch, the memory and what is trained.
    """
    words = list[str]()
    for row in ROWS:
        value = stored.request.get(row.name)
        if value is None or (row.panel not in _KEPT and row.name != "precision"):
            continue
        if isinstance(value, bool):
            words.append(f"--{row.name}" if value else f"--no-{row.name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"--{row.name} {shlex.quote(str(one))}")
    return " ".join((*words, f"--engine {engine}"))


def _timed(assessment: Assessment, target: Target) -> dict[str, object]:
    return {
        "step_time_s": None if assessment.step is None else assessment.step.total_s,
        "fits": assessment.odds_of_oom <= target.oom_risk,
    }


def export_document(
    export: Export, *, status: str, files: Sequence[str], predicted: object = None
) -> dict[str, object]:
    """Return the JSON object of an export.

    status : `exported`, or `refused` if nothing was written.
    files : paths of the written files.
    predicted : JSON object of the prediction.
    """
    return {
        "status": status,
        "engine": export.engine,
        "engine_version": export.engine_version,
        "losses": [
            *({"field": loss.field, "what": loss.what} for loss in export.losses),
            *([{"field": "memory", "what": export.too_large}] if export.too_large else []),
        ],
        "plan": None if export.plan is None else strategy_document(export.plan),
        "as_run": dict(export.as_run),
        "search": export.search or None,
        "price": export.price,
        "predicted": predicted,
        "chosen_by": export.how or None,
        "notes": list(export.notes),
        "files": list(files),
        "launch": export.launch,
    }


def import_document(engine: str, plan: Plan, notes: Sequence[str]) -> dict[str, object]:
    """Return the JSON object of an imported engine configuration."""
    return {
        "status": "imported",
        "engine": engine,
        "plan": strategy_document(plan),
        "notes": list(notes),
    }


# --------------------------------------------------------------------------------------------------
# Nearest plan that an engine can run, for per-layer plans.


Price = Callable[[Plan, Mapping[str, bool | str]], Prediction]
"""Function (plan, changed fields of `SearchOptions`) -> prediction.

It raises InputError without matching inputs, such as memory tables of other settings."""
_Offers = dict[Plan, tuple[int, ExportedPlan, Prediction]]
"""Exportable plan -> (tensor degree, exported plan, prediction); degree 0 if none was given."""


_SEEN_BYTES = 0.05 * GIB
"""Memory change below which messages report the same memory, bytes: one decimal of a GiB."""


class ExportCandidate(Record):
    """Per-layer plan as exported, its predictions, and the reason for its tensor degree."""

    lowered: ExportedPlan
    before: Prediction | None
    """Prediction of the plan as given; None without hardware or profiles."""
    after: Prediction | None
    """Prediction of the exported plan with the settings of the engine; None if it has no price."""
    how: str
    """Reason for the tensor degree of the exported plan; empty if there was one candidate."""
    not_priced: str = ""
    """Reason why the exported plan has no prediction although profiles exist; empty otherwise."""

    @property
    def too_large(self) -> bool:
        """True if the exported plan is known not to fit or to be illegal."""
        return self.after is not None and not (self.after.legal and self.after.fits)


def choose(
    job: ExportJob, lower: Lower, first: ExportedPlan, price: Price | None
) -> ExportCandidate:
    """Return the plan to export: the given one, or else the fastest similar plan that fits.

    If the engine does not support the given plan, every tensor degree is tried. If no plan fits,
    the one with the least excess memory is returned.

    lower : function that converts a job to the files of the engine.
    first : result of `lower` without a given tensor degree.
    price : function that predicts a plan; None if no hardware is known.
    """
    if price is None:
        return ExportCandidate(lowered=first, before=None, after=None, how="")
    before = price(job.plan, {})
    if not first.losses:
        return _only(first, before, price)
    offers: _Offers = {}
    for degree in divisors(job.plan.world_size // job.plan.num_stages):
        try:
            offer = lower(replace(job, tensor_degree=degree))
        except InputError:
            continue  # other degrees near the plan may be legal
        _add(offers, degree, offer, price)
    # added last, so that equal plans are reported with their tensor degree
    _add(offers, 0, first, price)
    if not offers:
        return _only(first, before, price)
    degree, best, after = min(offers.values(), key=lambda offer: _rank(offer[2]))
    return ExportCandidate(
        lowered=best,
        before=before,
        after=after,
        how=_how(degree, offers) if len(offers) > 1 else "",
    )


def recommended_export(job: ExportJob, engine: str, error: UnsupportedError) -> InputError:
    """Return the error of an engine with a remedy that names other engines for the plan.

    Engines that run the exact plan are named; if there are none, those that run a similar plan.
    """
    whole, near = list[str](), list[str]()
    for other in EXPORTERS:
        if other == engine:
            continue
        with suppress(InputError):
            (near if lower_for(other)(job).losses else whole).append(other)
    names = whole or near
    if not names:
        return InputError(error.problem, remedy=error.remedy or "No other engine supports it")
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    advice = f"Export to {listed} instead" + ("" if whole else " with --allow-approx")
    more = f", or {error.remedy[0].lower()}{error.remedy[1:]}" if error.remedy else ""
    return InputError(error.problem, remedy=f"{advice}{more}")


def _only(lowered: ExportedPlan, before: Prediction, price: Price) -> ExportCandidate:
    """Return the export of the only candidate; `not_priced` is set if it has no prediction."""
    after, why = None, ""
    try:
        lowered, after = _as_kept(lowered, price)
    except InputError as error:
        why = str(error)
    return ExportCandidate(lowered=lowered, before=before, after=after, how="", not_priced=why)


def _add(offers: _Offers, degree: int, offer: ExportedPlan, price: Price) -> None:
    """Add the exported plan of a tensor degree, unless it is known or has no prediction."""
    if offer.plan not in offers:
        with suppress(InputError):
            offers[offer.plan] = (degree, *_as_kept(offer, price))


def _as_kept(lowered: ExportedPlan, price: Price) -> tuple[ExportedPlan, Prediction]:
    """Return the exported plan and its prediction with the memory of the engine.

    If that memory differs by `_SEEN_BYTES` or more, `memory_of` is added to `as_run`.
    """
    alike = price(lowered.plan, lowered.as_run)
    own = {**lowered.as_run, "memory_of": lowered.engine}
    found = price(lowered.plan, own)
    changes = [
        abs(new.reserved_bytes - old.reserved_bytes)
        for new, old in zip(found.stages, alike.stages, strict=True)
    ]
    if max(changes, default=0) < _SEEN_BYTES:
        return lowered, found
    return replace(lowered, as_run=own), found


def _rank(prediction: Prediction) -> tuple[bool, float, float]:
    """Return a sort key: fitting predictions by time, then the others by excess memory, bytes."""
    over = max(
        (stage.reserved_bytes - stage.budget_bytes for stage in prediction.stages), default=0
    )
    fits = prediction.legal and prediction.fits
    return (not fits, 0.0 if fits else float(over), prediction.step_time_s)


def _how(chosen: int, offers: _Offers) -> str:
    parts = []
    for degree, _, prediction in sorted(offers.values(), key=lambda offer: offer[0]):
        time = (
            format_seconds(prediction.step_time_s)
            if math.isfinite(prediction.step_time_s)
            else "illegal"
        )
        parts.append(f"{degree or 'its own'}: {time}" + ("" if prediction.fits else ", too large"))
    best = next(prediction for degree, _, prediction in offers.values() if degree == chosen)
    why = "the fastest that fits" if best.fits else "the one that misses the least memory"
    return f"tensor degree {chosen or 'of the plan'} is {why} ({'; '.join(parts)})"


def change_sentence(before: Prediction, after: Prediction) -> str:
    """Return the change of step time and memory in words: `+4.1 % time, +0.7 GiB on stage 2`.

    The stage is that with the largest increase, or the largest decrease if no stage grows.
    """
    if not (math.isfinite(before.step_time_s) and math.isfinite(after.step_time_s)):
        return "the time of one of them cannot be priced"
    share = (after.step_time_s / before.step_time_s - 1) * 100
    text = f"{share:+.1f} % time"
    changes = [
        (new.reserved_bytes - old.reserved_bytes, new.stage)
        for old, new in zip(before.stages, after.stages, strict=False)
    ]
    grown = max(changes, default=(0, 0))
    change, stage = grown if grown[0] > 0 else min(changes, default=(0, 0))
    if abs(change) < _SEEN_BYTES:
        return f"{text}, same memory"
    return f"{text}, {change / GIB:+.1f} GiB on stage {stage}"


def _changes(choice: ExportCandidate) -> list[str]:
    """Return the effect of settings that the engine changes, at most one line.

    Empty if the engine runs the plan as given.
    """
    lowered = choice.lowered
    if not (lowered.losses or lowered.as_run):
        return []
    how = f" ({as_typed(lowered.as_run.items())})" if lowered.as_run else ""
    if choice.not_priced:
        change = f"not priced: {choice.not_priced}"
    elif choice.before is None or choice.after is None:
        change = "unknown without hardware. Add --hardware CARD:NODESxGPUS"
    else:
        change = change_sentence(choice.before, choice.after)
    return [f"as the engine runs it{how}: {change}"]


def _prices(choice: ExportCandidate) -> Mapping[str, object] | None:
    if choice.before is None:
        return None
    if choice.after is None:
        return {"before": _price(choice.before), "after": None, "why": choice.not_priced}
    return {"before": _price(choice.before), "after": _price(choice.after)}


def _price(prediction: Prediction) -> dict[str, object]:
    time = prediction.step_time_s
    return {
        "step_time_s": time if math.isfinite(time) else None,
        "samples_per_s": prediction.samples_per_s,
        "reserved_bytes": [stage.reserved_bytes for stage in prediction.stages],
        "legal": prediction.legal,
        "fits": prediction.fits,
        "problems": list(prediction.problems),
    }


# --------------------------------------------------------------------------------------------------
# Job of a plan file and a request, and its pricing.


def job_of(
    path: str, document: PlanDocument, request: Request, notice: Callable[[str], None]
) -> tuple[ExportJob, Session | None]:
    """Return (job to export, session that prices it); the session is None without hardware.

    notice : function called with a sentence on each assumption.

    Raises OptionError: `--model` is missing, or `--nodes` does not match the world size of the
    plan. Raises DocumentError: the plan does not match the model or the hardware, or is illegal.
    """
    inputs, options = request.inputs, request.options
    sizes = (inputs.num_layers, inputs.seq_length, inputs.hidden_size)
    if inputs.model is None and None in sizes:
        raise OptionError(
            "the plan does not name its model",
            remedy="Add --model NAME, config.json or model.json",
        )
    session = None
    # without named hardware the export has no price
    if inputs.uses_default_hardware:
        spec = model_spec(inputs)
        plan, num_nodes, gpus_per_node = _without_hardware(
            path, document, request, spec.num_layers, notice
        )
    else:
        session = open_session(inputs, options, request.given, has_plan=True)
        # measured files may have switched sequence parallelism off
        options = replace(options, sequence_parallel=session.options.sequence_parallel)
        spec, plan = session.spec, read_plan_for(document, session, path=path)
        num_nodes, gpus_per_node = session.hardware.num_nodes, session.hardware.gpus_per_node
    problems = violations(plan, spec, sequence_parallel=options.sequence_parallel)
    if problems:
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise DocumentError(
            path,
            f"illegal plan for {spec.name}: {problems[0]}{more}",
            remedy="Run autopar-search --evaluate to list all reasons",
        )
    job = ExportJob(
        plan=plan,
        spec=spec,
        model=inputs.model or spec.name,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=options.async_grad_reduce,
        precision=options.mixed_precision,
        fp32_gradients=options.fp32_gradients,
        tp_overlap=options.tp_overlap,
    )
    if session is not None and session.card is not None:
        card = session.card
        hosts, each = hosts_of(card, num_nodes, gpus_per_node)
        job = replace(job, gpu=card.gpu, num_nodes=hosts, gpus_per_node=each)
    return job, session


def _without_hardware(
    path: str,
    document: PlanDocument,
    request: Request,
    num_layers: int,
    notice: Callable[[str], None],
) -> tuple[Plan, int, int]:
    nodes, gpus = request.inputs.num_nodes, request.inputs.num_gpus_per_node
    plan = read_strategy(
        document, world_size=world_size_of(request), num_layers=num_layers, path=path
    )
    world = plan.world_size
    if len(plan.layers) != num_layers:
        raise DocumentError(
            path,
            f"describes {len(plan.layers)} layers, but the model has {num_layers}",
            key="tp_sizes_enc",
            remedy="Use the plan's --model or --num-layers",
        )
    check_known(plan, path)
    if gpus is None:
        # nodes have 8 GPUs, the common size, if that divides the world size
        gpus = world // nodes if nodes else 8 if world % 8 == 0 else world
    if nodes is None:
        nodes = max(1, world // gpus)
        notice(f"--nodes not given; writing for {nodes} x {gpus} GPUs")
    if nodes * gpus != world:
        raise OptionError(
            f"--nodes: {nodes} x {gpus} GPUs are {nodes * gpus}, but the plan needs {world}",
            remedy="Use --nodes and --gpus-per-node of the cluster",
        )
    return plan, nodes, gpus


def world_size_of(request: Request) -> int | None:
    """Return the number of GPUs that the request sets; None if the plan file must define it."""
    inputs = request.inputs
    if inputs.world_size is not None:
        return inputs.world_size
    if inputs.num_gpus_per_node is not None:
        return (inputs.num_nodes or 1) * inputs.num_gpus_per_node
    # 8 GPUs per node, the default of `_without_hardware`
    return inputs.num_nodes * 8 if inputs.num_nodes is not None else None


def pricer_of(session: Session, request: Request) -> Price:
    """Return a function that predicts plans with some search options changed.

    Inputs are loaded once per set of changes. The function raises InputError if no measured tables
    match a change.
    """
    # without changes, the planner of the session applies
    planners = {frozenset[tuple[str, bool | str]](): session.planner}

    def price(plan: Plan, changes: Mapping[str, bool | str]) -> Prediction:
        key = frozenset(changes.items())
        if key not in planners:
            changed: dict[str, Any] = dict(changes)
            asked = _of_engine(request, cast(Engine | None, changed.get("memory_of")))
            options = replace(asked.options, **changed)
            given = {*asked.given, "sequence-parallel"}
            planners[key] = open_session(asked.inputs, options, given).planner
        return planners[key].evaluate(plan)

    return price


def _of_engine(request: Request, engine: Engine | None) -> Request:
    """Return the request with software stack and defaults of `engine` instead of `memory_of`.

    Options that the former engine did not set are unchanged, such as measured times.
    """
    own = request.options.memory_of
    if engine is None or own in (None, engine):
        return request
    space, inputs, options = space_of(str(own)), request.inputs, request.options
    usual = SearchOptions()
    # options that still have the value set by the former engine return to their default
    left = {
        name: getattr(usual, name)
        for name, value in space.priced.items()
        if getattr(options, name) == value
    }
    names = {"memory-of", *(name.replace("_", "-") for name in left)}
    if space.stack is not None and inputs.stack == space.stack:
        inputs = replace(inputs, stack=None)
        names.add("stack")
    changed: dict[str, Any] = {**left, "memory_of": None}
    given = {name: value for name, value in request.given.items() if name not in names}
    options = replace(options, **changed)
    return as_engine(replace(request, inputs=inputs, options=options, given=given), engine)


def num_layers_of(request: Request) -> int | None:
    """Return the number of layers from `--model` or `--num-layers`, None without either."""
    if request.inputs.model is not None:
        return model_spec(request.inputs).num_layers
    return sum(request.inputs.num_layers) if request.inputs.num_layers else None
