"""Which ranks talk to which: the groups of every processor of an execution.

Ranks count tensor parallelism fastest, then pipeline stages, then data parallelism:
`(data * p + pipeline) * t + tensor`.
"""

from __future__ import annotations

from typing import Any

from search.analytic.calculon.documents import Execution

__all__ = ["peers"]


def peers(execution: Execution) -> dict[str, dict[str, Any]]:
    """Return the partners of every rank by its number as text, groups of one left out.

    `tensor` and `data` are the ranks of its group, itself included; `pipeline` is the next stage,
    the first one after the last.
    """
    t, p, d = execution.tensor_par, execution.pipeline_par, execution.data_par

    def rank(data: int, pipeline: int, tensor: int) -> int:
        return (data * p + pipeline) * t + tensor

    found: dict[str, dict[str, Any]] = {}
    for data in range(d):
        for pipeline in range(p):
            for tensor in range(t):
                partners: dict[str, Any] = {}
                if t > 1:
                    partners["tensor"] = [rank(data, pipeline, n) for n in range(t)]
                if p > 1:
                    partners["pipeline"] = rank(data, (pipeline + 1) % p, tensor)
                if d > 1:
                    partners["data"] = [rank(n, pipeline, tensor) for n in range(d)]
                found[str(rank(data, pipeline, tensor))] = partners
    return found
