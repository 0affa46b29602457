"""Report of a checked run: its settings, findings, memory, step time and faster alternatives.

`search.check` finds the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autopar.command.console import Console, escape
from autopar.command.show import (
    print_heading,
    print_item,
    print_line,
    print_pair,
)
from autopar.pipeline.schedules import SCHEDULES
from autopar.price.sharded import recipe_of_run
from autopar.rates.accuracy import probability_faster
from autopar.units import format_bytes, format_count, format_odds, format_seconds
from search.planning.uniform.summary import price_of
from search.show.files import assessed_entry
from search.show.headline import print_figures, rate_figures
from search.show.terminal import show_memory, show_peak, terms_line

if TYPE_CHECKING:
    from autopar.price.assessment import Assessment, Target
    from autopar.run.run import Run
    from autopar.run.strategy import Recomputed
    from search.check.neighbours import Neighbour, Neighbours
    from search.engines.reader import CheckedFile


def show_check(
    console: Console,
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    neighbours: Neighbours | None,
) -> None:
    """Print the report of a checked run; parts that are None are not printed."""
    card = target.machine.card.name
    # Not wrapped, so that the path can be copied.
    title = f"{file.path}: {file.trainer} on {file.world_size} {card}"
    console.print(escape(title), style="bold", soft_wrap=True)
    if file.run is not None:
        print_heading(console, "what it says")
        for label, text in _understood(file.run):
            print_pair(console, label, text)
    print_heading(console, "findings")
    if not file.findings:
        print_line(console, "none")
    for finding in file.findings:
        print_item(console, f"{finding.kind}: {finding.text}")
    if file.harmless:
        names = ", ".join(file.spelled(entry.flag, None) for entry in file.harmless)
        print_line(console, f"no price depends on {names}", style="dim")
    if assessment is not None:
        price = price_of(assessment, target)
        show_memory(console, price, _measured(assessment.run))
        show_peak(console, price.fullest, file.worded)
        _show_time(console, assessment, target)
    if neighbours is not None and assessment is not None:
        _show_neighbours(console, file, assessment, neighbours, target)


def _understood(run: Run) -> Iterator[tuple[str, str]]:
    model, strategy, precision = run.model, run.strategy, run.runtime.precision
    attention, experts = model.attention, model.experts
    heads = f"{attention.heads} heads"
    if attention.latent is not None:
        heads += " of latent attention"
    elif attention.kv_heads != attention.heads:
        heads += f" in {attention.kv_heads} groups"
    mlp = f"MLP of {model.dense_width}{', gated' if model.last.gates > 1 else ''}"
    yield (
        "model",
        (
            f"{model.num_layers} layers of {model.hidden}, {heads}, {mlp}, "
            f"{'tied ' if model.tied else ''}vocabulary of {model.vocab}"
        ),
    )
    if experts is not None:
        number = sum(model.mixtures)
        shared = f", {experts.shared_width} shared" if experts.shared_width else ""
        yield (
            "experts",
            (
                f"{experts.number} of {experts.width} in {format_count(number, 'layer')}, "
                f"{experts.per_token} per token{shared}, {run.runtime.experts.dispatcher}"
            ),
        )
    yield "degrees", degrees_line(run)
    yield (
        "batch",
        (
            f"{strategy.global_batch} sequences of {run.seq_length} tokens, "
            f"{format_count(strategy.micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{strategy.micro_batch}"
        ),
    )
    yield "recomputes", _recomputes(strategy.recomputed, torch=run.kernels.torch_layers)
    kind = precision.kind + (f", products in fp8 ({precision.fp8_recipe})" if precision.fp8 else "")
    gradients: float = precision.gradient_bytes
    if run.kernels.torch_layers:
        gradients = recipe_of_run(run).gradients.each_bytes
    yield "precision", f"{kind}, gradients of {gradients:g} bytes"
    yield "attention", run.kernels.attention


def _recomputes(recomputed: Recomputed, *, torch: bool) -> str:
    """Return the recomputed parts of layers, as a part of a sentence."""
    number = recomputed.number
    return {
        "none": "nothing",
        "modules": ", ".join(sorted(recomputed.modules)),
        "op": "all but attention and every other product",
        "full": "all layers" if torch else f"all layers, {number} at once",
        "block": f"{format_count(number, 'layer')} of each chunk",
        "every": f"every {number}. layer",
    }[recomputed.kind]


def degrees_line(run: Run) -> str:
    """Return the parallel degrees of a run in one line."""
    strategy, split = run.strategy, run.split
    parts = [f"tp {split.tp}{', scattered' if split.scattered else ''}"]
    parts += [f"{name} {n}" for name, n in (("cp", split.cp), ("ep", split.ep)) if n > 1]
    if run.model.experts is not None and split.etp > 1:
        parts.append(f"etp {split.etp}")
    chunks = f" x {strategy.vpp} chunks" if strategy.vpp > 1 else ""
    # The default schedules are not printed.
    told = strategy.schedule not in ("1f1b", "interleaved")
    under = f" under {SCHEDULES[strategy.schedule].title}" if told else ""
    parts += [f"pp {strategy.pp}{chunks}{under}"] if strategy.pp > 1 else []
    parts.append(f"dp {strategy.dp}{_sharded(run)}")
    return ", ".join(parts)


def _sharded(run: Run) -> str:
    """Return the sharding of model states, as a part of a sentence."""
    zero, replicas = run.split.zero, run.split.replicas
    if not run.kernels.torch_layers:
        return ("", ", distributed optimizer", "", ", fully sharded")[zero]
    if run.runtime.states.keeper == "deepspeed":
        return f", ZeRO-{zero}" if zero else ""
    copies = f" in {replicas} replicas" if replicas > 1 else ""
    return ("", ", sharded, weights kept", ", sharded, weights kept", ", fully sharded")[
        zero
    ] + copies


# --------------------------------------------------------------------------------------------------
# Memory and step time.


def _measured(run: Run) -> str:
    """Return the origin of the measured peaks that the memory interval is based on."""
    if run.kernels.torch_layers:
        return "measured runs are torchtitan's"
    return "measured runs are of the last stage and the first"


def _show_time(console: Console, assessment: Assessment, target: Target) -> None:
    print_heading(console, "step time")
    step = assessment.step
    if step is None:
        print_line(console, f"not priced: {assessment.untimed}")
        return
    stack = target.machine.stack.name
    print_line(console, f"{format_seconds(step.total_s)} as {stack} runs it")
    assert assessment.interval_s is not None, "every step has one"
    low, high = map(format_seconds, assessment.interval_s)
    print_line(
        console, f"9 of 10 published runs took {low} to {high} where the estimate was this one"
    )
    assert assessment.throughput is not None, "as every step has"
    print_figures(console, rate_figures(assessment.throughput))
    print_line(console, terms_line(step.terms_s))


def _show_neighbours(
    console: Console,
    file: CheckedFile,
    assessment: Assessment,
    neighbours: Neighbours,
    target: Target,
) -> None:
    print_heading(console, "better")
    fits = assessment.fits(target)
    found = [
        (name, one)
        for name, one in (
            ("one change", neighbours.one),
            ("two changes", neighbours.two),
            ("more changes", neighbours.any),
        )
        if one is not None
    ]
    if not found:
        what = "faster" if fits else "that fits"
        print_line(
            console,
            f"nothing {what} was found in {neighbours.tried} launches next to this one",
        )
        return
    shown: list[Neighbour] = []
    for name, one in found:
        if one in shown:
            continue
        shown.append(one)
        print_line(console, f"{name}: {_gain(assessment, one, fits=fits)}", style="bold")
        print_line(console, _room(assessment, one))
        for flag, before, after in one.changes:
            if before is not None:
                print_line(console, f"- {file.spelled(flag, before)}")
            if after is not None:
                print_line(console, f"+ {file.spelled(flag, after)}")


def _gain(before: Assessment, one: Neighbour, *, fits: bool) -> str:
    after = one.assessment
    assert after.step is not None, "neighbours have one"
    text = format_seconds(after.step.total_s)
    odds = _odds_of_faster(before, after)
    if before.step is not None and odds is not None:
        share = after.step.total_s / before.step.total_s - 1.0
        text += f" ({share * 100:+.1f} %, faster with odds of {format_odds(odds)})"
    return text if fits else "fits: " + text


def _room(before: Assessment, one: Neighbour) -> str:
    after = one.assessment
    memory = after.fullest.peak_bytes - before.fullest.peak_bytes
    sign = "+" if memory >= 0 else "-"
    return f"peak {sign}{format_bytes(abs(memory))}, out of memory {format_odds(after.odds_of_oom)}"


def _odds_of_faster(before: Assessment, after: Assessment) -> float | None:
    """Return the probability that `after` is faster; None if a step time is missing."""
    if before.step is None or after.step is None or before.runs is None:
        return None
    return probability_faster(after.step.total_s, before.step.total_s, before.runs.plan_spread)


# --------------------------------------------------------------------------------------------------
# JSON.


def check_document(
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    neighbours: Neighbours | None,
) -> dict[str, Any]:
    """Return the report as a JSON object, in seconds, bytes and shares."""
    document: dict[str, Any] = {
        "file": file.path,
        "trainer": file.trainer,
        "num_gpus": file.world_size,
        "card": target.machine.card.name,
        "stack": target.machine.stack.name,
        "understood": dict(_understood(file.run)) if file.run is not None else None,
        "findings": [{"kind": one.kind, **one.entry} for one in file.findings],
        "harmless": [file.spelled(one.flag, one.value) for one in file.harmless],
    }
    if assessment is not None:
        document |= assessed_entry(assessment, target)
    if neighbours is not None and assessment is not None:
        document["neighbours"] = {
            name: None if one is None else _neighbour(file, one, assessment, target)
            for name, one in (
                ("one", neighbours.one),
                ("two", neighbours.two),
                ("any", neighbours.any),
            )
        }
        document["neighbours_tried"] = neighbours.tried
    return document


def _neighbour(
    file: CheckedFile, one: Neighbour, before: Assessment, target: Target
) -> dict[str, Any]:
    odds = _odds_of_faster(before, one.assessment)
    return {
        "num_changes": one.knobs,
        "probability_faster": odds,
        "arguments": [
            {"flag": file.spelled(flag, None), "before": before, "after": after}
            for flag, before, after in one.changes
        ],
        **assessed_entry(one.assessment, target),
    }
