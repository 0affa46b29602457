"""A profiling run, from its options to the written files."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autopar.command.console import make_console
from autopar.command.run import say, visible
from autopar.documents.catalog import model_file_name, model_folder
from autopar.documents.sidecar import DocumentKind, ModelMeasurement
from autopar.documents.spec import length_key
from autopar.errors import InputError, OptionError
from autopar.rates.model import layer_flop
from autopar.records import Record, replace
from autopar.run.model import LayerSpec, ModelSpec
from autopar.statistics import USABLE_SPREAD, summarize
from autopar.units import format_bytes, format_seconds
from profiler.environment import THREADS, collect, use_rank_threads
from profiler.measure import Forecast, ForecastPart, Policy, Progress, expected_seconds
from profiler.model.cells import ModelCell, plan_cells, tensor_kinds
from profiler.model.documents import main_fits
from profiler.model.measuring import Measurer, SpecMeasurer, is_out_of_memory
from profiler.model.options import ModelOptions
from profiler.model.record import ModelRecord, model_metadata
from profiler.model.shipped import is_counted
from profiler.model.sources import ModelSource, load_source
from profiler.model.timing import OPTIMIZER_SHARE
from profiler.show.tables import show_fits

# --------------------------------------------------------------------------------------------------
# Forecast of the duration of a run, for `--dry-run`: extrapolated from a few measured cells.


_PROBE_ITERS = 4
_PROBE_SECONDS = 0.2
_LONG_PROBE_S = 0.3
"""Longest repetition of the larger probe, seconds."""
_SHORT_TOKENS = 64
"""Sequence length of the first probe, tokens: short enough for every device."""
_VARIATION = 0.05
"""Relative standard deviation of samples, assumed for every cell."""


def work(spec: ModelSpec, cell: ModelCell) -> float:
    """Return the FLOP of a cell's forward pass per rank.

    For layers without known heads or MLP width, tokens times hidden size is used instead.
    """
    counts = cell.num_layers or tuple(
        int(cell.part == "layer" and kind == cell.layer_type) for kind in range(len(spec.layers))
    )
    seqs = cell.seq_lengths if cell.part != "layer" else cell.seq_lengths * len(counts)
    total = sum(
        count * _layer_work(layer, seq, cell.encoder_seq_length or seqs[0])
        for count, layer, seq in zip(counts, spec.layers, seqs, strict=True)
    )
    if cell.part != "layer":
        last = spec.layers[-1]
        # the head multiplies every token with the whole table
        total += 2.0 * seqs[-1] * last.hidden_size * (spec.vocab_size or 1)
    return cell.batch * total / cell.degree


def _layer_work(layer: LayerSpec, seq: int, encoder_seq: int) -> float:
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        return float(seq * layer.hidden_size)
    return layer_flop(layer, seq, encoder_seq)


def forecast(cells: Sequence[ModelCell], spec: ModelSpec, measurer: Measurer) -> Forecast:
    """Return the expected duration of each cell, in seconds, from short probes of a few cells."""
    begun_s = time.perf_counter()
    policy = measurer.policy
    measurer.policy = replace(
        policy, iters=_PROBE_ITERS, warmup=1, max_seconds=min(policy.max_seconds, _PROBE_SECONDS)
    )
    try:
        probes = _probes(cells, spec, measurer)
        memory_s = _memory_seconds(cells, measurer)
    finally:
        measurer.policy = policy
    width = max((len(cell.key) for cell in cells), default=0)
    parts = tuple(
        ForecastPart(
            f"{cell.key:<{width}s} ",
            1,
            memory_s if cell.quantity == "memory" else _cell_seconds(cell, spec, probes, policy),
        )
        for cell in cells
    )
    return Forecast(
        heading=f"{'cell':<{width}s} ", parts=parts, probe_s=time.perf_counter() - begun_s
    )


class _Probe(Record):
    """FLOP of one measured cell and its seconds: forward, all passes, setup, optimizer step."""

    work: float
    forward_s: float
    repetition_s: float
    setup_s: float
    optimizer_s: float


def _memory_seconds(cells: Sequence[ModelCell], measurer: Measurer) -> float:
    """Return the seconds of one exact memory count, measured with the last memory cell."""
    chosen = [cell for cell in cells if cell.quantity == "memory"]
    if not chosen:
        return 0.0
    measurer.measure(chosen[0])
    # the first count also loads shared modules; the second one is representative
    return measurer.measure(chosen[-1]).elapsed_s


def _probes(cells: Sequence[ModelCell], spec: ModelSpec, measurer: Measurer) -> list[_Probe]:
    """Return up to two probes: the smallest layer cell, and the largest below `_LONG_PROBE_S`.

    If the smallest cell is longer than that, reduced batches and sequences of it are used instead.
    """
    timed = [c for c in cells if c.quantity == "time" and c.part == "layer"]
    ordered = sorted(timed, key=lambda cell: work(spec, cell))
    if not ordered:
        return []
    short = _shorter(ordered[0], 1, _SHORT_TOKENS)
    found = _probe(short, spec, measurer)  # warm-up: loads kernels and modules
    if found and found[0].repetition_s < _LONG_PROBE_S:
        found = _probe(short, spec, measurer)
    # assuming that time is proportional to work, a cell with this much work is still quick
    limit = found[0].work * _LONG_PROBE_S / found[0].repetition_s if found else math.inf
    if work(spec, ordered[0]) > limit:
        # no real cell is quick, as on a CPU: probe parts of the smallest one
        parts = _parts(ordered[0])
        ordered = sorted({*parts, short}, key=lambda cell: work(spec, cell))
    elif ordered[0] != short:
        found = _probe(ordered[0], spec, measurer)
        limit = found[0].work * _LONG_PROBE_S / found[0].repetition_s if found else 0.0
    if found:
        larger = [cell for cell in ordered if found[0].work < work(spec, cell) <= limit]
        found += _probe(larger[-1], spec, measurer) if larger else []
    return found


def _shorter(cell: ModelCell, batch: int, tokens: int) -> ModelCell:
    """Return the cell with its batch and sequence lengths limited to `batch` and `tokens`."""
    return replace(
        cell,
        batch=min(cell.batch, batch),
        seq_lengths=tuple(min(length, tokens) for length in cell.seq_lengths),
        encoder_seq_length=cell.encoder_seq_length and min(cell.encoder_seq_length, tokens),
    )


def _parts(cell: ModelCell) -> list[ModelCell]:
    """Return reduced cells: the batch is halved repeatedly, then the sequence length."""
    found = []
    batch, tokens = cell.batch // 2, max(cell.seq_lengths)
    while batch or tokens > _SHORT_TOKENS:
        found.append(_shorter(cell, max(batch, 1), tokens))
        if batch > 1:
            batch //= 2
        else:
            batch, tokens = 0, max(tokens // 2, _SHORT_TOKENS)
    return found


def _probe(cell: ModelCell, spec: ModelSpec, measurer: Measurer) -> list[_Probe]:
    measured = measurer.measure(cell)
    if measured.status != "ok":
        return []
    # disturbances only lengthen a short probe, so that the minimum is the best estimate
    times = {name: min(samples) for name, samples in measured.samples_s.items()}
    optimizer_s = times.pop("optimizer", 0.0)
    # the rest of the elapsed time is building modules, warm-ups and random inputs
    sampled_s = sum(sum(samples) for samples in measured.samples_s.values())
    return [
        _Probe(
            work=work(spec, cell),
            forward_s=times["forward"],
            repetition_s=sum(times.values()),
            setup_s=max(0.0, measured.elapsed_s - sampled_s),
            optimizer_s=optimizer_s,
        )
    ]


def _cell_seconds(
    cell: ModelCell, spec: ModelSpec, probes: Sequence[_Probe], policy: Policy
) -> float:
    """Return the expected seconds of a cell with setup; linear in its FLOP, from the probes.

    With a single probe, time is proportional to FLOP. Returns 0 without a probe.
    """
    if not probes:
        return 0.0
    small, large = probes[0], probes[-1]
    size = work(spec, cell)
    forward_only = cell.num_layers is not None
    low, high = (p.forward_s if forward_only else p.repetition_s for p in (small, large))
    if large.work > small.work:
        slope = max(0.0, (high - low) / (large.work - small.work))
        # below the smallest probe the line may fall below the launch overhead
        repetition_s = max(low + slope * (size - small.work), low * min(1.0, size / small.work))
    else:
        repetition_s = low * size / small.work
    seconds = large.setup_s + expected_seconds(repetition_s, 0.0, _VARIATION, policy)
    if large.optimizer_s > 0.0 and cell.part == "layer":
        shorter = replace(policy, max_seconds=policy.max_seconds * OPTIMIZER_SHARE)
        seconds += expected_seconds(large.optimizer_s, 0.0, _VARIATION, shorter)
    return seconds


# --------------------------------------------------------------------------------------------------
# The run: plan, measure, record and report the cells.


def run(options: ModelOptions, argv: Sequence[str]) -> int:
    """Profile the model according to the options; return the exit code.

    argv : command-line arguments, for the metadata of the files.


    Raises AutoparError: the run cannot start, or a file cannot be written.
    """
    lengths = sorted({seq for case in options.seq_lengths or () for seq in case})
    source = load_source(
        options.model,
        seq_lengths=lengths or None,
        num_layers=options.layernum_min,
        dtype=options.dtype,
        sizes=options.sizes,
    )
    spec = source.sizes
    if options.vocab_divisor is not None:
        spec = replace(spec, make_vocab_size_divisible_by=options.vocab_divisor)
    own_module = source.spec is None
    if own_module and options.unit != "all":
        raise OptionError(
            f"--profile-unit {options.unit} needs a known architecture, but "
            f"{options.model} is a custom module",
            remedy="Use --profile-unit all",
        )
    device = _device(options)
    if device.type == "cpu":
        if THREADS not in os.environ and "computation" in options.profile_types:
            say(f"profile-model: {THREADS} not set; using 1 thread, as torchrun does for a rank")
        use_rank_threads()
    cells = plan_cells(spec, options, own_degrees=source.degrees if own_module else None)
    for warning in _source_warnings(source, options):
        say(f"profile-model: {warning}")
    measurer = _measurer(source, spec, options, device)
    measurer.rehearse(cells)
    if options.dry_run:
        return forecast(cells, spec, measurer).show()
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
            f"{memory} is shipped with the model and contains these counts: "
            "memory is not counted again (use --force to count, --out to write "
            "elsewhere)"
        )
        sys.stdout.write(visible(f"{memory}\n"))
        del paths["memory"]
        cells = tuple(cell for cell in cells if cell.quantity != "memory")
        if not paths:
            return 0
    record = ModelRecord(
        paths, spec, options, metadata=metadata, kinds=kinds, memory_bytes=info.memory_bytes
    )
    with record:
        for note in record.notes:
            say(note)
        measure_cells(record.missing(cells), measurer, record)
        show_fits(make_console(sys.stderr), main_fits(record.fits(), options.mode))
        warnings = [f"warning: {warning}" for warning in record.warnings(cells)]
        return record.conclude(warnings, cells)


def profile_paths(spec: ModelSpec, options: ModelOptions, device: str) -> dict[DocumentKind, Path]:
    """Return the path of each requested file, by document kind.

    With `options.out`, all files are in that folder. Otherwise the memory file is in
    `models/NAME/configs`, and times are in the model's folder of the device. File names contain
    the number of heads; raises InputError if it is unknown.

    device : name of the device.
    """
    if spec.layers[0].num_heads is None:
        raise InputError(
            f"model {spec.name!r} has no number of heads, which the documented file names contain"
        )
    folders: dict[DocumentKind, Path] = {
        "computation": options.out or model_folder(spec.name, device),
        "memory": options.out or model_folder(spec.name),
    }
    found: dict[DocumentKind, Path] = {}
    for kind in options.profile_types:
        file = model_file_name(kind, options.dtype, spec)
        if options.unit != "all":
            file = f"{file.removesuffix('.json')}_{options.unit}.json"
        found[kind] = folders[kind] / file
    return found


def measure_cells(cells: Sequence[ModelCell], measurer: Measurer, record: ModelRecord) -> None:
    """Measure and record cells one by one.

    After a cell runs out of memory, equal cells with at least its batch size are skipped.
    """
    too_large: dict[tuple[object, ...], ModelCell] = {}
    with Progress(len(cells), enabled=True) as progress:
        for cell in cells:
            progress.begin(cell.key)
            # cells of one series differ only in their batch size
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
    """Return one line of text with the result of a cell."""
    m = measurement
    if m.status != "ok":
        return f"{m.key:<48s}  {m.status}: {m.reason}"
    if m.quantity == "memory":
        kept, peak = (format_bytes(m.bytes.get(name, 0.0)) for name in ("activation", "peak"))
        return f"{m.key:<48s}  keeps {kept:>11s}, peak {peak:>11s} more"
    times = {name: summarize(samples) for name, samples in m.samples_s.items() if samples}
    parts = [f"{name} {format_seconds(s.median_s)}" for name, s in times.items()]
    forward = times["forward"]
    usable = forward.spread <= USABLE_SPREAD
    said = f"+-{100 * forward.spread:.0f} %" if usable else "no usable interval"
    return f"{m.key:<48s}  {', '.join(parts)} ({said})"


def _device(options: ModelOptions) -> Any:
    """Return the torch device for measuring times.


    Raises OptionError: the device does not exist, or device memory is requested on a CPU.
    """
    import torch

    cuda = torch.cuda.is_available()
    # Counting needs no device, so that scripts for GPUs count their memory anywhere.
    counts_only = options.profile_types == ("memory",) and options.source != "device"
    if options.device == "cuda" and not cuda and not counts_only:
        raise OptionError(
            "--device cuda: torch finds no CUDA device",
            remedy="Use --device cpu, or install a torch with CUDA",
        )
    name = "cuda" if options.device != "cpu" and cuda else "cpu"
    if options.source == "device" and "memory" in options.profile_types and name == "cpu":
        raise OptionError(
            "--source device measures memory on a GPU, but the device is a CPU",
            remedy="Use --source auto, which counts it exactly",
        )
    return torch.device(name, torch.cuda.current_device() if name == "cuda" else None)


def _measurer(source: ModelSource, spec: ModelSpec, options: ModelOptions, device: Any) -> Measurer:
    from profiler.model.sources import ModuleSource

    if isinstance(source, ModuleSource):
        from profiler.model.measuring import ModuleMeasurer

        return ModuleMeasurer(source, options, device)
    return SpecMeasurer(spec, options, device)


def _source_warnings(source: ModelSource, options: ModelOptions) -> list[str]:
    warnings = list(source.warnings)
    key = length_key(options.model) if source.spec is not None else None
    if key is not None and options.seq_lengths is None:
        tokens = source.sizes.layers[0].seq_length
        warnings.append(f"--seq not given; using the {tokens} tokens of {key}")
    if source.spec is None:
        checks = [source.check_degree(degree) for degree in options.degrees or ()]
        warnings += [check for check in checks if check is not None]
    return warnings


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C while files are written, so that a measured cell is never lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        # restore the handler first, so that a second Ctrl-C is not lost
        signal.signal(signal.SIGINT, before)
    if pending:
        raise KeyboardInterrupt
