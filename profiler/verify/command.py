"""`autopar-verify`: are this machine's plans as fast as predicted, and in that order?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autopar.command.options import Command, make, read_values, rows_of
from autopar.documents.calibration import write_calibration
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import write_json
from autopar.documents.spec import load_spec
from autopar.documents.strategy import strategy_document
from autopar.errors import InputError, OptionError
from autopar.model import ModelSpec
from profiler.verify.calibrate import FEWEST, Calibrated, Subject, calibrate, calibration_document
from profiler.verify.compare import (
    Comparison,
    MeasuredPlan,
    RunSamples,
    compare,
    predicted_bytes,
    read_priced,
    read_run,
)
from profiler.verify.folder import CommandError, Folder, Start, environment, start_process
from profiler.verify.options import (
    MINIMUM_PLANS,
    PANELS,
    Device,
    VerifyOptions,
    checked_options,
    profile_sources,
)
from profiler.verify.plans import SMALL_MODEL, Candidate, Lines, choose_plans, contrasts

__all__ = [
    "COMMAND",
    "Verification",
    "find_device",
    "main",
    "planned_commands",
    "run",
    "verify",
]


# --------------------------------------------------------------------------------------------------
# One verification from beginning to end: profile, search, run in rounds, compare, calibrate.


_DISTURBED = 0.05
_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found."""

    subject: Subject
    comparison: Comparison
    calibrated: Calibrated | None
    """None with too few plans."""
    calibration_path: Path | None
    notes: tuple[str, ...]


def verify(
    options: VerifyOptions, say: Callable[[str], None], start: Start = start_process
) -> Verification:
    """Verify this machine's predictions; everything is kept in the work folder.

    Parameters
    ----------
    say : takes one line for stderr.
    start : runs the commands.

    Raises
    ------
    CommandError : a command failed that nothing can do without.
    InputError : an option, or a file that a command wrote, is unusable.
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
    # if this call ends early, it would stand beside other runs
    folder.drop_calibration()
    plans = _measure(options, candidates, lines, folder, notes)
    if len(plans) < MINIMUM_PLANS:
        notes.append(f"{len(plans)} plans say little of a ranking; {MINIMUM_PLANS} are enough")
    comparison = compare(plans)
    notes += _disturbed(folder.others("runs"))
    subject = _subject(options, lines, spec)
    if len(plans) < FEWEST:
        notes.append(f"no calibration: it needs at least {FEWEST} plans, {len(plans)} ran")
        return Verification(
            subject=subject,
            comparison=comparison,
            calibrated=None,
            calibration_path=None,
            notes=tuple(notes),
        )
    calibrated = calibrate(comparison, candidates, subject, lines, folder)
    path = folder.calibration
    write_calibration(path, calibration_document(calibrated, subject))
    return Verification(
        subject=subject,
        comparison=comparison,
        calibrated=calibrated,
        calibration_path=path,
        notes=(*notes, *calibrated.notes),
    )


def planned_commands(options: VerifyOptions) -> Iterator[str]:
    """Yield the command lines of a verification, without starting any.

    Which plans are run follows from the searches, so one stands for all.
    """
    lines = Lines(options, options.device or find_device(options.nproc))
    spec_layers = _spec(options, lines).num_layers
    threads = environment(options)["OMP_NUM_THREADS"]
    yield f"# every process with OMP_NUM_THREADS={threads}, as many threads as a rank has"
    for command in (lines.profile_hardware(), lines.profile_model()):
        if command is not None:
            yield command.line
    yield lines.best().line
    yield f"# until {options.contrast} of them gave a plan of their own"
    for contrast in contrasts(options, spec_layers):
        yield lines.search(contrast.name, ("--top", "0", *contrast.extra)).line
    yield "# for every plan"
    strategy, priced = (options.work / "plans" / f"best{x}.json" for x in (".strategy", ""))
    yield lines.price(strategy, priced, "plans/best", "").line
    yield f"# for every plan, {options.repeats} times, all plans once before any again"
    yield lines.run("best", "best", priced, 0).line


def find_device(num_ranks: int) -> Device:
    """Return cuda where torch finds a GPU for every rank, else cpu; asks another process."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False
    )
    count = done.stdout.strip()
    return "cuda" if count.isdecimal() and int(count) >= num_ranks else "cpu"


def _spec(options: VerifyOptions, lines: Lines) -> ModelSpec:
    layers = None if options.layers is None else [int(n) for n in options.layers.split(",")]
    length = None if options.seq_length is None else [options.seq_length]
    if options.model is not None or Path(lines.model).is_file():
        return load_spec(lines.model, num_layers=layers, seq_length=length)
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
    """Run every plan once per round; every other round backwards, so that a drift cancels."""
    rounds: dict[str, list[RunSamples]] = {candidate.name: [] for candidate in candidates}
    for turn in range(options.repeats):
        for candidate in candidates if turn % 2 == 0 else reversed(candidates):
            # a plan that failed in one round is not started again
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
        raise InputError(f"none of {len(candidates)} plans ran; {notes[-1]}")
    return [
        _measured(candidate, rounds[candidate.name])
        for candidate in candidates
        if candidate.name in rounds
    ]


def _disturbed(shares: Sequence[float]) -> list[str]:
    """Return what is to be said of other processes while plans ran."""
    if not shares or max(shares) < _DISTURBED:
        return []
    typical, most = f"{median(shares):.0%}", f"{max(shares):.0%}"
    return [
        f"other processes took {typical} of the processors while a plan ran (median; up to {most})"
    ]


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
# The command line.


COMMAND = Command(
    name="autopar-verify",
    fills=(VerifyOptions,),
    panels=PANELS,
    intro="""Profile this machine, search, run the best plans and others, and compare with
predictions.

Writes DIR/calibration.json, which autopar-search --calibration applies. Needs torch; without
options it takes a few minutes on two CPU cores.
""",
)


def _execute(raw: dict[str, Any]) -> int:
    # heavy imports stay out of --help

    values = read_values(rows_of(VerifyOptions), raw)
    options = checked_options(make(VerifyOptions, values))
    json_path = options.json
    if json_path is not None and json_path != "-":
        _check_writable(json_path)
    if options.dry_run:
        for line in planned_commands(options):
            sys.stdout.write(line + "\n")
        return 0
    from autopar.command.show import make_console
    from profiler.verify.report import show_verification, verify_document

    found = verify(options, COMMAND.say)
    if json_path != "-":
        show_verification(
            make_console(sys.stdout),
            found.subject,
            found.comparison,
            found.calibrated,
            found.calibration_path,
            found.notes,
        )
    document = verify_document(
        options,
        found.subject,
        found.comparison,
        found.calibrated,
        found.calibration_path,
        found.notes,
    )
    if json_path is not None:
        _write(json_path, document)
    return 0


def _check_writable(path: str) -> None:
    """Raise an OptionError before minutes of measuring, where the result could not be written."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir() or Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise OptionError(
            f"--json {path}: the file cannot be written; choose another path, or - for stdout"
        )


def _write(path: str, document: dict[str, Any]) -> None:
    from autopar.documents.json import write_json

    if path == "-":
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    try:
        write_json(Path(path), document, number_rows=True)
    except OSError as error:
        raise OptionError(
            f"--json {path}: the file cannot be written ({error.strerror or error}); choose "
            "another path, or - for stdout"
        ) from None


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def main() -> None:
    """Entry point of `autopar-verify`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
