"""What the runs of the plans found, beside what was predicted of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten

__all__ = ["MeasuredPlan", "RunSamples", "predicted_bytes", "read_priced", "read_run"]


@dataclass(frozen=True, kw_only=True)
class RunSamples:
    """One start of one plan."""

    step_s: tuple[float, ...]
    """Of every timed step, the slowest rank's."""
    peak_bytes: tuple[int, ...]
    """By rank; empty where it was not said."""
    peak_source: str = "counted"


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """A plan with its prediction and its runs, one per round."""

    name: str
    label: str
    chosen: str
    predicted_s: float
    predicted_bytes: tuple[int, ...]
    """By stage, of what `peak_bytes` holds."""
    rounds: tuple[RunSamples, ...]
    strategy: Mapping[str, Any]
    """The strategy file."""
    interval_s: tuple[float, float] | None = None
    """Of the prediction, by the spread of the profiles."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """By stage: the most on one of its ranks in any round; empty where it was not said."""
        columns = [run.peak_bytes for run in self.rounds if run.peak_bytes]
        if not columns:
            return ()
        by_rank = [max(values) for values in zip(*columns, strict=True)]
        each = len(by_rank) // len(self.predicted_bytes)
        return tuple(
            max(by_rank[stage * each : (stage + 1) * each])
            for stage in range(len(self.predicted_bytes))
        )

    @property
    def peak_source(self) -> str:
        """Who said the peaks: `allocated` by the device's allocator, or `counted`."""
        return self.rounds[0].peak_source


def read_priced(path: Path) -> dict[str, Any]:
    """Return the answer of `autopar-search --evaluate --json`: time, memory by stage, strategy.

    Raises
    ------
    DocumentError : the plan has no price.
    """
    data = load_object(path).data
    if not _is_time(data.get("step_time_s")):
        raise DocumentError(
            path,
            f"expected a time above 0, got {shorten(data.get('step_time_s'))}",
            key="step_time_s",
            remedy="run again with --no-resume",
        )
    return data


def predicted_bytes(path: Path, priced: Mapping[str, Any], peak_source: str) -> tuple[int, ...]:
    """Return what is predicted of the peak of each stage, in bytes.

    A count has the tensors of the model alone, so `fixed` (receive buffers and, of estimates,
    communicators) is left out. A CUDA allocator has the receive buffers too: there all counts, as
    what communicators take beside the allocator is predicted of estimates only.

    Raises
    ------
    DocumentError : the price says nothing of a stage.
    """
    try:
        stages = priced["prediction"]["stages"]
        found = tuple(
            int(stage["allocated_bytes"])
            - (int(stage["memory_bytes"]["fixed"]) if peak_source == "counted" else 0)
            for stage in stages
        )
    except (KeyError, TypeError, ValueError):
        raise _unpriced(path, priced) from None
    if not found or min(found) <= 0:
        raise _unpriced(path, priced)
    return found


def _unpriced(path: Path, priced: Mapping[str, Any]) -> DocumentError:
    detail = priced.get("prediction")
    stages = detail.get("stages") if isinstance(detail, Mapping) else detail
    return DocumentError(
        path,
        f"expected allocated_bytes and memory_bytes of every stage, got {shorten(stages)}",
        key="prediction.stages",
        remedy="run again with --no-resume",
    )


def read_run(path: Path, num_ranks: int) -> RunSamples:
    """Return what `profile-plan --mode run --json` wrote.

    Raises
    ------
    DocumentError : it has no times, or figures of another number of ranks.
    """
    data = load_object(path).data
    times, peaks = data.get("step_time_s"), data.get("peak_bytes") or []
    if not isinstance(times, list) or not times or not all(map(_is_time, times)):
        raise DocumentError(
            path,
            f"expected times above 0, got {shorten(times)}",
            key="step_time_s",
            remedy="run again with --no-resume",
        )
    if not isinstance(peaks, list) or len(peaks) not in (0, num_ranks):
        raise DocumentError(
            path,
            f"expected a number for each of {num_ranks} ranks, got {shorten(peaks)}",
            key="peak_bytes",
        )
    known = all(isinstance(peak, int) and peak > 0 for peak in peaks)
    return RunSamples(
        step_s=tuple(float(time) for time in times),
        peak_bytes=tuple(peaks) if known else (),
        peak_source=str(data.get("peak_source", "counted")),
    )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0.0
