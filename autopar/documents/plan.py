"""Reads and writes plans: our own plan file, what `--json` prints, and anyone's strategy file.

The first two hold a plan and what was predicted of it. Each is a class here, with its keys in the
order in which they are written. Whoever reads a plan calls `read_strategy`, or `PlanDocument.read`,
which takes any of the three; nothing else knows their keys. How a strategy is spelt, which stands
under `plan`, is the matter of `autopar.documents.strategy`. Writing is atomic and depends on the
content only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Meta, Struct, field
from msgspec.structs import asdict

from autopar.documents.catalog import located_options
from autopar.documents.checks import check_version, published
from autopar.documents.json import (
    load_object,
    read_record,
)
from autopar.documents.strategy import Strategy, galvatron_document, parse_strategy
from autopar.errors import DocumentError
from autopar.output import write_text
from autopar.records import Entry
from autopar.run.plan import PUBLISHED_RUNS, Infeasibility, Plan, Prediction, StagePrediction
from autopar.sources import Source

# --- values ----------------------------------------------------------------------------------


# what is read is written again as it was: an integer becomes no float
_Number = Annotated[float, Meta(extra={"expected": "a number", "as_written": True})]
_Amount = Annotated[
    float, Meta(ge=0, extra={"expected": "a number of at least 0", "as_written": True})
]
"""Seconds, bytes or samples per second."""
_Count = Annotated[int, Meta(ge=0, extra={"expected": "a whole number of at least 0"})]
_Flag = bool
_Text = str
_Interval = Annotated[
    list[_Amount | None],
    Meta(min_length=2, max_length=2, extra={"expected": "two numbers of at least 0"}),
]
_Pair = Annotated[list[_Count], Meta(min_length=2, max_length=2)]
_Typed = Annotated[
    bool | str | list[str], Meta(extra={"expected": "a text, true, false or a list of texts"})
]


class _Entry(Entry):
    """An object of a document; null is what is unknown or not finite."""


# --- what is predicted -----------------------------------------------------------------------


class LayerRunEntry(_Entry):
    """Consecutive layers of a stage with the same type and strategy."""

    first_layer: _Count
    num_layers: _Count
    layer_type: _Count
    label: _Text
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: dict[str, _Number | None]
    """Seconds of one micro-batch by category and, per step, `tail` and `optimizer`; sums over the
    run."""
    memory_bytes: dict[str, _Number | None]
    """By category on this stage."""


class StageEntry(_Entry):
    """A pipeline stage; its ranks are alike, so one entry stands for all of them."""

    ranks: _Pair | None = None
    """First and last."""
    memory_interval_bytes: _Pair | None = None
    """Allocated and reserved."""
    stage: _Count | None = None
    forward_s: _Amount | None = None
    """One micro-batch, without transfers."""
    backward_s: _Amount | None = None
    send_s: _Amount | None = None
    """Transfer of one micro-batch's activation to the next stage."""
    tail_s: _Amount | None = None
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None
    odds_of_oom: _Amount | None = None
    """Of a device of the budget running out of memory."""
    in_flight: _Count | None = None
    """Micro-batches whose activations are kept at once."""
    memory_bytes: dict[str, _Count] = field(default_factory=dict)
    """By category; sums to `allocated_bytes`."""
    time_s: dict[str, _Number | None] = field(default_factory=dict)
    """Seconds of one micro-batch by category."""
    runs: list[LayerRunEntry] = field(default_factory=list)

    @classmethod
    def of(cls, stage: StagePrediction, ranks: int) -> Self:
        """Return the entry of a stage with so many ranks."""
        # ranks of a stage follow one another
        first = stage.stage * ranks
        content = plain(stage)
        content["runs"] = [LayerRunEntry(**run) for run in content["runs"]]
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


class WidestCellEntry(_Entry):
    """The measured time whose spread moves the step time most."""

    name: _Text
    share: _Number | None
    """Of the variance of the step time that the spread of computation causes."""


class ThroughputEntry(_Entry):
    """A step in the units of training logs, of one GPU; intervals are null where none is known."""

    tokens_per_s_per_gpu: _Amount
    tokens_per_s_per_gpu_interval: _Interval | None = None
    """Slow and fast end, as of all rates here."""
    flop_per_s_per_gpu: _Amount | None = None
    """FLOP of the model as Megatron-LM counts them, recomputation left out; null: unknown sizes."""
    flop_per_s_per_gpu_interval: _Interval | None = None
    mfu: _Amount | None = None
    """The same over the dense 16-bit peak of the card, 0 to 1."""
    mfu_interval: _Interval | None = None
    hfu: _Amount | None = None
    """With what is computed again."""
    hfu_interval: _Interval | None = None
    gpu_hours_per_billion_tokens: _Amount
    gpu_hours_per_billion_tokens_interval: _Interval | None = None
    """Few and many."""
    cost_per_billion_tokens: _Amount | None = None
    """At the price of a GPU-hour that was given."""
    cost_per_billion_tokens_interval: _Interval | None = None


class PredictionEntry(_Entry):
    """What was predicted of the plan besides the figures at the top of the document."""

    step_time_interval_s: _Interval | None = None
    """Fast and slow; null where no spread was measured."""
    interval_of: list[_Text] = field(default_factory=list)
    """What the interval is the measured spread of, where computation is a part of it."""
    widest_cell: WidestCellEntry | None = None
    """The measurement of computation to repeat first."""
    waterfall_s: dict[str, _Number | None] = field(default_factory=dict)
    """The step time split into named parts."""
    problems: list[_Text] = field(default_factory=list)
    """Why the plan is illegal or does not fit, each with its arithmetic."""
    stages: list[StageEntry] = field(default_factory=list)

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
    if PUBLISHED_RUNS in prediction.interval_of:
        return {"interval_of": list(prediction.interval_of)}
    if "computation" not in prediction.interval_of:
        return {}
    widest = prediction.widest_cell
    return {
        "interval_of": list(prediction.interval_of),
        "widest_cell": None if widest is None else WidestCellEntry(**plain(widest)),
    }


# --- what else is found and kept -------------------------------------------------------------


class AlternativeEntry(_Entry):
    """The best plan that differs in kind from every better one."""

    differs_by: _Text
    step_time_s: _Amount | None
    samples_per_s: _Amount | None
    bound_samples_per_s: _Amount | None
    probability_faster: _Number | None = None
    """Share of the replicas of computation in which it wins; absent without spread."""
    plan: Strategy


class OptionsEntry(Entry, forbid_unknown_fields=False):
    """Everything that shaped the result, in base units; these keys are read, the others kept."""

    mixed_precision: _Text | None = None
    sequence_parallel: _Flag | None = None
    """Megatron sequence parallelism of tensor-parallel layers."""
    async_grad_reduce: _Flag | None = None
    """Gradients are reduced once per step, else in every micro-batch."""
    fp32_gradients: _Flag | None = None
    """Gradients of a bf16 run take 4 bytes, else 2."""
    engine: _Text | None = None
    """Whose plans were searched, where it was said."""

    def content(self) -> dict[str, Any]:
        """Return the options that were given, by name."""
        return dict(sorted(super().content().items()))


class VersionsEntry(_Entry):
    """What the plan was computed with."""

    autopar: _Text
    """The release."""
    core_interface: _Count | None = None
    """The interface version of the compiled core."""


class MemoryEntry(_Entry):
    """Memory per rank of one stage."""

    stage: _Count | None = None
    allocated_bytes: _Count | None = None
    reserved_bytes: _Count | None = None
    budget_bytes: _Count | None = None
    odds_of_oom: _Amount | None = None
    """Of a device of the budget running out of memory."""


class StatisticsEntry(_Entry):
    """What a search did."""

    states: _Count
    cpu_s: _Amount
    wall_s: _Amount


class BrokenRuleEntry(_Entry):
    """A rule that is broken."""

    id: _Text
    """Stable name, such as `grid.dense`; docs/reference/rules.md lists all."""
    values: dict[str, Any]
    """What the rule reads, by name."""
    text: _Text


class EngineEntry(_Entry):
    """The fastest plan or launch that one engine runs as it is, or why there is none."""

    engine: _Text
    samples_per_s: _Amount | None = None
    plan: Strategy | None = None
    """Whose layers may differ; null where a launch was searched."""
    launch: dict[str, Any] | None = None
    """Every degree of a launch, as `launch.degrees` of its file."""
    options: _Text | None = None
    """What the search of that plan has beside what was typed."""
    reason: _Text | None = None
    rules: list[BrokenRuleEntry] | None = None
    """Rules that leave no launch, where these are the reason."""


class FrontierEntry(_Entry):
    """The best plan at one memory constraint."""

    memory_constraint_bytes: _Amount | None
    samples_per_s: _Amount | None
    step_time_s: _Amount | None
    plan: Strategy


# --- from nouns to JSON ----------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a value as JSON has it: records as objects, what is not finite as null."""
    if isinstance(value, Struct):
        value = asdict(value)
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


# --- the documents ---------------------------------------------------------------------------

PLAN_FILE_FORMAT: Final = "autopar-plan"
# History of the format; `PlanDocument.parse` is the one place that brings older ones up to date.
#   1  first version
PLAN_FILE_VERSION: Final = 1
PeakSource = Literal["allocated", "counted"]
"""Who says the most memory of a step: torch's CUDA allocator, or a count of the model's tensors."""

_REMEDY = "write the plan again with autopar-search"


class _Answer(_Entry):
    """What both documents begin with."""

    status: _Text | None = None
    """`optimal`, `time_limit`, `infeasible`, or `evaluated`: a plan that was priced."""
    legal: _Flag | None = None
    fits: _Flag | None = None
    step_time_s: _Amount | None = None
    replay_s: _Amount | None = None
    """The step time of a simulation of the schedule."""
    samples_per_s: _Amount | None = None
    bound_samples_per_s: _Amount | None = None
    """No plan is faster."""
    gap: _Number | None = None
    """(bound - found) / found; 0 when optimal."""
    throughput: ThroughputEntry | None = None
    """The step in the units of training logs; absent without a step."""


# without them a file is not ours; a document made in Python has them from here
@published("plan", required=("format", "version"))
class PlanDocument(_Answer):
    """Our own plan file (`autopar_plan_*.json`): a plan, its prediction and what both rest on."""

    format: Literal["autopar-plan"] = PLAN_FILE_FORMAT
    version: Literal[1] = PLAN_FILE_VERSION
    plan: Strategy | None = None
    """Null where the search found none."""
    prediction: PredictionEntry | None = None
    alternatives: list[AlternativeEntry] = field(default_factory=list)
    infeasibility: Infeasibility | None = None
    defaults_used: list[_Text] = field(default_factory=list)
    notes: list[_Text] = field(default_factory=list)
    """Derived, extrapolated or estimated inputs, in plain words."""
    estimated: _Flag = False
    """The numbers rest on datasheets."""
    synthetic: _Flag = False
    """Some input exercises the code and describes no machine."""
    inputs: list[Source] = field(default_factory=list)
    options: OptionsEntry = field(default_factory=OptionsEntry)
    request: dict[str, _Typed] = field(default_factory=dict)
    """The options as typed, by name without hyphens in front."""
    engines: list[EngineEntry] = field(default_factory=list)
    """Each one's own best, from the fastest on, where several were looked at."""
    versions: VersionsEntry | None = None

    @classmethod
    def read(cls, path: Path | str) -> PlanDocument:
        """Return what a plan file, anyone's strategy file or a printed result says.

        Raises
        ------
        DocumentError
            When it is missing, is not JSON, was written by a newer version or holds an unusable
            value. What is wrong with the strategy itself, `read_strategy` says.
        """
        loaded = load_object(path, remedy="autopar-search writes such a file")
        return cls.parse(loaded.data, path)

    @classmethod
    def parse(cls, data: Mapping[str, Any], path: Path | str = "plan") -> PlanDocument:
        """Return what an object says, as `read` does; `path` is for errors."""
        if "format" in data:
            check_version(
                path,
                data,
                PLAN_FILE_FORMAT,
                PLAN_FILE_VERSION,
                give="give a plan or strategy file",
                again="search again",
            )
            return read_record(cls, path, data, remedy=_REMEDY)
        if "status" in data or isinstance(data.get("plan"), Mapping):
            read = {key: value for key, value in data.items() if key in _READ_OF_RESULTS}
            return read_record(ResultDocument, path, read, remedy=_REMEDY).as_plan_document()
        # a strategy file is the plan alone
        return cls(plan=dict(data))

    def write(self, path: Path | str) -> None:
        """Write the plan file atomically, byte for byte reproducibly; raises DocumentError."""
        write_document(path, self.content())

    def content(self) -> dict[str, Any]:
        """Return the object of the file: what it is, the plan, and then the figures."""
        content = {"format": self.format, "version": self.version, "plan": self.plan}
        return content | super().content()

    def located_request(
        self, path: Path | str, typed: Collection[str] = ()
    ) -> tuple[dict[str, bool | str | list[str]], list[str]]:
        """Return the request with inputs where they are found, as `located_options` has it."""
        return located_options(self.request, path, typed)

    @property
    def is_strategy(self) -> bool:
        """True for a strategy file, which holds a plan and says nothing else."""
        return self.given == {"plan"}

    @property
    def stages(self) -> list[StageEntry]:
        """The predicted stages; empty where there are none."""
        return [] if self.prediction is None else self.prediction.stages

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """The step time within the spread of its measurements; None where none was measured."""
        ends = self.prediction.step_time_interval_s if self.prediction is not None else None
        low, high = ends or (None, None)
        return None if low is None or high is None else (low, high)

    @property
    def basis(self) -> str | None:
        """What the figures rest on where it is no measurement; None where it is, or unknown."""
        if self.synthetic:
            return "numbers that only exercise the code"
        if self.estimated:
            return "estimates from datasheets, not on measurements of this machine"
        return None

    def changed_inputs(self, sources: Sequence[Source]) -> list[str]:
        """Return the names of inputs that are no longer those that the plan was made from."""
        digests = {item.role: item.sha256 for item in self.inputs}
        changed = []
        for source in sources:
            old = digests.get(source.role)
            # estimates and older files have no digest to compare
            if old and source.sha256 and old != source.sha256:
                changed.append(Path(source.path).name)
        return list(dict.fromkeys(changed))  # a card is read for times and for bandwidths

    def peak_bytes(self, source: PeakSource) -> list[int | None]:
        """Return by stage what is predicted of a peak that somebody measured, in bytes.

        source : `allocated` by torch's CUDA allocator, or `counted` tensors of the model.
        """
        if self.holds_buffers(source):
            return [stage.allocated_bytes for stage in self.stages]
        return [stage.tensor_bytes for stage in self.stages]

    def holds_buffers(self, source: PeakSource) -> bool:
        """Return whether a measured peak holds what is predicted as `fixed`.

        The allocator gives out the receive buffers of pipelines, a count has the tensors of the
        model alone. Neither has the communicators, which are predicted in one figure with those
        buffers where the figures rest on estimates.
        """
        return source == "allocated" and self.basis is None


class AnswerErrorEntry(_Entry):
    """Why a command has no answer."""

    kind: Literal[
        "option",
        "document",
        "input",
        "infeasible",
        "installation",
        "failure",
        "interrupted",
        "internal",
    ]
    message: _Text
    """The sentence on stderr."""
    file: _Text | None = None
    """Of a document: its path."""
    key: _Text | None = None
    """Of a document: where in it."""
    remedy: _Text | None = None
    """Of a document: what to do."""
    rules: list[BrokenRuleEntry] | None = None
    """Of an input that breaks rules of a run: which."""


_ANSWER_EXAMPLE: dict[str, Any] = {
    "schema": "autopar/answer/1",
    "command": "autopar-search",
    "release": "0.1.0",
    "exit_code": 2,
    "question": {"model": "llama3-8b", "hardware": "h100"},
    "notices": [],
    "error": {"kind": "option", "message": "--hardware h100: expected CARD:NODESxGPUS"},
}


@published("answer", example=_ANSWER_EXAMPLE)
class AnswerDocument(Entry, forbid_unknown_fields=False):
    """What `--json` of every command gives: these keys, then `error` or those of the command.

    The rest is by command (`allOf`): `LaunchAnswer` or `PlanAnswer` of autopar-search and
    autopar-explain, an `exploration` of autopar-explore; docs/json.md has the others.
    """

    schema_: Literal["autopar/answer/1"] = field(name="schema")
    command: _Text
    release: _Text
    """Of autopar."""
    exit_code: _Count
    """What the command ends with; docs/json.md has the table."""
    question: dict[str, Any]
    """Options as they were given, without those of files to write."""
    notices: list[_Text]
    """Sentences that the command says beside its answer, before it."""
    error: AnswerErrorEntry | None = None


@published("result")
class ResultDocument(_Answer):
    """The object that `autopar-search --json` prints; some keys are there only where they apply."""

    memory: list[MemoryEntry] = field(default_factory=list)
    plan: Strategy | None = None
    alternatives: list[AlternativeEntry] = field(default_factory=list)
    defaults_used: list[_Text] = field(default_factory=list)
    search: StatisticsEntry | None = None
    problems: list[_Text] = field(default_factory=list)
    """Of a plan that was priced: why it is illegal or does not fit."""
    prediction: PredictionEntry | None = None
    estimated: _Flag = False
    options: OptionsEntry = field(default_factory=OptionsEntry)
    request: dict[str, _Typed] = field(default_factory=dict)
    step_time_interval_s: _Interval | None = None
    interval_of: list[_Text] = field(default_factory=list)
    widest_cell: WidestCellEntry | None = None
    synthetic: _Flag = False
    infeasible: Infeasibility | None = None
    frontier: list[FrontierEntry] = field(default_factory=list)
    engines: list[EngineEntry] = field(default_factory=list)
    """From the fastest on, where all were looked at."""

    def as_plan_document(self) -> PlanDocument:
        """Return the plan file that says the same; a search prints memory and no times."""
        prediction = self.prediction
        if prediction is None and (self.memory or self.step_time_interval_s is not None):
            prediction = PredictionEntry(
                step_time_interval_s=self.step_time_interval_s,
                stages=[StageEntry(**asdict(row)) for row in self.memory],
            )
        same = {key: getattr(self, key) for key in self.given & _SAME}
        return PlanDocument(**same, prediction=prediction)


_FIELDS = frozenset(PlanDocument.__struct_fields__)
_SAME = _FIELDS & frozenset(ResultDocument.__struct_fields__) - {"prediction"}
_READ_OF_RESULTS = _SAME | {"prediction", "memory", "step_time_interval_s"}
"""Exports print their plans likewise, with other things under other keys."""


def document_text(document: Mapping[str, object]) -> str:
    """Return the text of a JSON document, keys in the given order."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def write_document(path: Path | str, document: Mapping[str, object]) -> None:
    """Write a JSON document atomically, keys in the given order.

    Raises
    ------
    DocumentError
        When the file cannot be written.
    """
    target = Path(path)
    try:
        write_text(target, document_text(document))
    except OSError as error:
        raise DocumentError(
            target,
            f"cannot be written ({error.strerror or error})",
            remedy="choose another --output-config-path",
        ) from None


# --- strategies as files ---------------------------------------------------------------------


def write_strategy(plan: Plan, path: Path | str) -> None:
    """Write the strategy file of a plan, atomically; InputError where it cannot say all of it."""
    write_document(path, galvatron_document(plan))


def read_strategy(
    source: Path | str | Mapping[str, object] | PlanDocument,
    *,
    world_size: int | None = None,
    num_layers: int | None = None,
    path: Path | str = "plan",
) -> Plan:
    """Return the plan in a strategy file, a plan file or the content of either.

    Parameters
    ----------
    world_size : number of GPUs for files that do not say it; when both are known the file wins.
    num_layers : layers of the model, for files that do not say them.
    path : where a content comes from, for errors.

    Raises
    ------
    DocumentError
        On any unusable value, naming the key, the value and what was expected.
    """
    if isinstance(source, PlanDocument):
        document = source
    elif isinstance(source, Mapping):
        document = PlanDocument.parse(source, path)
    else:
        path, document = source, PlanDocument.read(source)
    if document.plan is None:
        raise DocumentError(
            path,
            "holds no plan, because the search found none that fits",
            key="plan",
            remedy="search again with a larger --memory-constraint",
        )
    return parse_strategy(document.plan, path, world_size, num_layers)
