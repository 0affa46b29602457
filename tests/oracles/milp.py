"""The planning problem as an integer program for HiGHS, for sizes beyond brute force.

p and m are enumerated outside: one program per candidate, which minimises T. Binary x[l, s, j] is 1
if layer l runs strategy s on stage j; v[e] chooses the vocabulary strategy. Redistribution is a
flow y[l, j, a, b] from layout a to layer l's layout b on stage j, whose margins are the choices of
the two layers. With integral x it is their product. It is charged to the receiving stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from search.planning.cost.tables import PlanTables
from tests.oracles.brute import StageInstance
from tests.oracles.reference import POSITION, STAGE_KIND, evaluate, stage_kind

Term = tuple[int, float]
"""(variable, coefficient)"""
INF = float("inf")


@dataclass(frozen=True, kw_only=True)
class MilpSolution:
    """Optimum over all candidates; `step_time_s` is recomputed from the rounded plan."""

    status: str
    candidate: int = -1
    stage_sizes: tuple[int, ...] = ()
    strategy_index: tuple[int, ...] = ()
    vocab_index: int = -1
    step_time_s: float = INF
    samples_per_s: float = 0.0


@dataclass
class Program:
    """Rows and columns of one program, collected term by term."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integral: list[int] = field(default_factory=list)
    rows: list[tuple[list[Term], float, float]] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, upper: float = INF, binary: bool = False) -> int:
        """Add a variable >= 0 and return its number."""
        self.cost.append(cost)
        self.upper.append(min(upper, 1.0) if binary else upper)
        self.integral.append(int(binary))
        return len(self.cost) - 1

    def require(self, terms: Iterable[Term], low: float, high: float) -> None:
        """Add low <= sum of terms <= high."""
        self.rows.append((list(terms), low, high))

    def solve(self) -> np.ndarray | None:
        """Return the optimal values, None when nothing fits."""
        entries = [(r, i, a) for r, (terms, _, _) in enumerate(self.rows) for i, a in terms]
        r, i, a = (np.array(column) for column in zip(*entries, strict=True))
        matrix = coo_array((a, (r, i)), shape=(len(self.rows), len(self.cost))).tocsr()
        low, high = np.array([row[1] for row in self.rows]), np.array([row[2] for row in self.rows])
        answer = milp(
            np.array(self.cost),
            integrality=np.array(self.integral),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"mip_rel_gap": 0.0},
        )
        assert answer.status in (0, 2), answer.message
        return None if answer.status == 2 else answer.x


def solve_tables(tables: PlanTables, budget_bytes: int) -> MilpSolution:
    """Return the plan of highest throughput, by one integer program per candidate."""
    best = MilpSolution(status="infeasible")
    for q in range(len(tables.candidate_table)):
        batch = int(tables.candidate_batch[q])
        limit = batch / best.samples_per_s if best.samples_per_s else INF
        found = _solve_candidate(tables, q, budget_bytes, limit)
        if found is not None and found.samples_per_s > best.samples_per_s:
            best = found
    return best


def _solve_candidate(
    t: PlanTables, q: int, budget_bytes: int, limit_s: float
) -> MilpSolution | None:
    """Return the best plan of one candidate with T <= limit_s, None when there is none."""
    n, m = int(t.candidate_table[q]), int(t.candidate_microbatches[q])
    p, many = int(t.table_stages[n]), int(m > 1)
    types = t.layer_type.tolist()
    L, S, Y, E = len(types), len(t.strategies), len(t.layouts), len(t.vocab)
    layout, vocab_layout = t.strategy_layout.tolist(), t.vocab_layout.tolist()
    usable = t.valid[n]
    # The slowest layers together are a thousand units long, so that the solver's absolute tolerance
    # on the rows of the maxima (1e-7) stays far below 1e-6 of T; bytes are scaled to the budget.
    second = 1000.0 / max(
        1e-12, float(np.where(usable, t.forward_s[n] + t.backward_s[n], 0).max()) * L
    )
    byte = 1.0 / max(1, budget_bytes)
    program = Program()

    def pipe(j: int, table: str, *lead: int) -> list[tuple[int, float]]:
        """(e, value) of a vocabulary table on stage j; nothing on a middle stage."""
        kind = stage_kind(j, p)
        if kind not in POSITION:
            return []
        row = getattr(t, table)[(*lead, n, POSITION[kind])]
        return [(e, float(row[e])) for e in range(E)]

    x = [
        [
            [program.variable(binary=True, upper=float(usable[k, s])) for _ in range(p)]
            for s in range(S)
        ]
        for k in types
    ]
    v = [program.variable(binary=True, upper=float(t.vocab_valid[n, e])) for e in range(E)]
    program.require([(i, 1.0) for i in v], 1, 1)
    program.require([(x[0][s][0], 1.0) for s in range(S)], 1, 1)
    program.require([(x[-1][s][p - 1], 1.0) for s in range(S)], 1, 1)
    for layer in range(L):
        program.require([(x[layer][s][j], 1.0) for s in range(S) for j in range(p)], 1, 1)
        if layer:  # the stage stays or advances by one, so that none is empty
            steps = [(x[layer][s][j], float(j)) for s in range(S) for j in range(p)]
            steps += [(x[layer - 1][s][j], -float(j)) for s in range(S) for j in range(p)]
            program.require(steps, 0, 1)

    forward: list[list[Term]] = [[] for _ in range(p)]
    backward: list[list[Term]] = [[] for _ in range(p)]

    def move(
        producers: list[list[Term]], receivers: list[list[Term]], k: int, j: list[int]
    ) -> None:
        """Charge moves from producers' to receivers' layouts; receivers per (stage, layout)."""
        flows_in: list[list[Term]] = [[] for _ in range(Y)]
        for stage_index, stage in enumerate(j):
            for b in range(Y):
                flow = [program.variable() for _ in range(Y)]
                for a in range(Y):
                    flows_in[a].append((flow[a], 1.0))
                    row = (n, k, a, b)
                    forward[stage].append((flow[a], float(t.redistribute_forward_s[row]) * second))
                    backward[stage].append(
                        (flow[a], float(t.redistribute_backward_s[row]) * second)
                    )
                chosen = [(i, -c) for i, c in receivers[stage_index * Y + b]]
                program.require([(i, 1.0) for i in flow] + chosen, 0, 0)
        for a in range(Y):
            program.require(flows_in[a] + [(i, -c) for i, c in producers[a]], 0, 0)

    def by_layout(layer: int, stages: list[int]) -> list[list[Term]]:
        return [
            [(x[layer][s][j], 1.0) for s in range(S) for j in stages if layout[s] == b]
            for b in range(Y)
        ]

    vocab_by_layout = [[(v[e], 1.0) for e in range(E) if vocab_layout[e] == b] for b in range(Y)]
    everywhere = list(range(p))
    move(vocab_by_layout, by_layout(0, [0]), types[0], [0])
    for layer in range(1, L):
        receivers = [terms for j in everywhere for terms in by_layout(layer, [j])]
        move(by_layout(layer - 1, everywhere), receivers, types[layer - 1], everywhere)
    move(by_layout(L - 1, [p - 1]), vocab_by_layout, types[-1], [p - 1])

    tail, tau, sigma = program.variable(cost=1.0), [], []
    for j in everywhere:
        in_flight = p - j if t.pipeline_type == "1f1b" or p == 1 else m
        cells = [(layer, k, s) for layer, k in enumerate(types) for s in range(S)]
        forward[j] += [
            (x[layer][s][j], float(t.forward_s[n, k, s]) * second) for layer, k, s in cells
        ]
        backward[j] += [
            (x[layer][s][j], float(t.backward_s[n, k, s]) * second) for layer, k, s in cells
        ]
        forward[j] += [(v[e], value * second) for e, value in pipe(j, "vocab_forward_s")]
        backward[j] += [(v[e], value * second) for e, value in pipe(j, "vocab_backward_s")]
        late = [(x[layer][s][j], float(t.tail_s[n, k, s]) * second) for layer, k, s in cells]
        late += [(v[e], value * second) for e, value in pipe(j, "vocab_tail_s")]
        program.require([*late, (tail, -1.0)], -INF, 0)
        kept = [
            (
                x[layer][s][j],
                (
                    float(t.static_bytes[many, n, k, s])
                    + float(t.activation_bytes[n, k, s]) * in_flight
                )
                * byte,
            )
            for layer, k, s in cells
        ]
        kept += [(v[e], value * byte) for e, value in pipe(j, "vocab_static_bytes", many)]
        kept += [(v[e], value * in_flight * byte) for e, value in pipe(j, "vocab_activation_bytes")]
        tau.append(program.variable())
        sigma.append(program.variable())
        for most, layer_rows, vocab_rows in (
            (tau[j], t.transient_bytes[many, n], pipe(j, "vocab_transient_bytes", many)),
            (sigma[j], t.shared_bytes[n], pipe(j, "vocab_shared_bytes")),
        ):
            for layer, k in enumerate(types):
                here = [(x[layer][s][j], float(layer_rows[k, s]) * byte) for s in range(S)]
                program.require([*here, (most, -1.0)], -INF, 0)
            program.require(
                [*((v[e], value * byte) for e, value in vocab_rows), (most, -1.0)], -INF, 0
            )
        fixed = float(t.stage_fixed_bytes[n, STAGE_KIND[stage_kind(j, p)]])
        program.require(
            [*kept, (tau[j], 1.0), (sigma[j], 1.0)], -INF, (budget_bytes - fixed) * byte
        )

    send = []  # c_j at least the transfer of whichever layer ends stage j
    for j in range(p - 1):
        send.append(program.variable())
        for layer in range(L - 1):
            price = [float(t.send_s[n, types[layer], layout[s]]) * second for s in range(S)]
            top = max(price)
            leaves = [(x[layer][s][j], price[s]) for s in range(S)]
            leaves += [(x[layer + 1][s][j + 1], top) for s in range(S)]
            program.require([*leaves, (send[j], -1.0)], -INF, top)
    if t.pipeline_type == "1f1b":
        slowest_send = program.variable()
        for c in send:
            program.require([(c, 1.0), (slowest_send, -1.0)], -INF, 0)
        bottleneck = program.variable(cost=float(m - 1))
        for j in everywhere:
            share = (slowest_send, 2.0 * (p - 1) / p)
            program.require([*forward[j], *backward[j], share, (bottleneck, -1.0)], -INF, 0)
        program.cost[slowest_send] += 2.0 * (p - 1)  # p stages, each 2*cbar*(p-1)/p
    else:
        for direction in (forward, backward):
            bottleneck = program.variable(cost=float(m - 1))
            for j in everywhere:
                program.require([*direction[j], (bottleneck, -1.0)], -INF, 0)
            for c in send:
                program.require([(c, 1.0), (bottleneck, -1.0)], -INF, 0)
        for c in send:
            program.cost[c] += 2.0
    for j in everywhere:
        for i, price_s in forward[j] + backward[j]:
            program.cost[i] += price_s
    if limit_s < INF:  # only a plan at least as fast is of interest; the slack is for rounding
        objective = [(i, c) for i, c in enumerate(program.cost) if c]
        program.require(objective, -INF, limit_s * second * (1 + 1e-6))

    values = program.solve()
    if values is None:
        return None
    choice, stages = [], []
    for layer in range(L):
        s, j = max(
            ((s, j) for s in range(S) for j in everywhere),
            key=lambda at: values[x[layer][at[0]][at[1]]],
        )
        choice.append(s)
        stages.append(j)
    sizes = tuple(stages.count(j) for j in everywhere)
    e = max(range(E), key=lambda e: values[v[e]])
    priced = evaluate(t, q, sizes, choice, e)
    assert priced.valid
    assert priced.peak_bytes <= budget_bytes, "the solver's tolerance let an oversized plan through"
    objective_s = float(np.dot(program.cost, values)) / second
    assert abs(objective_s - priced.step_time_s) <= 1e-6 * priced.step_time_s
    return MilpSolution(
        status="optimal",
        candidate=q,
        stage_sizes=sizes,
        strategy_index=tuple(choice),
        vocab_index=e,
        step_time_s=priced.step_time_s,
        samples_per_s=priced.samples_per_s,
    )


def solve_stage(instance: StageInstance) -> float:
    """Return the optimal total of a one-stage problem in seconds, infinity when nothing fits."""
    L, S = instance.time_s.shape
    second = 1.0 / max(1e-12, float(instance.time_s.max()))
    byte = 1.0 / max(1.0, instance.budget_bytes)
    program = Program()
    x = [
        [program.variable(binary=True, cost=float(c) * second) for c in row]
        for row in instance.time_s
    ]
    kept = [
        (x[layer][s], float(instance.memory_bytes[layer, s]) * byte)
        for layer in range(L)
        for s in range(S)
    ]
    for row in x:
        program.require([(i, 1.0) for i in row], 1, 1)
    for layer in range(1, L):
        y = [
            [program.variable(cost=float(c) * second) for c in row]
            for row in instance.transition_s[layer]
        ]
        for s in range(S):
            program.require([*((y[s][b], 1.0) for b in range(S)), (x[layer - 1][s], -1.0)], 0, 0)
            program.require([*((y[a][s], 1.0) for a in range(S)), (x[layer][s], -1.0)], 0, 0)
    if instance.transient_bytes is not None:
        most = program.variable()
        kept.append((most, 1.0))
        for row, bytes_of in zip(x, instance.transient_bytes, strict=True):
            here = [(i, float(b) * byte) for i, b in zip(row, bytes_of, strict=True)]
            program.require([*here, (most, -1.0)], -INF, 0)
    program.require(kept, -INF, instance.budget_bytes * byte)
    values = program.solve()
    return INF if values is None else float(np.dot(program.cost, values)) / second
