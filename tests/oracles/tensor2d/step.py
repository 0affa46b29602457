"""One training step: the statistics of a candidate, and the rows of one layer with their times.

Source: arXiv 2410.00273; corrections are named in `quirks`. Outputs are in the units of the
published rows: seconds, 1e9 bytes, 1e12 FLOP.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from autopar.records import replace
from search.closed_form.tensor2d.documents import Model, Strategy, System
from search.closed_form.tensor2d.engine import Quirks
from tests.oracles.tensor2d.edges import embedding_rows, head_rows
from tests.oracles.tensor2d.layers import layer_rows
from tests.oracles.tensor2d.links import collective_s, hop_s
from tests.oracles.tensor2d.rows import Link, Pass, Row, Sizes

_EFFICIENCY = 0.8
"""Share of the peak that every operation reaches."""
_LAUNCH_S = 20e-6
"""Latency of one kernel."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Degrees of one execution, and the ranks of each group that share a fast domain."""

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
    """Seconds of memory traffic that computation does not hide."""
    intensity: float


@dataclass(frozen=True, kw_only=True)
class RowTime:
    """Times of both passes over one row."""

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


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over the rows of a layer, or of the layers around the stack, for one micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0
    link_s: float = 0.0
    weights: float = 0.0
    kept: float = 0.0
    flops: float = 0.0

    @property
    def time_s(self) -> float:
        """Return the time of both passes."""
        return self.forward_s + self.backward_s

    def plus(self, other: Sums) -> Sums:
        """Return the sums over both."""
        return Sums(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)}
        )


def sum_rows(rows: Iterable[RowTime]) -> Sums:
    """Return the sums over rows, with recomputation counted as in `row_time`."""
    times = list(rows)
    return Sums(
        forward_s=sum(r.forward.time_s for r in times),
        backward_s=sum(r.backward.time_s for r in times),
        compute_s=sum(r.forward.compute_s + r.backward.compute_s for r in times),
        memory_s=sum(r.forward.memory_s + r.backward.memory_s for r in times),
        link_s=sum(r.forward.link_s + r.backward.link_s for r in times),
        weights=sum(r.row.weights for r in times),
        kept=sum(r.row.kept for r in times),
        flops=sum(r.row.forward.flops + r.row.backward.flops for r in times),
    )


def all_rows(
    model: Model,
    strategy: Strategy,
    candidate: Candidate,
    system: System,
    quirks: Quirks,
    *,
    attention: str = "flash",
    recompute: bool = False,
) -> list[RowTime]:
    """Return the rows of the embedding, of one layer, and of the head, for one micro-batch."""
    sizes = sizes_of(model, strategy, candidate, system, quirks)
    rows = layer_rows(sizes, attention=attention, recompute=recompute)
    if model.vocab:
        rows = (*embedding_rows(sizes), *rows, *head_rows(sizes))
    return [row_time(row, system, quirks) for row in rows]


def step_statistics(
    model: Model,
    strategy: Strategy,
    candidate: Candidate,
    batch: int,
    system: System,
    quirks: Quirks,
    *,
    attention: str = "flash",
    recompute: bool = False,
) -> dict[str, Any]:
    """Return the statistics of a candidate under their published names.

    attention, recompute : as in `layer_rows`.

    With a vocabulary, times and FLOP are those of the slower of the first and the last stage. The
    bubble includes the time of the other one, and memory is that of the stage that needs more.
    """
    c = candidate
    sizes = sizes_of(model, strategy, c, system, quirks)
    table = layer_rows(sizes, attention=attention, recompute=recompute)
    rows = [row_time(row, system, quirks) for row in table]
    layer = sum_rows(rows)
    first, last = Sums(), Sums()
    if model.vocab:
        first = sum_rows(row_time(row, system, quirks) for row in embedding_rows(sizes))
        last = sum_rows(row_time(row, system, quirks) for row in head_rows(sizes))
    embedding = first.weights
    if c.pipeline == 1:
        edge, waiting_s = first.plus(last), 0.0
    else:
        edge = last if last.time_s >= first.time_s else first
        waiting_s = min(first.time_s, last.time_s)
    layers = model.depth // c.pipeline
    steps = batch // c.data // c.microbatch
    both = layers * steps
    t_layers = layer.time_s * both + edge.time_s * steps
    t_dp = _data_s(model, strategy, c, layer, (first, last), layers, system, quirks)
    hop = next(r.row for r in rows if r.row.name == "ln1").kept
    t_pp = (
        2
        * steps
        * hop_s(system, quirks, hop * system.element_size, c.pipeline, c.pipeline_in_domain)
    )
    t_bubble = (c.pipeline - 1) * (layer.time_s * both + t_pp) / steps + waiting_s
    t = t_layers + t_pp + t_bubble + t_dp
    parts = {
        "comp": both * layer.compute_s + steps * edge.compute_s,
        "mem": both * layer.memory_s + steps * edge.memory_s,
        "tp_comm": both * layer.link_s + steps * edge.link_s,
        "dp_comm": t_dp,
        "pp_comm": t_pp,
        "bubble": t_bubble,
    }

    gradients = model.gradient_bytes / 2

    def stage(around: Sums, weights: float, in_flight: int) -> tuple[float, float, float]:
        """Return weights, optimizer states and activations of a stage."""
        wts = (layer.weights * layers + weights) * system.element_size
        kept = (layer.kept * layers * in_flight + around.kept) * system.element_size
        return wts, 6 * wts / (c.data * (c.rows if strategy == "2d-seqp" else 1)), kept

    def needed(of: tuple[float, float, float]) -> float:
        return (1 + gradients) * of[0] + of[1] + of[2]

    in_flight = min(c.pipeline, steps)
    if c.pipeline == 1:
        shared = embedding if model.tied else 0.0
        stages = [stage(first.plus(last), first.weights + last.weights - shared, in_flight)]
    else:
        stages = [stage(first, first.weights, in_flight), stage(last, last.weights, 1)]
    most = max(stages, key=needed)
    wts, optimizer, activations = most
    statistics = {
        "t": t,
        "flops_per_gpu": (layer.flops * both + edge.flops * steps) * system.flops_units,
        "mem": needed(most),
        **{f"t_{name}": value for name, value in parts.items()},
        **{f"{name}_frac": value / t for name, value in parts.items()},
        "wts_mem": wts,
        "wts_grad_mem": wts * gradients,
        "wts_optimizer_states_mem": optimizer,
        "acts_mem": activations,
    }
    if strategy == "1d":
        statistics["nv_tp"] = c.columns_in_domain
    else:
        statistics |= {"nv_tp1": c.columns_in_domain, "nv_tp2": c.rows_in_domain}
    return statistics | {"nv_dp": c.data_in_domain, "nv_pp": c.pipeline_in_domain}


def _data_s(
    model: Model,
    strategy: Strategy,
    c: Candidate,
    layer: Sums,
    edges: tuple[Sums, Sums],
    layers: int,
    system: System,
    quirks: Quirks,
) -> float:
    """Return the exposed seconds of data-parallel communication.

    A layer hides that of the next one; the first has none before it. Embedding and head count as
    one more layer. The gradients of a matrix shared by two stages are reduced between them.
    """
    spread = strategy == "2d-seqp"
    ranks = c.data * (c.rows if spread else 1)
    near = c.data_in_domain * (c.rows_in_domain if spread else 1)
    gradients = model.gradient_bytes / 2
    first, last = (edge.weights for edge in edges)
    around = max(first, last)
    if c.pipeline == 1:
        around = last if model.tied else first + last
    seconds = 0.0
    for operation, size, hidden in (
        ("allgather", 1.0, layer.forward_s),
        ("reducescatter", gradients, layer.backward_s),
    ):
        scale = size * system.element_size
        one = collective_s(system, quirks, operation, layer.weights * scale, ranks, near)
        edge = collective_s(system, quirks, operation, around * scale, ranks, near)
        seconds += one + max(one - hidden, 0.0) * (layers - 1) + max(edge - hidden, 0.0)
    if model.tied and c.pipeline > 1:
        together = 2 if c.pipeline_in_domain == c.pipeline else 1
        volume = first * gradients * system.element_size
        seconds += collective_s(system, quirks, "allreduce", volume, 2, together)
    return seconds
