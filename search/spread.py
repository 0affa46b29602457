"""The spread of a plan's step time: measured computation drawn again, and priced for one plan.

Source: cost-model.md "Spread of computation". The same replicas serve every plan of a cost model,
so that two plans can be compared replica by replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from search.build import CostModel
from search.cost.draws import NUM_REPLICAS
from search.cost.pipeline import evaluate
from search.result import WidestCell
from search.tables import PlanTables

__all__ = ["drawn_step_times", "interval_s", "widest_cell"]

F64 = NDArray[np.float64]


def drawn_step_times(
    cost: CostModel,
    tables: PlanTables,
    *,
    num_microbatches: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
) -> F64:
    """Return T of a plan in every replica of the measured computation, (NUM_REPLICAS,) seconds.

    tables : one table that holds exactly the plan's strategies and its vocabulary strategy.
    """
    table = (int(tables.table_stages[0]), int(tables.table_microbatch[0]), tables.table_dp[0])
    drawn = [
        np.stack(parts, axis=1)
        for parts in zip(
            *(
                cost.drawn_layer_s(k, tables.strategies, table)
                for k in range(len(cost.spec.layers))
            ),
            strict=True,
        )
    ]
    forward, backward, tail = drawn
    vocab = cost.drawn_vocab_s(tables.vocab, table)
    times = np.empty(NUM_REPLICAS)
    for r in range(NUM_REPLICAS):
        replica = replace(
            tables, forward_s=forward[r][None], backward_s=backward[r][None], tail_s=tail[r][None]
        )
        if vocab is not None:
            replica = replace(
                replica,
                vocab_forward_s=vocab[0][r][None],
                vocab_backward_s=vocab[1][r][None],
                vocab_tail_s=vocab[2][r][None],
            )
        times[r] = evaluate(
            replica,
            table=0,
            num_microbatches=num_microbatches,
            stage_sizes=stage_sizes,
            strategy_index=strategy_index,
            vocab_index=0,
        ).step_time_s
    return times


def interval_s(
    step_time_s: float, communication: tuple[float, float] | None, drawn: F64 | None
) -> tuple[float, float] | None:
    """Return the fast and the slow step time, both spreads together; None without any.

    communication : T under fast and slow communication; drawn : T of the replicas, of which the
    5th and 95th percentile count. The deviations add up: both are fast, or both are slow.
    """
    if communication is None and drawn is None:
        return None
    fast, slow = communication or (step_time_s, step_time_s)
    if drawn is not None:
        low, high = (float(x) for x in np.quantile(drawn, (0.05, 0.95)))
        fast += min(low - step_time_s, 0.0)
        slow += max(high - step_time_s, 0.0)
    return min(fast, step_time_s), max(slow, step_time_s)


def widest_cell(cost: CostModel, drawn: F64) -> WidestCell | None:
    """Return the cell that explains most of the variance of a plan's replicas; None without any.

    Cells are drawn independently, so the square of a cell's correlation with T is its share.
    """
    if np.ptp(drawn) == 0.0:
        return None
    shares = {
        name: float(np.corrcoef(times, drawn)[0, 1] ** 2)
        for draws in cost.all_draws
        for name, times in draws.cells().items()
    }
    name = max(shares, key=lambda cell: shares[cell])
    return WidestCell(name=name, share=shares[name])
