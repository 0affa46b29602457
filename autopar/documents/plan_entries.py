"""The parts of a document that holds a plan: what was predicted per stage and layer run, the other
plans, inputs, options, each with its keys in the order in which they are written.

The documents themselves, and their reading and writing, are in `plan_documents`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from autopar.documents.checks import StrictObject, Value
from autopar.plans import Plan, Prediction, StagePrediction

__all__ = [
    "AlternativeEntry",
    "Amount",
    "Entry",
    "Flag",
    "FrontierEntry",
    "InfeasibilityEntry",
    "InputEntry",
    "Interval",
    "LayerRunEntry",
    "MemoryEntry",
    "Number",
    "OptionsEntry",
    "PredictionEntry",
    "StageEntry",
    "StatisticsEntry",
    "Strategy",
    "Text",
    "Typed",
    "VersionsEntry",
    "WidestCellEntry",
    "finite",
    "plain",
    "spread_of",
]

# --- values ----------------------------------------------------------------------------------


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_amount(value)


def _is_interval(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(item is None or _is_amount(item) for item in value)


def _is_typed(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, bool | str)


_AMOUNT_SCHEMA = {"type": "number", "minimum": 0}
_INTEGER = {"type": ["integer", "string"]}
_SWITCH = {"type": ["integer", "boolean", "string"], "description": "0 or 1."}
_LIST = {"type": ["string", "array", "integer"]}
_STRATEGY_SCHEMA = {
    "type": "object",
    "description": "The strategy file of a plan: comma lists have an entry per layer. These keys "
    "are written; those of other releases are read as well.",
    "properties": {
        "pp_deg": _INTEGER,
        "tp_sizes_enc": _LIST,
        "tp_consecutive_flags": _LIST,
        "dp_types_enc": _LIST,
        "use_sp": _LIST,
        "cp_sizes_enc": _LIST,
        "checkpoint": _LIST,
        "world_size": _INTEGER,
        "global_bsz": _INTEGER,
        "chunks": _INTEGER,
        "pp_division": {**_LIST, "description": "Layers of every stage."},
        "pipeline_type": {"enum": ["pipedream_flush", "1f1b", "gpipe"]},
        "default_dp_type": {"enum": ["ddp", "zero2"]},
        "vtp": _INTEGER,
        "vsp": _SWITCH,
        "embed_sdp": _SWITCH,
        "vocab_sdp": _SWITCH,
    },
}

Number = Annotated[float, Value("a number", _is_number, {"type": "number"})]
Amount = Annotated[float, Value("a number of at least 0", _is_amount, _AMOUNT_SCHEMA)]
"""Seconds, bytes or samples per second."""
_Count = Annotated[
    int, Value("a whole number of at least 0", _is_count, {"type": "integer", "minimum": 0})
]
Flag = Annotated[
    bool, Value("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})
]
Text = Annotated[str, Value("a text", lambda value: isinstance(value, str), {"type": "string"})]
Interval = Annotated[
    list[float | None],
    Value(
        "two numbers of at least 0",
        _is_interval,
        {
            "type": "array",
            "items": {"anyOf": [_AMOUNT_SCHEMA, {"type": "null"}]},
            "minItems": 2,
            "maxItems": 2,
        },
    ),
]
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]
Typed = Annotated[
    bool | str | list[str],
    Value(
        "a text, true, false or a list of texts",
        _is_typed,
        {
            "anyOf": [
                {"type": "string"},
                {"type": "boolean"},
                {"type": "array", "items": {"type": "string"}},
            ]
        },
    ),
]
Strategy = Annotated[
    dict[str, Any],
    Value("an object", lambda value: isinstance(value, Mapping), _STRATEGY_SCHEMA),
]


class Entry(StrictObject):
    """An object of a document; null is what is unknown or not finite."""

    def content(self) -> dict[str, Any]:
        """Return the object as it is written: the keys that were given, in their order."""
        return self.model_dump(exclude_unset=True)


# --- what is predicted -----------------------------------------------------------------------


class LayerRunEntry(Entry):
    """Consecutive layers of a stage with the same type and strategy."""

    first_layer: _Count
    num_layers: _Count
    layer_type: _Count
    label: Text
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: dict[str, Number | None]
    """Seconds of one micro-batch by category and, per step, `tail` and `optimizer`; sums over the
    run."""
    memory_bytes: dict[str, Number | None]
    """By category on this stage."""


class StageEntry(Entry):
    """A pipeline stage; its ranks are alike, so one entry stands for all of them."""

    ranks: _Pair | None = None
    """First and last."""
    memory_interval_bytes: _Pair | None = None
    """Allocated and reserved."""
    stage: _Count | None = None
    forward_s: Amount | None = None
    """One micro-batch, without transfers."""
    backward_s: Amount | None = None
    send_s: Amount | None = None
    """Transfer of one micro-batch's activation to the next stage."""
    tail_s: Amount | None = None
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None
    in_flight: _Count | None = None
    """Micro-batches whose activations are kept at once."""
    memory_bytes: dict[str, _Count] = Field(default_factory=dict)
    """By category; sums to `allocated_bytes`."""
    time_s: dict[str, Number | None] = Field(default_factory=dict)
    """Seconds of one micro-batch by category."""
    runs: list[LayerRunEntry] = Field(default_factory=list)

    @classmethod
    def of(cls, stage: StagePrediction, ranks: int) -> Self:
        """Return the entry of a stage with so many ranks."""
        # ranks of a stage follow one another
        first = stage.stage * ranks
        content = plain(stage)
        interval = [content["allocated_bytes"], content["reserved_bytes"]]
        return cls(ranks=[first, first + ranks - 1], memory_interval_bytes=interval, **content)

    @property
    def tensor_bytes(self) -> int | None:
        """What tensors take of `allocated_bytes`: all but the buffers of communicators."""
        if self.allocated_bytes is None:
            return None
        return self.allocated_bytes - self.memory_bytes.get("fixed", 0)

    def step_times(self, num_microbatches: int) -> dict[str, float] | None:
        """Return seconds of a step: all forwards, all backwards, and what follows once.

        None where the document says memory alone.
        """
        if self.forward_s is None or self.backward_s is None:
            return None
        return {
            "forward_s": num_microbatches * self.forward_s,
            "backward_s": num_microbatches * self.backward_s,
            "tail_s": self.tail_s or 0.0,
        }


class WidestCellEntry(Entry):
    """The measured time whose spread moves the step time most."""

    name: Text
    share: Number | None
    """Of the variance of the step time that the spread of computation causes."""


class PredictionEntry(Entry):
    """What was predicted of the plan besides the figures at the top of the document."""

    step_time_interval_s: Interval | None = None
    """Fast and slow; null where no spread was measured."""
    interval_of: list[Text] = Field(default_factory=list)
    """What the interval is the measured spread of, where computation is a part of it."""
    widest_cell: WidestCellEntry | None = None
    """The measurement of computation to repeat first."""
    waterfall_s: dict[str, Number | None] = Field(default_factory=dict)
    """The step time split into named parts."""
    problems: list[Text] = Field(default_factory=list)
    """Why the plan is illegal or does not fit, each with its arithmetic."""
    stages: list[StageEntry] = Field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, prediction: Prediction) -> Self:
        """Return the entry of a prediction."""
        ranks = plan.world_size // plan.num_stages
        return cls(
            step_time_interval_s=plain(prediction.step_time_interval_s),
            **spread_of(prediction),
            waterfall_s=plain(prediction.waterfall_s),
            problems=list(prediction.problems),
            stages=[StageEntry.of(stage, ranks) for stage in prediction.stages],
        )


def spread_of(prediction: Prediction) -> dict[str, Any]:
    """Return the keys that say what the spread of computation adds, none where it is unknown."""
    if "computation" not in prediction.interval_of:
        return {}
    return {
        "interval_of": list(prediction.interval_of),
        "widest_cell": plain(prediction.widest_cell),
    }


# --- what else is found and kept -------------------------------------------------------------


class AlternativeEntry(Entry):
    """The best plan that differs in kind from every better one."""

    differs_by: Text
    step_time_s: Amount | None
    samples_per_s: Amount | None
    bound_samples_per_s: Amount | None
    probability_faster: Number | None = None
    """Share of the replicas of computation in which it wins; absent without spread."""
    plan: Strategy


class InfeasibilityEntry(Entry):
    """Why nothing fits: the plan nearest to fitting and what it lacks."""

    stage: int
    num_stages: int
    missing_bytes: int
    smallest_budget_bytes: int
    """The smallest memory constraint per GPU for which a plan exists; 0: none."""
    reason: Text


class InputEntry(Entry):
    """One input, by the SHA-256 of its bytes; empty where it was estimated."""

    role: Text
    path: Text
    sha256: Text = ""
    estimated: Flag = False
    synthetic: Flag = False
    notes: list[Text] = Field(default_factory=list)


class OptionsEntry(BaseModel):
    """Everything that shaped the result, in base units; these keys are read, the others kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    mixed_precision: Text | None = None
    sequence_parallel: Flag | None = None
    """Megatron sequence parallelism of tensor-parallel layers."""
    async_grad_reduce: Flag | None = None
    """Gradients are reduced once per step, else in every micro-batch."""
    fp32_gradients: Flag | None = None
    """Gradients of a bf16 run take 4 bytes, else 2."""

    @model_serializer(mode="wrap")
    def _sorted(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return dict(sorted(handler(self).items()))


class VersionsEntry(Entry):
    """What the plan was computed with."""

    autopar: Text
    """The release."""
    core_interface: _Count | None = None
    """The interface version of the compiled core."""


class MemoryEntry(Entry):
    """Memory per rank of one stage."""

    stage: _Count | None = None
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None


class StatisticsEntry(Entry):
    """What a search did."""

    states: _Count
    cpu_s: Amount
    wall_s: Amount


class FrontierEntry(Entry):
    """The best plan at one memory constraint."""

    memory_constraint_bytes: Amount | None
    samples_per_s: Amount | None
    step_time_s: Amount | None
    plan: Strategy


# --- from nouns to JSON ----------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as objects, what is not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # bool first: it is an int in Python
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return finite(value)
    if hasattr(value, "item"):  # numpy scalars
        return plain(value.item())
    return str(value)


def finite(value: float) -> float | None:
    """Return a number, None where it is not finite: JSON has neither NaN nor infinity."""
    return float(value) if math.isfinite(value) else None
