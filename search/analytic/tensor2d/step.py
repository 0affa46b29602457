"""One training step: the statistics of a candidate, and the rows of one layer with their times.

Source: arXiv 2410.00273; corrections are named in `quirks`. Outputs are in the units of the
published rows: seconds, 1e9 bytes, 1e12 FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from search.analytic.tensor2d.documents import Model, Strategy, System
from search.analytic.tensor2d.layers import layer_rows
from search.analytic.tensor2d.links import collective_s, transfer_s
from search.analytic.tensor2d.quirks import Quirks
from search.analytic.tensor2d.rows import Link, Pass, Row, Sizes

__all__ = ["Candidate", "PassTime", "RowTime", "row_time", "sizes_of", "step_statistics"]

_EFFICIENCY = 0.8
"""Share of the peak that every operation reaches."""
_LAUNCH_S = 20e-6
"""Latency of one kernel."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Degrees of one execution, and how many ranks of each group share a fast domain."""

    data: int
    columns: int
    rows: int = 1
    pipeline: int
    microbatch: int
    panels: int = 1
    columns_in_domain: int = 1
    rows_in_domain: int = 1
    data_in_domain: int = 1
    pipeline_in_domain: int = 1


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Times of one pass over one row, in seconds."""

    time_s: float
    link_s: float
    compute_s: float
    memory_s: float
    """Of the memory traffic that computing does not hide."""
    intensity: float


@dataclass(frozen=True, kw_only=True)
class RowTime:
    """Both passes over one row."""

    row: Row
    forward: PassTime
    backward: PassTime


def row_time(row: Row, system: System, quirks: Quirks) -> RowTime:
    """Return the times of a row."""
    forward = _pass_time(row, row.forward, system, quirks)
    backward = _pass_time(row, row.backward, system, quirks)
    if row.recomputed:
        backward = replace(backward, time_s=backward.time_s + forward.time_s)
        if not quirks.recompute_time_only:
            backward = replace(
                backward,
                link_s=backward.link_s + forward.link_s,
                compute_s=backward.compute_s + forward.compute_s,
                memory_s=backward.memory_s + forward.memory_s,
            )
            again = replace(row.backward, flops=row.backward.flops + row.forward.flops)
            row = replace(row, backward=again)
    return RowTime(row=row, forward=forward, backward=backward)


def _pass_time(row: Row, one: Pass, system: System, quirks: Quirks) -> PassTime:
    peak = system.matrix_flops_fp16 if row.matrix else system.vector_flops_fp16
    compute_s = _LAUNCH_S + one.flops * system.flops_units / (_EFFICIENCY * peak)
    traffic_s = one.traffic * system.element_size / system.hbm_bandwidth
    roof_s = max(compute_s, traffic_s)

    def seconds(links: Iterable[Link], parts: int = 1) -> float:
        return sum(
            collective_s(
                system,
                quirks,
                x.operation,
                x.volume * system.element_size / parts,
                x.ranks,
                x.in_domain,
            )
            for x in links
        )

    if not row.panels:
        link_s = seconds(one.links)
    elif quirks.extra_panel:
        panel_s = seconds(one.links, row.panels)
        link_s = panel_s + max(panel_s * row.panels - roof_s, 0.0)
    else:
        link_s = 0.0
        for loop in one.loops:
            panel_s = seconds(loop, row.panels)
            share_s = roof_s / len(one.loops) / row.panels
            link_s += panel_s + (row.panels - 1) * max(panel_s - share_s, 0.0)
    return PassTime(
        time_s=roof_s + link_s,
        link_s=link_s,
        compute_s=compute_s,
        memory_s=max(traffic_s - compute_s, 0.0),
        intensity=compute_s / traffic_s,
    )


def sizes_of(
    model: Model, strategy: Strategy, candidate: Candidate, system: System, quirks: Quirks
) -> Sizes:
    """Return the sizes of one layer under a candidate."""
    return Sizes(
        model=model,
        quirks=quirks,
        strategy=strategy,
        batch=candidate.microbatch,
        columns=candidate.columns,
        rows=candidate.rows,
        columns_in_domain=candidate.columns_in_domain,
        rows_in_domain=candidate.rows_in_domain,
        panels=candidate.panels,
        mask=system.mask_element_size / system.element_size,
        matrix_per_vector=system.matrix_flops_fp16 / system.vector_flops_fp16,
    )


def step_statistics(
    model: Model,
    strategy: Strategy,
    candidate: Candidate,
    batch: int,
    system: System,
    quirks: Quirks,
) -> dict[str, Any]:
    """Return the statistics of a candidate under their published names."""
    c = candidate
    sizes = sizes_of(model, strategy, c, system, quirks)
    rows = [row_time(row, system, quirks) for row in layer_rows(sizes)]
    size = system.element_size
    tf = sum(r.forward.time_s for r in rows)
    tb = sum(r.backward.time_s for r in rows)
    weights = sum(r.row.weights for r in rows) * size
    layers = model.depth // c.pipeline
    steps = batch // c.data // c.microbatch
    both = layers * steps

    dp = c.data * (c.rows if strategy == "2d-seqp" else 1)
    dp_domain = c.data_in_domain * (c.rows_in_domain if strategy == "2d-seqp" else 1)
    t_dp = 0.0
    for operation, hidden in (("allgather", tf), ("reducescatter", tb)):
        one = collective_s(system, quirks, operation, weights, dp, dp_domain)
        t_dp += one + max(one - hidden, 0.0) * (layers - 1)
    norm = next(r.row for r in rows if r.row.name == "ln1")
    t_pp = 2 * steps * _hop_s(c, norm.kept * size, system, quirks)
    t_bubble = (c.pipeline - 1) * ((tf + tb) * both + t_pp) / steps
    t = (tf + tb) * both + t_pp + t_bubble + t_dp

    def passes(name: str) -> float:
        total = sum(getattr(r.forward, name) + getattr(r.backward, name) for r in rows)
        return float(both * total)

    parts = {
        "comp": passes("compute_s"),
        "mem": passes("memory_s"),
        "tp_comm": passes("link_s"),
        "dp_comm": t_dp,
        "pp_comm": t_pp,
        "bubble": t_bubble,
    }
    wts = weights * layers
    optimizer = 6 * wts / (c.data * (c.rows if strategy == "2d-seqp" else 1))
    kept = sum(r.row.kept for r in rows) * size
    activations = kept * layers * min(c.pipeline, steps)
    flops = sum(r.row.forward.flops + r.row.backward.flops for r in rows)
    statistics = {
        "t": t,
        "flops_per_gpu": flops * system.flops_units * both,
        "mem": 2 * wts + optimizer + activations,
        **{f"t_{name}": value for name, value in parts.items()},
        **{f"{name}_frac": value / t for name, value in parts.items()},
        "wts_mem": wts,
        "wts_grad_mem": wts,
        "wts_optimizer_states_mem": optimizer,
        "acts_mem": activations,
    }
    if strategy == "1d":
        statistics["nv_tp"] = c.columns_in_domain
    else:
        statistics |= {"nv_tp1": c.columns_in_domain, "nv_tp2": c.rows_in_domain}
    return statistics | {"nv_dp": c.data_in_domain, "nv_pp": c.pipeline_in_domain}


def _hop_s(c: Candidate, volume_gb: float, system: System, quirks: Quirks) -> float:
    """Return the mean time of a transfer to the next stage."""
    if c.pipeline == 1:
        return 0.0
    if c.pipeline_in_domain == 1:
        return transfer_s(system, quirks, volume_gb, fast=False)
    slow_links = int(c.pipeline / c.pipeline_in_domain - 1)
    fast_links = c.pipeline - 1 - slow_links
    seconds = fast_links * transfer_s(system, quirks, volume_gb, fast=True)
    if not quirks.free_slow_links:
        seconds += slow_links * transfer_s(system, quirks, volume_gb, fast=False)
    return seconds / (c.pipeline - 1)
