"""What an answer says first, in 80 columns: a plan as one says it, its step in the units of logs.

Figures of launches and of plans whose layers may differ are set alike here; tables of stages,
terms and alternatives, which come behind, are those of `plan` and `launches`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from autopar.command.console import Console, escape
from autopar.command.show import (
    make_table,
    print_heading,
    print_line,
    print_plain,
    wrapped,
)
from autopar.records import Record
from autopar.units import GIB, format_bytes, format_figure, format_odds, format_seconds
from search.engines.engine import ALIKE

if TYPE_CHECKING:
    from autopar.run.plan import LayerStrategy, Plan, Prediction
    from autopar.training.throughput import Throughput
    from search.planning.best_plan import EngineBest
    from search.planning.layered.prediction import SearchResult

SCREEN_WIDTH, SCREEN_HEIGHT = 80, 24
"""What somebody sees at once of an answer."""
NEXT = "autopar-explain FILE (why), autopar-export FILE (run), --verbose"
"""What somebody does with an answer."""


# --------------------------------------------------------------------------------------------------
# Plans in words


def one_line(plan: Plan, *, batch: bool = False) -> str:
    """Return a plan as one says it: `tp4 pp2 dp8, ZeRO-1, micro-batch 1`.

    Where layers differ, each strategy has its number of layers, the most first, in front of what
    all have in common; embedding and head are named where most layers are divided otherwise.
    batch : with the global batch.
    """
    counts = Counter(
        (strategy, plan.data_degree(layer)) for layer, strategy in enumerate(plan.layers)
    ).most_common()
    pipeline = f"pp{plan.num_stages}" if plan.num_stages > 1 else ""
    (usual, dp), _ = counts[0]
    sharing = {_sharing(plan, one, dp) for (one, dp), _ in counts}
    again = {_again(one) for (one, _), _ in counts}
    if len(counts) == 1:
        first = _degrees(usual, dp, pipeline)
    else:
        runs = [
            _joined(
                f"{number} layer{'s' if number > 1 else ''} {_degrees(one, dp, '')}",
                _sharing(plan, one, dp) if len(sharing) > 1 else "",
                _again(one) if len(again) > 1 else "",
                by=" ",
            )
            for (one, dp), number in counts
        ]
        first = f"{pipeline}: " * bool(pipeline) + ", ".join(runs)
    vocab, others = plan.vocab.as_layer(), ""
    if _spread_as(vocab) != _spread_as(usual):
        whole = plan.num_stages * max(vocab.tp * vocab.cp, 1)
        spread = _degrees(vocab, plan.world_size // whole, "")
        others = f"embedding and head {spread}{' ZeRO-3' if vocab.zero3 else ''}"
    schedule = ""
    if plan.num_stages > 1 and plan.pipeline_type not in ("1f1b", "interleaved"):
        schedule = "GPipe" if plan.pipeline_type == "gpipe" else plan.pipeline_type
    return _joined(
        first,
        sharing.pop() if len(sharing) == 1 else "",
        f"micro-batch {_micro_batch(plan, (dp for (_, dp), _ in counts))}",
        f"v{plan.num_chunks}" if plan.num_chunks > 1 else "",
        schedule,
        again.pop() if len(again) == 1 else "",
        f"batch {plan.global_batch}" if batch else "",
        others,
    )


def _joined(*parts: str, by: str = ", ") -> str:
    return by.join(filter(None, parts))


def _spread_as(strategy: LayerStrategy) -> tuple[object, ...]:
    return strategy.tp, strategy.ulysses, strategy.cp, strategy.zero3


def _degrees(strategy: LayerStrategy, dp: int, pipeline: str) -> str:
    name = "ulysses" if strategy.ulysses else "tp"
    parts = [f"{name}{strategy.tp}"] if strategy.tp > 1 else []
    parts += [f"cp{strategy.cp}"] if strategy.cp > 1 else []
    parts += [pipeline] if pipeline else []
    parts += [f"ep{strategy.ep}"] if strategy.ep > 1 else []
    parts += [f"etp{strategy.etp}"] if strategy.etp is not None else []
    parts += [f"dp{dp}"] if dp > 1 or not parts else []
    return " ".join(parts) + (" strided" if strategy.strided else "")


def _sharing(plan: Plan, strategy: LayerStrategy, dp: int) -> str:
    """Return who shares states: nobody where there is nobody to share with."""
    if strategy.zero3:
        return "ZeRO-3"
    if dp == 1 and strategy.cp == 1 and not strategy.ulysses:
        return ""
    return {"ddp": "replicas", "zero1": "ZeRO-1", "zero2": "ZeRO-2"}[plan.default_dp_type]


def _again(strategy: LayerStrategy) -> str:
    if strategy.checkpoint:
        return "recompute full"
    return f"recompute {'+'.join(strategy.recompute)}" if strategy.recompute else ""


def _micro_batch(plan: Plan, dps: Iterable[int]) -> str:
    """Return the samples of a micro-batch on one data rank, from fewest to most of all layers."""
    whole = plan.global_batch / max(plan.num_microbatches, 1)
    sizes = sorted({whole / max(dp, 1) for dp in dps})
    return f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}"


def result_words(result: SearchResult) -> str:
    """Return the answer of a search in a line: its plan and figures, or why there is none."""
    plan, found = result.plan, result.prediction
    if plan is None or found is None:
        why = result.infeasibility
        return f"{result.status}: {'no plan was found in time' if why is None else why.reason}"
    speed = f"{format_seconds(found.step_time_s)}, {found.samples_per_s:,.5g} samples/s"
    return f"{result.status}: {one_line(plan)}: {speed}"


def result_rows(result: SearchResult) -> list[dict[str, Any]]:
    """Return the plan of a search and its alternatives as rows, best first."""
    if result.plan is None or result.prediction is None:
        return []
    best = {
        "plan": one_line(result.plan),
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


# --------------------------------------------------------------------------------------------------
# Figures


Rows = list[tuple[str, str]]
"""Labels, and what stands beside them."""


class Headline(Record):
    """A plan or launch and its figures, as they are shown."""

    heading: str
    line: str
    """The plan as one says it."""
    rows: Rows
    samples_per_s: float

    def height(self, console: Console) -> int:
        """Return how many lines it takes, without the blank one in front."""
        return 1 + len(wrapped(self.line, console.width - 2)) + rows_height(console, self.rows)

    def show(self, console: Console) -> None:
        """Print it behind a blank line."""
        print_heading(console, self.heading)
        print_line(console, self.line, style="bold")
        print_rows(console, self.rows)


_LABEL = 11
"""Columns of a label, with the blank behind it."""


def rows_height(console: Console, rows: Rows) -> int:
    """Return how many lines rows take."""
    return sum(len(wrapped(text, console.width - 2 - _LABEL)) for _, text in rows)


def print_rows(console: Console, rows: Rows) -> None:
    """Print rows, each text beside its label."""
    for label, text in rows:
        for index, line in enumerate(wrapped(text, console.width - 2 - _LABEL)):
            left = label if index == 0 else ""
            console.print(f"  {left:<{_LABEL}}{escape(line)}", soft_wrap=True)


def figure_rows(found: Throughput, samples_per_s: float, price: float | None = None) -> Rows:
    """Return a step in the units of logs, every rate with the ends of the step's interval.

    price : of a GPU-hour.
    """
    step = format_seconds(found.step_s)
    if found.interval_s is not None:
        low, high = map(format_seconds, found.interval_s)
        step += f" ({low} to {high})" if low != high else f" (stays {low})"
    return [
        ("step", f"{step}, {format_figure(samples_per_s, 5)} samples/s"),
        *throughput_rows(found, price),
    ]


def throughput_rows(found: Throughput, price: float | None = None) -> Rows:
    """Return labels and figures of a throughput: rates, shares of the peak, what tokens cost."""
    ends = found.ends
    rates = [f"{found.tokens_per_s:,.0f} tokens/s{_between(found.tokens_per_s, ends, ',.0f')}"]
    if found.flop_per_s is not None:
        tera = found.flop_per_s / 1e12
        rates.append(f"{format_figure(tera)} TFLOP/s{_between(tera, ends, 3)}")
    lines = [("per GPU", ", ".join(rates))]
    shares = [("MFU", found.mfu)]
    if found.computes_again:
        shares.append(("HFU", found.hfu))
    words = [
        f"{'' if name == 'MFU' else 'HFU '}{value * 100:.1f} %{_between(value * 100, ends, '.1f')}"
        for name, value in shares
        if value is not None
    ]
    if words:
        lines.append(("MFU", ", ".join(words) + " of the 16-bit peak" * (len(words) == 1)))
    slow = None if ends is None else (1.0 / ends[1], 1.0 / ends[0])
    hours = f"{format_figure(found.gpu_hours)}{_between(found.gpu_hours, slow, 4)} a billion tokens"
    if price is not None:
        cost = found.cost(price)
        hours += f", ${format_figure(cost)}{_between(cost, slow, 4, '$')}"
    lines.append(("GPU-hours", hours))
    return lines


def _between(
    value: float, ends: tuple[float, float] | None, style: str | int, unit: str = ""
) -> str:
    """Return ` (low to high)` of a value at both ends of an interval; nothing without one.

    style : a format, or how many digits.
    """
    if ends is None:
        return ""
    low, high = (
        format(value * end, style) if isinstance(style, str) else format_figure(value * end, style)
        for end in ends
    )
    return f" ({unit}{low} to {unit}{high})"


def plan_memory_rows(prediction: Prediction) -> Rows:
    """Return what the fullest stage of a plan needs, what there is, and the odds of too little."""
    if not prediction.stages:
        return []
    full = max(prediction.stages, key=lambda s: s.reserved_bytes / max(s.budget_bytes, 1))
    where = f" on stage {full.stage}" if len(prediction.stages) > 1 else ""
    text = f"{full.reserved_bytes / GIB:.2f} of {format_bytes(full.budget_bytes)} reserved{where}"
    return [("memory", f"{text}; out of memory {format_odds(full.odds_of_oom)}")]


# --------------------------------------------------------------------------------------------------
# Engines


_PLAN_COLUMN = 44
"""Beside engine, rate and share in 80 columns."""


def show_engines(
    console: Console,
    engines: Sequence[EngineBest],
    tokens: float | None = None,
    *,
    room: int | None = None,
) -> None:
    """Print each engine's own fastest plan or launch, or why it has none.

    tokens : of a sample over all GPUs, so that rates are those of one GPU; None: samples. room :
    lines of the table at most, in which plans are cut to their first words; None: as many as it
    takes.
    """
    console.print()
    whole = room is None
    best = max((line.samples_per_s or 0.0 for line in engines), default=0.0)
    rate = "samples/s" if tokens is None else "tokens/s/GPU"
    table = make_table("engine", rate, "vs best", "plan", words_last=True)
    # two lines are the names of the columns, one says how many are left out
    shown_engines = engines if room is None or room >= len(engines) + 2 else engines[: room - 3]
    for line in shown_engines:
        words = line.words or (one_line(line.plan) if line.plan is not None else "")
        if line.samples_per_s is None:
            words = f"none: {line.reason}"
        shown = escape(words if whole else shortened(words, _PLAN_COLUMN))
        if line.samples_per_s is None:
            table.add_row(line.engine, "", "", shown, style="dim")
            continue
        share = (line.samples_per_s / best - 1.0) * 100.0
        speed = f"{line.samples_per_s:.4g}"
        if tokens is not None:
            speed = f"{line.samples_per_s * tokens:,.0f}"
        table.add_row(line.engine, speed, f"{share:+.1f} %" if share else "", shown)
    console.print(table)
    if len(shown_engines) < len(engines):
        print_plain(console, f"{len(engines) - len(shown_engines)} more: --verbose", style="dim")
    for line in engines[:1]:
        if whole and line.plan is not None:
            print_plain(console, f"{line.engine}'s is found by {line.options or 'no option more'}")


def shortened(words: str, width: int) -> str:
    """Return the first words of a plan that fit into a column, and that there are more."""
    if len(words) <= width:
        return words
    return words[: width - 3].rpartition(" ")[0].rstrip(",:;") + " .."


def layers_line(engines: Sequence[EngineBest]) -> str:
    """Return what plans whose layers may differ give over the fastest launch, in a few words.

    Empty where there is only one of the two.
    """
    launch = next((line for line in engines if line.launch is not None), None)
    plan = next((line for line in engines if line.plan is not None), None)
    if launch is None or plan is None:
        return ""
    assert launch.samples_per_s is not None, "a launch has a rate"
    assert plan.samples_per_s is not None, "a plan has a rate"
    share = plan.samples_per_s / launch.samples_per_s - 1.0
    if share <= 0:
        return f"{plan.engine}'s plan is {-share * 100:.1f} % slower"
    found = f"{plan.engine}'s plan is {share * 100:.1f} % faster"
    return found + (", which their prices may differ by" if share <= ALIKE else "")
