"""One run of `profiler.site`, from its options to the written file and its summary."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.command.console import make_console
from autopar.command.show import print_heading, print_line, print_table
from autopar.documents.json import load_object
from autopar.documents.sidecar import Measurement
from autopar.documents.spec import load_spec
from autopar.rates.card import Card, load_card
from autopar.rates.constants import kernels_of
from autopar.rates.kernels import gemm_s
from autopar.rates.measured import bus_bytes_per_s
from autopar.rates.site import (
    Site,
    collective_s,
    data_parallel_work,
    gemm_flop,
    read_site,
    step_time_s,
)
from autopar.run.model import ModelSpec, padded_vocab_size, refuse_hybrid
from autopar.units import GB, format_count, format_seconds, format_size
from profiler.hardware.options import Cluster
from profiler.hardware.run import SAMPLE_S, RunState, describe, measure_missing, run_watched
from profiler.measure import policy_of
from profiler.processes import Session, open_session
from profiler.progress import Watch
from profiler.record import read_document
from profiler.site.documents import SiteDescription, SiteRecord, site_metadata, site_path
from profiler.site.driver import SiteDriver, forecast_site
from profiler.site.options import (
    GEMM,
    HOST,
    SiteOptions,
    default_name,
    gemm_size,
    guess_card,
    plan_cells,
)


def run(options: SiteOptions, argv: Sequence[str]) -> int:
    """Measure the cells that the options request; return the exit code of this process.

    Raises AutoparError: the run cannot begin. Later trouble is reported and ends the process.
    """
    # Loaded before measuring, since the summary at the end needs it.
    spec = refuse_hybrid(load_spec(options.model), "profile-site")
    padded_vocab_size(spec)
    session = open_session(options)
    return run_watched(
        session,
        lambda watch, state: _measure_all(session, watch, state, options, spec, argv),
        out=options.out,
        timeout_s=options.timeout_s,
    )


def _measure_all(
    session: Session,
    watch: Watch,
    state: RunState,
    options: SiteOptions,
    spec: ModelSpec,
    argv: Sequence[str],
) -> int:
    device_type = session.device.type
    cells = plan_cells(
        options,
        session.cluster,
        device_type=device_type,
        element_bytes=int(session.dtype.itemsize),
    )
    policy = policy_of(options, SAMPLE_S[device_type])
    is_first = session.rank == 0
    if options.dry_run:
        found = forecast_site(cells, session, watch, policy, options)
        return found.show() if is_first else 0
    record: SiteRecord | None = None
    asked = _asked(session, options)
    if is_first:
        metadata = site_metadata(
            session.infos,
            argv,
            options,
            backend=session.backend,
            dtype=session.dtype_name,
            gemm_size=gemm_size(options, device_type),
        )
        state.record = record = SiteRecord(options, metadata, asked)
    driver = SiteDriver(session, watch, policy, options)
    measure_missing(cells, session, state, driver.measure, described)
    watch.step("the end")
    session.barrier()
    return 0 if record is None else _summary(record, options, asked, spec)


def _asked(session: Session, options: SiteOptions) -> SiteDescription:
    info = session.infos[0]
    name = options.name or default_name(info.device, session.cluster)
    # A resumed run keeps the card of the earlier run unless the user names another.
    earlier = read_document(site_path(options.out, name)) if options.resume else None
    said = (earlier or {}).get("card")
    card_name = options.card or (said if isinstance(said, str) else guess_card(info.device))
    card = None if card_name is None else load_card(card_name)
    if card is not None and card_name is not None and not Path(card_name).is_file():
        card_name = card.path.stem  # replaces an alias by the card's name
    return SiteDescription(
        name=name,
        card=card,
        card_name=card_name,
        adapter_bytes_per_s=options.adapter_bytes_per_s or _adapters(earlier),
        cluster=session.cluster,
        device=info.device,
        torch=info.torch,
        dtype=session.dtype_name,
        synthetic=session.synthetic,
    )


def _adapters(document: Mapping[str, object] | None) -> float | None:
    """Return the nominal network rate in a site file, bytes/s; None if missing or invalid."""
    entry = (document or {}).get("adapter_bytes_per_s")
    value = entry.get("value") if isinstance(entry, dict) else None
    legal = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if legal and value > 0.0 else None  # type: ignore[arg-type,operator]


def described(measurement: Measurement) -> str:
    """Return the result of a cell as one line."""
    m = measurement
    if m.status != "ok" or m.operation not in (GEMM, HOST):
        return describe(m)
    if m.operation == HOST:
        forward_s, backward_s = (_middle(m.samples_s[w]) for w in ("forward", "backward"))
        return (
            f"{'small layer, host':<44s} {format_seconds(forward_s):>15s} forward, "
            f"{format_seconds(backward_s)} backward"
        )
    fading = _middle(m.samples_s["first"]) / _middle(m.samples_s["time"])
    return (
        f"{'matrix products':<44s} {format_seconds(_middle(m.samples_s['time'])):>15s} each, "
        f"at the end {fading:.3f} of the first second's rate"
    )


def _middle(samples_s: Sequence[float]) -> float:
    return sorted(samples_s)[len(samples_s) // 2]


# --------------------------------------------------------------------------------------------------
# The summary.


def _summary(
    record: SiteRecord, options: SiteOptions, asked: SiteDescription, spec: ModelSpec
) -> int:
    """Print the figures next to the card's, and the file paths; return 1 if cells failed."""
    _, notes = record.derived()
    if record.path.exists():
        site = read_site(load_object(record.path))
        card, cluster = asked.card, asked.cluster
        console = make_console(sys.stdout)
        print_heading(console, f"site {site.name}: {cluster.num_nodes} x {cluster.gpus_per_node}")
        print_table(console, ["what", "measured", "card", "factor"], _rows(site, card))
        if site.collectives:
            print_heading(console, "largest collectives, all groups at once")
            columns = ["operation", "ranks", "nodes", "size", "time", "bus", "card", "factor"]
            print_table(console, columns, _collective_rows(site, card))
        print_line(console, _foretold(site, spec, options.batch, cluster))
        sys.stdout.flush()
    return record.conclude(f"note: {note}" for note in notes)


def _rows(site: Site, card: Card | None) -> list[list[str]]:
    """Return rows of measured value, nominal value of the card, and their ratio."""

    def row(what: str, measured: str, said: str = "", factor: float | None = None) -> list[str]:
        return [what, measured, said, "" if factor is None else f"{factor:.3g}"]

    found = []
    if site.gemm_flop_per_s is not None and site.gemm_size is not None:
        said = ""
        if card is not None and site.clock is not None:
            side, dtype = site.gemm_size, site.gemm_dtype or "bf16"
            short_s = float(gemm_s(kernels_of(card), side, side, side, dtype=dtype))
            said = _tera(gemm_flop(side) / short_s)
        what = f"GEMMs of {site.gemm_size:,} in {site.gemm_dtype}, sustained"
        found.append(row(what, _tera(site.gemm_flop_per_s), said, site.clock))
    if site.copy_bytes_per_s is not None:
        said = "" if card is None else f"{card.memory_bytes_per_s / GB:,.0f} GB/s"
        measured = f"{site.copy_bytes_per_s / GB:,.4g} GB/s"
        found.append(row("copy, read and written", measured, said, site.memory_share))
    for what, factor in (("in a node", site.in_node), ("across nodes", site.cross_node)):
        if factor is not None:
            found.append(row(f"collectives {what}", "", "", factor))
    for what, time_s in (("forward", site.host_forward_s), ("backward", site.host_backward_s)):
        if time_s is not None:
            found.append(row(f"host, {what} of a small layer", format_seconds(time_s)))
    return found


def _tera(flop_per_s: float) -> str:
    return f"{flop_per_s / 1e12:,.4g} TFLOP/s"


def _collective_rows(site: Site, card: Card | None) -> list[list[str]]:
    """Return the largest size of every operation and group, with its bus bandwidth."""
    largest = {(row.operation, row.ranks, row.nodes): row for row in site.collectives}
    found = []
    for row in largest.values():
        times_s = [row.time_s]
        if card is not None:
            per_node = site.gpus_per_node or 1
            times_s.append(collective_s(card, row, per_node, site.adapter_bytes_per_s))
        rates = [
            bus_bytes_per_s(row.operation, row.ranks, row.size_bytes, time_s) for time_s in times_s
        ]
        found.append(
            [
                row.operation,
                str(row.ranks),
                str(row.nodes),
                format_size(row.size_bytes),
                format_seconds(row.time_s),
                *(f"{rate / GB:.4g} GB/s" for rate in rates),
                *(("", "") if card is None else (f"{times_s[-1] / row.time_s:.3g}",)),
            ]
        )
    return found


def _foretold(site: Site, spec: ModelSpec, batch: int, cluster: Cluster) -> str:
    """Return a sentence with the predicted time of a training step, from absolute figures."""
    element_bytes = 4.0 if site.gemm_dtype == "fp32" else 2.0
    ranks = cluster.world_size
    work = data_parallel_work(
        spec,
        batch=batch,
        ranks=ranks,
        nodes=cluster.num_nodes,
        element_bytes=element_bytes,
    )
    took = step_time_s(site, work)
    if took is None:
        return "no predicted training step: GEMMs, copies, host or all-rank times are missing"
    parts = f"GEMMs {format_seconds(took.products_s)}, memory {format_seconds(took.memory_s)}"
    if took.host_s:
        parts += f", host {format_seconds(took.host_s)}"
    if took.collectives_s:
        parts += f", all-reduce {format_seconds(took.collectives_s)}"
    return (
        "Predicted from these rates without overlap: a training step of "
        f"{spec.name} with {format_count(batch, 'sequence')} on each of "
        f"{format_count(ranks, 'rank')} takes {format_seconds(took.total_s)}: "
        f"{parts}."
    )
