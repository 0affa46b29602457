"""Galvatron's formulas, implemented independently, and a plan's T with single terms replaced.

Source: galvatron.md section 3.2 (`Peer`: its newest release, to 1e-6 of its figures; `PeerV24`: its
v2.4.0, to 1e-3). `step_s` is its whole figure. `PlanCosts` contains a plan's cost term by term,
`switched` replaces terms by Galvatron's, and `attribution` changes our T into its figure one term
at a time. Galvatron floors micro-batches to whole samples per rank. Plans with other ones start
with the term `samples`: our T for the floored samples.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autopar.rates.measured import HardwareProfile
from autopar.records import replace
from autopar.run.model import ModelProfile, ModelSpec
from autopar.run.plan import LayerStrategy, Plan
from autopar.units import MIB, MS
from search.planning.cost.model import CostModel
from search.planning.cost.pipeline import evaluate

TERMS = (
    "compute",
    "tp",
    "ulysses",
    "zero3",
    "vocab",
    "redistribution",
    "transfers",
    "tail",
    "pipeline",
)
"""Terms to switch; `tail` is gradient reduction and optimizer, `pipeline` the formula of T."""


@dataclass(frozen=True, kw_only=True)
class PlanCosts:
    """Seconds of a plan by term, per layer or per stage."""

    num_microbatches: int
    stage_of_layer: tuple[int, ...]
    forward: dict[str, list[float]]
    """Seconds per layer: compute, tp, ulysses, zero3."""
    backward: dict[str, list[float]]
    vocab: list[tuple[float, float]]
    """Seconds of embedding and head per stage: forward and backward."""
    redistribution: list[tuple[float, float]]
    transfers: list[float]
    """Seconds per stage that a micro-batch's transfers add."""
    tail: list[float]
    """Seconds per stage, once a step (ours), or with its sync minus without (Galvatron's)."""
    peer_pipeline: bool = False

    def step_time_s(self) -> float:
        """Return the step time by our T (1F1B) or by Galvatron's pipeline formula, in seconds."""
        p, m = len(self.vocab), self.num_microbatches
        layers = [0.0] * p
        for part in (*self.forward.values(), *self.backward.values()):
            for j, value in zip(self.stage_of_layer, part, strict=True):
                layers[j] += value
        layers = [a + sum(b) + c for a, b, c in zip(
            layers, self.redistribution, self.transfers, strict=True
        )]  # fmt: skip
        stage = [a + sum(b) for a, b in zip(layers, self.vocab, strict=True)]
        if not self.peer_pipeline:
            return sum(stage) + (m - 1) * max(stage) + max(self.tail)
        first, rest = stage[0], sum(stage[1:])
        short = min(p - 1, m - 1) * first
        late = sum(stage) + stage[-1] * (m - 1)
        early = (
            max(short / 3, rest / 3) + max(short * 2 / 3, rest * 2 / 3) + first * max(0, m + 1 - p)
        )
        behind = [
            a + t - sum(stage[: j + 1])
            for j, (a, t) in enumerate(zip(layers, self.tail, strict=True))
        ]
        return max(late, early) + max(0.0, *behind)


class Peer:
    """Galvatron's figures for one model on one cluster, in ms and MB (2^20 bytes), bf16."""

    vocab_zero3 = (0.5, 0.5)
    """Shares of the embedding's message, forward and backward; only the no-sync list counts."""

    def __init__(self, spec: ModelSpec, model: ModelProfile, hardware: HardwareProfile) -> None:
        self.spec, self.model, self.hardware = spec, model, hardware
        layer = spec.layers[0]
        self.message_mb = layer.seq_length * layer.hidden_size * 2 / MIB
        self.k = hardware.overlap_coefficient
        times = model.layers[0].times
        self.layer_fit = np.polyfit([t.batch for t in times], [t.forward_s / MS for t in times], 1)
        others = model.other_times
        self.other_fit = np.polyfit(
            [t.batch for t in others], [t.forward_s / MS for t in others], 1
        )
        memory = model.layers[0].memory[layer.seq_length]
        self.parameter_mb = memory.parameter_count * 4 / MIB

    def ms_per_mb(self, size: int, *, consecutive: bool) -> float:
        """Return its coefficient of a group, 0 for one rank."""
        if size == 1:
            return 0.0
        return MIB / MS / self.hardware.allreduce_bytes_per_s[size, consecutive]

    def collective_ms(self, operation: str, megabytes: float, size: int) -> float:
        """Return the table's entry for this size, else the unweighted line through all entries."""
        # the peer prices all-gathers by the all-reduces of sp_time, which are not its bandwidths'
        timed = {("allreduce", group): c for group, c in self.hardware.sequence_curves.items()}
        curve = {**self.hardware.curves, **timed}[operation, size]
        sizes = curve.sizes_bytes / MIB
        hit = np.flatnonzero(sizes == megabytes)
        if hit.size:
            return float(curve.times_s[hit[0]] / MS)
        slope, intercept = np.polyfit(sizes, curve.times_s / MS, 1)
        return float(slope * megabytes + intercept)

    def layer(self, plan: Plan, s: LayerStrategy) -> dict[str, float]:
        """Return the parts of one layer and one micro-batch in seconds; `sync` is sync - nosync."""
        d = plan.world_size // (plan.num_stages * s.tp * s.cp)
        b = plan.global_batch // plan.num_microbatches // d
        forward = float(self.layer_fit[0] * (b / s.tp) + self.layer_fit[1])
        backward = forward * (3.0 if s.checkpoint else 2.0)
        group = d * s.cp * (s.tp if s.ulysses else 1)
        parameters = self.parameter_mb / (1 if s.ulysses else s.tp)
        message = 2 * (group - 1) / group * parameters * 0.5
        slope = self.ms_per_mb(group, consecutive=s.tp == 1 or s.ulysses)
        comm, window = message * slope * self.k, backward * self.k
        if comm > window and slope:
            sync = window + (message - window / (slope * self.k)) * slope
        else:
            sync = comm + (backward - comm / self.k)
        size = b * self.message_mb
        repeat = 1.5 if s.checkpoint else 1.0
        tp = ulysses = 0.0
        if s.tp > 1 and s.ulysses:
            ulysses = 4 * repeat * self.collective_ms("all2all", size, s.tp)
        elif s.tp > 1:
            tp = 6 * repeat * self.collective_ms("allreduce", size, s.tp) / 2
        transfer = 0.0
        if plan.num_stages > 1:
            rate = MIB / MS / self.hardware.p2p_bytes_per_s[plan.num_stages]
            transfer = plan.num_stages * 2 * size * rate / len(plan.layers)
        parts = {
            "forward": forward,
            "backward": backward,
            "tp": tp,
            "ulysses": ulysses,
            "zero3": 0.5 * message * slope if s.zero3 else 0.0,
            "transfer": transfer,
            "sync": sync - backward if d > 1 else 0.0,
        }
        return {name: value * MS for name, value in parts.items()}

    def vocab(self, plan: Plan) -> list[tuple[float, float]]:
        """Return forward and backward of embedding and head per stage, in seconds."""
        v, p = plan.vocab, plan.num_stages
        d = plan.world_size // (p * v.tp)
        b = plan.global_batch // plan.num_microbatches // d
        compute = float(self.other_fit[0] * (b / v.tp) + self.other_fit[1])
        group = d * (v.tp if v.ulysses else 1)
        slope = self.ms_per_mb(group, consecutive=v.tp == 1 or v.ulysses) * (group - 1) / group
        f, g = self.vocab_zero3 if v.zero3 else (0.0, 0.0)
        length = (self.spec.layers[0].seq_length,)
        found = [(0.0, 0.0)] * p
        for stage, position in ((0, "only"),) if p == 1 else ((0, "first"), (p - 1, "last")):
            states = self.model.other_memory[position][length].model_state_bytes
            message = states[1 if v.ulysses else v.tp] / MIB / 4 * 0.5 * slope
            share = compute if p == 1 else compute / 2
            gather = 0.0
            if v.tp > 1 and not v.ulysses:
                gather = self.collective_ms("allreduce", b * self.message_mb, v.tp) / 2
                gather *= 2 if p == 1 else 1
            forward = self._overlap(message * f, share) + gather
            found[stage] = (forward * MS, self._overlap(message * g, 2 * share) * MS)
        return found

    def _overlap(self, comm: float, compute: float) -> float:
        slowed = compute * self.k
        return comm + (slowed - comm) / self.k if slowed > comm else comm


class PeerV24(Peer):
    """The figures of v2.4.0, where they differ (section 3.2, "v2.4 differences").

    `tensor_space` is True for its `tp` space, which prices tensor parallelism by bus bandwidth.
    The share of the embedding's parameters that ZeRO-3 moves is the one that gives its published
    figure; how it gathers activations of the embedding is not documented (below 0.1 % of T).
    """

    vocab_zero3 = (1.0, 1.0)

    def __init__(
        self,
        spec: ModelSpec,
        model: ModelProfile,
        hardware: HardwareProfile,
        *,
        tensor_space: bool = False,
    ) -> None:
        super().__init__(spec, model, hardware)
        self.tensor_space = tensor_space

    def layer(self, plan: Plan, s: LayerStrategy) -> dict[str, float]:
        """Return `Peer.layer` without floored batches."""
        parts = super().layer(plan, s)
        ranks = plan.world_size // plan.num_stages
        d = ranks // s.tp
        size = plan.global_batch / plan.num_microbatches / d * self.message_mb
        repeat = 1.5 if s.checkpoint else 1.0
        if s.tp > 1 and not s.ulysses:
            if self.tensor_space:
                slope = self.ms_per_mb(s.tp, consecutive=not s.strided)
                tp = 2 * (s.tp - 1) / s.tp * 4 * size * repeat * slope
            else:
                tp = 4 * repeat * self.collective_ms("allreduce", size, s.tp) / 2
            parts["tp"] = tp * MS
        message = 2 * (d - 1) / d * self.parameter_mb / (1 if s.ulysses else s.tp) * 0.5
        group, consecutive = (d * s.tp, True) if s.ulysses else (d, s.tp == 1 or s.strided)
        slope = self.ms_per_mb(group, consecutive=consecutive)
        backward = parts["backward"] / MS
        window = backward / 2 if 2 * s.tp >= ranks else backward
        comm = message * slope * self.k
        if comm > window * self.k and slope:
            sync = window + (message - window / slope) * slope
        else:
            sync = comm + (window - comm / self.k)
        parts["sync"] = (sync - window) * MS if d > 1 else 0.0
        parts["zero3"] = 0.5 * message * slope * MS if s.zero3 else 0.0
        return parts


def floored(plan: Plan) -> Plan:
    """Return the plan with the samples that Galvatron counts: G/m/d rounded down.

    Raises ValueError when layers of different data degree would need different batches.
    """
    m = plan.num_microbatches
    ranks = plan.world_size // plan.num_stages
    degrees = {ranks // (s.tp * s.cp) for s in plan.layers} | {ranks // plan.vocab.tp}
    batches = {plan.global_batch // m // d * d * m for d in degrees}
    if len(batches) > 1:
        raise ValueError(f"data degrees {sorted(degrees)} count {sorted(batches)} samples")
    return replace(plan, global_batch=batches.pop())


def our_costs(cost: CostModel, plan: Plan) -> PlanCosts:
    """Return our cost of a 1F1B plan of one layer type, term by term; illegal ones too."""
    g = plan.global_batch // plan.num_microbatches
    strategies = sorted(set(plan.layers))
    index = [strategies.index(s) for s in plan.layers]
    keys = [(plan.num_stages, g, plan.default_dp_type)]
    candidates = [(0, plan.num_microbatches)]
    tables = cost.tables(strategies, [plan.vocab], keys, candidates, "1f1b", price_illegal=True)
    rows = cost.layer_rows(0, strategies, keys, price_illegal=True)
    found = evaluate(
        tables,
        table=0,
        num_microbatches=plan.num_microbatches,
        stage_sizes=plan.stage_sizes,
        strategy_index=index,
        vocab_index=0,
    )

    def part(values: dict[str, np.ndarray], *names: str) -> list[float]:
        return [sum(float(values[name][0, s]) for name in names) for s in index]

    p = plan.num_stages
    positions = [0] if p == 1 else [1] + [-1] * (p - 2) + [2]
    transfer = 2.0 * max(found.send_s) * (p - 1) / p
    return PlanCosts(
        num_microbatches=plan.num_microbatches,
        stage_of_layer=plan.stage_of_layer(),
        forward={
            "compute": part(rows.forward, "forward"),
            "tp": part(rows.forward, "tp"),
            "ulysses": part(rows.forward, "ulysses"),
            "zero3": part(rows.forward, "zero3"),
        },
        backward={
            "compute": part(rows.backward, "backward", "recompute", "sync", "cp"),
            "tp": part(rows.backward, "tp"),
            "ulysses": part(rows.backward, "ulysses"),
            "zero3": part(rows.backward, "zero3"),
        },
        vocab=[
            (0.0, 0.0)
            if at < 0
            else (
                float(tables.vocab_forward_s[0, at, 0]),
                float(tables.vocab_backward_s[0, at, 0]),
            )
            for at in positions
        ],
        redistribution=list(
            zip(found.redistribute_forward_s, found.redistribute_backward_s, strict=True)
        ),
        transfers=[transfer] * p,
        tail=list(found.tail_s),
    )


def switched(costs: PlanCosts, peer: Peer, plan: Plan, terms: Collection[str]) -> PlanCosts:
    """Return the costs with these terms by Galvatron's formulas."""
    parts = [peer.layer(plan, s) for s in plan.layers]
    forward, backward = dict(costs.forward), dict(costs.backward)
    none = [0.0] * len(parts)
    for term in terms:
        if term == "compute":
            forward[term] = [x["forward"] for x in parts]
            backward[term] = [x["backward"] for x in parts]
        elif term in forward:
            forward[term], backward[term] = [x[term] for x in parts], none
    p = plan.num_stages
    per_stage = {"transfer": [0.0] * p, "sync": [0.0] * p}
    for j, x in zip(costs.stage_of_layer, parts, strict=True):
        for name, values in per_stage.items():
            values[j] += x[name]
    result = replace(costs, forward=forward, backward=backward)
    if "vocab" in terms:
        result = replace(result, vocab=peer.vocab(plan))
    if "redistribution" in terms:
        result = replace(result, redistribution=[(0.0, 0.0)] * p)
    if "transfers" in terms:
        result = replace(result, transfers=per_stage["transfer"])
    if "tail" in terms:
        result = replace(result, tail=per_stage["sync"])
    return replace(result, peer_pipeline="pipeline" in terms)


def step_s(peer: Peer, plan: Plan) -> float:
    """Return Galvatron's own figure for a plan, in seconds, without any term of ours."""
    empty = PlanCosts(
        num_microbatches=plan.num_microbatches,
        stage_of_layer=plan.stage_of_layer(),
        forward={name: [] for name in ("compute", "tp", "ulysses", "zero3")},
        backward={name: [] for name in ("compute", "tp", "ulysses", "zero3")},
        vocab=[],
        redistribution=[],
        transfers=[],
        tail=[],
    )
    return switched(empty, peer, plan, TERMS).step_time_s()


def attribution(cost: CostModel, peer: Peer, plan: Plan) -> list[tuple[str, float, float]]:
    """Return (term, our T with only it switched, T with it and all before switched), in seconds."""
    counted = (
        floored(plan)
        if plan.global_batch % plan.num_microbatches
        or any(
            plan.global_batch // plan.num_microbatches % max(1, plan.data_degree(i))
            for i in range(len(plan.layers))
        )
        else plan
    )
    costs = our_costs(cost, counted)
    start = costs.step_time_s()
    found = [] if counted is plan else [("samples", start, start)]
    return found + [
        (
            term,
            switched(costs, peer, counted, (term,)).step_time_s(),
            switched(costs, peer, counted, TERMS[: i + 1]).step_time_s(),
        )
        for i, term in enumerate(TERMS)
    ]
