"""`autopar-verify`: compare predicted with measured step times and ranks of plans.

Contains one verification from beginning to end, its JSON document, its terminal output, and the
command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from autopar import __version__
from autopar.command.console import Console, escape, make_console
from autopar.command.fields import make, read_values, rows_of
from autopar.command.options import Command
from autopar.command.run import visible
from autopar.command.show import make_table, print_heading, print_item, print_plain, write_result
from autopar.documents.calibration import device_of, write_calibration
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import write_json
from autopar.documents.spec import load_spec
from autopar.documents.strategy import strategy_document
from autopar.errors import InputError, OptionError
from autopar.records import Record
from autopar.run.model import ModelSpec, refuse_hybrid
from autopar.units import MIB, format_count, format_seconds
from profiler.verify.calibrate import FEWEST, Calibrated, Subject, calibrate, calibration_document
from profiler.verify.compare import (
    ComparedPlan,
    Comparison,
    MeasuredPlan,
    RunSamples,
    compare,
    predicted_bytes,
    read_priced,
    read_run,
)
from profiler.verify.folder import (
    MINIMUM_PLANS,
    PANELS,
    CommandError,
    Device,
    Folder,
    Start,
    VerifyOptions,
    checked_options,
    environment,
    profile_sources,
    start_process,
)
from profiler.verify.plans import SMALL_MODEL, Candidate, Lines, choose_plans, contrasts

if TYPE_CHECKING:
    from rich.table import Table

# --------------------------------------------------------------------------------------------------
# One verification from beginning to end: profile, search, run in rounds, compare, calibrate.


_WIDTH = 80
"""Width of the report without a terminal, columns."""
_DISTURBED = 0.05
_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


class Verification(Record):
    """Result of a verification."""

    subject: Subject
    comparison: Comparison
    calibrated: Calibrated | None
    """Calibration; None with fewer than `FEWEST` plans."""
    calibration_path: Path | None
    notes: tuple[str, ...]


def verify(
    options: VerifyOptions, say: Callable[[str], None], start: Start = start_process
) -> Verification:
    """Return the comparison of predictions with runs on this machine.

    All files are in the work folder.

    say : prints one line on stderr.
    start : runs the commands.

    Raises CommandError: a required command failed. Raises InputError: an option, or a file that a
    command wrote, is invalid.
    """
    folder = Folder(options, say, start)
    with folder.held():
        return _verify(options, folder)


def _verify(options: VerifyOptions, folder: Folder) -> Verification:
    lines = Lines(options, options.device or find_device(options.nproc))
    if options.model is None and not Path(lines.model).is_file():
        write_json(Path(lines.model), dict(SMALL_MODEL))
    spec = _spec(options, lines)
    for command in (lines.profile_hardware(), lines.profile_model()):
        if command is not None:
            folder.run(command)
    notes: list[str] = []
    candidates = choose_plans(options, lines, folder, notes)
    # If this call ends early, an old calibration would be left with other runs.
    folder.drop_calibration()
    plans = _measure(options, candidates, lines, folder, notes)
    if len(plans) < MINIMUM_PLANS:
        notes.append(f"{len(plans)} plans are too few to rank; {MINIMUM_PLANS} suffice")
    comparison = compare(plans)
    notes += _disturbed(folder.others("runs"))
    subject = _subject(options, lines, spec)
    calibrated, path = None, None
    if len(plans) < FEWEST:
        notes.append(f"no calibration: it needs at least {FEWEST} plans, {len(plans)} ran")
    else:
        calibrated, path = (
            calibrate(comparison, candidates, subject, lines, folder),
            folder.calibration,
        )
        write_calibration(path, calibration_document(calibrated, subject))
        notes += calibrated.notes
    return Verification(
        subject=subject,
        comparison=comparison,
        calibrated=calibrated,
        calibration_path=path,
        notes=tuple(notes),
    )


def planned_commands(options: VerifyOptions) -> Iterator[str]:
    """Yield the command lines of a verification, without running any.

    The plans to run depend on the searches, so one plan represents all.
    """
    lines = Lines(options, options.device or find_device(options.nproc))
    spec_layers = _spec(options, lines).num_layers
    threads = environment(options)["OMP_NUM_THREADS"]
    yield f"# every process with OMP_NUM_THREADS={threads}, as many threads as a rank has"
    for command in (lines.profile_hardware(), lines.profile_model()):
        if command is not None:
            yield command.line
    yield lines.best().line
    yield f"# until {options.contrast} of them gave a different plan"
    for contrast in contrasts(options, spec_layers):
        yield lines.search(contrast.name, ("--top", "0", *contrast.extra)).line
    yield "# for every plan"
    strategy, priced = (options.work / "plans" / f"best{x}.json" for x in (".strategy", ""))
    yield lines.price(strategy, priced, "plans/best", "").line
    yield f"# for every plan, {options.repeats} times, all plans once before any again"
    yield lines.run("best", "best", priced, 0).line


def find_device(num_ranks: int) -> Device:
    """Return cuda if torch finds a GPU for every rank, else cpu; uses a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
    )
    count = done.stdout.strip()
    return "cuda" if count.isdecimal() and int(count) >= num_ranks else "cpu"


def _spec(options: VerifyOptions, lines: Lines) -> ModelSpec:
    layers = None if options.layers is None else [int(n) for n in options.layers.split(",")]
    length = None if options.seq_length is None else [options.seq_length]
    if options.model is not None or Path(lines.model).is_file():
        spec = load_spec(lines.model, num_layers=layers, seq_length=length)
        return refuse_hybrid(spec, "verify")
    with tempfile.TemporaryDirectory() as folder:  # a dry run writes nothing into the work folder
        path = Path(folder) / "model.json"
        write_json(path, dict(SMALL_MODEL))
        return load_spec(str(path), num_layers=layers, seq_length=length)


def _measure(
    options: VerifyOptions,
    candidates: Sequence[Candidate],
    lines: Lines,
    folder: Folder,
    notes: list[str],
) -> list[MeasuredPlan]:
    """Run every plan once per round; odd rounds run in reverse order, so that a drift cancels."""
    rounds: dict[str, list[RunSamples]] = {candidate.name: [] for candidate in candidates}
    for turn in range(options.repeats):
        for candidate in candidates if turn % 2 == 0 else reversed(candidates):
            # A plan that failed in one round is not started again.
            if candidate.name not in rounds:
                continue
            command = lines.run(candidate.name, candidate.label, candidate.path, turn)
            try:
                folder.run(command)
            except CommandError as error:
                del rounds[candidate.name]
                notes.append(f"{candidate.label} did not run: {error}")
                folder.say(notes[-1])
                continue
            rounds[candidate.name].append(read_run(command.outputs[0], options.nproc))
    if not rounds:
        raise InputError(f"none of {len(candidates)} plans ran", remedy=notes[-1])
    return [
        _measured(candidate, rounds[candidate.name])
        for candidate in candidates
        if candidate.name in rounds
    ]


def _disturbed(shares: Sequence[float]) -> list[str]:
    """Return a note on other processes if they used the processors while plans ran."""
    if not shares or max(shares) < _DISTURBED:
        return []
    typical, most = f"{median(shares):.0%}", f"{max(shares):.0%}"
    return [f"other processes used {typical} of the CPUs while a plan ran (median; up to {most})"]


def _measured(candidate: Candidate, runs: Sequence[RunSamples]) -> MeasuredPlan:
    priced, step_time_s = read_priced(candidate.path)
    return MeasuredPlan(
        name=candidate.name,
        label=candidate.label,
        chosen=candidate.chosen,
        predicted_s=step_time_s,
        predicted_bytes=predicted_bytes(candidate.path, priced, runs[0].peak_source),
        rounds=tuple(runs),
        strategy=strategy_document(candidate.plan),
        interval_s=priced.interval_s,
    )


def _subject(options: VerifyOptions, lines: Lines, spec: ModelSpec) -> Subject:
    hardware = read_hardware_dir(lines.hardware, num_nodes=1, gpus_per_node=options.nproc)
    files = profile_sources(lines.profiles)
    return Subject(
        hardware=hardware.name,
        world_size=options.nproc,
        model=spec.name,
        num_layers=spec.num_layers,
        seq_length=tuple(layer.seq_length for layer in spec.layers),
        hidden_size=tuple(layer.hidden_size for layer in spec.layers),
        precision=lines.precision,
        inputs=tuple((s.role, s.path, s.sha256) for s in (*hardware.sources, *files)),
        estimated=hardware.estimated,
    )


# --------------------------------------------------------------------------------------------------
# The JSON document of `autopar-verify`; docs/guides/verify.md explains its keys.


FORMAT = "autopar-verify"
# 1: first version.
VERSION = 1


def verify_document(options: VerifyOptions, found: Verification) -> dict[str, Any]:
    """Return the JSON document of a verification; times in s, memory in bytes."""
    subject, comparison = found.subject, found.comparison
    summary = {key: value for key, value in asdict(comparison).items() if key != "plans"}
    return {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"autopar {__version__}",
        "hardware": subject.hardware,
        "world_size": subject.world_size,
        "model": subject.model,
        "num_layers": subject.num_layers,
        "seq_length": list(subject.seq_length),
        "precision": subject.precision,
        "global_batch": options.batch,
        "num_rounds": options.repeats,
        "steps_per_round": options.steps,
        "summary": {"num_plans": len(comparison.plans), **summary},
        "plans": [_plan_document(row) for row in comparison.plans],
        "calibration": _calibration(found),
        "inputs": [
            {"role": role, "path": path, "sha256": digest} for role, path, digest in subject.inputs
        ],
        "notes": list(found.notes),
    }


def _plan_document(row: ComparedPlan) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": plan.name,
        "label": plan.label,
        "chosen": plan.chosen,
        "predicted_s": plan.predicted_s,
        "predicted_interval_s": plan.interval_s,
        "measured_s": row.measured_s,
        "measured_interval_s": row.interval_s,
        "error": row.error,
        "predicted_rank": row.predicted_rank,
        "measured_rank": row.measured_rank,
        "predicted_bytes": plan.predicted_bytes,
        "peak_bytes": plan.peak_bytes or None,
        "peak_source": plan.peak_source,
        "memory_error": row.memory_error,
        "rounds_s": [run.step_s for run in plan.rounds],
        "plan": dict(plan.strategy),
    }


def _calibration(verification: Verification) -> dict[str, Any] | None:
    found, path = verification.calibrated, verification.calibration_path
    if found is None:
        return None
    return {
        "path": None if path is None else str(path),
        **{
            name: found.factors[name].value if name in found.factors else None
            for name in ("computation", "communication", "fixed_s", "memory")
        },
        "median_error_before": found.error(found.before_s),
        "median_error_after": found.error(found.after_s),
        "median_error_left_out": found.error(found.left_out_s),
        "advised": found.is_advised,
    }


# --------------------------------------------------------------------------------------------------
# Terminal output.


_WITHIN = 0.05
"""Excess of the predicted best over the measured best up to which it counts as equally good."""


def show_verification(console: Console, found: Verification) -> None:
    """Print the table of plans, the summary, and the calibration."""
    subject, calibrated = found.subject, found.calibrated
    print_plain(
        console,
        f"{subject.model} ({subject.num_layers} layers, {subject.precision}) on "
        f"{subject.hardware}, {format_count(subject.world_size, 'rank')}",
        style="bold",
    )
    console.print()
    console.print(_table(found.comparison.plans))
    console.print()
    for line in _summary(found.comparison):
        print_plain(console, line)
    if calibrated is not None:
        print_heading(console, "Calibration")
        for line in _factors(calibrated):
            print_plain(console, line)
        if found.calibration_path is not None:
            for line in _advice(calibrated, subject, found.calibration_path):
                print_plain(console, line)
    if found.notes:
        print_heading(console, "Notes")
        for note in found.notes:
            print_item(console, note)


def _table(plans: Sequence[ComparedPlan]) -> Table:
    columns = ("ms", "measured", "95 %", "error", "rank", "MiB", "counted", "error")
    table = make_table("plan", *columns, spaced=True).__rich__()  # its caption is set below
    table.columns[0].min_width = 16  # fold labels at words, not at letters
    for row in plans:
        low, high = row.interval_s
        table.add_row(
            escape(row.plan.label),
            _ms(row.plan.predicted_s),
            _ms(row.measured_s),
            f"{_ms(low, 3)}-{_ms(high, 3)}",
            _percent(row.error),
            f"{row.predicted_rank:g}/{row.measured_rank:g}",
            f"{row.predicted_bytes / MIB:.1f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.1f}",
            "-" if row.memory_error is None else _percent(row.memory_error),
        )
    table.caption = (
        "ms: predicted step time, then measured with its 95 % interval; error: predicted /\n"
        "measured - 1; rank: predicted/measured; MiB: peak stage, predicted and counted"
    )
    table.caption_justify = "left"
    return table


def _summary(c: Comparison) -> list[str]:
    count = len(c.plans)
    spread = f"slowest / fastest {c.measured_spread:.2f}, noise +-{c.measured_noise:.1%}"
    worst = f"worst {_percent(c.worst_error)}"
    error = f"{c.median_error:.1%} ({_span(c.median_error_interval)})"
    lines = [
        f"{format_count(count, 'plan')}, measured: {spread}",
        f"Step time: median |error| {error}, {worst}",
    ]
    if c.spearman is None or c.spearman_interval is None:
        lines.append("Rank correlation: none (equally fast plans, or a single one)")
    else:
        low, high = c.spearman_interval
        few = "" if count >= MINIMUM_PLANS else f"; {count} plans are too few"
        lines.append(
            f"Rank correlation (Spearman) of predicted and measured: {c.spearman:.2f} "
            f"({low:.2f} to {high:.2f} over repeats{few})"
        )
    labels = {row.plan.name: row.plan.label for row in c.plans}
    best = labels[c.best_predicted]
    if c.best_predicted == c.best_measured:
        lines.append(f"Fastest plan: predicted and measured are the same: {best}")
    else:
        verdict = "as good as" if c.regret <= _WITHIN else "slower than"
        lines.append(
            f"Fastest plan: the predicted one ({best}) is {verdict} the measured one "
            f"({labels[c.best_measured]}): {_percent(c.regret)} "
            f"({_span(c.regret_interval)})"
        )
    if c.median_memory_error is not None:
        lines.append(f"Memory: median |error| {c.median_memory_error:.1%}")
    return lines


def _factors(found: Calibrated) -> list[str]:
    lines = []
    for name, (value, low, high) in found.factors.items():
        if name == "fixed_s":
            ends = f"{format_seconds(low)} to {format_seconds(high)}"
            lines.append(f"{format_seconds(value)} more per step ({ends})")
        else:
            lines.append(f"{name} x {value:.3f} ({low:.3f} to {high:.3f})")
    lines.append(
        f"Step time: median |error| {found.error(found.before_s):.1%} before, "
        f"{found.error(found.after_s):.1%} after, {found.error(found.left_out_s):.1%} held-out "
        "(each plan excluded from its fit)"
    )
    if found.memory_before is not None and found.memory_after is not None:
        worse = "" if found.memory_after < found.memory_before else " (no better)"
        lines.append(
            f"Memory by stage: median |error| {found.memory_before:.1%} before, "
            f"{found.memory_after:.1%} after{worse}"
        )
    return lines


def _advice(found: Calibrated, subject: Subject, path: Path) -> list[str]:
    """Return the advice to use the calibration or not, and the hardware files to use it with."""
    name, device = str(path), device_of(subject.hardware)
    if not found.is_advised:
        return [
            f"Do not use {name}: held-out plans are predicted no better than without it.",
            "Measure again on an idle machine, or with more --repeats",
        ]
    return [
        f"Next: autopar-search --calibration {name}",
        f"with profiles measured on {device}; other devices are refused",
    ]


def _ms(time_s: float, digits: int = 4) -> str:
    # Seconds to ms.
    value = time_s * 1e3
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _percent(share: float) -> str:
    return f"{share:+.1%}"


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} to {ends[1]:.1%}"


# --------------------------------------------------------------------------------------------------
# The command line.


COMMAND = Command(
    name="autopar-verify",
    fills=(VerifyOptions,),
    panels=PANELS,
    intro="""Profile this machine, search, run the best plans and a few others, and compare step
time and memory with the predictions.

Writes DIR/calibration.json, which autopar-search --calibration applies. Needs torch; without
options it takes a few minutes on two CPU cores.
""",
)


def _execute(raw: dict[str, Any]) -> int:
    values = read_values(rows_of(VerifyOptions), raw)
    options = checked_options(make(VerifyOptions, values))
    json_path = options.json
    if json_path is not None and json_path != "-":
        _check_writable(json_path)
    if options.dry_run:
        for line in planned_commands(options):
            sys.stdout.write(visible(line) + "\n")
        return 0
    found = verify(options, COMMAND.warn)
    if write_result(json_path, verify_document(options, found), command=COMMAND.name):
        show_verification(make_console(sys.stdout, _WIDTH), found)
    return 0


def _check_writable(path: str) -> None:
    """Raise OptionError if the result cannot be written, before minutes of measuring."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"--json {path}: the file cannot be written",
            remedy="Use another path, or - for stdout",
        )


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)
