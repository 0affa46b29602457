"""The answer of a search as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search.analytic.answers import Answer, Point

__all__ = ["json_document"]


def json_document(
    answers: Sequence[Answer], paths: Sequence[str], *, alone: bool, frontier: bool
) -> dict[str, Any]:
    """Return place -> `execution` and `stats` of one search, or all that was found by search.

    paths : of the axes of a sweep. alone : one search was asked for, and its best executions.
    """
    if alone:
        return _rows(answers[0].best)
    return {
        "searches": [
            {
                "num_procs": answer.processors,
                **({} if answer.strategy is None else {"strategy": answer.strategy}),
                **({"sweep": dict(zip(paths, answer.values, strict=True))} if paths else {}),
                "complete": answer.complete,
                "considered": answer.considered,
                "feasible": answer.feasible,
                "rejected": dict(answer.rejected),
                "best": _rows(answer.best),
                **({"frontier": _rows(answer.frontier)} if frontier else {}),
            }
            for answer in answers
        ]
    }


def _rows(points: Sequence[Point]) -> dict[str, Any]:
    return {
        str(place): {"execution": dict(point.execution), "stats": dict(point.statistics)}
        for place, point in enumerate(points)
    }
