"""Hardware profiling run, from its options to the written files; every rank runs this code."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.command.run import say
from autopar.documents.sidecar import Measurement
from autopar.errors import AutoparError
from autopar.rates.measured import bus_bytes_per_s
from autopar.records import replace
from autopar.statistics import summarize
from autopar.units import GB, format_exact_size, format_seconds
from profiler.hardware.driver import OVERLAP_PREFIX, Driver, unmeasured
from profiler.hardware.options import Cell, HardwareOptions, check_shape, check_world, plan_cells
from profiler.hardware.overlap import OVERLAP_WINDOW_S, slowdowns
from profiler.hardware.record import HardwareRecord, hardware_metadata
from profiler.measure import Forecast, ForecastPart, Policy, Progress, expected_seconds, policy_of
from profiler.processes import Session, open_session, watched
from profiler.progress import Trouble, Watch
from profiler.record import Record

# --------------------------------------------------------------------------------------------------
# Forecast of the duration of a run for `--dry-run`.
#
# Every kind of cell is probed at two or three sizes that are quick to measure. Times at other sizes
# are interpolated, and the variation of the probes determines the number of repetitions.


_PROBE_BYTES = 16 << 20
"""Largest message of the first probes, bytes, unless all cells of a kind are larger."""
_PROBE_ITERS = 8
_PROBE_SECONDS = 0.3
_LONG_PROBE_S = 0.15
"""Longest expected operation of the probe with a large message, seconds."""
_BARRIERS = 20


def probe_policy(policy: Policy) -> Policy:
    """Return the timing policy of a probe: that of the run with fewer repetitions and less time."""
    return replace(
        policy,
        iters=min(policy.iters, _PROBE_ITERS),
        warmup=min(policy.warmup, 2),
        max_seconds=min(policy.max_seconds, _PROBE_SECONDS),
        # Never stop early: the variation of all repetitions is needed.
        half_width=0.0,
    )


def forecast(
    cells: Sequence[Cell],
    policy: Policy,
    driver: Driver,
    session: Session,
) -> Forecast:
    """Return the expected duration of `cells`; every rank must call this with equal cells.

    policy : timing policy of the run.
    driver : driver with `probe_policy(policy)`.
    """
    begun_s = time.perf_counter()
    barrier_s = session.largest(_barrier_seconds(session.barrier))
    kinds: dict[tuple[str, int, bool], list[Cell]] = {}
    for cell in cells:
        kinds.setdefault((cell.operation, cell.group_size, cell.consecutive), []).append(cell)
    found = tuple(_kind(of_kind, policy, driver, barrier_s) for of_kind in kinds.values())
    heading = f"{'operation':<24s} {'groups of':>9s} {'kind':<12s} {'cells':>5s}"
    return Forecast(
        heading=heading, parts=found, probe_s=session.largest(time.perf_counter() - begun_s)
    )


def _barrier_seconds(barrier: Callable[[], None]) -> float:
    # The first barrier connects and is not timed.
    barrier()
    begun_s = time.perf_counter()
    for _ in range(_BARRIERS):
        barrier()
    return (time.perf_counter() - begun_s) / _BARRIERS


def _kind(cells: Sequence[Cell], policy: Policy, driver: Driver, barrier_s: float) -> ForecastPart:
    fitting = [cell for cell in cells if driver.fits(cell)]
    seconds = 0.0
    if fitting and cells[0].operation.startswith(OVERLAP_PREFIX):
        seconds = _overlap_seconds(fitting, policy, driver)
    elif fitting:
        seconds = _collective_seconds(fitting, policy, driver, barrier_s)
    cell, num_cells = cells[0], len(fitting)
    where = "consecutive" if cell.consecutive else "strided"
    name = f"{cell.operation:<24s} {cell.group_size:>9d} {where:<12s} {num_cells:>5d}"
    num_skipped = len(cells) - num_cells
    left_out = f"  {num_skipped} do not fit in memory" if num_skipped else ""
    return ForecastPart(name, num_cells, seconds, left_out)


def _collective_seconds(
    cells: Sequence[Cell], policy: Policy, driver: Driver, barrier_s: float
) -> float:
    """Return the expected total seconds of the cells of one kind."""
    ordered = sorted(cells, key=lambda cell: cell.size_bytes)
    quick = [cell for cell in ordered if cell.size_bytes <= _PROBE_BYTES] or ordered[:1]
    first = driver.measure(quick[-1])  # creates groups and checks the result
    if first.status != "ok":
        # The other cells of the kind will fail as quickly.
        return first.elapsed_s * len(cells)
    # Measured again, now that groups exist and the result is checked.
    probes = [driver.measure(cell) for cell in dict.fromkeys((quick[0], quick[-1]))]
    # The extra time of the first measurement is paid once per kind.
    once_s = max(0.0, first.elapsed_s - probes[-1].elapsed_s)
    # Large messages exceed the caches: probe the largest one that is still quick.
    reached = quick[-1].size_bytes
    operation_s = summarize(probes[-1].samples_s["time"]).median_s
    for cell in reversed(ordered):
        if cell.size_bytes > reached and operation_s * cell.size_bytes / reached < _LONG_PROBE_S:
            probes.append(driver.measure(cell))
            break

    sizes = np.array([float(probe.size_bytes or 0.0) for probe in probes])
    summaries = [summarize(probe.samples_s["time"]) for probe in probes]
    num_rounds = len(cells[0].rounds)
    probing = probe_policy(policy)
    # Seconds of a cell besides its repetitions, mostly for buffers.
    rest_s = [
        probe.elapsed_s - num_rounds * expected_seconds(s.median_s, barrier_s, s.variation, probing)
        for probe, s in zip(probes, summaries, strict=True)
    ]
    times_s = np.array([s.median_s for s in summaries])
    # Setup time must not decrease with size because of noise; logarithms need positive values.
    setups_s = np.maximum.accumulate(np.maximum(rest_s, 1e-4))
    variation = float(np.median([s.variation for s in summaries]))
    return once_s + sum(
        _at(cell.size_bytes, sizes, setups_s)
        + num_rounds
        * expected_seconds(_at(cell.size_bytes, sizes, times_s), barrier_s, variation, policy)
        for cell in cells
    )


def _at(size_bytes: float, sizes: NDArray[np.float64], values_s: NDArray[np.float64]) -> float:
    """Return probed seconds at a message size: power law between probes, proportional above
    them."""
    above = max(1.0, size_bytes / float(sizes[-1]))
    # Latency is negligible above the largest probe.
    return above * float(np.exp(np.interp(np.log(size_bytes), np.log(sizes), np.log(values_s))))


def _overlap_seconds(cells: Sequence[Cell], policy: Policy, driver: Driver) -> float:
    """Return the expected total seconds of overlap cells, probed at the smallest size.

    A cell repeats its five phases until its time limit. With a large message, one repetition may
    exceed that limit.
    """
    smallest = min(cells, key=lambda cell: cell.size_bytes)
    # The first measurement connects and loads kernels; the second is representative.
    first = driver.measure(smallest)
    probe = driver.measure(smallest)
    once_s = max(0.0, first.elapsed_s - probe.elapsed_s)
    if probe.status != "ok":
        return once_s + probe.elapsed_s * len(cells)
    alone_s = summarize(probe.samples_s["communication_alone"]).median_s
    # Calibration takes about as long as one repetition.
    repetition_s = probe.elapsed_s / (len(probe.samples_s["both"]) + 1)
    shortest_s = max(alone_s, OVERLAP_WINDOW_S[driver.device_type])
    total_s = once_s
    for cell in cells:
        # A window contains at least one communication; below that, all sizes take equally long.
        growth = max(1.0, cell.size_bytes / smallest.size_bytes * alone_s / shortest_s)
        longest_s = growth * repetition_s
        repetitions = min(
            policy.iters,
            # At least two repetitions, or one if a single one exceeds the limit.
            max(2 if longest_s < policy.max_seconds else 1, int(policy.max_seconds / longest_s)),
        )
        # Calibration takes about as long as one more repetition.
        total_s += (1 + repetitions) * longest_s
    return total_s


# --------------------------------------------------------------------------------------------------
# The run: every rank processes the same cells.


SAMPLE_S = {"cuda": 1e-3, "cpu": 4e-3}
"""Shortest repetition by device type, seconds, so that the timer's overhead is negligible."""
_PATIENCE_S = 10.0
"""Longest wait for a file being written when a run is ended, seconds."""


@dataclass
class RunState:
    """State of a run that the watch thread needs to end it after a failure."""

    record: Record[Measurement] | None = None
    progress: Progress | None = None
    cell: Cell | None = None
    """Cell that is being measured; None between cells."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Lock held while a measurement is recorded, so that the end of a run never replaces it."""


def run(options: HardwareOptions, argv: Sequence[str]) -> int:
    """Measure the cells that the options request; return the exit code of this process.


    Raises AutoparError: the run cannot start. Later failures are reported and end the process.
    """
    session = open_session(options, cuda_graph=options.cuda_graph)
    check_world(options, session.world_size)
    check_shape(options, session.cluster)
    return run_watched(
        session,
        lambda watch, state: _measure_all(session, watch, state, options, argv),
        out=options.out,
        timeout_s=options.timeout_s,
    )


def run_watched(
    session: Session, body: Callable[[Watch, RunState], int], *, out: Path, timeout_s: float
) -> int:
    """Run `body` with a watch for failed or hanging ranks, and return its result.

    A failure is recorded and ends the process. The process groups are closed at the end.

    out : output folder, for messages.
    timeout_s : limit of one step of the watch, seconds.
    """
    state = RunState()

    def finish(trouble: Trouble) -> None:
        _finish(state, session, out, trouble)

    with watched(session, timeout_s=timeout_s, finish=finish) as watch:
        return body(watch, state)


def measure_missing(
    cells: Sequence[Cell],
    session: Session,
    state: RunState,
    measure: Callable[[Cell], Measurement],
    told: Callable[[Measurement], str],
) -> None:
    """Measure and record the cells missing in rank 0's record.

    Every rank must call this with equal cells.

    told : function that formats a measurement as one line.
    """
    is_first = session.rank == 0
    missing: Sequence[Cell] = cells
    if state.record is not None:
        missing = state.record.missing(cells)
        for note in state.record.notes:
            say(note)
    # Only rank 0 has read the files, and all ranks must measure the same cells.
    wanted = session.share("cells", " ".join(cell.key for cell in missing) if is_first else None)
    keys = set(wanted.split())
    chosen = [cell for cell in cells if cell.key in keys]
    with Progress(len(chosen), enabled=is_first) as state.progress:
        for cell in chosen:
            state.cell = cell
            state.progress.begin(cell.key)
            measurement = measure(cell)
            with state.busy:
                if state.record is not None:
                    state.record.put(measurement)
                state.cell = None
            state.progress.report(told(measurement) if is_first else "")


def _measure_all(
    session: Session, watch: Watch, state: RunState, options: HardwareOptions, argv: Sequence[str]
) -> int:
    cells = plan_cells(options, session.cluster)
    is_first = session.rank == 0
    policy = policy_of(options, SAMPLE_S[session.device.type])
    if options.dry_run:
        driver = Driver(session, watch, probe_policy(policy), check=options.check)
        found = forecast(cells, policy, driver, session)
        return found.show() if is_first else 0
    record: HardwareRecord | None = None
    if is_first:
        metadata = hardware_metadata(
            session.infos, argv, session.backend, options, dtype=session.dtype_name
        )
        state.record = record = HardwareRecord(
            options.out,
            cluster=session.cluster,
            options=options,
            metadata=metadata,
            memory_bytes=min(
                (i.memory_bytes for i in session.infos if i.memory_bytes), default=None
            ),
            synthetic=session.synthetic,
            name=_name(session),
        )
    driver = Driver(session, watch, policy, check=options.check, cuda_graph=options.cuda_graph)
    measure_missing(cells, session, state, driver.measure, describe)
    watch.step("the end")
    session.barrier()
    if record is None:
        return 0
    warnings = [f"warning: {warning}" for warning in record.warnings()]
    return record.conclude(warnings, more=f"; `profile-show {record.out}` shows them")


def describe(measurement: Measurement) -> str:
    """Return the result of a cell as one line of text."""
    m = measurement
    group = (
        f"{m.group_size} stages" if m.operation.startswith("p2p") else f"groups of {m.group_size}"
    )
    if not m.consecutive:
        group = f"strided {group}"
    name = f"{m.operation:<23s} {group:<20s} {format_exact_size(int(m.size_bytes or 0)):>5s}"
    if m.status != "ok":
        return f"{name}  {m.status}: {m.reason}"
    if "time" not in m.samples_s:
        found = slowdowns(m.samples_s)
        return (
            f"{name}  computation x{found.compute:.2f}, communication x{found.communication:.2f}, "
            f"{100 * found.efficiency:.0f} % hidden"
        )
    summary = summarize(m.samples_s["time"])
    line = f"{name}  {format_seconds(summary.median_s):>9s} +-{100 * summary.spread:3.0f} %"
    rate = bus_bytes_per_s(m.operation, m.group_size, m.size_bytes, summary.median_s)
    # A single rank has no traffic.
    return f"{line}  {rate / GB:8.3f} GB/s" if rate else line


def _name(session: Session) -> str:
    """Return the name of the hardware: device, nodes and GPUs per node."""
    cluster = session.cluster
    device = session.infos[0].device.replace(" ", "-")
    return f"{device}_{cluster.num_nodes}x{cluster.gpus_per_node}"


def _finish(state: RunState, session: Session, out: Path, trouble: Trouble) -> None:
    """Record the current cell as failed and print the reason; called by the watch thread."""
    if state.progress is not None:
        state.progress.stop()
    if trouble.is_input_error:
        # All ranks have the same input error; rank 0 reports it.
        if session.rank == 0:
            say(f"autopar: {trouble.sentence}")
        return
    kept = "everything measured before"
    if state.record is not None:
        # Never released: the process exits, so the main thread cannot continue.
        if state.busy.acquire(timeout=_PATIENCE_S) and state.cell is not None:
            with contextlib.suppress(AutoparError):  # the message below matters more
                state.record.put(unmeasured(state.cell, "failed", trouble.sentence))
        kept = f"{state.record.counts().ok} measured cells"
    during = f", during {trouble.during}" if trouble.during else ""
    say(
        f"autopar: {trouble.sentence}{during}. {kept} can be "
        f"found in {out}, and the same command with --resume measures the rest"
    )
