"""What a plan file says its plan will take: read for comparison with what is found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import DocumentError
from autopar.jsonio import shorten

__all__ = ["PredictedStage", "Prediction", "read_prediction"]


@dataclass(frozen=True, kw_only=True)
class PredictedStage:
    """Predicted time and memory of a rank of one stage."""

    forward_s: float | None = None
    """One micro-batch, without transfers; None where the file says memory alone."""
    backward_s: float | None = None
    tail_s: float | None = None
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: int | None = None
    memory_bytes: Mapping[str, int]
    """By category; sums to `allocated_bytes`. Empty where the file has none."""

    @property
    def tensor_bytes(self) -> int | None:
        """What tensors take of `allocated_bytes`: all but the buffers of communicators."""
        if self.allocated_bytes is None:
            return None
        return self.allocated_bytes - self.memory_bytes.get("fixed", 0)

    def step_times(self, num_microbatches: int) -> dict[str, float] | None:
        """Return seconds of a step: all forwards, all backwards, and what follows once.

        None where the file says memory alone.
        """
        if self.forward_s is None or self.backward_s is None:
            return None
        return {
            "forward_s": num_microbatches * self.forward_s,
            "backward_s": num_microbatches * self.backward_s,
            "tail_s": self.tail_s or 0.0,
        }


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A step of the plan as the search priced it."""

    step_time_s: float | None
    interval_s: tuple[float, float] | None
    """The step time within the spread of its measurements; None where none was measured."""
    stages: tuple[PredictedStage, ...]
    """One per stage, or none at all."""
    basis: str | None
    """What the figures rest on where it is no measurement; None where it is one, or unknown."""
    fp32_gradients: bool | None = None
    """Whether gradients of a bf16 run are predicted with 4 bytes, else 2; None: it is not said."""


def read_prediction(
    path: Path, document: Mapping[str, object], *, num_stages: int
) -> Prediction | None:
    """Return the prediction in a plan file or in what `autopar-search --json` printed.

    None where there is none, as in strategy files. Raises DocumentError on an unusable value.
    """
    if "step_time_s" not in document:
        return None
    reader = _Reader(path)
    detail = document.get("prediction")
    inner: Mapping[str, object] = {}
    if detail is not None:
        inner = reader.mapping("prediction", detail)
    interval = inner.get("step_time_interval_s", document.get("step_time_interval_s"))
    # a plan file has its stages under `prediction`, the printed object only their memory
    rows = inner.get("stages", document.get("memory"))
    stages = reader.stages(rows, num_stages) if rows else ()
    step_time_s = reader.number("step_time_s", document["step_time_s"])
    if step_time_s is None and not stages:
        return None
    return Prediction(
        step_time_s=step_time_s,
        interval_s=reader.interval("step_time_interval_s", interval),
        stages=stages,
        basis=_basis(document),
        fp32_gradients=reader.flag("options", "fp32_gradients", document),
    )


def _basis(document: Mapping[str, object]) -> str | None:
    if document.get("synthetic") is True:
        return "numbers that only exercise the code"
    if document.get("estimated") is True:
        return "estimates from datasheets, not on measurements of this machine"
    return None


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, key: str, value: object, expected: str) -> DocumentError:
        return DocumentError(
            self.path,
            f"expected {expected}, got {shorten(value)}",
            key=key,
            remedy="write the plan again with autopar-search",
        )

    def mapping(self, key: str, value: object) -> Mapping[str, object]:
        if not isinstance(value, Mapping):
            raise self.fail(key, value, "an object")
        return value

    def number(self, key: str, value: object) -> float | None:
        """Return a number of seconds or bytes; None for null."""
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, value, "a number")
        if not (math.isfinite(value) and value >= 0):
            raise self.fail(key, value, "a number of at least 0")
        return float(value)

    def flag(self, where: str, key: str, document: Mapping[str, object]) -> bool | None:
        """Return a flag of an object of the document; None where either is missing."""
        value = self.mapping(where, document.get(where, {})).get(key)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{where}.{key}", value, "true or false")
        return value

    def interval(self, key: str, value: object) -> tuple[float, float] | None:
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise self.fail(key, value, "two numbers")
        low, high = (self.number(key, item) for item in value)
        return None if low is None or high is None else (low, high)

    def stages(self, value: object, num_stages: int) -> tuple[PredictedStage, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != num_stages:
            raise self.fail("stages", value, f"a list of {num_stages} stages")
        return tuple(self._stage(index, item) for index, item in enumerate(value))

    def _stage(self, index: int, value: object) -> PredictedStage:
        where = f"stages[{index}]"
        row = self.mapping(where, value)
        times: dict[str, Any] = {
            key: self.number(f"{where}.{key}", row.get(key))
            for key in ("forward_s", "backward_s", "tail_s")
        }
        allocated = self.number(f"{where}.allocated_bytes", row.get("allocated_bytes"))
        parts = self.mapping(f"{where}.memory_bytes", row.get("memory_bytes", {}))
        memory = {key: self.number(f"{where}.{key}", item) or 0.0 for key, item in parts.items()}
        return PredictedStage(
            **times,
            allocated_bytes=None if allocated is None else int(allocated),
            memory_bytes={key: int(item) for key, item in memory.items()},
        )
