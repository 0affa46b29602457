"""Report of `autopar check`: verdict, plan, estimates, findings and suggested changes.

`search.check` searches the changes, and `search.check.patch` applies them to the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any

from autopar.command.console import Console, escape
from autopar.command.show import make_table, print_heading, print_line, wrapped
from autopar.price.oom_risk import rarely_validated, reserved_range
from autopar.rates.accuracy import probability_faster
from autopar.run.rules import Notice
from autopar.units import GIB, format_bytes, format_count, format_figure, format_probability
from search.show.lengths import TABLE, length_rows, lengths_entry, table_rows
from search.show.settings import LABELS, all_settings, new_settings, settings_on_screen
from search.show.summary import SCREEN_HEIGHT
from search.show.terms import FEATURE_NAMES, OF_MEMORY, assessed_entry, memory_name, time_name

if TYPE_CHECKING:
    from autopar.price.account import Account
    from autopar.price.assessment import Assessment, Target
    from autopar.training.throughput import Throughput
    from search.check.alternatives import BestChanges, ChangedRun
    from search.engines.reader import CheckedFile
    from search.questions.lengths import LengthsAnswer

_LABEL = 12
"""Smallest width of a label with the blanks after it, columns."""
_TERMS = 5
"""Maximum number of terms of the step time on the first screen."""
_SMALL = 0.005
"""Share of the peak below which terms are merged into one row."""
_UNSEEN = 0.0005
"""Share of the step time below which a term is not printed."""
_FIXED = "\u00a0"
"""No-break space."""
_LEAST_FINDINGS = 2
"""Minimum number of findings on the first screen, if there are that many."""


def show_check(
    console: Console,
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    neighbours: BestChanges | None,
    samples: LengthsAnswer | None = None,
    *,
    verbose: bool = False,
    strict: bool = False,
) -> None:
    """Print the report of a checked run.

    assessment : estimate; None if it could not be made.
    neighbours : suggested changes; None if they were not searched.
    samples : the run over samples of different lengths; None if none are given.
    verbose : True to print also all settings, terms and arguments; else one screen.
    strict : True to print the exit code of a run with findings, or of one that does not fit.
    """
    # Not wrapped, so that the path can be copied.
    title = f"{file.path}: {file.trainer} on {file.world_size} {target.machine.card.name}"
    console.print(escape(title), style="bold", soft_wrap=True)
    fits = fits_of(file, assessment, target, samples)
    first = _verdict(console, file, assessment, target, samples)
    if assessment is not None and samples is not None:
        for label, text in length_rows(samples, target):
            first += _labelled(console, label, text)
        first += _labelled(console, "Basis", _basis(assessment, target))
    elif assessment is not None:
        counted = "memory" not in file.withdrawn
        first += ["", *_estimates(console, assessment, target, fits=fits, counted=counted)]
    last = _changes(console, assessment, neighbours, fits=fits) if assessment is not None else []
    last += _next(console, file, assessment, neighbours, fits=fits, verbose=verbose, strict=strict)
    # The title, the blank line before the findings and their heading take three lines.
    room = None if verbose else SCREEN_HEIGHT - len(first) - len(last) - 3
    effect = "time or memory" if samples is None else "full rows"
    for line in (*first, *_findings(console, file, room, effect), *last):
        _write(console, line)
    if verbose:
        if samples is not None:
            _show_batchings(console, samples)
        _show_details(console, file, target, assessment, neighbours)


def fits_of(
    file: CheckedFile,
    assessment: Assessment | None,
    target: Target,
    samples: LengthsAnswer | None = None,
) -> bool:
    """Return True if the memory of a checked run is estimated and fits.

    samples : the run over samples of different lengths; None for full rows.
    """
    if assessment is None or "memory" in file.withdrawn:
        return False
    if samples is None:
        return assessment.fits(target)
    within = samples.own.oom_probability <= target.oom_risk
    return within and target.host_fits(assessment.host_bytes)


def _show_batchings(console: Console, samples: LengthsAnswer) -> None:
    print_heading(console, "Ways to batch the samples")
    table = make_table(*TABLE, spaced=True)
    for row in table_rows(samples):
        table.add_row(*row)
    console.print(table)
    if samples.refused:
        print_line(console, samples.refused)


def _write(console: Console, line: str) -> None:
    headed = line[:1].isalpha() and "  " not in line.strip()
    console.print(escape(line), style="bold" if headed else None, soft_wrap=True)


def _labelled(console: Console, label: str, text: str, width: int = _LABEL) -> list[str]:
    """Return lines with a label, and the text wrapped to its right."""
    lines = [line.replace(_FIXED, " ") for line in wrapped(text, console.width - width)]
    return [
        f"{label if index == 0 else '':<{width}}{line}".rstrip() for index, line in enumerate(lines)
    ]


# --------------------------------------------------------------------------------------------------
# Verdict.


def _verdict(
    console: Console,
    file: CheckedFile,
    assessment: Assessment | None,
    target: Target,
    samples: LengthsAnswer | None,
) -> list[str]:
    """Return the lines of the verdict and of the settings."""
    word, text = _verdict_text(file, assessment, target, samples)
    width = max(_LABEL, len(word) + 2)
    lines = ["", *_labelled(console, word, text, width)]
    if file.run is not None:
        for label, settings in settings_on_screen(file.run):
            lines += _labelled(console, label, settings, width)
    return lines


def _verdict_text(
    file: CheckedFile,
    assessment: Assessment | None,
    target: Target,
    samples: LengthsAnswer | None,
) -> tuple[str, str]:
    """Return (verdict in capitals, memory and OOM probability that it is based on)."""
    if assessment is None:
        number = sum(one.kind == "illegal" for one in file.findings)
        if number:
            return "ILLEGAL", f"{format_count(number, 'broken rule')}; it would not start"
        why = file.why_not_priced() or "the findings give the reason"
        return "NOT PRICED", f"memory and step time: {why}"
    if "memory" in file.withdrawn:
        return "NOT PRICED", f"memory: {file.why_not_priced('memory')}"
    full = assessment.fullest
    fits = fits_of(file, assessment, target, samples)
    peak_bytes, odds = float(full.peak_bytes), assessment.odds_of_oom
    if samples is not None:
        peak_bytes, odds = samples.own.peak_bytes[-1], samples.own.oom_probability
    # One line of the screen takes the short form.
    oom = "OOM probability" if fits else "OOM"
    text = (
        f"{peak_bytes / GIB:.2f} of {format_bytes(target.capacity_bytes)} peak allocated "
        f"(stage {full.stage}), {oom} {format_probability(odds)}"
    )
    if odds > target.oom_risk and peak_bytes < target.capacity_bytes:
        text += f" (limit {format_probability(target.oom_risk)})"
    host, room = assessment.host_bytes, target.host_capacity_bytes
    if host:
        text += f"; host memory {host / GIB:.2f} GiB per GPU"
        text += "" if room is None else f", {room / GIB:.2f} available"
    return "FITS" if fits else "DOES NOT FIT", text


# --------------------------------------------------------------------------------------------------
# Memory and step time.


def _estimates(
    console: Console, assessment: Assessment, target: Target, *, fits: bool, counted: bool
) -> list[str]:
    """Return the lines of step time and memory; memory comes first if the run does not fit.

    counted : False if the memory is withdrawn.
    """
    if assessment.throughput is None or assessment.interval_s is None:
        lines = _stage_lines(assessment) if counted else []
        lines += _labelled(console, "Step time", f"not estimated: {assessment.untimed}")
    elif fits:
        lines = _figure_lines(assessment, assessment.throughput, assessment.interval_s)
        lines += _labelled(console, "Time", _time_terms(assessment))
    else:
        lines = _stage_lines(assessment) if counted else []
        text = _figures_in_words(assessment.throughput, assessment.interval_s)
        lines += _labelled(console, "Step time", text)
    return lines + _labelled(console, "Basis", _basis(assessment, target))


def _basis(assessment: Assessment, target: Target) -> str:
    """Return the source of the estimates and of their intervals."""
    runs = assessment.runs
    links = "measured links (--site)" if target.site_known else "datasheet"
    stack = target.machine.stack.name
    if runs is None:
        return f"{links}, stack {stack}"
    own = "" if runs.stack == stack else f", stack {stack}"
    return f"{links}{own}; 90 % interval of {runs.basis}"


def _row(label: str, estimate: str, interval: str, more: str = "") -> str:
    line = f"  {label:<16}{estimate:>11}   {interval:<19}"
    line += "" if line.endswith(" ") else "  "
    # A line of the first screen has 80 columns; --verbose prints what does not fit.
    whole = line + more if len(line + more) <= 80 else line + more.partition(" (")[0]
    return whole.rstrip()


def _figure_lines(
    assessment: Assessment, found: Throughput, interval_s: tuple[float, float]
) -> list[str]:
    """Return step time, rates and reserved memory with their 90 % intervals."""
    low, high = found.ends or (1.0, 1.0)
    unit, scale = _time_unit(found.step_s)
    step = " to ".join(format_figure(one / scale) for one in interval_s)
    hours = format_figure(found.gpu_hours)
    form = ",.0f" if found.gpu_hours >= 1 else ".2g"
    spent = f"{found.gpu_hours / high:{form}}-{found.gpu_hours / low:{form}}"
    tokens = found.tokens_per_s
    lines = [
        f"{'':<21}estimate   90 % interval",
        _row(
            "Step time",
            f"{format_figure(found.step_s / scale)} {unit}",
            step,
            f"{hours} GPU-h/1e9 tok ({spent})",
        ),
        _row(
            "Tokens/s/GPU",
            f"{tokens:,.0f}",
            f"{tokens * low:,.0f} to {tokens * high:,.0f}",
            _share("HFU", found.hfu, low, high) if found.computes_again else "",
        ),
    ]
    if found.flop_per_s is not None:
        tera = found.flop_per_s / 1e12
        lines.append(
            _row(
                "TFLOP/s/GPU",
                format_figure(tera),
                f"{tera * low:,.0f} to {tera * high:,.0f}",
                _share("MFU", found.mfu, low, high, f", {found.peak_precision}"),
            )
        )
    full = assessment.fullest
    least, most = reserved_range(assessment.run, full.peak_bytes)
    others = [
        f"stage {one.stage}: {_in_gib(reserved_range(assessment.run, one.peak_bytes))}"
        for one in _shown(assessment.accounts, full)
        if one is not full
    ]
    line = f"  {'Reserved memory':<16}{'-':>11}   {_in_gib((least, most))} GiB"
    more = f" ({', '.join(others)})" if others else ""
    return [*lines, line + (more if len(line + more) <= 80 else "")]


def _share(name: str, value: float | None, low: float, high: float, peak: str = "") -> str:
    if value is None:
        return ""
    share = value * 100
    return f"{share:.1f} % {name} ({share * low:.1f}-{share * high:.1f}){peak}"


def _time_unit(step_s: float) -> tuple[str, float]:
    """Return (unit in which a step time is printed, seconds per unit)."""
    return ("s", 1.0) if step_s >= 1.0 else ("ms", 1e-3)


def _figures_in_words(found: Throughput, interval_s: tuple[float, float]) -> str:
    """Return step time, rates and cost with their 90 % intervals in one sentence."""
    low, high = found.ends or (1.0, 1.0)
    unit, scale = _time_unit(found.step_s)
    tokens, hours = found.tokens_per_s, found.gpu_hours
    ends = " to ".join(format_figure(one / scale) for one in interval_s)
    parts = [
        f"{format_figure(found.step_s / scale)} {unit} ({ends})",
        f"{tokens:,.0f} tokens/s/GPU ({tokens * low:,.0f} to {tokens * high:,.0f})",
    ]
    if found.mfu is not None:
        share = found.mfu * 100
        span = f"{share * low:.1f} to {share * high:.1f}"
        parts.append(f"{share:.1f} % MFU ({span}), {found.peak_precision}")
    spent = f"{format_figure(hours / high)} to {format_figure(hours / low)}"
    return ", ".join([*parts, f"{format_figure(hours)} GPU-h/1e9 tok ({spent})"])


def _time_terms(assessment: Assessment) -> str:
    """Return the largest terms of the step time in percent, and the sum of the others."""
    assert assessment.step is not None, "a run with a throughput has a step time"
    total = assessment.step.total_s
    terms = sorted(assessment.step.terms_s.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in terms[:_TERMS] if value / total >= _UNSEEN]
    texts = [
        f"{time_name(name).replace(' ', _FIXED)}{_FIXED}{value / total * 100:.1f} %"
        for name, value in shown
    ]
    rest = 1.0 - sum(value for _, value in shown) / total
    return ", ".join([*texts, *([f"others {rest * 100:.1f} %"] if rest >= _UNSEEN else [])])


def _stage_lines(assessment: Assessment) -> list[str]:
    """Return the memory of the first, the peak and the last stage, and the terms of the peak."""
    full = assessment.fullest
    shown = _shown(assessment.accounts, full)
    totals: dict[str, float] = {}
    for term in full.peak:
        totals[term.name] = totals.get(term.name, 0.0) + term.num_bytes
    largest = sorted(totals.items(), key=lambda item: -item[1])[:4]
    # The size of a term stays on the line of its name.
    texts = [
        f"{memory_name(name).removeprefix('saved ')} {size / GIB:.2f}".replace(" ", _FIXED)
        for name, size in largest
    ]
    lines = [f"Stage  peak allocated  reserved (90 %)   largest terms of stage {full.stage}, GiB"]
    rows = [line.replace(_FIXED, " ") for line in wrapped(", ".join(texts), 39)]
    rows = rows[: max(len(shown), 2)]
    for one, row in zip_longest(shown, rows):
        left = " " * 41
        if one is not None:
            low, high = reserved_range(assessment.run, one.peak_bytes)
            left = (
                f"{one.stage:>5}  {one.peak_bytes / GIB:>10.2f} GiB  "
                f"{low / GIB:>6.2f} to {high / GIB:>6.2f}  "
            )
        lines.append(f"{left}{row or ''}".rstrip())
    return lines


def _shown(accounts: Sequence[Account], full: Account) -> list[Account]:
    """Return the first, the peak and the last stage, each once."""
    found = {one.stage: one for one in (accounts[0], full, accounts[-1])}
    return [found[stage] for stage in sorted(found)]


def _in_gib(ends: tuple[float, float]) -> str:
    low, high = ends
    return f"{low / GIB:.2f} to {high / GIB:.2f}"


# --------------------------------------------------------------------------------------------------
# Findings and changes.


def _findings(console: Console, file: CheckedFile, room: int | None, effect: str) -> list[str]:
    """Return the lines of the findings.

    room : number of lines; None means no limit. At least two findings are printed.
    effect : name of what ignored arguments have no effect on.
    """
    ignored = ", ".join(file.spelled(entry.flag, None) for entry in file.harmless)
    found = [(one.kind, one.text) for one in _important_first(file.findings)]
    kinds = [kind for kind, _ in found] + ["ignored"] * bool(ignored)
    width = max(map(len, kinds), default=0) + 4
    blocks = [_labelled(console, f"  {kind}", text, width) for kind, text in found]
    if ignored:
        text = f"{ignored} (no effect on {effect})"
        own = _labelled(console, "  ignored", text, width)
        if room is not None and len(own) > 1:
            number = format_count(len(file.harmless), "argument")
            own = [f"  {'ignored':<{width - 2}}{number} without effect on {effect}"]
        blocks.append(own)
    if not blocks:
        blocks = [["  none"]]
    shown = blocks
    if room is not None and sum(map(len, blocks)) > room:
        ends = list(accumulate(map(len, blocks)))  # one line is for the number of the others
        fitting = bisect_right(ends, room - 1)
        shown = blocks[: max(fitting, _LEAST_FINDINGS)]
    lines = ["", "Findings", *(line for block in shown for line in block)]
    if len(shown) < len(blocks):
        lines.append(f"  {len(blocks) - len(shown)} more: --verbose")
    return lines


def _important_first(findings: Iterable[Notice]) -> list[Notice]:
    """Return the findings sorted by kind, violated rules first."""
    order = ("illegal", "not priced", "not understood", "environment", "no effect", "read")
    return sorted(findings, key=lambda one: order.index(one.kind))


def _changes(
    console: Console, assessment: Assessment, neighbours: BestChanges | None, *, fits: bool
) -> list[str]:
    """Return the lines of suggested changes."""
    if neighbours is None:
        return []
    found = _distinct(neighbours)
    if not found:
        what = "is faster and fits" if fits else "fits"
        label = "Faster" if fits else "Changes"
        tried = format_count(neighbours.tried, "nearby plan")
        return ["", f"{label:<{_LABEL}}none of {tried} {what}"]
    heading = "Faster, and fits" if fits else "Changes that fit"
    last = "probability" if fits else "peak"
    lines = ["", f"{heading:<18}{'step':>11}  {'change':>7}  {last:>11}  new settings"]
    for one in found:
        lines += _change_lines(console, assessment, one, fits=fits)
    return lines


def _change_lines(
    console: Console, before: Assessment, one: ChangedRun, *, fits: bool
) -> list[str]:
    after = one.assessment
    assert after.step is not None, "a suggested run has a step time"
    unit, scale = _time_unit(after.step.total_s)
    share = "-"
    if before.step is not None:
        share = f"{(after.step.total_s / before.step.total_s - 1.0) * 100:+.1f} %"
    odds = _odds_of_faster(before, after)
    last = format_bytes(after.fullest.peak_bytes)
    if fits:
        last = "-" if odds is None else format_probability(odds)
    left = (
        f"  {format_count(one.knobs, 'change'):<16}"
        f"{f'{format_figure(after.step.total_s / scale)} {unit}':>11}  {share:>7}  {last:>11}  "
    )
    return _labelled(console, left, ", ".join(new_settings(before.run, after.run)), len(left))


def _distinct(neighbours: BestChanges) -> list[ChangedRun]:
    """Return the distinct suggested runs, the one with the fewest changes first."""
    found: list[ChangedRun] = []
    for one in (neighbours.one, neighbours.two, neighbours.any):
        if one is not None and one not in found:
            found.append(one)
    return found


def _next(
    console: Console,
    file: CheckedFile,
    assessment: Assessment | None,
    neighbours: BestChanges | None,
    *,
    fits: bool,
    verbose: bool,
    strict: bool,
) -> list[str]:
    """Return the lines with the exit code (`--strict`) and with options to use next."""
    lines = []
    if strict and (file.findings or not fits):
        reasons = [format_count(len(file.findings), "finding")] if file.findings else []
        if assessment is not None and not fits and "memory" not in file.withdrawn:
            reasons.append("does not fit")
        lines.append(f"{'FAIL':<{_LABEL}}{', '.join(reasons)}: exit code 1 (--strict)")
    options = [] if verbose else ["--verbose (terms, arguments)"]
    if neighbours is not None and neighbours.any is not None:
        options.append("--diff (last change as a patch)")
    unknown = [one for one in file.findings if one.withdraws and one.kind == "not understood"]
    if file.run is not None and unknown:
        flag = file.spelled(str(unknown[0].values["flag"]), None).lstrip("-")
        options.insert(0, f"--check-ignore {flag} (if it changes neither memory nor time)")
    if options:
        lines += _labelled(console, "Next", ", ".join(options))
    # Suggested changes already begin with a blank line.
    return lines if not lines or neighbours is not None else ["", *lines]


# --------------------------------------------------------------------------------------------------
# --verbose.


def _show_details(
    console: Console,
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    neighbours: BestChanges | None,
) -> None:
    """Print all settings, memory and time by term, and the arguments of the changes."""
    if file.run is not None:
        print_heading(console, "Read from the file")
        for key, text in all_settings(file.run):
            label = f"  {LABELS.get(key, key.capitalize())}"
            for line in _labelled(console, label, text, 14):
                _write(console, line)
    if assessment is None:
        return
    if "memory" not in file.withdrawn:
        _show_stages(console, assessment, target)
        _show_peak_terms(console, file, assessment)
    _show_times(console, assessment)
    for one in _distinct(neighbours) if neighbours is not None else ():
        _show_change(console, file, assessment, one)


def _show_stages(console: Console, assessment: Assessment, target: Target) -> None:
    run = assessment.run
    print_heading(console, "Memory per GPU, GiB")
    table = make_table(
        "stage", "steady", "peak allocated", "reserved (90 %)", "OOM probability", spaced=True
    )
    for one in _shown(assessment.accounts, assessment.fullest):
        table.add_row(
            str(one.stage),
            f"{one.states_bytes / GIB:.2f}",
            f"{one.peak_bytes / GIB:.2f}",
            _in_gib(reserved_range(assessment.run, one.peak_bytes)),
            format_probability(target.oom_probability(run, one.peak_bytes)),
        )
    console.print(table)
    notes = [
        f"{format_bytes(target.capacity_bytes)} per GPU, 1 GiB of it for CUDA and NCCL",
        "interval from measured peaks of torchtitan"
        if run.kernels.torch_layers
        else "interval from measured peaks of first and last stages",
    ]
    few = ", ".join(FEATURE_NAMES.get(name, name) for name in rarely_validated(run))
    if few:
        notes.append(f"wider than most, because few measured runs have {few}")
    print_line(console, "; ".join(notes), style="dim")
    if assessment.host_bytes:
        room = target.host_capacity_bytes
        available = "" if room is None else f" of {format_bytes(room)} available"
        print_line(
            console, f"host memory per GPU: {format_bytes(assessment.host_bytes)}{available}"
        )


def _show_peak_terms(console: Console, file: CheckedFile, assessment: Assessment) -> None:
    full = assessment.fullest
    print_heading(console, f"Peak allocated of stage {full.stage} by term")
    table = make_table("term", "GiB", "controlled by", words_last=True, spaced=True)
    small = 0.0
    for term in sorted(full.peak, key=lambda one: -abs(one.num_bytes)):
        if abs(term.num_bytes) < _SMALL * full.peak_bytes:
            small += term.num_bytes
        else:
            size = f"{term.num_bytes / GIB:.2f}"
            table.add_row(escape(memory_name(term.name)), size, escape(file.worded(term.switch)))
    if small:
        table.add_row("others", f"{small / GIB:.2f}", "")
    console.print(table)


def _show_times(console: Console, assessment: Assessment) -> None:
    step, found = assessment.step, assessment.throughput
    if step is None or found is None or assessment.interval_s is None:
        return
    print_heading(console, "Step time by term")
    unit, scale = _time_unit(step.total_s)
    table = make_table("term", unit, "share", spaced=True)
    for name, value in sorted(step.terms_s.items(), key=lambda item: -item[1]):
        if value / step.total_s >= _UNSEEN:
            share = f"{value / step.total_s * 100:.1f} %"
            table.add_row(time_name(name), f"{value / scale:.3f}", share)
    console.print(table)
    print_line(console, _figures_in_words(found, assessment.interval_s))
    if found.computes_again and found.hfu is not None:
        low, high = found.ends or (1.0, 1.0)
        print_line(console, _share("HFU, with recomputed FLOP", found.hfu, low, high))


def _show_change(console: Console, file: CheckedFile, before: Assessment, one: ChangedRun) -> None:
    """Print the arguments of a suggested run with its time and memory."""
    after = one.assessment
    assert after.step is not None, "a suggested run has a step time"
    print_heading(console, f"Arguments of {format_count(one.knobs, 'change')}")
    unit, scale = _time_unit(after.step.total_s)
    parts = [f"{format_figure(after.step.total_s / scale)} {unit}"]
    odds = _odds_of_faster(before, after)
    if odds is not None:
        parts.append(f"faster with a probability of {format_probability(odds)}")
    more = after.fullest.peak_bytes - before.fullest.peak_bytes
    parts.append(
        f"peak allocated {format_bytes(after.fullest.peak_bytes)} "
        f"({'+' if more >= 0 else '-'}{format_bytes(abs(more))})"
    )
    parts.append(f"OOM probability {format_probability(after.odds_of_oom)}")
    print_line(console, ", ".join(parts))
    for line in argument_lines(file, one):
        console.print(escape(f"  {line}"), soft_wrap=True)


def argument_lines(file: CheckedFile, one: ChangedRun) -> list[str]:
    """Return the changed arguments of a suggested run as lines that start with - or +."""
    lines = []
    for flag, before, after in one.changes:
        if before is not None:
            lines.append(f"- {file.spelled(flag, before)}")
        if after is not None:
            lines.append(f"+ {file.spelled(flag, after)}")
    return lines


def _odds_of_faster(before: Assessment, after: Assessment) -> float | None:
    """Return the probability (0 to 1) that `after` is faster than `before`.

    None if a step time is missing or no published runs apply.
    """
    if before.step is None or after.step is None or before.runs is None:
        return None
    return probability_faster(after.step.total_s, before.step.total_s, before.runs.plan_spread)


# --------------------------------------------------------------------------------------------------
# JSON.


def check_document(
    file: CheckedFile,
    target: Target,
    assessment: Assessment | None,
    neighbours: BestChanges | None,
    samples: LengthsAnswer | None = None,
) -> dict[str, Any]:
    """Return the report as a JSON object, in seconds, bytes and shares."""
    document: dict[str, Any] = {
        "file": file.path,
        "trainer": file.trainer,
        "num_gpus": file.world_size,
        "card": target.machine.card.name,
        "stack": target.machine.stack.name,
        "understood": dict(all_settings(file.run)) if file.run is not None else None,
        "findings": [{"kind": one.kind, **one.entry} for one in file.findings],
        "withdrawn": {name: [one.id for one in why] for name, why in file.withdrawn.items()},
        "harmless": [file.spelled(one.flag, one.value) for one in file.harmless],
    }
    if assessment is not None:
        # An estimate that is withdrawn has no figure at all.
        gone = OF_MEMORY if "memory" in file.withdrawn else ()
        entry = assessed_entry(assessment, target)
        document |= {name: value for name, value in entry.items() if name not in gone}
    if samples is not None:
        document["lengths"] = lengths_entry(samples)
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
    file: CheckedFile, one: ChangedRun, before: Assessment, target: Target
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
