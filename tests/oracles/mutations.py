"""Problems without one term of the step time or of the memory.

The solution of a mutated problem is the answer of a planner that lacks the term. The instance set
is good enough if every such answer is wrong for at least one instance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import lcm
from typing import Any

import numpy as np
from msgspec.structs import asdict

from autopar.records import replace
from search.planning.cost.tables import PlanTables
from tests.oracles.brute import BruteSolution
from tests.oracles.instances import Instance
from tests.oracles.reference import evaluate

Problem = tuple[PlanTables, int]
"""Tables and budget in bytes."""
BYTE_FIELDS = (
    "static_bytes",
    "transient_bytes",
    "shared_bytes",
    "vocab_static_bytes",
    "vocab_transient_bytes",
    "vocab_shared_bytes",
    "stage_fixed_bytes",
)
M_FIRST = ("static_bytes", "transient_bytes", "vocab_static_bytes", "vocab_transient_bytes")
"""Arrays whose leading axis is [m == 1, m > 1]."""
NOT_PER_TABLE = (
    "layer_type",
    "strategy_layout",
    "vocab_layout",
    "candidate_table",
    "candidate_microbatches",
)
ACTIVATIONS = ("activation_bytes", "vocab_activation_bytes")
MANY = 100_000


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A way to remove one term from a problem."""

    term: str
    """Name of the term in `brute.PlanSpace`."""
    mutate: Callable[[PlanTables, int], Problem]
    keep: Callable[[PlanTables, int], bool] = lambda tables, candidate: True
    """True for candidates for which `mutate` removes only this term."""
    needs: frozenset[str] = frozenset()
    """Labels that an instance must have."""
    exact: bool = True
    """True if the term is removed completely, False if it is weakened."""


def restricted(instance: Instance, mutation: Mutation) -> PlanTables | None:
    """Return the instance's tables with the candidates that suit the mutation, None without any."""
    if not mutation.needs <= instance.labels:
        return None
    tables = instance.tables
    kept = [q for q in range(len(tables.candidate_table)) if mutation.keep(tables, q)]
    if not kept:
        return None
    return replace(
        tables,
        candidate_table=tables.candidate_table[kept],
        candidate_microbatches=tables.candidate_microbatches[kept],
    )


def is_wrong(tables: PlanTables, budget_bytes: int, truth: BruteSolution, answer: Any) -> bool:
    """Return True if an answer has another status, does not fit, or is slower than the optimum."""
    if answer.status != truth.status:
        return True
    if truth.status == "infeasible":
        return bool(answer.smallest_budget_bytes != truth.smallest_budget_bytes)
    priced = evaluate(
        tables,
        answer.candidate,
        answer.stage_sizes,
        answer.strategy_index,
        answer.vocab_index,
    )
    slower = priced.samples_per_s < truth.samples_per_s * (1 - 1e-9)
    return slower or priced.peak_bytes > budget_bytes or not priced.valid


def zero(*names: str) -> Callable[[PlanTables, int], Problem]:
    """Return a mutation that zeroes arrays."""

    def mutate(tables: PlanTables, budget_bytes: int) -> Problem:
        emptied: dict[str, Any] = {name: np.zeros_like(getattr(tables, name)) for name in names}
        return replace(tables, **emptied), budget_bytes

    return mutate


def zero_moves(rows: slice, columns: slice) -> Callable[[PlanTables, int], Problem]:
    """Return a mutation that makes redistribution between some layouts free."""

    def mutate(tables: PlanTables, budget_bytes: int) -> Problem:
        changed: dict[str, Any] = {}
        for name in ("redistribute_forward_s", "redistribute_backward_s"):
            changed[name] = getattr(tables, name).copy()
            changed[name][..., rows, columns] = 0.0
        return replace(tables, **changed), budget_bytes

    return mutate


def per_candidate(tables: PlanTables) -> PlanTables:
    """Return the same problem with a separate table for every candidate."""
    n = tables.candidate_table
    copies: dict[str, Any] = {}
    for name, table in asdict(tables).items():
        if isinstance(table, np.ndarray) and name not in NOT_PER_TABLE:
            copies[name] = np.ascontiguousarray(table[:, n] if name in M_FIRST else table[n])
    return replace(
        tables,
        table_dp=tuple(tables.table_dp[i] for i in n),
        candidate_table=np.arange(len(n), dtype=np.int32),
        **copies,
    )


def _times(table: Any, factors: Iterable[int], axis: int) -> Any:
    """Multiply the entries of every table (along `axis`) by its factor."""
    shape = [1] * table.ndim
    shape[axis] = -1
    return table * np.array(list(factors), dtype=np.int64).reshape(shape)


def no_bottleneck(tables: PlanTables, budget_bytes: int) -> Problem:
    """Reduce micro-batches to the fewest possible, with the batch and memory of all of them."""
    tables = per_candidate(tables)
    m = tables.candidate_microbatches.astype(np.int64)
    gpipe = tables.pipeline_type == "gpipe"
    few = np.ones_like(m) if gpipe else np.minimum(m, tables.table_stages)
    changed: dict[str, Any] = {
        # G stays, up to a factor common to all candidates
        "table_microbatch": tables.table_microbatch * m * lcm(*few.tolist()) // few,
        "candidate_microbatches": few.astype(np.int32),
    }
    for name in M_FIRST:
        table = getattr(tables, name).copy()
        table[0, m > 1] = table[1, m > 1]
        changed[name] = table
    if gpipe:
        held = np.where(tables.table_stages > 1, m, 1)
        changed |= {name: _times(getattr(tables, name), held, 0) for name in ACTIVATIONS}
    return replace(tables, **changed), budget_bytes


def no_sum(tables: PlanTables, budget_bytes: int) -> Problem:
    """Increase micro-batches until only the bottleneck counts; tails grow with them."""
    tables = per_candidate(tables)
    m = tables.candidate_microbatches
    changed: dict[str, Any] = {
        "candidate_microbatches": m * np.int32(MANY),
        "tail_s": tables.tail_s * MANY,
        "vocab_tail_s": tables.vocab_tail_s * MANY,
    }
    for name in M_FIRST:
        table = getattr(tables, name).copy()
        table[1, m == 1] = table[0, m == 1]
        changed[name] = table
    tables = replace(tables, **changed)
    if tables.pipeline_type == "1f1b":
        return tables, budget_bytes
    larger: dict[str, Any] = {name: getattr(tables, name) * MANY for name in BYTE_FIELDS}
    return replace(tables, **larger), budget_bytes * MANY


def no_in_flight(tables: PlanTables, budget_bytes: int) -> Problem:
    """Keep one micro-batch with GPipe: everything else is a multiple larger."""
    tables = per_candidate(tables)
    m = np.where(tables.table_stages > 1, tables.candidate_microbatches, 1).tolist()
    scale = lcm(*m)
    changed: dict[str, Any] = {name: getattr(tables, name) * scale for name in BYTE_FIELDS}
    changed |= {
        name: _times(getattr(tables, name), [scale // i for i in m], 0) for name in ACTIVATIONS
    }
    return replace(tables, **changed), budget_bytes * scale


def _stages(tables: PlanTables, candidate: int) -> int:
    return int(tables.table_stages[tables.candidate_table[candidate]])


OWN = frozenset({"own vocab layout"})  # the vocabulary has a separate layout, the last one
LAYERS, VOCAB = slice(None, -1), slice(-1, None)

MUTATIONS = (
    Mutation(term="sum_of_stages", mutate=no_sum, exact=False),
    Mutation(term="bottleneck", mutate=no_bottleneck, needs=frozenset({"gpipe"})),
    Mutation(
        term="bottleneck", mutate=no_bottleneck, needs=frozenset({"1f1b"}), exact=False
    ),  # p - 1 of the bottleneck's micro-batches remain
    Mutation(term="tail", mutate=zero("tail_s", "vocab_tail_s")),
    Mutation(term="send", mutate=zero("send_s"), needs=frozenset({"1f1b"})),
    Mutation(term="send", mutate=zero("send_s"), needs=frozenset({"gpipe"})),
    Mutation(term="forward", mutate=zero("forward_s")),
    Mutation(term="backward", mutate=zero("backward_s")),
    Mutation(
        term="redistribution_in_stage",
        mutate=zero_moves(LAYERS, LAYERS),
        keep=lambda tables, q: _stages(tables, q) == 1,
        needs=OWN,
    ),
    Mutation(
        term="redistribution_across_stages",
        mutate=zero_moves(LAYERS, LAYERS),
        keep=lambda tables, q: _stages(tables, q) == len(tables.layer_type) > 1,
        needs=OWN,
    ),
    Mutation(term="embedding_to_first", mutate=zero_moves(VOCAB, LAYERS), needs=OWN),
    Mutation(term="last_to_head", mutate=zero_moves(LAYERS, VOCAB), needs=OWN),
    Mutation(term="vocab_time", mutate=zero("vocab_forward_s", "vocab_backward_s")),
    Mutation(term="vocab_tail", mutate=zero("vocab_tail_s")),
    Mutation(term="static", mutate=zero("static_bytes")),
    Mutation(term="activation", mutate=zero("activation_bytes")),
    Mutation(term="in_flight", mutate=no_in_flight, needs=frozenset({"gpipe"})),
    Mutation(term="transient", mutate=zero("transient_bytes")),
    Mutation(term="shared", mutate=zero("shared_bytes")),
    Mutation(term="vocab_static", mutate=zero("vocab_static_bytes")),
    Mutation(term="vocab_activation", mutate=zero("vocab_activation_bytes")),
    Mutation(term="vocab_transient", mutate=zero("vocab_transient_bytes")),
    Mutation(term="vocab_shared", mutate=zero("vocab_shared_bytes")),
    Mutation(term="fixed", mutate=zero("stage_fixed_bytes")),
)
