"""Reports of closed-form models: one execution, whole search spaces, tuning, validation.

`search.closed_form` computes the numbers; this module prints tables and builds JSON objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict

from autopar.command.console import Console
from autopar.command.show import make_table, print_heading, print_item, print_plain
from autopar.records import replace
from autopar.units import format_bytes, format_count, format_seconds
from search.closed_form import calculon, tensor2d
from search.closed_form.calculon import exploration as calculon_points
from search.closed_form.tensor2d import exploration as tensor2d_points

if TYPE_CHECKING:
    from search.closed_form.answers import Answer, Part, Point
    from search.closed_form.files import Known
    from search.closed_form.native import Objective
    from search.closed_form.tuners import TuningResult
    from search.closed_form.validation import Check

# --------------------------------------------------------------------------------------------------
# Results of searches with a closed-form model: best executions, their time by part, scaling.
#
# Every table is at most 80 columns wide and is readable without colours.


WIDTH = 80
_BROKEN_DOWN = 6
"""Maximum number of executions whose time and memory are printed by part."""
_SHOWN = 30
"""Maximum number of frontier points in a table."""


def _print_rows(
    console: Console,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    total: Sequence[str] | None = None,
    **look: Any,
) -> None:
    """Print a table; total : last row, in bold. look : options of `make_table`."""
    table = make_table(*heads, spaced=True, **look)
    for row in rows:
        table.add_row(*row)
    if total is not None:
        table.add_row(*total, style="bold")
    console.print(table)


def _subject(answer: Answer, unit: str) -> str:
    """Return the number of processors and the strategy of a search."""
    text = format_count(answer.processors, unit)
    return text if answer.strategy is None else f"{text}, {answer.strategy}"


def show_answer(
    console: Console, answer: Answer, *, unit: str, legend: str, alone: bool = True
) -> None:
    """Print the best executions of one search and the counts of rejected ones.

    unit : 'processor' or 'GPU'. legend : meaning of the letters of executions. alone : True if no
    other search follows; then time and memory are printed by part.
    """
    print_heading(console, _subject(answer, unit))
    if answer.best:
        _print_best(console, answer.best, answer.capacity_bytes)
        if legend:
            print_plain(console, legend, style="dim")
    _show_counts(console, answer)
    if alone:
        best = {f"#{place}": (answer, point) for place, point in enumerate(answer.best, 1)}
        _show_parts(console, dict(list(best.items())[:_BROKEN_DOWN]))


def _print_best(
    console: Console, points: Sequence[Point], capacity_bytes: float | None = None
) -> None:
    """Print ranked executions, with their share of the memory capacity if it is known."""
    share = () if capacity_bytes is None else ("of all",)
    rows = [
        (
            str(place),
            f"{point.rate_per_s:.5g}",
            format_seconds(point.time_s),
            *_memory(point, capacity_bytes),
            f"{point.degrees}, {point.switches}",
        )
        for place, point in enumerate(points, 1)
    ]
    heads = ("#", "samples/s", "step", "memory", *share, "execution")
    _print_rows(console, heads, rows, words_last=True)


def _memory(point: Point, capacity_bytes: float | None) -> tuple[str, ...]:
    """Return the memory of a point and, if the capacity is known, its share of it."""
    needed = format_bytes(point.memory_bytes)
    if capacity_bytes is None:
        return (needed,)
    return needed, _percent(point.memory_bytes / capacity_bytes)


def show_frontier(console: Console, answer: Answer) -> None:
    """Print the Pareto frontier of time per sample and memory, fastest first."""
    if not answer.frontier:
        return
    shown = _spread(answer.frontier)
    print_heading(console, "frontier: less memory only for more time")
    rows = [
        (
            *_memory(point, answer.capacity_bytes),
            f"{point.rate_per_s:.5g}",
            format_seconds(point.time_s),
            point.degrees,
        )
        for point in shown
    ]
    heads = ("memory", "of all", "samples/s", "step", "execution")
    _print_rows(console, heads, rows, left=0, words_last=True)
    if len(shown) < len(answer.frontier):
        print_plain(
            console, f"{len(shown)} of {len(answer.frontier)} points; --json has all", style="dim"
        )


def show_scaling(console: Console, answers: Sequence[Answer], *, unit: str) -> None:
    """Print the best execution of every search with its scaling efficiency and parts."""
    if len(answers) < 2:
        return
    named = any(answer.strategy for answer in answers)
    if len({answer.processors for answer in answers}) > 1:
        print_heading(console, "scaling")
        heads = [f"{unit}s", *(["strategy"] if named else [])]
        heads += ["samples/s", "of each", "efficiency", "step", "execution"]
        rows = [
            _scaled(answer, share, named=named)
            for group in by_strategy(answers)
            for answer, share in zip(group, efficiencies(group), strict=True)
        ]
        _print_rows(console, heads, rows, left=0, words_last=True)
        print_plain(
            console,
            f"of each: samples/s per {unit}; efficiency: that against the first with an answer",
            style="dim",
        )
    _show_parts(
        console,
        {
            f"{answer.processors}" + (f" {answer.strategy}" if named else ""): (answer, best)
            for answer in answers
            for best in answer.best[:1]
        },
    )


def _scaled(answer: Answer, share: float | None, *, named: bool) -> list[str]:
    head = [str(answer.processors), *([answer.strategy or ""] if named else [])]
    if share is None:
        return [*head, "", "", "", "", "none can run"]
    best = answer.best[0]
    return [
        *head,
        f"{best.rate_per_s:.5g}",
        f"{best.rate_per_s / answer.processors:.4g}",
        _percent(share),
        format_seconds(best.time_s),
        best.degrees,
    ]


def show_sweep(
    console: Console, answers: Sequence[Answer], paths: Sequence[str], *, unit: str
) -> None:
    """Print the best execution at every setting of a sweep on one number of processors."""
    print_heading(console, f"sweep on {_subject(answers[0], unit)}")
    heads = ["value" if len(paths) == 1 else f"value {n}" for n, _ in enumerate(paths, 1)]
    for head, path in zip(heads, paths, strict=True):
        print_plain(console, f"{head} = {path}")
    first = next((answer.best[0] for answer in answers if answer.best), None)
    names: dict[str, str] = {}
    rows = []
    for answer in answers:
        row = [f"{value:.6g}" for value in answer.values]
        if not answer.best or first is None:
            rows.append([*row, "", "", "", "", "", "none can run"])
            continue
        best = answer.best[0]
        words = f"{best.degrees}, {best.switches}"
        rows.append(
            [
                *row,
                f"{best.rate_per_s:.5g}",
                f"{(best.rate_per_s / first.rate_per_s - 1) * 100:+.1f} %",
                format_seconds(best.time_s),
                *_memory(best, answer.capacity_bytes),
                # Executions repeat over a sweep, so each has a letter and is printed once.
                names.setdefault(words, _letters(len(names))),
            ]
        )
    heads += ["samples/s", "change", "step", "memory", "of all", "best"]
    _print_rows(console, heads, rows, left=0, words_last=True)
    console.print()
    letters = [(name, words) for words, name in names.items()]
    _print_rows(console, ("best", "execution"), letters, words_last=True)


def none_sentence(answers: Sequence[Answer], name: str, system: str, unit: str) -> str:
    """Return a sentence why nothing can run and what may help.

    The reasons are those of the search that considered most executions.
    """
    answer = max(answers, key=lambda one: one.considered)
    count = format_count(answer.processors, unit)
    if answer.strategy is not None:
        name = f"{name} with {answer.strategy}"
    if not answer.considered:
        return (
            f"no way to divide {name} over {count} of {system} was found; choose "
            f"another number of {unit}s, or a batch that it divides"
        )
    why = "; ".join(f"{some:,} {_because(text)}" for text, some in answer.rejected.items())
    return (
        f"none of {answer.considered:,} executions of {name} can run on {count} of "
        f"{system}: {why}; give more {unit}s, more memory, or another batch"
    )


def by_strategy(answers: Iterable[Answer]) -> list[list[Answer]]:
    """Return the answers grouped by strategy, each group sorted by number of processors."""
    groups: dict[str | None, list[Answer]] = {}
    for answer in sorted(answers, key=lambda one: one.processors):
        groups.setdefault(answer.strategy, []).append(answer)
    return list(groups.values())


def efficiencies(answers: Sequence[Answer]) -> list[float | None]:
    """Return the rates per processor relative to the first known rate; None without an answer."""
    rates = [a.best[0].rate_per_s / a.processors if a.best else None for a in answers]
    first = next((rate for rate in rates if rate is not None), None)
    return [None if rate is None or first is None else rate / first for rate in rates]


def _show_parts(console: Console, columns: Mapping[str, tuple[Answer, Point]]) -> None:
    """Print the parts of time and memory of executions, one column each."""
    for name, heading in (
        ("time", "where the time goes, in % of the step"),
        ("memory", "where the memory goes, in % of the capacity"),
    ):
        rows = {
            head: {
                part.name: part.amount / (point.time_s if name == "time" else answer.capacity_bytes)
                for part in getattr(point, name)
            }
            for head, (answer, point) in columns.items()
        }
        names = dict.fromkeys(part for shares in rows.values() for part in shares)
        room = console.width - max((len(part) for part in names), default=0)
        # 5 columns for "100.0" and 3 for the blanks around it.
        wide = max((max(len(head), 5) for head in rows), default=5) + 3
        heads = list(rows)
        if heads:
            print_heading(console, heading)
        for start in range(0, len(heads), room // wide):
            shown = heads[start : start + room // wide]
            lines = [
                (part, *(f"{rows[head].get(part, 0.0) * 100:.1f}" for head in shown))
                for part in names
            ]
            sums = ("in all", *(f"{sum(rows[head].values()) * 100:.1f}" for head in shown))
            if start:
                console.print()
            total = sums if name == "memory" else None
            _print_rows(console, ("part", *shown), lines, total=total)


def _show_counts(console: Console, answer: Answer) -> None:
    if not answer.complete:
        print_plain(console, "stopped before its end; this is what was found until then")
    if not answer.considered:
        print_plain(console, "no degrees divide both the model and the batch")
        return
    others = "; the others:" if answer.rejected else ""
    print_plain(console, f"{answer.feasible:,} of {answer.considered:,} executions can run{others}")
    for text, count in answer.rejected.items():
        print_item(console, f"{count:,} ({_percent(count / answer.considered)}): {text}")


def _letters(place: int) -> str:
    """Return the letters of a place: A, B, ..., Z, AA, AB, ..."""
    # Letters have no zero: AA follows Z.
    more, last = divmod(place, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)


def _because(text: str) -> str:
    return f"because {text}" if not text.startswith("needs ") else text.replace("needs", "need", 1)


def _spread(points: Sequence[Point]) -> list[Point]:
    """Return at most `_SHOWN` evenly spread points of a frontier, including both ends."""
    if len(points) <= _SHOWN:
        return list(points)
    # First and last are kept, so there is one gap fewer than points.
    step = (len(points) - 1) / (_SHOWN - 1)
    return [points[round(n * step)] for n in range(_SHOWN)]


# --------------------------------------------------------------------------------------------------
# The answer of a search as a JSON object.


def json_document(
    answers: Sequence[Answer], paths: Sequence[str], *, alone: bool, frontier: bool
) -> dict[str, Any]:
    """Return the object of `--json`: the best executions of one search, or all searches.

    paths : paths of the axes of a sweep. alone : True for one search, whose executions are keyed by
    place with `execution` and `stats`.
    """
    if alone:
        return _rows(answers[0].best)
    return {
        "searches": [
            {
                "num_procs": answer.processors,
                **({} if answer.strategy is None else {"strategy": answer.strategy}),
                **({"sweep": dict(zip(paths, answer.values, strict=True))} if paths else {}),
                "complete": answer.complete,
                "considered": answer.considered,
                "feasible": answer.feasible,
                "rejected": dict(answer.rejected),
                "best": _rows(answer.best),
                **({"frontier": _rows(answer.frontier)} if frontier else {}),
            }
            for answer in answers
        ]
    }


def _rows(points: Sequence[Point]) -> dict[str, Any]:
    return {
        str(place): {"execution": dict(point.execution), "stats": dict(point.statistics)}
        for place, point in enumerate(points)
    }


# --------------------------------------------------------------------------------------------------
# Results of a tuner: the best execution, the improvements that led to it, and refusals.


_STEPS = 8
"""Number of printed improvements, the last ones."""
_REFUSALS = 5


def show_tuning(console: Console, result: TuningResult) -> None:
    """Print the result of a tuner that found an execution."""
    assert result.best is not None
    best = result.best
    print_heading(console, "best of all" if result.exhaustive else "best found")
    print_plain(
        console,
        f"{best.rate_per_s:.5g} samples/s, {format_seconds(best.time_s)} a step, "
        f"{format_bytes(best.memory_bytes)}",
    )
    fields = [(name, _word(value)) for name, value in best.execution.items()]
    _print_rows(console, ("field", "value"), fields)
    if len(result.top) > 1:
        print_heading(console, f"the best {len(result.top)}")
        _print_best(console, result.top)
    print_heading(console, "how it was reached")
    head, figure = _FIGURES[result.objective]
    steps = [(f"{step.evaluations:,}", figure(step.value)) for step in result.trace[-_STEPS:]]
    _print_rows(console, ("after", head), steps, left=0)
    print_plain(
        console,
        f"{result.evaluations:,} evaluations of {result.space_size:,} points; "
        f"{result.feasible_share * 100:.1f} % can run",
    )
    for reason, count in list(result.refused.items())[:_REFUSALS]:
        print_plain(console, f"{count:,} refused: {reason}", style="dim")
    if not result.exhaustive:
        print_plain(console, "not every point was priced: a better one may exist", style="dim")


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def tuning_document(result: TuningResult) -> dict[str, Any]:
    """Return the result of a tuner as the object of `--json`, in seconds and bytes."""
    top = list(map(_priced, result.top))
    best = top[0] if top else None
    found = to_builtins(replace(result, best=None, top=()))
    return {**found, "best": best, "top": top, "feasible_share": result.feasible_share}


def _priced(point: Point) -> dict[str, Any]:
    return {
        "execution": dict(point.execution),
        "total_time_s": point.time_s,
        "sample_rate_per_s": point.rate_per_s,
        "tier1_bytes": point.memory_bytes,
        "tier2_bytes": point.second_bytes,
    }


_FIGURES: dict[Objective, tuple[str, Callable[[float], str]]] = {
    "rate": ("samples/s", lambda value: f"{value:.5g}"),
    "time": ("step", format_seconds),
    "memory": ("memory", format_bytes),
}


# --------------------------------------------------------------------------------------------------
# One execution and its comparison with published figures.


_PEERS = {"step time": 3.65, "states": 8.5, "activations": 2.1}
"""Mean errors of the published Calculon model with its shipped system, percent."""


_CALCULON_LAYERS = {
    "name": ("operation", ""),
    "fw_flops": ("GFLOP", "GFLOP"),
    "fw_processing_time": ("forward", "s"),
    "baseblock_fw_tp_comm_time": ("link", "s"),
    "weight": ("weights", "B"),
    "activation": ("kept", "B"),
}
_REQUIRED = (
    ("tensor parallel, tiles", "tp_bw_overlap_req", "tensor_par_net"),
    ("data parallel, chunks", "dp_bw_overlap_req_chunk", "data_par_net"),
    ("data parallel, tail", "dp_bw_overlap_req_tail", "data_par_net"),
    ("offload of activations", "act_offload_bw_req", None),
    ("offload of weights", "weight_offload_bw_req", None),
    ("offload of optimizer", "optim_offload_bw_req", None),
    ("offload as asked", "offload_mem_bw_req", None),
)
_TENSOR2D_LAYERS = {
    "name": ("operation", ""),
    "t_fwd": ("forward", "s"),
    "t_fwd_comm": ("links", "s"),
    "t_bwd": ("backward", "s"),
    "t_bwd_comm": ("links", "s"),
    "weights_mem": ("weights", "B"),
    "activation_buffer": ("kept", "B"),
}


def _rate(per_s: float) -> str:
    """Return a rate per second as text: whole numbers from 10,000, else 5 significant digits."""
    return f"{per_s:,.0f}" if per_s >= 1e4 else f"{per_s:.5g}"


def _show_step(
    console: Console, title: str, parts: Sequence[Part], total_s: float, *, batch: int, rate: float
) -> None:
    """Print the step time by part; the column `on the network` includes hidden communication."""
    print_plain(console, title, style="bold")
    speed = f"{rate:.5g} samples/s, step {format_seconds(total_s)}, batch {batch}"
    print_plain(console, speed, style="bold")
    print_heading(console, "step time")
    linked = ("on the network",) if any(part.whole is not None for part in parts) else ()
    rows = [
        (
            part.name,
            format_seconds(part.amount),
            _percent(part.amount / total_s),
            *("" if part.whole is None else format_seconds(part.whole) for _ in linked),
        )
        for part in parts
    ]
    total = ("step", format_seconds(total_s), _percent(1.0))
    _print_rows(console, ("part", "time", "share", *linked), rows, total=total)


def _show_memory(
    console: Console,
    parts: Sequence[Part],
    capacity_bytes: float,
    *,
    second: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Print the memory parts of the processor with the largest peak against the capacity.

    second : needed and existing bytes of a second memory tier, printed if it is used.
    """
    print_heading(console, "memory per processor")
    table = make_table("part", "size", "of capacity", spaced=True)
    for part in parts:
        table.add_row(part.name, format_bytes(part.amount), _percent(part.amount / capacity_bytes))
    needed = sum(part.amount for part in parts)
    table.add_row("needed", format_bytes(needed), _percent(needed / capacity_bytes), style="bold")
    table.add_row("capacity", format_bytes(capacity_bytes), _percent(1.0))
    if second[0]:
        table.add_row("second memory needed", format_bytes(second[0]), _percent(_share(*second)))
        table.add_row("second memory capacity", format_bytes(second[1]), _percent(1.0))
    console.print(table)


def _show_pairs(console: Console, heading: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows of name, value and, if given, value of the machine; nothing without rows."""
    if rows:
        print_heading(console, heading)
        _print_rows(console, ("what", "value", "of the machine")[: len(rows[0])], rows)


def _show_layers(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str]],
    *,
    heading: str = "one layer, one micro-batch",
) -> None:
    """Print one row per operation of a layer.

    columns : key of a row -> (heading, unit), where the unit is 's', 'B', 'GFLOP' or ''.
    """
    print_heading(console, heading)
    cells = [[_cell(row[key], unit) for key, (_, unit) in columns.items()] for row in rows]
    _print_rows(console, [head for head, _ in columns.values()], cells)


def show_lists(console: Console, lists: Mapping[str, Sequence[str]]) -> None:
    """Print lists of sentences under their headings; empty lists are not printed."""
    for heading, items in lists.items():
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)


def show_execution(
    console: Console,
    known: Known,
    x: calculon.Execution,
    system: calculon.System,
    s: Mapping[str, Any],
    *,
    system_name: str,
    compat: bool,
    assumed: Sequence[str],
) -> None:
    """Print the result of `calculon.evaluate` for an execution.

    s : the result; its operations are printed if it contains them. assumed : defaults for values
    that the documents do not contain.
    """
    title = (
        f"{known.name} on {system_name}: {x.num_procs} processors = tensor {x.tensor_par} * "
        f"pipeline {x.pipeline_par} * data {x.data_par}"
    )
    total_s, rate = s["total_time"], s["sample_rate"]
    time, memory = calculon_points.time_parts(s), calculon_points.memory_parts(s, asdict(x))
    _show_step(console, title, time, total_s, batch=x.batch_size, rate=rate)
    second = s["proc_mem_tier2_cap_req"], system.memory_bytes(2)
    _show_memory(console, memory, system.memory_bytes(1), second=second)
    _show_pairs(console, "rates", _rates(known, x, system, s))
    _show_pairs(console, "bandwidths that would hide transfers", _required(x, system, s))
    if "layers" in s:
        _show_layers(console, s["layers"], _CALCULON_LAYERS)
    notes = []
    if not known.application.vocab_size and not compat:
        notes.append("vocab_size is not given: embedding, head and loss are left out")
    if known.spec is not None and not compat:
        wanted = "llama" if known.spec.layers[0].gated_mlp else "gpt"
        if x.structure_type != wanted:
            notes.append(
                f"structure_type is {x.structure_type}, and {known.name} is built as {wanted}"
            )
    if compat:
        notes.append("vocabulary, grouped keys and values and causal masks are not in this model")
    kept = list(calculon.Quirks.meanings.values()) if compat else []
    show_lists(console, {"assumed": assumed, "notes": notes, "corrections that are off": kept})


def _rates(
    known: Known, x: calculon.Execution, system: calculon.System, s: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    tokens_per_s = s["sample_rate"] * known.application.seq_size
    peak = system.matrix[x.datatype].tflops
    achieved = s["total_efficiency"] * peak
    return [
        ("samples per second", _rate(s["sample_rate"])),
        ("tokens per second", _rate(tokens_per_s)),
        ("tokens per second and processor", _rate(tokens_per_s / x.num_procs)),
        ("TFLOP/s per processor", f"{achieved:.4g} of {peak:.4g}"),
        ("compute efficiency", f"{s['compute_efficiency'] * 100:.1f} %"),
        ("system efficiency", f"{s['system_efficiency'] * 100:.1f} %"),
        ("total efficiency", f"{s['total_efficiency'] * 100:.1f} %"),
    ]


def _required(
    x: calculon.Execution, system: calculon.System, s: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for text, key, net in _REQUIRED:
        if not s[key]:
            continue
        if net is None:
            has = system.mem2.GBps
        else:
            has = system.networks[getattr(x, net)].bytes_per_s / 1e9
        # Both rates are printed in GB/s.
        rows.append((text, f"{s[key] / 1e9:.4g} GB/s", f"{has:.4g} GB/s"))
    return rows


def show_candidate(
    console: Console,
    model: tensor2d.Model,
    system: tensor2d.System,
    s: Mapping[str, Any],
    *,
    title: str,
    num_gpus: int,
    batch: int,
    compat: bool,
    assumed: Sequence[str],
) -> None:
    """Print the result of `tensor2d.evaluate` for a candidate; see `show_execution`."""
    rate = batch / s["t"]
    _show_step(console, title, tensor2d_points.time_parts(s), s["t"], batch=batch, rate=rate)
    _show_memory(console, tensor2d_points.memory_parts(s), system.hbm_capacity * 1e9)
    achieved = s["flops_per_gpu"] / s["t"]
    _show_pairs(
        console,
        "rates",
        [
            ("samples per second", _rate(rate)),
            # The field l is the sequence length.
            ("tokens per second", _rate(rate * model.l)),
            ("tokens per second and GPU", _rate(rate * model.l / num_gpus)),
            ("TFLOP/s per GPU", f"{achieved:.4g} of {system.matrix_flops_fp16:.4g}"),
            ("share of the peak", f"{achieved / system.matrix_flops_fp16 * 100:.1f} %"),
        ],
    )
    if "layers" in s:
        rows = [
            # The model returns GB, the table expects bytes.
            {**row, **{key: row[key] * 1e9 for key in ("weights_mem", "activation_buffer")}}
            for row in s["layers"]
        ]
        around = ", embedding and head" if any(row["name"] == "embedding" for row in rows) else ""
        _show_layers(console, rows, _TENSOR2D_LAYERS, heading=f"one layer{around}, one micro-batch")
    kept = list(tensor2d.Quirks.meanings.values()) if compat else []
    notes = []
    if compat and model != model.published():
        notes.append("what is more than l, e, h, depth and f of the model is not in this model")
    elif not model.vocab:
        notes.append("vocab is not given: embedding, head and loss are left out")
    show_lists(console, {"assumed": assumed, "notes": notes, "corrections that are off": kept})


def show_validation(
    console: Console, checks: Sequence[Check], compat: Sequence[Check], *, system: str
) -> None:
    """Print published figures with the errors of the default and of the published model.

    Errors are signed: above 0 if the model returns more than was published.
    """
    from search.closed_form.validation import SOURCE, errors_of

    print_plain(console, f"published figures of {SOURCE}, and the model on {system}", style="bold")
    print_item(console, "table 5: measured step times, A100 80 GB")
    print_item(console, "figures 1 and 7: that paper's own counts of bytes, not measurements")
    print_item(console, "no constant of the model or of the shipped system was fitted to them")
    for group in dict.fromkeys(check.group for check in checks):
        print_heading(console, group)
        heads = ("model", "mode", "published", "default", "error", "--compat", "error")
        rows = [
            (
                mine.model,
                mine.mode,
                f"{mine.published:.4g} {mine.unit}",
                f"{mine.computed:.4g}",
                _signed(mine.error),
                f"{theirs.computed:.4g}",
                _signed(theirs.error),
            )
            for mine, theirs in zip(checks, compat, strict=True)
            if mine.group == group
        ]
        _print_rows(console, heads, rows, left=2)
    print_heading(console, "errors")
    ours, kept = errors_of(tuple(checks)), errors_of(tuple(compat))
    sizes = [
        (name, which, _percent(one.mean, 2), _signed(one.bias), _signed(one.worst), mean)
        for name in ours
        for which, one, mean in (
            ("default", ours[name], ""),
            ("--compat", kept[name], f"{_PEERS[name]:g} %" if name in _PEERS else ""),
        )
    ]
    names = ("figures", "model", "mean size", "mean", "worst", "published")
    _print_rows(console, names, sizes, left=2)
    print_plain(
        console,
        "published: mean size of the errors that the published model has on its own A100",
        style="dim",
    )


def _cell(value: object, unit: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _cell(sum(value), unit)
    assert isinstance(value, int | float), value
    if not value:
        return "0"
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    return f"{value / 1e9:.4g}" if unit == "GFLOP" else f"{value:.4g}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.inf


def _percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f} %"


def _signed(share: float) -> str:
    return f"{share * 100:+.2f} %"
