"""Reports of closed-form models: one execution, whole search spaces, tuning, validation.

`search.closed_form` computes the numbers; this module prints tables and builds JSON objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from msgspec.structs import asdict

from autopar.command.console import Console, escape
from autopar.command.show import make_table, print_heading, print_item, print_plain, wrapped
from autopar.errors import InfeasibleError
from autopar.records import replace
from autopar.units import GIB, format_bytes, format_count, format_seconds
from search.closed_form import calculon, tensor2d
from search.closed_form.calculon import exploration as calculon_points
from search.closed_form.tensor2d import exploration as tensor2d_points
from search.show.terms import memory_name, time_name

if TYPE_CHECKING:
    from search.closed_form.answers import Answer, Part, Point
    from search.closed_form.files import KnownModel
    from search.closed_form.native import Objective
    from search.closed_form.tuners import TuningResult
    from search.closed_form.validation import Check

# --------------------------------------------------------------------------------------------------
# Results of searches with a closed-form model: best executions, their time by part, scaling.
#
# Every table is at most 80 columns wide and is readable without colours.


WIDTH = 80
_LABEL = 12
"""Width of a label with the blanks after it, columns."""
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
    table = make_table(*heads, **{"spaced": True, **look})
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

    unit : 'processor' or 'GPU'.
    legend : meaning of the abbreviations in executions; empty for none.
    alone : True for the only search, whose time and memory are also printed by part.
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
    heads = ("#", "samples/s", "step", *_memory_heads(capacity_bytes), "execution")
    _print_rows(console, heads, rows, words_last=True)


def _memory_heads(capacity_bytes: float | None) -> tuple[str, ...]:
    """Return the column names of `_memory`."""
    return ("memory",) if capacity_bytes is None else ("memory", "share")


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
    print_heading(console, "Frontier of time and memory")
    rows = [
        (
            *_memory(point, answer.capacity_bytes),
            f"{point.rate_per_s:.5g}",
            format_seconds(point.time_s),
            point.degrees,
        )
        for point in shown
    ]
    heads = (*_memory_heads(answer.capacity_bytes), "samples/s", "step", "execution")
    _print_rows(console, heads, rows, left=0, words_last=True)
    if len(shown) < len(answer.frontier):
        print_plain(
            console, f"{len(shown)} of {len(answer.frontier)} points; --json has all", style="dim"
        )


def show_scaling(console: Console, answers: Sequence[Answer], *, unit: str) -> None:
    """Print the best execution of every search, with scaling efficiency, time and memory by part.

    Nothing is printed for a single search.
    """
    if len(answers) < 2:
        return
    named = any(answer.strategy for answer in answers)
    if len({answer.processors for answer in answers}) > 1:
        print_heading(console, "Scaling")
        heads = [f"{unit}s", *(["strategy"] if named else [])]
        heads += ["samples/s", f"samples/s/{unit}", "efficiency", "step", "execution"]
        rows = [
            _scaled(answer, share, named=named)
            for group in by_strategy(answers)
            for answer, share in zip(group, efficiencies(group), strict=True)
        ]
        _print_rows(console, heads, rows, left=0, words_last=True)
        print_plain(
            console,
            "efficiency: rate per processor over that of the smallest number with an execution",
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
        return [*head, "", "", "", "", "no execution"]
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
    print_heading(console, f"Sweep on {_subject(answers[0], unit)}")
    heads = ["value" if len(paths) == 1 else f"value {n}" for n, _ in enumerate(paths, 1)]
    for head, path in zip(heads, paths, strict=True):
        print_plain(console, f"{head} = {path}")
    first = next((answer.best[0] for answer in answers if answer.best), None)
    heads += ["samples/s", "change", "step", *_memory_heads(answers[0].capacity_bytes), "best"]
    names: dict[str, str] = {}
    rows = []
    for answer in answers:
        row = [f"{value:.6g}" for value in answer.values]
        if not answer.best or first is None:
            rows.append([*row, *[""] * (len(heads) - len(row) - 1), "no execution"])
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
    _print_rows(console, heads, rows, left=0, words_last=True)
    console.print()
    letters = [(name, words) for words, name in names.items()]
    _print_rows(console, ("best", "execution"), letters, words_last=True)


def infeasible(answers: Sequence[Answer], name: str, system: str, unit: str) -> InfeasibleError:
    """Return the error with the reasons why no execution is possible, and a remedy.

    Reasons are taken from the search with the largest number of executions. name, system : model
    and system. unit : 'processor' or 'GPU'.
    """
    answer = max(answers, key=lambda one: one.considered)
    count = format_count(answer.processors, unit)
    if answer.strategy is not None:
        name = f"{name} with {answer.strategy}"
    if not answer.considered:
        return InfeasibleError(
            f"no way to divide {name} over {count} of {system} was found",
            remedy=f"Use another number of {unit}s, or a batch that it divides",
        )
    why = "; ".join(f"{some:,} {_because(text)}" for text, some in answer.rejected.items())
    return InfeasibleError(
        f"no execution of {name} can run on {count} of {system} "
        f"({answer.considered:,} tried): {why}",
        remedy=f"Use more {unit}s, more memory or another batch",
    )


def by_strategy(answers: Iterable[Answer]) -> list[list[Answer]]:
    """Return the answers grouped by strategy, each group sorted by number of processors."""
    groups: dict[str | None, list[Answer]] = {}
    for answer in sorted(answers, key=lambda one: one.processors):
        groups.setdefault(answer.strategy, []).append(answer)
    return list(groups.values())


def efficiencies(answers: Sequence[Answer]) -> list[float | None]:
    """Return the scaling efficiency of each search: rate per processor over the first known rate.

    None for a search without an execution.
    """
    rates = [a.best[0].rate_per_s / a.processors if a.best else None for a in answers]
    first = next((rate for rate in rates if rate is not None), None)
    return [None if rate is None or first is None else rate / first for rate in rates]


def _show_parts(console: Console, columns: Mapping[str, tuple[Answer, Point]]) -> None:
    """Print the parts of time and memory of executions, one column each."""
    for name, heading, printed in (
        ("time", "Step time by term, % of the step", _time_name),
        ("memory", "Memory by term, % of the capacity", memory_name),
    ):
        rows = {
            head: {
                part.name: part.amount / (point.time_s if name == "time" else answer.capacity_bytes)
                for part in getattr(point, name)
            }
            for head, (answer, point) in columns.items()
        }
        names = dict.fromkeys(part for shares in rows.values() for part in shares)
        room = console.width - max((len(printed(part)) for part in names), default=0)
        # 5 columns for "100.0" and 3 for the blanks around it.
        wide = max((max(len(head), 5) for head in rows), default=5) + 3
        heads = list(rows)
        if heads:
            print_heading(console, heading)
        for start in range(0, len(heads), room // wide):
            shown = heads[start : start + room // wide]
            lines = [
                (printed(part), *(f"{rows[head].get(part, 0.0) * 100:.1f}" for head in shown))
                for part in names
            ]
            sums = ("total", *(f"{sum(rows[head].values()) * 100:.1f}" for head in shown))
            if start:
                console.print()
            total = sums if name == "memory" else None
            _print_rows(console, ("term", *shown), lines, total=total)


def _show_counts(console: Console, answer: Answer) -> None:
    if not answer.complete:
        print_plain(console, "interrupted; results so far")
    if not answer.considered:
        print_plain(console, "no degrees divide both model and batch")
        return
    others = "; others:" if answer.rejected else ""
    print_plain(
        console, f"{answer.feasible:,} of {answer.considered:,} executions are possible{others}"
    )
    for text, count in answer.rejected.items():
        print_item(console, f"{count:,} ({_percent(count / answer.considered)}): {text}")


def _letters(place: int) -> str:
    """Return the letters of a place: A, B, ..., Z, AA, AB, ..."""
    # Letters have no zero: AA follows Z.
    more, last = divmod(place, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)


def _because(text: str) -> str:
    return (
        f"fail because {text}"
        if not text.startswith("needs ")
        else text.replace("needs", "need", 1)
    )


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

    paths : settings that a sweep varies.
    alone : True for a single search, whose executions are keyed by rank.
    frontier : True to include the frontier of each search.
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
    print_heading(console, "Best execution" if result.exhaustive else "Best execution found")
    print_plain(
        console,
        f"{best.rate_per_s:.5g} samples/s, {format_seconds(best.time_s)} per step, "
        f"{format_bytes(best.memory_bytes)}",
    )
    fields = [(name, _word(value)) for name, value in best.execution.items()]
    _print_rows(console, ("field", "value"), fields)
    if len(result.top) > 1:
        print_heading(console, f"Best {len(result.top)} executions")
        _print_best(console, result.top)
    print_heading(console, "Improvements")
    head, figure = _FIGURES[result.objective]
    steps = [(f"{step.evaluations:,}", figure(step.value)) for step in result.trace[-_STEPS:]]
    _print_rows(console, ("evaluations", head), steps, left=0)
    print_plain(
        console,
        f"{result.evaluations:,} evaluations of {result.space_size:,} points; "
        f"{result.feasible_share * 100:.1f} % are possible",
    )
    for reason, count in list(result.refused.items())[:_REFUSALS]:
        print_plain(console, f"{count:,} refused: {reason}", style="dim")
    if not result.exhaustive:
        print_plain(console, "not every point was evaluated: a better one may exist", style="dim")


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
    "activation": ("saved", "B"),
}
_REQUIRED = (
    ("TP comm in tiles", "tp_bw_overlap_req", "tensor_par_net"),
    ("DP comm per chunk", "dp_bw_overlap_req_chunk", "data_par_net"),
    ("DP comm of the last chunk", "dp_bw_overlap_req_tail", "data_par_net"),
    ("activation offload", "act_offload_bw_req", None),
    ("weight offload", "weight_offload_bw_req", None),
    ("optimizer offload", "optim_offload_bw_req", None),
    ("requested offload", "offload_mem_bw_req", None),
)
_TENSOR2D_LAYERS = {
    "name": ("operation", ""),
    "t_fwd": ("forward", "s"),
    "t_fwd_comm": ("links", "s"),
    "t_bwd": ("backward", "s"),
    "t_bwd_comm": ("links", "s"),
    "weights_mem": ("weights", "B"),
    "activation_buffer": ("saved", "B"),
}


def _rate(per_s: float) -> str:
    """Return a rate per second as text: whole numbers from 10,000, else 5 significant digits."""
    return f"{per_s:,.0f}" if per_s >= 1e4 else f"{per_s:.5g}"


def _show_estimate(
    console: Console,
    title: str,
    time: Sequence[Part],
    memory: Sequence[Part],
    *,
    total_s: float,
    capacity_bytes: float,
    second: tuple[float, float] = (0.0, 0.0),
) -> None:
    """Print step time and memory of the peak processor by part, next to each other.

    second : (needed, available) bytes of the second memory tier, printed if it is used.
    """
    print_plain(console, title, style="bold")
    console.print()
    unit, scale = ("s", 1.0) if total_s >= 1.0 else ("ms", 1e-3)
    needed = sum(part.amount for part in memory)
    times = [(_time_name(part.name), part.amount) for part in time] + [("total", total_s)]
    sizes = [(memory_name(part.name), part.amount) for part in memory] + [("total", needed)]
    left = [(name, f"{value / scale:.4f}", _percent(value / total_s)) for name, value in times]
    right = [
        (name, f"{value / GIB:.2f}", _percent(value / capacity_bytes)) for name, value in sizes
    ]
    if second[0]:
        right.append(("second memory", f"{second[0] / GIB:.2f}", _percent(_share(*second))))
    capacity = f"of {capacity_bytes / GIB:.3g}"  # one blank less than the width of its cell
    lines = [
        f"{_triple(one or ('', '', ''), 20)}   {_triple(other or ('', '', ''), 24)}".rstrip()
        for one, other in zip_longest(
            [("Step time", unit, "share"), *left], [("Memory/processor", "GiB", capacity), *right]
        )
    ]
    for number, line in enumerate(lines):
        console.print(escape(line), style="bold" if number == 0 else None, soft_wrap=True)
    console.print()
    network = [part for part in time if part.whole is not None]
    if network:
        texts = (f"{_time_name(part.name)} {format_seconds(part.whole or 0.0)}" for part in network)
        _print_pair(console, "Network", f"{', '.join(texts)} (overlapped time included)")


def _time_name(name: str) -> str:
    """Return the printed name of a part of the time, such as `tensor parallel, repeated`."""
    first, comma, rest = name.partition(",")
    return time_name(first) + comma + rest


def _triple(cells: tuple[str, str, str], width: int) -> str:
    name, value, share = cells
    return f"{name:<{width}}{value:>8}{share:>8}"


def _print_pair(console: Console, label: str, text: str) -> None:
    """Print a label and its text, wrapped to the right of the label."""
    for index, line in enumerate(wrapped(text, console.width - _LABEL)):
        left = label if index == 0 else ""
        console.print(f"{left:<{_LABEL}}{escape(line)}", soft_wrap=True)


def _show_layers(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str]],
    *,
    heading: str = "One layer, one micro-batch",
) -> None:
    """Print one row per operation of a layer.

    columns : key of a row -> (heading, unit), where the unit is 's', 'B', 'GFLOP' or ''.
    """
    print_heading(console, heading)
    cells = [[_cell(row[key], unit) for key, (_, unit) in columns.items()] for row in rows]
    # Names of operations are long, so columns are close.
    _print_rows(console, [head for head, _ in columns.values()], cells, spaced=False)


def show_lists(console: Console, lists: Mapping[str, Sequence[str]]) -> None:
    """Print lists of sentences under their headings; empty lists are not printed."""
    for heading, items in lists.items():
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)


def show_execution(
    console: Console,
    known: KnownModel,
    x: calculon.Execution,
    system: calculon.System,
    s: Mapping[str, Any],
    *,
    system_name: str,
    compat: bool,
    assumed: Sequence[str],
) -> None:
    """Print the result of `calculon.evaluate` for an execution.

    s : the result; its key `layers`, if present, is printed as a table.
    compat : True if the published model without corrections was used.
    assumed : defaults that replace missing inputs.
    """
    title = (
        f"{known.name} on {system_name}: {x.num_procs} processors = tensor {x.tensor_par} * "
        f"pipeline {x.pipeline_par} * data {x.data_par}"
    )
    total_s, rate = s["total_time"], s["sample_rate"]
    time, memory = calculon_points.time_parts(s), calculon_points.memory_parts(s, asdict(x))
    _show_estimate(
        console,
        title,
        time,
        memory,
        total_s=total_s,
        capacity_bytes=system.memory_bytes(1),
        second=(s["proc_mem_tier2_cap_req"], system.memory_bytes(2)),
    )
    tokens = rate * known.application.seq_size
    _show_rates(console, rate, tokens, tokens / x.num_procs, total_s, x.batch_size)
    peak = system.matrix[x.datatype].tflops
    shares = ", ".join(
        f"{name} {s[f'{name}_efficiency'] * 100:.1f} %" for name in ("compute", "system", "total")
    )
    achieved = f"{s['total_efficiency'] * peak:.4g} of {peak:.4g} TFLOP/s per processor"
    _print_pair(console, "Efficiency", f"{achieved}; {shares}")
    required = _required(x, system, s)
    if required:
        _print_pair(console, "Bandwidth", f"to hide transfers, needed of available: {required}")
    if "layers" in s:
        _show_layers(console, s["layers"], _CALCULON_LAYERS)
    notes = []
    if not known.application.vocab_size and not compat:
        notes.append("vocab_size is not given: embedding, head and loss are not counted")
    if known.spec is not None and not compat:
        wanted = "llama" if known.spec.layers[0].gated_mlp else "gpt"
        if x.structure_type != wanted:
            notes.append(
                f"structure_type is {x.structure_type}, and {known.name} is built as {wanted}"
            )
    if compat:
        notes.append("vocabulary, grouped KV heads and causal masks are not modelled")
    kept = list(calculon.Quirks.meanings.values()) if compat else []
    show_lists(console, {"Defaults": assumed, "Notes": notes, "Corrections that are off": kept})


def _show_rates(
    console: Console, rate: float, tokens: float, each: float, total_s: float, batch: int
) -> None:
    """Print a step time with its rates in samples and tokens per second.

    rate : samples/s.
    tokens, each : tokens/s in total and per processor.
    batch : samples per step.
    """
    text = (
        f"{format_seconds(total_s)} per step of {format_count(batch, 'sample')}, "
        f"{_rate(rate)} samples/s, {_rate(tokens)} tokens/s, {_rate(each)} tokens/s/GPU"
    )
    _print_pair(console, "Rates", text)


def _required(x: calculon.Execution, system: calculon.System, s: Mapping[str, Any]) -> str:
    """Return the bandwidths needed to overlap all transfers, and the available ones, in words."""
    texts = []
    for text, key, net in _REQUIRED:
        if not s[key]:
            continue
        if net is None:
            has = system.mem2.GBps
        else:
            has = system.networks[getattr(x, net)].bytes_per_s / 1e9
        texts.append(f"{text} {s[key] / 1e9:.4g} of {has:.4g} GB/s")
    return ", ".join(texts)


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
    _show_estimate(
        console,
        title,
        tensor2d_points.time_parts(s),
        tensor2d_points.memory_parts(s),
        total_s=s["t"],
        capacity_bytes=system.hbm_capacity * 1e9,
    )
    # The field l is the sequence length.
    tokens = rate * model.l
    _show_rates(console, rate, tokens, tokens / num_gpus, s["t"], batch)
    achieved, peak = s["flops_per_gpu"] / s["t"], system.matrix_flops_fp16
    share = f"{achieved / peak * 100:.1f} % of the peak"
    text = f"{achieved:.4g} of {peak:.4g} TFLOP/s per GPU; {share}"
    _print_pair(console, "Efficiency", text)
    if "layers" in s:
        rows = [
            # The model returns GB, the table expects bytes.
            {**row, **{key: row[key] * 1e9 for key in ("weights_mem", "activation_buffer")}}
            for row in s["layers"]
        ]
        around = ", embedding and head" if any(row["name"] == "embedding" for row in rows) else ""
        _show_layers(console, rows, _TENSOR2D_LAYERS, heading=f"One layer{around}, one micro-batch")
    kept = list(tensor2d.Quirks.meanings.values()) if compat else []
    notes = []
    if compat and model != model.published():
        notes.append("only l, e, h, depth and f of the model are used")
    elif not model.vocab:
        notes.append("vocab is not given: embedding, head and loss are not counted")
    show_lists(console, {"Defaults": assumed, "Notes": notes, "Corrections that are off": kept})


def show_validation(
    console: Console, checks: Sequence[Check], compat: Sequence[Check], *, system: str
) -> None:
    """Print published figures with the errors of the default and of the published model.

    Errors are signed: above 0 if a model overestimates. checks, compat : results of the default
    model and of the published model (`--compat`), in the same order.
    """
    from search.closed_form.validation import SOURCE, errors_of

    print_plain(console, f"published figures of {SOURCE}, and the model on {system}", style="bold")
    print_item(console, "table 5: measured step times, A100 80 GB")
    print_item(console, "figures 1 and 7: that paper's own counts of bytes, not measurements")
    print_item(console, "no constant of the model or of the shipped system was fitted to them")
    print_heading(console, "Errors")
    ours, kept = errors_of(tuple(checks)), errors_of(tuple(compat))
    sizes = [
        (name, which, _percent(one.mean, 2), _signed(one.bias), _signed(one.worst), mean)
        for name in ours
        for which, one, mean in (
            ("default", ours[name], ""),
            ("--compat", kept[name], f"{_PEERS[name]:g} %" if name in _PEERS else ""),
        )
    ]
    names = ("figures", "model", "mean |error|", "bias", "worst", "published")
    _print_rows(console, names, sizes, left=2)
    print_plain(
        console,
        "published: mean |error| of the published model with its own A100",
        style="dim",
    )
    for group in dict.fromkeys(check.group for check in checks):
        print_heading(console, group[:1].upper() + group[1:])
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
