"""One profiling run from its options to the written files."""

from __future__ import annotations

import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.console import make_console
from autopar.errors import InputError, OptionError
from autopar.locate import model_file_name
from autopar.model import ModelSpec
from autopar.model_measurements import ModelMeasurement
from autopar.stats import USABLE_SPREAD, relative_spread, summarize
from autopar.units import format_bytes, format_count, format_seconds
from profiler.environment import collect
from profiler.hardware.progress import Progress, say
from profiler.model.cells import ModelCell, plan_cells
from profiler.model.fits import main_fits
from profiler.model.measuring import Measurer, SpecMeasurer, is_out_of_memory
from profiler.model.metadata import model_metadata
from profiler.model.options import ModelOptions
from profiler.model.predict import describe_forecast, forecast
from profiler.model.record import Kind, ModelRecord
from profiler.model.shipped_counts import is_counted
from profiler.model.sizes import tensor_kinds
from profiler.model.sources import ModelSource, load_source
from profiler.show.fits import show_fits

__all__ = ["describe", "measure_cells", "profile_paths", "run"]


def run(options: ModelOptions, argv: Sequence[str]) -> int:
    """Profile what the options ask for; return the exit code.

    Raises
    ------
    AutoparError: the run cannot begin, or a file cannot be written.
    """
    lengths = sorted({seq for case in options.seq_lengths or () for seq in case})
    source = load_source(
        options.model,
        seq_lengths=lengths or None,
        num_layers=options.layernum_min,
        dtype=options.dtype,
    )
    spec = source.sizes
    if options.vocab_divisor is not None:
        spec = replace(spec, make_vocab_size_divisible_by=options.vocab_divisor)
    own_module = source.spec is None
    if own_module and options.unit != "all":
        raise OptionError(
            f"--profile-unit {options.unit} divides layers of a known architecture, and "
            f"{options.model} is a module of its own; use --profile-unit all"
        )
    device = _device(options)
    cells = plan_cells(spec, options, own_degrees=source.degrees if own_module else None)
    for warning in _source_warnings(source, options):
        say(f"profile-model: {warning}")
    measurer = _measurer(source, spec, options, device)
    measurer.rehearse(cells)
    if options.dry_run:
        sys.stdout.write(describe_forecast(forecast(cells, spec, measurer)))
        sys.stdout.flush()
        return 0
    info = collect(0, 0, device)
    metadata = model_metadata(info, argv, options, spec)
    kinds = tensor_kinds(options, own_module=own_module)
    paths = profile_paths(spec, options, info.device)
    memory = paths.get("memory")
    if (
        memory is not None
        and not options.force
        and is_counted(memory, cells, spec, metadata=metadata, kinds=kinds)
    ):
        say(
            f"{memory} came with the model and has these counts already: nothing to do for memory "
            "(--force counts again, --out writes elsewhere)"
        )
        sys.stdout.write(f"{memory}\n")
        del paths["memory"]
        cells = tuple(cell for cell in cells if cell.quantity != "memory")
        if not paths:
            return 0
    record = ModelRecord.open(
        paths, spec, options, metadata=metadata, kinds=kinds, memory_bytes=info.memory_bytes
    )
    with record:
        for note in record.notes:
            say(note)
        measure_cells(record.missing(cells), measurer, record)
        return _summary(record, cells, options)


def profile_paths(spec: ModelSpec, options: ModelOptions, device: str) -> dict[Kind, Path]:
    """Return where the asked-for files go.

    With `out` all of them there, else memory in `models/NAME/configs` and times in its folder of
    the device. Raises InputError where the number of heads, a part of the names, is unknown.
    """
    if spec.layers[0].num_heads is None:
        raise InputError(
            f"model {spec.name!r} has no number of heads, which the documented file names contain"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec.name).strip("-.") or "model"
    folder = Path("models") / name / "configs"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-").removeprefix("nvidia-")
    folders: dict[Kind, Path] = {
        "computation": options.out or folder / slug,
        "memory": options.out or folder,
    }
    found: dict[Kind, Path] = {}
    for kind in options.profile_types:
        file = model_file_name(kind, options.dtype, spec)
        if options.unit != "all":
            file = f"{file.removesuffix('.json')}_{options.unit}.json"
        found[kind] = folders[kind] / file
    return found


def measure_cells(cells: Sequence[ModelCell], measurer: Measurer, record: ModelRecord) -> None:
    """Measure cells one after the other and keep each; larger ones than fit are left out."""
    too_large: dict[tuple[object, ...], ModelCell] = {}
    with Progress(len(cells), enabled=True) as progress:
        for cell in cells:
            progress.begin(cell.key)
            series = (cell.quantity, cell.part, cell.layer_type, cell.seq_lengths, cell.degree)
            before = too_large.get((*series, cell.num_layers))
            if before is not None and before.batch <= cell.batch:
                found = cell.filled(
                    status="skipped", reason=f"{before.key} already ran out of memory"
                )
            else:
                found = measurer.measure(cell)
            if is_out_of_memory(found):
                too_large[*series, cell.num_layers] = cell
            with _uninterrupted():
                record.put(found)
            progress.report(describe(found))


def describe(measurement: ModelMeasurement) -> str:
    """Return one line that says what a cell gave."""
    m = measurement
    if m.status != "ok":
        return f"{m.key:<48s}  {m.status}: {m.reason}"
    if m.quantity == "memory":
        kept, peak = (format_bytes(m.bytes.get(name, 0.0)) for name in ("activation", "peak"))
        return f"{m.key:<48s}  keeps {kept:>11s}, peak {peak:>11s} more"
    times = {name: summarize(samples) for name, samples in m.samples_s.items() if samples}
    parts = [f"{name} {format_seconds(s.median_s)}" for name, s in times.items()]
    forward = times["forward"]
    spread = relative_spread(forward.low_s, forward.median_s, forward.high_s)
    said = f"+-{100 * spread:.0f} %" if spread <= USABLE_SPREAD else "no usable interval"
    return f"{m.key:<48s}  {', '.join(parts)} ({said})"


def _device(options: ModelOptions) -> Any:
    """Return the device of the times.

    Raises
    ------
    OptionError: it is not there, or memory is to be measured where that has no meaning.
    """
    import torch

    cuda = torch.cuda.is_available()
    if options.device == "cuda" and not cuda:
        raise OptionError(
            "--device cuda: torch finds no CUDA device here; use --device cpu, or install a torch "
            "with CUDA"
        )
    name = "cuda" if options.device != "cpu" and cuda else "cpu"
    if options.source == "device" and "memory" in options.profile_types and name == "cpu":
        raise OptionError(
            "--source device measures memory on a GPU, and the device is a CPU; --source auto "
            "counts it exactly without one"
        )
    return torch.device(name, torch.cuda.current_device() if name == "cuda" else None)


def _measurer(source: ModelSource, spec: ModelSpec, options: ModelOptions, device: Any) -> Measurer:
    from profiler.model.module_source import ModuleSource

    if isinstance(source, ModuleSource):
        from profiler.model.module_measuring import ModuleMeasurer

        return ModuleMeasurer(source, options, device)
    return SpecMeasurer(spec, options, device)


def _source_warnings(source: ModelSource, options: ModelOptions) -> list[str]:
    warnings = list(source.warnings)
    if source.spec is None:
        checks = [source.check_degree(degree) for degree in options.degrees or ()]
        warnings += [check for check in checks if check is not None]
    return warnings


def _summary(record: ModelRecord, cells: Sequence[ModelCell], options: ModelOptions) -> int:
    """Say what was found and written; return 1 if cells failed."""
    statuses = record.statuses(cells)
    show_fits(make_console(sys.stderr), main_fits(record.fits(), options.mode))
    for warning in record.warnings(cells):
        say(f"warning: {warning}")
    for path in record.paths():
        sys.stdout.write(f"{path}\n")
    sys.stdout.flush()
    counts = [statuses.count(status) for status in ("ok", "failed", "skipped")]
    ok = format_count(counts[0], "cell")
    say(f"{ok} measured, {counts[1]} failed, {counts[2]} left out")
    return 1 if counts[1] else 0


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while files are written, so that a measured cell is never lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending:
        raise KeyboardInterrupt
