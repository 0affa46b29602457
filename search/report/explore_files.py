"""The answer of a search as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search.analytic.answers import Answer, Point

__all__ = ["json_document"]


def json_document(
    answers: Sequence[Answer], paths: Sequence[str], *, whole: bool
) -> dict[str, Any]:
    """Return place -> `execution` and `stats` for one search, else all under `searches`.

    paths : of the axes of a sweep. whole : the second form also for one search.
    """
    if len(answers) == 1 and not paths and not whole:
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
                **({"frontier": _rows(answer.frontier)} if whole else {}),
            }
            for answer in answers
        ]
    }


def _rows(points: Sequence[Point]) -> dict[str, Any]:
    return {
        str(place): {"execution": dict(point.execution), "stats": dict(point.statistics)}
        for place, point in enumerate(points)
    }
