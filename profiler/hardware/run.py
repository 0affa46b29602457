"""One measuring run from its options to the written files; the same code on every rank."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.units import format_count
from profiler.environment import run_metadata
from profiler.hardware.cells import Cell, plan_cells
from profiler.hardware.driver import Driver
from profiler.hardware.options import HardwareOptions
from profiler.hardware.outcome import unmeasured
from profiler.hardware.parse import check_world
from profiler.hardware.predict import describe_forecast, forecast, probe_policy
from profiler.hardware.progress import Progress, say
from profiler.hardware.record import Record
from profiler.hardware.session import Session, open_session
from profiler.hardware.watch import Trouble, Watch
from profiler.measure import Policy

__all__ = ["run"]

_SAMPLE_S = {"cuda": 1e-3, "cpu": 4e-3}
"""A repetition lasts at least so long, so that starting and stopping it does not count."""
_MAX_LOOPS = 64
_PATIENCE_S = 10.0
"""How long the end of a run waits for files that are being written."""


@dataclass
class _State:
    """What rank 0's watching thread needs to end a run in order."""

    record: Record | None = None
    progress: Progress | None = None
    cell: Cell | None = None
    """The cell in flight: neither measured nor marked as failed."""
    busy: threading.Lock = field(default_factory=threading.Lock)
    """Held while `cell` changes, so that the end of a run never replaces what was measured."""


def run(options: HardwareOptions, argv: Sequence[str]) -> int:
    """Measure what the options ask for; return the exit code of this process.

    Raises
    ------
    AutoparError: the run cannot begin. Later trouble is reported and ends the process.
    """
    session = open_session(options)
    check_world(options, session.world_size)
    state = _State()
    watch = Watch(
        session.watch_store,
        rank=session.rank,
        hosts=session.cluster.hosts,
        pids=[info.pid for info in session.infos],
        timeout_s=options.timeout_s,
        finish=lambda trouble: _finish(state, session, options, trouble),
    )
    watch.start()
    try:
        code = _measure_all(session, watch, state, options, argv)
        watch.step("the end of the process groups")
        session.close()  # under watch: NCCL lets nobody leave before all do
    except BaseException as error:
        watch.fail(error)
        raise
    watch.close()
    return code


def _policy(session: Session, options: HardwareOptions) -> Policy:
    return Policy(
        iters=options.iters,
        warmup=options.warmup,
        max_seconds=options.max_seconds,
        sample_s=_SAMPLE_S[session.device.type],
        max_loops=_MAX_LOOPS,
    )


def _measure_all(
    session: Session, watch: Watch, state: _State, options: HardwareOptions, argv: Sequence[str]
) -> int:
    cells = plan_cells(options, session.cluster)
    is_first = session.rank == 0
    policy = _policy(session, options)
    if options.dry_run:
        driver = Driver(session, watch, probe_policy(policy), check=options.check)
        found = forecast(cells, policy, driver, session)
        if is_first:
            sys.stdout.write(describe_forecast(found))
            sys.stdout.flush()
        return 0
    missing = cells
    if is_first:
        metadata = run_metadata(
            session.infos, argv, session.backend, options, dtype=session.dtype_name
        )
        state.record = Record.open(
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
        missing = tuple(state.record.missing(cells))
        for note in state.record.notes:
            say(note)
    wanted = session.share("cells", " ".join(cell.key for cell in missing) if is_first else None)
    keys = set(wanted.split())
    chosen = [cell for cell in cells if cell.key in keys]
    driver = Driver(session, watch, policy, check=options.check, cuda_graph=options.cuda_graph)
    with Progress(len(chosen), enabled=is_first) as state.progress:
        for cell in chosen:
            state.cell = cell
            state.progress.begin(cell.key)
            measurement = driver.measure(cell)
            with state.busy:
                if state.record is not None:
                    state.record.put(measurement)
                state.cell = None
            state.progress.done(measurement)
    watch.step("the end")
    session.barrier()
    if state.record is None:
        return 0
    return _summary(state.record)


def _name(session: Session) -> str:
    """Return what the hardware is called: its device, and how many there are where."""
    cluster = session.cluster
    device = session.infos[0].device.replace(" ", "-")
    return f"{device}_{cluster.num_nodes}x{cluster.gpus_per_node}"


def _finish(state: _State, session: Session, options: HardwareOptions, trouble: Trouble) -> None:
    """Keep what was measured and say why the run ends; called while the main thread hangs."""
    if state.progress is not None:
        state.progress.stop()
    if trouble.is_input_error:
        if session.rank == 0:
            say(f"autopar: {trouble.sentence}")
        return
    kept = "everything measured before"
    if state.record is not None:
        # never released: what the main thread still does is over with this process
        if state.busy.acquire(timeout=_PATIENCE_S) and state.cell is not None:
            with contextlib.suppress(AutoparError):  # the sentence below matters more
                state.record.put(unmeasured(state.cell, "failed", trouble.sentence))
        kept = f"{state.record.counts().ok} measured cells"
    say(
        f"autopar: {trouble.sentence}, during {trouble.during}; {kept} can be found in "
        f"{options.out}, and the same command with --resume measures the rest"
    )


def _summary(record: Record) -> int:
    """Say what was written; return 1 if cells failed."""
    num_ok, num_failed, num_skipped = record.counts()
    for warning in record.warnings():
        say(f"warning: {warning}")
    for path in record.paths():
        sys.stdout.write(f"{path}\n")
    sys.stdout.flush()
    say(
        f"{format_count(num_ok, 'cell')} measured, {num_failed} failed, {num_skipped} left out; "
        f"`profile-show {record.out}` shows them"
    )
    return 1 if num_failed else 0
