"""One-rank plans on a device: predicted and measured time and memory, and the dry run's memory.

`python -m benchmarks.plan_on_device [--device cuda] [--json LEDGER] [--commands]`: a model, numbers
of layers, sequence lengths, batch sizes and checkpointing make a matrix. It runs the installed
commands as processes and keeps their files below `--work`:

    profiler.hardware            the device, once
    profile-model                the model, at every sequence length
    autopar-search --evaluate    the prediction of every cell
    profiler.plan --mode run     its measured steps and the peak of the allocator
    profile-plan --mode dryrun   its memory, counted without a device

On a GPU the exit status is 1 if the median difference of time is more than 5 % or that of memory
more than 2 %. On a CPU, whose times depend on other processes, nothing is judged. A second run
resumes the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import asdict

from autopar.documents.json import load_object, write_json
from autopar.documents.strategy import strategy_document
from autopar.errors import AutoparError, OptionError
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from autopar.units import MIB, MS
from benchmarks.metadata import append
from profiler.verify.command import find_device
from profiler.verify.folder import (
    Command,
    CommandError,
    Device,
    Folder,
    VerifyOptions,
    checked_options,
)
from profiler.verify.plans import Lines

__all__ = ["TARGET_MEMORY", "TARGET_TIME", "Cell", "Row", "cells", "commands", "main", "row"]

TARGET_TIME, TARGET_MEMORY = 0.05, 0.02
_COLUMNS = (
    *("layers", "tokens", "batch", "ckpt", "predicted ms", "measured ms", "difference"),
    *("predicted MiB", "measured MiB", "difference", "dry run MiB", "difference"),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One plan of one rank."""

    layers: int
    seq_length: int
    batch: int
    checkpoint: bool

    @property
    def name(self) -> str:
        """Return the name of its files."""
        kind = "-ckpt" if self.checkpoint else ""
        return f"l{self.layers}-s{self.seq_length}-b{self.batch}{kind}"

    @property
    def plan(self) -> Plan:
        """Return one rank, one stage, one micro-batch."""
        return Plan(
            world_size=1,
            num_stages=1,
            stage_sizes=(self.layers,),
            layers=(LayerStrategy(checkpoint=self.checkpoint),) * self.layers,
            vocab=VocabStrategy(),
            global_batch=self.batch,
            num_microbatches=1,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of one cell, in seconds and bytes."""

    cell: Cell
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    """Peak allocated bytes of the allocator, or counted storages on a CPU."""
    dry_run_bytes: int

    @property
    def differences(self) -> tuple[float, float, float]:
        """Return relative errors: predicted time, predicted memory, dry-run memory."""
        return (
            self.predicted_s / self.measured_s - 1.0,
            self.predicted_bytes / self.measured_bytes - 1.0,
            self.dry_run_bytes / self.measured_bytes - 1.0,
        )

    @property
    def text(self) -> str:
        """Return a line of the table."""
        cell = self.cell
        time, memory, counted = (f"{100 * value:+.1f} %" for value in self.differences)
        sizes = (self.predicted_bytes, self.measured_bytes, self.dry_run_bytes)
        predicted, measured, dry_run = (f"{size / MIB:.1f}" for size in sizes)
        values = (
            *(cell.layers, cell.seq_length, cell.batch, "yes" if cell.checkpoint else "no"),
            *(f"{self.predicted_s / MS:.2f}", f"{self.measured_s / MS:.2f}", time),
            *(predicted, measured, memory, dry_run, counted),
        )
        return f"| {' | '.join(map(str, values))} |"


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """Return the matrix, small ones first."""
    shapes = product(arguments.layers, arguments.seq, arguments.batch, arguments.ckpt)
    return [
        Cell(layers=layers, seq_length=length, batch=batch, checkpoint=bool(checkpoint))
        for layers, length, batch, checkpoint in shapes
    ]


def commands(arguments: argparse.Namespace, device: Device, cell: Cell) -> Iterator[Command]:
    """Yield a cell's commands: device, model, prediction, run, dry run; the first two are shared.

    Raises OptionError if an option is out of its range.
    """
    work: Path = arguments.work
    model = work / "model" / f"s{cell.seq_length}"
    asked = VerifyOptions(
        model=arguments.model,
        layers=str(cell.layers),
        seq_length=cell.seq_length,
        nproc=1,
        batch=cell.batch,
        repeats=1,
        steps=arguments.steps,
        work=work,
        device=device,
    )
    lines = Lines(checked_options(asked), device)
    profiled = lines.profile_hardware()
    assert profiled is not None  # no --hardware is given
    yield profiled
    sizes = sorted({1, *arguments.batch})
    words = (
        *("profile-model", "--model", arguments.model, "--mode", "batch"),
        *("--bsz", ",".join(map(str, sizes)), "--seq", str(cell.seq_length)),
        *("--max-tp-deg", "1", "--device", device, "--dtype", lines.precision),
        *("--max-seconds", f"{arguments.max_seconds:g}", "--out", str(model), "--resume"),
    )
    title = f"measuring the model at {cell.seq_length} tokens"
    yield Command(name=f"model-s{cell.seq_length}", title=title, words=words, outputs=(model,))
    # the links' folder is not measured yet, so it cannot be checked as an option
    lines.hardware, lines.profiles = str(work / "hardware"), str(model)
    plan = work / "plans" / f"{cell.name}.json"
    yield lines.price(_strategy(work, cell), plan, f"plans/{cell.name}", f"pricing {cell.name}")
    yield lines.run(cell.name, cell.name, plan, 0)
    counted = work / "runs" / f"{cell.name}.dry.json"
    same = (
        *(str(plan), "--model", arguments.model, "--num-layers", str(cell.layers)),
        *("--seq", str(cell.seq_length), "--mixed-precision", lines.precision),
    )
    yield Command(
        name=f"runs/{cell.name}.dry",
        title=f"dry run of {cell.name}",
        words=("profile-plan", *same, "--mode", "dryrun", "--json", str(counted)),
        outputs=(counted,),
    )


def row(cell: Cell, run: dict[str, Any], dry_run: dict[str, Any]) -> Row:
    """Return the row of a cell from the documents of its run and its dry run.

    The prediction is that of the run for the same plan; its memory excludes communicators.
    """
    predicted = run["predicted"]
    return Row(
        cell=cell,
        predicted_s=predicted["step_time_s"],
        measured_s=median(run["step_time_s"]),
        predicted_bytes=predicted["peak_bytes"][0],
        measured_bytes=run["peak_bytes"][0],
        dry_run_bytes=dry_run["ranks"][0]["peak_bytes"],
    )


def _strategy(work: Path, cell: Cell) -> Path:
    return work / "plans" / f"{cell.name}.strategy.json"


def _measured(
    arguments: argparse.Namespace, device: Device, folder: Folder, failed: list[str]
) -> Iterator[Row]:
    for cell in cells(arguments):
        write_json(_strategy(arguments.work, cell), strategy_document(cell.plan))
        steps = list(commands(arguments, device, cell))
        try:
            for command in steps:
                folder.run(command)
        except CommandError as error:
            if command.name == "hardware":
                raise  # no cell can do without it
            failed.append(f"{cell.name} is left out: {error}")
            folder.say(failed[-1])
            continue
        run, dry_run = (load_object(step.outputs[0]).data for step in steps[-2:])
        yield row(cell, run, dry_run)


def _summary(rows: Sequence[Row], device: Device) -> bool:
    """Print medians and the largest differences; return True if they are within the targets."""
    fine = True
    names = ("time", "memory", "dry run")
    for index, (name, target) in enumerate(
        zip(names, (TARGET_TIME, TARGET_MEMORY, TARGET_MEMORY), strict=True)
    ):
        found = [abs(each.differences[index]) for each in rows]
        middle = median(found)
        fine = fine and middle <= target
        within = sum(value <= target for value in found)
        print(
            f"{name}: median |difference| {middle:.1%}, largest {max(found):.1%}, {within} of "
            f"{len(found)} within {target:.0%}"
        )
    if device == "cpu":
        print("a CPU: times are not judged, and memory is counted, not allocated")
    return fine or device == "cpu"


def _numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if min(values) < 0:
        raise ValueError(text)
    return values


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama2-7b", help="shipped name or model file")
    parser.add_argument("--layers", type=_numbers, default=[2, 4, 8], help="comma list")
    parser.add_argument("--seq", type=_numbers, default=[1024, 4096], help="comma list")
    parser.add_argument("--batch", type=_numbers, default=[1, 2, 4], help="comma list")
    parser.add_argument("--ckpt", type=_numbers, default=[0, 1], help="0, 1 or 0,1")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a run")
    parser.add_argument("--max-seconds", type=float, default=2.0, help="of a model's cell")
    parser.add_argument("--work", type=Path, default=Path("plan-on-device"))
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--commands", action="store_true", help="print the commands; run nothing")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Measure the matrix and print the table; return the exit status."""
    arguments = _parser().parse_args(words)
    device: Device = find_device(1) if arguments.device == "auto" else arguments.device
    try:
        return _main(arguments, device)
    except AutoparError as error:
        print(f"plan_on_device: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1


def _main(arguments: argparse.Namespace, device: Device) -> int:
    if arguments.commands:
        lines = [
            command.line
            for cell in cells(arguments)
            for command in commands(arguments, device, cell)
        ]
        print("\n".join(dict.fromkeys(lines)))
        return 0
    folder = Folder(
        VerifyOptions(model=arguments.model, nproc=1, work=arguments.work, device=device),
        lambda text: print(f"plan_on_device: {text}", file=sys.stderr, flush=True),
    )
    failed: list[str] = []
    rows = []
    with folder.held():
        print(f"| {' | '.join(_COLUMNS)} |")
        print(f"|{'---|' * len(_COLUMNS)}")
        for found in _measured(arguments, device, folder, failed):
            print(found.text, flush=True)
            rows.append(found)
    print("\n".join(["", *failed]))
    if not rows:
        print("plan_on_device: no plan ran", file=sys.stderr)
        return 1
    fine = _summary(rows, device)
    values = [{**asdict(each), "cell": asdict(each.cell)} for each in rows]
    described = {"device": device, "model": arguments.model, "rows": values, "failed": failed}
    append(arguments.json, "plan_on_device", described)
    return 0 if fine and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
