"""Compare measurements of profile-model on a GPU with its counts, and with each other.

Run from the repository root, on a machine with a CUDA GPU:
`python -m benchmarks.device_vs_exact [--models NAMES] [--summary]`. It prints three tables, for
three models at two sequence lengths each, in bf16:

    memory   bytes kept from forward to backward, counted exactly and by torch's allocator
    layers   forward of one layer, timed alone and as the difference of two whole forwards
    passes   backward over forward, recomputation over forward, optimizer step

The exit status is 1 if memory differs by more than 1 % or time by more than 10 %, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING

from autopar.documents.sidecar import ModelMeasurement
from autopar.documents.spec import load_spec
from autopar.errors import AutoparError
from autopar.units import MIB, MS
from profiler.environment import require_torch
from profiler.model.cells import ModelCell, plan_cells
from profiler.model.documents import ON_DEVICE
from profiler.model.measuring import SpecMeasurer
from profiler.model.options import ModelOptions

if TYPE_CHECKING:
    import torch

__all__ = ["CASES", "chosen_cells", "layer_row", "main", "memory_row", "pass_row", "print_tables"]

CASES: tuple[tuple[str, tuple[int, int]], ...] = (
    ("gpt-6.7b", (1024, 2048)),
    ("llama2-7b", (2048, 4096)),
    ("llama3-8b", (2048, 4096)),
)
"""Models, LayerNorm and RMSNorm, with and without shared key-value heads, and their lengths."""
APART_MEMORY, APART_TIME = 0.01, 0.10
_BATCH = 2
_ONLY_AT_1 = ("only", "first", "last")


def chosen_cells(cells: Sequence[ModelCell]) -> list[ModelCell]:
    """Return the cells of a plan that the tables hold: all layers, their surroundings undivided."""
    return [
        cell
        for cell in cells
        if cell.part not in _ONLY_AT_1 or cell.quantity == "time" or cell.degree == 1
    ]


def memory_row(measurement: ModelMeasurement) -> tuple[str, float | None]:
    """Return a line of the first table, and the relative difference if both figures exist."""
    found = measurement.bytes
    if measurement.status != "ok" or "device_activation" not in found:
        said = measurement.reason or "; ".join(measurement.notes) or "no figure of the device"
        return f"  {measurement.key:<52s} {said}", None
    exact, device = found["activation"], found["device_activation"]
    apart = device / exact - 1.0 if exact else 0.0
    cause = next((note for note in measurement.notes if ON_DEVICE in note), "")
    line = (
        f"  {measurement.key:<52s} {exact / MIB:10.3f} {device / MIB:10.3f} {100 * apart:+8.3f} %"
        f"  {found['peak'] / MIB:10.3f} {found['device_peak'] / MIB:10.3f}"
    )
    return f"{line}  {cause.partition(ON_DEVICE)[2]}".rstrip(), apart


def layer_row(
    alone: ModelMeasurement, few: ModelMeasurement, many: ModelMeasurement
) -> tuple[str, float | None]:
    """Return a line of the second table, and the relative difference if both figures exist."""
    for cell in (alone, few, many):
        if cell.status != "ok":
            return f"  {cell.key:<52s} {cell.reason}", None
    counts = [sum(cell.num_layers or ()) for cell in (few, many)]
    direct_s = median(alone.samples_s["forward"])
    whole_s = [median(cell.samples_s["forward"]) for cell in (few, many)]
    difference_s = (whole_s[1] - whole_s[0]) / (counts[1] - counts[0])
    apart = difference_s / direct_s - 1.0
    return (
        f"  {alone.key:<52s} {direct_s / MS:10.4f} {difference_s / MS:10.4f} {100 * apart:+8.2f} %",
        apart,
    )


def pass_row(alone: ModelMeasurement) -> str:
    """Return a line of the third table."""
    if alone.status != "ok":
        return f"  {alone.key:<52s} {alone.reason}"
    times_s = {name: median(samples) for name, samples in alone.samples_s.items()}
    forward_s = times_s["forward"]
    optimizer_s = times_s.get("optimizer")
    optimizer = f"{optimizer_s / MS:10.4f}" if optimizer_s is not None else f"{'-':>10s}"
    return (
        f"  {alone.key:<52s} {forward_s / MS:10.4f} {times_s['backward'] / forward_s:10.3f} "
        f"{times_s['recompute'] / forward_s:10.3f} {optimizer}"
    )


def _measured(
    name: str, seq_length: int, device: torch.device, max_seconds: float
) -> Iterator[ModelMeasurement]:
    """Yield the measurements of the cells of one model at one length."""
    spec = load_spec(name)
    options = ModelOptions(
        model=name,
        source="device",
        device="cuda",
        batches=(_BATCH,),
        seq_lengths=((seq_length,),),
        degrees=(1, 2),
        max_seconds=max_seconds,
    )
    measurer = SpecMeasurer(spec, options, device)
    for cell in chosen_cells(plan_cells(spec, options)):
        yield measurer.measure(cell)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the three tables; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(name for name, _ in CASES))
    parser.add_argument("--max-seconds", type=float, default=1.0, help="of each timed pass")
    parser.add_argument("--summary", action="store_true", help="print the largest differences only")
    arguments = parser.parse_args(argv)
    begun_s = time.perf_counter()
    try:
        require_torch()
        lengths = dict(CASES)
        wanted = arguments.models.split(",")
        known = [(name, lengths.get(name, CASES[1][1])) for name in wanted]
        for name, _ in known:
            load_spec(name)
    except AutoparError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    import torch

    if not torch.cuda.is_available():
        print(
            "this comparison needs a CUDA GPU, and torch finds none here; what a CPU can be held "
            "against is in tests/unit/profiler/model/test_exact_ranks.py",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    print(
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, bf16"
    )
    found = [
        (f"{name}, sequence {seq}", list(_measured(name, seq, device, arguments.max_seconds)))
        for name, seqs in known
        for seq in seqs
    ]
    apart = print_tables(found, summary=arguments.summary)
    limits = {"memory": APART_MEMORY, "time": APART_TIME}
    print()
    for what, values in apart.items():
        sizes = [abs(value) for value in values if value is not None]
        missing = len(values) - len(sizes)
        largest = f"largest {100 * max(sizes):.2f} %" if sizes else "none"
        over = sum(size > limits[what] for size in sizes)
        print(
            f"{what}: {len(sizes)} compared, {largest}, {over} over {100 * limits[what]:.0f} %, "
            f"{missing} without a figure"
        )
    print(f"{time.perf_counter() - begun_s:.0f} s")
    beyond = any(
        value is None or abs(value) > limits[what] for what in apart for value in apart[what]
    )
    return 1 if beyond else 0


Found = Sequence[tuple[str, Sequence[ModelMeasurement]]]
"""Names of models with their lengths, and the measurements of their cells."""
Table = tuple[str, list[str], list[float | None]]


def print_tables(found: Found, *, summary: bool = False) -> dict[str, list[float | None]]:
    """Print the three tables, or nothing; return relative differences, None for no figure."""
    tables = [_memory_table(found), _layer_table(found), _pass_table(found)]
    for title, lines, _ in () if summary else tables:
        print(f"\n{title}")
        for line in lines:
            print(line)
    return {"memory": tables[0][2], "time": tables[1][2]}


def _memory_table(found: Found) -> Table:
    lines, apart = [], []
    for name, cells in found:
        lines.append(name)
        for cell in cells:
            if cell.quantity == "memory":
                line, difference = memory_row(cell)
                lines.append(line)
                apart.append(difference)
    head = (
        f"  {'':<52s} {'exact':>10s} {'device':>10s} {'apart':>10s}  {'peak':>10s} {'device':>10s}"
    )
    return f"memory, MiB\n{head}", lines, apart


def _layer_table(found: Found) -> Table:
    lines, apart = [], []
    for name, cells in found:
        lines.append(name)
        base, *more = (cell for cell in cells if cell.num_layers is not None)
        for kind, many in enumerate(more):
            line, difference = layer_row(_whole_layer(cells, kind), base, many)
            lines.append(line)
            apart.append(difference)
    head = f"  {'':<52s} {'alone':>10s} {'difference':>10s} {'apart':>10s}"
    return f"forward of a layer, ms for the batch\n{head}", lines, apart


def _pass_table(found: Found) -> Table:
    lines = []
    for name, cells in found:
        lines.append(name)
        lines += [pass_row(cell) for cell in _timed_layers(cells)]
    columns = ("forward ms", "backward", "recompute", "step ms")
    head = f"  {'':<52s} " + " ".join(f"{column:>10s}" for column in columns)
    return f"passes of a layer, relative to its forward\n{head}", lines, []


def _whole_layer(cells: Sequence[ModelMeasurement], kind: int) -> ModelMeasurement:
    return next(c for c in _timed_layers(cells) if c.layer_type == kind and c.degree == 1)


def _timed_layers(cells: Sequence[ModelMeasurement]) -> list[ModelMeasurement]:
    return [c for c in cells if c.quantity == "time" and c.part == "layer"]


if __name__ == "__main__":
    sys.exit(main())
